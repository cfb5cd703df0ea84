"""verifier/supervisor.py without vLLM: its command line, and what the verifier says of engine and draft."""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator

import grpc
import httpx
import pytest
from fastapi import FastAPI, Response
from fastapi.responses import PlainTextResponse

import specdec
from fake_engine import FakePair, fake_pair, until
from specdec.channel.segment import Role, Segment, now_ns
from specdec.errors import SettingsError, SetupError
from specdec.proto import speculation_pb2 as pb
from specdec.proto import speculation_pb2_grpc as pb_grpc
from specdec.serve import listen, serving
from specdec.stack import free_ports
from specdec.verifier import supervisor
from specdec.verifier.settings import VerifierSettings
from specdec.verifier.supervisor import Supervisor, engine_command, engine_environment

# ---- vLLM's command line


def test_vllms_arguments_come_after_ours():
    command = engine_command(VerifierSettings(model="m", max_steps=5), ["--dtype", "float32", "--max-model-len", "64"])
    assert command[-4:] == ["--dtype", "float32", "--max-model-len", "64"]
    for name, value in [
        ("--model", "m"),
        ("--worker-cls", "specdec.verifier.cpu.Worker"),
        ("--scheduler-cls", "specdec.verifier.scheduler.Scheduler"),
        ("--max-num-seqs", "64"),
        ("--port", "8100"),
    ]:
        assert command[command.index(name) + 1] == value
    assert '"num_speculative_tokens": 5' in command[command.index("--speculative-config") + 1]


@pytest.mark.parametrize(
    "word",
    [
        "--worker-cls",
        "--worker-cls=my.Worker",
        "--worker_cls=my.Worker",
        "--worker-cl",  # vLLM's parser takes a beginning
        "--scheduler-cls",
        "--scheduler_cls",
        "--scheduler-c=x",
        "--speculative-config",
        "--speculative_config={}",
        "--speculative-config.method",  # and dotted forms
        "--speculative_config.num_speculative_tokens=3",
        "--speculative-conf",
        "-sc",
        "-sc={}",
        "-sc.method",
        "--spec-method",
        "--spec-tokens=3",
        "--model",
        "--host=0.0.0.0",
        "--port",
        "--max-num-seqs",
        "--max_num_seqs=3",
    ],
)
def test_arguments_that_take_the_plugins_out_are_refused(word):
    with pytest.raises(SetupError, match="the verifier sets this itself") as caught:
        engine_command(VerifierSettings(model="m"), ["--dtype", "float32", word, "x"])
    assert str(caught.value).startswith(f"{word}: ")


@pytest.mark.parametrize(
    "word",
    [
        "--dtype",
        "--max-model-len",
        "--max-num-batched-tokens",
        "--served-model-name",
        "--scheduling-policy",
        "--worker-extension-cls",
        "--model-impl",
        "--model-loader-extra-config",
        "--hf-overrides",
        "-tp",
        "-O3",
        "1",
    ],
)
def test_other_arguments_pass(word):
    assert engine_command(VerifierSettings(model="m"), [word])[-1] == word


