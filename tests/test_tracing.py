"""tracing.py: when spans are sent, where, and that an end does not wait for them."""

import time
from itertools import pairwise

import pytest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from specdec.errors import SettingsError
from specdec.tracing import Tracing, traces_url
from specdec.verifier.settings import VerifierSettings
from specdec.verifier.supervisor import engine_command, engine_environment

BASE, TRACES = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"


@pytest.mark.parametrize(
    ("environment", "url"),
    [
        ({}, None),
        ({BASE: ""}, None),
        ({BASE: "http://c:4318"}, "http://c:4318/v1/traces"),
        ({BASE: "http://c:4318/"}, "http://c:4318/v1/traces"),
        ({TRACES: "http://c:4318/own"}, "http://c:4318/own"),
        ({BASE: "http://c:4318", TRACES: "http://d/own"}, "http://d/own"),
        ({BASE: "http://c:4318", "OTEL_SDK_DISABLED": "true"}, None),
        ({BASE: "http://c:4318", "OTEL_TRACES_EXPORTER": "none"}, None),
        ({BASE: "http://c:4318", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, "http://c:4318/v1/traces"),
    ],
)
def test_the_standard_variables_say_where(environment, url):
    assert traces_url(environment) == url


@pytest.mark.parametrize("variable", ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"])
def test_another_protocol_is_refused_by_name(variable):
    with pytest.raises(SettingsError, match=f"{variable}=grpc"):
        traces_url({BASE: "http://c:4317", variable: "grpc"})


def test_without_a_collector_there_is_no_tracing(monkeypatch):
    for variable in (BASE, TRACES):
        monkeypatch.delenv(variable, raising=False)
    assert Tracing.from_environment("specdec-router") is None


@pytest.mark.parametrize(("given", "name"), [(None, "specdec-router"), ("mine", "mine")])
def test_the_service_has_its_name_unless_another_is_given(monkeypatch, given, name):
    if given:
        monkeypatch.setenv("OTEL_SERVICE_NAME", given)
    exporter = InMemorySpanExporter()
    tracing = Tracing("specdec-router", exporter)
    tracing.tracer.start_span("x").end()
    tracing.shutdown()
    (span,) = exporter.get_finished_spans()
    assert span.resource.attributes["service.name"] == name


class FakeStuckExporter(SpanExporter):
    """Takes spans and never comes back."""

    def export(self, spans):
        time.sleep(20)
        return SpanExportResult.FAILURE


def test_an_end_does_not_wait_for_a_collector_that_hangs():
    tracing = Tracing("specdec-router", FakeStuckExporter())
    tracing.tracer.start_span("x").end()
    started = time.monotonic()
    tracing.shutdown()
    assert time.monotonic() - started < 4


def test_vllm_is_told_of_the_collector_too(monkeypatch):
    settings = VerifierSettings(model="m")
    for variable in (BASE, TRACES):
        monkeypatch.delenv(variable, raising=False)
    assert "--otlp-traces-endpoint" not in engine_command(settings, [])
    assert "OTEL_SERVICE_NAME" not in engine_environment()
    monkeypatch.setenv(BASE, "http://c:4318")
    command = engine_command(settings, ["--otlp-traces-endpoint", "http://own"])
    given = [value for flag, value in pairwise(command) if flag == "--otlp-traces-endpoint"]
    assert given == ["http://c:4318/v1/traces", "http://own"]  # the last one counts
    environment = engine_environment()
    assert environment["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] == "http/protobuf"  # vLLM's default is gRPC
    assert environment["OTEL_EXPORTER_OTLP_TIMEOUT"] == "2"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "7")
    assert engine_environment()["OTEL_EXPORTER_OTLP_TIMEOUT"] == "7"
