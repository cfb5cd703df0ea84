"""A small causal language model as the draft: greedy, with its own KV cache (Leviathan et al. 2023, argmax drafts).

Per session it remembers which tokens its KV cells hold: the committed ones, then those it drafted last. What of them
was accepted stays valid, and the rest is overwritten when the next tokens are fed: that is the whole rollback.

While the verifier is busy it may run ahead: read text for which no draft was wanted yet, then go on drafting past what
it proposed, and for other outcomes that come often (draft/runahead.py), so that the next proposal is there already.
"""

import time
from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from transformers import AutoConfig

from specdec.draft.drafters import DraftSession
from specdec.draft.lines import Line, Lines, State
from specdec.draft.model.decoder import CausalModel, Pass, Span
from specdec.draft.model.kv import SMALLEST, KvPool
from specdec.draft.model.steps import EagerSteps, GraphSteps, Row
from specdec.draft.model.tokenizer import vocabulary_of
from specdec.draft.model.weights import Weights, computed_in
from specdec.draft.runahead import MOST_BRANCHES, RANKS, AheadCounts, Guess, RunAhead
from specdec.errors import CheckpointError, SettingsError

_PASS_TOKENS = 2048  # more in one pass would make other sessions wait
_AHEAD_TOKENS = {"cpu": 32, "cuda": 512}  # where an outcome may come meanwhile: about the time of two or three steps


