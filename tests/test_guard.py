"""guard.py: nothing of a command outlives its starter. Real processes, real kills."""

import os
import shlex
import signal
import subprocess
import sys
import time
import uuid
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from channel_kit import Child, until
from specdec import guard
from specdec.guard import Guarded

SOON_S = 2


def running(pid):
    """Whether the process runs; one that only waits to be reaped does not."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def processes_with(marker):
    """Every running process that has `marker` among its arguments or in its environment."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as arguments, open(f"/proc/{pid}/environ", "rb") as environment:
                if marker.encode() in arguments.read() + environment.read() and running(pid):
                    found.append(int(pid))
        except OSError:  # it has ended, or is not ours to look into
            continue
    return found


class Command:
    """A shell that has a child of its own, `sleep`, and says both pids once it is ready."""

    def __init__(self, folder, first=""):
        self.marker = f"marker-{uuid.uuid4().hex}"
        self.said = folder / self.marker
        said = shlex.quote(str(self.said))
        say = f"echo $$ $! > {said}.part; mv {said}.part {said}"
        script = f"export MARK=$0\n{first}\nsleep 300 & {say}; while :; do wait; done"
        self.arguments = ["sh", "-c", script, self.marker]

    def pids(self):
        assert until(self.said.exists, 15)
        return [int(pid) for pid in self.said.read_text().split()]


def start_and_wait(*commands):
    kept = [Guarded(command.arguments) for command in commands]
    while kept:
        signal.pause()


# ---- the starter ends


