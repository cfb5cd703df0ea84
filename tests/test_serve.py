"""serve.py: sockets, and servers that share an event loop with other work."""

import asyncio
import signal
import socket
import time

import httpx
import pytest
from fastapi import FastAPI
from starlette.responses import StreamingResponse

from specdec.errors import SettingsError
from specdec.serve import listen, serving


def url_of(listener: socket.socket) -> str:
    return "http://{}:{}".format(*listener.getsockname()[:2])


def app_with(answer) -> FastAPI:
    app = FastAPI()
    app.get("/")(answer)
    return app


async def get(url: str) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False, timeout=5) as client:
        return await client.get(url)


# ---- listen


def test_a_listener_takes_connections():
    with listen("127.0.0.1", 0, "--port") as listener, socket.create_connection(listener.getsockname()):
        assert listener.accept()


@pytest.mark.parametrize(
    ("host", "why"), [("127.0.0.1", "Address already in use"), ("192.0.2.1", "Cannot assign requested address")]
)
def test_an_address_that_cannot_be_had_names_the_setting(host, why):
    with listen("127.0.0.1", 0, "--port") as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError) as caught:
            listen(host, port, "--health-port")
        assert str(caught.value) == f"--health-port: cannot listen on {host}:{port}: {why}"


def test_an_address_lost_between_bind_and_listen_names_the_setting(monkeypatch):
    class Late(socket.socket):
        def listen(self, backlog):
            raise OSError(98, "Address already in use")

    monkeypatch.setattr(socket, "socket", Late)
    with pytest.raises(SettingsError, match=r"^--port: cannot listen on 127\.0\.0\.1:0: Address already in use$"):
        listen("127.0.0.1", 0, "--port")


def test_a_port_can_be_had_again_at_once():
    """SO_REUSEADDR: a restarted service does not wait for old connections to time out."""
    with listen("127.0.0.1", 0, "--port") as listener:
        address = listener.getsockname()
        with socket.create_connection(address):
            served, _ = listener.accept()
            served.close()  # the server's side closes first and stays in TIME_WAIT
    with listen(*address, "--port"):
        pass


# ---- serving


def test_it_serves_inside_the_context_only():
    async def answer() -> dict:
        return {"n": 1}

    async def main():
        listener = listen("127.0.0.1", 0, "test")
        url = url_of(listener)
        async with serving(app_with(answer), listener):
            assert (await get(url)).json() == {"n": 1}
        with pytest.raises(httpx.ConnectError):
            await get(url)

    asyncio.run(main())


def test_two_servers_share_a_loop_and_leave_signals_alone():
    async def one() -> int:
        return 1

    async def two() -> int:
        return 2

    async def main():
        before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
        a, b = listen("127.0.0.1", 0, "a"), listen("127.0.0.1", 0, "b")
        async with serving(app_with(one), a), serving(app_with(two), b):
            assert ((await get(url_of(a))).json(), (await get(url_of(b))).json()) == (1, 2)
            assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before

    asyncio.run(main())


def test_a_second_write_does_not_wait_for_the_firsts_acknowledgement():
    """Nagle's algorithm would hold every streamed token back for the 40 ms that a delayed acknowledgement takes."""

    async def parts():
        for _ in range(5):
            yield "x"
            await asyncio.sleep(0.001)

    async def answer() -> StreamingResponse:
        return StreamingResponse(parts())

    async def main():
        listener, took_s = listen("127.0.0.1", 0, "test"), []
        async with serving(app_with(answer), listener), httpx.AsyncClient(trust_env=False) as client:
            for _ in range(10):  # the first few of a connection are acknowledged at once
                started = time.monotonic()
                assert (await client.get(url_of(listener))).text == "xxxxx"
                took_s.append(time.monotonic() - started)
        assert min(took_s[5:]) < 0.03

    asyncio.run(main())


@pytest.mark.parametrize(("grace_s", "count", "whole"), [(5, 3, True), (0, 300, False)])
def test_answers_in_progress_get_the_grace(grace_s, count, whole):
    async def parts():
        for _ in range(count):
            yield "x"
            await asyncio.sleep(0.1)

    async def answer() -> StreamingResponse:
        return StreamingResponse(parts())

    async def main():
        listener, came = listen("127.0.0.1", 0, "test"), b""
        async with httpx.AsyncClient(trust_env=False, timeout=5) as client:
            async with serving(app_with(answer), listener, grace_s):
                response = await client.send(client.build_request("GET", url_of(listener)), stream=True)
            try:
                async for part in response.aiter_raw():
                    came += part
            except httpx.RemoteProtocolError:
                pass
            await response.aclose()
        assert (came == b"x" * count) is whole

    asyncio.run(main())


def test_an_error_inside_the_context_stops_the_server():
    async def main():
        listener = listen("127.0.0.1", 0, "test")
        url = url_of(listener)
        with pytest.raises(ZeroDivisionError):
            async with serving(app_with(lambda: 1), listener):
                raise ZeroDivisionError
        with pytest.raises(httpx.ConnectError):
            await get(url)

    asyncio.run(main())
