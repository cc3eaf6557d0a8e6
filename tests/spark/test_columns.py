"""Arrow batches from the log's columns, against a plain model of rows."""

import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

from seqdedupe import batch as batches
from seqdedupe.batch import Binary
from seqdedupe.client.message import StoredBatch
from seqdedupe.message_id import MessageId, MessageIds
from seqdedupe_spark.message_columns import SCHEMA, columns_of, plain, to_arrow
from tests.batches import batch

COLUMNS = columns_of(True, False)
TOPIC = "persistent://public/default/t-partition-12"
INCARNATION = 1_795_228_190_085_141
EPOCH = datetime.fromtimestamp(0, UTC)
MOST_MS = (2**63 - 1) // 1000

Row = dict[str, Any]


def _some(random: random.Random, values: list[Any], none_at_all: bool) -> Any:
    return None if none_at_all else random.choice(values)


def _random_batch(
    random: random.Random, base_index: int, is_cut: bool, give_ids: float, is_by_id: bool = False
) -> tuple[StoredBatch, list[Row]]:
    """A stored batch, and its rows as Arrow should show them."""
    count = random.choice([1, 1, 2, 3, 8, 9, 30])
    names = random.sample(["a", "zwölf", "x" * 255], random.randint(1, 3))
    no_payload, no_key, no_time, no_properties = (random.random() < 0.3 for _ in range(4))
    publish_ms = random.randint(0, 2_000_000_000_000)
    rows: list[Row] = []
    times = []
    for i in range(count):
        times.append(_some(random, [0, 1, -1, 1_700_000_000_123], no_time) or 0)
        rows.append(
            {
                "value": _some(random, [None, b"", b"\x00\xff", b"payload"], no_payload),
                "__key": _some(random, [None, b"", b"k", b"\xff"], no_key),
                "__topic": TOPIC,
                "__messageId": MessageId(INCARNATION, base_index + i).to_bytes(),
                "__publishTime": EPOCH + timedelta(milliseconds=publish_ms),
                "__eventTime": EPOCH + timedelta(milliseconds=times[-1]) if times[-1] else None,
                "__messageProperties": list(
                    (_some(random, [None, {}, {"a": ""}, {"ä": "ö", "b": "1"}], no_properties) or {}).items()
                ),
                "__producerName": random.choice(names),
                "__sequenceId": random.choice([0, i, 2**63 - 1]),
                "__index": base_index + i,
                "__partition": 12,
                "__incarnation": INCARNATION,
                "__deduplicationId": None,
                "__orderingKey": None,
                "__schemaVersion": None,
            }
        )
        rows[-1]["__keyBytes"] = rows[-1]["__key"]
    made = batch(
        [(row["__producerName"], row["__sequenceId"]) for row in rows],
        payloads=[row["value"] for row in rows],
        keys=[row["__key"] for row in rows],
        row_properties=[dict(row["__messageProperties"]) for row in rows],
        event_times_ms=np.array(times if any(times) else [], np.int64),
    )
    if is_by_id:
        for row in rows:
            row["__producerName"] = row["__sequenceId"] = None
            row["__deduplicationId"] = random.choice([b"i", bytes(16), b"\xff" * 255])
        made = replace(
            made,
            producer_names=Binary(),
            epochs=batches.NO_INT64S,
            previous_sequence_ids=batches.NO_INT64S,
            producer_indexes=batches.NO_INT32S,
            sequence_ids=batches.NO_INT64S,
            deduplication_ids=Binary.of_all([row["__deduplicationId"] for row in rows]),
        )
    made = batches.decode(made.encode())
    if is_cut and count > 1:
        first = random.randint(0, count - 1)
        rows, base_index = rows[first:], base_index + first
        made = made.take(np.arange(first, count))
    stored = StoredBatch(made, base_index, publish_ms, INCARNATION)
    if random.random() < give_ids:
        stored.message_ids = _random_ids(random, len(rows))
        for i, row in enumerate(rows):
            row["__messageId"] = stored.message_ids[i].to_bytes()
    return stored, rows


