"""How many draft tokens the next cycle gets. A policy reads counts and times, never token values.

A policy is two verbs, and is called between a verdict and the next order, so it must be quick.
"""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, cast

from specdec.plugins import make
from specdec.proto import speculation_pb2 as pb
from specdec.router.acceptance import SessionCaps
from specdec.router.measured import CycleReport, StepPolicy
from specdec.telemetry import RouterMetrics

if TYPE_CHECKING:
    from specdec.router.pairs import Session, Verdict

log = logging.getLogger(__name__)
_SILENT = (pb.REASON_BUDGET, pb.REASON_DRAFT_LIMIT)  # cut short by something that says nothing of drafts
_REALISED = 0.02  # share of a cycle in what was realised lately


@dataclass(frozen=True)
class Order:
    """What a session does next: `steps` draft tokens a cycle (k), for at most `window` cycles until the next order.

    `cap`: the most this one session gets, whatever k its batch gets. k is the leading router's, for all of a pair's
    sessions: `steps` below `cap` is taken for the batch's k, `steps` at `cap` for this session's own.
    """

    steps: int
    window: int
    cap: int | None = None


class OrderPolicy(Protocol):
    """Decides k. One that keeps something for each pair may also have `forget(pair: str)`, called when one is gone for
    good; a few verdicts of its ended sessions may follow."""

    def order(self, session: "Session") -> Order:
        """The session's next order. The session's own cap is applied afterwards."""
        ...

    def observe(self, verdict: "Verdict") -> None:
        """Learns from what a cycle did."""
        ...


class FixedSteps:
    """Always the same k."""

    def __init__(self, steps: int, max_steps: int, window: int) -> None:
        self._order = Order(min(steps, max_steps), window)

    def order(self, session: "Session") -> Order:
        return self._order

    def observe(self, verdict: "Verdict") -> None: ...


@dataclass
class _Acceptance:
    """Drafts accepted a cycle, decayed; cycles without drafts say nothing."""

    mean: float
    _weight: float = field(default=0.2, repr=False)

    def observe(self, accepted: int, proposed: int) -> None:
        # a run accepted whole says only that the true length is at least that: let it grow by one
        length = accepted + 1 if accepted == proposed else accepted
        self.mean += self._weight * (length - self.mean)


class AcceptLengthSteps:
    """k is one more than what is usually accepted, session by session, at least 1.

    It follows the accept length only; it does not know what a cycle costs.
    """

    def __init__(self, steps: int, max_steps: int, window: int) -> None:
        self._start, self._max_steps, self._window = min(steps, max_steps), max_steps, window
        self._sessions: dict[Session, _Acceptance] = {}  # by identity: each pair numbers its own

    def order(self, session: "Session") -> Order:
        known = self._sessions.get(session)
        steps = self._start if known is None else min(self._max_steps, max(1, int(known.mean + 1.5)))
        return Order(steps, self._window)

    def observe(self, verdict: "Verdict") -> None:
        if verdict.session.finished:
            self._sessions.pop(verdict.session, None)
        elif verdict.proposed:
            known = self._sessions.setdefault(verdict.session, _Acceptance(float(self._start)))
            known.observe(verdict.accepted, verdict.proposed)


