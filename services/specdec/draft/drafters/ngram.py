"""Prompt lookup: what followed the last occurrence of the newest n tokens is proposed again (Saxena 2023).

No weights. It pays where the answer repeats the prompt or itself: code, summaries, extraction.
"""

from collections.abc import Sequence

from specdec.draft.drafters import DraftSession


class _Index:
    """Where each n-gram of one session ends, the newest place of each; grows with the session."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._ends: dict[tuple[int, ...], int] = {}  # n-gram: the position after it
        self._indexed = 0

    def find(self, tokens: list[int]) -> int | None:
        """The position after the newest earlier occurrence of the longest known suffix, or None."""
        last = len(tokens)
        # the suffix itself is not entered yet, so what is found lies before it
        for end in range(self._indexed + 1, last):
            for n in self._sizes:
                if end >= n:
                    self._ends[tuple(tokens[end - n : end])] = end
        self._indexed = max(self._indexed, last - 1)
        for n in self._sizes:
            if last > n and (found := self._ends.get(tuple(tokens[last - n :]))) is not None:
                return found
        return None


class NgramDrafter:
    """n from `longest` down to `shortest`; a session without a match gets no drafts, which costs nothing."""

    def __init__(self, shortest: int = 2, longest: int = 4) -> None:
        self._shortest, self._longest = shortest, longest
        self._indexes: dict[DraftSession, _Index] = {}

    def propose(self, sessions: Sequence[DraftSession], steps: Sequence[int]) -> list[list[int]]:
        return [self._propose(session, k) for session, k in zip(sessions, steps, strict=True)]

    def forget(self, session: DraftSession) -> None:
        self._indexes.pop(session, None)

    def _propose(self, session: DraftSession, k: int) -> list[int]:
        index = self._indexes.get(session)
        if index is None:
            index = self._indexes[session] = _Index(self._shortest, self._longest)
        start = index.find(session.tokens)
        return [] if start is None else session.tokens[start : start + k]
