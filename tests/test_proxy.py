"""The router on a real socket, in front of a FakeVllm on another, with a FakePair's real gRPC beside it."""

import asyncio
import contextlib
import gzip
import json
import logging
import socket
import sys
import time
from types import ModuleType
from typing import Any

import httpx
import openai
import pytest

from edge_kit import (
    CHAT,
    COMPLETIONS,
    DONE,
    OURS,
    Asked,
    FakeVllm,
    Router,
    Send,
    chunk,
    delta,
    error_of,
    event,
    never,
    raw_post,
    refused,
    reply,
    routed,
    rude_engine,
    run,
    sent,
    start,
    stream,
    url_of,
)
from fake_engine import fake_pair, until
from specdec.router import proxy
from specdec.router.app import create_app
from specdec.router.protocol import Protocol
from specdec.router.proxy import Proxy
from specdec.router.settings import RouterSettings
from specdec.router.steps import FixedSteps
from specdec.serve import listen, serving


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """One router for the tests of this file."""
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()
        router = runner.run(stack.enter_async_context(routed(tmp_path_factory.mktemp("router"), refused)))
        router.runner = runner
        yield router
        runner.run(stack.aclose())


@pytest.fixture
def router(shared):
    """The router, as if it had just started."""
    shared.reset()
    return shared


# ---- what passes


def test_requests_and_answers_pass_unchanged(router):
    body, answer = bytes(range(256)) * 4, bytes(reversed(range(256))) * 300

    async def main():
        headers = [("content-type", "application/x-own"), ("x-one", "1"), ("cache-control", "max-age=3")]
        async with router.answering(reply(answer, 207, *headers)):
            for method in ("POST", "PUT", "PATCH", "DELETE"):
                response = await router.client.request(
                    method,
                    "/v1/own/path?a=1&b=%2F&a=2&empty=",
                    content=body,
                    headers={"x-two": "2", "authorization": "k"},
                )
                assert (response.status_code, response.content) == (207, answer)
                assert [response.headers[name] for name, _ in headers] == [value for _, value in headers]
                asked = router.vllm.asked[-1]
                assert (asked.method, asked.target, asked.body) == (method, "/v1/own/path?a=1&b=%2F&a=2&empty=", body)
                assert (asked.header("x-two"), asked.header("authorization")) == ("2", "k")
                assert asked.header("content-length") == "1024"
            await router.client.get("/v1/models")
            assert (router.vllm.asked[-1].method, router.vllm.asked[-1].body) == ("GET", b"")
            assert router.vllm.asked[-1].header("host") == router.vllm.url.removeprefix("http://")

    router.run(main)


def test_the_path_passes_as_it_was_written(router):
    async def main():
        async with router.answering(reply()):
            for target in ("/v1/f/a%2Fb%20c%3Fd", "/v1/x?y=a%20b+c", "/v1/%E2%82%AC", "/v1/a//b/", "/v1/"):
                async with sent(router, f"GET {target} HTTP/1.1\r\nhost: x\r\n\r\n".encode()) as (reader, _):
                    assert b" 200 " in await reader.readline()
                assert router.vllm.asked[-1].target == target

    router.run(main)


def test_the_host_header_cannot_change_the_path(router):
    async def main():
        async with router.answering(reply()):
            async with sent(router, b"GET /v1/models HTTP/1.1\r\nhost: x/admin?\r\n\r\n") as (reader, _):
                assert b" 200 " in await reader.readline()
            assert router.vllm.asked[-1].target == "/v1/models"

    router.run(main)


def test_header_values_pass_byte_by_byte_and_more_than_once(router):
    async def main():
        cookies = [
            ("set-cookie", "a=1"),
            ("set-cookie", "b=2, c"),
            ("x-name", "Zo\xeb \xc3\xab"),
            ("content-type", "a/b"),
        ]
        async with router.answering(reply(b"x", 200, *cookies)):
            names = b"x-name: Zo\xc3\xab\r\nx-old: Zo\xeb\r\n"  # only UTF-8 passes as it is
            request = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx-a: 1\r\nx-a: 2\r\n" + names + b"\r\n"
            async with sent(router, request) as (reader, _):
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
            asked = router.vllm.asked[-1]
            assert [value for name, value in asked.headers if name == "x-a"] == ["1", "2"]
            assert asked.header("x-name") == "Zo\xc3\xab"
            assert asked.header("x-old") == "Zo\xc3\xab"
            assert b"\r\nset-cookie: a=1\r\n" in head
            assert b"\r\nset-cookie: b=2, c\r\n" in head
            assert b"\r\nx-name: zo\xeb \xc3\xab\r\n" in head

    router.run(main)


def test_hop_by_hop_headers_are_dropped_both_ways(router):
    ours = [("keep-alive", "timeout=9"), ("proxy-authenticate", "x"), ("upgrade", "h9"), ("trailer", "x-t")]
    named = [("connection", "close, X-Foo"), ("x-foo", "1"), ("x-bar", "2")]
    hops = {"te": "trailers", "proxy-authorization": "secret", "expect": "100-continue"}

    async def main():
        async with router.answering(reply(b"x", 200, ("content-type", "a/b"), *ours, *named)):
            request = {**hops, "connection": "x-foo, keep-alive"}
            response = await router.client.get("/v1/models", headers={**request, "x-foo": "1", "x-bar": "2"})
            asked = dict(router.vllm.asked[-1].headers)
            for name in ("te", "proxy-authorization", "expect", "x-foo"):
                assert name not in asked
            assert asked["x-bar"] == "2"
            assert "x-foo" not in asked.get("connection", "")
            for name in ("keep-alive", "proxy-authenticate", "upgrade", "trailer", "x-foo"):
                assert name not in response.headers
            assert response.headers["x-bar"] == "2"
            assert len(response.headers.get_list("date")) == 1

    router.run(main)


def test_an_encoded_answer_passes_encoded(router):
    packed = gzip.compress(b'{"data":[]}')

    async def main():
        headers = [("content-type", "application/json"), ("content-encoding", "gzip")]
        async with router.answering(reply(packed, 200, *headers)):
            async with router.client.stream("GET", "/v1/models", headers={"accept-encoding": "gzip"}) as response:
                assert b"".join([part async for part in response.aiter_raw()]) == packed
                assert response.headers["content-encoding"] == "gzip"
            assert router.vllm.asked[-1].header("accept-encoding") == "identity"  # usage must be readable

    router.run(main)


