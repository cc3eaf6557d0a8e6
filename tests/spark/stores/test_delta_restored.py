"""A Delta table that somebody restores to an older version, or puts another one in the place of."""

import datetime
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, Transaction, write_deltalake

from seqdedupe.errors import DataLossError
from seqdedupe_spark.stores import delta
from seqdedupe_spark.stores.contract import Binding, OutputStore, Stored
from seqdedupe_spark.stores.delta import DeltaStore
from tests.spark.stores.conformance import JOB, OTHER, SCHEMA, TOPIC, at, at_once, ns, numbers, over, refused
from tests.spark.stores.harnesses import DeltaHarness

BINDING = Binding("flights", False)


@pytest.fixture
def harness(tmp_path: Path) -> DeltaHarness:
    return DeltaHarness(tmp_path)


@pytest.fixture
def store(harness: DeltaHarness) -> Iterator[OutputStore]:
    """A table with three rows, each in its own commit."""
    with harness.factory() as store:
        store.prepare(harness.table, SCHEMA)
        assert store.replace(JOB, TOPIC, None, Stored(at(-1), 0))
        for n in range(3):
            store.write(JOB, harness.table, iter([numbers(n)]), [over(n - 1, n)])
        yield store


def went_back() -> pytest.RaisesExc[DataLossError]:
    return pytest.raises(DataLossError, match="POSITION_WENT_BACK")


def go_on(harness: DeltaHarness, end: int) -> None:
    """As a job does that is started: each message from the stored position on is written."""
    with harness.factory() as store:
        store.bind(JOB, BINDING)
        if TOPIC not in store.positions(JOB):
            assert store.replace(JOB, TOPIC, None, Stored(at(-1), 0))
        position, epoch = store.positions(JOB)[TOPIC]
        store.write(
            JOB,
            harness.table,
            iter([numbers(*range(position.index + 1, end + 1))]),
            [over(position.index, end, epoch=epoch)],
        )


@pytest.mark.parametrize("version", range(4))
def test_what_a_restored_table_lacks_is_written_anew(harness: DeltaHarness, store: OutputStore, version: int) -> None:
    """No matter which version it was; also that in which the job had no position yet."""
    DeltaTable(harness.uri).restore(version)
    index = version - 2
    expected = {TOPIC: Stored(at(index), 0)} if version else {}
    assert store.positions(JOB) == expected
    with went_back():
        store.write(JOB, harness.table, iter([numbers(3)]), [over(2, 3)])
    # Nor by who learned the position, before the job is started.
    with went_back():
        store.write(JOB, harness.table, iter([numbers(index + 1)]), [over(index, index + 1)])
    for _ in range(2):
        store.bind(JOB, BINDING)
        assert store.positions(JOB) == expected
    go_on(harness, 3)
    assert ns(harness) == [0, 1, 2, 3]
    assert store.positions(JOB) == {TOPIC: Stored(at(3), 0)}


def test_a_table_is_restored_again_and_again(harness: DeltaHarness, store: OutputStore) -> None:
    """Also to a version between a RESTORE and the job's next start, and by two in a row."""
    DeltaTable(harness.uri).restore(2)
    between = DeltaTable(harness.uri).version()
    DeltaTable(harness.uri).restore(4)
    assert store.positions(JOB) == {TOPIC: Stored(at(2), 0)}
    go_on(harness, 3)
    DeltaTable(harness.uri).restore(between)
    assert store.positions(JOB) == {TOPIC: Stored(at(0), 0)}
    go_on(harness, 5)
    assert ns(harness) == [0, 1, 2, 3, 4, 5]
    assert store.positions(JOB) == {TOPIC: Stored(at(5), 0)}


def test_a_reset_is_taken_back_too(harness: DeltaHarness, store: OutputStore) -> None:
    """Its epoch stands in the table's properties, the index in a transaction: they do not become one position."""
    before = DeltaTable(harness.uri).version()
    assert store.replace(JOB, TOPIC, Stored(at(2), 0), Stored(at(-1), 1))
    store.write(JOB, harness.table, iter([numbers(0)]), [over(-1, 0, epoch=1)])
    DeltaTable(harness.uri).restore(before)
    assert store.positions(JOB) == {TOPIC: Stored(at(2), 0)}
    go_on(harness, 3)
    assert ns(harness) == [0, 1, 2, 3]


