"""32 prompts of mixed kind and length, and what the target alone answers to them."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from specdec.demo import prompts

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
        answers = complete_all(url)
        short = [complete(url, case) for case in MIN_TOKENS_CASES]
        min_tokens = [complete(url, case, min_tokens=MIN_TOKENS) for case in MIN_TOKENS_CASES]
        path.write_text(json.dumps([[*a.prompt_ids, *a.ids] for a in answers + short + min_tokens]))
        return cls(path, answers, short, min_tokens)

    def compare(self, answers: list[Completion]) -> None:
        """Fails on the first answer that is not the target's own, token by token."""
        for case, expected, got in zip(CASES, self.answers, answers, strict=True):
            assert got.prompt_ids == expected.prompt_ids
            assert got.ids == expected.ids, f"{case[0][:60]!r}"
            assert (got.text, got.finish_reason) == (expected.text, expected.finish_reason)
            assert got.usage["completion_tokens"] == expected.usage["completion_tokens"]
