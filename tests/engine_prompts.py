"""32 prompts of mixed kind and length, and what the target alone answers to them."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from specdec.demo import prompts
from specdec.stack import Stack

# Small chunks and a small KV cache, so that prompts are cut and sessions preempted while the drafts are at work.
BLOCKS = 34
PLAIN_ARGS = ["--dtype", "float32", "--max-model-len", "1024", "--enforce-eager", "--served-model-name", "demo"]
VLLM_ARGS = [
    *PLAIN_ARGS,
    *("--max-num-batched-tokens", "96", "--block-size", "32", "--num-gpu-blocks-override", str(BLOCKS)),
    "--enable-prefix-caching",
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),  # a named tool needs a parser, too
]

# Two thirds of the time for a pass of many rows; threads that wait leave their processor to draft and router.
THREADS = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}

TESTS = Path(__file__).parent
Body = dict[str, Any]
Document = dict[str, Any]

_LONG = " ".join(
    f"Entry {i}: on day {i * 7 % 31} the {('blue', 'red', 'green', 'old')[i % 4]} boat carried {i * 13 % 97} crates of "
    f"{('tea', 'salt', 'rope', 'maps', 'lamps')[i % 5]} from harbour {chr(65 + i % 26)} to {chr(65 + i * 5 % 26)}."
    for i in range(12)
)
_CODE = "def merge(left, right):\n    result = []\n    while left and right:\n        if left[0] <= right[0]:\n"


def in_template(prompt: str) -> str:
    """A chat request's text, as the demo model's template makes it."""
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    return f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"


def _cases() -> list[tuple[str, int]]:
    """(text, max_tokens): 12 of the demo's, and 20 that are short, long, alike, repetitive or odd."""
    cases = [(in_template(p["prompt"]), 40 + 5 * (i % 4)) for i, p in enumerate(prompts())]
    cases += [
        ("Hi", 24),
        ("The", 48),
        ("1, 2, 3, 4, 5, 6,", 40),
        ("a b a b a b a b", 30),
        ("Once upon a time there was a", 56),
    ]
    cases += [
        (_CODE, 64),
        ("The capital of France is", 1),
        ("The capital of Italy is", 2),
        ("Water boils at", 3),
        ("{", 40),
    ]
    cases += [(_LONG + " In short,", 40), (_LONG + " The first boat", 24), (_LONG + " The last entry says", 33)]
    cases += [("Übermäßige Größe: 東京 🙂 naïve café", 30), ("\n\n\n", 16), ("Question: what is 2 + 2?\nAnswer:", 12)]
    cases += [
        ("SELECT name FROM users WHERE", 40),
        ("<html><body><p>", 40),
        ("Dear Sir or Madam,\n\n", 60),
        (_LONG[:400], 20),
    ]
    assert len(cases) == 32
    return cases


CASES = _cases()


# Answers that end soon by themselves, and must end neither sooner nor later with `min_tokens`.
MIN_TOKENS = 31
MIN_TOKENS_CASES = [
    (in_template(text), 48) for text in ("What is the capital of France?", "Name a fruit.", "What is 2 + 2?")
]


@dataclass(frozen=True)
class Completion:
    """One answer of a server."""

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    text: str
    finish_reason: str
    usage: dict[str, Any]


def complete(url: str, case: tuple[str, int], **fields: Any) -> Completion:
    """One greedy text completion."""
    text, max_tokens = case
    body = {
        "model": "demo",
        "prompt": text,
        "max_tokens": max_tokens,
        "temperature": 0,
        "return_token_ids": True,
        **fields,
    }
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=300, trust_env=False)
    assert answer.status_code == 200, answer.text
    document = answer.json()
    choice = document["choices"][0]
    return Completion(
        tuple(choice["prompt_token_ids"]),
        tuple(choice["token_ids"]),
        choice["text"],
        choice["finish_reason"],
        document["usage"],
    )


def complete_all(url: str, at_once: int = 16, **fields: Any) -> list[Completion]:
    """All cases, `at_once` in flight."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda case: complete(url, case, **fields), CASES))


def knowing_drafts(oracle: Path) -> dict[str, str]:
    """The environment in which a draft finds the fake drafters and what they know."""
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {"PYTHONPATH": path, "SPECDEC_TEST_ORACLE": str(oracle)}


@contextlib.contextmanager
def short_folder() -> Iterator[Path]:
    """A folder whose name leaves room for that of a socket."""
    folder = Path(tempfile.mkdtemp(prefix="specdec-test-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def fixed(steps: int, window: int) -> tuple[str, ...]:
    """A router's arguments for one step count."""
    return ("--policy", "fixed", "--steps", str(steps), "--window", str(window))


def arrange(stack: Stack, drafter: str, *router: str, draft_model: Path | None = None) -> None:
    """Gives the stack another draft and router, at the same time."""
    with ThreadPoolExecutor(2) as pool:
        for started in (pool.submit(stack.start_draft, drafter, draft_model), pool.submit(stack.start_router, *router)):
            started.result()
    stack.wait_ready()


