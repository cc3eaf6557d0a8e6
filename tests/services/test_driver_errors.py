"""Whose fault an error of a database is, as drivers give it. Costs: nothing."""

import importlib
import sqlite3
import sys
from typing import Any

import psycopg
import pymysql  # type: ignore[import-untyped]
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import DatabaseError, IntegrityError, InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from seqdedupe.databases.failures import (
    Fault,
    codes_of,
    ended,
    fault_of,
    lost_connection,
    refuses_entry,
    told,
)
from seqdedupe.errors import SeqdedupeError
from seqdedupe.services.outbox import postgres_outbox as outbox_postgres
from seqdedupe.services.outbox import sqlite_outbox as outbox_sqlite


def postgres(state: str) -> psycopg.Error:
    return psycopg.errors.lookup(state)("said")


def sqlite(code: int) -> sqlite3.Error:
    failure = sqlite3.OperationalError("said")
    failure.sqlite_errorcode = code
    return failure


def mariadb(number: int) -> Exception:
    return pymysql.err.OperationalError(number, "said")  # type: ignore[no-any-return]


BY_CODE = {
    Fault.DATABASE: [
        *map(postgres, ("25006", "53100", "53200", "53300", "57P01", "57P02", "57P03", "58030", "XX001")),
        *map(mariadb, (1021, 1040, 1053, 1114, 1290, 1836, 2003)),
        *map(sqlite, (8, 10, 13, 14, 10 | 3 << 8)),
        PoolTimeoutError("QueuePool limit"),
        psycopg.OperationalError("connection to server on socket failed: FATAL:  the database system is starting up"),
    ],
    Fault.REPEAT: [*map(postgres, ("40001", "40P01", "55P03")), *map(mariadb, (1205, 1213)), *map(sqlite, (5, 6, 517))],
    Fault.UNKNOWN: [
        *map(postgres, ("08006", "25P03", "57014")),
        *map(mariadb, (1927, 1969, 2006, 2013)),
        psycopg.OperationalError("server closed the connection unexpectedly"),
    ],
    Fault.MESSAGE: [
        *map(postgres, ("22001", "23505", "42P01", "XX000")),
        *map(mariadb, (1062, 1153, 1406)),
        *map(sqlite, (1, 18, 19)),
        ValueError("of a handler"),
        ConnectionError("of another server"),
    ],
}


@pytest.mark.parametrize(("fault", "failure"), [(fault, one) for fault, all_ in BY_CODE.items() for one in all_])
def test_whose_fault_it_is(fault: Fault, failure: Any) -> None:
    """As the driver raises it, and as SQLAlchemy does."""
    assert fault_of(failure) is fault
    if not isinstance(failure, ValueError | ConnectionError | PoolTimeoutError):
        assert fault_of(OperationalError("UPDATE", {}, failure)) is fault


REFUSALS = [
    ("FATAL:  Passwort-Authentifizierung für Benutzer »shop« fehlgeschlagen", True, "does not let this user in"),
    ("FATAL:  Datenbank »orders« existiert nicht", True, "does not let this user in"),
    ("FATAL:  le rôle « shop » n'existe pas", True, "does not let this user in"),
    ('ВАЖНО:  база данных "orders" не существует', True, "does not let this user in"),
    ('FATAL:  database "orders" does not exist', True, "has no such database"),
    ("FATAL:  das Datenbanksystem startet", False, "answers, and takes no connection now"),
    ("FATAL:  tut mir leid, schon zu viele Verbindungen", False, "answers, and takes no connection now"),
    ("FATAL:  sorry, too many clients already", False, "takes no more connections"),
    ("Connection refused\n\tIs the server running on that host?", False, "cannot be reached"),
    ("server closed the connection unexpectedly", False, "cannot be reached"),
]


@pytest.mark.parametrize(("answer", "is_refused", "cause"), REFUSALS)
def test_a_server_without_english_refuses_a_connection(answer: str, is_refused: bool, cause: str) -> None:
    """libpq gives no SQLSTATE then."""
    tried = psycopg.errors.FinishedPGconn(user=b"shop", db=b"orders")
    said = f'connection failed: connection to server at "127.0.0.1", port 5432 failed: {answer}\n'
    failure = OperationalError("SELECT 1", {}, psycopg.OperationalError(said, pgconn=tried))
    assert refuses_entry(failure) is is_refused
    assert fault_of(failure) is Fault.DATABASE
    assert cause in told(failure)


def test_the_fault_of_the_database_counts_first() -> None:
    """Everything that came of it: a full disk takes the transaction along."""
    refused = IntegrityError("INSERT", {}, postgres("23505"))
    refused.__context__ = OperationalError("UPDATE", {}, psycopg.errors.DiskFull("no space"))
    assert told(refused) == "the disk of the database is full (no space)"
    assert fault_of(refused) is Fault.DATABASE


