"""A sidecar that ends, as by kill -9, before or after a step of moving a topic; with small segments.

`DIES_AT` in the environment: `module.function before` or `… after`, and perhaps at which call of it. `PLANTED`: a bug.
"""

import importlib
import inspect
import os
import signal
import sys
from collections.abc import Callable
from functools import partialmethod
from itertools import count
from typing import Any

from broker_sidecar import kernels

MODULE = __name__ if __name__ != "__main__" else "tests.broker_sidecar.dying_moving"
SEGMENT_BYTES = 8192


def environment(dies_at: str = "", planted: str = "") -> dict[str, str]:
    """For `Sidecar(module=MODULE, environment=...)`."""
    return {"DIES_AT": dies_at, "PLANTED": planted}


def _plant(place: str, when: str, wanted: str = "1") -> None:
    module, _, name = place.rpartition(".")
    owner: Any = importlib.import_module(module)
    function: Callable[..., Any] = getattr(owner, name)
    calls = count(1)

    def passes(moment: str, number: int) -> None:
        if (moment, number) == (when, int(wanted)):
            os.kill(os.getpid(), signal.SIGKILL)

    async def step(*arguments: Any, **named: Any) -> Any:
        number = next(calls)
        passes("before", number)
        found = await function(*arguments, **named)
        passes("after", number)
        return found

    def plain(*arguments: Any, **named: Any) -> Any:
        number = next(calls)
        passes("before", number)
        found = function(*arguments, **named)
        passes("after", number)
        return found

    setattr(owner, name, step if inspect.iscoroutinefunction(function) else plain)


def _plant_bug(bug: str) -> None:
    from broker_sidecar import leaving
    from seqdedupe.log.embedded import moved

    if bug == "nothing says that it leaves":
        # Both serve: a start does not know that the other one may have it.
        moved.leave = lambda folder, address: None
    elif bug == "lets go first":

        async def settled(self: leaving.Leaving, record: Any, to: str) -> None:
            moved.has_left(self._logs.folder_of(record.incarnation))

        leaving.Leaving._settle = settled  # type: ignore[method-assign]


if __name__ == "__main__":
    kernels.prepare()

    from broker_sidecar.__main__ import main
    from seqdedupe.log.embedded.logs import EmbeddedLogs

    EmbeddedLogs.__init__ = partialmethod(EmbeddedLogs.__init__, segment_bytes=SEGMENT_BYTES)  # type: ignore[assignment]
    if os.environ["DIES_AT"]:
        _plant(*os.environ["DIES_AT"].split())
    _plant_bug(os.environ["PLANTED"])
    sys.exit(main())
