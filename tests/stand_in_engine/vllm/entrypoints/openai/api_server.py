"""The stand-in's OpenAI server: as many processes as vLLM has, the same segment and shared memory, no model.

    this process: HTTP ──pipes──► engine core, forked: a real Link on the real segment, and a target that has a script

Neither ends by itself when the other is killed from outside, except that the server ends with its core, as vLLM's does.
"""

import argparse
import json
import os
import queue
import sys
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from typing import IO, Any

from stand_in_script import VOCABULARY, prompt_tokens, script, text_of

from specdec.channel.segment import Role, Segment
from specdec.verifier.link import Link, Session
from specdec.vocabulary import UNREADABLE

FORWARD_S = 0.004


# ---- the engine core


@dataclass
class Running:
    """One request in the core."""

    session: Session | None
    tokens: list[int]
    answer: list[int]
    done: int = 0  # tokens of the answer that have been said


class StandInCore:
    """Runs cycles as vLLM's EngineCore does with the scheduler plug-in."""

    def __init__(self, asked: IO[str], says: IO[str]) -> None:
        segment = Segment.attach(Path(os.environ["SPECDEC_SEGMENT"]), Role.ENGINE)
        segment.vocabulary = VOCABULARY, UNREADABLE
        self.link = Link(segment, VOCABULARY)
        self._asked, self._says = asked, says
        self._inbox: queue.Queue[dict[str, Any]] = queue.Queue()
        self._running: dict[str, Running] = {}

    def run(self) -> None:
        """For ever: whoever starts it also ends it."""
        threading.Thread(target=self._listen, daemon=True).start()
        self._say(ready=True)
        while True:
            try:
                self._take(self._inbox.get(timeout=None if not self._running else FORWARD_S))
                while True:
                    self._take(self._inbox.get_nowait())
            except queue.Empty:
                self._cycle()

    def _listen(self) -> None:
        for line in self._asked:
            self._inbox.put(json.loads(line))

    def _say(self, **said: Any) -> None:
        print(json.dumps(said), file=self._says, flush=True)

    def _take(self, request: dict[str, Any]) -> None:
        name = request["name"]
        if "abort" in request:
            if running := self._running.pop(name, None):
                self._end(running)
            return
        tokens = prompt_tokens(request["prompt"])
        session = self.link.open(name, tokens, len(tokens))
        self._running[name] = Running(session, tokens, script(request["prompt"], request["max_tokens"]))

    def _end(self, running: Running) -> None:
        if running.session is not None:
            self.link.close(running.session)

    def _cycle(self) -> None:
        link = self.link
        link.begin()
        wanted: dict[Session, int] = {}
        for running in self._running.values():
            if running.session is None or not running.done:
                continue
            steps = link.admit(running.session)
            if steps is not None:
                wanted[running.session] = min(steps, len(running.answer) - running.done - 1)
        drafts = link.exchange(wanted)
        moved = False
        for name, running in list(self._running.items()):
            session, left = running.session, running.answer[running.done :]
            if session is not None and running.done and session not in wanted:
                continue  # held back
            ids = drafts.get(session, []) if session is not None else []
            if session in wanted:
                link.scheduled(session, len(ids))
            stand = next((i for i, token in enumerate(ids) if token != left[i]), len(ids))
            new = left[: stand + 1]  # and one of the target's own
            running.tokens.extend(new)
            running.done += len(new)
            moved = True
            if session is not None:
                link.committed(session, len(new), len(new))
            last = running.done == len(running.answer)
            if last:
                del self._running[name]
                self._end(running)
            self._say(name=name, ids=new, last=last)
        link.finish(verify_us=int(FORWARD_S * 1e6))
        if not moved:
            link.wait_for_orders(FORWARD_S)


def core(asked: int, says: int) -> None:
    """The forked process."""
    time.sleep(float(os.environ.get("STAND_IN_LOAD_S", "0")))  # the model is being loaded
    resource_tracker.register = lambda *_: None  # as in vLLM's workers, whose tracker is killed with them
    name = f"psm_{os.environ['STAND_IN_MARK']}_{os.getpid()}"
    shared = shared_memory.SharedMemory(name, create=True, size=1 << 16)
    shared.buf[:] = b"\1" * shared.size
    StandInCore(os.fdopen(asked), os.fdopen(says, "w")).run()


# ---- the server


@dataclass
class Front:
    """The server's end of the pipes."""

    model: str
    to_core: IO[str]
    from_core: IO[str]
    answers: dict[str, "queue.Queue[dict[str, Any]]"] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def listen(self) -> None:
        """Passes on what the core says, and ends this process when that has ended."""
        for line in self.from_core:
            said = json.loads(line)
            if answer := self.answers.get(said["name"]):
                answer.put(said)
        print("the engine core has died", file=sys.stderr, flush=True)
        os._exit(1)

    def tell(self, **request: Any) -> None:
        with self.lock:
            print(json.dumps(request), file=self.to_core, flush=True)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    front: Front

    def log_message(self, format: str, *args: Any) -> None: ...

    def do_GET(self) -> None:
        if self.path == "/health":
            self._document(200, {})
        elif self.path == "/v1/models":
            self._document(200, {"object": "list", "data": [{"id": self.front.model, "object": "model"}]})
        else:
            self._document(404, {"error": {"message": "the stand-in does not have this"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path != "/v1/completions":
            self._document(404, {"error": {"message": "the stand-in does not have this"}})
            return
        name = f"cmpl-{self.headers.get('x-request-id', '0')}-0"
        answer = self.front.answers[name] = queue.Queue()
        self.front.tell(name=name, prompt=body["prompt"], max_tokens=body["max_tokens"])
        try:
            self._stream(name, answer, len(body["prompt"].encode()))
        except OSError:  # the client has gone
            self.front.tell(name=name, abort=True)
            self.close_connection = True
        finally:
            del self.front.answers[name]

    def _stream(self, name: str, answer: "queue.Queue[dict[str, Any]]", prompt: int) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        count, last = 0, False
        while not last:
            said = answer.get()
            ids, last = said["ids"], said["last"]
            count += len(ids)
            reason = "length" if last else None
            choice = {"index": 0, "text": text_of(ids), "token_ids": ids, "finish_reason": reason}
            self._event({"id": name, "choices": [choice]})
        usage = {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}
        self._event({"id": name, "choices": [], "usage": usage})
        self._part(b"data: [DONE]\n\n")
        self._part(b"")

    def _event(self, document: dict[str, Any]) -> None:
        self._part(b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n")

    def _part(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def _document(self, status: int, document: dict[str, Any]) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


def main() -> None:
    parser = argparse.ArgumentParser()
    for flag in ("--model", "--host", "--port"):
        parser.add_argument(flag)
    settings, _ = parser.parse_known_args()
    asked, ask = os.pipe()
    hears, says = os.pipe()
    if os.fork() == 0:
        os.close(ask)
        os.close(hears)
        core(asked, says)
    os.close(asked)
    os.close(says)
    Handler.front = front = Front(settings.model, os.fdopen(ask, "w"), os.fdopen(hears))
    front.from_core.readline()  # ready, or its end
    threading.Thread(target=front.listen, daemon=True).start()
    Server((settings.host, int(settings.port)), Handler).serve_forever()


if __name__ == "__main__":
    main()
