"""router/steps.py: how many draft tokens the next cycle gets."""

import sys

import pytest

from specdec.errors import SettingsError
from specdec.router.pairs import Request, Session, Verdict
from specdec.router.steps import AcceptLengthSteps, FixedSteps, Order, load_policy


def session(number: int = 1) -> Session:
    return Session(number, 0, Request("specdec-x"), 10)


def verdict(of: Session, proposed: int, accepted: int) -> Verdict:
    return Verdict(of, 1, 2, proposed, proposed, accepted, accepted + 1)


def settle(policy: AcceptLengthSteps, of: Session, accept, cycles: int = 60) -> list[int]:
    """The step counts of `cycles` cycles in which `accept(k)` of k drafts stand."""
    chosen = []
    for _ in range(cycles):
        steps = policy.order(of).steps
        chosen.append(steps)
        policy.observe(verdict(of, steps, accept(steps)))
    return chosen


# ---- fixed


@pytest.mark.parametrize(("steps", "max_steps", "ordered"), [(4, 8, 4), (8, 4, 4), (0, 8, 0), (3, 0, 0)])
def test_fixed_is_always_the_same_within_the_limit(steps, max_steps, ordered):
    policy, one = FixedSteps(steps, max_steps, window=3), session()
    assert policy.order(one) == Order(ordered, 3)
    policy.observe(verdict(one, 4, 0))
    assert policy.order(session(2)) == Order(ordered, 3)


# ---- accept length


def test_a_new_session_starts_with_the_given_steps():
    policy = AcceptLengthSteps(5, 8, window=2)
    assert policy.order(session()) == Order(5, 2)
    assert AcceptLengthSteps(12, 8, window=2).order(session()) == Order(8, 2)


def test_it_climbs_to_the_limit_while_everything_is_accepted():
    chosen = settle(AcceptLengthSteps(2, 8, 1), session(), accept=lambda steps: steps)
    assert chosen[0] == 2
    assert chosen == sorted(chosen)
    assert chosen[-1] == 8


def test_it_falls_to_one_while_nothing_is_accepted():
    chosen = settle(AcceptLengthSteps(8, 8, 1), session(), accept=lambda steps: 0)
    assert chosen[0] == 8
    assert chosen == sorted(chosen, reverse=True)
    assert chosen[-1] == 1  # not 0: it would never see that drafts have become good again


def test_it_follows_acceptance_down_and_up_again():
    policy, one = AcceptLengthSteps(4, 8, 1), session()
    assert settle(policy, one, accept=lambda steps: 0)[-1] == 1
    assert settle(policy, one, accept=lambda steps: steps)[-1] == 8
    assert settle(policy, one, accept=lambda steps: min(steps, 2))[-1] == 3
    assert settle(policy, one, accept=lambda steps: min(steps, 5))[-1] == 6


@pytest.mark.parametrize("max_steps", [0, 1, 3, 8])
def test_it_stays_within_its_bounds(max_steps):
    policy, one = AcceptLengthSteps(4, max_steps, 1), session()
    chosen = settle(policy, one, accept=lambda steps: steps)
    chosen += settle(policy, one, accept=lambda steps: 0)
    assert all(min(1, max_steps) <= steps <= max_steps for steps in chosen)


def test_cycles_without_drafts_teach_nothing():
    policy, one = AcceptLengthSteps(6, 8, 1), session()
    for _ in range(50):
        policy.observe(verdict(one, 0, 0))
    assert policy.order(one).steps == 6


def test_every_session_is_followed_by_itself():
    policy, good, bad = AcceptLengthSteps(4, 8, 1), session(1), session(2)
    for _ in range(60):
        policy.observe(verdict(good, policy.order(good).steps, policy.order(good).steps))
        policy.observe(verdict(bad, policy.order(bad).steps, 0))
    assert (policy.order(good).steps, policy.order(bad).steps) == (8, 1)


def test_sessions_of_two_pairs_may_have_the_same_number():
    policy, here, there = AcceptLengthSteps(4, 8, 1), session(1), session(1)
    settle(policy, here, accept=lambda steps: 0)
    assert policy.order(there).steps == 4
    here.finished = True
    settle(policy, there, accept=lambda steps: steps)
    policy.observe(verdict(here, 0, 0))
    assert policy.order(there).steps == 8


def test_it_forgets_sessions_that_have_finished():
    policy = AcceptLengthSteps(4, 8, 1)
    for number in range(100):
        one = session(number)
        settle(policy, one, accept=lambda steps: 0, cycles=3)
        one.finished = True
        policy.observe(verdict(one, 4, 4))
    assert policy._sessions == {}


class Bare:
    """Nothing but what it is given: a policy that reads more fails."""

    def __init__(self, **fields):
        self.__dict__.update(fields)


def test_it_reads_counts_and_never_tokens():
    policy, one = AcceptLengthSteps(4, 8, 1), Bare(finished=False)
    for _ in range(3):
        policy.observe(Bare(session=one, proposed=4, accepted=0))
    assert policy.order(one).steps == 3
    times = {"draft_us", "schedule_us", "verify_us", "output_us"}
    counts = {"order", "kind", "steps", "proposed", "accepted", "committed", "batch", "reason", "number"}
    assert set(Verdict.__dataclass_fields__) == {"session"} | counts | times


# ---- by name


def test_policies_by_name():
    assert isinstance(load_policy("fixed", 4, 8, 1), FixedSteps)
    assert isinstance(load_policy("accept-length", 4, 8, 1), AcceptLengthSteps)
    own = load_policy("specdec.router.steps:FixedSteps", 3, 8, 2)
    assert own.order(session()) == Order(3, 2)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fastest", ["fixed", "accept-length", "module:Class"]),
        ("", ["fixed", "module:Class"]),
        ("no_such_module:Policy", ["no_such_module"]),
        ("specdec.router.steps:Missing", ["Missing"]),
        ("specdec.router.steps:Order", ["argument"]),
        (":Policy", ["module:Class"]),
        ("specdec.router.steps:", ["module:Class"]),
    ],
)
def test_a_bad_name_says_what_is_wrong_with_which_flag(name, words):
    with pytest.raises(SettingsError) as caught:
        load_policy(name, 4, 8, 1)
    assert "--policy" in str(caught.value)
    assert [word for word in words if word not in str(caught.value)] == []


def test_what_an_own_policy_raises_is_told(tmp_path, monkeypatch):
    (tmp_path / "broken_policy.py").write_text(
        "class Policy:\n    def __init__(self, *args): raise ValueError('no such table')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SettingsError, match="no such table"):
        load_policy("broken_policy:Policy", 4, 8, 1)
    sys.modules.pop("broken_policy")
