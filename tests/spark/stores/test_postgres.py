"""What is PostgreSQL's own."""

import datetime
import decimal
import itertools
import os
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from seqdedupe.errors import UnavailableError
from seqdedupe_spark.stores import postgresql
from seqdedupe_spark.stores.contract import OutputStore, Stored
from seqdedupe_spark.stores.postgresql import PostgresStore
from tests.spark.stores.conformance import JOB, LIMIT_SECONDS, SCHEMA, TOPIC, at, ns, numbers, over, refused
from tests.spark.stores.database import COMMIT, until, wait_for_the_end, waits
from tests.spark.stores.harnesses import PostgresHarness, SqlHarness


@pytest.fixture
def harness(postgres_url: str) -> PostgresHarness:
    return PostgresHarness(postgres_url)


@pytest.fixture
def store(harness: PostgresHarness) -> Iterator[OutputStore]:
    """The store, with one topic at its start; no output table."""
    with harness.factory() as store:
        store.prepare("other", SCHEMA)
        assert store.replace(JOB, TOPIC, None, Stored(at(-1), 0))
        yield store


def run(harness: PostgresHarness, *statements: str) -> None:
    with psycopg.connect(harness.url) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def write(store: OutputStore, batch: pa.RecordBatch, table: str = "flights") -> None:
    """Writes it as the next range of the job."""
    store.prepare(table, batch.schema)
    index = store.positions(JOB)[TOPIC].position.index
    store.write(JOB, table, iter([batch]), [over(index, index + 1)])


def test_a_table_that_is_there(harness: PostgresHarness, store: OutputStore) -> None:
    run(
        harness,
        "CREATE TABLE flights (id bigint GENERATED ALWAYS AS IDENTITY, n smallint, text varchar(5), doc jsonb, "
        "raw json, price numeric(10, 2), many numeric, at timestamptz(3), day date, "
        "made timestamp NOT NULL DEFAULT 'epoch', f real, twice bigint GENERATED ALWAYS AS (n * 2) STORED, "
        "tag text NOT NULL)",
    )
    now = datetime.datetime(2024, 1, 1, 12, 0, 0, 1000, datetime.UTC)
    batch = pa.record_batch(
        {
            "tag": ["a", "b"],
            "f": pa.array([0.5, None], pa.float32()),
            "day": pa.array([datetime.date(2000, 1, 1), None]),
            "at": pa.array([now, None], pa.timestamp("ns", "America/New_York")),
            "many": pa.array([2**64 - 1, 0], pa.uint64()),
            "price": [decimal.Decimal("-1.50"), None],
            "raw": ['{"a":  1}', None],
            "doc": ['{"a":  1}', None],
            "text": ["abcde", None],
            "n": pa.array([-(2**15), None], pa.int64()),
        }
    )
    write(store, batch)
    first, second = sorted(harness.rows(), key=lambda row: str(row["tag"]))
    made = datetime.datetime(1970, 1, 1)
    written = batch.to_pylist()[0] | {"at": now, "raw": {"a": 1}, "doc": {"a": 1}}
    assert first == written | {"id": 1, "made": made, "twice": -(2**16)}
    assert second == dict.fromkeys(batch.schema.names) | {
        "id": 2, "made": made, "twice": None, "tag": "b", "many": 0
    }  # fmt: skip


