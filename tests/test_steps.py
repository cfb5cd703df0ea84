"""router/steps.py: how many draft tokens the next cycle gets."""

import asyncio
import logging
import random
import sys

import pytest

from fake_engine import fake_pair, router
from specdec.errors import SettingsError
from specdec.proto import speculation_pb2 as pb
from specdec.router.measured import StepPolicy
from specdec.router.pairs import Request, Session, Verdict
from specdec.router.steps import AcceptLengthSteps, FixedSteps, MeasuredSteps, Order, load_policy
from specdec.telemetry import RouterMetrics


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
    counts = {
        "order",
        "kind",
        "steps",
        "proposed",
        "accepted",
        "committed",
        "batch",
        "reason",
        "number",
        "cycle",
        "context",
    }
    assert set(Verdict.__dataclass_fields__) == {"session"} | counts | times


# ---- measured cost


class FakeBatch:
    """A pair's cycles under a policy: `plain_us` and `draft_us` for each draft of the widest session."""

    def __init__(self, policy, sessions, *, plain_us=10_000, draft_us=500, rate=0.85):
        self.policy, self.sessions, self.rng = policy, sessions, random.Random(1)
        self.plain_us, self.draft_us, self.rate = plain_us, draft_us, rate
        self.cycle = self.committed = self.us = 0

    def run(self, cycles: int) -> list[list[int]]:
        """The step counts ordered in each of `cycles` cycles."""
        return [self._one() for _ in range(cycles)]

    def _one(self) -> list[int]:
        self.cycle += 1
        ordered = [self.policy.order(one).steps for one in self.sessions]
        verify_us = int(self.plain_us * self.rng.gauss(1, 0.02)) + self.draft_us * max(ordered)
        for one, steps in zip(self.sessions, ordered, strict=True):
            stood = 0
            while stood < steps and self.rng.random() < (0 if one.id >= 90 else self.rate):
                stood += 1
            self.policy.observe(
                Verdict(
                    *(one, 1, pb.VERDICT_KIND_CYCLE, steps, steps, stood, stood + 1, len(self.sessions)),
                    verify_us=verify_us,
                    cycle=self.cycle,
                    context=100 + self.cycle,
                )
            )
            self.committed += stood + 1
        self.us += verify_us
        return ordered


def measured(metrics: RouterMetrics | None = None, max_steps: int = 8) -> MeasuredSteps:
    return MeasuredSteps(4, max_steps, 3, metrics or RouterMetrics())


def sessions(*numbers: int, pair: str = "here", pair_max_steps: int = 64) -> list[Session]:
    return [Session(n, 0, Request("specdec-x"), 10, pair=pair, pair_max_steps=pair_max_steps) for n in numbers]


def test_auto_drafts_many_where_they_are_cheap_and_none_where_they_lose():
    cheap = FakeBatch(measured(), sessions(1, 2, 3))
    assert [max(ks) for ks in cheap.run(400)][-100:].count(8) > 60
    dear = FakeBatch(measured(), sessions(1, 2, 3), draft_us=12_000)
    assert [max(ks) for ks in dear.run(600)][-100:].count(0) > 80


def test_auto_orders_the_window_and_no_more_than_the_pair_allows():
    fake = FakeBatch(measured(), sessions(1, pair_max_steps=3))
    assert max(max(ks) for ks in fake.run(200)) == 3
    assert fake.policy.order(fake.sessions[0]).window == 3


