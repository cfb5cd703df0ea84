"""An A/B run's report, from its samples alone: report.md, result.json and the plots."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from loadtest import _plot
from loadtest._client import FAILED, Sample, SetupError
from loadtest._figures import (
    Drawn,
    Figures,
    Group,
    Interval,
    accept_length,
    end_to_end,
    first_token,
    interval,
    mean,
    of,
    per_token,
    percentile,
    pooled,
    sample_of,
    wall_s,
)

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
TIMES: dict[str, Callable[[Sample], float | None]] = {
    "first token": first_token,
    "time per token": per_token,
    "end to end": end_to_end,
}
_LATE_S = 0.02  # a generator later than this is part of what it measures
BASE, AUTO = "off", "auto"


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95 % interval, None where there are too few blocks."""

    value: float
    interval: Interval | None

    def shown(self, scale: float = 1.0, digits: int = 2) -> str:
        """For a table."""
        if self.interval is None:
            return f"{self.value * scale:.{digits}f}"
        low, high = self.interval
        return f"{self.value * scale:.{digits}f} ({low * scale:.{digits}f}–{high * scale:.{digits}f})"


@dataclass(frozen=True)
class Cell:
    """One variant at one rate."""

    rate: float
    variant: str
    figures: Figures
    times: dict[str, dict[str, Estimate]]  # by figure and quantile, seconds
    total_rate: Estimate  # tokens a second
    accept_length: Estimate | None
    speed: Estimate | None  # the base's mean time per token over this variant's


def cells(samples: Sequence[Sample], variants: Sequence[str], seed: int) -> list[Cell]:
    """Every variant at every rate, in order. Intervals are over blocks, the same ones drawn for both sides of a ratio.

    The blocks are what is independent here: requests of one share a queue. And only a whole block has its twins, with
    the same arrivals, in the other variants.
    """
    found = []
    for rate in sorted({sample.rate for sample in samples}):
        here = [sample for sample in samples if sample.rate == rate]
        blocks = sorted({sample.block for sample in here})
        both = [[s for s in here if s.block == block] for block in blocks]
        for variant in variants:
            groups: list[Group] = [[s for s in block if s.variant == variant] for block in both]
            found.append(_cell(rate, variant, groups, both, seed))
    return found


def _cell(rate: float, variant: str, groups: Sequence[Group], both: Sequence[Group], seed: int) -> Cell:
    times: dict[str, dict[str, Estimate]] = {}
    for name, figure in TIMES.items():
        values = [of(group, figure) for group in groups]
        times[name] = {}
        for label, q in QUANTILES.items():
            if found := _estimate(values, partial(_quantile, q), seed):
                times[name][label] = found
    figures = [Figures.of(group, wall_s(group)) for group in groups]
    total = _estimate([(f.completion_tokens, f.wall_s) for f in figures], _rate, seed)
    assert total is not None, "a block's requests take time"
    pairs = [
        tuple(of([s for s in block if s.variant == name], per_token) for name in (BASE, variant)) for block in both
    ]
    return Cell(
        rate,
        variant,
        Figures.of(pooled(groups), math.fsum(f.wall_s for f in figures)),
        times,
        total,
        _estimate(groups, lambda drawn: accept_length(pooled(drawn)), seed),
        _estimate(pairs, _speed, seed),
    )


def _estimate(
    groups: Sequence[Drawn], statistic: Callable[[Sequence[Drawn]], float | None], seed: int
) -> Estimate | None:
    value = statistic(groups)
    return None if value is None else Estimate(value, interval(groups, statistic, seed))


def _quantile(q: float, values: Sequence[Sequence[float]]) -> float | None:
    joined = list(chain.from_iterable(values))
    return percentile(joined, q) if joined else None


def _rate(tokens_and_walls: Sequence[tuple[int, float]]) -> float | None:
    wall = math.fsum(wall for _, wall in tokens_and_walls)
    return sum(tokens for tokens, _ in tokens_and_walls) / wall if wall > 0 else None


def _speed(pairs: Sequence[Sequence[Sequence[float]]]) -> float | None:
    """The base's mean time per token over the variant's."""
    base, other = (list(chain.from_iterable(pair[side] for pair in pairs)) for side in (0, 1))
    return mean(base) / mean(other) if base and other else None


def verdict(found: Sequence[Cell], samples: Sequence[Sample]) -> str:
    """One sentence: is `auto` worth it?"""
    failed = [sample for sample in samples if sample.status == FAILED]
    if failed:
        return f"No verdict: {len(failed)} of {len(samples)} requests failed, the first with: {failed[0].error}."
    speeds = {cell.rate: cell.speed for cell in found if cell.variant == AUTO and cell.speed is not None}
    if not speeds:
        return "No verdict: too few answers of two tokens or more."
    said = ", ".join(f"{speed.shown()} times as fast at {rate:g}/s" for rate, speed in speeds.items())
    if any(speed.interval is None for speed in speeds.values()):
        return f"No verdict from a single block: against off, tokens with auto came {said}."
    pays = [rate for rate, speed in speeds.items() if speed.interval and speed.interval[0] > 1]
    costs = [rate for rate, speed in speeds.items() if speed.interval and speed.interval[1] < 1]
    if len(pays) == len(speeds):
        judged = "Speculation pays at every rate measured"
    elif costs:
        judged = f"Speculation costs at {_rates(costs)}" + (f" and pays at {_rates(pays)}" if pays else "")
    elif pays:
        judged = f"Speculation pays at {_rates(pays)} and makes no difference that could be measured at the others"
    else:
        judged = "Speculation makes no difference that could be measured"
    return f"{judged}: against off, tokens with auto came {said} (95 % intervals over blocks)."


