"""`specdec bench draft`: what a proposal takes on this device, beside the least it could take.

The least is the bytes that k steps must read, weights and the sessions' keys and values, over the memory's bandwidth,
measured in the same run. What the ratio to it leaves is launches, gaps and arithmetic.
"""

import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from pydantic_settings import CliImplicitFlag, SettingsConfigDict
from transformers import AutoConfig

from specdec.channel.states import States
from specdec.draft.drafters import Drafter, DraftSession, load_drafter
from specdec.draft.model.decoder import Shape
from specdec.draft.model.eagle3 import layer_config, plain_name
from specdec.draft.model.kv import SMALLEST, KvPool
from specdec.draft.model.weights import Weights, computed_in
from specdec.draft.random_models import HEADS, SHAPES, write_random, write_random_head
from specdec.errors import SettingsError
from specdec.heads import aux_layers_of, read_config, text_config
from specdec.origin import origin
from specdec.settings import Settings

COPIES = 4  # timed as one, so that launching the first of them counts little
PIECE = 512  # states of a prompt that come together
GROWTH = 2  # tokens a session gains a cycle: one accepted draft, one of the target's


class BenchDraftSettings(Settings):
    """Time the draft alone: milliseconds a proposal for every batch, step count and context, each beside the time that
    reading the weights, keys and values takes at this device's measured bandwidth. The variants take turns, so that
    what the machine does meanwhile falls on all alike."""

    model_config = SettingsConfigDict(env_prefix="SPECDEC_BENCH_DRAFT_")
    section: ClassVar[str] = "bench draft"

    drafter: str = Field("causal", description="as specdec draft --drafter")
    model: Path | None = Field(None, description="folder of the draft's weights, as specdec draft --model")
    target: Path | None = Field(None, description="folder of an EAGLE-3 head's target, as specdec draft --target")
    shape: Literal["1b", "0.6b", "tiny", "eagle3-8b", "eagle3-tiny"] | None = Field(
        None,
        description="instead of --model: random weights in the shape of Llama-3.2-1B, Qwen3-0.6B or a toy; for "
        "--drafter eagle3 in that of a head for an 8B Llama, or a toy",
    )
    device: str = Field("cpu", description="as specdec draft --device")
    dtype: Literal["float32", "bfloat16", "float16", "fp8"] = Field("float32", description="as specdec draft --dtype")
    batches: list[int] = Field([1, 8, 32], description="sessions a proposal is for")
    steps: list[int] = Field([5], description="drafts for each of them, k")
    contexts: list[int] = Field([512, 8192], description="tokens each of them has")
    most_tokens: int = Field(1 << 19, ge=1, description="leave out batches whose contexts together have more tokens")
    rounds: int = Field(20, ge=1, le=1000, description="proposals timed for every variant")
    json_: CliImplicitFlag[bool] = Field(False, alias="json", description="print the result as JSON instead of a table")
    out: Path | None = Field(None, description="also write the result, with every sample, to this file")


@dataclass
class Variant:
    """One row: so many sessions of so many tokens, k drafts each."""

    batch: int
    context: int
    k: int
    sessions: list[DraftSession] = field(default_factory=list)
    samples_ms: list[float] = field(default_factory=list)
    states: States | None = None  # what the target sends, the same for any tokens; None for a drafter that reads none

    def start(self, settings: BenchDraftSettings, first_id: int, vocabulary: int) -> None:
        """Sessions that have `context` tokens, drafts included, after the last round."""
        dice = random.Random(self.context)
        length = self.context - GROWTH * (settings.rounds + 1) - self.k
        if length < 2:
            raise SettingsError(f"--contexts: {self.context} tokens are too few for {settings.rounds} --rounds")
        self.sessions = [
            DraftSession(first_id + i, 1, [dice.randrange(vocabulary) for _ in range(length)])
            for i in range(self.batch)
        ]
        for session in self.sessions:
            for begin in range(0, length - 1, PIECE):
                self._send(session, begin, session.tokens[begin : min(begin + PIECE, length - 1)])

    def cycle(self, drafter: Drafter) -> float:
        """Milliseconds of one proposal; then the target accepts a draft and adds a token."""
        start = time.perf_counter()
        proposals = drafter.propose(self.sessions, [self.k] * self.batch)
        took_ms = 1000 * (time.perf_counter() - start)
        for session, ids in zip(self.sessions, proposals, strict=True):
            self._send(session, len(session.tokens) - 1, [session.tokens[-1], *ids])
            session.tokens += [*ids[:1], *session.tokens[: GROWTH - len(ids[:1])]]
        return took_ms

    def _send(self, session: DraftSession, position: int, tokens: Sequence[int]) -> None:
        if self.states is not None:
            rows = self.states.rows[: len(tokens)]
            session.states.append(States(position, tuple(tokens), rows, self.states.dtype))


