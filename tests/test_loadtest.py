"""The load test's figures against a server whose delays and counts are known, and against the real stack."""

import contextlib
import hashlib
import itertools
import json
import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml
from loadtest import _client, _figures
from loadtest.__main__ import main
from loadtest._ab import parser
from loadtest._arrivals import arrivals, play
from loadtest._client import FAILED, OK, REJECTED, Sample, SetupError, Target
from loadtest._figures import Figures, interval, mean, percentile, wall_s
from loadtest._load import Load
from loadtest._prompts import KINDS, Lengths, Prompts, read_trace
from loadtest._report import cells, verdict

from engine_prompts import arrange
from fake_openai import CHARS_A_TOKEN, CONTEXT, FAULTS, SHAPES, FakeOpenAI, Sent
from specdec.client import Decoded, decoded
from specdec.stack import Stack, free_ports

ROOT = Path(__file__).parent.parent
LOADTEST = ROOT / "loadtest"
SLACK_S = 0.02  # what waking a thread on a busy machine may take, beside the 5 %


# ---- the truth, and what is held against it


def true_times(sent: Sequence[Sent]) -> dict[str, list[float]]:
    """What the answers took, by the server's own clock, in seconds."""
    return {
        "first_token": [s.first - s.received for s in sent],
        "per_token": [(s.last - s.first) / (s.tokens - 1) for s in sent],
        "end_to_end": [s.done - s.received for s in sent],
        "stream_rate": [s.tokens / (s.done - s.received) for s in sent],
    }


def errors(figures: Figures, sent: Sequence[Sent], wall: float) -> dict[str, float]:
    """How far each figure is from what the server did, as a share of that, less what a busy machine explains."""
    whole = [s for s in sent if s.fault in ("", *SHAPES)]
    rejected = sum(s.fault == "429" for s in sent)
    counts = {
        "requests": len(sent),
        "answered": len(whole),
        "rejected": rejected,
        "failed": len(sent) - len(whole) - rejected,
        "prompt_tokens": sum(s.prompt_tokens for s in whole),
        "completion_tokens": sum(s.tokens for s in whole),
    }
    found = {name: abs(getattr(figures, name) - true) / max(1, true) for name, true in counts.items()}
    late = 2 * SLACK_S / wall
    rates = {
        "wall_s": wall,
        "total_rate": sum(s.tokens for s in whole) / wall,
        "request_rate": len(whole) / wall,
        "accept_length": 1 + sum(s.accepted for s in whole) / sum(s.cycles for s in whole),
    }
    found |= {name: abs(getattr(figures, name) / true - 1) - late for name, true in rates.items()}
    times = true_times(whole)
    slack = {"per_token": SLACK_S / 6, "stream_rate": SLACK_S * max(times["stream_rate"]) / min(times["end_to_end"])}
    for name, values in times.items():
        for label, true in (("mean", mean(values)), *((f"p{q}", percentile(values, q / 100)) for q in (50, 90, 99))):
            got, explained = getattr(getattr(figures, name), label), slack.get(name, SLACK_S)
            found[f"{name} {label}"] = (abs(got - true) - explained) / true
    return found


def compare(figures: Figures, sent: Sequence[Sent], wall: float) -> None:
    """Fails where a figure is more than 5 % from what the server did."""
    wrong = {name: round(error, 3) for name, error in errors(figures, sent, wall).items() if error > 0.05}
    if wrong:
        raise AssertionError(str(wrong))  # whole: an assert's text would be cut short


def attempts(check: Callable[[], None]) -> None:
    """Fails if a check fails four times: a machine that is busy makes some fail, a fault of the load test all."""
    for left in reversed(range(4)):
        try:
            return check()
        except (AssertionError, pytest.fail.Exception):
            if not left:
                raise


def true_wall(sent: Sequence[Sent]) -> float:
    return max(s.done for s in sent) - min(s.received for s in sent)


def measured(fake: FakeOpenAI, requests: int, **fields: Any) -> tuple[Figures, list[Sent]]:
    """Figures of requests sent at once, each of seven tokens, and what the server did."""
    load = Load(Target(fake.url), Prompts(output_tokens=Lengths(7, 7)), "fake-model", fields)
    samples: list[Sample] = []
    start = time.perf_counter()

    def one(number: int, due: float) -> None:
        samples.extend(load.converse(load.prompts.conversation("chat", number), due, start))

    play([0.0] * requests, start, one)
    return Figures.of(samples, wall_s(samples)), [fake.sent[sample.id] for sample in samples]


@pytest.mark.parametrize("speculative", ["off", "auto", {"steps": 3}], ids=str)
def test_figures_are_what_the_server_did(speculative: Any):
    def check() -> None:
        with FakeOpenAI().serving() as fake:
            figures, sent = measured(fake, 6, speculative=speculative)
        assert {str(s.body["speculative"]) for s in sent} == {str(speculative)}
        compare(figures, sent, true_wall(sent))

    attempts(check)


FAULT_MIX = ("", "429", "", "error event", "no [DONE]", "no finish reason", "close", "crlf")


def mixed() -> tuple[Figures, list[Sent], float]:
    """Figures of eight requests of which four fail in some way, what the server did, and its time for all."""
    with FakeOpenAI(fault=lambda number: FAULT_MIX[number % 8]).serving() as fake:
        figures, sent = measured(fake, 8)
    return figures, sent, true_wall([s for s in sent if s.done])


