"""The stack on real vLLM: whatever the draft, the orders and the scheduler do, the answers are the target's own."""

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import openai
import pytest

from engine_prompts import (
    CASES,
    MIN_TOKENS,
    MIN_TOKENS_CASES,
    Completion,
    Oracle,
    arrange,
    complete,
    complete_all,
    fixed,
)
from fake_drafters import AUX_LAYERS, COLUMNS, states_folder
from specdec.channel.layout import ENGINE_WORDS, WORDS_AT
from specdec.channel.segment import now_ns, segment_path
from specdec.client import chat, stream_chat
from specdec.proto import speculation_pb2 as pb
from specdec.proto import speculation_pb2_grpc as pb_grpc
from specdec.router.loop import speculate
from specdec.router.pairs import Pair, Request, Session
from specdec.router.steps import FixedSteps, Order
from specdec.stack import Stack
from specdec.telemetry import RouterMetrics

pytestmark = pytest.mark.engine


def metric(url: str, name: str) -> float:
    """Sum of a metric over its labels."""
    text = httpx.get(f"{url}/metrics", timeout=10, trust_env=False).text
    values = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", text, re.M)
    return sum(map(float, values))


def until(met, timeout_s: float = 20, every_s: float = 0.05):
    """Waits for `met()` to be true and returns what it was."""
    end = time.monotonic() + timeout_s
    while not (value := met()):
        assert time.monotonic() < end, f"still not so after {timeout_s} s"
        time.sleep(every_s)
    return value


class Recorder:
    """Listens to all of a pair's verdicts beside its router, and orders nothing."""

    def __init__(self, stack: Stack) -> None:
        self.frames: list[tuple[float, pb.VerdictFrame]] = []
        self._done = threading.Event()
        self._channel = grpc.insecure_channel(f"127.0.0.1:{stack.control_port}")
        self._call = pb_grpc.SpeculationStub(self._channel).Loop(self._requests())
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        time.sleep(0.2)

    def _requests(self) -> Iterator[pb.OrderFrame]:
        yield pb.OrderFrame(observe=True)
        self._done.wait()

    def _read(self) -> None:
        with contextlib.suppress(grpc.RpcError):
            for frame in self._call:
                self.frames.append((time.monotonic(), frame))

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        self._call.cancel()
        self._done.set()
        self._thread.join(5)
        self._channel.close()

    @property
    def cycles(self) -> list[tuple[float, pb.Verdict]]:
        return [(at, v) for at, f in list(self.frames) for v in f.verdicts if v.kind == pb.VERDICT_KIND_CYCLE]

    def committed(self) -> dict[str, int]:
        """Tokens by request id, over all of its sessions."""
        names = {o.session: re.search(r"specdec-[0-9a-f]{32}", o.request_id) for _, f in self.frames for o in f.opened}
        sums: dict[str, int] = defaultdict(int)
        for _, frame in self.frames:
            for v in frame.verdicts:
                if match := names.get(v.session):
                    sums[match.group()] += v.committed
        return sums


# ---- lossless


@pytest.mark.parametrize(
    ("drafter", "router"),
    [
        ("Perfect", ("--policy", "fake_policies:Cycling", "--window", "1")),
        ("Noisy", ("--policy", "fake_policies:Cycling", "--window", "3")),
        ("Against", fixed(3, 4)),
        ("Random", ("--policy", "accept-length", "--window", "2")),
        ("Garbage", fixed(8, 1)),
        ("ngram", ("--policy", "accept-length", "--window", "4")),
    ],
)
def test_greedy_answers_are_the_targets_own(engine_stack: Stack, oracle: Oracle, drafter: str, router: tuple[str, ...]):
    arrange(engine_stack, drafter if drafter == "ngram" else f"fake_drafters:{drafter}", *router)
    answers = complete_all(engine_stack.url)
    oracle.compare(answers)
    details = [a.usage["completion_tokens_details"] for a in answers]
    accepted = sum(d["accepted_prediction_tokens"] for d in details)
    rejected = sum(d["rejected_prediction_tokens"] for d in details)
    total = sum(a.usage["completion_tokens"] for a in answers)
    # the run must have been what it says: drafts verified, right ones accepted, wrong ones rejected
    if drafter == "Perfect":
        assert accepted > total / 4
        assert rejected == 0
    elif drafter == "Noisy":
        assert accepted > total / 8
        assert rejected > total / 20
    elif drafter == "Against":
        assert (accepted, rejected > total / 2) == (0, True)
    elif drafter == "Random":
        assert rejected > total / 2
        assert accepted < total / 20
    elif drafter == "Garbage":
        assert (accepted, rejected) == (0, 0)
    else:
        assert accepted > 0
    until(lambda: metric(engine_stack.verifier_url, "specdec_sessions") == 0)


