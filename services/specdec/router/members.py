"""A JSON container's members as slices of its text: nothing is built, and the text is checked in pieces.

A call that holds the interpreter for long holds up everybody's streams, also from a thread. Here none does for more
than a few milliseconds, whatever the text: numpy lets go of the interpreter, and msgspec gets one piece at a time.
"""

import re
from itertools import pairwise

import msgspec
import numpy as np
import numpy.typing as npt

_CHUNK = 1 << 18  # bytes in one call
_QUOTE, _COMMA = ord('"'), ord(",")
_STEPS = np.zeros(256, np.int8)  # how a byte outside strings changes the nesting
_STEPS[list(b"[{")] = 1
_STEPS[list(b"]}")] = -1
_BLANK = re.compile(rb"[ \t\r\n]*")
_NAME = re.compile(rb'[ \t\r\n]*("(?:[^"\\]|\\.)*")[ \t\r\n]*:[ \t\r\n]*', re.DOTALL)
_NAME_BYTES = 1 << 12


class NotJson(ValueError):
    """The text is no JSON, or not of the kind that was asked for."""


class TooDeep(ValueError):
    """Its containers are nested too deeply."""


class TooMany(ValueError):
    """The container has too many members."""


def members(text: bytes, most: int, deepest: int, *, check: bool) -> list[bytes]:
    """The members of an array, or those of an object, each with its name. Raises TooMany, TooDeep and NotJson.

    `check`: whether the text may be no JSON. As msgspec does for a Raw, strings' UTF-8 and numbers' range are left out.
    """
    pieces = _Pieces(text, deepest) if check else None
    commas: list[int] = []
    depth, inside, escaped = 0, False, False
    for at in range(0, len(text), _CHUNK):
        part, escaped = _unescaped(text[at : at + _CHUNK], escaped)
        codes = np.frombuffer(part, np.uint8)
        quoted = (np.cumsum(codes == _QUOTE, dtype=np.uint8) & 1).astype(bool)  # but for the closing quote
        if inside:
            np.logical_not(quoted, out=quoted)
        inside = bool(quoted[-1])
        steps = _STEPS[codes]
        steps[quoted] = 0
        depths = np.cumsum(steps, dtype=np.int32) + depth
        depth = int(depths[-1])
        if depths.max() > deepest:
            raise TooDeep
        if depths.min() < 0:
            raise NotJson
        between = np.flatnonzero((codes == _COMMA) & ~quoted & (depths > 0))
        outer = between[depths[between] == 1]
        if len(commas) + len(outer) >= most:
            raise TooMany
        commas += (outer + at).tolist()
        if pieces:
            pieces.add(at, codes, steps, depths, between)
    if pieces:
        pieces.end()
    begin, end = _BLANK.match(text).end(), len(text.rstrip(b" \t\r\n"))  # type: ignore[union-attr]  # matches all
    if text[begin : begin + 1] not in (b"[", b"{"):
        raise NotJson
    if not commas and not text[begin + 1 : end - 1].strip(b" \t\r\n"):
        return []
    ends = [begin, *commas, end - 1]
    return [text[left + 1 : right] for left, right in pairwise(ends)]


def named(member: bytes) -> tuple[str, bytes]:
    """(name, value's text) of an object's member. Raises NotJson, also for a name of more than 4 kB."""
    found = _NAME.match(member, 0, _NAME_BYTES)
    if found is None:
        raise NotJson
    try:
        return msgspec.json.decode(found[1], type=str), member[found.end() :].rstrip(b" \t\r\n")
    except (msgspec.MsgspecError, ValueError) as error:
        raise NotJson from error


class _Pieces:
    """Checks a text in pieces that end at a comma. A comma's place is known by the brackets that are open there: with
    these before and behind it, a piece is JSON exactly if it is so where it stands."""

    def __init__(self, text: bytes, deepest: int) -> None:
        self._text = text
        self._opened = np.zeros(deepest + 1, np.uint8)  # by nesting: the bracket that was opened last
        self._begun, self._before = 0, b""  # of the next piece

    def add(
        self,
        at: int,
        codes: npt.NDArray[np.uint8],
        steps: npt.NDArray[np.int8],
        depths: npt.NDArray[np.int32],
        between: npt.NDArray[np.intp],
    ) -> None:
        """The bytes from `at` on, with the nesting's change and depth at each, and the places of their commas."""
        opening = np.flatnonzero(steps > 0)
        if len(between):
            cut = int(between[-1])
            late = int(np.searchsorted(opening, cut))
            self._open(opening[:late], codes, depths)
            self._cut(at + cut, bytes(self._opened[1 : depths[cut] + 1]))
            opening = opening[late:]
        self._open(opening, codes, depths)

    def end(self) -> None:
        """The last piece."""
        self._check(self._text[self._begun :], b"")

    def _open(self, opening: npt.NDArray[np.intp], codes: npt.NDArray[np.uint8], depths: npt.NDArray[np.int32]) -> None:
        self._opened[depths[opening]] = codes[opening]  # where a depth comes more than once, the last stands

    def _cut(self, comma: int, opened: bytes) -> None:
        """A piece ends with the comma at `comma` and the next begins with it, so that each misses no member beside."""
        inmost = b'"":0' if opened[-1:] == b"{" else b"0"
        self._check(self._text[self._begun : comma + 1], inmost + bytes(byte + 2 for byte in reversed(opened)))
        around = opened[:-1].replace(b"{", b'{"":')
        self._begun, self._before = comma, around + opened[-1:] + inmost

    def _check(self, piece: bytes, behind: bytes) -> None:
        try:
            msgspec.json.decode(b"".join((self._before, piece, behind)), type=msgspec.Raw)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise NotJson from error


def _unescaped(part: bytes, escaped: bool) -> tuple[bytes, bool]:
    """As long a text in which every quote begins or ends a string, and whether the byte behind it is escaped.
    `escaped`: the same of its own first byte."""
    if escaped:
        part = b"." + part[1:]
    if b"\\" not in part:
        return part, False
    part = part.replace(b"\\\\", b"..")
    return part.replace(b'\\"', b".."), part.endswith(b"\\")
