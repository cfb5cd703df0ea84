"""verifier/control.py and router/pairs.py over loopback gRPC: a real segment, a real Link, a FakeEngine's cycles."""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from fake_engine import FakePair, fake_pair, new_router, router, until
from specdec.channel import layout
from specdec.channel.segment import now_ns
from specdec.proto import speculation_pb2 as pb
from specdec.proto import speculation_pb2_grpc as pb_grpc
from specdec.router.pairs import Pair, Request, Session, Verdict
from specdec.router.steps import FixedSteps, Order
from specdec.telemetry import RouterMetrics
from specdec.verifier import control as control_module


def request_id(number: int) -> str:
    return f"specdec-{number:032x}"


async def nobody_drives(pair: Pair, session: Session) -> None: ...


def registered(known: Pair, *numbers: int) -> list[Request]:
    """Requests the router has sent on."""
    requests = [Request(request_id(number)) for number in numbers]
    for request in requests:
        known.register(request)
    return requests


def ids(request: Request) -> list[int]:
    return [session.id for session in request.sessions]


def finished(requests: list[Request]) -> bool:
    return all(request.sessions and all(s.finished for s in request.sessions) for request in requests)


@contextlib.asynccontextmanager
async def raw_router(pair: FakePair, *, observe: bool = False) -> AsyncIterator[Any]:
    """The bare stream of a router, whose frames the test writes and reads itself."""
    async with grpc.aio.insecure_channel(pair.address) as channel:
        call = pb_grpc.SpeculationStub(channel).Loop()
        await call.write(pb.OrderFrame(lease_ms=10_000, observe=observe))
        yield call


async def opened_by(call: Any) -> list[int]:
    """The sessions of the next frame that opens some."""
    while not (frame := await asyncio.wait_for(call.read(), 5)).opened:
        pass
    return [opened.session for opened in frame.opened]


# ---- sessions find their request


def test_sessions_reach_the_router_of_their_request_and_no_other(tmp_path):
    async def main():
        async with fake_pair(tmp_path) as pair, router(pair) as known:
            one, several, idle = registered(known, 1, 2, 3)
            engine = pair.engine
            a = engine.open(f"chatcmpl-{request_id(1)}", prompt_tokens=11)
            b = engine.open(f"0_cmpl-{request_id(2)}-0")  # n > 1, several prompts: more than one session
            c = engine.open(f"1_cmpl-{request_id(2)}-0")
            engine.open(f"chatcmpl-{request_id(99)}")  # another router's
            engine.open("chatcmpl-abc")  # sent to vLLM directly
            engine.step()
            engine.close(engine.open("chatcmpl-last"))
            engine.step()
            await until(lambda: len(several.sessions) == 2 and a.id in ids(one))
            await until(lambda: pair.metrics.registry.get_sample_value("specdec_sessions") == 5)
            assert (ids(one), ids(several), ids(idle)) == ([a.id], [b.id, c.id], [])
            (session,) = one.sessions
            assert (session.slot, session.context, session.committed) == (a.slot, 12, 1)

    asyncio.run(main())


def test_a_released_request_gets_no_new_sessions_but_keeps_those_it_has(tmp_path):
    async def main():
        async with fake_pair(tmp_path) as pair, router(pair, FixedSteps(2, 8, 1)) as known:
            (request,) = registered(known, 1)
            first = pair.engine.open(request_id(1), cycles=20)
            pair.engine.step()
            await until(lambda: request.sessions)
            known.release(request)
            assert known.load == 0
            late = pair.engine.open(request_id(1))
            pair.engine.step()
            pair.engine.close(late)
            await asyncio.wait_for(pair.engine.run(), 10)
            await until(lambda: finished([request]))
            assert ids(request) == [first.id]
            assert request.sessions[0].cycles == 20

    asyncio.run(main())


def test_two_routers_each_drive_their_own_sessions_with_the_k_of_the_one_that_leads(tmp_path):
    async def main():
        async with (
            fake_pair(tmp_path) as pair,
            router(pair, FixedSteps(1, 8, 1)) as known_a,
            router(pair, FixedSteps(5, 8, 1)) as known_b,
            raw_router(pair) as bystander,
        ):
            await until(lambda: pair.control.routers == 3)
            (a,), (b,) = registered(known_a, 1), registered(known_b, 2)
            session_a = pair.engine.open(request_id(1), cycles=50)
            session_b = pair.engine.open(request_id(2), cycles=80)
            await asyncio.wait_for(pair.engine.run(0.001), 10)
            await until(lambda: finished([a, b]))
            assert (ids(a), ids(b)) == ([session_a.id], [session_b.id])
            ran_a, ran_b = pair.engine.ran[session_a.id], pair.engine.ran[session_b.id]
            assert ran_a == [(n, 1) for n in range(1, 51)]
            assert [order for order, _ in ran_b] == list(range(1, 81))
            steps = [k for _, k in ran_b]
            # its first order may have come before the leader's; it leads when the other has no session any more
            assert set(steps[1:48]) == {1}
            assert set(steps[54:]) == {5}
            assert await opened_by(bystander) == [session_a.id, session_b.id]

    asyncio.run(main())


