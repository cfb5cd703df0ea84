"""router/fleet.py: where pairs come from, which one is chosen, and what another one is asked when that one fails."""

import asyncio
import contextlib
import json
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI
from prometheus_client import generate_latest

from edge_kit import CHAT, DONE, FakeVllm, delta, error_of, never, reply, rude_engine, run, stream, url_of
from fake_engine import FakePair, fake_pair, until
from specdec.proto import speculation_pb2 as pb
from specdec.router import fleet as fleet_module
from specdec.router.app import Router, create_app
from specdec.router.errors import ApiError
from specdec.router.fleet import Fleet, Prefixes
from specdec.router.loop import speculate
from specdec.router.pairs import Pair, Request, Session
from specdec.router.settings import RouterSettings
from specdec.router.steps import MeasuredSteps
from specdec.serve import listen, serving
from specdec.telemetry import RouterMetrics


async def nobody_drives(pair: Pair, session: Any) -> None: ...


def known_pair(address: str, name: str = "") -> Pair:
    """A pair that has said it is ready, and is never asked."""
    pair = Pair(address, lease_ms=1000, metrics=RouterMetrics(), drive=nobody_drives, max_step_age_s=10)
    pair.description = pb.PairDescription(engine_ready=True)
    pair.connected = True
    return pair


def fleet_of(*addresses: str) -> Fleet:
    return Fleet(addresses, known_pair, lambda: None)


def busy(pair: Pair, sessions: int) -> Request:
    request = Request(f"{pair.address}-{sessions}", width=sessions)
    pair.register(request)
    return request


# ---- choice


def test_the_least_loaded_is_chosen_and_n_counts_n():
    fleet = fleet_of("a:1", "b:1", "c:1")
    a, b, c = fleet.pairs
    busy(a, 3)
    busy(b, 1)
    busy(c, 2)
    assert fleet.choose() is b
    busy(b, 2)
    assert fleet.choose() is c


def test_what_is_not_ready_or_was_tried_is_not_chosen():
    fleet = fleet_of("a:1", "b:1", "c:1")
    a, b, c = fleet.pairs
    a.description.engine_ready = False
    b.description.step_age_ms = 11_000  # its engine stands still
    assert fleet.choose() is c
    with pytest.raises(ApiError) as caught:
        fleet.choose(tried=[c])
    assert (caught.value.status, caught.value.code) == (503, "no_pair")
    b.description.step_age_ms = 9000
    assert fleet.choose(tried=[c]) is b


def test_a_pair_without_its_loop_comes_after_those_that_speculate_and_one_that_leaves_last():
    fleet = fleet_of("a:1", "b:1", "c:1")
    a, b, c = fleet.pairs
    a.leaving, b.connected = True, False
    busy(c, 5)
    assert fleet.choose() is c
    assert fleet.choose(tried=[c]) is b
    assert fleet.choose(tried=[b, c]) is a


PROMPT = b"A system prompt that everybody shares. " * 100


def test_a_shared_beginning_goes_where_it_was_seen_unless_that_is_much_busier():
    fleet = fleet_of("a:1", "b:1")
    first = fleet.choose(PROMPT + b"one")
    other = next(pair for pair in fleet.pairs if pair is not first)
    request = busy(first, 4)
    assert fleet.choose(PROMPT + b"two") is first
    assert fleet.choose(b"another " * 500) is other
    first.release(request)
    busy(first, 5)
    assert fleet.choose(PROMPT + b"three") is other
    assert fleet.choose(PROMPT + b"three") is other  # by now it has it, too


def test_short_prompts_are_spread_by_load():
    fleet = fleet_of("a:1", "b:1")
    first = fleet.choose(b"Hi")
    busy(first, 1)
    assert fleet.choose(b"Hi") is not first


def test_the_longest_beginning_counts():
    prefixes = Prefixes()
    a, b = known_pair("a:1"), known_pair("b:1")
    prefixes.saw(PROMPT[:600], a)
    prefixes.saw(PROMPT[:3000], b)
    prefixes.saw(PROMPT[:600], a)
    assert prefixes.find(PROMPT[:4000]) is b
    assert prefixes.find(PROMPT[:600]) is a
    assert prefixes.find(PROMPT[:100]) is None
    assert prefixes.find(b"x" * 4000) is None


