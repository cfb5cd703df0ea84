"""gRPC to routers: orders into the order table, verdicts out of the ring, a frame a cycle."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import numpy as np

from specdec.channel.layout import CLOSED, OPENED_ROW, VERDICT_HEAD, VERDICT_ROW
from specdec.channel.segment import Segment, now_ns
from specdec.proto import speculation_pb2 as pb
from specdec.proto import speculation_pb2_grpc as pb_grpc
from specdec.telemetry import PairMetrics
from specdec.verifier.verdict_counts import VerdictCounts

log = logging.getLogger(__name__)
Context = grpc.aio.ServicerContext[Any, Any]
_MAX_WINDOW, _MAX_LEASE_MS = 1024, 60_000  # no order holds the engine's memory for longer than this
_QUEUE_FRAMES = 4096  # a router this far behind is dropped: it would order for cycles long past


class _Router:
    """One connected router."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[pb.VerdictFrame | None] = asyncio.Queue(_QUEUE_FRAMES)
        self.until_ns = 0
        self.observes = False
        self.steps = 0  # k, as it ordered last


class Control(pb_grpc.SpeculationServicer):
    """Serves `Loop` and `Describe`. The only writer of the order table, the only reader of the verdict ring."""

    def __init__(self, segment: Segment, describe: Callable[[], pb.PairDescription], metrics: PairMetrics) -> None:
        self._segment, self._describe = segment, describe
        self._counts = VerdictCounts(metrics, segment.layout.max_steps)
        self._orders, self._bell = segment.orders, segment.bell("control.order_bell")
        self._until = segment.word("control.router_until_ns")
        self._verdicts = segment.reader("verdicts")
        self._routers: dict[_Router, None] = {}  # in the order in which they joined
        self._leader: _Router | None = None  # holds the lease: its k is everybody's
        self._deciders: dict[int, _Router] = {}  # who ordered k for the session last, where no cap of its own did
        self._open: dict[int, pb.Opened] = {}
        self._owners: dict[int, _Router] = {}  # who ordered for the session last
        self._running = True
        self.fault: BaseException | None = None  # what ended the passing on of verdicts, if anything did
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pump = threading.Thread(target=self._pump_verdicts, name="verdicts", daemon=True)

    def start(self) -> None:
        """Starts passing verdicts on, in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._pump.start()

    def stop(self) -> None:
        """Ends every router's stream and the pump; sessions go on under the standing order."""
        self._running = False
        self._pump.join(1)
        for router in self._routers:
            _hang_up(router)
        self._until.value = 0

    @property
    def routers(self) -> int:
        """Routers connected now."""
        return len(self._routers)

    @property
    def sessions(self) -> int:
        """Sessions open now."""
        return len(self._open)

    # ---- gRPC

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.PairDescription:
        return self._describe()

    async def Loop(
        self, request_iterator: AsyncIterator[pb.OrderFrame], context: Context
    ) -> AsyncIterator[pb.VerdictFrame]:
        router = _Router()
        if self._open:  # sessions older than this router: it may know them from before its stream broke
            router.frames.put_nowait(pb.VerdictFrame(opened=list(self._open.values())))
        self._routers[router] = None
        reader = asyncio.create_task(self._read_orders(router, request_iterator))
        peer = context.peer()  # NOTE: gRPC has freed what peer() reads if the stream ends at the yield below
        log.info("router %s joined", peer)
        try:
            while (frame := await router.frames.get()) is not None:
                yield frame
        finally:
            reader.cancel()
            self._routers.pop(router, None)
            for known in (self._owners, self._deciders):
                for session in [session for session, owner in known.items() if owner is router]:
                    del known[session]
            self._renew()
            log.info("router %s left", peer)

    async def _read_orders(self, router: _Router, frames: AsyncIterator[pb.OrderFrame]) -> None:
        """Writes a router's orders into the table until it hangs up.

        Three things are decided here, each with its own state. Whose verdicts a session's are: the router's that
        ordered for it last (`_owners`). Which k a batch gets: the leader's (`_lead`), so that routers that see only
        some of the sessions do not pull it to and fro; a follower's orders still count for windows, leases and ids.
        What one session gets at most: its order's `cap`, which no leader's k goes beyond.
        """
        try:
            async for frame in frames:
                router.observes |= frame.observe
                router.until_ns = now_ns() + min(frame.lease_ms, _MAX_LEASE_MS) * 1_000_000
                self._renew()
                leader = self._lead(router, frame) if frame.orders else None
                for order in frame.orders:
                    opened = self._open.get(order.session)
                    if opened is not None and order.slot == opened.slot and order.id and order.window:
                        self._owners[order.session] = router
                        self._counts.ordered(order.session, order.id)
                        steps = order.steps
                        if leader not in (None, router):  # k is one for the pair, up to the session's own cap
                            steps = min(leader.steps, order.cap) if order.HasField("cap") else leader.steps
                        self._orders.write(
                            *(order.slot, order.session, order.id, min(steps, 0xFFFF)),
                            *(min(order.window, _MAX_WINDOW), min(order.lease_ms, _MAX_LEASE_MS), order.seen),
                        )
                if frame.orders:
                    self._bell.ring()
        finally:
            _hang_up(router)  # the router has hung up: its stream of verdicts ends too

    def _lead(self, router: _Router, frame: pb.OrderFrame) -> _Router | None:
        """Who holds the lease, with `router`'s k as of this frame. It passes on when its holder has gone, is silent, or
        has no session to learn from, to the router that joined first of those that have one; None: nobody has.

        `_deciders` has the sessions that speak for their router: open ones whose newest order is not cut to a cap.
        The steps of one that is (the request's own, or the policy's for a session whose drafts never stand) say
        nothing of the k that its router wants for the batch, and leave `router.steps` as it is.
        """
        for order in frame.orders:
            if order.session not in self._open or (order.HasField("cap") and order.steps >= order.cap):
                self._deciders.pop(order.session, None)  # its steps may be its own cap
            else:
                self._deciders[order.session] = router
                router.steps = order.steps
        now, able = now_ns(), set(self._deciders.values())
        if self._leader not in able or self._leader.until_ns < now:
            self._leader = next((one for one in self._routers if one in able and one.until_ns >= now), None)
        return self._leader

    def _renew(self) -> None:
        self._until.value = max((router.until_ns for router in self._routers), default=0)

    # ---- verdicts

    def _pump_verdicts(self) -> None:
        try:
            self._pass_on()
        except BaseException as error:
            self.fault = error
            raise

    def _pass_on(self) -> None:
        while self._running:
            body = self._verdicts.wait(0.05)
            if body is None:
                continue
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._publish, _decode(body))

    def _publish(self, frame: pb.VerdictFrame) -> None:
        for opened in frame.opened:
            self._open[opened.session] = opened
        for router in self._routers:
            _offer(router, self._share(frame, router) if len(self._routers) > 1 else frame)
        for verdict in frame.verdicts:
            if verdict.kind == CLOSED:
                self._open.pop(verdict.session, None)
                self._owners.pop(verdict.session, None)
                self._deciders.pop(verdict.session, None)
        self._counts.observe(frame)

    def _share(self, frame: pb.VerdictFrame, router: _Router) -> pb.VerdictFrame | None:
        """The frame without the sessions other routers drive; None if nothing is left."""
        if router.observes:
            return frame
        mine = [v for v in frame.verdicts if self._owners.get(v.session, router) is router]
        if not mine and not frame.opened and not frame.lost:
            return None
        share = pb.VerdictFrame()
        share.CopyFrom(frame)
        del share.verdicts[:]
        share.verdicts.extend(mine)
        return share