class _PairSteps:
    """One pair under `MeasuredSteps`: its verdicts, cycle by cycle, and what is ordered until the next."""

    def __init__(self, pair: str, start: int, max_steps: int, metrics: RouterMetrics) -> None:
        self._pair = pair
        self._policy = StepPolicy(max_steps, start=start)
        self.caps = SessionCaps()
        self.steps = self._policy.steps(1, 0)
        self._cycle = -1
        self._verdicts: list[Verdict] = []
        self._on = False
        self._tokens = self._seconds = 0.0  # lately, decayed
        self._probes = self._switches = 0
        rates = (metrics.expected_rate, metrics.realised_rate, metrics.plain_rate)
        self._gauges = [gauge.labels(pair) for gauge in (metrics.steps, *rates, metrics.utility)]
        self._counters = [counter.labels(pair) for counter in (metrics.probes, metrics.switches)]

    def observe(self, verdict: "Verdict") -> None:
        """Takes a session's verdict; with the last of a cycle, or the first of the next, k is decided anew."""
        if verdict.cycle != self._cycle:
            self._decide()
            self._cycle = verdict.cycle
        self._verdicts.append(verdict)
        if len(self._verdicts) >= verdict.batch:
            self._decide()

    def _decide(self) -> None:
        verdicts, self._verdicts = self._verdicts, []
        if not verdicts:
            return
        one = verdicts[0]
        batch = max(one.batch, len(verdicts))
        context = sum(v.context for v in verdicts) // len(verdicts)
        # sessions may have caps of their own, and an order that came late may have missed some of the batch
        steps = max(Counter(v.steps for v in verdicts if v.steps).items(), key=lambda item: item[1], default=(0, 0))[0]
        asked = [v for v in verdicts if v.steps == steps and v.reason not in _SILENT]
        cycle_s = (one.draft_us + one.schedule_us + one.verify_us + one.output_us) / 1e6
        down = bool(steps and asked) and all(v.reason == pb.REASON_DRAFT_DOWN for v in asked)
        if not down:  # without a draft every k is plain decoding, and says nothing of what k will cost or gain
            proposed, accepted = tuple(v.proposed for v in asked), tuple(v.accepted for v in asked)
            self._policy.observe(CycleReport(batch, context, steps, cycle_s, one.draft_us / 1e6, proposed, accepted))
            if steps:
                going_on = [v for v in asked if not v.session.finished]
                self.caps.observe(
                    [v.session.id for v in going_on], [v.accepted for v in going_on], *self._policy.due(steps)
                )
        self.steps = self._policy.steps(batch, context)
        self._tell(sum(v.committed for v in verdicts) * batch / len(verdicts), cycle_s)

    def _tell(self, tokens: float, cycle_s: float) -> None:
        """Metrics, and a line in the log when speculation begins or ends."""
        self._tokens += _REALISED * (tokens - self._tokens)
        self._seconds += _REALISED * (cycle_s - self._seconds)
        policy, forecast = self._policy, self._policy.forecast
        for counter, value, told in zip(
            self._counters, (policy.probes, policy.switches), (self._probes, self._switches), strict=True
        ):
            counter.inc(value - told)
        self._probes, self._switches = policy.probes, policy.switches
        if forecast is None:
            return
        realised = self._tokens / self._seconds if self._seconds else 0.0
        plain = forecast.plain_rate
        values = (forecast.steps, forecast.rate, realised, plain, realised / plain)
        for gauge, now in zip(self._gauges, values, strict=True):
            gauge.set(now)
        if (forecast.steps > 0) != self._on:
            self._on = forecast.steps > 0
            log.info("pair %s: speculation %s: %s", self._pair, "on" if self._on else "off", forecast)


class MeasuredSteps:
    """`auto`: k by measured cost and acceptance, one for a pair's batch. A session whose drafts never stand gets none
    for a while, so that the others do not pay for them."""

    def __init__(self, steps: int, max_steps: int, window: int, metrics: RouterMetrics) -> None:
        self._start, self._max_steps, self._window, self._metrics = steps, max_steps, window, metrics
        self._pairs: dict[str, _PairSteps] = {}

    def order(self, session: "Session") -> Order:
        pair = self._pair(session)
        if not pair.caps.allows(session.id):  # said as a cap: the other sessions' k is another one
            return Order(0, self._window, cap=0)
        return Order(pair.steps, self._window)

    def observe(self, verdict: "Verdict") -> None:
        session = verdict.session
        # the last verdicts may come after the pair has been forgotten, and must not name it again
        pair = self._pairs.get(session.pair) if session.finished else self._pair(session)
        if pair is None:
            return
        if session.finished:
            pair.caps.forget(session.id)
        if verdict.kind == pb.VERDICT_KIND_CYCLE:
            pair.observe(verdict)

    def forget(self, pair: str) -> None:
        """The pair is gone for good; one that comes under its address again may be another machine."""
        self._pairs.pop(pair, None)

    def _pair(self, session: "Session") -> _PairSteps:
        known = self._pairs.get(session.pair)
        if known is None:
            most = min(self._max_steps, session.pair_max_steps)
            known = self._pairs[session.pair] = _PairSteps(session.pair, self._start, most, self._metrics)
        return known


def load_policy(
    name: str, steps: int, max_steps: int, window: int, metrics: RouterMetrics | None = None
) -> OrderPolicy:
    """A policy by its name, or `module:Class` made with (steps, max_steps, window). Raises SettingsError."""
    built_in: dict[str, Callable[[], OrderPolicy]] = {
        "auto": lambda: MeasuredSteps(steps, max_steps, window, metrics or RouterMetrics()),
        "accept-length": lambda: AcceptLengthSteps(steps, max_steps, window),
        "fixed": lambda: FixedSteps(steps, max_steps, window),
    }
    if name in built_in:
        return built_in[name]()
    return cast(OrderPolicy, make("--policy", name, tuple(built_in), ("order", "observe"), steps, max_steps, window))
