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

from specdec.draft.drafters import DraftSession
from specdec.draft.model.decoder import CausalModel, Pass, Span
from specdec.draft.model.kv import KvPool, Run
from specdec.draft.model.weights import Weights

log = logging.getLogger(__name__)
_PASS_TOKENS = 2048  # more in one pass would make other sessions wait


@dataclass(eq=False)
class _State:
    run: Run
    fed: list[int] = field(default_factory=list)  # the tokens whose keys and values the run holds, from its start

    def valid(self, tokens: Sequence[int]) -> int:
        """How many of `tokens` need not be fed: at most all but the last, whose logits are wanted."""
        limit = min(len(self.fed), len(tokens) - 1)
        known = next((i for i in range(self.agreed, limit) if self.fed[i] != tokens[i]), limit)
        self.agreed = min(known, limit)
        return self.agreed

    agreed: int = 0  # up to here `fed` is known to be the session's own tokens, which never change


class CausalDrafter:
    """`folder` in transformers' format, of the families model.decoder.FAMILIES."""

    def __init__(
        self,
        folder: Path,
        *,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        memory_bytes: int = 1 << 30,
    ) -> None:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(folder)
        self._device = torch.device(device)
        self._model = CausalModel(config, Weights(folder, self._device, dtype))
        shape = self._model.shape
        layers = len(self._model.layers)
        cell = KvPool.cell_bytes(layers, shape.kv_heads, shape.head_size, dtype)
        self._pool = KvPool(layers, shape.kv_heads, shape.head_size, memory_bytes // cell, self._device, dtype)
        self.context_limit = shape.context
        self._states: OrderedDict[DraftSession, _State] = OrderedDict()  # least recently used first
        self.evicted = 0

    # ---- Drafter

    def propose(self, sessions: Sequence[DraftSession], steps: Sequence[int]) -> list[list[int]]:
        """Greedy drafts; none for a session that finds no room in memory."""
        rooms = [self._room(s, len(s.tokens) + k, sessions) for s, k in zip(sessions, steps, strict=True)]
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

    @torch.inference_mode()
    def _draft(self, sessions: Sequence[DraftSession], steps: Sequence[int]) -> list[list[int]]:
        order = sorted(range(len(sessions)), key=lambda i: -steps[i])  # those who want more drafts come first
        states = [self._states[sessions[i]] for i in order]
        tokens = self._read(states, [sessions[i].tokens for i in order])  # [n]: the first drafts
        made = [tokens]
        for step in range(1, max(steps)):
            wanting = sum(k > step for k in steps)
            where = Pass.of(
                [
                    Span(state.run.start, len(sessions[i].tokens) + step - 1, 1)
                    for state, i in zip(states[:wanting], order, strict=False)
                ],
                self._device,
            )
            tokens = self._model.logits(self._model.hidden(tokens[:wanting], where, self._pool)).argmax(-1)
            made.append(tokens)
        columns = [column.tolist() for column in made]
        drafts: list[list[int]] = [[] for _ in sessions]
        for row, i in enumerate(order):
            drafts[i] = [column[row] for column in columns[: steps[i]]]
            states[row].fed = [*sessions[i].tokens, *drafts[i][:-1]]
        return drafts

    def _read(self, states: Sequence[_State], texts: Sequence[Sequence[int]]) -> torch.Tensor:  # -> [n]
        """Feeds what each session's cells do not hold yet, and returns the likeliest next token of each."""
        starts = [state.valid(text) for state, text in zip(states, texts, strict=True)]
        ends = [self._feed_all_but_a_pass(*each) for each in zip(states, texts, starts, strict=True)]
        spans = [
            Span(state.run.start, start, len(text) - start)
            for state, text, start in zip(states, texts, ends, strict=True)
        ]
        ids = torch.tensor([t for text, start in zip(texts, ends, strict=True) for t in text[start:]])
        hidden = self._model.hidden(ids.to(self._device), Pass.of(spans, self._device), self._pool)
        counts = torch.tensor([span.count for span in spans], device=self._device)
        return self._model.logits(hidden[counts.cumsum(0) - 1]).argmax(-1)

    def _feed_all_but_a_pass(self, state: _State, text: Sequence[int], start: int) -> int:
        """Feeds a long text piece by piece; returns where its last piece starts."""
        while len(text) - start > _PASS_TOKENS:
            ids = torch.tensor(text[start : start + _PASS_TOKENS]).to(self._device)
            where = Pass.of([Span(state.run.start, start, _PASS_TOKENS)], self._device)
            self._model.hidden(ids, where, self._pool)
            start += _PASS_TOKENS
        return start

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
                self._pool.move(state.run, run, len(state.fed))
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
