"""settings.py, and every service's own settings."""

import os
import re

import pytest
from pydantic import ValidationError

from specdec.draft.settings import DraftSettings, cpu_has_bfloat16
from specdec.errors import SettingsError
from specdec.router.settings import RouterSettings
from specdec.stack import UpSettings
from specdec.verifier.settings import VerifierSettings

SERVICES = [RouterSettings, VerifierSettings, DraftSettings, UpSettings]
each_service = pytest.mark.parametrize("kind", SERVICES, ids=lambda kind: kind.section)
# A value no default has, for the fields that all tests of precedence use.
OTHER = {int: ["61", "62", "63"], float: ["1.5", "2.5", "3.5"], str: ["one", "two", "three"]}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith("SPECDEC_"):
            monkeypatch.delenv(name)


@pytest.fixture
def config(tmp_path):
    """Writes a settings file and returns its path."""

    def write(text):
        path = tmp_path / "specdec.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return write


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable(kind, name: str) -> str:
    return kind.model_config["env_prefix"] + name.upper()


def fields():
    return [
        pytest.param(kind, name, id=f"{kind.section}-{name}")
        for kind in SERVICES
        for name, field in kind.model_fields.items()
        if field.annotation in OTHER
    ]


def required(kind) -> list[str]:
    return ["--model", "m"] if kind is VerifierSettings else []


def refusal(kind, *argv: str) -> str:
    with pytest.raises(SettingsError) as caught:
        kind.load(list(argv))
    return str(caught.value)


# ---- precedence


@pytest.mark.parametrize(("kind", "name"), fields())
def test_a_flag_beats_the_environment_beats_the_file_beats_the_default(kind, name, config, monkeypatch):
    as_flag, in_environment, in_file = OTHER[kind.model_fields[name].annotation]
    argv = [] if name == "model" else required(kind)
    read = kind.model_fields[name].annotation
    path = config(f"{kind.section}:\n  {name}: {in_file}\n")
    if not (name == "model" and required(kind)):
        assert getattr(kind.load(argv), name) == kind.model_fields[name].default
    assert getattr(kind.load([*argv, "--config", path]), name) == read(in_file)
    monkeypatch.setenv(variable(kind, name), in_environment)
    assert getattr(kind.load([*argv, "--config", path]), name) == read(in_environment)
    assert getattr(kind.load([*argv, "--config", path, flag(name), as_flag]), name) == read(as_flag)
    assert getattr(kind.load([*argv, f"{flag(name)}={as_flag}"]), name) == read(as_flag)


def test_what_the_file_does_not_say_keeps_its_default(config):
    settings = RouterSettings.load(["--config", config("router:\n  port: 81\nverifier:\n  port: 82\n")])
    assert (settings.port, settings.window) == (81, RouterSettings.model_fields["window"].default)


def test_settings_cannot_be_changed_afterwards():
    with pytest.raises(ValidationError):
        RouterSettings.load([]).port = 1


def test_loading_one_leaves_the_next_alone(config):
    path = config("router:\n  port: 81\n")
    assert RouterSettings.load(["--config", path]).port == 81
    assert RouterSettings.load([]).port == 8000


# ---- lists


@pytest.mark.parametrize("argv", ["--pairs a:1 --pairs b:2", "--pairs a:1,b:2", '--pairs=["a:1","b:2"]'])
def test_a_list_as_flags(argv):
    assert RouterSettings.load(argv.split()).pairs == ["a:1", "b:2"]


@pytest.mark.parametrize("value", ["a:1,b:2", "a:1, b:2", '["a:1", "b:2"]'])
def test_a_list_in_the_environment(monkeypatch, value):
    monkeypatch.setenv("SPECDEC_ROUTER_PAIRS", value)
    assert RouterSettings.load([]).pairs == ["a:1", "b:2"]
    assert RouterSettings.load(["--pairs", "c:3"]).pairs == ["c:3"]


def test_a_list_in_the_file(config):
    assert RouterSettings.load(["--config", config("router:\n  pairs: ['a:1', 'b:2']\n")]).pairs == ["a:1", "b:2"]


@pytest.mark.parametrize("value", ["", "[]", "host", "host:", ":1", "a:1,,b:2", "a b:1"])
def test_a_pair_that_is_no_address_is_refused(monkeypatch, value):
    monkeypatch.setenv("SPECDEC_ROUTER_PAIRS", value)
    assert refusal(RouterSettings).startswith("--pairs, SPECDEC_ROUTER_PAIRS: ")


# ---- errors


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (RouterSettings, "port", "0"),
        (RouterSettings, "port", "http"),
        (RouterSettings, "port", ""),
        (RouterSettings, "max_steps", "65"),
        (RouterSettings, "window", "0"),
        (RouterSettings, "lease_ms", "49"),
        (RouterSettings, "max_body_mb", "0"),
        (VerifierSettings, "max_num_seqs", "0"),
        (VerifierSettings, "max_steps", "0"),
        (VerifierSettings, "draft_deadline_ms", "-1"),
        (VerifierSettings, "model", ""),
        (DraftSettings, "health_port", "65536"),
        (UpSettings, "steps", "-1"),
    ],
)
def test_a_bad_value_names_flag_and_variable_wherever_it_stands(kind, name, value, config, monkeypatch):
    argv = [] if name == "model" else required(kind)
    start = f"{flag(name)}, {variable(kind, name)}: "
    assert refusal(kind, *argv, f"{flag(name)}={value}").startswith(start)
    assert repr(value) in refusal(kind, *argv, f"{flag(name)}={value}")
    assert refusal(kind, *argv, "--config", config(f"{kind.section}:\n  {name}: '{value}'\n")).startswith(start)
    monkeypatch.setenv(variable(kind, name), value)
    assert refusal(kind, *argv).startswith(start)


