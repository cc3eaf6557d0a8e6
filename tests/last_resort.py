"""The last resort of a test: when it strikes, the failure has the stacks of all processes and the tasks that waited."""

import os
import signal
from types import FrameType
from typing import Any

import pytest

from seqdedupe.testing import all_stacks

# For what the tests start, so that it can say where it hangs.
os.environ.setdefault("PYTHONFAULTHANDLER", "1")


def pytest_timeout_set_timer(item: Any, settings: Any) -> bool:
    """Instead of pytest-timeout's, which knows the threads of this process alone."""

    def strike(number: int, frame: FrameType | None) -> None:
        __tracebackhide__ = True
        # Once more, should a task that is hit keep it to itself.
        signal.setitimer(signal.ITIMER_REAL, settings.timeout)
        pytest.fail(f"{item.nodeid} is not over after {settings.timeout:g} s\n{all_stacks()}")

    def cancel() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    item.cancel_timeout = cancel
    signal.signal(signal.SIGALRM, strike)
    signal.setitimer(signal.ITIMER_REAL, settings.timeout)
    return True
