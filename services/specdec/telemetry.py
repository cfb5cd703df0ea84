"""The one place that names metrics, and the health routes every service has.

METRICS is the whole table: docs/metrics.md is written from it (tools/metrics_doc.py), and each service's class makes
its part of it. Each service has its own registry (no global state), so that several can live in one process in tests.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from specdec.proto import speculation_pb2 as pb

if TYPE_CHECKING:
    from specdec.draft.drafters import Drafter
    from specdec.draft.runahead import AheadCounts

_SECONDS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_LENGTHS = (*range(1, 18), 25, 33, 49, 65)
_RATES = (1, 2.5, 5, 10, 15, 20, 30, 40, 60, 80, 120, 160, 240, 320, 480, 640, 1000, 2000)

ROUTES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/models",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/tokenize",
    "/detokenize",
    "other",
)
OUTCOMES = ("stop", "length", "tool_calls", "content_filter", "ok", "refused", "abort", "error")
REJECTIONS = (
    *("invalid_request", "invalid_json", "context_length_exceeded", "invalid_api_key", "permission_denied"),
    *("not_found", "model_not_found", "method_not_allowed", "conflict", "request_too_large", "too_many_waiting"),
    *("queue_timeout", "engine_overloaded", "internal_error", "not_supported", "no_pair", "engine_unavailable"),
    *("draining", "engine_timeout", "request_timeout"),
)
SESSION_STATES = ("reading", "speculating", "plain", "standing")


@dataclass(frozen=True)
class Entry:
    """One metric: `name` as a scrape shows it, and what to do when it moves. `labels` have their values, where those
    are listed, or else a sentence that says what bounds them."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    help: str
    act: str
    labels: Mapping[str, tuple[str, ...] | str] = field(default_factory=dict)
    buckets: tuple[float, ...] = _SECONDS


_PAIR_LABEL: Mapping[str, str] = {"pair": "control addresses of the router's pairs"}
_POSITION_LABEL: Mapping[str, str] = {"position": "1 to the verifier's `--max-steps`, at most 64"}
STAGES = ("draft", "channel", "schedule", "verify", "output")
_CAUSES = ("late", "stale", "garbage", "lost_verdicts", "lapsed_leases", "resyncs", "no_slot", "lost_states")
_SHORT = ("none", "draft_down", "draft_late", "draft_short", "budget", "standing", "draft_limit")

