"""What a request asks for, read without building it, and the bounds on it.

The router never tokenises. It estimates a prompt's tokens from its bytes (four each, text; token ids are counted), to
bound what it holds; the exact word on a prompt's length is vLLM's own 400, which comes before any header is sent.
"""

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from specdec.router.errors import ApiError
from specdec.router.members import NotJson, TooDeep, TooMany, members, named

CHAT, COMPLETIONS, BATCH = "/v1/chat/completions", "/v1/completions", "/v1/chat/completions/batch"
GENERATING = (CHAT, COMPLETIONS)
_TEXT = {
    CHAT: "messages",
    BATCH: "messages",
    COMPLETIONS: "prompt",
    "/v1/responses": "input",
    "/v1/messages": "messages",
}
_BYTES_A_TOKEN = 4
_MEDIA = re.compile(rb'"(?:data:[^",]{0,100},)?[A-Za-z0-9+/]{1024}')  # base64's beginning, not read as text
_BASE64 = re.compile(rb"[A-Za-z0-9+/]*={0,2}")
_MEDIA_TOKENS = 1000
_PREFIX = 1 << 16  # bytes of a prompt that say which pair may have it in its cache
_CHUNK = 1 << 18  # bytes that one call looks at
_FIELD_BYTES = 1 << 16  # of a field that is decoded
_NO_OBJECT = "the body is not a JSON object"
Fields = dict[str, bytes]


class ClientGone(Exception):
    """The client closed its connection; there is nobody to answer."""


@dataclass(frozen=True)
class Limits:
    """What one request may ask for."""

    body_bytes: int = 32 << 20
    body_s: float = 120  # for all of it to come
    prompt_tokens: int = 1_000_000  # as estimated
    choices: int = 256  # n times the number of prompts
    logprobs: int = 20
    stops: int = 16
    logit_bias: int = 1024  # entries
    depth: int = 64  # of arrays and objects in each other
    fields: int = 1000  # of a request


@dataclass(frozen=True)
class Asked:
    """A request as far as the router has to know it."""

    body: bytes
    max_steps: int | None = None  # a cap on k
    sessions: int = 1
    tokens: int = 0  # of its prompts, estimated
    usage_at_end: bool = False  # stream_options.include_usage
    prefix: bytes = b""  # the prompt's first bytes


async def read_body(http: HttpRequest, limits: Limits, more: Callable[[int], None]) -> bytes:
    """The request's body; `more` is told the size of each part, and may refuse it. Raises ApiError: 413 as soon as it
    is larger than allowed, 408 if it does not come in time; and ClientGone."""
    too_large = ApiError("request_too_large", f"the request body is larger than {limits.body_bytes} bytes")
    length = http.headers.get("content-length", "")
    if length.isdigit() and int(length) > limits.body_bytes:
        raise too_large
    parts, size = [], 0
    try:
        async with asyncio.timeout(limits.body_s):
            async for part in http.stream():
                size += len(part)
                if size > limits.body_bytes:
                    raise too_large
                more(len(part))
                parts.append(part)
    except ClientDisconnect as error:
        raise ClientGone from error
    except TimeoutError:
        raise ApiError("request_timeout", f"the request body did not come within {limits.body_s:g} s") from None
    return b"".join(parts)


