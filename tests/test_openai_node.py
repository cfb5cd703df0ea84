"""openai-node, a real one, against the router: openai_node/check.cjs asks, and prints what it got."""

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from edge_kit import DONE, Asked, Send, chunk, delta, event, never, reply, routed, run, start, stream
from fake_engine import until

HERE = Path(__file__).parent
MODULES = HERE.parent / ".cache" / "openai-node"
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
WHOLE = {
    "id": "c",
    "object": "chat.completion",
    "created": 1,
    "model": "any",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}],
    "usage": USAGE,
}


def openai_form(message: str, status: int, param: str | None = None) -> bytes:
    """An error as vLLM says it."""
    return json.dumps({"error": {"message": message, "type": "Error", "param": param, "code": status}}).encode()


def said(message: str, status: int, param: str | None = None) -> Any:
    return reply(openai_form(message, status, param), status)


class FakeEngine:
    """Answers by the model's name."""

    given_up = 0  # of its endless streams

    async def __call__(self, asked: Asked, send: Send) -> None:
        if asked.method != "POST":
            await reply(b'{"detail":"Method Not Allowed"}', 405)(asked, send)
            return
        fields = json.loads(asked.body)
        answers = {
            "refusing": said("temperature must be non-negative, got -1.0.", 400, "temperature"),
            "small": said("This model's maximum context length is 16 tokens. However, you requested 99.", 400),
            "missing": said("The model `missing` does not exist.", 404, "model"),
            "failing": said("it broke", 500),
            "down": said("EngineCore encountered an issue", 503),
            "silent": never,
            "breaking": stream(delta("Hel"), event(json.loads(openai_form("it broke", 500))), DONE),
            "endless": self._endless,
        }
        if fields["model"] in answers:
            await answers[fields["model"]](asked, send)
        elif not fields.get("stream"):
            await reply(json.dumps(WHOLE).encode())(asked, send)
        else:
            usage = [event({"id": "c", "choices": [], "usage": USAGE})] if fields.get("stream_options") else []
            await stream(delta("Hel"), delta("lo"), *usage, DONE)(asked, send)

    async def _endless(self, asked: Asked, send: Send) -> None:
        await start(send, 200, ("content-type", "text/event-stream"))
        try:
            while True:
                await chunk(send, delta("x"))
                await asyncio.sleep(0.02)
        except asyncio.CancelledError:
            self.given_up += 1
            raise


@pytest.fixture(scope="module")
def modules() -> Path:
    """The folder of openai-node, installed at the first time as package-lock.json says."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    lock = (HERE / "openai_node" / "package-lock.json").read_text()
    if not (done := MODULES / "installed").exists() or done.read_text() != lock:
        MODULES.mkdir(parents=True, exist_ok=True)
        for name in ("package.json", "package-lock.json"):
            shutil.copy(HERE / "openai_node" / name, MODULES)
        command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        subprocess.run(command, cwd=MODULES, check=True, timeout=120, stdout=subprocess.DEVNULL)
        done.write_text(lock)
    return MODULES / "node_modules"


async def checked(modules: Path, url: str) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        "node",
        str(HERE / "openai_node" / "check.cjs"),
        url,
        env={"PATH": os.environ["PATH"], "NODE_PATH": str(modules)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    result: dict[str, Any] = json.loads(out)
    return result


ERRORS = {  # (class, status, code, param, type)
    "bad_json": ("BadRequestError", 400, "invalid_json", None, "invalid_request_error"),
    "bad_value": ("BadRequestError", 400, "invalid_request", "speculative", "invalid_request_error"),
    "bad_options": ("BadRequestError", 400, "invalid_request", "stream_options", "invalid_request_error"),
    "refused_by_engine": ("BadRequestError", 400, "invalid_request", "temperature", "invalid_request_error"),
    "too_long": ("BadRequestError", 400, "context_length_exceeded", None, "invalid_request_error"),
    "bad_key": ("AuthenticationError", 401, "invalid_api_key", None, "authentication_error"),
    "no_model": ("NotFoundError", 404, "model_not_found", "model", "invalid_request_error"),
    "no_route": ("NotFoundError", 404, "not_found", None, "invalid_request_error"),
    "no_verb": ("APIError", 405, "method_not_allowed", None, "invalid_request_error"),
    "too_large": ("APIError", 413, "request_too_large", None, "invalid_request_error"),
    "engine_fails": ("InternalServerError", 500, "internal_error", None, "server_error"),
    "engine_down": ("InternalServerError", 503, "engine_unavailable", None, "server_error"),
    "engine_silent": ("InternalServerError", 504, "engine_timeout", None, "server_error"),
    "busy": ("RateLimitError", 429, "too_many_waiting", None, "rate_limit_error"),
}


def test_openai_node_reads_what_the_router_says(tmp_path, modules):
    (keys := tmp_path / "keys").write_text("right\n")

    async def main():
        engine = FakeEngine()
        bounds = {"max_sessions": 1, "max_waiting": 0, "max_body_mb": 1, "read_timeout_s": 0.5}
        async with routed(tmp_path, engine, api_keys_file=keys, **bounds) as router:
            got = await checked(modules, router.url)
            errors = got["errors"] | {"busy": got["aborted"]["busy"]}
            assert errors.keys() == ERRORS.keys()
            for name, error in errors.items():
                assert error, name
                expected = ERRORS[name]
                assert tuple(error[key] for key in ("class", "status", "code", "param", "type")) == expected, name
                assert error["api"]
                assert error["message"].removeprefix(f"{error['status']} "), name

            choice = got["whole"]["choices"][0]
            assert (choice["message"]["content"], choice["finish_reason"]) == ("Hello", "stop")
            assert got["whole"]["usage"]["total_tokens"] == 5
            for name, ends in (("stream", [None, None]), ("with_usage", [None, None, 5])):
                chunks = got[name]["chunks"]
                assert got[name]["ended"]
                assert "".join(one["choices"][0]["delta"]["content"] for one in chunks[:2]) == "Hello"
                assert [(one.get("usage") or {}).get("total_tokens") for one in chunks] == ends
            assert got["with_usage"]["chunks"][-1]["choices"] == []
            assert all("usage" in one for one in got["with_usage"]["chunks"])
            assert not any("usage" in one for one in got["stream"]["chunks"])

            assert len(got["broken"]["chunks"]) == 1
            assert "ended" not in got["broken"]
            assert got["broken"]["error"] == {
                "class": "APIError",
                "api": True,
                "code": "internal_error",
                "type": "server_error",
            }

            assert got["aborted"]["chunks"] == 1
            await until(lambda: engine.given_up == 1)
            await until(lambda: router.at_rest)

    run(main)
