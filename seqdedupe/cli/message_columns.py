"""What `read` shows of a message, column by column, and choosing messages by it."""

import base64
from collections.abc import Callable
from dataclasses import dataclass

from seqdedupe.client import Message
from seqdedupe.client.results import NO_PARTITION
from seqdedupe.command import json_text

_PROPERTY = "property."


def _utf8(value: bytes | None) -> str | None:
    """The value as text; None if there is none, or if it is not UTF-8."""
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError:
        return None


def _base64(value: bytes | None) -> str | None:
    """What is not UTF-8; None of all else."""
    return base64.b64encode(value).decode() if value is not None and _utf8(value) is None else None


_COLUMNS: dict[str, Callable[[Message], int | str | None]] = {
    "partition": lambda message: message.partition if message.partition != NO_PARTITION else None,
    "index": lambda message: message.index,
    "message_id": lambda message: str(message.message_id),
    "producer_name": lambda message: message.producer_name or None,
    "sequence_id": lambda message: message.sequence_id if message.sequence_id >= 0 else None,
    "deduplication_id": lambda message: _utf8(message.deduplication_id),
    "deduplication_id_base64": lambda message: _base64(message.deduplication_id),
    "publish_time_ms": lambda message: message.publish_time_ms,
    "event_time_ms": lambda message: message.event_time_ms or None,
    "key": lambda message: _utf8(message.key),
    "key_base64": lambda message: _base64(message.key),
    "payload": lambda message: _utf8(message.payload),
    "payload_base64": lambda message: _base64(message.payload),
}


_ONLY_WHERE_THERE = ("partition", "deduplication_id")


def json_line(message: Message) -> bytes:
    """The form is documented: keep it stable."""
    value: dict[str, object] = {}
    for name, column in _COLUMNS.items():
        if name == "payload":
            value["properties"] = message.properties
        found = column(message)
        if name.endswith("_base64"):
            if found is not None:  # in place of the text, which there is not
                value.pop(name.removesuffix("_base64"), None)
                value[name] = found
        elif name not in _ONLY_WHERE_THERE or found is not None:
            value[name] = found
    return json_text(value).encode() + b"\n"


@dataclass(frozen=True)
class Condition:
    """That a column or a property has this text; what a message does not have, has none."""

    column: str
    text: str

    @staticmethod
    def parse(text: str) -> "Condition":
        """Of `column=value`. Raises ValueError with what is wrong."""
        column, is_there, value = text.partition("=")
        if not is_there:
            raise ValueError(f"{text!r} is not COLUMN=VALUE.")
        if column not in _COLUMNS and (not column.startswith(_PROPERTY) or column == _PROPERTY):
            raise ValueError(f"there is no column {column!r}: they are {', '.join(_COLUMNS)} and {_PROPERTY}NAME.")
        return Condition(column, value)

    def holds(self, message: Message) -> bool:
        """Whether the message is as told."""
        column = _COLUMNS.get(self.column)
        if column is None:
            return message.properties.get(self.column.removeprefix(_PROPERTY)) == self.text
        found = column(message)
        return found is not None and str(found) == self.text