def test_an_operator_resets_one_topic_of_a_restored_table(harness: DeltaHarness, store: OutputStore) -> None:
    """The others get their positions of the restored version all the same."""
    assert store.replace(JOB, OTHER, None, Stored(at(-1), 0))
    before = DeltaTable(harness.uri).version()
    store.write(JOB, harness.table, iter([numbers(50)]), [over(-1, 7, OTHER)])
    store.write(JOB, harness.table, iter([numbers(3)]), [over(2, 3)])
    DeltaTable(harness.uri).restore(before)
    assert not store.replace(JOB, TOPIC, Stored(at(3), 0), Stored(at(-1), 1))
    assert store.replace(JOB, TOPIC, Stored(at(2), 0), Stored(at(0), 1))
    assert store.positions(JOB) == {TOPIC: Stored(at(0), 1), OTHER: Stored(at(-1), 0)}
    store.write(JOB, harness.table, iter([numbers(50)]), [over(-1, 7, OTHER)])
    assert ns(harness) == [0, 1, 2, 50]


def test_an_idle_topic_goes_back_with_one_that_moves(harness: DeltaHarness, store: OutputStore) -> None:
    """What the commits of the one have checked holds for the other: it is not looked for a RESTORE twice."""
    assert store.replace(JOB, OTHER, None, Stored(at(-1), 0))
    before = DeltaTable(harness.uri).version()
    store.write(JOB, harness.table, iter([numbers(50)]), [over(-1, 0, OTHER)])
    DeltaTable(harness.uri).restore(before)
    go_on(harness, 4)
    assert store.positions(JOB) == {TOPIC: Stored(at(4), 0), OTHER: Stored(at(-1), 0)}
    store.write(JOB, harness.table, iter([numbers(50)]), [over(-1, 0, OTHER)])
    assert store.positions(JOB) == {TOPIC: Stored(at(4), 0), OTHER: Stored(at(0), 0)}
    assert ns(harness) == [0, 1, 2, 3, 4, 50]


