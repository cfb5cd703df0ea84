"""k draft steps of a batch: op by op anywhere, or as captured CUDA graphs without a host synchronisation between them.

Both start from each session's last two tokens. After a verdict that is what a draft has not seen: the target's own
token, and before it the last draft if all were accepted, whose keys and values no step has computed. Feeding a token
again does no harm, so the first step always takes two, and every batch has one shape.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from specdec.draft.model.decoder import CausalModel, Pass, Span
from specdec.draft.model.graphs import StepGraphs
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

    def __init__(self, model: CausalModel, pool: KvPool, device: torch.device, *, ranks: int = 1) -> None:
        self._model, self._pool, self._device, self._ranks = model, pool, device, ranks

    @torch.inference_mode()
    def ranked(self, rows: Sequence[Row], steps: Sequence[int]) -> list[list[tuple[int, ...]]]:
        """The likeliest `steps[i]` tokens after rows[i], one after the other, each with the next likeliest.

        `ranks` tokens a place, the best first.
        """
        order = sorted(range(len(rows)), key=lambda i: -steps[i])
        counts = [min(rows[i].length, 2) for i in order]
        spans = [Span(rows[i].first, rows[i].length - n, n) for i, n in zip(order, counts, strict=True)]
        ids = torch.tensor([t for i, n in zip(order, counts, strict=True) for t in rows[i].tail[2 - n :]])
        last = torch.tensor(counts, device=self._device).cumsum(0) - 1
        hidden = self._model.hidden(ids.to(self._device), Pass.of(spans, self._device), self._pool)[last]
        made = [_likeliest(self._model.logits(hidden), self._ranks)]
        for step in range(1, max(steps)):
            wanting = [rows[i] for i in order if steps[i] > step]
            where = Pass.of([Span(row.first, row.length + step - 1, 1) for row in wanting], self._device)
            hidden = self._model.hidden(made[-1][: len(wanting), 0], where, self._pool)
            made.append(_likeliest(self._model.logits(hidden), self._ranks))
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


class GraphSteps(StepGraphs):
    """Two graphs for every batch size of `buckets`: the first step, and any later one. All rows take the most steps."""

    def __init__(
        self,
        model: CausalModel,
        pool: KvPool,
        device: torch.device,
        *,
        max_batch: int,
        max_steps: int,
        spare: Run,
        ranks: int = 1,
    ) -> None:
        """`spare`: cells that rows without a session may write to. Captures at once, which takes seconds."""
        super().__init__(pool, device, max_batch=max_batch, max_steps=max_steps, ranks=ranks)
        self._model, self._ranks = model, ranks
        self._spare = Row(spare.start, 1, (0, 0))
        self._host = torch.zeros((3, 2 * max_batch), dtype=torch.int64).pin_memory()
        self._fields = self._host.numpy()  # the same memory, which numpy writes faster
        self._given = self._host.to(device)  # tokens, positions, firsts; two columns a row
        self._graphs = {
            batch: (
                self._capture(partial(self._first_step, batch)),
                self._capture(partial(self._later_step, batch)),
            )
            for batch in reversed(self.buckets)
        }

    @torch.inference_mode()
    def ranked(self, rows: Sequence[Row], steps: Sequence[int]) -> list[list[tuple[int, ...]]]:
        """The likeliest `steps[i]` tokens after rows[i], one after the other, each with the next likeliest.

        `ranks` tokens a place, the best first; it is the same token with any number of ranks.
        """
        if len(rows) > self._max_batch:
            half = self._max_batch
            return self.ranked(rows[:half], steps[:half]) + self.ranked(rows[half:], steps[half:])
        batch = self.bucket(len(rows))
        filled = [*rows, *[self._spare] * (batch - len(rows))]
        fields = [
            [token for row in filled for token in row.tail],
            [position for row in filled for position in row.positions],
            [row.first for row in filled for _ in range(2)],
        ]
        self._fields[:, : 2 * batch] = fields
        return self._play(*self._graphs[batch], steps)

    def _first_step(self, batch: int) -> None:
        self._given.copy_(self._host, non_blocking=True)
        tokens, positions, firsts = self._given[:, : 2 * batch]
        hidden = self._model.hidden(tokens, Pass(positions, firsts, together=2), self._pool)[1::2].contiguous()
        self._begin(batch, positions[1::2], firsts[1::2])
        self._take(*self._model.best(hidden, self._ranks))

    def _later_step(self, batch: int) -> None:
        where = Pass(self._position[:batch], self._first[:batch])
        self._take(*self._model.best(self._model.hidden(self._next[:batch], where, self._pool), self._ranks))
