"""The input: what a message has beside its payload, and what of that its outputs have too."""

import base64
import binascii
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from seqdedupe.entry_properties import ENTRY, EVENT_TIME_MS, KEY_BASE64, KIND, PREFIX, USER, Place
from seqdedupe.errors import error
from seqdedupe.functions.outputs import Callback, Output
from seqdedupe.names import topic_name

T = TypeVar("T")

_TAKEN = ("properties", "partition_key", "event_timestamp")
"""What may stand in `message_conf`."""
MAX_EVENT_TIME_MS = 2**63 - 1


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as e:
        raise error("INVALID_REQUEST", f"the key or a property is not valid Unicode: {text[:80]!r}") from e


def _is_kept(time_ms: int) -> bool:
    return -MAX_EVENT_TIME_MS <= time_ms <= MAX_EVENT_TIME_MS


class Source:
    """The input that outputs come from: what it has and they do not say is theirs too. Raises NEWER_FORMAT.

    Key, event time and properties are what its producer gave, also where a sidecar wrote it down otherwise.
    """

    def __init__(self, context: Any) -> None:
        self.unreadable: UnicodeDecodeError | None = None
        """Why some of it is missing here: Pulsar takes properties and keys that are no text, its client gives none."""
        self.topic = str(context.get_current_message_topic_name())
        given: Mapping[str, str] = self._read(context.get_message_properties, {})
        self.place = Place.parse(given.get(ENTRY, ""), self.topic)
        """Where it stands in a topic that a sidecar writes; None if none has written it."""
        self.kind = given.get(KIND, "") if self.place is not None else ""
        self.key: bytes | None = self._read(context.get_message_key, "").encode() or None
        self.event_time_ms = int(context.get_message_eventtime() or 0)
        self.properties = {name: value for name, value in given.items() if not name.startswith(PREFIX)}
        if self.place is not None:
            self._restore(given)

    def _read(self, read: Callable[[], T | None], otherwise: T) -> T:
        try:
            return read() or otherwise
        except UnicodeDecodeError as e:
            self.unreadable = e
            return otherwise

    def _restore(self, given: Mapping[str, str]) -> None:
        """What Pulsar could not have as it was."""
        for name, value in given.items():
            if name.startswith(USER):
                self.properties[name.removeprefix(USER)] = value
        try:
            if KEY_BASE64 in given:
                self.key = base64.b64decode(given[KEY_BASE64], validate=True)
            self.event_time_ms = int(given.get(EVENT_TIME_MS, self.event_time_ms))
        except (binascii.Error, ValueError) as e:
            raise error("INVALID_FUNCTION", f"a message of {self.topic} is not as a sidecar writes it: {e}") from e

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
        key = _encoded(str(conf["partition_key"] or "")) or None if "partition_key" in conf else self.key
        time_ms = int(conf.get("event_timestamp", self.event_time_ms))
        if not _is_kept(time_ms):
            raise error("INVALID_REQUEST", f"the event time {time_ms} ms is beyond what can be kept")
        for text in (*properties, *properties.values()):
            _encoded(text)
        return Output(topic_name(str(topic)), payload, key, time_ms, dict(properties), callback)

    def dead_letter(self, topic: str, payload: bytes, told: Mapping[str, str]) -> Output:
        """The input itself, with what is told of it beside its own properties. Whatever cannot be kept is left out."""
        time_ms = self.event_time_ms if _is_kept(self.event_time_ms) else 0
        return Output(topic_name(topic), payload, self.key, time_ms, {**self.properties, **told})
