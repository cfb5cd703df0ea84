"""An engine without vLLM: a real Link on a real segment, with a target that follows a script, behind a real Control."""

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import grpc

from specdec.channel.layout import Layout
from specdec.channel.segment import Role, Segment
from specdec.control_auth import ControlAuth
from specdec.proto import speculation_pb2 as pb
from specdec.proto import speculation_pb2_grpc as pb_grpc
from specdec.router.loop import speculate
from specdec.router.pairs import Pair, Request, Session
from specdec.router.steps import OrderPolicy
from specdec.telemetry import PairMetrics, RouterMetrics
from specdec.verifier import link
from specdec.verifier.control import Control


class FakeEngine:
    """Runs one cycle a `step`. No draft is asked: of k drafts, `accept(k)` are said to stand.

    `ran` has the (order, k) of every cycle of a session, in the engine's own view.
    """

    def __init__(self, segment: Segment, accept: Callable[[int], int] = lambda steps: steps // 2) -> None:
        self.link, self.accept = link.Link(segment, vocab_size=1000), accept
        self.ran: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self._live: list[link.Session] = []
        self._limits: dict[int, int] = {}
        self._prefilled: set[int] = set()

    def open(self, request_id: str, *, cycles: int = 1_000_000, prompt_tokens: int = 5) -> link.Session:
        """A session that ends with its `cycles`th cycle."""
        session = self.link.open(request_id, [1] * prompt_tokens, prompt_tokens)
        assert session is not None
        self._live.append(session)
        self._limits[session.id] = cycles
        return session

    def close(self, session: link.Session) -> None:
        """The session is aborted; the next frame says so."""
        self._live.remove(session)
        self.link.close(session)

    @property
    def idle(self) -> bool:
        return not self._live

    def step(self) -> dict[int, int | None]:
        """One cycle. Returns every live session's k; None where it was held back."""
        self.link.begin()
        admitted: dict[int, int | None] = {}
        for session in list(self._live):
            if session.id not in self._prefilled:
                self._prefilled.add(session.id)
                self._commit(session, 1)
                continue
            steps = admitted[session.id] = self.link.admit(session)
            if steps is None:
                continue
            self.link.scheduled(session, steps)
            self.ran[session.id].append((0 if session.reason == link.STANDING else session.order, steps))
            self._commit(session, self.accept(steps) + 1)
            if len(self.ran[session.id]) >= self._limits[session.id]:
                self.close(session)
        self.link.finish()
        return admitted

    async def run(self, pause_s: float = 0) -> None:
        """Steps until every session has ended."""
        while not self.idle:
            held = None in self.step().values()
            await asyncio.sleep(pause_s or 0.0002 * held)

    def _commit(self, session: link.Session, tokens: int) -> None:
        session.tokens.extend([7] * tokens)
        self.link.committed(session, tokens, tokens)


class FakePair:
    """A pair's side of the channel and its gRPC, without vLLM. `description` is what it says of itself."""

    def __init__(self, segment: Segment, engine: FakeEngine, metrics: PairMetrics) -> None:
        self.segment, self.engine, self.metrics = segment, engine, metrics
        self.description = pb.PairDescription(pair="test", model="fake", engine_ready=True, max_steps=8)
        self.control = Control(segment, lambda: self.description, metrics)
        self.address = ""

    @property
    def router_until_ns(self) -> int:
        return self.segment.word("control.router_until_ns").value


@contextlib.asynccontextmanager
async def fake_pair(
    folder: Path, *, max_sessions: int = 8, port: int = 0, auth: ControlAuth | None = None
) -> AsyncIterator[FakePair]:
    """A FakePair whose Control listens on loopback."""
    path = folder / "specdec-test"
    layout = Layout(max_sessions, max_steps=8)
    with Segment.create(path, layout) as segment, Segment.attach(path, Role.ENGINE) as engine_side:
        pair = FakePair(segment, FakeEngine(engine_side), PairMetrics())
        auth = auth or ControlAuth()
        server = grpc.aio.server(interceptors=auth.interceptors(), options=[("grpc.so_reuseport", 0)])
        pb_grpc.add_SpeculationServicer_to_server(pair.control, server)
        pair.address = f"127.0.0.1:{auth.listen(server, f'127.0.0.1:{port}')}"
        pair.control.start()
        await server.start()
        try:
            yield pair
        finally:
            pair.control.stop()
            await server.stop(0)
            await until(lambda: not pair.control.routers)  # gRPC crashes if the loop ends before its streams have


def new_router(pair: FakePair, policy: OrderPolicy | None = None, *, lease_ms: int = 1000) -> Pair:
    """A router's end of the stream. Its sessions are driven by `policy`, or by nobody."""

    async def drive(pair: Pair, session: Session) -> None:
        if policy is not None:
            await speculate(session, pair, policy)

    return Pair(pair.address, lease_ms=lease_ms, metrics=RouterMetrics(), drive=drive)


@contextlib.asynccontextmanager
async def router(
    pair: FakePair, policy: OrderPolicy | None = None, *, lease_ms: int = 1000, requests: Sequence[Request] = ()
) -> AsyncIterator[Pair]:
    """A connected router, which has sent `requests` on before."""
    known = new_router(pair, policy, lease_ms=lease_ms)
    for request in requests:
        known.register(request)
    task = asyncio.create_task(known.run())
    try:
        await until(lambda: known.connected and pair.router_until_ns)
        yield known
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(met: Callable[[], object], timeout_s: float = 5) -> None:
    """Returns once `met()` is true; fails after `timeout_s`."""
    end = time.monotonic() + timeout_s
    while not met():
        assert time.monotonic() < end, f"not within {timeout_s} s"
        await asyncio.sleep(0.001)
