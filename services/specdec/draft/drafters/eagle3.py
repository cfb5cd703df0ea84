"""An EAGLE-3 head as the draft: greedy, from the target's own hidden states and with a KV cache of its own.

Per session, cell i of its run is computed from state start + i and the token after it, so n tokens fill cells up to
state n - 2, and the last one's output is the first draft. Drafting goes on in the cells after it, from the head's own
features. After a verdict those cells are computed anew from the true states: that is the whole rollback.

On CUDA the few states of a verdict are read by the captured graphs that draft (model/eagle3_steps.py), longer texts op
by op before; on a CPU everything is op by op.

Where states are missing (a reused prefix, a lost frame) the context starts after the gap; cells count from there.
"""

from collections import deque
from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import torch

from specdec.channel.states import States
from specdec.draft.drafters import DraftSession
from specdec.draft.model.decoder import Pass, Span
from specdec.draft.model.eagle3 import Eagle3Head
from specdec.draft.model.eagle3_steps import Eagle3GraphSteps, Reading, tensor_of
from specdec.draft.model.kv import SMALLEST, Holders, KvPool, Run
from specdec.draft.model.tokenizer import vocabulary_of
from specdec.draft.model.weights import computed_in
from specdec.errors import SettingsError

_PASS_TOKENS = 2048  # more in one pass would make other sessions wait
_AHEAD_TOKENS = 512  # an outcome may come meanwhile
_AHEAD_LEAST = 16  # fewer are read with the next drafts, in the pass that they need anyway


@dataclass
class Counts:
    """What happened to sessions' states, since the start."""

    late_starts: int = 0  # contexts that begin after the first token: states before it never came, or were lost
    without_states: int = 0  # proposals for a session whose last state is missing: no drafts
    dropped: int = 0  # states that came and found no memory


@dataclass(eq=False)
class _Context:
    """What a session's cells hold, and what came after it."""

    run: Run
    start: int = 0  # the position of cell 0's state
    cells: int = 0  # computed from true states
    waiting: deque[States] = field(default_factory=deque)  # come but not read; no gaps
    last: States | None = None  # the last one read
    normed: torch.Tensor = field(default_factory=lambda: torch.empty(0))  # [hidden], an output of the last cell
    feature: torch.Tensor = field(default_factory=lambda: torch.empty(0))  # [hidden], the other

    @property
    def next(self) -> int:
        """The position of the first state that is not read."""
        return self.start + self.cells

    @property
    def end(self) -> int:
        """The position of the first state that has not come."""
        return self.waiting[-1].position + len(self.waiting[-1].tokens) if self.waiting else self.next

    def readable(self, tokens: int) -> int:
        """How many states can be read if the session has `tokens` tokens: each needs the token after it."""
        return min(self.end, tokens - 1) - self.next

    def restart(self, position: int) -> None:
        """Nothing before `position` counts any more."""
        self.start, self.cells = position, 0
        self.waiting.clear()

    def take(self, most: int) -> States:
        """Up to `most` waiting states, which are read from now on."""
        first = self.waiting.popleft()
        if len(first.tokens) > most:
            self.waiting.appendleft(_part(first, most, len(first.tokens)))
            first = _part(first, 0, most)
        self.cells += len(first.tokens)
        self.last = States(self.next - 1, first.tokens[-1:], first.rows[-1:].copy(), first.dtype)  # not the whole frame
        return first


@dataclass(frozen=True)
class _Piece:
    """States about to be read in one pass."""

    context: _Context
    span: Span
    states: States
    following: Sequence[int]  # the token after each