ROUTER = (
    Entry(
        "specdec_router_requests_total",
        "counter",
        "requests",
        "Requests answered",
        "A rise of 5xx: `specdec_router_outcomes_total` says whether answers failed, the router's log says why. 429: "
        "more load than the limits allow. 401 and 404: a client's settings.",
        {"route": ROUTES, "status": "HTTP statuses; 499: the client went first"},
    ),
    Entry(
        "specdec_router_outcomes_total",
        "counter",
        "requests",
        "How requests ended, each in exactly one outcome: stop, length, tool_calls and content_filter are the finish "
        "reasons of whole answers, ok a whole answer without one, refused a status 4xx, abort a client that went, "
        "or read nothing for --write-timeout-s, before its answer was whole, error a status 5xx or an answer that "
        "broke off",
        "error: look at the pairs (`specdec_router_pair_ready`) and at vLLM's log. abort: clients give up; look at the "
        "latencies and at proxies' timeouts. Much length: clients' max_tokens cut answers.",
        {"route": ROUTES, "outcome": OUTCOMES},
    ),
    Entry(
        "specdec_router_requests_in_flight",
        "gauge",
        "requests",
        "Requests being answered",
        "Near the admission limit: add pairs. Above 0 without traffic: clients that do not read.",
    ),
    Entry(
        "specdec_router_rejected_total",
        "counter",
        "requests",
        "Requests that ended in an error before their answer began, by its code",
        "too_many_waiting, queue_timeout: more load than fits; add pairs. no_pair, engine_unavailable, engine_timeout: "
        "the pairs. invalid_api_key: a client's key, or a key file that did not come along. The rest: clients.",
        {"code": REJECTIONS},
    ),
    Entry(
        "specdec_router_admitted_sessions",
        "gauge",
        "sessions",
        "Sessions let in, n for n choices",
        "At the limit for long: add pairs, or raise `--max-sessions` if the engines have room.",
    ),
    Entry(
        "specdec_router_waiting_sessions",
        "gauge",
        "sessions",
        "Sessions waiting to be let in",
        "Above 0 for minutes: more load than the pairs take. Near `--max-waiting`, requests are refused with 429.",
    ),
    Entry(
        "specdec_router_waiting_tokens",
        "gauge",
        "tokens",
        "Their prompts' tokens, estimated from bytes",
        "As the waiting sessions; the bound is `--max-waiting-tokens`.",
    ),
    Entry(
        "specdec_router_waiting_bytes",
        "gauge",
        "bytes",
        "Requests' bodies in memory: being received, waiting, and sent to a pair that has not begun to answer",
        "Near `--max-waiting-mb`, requests with large bodies are refused with 429: pictures or long prompts wait, "
        "answers that are not streamed take long, or uploads are slow. Add pairs, or raise it with the router's "
        "memory.",
    ),
    Entry(
        "specdec_router_retries_total",
        "counter",
        "requests",
        "Requests sent to a pair again before any answer",
        "Above 0: a pair fails while it says that it is ready; see its log.",
    ),
    Entry(
        "specdec_router_paused_requests",
        "gauge",
        "requests",
        "Requests whose client does not read",
        "Many: a proxy in front buffers or has stalled.",
    ),
    Entry(
        "specdec_router_key_reloads_total",
        "counter",
        "reloads",
        "API keys read again since their file changed",
        "failed: the file is not readable or not well-formed; the keys before it stay in force.",
        {"result": ("ok", "failed")},
    ),
    Entry(
        "specdec_router_loop_lag_seconds",
        "histogram",
        "seconds",
        "How late the event loop wakes a timer",
        "p99 above 50 ms: the router's core is full; add routers.",
    ),
    Entry(
        "specdec_router_request_seconds",
        "histogram",
        "seconds",
        "From a request's arrival to its answer's last byte",
        "Compare with the time to the first token and per output token: they say which part grew.",
        {"route": ROUTES},
    ),
    Entry(
        "specdec_router_first_byte_seconds",
        "histogram",
        "seconds",
        "From sending a request to a pair until the first byte of its answer",
        "As the time to first token, without what the router itself takes.",
    ),
    Entry(
        "specdec_router_time_to_first_token_seconds",
        "histogram",
        "seconds",
        "From a request's arrival to the first chunk of its stream (streamed chat and text completions)",
        "Up with `specdec_router_engine_queue_seconds`: too few sessions fit the engine; add pairs. Up alone: longer "
        "prompts, or fewer of them in vLLM's prefix cache.",
    ),
    Entry(
        "specdec_router_time_per_output_token_seconds",
        "histogram",
        "seconds",
        "From a stream's first chunk to its last byte, for each token after the first",
        "Up: see whether cycles became longer (`specdec_cycle_seconds`) or yield less (`specdec_accept_length`).",
    ),
    Entry(
        "specdec_router_engine_queue_seconds",
        "histogram",
        "seconds",
        "From sending a request to a pair until its first session ran there",
        "Up: vLLM has no room for more sessions. Add pairs, or raise `--max-num-seqs` and the KV cache.",
    ),
    Entry(
        "specdec_router_proxy_seconds",
        "histogram",
        "seconds",
        "The router's own part: request, from arrival to sending it to a pair, its body's upload included; answer, "
        "handing one chunk to the client's connection",
        "request up: slow uploads, or admission. answer up: clients read slowly, or the router's core is full (compare "
        "`process_cpu_seconds_total` with 1 a second): add routers.",
        {"part": ("request", "answer")},
    ),
    Entry(
        "specdec_router_tokens_total",
        "counter",
        "tokens",
        "Tokens delivered to this router's sessions, from each answer's head on; over all routers the sum is what they "
        "served",
        "Its rate is the load; compare with `specdec_tokens_total`, which also has what came to vLLM directly.",
    ),
    Entry(
        "specdec_router_orders_total",
        "counter",
        "orders",
        "Orders sent to pairs",
        "Far more than verdicts: verdicts get lost, or pairs are slow. None under load: the loop's stream is down.",
    ),
    Entry(
        "specdec_router_verdicts_total",
        "counter",
        "verdicts",
        "Verdicts received on those orders",
        "As `specdec_router_orders_total`.",
    ),
    Entry(
        "specdec_router_verdict_lag_seconds",
        "histogram",
        "seconds",
        "From sending an order to the first verdict under it, the cycle included",
        "More than `specdec_cycle_seconds` a good deal: with a window of 1 that is lost time; raise `--window`. Less "
        "`specdec_order_lag_seconds` it is the network and the router.",
    ),
    Entry(
        "specdec_router_sessions",
        "gauge",
        "sessions",
        "Sessions this router drives now",
        "0 under load: requests carry no session; see `specdec_router_pair_up`.",
    ),
    Entry(
        "specdec_router_pair_up",
        "gauge",
        "0 or 1",
        "1 while the loop's stream to the pair is open",
        "0 with the pair ready: it answers, but never speculates. The router's log has the cause.",
        _PAIR_LABEL,
    ),
    Entry(
        "specdec_router_pair_ready",
        "gauge",
        "0 or 1",
        "1 while the pair's vLLM answers",
        "0: no request goes there. The verifier's /readyz and log say why.",
        _PAIR_LABEL,
    ),
    Entry(
        "specdec_router_steps",
        "gauge",
        "drafts",
        "Step count (k) the policy has chosen now",
        "0: speculation would lose now. See accept length and stages for why.",
        _PAIR_LABEL,
    ),
    Entry(
        "specdec_router_expected_tokens_per_second",
        "gauge",
        "tokens/second",
        "What the step policy expects of its choice",
        "Far from what is realised: costs change faster than they are learnt; other work on the machine.",
        _PAIR_LABEL,
    ),
    Entry(
        "specdec_router_realised_tokens_per_second",
        "gauge",
        "tokens/second",
        "Tokens a second of decoding time, lately",
        "Compare with `specdec_router_plain_tokens_per_second`.",
        _PAIR_LABEL,
    ),
    Entry(
        "specdec_router_plain_tokens_per_second",
        "gauge",
        "tokens/second",
        "What plain decoding is estimated to give at the present batch and context",
        "It falls with longer contexts and rises with the batch; a fall at the same load means a slower target.",
        _PAIR_LABEL,
    ),
    Entry(
        "specdec_router_utility",
        "gauge",
        "ratio",
        "Realised tokens a second over what plain decoding is estimated to give",
        "Below 1 for minutes: speculation loses. Use `--steps 0 --policy fixed` to be sure, then look at the stages.",
        _PAIR_LABEL,
    ),
    Entry(
        "specdec_router_probe_cycles_total",
        "counter",
        "cycles",
        "Cycles ordered to learn, not to gain",
        "They cost at most 0.5 % of the time; more than 5 % of all cycles is worth a look at the log.",
        _PAIR_LABEL,
    ),
    Entry(
        "specdec_router_step_switches_total",
        "counter",
        "changes",
        "Changes of the chosen k",
        "Several a second: two choices are as good as each other. No harm by itself.",
        _PAIR_LABEL,
    ),
)

