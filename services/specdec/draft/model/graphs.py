"""Steps of a batch as captured CUDA graphs: an opening, the same later step again and again, one wait for the drafts.

What a step leaves for the next stays on the device: each row's token, its position, how many drafts it has. Rows that
no session fills draft as well, in cells of their own.
"""

from collections.abc import Callable, Sequence

import torch

from specdec.draft.model.decoder import ops_for
from specdec.draft.model.kv import KvPool
from specdec.errors import CheckpointError


class StepGraphs:
    """What the graphs of any model share. A subclass captures an opening and a later step for every size of batch."""

    def __init__(self, pool: KvPool, device: torch.device, *, max_batch: int, max_steps: int, ranks: int = 1) -> None:
        """Raises CheckpointError for heads that the kernels do not compute."""
        size = pool.store.shape[-1]
        if size < 16 or size & (size - 1):
            raise CheckpointError(f"attention heads of {size} values: on a GPU it must be a power of two, 16 or more")
        self._pool, self._max_batch = pool, max_batch
        self.buckets = [b for b in (1, 2, 4, 8, 16, 32, 64, 128, 256) if b < max_batch] + [max_batch]
        self._next = torch.zeros(max_batch, dtype=torch.int64, device=device)
        self._position = torch.zeros_like(self._next)
        self._first = torch.zeros_like(self._next)
        self._step = torch.zeros_like(self._next)  # how many drafts each row has
        self._made = torch.zeros((max_steps, ranks, max_batch), dtype=torch.int64, device=device)
        self._answer = torch.zeros((max_steps, ranks, max_batch), dtype=torch.int64).pin_memory()
        self._stream = torch.cuda.Stream(device)  # of the captures; replays follow what the caller's stream has to do
        self._memory: tuple[int, int] | None = None

    def bucket(self, rows: int) -> int:
        """The smallest batch there are graphs for that so many rows fit in."""
        return next(b for b in self.buckets if b >= rows)

    def _capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """All graphs share their memory, so the largest should come first."""
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            work()  # compiles kernels, and lets libraries allocate what they need
            self._step.zero_()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._memory, stream=self._stream):
                work()
        self._memory = graph.pool()
        return graph

    def _begin(self, batch: int, positions: torch.Tensor, firsts: torch.Tensor) -> None:  # [batch], of the last tokens
        """Inside an opening, before its first draft."""
        self._step.zero_()
        self._position[:batch] = positions
        self._first[:batch] = firsts

    def _take(self, best: torch.Tensor, ids: torch.Tensor, offsets: torch.Tensor | None = None) -> None:
        """Inside a graph, at a step's end: the likeliest of [batch, candidates], and where they are fed next."""
        ops_for(best.device).advance(best, ids, self._next, self._made, self._position, self._step, offsets)

    def _play(
        self, opening: torch.cuda.CUDAGraph, later: torch.cuda.CUDAGraph, steps: Sequence[int]
    ) -> list[list[tuple[int, ...]]]:
        """The drafts of the first len(steps) rows, steps[i] of the i-th, in each one's place its ranks."""
        most = max(steps)
        for graph in (opening, *[later] * (most - 1)):
            graph.replay()
        self._answer[:most].copy_(self._made[:most])  # waits
        rows = self._answer[:most, :, : len(steps)].permute(2, 0, 1).tolist()
        return [[tuple(ranked) for ranked in row[:k]] for row, k in zip(rows, steps, strict=True)]
