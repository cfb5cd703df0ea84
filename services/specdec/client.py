"""What the demo and the benchmark ask of an OpenAI server, and what they measure of its answers."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
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


def decode_counts(verifier_url: str) -> tuple[int, int]:
    """(tokens, cycles) of all the cycles a pair has run so far, once no session is open. Raises AnswerError."""
    until = time.monotonic() + 5
    while True:
        try:
            text = httpx.get(f"{verifier_url}/metrics", timeout=5, trust_env=False).text
        except httpx.HTTPError as error:
            raise AnswerError(f"{verifier_url}: {error}") from error
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("specdec_"))
        if float(values["specdec_sessions"]) == 0 or time.monotonic() > until:
            return int(float(values["specdec_accept_length_sum"])), int(float(values["specdec_accept_length_count"]))
        time.sleep(0.02)


def stream_chat(url: str, model: str, prompt: str, **parameters: Any) -> Iterator[tuple[str, list[int], Answer]]:
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
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=600, trust_env=False) as response:
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
    except httpx.HTTPError as error:
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
