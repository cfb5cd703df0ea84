"""scratch.py: temporary folders that end with their makers."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from specdec.scratch import Scratch

MAKER = """
import sys, time
from specdec.scratch import Scratch
made = Scratch("specdec-test-")
(made.path / "socket").touch()
print(made.path, flush=True)
time.sleep(300)
"""


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


def start_maker():
    process = subprocess.Popen([sys.executable, "-c", MAKER], stdout=subprocess.PIPE, text=True)
    return process, Path(process.stdout.readline().strip())


def test_a_killed_makers_folder_goes_with_the_next_start_and_a_live_ones_stays():
    dead, dead_path = start_maker()
    alive, alive_path = start_maker()
    try:
        assert dead_path.exists()
        dead.kill()
        dead.wait()
        made = Scratch("specdec-test-")
        assert not dead_path.exists()
        assert (alive_path / "socket").exists()
        assert made.path.exists()
        made.remove()
        assert not made.path.exists()
        Scratch("specdec-test-").remove()
        assert (alive_path / "socket").exists()
    finally:
        alive.kill()
        alive.wait()


def test_files_and_folders_of_others_stay(tmp_path):
    (tmp_path / "specdec-test-file").touch()
    (tmp_path / "other-folder").mkdir()
    target = tmp_path / "target"
    target.mkdir()
    (tmp_path / "specdec-test-link").symlink_to(target)
    Scratch("specdec-test-").remove()
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        *("other-folder", "specdec-test-file", "specdec-test-link", "target")
    ]
