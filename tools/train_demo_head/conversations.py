"""Conversations of the target: as answers.py writes them, and as train.py reads them."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

Item = tuple[np.ndarray, np.ndarray]  # token ids, and which of them the target wrote


@dataclass
class Conversation:
    """What stands so far. `generated` are the spans [start, end) that the target wrote."""

    tokens: list[int]
    temperature: float
    turns: int  # answers still wanted after the one being written
    user_next: bool = False  # it is the user's message that is being written
    generated: list[tuple[int, int]] = field(default_factory=list)


def save(path: Path, done: list[Conversation]) -> None:
    """All tokens in a row: `tokens`, `generated` (the target's own), and by conversation its end and `greedy`."""
    ends = np.cumsum([len(it.tokens) for it in done])
    generated = np.zeros(ends[-1], bool)
    for end, it in zip(ends, done, strict=True):
        for first, last in it.generated:
            generated[end - len(it.tokens) + first : end - len(it.tokens) + last] = True
    path.parent.mkdir(parents=True, exist_ok=True)
    greedy = np.array([it.temperature == 0 for it in done])
    flat = np.concatenate([np.asarray(it.tokens, np.uint32) for it in done])
    np.savez(path, tokens=flat, generated=generated, ends=ends, greedy=greedy)


class Data:
    """What lies in a folder; `held_out` greedy conversations of it are for measuring."""

    def __init__(self, folder: Path, held_out: int) -> None:
        self._parts = [dict(np.load(path)) for path in sorted(folder.glob("part-*.npz"))]
        items: list[Item] = []
        for part in self._parts:
            starts = np.concatenate([[0], part["ends"][:-1]])
            spans = zip(starts, part["ends"], strict=True)
            items += [(part["tokens"][a:b], part["generated"][a:b]) for a, b in spans]
        greedy = np.concatenate([part["greedy"] for part in self._parts])
        chosen = set(np.flatnonzero(greedy)[:held_out].tolist())
        self._held_out = [items[i] for i in sorted(chosen)]
        self._items = [it for i, it in enumerate(items) if i not in chosen]
        self.tokens = sum(len(tokens) for tokens, _ in self._items)

    def counts(self, vocabulary: int) -> np.ndarray:  # [vocabulary]
        """How often the target wrote each token."""
        return sum(np.bincount(p["tokens"][p["generated"]], minlength=vocabulary) for p in self._parts)

    def batches(
        self, size: int, order: random.Random | None, device: torch.device
    ) -> Iterator[tuple[torch.Tensor, ...]]:
        """Conversations of similar length, at most `size` tokens with what pads them: (token ids, which of them the
        target wrote), both [B, T]. Those to train on in a random order, or without one those held out."""
        items = list(self._items if order else self._held_out)
        if order:
            order.shuffle(items)
        batches: list[list[Item]] = []
        for first in range(0, len(items), 8192):
            batch: list[Item] = []
            for it in sorted(items[first : first + 8192], key=lambda it: len(it[0])):
                if batch and (len(batch) + 1) * _padded(len(it[0])) > size:
                    batches.append(batch)
                    batch = []
                batch.append(it)
            batches.append(batch)
        if order:
            order.shuffle(batches)
        for batch in batches:
            shape = len(batch), _padded(max(len(tokens) for tokens, _ in batch))
            tokens, written = np.zeros(shape, np.int64), np.zeros(shape, bool)
            for row, (its, mask) in enumerate(batch):
                tokens[row, : len(its)], written[row, : len(its)] = its, mask
            yield torch.from_numpy(tokens).to(device), torch.from_numpy(written).to(device)


def _padded(length: int) -> int:
    return -(-length // 64) * 64
