"""The router's process."""

import asyncio
import signal

from specdec.router.app import create_app
from specdec.router.settings import RouterSettings
from specdec.serve import listen, serving
from specdec.tracing import Tracing


async def run(settings: RouterSettings) -> int:
    """Serves until SIGTERM or SIGINT (returns 0)."""
    listener = listen(settings.host, settings.port, "--port")
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    app = create_app(settings, Tracing.from_environment("specdec-router"))
    async with serving(app, listener, settings.drain_s):
        await stopped.wait()
    return 0
