"""router/acceptance.py: how many drafts stand, and whose never do."""

import random

import pytest

from specdec.router.acceptance import Acceptance, SessionCaps


def stand(rng: random.Random, steps: int, rate: float) -> int:
    """Drafts that stand of `steps`, each with probability `rate` after the one before."""
    count = 0
    while count < steps and rng.random() < rate:
        count += 1
    return count


def fed(acceptance: Acceptance, rng: random.Random, rate: float, cycles: int, steps: int = 3, batch: int = 1) -> int:
    """The first cycle in which a change was found, or 0."""
    for cycle in range(1, cycles + 1):
        if acceptance.observe(steps, [stand(rng, steps, rate) for _ in range(batch)]):
            return cycle
    return 0


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_it_learns_the_rates_and_what_a_cycle_yields(rate):
    acceptance = Acceptance(4)
    for _ in range(400):
        acceptance.observe(4, [stand(RNG, 4, rate) for _ in range(8)])
    tried = 1 if rate < 0.2 else 3
    assert acceptance.rates[:tried] == pytest.approx([rate] * tried, abs=0.06)
    assert acceptance.stood[2] == pytest.approx(rate + rate**2, abs=0.1)


RNG = random.Random(7)


def test_positions_differ_and_untried_ones_are_like_the_one_before():
    acceptance = Acceptance(5)
    for _ in range(600):
        first = RNG.random() < 0.8
        acceptance.observe(2, [first + (first and RNG.random() < 0.3)])
    assert acceptance.rates[0] == pytest.approx(0.8, abs=0.08)
    assert acceptance.rates[1] == pytest.approx(0.3, abs=0.1)
    assert acceptance.rates[2:] == pytest.approx([acceptance.rates[1]] * 3)


def test_a_draft_ordered_and_never_proposed_counts_as_fallen():
    acceptance = Acceptance(4)
    for _ in range(300):
        acceptance.observe(4, [0, 0, 0, 4])  # an n-gram draft: nothing, or all
    assert acceptance.rates[0] == pytest.approx(0.25, abs=0.02)
    assert acceptance.rates[1] == pytest.approx(0.98, abs=0.01)


def test_cycles_without_drafts_teach_nothing():
    acceptance = Acceptance(4)
    before = list(acceptance.rates)
    acceptance.observe(0, [0, 0])
    acceptance.observe(3, [])
    assert acceptance.rates == before


@pytest.mark.parametrize("batch", [1, 8])
def test_a_collapse_is_believed_within_a_few_cycles(batch):
    found = []
    for seed in range(20):
        acceptance, rng = Acceptance(4), random.Random(seed)
        fed(acceptance, rng, 0.8, 300, batch=batch)
        found.append(fed(acceptance, rng, 0.05, 100, batch=batch))
        assert acceptance.rates[0] < 0.5
    assert 0 < max(found) <= 25
    assert 0 not in found


def test_a_fall_by_half_is_believed_too_and_sooner_where_less_proof_is_asked_for():
    def cycles_until_found(proof: float, seed: int) -> int:
        acceptance, rng = Acceptance(4), random.Random(seed)
        fed(acceptance, rng, 0.6, 300, steps=2)
        for cycle in range(1, 400):
            if acceptance.observe(2, [stand(rng, 2, 0.35)], proof=proof) < 0:
                return cycle
        return 400

    usual, hasty = [[cycles_until_found(proof, seed) for seed in range(20)] for proof in (1.0, 0.6)]
    assert sorted(usual)[17] < 150  # not so by a test for falls to a quarter
    assert sum(hasty) < 0.8 * sum(usual)


def test_a_return_is_believed_within_a_few_cycles():
    for seed in range(20):
        acceptance, rng = Acceptance(4), random.Random(seed)
        for _ in range(300):
            acceptance.observe(1, [0])
        assert 0 < fed(acceptance, rng, 0.8, 50, steps=1) <= 20
        fed(acceptance, rng, 0.8, 30, steps=1)
        assert acceptance.rates[0] > 0.5


def test_with_a_return_the_far_positions_are_to_the_first_as_they_were():
    def draft(rng: random.Random, steps: int, first: float) -> list[int]:
        """An n-gram draft's: the first rarely stands, those after it often."""
        return [1 + stand(rng, steps - 1, 0.7) if rng.random() < first else 0]

    believed = []
    for seed in range(20):
        acceptance, rng = Acceptance(6), random.Random(seed)
        for _ in range(600):
            acceptance.observe(5, draft(rng, 5, 0.3))
        for _ in range(150):
            acceptance.observe(5, [0])
        assert acceptance.stood[5] < 0.2
        for _ in range(60):
            acceptance.observe(1, [0], rare=True)
        for _ in range(200):
            if acceptance.observe(1, draft(rng, 1, 0.3), rare=True) > 0:
                break
        believed.append(acceptance.rates[1])
    assert sum(believed) / len(believed) > 0.33  # though only the first was tried; 0.22 without a memory


def test_a_promise_says_what_it_would_yield():
    acceptance = Acceptance(2)
    for _ in range(2000):
        acceptance.observe(2, [stand(RNG, 2, 0.2)])
    odds = 8 * 0.2 / 0.8
    rate = odds / (1 + odds)
    assert acceptance.promised() == pytest.approx([0, rate, rate + rate**2], rel=0.15)


def test_chance_alone_is_rarely_a_change():
    alarms = 0
    for seed in range(20):
        acceptance, rng = Acceptance(4), random.Random(seed)
        fed(acceptance, rng, 0.7, 200)
        alarms += fed(acceptance, rng, 0.7, 1000) > 0
    assert alarms <= 5  # in 20,000 cycles; three tests of one in 8,100 each at most


# ---- sessions


def test_a_session_whose_drafts_never_stand_rests_and_is_tried_again():
    caps = SessionCaps()
    asked = []
    for _ in range(600):
        sessions = [s for s in (1, 2, 3) if caps.allows(s)]
        asked.append(sessions)
        caps.observe(sessions, [0 if s == 3 else 2 for s in sessions], expected=1.5, share=0.3)
    with_three = [cycle for cycle, sessions in enumerate(asked) if 3 in sessions]
    assert all({1, 2} <= set(sessions) for sessions in asked)
    assert len(with_three) < 60
    assert with_three[-1] > 100
    assert with_three[0] == 0


def test_a_session_gets_its_drafts_back_when_they_stand_again():
    caps = SessionCaps()
    for cycle in range(400):
        sessions = [s for s in (1, 2) if caps.allows(s)]
        caps.observe(sessions, [2 if s == 1 or cycle > 40 else 0 for s in sessions], expected=1.5, share=0.3)
    assert caps.allows(2)


def test_one_session_alone_is_never_capped_and_an_ended_one_is_forgotten():
    caps = SessionCaps()
    for _ in range(100):
        caps.observe([1], [0], expected=2.0, share=0.9)
    assert caps.allows(1)
    caps.observe([1, 2], [1, 1], expected=2.0, share=0.1)
    caps.forget(1)
    caps.forget(2)
    assert len(caps) == 0
