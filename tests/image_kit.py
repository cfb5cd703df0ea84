"""The Dockerfile's images without a registry: built by buildah on a base that mmdebstrap makes, run by podman.

What is heavy to make stays in `.cache/images` of the work tree: the base, pip's downloads and the images with their
layers. Needs root, as the containers' file systems do.
"""

import ast
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from specdec.model import NAME, demo_model

ROOT = Path(__file__).parent.parent
CACHE = ROOT / ".cache" / "images"
PROGRAMS = ("buildah", "podman", "runc", "mmdebstrap")
BASE = "localhost/stand-in-for-python:bookworm"
ROUTER, ENGINE_CPU = "localhost/specdec-router:test", "localhost/specdec-engine-cpu:test"
# As the strictest clusters run a pod.
ANY_UID = ("--user", "123456:0")
RESTRICTED = ("--read-only", "--read-only-tmpfs=false", "--cap-drop", "all", "--security-opt", "no-new-privileges")
TMP = ("--tmpfs", "/tmp:rw,mode=1777")


def missing() -> list[str]:
    """What these tests need and this machine has not; Debian's packages have the programs' names."""
    found = [name for name in PROGRAMS if shutil.which(name) is None]
    return found + (["root"] if os.geteuid() else [])


def run(*command: str, check: bool = True, timeout_s: float = 580) -> subprocess.CompletedProcess[str]:
    """Runs a program with this kit's store of images. Raises AssertionError with its last words if it fails."""
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False, timeout=timeout_s)
    assert not check or done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return done


def _environment() -> dict[str, str]:
    """Settings in files of our own: the user's images and settings are left alone."""
    temporary = CACHE / "tmp"
    temporary.mkdir(parents=True, exist_ok=True)
    storage, containers = CACHE / "storage.conf", CACHE / "containers.conf"
    storage.write_text(
        f'[storage]\ndriver = "overlay"\ngraphroot = "{CACHE}/store"\nrunroot = "{CACHE}/run"\n'
        '[storage.options.overlay]\nskip_mount_home = "true"\n'  # else `make clean` could not remove it
    )
    containers.write_text(
        f'[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\ntmp_dir = "{CACHE}/libpod"\n'
    )
    own = {"CONTAINERS_STORAGE_CONF": str(storage), "CONTAINERS_CONF": str(containers), "TMPDIR": str(temporary)}
    return os.environ | own


# ---- building


def build(target: str, tag: str, *, base: Mapping[str, str] | None = None, check: bool = True) -> str:
    """Builds one target of the Dockerfile and returns what the build said. `base`: build arguments beside BASE."""
    _make_base()
    arguments = {"BASE": BASE, **(base or {})}
    done = run(
        *(
            "buildah",
            "bud",
            "--isolation",
            "chroot",
            "--pull-never",
            "--layers",
            "--force-rm",
            "--target",
            target,
            "--tag",
            tag,
        ),
        *(word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")),
        *(word for volume in _pip_volumes() for word in ("--volume", volume)),
        str(ROOT),
        check=check,
    )
    return done.stdout + done.stderr


def has_image(tag: str) -> bool:
    """Whether the store has it."""
    return run("buildah", "inspect", "--type", "image", tag, check=False).returncode == 0


def _make_base() -> None:
    """Debian with its Python under a name that stands for the official image's, which no registry gives us here."""
    if has_image(BASE):
        return
    options = ["--dpkgopt=force-unsafe-io", '--aptopt=Acquire::Languages "none"']
    options += [f'--aptopt=Dir::Cache::{cache} ""' for cache in ("pkgcache", "srcpkgcache")]  # as the official image
    options += [f"--dpkgopt=path-exclude=/usr/share/{waste}/*" for waste in ("doc", "info", "locale", "man")]
    packages = "ca-certificates,libnuma1,python3-minimal,python3-venv,tini"
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        archive = f"{folder}/base.tar"
        run("mmdebstrap", "--quiet", "--variant=minbase", *options, f"--include={packages}", "bookworm", archive)
        run("podman", "import", "--quiet", archive, BASE)


def commit_folder(root: Path, tag: str, base: str = "scratch") -> None:
    """Makes an image of the files in `root`, on top of `base`."""
    container = run("buildah", "from", "--pull-never", base).stdout.strip()
    run("buildah", "add", "--quiet", container, str(root), "/")
    run("buildah", "commit", "--quiet", "--rm", container, tag)


def _pip_volumes() -> list[str]:
    """This machine's pip settings for the build: its indexes, its certificates, and the folders they are in."""
    done = run(sys.executable, "-m", "pip", "config", "list")
    sections: dict[str, dict[str, str]] = {}
    for line in sorted(done.stdout.splitlines(), reverse=True):  # ":env:" comes last, and wins
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        section = "global" if section == ":env:" else section
        sections.setdefault(section, {})[key] = ast.literal_eval(value)
    settings = CACHE / "pip.conf"
    settings.write_text(
        "".join(
            f"[{section}]\n" + "".join(f"{key} = {' '.join(value.split())}\n" for key, value in values.items())
            for section, values in sections.items()
        )
    )
    volumes = {f"{settings}:/etc/pip.conf:ro"}
    for word in " ".join(value for values in sections.values() for value in values.values()).split():
        # An index's files lie beside it.
        path = Path(word.removeprefix("file://")).parent if word.startswith("file://") else Path(word)
        if path.is_absolute() and path.exists() and path != Path("/"):
            volumes.add(f"{path}:{path}:ro")
    return sorted(volumes)


def build_images() -> None:
    """Builds the router's and the CPU engine's image; what has not changed comes from the store."""
    build("router", ROUTER)
    build("engine-cpu", ENGINE_CPU)
    run("buildah", "rmi", "--prune", check=False)  # what they were before


def image_config(tag: str) -> dict[str, Any]:
    """The image's configuration: Env, User, Labels and so on."""
    found = json.loads(run("buildah", "inspect", "--type", "image", tag).stdout)
    config: dict[str, Any] = found["OCIv1"]["config"]
    return config


# ---- running


def demo_cache(folder: Path) -> Path:
    """A folder to be mounted at /cache, for any uid, that has the demo model converted already."""
    shutil.copytree(demo_model(), folder / "models" / NAME)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o666)
    return folder


