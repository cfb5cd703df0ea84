"""tools/setup.py and specdec.model: what a fresh machine meets first. No network, no torch: steps are fakes."""

import ast
import errno
import importlib.util
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from specdec import model
from specdec.errors import SetupError

SETUP = Path(__file__).parent.parent / "tools" / "setup.py"
spec = importlib.util.spec_from_file_location("specdec_setup", SETUP)
assert spec
assert spec.loader
setup = importlib.util.module_from_spec(spec)
spec.loader.exec_module(setup)

GOOD = setup.Machine(
    system="Linux",
    arch="x86_64",
    avx2=True,
    glibc=(2, 36),
    python=(3, 11),
    missing_modules=(),
    libnuma=True,
    memory_b=16 * setup.GB,
    disk_b=50 * setup.GB,
    shm_b=setup.GB,
)


def problems(**changes):
    return setup.problems(GOOD._replace(**changes), Path("/x/.venv"), 11 * setup.GB)


# ---- the checks


def test_a_good_machine_has_no_problem():
    assert problems() == []
    assert problems(arch="aarch64", avx2=False, glibc=(2, 31), python=(3, 14)) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"system": "Darwin"}, ["macOS", "CPU image"]),
        ({"system": "Windows"}, ["Windows", "CPU image"]),
        ({"arch": "riscv64"}, ["riscv64", "x86-64"]),
        ({"avx2": False}, ["AVX2"]),
        ({"glibc": (2, 28)}, ["glibc 2.31", "2.28", "Debian"]),
        ({"glibc": ()}, ["glibc 2.31", "another C library"]),
        ({"python": (3, 10)}, ["this is 3.10", "python3.12", "PYTHON="]),
        ({"python": (3, 15)}, ["this is 3.15"]),
        ({"missing_modules": ("ensurepip",)}, ["ensurepip", "python3-venv", "python3.11-venv", "python3-libs"]),
        ({"libnuma": False}, ["libnuma1", "numactl-libs"]),
        ({"memory_b": 8 * setup.GB}, ["8.0 GB", "9 GB"]),
        ({"disk_b": 3 * setup.GB}, ["3.0 GB", "11.0 GB", "/x/.venv", "TORCH_INDEX="]),
        ({"shm_b": 10 * setup.MB}, ["10 MB", "256 MB", "--shm-size"]),
        ({"shm_b": 0}, ["/dev/shm", "--shm-size"]),
    ],
)
def test_a_problem_names_its_cure(changes, words):
    (problem,) = problems(**changes)
    assert [word for word in words if word not in problem] == []


def test_all_problems_are_reported_at_once(monkeypatch, tmp_path, capsys):
    bad = GOOD._replace(python=(3, 10), libnuma=False, shm_b=0)
    monkeypatch.setattr(setup, "probe", lambda venv: bad)
    monkeypatch.setattr(setup, "build", lambda *_: pytest.fail("nothing may be installed"))
    assert setup.main(["--venv", str(tmp_path / "venv")]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n  - ") == 3
    assert "libnuma1" in err


def test_an_old_python_can_read_it():
    ast.parse(SETUP.read_text(), feature_version=(3, 6))
    assert "from __future__" not in SETUP.read_text()


def test_probe_of_this_machine(tmp_path):
    here = setup.probe(tmp_path / "not" / "yet")
    assert here.system == "Linux"
    assert here.python == sys.version_info[:2]
    assert min(here.memory_b, here.disk_b, here.shm_b) > 0


def test_what_does_not_load_is_missing():
    assert not setup._works(setup.ctypes.CDLL, "libnosuch.so.1")
    assert not setup._works(importlib.import_module, "no_such_module")
    assert setup._works(importlib.import_module, "venv")


V2 = ("", "memory.max", "memory.current", "inactive_file")
V1 = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


@pytest.mark.parametrize("version", [V1, V2])
@pytest.mark.parametrize(
    ("limit", "available_b"),
    [("max", 16 * 2**30), (str(4 * 2**30), 3 * 2**30), (str(2**62), 16 * 2**30), ("1000", 0)],
)
def test_memory_is_what_the_container_has_left(tmp_path, version, limit, available_b):
    folder, *names = version
    (tmp_path / folder).mkdir(exist_ok=True)
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal: 99 kB\nMemAvailable:   {16 * 2**20} kB\n")
    assert setup._memory(meminfo, tmp_path) == 16 * 2**30
    for name, text in zip(names, [limit, str(3 * 2**30), ""], strict=True):
        if text:
            (tmp_path / folder / name).write_text(text + "\n")
    # Of the 3 GiB used, 2 are page cache.
    (tmp_path / folder / "memory.stat").write_text(f"anon 1\n{names[2]} {2 * 2**30}\n")
    assert setup._memory(meminfo, tmp_path) == available_b


# ---- the steps


@pytest.fixture
def venv(tmp_path, monkeypatch):
    """A place for an environment; `setup` thinks the machine is good, and its steps are what a test puts in."""
    monkeypatch.setattr(setup, "probe", lambda venv: GOOD)
    return tmp_path / "venv"


def script(text):
    return [sys.executable, "-c", text]


def make_venv(venv):
    (venv / "bin").mkdir(parents=True)
    setup._library(venv).mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys.executable)


