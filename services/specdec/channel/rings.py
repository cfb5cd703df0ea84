"""One writer, one reader, fixed slots (layout.py draws them).

A writer never waits: a ring whose reader has stopped is full, `write` says so, and the caller counts it. A reader never
sees half a frame: it copies the slot and believes the copy only if the checksum agrees.
"""

import time
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec.channel import futex
from specdec.channel.layout import ORDER_ROW, SLOT_HEAD, Area

_GARBAGE_AFTER_NS = 200_000_000  # a frame announced but not whole for so long was never written whole


class Word:
    """One 8-byte word of the segment; who may store to it is in its line's name (layout.py)."""

    def __init__(self, words: NDArray[np.uint64], index: int) -> None:
        self._cell = words[index : index + 1]

    @property
    def value(self) -> int:
        return int(self._cell[0])

    @value.setter
    def value(self, value: int) -> None:
        self._cell[0] = value


class Bell(Word):
    """A counter raised after each frame. Only its writer rings."""

    def __init__(self, words: NDArray[np.uint64], index: int) -> None:
        super().__init__(words, index)
        self._address = words.ctypes.data + 8 * index  # little-endian: the low half is what futex compares

    def ring(self) -> None:
        self.value = self.value + 1
        futex.wake(self._address)

    def wait(self, seen: int, timeout_s: float, spin_s: float = 0.0) -> None:
        """Returns once the bell has rung since it read `seen`, or after `timeout_s`; for `spin_s` it does not sleep."""
        start = time.monotonic()
        until, sleeps = start + timeout_s, start + spin_s
        # again where the wake-up was an older ring's, whose count had been read before its waker came to wake
        while self.value == seen and (left := until - time.monotonic()) > 0:
            if until - left < sleeps:
                continue
            futex.wait(self._address, seen & 0xFFFFFFFF, left)


def _look(memory: memoryview, area: Area, sequence: int) -> tuple[int, bool, bytes | None]:
    """Frame `sequence`: (the byte its slot starts at, whether the slot announces it, its body if that is whole)."""
    at = area.start + (sequence - 1) % area.slots * area.slot_bytes
    raw = bytes(memory[at : at + SLOT_HEAD.itemsize])
    head = np.frombuffer(raw, SLOT_HEAD)[0]
    length = int(head["length"])
    if int(head["sequence"]) != sequence:
        return at, False, None
    if length <= area.slot_bytes - SLOT_HEAD.itemsize:
        body = bytes(memory[at + SLOT_HEAD.itemsize : at + SLOT_HEAD.itemsize + length])
        if zlib.crc32(body, zlib.crc32(raw[:12])) == int(head["crc"]):
            return at, True, body
    return at, True, None


class RingWriter:
    """The only writer of a ring. Frames are numbered from 1, and a new writer goes on where the last one ended."""

    def __init__(self, memory: memoryview, area: Area, read: Word, bell: Bell) -> None:
        self._memory, self._area, self._read, self._bell = memory, area, read, bell
        # The last writer may have died before it rang for a frame. Its number is used up if the reader has passed it,
        # or can: the next frame under that number would be skipped.
        self._sequence = max(bell.value, read.value)
        at, announced, body = _look(memory, area, self._sequence + 1)
        if body is not None:
            self._sequence += 1
        elif announced:
            memory[at : at + SLOT_HEAD.itemsize] = bytes(SLOT_HEAD.itemsize)
        if bell.value != self._sequence:
            bell.value = self._sequence - 1
            bell.ring()

    @property
    def full(self) -> bool:
        """Whether `write` would refuse a frame now."""
        return self._sequence - self._read.value >= self._area.slots

    def write(self, *parts: bytes | NDArray[Any]) -> bool:
        """Copies one frame in and rings. False: the ring is full (the reader lags or is gone); nothing was written.

        Raises ValueError if the frame is larger than a slot.
        """
        body = b"".join(part if isinstance(part, bytes) else part.tobytes() for part in parts)
        if SLOT_HEAD.itemsize + len(body) > self._area.slot_bytes:
            raise ValueError(f"a frame of {len(body)} bytes does not fit a slot of {self._area.slot_bytes}")
        if self.full:
            return False
        self._sequence += 1
        at = self._area.start + (self._sequence - 1) % self._area.slots * self._area.slot_bytes
        head = np.zeros(1, SLOT_HEAD)
        head["sequence"], head["length"] = self._sequence, len(body)
        head["crc"] = zlib.crc32(body, zlib.crc32(head.tobytes()[:12]))
        self._memory[at + SLOT_HEAD.itemsize : at + SLOT_HEAD.itemsize + len(body)] = body
        self._memory[at : at + SLOT_HEAD.itemsize] = head.tobytes()
        self._bell.ring()
        return True


