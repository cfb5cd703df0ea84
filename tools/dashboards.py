"""Writes the Grafana dashboards, helm/dashboards/*.json; with --check it only says whether that is needed.

They are in the schema of Grafana 11 and for its import, provisioning or sidecar alike: the data source and all names
are variables. A panel is a line here; places, ids and the rest of the JSON follow from it.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "helm" / "dashboards"
_SCHEMA = 39  # Grafana 11.0's; later ones migrate it
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH = 24  # of Grafana's grid
Json = dict[str, Any]


@dataclass(frozen=True)
class Panel:
    """`queries` are (expression, legend). `good` and `bad` colour a value: from `bad` on where that is the larger."""

    title: str
    queries: Sequence[tuple[str, str]]
    description: str
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    height: int = 8
    stacked: bool = False
    good: float | None = None
    bad: float | None = None
    options: Json = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """A heading, and what is below it."""

    title: str
    panels: Sequence[Panel]


# ---- expressions

_ROUTER, _PAIR, _DRAFT, _VLLM = (f'instance=~"${name}"' for name in ("router", "pair", "draft", "vllm"))
_SINCE = "[$__rate_interval]"


def rate(metric: str, where: str, by: str = "") -> str:
    """A counter's rate, summed over all but `by`."""
    return f"sum{f' by ({by})' if by else ''} (rate({metric}{{{where}}}{_SINCE}))"


def mean(histogram: str, where: str, by: str = "") -> str:
    """A histogram's mean."""
    return f"{rate(histogram + '_sum', where, by)} / {rate(histogram + '_count', where, by)}"


def quantiles(histogram: str, where: str, *of: float, of_what: str = "") -> list[tuple[str, str]]:
    """A histogram's quantiles, with legends such as "p95"."""
    buckets = rate(histogram + "_bucket", where, "le")
    return [(f"histogram_quantile({q}, {buckets})", f"{of_what} p{q * 100:g}".strip()) for q in of]


def buckets(histogram: str, where: str) -> list[tuple[str, str]]:
    """For a heatmap."""
    return [(f"sum by (le) (increase({histogram}_bucket{{{where}}}{_SINCE}))", "{{le}}")]


def gauge(metric: str, where: str, legend: str = "{{instance}}") -> tuple[str, str]:
    """A gauge as it is."""
    return f"{metric}{{{where}}}", legend


# ---- the dashboards

_UTILITY = f"min(specdec_router_utility{{{_ROUTER}}})"
_DRAFTED = f'specdec_proposed_at_position_total{{{_PAIR},position="1"}}{_SINCE}'
_STAGE = "specdec_stage_seconds"

