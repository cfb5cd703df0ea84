"""The draft's process: joins the pair's segment, drafts, and joins the next segment when the verifier is replaced."""

import asyncio
import contextlib
import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any

from specdec.channel.segment import Role, Segment, segment_path
from specdec.draft.drafters import load_drafter
from specdec.draft.engine import DraftEngine
from specdec.draft.settings import DraftSettings
from specdec.errors import SegmentInUse, SegmentMissing, SetupError
from specdec.hub import model_folder
from specdec.serve import listen, serving
from specdec.telemetry import DraftMetrics, health_app

log = logging.getLogger(__name__)
_RETRY_S = 0.25
_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


class DraftService:
    """One draft process."""

    def __init__(self, settings: DraftSettings) -> None:
        self._settings = settings
        self._path = segment_path(settings.pair)
        if settings.drafter in ("causal", "eagle3"):
            require_device(settings.device)
        self._drafter = load_drafter(
            settings.drafter,
            model=model_folder(settings.model, "--model") if settings.model else None,
            target=model_folder(settings.target, "--target") if settings.target else None,
            device=settings.device,
            dtype=settings.computed_in,
            memory_gb=memory_gb(settings),
            run_ahead=settings.runs_ahead,
        )
        self._metrics = DraftMetrics()
        self._metrics.show(self._drafter, run_ahead=settings.runs_ahead)
        self._stopping = threading.Event()
        self._engine: DraftEngine | None = None
        self._detail = "waiting for the verifier"
        self._fault: BaseException | None = None

    async def run(self) -> int:
        """Serves until SIGTERM or SIGINT (returns 0)."""
        loop = asyncio.get_running_loop()
        stopped = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopped.set)
        listener = listen(self._settings.host, self._settings.health_port, "--health-port")

        def work() -> None:
            try:
                self._join_pairs()
            except BaseException as error:
                self._fault = error
            loop.call_soon_threadsafe(stopped.set)

        worker = threading.Thread(target=work, name="draft", daemon=True)
        async with serving(health_app(self._metrics.registry, self._readiness), listener):
            worker.start()
            await stopped.wait()
            self._stopping.set()
            if self._engine:
                self._engine.stop()
            await asyncio.to_thread(worker.join, 5)
        if self._fault:
            raise self._fault
        return 0

    def _join_pairs(self) -> None:
        told = ""
        while not self._stopping.is_set():
            try:
                segment = Segment.attach(self._path, Role.DRAFT)
            except (SegmentMissing, SegmentInUse) as error:
                self._detail = str(error)
                if str(error) != told:
                    log.info("waiting: %s", error)
                    told = str(error)
                self._stopping.wait(_RETRY_S)
                continue
            told = ""
            with segment:
                settings = self._settings
                self._engine = DraftEngine(
                    *(segment, self._drafter, self._metrics),
                    trust_vocabulary=settings.trust_vocabulary,
                    spin_s=settings.spin_s,
                )
                if self._stopping.is_set():
                    self._engine.stop()
                self._detail = "drafting"
                log.info("joined %s, drafter %s", self._path, self._settings.drafter)
                self._engine.run()
                self._engine = None
            log.info("left %s", self._path)

    def _readiness(self) -> dict[str, Any]:
        ready = self._engine is not None
        return {"ready": ready, "reasons": [] if ready else [self._detail], "drafter": self._settings.drafter}


def require_device(device: str) -> None:
    """Raises SetupError, with what to set, if a GPU is asked for that this process does not see."""
    if not device.startswith("cuda"):
        return
    import torch

    seen, index = torch.cuda.device_count(), torch.device(device).index or 0
    if index >= seen:
        raise SetupError(
            f"--device {device}: {seen} GPUs are visible here. In Kubernetes, gpu.mode wholeNode needs a node that "
            "shows all its GPUs to a container which asked for none: nvidia as the default container runtime, and "
            "accept-nvidia-visible-devices-envvar-when-unprivileged = true in its settings; gpu.mode dra does without"
        )


def memory_gb(settings: DraftSettings) -> float:
    """GiB for keys and values."""
    if settings.memory_fraction is None:
        return settings.memory_gb
    if settings.device.startswith("cuda"):
        import torch

        total = torch.cuda.get_device_properties(settings.device).total_memory
    else:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        with contextlib.suppress(OSError, ValueError):  # no limit is "max"
            total = min(total, int(_CONTAINER_LIMIT.read_text()))
    return settings.memory_fraction * total / 2**30
