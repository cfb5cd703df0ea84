"""Log lines: one a record on standard error, for people or as JSON, with the request's id where there is one.

Nothing logs headers, prompts or answers: what a line says of a request are its id, route, outcome, counts and times.
"""

import json
import logging
import time
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from specdec.errors import SettingsError

request_id: ContextVar[str] = ContextVar("request_id", default="")  # of the request that is being worked on
FIELDS = "fields"  # in a record's `extra`: a dict of what JSON lines have beside the message
_SELDOM_S = 60.0


class _Json(logging.Formatter):
    """One JSON object a line."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if current := request_id.get():
            line["request_id"] = current
        line |= getattr(record, FIELDS, {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class _Console(logging.Formatter):
    """Time, service, level, the request's id, message."""

    def __init__(self, service: str) -> None:
        super().__init__(f"%(asctime)s {service} %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        current = request_id.get()
        if current:
            record.message = f"[{current}] {record.message}"
        return super().formatMessage(record)


class _Seldom(logging.Filter):
    """Of a library that complains again and again, one line a minute from each of its loggers."""

    def __init__(self, library: str) -> None:
        super().__init__()
        self._library = library
        self._quiet_until: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.name.startswith(self._library):
            return True
        now = time.monotonic()
        if now < self._quiet_until.get(record.name, 0.0):
            return False
        self._quiet_until[record.name] = now + _SELDOM_S
        return True


def setup_logging(service: str, level: str = "INFO", form: str = "console") -> None:
    """`form`: "console" or "json". Raises SettingsError for an unknown level or form."""
    level = level.upper()
    if level not in logging.getLevelNamesMapping():
        raise SettingsError(f"SPECDEC_LOG_LEVEL={level}: use DEBUG, INFO, WARNING or ERROR")
    if form not in ("console", "json"):
        raise SettingsError(f"SPECDEC_LOG_FORMAT={form}: use console or json")
    handler = logging.StreamHandler()
    handler.setFormatter(_Json(service) if form == "json" else _Console(service))
    handler.addFilter(_Seldom("opentelemetry"))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for noisy in ("httpx", "httpcore", "uvicorn.access"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