@pytest.mark.parametrize(
    ("columns", "values"),
    [
        ("v smallint", pa.array([1, 40_000])),
        ("v bigint", pa.array([1, 2**63], pa.uint64())),
        ("v varchar(3)", pa.array(["abc", "abcd"])),
        ("v numeric(4, 1)", pa.array([decimal.Decimal("1.5"), decimal.Decimal("1000.0")])),
        ("v timestamptz", pa.array([0, -(2**62)], pa.timestamp("us", "UTC"))),
        ("v timestamptz", pa.array([0, 1], pa.timestamp("ns", "UTC"))),
        ("v timestamp", pa.array([0, -(2**63)], pa.timestamp("us"))),
        ("v date", pa.array([0, -(2**31)], pa.date32())),
        ("v jsonb", pa.array(["{}", "{"])),
        ("v jsonb", pa.array(["{}", '"\\u0000"'])),
        ("v jsonb", pa.array([[1.0], [float("nan")]])),
        ("v text", pa.array(["a", "a\0b"])),
        ("v text NOT NULL", pa.array(["a", None])),
    ],
    ids=lambda it: it if isinstance(it, str) else str(it.type),
)
def test_a_value_that_a_column_does_not_take(
    harness: PostgresHarness, store: OutputStore, columns: str, values: pa.Array
) -> None:
    run(harness, f"CREATE TABLE flights ({columns})")
    with refused("INVALID_OUTPUT", "v") as caught:
        write(store, pa.record_batch([values], ["v"]))
    assert (caught.value.numbers["batch"], caught.value.numbers["row"]) == ("0", "1")
    assert harness.rows() == []
    write(store, pa.record_batch([values.slice(0, 1)], ["v"]))
    assert len(harness.rows()) == 1


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ("n bigint", ["text"]),
        ("n text, text text", ["n", "int64"]),
        ("n real, text text", ["n", "real"]),
        ("n uuid, text bytea", ["uuid", "bytea"]),
        ("n bigint, text text, more bigint NOT NULL", ["more", "default"]),
    ],
)
def test_a_table_that_does_not_take_the_rows(
    harness: PostgresHarness, store: OutputStore, columns: str, words: list[str]
) -> None:
    run(harness, f"CREATE TABLE flights ({columns})")
    with refused("INVALID_OUTPUT", "flights", *words):
        store.prepare("flights", SCHEMA)
    with refused("INVALID_OUTPUT", *words):
        store.write(JOB, "flights", iter([numbers(0)]), [over(-1, 0)])
    assert store.positions(JOB) == {TOPIC: Stored(at(-1), 0)}


def test_constraints_of_the_table(harness: PostgresHarness, store: OutputStore) -> None:
    run(
        harness,
        "CREATE TABLE flights (n bigint UNIQUE DEFERRABLE INITIALLY DEFERRED CHECK (n < 10), text text PRIMARY KEY)",
    )
    write(store, numbers(1))
    same = pa.record_batch({"n": [1], "text": ["same n"]}, SCHEMA)
    for batch in (numbers(11), numbers(2, 1), numbers(3, 3), same):
        with refused("INVALID_OUTPUT", "violates"):
            write(store, batch)
    assert ns(harness) == [1]
    assert store.positions(JOB) == {TOPIC: Stored(at(0), 0)}
    write(store, numbers(2))


def test_a_division_by_zero_of_a_trigger_is_not_taken_for_a_position_that_has_moved(
    harness: PostgresHarness, store: OutputStore
) -> None:
    run(
        harness,
        "CREATE TABLE flights (n bigint, text text)",
        "CREATE FUNCTION divides() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM 1 / NEW.n; RETURN NEW; END'",
        "CREATE CONSTRAINT TRIGGER late AFTER INSERT ON flights DEFERRABLE INITIALLY DEFERRED "
        "FOR EACH ROW EXECUTE FUNCTION divides()",
    )
    write(store, numbers(1))
    with refused("INVALID_OUTPUT", "division by zero"):
        write(store, numbers(0))
    assert store.positions(JOB) == {TOPIC: Stored(at(0), 0)}
    with refused("POSITION_CHANGED"):
        store.write(JOB, "flights", iter([numbers(2)]), [over(-1, 0)])
    write(store, numbers(2))
    assert ns(harness) == [1, 2]


def test_names_are_quoted(harness: PostgresHarness, store: OutputStore) -> None:
    run(harness, 'CREATE SCHEMA "My ""lake"""')
    batch = pa.record_batch({'a "b"; --': [1], "select": [2], "%s": [3]})
    write(store, batch, 'My "lake".Fl%ights')
    write(store, batch, 'My "lake".Fl%ights')
    with psycopg.connect(harness.url) as connection:
        assert connection.execute('SELECT * FROM "My ""lake"""."Fl%ights"').fetchall() == [(1, 2, 3)] * 2
    with refused("INVALID_OUTPUT", "nowhere"):
        store.prepare("nowhere.flights", SCHEMA)


