"""Structured logs on standard error: one JSON object a line, or text."""

import json
import logging
import sys
from datetime import UTC, datetime

_OF_EVERY_RECORD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def _extra(record: logging.LogRecord) -> dict[str, object]:
    """What was logged as `extra`."""
    return {key: value for key, value in vars(record).items() if key not in _OF_EVERY_RECORD}


class _Text(logging.Formatter):
    """A line for a person, with what was logged as `extra` after it."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (the library's name)
        return " ".join([super().formatMessage(record), *(f"{k}={v}" for k, v in _extra(record).items())])


class _Json(logging.Formatter):
    """`event`, `level`, `logger`, `timestamp`, and what was logged as `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        entry |= _extra(record)
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str, ensure_ascii=False)


def configure(level: str, form: str) -> None:
    """Sends everything that is logged to standard error, from this level on."""
    handler = logging.StreamHandler(sys.stderr)
    text = _Text("%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    handler.setFormatter(_Json() if form == "json" else text)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
