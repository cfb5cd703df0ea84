"""router/measured.py: the k with the most tokens a second, found, kept and left in time."""

import random
from collections import Counter

import pytest

from specdec.router.measured import CycleReport, StepPolicy, step_choices

FAST_DRAFT = dict(plain_ms=10.0, width_ms=0.2, draft_ms=0.3)
DEAR_VERIFICATION = dict(plain_ms=10.0, width_ms=6.0, draft_ms=1.0)


class FakeCycles:
    """Cycles whose cost grows by `width_ms` a draft verified and `draft_ms` a draft made."""

    def __init__(self, policy, *, plain_ms, width_ms, draft_ms, seed=0):
        self.policy, self.rng = policy, random.Random(seed)
        self.plain_ms, self.width_ms, self.draft_ms = plain_ms, width_ms, draft_ms
        self.seconds = self.tokens = 0.0

    def run(self, cycles, rate, batch=1):
        """The k of each of `cycles` cycles in which a draft stands with probability `rate`."""
        return [self._one(rate, batch) for _ in range(cycles)]

    def _one(self, rate, batch):
        k = self.policy.steps(batch, 1000)
        draft_s = self.draft_ms * k / 1000
        cycle_s = (self.plain_ms + self.width_ms * k * batch) / 1000 * self.rng.gauss(1, 0.03) + draft_s
        accepted = tuple(self._stand(k, rate) for _ in range(batch))
        self.policy.observe(CycleReport(batch, 1000, k, cycle_s, draft_s, (k,) * batch, accepted))
        self.seconds += cycle_s
        self.tokens += batch + sum(accepted)
        return k

    def _stand(self, k, rate):
        count = 0
        while count < k and self.rng.random() < rate:
            count += 1
        return count


def usual(ks):
    return Counter(ks).most_common(1)[0][0]


def test_cheap_drafts_that_stand_are_taken_in_number():
    fake = FakeCycles(StepPolicy(8), **FAST_DRAFT)
    fake.run(200, 0.85)
    assert usual(fake.run(300, 0.85)) >= 6


def test_dear_ones_are_taken_in_small_number_or_not_at_all():
    fake = FakeCycles(StepPolicy(8), **DEAR_VERIFICATION)
    fake.run(200, 0.85)
    assert usual(fake.run(300, 0.85)) == 1
    fake = FakeCycles(StepPolicy(8), **DEAR_VERIFICATION)
    fake.run(200, 0.3)
    assert usual(fake.run(300, 0.3)) == 0


@pytest.mark.parametrize("seed", range(5))
def test_it_goes_to_zero_when_acceptance_collapses_and_finds_its_way_back(seed):
    fake = FakeCycles(StepPolicy(8, seed=seed), plain_ms=10, width_ms=2, draft_ms=0.5, seed=seed)
    assert usual(fake.run(400, 0.85)[200:]) >= 2
    assert usual(fake.run(100, 0.02)[40:]) == 0
    fake.run(800, 0.02)
    assert usual(fake.run(600, 0.85)[300:]) >= 2


@pytest.mark.parametrize("seed", range(3))
def test_looking_for_better_costs_at_most_one_percent(seed):
    fake = FakeCycles(StepPolicy(8, seed=seed), **DEAR_VERIFICATION, seed=seed)
    fake.run(400, 0.05)
    fake.seconds = fake.tokens = 0.0
    ks = fake.run(4000, 0.05)
    assert 0 < sum(k > 0 for k in ks) < 200
    assert fake.tokens / fake.seconds >= 0.99 * 1000 / fake.plain_ms


@pytest.mark.parametrize("seed", range(6))
def test_ten_seconds_after_drafts_have_become_worse_lose_at_most_three_percent(seed):
    fake = FakeCycles(StepPolicy(5, seed=seed), plain_ms=11, width_ms=2.5, draft_ms=1.5, seed=seed)
    fake.run(800, 0.6)
    fake.seconds = fake.tokens = 0.0
    while fake.seconds < 10:
        fake.run(1, 0.35)
    assert fake.tokens / fake.seconds >= 0.965 * 1000 / fake.plain_ms  # chance included


def test_plain_decoding_is_looked_at_often_where_it_is_about_as_good():
    fake = FakeCycles(StepPolicy(4), plain_ms=10, width_ms=3, draft_ms=0.2)
    fake.run(400, 0.36)
    close = fake.run(1000, 0.36).count(0)
    far = FakeCycles(StepPolicy(4), **FAST_DRAFT)
    far.run(400, 0.9)
    assert close >= 25
    assert 0 < far.run(1000, 0.9).count(0) < 15


def test_one_slow_cycle_changes_nothing():
    fake = FakeCycles(StepPolicy(8), **FAST_DRAFT)
    fake.run(300, 0.85)
    switches = fake.policy.switches
    for _ in range(3):
        k = fake.policy.steps(1, 1000)
        fake.policy.observe(CycleReport(1, 1000, k, 1.0, 0.9, (k,), (k,)))
        fake.run(15, 0.85)
    assert fake.policy.switches - switches <= 2


def test_load_that_wavers_about_a_threshold_does_not_make_it_flap():
    fake = FakeCycles(StepPolicy(8), plain_ms=10, width_ms=0.5, draft_ms=0.2)
    for batch in (4, 5, 6):
        fake.run(150, 0.6, batch)
    before = fake.policy.switches
    for _ in range(100):
        fake.run(5, 0.6, 4)
        fake.run(5, 0.6, 6)
    assert fake.policy.switches - before <= 1000 / 25


def test_it_follows_the_load_from_small_to_large_batches():
    fake = FakeCycles(StepPolicy(8), plain_ms=10, width_ms=0.5, draft_ms=0.2)
    small = usual(fake.run(400, 0.7, 1)[200:])
    large = usual(fake.run(400, 0.7, 32)[200:])
    assert small >= 3
    assert large == 0


def test_its_forecast_says_what_decided():
    fake = FakeCycles(StepPolicy(8), **FAST_DRAFT)
    fake.run(400, 0.85)
    forecast = fake.policy.forecast
    assert forecast.plain_rate == pytest.approx(100, rel=0.05)
    assert forecast.rate == pytest.approx(forecast.drafted_rate)
    assert forecast.rate > 250
    assert "tok/s" in str(forecast)
    assert "batch 1, context 1000" in str(forecast)


def test_reports_may_come_late_and_of_other_step_counts():
    policy = StepPolicy(4)
    for k in (9, 3, 0, 2):
        policy.observe(CycleReport(2, 100, k, 0.01, 0.0, (k, k), (0, 0)))
    policy.observe(CycleReport(0, 0, 0, 0.0, 0.0, (), ()))
    assert 0 <= policy.steps(2, 100) <= 4
    assert policy.steps(0, 0) in range(5)


@pytest.mark.parametrize("max_steps", [0, 1, 5, 64])
def test_it_keeps_to_its_choices(max_steps):
    fake = FakeCycles(StepPolicy(max_steps), **FAST_DRAFT)
    assert set(fake.run(300, 0.9)) <= set(step_choices(max_steps))
    assert step_choices(max_steps)[-1] == max_steps


def test_the_same_seed_makes_the_same_choices():
    runs = [FakeCycles(StepPolicy(8, seed=4), **FAST_DRAFT).run(500, 0.7) for _ in range(2)]
    assert runs[0] == runs[1]
