"""One transaction: what the handler does, and the position that says so."""

from collections.abc import Callable
from contextlib import ExitStack

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError

from seqdedupe.databases.failures import codes_of
from seqdedupe.databases.tables import MARIADB, POSTGRESQL_UNSAFE_WRITES
from seqdedupe.errors import error
from seqdedupe.services.consumer.database import check_mariadb_writes, not_transactional, reaching, refusing_writes
from seqdedupe.services.consumer.ownership import Ownership

_MARK = text("SAVEPOINT seqdedupe_begun")
_CHECK = text("RELEASE SAVEPOINT seqdedupe_begun")

_NO_MARK_STATES = frozenset(("3B001", "25P01"))
_NO_MARK_NUMBER = 1305
_NO_MARK_TEXT = "no such savepoint"
"""How PostgreSQL, MariaDB and SQLite say that the savepoint is gone, and with it the transaction."""


def carry_out(
    engine: Engine, ownership: Ownership, position: str, refused: frozenset[str], do: Callable[[Connection], str]
) -> str:
    """A transaction that does it, moves the position to where `do` says, and commits: all of it, or nothing of it.
    Returns the new position.

    Raises Lost if another process was faster, Away if the database fails before `do` has its turn, TRANSACTION_ENDED if
    it has ended the transaction itself (by COMMIT, ROLLBACK, or a statement that commits as DDL does in MariaDB),
    NOT_TRANSACTIONAL.
    """
    with ExitStack() as stack:
        with reaching():
            connection = stack.enter_context(engine.connect())
            transaction = stack.enter_context(connection.begin())
            ownership.hold(connection, position)
            connection.execute(_MARK)
        with refusing_writes(connection, refused):
            to = do(connection)
        # A savepoint goes with its transaction: in one that has begun since, it is not there.
        if not connection.invalidated and (not transaction.is_active or connection.closed):
            raise _ended()
        try:
            connection.execute(_CHECK)
        except DBAPIError as e:
            if _says_no_mark(e):
                raise _ended() from e
            raise
        if connection.dialect.name == "postgresql":
            for table, kind in connection.exec_driver_sql(POSTGRESQL_UNSAFE_WRITES):
                raise not_transactional(table, kind)
        if connection.dialect.name in MARIADB:
            check_mariadb_writes(connection)
        if to != position:
            ownership.move(connection, position, to)
    return to


def check_deferred(connection: Connection) -> None:
    """Raises now what a deferred constraint of PostgreSQL would raise at the COMMIT. It stays deferred: the savepoint
    takes back that it was looked at, and what its triggers have done."""
    if connection.dialect.name == "postgresql":
        with connection.begin_nested() as look:
            connection.exec_driver_sql("SET CONSTRAINTS ALL IMMEDIATE")
            look.rollback()


def _ended() -> Exception:
    return error("TRANSACTION_ENDED", "the handler has ended the transaction that it was given")


def _says_no_mark(failure: DBAPIError) -> bool:
    state, number = codes_of(failure)
    return state in _NO_MARK_STATES or number == _NO_MARK_NUMBER or _NO_MARK_TEXT in str(failure.orig)
