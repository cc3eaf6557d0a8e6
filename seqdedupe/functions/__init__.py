"""Pulsar Functions that take effect exactly once: `DedupeFunction` around a function that knows nothing of it.

docs/guides/functions.md says how it is deployed. Needs what Pulsar's Python runtime has, grpcio,
googleapis-common-protos, grpcio-status and numpy.
"""

from typing import Any

import pulsar

from seqdedupe.functions.process import InstanceProcess, ending

__all__ = ["DedupeFunction"]


class DedupeFunction(pulsar.Function):  # type: ignore[misc]  # Pulsar's client has no types
    """A Pulsar Function around another one, which then takes effect exactly once.

    What the wrapped function returns or publishes stands in its output topics once for each input, in the order of the
    inputs, whatever fails and however often an input comes; if inputs keep coming. What else it does happens at least
    once. It is configured by `userConfig` alone, see docs/guides/functions.md.

    `process` raises nothing: an input that the runtime takes for failed comes again a minute later, after others. It
    waits, or ends the process.
    """

    # The runtime swallows what a constructor raises, and then calls the class as if it were a module.
    def __init__(self) -> None:
        self._instance: Any = None

    def process(self, input: object, context: Any) -> None:
        """Takes an input; the message's own bytes count, and not what the runtime has made of them."""
        process = InstanceProcess()
        try:
            if self._instance is None:
                self._instance = _instance(context, process)
            self._instance.take(context)
        except BaseException as e:  # noqa: BLE001 (whatever it is: an input that failed would be lost)
            process.end(ending(e), failed=True)


def _instance(context: Any, process: InstanceProcess) -> Any:
    """Made late: what it imports may not be there, and the runtime says nothing of that."""
    try:
        from seqdedupe.functions.instance import FunctionInstance
    except Exception as e:
        raise RuntimeError(
            "the worker's Python environment lacks what the wrapper needs, or has it in a version that does not fit: "
            f"{type(e).__name__}: {e}. docs/guides/functions.md has the list."
        ) from e
    return FunctionInstance(context, process)
