"""The channel between two processes that are stopped, killed and restarted, and a draft that says all it says wrongly.

`make soak` runs `stress` with a million frames.
"""

import contextlib
import mmap
import os
import random
import signal
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from channel_kit import Child, Ring, shared_folder, until
from specdec.channel import futex, rings
from specdec.channel.layout import PROPOSAL_HEAD, Layout
from specdec.channel.rings import RingReader, RingWriter, Word
from specdec.channel.segment import Role, Segment
from specdec.draft.engine import DraftEngine
from specdec.telemetry import DraftMetrics
from specdec.verifier import link
from specdec.verifier.link import Counts
from test_link import FakeDraft, FakeEcho, Pair, answer_of, step

NOISE = random.Random(1).randbytes(4096)
# A segment's rings, and rings of so many slots; the share of all frames that goes each way.
WAYS = {"outcomes": 0.3, "proposals": 0.3, 1: 0.03, 2: 0.07, 3: 0.1, 4: 0.2}
FRAMES = 100_000  # over all ways
EVENTS_A_WAY = 24  # stops and kills, in the test


class Ends(NamedTuple):
    """A ring as its two processes see it: each takes its end in the process that calls for it."""

    name: str
    read_word: Word
    bell: Word
    writer: "type[RingWriter] | object"
    reader: "type[RingReader] | object"
    joins_late: bool  # its reader passes over what was there before it, as the draft does


@contextlib.contextmanager
def ends_of(way: str | int) -> Iterator[Ends]:
    """The ring of this way: of a real segment whose roles the processes take and lose, or of so many slots."""
    if isinstance(way, int):
        ring = Ring(way)
        yield Ends(f"{way} slots", ring.read_word, ring.bell, ring.writer, ring.reader, joins_late=way % 2 == 0)
        return
    writes, reads = (Role.ENGINE, Role.DRAFT) if way == "outcomes" else (Role.DRAFT, Role.ENGINE)
    with shared_folder() as folder, Segment.create(folder / "specdec-stress", Layout(4, 8, 512)) as owner:
        _, read, bell = owner._ring(way)
        yield Ends(
            way,
            owner.word(read),
            owner.bell(bell),
            lambda: _attach(owner.path, writes).writer(way),
            lambda: _attach(owner.path, reads).reader(way),
            joins_late=way == "outcomes",
        )


_attached: list[Segment] = []  # for as long as the process lives


def _attach(path: Path, role: Role) -> Segment:
    _attached.append(Segment.attach(path, role))
    return _attached[-1]


class Said(NamedTuple):
    """What the chain of readers has seen, noted as one after each frame."""

    number: int = 0  # the newest frame's
    sequence: int = 0  # the slot number it came under
    frames: int = 0
    passed: int = 0  # slot numbers that no reader has handed on, each explained where it happened
    missing: int = 0  # frame numbers that never came
    raised: int = 0
    garbage: int = 0


class Notes:
    """Words that both processes and the test share. A process killed at any moment leaves them whole."""

    def __init__(self, frames: int) -> None:
        words = np.frombuffer(memoryview(mmap.mmap(-1, mmap.PAGESIZE)), np.uint64)
        self.came = memoryview(mmap.mmap(-1, frames + 1))  # a byte a number, set by the reader
        self.begun, self.accepted, self.dropped = Word(words, 0), Word(words, 1), Word(words, 2)  # the writer's
        self._version, self._records = Word(words, 8), words[16:48].reshape(2, 16)

    @property
    def said(self) -> Said:
        return Said(*self._records[self._version.value % 2].tolist()[: len(Said._fields)])

    @said.setter
    def said(self, said: Said) -> None:
        self._records[(self._version.value + 1) % 2][: len(said)] = said
        self._version.value = self._version.value + 1  # one store: before it the old note holds, after it the new one


class Broken(Exception):
    """What a reader's code raises in these tests."""


