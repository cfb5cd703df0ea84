"""router/admission.py: places, the queue, and what is refused."""

import asyncio
import contextlib
import time
import tracemalloc

import pytest

from edge_kit import CHAT, chunk, delta, error_of, never, raw_post, reply, routed, sent, start
from fake_engine import until
from specdec.router import routes
from specdec.router.admission import Admission
from specdec.router.errors import ApiError
from specdec.telemetry import RouterMetrics


class Bench:
    """An admission, and requests that hold their places until told."""

    def __init__(self, capacity: int = 4, **bounds: float) -> None:
        self.capacity, self.metrics = capacity, RouterMetrics()
        defaults = {"max_waiting": 4, "max_waiting_tokens": 1000, "max_held_bytes": 1000, "timeout_s": 5}
        self.admission = Admission(lambda: self.capacity, self.metrics, **(defaults | bounds))
        self.running: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def ask(self, name: str, sessions: int = 1, tokens: int = 10) -> "asyncio.Task[None]":
        self.ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._hold(name, sessions, tokens))
        return self.tasks[name]

    async def _hold(self, name: str, sessions: int, tokens: int) -> None:
        async with self.admission.admitted(sessions, tokens):
            self.running.append(name)
            try:
                await self.ends[name].wait()
            finally:
                self.running.remove(name)

    async def end(self) -> None:
        """All end; nothing may be left."""
        for end in self.ends.values():
            end.set()
        await asyncio.wait_for(asyncio.gather(*self.tasks.values(), return_exceptions=True), 5)
        a = self.admission
        assert (a.running, a.waiting, a.waiting_tokens, a.held_bytes, len(a._queue)) == (0, 0, 0, 0, 0)
        for name in ("admitted_sessions", "waiting_sessions", "waiting_tokens", "waiting_bytes"):
            assert self.metrics.registry.get_sample_value(f"specdec_router_{name}") == 0


def run(main) -> None:
    asyncio.run(asyncio.wait_for(main(), 20))


async def refusal(task: "asyncio.Task[None]") -> ApiError:
    with pytest.raises(ApiError) as caught:
        await task
    return caught.value


def test_places_go_to_those_who_came_first_and_n_counts_n():
    async def main():
        bench = Bench(capacity=4)
        bench.ask("a", 3)
        bench.ask("wide", 2)
        bench.ask("b", 1)  # there would be room for it, but it came later
        await until(lambda: bench.admission.waiting == 3)
        assert bench.running == ["a"]
        bench.ends["a"].set()
        await until(lambda: bench.running == ["wide", "b"])
        await bench.end()

    run(main)


def test_beyond_the_queues_sessions_it_says_no_at_once():
    async def main():
        bench = Bench(capacity=1, max_waiting=2)
        for name in "abc":
            bench.ask(name)
        await until(lambda: bench.admission.waiting == 2)
        started = time.monotonic()
        error = await refusal(bench.ask("d"))
        assert time.monotonic() - started < 0.05
        assert (error.status, error.code, error.type) == (429, "too_many_waiting", "rate_limit_error")
        await bench.end()

    run(main)


def test_beyond_the_queues_tokens_it_says_no_at_once():
    async def main():
        bench = Bench(capacity=1, max_waiting=100, max_waiting_tokens=1000)
        bench.ask("a")
        bench.ask("b", tokens=900)
        await until(lambda: bench.admission.waiting_tokens == 900)
        assert (await refusal(bench.ask("c", tokens=101))).code == "too_many_waiting"
        bench.ask("d", tokens=100)
        await until(lambda: bench.admission.waiting_tokens == 1000)
        await bench.end()

    run(main)


def test_bodies_count_for_as_long_as_they_are_held():
    bench = Bench(max_held_bytes=1 << 20)
    with bench.admission.holding() as first, bench.admission.holding() as second:
        first(1 << 22)  # alone it may be larger
        second(1 << 16)  # and a small one is always taken
        assert bench.metrics.registry.get_sample_value("specdec_router_waiting_bytes") == (1 << 22) + (1 << 16)
        with pytest.raises(ApiError) as caught:
            second(1)
        assert caught.value.code == "too_many_waiting"
    assert bench.metrics.registry.get_sample_value("specdec_router_waiting_bytes") == 0
    with bench.admission.holding() as small, bench.admission.holding() as third:
        small(16)
        third(1 << 20)