PAIR = (
    Entry(
        "specdec_pair_info",
        "gauge",
        "always 1",
        "The pair and its versions",
        "Join by `instance` to see which model or version a figure is of.",
        {
            "pair": "the pair's name",
            "model": "the served model",
            "specdec": "this package's version",
            "vllm": "vLLM's",
        },
    ),
    Entry(
        "specdec_engine_up",
        "gauge",
        "0 or 1",
        "1 while vLLM answers its health check",
        "0: vLLM is starting, or hangs; its lines are in the verifier's log.",
    ),
    Entry(
        "specdec_draft_up",
        "gauge",
        "0 or 1",
        "1 while the pair has a draft that answers",
        "0: the pair decodes plainly. The draft's log says why it ended; /readyz has the detail.",
    ),
    Entry(
        "specdec_routers",
        "gauge",
        "routers",
        "Routers whose orders the pair follows now",
        "0: nobody orders, so nothing speculates. Fewer than run: see those routers' logs.",
    ),
    Entry(
        "specdec_sessions",
        "gauge",
        "sessions",
        "Sessions open now",
        "At vLLM's `--max-num-seqs`: others wait.",
    ),
    Entry(
        "specdec_sessions_by_state",
        "gauge",
        "sessions",
        "The same by what they did last: reading a prompt, speculating (k above 0), plain (k = 0 by order), standing "
        "(no order: no router, or its lease ran out)",
        "standing under load: a router is too slow or gone; see `specdec_router_pair_up`.",
        {"state": SESSION_STATES},
    ),
    Entry(
        "specdec_tokens_total",
        "counter",
        "tokens",
        "Tokens delivered, prompts' first tokens included",
        "Its rate is the pair's throughput.",
    ),
    Entry(
        "specdec_session_tokens_per_second",
        "histogram",
        "tokens/second",
        "A session's tokens after its first, over the time they took, when it ends",
        "What one user sees. Falls with more sessions at once; falls alone where cycles yield less.",
        buckets=_RATES,
    ),
    Entry(
        "specdec_cycles_total",
        "counter",
        "cycles",
        "Engine cycles that committed tokens",
        "Its rate times accept length times batch is the throughput.",
    ),
    Entry(
        "specdec_cycle_seconds",
        "histogram",
        "seconds",
        "A cycle: waiting for the draft, scheduling, verifying and output together",
        "Up: `specdec_stage_seconds` says which part.",
    ),
    Entry(
        "specdec_stage_seconds",
        "histogram",
        "seconds",
        "Time of a cycle's stages: draft, from an outcome's arrival at the draft to its proposal, or the deadline that "
        "passed without one; channel, what the cycle waited for the proposal beyond that; schedule; verify, forward "
        "pass and sampling; output",
        "draft up: as `specdec_draft_seconds`. channel up: the draft is woken late; give it a core, or raise "
        "`--spin-ms`. verify up: longer contexts, a larger batch or k, or a busy GPU. schedule or output up: the "
        "engine's CPU core is full.",
        {"stage": STAGES},
    ),
    Entry(
        "specdec_ordered_steps",
        "histogram",
        "drafts",
        "Step count (k) a session's cycle was ordered with",
        "Mostly 0: the policy finds that speculation loses, or no router orders.",
        buckets=(*range(9), 12, 16, 24, 32, 48, 64),
    ),
    Entry(
        "specdec_accept_length",
        "histogram",
        "tokens",
        "Tokens a session's cycle delivered",
        "1 is plain decoding. A fall: another kind of text, or a draft that no longer fits the target.",
        buckets=_LENGTHS,
    ),
    Entry(
        "specdec_proposed_tokens_total",
        "counter",
        "tokens",
        "Draft tokens verified",
        "0 while k is above 0: no proposals arrive; see `specdec_proposals_total`.",
    ),
    Entry(
        "specdec_accepted_tokens_total",
        "counter",
        "tokens",
        "Draft tokens that stood",
        "Over the proposed ones it is the acceptance rate.",
    ),
    Entry(
        "specdec_proposed_at_position_total",
        "counter",
        "tokens",
        "Draft tokens verified, by position in their proposal",
        "The denominator of acceptance by position.",
        _POSITION_LABEL,
    ),
    Entry(
        "specdec_accepted_at_position_total",
        "counter",
        "tokens",
        "Draft tokens that stood, by position in their proposal",
        "Over the proposed ones: how far drafting is worth it. A fall at position 1 already: the draft does not fit "
        "the text; a fall only later: k is larger than useful.",
        _POSITION_LABEL,
    ),
    Entry(
        "specdec_proposals_total",
        "counter",
        "proposals",
        "What became of a session's proposals in cycles ordered with drafts: accepted, one draft or more stood; "
        "rejected, none did; late, missed the deadline; none, nothing came or nothing fitted; and stale, rows that "
        "arrived for another session, epoch or cycle",
        "late: a slow or busy draft, or a deadline too short for it. none: `specdec_short_cycles_total` has the "
        "reason. stale beyond a few after a restart: a defect, tell us.",
        {"result": ("accepted", "rejected", "late", "none", "stale")},
    ),
    Entry(
        "specdec_short_cycles_total",
        "counter",
        "cycles",
        "Session cycles that verified fewer drafts than ordered",
        "draft_down, draft_late: the draft's log and `specdec_draft_seconds`. draft_short: the drafter found less, "
        "normal for n-gram. budget: vLLM's token budget; raise `--max-num-batched-tokens`. draft_limit: sessions "
        "longer than the draft can follow.",
        {"reason": _SHORT},
    ),
    Entry(
        "specdec_dropped_total",
        "counter",
        "frames or rows",
        "What did not match or came too late, and cost speed only, by cause; frames or rows, of lost_states tokens",
        "late: as in `specdec_proposals_total`. lapsed_leases: the router is slower than `--lease-ms`. lost_states: "
        "raise `--states-mb`. lost_verdicts, no_slot, garbage: should not grow; tell us.",
        {"cause": _CAUSES},
    ),
    Entry(
        "specdec_lost_verdict_frames_total",
        "counter",
        "frames",
        "Verdict frames that found the ring full",
        "Above 0: the control process gets no CPU; give it a core.",
    ),
    Entry(
        "specdec_order_lag_seconds",
        "histogram",
        "seconds",
        "From an order's arrival at the pair to the first verdict under it",
        "More than two cycles: the engine is late to read orders. The router's verdict lag beyond it is the network.",
    ),
    Entry(
        "specdec_segment_bytes",
        "gauge",
        "bytes",
        "Size of the segment verifier and draft share, in /dev/shm",
        "Set by `--max-num-seqs`, `--max-steps` and `--states-mb`.",
    ),
    Entry(
        "specdec_shared_memory_free_bytes",
        "gauge",
        "bytes",
        "Free space of the file system the segment is on",
        "Near 0: a write may end a process with SIGBUS. Enlarge /dev/shm (`--shm-size`, an emptyDir's sizeLimit).",
    ),
)