def test_beginnings_are_forgotten_in_the_end(monkeypatch):
    monkeypatch.setattr(fleet_module, "_KNOWN", 10)
    prefixes = Prefixes()
    for n in range(100):
        prefixes.saw(b"%d" % n * 600, known_pair("a:1"))
    assert len(prefixes._pairs) == 10
    assert prefixes.find(b"0" * 600) is None


# ---- DNS


class FakeDns:
    """What names resolve to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.addresses: Collection[str] | None = set()
        self.failure: Exception | None = None
        monkeypatch.setattr(fleet_module, "resolve", self.resolve)
        monkeypatch.setattr(fleet_module, "_RESOLVE_S", 0.02)

    async def resolve(self, name: str) -> Collection[str]:
        if name == "hangs.test:1":
            await asyncio.sleep(3600)
        assert name == "pairs.test:8101"
        if self.failure is not None:
            raise self.failure
        if self.addresses is None:
            raise OSError("no such name")
        return self.addresses


@contextlib.asynccontextmanager
async def following(
    monkeypatch: pytest.MonkeyPatch, *before: str, connected: bool = True
) -> AsyncIterator[tuple[FakeDns, Fleet]]:
    """A fleet of a name and a fixed pair; `before`: endpoints before them. No stream is opened."""
    dns = FakeDns(monkeypatch)

    def make(address: str, name: str) -> Pair:
        pair = known_pair(address, name)
        pair.connected = connected
        return pair

    monkeypatch.setattr(Pair, "run", lambda self: asyncio.sleep(3600))
    fleet = Fleet([*before, "dns://pairs.test:8101", "fixed:1"], make, lambda: None)
    task = asyncio.create_task(fleet.run())
    try:
        yield dns, fleet
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def addresses(fleet: Fleet) -> set[str]:
    return {pair.address for pair in fleet.pairs}


def test_pairs_come_and_go_with_their_name(monkeypatch):
    async def main():
        async with following(monkeypatch) as (dns, fleet):
            assert addresses(fleet) == {"fixed:1"}
            dns.addresses = {"10.0.0.1:8101", "10.0.0.2:8101"}
            await until(lambda: addresses(fleet) == {"fixed:1", "10.0.0.1:8101", "10.0.0.2:8101"})
            two = next(pair for pair in fleet.pairs if pair.address == "10.0.0.2:8101")
            request = busy(two, 1)
            dns.addresses = {"10.0.0.1:8101"}
            await until(lambda: two.leaving)
            await asyncio.sleep(0.1)
            assert two in fleet.pairs  # it still answers
            assert fleet.choose() is not two
            two._metrics.steps.labels(two.address).set(1)
            two.release(request)
            await until(lambda: two not in fleet.pairs)
            await until(lambda: two.address not in generate_latest(two._metrics.registry).decode())

    run(main)


def test_no_metric_names_a_pair_that_has_left_and_one_that_comes_back_is_measured_again(tmp_path, monkeypatch):
    metrics = RouterMetrics()
    policy = MeasuredSteps(2, 8, 1, metrics)

    async def drive(pair: Pair, session: Session) -> None:
        await speculate(session, pair, policy)

    def make(address: str, name: str) -> Pair:
        return Pair(address, lease_ms=1000, metrics=metrics, drive=drive, gone=policy.forget)

    async def main():
        async with fake_pair(tmp_path) as fake:
            dns = FakeDns(monkeypatch)
            fleet = Fleet(["dns://pairs.test:8101"], make, lambda: None)
            task = asyncio.create_task(fleet.run())

            def named() -> list[str]:
                lines = generate_latest(metrics.registry).decode().splitlines()
                return [line.partition("{")[0] for line in lines if fake.address in line]

            for number in range(2):
                dns.addresses = {fake.address}
                await until(lambda: fleet.pairs and fleet.pairs[0].connected)
                request = Request(f"specdec-{number:032x}")
                fleet.pairs[0].register(request)
                session = fake.engine.open(request.id)
                cycles = asyncio.create_task(fake.engine.run(0.001))
                await until(lambda request=request: request.sessions and request.sessions[0].cycles > 20)
                assert {"specdec_router_steps", "specdec_router_pair_up", "specdec_router_utility"} <= set(named())
                fleet.pairs[0].release(request)  # its session goes on, and is let go with the pair
                dns.addresses = set()
                await until(lambda: not fleet.pairs)
                await until(lambda: not named())
                await asyncio.sleep(0.1)
                assert not named()
                cycles.cancel()
                fake.engine.close(session)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    run(main)


def test_a_pair_with_an_address_of_each_family_is_one(monkeypatch):
    """Both are tried; once one is connected, the other family's leave, whichever the resolver prefers."""

    async def main():
        async with following(monkeypatch, connected=False) as (dns, fleet):
            v6, v4 = ["[fd00::1]:8101", "[fd00::2]:8101"], ["10.0.0.1:8101", "10.0.0.2:8101"]

            def connect(*chosen: str) -> None:
                for pair in fleet.pairs:
                    pair.connected = pair.address in chosen

            dns.addresses = [*v6, *v4]
            await until(lambda: addresses(fleet) == {"fixed:1", *v6, *v4})
            await asyncio.sleep(0.1)
            assert addresses(fleet) == {"fixed:1", *v6, *v4}
            connect(v4[1])  # the pairs do not listen on IPv6
            await until(lambda: addresses(fleet) == {"fixed:1", *v4})
            dns.addresses = ["[fd00::3]:8101", *dns.addresses]
            await asyncio.sleep(0.1)
            assert addresses(fleet) == {"fixed:1", *v4}  # and it does not change its mind
            connect()
            await until(lambda: len(fleet.pairs) == 6)
            connect(*v6, *v4)
            await until(lambda: addresses(fleet) == {"fixed:1", "[fd00::3]:8101", *v6})

    run(main)


