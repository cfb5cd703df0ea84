"""draft/engine.py and draft/service.py: outcomes in, proposals out, and the draft's process as it comes and goes."""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import httpx
import numpy as np
import pytest

import specdec
from channel_kit import Child, shared_folder, until
from specdec.channel.layout import (
    AT_LIMIT,
    CLOSE,
    COMMIT,
    OPEN,
    OUTCOME_HEAD,
    OUTCOME_ROW,
    PROPOSAL_HEAD,
    PROPOSAL_ROW,
    PROPOSAL_SLOTS,
    Layout,
)
from specdec.channel.segment import Role, Segment, now_ns, segment_path
from specdec.channel.states import Fed, States, StatesWriter
from specdec.draft.drafters import DraftSession, load_drafter
from specdec.draft.engine import DraftEngine
from specdec.draft.service import memory_gb
from specdec.draft.settings import DraftSettings
from specdec.errors import SettingsError, SetupError, VocabularyMismatch
from specdec.stack import free_ports
from specdec.telemetry import DraftMetrics
from specdec.vocabulary import Vocabulary

SIZES = Layout(max_sessions=4, max_steps=5, frame_tokens=64)


class FakeVerifier:
    """Owner and engine of a segment; the test writes every outcome."""

    def __init__(self, path, sizes=SIZES):
        self.owner = Segment.create(path, sizes)
        self.engine = Segment.attach(path, Role.ENGINE)
        self.writer, self.reader = self.engine.writer("outcomes"), self.engine.reader("proposals")
        self.cycle = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.engine.close()
        self.owner.close()

    def tell(self, *rows):
        """One outcome of (session, epoch, kind, steps, position, tokens) rows. Returns its cycle."""
        self.cycle += 1
        table = np.array([(*fields, len(tokens)) for *fields, tokens in rows], OUTCOME_ROW)
        flat = [token for row in rows for token in row[-1]]
        head = np.zeros(1, OUTCOME_HEAD)
        head[0] = (self.cycle, len(rows), len(flat))
        assert self.writer.write(head, table, np.array(flat, np.int32))
        return self.cycle

    def proposal(self, timeout_s=5):
        """(cycle, [(session, epoch, tokens)]) of the next proposal, or None if none comes."""
        body = self.reader.wait(timeout_s)
        if body is None:
            return None
        head = np.frombuffer(body, PROPOSAL_HEAD, 1)[0]
        at = PROPOSAL_HEAD.itemsize + int(head["rows"]) * PROPOSAL_ROW.itemsize
        ids, rows = np.frombuffer(body, np.int32, head["tokens"], at).tolist(), []
        for session, epoch, count in np.frombuffer(body, PROPOSAL_ROW, head["rows"], PROPOSAL_HEAD.itemsize).tolist():
            if count == AT_LIMIT:
                rows.append((session, epoch, None))
                continue
            rows.append((session, epoch, ids[:count]))
            ids = ids[count:]
        assert not ids
        return int(head["cycle"]), rows


class FakeDrafter:
    """Proposes the session's last token plus 1, plus 2, ...; `fault` replaces that for the next call."""

    def __init__(self):
        self.seen, self.forgotten, self.fault, self.forget_fault = [], [], None, None

    def propose(self, sessions, steps):
        self.seen.append([(s.id, s.epoch, list(s.tokens), k) for s, k in zip(sessions, steps, strict=True)])
        fault, self.fault = self.fault, None
        if fault is not None:
            return fault(sessions, steps)
        return [[s.tokens[-1] + i for i in range(1, k + 1)] for s, k in zip(sessions, steps, strict=True)]

    def forget(self, session):
        self.forgotten.append(session)
        if self.forget_fault:
            raise self.forget_fault


class RunningDraft:
    """The real engine in a thread, with a fake drafter."""

    def __init__(self, path, drafter=None, *, joins=True, **settings):
        self.segment, self.drafter = Segment.attach(path, Role.DRAFT), drafter or FakeDrafter()
        self.metrics, self.joins = DraftMetrics(), joins
        self.engine = DraftEngine(self.segment, self.drafter, self.metrics, **settings)
        self.thread = threading.Thread(target=self.engine.run, daemon=True)

    def __enter__(self):
        generation = self.segment.word("draft.generation")
        before = generation.value
        self.thread.start()
        assert not self.joins or until(lambda: generation.value > before)
        return self

    def __exit__(self, *_):
        self.engine.stop()
        self.thread.join(5)
        assert not self.thread.is_alive()
        self.segment.close()

    def count(self, name):
        return self.metrics.registry.get_sample_value(f"specdec_draft_{name}")


