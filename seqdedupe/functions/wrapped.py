"""The function that is wrapped: found by its name, called with what it expects, its results made bytes."""

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.functions.context import GatheringContext, Serialize, payload_of
from seqdedupe.functions.outputs import Output, check_fits
from seqdedupe.functions.settings import Settings
from seqdedupe.functions.source import Source

_OF_PULSAR = "serde."
"""Pulsar's own SerDes are known by this, short for `pulsar.functions.serde`."""


def _invalid(what: str, e: BaseException) -> SeqdedupeError:
    return error("INVALID_FUNCTION", f"{what}: {type(e).__name__}: {e}")


def find(name: str) -> Any:
    """What a dotted name stands for: a module, or something in one. Raises INVALID_FUNCTION."""
    if name.startswith(_OF_PULSAR):
        name = f"pulsar.functions.{name}"
    module, _, attribute = name.rpartition(".")
    try:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as e:
            # Something else that is missing is missing within it.
            if not module or e.name != name:
                raise
            return getattr(importlib.import_module(module), attribute)
    except Exception as e:
        raise _invalid(f"{name} cannot be imported", e) from e


def _made(name: str) -> Any:
    """An object of the class of this name, or the module."""
    found = find(name)
    if not isinstance(found, type):
        return found
    try:
        return found()
    except Exception as e:
        raise _invalid(f"{name}() has failed", e) from e


def as_bytes(value: Any) -> bytes:
    """Bytes as they are; text and numbers as Pulsar's default SerDe writes them. Raises TypeError."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, str | int | float | complex):
        return str(value).encode()
    raise TypeError(f"an output is {type(value).__name__}: bytes, text or a number is needed, or output_serde")


class Wrapped:
    """The function with its SerDes. Raises INVALID_FUNCTION if there is none."""

    def __init__(self, settings: Settings, output_topic: str) -> None:
        self._output_topic = output_topic
        function = _made(settings.wrapped)
        process: Callable[..., Any] | None = getattr(function, "process", None)
        if not callable(process):
            raise error("INVALID_FUNCTION", f"wrapped is {settings.wrapped}, which has no process()")
        self._process = process
        self._takes_context = not isinstance(function, ModuleType)
        self._deserialize: Callable[[bytes], Any] = (
            _made(settings.input_serde).deserialize if settings.input_serde else lambda payload: payload
        )
        self._serialize: Serialize = _made(settings.output_serde).serialize if settings.output_serde else as_bytes
        self._serializers: dict[str, Serialize] = {"serde.IdentitySerDe": as_bytes}

    def _serialize_for(self, name: str) -> Serialize:
        if name not in self._serializers:
            self._serializers[name] = _made(name).serialize
        return self._serializers[name]

    def outputs(self, payload: bytes, context: Any, source: Source) -> list[Output]:
        """Runs the function once. Raises what it raises, and what keeps its outputs from being published."""
        if source.unreadable is not None:
            raise source.unreadable
        gathering = GatheringContext(context, source, self._serialize_for, self._output_topic)
        value = self._deserialize(payload)
        try:
            result = self._process(value, gathering) if self._takes_context else self._process(value)
        finally:
            gathering.end()
        outputs = gathering.outputs
        if result is not None:
            if not self._output_topic:
                raise error("INVALID_FUNCTION", "the function returns something, and output_topic is not set")
            outputs = [*outputs, source.output(self._output_topic, payload_of(self._serialize, result))]
        by_topic: dict[str, list[Output]] = {}
        for output in outputs:
            by_topic.setdefault(output.topic, []).append(output)
        for of_topic in by_topic.values():
            check_fits(of_topic)
        return outputs