def test_uploads_that_do_not_end_take_no_more_memory_than_is_allowed(tmp_path):
    body = b'{"messages": ["%s"]}' % (b"a " * 300_000)

    async def main():
        async with (
            routed(tmp_path, reply(), max_waiting_mb=1) as router,
            sent(router, raw_post(CHAT, body)[:-1]) as ends,
        ):
            admission = router.app.state.router.admission
            await until(lambda: admission.held_bytes == len(body) - 1)
            response = await router.post(content=body)
            assert (response.status_code, error_of(response)["code"]) == (429, "too_many_waiting")
            assert (await router.post(content=body[:20_000] + b'"]}')).status_code == 200
            ends[1].write(body[-1:])
            assert b" 200 " in await ends[0].readline()
            assert (await router.post(content=body)).status_code == 200
            await until(lambda: router.at_rest)
            assert admission.held_bytes == 0

    run(main)


@pytest.mark.parametrize("waits", [False, True], ids=["runs", "waits"])
def test_a_picture_counts_with_its_bytes_until_its_answer_begins(tmp_path, waits):
    # larger than the bound, as one alone may be
    picture = b'{"messages": ["data:image/png;base64,%s"]}' % (b"A" * 1_500_000)

    async def main():
        async with routed(tmp_path, never, max_sessions=1, max_waiting_mb=1) as router:
            admission = router.app.state.router.admission
            asking = [asyncio.create_task(router.post())] if waits else []
            await until(lambda: len(router.vllm.asked) == waits)
            asking.append(asyncio.create_task(router.post(content=picture)))
            await until(lambda: admission.waiting if waits else router.vllm.asked)
            response = await router.post(content=picture)
            assert (response.status_code, error_of(response)["code"]) == (429, "too_many_waiting")
            for one in asking:
                one.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
            await until(lambda: router.at_rest)
            assert admission.held_bytes == 0

    run(main)


def test_a_body_whose_answer_has_begun_is_not_held(tmp_path):
    """Neither counted nor in memory, however long its stream goes on."""
    picture = b'{"stream": true, "messages": ["data:image/png;base64,%s"]}' % (b"A" * 8_000_000)
    request = raw_post(CHAT, picture)

    async def begun(asked, send) -> None:
        await start(send, 200, ("content-type", "text/event-stream"))
        await chunk(send, delta("a"))
        await never(asked, send)

    async def main():
        async with contextlib.AsyncExitStack() as stack:
            router = await stack.enter_async_context(routed(tmp_path, begun, max_waiting_mb=9))
            await router.client.get("/livez")
            tracemalloc.start()
            stack.callback(tracemalloc.stop)
            for _ in range(3):
                reader, _ = await stack.enter_async_context(sent(router, request))
                assert b" 200 " in await reader.readline()
                router.vllm.asked.clear()
            await asyncio.sleep(0.05)
            assert router.app.state.router.admission.held_bytes == 0
            assert len(large_objects()) <= 3  # FakeVllm's own, which it keeps with each request it answers

    run(main)


def test_a_body_that_is_changed_on_its_way_is_held_once(tmp_path):
    picture = b'{"speculative": "off", "messages": ["data:image/png;base64,%s"]}' % (b"A" * 8_000_000)

    async def main():
        async with contextlib.AsyncExitStack() as stack:
            router = await stack.enter_async_context(routed(tmp_path, never))
            tracemalloc.start()
            stack.callback(tracemalloc.stop)
            await stack.enter_async_context(sent(router, raw_post(CHAT, picture)))
            await until(lambda: router.vllm.asked)
            await until(lambda: len(large_objects()) <= 3)  # the request here, the router's body, and FakeVllm's

    run(main)


def large_objects() -> list[int]:
    """The sizes of those made since tracemalloc began."""
    return [trace.size for trace in tracemalloc.take_snapshot().traces if trace.size > 1 << 20]


@pytest.mark.parametrize(
    ("path", "waits"),
    [
        *(
            ("/v1/audio/transcriptions", True),
            ("/v1/messages/count_tokens", True),
            ("/v1/chat/completions/render", True),
        ),
        *(("/tokenize", True), ("/v1/chat/completions/batch", True), ("/v1/what-vllm-adds", True), (CHAT, True)),
        *(("/detokenize", False), ("/v1/responses/resp_1/cancel", False)),
    ],
)
def test_whatever_may_compute_waits_for_a_place(path, waits):
    assert routes.queued("POST", path) is waits
    assert not routes.queued("GET", path)


