"""The pipe: it applies a Python function to the messages of one topic, and publishes the results to a target topic
exactly once. The only state is in the target topic."""

from seqdedupe.services.pipe.outputs import MAX_OUTPUTS, Function, Output
from seqdedupe.services.pipe.pipe import BlockingPipe, Pipe

__all__ = ["MAX_OUTPUTS", "BlockingPipe", "Function", "Output", "Pipe"]
