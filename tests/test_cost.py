"""router/cost.py: what a cycle costs, where it was measured and where it was not."""

import random

import pytest

from specdec.router.cost import CycleCost, Surface, batch_bucket, context_bucket

CHOICES = (0, 1, 2, 3, 4, 5)


def verify_s(steps: int, batch: int) -> float:
    """A dense model: memory-bound up to 64 tokens, then linear."""
    return 0.010 + 0.0001 * max(0, batch * (steps + 1) - 64)


def measured(batches=(1, 8, 32), draft_step_s=0.001, cycles=20, noise=0.03, verify=verify_s) -> CycleCost:
    """A model that has seen every k at each of `batches`."""
    cost, rng = CycleCost(CHOICES), random.Random(3)
    for _ in range(cycles):
        for batch in batches:
            for k in CHOICES:
                see(cost, k, batch, draft_step_s, rng.gauss(1, noise), verify)
    return cost


def see(cost, k, batch, draft_step_s=0.001, factor=1.0, verify=verify_s, context=1000) -> bool:
    return cost.observe(k, batch, context, verify(k, batch) * factor + k * draft_step_s, k * draft_step_s)


@pytest.mark.parametrize("batch", [1, 8, 32])
def test_what_was_measured_is_known(batch):
    got = measured().seconds(batch, 1000)
    assert got == pytest.approx([verify_s(k, batch) + 0.001 * k for k in CHOICES], rel=0.03)


@pytest.mark.parametrize("batch", [2, 4, 16, 24])
def test_what_lies_between_is_interpolated(batch):
    got = measured().seconds(batch, 1000)
    assert got == pytest.approx([verify_s(k, batch) + 0.001 * k for k in CHOICES], rel=0.15)


def test_more_drafts_are_never_faster_even_before_anything_is_known():
    cost = CycleCost(CHOICES)
    cost.observe(0, 4, 500, 0.01, 0.0)
    assert (got := cost.seconds(4, 500)) == sorted(got)
    assert got[0] == pytest.approx(0.01)
    assert (got := measured(noise=0.2, cycles=3).seconds(8, 1000)) == sorted(got)


def test_a_hiccup_poisons_nothing():
    cost = measured()
    before = cost.seconds(8, 1000)
    see(cost, 2, 8, factor=20)
    see(cost, 3, 8, factor=20)
    after = cost.seconds(8, 1000)
    assert after == pytest.approx(before, rel=0.08)
    assert after[3] / after[0] == pytest.approx(before[3] / before[0], rel=0.02)


def test_nor_does_one_in_a_buckets_first_cycles():
    cost = measured(batches=(1,))
    for factor in (1, 20, 1):
        see(cost, 2, 16, factor=factor)
    assert cost.seconds(16, 1000)[2] == pytest.approx(verify_s(2, 16) + 0.002, rel=0.1)


def test_nor_does_one_where_nothing_was_measured_but_the_neighbours_were():
    cost = measured(batches=(1, 8, 12, 32))
    cost.seconds(10, 1000)
    see(cost, 2, 10, factor=20)
    assert cost.seconds(10, 1000)[2] == pytest.approx(verify_s(2, 10) + 0.002, rel=0.15)
    for _ in range(2):  # a second and a third say that it was none
        see(cost, 2, 10, factor=20)
    assert cost.seconds(10, 1000)[2] > 2 * verify_s(2, 10)


def test_a_bucket_hardly_known_does_not_make_all_others_slower():
    cost = measured()
    before = cost.seconds(8, 1000)
    for i in range(12):
        cost.seconds(64, 1000)
        assert not see(cost, 1, 64, factor=1 if i < 4 else 3)
    assert cost.seconds(8, 1000) == pytest.approx(before, rel=0.1)


def test_nor_does_one_that_is_unlike_its_neighbours_pass_for_drift():
    cost = measured(batches=(1, 8, 12, 32))
    before = cost.seconds(8, 1000)
    for _ in range(200):
        cost.seconds(10, 1000)  # as the policy does before each cycle
        see(cost, 2, 10, factor=1.6)
    assert cost.seconds(8, 1000) == pytest.approx(before, rel=0.12)


def test_a_draft_that_comes_much_faster_promises_something_until_it_is_believed():
    cost = measured(draft_step_s=0.005)
    assert not cost.promise
    for expected in (True, True, True, False):
        see(cost, 1, 8, draft_step_s=0.001)
        assert cost.promise == expected
    assert cost.seconds(8, 1000)[5] == pytest.approx(verify_s(5, 8) + 0.005, rel=0.15)
    see(cost, 1, 8, draft_step_s=0.01)
    assert not cost.promise


def test_a_cycle_does_a_small_share_of_one_fit(monkeypatch):
    cost, shares, fit = measured(), [], Surface._fit

    def counted(surface):
        for step in fit(surface):
            shares[-1] += 1
            yield step

    monkeypatch.setattr(Surface, "_fit", counted)
    for i in range(300):
        shares.append(0)
        see(cost, i % 6, 8)
    assert max(shares) == 1
    assert sum(shares) >= 2 * 3 * 5  # both surfaces, every 64 cycles or so, in five shares at least


def test_a_slower_draft_is_noticed_for_every_k_at_once():
    cost = measured()
    for _ in range(30):
        see(cost, 3, 8, draft_step_s=0.005)
    assert cost.seconds(8, 1000) == pytest.approx([verify_s(k, 8) + 0.005 * k for k in CHOICES], rel=0.15)


def test_a_slower_target_is_a_jump_and_then_known():
    cost = measured()
    jumps = [see(cost, 3, 8, verify=lambda k, b: 2 * verify_s(k, b)) for _ in range(40)]
    assert jumps.index(True) < 6
    assert sum(jumps) <= 2
    assert cost.seconds(8, 1000)[3] == pytest.approx(2 * verify_s(3, 8) + 0.003, rel=0.08)
    assert cost.doubt(0, 8, 1000) > 0.5
    assert cost.doubt(3, 8, 1000) < 0.1


def test_a_draft_hidden_by_run_ahead_costs_nothing():
    got = measured(draft_step_s=0.0).seconds(8, 1000)
    assert got == pytest.approx([verify_s(k, 8) for k in CHOICES], rel=0.03)


def test_what_it_remembers_is_bounded():
    cost, rng = CycleCost(CHOICES), random.Random(1)
    for _ in range(700):
        see(cost, rng.choice(CHOICES), rng.randint(1, 500), context=rng.randint(1, 1 << 20))
    assert len(cost._verify._cells) <= 192
    assert len(cost._verify._tables) <= 192


def test_buckets():
    assert [batch_bucket(b) for b in (1, 2, 7, 8)] == [1, 2, 7, 8]
    assert batch_bucket(16) == 12
    assert batch_bucket(17) - batch_bucket(16) <= 1
    assert context_bucket(1) == context_bucket(500) == 9
    assert context_bucket(1024) == 10
    assert context_bucket(1449) == 11
