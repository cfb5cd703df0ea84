"""The segment's life: made by the verifier, joined by its engine, a worker and its draft, swept when its owner is gone.

A process is alive as long as it holds its lock on the file (an open-file-description lock on one byte a role), which
the kernel drops however the process ends. Pids and start times in the header are for messages and health only.
"""

import fcntl
import mmap
import os
import re
import struct
import time
from dataclasses import fields
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from specdec.channel.layout import (
    CONTROL_WORDS,
    COUNT_WORDS,
    DRAFT_WORDS,
    ENGINE_WORDS,
    IDENTITY,
    LINE,
    MAGIC,
    VERSION,
    WORDS_AT,
    WORKER_WORDS,
    Layout,
)
from specdec.channel.rings import Bell, OrderTable, RingReader, RingWriter, Word
from specdec.errors import ChannelError, SegmentInUse, SegmentMismatch, SegmentMissing, SettingsError, SetupError

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "specdec-"
_SIZES = tuple(field.name for field in fields(Layout))  # the identity has a field for each
_LOCK = struct.Struct("hhqqi4x")  # struct flock on 64-bit Linux
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Role(IntEnum):
    """Who maps the segment; the value is the byte it locks."""

    OWNER = 0
    ENGINE = 1
    DRAFT = 2
    WORKER = 3


def now_ns() -> int:
    """The channel's clock: CLOCK_MONOTONIC, one for all processes of a machine."""
    return time.monotonic_ns()


def segment_path(pair: str, folder: Path = SHARED_MEMORY) -> Path:
    """The file of a pair's segment. Raises SettingsError for a name that is no file name."""
    if not _NAME.fullmatch(pair):
        raise SettingsError(f"pair name {pair!r}: use 1 to 64 letters, digits, '.', '_' and '-'")
    return folder / f"{PREFIX}{pair}"


