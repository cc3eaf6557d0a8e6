"""Errors of databases, by what their drivers say: which of them pass by themselves."""

from collections.abc import Iterator
from typing import Any

from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

_PASSING_STATES = ("08", "40", "53", "55P03", "57P")
"""SQLSTATEs, or how they begin: connection, serialization and deadlock, resources, a lock not had, a shut-down."""

_PASSING_NUMBERS = frozenset((1040, 1053, 1205, 1213, 2002, 2003, 2006, 2013, 2055))
"""Of MariaDB: too many connections, a shut-down, a lock not had, a deadlock, a connection broken or not to be had."""

_SQLITE_PASSING = frozenset((5, 6))
"""SQLITE_BUSY and SQLITE_LOCKED."""

_CANCELED_STATE = "57014"
_TIMED_OUT_NUMBERS = frozenset((1317, 1969, 3024))
"""How PostgreSQL, MariaDB and MySQL say that a statement took too long, or that somebody has ended it."""


def passes_by_itself(failure: BaseException) -> bool:
    """Whether the database, and not what it was asked, is why: unreachable, busy, a deadlock."""
    return any(_passes(cause) for cause in _causes(failure))


def was_ended(failure: BaseException) -> bool:
    """Whether a statement took too long, or somebody has ended it."""
    codes = (codes_of(cause) for cause in _causes(failure) if isinstance(cause, DBAPIError))
    return any(state == _CANCELED_STATE or number in _TIMED_OUT_NUMBERS for state, number in codes)


def _causes(failure: BaseException) -> Iterator[BaseException]:
    """An error of the database, and what it came of: a deadlock takes the savepoint along, so that what is told last is
    that there is none."""
    cause: BaseException | None = failure if isinstance(failure, SQLAlchemyError) else None
    while cause is not None:
        yield cause
        cause = cause.__context__


def _passes(failure: BaseException) -> bool:
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


def told(failure: BaseException) -> str:
    """What the driver says, in one line."""
    return " ".join(str(getattr(failure, "orig", None) or failure).split())