def test_who_may_not_make_tables_can_use_those_that_are_there(harness: PostgresHarness, store: OutputStore) -> None:
    role = "writer_" + harness.url.split("test_")[1][:12]
    with harness.factory() as owner:
        owner.prepare("flights", SCHEMA)
    run(harness, f"CREATE ROLE {role} LOGIN", f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {role}")
    try:
        with PostgresStore(harness.url.replace("//postgres@", f"//{role}@")) as writer:
            write(writer, numbers(0))
            with refused("INVALID_OUTPUT", "denied"):
                writer.prepare("more", SCHEMA)
        assert ns(harness) == [0]
    finally:
        run(harness, f"DROP OWNED BY {role}", f"DROP ROLE {role}")


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_tables_that_another_run_makes_first_are_seen_at_any_isolation(harness: PostgresHarness, level: str) -> None:
    """Who waits for the other one to have made them looks again, no matter what the database's default."""
    name = harness.url.split("?")[0].rpartition("/")[2]
    run(harness, f"ALTER DATABASE {name} SET default_transaction_isolation = '{level}'")
    watcher = psycopg.connect(harness.url, autocommit=True)
    with watcher, harness.factory() as late, psycopg.connect(harness.url) as first, ThreadPoolExecutor(1) as pool:
        first.execute("SELECT pg_advisory_xact_lock(%s)", (postgresql._PREPARE_LOCK,))
        preparing = pool.submit(late.prepare, "flights", SCHEMA)
        until(watcher, "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")
        first.execute("CREATE TABLE flights (n bigint, text text)")
        first.commit()
        preparing.result(LIMIT_SECONDS)


def test_a_table_that_a_crash_would_empty_is_refused(harness: PostgresHarness, store: OutputStore) -> None:
    """Its rows would be gone, and the positions say that they are there; or the other way round."""
    store.prepare("flights", SCHEMA)
    for table in ("flights", "seqdedupe_positions", "seqdedupe_watermarks"):
        run(harness, f"ALTER TABLE {table} SET UNLOGGED")
        with refused("INVALID_OUTPUT", f"table {table} is an unlogged"):
            store.prepare("flights", SCHEMA)
        run(harness, f"ALTER TABLE {table} SET LOGGED")
    with refused("INVALID_OUTPUT", "temporary"):
        store.prepare("pg_temp.flights", SCHEMA)
    store.prepare("flights", SCHEMA)


PARTITIONED = "CREATE TABLE flights (n bigint, text text) PARTITION BY RANGE (n)"
FIRST = "CREATE TABLE first PARTITION OF flights FOR VALUES FROM (0) TO (10)"
FOREIGN = (
    "CREATE EXTENSION IF NOT EXISTS file_fdw",
    "CREATE SERVER IF NOT EXISTS files FOREIGN DATA WRAPPER file_fdw",
)
NOWHERE = "SERVER files OPTIONS (filename '/dev/null')"
INTO_CHILD = (
    "CREATE FUNCTION divert() RETURNS trigger LANGUAGE plpgsql AS "
    "'BEGIN INSERT INTO child VALUES (NEW.n, NEW.text); RETURN NULL; END'"
)


@pytest.mark.parametrize(
    ("said", "statements"),
    [
        ("table late is an unlogged", (PARTITIONED, FIRST, "CREATE UNLOGGED TABLE late PARTITION OF flights DEFAULT")),
        (
            "table late is a foreign table",
            (*FOREIGN, PARTITIONED, FIRST, f"CREATE FOREIGN TABLE late PARTITION OF flights DEFAULT {NOWHERE}"),
        ),
        (
            "table flights is a foreign table",
            (
                *FOREIGN,
                "CREATE FOREIGN TABLE flights (n bigint, text text) SERVER files OPTIONS (filename '/dev/null')",
            ),
        ),
    ],
)
def test_rows_may_land_in_no_table_that_a_crash_would_empty(
    harness: PostgresHarness, store: OutputStore, said: str, statements: tuple[str, ...]
) -> None:
    run(harness, *statements)
    with SqlHarness(harness.url.replace("://", "+psycopg://")).factory() as general:
        for one in (store, general):
            with refused("INVALID_OUTPUT", said):
                one.prepare("flights", SCHEMA)


@pytest.mark.parametrize(
    ("before", "meanwhile"),
    [
        ((PARTITIONED, FIRST), ("CREATE UNLOGGED TABLE late PARTITION OF flights DEFAULT",)),
        ((PARTITIONED, FIRST), ("ALTER TABLE first SET UNLOGGED",)),
        (("CREATE TABLE flights (n bigint, text text)",), ("ALTER TABLE flights SET UNLOGGED",)),
        (("CREATE TABLE flights (n bigint, text text)",), ("ALTER TABLE seqdedupe_positions SET UNLOGGED",)),
        (
            ("CREATE TABLE flights (n bigint, text text)", "CREATE UNLOGGED TABLE child () INHERITS (flights)"),
            (INTO_CHILD, "CREATE TRIGGER t BEFORE INSERT ON flights FOR EACH ROW EXECUTE FUNCTION divert()"),
        ),
        (
            (
                "CREATE VIEW flights AS SELECT 1::bigint AS n, ''::text AS text",
                "CREATE UNLOGGED TABLE child (n bigint, text text)",
            ),
            (INTO_CHILD, "CREATE TRIGGER t INSTEAD OF INSERT ON flights FOR EACH ROW EXECUTE FUNCTION divert()"),
        ),
    ],
    ids=["partition added", "partition", "table", "positions", "child", "view"],
)
def test_where_rows_have_landed_is_looked_at_in_their_transaction(
    harness: PostgresHarness, store: OutputStore, before: tuple[str, ...], meanwhile: tuple[str, ...]
) -> None:
    run(harness, *before)
    store.prepare("flights", SCHEMA)
    added = meanwhile[0]

    def rows() -> Iterator[pa.RecordBatch]:
        run(harness, *meanwhile)
        yield numbers(1)
        yield numbers(11) if "late" in added else numbers(2)

    with refused("INVALID_OUTPUT", "is an unlogged"):
        store.write(JOB, "flights", rows(), [over(-1, 1)])
    meanwhile = ()
    general_store = SqlHarness(harness.url.replace("://", "+psycopg://")).factory
    with general_store() as general, refused("INVALID_OUTPUT", "is an unlogged"):
        general.write(JOB, "flights", rows(), [over(-1, 1)])
    assert harness.rows() == ([] if "VIEW" not in before[0] else [{"n": 1, "text": ""}])
    assert store.positions(JOB) == {TOPIC: Stored(at(-1), 0)}


def test_partitions_where_no_row_lands_are_no_matter_once_a_job_runs(
    harness: PostgresHarness, store: OutputStore
) -> None:
    run(harness, PARTITIONED, FIRST)
    store.prepare("flights", SCHEMA)
    run(harness, "CREATE UNLOGGED TABLE late PARTITION OF flights DEFAULT")
    store.write(JOB, "flights", iter([numbers(1)]), [over(-1, 0)])
    assert ns(harness) == [1]


@pytest.mark.parametrize(
    ("changed", "is_right"),
    [
        ("double precision", False),
        ("timestamp USING to_timestamp(n)", False),
        ("numeric", True),
        ("integer", True),
    ],
)
def test_a_column_whose_type_changes_while_rows_are_made(
    harness: PostgresHarness, store: OutputStore, changed: str, is_right: bool
) -> None:
    """What COPY carries in eight bytes is another number in a column of another type with eight bytes."""
    store.prepare("flights", SCHEMA)

    def rows() -> Iterator[pa.RecordBatch]:
        run(harness, f"ALTER TABLE flights ALTER n TYPE {changed}")
        yield numbers(100, 101)

    if is_right:
        store.write(JOB, "flights", rows(), [over(-1, 1)])
        assert ns(harness) == [100, 101]
    else:
        with refused("INVALID_OUTPUT", "n is", "does not accept int64"):
            store.write(JOB, "flights", rows(), [over(-1, 1)])
        assert harness.rows() == []
    assert store.positions(JOB) == {TOPIC: Stored(at(1 if is_right else -1), 0)}


def test_a_change_of_the_table_waits_for_no_long_transaction(
    harness: PostgresHarness, store: OutputStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgresql, "GIVE_WAY_SECONDS", 0.0)
    monkeypatch.setattr(postgresql, "_LOOK_SECONDS", 0.0)
    store.prepare("flights", SCHEMA)
    watcher = psycopg.connect(harness.url, autocommit=True)
    with watcher, ThreadPoolExecutor(1) as pool:
        altering: list[Future[None]] = []

        def rows() -> Iterator[pa.RecordBatch]:
            yield numbers(1)
            altering.append(pool.submit(run, harness, "ALTER TABLE flights ALTER n TYPE numeric"))
            until(watcher, "SELECT 1 FROM pg_locks WHERE NOT granted")
            # Without an end: only the change of the table ends it.
            yield from itertools.repeat(numbers(2))

        with refused("OUTPUT_UNAVAILABLE", "has waited", "to change table flights"):
            store.write(JOB, "flights", rows(), [over(-1, 1)])
        altering[0].result(LIMIT_SECONDS)
    assert harness.rows() == []
    write(store, numbers(1))
    assert ns(harness) == [1]


def test_a_server_that_cannot_be_reached_is_named_without_the_password() -> None:
    store = PostgresStore("postgresql://me:secret@127.0.0.1:1/flights")
    with store, pytest.raises(UnavailableError, match="OUTPUT_UNAVAILABLE") as caught:
        store.positions(JOB)
    assert "127.0.0.1" in str(caught.value)
    assert "secret" not in str(caught.value) + str(caught.value.__cause__)


def test_a_database_that_takes_no_writes_blames_no_row(harness: PostgresHarness, store: OutputStore) -> None:
    """As after a fail-over that has left the connection at the replica."""
    store.prepare("flights", SCHEMA)
    with harness.factory() as other:
        other._connection().execute("SET default_transaction_read_only = on")  # type: ignore[attr-defined]
        with refused("OUTPUT_UNAVAILABLE", "read-only"):
            other.write(JOB, "flights", iter([numbers(0)]), [over(-1, 0)])


def test_a_position_that_another_holds_for_too_long(
    harness: PostgresHarness, store: OutputStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgresql, "_SESSION", "SET lock_timeout = '50ms'")
    store.prepare("flights", SCHEMA)
    with psycopg.connect(harness.url) as other, harness.factory() as impatient:
        other.execute("SELECT 1 FROM seqdedupe_positions FOR UPDATE")
        with refused("OUTPUT_UNAVAILABLE", "lock"):
            write(impatient, numbers(0))
        other.rollback()
        write(impatient, numbers(0))
    assert ns(harness) == [0]


def test_a_writer_that_stalls_with_a_unique_key_is_ended(
    harness: PostgresHarness, store: OutputStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(harness, "CREATE TABLE flights (n bigint PRIMARY KEY, text text)")
    monkeypatch.setattr(postgresql, "_SESSION", "SET idle_in_transaction_session_timeout = '100ms'")
    with harness.factory() as zombie, harness.factory() as successor, ThreadPoolExecutor() as pool:

        def rows() -> Iterator[pa.RecordBatch]:
            yield numbers(0)
            # It waits for the zombie's key until the server has ended the zombie.
            pool.submit(write, successor, numbers(0)).result(LIMIT_SECONDS)
            yield numbers(1)

        with refused("OUTPUT_UNAVAILABLE"):
            zombie.write(JOB, "flights", rows(), [over(-1, 1)])
        # It connects again.
        assert zombie.positions(JOB) == {TOPIC: Stored(at(0), 0)}
    assert ns(harness) == [0]


def test_without_the_time_out_it_would_block(
    harness: PostgresHarness, store: OutputStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(harness, "CREATE TABLE flights (n bigint PRIMARY KEY, text text)")
    monkeypatch.setattr(postgresql, "_SESSION", "SET lock_timeout = '400ms'")
    with harness.factory() as zombie, harness.factory() as successor, ThreadPoolExecutor() as pool:

        def rows() -> Iterator[pa.RecordBatch]:
            yield numbers(0)
            with refused("OUTPUT_UNAVAILABLE", "lock"):
                pool.submit(write, successor, numbers(0)).result(LIMIT_SECONDS)

        zombie.write(JOB, "flights", rows(), [over(-1, 0)])
    assert ns(harness) == [0]


@pytest.mark.parametrize("commits", [True, False])
def test_a_connection_that_is_lost_in_the_commit(harness: PostgresHarness, store: OutputStore, commits: bool) -> None:
    store.prepare("flights", SCHEMA)
    with ThreadPoolExecutor() as pool:
        with waits(harness.url, COMMIT) as waiting:
            writing = pool.submit(store.write, JOB, "flights", iter([numbers(0)]), [over(-1, 0)])
            waiting()
            if commits:
                cut(store)
            else:
                run(harness, "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE NOT granted")
            with refused("OUTPUT_UNAVAILABLE"):
                writing.result(LIMIT_SECONDS)
        if commits:
            wait_for_the_end(harness.url)
    index = 0 if commits else -1
    assert store.positions(JOB) == {TOPIC: Stored(at(index), 0)}
    assert ns(harness) == list(range(index + 1))
    write(store, numbers(index + 1))
    assert ns(harness) == list(range(index + 2))


def cut(store: Any) -> None:
    """The connection is lost on this side; the server does not know."""
    with socket.socket(fileno=os.dup(store._open.fileno())) as connection:
        connection.shutdown(socket.SHUT_RD)


def test_a_nul_in_text_is_refused_by_the_name_of_its_column(harness: PostgresHarness, store: OutputStore) -> None:
    run(harness, "CREATE TABLE flights (n bigint, note text)")
    rows = pa.record_batch({"n": [0, 1, 2, 3], "note": ["a", None, "b\0c", "\0"]})
    with refused("INVALID_OUTPUT", "note", "NUL") as caught:
        write(store, rows)
    assert caught.value.numbers["row"] == "2"
    assert harness.rows() == []
