"""channel/rings.py: one writer, one reader, real processes on shared memory."""

import itertools
import os
import random
import signal
import struct
import time
import zlib

import numpy as np
import pytest

from channel_kit import Child, Ring, until
from specdec.channel import futex, rings
from specdec.channel.layout import ORDER_ROW, SLOT_HEAD
from specdec.channel.rings import OrderTable, Word

HEAD = SLOT_HEAD.itemsize
NOISE = random.Random(1).randbytes(1024)


def frame(number: int) -> bytes:
    """The body that frame `number` must have: the number, then bytes that follow from it, of a length that does too."""
    start = number * 31 % 701
    return struct.pack("<Q", number) + NOISE[start : start + number * 7 % 200]


def number_of(body: bytes) -> int:
    """The number of a body. Fails if any byte of it is not that frame's."""
    number = struct.unpack_from("<Q", body)[0]
    assert body == frame(number)
    return number


class Patience:
    """Waits for the other process by looking again, and now and then gives it the processor, which may be its only."""

    def __init__(self) -> None:
        self._tries = 0

    def __call__(self) -> None:
        self._tries += 1
        if self._tries % 100 == 0:
            time.sleep(0.00002)


def write_all(ring: Ring, numbers) -> None:
    writer, wait = ring.writer(), Patience()
    for number in numbers:
        body = frame(number)
        while not writer.write(body):
            wait()


# ---- two processes


@pytest.mark.parametrize(("slots", "frames"), [(1, 10_000), (3, 190_000)])
def test_nothing_is_lost_torn_or_reordered(slots, frames):
    ring = Ring(slots)
    with Child(lambda: write_all(ring, range(1, frames + 1))) as writer:
        reader = ring.reader()
        for number in range(1, frames + 1):
            assert reader.wait(10) == frame(number)
        assert writer.wait() == 0
    assert reader.read() is None
    assert reader.garbage == 0
    assert ring.bell.value == ring.read_word.value == frames


def test_a_lost_wake_up_costs_a_moment(monkeypatch):
    """The word is the truth: a reader that nobody wakes looks again by itself."""
    ring = Ring()
    monkeypatch.setattr(futex, "wake", lambda address: None)
    with Child(lambda: (time.sleep(0.1), write_all(ring, [1]))):
        start = time.monotonic()
        assert ring.reader().wait(10) == frame(1)
        assert time.monotonic() - start < 2


def test_a_stopped_peer_costs_a_bounded_wait():
    ring = Ring(slots=2)
    with Child(lambda: write_all(ring, range(1, 2001))) as writer:
        reader = ring.reader()
        assert reader.wait(10) == frame(1)
        writer.send(signal.SIGSTOP)
        got = [frame(1), *reader.read_all()]
        start = time.monotonic()
        while (body := reader.wait(0.2)) is not None:  # the writer may have been stopped some way into one more
            got.append(body)
        assert time.monotonic() - start < 1
        writer.send(signal.SIGCONT)
        while len(got) < 2000:
            got.append(reader.wait(10))
    assert got == [frame(number) for number in range(1, 2001)]


# ---- full, too large


def test_a_full_ring_refuses_and_keeps_what_it_accepted():
    ring = Ring(slots=3)
    writer, reader = ring.writer(), ring.reader()
    number, want = 0, 0
    for step in random.Random(2).choices(("write", "read"), (3, 2), k=2000):
        if step == "read":
            body = reader.read()
            assert (body is None) == (want == number)
            if body is not None:
                want += 1
                assert body == frame(want)
        else:
            accepted = writer.write(frame(number + 1))
            assert accepted == (number - want < 3)
            number += accepted
    assert [number_of(body) for body in reader.read_all()] == list(range(want + 1, number + 1))


def test_a_frame_in_parts_is_one_frame():
    ring = Ring()
    assert ring.writer().write(b"a", np.array([7, -1], np.int32), b"")
    assert ring.reader().read() == b"a" + struct.pack("<ii", 7, -1)


def test_a_frame_larger_than_its_slot_is_refused():
    ring = Ring(slots=2, slot_bytes=64)
    writer, reader = ring.writer(), ring.reader()
    with pytest.raises(ValueError, match="49 bytes does not fit a slot of 64"):
        writer.write(bytes(49))
    assert reader.read() is None
    assert writer.write(bytes(48))
    assert reader.read() == bytes(48)


# ---- a body that is seen after its head, as aarch64 may show it


def shuffled_pieces(raw: bytes, rng: random.Random, size: int) -> list[tuple[int, bytes]]:
    """(offset, bytes) of the slot: the head first, in halves that may change places, then the body in any order."""
    heads = [(0, raw[:8]), (8, raw[8:HEAD])]
    body = [(at, raw[at : at + size]) for at in range(HEAD, len(raw), size)]
    rng.shuffle(heads)
    rng.shuffle(body)
    return heads + body


