"""What the wrapped function gets as its context: Pulsar's own, but that what it publishes is gathered."""

from collections.abc import Callable, Mapping
from typing import Any

from seqdedupe.errors import error
from seqdedupe.functions.outputs import Callback, Output
from seqdedupe.names import topic_name

Serialize = Callable[[Any], bytes]

_TAKEN = ("properties", "partition_key", "event_timestamp")
"""What may stand in `message_conf`."""


class Source:
    """The input that outputs come from: what it has and they do not say is theirs too."""

    def __init__(self, context: Any) -> None:
        self.key = str(context.get_message_key() or "")
        self.event_time_ms = int(context.get_message_eventtime() or 0)
        self.properties: dict[str, str] = {
            name: value for name, value in context.get_message_properties().items() if not name.startswith("seqdedupe.")
        }

    def output(
        self, topic: str, payload: bytes, conf: Mapping[str, Any] | None = None, callback: Callback | None = None
    ) -> Output:
        """The output, with what `message_conf` says. Raises INVALID_REQUEST for what cannot be kept."""
        conf = conf or {}
        if unknown := sorted(set(conf) - set(_TAKEN)):
            raise error(
                "INVALID_REQUEST",
                f"message_conf has {', '.join(unknown)}, which cannot be kept: {', '.join(_TAKEN)} are possible",
            )
        properties = conf.get("properties", self.properties)
        if not all(isinstance(part, str) for item in properties.items() for part in item):
            raise error("INVALID_REQUEST", "names and values of properties are text")
        key = conf.get("partition_key", self.key)
        time_ms = int(conf.get("event_timestamp", self.event_time_ms))
        return Output(topic_name(str(topic)), payload, str(key or ""), time_ms, dict(properties), callback)


class GatheringContext:
    """Pulsar's context of one input. `publish` gathers, `ack` does nothing; all else is Pulsar's own.

    `publish` raises as soon as an output cannot be taken, and INVALID_REQUEST once `process` has returned. A callback
    is called with `pulsar.Result.Ok` and None, in another thread, when the output is settled.
    """

    def __init__(self, context: Any, source: Source, serialize_for: Callable[[str], Serialize]) -> None:
        self._context = context
        self._source = source
        self._serialize_for = serialize_for
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
        payload = bytes(self._serialize_for(serde_class_name)(message))
        self.outputs.append(self._source.output(topic_name, payload, conf, callback))

    def ack(self, msgid: object, topic: str) -> None:
        """Nothing: an input is acknowledged when its outputs are settled."""

    def end(self) -> None:
        """`process` has returned."""
        self._is_over = True
