"""What is Delta Lake's own."""

import json
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from seqdedupe.errors import SeqdedupeError
from seqdedupe_spark.stores import delta
from seqdedupe_spark.stores.contract import OutputStore, Stored
from seqdedupe_spark.stores.delta import DeltaStore
from tests.spark.stores.conformance import JOB, LIMIT_SECONDS, OTHER, SCHEMA, TOPIC, at, ns, numbers, over, refused
from tests.spark.stores.harnesses import DeltaHarness


@pytest.fixture
def harness(tmp_path: Path) -> DeltaHarness:
    return DeltaHarness(tmp_path)


@pytest.fixture
def store(harness: DeltaHarness) -> Iterator[OutputStore]:
    with harness.factory() as store:
        store.prepare(harness.table, SCHEMA)
        assert store.replace(JOB, TOPIC, None, Stored(at(-1), 0))
        yield store


class Reloads(DeltaStore):
    """Wrong: what it commits through is not what it has checked."""

    def _check(self, found: DeltaTable, job: str, advances: Any) -> None:
        super()._check(found, job, advances)
        self.checked()
        found.update_incremental()

    def checked(self) -> None:
        """When both have checked."""


@pytest.mark.parametrize(("kind", "rows"), [(DeltaStore, [0]), (Reloads, [0, 0])])
def test_two_that_have_checked_the_same_version(
    harness: DeltaHarness, store: OutputStore, monkeypatch: pytest.MonkeyPatch, kind: type[DeltaStore], rows: list[int]
) -> None:
    checked, committed = threading.Barrier(2, timeout=LIMIT_SECONDS), threading.Event()

    def one_after_the_other(*arguments: Any, **options: Any) -> None:
        if kind is DeltaStore and checked.wait():
            assert committed.wait(LIMIT_SECONDS)
        write_deltalake(*arguments, **options)
        committed.set()

    def wait(self: Reloads) -> None:
        if checked.wait():
            assert committed.wait(LIMIT_SECONDS)

    monkeypatch.setattr(delta, "write_deltalake", one_after_the_other)
    monkeypatch.setattr(Reloads, "checked", wait)

    def write() -> str:
        try:
            return str(kind(harness.uri).write(JOB, harness.table, iter([numbers(0)]), [over(-1, 0)]))
        except SeqdedupeError as e:
            return e.reason

    with ThreadPoolExecutor(2) as pool:
        outcomes = [future.result(LIMIT_SECONDS) for future in (pool.submit(write), pool.submit(write))]
    assert ns(harness) == rows
    assert sorted(outcomes) == (["1", "POSITION_CHANGED"] if kind is DeltaStore else ["1", "1"])


def test_others_may_write_to_the_table_and_other_topics_move(harness: DeltaHarness, store: OutputStore) -> None:
    assert store.replace(JOB, OTHER, None, Stored(at(-1), 0))

    def rows() -> Iterator[pa.RecordBatch]:
        write_deltalake(harness.uri, pa.table(numbers(100)), mode="append")
        with harness.factory() as other:
            other.write(JOB, harness.table, iter([numbers(50)]), [over(-1, 0, OTHER)])
        yield numbers(0)

    store.write(JOB, harness.table, rows(), [over(-1, 0)])
    assert ns(harness) == [0, 50, 100]
    assert store.positions(JOB) == {TOPIC: Stored(at(0), 0), OTHER: Stored(at(0), 0)}


def test_positions_outlive_the_log_of_changes(harness: DeltaHarness, store: OutputStore) -> None:
    for n in range(12):
        store.write(JOB, harness.table, iter([numbers(n)] if n % 2 else []), [over(n - 1, n)])
    found = DeltaTable(harness.uri)
    found.create_checkpoint()
    log = Path(harness.uri) / "_delta_log"
    for change in log.glob("*.json"):
        if change.name != f"{found.version():020}.json":
            change.unlink()
    with harness.factory() as again:
        assert again.positions(JOB) == {TOPIC: Stored(at(11), 0)}
        again.write(JOB, harness.table, iter([numbers(99)]), [over(11, 12)])
    assert ns(harness) == [1, 3, 5, 7, 9, 11, 99]


def test_the_table_is_named_as_its_folder(harness: DeltaHarness, store: OutputStore) -> None:
    with refused("INVALID_OUTPUT", "trains", "flights"):
        store.prepare("trains", SCHEMA)
    with refused("INVALID_OUTPUT", "trains", "flights"):
        store.write(JOB, "trains", iter([numbers(0)]), [over(-1, 0)])
    with DeltaStore(harness.uri + "2") as nothing:
        assert nothing.positions(JOB) == {}