def while_input_is_read(harness: DeltaHarness, store: OutputStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def rows() -> Iterator[pa.RecordBatch]:
        DeltaTable(harness.uri).restore(3)
        yield numbers(3)

    store.write(JOB, harness.table, rows(), [over(2, 3)])


def while_it_commits(harness: DeltaHarness, store: OutputStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def restored_first(*arguments: Any, **options: Any) -> None:
        DeltaTable(harness.uri).restore(3)
        write_deltalake(*arguments, **options)

    monkeypatch.setattr(delta, "write_deltalake", restored_first)
    store.write(JOB, harness.table, iter([numbers(3)]), [over(2, 3)])


@pytest.mark.parametrize("when", [while_input_is_read, while_it_commits])
def test_a_table_is_restored_under_a_writer(
    harness: DeltaHarness, store: OutputStore, monkeypatch: pytest.MonkeyPatch, when: Callable[..., None]
) -> None:
    with went_back():
        when(harness, store, monkeypatch)
    monkeypatch.undo()
    assert (ns(harness), store.positions(JOB)) == ([0, 1], {TOPIC: Stored(at(1), 0)})
    go_on(harness, 3)
    assert ns(harness) == [0, 1, 2, 3]


def test_many_start_on_a_restored_table(harness: DeltaHarness, store: OutputStore) -> None:
    DeltaTable(harness.uri).restore(2)
    assert set(at_once(harness, 5, lambda store: store.bind(JOB, BINDING))) <= {BINDING, "OUTPUT_UNAVAILABLE"}
    assert store.positions(JOB) == {TOPIC: Stored(at(0), 0)}
    go_on(harness, 2)
    assert ns(harness) == [0, 1, 2]


def test_a_table_that_was_restored_to_a_time(harness: DeltaHarness, store: OutputStore) -> None:
    """Which version that was cannot be known for sure from what is written of it: it has to be said by its number."""
    when = DeltaTable(harness.uri).history(1)[0]["timestamp"] / 1000
    store.write(JOB, harness.table, iter([numbers(3)]), [over(2, 3)])
    DeltaTable(harness.uri).restore(datetime.datetime.fromtimestamp(when + 0.001, datetime.UTC))
    for call in (lambda: store.positions(JOB), lambda: store.bind(JOB, BINDING)):
        with went_back() as caught:
            call()
        assert "number of the version" in caught.value.hint
    DeltaTable(harness.uri).restore(3)
    go_on(harness, 3)
    assert ns(harness) == [0, 1, 2, 3]


def test_what_others_do_to_the_rows_is_theirs(harness: DeltaHarness, store: OutputStore) -> None:
    """Rows that are deleted, overwritten or laid out again do not come again."""
    DeltaTable(harness.uri).optimize.compact()
    go_on(harness, 3)
    DeltaTable(harness.uri).delete("n = 0")
    rows = DeltaTable(harness.uri).to_pyarrow_table()
    write_deltalake(harness.uri, rows, mode="overwrite", schema_mode="overwrite", partition_by=["text"])
    go_on(harness, 4)
    assert ns(harness) == [1, 2, 3, 4]


def test_a_table_was_replaced_by_one_with_the_same_rows(harness: DeltaHarness, store: OutputStore) -> None:
    """Its properties are gone, and epoch and incarnations with them: the job does not begin again without a word."""
    whole = DeltaTable(harness.uri)
    rows, before = whole.to_pyarrow_table(), whole.version()
    DeltaTable.create(harness.uri, SCHEMA, mode="overwrite", partition_by=["text"])
    write_deltalake(harness.uri, rows, mode="append")
    for call in (
        lambda: store.positions(JOB),
        lambda: store.bind(JOB, BINDING),
        lambda: store.replace(JOB, TOPIC, None, Stored(at(-1), 0)),
        lambda: store.write(JOB, harness.table, iter([numbers(3)]), [over(2, 3)]),
    ):
        with refused("OUTPUT_MISSING", "replaced"):
            call()
    # Another job begins there.
    assert store.positions("hourly") == {}
    assert store.replace("hourly", TOPIC, None, Stored(at(-1), 0))
    DeltaTable(harness.uri).restore(before)
    go_on(harness, 3)
    assert ns(harness) == [0, 1, 2, 3]


def test_a_table_is_restored_and_then_replaced(harness: DeltaHarness, store: OutputStore) -> None:
    DeltaTable(harness.uri).restore(2)
    DeltaTable.create(harness.uri, SCHEMA, mode="overwrite")
    with refused("OUTPUT_MISSING", "replaced"):
        store.bind(JOB, BINDING)


def test_a_table_of_a_writer_that_did_not_look(
    harness: DeltaHarness, store: OutputStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A RESTORE that it has gone on after is left alone: from the next start on there is a look."""
    plain = delta.transactions

    def without(*arguments: Any) -> list[Transaction]:
        return plain(*arguments)[:-1]

    with monkeypatch.context() as earlier:
        earlier.setattr(delta, "transactions", without)
        earlier.setattr(delta, "job_transaction", lambda job, checked: plain(job, "*", at(-1), 0)[0])
        earlier.setattr(delta, "checked_version", lambda *_: None)
        old = DeltaHarness(harness.uri + "-old")
        with DeltaStore(old.uri) as writer:
            writer.prepare(old.table, SCHEMA)
            assert writer.replace(JOB, TOPIC, None, Stored(at(-1), 0))
            writer.write(JOB, old.table, iter([numbers(0)]), [over(-1, 0)])
            DeltaTable(old.uri).restore(1)
            writer.write(JOB, old.table, iter([numbers(1)]), [over(0, 1)])
    go_on(old, 2)
    assert ns(old) == [1, 2]
    DeltaTable(old.uri).restore(3)
    go_on(old, 2)
    assert ns(old) == [1, 2]
