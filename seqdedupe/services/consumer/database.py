"""What differs between databases: which errors pass by themselves, and which tables have no transactions."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from sqlalchemy import Connection, Engine, event, text
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from seqdedupe.errors import SeqdedupeError, UnavailableError, error

_PASSING_STATES = ("08", "40", "53", "55P03", "57P")
"""SQLSTATEs, or how they begin: connection, serialization and deadlock, resources, a lock not had, a shut-down."""

_PASSING_NUMBERS = frozenset((1040, 1053, 1205, 1213, 2002, 2003, 2006, 2013, 2055))
"""Of MariaDB: too many connections, a shut-down, a lock not had, a deadlock, a connection broken or not to be had."""

_SQLITE_PASSING = frozenset((5, 6))
"""SQLITE_BUSY and SQLITE_LOCKED."""

_WRITES = re.compile(r"\s*(?:insert|update|delete|replace|load|with|call)\b", re.IGNORECASE)


def passes_by_itself(failure: BaseException) -> bool:
    """Whether the database, and not what it was asked, is why: unreachable, busy, a deadlock."""
    if isinstance(failure, PoolTimeoutError):
        return True
    if not isinstance(failure, DBAPIError):
        return False
    if failure.connection_invalidated:
        return True
    sqlite_code = getattr(failure.orig, "sqlite_errorcode", None)
    if isinstance(sqlite_code, int):
        return sqlite_code & 0xFF in _SQLITE_PASSING
    state, number = codes_of(failure)
    if number in _PASSING_NUMBERS:
        return True
    if state is not None:
        return state.startswith(_PASSING_STATES)
    # A driver that could not connect has no code from a server.
    return number is None and isinstance(failure, OperationalError | InterfaceError)


def codes_of(failure: DBAPIError) -> tuple[str | None, int | None]:
    """The SQLSTATE and MariaDB's number of an error, as far as its driver gives them."""
    cause: Any = failure.orig
    first = cause.args[0] if getattr(cause, "args", None) else None
    state = getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)
    if isinstance(first, dict):  # pg8000's
        state = first.get("C")
    number = first if isinstance(first, int) else getattr(cause, "errno", None)
    return state if isinstance(state, str) else None, number if isinstance(number, int) else None


class Away(Exception):
    """The database cannot be used now, or has undone the transaction: what was committed is to be looked up."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(cause)
        made = error(
            "OUTPUT_UNAVAILABLE",
            f"the consumer's database cannot be used now: {_line(cause)}",
            hint="It is tried again.",
        )
        self.failure = cast(UnavailableError, made)


@contextmanager
def reaching() -> Iterator[None]:
    """Raises Away for what passes by itself, INVALID_OUTPUT for what else the database refuses."""
    try:
        yield
    except SQLAlchemyError as e:
        if passes_by_itself(e):
            raise Away(e) from e
        hint = "See why, and whether the user of the database may do it."
        raise error("INVALID_OUTPUT", f"the consumer's tables cannot be used: {_line(e)}", hint=hint) from e


def _line(failure: BaseException) -> str:
    return " ".join(str(getattr(failure, "orig", None) or failure).split())


def without_transactions(engine: Engine) -> frozenset[str]:
    """The tables of the database whose engine has no transactions, as MyISAM and Aria in MariaDB."""
    if engine.dialect.name not in ("mysql", "mariadb"):
        return frozenset()
    with engine.connect() as connection:
        found = connection.execute(
            text(
                "SELECT t.table_name FROM information_schema.tables t "
                "LEFT JOIN information_schema.engines e ON t.engine = e.engine WHERE t.table_schema = DATABASE() "
                "AND t.table_type = 'BASE TABLE' AND COALESCE(e.transactions, 'NO') <> 'YES'"
            )
        )
        return frozenset(str(name) for (name,) in found)


@contextmanager
def refusing_writes(connection: Connection, tables: frozenset[str]) -> Iterator[None]:
    """Within the block a statement that writes and names one of these tables is refused before it is carried out."""
    if not tables:
        yield
        return
    names = re.compile(r"(?<![\w$])(?:" + "|".join(map(re.escape, sorted(tables))) + r")(?![\w$])", re.IGNORECASE)

    def look(_connection: Connection, _cursor: object, statement: str, *_: object) -> None:
        found = names.search(statement)
        if found and _WRITES.match(statement):
            raise not_transactional(found[0])

    event.listen(connection, "before_cursor_execute", look)
    try:
        yield
    finally:
        event.remove(connection, "before_cursor_execute", look)


def not_transactional(table: str) -> SeqdedupeError:
    """The error for a table whose changes cannot be taken back."""
    return error(
        "NOT_TRANSACTIONAL", f"the table {table} has no transactions: what is written there stays, committed or not"
    )
