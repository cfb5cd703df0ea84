"""router/limits.py: what a body asks for, and its bounds."""

import contextlib
import json
import time
from typing import Any

import pytest

from specdec.router.errors import ApiError
from specdec.router.limits import BATCH, CHAT, COMPLETIONS, Asked, Limits, read


def asked(path: str = COMPLETIONS, limits: Limits = Limits(), **fields: Any) -> Asked:  # noqa: B008
    return read(path, json.dumps(fields).encode(), limits)


def refusal(path: str = COMPLETIONS, limits: Limits = Limits(), **fields: Any) -> ApiError:  # noqa: B008
    with pytest.raises(ApiError) as caught:
        asked(path, limits, **fields)
    return caught.value


@pytest.mark.parametrize(
    ("fields", "sessions", "tokens"),
    [
        ({"prompt": "word " * 800}, 1, 1000),
        ({"prompt": ["word " * 800, "a b " * 500], "n": 3}, 6, 1501),
        ({"prompt": list(range(500))}, 1, 500),
        ({"prompt": [[1, 2, 3], [4]], "n": 2}, 4, 4),
        ({"prompt": ""}, 1, 0),
        ({"prompt": []}, 1, 0),
        ({"n": None}, 1, 0),
        ({"prompt": 5}, 1, 0),
    ],
)
def test_sessions_and_prompt_tokens(fields, sessions, tokens):
    got = asked(**fields)
    assert (got.sessions, got.tokens) == (sessions, pytest.approx(tokens, abs=3))


def test_a_chat_of_128k_tokens_passes_with_the_defaults():
    text = "word " * 128_000
    got = asked(CHAT, messages=[{"role": "user", "content": text}])
    assert 128_000 < got.tokens < 200_000


def test_pictures_do_not_count_as_text():
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "iVBORw0KGgo" * 400_000}}
    got = asked(CHAT, messages=[{"role": "user", "content": [picture, picture]}])
    assert 2000 <= got.tokens < 2200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": -1}, "n"),
        ({"n": True}, "n"),
        ({"n": 1.5}, "n"),
        ({"n": "2"}, "n"),
        ({"n": 257}, "n"),
        ({"n": 2, "prompt": ["a"] * 129}, "n"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"top_logprobs": 2**63}, "top_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"logit_bias": {str(n): 1 for n in range(1025)}}, "logit_bias"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream_options": {"include_usage": True}, "stream": False}, "stream_options"),
        ({"speculative": "on"}, "speculative"),
    ],
)
def test_what_breaks_a_limit_names_its_field(fields, param):
    error = refusal(prompt=fields.pop("prompt", "x"), **fields)
    assert (error.status, error.param) == (400, param)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 256},
        {"stop": ["a"] * 16},
        {"stop": "a" * 1000},
        {"logprobs": 20},
        {"logprobs": True},
        {"logprobs": None},
        {"logit_bias": {str(n): 1 for n in range(1024)}},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"stream": True, "stream_options": None},
        {"stream_options": None},
        {"unknown": {"deep": [1]}},
    ],
)
def test_what_stands_within_the_limits_passes_unchanged(fields):
    body = json.dumps({"prompt": "x", **fields}).encode()
    assert read(COMPLETIONS, body, Limits()).body == body


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b'"x"', b"1", b'{"prompt": "x",}', b'{"a": NaN}', b"\xff", b'{"a" 1}', b"{}{}", b"null"],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/responses", "/v1/messages"])
def test_a_body_that_is_no_json_object_is_refused(path, body):
    with pytest.raises(ApiError) as caught:
        read(path, body, Limits())
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