class Container:
    """A container without a network of its own beside loopback; `options` are podman's."""

    def __init__(self, image: str, *arguments: str, options: Sequence[str] = (*ANY_UID, *RESTRICTED, *TMP)) -> None:
        self.name = f"specdec-{uuid.uuid4().hex[:8]}"
        network = () if "--pod" in options or "--network" in options else ("--network", "none")
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # podman's own limits may be more than this root may set
        limits = ("--ulimit", f"nofile={files}:{files}", "--ulimit", "nproc=8192:8192")
        run("podman", "run", "--detach", "--name", self.name, *limits, *network, *options, image, *arguments)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        run("podman", "rm", "--force", "--time", "0", self.name)

    def execute(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Runs a command inside."""
        return run("podman", "exec", self.name, *command, check=check)

    def request(self, url: str, body: Mapping[str, Any] | None = None, timeout_s: float = 120) -> tuple[int, str]:
        """Status and text that a server inside answers; status 0 where none does."""
        code = (
            "import sys, httpx\n"
            "url, body, timeout = sys.argv[1:]\n"
            "headers = {'Content-Type': 'application/json'}\n"
            "with httpx.Client(timeout=float(timeout), trust_env=False) as client:\n"
            "    answer = client.post(url, content=body, headers=headers) if body else client.get(url)\n"
            "print(answer.status_code, answer.text)\n"
        )
        text = json.dumps(body) if body is not None else ""
        done = self.execute("python", "-c", code, url, text, str(timeout_s), check=False)
        status, _, answer = done.stdout.partition(" ")
        return (int(status), answer.strip()) if done.returncode == 0 else (0, done.stderr)

    def wait_for(self, url: str, timeout_s: float) -> None:
        """Returns once `url` answers 200. Raises AssertionError with what it wrote if it ends or takes longer."""
        until = time.monotonic() + timeout_s
        while self.request(url)[0] != 200:
            assert self.running(), f"it ended:\n{self.output()}"
            assert time.monotonic() < until, f"{url} was not there after {timeout_s:.0f} s:\n{self.output()}"
            time.sleep(0.3)

    def wait_for_output(self, words: str, timeout_s: float) -> None:
        """Returns once it has written `words`. Raises AssertionError as `wait_for` does."""
        until = time.monotonic() + timeout_s
        while words not in self.output():
            assert self.running(), f"it ended:\n{self.output()}"
            assert time.monotonic() < until, f"no {words!r} after {timeout_s:.0f} s:\n{self.output()}"
            time.sleep(0.5)

    def running(self) -> bool:
        """Whether its first process lives."""
        return run("podman", "inspect", "--format", "{{.State.Running}}", self.name).stdout.strip() == "true"

    def output(self) -> str:
        """What it wrote on stdout and stderr."""
        done = run("podman", "logs", self.name, check=False)
        return done.stdout + done.stderr

    def wait(self) -> int:
        """The exit code, once it has ended by itself."""
        return int(run("podman", "wait", self.name).stdout)

    def terminate(self, grace_s: int = 60) -> int:
        """SIGTERM, and after `grace_s` SIGKILL; the exit code."""
        run("podman", "stop", "--time", str(grace_s), self.name)
        return int(run("podman", "inspect", "--format", "{{.State.ExitCode}}", self.name).stdout)


if __name__ == "__main__":
    build_images()
