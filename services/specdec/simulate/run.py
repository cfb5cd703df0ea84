"""One run: a policy drives a scenario's cycles, and is scored against every fixed k.

Scores are in expected tokens of the cycles run, given their k, against what a fixed k is expected to make of the same
time: what luck adds or takes, in drafts accepted or in milliseconds, would fall on a fixed k just as well. (Against a
plain decoding with luck of its own, plain decoding itself loses 7 % in some 10 s.) The policy sees only what happened.
"""

import random
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from specdec.router.acceptance import SessionCaps
from specdec.router.measured import CycleReport, StepPolicy
from specdec.simulate.scenario import TICK_S, Array, Scenario

WARM_UP = 200  # cycles that do not count
WINDOW_S = 10.0


class Policy(Protocol):
    """What a simulated policy does; `StepPolicy` is one."""

    def steps(self, batch: int, context: int) -> int:
        """k for the next cycle."""
        ...

    def observe(self, report: CycleReport) -> None:
        """Learns from a cycle."""
        ...


class FixedK:
    """Always the same k."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def steps(self, batch: int, context: int) -> int:
        return self._steps

    def observe(self, report: CycleReport) -> None: ...


class AcceptLengthK:
    """One more than what is usually accepted, as AcceptLengthSteps does for a session; it knows no cost."""

    def __init__(self, max_steps: int, start: int = 4) -> None:
        self._max, self._mean = max_steps, float(min(start, max_steps))

    def steps(self, batch: int, context: int) -> int:
        return min(self._max, max(1, int(self._mean + 1.5)))

    def observe(self, report: CycleReport) -> None:
        steps, mean = report.steps, self._mean
        for accepted in report.accepted:
            mean += 0.2 * (accepted + (accepted == steps) - mean)
        self._mean = mean


@dataclass(frozen=True)
class Run:
    """What a policy made of a scenario, by ticks."""

    tokens: Array  # expected, up to the end of each tick
    steps: Array  # k at each tick
    warm: int  # first tick that counts
    ends: Array  # seconds at which each cycle ended, 0 first
    at: npt.NDArray[np.int64]  # tick in which each began
    lengths: Array  # seconds each was expected to take
    realised: float  # tokens in all, as accepted
    cycles: int
    switches: int
    probes: int


def play(scenario: Scenario, policy: Policy) -> Run:
    """Runs the scenario's cycles from start to end."""
    profile, rng = scenario.profile, random.Random(scenario.seed)
    caps = SessionCaps() if scenario.trace.hopeless and isinstance(policy, StepPolicy) else None
    luck = {factor: _Luck(scenario, factor) for factor in set(scenario.acceptance)}
    ends, sums, ks, at, lengths = [0.0], [0.0], [0], [], []
    ordered: deque[int] = deque([0] * profile.lag)
    hiccups = deque(scenario.hiccups_s)
    t, total, realised, noise = 0.0, 0.0, 0.0, profile.noise
    gauss, limit = rng.gauss, scenario.duration_s
    while t < limit:
        i = int(t / TICK_S)
        batch, context = scenario.batch[i], scenario.context[i]
        ordered.append(policy.steps(batch, int(context)))
        k = ordered.popleft()
        hopeless = scenario.hopeless(batch)
        asked = range(batch) if caps is None else [s for s in range(batch) if caps.allows(s)]
        lucky = luck[scenario.acceptance[i]]
        accepted = lucky.stand(k, len(asked)) if k else [0] * len(asked)
        if hopeless:
            accepted = [count if s >= hopeless else 0 for s, count in zip(asked, accepted, strict=True)]
        verify, slow = scenario.verify[i], scenario.draft[i]
        wait_ms = profile.draft_wait_ms(len(asked), k, slow)
        ms = profile.cycle_ms(batch, k * len(asked), 0, context, verify, slow) + wait_ms
        at.append(i)
        lengths.append(ms / 1000)
        cycle_s = ms * max(0.5, gauss(1.0, noise)) / 1000
        while hiccups and hiccups[0] < t + cycle_s:
            hiccups.popleft()
            cycle_s += profile.hiccups.ms / 1000
        t += cycle_s
        total += batch + (sum(s >= hopeless for s in asked) if hopeless else len(asked)) * lucky.stood[k]
        realised += batch + sum(accepted)
        ends.append(t)
        sums.append(total)
        ks.append(k)
        listed = tuple(accepted)
        policy.observe(
            CycleReport(batch, int(context), k, cycle_s, min(wait_ms / 1000, cycle_s), (k,) * len(listed), listed)
        )
        if caps is not None and k and isinstance(policy, StepPolicy):
            caps.observe(asked, listed, *policy.due(k))
    grid = np.arange(1, scenario.ticks + 1) * TICK_S
    running = np.minimum(np.searchsorted(ends, grid - TICK_S, side="right"), len(ks) - 1)
    return Run(
        np.interp(grid, ends, sums),
        np.array(ks, float)[running],
        min(int(np.ceil(ends[min(WARM_UP, len(ends) - 1)] / TICK_S)), scenario.ticks // 2),
        np.array(ends),
        np.minimum(at, scenario.ticks - 1),
        np.array(lengths),
        realised,
        len(ks) - 1,
        getattr(policy, "switches", 0),
        getattr(policy, "probes", 0),
    )


class _Luck:
    """How many drafts stand under an acceptance, drawn many at a time."""

    _MANY = 1024

    def __init__(self, scenario: Scenario, factor: float) -> None:
        self.stood = scenario.profile.stood(factor)  # expected, by k
        self._survival = -np.diff(self.stood)  # [max_steps], of the probability that so many stand and more
        name = f"{scenario.profile.name} {scenario.trace.name} {scenario.seed} {factor}"
        self._rng = np.random.default_rng(list(name.encode()))
        self._drawn: list[int] = []

    def stand(self, steps: int, sessions: int) -> list[int]:
        """Of `steps` drafts, those that stand, by session."""
        while len(self._drawn) < sessions:
            self._drawn += np.searchsorted(self._survival, -self._rng.random(self._MANY)).tolist()
        first = len(self._drawn) - sessions
        counts = self._drawn[first:]
        del self._drawn[first:]
        return [count if count < steps else steps for count in counts]


@dataclass(frozen=True)
class Score:
    """A run's tokens over others', from the end of the warm-up."""

    tok_s: float
    of_plain: float  # k = 0's, in all
    of_plain_window: float  # ... in the worst WINDOW_S
    of_best: float  # the best fixed k's of each phase, in all
    of_best_phase: float  # ... in the worst phase
    phases: tuple[tuple[float, float], ...]  # (tokens, the best fixed k's) of each phase
    switches: int
    probes: int
    realised_tok_s: float


class Hindsight:
    """What fixed step counts make of a scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._rates = scenario.rates()
        self.tokens = np.cumsum(self._rates * scenario.free() * TICK_S, axis=1)  # [k, ticks], up to the end of each

    def beside(self, run: Run) -> Array:
        """What each fixed k makes of the run's time, up to the end of each tick.  # [k, ticks]"""
        grid = np.arange(1, self._scenario.ticks + 1) * TICK_S
        sums = np.cumsum(np.pad(self._rates[:, run.at] * run.lengths, ((0, 0), (1, 0))), axis=1)
        return np.array([np.interp(grid, run.ends, row) for row in sums])

    def phases(self, warm: int) -> list[tuple[int, int]]:
        """(first, last) tick of each phase, without the warm-up."""
        n = self._scenario.phase_ticks
        ticks = self._scenario.ticks
        return [(max(warm, a), min(a + n, ticks) - 1) for a in range(0, ticks, n) if min(a + n, ticks) - 1 > warm + 10]

    def rates(self, warm: int) -> list[float]:
        """Tokens a second by k, without the warm-up."""
        last = self.tokens.shape[1] - 1
        return ((self.tokens[:, last] - self.tokens[:, warm]) / ((last - warm) * TICK_S)).tolist()  # type: ignore[no-any-return]

    def score(self, run: Run) -> Score:
        """The run's score."""
        mine, fixed, warm = run.tokens, self.beside(run), run.warm
        plain = fixed[0]
        last = len(mine) - 1
        window = min(round(WINDOW_S / TICK_S), last - warm)
        gained = mine[warm + window :] - mine[warm : last + 1 - window]
        needed = plain[warm + window :] - plain[warm : last + 1 - window]
        phases = self.phases(warm)
        got = np.array([mine[b] - mine[a] for a, b in phases])
        best = np.array([(fixed[:, b] - fixed[:, a]).max() for a, b in phases])
        return Score(
            float((mine[last] - mine[warm]) / ((last - warm) * TICK_S)),
            float((mine[last] - mine[warm]) / (plain[last] - plain[warm])),
            float((gained / needed).min()),
            float(got.sum() / best.sum()),
            float((got / best).min()),
            tuple(zip(got.tolist(), best.tolist(), strict=True)),
            run.switches,
            run.probes,
            run.realised / (len(mine) * TICK_S),
        )