def test_the_second_run_does_nothing(venv, monkeypatch, capsys):
    log = venv.parent / "log"
    making = (
        f"import os; os.makedirs({str(venv / 'bin')!r}); os.symlink({sys.executable!r}, {str(venv / 'bin/python')!r})"
    )
    fakes = [("an environment", script(making)), ("a package", script(f"open({str(log)!r}, 'a').write('ran ')"))]
    monkeypatch.setattr(setup, "steps", lambda *_: fakes)
    assert setup.main(["--venv", str(venv)]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "[1/2] an environment" in err
    assert "[2/2] a package" in err
    assert (venv / setup.STAMP).is_file()
    assert not (venv / "tmp").exists()

    started = time.monotonic()
    assert setup.main(["--venv", str(venv)]) == 0
    assert time.monotonic() - started < 0.5
    assert log.read_text() == "ran "
    assert capsys.readouterr() == ("", "")


def test_a_changed_lock_is_installed(venv, monkeypatch, tmp_path):
    make_venv(venv)
    monkeypatch.setattr(setup, "steps", lambda *_: [("nothing", script(""))] * 4)
    assert setup.main(["--venv", str(venv)]) == 0
    assert setup.is_built(venv)
    lock = tmp_path / "lock.txt"
    lock.write_bytes(setup.LOCK.read_bytes() + b"one-more==1.0\n")
    monkeypatch.setattr(setup, "LOCK", lock)
    assert not setup.is_built(venv)


def test_a_failed_step_is_named_and_leaves_no_stamp(venv, monkeypatch, capsys):
    make_venv(venv)
    (venv / setup.STAMP).write_text("an older one\n")
    failing = "print('no such release'); raise SystemExit(1)"
    later = ("later", script(f"open({str(venv / 'later')!r}, 'w')"))
    monkeypatch.setattr(setup, "steps", lambda *_: [("torch", script(failing)), later, later, later])
    assert setup.main(["--venv", str(venv)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "no such release" in err
    assert "stopped at [1/4] torch" in err
    assert not (venv / setup.STAMP).exists()
    assert not (venv / "later").exists()
    assert not (venv / "tmp").exists()


def test_check_only_installs_nothing(venv, monkeypatch):
    monkeypatch.setattr(setup, "build", lambda *_: pytest.fail("nothing may be installed"))
    assert setup.main(["--venv", str(venv), "--check-only"]) == 0


def test_the_order_of_the_steps(venv):
    commands = [command for _, command in setup.steps(venv, "file:///an/index")]
    assert commands[0][1:] == ["-m", "venv", str(venv)]
    torch, lock, rest, editable = commands[1:]
    assert torch[-3:] == ["torch==2.13.0", "--index-url", "file:///an/index"]
    assert "--no-deps" not in torch
    assert lock[-3:] == ["--no-deps", "-r", str(setup.LOCK)]
    assert "--no-deps" in rest
    assert editable[-2:] == ["-e", str(setup.ROOT)]
    assert all("--disable-pip-version-check" in command for command in commands[1:])
    assert "--index-url" not in setup.steps(venv, None)[1][1]


def test_only_a_broken_environment_is_cleared(venv):
    venv.mkdir()
    (venv / "a file of the user's").touch()
    assert "--clear" not in setup.steps(venv, None)[0][1]
    (venv / "pyvenv.cfg").touch()
    assert "--clear" in setup.steps(venv, None)[0][1]


def test_another_pythons_environment_is_refused(venv, capsys):
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys.executable)
    (venv / "lib" / "python3.99").mkdir(parents=True)
    assert setup.main(["--venv", str(venv)]) == 1
    assert "another Python" in capsys.readouterr().err


def test_disk_needs_shrink_with_what_is_there(venv):
    assert setup.disk_needed(venv, None) > setup.disk_needed(venv, "file:///an/index") >= 5 * setup.GB
    (setup._library(venv) / "site-packages" / "torch-2.13.0+cpu.dist-info").mkdir(parents=True)
    assert setup.disk_needed(venv, None) == 3 * setup.GB
    (venv / setup.STAMP).touch()
    assert setup.disk_needed(venv, None) < setup.GB


# ---- the demo model


def fill(target):
    for name in model.FILES:
        (target / name).write_text(name)


@pytest.fixture
def converting(monkeypatch):
    """`demo_model` with a conversion that takes no time; the list holds the folders it was asked to fill."""
    asked = []

    def convert(target):
        asked.append(target)
        fill(target)

    monkeypatch.setattr(model, "NEEDED", {})
    monkeypatch.setattr(model, "convert_in_child", convert)
    return asked


def test_aarch64_needs_an_index_with_torchs_cpu_build(tmp_path):
    (problem,) = setup.index_problems("aarch64", tmp_path, None)
    assert "TORCH_INDEX" in problem
    assert setup.index_problems("aarch64", tmp_path, "file:///an/index") == []
    assert setup.index_problems("x86_64", tmp_path, None) == []
    (setup._library(tmp_path) / "site-packages" / "torch-2.13.0+cpu.dist-info").mkdir(parents=True)
    assert setup.index_problems("aarch64", tmp_path, None) == []


def test_the_model_is_converted_once(converting, tmp_path):
    folder = model.demo_model(tmp_path)
    assert folder == tmp_path / "models" / model.NAME
    assert model.demo_model(tmp_path) == folder
    assert len(converting) == 1
    assert converting[0].parent == folder.parent  # the same file system, so that a rename is one step
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == [model.NAME]


def test_a_failed_conversion_leaves_nothing(converting, tmp_path, monkeypatch):
    def half(target):
        (target / "config.json").touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(model, "convert_in_child", half)
        with pytest.raises(SetupError, match=r"No space left.*SPECDEC_CACHE"):
            model.demo_model(tmp_path)
        patch.setattr(model, "convert_in_child", lambda target: (target / "config.json").touch())
        with pytest.raises(SetupError, match=r"made no .*model\.safetensors"):
            model.demo_model(tmp_path)
    assert [path for path in (tmp_path / "models").iterdir() if path.is_dir()] == []
    model.demo_model(tmp_path)


def test_an_incomplete_folder_is_made_anew(converting, tmp_path):
    folder = model.demo_model(tmp_path)
    (folder / "model.safetensors").unlink()
    model.demo_model(tmp_path)
    assert len(converting) == 2
    assert (folder / "model.safetensors").exists()


# Run as a program: a conversion that fills the folder slowly, and notes when it was at work.
SLOW = """
import sys, time
from pathlib import Path
from specdec import model

def convert(target):
    for name in model.FILES:
        (target / name).write_text(name)
        print("wrote", flush=True)
        time.sleep(float(sys.argv[2]))

model.NEEDED = {}
model.convert_in_child = convert
folder = model.demo_model(Path(sys.argv[1]))
print("seen", all((folder / name).read_text() == name for name in model.FILES))
"""


def start_slow(cache, pause_s):
    return subprocess.Popen([sys.executable, "-c", SLOW, str(cache), str(pause_s)], stdout=subprocess.PIPE, text=True)


def test_several_at_once_convert_once(tmp_path):
    children = [start_slow(tmp_path, 0.05) for _ in range(4)]
    said = [child.communicate(timeout=60)[0] for child in children]
    assert [text.splitlines()[-1] for text in said] == ["seen True"] * 4
    assert sum(text.count("wrote") for text in said) == len(model.FILES)


def test_a_killed_conversion_does_not_stop_the_next(converting, tmp_path):
    with start_slow(tmp_path, 60) as child:
        assert child.stdout.readline() == "wrote\n"
        child.send_signal(signal.SIGKILL)
    assert not (tmp_path / "models" / model.NAME).exists()
    folder = model.demo_model(tmp_path)
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == [model.NAME]


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(model, "NEEDED", {"no_such_module": "its-package", "os": "python"})
    with pytest.raises(SetupError, match=r"package its-package, not installed"):
        model.demo_model(tmp_path)


def test_an_unwritable_cache_is_named(converting, tmp_path):
    (tmp_path / "models").write_text("a file, not a folder")
    with pytest.raises(SetupError, match=r"cannot be written.*SPECDEC_CACHE"):
        model.demo_model(tmp_path)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("echo noise; echo 'OSError: no space' >&2; exit 1", r"failed:\nOSError: no space"),
        ("kill -9 $$", r"signal 9"),
    ],
)
def test_a_failing_child_is_quoted(tmp_path, monkeypatch, body, words):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{body}\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(model, "NEEDED", {})
    with pytest.raises(SetupError, match=words):
        model.demo_model(tmp_path)


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert model.cache_folder() == tmp_path / "own"
    monkeypatch.delenv("SPECDEC_CACHE")
    assert model.cache_folder() == tmp_path / "xdg" / "specdec"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert model.cache_folder() == tmp_path / "home" / ".cache" / "specdec"


def test_the_command_prints_the_folder_without_torch(tmp_path):
    folder = tmp_path / "models" / model.NAME
    folder.mkdir(parents=True)
    fill(folder)
    code = "import sys; from specdec.model import main; main(); sys.exit('torch' in sys.modules)"
    child = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"SPECDEC_CACHE": str(tmp_path)}, capture_output=True, text=True
    )
    assert (child.returncode, child.stdout, child.stderr) == (0, f"{folder}\n", "")
