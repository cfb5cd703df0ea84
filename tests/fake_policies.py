"""Step policies for tests."""

import os
from itertools import cycle
from pathlib import Path

from specdec.router.pairs import Session, Verdict
from specdec.router.steps import Order


class Cycling:
    """Another step count every cycle, 0 and the largest among them."""

    def __init__(self, steps: int, max_steps: int, window: int) -> None:
        self._steps, self._window = cycle([4, 0, 2, max_steps, 1, 3]), window

    def order(self, session: Session) -> Order:
        return Order(next(self._steps), self._window)

    def observe(self, verdict: Verdict) -> None: ...


class Pausing:
    """A fixed k, and 0 for as long as a file lies beside the drafts' (SPECDEC_TEST_ORACLE)."""

    def __init__(self, steps: int, max_steps: int, window: int) -> None:
        self._steps, self._window = steps, window
        self._pause = pause_file(Path(os.environ["SPECDEC_TEST_ORACLE"]))

    def order(self, session: Session) -> Order:
        return Order(0 if self._pause.exists() else self._steps, self._window)

    def observe(self, verdict: Verdict) -> None: ...


def pause_file(oracle: Path) -> Path:
    """What makes `Pausing` pause."""
    return oracle.with_suffix(".pause")