DRAFT = (
    Entry(
        "specdec_draft_proposals_total",
        "counter",
        "frames",
        "Proposal frames written",
        "0 under load with k above 0: the draft gets no outcomes, or its drafter raises.",
    ),
    Entry(
        "specdec_draft_tokens_total",
        "counter",
        "tokens",
        "Draft tokens proposed",
        "Far more than `specdec_proposed_tokens_total`: proposals come too late.",
    ),
    Entry(
        "specdec_draft_seconds",
        "histogram",
        "seconds",
        "From an outcome's arrival to its proposal",
        "Up: more sessions, longer contexts, or other work on the draft's device.",
    ),
    Entry(
        "specdec_draft_sessions",
        "gauge",
        "sessions",
        "Sessions whose tokens the draft holds",
        "Fewer than `specdec_sessions` a while after a restart is normal.",
    ),
    Entry(
        "specdec_draft_unmatched_rows_total",
        "counter",
        "rows",
        "Outcome rows that fitted no session",
        "A few after a restart are normal. Otherwise a defect, tell us.",
    ),
    Entry(
        "specdec_draft_garbage_frames_total",
        "counter",
        "frames",
        "Outcome frames that were never whole",
        "Above 0: a verifier died while it wrote, or a defect.",
    ),
    Entry(
        "specdec_draft_given_up_states_total",
        "counter",
        "tokens",
        "Tokens whose hidden states came and were not read in time",
        "The draft is slower than the target reads prompts: a faster device, or shorter chunks of prompt.",
    ),
    Entry(
        "specdec_draft_faults_total",
        "counter",
        "calls",
        "Drafter calls that raised",
        "Above 0: the draft's log has the exception.",
    ),
    Entry(
        "specdec_draft_evicted_sessions_total",
        "counter",
        "sessions",
        "Sessions that lost what the draft held of them: its memory is full (drafters with weights)",
        "Raise `--memory-gb` or `--memory-fraction`, or send fewer long sessions to the pair.",
    ),
    Entry(
        "specdec_draft_missing_states_total",
        "counter",
        "states",
        "Hidden states of the target that a head did without: late_start, a context begins after the first token; "
        "no_drafts, a proposal is empty because the last state has not come; dropped, tokens' states that came and "
        "found no memory (`--drafter eagle3`)",
        "late_start comes with prefix cache hits. no_drafts: raise `--states-mb`. dropped: raise `--memory-gb`.",
        {"effect": ("late_start", "no_drafts", "dropped")},
    ),
    Entry(
        "specdec_draft_run_ahead_total",
        "counter",
        "proposals",
        "Proposals a session had drafts ready for: hit, it had them all; miss, some or all were drafted on demand; "
        "unused, none were wanted (where it runs ahead)",
        "Mostly miss: it does not help, and `--run-ahead off` frees the device. Mostly unused: drafts are rarely "
        "wanted.",
        {"result": ("hit", "miss", "unused")},
    ),
    Entry(
        "specdec_draft_run_ahead_waited_total",
        "counter",
        "proposals",
        "Hits in a frame that waited for another session's drafts (where it runs ahead)",
        "Near the hits: with this many sessions running ahead saves little.",
    ),
    Entry(
        "specdec_draft_run_ahead_saved_seconds_total",
        "counter",
        "seconds",
        "Drafting that proposals did not wait for (where it runs ahead)",
        "Its rate is the share of time gained.",
    ),
    Entry(
        "specdec_draft_read_ahead_tokens_total",
        "counter",
        "tokens",
        "Committed tokens read before drafts after them were wanted (where it runs ahead)",
        "0 while it runs ahead: the draft has no time left between outcomes.",
    ),
)

