"""router/errors.py: the table, and vLLM's errors in our form. The bodies are what vLLM 0.32 answered."""

import json
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specdec.router.errors import TABLE, ApiError, of_engine, of_status

PYDANTIC = (
    "1 validation error:\n  {'type': 'float_parsing', 'loc': 'body.temperature', 'msg': 'Input should be a valid"
    " number, unable to parse string as a number', 'input': 'SECRET'}"
)


def openai_form(message: str, param: str | None = None) -> bytes:
    return json.dumps({"error": {"message": message, "type": "BadRequestError", "param": param, "code": 400}}).encode()


@pytest.mark.parametrize("code", TABLE)
def test_every_row_is_an_http_answer_in_openais_form(code):
    response = ApiError(code, "why", "field", retry_after_s=3).response()
    status, kind = TABLE[code]
    assert (response.status_code, response.headers["content-type"]) == (status, "application/json")
    assert json.loads(response.body) == {"error": {"message": "why", "type": kind, "param": "field", "code": code}}
    assert ("retry-after" in response.headers) == (status in (429, 503))
    assert ("www-authenticate" in response.headers) == (status == 401)


@pytest.mark.parametrize(("seconds", "header"), [(-5, "1"), (0.2, "1"), (7.4, "7"), (1e9, "60")])
def test_retry_after_is_an_integer_from_1_to_60(seconds, header):
    assert ApiError("queue_timeout", "m", retry_after_s=seconds).response().headers["retry-after"] == header


@pytest.mark.parametrize("text", ["x" * 100_000, "\x00" * 100_000, "\U0001f600" * 100_000, '"' * 100_000])
def test_an_error_is_at_most_4_kb(text):
    for body in (ApiError("internal_error", text, text[:500]).body(), of_engine(400, openai_form(text)).body()):
        assert len(body) <= 4096
        assert json.loads(body)["error"]["message"]


@pytest.mark.parametrize(
    ("status", "answered"),
    [(400, 400), (401, 401), (403, 403), (404, 404), (405, 405), (409, 409), (413, 413), (415, 400), (418, 400)]
    + [(422, 400), (429, 429), (500, 500), (501, 501), (502, 503), (503, 503), (504, 504), (507, 500)],
)
def test_a_status_without_a_row_becomes_one_that_has(status, answered):
    assert of_status(status, "m").status == answered


@pytest.mark.parametrize(
    ("status", "body", "code", "param", "message"),
    [
        (404, b'{"detail":"Not Found"}', "not_found", None, "Not Found"),
        (405, b'{"detail":"Method Not Allowed"}', "method_not_allowed", None, "Method Not Allowed"),
        (400, b'{"detail":"There was an error parsing the body"}', "invalid_request", None, "There was an error"),
        (400, openai_form(PYDANTIC, "body.temperature"), "invalid_request", "temperature", "temperature: Input should"),
        (
            404,
            openai_form("The model `nope` does not exist. Valid aliases: demo.", "model"),
            "model_not_found",
            "model",
            "the model does not exist",
        ),
        (
            404,
            b'{"type":"error","error":{"type":"NotFoundError","message":"no"}}',
            "not_found",
            None,
            "no",
        ),
        (
            400,
            openai_form("temperature must be non-negative, got -1.0. (parameter=temperature, value=-1.0)"),
            "invalid_request",
            "temperature",
            "temperature must be non-negative, got -1.0.",
        ),
        (
            400,
            openai_form(
                "This model's maximum context length is 1024 tokens. However, your prompt contains at least 1025 input "
                "tokens (parameter=input_tokens, value=1025)",
                "input_tokens",
            ),
            "context_length_exceeded",
            "input_tokens",
            "This model's maximum",
        ),
        (
            400,
            openai_form(
                "max_tokens=5000 cannot be greater than max_model_len=1024. (parameter=max_tokens, value=5000)"
            ),
            "context_length_exceeded",
            "max_tokens",
            "max_tokens=5000",
        ),
        (400, openai_form("The decoder prompt cannot be empty"), "invalid_request", "prompt", "The decoder prompt"),
        (400, openai_form("Token id 49152 is out of vocabulary"), "invalid_request", "prompt", "Token id 49152"),
        (400, openai_form("n must be 1 when using greedy sampling, got 2."), "invalid_request", "n", "n must be 1"),
        (
            422,
            b'{"detail":[{"type":"missing","loc":["body","messages"],"msg":"Field required","input":{"a":"SECRET"}}]}',
            "invalid_request",
            "messages",
            "messages: Field required",
        ),
        (
            400,
            b'{"object":"error","message":"old","type":"x","param":"stop","code":400}',
            "invalid_request",
            "stop",
            "old",
        ),
        (500, b'{"error":"a word"}', "internal_error", None, "a word"),
        (503, b"<html>", "engine_unavailable", None, "the engine answered 503"),
        (500, b"[1]", "internal_error", None, "the engine answered 500"),
        (500, b"[" * 100_000, "internal_error", None, "the engine answered 500"),
    ],
)
def test_each_of_vllms_forms(status, body, code, param, message):
    error = of_engine(status, body, b'{"n": 2, "temperature": -1}')
    assert (error.code, error.param) == (code, param)
    assert error.message.startswith(message)
    assert "SECRET" not in error.message
    assert "parameter=" not in error.message


