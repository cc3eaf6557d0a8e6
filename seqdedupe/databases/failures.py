"""Errors of databases: the cause of each error, and whether the message or the database is at fault. This module
imports neither SQLAlchemy nor a driver.

Only this module classifies errors of a database. The functions accept drivers' exceptions with the names of PEP 249,
and SQLAlchemy's exceptions that wrap drivers' exceptions.
"""

import re
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, NamedTuple, TypeVar


class Fault(Enum):
    """Whose fault a failure is. That decides the reaction."""

    MESSAGE = "message"
    """The database works, and refuses the request: the next attempt fails as well."""

    DATABASE = "database"
    """The database is read-only, full or shutting down, or has no free memory. The caller waits without a time limit.
    Such a failure never counts as a failed attempt of a message."""

    REPEAT = "repeat"
    """The transaction conflicts with another transaction. The whole transaction must be repeated."""

    UNKNOWN = "unknown"
    """The connection or the statement was ended. The cause may be a server that stops, or a message that is too large
    for the server. The message is the cause if it fails repeatedly when it is alone, while the database does other work
    in between."""


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
_SHUT_DOWN = _Cause(Fault.DATABASE, "the database server is shutting down, or has ended the connection on request")
_STARTING = _Cause(Fault.DATABASE, "the database server is starting, or is no full member of its cluster")
_UNREACHABLE = _Cause(
    Fault.DATABASE, "the database server cannot be reached: it does not run, or the network is broken"
)
_NO_ENTRY = _Cause(Fault.DATABASE, "the database server does not let this user into this database")
_NO_DATABASE = _Cause(Fault.DATABASE, "the server has no such database")
_NOW_NOT = _Cause(Fault.DATABASE, "the database server answers, and takes no connection now")
_POOL = _Cause(Fault.DATABASE, "the engine's pool had no connection free in time")
_LOCK = _Cause(Fault.REPEAT, "another transaction holds a lock for too long")
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
    Fault.UNKNOWN, "the database server has ended the connection: the transaction was idle or ran for too long"
)
_TOO_LONG = _Cause(Fault.UNKNOWN, "the statement was ended: it took longer than allowed, or somebody canceled it")
_PACKET = _Cause(Fault.MESSAGE, "the statement is larger than the server's max_allowed_packet")
_REFUSED = _Cause(Fault.MESSAGE, "")

_Code = TypeVar("_Code", int, str)


def _by_code(codes: Mapping[_Cause, tuple[_Code, ...]]) -> dict[_Code, _Cause]:
    return {code: cause for cause, several in codes.items() for code in several}


_STATES = _by_code(
    {
        _UNREACHABLE: ("08001", "08004"),
        _LOST: ("08",),
        _READ_ONLY: ("25006",),
        _IDLE: ("25P03", "25P04"),
        _NO_ENTRY: ("28",),
        _NO_DATABASE: ("3D000",),
        _DEADLOCK: ("40P01",),
        _CONFLICT: ("40",),
        _DISK: ("53100",),
        _CONNECTIONS: ("53300",),
        _MEMORY: ("53",),
        _LOCK: ("55P03",),
        _TOO_LONG: ("57014",),
        _STARTING: ("57P03",),
        _SHUT_DOWN: ("57P",),
        _DEVICE: ("58",),
        _DAMAGED: ("XX001", "XX002"),
    }
)
"""The fault for each SQLSTATE, or for each prefix of SQLSTATEs. The longest matching prefix counts."""

_NUMBERS = _by_code(
    {
        _DEVICE: (1015, 1026, 1030, 1180),
        _CONFLICT: (1020,),
        _DISK: (1021, 1114),
        _MEMORY: (1037, 1038, 1041, 1206),
        _CONNECTIONS: (1040, 1203),
        _NO_ENTRY: (1045, 1130, 1698),
        _STARTING: (1047,),
        _NO_DATABASE: (1049,),
        _SHUT_DOWN: (1053,),
        _PACKET: (1153,),
        _LOST_MYSQL: (1158, 1159, 1160, 1161, 2006, 2013, 2055),
        _LOCK: (1205,),
        _DEADLOCK: (1213,),
        _READ_ONLY: (1290, 1792, 1836),
        _TOO_LONG: (1317, 1969, 3024),
        _DAMAGED: (1712,),
        _KILLED: (1927,),
        _UNREACHABLE: (2002, 2003),
        _IDLE: (4031,),
    }
)
"""By error number of MariaDB and MySQL."""

_SQLITE = _by_code(
    {
        _LOCK: (5, 6, 15),
        _MEMORY: (7,),
        _READ_ONLY: (8,),
        _TOO_LONG: (9,),
        _DEVICE: (10,),
        _DAMAGED: (11, 26),
        _DISK: (13,),
        _FILE: (14,),
        _CONFLICT: (17,),
    }
)
"""By SQLite's primary result code: BUSY, LOCKED, NOMEM, READONLY, INTERRUPT, IOERR, CORRUPT, FULL, CANTOPEN, PROTOCOL,
SCHEMA, NOTADB."""