@pytest.fixture(autouse=True)
def _quick_to_stop(monkeypatch):
    monkeypatch.setattr("specdec.draft.engine._IDLE_S", 0.02)  # a thread that is told to stop looks up this often


@pytest.fixture
def verifier():
    with shared_folder() as folder, FakeVerifier(folder / "specdec-p") as made:
        yield made


@pytest.fixture
def draft(verifier):
    with RunningDraft(verifier.owner.path) as made:
        yield made


# ---- outcomes in, proposals out


def test_a_proposal_carries_its_outcomes_cycle_and_epochs(verifier, draft):
    verifier.tell((1, 7, OPEN, 3, 0, [10, 11]), (2, 1, OPEN, 0, 0, [20]), (3, 1, OPEN, 1, 0, [30]))
    assert verifier.proposal() == (1, [(1, 7, [12, 13, 14]), (3, 1, [31])])
    verifier.tell((2, 1, COMMIT, 2, 1, [21, 22]), (1, 7, COMMIT, 0, 2, [15]))
    assert verifier.proposal() == (2, [(2, 1, [23, 24])])
    verifier.tell((1, 7, COMMIT, 1, 3, []))
    assert verifier.proposal() == (3, [(1, 7, [16])])
    assert draft.drafter.seen[1:] == [[(2, 1, [20, 21, 22], 2)], [(1, 7, [10, 11, 15], 1)]]
    assert draft.count("sessions") == 3
    assert until(lambda: draft.count("proposals_total") == 3 and draft.count("tokens_total") == 7)
    assert draft.count("unmatched_rows_total") == 0


def test_nobody_wants_drafts_and_none_are_made(verifier, draft):
    verifier.tell((1, 1, OPEN, 0, 0, [1]))
    verifier.tell((1, 1, COMMIT, 0, 1, [2]))
    verifier.tell((1, 1, CLOSE, 0, 0, []))
    verifier.tell((2, 1, OPEN, 1, 0, [5]))
    assert verifier.proposal() == (4, [(2, 1, [6])])
    assert len(draft.drafter.seen) == 1


@pytest.mark.parametrize(
    "row",
    [
        (9, 1, COMMIT, 2, 0, [5]),  # never opened
        (1, 2, COMMIT, 2, 2, [5]),  # another epoch
        (1, 0, COMMIT, 2, 2, [5]),
        (1, 1, COMMIT, 2, 1, [5]),  # tokens it has already
        (1, 1, COMMIT, 2, 3, [5]),  # tokens missing before it
        (1, 2, OPEN, 2, 4, [5]),  # an epoch that begins in the middle
    ],
)
def test_rows_that_fit_no_session_are_counted_and_ignored(verifier, draft, row):
    verifier.tell((1, 1, OPEN, 0, 0, [1, 2]), (2, 1, OPEN, 0, 0, [8]))
    verifier.tell(row, (2, 1, COMMIT, 1, 1, [9]))
    assert verifier.proposal() == (2, [(2, 1, [10])])  # the others are served
    assert draft.count("unmatched_rows_total") == 1
    verifier.tell((1, 3, OPEN, 1, 0, [4]))
    assert verifier.proposal() == (3, [(1, 3, [5])])  # a new epoch puts it right
    assert draft.count("unmatched_rows_total") == 1


def test_a_frame_that_was_never_whole_is_counted(verifier, draft):
    at = SIZES.outcomes.start
    draft.engine._outcomes._memory = HalfWritten(verifier.engine._memory, at + 16)
    verifier.tell((1, 1, OPEN, 1, 0, [1]))
    verifier.tell((2, 1, OPEN, 1, 0, [2]))
    assert verifier.proposal() == (2, [(2, 1, [3])])
    assert draft.count("garbage_frames_total") == 1


class HalfWritten:
    """Memory in which one byte of the first frame's body never arrives."""

    def __init__(self, memory, missing):
        self._memory, self._missing = memory, missing

    def __getitem__(self, span):
        copy = bytearray(self._memory[span])
        if span.start <= self._missing < span.stop:
            copy[self._missing - span.start] ^= 0xFF
        return copy


# ---- drafters


def broken(sessions, steps):
    raise RuntimeError("as a drafter may")


