"""The last that the process warned of, for whoever looks at it."""

import logging
from collections import deque

from seqdedupe.v1 import admin_pb2

KEPT = 50

MAX_MESSAGE_CHARACTERS = 2_000
"""Of a longer message the beginning is kept."""


class LastWarnings(logging.Handler):
    """Keeps the newest KEPT records of level WARNING and above, in whatever thread they are logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._kept: deque[admin_pb2.Warning] = deque(maxlen=KEPT)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = record.getMessage()
            if record.exc_info and record.exc_info[1] is not None:
                message += f": {type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
        except Exception:  # noqa: BLE001 (as every handler of the library: a record that cannot be told harms nobody)
            self.handleError(record)
            return
        self._kept.append(
            admin_pb2.Warning(
                time_ms=int(record.created * 1000),
                level=record.levelname,
                message=message[:MAX_MESSAGE_CHARACTERS].encode(errors="replace").decode(),
            )
        )

    def newest_first(self) -> list[admin_pb2.Warning]:
        return list(self._kept)[::-1]
