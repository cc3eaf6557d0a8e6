"""Message IDs and readers' positions."""

import re
from typing import NamedTuple

from google.protobuf.message import DecodeError

from seqdedupe.errors import error
from seqdedupe.limits import MAX_INDEX
from seqdedupe.v1 import batch_pb2

_NUMBER = r"\d{1,19}"
_ID = rf"{_NUMBER}:{_NUMBER}(:{_NUMBER})?"
_MESSAGE_ID = re.compile(_ID, re.ASCII)
_POSITION = re.compile(
    rf"(?P<incarnation>{_NUMBER})(/((?P<start>start)|(?P<last>{_ID})))?@(?P<index>-1|{_NUMBER})"
    r"(#(?P<ownership>[0-9a-f]{16}))?",
    re.ASCII,
)
_MAX_INT64 = 2**63 - 1


def checked_index(index: int) -> int:
    """The index, if it can be a message's. Raises INVALID_POSITION."""
    if not 0 <= index <= MAX_INDEX:
        raise error("INVALID_POSITION", f"{index} is not an index: they are counted from 0, up to {MAX_INDEX}")
    return index


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
    def of(incarnation: int, index: int) -> "MessageId":
        """That of a message in the embedded log: its ledger is the topic's incarnation, its entry the index."""
        return MessageId(incarnation, index)

    @staticmethod
    def parse(text: str) -> "MessageId":
        """The message ID that `str()` printed. Raises INVALID_POSITION."""
        if _MESSAGE_ID.fullmatch(text):
            parts = [int(part) for part in text.split(":")]
            if max(parts) <= _MAX_INT64:
                return MessageId(*parts)
        raise error("INVALID_POSITION", f"{text[:80]!r} is not a message ID: it should be ledger:entry")

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

    `ownership` (64 bits, unsigned) says in which history of the topic: eight bytes of the token of the marker under
    which the message was written. A log that was restored to an older copy and grew again has other messages at the
    same indexes, and another ownership there. 0 is not known, and at the start there is none: then it is not checked.
    A message ID is not known (None) where a range was cut at an index: in some logs only a read tells it. The text is
    then `incarnation@index`. `==` compares all parts as they are, `is_same` leaves out what is not known.
    """

    incarnation: int
    message_id: MessageId | None
    index: int  # type: ignore[assignment]  # a field, where a tuple has a method nobody needs here
    ownership: int = 0

    @staticmethod
    def start(incarnation: int) -> "Position":
        return Position(incarnation, None, -1)

    @staticmethod
    def before(incarnation: int, index: int) -> "Position":
        """After which the message with this index is the next one: the message ID is not known."""
        return Position(incarnation, None, index - 1)

    @staticmethod
    def of(message_id: MessageId) -> "Position":
        """After a message of the embedded log, whose ID says it all but the history. Raises INVALID_POSITION."""
        incarnation, index, batch_index = message_id
        if min(incarnation, index) < 0 or batch_index >= 0:
            raise error("INVALID_POSITION", f"{message_id} is not the ID of a message of the embedded log, as 123:45")
        return Position(incarnation, message_id, index)

    @staticmethod
    def parse(text: str) -> "Position":
        """The position that `str()` printed, or that of the message of the embedded log whose ID it printed.

        Raises INVALID_POSITION.
        """
        if _MESSAGE_ID.fullmatch(text):
            return Position.of(MessageId.parse(text))
        found = _POSITION.fullmatch(text)
        if not found:
            raise error(
                "INVALID_POSITION",
                f"{text[:80]!r} is neither a message ID, as 123:45, nor a position, as 123/123:45@45 or 123@45",
            )
        message_id = MessageId.parse(found["last"]) if found["last"] else None
        ownership = int(found["ownership"] or "0", 16)
        parsed = Position(int(found["incarnation"]), message_id, int(found["index"]), ownership)
        fits = parsed.is_whole() and bool(found["start"]) == (parsed.index < 0)
        if not fits or max(parsed.incarnation, parsed.index) > _MAX_INT64:
            raise error("INVALID_POSITION", f"{text[:80]!r} is not a position: its parts do not fit together")
        return parsed

    def is_whole(self) -> bool:
        """Whether the parts fit together: a message ID and an ownership only where there is a message."""
        return self.index >= 0 or (self.index == -1 and self.message_id is None and self.ownership == 0)

    def is_same(self, other: "Position") -> bool:
        """Whether both are after the same message, as far as is known: a message ID that is None, and an ownership
        that is 0, fits any."""
        return (
            (self.incarnation, self.index) == (other.incarnation, other.index)
            and (None in (self.message_id, other.message_id) or self.message_id == other.message_id)
            and (0 in (self.ownership, other.ownership) or self.ownership == other.ownership)
        )

    def __str__(self) -> str:
        history = f"#{self.ownership:016x}" if self.ownership else ""
        last = "/start" if self.index < 0 else f"/{self.message_id}" if self.message_id else ""
        return f"{self.incarnation}{last}@{self.index}{history}"

    def to_proto(self) -> batch_pb2.Position:
        message = batch_pb2.Position(incarnation=self.incarnation, index=self.index, ownership=self.ownership)
        if self.message_id is not None:
            message.message_id.CopyFrom(self.message_id.to_proto())
        return message

    @staticmethod
    def from_proto(message: batch_pb2.Position) -> "Position":
        message_id = MessageId.from_proto(message.message_id) if message.HasField("message_id") else None
        return Position(message.incarnation, message_id, message.index, message.ownership)

    def to_bytes(self) -> bytes:
        return self.to_proto().SerializeToString(deterministic=True)

    @staticmethod
    def from_bytes(data: bytes) -> "Position":
        """Raises INVALID_POSITION if the bytes are not a position's."""
        try:
            return Position.from_proto(batch_pb2.Position.FromString(data))
        except DecodeError as e:
            raise error("INVALID_POSITION", "these bytes are not a position") from e
