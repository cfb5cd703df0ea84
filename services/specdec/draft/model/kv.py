"""The draft's KV memory: one pool of a fixed number of cells, a contiguous run of them for every session.

    cells    0 ─────────────────────────────────────────────────► size
             │ run of session A │ free │ run of B       │ free ...
    a cell   keys and values of one token in every layer

A run's length is a power of two and starts at a multiple of it (buddy allocation), so neighbours join again when they
are freed, and a session that outgrows its run moves to one of twice the length. Attention reads a run as it lies.
"""

from collections import OrderedDict
from collections.abc import Callable, Container, Hashable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

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


class Held(Protocol):
    """What is known of a session's run."""

    run: Run

    @property
    def cells(self) -> int:
        """How many of the run's cells hold something."""
        ...


Key = TypeVar("Key", bound=Hashable)
State = TypeVar("State", bound=Held)


class Holders(Generic[Key, State]):
    """Who holds which run of a pool. Those used least recently make way for others."""

    def __init__(self, pool: KvPool, begin: Callable[[Run], State]) -> None:
        self._pool, self._begin = pool, begin
        self._held: OrderedDict[Key, State] = OrderedDict()  # least recently used first
        self.evicted = 0  # for lack of room: those that made way, and those that found none

    def get(self, key: Key) -> State | None:
        return self._held.get(key)

    def room(self, key: Key, cells: int, busy: Container[Key]) -> State | None:
        """The key's state with room for `cells` cells, what they hold kept. None: the busy ones leave too little."""
        state = self._held.get(key)
        if state is None or state.run.length < cells:
            run = self._take(cells, busy)
            if run is None:
                self.release(key)
                self.evicted += 1
                return None
            if state is None:
                state = self._held[key] = self._begin(run)
            else:
                self._pool.move(state.run, run, state.cells)
                self._pool.cells.give_back(state.run)
                state.run = run
        self._held.move_to_end(key)
        return state

    def release(self, key: Key) -> None:
        if state := self._held.pop(key, None):
            self._pool.cells.give_back(state.run)

    def _take(self, cells: int, busy: Container[Key]) -> Run | None:
        while (run := self._pool.cells.take(cells)) is None:
            victim = next((key for key in self._held if key not in busy), None)
            if victim is None:
                return None
            self.release(victim)
            self.evicted += 1
        return run
