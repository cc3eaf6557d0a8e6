"""The process of an instance, and its end: at once, so that unacknowledged inputs come again in order.

This module imports nothing that may be missing: it must report missing modules.
"""

import logging
import os
import sys
import threading
import traceback
from typing import Any

from seqdedupe.errors import SeqdedupeError

logger = logging.getLogger("seqdedupe.functions")

FAILED = 1
LOG_TOPIC_SECONDS = 2.0
"""The longest time that the end of a process waits until the log topic has its last lines."""


def text_of(e: BaseException) -> str:
    """Return an error's type and text. Raises nothing, even if the code that makes the text fails."""
    try:
        said = str(e)
    except BaseException as again:  # noqa: BLE001 (it is the wrapped function's code)
        said = f"its text cannot be had, it raises {type(again).__name__}"
    return f"{type(e).__name__}: {said}"


def traceback_of(e: BaseException) -> str:
    """Return the traceback as Python prints it, for the log. Not every log formatter can handle an error whose text
    cannot be made."""
    return "".join(traceback.format_exception(e)).rstrip()


def ending(e: BaseException) -> str:
    """Return an error as the reason why an instance ends, with its hint if it has one."""
    return f"{text_of(e)} {e.hint}" if isinstance(e, SeqdedupeError) else text_of(e)


def _send_log_topic() -> None:
    """Flush the log topic, with a time limit. The runtime's log handler sends in the background and has no flush; a
    broker may be unreachable."""
    producers = [getattr(handler, "producer", None) for handler in logging.getLogger().handlers]
    for producer in filter(None, producers):
        sending = threading.Thread(target=producer.flush, daemon=True)
        sending.start()
        sending.join(LOG_TOPIC_SECONDS)


class InstanceProcess:
    """This process, which Pulsar's runtime restarts when it ends.

    Neither SystemExit nor an exception ends an instance: the runtime catches exceptions of `process`, and continues
    without the message.
    """

    @property
    def is_stopping(self) -> bool:
        """Whether the runtime was asked to end (SIGTERM). It does not end while `process` runs."""
        main: Any = sys.modules.get("__main__")
        return getattr(main, "to_run", True) is False

    def end(self, why: str, *, failed: bool) -> None:
        """Log the reason, and end the process. Does not return."""
        try:
            logger.log(logging.CRITICAL if failed else logging.INFO, "the instance ends: %s", why)
            logging.shutdown()
            _send_log_topic()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:  # also if the output has no reader any more, and flushing it fails
            os._exit(FAILED if failed else 0)