class FakeFailingZlib:
    """A checksum that raises now and then: the reader fails in the middle of a frame."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def crc32(self, *arguments) -> int:
        if self._rng.random() < 0.001:
            raise Broken
        return zlib.crc32(*arguments)


def frame(number: int) -> bytes:
    """The body of this number: a length, a start and bytes that all follow from it."""
    start = number * 31 % 3907
    return struct.pack("<Q", number) + NOISE[start : start + number * 7 % 180]


def write(ends: Ends, notes: Notes, frames: int, seed: int) -> None:
    """Writes on from where the last writer was, with some wake-ups lost."""
    rng, wake, writer, tries = random.Random(seed), futex.wake, ends.writer(), 0

    def wake_or_not(address: int) -> None:
        if rng.random() < 0.002:
            notes.dropped.value += 1
        else:
            wake(address)

    futex.wake = wake_or_not
    while (number := notes.begun.value + 1) <= frames:
        body = frame(number)
        while writer.full:
            tries += 1
            if tries % 50 == 0:
                time.sleep(0.00002)  # the reader may have this processor only
        notes.begun.value = number
        assert writer.write(body)
        notes.accepted.value = number


def read(ends: Ends, notes: Notes, frames: int, seed: int) -> None:
    """Reads on from where the last reader was. Fails if anything is torn, doubled, reordered or lost unexplained."""
    rings.zlib = FakeFailingZlib(random.Random(seed))
    before = ends.read_word.value
    reader, seen = ends.reader(), notes.said
    assert ends.joins_late or before - seen.sequence <= 1, "the reader before this one took more than it could hold"
    if ends.joins_late:
        reader.skip_to_end()
    explained, garbage = ends.read_word.value - seen.sequence, 0
    while seen.number < frames:
        try:
            body = reader.wait(1)
        except Broken:
            seen = seen._replace(raised=seen.raised + 1)
            continue  # what it was reading comes again
        explained += reader.garbage - garbage
        seen = seen._replace(garbage=seen.garbage + reader.garbage - garbage)
        garbage = reader.garbage
        if body is None:
            continue
        (number,) = struct.unpack_from("<Q", body)
        assert body == frame(number), "torn"
        assert number > seen.number, "doubled or reordered"
        sequence = ends.read_word.value
        passed, missing = sequence - seen.sequence - 1, number - seen.number - 1
        assert passed == explained, "frames were lost"
        explained = 0
        notes.came[number] = 1
        seen = Said(
            number,
            sequence,
            seen.frames + 1,
            seen.passed + passed,
            seen.missing + missing,
            seen.raised,
            seen.garbage,
        )
        notes.said = seen


class Peer(Child):
    """One of the two processes."""

    @property
    def running(self) -> bool:
        """Whether it has not ended by itself, as a reader does that has found something wrong."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


class Outcome(NamedTuple):
    """One way's run."""

    way: str
    frames: int
    came: int
    kills: int
    stops: int
    explained: int  # slots passed over by those who joined late or died with a frame in hand, or given up as garbage
    raised: int
    dropped: int
    seconds: float


