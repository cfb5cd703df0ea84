"""Which outcomes of a cycle are worth drafting for while the verifier is still busy with it.

Speculative Speculative Decoding, arXiv 2603.03251. An outcome is (accepted count, the target's next token), and that
token is named by its rank among the draft's own likeliest at that position: 0 is the draft itself. The main line, all k
accepted and then rank 0, costs no more than to go on drafting. Every other guess is a branch, and is drafted for only
if it has come true often enough to pay for its row in each pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

RANKS = 4  # of a position's tokens, the draft itself included; what the target says beyond them is no guess
MOST_BRANCHES = 3  # of a session: each needs cells for its whole text
_ENOUGH = 16  # outcomes at a position before a branch there is considered
_LEAST = 0.05  # a rarer outcome is not worth the host's time, even where a row costs the device nothing
_KEEP = 0.99  # what an older outcome, or an older pass's time, weighs when a new one comes


class Guess(NamedTuple):
    """An outcome beside the main line's: `accepted` drafts stand, then the target says the draft's `rank`th choice."""

    accepted: int
    rank: int


@dataclass
class AheadCounts:
    """What was done between outcomes, and what it was good for. Sessions' proposals, if nothing else is said."""

    hits: int = 0  # were there when they were asked for
    misses: int = 0  # had to be drafted, or drafted on, though something had been drafted ahead
    unused: int = 0  # something had been drafted ahead, and no drafts were wanted
    waited: int = 0  # hits that waited for another session's drafts, as a batch's proposals are one frame
    saved_s: float = 0.0  # passes that frames did not wait for, by what a pass takes
    read: int = 0  # committed tokens


class PassTime:
    """Seconds a forward pass takes, by its rows: the straight line through what was measured lately."""

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = self._rows2 = self._both = 0.0

    def add(self, rows: int, seconds: float) -> None:
        sums = (self._weight, self._rows, self._seconds, self._rows2, self._both)
        new = (1.0, rows, seconds, rows * rows, rows * seconds)
        self._weight, self._rows, self._seconds, self._rows2, self._both = (
            _KEEP * old + one for old, one in zip(sums, new, strict=True)
        )

    @property
    def of_a_row(self) -> float:
        """What another row costs; 0 until passes of different sizes were seen."""
        spread = self._weight * self._rows2 - self._rows**2
        if spread <= 1e-6 * self._rows**2:
            return 0.0
        return max(0.0, (self._weight * self._both - self._rows * self._seconds) / spread)

    def of(self, rows: int) -> float:
        """What a pass of that many rows costs; 0 before the first."""
        if not self._weight:
            return 0.0
        return max(0.0, self._seconds / self._weight + self.of_a_row * (rows - self._rows / self._weight))


class RunAhead:
    """Learns from outcomes which guesses come true, and names those that pay."""

    def __init__(self) -> None:
        self.time = PassTime()
        self._seen: list[list[float]] = []  # [position][rank]: outcomes, the older the less; rank RANKS is "another"

    def learn(self, ranks: Sequence[int]) -> None:
        """One outcome: the rank of the target's token at each position it decided, RANKS if the draft named it not."""
        while len(self._seen) < len(ranks):
            self._seen.append([0.0] * (RANKS + 1))
        for seen, rank in zip(self._seen, ranks, strict=False):
            seen[:] = [_KEEP * count for count in seen]
            seen[rank] += 1

    def probability(self, guess: Guess) -> float:
        """How often this is the outcome: every earlier position's draft stands, and the rank is right at its own."""
        return prod(self._rate(i, 0) for i in range(guess.accepted)) * self._rate(*guess)

    def branches(self, steps: int) -> list[Guess]:
        """The guesses worth a branch when `steps` drafts are being verified, the likeliest first.

        A branch that comes true saves as many passes as it took rows; so it pays where its probability is more than
        what a row adds to a pass, over what a pass costs.
        """
        guesses = [
            (self.probability(guess), guess)
            for accepted in range(min(steps + 1, len(self._seen)))
            if sum(self._seen[accepted]) >= _ENOUGH
            for guess in (Guess(accepted, rank) for rank in range(1, RANKS))
        ]
        row = self.time.of_a_row
        least = row / max(row, self.time.of(1)) if row else 0.0
        paying = [(p, guess) for p, guess in guesses if p >= _LEAST and p > least]
        return [guess for _, guess in sorted(paying, key=lambda pair: (-pair[0], pair[1]))[:MOST_BRANCHES]]

    def _rate(self, position: int, rank: int) -> float:
        seen = self._seen[position] if position < len(self._seen) else []
        return seen[rank] / sum(seen) if seen else 0.0
