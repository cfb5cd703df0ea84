"""One stack of the real engine for the whole test session; see `engine_stack`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_prompts import PLAIN_ARGS, VLLM_ARGS, Oracle, knowing_drafts
from fake_drafters import AUX_LAYERS
from specdec.model import demo_model
from specdec.stack import Plain, Stack


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Quick tests first: they fail in seconds. Last those that share the session's servers, so that tests with servers
    of their own have the memory for them; and after all others what ends those servers."""

    def rank(item: pytest.Item) -> tuple[bool, bool, bool]:
        shares = {"plain", "engine_stack"} & set(getattr(item, "fixturenames", ()))
        ends = item.get_closest_marker("ends_the_stack") is not None
        return item.get_closest_marker("engine") is not None, bool(shares), ends

    items.sort(key=rank)


@pytest.fixture(scope="session")
def model() -> Path:
    """The demo model's folder."""
    return demo_model()


@pytest.fixture(scope="session")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plain]:
    """vLLM without any plug-in."""
    server = Plain(model, tmp_path_factory.mktemp("plain"), PLAIN_ARGS)
    try:
        server.wait_ready(300)
        yield server
    finally:
        server.process.stop()


@pytest.fixture(scope="session")
def oracle(plain: Plain, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """What vLLM without plug-ins answers, asked once."""
    return Oracle.ask(plain.url, tmp_path_factory.mktemp("oracle") / "oracle.json")


@pytest.fixture(scope="session")
def head(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An EAGLE-3 head of the demo model, with random weights."""
    from fake_heads import random_head

    return random_head(tmp_path_factory.mktemp("head"), model, AUX_LAYERS)


@pytest.fixture(scope="session")
def engine_stack(model: Path, head: Path, oracle: Oracle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Verifier, draft and router, started once. Tests change its draft and router, never the verifier."""
    logs = tmp_path_factory.mktemp("stack")
    with Stack(
        model,
        logs,
        drafter="fake_drafters:Perfect",
        vllm_args=VLLM_ARGS,
        verifier_args=["--max-num-seqs", "16", "--head", str(head)],
        env=knowing_drafts(oracle.path),
    ) as stack:
        stack.wait_ready(300)
        yield stack
