"""Whether a draft means by a token id what its target means.

The target's engine writes its vocabulary's size and fingerprint into the segment; a draft with a tokenizer of its own
compares before it drafts. Sizes alone would not do: models pad their logits, and a permuted vocabulary is as large.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import NamedTuple

from specdec.errors import VocabularyMismatch

UNREADABLE = 1  # the fingerprint of a target whose engine has no tokenizer


class Vocabulary(NamedTuple):
    """Ids from 0 up to `size` may be proposed; `fingerprint` is of what they stand for, never 0."""

    size: int
    fingerprint: int

    @classmethod
    def of(cls, ids: Mapping[str, int], size: int | None = None) -> "Vocabulary":
        """The vocabulary of a tokenizer's `get_vocab()`: token to id, added tokens included. `size`: only ids below."""
        size = 1 + max(ids.values(), default=-1) if size is None else size
        pairs = json.dumps(sorted((number, token) for token, number in ids.items() if number < size))
        digest = hashlib.blake2b(pairs.encode(), digest_size=8).digest()
        return cls(size, int.from_bytes(digest, "little") | 2)  # neither 0 nor UNREADABLE

    def accept(self, draft: Mapping[str, int]) -> None:
        """Raises VocabularyMismatch unless each of the target's ids is the same token in the draft's tokenizer.

        A draft may know more: ids from `size` on are never proposed to this target.
        """
        if self.fingerprint == UNREADABLE:
            return
        own = Vocabulary.of(draft)
        if own.size < self.size:
            why = f"the draft's tokenizer has {own.size} tokens, the target's {self.size}"
        elif Vocabulary.of(draft, self.size) != self:
            why = f"some ids are other tokens (the draft's tokenizer has {own.size}, the target's {self.size})"
        else:
            return
        raise VocabularyMismatch(
            f"draft and target do not share a vocabulary: {why}; use a draft with the target's own tokenizer, or "
            "--trust-vocabulary if you know that the ids agree"
        )
