"""Every request watched from its arrival to its answer's end: metrics, its spans, its line in the log.

`Observed` is the outermost ASGI layer, so that it sees how each request ends, whoever answers it. It leaves an
`Observation` in the request's scope; the proxy and the pair's loop tell that what only they know.
"""

import logging
import re
import time
import uuid
from collections.abc import Mapping

from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec.logs import FIELDS, request_id
from specdec.proto import speculation_pb2 as pb
from specdec.telemetry import OUTCOMES, ROUTES, RouterMetrics, stages_us

log = logging.getLogger(__name__)
_KEY = "specdec.observation"
_UNCOUNTED = ("/livez", "/readyz")
_STREAMED = ("/v1/chat/completions", "/v1/completions")
_FINISH = re.compile(rb'"finish_reason":\s?"(\w+)"')  # inside a JSON string its quotes would be escaped
_ERROR_EVENT = re.compile(rb'data: ?\{"error"')
_MATCH_BYTES = 48  # either may be cut in two
_PROPAGATOR = TraceContextTextMapPropagator()


class Observation:
    """One request. Times are of the monotonic clock, in seconds."""

    def __init__(self, scope: Scope, metrics: RouterMetrics, tracer: Tracer | None, cycle_every: int) -> None:
        self.id = _new_id()
        self.route = scope["path"] if scope["path"] in ROUTES else "other"
        self._metrics, self._tracer, self._cycle_every = metrics, tracer, cycle_every
        self._method: str = scope["method"]
        self._arrived_s, self._arrived_ns = time.monotonic(), time.time_ns()
        self._sent_s = self._first_s = self._ended_s = 0.0
        self._queued_ns = 0
        self._status = 0
        self._stream = self._whole = self._gone = self._broken = self._settled = False
        self._answered = False  # by a pair, or by an error: no other pair is asked from here on
        self._finish, self._tail = "", b""
        self._sessions = self._open = self._tokens = 0
        self._span = self._begin_span(scope) if tracer else None

    @staticmethod
    def of(scope: Scope) -> "Observation":
        """What `Observed` has put into the scope."""
        observation: Observation = scope[_KEY]
        return observation

    # ---- what the proxy tells

    def attempt(self) -> str:
        """The request goes to a pair now, with this id: another one each time, as a pair before may still hold it. What
        is told of an attempt before is not heard any more: the client gets this one's answer."""
        again = self._sent_s > 0
        self._sent_s, self._queued_ns = time.monotonic(), time.time_ns()
        if again:
            self._sessions = self._open = self._tokens = 0
            self.id = _new_id()
            request_id.set(self.id)
            if self._span:
                self._span.set_attribute("specdec.request_id", self.id)
            return self.id
        self._metrics.proxy.labels("request").observe(self._sent_s - self._arrived_s)
        if self._traced:
            self._child("admission", self._arrived_ns, self._queued_ns)
        return self.id

    def trace_headers(self) -> Mapping[str, str]:
        """What the pair is sent in place of the client's own `traceparent`; nothing without a trace."""
        carrier: dict[str, str] = {}
        if self._span:
            _PROPAGATOR.inject(carrier, set_span_in_context(self._span))
        return carrier

    # ---- what the pair's loop tells; `attempt`: its id

    def opened(self, attempt: str, *, again: bool) -> None:
        """A session of the request runs; `again`: one that was known before the loop's stream broke."""
        if attempt != self.id:
            return
        self._open += 1
        self._sessions += not again
        if self._sessions == 1 and not again and self._sent_s:
            self._metrics.engine_queue.observe(time.monotonic() - self._sent_s)
            if self._traced:
                self._child("engine queue", self._queued_ns, time.time_ns())

    def committed(self, attempt: str, verdict: pb.Verdict, frame: pb.VerdictFrame, cycles: int) -> None:
        """A session's verdict has come; `cycles` are the session's so far."""
        if attempt != self.id:
            return
        self._tokens += verdict.committed
        if self._answered:
            self._metrics.tokens.inc(verdict.committed)
        if self._traced and verdict.kind == pb.VERDICT_KIND_CYCLE and (cycles - 1) % self._cycle_every == 0:
            self._trace_cycle(verdict, frame, cycles)

    def closed(self, attempt: str) -> None:
        """A session of the request has ended."""
        if attempt != self.id:
            return
        self._open -= 1
        self._settle()

    # ---- what Observed sees

    def begun(self, message: Message) -> None:
        """The answer's head."""
        self._status = message["status"]
        kind = dict(message.get("headers", ())).get(b"content-type", b"")
        self._stream = kind.startswith(b"text/event-stream")
        self._count_tokens()

    def part(self, body: bytes, more: bool) -> None:
        """A part of the answer's body has been handed to the client's connection."""
        self._whole = not more
        if self.route not in _STREAMED:
            return
        if self._stream and not self._first_s and b"data:" in body:  # what keeps a connection open is a comment
            self._first_s = time.monotonic()
            self._metrics.first_token.observe(self._first_s - self._arrived_s)
            if self._span:
                self._span.add_event("first token")
        seen = self._tail + body
        at = len(seen)
        while (at := seen.rfind(b'"finish_reason"', 0, at)) >= 0:  # far quicker than a search with the expression
            if match := _FINISH.match(seen, at):
                self._finish = match[1].decode()
                break
        error = self._stream and b'{"error"' in seen and _ERROR_EVENT.search(seen) is not None
        self._broken = self._broken or error
        self._tail = seen[-_MATCH_BYTES:]

    def disconnected(self) -> None:
        """The client has gone, or was given up as it did not read; after the answer's end that says nothing."""
        self._gone = self._gone or not self._whole

    def ended(self, failed: bool) -> None:
        """Nothing more will be sent. `failed`: by an exception."""
        self._ended_s = time.monotonic()
        self._count_tokens()
        if failed and not self._status:
            self._status = 500
        outcome, seconds, m = self._outcome(failed), self._ended_s - self._arrived_s, self._metrics
        m.requests.labels(self.route, str(self._status)).inc()
        m.outcomes.labels(self.route, outcome).inc()
        m.request_seconds.labels(self.route).observe(seconds)
        self._settle()
        fields = {
            "route": self.route,
            "status": self._status,
            "outcome": outcome,
            "seconds": round(seconds, 4),
            "tokens": self._tokens,
        }
        if self._span:
            fields["trace_id"] = f"{self._span.get_span_context().trace_id:032x}"
            self._span.set_attributes({f"specdec.{name}": fields[name] for name in ("outcome", "tokens")})
            self._span.set_attribute("http.response.status_code", self._status)
            if outcome == "error":
                self._span.set_status(Status(StatusCode.ERROR))
            self._span.end()
        text = "%s %s: %d %s, %d tokens in %.3f s"
        values = (self._method, self.route, self._status, outcome, self._tokens, seconds)
        log.info(text, *values, extra={FIELDS: fields})

    def _count_tokens(self) -> None:
        """From the answer's head on they count as they come. Before, the request may still go to another pair, and what
        this one has decoded is never delivered."""
        if not self._answered:
            self._answered = True
            self._metrics.tokens.inc(self._tokens)

    def _outcome(self, failed: bool) -> str:
        if self._status == 499 or self._gone:
            return "abort"
        if failed or self._broken or not self._whole or self._status >= 500:
            return "error"
        if self._status >= 400:
            return "refused"
        return self._finish if self._finish in OUTCOMES else "ok"

    def _settle(self) -> None:
        """Once the stream has ended and all its sessions' verdicts are in."""
        if self._settled or not self._ended_s or self._open:
            return
        self._settled = True
        later = self._tokens / self._sessions - 1 if self._sessions else 0
        if self._first_s and later > 0:
            self._metrics.output_token.observe((self._ended_s - self._first_s) / later)

    # ---- spans

    @property
    def _traced(self) -> bool:
        """Whether spans are wanted now: the trace ends with the stream, though verdicts may still come."""
        return self._span is not None and self._span.is_recording()

    def _begin_span(self, scope: Scope) -> Span | None:
        assert self._tracer is not None
        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        return self._tracer.start_span(
            f"{self._method} {self.route}",
            _PROPAGATOR.extract(carrier),
            SpanKind.SERVER,
            {"http.request.method": self._method, "http.route": self.route, "specdec.request_id": self.id},
            start_time=self._arrived_ns,
        )

    def _child(self, name: str, start_ns: int, end_ns: int, **attributes: int | str) -> Span:
        assert self._tracer is not None
        assert self._span is not None
        return self._grandchild(self._span, name, start_ns, end_ns, **attributes)

    def _grandchild(self, parent: Span, name: str, start_ns: int, end_ns: int, **attributes: int | str) -> Span:
        assert self._tracer is not None
        named = {f"specdec.{key}": value for key, value in attributes.items()}
        span = self._tracer.start_span(name, set_span_in_context(parent), attributes=named, start_time=start_ns)
        span.end(end_ns)
        return span

    def _trace_cycle(self, verdict: pb.Verdict, frame: pb.VerdictFrame, cycles: int) -> None:
        """A cycle and its stages, the draft's among them, by the times the verdict brings: it ends as it arrives."""
        spent_us = stages_us(frame)
        end_ns = time.time_ns()
        at_ns = end_ns - 1000 * sum(spent_us.values())
        counts = {"k": verdict.steps, "proposed": verdict.proposed, "accepted": verdict.accepted}
        cycle = self._child("cycle", at_ns, end_ns, number=cycles, batch=frame.batch, **counts)
        for stage, us in spent_us.items():
            self._grandchild(cycle, stage, at_ns, at_ns + 1000 * us)
            at_ns += 1000 * us