def read(path: str, body: bytes, limits: Limits) -> Asked:
    """What the body asks for. Raises ApiError (400) for what breaks a limit, or what vLLM would misread.

    Other routes than chat and text completions are only measured.
    """
    if path not in _TEXT:
        return Asked(body, tokens=_MEDIA_TOKENS if path.startswith("/v1/audio/") else len(body) // _BYTES_A_TOKEN)
    given = _members(body, limits)
    fields = dict(map(_named, given))
    text = fields.get(_TEXT[path], b"")
    prompts, tokens = _measure(path, text, limits)
    if tokens > limits.prompt_tokens:
        raise ApiError(
            "context_length_exceeded",
            f"the prompt has about {tokens} tokens, more than the router takes ({limits.prompt_tokens})",
            _TEXT[path],
        )
    if path not in GENERATING and path != BATCH:
        return Asked(body, tokens=tokens, prefix=text[:_PREFIX])
    choices = prompts * _integer(fields, "n", 1)
    if choices > limits.choices:
        raise _too_many_choices(limits)
    _bound(fields, "stop", limits.stops, lambda value: len(value) if isinstance(value, list) else 0)
    _bound(fields, "logit_bias", limits.logit_bias, lambda value: len(value) if isinstance(value, dict) else 0)
    for name in ("logprobs", "top_logprobs", "prompt_logprobs"):
        _bound(fields, name, limits.logprobs, lambda value: value if type(value) is int else 0)
    if path == BATCH:
        return Asked(body, None, choices, tokens, prefix=text[:_PREFIX])
    usage = _stream_options(fields)
    max_steps = None
    if "speculative" in fields:
        max_steps = parse_speculative(_value(fields, "speculative"))
        body = b"{%s}" % b",".join(member for member in given if _named(member)[0] != "speculative")
    return Asked(body, max_steps, choices, tokens, usage, text[:_PREFIX])


def parse_speculative(value: Any) -> int | None:
    """A request's own cap on k: None for "auto" and null, 0 for "off", n for {"steps": n}. Raises ApiError (400)."""
    if value is None or value == "auto":
        return None
    if value == "off":
        return 0
    if isinstance(value, dict) and set(value) == {"steps"}:
        steps = value["steps"]
        if isinstance(steps, int) and not isinstance(steps, bool) and 0 <= steps <= 64:
            return steps
    raise ApiError(
        "invalid_request", 'speculative must be "auto", "off" or {"steps": n} with n from 0 to 64', "speculative"
    )


def _members(body: bytes, limits: Limits) -> list[bytes]:
    try:
        if body.lstrip(b" \t\r\n")[:1] != b"{":
            raise NotJson
        return members(body, limits.fields, limits.depth, check=True)
    except NotJson as error:
        raise ApiError("invalid_json", _NO_OBJECT) from error
    except TooDeep as error:
        message = f"the body's arrays and objects are nested deeper than {limits.depth}"
        raise ApiError("invalid_json", message) from error
    except TooMany as error:
        raise ApiError("invalid_request", f"the body has more than {limits.fields} fields") from error


def _named(member: bytes) -> tuple[str, bytes]:
    try:
        return named(member)
    except NotJson as error:
        raise ApiError("invalid_json", _NO_OBJECT) from error


def _measure(path: str, text: bytes, limits: Limits) -> tuple[int, int]:
    """(prompts, tokens in all) of a request's text, which is still JSON."""
    several = path == COMPLETIONS and text[1:64].lstrip()[:1] in (b'"', b"[")  # else one, of ids
    if text.startswith(b"[") and (several or path == BATCH):
        try:
            texts = members(text, limits.choices, limits.depth, check=False)
        except TooMany as error:
            raise _too_many_choices(limits) from error
        return max(1, len(texts)), sum(_tokens(one) for one in texts)
    return 1, _tokens(text)


def _too_many_choices(limits: Limits) -> ApiError:
    return ApiError("invalid_request", f"n times the prompts may be at most {limits.choices}", "n")


def _tokens(text: bytes) -> int:
    if text.startswith(b"[") and b'"' not in text:
        return text.count(b",") + 1
    media = _media(text)
    return (len(text) - sum(media)) // _BYTES_A_TOKEN + _MEDIA_TOKENS * len(media)


def _media(text: bytes) -> list[int]:
    """The lengths of strings of base64."""
    lengths = []
    at = 0
    while at < len(text):
        found = _MEDIA.search(text, at, at + _CHUNK)
        if found is None:
            at += _CHUNK - 2048 if at + _CHUNK < len(text) else _CHUNK  # one may begin just before the chunk's end
            continue
        at = found.end()
        while (more := _BASE64.match(text, at, at + _CHUNK)) and more.end() > at:
            at = more.end()
        if text[at : at + 1] == b'"':
            at += 1
            lengths.append(at - found.start())
    return lengths


def _integer(fields: Fields, name: str, default: int) -> int:
    value = _value(fields, name)
    if value is None:
        return default
    if type(value) is not int or value < 1:
        raise ApiError("invalid_request", f"{name} must be an integer, 1 or more", name)
    return value


def _bound(fields: Fields, name: str, limit: int, size: Callable[[Any], int]) -> None:
    if (count := size(_value(fields, name))) > limit or count < 0:
        raise ApiError("invalid_request", f"{name}: at most {limit} are allowed", name)


def _stream_options(fields: Fields) -> bool:
    """Whether usage comes in a chunk of its own. vLLM takes `{}` without a stream, where OpenAI's API refuses it."""
    options, stream = _value(fields, "stream_options"), _value(fields, "stream")
    if stream is not None and not isinstance(stream, bool):
        raise ApiError("invalid_request", "stream must be true or false", "stream")
    if options is not None and not stream:
        raise ApiError("invalid_request", "stream_options is allowed with stream: true only", "stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True


def _value(fields: Fields, name: str) -> Any:
    if name not in fields:
        return None
    text = fields[name]
    if len(text) > _FIELD_BYTES:
        raise ApiError("invalid_request", f"{name} is larger than {_FIELD_BYTES} bytes", name)
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # UTF-8, or a number's range
        raise ApiError("invalid_json", f"{name} is not valid JSON", name) from error
