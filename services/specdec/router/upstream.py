"""HTTP to the pairs' vLLM: connections kept open, answers read as they come.

Only what a proxy needs of HTTP/1.1, over llhttp's parser: with httpx here, half of the time that the router adds to a
first token, and most of what each chunk costs, was spent in it.
"""

import asyncio
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools

_IDLE_S = 2.0  # vLLM closes after 5 s: a connection must not be used while it does
_IDLE_MOST = 64  # connections kept for one pair
_BUFFERED = 1 << 16  # bytes read ahead of who takes them
Headers = list[tuple[bytes, bytes]]


class EngineError(Exception):
    """vLLM did not answer, or not to the end."""


class Unreached(EngineError):
    """No connection: it has seen nothing of the request."""


class BrokenOff(EngineError):
    """The connection ended, or what came on it was no HTTP."""


class Silent(EngineError):
    """It said nothing for too long."""


@dataclass(eq=False)
class Answer:
    """An answer whose headers have come."""

    status: int
    headers: Headers  # names in lower case
    _connection: "_Connection" = field(repr=False)

    def header(self, name: bytes) -> str:
        """Its first value, or nothing."""
        return next((value.decode("latin-1") for key, value in self.headers if key == name), "")

    async def parts(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises BrokenOff and Silent."""
        while (part := await self._connection.next_part()) is not None:
            yield part

    async def first(self, timeout_s: float) -> bytes:
        """The body's first piece, which `parts` will give, too; empty if none comes in time. Raises BrokenOff, also
        for a body that is empty, and Silent."""
        return await self._connection.peek(timeout_s)

    async def whole(self) -> bytes:
        """The body, once it is whole. Raises BrokenOff and Silent."""
        return b"".join([part async for part in self.parts()])

    def close(self) -> None:
        """Lets go of the connection; what is not whole by now ends at vLLM, too."""
        self._connection.release()


class Upstream:
    """Connections to every pair."""

    def __init__(self, connect_timeout_s: float, read_timeout_s: float) -> None:
        self._connect_timeout_s, self._read_timeout_s = connect_timeout_s, read_timeout_s
        self._idle: dict[str, list[_Connection]] = {}

    async def ask(self, base: str, method: str, target: bytes, headers: Headers, body: bytes) -> Answer:
        """The answer's beginning. Raises EngineError. `target`: path and query, as they stand in the request."""
        url = urlsplit(base)
        prefix = url.path.rstrip("/").encode()
        head = [b"%s %s HTTP/1.1" % (method.encode(), prefix + target), b"host: %s" % url.netloc.encode()]
        head += [b"%s: %s" % pair for pair in headers]
        if body or method not in ("GET", "HEAD", "OPTIONS", "DELETE"):
            head.append(b"content-length: %d" % len(body))
        request = (b"\r\n".join(head) + b"\r\n\r\n", body)
        while True:
            connection = self._take(base)
            reused = connection is not None
            if connection is None:
                connection = await self._connect(base)
            try:
                return await connection.ask(request, has_body=method != "HEAD")
            except BrokenOff:
                connection.abort()
                if not (reused and connection.untouched):
                    raise  # else vLLM closed it in the moment it was used again
            except BaseException:
                connection.abort()
                raise

    def close(self) -> None:
        """Closes what is idle."""
        for connections in self._idle.values():
            for connection in connections:
                connection.abort()
        self._idle.clear()

    def _take(self, base: str) -> "_Connection | None":
        idle = self._idle.get(base, [])
        while idle:
            connection = idle.pop()
            if connection.usable and time.monotonic() - connection.idle_since < _IDLE_S:
                return connection
            connection.abort()
        return None

    def give_back(self, connection: "_Connection") -> None:
        """A whole answer has been read of it."""
        idle = self._idle.setdefault(connection.base, [])
        while idle and time.monotonic() - idle[0].idle_since > _IDLE_S:
            idle.pop(0).abort()
        if len(idle) < _IDLE_MOST:
            idle.append(connection)
        else:
            connection.abort()

    async def _connect(self, base: str) -> "_Connection":
        url = urlsplit(base)
        secure = ssl.create_default_context() if url.scheme == "https" else None
        port = url.port or (443 if secure else 80)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self, base, self._read_timeout_s), url.hostname or "", port, ssl=secure
                )
        except OSError as error:  # a timeout is one
            raise Unreached(f"{base}: {error}") from error
        return connection