SPECULATION = (
    Row(
        "Does it pay?",
        (
            Panel(
                "Against plain decoding",
                [(_UTILITY, "")],
                "Realised tokens a second over what plain decoding is estimated to give; the worst pair. Below 1 for "
                "minutes, speculation loses.",
                "percentunit",
                "stat",
                4,
                4,
                bad=0.97,
                good=1.0,
            ),
            Panel(
                "Tokens a second",
                [(rate("specdec_tokens_total", _PAIR), "")],
                "Delivered by all selected pairs.",
                kind="stat",
                width=4,
                height=4,
            ),
            Panel(
                "Accept length",
                [(mean("specdec_accept_length", _PAIR), "")],
                "Tokens a session's cycle delivers; 1 is plain decoding.",
                kind="stat",
                width=4,
                height=4,
                options={"decimals": 2},
            ),
            Panel(
                "k now",
                [gauge("specdec_router_steps", _ROUTER, "{{pair}}")],
                "The step count the policy has chosen. 0: speculation would lose now.",
                kind="stat",
                width=4,
                height=4,
            ),
            Panel(
                "A session's tokens a second",
                quantiles("specdec_session_tokens_per_second", _PAIR, 0.5),
                "Median over sessions that ended: what one user sees.",
                kind="stat",
                width=4,
                height=4,
            ),
            Panel(
                "Drafts up",
                [(f"sum(specdec_draft_up{{{_PAIR}}}) / count(specdec_draft_up{{{_PAIR}}})", "")],
                "Share of pairs that have a draft which answers.",
                "percentunit",
                "stat",
                4,
                4,
                bad=0.99,
                good=1.0,
            ),
            Panel(
                "Tokens a second of decoding time, against plain",
                [
                    gauge("specdec_router_realised_tokens_per_second", _ROUTER, "{{pair}} realised"),
                    gauge("specdec_router_plain_tokens_per_second", _ROUTER, "{{pair}} plain, estimated"),
                    gauge("specdec_router_expected_tokens_per_second", _ROUTER, "{{pair}} expected"),
                ],
                "What the step policy realised, and what it estimates plain decoding would have given at the same "
                "batch and context.",
                width=16,
            ),
            Panel(
                "Utility",
                [gauge("specdec_router_utility", _ROUTER, "{{pair}}")],
                "The first over the second. The policy orders k = 0 where this would stay below 1.",
                "percentunit",
                bad=0.97,
                good=1.0,
            ),
        ),
    ),
    Row(
        "Why: what drafts yield",
        (
            Panel(
                "Accept length",
                [
                    (mean("specdec_accept_length", _PAIR), "all cycles"),
                    (
                        f"1 + {rate('specdec_accepted_tokens_total', _PAIR)} / sum(rate({_DRAFTED}))",
                        "cycles with drafts",
                    ),
                ],
                "Tokens a session's cycle delivers. With drafts only: what drafting yields where it is done.",
            ),
            Panel(
                "Acceptance by position",
                [
                    (
                        f"{rate('specdec_accepted_at_position_total', _PAIR, 'position')}"
                        f" / {rate('specdec_proposed_at_position_total', _PAIR, 'position')}",
                        "{{position}}",
                    )
                ],
                "Share of drafts that stand, by their position. A fall at 1: the draft does not fit the text. A fall "
                "only later: k is larger than useful.",
                "percentunit",
            ),
            Panel(
                "Accept length, distribution",
                buckets("specdec_accept_length", _PAIR),
                "Tokens a session's cycle delivers.",
                kind="heatmap",
            ),
            Panel(
                "k chosen",
                [gauge("specdec_router_steps", _ROUTER, "{{pair}}")],
                "By the step policy of each router.",
            ),
            Panel(
                "k ordered, distribution",
                buckets("specdec_ordered_steps", _PAIR),
                "Of sessions' cycles; sessions may have caps of their own, and some cycles are probes.",
                kind="heatmap",
            ),
            Panel(
                "Proposals by result",
                [(rate("specdec_proposals_total", _PAIR, "result"), "{{result}}")],
                "Of sessions' cycles ordered with drafts. late: the draft missed its deadline. none: see the next.",
                stacked=True,
            ),
            Panel(
                "Fewer drafts than ordered, by reason",
                [(rate("specdec_short_cycles_total", _PAIR, "reason"), "{{reason}}")],
                "draft_short is normal for n-gram drafts; budget is vLLM's; draft_down and draft_late are the draft's.",
                stacked=True,
            ),
            Panel(
                "Probes and changes of k",
                [
                    (rate("specdec_router_probe_cycles_total", _ROUTER), "probe cycles"),
                    (rate("specdec_router_step_switches_total", _ROUTER), "changes of k"),
                ],
                "What the policy spends on learning.",
            ),
            Panel(
                "Tokens drafted",
                [
                    (rate("specdec_draft_tokens_total", _DRAFT), "proposed by drafts"),
                    (rate("specdec_proposed_tokens_total", _PAIR), "verified"),
                    (rate("specdec_accepted_tokens_total", _PAIR), "accepted"),
                ],
                "Far fewer verified than proposed: proposals come too late.",
            ),
        ),
    ),
    Row(
        "Where a cycle's time goes",
        (
            Panel(
                "Stages of a cycle, mean",
                [(mean(_STAGE, _PAIR, "stage"), "{{stage}}")],
                "draft: its work for the proposal. channel: waiting beyond that. verify: the target's forward pass "
                "and sampling.",
                "s",
                stacked=True,
            ),
            Panel(
                "Cycle",
                quantiles("specdec_cycle_seconds", _PAIR, 0.5, 0.99),
                "All stages together.",
                "s",
            ),
            Panel(
                "The channel",
                quantiles(_STAGE, f'{_PAIR},stage="channel"', 0.5, 0.99),
                "What cycles waited for proposals beyond the draft's own work.",
                "s",
            ),
            Panel(
                "The draft",
                quantiles("specdec_draft_seconds", _DRAFT, 0.5, 0.99),
                "From an outcome's arrival to its proposal.",
                "s",
            ),
            Panel(
                "Orders and verdicts",
                [
                    *quantiles("specdec_router_verdict_lag_seconds", _ROUTER, 0.5, 0.99, of_what="router"),
                    *quantiles("specdec_order_lag_seconds", _PAIR, 0.5, 0.99, of_what="pair"),
                ],
                "From an order, sent or arrived, to its first verdict; a cycle is in both. The difference is the "
                "network's and the router's.",
                "s",
            ),
            Panel(
                "Sessions, by what they did last",
                [(f"sum by (state) (specdec_sessions_by_state{{{_PAIR}}})", "{{state}}")],
                "standing: nobody orders for them.",
                stacked=True,
            ),
        ),
    ),
    Row(
        "Running ahead, and what is lost",
        (
            Panel(
                "Run-ahead",
                [(rate("specdec_draft_run_ahead_total", _DRAFT, "result"), "{{result}}")],
                "Empty where drafts do not run ahead. Mostly miss: it does not help. Mostly unused: drafts are rarely "
                "wanted.",
                stacked=True,
            ),
            Panel(
                "Time saved by running ahead",
                [(rate("specdec_draft_run_ahead_saved_seconds_total", _DRAFT), "share of time")],
                "Drafting that proposals did not wait for. Empty where drafts do not run ahead.",
                "percentunit",
            ),
            Panel(
                "Dropped, by cause",
                [
                    (rate("specdec_dropped_total", _PAIR, "cause"), "{{cause}}"),
                    (rate("specdec_draft_faults_total", _DRAFT), "drafter raised"),
                ],
                "What came late or did not match. It costs speed only.",
                stacked=True,
            ),
        ),
    ),
)

