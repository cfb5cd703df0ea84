"""Forwards a request to a pair's vLLM and its answer back, chunk by chunk.

What is changed on the way: `"speculative"` is taken out of a request, `usage` gets the counts of the draft's tokens,
chunks before it get `"usage": null`, and every error gets one form.
"""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, ParamSpec, TypeVar

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from specdec.router import routes
from specdec.router.admission import Admission
from specdec.router.errors import ApiError, of_engine
from specdec.router.fleet import Fleet
from specdec.router.limits import GENERATING, Asked, Limits, read, read_body
from specdec.router.observed import Observation
from specdec.router.pairs import Pair, Request
from specdec.router.relay import Relayed, Watch, ends_event, joined_events, set_apart
from specdec.router.upstream import Answer, BrokenOff, EngineError, Silent, Unreached, Upstream
from specdec.telemetry import RouterMetrics

T = TypeVar("T")
P = ParamSpec("P")
_LOOK_S = 0.5  # how often a pair is looked at that has not answered yet
_FIRST_S = 2.0  # how long a stream's headers wait for its first event, which may be an error
_SETTLE_S = 0.05  # how long an answer waits for its last verdict
_LARGE_BYTES = 1 << 16  # bodies from which they are read beside the event loop
_ERROR_BYTES = 1 << 16  # of vLLM's error that are read
# Hop by hop (RFC 9110, 7.6.1), or set anew by whoever sends.
_DROPPED = frozenset(
    (b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te")
    + (b"trailer", b"transfer-encoding", b"upgrade", b"host", b"content-length", b"x-request-id", b"accept-encoding")
    + (b"date", b"server", b"expect")
)
_SECRET = frozenset((b"authorization", b"x-api-key"))  # the router's own keys
_UNBUFFERED = {b"x-accel-buffering": b"no", b"cache-control": b"no-cache"}  # asks proxies in front to stream, too
_ID_TEXT = re.compile(r"[\x21-\x7e]{1,256}")
_UNSAFE = re.compile(rb"[\x00-\x20\x7f]")  # what would end the request line
_SECONDS = re.compile(r"[0-9]{1,9}")
_NO_CHOICES = re.compile(rb"\[\s*\]")
_ERROR = b'data: {"error"'
_NOT_COUNTED = (msgspec.MsgspecError, ValueError, KeyError, TypeError)
_DEAD = re.compile(r"EngineCore|EngineDead")
_BROKEN = "the engine broke off its answer"


@dataclass(frozen=True)
class _Begun:
    """What a pair has begun to answer. `whole` is its body, where that is a document to be counted, and not too large
    to be held."""

    http: Answer
    request: Request
    whole: bytes | None


class _TryAnother(Exception):
    """The pair failed before the first byte."""

    def __init__(self, failure: ApiError, *, sent: bool) -> None:
        super().__init__(failure.message)
        self.failure, self.sent = failure, sent


class _Aside:
    """A thread for work on bodies that would hold up everybody's streams. One only: of several each would hold the
    interpreter in turn, and the event loop would wait for them all."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "bodies")

    async def run(self, size: int, work: Callable[P, T], *args: P.args, **more: P.kwargs) -> T:
        """The result of `work` on `size` bytes."""
        if size <= _LARGE_BYTES:
            return work(*args, **more)
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(work, *args, **more))

    def close(self) -> None:
        """What has not begun is given up."""
        self._thread.shutdown(wait=False, cancel_futures=True)


class Proxy:
    """Forwards to pairs.

    Everything a request holds is on one of three exit stacks. `forward`'s has the request's own: its count, its watch,
    its place of admission. Each attempt's has what it holds of a pair, the registration and the connection, and is
    closed before the next attempt; that of the one that was answered is put on `forward`'s. Where the answer is
    streamed, all of it passes to Relayed, which closes it after the last byte.
    """

    def __init__(
        self,
        upstream: Upstream,
        fleet: Fleet,
        admission: Admission,
        limits: Limits,
        metrics: RouterMetrics,
        *,
        own_keys: bool,
    ) -> None:
        self._upstream, self._fleet, self._admission, self._limits = upstream, fleet, admission, limits
        self._metrics, self._secret = metrics, _SECRET if own_keys else frozenset[bytes]()
        self._aside = _Aside()
        self.running = 0  # requests being answered
        self.watches: set[Watch] = set()
        self.relays: set[Relayed] = set()

    async def forward(self, http: HttpRequest) -> Response:
        """A pair's answer to `http`. Raises ApiError and ClientGone."""
        async with AsyncExitStack() as held:  # until the answer's last byte, however it comes to that
            self._count(1)
            held.callback(self._count, -1)
            path = http.scope["path"]
            watch = Watch()
            self.watches.add(watch)
            held.callback(self.watches.discard, watch)
            held.callback(watch.close)
            with self._admission.holding() as more:
                with watch.cancelling():
                    body = await read_body(http, self._limits, more)
                watch.listen(http)
                asked = Asked(body)
                if http.method == "POST":
                    reading = self._aside.run(len(body), read, path, body, self._limits)
                    asked = await (watch.race(reading) if len(body) > _LARGE_BYTES else reading)
                del body  # `asked` may have another, that is held until a pair has begun to answer
                if routes.queued(http.method, path):
                    place = self._admission.admitted(asked.sessions, asked.tokens)
                    await watch.race(held.enter_async_context(place))
                answer = await self._ask(http, asked, watch, held)
            headers = [*self._kept(answer.http.headers)]
            headers.append((b"x-request-id", answer_request_id(http, answer.request.id).encode()))
            if answer.whole is not None:
                response = Response(await _counted_document(answer.whole, answer.request), answer.http.status)
                response.raw_headers += headers
                return response
            stream = _is(answer.http, "text/event-stream")
            if stream:
                headers = [(name, value) for name, value in headers if name not in _UNBUFFERED] + [*_UNBUFFERED.items()]
            parts: AsyncIterator[bytes] = answer.http.parts()
            if stream and path in GENERATING:
                parts = _events(parts, answer.request, asked.usage_at_end)
            relay = Relayed(
                _told(parts, stream),
                answer.http.status,
                headers,
                stream=stream,
                request=answer.request,
                watch=watch,
                held=held.pop_all(),
            )
            relay.track(self.relays, self._metrics)
            return relay

    def _count(self, more: int) -> None:
        self.running += more

    def close(self) -> None:
        """Nothing is forwarded any more."""
        self._aside.close()

    async def get(self, target: bytes) -> bytes:
        """What a pair's vLLM answers the router itself. Raises ApiError."""
        try:
            answer = await self._upstream.ask(self._fleet.choose().http_url, "GET", target, [], b"")
            try:
                return await answer.whole() or b""
            finally:
                answer.close()
        except EngineError as error:
            raise _unreachable(error) from error

    # ---- a pair's answer

    async def _ask(self, http: HttpRequest, asked: Asked, watch: Watch, held: AsyncExitStack) -> _Begun:
        """The first pair's answer that is one. Another pair is tried while nothing has been sent to the client: as
        often as there are pairs where a pair could not be reached, and once where it failed later."""
        tried: list[Pair] = []
        failure: ApiError | None = None
        sent = False
        while True:
            try:
                pair = self._fleet.choose(asked.prefix, tried)
            except ApiError as none:
                raise failure or none from None
            if tried:
                self._metrics.retries.inc()
            try:
                async with AsyncExitStack() as attempt:
                    answer = await self._attempt(http, pair, asked, watch, attempt)
                    held.push_async_exit(attempt.pop_all())
                    return answer
            except _TryAnother as error:
                if error.sent and sent:
                    raise error.failure from error
                tried.append(pair)
                failure, sent = error.failure, sent or error.sent

    async def _attempt(self, http: HttpRequest, pair: Pair, asked: Asked, watch: Watch, held: AsyncExitStack) -> _Begun:
        path = http.scope["path"]
        seen = Observation.of(http.scope)
        request = Request(seen.attempt(), asked.max_steps, asked.sessions, seen=seen)
        pair.register(request)
        held.callback(pair.release, request)
        started = time.monotonic()
        try:
            answer = await watch.race(self._while_ready(pair, self._send(http, pair, request, asked.body, held)))
            self._metrics.first_byte.observe(time.monotonic() - started)
            if answer.status >= 300:
                raise await self._refused(answer, asked, watch)
            if path in GENERATING and _is(answer, "text/event-stream"):
                first = await watch.race(self._while_ready(pair, answer.first(_FIRST_S)))
                if first.startswith(_ERROR):  # vLLM finds some faults of a request only then
                    raise await self._failure(_status_of(first), first.removeprefix(b"data:"), asked)
            document = path in GENERATING and _is(answer, "application/json")
            whole = await watch.race(self._while_ready(pair, answer.whole())) if document else None
        except Silent as error:
            raise _unreachable(error) from error
        except EngineError as error:
            raise _TryAnother(_unreachable(error), sent=not isinstance(error, Unreached)) from error
        return _Begun(answer, request, whole)

    async def _while_ready(self, pair: Pair, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. Raises BrokenOff where its pair stops being ready and another one is: it may hang."""
        task = asyncio.create_task(work)
        try:
            while not task.done():
                await asyncio.wait((task,), timeout=_LOOK_S)
                others = [other for other in self._fleet.pairs if other is not pair and other.ready]
                if not task.done() and not pair.ready and others:
                    raise BrokenOff(f"pair {pair.address} is not ready any more")
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def _send(self, http: HttpRequest, pair: Pair, request: Request, body: bytes, held: AsyncExitStack) -> Answer:
        headers = [*self._kept(http.headers.raw), (b"x-request-id", request.id.encode())]
        headers.append((b"accept-encoding", b"identity"))
        if trace := Observation.of(http.scope).trace_headers():
            headers = [(name, value) for name, value in headers if name not in (b"traceparent", b"tracestate")]
            headers += [(name.encode(), value.encode()) for name, value in trace.items()]
        query = http.scope["query_string"]
        target = http.scope["raw_path"] + (b"?" + query if query else b"")
        if _UNSAFE.search(target):
            raise ApiError("invalid_request", "the request's path or query is not a valid one")
        answer = await self._upstream.ask(pair.http_url, http.method, target, headers, body)
        held.callback(answer.close)  # ends vLLM's work if that is not done, even if nobody waits for this result now
        return answer

    async def _refused(self, answer: Answer, asked: Asked, watch: Watch) -> ApiError | _TryAnother:
        """What an answer that is none says."""
        body = b""
        parts = answer.parts()
        while len(body) < _ERROR_BYTES and (part := await watch.race(_next(parts))) is not None:
            body += part
        status = answer.status if answer.status >= 400 else 404  # a redirect would leave the router
        error = await self._failure(status, body, asked)
        if isinstance(error, ApiError) and (after := _SECONDS.fullmatch(answer.header(b"retry-after"))):
            error.retry_after_s = int(after[0])
        return error

    async def _failure(self, status: int, body: bytes, asked: Asked) -> ApiError | _TryAnother:
        """vLLM's error before anything was sent on; one that says its engine is gone is worth another pair."""
        error = await self._aside.run(len(asked.body), of_engine, status, body, asked.body)
        if status in (502, 503) or (status == 500 and _DEAD.search(error.message)):
            return _TryAnother(ApiError("engine_unavailable", error.message), sent=True)
        return error

    def _kept(self, headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """What is meant for the far end, byte by byte; names in lower case."""
        lower = [(name.lower(), value) for name, value in headers]
        named = {word.strip().lower() for name, value in lower if name == b"connection" for word in value.split(b",")}
        dropped = _DROPPED | self._secret | named
        return [(name, value) for name, value in lower if name not in dropped]


async def _events(parts: AsyncIterator[bytes], request: Request, usage_at_end: bool) -> AsyncIterator[bytes]:
    """An answer's events: the draft's counts in those that carry usage, `"usage": null` in the others where the client
    asked for it at the end, and an error for an end that is none. Every other byte as it came."""
    done = False
    async for event in joined_events(parts):
        if done:  # read on to the body's end, so that the connection can be used again
            continue
        if b'"usage"' in event and b'"usage":{' in event.replace(b" ", b""):
            yield await _counted(event, request)
        elif event.startswith(_ERROR):
            yield of_engine(_status_of(event), event.removeprefix(b"data:")).event()
            return  # vLLM would go on with [DONE], as if the answer were whole
        elif usage_at_end and event.startswith(b"data: {") and b'"usage":' not in event:
            text = event.rstrip()
            yield text[:-1] + b',"usage":null}' + event[len(text) :] if text.endswith(b"}") else event
        else:
            done = event.startswith(b"data: [DONE]")
            yield event
    if not done:
        yield ApiError("engine_unavailable", _BROKEN).event()


async def _told(parts: AsyncIterator[bytes], stream: bool) -> AsyncIterator[bytes]:
    """A stream whose failure is said in it: the status has been sent, and it must not end as if it were whole.
    Anything else is broken off, as it was here: raises ApiError."""
    between_events = True
    try:
        async for part in parts:
            yield part
            between_events = ends_event(part)
    except EngineError as error:
        if not stream:
            raise _unreachable(error) from error
        yield set_apart(_unreachable(error), between_events)


def _status_of(event: bytes) -> int:
    try:
        status = json.loads(event.removeprefix(b"data:"))["error"]["code"]
    except (ValueError, KeyError, TypeError):
        return 500
    return status if isinstance(status, int) and 400 <= status < 600 else 500


async def _counted(event: bytes, request: Request) -> bytes:
    try:
        answer = _Counted(event.removeprefix(b"data:"))
        accepted, rejected = await request.settled(answer.tokens, _SETTLE_S if answer.last else 0)
        return b"data: " + answer.with_counts(accepted, rejected) + b"\n\n"
    except _NOT_COUNTED:
        return event


async def _counted_document(body: bytes, request: Request) -> bytes:
    try:
        answer = _Counted(body)
        accepted, rejected = await request.settled(answer.tokens, _SETTLE_S)
        return answer.with_counts(accepted, rejected)
    except _NOT_COUNTED:
        return body  # an answer without usage, or none of OpenAI's


class _Counted:
    """An answer's document, of which only `usage` is built: the rest may be megabytes. Raises one of _NOT_COUNTED for
    what is none."""

    def __init__(self, text: bytes) -> None:
        self._fields = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        self._usage = msgspec.json.decode(self._fields["usage"])
        self.tokens = self._usage["completion_tokens"]

    @property
    def last(self) -> bool:
        """Of an event: whether it is the one that carries nothing but the usage."""
        return _NO_CHOICES.fullmatch(self._fields["choices"]) is not None

    def with_counts(self, accepted: int, rejected: int) -> bytes:
        """It with the draft's counts where OpenAI's API has those of predicted outputs."""
        details = self._usage.get("completion_tokens_details") or {}
        counts = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
        usage = {**self._usage, "completion_tokens_details": {**details, **counts}}
        return msgspec.json.encode({**self._fields, "usage": usage})


def _is(answer: Answer, media_type: str) -> bool:
    return answer.header(b"content-type").startswith(media_type)


def _unreachable(error: EngineError) -> ApiError:
    if isinstance(error, Silent):
        return ApiError("engine_timeout", "the engine did not answer in time")
    return ApiError("engine_unavailable", _BROKEN if isinstance(error, BrokenOff) else "the engine cannot be reached")


async def _next(parts: AsyncIterator[bytes]) -> bytes | None:
    return await anext(parts, None)


def answer_request_id(http: HttpRequest, own: str) -> str:
    """The X-Request-Id an answer carries: the client's, or `own` where it sent none that can be printed."""
    given = http.headers.get("x-request-id", "")
    return given if _ID_TEXT.fullmatch(given) else own