def test_greedy_answers_and_hidden_states_through_preemption_prefix_hits_and_cut_prompts(
    engine_stack: Stack, oracle: Oracle, model: Path
):
    arrange(engine_stack, "fake_drafters:Listening", "--policy", "fake_policies:Cycling", "--window", "2")

    def seen() -> tuple[float, float]:
        names = ("vllm:num_preemptions_total", "vllm:prefix_cache_hits_total")
        preempted, hits = (metric(engine_stack.vllm_url, name) for name in names)
        return preempted, hits

    preempted, hits = seen()
    longest = max(len(answer.prompt_ids) for answer in oracle.answers)
    assert longest > 3 * 96  # such prompts take several chunks
    for _ in range(3):  # whether a session must be preempted depends on who meets whom
        oracle.compare(complete_all(engine_stack.url, at_once=32))
        if seen()[0] > preempted:
            break
    assert seen()[0] > preempted
    assert seen()[1] > hits
    until(lambda: metric(engine_stack.verifier_url, "specdec_sessions") == 0)
    engine_stack.start_draft("fake_drafters:Perfect")  # the one before has written all when it has ended
    engine_stack.wait_ready()
    heard = [np.load(path) for path in states_folder(oracle.path).glob("*-*.npz")]
    had, told = (sum(len(session[name]) for session in heard) for name in ("positions", "tokens"))
    assert had > 2000
    assert had > 0.7 * told, "all but reused prefixes, and what was not read before a session's end"
    lost = httpx.get(engine_stack.verifier_url + "/metrics", timeout=5).text
    assert 'specdec_dropped_total{cause="lost_states"} 0.0' in lost
    compare_states(heard, model)


