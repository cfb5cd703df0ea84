"""router/relay.py and the drain: clients that read slowly, not at all, or go; streams that are silent or cut off."""

import asyncio
import contextlib
import json
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import httpx
import pytest

from edge_kit import (
    CHAT,
    DONE,
    FakeVllm,
    Router,
    chunk,
    delta,
    error_of,
    never,
    raw_post,
    reply,
    routed,
    run,
    sent,
    start,
    stream,
    url_of,
)
from fake_engine import fake_pair, until
from specdec.router.errors import ApiError
from specdec.router.pairs import Request
from specdec.router.relay import Relayed, Watch
from specdec.router.service import allow_open_files, limit_unread
from specdec.serve import listen, serving
from specdec.stack import free_ports
from specdec.telemetry import RouterMetrics

ENDLESS = b'{"messages": [], "stream": true}'


def metric(router: Router, name: str) -> float:
    return router.pair._metrics.registry.get_sample_value(f"specdec_router_{name}") or 0


async def no_reader(router: Router) -> socket.socket:
    """A client that sends a request and reads nothing."""
    loop = asyncio.get_running_loop()
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    one.setblocking(False)
    host, port = router.url.removeprefix("http://").split(":")
    await loop.sock_connect(one, (host, int(port)))
    await loop.sock_sendall(one, raw_post(CHAT, ENDLESS))
    return one


async def flood(asked: Any, send: Any) -> None:
    await start(send, 200, ("content-type", "text/event-stream"))
    while True:
        await chunk(send, delta("x" * 8000))
        await asyncio.sleep(0.001)


def test_a_client_that_does_not_read_pauses_its_session_and_going_on_resumes_it(tmp_path):
    async def main():
        sessions: list[Any] = []

        async def answer(asked: Any, send: Any) -> None:
            sessions.append(router.fake.engine.open(f"chatcmpl-{asked.header('x-request-id')}"))
            await flood(asked, send)

        async with routed(tmp_path, answer, lease_ms=400) as router:
            ran = router.fake.engine.ran
            client = await no_reader(router)
            await until(lambda: sessions)
            stepping = asyncio.create_task(router.fake.engine.run(0.002))
            await until(lambda: metric(router, "paused_requests") == 1)
            await asyncio.sleep(0.1)  # the cycles of the window are over
            (session,) = sessions
            before = len(ran[session.id])
            await asyncio.sleep(1.2)  # three leases: without the holding orders it would decode plainly
            assert len(ran[session.id]) - before <= 2
            loop = asyncio.get_running_loop()
            while metric(router, "paused_requests"):
                await loop.sock_recv(client, 1 << 16)
            before = len(ran[session.id])

            async def read_on() -> None:
                while True:
                    await loop.sock_recv(client, 1 << 16)
                    await asyncio.sleep(0.001)  # what has come already is no reason for it to wait

            reading = asyncio.create_task(read_on())
            await until(lambda: len(ran[session.id]) > before + 20)
            assert ran[session.id][-1][1] == 3  # under the router's orders again
            reading.cancel()
            client.close()
            await until(lambda: router.at_rest)
            router.fake.engine.close(session)
            await stepping
            assert metric(router, "paused_requests") == 0

    run(main)


def test_a_client_that_never_reads_is_given_up_and_memory_stays_flat(tmp_path):
    async def main():
        sent_bytes = 0

        async def counted(asked: Any, send: Any) -> None:
            nonlocal sent_bytes
            await start(send, 200, ("content-type", "text/event-stream"))
            while True:
                await chunk(send, delta("x" * 10_000))
                sent_bytes += 10_000
                await asyncio.sleep(0)

        async with routed(tmp_path, counted, write_timeout_s=1.5) as router:
            started = time.monotonic()
            clients = [await no_reader(router) for _ in range(5)]
            await until(lambda: metric(router, "paused_requests") == 5)
            held = sent_bytes
            await asyncio.sleep(0.4)
            assert sent_bytes == held
            assert held < 5 * 12_000_000  # what the two kernels hold of each stream, not what the engine could send
            await until(lambda: router.at_rest and router.vllm.cancelled == 5, 5)
            assert 1.4 < time.monotonic() - started < 4
            assert metric(router, "paused_requests") == 0
            for client in clients:
                client.close()

    run(main)


