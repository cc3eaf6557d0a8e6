"""Rows of entries: what was written is read, by our kernels and by protobuf alone, and what is malformed is refused."""

import base64
import struct
from random import Random

import numpy as np
import pytest

from seqdedupe.errors import SeqdedupeError
from seqdedupe.pulsar_wire.batches import (
    EntryKind,
    EntryRow,
    EntryRows,
    PulsarBatch,
    batch_of,
    kind_of,
    range_of,
    rows_of,
    stored_batch,
)
from seqdedupe.pulsar_wire.frames import COMPRESSIONS, WireEntry, metadata_of, stamped
from seqdedupe.pulsar_wire.pulsar_api_pb2 import (
    LZ4,
    CompressionType,
    EncryptionKeys,
    MessageMetadata,
    Property,
    SingleMessageMetadata,
)
from seqdedupe.pulsar_wire.rows import COMPACTED_OUT, KEY_IS_BASE64, NULL_KEY, NULL_VALUE
from tests.pulsar_wire import oracle

MAX_BYTES = 5 * 1024 * 1024
ROWS = [
    EntryRow(5, b"plain"),
    EntryRow(
        7, b"all", b"k", b"ordering", ((b"a", b"1"), (b"", b""), (b"n" * 200, "ü".encode() * 9000)), 1_700_000_000_000
    ),
    EntryRow(8, b"", b"", b"", (), -1, NULL_VALUE | NULL_KEY),
    EntryRow(2**63 - 1, b"\x00" * 300, b"YmluYXJ5", None, ((b"a", b""),), 1, KEY_IS_BASE64),
    EntryRow(9, b"", b"gone", flags=COMPACTED_OUT),
]


def entry_of(rows: list[EntryRow], payload: bytes | None = None, **fields: object) -> WireEntry:
    """A batch as clients write it."""
    metadata = MessageMetadata(
        producer_name=b"p", publish_time=1, sequence_id=rows[0].sequence_id, num_messages_in_batch=len(rows)
    )
    for name, value in fields.items():
        setattr(metadata, name, value)
    return WireEntry(metadata.SerializeToString(), oracle.written(rows) if payload is None else payload)


def read(entry: WireEntry) -> list[EntryRow]:
    columns = rows_of(entry, metadata_of(entry), MAX_BYTES)
    return [columns.row(k) for k in range(len(columns))]


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_what_is_written_is_read(compression: CompressionType.ValueType) -> None:
    entry = batch_of(EntryRows.of(ROWS), b"name", 12, compression, b"v1")
    metadata = metadata_of(entry)
    assert read(entry) == ROWS
    assert (metadata.producer_name, metadata.publish_time, metadata.schema_version) == (b"name", 12, b"v1")
    assert range_of(metadata) == (5, 9)
    assert metadata.num_messages_in_batch == len(ROWS)
    assert metadata.uncompressed_size == len(oracle.written(ROWS))
    assert not metadata.HasField("event_time")
    assert not metadata.HasField("partition_key")


def test_protobuf_reads_what_the_kernel_writes() -> None:
    assert oracle.read(bytes(batch_of(EntryRows.of(ROWS), b"p", 1).payload), len(ROWS), 0) == ROWS


def test_a_batch_of_one_row_says_so() -> None:
    metadata = metadata_of(batch_of(EntryRows.of([EntryRow(1, b"x")]), b"p", 1))
    assert metadata.HasField("num_messages_in_batch")
    assert kind_of(metadata) is EntryKind.BATCH


@pytest.mark.parametrize(
    ("rows", "key", "is_base64", "ordering_key"),
    [
        ([EntryRow(1, key=b"k"), EntryRow(2, key=b"k")], b"k", False, b""),
        ([EntryRow(1, key=b"k", flags=KEY_IS_BASE64), EntryRow(2, key=b"k", flags=KEY_IS_BASE64)], b"k", True, b""),
        ([EntryRow(1, key=b"k", flags=KEY_IS_BASE64), EntryRow(2, key=b"k")], b"", False, b""),
        ([EntryRow(1, key=b"k"), EntryRow(2)], b"", False, b""),
        ([EntryRow(1, key=b"kk"), EntryRow(2, key=b"kl"), EntryRow(3, key=b"kk")], b"", False, b""),
        ([EntryRow(1, ordering_key=b"o"), EntryRow(2, key=b"k", ordering_key=b"o")], b"", False, b"o"),
    ],
)
def test_the_entry_has_the_key_that_all_rows_share(
    rows: list[EntryRow], key: bytes, is_base64: bool, ordering_key: bytes
) -> None:
    metadata = metadata_of(batch_of(EntryRows.of(rows), b"p", 1))
    found = (metadata.partition_key, metadata.partition_key_b64_encoded, metadata.ordering_key)
    assert found == (key, is_base64, ordering_key)


