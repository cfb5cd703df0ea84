"""verifier/link.py: orders, the exchange with the draft, verdicts. A real segment; drafts and targets are scripted."""

import random
import signal
import struct
import threading
import time
import zlib
from collections import namedtuple
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from channel_kit import Child, Ring, shared_folder, until
from specdec.channel import layout as layout_module
from specdec.channel.layout import (
    AT_LIMIT,
    BUDGET,
    CLOSE,
    CLOSED,
    COMMIT,
    CYCLE,
    DRAFT_DOWN,
    DRAFT_LATE,
    DRAFT_LIMIT,
    DRAFT_SHORT,
    NONE,
    OPEN,
    OPENED_ROW,
    OUTCOME_HEAD,
    OUTCOME_ROW,
    OUTCOME_SLOTS,
    PREFILL,
    PROPOSAL_HEAD,
    PROPOSAL_ROW,
    PROPOSAL_SLOTS,
    REQUEST_ID_BYTES,
    STANDING,
    VERDICT_HEAD,
    VERDICT_ROW,
    VERDICT_SLOTS,
    Layout,
)
from specdec.channel.rings import Word
from specdec.channel.segment import Role, Segment, now_ns
from specdec.draft.engine import DraftEngine
from specdec.telemetry import DraftMetrics
from specdec.verifier.link import Counts, Deadline, Link

VOCAB = 1000
SMALL = Layout(max_sessions=4, max_steps=5, frame_tokens=64)
FOREVER_MS = 1_000_000
DEADLINE_S = 0.1
VerdictRow = namedtuple("VerdictRow", VERDICT_ROW.names)
OpenedRow = namedtuple("OpenedRow", OPENED_ROW.names)
OutcomeRow = namedtuple("OutcomeRow", ["session", "epoch", "kind", "steps", "position", "tokens"])


class Pair:
    """A segment with its three roles in this process: the test is control and target, and scripts the draft."""

    def __init__(self, folder, layout=SMALL, deadline_s=DEADLINE_S):
        self.path = folder / "specdec-p"
        self.owner = Segment.create(self.path, layout)
        self.engine = Segment.attach(self.path, Role.ENGINE)
        self.link = Link(self.engine, VOCAB, deadline=Deadline(floor_s=deadline_s, cap_s=deadline_s))
        self.orders, self.reader = self.owner.orders, self.owner.reader("verdicts")
        self.lost = 0
        self.truth = {}  # session: its tokens
        self._next_order = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.engine.close()
        self.owner.close()

    def route(self, for_ms=FOREVER_MS):
        """As if a router had said it lives, `for_ms` from now."""
        self.owner.word("control.router_until_ns").value = now_ns() + for_ms * 1_000_000

    def open(self, tokens=(1, 2, 3), request_id="chatcmpl-specdec-1"):
        tokens = list(tokens)
        session = self.link.open(request_id, tokens, len(tokens))
        if session is not None:
            self.truth[session] = tokens
        return session

    def close(self, session):
        del self.truth[session]
        self.link.close(session)

    def order(self, session, steps, window=1, lease_ms=FOREVER_MS, order=None, number=None, slot=None):
        self._next_order += 1
        order = order or self._next_order
        slot = session.slot if slot is None else slot
        self.orders.write(slot, session.id if number is None else number, order, steps, window, lease_ms)
        return order

    def ask(self, *sessions, steps=3):
        """One cycle's exchange under an order of `steps` each. Returns the drafts that came."""
        self.route()
        self.link.begin()
        for session in sessions:
            self.order(session, steps)
        wanted = {session: self.link.admit(session) for session in sessions}
        assert set(wanted.values()) <= {min(steps, self.engine.layout.max_steps)}
        return self.link.exchange(wanted)

    def cycle(self, wanted=None):
        """One cycle of every session admitted, in which all drafts stand. Returns {session: (k, drafts)}."""
        self.link.begin()
        admitted = {s: self.link.admit(s) for s in self.truth}
        admitted = {s: k for s, k in admitted.items() if k is not None}
        drafts = self.link.exchange(admitted)
        for session in admitted:
            ids = drafts.get(session, [])
            self.link.scheduled(session, len(ids))
            self.truth[session] += [*ids, 7]
            self.link.committed(session, len(ids) + 1, len(ids) + 1)
        self.link.finish()
        return {session: (k, drafts.get(session, [])) for session, k in admitted.items()}

    def verdicts(self):
        """(opened, rows) of every frame that has come."""
        opened, rows = [], []
        while (body := self.reader.read()) is not None:
            head = np.frombuffer(body, VERDICT_HEAD, 1)[0]
            self.lost += int(head["lost"])
            at = VERDICT_HEAD.itemsize + int(head["opened"]) * OPENED_ROW.itemsize
            opened += [
                OpenedRow(*r) for r in np.frombuffer(body, OPENED_ROW, head["opened"], VERDICT_HEAD.itemsize).tolist()
            ]
            rows += [VerdictRow(*r) for r in np.frombuffer(body, VERDICT_ROW, head["rows"], at).tolist()]
            assert int(head["batch"]) <= int(head["rows"])
        return opened, rows


class FakeDraft:
    """A draft whose every frame the test writes."""

    def __init__(self, path):
        self.segment = Segment.attach(path, Role.DRAFT)
        self.reader, self.writer = self.segment.reader("outcomes"), self.segment.writer("proposals")
        self.reader.skip_to_end()
        self.segment.word("draft.generation").value += 1

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.segment.close()

    def outcomes(self):
        """Every row told since the last call."""
        rows = []
        while (body := self.reader.read()) is not None:
            head = np.frombuffer(body, OUTCOME_HEAD, 1)[0]
            at = OUTCOME_HEAD.itemsize + int(head["rows"]) * OUTCOME_ROW.itemsize
            ids = np.frombuffer(body, np.int32, head["tokens"], at).tolist()
            for *fields, count in np.frombuffer(body, OUTCOME_ROW, head["rows"], OUTCOME_HEAD.itemsize).tolist():
                rows.append(OutcomeRow(*fields, ids[:count]))
                ids = ids[count:]
            assert not ids
        return rows

    def propose(self, cycle, *rows, drafting_us=0):
        """A proposal of (session, epoch, tokens) rows; None for tokens says that the draft is at its limit."""
        table = np.array(
            [(number, epoch, AT_LIMIT if ids is None else len(ids)) for number, epoch, ids in rows], PROPOSAL_ROW
        )
        flat = np.array([t for _, _, ids in rows for t in ids or ()], np.int32)
        assert self.raw(cycle, len(rows), len(flat), table.tobytes() + flat.tobytes(), drafting_us)

    def raw(self, cycle, rows, tokens, rest=b"", drafting_us=0):
        """A proposal whose head says so many rows and tokens, whatever follows."""
        head = np.zeros(1, PROPOSAL_HEAD)
        head[0] = (cycle, rows, tokens, drafting_us)
        return self.writer.write(head, rest)


@pytest.fixture
def folder():
    with shared_folder() as path:
        yield path


@pytest.fixture
def pair(folder):
    with Pair(folder) as made:
        yield made


@pytest.fixture
def draft(pair):
    with FakeDraft(pair.path) as made:
        pair.link.begin()  # the link notices it
        pair.link.cycle = 0
        yield made


def took(work, *arguments):
    start = time.monotonic()
    work(*arguments)
    return time.monotonic() - start


# ---- orders


