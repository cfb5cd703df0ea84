"""Temporary folders that do not outlive their maker, however it ends.

The maker holds a lock on its folder, which the kernel drops with it; whoever makes the next one of the same prefix
removes those that nobody holds.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path


class Scratch:
    """A fresh folder whose name starts with `prefix`."""

    def __init__(self, prefix: str) -> None:
        for old in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            if (held := _lock(old)) is not None:
                shutil.rmtree(old, ignore_errors=True)
                os.close(held)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix))
            fd = _lock(self.path)
            if fd is None:
                continue
            if self.path.exists():  # else another maker took it for an old one
                self._fd = fd
                return
            os.close(fd)

    def remove(self) -> None:
        """Removes it with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._fd)


def _lock(folder: Path) -> int | None:
    """A descriptor that holds the folder; None if another process does, or it is not ours to hold."""
    fd = -1
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return fd
    if fd >= 0:
        os.close(fd)
    return None