def compare_states(heard: list[Any], model: Path) -> None:
    """The hidden states a draft was given are those transformers computes, of every committed token but the last, from
    where the target computed them: a hit in its prefix cache ends at a whole block."""
    import torch
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for session in heard:
        tokens, positions = session["tokens"].tolist(), session["positions"].tolist()
        if not positions:
            continue
        assert positions == list(range(positions[0], positions[-1] + 1)), "a gap"
        assert positions[0] % 32 == 0
        with torch.inference_mode():
            layers = target(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        right = torch.cat([layers[layer][0] for layer in AUX_LAYERS], -1)[positions][:, COLUMNS]
        torch.testing.assert_close(torch.tensor(session["rows"]), right, rtol=1e-3, atol=2e-2)


@pytest.mark.parametrize("drafter", ["causal", "eagle3"])
def test_drafters_with_weights_work_in_the_stack(
    engine_stack: Stack, oracle: Oracle, model: Path, head: Path, tmp_path: Path, drafter: str
):
    """A few of the target's own layers, and a random head: both are wrong nearly always, which costs speed only."""
    weights = cut_short(model, tmp_path, 2) if drafter == "causal" else head
    arrange(engine_stack, drafter, *fixed(3, 2), draft_model=weights)
    with Recorder(engine_stack) as recorder:
        numbers = (4, 9, 13)
        answers = [complete(engine_stack.url, CASES[n]) for n in numbers]
        time.sleep(0.3)
        drafted = [v for _, v in recorder.cycles if v.proposed]
    assert [a.ids for a in answers] == [oracle.answers[n].ids for n in numbers]
    assert sum(v.proposed for v in drafted) > 30
    assert metric(engine_stack.draft_url, "specdec_draft_faults_total") == 0


def cut_short(model: Path, folder: Path, layers: int) -> Path:
    """A model's folder that says it has fewer layers."""
    for path in model.iterdir():
        (folder / path.name).symlink_to(path)
    config = json.loads((model / "config.json").read_text()) | {"num_hidden_layers": layers}
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_greedy_answers_without_any_draft(engine_stack: Stack, oracle: Oracle):
    assert engine_stack.draft is not None
    engine_stack.draft.process.stop()
    oracle.compare(complete_all(engine_stack.url))
    state = httpx.get(engine_stack.verifier_url + "/readyz", timeout=5).json()
    assert (state["ready"], state["draft"]["up"]) == (True, False)
    engine_stack.start_draft("fake_drafters:Perfect")
    engine_stack.wait_ready()


def test_sessions_held_joining_ending_and_aborting_at_random(engine_stack: Stack, oracle: Oracle):
    engine_stack.start_draft("fake_drafters:Noisy")
    engine_stack.wait_ready()
    dice = random.Random(11)

    class Slow(FixedSteps):
        """Other step counts each time; the driver below sleeps, which holds the session."""

        def order(self, session: Session) -> Order:
            return Order(dice.randint(0, 8), dice.choice((1, 1, 2)))

    policy = Slow(0, 8, 1)

    class Dawdling:
        def __init__(self, pair: Pair) -> None:
            self._pair = pair

        async def cycle(self, session: Session, order: Order):
            if dice.random() < 0.3:
                await asyncio.sleep(dice.random() * 0.08)
            return await self._pair.cycle(session, order)

    async def drive(pair: Pair, session: Session) -> None:
        await speculate(session, Dawdling(pair), policy)

    async def ask(client: httpx.AsyncClient, pair: Pair, number: int, results: dict[int, list[int]]) -> None:
        await asyncio.sleep(dice.random() * 4)
        text, max_tokens = CASES[number]
        request = Request(f"specdec-{uuid.uuid4().hex}")
        pair.register(request)
        stop_after = dice.randint(0, 10) if dice.random() < 0.3 else None
        body = {"model": "demo", "prompt": text, "max_tokens": max_tokens, "temperature": 0}
        ids: list[int] = []
        async with client.stream(
            "POST",
            f"{engine_stack.vllm_url}/v1/completions",
            json=body | {"stream": True, "return_token_ids": True},
            headers={"X-Request-Id": request.id},
        ) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    ids += json.loads(line[6:])["choices"][0].get("token_ids") or []
                if stop_after is not None and len(ids) > stop_after:
                    break
        results[number] = ids
        pair.release(request)

    async def main() -> dict[int, list[int]]:
        metrics = RouterMetrics()
        pair = Pair(f"127.0.0.1:{engine_stack.control_port}", lease_ms=1000, metrics=metrics, drive=drive)
        stream = asyncio.create_task(pair.run())
        while not pair.connected:
            await asyncio.sleep(0.02)
        results: dict[int, list[int]] = {}
        async with httpx.AsyncClient(timeout=120, trust_env=False) as client:
            await asyncio.gather(*(ask(client, pair, n % 32, results) for n in range(32)))
        stream.cancel()
        return results

    results = asyncio.run(main())
    assert len(results) == 32
    for number, ids in results.items():
        expected = list(oracle.answers[number].ids)
        assert ids == expected[: len(ids)]
    whole = sum(len(ids) == len(oracle.answers[n].ids) for n, ids in results.items())
    assert 10 < whole < 32  # some were let to their end, some were not
    until(lambda: metric(engine_stack.verifier_url, "specdec_sessions") == 0)
    oracle.compare(complete_all(engine_stack.url))


def test_answers_up_to_the_context_limit(engine_stack: Stack, oracle: Oracle):
    """Near max_model_len vLLM's own drafting stops by another path; ours must neither crash nor overrun."""
    long = "word " * 980
    request = {"model": "demo", "prompt": long, "max_tokens": 2000, "temperature": 0, "ignore_eos": True}
    engine_stack.start_draft("ngram")
    engine_stack.wait_ready()
    answer = httpx.post(engine_stack.url + "/v1/completions", json=request, timeout=120)
    assert answer.status_code == 400  # more than fits is refused with vLLM's own message
    request["max_tokens"] = 1024 - len(tokens := _tokens(engine_stack, long))
    assert len(tokens) > 900
    spec = httpx.post(
        engine_stack.url + "/v1/completions", json=request | {"return_token_ids": True}, timeout=120
    ).json()
    off = httpx.post(
        engine_stack.url + "/v1/completions",
        json=request | {"return_token_ids": True, "speculative": "off"},
        timeout=120,
    ).json()
    assert spec["usage"]["total_tokens"] == 1024
    assert spec["choices"][0]["token_ids"] == off["choices"][0]["token_ids"]
    assert spec["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0


def _tokens(stack: Stack, text: str) -> list[int]:
    answer = httpx.post(stack.vllm_url + "/tokenize", json={"model": "demo", "prompt": text}, timeout=20)
    ids: list[int] = answer.json()["tokens"]
    return ids


@pytest.mark.parametrize(("drafter", "steps"), [("NoEnd", 4), ("Perfect", 1), ("Perfect", 8)])
def test_min_tokens_end_an_answer_neither_sooner_nor_later(
    engine_stack: Stack, oracle: Oracle, drafter: str, steps: int
):
    arrange(engine_stack, f"fake_drafters:{drafter}", *fixed(steps, 4))
    accepted = 0
    for case, short, long in zip(MIN_TOKENS_CASES, oracle.short, oracle.min_tokens, strict=True):
        assert short.finish_reason == "stop"
        just = complete(engine_stack.url, case, min_tokens=len(short.ids) - 1)  # it may end where it would anyway
        assert (just.ids, just.finish_reason) == (short.ids, "stop")
        assert len(long.ids) >= MIN_TOKENS
        got = complete(engine_stack.url, case, min_tokens=MIN_TOKENS)
        assert (got.ids, got.finish_reason) == (long.ids, long.finish_reason)
        accepted += got.usage["completion_tokens_details"]["accepted_prediction_tokens"]
    assert accepted > 30


# ---- the loop is the router's


def test_at_window_one_orders_cycles_and_verdicts_agree(engine_stack: Stack, oracle: Oracle):
    arrange(engine_stack, "fake_drafters:Perfect", *fixed(3, 1), "--lease-ms", "5000")
    with Recorder(engine_stack) as recorder:
        cases = [(text, n) for text, n in CASES if n > 3][:12]
        with ThreadPoolExecutor(6) as pool:
            answers = list(
                pool.map(lambda case: complete(engine_stack.url, (case[0], case[1]), ignore_eos=True), cases)
            )
        until(lambda: metric(engine_stack.verifier_url, "specdec_sessions") == 0)
        time.sleep(0.3)
        cycles = [v for _, v in recorder.cycles]
        assert all(v.order > 0 for v in cycles)
        assert len(cycles) == metric(engine_stack.admin_url, "specdec_router_verdicts_total")
        assert len(cycles) == metric(engine_stack.admin_url, "specdec_router_orders_total")
        by_session: dict[int, list[int]] = defaultdict(list)
        for v in cycles:
            by_session[v.session].append(v.order)
        assert len(by_session) == len(cases)
        assert all(orders == list(range(1, len(orders) + 1)) for orders in by_session.values())
        assert sum(v.proposed for v in cycles) > 0
        assert sorted(recorder.committed().values()) == sorted(a.usage["completion_tokens"] for a in answers)


def test_no_cycle_speculates_without_an_order(engine_stack: Stack, oracle: Oracle):
    """Requests that no router knows, and a pair whose router has gone, decode plainly."""
    assert engine_stack.router is not None
    engine_stack.start_router(*fixed(4, 4))
    engine_stack.wait_ready()
    with Recorder(engine_stack) as recorder:
        start = time.monotonic()
        assert complete(engine_stack.vllm_url, CASES[0]).ids == oracle.answers[0].ids
        assert time.monotonic() - start < 30
        engine_stack.router.process.stop()
        assert complete(engine_stack.vllm_url, CASES[1]).ids == oracle.answers[1].ids
        assert len(recorder.cycles) > 50
        assert all((v.order, v.proposed) == (0, 0) for _, v in recorder.cycles)
        engine_stack.start_router()
        engine_stack.wait_ready()
        complete(engine_stack.url, CASES[2])
        time.sleep(0.3)
        speculated = [v for _, v in recorder.cycles if v.proposed]
        assert speculated
        assert all(v.order > 0 for v in speculated)


def test_a_stopped_router_brings_k_to_zero_within_the_lease(engine_stack: Stack, oracle: Oracle):
    engine_stack.start_router(*fixed(2, 4), "--lease-ms", "600")
    engine_stack.wait_ready()
    assert engine_stack.router is not None
    with Recorder(engine_stack) as recorder, ThreadPoolExecutor(1) as pool:
        pending = pool.submit(complete, engine_stack.url, ("Once upon a time there was a", 240), ignore_eos=True)
        until(lambda: sum(v.committed for _, v in recorder.cycles) > 40)
        os.killpg(engine_stack.router.process.pid, signal.SIGSTOP)
        stopped = time.monotonic()
        try:
            assert complete(engine_stack.vllm_url, CASES[3]).ids == oracle.answers[3].ids  # vLLM itself goes on
            until(lambda: metric(engine_stack.verifier_url, "specdec_sessions") == 0, 60)
        finally:
            os.killpg(engine_stack.router.process.pid, signal.SIGCONT)
        late = [v for at, v in recorder.cycles if at > stopped + 1.5]
        assert len(late) > 20
        assert all((v.order, v.proposed) == (0, 0) for v in late)
        got = pending.result(60)
    assert got.usage["completion_tokens"] == 240
    expected = complete(engine_stack.url, ("Once upon a time there was a", 240), ignore_eos=True, speculative="off")
    assert got.ids == expected.ids
    again = complete(engine_stack.url, CASES[4]).usage["completion_tokens_details"]
    assert again["accepted_prediction_tokens"] > 0  # and it speculates again


def test_a_router_that_stalls_takes_its_sessions_back(engine_stack: Stack):
    arrange(engine_stack, "fake_drafters:Random", *fixed(2, 4), "--lease-ms", "500")
    assert engine_stack.router is not None
    with Recorder(engine_stack) as recorder, ThreadPoolExecutor(1) as pool:
        pending = pool.submit(complete, engine_stack.url, ("Once upon a time there was a", 300), ignore_eos=True)
        until(lambda: len(recorder.cycles) > 20)
        os.killpg(engine_stack.router.process.pid, signal.SIGSTOP)
        time.sleep(1.5)
        os.killpg(engine_stack.router.process.pid, signal.SIGCONT)
        resumed = time.monotonic()
        assert pending.result(120).usage["completion_tokens"] == 300
        late = [v for at, v in recorder.cycles if at > resumed + 1.0]
    assert len(late) > 20
    assert sum(v.order > 0 and v.steps == 2 for v in late) > len(late) * 0.8
    assert any(v.proposed == 2 for v in late)


# ---- the draft cannot hurt


@pytest.mark.parametrize("fate", ["killed", "stopped"])
def test_a_draft_that_fails_mid_answer_costs_speed_only(engine_stack: Stack, oracle: Oracle, fate: str):
    arrange(engine_stack, "fake_drafters:Perfect", *fixed(3, 2))
    assert engine_stack.draft is not None
    group = engine_stack.draft.process.pid
    with Recorder(engine_stack) as recorder, ThreadPoolExecutor(1) as pool:
        pending = pool.submit(complete_all, engine_stack.url, 8)
        until(lambda: sum(v.accepted for _, v in recorder.cycles) > 20)
        os.killpg(group, signal.SIGKILL if fate == "killed" else signal.SIGSTOP)
        failed = time.monotonic()
        time.sleep(1)
        after = [v for at, v in recorder.cycles if at > failed + 0.5]
        assert after, "cycles went on"
        assert not any(v.proposed for v in after)
        assert {v.reason for v in after if v.steps} <= {pb.REASON_DRAFT_DOWN, pb.REASON_DRAFT_LATE, pb.REASON_BUDGET}
        if fate == "killed":
            engine_stack.draft.start()
        else:
            os.killpg(group, signal.SIGCONT)
        resumed = time.monotonic()
        oracle.compare(pending.result(300))
        asking = partial(complete, engine_stack.url, CASES[4])
        until(lambda: asking().usage["completion_tokens_details"]["accepted_prediction_tokens"], 60)
        assert any(v.accepted for at, v in recorder.cycles if at > resumed)
    until(lambda: metric(engine_stack.verifier_url, "specdec_draft_up") == 1)


def test_the_engines_pulse_tells_a_stopped_engine_from_an_idle_one(engine_stack: Stack):
    def word(name: str) -> int:
        at = WORDS_AT + 8 * ENGINE_WORDS.index(name)
        return int.from_bytes(segment_path(engine_stack.pair).read_bytes()[at : at + 8], "little")

    until(lambda: now_ns() - word("pulse_ns") < 1.5e9, 5)  # with nothing to do
    os.kill(word("pid"), signal.SIGSTOP)
    try:
        until(lambda: now_ns() - word("pulse_ns") > 2.5e9, 10)
        httpx.get(f"{engine_stack.verifier_url}/readyz", timeout=5, trust_env=False).raise_for_status()  # not for long
    finally:
        os.kill(word("pid"), signal.SIGCONT)
    until(lambda: now_ns() - word("pulse_ns") < 1.5e9, 5)


def test_a_session_past_the_drafts_limit_is_decoded_plainly_and_its_neighbour_keeps_its_drafts(
    engine_stack: Stack, oracle: Oracle
):
    arrange(engine_stack, "fake_drafters:Limited", *fixed(3, 4))
    long, short = max(range(32), key=lambda n: len(oracle.answers[n].prompt_ids)), 13
    assert len(oracle.answers[long].prompt_ids) > 200 > 100 > len(oracle.answers[short].prompt_ids)
    with Recorder(engine_stack) as recorder, ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda n: complete(engine_stack.url, CASES[n]), (long, short)))
        time.sleep(0.3)
        cycles = [v for _, v in recorder.cycles]
    assert [a.ids for a in answers] == [oracle.answers[n].ids for n in (long, short)]
    limited = [v for v in cycles if v.context > 200]
    assert len(limited) > 10
    assert {v.proposed for v in limited} == {0}
    assert pb.REASON_DRAFT_LIMIT in {v.reason for v in limited}
    others = [v for v in cycles if v.context < 200]
    assert sum(v.accepted for v in others) == sum(v.proposed for v in others) > 20


