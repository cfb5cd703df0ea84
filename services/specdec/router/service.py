"""The router's process."""

import asyncio
import resource
import signal
import socket

from specdec.router.app import create_app
from specdec.router.protocol import Protocol
from specdec.router.settings import RouterSettings
from specdec.serve import listen, serving
from specdec.tracing import Tracing

_UNSENT_BYTES = 1 << 14  # in the kernel for one client: more would hide that it does not read


async def run(settings: RouterSettings) -> int:
    """Serves until SIGTERM or SIGINT, lets running answers end (returns 0)."""
    allow_open_files()
    app = create_app(settings, Tracing.from_environment("specdec-router"))
    listener = listen(settings.host, settings.port, "--port")
    admin = listen(settings.admin_host, settings.admin_port, "--admin-port")
    limit_unread(listener, settings.write_timeout_s)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    async with serving(app.state.admin, admin, 1), serving(app, listener, 1, Protocol):
        await stopped.wait()
        await app.state.router.drain(settings.drain_s)
    return 0


def allow_open_files() -> None:
    """As many as the system lets this process have. A shell's usual 1024 are filled by some hundred streams, which have
    two connections each, or by clients that open some and send nothing."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def limit_unread(listener: socket.socket, timeout_s: float) -> None:
    """What a client does not read stays with us, and a connection that takes nothing for `timeout_s` is ended; holds
    for all connections of `listener`."""
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeout_s * 1000))
