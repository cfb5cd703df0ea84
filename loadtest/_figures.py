"""From samples to figures, with confidence intervals.

    first token (s)        from when a request was due to its first content; the role event and headers do not count
    time per token (s)     (last content - first content) / (completion tokens - 1), tokens as usage says
    end to end (s)         from when it was due to [DONE]
    stream tok/s           completion tokens / end to end, of one answer
    total tok/s            completion tokens of all answers / wall time
    accept length          tokens a cycle: sum(tokens - 1) / sum(tokens - 1 - accepted)

An answer's first token comes from the prompt's own pass, no cycle; each cycle then yields the drafts that stood and one
token of the target's own, so the cycles are what remains without those drafts. Where an answer ends inside a cycle,
that cycle yields no token of the target's own and is not counted: over an answer of n cycles at most 1/n too high.
"""

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from statistics import NormalDist
from typing import Any, TypeVar

from loadtest._client import FAILED, OK, REJECTED, Sample

_DRAWS = 1000
_LEVEL = 0.95
Interval = tuple[float, float]


def first_token(sample: Sample) -> float | None:
    """Seconds to the first content."""
    return sample.first_s


def per_token(sample: Sample) -> float | None:
    """Seconds a token after the first."""
    if sample.first_s is None or sample.last_s is None or sample.completion_tokens < 2:
        return None
    return (sample.last_s - sample.first_s) / (sample.completion_tokens - 1)


def end_to_end(sample: Sample) -> float | None:
    """Seconds to [DONE]."""
    return sample.total_s


def stream_rate(sample: Sample) -> float | None:
    """Tokens a second of this answer, the wait for its first included."""
    return sample.completion_tokens / sample.total_s if sample.total_s > 0 else None


def accept_length(samples: Iterable[Sample]) -> float | None:
    """Tokens a cycle, over all cycles; None where usage does not count drafts, or where there was no cycle."""
    counted = [s for s in samples if s.status == OK and s.accepted is not None and s.completion_tokens > 1]
    tokens = sum(s.completion_tokens - 1 for s in counted)
    cycles = tokens - sum(s.accepted or 0 for s in counted)
    return tokens / cycles if cycles > 0 else None


def percentile(values: Sequence[float], q: float) -> float:
    """The q-quantile of values that are not none, with linear interpolation."""
    ordered = sorted(values)
    at = q * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def of(samples: Iterable[Sample], figure: Callable[[Sample], float | None]) -> list[float]:
    """The figure of every answered sample that has it."""
    return [value for s in samples if s.status == OK and (value := figure(s)) is not None]


def mean(values: Sequence[float]) -> float:
    """The mean of values that are not none."""
    return math.fsum(values) / len(values)


Group = Sequence[Sample]
Drawn = TypeVar("Drawn")  # what a statistic needs of a group


def interval(
    groups: Sequence[Drawn], statistic: Callable[[Sequence[Drawn]], float | None], seed: int = 0
) -> Interval | None:
    """The bootstrap's 95 % interval of a statistic; whole groups are drawn, with replacement.

    A group is what is independent of the others: a block of an A/B comparison, whose requests share a queue; a single
    request only where nothing better is known. None where there are fewer than two groups, or the statistic is not
    defined. The percentiles are the expanded ones of Hesterberg (2015, "What Teachers Should Know About the Bootstrap",
    section 5.3): with the plain ones, five groups cover the truth four times in five.
    """
    n = len(groups)
    if n < 2:
        return None
    rng = random.Random(seed)
    found = [value for _ in range(_DRAWS) if (value := statistic(rng.choices(groups, k=n))) is not None]
    if not found:
        return None
    tail = NormalDist().cdf(-math.sqrt(n / (n - 1)) * _student(n - 1))
    return percentile(found, tail), percentile(found, 1 - tail)


def _student(freedom: int) -> float:
    """Student's t that leaves out the tails beyond the level (Abramowitz and Stegun, 26.7.5)."""
    z = NormalDist().inv_cdf((1 + _LEVEL) / 2)
    terms = (
        z,
        (z**3 + z) / (4 * freedom),
        (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2),
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3),
    )
    return math.fsum(terms)


