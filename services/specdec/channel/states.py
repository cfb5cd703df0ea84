"""The target's hidden states on their way from its worker to the draft, for EAGLE-3 heads.

A frame carries the tokens of one pass, several sessions' together: rows, then the ids that were fed, then their states.
A pass that does not fit a frame is cut over several. Nobody waits here: what finds the ring full is counted and lost,
and the head's context then starts later.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec.channel.layout import SLOT_HEAD, STATES_HEAD, STATES_ROW
from specdec.channel.segment import Segment
from specdec.errors import SetupError

# numpy has no bfloat16: its bits travel as uint16
DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
}


@dataclass(frozen=True, eq=False)
class States:
    """Hidden states of consecutive tokens of one session, from one pass of the target."""

    position: int  # of the first token, from the prompt's start
    tokens: tuple[int, ...]  # what was fed; after the first few they may be drafts that were rejected
    rows: NDArray[Any]  # [tokens, layers * width]; bfloat16 comes as uint16
    dtype: str  # a key of DTYPES


@dataclass(frozen=True)
class Fed:
    """`tokens` consecutive tokens of one session in a pass."""

    session: int
    epoch: int
    position: int
    tokens: int


class StatesWriter:
    """The worker's end. `width` numbers a token, of `dtype`: the states after each of `layers` layers, joined.

    Raises SetupError if a frame has no room for a token and its drafts.
    """

    def __init__(self, segment: Segment, layers: Sequence[int], width: int, dtype: str) -> None:
        self._ring, self._lost = segment.writer("states"), segment.word("worker.states_lost")
        self._head = np.zeros(1, STATES_HEAD)
        self._head["width"], self._head["dtype"], self._head["layers"] = width, dtype, _name(layers)
        self._token_bytes = 4 + width * DTYPES[dtype].itemsize
        around = SLOT_HEAD.itemsize + STATES_HEAD.itemsize
        self._room = segment.layout.states.slot_bytes - around
        # a row with drafts must not be cut: whether its states stand hangs on the drafts before them
        whole = STATES_ROW.itemsize + (segment.layout.max_steps + 1) * self._token_bytes
        if self._room < whole:
            needed = segment.layout.states.slots * (around + whole)
            raise SetupError(
                f"hidden states of {segment.layout.max_steps} drafts and the token before them do not fit a frame: "
                f"raise --states-mb to {needed // 2**20 + 1} or more, or lower --max-steps"
            )

    def skip(self, tokens: int) -> bool:
        """Whether nothing can be written now. Counts the `tokens` of a pass as lost then."""
        if full := self._ring.full:
            self._lost.value = self._lost.value + tokens
        return full

    def write(self, fed: Iterable[Fed], ids: NDArray[np.int32], states: NDArray[Any]) -> None:
        """One pass: `ids` [T] and `states` [T, width] of all of `fed`, one after the other."""
        at = 0
        for frame in self._frames(fed):
            count = sum(row.tokens for row in frame)
            self._head["rows"], self._head["tokens"] = len(frame), count
            rows = np.array([(row.session, row.epoch, row.position, row.tokens) for row in frame], STATES_ROW)
            if not self._ring.write(self._head, rows, ids[at : at + count], states[at : at + count]):
                self._lost.value = self._lost.value + count
            at += count

    def _frames(self, fed: Iterable[Fed]) -> Iterator[list[Fed]]:
        frame: list[Fed] = []
        room = self._room
        for row in fed:
            while row.tokens:
                count = min(row.tokens, (room - STATES_ROW.itemsize) // self._token_bytes)
                if count < 1 or (count < row.tokens and frame):  # cut only what is longer than a frame: prompts
                    yield frame
                    frame, room = [], self._room
                    continue
                frame.append(Fed(row.session, row.epoch, row.position, count))
                room -= STATES_ROW.itemsize + count * self._token_bytes
                row = Fed(row.session, row.epoch, row.position + count, row.tokens - count)
        if frame:
            yield frame


class StatesReader:
    """The draft's end, for a head that reads the states after `layers`."""

    def __init__(self, segment: Segment, layers: Sequence[int]) -> None:
        self._ring, self._layers = segment.reader("states"), _name(layers)
        self._ring.skip_to_end()

    def read_all(self) -> Iterator[tuple[int, States]]:
        """(session, states) of everything that has come. Raises SetupError if they are of other layers.

        The epoch is left aside: what a state is worth hangs on the tokens up to its own, which travel with it.
        """
        for body in self._ring.read_all():
            head = np.frombuffer(body, STATES_HEAD, 1)[0]
            if head["layers"] != self._layers:
                raise SetupError(
                    f"the target hands over the states after layers {head['layers'].decode()}, the head reads "
                    f"{self._layers.decode()}: give the verifier's --head and the draft's --model the same folder"
                )
            at = STATES_HEAD.itemsize + int(head["rows"]) * STATES_ROW.itemsize
            rows = np.frombuffer(body, STATES_ROW, int(head["rows"]), STATES_HEAD.itemsize).tolist()
            total, width, dtype = int(head["tokens"]), int(head["width"]), head["dtype"].decode()
            ids = np.frombuffer(body, np.int32, total, at).tolist()
            states = np.frombuffer(body, DTYPES[dtype], total * width, at + 4 * total).reshape(total, width)
            used = 0
            for session, _, position, count in rows:
                span = slice(used, used + count)
                # a view of a frame that others share would keep all of it
                part = states[span] if len(rows) == 1 else states[span].copy()
                yield session, States(position, tuple(ids[span]), part, dtype)
                used += count


def _name(layers: Sequence[int]) -> bytes:
    return ",".join(map(str, layers)).encode()
