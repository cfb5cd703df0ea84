"""The pairs a router has: where they come from, and which one gets the next request."""

import asyncio
import hashlib
import logging
import socket
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence

from specdec.router.errors import ApiError
from specdec.router.pairs import Pair
from specdec.serve import bracketed

log = logging.getLogger(__name__)
_DNS = "dns://"
_RESOLVE_S = 3.0
_LOOK_UP_S = 10.0  # longest look-up
_KNOWN = 1 << 16  # prefixes remembered
_SHORTEST = 512  # bytes of a prompt from which it counts as shared
_SLACK = 4  # sessions that the pair with a prompt's beginning may have more than the least loaded, and a quarter


class Prefixes:
    """Which pair saw a prompt's beginning last, by hashes of its first 512, 1024, 2048, … bytes."""

    def __init__(self) -> None:
        self._pairs: OrderedDict[bytes, Pair] = OrderedDict()

    def find(self, prefix: bytes) -> Pair | None:
        """The pair that saw the longest of them."""
        return next((self._pairs[key] for key in reversed(_keys(prefix)) if key in self._pairs), None)

    def saw(self, prefix: bytes, pair: Pair) -> None:
        """`pair` gets a prompt that begins so."""
        for key in _keys(prefix):
            self._pairs[key] = pair
            self._pairs.move_to_end(key)
        while len(self._pairs) > _KNOWN:
            self._pairs.popitem(last=False)


class Fleet:
    """Pairs from settings and from DNS. `pairs` is always the same list."""

    def __init__(self, endpoints: Sequence[str], make: Callable[[str, str], Pair], changed: Callable[[], None]) -> None:
        """`endpoints`: HOST:PORT or dns://NAME:PORT. `make(address, name)`: a pair; `changed` is called when one has
        joined, has left, or has told something new."""
        self._make, self._changed = make, changed
        self._names = [one.removeprefix(_DNS) for one in endpoints if one.startswith(_DNS)]
        fixed = [one for one in endpoints if not one.startswith(_DNS)]
        self.pairs = [make(address, address.rpartition(":")[0]) for address in fixed]
        self._found: dict[str, set[str]] = {}
        self._failures: dict[str, str] = {}  # of names, as told last
        self._running: dict[Pair, asyncio.Task[None]] = {}
        self._prefixes = Prefixes()

    def choose(self, prefix: bytes = b"", tried: Collection[Pair] = ()) -> Pair:
        """A ready pair: the one that has the prompt's beginning, unless it is much busier than the least loaded.

        Raises ApiError (503) if none is ready but those `tried`.
        """
        ready = [pair for pair in self.pairs if pair.ready and pair not in tried]
        if not ready:
            raise ApiError("no_pair", "no pair is ready: its vLLM is starting, or its verifier is not reachable")
        best = min(ready, key=lambda pair: (pair.leaving, not pair.connected, pair.load))
        known = self._prefixes.find(prefix) if len(ready) > 1 else None
        if known in ready and not known.leaving and known.load <= best.load * 1.25 + _SLACK:
            best = known
        if len(self.pairs) > 1:
            self._prefixes.saw(prefix, best)
        return best

    async def run(self) -> None:
        """Keeps the pairs' streams open, and follows DNS, until cancelled. Raises what ended a pair's task, which is a
        defect: nobody would open its stream again."""
        for pair in self.pairs:
            self._start(pair)
        try:
            while True:
                for name in self._names:
                    await self._follow(name)
                self._let_go()
                for task in self._running.values():
                    if task.done():
                        task.result()
                self._changed()
                await asyncio.sleep(_RESOLVE_S if self.pairs else 0.5)
        finally:
            for task in self._running.values():
                task.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _follow(self, name: str) -> None:
        """Adds the pairs that a name has now; those it had leave. A failed look-up changes nothing."""
        try:
            async with asyncio.timeout(_LOOK_UP_S):
                addresses = self._of_one_family(await resolve(name))
        except Exception as error:  # not only OSError: a name that cannot be one is a UnicodeError
            failure = f"{type(error).__name__}: {error}"
            if self._failures.get(name) != failure:
                log.warning("dns://%s: %s; the pairs stay as they are", name, failure)
            self._failures[name] = failure
            return
        self._failures.pop(name, None)
        self._found[name] = addresses
        known = {pair.address: pair for pair in self.pairs}
        ending = {pair.address for pair in self._running} - known.keys()
        for address in sorted(addresses - ending):
            if (pair := known.get(address)) is None:
                pair = self._make(address, name.rpartition(":")[0])
                pair.from_dns = True
                self.pairs.append(pair)
                self._start(pair)
                log.info("pair %s joined (dns://%s)", address, name)
            pair.leaving = False
        current = set().union(*self._found.values())
        for pair in self.pairs:
            if pair.from_dns and pair.address not in current and not pair.leaving:
                pair.leaving = True
                log.info("pair %s leaves: dns://%s has it no more", pair.address, name)

    def _of_one_family(self, addresses: Iterable[str]) -> set[str]:
        """A name may have an IPv4 and an IPv6 address for each pair, which would count it twice. Where a name has both,
        one family's count: the first in the resolver's order with a pair that is connected; until there is one, all
        are tried. A pair that has an address of the other family only is left out."""
        families: dict[bool, set[str]] = {}
        for address in addresses:
            families.setdefault(address.startswith("["), set()).add(address)
        connected = {pair.address for pair in self.pairs if pair.connected}
        return next((family for family in families.values() if family & connected), set().union(*families.values()))

    def _let_go(self) -> None:
        """Pairs that have left, and answer nothing any more."""
        for pair in [pair for pair in self.pairs if pair.leaving and not pair.load]:
            self.pairs.remove(pair)
            self._running[pair].cancel()

    def _start(self, pair: Pair) -> None:
        pair.changed = self._changed
        task = self._running[pair] = asyncio.create_task(pair.run())
        task.add_done_callback(lambda _: self._ended(pair))

    def _ended(self, pair: Pair) -> None:
        """A pair that was let go is forgotten only here: the last that its task does is to say that it is down."""
        if pair not in self.pairs:
            del self._running[pair]
            pair.forget()


async def resolve(name: str) -> list[str]:
    """NAME:PORT as HOST:PORT for every address the name has, the resolver's choice first. Raises OSError, or whatever
    else a resolver does with a name that cannot be one."""
    host, _, port = name.rpartition(":")
    found = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    return [f"{bracketed(str(at[0]))}:{port}" for *_, at in found]


def _keys(prefix: bytes) -> list[bytes]:
    keys, size = [], _SHORTEST
    while size <= len(prefix):
        keys.append(hashlib.blake2b(prefix[:size], digest_size=12).digest())
        size *= 2
    return keys