def test_figures_leave_out_what_failed_and_count_429_apart():
    def check() -> None:
        figures, sent, wall = mixed()
        assert (figures.answered, figures.rejected, figures.failed) == (4, 1, 3)
        compare(figures, sent, wall)

    attempts(check)


# ---- mutants: a load test with a well-known fault is found out by the comparison above


def role_event_is_a_token(patch: pytest.MonkeyPatch) -> None:
    take = _client._Answer.take

    def mutant(self: Any, now: float, data: bytes) -> None:
        self.first = self.first or now
        take(self, now, data)

    patch.setattr(_client._Answer, "take", mutant)


def an_event_is_a_token(patch: pytest.MonkeyPatch) -> None:
    def mutant(sample: Sample) -> float | None:
        assert sample.first_s is not None
        assert sample.last_s is not None
        assert sample.accepted is not None
        return (sample.last_s - sample.first_s) / (sample.completion_tokens - sample.accepted - 1)

    patch.setattr(_figures, "per_token", mutant)


def errors_in_streams_pass(patch: pytest.MonkeyPatch) -> None:
    take = _client._Answer.take

    def mutant(self: Any, now: float, data: bytes) -> None:
        if b'"error"' not in data:
            take(self, now, data)

    patch.setattr(_client._Answer, "take", mutant)
    patch.setattr(_client._Answer, "check", lambda self: setattr(self, "usage", self.usage or {
        "prompt_tokens": 1, "completion_tokens": 2
    }))  # fmt: skip


def a_429_is_a_failure(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_client, "REJECTED", FAILED)


def the_prompts_pass_is_a_cycle(patch: pytest.MonkeyPatch) -> None:
    def mutant(samples: Sequence[Sample]) -> float:
        tokens = sum(s.completion_tokens for s in samples)
        return tokens / (tokens - sum(s.accepted or 0 for s in samples))

    patch.setattr(_figures, "accept_length", mutant)


def an_answer_ends_with_its_first_token(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_figures, "end_to_end", lambda sample: sample.first_s)


def a_rate_is_per_answer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_figures, "stream_rate", lambda sample: 1 / sample.total_s)


@pytest.mark.parametrize(
    ("mutate", "figure"),
    [
        (role_event_is_a_token, "first_token p50"),
        (an_event_is_a_token, "per_token p50"),
        (errors_in_streams_pass, "failed"),
        (a_429_is_a_failure, "rejected"),
        (the_prompts_pass_is_a_cycle, "accept_length"),
        (an_answer_ends_with_its_first_token, "end_to_end p50"),
        (a_rate_is_per_answer, "stream_rate p50"),
    ],
)
def test_a_load_test_that_is_wrong_is_found_out(
    monkeypatch: pytest.MonkeyPatch, mutate: Callable[[pytest.MonkeyPatch], None], figure: str
):
    def check() -> None:
        with pytest.raises(AssertionError, match=figure):
            compare(*mixed())

    mutate(monkeypatch)
    attempts(check)


# ---- one request


