"""Entries that stock clients wrote to a real broker, as it stored them. `tests.pulsar.stock_entries` records them."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from seqdedupe.pulsar_wire.batches import (
    EntryKind,
    EntryRow,
    PulsarBatch,
    kind_of,
    range_of,
    rows_of,
)
from seqdedupe.pulsar_wire.frames import WireEntry, metadata_of
from seqdedupe.pulsar_wire.pulsar_api_pb2 import MessageMetadata
from seqdedupe.pulsar_wire.rows import KEY_IS_BASE64, NULL_VALUE

FILE = Path(__file__).parents[1] / "data" / "pulsar_entries.json"
MAX_BYTES = 1000
SECOND = EntryRow(20, b"second", b"key", None, ((b"name", b"value"), (b"", "ü".encode())), 1_700_000_000_000)
ROWS = {
    "python": [EntryRow(10, b"first"), SECOND, EntryRow(30, b"", None, b"o")],
    "java": [EntryRow(10, b"first"), SECOND, EntryRow(30, b"", b"AAE=", b"o", flags=KEY_IS_BASE64 | NULL_VALUE)],
}
HIGHEST = {"python": 10, "java": 30}
"""Python's client does not state the highest ID of a batch."""


def recorded(client: str, kind: EntryKind) -> list[tuple[WireEntry, MessageMetadata]]:
    entries = [WireEntry(*map(bytes.fromhex, entry.values())) for entry in json.loads(FILE.read_text())[client]]
    pairs = [(entry, metadata_of(entry)) for entry in entries]
    return [pair for pair in pairs if kind_of(pair[1]) is kind]


@pytest.mark.parametrize("client", ROWS)
def test_batches_of_every_compression_are_read(client: str) -> None:
    batches = recorded(client, EntryKind.BATCH)
    assert Counter(metadata.compression for _, metadata in batches) == dict.fromkeys(range(5), 1)
    for entry, metadata in batches:
        columns = rows_of(entry, metadata, MAX_BYTES)
        assert [columns.row(k) for k in range(len(columns))] == ROWS[client]
        assert range_of(metadata) == (10, HIGHEST[client])
        taken = PulsarBatch.of(entry, metadata, MAX_BYTES).take(np.array([0, 1, 1], np.uint8))
        columns = rows_of(taken, metadata_of(taken), MAX_BYTES)
        assert [columns.row(k) for k in range(len(columns))] == ROWS[client][1:]
        assert range_of(metadata_of(taken)) == (20, 30)


@pytest.mark.parametrize("client", ROWS)
def test_unbatched_entries_are_read(client: str) -> None:
    columns = [rows_of(entry, metadata, MAX_BYTES) for entry, metadata in recorded(client, EntryKind.SINGLE)]
    assert [one.row(0) for one in columns] == ROWS[client]


def test_chunks_and_encrypted_entries_are_recognised() -> None:
    chunks = [metadata for _, metadata in recorded("java", EntryKind.CHUNK)]
    parts = [(chunk.uuid, chunk.chunk_id, chunk.num_chunks_from_msg) for chunk in chunks]
    assert parts == [(chunks[0].uuid, k, 2) for k in range(2)]
    assert [range_of(metadata) for _, metadata in recorded("java", EntryKind.ENCRYPTED)] == [(10, 30)]
