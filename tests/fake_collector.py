"""A collector of traces, and the server it shares with other takers of POSTs."""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@contextmanager
def answering(post: Callable[[bytes], None]) -> Iterator[int]:
    """The port of a server that hands every POST's body to `post`."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            post(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


class FakeCollector:
    """Takes spans by OTLP over HTTP."""

    def __init__(self, port: int, requests: list[ExportTraceServiceRequest]) -> None:
        self._port, self._requests = port, requests

    @classmethod
    @contextmanager
    def serving(cls) -> Iterator["FakeCollector"]:
        """One on a free port."""
        requests: list[ExportTraceServiceRequest] = []
        with answering(lambda body: requests.append(ExportTraceServiceRequest.FromString(body))) as port:
            yield cls(port, requests)

    @property
    def environment(self) -> dict[str, str]:
        """What makes a service send it the spans of those requests whose caller has asked for that, and no others."""
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self._port}",
            "OTEL_BSP_SCHEDULE_DELAY": "200",
            "OTEL_TRACES_SAMPLER": "parentbased_always_off",
        }

    def spans(self, trace: str) -> dict[str, list[Any]]:
        """A trace's spans by service."""
        found: dict[str, list[Any]] = defaultdict(list)
        for resource in (one for request in list(self._requests) for one in request.resource_spans):
            names = {a.key: a.value.string_value for a in resource.resource.attributes}
            for span in (span for scope in resource.scope_spans for span in scope.spans):
                if span.trace_id.hex() == trace:
                    found[names["service.name"]].append(span)
        return found
