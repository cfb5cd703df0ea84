"""A stand-in for an OpenAI server with delays and counts that are known, and faults on request.

It generates nothing. Headers and the role event go out at once; the first token after `first_s`; then a cycle's tokens
in one event every `cycle_s`. What it really sent, and when, is in `sent`, by X-Request-Id; its instants are those of
time.perf_counter, which processes of one machine share.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

CONTEXT, CHARS_A_TOKEN, TEMPLATE_TOKENS = 4096, 5, 30
# What a request, by its number, may meet with. Those of SHAPES are whole answers, only framed in another way.
FAULTS = ("429", "500", "error event", "no finish reason", "no [DONE]", "no usage", "cut", "html", "garbage", "abort")
SHAPES = ("close", "crlf")


@dataclass
class Sent:
    """What one request was answered with."""

    received: float
    body: dict[str, Any]
    authorization: str | None = None
    fault: str = ""
    first: float = 0.0
    last: float = 0.0
    done: float = 0.0
    prompt_tokens: int = 0
    tokens: int = 0
    accepted: int = 0
    rejected: int = 0
    cycles: int = 0


@dataclass
class FakeOpenAI:
    """`accepted` says how many drafts of a cycle stand under a request's "speculative"; `fault` what a request, by its
    number, meets with."""

    first_s: float = 0.2
    cycle_s: float = 0.05
    accepted: Callable[[Any], int] = lambda speculative: {"off": 0, "auto": 1, None: 1}.get(str(speculative), 2)
    fault: Callable[[int], str] = lambda number: ""
    sent: dict[str, Sent] = field(default_factory=dict)
    url: str = ""
    _count: int = -1
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextlib.contextmanager
    def serving(self) -> Iterator["FakeOpenAI"]:
        """On a free port of loopback."""
        handler = type("Handler", (_Handler,), {"fake": self})
        server = _Server(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    def number(self) -> int:
        """The next request's."""
        with self._lock:
            self._count += 1
            return self._count


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    fake: FakeOpenAI

    def log_message(self, format: str, *args: Any) -> None: ...

    def do_GET(self) -> None:
        models = [{"id": "fake-model", "object": "model", "max_model_len": CONTEXT}]
        self._document(200, {"object": "list", "data": models})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        sent = Sent(time.perf_counter(), body, self.headers["authorization"])
        chars = sum(len(message["content"]) for message in body["messages"])
        sent.prompt_tokens = chars // CHARS_A_TOKEN + TEMPLATE_TOKENS
        if body["max_tokens"] > 1:  # one token: how a load test begins
            self.fake.sent[self.headers["x-request-id"]] = sent
            sent.fault = self.fake.fault(self.fake.number())
        if sent.fault in ("429", "500"):
            self._document(int(sent.fault), {"error": {"message": "too much"}})
        elif sent.fault == "html":
            self._respond("text/html", chunked=False)
            self.wfile.write(b"<html>A page that says it is an error, with status 200</html>")
        else:
            with contextlib.suppress(OSError):  # the client has gone
                self._stream(sent)

    def _stream(self, sent: Sent) -> None:
        fake, fault, max_tokens = self.fake, sent.fault, sent.body["max_tokens"]
        self._chunked, self._end = fault != "close", b"\r\n" if fault == "crlf" else b"\n"
        self._respond("text/event-stream", self._chunked)
        self._event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
        accepted = fake.accepted(sent.body.get("speculative"))
        while sent.tokens < max_tokens:
            time.sleep(fake.cycle_s if sent.tokens else fake.first_s)
            new = min(accepted + 1, max_tokens - sent.tokens) if sent.tokens else 1
            if sent.tokens:
                sent.cycles += 1
                sent.accepted += new - 1
                sent.rejected += accepted - (new - 1) + 1  # of accepted + 1 drafts
            sent.tokens += new
            if sent.tokens > max_tokens // 2:
                if fault == "error event":
                    self._event(error={"message": "the engine broke off", "code": "engine_unavailable"})
                    fault = "no [DONE]"
                    break
                if fault == "cut":
                    self.close_connection = True
                    return
                if fault == "garbage":
                    self._part(b'data: {"choices": [' + self._end * 2)
            reason = None if sent.tokens < max_tokens or fault == "no finish reason" else "length"
            reason = "abort" if reason and fault == "abort" else reason
            self._event(choices=[{"index": 0, "delta": {"content": " word" * new}, "finish_reason": reason}])
            sent.last = time.perf_counter()
            sent.first = sent.first or sent.last
        if fault != "no usage":
            self._event(choices=[], usage=self._usage(sent))
        if fault != "no [DONE]":
            self._part(b"data: [DONE]" + self._end * 2)
        sent.done = time.perf_counter()
        if self._chunked:
            self._part(b"")

    def _usage(self, sent: Sent) -> dict[str, Any]:
        details = {"accepted_prediction_tokens": sent.accepted, "rejected_prediction_tokens": sent.rejected}
        return {
            "prompt_tokens": sent.prompt_tokens,
            "completion_tokens": sent.tokens,
            "total_tokens": sent.prompt_tokens + sent.tokens,
            "completion_tokens_details": details,
        }

    def _respond(self, kind: str, chunked: bool) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        if chunked:
            self.send_header("transfer-encoding", "chunked")
        else:
            self.send_header("connection", "close")
        self.end_headers()

    def _event(self, **document: Any) -> None:
        self._part(b"data: " + json.dumps({"id": "fake", **document}).encode() + self._end * 2)

    def _part(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data) if self._chunked else data)
        self.wfile.flush()

    def _document(self, status: int, document: dict[str, Any]) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        if status == 429:
            self.send_header("retry-after", "1")
        self.end_headers()
        self.wfile.write(data)