def _new_id() -> str:
    return f"specdec-{uuid.uuid4().hex}"


class Observed:
    """The ASGI layer."""

    def __init__(
        self, app: ASGIApp, metrics: RouterMetrics, tracer: Tracer | None = None, cycle_every: int = 16
    ) -> None:
        """`cycle_every`: of a session's cycles the first and then each of so many has spans."""
        self._app, self._metrics, self._tracer, self._cycle_every = app, metrics, tracer, cycle_every
        self._answer_part = metrics.proxy.labels("answer")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        uncounted = scope["path"] in _UNCOUNTED and scope["method"] == "GET"
        tracer = None if uncounted else self._tracer
        seen = scope[_KEY] = Observation(scope, self._metrics, tracer, self._cycle_every)
        if uncounted:
            await self._app(scope, receive, send)
            return

        async def receive_watched() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect":
                seen.disconnected()
            return message

        async def send_watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                seen.begun(message)
            started_s = time.monotonic()
            try:
                await send(message)
            except OSError:  # the connection has broken
                seen.disconnected()
                raise
            if message["type"] == "http.response.body":
                self._answer_part.observe(time.monotonic() - started_s)
                seen.part(message.get("body", b""), message.get("more_body", False))

        token = request_id.set(seen.id)
        self._metrics.in_flight.inc()
        failed = True
        try:
            await self._app(scope, receive_watched, send_watched)
            failed = False
        finally:
            self._metrics.in_flight.dec()
            seen.ended(failed)
            request_id.reset(token)
