"""Sampled answers of the real stack have the target's own distribution, token for token and jointly.

The target is so small that the probability of every answer is known. Pearson's chi-square compares with it what the
stack answers while k changes every cycle and requests of all kinds share the batches; faults put into the running
engine show that the comparison would find them.
"""

import os
import random
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from operator import ne
from pathlib import Path
from typing import Any

import httpx
import pytest

from fake_tiny import END, MAX_TOKENS, STEPS, Answer, Drafter, Sampling, Target, Tree
from specdec.stack import Stack

pytestmark = pytest.mark.engine

TESTS = Path(__file__).parent
SAMPLES = 3400  # of each way to sample
AT_ONCE = 6  # requests of CHOICES answers each: more than the engine runs at once
CHOICES = 20
FEWEST = 5  # expected answers in a cell; fewer, and the statistic is not chi-square any more


@dataclass(frozen=True)
class Way:
    """A prompt and how its answers are drawn. The prompts' lengths differ, and so do the step counts they begin at."""

    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int | None  # of the first answer, the next has the next


WAYS = {
    "cool": Way((6, 5, 4), Sampling(0.7), 1_000_000),
    "hot": Way((3, 4, 1, 2), Sampling(1.3), 2_000_000),
    "top_k": Way((3, 6, 5, 2, 1), Sampling(1.3, top_k=4), 3_000_000),
    "top_p": Way((4, 3, 1, 5, 7, 4), Sampling(1.3, top_p=0.8), 4_000_000),
    "top_k_and_top_p": Way((4, 1, 4, 6, 3, 3, 4), Sampling(0.7, top_k=5, top_p=0.9), 5_000_000),
    "unseeded": Way((3, 1, 6, 4, 4, 5, 7, 2), Sampling(1.0), None),
}
SEEDED = [name for name, way in WAYS.items() if way.seed is not None]


# ---- what is asked


@dataclass(frozen=True)
class Question:
    """One request: `choices` answers, the first of them the way's answer number `first`. No way: the greedy answer."""

    prompt: tuple[int, ...]
    way: Way | None = None
    first: int = 0
    choices: int = 1

    def ask(self, client: httpx.Client) -> tuple[list[Answer], Counter[str]]:
        """The answers in their order, and how many draft tokens were accepted and rejected."""
        body: dict[str, Any] = {"model": "tiny", "prompt": list(self.prompt), "max_tokens": MAX_TOKENS}
        body |= {"n": self.choices, "return_token_ids": True, "temperature": 0}
        if self.way is not None:
            body |= vars(self.way.sampling)
            if self.way.seed is not None:
                body["seed"] = self.way.seed + self.first
        reply = client.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        document = reply.json()
        choices = sorted(document["choices"], key=lambda choice: choice["index"])
        answers = [tuple(choice["token_ids"]) for choice in choices]
        for choice, ids in zip(choices, answers, strict=True):
            assert choice["prompt_token_ids"] == list(self.prompt)
            assert choice["finish_reason"] == ("stop" if ids[-1] == END else "length")
        details = document["usage"]["completion_tokens_details"]
        return answers, Counter(
            accepted=details["accepted_prediction_tokens"], rejected=details["rejected_prediction_tokens"]
        )


@dataclass
class Run:
    """What the stack answered to many questions at once."""

    sampled: dict[str, list[Answer]]  # by way, in the order of their seeds
    greedy: list[tuple[tuple[int, ...], Answer]]
    drafts: Counter[str]

    @property
    def acceptance(self) -> float:
        """Of the draft tokens."""
        return self.drafts["accepted"] / self.drafts.total()


def ask_all(url: str, names: Iterable[str], samples: int, greedy: int = 0) -> Run:
    """`samples` answers of each way, and `greedy` greedy ones among them, in an order of chance."""
    questions = [
        (n, Question(WAYS[n].prompt, WAYS[n], at, CHOICES)) for n in names for at in range(0, samples, CHOICES)
    ]
    prompts = [way.prompt for way in WAYS.values()]
    questions += [("", Question(prompts[number % len(prompts)])) for number in range(greedy)]
    random.Random(4).shuffle(questions)
    with httpx.Client(base_url=url, timeout=120, trust_env=False) as client, ThreadPoolExecutor(AT_ONCE) as pool:
        replies = list(pool.map(lambda question: question[1].ask(client), questions))
    run = Run({name: [] for name in names}, [], Counter())
    for (name, question), (answers, drafts) in sorted(
        zip(questions, replies, strict=True), key=lambda pair: pair[0][1].first
    ):
        run.drafts += drafts
        if name:
            run.sampled[name] += answers
        else:
            run.greedy.append((question.prompt, answers[0]))
    return run


# ---- what is expected


