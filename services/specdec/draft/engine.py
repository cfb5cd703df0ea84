"""The draft's loop: outcomes in, proposals out.

outcome = outcomes.wait()                     # what the verifier committed, and who wants drafts
sessions = apply(outcome)                     # open, advance, close
proposals.write(drafter.propose(sessions))    # k tokens each, tagged with the outcome's cycle
drafter.ahead(all sessions)                   # until the next outcome, where the drafter can
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice, takewhile
from operator import index

import numpy as np

from specdec.channel.layout import (
    AT_LIMIT,
    CLOSE,
    COMMIT,
    OPEN,
    OUTCOME_HEAD,
    OUTCOME_ROW,
    PROPOSAL_HEAD,
    PROPOSAL_ROW,
)
from specdec.channel.segment import Role, Segment, now_ns
from specdec.draft.drafters import Drafter, DraftSession
from specdec.draft.sessions import Sessions, StatesInbox
from specdec.errors import SetupError
from specdec.telemetry import DraftMetrics
from specdec.vocabulary import UNREADABLE, Vocabulary

log = logging.getLogger(__name__)
_IDLE_S = 0.25
_COMPLAIN_EVERY_S = 10
_DEVICE_LOST = "AcceleratorError"  # torch's; not its OutOfMemoryError, after which one goes on
_STATES_IDLE_S = 0.02  # how long hidden states may wait in their ring, which nobody rings for


class DraftEngine:
    """Serves one segment until `stop` or until its verifier is gone."""

    def __init__(
        self,
        segment: Segment,
        drafter: Drafter,
        metrics: DraftMetrics,
        *,
        trust_vocabulary: bool = False,
        spin_s: float = 0.0,
    ) -> None:
        """`spin_s`: how long after an outcome it looks for the next one without sleeping, while sessions are open."""
        self._spin_s = spin_s
        self._segment, self._drafter, self._metrics = segment, drafter, metrics
        self._context_limit: int | None = getattr(drafter, "context_limit", None)
        self._vocabulary: Mapping[str, int] | None = None if trust_vocabulary else getattr(drafter, "vocabulary", None)
        self._ahead: Callable[[Collection[DraftSession]], bool] | None = getattr(drafter, "ahead", None)
        self._aux_layers: tuple[int, ...] | None = getattr(drafter, "aux_layers", None)
        self._states: StatesInbox | None = None
        self._max_steps = segment.layout.max_steps
        self._beat = segment.word("draft.beat_ns")
        self._outcomes, self._proposals = segment.reader("outcomes"), segment.writer("proposals")
        self._sessions, self._reads_states = Sessions(), segment.word("draft.reads_states")
        self._generation = segment.word("draft.generation")
        self._garbage_seen = self._given_up = 0
        self._quiet_until = 0.0
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Makes `run` return soon; from any thread."""
        self._stopped.set()

    def run(self) -> None:
        """The loop. Returns when stopped, or when the verifier's segment is gone.

        Raises VocabularyMismatch if the drafter's token ids are not the target's, SetupError if it reads hidden states
        the verifier does not hand over.
        """
        if not self._may_draft():
            return
        if self._aux_layers is not None:
            if not self._segment.layout.states_mb:
                raise SetupError("the verifier hands over no hidden states: start it with --head and the head's folder")
            self._states = StatesInbox(self._segment, self._aux_layers, self._context_limit)
        self._reads_states.value = int(self._states is not None)
        self._outcomes.skip_to_end()
        self._beat.value = now_ns()
        self._ask_for_all()
        more, spin_until, looked_s = False, 0.0, 0.0  # more: work ahead of the next outcome
        try:
            while not self._stopped.is_set():
                spin_s = spin_until - time.monotonic() if self._sessions else 0.0
                body = self._outcomes.wait(0 if more else self._idle_s, spin_s)
                self._beat.value = now_ns()
                if self._outcomes.garbage != self._garbage_seen:
                    self._metrics.garbage.inc(self._outcomes.garbage - self._garbage_seen)
                    self._garbage_seen = self._outcomes.garbage
                    self._forget_all()  # a frame was lost, and with it some session's tokens, or its end
                    self._ask_for_all()
                if body is not None:
                    self.answer(body)
                    more, spin_until = self._ahead is not None, time.monotonic() + self._spin_s
                    continue
                if self._states:
                    more |= self._states.take(self._sessions)
                more = more and self._work_ahead()
                if time.monotonic() - looked_s >= _IDLE_S:
                    looked_s = time.monotonic()
                    if self._left_alone:
                        return
        finally:
            self._forget_all()  # the drafter outlives this verifier
            self._reads_states.value = 0

    @property
    def _idle_s(self) -> float:
        return _STATES_IDLE_S if self._states else _IDLE_S

    @property
    def _left_alone(self) -> bool:
        return not self._segment.current or not self._segment.alive(Role.OWNER)

    def _may_draft(self) -> bool:
        """Waits until the target's vocabulary is known, where the drafter has one. False: stopped, or left alone."""
        while self._vocabulary is not None and not self._stopped.is_set() and not self._left_alone:
            self._beat.value = now_ns()
            if known := self._segment.vocabulary:
                target = Vocabulary(*known)
                target.accept(self._vocabulary)
                if target.fingerprint == UNREADABLE:
                    log.warning("the target's engine has no tokenizer to compare the drafter's with")
                return True
            self._stopped.wait(_IDLE_S)
        return self._vocabulary is None

    def _ask_for_all(self) -> None:
        """A new generation: from here on the verifier counts on us, and tells all it knows anew."""
        self._generation.value = self._generation.value + 1

    def answer(self, body: bytes) -> None:
        """One outcome frame: applies it and, if any session wants drafts, proposes."""
        start = time.perf_counter()
        head = np.frombuffer(body, OUTCOME_HEAD, 1)[0]
        wanting, outgrown = self._apply(body, int(head["rows"]), int(head["tokens"]))
        if self._states:
            self._states.take(self._sessions)
            self._metrics.given_up_states.inc(self._states.given_up - self._given_up)
            self._given_up = self._states.given_up
        self._metrics.sessions.set(len(self._sessions))
        if not wanting and not outgrown:
            return
        drafts = self._propose(list(wanting), list(wanting.values())) if wanting else []
        answers: dict[DraftSession, Sequence[int] | None] = dict(zip(wanting, drafts, strict=True))
        answers |= dict.fromkeys(outgrown)
        self._write(int(head["cycle"]), answers, time.perf_counter() - start)

    def _apply(self, body: bytes, rows: int, tokens: int) -> tuple[dict[DraftSession, int], list[DraftSession]]:
        """Who wants how many drafts, and who wants some but has outgrown the drafter."""
        at = OUTCOME_HEAD.itemsize
        table = np.frombuffer(body, OUTCOME_ROW, rows, at).tolist()
        ids = np.frombuffer(body, np.int32, tokens, at + rows * OUTCOME_ROW.itemsize).tolist()
        wanting: dict[DraftSession, int] = {}
        outgrown: list[DraftSession] = []
        used = 0
        for number, epoch, kind, wanted, position, count in table:
            new = ids[used : used + count]
            used += count
            if kind == CLOSE:
                self._forget(self._sessions.closed(number))
            elif kind in (OPEN, COMMIT):
                happened = self._sessions.opened if kind == OPEN else self._sessions.advanced
                session, void = happened(number, epoch, position, new, whole=wanted > 0)
                self._forget(void)
                if session is None:
                    self._metrics.unmatched.inc()
                    continue
                room = self._max_steps if self._context_limit is None else self._context_limit - len(session.tokens)
                if wanted and room > 0:
                    wanting[session] = min(wanted, room, self._max_steps)
                elif wanted:
                    outgrown.append(session)
        return wanting, outgrown

    def _forget_all(self) -> None:
        for session in list(self._sessions):
            self._forget(self._sessions.closed(session.id))

    def _forget(self, session: DraftSession | None) -> None:
        """A session is not open any more; None: nothing to forget."""
        try:
            if session is not None:
                self._drafter.forget(session)
        except Exception:
            self._metrics.faults.inc()
            log.exception("the drafter failed to forget a session; what it kept of it may stay")

    def _propose(self, sessions: Sequence[DraftSession], steps: Sequence[int]) -> Sequence[Sequence[int]]:
        try:
            drafts = self._drafter.propose(sessions, steps)
            return [self._cut(ids, k) for ids, k in zip(drafts, steps, strict=True)]
        except Exception as error:  # a drafter is anybody's code, and may cost speed only
            self._complain(error)
            return [[] for _ in sessions]

    def _work_ahead(self) -> bool:
        """Lets the drafter use the time until the next outcome. Returns whether it has more to do."""
        try:
            return self._ahead is not None and self._ahead(list(self._sessions))
        except Exception as error:
            self._complain(error)
            return False

    def _complain(self, error: Exception) -> None:
        self._metrics.faults.inc()
        if any(kind.__name__ == _DEVICE_LOST for kind in type(error).__mro__):
            raise error  # nothing works on that device any more: another process must begin anew
        if time.monotonic() > self._quiet_until:
            self._quiet_until = time.monotonic() + _COMPLAIN_EVERY_S
            log.exception("the drafter failed; cycles go on without drafts (said every %d s)", _COMPLAIN_EVERY_S)

    def _cut(self, ids: Sequence[int], steps: int) -> list[int]:
        """At most `steps` ids, up to the first the target has no token for: a padded vocabulary's tail ends there."""
        known = self._segment.vocabulary
        end = known[0] if known else 2**31
        return list(takewhile(lambda token: token < end, map(index, islice(ids, steps))))

    def _write(self, cycle: int, answers: Mapping[DraftSession, Sequence[int] | None], seconds: float) -> None:
        """One proposal. None for a session that has outgrown the drafter."""
        flat = [max(token, -1) for ids in answers.values() for token in ids or ()]  # -1 is refused over there
        rows = np.array(
            [(s.id, s.epoch, AT_LIMIT if ids is None else len(ids)) for s, ids in answers.items()], PROPOSAL_ROW
        )
        head = np.zeros(1, PROPOSAL_HEAD)
        head[0] = (cycle, len(rows), len(flat), int(seconds * 1e6))
        self._proposals.write(head, rows, np.array(flat, np.int32))  # a full ring: the verifier has given up on these
        self._metrics.proposals.inc()
        self._metrics.tokens.inc(len(flat))
        self._metrics.seconds.observe(seconds)
