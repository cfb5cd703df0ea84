"""Forwards a request to a pair's vLLM and its answer back, chunk by chunk.

Two things are changed on the way, both only for chat and text completions: `"speculative"` is taken out of the request,
and `usage` gets the counts of the draft's tokens.
"""

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import httpx
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from specdec.router.observed import Observation
from specdec.router.pairs import Pair, Request
from specdec.telemetry import RouterMetrics

GENERATING = ("/v1/chat/completions", "/v1/completions")
_SETTLE_S = 0.05  # how long an answer waits for its last verdict
# Hop by hop (RFC 9110, 7.6.1), or set anew by whoever sends.
_DROPPED = frozenset(
    (b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te")
    + (b"trailer", b"transfer-encoding", b"upgrade", b"host", b"content-length", b"x-request-id", b"accept-encoding")
    + (b"date", b"server")
)
_UNBUFFERED = {b"x-accel-buffering": b"no", b"cache-control": b"no-cache"}  # asks proxies in front to stream, too
_EVENT_END = re.compile(rb"\n\n|\r\n\r\n|\r\r")
_ID_TEXT = re.compile(r"[\x21-\x7e]{1,256}")


@dataclass(frozen=True)
class ApiError(Exception):
    """An error in OpenAI's form. `param` names the field at fault."""

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None

    def response(self) -> Response:
        """The HTTP answer."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        headers = {"retry-after": "2"} if self.status in (429, 503) else {}
        return Response(json.dumps({"error": error}), self.status, headers, "application/json")


def parse_speculative(value: Any) -> int | None:
    """A request's own cap on k: None for "auto" and null, 0 for "off", n for {"steps": n}. Raises ApiError (400)."""
    if value is None or value == "auto":
        return None
    if value == "off":
        return 0
    if isinstance(value, dict) and set(value) == {"steps"}:
        steps = value["steps"]
        if isinstance(steps, int) and not isinstance(steps, bool) and 0 <= steps <= 64:
            return steps
    raise ApiError(400, 'speculative must be "auto", "off" or {"steps": n} with n from 0 to 64', param="speculative")


async def read_body(http: HttpRequest, limit: int) -> bytes:
    """The request's body. Raises ApiError (413) as soon as it is larger than `limit` bytes, and ClientGone."""
    too_large = ApiError(413, f"the request body is larger than {limit} bytes", code="request_too_large")
    length = http.headers.get("content-length", "")
    if length.isdigit() and int(length) > limit:
        raise too_large
    parts, size = [], 0
    try:
        async for part in http.stream():
            size += len(part)
            if size > limit:
                raise too_large
            parts.append(part)
    except ClientDisconnect as error:
        raise ClientGone from error
    return b"".join(parts)


def prepare(path: str, body: bytes) -> tuple[bytes, int | None]:
    """The body for vLLM and the request's cap on k. Leaves what is no JSON object to vLLM's own message."""
    if path not in GENERATING or b'"speculative"' not in body:
        return body, None
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return body, None
    if not isinstance(fields, dict) or "speculative" not in fields:
        return body, None
    cap = parse_speculative(fields.pop("speculative"))
    return json.dumps(fields).encode(), cap


def _with_counts(answer: dict[str, Any], accepted: int, rejected: int) -> bytes:
    """The JSON of an answer with the draft's counts where OpenAI's API has those of predicted outputs."""
    usage = answer["usage"]
    details = usage.get("completion_tokens_details") or {}
    usage["completion_tokens_details"] = {
        **details,
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": rejected,
    }
    return json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode()


class Proxy:
    """Forwards to pairs with one client."""

    def __init__(self, client: httpx.AsyncClient, metrics: RouterMetrics, max_body: int) -> None:
        self._client, self._metrics, self._max_body = client, metrics, max_body

    async def forward(self, http: HttpRequest, pair: Pair) -> Response:
        """The pair's answer to `http`. Raises ApiError for what the router itself refuses."""
        async with AsyncExitStack() as held:  # until the answer's last byte, however it comes to that
            path, seen = http.scope["path"], Observation.of(http.scope)
            body, cap = prepare(path, await read_body(http, self._max_body))
            request = Request(seen.attempt(), cap, seen=seen)
            answer_id = answer_request_id(http, request.id)
            gone = asyncio.create_task(_disconnected(http))
            held.callback(gone.cancel)
            pair.register(request)
            held.callback(pair.release, request)
            started = time.monotonic()
            try:
                answer = await _unless(gone, self._send(http, pair, request, body))
            except httpx.HTTPError as error:
                raise _unreachable(error) from error
            held.push_async_callback(answer.aclose)  # ends vLLM's work if that is not done
            self._metrics.first_byte.observe(time.monotonic() - started)
            headers = [*_kept(answer.headers.raw), (b"x-request-id", answer_id.encode())]
            if _is(answer, "text/event-stream"):
                headers = [(name, value) for name, value in headers if name not in _UNBUFFERED] + [*_UNBUFFERED.items()]
            parts = self._relay(answer, request, gone, path in GENERATING)
            if path in GENERATING and _is(answer, "application/json"):
                # one JSON document: whole before it can be given its counts
                response = Response(b"".join([part async for part in parts]), answer.status_code)
            else:
                response = _Relayed(parts, answer.status_code, held.pop_all())
            response.raw_headers += headers
            return response

    async def _send(self, http: HttpRequest, pair: Pair, request: Request, body: bytes) -> httpx.Response:
        headers = [*_kept(http.headers.raw), (b"x-request-id", request.id.encode()), (b"accept-encoding", b"identity")]
        if trace := Observation.of(http.scope).trace_headers():
            headers = [(name, value) for name, value in headers if name not in (b"traceparent", b"tracestate")]
            headers += [(name.encode(), value.encode()) for name, value in trace.items()]
        base, query = httpx.URL(pair.http_url), http.scope["query_string"]
        target = base.raw_path.rstrip(b"/") + http.scope["raw_path"] + (b"?" + query if query else b"")
        try:
            url = base.copy_with(raw_path=target)
        except (httpx.InvalidURL, ValueError) as error:
            raise ApiError(400, f"the request's path or query is not a valid one: {error}") from error
        return await self._client.send(
            self._client.build_request(http.method, url, headers=headers, content=body), stream=True
        )

    async def _relay(
        self, answer: httpx.Response, request: Request, gone: "asyncio.Task[None]", counted: bool
    ) -> AsyncIterator[bytes]:
        """The answer's bytes, as long as the client is there."""
        parts, is_stream = answer.aiter_raw(), _is(answer, "text/event-stream")
        if counted and is_stream:
            parts = self._count_events(parts, request)
        elif counted and answer.status_code == 200:
            parts = self._count_document(parts, request)
        try:
            while (part := await _unless(gone, _next(parts))) is not None:
                yield part
        except httpx.HTTPError as error:
            if not is_stream:
                raise _unreachable(error) from error
            # the status has been sent: say it in the stream, and do not end it as if it were whole
            yield b"data: " + bytes(_unreachable(error).response().body) + b"\n\n"

    async def _count_events(self, parts: AsyncIterator[bytes], request: Request) -> AsyncIterator[bytes]:
        """Server-sent events with the counts in those that carry usage; every other byte as it came."""
        held = b""
        async for part in parts:
            held += part
            while end := _EVENT_END.search(held):
                event, held = held[: end.end()], held[end.end() :]
                yield await self._counted(event, request) if b'"usage":{' in event.replace(b" ", b"") else event
        if held:
            yield held

    async def _counted(self, event: bytes, request: Request) -> bytes:
        try:
            answer = json.loads(event.removeprefix(b"data:"))
            last = not answer["choices"]
            accepted, rejected = await request.settled(answer["usage"]["completion_tokens"], _SETTLE_S if last else 0)
            return b"data: " + _with_counts(answer, accepted, rejected) + b"\n\n"
        except (ValueError, KeyError, TypeError):
            return event

    async def _count_document(self, parts: AsyncIterator[bytes], request: Request) -> AsyncIterator[bytes]:
        body = b"".join([part async for part in parts])
        try:
            answer = json.loads(body)
            accepted, rejected = await request.settled(answer["usage"]["completion_tokens"], _SETTLE_S)
            body = _with_counts(answer, accepted, rejected)
        except (ValueError, KeyError, TypeError):
            pass  # an answer without usage, or none of OpenAI's
        yield body


class ClientGone(Exception):
    """The client closed its connection; there is nobody to answer."""


class _Relayed(StreamingResponse):
    """A streamed answer that lets go of what it holds, even if the client goes before it has begun."""

    def __init__(self, parts: AsyncIterator[bytes], status: int, held: AsyncExitStack) -> None:
        super().__init__(parts, status)
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._held:
            with contextlib.suppress(ClientGone):
                await self.stream_response(send)


def _is(answer: httpx.Response, media_type: str) -> bool:
    return str(answer.headers.get("content-type", "")).startswith(media_type)


def _kept(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """What is meant for the far end, byte by byte; names in lower case."""
    lower = [(name.lower(), value) for name, value in headers]
    named = {word.strip().lower() for name, value in lower if name == b"connection" for word in value.split(b",")}
    return [(name, value) for name, value in lower if name not in _DROPPED | named]


def _unreachable(error: httpx.HTTPError) -> ApiError:
    if isinstance(error, httpx.TimeoutException):
        return ApiError(504, "the engine did not answer in time", "server_error", code="engine_timeout")
    return ApiError(
        503, "the engine cannot be reached or broke off its answer", "server_error", code="engine_unavailable"
    )


async def _next(parts: AsyncIterator[bytes]) -> bytes | None:
    return await anext(parts, None)


async def _disconnected(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _unless(gone: "asyncio.Task[None]", work: Any) -> Any:
    """The result of `work`, which is cancelled, with ClientGone raised, if the client goes first."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def answer_request_id(http: HttpRequest, own: str) -> str:
    """The X-Request-Id an answer carries: the client's, or `own` where it sent none that can be printed."""
    given = http.headers.get("x-request-id", "")
    return given if _ID_TEXT.fullmatch(given) else own


def choose(pairs: list[Pair]) -> Pair:
    """The ready pair with the fewest requests. Raises ApiError (503) if none is ready."""
    ready = [pair for pair in pairs if pair.ready]
    if not ready:
        raise ApiError(
            503,
            "no pair is ready: its vLLM is starting, or its verifier is not reachable",
            "server_error",
            code="no_pair",
        )
    return min(ready, key=lambda pair: (not pair.connected, pair.load))