@pytest.mark.parametrize("first", ["", 'trap "" TERM INT HUP'], ids=["plain", "ignores SIGTERM"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
def test_a_killed_starter_takes_child_and_grandchild_with_it(tmp_path, first, number):
    command = Command(tmp_path, first)

    def starter():
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        start_and_wait(command)

    with Child(starter) as child:
        pids = command.pids()
        assert all(map(running, pids))
        # guard, shell and sleep: what is looked for below, and seen only once it has been executed
        assert until(lambda: len(processes_with(command.marker)) >= 3, SOON_S)
        child.send(number)
        assert child.wait() == -number
    assert until(lambda: not any(map(running, pids)), SOON_S)
    assert until(lambda: not processes_with(command.marker), SOON_S)


def test_a_starter_that_just_ends_takes_them_too(tmp_path):
    command = Command(tmp_path)

    def starter():
        Guarded(command.arguments)
        command.pids()

    with Child(starter) as child:
        assert child.wait() == 0
    pids = command.pids()
    assert until(lambda: not any(map(running, pids)) and not processes_with(command.marker), SOON_S)


def test_several_commands_of_one_starter_do_not_keep_each_other(tmp_path):
    """A pipe's writing end that one command inherited would keep the other's guard waiting."""
    commands = [Command(tmp_path) for _ in range(3)]
    with Child(lambda: start_and_wait(*commands)) as child:
        pids = [pid for command in commands for pid in command.pids()]
        child.kill()
    assert until(lambda: not any(map(running, pids)), SOON_S)


def test_a_starter_killed_while_its_command_starts_leaves_nothing(tmp_path):
    markers = []
    for milliseconds in (0, 1, 3, 8, 15, 25, 40, 60, 90, 130):
        command = Command(tmp_path)
        markers.append(command.marker)
        with Child(lambda command=command: start_and_wait(command)) as child:
            assert until(lambda command=command: processes_with(command.marker))
            time.sleep(milliseconds / 1000)
            child.kill()
    assert until(lambda: not any(map(processes_with, markers)), SOON_S + 2)  # an interpreter's start may be one's wait


# ---- stop


def test_stop_sends_sigterm_first_and_returns_the_commands_code(tmp_path):
    command = Command(tmp_path, 'trap "exit 7" TERM')
    guarded = Guarded(command.arguments)
    pids = command.pids()
    assert os.getpgid(pids[0]) == os.getpgid(pids[1]) == guarded.pid
    assert guarded.poll() is None
    start = time.monotonic()
    assert guarded.stop(10) == 7
    assert time.monotonic() - start < 5
    assert until(lambda: not any(map(running, pids)), SOON_S)  # the grandchild, which nobody asked, too
    assert guarded.poll() == 7
    assert guarded.stop() == 7


def test_stop_kills_after_the_grace(tmp_path):
    command = Command(tmp_path, 'trap "" TERM')
    guarded = Guarded(command.arguments)
    pids = command.pids()
    start = time.monotonic()
    assert guarded.stop(0.3) == -signal.SIGKILL
    assert 0.3 <= time.monotonic() - start < SOON_S
    assert until(lambda: not any(map(running, pids)), SOON_S)


def test_what_a_command_leaves_behind_ends_with_it(tmp_path):
    command = Command(tmp_path)
    start_and_leave = 'sh -c "$1" "$0" & while [ ! -e "$2" ]; do sleep 0.01; done'
    guarded = Guarded(["sh", "-c", start_and_leave, command.marker, command.arguments[2], str(command.said)])
    pids = command.pids()
    assert until(lambda: guarded.poll() == 0)
    assert until(lambda: not any(map(running, pids)), SOON_S)
    assert guarded.stop() == 0


SHARES = """
import sys, time
from multiprocessing import get_context, resource_tracker, shared_memory
resource_tracker.register = lambda *_: None  # as in vLLM's workers, whose tracker is killed with them
if sys.argv[2] == "memory":
    shared = shared_memory.SharedMemory(create=True, size=4096)
    name = shared.name
else:
    shared = get_context("spawn").Lock()
    name = "sem." + shared._semlock.name[1:]
print(name, file=open(sys.argv[1], "w"), flush=True)
time.sleep(300)
"""


@pytest.mark.parametrize("what", ["memory", "semaphore"])
@pytest.mark.parametrize("end", ["stop", "starter killed"])
def test_what_a_killed_command_shared_is_removed(tmp_path, end, what):
    said, other = tmp_path / "name", shared_memory.SharedMemory(create=True, size=4096)
    command = [sys.executable, "-c", SHARES, str(said), what]
    try:
        if end == "stop":
            guarded = Guarded(command)
            assert until(lambda: said.exists() and said.read_text().strip())
            guarded.stop(0)
        else:
            code = "import sys, time; from specdec.guard import Guarded; Guarded(sys.argv[1:]); time.sleep(300)"
            starter = subprocess.Popen([sys.executable, "-c", code, *command])
            assert until(lambda: said.exists() and said.read_text().strip())
            starter.kill()
            starter.wait()
        name = said.read_text().strip()
        assert until(lambda: not (Path("/dev/shm") / name).exists(), SOON_S)
        assert (Path("/dev/shm") / other.name).exists()
    finally:
        other.close()
        other.unlink()


def test_stop_at_once_stops(tmp_path):
    for milliseconds in (0, 20, 60):
        command = Command(tmp_path)
        guarded = Guarded(command.arguments)
        time.sleep(milliseconds / 1000)
        guarded.stop(5)
        assert until(lambda command=command: not processes_with(command.marker), SOON_S)


def test_a_signal_that_comes_before_the_command_runs_is_passed_on_to_it():
    """Else the guard alone would end, and the command would have nobody to end it."""
    read_end, write_end = os.pipe()
    marker = f"marker-{uuid.uuid4().hex}"

    def be_the_guard():
        os.setpgid(0, 0)
        os.close(write_end)
        real = subprocess.Popen

        def start_and_be_signalled(command):
            child = real(command)
            os.kill(os.getpid(), signal.SIGTERM)
            return child

        guard.subprocess.Popen = start_and_be_signalled
        os._exit(guard._main(read_end, ["sh", "-c", "export MARK=$0; exec sleep 300", marker]))

    with Child(be_the_guard) as child:
        assert child.wait(5) == 128 + signal.SIGTERM
    assert until(lambda: not processes_with(marker), SOON_S)
    os.close(read_end)
    os.close(write_end)


# ---- exit codes, surroundings


def code_of(*command, **options):
    guarded = Guarded(command, **options)
    assert until(lambda: guarded.poll() is not None, 10)
    assert guarded.stop() == guarded.poll()
    return guarded.poll()


@pytest.mark.parametrize("code", [0, 1, 2, 7, 255])
def test_the_exit_code_is_passed_on(code):
    assert code_of("sh", "-c", f"exit {code}") == code


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1], ids=lambda n: n.name
)
def test_a_command_killed_by_a_signal_is_128_more(number):
    assert code_of("sh", "-c", f"kill -{number.value} $$") == 128 + number


def test_a_command_that_does_not_exist_is_no_success():
    assert code_of("/nonexistent/command") not in (0, None)


def test_the_command_gets_its_environment_and_log_and_no_input(tmp_path):
    log = tmp_path / "log"
    script = "import os, sys; print(os.environ['MARK'], repr(sys.stdin.read())); print('to stderr', file=sys.stderr)"
    with log.open("wb") as file:
        assert code_of(sys.executable, "-c", script, env={**os.environ, "MARK": "here"}, log=file) == 0
    assert sorted(log.read_text().split("\n")) == ["", "here ''", "to stderr"]


def test_the_command_holds_none_of_the_guards_files(tmp_path):
    command = Command(tmp_path)
    guarded = Guarded(command.arguments)
    try:
        for pid in command.pids():
            assert not [fd for fd in os.listdir(f"/proc/{pid}/fd") if is_pipe_of(pid, fd, guarded)]
    finally:
        guarded.stop(1)


def is_pipe_of(pid, fd, guarded):
    mine = os.readlink(f"/proc/self/fd/{guarded._write_end}")
    return os.readlink(f"/proc/{pid}/fd/{fd}") == mine