def test_a_draft_with_another_vocabulary_says_so_and_leaves_and_the_pair_goes_on(engine_stack: Stack, oracle: Oracle):
    engine_stack.start_draft("fake_drafters:Permuted")
    refused = engine_stack.draft
    assert refused is not None
    until(lambda: refused.process.poll() is not None, 30)
    assert refused.process.poll() == 2
    assert "the draft's tokenizer has 49152, the target's 49152" in refused.log.read_text()
    assert complete(engine_stack.url, CASES[0]).ids == oracle.answers[0].ids
    engine_stack.start_draft("fake_drafters:Same")
    engine_stack.wait_ready()
    answer = complete(engine_stack.url, CASES[0])
    assert answer.ids == oracle.answers[0].ids
    assert answer.usage["completion_tokens_details"]["accepted_prediction_tokens"] > 0


# ---- sampling


def test_sampled_answers_keep_the_targets_distribution(engine_stack: Stack):
    """Guards vllm#55005: unmended, temperature reaches speculative rows as uninitialised memory, and the mean
    log-probability falls from about -1.6 to -13."""
    arrange(engine_stack, "fake_drafters:Bigrams", *fixed(4, 4))

    def mean_logprobs(speculative: str) -> tuple[list[float], tuple[int, int]]:
        totals, count, accepted, rejected = [0.0] * 6, 0, 0, 0
        # the first continues in many ways, so most drafts are rejected; the second as the draft thinks
        for prompt, seed in product(("Once upon a time there was a", "1, 2, 3, 4, 5, 6,"), range(3)):
            body = {
                "model": "demo",
                "prompt": prompt,
                "max_tokens": 6,
                "temperature": 0.8,
                "n": 16,
                "seed": seed,
                "logprobs": 0,
                "ignore_eos": True,
                "speculative": speculative,
            }
            answer = httpx.post(engine_stack.url + "/v1/completions", json=body, timeout=120).json()
            details = answer["usage"]["completion_tokens_details"]
            accepted += details["accepted_prediction_tokens"]
            rejected += details["rejected_prediction_tokens"]
            for choice in answer["choices"]:
                values = choice["logprobs"]["token_logprobs"]
                totals = [a + b for a, b in zip(totals, values, strict=True)]
                count += 1
        return [t / count for t in totals], (accepted, rejected)

    with_drafts, (accepted, rejected) = mean_logprobs("auto")
    without, _ = mean_logprobs("off")
    assert accepted > 20
    assert rejected > 100
    assert sum(with_drafts) / 6 == pytest.approx(sum(without) / 6, abs=0.5)
    assert with_drafts == pytest.approx(without, abs=1.2)


