"""channel/segment.py: who makes, joins, holds and sweeps the segment. Real processes, real locks, real kills."""

import contextlib
import errno
import os
import random
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from channel_kit import Child, Ring, shared_folder, until
from specdec.channel import segment as module
from specdec.channel.layout import CONTROL_WORDS, DRAFT_WORDS, ENGINE_WORDS, IDENTITY, WORKER_WORDS, Layout
from specdec.channel.rings import Word
from specdec.channel.segment import Role, Segment, segment_path, start_ticks, sweep
from specdec.errors import ChannelError, SegmentInUse, SegmentMismatch, SegmentMissing, SettingsError, SetupError

LAYOUT = Layout(2, 2, 64)


@pytest.fixture
def folder():
    with shared_folder() as path:
        yield path


@pytest.fixture
def path(folder):
    return folder / "specdec-p"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@contextlib.contextmanager
def held_elsewhere(take):
    """Another process has run `take`, and keeps what it returned until it is killed."""
    ready = Word(Ring().words, 1)

    def work():
        kept = take()
        ready.value = 1
        while kept:
            signal.pause()

    with Child(work) as child:
        assert until(lambda: ready.value)
        yield child


# ---- names


@pytest.mark.parametrize(
    "pair", ["", ".", "..", "a/b", "../x", "-x", ".hidden", "_x", "a b", "ä", "x\n", "x\0", "a" * 65]
)
def test_a_pair_name_that_is_no_file_name_is_refused(pair):
    with pytest.raises(SettingsError, match="pair name"):
        segment_path(pair)


@pytest.mark.parametrize("pair", ["a", "0", "default", "pod-0.llama_3", "a" * 64])
def test_a_pair_name_is_the_files(pair):
    assert str(segment_path(pair)) == f"/dev/shm/specdec-{pair}"


# ---- create, attach, close


def test_both_ends_see_the_same_memory(path):
    lines = {"engine": ENGINE_WORDS, "draft": DRAFT_WORDS, "control": CONTROL_WORDS, "worker": WORKER_WORDS}
    every = [f"{line}.{name}" for line, words in lines.items() for name in words]
    with Segment.create(path, LAYOUT) as owner:
        assert names(path.parent) == [path.name]
        assert os.stat(path).st_size == LAYOUT.size
        assert os.stat(path).st_blocks * 512 >= LAYOUT.size  # claimed, so that no later page is missing
        assert owner.word("control.pid").value == os.getpid()
        assert owner.word("control.start").value == start_ticks(os.getpid())

        def join():
            with Segment.attach(path, Role.ENGINE) as engine:
                assert engine.layout == LAYOUT
                engine.vocabulary = 151_936, 2**64 - 1
                assert engine.word("engine.pid").value == os.getpid()
                for i, name in enumerate(every):
                    engine.word(name).value = 2**63 + i
                assert engine.writer("outcomes").write(b"to the draft")
                assert engine.writer("verdicts").write(b"to control")

        with Child(join) as child:
            assert child.wait() == 0
        assert owner.vocabulary == (151_936, 2**64 - 1)
        bells = ["engine.outcome_bell", "engine.verdict_bell"]
        assert [owner.word(n).value for n in every if n not in bells] == [
            2**63 + i for i, n in enumerate(every) if n not in bells
        ]
    assert names(path.parent) == []


def test_every_ring_has_one_end_here_and_one_there(path):
    with (
        Segment.create(path, LAYOUT) as owner,
        Segment.attach(path, Role.ENGINE) as engine,
        Segment.attach(path, Role.DRAFT) as draft,
    ):
        ends = {
            "verdicts": (engine.writer("verdicts"), owner.reader("verdicts")),
            "outcomes": (engine.writer("outcomes"), draft.reader("outcomes")),
            "proposals": (draft.writer("proposals"), engine.reader("proposals")),
        }
        for name, (writer, _) in ends.items():
            area = getattr(LAYOUT, name)
            for i in range(area.slots):
                body = f"{name} {i} ".encode()
                assert writer.write(body + b"." * (area.slot_bytes - 16 - len(body)))  # all of the slot
            assert not writer.write(b"one more")
        owner.orders.write(LAYOUT.max_sessions - 1, 1, 2, 3, 4, 5)
        for name, (_, reader) in ends.items():
            bodies = list(reader.read_all())
            assert [body.split(b".")[0].decode() for body in bodies] == [f"{name} {i} " for i in range(len(bodies))]
            assert len(bodies) == getattr(LAYOUT, name).slots
        assert engine.orders.read(LAYOUT.max_sessions - 1)["lease_ms"] == 5