async def ordering(call: Any, session: Any, order_id: int, steps: int, cap: int | None = None) -> None:
    order = pb.Order(session=session.id, slot=session.slot, id=order_id, steps=steps, window=1, lease_ms=5000)
    if cap is not None:
        order.cap = cap
    await call.write(pb.OrderFrame(orders=[order], lease_ms=10_000))


def test_a_follower_keeps_its_sessions_caps(tmp_path):
    async def main():
        async with fake_pair(tmp_path) as pair, raw_router(pair) as leads, raw_router(pair) as follows:
            await until(lambda: pair.control.routers == 2)
            sessions = [pair.engine.open(request_id(n)) for n in range(4)]
            pair.engine.step()
            await opened_by(leads)
            await ordering(leads, sessions[0], 1, 6)
            await until(lambda: pair.engine.link.admit(sessions[0]) == 6)
            for session, steps, cap in ((sessions[1], 2, None), (sessions[2], 2, 4), (sessions[3], 0, 0)):
                await ordering(follows, session, 1, steps, cap)
            await until(lambda: [pair.engine.link.admit(session) for session in sessions[1:]] == [6, 4, 0])

    asyncio.run(main())


def test_a_leader_whose_only_sessions_are_capped_does_not_decide(tmp_path):
    async def main():
        async with fake_pair(tmp_path) as pair, raw_router(pair) as capped, raw_router(pair) as other:
            await until(lambda: pair.control.routers == 2)
            one, two = (pair.engine.open(request_id(n)) for n in range(2))
            pair.engine.step()
            await opened_by(capped)
            await ordering(capped, one, 1, 0, 0)  # "speculative": "off"
            await ordering(other, two, 1, 5)
            await until(lambda: (pair.engine.link.admit(one), pair.engine.link.admit(two)) == (0, 5))

    asyncio.run(main())


class FakeResting:
    """`steps` for every session, but none for those that rest."""

    def __init__(self, steps: int) -> None:
        self.steps, self.resting = steps, set[int]()

    def order(self, session: Session) -> Order:
        return Order(0, 1, cap=0) if session.id in self.resting else Order(self.steps, 1)

    def observe(self, verdict: Verdict) -> None: ...


def test_a_session_that_rests_is_nobody_elses_business(tmp_path):
    """The leader's resting session does not stop the others, and a follower's is not made to draft."""

    async def main():
        leads, follows = FakeResting(5), FakeResting(2)
        async with fake_pair(tmp_path) as pair, router(pair, leads) as known_a, router(pair, follows) as known_b:
            await until(lambda: pair.control.routers == 2)
            registered(known_a, 1, 2)
            registered(known_b, 3, 4)
            sessions = [pair.engine.open(request_id(number)) for number in range(1, 5)]
            stepping = asyncio.create_task(pair.engine.run(0.001))
            ran = [pair.engine.ran[session.id] for session in sessions]
            await until(lambda: [one[-1][1] for one in ran if one] == [5, 5, 5, 5])
            leads.resting.add(sessions[1].id)
            follows.resting.add(sessions[3].id)
            await until(lambda: [one[-1][1] for one in ran] == [5, 0, 5, 0])
            before = [len(one) for one in ran]
            await until(lambda: all(len(one) > length + 30 for one, length in zip(ran, before, strict=True)))
            later = [{steps for _, steps in one[length:]} for one, length in zip(ran, before, strict=True)]
            assert later == [{5}, {0}, {5}, {0}]
            stepping.cancel()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("asked", "order", "steps", "cap"),
    [
        (None, Order(5, 1), 5, None),
        (3, Order(5, 1), 3, 3),
        (None, Order(5, 1, cap=2), 2, 2),
        (3, Order(5, 1, cap=2), 2, 2),
        (1, Order(5, 1, cap=2), 1, 1),
        (3, Order(0, 1, cap=0), 0, 0),
        (3, Order(2, 1), 2, 3),
    ],
)
def test_the_lesser_of_the_requests_and_the_policys_cap_is_sent(asked, order, steps, cap):
    async def main():
        known = Pair("nowhere:1", lease_ms=1000, metrics=RouterMetrics(), drive=nobody_drives)
        session = Session(1, 0, Request(request_id(1), asked), 10)
        cycle = asyncio.create_task(known.cycle(session, order))
        await until(lambda: known._outbox)
        (told,) = known._outbox
        assert (told.steps, told.cap if told.HasField("cap") else None) == (steps, cap)
        cycle.cancel()

    asyncio.run(main())