# ---- the API


def test_usage_and_request_ids_of_several_choices(engine_stack: Stack):
    arrange(engine_stack, "ngram", "--window", "2")
    with Recorder(engine_stack) as recorder:
        client = openai.OpenAI(base_url=engine_stack.url + "/v1", api_key="none", max_retries=0)
        answer = client.chat.completions.with_raw_response.create(
            model="demo",
            messages=[{"role": "user", "content": "Name a colour."}],
            n=3,
            temperature=1.0,
            max_tokens=20,
            extra_headers={"X-Request-Id": "mine-1"},
        )
        assert answer.headers["x-request-id"] == "mine-1"
        parsed = answer.parse()
        assert [choice.index for choice in parsed.choices] == [0, 1, 2]
        assert parsed.usage is not None
        details = parsed.usage.completion_tokens_details
        assert details is not None
        assert details.accepted_prediction_tokens is not None
        until(lambda: metric(engine_stack.verifier_url, "specdec_sessions") == 0)
        time.sleep(0.3)
        (tokens,) = recorder.committed().values()
        assert tokens == parsed.usage.completion_tokens
        sessions = {v.session for _, f in recorder.frames for v in f.verdicts}
        assert len(sessions) == 3


def test_what_vllm_cannot_do_with_speculation_is_refused_with_its_reason(engine_stack: Stack):
    for fields in (
        {"min_p": 0.1, "temperature": 0.8},
        {"logit_bias": {"28": 5}},
        {"logprobs": 1, "logprob_token_ids": [28, 30, 99]},
    ):
        body = {"model": "demo", "prompt": "Hi", "max_tokens": 4} | fields
        answer = httpx.post(engine_stack.url + "/v1/completions", json=body, timeout=30)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] in fields
        assert "A server without speculation takes it" in error["message"]


