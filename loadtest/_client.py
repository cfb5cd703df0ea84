"""Asks an OpenAI server and times the answer.

One client for locust's users and for the A/B comparison, on the standard library alone: `read1` returns what has come,
whatever the framing, where `requests` waits for 512 bytes of an answer that is not chunked.
"""

import http.client
import json
import ssl
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

OK, REJECTED, FAILED = "ok", "rejected", "failed"
_IDLE_S = 2.0  # a connection idle for longer is not used again: many servers close theirs after five seconds
Message = dict[str, str]


class SetupError(Exception):
    """The server cannot be load-tested as asked."""


class _Broken(Exception):
    """An answer that a client could not have used."""


class _Rejected(Exception):
    """A 429."""

    def __init__(self, retry_after_s: float | None) -> None:
        super().__init__("429")
        self.retry_after_s = retry_after_s


@dataclass(frozen=True)
class Sample:
    """One request and what came of it. Times in seconds."""

    id: str = ""  # its X-Request-Id
    kind: str = ""
    status: str = OK  # or REJECTED: a 429; or FAILED
    arrival_s: float = 0.0  # when it was due, since the run's (in an A/B comparison the block's) start
    late_s: float = 0.0  # how much later the load generator sent it
    first_s: float | None = None  # from when it was due to the first content; None if there was none
    last_s: float | None = None  # likewise to the last content
    total_s: float = 0.0  # likewise to [DONE]
    prompt_tokens: int = 0
    completion_tokens: int = 0
    accepted: int | None = None  # draft tokens, as usage says; None if it does not
    rejected: int | None = None
    retry_after_s: float | None = None  # of a 429
    error: str = ""
    variant: str = ""  # of an A/B comparison, like the two below
    rate: float = 0.0
    block: int = 0


@dataclass
class _Answer:
    """What a stream has said so far. `first`, `last` and `ended` are instants of time.perf_counter."""

    text: str = ""
    first: float | None = None
    last: float | None = None
    ended: float | None = None  # [DONE]
    finish: str | None = None
    usage: dict[str, Any] | None = None

    def take(self, now: float, data: bytes) -> None:
        """One event's data. Raises _Broken if it is an error, ValueError and others if it is no chunk at all."""
        if data == b"[DONE]":
            self.ended = now
            return
        chunk = json.loads(data)
        if "error" in chunk:
            raise _Broken(f"error event: {_message(chunk)}")
        for choice in chunk["choices"]:
            delta = choice.get("delta") or {}
            text = delta.get("content") or choice.get("text") or ""
            # The first event names a role and has no content: it is sent before there is a token.
            if text or delta.get("reasoning_content") or delta.get("reasoning") or delta.get("tool_calls"):
                self.first, self.last = self.first or now, now
            self.text += text
            self.finish = choice.get("finish_reason") or self.finish
        self.usage = chunk.get("usage") or self.usage

    def check(self) -> None:
        """Raises _Broken unless the answer is whole."""
        if self.finish is None:
            raise _Broken("the stream ended without a finish reason")
        if self.finish in ("abort", "error"):
            raise _Broken(f"finish reason {self.finish}")
        if self.ended is None:
            raise _Broken("the stream ended without [DONE]")
        if self.usage is None:
            raise _Broken("the stream has no usage, though it was asked for")


