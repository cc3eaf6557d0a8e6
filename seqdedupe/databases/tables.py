"""Tables of ours in databases of others: columns that mean the same in all, and connections that notice an end."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from sqlalchemy import Column, Dialect, Engine, LargeBinary, MetaData, String, Table, Text, inspect
from sqlalchemy.dialects import mysql
from sqlalchemy.exc import DBAPIError
from sqlalchemy.types import TypeDecorator, TypeEngine

from seqdedupe.errors import error

T = TypeVar("T")

# -- Connections to PostgreSQL that notice when nobody answers.

CONNECTION: dict[str, Any] = {
    "connect_timeout": 10,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
    "client_encoding": "UTF8",
}
"""What libpq is told, unless a DSN says otherwise: without these a write into a network that swallows all would never
end. Times in seconds, the last one in milliseconds."""


MARIADB = ("mysql", "mariadb")
"""MariaDB and MySQL, as SQLAlchemy names their dialects."""

_UTF8_BYTES = 4
"""Of a character, at most."""

POSTGRESQL_UNSAFE_WRITES = """
SELECT c.oid::regclass::text, CASE c.relkind WHEN 'f' THEN 'a foreign table' ELSE 'an unlogged table' END
FROM pg_locks l JOIN pg_class c ON c.oid = l.relation
WHERE l.pid = pg_backend_pid() AND l.locktype = 'relation' AND l.mode = 'RowExclusiveLock'
AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
AND (c.relkind = 'f' OR c.relkind = 'r' AND c.relpersistence = 'u') ORDER BY 1
"""
"""Asked at the end of a transaction: tables that it has written, and which are not committed together with the others.
A crash of the server empties an unlogged table, and a foreign table commits by itself. The transaction's own locks say
where rows have really landed: in partitions, in tables that inherit, behind views and triggers."""

NO_AUTOCOMMIT = (
    'Let the engine have no isolation_level="AUTOCOMMIT" (create_engine, execution_options), and its driver no '
    "autocommit (connect_args)."
)
"""What to do about a connection that commits each statement."""


class name_type(TypeDecorator[str]):  # noqa: N801 (a type, named as SQLAlchemy names its functions for them)
    """Text that is compared byte by byte. In MariaDB and MySQL it is stored as its UTF-8: otherwise they take `a`, `A`
    and `a ` for the same, the last one also with a binary collation."""

    impl = String
    cache_ok = True

    def __init__(self, length: int = 255) -> None:
        super().__init__(length)
        self.length = length

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        if dialect.name in MARIADB:
            return dialect.type_descriptor(mysql.VARBINARY(_UTF8_BYTES * self.length))
        return dialect.type_descriptor(String(self.length))

    def process_bind_param(self, value: str | None, dialect: Dialect) -> Any:
        return value.encode() if value is not None and dialect.name in MARIADB else value

    def process_result_value(self, value: Any | None, dialect: Dialect) -> str | None:
        return value.decode() if isinstance(value, bytes) else value


def bytes_type() -> TypeEngine[bytes]:
    """Bytes of any length."""
    return _but_for_mariadb(LargeBinary(), mysql.LONGBLOB())


def text_type() -> TypeEngine[str]:
    """Text of any length."""
    return _but_for_mariadb(Text(), mysql.LONGTEXT(charset="utf8mb4"))


def _but_for_mariadb(usual: TypeEngine[T], there: TypeEngine[T]) -> TypeEngine[T]:
    return usual.with_variant(there, *MARIADB)


def table(name: str, metadata: MetaData, *columns: Column[Any]) -> Table:
    """A table with transactions."""
    return Table(name, metadata, *columns, mysql_engine="InnoDB", mariadb_engine="InnoDB")


POSTGRESQL_UNSAFE_TABLES = """
WITH named AS (SELECT to_regclass(name) AS place FROM unnest(CAST({names} AS text[])) AS name)
SELECT DISTINCT c.oid::regclass::text, CASE WHEN c.relkind = 'f' THEN 'a foreign table' WHEN c.relpersistence = 'u'
THEN 'an unlogged table' ELSE 'a temporary table' END
FROM named LEFT JOIN LATERAL pg_partition_tree(place) AS part ON true JOIN pg_class c ON c.oid IN (place, part.relid)
WHERE c.relkind = 'f' OR c.relkind = 'r' AND c.relpersistence <> 'p' ORDER BY 1
"""
"""Asked before anything is written: of tables with these quoted names, `{names}`, and of all their partitions those
that would not be committed with others, or are not there after a crash."""


def cure_of(table: str, kind: str) -> str:
    """What to do about a table that these queries have found, and of which they say this."""
    if kind == "an unlogged table":
        return f"ALTER TABLE {table} SET LOGGED"
    return f"Let the rows go into a table of this database instead of {table}."


def check_outlives_a_crash(found: Any) -> None:
    """Raises INVALID_OUTPUT for a table and what it is, if one of the queries for tables that are not safe has found
    one."""
    if found:
        what = f"the table {found[0]} is {found[1]}: after a crash it would not hold what the other tables hold"
        raise error("INVALID_OUTPUT", what, hint=cure_of(*found))


def make_tables(engine: Engine, metadata: MetaData) -> None:
    """Makes those that are not there, and indexes that they lack: MariaDB commits each statement, so one that failed
    leaves the others. Raises INVALID_OUTPUT if one of that name has not all columns."""
    # Of two processes that make the same at once one fails, and finds it there when it looks again: with each of them.
    _insist(partial(metadata.create_all, engine), sum(1 + len(table.indexes) for table in metadata.sorted_tables))
    found = inspect(engine)
    for wanted in metadata.sorted_tables:
        names = {column["name"] for column in found.get_columns(wanted.name)}
        missing = sorted(set(wanted.columns.keys()) - names)
        if missing:
            raise error(
                "INVALID_OUTPUT",
                f"the table {wanted.name} has no column {', '.join(missing)}",
                hint="It is of another program or version: rename it, or use another database or schema.",
            )
        for index in wanted.indexes:
            _insist(partial(index.create, engine, checkfirst=True), 1)


def _insist(create: Callable[[], None], refusals: int) -> None:
    for left in range(refusals, -1, -1):
        try:
            create()
            return
        except DBAPIError:
            if not left:
                raise