def test_the_users_environment_comes_before_ours(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    monkeypatch.delenv("VLLM_NO_USAGE_STATS", raising=False)
    environment = engine_environment(SPECDEC_SEGMENT="/dev/shm/x")
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "7"
    assert environment["VLLM_NO_USAGE_STATS"] == "1"
    assert environment["SPECDEC_SEGMENT"] == "/dev/shm/x"
    assert environment["PATH"] == os.environ["PATH"]


# ---- what it says of itself


@pytest.fixture(autouse=True)
def tested_vllm(monkeypatch):
    monkeypatch.setattr(supervisor, "vllm_version", lambda: "0.32.9")


def verifier_of(pair: FakePair, **settings) -> Supervisor:
    """A verifier as it is once `run` has made its segment."""
    verifier = Supervisor(VerifierSettings(model="m/n", pair="p", **settings), [])
    verifier._segment, verifier._control = pair.segment, pair.control
    return verifier


def test_a_head_without_a_config_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(SettingsError, match=r"--head .*: it has no config.json"):
        Supervisor(VerifierSettings(model="m/n", head=str(tmp_path)), [])
    with pytest.raises(SettingsError, match="--head nowhere: there is no such folder"):
        Supervisor(VerifierSettings(model="m/n", head="nowhere"), [])


def test_the_pairs_memory_and_environment_follow_the_head(tmp_path, monkeypatch):
    """What `run` makes them from."""
    started = []
    monkeypatch.setattr(supervisor, "segment_path", lambda pair: tmp_path / f"specdec-{pair}")
    monkeypatch.setattr(supervisor, "Guarded", lambda command, env: started.append(env) or FakeProcess())
    (tmp_path / "config.json").write_text("{}")
    sizes = []

    async def run(**settings):
        ports = {name: free_ports(1)[0] for name in ("port", "control_port", "health_port")}
        verifier = Supervisor(VerifierSettings(model="m/n", pair="p", **ports, **settings), [])
        verifier._stopping.set()
        assert await verifier.run() == 0
        sizes.append(verifier._segment.layout.states_mb)

    asyncio.run(run(head=str(tmp_path), states_mb=3))
    asyncio.run(run(states_mb=3))
    assert sizes == [3, 0]
    assert [env.get("SPECDEC_HEAD") for env in started] == [str(tmp_path), ""]  # whatever the variable was


def test_its_description_and_readiness(tmp_path):
    async def main():
        async with fake_pair(tmp_path) as pair, grpc.aio.insecure_channel(pair.address) as channel:
            verifier = verifier_of(pair, port=1234, max_steps=7, host="10.0.0.1")
            pair.control._describe = verifier._describe
            stub = pb_grpc.SpeculationStub(channel)
            assert await stub.Describe(pb.DescribeRequest()) == pb.PairDescription(
                pair="p",
                model="m/n",
                http_url="http://10.0.0.1:1234",
                max_steps=7,
                max_sessions=pair.segment.layout.max_sessions,
                draft_detail="no draft process has joined the pair",
                specdec_version=specdec.__version__,
                vllm_version="0.32.9",
            )
            assert verifier._readiness() == {
                "ready": False,
                "reasons": ["vLLM does not answer /health yet"],
                "draft": {"up": False, "detail": "no draft process has joined the pair"},
                "routers": 0,
            }
            for advertise, url in (
                ("http://pod:1", "http://pod:1"),
                ("10.1.2.3", "http://10.1.2.3:8100"),
                ("fd00::3", "http://[fd00::3]:8100"),
            ):
                assert verifier_of(pair, host="::", advertise=advertise)._describe().http_url == url

    asyncio.run(main())


def test_a_draft_is_up_from_its_first_generation_while_it_beats(tmp_path):
    async def main():
        async with fake_pair(tmp_path) as pair:
            verifier = verifier_of(pair)
            with Segment.attach(pair.segment.path, Role.DRAFT) as draft:
                assert verifier._draft_state() == (False, "the draft is starting")
                draft.word("draft.generation").value = 1
                draft.word("draft.beat_ns").value = now_ns()
                assert verifier._draft_state() == (True, f"up, process {os.getpid()}")
                assert verifier._describe().draft_up
                draft.word("draft.beat_ns").value = now_ns() - 7_000_000_000
                assert verifier._draft_state() == (False, "the draft has been silent for 7 s")
            assert verifier._draft_state() == (False, "no draft process has joined the pair")

    asyncio.run(main())


# ---- watching vLLM


class FakeProcess:
    """A guarded vLLM; `code` once it has ended."""

    code: int | None = None

    def poll(self) -> int | None:
        return self.code

    def stop(self, grace_s: float) -> None: ...


@contextlib.asynccontextmanager
async def fake_health(status: int) -> AsyncIterator[tuple[int, Response]]:
    """vLLM's /health: the port, and the answer that the test may change."""
    app, answer = FastAPI(), Response(status_code=status)
    app.get("/health")(lambda: answer)
    listener = listen("127.0.0.1", 0, "vLLM")
    async with serving(app, listener, 1):
        yield listener.getsockname()[1], answer


def test_it_is_ready_while_vllm_says_so_and_ends_when_vllm_does(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # a cluster's own, which cannot reach this host

    async def main():
        async with fake_pair(tmp_path) as pair, fake_health(503) as (port, answer):
            verifier, process = verifier_of(pair, port=port), FakeProcess()
            watching = asyncio.create_task(verifier._watch(process))
            await asyncio.sleep(0.1)
            assert not verifier._readiness()["ready"]
            answer.status_code = 200
            await until(
                lambda: (
                    verifier._readiness() | {"draft": None}
                    == {"ready": True, "reasons": [], "draft": None, "routers": 0}
                )
            )
            assert verifier._describe().engine_ready
            answer.status_code = 503
            await until(lambda: not verifier._describe().engine_ready)
            process.code = 3
            assert await asyncio.wait_for(watching, 5) == 1

    asyncio.run(main())
    assert "vLLM ended with exit code 3" in caplog.text


def test_a_slow_answer_of_vllm_is_no_failure_but_several_are(tmp_path, monkeypatch):
    """Its process may be busy with a large prompt; routers would take the pair out at once."""
    answers: list[int | None] = [200, None, None, 200, None, None, None, 200, 503]

    async def fake_get(url: str) -> httpx.Response:
        answer = answers.pop(0)
        if answer is None:
            raise httpx.ReadTimeout("no answer")
        return httpx.Response(answer)

    async def main():
        async with fake_pair(tmp_path) as pair:
            verifier = verifier_of(pair)
            monkeypatch.setattr(verifier._client, "get", fake_get)
            said = []
            while answers:
                verifier._engine_ready = await verifier._healthy()
                said.append(verifier._engine_ready)
            assert said == [True, True, True, True, True, True, False, True, False]

    asyncio.run(main())


def test_vllms_own_metrics_are_beside_the_pairs(tmp_path):
    async def main():
        app = FastAPI()
        app.get("/metrics")(lambda: PlainTextResponse("vllm:num_requests_running 3\n"))
        listener = listen("127.0.0.1", 0, "vLLM")
        async with fake_pair(tmp_path) as pair:
            verifier = verifier_of(pair, port=listener.getsockname()[1])
            transport = httpx.ASGITransport(verifier._health_app())
            async with httpx.AsyncClient(transport=transport, base_url="http://verifier") as client:
                async with serving(app, listener, 1):
                    answer = await client.get("/vllm/metrics")
                assert (answer.status_code, answer.text) == (200, "vllm:num_requests_running 3\n")
                answer = await client.get("/vllm/metrics")
                assert (answer.status_code, answer.text) == (503, "vLLM does not answer: ConnectError\n")
                assert "specdec_" in (await client.get("/metrics")).text

    asyncio.run(main())


def test_it_gives_up_on_a_vllm_that_never_gets_ready(tmp_path, caplog):
    async def main():
        async with fake_pair(tmp_path) as pair, fake_health(503) as (port, _):
            verifier = verifier_of(pair, port=port, start_timeout_s=0.1)
            assert await asyncio.wait_for(verifier._watch(FakeProcess()), 5) == 1

    asyncio.run(main())
    assert "vLLM was not ready after 0 s" in caplog.text


def test_an_engine_that_stands_still_is_not_ready_and_in_the_end_given_up(tmp_path, caplog):
    async def main():
        async with fake_pair(tmp_path) as pair, fake_health(200) as (port, _):
            verifier = verifier_of(pair, port=port, stall_s=10, dead_s=100)
            beat = pair.segment.word("engine.beat_ns")
            beat.value = now_ns() - 50_000_000_000
            watching = asyncio.create_task(verifier._watch(FakeProcess()))
            await until(lambda: verifier._engine_ready)
            described = verifier._describe()
            assert (described.engine_ready, described.step_age_ms) == (True, 0)  # with nothing to do it may rest
            pair.engine.open("request")
            pair.engine.step()
            await until(lambda: pair.control.sessions)
            assert verifier._describe().step_age_ms < 1000
            beat.value = now_ns() - 50_000_000_000
            described = verifier._describe()
            assert not described.engine_ready
            assert 50_000 <= described.step_age_ms < 52_000
            assert verifier._readiness()["reasons"] == ["the engine has begun no cycle for 50 s, with sessions open"]
            assert not watching.done()
            beat.value = now_ns() - 101_000_000_000
            assert await asyncio.wait_for(watching, 5) == 1

    asyncio.run(main())
    assert "giving it up" in caplog.text


def test_an_engine_that_is_stopped_while_it_has_nothing_to_do_is_noticed_too(tmp_path, caplog):
    """Requests would wait in vLLM's server, whose /health goes on saying 200, and no session would open."""

    async def main():
        async with fake_pair(tmp_path) as pair, fake_health(200) as (port, _):
            verifier = verifier_of(pair, port=port, stall_s=10, dead_s=100)
            pulse = pair.segment.word("engine.pulse_ns")
            watching = asyncio.create_task(verifier._watch(FakeProcess()))
            await until(lambda: verifier._engine_ready)
            assert verifier._readiness()["ready"]  # one that has not begun has no pulse
            pulse.value = now_ns() - 12_000_000_000
            assert verifier._readiness()["reasons"] == ["the engine has given no sign of life for 12 s"]
            assert not verifier._describe().engine_ready
            pulse.value = now_ns()
            assert verifier._readiness()["ready"]
            pulse.value = now_ns() - 101_000_000_000
            assert await asyncio.wait_for(watching, 5) == 1

    asyncio.run(main())
    assert "giving it up" in caplog.text


def test_it_stops_when_told(tmp_path, caplog):
    async def main():
        async with fake_pair(tmp_path) as pair, fake_health(200) as (port, _):
            verifier = verifier_of(pair, port=port)
            watching = asyncio.create_task(verifier._watch(FakeProcess()))
            await until(lambda: verifier._engine_ready)
            verifier._stopping.set()
            assert await asyncio.wait_for(watching, 0.5) == 0

    with caplog.at_level(logging.INFO):
        asyncio.run(main())
    assert "ready: m/n on http://127.0.0.1:" in caplog.text