class _Connection(asyncio.Protocol):
    """One connection: a request and its answer at a time."""

    def __init__(self, pool: Upstream, base: str, read_timeout_s: float) -> None:
        self.base, self.idle_since, self.untouched = base, 0.0, True
        self._pool, self._read_timeout_s = pool, read_timeout_s
        self._transport: asyncio.Transport
        self._open = True
        self._asked = False
        self._waiter: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()

    # ---- a request and its answer

    async def ask(self, request: Sequence[bytes], *, has_body: bool) -> Answer:
        """Writes the request and waits for the answer's headers."""
        self._parser = httptools.HttpResponseParser(self)
        self._headers: Headers = []
        self._parts: deque[bytes] = deque()
        self._buffered = 0
        self._begun = self._whole = self._reusable = self._paused = False
        self._fault: EngineError | None = None
        self._has_body, self.untouched, self._asked = has_body, True, True
        self._transport.writelines(request)
        while not self._begun:
            await self._wait()
        return Answer(self._parser.get_status_code(), self._headers, self)

    async def next_part(self) -> bytes | None:
        """The next piece of the body; None at its end."""
        while not self._parts:
            if self._whole:
                return None
            await self._wait()
        part = self._parts.popleft()
        self._buffered -= len(part)
        if self._paused and self._buffered < _BUFFERED // 2:
            self._paused = False
            self._transport.resume_reading()
        return part

    async def peek(self, timeout_s: float) -> bytes:
        """See Answer.first."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self._parts:
                    if self._whole:
                        raise BrokenOff(f"{self.base}: the answer is empty")
                    await self._wait()
        except TimeoutError:
            return b""
        return self._parts[0]

    def release(self) -> None:
        """Nobody reads the answer any more."""
        if self._whole and self.usable and self._asked and self._has_body and self._reusable:
            self._asked = False
            self.idle_since = time.monotonic()
            if self._paused:
                self._transport.resume_reading()
            self._pool.give_back(self)
        elif self._asked:
            self.abort()

    @property
    def usable(self) -> bool:
        """Whether another request may be sent on it."""
        return self._open and not self._transport.is_closing()

    def abort(self) -> None:
        """Ends it at once."""
        self._asked = self._open = False
        self._transport.abort()

    async def _wait(self) -> None:
        """For anything to come. Raises what ended the answer."""
        if self._fault is not None:
            raise self._fault
        if not self._open:
            raise BrokenOff(f"{self.base}: the connection was closed")
        self._waiter = self._loop.create_future()
        timer = self._loop.call_later(self._read_timeout_s, self._fail, Silent(f"{self.base} is silent"))
        try:
            await self._waiter
        finally:
            timer.cancel()
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, error: EngineError) -> None:
        self._fault = self._fault or error
        self._wake()

    # ---- asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        if not self._asked or self._whole:
            self.abort()  # nothing was asked: whoever sends this is out of step
            return
        self.untouched = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(BrokenOff(f"{self.base}: no HTTP: {error}"))
        self._wake()
        if self._buffered > _BUFFERED and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def eof_received(self) -> None:
        self._ended()

    def connection_lost(self, error: Exception | None) -> None:
        self._ended()

    def _ended(self) -> None:
        self._open = False
        if self._asked and not self._whole:
            names = [name for name, _ in self._headers]
            if self._begun and b"content-length" not in names and b"transfer-encoding" not in names:
                self._whole = True  # such a body ends with its connection
                self._wake()
            else:
                self._fail(BrokenOff(f"{self.base}: the connection ended"))

    # ---- the parser's callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._parser.get_status_code() < 200:  # 100 Continue and the like: the answer comes after it
            self._headers.clear()
            return
        self._begun, self._reusable = True, self._parser.should_keep_alive()
        if not self._has_body:
            self._whole = True

    def on_body(self, part: bytes) -> None:
        self._parts.append(part)
        self._buffered += len(part)

    def on_message_complete(self) -> None:
        if self._begun:
            self._whole = True
