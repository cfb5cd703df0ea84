"""`specdec bench edge`: what the router adds, in front of a stand-in engine that computes nothing."""

import asyncio
import json
import os
import re
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import httpx
from pydantic import Field
from pydantic_settings import CliImplicitFlag, SettingsConfigDict

from specdec.errors import SetupError
from specdec.origin import origin
from specdec.settings import Settings
from specdec.stack import Service, free_ports

_HOST = "127.0.0.1"
_RAMP_S = 1.0  # in which the many streams begin: two hundred in the same moment are no load that lasts
_BODY = {"model": "stand-in", "messages": [{"role": "user", "content": "Say something."}], "stream": True}
_EVENT = b"data: {"
_LAG = re.compile(r'^specdec_router_loop_lag_seconds_bucket\{le="([^"]+)"\} (\S+)$', re.MULTILINE)


class EdgeBenchSettings(Settings):
    """What the router adds to time to first token and takes of throughput, in front of a stand-in engine, and how late
    its event loop is. Direct and routed requests take turns."""

    model_config = SettingsConfigDict(env_prefix="SPECDEC_BENCH_EDGE_")
    section: ClassVar[str] = "bench edge"

    requests: int = Field(200, ge=10, description="requests each way, one at a time, for the time to first token")
    streams: int = Field(64, ge=1, description="streams at once, for throughput")
    many: int = Field(200, ge=1, description="streams at once, for the event loop's lag")
    rate: float = Field(20, gt=0, description="cycles a second, and events a second of each stream")
    seconds: float = Field(10, gt=1, description="length of each run of streams")
    rounds: int = Field(2, ge=1, description="runs of --streams each way")
    json_: CliImplicitFlag[bool] = Field(False, alias="json", description="print the result as JSON instead of a table")
    out: Path | None = Field(None, description="file for the result")


@dataclass
class Run:
    """What streams of one run got. Times in seconds."""

    events: int = 0
    seconds: float = 0.0
    first_s: list[float] = field(default_factory=list)
    failed: int = 0

    @property
    def rate(self) -> float:
        """Events a second, all streams together."""
        return self.events / self.seconds


def bench_edge(argv: list[str]) -> int:
    """The command. Returns 1 where a request failed."""
    settings = EdgeBenchSettings.load(argv)
    with tempfile.TemporaryDirectory(prefix="specdec-edge-") as folder:
        result = _measured(settings, Path(folder))
    result = {**origin(["specdec", "bench", "edge", *argv], "aiohttp", "uvicorn", "uvloop"), **result}
    if settings.out:
        settings.out.write_text(json.dumps(result) + "\n")
    print(json.dumps(result) if settings.json_ else _table(result), flush=True)
    return int(result["failed"] > 0)


def _measured(settings: EdgeBenchSettings, folder: Path) -> dict[str, Any]:
    engine_port, control_port, port, admin_port = free_ports(4)
    direct, routed = f"http://{_HOST}:{engine_port}", f"http://{_HOST}:{port}"
    admin = f"http://{_HOST}:{admin_port}"
    engine_command = [sys.executable, "-m", "specdec.standin", str(engine_port), str(control_port), str(settings.rate)]
    router_command = [sys.executable, "-m", "specdec", "router", "--port", str(port), "--admin-port", str(admin_port)]
    router_command += ["--pairs", f"{_HOST}:{control_port}"]
    with Service("stand-in", engine_command, direct, folder / "stand-in.log", os.environ) as engine:
        engine.wait_ready(30)
        with Service("router", router_command, admin + "/readyz", folder / "router.log", os.environ) as router:
            router.wait_ready(30)
            return asyncio.run(_compare(settings, direct, routed, admin))


