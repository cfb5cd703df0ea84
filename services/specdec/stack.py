"""The whole stack on one machine: verifier, draft and router as guarded processes on free ports.

`specdec up`, the demo, the benchmark and the tests all start it here.
"""

import contextlib
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

import httpx
from pydantic import Field
from pydantic_settings import SettingsConfigDict

from specdec.channel.segment import sweep
from specdec.errors import SettingsError, SetupError
from specdec.guard import Guarded
from specdec.model import NAME as DEMO_MODEL
from specdec.model import demo_head, demo_model
from specdec.serve import listen
from specdec.settings import Settings

# What a small CPU machine needs; a user's own value of a variable wins.
CPU_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
_LOOPBACK = "127.0.0.1"
_TAIL_LINES = 30
_SETTINGS_FAULT = 2  # exit code of a service whose settings are wrong: trying again would not help
Progress = Callable[[str], None]


def quiet(_: str) -> None:
    """No progress shown."""


def free_ports(count: int) -> list[int]:
    """Ports nothing listens on now. They are not reserved, but below those that the kernel gives to connections: a
    service started again would find its own taken by one."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    below = range(max(1024, first - 12000), first)
    with contextlib.ExitStack() as stack:
        found: list[int] = []
        for port in [*random.sample(below, len(below)), *[0] * count]:  # 0: any the kernel has
            one = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                one.bind((_LOOPBACK, port))
                found.append(one.getsockname()[1])
            if len(found) == count:
                break
        return found


class Service:
    """One guarded process with its log file and a URL that answers 200 once it is ready."""

    def __init__(self, name: str, command: Sequence[str], ready_url: str, log: Path, env: Mapping[str, str]) -> None:
        self.name, self.ready_url, self.log = name, ready_url, log
        self._command, self._env = command, env
        self.process: Guarded
        self.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.stop()

    def start(self) -> None:
        """Starts it (again)."""
        with self.log.open("ab") as log:
            self.process = Guarded(self._command, env=self._env, log=log)

    def ready(self) -> bool:
        """Whether it says so itself."""
        try:
            return httpx.get(self.ready_url, timeout=5, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    def wait_ready(self, timeout_s: float) -> None:
        """Returns once ready. Raises SetupError with the log's end if it ends or takes longer."""
        until = time.monotonic() + timeout_s
        while not self.ready():
            code = self.process.poll()
            if code is not None:
                raise SetupError(f"the {self.name} ended with exit code {code}; the end of {self.log}:\n{self.tail()}")
            if time.monotonic() > until:
                raise SetupError(
                    f"the {self.name} was not ready after {timeout_s:.0f} s; the end of {self.log}:\n{self.tail()}"
                )
            time.sleep(0.1)

    def tail(self) -> str:
        """The log's last lines."""
        lines = self.log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        return "\n".join(f"    {line}" for line in lines)


class Plain(Service):
    """vLLM without any plug-in: what speculation is compared with."""

    def __init__(
        self,
        model: Path | str,
        logs: Path,
        vllm_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        name: str = "plain vLLM",
    ) -> None:
        (port,) = free_ports(1)
        self.url = f"http://{_LOOPBACK}:{port}"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--host", _LOOPBACK, "--port", str(port), *vllm_args]
        environment = {"VLLM_RPC_BASE_PATH": str(logs), **CPU_ENVIRONMENT, **os.environ, **(env or {})}
        log = logs / f"{name.replace(' ', '-')}.log"
        super().__init__(name, command, self.url + "/health", log, environment)

    def __exit__(self, *_: object) -> None:
        self.process.stop(0)  # an orderly end takes vLLM seconds, and nobody waits for an answer any more


