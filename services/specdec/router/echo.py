"""What an engine's message repeats of a request."""

import json
import re

import numpy as np
import numpy.typing as npt

_SHORTEST = 16  # characters in a row
_BLOCK, _STRIDE = 12, 4  # bytes: of sixteen in a row twelve begin at a multiple of four
_CHUNK = 1 << 18  # bytes of the request in one call: numpy's let go of the interpreter, and others run meanwhile
_LOOKS = 1000  # places of the request that are looked at byte by byte
_MIX = np.uint64(0x9E3779B97F4A7C15)
_ELLIPSIS = "…"
_SAYS_NOTHING = re.compile(r"[\W_]*")


def without_echo(message: str, asked: bytes) -> str:
    """`message` without what is in the body `asked`, too, sixteen characters in a row or more; empty where nothing is
    left. The body is searched as it is, in steps: building it would hold up others for as long as it is large."""
    echoed = np.zeros(len(message), bool)
    for ascii_only in (True,) if message.isascii() else (True, False):  # clients write either
        spelled = [json.dumps(letter, ensure_ascii=ascii_only)[1:-1].encode(errors="replace") for letter in message]
        _mark(echoed, spelled, asked)
    if not echoed.any():
        return message
    starts = echoed & ~np.concatenate(([False], echoed[:-1]))
    kept = "".join(
        _ELLIPSIS if start else "" if gone else letter
        for letter, gone, start in zip(message, echoed, starts, strict=True)
    )
    return "" if _SAYS_NOTHING.fullmatch(kept) else kept


def _mark(echoed: npt.NDArray[np.bool_], spelled: list[bytes], asked: bytes) -> None:
    """Says in `echoed` which letters stand in `asked`. `spelled`: each as it would stand there."""
    said = b"".join(spelled)
    if len(said) < _BLOCK or len(asked) < _BLOCK:
        return
    letter = np.repeat(np.arange(len(spelled)), [len(one) for one in spelled])  # of each byte
    known, which = np.unique(_keys(said, 1), return_inverse=True)  # by place of the message
    looks = 0
    for at in range(0, len(asked) - _BLOCK + 1, _CHUNK):
        keys = _keys(asked[at : at + _CHUNK + _BLOCK - _STRIDE], _STRIDE)
        found = np.minimum(np.searchsorted(known, keys), len(known) - 1)
        opened = _open(echoed[letter], which)
        for hit in np.flatnonzero((known[found] == keys) & opened[found]).tolist():
            if not opened[found[hit]]:
                continue  # known by now
            looks += 1
            more = False
            for here in np.flatnonzero(which == found[hit]).tolist():
                there = at + _STRIDE * hit
                begin, end = _shared(said, here, asked, there) if looks <= _LOOKS else (here, here + _BLOCK)
                first, last = letter[begin], letter[end - 1]
                if last - first + 1 >= _SHORTEST or looks > _LOOKS:
                    echoed[first : last + 1] = more = True
            if more:
                opened = _open(echoed[letter], which)


def _keys(text: bytes, stride: int) -> npt.NDArray[np.uint64]:
    """A number for the twelve bytes from each `stride`th on."""
    keys = np.empty((len(text) - _BLOCK) // stride + 1, np.uint64)
    for offset in range(0, 4, stride):
        words = np.frombuffer(text, "<u4", (len(text) - offset) // 4, offset).astype(np.uint64)
        keys[offset // stride :: 4 // stride] = (words[:-2] | words[1:-1] << np.uint64(32)) * _MIX ^ words[2:]
    return keys


def _open(echoed: npt.NDArray[np.bool_], which: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
    """By key: whether the message has it at a place that is not yet known as an echo. `echoed`: by byte."""
    all_of_it = np.lib.stride_tricks.sliding_window_view(echoed, _BLOCK).all(axis=1)
    return np.bincount(which, weights=~all_of_it) > 0


def _shared(said: bytes, here: int, asked: bytes, there: int) -> tuple[int, int]:
    """From where to where `said` is as `asked`, around the places `here` and `there`."""
    begin, end = here, here
    while begin and there - here + begin and said[begin - 1] == asked[there - here + begin - 1]:
        begin -= 1
    while end < len(said) and there - here + end < len(asked) and said[end] == asked[there - here + end]:
        end += 1
    return begin, end
