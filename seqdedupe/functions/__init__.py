"""Pulsar Functions that take effect exactly once: `DedupeFunction` wraps a function, which needs no changes.

docs/guides/functions.md describes the deployment. The wrapper needs the modules of Pulsar's Python runtime, grpcio,
googleapis-common-protos, grpcio-status and numpy.
"""

from typing import Any

import pulsar

from seqdedupe.functions.process import InstanceProcess, ending

__all__ = ["DedupeFunction"]


class DedupeFunction(pulsar.Function):  # type: ignore[misc]  # Pulsar's client has no types
    """A Pulsar Function that wraps another function, which then takes effect exactly once.

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
