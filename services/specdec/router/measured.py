"""The step count with the most expected tokens a second, from measured cost and measured acceptance.

Goodput as in SmartSpec/TurboSpec (Liu et al., 2406.14066) and utility as in Cascade (Saxena et al., 2506.20675), with
k = 0 among the choices. What is not chosen is tried now and then on a budget of lost time.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from specdec.router.acceptance import Acceptance
from specdec.router.cost import CycleCost

_SWEEP = 3  # cycles that k = 0, `start` and the smallest k get at the very beginning
_CREDIT_CYCLES = 2.5  # cycles' worth of time a policy may have saved up for probes
_DEBT_CYCLES = 4.0  # ... or have spent before it was earned, on a probe that promises much
_UNSEEN = 0.4  # share by which a cycle's length may be overestimated where nothing was measured
_SCOUTING = 2.5  # plain cycles that may be lost on finding that out, in each doubling of the batch
_WIDTHS = 1.5  # standard deviations by which acceptance may be better than it looks, where trying is concerned
_LOSING_WIDTHS = 1.2  # ... and better than it was lately, where speculation is to be kept
_LEDGER_S = 10.0  # seconds that losses against plain decoding are remembered
_ALLOWED_S = 0.02 * _LEDGER_S  # of them, those that may be lost before looking around has to wait
_YOUNG = 150  # cycles of a new policy, in which it may lose _YOUNG_CREDIT plain cycles on looking around
_YOUNG_CREDIT = 15.0
_STALE = 1000  # cycles after which a measured cost is as good as none
_HASTE = 0.4  # share of the evidence for a fall of acceptance that is waived once all that is allowed was lost
_REFERENCE = 0.0007  # share of time that may be lost on looking at plain decoding while speculating
_FEW_LOOKS = 20.0  # looks at plain decoding at which twice that may be lost where ...
_CLOSE = 0.08  # ... it would be slower by no more than this share
_DOUBT = 0.08  # drift since plain decoding was seen that asks for another look
_PROMISING = 1.0  # evidence that drafts have become better, from which on probes follow each other
_WORTH = 1.05  # ... if drafts as good as that would give so many times plain decoding's tokens


@dataclass(frozen=True)
class CycleReport:
    """What one cycle did. A session that was not asked for `steps` drafts is counted in `batch` and not listed."""

    batch: int  # sessions that decoded
    context: int  # tokens a session, averaged
    steps: int  # k as ordered
    cycle_s: float  # the whole cycle
    draft_s: float  # of it, waiting for the draft
    proposed: tuple[int, ...]  # drafts verified, by session
    accepted: tuple[int, ...]  # of them, delivered


@dataclass(frozen=True)
class Forecast:
    """What the policy expects of its choice, of the best k above 0, and of plain decoding."""

    batch: int
    context: int
    steps: int
    rate: float  # tokens a second
    drafted_steps: int
    drafted_rate: float
    drafted_cycle_s: float
    plain_cycle_s: float

    @property
    def plain_rate(self) -> float:
        """Tokens a second at k = 0."""
        return self.batch / self.plain_cycle_s

    @property
    def drafted_tokens(self) -> float:
        """Tokens a session's cycle yields at the best k above 0."""
        return self.drafted_rate * self.drafted_cycle_s / self.batch

    def __str__(self) -> str:
        return (
            f"k = {self.drafted_steps} gives {self.drafted_rate:.1f} tok/s "
            f"({self.drafted_tokens:.2f} tokens a session in {1000 * self.drafted_cycle_s:.1f} ms), "
            f"k = 0 {self.plain_rate:.1f} ({1000 * self.plain_cycle_s:.1f} ms); "
            f"batch {self.batch}, context {self.context}"
        )


def step_choices(max_steps: int) -> tuple[int, ...]:
    """Every k up to 8, then about four a doubling."""
    far = (10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)
    return tuple(k for k in (*range(9), *far) if k <= max_steps)


