"""Errors of databases: whose fault each one is, and what it comes of. No driver is imported, nor SQLAlchemy.

This is the only place where an error of a database is classified. It takes the drivers' own exceptions, as PEP 249
names them, and SQLAlchemy's around them.
"""

import re
from collections.abc import Iterator
from enum import Enum
from typing import Any, NamedTuple


class Fault(Enum):
    """Whose fault a failure is, and so what is to be done."""

    MESSAGE = "message"
    """The database works, and refuses what it was asked: the next attempt fails as well."""

    DATABASE = "database"
    """Read-only, full, shutting down, without memory: to be waited for, however long. It never counts against a
    message."""

    REPEAT = "repeat"
    """Another transaction was in the way: the whole transaction is to be repeated."""

    UNKNOWN = "unknown"
    """The connection or the statement was ended. A server that went away does that, and so does a message that is too
    large for the server: the message is to blame if it fails alone, again and again, on a database that takes other
    work in between."""


class _Cause(NamedTuple):
    fault: Fault
    what: str


_DISK = _Cause(Fault.DATABASE, "the disk of the database is full")
_DEVICE = _Cause(Fault.DATABASE, "the database cannot read or write its files")
_FILE = _Cause(Fault.DATABASE, "the file of the database cannot be opened")
_DAMAGED = _Cause(Fault.DATABASE, "the files of the database are damaged")
_MEMORY = _Cause(Fault.DATABASE, "the database server has too little memory")
_CONNECTIONS = _Cause(Fault.DATABASE, "the database server takes no more connections")
_READ_ONLY = _Cause(Fault.DATABASE, "the database is read-only, as a replica is")
_SHUT_DOWN = _Cause(Fault.DATABASE, "the database server is shutting down, or was told to end the connection")
_STARTING = _Cause(Fault.DATABASE, "the database server is starting, or is no full member of its cluster")
_UNREACHABLE = _Cause(
    Fault.DATABASE, "the database server cannot be reached: it does not run, or the network is broken"
)
_NO_ENTRY = _Cause(Fault.DATABASE, "the database server does not let this user in")
_NO_DATABASE = _Cause(Fault.DATABASE, "the server has no such database")
_POOL = _Cause(Fault.DATABASE, "the engine's pool had no connection free in time")
_LOCK = _Cause(Fault.REPEAT, "another transaction holds a lock for long")
_DEADLOCK = _Cause(Fault.REPEAT, "the database has ended a deadlock with another transaction")
_CONFLICT = _Cause(Fault.REPEAT, "the transaction conflicts with another one")
_LOST = _Cause(
    Fault.UNKNOWN,
    "the connection to the database was lost: its server or the network failed, or the statement ended the connection",
)
_LOST_MYSQL = _Cause(
    Fault.UNKNOWN,
    "the connection to the database was lost: its server or the network failed, or the statement was larger than the "
    "server's max_allowed_packet",
)
_KILLED = _Cause(Fault.UNKNOWN, "somebody has ended the connection")
_IDLE = _Cause(
    Fault.UNKNOWN, "the database server has ended the connection: the transaction was idle, or took, longer than it may"
)
_TOO_LONG = _Cause(Fault.UNKNOWN, "the statement was ended: it took longer than it may, or somebody has canceled it")
_PACKET = _Cause(Fault.MESSAGE, "the statement is larger than the server's max_allowed_packet")
_REFUSED = _Cause(Fault.MESSAGE, "")

_STATES = {
    "08001": _UNREACHABLE,
    "08004": _UNREACHABLE,
    "08": _LOST,
    "25006": _READ_ONLY,
    "25P03": _IDLE,
    "25P04": _IDLE,
    "28": _NO_ENTRY,
    "3D000": _NO_DATABASE,
    "40P01": _DEADLOCK,
    "40": _CONFLICT,
    "53100": _DISK,
    "53300": _CONNECTIONS,
    "53": _MEMORY,
    "55P03": _LOCK,
    "57014": _TOO_LONG,
    "57P03": _STARTING,
    "57P": _SHUT_DOWN,
    "58": _DEVICE,
    "XX001": _DAMAGED,
    "XX002": _DAMAGED,
}
"""By SQLSTATE, or how it begins; the longest counts."""

_NUMBERS = {
    1015: _DEVICE,
    1020: _CONFLICT,
    1021: _DISK,
    1026: _DEVICE,
    1030: _DEVICE,
    1037: _MEMORY,
    1038: _MEMORY,
    1040: _CONNECTIONS,
    1041: _MEMORY,
    1045: _NO_ENTRY,
    1047: _STARTING,
    1049: _NO_DATABASE,
    1053: _SHUT_DOWN,
    1114: _DISK,
    1130: _NO_ENTRY,
    1153: _PACKET,
    1158: _LOST_MYSQL,
    1159: _LOST_MYSQL,
    1160: _LOST_MYSQL,
    1161: _LOST_MYSQL,
    1180: _DEVICE,
    1203: _CONNECTIONS,
    1205: _LOCK,
    1206: _MEMORY,
    1213: _DEADLOCK,
    1290: _READ_ONLY,
    1317: _TOO_LONG,
    1698: _NO_ENTRY,
    1712: _DAMAGED,
    1792: _READ_ONLY,
    1836: _READ_ONLY,
    1927: _KILLED,
    1969: _TOO_LONG,
    2002: _UNREACHABLE,
    2003: _UNREACHABLE,
    2006: _LOST_MYSQL,
    2013: _LOST_MYSQL,
    2055: _LOST_MYSQL,
    3024: _TOO_LONG,
    4031: _IDLE,
}
"""Of MariaDB and MySQL."""

