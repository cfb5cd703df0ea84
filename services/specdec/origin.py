"""Where a result comes from: what every result file says beside its numbers."""

import os
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import specdec


def origin(command: Sequence[str], *packages: str) -> dict[str, Any]:
    """The command line, the commit (None outside a clone), the versions of specdec and `packages`, and the machine."""
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    return {
        "command": " ".join(command),
        "commit": git.stdout.strip() or None,
        "versions": {"specdec": specdec.__version__, **{package: version(package) for package in packages}},
        "machine": {"arch": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()},
    }
