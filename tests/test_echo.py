"""router/echo.py: what a message repeats of a request, however the request was written."""

import json
import random
import time

import pytest

from specdec.router import echo
from specdec.router.echo import without_echo

SECRET = 'my "secret" prompt,\nwith é, \u4e2d\u6587 and a \\ in it'


def body(content: str, ascii_only: bool = True) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": content}], "n": 1}, ensure_ascii=ascii_only).encode()


@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("before", range(0, 12))
def test_what_was_asked_is_taken_out_at_any_place_and_in_either_spelling(ascii_only, before):
    asked = body("x" * before + SECRET, ascii_only)
    assert without_echo(f"cannot read '{SECRET}' here", asked) == "cannot read '…' here"
    half = SECRET[: len(SECRET) // 2]
    assert without_echo(f"cannot read '{half}", asked) == "cannot read '…"


def test_sixteen_characters_are_an_echo_and_fewer_are_not():
    asked = body("0123456789abcdefghij")
    assert without_echo("no: 0123456789abcde!", asked) == "no: 0123456789abcde!"
    assert without_echo("no: 0123456789abcdef!", asked) == "no: …!"


def test_a_message_that_is_nothing_else_is_empty():
    assert without_echo(SECRET, body(SECRET)) == ""
    assert without_echo(f"'{SECRET}'", body(SECRET)) == ""
    assert without_echo("", body(SECRET)) == ""
    assert without_echo("no", b"") == "no"


def test_whatever_is_repeated_little_of_it_is_left(monkeypatch):
    """Random cuts of a request, at the edges of small chunks."""
    monkeypatch.setattr(echo, "_CHUNK", 64)
    chance = random.Random(5)
    words = "".join(chance.choice("abcdefgh ") for _ in range(2000))
    asked = body(words)
    for _ in range(200):
        at, size = chance.randrange(1900), chance.randrange(16, 90)
        assert without_echo(f"<{words[at : at + size]}>", asked) in ("", "<…>")


@pytest.mark.parametrize(
    "text",
    ["the maximum number of tokens " * 200_000, "A" * 5_000_000, "".join(f"{n} " for n in range(700_000))],
    ids=["words", "letters", "numbers"],
)
def test_five_megabytes_cost_little_and_ordinary_words_stay(text):
    message = "This model's maximum context length is 1024 tokens. However, you requested 1000000 tokens"
    started = time.thread_time()
    kept = without_echo(message, body(text))
    assert time.thread_time() - started < 1
    assert kept == message
