"""A router on a real socket, in front of a FakeVllm on another, with a FakePair's real gRPC beside it; and what a
client asks of it."""

import asyncio
import contextlib
import json
import re
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from fake_engine import FakePair, fake_pair, until
from specdec.proto import speculation_pb2 as pb
from specdec.router.app import create_app
from specdec.router.pairs import Pair
from specdec.router.protocol import Protocol
from specdec.router.settings import RouterSettings
from specdec.serve import listen, serving

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
OURS = re.compile(r"specdec-[0-9a-f]{32}")
Send = Callable[[dict[str, Any]], Awaitable[None]]


@dataclass
class Asked:
    """A request as vLLM got it."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str | None:
        return dict(self.headers).get(name)


Answer = Callable[[Asked, Send], Awaitable[None]]


@dataclass
class FakeVllm:
    """vLLM's HTTP side: it keeps what it was asked, and answers with what the test gives it."""

    answer: Answer
    url: str = ""
    asked: list[Asked] = field(default_factory=list)
    cancelled: int = 0  # requests whose asker hung up before their answer was whole

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        target = (scope["raw_path"] + b"?" * bool(scope["query_string"]) + scope["query_string"]).decode()
        headers = [(name.decode(), value.decode("latin-1")) for name, value in scope["headers"]]
        asked = Asked(scope["method"], target, headers, body)
        self.asked.append(asked)
        answering, hang_up = asyncio.create_task(self.answer(asked, send)), asyncio.create_task(receive())
        await asyncio.wait((answering, hang_up), return_when=asyncio.FIRST_COMPLETED)
        self.cancelled += not answering.done()
        hang_up.cancel()
        answering.cancel()
        (error, _) = await asyncio.gather(answering, hang_up, return_exceptions=True)
        if isinstance(error, Exception):
            raise error


async def start(send: Send, status: int = 200, *headers: tuple[str, str]) -> None:
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    await send({"type": "http.response.start", "status": status, "headers": raw})