def test_a_silent_leader_loses_the_lease_and_one_that_goes_too(tmp_path):
    async def main():
        async with fake_pair(tmp_path) as pair, raw_router(pair) as second:
            async with raw_router(pair) as first:
                await until(lambda: pair.control.routers == 2)
                one, two = (pair.engine.open(request_id(n)) for n in range(2))
                pair.engine.step()
                await opened_by(second)
                await ordering(first, one, 1, 3)
                await until(lambda: pair.engine.link.admit(one) == 3)
                await ordering(second, two, 1, 5)
                await until(lambda: pair.engine.link.admit(two) == 3)
                pair.control._leader.until_ns = now_ns() - 1
                await ordering(second, two, 2, 5)
                await until(lambda: pair.engine.link.admit(two) == 5)
                await ordering(first, one, 2, 3)  # it is back, and follows
                await until(lambda: pair.engine.link.admit(one) == 5)
            await until(lambda: pair.control.routers == 1)
            await ordering(second, two, 3, 7)
            await until(lambda: pair.engine.link.admit(two) == 7)

    asyncio.run(main())


def test_verdicts_go_to_the_sessions_own_router_and_to_who_observes(tmp_path):
    async def main():
        async with (
            fake_pair(tmp_path) as pair,
            router(pair, FixedSteps(1, 8, 1)) as known,
            raw_router(pair) as other,
            raw_router(pair, observe=True) as observer,
        ):
            await until(lambda: pair.control.routers == 3 and any(r.observes for r in pair.control._routers))
            (request,) = registered(known, 1)
            session = pair.engine.open(request_id(1), cycles=30)
            await asyncio.wait_for(pair.engine.run(), 10)
            await until(lambda: finished([request]))
            pair.control.stop()
            cycles = []
            for call in (other, observer):
                verdicts = [verdict async for frame in call for verdict in frame.verdicts]
                cycles.append([v.order for v in verdicts if v.session == session.id and v.order and v.steps])
            assert cycles == [[], list(range(1, 31))]
            assert request.sessions[0].cycles == 30

    asyncio.run(main())


# ---- orders reach the engine


def test_an_order_reaches_the_engine_as_it_was_given(tmp_path):
    async def main():
        async with fake_pair(tmp_path) as pair, router(pair, lease_ms=1234) as known:
            requests = registered(known, 1, 2)
            requests[1].max_steps = 2
            mine, capped = pair.engine.open(request_id(1)), pair.engine.open(request_id(2))
            pair.engine.step()
            await until(lambda: all(request.sessions for request in requests))
            tasks = [asyncio.create_task(known.cycle(r.sessions[0], Order(5, 3))) for r in requests]
            await until(lambda: [pair.engine.link.admit(session) for session in (mine, capped)] == [5, 2])
            assert (mine.steps, mine.remaining, mine.lease_ns) == (5, 3, 1_234_000_000)
            pair.engine.step()
            verdict, _ = await asyncio.wait_for(asyncio.gather(*tasks), 5)
            assert (verdict.order, verdict.steps, verdict.proposed, verdict.accepted, verdict.committed) == (
                1,
                5,
                5,
                2,
                3,
            )
            assert (verdict.session, verdict.batch) == (requests[0].sessions[0], 2)

    asyncio.run(main())


def test_bad_orders_change_nothing(tmp_path):
    async def main():
        async with fake_pair(tmp_path, max_sessions=4) as pair, raw_router(pair) as call:
            session = pair.engine.open(request_id(1))
            pair.engine.step()
            await opened_by(call)
            good = {"session": session.id, "slot": session.slot, "id": 1, "steps": 3, "window": 2, "lease_ms": 100}
            bad = [
                {"slot": 4},
                {"slot": 2**32 - 1},
                {"id": 0},
                {"window": 0},
                {"session": 77},
                {"slot": (session.slot + 1) % 4},
            ]
            await call.write(pb.OrderFrame(orders=[pb.Order(**(good | wrong)) for wrong in bad], lease_ms=10_000))
            await until(lambda: pair.segment.bell("control.order_bell").value == 1)
            assert [pair.segment.orders.read(slot) for slot in range(4)] == [None] * 4
            await call.write(pb.OrderFrame(orders=[pb.Order(**good)], lease_ms=10_000))
            await until(lambda: pair.engine.link.admit(session) == 3)

    asyncio.run(main())