def test_top_k_is_answered_where_no_session_of_the_batch_has_drafts(engine_stack: Stack):
    """vLLM's rejection sampler ends the engine there."""
    body = {"model": "demo", "prompt": "Hi", "max_tokens": 4, "temperature": 1, "top_k": 4, "speculative": "off"}
    assert httpx.post(engine_stack.url + "/v1/completions", json=body, timeout=60).status_code == 200


def test_a_seeded_request_whose_prompt_is_cut_is_answered_and_repeats(engine_stack: Stack):
    """vLLM's CPU runner ends at it: its generators cannot take a draw back."""
    prompt = CASES[22][0]  # several chunks
    body = {"model": "demo", "prompt": prompt, "max_tokens": 12, "temperature": 0.9, "seed": 3, "speculative": "off"}
    answers = [httpx.post(engine_stack.url + "/v1/completions", json=body, timeout=120) for _ in range(2)]
    assert [a.status_code for a in answers] == [200, 200]
    assert len(_tokens(engine_stack, prompt)) > 200
    first, second = (a.json()["choices"][0]["text"] for a in answers)
    assert first == second  # the second's prompt is cut otherwise: most of it is in the prefix cache


def test_speculative_off_and_steps_cap_the_session(engine_stack: Stack, oracle: Oracle):
    arrange(engine_stack, "fake_drafters:Perfect", *fixed(6, 2))

    def widths(speculative: object) -> tuple[Completion, set[int]]:
        with Recorder(engine_stack) as recorder:
            answer = complete(engine_stack.url, CASES[0], speculative=speculative)
            time.sleep(0.2)
            return answer, {v.proposed for _, v in recorder.cycles}

    answer, seen = widths("off")
    assert seen == {0}
    assert answer.usage["completion_tokens_details"]["accepted_prediction_tokens"] == 0
    answer, seen = widths({"steps": 2})
    assert max(seen) == 2
    assert answer.ids == oracle.answers[0].ids
    _, seen = widths("auto")
    assert max(seen) == 6
    refused = httpx.post(
        engine_stack.url + "/v1/completions", json={"model": "demo", "prompt": "x", "speculative": "on"}
    )
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "speculative"