@pytest.mark.parametrize("path", [CHAT, "/v1/unknown"])
@pytest.mark.parametrize(("status", "answered"), [(400, 400), (404, 404), (422, 400), (429, 429), (500, 500)])
def test_errors_of_the_engine_get_one_form_and_keep_what_they_say(router, path, status, answered):
    body = b'{"error": {"message": "what \xe2\x82\xac", "param": "x"}, "usage": {"completion_tokens": 3}}'

    async def main():
        headers = [("content-type", "application/json"), ("retry-after", "7")]
        async with router.answering(reply(body, status, *headers)):
            response = await router.post(path)
            assert response.status_code == answered
            error = error_of(response)
            assert (error["message"], error["param"]) == ("what \u20ac", "x")
            assert response.headers.get("retry-after") == ("7" if status == 429 else None)
            assert OURS.fullmatch(response.headers["x-request-id"])
            route = path if path == CHAT else "other"
            assert router.counted("specdec_router_requests_total", route=route, status=str(answered)) == 1

    router.run(main)


@pytest.mark.parametrize(
    "answer",
    [
        reply(b'{"detail":"Not Found"}', 404),
        reply(b"<html>bad gateway</html>", 502, ("content-type", "text/html")),
        reply(b"", 500, ("content-type", "text/plain")),
        reply(b"", 307, ("location", "http://inside:8100/v1/models")),
        reply(b"x" * 1_000_000, 400, ("content-type", "text/plain")),
    ],
    ids=["detail", "html", "empty", "redirect", "large"],
)
def test_whatever_the_engine_says_an_error_is_small_json(router, answer):
    async def main():
        async with router.answering(answer):
            response = await router.post("/v1/models")
            error_of(response)
            assert 400 <= response.status_code < 600
            assert len(response.content) <= 4096
            assert "location" not in response.headers

    router.run(main)


def test_head_options_and_empty_answers(router):
    async def main():
        async with router.answering(reply(b"", 204, ("allow", "GET, POST"))):
            response = await router.client.options("/v1/models")
            assert (response.status_code, response.headers["allow"], response.content) == (204, "GET, POST", b"")
            router.vllm.answer = reply(b"body", 200, ("content-type", "a/b"), ("x-n", "4"))
            response = await router.client.head("/v1/models")
            assert (response.status_code, response.headers["x-n"], response.content) == (200, "4", b"")
            assert [asked.method for asked in router.vllm.asked] == ["OPTIONS", "HEAD"]
            response = await router.client.get("/v1/models")  # the connection is still in step
            assert response.content == b"body"

    router.run(main)


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n",
        b"HTTP/1.1 099 Odd\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx-a: b\x01c\r\ncontent-length: 2\r\n\r\n{}",
    ],
    ids=["switching", "no-status", "control-character"],
)
def test_an_answer_that_cannot_be_passed_on_is_503(router, said):
    async def main():
        async with router.answering(refused), rude_engine(said) as url:
            router.described(http_url=url)
            response = await router.post()
            assert (response.status_code, error_of(response)["code"]) == (503, "engine_unavailable")

    router.run(main)


@pytest.mark.parametrize("after", ["\xb2", "9" * 5000, "soon", "-1"])
def test_an_odd_retry_after_of_the_engine_is_ours_instead(router, after):
    async def main():
        async with router.answering(reply(b"{}", 429, ("retry-after", after))):
            response = await router.post()
            assert (response.status_code, response.headers["retry-after"]) == (429, "2")

    router.run(main)


# ---- oddly framed requests


def test_an_http_1_0_client_gets_no_chunks_and_the_end_by_the_connections_end(router):
    async def main():
        async with router.answering(stream(delta("a"), delta("b"), DONE)):
            request = raw_post(CHAT, b'{"messages":[],"stream":true}').replace(b"HTTP/1.1", b"HTTP/1.0")
            async with sent(router, request) as (reader, _):
                head, _, body = (await asyncio.wait_for(reader.read(), 5)).partition(b"\r\n\r\n")
            assert b"transfer-encoding" not in head
            assert b"connection: close" in head
            assert body == delta("a") + delta("b") + DONE
            async with sent(router, b"GET /nowhere HTTP/1.0\r\n\r\n") as (reader, _):
                head, _, body = (await asyncio.wait_for(reader.read(), 5)).partition(b"\r\n\r\n")
            assert b"content-length: %d" % len(body) in head
            assert json.loads(body)["error"]["code"] == "not_found"

    router.run(main)


def test_a_client_that_would_rather_speak_http_2_keeps_its_body(router):
    """As Java's, which asks so with every first request."""
    asks = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\ncontent-length"
    body = b'{"messages":[],"user":"Upgrade: me"}'

    async def main():
        async with router.answering(reply()):
            request = raw_post(CHAT, body).replace(b"content-length", asks)
            async with sent(router, request) as (reader, writer):
                assert b" 200 " in await asyncio.wait_for(reader.readline(), 5)
                await reader.readuntil(b"{}")
                writer.write(request)  # on the same connection
                assert b" 200 " in await asyncio.wait_for(reader.readline(), 5)
            assert [asked.body for asked in router.vllm.asked] == [body, body]
            names = {name for name, _ in router.vllm.asked[0].headers}
            assert names.isdisjoint(("upgrade", "http2-settings", "keep-alive"))

    router.run(main)


def test_what_comes_behind_a_body_is_no_header(router):
    async def main():
        async with router.answering(reply()):
            request = raw_post(CHAT, b"").replace(b"content-length: 0", b"transfer-encoding: chunked")
            async with sent(router, request + b"2\r\n{}\r\n0\r\nx-late: 1\r\n\r\n") as (reader, _):
                assert b" 200 " in await asyncio.wait_for(reader.readline(), 5)
            assert router.vllm.asked[0].header("x-late") is None
            assert router.vllm.asked[0].body == b"{}"

    router.run(main)


# ---- request ids


def test_the_engine_gets_our_request_id_and_the_client_its_own(router):
    async def main():
        async with router.answering(reply(b"{}", 200, ("content-type", "a/b"), ("x-request-id", "vllms"))):
            seen = set()
            for given, returned in [
                ("mine-1", "mine-1"),
                (None, None),
                ("with space", None),
                ("é", None),
                ("x" * 257, None),
            ]:
                headers = {} if given is None else {"x-request-id": given.encode()}
                response = await router.client.get("/v1/models", headers=headers)
                upstream = router.vllm.asked[-1].header("x-request-id")
                assert OURS.fullmatch(upstream)
                assert response.headers.get_list("x-request-id") == [returned or upstream]
                seen.add(upstream)
            assert len(seen) == 5

    router.run(main)


# ---- streams


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/responses"])
def test_chunks_come_one_by_one(router, path):
    """The engine sends the next chunk only once the client has the one before: a proxy that gathers would hang."""
    received = asyncio.Queue()
    sent_at, came_at = [], []

    async def answer(asked, send):
        await start(send, 200, ("content-type", "text/event-stream"))
        for n in range(5):
            sent_at.append(time.monotonic())
            await chunk(send, delta(f"t{n}"))
            assert await asyncio.wait_for(received.get(), 5) == delta(f"t{n}")
            await asyncio.sleep(0.03)
        await chunk(send, DONE, more=False)

    async def main():
        async with router.answering(answer), router.client.stream("POST", path, json={}) as response:
            assert response.headers["content-type"] == "text/event-stream"
            assert response.headers["x-accel-buffering"] == "no"
            parts = []
            async for part in response.aiter_raw():
                came_at.append(time.monotonic())
                parts.append(part)
                received.put_nowait(part)
            assert parts == [*(delta(f"t{n}") for n in range(5)), DONE]
            assert came_at[0] < sent_at[-1] - 0.1

    router.run(main)