SERVICE = (
    Row(
        "Is it healthy?",
        (
            Panel(
                "Requests a second",
                [(rate("specdec_router_outcomes_total", _ROUTER), "")],
                "Ended, in whatever way.",
                "reqps",
                "stat",
                4,
                4,
            ),
            Panel(
                "Errors",
                [
                    (
                        rate("specdec_router_outcomes_total", _ROUTER + ',outcome="error"')
                        + " / "
                        + rate("specdec_router_outcomes_total", _ROUTER + ',outcome!~"refused|abort"'),
                        "",
                    )
                ],
                "Of requests that were neither refused nor given up by their client. The budget is 0.1 %.",
                "percentunit",
                "stat",
                4,
                4,
                good=0.0,
                bad=0.001,
            ),
            Panel(
                "Time to first token, p95",
                quantiles("specdec_router_time_to_first_token_seconds", _ROUTER, 0.95),
                "Streamed chat and text completions.",
                "s",
                "stat",
                4,
                4,
            ),
            Panel(
                "Time per output token, p95",
                quantiles("specdec_router_time_per_output_token_seconds", _ROUTER, 0.95),
                "After the first.",
                "s",
                "stat",
                4,
                4,
            ),
            Panel(
                "Pairs ready",
                [
                    (
                        f"sum(max by (pair) (specdec_router_pair_ready{{{_ROUTER}}}))"
                        f" / count(max by (pair) (specdec_router_pair_ready{{{_ROUTER}}}))",
                        "",
                    )
                ],
                "Share of pairs whose vLLM answers.",
                "percentunit",
                "stat",
                4,
                4,
                bad=0.99,
                good=1.0,
            ),
            Panel(
                "Sessions waiting",
                [(f"sum(specdec_router_waiting_sessions{{{_ROUTER}}})", "")],
                "At the routers, to be let in.",
                kind="stat",
                width=4,
                height=4,
            ),
        ),
    ),
    Row(
        "Requests",
        (
            Panel(
                "Requests by outcome",
                [(rate("specdec_router_outcomes_total", _ROUTER, "outcome"), "{{outcome}}")],
                "Each request has exactly one: how its answer ended.",
                "reqps",
                stacked=True,
            ),
            Panel(
                "Requests by status",
                [(rate("specdec_router_requests_total", _ROUTER, "status"), "{{status}}")],
                "499: the client went first. An answer that breaks off after its head is 200, and an error by outcome.",
                "reqps",
                stacked=True,
            ),
            Panel(
                "Refused by the router, by code",
                [(rate("specdec_router_rejected_total", _ROUTER, "code") + " > 0", "{{code}}")],
                "Empty while nothing is refused.",
                "reqps",
                stacked=True,
            ),
            Panel(
                "Time to first token",
                quantiles("specdec_router_time_to_first_token_seconds", _ROUTER, 0.5, 0.95, 0.99),
                "From a request's arrival to the first chunk of its stream.",
                "s",
            ),
            Panel(
                "Time per output token",
                quantiles("specdec_router_time_per_output_token_seconds", _ROUTER, 0.5, 0.95, 0.99),
                "Streamed answers, after the first token.",
                "s",
            ),
            Panel(
                "End to end",
                quantiles("specdec_router_request_seconds", _ROUTER + ',route=~"/v1/.*completions"', 0.5, 0.95, 0.99),
                "Chat and text completions, streamed or not.",
                "s",
            ),
        ),
    ),
    Row(
        "Queues and load",
        (
            Panel(
                "Requests and sessions",
                [
                    (f"sum(specdec_router_requests_in_flight{{{_ROUTER}}})", "requests in flight"),
                    (f"sum(specdec_router_admitted_sessions{{{_ROUTER}}})", "sessions let in"),
                    (f"sum(specdec_router_waiting_sessions{{{_ROUTER}}})", "sessions waiting"),
                    (f"sum(specdec_sessions{{{_PAIR}}})", "sessions in the engines"),
                ],
                "Waiting for minutes: more load than the pairs take.",
                width=6,
            ),
            Panel(
                "Bodies held by the routers",
                [(f"sum by (instance) (specdec_router_waiting_bytes{{{_ROUTER}}})", "{{instance}}")],
                "Of requests being received, waiting, or not answered yet; `--max-waiting-mb` bounds each router's.",
                "bytes",
                width=6,
            ),
            Panel(
                "Waiting in the engine",
                quantiles("specdec_router_engine_queue_seconds", _ROUTER, 0.5, 0.95),
                "From sending a request to a pair until its first session ran.",
                "s",
                width=6,
            ),
            Panel(
                "vLLM: running and waiting",
                [
                    (f"sum(vllm:num_requests_running{{{_VLLM}}})", "running"),
                    (f"sum(vllm:num_requests_waiting{{{_VLLM}}})", "waiting"),
                ],
                "vLLM's own figures, where its port is scraped.",
                width=6,
            ),
            Panel(
                "vLLM: KV cache",
                [gauge("vllm:kv_cache_usage_perc", _VLLM)],
                "Full: sessions are preempted, and read again later.",
                "percentunit",
            ),
            Panel(
                "Tokens a second",
                [
                    (rate("specdec_tokens_total", _PAIR, "instance"), "{{instance}}"),
                    (rate("specdec_router_tokens_total", _ROUTER), "through the routers"),
                ],
                "By pair. What did not come through a router was asked of vLLM directly.",
            ),
            Panel(
                "A session's tokens a second",
                quantiles("specdec_session_tokens_per_second", _PAIR, 0.05, 0.5, 0.95),
                "Of sessions that ended; the slowest twentieth has less than p5.",
            ),
        ),
    ),
    Row(
        "Pairs and processes",
        (
            Panel(
                "Pairs",
                [
                    gauge("specdec_router_pair_ready", _ROUTER, "{{pair}} ready, {{instance}}"),
                    gauge("specdec_router_pair_up", _ROUTER, "{{pair}} loop, {{instance}}"),
                    gauge("specdec_engine_up", _PAIR, "vLLM, {{instance}}"),
                    gauge("specdec_draft_up", _PAIR, "draft, {{instance}}"),
                ],
                "Ready, its loop's stream open, vLLM healthy, the draft up.",
                kind="state-timeline",
                width=16,
                bad=0.5,
                good=1.0,
            ),
            Panel(
                "Versions",
                [gauge("specdec_pair_info", _PAIR)],
                "What each pair serves, and with what.",
                kind="table",
            ),
            Panel(
                "CPU",
                [
                    (f"rate(process_cpu_seconds_total{{{_ROUTER}}}{_SINCE})", "router {{instance}}"),
                    (f"rate(process_cpu_seconds_total{{{_PAIR}}}{_SINCE})", "verifier {{instance}}"),
                    (f"rate(process_cpu_seconds_total{{{_DRAFT}}}{_SINCE})", "draft {{instance}}"),
                ],
                "Cores. A router is one process: near 1 it is full. The verifier's is without vLLM's processes.",
            ),
            Panel(
                "The router's own time",
                [
                    (mean("specdec_router_proxy_seconds", _ROUTER, "part"), "{{part}}"),
                    *quantiles("specdec_router_loop_lag_seconds", _ROUTER, 0.99, of_what="event loop lag"),
                ],
                "request: until it is sent to a pair. answer: a chunk's way to the client's connection.",
                "s",
            ),
            Panel(
                "Memory",
                [
                    gauge("process_resident_memory_bytes", _ROUTER, "router {{instance}}"),
                    gauge("process_resident_memory_bytes", _PAIR, "verifier {{instance}}"),
                    gauge("process_resident_memory_bytes", _DRAFT, "draft {{instance}}"),
                ],
                "Resident. It should be flat under even load.",
                "bytes",
            ),
            Panel(
                "Shared memory",
                [
                    gauge("specdec_segment_bytes", _PAIR, "segment, {{instance}}"),
                    gauge("specdec_shared_memory_free_bytes", _PAIR, "free, {{instance}}"),
                ],
                "The segment in /dev/shm. Without free space a write may end a process with SIGBUS.",
                "bytes",
            ),
        ),
    ),
)


