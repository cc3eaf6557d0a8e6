"""Pulsar Functions that take effect exactly once: `DedupeFunction` wraps a function, which needs no changes.

docs/guides/functions.md describes the deployment. The wrapper needs the modules of Pulsar's Python runtime, grpcio,
googleapis-common-protos, grpcio-status and numpy. This file imports only Pulsar's module, because this file must report
any other module that is missing.
"""

import logging
import os
import sys
import threading
import traceback
from typing import Any

import pulsar

from seqdedupe.errors import SeqdedupeError

__all__ = ["DedupeFunction"]

# -- The process of an instance, and how it ends. It ends at once, so that Pulsar delivers the unacknowledged inputs
# again in order.

logger = logging.getLogger("seqdedupe.functions")

FAILED = 1
LOG_TOPIC_SECONDS = 2.0
"""The maximum time that the end of the process waits for the last lines to be written to the log topic."""


def text_of(e: BaseException) -> str:
    """Return an error's type and text. Never raises an exception, even if the error's own code for the text fails."""
    try:
        said = str(e)
    except BaseException as again:  # noqa: BLE001 (it is the wrapped function's code)
        said = f"its text cannot be had, it raises {type(again).__name__}"
    return f"{type(e).__name__}: {said}"


def traceback_of(e: BaseException) -> str:
    """Return the traceback as Python prints it, for the log. Some log formatters cannot handle an error whose text
    cannot be created."""
    return "".join(traceback.format_exception(e)).rstrip()


def ending(e: BaseException) -> str:
    """Return the text of an error as the reason why an instance ends, with the error's hint if there is one."""
    return f"{text_of(e)} {e.hint}" if isinstance(e, SeqdedupeError) else text_of(e)


def _send_log_topic() -> None:
    """Flush the log topic, with a time limit. The runtime's log handler sends in the background and has no flush, and
    the broker may be unreachable."""
    producers = [getattr(handler, "producer", None) for handler in logging.getLogger().handlers]
    for producer in filter(None, producers):
        sending = threading.Thread(target=producer.flush, daemon=True)
        sending.start()
        sending.join(LOG_TOPIC_SECONDS)


class InstanceProcess:
    """The process of an instance, which Pulsar's runtime restarts when it ends.

    Neither SystemExit nor any other exception ends an instance: the runtime catches exceptions of `process`, and
    continues with the next message.
    """

    @property
    def is_stopping(self) -> bool:
        """Whether the runtime was asked to end (SIGTERM). The runtime does not end while `process` runs."""
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
        finally:  # also if the output has no reader any more, so that flushing it fails
            os._exit(FAILED if failed else 0)


# -- The function that Pulsar's runtime calls.


class DedupeFunction(pulsar.Function):  # type: ignore[misc]  # Pulsar's client has no types
    """A Pulsar Function that wraps a user's function, so that the user's function takes effect exactly once.

    For each input, the outputs that the wrapped function returns or publishes are in their topics once, in the order of
    the inputs. This holds after any failure, and if Pulsar delivers an input several times, provided that new inputs
    continue to arrive. All other effects happen at least once. The only configuration is `userConfig`, see
    docs/guides/functions.md.

    `process` never raises an exception: the runtime would deliver a failed input again a minute later, after other
    inputs. Instead `process` waits, or ends the process.
    """

    # The runtime ignores an exception of a constructor, and then calls the class as if the class were a module.
    def __init__(self) -> None:
        self._instance: Any = None

    def process(self, input: object, context: Any) -> None:
        """Process an input. The wrapper uses the bytes of the message, not the runtime's `input`."""
        process = InstanceProcess()
        try:
            if self._instance is None:
                self._instance = _instance(context, process)
            self._instance.take(context)
        except BaseException as e:  # noqa: BLE001 (after any failure: a failed input would be lost)
            process.end(ending(e), failed=True)


def _instance(context: Any, process: InstanceProcess) -> Any:
    """Create the instance. The import happens here because modules may be missing, which the runtime would not
    report."""
    try:
        from seqdedupe.functions.instance import FunctionInstance
    except Exception as e:
        raise RuntimeError(
            "the worker's Python environment lacks what the wrapper needs, or has it in a version that does not fit: "
            f"{type(e).__name__}: {e}. docs/guides/functions.md has the list."
        ) from e
    return FunctionInstance(context, process)