def test_an_order_is_adopted_if_it_is_newer_and_for_this_session(pair):
    pair.route()
    session, other = pair.open(), pair.open()
    pair.order(session, 3, window=9, order=10)
    pair.link.begin()
    assert pair.link.admit(session) == 3
    assert pair.link.admit(other) is None  # the row is not in its slot

    pair.order(session, 1, window=9, order=10)  # the same again
    assert pair.link.admit(session) == 3
    pair.order(session, 1, window=9, order=9)  # older
    assert pair.link.admit(session) == 3
    pair.order(session, 1, window=9, order=99, number=session.id + 5)  # for the slot's next session
    assert pair.link.admit(session) == 3
    pair.order(session, 4, window=9, order=11)
    assert pair.link.admit(session) == 4
    pair.order(session, 60_000, window=9, order=12)  # more than the pair has room for
    assert pair.link.admit(session) == SMALL.max_steps
    assert (session.order, session.remaining) == (12, 9)


def test_a_torn_order_leaves_the_older_one_in_force(pair):
    pair.route()
    session = pair.open()
    pair.order(session, 3, window=9)
    pair.link.begin()
    assert pair.link.admit(session) == 3
    pair.order(session, 1, window=9)
    pair.owner._memory[SMALL.orders_start + 64 * session.slot + 30] ^= 1
    assert pair.link.admit(session) == 3


def test_a_slots_next_session_does_not_run_under_the_last_ones_order(pair):
    pair.route()
    first = pair.open()
    pair.order(first, 3, window=9)
    pair.close(first)
    second = pair.open()
    assert second.slot == first.slot
    pair.link.begin()
    assert pair.link.admit(second) is None
    assert second.order == 0


def test_a_window_counts_down_to_a_hold_and_the_next_order_ends_it(pair):
    pair.route()
    session = pair.open()
    first = pair.order(session, 2, window=3)
    for _ in range(3):
        assert pair.cycle() == {session: (2, [])}
    for _ in range(5):
        assert pair.cycle() == {}
    second = pair.order(session, 0, window=1)
    assert pair.cycle() == {session: (0, [])}
    assert pair.cycle() == {}
    rows = [row for row in pair.verdicts()[1] if row.kind == CYCLE]
    assert [row.order for row in rows] == [first] * 3 + [second]
    assert [row.steps for row in rows] == [2, 2, 2, 0]
    assert pair.link.counts.lapsed_leases == 0


def test_a_window_counts_from_the_last_verdict_its_router_has_read(pair):
    session = pair.open([1, 2, 3])
    pair.route()
    pair.order(session, 2, window=4)

    def run():
        pair.link.begin()
        if (steps := pair.link.admit(session)) is not None:
            pair.link.scheduled(session, steps)
        return steps

    assert [run() for _ in range(3)] == [2, 2, 2]
    pair.orders.write(session.slot, session.id, 1000, 5, 4, FOREVER_MS, 1)  # of three cycles it has read one
    assert [run() for _ in range(3)] == [5, 5, None]
    pair.orders.write(session.slot, session.id, 1001, 1, 4, FOREVER_MS, 0)  # it does not know
    assert [run() for _ in range(5)] == [1, 1, 1, 1, None]


def test_a_router_that_stalled_gets_its_window_again(pair):
    """Cycles under the standing order are nobody's window."""
    session = pair.open([1, 2, 3])
    pair.route()
    pair.order(session, 2, window=2, lease_ms=1)

    def run():
        pair.link.begin()
        if (steps := pair.link.admit(session)) is not None:
            pair.link.scheduled(session, steps)
        return steps

    assert [run(), run()] == [2, 2]
    assert until(lambda: run() == 0)  # the lease has run out
    assert [run() for _ in range(50)] == [0] * 50
    pair.orders.write(session.slot, session.id, 1000, 3, 2, FOREVER_MS, 2)  # it has read both of its verdicts
    assert [run() for _ in range(3)] == [3, 3, None]


def test_where_no_session_may_be_held_a_used_up_window_decodes_plainly(folder):
    with Pair(folder) as pair:
        pair.link._may_hold = False
        session = pair.open()
        pair.route()
        pair.link.begin()
        assert pair.link.admit(session) == 0
        assert session.reason == STANDING
        pair.order(session, 3)
        assert pair.link.admit(session) == 3
        pair.link.scheduled(session, 3)
        assert pair.link.admit(session) == 0
        pair.order(session, 2)
        assert pair.link.admit(session) == 2
        assert pair.link.counts.lapsed_leases == 0


def test_what_was_counted_can_be_read_from_the_segment(pair):
    pair.link.counts.stale = 7
    pair.link.finish()
    assert pair.owner.counts == dict.fromkeys(pair.owner.counts, 0) | {"stale": 7}
    assert set(pair.owner.counts) == {*Counts.__dataclass_fields__, "lost_states"}


def test_a_cycle_that_delivers_nothing_still_has_its_verdict(pair):
    session = pair.open()
    pair.route()
    pair.order(session, 3)
    pair.link.begin()
    assert pair.link.admit(session) == 3
    assert not pair.link.pending(session)
    pair.link.scheduled(session, 2)
    assert pair.link.pending(session)
    pair.link.committed(session, 0, 0)
    assert not pair.link.pending(session)


def test_a_cycle_that_was_admitted_but_not_run_costs_no_window(pair):
    """vLLM may have no room for it in this step."""
    pair.route()
    session = pair.open()
    pair.order(session, 2, window=1)
    for _ in range(3):
        pair.link.begin()
        assert pair.link.admit(session) == 2
    assert pair.cycle() == {session: (2, [])}
    assert pair.cycle() == {}


def test_a_new_order_replaces_what_is_left_of_the_window(pair):
    pair.route()
    session = pair.open()
    pair.order(session, 2, window=5)
    pair.cycle()
    pair.order(session, 1, window=1)
    assert pair.cycle() == {session: (1, [])}
    assert pair.cycle() == {}


def test_a_lapsed_lease_puts_the_session_under_the_standing_order_until_the_next(pair):
    pair.route()
    session = pair.open()
    pair.order(session, 2, window=1, lease_ms=30)
    pair.cycle()
    start = time.monotonic()
    assert pair.cycle() == {}
    assert until(lambda: pair.cycle() == {session: (0, [])})
    assert 0.03 <= time.monotonic() - start < 2
    for _ in range(3):
        assert pair.cycle() == {session: (0, [])}
    assert pair.link.counts.lapsed_leases == 1  # once, not once a cycle
    last = pair.verdicts()[1][-1]
    assert (last.order, last.steps, last.reason) == (0, 0, STANDING)

    order = pair.order(session, 3, window=1)
    assert pair.cycle() == {session: (3, [])}
    assert pair.cycle() == {}
    assert pair.verdicts()[1][-1].order == order
    assert pair.link.counts.lapsed_leases == 1


def test_a_session_without_its_first_order_lapses_too(pair, monkeypatch):
    monkeypatch.setattr("specdec.verifier.link._FIRST_LEASE_NS", 20_000_000)
    pair.route()
    session = pair.open()
    session.lease_ns = 20_000_000
    assert pair.cycle() == {}
    assert until(lambda: pair.cycle() == {session: (0, [])})
    assert pair.link.counts.lapsed_leases == 1


@pytest.mark.parametrize("for_ms", [-1, -FOREVER_MS])
def test_without_a_router_nobody_is_held_and_nobody_speculates(pair, draft, for_ms):
    session = pair.open()
    pair.order(session, 3, window=1)
    pair.route(for_ms)
    for _ in range(3):
        assert pair.cycle() == {session: (0, [])}
    rows = pair.verdicts()[1]
    assert {(row.order, row.reason, row.steps) for row in rows} == {(0, STANDING, 0)}
    assert pair.link.counts.lapsed_leases == 0
    pair.route()
    assert pair.cycle() == {session: (3, [])}  # it is there again, and so is its order


def test_a_router_that_stops_renewing_is_gone_when_its_time_is_over(pair):
    session = pair.open()
    pair.route(30)
    assert pair.cycle() == {}  # held: no order yet
    assert until(lambda: pair.cycle() == {session: (0, [])})
    assert pair.link.counts.lapsed_leases == 0


