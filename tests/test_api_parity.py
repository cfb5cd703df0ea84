"""Whatever a request asks, its answer with drafts accepted is the one of vLLM without plug-ins."""

import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle, product
from typing import Any

import httpx
import pytest

from engine_prompts import (
    Body,
    Document,
    Oracle,
    arrange,
    ask_all,
    counted,
    fixed,
    same,
    sequences,
)
from fake_drafters import trouble_file
from fake_policies import pause_file
from specdec.proto import speculation_pb2 as pb
from specdec.stack import Plain, Stack
from test_engine import Recorder, until

pytestmark = pytest.mark.engine

END = 2  # the demo model's end of an answer
MAX_STEPS = 8
STORY, NUMBERS, LOOP = "Once upon a time, in a small town", "1, 2, 3, 4, 5, 6, 7,", "x y x y x y x"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}, "old": {"type": "boolean"}},
    "required": ["name", "age", "old"],
    "additionalProperties": False,
}
GRAMMAR = 'root ::= name " is " size "."\nname ::= [A-Z] [a-z]{2,9}\nsize ::= "big" | "small" | "very " size'
PENALTIES = {"frequency_penalty": 0.7, "presence_penalty": 0.4, "repetition_penalty": 1.2}

# Each is asked about a story and about numbers, which repeat themselves.
COMPLETIONS: dict[str, Body] = {
    "nothing": {},
    "logprobs": {"logprobs": 5},
    "logprobs-of-itself": {"logprobs": 0},
    "logprobs-as-ids": {"logprobs": 2, "return_tokens_as_token_ids": True},
    "prompt-logprobs": {"prompt_logprobs": 2},
    "echo": {"echo": True, "logprobs": 2},
    "echo-alone": {"echo": True},
    "frequency-penalty": {"frequency_penalty": 0.9},
    "presence-penalty": {"presence_penalty": 1.1},
    "repetition-penalty": {"repetition_penalty": 1.3},
    "negative-penalties": {"frequency_penalty": -0.5, "presence_penalty": -0.5, "repetition_penalty": 0.9},
    "all-penalties": {**PENALTIES, "logprobs": 2},
    "bad-words": {"bad_words": ["the", "little", "8"]},
    "bad-words-of-several-tokens": {"bad_words": ["young girl", "there was", " 9, 10", "11, 12"]},
    "allowed-token-ids": {"allowed_token_ids": list(range(260, 700)), "logprobs": 1},
    "min-tokens": {"min_tokens": 15, "stop_token_ids": [28, 30]},
    "min-tokens-and-stop-strings": {"min_tokens": 15, "stop": [",", ".", "1"]},
    "stop-strings": {"stop": ["named", "town", ", 1", "12"]},
    "stop-strings-in-another-order": {"stop": ["12", ", 1", "town", "named"]},
    "stop-string-kept": {"stop": ["named", ", 1"], "include_stop_str_in_output": True, "logprobs": 1},
    "stop-ids": {"stop_token_ids": [28, 30]},
    "special-tokens-kept": {"skip_special_tokens": False, "spaces_between_special_tokens": False},
    "top-k-and-top-p": {"top_k": 5, "top_p": 0.9},
    "min-p": {"min_p": 0.2},
    "seed": {"seed": 5},
    "prompt-cut": {"truncate_prompt_tokens": 4},
    "cache-salt": {"cache_salt": "pepper"},
    "repetition-detected": {"repetition_detection": {"max_pattern_size": 4, "min_count": 3}, "prompt": LOOP},
    "json-schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
    "json-object": {"response_format": {"type": "json_object"}},
    "regex": {"structured_outputs": {"regex": "[A-Z][a-z]+( [a-z]+){5,12}\\."}},
    "choice": {"structured_outputs": {"choice": ["a girl named Lily", "a girl named Anna", "an old man"]}},
    "grammar": {"structured_outputs": {"grammar": GRAMMAR}},
    "grammar-and-penalties": {"structured_outputs": {"grammar": GRAMMAR}, **PENALTIES},
    "much-at-once": {**PENALTIES, "bad_words": ["the"], "min_tokens": 9, "stop": [".", "9"], "logprobs": 3, "top_k": 3},
    "several-prompts": {"prompt": [STORY, NUMBERS, LOOP]},
}
CHATS: dict[str, Body] = {
    "chat": {},
    "chat-logprobs": {"logprobs": True, "top_logprobs": 4},
    "chat-prompt-logprobs": {"prompt_logprobs": 1},
    "chat-penalties": PENALTIES,
    "chat-stop": {"stop": ["is", "."], "include_stop_str_in_output": True},
    "chat-json-schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
    "chat-echo": {"echo": True, "add_generation_prompt": False},
}
ALONE: dict[str, Body] = {
    "beam-search": {"use_beam_search": True, "n": 3, "max_tokens": 8},
    "prompt-only": {"echo": True, "max_tokens": 0, "logprobs": 1},
    "one-token": {"max_tokens": 1, "logprobs": 3},
}
LONG: Body = {"prompt": STORY, "max_tokens": 500, "ignore_eos": True}
STREAMED = ["nothing", "logprobs", "stop-strings", "stop-ids", "json-schema", "all-penalties", "chat", "chat-logprobs"]