def _rates(rates: Sequence[float]) -> str:
    return ", ".join(f"{rate:g}/s" for rate in rates)


def write(folder: Path) -> str:
    """Writes the report of the run in `folder` and returns its verdict. Raises SetupError where that is no run's."""
    try:
        run = json.loads((folder / "run.json").read_text())
        with (folder / "samples.jsonl").open() as file:
            samples = [sample_of(json.loads(line)) for line in file]
        plan = run["plan"]
        variants = [BASE, AUTO, *[f"k = {k}" for k in plan["steps"]]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SetupError(f"{folder} has no run of `ab`: {type(error).__name__}: {error}") from error
    found = cells(samples, variants, plan["seed"])
    sentence = verdict(found, samples)
    result = {**run, "verdict": sentence, "cells": [asdict(cell) for cell in found]}
    (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    (folder / "throughput-latency.svg").write_text(_plot.curves(_curve_panels(found)))
    (folder / "percentiles.svg").write_text(
        _plot.whiskers(_percentile_panels(found), len({cell.rate for cell in found}))
    )
    (folder / "accept-length.svg").write_text(_plot.whiskers(_accept_panels(found), 1))
    (folder / "report.md").write_text(_markdown(run, found, samples, sentence))
    return sentence


def _curve_panels(found: Sequence[Cell]) -> list[_plot.Curves]:
    panels = []
    for name in ("time per token", "end to end"):
        lines: dict[str, list[_plot.Point]] = {}
        for cell in found:
            if median := cell.times[name].get("p50"):
                lines.setdefault(cell.variant, []).append((cell.total_rate.value, median.value * 1000))
        panels.append(_plot.Curves(f"{name}, median", "tok/s in total", "ms", lines))
    return panels


def _percentile_panels(found: Sequence[Cell]) -> list[_plot.Whiskers]:
    panels = []
    for name in TIMES:
        for rate in sorted({cell.rate for cell in found}):
            values = {
                cell.variant: {
                    label: (e.value * 1000, _scaled(e.interval, 1000)) for label, e in cell.times[name].items()
                }
                for cell in found
                if cell.rate == rate
            }
            panels.append(_plot.Whiskers(f"{name}, {rate:g}/s", "ms", values))
    return panels


def _accept_panels(found: Sequence[Cell]) -> list[_plot.Whiskers]:
    values: dict[str, dict[str, _plot.Ranged]] = {}
    for cell in found:
        if (e := cell.accept_length) is not None:
            values.setdefault(cell.variant, {})[f"{cell.rate:g}/s"] = (e.value, e.interval)
    return [_plot.Whiskers("accept length", "tokens a cycle", values)]


def _scaled(given: Interval | None, scale: float) -> Interval | None:
    return None if given is None else (given[0] * scale, given[1] * scale)


def _markdown(run: dict[str, Any], found: Sequence[Cell], samples: Sequence[Sample], sentence: str) -> str:
    plan = run["plan"]
    client = f"{run['client']['machine']} with {run['client']['cores']} cores"
    lines = [
        f"# Speculation off, auto and fixed, on {run['model']}",
        "",
        f"**{sentence}**",
        "",
        f"`{run['command']}`, begun {run['began']}, from {client}. {len(samples)} requests ({plan['kind']}) in "
        f"{plan['blocks']} blocks of {plan['block_s']:g} s a rate; within a block every variant got the same "
        f"{plan['shape']} arrivals and the same prompts, in an order that rotates. In brackets: 95 % intervals, "
        "bootstrapped over blocks. loadtest/README.md says what each figure is.",
        "",
        "![throughput and latency](throughput-latency.svg)",
        "",
    ]
    for rate in sorted({cell.rate for cell in found}):
        here = [cell for cell in found if cell.rate == rate]
        lines += [f"## {rate:g} arrivals a second", "", *_table(here), ""]
    lines += ["![percentiles](percentiles.svg)", "", "![accept length](accept-length.svg)", ""]
    late = max(cell.figures.late_p99_s for cell in found)
    if late > _LATE_S:
        lines += [
            f"The load generator itself sent up to {late * 1000:.0f} ms late (p99); that time is in the figures. Run it"
            " on a machine with more to spare, or ask for less.",
            "",
        ]
    return "\n".join(lines)


def _table(here: Sequence[Cell]) -> list[str]:
    lines = [
        "| | " + " | ".join(cell.variant for cell in here) + " |",
        "|---|" + "---|" * len(here),
    ]

    def row(name: str, value: Callable[[Cell], str]) -> None:
        lines.append(f"| {name} | " + " | ".join(value(cell) for cell in here) + " |")

    row("answered, rejected (429), failed", lambda c: f"{c.figures.answered}, {c.figures.rejected}, {c.figures.failed}")
    row("speed of a token, off = 1", lambda c: c.speed.shown() if c.speed else "-")
    row("tok/s in total", lambda c: c.total_rate.shown(digits=1))
    row("tok/s of a stream, median", lambda c: f"{c.figures.stream_rate.p50:.1f}" if c.figures.stream_rate else "-")
    row("accept length", lambda c: c.accept_length.shown() if c.accept_length else "-")
    for name in TIMES:
        for label in QUANTILES:

            def shown(cell: Cell, name: str = name, label: str = label) -> str:
                estimate = cell.times[name].get(label)
                return estimate.shown(1000, 1) if estimate else "-"

            row(f"{name}, {label}, ms", shown)
    return lines
