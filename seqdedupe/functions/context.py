"""What the wrapped function gets as its context: Pulsar's own, but that what it publishes is gathered."""

from collections.abc import Callable, Mapping
from typing import Any

from seqdedupe.errors import error
from seqdedupe.functions.outputs import Callback, Output
from seqdedupe.functions.source import Source

Serialize = Callable[[Any], bytes]


def payload_of(serialize: Serialize, value: Any) -> bytes:
    """The bytes that a SerDe makes of a value. Raises TypeError if they are none, and what it raises."""
    payload = serialize(value)
    if not isinstance(payload, bytes | bytearray | memoryview):
        raise TypeError(f"a SerDe has made {type(payload).__name__} of an output: bytes are needed")
    return bytes(payload)


class GatheringContext:
    """Pulsar's context of one input. `publish` gathers, `ack` does nothing; all else is Pulsar's own.

    `publish` raises as soon as an output cannot be taken, and INVALID_REQUEST once `process` has returned. A callback
    is called with `pulsar.Result.Ok` and None, in another thread, when the output is settled.
    """

    def __init__(
        self, context: Any, source: Source, serialize_for: Callable[[str], Serialize], output_topic: str
    ) -> None:
        self._context = context
        self._source = source
        self._serialize_for = serialize_for
        self._output_topic = output_topic
        self._is_over = False
        self.outputs: list[Output] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def publish(
        self,
        topic_name: str,
        message: Any,
        serde_class_name: str = "serde.IdentitySerDe",
        properties: Mapping[str, str] | None = None,
        compression_type: object = None,
        callback: Callback | None = None,
        message_conf: Mapping[str, Any] | None = None,
    ) -> None:
        """As Pulsar's, with its parameters. The compression is the sidecar's business."""
        if self._is_over:
            raise error("INVALID_REQUEST", "publish was called after process() had returned")
        conf = dict(message_conf or {})
        if properties:
            conf["properties"] = properties
        payload = payload_of(self._serialize_for(serde_class_name), message)
        self.outputs.append(self._source.output(topic_name, payload, conf, callback))

    def get_output_topic(self) -> str:
        """Where what `process` returns goes: `output_topic` of userConfig counts first."""
        return self._output_topic

    def ack(self, msgid: object, topic: str) -> None:
        """Nothing: an input is acknowledged when its outputs are settled."""

    def end(self) -> None:
        """`process` has returned."""
        self._is_over = True
