"""What a cycle costs, by step count, batch and context, learned from measured cycles.

A cycle is the wait for the draft plus everything else (scheduling, verification, output), and each has a surface of its
own: a draft that becomes five times slower does so for every k at once. A surface is a small regression, corrected by
what was measured in buckets of (k, batch, context), times one factor for what drifts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import exp, log, log2
from operator import mul
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

_FIRST = 3  # cycles of a bucket of which the median counts
_NEW = 1.1  # times what its neighbours say is the most that is believed of a bucket's first cycle
_MEMORY = 40  # cycles a bucket averages over
_KNOWN = 15  # cycles after which a bucket can tell drift from its own error
_CLIP = 0.3  # a cycle further off than this counts as this far: a hiccup must not poison
_ALONE = 0.05  # ... and as this far if the one before in its bucket was not
_RUN = 4  # cycles in a row beyond the clip, on one side, that are no hiccup
_DRIFT = 0.04  # share of a cycle's error that is drift; more would let the error of one bucket pass for it
_REFIT = 64  # cycles between fits
_REMAKE = 32  # cycles a table is used for; what is seen of its own place changes it meanwhile
_FEW_CELLS = 12  # up to so many, every new one asks for a fit at once
_MAX_CELLS = 192
_SPREAD = 0.6  # how far a bucket's error speaks for others, in doublings of tokens, batch and context
_AGE = 3000.0  # cycles in which a bucket loses half its weight
_FEW = 1.0  # cycles of a bucket of its own that the other buckets' errors are worth

Array = npt.NDArray[np.float64]
Features = Callable[[Any, float, float], tuple[Any, ...]]  # of one step count, or of an array of them
_Key = tuple[int, int, int]


def verify_features(steps: Any, batch: float, context: float) -> tuple[Any, ...]:
    """A forward pass: weights, another path for drafts, rows, experts touched, tokens, and the context's keys."""
    tokens = batch * (steps + 1)
    return 1.0, steps > 0, batch, tokens**0.5, tokens, batch * context


def draft_features(steps: Any, batch: float, context: float) -> tuple[Any, ...]:
    """Drafting: a round trip, steps, and rows in each."""
    return steps > 0, steps, steps * batch


@lru_cache(4096)
def batch_bucket(batch: float) -> int:
    """Exact up to 8, then four a doubling."""
    return round(batch) if batch <= 8 else 8 + round(4 * log2(batch / 8))


@lru_cache(256)
def context_bucket(context: float) -> int:
    """One a doubling; all that is short is alike."""
    return max(9, int(context * 1.41421356).bit_length() - 1)  # the rounded logarithm, quickly


@dataclass
class _Cell:
    row: int  # in the surface's arrays
    steps: int
    batch: float  # of the cycles in it, averaged
    context: float
    mean_s: float  # without drift
    cycles: float
    at: int  # newest cycle
    drift: float  # at that cycle
    far: bool = False  # the newest cycle was beyond the clip
    first: list[float] = field(default_factory=list)  # the first few cycles, of which one may be a hiccup


@dataclass
class _Table:
    """One batch and context, by choice."""

    seconds: list[float]  # without drift
    support: list[float]  # cycles it rests on
    at: int  # cycle it was made in


