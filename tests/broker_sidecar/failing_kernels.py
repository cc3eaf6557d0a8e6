"""A sidecar whose kernels after the second cannot be compiled, once another process has compiled all of them."""

import sys
import threading
from typing import Any

from numba.core.dispatcher import Dispatcher

from broker_sidecar.__main__ import main

MODULE = "tests.broker_sidecar.failing_kernels"

_compile = Dispatcher.compile
_compiled = 0


def _fails(dispatcher: Any, signature: Any) -> Any:
    global _compiled
    if threading.current_thread().name == "seqdedupe-compiling":
        _compiled += 1
        if _compiled > 2:
            raise ValueError("the third one\nfails")
    return _compile(dispatcher, signature)


if __name__ == "__main__":
    Dispatcher.compile = _fails  # type: ignore[method-assign, assignment]
    sys.exit(main())
