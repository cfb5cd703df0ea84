"""The engine's end of the channel: which sessions may run, with how many drafts, and what each cycle did.

No vLLM here: scheduler.py calls it from inside the engine, tests call it with a scripted target. One cycle:

    link.begin()                                  # read orders, notice what the draft did
    steps = link.admit(session)                   # k for its next cycle, or None: hold it back
    drafts = link.exchange({session: k, ...})     # outcomes out, proposals in, at most one deadline
    link.scheduled(...); link.committed(...)      # what was verified and what stood
    link.finish()                                 # the verdicts, one frame
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np

from specdec.channel.layout import (
    AT_LIMIT,
    BUDGET,
    CLOSE,
    CLOSED,
    COMMIT,
    COUNT_WORDS,
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
    PREFILL,
    PROPOSAL_HEAD,
    PROPOSAL_ROW,
    REQUEST_ID_BYTES,
    STANDING,
    VERDICT_HEAD,
    VERDICT_ROW,
)
from specdec.channel.segment import Role, Segment, now_ns

ROUTED = "specdec-"  # what a router's X-Request-Id starts with: such a session waits for its first order
_FIRST_LEASE_NS = 500_000_000
_LOST_AFTER_S = 1.0
_PATIENCE_S = 30.0  # longest time between two questions to a draft that keeps missing its deadline
_FRAMES_A_CYCLE = 4  # telling a draft that has just joined all of it at once would hold up the engine


class Tokens(Protocol):
    """A session's committed tokens, prompt included: vLLM's `request.all_token_ids`, or a list."""

    def __len__(self) -> int: ...
    def __getitem__(self, span: slice, /) -> Sequence[int]: ...


@dataclass(eq=False)
class Session:
    """One generation. `tokens` is the engine's own list and grows as cycles commit."""

    id: int
    slot: int
    tokens: Tokens
    routed: bool
    epoch: int = 1
    order: int = 0  # the newest order adopted; 0: none yet
    steps: int = 0
    remaining: int = 0  # cycles left in its window
    cycles: int = 0  # under orders, so far
    lease_ns: int = _FIRST_LEASE_NS
    held_since_ns: int = 0
    lapsed: bool = False  # its lease ran out: it runs under the standing order until a new one comes
    sent: int = 0  # tokens the draft has been told, in this epoch
    opened: bool = False  # this epoch's OPEN has been sent
    outgrown: bool = False  # the draft cannot follow it any further, in this epoch
    known: bool = False  # the draft holds something of it, of this epoch or an earlier one
    reason: int = NONE  # why its coming cycle verifies fewer drafts than ordered


_Row = tuple[int, int, int, int, int, int]  # of OUTCOME_ROW
_Frame = tuple[list[_Row], list[int], list[tuple[Session, int]]]  # rows, tokens, how far each session is then told


@dataclass(frozen=True)
class _Cycle:
    session: Session
    order: int
    steps: int
    proposed: int


@dataclass
class Counts:
    """Frames and rows that did not match, by cause; every one of them cost speed only."""

    late: int = 0  # proposals after their deadline
    stale: int = 0  # rows of another session, epoch or cycle
    garbage: int = 0  # rows with impossible lengths or token ids
    lost_verdicts: int = 0
    lapsed_leases: int = 0
    resyncs: int = 0
    no_slot: int = 0


class Deadline:
    """How long a cycle waits for its proposal: 1.5 times the draft's p99, within [floor, cap]."""

    def __init__(self, floor_s: float = 0.002, cap_s: float = 0.25) -> None:
        self.floor_s, self.cap_s = floor_s, cap_s
        self._seen: deque[float] = deque(maxlen=512)
        self.relearn()

    def relearn(self) -> None:
        """Forgets the pace it knew: there is another draft, or this one has another pace."""
        self._seen.clear()
        self._limit_s = self.cap_s  # until enough is known
        self._until_next = 16

    @property
    def seconds(self) -> float:
        return self._limit_s

    def observe(self, seconds: float) -> None:
        """Learns from an answer, late ones included."""
        self._seen.append(min(seconds, self.cap_s))
        self._until_next -= 1
        if self._until_next <= 0:
            self._until_next = 32
            p99 = float(np.quantile(self._seen, 0.99))
            self._limit_s = min(max(1.5 * p99, self.floor_s), self.cap_s)


