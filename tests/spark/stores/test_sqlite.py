"""What is SQLite's own."""

import datetime
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from seqdedupe.errors import ConfigurationError, UnavailableError
from seqdedupe_spark.stores.contract import Stored
from seqdedupe_spark.stores.sql import SqliteStore
from tests.spark.stores.conformance import JOB, SCHEMA, TOPIC, at, ns, numbers, over, refused
from tests.spark.stores.harnesses import SqliteHarness


@pytest.fixture
def harness(tmp_path: Path) -> SqliteHarness:
    return SqliteHarness(tmp_path)


def run(harness: SqliteHarness, statement: str) -> None:
    with closing(sqlite3.connect(harness.path)) as connection:
        connection.execute(statement)
        connection.commit()


def write(harness: SqliteHarness, batch: pa.RecordBatch) -> None:
    """Writes it as the first range of a job."""
    with harness.factory() as store:
        store.prepare(harness.table, batch.schema)
        stored = store.positions(JOB).get(TOPIC)
        if stored is None:
            stored = Stored(at(-1), 0)
            assert store.replace(JOB, TOPIC, None, stored)
        store.write(JOB, harness.table, iter([batch]), [over(stored.position.index, stored.position.index + 1)])


def test_a_commit_is_on_the_disk(harness: SqliteHarness) -> None:
    with SqliteStore(harness.path) as store:
        assert store._connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert store._connection.execute("PRAGMA synchronous").fetchone() == (2,)


def test_a_file_that_is_busy_for_too_long(harness: SqliteHarness) -> None:
    with SqliteStore(harness.path, busy_timeout_seconds=0.05) as store:
        store.prepare(harness.table, SCHEMA)
        assert store.replace(JOB, TOPIC, None, Stored(at(-1), 0))
        with closing(sqlite3.connect(harness.path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with refused("OUTPUT_UNAVAILABLE", "locked"):
                store.write(JOB, harness.table, iter([numbers(0)]), [over(-1, 0)])
            # Reading waits for nobody.
            assert store.positions(JOB) == {TOPIC: Stored(at(-1), 0)}
        store.write(JOB, harness.table, iter([numbers(0)]), [over(-1, 0)])
    assert ns(harness) == [0]


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with refused("INVALID_OPTION", "there is no folder .*nowhere"):
        SqliteStore(tmp_path / "nowhere" / "output.db")
    with refused("INVALID_OPTION", "there is no SQLite file .*none.db"):
        SqliteStore(tmp_path / "none.db", create=False)
    (tmp_path / "text").write_text("this is not a database, but long enough for one " * 100)
    with pytest.raises(UnavailableError, match="OUTPUT_UNAVAILABLE"):
        SqliteStore(tmp_path / "text")


@pytest.mark.parametrize(
    ("declared", "takes"),
    [
        ("INTEGER", {"int64", "bool"}),
        ("BIGINT", {"int64", "bool"}),
        ("VARCHAR(20)", {"string", "timestamp[us, tz=UTC]", "date32[day]", "map<string, string>", "decimal128(20, 2)"}),
        ("REAL", {"double"}),
        ("BLOB", {"int64", "bool", "double", "string", "binary", "timestamp[us, tz=UTC]", "date32[day]"}
         | {"map<string, string>", "decimal128(20, 2)"}),
        ("DATETIME", {"int64", "bool", "double", "binary", "timestamp[us, tz=UTC]", "date32[day]"}
         | {"map<string, string>"}),
    ],
)  # fmt: skip
def test_a_column_that_is_there_takes_what_it_gives_back(
    harness: SqliteHarness, declared: str, takes: set[str]
) -> None:
    values: dict[pa.DataType, Any] = {
        pa.int64(): 2**62 + 1,
        pa.bool_(): True,
        pa.float64(): 0.1,
        pa.string(): "007",
        pa.binary(): b"007",
        pa.timestamp("us", "UTC"): datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC),
        pa.date32(): datetime.date(2024, 1, 1),
        pa.map_(pa.string(), pa.string()): [("a", "b")],
        pa.decimal128(20, 2): None,
    }
    taken = set()
    for kind, value in values.items():
        run(harness, "DROP TABLE IF EXISTS flights")
        run(harness, f"CREATE TABLE flights (v {declared})")
        batch = pa.record_batch([pa.array([value], kind)], ["v"])
        try:
            write(harness, batch)
        except ConfigurationError:
            continue
        taken.add(str(kind).replace(" ('entries')", ""))
        shown = value and harness.shown(batch.schema.field(0), dict(value) if isinstance(value, list) else value)
        assert harness.rows() == [{"v": shown}]
    assert taken == takes


def test_constraints_of_the_table(harness: SqliteHarness) -> None:
    run(harness, "CREATE TABLE flights (N INTEGER UNIQUE CHECK (N < 10), text TEXT NOT NULL, at TEXT DEFAULT 'now')")
    write(harness, numbers(1))
    for batch in (numbers(2, 1), numbers(3, 11), pa.record_batch({"n": [4], "text": [None]}, SCHEMA)):
        with refused("INVALID_OUTPUT", "constraint"):
            write(harness, batch)
    with refused("INVALID_OUTPUT", "text"):
        write(harness, pa.record_batch({"n": [5]}))
    assert harness.rows() == [{"N": 1, "text": "1", "at": "now"}]


@pytest.mark.parametrize(
    "column",
    [
        pa.array([2**63], pa.uint64()),
        pa.array([2**50], pa.timestamp("s")),
        pa.array([[float("nan")]], pa.list_(pa.float64())),
        pa.array([[("a", "1"), ("a", "2")]], pa.map_(pa.string(), pa.string())),
        pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")]),
        pa.array([datetime.time(1)], pa.time64("us")),
    ],
    ids=lambda column: str(column.type),
)
def test_values_that_cannot_be(harness: SqliteHarness, column: pa.Array) -> None:
    with refused("INVALID_OUTPUT"):
        write(harness, pa.record_batch([column], ["v"]))
    with closing(sqlite3.connect(harness.path)) as connection:
        assert connection.execute("SELECT * FROM sqlite_master WHERE name = 'flights'").fetchall() == [] or ns_of(
            connection
        ) == [(0,)]


def ns_of(connection: sqlite3.Connection) -> list[Any]:
    return connection.execute("SELECT count(*) FROM flights").fetchall()


def test_nan_is_null_and_text_keeps_its_nul(harness: SqliteHarness) -> None:
    write(harness, pa.record_batch({"f": [float("nan")], "s": ["a\0b"]}))
    assert harness.rows() == [{"f": None, "s": "a\0b"}]


def test_names_are_quoted(harness: SqliteHarness) -> None:
    harness.table = 'main.we"ird table'
    batch = pa.record_batch({'a "b"; --': [1], "select": [2]})
    write(harness, batch)
    write(harness, batch)
    harness.table = 'we""ird table'
    assert harness.rows() == [{'a "b"; --': 1, "select": 2}] * 2
    for name in ("", "a.", "a.b.c", "a\0"):
        with harness.factory() as store, refused("INVALID_OUTPUT"):
            store.prepare(name, SCHEMA)
    with harness.factory() as store, refused("INVALID_OUTPUT", "attached"):
        store.prepare("attached.flights", SCHEMA)
