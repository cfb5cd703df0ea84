"""logs.py: what a line looks like, and what no line says."""

import json
import logging

import pytest

from specdec.errors import SettingsError
from specdec.logs import FIELDS, request_id, setup_logging


@pytest.fixture(autouse=True)
def _root_logger_as_it_was():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers = []
    yield
    root.handlers, root.level = handlers, level


@pytest.fixture
def in_request():
    """A request is being worked on."""
    token = request_id.set("specdec-1")
    yield
    request_id.reset(token)


def lines(capsys) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_a_console_line_names_service_and_level(capsys):
    setup_logging("router", "INFO")
    logging.getLogger("specdec.x").info("hello")
    logging.getLogger("httpx").info("noise")
    logging.getLogger("specdec.x").debug("detail")
    (line,) = lines(capsys)
    assert line.endswith(" router INFO hello")


def test_a_console_line_of_a_request_has_its_id(capsys, in_request):
    setup_logging("router")
    logging.getLogger("specdec.x").info("hello %d", 1)
    (line,) = lines(capsys)
    assert line.endswith(" router INFO [specdec-1] hello 1")


def test_a_json_line_has_id_fields_and_exception(capsys, in_request):
    setup_logging("draft", form="json")
    logging.getLogger("specdec.x").warning("über %s\nlines", "two", extra={FIELDS: {"status": 200}})
    try:
        raise LookupError("a bug")
    except LookupError:
        logging.getLogger("specdec.x").exception("failed")
    first, second = map(json.loads, lines(capsys))
    assert first.pop("time").endswith("+00:00")
    assert first == {
        "level": "WARNING",
        "service": "draft",
        "logger": "specdec.x",
        "message": "über two\nlines",
        "request_id": "specdec-1",
        "status": 200,
    }
    assert "LookupError: a bug" in second["exception"]


def test_outside_a_request_there_is_no_id(capsys):
    setup_logging("router", form="json")
    logging.getLogger("specdec.x").info("hello")
    (line,) = lines(capsys)
    assert "request_id" not in json.loads(line)


def test_a_library_that_complains_again_and_again_is_heard_once(capsys):
    setup_logging("router")
    for _ in range(5):
        logging.getLogger("opentelemetry.exporter").error("no collector")
        logging.getLogger("specdec.x").error("ours")
    logged = lines(capsys)
    assert sum("no collector" in line for line in logged) == 1
    assert sum("ours" in line for line in logged) == 5


@pytest.mark.parametrize(("level", "form", "named"), [("loud", "console", "LEVEL"), ("info", "xml", "FORMAT")])
def test_unknown_settings_are_refused(level, form, named):
    with pytest.raises(SettingsError, match=f"SPECDEC_LOG_{named}"):
        setup_logging("router", level, form)
