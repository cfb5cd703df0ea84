"""Puts specdec into vLLM's own image, beside what is there; the Dockerfile's `engine` target runs it.

    python3 tools/engine_image.py install    specdec with its base dependencies, into the Python that has vLLM
    python3 tools/engine_image.py check      whether specdec's plug-ins fit the vLLM that is there; needs no GPU

Packages of the image keep their versions where specdec takes them. One that is too old for specdec is raised, to the
lock's version at most; one that is missing comes in the lock's. torch and vLLM are not among specdec's base
dependencies, so pip does not touch them; packages of the image that no longer fit afterwards fail the build.
"""

import importlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements" / "lock.txt"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")
PLUGINS = ("specdec.verifier.scheduler", "specdec.verifier.vllm_plugin")
ANOTHER_BASE = "name another base with --build-arg ENGINE_BASE=IMAGE"


class Unfit(Exception):
    """The image cannot take specdec; the message says why."""


def vllm_version() -> str:
    """Raises Unfit where this Python has no vLLM."""
    try:
        return version("vllm")
    except PackageNotFoundError:
        raise Unfit(f"{sys.executable} has no vLLM: {ANOTHER_BASE}") from None


def installed() -> dict[str, str]:
    """Name and version of each package of this Python."""
    names = ((one.metadata["Name"], one.version) for one in distributions())
    return {_canonical(name): number for name, number in names if name and number}


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def constraints(present: Mapping[str, str], lock: Iterable[str]) -> list[str]:
    """pip's constraints: for each package of the image and of the lock, the versions it may have afterwards."""
    from packaging.version import Version  # a dependency of vLLM's

    lines, locked = [], set()
    for line in lock:
        found = re.match(r"([\w.-]+)==(\S+)(.*)", line)  # with its marker: the lock is for several Pythons
        if found is None:
            continue
        name, wanted, marker = _canonical(found[1]), found[2], found[3]
        locked.add(name)
        now = present.get(name, wanted)
        span = f">={now},<={wanted}" if Version(now) < Version(wanted) else f"=={now}"
        lines.append(f"{name}{span}{marker}")
    return lines + [f"{name}=={now}" for name, now in present.items() if name not in locked]


def install() -> None:
    """Installs specdec. Raises Unfit where the image cannot have it without a package that no longer fits."""
    vllm_version()
    before, complaints = installed(), _complaints()
    env = os.environ | {"PIP_BREAK_SYSTEM_PACKAGES": "1", "PIP_ROOT_USER_ACTION": "ignore"}
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(constraints(before, LOCK.read_text().splitlines())))
        file.flush()
        command = [*PIP, "install", "-q", "--constraint", file.name, "--editable", str(ROOT)]
        if subprocess.run(command, env=env, check=False).returncode:
            raise Unfit(f"specdec's dependencies do not go with this image's packages, see above: {ANOTHER_BASE}")
    for name, now in sorted(installed().items()):
        if before.get(name) != now:
            print(f"{name} {before.get(name, '(new)')} -> {now}")
    if broken := _complaints() - complaints:
        raise Unfit("\n  ".join(["packages of the image no longer fit:", *sorted(broken), ANOTHER_BASE]))


def _complaints() -> set[str]:
    """What `pip check` says; the image may have complaints of its own."""
    done = subprocess.run([*PIP, "check"], capture_output=True, text=True, check=False)
    return set(done.stdout.splitlines()) if done.returncode else set()


def check() -> None:
    """Raises Unfit where specdec's plug-ins do not fit. They import vLLM, which works without a GPU."""
    from specdec.verifier.seams import TESTED

    found = vllm_version()
    if not re.match(rf"{re.escape(TESTED)}\.\d+(\+|$)", found):
        raise Unfit(f"this image has vLLM {found}, and specdec's plug-ins are for {TESTED}.*: {ANOTHER_BASE}")
    for name in PLUGINS:
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever vLLM raises while it is imported
            raise Unfit(f"{name} cannot be imported beside vLLM {found} ({error!r}): {ANOTHER_BASE}") from error
    print(f"specdec's plug-ins import beside vLLM {found}")


def main(argv: list[str]) -> int:
    """The exit code."""
    try:
        {"install": install, "check": check}[argv[0]]()
    except Unfit as error:
        print(f"engine image: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