def test_closing_twice_is_closing_once(path):
    owner = Segment.create(path, LAYOUT)
    owner.close()
    other = Segment.create(path, LAYOUT)  # takes the descriptor number that was freed
    owner.close()
    assert names(path.parent) == [path.name]
    with Segment.attach(path, Role.DRAFT) as draft:
        assert draft.alive(Role.OWNER)
    other.close()


def test_a_closed_owner_is_gone_for_those_who_stay(path):
    owner = Segment.create(path, LAYOUT)
    with Segment.attach(path, Role.DRAFT) as draft:
        assert draft.alive(Role.OWNER)
        assert draft.current
        owner.close()
        assert not draft.alive(Role.OWNER)
        assert not draft.current
        with Segment.create(path, LAYOUT) as newer:
            assert newer.current
            assert not draft.current  # the name is there again, but it is another segment
            assert not newer.alive(Role.DRAFT)


def test_an_owner_removes_its_own_file_only(path):
    owner = Segment.create(path, LAYOUT)
    path.unlink()
    with held_elsewhere(lambda: Segment.create(path, LAYOUT)):
        owner.close()
        assert names(path.parent) == [path.name]


# ---- roles


@pytest.mark.parametrize("role", [Role.ENGINE, Role.DRAFT])
def test_a_role_is_one_process_at_a_time(path, role):
    with Segment.create(path, LAYOUT) as owner:
        assert not owner.alive(role)
        with held_elsewhere(lambda: Segment.attach(path, role)) as holder:
            assert owner.alive(role)
            with pytest.raises(SegmentInUse, match=rf"already is this pair's {role.name.lower()}"):
                Segment.attach(path, role)
            other = Role.DRAFT if role is Role.ENGINE else Role.ENGINE
            Segment.attach(path, other).close()  # the other role is free
            holder.kill()
            assert not owner.alive(role)
        with Segment.attach(path, role):
            assert owner.alive(role)
            with pytest.raises(SegmentInUse):
                Segment.attach(path, role)  # the same process, too
        assert not owner.alive(role)


def test_a_role_is_free_once_closed_though_memory_is_still_mapped(path):
    with Segment.create(path, LAYOUT) as owner:
        draft = Segment.attach(path, Role.DRAFT)
        writer = draft.writer("proposals")
        draft.close()
        assert not owner.alive(Role.DRAFT)
        assert writer.write(b"late")  # no fault, whoever still holds an end
        Segment.attach(path, Role.DRAFT).close()


def test_a_child_of_the_owner_does_not_keep_the_role(path):
    """vLLM's processes and whatever else a verifier starts."""
    pid = Word(Ring().words, 1)

    def take():
        owner = Segment.create(path, LAYOUT)
        pid.value = subprocess.Popen(["sleep", "60"]).pid
        return owner

    with held_elsewhere(take) as holder:
        try:
            holder.kill()
            with pytest.raises(SegmentMissing):
                Segment.attach(path, Role.DRAFT)
        finally:
            os.kill(pid.value, signal.SIGKILL)


@pytest.mark.parametrize("left", [False, True], ids=["no file", "a dead one's file"])
def test_of_many_owners_one_wins(path, left):
    """Started at the same moment: the others are told, and none takes the winner's file away."""
    shared, starters = Ring(), 4
    results, go, finished = shared.words[8 : 8 + starters], Word(shared.words, 1), Word(shared.words, 2)

    def work(me):
        while not go.value:
            os.sched_yield()
        try:
            Segment.create(path, LAYOUT)
        except SegmentInUse:
            results[me] = 2
        else:
            results[me] = 1
        while not finished.value:
            time.sleep(0.001)

    for _ in range(15):
        if left:
            with held_elsewhere(lambda: Segment.create(path, LAYOUT)):
                pass
        shared.words[:] = 0
        children = [Child(lambda me=me: work(me)) for me in range(starters)]
        try:
            go.value = 1
            assert until(lambda: all(results))
            assert sorted(results.tolist()) == [1] + [2] * (starters - 1)
            with Segment.attach(path, Role.DRAFT) as draft:
                assert draft.current
                assert draft.word("control.pid").value == children[results.tolist().index(1)].pid
            assert names(path.parent) == [path.name]
            finished.value = 1
        finally:
            for child in children:
                child.kill()
        path.unlink(missing_ok=True)


