"""Runs a command so that nothing of it outlives its starter.

    starter ──pipe──► guard (leads a process group) ──► command ──► its children, all in the group

The guard reads the pipe. When the starter ends, however it ends, the kernel closes the pipe and the guard kills the
whole group, also while the command is still loading. This covers grandchildren, which PR_SET_PDEATHSIG does not.

Python's shared memory (psm_*, of which vLLM has hundreds of MB) and semaphores (sem.mp-*) outlive a killed process.
What the group has mapped is removed before it is killed, else every crash would leave less of /dev/shm for the next.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

# What was mapped is remembered: whoever mapped it may have died by itself by the time of clearing up. Nearly all of it
# is made while a command starts; looking for new names costs microseconds.
_LOOK_S, _STARTING_S = 0.02, 60.0
_LOOK_LATER_S, _LOOK_FRESH_S = 0.5, 0.25  # after that
_NAMES = ("psm_", "sem.mp-")
_FRESH_S = 2.0  # a new name is looked for in the group's maps for so long: it is mapped soon, or another's


class Guarded:
    """A running guarded command."""

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str] | None = None, log: IO[bytes] | int | None = None
    ) -> None:
        read_end, self._write_end = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), str(read_end), *command],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(read_end,),
            start_new_session=True,
        )
        os.close(read_end)

    @property
    def pid(self) -> int:
        """The guard's pid, which is also the process group of the command."""
        return self._process.pid

    def poll(self) -> int | None:
        """The command's exit code once it has ended."""
        return self._process.poll()

    def signal_all(self, number: int) -> None:
        """Sends a signal to every process of the command and to the guard."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def stop(self, grace_s: float = 10.0) -> int:
        """SIGTERM to the command, and after `grace_s` SIGKILL to all of its group. Returns the exit code."""
        shared = _shared_memory(self.pid)
        if self.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_s)
        _remove(shared | _shared_memory(self.pid))
        self.signal_all(signal.SIGKILL)  # also what the command left behind
        code = self._process.wait()
        if self._write_end >= 0:
            os.close(self._write_end)
            self._write_end = -1
        return code


def _members(group: int) -> list[int]:
    """The pids of a process group."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):  # it may end while it is looked at
            stat = (process / "stat").read_text()
            if int(stat[stat.rindex(")") + 2 :].split()[2]) == group:
                found.append(int(process.name))
    return found


def _shared_memory(group: int) -> set[str]:
    """Paths of Python's shared memory and semaphores that processes of the group have mapped."""
    mapped: set[int] = set()
    for pid in _members(group):
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text()
            # by inode: a semaphore is mapped under another name than the one it then gets
            mapped |= {int(line.split()[4]) for line in maps.splitlines() if "/dev/shm/" in line}
    with os.scandir("/dev/shm") as files:
        return {file.path for file in files if file.name.startswith(_NAMES) and file.inode() in mapped}


def _python_shared_memory() -> list[str]:
    return [f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if name.startswith(_NAMES)]


def _remove(paths: set[str]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):  # its maker has removed it, as it should
            os.unlink(path)


def _main(read_end: int, command: list[str]) -> int:
    child: subprocess.Popen[bytes] | None = None
    seen: set[str] = set()
    early: list[int] = []  # signals from before there was a command to pass them on to

    def pass_on(number: int, _: object) -> None:
        if child is None:
            early.append(number)
        else:
            child.send_signal(number)

    def look() -> None:
        nonlocal seen
        known: dict[str, float] = {}  # when a name was first seen
        started = time.monotonic()
        while True:
            now = time.monotonic()
            known = {path: known.get(path, now) for path in _python_shared_memory()}
            fresh = [path for path, since in known.items() if now - since < _FRESH_S]
            if any(path not in seen for path in fresh):
                seen = seen | _shared_memory(os.getpgrp())
            time.sleep(_LOOK_S if now - started < _STARTING_S else _LOOK_FRESH_S if fresh else _LOOK_LATER_S)

    def watch() -> None:
        os.read(read_end, 1)
        try:
            _remove(seen | _shared_memory(os.getpgrp()))
        finally:
            os.killpg(0, signal.SIGKILL)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    threading.Thread(target=watch, daemon=True).start()
    threading.Thread(target=look, daemon=True).start()
    child = subprocess.Popen(command)
    for missed in early:
        child.send_signal(missed)
    code = child.wait()
    _remove(seen | _shared_memory(os.getpgrp()))
    for left_behind in set(_members(os.getpgrp())) - {os.getpid()}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(left_behind, signal.SIGKILL)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(_main(int(sys.argv[1]), sys.argv[2:]))
