"""`native`: what is sent comes back as it was, an entry is a batch of Pulsar's, and no byte of it can lie unnoticed."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqdedupe.batch import Batch, Binary
from seqdedupe.entry_properties import CONTROL, KIND, MARKER
from seqdedupe.errors import DamagedError, InvalidRequestError, SeqdedupeError, error
from seqdedupe.format.layout import PUBLISH_TIME_MS
from seqdedupe.log.pulsar import entries
from seqdedupe.log.pulsar.broker_wire import TopicReader
from seqdedupe.log.pulsar.entries import EntryFormat, PulsarEntry, PulsarMessage
from seqdedupe.log.pulsar.native import MAX_ENTRY_ROWS, native_entry, wire_entry
from seqdedupe.log.pulsar.terms import Terms, TermStanding, TermVerdict
from seqdedupe.message_id import MessageId
from seqdedupe.pulsar_wire.batches import EntryRow, EntryRows, batch_of, rows_of
from seqdedupe.pulsar_wire.connection import StoredEntry, WirePlace
from seqdedupe.pulsar_wire.frames import (
    COMPRESSIONS,
    SEQDEDUPE_FIELD,
    WireEntry,
    entry_frame_bytes,
    metadata_of,
    stamped,
)
from seqdedupe.pulsar_wire.pulsar_api_pb2 import NONE, CompressionType, MessageMetadata
from seqdedupe.pulsar_wire.rows import NULL_VALUE
from tests.batches import batch
from tests.log.pulsar.test_plain import histories
from tests.log.pulsar.topics import (
    INCARNATION,
    SETTINGS,
    all_rows,
    batches_in,
    collected,
    native,
    owner,
    token,
)

OURS = "seqdedupe-one-0"
MAX_BYTES = 1024 * 1024
BODY = b"\x00\xffcontrol"


def marker(term: int) -> PulsarMessage:
    of_native = SETTINGS._replace(format=EntryFormat.NATIVE)
    return entries.marker_message(INCARNATION, term, token(term), of_native)._replace(event_time_ms=999)


def control(term: int, number: int, next_index: int) -> PulsarMessage:
    return entries.control_message(owner(term), number, next_index, BODY)._replace(event_time_ms=1001)


def messages_of(history: list[Batch]) -> list[PulsarMessage]:
    found = [marker(1)]
    index = 0
    for each in history:
        found += native(1, len(found), index, each)
        index += len(each)
        found.append(control(1, len(found), index))
    return found


def back(message: PulsarMessage, compression: CompressionType.ValueType = NONE) -> PulsarEntry:
    entry = wire_entry(message, OURS, 77, compression)
    return native_entry(MessageId(5, 6), entry, metadata_of(entry))


@given(histories(), st.sampled_from(COMPRESSIONS))
def test_what_was_sent_comes_back(history: list[Batch], compression: CompressionType.ValueType) -> None:
    messages = messages_of(history)
    read = [back(message, compression) for message in messages]
    assert [entry.message for entry in read] == messages
    found = collected(entry._replace(message_id=MessageId(5, k)) for k, entry in enumerate(read))
    assert all_rows(batches_in(found)) == all_rows(history)
    assert set(found.table[:, PUBLISH_TIME_MS].tolist()) <= {999, 1000, 1001}
    assert all(len(each.names()) == 1 for each in batches_in(found))


def test_what_a_stock_consumer_sees() -> None:
    sent = batch(
        [("the:orders", 7), ("the:orders", 9), ("other", 1)],
        payloads=[b"one", None, b""],
        keys=[b"k", b"\xff", None],
        event_times_ms=np.array([5, 0, -1], np.int64),
        row_properties=[{"colour": "blue", "seqdedupe.entry": "mine"}, None, None],
    )
    first, second = (wire_entry(message, OURS, 77) for message in native(3, 12, 100, sent))
    metadata = metadata_of(first)
    assert (metadata.producer_name, metadata.sequence_id, metadata.highest_sequence_id) == (b"the:orders", 7, 9)
    assert (metadata.publish_time, metadata.event_time, metadata.num_messages_in_batch) == (1000, 0, 2)
    assert (metadata.uncompressed_size, len(metadata.properties)) == (len(first.payload), 0)
    rows = rows_of(first, metadata, MAX_BYTES)
    properties = ((b"colour", b"blue"), (b"seqdedupe.user.seqdedupe.entry", b"mine"))
    assert rows.row(0) == EntryRow(7, b"one", b"k", None, properties, 5)
    assert rows.row(1).key == b"/w=="
    assert rows.row(1).flags & NULL_VALUE
    assert metadata_of(second).producer_name == b"other"


def check_comes_back(sent: Batch) -> None:
    messages = messages_of([sent])
    read = [back(message) for message in messages]
    assert [entry.message for entry in read] == messages
    found = collected(entry._replace(message_id=MessageId(5, k)) for k, entry in enumerate(read))
    assert all_rows(batches_in(found)) == all_rows([sent])


def test_no_message_has_the_property_by_which_consumers_skip() -> None:
    """Its producer may have named a property like ours."""
    properties: list[dict[str, str] | None] = [
        {KIND: MARKER},
        {"seqdedupe.user." + KIND: "a", KIND: "b", "pulsar.ordering_key": "bzE="},
        {"seqdedupe.user.x": "c", "x": "d", "seqdedupe.": "e"},
    ]
    sent = batch([("p", i) for i in range(len(properties))], row_properties=properties)
    check_comes_back(sent)
    entry = wire_entry(native(1, 1, 0, sent)[0], OURS, 77)
    rows = rows_of(entry, metadata_of(entry), MAX_BYTES)
    names = {name for k in range(len(rows)) for name, _ in rows.row(k).properties}
    assert all(name.startswith(b"seqdedupe.user.seqdedupe.") for name in names - {b"x"})


def test_an_ordering_key_is_one() -> None:
    """The door keeps it as the last property. Nothing else is taken for one, so that what was sent comes back."""
    key = {"pulsar.ordering_key": "bzE="}
    properties: list[dict[str, str] | None] = [
        {"a": "1"} | key,
        key,
        key | {"a": "1"},
        {"pulsar.ordering_key": "no base64"},
        {"pulsar.ordering_key": ""},
        None,
    ]
    sent = batch([("p", i) for i in range(len(properties))], row_properties=properties)
    messages = native(1, 1, 0, sent)
    check_comes_back(sent)
    entry = wire_entry(messages[0], OURS, 77)
    rows = rows_of(entry, metadata_of(entry), MAX_BYTES)
    assert [rows.row(k).ordering_key for k in range(6)] == [b"o1", b"o1", None, None, None, None]
    assert [len(rows.row(k).properties) for k in range(6)] == [1, 0, 2, 1, 1, 0]
    alone = wire_entry(native(1, 1, 0, batch([("p", 0)], row_properties=[key]))[0], OURS, 77)
    assert metadata_of(alone).ordering_key == b"o1"


def test_messages_of_an_entry_have_one_delivery_time() -> None:
    times = [None, "70", "70", "80", None, "no time", "9" * 19, "-1"]
    properties = [None if time is None else {"pulsar.deliver_at_time": time} for time in times]
    sent = batch([("p", i) for i in range(len(times))], row_properties=properties)
    messages = native(1, 1, 0, sent)
    entries_sent = [metadata_of(wire_entry(message, OURS, 77)) for message in messages]
    assert [(one.num_messages_in_batch, one.deliver_at_time) for one in entries_sent] == [
        (1, 0),
        (2, 70),
        (1, 80),
        (4, 0),
    ]
    check_comes_back(sent)


def test_fields_of_the_entry_are_found_among_many_properties(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a Python object for each property of a frame stopped the event loop for a second."""
    monkeypatch.delattr(Binary, "values")
    fields = [
        {},
        {"pulsar.deliver_at_time": "70", "pulsar.schema_version": "01", "pulsar.ordering_key": "bw=="},
        {"pulsar.deliver_at_timE": "80", "pulsar.schema_version": "01"},
        {"pulsar.schema_versioN": "02"},
    ]
    others = {f"name {k}": "70" for k in range(3)}
    sent = batch([("p", i) for i in range(4)], row_properties=[{**others, **one} if one else None for one in fields])
    entries_sent = [metadata_of(wire_entry(message, OURS, 77)) for message in native(1, 1, 0, sent)]
    assert [(one.deliver_at_time, one.schema_version) for one in entries_sent] == [
        (0, b""),
        (70, b"\x01"),
        (0, b"\x01"),
        (0, b""),
    ]
    assert [one.ordering_key for one in entries_sent] == [b"", b"o", b"", b""]


