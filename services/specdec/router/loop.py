"""The speculation loop: one session, one cycle after another."""

from typing import Protocol

from specdec.router.pairs import Session, Verdict
from specdec.router.steps import Order, OrderPolicy


class Cycles(Protocol):
    """What the loop needs of a pair."""

    async def cycle(self, session: Session, order: Order) -> Verdict:
        """Sends the order and returns the session's next verdict.

        With a window of 1 that is this order's own. With a larger one it may be an earlier order's: the new order
        replaces that one while its cycles run, so `window` cycles are always allowed ahead of the router.
        """
        ...


async def speculate(session: Session, pair: Cycles, policy: OrderPolicy) -> None:
    """Leviathan et al. 2023, with the draft, the target and this loop in three processes."""
    while not session.finished:
        order = policy.order(session)  # step count k for the next cycle
        verdict = await pair.cycle(session, order)  # the draft proposes k, the target verifies, a prefix stands
        policy.observe(verdict)  # proposed, accepted, the tokens' count, stage times