def test_requests_that_no_router_sent_are_never_held(pair):
    pair.route()
    session = pair.open(request_id="chatcmpl-1234")
    for _ in range(3):
        assert pair.cycle() == {session: (0, [])}
    assert {row.reason for row in pair.verdicts()[1]} == {STANDING}


def test_a_wait_for_orders_ends_with_the_bell_or_its_bound(pair):
    assert 0.05 <= took(pair.link.wait_for_orders, 0.05) < 1
    bell = pair.owner.bell("control.order_bell")
    with Child(lambda: (time.sleep(0.1), bell.ring())):
        assert took(pair.link.wait_for_orders, 20) < 10


# ---- the proposal that is asked for


def test_a_proposal_is_returned_as_far_as_it_was_asked_for(pair, draft):
    one, two, three = pair.open(), pair.open(), pair.open()
    rows = [(two.id, 1, [4, 5, 6, 7, 8]), (one.id, 1, [0, VOCAB - 1]), (three.id, 1, [])]
    draft.propose(1, *rows)
    assert pair.ask(one, two, three) == {one: [0, 999], two: [4, 5, 6], three: []}
    assert (one.reason, two.reason, three.reason) == (DRAFT_SHORT, NONE, DRAFT_SHORT)
    assert [(r.session, r.kind, r.steps, r.tokens) for r in draft.outcomes()] == [
        (session.id, OPEN, 3, [1, 2, 3]) for session in (one, two, three)
    ]
    assert pair.link.counts == Counts(resyncs=1)  # nothing to complain about


def test_a_session_that_outgrew_the_draft_is_not_asked_for_again_and_others_keep_theirs(pair, draft):
    long, short = pair.open(range(40)), pair.open()
    draft.propose(1, (long.id, 1, None), (short.id, 1, [4, 5, 6]))
    assert pair.ask(long, short) == {long: [], short: [4, 5, 6]}
    assert (long.reason, short.reason) == (DRAFT_LIMIT, NONE)
    draft.outcomes()
    for session in (long, short):
        pair.truth[session].append(7)
    draft.propose(2, (short.id, 1, [5, 6, 7]))
    assert pair.ask(long, short) == {short: [5, 6, 7]}
    assert (long.reason, short.reason) == (DRAFT_LIMIT, NONE)
    assert [(r.session, r.tokens) for r in draft.outcomes()] == [(short.id, [7])]  # nor is it told more of it
    assert took(pair.ask, long) < DEADLINE_S
    pair.link.begin()
    pair.link.admit(long)
    pair.link.exchange({long: 0})
    assert long.reason == NONE  # nothing was ordered, so nothing is missing
    pair.link.restart(long)  # a preempted session is a new one to the draft
    draft.propose(pair.link.cycle + 1, (long.id, long.epoch, [1]))
    assert pair.ask(long) == {long: [1]}
    pair.close(long)
    pair.link.begin()
    pair.link.exchange({})
    assert [r.kind for r in draft.outcomes()][-1] == CLOSE
    assert pair.link.counts == Counts(resyncs=1)


def test_a_new_draft_may_follow_further(pair):
    session = pair.open(range(40))
    for ids, drafts, reason in ((None, [], DRAFT_LIMIT), ([4, 5, 6], [4, 5, 6], NONE)):
        with FakeDraft(pair.path) as draft:
            pair.link.begin()
            pair.link.exchange({})
            draft.propose(pair.link.cycle + 1, (session.id, session.epoch, ids))
            assert pair.ask(session) == {session: drafts}
            assert session.reason == reason
        pair.link.begin()


def test_only_those_who_want_drafts_are_waited_for(pair, draft):
    session = pair.open()
    pair.link.begin()
    assert took(pair.link.exchange, {session: 0}) < DEADLINE_S
    assert [(r.kind, r.steps) for r in draft.outcomes()] == [(OPEN, 0)]
    pair.link.begin()
    assert took(pair.link.exchange, {}) < DEADLINE_S
    assert draft.outcomes() == []  # nothing new, nothing said
    assert pair.link.draft_us == 0


def misfits(session, other, cycle):
    """name: (cycle, rows) that must not be returned, though `session` is waiting for cycle `cycle`."""
    return {
        "another session": (cycle, [(session.id + 100, 1, [5])]),
        "a session that did not ask": (cycle, [(other.id, 1, [5])]),
        "session 0": (cycle, [(0, 1, [5])]),
        "session 2**64 - 1": (cycle, [(2**64 - 1, 1, [5])]),
        "an older epoch": (cycle, [(session.id, 0, [5])]),
        "a newer epoch": (cycle, [(session.id, 2, [5])]),
        "an older cycle": (cycle - 1, [(session.id, 1, [5])]),
        "a newer cycle": (cycle + 1, [(session.id, 1, [5])]),
        "cycle 0": (0, [(session.id, 1, [5])]),
        "-1": (cycle, [(session.id, 1, [5, -1])]),
        "the vocabulary's size": (cycle, [(session.id, 1, [VOCAB])]),
        "2**31 - 1": (cycle, [(session.id, 1, [5, 6, 2**31 - 1])]),
        "-2**31": (cycle, [(session.id, 1, [-(2**31)])]),
        "a bad one past what was asked": (cycle, [(session.id, 1, [5, 6, 7, -1])]),
    }


IMPOSSIBLE = ["-1", "the vocabulary's size", "2**31 - 1", "-2**31", "a bad one past what was asked"]


@pytest.mark.parametrize("name", misfits(*[SimpleNamespace(id=0)] * 2, 0))
def test_what_does_not_fit_is_never_returned_and_counted(pair, draft, name):
    session, other = pair.open(), pair.open()
    cycle, rows = misfits(session, other, pair.link.cycle + 1)[name]
    draft.propose(cycle, *rows)
    assert pair.ask(session) == {}
    counts = pair.link.counts
    assert counts.stale + counts.garbage == 1
    assert counts.garbage == (name in IMPOSSIBLE)
    assert session.reason == (DRAFT_LATE if cycle != pair.link.cycle else DRAFT_SHORT)


def test_the_good_rows_of_a_bad_proposal_are_taken(pair, draft):
    one, two = pair.open(), pair.open()
    draft.propose(1, (77, 1, [1, 1]), (one.id, 1, [5, -1]), (one.id, 9, [1]), (two.id, 1, [6, 7]))
    assert pair.ask(one, two) == {two: [6, 7]}
    assert (pair.link.counts.stale, pair.link.counts.garbage) == (2, 1)


