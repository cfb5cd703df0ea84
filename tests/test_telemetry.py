"""telemetry.py: the health routes on a real server, the table of metrics, and its document."""

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from specdec.draft.runahead import AheadCounts
from specdec.router.errors import TABLE
from specdec.serve import listen, serving
from specdec.telemetry import METRICS, REJECTIONS, DraftMetrics, PairMetrics, RouterMetrics, health_app

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
import metrics_doc


def served(test, registry=None, readiness=lambda: {"ready": True}):
    """Runs `test` with a client of a health application."""

    async def main():
        listener = listen("127.0.0.1", 0, "test")
        url = "http://{}:{}".format(*listener.getsockname())
        async with (
            serving(health_app(registry or CollectorRegistry(), readiness), listener),
            httpx.AsyncClient(base_url=url, trust_env=False) as client,
        ):
            await test(client)

    asyncio.run(main())


def test_livez_says_that_the_loop_turns():
    async def test(client):
        response = await client.get("/livez")
        assert response.status_code == 200
        assert response.json()["live"] is True
        assert 0 <= response.json()["uptime_s"] < 60

    served(test, readiness=lambda: {"ready": False})


def test_readyz_is_503_with_reasons_until_ready():
    state = {"ready": False, "reasons": ["vLLM does not answer /health yet"]}

    async def test(client):
        response = await client.get("/readyz")
        assert (response.status_code, response.json()) == (503, state)
        state.update(ready=True, reasons=[])
        response = await client.get("/readyz")
        assert (response.status_code, response.json()) == (200, {"ready": True, "reasons": []})

    served(test, readiness=lambda: state)


def test_metrics_are_the_registrys_own():
    registry = CollectorRegistry()
    Counter("specdec_test", "A test's", registry=registry).inc(3)

    async def test(client):
        response = await client.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain")
        families = {family.name: family for family in text_string_to_metric_families(response.text)}
        assert families["specdec_test"].samples[0].value == 3

    served(test, registry)


def test_nothing_else_is_served():
    async def test(client):
        for path in ("/", "/docs", "/openapi.json"):
            assert (await client.get(path)).status_code == 404
        assert (await client.post("/readyz")).status_code == 405

    served(test)


KINDS = {"router": RouterMetrics, "verifier": PairMetrics, "draft": DraftMetrics}


class FakeHead:
    """A drafter that counts all a drafter may count."""

    evicted = 2
    counts = SimpleNamespace(late_starts=1, without_states=0, dropped=0)
    ahead_counts = AheadCounts(hits=3)


def exposed(registry: CollectorRegistry) -> dict[str, tuple[str, str]]:
    """(type, help) by a metric's name as it is in a scrape."""
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        family.name + "_total" * (family.type == "counter"): (family.type, family.documentation)
        for family in families
        if not family.name.startswith("process_")
    }


@pytest.mark.parametrize("service", KINDS)
def test_the_table_and_a_scrape_name_the_same(service):
    metrics = KINDS[service]()
    if service == "draft":
        metrics.show(FakeHead(), run_ahead=True)
    assert exposed(metrics.registry) == {entry.name: (entry.kind, entry.help) for entry in METRICS[service]}


@pytest.mark.parametrize("kind", KINDS.values())
def test_two_of_a_kind_live_in_one_process(kind):
    one, two = kind(), kind()
    assert exposed(one.registry) == exposed(two.registry)


def test_the_process_itself_is_measured():
    scrape = generate_latest(DraftMetrics().registry).decode()
    for name in ("process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds"):
        assert f"\n{name} " in scrape


def test_listed_label_values_are_there_before_anything_has_happened():
    metrics = PairMetrics()
    for reason in ("none", "draft_late", "budget"):
        assert metrics.registry.get_sample_value("specdec_short_cycles_total", {"reason": reason}) == 0
    labels = {"route": "/v1/chat/completions", "outcome": "error"}
    assert RouterMetrics().registry.get_sample_value("specdec_router_outcomes_total", labels) == 0


def test_buckets_fit_a_tenth_of_a_millisecond_to_a_minute():
    for entry in (entry for table in METRICS.values() for entry in table if entry.kind == "histogram"):
        assert list(entry.buckets) == sorted(set(entry.buckets))
        if entry.unit == "seconds":
            assert (entry.buckets[0], entry.buckets[-1]) == (1e-4, 60)


def test_the_engines_counts_are_taken_over_once():
    metrics = PairMetrics()
    for late, stale in ((2, 1), (2, 1), (5, 4)):
        metrics.publish({"late": late, "stale": stale})
    value = metrics.registry.get_sample_value
    assert value("specdec_dropped_total", {"cause": "late"}) == 5
    assert value("specdec_proposals_total", {"result": "stale"}) == 4


def test_the_document_is_the_tables():
    assert metrics_doc.OUT.read_text() == metrics_doc.document(), "run tools/metrics_doc.py"


def test_every_entry_has_a_row_and_says_what_to_do():
    text = metrics_doc.document()
    for entry in (entry for table in METRICS.values() for entry in table):
        (row,) = [line for line in text.splitlines() if line.startswith(f"| `{entry.name}`")]
        assert entry.act in row
        assert all(f"`{label}`" in row for label in entry.labels)


def test_the_errors_codes_are_the_routers():
    assert sorted(REJECTIONS) == sorted(TABLE)