class StepPolicy:
    """One pair's k. It reads counts and times, never tokens, so it cannot bias what is generated.

    `start` is tried first, `budget` is the share of time probes may lose, `margin` the gain a change of k must promise,
    and `dwell` the cycles it stays.
    """

    def __init__(
        self,
        max_steps: int,
        *,
        seed: int = 0,
        start: int = 4,
        choices: Sequence[int] | None = None,
        budget: float = 0.005,
        margin: float = 0.02,
        dwell: int = 12,
    ) -> None:
        self._choices = tuple(choices) if choices is not None else step_choices(max_steps)
        self._acceptance = Acceptance(max(self._choices))
        self._cost = CycleCost(self._choices)
        self._random = random.Random(seed)
        self._budget, self._margin, self._dwell = budget, margin, dwell
        first = min(range(len(self._choices)), key=lambda i: abs(self._choices[i] - start))
        self._sweep = [i for i in (0, first, min(1, first)) for _ in range(_SWEEP)][::-1]
        self._chosen = 0  # index into choices
        self._cycles = 0
        self._since = 0  # cycles under it
        self._share = 1.0  # of the batch that gets drafts
        self._credit_s = 0.0
        self._allowances: dict[int, float] = {}  # seconds, by doubling of the batch
        self._wait = 0  # cycles until the next probe may start
        self._look_at_plain = False
        self._batch = self._context = 0  # when last asked
        self._newest_s: list[float] = []  # a cycle of each choice, likewise
        self._rates: list[float] = []  # tokens a second of each, likewise
        self._typical_s = 0.0
        self._short_s = 0.0  # lost against plain decoding in the last _LEDGER_S
        self.probes = 0  # cycles ordered to learn, not to gain
        self.switches = 0

    @property
    def forecast(self) -> Forecast | None:
        """Of the newest choice, once there has been one."""
        if not self._rates:
            return None
        rates, seconds = self._rates, self._newest_s
        best = rates.index(max(rates[1:] or rates), min(1, len(rates) - 1))
        chosen = self._choices[self._chosen], rates[self._chosen]
        return Forecast(
            self._batch, self._context, *chosen, self._choices[best], rates[best], seconds[best], seconds[0]
        )

    def due(self, steps: int) -> tuple[float, float]:
        """(drafts expected to stand in a session's cycle of k, share of them that pays for what the drafts cost)."""
        if not self._rates or steps not in self._choices or not steps:
            return 0.0, 0.0
        extra_s = max(0.0, self._newest_s[self._choices.index(steps)] - self._newest_s[0])
        stood = self._acceptance.stood[steps]
        return stood, extra_s * self._rates[self._chosen] / self._batch / stood

    def steps(self, batch: int, context: int) -> int:
        """k for the next cycle of `batch` decoding sessions with `context` tokens each on average."""
        if self._sweep and batch > 0:
            return self._choices[self._sweep.pop()]
        if batch <= 0 or not self._typical_s:
            return self._choices[self._chosen]
        seconds = self._newest_s = self._cost.seconds(batch, context)
        stood, share = self._acceptance.stood, self._share
        rates = self._rates = [batch * (1 + share * stood[k]) / s for k, s in zip(self._choices, seconds, strict=True)]
        self._batch, self._context = batch, context
        self._reconsider(rates, rates.index(max(rates)))
        k = self._choices[self._chosen]
        probe = self._probe(batch, context, rates, seconds)
        if probe is None:
            return k
        self.probes += 1
        return self._choices[probe]

    def observe(self, report: CycleReport) -> None:
        """Learns from a cycle, in any order and however late."""
        self._since += 1
        self._wait -= 1
        if report.steps not in self._choices or report.batch <= 0 or report.cycle_s <= 0:
            return
        i = self._choices.index(report.steps)
        self._typical_s += (report.cycle_s - self._typical_s) * (0.05 if self._typical_s else 1)
        self._credit_s += self._budget * report.cycle_s
        if i != self._chosen and self._rates:
            spent = min(report.cycle_s, 2 * self._newest_s[i])  # a hiccup is not the probe's fault
            self._credit_s -= spent - (report.batch + sum(report.accepted)) / self._rates[self._chosen]
        self._cycles += 1
        self._enter(i, report)
        if self._cycles == 2:
            self._credit_s = _YOUNG_CREDIT * self._typical_s
        elif self._cycles > _YOUNG:
            self._credit_s = min(self._credit_s, _CREDIT_CYCLES * self._typical_s)
        if self._cost.observe(report.steps, report.batch, report.context, report.cycle_s, report.draft_s) and i:
            self._look_at_plain = True
        if not report.steps:
            self._look_at_plain = False
            return
        if not report.accepted:
            return
        self._share = len(report.accepted) / report.batch
        proof = 1 - _HASTE * min(1.0, self._short_s / _ALLOWED_S)
        if self._acceptance.observe(report.steps, report.accepted, rare=not self._chosen, proof=proof) > 0:
            self._credit_s = max(self._credit_s, _CREDIT_CYCLES * self._typical_s)  # the probes have paid off

    def _enter(self, i: int, report: CycleReport) -> None:
        """The ledger: what cycles with drafts took longer than plain ones for as many tokens would have. What is won
        makes up for what was lost, but is not saved."""
        self._short_s *= max(0.0, 1 - report.cycle_s / _LEDGER_S)
        if i and self._rates and self._cycles > _YOUNG:
            spent_s = self._newest_s[i]  # as expected: what chance adds to a cycle is not the drafts' fault
            plain_s = self._newest_s[0] * (1 + sum(report.accepted) / report.batch)
            self._short_s = max(0.0, self._short_s + spent_s - plain_s)

    def _reconsider(self, rates: list[float], best: int) -> None:
        """Changes the choice where the gain is worth it: a little after a while, or a lot at once."""
        now = self._chosen
        if now and self._losing(rates):
            self._acceptance.believe_recent()
            return  # the next cycle is decided by that
        gain = rates[best] / rates[now] - 1
        # never slower than plain decoding: speculation has to promise more to begin than to go on, but not to end
        margin = self._margin * (1.0 if best and now else 1.5 if best else 0.25)
        if best and not now and self._short_s > _ALLOWED_S / 2:
            return
        if gain > margin and (self._since >= self._dwell or gain > 0.1):
            self._chosen, self._since = best, 0
            self.switches += 1

    def _loss_s(self, i: int) -> float:
        """What a cycle of another choice loses against the chosen one."""
        rates = self._rates
        return self._newest_s[i] * (1 - rates[i] / max(rates[self._chosen], 1e-9))

    def _losing(self, rates: list[float]) -> bool:
        """Whether drafts have lately stood so rarely that plain decoding is faster, chance allowed for."""
        stood = self._share * self._acceptance.stood[self._choices[self._chosen]]
        widths = _LOSING_WIDTHS if self._short_s < _ALLOWED_S else 0.0  # no more benefit of the doubt
        lately = stood * min(1.0, self._acceptance.recent(widths))
        return rates[self._chosen] * (1 + lately) / (1 + stood) < rates[0] <= rates[self._chosen]

    def _probe(self, batch: int, context: int, rates: list[float], seconds: list[float]) -> int | None:
        """The index of another choice that is worth a try now, if any is."""
        if len(rates) == 1:
            return None
        if not self._chosen and self._short_s > _ALLOWED_S:
            return None
        if self._credit_s > -_DEBT_CYCLES * self._typical_s:  # what cannot wait until it has been saved for
            promising = self._acceptance.promise > _PROMISING and self._could_pay(rates[0], batch, seconds)
            if not self._chosen and (promising or self._cost.promise):
                return 1
            if self._chosen and self._look_at_plain:
                self._look_at_plain = False
                return 0
        scout = self._scout(batch, context, rates, seconds)
        if scout is not None:
            return scout
        if self._wait > 0:
            return None
        if self._chosen and self._loss_s(0) < self._reference_s(batch, context):
            self._wait = self._random.randint(8, 16)
            return 0  # costs next to nothing, and all else is measured against it
        if self._credit_s <= 0:
            return None
        candidate = self._candidate(batch, context, rates, seconds)
        if candidate is None or self._credit_s < self._loss_s(candidate):
            return None
        often = self._cycles < _YOUNG or not self._chosen
        self._wait = self._random.randint(3, 6) if often else self._random.randint(8, 16)
        return candidate

    def _reference_s(self, batch: int, context: int) -> float:
        """What a look at plain decoding may lose now: the more, the longer ago the last one was, and where the choice
        hangs on it, the fewer there were."""
        allowed_s = _REFERENCE * self._typical_s * self._cost.age(0, batch, context)
        if self._loss_s(0) < _CLOSE * self._newest_s[0]:
            allowed_s *= 1 + _FEW_LOOKS / (1 + self._cost.cycles(0, batch, context))
        return allowed_s

    def _could_pay(self, plain_rate: float, batch: int, seconds: list[float]) -> bool:
        """Whether drafts as good as they promise to be would beat plain decoding at some k."""
        stood = self._acceptance.promised()
        pairs = zip(self._choices, seconds, strict=True)
        return any(batch * (1 + self._share * stood[k]) > _WORTH * plain_rate * s for k, s in pairs if k)

    def _scout(self, batch: int, context: int, rates: list[float], seconds: list[float]) -> int | None:
        """Where nothing was measured yet, the choice that may be better by the most, for as long as the place's own
        allowance of lost time lasts."""
        bucket = batch.bit_length()
        left = self._allowances.setdefault(bucket, _SCOUTING * seconds[0])
        if left <= 0:
            return None
        support, now = self._cost.support(batch, context), self._chosen
        if min(support) >= 3:
            return None
        hope = [rate / (1 - _UNSEEN / (1 + n)) if n < 3 else 0.0 for rate, n in zip(rates, support, strict=True)]
        hope[now] = 0.0
        known = max((i for i, n in enumerate(support) if n >= 1), default=0)
        best = max(range(min(len(hope), 2 * known + 2)), key=hope.__getitem__)  # not far beyond what is known
        if hope[best] <= rates[now] * (1 + self._margin):
            return None
        self._allowances[bucket] = left - max(self._loss_s(best), 0.1 * seconds[0])
        return best

    def _candidate(self, batch: int, context: int, rates: list[float], seconds: list[float]) -> int | None:
        now, rate = self._chosen, rates[self._chosen]
        if now and self._cost.doubt(0, batch, context) > _DOUBT and rates[0] * 1.5 > rate:
            return 0
        hoped = self._acceptance.optimistic(_WIDTHS)
        if not now:  # drafts must be tried to be seen to have become good: where that promises most for what it costs
            best, best_score = 1, 0.0
            for i, k in enumerate(self._choices[1:], 1):
                gain = batch * (1 + self._share * hoped[k]) / seconds[i] / rate - 1
                score = gain / (max(self._loss_s(i), 0.0) + 0.1 * seconds[0])
                if score > best_score:
                    best, best_score = i, score
            return best
        found, best_score = None, 0.0
        for i, k in enumerate(self._choices):
            if i == now:
                continue
            age = min(self._cost.age(k, batch, context), _STALE)
            doubt = 0.02 + min(0.2, 0.5 * self._cost.doubt(k, batch, context) + 0.03 * age / _STALE)
            hope = batch * (1 + self._share * hoped[k]) / (seconds[i] * (1 - doubt)) / rate
            score = age / _STALE - self._loss_s(i) / self._typical_s
            if hope > 1 and score > best_score:
                found, best_score = i, score
        return found