def pooled(groups: Iterable[Group]) -> list[Sample]:
    """All samples of the groups."""
    return [sample for group in groups for sample in group]


@dataclass(frozen=True)
class Spread:
    """A figure's distribution over requests, in its own unit."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread | None":
        """None where there is nothing to tell of."""
        if not values:
            return None
        return cls(mean(values), percentile(values, 0.5), percentile(values, 0.9), percentile(values, 0.99))


@dataclass(frozen=True)
class Figures:
    """What a set of samples says. Times in seconds, rates a second."""

    requests: int
    answered: int
    rejected: int  # by a 429
    failed: int
    wall_s: float
    first_token: Spread | None
    per_token: Spread | None
    end_to_end: Spread | None
    stream_rate: Spread | None
    total_rate: float  # tokens
    request_rate: float  # answered ones
    prompt_tokens: int
    completion_tokens: int
    accept_length: float | None
    late_p99_s: float  # how late the generator sent: what the server did not cause

    @classmethod
    def of(cls, samples: Sequence[Sample], wall_s: float) -> "Figures":
        """Of all samples of `wall_s` seconds. Only answered ones have times and tokens."""
        answered = [s for s in samples if s.status == OK]
        tokens = sum(s.completion_tokens for s in answered)
        return cls(
            requests=len(samples),
            answered=len(answered),
            rejected=sum(s.status == REJECTED for s in samples),
            failed=sum(s.status == FAILED for s in samples),
            wall_s=wall_s,
            first_token=Spread.of(of(answered, first_token)),
            per_token=Spread.of(of(answered, per_token)),
            end_to_end=Spread.of(of(answered, end_to_end)),
            stream_rate=Spread.of(of(answered, stream_rate)),
            total_rate=tokens / wall_s if wall_s > 0 else 0.0,
            request_rate=len(answered) / wall_s if wall_s > 0 else 0.0,
            prompt_tokens=sum(s.prompt_tokens for s in answered),
            completion_tokens=tokens,
            accept_length=accept_length(answered),
            late_p99_s=percentile([s.late_s for s in samples], 0.99) if samples else 0.0,
        )


def wall_s(samples: Iterable[Sample]) -> float:
    """Seconds from the first arrival to the last end, of samples that share a start."""
    spans = [(s.arrival_s, s.arrival_s + s.total_s) for s in samples]
    return max(end for _, end in spans) - min(begin for begin, _ in spans) if spans else 0.0


def sample_of(row: dict[str, Any]) -> Sample:
    """A sample from its JSON; what this version does not know is left out."""
    return Sample(**{name: value for name, value in row.items() if name in {f.name for f in fields(Sample)}})


def text(figures: Figures, title: str) -> str:
    """A few lines for a terminal."""
    f = figures
    lines = [
        f"{title}: {f.requests} requests in {f.wall_s:.1f} s: {f.answered} answered, {f.rejected} rejected (429), "
        f"{f.failed} failed",
        f"  {f.total_rate:.1f} tok/s in total, {f.request_rate:.2f} requests/s, {f.prompt_tokens} tokens in, "
        f"{f.completion_tokens} out, accept length {'-' if f.accept_length is None else f'{f.accept_length:.2f}'}",
    ]
    rows = (
        ("first token, ms", f.first_token, 1000.0),
        ("time per token, ms", f.per_token, 1000.0),
        ("end to end, ms", f.end_to_end, 1000.0),
        ("tok/s of a stream", f.stream_rate, 1.0),
    )
    for name, spread, scale in rows:
        if spread is not None:
            values = (spread.mean, spread.p50, spread.p90, spread.p99)
            shown = zip(("mean", "p50", "p90", "p99"), values, strict=True)
            lines.append(f"  {name:20}" + "".join(f"{label:>6} {value * scale:<9.1f}" for label, value in shown))
    return "\n".join(lines)