class Segment:
    """A mapped segment. Use `create` (the owner) or `attach` (the others); close it, or leave it as a context."""

    def __init__(self, fd: int, path: Path, layout: Layout, role: Role) -> None:
        self._fd, self.path, self.layout, self.role = fd, path, layout, role
        self._map = mmap.mmap(fd, layout.size)
        self._memory = memoryview(self._map)
        lines = {"engine": ENGINE_WORDS, "draft": DRAFT_WORDS, "control": CONTROL_WORDS, "counts": COUNT_WORDS}
        lines["worker"] = WORKER_WORDS
        words = np.frombuffer(self._memory, np.uint64, len(lines) * LINE // 8, WORDS_AT)
        self._places = {
            f"{line}.{name}": (words, i * LINE // 8 + j)
            for i, (line, names) in enumerate(lines.items())
            for j, name in enumerate(names)
        }
        self._inode = os.fstat(fd).st_ino

    # ---- birth and death

    @classmethod
    def create(cls, path: Path, layout: Layout) -> Self:
        """Makes the segment, claiming all its memory at once. Sweeps a dead owner's first.

        Raises SetupError if shared memory has no room, SegmentInUse if a live verifier owns the name.
        """
        sweep(path.parent)
        if path.exists():
            holder = _holder(path, Role.OWNER)
            raise SegmentInUse(
                f"{path} is in use by process {holder}: another verifier runs this pair; choose another --pair"
                if holder
                else f"{path} exists and was not made by specdec: remove it or choose another --pair"
            )
        free = os.statvfs(path.parent)
        free_bytes = free.f_bavail * free.f_frsize
        if layout.size > free_bytes:
            raise SetupError(
                f"the segment needs {layout.size / 2**20:.1f} MB, {path.parent} has {free_bytes / 2**20:.1f} MB free: "
                "enlarge it (docker run --shm-size, or a memory-backed emptyDir with a larger sizeLimit), "
                "or lower --max-num-seqs, --max-steps or --states-mb"
            )
        fd = -1
        try:
            # without a name until it is whole: nobody sees less, and a crash on the way leaves nothing
            fd = os.open(path.parent, os.O_RDWR | os.O_TMPFILE, 0o660)
            os.posix_fallocate(fd, 0, layout.size)  # claim it now: a page missing later would be SIGBUS
            _lock(fd, Role.OWNER, path)
            segment = cls(fd, path, layout, Role.OWNER)
            identity = np.zeros(1, IDENTITY)
            identity["magic"], identity["version"] = MAGIC, VERSION
            for size in _SIZES:
                identity[size] = getattr(layout, size)
            identity["layout_hash"], identity["size"] = layout.hash, layout.size
            identity["owner_pid"], identity["owner_start"] = os.getpid(), start_ticks(os.getpid())
            segment._memory[: IDENTITY.itemsize] = identity.tobytes()
            segment._sign("control")
            # src_dir_fd makes it linkat, which follows /proc's link; a link replaces nobody's file, unlike a rename
            os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True)
        except BaseException as error:
            if fd >= 0:
                os.close(fd)
            if isinstance(error, FileExistsError):
                raise SegmentInUse(f"{path}: another verifier of this pair has just started") from error
            if isinstance(error, OSError):
                raise SetupError(f"cannot make {path}: {error.strerror}") from error
            raise
        return segment

    @classmethod
    def attach(cls, path: Path, role: Role) -> Self:
        """Maps a live segment and takes `role`.

        Raises SegmentMissing (not made yet, or its owner is gone), SegmentMismatch (other version or sizes, or no
        segment), SegmentInUse (a live process has the role), ChannelError (another user's).
        """
        fd = _open(path)
        try:
            layout = _read_layout(fd, path)
            if not _holder_of(fd, Role.OWNER):
                raise SegmentMissing(f"{path} was left by a verifier that is gone")
            _lock(fd, role, path)
            segment = cls(fd, path, layout, role)
            segment._sign(role.name.lower())
        except BaseException:
            os.close(fd)
            raise
        return segment

    def close(self) -> None:
        """Lets go of the mapping and the role; the owner also removes the file."""
        if self._fd < 0:
            return
        if self.role is Role.OWNER and self.current:
            self.path.unlink(missing_ok=True)
        # mmap holds a duplicate of the descriptor, so the lock would live as long as the mapping
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0))
        os.close(self._fd)
        self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- contents

    def word(self, name: str) -> Word:
        """A word of the header by "line.name", for example "draft.beat_ns"."""
        return Word(*self._places[name])

    def bell(self, name: str) -> Bell:
        """A bell of the header, for example "engine.outcome_bell"."""
        return Bell(*self._places[name])

    @property
    def orders(self) -> OrderTable:
        return OrderTable(self._memory, self.layout.orders_start, self.layout.max_sessions)

    def writer(self, name: str) -> RingWriter:
        """The writing end of "verdicts" or "outcomes" (the engine), "proposals" (the draft) or "states" (a worker)."""
        area, read, bell = self._ring(name)
        return RingWriter(self._memory, area, self.word(read), self.bell(bell))

    def reader(self, name: str) -> RingReader:
        """The reading end of "verdicts" (control), "outcomes" or "states" (the draft), or "proposals" (the engine)."""
        area, read, bell = self._ring(name)
        return RingReader(self._memory, area, self.word(read), self.bell(bell))

    @property
    def counts(self) -> dict[str, int]:
        """What the engine has counted, by name (layout.COUNT_WORDS), and its worker (tokens whose states were lost)."""
        counted = {name: self.word(f"counts.{name}").value for name in COUNT_WORDS}
        return {**counted, "lost_states": self.word("worker.states_lost").value}

    @property
    def vocabulary(self) -> tuple[int, int] | None:
        """Size and fingerprint of the target's vocabulary (vocabulary.py), None until its engine has started."""
        identity = np.frombuffer(self._memory, IDENTITY, 1)[0]
        size, fingerprint = int(identity["vocab_size"]), int(identity["vocabulary"])
        return (size, fingerprint) if size and fingerprint else None

    @vocabulary.setter
    def vocabulary(self, value: tuple[int, int]) -> None:
        identity = np.frombuffer(self._memory, IDENTITY, 1)
        identity["vocab_size"], identity["vocabulary"] = value

    def alive(self, role: Role) -> bool:
        """Whether a live process holds `role`. Asking for one's own role says True."""
        return role is self.role or _holder_of(self._fd, role)

    @property
    def current(self) -> bool:
        """Whether the file of this name still is this segment: False once a newer verifier has replaced it."""
        try:
            return os.stat(self.path).st_ino == self._inode
        except FileNotFoundError:
            return False

    def _ring(self, name: str) -> tuple:  # type: ignore[type-arg]
        return {
            "verdicts": (self.layout.verdicts, "control.verdicts_read", "engine.verdict_bell"),
            "outcomes": (self.layout.outcomes, "draft.outcomes_read", "engine.outcome_bell"),
            "proposals": (self.layout.proposals, "engine.proposals_read", "draft.proposal_bell"),
            "states": (self.layout.states, "draft.states_read", "worker.state_bell"),
        }[name]

    def _sign(self, line: str) -> None:
        self.word(f"{line}.start").value = start_ticks(os.getpid())
        self.word(f"{line}.pid").value = os.getpid()


