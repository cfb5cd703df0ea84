"""A streamed answer on its way to the client: whether the client is there, whether it reads, and what to do if not.

What is written here is right because uvicorn's `send` waits for the client before it writes and not after: a write that
is cancelled has written nothing, and one that has written has told `_write`, so that `_between_events` is always of
what the client has got. Two tasks write, the answer's own and a comment's, never at once: the answer's waits for the
comment (`_comment is current_task()` is how the comment's own write knows not to wait for itself), and a comment is
only begun while none of the two writes.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specdec.router.errors import ApiError
from specdec.router.limits import ClientGone
from specdec.router.pairs import Request
from specdec.router.upstream import EVENT_END, BrokenOff
from specdec.telemetry import RouterMetrics

_TICK_S = 0.05
_SLOW_S = 0.5  # a write that takes longer pauses the request's sessions
_LAST_S = 1.0  # for the error that ends a stream
_EVENT_BYTES = 1 << 25  # the largest event that is held until it is whole: a prompt's logprobs may be megabytes
_END_BYTES = 3  # of an event's end that may have come without its last byte


class Watch:
    """Whether one request shall go on. It ends when its client goes, or where the router cuts it off."""

    def __init__(self) -> None:
        self._over: asyncio.Future[ApiError | None] = asyncio.get_running_loop().create_future()
        self._listening: asyncio.Task[None] | None = None

    def listen(self, http: HttpRequest) -> None:
        """From now on for the client, too: `http`'s body has been read."""
        self._listening = asyncio.create_task(self._disconnected(http))

    def cut(self, why: ApiError | None = None) -> None:
        """Ends the request: with an error, or as if the client had gone."""
        if not self._over.done():
            self._over.set_result(why)

    def close(self) -> None:
        """The request is over."""
        if self._listening is not None:
            self._listening.cancel()

    async def race(self, work: Any) -> Any:
        """The result of `work`. Cancels it and raises ClientGone, or what the request was cut off with."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task, self._over), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise self._over.result() or ClientGone
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    @contextlib.contextmanager
    def cancelling(self) -> Iterator[None]:
        """The same for a block: like asyncio.timeout, without a task of its own for each chunk."""
        task = asyncio.current_task()
        assert task is not None
        fired = False

        def stop(_: "asyncio.Future[ApiError | None]") -> None:
            nonlocal fired
            fired = True
            task.cancel()

        self._over.add_done_callback(stop)
        try:
            yield
        except asyncio.CancelledError:
            if fired and task.uncancel() == 0:
                raise self._over.result() or ClientGone from None
            raise
        finally:
            self._over.remove_done_callback(stop)

    async def _disconnected(self, http: HttpRequest) -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass
        self.cut()


class Relayed(Response):
    """A streamed answer that lets go of what it holds, even if the client goes before it has begun."""

    def __init__(
        self,
        parts: AsyncIterator[bytes],
        status: int,
        headers: list[tuple[bytes, bytes]],
        *,
        stream: bool,
        request: Request,
        watch: Watch,
        held: AsyncExitStack,
    ) -> None:
        self.status_code, self.raw_headers, self.background = status, headers, None
        self._parts, self._stream, self._request, self._watch, self._held = parts, stream, request, watch, held
        self._send: Send
        self._writing_since: float | None = None
        self._wrote_at = time.monotonic()
        self._between_events = False  # a comment may be sent
        self._comment: asyncio.Task[None] | None = None

    def track(self, live: "set[Relayed]", metrics: RouterMetrics) -> None:
        """Keeps itself in `live` until it is over."""
        live.add(self)
        self._held.callback(live.discard, self)
        self._metrics = metrics
        self._held.callback(self._resume)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        async with self._held:
            try:
                with self._watch.cancelling():
                    await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                    self._between_events = self._stream
                    async for part in self._parts:
                        await self._write(part)
                    await self._settle_comment()
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
            except ClientGone:
                pass
            except ApiError as error:  # cut off
                if self._stream:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._last(error), _LAST_S)

    def tick(self, now: float, keepalive_s: float, write_timeout_s: float) -> None:
        """Looks after it: pauses what is not read, gives up on it after a while, keeps a silent stream alive."""
        if self._writing_since is not None:
            stuck_s = now - self._writing_since
            if stuck_s > _SLOW_S and not self._request.paused:
                self._request.pause()
                self._metrics.paused.inc()
            if stuck_s > write_timeout_s:
                if self._request.seen:
                    self._request.seen.disconnected()
                self._watch.cut()
        elif self._between_events and now - self._wrote_at > keepalive_s:
            self._wrote_at = now
            self._comment = asyncio.create_task(self._write(b": keep-alive\n\n"))

    async def _write(self, part: bytes) -> None:
        if self._comment is not None and self._comment is not asyncio.current_task():
            await self._settle_comment()
        self._writing_since = time.monotonic()
        await self._send({"type": "http.response.body", "body": part, "more_body": True})
        self._wrote_at, self._writing_since = time.monotonic(), None
        self._between_events = self._stream and ends_event(part)
        if self._request.paused:
            self._resume()

    async def _settle_comment(self) -> None:
        if self._comment is not None:
            await self._comment
            self._comment = None

    async def _last(self, error: ApiError) -> None:
        if self._comment is not None:  # it may be waiting to be written
            self._comment.cancel()
            await asyncio.gather(self._comment, return_exceptions=True)
        await self._send(
            {"type": "http.response.body", "body": set_apart(error, self._between_events), "more_body": True}
        )
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def _resume(self) -> None:
        if self._request.paused:
            self._request.resume()
            self._metrics.paused.dec()


async def look_after(relays: set[Relayed], metrics: RouterMetrics, keepalive_s: float, write_timeout_s: float) -> None:
    """One timer for all streams, which also measures how late the event loop is."""
    due = time.monotonic() + _TICK_S
    while True:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        now = time.monotonic()
        metrics.loop_lag.observe(max(0.0, now - due))
        for relay in list(relays):
            relay.tick(now, keepalive_s, write_timeout_s)
        due = now + _TICK_S


def ends_event(part: bytes) -> bool:
    """Whether a stream is between two events after `part`."""
    return part.endswith((b"\n\n", b"\r\n\r\n"))


def set_apart(error: ApiError, between_events: bool) -> bytes:
    """The error as an event of its own, whatever stands before it."""
    return error.event() if between_events else b"\n\n" + error.event()


async def joined_events(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Server-sent events one by one, each with its blank line, whatever pieces they come in. A last one that has none
    is dropped: nobody could tell it from a whole one. Raises BrokenOff for one that does not end."""
    held = bytearray()
    async for part in parts:
        if not held and part.endswith(b"\n\n") and part.find(b"\n\n") == len(part) - 2 and b"\r" not in part:
            yield part  # by far the most common
            continue
        at, look = 0, max(0, len(held) - _END_BYTES)  # before that there is no end, or it would have been found
        held += part
        while end := EVENT_END.search(held, look):
            yield bytes(held[at : end.end()])
            at = look = end.end()
        del held[:at]
        if len(held) > _EVENT_BYTES:
            raise BrokenOff(f"an event of more than {_EVENT_BYTES} bytes")