def test_all_bad_values_are_told_at_once(monkeypatch):
    monkeypatch.setenv("SPECDEC_ROUTER_WINDOW", "-3")
    lines = refusal(RouterSettings, "--port", "x", "--steps", "1000").splitlines()
    assert sorted(line.partition(",")[0] for line in lines) == ["--port", "--steps", "--window"]


def test_what_is_required_is_asked_for():
    assert refusal(VerifierSettings) == "--model, SPECDEC_VERIFIER_MODEL: Field required"


@each_service
def test_an_unknown_key_in_the_file_is_refused(kind, config):
    path = config(f"{kind.section}:\n  no_such: 1\n")
    message = refusal(kind, *required(kind), "--config", path)
    assert message == f"{path}: {kind.section}.no_such: there is no such setting (got 1)"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ruoter:\n  port: 1\n", "there is no service 'ruoter'; the sections are router, verifier"),
        ("router:\n  port: 1\n3: 4\n", "there is no service 3"),
        ("", "there is no section; write one"),
        ("router: [1]\n", "must be a mapping"),
        ("router: 5\n", "must be a mapping"),
        ("- router\n", ""),
        ("router: [\n", "expected the node content"),
        (b"\xff\xfe\x00router", "unacceptable character"),
        ("router: {3: 4}\n", ""),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_by_name(config, text, words):
    path = config(text)
    message = refusal(RouterSettings, "--config", path)
    assert message.startswith(f"{path}: ")
    assert words in message


def test_a_file_about_other_services_only_changes_nothing(config):
    argv = ["--config", config("verifier:\n  port: 1\n")]
    assert RouterSettings.load(argv).model_dump() == RouterSettings.load([]).model_dump()


def test_a_missing_file_is_named(tmp_path, monkeypatch):
    for argv in (["--config", str(tmp_path / "none")], [f"--config={tmp_path}/none"], ["--config", str(tmp_path)]):
        assert refusal(RouterSettings, *argv).startswith(f"--config, SPECDEC_CONFIG: there is no file {tmp_path}")
    assert refusal(RouterSettings, "--config") == "--config needs a file name"
    monkeypatch.setenv("SPECDEC_CONFIG", str(tmp_path / "gone"))
    assert refusal(RouterSettings).endswith(f"no file {tmp_path}/gone")


def test_the_file_may_be_named_in_any_form(config, monkeypatch, tmp_path):
    path = config("router:\n  port: 81\n")
    assert RouterSettings.load([f"--config={path}"]).port == 81
    assert RouterSettings.load(["--steps", "2", "--config", path, "--window", "3"]).port == 81
    monkeypatch.setenv("SPECDEC_CONFIG", path)
    assert RouterSettings.load([]).port == 81
    (tmp_path / "other.yaml").write_text("router:\n  port: 82\n")
    assert RouterSettings.load(["--config", str(tmp_path / "other.yaml")]).port == 82
    monkeypatch.setenv("SPECDEC_CONFIG", "")
    assert RouterSettings.load([]).port == 8000


# ---- help


@each_service
def test_help_lists_every_setting_with_what_it_does_and_how_else_it_is_set(kind, capsys):
    with pytest.raises(SystemExit) as ended:
        kind.load(["--help"])
    assert ended.value.code == 0
    text = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert f"usage: specdec {kind.section}" in text
    for name, field in kind.model_fields.items():
        assert re.search(f" {flag(name)}[ ,]", text)
        assert field.description
        assert re.sub(r"\s+", " ", field.description) in text
    assert kind.model_config["env_prefix"] + "<NAME>" in text
    assert "--config FILE or SPECDEC_CONFIG" in text
    assert f"under '{kind.section}:'" in text


@each_service
def test_unknown_flags_are_refused(kind, capsys):
    with pytest.raises(SystemExit) as ended:
        kind.load([*required(kind), "--no-such-flag", "1"])
    assert ended.value.code == 2
    assert "--no-such-flag" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cpuinfo", "kind"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512_bf16 sha_ni\n", "bfloat16"),
        ("processor\t: 0\nflags\t\t: fpu avx2 avx512f\n", "float32"),
        ("processor\t: 0\nFeatures\t: fp asimd sve bf16 i8mm\n", "bfloat16"),
        ("processor\t: 0\nFeatures\t: fp asimd\n", "float32"),
        ("", "float32"),
    ],
)
def test_a_draft_computes_in_bfloat16_where_the_processor_does(tmp_path, monkeypatch, cpuinfo, kind):
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    found = cpu_has_bfloat16(tmp_path / "cpuinfo")
    monkeypatch.setattr("specdec.draft.settings.cpu_has_bfloat16", lambda: found)
    assert DraftSettings.load([]).computed_in == kind
    assert DraftSettings.load(["--device", "cuda:0"]).computed_in == "bfloat16"
    assert DraftSettings.load(["--dtype", "float16"]).computed_in == "float16"
