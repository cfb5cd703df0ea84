"""Step policies for tests."""

from itertools import cycle

from specdec.router.pairs import Session, Verdict
from specdec.router.steps import Order


class Cycling:
    """Another step count every cycle, 0 and the largest among them."""

    def __init__(self, steps: int, max_steps: int, window: int) -> None:
        self._steps, self._window = cycle([4, 0, 2, max_steps, 1, 3]), window

    def order(self, session: Session) -> Order:
        return Order(next(self._steps), self._window)

    def observe(self, verdict: Verdict) -> None: ...
