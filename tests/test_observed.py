"""router/observed.py: how requests end, their times and spans, on the real router in front of a FakeVllm."""

import asyncio
import json
import logging
import random
import time
from collections import Counter
from contextvars import copy_context
from functools import partial

import httpx
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import generate_latest

from edge_kit import CHAT, DONE, chunk, delta, event, never, raw_post, reply, routed, sent, start, stream, url_of
from fake_engine import until
from specdec.logs import FIELDS, request_id
from specdec.proto import speculation_pb2 as pb
from specdec.router.app import create_app
from specdec.router.observed import Observation
from specdec.serve import listen, serving
from specdec.telemetry import OUTCOMES, RouterMetrics
from specdec.tracing import Tracing

ERROR = b'data: {"error": {"message": "no", "type": "server_error"}}\n\n'
CALLER, CALLER_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def finish(reason: str, compact: bool = True) -> bytes:
    return event({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}, compact)


def document(reason: str | None, compact: bool = True, text: str = "") -> bytes:
    fields = {"choices": [{"index": 0, "message": {"content": text}, "finish_reason": reason}]}
    return json.dumps(fields, separators=(",", ":") if compact else None).encode()


def outcomes(router) -> Counter[str]:
    """Requests by outcome, over all routes."""
    counts: Counter[str] = Counter()
    for metric in router.pair._metrics.outcomes.collect():
        for sample in metric.samples:
            if sample.name.endswith("_total"):
                counts[sample.labels["outcome"]] += int(sample.value)
    return +counts


def run(main) -> None:
    asyncio.run(asyncio.wait_for(main, 30))


async def broken_stream(asked, send):
    """Headers and a token, then the connection breaks."""
    await start(send, 200, ("content-type", "text/event-stream"))
    await chunk(send, delta("a"))
    send.__self__.transport.abort()  # uvicorn's


ANSWERS = [
    (reply(document("stop")), "stop"),
    (reply(document("stop", compact=False)), "stop"),
    (reply(document("length")), "length"),
    (reply(document("tool_calls")), "tool_calls"),
    (reply(document("content_filter")), "content_filter"),
    (reply(document("repetition")), "ok"),  # a reason that nobody has listed
    (reply(document(None)), "ok"),
    # what an answer says of itself in its text is not how it ended
    (reply(document("length", text='{"finish_reason":"stop"}')), "length"),
    (reply(document(None, text='x", "finish_reason": "stop"')), "ok"),
    (stream(delta("a"), finish("stop"), DONE), "stop"),
    (stream(delta("a"), finish("stop", compact=False), DONE), "stop"),
    (stream(delta("a") + finish("length") + DONE), "length"),
    (stream(delta("a"), finish("tool_calls")[:40], finish("tool_calls")[40:], DONE), "tool_calls"),
    (stream(delta('data: {"error"'), finish("stop"), DONE), "stop"),
    (stream(delta("a"), ERROR, DONE), "error"),  # vLLM says [DONE] after an error, too
    (stream(delta("a") + ERROR), "error"),
    (broken_stream, "error"),
    (reply(b'{"error": {"message": "bad"}}', 400), "refused"),
    (reply(b"{}", 429), "refused"),
    (reply(b"{}", 500), "error"),
]


def test_each_answer_has_the_outcome_it_had(tmp_path):
    async def main():
        async with routed(tmp_path, never) as router:
            expected: Counter[str] = Counter()
            for answer, outcome in ANSWERS:
                router.vllm.answer = answer
                await router.post()
                expected[outcome] += 1
                await until(lambda: outcomes(router) == expected, 2)
            assert set(expected) == set(OUTCOMES) - {"abort"}

    run(main())


def test_what_the_router_itself_refuses_is_counted_as_any_other(tmp_path):
    async def main():
        async with routed(tmp_path, never) as router:
            assert (await router.post(fields={"speculative": "maybe"})).status_code == 400
            router.described(engine_ready=False)
            router.fake.description.engine_ready = False
            assert (await router.post()).status_code == 503
            await until(lambda: outcomes(router) == Counter(refused=1, error=1))
            for path in ("/livez", "/readyz"):
                await router.client.get(path)
            assert sum(outcomes(router).values()) == 2

    run(main())