@dataclass(frozen=True)
class Folders:
    """Where the draft's weights are; none for a drafter without any."""

    model: Path | None = None
    target: Path | None = None  # of an EAGLE-3 head


@dataclass(frozen=True)
class Work:
    """The bytes a proposal reads at least."""

    weights: int  # every step: each matrix once
    cell: int  # every step: keys and values of one token
    opening: int = 0  # once: what only an EAGLE-3 head's reading of states needs

    @classmethod
    def of(cls, folder: Path, dtype: str) -> "Work":
        """A causal model's."""
        config = AutoConfig.from_pretrained(folder)
        sizes = _sizes(folder)
        if not config.tie_word_embeddings and "lm_head.weight" in sizes:
            sizes.pop("model.embed_tokens.weight", None)  # of an embedding only the tokens' rows are read
        cell = KvPool.cell_bytes(config.num_hidden_layers, *_kv(Shape(config)), computed_in(dtype))
        return cls(_itemsize(dtype) * sum(sizes.values()), cell)

    @classmethod
    def of_head(cls, folder: Path, target: Path, dtype: str) -> "Work":
        """An EAGLE-3 head's."""
        config = layer_config(read_config(folder))
        fed = ("fc.weight", "input_norm.weight", *[f"fc_norm.{i}.weight" for i in range(9)])
        ids = ("embed_tokens.weight", "d2t", "t2d")  # only the tokens' rows are read
        sizes = {plain_name(name): size for name, size in _sizes(folder).items()}
        every = {name: size for name, size in sizes.items() if name not in (*fed, *ids)}
        if "lm_head.weight" not in every:
            its = text_config(read_config(target))
            every["lm_head.weight"] = its["vocab_size"] * its["hidden_size"]
        kind = computed_in(dtype)
        cell = KvPool.cell_bytes(config.num_hidden_layers, *_kv(Shape(config)), kind)
        opening = kind.itemsize * sum(sizes.get(name, 0) for name in fed)
        return cls(_itemsize(dtype) * sum(every.values()), cell, opening)

    def floor_ms(self, variant: Variant, bandwidth: float) -> float:
        read = self.weights + variant.batch * variant.context * self.cell
        return 1000 * (variant.k * read + self.opening) / bandwidth


def bench_draft(argv: list[str]) -> int:
    """The command."""
    settings = BenchDraftSettings.load(argv)
    if settings.shape is not None and settings.model is not None:
        raise SettingsError("--shape: give either --shape or --model")
    if (settings.shape in HEADS) != (settings.drafter == "eagle3") and settings.shape is not None:
        raise SettingsError(f"--shape {settings.shape} is not for --drafter {settings.drafter}")
    if settings.drafter in ("causal", "eagle3") and settings.shape is None and settings.model is None:
        raise SettingsError(f"--shape: --drafter {settings.drafter} needs --shape or --model")
    if settings.drafter == "eagle3" and settings.shape is None and settings.target is None:
        raise SettingsError("--target: --drafter eagle3 needs the folder of the model that the head is for")
    rows = [
        Variant(batch, context, k)
        for context in settings.contexts
        for batch in settings.batches
        for k in settings.steps
        if batch * context <= settings.most_tokens
    ]
    with _folders(settings) as folders:
        bandwidth = bandwidth_of(torch.device(settings.device))
        work = _work(folders, settings)
        drafter = load_drafter(
            settings.drafter,
            model=folders.model,
            target=folders.target,
            device=settings.device,
            dtype=settings.dtype,
            memory_gb=0 if work is None else _cells(rows) * work.cell / 2**30,
        )
        states = _states(folders, settings)
        for row in rows:
            row.states = states
        _run(rows, drafter, settings, _vocabulary(folders))
    result = _result(rows, work, bandwidth, settings, argv)
    if settings.out:
        samples = [{"batch": r.batch, "context": r.context, "k": r.k, "ms": r.samples_ms} for r in rows]
        settings.out.write_text(json.dumps(result | {"samples": samples}))
    print(json.dumps(result) if settings.json_ else _table(result), flush=True)
    return 0