def test_streams_arrive_cycle_by_cycle_with_exact_counts(engine_stack: Stack, oracle: Oracle):
    arrivals = []
    question = "Explain in five sentences how a bicycle stays upright."
    for _, ids, so_far in stream_chat(engine_stack.url, "demo", question, temperature=0, max_tokens=60):
        answer = so_far
        arrivals.append((time.monotonic(), len(ids)))
    assert arrivals[-1][0] - arrivals[0][0] > 0.3, "not in one lump"
    assert sum(n for _, n in arrivals) == answer.completion_tokens
    plain = chat(engine_stack.vllm_url, "demo", question, temperature=0, max_tokens=60)
    assert answer.token_ids == plain.token_ids
    assert answer.accepted <= answer.completion_tokens


def test_the_rest_of_vllms_api_is_forwarded(engine_stack: Stack):
    client = openai.OpenAI(base_url=engine_stack.url + "/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["demo"]
    tokens = httpx.post(engine_stack.url + "/tokenize", json={"model": "demo", "prompt": "hello"}).json()
    assert tokens["count"] == 1
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "x"}], temperature=-1)
    schema = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}
    answer = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "Name a colour as JSON."}],
        temperature=0,
        max_tokens=40,
        response_format={"type": "json_schema", "json_schema": {"name": "c", "schema": schema}},
    )
    assert json.loads(answer.choices[0].message.content or "")["colour"] in ("red", "blue")


def test_the_installed_vllm_has_every_seam():
    from specdec.verifier import seams

    seams.check()
    broken = seams.Seam("vllm.v1.core.sched.scheduler:Scheduler.schedule", ("self", "renamed"), "a changed argument")
    with pytest.raises(seams.SeamError, match="a changed argument"):
        seams.check((broken,))