@pytest.mark.parametrize("failure", [OSError("no"), UnicodeError("label empty"), RuntimeError("?")], ids=repr)
def test_whatever_a_resolver_raises_costs_no_pair(monkeypatch, caplog, failure):
    async def main():
        async with following(monkeypatch) as (dns, fleet):
            dns.failure = failure
            await asyncio.sleep(0.1)
            assert fleet.choose().address == "fixed:1"
            dns.failure = None
            dns.addresses = {"10.0.0.1:8101"}
            await until(lambda: len(fleet.pairs) == 2)

    run(main)
    told = [r.getMessage() for r in caplog.records if r.name == "specdec.router.fleet" and "stay as" in r.getMessage()]
    assert told == [f"dns://pairs.test:8101: {type(failure).__name__}: {failure}; the pairs stay as they are"]


def test_a_resolver_that_hangs_stops_no_other_name(monkeypatch):
    monkeypatch.setattr(fleet_module, "_LOOK_UP_S", 0.05)

    async def main():
        async with following(monkeypatch, "dns://hangs.test:1") as (dns, fleet):
            dns.addresses = {"10.0.0.1:8101"}
            await until(lambda: "10.0.0.1:8101" in addresses(fleet))
            dns.addresses = {"10.0.0.2:8101"}
            await until(lambda: addresses(fleet) == {"fixed:1", "10.0.0.2:8101"})

    run(main)


def test_a_name_that_cannot_be_one_is_no_oserror():
    """What the fleet has to reckon with."""

    async def main():
        with pytest.raises(UnicodeError):
            await fleet_module.resolve("a..b:8101")

    run(main)