def bodies_of(name: str) -> list[Body]:
    """The requests of one row of the tables."""
    if name in CHATS:
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        return [{"messages": messages, "max_tokens": 40, **CHATS[name]}]
    fields = {"max_tokens": 40, **(COMPLETIONS.get(name) or ALONE.get(name) or {})}
    return [fields] if "prompt" in fields else [{"prompt": prompt, **fields} for prompt in (STORY, NUMBERS)]


def speculate_with(stack: Stack, drafter: str, *router: str) -> None:
    """Gives the stack this draft and router."""
    arrange(stack, f"fake_drafters:{drafter}", *(router or fixed(MAX_STEPS, 4)))


def compare_all(stack: Stack, bodies: list[Body], expected: list[Document], at_once: int = 16) -> list[int]:
    """Asks all, fails on the first that is not as expected, and returns each one's accepted tokens."""
    got = ask_all(stack.url, bodies, at_once)
    for body, left, right in zip(bodies, expected, got, strict=True):
        same(left, right, str({name: body[name] for name in body if name not in ("prompt", "messages")}))
    return [counted(body, document) for body, document in zip(bodies, got, strict=True)]


def compare_at(
    steps: Sequence[int], stack: Stack, bodies: list[Body], expected: list[Document], at_once: int = 16
) -> dict[int, list[int]]:
    """`compare_all` of all requests at each of these step counts, by step count; they share their batches."""
    asked = [{**body, "speculative": {"steps": k}} for k in steps for body in bodies]
    accepted = compare_all(stack, asked, expected * len(steps), at_once)
    return {k: accepted[i * len(bodies) : (i + 1) * len(bodies)] for i, k in enumerate(steps)}


# ---- everything a request can ask


@pytest.fixture(scope="module")
def expected(plain: Plain, oracle: Oracle) -> Iterator[dict[str, list[Document]]]:
    """What vLLM without plug-ins answers to each row, by name. The drafts know it."""
    names = [*COMPLETIONS, *CHATS, *ALONE]
    table = [("long", LONG)] + [(name, body) for name in names for body in bodies_of(name)]
    answers: dict[str, list[Document]] = defaultdict(list)
    documents = ask_all(plain.url, [body for _, body in table])
    for (name, _), document in zip(table, documents, strict=True):
        answers[name].append(document)
    known = [document for name in ("long", *COMPLETIONS, *CHATS) if "echo" not in name for document in answers[name]]
    with oracle.knowing(sequences(known)):
        yield answers


@pytest.fixture(scope="module", params=["Perfect", "Noisy"])
def speculated(
    request: pytest.FixtureRequest, engine_stack: Stack, expected: dict[str, list[Document]]
) -> dict[str, list[Document]]:
    """What the stack answers to each row."""
    speculate_with(engine_stack, request.param)
    table = [(name, body) for name in (*COMPLETIONS, *CHATS) for body in bodies_of(name)]
    bodies = [{**body, "speculative": {"steps": k}} for (_, body), k in zip(table, cycle((8, 3, 5)), strict=False)]
    answers: dict[str, list[Document]] = defaultdict(list)
    for (name, _), document in zip(table, ask_all(engine_stack.url, bodies), strict=True):
        answers[name].append(document)
    return answers


@pytest.mark.parametrize("name", [*COMPLETIONS, *CHATS])
def test_what_a_request_asks_holds_with_speculation(
    engine_stack: Stack, expected: dict[str, list[Document]], speculated: dict[str, list[Document]], name: str
):
    bodies, got = bodies_of(name), speculated[name]
    for _ in range(3):
        for right, answer in zip(expected[name], got, strict=True):
            same(right, answer)
        if sum(counted(body, answer) for body, answer in zip(bodies, got, strict=True)) > 0:
            return
        got = ask_all(engine_stack.url, bodies)  # the drafts came late, as on a busy machine
    pytest.fail("no draft was accepted in three answers")


