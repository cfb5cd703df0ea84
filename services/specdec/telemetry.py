"""The one place that names metrics, and the health routes every service has.

Each service makes its own registry (no global state), so that several can live in one process in tests.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from specdec.errors import SettingsError

if TYPE_CHECKING:
    from specdec.draft.drafters import Drafter
    from specdec.draft.runahead import AheadCounts

_SECONDS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


def setup_logging(service: str, level: str = "INFO") -> None:
    """One line a record on standard error, the service's name in each. Raises SettingsError for an unknown level."""
    level = level.upper()
    if level not in logging.getLevelNamesMapping():
        raise SettingsError(f"SPECDEC_LOG_LEVEL={level}: use DEBUG, INFO, WARNING or ERROR")
    logging.basicConfig(level=level, format=f"%(asctime)s {service} %(levelname)s %(message)s", force=True)
    for noisy in ("httpx", "httpcore", "uvicorn.access"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


class PairMetrics:
    """What a pair did, counted by its verifier from the verdicts."""

    def __init__(self) -> None:
        r = self.registry = CollectorRegistry()
        self.cycles = Counter("specdec_cycles", "Engine cycles that committed tokens", registry=r)
        self.tokens = Counter("specdec_tokens", "Tokens delivered, prompts' first tokens included", registry=r)
        self.proposed = Counter("specdec_proposed_tokens", "Draft tokens verified", registry=r)
        self.accepted = Counter("specdec_accepted_tokens", "Draft tokens that stood", registry=r)
        self.unproposed = Counter(
            "specdec_short_cycles", "Session cycles that verified fewer drafts than ordered", ["reason"], registry=r
        )
        self.accept_length = Histogram(
            "specdec_accept_length",
            "Tokens a session's cycle delivered",
            registry=r,
            buckets=(*range(1, 18), 25, 33, 49, 65),
        )
        self.stage = Histogram(
            "specdec_stage_seconds", "Time of a cycle's stages", ["stage"], registry=r, buckets=_SECONDS
        )
        self.sessions = Gauge("specdec_sessions", "Sessions open now", registry=r)
        self.draft_up = Gauge("specdec_draft_up", "1 while the pair has a draft that answers", registry=r)
        self.routers = Gauge("specdec_routers", "Routers whose orders the pair follows now", registry=r)
        self.dropped = Counter(
            "specdec_dropped",
            "What did not match or came too late, and cost speed only, by cause; frames or rows, of lost_states tokens",
            ["cause"],
            registry=r,
        )
        self._published: dict[str, int] = {}
        self.lost = Counter("specdec_lost_verdict_frames", "Verdict frames that found the ring full", registry=r)

    def publish(self, counts: dict[str, int]) -> None:
        """Takes over the engine's own running counts."""
        for cause, count in counts.items():
            self.dropped.labels(cause).inc(max(0, count - self._published.get(cause, 0)))
        self._published = counts


class DraftMetrics:
    """What a draft did."""

    def __init__(self) -> None:
        r = self.registry = CollectorRegistry()
        self.proposals = Counter("specdec_draft_proposals", "Proposal frames written", registry=r)
        self.tokens = Counter("specdec_draft_tokens", "Draft tokens proposed", registry=r)
        self.seconds = Histogram(
            "specdec_draft_seconds", "From an outcome's arrival to its proposal", registry=r, buckets=_SECONDS
        )
        self.sessions = Gauge("specdec_draft_sessions", "Sessions whose tokens the draft holds", registry=r)
        self.unmatched = Counter("specdec_draft_unmatched_rows", "Outcome rows that fitted no session", registry=r)
        self.garbage = Counter("specdec_draft_garbage_frames", "Outcome frames that were never whole", registry=r)
        self.given_up_states = Counter(
            "specdec_draft_given_up_states", "Tokens whose hidden states came and were not read in time", registry=r
        )
        self.faults = Counter("specdec_draft_faults", "Drafter calls that raised", registry=r)

    def show(self, drafter: "Drafter", *, run_ahead: bool = False) -> None:
        """From now on also says what a drafter counts itself, and how its work ahead does where it does any."""
        self.registry.register(_Own(drafter))
        if run_ahead and (counts := getattr(drafter, "ahead_counts", None)):
            self.registry.register(_Ahead(counts))


class _Own(Collector):
    """What a drafter with weights counts, read when it is asked for."""

    def __init__(self, drafter: "Drafter") -> None:
        self._drafter = drafter

    def collect(self) -> Iterable[Metric]:
        counts: Any = getattr(self._drafter, "counts", None)
        evicted: Any = getattr(self._drafter, "evicted", None)
        if isinstance(evicted, int):  # a user's own drafter may have its own of the name
            yield CounterMetricFamily(
                "specdec_draft_evicted_sessions",
                "Sessions that lost what the draft held of them: its memory is full",
                evicted,
            )
        if hasattr(counts, "late_starts"):
            gaps = CounterMetricFamily(
                "specdec_draft_missing_states",
                "Hidden states of the target that a head did without: late_start, a context begins after the first "
                "token; no_drafts, a proposal is empty because the last state has not come; dropped, tokens' states "
                "that came and found no memory",
                labels=["effect"],
            )
            effects = (
                ("late_start", counts.late_starts),
                ("no_drafts", counts.without_states),
                ("dropped", counts.dropped),
            )
            for effect, count in effects:
                gaps.add_metric([effect], count)
            yield gaps


class _Ahead(Collector):
    """A drafter's counts of its work between outcomes, read when they are asked for."""

    def __init__(self, counts: "AheadCounts") -> None:
        self._counts = counts

    def collect(self) -> Iterable[Metric]:
        counts = self._counts
        results = CounterMetricFamily(
            "specdec_draft_run_ahead",
            "Proposals a session had drafts ready for: hit, it had them all; miss, some or all were drafted on demand; "
            "unused, none were wanted",
            labels=["result"],
        )
        for result, count in (("hit", counts.hits), ("miss", counts.misses), ("unused", counts.unused)):
            results.add_metric([result], count)
        yield results
        yield CounterMetricFamily(
            "specdec_draft_run_ahead_waited", "Hits in a frame that waited for another session's drafts", counts.waited
        )
        yield CounterMetricFamily(
            "specdec_draft_run_ahead_saved_seconds", "Drafting that proposals did not wait for", counts.saved_s
        )
        yield CounterMetricFamily(
            "specdec_draft_read_ahead_tokens", "Committed tokens read before drafts after them were wanted", counts.read
        )


class RouterMetrics:
    """What the router did."""

    def __init__(self) -> None:
        r = self.registry = CollectorRegistry()
        self.requests = Counter("specdec_router_requests", "Requests answered", ["route", "status"], registry=r)
        self.in_flight = Gauge("specdec_router_requests_in_flight", "Requests being answered", registry=r)
        self.first_byte = Histogram(
            "specdec_router_first_byte_seconds", "Until the engine's first byte", registry=r, buckets=_SECONDS
        )
        self.rejected = Counter(
            "specdec_router_rejected",
            "Requests that ended in an error, by its code",
            ["code"],
            registry=r,
        )
        self.admitted = Gauge("specdec_router_admitted_sessions", "Sessions let in, n for n choices", registry=r)
        self.waiting = Gauge("specdec_router_waiting_sessions", "Sessions waiting to be let in", registry=r)
        self.waiting_tokens = Gauge(
            "specdec_router_waiting_tokens", "Their prompts' tokens, estimated from bytes", registry=r
        )
        self.retries = Counter("specdec_router_retries", "Requests sent to a pair again before any answer", registry=r)
        self.paused = Gauge("specdec_router_paused_requests", "Requests whose client does not read", registry=r)
        self.key_reloads = Counter(
            "specdec_router_key_reloads", "API keys read again since their file changed", ["result"], registry=r
        )
        self.loop_lag = Histogram(
            "specdec_router_loop_lag_seconds", "How late the event loop wakes a timer", registry=r, buckets=_SECONDS
        )
        self.orders = Counter("specdec_router_orders", "Orders sent", registry=r)
        self.verdicts = Counter("specdec_router_verdicts", "Verdicts on those orders", registry=r)
        self.sessions = Gauge("specdec_router_sessions", "Sessions driven now", registry=r)
        self.pair_up = Gauge(
            "specdec_router_pair_up", "1 while the loop's stream to the pair is open", ["pair"], registry=r
        )
        self.order_lag = Histogram(
            "specdec_router_verdict_lag_seconds", "From an order to its verdict", registry=r, buckets=_SECONDS
        )
        self.steps = Gauge("specdec_router_steps", "Step count (k) chosen now", ["pair"], registry=r)
        self.expected_rate = Gauge(
            "specdec_router_expected_tokens_per_second", "What the step policy expects of it", ["pair"], registry=r
        )
        self.realised_rate = Gauge(
            "specdec_router_realised_tokens_per_second",
            "What came of it, lately, in decoding time",
            ["pair"],
            registry=r,
        )
        self.utility = Gauge(
            "specdec_router_utility", "The same over what plain decoding is estimated to give", ["pair"], registry=r
        )
        self.probes = Counter(
            "specdec_router_probe_cycles", "Cycles ordered to learn, not to gain", ["pair"], registry=r
        )
        self.switches = Counter("specdec_router_step_switches", "Changes of the chosen k", ["pair"], registry=r)

    def forget(self, pair: str) -> None:
        """A pair that has left is named no more: pods come and go."""
        gauges = (self.pair_up, self.steps, self.expected_rate, self.realised_rate, self.utility)
        for metric in (*gauges, self.probes, self.switches):
            with contextlib.suppress(KeyError):
                metric.remove(pair)


def health_routes(app: FastAPI, registry: CollectorRegistry | None, readiness: Callable[[], dict[str, Any]]) -> None:
    """Adds /livez (the event loop turns), /readyz (503 with reasons until `readiness()["ready"]`) and, of a registry,
    /metrics."""
    started = time.monotonic()

    @app.get("/livez")
    async def livez() -> dict[str, Any]:
        return {"live": True, "uptime_s": round(time.monotonic() - started, 1)}

    @app.get("/readyz")
    async def readyz() -> JSONResponse:
        state = readiness()
        return JSONResponse(state, status_code=200 if state["ready"] else 503)

    if registry is None:
        return

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


def health_app(registry: CollectorRegistry, readiness: Callable[[], dict[str, Any]]) -> FastAPI:
    """An application with nothing but the health routes."""
    app = FastAPI(openapi_url=None)
    health_routes(app, registry, readiness)
    return app