def _variable(name: str, label: str, metric: str) -> Json:
    query = f"label_values({metric}, instance)"
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _DATASOURCE,
        "query": {"qryType": 1, "query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


_VARIABLES: Sequence[Json] = (
    {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "refresh": 1,
        "hide": 0,
        "multi": False,
        "includeAll": False,
    },
    _variable("router", "Router", "specdec_router_requests_in_flight"),
    _variable("pair", "Pair (verifier)", "specdec_cycles_total"),
    _variable("draft", "Draft", "specdec_draft_sessions"),
    _variable("vllm", "vLLM", "vllm:num_requests_running"),
)


def _thresholds(panel: Panel) -> Json:
    steps: list[Json] = [{"color": "green", "value": None}]
    if panel.good is not None and panel.bad is not None:
        low, high = sorted((panel.good, panel.bad))
        rising = panel.bad > panel.good
        steps = [
            {"color": "green" if rising else "red", "value": None},
            {"color": "yellow", "value": low},
            {"color": "red" if rising else "green", "value": high},
        ]
        if rising or panel.kind == "state-timeline":
            del steps[1]  # two colours: there is nothing between
    return {"mode": "absolute", "steps": steps}


def _panel(panel: Panel, number: int, x: int, y: int) -> Json:
    targets = [
        {
            "refId": chr(ord("A") + i),
            "datasource": _DATASOURCE,
            "editorMode": "code",
            "expr": expression,
            "legendFormat": legend or "__auto",
            "range": panel.kind not in ("stat", "table"),
            "instant": panel.kind in ("stat", "table"),
            "format": panel.kind if panel.kind in ("heatmap", "table") else "time_series",
        }
        for i, (expression, legend) in enumerate(panel.queries)
    ]
    defaults: Json = {"unit": panel.unit, "thresholds": _thresholds(panel), "min": 0}
    options: Json = {}
    if panel.kind == "timeseries":
        drawn = "area" if panel.stacked else "line"
        defaults["custom"] = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 25 if panel.stacked else 0,
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
            "showPoints": "never",
            "thresholdsStyle": {"mode": "dashed" if panel.good is not None and drawn == "line" else "off"},
        }
        options = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    elif panel.kind == "stat":
        options = {
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "colorMode": "value",
            "graphMode": "none",
            "textMode": "auto",
        }
    elif panel.kind == "heatmap":
        options = {"calculate": False, "yAxis": {"unit": panel.unit}, "cellGap": 1, "tooltip": {"mode": "single"}}
    elif panel.kind == "state-timeline":
        defaults["mappings"] = [
            {"type": "value", "options": {"0": {"text": "down", "index": 0}, "1": {"text": "up", "index": 1}}}
        ]
        options = {"mergeValues": True, "showValue": "auto", "rowHeight": 0.9}
    defaults |= panel.options
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _DATASOURCE,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": panel.height},
        "targets": targets,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
    }


