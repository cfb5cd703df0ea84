"""The verifier: makes the segment, starts vLLM with the plug-ins, serves control and health, stops all of it."""

import asyncio
import json
import logging
import os
import shutil
import signal
import sys
import time
from typing import Any

import grpc
import httpx
from fastapi import FastAPI, Response
from fastapi.responses import PlainTextResponse

import specdec
from specdec.channel.layout import Layout
from specdec.channel.segment import Role, Segment, now_ns, segment_path
from specdec.control_auth import ControlAuth
from specdec.errors import SettingsError, SetupError
from specdec.guard import Guarded
from specdec.hub import DEMO_MODEL, model_folder
from specdec.proto import speculation_pb2 as pb
from specdec.proto import speculation_pb2_grpc as pb_grpc
from specdec.scratch import Scratch
from specdec.serve import bracketed, listen, serving
from specdec.telemetry import PairMetrics, health_app
from specdec.tracing import PROTOCOL, traces_url
from specdec.verifier import HEAD_VARIABLE, SEGMENT_VARIABLE
from specdec.verifier.control import Control
from specdec.verifier.seams import vllm_version
from specdec.verifier.settings import VerifierSettings

log = logging.getLogger(__name__)
_BEAT_LATE_NS = 2_000_000_000
_SLOW_ANSWERS = 3  # of vLLM's /health in a row that are no answer: its process may be busy with a large prompt
_KILL_S = 5  # of the grace, for vLLM to end once its answers have
_SERVER = (
    ("grpc.keepalive_time_ms", 5000),  # a router whose host has vanished says nothing
    ("grpc.keepalive_timeout_ms", 3000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.keepalive_permit_without_calls", 1),
)
REFUSED = frozenset(("--pipeline-parallel-size", "-pp", "--data-parallel-size", "-dp"))
# What the plug-ins are told to vLLM with; a user's own copy of one would take them out again.
OURS = frozenset(
    ("--worker-cls", "--scheduler-cls", "--speculative-config", "--spec-method", "--spec-model", "--spec-tokens")
    + ("--model", "--host", "--port", "--max-num-seqs")
)


def model_argument(model: str) -> str:
    """The model as vLLM is told. The demo's is made on the first call."""
    return str(model_folder(model, "--model")) if model == DEMO_MODEL else model


def engine_command(settings: VerifierSettings, extra: list[str]) -> list[str]:
    """vLLM's stock OpenAI server with the plug-ins. Raises SetupError if `extra` takes one of them out."""
    for word in extra:
        # vLLM's parser takes dotted forms too, and any beginning of a flag that no other shares
        flag = word.partition("=")[0].partition(".")[0].replace("_", "-")
        if flag in REFUSED:
            raise SetupError(f"{word}: several cycles would run at once, which the loop cannot order; run more pairs")
        if flag == "-sc" or (len(flag) > 2 and any(ours.startswith(flag) for ours in OURS)):
            raise SetupError(f"{word}: the verifier sets this itself; use its own flag, or leave it out")
    speculation = {
        "method": "custom_class",
        "model": "specdec.verifier.cpu.NoProposer",
        "num_speculative_tokens": settings.max_steps,
    }
    return [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", model_argument(settings.model), "--host", settings.host, "--port", str(settings.port)),
        *("--max-num-seqs", str(settings.max_num_seqs)),
        *("--worker-cls", "specdec.verifier.cpu.Worker"),
        *("--scheduler-cls", "specdec.verifier.scheduler.Scheduler"),
        *("--speculative-config", json.dumps(speculation)),
        *("--shutdown-timeout", str(max(0, int(settings.stop_grace_s) - _KILL_S))),  # running answers end in it
        *("--disable-access-log-for-endpoints", "/health,/metrics"),  # the supervisor asks every second
        *(("--otlp-traces-endpoint", url) if (url := traces_url()) else ()),  # its spans join the router's
        *extra,
    ]


def engine_environment(**more: str) -> dict[str, str]:
    """vLLM's environment: the user's, and what a CPU and traces need where the user says nothing."""
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    if traces_url():
        defaults |= {
            "OTEL_SERVICE_NAME": "specdec-verifier",
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": PROTOCOL,
            "OTEL_EXPORTER_OTLP_TIMEOUT": "2",  # seconds; vLLM's end waits for a collector as long
        }
    return {**defaults, **os.environ, **more}


class Supervisor:
    """One verifier process."""

    def __init__(self, settings: VerifierSettings, extra: list[str]) -> None:
        self._settings = settings
        self._command = engine_command(settings, extra)
        self._vllm_version = vllm_version()
        self._head = model_folder(settings.head, "--head", weights=False) if settings.head else None
        if self._head and not (self._head / "config.json").is_file():
            raise SettingsError(f"--head {settings.head}: it has no config.json")
        if settings.host in ("0.0.0.0", "::") and not settings.advertise:
            raise SettingsError(f"--host {settings.host} needs --advertise: the URL under which routers reach vLLM")
        self._address = bracketed(settings.host)
        self._url = settings.advertise or settings.host
        if "://" not in self._url:
            self._url = f"http://{bracketed(self._url)}:{settings.port}"
        self._auth = ControlAuth(
            settings.control_secret_file,
            settings.control_tls_cert,
            settings.control_tls_key,
            settings.control_tls_ca,
        )
        if settings.host not in ("127.0.0.1", "::1", "localhost") and not self._auth.given:
            log.warning("--host %s: whoever reaches --control-port can order; see --control-secret-file", settings.host)
        self._engine_ready = False
        self._slow_answers = 0
        self._client = httpx.AsyncClient(timeout=5, trust_env=False)  # making one takes as long as several cycles
        self._metrics = PairMetrics()
        self._stopping = asyncio.Event()

    async def run(self) -> int:
        """Serves until SIGTERM or SIGINT (returns 0) or until vLLM ends by itself or stands still (returns 1)."""
        s = self._settings
        health = listen(s.host, s.health_port, "--health-port")
        listen(s.host, s.port, "--port").close()  # vLLM would find out only after loading the model
        listen(s.host, s.control_port, "--control-port").close()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)
        layout = Layout(2 * s.max_num_seqs, s.max_steps, states_mb=s.states_mb if self._head else 0)
        with Segment.create(segment_path(s.pair), layout) as segment:
            self._segment = segment
            segment.word("control.draft_limit_us").value = int(s.draft_deadline_ms * 1000)
            self._metrics.info.labels(s.pair, s.model, specdec.__version__, self._vllm_version).set(1)
            self._metrics.segment_bytes.set(layout.size)
            self._control = Control(segment, self._describe, self._metrics)
            server = grpc.aio.server(interceptors=self._auth.interceptors(), options=_SERVER)
            pb_grpc.add_SpeculationServicer_to_server(self._control, server)
            self._auth.listen(server, f"{self._address}:{s.control_port}")
            sockets = Scratch("specdec-vllm-")  # vLLM leaves its sockets where it makes them
            variables = {SEGMENT_VARIABLE: str(segment.path), HEAD_VARIABLE: str(self._head or "")}
            variables["VLLM_RPC_BASE_PATH"] = os.environ.get("VLLM_RPC_BASE_PATH", str(sockets.path))
            engine = Guarded(self._command, env=engine_environment(**variables))
            self._control.start()
            try:
                async with serving(self._health_app(), health):
                    await server.start()
                    return await self._watch(engine)
            finally:
                self._control.stop()
                await server.stop(1)
                await asyncio.to_thread(engine.stop, s.stop_grace_s)
                sockets.remove()
                await self._client.aclose()

    def _health_app(self) -> FastAPI:
        """The health routes, and vLLM's own metrics: its port, which has no keys, may stay closed to others."""
        app = health_app(self._metrics.registry, self._readiness)

        @app.get("/vllm/metrics")
        async def vllm_metrics() -> Response:
            try:
                answer = await self._client.get(f"http://{self._address}:{self._settings.port}/metrics", timeout=10)
            except httpx.HTTPError as error:
                return PlainTextResponse(f"vLLM does not answer: {type(error).__name__}\n", status_code=503)
            return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))

        return app

    async def _watch(self, engine: Guarded) -> int:
        deadline = time.monotonic() + self._settings.start_timeout_s
        was_up = draft_was_up = False
        while not self._stopping.is_set():
            if self._control.fault is not None:
                log.error("verdicts are not passed on any more: %s", self._control.fault)
                return 1
            code = engine.poll()
            if code is not None:
                log.error("vLLM ended with exit code %s; its own lines above say why", code)
                return 1
            if stands := self._stands_still(self._settings.dead_s):
                log.error("the engine %s: giving it up", stands)
                return 1
            ready = await self._healthy()
            if ready and not self._engine_ready:
                log.info("ready: %s on %s, pair %s", self._settings.model, self._url, self._settings.pair)
            self._engine_ready = ready
            if not ready and not was_up and time.monotonic() > deadline:
                log.error("vLLM was not ready after %.0f s", self._settings.start_timeout_s)
                return 1
            was_up = was_up or ready
            up, detail = self._draft_state()
            if draft_was_up != up:
                log.info("draft %s", detail if up else f"down: {detail}")
            draft_was_up = up
            self._metrics.engine_up.set(ready)
            self._metrics.draft_up.set(up)
            self._metrics.routers.set(self._control.routers)
            self._metrics.publish(self._segment.counts)
            self._metrics.shared_free.set(shutil.disk_usage(self._segment.path.parent).free)
            try:
                await asyncio.wait_for(self._stopping.wait(), 1.0 if ready else 0.25)
            except TimeoutError:
                continue
        return 0

    async def _healthy(self) -> bool:
        """Whether vLLM says so. One that was healthy and does not answer in time still is, for a while."""
        try:
            healthy = (
                await self._client.get(f"http://{self._address}:{self._settings.port}/health")
            ).status_code == 200
        except httpx.TimeoutException:
            self._slow_answers += 1
            return self._engine_ready and self._slow_answers < _SLOW_ANSWERS
        except httpx.HTTPError:
            healthy = False
        self._slow_answers = 0
        return healthy

    def _draft_state(self) -> tuple[bool, str]:
        if not self._segment.alive(Role.DRAFT):
            return False, "no draft process has joined the pair"
        if not self._segment.word("draft.generation").value:
            return False, "the draft is starting"
        silent_ns = now_ns() - self._segment.word("draft.beat_ns").value
        if silent_ns > _BEAT_LATE_NS:
            return False, f"the draft has been silent for {silent_ns / 1e9:.0f} s"
        return True, f"up, process {self._segment.word('draft.pid').value}"

    def _step_age_s(self) -> float:
        """Since the engine began a cycle; 0 while no session is open."""
        silent_s = (now_ns() - self._segment.word("engine.beat_ns").value) / 1e9
        return max(0.0, silent_s) if self._control.sessions else 0.0

    def _stands_still(self, limit_s: float) -> str:
        """How, if the engine has for longer than `limit_s`; else nothing."""
        if (silent_s := self._step_age_s()) > limit_s:
            return f"has begun no cycle for {silent_s:.0f} s, with sessions open"
        pulse_ns = self._segment.word("engine.pulse_ns").value  # 0: it has not started yet
        if pulse_ns and (silent_s := (now_ns() - pulse_ns) / 1e9) > limit_s:
            return f"has given no sign of life for {silent_s:.0f} s"
        return ""

    def _readiness(self) -> dict[str, Any]:
        up, detail = self._draft_state()
        reasons = [] if self._engine_ready else ["vLLM does not answer /health yet"]
        if stands := self._stands_still(self._settings.stall_s):
            reasons.append(f"the engine {stands}")
        return {
            "ready": not reasons,
            "reasons": reasons,
            "draft": {"up": up, "detail": detail},
            "routers": self._control.routers,
        }

    def _describe(self) -> pb.PairDescription:
        up, detail = self._draft_state()
        return pb.PairDescription(
            pair=self._settings.pair,
            model=self._settings.model,
            http_url=self._url,
            max_steps=self._settings.max_steps,
            max_sessions=self._segment.layout.max_sessions,
            engine_ready=self._readiness()["ready"],
            draft_up=up,
            draft_detail=detail,
            specdec_version=specdec.__version__,
            vllm_version=self._vllm_version,
            step_age_ms=min(2**32 - 1, int(self._step_age_s() * 1000)),
        )