def test_an_order_for_more_steps_than_fit_is_cut_to_what_the_pair_allows(tmp_path):
    async def main():
        async with fake_pair(tmp_path) as pair, raw_router(pair) as call:
            session = pair.engine.open(request_id(1))
            pair.engine.step()
            await opened_by(call)
            order = pb.Order(session=session.id, slot=session.slot, id=1, steps=2**32 - 1, window=1, lease_ms=100)
            await call.write(pb.OrderFrame(orders=[order], lease_ms=10_000))
            await until(lambda: pair.engine.link.admit(session) == 8)

    asyncio.run(main())


def test_an_order_for_a_session_that_has_ended_does_not_touch_its_slots_next_one(tmp_path):
    async def main():
        async with fake_pair(tmp_path) as pair, raw_router(pair) as call:
            engine = pair.engine
            old = engine.open(request_id(1))
            engine.step()
            await opened_by(call)
            engine.close(old)
            new = engine.open(request_id(2))
            assert new.slot == old.slot
            engine.step()
            await opened_by(call)
            orders = [
                pb.Order(session=new.id, slot=new.slot, id=1, steps=3, window=1, lease_ms=100),
                pb.Order(session=old.id, slot=old.slot, id=9, steps=7, window=1, lease_ms=100),
            ]
            await call.write(pb.OrderFrame(orders=orders, lease_ms=10_000))
            await until(lambda: pair.segment.bell("control.order_bell").value == 1)
            assert engine.link.admit(new) == 3

    asyncio.run(main())


# ---- the loop


def test_at_window_1_orders_are_cycles_are_verdicts(tmp_path):
    async def main():
        async with fake_pair(tmp_path) as pair, router(pair, FixedSteps(3, 8, 1)) as known:
            requests = registered(known, 1, 2, 3, 4)
            for number in range(1, 5):
                pair.engine.open(request_id(number), cycles=100 * number)
            ahead = 0
            while not pair.engine.idle:
                held = None in pair.engine.step().values()
                sessions = [session for request in requests for session in request.sessions]
                ahead = max([ahead, *(len(pair.engine.ran[s.id]) - s.cycles for s in sessions)])
                await asyncio.sleep(0.0002 * held)
            await until(lambda: finished(requests))
            for number, request in enumerate(requests, 1):
                (session,) = request.sessions
                assert pair.engine.ran[session.id] == [(n, 3) for n in range(1, 100 * number + 1)]
                assert session.orders == session.cycles == 100 * number
                assert (session.proposed, session.accepted) == (300 * number, 100 * number)
                assert session.committed == 200 * number + 1  # the prompt's own token
                assert session.accept_length == 2
            counted = known._metrics.registry.get_sample_value
            assert counted("specdec_router_orders_total") == counted("specdec_router_verdicts_total") == 1000
            assert counted("specdec_router_verdict_lag_seconds_count") == 1000
            assert counted("specdec_router_sessions") == 0
            assert ahead == 1
            assert pair.engine.link.counts.lapsed_leases == 0

    asyncio.run(main())


@pytest.mark.parametrize("window", [2, 4])
def test_a_session_runs_at_most_its_window_without_a_new_order(tmp_path, window):
    async def main():
        async with fake_pair(tmp_path) as pair, raw_router(pair) as call:
            session = pair.engine.open(request_id(1))
            pair.engine.step()
            await opened_by(call)
            for order_id in (1, 2, 3):
                order = pb.Order(
                    session=session.id, slot=session.slot, id=order_id, steps=3, window=window, lease_ms=60_000
                )
                await call.write(pb.OrderFrame(orders=[order], lease_ms=10_000))
                await until(lambda n=order_id: pair.engine.link.admit(session) and session.order == n)
                admitted = [pair.engine.step()[session.id] for _ in range(window + 3)]
                assert admitted == [3] * window + [None] * 3

    asyncio.run(main())


