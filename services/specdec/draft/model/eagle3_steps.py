"""k draft steps of an EAGLE-3 head as captured CUDA graphs: it reads what the target settled, then goes on alone.

    opening   states of the last verdict, and the token after each ──► cells, and the first draft
    later     the feature that came out, and the draft ──► the next cell, feature and draft

A session has between one and max_steps + 1 states to read after a verdict. All rows of an opening read as many; those
with fewer read their first one again, which computes the same cell again and does no harm.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from specdec.channel.states import States
from specdec.draft.model.decoder import Pass
from specdec.draft.model.eagle3 import Eagle3Head
from specdec.draft.model.graphs import StepGraphs
from specdec.draft.model.kv import KvPool, Run


def tensor_of(states: States) -> torch.Tensor:  # [tokens, layers * width]
    rows = states.rows if states.rows.flags.writeable else states.rows.copy()  # torch takes no read-only memory
    tensor = torch.from_numpy(rows)
    return tensor.view(torch.bfloat16) if states.dtype == "bfloat16" else tensor


@dataclass(frozen=True)
class Reading:
    """A session about to be drafted for: where its cells begin, and states for those from `cell` on, at least one."""

    first: int  # cell of the pool
    cell: int  # counted from there
    states: Sequence[States]  # one after the other
    following: Sequence[int]  # the token after each state


class Eagle3GraphSteps(StepGraphs):
    """For every batch size of `buckets` an opening for each of `widths`, and a later step. All rows take the most."""

    def __init__(
        self, head: Eagle3Head, pool: KvPool, device: torch.device, *, max_batch: int, max_steps: int, spare: Run
    ) -> None:
        """`spare`: cells that rows without a session may write to. Captures at once, which takes seconds."""
        super().__init__(pool, device, max_batch=max_batch, max_steps=max_steps)
        self._head = head
        self.widths = [width for width in (2, 4) if width <= max_steps] + [max_steps + 1]  # states a row
        places = max_batch * self.widths[-1]
        dtype = pool.store.dtype
        self._spare = spare.start
        self._dtype = str(dtype).removeprefix("torch.")
        self._host = torch.zeros((4, places), dtype=torch.int64).pin_memory()
        self._fields = self._host.numpy()  # the same memory, which numpy writes faster
        self._given = self._host.to(device)  # tokens, positions, firsts, states' numbers; `width` columns a row
        self._came = torch.zeros((places, head.states), dtype=dtype).pin_memory()
        self._raw = (self._came.view(torch.uint16) if dtype == torch.bfloat16 else self._came).numpy()
        self._states = self._came.to(device)
        self._features = torch.zeros((max_batch, head.shape.hidden), dtype=dtype, device=device)
        self._openings: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._later: dict[int, torch.cuda.CUDAGraph] = {}
        for batch in reversed(self.buckets):
            for width in reversed(self.widths):
                self._openings[batch, width] = self._capture(partial(self._open, batch, width))
            self._later[batch] = self._capture(partial(self._later_step, batch))

    @property
    def most_states(self) -> int:
        """How many states of a row an opening can read."""
        return self.widths[-1]

    @torch.inference_mode()
    def run(self, rows: Sequence[Reading], steps: Sequence[int]) -> list[list[int]]:
        """The likeliest `steps[i]` tokens after rows[i], one after the other. At most `max_batch` rows."""
        batch = self.bucket(len(rows))
        counts = [len(row.following) for row in rows]
        width = next(w for w in self.widths if w >= max(counts))
        tokens, positions, numbers, read = [], [], [], 0
        last_id = self._head.last_id
        for row, count in zip(rows, counts, strict=True):
            again = width - count
            tokens += [min(token, last_id) for token in [row.following[0]] * again + [*row.following]]
            positions += [row.cell] * again + [*range(row.cell, row.cell + count)]
            numbers += [read] * again + [*range(read, read + count)]
            for states in row.states:
                self._put(read, states)
                read += len(states.tokens)
        empty = [0] * (width * (batch - len(rows)))
        starts = [row.first for row in rows] + [self._spare] * (batch - len(rows))
        firsts = [first for first in starts for _ in range(width)]
        self._fields[:, : batch * width] = [tokens + empty, positions + empty, firsts, numbers + empty]
        self._states[:read].copy_(self._came[:read], non_blocking=True)
        drafts = self._play(self._openings[batch, width], self._later[batch], steps)
        return [[token for (token,) in made] for made in drafts]

    def _put(self, at: int, states: States) -> None:
        end = at + len(states.tokens)
        if states.dtype == self._dtype:
            self._raw[at:end] = states.rows
        else:
            self._came[at:end] = tensor_of(states)

    def _open(self, batch: int, width: int) -> None:
        self._given.copy_(self._host, non_blocking=True)
        tokens, positions, firsts, numbers = self._given[:, : batch * width]
        features = self._head.fuse(self._states[numbers])
        normed, features = self._head(tokens, features, Pass(positions, firsts, together=width), self._pool)
        last = slice(width - 1, None, width)
        self._begin(batch, positions[last], firsts[last])
        self._features[:batch] = features[last]
        self._take(*self._head.best(normed[last].contiguous()), self._head.offsets)

    def _later_step(self, batch: int) -> None:
        given = self._features[:batch]
        where = Pass(self._position[:batch], self._first[:batch])
        normed, features = self._head(self._next[:batch], given, where, self._pool)
        if features is not given:
            given.copy_(features)
        self._take(*self._head.best(normed), self._head.offsets)