def test_headers_wait_for_the_first_event_but_not_for_long(router, monkeypatch):
    monkeypatch.setattr("specdec.router.proxy._FIRST_S", 0.2)
    go = asyncio.Event()

    async def answer(asked, send):
        await start(send, 200, ("content-type", "text/event-stream"))
        await chunk(send, b"")
        await go.wait()
        await chunk(send, DONE, more=False)

    async def main():
        started = time.monotonic()
        async with router.answering(answer), router.client.stream("POST", CHAT, json={}) as response:
            assert response.status_code == 200
            assert 0.2 < time.monotonic() - started < 2
            go.set()
            assert await response.aread() == DONE

    router.run(main)


@pytest.mark.parametrize(("code", "status"), [(400, 400), (404, 404), (500, 500), (None, 500)])
def test_a_stream_that_begins_with_an_error_is_an_error_with_its_status(router, code, status):
    """vLLM finds that a token id is none, or a prompt too long, only when its 200 has been sent."""
    failure = event({"error": {"message": "boom", "type": "x", "param": "prompt", "code": code}})

    async def main():
        async with router.answering(stream(failure, DONE)):
            response = await router.post(fields={"stream": True})
            assert (response.status_code, error_of(response)["param"]) == (status, "prompt")

    router.run(main)


@pytest.mark.parametrize("cut", [None, 3, 14, 40, -16, -15, -14])
def test_an_error_at_a_streams_beginning_is_one_in_whatever_pieces_it_comes(router, cut):
    """vLLM writes the error and [DONE] one right after the other, which mostly arrive as one piece."""
    failure = event({"error": {"message": "boom", "type": "x", "param": "prompt", "code": 400}}) + DONE
    parts = [failure] if cut is None else [failure[:cut], failure[cut:]]

    async def main():
        async with router.answering(stream(*parts)):
            response = await router.post(fields={"stream": True})
            error = error_of(response)
            assert (response.status_code, error["message"], error["param"]) == (400, "boom", "prompt")

    router.run(main)


@pytest.mark.parametrize("half", [b"", b'event: x\ndata: {"ha'])
def test_an_error_in_a_stream_that_is_not_read_is_an_event_of_its_own(router, half):
    whole = b"event: a\ndata: {}\n\n"

    async def main():
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        body = whole + half
        async with router.answering(refused), rude_engine(head + b"%x\r\n%s\r\n" % (len(body), body)) as url:
            router.described(http_url=url)
            content = (await router.post("/v1/responses", {"stream": True})).content
            assert content.startswith(body)
            last = content.rstrip().rpartition(b"\n\n")[2]
            assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "engine_unavailable"
            assert half or content.count(b"\n\n") == 2

    router.run(main)


