"""router/upstream.py against servers that speak HTTP well, oddly and not at all."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from edge_kit import run
from fake_engine import until
from specdec.router import upstream as module
from specdec.router.upstream import BrokenOff, Silent, Unreached, Upstream

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class FakeServer:
    """Says `answers` in turn, one a request; counts connections."""

    def __init__(self, *answers: bytes | Talk) -> None:
        self.answers, self.url = list(answers), ""
        self.connections = self.open = 0
        self.heads: list[bytes] = []

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.heads.append(head)
                if b"content-length: 4" in head:
                    await reader.readexactly(4)
                answer = self.answers.pop(0)
                if callable(answer):
                    await answer(reader, writer)
                    return
                writer.write(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open -= 1
            writer.close()


@contextlib.asynccontextmanager
async def served(*answers: bytes | Talk, timeout_s: float = 5) -> AsyncIterator[tuple[FakeServer, Upstream]]:
    fake, upstream = FakeServer(*answers), Upstream(1, timeout_s)
    server = await asyncio.start_server(fake.talk, "127.0.0.1", 0)
    fake.url = "http://{}:{}".format(*server.sockets[0].getsockname())
    async with server:
        yield fake, upstream
        await upstream.close()
        await until(lambda: not fake.open)


async def get(fake: FakeServer, upstream: Upstream, method: str = "GET", body: bytes = b"") -> bytes:
    answer = await upstream.ask(fake.url, method, b"/x?y=1", [(b"x-a", b"1")], body)
    try:
        return await answer.whole()
    finally:
        answer.close()


def test_a_connection_is_used_again_once_its_answer_is_whole():
    async def main():
        chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n"
        async with served(OK, chunked, OK) as (fake, upstream):
            assert [await get(fake, upstream), await get(fake, upstream, "POST", b"body")] == [b"ok", b"abc"]
            assert await get(fake, upstream) == b"ok"
            assert fake.connections == 1
            host = fake.url.removeprefix("http://").encode()
            assert fake.heads[0].lower() == b"get /x?y=1 http/1.1\r\nhost: " + host + b"\r\nx-a: 1\r\n\r\n"
            assert b"\r\ncontent-length: 4\r\n" in fake.heads[1].lower()

    run(main)


@pytest.mark.parametrize("close", [b"connection: close\r\n", b""])
def test_a_body_without_a_length_ends_with_its_connection(close):
    async def answer(reader, writer):
        writer.write(b"HTTP/1.1 200 OK\r\n" + close + b"\r\nto the end")
        await writer.drain()

    async def main():
        async with served(answer, OK) as (fake, upstream):
            assert await get(fake, upstream) == b"to the end"
            assert await get(fake, upstream) == b"ok"
            assert fake.connections == 2

    run(main)


def test_an_interim_answer_is_not_the_answer():
    async def main():
        async with served(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\nlink: x\r\n\r\n" + OK) as (
            fake,
            upstream,
        ):
            answer = await upstream.ask(fake.url, "POST", b"/", [], b"body")
            assert (answer.status, answer.headers) == (200, [(b"content-length", b"2")])
            assert await answer.whole() == b"ok"
            answer.close()

    run(main)


def test_head_has_no_body():
    async def main():
        async with served(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n", OK) as (fake, upstream):
            assert await get(fake, upstream, "HEAD") == b""
            assert await get(fake, upstream) == b"ok"

    run(main)


@pytest.mark.parametrize(
    "answer",
    [b"garbage\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n", b"\x16\x03\x01\x00\r\n\r\n"],
)
def test_what_is_no_http_breaks_off(answer):
    async def main():
        async with served(answer) as (fake, upstream):
            with pytest.raises(BrokenOff):
                await get(fake, upstream)

    run(main)


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 2", OK[:-1], OK.replace(b"content-length: 2", b"x: 1")[:20]])
def test_a_connection_that_ends_too_early_breaks_off(said):
    async def answer(reader, writer):
        writer.write(said)
        await writer.drain()

    async def main():
        async with served(answer) as (fake, upstream):
            with pytest.raises(BrokenOff):
                await get(fake, upstream)

    run(main)


def test_a_connection_that_vllm_closed_meanwhile_is_replaced():
    async def once_then_close(reader, writer):
        writer.write(OK)
        await writer.drain()
        await reader.readuntil(b"\r\n\r\n")  # the next request, which it does not answer

    async def main():
        async with served(once_then_close, OK) as (fake, upstream):
            assert [await get(fake, upstream), await get(fake, upstream)] == [b"ok", b"ok"]
            assert fake.connections == 2

    run(main)


def test_nobody_there_and_nobody_answering():
    async def never(reader, writer):
        await reader.read()

    async def main():
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))
            upstream = Upstream(1, 1)
            with pytest.raises(Unreached):
                await upstream.ask("http://{}:{}".format(*nobody.getsockname()), "GET", b"/", [], b"")
            await upstream.close()
        async with served(never, timeout_s=0.1) as (fake, upstream):
            with pytest.raises(Silent):
                await get(fake, upstream)

    run(main)


def test_a_request_that_is_given_up_closes_its_connection():
    async def never(reader, writer):
        await reader.read()

    async def main():
        async with served(never, never) as (fake, upstream):
            asking = asyncio.create_task(get(fake, upstream))
            await until(lambda: fake.heads)
            asking.cancel()
            await until(lambda: not fake.open)
            half = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nab"

            async def slow(reader, writer):
                writer.write(half)
                await reader.read()

            fake.answers = [slow]
            answer = await upstream.ask(fake.url, "GET", b"/", [], b"")
            assert await anext(answer.parts()) == b"ab"
            answer.close()
            await until(lambda: not fake.open)

    run(main)


def test_what_nobody_takes_is_not_read():
    sent = 0

    async def flood(reader, writer):
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100000000\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b"x" * 10_000)
                await writer.drain()
                sent += 10_000

    async def main():
        async with served(flood) as (fake, upstream):
            answer = await upstream.ask(fake.url, "GET", b"/", [], b"")
            before = -1
            while before != sent:
                before = sent
                await asyncio.sleep(0.1)
            assert sent < 20_000_000
            read = 0
            async for part in answer.parts():
                read += len(part)
                if read > before + 1_000_000:
                    break
            assert sent > before
            answer.close()

    run(main)


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_the_first_event_is_whole_and_alone_in_whatever_pieces_it_comes(size, end):
    first, rest = b'data: {"error": 1}' + end, b"data: [DONE]" + end
    body = first + rest

    async def talk(reader, writer):
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body))
        for at in range(0, len(body), size):
            writer.write(body[at : at + size])
            await writer.drain()
            await asyncio.sleep(0.002)

    async def main():
        async with served(talk) as (fake, upstream):
            answer = await upstream.ask(fake.url, "GET", b"/", [], b"")
            assert await answer.first(5) == first
            assert await answer.whole() == body
            answer.close()

    run(main)


def test_a_first_event_without_an_end_is_what_there_is_of_it():
    long = b"x" * 200_000

    async def main():
        said = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n"
        async with served(said % 4 + b"data", said % len(long) + long) as (fake, upstream):
            for body in (b"data", long):
                answer = await upstream.ask(fake.url, "GET", b"/", [], b"")
                first = await answer.first(5)
                assert first
                assert body.startswith(first)
                assert await answer.whole() == body
                answer.close()

    run(main)


def test_idle_connections_do_not_grow_old(monkeypatch):
    monkeypatch.setattr(module, "_IDLE_S", 0.2)

    async def main():
        async with served(*[OK] * 4) as (fake, upstream):
            assert await asyncio.gather(*(get(fake, upstream) for _ in range(3))) == [b"ok"] * 3
            assert fake.open == 3
            await until(lambda: not fake.open)
            assert await get(fake, upstream) == b"ok"
            assert fake.connections == 4

    run(main)
