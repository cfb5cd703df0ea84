"""The API at the router's port, in front of the real vLLM: what clients were promised, and what vLLM does of itself."""

import asyncio
import contextlib
import json
import re
import socket
import time
from itertools import groupby
from typing import Any, Literal

import httpx
import openai
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from pydantic import BaseModel

from specdec.stack import Stack

pytestmark = pytest.mark.engine

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PATHS = (CHAT, COMPLETIONS)
LIMIT = 1024  # tokens of the model's context
VOCABULARY = 49152
PROMPT = "Once upon a time there was a"


def body_for(path: str, **fields: Any) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": PROMPT}]} if path == CHAT else {"prompt": PROMPT}
    return {"model": "demo", "temperature": 0, "max_tokens": 6, **asked, **fields}


def post(stack: Stack, path: str, **fields: Any) -> httpx.Response:
    return httpx.post(stack.url + path, json=body_for(path, **fields), timeout=120, trust_env=False)


def events(response: httpx.Response) -> list[Any]:
    """The stream's documents; it must end with [DONE]."""
    assert (response.status_code, response.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    texts = [part.removeprefix("data: ") for part in response.text.split("\n\n") if part and not part.startswith(":")]
    assert texts[-1] == "[DONE]"
    return [json.loads(text) for text in texts[:-1]]


def text_of(choice: dict[str, Any]) -> str:
    return choice.get("text") or (choice.get("delta") or choice.get("message") or {}).get("content") or ""


def joined(parts: list[Any]) -> str:
    return "".join(text_of(choice) for part in parts for choice in part["choices"])


def whole(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    document: dict[str, Any] = response.json()
    return document


def error_of(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code >= 400
    assert response.headers["content-type"] == "application/json"
    assert len(response.content) <= 4096
    (error,) = response.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert isinstance(error["code"], str)
    return dict(error)


def sessions(stack: Stack) -> float:
    text = httpx.get(stack.verifier_url + "/metrics", timeout=10, trust_env=False).text
    return float(re.findall(r"^specdec_sessions (\S+)$", text, re.M)[0])


def router_metric(stack: Stack, name: str) -> float:
    text = httpx.get(stack.admin_url + "/metrics", timeout=10, trust_env=False).text
    return sum(map(float, re.findall(rf"^specdec_router_{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.M)))


# ---- A01: usage


@pytest.mark.parametrize("path", PATHS)
def test_usage_comes_once_at_the_end_where_it_is_asked_for(engine_stack, path):
    usage = whole(post(engine_stack, path))["usage"]
    for options in (None, {}, {"include_usage": False}):
        parts = events(post(engine_stack, path, stream=True, stream_options=options))
        assert not any(part.get("usage") for part in parts)
        assert all(part["choices"] for part in parts)
    *parts, last = events(post(engine_stack, path, stream=True, stream_options={"include_usage": True}))
    assert all(part["choices"] and part["usage"] is None for part in parts)
    assert last["choices"] == []
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][name] == usage[name]
    for options in ({}, {"include_usage": True}):
        assert error_of(post(engine_stack, path, stream=False, stream_options=options))["param"] == "stream_options"


# ---- A02: stop strings


@pytest.mark.parametrize("path", PATHS)
def test_stop_strings_cut_streams_and_documents_alike(engine_stack, path):
    text = joined([whole(post(engine_stack, path, max_tokens=24))])
    assert len(text) > 50
    for stops in ([text[30:38]], [text[40:46], text[25:45]], ["\x00never", text[33:36]], ["never"]):
        at = min((found for stop in stops if (found := text.find(stop)) >= 0), default=len(text))
        document = whole(post(engine_stack, path, max_tokens=24, stop=stops))
        parts = events(post(engine_stack, path, max_tokens=24, stop=stops, stream=True))
        assert joined([document]) == joined(parts) == text[:at]
        reasons = [choice["finish_reason"] for part in parts for choice in part["choices"] if choice["finish_reason"]]
        assert reasons == [document["choices"][0]["finish_reason"]] == ["stop" if at < len(text) else "length"]


# ---- A04: several choices


def test_choices_are_as_many_as_asked_and_numbered_by_prompt(engine_stack):
    asked = {"prompt": ["A", "The capital of"], "n": 3, "temperature": 1, "seed": 5, "speculative": "off"}
    runs = [whole(post(engine_stack, COMPLETIONS, max_tokens=12, stop=["e"], **asked)) for _ in range(2)]
    texts = [[choice["text"] for choice in run["choices"]] for run in runs]
    assert [choice["index"] for choice in runs[0]["choices"]] == list(range(6))
    assert texts[0] == texts[1]
    assert len(set(texts[0][:3])) > 1
    assert len(set(texts[0][3:])) > 1
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *parts, last = events(post(engine_stack, COMPLETIONS, max_tokens=12, stop=["e"], **asked, **options))
    choices = sorted((choice for part in parts for choice in part["choices"]), key=lambda choice: choice["index"])
    streamed = {index: list(of) for index, of in groupby(choices, key=lambda choice: choice["index"])}
    assert ["".join(choice["text"] for choice in streamed[index]) for index in range(6)] == texts[0]
    assert all(sum(choice["finish_reason"] is not None for choice in of) == 1 for of in streamed.values())
    assert last["usage"]["completion_tokens"] == runs[0]["usage"]["completion_tokens"]


# ---- A05, A06, A09: what is refused


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        *((COMPLETIONS, {"prompt": prompt}, "prompt") for prompt in ("", [""], [], [[]], ["ok", ""], None, [-1])),
        *((COMPLETIONS, {"prompt": [number]}, "prompt") for number in (VOCABULARY, 2**31, 2**63)),
        (COMPLETIONS, {"prompt": [1.5]}, None),
        (COMPLETIONS, {"prompt": {}}, "prompt"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": "text"}, "messages"),
        *((path, {"stop_token_ids": [id]}, "stop_token_ids") for path in PATHS for id in (-1, VOCABULARY, 2**63)),
        *((path, {"allowed_token_ids": [id]}, "allowed_token_ids") for path in PATHS for id in (-1, VOCABULARY)),
        *((path, {"logit_bias": {key: 1}}, "logit_bias") for path in PATHS for key in ("-1", str(VOCABULARY), "x")),
        *((path, {"temperature": -1}, "temperature") for path in PATHS),
        *((path, {"temperature": "hot"}, "temperature") for path in PATHS),
        *((path, {"max_tokens": count}, "max_tokens") for path in PATHS for count in (-1, 1.5)),
        *((path, {"n": 0}, "n") for path in PATHS),
        *((path, {"stop": ""}, "stop") for path in PATHS),
        *((path, {"top_k": -5}, "top_k") for path in PATHS),
        (CHAT, {"response_format": {"type": "x"}}, "response_format.type"),
    ],
)
def test_bad_input_is_400_and_names_its_field(engine_stack, path, fields, param):
    for stream in (False, True):
        response = post(engine_stack, path, stream=stream, **fields)
        assert response.status_code == 400
        error = error_of(response)
        assert error["type"] == "invalid_request_error"
        if param is not None:
            assert (error["param"] or "").partition(".")[0] == param.partition(".")[0]


def test_after_all_that_the_engine_answers(engine_stack):
    assert whole(post(engine_stack, COMPLETIONS))["choices"][0]["text"]


def test_what_it_does_not_have_is_404_or_405(engine_stack):
    for path in PATHS:
        error = error_of(post(engine_stack, path, model="a-model-of-mine"))
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert "a-model-of-mine" not in error["message"]
    url = engine_stack.url
    for method, path, status in (
        ("POST", "/v1/no/such/route", 404),
        ("GET", "/v1/models/none", 404),
        ("POST", "/v1/embeddings", 404),  # this model has none
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/metrics", 404),
    ):
        response = httpx.request(method, url + path, trust_env=False)
        assert response.status_code == status
        error_of(response)


# ---- A08: how long


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields", "tokens"),
    [
        (CHAT, {"max_tokens": 7, "max_completion_tokens": 3}, 3),
        (CHAT, {"max_tokens": None, "max_completion_tokens": 3}, 3),
        (CHAT, {"max_tokens": 4, "max_completion_tokens": None}, 4),
        (CHAT, {"max_tokens": None, "max_completion_tokens": None, "ignore_eos": True}, None),
        (COMPLETIONS, {"max_tokens": 5}, 5),
        (COMPLETIONS, {"max_tokens": None, "ignore_eos": True}, 16),
    ],
)
def test_the_answers_length_is_what_was_asked_for(engine_stack, path, fields, tokens, stream):
    long = "word " * 965
    if tokens is None:  # up to the context's end
        fields = {**fields, "messages": [{"role": "user", "content": long}]}
    if stream:
        parts = events(post(engine_stack, path, stream=True, stream_options={"include_usage": True}, **fields))
        usage = parts[-1]["usage"]
        reason = [choice["finish_reason"] for part in parts for choice in part["choices"] if choice["finish_reason"]]
    else:
        document = whole(post(engine_stack, path, **fields))
        usage, reason = document["usage"], [document["choices"][0]["finish_reason"]]
    if tokens is None:
        assert usage["total_tokens"] == LIMIT
    else:
        assert usage["completion_tokens"] == tokens
    assert reason == ["length"]


def test_text_completions_default_to_16_tokens(engine_stack):
    body = {"model": "demo", "prompt": PROMPT, "ignore_eos": True}
    answer = httpx.post(engine_stack.url + COMPLETIONS, json=body, timeout=60, trust_env=False)
    assert whole(answer)["usage"]["completion_tokens"] == 16


# ---- A11: too long


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_too_long_is_400_before_any_header(engine_stack, stream):
    for prompt, most, status in (
        (LIMIT - 1, 1, 200),
        (LIMIT, 1, 400),
        (LIMIT + 1, 1, 400),
        (LIMIT - 10, 10, 200),
        (LIMIT - 10, 11, 200),  # vLLM shortens the answer, where OpenAI's API would refuse the request
        (10, 5000, 400),
    ):
        ids = [500 + n % 100 for n in range(prompt)]
        fields = {"prompt": ids, "max_tokens": most, "ignore_eos": True}
        response = post(engine_stack, COMPLETIONS, stream=stream, **fields)
        assert response.status_code == status, (prompt, most)
        if status == 400:
            error = error_of(response)
            assert error["code"] == "context_length_exceeded", error
    messages = [{"role": "user", "content": "word " * 2000}]
    assert error_of(post(engine_stack, CHAT, messages=messages, stream=stream))["code"] == "context_length_exceeded"


# ---- A15: clients that go


def leave(stack: Stack, fields: dict[str, Any], after: str, *, reset: bool) -> None:
    """A client that goes: `after` "prefill" began, or the first "event" has come."""
    host, port = stack.url.removeprefix("http://").split(":")
    body = json.dumps(body_for(COMPLETIONS, **fields)).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    with contextlib.closing(socket.create_connection((host, int(port)))) as client:
        client.sendall(head.encode() + b"\r\n\r\n" + body)
        if after == "event":
            assert b"200" in client.recv(4096)
        until_s = time.monotonic() + 20
        while router_metric(stack, "requests_in_flight") == 0 or (after != "prefill" and sessions(stack) == 0):
            assert time.monotonic() < until_s
            time.sleep(0.02)
        time.sleep(0.1)
        if reset:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")


@pytest.mark.parametrize("reset", [False, True], ids=["fin", "rst"])
@pytest.mark.parametrize(
    ("fields", "after"),
    [
        ({"prompt": [500 + n % 90 for n in range(900)], "max_tokens": 100}, "prefill"),
        ({"max_tokens": 900, "ignore_eos": True}, "session"),
        ({"max_tokens": 900, "ignore_eos": True, "stream": True}, "event"),
        ({"max_tokens": 900, "ignore_eos": True, "n": 2, "temperature": 1}, "session"),
    ],
    ids=["prefill", "document", "stream", "choices"],
)
def test_a_client_that_goes_stops_the_target_and_its_draft(engine_stack, fields, after, reset):
    until_s = time.monotonic() + 10
    while sessions(engine_stack) and time.monotonic() < until_s:
        time.sleep(0.05)
    leave(engine_stack, fields, after, reset=reset)
    gone_at = time.monotonic()
    while (left := (sessions(engine_stack), router_metric(engine_stack, "requests_in_flight"))) != (0, 0):
        assert time.monotonic() - gone_at < 1.5, left  # a second, and the time of asking
        time.sleep(0.02)
    for name in ("admitted_sessions", "waiting_sessions", "sessions"):
        assert router_metric(engine_stack, name) == 0


# ---- clients


class Town(BaseModel):
    name: Literal["Ulm", "Bonn"]
    people: Literal[1, 2]


def test_the_openai_package_as_its_users_use_it(engine_stack):
    messages: Any = [{"role": "user", "content": PROMPT}]
    with openai.OpenAI(base_url=engine_stack.url + "/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["demo"]
        answer = client.chat.completions.create(model="demo", messages=messages, max_tokens=8, temperature=0)
        stream = client.chat.completions.create(
            model="demo", messages=messages, max_tokens=8, temperature=0, stream=True
        )
        text = "".join(choice.delta.content or "" for part in stream for choice in part.choices)
        assert text == answer.choices[0].message.content
        asked: Any = {"messages": messages, "max_tokens": 80, "temperature": 0, "response_format": Town}
        with client.chat.completions.stream(model="demo", **asked) as helper:
            assert isinstance(helper.get_final_completion().choices[0].message.parsed, Town)
        town = client.chat.completions.parse(model="demo", **asked)
        assert isinstance(town.choices[0].message.parsed, Town)
        tool: Any = {
            "type": "function",
            "function": {"name": "found", "strict": True, "parameters": Town.model_json_schema()},
        }
        named: Any = {"type": "function", "function": {"name": "found"}}
        called = client.chat.completions.create(
            model="demo", messages=messages, max_tokens=80, tools=[tool], tool_choice=named, temperature=0
        )
        (call,) = called.choices[0].message.tool_calls
        assert call.function.name == "found"
        Town.model_validate_json(call.function.arguments)
        response = client.responses.create(model="demo", input="Say hi", max_output_tokens=5)
        assert response.output_text
        for fields, kind, code in (
            ({"model": "none"}, openai.NotFoundError, "model_not_found"),
            ({"model": "demo", "n": 0}, openai.BadRequestError, "invalid_request"),
            ({"model": "demo", "max_tokens": 9999}, openai.BadRequestError, "context_length_exceeded"),
        ):
            with pytest.raises(kind) as caught:
                client.chat.completions.create(messages=messages, **fields)
            assert caught.value.code == code

    async def many() -> list[str]:
        async with openai.AsyncOpenAI(base_url=engine_stack.url + "/v1", api_key="none", max_retries=0) as client:

            async def one() -> str:
                stream = await client.chat.completions.create(
                    model="demo", messages=messages, max_tokens=8, temperature=0, stream=True
                )
                return "".join([choice.delta.content or "" async for part in stream for choice in part.choices])

            return await asyncio.gather(*(one() for _ in range(4)))

    assert asyncio.run(many()) == [text] * 4


def test_the_document_is_of_what_the_port_has(engine_stack):
    document = httpx.get(engine_stack.url + "/openapi.json", timeout=30, trust_env=False).json()
    assert {CHAT, COMPLETIONS, "/v1/models", "/tokenize"} <= set(document["paths"])
    assert not {"/metrics", "/load", "/health"} & set(document["paths"])
    schemas = document["components"]["schemas"]
    assert "speculative" in schemas["ChatCompletionRequest"]["properties"]
    assert "speculative" in schemas["CompletionRequest"]["properties"]
    assert set(document["paths"][CHAT]["post"]["responses"]) == {"200", "4XX", "5XX"}


# ---- whatever the document allows


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/detokenize", "/v1/models"])
def test_requests_made_from_the_document_get_an_answer_or_an_error_in_form(engine_stack, path):
    document = httpx.get(engine_stack.url + "/openapi.json", timeout=30, trust_env=False).json()
    schema = schemathesis.openapi.from_dict(document)
    (operation,) = (one.ok() for one in schema.get_all_operations() if one.ok().path == path)

    @given(case=operation.as_strategy())
    @settings(
        max_examples=8,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def ask(case: Any) -> None:
        if isinstance(case.body, dict) and path in PATHS:
            case.body |= {"max_tokens": 1, "max_completion_tokens": 1, "n": 1, "min_tokens": 0}  # it is not about speed
        response = case.call(base_url=engine_stack.url)
        assert response.status_code < 500, (response.text, case.body)
        if response.status_code != 200:
            assert response.headers["content-type"] == ["application/json"]
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    ask()