def bandwidth_of(device: torch.device) -> float:
    """Bytes a second that copies within the device's memory move, read and written counted: the best of ten times."""
    source = torch.ones(1 << (30 if device.type == "cuda" else 26), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    seconds = []
    for _ in range(10):
        wait()
        start = time.perf_counter()
        for _ in range(COPIES):
            target.copy_(source)
        wait()
        seconds.append((time.perf_counter() - start) / COPIES)
    return 2 * len(source) / min(seconds)


@contextmanager
def _folders(settings: BenchDraftSettings) -> Iterator[Folders]:
    """The draft's files: the user's, or random ones made for the time of the run."""
    if settings.shape is None:
        yield Folders(settings.model, settings.target)
        return
    with TemporaryDirectory(prefix="specdec-bench-") as name:
        model, target = Path(name, "model"), Path(name, "target")
        if settings.shape in HEADS:
            write_random_head(model, target, HEADS[settings.shape], torch.device(settings.device))
            yield Folders(model, target)
        else:
            model.mkdir()
            write_random(model, SHAPES[settings.shape], torch.device(settings.device))
            yield Folders(model)


def _sizes(folder: Path) -> dict[str, int]:
    weights = Weights(folder, torch.device("cpu"), torch.float32)
    return {name: prod(weights.shape(name)) for name in weights.names}


def _kv(shape: Shape) -> tuple[int, int]:
    return shape.kv_heads, shape.head_size


def _itemsize(dtype: str) -> int:  # of a weight
    return 1 if dtype == "fp8" else computed_in(dtype).itemsize


def _work(folders: Folders, settings: BenchDraftSettings) -> Work | None:
    if folders.model is None:
        return None
    if folders.target is None:
        return Work.of(folders.model, settings.dtype)
    return Work.of_head(folders.model, folders.target, settings.dtype)


def _vocabulary(folders: Folders) -> int:
    of_ids = folders.target or folders.model
    return 256 if of_ids is None else int(text_config(read_config(of_ids))["vocab_size"])


def _states(folders: Folders, settings: BenchDraftSettings) -> States | None:
    """Random hidden states, as a target of the head's would send them."""
    if folders.model is None or folders.target is None:
        return None
    its = text_config(read_config(folders.target))
    layers = aux_layers_of(read_config(folders.model), its["num_hidden_layers"])
    made = torch.randn((PIECE, len(layers) * its["hidden_size"])).to(computed_in(settings.dtype))
    raw = (made.view(torch.uint16) if made.dtype == torch.bfloat16 else made).numpy()
    return States(0, (0,) * PIECE, raw, str(made.dtype).removeprefix("torch."))


def _cells(rows: list[Variant]) -> int:
    """Cells that all sessions take together: a run of the next power of two each, and what the drafter keeps spare."""
    lengths = [max(SMALLEST, 1 << (row.context - 1).bit_length()) for row in rows for _ in range(row.batch)]
    return sum(lengths) + max(lengths, default=0)


def _run(rows: list[Variant], drafter: Drafter, settings: BenchDraftSettings, vocabulary: int) -> None:
    for i, row in enumerate(sorted(rows, key=lambda row: -row.context)):  # long runs first: they need unbroken memory
        row.start(settings, 1000 * i, vocabulary)
        row.cycle(drafter)  # reads the texts
    for turn in range(settings.rounds):
        first = turn % max(1, len(rows))  # no variant always follows the same one
        for row in [*rows[first:], *rows[:first]]:
            row.samples_ms.append(row.cycle(drafter))


def _result(
    rows: list[Variant], work: Work | None, bandwidth: float, settings: BenchDraftSettings, argv: list[str]
) -> dict[str, Any]:
    cuda = settings.device.startswith("cuda")
    of = origin(["specdec", "bench", "draft", *argv], "torch", "transformers")
    of["machine"]["device"] = torch.cuda.get_device_name(settings.device) if cuda else "cpu"
    return {
        **of,
        "bandwidth_gb_s": round(bandwidth / 1e9, 1),
        "weights_mb": None if work is None else round(work.weights / 1e6, 1),
        "rows": [_row(row, work, bandwidth, settings.drafter) for row in rows],
    }


def _row(row: Variant, work: Work | None, bandwidth: float, drafter: str) -> dict[str, Any]:
    ms = statistics.median(row.samples_ms)
    floor = None if work is None else work.floor_ms(row, bandwidth)
    return {
        "drafter": drafter,
        "batch": row.batch,
        "context": row.context,
        "k": row.k,
        "ms": round(ms, 3),
        "step_ms": round(ms / row.k, 3),
        "p90_ms": round(sorted(row.samples_ms)[int(0.9 * len(row.samples_ms))], 3),
        "floor_ms": None if floor is None else round(floor, 3),
        "ratio": None if floor is None else round(ms / floor, 2),
    }


def _table(result: dict[str, Any]) -> str:
    head = (
        f"{'drafter':10}{'batch':>6}{'context':>9}{'k':>4}{'ms':>10}{'a step':>10}{'p90':>10}{'floor':>10}{'ratio':>8}"
    )
    lines = [head, "-" * len(head)]
    for row in result["rows"]:
        case = f"{row['drafter']:10}{row['batch']:6}{row['context']:9}{row['k']:4}"
        floor = "" if row["floor_ms"] is None else f"{row['floor_ms']:10.3f}{row['ratio']:8.2f}"
        lines.append(f"{case}{row['ms']:10.3f}{row['step_ms']:10.3f}{row['p90_ms']:10.3f}{floor}")
    lines.append(f"memory bandwidth {result['bandwidth_gb_s']} GB/s on {result['machine']['device']}")
    return "\n".join(lines)