SAID = {
    "429": "429",
    "500": "status 500",
    "error event": "error event: the engine broke off",
    "no finish reason": "without a finish reason",
    "no [DONE]": "without [DONE]",
    "no usage": "no usage",
    "cut": "IncompleteRead",
    "html": "not a stream but text/html",
    "garbage": "JSONDecodeError",
    "abort": "finish reason abort",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_answer_that_is_not_whole_is_no_success(fault: str):
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    with FakeOpenAI(0.01, 0.01, fault=lambda number: fault if number == 0 else "").serving() as fake:
        target = Target(fake.url)
        sample, _ = target.chat(body)
        assert sample.status == (REJECTED if fault == "429" else FAILED)
        assert SAID[fault] in sample.error
        assert sample.retry_after_s == (1 if fault == "429" else None)
        after, text = target.chat(body)  # nothing of the broken answer is read as the next one's
        assert (after.status, text, after.completion_tokens) == (OK, " word" * 4, 4)


@pytest.mark.parametrize("shape", SHAPES)
def test_an_answer_framed_otherwise_is_timed_alike(shape: str):
    def check() -> None:
        with FakeOpenAI(fault=lambda number: shape).serving() as fake:
            figures, sent = measured(fake, 2)
        compare(figures, sent, true_wall(sent))

    attempts(check)


def test_a_server_that_is_not_there_is_a_failure_and_not_an_exception():
    (port,) = free_ports(1)
    sample, _ = Target(f"http://127.0.0.1:{port}").chat({"messages": [], "max_tokens": 2})
    assert (sample.status, sample.error.split(":")[0]) == (FAILED, "ConnectionRefusedError")
    with pytest.raises(SetupError, match="ConnectionRefusedError"):
        Load(Target(f"http://127.0.0.1:{port}"), Prompts()).prepare()
    with pytest.raises(SetupError, match="not an http"):
        Target("localhost:8000").models()


def test_latency_counts_from_when_a_request_was_due():
    def check() -> None:
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
        with FakeOpenAI(0.1, 0.05).serving() as fake:
            sample, _ = Target(fake.url).chat(body, due=time.perf_counter() - 1)
        assert sample.late_s == pytest.approx(1, abs=0.05)
        assert sample.first_s == pytest.approx(1.1, abs=0.05)
        assert sample.total_s == pytest.approx(1.15, abs=0.05)

    attempts(check)


def test_the_key_and_a_path_before_v1_are_sent():
    seen: list[tuple[str, str]] = []

    class Seeing(Target):
        def _path(self, name: str) -> str:
            seen.append((super()._path(name), self._headers()["Authorization"]))
            return super()._path(name)

    for url in ("https://x.test/llm", "https://x.test/llm/v1", "https://x.test/llm/v1/"):
        Seeing(url, "secret")._path("models")
    assert seen == [("/llm/v1/models", "Bearer secret")] * 3


# ---- prompts


def test_conversations_depend_on_seed_kind_and_number_only():
    for kind in (*KINDS, "mixed"):
        assert Prompts(3).conversation(kind, 5) == Prompts(3).conversation(kind, 5)
        assert len({Prompts(seed).conversation(kind, n) for seed in range(3) for n in range(10)}) == 30
    kinds = Counter(Prompts().conversation("mixed", n).kind for n in range(400))
    assert kinds["chat"] > kinds["code"] > kinds["summarise"] > kinds["agent"] > 10


def test_the_committed_results_prompts_are_still_what_is_asked():
    prompts = Prompts(0, Lengths.parse("60-200"), Lengths.parse("16-48"), chars_a_token=4.5)
    asked = [prompts.conversation(kind, number) for kind in (*KINDS, "mixed") for number in range(300)]
    assert hashlib.sha256(repr(asked).encode()).hexdigest().startswith("a33caaff0f0dd4c1")


@pytest.mark.parametrize("kind", KINDS)
def test_no_two_conversations_begin_alike_but_for_the_agents_system_prompt(kind: str):
    conversations = [Prompts().conversation(kind, number) for number in range(100)]
    assert len({conversation.turns[0].text[:16] for conversation in conversations}) > 95
    assert len({conversation.system for conversation in conversations}) == 1
    assert bool(conversations[0].system) == (kind == "agent")
    turns = {len(conversation.turns) for conversation in conversations}
    assert turns == ({3, 4, 5, 6} if kind == "agent" else {1})


@pytest.mark.parametrize("kind", KINDS)
def test_lengths_are_what_was_asked_for(kind: str):
    prompts = Prompts(input_tokens=Lengths.parse("100-300"), output_tokens=Lengths.parse("20"), chars_a_token=5)
    turns = [turn for n in range(50) for turn in prompts.conversation(kind, n).turns]
    assert {turn.max_tokens for turn in turns} == {20}
    tokens = [len(turn.text) / 5 for turn in turns]
    assert min(tokens) >= 95
    assert max(tokens) <= 301
    assert statistics.mean(tokens) == pytest.approx(200, rel=0.1)


def test_a_small_context_is_kept():
    for kind in KINDS:
        prompts = Prompts(context=1024, chars_a_token=4)
        for number in range(100):
            conversation = prompts.conversation(kind, number)
            asked = sum(len(turn.text) / 4 + turn.max_tokens for turn in conversation.turns)
            assert conversation.turns
            assert asked + len(conversation.system) / 4 <= 0.95 * 1024


def test_lognormal_lengths_have_their_median_and_are_cut():
    lengths, rng = Lengths.parse("lognormal:200:0.6"), random.Random(1)
    drawn = [lengths.draw(rng) for _ in range(4000)]
    assert statistics.median(drawn) == pytest.approx(200, rel=0.05)
    assert statistics.stdev(math.log(n) for n in drawn) == pytest.approx(0.6, rel=0.05)
    assert max(Lengths.parse("lognormal:200:9").draw(rng) for _ in range(50)) == 1600


@pytest.mark.parametrize("text", ["", "0", "20-10", "0-5", "lognormal:0:1", "lognormal:20", "a", "-5", "1.5"])
def test_a_length_that_is_none_is_refused(text: str):
    with pytest.raises(SetupError, match="is no length"):
        Lengths.parse(text)


def test_a_first_request_tells_the_context_and_the_characters_a_token():
    with FakeOpenAI(0.01, 0.01).serving() as fake:
        load = Load(Target(fake.url), Prompts())
        load.prepare()
        assert (load.model, load.prompts.context) == ("fake-model", CONTEXT)
        assert load.prompts.chars_a_token == pytest.approx(CHARS_A_TOKEN, rel=0.02)
        with pytest.raises(SetupError, match="not 'another'"):
            Load(Target(fake.url), Prompts(), "another").prepare()


def test_an_agents_turns_grow_on_one_prefix_with_the_answers_in_it():
    with FakeOpenAI(0.01, 0.005).serving() as fake:
        load = Load(Target(fake.url), Prompts(output_tokens=Lengths(3, 3)), "fake-model")
        conversation = load.prompts.conversation("agent", 1)
        samples = list(load.converse(conversation, time.perf_counter(), time.perf_counter()))
        asked = [fake.sent[sample.id].body["messages"] for sample in samples]
    assert len(asked) == len(conversation.turns) >= 3
    assert [message["role"] for message in asked[-1][:4]] == ["system", "user", "assistant", "user"]
    for before, after in itertools.pairwise(asked):
        assert after[: len(before)] == before
        assert after[len(before)] == {"role": "assistant", "content": " word" * 3}
    due = [sample.arrival_s for sample in samples]
    assert all(b >= a + s.total_s for a, b, s in zip(due, due[1:], samples, strict=False))


def test_a_trace_gives_arrivals_and_lengths(tmp_path: Path):
    path = tmp_path / "trace.csv"
    path.write_text("arrival,input,output\n1.5,300,7\n0.25,100,9\n")
    rows = read_trace(path)
    assert [row.arrival_s for row in rows] == [0.25, 1.5]
    prompts = Prompts(trace=rows, chars_a_token=4)
    for number, (tokens, answer) in enumerate([(100, 9), (300, 7), (100, 9)]):
        for kind in KINDS:
            (turn,) = prompts.conversation(kind, number).turns
            assert (turn.max_tokens, len(turn.text)) == (answer, tokens * 4)
    for broken in ("", "arrival,input\n1,2\n", "arrival,input,output\nx,1,1\n", "arrival,input,output\n1,0,1\n"):
        path.write_text(broken)
        with pytest.raises(SetupError, match=r"trace\.csv"):
            read_trace(path)


# ---- arrivals


def test_poisson_arrivals_have_their_rate_and_no_memory():
    times = arrivals("poisson", [20], 200, 1, "seed")
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert len(times) / 200 == pytest.approx(20, rel=0.05)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(1, rel=0.05)
    assert times == sorted(times)
    assert times == arrivals("poisson", [20], 200, 1, "seed") != arrivals("poisson", [20], 200, 1, "other")


def test_bursts_come_at_once_at_the_same_mean_rate():
    times = arrivals("bursts", [20], 400, 8, "seed")
    assert set(Counter(times).values()) == {8}
    assert len(times) / 400 == pytest.approx(20, rel=0.1)


def test_steps_take_each_rate_for_an_equal_time():
    times = arrivals("steps", [5, 20, 10], 300, 1, "seed")
    counts = [sum(a <= at < a + 100 for at in times) / 100 for a in (0, 100, 200)]
    assert counts == pytest.approx([5, 20, 10], rel=0.15)


@pytest.mark.parametrize(("shape", "rates"), [("poisson", [0.0]), ("poisson", []), ("steps", [1, -1]), ("waves", [1])])
def test_arrivals_that_cannot_be_are_refused(shape: str, rates: list[float]):
    with pytest.raises(SetupError):
        arrivals(shape, rates, 10, 1, "seed")


def test_an_open_loop_does_not_wait_for_answers():
    def check() -> None:
        schedule = [0.0, 0.1, 0.2, 0.3, 0.4]
        with FakeOpenAI(0.6, 0.01).serving() as fake:
            load = Load(Target(fake.url), Prompts(output_tokens=Lengths(2, 2)), "fake-model")

            def one(number: int, due: float) -> None:
                list(load.converse(load.prompts.conversation("chat", number), due, due))

            play(schedule, time.perf_counter(), one)
            received = sorted(sent.received for sent in fake.sent.values())
        assert [at - received[0] for at in received] == pytest.approx(schedule, abs=0.06)

    attempts(check)


# ---- figures without a server


def synthetic(variant: str, block: int, each_s: float, *, rate: float = 1.0, accepted: int = 0) -> Sample:
    last = 0.1 + each_s * 10
    return Sample(
        variant=variant, block=block, rate=rate, first_s=0.1, last_s=last, total_s=last, completion_tokens=11,
        accepted=accepted,
    )  # fmt: skip


def test_percentiles_are_numpys():
    rng = random.Random(2)
    for size in (1, 2, 3, 10, 101):
        values = [rng.random() for _ in range(size)]
        for q in (0, 0.01, 0.5, 0.9, 0.99, 1):
            assert percentile(values, q) == pytest.approx(float(np.quantile(values, q)))


def test_the_bootstraps_interval_is_the_one_theory_gives():
    rng = random.Random(4)
    groups = [[Sample(total_s=rng.gauss(10, 2))] for _ in range(200)]
    values = [group[0].total_s for group in groups]
    found = interval(groups, lambda drawn: mean([s.total_s for group in drawn for s in group]))
    half = 1.96 * statistics.stdev(values) / math.sqrt(len(values))
    assert found == pytest.approx((mean(values) - half, mean(values) + half), abs=0.25 * half)


def test_five_blocks_cover_the_truth_as_often_as_is_said():
    rng, covered = random.Random(5), 0
    for _ in range(300):
        groups = [[Sample(total_s=rng.gauss(10, 2))] for _ in range(5)]
        found = interval(groups, lambda drawn: mean([group[0].total_s for group in drawn]))
        assert found is not None
        covered += found[0] <= 10 <= found[1]
    assert 0.91 <= covered / 300 <= 0.98
    assert [_figures._student(n) for n in (4, 9, 30)] == pytest.approx([2.776, 2.262, 2.042], abs=0.01)


def test_blocks_whose_requests_are_alike_make_the_interval_wide():
    rng = random.Random(4)
    blocks = [[Sample(total_s=level)] * 20 for level in [rng.gauss(10, 2) for _ in range(12)]]
    statistic: Callable[[Sequence[_figures.Group]], float] = lambda drawn: mean([s.total_s for g in drawn for s in g])  # noqa: E731
    by_block, by_request = interval(blocks, statistic), interval([[s] for block in blocks for s in block], statistic)
    assert by_block is not None
    assert by_request is not None
    assert by_block[1] - by_block[0] > 3 * (by_request[1] - by_request[0])
    assert interval(blocks[:1], statistic) is None


def test_a_ratios_interval_pairs_the_blocks():
    """What a block does to all variants alike, a machine that is busy for example, does not widen it."""
    samples = []
    for block, level in enumerate([0.01, 0.03, 0.02, 0.05, 0.04, 0.025]):
        samples += [synthetic("off", block, level), synthetic("auto", block, level / 1.5)]
    auto = cells(samples, ["off", "auto"], 0)[1]
    assert auto.speed is not None
    assert auto.speed.value == pytest.approx(1.5)
    assert auto.speed.interval == pytest.approx((1.5, 1.5))
    median = auto.times["time per token"]["p50"].interval
    assert median is not None
    assert median[1] > 1.5 * median[0]


def test_accept_length_is_of_all_cycles_and_leaves_out_the_prompts_pass():
    samples = [synthetic("auto", 0, 0.01, accepted=5), synthetic("auto", 0, 0.01, accepted=0)]
    assert _figures.accept_length(samples) == pytest.approx(20 / 15)
    assert _figures.accept_length([replace(samples[0], accepted=None)]) is None
    assert _figures.accept_length([replace(samples[0], status=FAILED)]) is None


def judged(factors: dict[float, float], **changed: Any) -> str:
    """The verdict where `auto` is so many times as fast as off, by rate, give or take noise of 5 %."""
    rng = random.Random(7)
    samples = [
        replace(synthetic(name, block, 0.02 / (factors[rate] if name == "auto" else 1) * rng.uniform(0.95, 1.05),
                          rate=rate), **changed)
        for rate in factors for block in range(6) for name in ("off", "auto")
    ]  # fmt: skip
    return verdict(cells(samples, ["off", "auto"], 0), samples)


def test_the_verdict_says_what_the_intervals_allow():
    assert judged({1.0: 1.5, 2.0: 1.3}).startswith("Speculation pays at every rate measured: against off, tokens")
    assert judged({1.0: 1.5, 2.0: 1.0}).startswith("Speculation pays at 1/s and makes no difference")
    assert judged({1.0: 1.5, 2.0: 0.7}).startswith("Speculation costs at 2/s and pays at 1/s")
    assert judged({1.0: 0.7}).startswith("Speculation costs at 1/s: against off")
    assert judged({1.0: 1.0}).startswith("Speculation makes no difference that could be measured")
    assert judged({1.0: 1.5}, status=FAILED, error="cut").startswith("No verdict: 12 of 12 requests failed")
    for sentence in (judged({1.0: 1.5, 2.0: 0.7}), judged({1.0: 1.0})):
        assert sentence.count(". ") == 0


# ---- the comparison


def ab(url: str, out: Path, *args: str) -> dict[str, Any]:
    assert main(["ab", "--host", url, "--out", str(out), *args]) == 0
    result: dict[str, Any] = json.loads((out / "result.json").read_text())
    return result


def samples_of(folder: Path) -> list[Sample]:
    return [_figures.sample_of(json.loads(line)) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_a_comparison_reports_what_the_server_did(tmp_path: Path):
    def check() -> None:
        with FakeOpenAI().serving() as fake:
            args = ["--rates", "5", "--steps", "3", "--blocks", "2", "--block-s", "1", "--warm-s", "0"]
            result = ab(fake.url, tmp_path, *args, "--kind", "chat", "--output-tokens", "4-9")
        samples = samples_of(tmp_path)
        check_blocks(samples, fake)
        check_report(tmp_path, result)
        check_cells(result, samples, fake)

    attempts(check)


def check_cells(result: dict[str, Any], samples: Sequence[Sample], fake: FakeOpenAI) -> None:
    """Figures, estimates and the ratio to off against what the server did."""
    true_speed: list[float] = []
    for cell in result["cells"]:
        mine = [sample for sample in samples if sample.variant == cell["variant"]]
        sent = [fake.sent[sample.id] for sample in mine]
        walls = [true_wall([fake.sent[s.id] for s in mine if s.block == block]) for block in (0, 1)]
        spreads = {name: _figures.Spread(**cell["figures"][name]) for name in true_times(sent)}
        compare(Figures(**{**cell["figures"], **spreads}), sent, sum(walls))
        true_speed.append(mean(true_times(sent)["per_token"]))
        assert cell["total_rate"]["value"] == cell["figures"]["total_rate"]
        for name, of in (("first token", "first_token"), ("time per token", "per_token"), ("end to end", "end_to_end")):
            estimates = cell["times"][name]
            assert {q: e["value"] for q, e in estimates.items()} == {q: cell["figures"][of][q] for q in estimates}
            assert list(estimates) == ["p50", "p90", "p99"]
            assert all(e["interval"][0] <= e["value"] <= e["interval"][1] for e in estimates.values())
    speed = [cell["speed"]["value"] for cell in result["cells"]]
    assert speed == pytest.approx([true_speed[0] / each for each in true_speed], rel=0.05)
    assert speed[2] > speed[1] > speed[0] == 1
    assert result["verdict"].startswith("Speculation pays at every rate measured")


VARIANTS = ["off", "auto", "k = 3"]


def check_blocks(samples: Sequence[Sample], fake: FakeOpenAI) -> None:
    """The same arrivals and prompts for every variant, no prefix cache in common, no block within another."""
    asked: dict[tuple[int, str], list[Any]] = {}
    salts, spans = set(), []
    for sample in sorted(samples, key=lambda s: s.arrival_s):
        body = fake.sent[sample.id].body
        asked.setdefault((sample.block, sample.variant), []).append(
            (round(sample.arrival_s, 6), body["messages"], body["max_tokens"])
        )
        salts.add((sample.block, sample.variant, body["cache_salt"]))
    for block in (0, 1):
        assert asked[block, "off"] == asked[block, "auto"] == asked[block, "k = 3"]
    assert asked[0, "off"] != asked[1, "off"]
    assert len(salts) == len({salt for _, _, salt in salts}) == 6
    for key in asked:
        sent = [fake.sent[s.id] for s in samples if (s.block, s.variant) == key]
        spans.append((min(s.received for s in sent), max(s.done for s in sent), key))
    spans.sort()
    assert [key for _, _, key in spans] == [(0, v) for v in VARIANTS] + [(1, v) for v in VARIANTS[1:] + VARIANTS[:1]]
    assert all(before[1] < after[0] for before, after in itertools.pairwise(spans))


def check_report(folder: Path, result: dict[str, Any]) -> None:
    """The Markdown says what result.json does, and its plots are there and hold a mark for each value."""
    report = (folder / "report.md").read_text()
    assert f"**{result['verdict']}**" in report
    for cell in result["cells"]:
        assert f"{cell['total_rate']['value']:.1f} (" in report
        assert f"{cell['times']['time per token']['p99']['value'] * 1000:.1f} (" in report
    marks = {}
    for name in ("throughput-latency", "percentiles", "accept-length"):
        assert f"]({name}.svg)" in report
        tree = ElementTree.parse(folder / f"{name}.svg")
        marks[name] = len(tree.findall(".//{*}g/{*}circle"))
        texts = {text.text for text in tree.findall(".//{*}text")}
        assert {cell["variant"] for cell in result["cells"]} <= texts
    count = len(result["cells"])
    assert marks == {"throughput-latency": 2 * count, "percentiles": 9 * count, "accept-length": count}


def test_the_comparison_needs_no_package():
    command = [sys.executable, "-S", "-m", "loadtest", "ab", "--help"]
    done = subprocess.run(command, cwd=ROOT, env={}, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--block-s" in done.stdout


@pytest.mark.parametrize(
    "args", [["--rates", "0.01"], ["--rates", "x"], ["--steps", "0"], ["--blocks", "0"], ["--output-tokens", "x"]]
)
def test_a_comparison_that_cannot_be_is_refused(capsys: pytest.CaptureFixture[str], args: list[str]):
    assert main(["ab", "--host", "http://127.0.0.1:1", *args]) == 2
    assert capsys.readouterr().err.startswith("loadtest: ")


def test_failures_leave_no_verdict_and_the_exit_code_says_so(tmp_path: Path):
    with FakeOpenAI(0.02, 0.01, fault=lambda number: "cut" if number == 1 else "").serving() as fake:
        args = ["--rates", "10", "--blocks", "1", "--block-s", "0.3", "--warm-s", "0", "--kind", "chat", "--steps", ""]
        assert main(["ab", "--host", fake.url, "--out", str(tmp_path), *args, "--output-tokens", "4"]) == 1
    assert "No verdict: 1 of" in (tmp_path / "report.md").read_text()


def test_a_key_stays_out_of_the_report(tmp_path: Path):
    with FakeOpenAI(0.02, 0.01).serving() as fake:
        args = ["--rates", "10", "--blocks", "1", "--block-s", "0.3", "--warm-s", "0", "--kind", "chat", "--steps", ""]
        ab(fake.url, tmp_path, *args, "--output-tokens", "4", "--api-key", "sk-12345", "--api-key=sk-12345")
    assert all("sk-12345" not in path.read_text() for path in tmp_path.iterdir())


# ---- locust


def locust(url: str, folder: Path, *args: str, timeout_s: float = 90) -> subprocess.CompletedProcess[str]:
    """Started in another folder, as by a user who has only loadtest/."""
    command = [sys.executable, "-m", "locust", "-f", str(LOADTEST), "--host", url, "--headless", "--only-summary"]
    command += ["--samples", "samples.jsonl", "--json-file", "stats", *args]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=timeout_s)
    finally:
        with contextlib.suppress(ProcessLookupError):  # its workers too
            os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def several() -> list[str]:
    """Two processes, on a port of their own."""
    (port,) = free_ports(1)
    return ["--processes", "2", "--master-bind-port", str(port), "--master-port", str(port)]


def test_locusts_closed_loop_reports_what_the_server_did(tmp_path: Path):
    faults = {3: "429", 6: "error event", 9: "no [DONE]"}

    def check() -> None:
        with FakeOpenAI(fault=lambda number: faults.get(number, "")).serving() as fake:
            args = ["-u", "4", "-r", "100", "-t", "3s", "--output-tokens", "5-9", "--think", "0.1", "Chat", "Code"]
            done = locust(fake.url, tmp_path, *args)
        assert done.returncode == 1, done.stderr  # two requests failed
        samples = samples_of(tmp_path)
        # those under way at the end too; but locust may cut off a user that wakes just then
        assert 10 < len(fake.sent) - 1 <= len(samples) <= len(fake.sent)
        check_summary(done.stdout, Figures.of(samples, wall_s(samples)))
        check_rows(json.loads((tmp_path / "stats.json").read_text()), samples)
        sent = [fake.sent[sample.id] for sample in samples]
        compare(Figures.of(samples, wall_s(samples)), sent, true_wall([s for s in sent if s.done]))

    attempts(check)


def check_summary(text: str, figures: Figures) -> None:
    """What is printed at the end."""
    head, tokens, first, each, *_ = text[text.index("all: ") :].splitlines()
    assert f"{figures.answered} answered, 1 rejected (429), 2 failed" in head
    assert f"{figures.completion_tokens} out" in tokens
    assert figures.first_token is not None
    assert figures.per_token is not None
    assert f"mean {figures.first_token.mean * 1000:.1f} " in first
    assert f"p99 {figures.per_token.p99 * 1000:.1f} " in each


def check_rows(rows: list[dict[str, Any]], samples: Sequence[Sample]) -> None:
    """Locust's own statistics: whole requests, and rows of their own for the rest."""
    by_name = {(row["name"], row["method"]): row for row in rows}
    for kind in ("chat", "code"):
        mine = [sample for sample in samples if sample.kind == kind]
        answers = by_name[kind, "answer"]
        assert answers["num_requests"] == sum(sample.status != REJECTED for sample in mine)
        assert answers["num_failures"] == sum(sample.status == FAILED for sample in mine)
        for method, figure in (("first token", _figures.first_token), ("time per token", _figures.per_token)):
            values = _figures.of(mine, figure)
            assert by_name[kind, method]["num_requests"] == len(values)
            assert by_name[kind, method]["total_response_time"] == pytest.approx(1000 * sum(values))
            keys = [float(key) for key in by_name[kind, method]["response_times"]]
            assert min(keys) == pytest.approx(1000 * min(values), rel=0.006)  # in three digits
    assert sum(row["num_requests"] for row in rows if row["method"] == "429") == 1


def test_locusts_open_loop_keeps_its_schedule(tmp_path: Path):
    def check() -> None:
        with FakeOpenAI(0.3, 0.02).serving() as fake:
            args = ["--arrivals", "bursts", "--rate", "6", "--burst", "4", "--seed", "5", "--output-tokens", "3"]
            done = locust(fake.url, tmp_path, *args, "-t", "3s", "Chat")
        assert done.returncode == 0, done.stderr
        samples = sorted(samples_of(tmp_path), key=lambda sample: sample.arrival_s)
        due = arrivals("bursts", [6], 3, 4, "5/arrivals")
        first = samples[0].arrival_s - due[0]  # from the test's start to the schedule's
        assert [sample.arrival_s - first for sample in samples] == pytest.approx(due, abs=1e-6)
        received = [fake.sent[sample.id].received for sample in samples]
        assert [at - received[0] for at in received] == pytest.approx([at - due[0] for at in due], abs=0.1)
        assert all(sample.late_s < 0.1 for sample in samples)

    attempts(check)


def test_an_open_loop_in_several_processes_is_refused(tmp_path: Path):
    args = ["--arrivals", "poisson", *several(), "-u", "2", "-r", "100", "-t", "1s"]
    done = locust("http://127.0.0.1:1", tmp_path, *args)
    assert done.returncode == 1
    assert "an open loop runs in one process" in done.stderr
    assert {sample.status for sample in samples_of(tmp_path)} == {FAILED}


def test_locusts_processes_hand_in_every_answer(tmp_path: Path):
    with FakeOpenAI(0.1, 0.02).serving() as fake:
        args = ["-u", "4", "-r", "100", "-t", "2s", *several(), "--output-tokens", "4", "--think", "0.1"]
        done = locust(fake.url, tmp_path, *args)
    assert done.returncode == 0, done.stderr
    unfinished = set(fake.sent) - {sample.id for sample in samples_of(tmp_path)}
    assert len(unfinished) <= 4 < len(fake.sent) / 4  # each user's last
    assert len({sample.id for sample in samples_of(tmp_path)}) == len(fake.sent) - len(unfinished)
    texts = Counter(json.dumps(sent.body["messages"]) for sent in fake.sent.values())
    assert set(texts.values()) == {1}  # no process asks what another does


def test_the_web_interface_starts_a_test_and_shows_its_rows(tmp_path: Path):
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "locust", "-f", str(LOADTEST), "--web-host", "127.0.0.1", "--web-port", str(port)]
    with FakeOpenAI(0.1, 0.02).serving() as fake, (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=10) as web:
                until(lambda: web.get("/").status_code == 200)
                form = {"user_count": 2, "spawn_rate": 10, "host": fake.url, "output_tokens": "4", "think": "0.1"}
                assert web.post("/swarm", data=form).json()["success"]
                rows = {"answer", "first token", "time per token"}
                until(lambda: rows <= {row["method"] for row in web.get("/stats/requests").json()["stats"]})
                web.get("/stop")
                stats = web.get("/stats/requests").json()["stats"]
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(20)
    total = next(row for row in stats if row["name"] == "Aggregated")
    assert total["num_requests"] == sum(row["num_requests"] for row in stats if row["method"] == "answer")
    assert total["num_failures"] == 0
    assert {sent.body["max_tokens"] for sent in fake.sent.values()} == {4}  # what was typed into the form


def until(met: Callable[[], bool], timeout_s: float = 20) -> None:
    end = time.monotonic() + timeout_s
    while True:
        try:
            if met():
                return
        except httpx.HTTPError:
            pass
        assert time.monotonic() < end, f"not within {timeout_s} s"
        time.sleep(0.1)


# ---- what is written down


def test_the_readme_and_the_job_name_options_that_exist():
    text = (LOADTEST / "README.md").read_text() + (LOADTEST / "job.yaml").read_text()
    own = (
        "from locust.argument_parser import get_empty_argument_parser, setup_parser_arguments as locusts\n"
        "from loadtest._locust import add_arguments\n"
        "parser = get_empty_argument_parser(); locusts(parser); add_arguments(parser); print(parser.format_help())"
    )  # locust's --help leaves out what a file adds
    command = [sys.executable, "-c", own]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    known = set(re.findall(OPTION, parser().format_help() + shown))
    named = {
        option
        for line in text.splitlines()
        if not re.search("kubectl|make up", line)
        for option in re.findall(OPTION, line)
    }
    assert named <= known, named - known
    assert len(named) > 20
    for path in re.findall(r"\bloadtest/[\w./-]*\w", text):
        assert (ROOT / path).exists(), path


OPTION = r"(?<![\w-])--[a-z][a-z-]*[a-z]"


def test_the_job_runs_the_comparison_from_a_config_map():
    (job,) = yaml.safe_load_all((LOADTEST / "job.yaml").read_text())
    assert job["kind"] == "Job"
    (container,) = job["spec"]["template"]["spec"]["containers"]
    args = container["args"]
    assert container["command"] + args[:1] == ["python", "-m", "loadtest", "ab"]
    parser().parse_args(args[1:])
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert container["workingDir"] == str(Path(mounts["loadtest"]).parent)


@pytest.mark.parametrize(
    "folder", sorted(path.parent for path in (LOADTEST / "results").glob("*/run.json")), ids=lambda p: p.name
)
def test_a_committed_report_is_what_its_samples_say(tmp_path: Path, folder: Path):
    for name in ("run.json", "samples.jsonl"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    assert main(["report", str(tmp_path)]) == 0
    for path in folder.iterdir():
        assert (tmp_path / path.name).read_text() == path.read_text(), path.name
    assert all(sample.status == OK for sample in samples_of(folder))


# ---- the real stack


@pytest.mark.engine
def test_thirty_seconds_on_the_stack_without_a_failure_and_a_comparison_that_adds_up(
    engine_stack: Stack, tmp_path: Path
):
    arrange(engine_stack, "ngram")
    args = ["-u", "3", "-r", "3", "-t", "30s", "--input-tokens", "40-120", "--output-tokens", "8-24"]
    done = locust(engine_stack.url, tmp_path, *args)
    assert done.returncode == 0, done.stdout + done.stderr
    samples = samples_of(tmp_path)
    assert len(samples) > 10
    assert {sample.status for sample in samples} == {OK}

    before = decoded(engine_stack.verifier_url)
    plan = ["--rates", "1.5", "--steps", "3", "--blocks", "2", "--block-s", "2", "--warm-s", "0", "--kind", "code"]
    result = ab(engine_stack.url, tmp_path, *plan, "--input-tokens", "60-120", "--output-tokens", "12-24")
    check_report(tmp_path, result)
    check_against_the_pair(samples_of(tmp_path), result, decoded(engine_stack.verifier_url) - before)


def check_against_the_pair(samples: Sequence[Sample], result: dict[str, Any], counted: Decoded) -> None:
    """The samples against each other, the report against them, and both against what the pair has counted."""
    by_variant: dict[str, list[tuple[int, float, int, int]]] = {}
    for s in samples:
        key = (s.block, round(s.arrival_s, 6), s.prompt_tokens, s.completion_tokens)
        by_variant.setdefault(s.variant, []).append(key)
        assert s.first_s is not None
        assert s.last_s is not None
        assert 0 < s.first_s <= s.last_s <= s.total_s
    # float32 and greedy: every variant's answers are as long as the target's own
    assert sorted(by_variant["off"]) == sorted(by_variant["auto"]) == sorted(by_variant["k = 3"])
    for cell in result["cells"]:
        mine = [s for s in samples if s.variant == cell["variant"]]
        figures = cell["figures"]
        assert figures["completion_tokens"] == sum(s.completion_tokens for s in mine)
        assert figures["total_rate"] * figures["wall_s"] == pytest.approx(figures["completion_tokens"])
        if cell["variant"] == "off":
            assert {s.accepted for s in mine} == {0}
            assert cell["accept_length"]["value"] == 1
    tokens = sum(s.completion_tokens - 1 for s in samples)
    assert counted.tokens == tokens
    cycles = tokens - sum(s.accepted or 0 for s in samples)
    assert abs(counted.cycles - cycles) <= len(samples)  # at most each answer's last cycle
    assert sum(s.accepted or 0 for s in samples) > 0