def test_ids_that_a_client_omits_follow_from_the_first() -> None:
    rows = [EntryRow(100, b"a"), EntryRow(0, b"b"), EntryRow(0, b"c")]
    entry = entry_of(rows, oracle.written(rows, with_ids=False))
    assert [row.sequence_id for row in read(entry)] == [100, 101, 102]


def test_rows_are_taken_with_their_bytes() -> None:
    entry = stamped(batch_of(EntryRows.of(ROWS), b"p", 1, LZ4), b"ours")
    batch = PulsarBatch.of(entry, metadata_of(entry), MAX_BYTES)
    taken = batch.take(np.array([0, 1, 0, 1, 0], np.uint8))
    metadata = metadata_of(taken)
    assert read(taken) == [ROWS[1], ROWS[3]]
    assert metadata.compression == LZ4
    assert (metadata.sequence_id, metadata.highest_sequence_id) == (7, 2**63 - 1)
    assert metadata.num_messages_in_batch == 2
    assert metadata.uncompressed_size == len(oracle.written([ROWS[1], ROWS[3]]))


def test_taken_rows_keep_fields_that_we_do_not_know() -> None:
    unknown = SingleMessageMetadata(payload_size=1, sequence_id=4).SerializeToString() + b"\xf8\x0f\x01"
    payload = oracle.written([EntryRow(3, b"a")]) + struct.pack(">I", len(unknown)) + unknown + b"b"
    entry = entry_of([EntryRow(3), EntryRow(4)], payload)
    taken = PulsarBatch.of(entry, metadata_of(entry), MAX_BYTES).take(np.array([0, 1], np.uint8))
    assert bytes(taken.payload) == struct.pack(">I", len(unknown)) + unknown + b"b"


def test_taken_rows_get_the_ids_that_they_had() -> None:
    rows = [EntryRow(100, b"a", b"k"), EntryRow(0, b"b"), EntryRow(0, b"c", b"k")]
    entry = entry_of(rows, oracle.written(rows, with_ids=False))
    taken = PulsarBatch.of(entry, metadata_of(entry), MAX_BYTES).take(np.array([1, 0, 1], np.uint8))
    assert read(taken) == [EntryRow(100, b"a", b"k"), EntryRow(102, b"c", b"k")]
    assert metadata_of(taken).partition_key == b"k"


def test_taken_rows_do_not_have_the_key_of_others() -> None:
    """Clients put the first row's key on the entry."""
    rows = [EntryRow(1, b"a", b"k", b"o"), EntryRow(2, b"b"), EntryRow(3, b"c", b"l")]
    entry = entry_of(rows, partition_key=b"k", ordering_key=b"o", partition_key_b64_encoded=True, event_time=4)
    taken = PulsarBatch.of(entry, metadata_of(entry), MAX_BYTES).take(np.array([0, 1, 1], np.uint8))
    metadata = metadata_of(taken)
    for field in ("partition_key", "ordering_key", "partition_key_b64_encoded", "event_time"):
        assert not metadata.HasField(field)


def test_an_unbatched_entry_is_one_row() -> None:
    metadata = MessageMetadata(
        producer_name=b"p",
        publish_time=1,
        sequence_id=9,
        partition_key=b"a2V5",
        partition_key_b64_encoded=True,
        ordering_key=b"o",
        event_time=2**64 - 5,
        properties=[Property(key=b"a", value=b"1")],
    )
    entry = WireEntry(metadata.SerializeToString(), b"payload")
    assert read(entry) == [EntryRow(9, b"payload", b"a2V5", b"o", ((b"a", b"1"),), -5, KEY_IS_BASE64)]


def test_a_batch_without_rows_is_void() -> None:
    metadata = MessageMetadata(producer_name=b"p", publish_time=1, sequence_id=9, num_messages_in_batch=0)
    assert read(WireEntry(metadata.SerializeToString(), b"")) == []


def test_entries_without_rows_are_recognised() -> None:
    chunk = MessageMetadata(uuid=b"u", chunk_id=1, num_chunks_from_msg=3, total_chunk_msg_size=20)
    assert kind_of(chunk) is EntryKind.CHUNK
    encrypted = MessageMetadata(encryption_keys=[EncryptionKeys(key=b"k")], sequence_id=3, highest_sequence_id=8)
    assert (kind_of(encrypted), range_of(encrypted)) == (EntryKind.ENCRYPTED, (3, 8))
    assert kind_of(MessageMetadata(marker_type=10)) is EntryKind.MARKER
    with pytest.raises(SeqdedupeError, match="encrypted") as raised:
        rows_of(WireEntry(b"", b""), encrypted, MAX_BYTES)
    assert raised.value.reason == "INVALID_REQUEST"


