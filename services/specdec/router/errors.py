"""Every error an API client can see: one table of codes, one form, whoever raised it.

    {"error": {"message", "type", "param", "code"}}

The router raises `ApiError`; what vLLM answers in one of its own forms becomes one by `of_engine`.
"""

import json
import re
from typing import Any

from starlette.responses import Response

from specdec.router.echo import without_echo

_INVALID, _SERVER = "invalid_request_error", "server_error"
TABLE = {  # code: (status, type)
    "invalid_request": (400, _INVALID),
    "invalid_json": (400, _INVALID),
    "context_length_exceeded": (400, _INVALID),
    "invalid_api_key": (401, "authentication_error"),
    "permission_denied": (403, "permission_error"),
    "not_found": (404, _INVALID),
    "model_not_found": (404, _INVALID),
    "method_not_allowed": (405, _INVALID),
    "request_timeout": (408, _INVALID),
    "conflict": (409, _INVALID),
    "request_too_large": (413, _INVALID),
    "too_many_waiting": (429, "rate_limit_error"),  # the queue is full
    "queue_timeout": (429, "rate_limit_error"),  # waited in it for too long
    "engine_overloaded": (429, "rate_limit_error"),
    "internal_error": (500, _SERVER),
    "not_supported": (501, _SERVER),
    "no_pair": (503, _SERVER),  # none is ready
    "engine_unavailable": (503, _SERVER),  # cannot be reached, or broke off
    "draining": (503, _SERVER),  # the router is ending
    "engine_timeout": (504, _SERVER),
}
_BY_STATUS = {400: "invalid_request", 415: "invalid_request", 422: "invalid_request", 502: "engine_unavailable"} | {
    TABLE[code][0]: code
    for code in (
        *("invalid_api_key", "permission_denied", "not_found", "method_not_allowed", "request_timeout"),
        *("conflict", "request_too_large", "engine_overloaded", "internal_error", "not_supported"),
        *("engine_unavailable", "engine_timeout"),
    )
}
_READ = 4096  # characters of an engine's message that are looked at
_MESSAGE = 1500  # characters; with JSON's escapes the body stays under 4 kB
_PARAM = 64  # characters
_RETRY_S = 2
_OVERFLOW = re.compile(r"maximum context length|max_model_len|maximum model length", re.IGNORECASE)
_FULL = re.compile(r"max_tokens must be at least 1, got 0")
_ZERO = re.compile(rb'"max_(completion_)?tokens"\s*:\s*0\b')
_VALIDATION = re.compile(r"'loc': '([^']*)', 'msg': (?:'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\")")
_PYDANTIC = re.compile(r"\[type=\w+, input_value=.*", re.DOTALL)
_VALUE_BEGINS = " (parameter="
_VALUE = re.compile(r" \(parameter=(\w+)(?:, value=.*)?\)$", re.DOTALL)
_NAMED = re.compile(r"\W*(\w+) (?:must|cannot|contains?|is)\b")
# What vLLM says of a field without naming it.
_PARAMS = (
    (re.compile(r"^Token id \d+ is out|prompt cannot be empty|at least one prompt"), "prompt"),
    (re.compile(r"empty conversation"), "messages"),
)
_CHUNK = 1 << 18  # bytes of the request that one call looks at
_ERROR_BYTES = 1 << 17  # of an engine's error that are read


