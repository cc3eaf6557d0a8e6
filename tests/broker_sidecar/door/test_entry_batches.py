"""Entries of stock producers that would take more than they should."""

import pytest

from broker_sidecar.door.entry_batches import ProducerSession, batches_of, rows_to_store
from seqdedupe.errors import SeqdedupeError
from seqdedupe.limits import MAX_BATCH_BYTES
from seqdedupe.pulsar_wire.batches import EntryRow, EntryRows
from seqdedupe.pulsar_wire.frames import metadata_of
from tests.broker_sidecar.door.wire import batch


def test_a_schema_version_that_no_registry_makes_is_refused() -> None:
    """Each row keeps the version. The control: an entry of 1 MB took gigabytes."""
    entry = batch(1, 2)
    metadata = metadata_of(entry)
    metadata.schema_version = bytes(16)
    assert len(rows_to_store(entry, metadata, None)) == 2
    metadata.schema_version = bytes(17)
    with pytest.raises(SeqdedupeError, match="has a schema version of 17 bytes") as e:
        rows_to_store(entry, metadata, None)
    assert e.value.reason == "INVALID_REQUEST"


def test_what_is_added_to_each_row_counts_when_an_entry_is_divided() -> None:
    """The control: the batch was larger than a topic takes, and its producer ended for good."""
    rows = EntryRows.of([EntryRow(k, bytes(195), ordering_key=b"o") for k in range(30_000)])
    batches = list(batches_of(rows, ProducerSession(b"p", 1), -1, 1_700_000_000_000, bytes(8)))
    assert sum(len(one) for one in batches) == len(rows)
    assert max(len(one.encode()) for one in batches) <= MAX_BATCH_BYTES