METRICS: Mapping[str, tuple[Entry, ...]] = {"router": ROUTER, "verifier": PAIR, "draft": DRAFT}
_BY_NAME = {entry.name: entry for table in METRICS.values() for entry in table}


_Made = TypeVar("_Made", Counter, Gauge, Histogram)


def stages_us(frame: pb.VerdictFrame) -> dict[str, int]:
    """A cycle's time by stage, in microseconds; their sum is the cycle's."""
    drafting = min(frame.drafting_us, frame.draft_us)
    spent = (drafting, frame.draft_us - drafting, frame.schedule_us, frame.verify_us, frame.output_us)
    return dict(zip(STAGES, spent, strict=True))


class _Registry:
    """A registry, and the metrics of the table made in it. Where all labels' values are listed, each starts at 0."""

    def __init__(self) -> None:
        # they would be a second series for each counter, under a name that is in no table
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)

    def counter(self, name: str) -> Counter:
        """The counter of this name."""
        return _started(Counter(*self._described(name), registry=self.registry), name)

    def gauge(self, name: str) -> Gauge:
        """The gauge of this name."""
        return _started(Gauge(*self._described(name), registry=self.registry), name)

    def histogram(self, name: str) -> Histogram:
        """The histogram of this name, with the table's buckets."""
        made = Histogram(*self._described(name), registry=self.registry, buckets=_BY_NAME[name].buckets)
        return _started(made, name)

    @staticmethod
    def _described(name: str) -> tuple[str, str, tuple[str, ...]]:
        entry = _BY_NAME[name]
        return entry.name, entry.help, tuple(entry.labels)


