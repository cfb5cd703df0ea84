"""`specdec demo`, `bench` and `up` as a user runs them, on the real engine."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from engine_prompts import THREADS

pytestmark = pytest.mark.engine
Done = subprocess.CompletedProcess[str]


def run(*command: str, **variables: str) -> Done:
    command = (sys.executable, "-m", "specdec", *command)
    return subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=500)


@pytest.fixture(scope="module")
def demo(model: Path) -> Iterator[Future[Done]]:
    """The demo, under way: it loads its servers while the first test waits for those of `specdec up`."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(run, "demo", "--max-tokens", "16")


def test_up_answers_restarts_a_dead_draft_and_stops_everything(demo: Future[Done], tmp_path: Path):
    log = tmp_path / "up.log"
    with log.open("wb") as stream:
        up = subprocess.Popen(
            [sys.executable, "-m", "specdec", "up", "--port", "18427", "--logs", str(tmp_path / "logs")], stderr=stream
        )
    try:
        deadline = time.monotonic() + 200
        while "OpenAI API at" not in log.read_text():
            assert up.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        question = {"model": "SmolLM2-135M-Instruct", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
        answer = httpx.post("http://127.0.0.1:18427/v1/chat/completions", json=question, timeout=60).json()
        assert answer["usage"]["completion_tokens"] > 0
        family = psutil.Process(up.pid).children(recursive=True)
        (draft,) = drafts(up)
        draft.kill()
        while not (again := [p for p in drafts(up) if p != draft]):
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        while not httpx.get("http://127.0.0.1:18427/readyz", timeout=5).json()["pairs"][0]["draft"]["up"]:
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        assert again[0].is_running()
        assert "the draft ended with exit code" in log.read_text()
        family += psutil.Process(up.pid).children(recursive=True)
        up.send_signal(signal.SIGINT)
        assert up.wait(60) == 0
        _, left = psutil.wait_procs(family, timeout=5)
        assert not left
    finally:
        up.kill()
        up.wait()


def drafts(up: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    """The draft processes below `up`."""
    found = []
    for process in psutil.Process(up.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it may be ending
            if process.cmdline()[1:4] == ["-m", "specdec", "draft"]:
                found.append(process)
    return found


def test_the_demo_marks_an_answer_compares_and_ends_with_its_result(demo: Future[Done]):
    done = demo.result()
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    result = json.loads(lines[-1])
    assert list(result) == [
        *("ok", "model", "draft", "tok_s", "baseline_tok_s", "speedup", "accept_length", "identical"),
    ]
    assert (result["ok"], result["identical"], result["draft"]) == (True, True, "eagle3")
    assert result["speedup"] == pytest.approx(result["tok_s"] / result["baseline_tok_s"], abs=0.01)
    assert 1 < result["accept_length"] < 9
    marked = re.findall(r"\[([^\[\]]+)\]", "\n".join(lines[:-1]).partition("marked [like this]")[2])
    guessed = re.search(r"(\d+) tokens in .*, (\d+) of them from the draft", done.stdout)
    assert guessed is not None
    assert 5 < int(guessed[2]) < int(guessed[1])
    assert len(marked) >= int(guessed[2]) * 0.7  # a marked token may itself hold a bracket
    assert done.stderr.count("identical") == 12
    folder = re.search(r"logs in (\S+) until", done.stderr)
    assert folder is not None
    assert not Path(folder[1]).exists()


def test_the_benchmark_has_every_variant_side_by_side(model: Path, tmp_path: Path):
    out = tmp_path / "bench.json"
    done = run(
        *("bench", "--max-tokens", "48", "--steps", "3", "--windows", "1", "--own", "3", "--concurrency", "4"),
        *("--json", "--out", str(out)),
        **THREADS,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    names = ["plain vLLM", "vLLM's own EAGLE-3", "off", "k = 3", "auto", "k = 4, window 1"]
    assert [row["variant"] for row in result["rows"]] == names
    assert result["identical"]
    rows = {row["variant"]: row for row in result["rows"]}
    assert rows["off"]["accept_length"] == 1
    assert rows["off"]["proposed"] == 0
    assert rows["k = 3"]["proposed"] > 0
    assert all(
        row["ratio"] == pytest.approx(row["tok_s"] / rows["plain vLLM"]["tok_s"], abs=0.01) for row in rows.values()
    )
    assert set(rows["auto"]["kinds"]) == {"chat", "code", "summarise"}
    # one head in both engines: what it guesses is as often right
    ours, own = rows["k = 3"], rows["vLLM's own EAGLE-3"]
    assert ours["with_drafts"] == pytest.approx(own["with_drafts"], rel=0.03)
    assert ours["stood"] == pytest.approx(own["stood"], abs=0.09)  # the third is reached in some eighty cycles
    assert ours["with_drafts"] > 2.2
    samples = json.loads(out.read_text())["samples"]
    assert {len(answers) for answers in samples.values()} == {12}


def test_up_that_cannot_start_says_so_and_keeps_the_logs(tmp_path: Path):
    commands = [("--drafter", "causal"), ("--model", str(tmp_path / "nowhere"))]
    with ThreadPoolExecutor(len(commands)) as pool:
        bare, nowhere = pool.map(lambda args: run("up", *args), commands)
    assert (bare.returncode, "needs --draft-model" in bare.stderr) == (2, True)
    assert nowhere.returncode == 1
    assert "the verifier ended with exit code" in nowhere.stderr
    folder = re.search(r"logs in (\S+)", nowhere.stderr)
    assert folder is not None
    assert "nowhere" in (Path(folder[1]) / "verifier.log").read_text()
    shutil.rmtree(folder[1])