@dataclass
class Target:
    """A server at `url`, with or without the /v1. Its connections are kept open between requests."""

    url: str
    api_key: str = ""
    timeout_s: float = 600.0  # of silence
    _idle: list[tuple[float, http.client.HTTPConnection]] = field(default_factory=list)
    _tls: ssl.SSLContext = field(default_factory=ssl.create_default_context)  # once: it reads all authorities

    def models(self) -> list[dict[str, Any]]:
        """What the server serves. Raises SetupError."""
        try:
            connection = self._connect()
            connection.request("GET", self._path("models"), headers=self._headers())
            response = connection.getresponse()
            body = response.read()
            if response.status != 200:
                raise SetupError(f"{self.url}: GET /v1/models answered {response.status}: {_excerpt(body)}")
            self._keep(connection, response)
            found: list[dict[str, Any]] = json.loads(body)["data"]
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
            raise SetupError(f"{self.url}: {type(error).__name__}: {error}") from error
        return found

    def chat(self, body: dict[str, Any], due: float | None = None) -> tuple[Sample, str]:
        """The streamed answer to a chat request, timed from `due` (of time.perf_counter), and its text.

        Never raises for what the server does: that is in the sample.
        """
        sent = time.perf_counter()
        due = sent if due is None else due
        sample = Sample(id=f"loadtest-{uuid.uuid4().hex}", late_s=sent - due)
        answer = _Answer()
        try:
            connection = self._connect()
            try:
                ended = self._stream(connection, body, sample, answer)
            except BaseException:
                connection.close()
                raise
        except _Rejected as refusal:
            ended = replace(sample, status=REJECTED, retry_after_s=refusal.retry_after_s, error="429")
        except _Broken as error:
            ended = replace(sample, status=FAILED, error=str(error))
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, AttributeError) as error:
            ended = replace(sample, status=FAILED, error=f"{type(error).__name__}: {error}"[:300])
        return _timed(ended, answer, due), answer.text

    def _stream(
        self, connection: http.client.HTTPConnection, body: dict[str, Any], sample: Sample, answer: _Answer
    ) -> Sample:
        fields = {**body, "stream": True, "stream_options": {"include_usage": True}}
        headers = {**self._headers(), "Content-Type": "application/json", "X-Request-Id": sample.id}
        connection.request("POST", self._path("chat/completions"), json.dumps(fields), headers)
        response = connection.getresponse()
        if response.status == 429:
            response.read()
            self._keep(connection, response)
            raise _Rejected(_seconds(response.headers.get("Retry-After")))
        if response.status != 200:
            raise _Broken(f"status {response.status}: {_excerpt(response.read())}")
        kind = response.headers.get("Content-Type", "")
        if not kind.startswith("text/event-stream"):
            raise _Broken(f"not a stream but {kind or 'of no type'}")
        for now, data in _events(response):
            answer.take(now, data)
            if answer.ended is not None:
                break
        answer.check()
        assert answer.usage is not None
        response.read()  # what follows [DONE] is the framing's end
        self._keep(connection, response)
        details = answer.usage.get("completion_tokens_details") or {}
        return replace(
            sample,
            prompt_tokens=answer.usage["prompt_tokens"],
            completion_tokens=answer.usage["completion_tokens"],
            accepted=details.get("accepted_prediction_tokens"),
            rejected=details.get("rejected_prediction_tokens"),
        )

    def _connect(self) -> http.client.HTTPConnection:
        while self._idle:
            since, connection = self._idle.pop()
            if time.monotonic() - since < _IDLE_S:
                return connection
            connection.close()
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{self.url!r} is not an http:// or https:// address")
        if parts.scheme == "https":
            return http.client.HTTPSConnection(parts.hostname, parts.port, timeout=self.timeout_s, context=self._tls)
        return http.client.HTTPConnection(parts.hostname, parts.port, timeout=self.timeout_s)

    def _keep(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> None:
        if response.will_close:
            connection.close()
        else:
            self._idle.append((time.monotonic(), connection))

    def _path(self, name: str) -> str:
        return f"{urlsplit(self.url).path.rstrip('/').removesuffix('/v1')}/v1/{name}"

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


def _events(response: http.client.HTTPResponse) -> Iterator[tuple[float, bytes]]:
    """(when it had come, data) of each server-sent event."""
    held = b""
    while part := response.read1(1 << 16):
        now = time.perf_counter()
        *lines, held = (held + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield now, line[5:].strip()


def _timed(sample: Sample, answer: _Answer, due: float) -> Sample:
    """With the answer's times; those of a failed one are kept, for whoever looks into the samples."""
    ended = answer.ended or time.perf_counter()
    return replace(
        sample,
        first_s=None if answer.first is None else answer.first - due,
        last_s=None if answer.last is None else answer.last - due,
        total_s=ended - due,
    )


def _message(chunk: dict[str, Any]) -> str:
    error = chunk["error"]
    return str(error.get("message") if isinstance(error, dict) else error)[:200]


def _excerpt(body: bytes) -> str:
    return " ".join(body.decode(errors="replace").split())[:200]


def _seconds(value: str | None) -> float | None:
    try:
        return max(0.0, float(value)) if value is not None else None
    except ValueError:
        return None  # a date
