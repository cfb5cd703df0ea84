"""What uvicorn answers by itself, in the API's form, and bounds on how long a connection is held that has no request:
on its head's size and time, and on the time between an answer and the next request."""

import asyncio
import re
import weakref
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from specdec.router.errors import ApiError

_HEAD_BYTES = 1 << 16
_HEAD_S = 30.0  # for a connection's first request to begin and every head to be whole
_UNREAD_S = 5.0  # for the rest of a body that has its answer already, mostly an error
# As a name that is dropped further on. llhttp would take what follows such a head for another protocol's, and the
# request would lose its body; we speak no other, and a client may be answered as if it had not asked. Java's asks.
_UPGRADE, _NOT_HEEDED = re.compile(rb"\nupgrade(?=[ \t]*:)", re.IGNORECASE), b"\nkeep-alive"


class Connections:
    """Those of one server. The lifespan's state has it as `connections`."""

    def __init__(self) -> None:
        self._open: set[Protocol] = set()
        self.ending = False

    def add(self, one: "Protocol") -> None:
        """One was made."""
        self._open.add(one)

    def discard(self, one: "Protocol") -> None:
        """One is lost."""
        self._open.discard(one)

    def end(self) -> None:
        """From now on each ends with the answer that runs on it, or with the next one. Those kept for a next request
        are closed."""
        self.ending = True
        for one in list(self._open):
            one.end()


class Protocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 over llhttp, which bounds neither the size of a head nor its time, and whose keep-alive timer
    ends with any byte, also with one of a body that was answered before it was whole."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._head_bytes: int | None = 0  # of the head that is coming; None: none is
        self._head_timer: asyncio.TimerHandle | None = None
        self._rest_timer: asyncio.TimerHandle | None = None
        self._in_body = False
        self._passed = False  # the read that is being parsed had bytes before those of the head that is coming
        self._among: Connections = self.app_state.get("connections") or Connections()

    def connection_made(self, transport: Any) -> None:
        """Its first request is waited for from here on."""
        super().connection_made(transport)
        self._among.add(self)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        self._wait_ends()
        self._among.discard(self)
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._await_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """One of its lines. Those behind a body are passed over: they are nobody's headers, and there may be any
        number."""
        if not self._in_body:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """It is whole."""
        self._wait_ends()
        self._in_body = self._passed = True
        super().on_headers_complete()
        self.cycle.transport = _Lingering(self.cycle)  # type: ignore[assignment]
        if self._among.ending:
            self.cycle.keep_alive = False
        if self.parser.get_http_version() != "1.1":
            self.cycle.send = _Unchunked(self.cycle)  # type: ignore[method-assign]

    def data_received(self, data: bytes) -> None:
        """Also ends what sends a head without an end."""
        self._passed = self._in_body
        if not self._in_body:
            end = data.find(b"\r\n\r\n")
            end = len(data) if end < 0 else end
            if _UPGRADE.search(data, 0, end):
                data = _UPGRADE.sub(_NOT_HEEDED, data[:end]) + data[end:]
        super().data_received(data)
        if self._head_bytes is not None:
            self._head_bytes += 1 if self._passed else len(data)  # how much of the read is of this head is not known
            if self._head_bytes > _HEAD_BYTES:
                self._end(ApiError("request_too_large", f"the request's head is larger than {_HEAD_BYTES} bytes"))

    def on_response_complete(self) -> None:
        """An answer is whole. The rest of its request's body is dropped for a while, since a close could take the
        answer from a client that still sends."""
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():  # else the next request has come already
            self._rest(_UNREAD_S if self.cycle.more_body else self.timeout_keep_alive)

    def on_message_complete(self) -> None:
        """A request is whole, which may have been answered before."""
        self._in_body = False
        super().on_message_complete()
        if self.cycle.response_complete:
            if self.cycle.keep_alive:
                self._rest(self.timeout_keep_alive)
            else:
                self.transport.close()

    def end(self) -> None:
        """Closes the connection after the answer that runs, which says so where it has not begun; at once if none runs.
        One that has had no request yet gets an answer to its first: its client has only just opened it."""
        if self.cycle is None or (self.cycle.response_complete and self._head_bytes):
            return  # a request is on its way, whose answer will be the last
        if self.cycle.response_complete and not self._in_body:
            self.transport.close()
        else:
            self.cycle.keep_alive = False

    def send_400_response(self, msg: str) -> None:
        """Instead of uvicorn's, which is plain text."""
        self._end(ApiError("invalid_request", msg))

    def _await_head(self) -> None:
        self._wait_ends()
        self._head_bytes = 0
        self._head_timer = self.loop.call_later(_HEAD_S, self._late)

    def _late(self) -> None:
        if self._head_bytes:
            self._end(ApiError("request_timeout", f"the request's head did not come within {_HEAD_S:g} s"))
        else:  # opened and never used: an answer to nothing would be taken for that of the next request
            self.transport.close()

    def _wait_ends(self) -> None:
        self._head_bytes = None
        for timer in (self._head_timer, self._rest_timer):
            if timer is not None:
                timer.cancel()

    def _rest(self, at_most_s: float) -> None:
        if self._rest_timer is not None:
            self._rest_timer.cancel()
        self._rest_timer = self.loop.call_later(at_most_s, self.transport.close)

    @property
    def _answering(self) -> bool:
        """Whether the answer of a request that has come whole, or one that has begun, is still to end."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return False
        return bool(self.pipeline) or cycle.response_started or not cycle.more_body

    def _end(self, error: ApiError) -> None:
        self._wait_ends()
        if self.transport.is_closing():
            return
        if self._answering:  # this would be written into another request's answer, or taken for it
            self.transport.close()
            return
        body = error.body()
        head = b"HTTP/1.1 %d Error\r\ncontent-type: application/json\r\nconnection: close\r\n" % error.status
        self.transport.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        self.transport.close()


class _Lingering:
    """A cycle's way to the transport, whose close waits for the rest of a body that was answered before it was whole:
    a reset could take the answer from the client. Until then nothing more is written."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle, self._transport = weakref.proxy(cycle), cycle.transport  # it is the cycle's own
        self.write, self.is_closing = self._transport.write, self._transport.is_closing

    def close(self) -> None:
        """Says that the answer was the last; the protocol closes when the request is whole, or late."""
        if self._cycle.response_complete and self._cycle.more_body and not self._transport.is_closing():
            self._transport.write_eof()
        else:
            self._transport.close()


class _Unchunked:
    """A cycle's `send` for a client of HTTP before 1.1, which knows no chunks: a body without a length ends with its
    connection. uvicorn would chunk it."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle, self._send = cycle, cycle.send
        self._open_end = False

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message.get("headers", ())}
            self._open_end = names.isdisjoint((b"content-length", b"transfer-encoding"))
            if self._open_end:
                self._cycle.chunked_encoding = False
        elif self._open_end:
            self._cycle.expected_content_length = len(message.get("body", b""))  # all that is checked
        await self._send(message)