@pytest.mark.parametrize("name", ALONE)
def test_what_leaves_nothing_to_speculate_on_holds_too(
    engine_stack: Stack, expected: dict[str, list[Document]], name: str
):
    for right, got in zip(expected[name], ask_all(engine_stack.url, bodies_of(name)), strict=True):
        same(right, got)


def streamed(client: httpx.Client, url: str, body: Body) -> Document:
    """A streamed answer put together as if it had come whole."""
    path = "chat/completions" if "messages" in body else "completions"
    fields = {"model": "demo", "temperature": 0, "return_token_ids": True, "stream": True, **body}
    whole: dict[str, Any] = {"text": "", "token_ids": [], "logprobs": []}
    with client.stream(
        "POST", f"{url}/v1/{path}", json={**fields, "stream_options": {"include_usage": True}}
    ) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            for choice in chunk["choices"]:
                whole["text"] += choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
                whole["token_ids"] += choice.get("token_ids") or []
                logprobs = choice.get("logprobs") or {}
                whole["logprobs"] += logprobs.get("content") or logprobs.get("token_logprobs") or []
                if choice.get("finish_reason"):
                    whole |= {name: choice.get(name) for name in ("finish_reason", "stop_reason")}
            if usage := chunk.get("usage"):
                whole["usage"] = usage
    return whole


def in_one_piece(document: Document) -> Document:
    """A whole answer in the form `streamed` gives."""
    (choice,) = document["choices"]
    logprobs = choice.get("logprobs") or {}
    return {
        "text": choice["message"]["content"] if "message" in choice else choice["text"],
        "logprobs": logprobs.get("content") or logprobs.get("token_logprobs") or [],
        "usage": document["usage"],
    } | {name: choice[name] for name in ("token_ids", "finish_reason", "stop_reason")}


def test_a_streamed_answer_is_the_whole_one(engine_stack: Stack, expected: dict[str, list[Document]]):
    speculate_with(engine_stack, "Perfect")
    table = [(b, e) for name in STREAMED for b, e in zip(bodies_of(name), expected[name], strict=True)]
    with httpx.Client(timeout=120, trust_env=False) as client, ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda row: streamed(client, engine_stack.url, row[0]), table))
    for document, (_, right) in zip(got, table, strict=True):
        same(in_one_piece(right), document)
    details = [document["usage"]["completion_tokens_details"] for document in got]
    total = sum(len(document["token_ids"]) for document in got)
    assert sum(counts["accepted_prediction_tokens"] for counts in details) > total / 3


# ---- where an answer ends


def test_an_answer_stops_at_any_token_of_an_accepted_run(
    plain: Plain, engine_stack: Stack, expected: dict[str, list[Document]]
):
    """Stop ids, strings that end with the token and strings over two tokens."""
    speculate_with(engine_stack, "Perfect")
    bodies: list[Body] = []
    for prompt, document in zip((STORY, NUMBERS), expected["logprobs"], strict=True):
        (choice,) = document["choices"]
        pieces = choice["logprobs"]["tokens"]
        for i in range(13):
            stops: list[Body] = [{"stop_token_ids": [choice["token_ids"][i]]}, {"stop": [pieces[i]]}]
            if i:
                stops.append({"stop": ["never", pieces[i - 1][-1] + pieces[i][:2]]})
            kept = {"include_stop_str_in_output": i % 2 == 0}
            bodies += [{"prompt": prompt, "max_tokens": 16, "logprobs": 1, **stop, **kept} for stop in stops]
    right = ask_all(plain.url, bodies)
    ends = {len(d["choices"][0]["token_ids"]) for d in right if d["choices"][0]["finish_reason"] == "stop"}
    assert ends >= set(range(1, 10))
    for accepted in compare_at((3, 8), engine_stack, bodies, right, 10).values():
        assert sum(accepted) > len(bodies) * 2


@dataclass(frozen=True)
class Ends:
    """Requests whose answers end by themselves, soon, and what plain vLLM answers."""

    bodies: list[Body]  # the answers' beginnings are in the prompts, of every length
    right: list[Document]
    tight: list[Body]  # of as many tokens as the answer has, one less, and one more
    tight_right: list[Document]
    past: list[Document]  # what would follow the ends