def test_a_pairs_task_that_fails_ends_the_router(monkeypatch, caplog):
    """It would not be driven any more, and nobody would know."""
    signals: list[int] = []
    monkeypatch.setattr("specdec.router.app.signal.raise_signal", signals.append)

    async def fail(pair: Pair) -> None:
        raise LookupError("a defect")

    async def main():
        monkeypatch.setattr(Pair, "run", fail)
        monkeypatch.setattr(fleet_module, "_RESOLVE_S", 0.02)
        router = Router(RouterSettings(pairs=["a:1"]), None)
        async with router.running():
            await until(lambda: signals)
        assert signals == [signal.SIGTERM]

    run(main)
    assert "a background task has failed" in caplog.text
    assert "LookupError: a defect" in caplog.text


def test_a_router_that_ends_sends_itself_no_signal(monkeypatch):
    signals: list[int] = []
    monkeypatch.setattr("specdec.router.app.signal.raise_signal", signals.append)

    async def main():
        async with Router(RouterSettings(pairs=["127.0.0.1:9", "dns://a..b:8101"]), None).running():
            await asyncio.sleep(0.1)
        await asyncio.sleep(0)
        assert signals == []

    run(main)


def test_a_pair_that_comes_back_while_it_leaves_stays(monkeypatch):
    async def main():
        async with following(monkeypatch) as (dns, fleet):
            dns.addresses = {"10.0.0.1:8101"}
            await until(lambda: len(fleet.pairs) == 2)
            pair = fleet.pairs[1]
            busy(pair, 1)
            dns.addresses = set()
            await until(lambda: pair.leaving)
            dns.addresses = {"10.0.0.1:8101"}
            await until(lambda: not pair.leaving)
            assert fleet.pairs[1] is pair

    run(main)


def test_a_resolver_that_fails_changes_nothing(monkeypatch, caplog):
    async def main():
        async with following(monkeypatch) as (dns, fleet):
            dns.addresses = {"10.0.0.1:8101"}
            await until(lambda: len(fleet.pairs) == 2)
            dns.addresses = None
            await asyncio.sleep(0.1)
            assert len(fleet.pairs) == 2
            assert not any(pair.leaving for pair in fleet.pairs)

    with caplog.at_level(logging.INFO):
        run(main)


def test_a_name_that_is_not_known_yet_is_asked_for_again(monkeypatch):
    async def main():
        async with following(monkeypatch) as (dns, fleet):
            dns.addresses = None
            await asyncio.sleep(0.1)
            dns.addresses = {"[fd00::1]:8101"}
            await until(lambda: "[fd00::1]:8101" in addresses(fleet))

    run(main)


def test_localhost_resolves_to_loopback():
    async def main():
        assert set(await fleet_module.resolve("localhost:81")) <= {"127.0.0.1:81", "[::1]:81"}
        with pytest.raises(socket.gaierror):
            await fleet_module.resolve("no-such-name.invalid:81")

    run(main)


# ---- several pairs under a router


@dataclass
class Member:
    """A pair of a running router: its FakeVllm, its gRPC, and what the router holds of it."""

    vllm: FakeVllm
    fake: FakePair
    pair: Pair


@contextlib.asynccontextmanager
async def pairs_routed(folder: Path, *answers: Any, **settings: Any) -> AsyncIterator[tuple[httpx.AsyncClient, Any]]:
    """(a client of the router, its pairs in order), each pair answering with one of `answers`."""
    async with contextlib.AsyncExitStack() as stack:
        fakes, vllms = [], []
        for number, answer in enumerate(answers):
            (folder / str(number)).mkdir(exist_ok=True)
            fake = await stack.enter_async_context(fake_pair(folder / str(number)))
            vllm, listener = FakeVllm(answer), listen("127.0.0.1", 0, "vLLM")
            fake.description.http_url = vllm.url = url_of(listener)
            await stack.enter_async_context(serving(vllm, listener, 1))
            fakes.append(fake)
            vllms.append(vllm)
        listener = listen("127.0.0.1", 0, "router")
        app: FastAPI = create_app(RouterSettings(pairs=[fake.address for fake in fakes], **settings))
        url = url_of(listener)
        await stack.enter_async_context(serving(app, listener, 1))
        await until(lambda: all(pair.ready and pair.connected for pair in app.state.pairs))
        client = httpx.AsyncClient(base_url=url, timeout=10, trust_env=False)
        await stack.enter_async_context(client)
        yield client, [Member(*three) for three in zip(vllms, fakes, app.state.pairs, strict=True)]