class CausalDrafter:
    """`folder` in transformers' format, of the families model.decoder.FAMILIES; `memory_bytes` for keys and values.

    `run_ahead`: whether `ahead` does anything. Proposals are the same with and without.
    """

    def __init__(
        self,
        folder: Path,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        memory_bytes: int = 1 << 30,
        max_batch: int = 64,
        max_steps: int = 8,
        run_ahead: bool = False,
    ) -> None:
        if not (folder / "config.json").is_file():
            raise CheckpointError(f"{folder} is no model folder: it has no config.json")
        kind = computed_in(dtype)
        self._device, self._max_steps = torch.device(device), max_steps
        weights = Weights(folder, self._device, kind, float8=dtype == "fp8")
        self._model = CausalModel(AutoConfig.from_pretrained(folder), weights)
        self.vocabulary = vocabulary_of(folder)
        shape = self._model.shape
        layers = len(self._model.layers)
        cell = KvPool.cell_bytes(layers, shape.kv_heads, shape.head_size, kind)
        self._pool = KvPool(layers, shape.kv_heads, shape.head_size, memory_bytes // cell, self._device, kind)
        self._steps: EagerSteps | GraphSteps
        ranks = RANKS if run_ahead else 1
        if self._device.type == "cuda":
            spare = self._pool.cells.take(SMALLEST)
            if spare is None:
                raise SettingsError(f"the draft's memory of {memory_bytes} bytes holds no session")
            self._steps = GraphSteps(
                self._model,
                self._pool,
                self._device,
                max_batch=max_batch,
                max_steps=max_steps,
                spare=spare,
                ranks=ranks,
            )
        else:
            self._steps = EagerSteps(self._model, self._pool, self._device, ranks=ranks)
        self.context_limit = shape.context
        self._lines = Lines(self._pool)
        self._run_ahead, self._max_batch = RunAhead() if run_ahead else None, max_batch
        self._ahead_tokens = _AHEAD_TOKENS.get(self._device.type, _PASS_TOKENS)
        self.ahead_counts = AheadCounts()

    # ---- Drafter

    def propose(self, sessions: Sequence[DraftSession], steps: Sequence[int]) -> list[list[int]]:
        """Greedy drafts; none for a session that finds no room in memory."""
        steps = [min(k, self._max_steps) for k in steps]
        missing = [max(0, k - self._follow(session)) for session, k in zip(sessions, steps, strict=True)]
        self._count(sessions, steps, missing)
        most = max(missing, default=0)  # a batch's steps are one number on CUDA, and each writes a cell of every row
        states = [self._lines.room(s, most if lack else 0, sessions) for s, lack in zip(sessions, missing, strict=True)]
        waiting = [i for i, state in enumerate(states) if state is not None and missing[i]]
        if waiting:
            lines = [self._lines[sessions[i]].main for i in waiting]
            texts = [sessions[i].tokens for i in waiting]
            self._read(lines, texts)
            self._draft(lines, texts, [missing[i] for i in waiting])
        drafts: list[list[int]] = [[] for _ in sessions]
        for i, state in enumerate(states):
            if state is not None:
                drafts[i] = state.main.ids[: steps[i]]
                state.steps, state.ahead = steps[i], len(state.main.ids) > steps[i]
        return drafts

    def ahead(self, sessions: Collection[DraftSession]) -> bool:
        """Reads, or drafts, in one pass what the next proposals may need. Returns whether there may be more of it."""
        if self._run_ahead is None:
            return False
        return self._read_ahead(sessions) or self._draft_ahead(self._run_ahead, sessions)

    def forget(self, session: DraftSession) -> None:
        if state := self._lines.get(session):
            self.ahead_counts.unused += state.ahead
        self._lines.forget(session)

    @property
    def evicted(self) -> int:
        """Sessions that lost their state to others, or found no room."""
        return self._lines.evicted

    # ---- the work

    def _follow(self, session: DraftSession) -> int:
        """What came is committed. Returns how many of the session's next drafts are there already."""
        state = self._lines.get(session)
        if state is None:
            return 0
        if self._run_ahead and state.steps:
            self._run_ahead.learn(state.ranks(session.tokens, RANKS))
        state.follow(session.tokens)
        return len(state.main.ids)

    @torch.inference_mode()
    def _read(self, lines: Sequence[Line], texts: Sequence[Sequence[int]], most: int | None = None) -> int:
        """Feeds what each line's cells do not hold yet, up to the two tokens with which drafting begins.

        At most `most` tokens, if given. Returns how many.
        """
        spans: list[tuple[Line, Span]] = []
        ids: list[int] = []
        fed = 0
        for line, text in zip(lines, texts, strict=True):
            start = line.cells
            while start < len(text) - 2 and fed != most:
                room = _PASS_TOKENS - len(ids) if most is None else most - fed
                piece = text[start : min(len(text) - 2, start + room)]
                spans.append((line, Span(line.run.start, start, len(piece))))
                ids += piece
                start += len(piece)
                fed += len(piece)
                if len(ids) == _PASS_TOKENS:
                    self._feed(ids, spans)
                    ids, spans = [], []
        if spans:
            self._feed(ids, spans)
        return fed

    def _feed(self, ids: list[int], spans: Sequence[tuple[Line, Span]]) -> None:
        where = Pass.of([span for _, span in spans], self._device)
        tokens = torch.tensor(ids).clamp_(max=self._model.last_id)  # what it does not know stops nobody's drafts
        self._model.hidden(tokens.to(self._device), where, self._pool)
        for line, span in spans:
            line.cells = span.position + span.count

    def _draft(self, lines: Sequence[Line], texts: Sequence[Sequence[int]], steps: Sequence[int]) -> None:
        """Adds `steps[i]` greedy drafts to lines[i], whose cells hold all but its last two tokens."""
        start = time.perf_counter()
        last_id = self._model.last_id
        tails = [line.tail(text) for line, text in zip(lines, texts, strict=True)]
        rows = [
            Row(line.run.start, line.end, (min(before, last_id), min(last, last_id)))
            for line, (before, last) in zip(lines, tails, strict=True)
        ]
        for line, made in zip(lines, self._steps.ranked(rows, steps), strict=True):
            line.ids += [best for best, *_ in made]
            line.runners += [tuple(others) for _, *others in made]
            line.cells = line.end - 1
        if self._run_ahead:
            self._run_ahead.time.add(len(lines), (time.perf_counter() - start) / max(steps))

    # ---- ahead of the next outcome

    def _read_ahead(self, sessions: Collection[DraftSession]) -> bool:
        """Reads some of what was committed while no drafts were wanted."""
        states = [(state, session.tokens) for session in sessions if (state := self._unread(session))]
        read = self._read([state.main for state, _ in states], [tokens for _, tokens in states], self._ahead_tokens)
        self.ahead_counts.read += read
        return read > 0

    def _unread(self, session: DraftSession) -> State | None:
        """The session's state, with room for all of its tokens, if there are any to read."""
        state, length = self._lines.get(session), len(session.tokens)
        if state and state.main.length != length:  # an outcome after which no drafts were wanted
            self.ahead_counts.unused += state.ahead
            self._follow(session)
            state.steps, state.ahead = 0, False
        if (state.main.cells if state else 0) >= length - 2 or length > self.context_limit:
            return None
        return self._lines.free_room(session, self._max_steps)

    def _draft_ahead(self, policy: RunAhead, sessions: Collection[DraftSession]) -> bool:
        """One more draft for every line whose drafts do not reach the end of the next proposal yet."""
        busy = [(s.tokens, state) for s in sessions if (state := self._lines.get(s)) and state.steps]
        guesses = {k: policy.branches(k) for k in {state.steps for _, state in busy}}
        mains: list[tuple[Line, Sequence[int]]] = []
        branches: list[tuple[Line, Sequence[int]]] = []
        for tokens, state in busy:
            self._branch(state, tokens, guesses[state.steps])
            main, *others = state.lines
            short = [line for line in others if self._falls_short(line, line.given + state.steps)]
            branches += [(line, tokens) for line in short]
            if self._falls_short(main, 2 * state.steps + 1):
                mains.append((main, tokens))
                state.ahead = True
            state.ahead |= bool(short)
        rows = (mains + branches)[: self._max_batch]
        if rows:
            self._draft([line for line, _ in rows], [tokens for _, tokens in rows], [1] * len(rows))
        return bool(rows)

    def _falls_short(self, line: Line, goal: int) -> bool:
        """Whether a line wants more drafts and has cells for one: its run grows only for what is proposed."""
        return bool(line.ids) and len(line.ids) < goal and line.end < min(line.run.length, self.context_limit)

    def _branch(self, state: State, tokens: Sequence[int], guesses: Sequence[Guess]) -> None:
        """Begins a branch for every guess that has none, if its token is known already and memory is free."""
        main = state.main
        for accepted, rank in guesses:
            if accepted >= len(main.ids) or rank > len(main.runners[accepted]):
                continue
            other = main.runners[accepted][rank - 1]
            guess = [*main.ids[:accepted], other]
            begun = [line.ids[: line.given] for line in state.lines[1:] if line.ids]
            if guess not in begun and len(begun) < MOST_BRANCHES:
                self._lines.branch(state, tokens, accepted, other, state.steps)

    def _count(self, sessions: Sequence[DraftSession], steps: Sequence[int], missing: Sequence[int]) -> None:
        """A frame of proposals before it is drafted: what running ahead has done for it."""
        lacks = [
            lack for s, lack in zip(sessions, missing, strict=True) if (state := self._lines.get(s)) and state.ahead
        ]
        if self._run_ahead is None or not lacks:
            return
        counts, hits, slowest = self.ahead_counts, lacks.count(0), max(missing)
        counts.hits += hits
        counts.misses += len(lacks) - hits
        counts.waited += hits if slowest else 0
        counts.saved_s += (max(steps) - slowest) * self._run_ahead.time.of(len(sessions))