def test_auto_takes_a_cycles_verdicts_as_one_report(monkeypatch):
    reports = []
    monkeypatch.setattr(StepPolicy, "observe", lambda self, report: reports.append(report))
    policy, (one, two, off) = measured(), sessions(1, 2, 3)

    def verdict(of, steps, accepted, cycle, batch, **more):
        kind = pb.VERDICT_KIND_CYCLE
        stages = dict(draft_us=1000, schedule_us=500, verify_us=8000, output_us=500)
        return Verdict(of, 1, kind, steps, steps, accepted, accepted + 1, batch, cycle=cycle, **(stages | more))

    policy.observe(verdict(one, 4, 3, cycle=7, batch=3, context=100))
    policy.observe(verdict(off, 0, 0, cycle=7, batch=3, context=300))  # "speculative": "off"
    assert reports == []
    policy.observe(verdict(two, 4, 0, cycle=7, batch=3, context=200))
    (report,) = reports
    assert (report.batch, report.context, report.steps) == (3, 200, 4)
    assert (report.cycle_s, report.draft_s) == pytest.approx((0.010, 0.001))
    assert (report.proposed, report.accepted) == ((4, 4), (3, 0))

    policy.observe(verdict(one, 4, 1, cycle=8, batch=2))  # the other one is another router's
    policy.observe(verdict(one, 4, 2, cycle=9, batch=2, reason=pb.REASON_BUDGET))
    policy.observe(verdict(two, 4, 4, cycle=9, batch=2))
    assert [(r.batch, r.accepted) for r in reports[1:]] == [(2, (1,)), (2, (4,))]

    policy.observe(verdict(one, 4, 0, cycle=10, batch=1, reason=pb.REASON_DRAFT_DOWN))
    policy.observe(verdict(one, 4, 0, cycle=11, batch=1, reason=pb.REASON_DRAFT_LATE))
    assert len(reports) == 4  # a draft that is down says nothing of what drafts cost; a late one does


def test_auto_goes_on_where_it_was_when_a_draft_has_come_back():
    fake = FakeBatch(measured(), sessions(1))
    fake.run(300)
    before = fake.policy.order(fake.sessions[0]).steps
    for cycle in range(1000, 1200):
        (one,) = fake.sessions
        fake.policy.observe(
            Verdict(
                *(one, 1, pb.VERDICT_KIND_CYCLE, before, 0, 0, 1, 1),
                verify_us=10_000,
                reason=pb.REASON_DRAFT_DOWN,
                cycle=cycle,
            )
        )
    assert max(fake.policy.order(fake.sessions[0]).steps for _ in range(1)) >= before - 1


def test_a_session_without_luck_gets_no_drafts_and_the_others_keep_theirs():
    fake = FakeBatch(measured(), sessions(1, 2, 3, 90), draft_us=1500)
    ordered = fake.run(600)[-200:]
    assert sum(ks[3] > 0 for ks in ordered) < 40
    assert sum(min(ks[:3]) > 0 for ks in ordered) > 190
    orders = [[fake.policy.order(one) for one in fake.sessions] for _ in range(20)]
    assert {order.cap for *others, _ in orders for order in others} == {None}
    assert all(order.cap == (0 if order.steps == 0 else None) for *_, order in orders)
    assert any(order.cap == 0 for *_, order in orders)


def test_auto_forgets_sessions_that_have_finished():
    policy = measured()
    fake = FakeBatch(policy, sessions(*range(40)))
    fake.run(30)
    for one in fake.sessions:
        one.finished = True
        policy.observe(Verdict(one, 0, pb.VERDICT_KIND_CLOSED, 0, 0, 0, 0))
    fake.run(1)  # verdicts still on their way
    assert len(policy._pairs["here"].caps) == 0


def test_a_pair_that_is_forgotten_is_not_named_by_its_last_verdicts_and_begins_anew():
    metrics = RouterMetrics()
    policy = measured(metrics)
    fake = FakeBatch(policy, sessions(1, 2))
    fake.run(50)
    metrics.forget("here")
    policy.forget("here")
    for one in fake.sessions:
        one.finished = True
        policy.observe(Verdict(one, 1, pb.VERDICT_KIND_CYCLE, 4, 4, 2, 3, 2, verify_us=10_000, cycle=51))
        policy.observe(Verdict(one, 0, pb.VERDICT_KIND_CLOSED, 0, 0, 0, 0))
    assert policy._pairs == {}
    assert metrics.registry.get_sample_value("specdec_router_steps", {"pair": "here"}) is None
    policy.forget("never seen")
    FakeBatch(policy, sessions(1, 2)).run(50)
    assert metrics.registry.get_sample_value("specdec_router_utility", {"pair": "here"}) > 0


