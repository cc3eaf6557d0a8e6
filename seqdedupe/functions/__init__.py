"""Pulsar Functions that take effect exactly once: `DedupeFunction` wraps an unchanged function.

docs/guides/functions.md describes the deployment. The wrapper needs the modules of Pulsar's Python runtime, grpcio,
googleapis-common-protos, grpcio-status and numpy.
"""

from typing import Any

import pulsar

from seqdedupe.functions.process import InstanceProcess, ending

__all__ = ["DedupeFunction"]


class DedupeFunction(pulsar.Function):  # type: ignore[misc]  # Pulsar's client has no types
    """A Pulsar Function that wraps another function, which then takes effect exactly once.

    The outputs that the wrapped function returns or publishes are in their topics once for each input, in the order of
    the inputs. This holds after any failure, and if Pulsar delivers an input several times, provided that inputs keep
    coming. All other effects happen at least once. Only `userConfig` configures it, see docs/guides/functions.md.

    `process` raises nothing: the runtime would deliver a failed input again a minute later, after other inputs. Instead
    `process` waits, or ends the process.
    """

    # The runtime swallows an exception of a constructor, and then calls the class as if it were a module.
    def __init__(self) -> None:
        self._instance: Any = None

    def process(self, input: object, context: Any) -> None:
        """Take an input. The wrapper uses the bytes of the message, not the runtime's `input`."""
        process = InstanceProcess()
        try:
            if self._instance is None:
                self._instance = _instance(context, process)
            self._instance.take(context)
        except BaseException as e:  # noqa: BLE001 (after any failure: a failed input would be lost)
            process.end(ending(e), failed=True)


def _instance(context: Any, process: InstanceProcess) -> Any:
    """Make the instance. The import is late: modules may be missing, and the runtime would not report that."""
    try:
        from seqdedupe.functions.instance import FunctionInstance
    except Exception as e:
        raise RuntimeError(
            "the worker's Python environment lacks what the wrapper needs, or has it in a version that does not fit: "
            f"{type(e).__name__}: {e}. docs/guides/functions.md has the list."
        ) from e
    return FunctionInstance(context, process)