@pytest.fixture(scope="module")
def ends(plain: Plain, oracle: Oracle) -> Ends:
    begun = [(short, j) for short in oracle.short for j in range(min(MAX_STEPS + 1, len(short.ids) - 1))]
    bodies = [{"prompt": [*short.prompt_ids, *short.ids[:j]], "max_tokens": 48, "logprobs": 0} for short, j in begun]
    tight = [
        {"prompt": list(s.prompt_ids), "max_tokens": len(s.ids) + more} for s in oracle.short for more in (-1, 0, 1)
    ]
    on = [{"prompt": list(s.prompt_ids), "max_tokens": 48, "ignore_eos": True} for s in oracle.short]
    answers = iter(ask_all(plain.url, [*on, *bodies, *tight]))
    past, right, tight_right = ([next(answers) for _ in asked] for asked in (on, bodies, tight))
    for short, document in zip(oracle.short, past, strict=True):
        assert short.ids[-1] == END
        assert document["choices"][0]["token_ids"][: len(short.ids)] == list(short.ids)
    reasons = [document["choices"][0]["finish_reason"] for document in tight_right]
    assert reasons == ["length", "stop", "stop"] * len(oracle.short)
    return Ends(bodies, right, tight, tight_right, past)


@pytest.mark.parametrize(("drafter", "steps"), [("Perfect", range(1, MAX_STEPS + 1)), ("PastEnd", (2, 5, 8))])
def test_an_answer_ends_at_any_position_of_an_accepted_run(
    engine_stack: Stack, oracle: Oracle, ends: Ends, drafter: str, steps: Sequence[int]
):
    """The drafts go on past the end: with what the target would say there, all of it accepted, or with anything."""
    with oracle.knowing(sequences(ends.past)):
        speculate_with(engine_stack, drafter)
        compare_at(steps, engine_stack, ends.tight, ends.tight_right)
        for k, accepted in compare_at(steps, engine_stack, ends.bodies, ends.right, 8).items():
            ended_at = set()
            for document, count in zip(ends.right, accepted, strict=True):
                runs, last = divmod(len(document["choices"][0]["token_ids"]) - 2, k + 1)
                if count == runs * k + min(last + 1, k):  # every run was accepted whole, so the last ended there
                    ended_at.add(last + 1)
            seen = [(len(d["choices"][0]["token_ids"]), n) for d, n in zip(ends.right, accepted, strict=True)]
            assert ended_at == set(range(1, k + 2)), f"k = {k}: {seen}"


def test_max_tokens_are_the_most_an_answer_has(plain: Plain, engine_stack: Stack, oracle: Oracle):
    short = min(oracle.short, key=lambda answer: len(answer.ids))
    assert 4 < len(short.ids) < 20
    bodies: list[Body] = [
        {"prompt": list(short.prompt_ids), "max_tokens": n, "logprobs": 0, "ignore_eos": ignore}
        for n, ignore in product(range(1, 21), (False, True))
    ]
    right = ask_all(plain.url, bodies)
    with oracle.knowing(sequences(right)):
        speculate_with(engine_stack, "Perfect")
        for accepted in compare_at(range(1, MAX_STEPS + 1), engine_stack, bodies, right).values():
            assert sum(accepted) > 20 * 5


# ---- several choices, and what is refused