class Surface:
    """Seconds by (k, batch, context).

    Called between a verdict and the next order, so nothing takes long: what the fit reads is kept in arrays with a row
    a cell, a fit is spread over cycles, and a table is made when it is asked for.
    """

    def __init__(self, choices: Sequence[int], features: Features, prior: Callable[[float], list[float]]) -> None:
        self._choices, self._features, self._prior = choices, features, prior
        self._steps = np.array(choices, float)
        self._tokens = np.log2(self._steps + 1) / _SPREAD  # [choices], of one session
        self._cells: dict[_Key, _Cell] = {}
        size = len(features(0, 1.0, 1.0))
        self._seen = np.zeros((6, _MAX_CELLS))  # what of a cell the fit reads
        self._k, self._batch, self._context, self._mean_s, self._cycles, self._at = self._seen
        self._x = np.zeros((_MAX_CELLS, size))  # features, as of the newest fit
        self._trust = np.zeros(_MAX_CELLS)  # cycles, the older the fewer
        self._errors = np.zeros(_MAX_CELLS)  # logarithm of seconds over fitted seconds
        self._places = np.zeros((3, _MAX_CELLS))  # logarithms of tokens, batch and context, in spreads
        self._drafted = np.zeros(_MAX_CELLS, bool)
        self._weights = np.zeros(size)
        self._floor = 0.0  # seconds that do not matter to the fit
        self._drift = 1.0
        self._now = 0
        self._run: list[float] = []  # errors beyond the clip, in a row
        self._fitted_at = -_REFIT
        self._fitting: Iterator[bool] | None = None
        self._tables: dict[tuple[float, int], _Table] = {}  # by batch and context bucket

    def observe(self, steps: int, batch: float, context: float, seconds: float, floor_s: float) -> bool:
        """Learns from a cycle; `floor_s` is what does not matter. True: everything is suddenly faster or slower."""
        self._now += 1
        key = (steps, batch_bucket(batch), context_bucket(context))
        cell, table = self._cells.get(key), self._tables.get((batch, key[2]))
        i = self._choices.index(steps)
        if cell is None or len(cell.first) < _FIRST:
            seconds /= self._drift
            if cell is None and table is not None and table.support[i] >= _FIRST:
                seconds = min(seconds, _NEW * table.seconds[i])
            self._begin(key, cell or self._add(key, batch, context), seconds)
            return False
        own = (seconds + floor_s) / (cell.mean_s * self._drift + floor_s) - 1
        error = own if table is None else (seconds + floor_s) / (table.seconds[i] * self._drift + floor_s) - 1
        age = self._now - cell.at
        known = cell.cycles >= _KNOWN and age < _REFIT  # what is off is not the bucket
        jumped = known and self._jumped(own)
        far, cell.far = cell.far, not -_CLIP <= own <= _CLIP
        most = _ALONE if cell.far and not far else _CLIP
        error, own = max(-most, min(most, error)), max(-most, min(most, own))
        if known:
            self._drift *= 1 + _DRIFT * own
        cell.cycles = min((cell.cycles if age == 1 else cell.cycles * 0.5 ** (age / _AGE)) + 1, _MEMORY)
        change = 1 + own / cell.cycles
        before_s, cell.mean_s = cell.mean_s, max(cell.mean_s * change, (cell.mean_s + floor_s) * change - floor_s)
        cell.batch += (batch - cell.batch) / cell.cycles
        cell.context += (context - cell.context) / cell.cycles
        self._keep(cell, self._errors[cell.row] + log((cell.mean_s + self._floor) / (before_s + self._floor)))
        if table is not None:
            table.seconds[i] *= 1 + error / cell.cycles
            table.support[i] += 1
        return jumped

    def table(self, batch: float, context: float) -> tuple[list[float], float]:
        """(seconds by choice, without what has drifted; the factor of that)."""
        return self._look_up(batch, context).seconds, self._drift

    def support(self, batch: float, context: float) -> list[float]:
        """By choice: cycles measured there, those nearby counting in part."""
        return self._look_up(batch, context).support

    def doubt(self, steps: int, batch: float, context: float) -> float:
        """How much has drifted since `steps` was seen here, as a share; 1 where it never was."""
        cell = self._cells.get((steps, batch_bucket(batch), context_bucket(context)))
        return 1.0 if cell is None else abs(self._drift / cell.drift - 1)

    def age(self, steps: int, batch: float, context: float) -> int:
        """Cycles since `steps` was seen here."""
        cell = self._cells.get((steps, batch_bucket(batch), context_bucket(context)))
        return 1 << 30 if cell is None else self._now - cell.at

    @property
    def faster(self) -> bool:
        """Whether the newest cycle was so much faster than expected that others should show whether it stays so."""
        return bool(self._run) and self._run[-1] < 0

    def cycles(self, steps: int, batch: float, context: float) -> float:
        """How many cycles what is known of `steps` here rests on."""
        cell = self._cells.get((steps, batch_bucket(batch), context_bucket(context)))
        return 0.0 if cell is None else cell.cycles

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

    def _add(self, key: _Key, batch: float, context: float) -> _Cell:
        row = len(self._cells)
        if row == _MAX_CELLS:
            row = self._cells.pop(min(self._cells, key=lambda k: self._cells[k].at)).row
        cell = self._cells[key] = _Cell(row, key[0], batch, context, 0.0, 0.0, self._now, self._drift)
        self._places[:, row] = log2(batch * (key[0] + 1)), log2(batch), log2(context + 256)
        self._places[:, row] /= _SPREAD
        self._k[row], self._drafted[row] = key[0], key[0] > 0
        return cell

    def _begin(self, key: _Key, cell: _Cell, seconds: float) -> None:
        """One of the first few cycles of a cell."""
        before_s = cell.mean_s
        cell.first.append(max(seconds, 1e-9))
        cell.mean_s = median(cell.first) if len(cell.first) > 2 else min(cell.first)
        cell.cycles = len(cell.first)
        trend = sum(map(mul, self._features(cell.steps, cell.batch, cell.context), self._weights.tolist()))
        error = log((cell.mean_s + self._floor) / (trend + self._floor)) if self._floor else 0.0
        self._keep(cell, error)
        if not self._floor or abs(error) > _CLIP:  # what is so new cannot wait
            for _ in self._fit():
                pass
            self._fitted_at, self._fitting = self._now, None
            self._tables.clear()
        elif len(self._cells) <= _FEW_CELLS:
            self._fitted_at = -_REFIT  # the next fit is due
        for at in [at for at in self._tables if at[1] == key[2] and batch_bucket(at[0]) == key[1]]:
            if before_s:
                self._tables[at].seconds[self._choices.index(cell.steps)] *= cell.mean_s / before_s
            else:
                del self._tables[at]

    def _keep(self, cell: _Cell, error: float) -> None:
        """The cell was seen in this cycle, and is off what was fitted by that much."""
        cell.at, cell.drift, row = self._now, self._drift, cell.row
        self._batch[row], self._context[row], self._mean_s[row] = cell.batch, cell.context, cell.mean_s
        self._cycles[row] = self._trust[row] = cell.cycles
        self._at[row] = self._now
        self._errors[row] = error

    def work(self) -> None:
        """A cycle's share of a fit."""
        if self._fitting is None:
            if self._now - self._fitted_at < _REFIT:
                return
            self._fitting, self._fitted_at = self._fit(), self._now
        if next(self._fitting, True):
            self._fitting = None

    def _fit(self) -> Iterator[bool]:
        """Weighted ridge in relative errors; no feature may make a cycle shorter (so it grows with k). What is done
        between two yields is a cycle's share of the work."""
        n = len(self._cells)
        steps, batch, context, y, cycles, at = self._seen[:, :n]
        x = self._x[:n]
        for column, values in enumerate(self._features(steps, batch, context)):
            x[:, column] = values
        yield False
        self._trust[:n] = trust = cycles * np.exp2((at - self._now) / _AGE)
        size = float(trust @ y / trust.sum())
        floor = 0.02 * size
        weight = trust / (y + floor) ** 2
        yield False
        scale = np.maximum(x.max(axis=0), 1e-12)
        a = x / scale  # [cells, features]
        weighted = (a * weight[:, None]).T
        yield False
        ridge = 0.02 / size**2
        gram = weighted @ a
        gram.flat[:: len(scale) + 1] += ridge
        right = weighted @ y + ridge * np.array(self._prior(size)) * scale  # seconds at the largest value seen
        yield False
        solution = np.linalg.solve(gram, right)
        for _ in range(2):
            if solution.min() >= 0:
                break
            yield False
            held = np.flatnonzero(solution <= 0)
            gram[held] = gram[:, held] = right[held] = 0.0
            gram[held, held] = 1.0
            solution = np.linalg.solve(gram, right)
        weights = np.maximum(solution, 0) / scale
        yield False
        self._weights, self._floor = weights, floor
        self._errors[:n] = np.log((y + floor) / (x @ weights + floor))
        if n <= _FEW_CELLS:
            self._tables.clear()

    def _look_up(self, batch: float, context: float) -> "_Table":
        key = (batch, context_bucket(context))
        table = self._tables.get(key)
        if table is None or self._now - table.at >= _REMAKE:
            if len(self._tables) >= _MAX_CELLS:
                self._tables.clear()
            table = self._tables[key] = self._table(batch, context)
        return table

    def _table(self, batch: float, context: float) -> "_Table":
        n, floor, choices = len(self._cells), self._floor, self._choices
        if not floor:
            return _Table([1e-9] * len(choices), [0.0] * len(choices), self._now)
        mine = np.empty((len(choices), len(self._weights)))
        for column, values in enumerate(self._features(self._steps, batch, context)):
            mine[:, column] = values
        rows, (tokens, batches, contexts) = log2(batch) / _SPREAD, self._places[:, :n]
        apart = (self._tokens[:, None] + rows - tokens) ** 2
        apart += (batches - rows) ** 2 + (contexts - log2(context + 256) / _SPREAD) ** 2
        apart += (self._steps > 0)[:, None] != self._drafted[:n]
        others = np.exp(-apart) * self._trust[:n]  # [choices, cells]
        bucket, far = batch_bucket(batch), context_bucket(context)
        own = [self._cells.get((k, bucket, far)) for k in choices]
        for i, cell in enumerate(own):
            if cell is not None:
                others[i, cell.row] = 0.0
        total = others.sum(1)
        shared = others @ self._errors[:n] / (total + 0.5)
        error, support = shared.tolist(), total.tolist()
        for i, cell in enumerate(own):
            if cell is not None:
                cycles = float(self._trust[cell.row])
                error[i] = (cycles * float(self._errors[cell.row]) + _FEW * error[i]) / (cycles + _FEW)
                support[i] += cycles
        trend = (mine @ self._weights).tolist()
        seconds = [max(1e-9, (t + floor) * exp(e) - floor) for t, e in zip(trend, error, strict=True)]
        return _Table(_ascending(seconds, [s + 0.05 for s in support]), support, self._now)


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
        self._turn = False  # the draft's, to work on its fit

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
        self._turn = not self._turn
        (self._draft if self._drafted and self._turn else self._verify).work()
        return jumped

    @property
    def promise(self) -> bool:
        """Whether drafts have come much faster than expected, though not often enough to be believed."""
        return self._draft.faster

    def seconds(self, batch: float, context: float) -> list[float]:
        """A cycle's expected length by choice; never shorter for more drafts."""
        verify, slow = self._verify.table(batch, context)
        if not self._drafted:
            return [slow * (v + 0.05 * k * verify[0]) for v, k in zip(verify, self._choices, strict=True)]
        draft, lag = self._draft.table(batch, context)
        return [slow * v + lag * d for v, d in zip(verify, draft, strict=True)]

    def support(self, batch: float, context: float) -> list[float]:
        """By choice: measured cycles that `seconds` rests on."""
        return self._verify.support(batch, context)

    def doubt(self, steps: int, batch: float, context: float) -> float:
        """How much the target has drifted since `steps` was seen here, as a share; 1 where it never was."""
        return self._verify.doubt(steps, batch, context)

    def age(self, steps: int, batch: float, context: float) -> int:
        """Cycles since `steps` was seen here."""
        return self._verify.age(steps, batch, context)

    def cycles(self, steps: int, batch: float, context: float) -> float:
        """How many cycles what is known of `steps` here rests on."""
        return self._verify.cycles(steps, batch, context)
