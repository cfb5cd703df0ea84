"""How many draft tokens the next cycle gets. A policy reads counts and times, never token values.

A policy is two verbs, and is called between a verdict and the next order, so it must be quick.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, cast

from specdec.plugins import make

if TYPE_CHECKING:
    from specdec.router.pairs import Session, Verdict


@dataclass(frozen=True)
class Order:
    """What a session does next: `steps` draft tokens a cycle (k), for at most `window` cycles until the next order."""

    steps: int
    window: int


class StepPolicy(Protocol):
    """Decides k."""

    def order(self, session: "Session") -> Order:
        """The session's next order. The session's own cap is applied afterwards."""
        ...

    def observe(self, verdict: "Verdict") -> None:
        """Learns from what a cycle did."""
        ...


class FixedSteps:
    """Always the same k."""

    def __init__(self, steps: int, max_steps: int, window: int) -> None:
        self._order = Order(min(steps, max_steps), window)

    def order(self, session: "Session") -> Order:
        return self._order

    def observe(self, verdict: "Verdict") -> None: ...


@dataclass
class _Acceptance:
    """Drafts accepted a cycle, decayed; cycles without drafts say nothing."""

    mean: float
    _weight: float = field(default=0.2, repr=False)

    def observe(self, accepted: int, proposed: int) -> None:
        # a run accepted whole says only that the true length is at least that: let it grow by one
        length = accepted + 1 if accepted == proposed else accepted
        self.mean += self._weight * (length - self.mean)


class AcceptLengthSteps:
    """k is one more than what is usually accepted, session by session, at least 1.

    It follows the accept length only; it does not know what a cycle costs.
    """

    def __init__(self, steps: int, max_steps: int, window: int) -> None:
        self._start, self._max_steps, self._window = min(steps, max_steps), max_steps, window
        self._sessions: dict[Session, _Acceptance] = {}  # by identity: each pair numbers its own

    def order(self, session: "Session") -> Order:
        known = self._sessions.get(session)
        steps = self._start if known is None else min(self._max_steps, max(1, int(known.mean + 1.5)))
        return Order(steps, self._window)

    def observe(self, verdict: "Verdict") -> None:
        if verdict.session.finished:
            self._sessions.pop(verdict.session, None)
        elif verdict.proposed:
            known = self._sessions.setdefault(verdict.session, _Acceptance(float(self._start)))
            known.observe(verdict.accepted, verdict.proposed)


def load_policy(name: str, steps: int, max_steps: int, window: int) -> StepPolicy:
    """A policy by its name, or `module:Class` made with (steps, max_steps, window). Raises SettingsError."""
    built_in = {"fixed": FixedSteps, "accept-length": AcceptLengthSteps}
    if name in built_in:
        return cast(StepPolicy, built_in[name](steps, max_steps, window))
    return cast(StepPolicy, make("--policy", name, tuple(built_in), ("order", "observe"), steps, max_steps, window))
