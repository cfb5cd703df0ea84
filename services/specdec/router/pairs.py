"""A pair as the router knows it: the stream of orders and verdicts, and which session belongs to which request."""

import asyncio
import contextlib
import logging
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from specdec.control_auth import ControlAuth
from specdec.errors import PairUnavailable
from specdec.proto import speculation_pb2 as pb
from specdec.proto import speculation_pb2_grpc as pb_grpc
from specdec.router.observed import Observation
from specdec.router.steps import Order
from specdec.telemetry import RouterMetrics

log = logging.getLogger(__name__)
_REQUEST_ID = re.compile(r"specdec-[0-9a-f]{32}")
_RETRY_S = 0.25
_MISSES = 3  # descriptions in a row that a busy pair may fail to give before it counts as gone
_CHANNEL = (
    ("grpc.enable_http_proxy", 0),  # a pair is no website
    ("grpc.keepalive_time_ms", 5000),  # a host that has vanished says nothing
    ("grpc.keepalive_timeout_ms", 3000),
    ("grpc.http2.max_pings_without_data", 0),
)


def _nothing() -> None: ...


def _reason(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class Verdict:
    """What one cycle did for one session; times are the whole batch's."""

    session: "Session"
    order: int
    kind: int
    steps: int
    proposed: int
    accepted: int
    committed: int
    batch: int = 0
    draft_us: int = 0
    schedule_us: int = 0
    verify_us: int = 0
    output_us: int = 0
    reason: int = 0
    number: int = 0  # of the session's cycles under orders, this one included
    cycle: int = 0  # the pair's: the same for all sessions of the batch
    context: int = 0  # tokens of the session after the cycle


@dataclass(eq=False)
class Session:
    """One generation. Counts are sums over its verdicts."""

    id: int
    slot: int
    request: "Request"
    context: int
    orders: int = 0
    pair: str = ""  # whose it is
    pair_max_steps: int = 64  # largest k that one allows
    cycles: int = 0
    seen: int = 0  # newest cycle whose verdict the loop has read; 0: none, or not known
    proposed: int = 0
    accepted: int = 0
    committed: int = 0
    finished: bool = False
    sent_at: dict[int, float] = field(default_factory=dict)  # order: when it was sent, until a verdict names it
    _verdicts: deque[Verdict | None] = field(default_factory=deque)
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def accept_length(self) -> float:
        """Tokens a cycle, over the cycles so far."""
        return (self.accepted + self.cycles) / self.cycles if self.cycles else 1.0

    def push(self, verdict: Verdict | None) -> None:
        """A verdict for the loop; None: one was lost on the way."""
        self._verdicts.append(verdict)
        self._arrived.set()

    async def next_verdict(self) -> Verdict | None:
        """Waits for the session's next verdict."""
        while not self._verdicts:
            self._arrived.clear()
            await self._arrived.wait()
        return self._verdicts.popleft()


@dataclass(eq=False)
class Request:
    """One HTTP request and the sessions it has become: n of them for each prompt."""

    id: str
    max_steps: int | None = None  # a cap on k from the request itself
    width: int = 1  # sessions it will become
    sessions: list[Session] = field(default_factory=list)
    seen: Observation | None = None  # is told what becomes of it
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _reading: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._reading.set()

    @property
    def paused(self) -> bool:
        """Whether the client does not read what it has been sent."""
        return not self._reading.is_set()

    def pause(self) -> None:
        """Its sessions are held from their next order on."""
        self._reading.clear()

    def resume(self) -> None:
        """The client reads again."""
        self._reading.set()

    async def reading(self, timeout_s: float) -> None:
        """Returns once the client reads, or after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._reading.wait(), timeout_s)

    def touch(self) -> None:
        """Wakes whoever waits for the counts."""
        self._changed.set()

    async def settled(self, completion_tokens: int, timeout_s: float) -> tuple[int, int]:
        """(accepted, rejected) draft tokens once the verdicts account for all tokens, or after `timeout_s`."""
        until = time.monotonic() + timeout_s
        while sum(s.committed for s in self.sessions) < completion_tokens and (left := until - time.monotonic()) > 0:
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), left)
            except TimeoutError:
                break
        accepted = min(sum(s.accepted for s in self.sessions), completion_tokens)
        return accepted, max(0, sum(s.proposed for s in self.sessions) - accepted)


class Pair:
    """One pair. `run` keeps its stream open; `drive` is started for every session that opens."""

    def __init__(
        self,
        address: str,
        *,
        lease_ms: int,
        metrics: RouterMetrics,
        drive: Callable[["Pair", Session], Awaitable[None]],
        auth: ControlAuth | None = None,
        name: str = "",
        max_step_age_s: float = float("inf"),
        gone: Callable[[str], None] | None = None,
    ) -> None:
        """`name`: the host its certificate is for, where that is another than the address's. `gone` is told the
        address when the pair is gone for good."""
        self.address = address
        self._auth, self._max_step_age_s = auth or ControlAuth(), max_step_age_s
        self._name = (name or address.rpartition(":")[0]).strip("[]")  # a certificate has an IPv6 address without
        self.from_dns = self.leaving = False  # leaving: its name has it no more
        self.changed: Callable[[], None] = _nothing  # called when the pair has told something new
        self._lease_ms, self._metrics, self._drive, self._gone = lease_ms, metrics, drive, gone
        self.description: pb.PairDescription | None = None
        self.connected = False
        metrics.pair_up.labels(address).set(0)
        metrics.pair_ready.labels(address).set_function(lambda: float(self.ready))
        self._requests: dict[str, Request] = {}
        self._sessions: dict[int, Session] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._outbox: list[pb.Order] = []
        self._posted = asyncio.Event()

    # ---- what the proxy asks

    @property
    def http_url(self) -> str:
        """Where the pair's vLLM answers. Raises PairUnavailable before the pair has been reached once."""
        if self.description is None:
            raise PairUnavailable(f"pair {self.address} has not been reached yet")
        return self.description.http_url

    @property
    def ready(self) -> bool:
        """Whether the pair's vLLM answered when last asked, and its engine steps; it needs no loop to answer."""
        told = self.description
        return told is not None and told.engine_ready and told.step_age_ms <= self._max_step_age_s * 1000

    @property
    def load(self) -> int:
        """Sessions being answered, n for a request with n choices."""
        return sum(request.width for request in self._requests.values())

    def register(self, request: Request) -> None:
        """Before the request is sent on: its sessions will be driven."""
        self._requests[request.id] = request

    def release(self, request: Request) -> None:
        """After the request has been answered. Sessions still open are driven to their end."""
        self._requests.pop(request.id, None)

    def forget(self) -> None:
        """The pair is gone for good, and `run` has ended: no metric names it any more."""
        self._metrics.forget(self.address)
        if self._gone is not None:
            self._gone(self.address)

    # ---- what the loop asks

    async def cycle(self, session: Session, order: Order) -> Verdict:
        """See loop.Cycles. While the client does not read, the session is held."""
        while session.request.paused and session.seen > 1 and not session.finished:
            # a window of one cycle, which the newest verdict has used up already
            self._order(session, Order(order.steps, 1, order.cap), seen=session.seen - 1)
            await session.request.reading(self._lease_ms / 2000)
        self._order(session, order)
        while (verdict := await session.next_verdict()) is None:
            session.seen = 0  # one was lost, and nobody knows how far the session is
            self._order(session, order)
        session.seen = verdict.number
        return verdict

    def _order(self, session: Session, order: Order, seen: int | None = None) -> None:
        caps = [cap for cap in (session.request.max_steps, order.cap) if cap is not None]
        session.orders += 1
        told = pb.Order(
            session=session.id,
            slot=session.slot,
            id=session.orders,
            steps=min(order.steps, *caps) if caps else order.steps,
            window=order.window,
            seen=session.seen if seen is None else seen,
            lease_ms=self._lease_ms,
        )
        if caps:
            told.cap = min(caps)
        self._outbox.append(told)
        session.sent_at[session.orders] = time.monotonic()
        self._metrics.orders.inc()
        self._posted.set()

    # ---- the stream

    async def run(self) -> None:
        """Keeps the loop's stream to the pair open until cancelled. If it breaks, sessions end here and go on there."""
        told, task = "", asyncio.current_task()
        while not (task and task.cancelling()):  # NOTE: gRPC swallows a cancellation that meets the stream's end
            reached = False
            try:
                async with self._auth.channel(self.address, self._name, _CHANNEL) as channel:
                    stub = pb_grpc.SpeculationStub(channel)
                    await self._describe(stub)
                    reached = True
                    poll = asyncio.create_task(self._poll(stub))
                    try:
                        await self._stream(stub)
                    finally:
                        poll.cancel()
                told = ""
            except asyncio.CancelledError:
                self.connected = False  # the router itself is ending
                raise
            except Exception as error:  # whatever it was, the pair must come back
                reason = _reason(error)
                if not reached and self.description is not None:
                    self.description.engine_ready = False
                if reason != told:
                    level = logging.INFO if self.description is None else logging.WARNING  # at first it may be starting
                    told = reason
                    log.log(level, "pair %s: %s", self.address, reason)
            finally:
                self._lost()
            await asyncio.sleep(_RETRY_S)

    async def _poll(self, stub: Any) -> None:
        misses = 0
        while True:
            await asyncio.sleep(0.25 if not self.ready else 1.0)
            try:
                await self._describe(stub)
                misses = 0
            except Exception as error:  # the pair's failure, or a secret file that cannot be read just now
                misses += 1
                if misses >= _MISSES and self.description is not None:
                    self.description.engine_ready = False
                if misses == _MISSES:
                    log.warning("pair %s: it does not say how it is: %s", self.address, _reason(error))

    async def _describe(self, stub: Any) -> None:
        self.description = await stub.Describe(pb.DescribeRequest(), timeout=2, metadata=self._auth.metadata())
        self.changed()

    async def _stream(self, stub: Any) -> None:
        call = stub.Loop(metadata=self._auth.metadata())
        writer = asyncio.create_task(self._write(call))
        writer.add_done_callback(lambda _: call.cancel())
        try:
            async for frame in call:
                self._on_frame(frame)
        except asyncio.CancelledError:
            if writer.done() and not writer.cancelled():
                raise PairUnavailable(f"writing to pair {self.address} failed: {writer.exception()}") from None
            raise
        finally:
            writer.cancel()
            call.cancel()
            await asyncio.gather(writer, return_exceptions=True)  # it must not take the next stream's orders

    async def _write(self, call: Any) -> None:
        """Orders as they come, all that are due in one frame; without any, a sign of life."""
        await call.write(pb.OrderFrame(lease_ms=self._lease_ms))
        self.connected = True
        log.info("pair %s: connected", self.address)
        self._metrics.pair_up.labels(self.address).set(1)
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._posted.wait(), self._lease_ms / 4000)
            self._posted.clear()
            orders, self._outbox = self._outbox, []
            await call.write(pb.OrderFrame(orders=orders, lease_ms=self._lease_ms))

    def _lost(self) -> None:
        """The stream broke: the pair runs its sessions plainly, and what they do is not heard of any more."""
        if self.connected:
            log.warning("pair %s: the loop's stream ended; its sessions decode plainly", self.address)
        self.connected = False
        self._metrics.pair_up.labels(self.address).set(0)
        for session in list(self._sessions.values()):
            self._close(session)
        self._outbox.clear()

    def _on_frame(self, frame: pb.VerdictFrame) -> None:
        for opened in frame.opened:
            self._on_opened(opened)
        if frame.lost:
            for session in self._sessions.values():
                session.push(None)
        for verdict in frame.verdicts:
            if (mine := self._sessions.get(verdict.session)) is not None:
                self._on_verdict(mine, verdict, frame)

    def _on_opened(self, opened: pb.Opened) -> None:
        found = _REQUEST_ID.search(opened.request_id)
        request = self._requests.get(found.group()) if found else None
        if request is None or opened.session in self._sessions:
            return  # another router's, or sent to vLLM directly
        # one that was known before the stream broke: the engine wants newer orders than it has seen
        orders = max((before.orders for before in request.sessions if before.id == opened.session), default=0)
        session = Session(opened.session, opened.slot, request, opened.prompt_tokens, orders, self.address)
        if self.description is not None and self.description.max_steps:
            session.pair_max_steps = self.description.max_steps
        request.sessions.append(session)
        if request.seen:
            request.seen.opened(request.id, again=orders > 0)
        self._sessions[session.id] = session
        self._metrics.sessions.set(len(self._sessions))
        task = asyncio.ensure_future(self._drive(self, session))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _on_verdict(self, session: Session, verdict: pb.Verdict, frame: pb.VerdictFrame) -> None:
        session.context = verdict.context
        session.proposed += verdict.proposed
        session.accepted += verdict.accepted
        session.committed += verdict.committed
        session.cycles += verdict.kind == pb.VERDICT_KIND_CYCLE
        session.request.touch()
        if session.request.seen:
            session.request.seen.committed(session.request.id, verdict, frame, session.cycles)
        if verdict.kind == pb.VERDICT_KIND_CLOSED:
            self._close(session)
            return
        if verdict.kind != pb.VERDICT_KIND_CYCLE:
            return
        if not verdict.order:
            return  # the standing order's: nobody waits for it
        self._metrics.verdicts.inc()
        if (sent_at := session.sent_at.get(verdict.order)) is not None:
            self._metrics.order_lag.observe(time.monotonic() - sent_at)
            session.sent_at = {order: at for order, at in session.sent_at.items() if order > verdict.order}
        session.push(
            Verdict(
                session,
                verdict.order,
                verdict.kind,
                verdict.steps,
                verdict.proposed,
                verdict.accepted,
                verdict.committed,
                frame.batch,
                frame.draft_us,
                frame.schedule_us,
                frame.verify_us,
                frame.output_us,
                verdict.reason,
                verdict.number,
                frame.cycle,
                verdict.context,
            )
        )

    def _close(self, session: Session) -> None:
        self._sessions.pop(session.id, None)
        self._metrics.sessions.set(len(self._sessions))
        session.finished = True
        if session.request.seen:
            session.request.seen.closed(session.request.id)
        session.push(Verdict(session, 0, pb.VERDICT_KIND_CLOSED, 0, 0, 0, 0))
        session.request.touch()