USAGE = event({"id": "c", "choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 0, "total_tokens": 1}})
COUNTED = USAGE.replace(
    b'"total_tokens":1',
    b'"total_tokens":1,"completion_tokens_details":{"accepted_prediction_tokens":0,"rejected_prediction_tokens":0}',
)
EVENTS = [
    delta("a"),
    delta("\u20ac\n\n"),
    b": a comment\n\n",
    b"event: x\ndata: y\n\n",
    delta('"usage":{'),
    USAGE,
    DONE,
]


@pytest.mark.parametrize("size", [1, 2, 7, 10_000])
def test_events_may_be_cut_anywhere(router, size):
    whole = b"".join(EVENTS)

    async def main():
        cuts = [whole[at : at + size] for at in range(0, len(whole), size)]
        async with router.answering(stream(*cuts)):
            response = await router.post(fields={"stream": True})
            assert response.content == whole.replace(USAGE, COUNTED)

    router.run(main)


def test_events_with_crlf_are_passed_one_by_one_and_counted(router):
    received = asyncio.Queue()
    crlf = [part.rstrip(b"\n") + b"\r\n\r\n" for part in (delta("a"), delta("b"), USAGE, DONE)]

    async def answer(asked, send):
        await start(send, 200, ("content-type", "text/event-stream"))
        for part in crlf:
            await chunk(send, part[:-3])
            await chunk(send, part[-3:])
            await asyncio.wait_for(received.get(), 5)
        await chunk(send, b"", more=False)

    async def main():
        async with router.answering(answer), router.client.stream("POST", CHAT, json={}) as response:
            parts = []
            async for part in response.aiter_raw():
                received.put_nowait(part)
                parts.append(part)
            assert parts[:2] == crlf[:2]
            assert parts[3:] == crlf[3:]
            assert parts[2].rstrip() == COUNTED.rstrip()

    router.run(main)


@pytest.mark.parametrize("end", [b"", b'data: {"usage":{', b"data: [DO"])
def test_a_stream_without_its_end_ends_with_an_error(router, end):
    """An engine that is stopped may close a stream as if it were whole."""

    async def main():
        async with router.answering(stream(delta("a"), end)):
            response = await router.post()
            assert response.content.startswith(delta("a") + b'data: {"error"')
            assert response.content.count(b"\n\n") == 2
            assert json.loads(response.content.split(b"\n\n")[1][6:])["error"]["code"] == "engine_unavailable"

    router.run(main)


def test_an_error_in_the_engines_stream_is_its_last_event(router):
    """vLLM goes on with [DONE] after it."""
    failure = event({"error": {"message": "boom", "type": "InternalServerError", "param": None, "code": 500}})

    async def main():
        async with router.answering(stream(delta("a"), failure, DONE)):
            response = await router.post()
            first, last, rest = response.content.split(b"\n\n")
            assert (first + b"\n\n", rest) == (delta("a"), b"")
            assert json.loads(last[6:]) == {
                "error": {"message": "boom", "type": "server_error", "param": None, "code": "internal_error"}
            }

    router.run(main)


def test_only_generating_routes_are_read(router):
    async def main():
        async with router.answering(stream(USAGE, DONE)):
            for path in ("/v1/responses", "/v1/chat/completions/", "/v1/embeddings"):
                assert (await router.post(path)).content == USAGE + DONE
            assert (await router.post(COMPLETIONS)).content == COUNTED + DONE

    router.run(main)


# ---- counts


def generating(router: Router, n: int = 1, cycles: int = 10) -> tuple[list[Any], int]:
    """`n` sessions of the request asked last, and the tokens they will deliver: of 3 drafts a cycle 1 stands."""
    request_id = router.vllm.asked[-1].header("x-request-id")
    sessions = [router.fake.engine.open(f"{i}_chatcmpl-{request_id}", cycles=cycles) for i in range(n)]
    return sessions, n * (2 * cycles + 1)


def usage_of(tokens: int, **details: Any) -> dict[str, Any]:
    more = {"completion_tokens_details": details} if details else {}
    return {"prompt_tokens": 5, "completion_tokens": tokens, "total_tokens": tokens + 5, **more}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_the_drafts_counts_are_added_to_usage(router, n, streamed):
    async def main():
        async def answer(asked, send):
            _, tokens = generating(router, n)
            await router.fake.engine.run()
            usage = usage_of(tokens, reasoning_tokens=2)
            whole = reply(json.dumps({"id": "c", "choices": [], "usage": usage}).encode())
            await (stream(delta("a", usage=None), event({"choices": [], "usage": usage}), DONE) if streamed else whole)(
                asked, send
            )

        async with router.answering(answer):
            response = await router.post(fields={"n": n, "stream": streamed})
            if streamed:
                first, last, done = response.content.split(b"\n\n")[:3]
                assert first + b"\n\n" == delta("a", usage=None)
                assert done == b"data: [DONE]"
                usage = json.loads(last.removeprefix(b"data: "))["usage"]
            else:
                usage = response.json()["usage"]
                assert response.headers["content-length"] == str(len(response.content))
            assert usage == usage_of(
                21 * n, reasoning_tokens=2, accepted_prediction_tokens=10 * n, rejected_prediction_tokens=20 * n
            )
            await until(lambda: router.at_rest)

    router.run(main)


def test_an_answer_waits_for_a_verdict_that_is_on_its_way(router):
    async def main():
        async def answer(asked, send):
            (session,), tokens = generating(router, cycles=5)
            while len(router.fake.engine.ran[session.id]) < 4:
                router.fake.engine.step()
                await asyncio.sleep(0.001)
            asyncio.get_running_loop().call_later(0.02, lambda: asyncio.ensure_future(router.fake.engine.run()))
            await reply(json.dumps({"usage": usage_of(tokens)}).encode())(asked, send)

        async with router.answering(answer):
            details = (await router.post()).json()["usage"]["completion_tokens_details"]
            assert details == {"accepted_prediction_tokens": 5, "rejected_prediction_tokens": 10}

    router.run(main)


@pytest.mark.parametrize("streamed", [False, True])
def test_without_verdicts_the_answer_comes_after_50_ms(router, streamed):
    async def main():
        usage = usage_of(7)
        answer = (
            stream(event({"choices": [], "usage": usage})) if streamed else reply(json.dumps({"usage": usage}).encode())
        )
        async with router.answering(answer):
            await router.client.get("/v1/models")
            started = time.monotonic()
            response = await router.post()
            took_s = time.monotonic() - started
            assert 0.045 < took_s < 0.3
            assert b'"accepted_prediction_tokens":0,"rejected_prediction_tokens":0' in response.content

    router.run(main)


def test_usage_in_every_chunk_is_counted_without_waiting(router):
    """stream_options.continuous_usage_stats."""

    async def main():
        chunks = [delta("a", usage=usage_of(n)) for n in range(1, 40)]
        async with router.answering(stream(*chunks)):
            started = time.monotonic()
            response = await router.post()
            assert time.monotonic() - started < 1  # 50 ms each would be two seconds
            assert response.content.count(b'"accepted_prediction_tokens":0') == 39

    router.run(main)


@pytest.mark.parametrize(
    "body",
    [
        b'{"choices":[]}',
        b'{"usage":null}',
        b'{"usage": {"prompt_tokens": 1}}',
        b"[1, 2]",
        b"not JSON",
        b"",
        b'{"usage": 3}',
    ],
)
def test_answers_without_usage_pass_unchanged(router, body):
    async def main():
        async with router.answering(reply(body)):
            assert (await router.post()).content == body
            router.vllm.answer = stream(b"data: " + body + b"\n\n", DONE)
            assert (await router.post()).content == b"data: " + body + b"\n\n" + DONE

    router.run(main)


def test_text_survives_being_counted(router):
    text = 'é€\U0001f600\u2028 \x00 </script> \\ud83d "quoted"'

    async def main():
        body = {"choices": [{"text": text, "logprobs": [-0.1, 1e-300, 12345678901234567890]}], "usage": usage_of(0)}
        async with router.answering(reply(json.dumps(body).encode())):
            for ascii_only in (True, False):
                router.vllm.answer = reply(json.dumps(body, ensure_ascii=ascii_only).encode())
                assert (await router.post()).json()["choices"] == body["choices"]
            lone = b'{"choices":[{"text":"\\ud83d"}],"usage":{"completion_tokens":0}}'  # half a character
            router.vllm.answer = reply(lone)
            assert (await router.post()).json()["choices"] == [{"text": "\ud83d"}]
            router.vllm.answer = stream(b"data: " + lone + b"\n\n", DONE)
            assert (await router.post()).content.endswith(DONE)

    router.run(main)


@pytest.mark.parametrize("options", [{"include_usage": True}, {"include_usage": False}, {}])
def test_chunks_before_the_usage_have_a_null_where_it_was_asked_for(router, options):
    """OpenAI's API has it so, and vLLM leaves it out."""
    text = delta('"usage": } \\')

    async def main():
        async with router.answering(stream(text, b": comment\n\n", delta("b"), USAGE, DONE)):
            response = await router.post(fields={"stream": True, "stream_options": options})
            if options.get("include_usage"):
                null = [one.replace(b"}\n\n", b',"usage":null}\n\n') for one in (text, delta("b"))]
                assert response.content == null[0] + b": comment\n\n" + null[1] + COUNTED + DONE
                assert json.loads(null[0].removeprefix(b"data: "))["usage"] is None
            else:
                assert response.content == text + b": comment\n\n" + delta("b") + COUNTED + DONE

    router.run(main)


def test_probes_are_answered_while_many_streams_run(router):
    """Overload alone makes a pod neither dead nor unready."""

    async def busy(asked, send):
        await start(send, 200, ("content-type", "text/event-stream"))
        for _ in range(60):
            await chunk(send, delta("x"))
            await asyncio.sleep(0.02)
        await chunk(send, DONE, more=False)

    async def main():
        async with router.answering(busy):
            asking = [asyncio.create_task(router.post(fields={"stream": True})) for _ in range(60)]
            await until(lambda: router.in_flight == 60)
            slowest = 0.0
            for _ in range(50):
                for path in ("/livez", "/readyz"):
                    started = time.monotonic()
                    assert (await router.client.get(path)).status_code == 200
                    slowest = max(slowest, time.monotonic() - started)
            assert slowest < 1
            assert {(await task).status_code for task in asking} == {200}

    router.run(main)


# ---- "speculative"


@pytest.mark.parametrize(
    ("value", "steps"), [("auto", 3), (None, 3), ("off", 0), ({"steps": 0}, 0), ({"steps": 2}, 2), ({"steps": 64}, 3)]
)
def test_a_request_may_cap_its_steps(router, value, steps):
    async def main():
        async def answer(asked, send):
            generating(router, n=2, cycles=4)
            await router.fake.engine.run()
            await reply()(asked, send)

        fields = {"model": "m", "messages": [{"content": "\u20ac"}], "speculative": value, "temperature": 0.1}
        async with router.answering(answer):
            for path in (CHAT, COMPLETIONS):
                assert (await router.post(path, fields)).status_code == 200
                expected = {key: value for key, value in fields.items() if key != "speculative"}
                assert json.loads(router.vllm.asked[-1].body) == expected
            ran = router.fake.engine.ran
            assert [[k for _, k in cycles] for cycles in ran.values()] == [[steps] * 4] * 4
            assert all(order for cycles in ran.values() for order, _ in cycles)  # off, too, is the router's order

    router.run(main)


@pytest.mark.parametrize(
    "value",
    [
        "on",
        "",
        True,
        3,
        [],
        {},
        {"steps": -1},
        {"steps": 65},
        {"steps": 1.5},
        {"steps": True},
        {"steps": 1, "x": 2},
    ],
)
def test_a_bad_value_of_speculative_is_refused(router, value):
    async def main():
        async with router.answering(refused):
            response = await router.post(fields={"messages": [], "speculative": value})
            assert response.status_code == 400
            error = error_of(response)
            assert (error["type"], error["param"]) == ("invalid_request_error", "speculative")
            assert '"steps"' in error["message"]
            assert router.at_rest
            assert router.counted("specdec_router_requests_total", route=CHAT, status="400") == 1

    router.run(main)


@pytest.mark.parametrize(
    "body",
    [b'{"prompt": "\\"speculative\\""}', b'{"prompt": "\xff\xfe"}', b'{"a":1, "a": ' + b"1" * 5000 + b" }"],
    ids=["in-a-value", "not-utf-8", "number"],
)
def test_what_the_router_need_not_understand_reaches_the_engine_byte_by_byte(router, body):
    async def main():
        async with router.answering(reply()):
            response = await router.client.post(CHAT, content=body, headers={"content-type": "application/json"})
            assert response.status_code == 200
            assert router.vllm.asked[-1].body == body

    router.run(main)


def test_taking_speculative_out_leaves_every_other_byte(router):
    async def main():
        async with router.answering(reply()):
            number = b"1" * 5000
            await router.client.post(CHAT, content=b'{"a": 1.50, "speculative":"off", "b":' + number + b"}")
            assert router.vllm.asked[-1].body == b'{"a": 1.50, "b":' + number + b"}"

    router.run(main)


def test_speculative_means_nothing_on_other_routes(router):
    async def main():
        async with router.answering(reply()):
            body = b'{"speculative":  "nonsense"}'
            await router.client.post("/v1/embeddings", content=body)
            assert router.vllm.asked[-1].body == body

    router.run(main)


@pytest.mark.parametrize("work", ["read", "of_engine"])
def test_a_large_body_is_read_beside_the_event_loop(router, monkeypatch, work):
    real = getattr(proxy, work)

    def slow(*args: Any) -> Any:
        time.sleep(0.5)
        return real(*args)

    monkeypatch.setattr(proxy, work, slow)

    async def main():
        async with router.answering(reply(b'{"error": {"message": "no"}}', 400)):
            asking = asyncio.create_task(router.post(content=b'{"messages": ["%s"]}' % (b"x" * 300_000)))
            worst = 0.0
            while not asking.done():
                started = time.monotonic()
                await asyncio.sleep(0.005)
                worst = max(worst, time.monotonic() - started)
            assert error_of(await asking)["message"] == "no"
            assert worst < 0.4

    router.run(main)


# ---- refusals


def test_a_body_over_the_limit_is_refused(tmp_path):
    limit = 2**20

    async def main():
        async def in_parts(size):
            for at in range(0, size, 65536):
                yield b"x" * min(65536, size - at)

        async with routed(tmp_path, refused, max_body_mb=1) as router:
            for content in (b"x" * (limit + 1), in_parts(limit + 1)):  # with content-length, and without
                response = await router.client.post(CHAT, content=content)
                assert response.status_code == 413
                assert error_of(response)["code"] == "request_too_large"
            assert router.at_rest
            assert router.counted("specdec_router_requests_total", route=CHAT, status="413") == 2
            router.vllm.answer = reply()
            for content in (b"x" * limit, in_parts(limit)):
                assert (await router.client.post("/v1/embeddings", content=content)).status_code == 200
                assert len(router.vllm.asked[-1].body) == limit

    run(main)


def test_an_announced_body_over_the_limit_is_refused_before_it_is_read(tmp_path):
    async def main():
        async with routed(tmp_path, refused, max_body_mb=1) as router:
            head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {2**40}\r\n\r\n"
            async with sent(router, head.encode()) as (reader, _):
                assert b" 413 " in await asyncio.wait_for(reader.readline(), 5)

    run(main)


def test_a_body_that_does_not_come_is_408(tmp_path):
    async def main():
        async with routed(tmp_path, refused, body_timeout_s=0.2) as router:
            async with sent(router, raw_post(CHAT, b"x" * 100)[:-50]) as (reader, _):
                assert b" 408 " in await asyncio.wait_for(reader.readline(), 5)
            await until(lambda: router.at_rest)

    run(main)


@pytest.mark.parametrize(
    ("sent_first", "status", "code"),
    [
        (b"GET / HTTP/9.9\r\n\r\n", 400, "invalid_request"),
        (b"\x16\x03\x01", 400, "invalid_request"),
        (b"GET / HTTP/1.1\r\nx: " + b"y" * 70_000, 413, "request_too_large"),
        (b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 12_000, 413, "request_too_large"),
        (b"GET / HTTP/1.1\r\nhost: x\r\n", 408, "request_timeout"),
        (
            raw_post(CHAT, b"").replace(b"content-length: 0", b"transfer-encoding: chunked") + b"zz",
            400,
            "invalid_request",
        ),
    ],
    ids=["version", "tls", "long-header", "many-headers", "half-a-head", "bad-chunk"],
)
def test_what_never_becomes_a_request_gets_the_form_too(monkeypatch, sent_first, status, code):
    monkeypatch.setattr("specdec.router.protocol._HEAD_S", 0.2)

    async def main():
        listener = listen("127.0.0.1", 0, "router")
        app = create_app(RouterSettings())
        async with serving(app, listener, 1, Protocol):
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(sent_first)
            head, _, body = (await asyncio.wait_for(reader.read(), 5)).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 %d " % status)
            assert b"content-type: application/json" in head
            assert json.loads(body)["error"]["code"] == code
            writer.close()

    run(main)


@contextlib.asynccontextmanager
async def with_protocol(app: Any = None, protocol: type[Protocol] = Protocol):
    """The router behind its own protocol, and what opens connections to it."""
    listener = listen("127.0.0.1", 0, "router")
    async with serving(app or create_app(RouterSettings()), listener, 1, protocol), contextlib.AsyncExitStack() as ends:

        async def connect(*first: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            ends.callback(writer.close)
            writer.writelines(first)
            return reader, writer

        yield connect


def test_a_connection_that_is_never_used_is_closed_without_a_word(monkeypatch):
    monkeypatch.setattr("specdec.router.protocol._HEAD_S", 0.2)

    async def main():
        async with with_protocol() as connect:
            reader, _ = await connect()
            assert await asyncio.wait_for(reader.read(), 5) == b""

    run(main)


@pytest.mark.parametrize(
    "second",
    [b"GET /livez HT", b"\x16\x03\x01 \r\n\r\n", b"GET / HTTP/1.1\r\nx: " + b"y" * 70_000],
    ids=["half", "none", "long"],
)
def test_nothing_is_written_into_a_running_answer(monkeypatch, second):
    """A second request whose head does not come, is none or is too long, while the first one's answer runs."""
    monkeypatch.setattr("specdec.router.protocol._HEAD_S", 0.2)

    async def streaming(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await FakeVllm(refused)(scope, receive, send)
            return
        await start(send, 200, ("content-type", "text/event-stream"))
        await chunk(send, delta("a"))
        await receive()
        await asyncio.sleep(1)

    async def main():
        async with with_protocol(streaming) as connect:
            reader, writer = await connect(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            writer.write(second)
            rest = await asyncio.wait_for(reader.read(), 5)
            assert rest == b"%x\r\n%s\r\n" % (len(delta("a")), delta("a"))

    run(main)


def test_a_body_that_was_answered_before_it_came_holds_no_connection(monkeypatch):
    monkeypatch.setattr("specdec.router.protocol._UNREAD_S", 0.3)
    head = b"POST /nowhere HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n"

    async def main():
        async with with_protocol() as connect:
            reader, writer = await connect(head)
            assert b" 404 " in await reader.readline()
            assert b"not_found" in await reader.readuntil(b"}}")
            reading = asyncio.create_task(reader.read())
            for _ in range(8):  # bytes now and then
                if not reading.done():
                    writer.write(b"x")
                await asyncio.sleep(0.1)
            assert reading.done()
            await asyncio.gather(reading, return_exceptions=True)  # a reset, where a byte came after the close
            reader, writer = await connect(head)  # one that sends all of it may go on
            assert b" 404 " in await reader.readline()
            writer.write(b"x" * 9)
            await reader.readuntil(b"}}")
            await asyncio.sleep(0.4)
            writer.write(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b" 200 " in await asyncio.wait_for(reader.readline(), 5)

    run(main)


def test_an_answer_before_the_bodys_end_reaches_a_client_that_keeps_no_connection():
    head = b"POST /nowhere HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 2000000\r\n\r\n"

    async def main():
        async with with_protocol() as connect:
            reader, writer = await connect(head)
            await asyncio.sleep(0.1)  # it has been answered
            for _ in range(20):
                writer.write(b"x" * 100_000)
                await writer.drain()
            answer = await asyncio.wait_for(reader.read(), 1)
            assert b" 404 " in answer.partition(b"\r\n")[0]
            assert answer.endswith(b"}}")

    run(main)


def test_a_body_in_front_of_a_head_is_none_of_it():
    """Large bodies whose last bytes come in one piece with the next head's first ones."""
    get, post = b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n", raw_post("/nowhere", b"x" * 100_000)

    async def main():
        async with with_protocol() as connect:
            for cut in (0, 1000):  # in the head's own piece, and in one of their own
                reader, writer = await connect(post[:cut])
                await asyncio.sleep(0.05)
                writer.write(post[cut:] + get[:10])
                assert b" 404 " in await reader.readuntil(b"}}")
                await asyncio.sleep(0.05)
                writer.write(get[10:])
                assert b" 200 " in await asyncio.wait_for(reader.readuntil(b"}"), 5)

    run(main)


def test_a_connection_that_rests_is_closed_whatever_comes_but_a_request():
    class Hasty(Protocol):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            self.timeout_keep_alive = 0.3

    async def main():
        async with with_protocol(protocol=Hasty) as connect:
            reader, writer = await connect(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b" 200 " in await reader.readline()
            writer.write(b"\r\n")  # between requests it means nothing
            await asyncio.wait_for(reader.read(), 5)

    run(main)


def test_a_connection_may_rest_and_its_heads_may_be_large(monkeypatch):
    monkeypatch.setattr("specdec.router.protocol._HEAD_S", 0.2)

    async def main():
        listener = listen("127.0.0.1", 0, "router")
        async with (
            serving(create_app(RouterSettings()), listener, 1, Protocol),
            httpx.AsyncClient(base_url=url_of(listener), trust_env=False) as client,
        ):
            for _ in range(3):
                response = await client.get("/livez", headers={"x": "y" * 50_000})
                assert response.status_code == 200
                await asyncio.sleep(0.3)
            assert response.json()["live"] is True

    run(main)


def test_without_a_ready_pair_it_says_to_come_back(router):
    async def main():
        async with router.answering(refused):
            router.described(engine_ready=False)
            for path in (CHAT, "/v1/models"):
                response = await router.post(path)
                assert (response.status_code, response.headers["retry-after"]) == (503, "2")
                assert error_of(response) == {
                    "message": "no pair is ready: its vLLM is starting, or its verifier is not reachable",
                    "type": "server_error",
                    "param": None,
                    "code": "no_pair",
                }
            ready = await router.client.get("/readyz")
            assert (ready.status_code, ready.json()["reasons"]) == (503, ["no pair is ready"])

    router.run(main)


def test_a_pair_that_was_never_reached_is_not_ready(tmp_path):
    async def main():
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))
            app = create_app(RouterSettings(pairs=[f"127.0.0.1:{nobody.getsockname()[1]}"]))
            listener = listen("127.0.0.1", 0, "router")
            url = url_of(listener)
            async with serving(app, listener, 1), httpx.AsyncClient(base_url=url, trust_env=False) as client:
                assert (await client.post(CHAT, json={})).status_code == 503
                ready = (await client.get("/readyz")).json()
                assert ready["pairs"] == [
                    {"pair": app.state.pairs[0].address, "ready": False, "loop": False, "draft": None}
                ]
                assert (await client.get("/livez")).json()["live"] is True

    run(main)


def test_an_engine_that_refuses_or_hangs_up_before_an_answer_is_503(router):
    async def main():
        async with router.answering(refused):
            with socket.socket() as nobody:
                nobody.bind(("127.0.0.1", 0))
                router.described(http_url=f"http://127.0.0.1:{nobody.getsockname()[1]}")
                responses = [await router.post(), await router.post("/v1/models")]
            for parts in ([], [b"HTTP/1.1 200"], [b"garbage\r\n\r\n"]):
                async with rude_engine(*parts) as url:
                    router.described(http_url=url)
                    responses.append(await router.post())
            for response in responses:
                assert (response.status_code, response.headers["retry-after"]) == (503, "2")
                assert error_of(response)["code"] == "engine_unavailable"
            assert router.at_rest

    router.run(main)


def test_an_engine_that_breaks_off_a_stream_ends_it_with_an_error_and_no_done(router):
    async def main():
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        parts = [b"%x\r\n%s\r\n" % (len(part), part) for part in (delta("a"), b'data: {"half')]
        async with router.answering(refused), rude_engine(head, *parts) as url:
            router.described(http_url=url)
            response = await router.post()
            assert response.status_code == 200
            first, last, rest = response.content.split(b"\n\n")
            assert (first + b"\n\n", rest) == (delta("a"), b"")
            error = json.loads(last.removeprefix(b"data: "))["error"]
            assert (error["type"], error["code"]) == ("server_error", "engine_unavailable")
            assert b"[DONE]" not in response.content
            await until(lambda: router.at_rest)

            with pytest.raises(openai.APIError, match="broke off"):
                await asyncio.to_thread(stream_text, router.url)

    router.run(main)


def test_an_engine_that_breaks_off_a_document_is_503(router):
    async def main():
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n"
        async with router.answering(refused), rude_engine(head, b'{"usage":') as url:
            router.described(http_url=url)
            response = await router.post()
            assert (response.status_code, error_of(response)["code"]) == (503, "engine_unavailable")
            assert router.at_rest
            with pytest.raises(httpx.RemoteProtocolError):  # passed on as it came, so broken off as it came
                await router.client.get("/v1/models")
            await until(lambda: router.at_rest)

    router.run(main)


def test_an_engine_that_is_silent_for_too_long_is_504(tmp_path):
    async def main():
        async def half(asked, send):
            await start(send, 200, ("content-type", "text/event-stream"))
            await chunk(send, delta("a"))
            await never(asked, send)

        async with routed(tmp_path, never, read_timeout_s=0.2) as router:
            started = time.monotonic()
            response = await router.post()
            assert 0.2 <= time.monotonic() - started < 2
            assert (response.status_code, error_of(response)["code"]) == (504, "engine_timeout")
            assert router.at_rest
            router.vllm.answer = half
            response = await router.post()
            assert response.content.startswith(delta("a") + b'data: {"error"')
            assert b"engine_timeout" in response.content
            await until(lambda: router.at_rest and router.vllm.cancelled == 2, 1)

    run(main)


def test_a_fault_of_the_router_is_500_in_openais_form_and_counted_so(router, monkeypatch, caplog):
    def broken(path, body, limits):
        raise LookupError("a bug")

    monkeypatch.setattr("specdec.router.proxy.read", broken)

    async def main():
        async with router.answering(refused):
            response = await router.post()
            assert response.status_code == 500
            assert error_of(response)["type"] == "server_error"
            assert "a bug" not in response.text
            assert router.counted("specdec_router_requests_total", route=CHAT, status="500") == 1
            assert router.at_rest

    router.run(main)
    assert "a bug" in caplog.text


def test_a_policy_that_fails_costs_speed_only(tmp_path, monkeypatch, caplog):
    class Broken(FixedSteps):
        def observe(self, verdict):
            raise ArithmeticError("a policy's bug")

    module = ModuleType("broken_policy")
    module.Broken = Broken
    monkeypatch.setitem(sys.modules, "broken_policy", module)

    async def main():
        async def answer(asked, send):
            generating(router, cycles=6)
            await router.fake.engine.run()
            await reply(json.dumps({"usage": usage_of(9)}).encode())(asked, send)

        async with routed(tmp_path, answer, policy="broken_policy:Broken", lease_ms=50) as router:
            assert (await router.post()).json()["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 1
            (ran,) = router.fake.engine.ran.values()
            assert ran == [(1, 3)] + [(0, 0)] * 5
            await until(lambda: router.at_rest)

    run(main)
    assert "the loop of session 1 of request specdec-" in caplog.text
    assert "a policy's bug" in caplog.text


def test_methods_that_no_route_has_get_openais_form_too(router):
    async def main():
        async with router.answering(refused):
            response = await router.client.request("PROPFIND", "/v1/models")
            assert response.status_code == 405
            error_of(response)

    router.run(main)


# ---- clients that go


async def mid_stream(asked: Asked, send: Send) -> None:
    await start(send, 200, ("content-type", "text/event-stream"))
    await chunk(send, delta("a"))
    await never(asked, send)


async def mid_document(asked: Asked, send: Send) -> None:
    await start(send, 200, ("content-type", "application/json"))
    await chunk(send, b'{"choices":')
    await never(asked, send)


async def busy_stream(asked: Asked, send: Send) -> None:
    await start(send, 200, ("content-type", "text/event-stream"))
    while True:
        await chunk(send, delta("x" * 10_000))
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("answer", "path", "wait_for"),
    [
        (never, CHAT, b""),
        (mid_document, CHAT, b""),
        (mid_document, "/v1/models", b'{"choices":'),
        (mid_stream, CHAT, delta("a").strip()),
        (mid_stream, "/v1/responses", delta("a").strip()),
        (busy_stream, CHAT, b""),  # the client has stopped reading, so the router is in the middle of a write
    ],
    ids=["headers", "document", "other-document", "stream", "other-stream", "unread-stream"],
)
def test_a_client_that_goes_ends_the_engines_work(router, caplog, answer, path, wait_for):
    async def main():
        async with router.answering(answer):
            async with sent(router, raw_post(path)) as (reader, writer):
                if wait_for:
                    await asyncio.wait_for(reader.readuntil(wait_for), 5)
                await until(lambda: router.vllm.asked)
                await asyncio.sleep(0.05)
                assert router.pair.load == 1
                assert router.in_flight == 1
                writer.transport.abort()
                gone_at = time.monotonic()
                await until(lambda: router.vllm.cancelled == 1 and router.at_rest)
                assert time.monotonic() - gone_at < 1
            router.vllm.answer = reply()
            assert (await router.post()).status_code == 200

    with caplog.at_level(logging.WARNING):
        router.run(main)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("turns", [0, 3, 4, 5, 6, 7])
def test_a_client_that_goes_just_as_the_answer_begins_leaves_nothing_behind(router, monkeypatch, turns):
    """Headers and hang-up within a few turns of the event loop, so that the answer's body may never be begun."""
    send = Proxy._send
    writers = []

    async def send_and_lose_client(self, *args):
        answer = await send(self, *args)
        writers[0].transport.abort()
        try:
            for _ in range(turns):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            answer.close()  # as `ask` does
            raise
        return answer

    monkeypatch.setattr(Proxy, "_send", send_and_lose_client)

    async def main():
        async with router.answering(mid_stream), sent(router, raw_post(CHAT)) as (_, writer):
            writers.append(writer)
            await until(lambda: router.vllm.cancelled == 1 and router.at_rest, 2)

    router.run(main)


def test_a_client_that_sends_half_a_body_and_goes_leaves_nothing_behind(router, caplog):
    async def main():
        async with router.answering(refused):
            async with sent(router, raw_post(CHAT, b"x" * 1000)[:-500]):
                await until(lambda: router.in_flight == 1)
            await until(lambda: router.at_rest, 1)

    with caplog.at_level(logging.WARNING):
        router.run(main)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_a_client_that_does_not_read_holds_the_engine_back(router):
    sent_bytes = 0

    async def flood(asked, send):
        nonlocal sent_bytes
        await start(send, 200, ("content-type", "text/event-stream"))
        while True:
            await chunk(send, delta("x" * 100_000))
            sent_bytes += 100_000
            await asyncio.sleep(0)

    async def main():
        async with router.answering(flood), sent(router, raw_post(CHAT)):
            before = -1
            while sent_bytes != before:
                before = sent_bytes
                await asyncio.sleep(0.2)
            assert 0 < sent_bytes < 50_000_000

    router.run(main)


def test_an_answer_in_progress_counts_until_its_last_byte(router):
    go = asyncio.Event()

    async def answer(asked, send):
        await start(send, 200, ("content-type", "text/event-stream"))
        await chunk(send, delta("a"))
        await go.wait()
        await chunk(send, DONE, more=False)

    async def main():
        async with router.answering(answer), router.client.stream("POST", CHAT, json={}) as response:
            parts = response.aiter_raw()
            assert await anext(parts) == delta("a")
            assert (router.in_flight, router.pair.load) == (1, 1)
            go.set()
            assert [part async for part in parts] == [DONE]
            await until(lambda: router.at_rest)
            assert router.counted("specdec_router_first_byte_seconds_count") == 1

    router.run(main)


def test_answers_in_progress_are_finished_when_the_router_stops(tmp_path):
    async def slow(asked, send):
        await start(send, 200, ("content-type", "text/event-stream"))
        for n in range(5):
            await chunk(send, delta(str(n)))
            await asyncio.sleep(0.05)
        await chunk(send, DONE, more=False)

    async def main():
        vllm_socket, listener = listen("127.0.0.1", 0, "vLLM"), listen("127.0.0.1", 0, "router")
        url = url_of(listener)
        async with fake_pair(tmp_path) as fake, serving(FakeVllm(slow), vllm_socket, 1):
            fake.description.http_url = url_of(vllm_socket)
            app = create_app(RouterSettings(pairs=[fake.address]))
            async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
                async with serving(app, listener, 5):
                    await until(lambda: app.state.pairs[0].ready)
                    asking = asyncio.create_task(client.post(CHAT, json={}))
                    await until(lambda: app.state.pairs[0].load)
                response = await asking
                assert response.content.endswith(delta("4") + DONE)
                with pytest.raises(httpx.ConnectError):
                    await client.get("/livez")

    run(main)


# ---- more than one pair


def test_requests_go_to_the_ready_pair_with_the_fewest(tmp_path):
    async def main():
        (tmp_path / "b").mkdir()
        other = FakeVllm(never)
        other_socket = listen("127.0.0.1", 0, "vLLM")
        other.url = url_of(other_socket)
        async with fake_pair(tmp_path / "b") as fake_b, serving(other, other_socket, 1):
            fake_b.description.http_url = other.url
            async with fake_pair(tmp_path) as fake_a:
                vllm = FakeVllm(never)
                vllm_socket, listener = listen("127.0.0.1", 0, "vLLM"), listen("127.0.0.1", 0, "router")
                fake_a.description.http_url = url_of(vllm_socket)
                url = url_of(listener)
                app = create_app(RouterSettings(pairs=[fake_a.address, fake_b.address]))
                async with serving(vllm, vllm_socket, 1), serving(app, listener, 1):
                    await until(lambda: all(pair.ready and pair.connected for pair in app.state.pairs))
                    async with httpx.AsyncClient(base_url=url, timeout=5, trust_env=False) as client:
                        waiting = []
                        for n in range(1, 5):
                            waiting.append(asyncio.create_task(client.post(CHAT, json={})))
                            await until(lambda n=n: len(vllm.asked) + len(other.asked) == n)
                        assert [len(vllm.asked), len(other.asked)] == [2, 2]
                        fake_a.description.engine_ready = app.state.pairs[0].description.engine_ready = False
                        other.answer = reply(b"from b")
                        assert (await client.post(CHAT, json={})).content == b"from b"
                        assert (await client.get("/readyz")).json()["ready"] is True
                        for task in waiting:
                            task.cancel()
                        await asyncio.gather(*waiting, return_exceptions=True)

    run(main)


# ---- the openai package


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=10)


def stream_text(url: str) -> tuple[str, Any]:
    text, usage = "", None
    with client_of(url) as client:
        messages = [{"role": "user", "content": "hi"}]
        options = {"include_usage": True}
        for part in client.chat.completions.create(model="m", messages=messages, stream=True, stream_options=options):
            text += "".join(choice.delta.content or "" for choice in part.choices)
            usage = part.usage or usage
    return text, usage


def test_the_openai_package_reads_streams_and_documents(router):
    message = {"role": "assistant", "content": "Hello w\u00f6rld"}
    document = {"id": "c", "object": "chat.completion", "created": 1, "model": "m"}

    async def main():
        async def answer(asked, send):
            _, tokens = generating(router)
            await router.fake.engine.run()
            usage = usage_of(tokens)
            if json.loads(asked.body).get("stream"):
                base = {**document, "object": "chat.completion.chunk"}
                parts = [
                    event({**base, "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}, False)
                    for text in ("Hello ", "w\u00f6rld")
                ]
                await stream(*parts, event({**base, "choices": [], "usage": usage}, False), DONE)(asked, send)
            else:
                choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
                await reply(json.dumps({**document, "choices": choices, "usage": usage}).encode())(asked, send)

        def whole(url):
            with client_of(url) as client:
                extra = {"speculative": {"steps": 2}}
                return client.chat.completions.create(model="m", messages=[message], extra_body=extra)

        async with router.answering(answer):
            text, usage = await asyncio.to_thread(stream_text, router.url)
            assert text == message["content"]
            details = usage.completion_tokens_details
            assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (10, 20)
            completion = await asyncio.to_thread(whole, router.url)
            assert completion.choices[0].message.content == message["content"]
            details = completion.usage.completion_tokens_details
            assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (10, 10)

    router.run(main)


def test_the_openai_package_knows_the_routers_errors(router):
    def ask(url, value):
        with client_of(url) as client:
            client.chat.completions.create(model="m", messages=[], extra_body={"speculative": value})

    async def main():
        async with router.answering(refused):
            with pytest.raises(openai.BadRequestError) as caught:
                await asyncio.to_thread(ask, router.url, "bad")
            assert caught.value.param == "speculative"
            router.described(engine_ready=False)
            with pytest.raises(openai.InternalServerError) as caught:
                await asyncio.to_thread(ask, router.url, "auto")
            assert (caught.value.status_code, caught.value.code) == (503, "no_pair")

    router.run(main)