@pytest.mark.parametrize("when", ["before the headers", "in the stream", "while sending"])
def test_a_client_that_goes_is_an_abort(tmp_path, when):
    async def half(asked, send):
        await start(send, 200, ("content-type", "text/event-stream"))
        await chunk(send, delta("a"))
        await never(asked, send)

    async def main():
        async with routed(tmp_path, half if when == "in the stream" else never) as router:
            request = raw_post(CHAT, json.dumps({"messages": [], "user": "x" * 1000}).encode())
            async with sent(router, request[:-500] if when == "while sending" else request) as (reader, _):
                await until(lambda: router.in_flight == 1)
                if when == "in the stream":
                    await reader.readuntil(b'"a"')
            await until(lambda: outcomes(router) == Counter(abort=1), 2)
            assert router.at_rest

    run(main())


def test_a_client_that_is_given_up_as_it_does_not_read_is_an_abort(tmp_path):
    async def endless(asked, send):
        await start(send, 200, ("content-type", "text/event-stream"))
        while True:
            await chunk(send, delta("x" * 100_000))
            await asyncio.sleep(0)

    async def main():
        async with routed(tmp_path, endless, write_timeout_s=0.6) as router, sent(router, raw_post(CHAT)):
            await until(lambda: outcomes(router), 10)
            assert outcomes(router) == Counter(abort=1)

    run(main())


def test_a_thousand_requests_of_any_fate_add_up_and_leave_nothing(tmp_path):
    chance = random.Random(3)

    async def main():
        async def fate(asked, send):
            await chance.choice(
                [
                    reply(document("stop")),
                    stream(delta("a"), finish("length"), DONE),
                    stream(delta("a"), ERROR),
                    reply(b"{}", 404),
                    broken_stream,
                    never,
                ]
            )(asked, send)

        at_once = asyncio.Semaphore(20)

        async def one(router) -> None:
            async with at_once, sent(router, raw_post(CHAT)) as (reader, _):
                end = asyncio.create_task(reader.read())
                await asyncio.wait((end,), timeout=chance.choice((0, 0.001, 0.02, 0.1)))
                end.cancel()

        async with routed(tmp_path, fate) as router:
            await asyncio.gather(*(one(router) for _ in range(1000)))
            # a client that went before its request was read has made none
            await until(lambda: router.at_rest, 10)
            value = router.pair._metrics.registry.get_sample_value
            admitted = value("specdec_router_request_seconds_count", {"route": CHAT})
            assert 700 < admitted <= 1000
            assert sum(outcomes(router).values()) == admitted
            assert set(outcomes(router)) == {"stop", "length", "error", "refused", "abort"}

    run(main())


def test_no_path_method_model_or_id_makes_a_new_series(tmp_path):
    chance = random.Random(5)

    async def main():
        async with routed(tmp_path, reply()) as router:

            def series() -> int:
                scrape = generate_latest(router.pair._metrics.registry).decode()
                return sum(not line.startswith("#") for line in scrape.splitlines())

            async def ask(path: str, model: str) -> None:
                method = chance.choice(("GET", "POST", "PUT", "DELETE"))
                await router.client.request(method, path, json={"model": model}, headers={"x-request-id": model})

            for path in (CHAT, "/x"):
                await ask(path, "m")
            before = series()
            for number in range(0, 500, 20):
                name = f"{chance.getrandbits(60):x}"
                await asyncio.gather(*(ask(f"/{name}/{number + i}/wp-login.php", f"{name}{i}") for i in range(10)))
                await asyncio.gather(*(ask(CHAT, f"{name}{i}") for i in range(10)))
            assert series() == before

    run(main())


# ---- times


