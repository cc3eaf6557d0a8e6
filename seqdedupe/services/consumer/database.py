"""The consumer's database: what it is told when that cannot be used, and which tables have no transactions."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from sqlalchemy import Connection, Engine, event, text
from sqlalchemy.exc import SQLAlchemyError

from seqdedupe.databases.failures import passes_by_itself, told
from seqdedupe.errors import SeqdedupeError, UnavailableError, error

_WRITES = re.compile(r"\s*(?:insert|update|delete|replace|load|with|call)\b", re.IGNORECASE)


class Away(Exception):
    """The database cannot be used now, or has undone the transaction: what was committed is to be looked up."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(cause)
        made = error(
            "OUTPUT_UNAVAILABLE",
            f"the consumer's database cannot be used now: {told(cause)}",
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
        raise error("INVALID_OUTPUT", f"the consumer's tables cannot be used: {told(e)}", hint=hint) from e


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
