"""Killed at random points and started again, the stack always works. `make soak` does more of the same.

Most kills are of the real services around a stand-in for vLLM (stand_in_engine), which starts in a moment. Their ports
are chosen below the range from which the kernel takes those of connections, so that none is lost while its service is
down.
"""

import contextlib
import json
import os
import random
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from channel_kit import until
from engine_prompts import CASES, VLLM_ARGS, Completion, Oracle, complete, short_folder
from specdec import guard
from specdec.channel.segment import segment_path, sweep
from specdec.stack import Service, Stack
from stand_in_engine.stand_in_script import script, text_of
from test_guard import processes_with

TESTS = Path(__file__).parent
GONE_S = 5  # no child outlives its parent for longer
ENDS_S = 40  # until a service ends whose engine has died: vLLM's server takes its time
LOADS_S = 300  # until the real engine serves, on a machine with much to do
WORKS_S = 60  # until all is as before, once everything has been started again; most of it is waiting for a processor
SHARED_MEMORY = Path("/dev/shm")
FIXED = ("--policy", "fixed")  # these drafts rarely pay where the machine is busy, and are to be made all the same
# What a process may gain over its life: clients come and go, and vLLM's KV cache and scratch memory are first touched
# when prompts fill them.
MORE_FILES, MORE_MEMORY, MORE_MEMORY_OF_VLLM = 8, 24 * 2**20, 160 * 2**20


# ---- whom to kill


VERIFIER_SIDE = ("verifier's guard", "verifier", "engine's guard", "engine's server", "engine core", "engine's worker")
DRAFT_ONLY = ("draft's guard", "draft")
ROUTER_ONLY = ("router's guard", "router")


def chain(service: Service) -> list[psutil.Process]:
    """A service's guard, the service, and what that has started, the oldest first; Python's own helpers left out."""
    with contextlib.suppress(psutil.Error):
        first = psutil.Process(service.process.pid)
        family = [first, *first.children(recursive=True)]
        return [process for process in family if "resource_tracker" not in command_of(process.pid)]
    return []


def victims(stack: Stack) -> dict[str, tuple[Service, psutil.Process]]:
    """Every process of the stack that is there now, by what it is."""
    assert stack.draft is not None
    assert stack.router is not None
    return {
        name: (service, process)
        for names, service in ((VERIFIER_SIDE, stack.verifier), (DRAFT_ONLY, stack.draft), (ROUTER_ONLY, stack.router))
        for name, process in zip(names, chain(service), strict=False)
    }


# ---- the clients


@dataclass(frozen=True)
class Asked:
    """One streamed request. `fault`: what went wrong, empty for a whole answer that is the expected one."""

    start: float
    end: float
    fault: str
    wrong: bool  # a token of it is not the target's


@dataclass
class Clients:
    """Streams answer after answer through the router while the context is open."""

    url: str
    count: int = 3
    tokens: int = 80
    asked: list[Asked] = field(default_factory=list)

    def __enter__(self) -> "Clients":
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(self.count)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in self._threads), "an answer without end"

    def _run(self, number: int) -> None:
        serial = 0
        with httpx.Client(timeout=15, trust_env=False, verify=False) as client:
            while not self._stop.is_set():
                serial += 1
                asked = ask(client, self.url, f"client {number} asks {serial}", self.tokens)
                self.asked.append(asked)
                self._stop.wait(0.1 if asked.fault else 0.01)


def ask(client: httpx.Client, url: str, prompt: str, tokens: int) -> Asked:
    """One streamed answer of the stand-in's target."""
    start, text, fault, done = time.monotonic(), "", "", False
    body = {"model": "stand-in", "prompt": prompt, "max_tokens": tokens, "stream": True}
    try:
        with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            if response.status_code != 200:
                fault = f"{response.status_code} {json.loads(response.read())['error']['code']}"
            for line in response.iter_lines() if response.status_code == 200 else ():
                data = line.removeprefix("data: ")
                if data == line or data == "[DONE]":
                    done = done or data == "[DONE]"
                    continue
                document = json.loads(data)
                if "error" in document:
                    fault = f"error {document['error']['code']}"
                    continue
                text += "".join(choice["text"] for choice in document["choices"])
    except httpx.HTTPError as error:
        fault = f"broken {type(error).__name__}"
    expected = text_of(script(prompt, tokens))
    if not fault:
        fault = "" if done else "ended without [DONE]"
    return Asked(start, time.monotonic(), fault, text != expected if done else not expected.startswith(text))