class ApiError(Exception):
    """One row of the table. `param` names the field at fault; `retry_after_s` is sent with 429 and 503."""

    def __init__(self, code: str, message: str, param: str | None = None, retry_after_s: float = _RETRY_S) -> None:
        super().__init__(message)
        self.code, self.message, self.param, self.retry_after_s = code, message, param, retry_after_s
        self.status, self.type = TABLE[code]

    def body(self) -> bytes:
        """The error's JSON."""
        message, param = self.message, self.param and self.param[:_PARAM]
        while True:
            error = {"message": message, "type": self.type, "param": param, "code": self.code}
            if len(body := json.dumps({"error": error}).encode()) <= 4000:
                return body
            message = message[: len(message) // 2]

    def event(self) -> bytes:
        """The same in a stream whose headers have been sent."""
        return b"data: " + self.body() + b"\n\n"

    def response(self) -> Response:
        """The HTTP answer."""
        headers = {}
        if self.status in (429, 503):
            headers["retry-after"] = str(min(60, max(1, round(self.retry_after_s))))
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return Response(self.body(), self.status, headers, "application/json")


def of_status(status: int, message: str, param: str | None = None) -> ApiError:
    """The row for a status that came without a code. 4xx and 5xx that no row has become 400 and 500."""
    return ApiError(_BY_STATUS.get(status, "invalid_request" if status < 500 else "internal_error"), message, param)


def of_engine(status: int, body: bytes, asked: bytes = b"") -> ApiError:
    """vLLM's error in our form: FastAPI's `detail`, `{"error": {...}}`, `{"object": "error"}`, or no JSON at all.

    What it repeats of the request (`asked`, the body it was sent) is taken out.
    """
    message, param = _parts(body)
    if faults := _VALIDATION.findall(message):
        message = "; ".join(
            dict.fromkeys(f"{_field(where) or 'body'}: {one or other}" for where, one, other in faults[:5])
        )
        param = param or faults[0][0]
    message = _PYDANTIC.sub("", message)
    for at in sorted({message.find(_VALUE_BEGINS), message.rfind(_VALUE_BEGINS)} - {-1}):
        if value := _VALUE.match(message, at):
            message, param = message[:at], param or value[1]
            break
    param = _field(param)
    if param is None:
        param = next((name for pattern, name in _PARAMS if pattern.search(message)), None)
    if param is None and (named := _NAMED.match(message)) and f'"{named[1]}"'.encode() in asked:
        param = named[1]
    if status == 404 and param == "model":
        return ApiError("model_not_found", "the model does not exist; GET /v1/models lists those that do", "model")
    message = without_echo(message[:_READ], asked)[:_MESSAGE]
    if (
        status == 400 and _FULL.match(message) and not _asks_for_nothing(asked)
    ):  # nobody asked for 0: it is what is left
        message = "the prompt fills the model's whole context, so that no token of an answer fits"
        return ApiError("context_length_exceeded", message, param)
    if status == 400 and _OVERFLOW.search(message):
        return ApiError("context_length_exceeded", message, param)
    return of_status(status, message or f"the engine answered {status}", param)


def _parts(body: bytes) -> tuple[str, str | None]:
    """(message, param) of an error in any of vLLM's forms; ("", None) where it is none of them."""
    try:
        answer = json.loads(body) if len(body) <= _ERROR_BYTES else None
    except (ValueError, RecursionError):
        return "", None
    if not isinstance(answer, dict):
        return "", None
    error: Any = answer.get("error", answer)
    if not isinstance(error, dict):
        return _text(error), None
    message = error.get("message", error.get("detail", ""))
    if isinstance(message, list):  # FastAPI's 422
        faults = [fault for fault in message if isinstance(fault, dict)]
        where = [_place(fault.get("loc")) for fault in faults]
        said = "; ".join(
            f"{_field(place) or 'body'}: {fault.get('msg', '')}" for place, fault in zip(where, faults, strict=True)
        )
        return said, where[0] if where else None
    param = error.get("param")
    return _text(message), param if isinstance(param, str) else None


def _text(said: Any) -> str:
    return "" if said is None else str(said)


def _place(loc: Any) -> str:
    """FastAPI's `loc` as one name."""
    return ".".join(str(word) for word in loc) if isinstance(loc, list) else ""


def _field(where: str | None) -> str | None:
    """`body.messages.0.content` as clients know it; None for the body itself."""
    if where is None:
        return None
    name = where.removeprefix("body").removeprefix(".")
    return name if name and not name.isdigit() else None


def _asks_for_nothing(asked: bytes) -> bool:
    """Whether no token is asked for."""
    return any(_ZERO.search(asked, at, at + _CHUNK + 64) for at in range(0, len(asked), _CHUNK))