def slot_bytes(sequence: int, body: bytes) -> bytes:
    head = struct.pack("<QI", sequence, len(body))
    return head + struct.pack("<I", zlib.crc32(body, zlib.crc32(head))) + body


def test_no_torn_frame_is_returned_at_any_moment():
    ring, rng = Ring(slots=2), random.Random(3)
    reader, torn = ring.reader(), 0
    for number in range(1, 801):
        pieces = shuffled_pieces(slot_bytes(number, frame(number)), rng, rng.choice((1, 8, 24)))
        for left, (offset, piece) in enumerate(reversed(pieces)):
            assert left == 0 or reader.read() is None or pytest.fail("torn")
            torn += 1
            at = ring.slot(number) + offset
            ring.memory[at : at + len(piece)] = piece
        ring.bell.ring()
        assert reader.read() == frame(number)
    assert torn > 5000
    assert reader.garbage == 0


def test_no_torn_frame_is_returned_while_another_process_writes_pieces(monkeypatch):
    monkeypatch.setattr(rings, "_GARBAGE_AFTER_NS", 60 * 10**9)  # the writer may lose the processor between two pieces
    ring, frames = Ring(slots=4), 2000

    def write():
        rng, wait = random.Random(4), Patience()
        for number in range(1, frames + 1):
            while number - 1 - ring.read_word.value >= ring.area.slots:
                wait()
            for offset, piece in shuffled_pieces(slot_bytes(number, frame(number)), rng, 16):
                at = ring.slot(number) + offset
                ring.memory[at : at + len(piece)] = piece
            ring.bell.ring()

    with Child(write) as writer:
        reader, tries, wait = ring.reader(), 0, Patience()
        for number in range(1, frames + 1):
            while (body := reader.read()) is None:
                tries += 1
                assert reader._next == number
                wait()
            assert body == frame(number)
        assert writer.wait() == 0
    assert tries > frames // 10  # it did look in between


def spoil(ring: Ring, sequence: int, how: str) -> None:
    """What a slot holds when its writer is broken."""
    at = ring.slot(sequence)
    if how == "body":
        ring.memory[at + HEAD] ^= 0x40
    elif how == "crc":
        ring.memory[at + 12] ^= 1
    elif how == "too long":
        ring.memory[at + 8 : at + 12] = struct.pack("<I", 2**32 - 1)
    elif how == "shorter":
        ring.memory[at + 8 : at + 12] = struct.pack("<I", 3)


@pytest.mark.parametrize("how", ["body", "crc", "too long", "shorter"])
def test_garbage_is_given_up_and_counted(how):
    ring = Ring(slots=2)
    writer, reader = ring.writer(), ring.reader()
    assert writer.write(frame(1))
    assert writer.write(frame(2))
    spoil(ring, 1, how)
    start = time.monotonic()
    assert reader.wait(0.05) is None  # it may still become whole
    assert reader.garbage == 0
    assert not writer.write(frame(3))
    assert reader.wait(10) == frame(2)
    assert 0.2 <= time.monotonic() - start < 2
    assert reader.garbage == 1
    assert writer.write(frame(3))
    assert writer.write(frame(4))
    assert list(reader.read_all()) == [frame(3), frame(4)]
    assert reader.garbage == 1


def test_every_garbage_frame_has_its_own_time():
    ring = Ring(slots=4)
    writer, reader = ring.writer(), ring.reader()
    for number in (1, 2, 3):
        assert writer.write(frame(number))
    spoil(ring, 1, "body")
    spoil(ring, 2, "too long")
    start = time.monotonic()
    assert reader.wait(10) == frame(3)
    assert time.monotonic() - start >= 0.4
    assert reader.garbage == 2


# ---- restarts


class FakeDyingMemory:
    """Shared memory that kills its process in the middle of the writer's n-th store."""

    def __init__(self, memory, deadly_store: int, bytes_before: int) -> None:
        self._memory, self._left, self._bytes = memory, deadly_store, bytes_before

    def __setitem__(self, span: slice, value: bytes) -> None:
        self._left -= 1
        if self._left:
            self._memory[span] = value
            return
        part = value[: self._bytes]
        self._memory[span.start : span.start + len(part)] = part
        os.kill(os.getpid(), signal.SIGKILL)

    def __getitem__(self, span: slice) -> memoryview:
        return self._memory[span]


STORES = {"in the body": (1, 5), "before the head": (2, 0), "in the head": (2, 8), "after the head": (2, HEAD)}