def test_auto_runs_a_pair_over_the_wire(tmp_path):
    async def main():
        async with fake_pair(tmp_path) as pair, router(pair, MeasuredSteps(4, 64, 1, RouterMetrics())) as known:
            engine = pair.engine
            engine.accept, finish = (lambda steps: steps), engine.link.finish
            # each draft makes a cycle of 10 ms longer by 0.3 ms
            engine.link.finish = lambda: finish(
                verify_us=10_000 + 300 * max((ran[-1][1] for ran in engine.ran.values() if ran), default=0)
            )
            for number in (1, 2):
                known.register(Request(f"specdec-{number:032x}"))
                engine.open(f"chatcmpl-specdec-{number:032x}", cycles=300)
            await engine.run()
            return [[steps for _, steps in ran] for ran in engine.ran.values()]

    for ks in asyncio.run(main()):
        assert max(ks) == 8  # what the pair allows
        assert ks[-100:].count(8) > 60
        assert 0 in ks[:20]


def test_cycles_that_took_no_time_are_not_believed():
    fake = FakeBatch(measured(), sessions(1), plain_us=0, draft_us=0)
    assert len(fake.run(100)) == 100


def test_pairs_are_learnt_apart():
    policy = measured()
    near, far = FakeBatch(policy, sessions(1)), FakeBatch(policy, sessions(1, pair="there"), draft_us=12_000)
    for _ in range(300):
        near.run(1)
        far.run(1)
    assert usual_steps(near) == 8
    assert usual_steps(far) == 0


def usual_steps(fake: FakeBatch) -> int:
    chosen = [max(ks) for ks in fake.run(60)]
    return max(set(chosen), key=chosen.count)


def test_auto_tells_what_it_does_and_why(caplog):
    metrics = RouterMetrics()
    fake = FakeBatch(measured(metrics), sessions(1, 2))

    def value(name: str) -> float:
        return metrics.registry.get_sample_value(f"specdec_router_{name}", {"pair": "here"})

    with caplog.at_level(logging.INFO, "specdec.router.steps"):
        fake.run(400)
        assert [r.getMessage().split(":")[0] for r in caplog.records] == ["pair here"]
        assert "speculation on: k = " in caplog.text
        assert value("steps") >= 6
        rate = 1e6 * fake.committed / fake.us
        assert value("expected_tokens_per_second") == pytest.approx(rate, rel=0.2)
        assert value("realised_tokens_per_second") == pytest.approx(rate, rel=0.2)
        assert value("utility") == pytest.approx(value("realised_tokens_per_second") / 200, rel=0.1)
        assert value("probe_cycles_total") > 0
        fake.rate = 0.0
        fake.draft_us = 3000
        fake.run(200)
    assert "speculation off: k = " in caplog.text
    assert value("steps") == 0
    assert value("step_switches_total") >= 2


# ---- by name


def test_policies_by_name():
    assert isinstance(load_policy("fixed", 4, 8, 1), FixedSteps)
    assert isinstance(load_policy("accept-length", 4, 8, 1), AcceptLengthSteps)
    assert isinstance(load_policy("auto", 4, 8, 1), MeasuredSteps)
    own = load_policy("specdec.router.steps:FixedSteps", 3, 8, 2)
    assert own.order(session()) == Order(3, 2)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fastest", ["auto", "fixed", "accept-length", "module:Class"]),
        ("", ["fixed", "module:Class"]),
        ("no_such_module:Policy", ["no_such_module"]),
        ("specdec.router.steps:Missing", ["Missing"]),
        ("specdec.router.steps:SessionCaps", ["argument"]),
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
