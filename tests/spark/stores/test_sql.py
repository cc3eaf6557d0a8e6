"""What is special about the store behind SQLAlchemy, on a real MariaDB."""

import datetime
import decimal
import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pytest
from sqlalchemy import Connection, NullPool, create_engine, event, text
from sqlalchemy.exc import OperationalError

from seqdedupe.errors import SeqdedupeError
from seqdedupe_spark.stores.contract import Advance, Binding, OutputStore, Stored
from seqdedupe_spark.stores.general import GeneralStore
from seqdedupe_spark.stores.urls import from_url
from tests.spark.stores.conformance import JOB, LIMIT_SECONDS, SCHEMA, TOPIC, at, numbers, over, refused
from tests.spark.stores.harnesses import MariaDBHarness
from tests.spark.stores.test_kill import committed, kill_anywhere, kill_at, start
from tests.spark.stores.writer import BATCHES, ROWS


def execute(url: str, *statements: str) -> list[Any]:
    """The rows of the last one."""
    with create_engine(url, isolation_level="AUTOCOMMIT", poolclass=NullPool).connect() as connection:
        *_, last = [connection.execute(text(one)) for one in statements]
        return list(last.all()) if last.returns_rows else []


def opened(url: str) -> OutputStore:
    return from_url(url)()


def written(url: str, batch: pa.RecordBatch) -> None:
    with opened(url) as store:
        store.prepare("flights", batch.schema)
        store.replace(JOB, TOPIC, None, Stored(at(-1), 0))
        store.write(JOB, "flights", iter([batch]), [over(-1, 0)])


@pytest.mark.parametrize(
    ("column", "value", "kind"),
    [
        ("n TINYINT", 300, pa.int64()),
        ("n INT UNSIGNED", -1, pa.int64()),
        ("n VARCHAR(3)", "four", pa.string()),
        ("n VARCHAR(9) CHARACTER SET latin1", "\u20bf", pa.string()),
        ("n VARBINARY(2)", b"abc", pa.binary()),
        ("n DECIMAL(4, 2)", decimal.Decimal("123.45"), pa.decimal128(5, 2)),
        ("n DOUBLE", float("inf"), pa.float64()),
        ("n INT NOT NULL", None, pa.int64()),
        ("n INT UNIQUE", 1, pa.int64()),
    ],
    ids=lambda it: it if isinstance(it, str) else "",
)
def test_nothing_is_cut_or_made_zero(mariadb_url: str, column: str, value: object, kind: pa.DataType) -> None:
    """The server's own mode is the forgiving one; the row is named, and nothing of it is there."""
    execute(mariadb_url, f"CREATE TABLE flights ({column}) ENGINE=InnoDB", "SET GLOBAL sql_mode = ''")
    fine = {pa.string(): "a", pa.binary(): b"a", pa.float64(): 0.5, pa.int64(): 1}.get(kind, decimal.Decimal(1))
    batch = pa.record_batch({"n": pa.array([fine, value], kind)})
    with refused("INVALID_OUTPUT") as caught:
        written(mariadb_url, batch)
    assert (caught.value.numbers["batch"], caught.value.numbers["row"]) == ("0", "1")
    assert execute(mariadb_url, "SELECT * FROM flights") == []
    with opened(mariadb_url) as store:
        assert store.positions(JOB) == {TOPIC: Stored(at(-1), 0)}


def test_instants_are_in_utc_whatever_the_server_thinks(mariadb_url: str) -> None:
    execute(mariadb_url, "SET GLOBAL time_zone = '+05:00'", "CREATE TABLE flights (t TIMESTAMP(6), d DATETIME(6))")
    when = datetime.datetime(2024, 2, 29, 23, 30, 0, 5, datetime.UTC)
    zone = pa.timestamp("us", "Asia/Tokyo")
    written(mariadb_url, pa.record_batch({"t": pa.array([when], zone), "d": pa.array([when], zone)}))
    [(seconds, local)] = execute(mariadb_url, "SELECT UNIX_TIMESTAMP(t), d FROM flights")
    assert (float(seconds), local) == (when.timestamp(), when.replace(tzinfo=None))


