"""One stack of the real engine for the whole test session; see `engine_stack`."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import image_kit
from engine_prompts import PLAIN_ARGS, THREADS, VLLM_ARGS, Oracle, knowing_drafts, short_folder
from fake_collector import FakeCollector
from fake_drafters import AUX_LAYERS
from specdec.model import demo_model
from specdec.stack import Plain, Stack


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Quick tests first: they fail in seconds. Last those that share the session's servers, so that tests with servers
    of their own have the memory for them; and after all others what ends those servers."""

    def rank(item: pytest.Item) -> tuple[bool, bool, bool, bool]:
        shares = "servers" in getattr(item, "fixturenames", ())
        ends = item.get_closest_marker("ends_the_stack") is not None
        return item.get_closest_marker("engine") is not None, item.get_closest_marker("image") is not None, shares, ends

    items.sort(key=rank)


@pytest.fixture(scope="session", autouse=True)
def making_the_model(request: pytest.FixtureRequest) -> Iterator[None]:
    """The demo model is made while the quick tests run, where it is not there yet."""
    if not any(item.get_closest_marker("engine") for item in request.session.items):
        yield
        return
    command = ["nice", "-n", "19", sys.executable, "-m", "specdec.model"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
        yield


@pytest.fixture(scope="session", autouse=True)
def building_images(request: pytest.FixtureRequest) -> "Iterator[subprocess.Popen[str] | None]":
    """The container images are built while the quick tests run."""
    if image_kit.missing() or not any(item.get_closest_marker("image") for item in request.session.items):
        yield None
        return
    command = ["nice", "-n", "19", sys.executable, str(Path(image_kit.__file__))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as building:
        yield building


@pytest.fixture(scope="session")
def images(building_images: "subprocess.Popen[str]") -> tuple[str, str]:
    """The router's and the CPU engine's image."""
    said, _ = building_images.communicate()
    assert building_images.returncode == 0, said[-6000:]
    return image_kit.ROUTER, image_kit.ENGINE_CPU


@pytest.fixture(scope="session")
def model() -> Path:
    """The demo model's folder."""
    return demo_model()


@pytest.fixture(scope="session")
def head(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An EAGLE-3 head of the demo model, with random weights."""
    from fake_heads import random_head

    return random_head(tmp_path_factory.mktemp("head"), model, AUX_LAYERS)


@pytest.fixture(scope="session")
def collector() -> Iterator[FakeCollector]:
    """Where the stack sends the spans of requests whose caller has asked for that."""
    with FakeCollector.serving() as collector:
        yield collector


@pytest.fixture(scope="session")
def stack_folder() -> Iterator[Path]:
    """The stack's TMPDIR. Its name is in the environment of each of the stack's processes and of no other."""
    with short_folder() as folder:
        yield folder


@pytest.fixture(scope="session")
def servers(
    model: Path, head: Path, collector: FakeCollector, stack_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Plain, Stack, Path]]:
    """vLLM without any plug-in, a stack, and the file its drafts know answers from, which is empty yet. The two load
    side by side: most of it is the work of one processor each."""
    known, logs = tmp_path_factory.mktemp("oracle") / "oracle.json", tmp_path_factory.mktemp("logs")
    known.write_text("[]")
    env = THREADS | knowing_drafts(known) | collector.environment
    env |= {"SPECDEC_LOG_FORMAT": "json", "TMPDIR": str(stack_folder)}
    with (
        Plain(model, logs, PLAIN_ARGS, THREADS) as plain,
        Stack(
            model,
            logs,
            vllm_args=VLLM_ARGS,
            verifier_args=["--max-num-seqs", "16", "--head", str(head)],
            env=env,
        ) as stack,
    ):
        yield plain, stack, known


@pytest.fixture(scope="session")
def plain(servers: tuple[Plain, Stack, Path]) -> Plain:
    """vLLM without any plug-in."""
    servers[0].wait_ready(300)
    return servers[0]


@pytest.fixture(scope="session")
def oracle(plain: Plain, servers: tuple[Plain, Stack, Path]) -> Oracle:
    """What vLLM without plug-ins answers, asked once."""
    return Oracle.ask(plain.url, servers[2])


@pytest.fixture(scope="session")
def engine_stack(oracle: Oracle, servers: tuple[Plain, Stack, Path]) -> Stack:
    """Verifier, draft and router, started once. Tests change its draft and router; only what `ends_the_stack` touches
    the verifier."""
    stack = servers[1]
    stack.start_draft("fake_drafters:Perfect")
    stack.wait_ready(300)
    return stack