@pytest.mark.parametrize(
    ("module", "failure", "reason"),
    [
        (outbox_postgres, postgres("53100"), "OUTBOX_UNAVAILABLE"),
        (outbox_postgres, postgres("25P03"), "OUTBOX_UNAVAILABLE"),
        (outbox_postgres, postgres("25006"), "OUTBOX_UNAVAILABLE"),
        (outbox_postgres, postgres("42P01"), "INVALID_OUTBOX"),
        (outbox_sqlite, sqlite(13), "OUTBOX_UNAVAILABLE"),
        (outbox_sqlite, sqlite(1), "INVALID_OUTBOX"),
    ],
)
def test_a_relay_waits_for_what_is_the_database_s(module: Any, failure: Exception, reason: str) -> None:
    with pytest.raises(SeqdedupeError) as raised, module._errors():
        raise failure
    assert raised.value.reason == reason


def test_a_connection_that_ended() -> None:
    for failure in (postgres("57P01"), postgres("25P03"), mariadb(1927), mariadb(2013)):
        assert lost_connection(failure)
    for failure in (postgres("25006"), postgres("23505"), mariadb(1213)):
        assert not lost_connection(failure)
    # That another process crashed is the server's own, and so is a shutdown.
    for failure in (postgres("57P02"), mariadb(1053)):
        assert not lost_connection(OperationalError("UPDATE", {}, failure, connection_invalidated=True))


def test_a_handler_that_goes_on_after_the_loss() -> None:
    engine = create_engine("sqlite://")
    with engine.connect() as connection:
        connection.execute(text("SELECT 1"))
        connection.invalidate()
        with pytest.raises(SQLAlchemyError) as raised:
            connection.execute(text("SELECT 1"))
    assert fault_of(raised.value) is Fault.UNKNOWN


@pytest.mark.parametrize(
    ("failure", "cause"),
    [
        (mariadb(2006), "max_allowed_packet"),
        (mariadb(1290), "read-only"),
        (sqlite(13), "disk"),
        (postgres("55P03"), "another transaction"),
        (mariadb(2003), "network"),
    ],
)
def test_what_is_told_names_the_cause_and_quotes_the_driver(failure: Any, cause: str) -> None:
    assert cause in told(failure)
    assert "said" in told(failure)


def test_neither_a_driver_nor_sqlalchemy_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is imported where only one driver is installed."""
    for missing in ("sqlalchemy", "sqlalchemy.exc", "psycopg", "pymysql"):
        monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, "seqdedupe.databases.failures")
    again = importlib.import_module("seqdedupe.databases.failures")
    assert again.fault_of(sqlite(13)) is again.Fault.DATABASE


BY_ARGUMENT = [
    ({"S": "ERROR", "C": "40P01", "M": "deadlock detected"}, True),
    ({"S": "FATAL", "C": "57P01", "M": "terminating connection"}, True),
    ({"S": "ERROR", "C": "23505", "M": "duplicate key"}, False),
]


@pytest.mark.parametrize(("fields", "passes"), BY_ARGUMENT)
def test_a_state_among_the_fields_of_the_argument(fields: dict[str, str], passes: bool) -> None:
    """pg8000 has no attribute for it."""
    failure = DatabaseError("SELECT", {}, Exception(fields))
    assert (codes_of(failure), fault_of(failure) is not Fault.MESSAGE) == ((fields["C"], None), passes)


@pytest.mark.parametrize(("number", "passes"), [(1205, True), (1213, True), (1062, False)])
def test_a_number_that_is_an_attribute(number: int, passes: bool) -> None:
    """MariaDB's own driver has the text as the argument, and a state that says less."""
    cause = Exception("Lock wait timeout exceeded")
    cause.errno, cause.sqlstate = number, "HY000"  # type: ignore[attr-defined]
    assert (fault_of(OperationalError("SELECT", {}, cause)) is not Fault.MESSAGE) is passes


def test_a_driver_that_could_not_connect_has_no_code() -> None:
    assert fault_of(InterfaceError("SELECT", {}, Exception("Can't create a connection to host"))) is not Fault.MESSAGE
    assert fault_of(ValueError("no error of a database")) is Fault.MESSAGE


def test_a_deadlock_that_took_the_savepoint_along_passes() -> None:
    """What is reported then is that there is no savepoint; and where its own handler says something, that counts."""
    deadlock = OperationalError("UPDATE", {}, Exception(1213, "Deadlock found"))
    no_savepoint = OperationalError("ROLLBACK TO SAVEPOINT", {}, Exception(1305, "SAVEPOINT does not exist"))
    assert fault_of(no_savepoint) is Fault.MESSAGE
    no_savepoint.__context__ = deadlock
    assert fault_of(no_savepoint) is not Fault.MESSAGE
    its_own = ValueError("not booked")
    its_own.__context__ = deadlock
    assert fault_of(its_own) is Fault.MESSAGE


def test_a_statement_that_took_too_long_was_ended() -> None:
    cause = Exception("canceling statement due to statement timeout")
    cause.sqlstate = "57014"  # type: ignore[attr-defined]
    for failure in (OperationalError("SELECT", {}, cause), OperationalError("S", {}, Exception(1969, "max_statement"))):
        assert ended(failure)
        assert not lost_connection(failure)
    assert not ended(OperationalError("UPDATE", {}, Exception(1213, "Deadlock found")))


def test_what_the_driver_says_is_one_line() -> None:
    assert told(DatabaseError("SELECT", {}, Exception("no\n  such table"))) == "no such table"