class FakeRacingMemory:
    """Shared memory in which somebody else acts right after each of the writer's loads."""

    def __init__(self, memory, act) -> None:
        self._memory, self._act = memory, act

    def __getitem__(self, span: slice) -> bytes:
        copy = bytes(self._memory[span])
        self._act()
        return copy

    def __setitem__(self, span: slice, value: bytes) -> None:
        self._memory[span] = value


def die_writing(ring: Ring, number: int, where: str) -> None:
    """A process writes frame `number` and is killed on the way; its stores so far stay."""

    def work():
        if where == "before the bell":
            ring.bell.ring = lambda: os.kill(os.getpid(), signal.SIGKILL)
            memory = ring.memory
        else:
            stores = {
                "in the body": (1, 5),
                "before the head": (2, 0),
                "in the head": (2, 8),
                "after the head": (2, HEAD),
            }
            memory = FakeDyingMemory(ring.memory, *stores[where])
        rings.RingWriter(memory, ring.area, ring.read_word, ring.bell).write(frame(number))

    with Child(work) as child:
        assert child.wait() == -signal.SIGKILL


@pytest.mark.parametrize("where", [*STORES, "before the bell"])
@pytest.mark.parametrize("read", ["before the new writer", "while it starts", "before its first frame", "after it"])
def test_a_killed_writer_loses_no_frame_of_the_next_one(where, read):
    """The frame it died in may come or not; every frame `write` took after that comes, once and in order."""
    ring = Ring(slots=3)
    reader, got = ring.reader(), []
    for number in (1, 2, 3, 4):
        assert ring.writer().write(frame(number))  # so that slots hold old frames
        got.append(reader.read())
    die_writing(ring, 100, where)
    if read == "before the new writer":
        got += reader.read_all()
    if read == "while it starts":
        ring.memory = FakeRacingMemory(ring.memory, lambda: got.extend(reader.read_all()))
    writer = ring.writer()
    if read == "before its first frame":
        got += reader.read_all()
    assert writer.write(frame(5))
    assert writer.write(frame(6))
    got += reader.read_all()
    assert ring.writer().write(frame(7))
    got += reader.read_all()
    numbers = [number_of(body) for body in got]
    assert [n for n in numbers if n != 100] == [1, 2, 3, 4, 5, 6, 7]
    assert numbers.count(100) <= 1
    if 100 in numbers:
        assert numbers[4] == 100
    assert ring.bell.value == ring.read_word.value  # nothing waits, so the next reader starts at the right place
    assert reader.garbage == 0


def test_a_frame_given_up_as_garbage_does_not_swallow_the_next_writers(monkeypatch):
    monkeypatch.setattr(rings, "_GARBAGE_AFTER_NS", 5_000_000)
    ring = Ring(slots=3)
    reader = ring.reader()
    die_writing(ring, 100, "in the head")
    assert until(lambda: reader.read() is None and reader.garbage)
    writer = ring.writer()
    assert writer.write(frame(1))
    assert writer.write(frame(2))
    assert list(reader.read_all()) == [frame(1), frame(2)]


def test_a_new_writer_takes_back_what_was_announced_and_never_written(monkeypatch):
    """Else the reader may give it up, and with it the number that the new writer is about to use."""
    monkeypatch.setattr(rings, "_GARBAGE_AFTER_NS", 20_000_000)
    ring = Ring(slots=3)
    reader = ring.reader()
    die_writing(ring, 100, "in the head")
    assert reader.read() is None
    writer = ring.writer()
    time.sleep(0.03)
    assert reader.read() is None
    assert writer.write(frame(1))
    spoil(ring, 1, "body")
    assert reader.read() is None
    assert reader.garbage == 0  # torn again, but not for long yet
    spoil(ring, 1, "body")
    assert reader.read() == frame(1)


def test_writers_killed_at_random_lose_nothing_they_were_told_is_accepted():
    ring, rng = Ring(slots=3), random.Random(5)
    accepted, target = Word(ring.words, 1), 40

    def write():
        writer = ring.writer()
        while True:
            number = accepted.value + 1
            if writer.write(frame(number)):
                accepted.value = number

    reader, got, kills = ring.reader(), [], 0
    while kills < target:
        with Child(write) as writer:
            end = time.monotonic() + rng.uniform(0, 0.006)
            while time.monotonic() < end:
                got += [number_of(body) for body in reader.read_all()]
            writer.kill()
            kills += 1
    got += [number_of(body) for body in reader.read_all()]
    write_all(ring, [accepted.value + 1])
    got += [number_of(body) for body in reader.read_all()]
    again = sum(a == b for a, b in itertools.pairwise(got))  # killed between `write` and the note of it
    assert sorted(set(got)) == list(range(1, accepted.value + 2))
    assert got == sorted(got)
    assert again <= kills
    assert accepted.value > target


