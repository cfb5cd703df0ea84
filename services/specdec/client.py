"""What the demo and the benchmark ask of an OpenAI server, and what they measure of its answers."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from operator import add, sub
from typing import Any

import httpx

from specdec.errors import SpecdecError


class AnswerError(SpecdecError):
    """A server answered with an error, or broke off."""


@dataclass
class Answer:
    """One streamed answer. Times in seconds from the request."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    chunks: list[list[int]] = field(default_factory=list)  # a chunk is one cycle's tokens, all but the last the draft's
    first_s: float = 0.0
    total_s: float = 0.0
    completion_tokens: int = 0
    accepted: int = 0
    rejected: int = 0


@dataclass(frozen=True)
class Decoded:
    """What a pair's cycles did. Entry i of `proposed` and `accepted` is about position i + 1 of the proposals."""

    tokens: int
    cycles: int
    proposed: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()

    def __sub__(self, before: "Decoded") -> "Decoded":
        return self._with(before, sub)

    def __add__(self, more: "Decoded") -> "Decoded":
        return self._with(more, add)

    def _with(self, other: "Decoded", act: Callable[[int, int], int]) -> "Decoded":
        def each(ours: tuple[int, ...], its: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(act(a, b) for a, b in zip_longest(ours, its, fillvalue=0))

        tokens, cycles = act(self.tokens, other.tokens), act(self.cycles, other.cycles)
        return Decoded(tokens, cycles, each(self.proposed, other.proposed), each(self.accepted, other.accepted))

    @property
    def accept_length(self) -> float | None:
        """Tokens a cycle, over all cycles; None before the first."""
        return self.tokens / self.cycles if self.cycles else None

    @property
    def stood(self) -> list[float]:
        """By position: of the drafts proposed there, how many stood."""
        return [a / p for a, p in zip(self.accepted, self.proposed, strict=False) if p]

    @property
    def draft_length(self) -> float | None:
        """Tokens a cycle that had drafts to verify."""
        return 1 + sum(self.accepted) / self.proposed[0] if self.proposed and self.proposed[0] else None


def decoded(verifier_url: str) -> Decoded:
    """All the cycles a pair has run so far, once no session is open. Raises AnswerError."""
    until = time.monotonic() + 5
    while True:
        values = _metrics(verifier_url, "specdec_")
        if float(values["specdec_sessions"]) == 0 or time.monotonic() > until:
            proposed, accepted = (
                _by_position(values, f"specdec_{what}_at_position_total") for what in ("proposed", "accepted")
            )
            tokens, cycles = (int(float(values[f"specdec_accept_length_{of}"])) for of in ("sum", "count"))
            return Decoded(tokens, cycles, proposed, accepted)
        time.sleep(0.02)


def own_decoded(vllm_url: str) -> Decoded:
    """The same of vLLM's own speculation: its cycles with drafts, by position; no tokens. Raises AnswerError."""
    values = _metrics(vllm_url, "vllm:spec_decode_num_")
    accepted = [int(float(value)) for name, value in values.items() if "accepted_tokens_per_pos_total" in name]
    drafts = sum(int(float(value)) for name, value in values.items() if "num_drafts_total" in name)
    return Decoded(0, 0, (drafts,) * len(accepted), tuple(accepted))


def _metrics(url: str, prefix: str) -> dict[str, str]:
    """What a server's metrics with such names are. Raises AnswerError."""
    try:
        text = httpx.get(f"{url}/metrics", timeout=5, trust_env=False).text
    except httpx.HTTPError as error:
        raise AnswerError(f"{url}: {error}") from error
    return dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith(prefix))


def _by_position(values: dict[str, str], name: str) -> tuple[int, ...]:
    found: list[int] = []
    while (value := values.get(f'{name}{{position="{len(found) + 1}"}}')) is not None:
        found.append(int(float(value)))
    return tuple(found)


def bearer(api_key: str | None) -> dict[str, str]:
    """The headers that carry a key."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def stream_chat(
    url: str, model: str, prompt: str, *, api_key: str | None = None, **parameters: Any
) -> Iterator[tuple[str, list[int], Answer]]:
    """Streams one chat answer: (text, token ids, the answer so far) a chunk. Raises AnswerError."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        **parameters,
    }
    answer, start, done = Answer(), time.perf_counter(), False
    try:
        request = httpx.stream(
            "POST", f"{url}/v1/chat/completions", json=body, headers=bearer(api_key), timeout=600, trust_env=False
        )
        with request as response:
            if response.status_code != 200:
                raise AnswerError(f"{url}: {response.status_code}: {response.read().decode(errors='replace')[:500]}")
            for line in response.iter_lines():
                data = line.removeprefix("data: ")
                if data == line or data == "[DONE]":
                    done = done or data == "[DONE]"
                    continue
                chunk = json.loads(data)
                if "error" in chunk:
                    raise AnswerError(f"{url}: {chunk['error']}")
                for choice in chunk["choices"]:
                    text, ids = choice["delta"].get("content") or "", choice.get("token_ids") or []
                    answer.first_s = answer.first_s or time.perf_counter() - start
                    answer.text += text
                    answer.token_ids += ids
                    if ids:
                        answer.chunks.append(ids)
                    yield text, ids, answer
                if usage := chunk.get("usage"):
                    details = usage.get("completion_tokens_details") or {}
                    answer.completion_tokens = usage["completion_tokens"]
                    answer.accepted = details.get("accepted_prediction_tokens") or 0
                    answer.rejected = details.get("rejected_prediction_tokens") or 0
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise AnswerError(f"{url}: {type(error).__name__}: {error}") from error
    if not done:
        raise AnswerError(f"{url}: the stream ended without [DONE]")
    answer.total_s = time.perf_counter() - start


def chat(url: str, model: str, prompt: str, **parameters: Any) -> Answer:
    """One whole chat answer. Raises AnswerError."""
    answer = Answer()
    for _, _, so_far in stream_chat(url, model, prompt, **parameters):
        answer = so_far
    return answer