def _cycle_of(body: bytes) -> int:
    """The cycle a proposal answers; 0, which no cycle has, for a frame too short to say."""
    return int(np.frombuffer(body, PROPOSAL_HEAD, 1)[0]["cycle"]) if len(body) >= PROPOSAL_HEAD.itemsize else 0


class Link:
    """All of a pair's sessions, as its engine sees them."""

    def __init__(
        self, segment: Segment, vocab_size: int, *, deadline: Deadline | None = None, may_hold: bool = True
    ) -> None:
        """`may_hold`: False where the engine cannot leave a session out of a cycle; it then decodes plainly instead."""
        self._segment, self._vocab_size, self._may_hold = segment, vocab_size, may_hold
        self._orders = segment.orders
        self._order_bell = segment.bell("control.order_bell")
        self._router_until = segment.word("control.router_until_ns")
        self._generation = segment.word("draft.generation")
        self._beat = segment.word("engine.beat_ns")
        self._outcomes, self._verdicts = segment.writer("outcomes"), segment.writer("verdicts")
        self._proposals = segment.reader("proposals")
        self.deadline = deadline or Deadline()
        self.counts = Counts()
        self._count_words = {name: segment.word(f"counts.{name}") for name in COUNT_WORDS}
        self._orders_seen = 0
        self._misses, self._ask_at_s = 0, 0.0
        self.cycle = 0
        self._next_id = 1
        self._free_slots = list(range(segment.layout.max_sessions - 1, -1, -1))
        self._sessions: dict[int, Session] = {}
        self._generation_known, self._generation_dead = 0, 0  # a draft counts from its own generation on
        self._draft_up = False
        self._outcomes_read = segment.word("draft.outcomes_read")
        self._outcome_bell = segment.bell("engine.outcome_bell")
        self._unanswered: tuple[int, float] | None = None  # (cycle, when asked): armed again only once it answers
        self._closes: list[tuple[int, int]] = []  # (session, epoch) the draft may forget
        self._rows: list[tuple[int, ...]] = []
        self._kept_rows: list[tuple[int, ...]] = []  # CLOSED rows that found the ring full
        self._opened: list[tuple[int, int, int, bytes]] = []
        self._cycles: dict[int, _Cycle] = {}
        self._lost = 0
        self._now = now_ns()
        self.draft_us = self._drafting_us = 0

    # ---- sessions

    def open(self, request_id: str, tokens: Tokens, prompt_tokens: int) -> Session | None:
        """A session begins. None: no slot is free, and it runs under the standing order, unseen."""
        if not self._free_slots:
            self.counts.no_slot += 1
            return None
        session = Session(self._next_id, self._free_slots.pop(), tokens, ROUTED in request_id)
        self._next_id += 1
        self._sessions[session.id] = session
        name = request_id.encode(errors="replace")[:REQUEST_ID_BYTES].decode(errors="ignore").encode()  # cut, yet text
        self._opened.append((session.id, session.slot, prompt_tokens, name))
        return session

    def close(self, session: Session) -> None:
        """A session has ended, however; its last verdict may still be added before the next `finish`."""
        del self._sessions[session.id]
        self._free_slots.append(session.slot)
        if session.known:
            self._closes.append((session.id, session.epoch))
        self._kept_rows.append(
            (session.id, session.order, CLOSED, NONE, 0, 0, 0, 0, len(session.tokens), session.cycles)
        )
        if len(self._kept_rows) > self._segment.layout.max_sessions:
            # control has not read for long: sessions it never heard of go unheard, so that all others' ends are kept
            unheard, ended = {row[0] for row in self._opened}, {row[0] for row in self._kept_rows}
            self._opened = [row for row in self._opened if row[0] not in ended]
            self._kept_rows = [row for row in self._kept_rows if row[0] not in unheard]

    def restart(self, session: Session) -> None:
        """The session's engine state was thrown away (preemption): a new epoch, so nothing of the old one counts."""
        session.epoch = (session.epoch + 1) & 0xFFFFFFFF
        session.sent, session.opened, session.outgrown = 0, False, False

    # ---- one cycle

    def begin(self) -> None:
        """Starts a cycle: the clock, the engine's heartbeat, the draft's comings and goings."""
        self.cycle += 1
        self._now = now_ns()
        self._beat.value = self._now
        self.draft_us = self._drafting_us = 0
        self._cycles.clear()
        self._orders_seen = self._order_bell.value
        self._watch_draft()

    def admit(self, session: Session) -> int | None:
        """The step count of the session's next cycle; None: hold it back, its window is used up."""
        row = self._orders.read(session.slot)
        if row is not None and int(row["session"]) == session.id and int(row["order"]) > session.order:
            session.order, session.steps = int(row["order"]), min(int(row["steps"]), self._segment.layout.max_steps)
            session.remaining, session.lease_ns = int(row["window"]), int(row["lease_ms"]) * 1_000_000
            if seen := int(row["seen"]):
                session.remaining -= max(0, session.cycles - seen)  # cycles whose verdicts are still on their way
            session.held_since_ns, session.lapsed = 0, False
        session.reason = NONE
        if self._now < self._router_until.value and session.routed and not session.lapsed:
            if session.remaining > 0:
                return session.steps
            if not session.held_since_ns:
                session.held_since_ns = self._now
            if self._may_hold and self._now - session.held_since_ns < session.lease_ns:
                return None
            if self._may_hold:
                session.lapsed = True
                self.counts.lapsed_leases += 1
        session.reason = STANDING
        return 0

    def exchange(self, wanted: Mapping[Session, int]) -> dict[Session, list[int]]:
        """Tells the draft what was committed, asks for `wanted` drafts a session, and waits at most one deadline.

        Returns the drafts that came, at most `wanted` each, every id within the vocabulary. Never raises for what the
        draft did.
        """
        asked = {session: steps for session, steps in wanted.items() if steps > 0 and not session.outgrown}
        self._blame((session for session, steps in wanted.items() if steps > 0 and session.outgrown), DRAFT_LIMIT)
        if not self._draft_up or self._unanswered or time.monotonic() < self._ask_at_s:
            why = DRAFT_LATE if self._draft_up else DRAFT_DOWN
            self._blame(asked, why)
            asked = {}
        if not self._draft_up:
            return {}
        start = time.monotonic()
        if not self._send_outcomes(asked):
            self._blame(asked, DRAFT_LATE)
            return {}
        self._drafting_us = 1 << 32  # unless a proposal comes and says less: a late draft's time is the draft's
        drafts = self._await_proposal(asked, start)
        self.draft_us = int((time.monotonic() - start) * 1e6)
        self._drafting_us = min(self._drafting_us, self.draft_us)
        return drafts

    def scheduled(self, session: Session, proposed: int) -> None:
        """The session decodes in this cycle and verifies `proposed` drafts, under the order `admit` read."""
        under_order = session.reason != STANDING and session.order > 0
        if under_order:
            session.cycles += 1
            session.remaining -= 1
        order, steps = (session.order, session.steps) if under_order else (0, 0)
        self._cycles[session.id] = _Cycle(session, order, steps, proposed)

    def committed(self, session: Session, sampled: int, delivered: int) -> None:
        """The cycle's result for one session: `sampled` tokens came from the target, `delivered` of them stand."""
        cycle = self._cycles.pop(session.id, None)
        context = len(session.tokens)
        if cycle is None:
            self._rows.append((session.id, 0, PREFILL, NONE, 0, 0, 0, delivered, context, session.cycles))
            return
        accepted = min(max(sampled - 1, 0), delivered)
        reason = session.reason
        if cycle.proposed < cycle.steps and reason == NONE:
            reason = BUDGET
        self._rows.append(
            (session.id, cycle.order, CYCLE, reason, cycle.steps, cycle.proposed, accepted, delivered, context)
            + (session.cycles,)
        )

    def pending(self, session: Session) -> bool:
        """Whether the session decodes in this cycle and has no verdict yet."""
        return session.id in self._cycles

    def finish(self, *, schedule_us: int = 0, verify_us: int = 0, output_us: int = 0) -> None:
        """Writes what has happened since the last frame, if anything, as one frame."""
        for name, word in self._count_words.items():
            word.value = getattr(self.counts, name)
        if not self._rows and not self._kept_rows and not self._opened and not self._lost:
            return  # what was lost is told even if all sessions are held: their routers wait for those verdicts
        # what opened and ended is kept for the next frame if this one does not fit the ring; cycles are counted lost
        limit = self._segment.layout.max_sessions
        opened, later = self._opened[:limit], self._opened[limit:]
        unheard = {row[0] for row in later}  # their ends wait for their beginnings
        ends = [row for row in self._kept_rows if row[0] not in unheard]
        room = 2 * limit - len(ends)
        verdicts = self._rows[:room] + ends
        head = np.zeros(1, VERDICT_HEAD)
        batch = sum(row[2] == CYCLE for row in self._rows[:room])
        times = (self.draft_us, schedule_us, verify_us, output_us)
        head[0] = (self.cycle, len(verdicts), len(opened), batch, self._lost) + tuple(
            min(max(us, 0), 0xFFFFFFFF) for us in (*times, self._drafting_us)
        )
        lost = 0
        if self._verdicts.write(head, np.array(opened, OPENED_ROW), np.array(verdicts, VERDICT_ROW)):
            self._opened, self._kept_rows = later, [row for row in self._kept_rows if row[0] in unheard]
            self._lost, lost = 0, int(len(self._rows) > room)
        elif verdicts or opened:
            lost = 1
        self._lost += lost
        self.counts.lost_verdicts += lost
        self._rows = []

    def wait_for_orders(self, timeout_s: float) -> None:
        """Sleeps until an order comes, at most `timeout_s`: for a cycle in which every session is held."""
        self._order_bell.wait(self._orders_seen, timeout_s)

    # ---- the draft

    def _watch_draft(self) -> None:
        generation = self._generation.value
        if not self._segment.alive(Role.DRAFT):
            self._generation_dead, self._draft_up = generation, False
            return
        self._draft_up = generation != self._generation_dead
        if self._draft_up and generation != self._generation_known:
            self._generation_known = generation
            self._unanswered, self._misses, self._ask_at_s = None, 0, 0.0
            self.deadline.relearn()
            self._resync()
        if self._unanswered:
            self._take_late_answers(*self._unanswered)

    def _resync(self) -> None:
        """A draft that knows nothing: it is told all of every session, in a new epoch."""
        self.counts.resyncs += 1
        self._closes.clear()
        for session in self._sessions.values():
            self.restart(session)
            session.known = False

    def _take_late_answers(self, asked_cycle: int, asked_at: float) -> None:
        waited_s = time.monotonic() - asked_at
        for body in self._proposals.read_all():
            self.counts.late += 1
            if _cycle_of(body) == asked_cycle:
                if self._misses > 1:  # a few hundred answers at its old pace would outvote the new one for minutes
                    self.deadline.relearn()
                self.deadline.observe(waited_s)
                self._unanswered = None
        if waited_s > _LOST_AFTER_S and self._outcomes_read.value == self._outcome_bell.value:
            self._unanswered = None  # it has read the question and will not answer: ask again

    @staticmethod
    def _blame(asked: Iterable[Session], reason: int) -> None:
        for session in asked:
            session.reason = reason

    def _send_outcomes(self, asked: Mapping[Session, int]) -> bool:
        """Tells the draft what it does not know yet, as far as there is room. Returns whether that asks for drafts."""
        question = False
        if self._outcomes.full:
            return question
        for rows, tokens, told in islice(self._untold(asked), _FRAMES_A_CYCLE):
            head = np.zeros(1, OUTCOME_HEAD)
            head[0] = (self.cycle, len(rows), len(tokens))
            if not self._outcomes.write(head, np.array(rows, OUTCOME_ROW), np.array(tokens, np.int32)):
                break
            self._closes.clear()  # the first frame has carried them
            for session, sent in told:
                session.sent, session.opened, session.known = sent, True, True
            question = question or any(steps for _, _, _, steps, _, _ in rows)
        return question

    def _untold(self, asked: Mapping[Session, int]) -> Iterator[_Frame]:
        """What the draft has not been told, in frames of as many tokens as fit one."""
        frame_tokens = self._segment.layout.frame_tokens
        rows: list[_Row] = [(session, epoch, CLOSE, 0, 0, 0) for session, epoch in self._closes]
        tokens: list[int] = []
        told: list[tuple[Session, int]] = []
        for session in self._sessions.values():
            steps, total = asked.get(session, 0), len(session.tokens)
            if session.outgrown or (session.opened and session.sent == total and not steps):
                continue
            sent, kind, whole = session.sent, COMMIT if session.opened else OPEN, False
            while not whole:
                new = session.tokens[sent : min(total, sent + frame_tokens - len(tokens))]
                whole = sent + len(new) == total
                rows.append((session.id, session.epoch, kind, steps if whole else 0, sent, len(new)))
                tokens.extend(new)
                sent, kind = sent + len(new), COMMIT
                told.append((session, sent))
                if not whole:
                    yield rows, tokens, told
                    rows, tokens, told = [], [], []
        if rows:
            yield rows, tokens, told

    def _await_proposal(self, asked: Mapping[Session, int], start: float) -> dict[Session, list[int]]:
        left = self.deadline.seconds
        while left > 0 and (body := self._proposals.wait(left)) is not None:
            if _cycle_of(body) == self.cycle:
                self.deadline.observe(time.monotonic() - start)
                self._misses = 0
                return self._believe(body, asked)
            self.counts.stale += 1
            left = self.deadline.seconds - (time.monotonic() - start)
        self._unanswered = (self.cycle, start)
        self._misses += 1
        if self._misses > 1:  # slow, not just once: what waiting for it costs must fall
            self._ask_at_s = start + min(_PATIENCE_S, 10 * self.deadline.seconds * 2 ** min(self._misses - 2, 16))
        self._blame(asked, DRAFT_LATE)
        return {}

    def _believe(self, body: bytes, asked: Mapping[Session, int]) -> dict[Session, list[int]]:
        """Takes from a proposal of this cycle whatever fits what was asked, and counts the rest."""
        head = np.frombuffer(body, PROPOSAL_HEAD, 1)[0]
        count, at = int(head["rows"]), PROPOSAL_HEAD.itemsize
        expected = at + count * PROPOSAL_ROW.itemsize + 4 * int(head["tokens"])
        if len(body) != expected:
            self.counts.garbage += 1
            self._blame(asked, DRAFT_SHORT)
            return {}
        self._drafting_us = int(head["drafting_us"])
        rows = np.frombuffer(body, PROPOSAL_ROW, count, at)
        tokens = np.frombuffer(body, np.int32, int(head["tokens"]), at + count * PROPOSAL_ROW.itemsize)
        drafts: dict[Session, list[int]] = {}
        used = 0
        for row in rows:
            length = int(row["tokens"])
            at_limit = length == AT_LIMIT
            length *= not at_limit
            ids = tokens[used : used + length].tolist()
            used += length
            session = self._sessions.get(int(row["session"]))
            if session is None or session not in asked or int(row["epoch"]) != session.epoch:
                self.counts.stale += 1
                continue
            session.outgrown = session.outgrown or at_limit
            if len(ids) != length or any(not 0 <= token < self._vocab_size for token in ids):
                self.counts.garbage += 1
                continue
            drafts[session] = ids[: asked[session]]
        for session, steps in asked.items():
            if len(drafts.get(session, ())) < steps:
                session.reason = DRAFT_LIMIT if session.outgrown else DRAFT_SHORT
        return drafts
