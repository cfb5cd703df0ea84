"""verifier/vllm_plugin.py: what vLLM's API process is told, and that no other vLLM of the environment is touched."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points

import pytest

PROBE = """
import os
from vllm.plugins import load_general_plugins
from vllm.sampling_params import SamplingParams
load_general_plugins()
print(SamplingParams._validate_spec_decode.__module__)
if os.environ.get("SPECDEC_SEGMENT"):
    check = SamplingParams._validate_spec_decode
    check(SamplingParams(min_p=0.1, temperature=0.8), None)
    check(SamplingParams(min_p=0.1, temperature=0), object())  # greedy: vLLM itself drops it
    check(SamplingParams(top_k=3, seed=1), object())
    for fields in ({"min_p": 0.1}, {"logit_bias": {3: 1.0}}, {"min_p": 0.1, "logit_bias": {3: 1.0}},
                   {"logprobs": 1, "logprob_token_ids": [3]}):
        try:
            check(SamplingParams(**fields), object())
        except Exception as error:
            print(error)
"""


def probe(**variables: str) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SPECDEC_")}
    done = subprocess.run(
        [sys.executable, "-c", PROBE], env=environment | variables, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line]


@pytest.fixture(scope="module")
def said() -> dict[str, list[str]]:
    """What the probe says without a segment and with one; at once, since importing vLLM takes seconds."""
    with ThreadPoolExecutor(2) as pool:
        without, with_one = pool.submit(probe), pool.submit(probe, SPECDEC_SEGMENT="/dev/shm/none")
        return {"without": without.result(), "with": with_one.result()}


def test_it_is_installed_where_vllm_looks_for_it():
    assert [entry.value for entry in entry_points(group="vllm.general_plugins", name="specdec")] == [
        "specdec.verifier.vllm_plugin:register"
    ]


def test_a_vllm_without_the_verifier_is_left_as_it_is(said: dict[str, list[str]]):
    assert said["without"][-1] == "vllm.sampling_params"


def test_what_is_refused_is_named_with_the_reason_and_what_takes_it(said: dict[str, list[str]]):
    module, *messages = said["with"][-5:]
    assert module == "specdec.verifier.vllm_plugin"
    names = ("min_p cannot", "logit_bias cannot", "min_p and logit_bias cannot", "logprob_token_ids cannot")
    for message, name in zip(messages, names, strict=True):
        assert message.startswith(name)
        assert "A server without speculation takes it" in message