class Eagle3Drafter:
    """`folder` holds the head, `target` its target; `memory_bytes` are for the head's keys and values."""

    def __init__(
        self,
        folder: Path,
        target: Path,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        memory_bytes: int = 1 << 30,
        max_batch: int = 64,
        max_steps: int = 8,
    ) -> None:
        kind = computed_in(dtype)
        self._device, self._max_batch, self._max_steps = torch.device(device), max_batch, max_steps
        self._head = Eagle3Head(folder, target, self._device, kind, float8=dtype == "fp8")
        self.aux_layers = self._head.aux_layers
        self.vocabulary = vocabulary_of(folder, target)
        shape, layers = self._head.shape, self._head.layers
        self.context_limit = shape.context
        cell = KvPool.cell_bytes(layers, shape.kv_heads, shape.head_size, kind)
        self._pool = KvPool(layers, shape.kv_heads, shape.head_size, memory_bytes // cell, self._device, kind)
        self._graphs: Eagle3GraphSteps | None = None
        if self._device.type == "cuda":
            spare = self._pool.cells.take(SMALLEST)
            if spare is None:
                raise SettingsError(f"the draft's memory of {memory_bytes} bytes holds no session")
            self._graphs = Eagle3GraphSteps(
                self._head, self._pool, self._device, max_batch=max_batch, max_steps=max_steps, spare=spare
            )
        self._contexts: Holders[DraftSession, _Context] = Holders(self._pool, _Context)
        self._drafting: Collection[DraftSession] = ()  # the last proposal's sessions
        self.counts = Counts()

    @property
    def evicted(self) -> int:
        """Sessions whose context was lost for lack of memory."""
        return self._contexts.evicted

    # ---- Drafter

    def propose(self, sessions: Sequence[DraftSession], steps: Sequence[int]) -> list[list[int]]:
        """Greedy drafts; none for a session whose last state is missing or that finds no room in memory."""
        steps = [min(k, self._max_steps) for k in steps]
        self._drafting = set(sessions)
        for session in sessions:
            self._collect(session, self._drafting)
        # a batch's steps are one number on CUDA, and each writes a cell of every row
        room = [max(steps, default=0)] * len(steps) if self._graphs else steps
        served = {i: context for i, session in enumerate(sessions) if (context := self._ready(session, room[i]))}
        self._read([sessions[i] for i, context in served.items() if not self._short(context, sessions[i].tokens)])
        drafts: list[list[int]] = [[] for _ in sessions]
        order = sorted(served, key=lambda i: -steps[i])
        for at in range(0, len(order), self._max_batch):
            batch = order[at : at + self._max_batch]
            contexts, wanted = [served[i] for i in batch], [steps[i] for i in batch]
            if self._graphs:
                made = self._replay(self._graphs, contexts, [sessions[i].tokens for i in batch], wanted)
            else:
                made = self._draft(contexts, wanted)
            for i, ids in zip(batch, made, strict=True):
                drafts[i] = ids
        return drafts

    def ahead(self, sessions: Collection[DraftSession]) -> bool:
        """Reads a piece of what has come, where there is enough of it: sessions that want no drafts would cost a pass
        a token. Makes room for it at the expense of sessions that are not drafted for."""
        busy = {*self._drafting, *(session for session in sessions if session.states)}
        for session in sessions:
            self._collect(session, busy)
        return self._read([session for session in sessions if self._much_waits(session)], _AHEAD_TOKENS)

    def _much_waits(self, session: DraftSession) -> bool:
        context = self._contexts.get(session)
        return context is not None and context.readable(len(session.tokens)) >= _AHEAD_LEAST

    def forget(self, session: DraftSession) -> None:
        self._contexts.release(session)

    # ---- states

    def _collect(self, session: DraftSession, busy: Container[DraftSession]) -> None:
        """Takes what has come for a session to its context, without reading it."""
        if len(session.tokens) >= self.context_limit:  # never drafted for again
            session.states.clear()
            self._contexts.release(session)
            return
        for came in session.settled():
            context, end = self._contexts.get(session), came.position + len(came.tokens)
            if context is not None and end <= context.end:
                continue  # the target computed it again, after a pre-emption
            known = context is not None and came.position <= context.end
            start = context.start if context is not None and known else came.position
            context = self._contexts.room(session, end - start, busy)
            if context is None:
                self.counts.dropped += len(came.tokens)
                continue
            if not known:
                context.restart(start)
                self.counts.late_starts += start > 0
            context.waiting.append(_part(came, context.end - came.position, len(came.tokens)))

    def _ready(self, session: DraftSession, steps: int) -> _Context | None:
        """The session's context, if the state before the last token has come and there is room for drafts."""
        context, known = self._contexts.get(session), len(session.tokens) - 1
        if context is None or not context.start < known <= context.end:
            self.counts.without_states += 1
            return None
        return self._contexts.room(session, known - context.start + steps, self._drafting)

    def _short(self, context: _Context, tokens: Sequence[int]) -> bool:
        """Whether the graphs can read what the context has to read."""
        return self._graphs is not None and context.readable(len(tokens)) <= self._graphs.most_states

    @torch.inference_mode()
    def _read(self, sessions: Collection[DraftSession], most: int | None = None) -> bool:
        """Computes cells from states that have come, `most` of them. Returns whether there are more."""
        left = most
        pieces: list[_Piece] = []
        for session in sessions:
            context = self._contexts.get(session)
            while context is not None and (count := context.readable(len(session.tokens))) > 0:
                if left == 0:
                    self._compute(pieces)
                    return True
                room = _PASS_TOKENS - sum(piece.span.count for piece in pieces)
                first, cell = context.next, context.cells
                states = context.take(min(count, room, room if left is None else left))
                count = len(states.tokens)
                following = session.tokens[first + 1 : first + 1 + count]
                pieces.append(_Piece(context, Span(context.run.start, cell, count), states, following))
                left = None if left is None else left - count
                if count == room:
                    self._compute(pieces)
                    pieces = []
        self._compute(pieces)
        return False

    def _compute(self, pieces: Sequence[_Piece]) -> None:
        """One pass. Each context keeps its last outputs: drafting begins with them."""
        if not pieces:
            return
        try:
            rows = torch.cat([tensor_of(piece.states) for piece in pieces]).to(self._device)
            ids = torch.tensor([token for piece in pieces for token in piece.following])
            tokens = ids.clamp_(max=self._head.last_id).to(self._device)
            where = Pass.of([piece.span for piece in pieces], self._device)
            outputs = self._head(tokens, self._head.fuse(rows.to(self._pool.store.dtype)), where, self._pool)
        except Exception:
            for piece in pieces:
                piece.context.restart(piece.context.end)  # cells that were not computed must not count
            raise
        ends = accumulate(piece.span.count for piece in pieces)
        lasts = {piece.context: end - 1 for piece, end in zip(pieces, ends, strict=True)}
        kept = torch.tensor(list(lasts.values())).to(self._device)
        for context, normed, feature in zip(lasts, *(x[kept].unbind() for x in outputs), strict=True):
            context.normed, context.feature = normed, feature

    # ---- drafts

    @torch.inference_mode()
    def _draft(self, contexts: Sequence[_Context], steps: Sequence[int]) -> list[list[int]]:
        """`steps` fall: sessions that want fewer drafts drop out of the later ones."""
        made = [self._head.choose(torch.stack([context.normed for context in contexts]))]
        features = torch.stack([context.feature for context in contexts])
        for step in range(1, steps[0]):
            wanting = [context for context, wanted in zip(contexts, steps, strict=True) if wanted > step]
            where = Pass.of([Span(c.run.start, c.cells + step - 1, 1) for c in wanting], self._device)
            normed, features = self._head(made[-1][: len(wanting)], features[: len(wanting)], where, self._pool)
            made.append(self._head.choose(normed))
        columns = [column.tolist() for column in made]
        return [[column[i] for column in columns[:wanted]] for i, wanted in enumerate(steps)]

    def _replay(
        self,
        graphs: Eagle3GraphSteps,
        contexts: Sequence[_Context],
        texts: Sequence[Sequence[int]],
        steps: Sequence[int],
    ) -> list[list[int]]:
        """The same by graphs, which read what is left to be read as well."""
        rows = [_reading(context, tokens) for context, tokens in zip(contexts, texts, strict=True)]
        try:
            return graphs.run(rows, steps)
        except Exception:
            for context in contexts:
                context.restart(context.end)  # cells that were not computed must not count
            raise


def _reading(context: _Context, tokens: Sequence[int]) -> Reading:
    """All that can be read, or the last state again."""
    cell, states, left = context.cells, [], context.readable(len(tokens))
    if left <= 0 and context.last is not None:
        cell, states = cell - 1, [context.last]
    while left > 0:
        states.append(context.take(left))
        left -= len(states[-1].tokens)
    return Reading(context.run.start, cell, states, tokens[context.start + cell + 1 :])


def _part(states: States, begin: int, end: int) -> States:
    """States [begin, end) of a pass."""
    if (begin, end) == (0, len(states.tokens)):
        return states
    return States(states.position + begin, states.tokens[begin:end], states.rows[begin:end], states.dtype)
