"""A small causal language model as the draft: greedy, with its own KV cache (Leviathan et al. 2023, argmax drafts).

Per session it remembers which tokens its KV cells hold: the committed ones, then those it drafted last. What of them
was accepted stays valid, and the rest is overwritten when the next tokens are fed: that is the whole rollback.
"""

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer

from specdec.draft.drafters import DraftSession
from specdec.draft.model.decoder import CausalModel, Pass, Span
from specdec.draft.model.kv import SMALLEST, KvPool, Run
from specdec.draft.model.steps import EagerSteps, GraphSteps, Row
from specdec.draft.model.weights import Weights
from specdec.errors import CheckpointError, SettingsError

log = logging.getLogger(__name__)
_PASS_TOKENS = 2048  # more in one pass would make other sessions wait


def _vocabulary(folder: Path) -> dict[str, int] | None:
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        log.warning("%s has no tokenizer: whether its token ids are the target's is not checked", folder)
        return None
    vocabulary: dict[str, int] = AutoTokenizer.from_pretrained(folder).get_vocab()
    return vocabulary


@dataclass(eq=False)
class _State:
    """What a session's cells hold: its first `committed` tokens, which never change, and the drafts fed after them."""

    run: Run
    committed: int = 0
    drafts: list[int] = field(default_factory=list)

    @property
    def cells(self) -> int:
        return self.committed + len(self.drafts)

    def valid(self, tokens: Sequence[int]) -> int:
        """How many of `tokens` need not be fed: at most all but the last, whose logits are wanted."""
        came = tokens[self.committed : self.cells]
        right = next(
            (i for i, (draft, token) in enumerate(zip(self.drafts, came, strict=False)) if draft != token), len(came)
        )
        return min(self.committed + right, len(tokens) - 1)


class CausalDrafter:
    """`folder` in transformers' format, of the families model.decoder.FAMILIES; `memory_bytes` for keys and values."""

    def __init__(
        self,
        folder: Path,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        memory_bytes: int = 1 << 30,
        max_batch: int = 64,
        max_steps: int = 8,
    ) -> None:
        if not (folder / "config.json").is_file():
            raise CheckpointError(f"{folder} is no model folder: it has no config.json")
        float8 = dtype == "fp8"  # only the weights: keys, values and what is computed are bfloat16
        kind: torch.dtype = getattr(torch, "bfloat16" if float8 else dtype)
        self._device, self._max_steps = torch.device(device), max_steps
        weights = Weights(folder, self._device, kind, float8=float8)
        self._model = CausalModel(AutoConfig.from_pretrained(folder), weights)
        self.vocabulary = _vocabulary(folder)
        shape = self._model.shape
        layers = len(self._model.layers)
        cell = KvPool.cell_bytes(layers, shape.kv_heads, shape.head_size, kind)
        self._pool = KvPool(layers, shape.kv_heads, shape.head_size, memory_bytes // cell, self._device, kind)
        self._steps: EagerSteps | GraphSteps
        if self._device.type == "cuda":
            spare = self._pool.cells.take(SMALLEST)
            if spare is None:
                raise SettingsError(f"the draft's memory of {memory_bytes} bytes holds no session")
            self._steps = GraphSteps(
                self._model, self._pool, self._device, max_batch=max_batch, max_steps=max_steps, spare=spare
            )
        else:
            self._steps = EagerSteps(self._model, self._pool, self._device)
        self.context_limit = shape.context
        self._states: OrderedDict[DraftSession, _State] = OrderedDict()  # least recently used first
        self.evicted = 0

    # ---- Drafter

    def propose(self, sessions: Sequence[DraftSession], steps: Sequence[int]) -> list[list[int]]:
        """Greedy drafts; none for a session that finds no room in memory."""
        steps = [min(k, self._max_steps) for k in steps]
        most = max(steps, default=0)  # a batch's steps are one number on CUDA, and each writes a cell of every row
        rooms = [self._room(session, len(session.tokens) + most, sessions) for session in sessions]
        served = [i for i, room in enumerate(rooms) if room is not None]
        drafts: list[list[int]] = [[] for _ in sessions]
        if served:
            made = self._draft([sessions[i] for i in served], [steps[i] for i in served])
            for i, ids in zip(served, made, strict=True):
                drafts[i] = ids
        return drafts

    def forget(self, session: DraftSession) -> None:
        if state := self._states.pop(session, None):
            self._pool.cells.give_back(state.run)

    # ---- the work

    def _draft(self, sessions: Sequence[DraftSession], steps: Sequence[int]) -> list[list[int]]:
        states = [self._states[session] for session in sessions]
        self._read(states, [session.tokens for session in sessions])
        rows = [
            Row(state.run.start, len(session.tokens), (session.tokens[-2:][0], session.tokens[-1]))
            for state, session in zip(states, sessions, strict=True)
        ]
        drafts = self._steps.run(rows, steps)
        for state, session, ids in zip(states, sessions, drafts, strict=True):
            state.committed, state.drafts = len(session.tokens), ids[:-1]
        return drafts

    @torch.inference_mode()
    def _read(self, states: Sequence[_State], texts: Sequence[Sequence[int]]) -> None:
        """Feeds what each session's cells do not hold yet, up to the two tokens with which drafting begins."""
        spans: list[Span] = []
        ids: list[int] = []
        for state, text in zip(states, texts, strict=True):
            start = state.valid(text)
            while start < len(text) - 2:
                count = min(len(text) - 2 - start, _PASS_TOKENS - len(ids))
                spans.append(Span(state.run.start, start, count))
                ids += text[start : start + count]
                start += count
                if len(ids) == _PASS_TOKENS:
                    self._feed(ids, spans)
                    ids, spans = [], []
        if spans:
            self._feed(ids, spans)

    def _feed(self, ids: list[int], spans: list[Span]) -> None:
        self._model.hidden(torch.tensor(ids).to(self._device), Pass.of(spans, self._device), self._pool)

    # ---- memory

    def _room(self, session: DraftSession, cells: int, busy: Sequence[DraftSession]) -> _State | None:
        """The session's state with room for `cells` tokens; those used least recently make way for it."""
        state = self._states.get(session)
        if state is None or state.run.length < cells:
            run = self._take(cells, busy)
            if run is None:
                self.forget(session)
                self.evicted += 1
                return None
            if state is None:
                state = self._states[session] = _State(run)
            else:
                self._pool.move(state.run, run, state.cells)
                self._pool.cells.give_back(state.run)
                state.run = run
        self._states.move_to_end(session)
        return state

    def _take(self, cells: int, busy: Sequence[DraftSession]) -> Run | None:
        while (run := self._pool.cells.take(cells)) is None:
            victim = next((session for session in self._states if session not in busy), None)
            if victim is None:
                return None
            self.forget(victim)
            self.evicted += 1
        return run
