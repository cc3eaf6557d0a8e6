"""Message IDs, readers' positions, and the message IDs of many rows, stored in columns as runs."""

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from seqdedupe import wire
from seqdedupe.batch import Int32s, Int64s
from seqdedupe.errors import error
from seqdedupe.limits import MAX_INDEX
from seqdedupe.v1 import batch_pb2

_NUMBER = r"\d{1,19}"
_ID = rf"{_NUMBER}:{_NUMBER}(:{_NUMBER})?"
# Compiled at the first use: few programs read positions from text.
_POSITION = (
    rf"(?P<incarnation>{_NUMBER})(/((?P<start>start)|(?P<last>{_ID})))?@(?P<index>-1|{_NUMBER})"
    r"(#(?P<ownership>[0-9a-f]{16}))?"
)
_MAX_INT64 = 2**63 - 1


def checked_index(index: int) -> int:
    """Return the index if it is in the range of message indexes. Otherwise raise INVALID_POSITION."""
    if not 0 <= index <= MAX_INDEX:
        raise error("INVALID_POSITION", f"{index} is not an index: they are counted from 0, up to {MAX_INDEX}")
    return index


class MessageId(NamedTuple):
    """The place of a message in its log: ledger, entry, and batch index (-1 if an entry is one message).

    Ordered, hashable and picklable. `str()` returns `ledger:entry` or `ledger:entry:batch_index`, and `parse` reads
    this text. `to_bytes` and `from_bytes` convert to and from the stored form (the protobuf message of the same name).
    """

    ledger_id: int
    entry_id: int
    batch_index: int = -1

    def __str__(self) -> str:
        tail = "" if self.batch_index < 0 else f":{self.batch_index}"
        return f"{self.ledger_id}:{self.entry_id}{tail}"

    @staticmethod
    def of(incarnation: int, index: int) -> "MessageId":
        """Return a message's ID in the embedded log. The ledger is the topic's incarnation, and the entry is the
        index."""
        return MessageId(incarnation, index)

    @staticmethod
    def parse(text: str) -> "MessageId":
        """Return the message ID that `str()` printed. Raises INVALID_POSITION."""
        if re.fullmatch(_ID, text, re.ASCII):
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
        """Return the message ID. Raises INVALID_POSITION if the bytes do not encode a message ID."""
        try:
            return MessageId.from_proto(batch_pb2.MessageId.FromString(data))
        except DecodeError as e:
            raise error("INVALID_POSITION", "these bytes are not a message ID") from e


class Position(NamedTuple):
    """The place of a reader: after the message with this ID and index, in this incarnation of its topic.

    Positions are only compared for equality. Positions of two incarnations have no order. The start of a topic is
    `Position.start(incarnation)`: no message yet, index -1.

    `ownership` (64 bits, unsigned) identifies the history of the topic. It has eight bytes of the token of the marker
    under which the message was written. If an older copy of a log was restored and new messages were appended, other
    messages have the same indexes, but a different ownership. 0 means unknown; the start of a topic has no ownership.
    An unknown ownership is not checked. The message ID is unknown (None) if a range was cut at an index, because in
    some logs only a read finds the ID. The position's text is then `incarnation@index`. `==` compares all parts;
    `is_same` ignores unknown parts.
    """

    incarnation: int
    message_id: MessageId | None
    index: int  # type: ignore[assignment]  # a field, where a tuple has a method that nobody needs here
    ownership: int = 0

    @staticmethod
    def start(incarnation: int) -> "Position":
        return Position(incarnation, None, -1)

    @staticmethod
    def before(incarnation: int, index: int) -> "Position":
        """Return the position before the message with this index. The position has no message ID."""
        return Position(incarnation, None, index - 1)

    @staticmethod
    def of(message_id: MessageId) -> "Position":
        """Return the position after a message of the embedded log. The position's ownership is 0. Raises
        INVALID_POSITION."""
        incarnation, index, batch_index = message_id
        if min(incarnation, index) < 0 or batch_index >= 0:
            raise error("INVALID_POSITION", f"{message_id} is not the ID of a message of the embedded log, as 123:45")
        return Position(incarnation, message_id, index)

    @staticmethod
    def parse(text: str) -> "Position":
        """Return the position whose text `str()` has returned. For the text of a message ID in the embedded log, return
        the position after this message.

        Raises INVALID_POSITION.
        """
        if re.fullmatch(_ID, text, re.ASCII):
            return Position.of(MessageId.parse(text))
        found = re.fullmatch(_POSITION, text, re.ASCII)
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
        """Whether the parts fit together: only a position after a message has a message ID and an ownership."""
        return self.index >= 0 or (self.index == -1 and self.message_id is None and self.ownership == 0)

    def is_same(self, other: "Position") -> bool:
        """Whether both positions are after the same message, as far as is known. A message ID of None matches any ID,
        and an ownership of 0 matches any ownership."""
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
        """Return the position. Raises INVALID_POSITION if the bytes do not encode a position."""
        try:
            return Position.from_proto(batch_pb2.Position.FromString(data))
        except DecodeError as e:
            raise error("INVALID_POSITION", "these bytes are not a position") from e


# -- The message IDs of consecutive rows, stored in columns as runs.

_MAX_INT32 = 2**31 - 1


NOWHERE = MessageId(-1, -1)
"""The ID of no entry, before all entries."""


