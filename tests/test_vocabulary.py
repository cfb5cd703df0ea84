"""Vocabularies: which drafts may serve which targets."""

import pytest

from specdec.errors import VocabularyMismatch
from specdec.vocabulary import UNREADABLE, Vocabulary

WORDS = {f"token{i}": i for i in range(100)}
TARGET = Vocabulary.of(WORDS)


def test_the_same_tokens_are_accepted_in_any_order():
    TARGET.accept(dict(reversed(WORDS.items())))


def test_a_draft_may_know_more_tokens():
    TARGET.accept(WORDS | {f"<pad{i}>": 100 + i for i in range(128)})


def test_holes_are_part_of_a_vocabulary():
    holes = {token: number for token, number in WORDS.items() if number % 7}
    Vocabulary.of(holes).accept(holes)
    with pytest.raises(VocabularyMismatch):
        Vocabulary.of(holes).accept(WORDS)


@pytest.mark.parametrize(
    ("draft", "why"),
    [
        ({token: number for token, number in WORDS.items() if number < 99}, "has 99 tokens, the target's 100"),
        ({token: number ^ 1 for token, number in WORDS.items()}, "some ids are other tokens"),
        (WORDS | {"token7": 8, "token8": 7}, "some ids are other tokens"),
        ({f"{token}x": number for token, number in WORDS.items()}, r"tokenizer has 100, the target's 100"),
        ({}, "has 0 tokens"),
    ],
    ids=["shorter", "permuted", "two exchanged", "other words", "none"],
)
def test_a_draft_with_other_ids_is_refused_with_both_sizes(draft, why):
    with pytest.raises(VocabularyMismatch, match=why) as refused:
        TARGET.accept(draft)
    assert "--trust-vocabulary" in str(refused.value)


def test_tokens_that_run_together_are_not_taken_for_each_other():
    assert Vocabulary.of({"a": 0, "b": 1}) != Vocabulary.of({"a1": 0, "b": 1})
    assert Vocabulary.of({"a\x001\x00b": 0}).fingerprint != Vocabulary.of({"a": 0, "b": 1}).fingerprint


def test_a_target_without_a_tokenizer_accepts_any_draft():
    Vocabulary(100, UNREADABLE).accept({"other": 0})


def test_no_real_fingerprint_says_unknown_or_unreadable():
    assert all(Vocabulary.of({str(i): 0}).fingerprint > UNREADABLE for i in range(2000))
