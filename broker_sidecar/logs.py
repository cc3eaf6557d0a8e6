"""Structured logs on standard error: one JSON object a line, or text."""

import json
import logging
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

_OF_EVERY_RECORD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


LINES = 20
WINDOW_SECONDS = 10.0
"""So many lines of a kind are written in so long."""

MAX_KINDS = 1_000
"""So many kinds are told apart at once: there are fewer, unless text from elsewhere is among them."""

_Kind = tuple[str, int, str]
_OTHERS: _Kind = ("", 0, "")


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


@dataclass(slots=True)
class _Window:
    """What was logged of a kind since its first line of late."""

    ends: float
    lines: int = 0
    left_out: int = 0


def _later(seconds: float, tell: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, tell)
    timer.daemon = True
    timer.start()


class Limit(logging.Filter):
    """Lets LINES of a kind through in WINDOW_SECONDS, and then one that says how many were left out (`left_out`).

    What a client or a failing disk can cause a thousand times says nothing new, and fills the disk. Lines are of a kind
    if the same place says them, as bad, whatever they are about.
    """

    def __init__(
        self,
        now_seconds: Callable[[], float] = time.monotonic,
        later: Callable[[float, Callable[[], None]], None] = _later,
    ) -> None:
        super().__init__()
        self._now_seconds = now_seconds
        self._later = later
        self._lock = threading.Lock()
        self._windows: dict[_Kind, _Window] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if hasattr(record, "left_out"):
            return True
        kind = record.name, record.levelno, str(record.msg)
        now = self._now_seconds()
        with self._lock:
            window = self._window(kind, now)
            window.lines += 1
            if window.lines <= LINES:
                return True
            window.left_out += 1
            is_first = window.left_out == 1
        if is_first:
            self._later(window.ends - now, lambda: _tell(kind, window))
        return False

    def _window(self, kind: _Kind, now: float) -> _Window:
        if kind not in self._windows and len(self._windows) >= MAX_KINDS:
            self._windows = {other: left for other, left in self._windows.items() if now < left.ends}
            if len(self._windows) >= MAX_KINDS:
                kind = _OTHERS
        window = self._windows.get(kind)
        if window is None or now >= window.ends:
            self._windows[kind] = window = _Window(now + WINDOW_SECONDS)
        return window


def _tell(kind: _Kind, window: _Window) -> None:
    name, level, message = kind
    told = "%d lines were left out as this one: %s"
    logging.getLogger(name).log(level, told, window.left_out, message, extra={"left_out": window.left_out})


def configure(level: str, form: str) -> None:
    """Sends everything that is logged to standard error, from this level on."""
    handler = logging.StreamHandler(sys.stderr)
    text = _Text("%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    handler.setFormatter(_Json() if form == "json" else text)
    handler.addFilter(Limit())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