def stress(way: str | int, frames: int, seed: int, events: int = EVENTS_A_WAY) -> Outcome:
    """`frames` frames from one process to another, both stopped, killed and started again at random moments, `events`
    times. Fails on the first frame that is torn, doubled, reordered, or lost without an explanation."""
    rng, notes, start = random.Random(f"{seed} {way}"), Notes(frames), time.monotonic()
    kills = stops = 0
    doubtful = set()  # killed in `write`: such a frame may have come or not

    with ends_of(way) as ends, contextlib.ExitStack() as stack:

        def begin(work) -> Peer:
            own = rng.randrange(2**32)
            return stack.enter_context(Peer(lambda: work(ends, notes, frames, own)))

        now = {work: begin(work) for work in (write, read)}
        for at in sorted(rng.sample(range(frames * 9 // 10), events)):
            end = time.monotonic() + 20
            while notes.accepted.value < at:
                assert time.monotonic() < end, "nothing moves"
                assert all(child.running for child in now.values()), "it failed by itself"
                time.sleep(0.0002)
            time.sleep(rng.uniform(0, 0.001))
            work, fate = rng.choice((write, read)), rng.random()
            if fate < 0.5:
                now[work].send(signal.SIGSTOP)
                time.sleep(rng.choice((0.0005, 0.002, 0.002, 0.03)))
                stops += 1
                if fate < 0.25:
                    now[work].send(signal.SIGCONT)
                    continue
            now[work].kill()
            kills += 1
            if work is write and notes.begun.value != notes.accepted.value:
                doubtful.add(notes.begun.value)
            now[work] = begin(work)
        assert now[read].wait(60) == 0
        assert now[write].wait(60) == 0
        said = notes.said
        assert (said.number, said.frames + said.missing) == (frames, frames)
        assert said.sequence == ends.bell.value == ends.read_word.value
        unseen = sum(not notes.came[number] for number in doubtful)
        assert said.passed <= said.missing <= said.passed + unseen, "what `write` had taken did not come"
        assert frames - unseen <= ends.bell.value <= frames
        if not ends.joins_late:
            assert said.passed <= kills + said.garbage
    seconds = time.monotonic() - start
    return Outcome(ends.name, frames, said.frames, kills, stops, said.passed, said.raised, notes.dropped.value, seconds)


@pytest.mark.parametrize("way", WAYS)
def test_stopped_killed_and_restarted_nothing_is_torn_doubled_reordered_or_lost(way):
    outcome = stress(way, int(FRAMES * WAYS[way]), seed=1)
    assert outcome.kills >= EVENTS_A_WAY / 3
    assert outcome.came > outcome.frames * 0.9
    assert outcome.raised > 0


# ---- a draft whose proposals come twice, late, out of order, for others, or are no proposals


class FakeHostileWriter:
    """The proposals' writer of a draft that also sends each frame again, later, in another order, or spoilt."""

    def __init__(self, writer: RingWriter, rng: random.Random) -> None:
        self._writer, self._rng = writer, rng
        self._kept: list[bytes] = []

    def write(self, *parts) -> bool:
        body = b"".join(part if isinstance(part, bytes) else part.tobytes() for part in parts)
        fate = self._rng.random()
        if fate < 0.02:
            self._keep(body)  # comes with a later one, or never
            return True
        if fate < 0.10:
            self._writer.write(self._rng.choice((b"", b"\1" * 7, body[:-2], body + b"\0\0\0\0", self._misnamed(body))))
        if fate < 0.20 and self._kept:
            self._writer.write(self._rng.choice(self._kept))
        if fate < 0.02 + 0.20:
            self._keep(body)
        if 0.22 < fate < 0.24:
            time.sleep(LATE_S)
        taken = self._writer.write(body)
        if fate > 0.90:
            self._writer.write(body)
        return taken

    def _keep(self, body: bytes) -> None:
        self._kept = [*self._kept[-20:], body]

    def _misnamed(self, body: bytes) -> bytes:
        """The same for a cycle, a session or an epoch that is over or is yet to come."""
        at, format_, over = self._rng.choice(
            ((0, "<Q", 1), (PROPOSAL_HEAD.itemsize, "<Q", 10**6), (PROPOSAL_HEAD.itemsize + 8, "<I", 1))
        )
        (value,) = struct.unpack_from(format_, body, at)
        spoilt = bytearray(body)
        struct.pack_into(format_, spoilt, at, self._rng.choice(((value - over) % 2**32, value + 10**6)))
        return bytes(spoilt)


LATE_S = 0.08


def test_a_draft_that_answers_twice_late_out_of_order_and_for_others_costs_speed_only(monkeypatch):
    """Sessions end, are preempted and take over slots meanwhile. Every draft that is returned is a checksum of all
    that its session has committed by then, so one of another time, epoch or session would show."""
    monkeypatch.setattr(link, "_LOST_AFTER_S", 2 * LATE_S)
    rng, returned, asked, slots_used = random.Random(12), 0, 0, 0

    def work():
        segment = Segment.attach(pair.path, Role.DRAFT)
        engine = DraftEngine(segment, FakeEcho(), DraftMetrics())
        engine._proposals = FakeHostileWriter(engine._proposals, random.Random(13))
        engine.run()

    with shared_folder() as folder, Pair(folder, Layout(6, 4, 256), deadline_s=LATE_S / 2) as pair, Child(work):
        generation = pair.owner.word("draft.generation")
        assert until(lambda: generation.value)
        for _ in range(700):
            before = set(pair.truth)
            step(pair, rng)
            slots_used += len(set(pair.truth) - before)
            while pair.link._unanswered or time.monotonic() < pair.link._ask_at_s:  # it would not be asked
                time.sleep(0.001)
                pair.link.begin()
            drafts = pair.ask(*pair.truth, steps=4)
            asked += len(pair.truth)
            for session, ids in drafts.items():
                assert ids == answer_of(pair.truth[session], 4)
                returned += 1
        counts = pair.link.counts
    assert slots_used > 10 * 6  # every slot has had many sessions
    assert returned > 0.4 * asked
    assert counts.stale > 20
    assert counts.late > 3
    assert counts.resyncs == 1
    assert returned < asked


@pytest.mark.parametrize("epoch", [0, 2**32 - 1])
def test_epochs_pass_over_their_end_with_the_draft_in_another_process(epoch):
    """2**32 preemptions of one session, the last of them at a run."""

    def work():
        DraftEngine(Segment.attach(pair.path, Role.DRAFT), FakeEcho(), DraftMetrics()).run()

    with shared_folder() as folder, Pair(folder, Layout(4, 4, 64), deadline_s=2) as pair, Child(work):
        assert until(lambda: pair.owner.word("draft.generation").value)
        session, other = pair.open([1, 2, 3]), pair.open([4])
        assert pair.ask(session, other, steps=4) == {s: answer_of(pair.truth[s], 4) for s in (session, other)}
        session.epoch = (epoch - 2) % 2**32
        seen = []
        for i in range(5):
            pair.link.restart(session)
            seen.append(session.epoch)
            pair.truth[session] += [i]
            assert pair.ask(session, other, steps=4) == {s: answer_of(pair.truth[s], 4) for s in (session, other)}
        assert seen == [(epoch - 1 + i) % 2**32 for i in range(5)]
        assert 0 in seen
        assert pair.link.counts == Counts(resyncs=1)


def test_an_answer_of_the_last_epoch_before_the_wrap_is_not_the_new_ones():
    with shared_folder() as folder, Pair(folder, deadline_s=2) as pair:
        session = pair.open()
        session.epoch = 2**32 - 1

        def work():
            draft = FakeDraft(pair.path)
            draft.propose(2, *((session.id, epoch, [token]) for epoch, token in ((2**32 - 1, 5), (0, 6), (1, 7))))
            signal.pause()

        with Child(work):
            assert until(lambda: pair.owner.bell("draft.proposal_bell").value)
            pair.link.begin()  # a draft has joined, which starts an epoch
            assert session.epoch == 0
            assert pair.ask(session) == {session: [6]}
            assert pair.link.counts == Counts(resyncs=1, stale=2)