def test_the_times_are_what_was_seen(tmp_path):
    async def main():
        async def answer(asked, send):
            session = router.fake.engine.open(f"chatcmpl-{asked.header('x-request-id')}", cycles=4)
            await asyncio.sleep(0.1)
            router.fake.engine.step()  # the first token
            await start(send, 200, ("content-type", "text/event-stream"))
            await chunk(send, delta("a"))
            for _ in range(4):
                await asyncio.sleep(0.05)
                while None in router.fake.engine.step().values():
                    await asyncio.sleep(0.001)
                await chunk(send, delta("bc"))
            assert session.cycles == 4
            await chunk(send, finish("stop") + DONE, more=False)

        async with routed(tmp_path, answer, policy="fixed", steps=2) as router:
            value = router.pair._metrics.registry.get_sample_value
            started = time.monotonic()
            assert (await router.post()).status_code == 200
            took = time.monotonic() - started
            await until(lambda: value("specdec_router_time_per_output_token_seconds_count") == 1)
            sums = {
                name: value(f"specdec_router_{name}_sum")
                for name in (
                    *("time_to_first_token_seconds", "time_per_output_token_seconds", "engine_queue_seconds"),
                    "first_byte_seconds",
                )
            }
            whole = value("specdec_router_request_seconds_sum", {"route": CHAT})
            assert took - 0.05 < whole <= took
            assert 0.1 <= sums["first_byte_seconds"] <= sums["time_to_first_token_seconds"] < whole - 0.1
            assert 0.1 <= sums["engine_queue_seconds"] < whole - 0.1
            # one token at first, then four cycles of two: 1 of 2 drafts stands
            assert value("specdec_router_tokens_total") == 9
            decoding = whole - sums["time_to_first_token_seconds"]
            assert sums["time_per_output_token_seconds"] == pytest.approx(decoding / 8, rel=0.02)
            for part in ("request", "answer"):
                assert value("specdec_router_proxy_seconds_count", {"part": part}) >= 1

    run(main())


# ---- logs


def test_every_line_of_a_request_has_its_id_and_none_its_text(tmp_path, caplog, monkeypatch):
    seen: list[tuple[str, logging.LogRecord]] = []
    made = logging.getLogRecordFactory()

    def noting(*args, **kwargs):
        record = made(*args, **kwargs)
        seen.append((request_id.get(), record))
        return record

    logging.setLogRecordFactory(noting)
    secret = "the quick brown fox"

    async def main():
        async with routed(tmp_path, never) as router:
            for answer in (reply(document("stop", text=secret)), stream(delta(secret), ERROR), broken_stream):
                router.vllm.answer = answer
                await router.post(fields={"messages": [{"role": "user", "content": secret}], "user": secret})
            monkeypatch.setattr("specdec.router.proxy.read", lambda path, body, limits: 1 / 0)
            await router.post(fields={"prompt": secret})
            monkeypatch.undo()

    try:
        with caplog.at_level(logging.INFO):
            run(main())
    finally:
        logging.setLogRecordFactory(made)
    done = [(id, record) for id, record in seen if record.name == "specdec.router.observed"]
    assert [record.__dict__[FIELDS]["outcome"] for _, record in done] == ["stop", "error", "error", "error"]
    assert len({id for id, _ in done}) == 4
    for id, record in done:
        assert id.startswith("specdec-")
        assert record.getMessage().startswith("POST /v1/chat/completions: ")
    for line in caplog.text.splitlines():
        assert secret not in line


# ---- traces


def traced(exporter: InMemorySpanExporter, monkeypatch) -> Tracing:
    """Puts a tracer before the routers that `routed` makes."""
    tracing = Tracing("specdec-router", exporter)
    monkeypatch.setattr("edge_kit.create_app", lambda settings: create_app(settings, tracing))
    return tracing