class Stack:
    """A verifier, its draft and a router. `url` is the router's, `vllm_url` the verifier's own vLLM.

    `env` is set for all of them, over this process's own environment; `defaults` only where that says nothing.
    """

    def __init__(
        self,
        model: Path | str,
        logs: Path,
        *,
        drafter: str = "ngram",
        draft_model: str | None = None,
        router_args: Sequence[str] = (),
        verifier_args: Sequence[str] = (),
        vllm_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        defaults: Mapping[str, str] = CPU_ENVIRONMENT,
        host: str = _LOOPBACK,
        port: int | None = None,
        progress: Progress = quiet,
    ) -> None:
        vllm, self.control_port, verifier_health, draft_health, router, admin = free_ports(6)
        reached = _LOOPBACK if host in ("0.0.0.0", "::") else host
        self.url, self.vllm_url = f"http://{reached}:{port or router}", f"http://{_LOOPBACK}:{vllm}"
        self.verifier_url, self.draft_url = (
            f"http://{_LOOPBACK}:{verifier_health}",
            f"http://{_LOOPBACK}:{draft_health}",
        )
        self.admin_url, self._admin_port = f"http://{_LOOPBACK}:{admin}", admin  # the router's metrics
        self.pair = f"{os.getpid()}-{vllm}"
        self._logs, self._progress = logs, progress
        self._env = {**defaults, **os.environ, **(env or {})}
        self._host = host
        self.draft: Service | None = None
        self.router: Service | None = None
        self._more_routers: list[Service] = []
        self.more_admin_urls: list[str] = []  # of `add_router`'s
        self._model, self._draft_model = model, draft_model
        self._draft_health, self._router_port, self._router_args = draft_health, port or router, list(router_args)
        verifier_args = ["--model", str(model), "--pair", self.pair, "--port", str(vllm), *verifier_args]
        verifier_args += ["--control-port", str(self.control_port), "--health-port", str(verifier_health)]
        if drafter == "eagle3":
            verifier_args += ["--head", str(draft_model)]
        self.verifier = self._service("verifier", [*verifier_args, "--", *vllm_args], self.verifier_url)
        try:
            self.start_draft(drafter)
            self.start_router()
        except BaseException:
            self.stop()
            raise

    def wait_ready(self, timeout_s: float = 600) -> None:
        """Returns once a request would be answered, with speculation. Raises SetupError with the log of what failed."""
        for service in (self.verifier, self.draft, self.router):  # without the verifier the others wait in vain
            assert service is not None
            self._progress(f"waiting for the {service.name}")
            service.wait_ready(timeout_s)
        self._await_loop(self.admin_url, timeout_s)
        self._progress("ready")

    def start_draft(self, drafter: str, draft_model: str | None = None) -> None:
        """Starts a draft for the pair, stopping the one before; without `draft_model`, with the stack's own."""
        self.drafter, draft_model = drafter, draft_model or self._draft_model
        if self.draft is not None:
            self.draft.process.stop()
        args = ["--pair", self.pair, "--drafter", drafter, "--health-port", str(self._draft_health)]
        if draft_model:
            args += ["--model", draft_model]
        if drafter == "eagle3":
            args += ["--target", str(self._model)]
        self.draft = self._service("draft", args, self.draft_url)

    def start_router(self, *args: str) -> None:
        """Starts a router for the pair, stopping the one before; `args` come after those of the stack."""
        if self.router is not None:
            self.router.process.stop()
        own = ["--pairs", f"{_LOOPBACK}:{self.control_port}", "--host", self._host, "--port", str(self._router_port)]
        own += ["--admin-port", str(self._admin_port)]
        if self._host not in (_LOOPBACK, "::1", "localhost") and "SPECDEC_ROUTER_API_KEYS_FILE" not in self._env:
            own.append("--no-auth")  # `specdec up` is for one's own machine; keys are the variable's
        self.router = self._service("router", [*own, *self._router_args, *args], self.url)

    def add_router(self, *args: str) -> str:
        """Starts one more router for the pair and returns its URL once it can speculate."""
        port, admin = free_ports(2)
        url = f"http://{_LOOPBACK}:{port}"
        own = ["--pairs", f"{_LOOPBACK}:{self.control_port}", "--port", str(port), "--admin-port", str(admin)]
        router = self._service("router", [*own, *args], url)
        self._more_routers.append(router)
        self.more_admin_urls.append(f"http://{_LOOPBACK}:{admin}")
        router.wait_ready(60)
        self._await_loop(self.more_admin_urls[-1], 60)
        return url

    def stop(self) -> None:
        """Stops routers, draft and verifier, in this order, and removes what a killed verifier may have left."""
        for service in (*self._more_routers, self.router, self.draft, self.verifier):
            if service is not None:
                service.process.stop()
        sweep()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _service(self, name: str, args: Sequence[str], url: str) -> Service:
        self._progress(f"starting the {name}")
        command = [sys.executable, "-m", "specdec", name, *args]
        return Service(name, command, url + "/readyz", self._logs / f"{name}.log", self._env)

    @staticmethod
    def _await_loop(url: str, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        while True:
            state = httpx.get(url + "/readyz", timeout=5, trust_env=False).json()
            if all(pair["loop"] and pair["draft"]["up"] for pair in state["pairs"]):
                return
            if time.monotonic() > until:
                raise SetupError(f"the loop was not up after {timeout_s:.0f} s: {state}")
            time.sleep(0.1)


@dataclass
class Logs:
    """Where the services' logs lie, and whether they stay."""

    folder: Path
    keep: bool


@contextlib.contextmanager
def log_folder(given: Path | None = None) -> Iterator[Logs]:
    """A folder for the services' logs: `given`, or a temporary one that stays where something is raised or says so."""
    folder = given or Path(tempfile.mkdtemp(prefix="specdec-logs-"))
    folder.mkdir(parents=True, exist_ok=True)
    logs = Logs(folder, keep=given is not None)
    yield logs
    if not logs.keep:
        shutil.rmtree(folder, ignore_errors=True)


def demo_draft(drafter: str, draft_model: str | None, *, demo: bool = True) -> tuple[str, str | None]:
    """The drafter and its weights: what was asked for, else what suits the model best that needs nothing more."""
    drafter = drafter or ("eagle3" if demo else "ngram")
    return drafter, draft_model or (str(demo_head()) if demo and drafter == "eagle3" else None)


class UpSettings(Settings):
    """Keep verifier, draft and router running on this machine until Ctrl-C, which stops all of it. A draft or router
    that dies is started again. vLLM's own arguments follow after `--`."""

    model_config = SettingsConfigDict(env_prefix="SPECDEC_UP_")
    section: ClassVar[str] = "up"

    model: str = Field(
        "", description="a model folder or a name vLLM can load; default the demo model, SmolLM2-135M-Instruct"
    )
    drafter: str = Field(
        "", description="as specdec draft --drafter; default eagle3 for the demo model, ngram for any other"
    )
    draft_model: str | None = Field(
        None,
        description="as specdec draft --model: a small model, or with --drafter eagle3 a head; the demo"
        " model has a head of its own",
    )
    host: str = Field("127.0.0.1", description="address the router listens on; the other services stay on loopback")
    port: int = Field(8000, ge=1, le=65535, description="the router's OpenAI API; the other ports are chosen free")
    policy: str = Field("auto", description="as specdec router --policy")
    steps: int = Field(4, ge=0, le=64, description="as specdec router --steps")
    window: int = Field(4, ge=1, le=64, description="as specdec router --window")
    logs: Path | None = Field(None, description="folder for the services' logs; default a temporary one, printed")


def say(text: str) -> None:
    """Progress, on standard error."""
    print(f"  {text}", file=sys.stderr, flush=True)


def up(argv: list[str]) -> int:
    """`specdec up`."""
    from specdec.cli import split_extra

    ours, vllm_args = split_extra(argv)
    settings = UpSettings.load(ours)
    drafter, draft_model = demo_draft(settings.drafter, settings.draft_model, demo=not settings.model)
    if drafter in ("causal", "eagle3") and draft_model is None:
        raise SettingsError(f"--drafter {drafter} needs --draft-model: its weights")
    listen(settings.host, settings.port, "--port").close()  # before anything is started that would then wait for it
    model = settings.model or str(demo_model())
    if not vllm_args and not settings.model:
        vllm_args = DEMO_VLLM_ARGS
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    with log_folder(settings.logs) as logs:
        say(f"logs in {logs.folder}")
        router_args = ["--policy", settings.policy, "--steps", str(settings.steps), "--window", str(settings.window)]
        stack = Stack(
            model,
            logs.folder,
            drafter=drafter,
            draft_model=draft_model,
            router_args=router_args,
            vllm_args=vllm_args,
            defaults={} if settings.model else CPU_ENVIRONMENT,
            host=settings.host,
            port=settings.port,
            progress=say,
        )
        with stack:
            code = _Keeper(stack, stopping).run()
        logs.keep = logs.keep or code != 0
        return code


DEMO_VLLM_ARGS = [
    *("--dtype", "float32", "--max-model-len", "2048", "--enforce-eager", "--served-model-name", DEMO_MODEL),
]


class _Keeper:
    """Keeps a stack up until told to stop."""

    def __init__(self, stack: Stack, stopping: threading.Event) -> None:
        self._stack, self._stopping = stack, stopping
        self._failed = False
        self._restart_at: dict[Service, float] = {}
        self._backoff_s: dict[Service, float] = {}

    def run(self) -> int:
        """Returns 0 once stopped, 1 if the stack did not come up or its verifier ended."""
        threading.Thread(target=self._announce, daemon=True).start()
        while not self._stopping.wait(0.5):
            if (code := self._stack.verifier.process.poll()) is not None:
                return self._fail(f"the verifier ended with exit code {code}:\n{self._stack.verifier.tail()}")
            for service in (self._stack.draft, self._stack.router):
                if service is not None:
                    self._restart_if_ended(service)
        say("stopping")
        return int(self._failed)

    def _announce(self) -> None:
        try:
            self._stack.wait_ready()
        except SetupError as error:
            if not self._stopping.is_set():
                self._fail(str(error))
                self._stopping.set()
            return
        say(f"OpenAI API at {self._stack.url}/v1 — Ctrl-C stops everything")

    def _fail(self, why: str) -> int:
        self._failed = True
        print(f"specdec up: {why}", file=sys.stderr)
        return 1

    def _restart_if_ended(self, service: Service) -> None:
        code, now = service.process.poll(), time.monotonic()
        if code is None:
            return
        if code == _SETTINGS_FAULT:
            self._fail(f"the {service.name} refuses its settings:\n{service.tail()}")
            self._stopping.set()
            return
        if service not in self._restart_at:
            wait_s = self._backoff_s.get(service, 1.0)
            say(f"the {service.name} ended with exit code {code}; starting it again in {wait_s:.0f} s")
            self._restart_at[service], self._backoff_s[service] = now + wait_s, min(30.0, 2 * wait_s)
        elif now >= self._restart_at[service]:
            del self._restart_at[service]
            service.process.stop(0)  # what it left behind
            service.start()
