"""The admin port of a loaded router's process: a probe that is late restarts a router that works."""

import asyncio
import contextlib
import http.client
import itertools
import os
import sys
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from edge_kit import CHAT, raw_post
from specdec.router.service import allow_open_files
from specdec.stack import Service, free_ports

HOST = "127.0.0.1"
STREAMS, EVENTS_S, BODIES = 500, 1, 4
PROBES, PROBERS, PAUSE_S = 1000, 5, 0.005
SLOW = raw_post(CHAT, b'{"messages":[],"stream":true,"max_tokens":100000}')
PICTURE = raw_post(CHAT, b'{"messages":["data:image/png;base64,%s"],"stream":true,"max_tokens":2}' % (b"A" * 5_000_000))


@pytest.fixture
def ports(tmp_path):
    """(API, admin) of a router's process in front of the stand-in for a pair."""
    allow_open_files()
    engine_port, control_port, port, admin_port = free_ports(4)
    engine_command = [sys.executable, "-m", "specdec.standin", str(engine_port), str(control_port), str(EVENTS_S)]
    router_command = [sys.executable, "-m", "specdec", "router", "--port", str(port), "--admin-port", str(admin_port)]
    router_command += ["--pairs", f"{HOST}:{control_port}", "--drain-s", "0"]
    admin = f"http://{HOST}:{admin_port}"
    with (
        Service("stand-in", engine_command, f"http://{HOST}:{engine_port}", tmp_path / "engine.log", os.environ),
        Service("router", router_command, admin + "/readyz", tmp_path / "router.log", os.environ) as router,
    ):
        router.wait_ready(30)
        yield port, admin_port


@contextlib.asynccontextmanager
async def streams(port: int) -> AsyncIterator[list[asyncio.StreamReader]]:
    """Answers that run for longer than the test."""
    gate = asyncio.Semaphore(50)
    writers = []

    async def one() -> asyncio.StreamReader:
        async with gate:
            reader, writer = await asyncio.open_connection(HOST, port)
            writers.append(writer)
            writer.write(SLOW)
            assert b" 200 " in await reader.readline()
            return reader

    try:
        yield await asyncio.gather(*(one() for _ in range(STREAMS)))
    finally:
        for writer in writers:
            writer.transport.abort()


async def upload(port: int) -> bytes:
    """One large body's answer."""
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(PICTURE)
    status = await reader.readline()
    await reader.readuntil(b"[DONE]")
    writer.close()
    return status


def probe(admin_port: int, path: str) -> list[float]:
    """How long each of a prober's probes took, in seconds; each on a connection of its own, as a kubelet's."""
    took = []
    for _ in range(PROBES // PROBERS):
        began = time.monotonic()
        connection = http.client.HTTPConnection(HOST, admin_port, timeout=10)
        with contextlib.closing(connection):
            connection.request("GET", path)
            assert connection.getresponse().status == 200
        took.append(time.monotonic() - began)
        time.sleep(PAUSE_S)  # so that they fall into all that a body's way takes
    return took


def test_probes_are_in_time_while_many_streams_run_and_large_bodies_come(ports):
    port, admin_port = ports

    async def main():
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(PROBERS) as probers:
            async with streams(port) as running:
                paths = ["/livez", "/readyz", "/readyz", "/livez", "/readyz"]
                probing = [loop.run_in_executor(probers, probe, admin_port, path) for path in paths]
                uploads = []
                while not all(one.done() for one in probing):
                    uploads += await asyncio.gather(*(upload(port) for _ in range(BODIES)))
                took = sorted(itertools.chain(*await asyncio.gather(*probing)))
                assert len(took) == PROBES
                assert len(uploads) >= BODIES
                assert all(b" 200 " in status for status in uploads)
                assert not any(reader.at_eof() for reader in running)
                assert took[-1] < 5
                assert took[int(0.99 * PROBES)] < 0.5

    asyncio.run(asyncio.wait_for(main(), 30))