def test_several_choices_differ_and_repeat_without_speculation(plain: Plain, engine_stack: Stack):
    speculate_with(engine_stack, "Bigrams")
    body: Body = {"prompt": NUMBERS, "max_tokens": 24, "temperature": 0.9, "n": 4, "seed": 7, "logprobs": 0}
    chat: Body = {"messages": [{"role": "user", "content": "Name a colour."}], "max_tokens": 24} | {
        "temperature": 1.1, "n": 4, "logprobs": True,
    }  # fmt: skip
    with_drafts = ask_all(engine_stack.url, [body, chat])
    for asked, document in zip((body, chat), with_drafts, strict=True):
        choices = document["choices"]
        assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
        assert {choice["finish_reason"] for choice in choices} <= {"stop", "length"}
        assert len({tuple(choice["token_ids"]) for choice in choices}) == 4
        counted(asked, document)
    assert with_drafts[0]["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0
    (seeded,) = ask_all(plain.url, [body])
    compare_all(engine_stack, [body | {"speculative": "off"}], [seeded])


@pytest.mark.parametrize(
    "fields",
    [{"n": 2}, {"suffix": "end"}, {"min_tokens": 9, "max_tokens": 8}, {"bad_words": [""]}],
    ids=lambda fields: next(iter(fields)),
)
def test_what_vllm_refuses_is_refused_in_its_words(plain: Plain, engine_stack: Stack, fields: Body):
    body = {"model": "demo", "prompt": STORY, "temperature": 0, **fields}
    answers = [httpx.post(url + "/v1/completions", json=body, timeout=30) for url in (plain.url, engine_stack.url)]
    assert [answer.status_code for answer in answers] == [400, 400]
    theirs, ours = (answer.json()["error"] for answer in answers)
    assert ours["message"]
    assert theirs["message"].startswith(ours["message"])  # which leaves out the value that vLLM repeats


# ---- drafts that are wrong, paused, failing or slow


def test_long_answers_with_random_drafts_of_every_length(engine_stack: Stack, expected: dict[str, list[Document]]):
    speculate_with(engine_stack, "Random")
    right = expected["long"][0]["choices"][0]["token_ids"]
    bodies: list[Body] = [{**LONG, "max_tokens": 300, "speculative": {"steps": k}} for k in range(1, MAX_STEPS + 1)]
    for body, document in zip(bodies, ask_all(engine_stack.url, bodies), strict=True):
        assert document["choices"][0]["token_ids"] == right[:300]
        counted(body, document)
        assert document["usage"]["completion_tokens_details"]["rejected_prediction_tokens"] > 250


@pytest.mark.parametrize("restart", [False, True], ids=["the-same-draft", "a-new-draft"])
def test_drafts_are_right_at_once_after_a_pause(
    engine_stack: Stack, oracle: Oracle, expected: dict[str, list[Document]], restart: bool
):
    """For a session from before the pause and one whose prompt came in it."""
    right = expected["long"][0]["choices"][0]["token_ids"]
    pause = pause_file(oracle.path)
    speculate_with(engine_stack, "Perfect", "--policy", "fake_policies:Pausing", "--steps", "4", "--window", "1")
    with Recorder(engine_stack) as recorder, ThreadPoolExecutor(2) as pool:

        def cycles(since: float) -> list[pb.Verdict]:
            return [v for at, v in recorder.cycles if at > since]

        try:
            before = pool.submit(ask_all, engine_stack.url, [LONG])
            until(lambda: len(cycles(0)) > 10)
            pause.touch()
            time.sleep(0.3)  # what was ordered before
            paused = time.monotonic()
            within = pool.submit(ask_all, engine_stack.url, [{**LONG, "max_tokens": 250}])
            if restart:
                engine_stack.start_draft("fake_drafters:Perfect")
                engine_stack.wait_ready()
            until(lambda: [n > 50 for n in Counter(v.session for v in cycles(paused)).values()] == [True, True])
            assert not any(v.proposed for v in cycles(paused))
        finally:
            pause.unlink(missing_ok=True)
        resumed = time.monotonic()
        for answer, n in ((before, 500), (within, 250)):
            (document,) = answer.result(120)
            assert document["choices"][0]["token_ids"] == right[:n]
        after = [v for v in cycles(resumed) if v.steps]
    assert len({v.session for v in after}) == 2
    for session in {v.session for v in after}:
        first = [v for v in after if v.session == session][:10]
        assert all(v.accepted == v.proposed for v in first)
        assert sum(v.accepted for v in first) > 20


@pytest.mark.parametrize(
    ("drafter", "reason"), [("OutOfMemory", pb.REASON_DRAFT_SHORT), ("Slowing", pb.REASON_DRAFT_LATE)]
)
def test_a_draft_that_fails_or_slows_down_for_a_while_costs_speed_only(
    engine_stack: Stack, oracle: Oracle, expected: dict[str, list[Document]], drafter: str, reason: int
):
    right = expected["long"][0]["choices"][0]["token_ids"]
    trouble = trouble_file(oracle.path)
    trouble.unlink(missing_ok=True)
    speculate_with(engine_stack, drafter, *fixed(2, 2))
    with Recorder(engine_stack) as recorder, ThreadPoolExecutor(1) as pool:
        answers = pool.submit(ask_all, engine_stack.url, [LONG] * 4)

        def cycles(since: float) -> list[pb.Verdict]:
            return [v for at, v in recorder.cycles if at > since and v.steps]

        def accepting(since: float, times: int) -> None:
            until(lambda: sum(v.accepted > 0 for v in cycles(since)) > times, 60)

        accepting(0, 200)  # long enough for the engine to know the draft's pace
        began = time.monotonic()
        try:
            trouble.touch()
            until(lambda: sum(v.reason == reason and not v.proposed for v in cycles(began)) > 8, 60)
        finally:
            trouble.unlink(missing_ok=True)
        accepting(time.monotonic(), 16)
        assert all(document["choices"][0]["token_ids"] == right for document in answers.result(120))
