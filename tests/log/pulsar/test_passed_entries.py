"""Batches of stock producers in a native topic: what passes as it was sent, and what the sidecar encodes itself."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqdedupe.log.pulsar.entries import MAX_ENTRY_BYTES, EntryFormat, PulsarMessage, encoded_part
from seqdedupe.log.pulsar.native import MAX_ENTRY_ROWS, native_entry, wire_entry
from seqdedupe.log.pulsar.writer import records_of_batch
from seqdedupe.message_id import MessageId
from seqdedupe.pulsar_wire.batches import EntryRow, EntryRows, SentEntry, rows_of, stored_batch
from seqdedupe.pulsar_wire.frames import COMPRESSIONS, WireEntry, compress, metadata_of
from seqdedupe.pulsar_wire.pulsar_api_pb2 import LZ4, NONE, ZLIB, ZSTD, CompressionType, MessageMetadata
from seqdedupe.pulsar_wire.rows import KEY_IS_BASE64, NULL_KEY, NULL_VALUE
from tests.log.pulsar.topics import SETTINGS, owner
from tests.pulsar_wire import oracle

MAX_BYTES = 64 * 1024 * 1024
NOW_MS = 1_700_000_000_000
EPOCH, LINK = 3, 4


def sent_as(payload: bytes, rows: int, compression: CompressionType.ValueType) -> SentEntry:
    """A payload as the door got it."""
    metadata = MessageMetadata(
        producer_name=b"p",
        sequence_id=5,
        publish_time=1,
        compression=compression,
        num_messages_in_batch=rows,
        uncompressed_size=len(payload),
    )
    entry = WireEntry(metadata.SerializeToString(), bytes(compress(compression, payload)))
    return SentEntry(compression, entry.payload, len(payload), rows_of(entry, metadata, MAX_BYTES))


def messages(
    rows: EntryRows,
    sent: SentEntry | None,
    limit_bytes: int = MAX_ENTRY_BYTES,
    configured: CompressionType.ValueType = ZSTD,
    more: Sequence[tuple[bytes, bytes]] = (),
) -> list[PulsarMessage]:
    """The entries of a topic's batch of these rows, each of which has the properties `more` too."""
    of_native = SETTINGS._replace(format=EntryFormat.NATIVE)
    part = encoded_part(stored_batch(rows, b"p", EPOCH, LINK, more))
    found = records_of_batch(of_native, owner(1), 7, 100, NOW_MS, part, limit_bytes, configured, sent)
    return [message for record in found for message in record.entries]


def written(message: PulsarMessage) -> WireEntry:
    return message.wire or wire_entry(message, "ours", 1, message.compression)


def check_comes_back(message: PulsarMessage) -> MessageMetadata:
    entry = written(message)
    metadata = metadata_of(entry)
    read = native_entry(MessageId(5, 6), entry, metadata).message
    assert read == PulsarMessage(*message[:4])
    return metadata


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=6).map(str.encode)
ROW = st.tuples(
    st.binary(max_size=20),
    st.none() | TEXTS.map(lambda key: (key, 0)) | st.just((b"/w==", KEY_IS_BASE64)) | st.just((b"YQ==", KEY_IS_BASE64)),
    st.none() | st.binary(max_size=4),
    st.lists(st.tuples(TEXTS, TEXTS), max_size=2, unique_by=lambda pair: pair[0]),
    st.sampled_from([0, 1, NOW_MS, -1]),
    st.booleans(),
)


@st.composite
def some_rows(draw: st.DrawFn) -> list[EntryRow]:
    found: list[EntryRow] = []
    sequence_id = LINK
    for payload, key, ordering_key, pairs, event_time, is_null in draw(st.lists(ROW, min_size=1, max_size=6)):
        sequence_id += draw(st.integers(1, 3))
        text, flags = key or (None, 0)
        flags |= NULL_VALUE if is_null else 0
        payload = b"" if is_null else payload
        found.append(EntryRow(sequence_id, payload, text, ordering_key, tuple(pairs), event_time, flags))
    return found


@given(some_rows(), st.sampled_from(COMPRESSIONS))
def test_a_whole_batch_keeps_its_payload(rows: list[EntryRow], compression: CompressionType.ValueType) -> None:
    sent = sent_as(oracle.written(rows), len(rows), compression)
    [message] = messages(EntryRows.of(rows), sent)
    assert message.wire is not None
    assert message.wire.payload is sent.payload
    metadata = check_comes_back(message)
    assert (metadata.compression, metadata.uncompressed_size) == (sent.compression, sent.uncompressed_size)
    ours = metadata_of(written(messages(EntryRows.of(rows), None)[0]))
    for one in (metadata, ours):
        # A key in base64 is the producer's own choice.
        for field in ("compression", "uncompressed_size", "partition_key", "partition_key_b64_encoded", "ordering_key"):
            one.ClearField(field)
    assert metadata == ours


def test_the_entry_has_the_key_that_all_rows_share() -> None:
    rows = plain_rows(key=b"k", ordering_key=b"o")
    metadata = check_comes_back(messages(EntryRows.of(rows), sent_as(oracle.written(rows), len(rows), LZ4))[0])
    assert (metadata.partition_key, metadata.ordering_key) == (b"k", b"o")
    rows[-1] = rows[-1]._replace(key=b"l")
    metadata = check_comes_back(messages(EntryRows.of(rows), sent_as(oracle.written(rows), len(rows), LZ4))[0])
    assert (metadata.HasField("partition_key"), metadata.ordering_key) == (False, b"o")


