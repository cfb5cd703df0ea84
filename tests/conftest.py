"""One stack of the real engine for the whole test session; see `engine_stack`."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_prompts import Oracle
from specdec.model import demo_model
from specdec.stack import Plain, Stack

TESTS = Path(__file__).parent
# Small chunks and a small KV cache, so that prompts are cut and sessions preempted while the drafts are at work.
BLOCKS = 34
PLAIN_ARGS = ["--dtype", "float32", "--max-model-len", "1024", "--enforce-eager", "--served-model-name", "demo"]
VLLM_ARGS = [
    *PLAIN_ARGS,
    *("--max-num-batched-tokens", "96", "--block-size", "32", "--num-gpu-blocks-override", str(BLOCKS)),
    "--enable-prefix-caching",
]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Quick tests first: they fail in seconds."""
    items.sort(key=lambda item: item.get_closest_marker("engine") is not None)


@pytest.fixture(scope="session")
def model() -> Path:
    """The demo model's folder."""
    return demo_model()


@pytest.fixture(scope="session")
def oracle(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """What vLLM without plug-ins answers, asked once."""
    from engine_prompts import Oracle

    folder = tmp_path_factory.mktemp("plain")
    plain = Plain(model, folder, PLAIN_ARGS)
    try:
        plain.wait_ready(300)
        return Oracle.ask(plain.url, folder / "oracle.json")
    finally:
        plain.process.stop()


@pytest.fixture(scope="session")
def engine_stack(model: Path, oracle: Oracle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Verifier, draft and router, started once. Tests change its draft and router, never the verifier."""
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    env = {"PYTHONPATH": path, "SPECDEC_TEST_ORACLE": str(oracle.path)}
    logs = tmp_path_factory.mktemp("stack")
    with Stack(
        model,
        logs,
        drafter="fake_drafters:Perfect",
        vllm_args=VLLM_ARGS,
        verifier_args=["--max-num-seqs", "16"],
        env=env,
    ) as stack:
        stack.wait_ready(300)
        yield stack