# ---- what is not a live segment


def test_a_missing_segment_is_missing(path):
    with pytest.raises(SegmentMissing, match="is the verifier running"):
        Segment.attach(path, Role.DRAFT)


def test_a_dead_owners_segment_is_missing_too_and_swept(path):
    with held_elsewhere(lambda: Segment.create(path, LAYOUT)) as owner:
        owner.kill()
        with pytest.raises(SegmentMissing, match="gone"):
            Segment.attach(path, Role.DRAFT)
        with Segment.create(path, Layout(3, 3, 3)) as newer:
            assert newer.current
            with Segment.attach(path, Role.ENGINE) as engine:
                assert engine.layout == Layout(3, 3, 3)
        assert names(path.parent) == []


def test_the_draft_of_a_dead_owner_keeps_no_new_one_from_starting(path):
    with (
        held_elsewhere(lambda: Segment.create(path, LAYOUT)) as owner,
        held_elsewhere(lambda: Segment.attach(path, Role.DRAFT)),
    ):
        owner.kill()
        with Segment.create(path, LAYOUT) as newer:
            assert not newer.alive(Role.DRAFT)
            Segment.attach(path, Role.DRAFT).close()


def identity(**changes):
    made = np.zeros(1, IDENTITY)
    made[0] = (module.MAGIC, module.VERSION, 2, 2, 64, 0, 0, LAYOUT.hash, LAYOUT.size, 1, 1, 0, 0)
    for name, value in changes.items():
        made[name] = value
    return made.tobytes().ljust(LAYOUT.size, b"\0")


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "not a specdec segment"),
        (identity()[: IDENTITY.itemsize - 1], "not a specdec segment"),
        (b"something else" * 1000, "not a specdec segment"),
        (identity(magic=module.MAGIC + 1), "not a specdec segment"),
        (identity(version=module.VERSION + 1), f"version {module.VERSION + 1}, this process speaks {module.VERSION}"),
        (identity(layout_hash=LAYOUT.hash ^ 1), "same specdec release on both sides"),
        (identity(max_sessions=3), "same specdec release on both sides"),
        (identity(frame_tokens=65), "same specdec release on both sides"),
        (identity(max_steps=2**32 - 1, max_sessions=2**32 - 1), "same specdec release on both sides"),
        (identity()[:-1], "shorter than its header says"),
        (identity()[: IDENTITY.itemsize], "shorter than its header says"),
    ],
)
def test_another_kind_of_file_is_a_mismatch(path, raw, why):
    path.write_bytes(raw)
    with pytest.raises(SegmentMismatch, match=why):
        Segment.attach(path, Role.DRAFT)
    path.write_bytes(identity())  # as it would be right: the test's own check
    with pytest.raises(SegmentMissing):
        Segment.attach(path, Role.DRAFT)


def test_a_segment_made_by_another_release_is_a_mismatch(path, monkeypatch):
    with held_elsewhere(lambda: Segment.create(path, LAYOUT)):
        monkeypatch.setattr(module, "VERSION", 2)
        with pytest.raises(SegmentMismatch):
            Segment.attach(path, Role.DRAFT)


@pytest.mark.skipif(os.getuid() != 0, reason="needs a second user")
def test_another_users_segment_is_told_by_name(path):
    os.chmod(path.parent, 0o777)
    with Segment.create(path, LAYOUT):
        os.chmod(path, 0o600)

        def work():
            os.seteuid(65534)
            with pytest.raises(ChannelError, match=f"{path}: Permission denied"):
                Segment.attach(path, Role.DRAFT)
            with pytest.raises(ChannelError, match=f"{path}: Permission denied"):
                Segment.create(path, LAYOUT)

        with Child(work) as child:
            assert child.wait() == 0
        assert names(path.parent) == [path.name]