FAULTS = {
    "raises": broken,
    "too few lists": lambda sessions, steps: [[1]],
    "too many lists": lambda sessions, steps: [[1], [1], [1]],
    "nothing": lambda sessions, steps: None,
    "no tokens": lambda sessions, steps: [[None], [1]],
    "text": lambda sessions, steps: ["ab", "cd"],
    "fractions": lambda sessions, steps: [[1.5], [1]],
    "raises while it is read": lambda sessions, steps: ((1 // 0 for _ in range(2)) for _ in sessions),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_drafter_that_fails_costs_its_cycle_only(verifier, draft, name):
    verifier.tell((1, 1, OPEN, 2, 0, [1]), (2, 1, OPEN, 2, 0, [5]))
    assert verifier.proposal() == (1, [(1, 1, [2, 3]), (2, 1, [6, 7])])
    draft.drafter.fault = FAULTS[name]
    verifier.tell((1, 1, COMMIT, 2, 1, [2]), (2, 1, COMMIT, 2, 1, [6]))
    assert verifier.proposal() == (2, [(1, 1, []), (2, 1, [])])  # an answer all the same: nobody waits for it
    assert draft.count("faults_total") == 1
    verifier.tell((1, 1, COMMIT, 1, 2, []), (2, 1, COMMIT, 1, 2, []))
    assert verifier.proposal() == (3, [(1, 1, [3]), (2, 1, [7])])
    assert draft.count("faults_total") == 1


def test_more_drafts_than_asked_are_cut(verifier, draft):
    draft.drafter.fault = lambda sessions, steps: [range(100), itertools.count(), np.arange(7)]
    verifier.tell((1, 1, OPEN, 2, 0, [1]), (2, 1, OPEN, 3, 0, [1]), (3, 1, OPEN, 65535, 0, [1]))
    assert verifier.proposal() == (1, [(1, 1, [0, 1]), (2, 1, [0, 1, 2]), (3, 1, [0, 1, 2, 3, 4])])
    assert draft.drafter.seen[0][2] == (3, 1, [1], SIZES.max_steps)


def test_tokens_that_no_vocabulary_has_are_marked_as_none(verifier, draft):
    draft.drafter.fault = lambda sessions, steps: [[2**31 - 1, -1, -(2**40)], [4, 2**31, 5], [2**64]]
    verifier.tell(*((number, 1, OPEN, 5, 0, [1]) for number in (1, 2, 3)))
    assert verifier.proposal() == (1, [(1, 1, [2**31 - 1, -1, -1]), (2, 1, [4]), (3, 1, [])])


def test_a_verifier_that_takes_no_proposals_stops_nothing(verifier, draft):
    verifier.tell((1, 1, OPEN, 1, 0, [1]))
    for i in range(2 * PROPOSAL_SLOTS):
        verifier.tell((1, 1, COMMIT, 1, i + 1, [i + 2]))
    assert until(lambda: len(draft.drafter.seen) == 2 * PROPOSAL_SLOTS + 1)
    got = [verifier.proposal() for _ in range(PROPOSAL_SLOTS)]
    assert [cycle for cycle, _ in got] == list(range(1, PROPOSAL_SLOTS + 1))
    assert verifier.proposal(0) is None
    last = verifier.tell((1, 1, COMMIT, 1, 2 * PROPOSAL_SLOTS + 1, []))
    assert verifier.proposal() == (last, [(1, 1, [2 * PROPOSAL_SLOTS + 2])])


def test_every_session_is_forgotten_exactly_once(verifier):
    with RunningDraft(verifier.owner.path) as draft:
        verifier.tell((1, 1, OPEN, 0, 0, [1]), (2, 1, OPEN, 0, 0, [2]), (3, 1, OPEN, 0, 0, [3]))
        verifier.tell((1, 1, CLOSE, 0, 0, []), (1, 1, CLOSE, 0, 0, []), (77, 1, CLOSE, 0, 0, []))
        verifier.tell((1, 1, CLOSE, 0, 0, []), (2, 2, OPEN, 0, 0, [9]), (4, 1, OPEN, 1, 0, [4]))
        assert verifier.proposal() is not None
        assert [(s.id, s.epoch) for s in draft.drafter.forgotten] == [(1, 1), (2, 1)]
    # the drafter outlives the verifier: what it keeps for this one's sessions would never be freed
    assert sorted((s.id, s.epoch) for s in draft.drafter.forgotten) == [(1, 1), (2, 1), (2, 2), (3, 1), (4, 1)]


def test_a_session_told_anew_keeps_what_was_made_of_it(verifier, draft):
    """After a preemption, or when the draft has asked for all: the epoch is new, the text is the same or longer."""
    verifier.tell((1, 1, OPEN, 0, 0, [1, 2]), (2, 1, OPEN, 0, 0, [1, 2]))
    verifier.tell((1, 2, OPEN, 1, 0, [1, 2, 3]), (2, 2, OPEN, 1, 0, [1]), (1, 1, COMMIT, 1, 3, [4]))
    assert verifier.proposal() == (2, [(1, 2, [4]), (2, 2, [2])])
    assert [(s.id, s.tokens) for s in draft.drafter.forgotten] == [(2, [1, 2])]
    verifier.tell((1, 2, COMMIT, 1, 3, [4]))
    assert verifier.proposal() == (3, [(1, 2, [5])])
    assert draft.count("unmatched_rows_total") == 1


def test_a_session_told_anew_in_several_frames_keeps_what_was_made_of_it(verifier, draft):
    long = list(range(100))
    verifier.tell((1, 1, OPEN, 0, 0, long[:60]))
    verifier.tell((1, 1, COMMIT, 0, 60, long[60:90]))
    verifier.tell((1, 2, OPEN, 0, 0, long[:60]))
    verifier.tell((1, 1, COMMIT, 1, 90, [90]))  # of the epoch that is over
    verifier.tell((1, 2, COMMIT, 1, 60, long[60:]))
    assert verifier.proposal() == (5, [(1, 2, [100])])
    verifier.tell((1, 2, COMMIT, 1, 100, [7]))
    assert verifier.proposal() == (6, [(1, 2, [8])])
    assert draft.drafter.forgotten == []
    assert draft.count("unmatched_rows_total") == 1
    verifier.tell((1, 3, OPEN, 0, 0, long[:60]))
    verifier.tell((1, 3, COMMIT, 1, 60, [1]))  # another text after all
    assert verifier.proposal() == (8, [(1, 3, [2])])
    assert [(s.epoch, len(s.tokens)) for s in draft.drafter.forgotten] == [(3, 101)]
    assert draft.drafter.seen[-1] == [(1, 3, [*long[:60], 1], 1)]


def test_a_drafter_that_fails_to_forget_costs_nothing_else(verifier, draft):
    verifier.tell((1, 1, OPEN, 0, 0, [1]), (2, 1, OPEN, 0, 0, [5]))
    draft.drafter.forget_fault = KeyError("as a drafter may")
    verifier.tell((1, 1, CLOSE, 0, 0, []), (2, 1, COMMIT, 1, 1, [6]))
    assert verifier.proposal() == (2, [(2, 1, [7])])
    assert draft.count("faults_total") == 1
    assert draft.count("sessions") == 1


@pytest.mark.parametrize(
    "name", ["", "nosuch", "nosuch.module:Class", "json:Nosuch", "collections:OrderedDict", ":", "a:"]
)
def test_a_drafter_that_is_none_is_refused_by_name(name):
    with pytest.raises(SettingsError, match="--drafter"):
        load_drafter(name)


# ---- joining and leaving


def test_joining_passes_over_what_was_written_before_and_says_so(verifier):
    verifier.tell((1, 1, OPEN, 3, 0, [1]))
    before = now_ns()
    for generation in (1, 2):
        with RunningDraft(verifier.owner.path) as draft:
            assert verifier.owner.word("draft.generation").value == generation
            assert verifier.owner.word("draft.beat_ns").value >= before
            cycle = verifier.tell((2, generation, OPEN, 1, 0, [5]))
            assert verifier.proposal() == (cycle, [(2, generation, [6])])
            assert draft.count("unmatched_rows_total") == 0
            verifier.tell((2, generation, COMMIT, 0, 1, [6]))


def test_an_idle_draft_still_shows_that_it_lives(verifier, draft):
    beat = verifier.owner.word("draft.beat_ns")
    before = beat.value
    assert until(lambda: beat.value > before, 1)


def test_it_spins_after_an_outcome_while_sessions_are_open_and_else_sleeps(verifier, monkeypatch):
    monkeypatch.setattr("specdec.draft.engine._IDLE_S", 0.4)

    def busy(seconds):
        """Share of the time in which the draft's thread kept a processor."""
        before = time.clock_gettime(clock)
        time.sleep(seconds)
        return (time.clock_gettime(clock) - before) / seconds

    with RunningDraft(verifier.owner.path, spin_s=0.3) as draft:
        clock = time.pthread_getcpuclockid(draft.thread.ident)
        assert busy(0.2) < 0.05
        verifier.tell((1, 1, OPEN, 1, 0, [1]))
        assert verifier.proposal()
        spinning = busy(0.15)
        time.sleep(0.3)
        assert busy(0.2) < spinning / 3, "no outcome for long: it sleeps"
        verifier.tell((1, 1, CLOSE, 0, 0, []))
        time.sleep(0.01)
        assert busy(0.15) < spinning / 3, "no session: it sleeps"
    assert spinning > 0.05


def test_the_loop_ends_with_its_verifier(verifier):
    with RunningDraft(verifier.owner.path) as draft:
        verifier.owner.close()
        draft.thread.join(2)
        assert not draft.thread.is_alive()


def test_the_loop_ends_when_another_verifier_has_taken_the_name(verifier):
    with RunningDraft(verifier.owner.path) as draft:
        verifier.owner.path.unlink()
        with Segment.create(verifier.owner.path, SIZES):
            draft.thread.join(2)
            assert not draft.thread.is_alive()


# ---- the process


class DraftProcess:
    """`specdec draft`, as it is started by hand or by Kubernetes."""

    def __init__(self, pair):
        port = free_ports(1)[0]
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "specdec", "draft", "--pair", pair, "--health-port", str(port)]
        env = {**os.environ, "PYTHONPATH": str(Path(specdec.__file__).parents[1])}
        self.process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()

    def readiness(self):
        """(status, body) of /readyz; (0, {}) before it listens."""
        assert self.process.poll() is None
        try:
            answer = httpx.get(self.url + "/readyz", timeout=5, trust_env=False)
        except httpx.TransportError:
            return 0, {}
        return answer.status_code, answer.json()

    def becomes(self, status, reason=""):
        """Waits for a status with a reason that contains `reason`."""

        def met():
            got, body = self.readiness()
            return got == status and (status == 200 or reason in body["reasons"][0])

        return until(met, 15)

    def terminate(self):
        """SIGTERM. Returns (exit code, seconds it took)."""
        start = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(10), time.monotonic() - start


@pytest.fixture
def pair_name():
    name = f"test-{uuid.uuid4().hex[:12]}"
    yield name
    segment_path(name).unlink(missing_ok=True)


def open_files(pid, name):
    """Descriptors of the process whose file has, or had, this name."""
    folder = Path(f"/proc/{pid}/fd")
    return [fd for fd in folder.iterdir() if fd.is_symlink() and name in os.readlink(fd)]


def own_a_segment(path):
    Segment.create(path, SIZES)
    signal.pause()


def test_the_draft_outlives_verifiers_and_joins_the_next(pair_name):
    path = segment_path(pair_name)
    with DraftProcess(pair_name) as draft:
        assert draft.becomes(503, "is the verifier running?")
        with Child(lambda: own_a_segment(path)) as owner:
            assert draft.becomes(200)
            files = len(open_files(draft.process.pid, path.name))
            assert files > 0
            owner.kill()
        assert draft.becomes(503, "gone")
        with FakeVerifier(path) as verifier:  # sweeps the dead one's file
            assert draft.becomes(200)
            assert verifier.owner.word("draft.pid").value == draft.process.pid
            assert until(lambda: verifier.owner.word("draft.generation").value == 1)
            verifier.tell((1, 1, OPEN, 2, 0, [5, 6, 7, 8, 5, 6, 7]))
            assert verifier.proposal() == (1, [(1, 1, [8, 5])])
            with pytest.raises(Exception, match="already is this pair's draft"):
                Segment.attach(path, Role.DRAFT)
            assert len(open_files(draft.process.pid, path.name)) == files  # nothing is left of the first
            code, seconds = draft.terminate()
            assert (code, seconds < 3) == (0, True)
            assert not verifier.owner.alive(Role.DRAFT)


def test_a_second_draft_waits_for_the_first_and_ends_while_it_waits(pair_name):
    path = segment_path(pair_name)

    def be_the_draft():
        kept = Segment.attach(path, Role.DRAFT)
        while kept:
            signal.pause()

    verifier = FakeVerifier(path)
    with verifier, Child(be_the_draft) as first:
        assert until(lambda: verifier.owner.word("draft.pid").value == first.pid)
        with DraftProcess(pair_name) as draft:
            assert draft.becomes(503, "already is this pair's draft")
            first.kill()
            assert draft.becomes(200)
            verifier.owner.close()
            assert draft.becomes(503, "is the verifier running?")
            code, seconds = draft.terminate()
            assert (code, seconds < 3) == (0, True)


# ---- the time between outcomes


class FakeAhead(FakeDrafter):
    """Has three pieces of work after every outcome, and may fail at one."""

    def __init__(self):
        super().__init__()
        self.left, self.pieces, self.ahead_fault = 0, [], None

    def propose(self, sessions, steps):
        self.left = 3
        return super().propose(sessions, steps)

    def ahead(self, sessions):
        self.left -= 1
        self.pieces.append(sorted(session.id for session in sessions))
        if self.ahead_fault:
            raise self.ahead_fault
        return self.left > 0


def test_a_drafter_works_ahead_for_all_sessions_until_it_has_no_more(verifier):
    with RunningDraft(verifier.owner.path, FakeAhead()) as draft:
        verifier.tell((1, 1, OPEN, 2, 0, [5]), (2, 1, OPEN, 0, 0, [6]))
        assert verifier.proposal()
        assert until(lambda: len(draft.drafter.pieces) == 3)
        time.sleep(0.2)
        assert draft.drafter.pieces == [[1, 2]] * 3
        verifier.tell((1, 1, COMMIT, 2, 1, [6]))
        assert verifier.proposal()
        assert until(lambda: len(draft.drafter.pieces) == 6)


def test_an_outcome_comes_before_work_ahead_that_never_ends(verifier):
    with RunningDraft(verifier.owner.path, FakeAhead()) as draft:
        draft.drafter.ahead = draft.engine._ahead = lambda sessions: time.sleep(0.001) or True
        for cycle in range(1, 20):
            verifier.tell((1, 1, OPEN, 2, 0, [5]))
            assert verifier.proposal(1)[0] == cycle
        verifier.owner.close()
        draft.thread.join(5)
        assert not draft.thread.is_alive(), "it saw that its verifier is gone"


def test_work_ahead_that_fails_costs_nothing_else(verifier):
    with RunningDraft(verifier.owner.path, FakeAhead()) as draft:
        draft.drafter.ahead_fault = MemoryError()
        for faults in (1, 2):
            verifier.tell((1, 1, OPEN, 2, 0, [5]))
            assert verifier.proposal()[1] == [(1, 1, [6, 7])]
            assert until(lambda faults=faults: draft.count("faults_total") == faults)
        assert len(draft.drafter.pieces) == 2


# ---- hidden states of the target


def handed(position, *tokens):
    """States whose rows say which token of which position they are."""
    rows = np.array([[position + i, token] for i, token in enumerate(tokens)], np.float32)
    return States(position, tokens, rows, "float32")


def settled(session):
    return [row for states in session.settled() for row in states.rows.tolist()]


def test_states_of_committed_tokens_settle_however_the_prompt_was_cut():
    for cut in (1, 2, 3, 7):
        session = DraftSession(1, 1, [10, 11, 12, 13, 14, 15, 16])
        for at in range(0, 7, cut):
            session.states.append(handed(at, *session.tokens[at : at + cut]))
        assert settled(session) == [[i, 10 + i] for i in range(7)]
        assert settled(session) == []
        assert not session.states


def test_states_after_a_rejected_draft_are_dropped_and_come_anew():
    session = DraftSession(1, 1, [10, 11])
    session.states.append(handed(1, 11, 12, 99, 14))  # drafts 12, 99, 14 were fed
    assert settled(session) == [], "it is not known yet what stands"
    session.tokens += [12, 13]  # 12 was accepted, 13 came from the target
    session.states.append(handed(3, 13, 14))
    assert settled(session) == [[1, 11], [2, 12]]
    session.tokens += [14, 15]
    assert settled(session) == [[3, 13], [4, 14]]


def test_states_whose_next_pass_was_lost_do_not_stand_for_it():
    """At position 3 token 14 was fed after a rejected one, and stands there now after another."""
    session = DraftSession(1, 1, [10, 11])
    session.states.append(handed(1, 11, 99, 14))
    session.tokens += [12, 14, 15]
    assert settled(session) == [[1, 11]]


class FakeHead(FakeDrafter):
    """Reads the states after layers 1, 2 and 5, and writes down those of committed tokens."""

    aux_layers = (1, 2, 5)

    def __init__(self):
        super().__init__()
        self.read = []

    def ahead(self, sessions):
        for session in sessions:
            self.read += [(session.id, *row) for states in session.settled() for row in states.rows.tolist()]
        return False


def hand(verifier, writer, session, position, *tokens):
    states = np.array([[position + i, token] for i, token in enumerate(tokens)], np.float32)
    writer.write([Fed(session, 1, position, len(tokens))], np.array(tokens, np.int32), states)


@pytest.fixture
def with_states(verifier):
    path = verifier.owner.path.with_name("specdec-states")
    with FakeVerifier(path, replace(SIZES, states_mb=1)) as made, Segment.attach(path, Role.WORKER) as worker:
        yield made, worker


def test_states_reach_their_session_before_it_is_told_and_while_nobody_asks(with_states):
    verifier, worker = with_states
    with RunningDraft(verifier.owner.path, FakeHead()) as draft:
        writer = StatesWriter(worker, (1, 2, 5), 2, "float32")
        hand(verifier, writer, 7, 0, 10, 11)
        time.sleep(0.1)
        verifier.tell((7, 1, OPEN, 0, 0, [10, 11, 12]))
        assert until(lambda: draft.drafter.read == [(7, 0, 10), (7, 1, 11)])
        hand(verifier, writer, 7, 2, 12)
        hand(verifier, writer, 6, 0, 5)  # has ended, or never was
        assert until(lambda: draft.drafter.read[2:] == [(7, 2, 12)])
        assert not draft.engine._states._early


def test_states_nobody_takes_fill_no_more_memory_than_the_ring_and_starve_no_other_session(with_states):
    verifier, worker = with_states
    with RunningDraft(verifier.owner.path, FakeHead()) as draft:
        draft.drafter.ahead = draft.engine._ahead = lambda sessions: False
        writer = StatesWriter(worker, (1, 2, 5), 500, "float32")
        verifier.tell((1, 1, OPEN, 0, 0, [1]), (2, 1, OPEN, 0, 0, [1]))
        assert until(lambda: len(draft.engine._sessions) == 2)

        def write(session, position):
            while writer.skip(0):
                time.sleep(0.001)
            writer.write([Fed(session, 1, position, 1)], np.ones(1, np.int32), np.ones((1, 500), np.float32))

        for position in range(700):
            write(1, position)
        write(2, 0)
        one, two = draft.engine._sessions
        assert until(lambda: [states.position for states in two.states] == [0])
        assert one.states[-1].position == 699, "the oldest go first"
        assert 0.9 * 2**20 < sum(states.rows.nbytes for states in one.states) <= 2**20
        verifier.tell((1, 1, COMMIT, 0, 1, [2]))
        assert until(lambda: draft.count("given_up_states_total") == 700 - len(one.states))


def test_states_past_the_drafters_limit_are_not_kept(with_states):
    class FakeLimitedHead(FakeHead):
        context_limit = 3

    verifier, worker = with_states
    with RunningDraft(verifier.owner.path, FakeLimitedHead()) as draft:
        writer = StatesWriter(worker, (1, 2, 5), 2, "float32")
        verifier.tell((1, 1, OPEN, 0, 0, [1, 2, 3]), (2, 1, OPEN, 0, 0, [1, 2]))
        hand(verifier, writer, 1, 0, 1, 2, 3)
        hand(verifier, writer, 2, 0, 1, 2)
        assert until(lambda: draft.drafter.read == [(2, 0, 1), (2, 1, 2)])


def test_the_verifier_knows_whether_the_draft_reads_states(with_states):
    verifier, _ = with_states
    wanted = verifier.owner.word("draft.reads_states")
    with RunningDraft(verifier.owner.path, FakeHead()):
        assert wanted.value == 1
    assert wanted.value == 0
    with RunningDraft(verifier.owner.path):
        assert wanted.value == 0


def test_after_a_frame_was_lost_all_is_forgotten_and_told_anew(verifier, draft):
    """Else a session whose end was in that frame would stay for ever."""
    verifier.tell((1, 1, OPEN, 0, 0, [1]), (2, 1, OPEN, 0, 0, [2]))
    assert until(lambda: len(draft.engine._sessions) == 2)
    generation = verifier.owner.word("draft.generation").value
    draft.engine._outcomes.garbage += 1  # as its reader counts a frame that was never whole
    assert until(lambda: verifier.owner.word("draft.generation").value > generation)
    assert [session.id for session in draft.drafter.forgotten] == [1, 2]
    assert len(draft.engine._sessions) == 0


class AcceleratorError(RuntimeError):
    """Named as torch's, which says that nothing works on the device any more."""


def test_a_lost_device_ends_the_draft_so_that_it_is_started_again(verifier):
    class FakeLostDevice(FakeDrafter):
        def propose(self, sessions, steps):
            raise AcceleratorError("device-side assert triggered")

    with Segment.attach(verifier.owner.path, Role.DRAFT) as segment:
        generation = segment.word("draft.generation")
        engine = DraftEngine(segment, FakeLostDevice(), DraftMetrics())
        telling = threading.Timer(0.3, verifier.tell, ((1, 1, OPEN, 2, 0, [1]),))
        telling.start()
        with pytest.raises(AcceleratorError):
            engine.run()
        assert generation.value
        telling.join()


def test_a_head_needs_a_verifier_that_hands_over_its_layers(verifier, with_states):
    with Segment.attach(verifier.owner.path, Role.DRAFT) as segment, pytest.raises(SetupError, match="--head"):
        DraftEngine(segment, FakeHead(), DraftMetrics()).run()
    other, worker = with_states
    hand_soon = threading.Timer(0.3, hand, (other, StatesWriter(worker, (1, 2, 6), 2, "float32"), 7, 0, 10, 11))
    refusal = pytest.raises(SetupError, match="after layers 1,2,6, the head reads 1,2,5")
    with Segment.attach(other.owner.path, Role.DRAFT) as segment, refusal:
        hand_soon.start()
        DraftEngine(segment, FakeHead(), DraftMetrics()).run()
    hand_soon.join()


# ---- its settings


def test_a_share_of_the_memory_is_of_what_the_process_may_have(tmp_path, monkeypatch):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr("specdec.draft.service._CONTAINER_LIMIT", limit)
    machine_gb = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    quarter = DraftSettings(memory_fraction=0.25)
    assert memory_gb(DraftSettings(memory_gb=3)) == 3
    assert memory_gb(quarter) == pytest.approx(machine_gb / 4)
    limit.write_text("max\n")
    assert memory_gb(quarter) == pytest.approx(machine_gb / 4)
    limit.write_text(f"{2**30}\n")
    assert memory_gb(quarter) == 0.25


# ---- what the drafter says of itself


class FakeLimited(FakeDrafter):
    """Follows a session up to ten tokens, drafts included."""

    context_limit = 10


def test_a_session_that_outgrows_the_draft_is_told_so_and_others_are_served(verifier):
    with RunningDraft(verifier.owner.path, FakeLimited()) as draft:
        verifier.tell(
            (1, 1, OPEN, 4, 0, list(range(5))), (2, 1, OPEN, 4, 0, list(range(8))), (3, 1, OPEN, 4, 0, [7] * 10)
        )
        _, rows = verifier.proposal(5)
        assert rows == [(1, 1, [5, 6, 7, 8]), (2, 1, [8, 9]), (3, 1, None)]
        assert [len(tokens) for _, _, tokens, _ in draft.drafter.seen[0]] == [5, 8]
        verifier.tell((3, 1, COMMIT, 4, 10, [7]))
        assert verifier.proposal(5)[1] == [(3, 1, None)]
        assert len(draft.drafter.seen) == 1, "nothing was asked of the drafter"


def test_a_proposal_ends_where_the_target_has_no_such_token(verifier):
    verifier.engine.vocabulary = 10, 12345
    with RunningDraft(verifier.owner.path):
        verifier.tell((1, 1, OPEN, 4, 0, [1, 2, 7]))
        assert verifier.proposal(5)[1] == [(1, 1, [8, 9])]


class FakeTokenizerDrafter(FakeDrafter):
    vocabulary: ClassVar = {f"token{i}": i for i in range(300)}


def test_nothing_is_drafted_before_the_targets_vocabulary_is_known_to_be_the_drafters(verifier):
    with RunningDraft(verifier.owner.path, FakeTokenizerDrafter(), joins=False) as draft:
        time.sleep(0.1)
        assert draft.segment.word("draft.generation").value == 0
        verifier.engine.vocabulary = Vocabulary.of(FakeTokenizerDrafter.vocabulary)
        assert until(lambda: draft.segment.word("draft.generation").value == 1)
        verifier.tell((1, 1, OPEN, 2, 0, [1]))
        assert verifier.proposal(5)[1] == [(1, 1, [2, 3])]


def test_a_drafter_with_other_tokens_refuses_to_serve_unless_it_is_trusted(verifier):
    verifier.engine.vocabulary = Vocabulary.of({f"token{i}": i ^ 1 for i in range(300)})
    with Segment.attach(verifier.owner.path, Role.DRAFT) as segment:
        with pytest.raises(VocabularyMismatch, match="300"):
            DraftEngine(segment, FakeTokenizerDrafter(), DraftMetrics()).run()
        assert segment.word("draft.generation").value == 0
    with RunningDraft(verifier.owner.path, FakeTokenizerDrafter(), trust_vocabulary=True):
        verifier.tell((1, 1, OPEN, 2, 0, [1]))
        assert verifier.proposal(5)[1] == [(1, 1, [2, 3])]


def test_a_draft_that_waits_for_the_vocabulary_stops_and_leaves_when_told(verifier):
    with RunningDraft(verifier.owner.path, FakeTokenizerDrafter(), joins=False):
        time.sleep(0.05)