BROKEN = {
    "no head": lambda d, s: d.writer.write(b"\1" * 8),
    "nothing": lambda d, s: d.writer.write(b""),
    "half a head": lambda d, s: d.writer.write(struct.pack("<QI", 1, 1)),
    "rows that are not there": lambda d, s: d.raw(1, 5, 0),
    "2**32 - 1 rows": lambda d, s: d.raw(1, 2**32 - 1, 2**32 - 1),
    "tokens that are not there": lambda d, s: d.raw(1, 1, 9, struct.pack("<QII", s.id, 1, 9)),
    "more than it says": lambda d, s: d.raw(1, 0, 0, bytes(100)),
    "a row longer than the frame": lambda d, s: d.raw(1, 1, 1, struct.pack("<QIIi", s.id, 1, 2**32 - 2, 5)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_frames_with_impossible_lengths_are_counted_and_harmless(pair, draft, name):
    session = pair.open()
    assert BROKEN[name](draft, session)
    assert pair.ask(session) == {}
    assert pair.link.counts.garbage + pair.link.counts.stale == 1
    draft.outcomes()
    if session.reason != DRAFT_LATE:
        draft.propose(2, (session.id, 1, [5]))
        assert pair.ask(session) == {session: [5]}


def test_random_frames_never_raise_and_never_return_what_was_not_asked(pair, draft):
    """Rows and tokens of any bytes, in frames whose head and cycle are right: the last line of defence."""
    rng, returned = random.Random(8), 0
    sessions = [pair.open() for _ in range(4)]
    for cycle in range(1, 400):
        count, tokens = rng.randint(0, 4), rng.randint(0, 12)
        rows = b"".join(
            struct.pack("<QII", rng.choice((0, 1, 2, 3, 4, 2**63)), rng.choice((1, 1, 1, 0)), rng.randint(0, 4))
            for _ in range(count)
        )
        ids = struct.pack(f"<{tokens}i", *(rng.choice((0, 5, 999, 1000, -1, 2**31 - 1)) for _ in range(tokens)))
        draft.raw(cycle, count, tokens, rows + ids)
        asked = rng.sample(sessions, 2)
        drafts = pair.ask(*asked, steps=2)
        draft.outcomes()
        assert set(drafts) <= set(asked)
        for ids in drafts.values():
            assert len(ids) <= 2
            assert all(0 <= token < VOCAB for token in ids)
            returned += bool(ids)
    assert returned > 10
    assert pair.link.counts.garbage > 10
    assert pair.link.counts.stale > 10


def test_a_proposal_that_comes_twice_counts_once(pair, draft):
    session = pair.open()
    draft.propose(1, (session.id, 1, [5]))
    draft.propose(1, (session.id, 1, [6]))
    assert pair.ask(session) == {session: [5]}
    draft.propose(2, (session.id, 1, [7]))
    assert pair.ask(session) == {session: [7]}
    assert pair.link.counts.stale == 1


def test_a_row_that_comes_twice_in_a_frame_is_at_most_what_was_asked(pair, draft):
    session = pair.open()
    draft.propose(1, (session.id, 1, [5, 6, 7, 8]), (session.id, 1, [1, 2, 3, 4]))
    assert len(pair.ask(session)[session]) == 3


def test_proposals_out_of_order_are_passed_over(pair, draft):
    session = pair.open()
    for cycle in (3, 2, 1):
        draft.propose(cycle, (session.id, 1, [cycle]))
    assert pair.ask(session) == {session: [1]}
    draft.propose(2, (session.id, 1, [22]))
    assert pair.ask(session) == {session: [22]}
    assert pair.link.counts.stale == 2


def test_a_flood_of_stale_proposals_ends_with_the_deadline(pair, draft):
    """However fast the draft writes them."""
    session = pair.open()
    with Child(lambda: [draft.propose(7, (session.id, 1, [5])) for _ in range(PROPOSAL_SLOTS)]):
        pass
    stop = time.monotonic() + 3
    real = pair.link._proposals.read

    def read_and_refill():  # a writer that is always ahead of the reader
        body = real()
        if body is not None and time.monotonic() < stop:
            draft.propose(7, (session.id, 1, [5]))
        return body

    draft.propose(7, (session.id, 1, [5]))
    pair.link._proposals.read = read_and_refill
    assert took(pair.ask, session) < 1
    assert session.reason == DRAFT_LATE
    assert took(pair.link.begin) < 1
    assert pair.link.counts.stale > 1


# ---- a draft that is late, silent, gone


def test_a_silent_draft_costs_one_deadline_until_it_answers(pair, draft):
    session = pair.open()
    assert DEADLINE_S <= took(pair.ask, session) < 10 * DEADLINE_S
    assert session.reason == DRAFT_LATE
    assert took(lambda: [pair.ask(session) for _ in range(50)]) < 10 * DEADLINE_S  # no more waiting
    assert session.reason == DRAFT_LATE
    rows = draft.outcomes()
    assert [(r.kind, r.steps) for r in rows if r.steps] == [(OPEN, 3)]  # and it was asked no more

    draft.propose(1, (session.id, 1, [5]))
    start = time.monotonic()
    assert pair.ask(session) == {}  # late is late
    assert DEADLINE_S <= time.monotonic() - start < 10 * DEADLINE_S  # but it is waited for again
    assert pair.link.counts == Counts(resyncs=1, late=1)


def test_a_draft_that_is_always_late_is_asked_less_and_less(pair, draft):
    session = pair.open()
    waits, asked = 0, 0
    end = time.monotonic() + 25 * DEADLINE_S
    while time.monotonic() < end:
        waits += took(pair.ask, session) >= DEADLINE_S
        for row in draft.outcomes():
            if row.steps:
                asked += 1
                draft.propose(pair.link.cycle, (session.id, session.epoch, [5]))  # too late: the cycle has given up
        assert session.reason == DRAFT_LATE
        time.sleep(DEADLINE_S / 20)
    assert asked == waits
    assert 2 <= waits <= 4  # at once, again, then after 10 and 20 deadlines


def test_a_draft_that_becomes_quick_again_is_asked_every_cycle(pair, draft):
    session = pair.open()
    for _ in range(2):
        pair.link._ask_at_s = 0.0
        pair.ask(session)
        draft.propose(pair.link.cycle, (session.id, session.epoch, [5]))
    assert pair.link._misses == 2
    pair.link.begin()
    pair.link._ask_at_s = 0.0
    draft.propose(pair.link.cycle + 1, (session.id, session.epoch, [6]))
    assert pair.ask(session) == {session: [6]}
    draft.propose(pair.link.cycle + 1, (session.id, session.epoch, [7]))
    assert pair.ask(session) == {session: [7]}


def test_a_late_answer_of_an_older_cycle_does_not_arm(pair, draft):
    session = pair.open()
    assert took(pair.ask, session) >= DEADLINE_S
    draft.propose(0, (session.id, 1, [5]))
    draft.propose(2, (session.id, 1, [5]))
    assert took(pair.ask, session) < DEADLINE_S
    assert pair.link.counts.late == 2
    draft.propose(1, (session.id, 1, [5]))
    assert took(pair.ask, session) >= DEADLINE_S
    assert pair.link.counts.late == 3


def test_a_draft_that_has_read_the_question_and_never_answers_is_asked_again_after_a_second(pair, draft):
    session = pair.open()
    assert took(pair.ask, session) >= DEADLINE_S
    draft.outcomes()
    start = time.monotonic()
    assert until(lambda: pair.ask(session) == {} and any(row.steps for row in draft.outcomes()))
    assert 0.8 < time.monotonic() - start < 3


def test_a_draft_that_hangs_is_not_asked_again(pair, draft):
    session = pair.open()
    assert took(pair.ask, session) >= DEADLINE_S
    time.sleep(1.1)
    assert all(took(pair.ask, session) < DEADLINE_S for _ in range(10))


class FakeCountedTokens(list):
    """Tokens that count how often they are copied."""

    copies = 0

    def __getitem__(self, span):
        self.copies += 1
        return super().__getitem__(span)


def test_a_hanging_draft_costs_the_engine_next_to_nothing(pair, draft):
    """Its ring is full after a while; from then on a cycle gathers nothing for it."""
    tokens = FakeCountedTokens([1, 2, 3])
    session = pair.link.open("specdec-1", tokens, 3)
    for _ in range(OUTCOME_SLOTS):
        assert tokens.copies < OUTCOME_SLOTS
        tokens.append(9)
        pair.ask(session)
    copies = tokens.copies
    assert copies >= OUTCOME_SLOTS
    for _ in range(20):
        tokens.append(9)
        assert took(pair.ask, session) < DEADLINE_S
        assert session.reason == DRAFT_LATE
    assert tokens.copies == copies
    assert len(draft.outcomes()) == OUTCOME_SLOTS


def test_no_draft_is_down_at_once(pair):
    session = pair.open()
    assert took(pair.ask, session) < DEADLINE_S
    assert session.reason == DRAFT_DOWN
    assert pair.owner.bell("engine.outcome_bell").value == 0


def test_a_draft_that_has_joined_but_not_started_is_down(pair):
    session = pair.open()
    with Segment.attach(pair.path, Role.DRAFT):
        assert took(pair.ask, session) < DEADLINE_S
        assert session.reason == DRAFT_DOWN


def test_a_killed_draft_is_down_and_its_frames_are_void(pair):
    session, ready = pair.open(), Word(Ring().words, 1)

    def work():
        draft = FakeDraft(pair.path)
        draft.propose(2, (session.id, 1, [5]))
        ready.value = 1
        signal.pause()
        draft.outcomes()

    with Child(work) as child:
        assert until(lambda: ready.value)
        pair.link.begin()  # cycle 1
        pair.link.exchange({})
        child.kill()
    assert took(pair.ask, session) < DEADLINE_S
    assert session.reason == DRAFT_DOWN
    assert pair.ask(session) == {}
    with FakeDraft(pair.path) as draft:
        draft.propose(4, (session.id, session.epoch, [6]))  # of the epoch before it knew anything
        assert pair.ask(session) == {}
        assert [(r.kind, r.epoch) for r in draft.outcomes()] == [(OPEN, session.epoch)]
        assert pair.link.counts.stale >= 2


def test_a_new_draft_is_told_everything_anew_in_a_new_epoch(pair):
    one, two = pair.open([1, 2, 3]), pair.open(range(150))
    with FakeDraft(pair.path) as draft:
        pair.link.begin()
        pair.link.exchange({})
        assert {r.session for r in draft.outcomes()} == {one.id, two.id}
        epochs = one.epoch, two.epoch
    pair.truth[one].append(4)
    pair.link.begin()
    pair.link.exchange({})
    with FakeDraft(pair.path) as draft:
        pair.link.begin()
        pair.link.exchange({})
        assert (one.epoch, two.epoch) == (epochs[0] + 1, epochs[1] + 1)
        rows = draft.outcomes()
        assert [(r.session, r.epoch, r.kind, r.position, r.tokens) for r in rows] == [
            (one.id, one.epoch, OPEN, 0, [1, 2, 3, 4]),
            (two.id, two.epoch, OPEN, 0, list(range(60))),
            (two.id, two.epoch, COMMIT, 60, list(range(60, 124))),
            (two.id, two.epoch, COMMIT, 124, list(range(124, 150))),
        ]
        assert pair.link.counts.resyncs == 2


def test_a_new_draft_between_two_cycles_is_noticed(pair):
    """The engine never saw the role free."""
    session = pair.open()
    with FakeDraft(pair.path):
        pair.link.begin()
        pair.link.exchange({})
    with FakeDraft(pair.path) as draft:
        draft.propose(2, (session.id, session.epoch + 1, [5]))
        assert pair.ask(session) == {session: [5]}
        assert [r.kind for r in draft.outcomes()] == [OPEN]


def test_a_new_draft_is_asked_though_the_last_one_never_answered(pair):
    session = pair.open()
    with FakeDraft(pair.path):
        assert took(pair.ask, session) >= DEADLINE_S
        assert took(pair.ask, session) < DEADLINE_S
    with FakeDraft(pair.path) as draft:
        draft.propose(3, (session.id, session.epoch + 1, [5]))
        assert pair.ask(session) == {session: [5]}


# ---- what the draft is told


def test_a_long_prompt_is_cut_over_frames_and_whole_again(pair, draft):
    lengths = [1, 63, 64, 65, 128, 129, 500]
    for length in lengths:
        session = pair.open(np.random.default_rng(length).integers(0, VOCAB, length).tolist())
        for _ in range(3):
            pair.link.begin()
            pair.link.exchange({})
        rows, tokens = draft.outcomes(), []
        for i, row in enumerate(rows):
            assert (row.session, row.epoch, row.position) == (session.id, 1, len(tokens))
            assert row.kind == (COMMIT if i else OPEN)
            assert len(row.tokens) <= SMALL.frame_tokens
            tokens += row.tokens
        assert tokens == pair.truth[session]
        pair.close(session)
        pair.link.begin()
        pair.link.exchange({})
        assert [(r.session, r.kind) for r in draft.outcomes()] == [(session.id, CLOSE)]


def test_drafts_are_asked_for_with_the_last_piece_only(pair, draft):
    session = pair.open(range(150))
    pair.ask(session)
    assert [r.steps for r in draft.outcomes()] == [0, 0, 3]


def test_a_preempted_session_starts_a_new_epoch(pair, draft):
    session = pair.open([1, 2, 3])
    draft.propose(1, (session.id, 1, [5]))
    assert pair.ask(session) == {session: [5]}
    pair.link.restart(session)
    pair.truth[session][:] = [1, 2]
    draft.propose(2, (session.id, 1, [6]))  # of the epoch before
    assert pair.ask(session) == {}
    assert pair.link.counts.stale == 1
    draft.propose(3, (session.id, 2, [7]))
    assert pair.ask(session) == {session: [7]}
    kinds = [(r.kind, r.epoch, r.position, r.tokens) for r in draft.outcomes()]
    assert kinds == [(OPEN, 1, 0, [1, 2, 3]), (OPEN, 2, 0, [1, 2]), (COMMIT, 2, 2, [])]


def test_a_session_that_ends_right_after_its_preemption_is_still_forgotten(pair, draft):
    session = pair.open()
    pair.link.begin()
    pair.link.exchange({})
    pair.link.restart(session)
    pair.close(session)
    pair.link.begin()
    pair.link.exchange({})
    assert [(r.session, r.kind) for r in draft.outcomes()] == [(session.id, OPEN), (session.id, CLOSE)]


def test_a_session_the_draft_never_knew_is_not_closed_there(pair):
    with FakeDraft(pair.path) as draft:
        known = pair.open()
        pair.link.begin()
        pair.link.exchange({})
        pair.close(pair.open())
        pair.link.begin()
        pair.link.exchange({})
        assert [(r.session, r.kind) for r in draft.outcomes()] == [(known.id, OPEN)]
    with FakeDraft(pair.path) as draft:
        pair.link.begin()
        pair.close(known)  # the last draft knew it, this one does not
        pair.link.exchange({})
        assert draft.outcomes() == []


def test_every_session_of_a_full_pair_may_end_and_begin_in_one_cycle(folder):
    layout = Layout(8, 2, 16)
    with Pair(folder, layout) as pair, FakeDraft(pair.path) as draft:
        for _ in range(20):
            old = [pair.open([1]) for _ in range(8)]
            pair.link.begin()
            pair.link.exchange({})
            assert {r.session for r in draft.outcomes() if r.kind == OPEN} == {s.id for s in old}
            for session in old:
                pair.close(session)
        pair.link.begin()
        pair.link.exchange({})
        assert len(draft.outcomes()) == 8


# ---- the real draft's engine, told by the link


def answer_of(tokens, k):
    """What FakeEcho proposes: every token depends on all that the draft knows of the session."""
    return [zlib.crc32(repr(tokens).encode(), i) % VOCAB for i in range(k)]


class FakeEcho:
    """Proposes a checksum of what it was told, and notes whom it was told to forget."""

    def __init__(self):
        self.forgotten = []

    def propose(self, sessions, steps):
        return [answer_of(s.tokens, k) for s, k in zip(sessions, steps, strict=True)]

    def forget(self, session):
        self.forgotten.append(session)


class InlineDraft:
    """The real DraftEngine, run by the test instead of a thread; `pump` stands for the time it gets."""

    def __init__(self, pair):
        self.segment = Segment.attach(pair.path, Role.DRAFT)
        self.drafter = FakeEcho()
        self.engine = DraftEngine(self.segment, self.drafter, DraftMetrics())
        self.engine.stop()
        self.engine.run()  # what it does on joining, and no more
        self.asleep = False
        self._wait = pair.link._proposals.wait
        pair.link._proposals.wait = lambda timeout_s: (self.pump(), self._wait(timeout_s))[1]

    def pump(self):
        while not self.asleep and (body := self.engine._outcomes.read()) is not None:
            self.engine.answer(body)

    @property
    def view(self):
        """What it has been told; of an epoch before it may know more."""
        return {n: told.session.tokens[: told.tokens] for n, told in self.engine._sessions._told.items()}

    def close(self, pair):
        del pair.link._proposals.wait
        self.segment.close()


def truth_of(pair):
    return {session.id: tokens for session, tokens in pair.truth.items()}


def test_after_an_overflow_the_draft_knows_the_truth_again(pair):
    session, other = pair.open(), pair.open()
    draft = InlineDraft(pair)
    pair.link.begin()
    pair.link.exchange({})
    draft.asleep = True
    for i in range(3 * OUTCOME_SLOTS):
        for tokens in pair.truth.values():
            tokens.append(i % VOCAB)
        if i == 2 * OUTCOME_SLOTS:
            pair.close(other)
            pair.link.restart(session)
            other = pair.open([4, 4])
        pair.link.begin()
        assert took(pair.link.exchange, {}) < DEADLINE_S
    draft.asleep = False
    draft.pump()
    assert draft.view != truth_of(pair)
    for _ in range(3):
        pair.link.begin()
        pair.link.exchange({})
        draft.pump()
    assert draft.view == truth_of(pair)
    pair.truth[session].append(5)
    assert pair.ask(session, other) == {s: answer_of(pair.truth[s], 3) for s in (session, other)}


def test_more_than_a_ringful_to_tell_arrives_all_the_same(folder):
    """A draft that joins a pair with long sessions: they may be many times what the ring holds."""
    with Pair(folder, Layout(4, 5, 16)) as pair:
        for i in range(4):
            pair.open(range(i, i + 700))
        assert sum(map(len, pair.truth.values())) > 2 * OUTCOME_SLOTS * 16
        draft, bell, cycles = InlineDraft(pair), pair.owner.bell("engine.outcome_bell"), 0
        while draft.view != truth_of(pair):
            for tokens in pair.truth.values():
                tokens.append(1)
            before = bell.value
            pair.link.begin()
            pair.link.exchange({})
            assert bell.value - before <= 4  # and no cycle is held up by it
            draft.pump()
            cycles += 1
            assert cycles < 100


def test_a_question_in_an_early_frame_is_answered_though_more_frames_follow(pair, draft):
    session, long = pair.open(), pair.open(range(200))
    draft.propose(1, (session.id, 1, [5]))
    assert pair.ask(session) == {session: [5]}
    assert {row.session: row.steps for row in draft.outcomes()} == {session.id: 3, long.id: 0}


def test_no_answer_is_waited_for_before_the_question_is_out(pair, draft):
    session = pair.open(range(64 * 6))
    assert took(pair.ask, session) < DEADLINE_S
    assert session.reason == DRAFT_LATE
    assert took(pair.ask, session) >= DEADLINE_S
    rows = draft.outcomes()
    assert [row.steps for row in rows] == [0, 0, 0, 0, 0, 3]
    assert [token for row in rows for token in row.tokens] == pair.truth[session]


OPERATIONS = ["open", "commit", "commit", "restart", "close", "leave", "sleep", "wake", "cycle", "cycle", "ask", "ask"]
OPERATION = st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 200), st.randoms(use_true_random=False))


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.lists(OPERATION, min_size=5, max_size=60))
def test_the_draft_always_knows_the_truth_after_an_exchange(operations):
    slots = 4
    with (
        mock.patch.object(layout_module, "OUTCOME_SLOTS", slots),
        shared_folder() as folder,
        Pair(folder, Layout(3, 4, 16), deadline_s=0.0001) as pair,
    ):
        run_operations(pair, operations, slots)