def _started(metric: _Made, name: str) -> _Made:
    listed = [values for values in _BY_NAME[name].labels.values() if isinstance(values, tuple)]
    if listed and len(listed) == len(_BY_NAME[name].labels):
        for values in itertools.product(*listed):
            metric.labels(*values)
    return metric


class RouterMetrics(_Registry):
    """What the router did."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = self.counter("specdec_router_requests_total")
        self.outcomes = self.counter("specdec_router_outcomes_total")
        self.in_flight = self.gauge("specdec_router_requests_in_flight")
        self.rejected = self.counter("specdec_router_rejected_total")
        self.admitted = self.gauge("specdec_router_admitted_sessions")
        self.waiting = self.gauge("specdec_router_waiting_sessions")
        self.waiting_tokens = self.gauge("specdec_router_waiting_tokens")
        self.waiting_bytes = self.gauge("specdec_router_waiting_bytes")
        self.retries = self.counter("specdec_router_retries_total")
        self.paused = self.gauge("specdec_router_paused_requests")
        self.key_reloads = self.counter("specdec_router_key_reloads_total")
        self.loop_lag = self.histogram("specdec_router_loop_lag_seconds")
        self.request_seconds = self.histogram("specdec_router_request_seconds")
        self.first_byte = self.histogram("specdec_router_first_byte_seconds")
        self.first_token = self.histogram("specdec_router_time_to_first_token_seconds")
        self.output_token = self.histogram("specdec_router_time_per_output_token_seconds")
        self.engine_queue = self.histogram("specdec_router_engine_queue_seconds")
        self.proxy = self.histogram("specdec_router_proxy_seconds")
        self.tokens = self.counter("specdec_router_tokens_total")
        self.orders = self.counter("specdec_router_orders_total")
        self.verdicts = self.counter("specdec_router_verdicts_total")
        self.order_lag = self.histogram("specdec_router_verdict_lag_seconds")
        self.sessions = self.gauge("specdec_router_sessions")
        self.pair_up = self.gauge("specdec_router_pair_up")
        self.pair_ready = self.gauge("specdec_router_pair_ready")
        self.steps = self.gauge("specdec_router_steps")
        self.expected_rate = self.gauge("specdec_router_expected_tokens_per_second")
        self.realised_rate = self.gauge("specdec_router_realised_tokens_per_second")
        self.plain_rate = self.gauge("specdec_router_plain_tokens_per_second")
        self.utility = self.gauge("specdec_router_utility")
        self.probes = self.counter("specdec_router_probe_cycles_total")
        self.switches = self.counter("specdec_router_step_switches_total")

    def forget(self, pair: str) -> None:
        """The pair is gone for good: no metric names it any more."""
        rates = (self.expected_rate, self.realised_rate, self.plain_rate, self.utility)
        for metric in (self.pair_up, self.pair_ready, self.steps, *rates, self.probes, self.switches):
            with contextlib.suppress(KeyError):
                metric.remove(pair)


class PairMetrics(_Registry):
    """What a pair did, counted by its verifier from the verdicts."""

    def __init__(self) -> None:
        super().__init__()
        self.info = self.gauge("specdec_pair_info")
        self.engine_up = self.gauge("specdec_engine_up")
        self.draft_up = self.gauge("specdec_draft_up")
        self.routers = self.gauge("specdec_routers")
        self.sessions = self.gauge("specdec_sessions")
        self.states = self.gauge("specdec_sessions_by_state")
        self.tokens = self.counter("specdec_tokens_total")
        self.session_rate = self.histogram("specdec_session_tokens_per_second")
        self.cycles = self.counter("specdec_cycles_total")
        self.cycle = self.histogram("specdec_cycle_seconds")
        self.stage = self.histogram("specdec_stage_seconds")
        self.steps = self.histogram("specdec_ordered_steps")
        self.accept_length = self.histogram("specdec_accept_length")
        self.proposed = self.counter("specdec_proposed_tokens_total")
        self.accepted = self.counter("specdec_accepted_tokens_total")
        self.proposed_at = self.counter("specdec_proposed_at_position_total")
        self.accepted_at = self.counter("specdec_accepted_at_position_total")
        self.proposals = self.counter("specdec_proposals_total")
        self.unproposed = self.counter("specdec_short_cycles_total")
        self.dropped = self.counter("specdec_dropped_total")
        self.lost = self.counter("specdec_lost_verdict_frames_total")
        self.order_lag = self.histogram("specdec_order_lag_seconds")
        self.segment_bytes = self.gauge("specdec_segment_bytes")
        self.shared_free = self.gauge("specdec_shared_memory_free_bytes")
        self._published: dict[str, int] = {}

    def publish(self, counts: dict[str, int]) -> None:
        """Takes over the engine's own running counts."""
        for cause, count in counts.items():
            more = max(0, count - self._published.get(cause, 0))
            self.dropped.labels(cause).inc(more)
            if cause == "stale":
                self.proposals.labels("stale").inc(more)
        self._published = counts


