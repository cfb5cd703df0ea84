"""A stand-in for a pair: HTTP that streams an event a cycle to every request, and the gRPC of its verifier.

It computes nothing, so that what is measured in front of it is the router. `python -m specdec.standin HTTP_PORT
CONTROL_PORT CYCLES_A_SECOND` serves until SIGTERM.
"""

import asyncio
import itertools
import json
import re
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc

from specdec.proto import speculation_pb2 as pb
from specdec.proto import speculation_pb2_grpc as pb_grpc

_HOST = "127.0.0.1"
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_ID = re.compile(rb"x-request-id: *(\S+)", re.IGNORECASE)
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_TOKENS_A_CYCLE = 2
_HEADLINE = {"id": "chatcmpl-stand-in", "object": "chat.completion.chunk", "created": 1, "model": "stand-in"}


def _event(fields: dict[str, Any]) -> bytes:
    data = b"data: " + json.dumps({**_HEADLINE, **fields}, separators=(",", ":")).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


_DELTA = _event({"choices": [{"index": 0, "delta": {"content": " two tokens"}, "logprobs": None}]})
_DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


class StandIn(pb_grpc.SpeculationServicer):
    """Its streams, and the routers it tells of them."""

    def __init__(self, http_url: str) -> None:
        self._http_url = http_url
        self.streams: dict[int, _Stream] = {}
        self._opened: list[pb.Opened] = []
        self._routers: set[asyncio.Queue[pb.VerdictFrame]] = set()
        self._numbers = itertools.count(1)
        self._cycle = 0

    def open(self, stream: "_Stream", request_id: str) -> int:
        """A session; its events begin with the next cycle, but for the first, which comes at once."""
        number = next(self._numbers)
        self.streams[number] = stream
        self._opened.append(pb.Opened(session=number, slot=number % 1024, request_id=request_id, prompt_tokens=8))
        stream.transport.write(_HEAD + _DELTA)
        return number

    async def run(self, cycles_s: float) -> None:
        """A cycle after another."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + 1 / cycles_s, loop.time())
            await asyncio.sleep(due - loop.time())
            self._step()

    def _step(self) -> None:
        self._cycle += 1
        frame = pb.VerdictFrame(
            cycle=self._cycle, batch=len(self.streams), opened=self._opened, verify_us=20_000, schedule_us=500
        )
        self._opened = []
        for number, stream in list(self.streams.items()):
            stream.left -= 1
            stream.cycles += 1
            frame.verdicts.add(
                session=number,
                order=stream.order,
                kind=pb.VERDICT_KIND_CYCLE,
                steps=stream.steps,
                proposed=stream.steps,
                accepted=min(stream.steps, _TOKENS_A_CYCLE - 1),
                committed=_TOKENS_A_CYCLE,
                context=8 + _TOKENS_A_CYCLE * stream.cycles,
                number=stream.cycles,
            )
            if stream.left > 0:
                stream.transport.write(_DELTA)
                continue
            tokens = _TOKENS_A_CYCLE * stream.cycles
            usage = {"prompt_tokens": 8, "completion_tokens": tokens, "total_tokens": 8 + tokens}
            stream.transport.write(_event({"choices": [], "usage": usage}) + _DONE)
            self.close(number)
            frame.verdicts.add(session=number, kind=pb.VERDICT_KIND_CLOSED)
        if frame.verdicts or frame.opened:
            for router in self._routers:
                router.put_nowait(frame)

    def close(self, number: int) -> None:
        """The session is over."""
        self.streams.pop(number, None)

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.PairDescription:
        return pb.PairDescription(
            pair="stand-in", model="stand-in", http_url=self._http_url, max_steps=8, max_sessions=1024,
            engine_ready=True, draft_up=True,
        )  # fmt: skip

    async def Loop(self, frames: AsyncIterator[pb.OrderFrame], context: Any) -> AsyncIterator[pb.VerdictFrame]:
        verdicts: asyncio.Queue[pb.VerdictFrame] = asyncio.Queue()
        self._routers.add(verdicts)
        reader = asyncio.create_task(self._read(frames))
        try:
            while True:
                yield await verdicts.get()
        finally:
            reader.cancel()
            self._routers.discard(verdicts)

    async def _read(self, frames: AsyncIterator[pb.OrderFrame]) -> None:
        async for frame in frames:
            for order in frame.orders:
                if (stream := self.streams.get(order.session)) is not None:
                    stream.order, stream.steps = order.id, order.steps


class _Stream(asyncio.Protocol):
    """One connection: reads a request, and is written to by the cycles."""

    def __init__(self, engine: StandIn) -> None:
        self._engine, self._held = engine, b""
        self.transport: asyncio.Transport
        self.left = self.cycles = self.order = self.steps = self._number = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._held += data
        head, blank, body = self._held.partition(b"\r\n\r\n")
        if not blank or len(body) < int(found[1] if (found := _LENGTH.search(head)) else 0):
            return
        self._held = b""
        if not body:  # readiness, or whatever else is asked without a body
            self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}")
            return
        self.left, self.cycles, self.order, self.steps = json.loads(body).get("max_tokens") or 16, 0, 0, 0
        self._number = self._engine.open(self, (found[1] if (found := _ID.search(head)) else b"").decode())

    def connection_lost(self, error: Exception | None) -> None:
        self._engine.close(self._number)


async def serve(http_port: int, control_port: int, cycles_s: float) -> None:
    """Serves until SIGTERM."""
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stopped.set)
    engine = StandIn(f"http://{_HOST}:{http_port}")
    control = grpc.aio.server()
    pb_grpc.add_SpeculationServicer_to_server(engine, control)
    control.add_insecure_port(f"{_HOST}:{control_port}")
    await control.start()
    http = await loop.create_server(lambda: _Stream(engine), _HOST, http_port)
    cycles = asyncio.create_task(engine.run(cycles_s))
    await stopped.wait()
    cycles.cancel()
    http.close()
    await control.stop(0)


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