def start_ticks(pid: int) -> int:
    """When a process started, in clock ticks since boot; with the pid it names one process for ever."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat[stat.rindex(")") + 2 :].split()[19])


def sweep(folder: Path = SHARED_MEMORY) -> list[Path]:
    """Removes segments whose owner is gone, and only those: files of other makers are left alone."""
    removed = []
    for path in folder.glob(f"{PREFIX}*"):
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe would wait for its other end
        except OSError:
            continue
        try:
            if not _is_segment(fd):
                continue
            _lock(fd, Role.OWNER, path)  # else another sweeper's unlink, and a new segment, could come in between
            if os.stat(path).st_ino == os.fstat(fd).st_ino:
                path.unlink()
                removed.append(path)
        except (SegmentInUse, OSError):
            continue  # in use, gone meanwhile, another user's, or no plain file
        finally:
            os.close(fd)
    return removed


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise SegmentMissing(f"{path} is not there: is the verifier running?") from None
    except OSError as error:
        raise ChannelError(f"{path}: {error.strerror}") from error


def _is_segment(fd: int) -> bool:
    return os.pread(fd, 8, 0) == MAGIC.to_bytes(8, "little")


def _read_layout(fd: int, path: Path) -> Layout:
    raw = os.pread(fd, IDENTITY.itemsize, 0)
    if len(raw) < IDENTITY.itemsize or not _is_segment(fd):
        raise SegmentMismatch(f"{path} is not a specdec segment")
    identity = np.frombuffer(raw, IDENTITY)[0]
    layout = Layout(*(int(identity[size]) for size in _SIZES))
    if int(identity["version"]) != VERSION or int(identity["layout_hash"]) != layout.hash:
        raise SegmentMismatch(
            f"{path} has layout version {identity['version']}, this process speaks {VERSION} "
            "(or its fields differ): run the same specdec release on both sides"
        )
    if os.fstat(fd).st_size < layout.size:
        raise SegmentMismatch(f"{path} is shorter than its header says")
    return layout


def _lock(fd: int, role: Role, path: Path) -> None:
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, role, 1, 0))
    except OSError as error:
        raise SegmentInUse(f"{path}: another process already is this pair's {role.name.lower()}") from error


def _holder_of(fd: int, role: Role) -> bool:
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, role, 1, 0))
    return bool(_LOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def _holder(path: Path, role: Role) -> int | None:
    """The pid the segment's header names for its owner, if it lives."""
    fd = _open(path)
    try:
        if not _is_segment(fd) or not _holder_of(fd, role):
            return None
        return int(np.frombuffer(os.pread(fd, IDENTITY.itemsize, 0), IDENTITY)[0]["owner_pid"])
    finally:
        os.close(fd)