async def chunk(send: Send, body: bytes, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


def reply(body: bytes = b"{}", status: int = 200, *headers: tuple[str, str]) -> Answer:
    """A whole answer, JSON unless `headers` say otherwise."""

    async def answer(asked: Asked, send: Send) -> None:
        await start(send, status, *(headers or (("content-type", "application/json"),)))
        await chunk(send, body, more=False)

    return answer


def stream(*chunks: bytes) -> Answer:
    """A stream of events in these very chunks."""

    async def answer(asked: Asked, send: Send) -> None:
        await start(send, 200, ("content-type", "text/event-stream; charset=utf-8"))
        for part in chunks:
            await chunk(send, part)
            await asyncio.sleep(0.002)  # so that no two are joined on the way
        await chunk(send, b"", more=False)

    return answer


async def never(asked: Asked, send: Send) -> None:
    await asyncio.Event().wait()


async def refused(asked: Asked, send: Send) -> None:
    pytest.fail("the engine should not have been asked")


def event(fields: dict[str, Any], compact: bool = True) -> bytes:
    return b"data: " + json.dumps(fields, separators=(",", ":") if compact else None).encode() + b"\n\n"


def delta(text: str, **more: Any) -> bytes:
    return event({"id": "c", "choices": [{"index": 0, "delta": {"content": text}}], **more})


DONE = b"data: [DONE]\n\n"


@dataclass
class Router:
    """What a test holds of the running router."""

    url: str
    vllm: FakeVllm
    fake: FakePair
    pair: Pair
    client: httpx.AsyncClient
    app: FastAPI
    runner: asyncio.Runner | None = None
    before: dict[Any, float] = field(default_factory=dict)

    def reset(self) -> None:
        self.vllm.asked, self.vllm.cancelled = [], 0
        self.fake.engine.ran.clear()
        self.before = {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for metric in self.pair._metrics.registry.collect()
            for sample in metric.samples
        }

    def run(self, main: Callable[[], Any]) -> None:
        assert self.runner
        self.runner.run(within(20, main))

    @contextlib.asynccontextmanager
    async def answering(self, answer: Answer) -> AsyncIterator[None]:
        """The engine answers so. At the end nothing may be left of what was asked."""
        self.vllm.answer = answer
        # the loop stood still since the test before, and a stream that broke meanwhile is noticed only now
        await asyncio.sleep(0.03)
        await until(lambda: self.pair.connected, 5)
        self.described(http_url=self.vllm.url, engine_ready=True)
        yield
        await until(lambda: self.at_rest, 1)

    async def post(self, path: str = CHAT, fields: dict[str, Any] | None = None, **more: Any) -> httpx.Response:
        # an answer to what the router asked before `described` may still come in, and stand until it asks again
        until_s = time.monotonic() + 5
        while self.pair.ready != self.fake.description.engine_ready and time.monotonic() < until_s:
            await asyncio.sleep(0.01)
        content = {} if "content" in more else {"json": fields or {"messages": []}}
        return await self.client.post(path, **content, **more)

    def described(self, **fields: Any) -> None:
        """The pair says something else of itself, and the router has just asked."""
        for name, value in fields.items():
            setattr(self.fake.description, name, value)
        self.pair.description = pb.PairDescription()
        self.pair.description.CopyFrom(self.fake.description)

    def counted(self, name: str, **labels: str) -> float | None:
        """How far a metric has come in this test."""
        value = self.pair._metrics.registry.get_sample_value(name, labels)
        before = self.before.get((name, *sorted(labels.items())), 0)
        return None if value is None else value - before

    @property
    def in_flight(self) -> float | None:
        return self.counted("specdec_router_requests_in_flight")

    @property
    def at_rest(self) -> bool:
        return self.in_flight == 0 and self.pair.load == 0


@contextlib.asynccontextmanager
async def routed(folder: Path, answer: Answer, **settings: Any) -> AsyncIterator[Router]:
    """Router, FakeVllm and FakePair, each on its own socket, and a client of the router."""
    vllm = FakeVllm(answer)
    engine_socket, router_socket = listen("127.0.0.1", 0, "vLLM"), listen("127.0.0.1", 0, "router")
    url = url_of(router_socket)
    async with fake_pair(folder) as fake, serving(vllm, engine_socket, 1):
        fake.description.http_url = vllm.url = url_of(engine_socket)
        defaults = {"policy": "fixed", "steps": 3, "window": 1, "pairs": [fake.address]}
        app = create_app(RouterSettings(**(defaults | settings)))
        async with serving(app, router_socket, 1, Protocol):
            pair = app.state.pairs[0]
            await until(lambda: pair.ready and fake.router_until_ns)
            async with httpx.AsyncClient(base_url=url, timeout=10, trust_env=False) as client:
                yield Router(url, vllm, fake, pair, client, app)


@contextlib.asynccontextmanager
async def sent(router: Router, request: bytes) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A client's bare connection, on which `request` has been sent."""
    reader, writer = await asyncio.open_connection(*router.url.removeprefix("http://").split(":"))
    writer.write(request)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@contextlib.asynccontextmanager
async def rude_engine(*parts: bytes) -> AsyncIterator[str]:
    """A server that answers each request with these bytes, and breaks off."""

    async def talk(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.01)
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with server:
        yield "http://{}:{}".format(*server.sockets[0].getsockname())


def url_of(listener: socket.socket) -> str:
    return "http://{}:{}".format(*listener.getsockname())


def raw_post(path: str, body: bytes = b"{}") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def within(timeout_s: float, main: Callable[[], Any]) -> None:
    await asyncio.wait_for(main(), timeout_s)


def run(main: Callable[[], Any]) -> None:
    asyncio.run(within(20, main))


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error of an answer in OpenAI's form."""
    assert response.headers["content-type"] == "application/json"
    fields = response.json()
    assert list(fields) == ["error"]
    assert set(fields["error"]) == {"message", "type", "param", "code"}
    assert fields["error"]["message"]
    return fields["error"]