WORDS = st.sampled_from(
    ["error", "message", "detail", "loc", "msg", "param", "code", "body", "a (parameter=b)", "\ud800"]
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=4),
)


@settings(max_examples=60, deadline=None)
@given(ANYTHING, st.sampled_from([400, 404, 422, 500]))
@example({"detail": [{"loc": None, "msg": "x"}, {"loc": 5, "msg": "y"}]}, 422)
@example({"error": None}, 400)
@example({"error": {"message": None, "param": 5}}, 400)
def test_whatever_an_engine_says_is_an_error_of_ours(said, status):
    error = of_engine(status, json.dumps(said).encode(), b'{"n": 2}')
    body = error.body()
    assert len(body) <= 4096
    assert json.loads(body)["error"]["message"]


def test_a_long_parameter_costs_the_message_nothing():
    error = json.loads(of_engine(400, openai_form("why", "p" * 50_000)).body())["error"]
    assert (error["message"], error["param"]) == ("why", "p" * 64)


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        (b'{"max_tokens": 5}', "context_length_exceeded"),
        (b"{}", "context_length_exceeded"),
        (b'{"max_tokens": 0}', "invalid_request"),
        (b'{"max_completion_tokens":0}', "invalid_request"),
    ],
)
def test_a_context_that_is_full_is_told_from_an_answer_of_no_tokens(asked, code):
    body = openai_form("max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)", "max_tokens")
    assert of_engine(400, body, asked).code == code


def test_what_was_asked_is_not_repeated():
    asked = json.dumps({"messages": [{"role": "user", "content": "my secret prompt text"}], "n": 1}).encode()
    error = of_engine(400, openai_form("cannot read 'my secret prompt text' here"), asked)
    assert error.message == "cannot read '…' here"
    assert of_engine(400, openai_form("no"), b"[" * 100_000).message == "no"


def test_a_message_that_is_cut_off_within_what_was_asked_does_not_repeat_its_beginning():
    secret = "".join(f"secret {n} " for n in range(3000))
    asked = json.dumps({"prompt": secret, "user": "secret 0 secret 1 but not the same"}).encode()
    for said in (secret, f"{'no ' * 1300}{secret}", f"'{secret}' cannot be read"):
        message = of_engine(400, openai_form(said), asked).message
        assert message
        assert "secret" not in message


def test_errors_about_many_strings_cost_little():
    """Every string of the request is looked for in what the engine says."""
    asked = json.dumps({"messages": [f"a string of its own, number {n}" for n in range(200_000)]}).encode()
    said = openai_form("cannot read 'a string of its own, number 77'" + " and so on" * 6000)
    times = []
    for _ in range(2):
        started = time.thread_time()
        error = of_engine(400, said, asked)
        times.append(time.thread_time() - started)
    assert min(times) < 1
    assert error.message.startswith("cannot read '…'")
    digits = "".join(f"{n:04d}" for n in range(800))
    many = [digits[at : at + 16] for at in range(2000)]
    error = of_engine(400, openai_form(digits), json.dumps({"messages": many}).encode())
    assert error.message.startswith("…")
    assert not any(one in error.message for one in many)