@pytest.mark.parametrize("window", [2, 4])
def test_a_slow_router_is_never_more_than_its_window_behind(tmp_path, window):
    class Slow(FixedSteps):
        def observe(self, verdict):
            until_s = time.perf_counter() + 0.0005
            while time.perf_counter() < until_s:
                pass

    async def main():
        async with fake_pair(tmp_path) as pair, router(pair, Slow(3, 8, window)) as known:
            requests = registered(known, 1, 2)
            for number in (1, 2):
                pair.engine.open(request_id(number), cycles=100)
            ahead = 0
            while not pair.engine.idle:
                pair.engine.step()
                sessions = [session for request in requests for session in request.sessions]
                ahead = max([ahead, *(len(pair.engine.ran[s.id]) - s.cycles for s in sessions)])
                await asyncio.sleep(0)
            assert 1 < ahead <= window

    asyncio.run(main())


@pytest.mark.parametrize("window", [2, 4])
def test_with_a_larger_window_every_cycle_runs_under_an_order_and_is_counted(tmp_path, window):
    async def main():
        async with fake_pair(tmp_path) as pair, router(pair, FixedSteps(3, 8, window)) as known:
            requests = registered(known, 1, 2, 3)
            for number in (1, 2, 3):
                pair.engine.open(request_id(number), cycles=200)
            await asyncio.wait_for(pair.engine.run(pause_s=0.001), 10)
            await until(lambda: finished(requests))
            for request in requests:
                (session,) = request.sessions
                ran = pair.engine.ran[session.id]
                assert {steps for _, steps in ran} == {3}
                assert ran[0][0] == 1
                assert session.cycles == len(ran) == 200
                assert 190 <= session.orders <= 201

    asyncio.run(main())


# ---- routers come and go


def test_a_router_that_hangs_up_leaves_plain_decoding(tmp_path):
    async def main():
        async with fake_pair(tmp_path) as pair:
            async with router(pair, FixedSteps(4, 8, 64)) as known:
                (request,) = registered(known, 1)
                session = pair.engine.open(request_id(1))
                await until(lambda: pair.engine.step().get(session.id) == 4)
                assert pair.router_until_ns > now_ns()
            await until(lambda: pair.router_until_ns == 0)
            assert pair.control.routers == 0
            assert session.remaining > 0  # its orders would go on
            assert pair.engine.step() == {session.id: 0}
            assert pair.engine.ran[session.id][-1] == (0, 0)
            await until(lambda: finished([request]))

    asyncio.run(main())


def test_a_closed_stream_of_orders_ends_the_stream_of_verdicts(tmp_path):
    async def main():
        async with fake_pair(tmp_path) as pair, raw_router(pair) as call:
            await until(lambda: pair.router_until_ns)
            await call.done_writing()
            assert await asyncio.wait_for(call.read(), 5) is grpc.aio.EOF
            await until(lambda: pair.control.routers == 0 and pair.router_until_ns == 0)

    asyncio.run(main())


def test_one_of_two_routers_going_leaves_the_others_lease(tmp_path):
    async def main():
        async with fake_pair(tmp_path) as pair, router(pair) as _:
            async with router(pair, lease_ms=30_000):
                await until(lambda: pair.router_until_ns > now_ns() + 20_000_000_000)
            await until(lambda: pair.control.routers == 1)
            assert now_ns() < pair.router_until_ns < now_ns() + 2_000_000_000

    asyncio.run(main())


def test_a_silent_routers_lease_expires_though_its_stream_stays_open(tmp_path):
    async def main():
        async with fake_pair(tmp_path) as pair, raw_router(pair) as call:
            session = pair.engine.open(request_id(1))
            pair.engine.step()
            await opened_by(call)
            order = pb.Order(session=session.id, slot=session.slot, id=1, steps=4, window=60_000, lease_ms=60_000)
            sent_at = time.monotonic()
            await call.write(pb.OrderFrame(orders=[order], lease_ms=150))
            await until(lambda: pair.engine.step()[session.id] == 4)
            await until(lambda: pair.engine.step()[session.id] == 0)
            assert 0.14 < time.monotonic() - sent_at < 2
            assert pair.control.routers == 1
            await call.write(pb.OrderFrame(lease_ms=10_000))  # a sign of life
            await until(lambda: pair.engine.step()[session.id] == 4)

    asyncio.run(main())


def test_a_router_without_orders_stays_alive_by_itself(tmp_path):
    async def main():
        async with fake_pair(tmp_path) as pair, router(pair, lease_ms=100):
            until_s = time.monotonic() + 0.35
            while time.monotonic() < until_s:
                assert pair.router_until_ns > now_ns()
                await asyncio.sleep(0.005)

    asyncio.run(main())