def unreachable(member: Member, url: str = "http://127.0.0.1:9") -> None:
    member.fake.description.http_url = url
    member.pair.description.http_url = url


def retries(member: Member) -> float:
    return member.pair._metrics.registry.get_sample_value("specdec_router_retries_total")


@pytest.mark.parametrize("streamed", [False, True])
def test_a_pair_that_cannot_be_reached_costs_no_request(tmp_path, streamed):
    async def main():
        good = stream(delta("ok"), DONE) if streamed else reply(b'{"ok": 1}')
        async with pairs_routed(tmp_path, never, never, good) as (client, members):
            for member in members[:2]:
                unreachable(member)
            for _ in range(3):
                response = await client.post(CHAT, json={"messages": [], "stream": streamed})
                assert response.status_code == 200
            assert len(members[2].vllm.asked) == 3
            assert retries(members[0]) >= 2
            assert all(member.pair.load == 0 for member in members)

    run(main)


DEAD = b'{"error":{"message": "EngineCore encountered an issue", "code": 500}}'


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [b"HTTP/1.1 200"],
        [b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"],
        [b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 0\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: %s\n\n" % DEAD],
        [b"HTTP/1.1 503 Gone\r\ncontent-length: 0\r\n\r\n"],
        [b"HTTP/1.1 500 X\r\ncontent-length: %d\r\n\r\n%s" % (len(DEAD), DEAD)],
    ],
    ids=["hangs-up", "half-a-head", "half-a-document", "no-event", "empty", "dead-in-a-stream", "503", "dead-engine"],
)
def test_a_failure_before_the_first_byte_goes_to_another_pair_once(tmp_path, parts):
    async def main():
        async with pairs_routed(tmp_path, never, reply(b'{"ok": 1}')) as (client, members), rude_engine(*parts) as url:
            unreachable(members[0], url)
            busy(members[1].pair, 1)  # so that the bad one is asked first
            response = await client.post(CHAT, json={"messages": []})
            assert (response.status_code, response.json()) == (200, {"ok": 1})
            unreachable(members[1], url)
            response = await client.post(CHAT, json={"messages": []})
            assert (response.status_code, error_of(response)["code"]) == (503, "engine_unavailable")

    run(main)


def test_a_pair_that_hangs_before_its_first_byte_loses_the_request_to_another(tmp_path):
    """Its connection stays open, and only its heartbeat says that it is gone."""

    async def main():
        async with pairs_routed(tmp_path, never, reply(b'{"ok": 1}')) as (client, members):
            request = busy(members[1].pair, 1)
            asking = asyncio.create_task(client.post(CHAT, json={"messages": []}))
            await until(lambda: members[0].vllm.asked)
            await asyncio.sleep(0.6)
            assert not asking.done()  # a slow first byte is no reason
            members[0].fake.description.engine_ready = members[0].pair.description.engine_ready = False
            response = await asyncio.wait_for(asking, 2)
            assert (response.status_code, response.json()) == (200, {"ok": 1})
            await until(lambda: members[0].vllm.cancelled == 1)
            members[1].pair.release(request)

    run(main)


def test_a_stream_that_has_begun_is_not_begun_again(tmp_path):
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    part = delta("a")

    async def main():
        async with (
            pairs_routed(tmp_path, never, reply()) as (client, members),
            rude_engine(head, b"%x\r\n%s\r\n" % (len(part), part)) as url,
        ):
            unreachable(members[0], url)
            busy(members[1].pair, 1)
            response = await client.post(CHAT, json={"messages": [], "stream": True})
            assert response.content.startswith(part + b'data: {"error"')
            assert members[1].vllm.asked == []

    run(main)


