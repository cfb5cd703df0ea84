"""API keys from a file, hashed in memory, and read again when the file changes."""

import asyncio
import hashlib
import logging
import re
import stat
from pathlib import Path

from specdec.errors import SettingsError
from specdec.router.errors import ApiError
from specdec.telemetry import RouterMetrics

log = logging.getLogger(__name__)
_HASHED = re.compile(r"sha256:([0-9a-f]{64})")
_LOOK_S = 2.0
_MOST_BYTES = 1 << 23  # of the file


class ApiKeys:
    """Who may use the API. A line of the file is a key, or `sha256:` and the hex digest of one; `#` begins a comment.

    A file that cannot be read, or holds no key, at a later look leaves the keys as they are: Kubernetes swaps a
    mounted Secret through a symlink, and an editor may write a file in steps.
    """

    def __init__(self, path: Path, metrics: RouterMetrics) -> None:
        """Raises SettingsError for a file without keys."""
        self._path, self._metrics = path, metrics
        self._seen = self._stamp()
        try:
            self._hashes = _read(path)
        except (OSError, ValueError) as error:
            raise SettingsError(f"--api-keys-file {path}: {error}") from error

    def check(self, given: str | None) -> None:
        """Raises ApiError (401) unless `given`, a header's bytes as Latin-1, is one of the keys."""
        if given is None:
            raise ApiError("invalid_api_key", "no API key: send it as Authorization: Bearer KEY")
        if hashlib.sha256(given.encode("latin-1")).digest() not in self._hashes:
            raise ApiError("invalid_api_key", "this API key is not one of the router's")

    async def follow(self) -> None:
        """Reads the file again whenever it changes, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            self.reload()

    def reload(self) -> None:
        """Reads the file again if it is not the one that was read last."""
        stamp = self._stamp()
        if stamp == self._seen:
            return
        try:
            if stamp is None:
                raise ValueError("there is no file")  # to read a pipe would stop everything
            self._hashes = _read(self._path)
        except (OSError, ValueError) as error:
            if self._seen is not None:  # once, not at every look
                log.error("%s: %s; the keys stay as they were", self._path, error)
                self._metrics.key_reloads.labels("failed").inc()
            self._seen = None
            return
        self._seen = stamp
        self._metrics.key_reloads.labels("ok").inc()
        log.info("%s: %d keys", self._path, len(self._hashes))

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        if not stat.S_ISREG(status.st_mode):
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size


def bearer(authorization: str | None, x_api_key: str | None = None) -> str | None:
    """The key of a request's headers; Anthropic's clients send theirs as X-Api-Key."""
    scheme, _, key = (authorization or "").partition(" ")
    return key.strip(" \t") or None if scheme.lower() == "bearer" else x_api_key


def _read(path: Path) -> frozenset[bytes]:
    """The keys' digests. Raises OSError, and ValueError for a file that has none or a line that is no digest."""
    hashes = set()
    with path.open("rb") as file:
        text = file.read(_MOST_BYTES + 1)
    if len(text) > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES} bytes")
    for number, line in enumerate(text.decode("utf-8-sig").splitlines(), 1):
        key = line.strip()
        if not key or key.startswith("#"):
            continue
        if key.startswith("sha256:"):
            if not (found := _HASHED.fullmatch(key.lower())):
                raise ValueError(f"line {number}: sha256: needs 64 hex digits")
            hashes.add(bytes.fromhex(found[1]))
        else:
            hashes.add(hashlib.sha256(key.encode()).digest())
    if not hashes:
        raise ValueError("there is no key in it")
    return frozenset(hashes)
