"""draft/drafters/ngram.py: prompt lookup."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.draft.drafters import DraftSession, load_drafter
from specdec.draft.drafters.ngram import NgramDrafter


def propose(tokens, k=3, drafter=None):
    (ids,) = (drafter or NgramDrafter()).propose([DraftSession(1, 1, list(tokens))], [k])
    return ids


@pytest.mark.parametrize(
    ("tokens", "ids"),
    [
        ([5, 6, 7, 8, 5, 6], [7, 8, 5]),
        ([1, 2, 3, 9, 0, 2, 3, 8, 1, 2, 3], [9, 0, 2]),  # [1, 2, 3] is longer than the newer [2, 3]
        ([2, 3, 7, 2, 3, 8, 2, 3], [8, 2, 3]),  # of two as long, the newer
        ([1, 2, 3, 4, 5, 0, 9, 2, 3, 4, 5, 7, 1, 2, 3, 4, 5], [7, 1, 2]),  # no longer than 4, so the newer
        ([4, 4, 4], [4]),  # it may overlap itself
        ([1, 2, 3, 1, 2, 3], [1, 2, 3]),
    ],
)
def test_what_followed_the_longest_then_newest_match(tokens, ids):
    assert propose(tokens) == ids


@pytest.mark.parametrize("tokens", [[], [1], [1, 2], [1, 1], [1, 2, 1], [1, 2, 3, 4, 3, 2, 1], [1, 2, 0, 2, 1]])
def test_no_match_is_no_draft(tokens):
    assert propose(tokens) == []


@pytest.mark.parametrize("k", range(1, 9))
def test_nothing_is_proposed_past_what_is_known(k):
    tokens = [5, 6, 7, 8, 5, 6]
    assert propose(tokens, k) == [7, 8, 5, 6][:k]


def test_each_session_has_its_own_memory():
    drafter = NgramDrafter()
    one, two = DraftSession(1, 1, [1, 2, 3, 1, 2]), DraftSession(2, 1, [1, 2, 4, 1, 2])
    assert drafter.propose([one, two], [1, 2]) == [[3], [4, 1]]
    assert drafter.propose([two], [1]) == [[4]]
    again = DraftSession(1, 2, [1, 2])  # the same session in a new epoch
    assert drafter.propose([again, one], [1, 1]) == [[], [3]]


def test_a_forgotten_session_leaves_nothing():
    drafter = NgramDrafter()
    sessions = [DraftSession(i, 1, [1, 2, 3, 1, 2]) for i in range(3)]
    drafter.propose(sessions, [1, 1, 1])
    assert len(drafter._indexes) == 3
    for session in [*sessions, sessions[0], DraftSession(9, 1)]:
        drafter.forget(session)
    assert not drafter._indexes


def test_it_is_built_in():
    assert isinstance(load_drafter("ngram"), NgramDrafter)


def reference(tokens, k, shortest, longest):
    """The same, by looking through everything each time."""
    for n in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if len(tokens) > n and tokens[end - n : end] == tokens[-n:]:
                return tokens[end : end + k]
    return []


@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(
    pieces=st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=15),
    k=st.integers(1, 7),
    sizes=st.sampled_from([(2, 4), (1, 1), (1, 3), (3, 3), (2, 6)]),
)
def test_the_growing_index_finds_what_a_full_search_finds(pieces, k, sizes):
    drafter, session = NgramDrafter(*sizes), DraftSession(1, 1)
    for piece in pieces:
        session.tokens.extend(piece)
        (ids,) = drafter.propose([session], [k])
        assert ids == reference(session.tokens, k, *sizes)
        assert len(ids) <= k