# ---- the sweep


def test_foreign_files_and_live_segments_are_left_alone(folder):
    path = folder / "specdec-dead"
    foreign = {
        "specdec-foreign-1": b"somebody's bytes",
        "specdec-foreign-2": b"",
        ".specdec-foreign-3": b"not ours either",
        ".specdec-foreign.4": b"a name that ends with a number",
        f".specdec-x.{2**22 + 1}": b"a name that ends with no process",
        "other-1": module.MAGIC.to_bytes(8, "little"),
        "xspecdec-2": module.MAGIC.to_bytes(8, "little"),
    }
    for name, raw in foreign.items():
        (folder / name).write_bytes(raw)
    (folder / "specdec-folder").mkdir()
    os.mkfifo(folder / "specdec-pipe")
    outside = folder / "outside"
    outside.write_bytes(identity())
    (folder / "specdec-link").symlink_to(outside)
    kept = {*names(folder), "specdec-live"}
    with held_elsewhere(lambda: Segment.create(folder / "specdec-live", LAYOUT)):
        with held_elsewhere(lambda: Segment.create(path, LAYOUT)) as dead:
            assert set(names(folder)) == kept | {path.name}
            assert sweep(folder) == []
            dead.kill()
            assert sweep(folder) == [path]
            assert set(names(folder)) == kept
            assert sweep(folder) == []
            with Segment.create(path, LAYOUT):
                assert set(names(folder)) == kept | {path.name}
            assert set(names(folder)) == kept
        assert {name: (folder / name).read_bytes() for name in foreign} == foreign
        assert outside.read_bytes() == identity()
        Segment.attach(folder / "specdec-live", Role.DRAFT).close()


@pytest.mark.parametrize("moment", ["opened", "looked at"])
def test_a_sweep_never_takes_a_segment_that_came_in_between(path, monkeypatch, moment):
    """Two verifiers start where a third has died: one's sweep must not remove what the other has made since."""
    with held_elsewhere(lambda: Segment.create(path, LAYOUT)):
        pass
    made, real_open, real_stat = [], os.open, os.stat

    def another_starts():
        monkeypatch.undo()
        with contextlib.suppress(SegmentInUse):  # told to try again: that is harmless
            made.append(Segment.create(path, LAYOUT))

    def fake_open(file, *arguments, **options):
        fd = real_open(file, *arguments, **options)
        if file == path:
            another_starts()
        return fd

    def fake_stat(file, *arguments, **options):
        result = real_stat(file, *arguments, **options)
        if file == path:
            another_starts()
        return result

    if moment == "opened":
        monkeypatch.setattr(os, "open", fake_open)
    else:
        monkeypatch.setattr(os, "stat", fake_stat)
    sweep(path.parent)
    assert all(segment.current for segment in made)
    assert bool(made) == (moment == "opened")
    for segment in made:
        segment.close()
    assert names(path.parent) == []


def test_a_foreign_file_in_the_way_is_named_and_kept(path):
    path.write_bytes(b"somebody's bytes")
    with pytest.raises(SegmentInUse, match="was not made by specdec: remove it or choose another --pair"):
        Segment.create(path, LAYOUT)
    assert path.read_bytes() == b"somebody's bytes"
    assert names(path.parent) == [path.name]


def test_a_live_owner_is_named(path):
    with held_elsewhere(lambda: Segment.create(path, LAYOUT)) as owner:
        before = path.stat().st_ino
        with pytest.raises(SegmentInUse, match=rf"in use by process {owner.pid}: .* choose another --pair"):
            Segment.create(path, LAYOUT)
        assert path.stat().st_ino == before
        assert names(path.parent) == [path.name]


# ---- no room


@contextlib.contextmanager
def small_memory(megabytes):
    """A folder of so much shared memory. Skips where it may not be mounted."""
    with shared_folder() as folder:
        made = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", folder], capture_output=True, check=False
        )
        if made.returncode:
            pytest.skip("needs the right to mount")
        try:
            yield folder
        finally:
            subprocess.run(["umount", folder], check=True)


LARGE = Layout(64, 8, 8192)