def test_tables_without_transactions_are_refused(mariadb_url: str) -> None:
    execute(mariadb_url, "CREATE TABLE flights (n BIGINT, text TEXT) ENGINE=MyISAM")
    with opened(mariadb_url) as store:
        with refused("INVALID_OUTPUT", "flights", "transactions"):
            store.prepare("flights", SCHEMA)
        execute(mariadb_url, "ALTER TABLE flights ENGINE=InnoDB", "ALTER TABLE seqdedupe_positions ENGINE=Aria")
        for call in (lambda: store.prepare("flights", SCHEMA), lambda: store.bind(JOB, Binding("flights", False))):
            with refused("INVALID_OUTPUT", "seqdedupe_positions", "transactions"):
                call()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ("flights ENGINE=MyISAM", "no transactions"),
        ("seqdedupe_positions ENGINE=Aria", "no transactions"),
        ("flights MODIFY n DATETIME", "does not accept int64"),
    ],
)
def test_what_a_table_is_is_looked_at_in_the_transaction(mariadb_url: str, changed: str, said: str) -> None:
    with opened(mariadb_url) as store:
        store.prepare("flights", SCHEMA)
        store.replace(JOB, TOPIC, None, Stored(at(-1), 0))

        def rows() -> Iterator[pa.RecordBatch]:
            yield numbers(1)
            execute(mariadb_url, f"ALTER TABLE {changed}")

        with refused("INVALID_OUTPUT", said):
            store.write(JOB, "flights", rows(), [over(-1, 0)])
        assert store.positions(JOB) == {TOPIC: Stored(at(-1), 0)}
        assert execute(mariadb_url, "SELECT * FROM flights") == []


def test_a_table_stays_what_it_is_while_rows_are_inserted(mariadb_url: str) -> None:
    """Who changes it waits, from before it is looked at, and no longer than a minute if the writer stops."""
    with opened(mariadb_url) as store:
        store.prepare("flights", SCHEMA)
        store.replace(JOB, TOPIC, None, Stored(at(-1), 0))
        assert isinstance(store, GeneralStore)
        timeouts: list[int] = []

        def change(connection: Connection, *_: Any) -> None:
            timeouts.extend(connection.exec_driver_sql("SELECT @@idle_transaction_timeout").scalars())
            for table in ("flights", "seqdedupe_positions", "seqdedupe_watermarks"):
                with pytest.raises(OperationalError, match="Lock wait timeout"):
                    execute(mariadb_url, "SET lock_wait_timeout = 0", f"ALTER TABLE {table} ADD more INT")

        event.listen(store._engine, "savepoint", change, once=True)
        assert store.write(JOB, "flights", iter([numbers(1)]), [over(-1, 0)]) == 1
        assert timeouts == [60]


def test_a_double_takes_no_decimals(mariadb_url: str) -> None:
    execute(mariadb_url, "CREATE TABLE flights (n DOUBLE) ENGINE=InnoDB")
    with opened(mariadb_url) as store, refused("INVALID_OUTPUT", "n", "DOUBLE"):
        store.prepare("flights", pa.schema({"n": pa.decimal128(20, 3)}))


def test_producers_whose_names_differ_by_a_blank_are_two(mariadb_url: str) -> None:
    with opened(mariadb_url) as store:
        store.prepare("flights", SCHEMA)
        store.replace(JOB, TOPIC, None, Stored(at(-1), 0))
        store.write(JOB, "flights", iter([]), [Advance(over(-1, 0).range, 0, lambda: {"web": 100, "web ": 1})])
        store.write(JOB, "flights", iter([]), [Advance(over(0, 1).range, 0, lambda: {"web ": 5})])
        assert store.watermarks(JOB, TOPIC)[1] == {"web": 100, "web ": 5}
        assert store.positions(f"{JOB} ") == {}


def test_a_deadlock_blames_no_row(mariadb_url: str) -> None:
    """It takes the savepoint along, so that what the driver tells in the end is that there is none."""
    execute(
        mariadb_url,
        "CREATE TABLE flights (n BIGINT UNIQUE, text TEXT) ENGINE=InnoDB",
        "INSERT INTO flights VALUES (7, '')",
    )
    with opened(mariadb_url) as store:
        store.prepare("flights", SCHEMA)
        store.replace(JOB, TOPIC, None, Stored(at(-1), 0))
        assert isinstance(store, GeneralStore)
        blocked = threading.Event()

        def other() -> None:
            """Holds 7 and wants 1, which the store's transaction has when it wants 7."""
            engine = create_engine(mariadb_url, poolclass=NullPool, isolation_level="READ COMMITTED")
            with engine.connect() as connection:
                # The one with fewer changes is the victim: that is the store's.
                connection.execute(text("DELETE FROM flights WHERE n = 7"))
                for k in range(100, 200):
                    connection.execute(text(f"INSERT INTO flights VALUES ({k}, '')"))
                holding.set()
                assert blocked.wait(LIMIT_SECONDS)
                connection.execute(text("INSERT INTO flights VALUES (1, '')"))
                connection.rollback()

        def in_hand(connection: Connection, *_: Any) -> None:
            seen.append(connection)
            if len(seen) == 2:
                blocked.set()

        holding, seen = threading.Event(), list[Any]()
        with ThreadPoolExecutor() as pool:
            others = pool.submit(other)
            assert holding.wait(LIMIT_SECONDS)
            event.listen(store._engine, "savepoint", in_hand)
            with refused("OUTPUT_UNAVAILABLE"):
                store.write(JOB, "flights", iter([numbers(1), numbers(7)]), [over(-1, 1)])
            others.result(LIMIT_SECONDS)
        event.remove(store._engine, "savepoint", in_hand)
        assert store.write(JOB, "flights", iter([numbers(1)]), [over(-1, 1)]) == 1