_TEXTS = (
    (r"FATAL: .*authentication failed|FATAL: .*role \".*\" does not exist", _NO_ENTRY),
    (r"FATAL: .*no pg_hba\.conf entry|no password supplied", _NO_ENTRY),
    (r"FATAL: .*database \".*\" does not exist", _NO_DATABASE),
    (r"FATAL: .*(too many clients|too many connections|connection slots)", _CONNECTIONS),
    (r"FATAL: .*the database system is ", _STARTING),
)
"""Error texts of an English-language server. If libpq cannot connect, it reports no SQLSTATE."""

_NO_CONNECTION = re.compile(r"connection to server .* failed: ")
"""The text of libpq itself, which does not depend on the server's language."""

_ANSWERED = re.compile(_NO_CONNECTION.pattern + r"[^\s:]+:  ")
"""The same text, followed by a server's answer. libpq writes the answer's severity, a colon and two spaces."""

_ENDED_STATE = "57P01"
"""The SQLSTATE for all connections when a server shuts down, or for one connection that an administrator ends."""

_USED_AFTER_LOSS = "8s2b"
"""SQLAlchemy's code for a connection that a handler has continued to use after its loss."""

_ORDER = (Fault.DATABASE, Fault.REPEAT, Fault.UNKNOWN, Fault.MESSAGE)


def fault_of(failure: BaseException) -> Fault:
    """Return whether the message or the database is at fault. If the error is not a database's error, but for example
    the handler's, the message is at fault."""
    return _cause(_first(failure)).fault


def lost_connection(failure: BaseException) -> bool:
    """Return whether the connection was ended: by a server that stops, by an administrator, or because of the
    statement.

    A message is the cause if it is alone in its transaction, every attempt fails in this way, and the server was not
    restarted.
    """
    return any(
        codes_of(one)[0] == _ENDED_STATE or _cause(one) in (_LOST, _LOST_MYSQL, _KILLED, _IDLE)
        for one in _chain(failure)
    )


def refuses_entry(failure: BaseException | None) -> bool:
    """Return whether the database does not exist, or refuses this user.

    If the database worked before, the caller waits, as for any fault of the database. At the start of a service, an
    operator has to correct the fault.
    """
    chain = () if failure is None else _chain(failure)
    return any(_cause(one) in (_NO_ENTRY, _NO_DATABASE, _FILE) for one in chain)


def ended(failure: BaseException) -> bool:
    """Return whether the statement or the connection was ended. The cause can be a message or a lost server."""
    return fault_of(failure) is Fault.UNKNOWN or lost_connection(failure)


def told(failure: BaseException) -> str:
    """Return the cause and the driver's message in one line. The line contains no password."""
    first = _first(failure)
    what, said = _cause(first).what, " ".join(str(_driver_error(first)).split())
    return f"{what} ({said})" if what else said


def _first(failure: BaseException) -> BaseException:
    """Return the decisive error of a chain. An error for which the database is at fault has priority.

    A deadlock also ends the savepoint, so the driver's last error only reports that the savepoint does not exist."""
    return min(_chain(failure), key=lambda one: _ORDER.index(_cause(one).fault), default=failure)


def _chain(failure: BaseException) -> Iterator[BaseException]:
    """Yield an error of a database, and the errors that caused this error. For a handler's own error, yield nothing
    else."""
    cause: BaseException | None = failure if _is_of_a_database(failure) else None
    while cause is not None:
        yield cause
        cause = cause.__context__


def _is_of_a_database(failure: BaseException) -> bool:
    return _is_a(failure, "SQLAlchemyError", "DatabaseError", "InterfaceError")


def _is_a(failure: BaseException, *names: str) -> bool:
    return any(base.__name__ in names for base in type(failure).__mro__)


def _cause(failure: BaseException) -> _Cause:
    """Return the cause of this error alone."""
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
    # If a driver's connection breaks, or the driver cannot connect, there is no error code from a server.
    if state is not None or number is not None or not _is_a(failure, "OperationalError", "InterfaceError"):
        return _REFUSED
    said = str(_driver_error(failure))
    known = next((cause for pattern, cause in _TEXTS if re.search(pattern, said)), None)
    return known or _without_connection(_driver_error(failure), said)


def _without_connection(failure: Any, said: str) -> _Cause:
    """Return the cause of a failure without a code. The language of the server's answer does not matter.

    A server that refuses a user or a database names this user or database. A server that is starting, or has no free
    connection, names neither.
    """
    if not _NO_CONNECTION.search(said):
        return _LOST
    if (answer := _ANSWERED.search(said)) is None:
        return _UNREACHABLE
    tried = getattr(failure, "pgconn", None)
    names = (getattr(tried, name, b"").decode(errors="replace") for name in ("user", "db"))
    is_named = any(re.search(rf"\W{re.escape(name)}\W", said[answer.end() :]) for name in names if name)
    return _NO_ENTRY if is_named else _NOW_NOT


def codes_of(failure: BaseException) -> tuple[str | None, int | None]:
    """Return the SQLSTATE and MariaDB's number of an error, if the driver provides them."""
    cause = _driver_error(failure)
    first = cause.args[0] if getattr(cause, "args", None) else None
    state = getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)
    if isinstance(first, dict):  # pg8000's
        state = first.get("C")
    number = first if isinstance(first, int) else getattr(cause, "errno", None)
    return state if isinstance(state, str) else None, number if isinstance(number, int) else None


def _driver_error(failure: BaseException) -> Any:
    return getattr(failure, "orig", None) or failure