def test_a_session_without_its_next_order_is_held_for_its_lease_and_then_decodes_plainly(tmp_path):
    async def main():
        async with fake_pair(tmp_path) as pair, raw_router(pair) as call:
            session = pair.engine.open(request_id(1))
            pair.engine.step()
            await opened_by(call)

            def order(order_id, steps):
                return pb.OrderFrame(
                    lease_ms=10_000,
                    orders=[
                        pb.Order(
                            session=session.id, slot=session.slot, id=order_id, steps=steps, window=1, lease_ms=150
                        )
                    ],
                )

            await call.write(order(1, 4))
            await until(lambda: pair.engine.step()[session.id] == 4)
            held_at = time.monotonic()
            assert pair.engine.step() == {session.id: None}
            await until(lambda: pair.engine.step() == {session.id: 0})
            assert 0.14 < time.monotonic() - held_at < 2
            assert pair.engine.link.counts.lapsed_leases == 1
            await call.write(order(2, 5))  # late, but welcome
            await until(lambda: pair.engine.step() == {session.id: 5})

    asyncio.run(main())


def test_a_router_learns_of_the_sessions_that_opened_before_it_came(tmp_path):
    async def main():
        async with fake_pair(tmp_path) as pair:
            engine = pair.engine
            gone, one, two = (engine.open(request_id(number)) for number in (1, 2, 3))
            engine.step()
            engine.close(gone)
            engine.step()
            await until(lambda: pair.metrics.registry.get_sample_value("specdec_sessions") == 2)
            async with raw_router(pair) as call:
                assert await opened_by(call) == [one.id, two.id]

    asyncio.run(main())


def test_a_session_that_ran_before_its_router_came_speculates_once_it_is_there(tmp_path):
    """Its request was sent on while the loop's stream was down, so it has decoded plainly for a while."""

    async def main():
        async with fake_pair(tmp_path) as pair:
            session = pair.engine.open(request_id(1))
            for _ in range(31):
                pair.engine.step()
            async with router(pair, FixedSteps(4, 8, 2), requests=[Request(request_id(1))]):
                assert pair.engine.ran[session.id] == [(0, 0)] * 30
                stepping = asyncio.create_task(pair.engine.run())
                await until(lambda: pair.engine.ran[session.id][-1][1] == 4, 0.9)  # the lease is longer
                stepping.cancel()

    asyncio.run(main())


def test_sessions_speculate_again_after_their_router_has_reconnected(tmp_path):
    async def main():
        async with fake_pair(tmp_path) as pair, router(pair, FixedSteps(4, 8, 1)) as known:
            (request,) = registered(known, 1)
            session = pair.engine.open(request_id(1))
            stepping = asyncio.create_task(pair.engine.run())
            ran = pair.engine.ran[session.id]
            await until(lambda: len(ran) > 20)
            for other in list(pair.control._routers):
                control_module._hang_up(other)
            await until(lambda: not known.connected)
            assert known.ready  # it answers all the same
            await until(lambda: known.connected)
            before = len(ran)
            await until(lambda: len(ran) > before + 20 and all(steps == 4 for _, steps in ran[-20:]), 2)
            stepping.cancel()
            assert sum(s.committed for s in request.sessions) <= len(session.tokens) - 5

    asyncio.run(main())


def test_a_router_ends_even_if_grpc_swallows_its_cancellation(tmp_path, monkeypatch):
    """It does so where the stream ends in the same moment; `specdec router` then hung at its end."""

    async def swallowing(self, stub):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()

    monkeypatch.setattr(Pair, "_stream", swallowing)

    async def main():
        async with fake_pair(tmp_path) as pair:
            known = new_router(pair)
            running = asyncio.create_task(known.run())
            await until(lambda: known.ready)
            running.cancel()
            await asyncio.wait([running], timeout=2)
            assert running.done()

    asyncio.run(main())


def test_stopping_control_ends_every_stream(tmp_path):
    async def main():
        async with fake_pair(tmp_path) as pair, raw_router(pair) as one, raw_router(pair) as two:
            await until(lambda: pair.control.routers == 2)
            pair.control.stop()
            assert [await asyncio.wait_for(call.read(), 5) for call in (one, two)] == [grpc.aio.EOF] * 2
            assert pair.router_until_ns == 0
            assert not pair.control._pump.is_alive()

    asyncio.run(main())


