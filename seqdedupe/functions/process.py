"""The process of an instance, and how it ends: at once, so that what is not acknowledged comes again in order.

It imports nothing that may not be there: it has to say so.
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
"""The end of a process waits so long until the log topic has its last lines."""


def text_of(e: BaseException) -> str:
    """An error's kind and text. Raises nothing: an error's text may be code that fails in its turn."""
    try:
        said = str(e)
    except BaseException as again:  # noqa: BLE001 (it is the wrapped function's code)
        said = f"its text cannot be had, it raises {type(again).__name__}"
    return f"{type(e).__name__}: {said}"


def traceback_of(e: BaseException) -> str:
    """As Python prints it, for a line of the log. Not every formatter takes an error whose text cannot be had."""
    return "".join(traceback.format_exception(e)).rstrip()


def ending(e: BaseException) -> str:
    """An error as the reason why an instance ends: with what to do about it, where it says that."""
    return f"{text_of(e)} {e.hint}" if isinstance(e, SeqdedupeError) else text_of(e)


def _send_log_topic() -> None:
    """The runtime's handler for a log topic sends in the background, and has no flush; a broker may be away."""
    producers = [getattr(handler, "producer", None) for handler in logging.getLogger().handlers]
    for producer in filter(None, producers):
        sending = threading.Thread(target=producer.flush, daemon=True)
        sending.start()
        sending.join(LOG_TOPIC_SECONDS)


class InstanceProcess:
    """This process, which Pulsar's runtime starts again when it ends.

    Neither SystemExit nor an exception ends an instance: the runtime catches what `process` raises, and goes on without
    the message.
    """

    @property
    def is_stopping(self) -> bool:
        """Whether the runtime was told to end (SIGTERM); while `process` runs it does not."""
        main: Any = sys.modules.get("__main__")
        return getattr(main, "to_run", True) is False

    def end(self, why: str, *, failed: bool) -> None:
        """Does not return."""
        try:
            logger.log(logging.CRITICAL if failed else logging.INFO, "the instance ends: %s", why)
            logging.shutdown()
            _send_log_topic()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:  # also where nobody reads the output any more, and flushing it fails
            os._exit(FAILED if failed else 0)