@pytest.mark.parametrize("message", [marker(3), control(3, 1, 0)], ids=[MARKER, CONTROL])
def test_what_has_no_messages_says_so_to_consumers(message: PulsarMessage) -> None:
    entry = wire_entry(message, OURS, 77)
    metadata = metadata_of(entry)
    assert (metadata.producer_name, metadata.sequence_id) == (OURS.encode(), 77)
    (row,) = [rows_of(entry, metadata, MAX_BYTES).row(0)]
    assert row.flags == NULL_VALUE
    assert row.properties == ((KIND.encode(), message.properties[KIND].encode()),)


def test_a_batch_becomes_entries_that_fit() -> None:
    many = batch([("p", i) for i in range(2 * MAX_ENTRY_ROWS + 1)])
    sizes = [int(message.properties["seqdedupe.rows"]) for message in native(1, 1, 0, many)]
    assert sizes == [MAX_ENTRY_ROWS, MAX_ENTRY_ROWS, 1]
    for payload_bytes in (100, 3000, 7000):
        wide = batch([("p", i) for i in range(40)], payloads=[bytes(payload_bytes)] * 40, keys=[b"k" * 500] * 40)
        messages = native(1, 1, 0, wide, limit_bytes=20_000)
        assert all(entry_frame_bytes(wire_entry(message, OURS, 1)) <= 20_000 for message in messages)
        assert sum(int(message.properties["seqdedupe.rows"]) for message in messages) == 40
    with pytest.raises(InvalidRequestError, match="MESSAGE_TOO_LARGE"):
        native(1, 1, 0, batch([("p", 0)], payloads=[bytes(20_000)]), limit_bytes=20_000)
    # Its key is there twice: on the entry too.
    with pytest.raises(InvalidRequestError, match="MESSAGE_TOO_LARGE"):
        native(1, 1, 0, batch([("p", 0)], keys=[b"k" * 11_000]), limit_bytes=20_000)