def test_a_router_finds_a_pair_that_comes_back_on_the_same_address(tmp_path, caplog):
    async def main():
        async with contextlib.AsyncExitStack() as stack:
            async with fake_pair(tmp_path) as pair:
                known = await stack.enter_async_context(router(pair))
                await until(lambda: known.ready)
                (request,) = registered(known, 1)
                pair.engine.open(request_id(1))
                pair.engine.step()
                await until(lambda: request.sessions)
            await until(lambda: not known.connected)
            await until(lambda: not known.ready)
            assert finished([request])
            port = int(pair.address.rpartition(":")[2])
            async with fake_pair(tmp_path, port=port) as again:
                await until(lambda: known.ready and known.connected)
                await until(lambda: again.router_until_ns)

    with caplog.at_level(logging.INFO):
        asyncio.run(main())
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


# ---- lost frames and slow routers


class PausedReader:
    """The verdict ring's reader, standing still until `go`."""

    def __init__(self, reader):
        self._reader, self.go = reader, threading.Event()

    def wait(self, timeout_s):
        return self._reader.wait(timeout_s) if self.go.wait(timeout_s) else None


@contextlib.asynccontextmanager
async def loop_that_lost_frames(tmp_path, monkeypatch, window):
    """A driven session whose pair has a ring of 4 frames, after cycles whose verdicts did not fit it."""
    monkeypatch.setattr(layout, "VERDICT_SLOTS", 4)
    paused = []
    start = control_module.Control.start

    def start_paused(control):
        control._verdicts = PausedReader(control._verdicts)
        paused.append(control._verdicts)
        start(control)

    monkeypatch.setattr(control_module.Control, "start", start_paused)
    async with fake_pair(tmp_path) as pair, router(pair, FixedSteps(3, 8, window), lease_ms=4000) as known:
        (request,) = registered(known, 1)
        session = pair.engine.open(request_id(1))
        paused[0].go.set()
        await until(lambda: pair.engine.step().get(session.id) == 3)
        await until(lambda: request.sessions[0].cycles == 1)
        paused[0].go.clear()
        await asyncio.sleep(0.1)  # the pump's wait that had begun is over
        for _ in range(4):
            pair.engine.link.open("filler", [1], 1)
            pair.engine.link.finish()
        yield pair, paused[0].go, session, request


@pytest.mark.parametrize("window", [1, 8])
def test_lost_verdicts_do_not_stall_a_session_beside_others(tmp_path, monkeypatch, window):
    async def main():
        async with loop_that_lost_frames(tmp_path, monkeypatch, window) as (pair, go, session, request):
            other = pair.engine.open("not-routed")  # decodes plainly
            for _ in range(window + 8):
                pair.engine.step()
            assert pair.engine.link.counts.lost_verdicts > 8
            assert pair.engine.step() == {session.id: None, other.id: 0}
            go.set()
            before, started = len(pair.engine.ran[session.id]), time.monotonic()
            while len(pair.engine.ran[session.id]) < before + 50:
                pair.engine.step()
                await asyncio.sleep(0.0005)
                assert time.monotonic() - started < 3
            assert pair.engine.link.counts.lapsed_leases == 0
            assert all(order for order, _ in pair.engine.ran[session.id])
            await until(lambda: pair.metrics.registry.get_sample_value("specdec_lost_verdict_frames_total") > 8)
            assert request.sessions[0].cycles < len(pair.engine.ran[session.id])

    asyncio.run(main())


def test_lost_verdicts_do_not_stall_a_session_that_is_alone(tmp_path, monkeypatch):
    async def main():
        async with loop_that_lost_frames(tmp_path, monkeypatch, 8) as (pair, go, session, _):
            for _ in range(20):
                pair.engine.step()
            assert pair.engine.link.counts.lost_verdicts > 0
            assert pair.engine.step() == {session.id: None}
            go.set()
            before = len(pair.engine.ran[session.id])
            stepping = asyncio.create_task(pair.engine.run())
            await until(lambda: len(pair.engine.ran[session.id]) > before + 50, 3)
            assert pair.engine.link.counts.lapsed_leases == 0
            stepping.cancel()

    asyncio.run(main())


def fat_frames(count: int) -> list[pb.VerdictFrame]:
    """Frames of 100 kB: gRPC's own buffers, about 4 MB, take 40 of them."""
    opened = [pb.Opened(session=1, request_id="x" * 100_000)]
    return [pb.VerdictFrame(cycle=cycle, opened=opened) for cycle in range(1, count + 1)]