def test_names_differ_by_case_and_columns_may_be_called_anything(mariadb_url: str) -> None:
    schema = pa.schema({"a b": pa.int64(), "100%": pa.int64(), ":p0": pa.int64(), "VALUES (": pa.int64()})
    batch = pa.record_batch([pa.array([n]) for n in range(4)], schema=schema)
    written(mariadb_url, batch)
    assert execute(mariadb_url, "SELECT * FROM flights") == [(0, 1, 2, 3)]
    with opened(mariadb_url) as store:
        assert store.bind("Job", Binding("Flights", True)) == Binding("Flights", True)
        assert store.bind("job", Binding("flights", False)) == Binding("flights", False)
        assert store.positions(JOB.upper()) == {}
        with refused("INVALID_OPTION", "255"):
            store.bind("j" * 256, Binding("flights", False))


def test_a_schema_is_another_database(mariadb_url: str) -> None:
    other = mariadb_url.partition("?")[0].rpartition("/")[2] + "_other"
    execute(mariadb_url, f"CREATE DATABASE {other}")
    try:
        with opened(mariadb_url) as store:
            assert not store.has_table(f"{other}.flights")
            store.prepare(f"{other}.flights", SCHEMA)
            assert store.has_table(f"{other}.flights")
            assert store.replace(JOB, TOPIC, None, Stored(at(-1), 0))
            assert store.write(JOB, f"{other}.flights", iter([numbers(0, 1)]), [over(-1, 1)]) == 2
        assert execute(mariadb_url, f"SELECT COUNT(*) FROM {other}.flights") == [(2,)]
    finally:
        execute(mariadb_url, f"DROP DATABASE {other}")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_server_that_is_away_is_said_without_the_password(mariadb_url: str) -> None:
    away = mariadb_url.replace("unix_socket=", "unix_socket=/nowhere").replace("root@", "root:secret@")
    with opened(away) as store, pytest.raises(SeqdedupeError) as caught:
        store.positions(JOB)
    assert caught.value.reason == "OUTPUT_UNAVAILABLE"
    assert "secret" not in str(caught.value)
    # The driver leaves a socket open when it cannot connect: here, and not in another test.
    del caught
    gc.collect()


def test_a_connection_that_breaks_before_the_commit_writes_nothing(mariadb_url: str) -> None:
    harness = MariaDBHarness(mariadb_url)
    start(harness)

    def break_off(connection: Connection) -> None:
        [(own,)] = connection.exec_driver_sql("SELECT CONNECTION_ID()").all()
        execute(mariadb_url, f"KILL {own}")

    with harness.factory() as store:
        assert isinstance(store, GeneralStore)
        event.listen(store._engine, "commit", break_off)
        with refused("OUTPUT_UNAVAILABLE"):
            store.write(JOB, "flights", iter([numbers(0)]), [over(-1, 0, a=0)])
        event.remove(store._engine, "commit", break_off)
        assert committed(harness) == -1
        assert store.write(JOB, "flights", iter([numbers(0)]), [over(-1, 0, a=0)]) == 1
    assert committed(harness) == 0


def test_kill_9_of_a_writer(mariadb_url: str) -> None:
    harness = MariaDBHarness(mariadb_url)
    start(harness)
    expected = -1
    for place, moves in {"rows": False, "watermarks": False, "after": True}.items():
        kill_at(mariadb_url, place)
        expected += BATCHES * ROWS * moves
        assert committed(harness) == expected, place
    kill_anywhere(mariadb_url)
    assert committed(harness) > expected


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("sqlite+pysqlite:///x.db", "UNSUPPORTED_STORE"),
        ("mysql+nosuchdriver://root:secret@/x", "INVALID_OPTION"),
        ("nosuch+database://root:secret@/x", "INVALID_OPTION"),
        ("mysql+pymysql://root:secret@host:port/x", "INVALID_OPTION"),
    ],
)
def test_urls_that_cannot_be_used(url: str, reason: str) -> None:
    with pytest.raises(SeqdedupeError) as caught:
        from_url(url)
    assert caught.value.reason == reason
    assert "secret" not in str(caught.value)