# ---- kills


@dataclass(frozen=True)
class Kill:
    """One kill and what came of it; seconds from the kill on."""

    number: int
    victim: str
    starting: bool  # something of the stack was still starting
    at: float
    gone_s: float  # until nothing was left that had lost its parent
    works_s: float | None  # until everything worked again; None: the next kill came first

    def __str__(self) -> str:
        works = "-" if self.works_s is None else f"{self.works_s:.2f}"
        when = "starting" if self.starting else "serving"
        return f"{self.number:4d} {self.victim:16s} {when:8s} gone {self.gone_s:5.2f} s  works {works:>5s} s"


@dataclass
class Campaign:
    """Kills of one stack. `works` fails unless all of the stack works as before."""

    stack: Stack
    mark: str  # in the environment of all its processes
    works: Callable[[], None]
    rng: random.Random
    say: Callable[[str], None] = lambda _: None
    at_once: int = 0  # clients beyond one
    kills: list[Kill] = field(default_factory=list)
    sizes: dict[psutil.Process, tuple[int, int]] = field(default_factory=dict)  # files and bytes, when first seen

    def kill(self, victim: str, *, wait: bool, starting: bool) -> Kill:
        """kill -9, what its starter does then, and the start of what has ended. `wait`: until everything works."""
        service, process = victims(self.stack)[victim]
        shared = {
            path
            for p in chain(service)
            if service is self.stack.verifier
            for path in guard._shared_memory(os.getpgid(p.pid))
        }
        at = time.monotonic()
        process.send_signal(signal.SIGKILL)
        if victim in (VERIFIER_SIDE[0], DRAFT_ONLY[0], ROUTER_ONLY[0]):
            service.process.stop(0)  # what whoever started it does then
        assert until(lambda: not self.orphans(), GONE_S), (victim, self.orphans())
        assert until(lambda: service.process.poll() is not None, ENDS_S), f"the {service.name} outlives its {victim}"
        assert until(lambda: not self.orphans(), GONE_S), (victim, self.orphans())
        gone_s = time.monotonic() - at
        left = {path for path in shared if os.path.exists(path)}
        for path in left:
            os.unlink(path)
        assert not left, f"left behind after kill -9 of the {victim}: {left}"
        self.no_shared_memory_but(service is not self.stack.verifier, f"after kill -9 of the {victim}")
        service.process.stop(0)
        service.start()
        works_s = None
        if wait:
            self.works()
            works_s = time.monotonic() - at
            self.no_shared_memory_but(True, f"after the restart of the {service.name}")
            self.measure()
        kill = Kill(len(self.kills) + 1, victim, starting, at, gone_s, works_s)
        self.kills.append(kill)
        self.say(str(kill))
        return kill

    def run(self, count: int, weights: dict[str, int]) -> None:
        """`count` kills of victims drawn by weight, one in three of them while what was killed before starts."""
        wait = True
        for number in range(count):
            starting = not wait
            # at any moment of serving, or of a start
            time.sleep(self.rng.uniform(0, 1.2) if starting else self.rng.uniform(0, 0.15))
            there = victims(self.stack)
            names = [name for name in weights if name in there]
            victim = self.rng.choices(names, [weights[name] for name in names])[0]
            wait = self.rng.random() > 0.35 or number == count - 1
            self.kill(victim, wait=wait, starting=starting)

    def orphans(self) -> list[str]:
        """Processes of the stack that nobody of it has as a child any more."""
        family = {p.pid for p in psutil.Process().children(recursive=True)}
        return [f"{pid}: {command_of(pid)}" for pid in processes_with(self.mark) if pid not in family]

    def no_shared_memory_but(self, alive: bool, when: str) -> None:
        """At most the pair's one segment is in /dev/shm, and nothing of an engine but of that which is `alive`."""
        own = sorted(p.name for p in SHARED_MEMORY.iterdir() if self.mark in p.name)
        pids = {f"psm_{self.mark}_{p.pid}" for p in chain(self.stack.verifier)} if alive else set()
        assert set(own) <= pids, f"left behind {when}: {set(own) - pids}"
        segments = [p for p in SHARED_MEMORY.iterdir() if p.name.startswith(f"specdec-{self.stack.pair}")]
        assert len(segments) <= 1, segments

    def measure(self) -> None:
        """Nobody who has survived so far grows."""
        for name, (_, process) in victims(self.stack).items():
            with contextlib.suppress(psutil.NoSuchProcess):
                now = (process.num_fds(), process.memory_info().rss)
                first = self.sizes.setdefault(process, now)
                more = MORE_MEMORY_OF_VLLM if name.startswith("engine") else MORE_MEMORY
                # each of the clients at once may have left a connection to and from the router
                assert now[0] <= first[0] + MORE_FILES + 2 * self.at_once, f"{name}: {first} -> {now}"
                assert now[1] <= first[1] + more, f"{name}: {first} -> {now}"

    def check(self, asked: list[Asked]) -> None:
        """No answer was wrong, and only those failed that ran while something but the draft was down."""
        assert not [a for a in asked if a.wrong]
        down, since = [], None
        for kill in self.kills:
            if kill.victim not in DRAFT_ONLY and since is None:
                since = kill.at
            if kill.works_s is not None and since is not None:
                down.append((since, kill.at + kill.works_s))
                since = None
        for a in asked:
            if a.fault:
                assert any(a.start <= end and a.end >= begin for begin, end in down), f"{a}, down {down}"
                # the router's own end may break an answer off; the engine's is told
                assert a.fault.split()[0] in ("503", "504", "error", "broken"), a
        routers = [k.at for k in self.kills if k.victim.startswith("router")]
        for a in asked:
            if a.fault.startswith("broken"):
                assert any(at - 1 <= a.end and a.start <= at + 12 for at in routers), f"{a} broke off without a word"


