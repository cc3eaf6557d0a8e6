"""Topics that others wrote to before: what their entries say of their producers, and what the properties keep."""

from pathlib import Path

import pytest

from seqdedupe.errors import SeqdedupeError
from seqdedupe.log.pulsar import taking_over
from seqdedupe.log.pulsar.admin_url import StoredBefore
from seqdedupe.log.pulsar.entries import NOWHERE, EntryFormat
from seqdedupe.log.pulsar.native import highest_id
from seqdedupe.log.pulsar.taking_over import NUMBERS, TAKEN_OVER, last_before, numbers_before, properties_of
from seqdedupe.message_id import MessageId
from seqdedupe.pulsar_wire.batches import EntryKind, EntryRow, EntryRows, batch_of, chunk_of, range_of
from seqdedupe.pulsar_wire.compression import TYPES
from seqdedupe.pulsar_wire.frames import WireEntry, metadata_of
from seqdedupe.pulsar_wire.pulsar_api_pb2 import MessageMetadata
from seqdedupe.store.db import Store
from seqdedupe.topic.operations import open_sessions
from tests.log.pulsar.test_log import StandInHarness
from tests.log.pulsar.test_topic import recovered
from tests.log.pulsar.topics import stock
from tests.pulsar_wire.test_stock_entries import recorded


@pytest.mark.parametrize("client", ["python", "java"])
def test_the_highest_id_of_a_batch_of_every_compression_is_found(client: str) -> None:
    """The metadata of Python's client alone say 10."""
    batches = recorded(client, EntryKind.BATCH)
    assert len(batches) == len(TYPES)
    assert [highest_id(*pair) for pair in batches] == [30] * len(batches)
    assert [highest_id(*pair) for pair in recorded(client, EntryKind.SINGLE)] == [10, 20, 30]


def test_an_encrypted_batch_says_its_highest_id_by_its_metadata() -> None:
    [(entry, metadata)] = recorded("java", EntryKind.ENCRYPTED)
    assert highest_id(entry, metadata) == 30
    # Without it, as clients of C++ write: as if numbered in a row.
    metadata.ClearField("highest_sequence_id")
    assert (range_of(metadata)[1], highest_id(entry, metadata)) == (10, 12)


def test_a_message_of_chunks_is_there_with_its_last_one() -> None:
    """A message whose last chunk is missing was never there: its producer sends it again."""
    chunks = recorded("java", EntryKind.CHUNK)
    assert [chunk_of(metadata).number for _, metadata in chunks] == [0, 1]
    assert [highest_id(*pair) for pair in chunks] == [-1, 7]


def test_entries_of_pulsars_own_and_invalid_ids_say_nothing() -> None:
    marker = MessageMetadata(producer_name=b"p", sequence_id=4, publish_time=1, marker_type=20)
    too_high = MessageMetadata(producer_name=b"p", sequence_id=2**63, publish_time=1)
    assert [highest_id(WireEntry(b"", b""), metadata) for metadata in (marker, too_high)] == [-1, -1]


def test_the_rows_decide_only_if_the_metadata_state_no_highest_id() -> None:
    entry = batch_of(EntryRows.of([EntryRow(k) for k in (7, 90, 8)]), b"p", 1)
    metadata = metadata_of(entry)
    metadata.ClearField("highest_sequence_id")
    assert highest_id(entry, metadata) == 90
    # What cannot be decoded counts at least as the broker counts it.
    assert highest_id(entry._replace(payload=b"\xff"), metadata) == 9


def test_what_was_there_before_is_kept_in_properties() -> None:
    numbers = {f"producer-{k}": k for k in range(1000)} | {"ü": 2**63 - 1}
    properties = properties_of(StoredBefore(MessageId(17, 4), numbers | {"none": -1}))
    assert numbers_before(properties) == numbers
    assert last_before(properties) == MessageId(17, 4)
    without = properties_of(StoredBefore(MessageId(17, -1), {}))
    assert (last_before(without), numbers_before(without)) == (MessageId(17, -1), {})
    assert (last_before({}), numbers_before({})) == (NOWHERE, {})


def test_numbers_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taking_over, "MAX_NUMBERS_BYTES", 20)
    with pytest.raises(SeqdedupeError, match=r"knows 2 producers .*INVALID_REQUEST"):
        properties_of(StoredBefore(MessageId(17, 4), {"a": 1, "b": 2}))


@pytest.mark.parametrize("text", ["{}", "eA==", "eJyrVgIAATIAqA==", "\x00"])
def test_damaged_properties_are_damage(text: str) -> None:
    for find, name in ((numbers_before, NUMBERS), (last_before, TAKEN_OVER)):
        with pytest.raises(SeqdedupeError, match=f"{name}.*LOG_DAMAGED"):
            find({name: text})


async def test_the_brokers_numbers_stand_for_entries_that_are_gone(tmp_path: Path) -> None:
    """The higher one counts. Once the log states it, neither is needed."""
    store, another = Store.open(tmp_path / "one"), Store.open(tmp_path / "another")
    harness = StandInHarness(EntryFormat.PLAIN)
    harness.earlier = {"gone": 7, "p": 6, "q": 9}
    for name, sequence_id in (("p", 8), ("q", 2)):
        harness.topic.add(stock(), name, sequence_id)
    expected = [7, 8, 9, -1]
    topic = await recovered(harness, store)
    await topic.flight.all_of_now()
    assert (await open_sessions(topic, ["gone", "p", "q", "r"], None)).persisted == expected
    await topic.close("")
    harness.earlier = {}
    for at in (store, another):
        topic = await recovered(harness, at)
        assert (await open_sessions(topic, ["gone", "p", "q", "r"], None)).persisted == expected
        await topic.close("")
        at.close()


async def test_old_messages_are_read_without_the_entries_before_them() -> None:
    """Otherwise each reader of the first message would read through all that others have written before."""
    harness = StandInHarness(EntryFormat.PLAIN)
    for sequence_id in range(100):
        harness.topic.add(stock(), "p", sequence_id)
    harness.topic.roll_over()
    log = await harness.open()
    assert log.earlier == {"p": 99}
    places = log._content.places
    found = [places.begins_at]
    await log.open_for_writing(1, bytes(16), lambda outcome: None)
    [marker] = [entry for entry in harness.topic.entries if entry.message.properties.get("seqdedupe.kind") == "marker"]
    assert [*found, places.begins_at] == [None, marker.message_id]
    await log.close()
