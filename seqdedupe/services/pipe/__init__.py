"""From topic to topic: a Python function between two of them, exactly once, with no state but the target."""

from seqdedupe.services.pipe.outputs import MAX_OUTPUTS, Function, Output
from seqdedupe.services.pipe.pipe import BlockingPipe, Pipe

__all__ = ["MAX_OUTPUTS", "BlockingPipe", "Function", "Output", "Pipe"]
