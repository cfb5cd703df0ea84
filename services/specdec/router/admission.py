"""How much runs and how much waits: bounds in sessions (n counts n) and, for what waits, in prompt tokens. Bodies are
bounded in bytes, since a picture of many megabytes has few tokens: all that are in memory, whatever they are there for.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from specdec.router.errors import ApiError
from specdec.telemetry import RouterMetrics

_SMALL = 1 << 16  # bytes of a body up to which it is received whatever else is
_FIRST_S = 2.0  # what a session is thought to take before one has ended


@dataclass(eq=False)
class _Waiting:
    sessions: int
    admitted: "asyncio.Future[None]"


class Admission:
    """First come, first served. A request wider than the whole bound runs when nothing else does."""

    def __init__(
        self,
        capacity: Callable[[], int],
        metrics: RouterMetrics,
        *,
        max_waiting: int,
        max_waiting_tokens: int,
        max_held_bytes: int,
        timeout_s: float,
    ) -> None:
        """`capacity`: sessions that may run now."""
        self._capacity, self._metrics = capacity, metrics
        self._max_waiting, self._max_tokens, self._timeout_s = max_waiting, max_waiting_tokens, timeout_s
        self._max_bytes = max_held_bytes
        self._queue: deque[_Waiting] = deque()
        self.running = self.waiting = self.waiting_tokens = 0
        self.held_bytes = 0  # of bodies: on their way, waiting, or sent to a pair that may have to be sent to another
        self._large = 0  # of them, in number, those that are not small
        self._session_s = _FIRST_S

    @asynccontextmanager
    async def admitted(self, sessions: int, tokens: int) -> AsyncIterator[None]:
        """Its place among those that run. Raises ApiError (429) where the queue is full, or after its time in it."""
        if self._queue or not self._fits(sessions):
            await self._wait(sessions, tokens)
        else:
            self._run(sessions)
        began = time.monotonic()
        try:
            yield
        finally:
            self._session_s += 0.1 * (time.monotonic() - began - self._session_s)
            self._run(-sessions)
            self.wake()

    @contextmanager
    def holding(self) -> Iterator[Callable[[int], None]]:
        """For as long as a body is in memory: what it yields is to be called with the size of each part that comes, and
        raises ApiError (429) where this one and all others would be too large together."""
        size = 0

        def more(part: int) -> None:
            nonlocal size
            self._large += size <= _SMALL < size + part
            size += part
            self._hold(part)
            # one alone, among small ones of which there always are some, may be larger than the bound
            if size > _SMALL and self._large > 1 and self.held_bytes > self._max_bytes:
                raise ApiError(
                    "too_many_waiting",
                    f"{self.held_bytes >> 20} MB of requests' bodies are held already",
                    retry_after_s=self.retry_after_s,
                )

        try:
            yield more
        finally:
            self._hold(-size)
            self._large -= size > _SMALL

    def wake(self) -> None:
        """Lets in who fits. To be called where the capacity may have grown."""
        while self._queue and self._fits(self._queue[0].sessions):
            one = self._queue.popleft()
            if not one.admitted.done():
                self._run(one.sessions)
                one.admitted.set_result(None)

    @property
    def retry_after_s(self) -> float:
        """When what waits now should have been let in, by how long sessions took lately."""
        return self._session_s * (self.waiting + 1) / max(1, self._capacity())

    def _fits(self, sessions: int) -> bool:
        return not self.running or self.running + sessions <= self._capacity()

    def _run(self, sessions: int) -> None:
        self.running += sessions
        self._metrics.admitted.set(self.running)

    def _hold(self, size: int) -> None:
        self.held_bytes += size
        self._metrics.waiting_bytes.set(self.held_bytes)

    def _count(self, sessions: int, tokens: int) -> None:
        self.waiting += sessions
        self.waiting_tokens += tokens
        self._metrics.waiting.set(self.waiting)
        self._metrics.waiting_tokens.set(self.waiting_tokens)

    async def _wait(self, sessions: int, tokens: int) -> None:
        full = self.waiting + sessions > self._max_waiting or self.waiting_tokens + tokens > self._max_tokens
        if full and (self.waiting or not self._max_waiting):  # one alone may be larger than the bounds
            raise ApiError(
                "too_many_waiting",
                f"{self.waiting} sessions with about {self.waiting_tokens} prompt tokens wait already",
                retry_after_s=self.retry_after_s,
            )
        one = _Waiting(sessions, asyncio.get_running_loop().create_future())
        self._queue.append(one)
        self._count(sessions, tokens)
        try:
            async with asyncio.timeout(self._timeout_s):
                await one.admitted
        except BaseException as error:
            if one.admitted.done() and not one.admitted.cancelled():
                self._run(-sessions)  # let in, and gone in the same moment
            else:
                one.admitted.cancel()
                with contextlib.suppress(ValueError):  # `wake` has taken it out
                    self._queue.remove(one)
            self.wake()
            if isinstance(error, TimeoutError):
                raise ApiError(
                    "queue_timeout",
                    f"no place became free within {self._timeout_s:g} s",
                    retry_after_s=self.retry_after_s,
                ) from None
            raise
        finally:
            self._count(-sessions, -tokens)