def dashboard(uid: str, title: str, description: str, rows: Sequence[Row]) -> Json:
    """The dashboard's JSON. Panels fill the grid from left to right, each row of the grid as high as its panels."""
    panels: list[Json] = []
    y = 0
    for row in rows:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "gridPos": {"x": 0, "y": y, "w": _WIDTH, "h": 1},
                "panels": [],
            }
        )
        x, y, height = 0, y + 1, 0
        for panel in row.panels:
            if x + panel.width > _WIDTH:
                x, y, height = 0, y + height, 0
            panels.append(_panel(panel, len(panels) + 1, x, y))
            x, height = x + panel.width, max(height, panel.height)
        y += height
    return {
        "uid": uid,
        "title": title,
        "description": description,
        "tags": ["specdec"],
        "schemaVersion": _SCHEMA,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "",
        "annotations": {"list": []},
        "links": [
            {
                "type": "dashboards",
                "title": "specdec",
                "tags": ["specdec"],
                "asDropdown": False,
                "includeVars": True,
                "keepTime": True,
            }
        ],
        "templating": {"list": list(_VARIABLES)},
        "panels": panels,
    }


DASHBOARDS = {
    "speculation": dashboard(
        "specdec-speculation",
        "specdec: Speculation",
        "Does speculation pay, why, and where a cycle's time goes.",
        SPECULATION,
    ),
    "service": dashboard(
        "specdec-service", "specdec: Service", "Latencies, queues, errors, and the state of pairs.", SERVICE
    ),
}


def main() -> int:
    """Returns 1 where --check finds a file stale."""
    texts = {FOLDER / f"{name}.json": json.dumps(content, indent=1) + "\n" for name, content in DASHBOARDS.items()}
    if "--check" in sys.argv[1:]:
        stale = [path for path, text in texts.items() if not path.is_file() or path.read_text() != text]
        for path in stale:
            print(f"{path} is stale: run tools/dashboards.py", file=sys.stderr)
        return int(bool(stale))
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