def test_readers_killed_at_random_go_on_where_the_last_one_was():
    """What a reader had taken when it died is gone with it; nothing else is, and nothing comes twice."""
    ring, rng, frames, kills = Ring(slots=3), random.Random(6), 20_000, 0
    last, lost = Word(ring.words, 1), Word(ring.words, 2)

    def read():
        reader = ring.reader()
        while last.value < frames:
            body = reader.wait(5)
            number = number_of(body)
            assert number > last.value
            lost.value += number - last.value - 1
            last.value = number

    with Child(lambda: write_all(ring, range(1, frames + 1))) as writer:
        while last.value < frames:
            with Child(read) as reader:
                if kills < 40:
                    time.sleep(rng.uniform(0, 0.01))
                    reader.kill()
                    kills += 1
                else:
                    assert reader.wait() == 0
        assert writer.wait() == 0
    assert lost.value <= kills


def test_a_reader_that_starts_late_skips_what_was_written_before():
    ring = Ring(slots=3)
    writer = ring.writer()
    for number in (1, 2, 3):
        assert writer.write(frame(number))
    assert not writer.write(frame(4))
    reader = ring.reader()
    reader.skip_to_end()
    assert reader.read() is None
    assert writer.write(frame(4))
    assert reader.read() == frame(4)


# ---- a writer without end


def test_reading_all_ends_though_the_writer_does_not():
    """A reader inside the engine must come back however fast the draft writes."""
    ring = Ring(slots=4)
    writer, reader, taken = ring.writer(), ring.reader(), 0
    assert writer.write(frame(1))
    for body in reader.read_all():
        assert number_of(body)
        assert writer.write(frame(taken + 2))
        taken += 1
        assert taken < 1000
    assert taken >= 1


# ---- orders


def table(rows: int = 4) -> OrderTable:
    return OrderTable(memoryview(bytearray(64 + rows * ORDER_ROW.itemsize)), 64, rows)


def test_an_order_is_read_as_it_was_written():
    orders = table()
    assert orders.read(2) is None
    orders.write(2, session=2**63, order=2**40, steps=5, window=3, lease_ms=700)
    row = orders.read(2)
    assert [int(row[name]) for name in ("session", "order", "steps", "window", "lease_ms")] == [2**63, 2**40, 5, 3, 700]
    assert orders.read(1) is None
    assert orders.read(3) is None
    orders.write(2, session=9, order=1, steps=0, window=1, lease_ms=1)
    assert int(orders.read(2)["session"]) == 9
    orders.clear()
    assert [orders.read(slot) for slot in range(4)] == [None] * 4


@pytest.mark.parametrize("slot", [-1, 4, 2**31])
def test_a_slot_out_of_range_is_refused(slot):
    orders = table()
    with pytest.raises(ValueError, match=r"not in 0\.\.3"):
        orders.read(slot)
    with pytest.raises(ValueError, match=r"not in 0\.\.3"):
        orders.write(slot, 1, 1, 1, 1, 1)


def test_any_torn_order_reads_as_none():
    memory = bytearray(64)
    orders = OrderTable(memoryview(memory), 0, 1)
    orders.write(0, 1, 10, 4, 1, 100)
    old = bytes(memory)
    orders.write(0, 1, 11, 5, 2, 200)
    new = bytes(memory)
    for cut in range(1, 64):
        for mixed in (old[:cut] + new[cut:], new[:cut] + old[cut:]):
            memory[:] = mixed
            row = orders.read(0)
            assert row is None or mixed in (old, new)


def test_no_torn_order_is_read_while_another_process_writes():
    ring, orders_written = Ring(), 200_000
    orders = OrderTable(ring.memory, ring.area.start, 1)

    def write():
        for n in range(1, orders_written):
            orders.write(0, n, n, n % 9, n % 7, n % 1000)

    with Child(write) as writer:
        read = last = 0
        while read < 20_000:
            row = orders.read(0)
            if row is not None:
                n = int(row["order"])
                assert row.tolist()[2:7] == (n, n, n % 9, n % 7, n % 1000)
                assert n >= last
                last = n
                read += 1
        writer.kill()
    assert last > 1


def test_the_order_version_passes_over_zero():
    """Zero means empty; a busy pair writes 2**32 orders in two days."""
    orders = table()
    orders._version = 2**32 - 2
    for order in (1, 2, 3):
        orders.write(0, 1, order, 1, 1, 1)
        assert int(orders.read(0)["order"]) == order