def _random_ids(random: random.Random, count: int) -> MessageIds:
    """Runs with numbers of all lengths, 0 among them."""
    runs = []
    while count:
        rows = random.randint(1, count)
        ledger, entry = (random.choice([0, 1, 127, 128, 2**40, 2**63 - 100]) for _ in range(2))
        runs.append((rows, ledger, entry, random.choice([-1, -1, 0, 1, 63, 64, 8191, 8192, 2**20, 2**31 - 100])))
        count -= rows
    return MessageIds.of(runs)


@pytest.mark.parametrize("seed", range(150))
def test_rows_are_those_of_the_model(seed: int) -> None:
    chosen = random.Random(seed)
    stored: list[StoredBatch] = []
    rows: list[Row] = []
    index = chosen.choice([0, 0, 1, 2**40])
    give_ids = chosen.choice([0, 0, 0.5, 1])
    is_by_id = chosen.random() < 0.3
    for _ in range(chosen.choice([1, 1, 2, 7])):
        one, its_rows = _random_batch(chosen, index, is_cut=not stored, give_ids=give_ids, is_by_id=is_by_id)
        stored.append(one)
        rows += its_rows
        index = one.base_index + len(one) + chosen.choice([0, 0, 5])
    names = COLUMNS.names
    if chosen.random() < 0.3:
        names = chosen.sample(names, chosen.randint(1, len(names)))
    schema = pa.schema([COLUMNS.field(name) for name in names])
    made = to_arrow(stored, TOPIC, schema)
    made.validate(full=True)
    assert made.schema.equals(schema, check_metadata=True)
    assert made.to_pylist() == [{name: row[name] for name in names} for row in rows]
    renamed = to_arrow(stored, TOPIC, plain(schema))
    assert renamed.schema.names == [name.removeprefix("__") for name in names]
    assert renamed.columns == made.columns


def test_the_schema_is_what_spark_expects() -> None:
    for schema in (SCHEMA, plain(SCHEMA), COLUMNS, columns_of(True, True)):
        assert to_arrow_schema(from_arrow_schema(schema), timezone="UTC").equals(schema, check_metadata=True)


def test_times_that_microseconds_do_not_hold_are_null() -> None:
    times = [MOST_MS, MOST_MS + 1, -MOST_MS, -MOST_MS - 1, 2**63 - 1, -(2**63), 0, 1]
    made = batch([("p", i) for i in range(8)], event_times_ms=np.array(times))
    schema = pa.schema([SCHEMA.field(name) for name in ("__eventTime", "__publishTime")])
    arrow = to_arrow([StoredBatch(made, 0, MOST_MS + 1, INCARNATION)], TOPIC, schema)
    expected = [MOST_MS * 1000, None, -MOST_MS * 1000, None, None, None, None, 1000]
    assert arrow.column(0).cast(pa.int64()).to_pylist() == expected
    assert arrow.column(1).null_count == 8


def test_message_ids_are_those_of_the_library() -> None:
    for base in (0, 1, 127, 128, 2**31, 2**62):
        stored = StoredBatch(batch([("p", i) for i in range(300)]), base, 1, INCARNATION)
        made = to_arrow([stored], TOPIC, pa.schema([SCHEMA.field("__messageId")])).column(0).to_pylist()
        ids = [stored.position(row).message_id for row in range(300)]
        assert made == [one.to_bytes() for one in ids if one is not None]


def test_values_of_one_batch_are_not_copied() -> None:
    made = batches.decode(batch([("p", 0), ("p", 1)], payloads=[b"a" * 1000, b"b"]).encode())
    arrow = to_arrow([StoredBatch(made, 0, 1, INCARNATION)], TOPIC)
    offsets, data = arrow.column("value").buffers()[1:]
    assert (offsets.address, data.address) == (
        pa.py_buffer(made.payloads.offsets).address,
        pa.py_buffer(made.payloads.data).address,
    )
    sequence_ids = arrow.column("__sequenceId").buffers()[1]
    assert sequence_ids.address == pa.py_buffer(made.sequence_ids).address