def test_values_that_the_table_does_not_take(harness: DeltaHarness) -> None:
    there = pa.schema(
        [pa.field("n", pa.int16()), pa.field("text", pa.string(), nullable=False), pa.field("f", "float")]
    )
    DeltaTable.create(harness.uri, there)
    with harness.factory() as store:
        store.prepare(harness.table, SCHEMA)
        assert store.replace(JOB, TOPIC, None, Stored(at(-1), 0))
        for n, text in ((40_000, "x"), (1, None)):
            with refused("INVALID_OUTPUT"):
                store.write(
                    JOB, harness.table, iter([pa.record_batch({"n": [n], "text": [text]}, SCHEMA)]), [over(-1, 0)]
                )
        for wrong in (pa.schema({"n": pa.int16()}), pa.schema({"text": pa.string(), "f": pa.float64()})):
            with refused("INVALID_OUTPUT"):
                store.prepare(harness.table, wrong)
        store.write(JOB, harness.table, iter([numbers(5)]), [over(-1, 0)])
    assert harness.rows() == [{"n": 5, "text": "5", "f": None}]


def test_a_table_in_partitions(harness: DeltaHarness) -> None:
    DeltaTable.create(harness.uri, SCHEMA, partition_by="text")
    with harness.factory() as store:
        store.prepare(harness.table, SCHEMA)
        assert store.replace(JOB, TOPIC, None, Stored(at(-1), 0))
        store.write(JOB, harness.table, iter([numbers(1, 2)]), [over(-1, 1)])
    assert ns(harness) == [1, 2]
    assert DeltaTable(harness.uri).transaction_version(f"{JOB}/{TOPIC}/{at(1).incarnation}") == 1


def test_rows_that_violate_a_constraint(harness: DeltaHarness, store: OutputStore) -> None:
    """Trying again would not help, and their values are in no error."""
    large = 7_654_320
    DeltaTable(harness.uri).alter.add_constraint({"small": "n < 100"})
    with refused("INVALID_OUTPUT", "refuses 2 rows") as caught:
        store.write(JOB, harness.table, iter([numbers(4, large + 1, large + 2)]), [over(-1, 2)])
    assert "7654321" not in "".join(traceback.format_exception(caught.value))
    assert ns(harness) == []


FEATURES = [
    ({"minWriterVersion": 4}, {"delta.generationExpression": "n + 1"}, "generatedColumns"),
    ({"minWriterVersion": 6}, {"delta.identity.start": 1, "delta.identity.step": 1}, "identityColumns"),
    ({"minWriterVersion": 7, "writerFeatures": ["allowColumnDefaults"]}, {}, "allowColumnDefaults"),
    ({"minWriterVersion": 7, "writerFeatures": ["rowTracking", "domainMetadata"]}, {}, "rowTracking"),
    ({"minWriterVersion": 7, "writerFeatures": ["inCommitTimestamp"]}, {}, "inCommitTimestamp"),
    ({"minWriterVersion": 7, "writerFeatures": ["clustering", "domainMetadata"]}, {}, "clustering"),
    ({"minWriterVersion": 7, "writerFeatures": ["checkConstraints", "appendOnly", "changeDataFeed"]}, {}, None),
]


@pytest.mark.parametrize(("protocol", "metadata", "said"), FEATURES, ids=lambda one: str(one)[:40])
def test_a_table_with_features(
    harness: DeltaHarness, protocol: dict[str, Any], metadata: dict[str, Any], said: str | None
) -> None:
    fields = [
        {"name": "n", "type": "long", "nullable": True, "metadata": {}},
        {"name": "text", "type": "string", "nullable": True, "metadata": {}},
        {"name": "more", "type": "long", "nullable": True, "metadata": metadata},
    ]
    schema = json.dumps({"type": "struct", "fields": fields})
    made: dict[str, Any] = {"id": "1", "format": {"provider": "parquet", "options": {}}, "schemaString": schema}
    made |= {"partitionColumns": [], "configuration": {}, "createdTime": 1}
    log = Path(harness.uri, "_delta_log")
    log.mkdir(parents=True)
    actions = [{"protocol": {"minReaderVersion": 1} | protocol}, {"metaData": made}]
    (log / f"{0:020}.json").write_text("\n".join(map(json.dumps, actions)))
    with harness.factory() as store:
        if said is None:
            store.prepare(harness.table, SCHEMA)
            return
        with refused("INVALID_OUTPUT", said):
            store.prepare(harness.table, SCHEMA)
