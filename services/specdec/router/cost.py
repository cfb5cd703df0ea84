"""What a cycle costs, by step count, batch and context, learned from measured cycles.

A cycle is the wait for the draft plus everything else (scheduling, verification, output), and each has a surface of its
own: a draft that becomes five times slower does so for every k at once. A surface is a small regression, corrected by
what was measured in buckets of (k, batch, context), times one factor for what drifts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import log2
from statistics import median

import numpy as np
import numpy.typing as npt

_FIRST = 3  # cycles of a bucket of which the median counts
_MEMORY = 40  # cycles a bucket averages over
_KNOWN = 15  # cycles after which a bucket can tell drift from its own error
_CLIP = 0.3  # a cycle further off than this counts as this far: a hiccup must not poison
_RUN = 4  # cycles in a row beyond the clip, on one side, that are no hiccup
_DRIFT = 0.04  # share of a cycle's error that is drift; more would let the error of one bucket pass for it
_REFIT = 64  # cycles between fits
_MAX_CELLS = 192
_SPREAD = 0.6  # how far a bucket's error speaks for others, in doublings of tokens, batch and context
_AGE = 3000.0  # cycles in which a bucket loses half its weight
_FEW = 1.0  # cycles of a bucket of its own that the other buckets' errors are worth

Features = Callable[[int, float, float], tuple[float, ...]]
_Key = tuple[int, int, int]


def verify_features(steps: int, batch: float, context: float) -> tuple[float, ...]:
    """A forward pass: weights, another path for drafts, rows, experts touched, tokens, and the context's keys."""
    tokens = batch * (steps + 1)
    return 1.0, float(steps > 0), batch, tokens**0.5, tokens, batch * context


def draft_features(steps: int, batch: float, context: float) -> tuple[float, ...]:
    """Drafting: a round trip, steps, and rows in each."""
    return float(steps > 0), float(steps), steps * batch


@lru_cache(4096)
def batch_bucket(batch: float) -> int:
    """Exact up to 8, then four a doubling."""
    return round(batch) if batch <= 8 else 8 + round(4 * log2(batch / 8))


def context_bucket(context: float) -> int:
    """One a doubling; all that is short is alike."""
    return max(9, int(context * 1.41421356).bit_length() - 1)  # the rounded logarithm, quickly


@dataclass
class _Cell:
    steps: int
    batch: float  # of the cycles in it, averaged
    context: float
    mean_s: float  # without drift
    cycles: float
    at: int  # newest cycle
    drift: float  # at that cycle
    first: list[float] = field(default_factory=list)  # the first few cycles, of which one may be a hiccup


@dataclass
class _Table:
    """One batch and context, by choice."""

    seconds: list[float]  # without drift
    support: list[float]  # cycles it rests on