def p_value(answers: list[Answer], probabilities: Mapping[Answer, float]) -> float:
    """Pearson's chi-square: how often answers so distributed would differ from their expectation by as much."""
    import torch

    total, seen = len(answers), Counter(answers)
    if not seen.keys() <= probabilities.keys():
        return 0.0  # what cannot be was answered
    expected = {answer: total * p for answer, p in probabilities.items()}
    observed = {answer: float(seen[answer]) for answer in expected}
    for length in range(MAX_TOKENS, 0, -1):  # what is too rare goes with the like of it: those that begin the same
        for answer in [a for a, count in expected.items() if len(a) == length and count < FEWEST]:
            for counts in (expected, observed):
                counts[answer[:-1]] = counts.get(answer[:-1], 0.0) + counts.pop(answer)
    if 0 < expected.get((), FEWEST) < FEWEST:
        rarest = min((a for a in expected if a), key=expected.__getitem__)
        for counts in (expected, observed):
            counts[rarest] += counts.pop(())
    statistic = sum((observed[cell] - count) ** 2 / count for cell, count in expected.items())
    half = torch.tensor([(len(expected) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def trees(target: Target) -> dict[tuple[int, ...], Tree]:
    """By prompt."""
    return {way.prompt: target.tree(way.prompt) for way in WAYS.values()}


@pytest.fixture(scope="module")
def stack(
    target: Target, trees: dict[tuple[int, ...], Tree], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    """Started once. Seeded answers repeat in it: step counts are the sessions' own, and no draft is ever late."""
    drafts = target.folder / "drafts.json"
    Drafter.teach(drafts, trees)
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    with Stack(
        target.folder,
        tmp_path_factory.mktemp("stack"),
        drafter="fake_tiny:Drafter",
        router_args=["--policy", "fake_tiny:Striding", "--window", "1", "--lease-ms", "60000"],
        verifier_args=["--max-num-seqs", "64", "--draft-deadline-ms", "10000"],
        vllm_args=[
            *("--dtype", "float32", "--max-model-len", "64", "--enforce-eager", "--served-model-name", "tiny"),
            *("--worker-extension-cls", "fake_mutants.Mutants", "--generation-config", "vllm"),
        ],
        env={"PYTHONPATH": path, "SPECDEC_TEST_TINY": str(drafts), "VLLM_SERVER_DEV_MODE": "1"},
    ) as stack:
        stack.wait_ready(300)
        yield stack


@pytest.fixture(scope="module")
def run(stack: Stack) -> Run:
    """All ways and greedy requests in the same batches."""
    return ask_all(stack.url, WAYS, SAMPLES, greedy=120)


@pytest.fixture
def p_of(trees: dict[tuple[int, ...], Tree]):
    def p_of(name: str, answers: list[Answer]) -> float:
        way = WAYS[name]
        p = p_value(answers, trees[way.prompt].answers(way.sampling))
        print(f"{name}: p = {p:.3g} of {len(answers)} answers")
        return p

    return p_of


def metric(stack: Stack, name: str) -> float:
    text = httpx.get(stack.verifier_url + "/metrics", timeout=10, trust_env=False).text
    (value,) = re.findall(rf"^{re.escape(name)} (\S+)$", text, re.M)
    return float(value)


# ---- the stack as it is


@pytest.mark.parametrize("name", SEEDED)
def test_seeded_answers_have_the_targets_distribution(run: Run, trees: dict[tuple[int, ...], Tree], p_of, name: str):
    assert len(run.sampled[name]) == SAMPLES
    way = WAYS[name]
    for nudge in (-1e-5, 1e-5) if way.sampling.top_p < 1 else ():
        possible = trees[way.prompt].answers(replace(way.sampling, top_p=way.sampling.top_p + nudge)).keys()
        assert possible == trees[way.prompt].answers(way.sampling).keys(), "rounding decides who is in top_p"
    assert p_of(name, run.sampled[name]) > 1e-3


def test_unseeded_answers_have_the_targets_distribution(run: Run, p_of):
    # they are others each time: at 1e-3 one run in a thousand would fail for nothing
    assert p_of("unseeded", run.sampled["unseeded"]) > 1e-6


def test_greedy_answers_among_sampled_ones_are_the_likeliest_tokens(run: Run, trees: dict[tuple[int, ...], Tree]):
    assert len(run.greedy) == 120
    for prompt, answer in run.greedy:
        assert trees[prompt].greedy_margin() > 1e-3, "rounding decides"
        assert answer == trees[prompt].greedy()


def test_drafts_were_accepted_rejected_and_followed_by_bonus_tokens(run: Run, stack: Stack):
    print(f"acceptance {run.acceptance:.3f}")
    assert 0.2 < run.acceptance < 0.8
    up_to = [metric(stack, f'specdec_accept_length_bucket{{le="{n}.0"}}') for n in range(1, max(STEPS) + 2)]
    delivered = [after - before for before, after in zip([0, *up_to], up_to, strict=False)]
    print(f"cycles by tokens delivered: {delivered}")
    assert min(delivered) > 20  # from none accepted to four, each time with a token of the target's own


# ---- mutants


def switch(stack: Stack, method: str, *args: str) -> None:
    reply = httpx.post(stack.vllm_url + "/collective_rpc", json={"method": method, "args": args}, timeout=20)
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("mutant", ["full_redraw", "stale_drafts", "no_temperature", "unmended_kernel"])
def test_a_fault_of_sampling_is_found(stack: Stack, p_of, mutant: str):
    switch(stack, "switch_on", mutant)
    try:
        faulty = ask_all(stack.url, ["cool", "hot"], 1200)
    finally:
        switch(stack, "switch_off")
    assert p_of("cool", faulty.sampled["cool"]) < 1e-6


def test_the_engine_without_faults_repeats_its_seeded_answers(stack: Stack, run: Run, p_of):
    """After the mutants, so that nothing of them was left; in other batches than the first time."""
    again = ask_all(stack.url, ["cool"], 1200).sampled["cool"]
    assert p_of("cool", again) > 1e-3
    different = sum(map(ne, again, run.sampled["cool"]))
    # on a busy machine first orders come late; such a session's first cycle has no drafts, and it draws other tokens
    lapsed = 'specdec_dropped_total{cause="lapsed_leases"}'
    until = time.monotonic() + 5
    while different > metric(stack, lapsed) + 2 and time.monotonic() < until:  # it is published every second
        time.sleep(0.5)
    print(f"{different} of {len(again)} differ, {metric(stack, lapsed):.0f} lapsed leases")
    assert different <= metric(stack, lapsed) + 2  # two for rounding