def test_without_a_queue_the_first_that_would_wait_is_refused():
    async def main():
        bench = Bench(capacity=1, max_waiting=0)
        bench.ask("a")
        await until(lambda: bench.running)
        assert (await refusal(bench.ask("b"))).code == "too_many_waiting"
        await bench.end()

    run(main)


def test_a_request_wider_than_everything_runs_alone():
    async def main():
        bench = Bench(capacity=2, max_waiting=1)
        bench.ask("a")
        bench.ask("wide", 10, tokens=10_000)
        await until(lambda: bench.admission.waiting == 10)
        bench.ends["a"].set()
        await until(lambda: bench.running == ["wide"])
        bench.ask("b")
        await until(lambda: bench.admission.waiting == 1)
        await bench.end()

    run(main)


def test_waiting_ends_with_429_and_gives_the_queue_back():
    async def main():
        bench = Bench(capacity=1, timeout_s=0.1)
        bench.ask("a")
        started = time.monotonic()
        error = await refusal(bench.ask("b"))
        assert 0.1 <= time.monotonic() - started < 1
        assert (error.status, error.code) == (429, "queue_timeout")
        assert bench.admission.waiting == 0
        await bench.end()

    run(main)


@pytest.mark.parametrize("turns", [0, 1, 2, 3])
def test_who_goes_while_it_is_let_in_leaves_its_place_to_the_next(turns):
    async def main():
        bench = Bench(capacity=1)
        bench.ask("a")
        gone = bench.ask("b")
        bench.ask("c")
        await until(lambda: bench.admission.waiting == 2)
        bench.ends["a"].set()
        for _ in range(turns):
            await asyncio.sleep(0)
        gone.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await gone
        await until(lambda: bench.running == ["c"])
        assert bench.admission.running == 1
        await bench.end()

    run(main)


def test_who_goes_from_the_heads_place_lets_the_others_in():
    async def main():
        bench = Bench(capacity=2)
        bench.ask("a")
        wide = bench.ask("wide", 2)
        bench.ask("b")
        await until(lambda: bench.admission.waiting == 3)
        wide.cancel()
        await until(lambda: bench.running == ["a", "b"])
        await bench.end()

    run(main)


def test_more_capacity_lets_in_who_waits():
    async def main():
        bench = Bench(capacity=1)
        bench.ask("a")
        bench.ask("b")
        await until(lambda: bench.admission.waiting == 1)
        bench.capacity = 2
        bench.admission.wake()
        await until(lambda: bench.running == ["a", "b"])
        await bench.end()

    run(main)


def test_retry_after_grows_with_the_queue_and_with_how_long_sessions_take():
    async def main():
        bench = Bench(capacity=1, max_waiting=100)
        bench.ask("a")
        short = bench.admission.retry_after_s
        for n in range(20):
            bench.ask(f"w{n}")
        await until(lambda: bench.admission.waiting == 20)
        assert bench.admission.retry_after_s == pytest.approx(21 * short)
        await bench.end()

    run(main)


def test_an_open_loop_overload_is_answered_quickly_and_what_runs_is_not_disturbed():
    """Five times more comes than there is room for: refusals are immediate, and those let in take as long as alone."""

    async def main():
        bench = Bench(capacity=4, max_waiting=4)
        times: list[float] = []
        refusals: list[float] = []

        async def one() -> None:
            started = time.monotonic()
            try:
                async with bench.admission.admitted(1, 10):
                    began = time.monotonic()
                    await asyncio.sleep(0.02)
                    times.append(time.monotonic() - began)
            except ApiError:
                refusals.append(time.monotonic() - started)

        tasks = []
        for _ in range(400):
            tasks.append(asyncio.create_task(one()))
            await asyncio.sleep(0.001)
            assert bench.admission.running <= 4
            assert bench.admission.waiting <= 4
        await asyncio.gather(*tasks)
        assert len(times) + len(refusals) == 400
        assert len(refusals) > 150
        assert max(refusals) < 0.05
        assert sorted(times)[len(times) // 2] < 0.04
        await bench.end()

    run(main)