def test_a_router_too_far_behind_is_dropped_and_holds_a_bounded_queue(tmp_path, monkeypatch):
    monkeypatch.setattr(control_module, "_QUEUE_FRAMES", 32)

    async def main():
        async with fake_pair(tmp_path) as pair, raw_router(pair) as stuck, raw_router(pair) as quick:
            await until(lambda: pair.control.routers == 2)

            async def read_on():
                return [frame.cycle async for frame in quick]

            reading = asyncio.create_task(read_on())
            longest = 0
            for frame in fat_frames(200):
                pair.control._publish(frame)
                longest = max([longest, *(router.frames.qsize() for router in pair.control._routers)])
                await asyncio.sleep(0.001)
            assert longest == 32
            received = 0
            while await asyncio.wait_for(stuck.read(), 5) is not grpc.aio.EOF:
                received += 1
            assert 0 < received < 150
            await until(lambda: pair.control.routers == 1)
            pair.control.stop()
            assert await asyncio.wait_for(reading, 5) == list(range(1, 201))

    asyncio.run(main())


def test_a_router_that_is_cut_off_while_it_is_behind_leaves_as_any_other(tmp_path):
    """gRPC once crashed the verifier here: its stream of verdicts ends in the middle of a write."""

    async def main():
        async with fake_pair(tmp_path) as pair:
            async with raw_router(pair):
                await until(lambda: pair.router_until_ns)
                (stuck,) = pair.control._routers
                for frame in fat_frames(300):
                    pair.control._publish(frame)
                    await asyncio.sleep(0)
                await until(lambda: 0 < stuck.frames.qsize() < 300)
            await until(lambda: pair.control.routers == 0 and pair.router_until_ns == 0)

    asyncio.run(main())


# ---- what the pair says of itself, and counts


def test_describe_says_what_the_pair_says_of_itself(tmp_path):
    async def main():
        async with fake_pair(tmp_path) as pair, grpc.aio.insecure_channel(pair.address) as channel:
            pair.description = pb.PairDescription(
                pair="p",
                model="m",
                http_url="http://127.0.0.1:1",
                max_steps=7,
                max_sessions=9,
                engine_ready=True,
                draft_up=True,
                draft_detail="ngram",
                specdec_version="1",
                vllm_version="2",
            )
            stub = pb_grpc.SpeculationStub(channel)
            assert await stub.Describe(pb.DescribeRequest()) == pair.description
            pair.description.engine_ready = False
            assert not (await stub.Describe(pb.DescribeRequest())).engine_ready

    asyncio.run(main())


def test_a_router_follows_what_the_pair_says_of_itself(tmp_path):
    async def main():
        async with fake_pair(tmp_path) as pair:
            pair.description.engine_ready = False
            async with router(pair) as known:
                assert not known.ready
                pair.description.engine_ready = True
                pair.description.http_url = "http://elsewhere"
                await until(lambda: known.ready, 2)
                assert known.http_url == "http://elsewhere"

    asyncio.run(main())


def test_the_pair_counts_from_the_verdicts(tmp_path):
    async def main():
        async with fake_pair(tmp_path) as pair, router(pair, FixedSteps(4, 8, 1)) as known:
            requests = registered(known, 1, 2)
            for number in (1, 2):
                pair.engine.open(request_id(number), cycles=10)
            await asyncio.wait_for(pair.engine.run(), 10)
            await until(lambda: finished(requests))
            await until(lambda: pair.metrics.registry.get_sample_value("specdec_sessions") == 0)
            counted = pair.metrics.registry.get_sample_value
            assert counted("specdec_proposed_tokens_total") == 80
            assert counted("specdec_accepted_tokens_total") == 40
            assert counted("specdec_tokens_total") == 2 * (10 * 3 + 1)
            assert counted("specdec_accept_length_count") == 20
            assert counted("specdec_accept_length_sum") == 60
            assert 10 <= counted("specdec_cycles_total") <= 20
            assert counted("specdec_stage_seconds_count", {"stage": "verify"}) == counted("specdec_cycles_total")

    asyncio.run(main())


def test_a_session_nobody_orders_for_decodes_plainly_after_its_first_lease(tmp_path):
    async def main():
        async with fake_pair(tmp_path) as pair, router(pair, lease_ms=100) as known:
            (request,) = registered(known, 1)
            session = pair.engine.open(request_id(1), cycles=5)
            started = time.monotonic()
            await asyncio.wait_for(pair.engine.run(), 5)
            assert 0.4 < time.monotonic() - started < 2
            assert pair.engine.ran[session.id] == [(0, 0)] * 5
            await until(lambda: finished([request]))
            assert request.sessions[0].cycles == 5

    asyncio.run(main())