def test_one_trace_from_the_client_to_the_cycles(tmp_path, monkeypatch):
    exporter = InMemorySpanExporter()
    traced(exporter, monkeypatch)

    async def main():
        async def answer(asked, send):
            router.fake.engine.open(f"chatcmpl-{asked.header('x-request-id')}", cycles=9)
            await router.fake.engine.run()
            await until(lambda: not router.pair._sessions)
            await stream(delta("a"), finish("stop"), DONE)(asked, send)

        async with routed(tmp_path, answer, policy="fixed", steps=2, trace_cycles=4) as router:
            headers = {"traceparent": f"00-{CALLER}-{CALLER_SPAN}-01"}
            await router.client.post(CHAT, json={"messages": []}, headers=headers)
            (asked,) = router.vllm.asked
            (sent_on,) = [value for name, value in asked.headers if name == "traceparent"]
            assert sent_on.split("-")[1] == CALLER
            assert sent_on.split("-")[2] != CALLER_SPAN
        assert {f"{span.context.trace_id:032x}" for span in exporter.get_finished_spans()} == {CALLER}
        spans = {span.context.span_id: span for span in exporter.get_finished_spans()}
        (root,) = [span for span in spans.values() if span.parent.span_id == int(CALLER_SPAN, 16)]
        assert f"{root.context.span_id:016x}" == sent_on.split("-")[2]
        assert root.name == "POST /v1/chat/completions"
        assert [e.name for e in root.events] == ["first token"]
        assert root.attributes["specdec.outcome"] == "stop"
        assert root.attributes["specdec.tokens"] == 19
        children = Counter(span.name for span in spans.values() if span.parent.span_id == root.context.span_id)
        assert children == {"admission": 1, "engine queue": 1, "cycle": 3}
        cycles = [span for span in spans.values() if span.name == "cycle"]
        assert [span.attributes["specdec.number"] for span in cycles] == [1, 5, 9]
        for cycle in cycles:
            assert (cycle.attributes["specdec.k"], cycle.attributes["specdec.accepted"]) == (2, 1)
            stages = [span for span in spans.values() if span.parent.span_id == cycle.context.span_id]
            assert [span.name for span in stages] == ["draft", "channel", "schedule", "verify", "output"]
            assert (stages[0].start_time, stages[-1].end_time) == (cycle.start_time, cycle.end_time)
        for span in spans.values():
            assert root.start_time <= span.start_time <= span.end_time
            if span.name != "cycle" and span.parent.span_id == root.context.span_id:
                assert span.end_time <= root.end_time

    run(main())


def test_a_trace_ends_with_its_stream_also_when_the_client_goes(tmp_path, monkeypatch):
    exporter = InMemorySpanExporter()
    tracing = traced(exporter, monkeypatch)

    async def main():
        async with routed(tmp_path, never) as router:
            async with sent(router, raw_post(CHAT)):
                await until(lambda: router.in_flight == 1 and router.vllm.asked)
            await until(lambda: router.at_rest)
            await asyncio.to_thread(tracing._provider.force_flush)
            (root,) = [span for span in exporter.get_finished_spans() if span.name.startswith("POST")]
            assert root.attributes["specdec.outcome"] == "abort"

    run(main())


def test_what_the_caller_does_not_sample_has_no_spans(tmp_path, monkeypatch):
    exporter = InMemorySpanExporter()
    traced(exporter, monkeypatch)

    async def main():
        async with routed(tmp_path, reply(document("stop"))) as router:
            headers = {"traceparent": f"00-{CALLER}-{CALLER_SPAN}-00"}
            await router.client.post(CHAT, json={}, headers=headers)
            assert router.vllm.asked[0].header("traceparent").endswith("-00")
        assert not exporter.get_finished_spans()

    run(main())


def test_without_a_collector_the_clients_trace_passes_untouched(tmp_path):
    async def main():
        async with routed(tmp_path, reply(document("stop"))) as router:
            given = f"00-{CALLER}-{CALLER_SPAN}-01"
            await router.client.post(CHAT, json={}, headers={"traceparent": given, "tracestate": "a=b"})
            assert (router.vllm.asked[0].header("traceparent"), router.vllm.asked[0].header("tracestate")) == (
                given,
                "a=b",
            )

    run(main())