def test_an_entry_of_another_producer_has_its_name_and_highest_id() -> None:
    rows = EntryRows.of([EntryRow(sequence_id) for sequence_id in (7, 9, 8)])
    entry = batch_of(rows, b"theirs", 1000)
    metadata = metadata_of(entry)
    metadata.ClearField("highest_sequence_id")
    found = native_entry(MessageId(5, 6), entry, metadata)
    assert (found.message.properties, found.producer_name, found.sequence_id) == ({}, "theirs", 9)
    single = MessageMetadata(producer_name=b"theirs", sequence_id=4, publish_time=1)
    assert native_entry(MessageId(5, 6), WireEntry(single.SerializeToString(), b"x"), single).sequence_id == 4


def test_a_newer_field_is_said_to_be_newer() -> None:
    entry = wire_entry(marker(1), OURS, 1)
    newer = stamped(entry, b"\x02" + metadata_of(entry).seqdedupe[1:])
    with pytest.raises(DamagedError, match="NEWER_FORMAT"):
        native_entry(MessageId(5, 6), newer, metadata_of(newer))


WHOLE = messages_of([batch([("p", 1), ("p", 3), ("q", 9)], keys=[b"k", None, b"\xff"], payloads=[b"one", None, b""])])


@given(st.data())
def test_whatever_stands_there_is_read_or_is_damage(data: st.DataObject) -> None:
    entry = wire_entry(data.draw(st.sampled_from(WHOLE)), OURS, 77)
    parts = [bytearray(metadata_of(entry).seqdedupe), bytearray(entry.payload), bytearray(entry.metadata)]
    part = data.draw(st.integers(0, 2))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(parts[part]) - 1)) if parts[part] else 0
        parts[part][at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    changed = WireEntry(bytes(parts[2]), bytes(parts[1]))
    try:
        if part == 0:
            changed = stamped(changed, bytes(parts[0]))
        metadata = metadata_of(changed)
    except SeqdedupeError:
        return
    try:
        found = native_entry(MessageId(5, 6), changed, metadata)
    except DamagedError:
        return
    if found.message.properties:
        # It is read as what it says: sent again, it is the same.
        again = wire_entry(found.message, OURS, 77)
        assert native_entry(MessageId(5, 6), again, metadata_of(again)).message == found.message
    else:
        assert SEQDEDUPE_FIELD not in {field.number for field, _ in metadata.ListFields()}


class FakeReader:
    """Gives what it has, then the error."""

    def __init__(self, there: list[StoredEntry], why: SeqdedupeError) -> None:
        self.connection = self
        self._there, self._why = there, why

    async def next(self) -> StoredEntry:
        if (found := self.next_now()) is None:
            raise self._why
        return found

    def next_now(self) -> StoredEntry | None:
        return self._there.pop(0) if self._there else None

    async def close(self) -> None:
        pass


async def reader_of(*several: FakeReader) -> TopicReader:
    """One that gets these, one after the other."""
    left, starts = list(several), list[MessageId | None]()

    async def open_at(start: MessageId | None) -> Any:
        starts.append(start)
        return left.pop(0)

    reader = TopicReader(open_at, "t", native_entry)
    await reader.open(None)
    return reader


def stored(*messages: PulsarMessage, first: int = 0) -> list[StoredEntry]:
    found = [wire_entry(message, OURS, 1) for message in messages]
    return [StoredEntry(WirePlace(5, first + k), entry, metadata_of(entry)) for k, entry in enumerate(found)]


async def test_what_is_before_damage_is_read() -> None:
    there = stored(*WHOLE)
    bad = stamped(there[2].entry, b"\x02")
    there[2] = there[2]._replace(entry=bad, metadata=metadata_of(bad))
    reader = await reader_of(FakeReader(there, error("LOG_REFUSED", "it has ended")))
    assert [entry.message for entry in await reader.read()] == WHOLE[:2]
    for _ in range(2):
        with pytest.raises(DamagedError, match="NEWER_FORMAT"):
            await reader.read()


async def test_an_invalid_field_is_damage_behind_the_first_marker_alone() -> None:
    there = stored(*WHOLE)
    bad = stamped(there[0].entry, b"\x01")
    there[0] = there[0]._replace(entry=bad, metadata=metadata_of(bad))
    reader = await reader_of(FakeReader(there, error("LOG_REFUSED", "it has ended")))
    [entry, *_] = await reader.read()
    assert Terms(TermStanding.start(INCARNATION)).judge(entry.message, MessageId(5, 0)) is TermVerdict.EARLIER
    with pytest.raises(DamagedError, match=r"not as a sidecar writes it.*LOG_DAMAGED"):
        Terms(TermStanding(owner(1))).judge(entry.message, MessageId(5, 0))


async def test_a_reader_whose_connection_ends_goes_on_and_says_what_no_reader_can_read() -> None:
    broken = error("LOG_REFUSED", "the connection is broken")
    malformed = error("MALFORMED_MESSAGE", "a checksum is wrong")
    reader = await reader_of(FakeReader(stored(WHOLE[0]), broken), FakeReader(stored(WHOLE[1], first=1), malformed))
    assert [(await reader.read())[0].message for _ in range(2)] == WHOLE[:2]
    with pytest.raises(SeqdedupeError, match=r"a checksum is wrong.*LOG_UNREADABLE"):
        await reader.read()