_SQLITE = {
    5: _LOCK,
    6: _LOCK,
    7: _MEMORY,
    8: _READ_ONLY,
    9: _TOO_LONG,
    10: _DEVICE,
    11: _DAMAGED,
    13: _DISK,
    14: _FILE,
    15: _LOCK,
    17: _CONFLICT,
    26: _DAMAGED,
}
"""By SQLite's primary result code: BUSY, LOCKED, NOMEM, READONLY, INTERRUPT, IOERR, CORRUPT, FULL, CANTOPEN, PROTOCOL,
SCHEMA, NOTADB."""

_TEXTS = (
    (r"FATAL: .*authentication failed|FATAL: .*role \".*\" does not exist", _NO_ENTRY),
    (r"FATAL: .*no pg_hba\.conf entry|no password supplied", _NO_ENTRY),
    (r"FATAL: .*database \".*\" does not exist", _NO_DATABASE),
    (r"FATAL: .*(too many clients|connection slots)", _CONNECTIONS),
    (r"FATAL: .*the database system is ", _STARTING),
    (r"connection to server .* failed: ", _UNREACHABLE),
)
"""Where libpq gets no connection it gives no SQLSTATE, and what the server says is in the server's language."""

_ENDED_STATE = "57P01"
"""A server that shuts down says so to every connection, and one that was told to end this connection to this one."""

_USED_AFTER_LOSS = "8s2b"
"""SQLAlchemy's, for a connection that a handler has gone on with after it was lost."""

_ORDER = (Fault.DATABASE, Fault.REPEAT, Fault.UNKNOWN, Fault.MESSAGE)


def fault_of(failure: BaseException) -> Fault:
    """Whose fault it is. What is no error of a database, as an exception of a handler's own, is the message's."""
    return _cause(_first(failure)).fault


def lost_connection(failure: BaseException) -> bool:
    """Whether the connection was ended: by a server that goes away, an administrator, or the statement. If the server
    was not restarted since, and a message fails so each time, alone, the message has ended it."""
    return any(
        codes_of(one)[0] == _ENDED_STATE or _cause(one) in (_LOST, _LOST_MYSQL, _KILLED, _IDLE)
        for one in _chain(failure)
    )


def refuses_entry(failure: BaseException | None) -> bool:
    """Whether there is no such database, or it does not let this user in. Where that worked before it is waited for, as
    any fault of the database's; at the start of a service somebody has to correct it."""
    chain = () if failure is None else _chain(failure)
    return any(_cause(one) in (_NO_ENTRY, _NO_DATABASE, _FILE) for one in chain)


def ended(failure: BaseException) -> bool:
    """Whether the statement or the connection was ended, which a message can do and a server that goes away."""
    return fault_of(failure) is Fault.UNKNOWN or lost_connection(failure)


def told(failure: BaseException) -> str:
    """What it comes of and what the driver says of that, in one line. No password is in it."""
    first = _first(failure)
    what, said = _cause(first).what, " ".join(str(_driver_error(first)).split())
    return f"{what} ({said})" if what else said


def _first(failure: BaseException) -> BaseException:
    """A deadlock takes the savepoint along, so what the driver says last is that there is none. Of an error and those
    before it the database's own fault counts first."""
    return min(_chain(failure), key=lambda one: _ORDER.index(_cause(one).fault), default=failure)


def _chain(failure: BaseException) -> Iterator[BaseException]:
    """An error of a database, and what it came of. What a handler says of its own has no such past."""
    cause: BaseException | None = failure if _is_of_a_database(failure) else None
    while cause is not None:
        yield cause
        cause = cause.__context__


def _is_of_a_database(failure: BaseException) -> bool:
    return _is_a(failure, "SQLAlchemyError", "DatabaseError", "InterfaceError")


def _is_a(failure: BaseException, *names: str) -> bool:
    return any(base.__name__ in names for base in type(failure).__mro__)


def _cause(failure: BaseException) -> _Cause:
    """Of this error alone."""
    if not _is_of_a_database(failure):
        return _REFUSED
    if _is_a(failure, "SQLAlchemyError") and _is_a(failure, "TimeoutError"):
        return _POOL
    sqlite_code = getattr(_driver_error(failure), "sqlite_errorcode", None)
    if isinstance(sqlite_code, int):
        return _SQLITE.get(sqlite_code & 0xFF, _REFUSED)
    state, number = codes_of(failure)
    if number in _NUMBERS:
        return _NUMBERS[number]
    if state is not None:
        for length in (5, 3, 2):
            if state[:length] in _STATES:
                return _STATES[state[:length]]
    if getattr(failure, "connection_invalidated", False) or getattr(failure, "code", None) == _USED_AFTER_LOSS:
        return _LOST
    # A driver whose connection breaks, or that gets none, has no code from a server.
    if state is not None or number is not None or not _is_a(failure, "OperationalError", "InterfaceError"):
        return _REFUSED
    said = str(_driver_error(failure))
    return next((cause for pattern, cause in _TEXTS if re.search(pattern, said)), _LOST)


def codes_of(failure: BaseException) -> tuple[str | None, int | None]:
    """The SQLSTATE and MariaDB's number of an error, as far as its driver gives them."""
    cause = _driver_error(failure)
    first = cause.args[0] if getattr(cause, "args", None) else None
    state = getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)
    if isinstance(first, dict):  # pg8000's
        state = first.get("C")
    number = first if isinstance(first, int) else getattr(cause, "errno", None)
    return state if isinstance(state, str) else None, number if isinstance(number, int) else None


def _driver_error(failure: BaseException) -> Any:
    return getattr(failure, "orig", None) or failure