def run_operations(pair, operations, slots):
    draft, drafters, answers = InlineDraft(pair), [], 0
    drafters.append(draft.drafter)

    def exchange(k=0):
        drafts = pair.ask(*pair.truth, steps=k) if k else pair.ask()
        draft.pump()
        for session, ids in drafts.items():
            assert ids == answer_of(pair.truth[session], min(k, 4))
        return len(drafts)

    def settle():
        """With nothing in its way, the draft knows all after as many cycles as the ring needs to carry it."""
        draft.asleep = False
        draft.pump()
        for _ in range(1 + sum(len(t) for t in pair.truth.values()) // (16 * slots)):
            exchange()
        exchange()
        assert draft.view == truth_of(pair)

    for name, number, rng in operations:
        sessions = list(pair.truth)
        if name == "open" and number < 100:
            pair.open([rng.randrange(VOCAB) for _ in range(1 + number // 2)])
        elif name == "commit":
            for session in sessions:
                pair.truth[session].extend([rng.randrange(VOCAB) for _ in range(rng.randint(0, 5))])
        elif name == "restart" and sessions:
            session = sessions[number % len(sessions)]
            del pair.truth[session][1 + number % 7 :]
            pair.link.restart(session)
        elif name == "close" and sessions:
            pair.close(sessions[number % len(sessions)])
        elif name == "leave":
            draft.close(pair)
            if number % 2:
                pair.link.begin()
                pair.link.exchange(dict.fromkeys(pair.truth, 2))
            draft = InlineDraft(pair)
            drafters.append(draft.drafter)
        elif name == "sleep":
            draft.asleep = True
        elif name == "wake":
            draft.asleep = False
        elif name == "cycle":
            exchange()
        elif name == "ask":
            answers += exchange(1 + number % 6)
        if name in ("cycle", "ask") and not draft.asleep and number % 3 == 0:
            settle()
    settle()
    for session in list(pair.truth):
        pair.close(session)
    exchange()
    exchange()
    assert draft.view == {}
    for drafter in drafters:
        assert len({id(s) for s in drafter.forgotten}) == len(drafter.forgotten)


def test_a_real_draft_in_another_process_killed_again_and_again(folder):
    """Its proposals are checksums of what it knows: each must be that of the truth at the time."""
    rng, kills, answered, asked = random.Random(9), 0, 0, 0

    def work():
        DraftEngine(Segment.attach(pair.path, Role.DRAFT), FakeEcho(), DraftMetrics()).run()

    with Pair(folder, Layout(8, 4, 64), deadline_s=0.5) as pair:
        generation = pair.owner.word("draft.generation")
        while kills < 12:
            with Child(work) as child:
                pair.link.begin()
                assert until(lambda kills=kills: generation.value > kills)
                for _ in range(rng.randint(1, 120)):
                    step(pair, rng)
                    if not pair.truth:
                        continue
                    drafts = pair.ask(*pair.truth, steps=4)
                    asked += len(pair.truth)
                    answered += len(drafts)
                    for session, ids in drafts.items():
                        assert ids == answer_of(pair.truth[session], 4)
                child.kill()
                kills += 1
    assert answered > 0.5 * asked
    assert asked > 1000


def step(pair, rng):
    """Something happens to some sessions."""
    for session in list(pair.truth):
        what = rng.random()
        if what < 0.05:
            pair.close(session)
        elif what < 0.1:
            pair.link.restart(session)
        else:
            pair.truth[session] += [rng.randrange(VOCAB) for _ in range(rng.randint(0, 4))]
    if rng.random() < 0.4:
        pair.open([rng.randrange(VOCAB) for _ in range(rng.randint(1, 200))])


# ---- verdicts


class FakeTarget:
    """Takes a random part of each cycle's drafts, adds one of its own, and stops at a session's length."""

    def __init__(self, pair, rng):
        self.pair, self.rng = pair, rng
        self.length, self.generated = {}, {}
        self.accepted_truth = {}

    def open(self, prompt, length):
        session = self.pair.open(prompt)
        self.length[session] = length
        self.generated[session.id], self.accepted_truth[session.id] = 0, 0
        return session

    def prefill(self, session):
        self._deliver(session, 1)
        self.pair.link.committed(session, 1, 1)

    def decode(self, session, drafts):
        self.pair.link.scheduled(session, len(drafts))
        accepted = self.rng.randint(0, len(drafts))
        delivered = min(accepted + 1, self.length[session] - self.generated[session.id])
        self._deliver(session, delivered)
        self.accepted_truth[session.id] += min(accepted, delivered)
        self.pair.link.committed(session, accepted + 1, delivered)

    def _deliver(self, session, count):
        self.pair.truth[session] += [self.rng.randrange(VOCAB) for _ in range(count)]
        self.generated[session.id] += count

    def done(self, session):
        return self.generated[session.id] >= self.length[session]


def test_verdicts_add_up_to_what_was_generated(pair):
    rng = random.Random(10)
    target, draft = FakeTarget(pair, rng), InlineDraft(pair)
    pair.route()
    started, rows, opened = [], [], []
    for i in range(150):
        pair.link.begin()
        wanted = {}
        for session in pair.truth:
            if target.generated[session.id]:
                pair.order(session, rng.randint(0, 5), window=1)
                if (k := pair.link.admit(session)) is not None:
                    wanted[session] = k
        drafts = pair.link.exchange(wanted)
        if len(pair.truth) < 4 and i < 120:
            started.append(target.open(list(range(rng.randint(1, 9))), rng.randint(1, 30)))
        pair.link.finish(schedule_us=1)
        for session in list(pair.truth):
            if session in wanted:
                target.decode(session, drafts.get(session, []))
            elif not target.generated[session.id]:
                target.prefill(session)
            if target.done(session):
                pair.close(session)
        pair.link.finish(verify_us=2)
        more = pair.verdicts()
        opened, rows = opened + more[0], rows + more[1]
    assert not pair.truth
    assert len(started) > 10
    assert [o.session for o in opened] == [s.id for s in started]
    assert [r.session for r in rows if r.kind == CLOSED] == sorted(
        [s.id for s in started], key=[r.session for r in rows if r.kind == CLOSED].index
    )
    for session in started:
        mine = [row for row in rows if row.session == session.id]
        assert [row.kind for row in mine] == [PREFILL] + [CYCLE] * (len(mine) - 2) + [CLOSED]
        assert sum(row.committed for row in mine) == target.generated[session.id] == target.length[session]
        assert sum(row.accepted for row in mine) == target.accepted_truth[session.id]
        context = next(o.prompt_tokens for o in opened if o.session == session.id)
        for row in mine:
            context += row.committed
            assert row.context == context
            assert row.accepted <= row.proposed <= row.steps
            assert row.accepted <= row.committed <= row.accepted + 1
            assert row.reason in (NONE, DRAFT_SHORT, DRAFT_LATE)
            assert (row.order > 0) == (row.kind in (CYCLE, CLOSED) and row.order != 0)
    draft.close(pair)


def reason_of(pair, session, drafts, proposed=None):
    pair.link.scheduled(session, len(drafts.get(session, [])) if proposed is None else proposed)
    pair.link.committed(session, 1, 1)
    pair.link.finish()
    row = pair.verdicts()[1][-1]
    return row.reason, row.steps, row.proposed


def test_the_reason_says_why_fewer_were_verified(pair):
    session = pair.open()
    assert reason_of(pair, session, pair.ask(session)) == (DRAFT_DOWN, 3, 0)
    with FakeDraft(pair.path) as draft:
        draft.propose(2, (session.id, 2, [1, 2, 3]))
        assert reason_of(pair, session, pair.ask(session)) == (NONE, 3, 3)
        draft.propose(3, (session.id, 2, [1, 2, 3]))
        assert reason_of(pair, session, pair.ask(session), proposed=1) == (BUDGET, 3, 1)  # vLLM took fewer
        draft.propose(4, (session.id, 2, [1, 2]))
        assert reason_of(pair, session, pair.ask(session)) == (DRAFT_SHORT, 3, 2)
        draft.propose(5)
        assert reason_of(pair, session, pair.ask(session)) == (DRAFT_SHORT, 3, 0)
        assert reason_of(pair, session, pair.ask(session)) == (DRAFT_LATE, 3, 0)
        assert reason_of(pair, session, pair.ask(session)) == (DRAFT_LATE, 3, 0)
        assert reason_of(pair, session, pair.ask(session, steps=0)) == (NONE, 0, 0)
    pair.route(-1)
    pair.link.begin()
    assert pair.link.admit(session) == 0
    assert reason_of(pair, session, pair.link.exchange({session: 0})) == (STANDING, 0, 0)


def test_times_of_a_frame_are_what_they_were_told(pair):
    pair.open()
    pair.link.begin()
    pair.link.finish(schedule_us=11, verify_us=22, output_us=33)
    pair.open()
    pair.link.finish(schedule_us=-1, verify_us=0, output_us=2**40)  # clocks are read apart; no number stops the engine
    first, second = (np.frombuffer(pair.reader.read(), VERDICT_HEAD, 1)[0] for _ in range(2))
    assert [int(first[n]) for n in ("cycle", "opened", "schedule_us", "verify_us", "output_us")] == [1, 1, 11, 22, 33]
    assert [int(second[n]) for n in ("schedule_us", "output_us")] == [0, 2**32 - 1]


@pytest.mark.parametrize(("says_us", "of_it"), [(300, "as it says"), (2**40, "all"), (None, "all")])
def test_a_drafts_own_time_is_told_apart_from_waiting_for_it(pair, draft, says_us, of_it):
    """None: it is late. A draft cannot have taken more than the cycle waited."""
    session = pair.open()
    pair.link.begin()
    if says_us is not None:
        row = (session.id, session.epoch, [4, 5])
        timer = threading.Timer(0.002, lambda: draft.propose(pair.link.cycle, row, drafting_us=says_us))
        timer.start()
    pair.link.exchange({session: 2})
    pair.link.finish()
    head = np.frombuffer(pair.reader.read(), VERDICT_HEAD, 1)[0]
    waited_us, drafting_us = int(head["draft_us"]), int(head["drafting_us"])
    assert waited_us > 1000
    assert drafting_us == (says_us if of_it == "as it says" else waited_us)


def test_nothing_to_say_is_no_frame(pair):
    for _ in range(3):
        pair.link.begin()
        pair.link.finish()
    assert pair.reader.read() is None


def fill_verdict_ring(pair):
    """Until the ring has no room: control has stopped reading."""
    while not pair.link._verdicts.full:
        pair.link.committed(next(iter(pair.truth)), 1, 1)
        pair.link.finish()
    assert pair.link.counts.lost_verdicts == 0


def test_a_full_verdict_ring_loses_cycles_but_neither_beginnings_nor_ends(pair):
    old = [pair.open(), pair.open()]
    pair.link.finish()
    assert pair.reader.read() is not None
    fill_verdict_ring(pair)
    new = pair.open([1, 1])
    for _ in range(5):
        pair.link.begin()
        pair.link.committed(old[0], 1, 1)
        pair.link.finish()
    pair.close(old[1])
    pair.link.finish()
    assert pair.link.counts.lost_verdicts == 6
    assert len(pair.verdicts()[1]) == VERDICT_SLOTS
    pair.link.committed(old[0], 1, 1)
    pair.link.finish()
    opened, rows = pair.verdicts()
    assert pair.lost == 6
    assert [o.session for o in opened] == [new.id]
    assert sorted((r.session, r.kind) for r in rows) == [(old[0].id, PREFILL), (old[1].id, CLOSED)]
    pair.link.committed(old[0], 1, 1)
    pair.link.finish()
    assert pair.verdicts()[0] == []
    assert pair.lost == 6  # said once


def test_every_session_heard_of_is_heard_to_end_however_long_control_sleeps(pair):
    """And what is kept for it stays within the pair's size."""
    rng, heard, ended = random.Random(11), set(), set()

    def listen():
        opened, rows = pair.verdicts()
        for o in opened:
            assert o.session not in heard
            heard.add(o.session)
        for r in rows:
            if r.kind == CLOSED:
                assert r.session in heard  # a router would otherwise wait for ever on a session it hears of later
                assert r.session not in ended
                ended.add(r.session)

    pair.open()
    for _ in range(60):
        fill_level = rng.choice((0, 0, 5, VERDICT_SLOTS + 5))
        for _ in range(fill_level):
            pair.link.committed(next(iter(pair.truth)), 1, 1)
            pair.link.finish()
        for _ in range(rng.randint(1, 40)):
            if len(pair.truth) > 1 and rng.random() < 0.5:
                pair.close(rng.choice(list(pair.truth)[1:]))
            else:
                pair.open()
            if rng.random() < 0.7:
                pair.link.finish()
            assert len(pair.link._opened) <= 2 * SMALL.max_sessions
            assert len(pair.link._kept_rows) <= SMALL.max_sessions
        if rng.random() < 0.7:
            listen()
    listen()
    for session in list(pair.truth):
        pair.close(session)
    for _ in range(3):
        pair.link.finish()
        listen()
    assert len(heard) > 50
    assert ended == heard


def test_an_end_waits_for_its_beginning_where_both_do_not_fit_a_frame(pair):
    pair.open()
    pair.link.finish()
    fill_verdict_ring(pair)
    sessions = [pair.open() for _ in range(SMALL.max_sessions - 1)]
    pair.close(sessions[0])
    for _ in range(2):
        sessions.append(pair.open())
        pair.close(sessions[-1])
    pair.link.finish()
    pair.verdicts()
    numbers = [session.id for session in sessions]
    for begin, end in (numbers[:4], [numbers[0], numbers[3]]), (numbers[4:], numbers[4:]):
        pair.link.finish()
        opened, rows = pair.verdicts()
        assert [o.session for o in opened] == begin
        assert [(r.session, r.kind) for r in rows] == [(number, CLOSED) for number in end]


def test_sessions_within_bounds_are_heard_of_though_they_began_and_ended_unheard(pair):
    live = [pair.open() for _ in range(2)]
    pair.link.finish()
    assert len(pair.verdicts()[0]) == len(live)
    fill_verdict_ring(pair)
    short = [pair.open() for _ in range(2)]
    pair.link.finish()
    for session in short:
        pair.close(session)
        pair.link.finish()
    pair.verdicts()
    pair.link.finish()
    opened, rows = pair.verdicts()
    assert [o.session for o in opened] == [s.id for s in short]
    assert [(r.session, r.kind) for r in rows] == [(s.id, CLOSED) for s in short]


@pytest.mark.parametrize(
    ("request_id", "seen"),
    [
        ("chatcmpl-specdec-0123456789abcdef0123456789abcdef", b"chatcmpl-specdec-0123456789abcdef0123456789abcdef"),
        ("specdec-" + "x" * 500, b"specdec-" + b"x" * (REQUEST_ID_BYTES - 8)),
        ("", b""),
        ("specdec-é", "specdec-é".encode()),
        ("specdec-" + "é" * 60, ("specdec-" + "é" * 44).encode()),
        ("specdec-" + "€" * 60, ("specdec-" + "€" * 29).encode()),  # a letter that the field would cut in two
        ("specdec-\ud800", b"specdec-?"),  # half of a pair, which no encoding has
        ("specdec-\0\0x", b"specdec-\0\0x"),
    ],
)
def test_request_ids_are_cut_to_their_field_and_stay_text(pair, request_id, seen):
    pair.open(request_id=request_id)
    pair.link.finish()
    (opened,) = pair.verdicts()[0]
    assert opened.request_id == seen
    opened.request_id.decode()
    assert (opened.slot, opened.prompt_tokens) == (0, 3)


def test_no_free_slot_is_no_session_and_counted(pair):
    sessions = [pair.open() for _ in range(SMALL.max_sessions)]
    assert sorted(s.slot for s in sessions) == list(range(SMALL.max_sessions))
    assert pair.open() is None
    assert pair.open() is None
    assert pair.link.counts.no_slot == 2
    pair.close(sessions[2])
    again = pair.open()
    assert again.slot == sessions[2].slot
    assert again.id not in {s.id for s in sessions}
    assert pair.open() is None


def test_more_rows_than_a_frame_holds_never_raise(pair):
    """Nothing the engine does in a cycle may stop it; what does not fit is counted as lost."""
    for _ in range(4):
        sessions = [pair.open() for _ in range(SMALL.max_sessions)]
        for session in sessions:
            pair.link.committed(session, 1, 1)
            pair.link.committed(session, 1, 1)
        for session in sessions:
            pair.close(session)
    pair.link.finish()
    for _ in range(5):
        pair.link.finish()
    opened, rows = pair.verdicts()
    assert {r.session for r in rows if r.kind == CLOSED} == {o.session for o in opened}
    assert opened
    assert pair.link.counts.lost_verdicts + pair.lost > 0


# ---- the deadline


def test_the_deadline_follows_the_draft_within_its_bounds():
    deadline = Deadline(floor_s=0.002, cap_s=0.25)
    assert deadline.seconds == 0.25
    for _ in range(16):
        deadline.observe(0.01)
    assert deadline.seconds == pytest.approx(0.015)
    for _ in range(600):
        deadline.observe(0.0001)
    assert deadline.seconds == 0.002
    for _ in range(600):
        deadline.observe(5.0)
    assert deadline.seconds == 0.25
    for _ in range(1000):
        deadline.observe(0.004)
    assert deadline.seconds == pytest.approx(0.006)
    for i in range(1000):
        deadline.observe(0.02 if i % 20 == 0 else 0.004)  # one in twenty is slower: its p99 is what counts
    assert deadline.seconds == pytest.approx(0.03)


def test_a_fixed_deadline_stays():
    deadline = Deadline(floor_s=0.1, cap_s=0.1)
    for _ in range(100):
        deadline.observe(0.0001)
        deadline.observe(3)
    assert deadline.seconds == 0.1


class FakePaced:
    """Proposes one token, `pace_s` after it was asked."""

    pace_s = 0.0

    def propose(self, sessions, steps):
        time.sleep(self.pace_s)
        return [[5] for _ in sessions]

    def forget(self, session): ...


@pytest.mark.parametrize("change", ["another draft", "the same draft"])
def test_a_draft_that_has_become_slower_is_waited_for_again(pair, change):
    """However long the quick one was known."""
    pair.link.deadline = Deadline(floor_s=0.005, cap_s=0.25)
    session = pair.open()

    def start():
        engine = DraftEngine(Segment.attach(pair.path, Role.DRAFT), drafter, DraftMetrics())
        thread = threading.Thread(target=engine.run)
        thread.start()
        return engine, thread

    def stop():
        engine.stop()
        thread.join(10)
        engine._segment.close()

    def answered(times, within_s):
        end = time.monotonic() + within_s
        while times and time.monotonic() < end:
            times -= session in pair.ask(session)
            time.sleep(0.001)
        return not times

    drafter = FakePaced()
    engine, thread = start()
    try:
        assert answered(600, 60)
        assert pair.link.deadline.seconds < 0.05
        if change == "another draft":
            stop()
            pair.link.begin()
            engine, thread = start()
        drafter.pace_s = 0.08
        assert answered(5, 5)
    finally:
        stop()