def row_of(metadata: bytes, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(metadata)) + metadata + payload


@pytest.mark.parametrize(
    ("rows", "payload"),
    [
        pytest.param(2, row_of(b"\x18\x00"), id="fewer rows"),
        pytest.param(-1, row_of(b"\x18\x00"), id="a negative number of rows"),
        pytest.param(2**31 - 1, row_of(b"\x18\x00"), id="billions of rows"),
        pytest.param(1, row_of(b"\x18\x00") + b"x", id="bytes after the last row"),
        pytest.param(1, row_of(b"", b"123456"), id="no payload size"),
        pytest.param(1, row_of(b"\x18\x05", b"1234"), id="payload cut off"),
        pytest.param(1, row_of(b"\x18" + b"\xff" * 9 + b"\x01"), id="negative payload size"),
        pytest.param(1, struct.pack(">I", 2**31) + b"\x18\x00", id="huge metadata"),
        pytest.param(1, row_of(b"\x18\x00\x12\x05ab"), id="key cut off"),
        pytest.param(1, row_of(b"\x18\x00\x12" + b"\xff" * 9 + b"\x01"), id="key of negative size"),
        pytest.param(1, row_of(b"\x18\x00\x28" + b"\xff" * 11), id="number of more than 64 bits"),
        pytest.param(1, row_of(b"\x18\x00\x00\x00"), id="field 0"),
        pytest.param(1, row_of(b"\x18\x00\x0b\x0c"), id="group"),
        pytest.param(1, row_of(b"\x18\x00\x0d\x00"), id="fixed32 cut off"),
        pytest.param(1, row_of(b"\x18\x00\x0a\x02\x0a\x05"), id="name of a property cut off"),
        pytest.param(1, row_of(b"\x18\x00\x0a\x01\x0a"), id="property ends after a tag"),
    ],
)
def test_a_malformed_batch_is_refused(rows: int, payload: bytes) -> None:
    entry = entry_of([EntryRow(0)], payload, num_messages_in_batch=rows)
    with pytest.raises(SeqdedupeError, match="MALFORMED_MESSAGE"):
        read(entry)


def test_ids_above_the_highest_are_refused() -> None:
    for entry in (
        entry_of([EntryRow(0)], row_of(b"\x18\x00\x40" + b"\xff" * 9 + b"\x01")),
        WireEntry(MessageMetadata(producer_name=b"p", publish_time=1, sequence_id=2**63).SerializeToString(), b""),
    ):
        with pytest.raises(SeqdedupeError, match="INVALID_SEQUENCE_ID"):
            read(entry)


def test_random_rows_are_read_and_written_as_protobuf_does() -> None:
    random = Random(1)
    for _ in range(200):
        rows = [random_row(random) for _ in range(random.randrange(1, 20))]
        entry = batch_of(EntryRows.of(rows), b"p", 1)
        assert oracle.read(bytes(entry.payload), len(rows), 0) == rows
        assert read(entry_of(rows)) == rows


def random_row(random: Random) -> EntryRow:
    def text(most: int = 300) -> bytes:
        return random.randbytes(random.choice([0, 1, random.randrange(most)]))

    return EntryRow(
        random.randrange(2 ** random.randrange(1, 64)),
        text(20_000),
        random.choice([None, text()]),
        random.choice([None, text()]),
        tuple((text(), text(20_000)) for _ in range(random.choice([0, 0, 1, 3]))),
        random.choice([0, random.randrange(-(2**63), 2**63), 1_700_000_000_000]),
        random.choice([0, random.randrange(64) & (KEY_IS_BASE64 | NULL_VALUE | COMPACTED_OUT | NULL_KEY)]),
    )


@pytest.mark.parametrize("more", [[], [(b"m", b"1"), (b"n", b"")]])
def test_rows_are_stored_with_what_is_added_to_their_properties(
    more: list[tuple[bytes, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: a Python object for each of a million properties stopped the event loop for seconds."""
    columns = EntryRows.of(ROWS)
    expected = []
    for row in ROWS:
        key = [] if row.ordering_key is None else [(b"pulsar.ordering_key", base64.b64encode(row.ordering_key))]
        expected.append({name.decode(): value.decode() for name, value in [*row.properties, *more, *key]})
    monkeypatch.delattr(EntryRows, "row")
    stored = stored_batch(columns, b"p", 1, 0, more)
    assert [stored.properties_of(k) for k in range(len(ROWS))] == expected
    assert len(stored.property_names.offsets) == 1 + sum(map(len, expected))
