"""`python -m loadtest ab`: the same arrivals with speculation off, automatic and at fixed step counts, interleaved.

    for each rate, for each block:   the same arrivals and prompts, for every variant in turn

The order of the variants rotates from block to block, so that what the machine does meanwhile falls on all alike, and a
block's answers have all come before the next variant begins.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from loadtest._arrivals import arrivals, play
from loadtest._client import FAILED, Sample, SetupError, Target
from loadtest._load import Load
from loadtest._prompts import KINDS, MIXED, Lengths, Prompts
from loadtest._report import write

_APART = 100_000  # conversations between one block's numbers and the next's
_WARM = -1  # the block that is not counted


@dataclass(frozen=True)
class Plan:
    """What is run."""

    rates: tuple[float, ...]  # arrivals a second
    steps: tuple[int, ...]  # fixed step counts, beside off and auto
    blocks: int
    block_s: float
    warm_s: float
    kind: str
    shape: str
    burst: int
    seed: int
    salted: bool  # each variant and block has a prefix cache of its own

    @property
    def variants(self) -> dict[str, Any]:
        """The request's field for each variant, by name."""
        return {"off": "off", "auto": "auto", **{f"k = {k}": {"steps": k} for k in self.steps}}

    @property
    def seconds(self) -> float:
        """How long it takes if every block's answers come in time."""
        return len(self.variants) * (self.warm_s + len(self.rates) * self.blocks * self.block_s)

    def check(self) -> None:
        """Raises SetupError where nothing could be learnt."""
        if self.blocks < 1 or self.block_s <= 0 or self.warm_s < 0:
            raise SetupError("--blocks and --block-s must be above 0")
        if not self.rates or any(rate * self.block_s < 1 for rate in self.rates):
            raise SetupError("a block needs at least one arrival: raise --rates or --block-s")
        if any(not 1 <= k <= 64 for k in self.steps):
            raise SetupError("--steps are from 1 to 64")


def compare(load: Load, plan: Plan, say: Callable[[str], None]) -> list[Sample]:
    """Runs a plan against a load that is prepared. Returns the samples of all but the warm-up."""
    samples: list[Sample] = []
    names = list(plan.variants)
    if plan.warm_s:
        for name in names:
            _block(load, plan, name, max(plan.rates), _WARM, plan.warm_s)
    for index, rate in enumerate(plan.rates):
        for block in range(plan.blocks):
            first = block % len(names)
            for name in names[first:] + names[:first]:
                samples += _block(load, plan, name, rate, index * plan.blocks + block, plan.block_s)
            here = [s for s in samples if s.rate == rate and s.block == index * plan.blocks + block]
            failed = sum(s.status == FAILED for s in here)
            say(f"{rate:g}/s, block {block + 1} of {plan.blocks}: {len(here)} requests, {failed} failed")
    return samples


