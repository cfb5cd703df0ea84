"""telemetry.py: the health routes on a real server, and the metrics' names."""

import asyncio
import logging

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

from specdec.serve import listen, serving
from specdec.telemetry import DraftMetrics, PairMetrics, RouterMetrics, health_app, setup_logging


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


@pytest.mark.parametrize("kind", [PairMetrics, DraftMetrics, RouterMetrics])
def test_every_metric_is_ours_explained_and_of_its_own_registry(kind):
    one, two = kind(), kind()  # two in one process, as in these tests
    families = list(one.registry.collect())
    assert families
    for family in families:
        assert family.name.startswith("specdec_")
        assert family.documentation
    assert [family.name for family in families] == [family.name for family in two.registry.collect()]


def test_log_lines_name_service_and_level(capsys):
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers = []
    try:
        setup_logging("router", "INFO")
        logging.getLogger("specdec.x").info("hello")
        logging.getLogger("httpx").info("noise")
        logging.getLogger("specdec.x").debug("detail")
        (line,) = capsys.readouterr().err.splitlines()
        assert line.endswith(" router INFO hello")
    finally:
        root.handlers, root.level = handlers, level
