"""HTTP to the pairs' vLLM, over aiohttp: connections kept open, answers read as they come, nothing decoded.

aiohttp rather than httpx, which took half of the time that the router adds to a first token.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager

import aiohttp
from multidict import CIMultiDict
from yarl import URL

_IDLE_S = 2.0  # vLLM closes after 5 s: a connection must not be used while it does
EVENT_END = re.compile(rb"\n\n|\r\n\r\n|\r\r")
_EVENT_BYTES = 1 << 16  # of a first event that are waited for
_WHOLE_BYTES = 1 << 25  # of a body that is held until it is whole
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")  # in a header's value; aiohttp lets them through
_UNSAID = ("accept", "accept-encoding", "content-type", "user-agent")  # headers aiohttp would add of its own
Headers = list[tuple[bytes, bytes]]


class EngineError(Exception):
    """vLLM did not answer, or not to the end."""


class Unreached(EngineError):
    """No connection: it has seen nothing of the request."""


class BrokenOff(EngineError):
    """The connection ended, or what came on it was no HTTP."""


class Silent(EngineError):
    """It said nothing for too long."""


class Answer:
    """An answer whose headers have come, with their names in lower case."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.status = response.status
        self.headers: Headers = [(name.lower(), value) for name, value in response.raw_headers]
        self._response = response
        self._first: asyncio.Task[bytes] | None = None

    def header(self, name: bytes) -> str:
        """Its first value, or nothing."""
        return next((value.decode("latin-1") for key, value in self.headers if key == name), "")

    async def parts(self) -> AsyncGenerator[bytes, None]:
        """The body as it comes. Raises BrokenOff and Silent."""
        with _faults():
            if self._first is not None:
                first, self._first = self._first, None
                if part := await first:
                    yield part
            while part := await self._response.content.readany():
                yield part

    async def first(self, timeout_s: float) -> bytes:
        """The body's first event with its blank line, which `parts` will give, too, in whatever pieces it comes and
        whatever comes behind it; what there is of one that has no end; empty if it is not whole in time. Raises
        BrokenOff, also for a body that is empty, and Silent."""
        if self._first is None:
            self._first = asyncio.create_task(self._begin())
        await asyncio.wait((self._first,), timeout=timeout_s)
        if not self._first.done():
            return b""
        with _faults():
            begun = self._first.result()
        if not begun:
            raise BrokenOff("an empty answer")
        end = EVENT_END.search(begun)
        return begun[: end.end()] if end else begun

    async def _begin(self) -> bytes:
        """The body until an event's end is in it."""
        begun = b""
        while not EVENT_END.search(begun) and len(begun) < _EVENT_BYTES:
            if not (part := await self._response.content.readany()):
                break
            begun += part
        return begun

    async def whole(self) -> bytes | None:
        """The body, once it is whole; None where it is too large to be held, and `parts` is still to give it. Raises
        BrokenOff and Silent."""
        held, size = [], 0
        parts = self.parts()
        async for part in parts:
            held.append(part)
            size += len(part)
            if size > _WHOLE_BYTES:
                await parts.aclose()
                self._first = asyncio.create_task(_already(b"".join(held)))
                return None
        return b"".join(held)

    def close(self) -> None:
        """Lets go of the connection; what is not whole by now ends at vLLM, too."""
        if self._first is not None:
            self._first.cancel()
        self._response.close()  # a whole answer has given its connection back already


class Upstream:
    """Connections to every pair. Made, used and closed in one event loop."""

    def __init__(self, connect_timeout_s: float, read_timeout_s: float) -> None:
        self._client = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s, sock_read=read_timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=_UNSAID,
            auto_decompress=False,
            trust_env=False,
        )

    async def ask(self, base: str, method: str, target: bytes, headers: Headers, body: bytes) -> Answer:
        """The answer's beginning. Raises EngineError. `target`: path and query, as they stand in the request."""
        url = URL(base.rstrip("/") + target.decode("latin-1"), encoded=True)
        said = CIMultiDict((name.decode("latin-1"), _text(value)) for name, value in headers)
        with _faults():
            response = await self._client.request(method, url, headers=said, data=body or None, allow_redirects=False)
        answer = Answer(response)
        if answer.status < 200 or any(_CONTROL.search(value) for _, value in answer.headers):
            answer.close()
            raise BrokenOff("an answer that cannot be passed on")
        return answer

    async def close(self) -> None:
        """Closes all connections."""
        await self._client.close()


async def _already(begun: bytes) -> bytes:
    return begun


def _text(value: bytes) -> str:
    """A header's value as a string of which aiohttp, which writes UTF-8, makes the same bytes where it can."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


@contextmanager
def _faults() -> Iterator[None]:
    """Raises what aiohttp raises as an EngineError."""
    try:
        yield
    except aiohttp.SocketTimeoutError as error:
        raise Silent(str(error)) from error
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        raise Unreached(str(error)) from error
    except (aiohttp.ClientError, OSError) as error:
        raise BrokenOff(f"{type(error).__name__}: {error}") from error