class DraftMetrics(_Registry):
    """What a draft did."""

    def __init__(self) -> None:
        super().__init__()
        self.proposals = self.counter("specdec_draft_proposals_total")
        self.tokens = self.counter("specdec_draft_tokens_total")
        self.seconds = self.histogram("specdec_draft_seconds")
        self.sessions = self.gauge("specdec_draft_sessions")
        self.unmatched = self.counter("specdec_draft_unmatched_rows_total")
        self.garbage = self.counter("specdec_draft_garbage_frames_total")
        self.given_up_states = self.counter("specdec_draft_given_up_states_total")
        self.faults = self.counter("specdec_draft_faults_total")

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
            yield _family("specdec_draft_evicted_sessions_total", evicted)
        if hasattr(counts, "late_starts"):
            gaps = {"late_start": counts.late_starts, "no_drafts": counts.without_states, "dropped": counts.dropped}
            yield _family("specdec_draft_missing_states_total", gaps)


class _Ahead(Collector):
    """A drafter's counts of its work between outcomes, read when they are asked for."""

    def __init__(self, counts: "AheadCounts") -> None:
        self._counts = counts

    def collect(self) -> Iterable[Metric]:
        counts = self._counts
        results = {"hit": counts.hits, "miss": counts.misses, "unused": counts.unused}
        yield _family("specdec_draft_run_ahead_total", results)
        yield _family("specdec_draft_run_ahead_waited_total", counts.waited)
        yield _family("specdec_draft_run_ahead_saved_seconds_total", counts.saved_s)
        yield _family("specdec_draft_read_ahead_tokens_total", counts.read)


def _family(name: str, values: float | Mapping[str, float]) -> CounterMetricFamily:
    """A counter counted elsewhere: one value, or one for each value of its label."""
    entry = _BY_NAME[name]
    if not isinstance(values, Mapping):
        return CounterMetricFamily(entry.name, entry.help, values)
    family = CounterMetricFamily(entry.name, entry.help, labels=tuple(entry.labels))
    for label, value in values.items():
        family.add_metric([label], value)
    return family


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
    def metrics() -> Response:  # in a thread: streams do not wait for the text
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


def health_app(registry: CollectorRegistry, readiness: Callable[[], dict[str, Any]]) -> FastAPI:
    """An application with nothing but the health routes."""
    app = FastAPI(openapi_url=None)
    health_routes(app, registry, readiness)
    return app
