"""Serving an application beside other work in one event loop."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn

from specdec.errors import SettingsError, SetupError


class _Server(uvicorn.Server):
    def capture_signals(self) -> Any:
        """Signals belong to the service, which stops several servers in order."""
        return contextlib.nullcontext()


def bracketed(host: str) -> str:
    """A host as URLs have it: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host


def listen(host: str, port: int, what: str) -> socket.socket:
    """A bound listening socket. Raises SettingsError naming the setting when the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # NOTE: with the protocol left out, asyncio does not turn Nagle's algorithm off, and a streamed token waits 40 ms
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise SettingsError(f"{what}: cannot listen on {host}:{port}: {error.strerror}") from error
    return listener


@asynccontextmanager
async def serving(
    app: Any, listener: socket.socket, grace_s: float = 5, protocol: type[asyncio.Protocol] | None = None
) -> AsyncIterator[None]:
    """Serves `app` on `listener` while the context is open; running answers get `grace_s` at its end. `protocol`: of
    HTTP, if another than uvicorn's."""
    options: dict[str, Any] = {} if protocol is None else {"http": protocol}
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=int(grace_s),
        timeout_keep_alive=75,  # longer than proxies in front keep theirs (nginx: 60), which then race with our close
        ws="none",
        **options,
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not task.done():
        await asyncio.sleep(0.005)
    if task.done():
        await task
        raise SetupError("the HTTP server ended while it started; its log has the cause")
    try:
        yield
    finally:
        server.should_exit = True
        await task