async def _compare(settings: EdgeBenchSettings, direct: str, routed: str, admin: str) -> dict[str, Any]:
    first: dict[str, Run] = {direct: Run(), routed: Run()}
    for url in (direct, routed):  # the first of each opens connections and files
        for _ in range(5):
            await _stream(url, 1, Run())
    for _ in range(settings.requests):
        for url, run in first.items():
            await _stream(url, 1, run)
    streams: dict[str, list[Run]] = {direct: [], routed: []}
    for _ in range(settings.rounds):
        for url, runs in streams.items():
            runs.append(await _together(url, settings.streams, settings))
    running = asyncio.create_task(_together(routed, settings.many, settings, ramp_s=_RAMP_S))
    await asyncio.sleep(_RAMP_S)
    before = await _lags(admin)
    await asyncio.sleep(settings.seconds - _RAMP_S)  # all streams are open in this time
    lags = [(le, count - before.get(le, 0)) for le, count in (await _lags(admin)).items()]
    many = await running
    ttft = {url: statistics.median(run.first_s) * 1000 for url, run in first.items()}
    rates = {url: sum(run.events for run in runs) / sum(run.seconds for run in runs) for url, runs in streams.items()}
    everyone = [*first.values(), *streams[direct], *streams[routed], many]
    return {
        "ttft_ms": {"direct": round(ttft[direct], 2), "routed": round(ttft[routed], 2)},
        "added_ttft_ms": round(ttft[routed] - ttft[direct], 2),
        "streams": settings.streams,
        "events_s": {"direct": round(rates[direct], 1), "routed": round(rates[routed], 1)},
        "throughput": round(rates[routed] / rates[direct], 4),
        "many": settings.many,
        "many_events_s": round(many.rate, 1),
        "lag_p99_ms": _quantile_ms(lags, 0.99),
        "rate": settings.rate,
        "failed": sum(run.failed for run in everyone),
    }


async def _together(url: str, streams: int, settings: EdgeBenchSettings, ramp_s: float = 0) -> Run:
    """So many streams, begun within `ramp_s`."""
    run = Run()
    started = time.perf_counter()

    async def one(number: int) -> None:
        await asyncio.sleep(ramp_s * number / streams)
        await _stream(url, int(settings.rate * settings.seconds), run)

    await asyncio.gather(*(one(number) for number in range(streams)))
    run.seconds = time.perf_counter() - started
    return run


async def _stream(url: str, events: int, run: Run) -> None:
    """One request, read as it comes; a client of its own, so that the measuring costs little of the machine."""
    body = json.dumps({**_BODY, "max_tokens": events}).encode()
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    started = time.perf_counter()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
    seen, tail = 0, b""
    while b"[DONE]" not in tail:
        part = await reader.read(1 << 16)
        if not part:
            break
        text = tail[-16:] + part
        new = text.count(_EVENT) - tail[-16:].count(_EVENT)
        if new and not seen:
            run.first_s.append(time.perf_counter() - started)
        seen += new
        tail = text
    run.failed += b"[DONE]" not in tail
    run.events += seen
    writer.close()


async def _lags(admin: str) -> dict[float, float]:
    """The router's histogram: wake-ups at most so many seconds late."""
    async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
        text = (await client.get(admin + "/metrics")).text
    return {float(le): float(count) for le, count in _LAG.findall(text)}


def _quantile_ms(lags: list[tuple[float, float]], share: float) -> float:
    """The bucket's upper end in which the quantile is."""
    total = lags[-1][1]
    if not total:
        raise SetupError("the router has not measured its event loop")
    return round(next(le for le, count in lags if count >= share * total) * 1000, 2)


def _table(result: dict[str, Any]) -> str:
    ttft, events = result["ttft_ms"], result["events_s"]
    rows = [
        ("", "direct", "routed", "difference"),
        ("time to first token, ms, median", ttft["direct"], ttft["routed"], f"+{result['added_ttft_ms']}"),
        (f"events a second, {result['streams']} streams", events["direct"], events["routed"], result["throughput"]),
        (f"event loop's lag, ms, p99, {result['many']} streams", "", f"<= {result['lag_p99_ms']}", ""),
    ]
    lines = [f"{name:<46} {one!s:>10} {two!s:>10} {more!s:>11}" for name, one, two, more in rows]
    failed = [f"{result['failed']} requests failed"] if result["failed"] else []
    return "\n".join([*lines, *failed])
