"""Fake drafts for tests: they know the target's answers from a file (SPECDEC_TEST_ORACLE), or pretend to."""

import json
import os
import random
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from specdec.draft.drafters import DraftSession
from specdec.model import demo_model

VOCABULARY = 49152
AUX_LAYERS = (2, 15, 27)  # of the demo model's 30
COLUMNS = [0, 97, 575, 576, 1000, 1151, 1152, 1411, 1727]  # some of each layer's 576


class Perfect:
    """Proposes what the target will say, so everything is accepted; falls silent where its file ends."""

    def __init__(self) -> None:
        self._known: list[list[int]] = json.loads(Path(os.environ["SPECDEC_TEST_ORACLE"]).read_text())
        self._random = random.Random(7)

    def propose(self, sessions: Sequence[DraftSession], steps: Sequence[int]) -> list[list[int]]:
        return [self.spoil(self._next(s.tokens, k), k) for s, k in zip(sessions, steps, strict=True)]

    def forget(self, session: DraftSession) -> None: ...

    def spoil(self, right: list[int], k: int) -> list[int]:
        return right

    def _next(self, tokens: list[int], k: int) -> list[int]:
        n = len(tokens)
        return max((known[n : n + k] for known in self._known if known[:n] == tokens), key=len, default=[])


class Noisy(Perfect):
    """Right three times of four, at any position, and sometimes shorter than asked."""

    def spoil(self, right: list[int], k: int) -> list[int]:
        ids = [t if self._random.random() < 0.75 else (t + 1) % VOCABULARY for t in right]
        return ids[: self._random.randint(0, k)]


class Against(Perfect):
    """Scripted against the target: every first token is wrong, every later one is what would have been right."""

    def spoil(self, right: list[int], k: int) -> list[int]:
        return [(right[0] + 1) % VOCABULARY, *right[1:]] if right else []


class Random(Perfect):
    """Any tokens, the highest and the lowest among them."""

    def spoil(self, right: list[int], k: int) -> list[int]:
        return [self._random.choice((0, VOCABULARY - 1, self._random.randrange(VOCABULARY))) for _ in range(k)]


class NoEnd(Perfect):
    """Right, but never the end of an answer (token 2), which so is always a bonus token."""

    def spoil(self, right: list[int], k: int) -> list[int]:
        return right[: right.index(2)] if 2 in right else right


class PastEnd(Perfect):
    """Right, and after the end of an answer (token 2) anything: what must never be delivered."""

    def spoil(self, right: list[int], k: int) -> list[int]:
        if 2 not in right:
            return right
        kept = right[: right.index(2) + 1]
        return kept + [self._random.randrange(VOCABULARY) for _ in range(k - len(kept))]


class Listening(Noisy):
    """Writes down which hidden states it was given of a session's committed tokens, some columns, a file a session."""

    aux_layers = AUX_LAYERS

    def __init__(self) -> None:
        super().__init__()
        self._folder = states_folder(Path(os.environ["SPECDEC_TEST_ORACLE"]))
        self._read: dict[DraftSession, dict[int, np.ndarray[Any, Any]]] = {}

    def propose(self, sessions: Sequence[DraftSession], steps: Sequence[int]) -> list[list[int]]:
        self.ahead(sessions)
        return super().propose(sessions, steps)

    def ahead(self, sessions: Collection[DraftSession]) -> bool:
        for session in sessions:
            read = self._read.setdefault(session, {})
            for states in session.settled():
                read |= {states.position + i: row[COLUMNS].copy() for i, row in enumerate(states.rows)}
        return False

    def forget(self, session: DraftSession) -> None:
        read = self._read.pop(session, {})
        path = self._folder / f"{session.id}-{session.epoch}.npz"
        rows = np.stack([read[i] for i in sorted(read)]) if read else np.zeros((0, 0), np.float32)
        np.savez(path.with_suffix(".tmp.npz"), tokens=session.tokens, positions=sorted(read), rows=rows)
        path.with_suffix(".tmp.npz").rename(path)


def states_folder(oracle: Path) -> Path:
    """Where `Listening` writes."""
    return oracle.parent


class InTrouble(Perfect):
    """Right, and in trouble for as long as a file lies beside its own."""

    def __init__(self) -> None:
        super().__init__()
        self._trouble = trouble_file(Path(os.environ["SPECDEC_TEST_ORACLE"]))


class OutOfMemory(InTrouble):
    """In trouble each proposal raises what a full device does."""

    def propose(self, sessions: Sequence[DraftSession], steps: Sequence[int]) -> list[list[int]]:
        if self._trouble.exists():
            raise MemoryError
        return super().propose(sessions, steps)


class Slowing(InTrouble):
    """At an even pace; in trouble at a fifth of it."""

    def propose(self, sessions: Sequence[DraftSession], steps: Sequence[int]) -> list[list[int]]:
        time.sleep(0.05 if self._trouble.exists() else 0.01)
        return super().propose(sessions, steps)


def trouble_file(oracle: Path) -> Path:
    """What brings a draft into trouble."""
    return oracle.with_suffix(".trouble")


class Bigrams(Perfect):
    """What the target would say, as long as it has; then after each token the one that most often follows it in the
    file, else any: drafts for answers nobody knows."""

    def __init__(self) -> None:
        super().__init__()
        followers: dict[int, Counter[int]] = defaultdict(Counter)
        for known in self._known:
            for token, following in pairwise(known):
                followers[token][following] += 1
        self._best = {token: counts.most_common(1)[0][0] for token, counts in followers.items()}

    def _next(self, tokens: list[int], k: int) -> list[int]:
        if known := super()._next(tokens, k):
            return known
        ids = [tokens[-1]]
        for _ in range(k):
            ids.append(self._best.get(ids[-1], self._random.randrange(VOCABULARY)))
        return ids[1:]


class Garbage(Perfect):
    """What must never reach the target: too many, negative, beyond the vocabulary, beyond 32 bits."""

    def spoil(self, right: list[int], k: int) -> list[int]:
        return [self._random.choice((-1, VOCABULARY, 2**31 - 1, 2**40, -(2**35))) for _ in range(k + 3)]


class Limited(Perfect):
    """Right, for sessions of at most 200 tokens."""

    context_limit = 200


class Same(Perfect):
    """Right, and with the demo model's own vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        file = json.loads((demo_model() / "tokenizer.json").read_text())
        self.vocabulary: dict[str, int] = file["model"]["vocab"] | {t["content"]: t["id"] for t in file["added_tokens"]}


class Permuted(Same):
    """The same tokens under other ids."""

    def __init__(self) -> None:
        super().__init__()
        self.vocabulary = {token: VOCABULARY - 1 - number for token, number in self.vocabulary.items()}