class Surface:
    """Seconds by (k, batch, context)."""

    def __init__(self, choices: Sequence[int], features: Features, prior: Callable[[float], list[float]]) -> None:
        self._choices, self._features, self._prior = choices, features, prior
        self._cells: dict[_Key, _Cell] = {}
        self._drift = 1.0
        self._now = 0
        self._run: list[float] = []  # errors beyond the clip, in a row
        self._weights: npt.NDArray[np.float64] | None = None
        self._fitted_at = -_REFIT
        self._tables: dict[tuple[float, int], _Table] = {}  # by batch and context bucket
        self._x = {k: features(k, 1.0, 512.0) for k in choices}

    def observe(self, steps: int, batch: float, context: float, seconds: float, floor_s: float) -> bool:
        """Learns from a cycle; `floor_s` is what does not matter. True: everything is suddenly faster or slower."""
        self._now += 1
        key = (steps, batch_bucket(batch), context_bucket(context))
        cell = self._cells.get(key)
        if cell is None:
            self._add(key, batch, context, seconds / self._drift)
            return False
        if len(cell.first) < _FIRST:
            cell.first.append(seconds / self._drift)
            cell.mean_s = max(1e-9, median(cell.first) if len(cell.first) > 2 else min(cell.first))
            cell.cycles, cell.at, cell.drift = len(cell.first), self._now, self._drift
            self._fit()
            return False
        expected = (self._expected(key, steps, batch, context) or cell.mean_s) * self._drift
        error = (seconds + floor_s) / (expected + floor_s) - 1
        jumped = self._jumped(error)
        error = max(-_CLIP, min(_CLIP, error))
        if cell.cycles >= _KNOWN and self._now - cell.at < _REFIT:
            self._drift *= 1 + _DRIFT * error
        age = self._now - cell.at
        cell.cycles = min(cell.cycles * 0.5 ** (age / _AGE) + 1, _MEMORY)
        change = 1 + error / cell.cycles
        cell.mean_s = max(cell.mean_s * change, (cell.mean_s + floor_s) * change - floor_s)
        cell.batch += (batch - cell.batch) / cell.cycles
        cell.context += (context - cell.context) / cell.cycles
        cell.at, cell.drift = self._now, self._drift
        table = self._tables.get((batch, key[2]))
        if table is not None:
            i = self._choices.index(steps)
            table.seconds[i] *= change
            table.support[i] += 1
        if self._now - self._fitted_at >= _REFIT:
            self._fit()
        return jumped

    def seconds(self, batch: float, context: float) -> list[float]:
        """By choice."""
        drift = self._drift
        return [drift * s for s in self._look_up(batch, context).seconds]

    def support(self, batch: float, context: float) -> list[float]:
        """By choice: cycles measured there, those nearby counting in part."""
        return self._look_up(batch, context).support

    def _look_up(self, batch: float, context: float) -> "_Table":
        key = (batch, context_bucket(context))
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = self._table(batch, context)
        return table

    def doubt(self, steps: int, batch: float, context: float) -> float:
        """How much has drifted since `steps` was seen here, as a share; 1 where it never was."""
        cell = self._cells.get((steps, batch_bucket(batch), context_bucket(context)))
        return 1.0 if cell is None else abs(self._drift / cell.drift - 1)

    def age(self, steps: int, batch: float, context: float) -> int:
        """Cycles since `steps` was seen here."""
        cell = self._cells.get((steps, batch_bucket(batch), context_bucket(context)))
        return 1 << 30 if cell is None else self._now - cell.at

    def _expected(self, key: _Key, steps: int, batch: float, context: float) -> float | None:
        table = self._tables.get((batch, key[2]))
        return None if table is None else table.seconds[self._choices.index(steps)]

    def _jumped(self, error: float) -> bool:
        if abs(error) <= _CLIP or (self._run and (error > 0) != (self._run[0] > 0)):
            self._run = []
        if abs(error) > _CLIP:
            self._run.append(error)
        if len(self._run) < _RUN:
            return False
        self._drift *= 1 + median(self._run)
        self._run = []
        return True

    def _add(self, key: _Key, batch: float, context: float, seconds: float) -> None:
        if len(self._cells) >= _MAX_CELLS:
            del self._cells[min(self._cells, key=lambda k: self._cells[k].at)]
        seconds = max(seconds, 1e-9)
        self._cells[key] = _Cell(key[0], batch, context, seconds, 1.0, self._now, self._drift, [seconds])
        self._fit()

    def _fit(self) -> None:
        """Weighted ridge in relative errors; no feature may make a cycle shorter (so it grows with k)."""
        self._fitted_at = self._now
        self._tables.clear()
        cells = list(self._cells.values())
        x = np.array([self._features(c.steps, c.batch, c.context) for c in cells])  # [cells, features]
        y = np.array([c.mean_s for c in cells])
        trust = np.array([c.cycles for c in cells]) * 0.5 ** ((self._now - np.array([c.at for c in cells])) / _AGE)
        self._fit_cells = (x, y, trust, np.array([(c.steps, c.batch, c.context) for c in cells]))
        self._fit_keys = np.array(list(self._cells))  # [cells, (steps, batch bucket, context bucket)]
        size = float(np.average(y, weights=trust))
        scale = np.maximum(np.abs(x).max(axis=0), 1e-12)
        prior = np.array(self._prior(size)) * scale  # in seconds at the largest value seen
        a = x / scale / (y + 0.02 * size)[:, None]
        b = y / (y + 0.02 * size)
        ridge = 0.02 / size**2
        gram = (a * trust[:, None]).T @ a + ridge * np.eye(len(scale))
        right = (a * trust[:, None]).T @ b + ridge * prior
        free = np.ones(len(scale), bool)
        solution = np.zeros(len(scale))
        for _ in range(3):
            solution[:] = 0
            solution[free] = np.linalg.solve(gram[np.ix_(free, free)], right[free])
            if (solution >= 0).all():
                break
            free &= solution > 0
        self._weights = np.maximum(solution, 0) / scale
        self._size = size

    def _table(self, batch: float, context: float) -> "_Table":
        if self._weights is None:
            return _Table([1e-9] * len(self._choices), [0.0] * len(self._choices))
        x, y, trust, at = self._fit_cells
        mine = np.array([self._features(k, batch, context) for k in self._choices])
        trend = mine @ self._weights
        floor = 0.02 * self._size
        errors = np.log((y + floor) / (x @ self._weights + floor))  # [cells]
        steps = np.array(self._choices, float)
        tokens = np.log2(np.outer(steps + 1, batch)).reshape(-1, 1) - np.log2((at[:, 0] + 1) * at[:, 1])[None]
        apart = (
            tokens**2 + (log2(batch) - np.log2(at[:, 1])) ** 2 + (log2(context + 256) - np.log2(at[:, 2] + 256)) ** 2
        )
        apart = apart / _SPREAD**2 + 1.0 * ((steps > 0)[:, None] != (at[:, 0] > 0)[None])
        near = trust * np.exp(-apart)  # [choices, cells]
        keys = self._fit_keys
        here = (keys[:, 1] == batch_bucket(batch)) & (keys[:, 2] == context_bucket(context))
        own = (steps[:, None] == at[:, 0][None]) & here[None]
        others = np.where(own, 0.0, near)
        shared = (others @ errors) / (others.sum(1) + 0.5)
        mine_n = np.where(own, trust, 0.0)
        error = (mine_n @ errors + _FEW * shared) / (mine_n.sum(1) + _FEW)
        seconds = np.maximum((trend + floor) * np.exp(error) - floor, 0.0)
        support = (mine_n + others).sum(1)
        return _Table(_ascending(seconds.tolist(), (support + 0.05).tolist()), support.tolist())


