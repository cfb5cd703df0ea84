"""What the channel's tests share: forked processes, a folder of shared memory, and a ring on memory of its own."""

import contextlib
import mmap
import os
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from specdec.channel.layout import Area
from specdec.channel.rings import Bell, RingReader, RingWriter, Word


class Child:
    """A forked process that runs `work` and exits with 0, or with 1 if that raised. Leaving the context kills it."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                work()
                code = 0
            except BaseException:
                os.write(2, traceback.format_exc().encode())
            finally:
                os._exit(code)

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        if self._code is None:
            self.send(signal.SIGKILL)
            self.wait()

    def wait(self, timeout_s: float = 30) -> int:
        """The exit code, negative for a signal."""
        until = time.monotonic() + timeout_s
        while self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > until:
                raise TimeoutError(f"process {self.pid} still runs after {timeout_s} s")
            else:
                time.sleep(0.0005)
        return self._code

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def until(met: Callable[[], object], timeout_s: float = 5) -> bool:
    """Waits for `met`; whether it came true in time."""
    end = time.monotonic() + timeout_s
    while not met():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder of its own under /dev/shm."""
    folder = Path(tempfile.mkdtemp(prefix="test-specdec-", dir="/dev/shm"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


class Ring:
    """One ring on anonymous memory that forked processes share. The words past the ring's own are the test's."""

    def __init__(self, slots: int = 4, slot_bytes: int = 256) -> None:
        self.area = Area(mmap.PAGESIZE, slots, slot_bytes)
        self.map = mmap.mmap(-1, self.area.end)
        self.memory = memoryview(self.map)
        self.words = np.frombuffer(self.memory, np.uint64, 16)
        self.read_word, self.bell = Word(self.words, 0), Bell(self.words, 8)

    def writer(self) -> RingWriter:
        return RingWriter(self.memory, self.area, self.read_word, self.bell)

    def reader(self) -> RingReader:
        return RingReader(self.memory, self.area, self.read_word, self.bell)

    def slot(self, sequence: int) -> int:
        """The byte at which the frame of this number starts."""
        return self.area.start + (sequence - 1) % self.area.slots * self.area.slot_bytes
