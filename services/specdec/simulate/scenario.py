"""What is simulated: a profile (what cycles cost and how many drafts stand) under a trace (what changes, and when)."""

import math
import random
from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar

import numpy as np
import numpy.typing as npt
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from specdec.errors import SettingsError

Array = npt.NDArray[np.float64]
TICK_S = 0.1
_Kind = TypeVar("_Kind", "Profile", "Trace")
Curve = Annotated[dict[int, float], Field(min_length=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DraftCost(_Strict):
    """`first` + k * (`step` + batch * `row`) milliseconds."""

    first: float = 0.0
    step: float
    row: float = 0.0


class Hiccups(_Strict):
    """Cycles made longer by something else, a prompt for example."""

    per_s: float = 0.0
    ms: float = 0.0


class Profile(_Strict):
    """A pair. Curves are points, joined by lines and continued beyond the last."""

    name: str
    max_steps: int = Field(ge=1, le=64)
    batch: int = Field(1, ge=1)  # sessions where a trace says 1
    context: int = 1000  # tokens a session, likewise
    verify_ms: Curve  # by tokens in the batch
    plain_ms: Curve | None = None  # by sessions, where k = 0 takes another path
    context_ms_per_million: float = 0.0  # by tokens of context in the batch
    draft_ms: DraftCost
    hidden_ms: float = 0.0  # of drafting, behind the target's own time (run-ahead)
    acceptance: list[Annotated[float, Field(ge=0, le=1)]]  # conditional, by position
    noise: float = Field(0.0, ge=0, le=0.5)  # standard deviation of a cycle's time, relative
    hiccups: Hiccups = Hiccups()
    lag: int = Field(1, ge=0, le=64)  # cycles already ordered when a decision is taken

    pace: float = Field(1.0, gt=0)  # traces take so many times their seconds: policies live by cycles

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if len(self.acceptance) != self.max_steps:
            raise ValueError(f"acceptance has {len(self.acceptance)} positions, max_steps is {self.max_steps}")
        return self

    def cycle_ms(self, batch: int, drafts: int, steps: int, context: float, verify: float, draft: float) -> float:
        """A cycle of `batch` sessions that verifies `drafts` in all, k of them a session at most; waiting included."""
        return self._verify_ms(batch, drafts, context) * verify + self.draft_wait_ms(batch, steps, draft)

    def _verify_ms(self, batch: int, drafts: int, context: float) -> float:
        plain = self.plain_ms is not None and not drafts
        return _width_ms(self, batch + drafts, plain) + self.context_ms_per_million * batch * context / 1e6

    def draft_wait_ms(self, batch: int, steps: int, draft: float) -> float:
        """Waiting for k drafts a session."""
        cost = self.draft_ms
        return (
            max(0.0, draft * (cost.first + steps * (cost.step + batch * cost.row)) - self.hidden_ms) if steps else 0.0
        )

    def stood(self, factor: float) -> list[float]:
        """Drafts expected to stand by k, 0 to max_steps, with every position's acceptance times `factor`."""
        survival = np.cumprod(np.minimum(np.array(self.acceptance) * factor, 1.0))
        return [0.0, *np.cumsum(survival).tolist()]

    def __hash__(self) -> int:
        return hash(self.name)


@lru_cache(1 << 14)
def _width_ms(profile: Profile, width: int, plain: bool) -> float:
    curve = profile.plain_ms if plain and profile.plain_ms is not None else profile.verify_ms
    at = sorted(curve)
    i = min(max(bisect_left(at, width), 1), len(at) - 1)
    if len(at) == 1 or width <= at[0]:
        return curve[at[0]]
    slope = (curve[at[i]] - curve[at[i - 1]]) / (at[i] - at[i - 1])
    return curve[at[i]] + slope * (width - at[i])


class Sawtooth(_Strict):
    """Up in a line, down at once."""

    period_s: float = Field(gt=0)
    low: float
    high: float


class Bursts(_Strict):
    """`high` for `for_s` at random times, `every_s` on average; else `low`."""

    every_s: float = Field(gt=0)
    for_s: float = Field(gt=0)
    low: float
    high: float


class Track(_Strict):
    """One quantity over time, as a factor of the profile's: one of four shapes."""

    hold: list[tuple[float, float]] | None = None  # [second, value], until the next
    ramp: list[tuple[float, float]] | None = None  # the same, joined by lines
    sawtooth: Sawtooth | None = None
    bursts: Bursts | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if sum(shape is not None for shape in (self.hold, self.ramp, self.sawtooth, self.bursts)) != 1:
            raise ValueError("give one of hold, ramp, sawtooth, bursts")
        return self

    def values(self, at: Array, rng: random.Random) -> Array:
        """The factor at each of the seconds `at`."""
        if self.ramp is not None:
            return np.interp(at, [t for t, _ in self.ramp], [v for _, v in self.ramp]).astype(np.float64)
        if self.sawtooth is not None:
            saw = self.sawtooth
            return saw.low + (saw.high - saw.low) * ((at + rng.uniform(0, saw.period_s)) % saw.period_s) / saw.period_s
        if self.bursts is not None:
            out, t = np.full(len(at), self.bursts.low), 0.0
            while (t := t + rng.expovariate(1 / self.bursts.every_s)) < at[-1]:
                out[(at >= t) & (at < t + self.bursts.for_s)] = self.bursts.high
            return out
        assert self.hold is not None
        index = np.searchsorted([t for t, _ in self.hold], at, side="right") - 1
        held: Array = np.array([v for _, v in self.hold], np.float64)[np.maximum(index, 0)]
        return held


_CONSTANT = Track(hold=[(0.0, 1.0)])


class Trace(_Strict):
    """What changes. A phase is what hindsight may choose one k for."""

    name: str
    duration_s: float = Field(gt=10, le=3600)
    phase_s: float = Field(gt=0)
    acceptance: Track = _CONSTANT
    batch: Track = _CONSTANT
    draft: Track = _CONSTANT
    verify: Track = _CONSTANT
    context: Track = _CONSTANT
    hopeless: float = Field(0.0, ge=0, le=1)  # share of the sessions whose drafts never stand


@dataclass(frozen=True)
class Scenario:
    """A profile under a trace with one seed's chances, by ticks of TICK_S."""

    profile: Profile
    trace: Trace
    seed: int
    batch: list[int]
    context: list[float]
    acceptance: list[float]  # factor, rounded to hundredths
    draft: list[float]
    verify: list[float]
    hiccups_s: list[float]  # when

    @classmethod
    def make(cls, profile: Profile, trace: Trace, seed: int) -> "Scenario":
        """The scenario of a seed."""
        rng = random.Random(f"{profile.name} {trace.name} {seed}")
        duration_s = trace.duration_s * profile.pace
        at: Array = np.arange(0, duration_s + 5, TICK_S, np.float64) / profile.pace
        hiccups, t = [], 0.0
        while profile.hiccups.per_s and (t := t + rng.expovariate(profile.hiccups.per_s)) < duration_s:
            hiccups.append(t)
        return cls(
            profile,
            trace,
            seed,
            np.maximum(1, np.rint(profile.batch * trace.batch.values(at, rng))).astype(int).tolist(),
            (profile.context * trace.context.values(at, rng)).tolist(),
            np.round(trace.acceptance.values(at, rng), 2).tolist(),
            trace.draft.values(at, rng).tolist(),
            trace.verify.values(at, rng).tolist(),
            hiccups,
        )

    @property
    def duration_s(self) -> float:
        """The trace's length at the profile's pace."""
        return self.trace.duration_s * self.profile.pace

    @property
    def ticks(self) -> int:
        """Ticks of the trace."""
        return round(self.duration_s / TICK_S)

    @property
    def phase_ticks(self) -> int:
        """Ticks of a phase."""
        return max(1, round(self.trace.phase_s * self.profile.pace / TICK_S))

    def hopeless(self, batch: int) -> int:
        """Of `batch` sessions, those whose drafts never stand."""
        return math.floor(self.trace.hopeless * batch)

    def rates(self) -> Array:
        """Tokens a second expected at each fixed k and tick, but for hiccups.  # [max_steps + 1, ticks]"""
        states: dict[tuple[float, ...], int] = {}
        tracks = zip(self.batch, self.context, self.acceptance, self.verify, self.draft, strict=True)
        index = [states.setdefault(state, len(states)) for state, _ in zip(tracks, range(self.ticks), strict=False)]
        stood = {factor: self.profile.stood(factor) for factor in set(self.acceptance)}
        rates = np.empty((self.profile.max_steps + 1, len(states)))
        for (sessions, context, factor, verify, draft), i in states.items():
            batch = int(sessions)
            hopeful = batch - self.hopeless(batch)
            for k, more in enumerate(stood[factor]):
                ms = self.profile.cycle_ms(batch, batch * k, k, context, verify, draft)
                rates[k, i] = 1000 * (batch + hopeful * more) / ms
        return rates[:, index]

    def free(self) -> Array:
        """The share of each tick that no hiccup takes."""
        share = np.ones(self.ticks)
        for t in self.hiccups_s:
            share[min(int(t / TICK_S), self.ticks - 1)] -= self.profile.hiccups.ms / 1000 / TICK_S
        return share


def load_profile(name: str) -> Profile:
    """A shipped profile by name, or one from a file. Raises SettingsError."""
    return _load(Profile, "profiles", name)


def load_trace(name: str) -> Trace:
    """A shipped trace by name, or one from a file. Raises SettingsError."""
    return _load(Trace, "traces", name)


def shipped(kind: Literal["profiles", "traces"]) -> list[str]:
    """The names of what comes with the package."""
    return sorted(f.name.removesuffix(".yaml") for f in files("specdec.simulate").joinpath(kind).iterdir())


def _load(kind: type[_Kind], folder: Literal["profiles", "traces"], name: str) -> _Kind:
    if name in shipped(folder):
        text = files("specdec.simulate").joinpath(folder, f"{name}.yaml").read_text()
    else:
        try:
            text = Path(name).read_text()
        except OSError as error:
            known = ", ".join(shipped(folder))
            raise SettingsError(f"--{folder} {name}: neither a file that can be read nor one of {known}") from error
    try:
        fields = yaml.safe_load(text)
        if not isinstance(fields, dict):
            raise SettingsError(f"{name}: a {kind.__name__.lower()} is a mapping")
        return kind(**({"name": Path(name).stem} | fields))
    except yaml.YAMLError as error:
        raise SettingsError(f"{name}: {error}") from error
    except ValidationError as error:
        reasons = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise SettingsError(f"{name}: {reasons}") from error
