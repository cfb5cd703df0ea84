"""router/loop.py against a FakePair: order, cycle, observe, and nothing else."""

import asyncio
from types import SimpleNamespace

import pytest

from specdec.router.loop import speculate
from specdec.router.steps import FixedSteps, Order


class FakePair:
    """Answers every order at once; the session has finished with its `cycles`th."""

    def __init__(self, cycles: int) -> None:
        self.cycles, self.orders = cycles, []

    async def cycle(self, session, order):
        await asyncio.sleep(0)
        self.orders.append(order)
        session.finished = len(self.orders) >= self.cycles
        return SimpleNamespace(session=session, order=len(self.orders))


class Recorder:
    """A policy that writes down how it was called, and orders one step more each time."""

    def __init__(self) -> None:
        self.calls = []

    def order(self, session):
        self.calls.append("order")
        return Order(len(self.calls), 1)

    def observe(self, verdict):
        self.calls.append(("observe", verdict.order))


def test_every_order_has_one_cycle_and_every_verdict_is_observed_before_the_next_order():
    pair, policy = FakePair(3), Recorder()
    asyncio.run(speculate(SimpleNamespace(finished=False), pair, policy))
    assert policy.calls == ["order", ("observe", 1), "order", ("observe", 2), "order", ("observe", 3)]
    assert pair.orders == [Order(1, 1), Order(3, 1), Order(5, 1)]


def test_a_session_that_has_finished_gets_no_order():
    pair, policy = FakePair(3), Recorder()
    asyncio.run(speculate(SimpleNamespace(finished=True), pair, policy))
    assert (pair.orders, policy.calls) == ([], [])


def test_sessions_do_not_wait_for_each_other():
    class StuckPair(FakePair):
        async def cycle(self, session, order):
            if session.stuck:
                await asyncio.Event().wait()
            return await super().cycle(session, order)

    async def main():
        pair, policy = StuckPair(50), FixedSteps(2, 8, 1)
        stuck = asyncio.create_task(speculate(SimpleNamespace(finished=False, stuck=True), pair, policy))
        await asyncio.wait_for(speculate(SimpleNamespace(finished=False, stuck=False), pair, policy), 5)
        assert not stuck.done()
        stuck.cancel()
        assert len(pair.orders) == 50

    asyncio.run(main())


@pytest.mark.parametrize("broken", ["order", "observe"])
def test_what_a_policy_raises_ends_its_session_only(broken):
    policy = Recorder()
    setattr(policy, broken, lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(speculate(SimpleNamespace(finished=False), FakePair(3), policy))