def plain_rows(count: int = 3, **fields: object) -> list[EntryRow]:
    return [EntryRow(LINK + 1 + k, bytes(300))._replace(**fields) for k in range(count)]  # type: ignore[arg-type]


def named(name: bytes, value: bytes = b"1") -> list[EntryRow]:
    return plain_rows(properties=((name, value),))


@pytest.mark.parametrize(("deliver_at_time", "version"), [(70, b""), (0, b"\0\1"), (70, b"\0\1")])
@pytest.mark.parametrize("ordering_key", [None, b"o"])
def test_fields_of_the_entry_are_properties_of_each_message_when_it_is_read(
    deliver_at_time: int, version: bytes, ordering_key: bytes | None
) -> None:
    """As the topic has them, where nothing else can hold them. Consumers see the producer's own properties alone."""
    rows = plain_rows(properties=((b"a", b"1"),), ordering_key=ordering_key)
    sent = sent_as(oracle.written(rows), len(rows), LZ4)
    sent = sent._replace(deliver_at_time=deliver_at_time, schema_version=version)
    more = [(b"pulsar.deliver_at_time", b"70")] if deliver_at_time else []
    more += [(b"pulsar.schema_version", b"0001")] if version else []
    [message] = messages(EntryRows.of(rows), sent, more=more)
    assert message.wire is not None
    assert message.wire.payload is sent.payload
    metadata = check_comes_back(message)
    assert (metadata.deliver_at_time, metadata.schema_version) == (deliver_at_time, version)
    # The topic has other properties than the entry says.
    assert messages(EntryRows.of(rows), sent, more=[*more, (b"b", b"2")])[0].wire is None
    assert messages(EntryRows.of(rows), sent)[0].wire is None


BUILT: dict[str, Sequence[EntryRow]] = {
    "a property by which consumers skip messages": named(b"seqdedupe.kind"),
    "a schema version": named(b"pulsar.schema_version", b"00"),
    "a delivery time": named(b"pulsar.deliver_at_time", b"70"),
    "more messages than an entry has": plain_rows(MAX_ENTRY_ROWS + 1),
}


@pytest.mark.parametrize("rows", BUILT.values(), ids=BUILT)
def test_what_a_reader_or_a_consumer_would_take_for_something_else_is_encoded(rows: Sequence[EntryRow]) -> None:
    found = messages(EntryRows.of(rows), sent_as(oracle.written(rows), len(rows), LZ4))
    assert [message.wire for message in found] == [None] * len(found)
    assert sum(check_comes_back(message).num_messages_in_batch for message in found) == len(rows)
    # It keeps the compression of its producer.
    assert {metadata_of(written(message)).compression for message in found} == {LZ4}


def without_ids(sent: SentEntry) -> SentEntry:
    rows = plain_rows()
    return sent_as(oracle.written(rows, with_ids=False), len(rows), ZLIB)


def with_null_keys(sent: SentEntry) -> SentEntry:
    rows = plain_rows(flags=NULL_KEY)
    return sent_as(oracle.written(rows), len(rows), ZLIB)


def of_all(sent: SentEntry) -> SentEntry:
    rows = plain_rows(5)
    return sent_as(oracle.written(rows), len(rows), ZLIB)


def of_others(sent: SentEntry) -> SentEntry:
    rows = plain_rows(payload=b"others" + bytes(300))
    return sent_as(oracle.written(rows), len(rows), ZLIB)


def of_no_batch(sent: SentEntry) -> SentEntry:
    return sent._replace(payload=b"", rows=None)


@pytest.mark.parametrize("change", [without_ids, with_null_keys, of_all, of_others, of_no_batch])
def test_a_payload_that_is_not_exactly_the_batch_is_not_stored(change: Callable[[SentEntry], SentEntry]) -> None:
    """For example the payload of a batch of which some messages were stored before."""
    rows = plain_rows()
    [message] = messages(EntryRows.of(rows), change(sent_as(oracle.written(rows), len(rows), ZLIB)))
    assert message.wire is None
    assert check_comes_back(message).compression == ZLIB


def test_the_limit_is_that_of_what_is_sent() -> None:
    rows = EntryRows.of(plain_rows(100))
    payload = oracle.written(plain_rows(100))
    [message] = messages(rows, sent_as(payload, 100, ZLIB), limit_bytes=20_000)
    assert message.wire is not None
    check_comes_back(message)
    several = messages(rows, sent_as(payload, 100, NONE), limit_bytes=20_000)
    assert len(several) > 1
    assert [message.wire for message in several] == [None] * len(several)


def test_others_have_the_configured_compression() -> None:
    rows = EntryRows.of(plain_rows())
    assert check_comes_back(messages(rows, None, configured=ZSTD)[0]).compression == ZSTD
    assert check_comes_back(messages(rows, None, configured=NONE)[0]).compression == NONE


def test_what_does_not_get_smaller_is_not_compressed() -> None:
    rows = EntryRows.of([EntryRow(LINK + 1, b"x")])
    [message] = messages(rows, None, configured=ZLIB)
    metadata = check_comes_back(message)
    assert (metadata.compression, metadata.uncompressed_size) == (NONE, len(written(message).payload))