class MessageIds:
    """The message IDs of all or some rows of a batch. `ids[row]` is one ID, and `len(ids)` is the number of IDs.

    The first row of run k has (`ledger_ids[k]`, `entry_ids[k]`, `batch_indexes[k]`). If the batch index is -1 (an entry
    is one message), the entry counts up in the run's other rows. Otherwise the batch index counts up.
    """

    def __init__(self, run_rows: Int64s, ledger_ids: Int64s, entry_ids: Int64s, batch_indexes: Int32s) -> None:
        self.run_rows = run_rows
        self.ledger_ids = ledger_ids
        self.entry_ids = entry_ids
        self.batch_indexes = batch_indexes
        self._ends = np.cumsum(run_rows, dtype=np.int64)

    @staticmethod
    def of(runs: Iterable[tuple[int, int, int, int]]) -> "MessageIds":
        """Return the IDs of at least one run. Each run consists of its number of rows, ledger, entry and batch
        index."""
        rows, ledger_ids, entry_ids, batch_indexes = zip(*runs, strict=True)
        return MessageIds(
            np.array(rows, np.int64),
            np.array(ledger_ids, np.int64),
            np.array(entry_ids, np.int64),
            np.array(batch_indexes, np.int32),
        )

    @staticmethod
    def of_record(record: Any) -> "MessageIds | None":
        """Return the IDs of the rows of a `Record` that `wire` has read; None if the IDs follow from the index.

        Raises ValueError, with the problem, if the IDs do not fit the record's rows.
        """
        columns = record.run_rows, record.run_ledger_ids, record.run_entry_ids, record.run_batch_indexes
        if not any(columns):
            return None
        run_rows, ledger_ids, entry_ids, batch_indexes = columns
        runs = len(run_rows) // 4
        if not len(run_rows) == len(batch_indexes) == 4 * runs or not len(ledger_ids) == len(entry_ids) == 8 * runs:
            raise ValueError("the columns of runs have different lengths")
        ids = MessageIds(
            np.frombuffer(run_rows, "<u4").astype(np.int64),
            np.frombuffer(ledger_ids, "<i8"),
            np.frombuffer(entry_ids, "<i8"),
            np.frombuffer(batch_indexes, "<i4"),
        )
        ids._check()
        if len(ids) != record.rows:
            raise ValueError(f"there are {len(ids)} for {record.rows} rows")
        return ids

    def encode(self) -> bytes:
        """Return the encoded message ID fields of a `Record`. These fields follow all other fields."""
        record = wire.Record(
            run_rows=self.run_rows.astype("<u4").tobytes(),
            run_ledger_ids=self.ledger_ids.tobytes(),
            run_entry_ids=self.entry_ids.tobytes(),
            run_batch_indexes=self.batch_indexes.tobytes(),
        )
        encoded: bytes = record.SerializeToString()
        return encoded

    def _check(self) -> None:
        """Raise ValueError unless every run has rows, and the IDs are valid and ascending."""
        if not self.run_rows.all():
            raise ValueError(f"run {int(np.argmin(self.run_rows))} has no rows")
        ledgers, entries, places = self.ledger_ids, self.entry_ids, self.batch_indexes.astype(np.int64)
        alone, steps = places < 0, self.run_rows - 1
        wrong = (ledgers < 0) | (entries < 0) | (places < -1)
        wrong |= np.where(alone, entries > _MAX_INT64 - steps, places > _MAX_INT32 - steps)
        if wrong.any():
            raise ValueError(f"run {int(np.argmax(wrong))} has no message IDs: a number is negative or too large")
        last_entries, last_places = entries + np.where(alone, steps, 0), places + np.where(alone, 0, steps)
        same_ledger, same_entry = ledgers[:-1] == ledgers[1:], last_entries[:-1] == entries[1:]
        rises = (last_entries[:-1] < entries[1:]) | (same_entry & (last_places[:-1] < places[1:]))
        falls = ~((ledgers[:-1] < ledgers[1:]) | (same_ledger & rises))
        if falls.any():
            raise ValueError(f"the message IDs do not rise at run {int(np.argmax(falls)) + 1}")

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, row: int) -> MessageId:
        run = int(np.searchsorted(self._ends, row, "right"))
        step = row - int(self._ends[run] - self.run_rows[run])
        ledger_id, entry_id, place = int(self.ledger_ids[run]), int(self.entry_ids[run]), int(self.batch_indexes[run])
        return MessageId(ledger_id, entry_id + step) if place < 0 else MessageId(ledger_id, entry_id, place + step)

    def columns(self) -> tuple[Int64s, Int64s, Int32s]:
        """Return ledgers, entries and batch indexes of all rows."""
        run_of = np.repeat(np.arange(len(self.run_rows)), self.run_rows)
        steps = np.arange(len(self)) - (self._ends - self.run_rows)[run_of]
        places = self.batch_indexes[run_of]
        return (
            self.ledger_ids[run_of],
            self.entry_ids[run_of] + np.where(places < 0, steps, 0),
            np.where(places < 0, places, places + steps).astype(np.int32),
        )

    def cut(self, first: int, stop: int) -> "MessageIds":
        """Return the IDs of the rows from `first` to before `stop`, at least one."""
        begin = int(np.searchsorted(self._ends, first, "right"))
        end = int(np.searchsorted(self._ends, stop)) + 1
        rows = np.diff(np.minimum(self._ends[begin:end], stop), prepend=first)
        ids = MessageIds(
            rows,
            self.ledger_ids[begin:end].copy(),
            self.entry_ids[begin:end].copy(),
            self.batch_indexes[begin:end].copy(),
        )
        _, ids.entry_ids[0], ids.batch_indexes[0] = self[first]
        return ids
