"""The `specdec` command."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator

import specdec
from specdec.errors import SpecdecError
from specdec.logs import setup_logging

USAGE = """specdec: speculative decoding served across processes

    specdec up        the whole stack on this machine, until Ctrl-C
    specdec demo      the stack against plain vLLM, on twelve prompts
    specdec bench     speculation off, fixed k, auto, and windows, in one run
    specdec bench draft   the draft alone: ms a proposal beside what its bytes take
    specdec bench edge    the router: what it adds in front of an engine that computes nothing
    specdec check     one question to a running stack: is it answered, with speculation?
    specdec simulate  the step policy on cost and acceptance that are known

    specdec router    one service each
    specdec verifier  ... with vLLM's own arguments after --
    specdec draft

`specdec COMMAND --help` lists a command's settings; `specdec --version`.
"""


def main(argv: list[str] | None = None) -> int:
    """Runs a command. Returns its exit code: 2 for what the user has to set right."""
    argv = sys.argv[1:] if argv is None else argv
    name, rest = (argv[0], argv[1:]) if argv else ("--help", [])
    if name in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    if name == "--version":
        print(f"specdec {specdec.__version__}")
        return 0
    commands: dict[str, Callable[[list[str]], int]] = {
        "up": _up,
        "demo": _demo,
        "bench": _bench,
        "check": _check,
        "simulate": _simulate,
        "router": _router,
        "verifier": _verifier,
        "draft": _draft,
    }
    if name not in commands:
        print(f"specdec: there is no command {name!r}\n\n{USAGE}", file=sys.stderr, end="")
        return 2
    try:
        form = os.environ.get("SPECDEC_LOG_FORMAT", "console")
        setup_logging(name, os.environ.get("SPECDEC_LOG_LEVEL", "INFO"), form)
        return commands[name](rest)
    except SpecdecError as error:
        logging.getLogger(__name__).debug("", exc_info=True)
        print(f"specdec {name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


# Each command imports what it needs when it runs: the router's image has no torch, and --help should be quick.


def split_extra(argv: list[str]) -> tuple[list[str], list[str]]:
    """(our arguments, vLLM's): what stands after the first `--` is vLLM's."""
    if "--" not in argv:
        return argv, []
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]


def _router(argv: list[str]) -> int:
    import uvloop

    from specdec.router.service import run
    from specdec.router.settings import RouterSettings

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # a third less time for each chunk
        return runner.run(run(RouterSettings.load(argv)))


def _verifier(argv: list[str]) -> int:
    from specdec.verifier.settings import VerifierSettings
    from specdec.verifier.supervisor import Supervisor

    ours, extra = split_extra(argv)
    settings = VerifierSettings.load(ours)

    async def run() -> int:
        return await Supervisor(settings, extra).run()

    return asyncio.run(run())


def _draft(argv: list[str]) -> int:
    from specdec.draft.service import DraftService
    from specdec.draft.settings import DraftSettings

    settings = DraftSettings.load(argv)

    async def run() -> int:
        return await DraftService(settings).run()

    return asyncio.run(run())


def _up(argv: list[str]) -> int:
    from specdec.stack import up

    return up(argv)


def _demo(argv: list[str]) -> int:
    from specdec.demo import demo

    with _ended_by_sigterm():
        return demo(argv)


def _bench(argv: list[str]) -> int:
    with _ended_by_sigterm():
        if argv[:1] == ["draft"]:
            from specdec.draft.bench import bench_draft

            return bench_draft(argv[1:])
        if argv[:1] == ["edge"]:
            from specdec.edge_bench import bench_edge

            return bench_edge(argv[1:])
        from specdec.bench import bench

        return bench(argv)


def _check(argv: list[str]) -> int:
    from specdec.check import check

    return check(argv)


def _simulate(argv: list[str]) -> int:
    from specdec.simulate.command import simulate

    return simulate(argv)


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Inside, SIGTERM ends a command as Ctrl-C does: what it started is stopped first."""

    def end(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
