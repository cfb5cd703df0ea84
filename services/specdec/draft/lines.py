"""What a session's KV cells hold: its text, drafts that follow it, and drafts for outcomes that may come.

    line     ├── the session's first `length` tokens ──┤├── ids ──────────────────────────┤
    lines[0] tokens committed                            drafts, and on past what was proposed: the main line
    lines[1] the same                                    accepted drafts, another token, and the drafts after that

Each line has a run of its own, so attention reads one contiguous run whichever line it is. A branch copies the cells it
shares with lines[0], but once: after an outcome its run is kept, its text found again as far as it is right, and only
the few cells committed since are copied for the next branch. An outcome that a branch guessed makes its run the
session's, with nothing copied at all.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.draft.drafters import DraftSession
from specdec.draft.model.kv import KvPool, Run


def common(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens the two begin with alike."""
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


@dataclass(eq=False)
class Line:
    """A run, and the text in it. The first `given` of `ids` are a guess; the rest is greedily drafted after them."""

    run: Run
    length: int = 0  # tokens of the session
    cells: int = 0  # of `run`, from its start: those that hold this text's keys and values
    ids: list[int] = field(default_factory=list)
    runners: list[tuple[int, ...]] = field(default_factory=list)  # for each of ids, the next likeliest in its place
    given: int = 0

    @property
    def end(self) -> int:
        """Tokens of the text, drafts included."""
        return self.length + len(self.ids)

    def tail(self, tokens: Sequence[int]) -> tuple[int, int]:
        """The text's last two tokens, of `tokens` and the ids; a text of one names it twice."""
        last = [*tokens[-2:], *self.ids[-2:]][-2:]
        return last[0], last[-1]

    def follow(self, tokens: Sequence[int]) -> None:
        """The session's tokens are these now. Keeps the drafts that follow them, and the cells that are still right."""
        came = tokens[self.length :]
        right = common(self.ids, came)
        if right == len(came) and right >= self.given:
            self.ids, self.runners = self.ids[right:], self.runners[right:]
        else:
            self.cells = min(self.cells, self.length + right)
            self.ids, self.runners = [], []
        self.length, self.given = len(tokens), 0


@dataclass(eq=False)
class State:
    """A session's lines: its own first, then branches, of which those without ids are spare."""

    lines: list[Line]
    steps: int = 0  # drafts that are being verified
    ahead: bool = False  # whether anything was drafted for their outcome

    @property
    def main(self) -> Line:
        return self.lines[0]

    def follow(self, tokens: Sequence[int]) -> None:
        """The session's tokens are these now: the line that guessed them becomes its own."""
        for line in self.lines:
            line.follow(tokens)
        best = max(range(len(self.lines)), key=lambda i: (len(self.lines[i].ids), self.lines[i].cells))
        self.lines[0], self.lines[best] = self.lines[best], self.lines[0]

    def ranks(self, tokens: Sequence[int], other: int) -> list[int]:
        """Of each token that came, up to the first that is no draft, the rank the draft gave it; `other` for none."""
        ranks: list[int] = []
        for token, best, others in zip(tokens[self.main.length :], self.main.ids, self.main.runners, strict=False):
            named = (best, *others)
            ranks.append(named.index(token) if token in named else other)
            if ranks[-1]:
                break
        return ranks


class Lines:
    """The sessions' states and the cells of their lines.

    Who must have room gets it: branches make way first, whosever they are, then sessions that only were read ahead,
    then those that drafted least recently. Whatever is done ahead of an outcome takes free cells only.
    """

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool
        self._states: OrderedDict[DraftSession, State] = OrderedDict()  # the first to make way first
        self.evicted = 0  # sessions, among them those that found no room

    def __getitem__(self, session: DraftSession) -> State:
        return self._states[session]

    def get(self, session: DraftSession) -> State | None:
        return self._states.get(session)

    def forget(self, session: DraftSession) -> None:
        if state := self._states.pop(session, None):
            for line in state.lines:
                self._pool.cells.give_back(line.run)

    def evict(self, session: DraftSession) -> None:
        self.forget(session)
        self.evicted += 1

    def room(self, session: DraftSession, steps: int, busy: Sequence[DraftSession]) -> State | None:
        """The session's state with room for `steps` more drafts; None if those that are busy have all the memory."""
        state = self._states.get(session)
        cells = (state.main.end if state else len(session.tokens)) + steps
        if state is None or state.main.run.length < cells:
            run = self._take(cells, busy)
            if run is None:
                self.evict(session)
                return None
            state = self._settle(session, run)
        self._states.move_to_end(session)
        return state

    def free_room(self, session: DraftSession, steps: int) -> State | None:
        """The same for a session that has not asked for drafts: of free cells, and it will be the first to make way."""
        state = self._states.get(session)
        if state is None or state.main.run.length < len(session.tokens):
            run = self._pool.cells.take(len(session.tokens) + steps)
            if run is None:
                return None
            known = state is not None
            state = self._settle(session, run)
            if not known:
                self._states.move_to_end(session, last=False)
        return state

    def branch(self, state: State, tokens: Sequence[int], accepted: int, other: int, steps: int) -> bool:
        """Begins a branch: after `accepted` of the main line's drafts comes `other`. False if no free cells are left.

        It has room for `steps` drafts.
        """
        main, length = state.main, len(tokens)
        branch = self._spare(state, length + accepted + 1 + steps)
        if branch is None:
            return False
        if branch.cells < length + accepted:
            self._pool.move(main.run, branch.run, length + accepted, start=branch.cells)
        branch.length, branch.cells, branch.given = length, length + accepted, accepted + 1
        branch.ids, branch.runners = [*main.ids[:accepted], other], [()] * (accepted + 1)
        return True

    def _settle(self, session: DraftSession, run: Run) -> State:
        """Makes `run` the session's own, with what its former one held."""
        state = self._states.get(session)
        if state is None:
            state = self._states[session] = State([Line(run, len(session.tokens))])
            return state
        main = state.main
        self._pool.move(main.run, run, main.cells)
        self._pool.cells.give_back(main.run)
        main.run = run
        return state

    def _take(self, cells: int, busy: Sequence[DraftSession]) -> Run | None:
        while (run := self._pool.cells.take(cells)) is None:
            branched = next((state for state in self._states.values() if len(state.lines) > 1), None)
            if branched is not None:
                self._pool.cells.give_back(branched.lines.pop().run)
                continue
            victim = next((session for session in self._states if session not in busy), None)
            if victim is None:
                return None
            self.evict(victim)
        return run

    def _spare(self, state: State, cells: int) -> Line | None:
        """A branch whose guess is over, or a new one."""
        for line in [line for line in state.lines[1:] if not line.ids]:
            if line.run.length >= cells:
                return line
            state.lines.remove(line)  # the session has outgrown it
            self._pool.cells.give_back(line.run)
        run = self._pool.cells.take(cells)
        if run is None:
            return None
        state.lines.append(Line(run))
        return state.lines[-1]
