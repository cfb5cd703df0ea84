"""The sessions a draft has been told of, and the hidden states that come for them."""

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from specdec.channel.segment import Segment
from specdec.channel.states import States, StatesReader
from specdec.draft.drafters import DraftSession


@dataclass(eq=False)
class _Told:
    """How far a session has been told in its epoch; beyond that its tokens are known from an earlier one."""

    session: DraftSession
    tokens: int


class Change(NamedTuple):
    """What a row came to: the session it is about, None if it fits none, and one that is void for it."""

    session: DraftSession | None = None
    void: DraftSession | None = None


class Sessions:
    """Open sessions by number. What fits none is for the caller to count."""

    def __init__(self) -> None:
        self._told: dict[int, _Told] = {}
        self.newest = 0  # numbers grow: one above has not been told yet

    def __len__(self) -> int:
        return len(self._told)

    def __iter__(self) -> Iterator[DraftSession]:
        return (told.session for told in self._told.values())

    def get(self, number: int) -> DraftSession | None:
        return told.session if (told := self._told.get(number)) else None

    def opened(self, number: int, epoch: int, position: int, new: Sequence[int], whole: bool) -> Change:
        """A session told from its beginning. `whole`: `new` is all of it; else it may go on."""
        if position:
            return Change()
        self.newest = max(self.newest, number)
        told = self._told.get(number)
        if told is None:
            session = DraftSession(number, epoch, list(new))
            self._told[number] = _Told(session, len(new))
            return Change(session)
        told.tokens = 0
        return self._go_on(told, epoch, new, whole)

    def advanced(self, number: int, epoch: int, position: int, new: Sequence[int], whole: bool) -> Change:
        """What was committed to a session, which with `whole` is all of it."""
        told = self._told.get(number)
        if told is None or told.session.epoch != epoch or told.tokens != position:
            return Change()
        return self._go_on(told, epoch, new, whole)

    def _go_on(self, told: _Told, epoch: int, new: Sequence[int], whole: bool) -> Change:
        """Where the text agrees with what an earlier epoch said, all that was made of the session stands."""
        tokens, begin = told.session.tokens, told.tokens
        known = tokens[begin:]
        told.tokens += len(new)
        if all(a == b for a, b in zip(known, new, strict=False)) and not (whole and len(new) < len(known)):
            told.session.epoch = epoch
            tokens.extend(new[len(known) :])
            return Change(told.session)
        void = told.session
        told.session = DraftSession(void.id, epoch, [*tokens[:begin], *new])
        return Change(told.session, void)

    def closed(self, number: int) -> DraftSession | None:
        """The session that has ended, if it was known."""
        return told.session if (told := self._told.pop(number, None)) else None


class StatesInbox:
    """Hidden states on their way to their sessions, for a head that reads those after `layers`.

    A session takes what came with `settled()`. What nobody takes may fill as much memory as the ring; beyond that the
    oldest of the session with the most are given up, so that no session lives at others' expense.
    """

    def __init__(self, segment: Segment, layers: Sequence[int], context_limit: int | None) -> None:
        self._reader = StatesReader(segment, layers)
        self._limit, self._context_limit = segment.layout.states_mb * 2**20, context_limit
        self._early: deque[tuple[int, States]] = deque()  # of sessions not told yet
        self.given_up = 0  # tokens

    def take(self, sessions: Sessions) -> bool:
        """Gives each session what the target has computed of it. Returns whether a session got something."""
        came = [*self._early, *self._reader.read_all()]
        self._early.clear()
        got = False
        for number, states in came:
            session = sessions.get(number)
            if session is None and number > sessions.newest:
                self._early.append((number, states))
            elif session is not None and not self._outgrown(session):
                session.states.append(states)
                got = True
        if came:
            self._bound(list(sessions))
        return got

    def _outgrown(self, session: DraftSession) -> bool:
        return self._context_limit is not None and len(session.tokens) >= self._context_limit

    def _bound(self, sessions: Collection[DraftSession]) -> None:
        early = sum(states.rows.nbytes for _, states in self._early)
        while early > self._limit:
            _, states = self._early.popleft()
            early -= states.rows.nbytes
            self.given_up += len(states.tokens)
        waiting = {session: sum(states.rows.nbytes for states in session.states) for session in sessions}
        while sum(waiting.values()) > self._limit:
            most = max(waiting, key=waiting.__getitem__)
            states = most.states.popleft()
            waiting[most] -= states.rows.nbytes
            self.given_up += len(states.tokens)
