"""cli.py: commands, exit codes, and what is refused before anything starts."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

import specdec
from specdec import cli
from specdec.cli import main, split_extra
from specdec.errors import SettingsError
from specdec.serve import listen


def environment() -> dict[str, str]:
    """In which a process finds this specdec."""
    path = os.pathsep.join([str(Path(specdec.__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path}


def run(*argv: str) -> subprocess.CompletedProcess:
    """Python in its own process."""
    command = [sys.executable, *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment(), check=False)


@pytest.fixture(autouse=True)
def logging_as_before():
    """`main` sets logging up for its process."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


# ---- commands


@pytest.mark.parametrize("argv", [[], ["-h"], ["--help"], ["help"]])
def test_help_names_every_command(argv, capsys):
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for command in ("up", "demo", "bench", "simulate", "router", "verifier", "draft"):
        assert f"\n    specdec {command}" in out


def test_the_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"specdec {specdec.__version__}\n"


@pytest.mark.parametrize("name", ["serve", "", "--verbose", "Router"])
def test_an_unknown_command_exits_2_with_the_list(name, capsys):
    assert main([name]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"there is no command {name!r}" in err
    assert "specdec router" in err


@pytest.mark.parametrize("command", ["up", "demo", "bench", "simulate", "router", "verifier", "draft"])
def test_each_commands_help_exits_0(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert f"usage: specdec {command}" in capsys.readouterr().out


def test_errors_exit_2_interrupts_130_and_results_are_passed_on(monkeypatch, capsys):
    def raising(error):
        def command(argv):
            raise error

        return command

    monkeypatch.setattr(cli, "_router", raising(SettingsError("--port: no")))
    assert main(["router"]) == 2
    assert capsys.readouterr().err == "specdec router: --port: no\n"
    monkeypatch.setattr(cli, "_router", raising(KeyboardInterrupt()))
    assert main(["router"]) == 130
    monkeypatch.setattr(cli, "_router", lambda argv: len(argv))
    assert main(["router", "a", "b", "c"]) == 3
    monkeypatch.setattr(cli, "_router", raising(ValueError("a bug")))
    with pytest.raises(ValueError, match="a bug"):
        main(["router"])


def test_as_a_process():
    ended = run("-m", "specdec", "router", "--port", "none")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("specdec router: --port, SPECDEC_ROUTER_PORT: ")
    assert "Traceback" not in ended.stderr
    ended = run("-m", "specdec.draft", "--help")
    assert ended.returncode == 0
    assert "usage: specdec draft" in ended.stdout


def test_the_router_needs_neither_torch_nor_vllm():
    names = "specdec.cli, specdec.router.service, specdec.router.app, specdec.router.steps, specdec.proto"
    ended = run("-c", f"import sys, {names}; print([m for m in ('torch', 'vllm', 'transformers') if m in sys.modules])")
    assert (ended.returncode, ended.stdout) == (0, "[]\n"), ended.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_router_serves_until_it_is_told_to_stop(number):
    port, pair = free_port(), free_port()
    command = [sys.executable, "-m", "specdec", "router", "--port", port, "--pairs", f"127.0.0.1:{pair}"]
    command += ["--admin-port", free_port()]
    with subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True) as router:
        try:
            until, answer = time.monotonic() + 20, None
            while answer is None and time.monotonic() < until:
                with contextlib.suppress(httpx.ConnectError):
                    answer = httpx.get(f"http://127.0.0.1:{port}/readyz", trust_env=False)
                time.sleep(0.05)
            assert answer is not None
            assert answer.status_code == 503
            router.send_signal(number)
            assert router.wait(5) == 0
        finally:
            router.kill()
        log = router.stderr.read()
    assert f"router INFO pair 127.0.0.1:{pair}: UNAVAILABLE" in log
    assert "Traceback" not in log


# ---- ports


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        ("router", "--port"),
        ("router", "--admin-port"),
        ("draft", "--health-port"),
        ("verifier", "--port"),
        ("verifier", "--control-port"),
        ("verifier", "--health-port"),
    ],
)
def test_a_port_in_use_exits_2_and_names_the_flag(command, flag, monkeypatch, capsys):
    monkeypatch.setattr("specdec.verifier.supervisor.vllm_version", lambda: "0.32.0")
    others = [free_port() for _ in range(3)]
    argv = [command]
    if command == "verifier":
        argv += ["--model", "m", "--pair", f"test-{os.getpid()}"]
        for name, port in zip(("--port", "--control-port", "--health-port"), others, strict=True):
            argv += [name, port]
    if flag == "--admin-port":
        argv += ["--port", others[0]]
    with listen("127.0.0.1", 0, "taken") as taken:
        port = taken.getsockname()[1]
        assert main([*argv, flag, str(port)]) == 2
    message = f"specdec {command}: {flag}: cannot listen on 127.0.0.1:{port}: Address already in use"
    assert message in capsys.readouterr().err
    assert not Path(f"/dev/shm/specdec-test-{os.getpid()}").exists()


def free_port() -> str:
    with listen("127.0.0.1", 0, "free") as listener:
        return str(listener.getsockname()[1])


# ---- vLLM's own arguments


@pytest.mark.parametrize(
    ("argv", "ours", "vllms"),
    [
        ([], [], []),
        (["--model", "m"], ["--model", "m"], []),
        (["--model", "m", "--", "--dtype", "float32"], ["--model", "m"], ["--dtype", "float32"]),
        (["--", "--a", "--", "--b"], [], ["--a", "--", "--b"]),
        (["--model", "m", "--"], ["--model", "m"], []),
    ],
)
def test_what_follows_two_dashes_is_vllms(argv, ours, vllms):
    assert split_extra(argv) == (ours, vllms)


@pytest.mark.parametrize("word", ["--worker-cls", "--worker_cls=my.Worker", "--scheduler-cls", "-sc", "--model=x"])
def test_arguments_that_take_the_plugins_out_exit_2(word, monkeypatch, capsys):
    monkeypatch.setattr("specdec.verifier.supervisor.vllm_version", lambda: "0.32.0")
    assert main(["verifier", "--model", "m", "--", "--dtype", "float32", word, "x"]) == 2
    assert f"specdec verifier: {word}: the verifier sets this itself" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["bench"], ["bench", "draft"], ["bench", "edge"], ["demo"]])
def test_a_command_leaves_sigterm_as_it_was(command):
    before = signal.getsignal(signal.SIGTERM)
    with contextlib.suppress(SystemExit):  # how an option that does not exist ends it
        assert main([*command, "--max-tokens", "no number"]) == 2
    assert signal.getsignal(signal.SIGTERM) is before
