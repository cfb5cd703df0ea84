"""The router behind a real nginx: with what ingress-nginx makes of the chart's annotations, and with nginx's defaults.

What must be seen to go wrong is there, too: a proxy that buffers, and one that hears nothing for too long.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from chart_kit import render
from chart_services import router_settings
from edge_kit import CHAT, DONE, Asked, Router, Send, chunk, delta, raw_post, routed, run, start
from nginx_kit import PREFIX, Nginx, ingress_directives, nginx_conf
from specdec.stack import free_ports

CHUNKS = 6


def charts_annotations() -> dict[str, str]:
    """As the chart renders them with nothing set."""
    annotations: dict[str, str] = render(values={"ingress": {"enabled": True}}).one("Ingress")["metadata"][
        "annotations"
    ]
    return annotations


@dataclass
class FakeStep:
    """An engine that sends a chunk once the one before has arrived at the client, or after a while."""

    patience_s: float  # how long it waits for an arrival
    arrived: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)

    async def __call__(self, asked: Asked, send: Send) -> None:
        await start(send, 200, ("content-type", "text/event-stream"))
        for number in range(CHUNKS):
            self.sent.append(time.monotonic())
            await chunk(send, delta(str(number)))
            end = time.monotonic() + self.patience_s
            while len(self.arrived) <= number and time.monotonic() < end:
                await asyncio.sleep(0.002)
        await chunk(send, DONE, more=False)

    @property
    def in_time(self) -> int:
        """How many chunks were at the client before the next was sent."""
        return sum(arrived < later for arrived, later in zip(self.arrived, self.sent[1:], strict=False))

    @property
    def spread_s(self) -> float:
        return self.arrived[-1] - self.arrived[0]


@contextlib.asynccontextmanager
async def behind_nginx(
    router: Router, folder: Path, annotations: Mapping[str, str] | None, extra: Sequence[str] = ()
) -> AsyncIterator[Nginx]:
    (port,) = free_ports(1)
    nginx = Nginx(nginx_conf(annotations, router.url, port, folder, extra), port, folder)
    await asyncio.to_thread(nginx.__enter__)
    try:
        yield nginx
    finally:
        nginx.__exit__()


async def read(url: str, arrived: list[float] | None = None, path: str = CHAT, body: bytes = b"{}") -> tuple[int, str]:
    """(status, body) of a POST; `arrived` gets the time of each event with a document."""
    arrived = [] if arrived is None else arrived
    reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
    try:
        writer.write(raw_post(path, body).replace(b"host: x\r\n", b"host: x\r\nconnection: close\r\n"))
        answer = b""
        with contextlib.suppress(ConnectionError):
            while part := await reader.read(1 << 16):
                answer += part
                arrived += [time.monotonic()] * (answer.count(b"data: {") - len(arrived))
        return int(answer.split()[1]), answer.decode()
    finally:
        writer.close()


async def streamed(router: Router, nginx: Nginx, patience_s: float) -> FakeStep:
    router.vllm.answer = engine = FakeStep(patience_s)
    status, text = await read(nginx.url, engine.arrived)
    assert status == 200, text
    assert "[DONE]" in text
    assert len(engine.arrived) == CHUNKS
    return engine


def test_as_the_chart_sets_it_chunks_arrive_as_they_are_sent_and_large_prompts_pass(tmp_path):
    async def main():
        async with (
            routed(tmp_path, FakeStep(1), max_prompt_tokens=2_000_000) as router,
            # without our header nothing but the annotations keeps it from buffering
            behind_nginx(router, tmp_path, charts_annotations(), ["proxy_ignore_headers X-Accel-Buffering;"]) as nginx,
        ):
            engine = await streamed(router, nginx, patience_s=2)
            assert engine.in_time == CHUNKS - 1
            router.vllm.answer = engine = FakeStep(0)
            body = json.dumps({"messages": [{"role": "user", "content": "word " * 1_000_000}]}).encode()
            status, _ = await read(nginx.url, body=body)
            assert status == 200
            assert router.vllm.asked[-1].body == body

    run(main)


def test_with_nginxs_defaults_chunks_still_arrive_as_they_are_sent_but_large_prompts_do_not(tmp_path):
    """It buffers, and would for an HTTP/1.0 server as well, but for our X-Accel-Buffering."""

    async def main():
        async with routed(tmp_path, FakeStep(1)) as router, behind_nginx(router, tmp_path, None) as nginx:
            engine = await streamed(router, nginx, patience_s=2)
            assert engine.in_time == CHUNKS - 1
            asked = len(router.vllm.asked)
            response = await asyncio.to_thread(
                httpx.post, nginx.url + CHAT, content=b"x" * 2**21, trust_env=False, timeout=10
            )
            assert (response.status_code, response.headers["content-type"]) == (413, "text/html")
            assert len(router.vllm.asked) == asked

    run(main)


def test_a_proxy_that_buffers_is_seen_to(tmp_path):
    """The control: the same nginx, told not to heed the header."""

    async def main():
        buffering = ["proxy_buffering on;", "proxy_ignore_headers X-Accel-Buffering;", "proxy_http_version 1.0;"]
        async with routed(tmp_path, FakeStep(1)) as router, behind_nginx(router, tmp_path, None, buffering) as nginx:
            engine = await streamed(router, nginx, patience_s=0.1)
            assert engine.in_time == 0
            assert engine.spread_s < 0.1  # all in one burst, of what was sent in half a second

    run(main)


@pytest.mark.parametrize(("keepalive_s", "survives"), [(0.3, True), (600, False)], ids=["comments", "silence"])
def test_a_silence_longer_than_nginxs_patience_is_bridged_by_comments(tmp_path, monkeypatch, keepalive_s, survives):
    """Sixty seconds and fifteen, made small. Without the comments the same nginx gives up."""
    monkeypatch.setattr("specdec.router.proxy._FIRST_S", 0.2)

    async def silent(asked: Asked, send: Send) -> None:
        await start(send, 200, ("content-type", "text/event-stream"))
        await chunk(send, b"")
        await asyncio.sleep(3)
        await chunk(send, delta("late"))
        await chunk(send, DONE, more=False)

    async def main():
        impatient = charts_annotations() | {f"{PREFIX}proxy-read-timeout": "1"}
        async with (
            routed(tmp_path, silent, keepalive_s=keepalive_s) as router,
            behind_nginx(router, tmp_path, impatient) as nginx,
        ):
            started = time.monotonic()
            status, text = await read(nginx.url)
            seconds = time.monotonic() - started
            assert status == 200
            assert ("late" in text, "[DONE]" in text) == (survives, survives)
            if survives:
                assert text.count(": keep-alive\n\n") >= 3
            else:
                assert 0.8 < seconds < 2.8
                assert "timed out" in nginx.log

    run(main)


def test_annotations_become_ingress_nginxs_directives():
    own = {f"{PREFIX}{name}": value for name, value in (("proxy-read-timeout", "660"), ("proxy-body-size", "33m"))}
    directives = ingress_directives(own | {"cert-manager.io/issuer": "x", f"{PREFIX}ssl-redirect": "true"})
    assert {"proxy_read_timeout 660s;", "client_max_body_size 33m;"} <= set(directives)
    assert {"client_max_body_size 1m;", "proxy_read_timeout 60s;"} <= set(ingress_directives({}))
    with pytest.raises(ValueError, match="proxy-bufering"):
        ingress_directives({f"{PREFIX}proxy-bufering": "off"})


def test_the_charts_timeouts_are_longer_than_the_routers_own():
    """Its answer says what is wrong; nginx's page does not."""
    directives = ingress_directives(charts_annotations())
    router = render(values={"ingress": {"enabled": True}}).pod_with("router")
    seconds = int(router_settings(router).read_timeout_s)
    for name in ("proxy_read_timeout", "proxy_send_timeout"):
        (timeout,) = (one for one in directives if one.startswith(name))
        assert int(timeout.removeprefix(name).strip(" s;")) > seconds