class RingReader:
    """The only reader of a ring. `garbage` counts frames given up because they never became whole."""

    def __init__(self, memory: memoryview, area: Area, read: Word, bell: Bell) -> None:
        self._memory, self._area, self._read, self.bell = memory, area, read, bell
        self._next = read.value + 1
        self._torn_since_ns = 0
        self.garbage = 0

    def read(self) -> bytes | None:
        """The next frame's body, or None if it has not arrived (whole)."""
        _, announced, body = _look(self._memory, self._area, self._next)
        if body is not None:
            self._pass()
            return body
        if not announced:
            self._torn_since_ns = 0
            return None
        now = time.monotonic_ns()
        if not self._torn_since_ns:
            self._torn_since_ns = now
        elif now - self._torn_since_ns > _GARBAGE_AFTER_NS:
            self.garbage += 1
            self._pass()
        return None

    def read_all(self) -> Iterator[bytes]:
        """Every frame that has arrived, at most a ringful, so that a busy writer cannot hold its reader here."""
        for _ in range(self._area.slots):
            if (body := self.read()) is None:
                return
            yield body

    def wait(self, timeout_s: float, spin_s: float = 0.0) -> bytes | None:
        """The next frame's body; None if it has not arrived after `timeout_s`. Sleeps only after `spin_s`."""
        until = time.monotonic() + timeout_s
        sleeps = until - timeout_s + spin_s
        while True:
            seen = self.bell.value
            body = self.read()
            left = until - time.monotonic()
            if body is not None or left <= 0:
                return body
            spin_s = max(0.0, sleeps - (until - left))
            self.bell.wait(seen, min(left, 0.05) if not self._torn_since_ns else 0.0001, spin_s)

    def skip_to_end(self) -> None:
        """Passes over everything written so far: for a reader that starts after its writer."""
        self._next = max(self._next, self.bell.value + 1)
        self._read.value = self._next - 1

    def _pass(self) -> None:
        self._torn_since_ns = 0
        self._read.value = self._next
        self._next += 1


class OrderTable:
    """The newest order of every session slot. Control writes rows, the engine reads them."""

    def __init__(self, memory: memoryview, start: int, rows: int) -> None:
        self._memory, self._start, self.rows = memory, start, rows
        self._version = 0

    def write(self, slot: int, session: int, order: int, steps: int, window: int, lease_ms: int, seen: int = 0) -> None:
        """Replaces the slot's row; the caller rings the order bell once after a batch."""
        self._version = self._version % 0xFFFFFFFF + 1  # never 0, which is an empty row's
        row = np.zeros(1, ORDER_ROW)
        row[0] = (self._version, 0, session, order, steps, window, lease_ms, seen)
        row["crc"] = zlib.crc32(row.tobytes())
        at = self._at(slot)
        self._memory[at : at + ORDER_ROW.itemsize] = row.tobytes()

    def read(self, slot: int) -> np.void | None:
        """The slot's row, or None if it is empty or is being written: the order before it then still holds."""
        at = self._at(slot)
        row = np.frombuffer(bytearray(self._memory[at : at + ORDER_ROW.itemsize]), ORDER_ROW)
        crc, row["crc"] = int(row[0]["crc"]), 0
        if not int(row[0]["version"]) or zlib.crc32(row.tobytes()) != crc:
            return None
        found: np.void = row[0]
        return found

    def clear(self) -> None:
        """Puts every session back under the standing order."""
        for slot in range(self.rows):
            at = self._at(slot)
            self._memory[at : at + ORDER_ROW.itemsize] = bytes(ORDER_ROW.itemsize)

    def _at(self, slot: int) -> int:
        if not 0 <= slot < self.rows:
            raise ValueError(f"slot {slot} is not in 0..{self.rows - 1}")
        return self._start + slot * ORDER_ROW.itemsize
