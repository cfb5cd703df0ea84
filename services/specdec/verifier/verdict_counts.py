"""A pair's metrics, from the verdict frames its engine writes."""

import time
from collections.abc import Iterable
from dataclasses import dataclass

from specdec.channel.layout import CLOSED, CYCLE, DRAFT_LATE, REASONS
from specdec.proto import speculation_pb2 as pb
from specdec.telemetry import SESSION_STATES, PairMetrics, stages_us


@dataclass
class _Session:
    """An open session, from its verdicts."""

    state: str = "reading"
    tokens: int = 0
    first_s: float = 0.0  # when its first tokens came, and how many that were
    first_tokens: int = 0
    last_s: float = 0.0
    order: int = 0  # one that no verdict has named yet, and when it arrived
    ordered_s: float = 0.0


class VerdictCounts:
    """Counts each frame once, before it is shared between routers."""

    def __init__(self, metrics: PairMetrics, max_steps: int) -> None:
        self._metrics = metrics
        for position in range(1, max_steps + 1):  # a counter that appears above 0 has no rate at first
            metrics.proposed_at.labels(str(position))
            metrics.accepted_at.labels(str(position))
        self._sessions: dict[int, _Session] = {}

    def ordered(self, session: int, order: int) -> None:
        """An order has arrived. Those that replace it before a verdict names one of them count from the first."""
        seen = self._sessions.get(session)
        if seen is not None and not seen.order:
            seen.order, seen.ordered_s = order, time.monotonic()

    def observe(self, frame: pb.VerdictFrame) -> None:
        """Counts a frame's verdicts."""
        m, now_s = self._metrics, time.monotonic()
        m.lost.inc(frame.lost)
        for opened in frame.opened:
            self._sessions[opened.session] = _Session()
        cycles = [verdict for verdict in frame.verdicts if verdict.kind == CYCLE]
        for verdict in frame.verdicts:
            m.tokens.inc(verdict.committed)
            if (session := self._sessions.get(verdict.session)) is not None:
                self._follow(session, verdict, now_s)
        for verdict in cycles:
            self._count_cycle(verdict)
        if cycles:
            self._count_positions(cycles)
            m.cycles.inc()
            spent_us = stages_us(frame)
            m.cycle.observe(sum(spent_us.values()) / 1e6)
            for stage, us in spent_us.items():
                m.stage.labels(stage).observe(us / 1e6)
        self._count_states()

    def _follow(self, session: _Session, verdict: pb.Verdict, now_s: float) -> None:
        if verdict.committed:
            session.tokens += verdict.committed
            session.last_s = now_s
            if not session.first_s:
                session.first_s, session.first_tokens = now_s, verdict.committed
        if verdict.kind == CLOSED:
            del self._sessions[verdict.session]
            if session.last_s > session.first_s:
                rate = (session.tokens - session.first_tokens) / (session.last_s - session.first_s)
                self._metrics.session_rate.observe(rate)
        elif verdict.kind == CYCLE:
            session.state = "standing" if not verdict.order else "speculating" if verdict.steps else "plain"
            if session.order and verdict.order >= session.order:
                self._metrics.order_lag.observe(now_s - session.ordered_s)
                session.order = 0

    def _count_cycle(self, verdict: pb.Verdict) -> None:
        m = self._metrics
        m.proposed.inc(verdict.proposed)
        m.accepted.inc(verdict.accepted)
        m.accept_length.observe(verdict.committed)
        m.steps.observe(verdict.steps)
        if verdict.proposed < verdict.steps:
            m.unproposed.labels(REASONS[verdict.reason]).inc()
        if verdict.proposed:
            m.proposals.labels("accepted" if verdict.accepted else "rejected").inc()
        elif verdict.steps:
            m.proposals.labels("late" if verdict.reason == DRAFT_LATE else "none").inc()

    def _count_positions(self, cycles: Iterable[pb.Verdict]) -> None:
        """A few additions a frame, not one for each draft."""
        lengths = [(verdict.proposed, verdict.accepted) for verdict in cycles if verdict.proposed]
        for position in range(1, max((proposed for proposed, _ in lengths), default=0) + 1):
            self._metrics.proposed_at.labels(str(position)).inc(sum(proposed >= position for proposed, _ in lengths))
            self._metrics.accepted_at.labels(str(position)).inc(sum(accepted >= position for _, accepted in lengths))

    def _count_states(self) -> None:
        self._metrics.sessions.set(len(self._sessions))
        states = [session.state for session in self._sessions.values()]
        for state in SESSION_STATES:
            self._metrics.states.labels(state).set(states.count(state))
