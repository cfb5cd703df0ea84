"""`specdec simulate`: the step policy against fixed step counts, on cost and acceptance that are known."""

import json
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import ClassVar

from pydantic import Field
from pydantic_settings import CliImplicitFlag, SettingsConfigDict

from specdec.router.measured import StepPolicy
from specdec.settings import Settings
from specdec.simulate.plot import draw
from specdec.simulate.run import AcceptLengthK, Hindsight, Score, play
from specdec.simulate.scenario import Scenario, load_profile, load_trace, shipped

TOTAL, WINDOW, PHASE = 0.99, 0.97, 0.97  # of plain, of plain in the worst window, of the best fixed k of a phase
FOUNDING = {"founding-8-gpus": 0.99 * 90, "founding-1-gpu": 0.99 * 90}  # tok/s where nothing changes


class SimulateSettings(Settings):
    """Run the step policy (auto) on simulated pairs, beside every fixed k, plain decoding, the accept-length rule and
    the best fixed k of each phase in hindsight. Profiles say what cycles cost and how many drafts stand, traces what
    changes; both are YAML, shipped or your own."""

    model_config = SettingsConfigDict(env_prefix="SPECDEC_SIMULATE_")
    section: ClassVar[str] = "simulate"

    profiles: list[str] = Field([], description=f"files, or names: {', '.join(shipped('profiles'))}; default all")
    traces: list[str] = Field([], description=f"files, or names: {', '.join(shipped('traces'))}; default all")
    seeds: int = Field(5, ge=1, le=1000, description="runs of each profile and trace")
    first_seed: int = Field(0, ge=0, description="of those runs, the first's")
    jobs: int = Field(os.cpu_count() or 1, ge=1, le=256, description="processes")
    check: CliImplicitFlag[bool] = Field(
        False,
        description=f"exit 1 unless every run keeps {TOTAL} of plain decoding's tokens, and {WINDOW} in any 10 s, and"
        f" every phase, over its seeds, {PHASE} of its best fixed k",
    )
    plot: Path | None = Field(None, description="draw the first profile, trace and seed over time: an SVG file")
    json_: CliImplicitFlag[bool] = Field(False, alias="json", description="print the result as JSON instead of a table")


@dataclass(frozen=True)
class Row:
    """A profile under a trace, over its seeds."""

    profile: str
    trace: str
    fixed: list[float]  # tok/s expected by k, 0 first
    accept_length: float  # tok/s
    best: float  # tok/s of the best fixed k of each phase
    auto: float  # tok/s
    realised: float  # tok/s of auto in tokens that happened to be accepted, warm-up included
    of_plain: float  # the worst seed's
    of_plain_window: float  # likewise
    of_best: float  # over all seeds
    of_best_phase: float  # the worst phase, over all seeds
    of_best_phase_seed: float  # the worst phase of the worst seed
    switches: float
    probes: float
    cycles: float

    @property
    def missed(self) -> list[str]:
        """What it should have reached and did not."""
        goals = [
            ("of plain", self.of_plain, TOTAL),
            ("of plain in 10 s", self.of_plain_window, WINDOW),
            ("of a phase's best k", self.of_best_phase, PHASE),
        ]
        if self.trace == "steady" and self.profile in FOUNDING:
            goals.append(("tok/s", self.auto, FOUNDING[self.profile]))
        return [f"{got:.3f} {what}, {least:.2f} wanted" for what, got, least in goals if got < least]


def simulate(argv: list[str]) -> int:
    """The command."""
    settings = SimulateSettings.load(argv)
    pairs = [
        (profile, trace)
        for profile in settings.profiles or shipped("profiles")
        for trace in settings.traces or shipped("traces")
    ]
    for profile, trace in pairs:  # what cannot be read is said before anything runs
        load_profile(profile), load_trace(trace)
    if settings.plot is not None:
        scenario = Scenario.make(load_profile(pairs[0][0]), load_trace(pairs[0][1]), settings.first_seed)
        policy = StepPolicy(scenario.profile.max_steps)
        settings.plot.write_text(draw(scenario, Hindsight(scenario), play(scenario, policy)))
    rows = []
    if not settings.json_:
        print(_HEAD, flush=True)
    for row in _rows(pairs, range(settings.first_seed, settings.first_seed + settings.seeds), settings.jobs):
        rows.append(row)
        if not settings.json_:
            print(_line(row), flush=True)
    missed = {f"{row.profile}, {row.trace}": row.missed for row in rows if row.missed}
    if settings.json_:
        print(
            json.dumps(
                {
                    "first_seed": settings.first_seed,
                    "seeds": settings.seeds,
                    "rows": [asdict(row) for row in rows],
                    "missed": missed,
                }
            )
        )
    elif settings.check:
        print("\n".join(f"missed: {name}: {'; '.join(what)}" for name, what in missed.items()) or "all reached")
    return 1 if settings.check and missed else 0


def _rows(pairs: list[tuple[str, str]], seeds: range, jobs: int) -> Iterator[Row]:
    if jobs == 1:
        yield from (run_seeds(profile, trace, seeds) for profile, trace in pairs)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(run_seeds, *zip(*[(p, t, seeds) for p, t in pairs], strict=True))


def run_seeds(profile_name: str, trace_name: str, seeds: range) -> Row:
    """These seeds of a profile under a trace."""
    profile, trace = load_profile(profile_name), load_trace(trace_name)
    scores: list[Score] = []
    fixed: list[list[float]] = []
    others, cycles = [], []
    for seed in seeds:
        scenario = Scenario.make(profile, trace, seed)
        hindsight = Hindsight(scenario)
        run = play(scenario, StepPolicy(profile.max_steps, seed=seed))
        scores.append(hindsight.score(run))
        cycles.append(run.cycles)
        fixed.append(hindsight.rates(run.warm))
        others.append(hindsight.score(play(scenario, AcceptLengthK(profile.max_steps))).tok_s)
    phases = [
        sum(got for got, _ in phase) / sum(best for _, best in phase)
        for phase in zip(*[score.phases for score in scores], strict=True)
    ]
    auto = mean(score.tok_s for score in scores)
    return Row(
        profile.name,
        trace.name,
        [mean(rates) for rates in zip(*fixed, strict=True)],
        mean(others),
        auto / mean(score.of_best for score in scores),
        auto,
        mean(score.realised_tok_s for score in scores),
        min(score.of_plain for score in scores),
        min(score.of_plain_window for score in scores),
        mean(score.of_best for score in scores),
        min(phases),
        min(score.of_best_phase for score in scores),
        mean(score.switches for score in scores),
        mean(score.probes for score in scores),
        mean(cycles),
    )


_HEAD = (
    "tok/s; auto over k = 0 (worst seed; worst 10 s), over the best k of each phase (all seeds; worst phase)\n"
    f"{'profile':18}{'trace':18}{'k = 0':>8}{'best k':>12}{'accept-l.':>10}{'auto':>9}"
    f"{'/k = 0':>8}{'10 s':>7}{'/best':>7}{'phase':>7}{'switches':>10}"
)


def _line(row: Row) -> str:
    k = max(range(len(row.fixed)), key=row.fixed.__getitem__)
    best = f"{row.fixed[k]:.1f} ({k})"
    return (
        f"{row.profile:18}{row.trace:18}{row.fixed[0]:8.1f}{best:>12}{row.accept_length:10.1f}{row.auto:9.1f}"
        f"{row.of_plain:8.3f}{row.of_plain_window:7.3f}{row.of_best:7.3f}{row.of_best_phase:7.3f}{row.switches:10.0f}"
    )