def test_errors_of_the_request_are_not_tried_elsewhere(tmp_path):
    async def main():
        async with pairs_routed(tmp_path, reply(b"{}", 400), reply(b"{}", 400)) as (client, members):
            assert (await client.post(CHAT, json={"messages": []})).status_code == 400
            assert sum(len(member.vllm.asked) for member in members) == 1

    run(main)


def test_pairs_that_leave_and_join_under_load_lose_no_request(tmp_path):
    """Each of two pairs in turn stops taking connections while forty clients keep asking."""

    async def slow(asked, send):
        await asyncio.sleep(0.005)
        await stream(delta("a"), delta("b"), DONE)(asked, send)

    async def main():
        async with pairs_routed(tmp_path, slow, slow) as (client, members):
            over, answered = False, 0

            async def ask() -> None:
                nonlocal answered
                while not over:
                    response = await client.post(CHAT, json={"messages": [], "stream": True})
                    assert response.status_code == 200
                    assert response.content.endswith(DONE)
                    answered += 1

            asking = [asyncio.create_task(ask()) for _ in range(40)]
            for _ in range(3):
                for member in members:
                    url = member.vllm.url
                    unreachable(member)
                    await asyncio.sleep(0.05)
                    member.fake.description.engine_ready = member.pair.description.engine_ready = False
                    await asyncio.sleep(0.1)
                    unreachable(member, url)
                    member.fake.description.engine_ready = member.pair.description.engine_ready = True
                    await asyncio.sleep(0.1)
            over = True
            await asyncio.gather(*asking)
            assert answered > 50
            assert all(member.pair.load == 0 for member in members)

    run(main)


def test_an_engine_that_stands_still_gets_no_requests_and_is_not_ready(tmp_path):
    async def main():
        async with pairs_routed(tmp_path, reply(b'{"pair": 0}'), reply(b'{"pair": 1}'), max_step_age_s=1) as (
            c,
            members,
        ):
            members[0].fake.description.step_age_ms = members[0].pair.description.step_age_ms = 1500
            for _ in range(3):
                assert (await c.post(CHAT, json={"messages": []})).json() == {"pair": 1}
            members[1].fake.description.step_age_ms = members[1].pair.description.step_age_ms = 1500
            ready = await c.get("/readyz")
            assert (ready.status_code, [pair["ready"] for pair in ready.json()["pairs"]]) == (503, [False, False])
            assert (await c.get("/livez")).status_code == 200
            members[0].fake.description.step_age_ms = 0  # it goes on, and is asked again
            await until(lambda: members[0].pair.ready)
            assert (await c.get("/readyz")).status_code == 200

    run(main)


def test_the_openai_package_is_told_to_come_back_when_places_are_taken(tmp_path):
    free = asyncio.Event()
    times = []

    async def slow(asked, send):
        await free.wait()
        await reply(json.dumps({"id": "c", "choices": []}).encode())(asked, send)

    async def main():
        async with pairs_routed(tmp_path, slow, max_sessions=1, max_waiting=0) as (client, members):

            def refusals() -> float:
                registry = members[0].pair._metrics.registry
                return registry.get_sample_value("specdec_router_rejected_total", {"code": "too_many_waiting"}) or 0

            def ask(retries):
                with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="x", max_retries=retries) as sdk:
                    started = time.monotonic()
                    sdk.chat.completions.create(model="m", messages=[])
                    times.append(time.monotonic() - started)

            first = asyncio.create_task(client.post(CHAT, json={"messages": []}))
            await until(lambda: members[0].vllm.asked)
            refused = await client.post(CHAT, json={"messages": []})
            assert (refused.status_code, error_of(refused)["code"]) == (429, "too_many_waiting")
            assert 1 <= int(refused.headers["retry-after"]) <= 60
            assert (await client.get("/readyz")).status_code == 200  # health never queues
            with pytest.raises(openai.RateLimitError):
                await asyncio.to_thread(ask, 0)
            again = asyncio.create_task(asyncio.to_thread(ask, 1))
            await until(lambda: refusals() == 3, 10)
            free.set()
            await again
            assert times[0] > 1  # it has waited for as long as the header says
            await first

    run(main)
