"""The threads of Pulsar's client, which call back into Python."""

import ctypes
import threading


class _This(threading.local):
    has_state = False


_this = _This()


def keep_state() -> None:
    """The thread that calls this keeps its Python thread state from now on, as long as it lives.

    Else the interpreter makes one whenever the client takes its lock on that thread, which is several times for each
    answer, and a stack for it, which is memory that the system has to map; and throws both away again. That takes
    longer than all else about an answer.
    """
    if not _this.has_state:
        _this.has_state = True
        # Never released: a state that is in use is not thrown away.
        ctypes.pythonapi.PyGILState_Ensure()
