"""Traces by OpenTelemetry: off unless its standard variables name a collector, and sent in the background.

OTEL_EXPORTER_OTLP_ENDPOINT (or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT) turns them on; OTEL_TRACES_SAMPLER,
OTEL_SERVICE_NAME and the rest are read by the SDK. A collector that cannot be reached costs spans and a line a minute,
never time.
"""

import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from opentelemetry.trace import Tracer

from specdec.errors import SettingsError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

PROTOCOL = "http/protobuf"
_SHUTDOWN_S = 2.0  # for the last spans, if the collector takes them


def traces_url(environment: Mapping[str, str] = os.environ) -> str | None:
    """Where spans go; None: nowhere. Raises SettingsError for a protocol other than HTTP."""
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or environment.get("OTEL_TRACES_EXPORTER") == "none":
        return None
    url = environment.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "")
    base = environment.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    if not url and base:
        url = f"{base.rstrip('/')}/v1/traces"
    if not url:
        return None
    for variable in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if protocol := environment.get(variable):
            if protocol != PROTOCOL:
                raise SettingsError(f"{variable}={protocol}: traces are sent by {PROTOCOL} only, usually to port 4318")
            break
    return url


class Tracing:
    """One service's tracer, and what sends its spans."""

    def __init__(self, service: str, exporter: "SpanExporter") -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": service}
        self._provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self.tracer: Tracer = self._provider.get_tracer("specdec")

    @classmethod
    def from_environment(cls, service: str) -> "Tracing | None":
        """None where no collector is named. Raises SettingsError as `traces_url` does."""
        url = traces_url()
        if url is None:
            return None
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return cls(service, OTLPSpanExporter(endpoint=url))

    def shutdown(self) -> None:
        """Sends what is left, for at most two seconds."""
        thread = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        thread.start()
        thread.join(_SHUTDOWN_S)