def test_a_collector_that_cannot_be_reached_costs_no_time(tmp_path, monkeypatch):
    """Nobody answers under its address, not even with a refusal."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://192.0.2.1:4318")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    tracing = Tracing.from_environment("specdec-router")
    assert tracing is not None

    async def ask(router) -> float:
        started = time.monotonic()
        response = await router.client.post(CHAT, json={})
        assert response.status_code == 200
        return time.monotonic() - started

    async def main():
        monkeypatch.setattr("edge_kit.create_app", lambda settings: create_app(settings, tracing))
        async with routed(tmp_path, reply(document("stop"))) as router:
            await ask(router)
            await asyncio.sleep(0.1)  # the exporter waits by now
            assert sorted([await ask(router) for _ in range(50)])[25] < 0.05
            stopping = time.monotonic()
        assert time.monotonic() - stopping < 5

    run(main())


def test_a_scrape_under_load_is_quick(tmp_path):
    async def main():
        async with routed(tmp_path, stream(*[delta("a")] * 20, finish("stop"), DONE)) as router:

            async def load() -> None:
                async with httpx.AsyncClient(base_url=router.url, timeout=30, trust_env=False) as client:
                    for _ in range(4):
                        await client.post(CHAT, json={})

            listener = listen("127.0.0.1", 0, "admin")
            loads = [asyncio.create_task(load()) for _ in range(8)]
            times = []
            async with serving(router.app.state.admin, listener), httpx.AsyncClient(trust_env=False) as client:
                for _ in range(10):
                    await asyncio.sleep(0.02)
                    started = time.monotonic()
                    assert (await client.get(f"{url_of(listener)}/metrics")).status_code == 200
                    times.append(time.monotonic() - started)
            await asyncio.gather(*loads)
            assert sorted(times)[5] < 0.1

    run(main())


def test_what_keeps_a_connection_open_is_no_first_token(tmp_path):
    async def answer(asked, send):
        await start(send, 200, ("content-type", "text/event-stream"))
        await chunk(send, b": wait\n\n")
        await asyncio.sleep(0.1)
        await chunk(send, delta("a") + finish("stop") + DONE, more=False)

    async def main():
        async with routed(tmp_path, answer) as router:
            await router.post()
            value = router.pair._metrics.registry.get_sample_value
            assert value("specdec_router_time_to_first_token_seconds_sum") >= 0.1

    run(main())


def test_a_session_that_is_opened_again_is_no_other(tmp_path):
    """As after the loop's stream broke: its tokens are still one session's."""
    metrics = RouterMetrics()
    scope = {"path": CHAT, "method": "POST", "headers": []}
    seen = Observation(scope, metrics, None, 16)
    seen.begun({"status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    attempt = partial(copy_context().run, seen.attempt)  # it says which request is worked on
    first = attempt()
    assert first == seen.id
    assert attempt() not in (first, "")  # a retry, on another pair
    seen.opened(first, again=False)  # of the attempt before: it says nothing any more
    seen.opened(seen.id, again=False)
    seen.part(delta("a"), more=True)
    seen.closed(seen.id)
    seen.opened(seen.id, again=True)
    for _ in range(5):
        seen.committed(seen.id, pb.Verdict(committed=1), pb.VerdictFrame(), 1)
    time.sleep(0.02)
    seen.part(finish("stop"), more=False)
    seen.ended(failed=False)
    assert not metrics.registry.get_sample_value("specdec_router_time_per_output_token_seconds_count")
    seen.closed(seen.id)
    value = metrics.registry.get_sample_value("specdec_router_time_per_output_token_seconds_sum")
    assert 0.02 / 4 <= value < 0.04 / 4


@pytest.mark.parametrize("streamed", [False, True])
def test_only_the_attempt_that_is_answered_counts(streamed):
    """Two pairs decode for one request: the first for two tokens, then it fails; its session may even go on."""
    metrics = RouterMetrics()
    seen = Observation({"path": CHAT, "method": "POST", "headers": []}, metrics, None, 16)
    value = metrics.registry.get_sample_value
    attempt = partial(copy_context().run, seen.attempt)

    def tokens() -> float:
        return value("specdec_router_tokens_total")

    first = attempt()
    seen.opened(first, again=False)
    seen.committed(first, pb.Verdict(committed=2), pb.VerdictFrame(), 1)
    assert tokens() == 0  # they may never be delivered
    time.sleep(0.05)
    second = attempt()
    seen.committed(first, pb.Verdict(committed=7), pb.VerdictFrame(), 1)
    time.sleep(0.01)
    seen.opened(second, again=False)
    assert value("specdec_router_engine_queue_seconds_count") == 2
    assert 0.01 <= value("specdec_router_engine_queue_seconds_sum") < 0.05  # from when that pair was asked
    seen.committed(second, pb.Verdict(committed=3), pb.VerdictFrame(), 1)
    kind = b"text/event-stream" if streamed else b"application/json"
    seen.begun({"status": 200, "headers": [(b"content-type", kind)]})
    assert tokens() == 3
    seen.committed(second, pb.Verdict(committed=5), pb.VerdictFrame(), 2)
    seen.closed(first)
    seen.part(DONE if streamed else b"{}", more=False)
    seen.ended(failed=False)
    assert not seen._settled  # the second's session is open
    seen.committed(second, pb.Verdict(committed=1), pb.VerdictFrame(), 3)
    seen.closed(second)
    assert seen._settled
    assert (tokens(), seen._tokens, seen._sessions) == (9, 9, 1)
    assert value("specdec_router_proxy_seconds_count", {"part": "request"}) == 1


def test_what_was_decoded_for_a_request_that_failed_before_its_answer_is_counted():
    seen = Observation({"path": CHAT, "method": "POST", "headers": []}, RouterMetrics(), None, 16)
    seen.committed(seen.id, pb.Verdict(committed=4), pb.VerdictFrame(), 1)
    seen.ended(failed=True)
    assert seen._metrics.registry.get_sample_value("specdec_router_tokens_total") == 4


def observed(tracing: Tracing | None = None) -> Observation:
    """A stream's, whose head has been sent."""
    scope = {"path": CHAT, "method": "POST", "headers": []}
    seen = Observation(scope, RouterMetrics(), tracing.tracer if tracing else None, 16)
    seen.begun({"status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    return seen


@pytest.mark.parametrize(("event", "outcome"), [(finish("tool_calls"), "tool_calls"), (ERROR, "error")])
def test_what_says_how_a_stream_ended_may_be_cut_anywhere(event, outcome):
    for cut in range(len(event)):
        seen = observed()
        for part in (delta("a") + event[:cut], event[cut:], DONE):
            seen.part(part, more=part != DONE)
        assert seen._outcome(failed=False) == outcome


def test_an_answer_that_was_not_ended_is_an_error():
    seen = observed()
    seen.part(delta("a") + finish("stop") + DONE, more=True)
    assert seen._outcome(failed=False) == "error"


def test_a_client_that_went_has_no_whole_answer_though_all_was_sent():
    seen = observed()
    seen.part(delta("a"), more=True)
    seen.disconnected()
    seen.part(finish("stop") + DONE, more=False)
    assert seen._outcome(failed=False) == "abort"


def test_a_cycles_spans_have_the_verdicts_times():
    exporter = InMemorySpanExporter()
    tracing = Tracing("specdec-router", exporter)
    seen = observed(tracing)
    frame = pb.VerdictFrame(draft_us=1000, drafting_us=600, schedule_us=200, verify_us=30_000, output_us=800)
    before_ns = time.time_ns()
    seen.committed(
        seen.id, pb.Verdict(kind=pb.VERDICT_KIND_CYCLE, steps=4, proposed=4, accepted=3, committed=4), frame, 1
    )
    after_ns = time.time_ns()
    tracing.shutdown()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert before_ns <= spans["cycle"].end_time <= after_ns
    lengths_us = {name: (span.end_time - span.start_time) // 1000 for name, span in spans.items()}
    stages = {"draft": 600, "channel": 400, "schedule": 200, "verify": 30_000, "output": 800}
    assert lengths_us == {**stages, "cycle": 32_000}
    assert spans["draft"].end_time == spans["channel"].start_time
    assert spans["channel"].end_time == spans["schedule"].start_time
    assert spans["output"].end_time == spans["cycle"].end_time