def _block(load: Load, plan: Plan, name: str, rate: float, block: int, seconds: float) -> list[Sample]:
    """One variant's share of a block."""
    schedule = arrivals(plan.shape, [rate], seconds, plan.burst, f"{plan.seed}/{rate}/{block}") or [0.0]
    fields: dict[str, Any] = {"speculative": plan.variants[name]}
    if plan.salted:  # else whoever asks a prompt first would pay for reading it, and the others not
        fields["cache_salt"] = f"loadtest-{plan.seed}-{block}-{name}"
    samples: list[Sample] = []
    start = time.perf_counter()

    def one(number: int, due: float) -> None:
        conversation = load.prompts.conversation(plan.kind, (block + 1) * _APART + number)
        for sample in load.converse(conversation, due, start, **fields):
            samples.append(replace(sample, variant=name, rate=rate, block=block))

    play(schedule, start, one)
    return samples


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    parse = argparse.ArgumentParser("python -m loadtest ab", description=__doc__.split("\n")[0])
    parse.add_argument("--host", required=True, help="the server, for example http://127.0.0.1:8000")
    parse.add_argument("--model", default="", help="default the first that the server lists")
    parse.add_argument("--api-key", default=os.environ.get("LOADTEST_API_KEY", ""), help="or LOADTEST_API_KEY")
    parse.add_argument("--rates", default="0.5,1,2", help="arrivals a second, one after the other (0.5,1,2)")
    parse.add_argument("--steps", default="4", help="fixed step counts beside off and auto (4); '' for none")
    parse.add_argument("--blocks", type=int, default=6, help="blocks a rate (6)")
    parse.add_argument("--block-s", type=float, default=20.0, help="seconds of arrivals a block and variant (20)")
    parse.add_argument("--warm-s", type=float, default=10.0, help="seconds for each variant before that (10)")
    parse.add_argument("--kind", default=MIXED, choices=[*KINDS, MIXED], help="of conversations (mixed)")
    parse.add_argument("--arrivals", default="poisson", choices=["poisson", "bursts"])
    parse.add_argument("--burst", type=int, default=8, help="arrivals at once in bursts (8)")
    parse.add_argument("--seed", type=int, default=0)
    parse.add_argument("--input-tokens", default="", help='"200", "100-400" or "lognormal:200:0.6"')
    parse.add_argument("--output-tokens", default="", help="likewise")
    parse.add_argument("--exact-output", action="store_true", help="answers go on to their length (vLLM's ignore_eos)")
    parse.add_argument("--no-cache-salt", action="store_true", help="for servers that refuse vLLM's cache_salt")
    parse.add_argument("--out", type=Path, default=Path("loadtest-ab"), help="the report's folder (loadtest-ab)")
    parse.add_argument("--print", action="store_true", help="print the report too, for where its folder is lost")
    return parse


def ab(argv: Sequence[str]) -> int:
    """The command. Exit code 1 if a request failed."""
    options = parser().parse_args(argv)
    try:
        plan = Plan(
            rates=tuple(float(rate) for rate in options.rates.split(",")),
            steps=tuple(int(k) for k in options.steps.split(",") if k),
            blocks=options.blocks,
            block_s=options.block_s,
            warm_s=options.warm_s,
            kind=options.kind,
            shape=options.arrivals,
            burst=options.burst,
            seed=options.seed,
            salted=not options.no_cache_salt,
        )
        plan.check()
        given, answered = (
            Lengths.parse(text) if text else None for text in (options.input_tokens, options.output_tokens)
        )
        fields: dict[str, Any] = {"ignore_eos": True} if options.exact_output else {}
        load = Load(Target(options.host, options.api_key), Prompts(plan.seed, given, answered), options.model, fields)
        load.prepare()
    except ValueError as error:
        raise SetupError(f"--rates and --steps are numbers with commas between: {error}") from error
    _say(f"{load.model} at {options.host}: {', '.join(plan.variants)}; about {plan.seconds / 60:.1f} minutes")
    began = time.strftime("%Y-%m-%d %H:%M:%S %z")
    samples = compare(load, plan, _say)
    run = {
        "command": "python -m loadtest ab " + " ".join(_hidden(argv)),
        "host": options.host,
        "model": load.model,
        "began": began,
        "client": {"machine": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()},
        "plan": asdict(plan),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "run.json").write_text(json.dumps(run, indent=1) + "\n")
    with (options.out / "samples.jsonl").open("w") as file:
        for sample in samples:
            print(json.dumps(asdict(sample)), file=file)
    print(write(options.out), flush=True)
    if options.print:
        print((options.out / "report.md").read_text(), flush=True)
    _say(f"the report is {options.out / 'report.md'}")
    return int(any(sample.status == FAILED for sample in samples))


def _hidden(argv: Sequence[str]) -> list[str]:
    """The arguments without the key's value."""
    return [
        "--api-key=..." if arg.startswith("--api-key=") else "..." if before == "--api-key" else arg
        for before, arg in zip(["", *argv], argv, strict=False)
    ]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
