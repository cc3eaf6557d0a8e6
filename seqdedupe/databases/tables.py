"""The project's tables in users' databases: columns with the same meaning in every database, URLs whose errors quote no
password, and connections that detect a lost peer."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from sqlalchemy import Column, Dialect, Engine, LargeBinary, MetaData, String, Table, Text, inspect
from sqlalchemy.dialects import mysql
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.types import TypeDecorator, TypeEngine

from seqdedupe.errors import error

T = TypeVar("T")

# -- URLs.


class UrlError(ValueError):
    """The problem of a URL. The text continues a sentence that begins with "the URL", and quotes no part of the URL."""


def url_of(text: str) -> URL:
    """Return the URL as SQLAlchemy reads it. Raises UrlError."""
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):  # ValueError: of a port that is no number, with the text in its place
        raise UrlError("cannot be read") from None
    check_password_ends(url.password, url.host, url.database)
    return url


def missing_file(path: str | None) -> str | None:
    """Return the error text for a path without a file, because SQLite would create the file. Return None if the file
    exists."""
    return None if os.path.exists(path or "") else f"there is no file {os.path.abspath(path or '')}"


def check_password_ends(password: object, host: object, database: object) -> None:
    """Raise UrlError if a part of the password was parsed as the host or database. Errors would then show this part.

    SQLAlchemy and libpq end the password at the first @.
    """
    if password is not None and "@" in f"{host}{database}":
        raise UrlError("has an @ after its password: write @ in a user's name or password as %40, and / as %2F")


# -- Connections to PostgreSQL that notice when the server does not answer.

CONNECTION: dict[str, Any] = {
    "connect_timeout": 10,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
    "client_encoding": "UTF8",
}
"""Parameters for libpq, unless a DSN says otherwise. Without them, a write into a network that drops all packets would
never end. Times are in seconds, the last one in milliseconds."""


MARIADB = ("mysql", "mariadb")
"""MariaDB and MySQL, as SQLAlchemy names their dialects."""

_UTF8_BYTES = 4
"""The most bytes of a character."""

POSTGRESQL_UNSAFE_WRITES = """
SELECT c.oid::regclass::text, CASE c.relkind WHEN 'f' THEN 'a foreign table' ELSE 'an unlogged table' END
FROM pg_locks l JOIN pg_class c ON c.oid = l.relation
WHERE l.pid = pg_backend_pid() AND l.locktype = 'relation' AND l.mode = 'RowExclusiveLock'
AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
AND (c.relkind = 'f' OR c.relkind = 'r' AND c.relpersistence = 'u') ORDER BY 1
"""
"""A query for the end of a transaction. It finds the tables that the transaction has written to, and that are not
committed together with the other tables. A crash of the server empties an unlogged table, and a foreign table commits
alone. The transaction's own locks show where rows were really written: in partitions, in tables that inherit, behind
views and triggers."""

NO_AUTOCOMMIT = (
    'Let the engine have no isolation_level="AUTOCOMMIT" (create_engine, execution_options), and its driver no '
    "autocommit (connect_args)."
)
"""The hint for a connection that commits each statement."""


class name_type(TypeDecorator[str]):  # noqa: N801 (a type, named as SQLAlchemy names its functions for them)
    """Text that is compared byte by byte. In MariaDB and MySQL the text is stored as UTF-8 bytes. Otherwise these
    databases would treat `a`, `A` and `a ` as equal. Even with a binary collation, `a` and `a ` would be equal."""

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
    """Return a type for bytes of any length."""
    return _but_for_mariadb(LargeBinary(), mysql.LONGBLOB())


def text_type() -> TypeEngine[str]:
    """Return a type for text of any length."""
    return _but_for_mariadb(Text(), mysql.LONGTEXT(charset="utf8mb4"))


def _but_for_mariadb(usual: TypeEngine[T], there: TypeEngine[T]) -> TypeEngine[T]:
    return usual.with_variant(there, *MARIADB)


def table(name: str, metadata: MetaData, *columns: Column[Any]) -> Table:
    """Return a table with transactions."""
    return Table(name, metadata, *columns, mysql_engine="InnoDB", mariadb_engine="InnoDB")


POSTGRESQL_UNSAFE_TABLES = """
WITH named AS (SELECT to_regclass(name) AS place FROM unnest(CAST({names} AS text[])) AS name)
SELECT DISTINCT c.oid::regclass::text, CASE WHEN c.relkind = 'f' THEN 'a foreign table' WHEN c.relpersistence = 'u'
THEN 'an unlogged table' ELSE 'a temporary table' END
FROM named LEFT JOIN LATERAL pg_partition_tree(place) AS part ON true JOIN pg_class c ON c.oid IN (place, part.relid)
WHERE c.relkind = 'f' OR c.relkind = 'r' AND c.relpersistence <> 'p' ORDER BY 1
"""
"""A query before the first write. It examines the tables with the quoted names `{names}`, and all their partitions. It
finds the tables that would not be committed together with other tables, or would be lost in a crash."""


def cure_of(table: str, kind: str) -> str:
    """Return the hint for an unsafe table that these queries have found. The hint depends on the kind of table that the
    query reports."""
    if kind == "an unlogged table":
        return f"ALTER TABLE {table} SET LOGGED"
    return f"Let the rows go into a table of this database instead of {table}."


def check_outlives_a_crash(found: Any) -> None:
    """Raise INVALID_OUTPUT if one of the queries finds an unsafe table, which would lose data in a crash. The error
    names the table and its kind."""
    if found:
        what = f"the table {found[0]} is {found[1]}: after a crash it would not hold what the other tables hold"
        raise error("INVALID_OUTPUT", what, hint=cure_of(*found))


def make_tables(engine: Engine, metadata: MetaData) -> None:
    """Make missing tables and missing indexes. MariaDB commits each statement, so an earlier failed run may have made
    only some of them.

    Raises INVALID_OUTPUT if an existing table lacks columns."""
    # If two processes make the same table or index at the same time, one process fails. That process looks again, and
    # finds the table or index. This can happen for each table and index.
    _insist(partial(metadata.create_all, engine), sum(1 + len(table.indexes) for table in metadata.sorted_tables))
    found = inspect(engine)
    for wanted in metadata.sorted_tables:
        names = {column["name"] for column in found.get_columns(wanted.name)}
        missing = sorted(set(wanted.columns.keys()) - names)
        if missing:
            raise error(
                "INVALID_OUTPUT",
                f"the table {wanted.name} has no column {', '.join(missing)}",
                hint="The table belongs to another program or version. Rename it, or use another database or schema.",
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
