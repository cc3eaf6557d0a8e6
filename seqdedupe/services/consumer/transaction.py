"""One transaction: what the handler does, and the position that says so."""

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError

from seqdedupe.databases.failures import codes_of
from seqdedupe.errors import error
from seqdedupe.services.consumer.database import refusing_writes
from seqdedupe.services.consumer.ownership import Ownership

_MARK = text("SAVEPOINT seqdedupe_begun")
_CHECK = text("RELEASE SAVEPOINT seqdedupe_begun")

_NO_MARK_STATES = frozenset(("3B001", "25P01"))
_NO_MARK_NUMBER = 1305
_NO_MARK_TEXT = "no such savepoint"
"""How PostgreSQL, MariaDB and SQLite say that the savepoint is gone, and with it the transaction."""


@contextmanager
def step(engine: Engine, ownership: Ownership, position: str, to: str, refused: frozenset[str]) -> Iterator[Connection]:
    """A transaction that moves the position when the block ends, and commits: all of it, or nothing of it.

    Raises Lost if another process was faster, TRANSACTION_ENDED if the block has ended the transaction itself (by
    COMMIT, ROLLBACK, or a statement that commits as DDL does in MariaDB).
    """
    with engine.connect() as connection, connection.begin() as transaction:
        ownership.hold(connection, position)
        connection.execute(_MARK)
        with refusing_writes(connection, refused):
            yield connection
        # A savepoint goes with its transaction: in one that has begun since, it is not there.
        if not transaction.is_active or connection.closed:
            raise _ended()
        try:
            connection.execute(_CHECK)
        except DBAPIError as e:
            if _says_no_mark(e):
                raise _ended() from e
            raise
        if to != position:
            ownership.move(connection, position, to)


def _ended() -> Exception:
    return error("TRANSACTION_ENDED", "the handler has ended the transaction that it was given")


def _says_no_mark(failure: DBAPIError) -> bool:
    state, number = codes_of(failure)
    return state in _NO_MARK_STATES or number == _NO_MARK_NUMBER or _NO_MARK_TEXT in str(failure.orig)