def test_the_kernel_keeps_little_for_a_client_that_does_not_read():
    """Else megabytes of an answer lie there, and nobody knows that the client does not read."""

    async def main():
        sent_bytes = 0

        async def endless(asked: Any, send: Any) -> None:
            nonlocal sent_bytes
            await start(send, 200, ("content-type", "text/plain"))
            while True:
                await chunk(send, b"x" * 1000)
                sent_bytes += 1000
                await asyncio.sleep(0)

        for limited, fits in ((False, 10_000_000), (True, 400_000)):
            sent_bytes = 0
            listener = listen("127.0.0.1", 0, "test")
            if limited:
                limit_unread(listener, 60)
            async with serving(FakeVllm(endless), listener, 1):
                one = socket.socket()
                one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                one.setblocking(False)
                loop = asyncio.get_running_loop()
                await loop.sock_connect(one, listener.getsockname())
                await loop.sock_sendall(one, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
                before = -1
                while sent_bytes != before:
                    before = sent_bytes
                    await asyncio.sleep(0.1)
                assert 0 < sent_bytes < fits
                one.close()

    run(main)


def test_a_process_may_open_as_many_files_as_the_system_lets_it():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, limits[1]), limits[1]))
        allow_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (limits[1], limits[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


# ---- engines that say too much


@pytest.mark.parametrize("line", [b"x" * 4000, b"data: {}\n" * 400], ids=["one-line", "lines"])
def test_an_event_without_an_end_is_given_up(tmp_path, monkeypatch, line):
    monkeypatch.setattr("specdec.router.relay._EVENT_BYTES", 1 << 18)
    taken = 0

    async def endless(asked: Any, send: Any) -> None:
        nonlocal taken
        await start(send, 200, ("content-type", "text/event-stream"))
        await chunk(send, delta("a"))
        while True:
            await chunk(send, line)
            taken += len(line)
            await asyncio.sleep(0)

    async def main():
        async with routed(tmp_path, endless) as router:
            response = await router.post(fields={"messages": [], "stream": True})
            first, error, rest = response.text.split("\n\n")
            assert first + "\n\n" == delta("a").decode()
            assert json.loads(error.removeprefix("data: "))["error"]["code"] == "engine_unavailable"
            assert rest == ""
            assert taken < 1 << 22  # the sockets' buffers, too
            await until(lambda: router.at_rest and router.vllm.cancelled)

    run(main)


def test_a_document_too_large_to_be_held_passes_as_it_comes(tmp_path, monkeypatch):
    monkeypatch.setattr("specdec.router.upstream._WHOLE_BYTES", 1 << 18)
    document = b'{"choices":[],"usage":{"completion_tokens":1},"x":"%s"}' % (b"y" * (1 << 20))

    async def main():
        async with routed(tmp_path, reply(document)) as router:
            assert (await router.post()).content == document
            await until(lambda: router.at_rest)
            router.vllm.answer = reply(document[: 1 << 17] + b'"}')  # one that is not gets its counts
            assert b'"accepted_prediction_tokens":0' in (await router.post()).content

    run(main)


# ---- silence


def test_a_silent_stream_gets_comments_between_events_only(tmp_path, monkeypatch):
    monkeypatch.setattr("specdec.router.proxy._FIRST_S", 0.05)

    async def answer(asked: Any, send: Any) -> None:
        await start(send, 200, ("content-type", "text/event-stream"))
        await asyncio.sleep(0.35)
        await chunk(send, delta("a"))
        await chunk(send, b'data: {"ha')
        await asyncio.sleep(0.35)
        await chunk(send, b'lf": 1}\n\n')
        await chunk(send, DONE, more=False)

    async def main():
        async with routed(tmp_path, answer, keepalive_s=0.1) as router:
            response = await router.client.post(CHAT, content=ENDLESS)
            events = response.content.split(b"\n\n")
            assert events[0] == events[1] == b": keep-alive"
            assert [event for event in events if event != b": keep-alive"] == [
                delta("a").strip(),
                b'data: {"half": 1}',
                b"data: [DONE]",
                b"",
            ]
            response = await router.client.post("/v1/responses", json={})  # passed on as it comes
            assert b'data: {"half": 1}\n\n' in response.content

    run(main)


# ---- going while queued


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_goes_while_it_waits_for_a_place_leaves_the_queue(tmp_path, streamed):
    async def main():
        async with routed(tmp_path, never, max_sessions=1) as router:
            body = b'{"messages": [], "stream": %s}' % (b"true" if streamed else b"false")
            async with sent(router, raw_post(CHAT, body)) as (_, first):
                await until(lambda: router.vllm.asked)
                async with sent(router, raw_post(CHAT, body)) as (_, second):
                    await until(lambda: metric(router, "waiting_sessions") == 1)
                    second.transport.abort()
                    gone_at = time.monotonic()
                    await until(lambda: metric(router, "waiting_sessions") == 0)
                    assert time.monotonic() - gone_at < 1
                assert len(router.vllm.asked) == 1
                first.close()  # a FIN, where the other was a reset
                await until(lambda: router.at_rest and router.vllm.cancelled == 1)
            assert metric(router, "admitted_sessions") == 0

    run(main)


# ---- the end


async def five(asked: Any, send: Any) -> None:
    await start(send, 200, ("content-type", "text/event-stream"))
    for n in range(5):
        await chunk(send, delta(str(n)))
        await asyncio.sleep(0.06)
    await chunk(send, DONE, more=False)


def test_while_it_drains_running_answers_end_and_new_ones_are_refused(tmp_path):
    async def main():
        async with routed(tmp_path, five) as router:
            asking = asyncio.create_task(router.client.post(CHAT, content=ENDLESS))
            await until(lambda: router.pair.load)
            started = time.monotonic()
            draining = asyncio.create_task(router.app.state.router.drain(5))
            await asyncio.sleep(0.02)
            ready = await router.client.get("/readyz")
            assert (ready.status_code, ready.json()["reasons"]) == (503, ["the router is ending"])
            assert (await router.client.get("/livez")).status_code == 200
            response = await router.client.post(CHAT, content=ENDLESS)
            assert (response.status_code, error_of(response)["code"]) == (503, "draining")
            assert response.headers["retry-after"] == "2"
            assert (await asking).content.endswith(delta("4") + DONE)
            await draining
            assert time.monotonic() - started < 2

    run(main)


GET_LIVE = b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"


def test_while_it_drains_no_connection_is_kept_for_a_next_request(tmp_path):
    large = raw_post(CHAT, b'{"messages": ["%s"]}' % (b"a" * 5_000_000))

    async def main():
        drains = asyncio.Event()

        async def answer(asked: Any, send: Any) -> None:
            if len(router.vllm.asked) == 2:
                await drains.wait()
            await five(asked, send)

        async with routed(tmp_path, answer) as router, contextlib.AsyncExitStack() as stack:

            async def connect(first: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
                return await stack.enter_async_context(sent(router, first))

            streaming, _ = await connect(raw_post(CHAT, ENDLESS))
            assert b"connection: close" not in await streaming.readuntil(b"\r\n\r\n")
            idle, _ = await connect(GET_LIVE)
            half, half_end = await connect(GET_LIVE)
            unused, unused_end = await connect(b"")
            for reader in (idle, half):
                await reader.readuntil(b"}")
            half_end.write(GET_LIVE[:9])
            beginning, _ = await connect(raw_post(CHAT, ENDLESS))
            await until(lambda: len(router.vllm.asked) == 2)
            draining = asyncio.create_task(router.app.state.router.drain(5))
            assert await asyncio.wait_for(idle.read(), 0.2) == b""
            drains.set()
            half_end.write(GET_LIVE[9:])
            unused_end.write(large)
            uploading, uploading_end = await connect(large[:1000])
            for reader, status in ((half, b" 200 "), (unused, b" 503 "), (uploading, b" 503 ")):
                answer = await asyncio.wait_for(reader.read(), 1)
                assert status in answer.partition(b"\r\n")[0]
                assert b"\r\nconnection: close\r\n" in answer
            assert not draining.done()
            uploading_end.write(large[1000:])  # the answer was not lost to a reset, and the rest is passed over
            await uploading_end.drain()
            assert (await streaming.read()).endswith(DONE + b"\r\n0\r\n\r\n")
            begun = await beginning.read()
            assert b"\r\nconnection: close\r\n" in begun.partition(b"\r\n\r\n")[0] + b"\r\n"
            assert begun.endswith(DONE + b"\r\n0\r\n\r\n")
            await draining
            await until(lambda: not router.app.state.router.connections._open)

    run(main)


def test_what_runs_past_the_grace_is_cut_off_with_an_error(tmp_path):
    async def endless(asked: Any, send: Any) -> None:
        await start(send, 200, ("content-type", "text/event-stream"))
        await chunk(send, delta("a"))
        await never(asked, send)

    async def main():
        async with routed(tmp_path, endless) as router:
            streaming = asyncio.create_task(router.client.post(CHAT, content=ENDLESS))
            await until(lambda: router.app.state.router.proxy.relays)
            await router.app.state.router.drain(0.2)
            content = (await streaming).content
            assert content.startswith(delta("a") + b"data: ")
            assert json.loads(content.split(b"\n\n")[1][6:])["error"]["code"] == "draining"
            assert router.at_rest

    run(main)


def test_what_has_not_begun_by_then_gets_503(tmp_path):
    async def main():
        async with routed(tmp_path, never) as router:
            asking = asyncio.create_task(router.client.post(CHAT, json={"messages": []}))
            await until(lambda: router.pair.load)
            await router.app.state.router.drain(0.1)
            response = await asking
            assert (response.status_code, error_of(response)["code"]) == (503, "draining")

    run(main)


def test_what_is_still_uploading_can_be_cut_off(tmp_path):
    async def main():
        async with routed(tmp_path, never) as router:
            async with sent(router, raw_post(CHAT, ENDLESS)[:-5]) as (reader, _):
                await until(lambda: router.app.state.router.proxy.running)
                started = time.monotonic()
                await router.app.state.router.drain(0.1)
                assert b" 503 " in await asyncio.wait_for(reader.readline(), 5)
                assert time.monotonic() - started < 1
            assert router.at_rest
            assert router.vllm.asked == []

    run(main)


@pytest.mark.parametrize("half", [b"", b'event: x\ndata: {"ha'])
def test_the_error_of_what_is_cut_off_is_an_event_of_its_own(tmp_path, half):
    whole = b"event: a\ndata: {}\n\n"

    async def endless(asked: Any, send: Any) -> None:
        await start(send, 200, ("content-type", "text/event-stream"))
        await chunk(send, whole + half)
        await never(asked, send)

    async def main():
        async with routed(tmp_path, endless) as router:
            streaming = asyncio.create_task(router.client.post("/v1/responses", content=ENDLESS))
            await until(lambda: router.app.state.router.proxy.relays)
            await router.app.state.router.drain(0.2)
            content = (await streaming).content
            assert content.startswith(whole + half)
            assert json.loads(content.rstrip().rpartition(b"\n\n")[2][6:])["error"]["code"] == "draining"
            assert half or content.count(b"\n\n") == 2

    run(main)


def test_a_comment_that_still_waits_to_be_written_is_not_written_after_the_end():
    reads = asyncio.Event()
    written: list[bytes] = []

    async def send(message: Any) -> None:
        """Like uvicorn's, it waits before it writes, and not after; here for comments only."""
        body = message.get("body", b"")
        if body.startswith(b":"):
            await reads.wait()
        written.append(body)

    async def parts():
        yield delta("a")
        await asyncio.Event().wait()

    async def main():
        watch, held = Watch(), contextlib.AsyncExitStack()
        relay = Relayed(parts(), 200, [], stream=True, request=Request("r"), watch=watch, held=held)
        relay.track(set(), RouterMetrics())
        answering = asyncio.create_task(relay({}, never, send))
        await until(lambda: delta("a") in written)
        relay.tick(time.monotonic() + 10, 1, 60)
        await asyncio.sleep(0.01)
        watch.cut(ApiError("draining", "the router is ending"))
        await answering
        reads.set()
        await asyncio.sleep(0.01)
        assert written[-2].startswith(b'data: {"error"')
        assert not any(part.startswith(b":") for part in written)

    run(main)


SECRETS = ("a-secret-prompt", "a-secret-key", "a-secret-header", "a-secret-query", "a-secret-id")


def test_a_routers_process_on_term_finishes_refuses_and_exits_0_and_its_log_has_no_secrets(tmp_path):
    port, admin_port = free_ports(2)
    url, admin = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}"

    async def main():
        vllm, listener = FakeVllm(five), listen("127.0.0.1", 0, "vLLM")
        async with fake_pair(tmp_path) as fake, serving(vllm, listener, 1):
            fake.description.http_url = url_of(listener)
            command = [sys.executable, "-m", "specdec", "router", "--port", str(port), "--admin-port", str(admin_port)]
            command += ["--pairs", fake.address, "--drain-s", "5"]
            process = subprocess.Popen(command, env=os.environ, stderr=subprocess.PIPE, text=True)  # noqa: ASYNC220
            try:
                async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=10) as client:
                    until_s = time.monotonic() + 20
                    ready = None
                    while (ready is None or ready.status_code != 200) and time.monotonic() < until_s:
                        await asyncio.sleep(0.05)
                        with contextlib.suppress(httpx.ConnectError):
                            ready = await client.get(admin + "/readyz")
                    headers = {"authorization": "Bearer a-secret-key", "x-own": "a-secret-header"}
                    headers["x-request-id"] = "a-secret-id"
                    body = {"messages": [{"role": "user", "content": "a-secret-prompt"}], "stream": True}
                    for vllm.answer in (stream(delta("a"), DONE), reply(b"{", 500), reply(b"a-secret-prompt", 400)):
                        await client.post(CHAT + "?a-secret-query=1", json=body, headers=headers)
                    await client.post(CHAT, json={**body, "n": "a-secret-prompt"}, headers=headers)
                    await client.post(CHAT, content=b'{"a-secret-prompt', headers=headers)
                    assert "specdec_router_requests_total" in (await client.get(admin + "/metrics")).text
                    vllm.answer = five
                    asking = asyncio.create_task(client.post(CHAT, json=body, headers=headers))
                    await until(lambda: len(vllm.asked) == 4)
                    process.send_signal(signal.SIGTERM)
                    await asyncio.sleep(0.1)
                    assert (await client.get(admin + "/readyz")).status_code == 503
                    assert (await client.post(CHAT, json=body)).status_code == 503
                    assert (await asking).content.endswith(DONE)
                assert await asyncio.to_thread(process.wait, 10) == 0
            finally:
                process.kill()
            log = process.stderr.read()
            assert "draining" in log
            for secret in SECRETS:
                assert secret not in log

    run(main)


def test_an_unexpected_faults_log_has_no_secrets_either(tmp_path, monkeypatch, caplog):
    def broken(*_: Any) -> None:
        raise LookupError("a bug")

    monkeypatch.setattr("specdec.router.proxy.read", broken)

    async def main():
        async with routed(tmp_path, reply()) as router:
            headers = {"authorization": "Bearer a-secret-key", "x-own": "a-secret-header"}
            response = await router.client.post(CHAT + "?a-secret-query", content=b"a-secret-prompt", headers=headers)
            assert response.status_code == 500

    with caplog.at_level(logging.INFO):
        run(main)
    assert "a bug" in caplog.text
    log = "".join(record.getMessage() for record in caplog.records if record.name != "httpx")  # the test's own client
    assert not [secret for secret in SECRETS if secret in log]