def _offer(router: _Router, frame: pb.VerdictFrame | None) -> None:
    if frame is None:
        return
    try:
        router.frames.put_nowait(frame)
    except asyncio.QueueFull:
        _hang_up(router)


def _hang_up(router: _Router) -> None:
    """Ends the router's stream; what is still queued for it is dropped."""
    while not router.frames.empty():
        router.frames.get_nowait()
    router.frames.put_nowait(None)


def _decode(body: bytes) -> pb.VerdictFrame:
    head = np.frombuffer(body, VERDICT_HEAD, 1)[0]
    opened_at = VERDICT_HEAD.itemsize
    rows_at = opened_at + int(head["opened"]) * OPENED_ROW.itemsize
    frame = pb.VerdictFrame(
        cycle=int(head["cycle"]),
        batch=int(head["batch"]),
        draft_us=int(head["draft_us"]),
        schedule_us=int(head["schedule_us"]),
        verify_us=int(head["verify_us"]),
        output_us=int(head["output_us"]),
        lost=int(head["lost"]),
        drafting_us=min(int(head["drafting_us"]), int(head["draft_us"])),
    )
    for session, slot, prompt_tokens, request_id in np.frombuffer(
        body, OPENED_ROW, int(head["opened"]), opened_at
    ).tolist():
        frame.opened.add(
            session=session, slot=slot, prompt_tokens=prompt_tokens, request_id=request_id.decode(errors="replace")
        )
    names = ("session", "order", "kind", "reason", "steps", "proposed", "accepted", "committed", "context", "number")
    for row in np.frombuffer(body, VERDICT_ROW, int(head["rows"]), rows_at).tolist():
        frame.verdicts.add(**dict(zip(names, row, strict=True)))
    return frame
