"""k draft steps of a batch: op by op anywhere, or as captured CUDA graphs without a host synchronisation between them.

Both start from each session's last two tokens. After a verdict that is what a draft has not seen: the target's own
token, and before it the last draft if all were accepted, whose keys and values no step has computed. Feeding a token
again does no harm, so the first step always takes two, and every batch has one shape.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specdec.draft.model.decoder import CausalModel, Pass, Span, ops_for
from specdec.draft.model.kv import KvPool, Run


@dataclass(frozen=True)
class Row:
    """A session about to be drafted for: its run, how many tokens it has, and the last two of them.

    A text of one token names it twice.
    """

    first: int
    length: int
    tail: tuple[int, int]

    @property
    def positions(self) -> tuple[int, int]:
        return max(0, self.length - 2), self.length - 1


class EagerSteps:
    """Step by step. Sessions that want fewer drafts drop out of the later ones."""

    def __init__(self, model: CausalModel, pool: KvPool, device: torch.device) -> None:
        self._model, self._pool, self._device = model, pool, device

    def run(self, rows: Sequence[Row], steps: Sequence[int]) -> list[list[int]]:
        """The likeliest `steps[i]` tokens after rows[i], one after the other."""
        return [[best for best, *_ in drafts] for drafts in self.ranked(rows, steps, 1)]

    @torch.inference_mode()
    def ranked(self, rows: Sequence[Row], steps: Sequence[int], ranks: int) -> list[list[tuple[int, ...]]]:
        """The same, and in each one's place the next likeliest: `ranks` tokens, the best first."""
        order = sorted(range(len(rows)), key=lambda i: -steps[i])
        counts = [min(rows[i].length, 2) for i in order]
        spans = [Span(rows[i].first, rows[i].length - n, n) for i, n in zip(order, counts, strict=True)]
        ids = torch.tensor([t for i, n in zip(order, counts, strict=True) for t in rows[i].tail[2 - n :]])
        last = torch.tensor(counts, device=self._device).cumsum(0) - 1
        hidden = self._model.hidden(ids.to(self._device), Pass.of(spans, self._device), self._pool)[last]
        made = [_likeliest(self._model.logits(hidden), ranks)]
        for step in range(1, max(steps)):
            wanting = [rows[i] for i in order if steps[i] > step]
            where = Pass.of([Span(row.first, row.length + step - 1, 1) for row in wanting], self._device)
            hidden = self._model.hidden(made[-1][: len(wanting), 0], where, self._pool)
            made.append(_likeliest(self._model.logits(hidden), ranks))
        columns = [column.tolist() for column in made]
        drafts: list[list[tuple[int, ...]]] = [[] for _ in rows]
        for at, i in enumerate(order):
            drafts[i] = [tuple(column[at]) for column in columns[: steps[i]]]
        return drafts


def _likeliest(logits: torch.Tensor, ranks: int) -> torch.Tensor:  # [n, vocab] -> [n, ranks], the best first
    best = logits.argmax(-1, keepdim=True)  # NOTE: not topk's first, which may be another of equal ones
    if ranks == 1:
        return best
    return torch.cat((best, logits.scatter(-1, best, -torch.inf).topk(ranks - 1).indices), -1)


class GraphSteps:
    """Two graphs for every batch size of `buckets`: the first step, and any later one. All rows take the most steps."""

    def __init__(
        self, model: CausalModel, pool: KvPool, device: torch.device, *, max_batch: int, max_steps: int, spare: Run
    ) -> None:
        """`spare`: cells that rows without a session may write to. Captures at once, which takes seconds."""
        self._model, self._pool, self._max_batch = model, pool, max_batch
        self.buckets = [b for b in (1, 2, 4, 8, 16, 32, 64, 128, 256) if b < max_batch] + [max_batch]
        self._spare = Row(spare.start, 1, (0, 0))
        self._host = torch.zeros((3, 2 * max_batch), dtype=torch.int64).pin_memory()
        self._fields = self._host.numpy()  # the same memory, which numpy writes faster
        self._given = self._host.to(device)  # tokens, positions, firsts; two columns a row
        self._next = torch.zeros(max_batch, dtype=torch.int64, device=device)
        self._position = torch.zeros_like(self._next)
        self._first = torch.zeros_like(self._next)
        self._step = torch.zeros_like(self._next)  # how many drafts each row has
        self._made = torch.zeros((max_steps, max_batch), dtype=torch.int64, device=device)
        self._answer = torch.zeros((max_steps, max_batch), dtype=torch.int64).pin_memory()
        self._done = torch.cuda.Event()
        self._stream = torch.cuda.Stream(device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph]] = {}
        memory = None
        for batch in reversed(self.buckets):  # the largest first: the others fit its memory
            self._graphs[batch] = first, _ = self._capture(batch, memory)
            memory = first.pool()

    @torch.inference_mode()
    def run(self, rows: Sequence[Row], steps: Sequence[int]) -> list[list[int]]:
        """The likeliest `steps[i]` tokens after rows[i], one after the other."""
        if len(rows) > self._max_batch:
            half = self._max_batch
            return self.run(rows[:half], steps[:half]) + self.run(rows[half:], steps[half:])
        batch = next(b for b in self.buckets if b >= len(rows))
        filled = [*rows, *[self._spare] * (batch - len(rows))]
        fields = [
            [token for row in filled for token in row.tail],
            [position for row in filled for position in row.positions],
            [row.first for row in filled for _ in range(2)],
        ]
        self._fields[:, : 2 * batch] = fields
        most = max(steps)
        # texts may still be being read there, and cells moved
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            first, later = self._graphs[batch]
            first.replay()
            for _ in range(most - 1):
                later.replay()
            self._answer[:most].copy_(self._made[:most], non_blocking=True)
            self._done.record()
        self._done.synchronize()
        columns = self._answer[:most].T.tolist()
        return [columns[i][: steps[i]] for i in range(len(rows))]

    def _capture(self, batch: int, memory: tuple[int, int] | None) -> tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph]:
        graphs = []
        for work in (self._first_step, self._later_step):
            with torch.inference_mode(), torch.cuda.stream(self._stream):
                work(batch)  # compiles kernels, and lets libraries allocate what they need
                self._step.zero_()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=memory, stream=self._stream):
                    work(batch)
            memory = graph.pool()
            graphs.append(graph)
        return graphs[0], graphs[1]

    def _first_step(self, batch: int) -> None:
        self._given.copy_(self._host, non_blocking=True)
        tokens, positions, firsts = self._given[:, : 2 * batch]
        hidden = self._model.hidden(tokens, Pass(positions, firsts, together=2), self._pool)[1::2].contiguous()
        self._step.zero_()
        self._position[:batch] = positions[1::2]
        self._first[:batch] = firsts[1::2]
        self._take(batch, hidden)

    def _later_step(self, batch: int) -> None:
        where = Pass(self._position[:batch], self._first[:batch])
        self._take(batch, self._model.hidden(self._next[:batch], where, self._pool))

    def _take(self, batch: int, hidden: torch.Tensor) -> None:  # [batch, hidden]
        best, ids = self._model.best(hidden)
        ops_for(hidden.device).advance(best, ids, self._next, self._made, self._position, self._step)