def _ascending(values: list[float], weights: list[float]) -> list[float]:
    """The nearest ascending values: those in the wrong order become their average (pool adjacent violators)."""
    pools: list[tuple[float, float, int]] = []  # (value, weight, how many)
    for value, weight in zip(values, weights, strict=True):
        pools.append((value, weight, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, wa, na), (b, wb, nb) = pools[-2:]
            pools[-2:] = [((a * wa + b * wb) / (wa + wb), wa + wb, na + nb)]
    return [value for value, _, many in pools for _ in range(many)]


class CycleCost:
    """Seconds a cycle takes, by step count."""

    def __init__(self, choices: Sequence[int]) -> None:
        self._choices = choices
        # before anything is measured: 5 % of a plain cycle for each draft, and as much to verify it
        self._verify = Surface(choices, verify_features, lambda size: [0.8 * size, 0.0, 0.0, 0.0, 0.05 * size, 0.0])
        self._draft = Surface(choices, draft_features, lambda size: [0.0, size / 4, 0.0])
        self._typical_s = 0.0
        self._drafted = False

    def observe(self, steps: int, batch: float, context: float, cycle_s: float, draft_s: float) -> bool:
        """Learns from a cycle. True: cycles have suddenly become faster or slower."""
        if cycle_s <= 0:
            return False
        draft_s = min(max(draft_s, 0.0), cycle_s)
        self._typical_s += (cycle_s - self._typical_s) * (0.05 if self._typical_s else 1)
        floor_s = 0.02 * self._typical_s
        jumped = self._verify.observe(steps, batch, context, cycle_s - draft_s, floor_s)
        if steps:
            self._drafted = True
            self._draft.observe(steps, batch, context, draft_s, floor_s)
        return jumped

    def seconds(self, batch: float, context: float) -> list[float]:
        """A cycle's expected length by choice; never shorter for more drafts."""
        verify = self._verify.seconds(batch, context)
        if not self._drafted:
            return [v + 0.05 * k * verify[0] for v, k in zip(verify, self._choices, strict=True)]
        return [v + d for v, d in zip(verify, self._draft.seconds(batch, context), strict=True)]

    def support(self, batch: float, context: float) -> list[float]:
        """By choice: measured cycles that `seconds` rests on."""
        return self._verify.support(batch, context)

    def doubt(self, steps: int, batch: float, context: float) -> float:
        """How much the target has drifted since `steps` was seen here, as a share; 1 where it never was."""
        return self._verify.doubt(steps, batch, context)

    def age(self, steps: int, batch: float, context: float) -> int:
        """Cycles since `steps` was seen here."""
        return self._verify.age(steps, batch, context)
