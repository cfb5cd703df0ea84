"""The draft's KV memory: one pool of a fixed number of cells, a contiguous run of them for every session.

    cells    0 ─────────────────────────────────────────────────► size
             │ run of session A │ free │ run of B       │ free ...
    a cell   keys and values of one token in every layer

A run's length is a power of two and starts at a multiple of it (buddy allocation), so neighbours join again when they
are freed, and a session that outgrows its run moves to one of twice the length. Attention reads a run as it lies.
"""

from dataclasses import dataclass

import torch

SMALLEST = 64


@dataclass(eq=False)
class Run:
    """Cells [start, start + length) of the pool."""

    start: int
    length: int


class Cells:
    """Which cells are free. Knows nothing of tensors."""

    def __init__(self, size: int) -> None:
        """`size` is rounded down to a multiple of SMALLEST."""
        self.size = size - size % SMALLEST
        self._free: dict[int, set[int]] = {}  # length: starts
        start = 0
        while start < self.size:
            length = SMALLEST
            while start % (2 * length) == 0 and start + 2 * length <= self.size:
                length *= 2
            self._free.setdefault(length, set()).add(start)
            start += length

    @property
    def free(self) -> int:
        return sum(length * len(starts) for length, starts in self._free.items())

    def take(self, cells: int) -> Run | None:
        """A run of at least `cells` cells, or None if no free one is long enough."""
        length = SMALLEST
        while length < cells:
            length *= 2
        source = min((n for n, starts in self._free.items() if starts and n >= length), default=None)
        if source is None:
            return None
        start = min(self._free[source])
        self._free[source].remove(start)
        while source > length:
            source //= 2
            self._free.setdefault(source, set()).add(start + source)
        return Run(start, length)

    def give_back(self, run: Run) -> None:
        start, length = run.start, run.length
        while (buddy := start ^ length) in self._free.get(length, ()):
            self._free[length].remove(buddy)
            start, length = min(start, buddy), 2 * length
        self._free.setdefault(length, set()).add(start)


class KvPool:
    """Keys and values of `cells` tokens in every layer, in memory that is claimed once."""

    def __init__(
        self, layers: int, kv_heads: int, head_size: int, cells: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.cells = Cells(cells)
        self.store = torch.zeros((layers, 2, self.cells.size, kv_heads, head_size), dtype=dtype, device=device)

    @staticmethod
    def cell_bytes(layers: int, kv_heads: int, head_size: int, dtype: torch.dtype) -> int:
        return layers * 2 * kv_heads * head_size * dtype.itemsize

    def move(self, old: Run, new: Run, cells: int, start: int = 0) -> None:
        """Copies the cells from `start` up to `cells` of a run to the same places of another."""
        self.store[:, :, new.start + start : new.start + cells] = self.store[
            :, :, old.start + start : old.start + cells
        ]