def remove_marked(mark: str) -> None:
    """What a failed run of the stand-in has left in /dev/shm."""
    for path in SHARED_MEMORY.glob(f"psm_{mark}_*"):
        path.unlink(missing_ok=True)


def semaphores() -> set[str]:
    """Python's, by name."""
    return {path.name for path in SHARED_MEMORY.glob("sem.mp-*")}


def command_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:120]
    return "gone"


# ---- the stand-in


WEIGHTS = {
    **{"verifier": 4, "engine's guard": 3, "engine's server": 3, "engine core": 2},
    **{"draft": 5, "router": 5, "verifier's guard": 1, "draft's guard": 1, "router's guard": 1},
}


@dataclass
class Report:
    """What a series of kills came to."""

    kills: list[Kill]
    asked: list[Asked]

    @property
    def failed(self) -> int:
        return sum(bool(a.fault) for a in self.asked)


def kill_stand_in(count: int, seed: int | str, say: Callable[[str], None] = lambda _: None) -> Report:
    """A stack around the stand-in, killed `count` times with streams in flight. Fails on the first thing that is
    not as it should be."""
    mark, rng = f"kills{uuid.uuid4().hex[:12]}", random.Random(seed)
    foreign = [SHARED_MEMORY / f"{prefix}{uuid.uuid4().hex[:8]}-{mark[::-1]}" for prefix in ("specdec-", "psm_")]
    with short_folder() as folder, contextlib.ExitStack() as stack_of:
        for path in foreign:
            path.write_bytes(b"somebody else's")
            stack_of.callback(path.unlink, missing_ok=True)
        path = os.pathsep.join([str(TESTS / "stand_in_engine"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        env = {"PYTHONPATH": path, "STAND_IN_MARK": mark, "STAND_IN_LOAD_S": "0.2"}
        stack = Stack("stand-in", folder, router_args=FIXED, env={**env, "TMPDIR": str(folder)})
        stack_of.callback(remove_marked, mark)
        stack_of.enter_context(stack)
        client = stack_of.enter_context(httpx.Client(timeout=15, trust_env=False, verify=False))
        serial = 0

        def works() -> None:
            nonlocal serial
            stack.wait_ready(WORKS_S)
            end, fault = time.monotonic() + WORKS_S, "nothing asked"
            while fault or not drafts_accepted(client, stack.url):
                assert time.monotonic() < end, f"{fault}\n{stack.router.tail()}\n{stack.verifier.tail()}"
                serial += 1
                fault = ask(client, stack.url, f"does it work {serial}", 30).fault

        works()
        campaign = Campaign(stack, mark, works, rng, say)
        with Clients(stack.url) as clients:
            campaign.run(count, WEIGHTS)
        campaign.check(clients.asked)
        assert sum(not a.fault for a in clients.asked) >= count
        segment = segment_path(stack.pair)
        stack.stop()
        assert until(lambda: not processes_with(mark), GONE_S)
        assert not segment.exists()
        assert not [p for p in SHARED_MEMORY.iterdir() if mark in p.name]
        assert all(path.read_bytes() == b"somebody else's" for path in foreign)
        client.close()
    return Report(campaign.kills, clients.asked)


@pytest.mark.parametrize(
    ("kills", "seeds"),
    [(10, ["1"]), pytest.param(20, ["2", "3"], marks=pytest.mark.engine, id="40 more, which take a minute")],
)
def test_killed_anywhere_at_any_moment_it_starts_again_and_works(kills: int, seeds: list[str]):
    """Every kill costs the start of a process or three, half a second of a processor each, so fifty of them are too
    slow for the quick tests. The others run two stacks side by side."""
    files_before = len(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(len(seeds)) as pool:
        reports = list(pool.map(lambda seed: kill_stand_in(kills, seed), seeds))
    assert all(len(report.kills) == kills for report in reports)
    assert len(os.listdir("/proc/self/fd")) <= files_before + 2


def drafts_accepted(client: httpx.Client, url: str) -> bool:
    """Whether a request is answered with the draft's help."""
    body = {"model": "stand-in", "prompt": f"helped {uuid.uuid4().hex}", "max_tokens": 40, "stream": True}
    with contextlib.suppress(httpx.HTTPError):
        text = client.post(f"{url}/v1/completions", json=body).text
        usages = [line for line in text.splitlines() if '"accepted_prediction_tokens":' in line]
        return bool(usages) and '"accepted_prediction_tokens":0' not in usages[0]
    return False


KILLED_CORE = """
import os, sys, time
from multiprocessing import resource_tracker, shared_memory
resource_tracker.register = lambda *_: None
if (core := os.fork()) == 0:
    shared = shared_memory.SharedMemory(sys.argv[1], create=True, size=4096)
    time.sleep(2)
    os.kill(os.getpid(), 9)
os.waitpid(core, 0)
time.sleep(0.2)
sys.exit(1)
"""


def test_shared_memory_of_a_core_that_was_killed_under_its_server_is_removed():
    """As the kernel does when memory runs out: when the guard comes to look, nobody has it mapped any more."""
    name = f"psm_{uuid.uuid4().hex}"
    command = guard.Guarded([sys.executable, "-c", KILLED_CORE, name])
    try:
        assert until((SHARED_MEMORY / name).exists)
        assert until(lambda: command.poll() == 1, 20)
        assert not (SHARED_MEMORY / name).exists()
    finally:
        command.stop(0)
        (SHARED_MEMORY / name).unlink(missing_ok=True)


# ---- the real engine

REAL_WEIGHTS = {"draft": 6, "router": 4, "verifier": 1, "engine's guard": 1, "engine's server": 1, "engine core": 1}
REAL_CASES = (0, 2, 14, 15, 16, 17, 21, 29)  # of CASES


class RealKills:
    """Kills of a stack around vLLM and the demo model. After each the answers are `expected`, or else those the stack
    gave first, without speculation."""

    def __init__(
        self,
        stack: Stack,
        mark: str,
        seed: int | str,
        say: Callable[[str], None] = lambda _: None,
        expected: Sequence[Completion] | None = None,
    ) -> None:
        self._stack, self._expected = stack, expected
        self._cases, self._rng = [CASES[i] for i in REAL_CASES], random.Random(seed)
        self._pool = ThreadPoolExecutor(len(self._cases))
        self._campaign = Campaign(stack, mark, self.works, self._rng, say, at_once=len(self._cases))
        self.kills = self._campaign.kills

    def works(self) -> None:
        """Fails unless the stack answers as it should, with the draft's help."""
        self._stack.wait_ready(LOADS_S)
        self._expected = self._expected or self._answers(speculative="off")
        now = self._answers()
        assert [a.ids for a in now] == [e.ids for e in self._expected]
        assert any(a.usage["completion_tokens_details"]["accepted_prediction_tokens"] for a in now)

    def while_it_loads(self, victim: str) -> None:
        """Kills one of the verifier's while it loads the model."""
        assert until(lambda: "engine's server" in victims(self._stack), LOADS_S)
        time.sleep(self._rng.uniform(1, 8))
        self._campaign.kill(victim, wait=True, starting=True)

    def while_it_serves(self, victim: str, *, wait: bool = True) -> None:
        """Kills one amid answers, of which those that come to their end must be right."""
        assert self._expected is not None
        pending = [self._pool.submit(complete, self._stack.url, case) for case in self._cases]
        time.sleep(self._rng.uniform(0.2, 1.5))
        self._campaign.kill(victim, wait=False, starting=False)
        for answer, right in zip(pending, self._expected, strict=True):
            error = answer.exception(120)
            assert error is None or victim not in DRAFT_ONLY, f"a stream failed with its {victim}: {error}"
            assert error is not None or answer.result().ids == right.ids
        if wait:
            self.works()
            self._campaign.measure()

    def _answers(self, **fields: Any) -> list[Completion]:
        return list(self._pool.map(lambda case: complete(self._stack.url, case, **fields), self._cases))


def nothing_is_left(stack: Stack, folder: Path) -> None:
    """Fails unless the stopped stack, whose TMPDIR was `folder`, has left nothing."""
    assert until(lambda: not processes_with(folder.name), GONE_S)
    assert not segment_path(stack.pair).exists()
    # of all the verifiers' folders at most the last one's, if it had to be killed: a next one would remove it
    assert len(list(folder.glob("specdec-vllm-*"))) <= 1


def kill_real(model: Path, plan: Sequence[str], seed: int | str, say: Callable[[str], None]) -> Report:
    """A stack of its own, killed once while it loads the model and then as planned."""
    before = semaphores()
    with short_folder() as folder:
        stack = Stack(
            model,
            folder,
            router_args=FIXED,
            verifier_args=["--max-num-seqs", "16"],
            vllm_args=VLLM_ARGS,
            env={"TMPDIR": str(folder)},
        )
        with stack:
            campaign = RealKills(stack, folder.name, seed, say)
            campaign.while_it_loads("verifier")
            for victim in plan:
                campaign.while_it_serves(victim)
        nothing_is_left(stack, folder)
        assert until(lambda: not semaphores() - before, GONE_S)
    return Report(campaign.kills, [])


@pytest.mark.engine
@pytest.mark.ends_the_stack
def test_the_real_engine_killed_while_it_serves_and_in_its_start_works_again(
    engine_stack: Stack, stack_folder: Path, oracle: Oracle
):
    engine_stack.start_draft("ngram")
    engine_stack.start_router(*FIXED)
    expected = [oracle.answers[i] for i in REAL_CASES]
    campaign = RealKills(engine_stack, stack_folder.name, 1, expected=expected)
    campaign.works()
    for victim in ("draft", "router", "draft"):
        campaign.while_it_serves(victim)
    campaign.while_it_serves("engine core", wait=False)
    campaign.while_it_loads("verifier")
    assert [kill.victim for kill in campaign.kills] == ["draft", "router", "draft", "engine core", "verifier"]


@pytest.mark.engine
@pytest.mark.ends_the_stack
def test_nothing_outlives_a_killed_verifier(engine_stack: Stack, stack_folder: Path):
    """Last, since it ends the stack's verifier."""
    first = psutil.Process(engine_stack.verifier.process.pid)
    (verifier,) = first.children()
    family = [first, verifier, *verifier.children(recursive=True)]
    assert len(family) >= 4  # its guard, vLLM's server and engine among them
    segment = segment_path(engine_stack.pair)
    assert segment.exists()
    shared = {m.path for p in family for m in p.memory_maps() if m.path.startswith("/dev/shm/psm_")}
    assert shared, "vLLM's own shared memory"
    verifier.kill()
    assert until(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family), GONE_S)
    assert engine_stack.draft is not None
    assert engine_stack.draft.process.poll() is None, "the draft waits for the next verifier"
    assert segment in sweep()
    assert not any(Path(path).exists() for path in shared)
    answer = httpx.post(engine_stack.url + "/v1/completions", json={"model": "demo", "prompt": "x"}, timeout=20)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] in ("no_pair", "engine_unavailable")
    engine_stack.stop()
    nothing_is_left(engine_stack, stack_folder)
