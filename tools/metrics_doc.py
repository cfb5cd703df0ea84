"""Writes docs/metrics.md from the table in specdec/telemetry.py; with --check it only says whether that is needed."""

import sys
from pathlib import Path

from specdec.telemetry import METRICS, Entry

OUT = Path(__file__).parent.parent / "docs" / "metrics.md"
_WHERE = {
    "router": "the router's `--admin-port` (8001), one target for each router",
    "verifier": "the verifier's `--health-port` (8102)",
    "draft": "the draft's `--health-port` (8103)",
}
_HEAD = """# Metrics

Written by `tools/metrics_doc.py` from the table in `services/specdec/telemetry.py`: change it there.

Each service serves its own `/metrics`, and each names its metrics `specdec_…`. A router is one process: several \
routers are several targets, whose counters and histograms add up (`sum without (instance) (…)`), while gauges that \
describe a pair (`specdec_router_steps`, `specdec_router_utility`, …) are each router's own view and are not to be \
added. All labels are bounded: paths that no route has are `other`, and no client's text becomes a label.

vLLM's own metrics (`vllm:…`) stay where they were: on `/metrics` of vLLM's port (the verifier's `--port`, 8100). They \
have what happens inside the engine; the dashboards show `vllm:num_requests_running`, `vllm:num_requests_waiting` and \
`vllm:kv_cache_usage_perc` where that port is scraped. Each service also has `process_…` (CPU seconds, memory, open \
files, start time).

Histograms of seconds have buckets from 0.1 ms to 60 s.
"""


def _labels(entry: Entry) -> str:
    return "; ".join(
        f"`{label}`: {', '.join(values) if isinstance(values, tuple) else values}"
        for label, values in entry.labels.items()
    )


def document() -> str:
    """The Markdown."""
    parts = [_HEAD]
    for service, table in METRICS.items():
        parts.append(f"\n## {service.capitalize()}\n\nOn {_WHERE[service]}.\n\n")
        parts.append(
            "| name | type | unit | labels | what it is | what to do when it moves |\n|---|---|---|---|---|---|\n"
        )
        parts += [
            f"| `{e.name}` | {e.kind} | {e.unit} | {_labels(e)} | {e.help} | {e.act} |\n".replace("|  |", "| – |")
            for e in table
        ]
    return "".join(parts)


def main() -> int:
    """Returns 1 where --check finds the file stale."""
    text = document()
    if "--check" in sys.argv[1:]:
        stale = not OUT.is_file() or OUT.read_text() != text
        if stale:
            print(f"{OUT} is stale: run tools/metrics_doc.py", file=sys.stderr)
        return int(stale)
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