def test_too_little_shared_memory_is_told_with_the_fix():
    with small_memory(1) as folder:
        with pytest.raises(SetupError) as raised:
            Segment.create(folder / "specdec-p", LARGE)
        message = str(raised.value)
        assert f"needs {LARGE.size / 2**20:.1f} MB, {folder} has 1.0 MB free" in message
        for fix in ("--shm-size", "emptyDir", "--max-num-seqs"):
            assert fix in message
        assert names(folder) == []


def test_too_little_shared_memory_is_told_where_nothing_can_be_mounted(path, monkeypatch):
    real = os.statvfs(path.parent)
    fields = {name: getattr(real, name) for name in ("f_frsize",)}
    monkeypatch.setattr(os, "statvfs", lambda _: type("FakeStatvfs", (), {**fields, "f_bavail": 3})())
    with pytest.raises(SetupError, match=r"needs \d+\.\d MB, .* has 0\.0 MB free: enlarge it .*--shm-size"):
        Segment.create(path, LARGE)
    assert names(path.parent) == []


def test_memory_that_goes_while_it_is_claimed_is_told_and_given_back(monkeypatch):
    real = os.statvfs
    with small_memory(1) as folder:
        monkeypatch.setattr(os, "statvfs", lambda _: real("/dev/shm"))
        with pytest.raises(SetupError, match=f"cannot make .*specdec-p: {os.strerror(errno.ENOSPC)}"):
            Segment.create(folder / "specdec-p", LARGE)
        assert names(folder) == []
        free = real(folder)
        assert free.f_bavail == free.f_blocks


# ---- killed at any moment


def trace_lines(on_line):
    """Calls `on_line` for every line of segment.py that this process is about to run."""

    def trace(frame, event, _):
        if frame.f_code.co_filename != module.__file__:
            return None
        if event == "line":
            on_line()
        return trace

    sys.settrace(trace)


def lines_of_create(path):
    """How many lines of segment.py a creation runs."""
    count = Word(Ring().words, 1)

    def work():
        trace_lines(lambda: setattr(count, "value", count.value + 1))
        Segment.create(path, LAYOUT)

    with Child(work) as child:
        assert child.wait() == 0
    return count.value


def test_killed_at_any_line_of_creation_the_next_start_works(path):
    """In a container every start has the same pid, and an emptyDir keeps what the last one left."""

    def work(line):
        left = [line]

        def on_line():
            left[0] -= 1
            if not left[0]:
                os.kill(mine, signal.SIGKILL)

        mine, next_one, real = os.getpid(), os.getppid(), module.start_ticks
        if line % 2:
            os.getpid = lambda: next_one
            module.start_ticks = lambda pid: real(pid) and 1
        trace_lines(on_line)
        Segment.create(path, LAYOUT)

    total, left_behind = lines_of_create(path), 0
    assert total > 40
    for line in range(1, total + 1):
        with Child(lambda line=line: work(line)) as child:
            assert child.wait() == -signal.SIGKILL
        left_behind += bool(names(path.parent))
        with Segment.create(path, LAYOUT) as owner:
            assert names(path.parent) == [path.name]
            assert owner.current
            Segment.attach(path, Role.DRAFT).close()
        assert names(path.parent) == []
    assert left_behind > 0  # the last line's


def test_killed_at_random_thirty_times_nothing_is_left_over(path):
    rng, layout = random.Random(7), Layout(64, 8, 2048)
    free = os.statvfs(path.parent).f_bavail
    for _ in range(30):

        def work():
            while True:
                Segment.create(path, layout).close()

        with Child(work) as child:
            time.sleep(rng.uniform(0, 0.015))
            child.kill()
        with Segment.create(path, layout):
            assert names(path.parent) == [path.name]
        assert names(path.parent) == []
    lost_bytes = (free - os.statvfs(path.parent).f_bavail) * 4096
    assert lost_bytes < 10 * layout.size  # thirty would show; others use this memory too


def test_a_process_is_named_by_its_start_too():
    with Child(signal.pause) as child:
        assert start_ticks(os.getpid()) <= start_ticks(child.pid)
    with pytest.raises(FileNotFoundError):
        start_ticks(child.pid)
    assert re.fullmatch(r"\d+", str(start_ticks(os.getpid())))