@pytest.mark.parametrize(
    "value",
    [b'"\xff"', b"1e999", b"-1e999", b'["\xff"]', b'{"a":"\xff"}', b'{"a":1e999}', b"9" * 5000],
    ids=["text", "large", "small", "in a list", "in an object", "large in an object", "digits"],
)
@pytest.mark.parametrize(
    ("path", "name"),
    [
        *((CHAT, name) for name in ("stop", "n", "logit_bias", "logprobs", "top_logprobs", "prompt_logprobs")),
        *((CHAT, name) for name in ("stream", "stream_options", "speculative")),
        *((COMPLETIONS, "prompt"), (COMPLETIONS, "speculative"), (CHAT, "messages"), (BATCH, "messages"), (BATCH, "n")),
    ],
)
def test_what_is_refused_on_a_second_look_only_is_400_too(path, name, value):
    """A body's values are passed over at first. None may come out as anything but a refusal, or go on as it is."""
    body = b'{"%s": %s}' % (name.encode(), value)
    if name in ("prompt", "messages"):  # measured only: what is no list of texts is vLLM's to refuse
        with contextlib.suppress(ApiError):
            assert read(path, body, Limits()).body == body
        return
    with pytest.raises(ApiError) as caught:
        read(path, body, Limits())
    assert (caught.value.status, caught.value.param) == (400, name)


def test_a_batch_counts_its_conversations():
    chats = [[{"role": "user", "content": "x" * 400}]] * 3
    counted = read(BATCH, json.dumps({"messages": chats}).encode(), Limits())
    assert counted.sessions == 3
    assert 300 < counted.tokens < 400
    assert read(BATCH, b'{"messages": []}', Limits()).sessions == 1
    with pytest.raises(ApiError) as caught:
        read(BATCH, json.dumps({"messages": chats}).encode(), Limits(choices=2))
    assert caught.value.param == "n"


def test_sound_does_not_count_as_text():
    assert read("/v1/audio/transcriptions", b"x" * 10_000_000, Limits()).tokens == 1000


@pytest.mark.parametrize(("depth", "passes"), [(63, True), (64, False), (1000, False), (100_000, False)])
@pytest.mark.parametrize(("left", "right"), [("[", "]"), ('{"a":', "}"), ('[{"]}":', "}]")])
def test_nesting_has_a_limit(left, right, depth, passes):
    levels = depth // (2 if len(left) > 5 else 1)
    body = f'{{"prompt": "x", "y": {left * levels}1{right * levels}}}'.encode()
    if passes:
        assert read(COMPLETIONS, body, Limits()).body == body
    else:
        with pytest.raises(ApiError):
            read(COMPLETIONS, body, Limits())


@pytest.mark.parametrize("text", ['[[{"\\"[', "\\", "]\\\\", '\\"', "[\n"])
def test_brackets_in_text_are_no_nesting(text):
    assert asked(prompt=text * 1000, y=[text] * 100).body
    word = json.dumps(text)
    opening = f"[{word}," * 100
    with pytest.raises(ApiError):
        read(COMPLETIONS, f"{{{word}: {opening}1{']' * 100}}}".encode(), Limits())


def test_a_prompt_over_the_limit_is_refused_by_estimate():
    error = refusal(limits=Limits(prompt_tokens=1000), prompt="word " * 1000)
    assert (error.code, error.param) == ("context_length_exceeded", "prompt")
    assert refusal(limits=Limits(prompt_tokens=1000), prompt=[5] * 1001).code == "context_length_exceeded"
    assert asked(limits=Limits(prompt_tokens=1000), prompt=[5] * 1000).tokens == 1000


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"stream": True, "stream_options": {"include_usage": True}}, True),
        ({"stream": True, "stream_options": {"include_usage": False}}, False),
        ({"stream": True, "stream_options": {}}, False),
        ({"stream": True}, False),
        ({}, False),
    ],
)
def test_where_usage_is_wanted_at_the_end(fields, wanted):
    assert asked(CHAT, messages=[], **fields).usage_at_end is wanted


@pytest.mark.parametrize(
    "body",
    [
        b'{"x":[' + b"[]," * 1_700_000 + b"[]]}",
        b'{"x":[' + b'{"a":1},' * 600_000 + b"{}]}",
        json.dumps({"prompt": 'some "text"\n' * 350_000}).encode(),
        json.dumps({"prompt": list(range(700_000))}).encode(),
    ],
    ids=["arrays", "objects", "text", "ids"],
)
def test_five_megabytes_do_not_hold_the_event_loop(body):
    """Others' streams wait while a body is read. Building it would take a quarter of a second in the worst of these."""
    times = []
    for _ in range(3):
        started = time.thread_time()
        read(COMPLETIONS, body, Limits(prompt_tokens=10**9))
        times.append(time.thread_time() - started)
    assert min(times) < 0.15
