"""Message IDs and readers' positions."""

from typing import NamedTuple

from google.protobuf.message import DecodeError

from seqdedupe.errors import error
from seqdedupe.v1 import batch_pb2


class MessageId(NamedTuple):
    """Where a message stands in its log: ledger, entry, and batch index (-1 where an entry is one message).

    Ordered, hashable and picklable. `str()` gives `ledger:entry` or `ledger:entry:batch_index`, and `parse` takes
    it back; `to_bytes` and `from_bytes` are the form for storing (the protobuf message of the same name).
    """

    ledger_id: int
    entry_id: int
    batch_index: int = -1

    def __str__(self) -> str:
        tail = "" if self.batch_index < 0 else f":{self.batch_index}"
        return f"{self.ledger_id}:{self.entry_id}{tail}"

    @staticmethod
    def parse(text: str) -> "MessageId":
        """The message ID that `str()` printed. Raises INVALID_POSITION."""
        try:
            parts = [int(part) for part in text.split(":")]
        except ValueError:
            parts = []
        if len(parts) not in (2, 3):
            raise error("INVALID_POSITION", f"{text[:80]!r} is not a message ID: it should be ledger:entry")
        return MessageId(*parts)

    def to_proto(self) -> batch_pb2.MessageId:
        return batch_pb2.MessageId(ledger_id=self.ledger_id, entry_id=self.entry_id, batch_index=self.batch_index)

    @staticmethod
    def from_proto(message: batch_pb2.MessageId) -> "MessageId":
        return MessageId(message.ledger_id, message.entry_id, message.batch_index)

    def to_bytes(self) -> bytes:
        return self.to_proto().SerializeToString(deterministic=True)

    @staticmethod
    def from_bytes(data: bytes) -> "MessageId":
        """Raises INVALID_POSITION if the bytes are not a message ID's."""
        try:
            return MessageId.from_proto(batch_pb2.MessageId.FromString(data))
        except DecodeError as e:
            raise error("INVALID_POSITION", "these bytes are not a message ID") from e


class Position(NamedTuple):
    """Where a reader is: after the message with this ID and index, in this incarnation of its topic.

    Positions are compared for equality only; those of two incarnations are never ordered. The start of a topic is
    `Position.start(incarnation)`: no message yet, index -1.
    """

    incarnation: int
    message_id: MessageId | None
    index: int  # type: ignore[assignment]  # a field, where a tuple has a method nobody needs here

    @staticmethod
    def start(incarnation: int) -> "Position":
        return Position(incarnation, None, -1)

    def __str__(self) -> str:
        return f"{self.incarnation}/{self.message_id if self.message_id else 'start'}@{self.index}"

    def to_proto(self) -> batch_pb2.Position:
        message = batch_pb2.Position(incarnation=self.incarnation, index=self.index)
        if self.message_id is not None:
            message.message_id.CopyFrom(self.message_id.to_proto())
        return message

    @staticmethod
    def from_proto(message: batch_pb2.Position) -> "Position":
        message_id = MessageId.from_proto(message.message_id) if message.HasField("message_id") else None
        return Position(message.incarnation, message_id, message.index)

    def to_bytes(self) -> bytes:
        return self.to_proto().SerializeToString(deterministic=True)

    @staticmethod
    def from_bytes(data: bytes) -> "Position":
        """Raises INVALID_POSITION if the bytes are not a position's."""
        try:
            return Position.from_proto(batch_pb2.Position.FromString(data))
        except DecodeError as e:
            raise error("INVALID_POSITION", "these bytes are not a position") from e