def ask(client: httpx.Client, url: str, body: Body) -> Document:
    """The whole answer to a text completion or, where there are messages, to a chat request; greedy unless it says
    otherwise."""
    path = "chat/completions" if "messages" in body else "completions"
    fields = {"model": "demo", "temperature": 0, "return_token_ids": True, **body}
    answer = client.post(f"{url}/v1/{path}", json=fields)
    assert answer.status_code == 200, f"{body}: {answer.text}"
    document: Document = answer.json()
    return document


def ask_all(url: str, bodies: Sequence[Body], at_once: int = 16) -> list[Document]:
    """The answers to all requests, `at_once` in flight."""
    with httpx.Client(timeout=300, trust_env=False) as client, ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda body: ask(client, url, body), bodies))


def sequences(documents: list[Document]) -> list[list[int]]:
    """Prompt and answer of each choice, for the drafts."""
    known = []
    for document in documents:
        for choice in document["choices"]:
            prompt = choice.get("prompt_token_ids") or document.get("prompt_token_ids")
            known.append([*prompt, *choice["token_ids"]])
    return known


def same(expected: Any, got: Any, at: str = "") -> None:
    """Fails where two answers differ in more than names, times, what was drafted and a logprob's last digits."""
    if isinstance(expected, dict) and isinstance(got, dict):
        names = (expected.keys() | got.keys()) - {"id", "created", "completion_tokens_details", "system_fingerprint"}
        for name in names - {"prompt_tokens_details"}:
            assert (name in expected, name in got) == (True, True), f"{at}.{name}"
            same(expected[name], got[name], f"{at}.{name}")
    elif isinstance(expected, list) and isinstance(got, list):
        assert len(got) == len(expected), f"{at}: {got} for {expected}"
        for i, (left, right) in enumerate(zip(expected, got, strict=True)):
            same(left, right, f"{at}[{i}]")
    elif isinstance(expected, float):
        assert got == pytest.approx(expected, abs=2e-3), f"{at}: {got} for {expected}"
    else:
        assert got == expected, f"{at}: {got!r} for {expected!r}"


def counted(body: Body, document: Document) -> int:
    """Fails where an answer's counts do not agree; returns how many of its tokens were the draft's."""
    usage, total = document["usage"], 0
    for choice in document["choices"]:
        total += len(choice["token_ids"])
        assert len(choice["token_ids"]) <= body["max_tokens"]
        logprobs = choice.get("logprobs")
        if logprobs and not body.get("echo"):
            assert len(logprobs.get("content") or logprobs["token_logprobs"]) == len(choice["token_ids"])
        if choice["finish_reason"] == "length":
            assert len(choice["token_ids"]) == body["max_tokens"]
    assert usage["completion_tokens"] == total
    assert usage["total_tokens"] == usage["prompt_tokens"] + total
    details = usage["completion_tokens_details"]
    assert 0 <= details["accepted_prediction_tokens"] <= total
    assert details["rejected_prediction_tokens"] >= 0
    accepted: int = details["accepted_prediction_tokens"]
    return accepted


@dataclass(frozen=True)
class Oracle:
    """The answers of the target alone. `path` holds prompt and answer ids, for the drafts that know them."""

    path: Path
    answers: list[Completion]
    short: list[Completion]  # of MIN_TOKENS_CASES, as they end by themselves
    min_tokens: list[Completion]  # of MIN_TOKENS_CASES, with MIN_TOKENS

    @classmethod
    def ask(cls, url: str, path: Path) -> "Oracle":
        """Asks a server without speculation."""
        with ThreadPoolExecutor(16) as pool:
            whole = [pool.submit(complete, url, case) for case in CASES]
            ended = [pool.submit(complete, url, case) for case in MIN_TOKENS_CASES]
            forced = [pool.submit(complete, url, case, min_tokens=MIN_TOKENS) for case in MIN_TOKENS_CASES]
            answers, short, min_tokens = ([one.result() for one in asked] for asked in (whole, ended, forced))
        path.write_text(json.dumps([[*a.prompt_ids, *a.ids] for a in answers + short + min_tokens]))
        return cls(path, answers, short, min_tokens)

    @contextlib.contextmanager
    def knowing(self, sequences: Sequence[Sequence[int]]) -> Iterator[None]:
        """Drafts started meanwhile know these too, before what they know else; each is a prompt's ids and its
        answer's."""
        before = self.path.read_text()
        self.path.write_text(json.dumps([list(ids) for ids in sequences] + json.loads(before)))
        try:
            yield
        finally:
            self.path.write_text(before)

    def compare(self, answers: list[Completion]) -> None:
        """Fails on the first answer that is not the target's own, token by token."""
        for case, expected, got in zip(CASES, self.answers, answers, strict=True):
            assert got.prompt_ids == expected.prompt_ids
            assert got.ids == expected.ids, f"{case[0][:60]!r}"
            assert (got.text, got.finish_reason) == (expected.text, expected.finish_reason)
            assert got.usage["completion_tokens"] == expected.usage["completion_tokens"]
