"""How many drafts stand: conditional acceptance by position, for a pair and for each of its sessions.

Position i counts as passed when draft i stands, given that i - 1 did. A draft that was ordered and never proposed
counts as one that fell, so that what a cycle yields is known by what was ordered.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log, sqrt
from operator import mul

_WINDOW = 200.0  # cycles an estimate of one session reaches back; more sessions say as much in fewer
_RARE_WINDOW = 60.0  # ... and at least, or where drafts are rare
_PRIOR = 2.0  # trials that the position before is worth to one that was hardly tried
_RECENT = 40  # cycles that count as recent
_UNTRIED = 1 - 1 / 600  # what a cycle leaves of what is known of positions it did not reach
_FIRST = 0.5  # acceptance of the first position before anything is known
# The changes looked for: a draft stands with odds so many times as good, and the log likelihood ratio at which that is
# believed. By chance alone at most one cycle in e**9 seems worse to one of them; it costs little to find out. A fall by
# half takes long to prove with the odds of a fall to a sixteenth, and the other way round.
_BETTER = (8.0, 10.0)
_WORSE = ((1 / 2, 9.0), (1 / 4, 9.0), (1 / 16, 9.0))
_RENEW = 8  # cycles after which what is normal is looked at anew
_BEST = 0.98  # nobody's drafts stand for ever


class _Normal:
    """Rates that are taken for normal, and what each test subtracts for a trial at them."""

    def __init__(self, rates: list[float]) -> None:
        self.rates = rates
        self._norms: dict[float, list[float]] = {}  # by odds, then position

    def norms(self, odds: float) -> list[float]:
        """By position: the logarithm of what normalises the likelihood ratio."""
        known = self._norms.get(odds)
        if known is None:
            known = self._norms[odds] = [log(1 + rate * (odds - 1)) for rate in self.rates]
        return known


class _Page:
    """Page's cumulative sum of log likelihood ratios, one side, against the rates of when the suspicion began.

    When it alarms, its counts are those since the change.
    """

    def __init__(self, odds: float, alarm: float, normal: _Normal) -> None:
        self._odds, self._tilt, self._alarm = odds, log(odds), alarm
        self.clear(normal)

    def clear(self, normal: _Normal) -> None:
        """Nothing is suspected, and `normal` is what is normal."""
        self.sum = self.hits = self.expected = 0.0
        self.cycles = 0
        self.normal, self._norms = normal, normal.norms(self._odds)

    def add(self, hits: int, tried: Sequence[int], normal: _Normal, proof: float = 1.0) -> bool:
        """Whether `hits` in `tried` by position have been too many, or too few, for too long. `normal`: as of now;
        `proof`: the share of the alarm's evidence that is enough."""
        self.sum += self._tilt * hits - sum(map(mul, tried, self._norms))
        if self.sum <= 0:
            self.clear(normal)
            return False
        self.hits += hits
        self.expected += sum(map(mul, tried, self.normal.rates))
        self.cycles += 1
        return self.sum > self._alarm * proof


class Acceptance:
    """A pair's acceptance, pooled over its sessions and decayed. A change too large for chance is believed at once."""

    def __init__(self, max_steps: int) -> None:
        self._hits, self._trials = [0.0] * max_steps, [0.0] * max_steps  # by position, decayed
        self.rates = [_FIRST] * max_steps  # conditional acceptance by position
        self.stood = [0.0] * (max_steps + 1)  # drafts a session's cycle is expected to get accepted, by step count
        self._normal, self._cycles = _Normal(self.rates), 0
        self._better = _Page(*_BETTER, self._normal)
        self._worse = [_Page(*worse, self._normal) for worse in _WORSE]
        self._pattern = [1.0] * max_steps  # the next position's rate over this one's, of when drafts were last good
        self._recent = [0.0, 0.0, 0.0]  # hits, hits expected, their variance: decayed fast
        self._estimate()

    def observe(self, steps: int, accepted: Sequence[int], *, rare: bool = False, proof: float = 1.0) -> int:
        """Learns from a cycle of `steps` drafts in which `accepted` stood, by session.

        Returns 1 where that proves a change for the better, -1 for the worse, else 0.
        `rare`: such cycles are few and far between, so that the older ones are old. `proof`: the share of the usual
        evidence that proves a change for the worse.
        """
        if not steps or not accepted:
            return 0
        reached = [0] * (steps + 2)  # sessions by drafts that stood; then those that had i or more
        for count in accepted:
            reached[count if count < steps else steps] += 1
        for i in range(steps - 1, -1, -1):
            reached[i] += reached[i + 1]
        hits, tried = sum(reached[1 : steps + 1]), reached[:steps]
        expected = variance = 0.0
        for trials, rate in zip(tried, self.rates, strict=False):
            if not trials:
                break
            expected += trials * rate
            variance += trials * rate * (1 - rate)
        recent, keep = self._recent, 1 - 1 / _RECENT
        self._recent = [keep * recent[0] + hits, keep * recent[1] + expected, keep**2 * recent[2] + variance]
        normal = self._normal
        better = self._better.add(hits, tried, normal)
        worse = [page for page in self._worse if page.add(hits, tried, normal, proof)]
        self._decay(steps, reached, rare, len(accepted))
        if better or worse:
            page = self._better if better else worse[0]
            if worse:
                self._remember(page.normal.rates)
            self._restart(page.normal.rates, page.hits, page.expected, page.cycles, far=1.0 if better else 4.0)
            return 1 if better else -1
        self._estimate()
        self._cycles += 1
        if rare or self._cycles % _RENEW == 0:
            self._normal = _Normal(self.rates)
        return 0

    def _decay(self, steps: int, reached: Sequence[int], rare: bool, sessions: int) -> None:
        keep = 1 - 1 / (_RARE_WINDOW if rare else max(_RARE_WINDOW, _WINDOW / sqrt(sessions)))
        all_trials, all_hits = self._trials, self._hits
        known = 0
        while known < steps and reached[known]:
            all_trials[known] = keep * all_trials[known] + reached[known]
            all_hits[known] = keep * all_hits[known] + reached[known + 1]
            known += 1
        if not rare:  # what was not tried for long is rather like the position before
            all_trials[known:] = [_UNTRIED * trials for trials in all_trials[known:]]
            all_hits[known:] = [_UNTRIED * hits for hits in all_hits[known:]]

    @property
    def promise(self) -> float:
        """Evidence, short of proof, that drafts have become better: a log likelihood ratio."""
        return self._better.sum

    def promised(self) -> list[float]:
        """As `stood`, were the promise true."""
        odds, stood, product, total = _BETTER[0], [0.0], 1.0, 0.0
        for rate in self.rates:
            product *= odds * rate / (1 + rate * (odds - 1))
            total += product
            stood.append(total)
        return stood

    def recent(self, widths: float) -> float:
        """What stood lately over what was expected to, and `widths` standard deviations more."""
        hits, expected, variance = self._recent
        return (hits + widths * sqrt(variance)) / expected if expected > 1e-3 else 1.0

    def believe_recent(self) -> None:
        """What stood lately is how it is."""
        self._restart(self.rates, self._recent[0], self._recent[1], _RECENT / 2, far=4.0)

    def optimistic(self, widths: float) -> list[float]:
        """As `stood`, with each position `widths` standard deviations better than estimated."""
        stood, product, total = [0.0], 1.0, 0.0
        for rate, trials in zip(self.rates, self._trials, strict=True):
            product *= min(_BEST, rate + widths * sqrt(max(rate * (1 - rate), 0.01) / (trials + _PRIOR)))
            total += product
            stood.append(total)
        return stood

    def _restart(self, rates: Sequence[float], hits: float, expected: float, cycles: float, far: float) -> None:
        """All positions move as `hits` over `expected` under `rates` say; what was known before hardly counts. `far`:
        trials of positions beyond the first that it is worth."""
        ratio = (hits + 0.25) / (expected + 0.25)
        for i, rate in enumerate(rates):
            self._trials[i] = min(self._trials[i], far if i else max(4.0, cycles))
            self._hits[i] = min(_BEST, rate * ratio) * self._trials[i]
        self._estimate()
        self._recent = [0.0, 0.0, 0.0]
        self._normal = _Normal(self.rates)
        for page in (self._better, *self._worse):
            page.clear(self._normal)

    def _remember(self, rates: Sequence[float]) -> None:
        """Drafts were that good before they fell: far positions, hardly tried from now on, are expected to stay to the
        first as they are here."""
        self._pattern = [after / max(before, 0.01) for before, after in pairwise(rates)] + [1.0]

    def _estimate(self) -> None:
        likely, product, total = _FIRST, 1.0, 0.0
        rates, stood = [], [0.0]
        for hits, trials, pattern in zip(self._hits, self._trials, self._pattern, strict=True):
            rate = (hits + _PRIOR * likely) / (trials + _PRIOR)
            if rate > _BEST:
                rate = _BEST
            product *= rate
            total += product
            rates.append(rate)
            stood.append(total)
            likely = rate * pattern
        self.rates, self.stood = rates, stood


@dataclass
class _Session:
    accepted: float = 0.0  # drafts that stood, decayed
    expected: float = 0.0  # ... that would have, were it like the others
    cycles: float = 0.0  # that many are remembered
    rest: int = 0  # cycles until a capped session is tried again
    caps: int = 0  # how often in a row it was found wanting


class SessionCaps:
    """Which sessions get no drafts because theirs never stand, while others' do."""

    _MEMORY = 24  # cycles
    _TRIAL = 6  # cycles with drafts before a session is judged
    _REST = 64  # cycles without, doubled each time up to _LONGEST
    _LONGEST = 1024

    def __init__(self) -> None:
        self._sessions: dict[int, _Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def allows(self, session: int) -> bool:
        """Whether the session gets drafts in this cycle. To be asked every cycle: it counts a resting one's."""
        known = self._sessions.get(session)
        if known is None or not known.rest:
            return True
        known.rest -= 1
        if not known.rest:
            known.accepted = known.expected = known.cycles = 0.0  # what it is tried for is new evidence
        return False

    def observe(self, sessions: Sequence[int], accepted: Sequence[int], expected: float, share: float) -> None:
        """Learns from sessions that had drafts, of which `expected` should stand in each, and `share` of them must to
        pay for what the session's drafts cost. One alone is the pair's business, not its own."""
        if len(sessions) < 2:
            return
        keep = 1 - 1 / self._MEMORY
        for session, stood in zip(sessions, accepted, strict=True):
            known = self._sessions.get(session)
            if known is None:
                known = self._sessions[session] = _Session()
            known.cycles += 1
            known.accepted = keep * known.accepted + stood
            known.expected = keep * known.expected + expected
            if known.cycles >= self._TRIAL and not known.rest:
                hoped = known.accepted + 1.5 * sqrt(known.accepted + 0.5)
                if hoped < share * known.expected:
                    known.rest = min(self._REST << min(known.caps, 8), self._LONGEST)
                    known.caps += 1
                elif known.accepted > share * known.expected:
                    known.caps = 0

    def forget(self, session: int) -> None:
        """The session has ended."""
        self._sessions.pop(session, None)
