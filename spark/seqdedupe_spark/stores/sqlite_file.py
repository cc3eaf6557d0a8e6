"""A SQLite file: the store that needs no server. One writer at a time."""

import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import length_hint
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from seqdedupe.errors import ConfigurationError, SeqdedupeError, error
from seqdedupe_spark.stores.contract import Advance, Stored
from seqdedupe_spark.stores.kinds import Column, Kind, check_table, converted, kind_of, one_line
from seqdedupe_spark.stores.sql import (
    POSITIONS,
    WATERMARKS,
    SqlStore,
    Values,
    cells,
    from_cells,
    json_texts,
    quoted,
    split_name,
)

BUSY_TIMEOUT_SECONDS = 60.0
"""How long to wait for another writer. A transaction reads no input, so each is short."""

_RETRY_SECONDS = 0.01

_PRIMARY = 0xFF
"""The bits of an error code that say what went wrong; the others say where."""

_DECLARED = dict.fromkeys(Kind, "TEXT") | {
    Kind.BOOLEAN: "INTEGER",
    Kind.INTEGER: "INTEGER",
    Kind.FLOAT: "REAL",
    Kind.BINARY: "BLOB",
}

_OWN_TYPES = dict.fromkeys(("name", "position"), "TEXT") | dict.fromkeys(("bigint", "integer", "boolean"), "INTEGER")

_AS_TEXT = frozenset({Kind.DECIMAL, Kind.TIMESTAMP, Kind.LOCAL_TIMESTAMP, Kind.DATE})

_EXACT_DIGITS = 15
"""Up to so many digits a decimal in a column of numbers stays what it was."""


class SqliteStore(SqlStore[sqlite3.Connection]):
    """Rows and positions in one SQLite file, which is made if it is missing, unless `create` is off; its folder is not.

    Booleans are stored as 0 and 1, times in ISO 8601 (UTC with a Z where the type has a zone), decimals as text, maps,
    lists and structs as JSON; NaN, which SQLite does not know, as null. `write` holds all rows of a transaction in
    memory. Raises INVALID_OPTION if the folder, or the file that is not to be made, is not there, OUTPUT_UNAVAILABLE
    if the file cannot be opened.
    """

    is_local = True
    database = "SQLite"
    raises = (sqlite3.Error, OverflowError)

    def __init__(
        self, path: str | Path, *, create: bool = True, busy_timeout_seconds: float = BUSY_TIMEOUT_SECONDS
    ) -> None:
        super().__init__(f"the SQLite file {path}", str(path))
        if not Path(path).parent.is_dir():
            raise error("INVALID_OPTION", f"store: there is no folder {Path(path).parent} for the SQLite file")
        if not create and not Path(path).exists():
            raise error("INVALID_OPTION", f"store: there is no SQLite file {path}")
        uri = f"{Path(path).absolute().as_uri()}?mode={'rwc' if create else 'rw'}"
        with self._errors():
            self._connection = sqlite3.connect(uri, busy_timeout_seconds, isolation_level=None, uri=True)
            try:
                self._use_wal(time.monotonic() + busy_timeout_seconds)
                self._connection.execute("PRAGMA synchronous=FULL")
            except BaseException:
                self._connection.close()
                raise

    def _use_wal(self, deadline: float) -> None:
        # This alone does not wait for others that do it at the same time.
        while True:
            try:
                self._connection.execute("PRAGMA journal_mode=WAL")
                return
            except sqlite3.OperationalError as e:
                if e.sqlite_errorcode & _PRIMARY != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
            time.sleep(_RETRY_SECONDS)

    def close(self) -> None:
        self._connection.close()

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._errors():
            yield self._connection

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._errors():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            finally:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")

    @contextmanager
    def _making(self, table: str | None = None, schema: pa.Schema | None = None) -> Iterator[sqlite3.Connection]:
        with self._transaction() as connection:
            self._make_own(connection, _OWN_TYPES, {WATERMARKS: " WITHOUT ROWID"})
            if table is not None:
                declared = ", ".join(f"{quoted(one.name)} {_DECLARED[kind_of(one)]}" for one in schema or ())
                connection.execute(f"CREATE TABLE IF NOT EXISTS {quoted(*split_name(table))} ({declared})")
            yield connection

    def _execute(self, connection: sqlite3.Connection, statement: str, values: Values) -> sqlite3.Cursor:
        if isinstance(values, list):
            return connection.executemany(statement, values)
        return connection.execute(statement, values)

    def _columns_of(self, connection: sqlite3.Connection, table: str) -> dict[str, Column]:
        *schema, name = split_name(table)
        place = (name, schema[0] if schema else "main")
        rows = connection.execute(
            'SELECT name, type, "notnull" AND dflt_value IS NULL FROM pragma_table_info(?, ?)',
            place,
        )
        return {column: Column(declared, bool(required)) for column, declared, required in rows}

    def _check_fits(self, connection: sqlite3.Connection, table: str, schemas: Iterable[pa.Schema]) -> None:
        columns = self._columns_of(connection, table)
        for schema in schemas:
            # Upper and lower case are the same in names of columns.
            names = {name.lower(): name for name in schema.names}
            there = {names.get(name.lower(), name): column for name, column in columns.items()}
            check_table(table, schema, there, self._fits)

    def _look_first(
        self, connection: sqlite3.Connection, job: str, tables: Sequence[str], advances: Sequence[Advance]
    ) -> None:
        for advance in advances:
            self._check(job, advance)

    def _check(self, job: str, advance: Advance) -> None:
        advance.check(job, self._stored(job, advance.range.topic))

    def _stored(self, job: str, topic: str) -> Stored | None:
        wanted = f"SELECT epoch, position FROM {POSITIONS} WHERE job = ? AND topic = ?"
        row = self._connection.execute(wanted, (job, topic)).fetchone()
        return row and from_cells(*row)

    def _advance(self, connection: sqlite3.Connection, job: str, advance: Advance) -> None:
        # Nobody else writes since it was looked at.
        values = (job, advance.range.topic, *cells(Stored(advance.range.end, advance.epoch)).values())
        connection.execute(f"INSERT OR REPLACE INTO {POSITIONS} VALUES (?, ?, ?, ?, ?, ?)", values)

    def _insert(self, connection: sqlite3.Connection, table: str, batch: pa.RecordBatch) -> None:
        names, places = ", ".join(map(quoted, batch.schema.names)), ", ".join("?" * batch.num_columns)
        columns = [
            converted(field.name, partial(_values, kind_of(field)), column)
            for field, column in zip(batch.schema, batch.columns, strict=True)
        ]
        taken = iter(columns[0])
        try:
            with self._errors():
                connection.executemany(
                    f"INSERT INTO {quoted(*split_name(table))} ({names}) VALUES ({places})",
                    zip(taken, *columns[1:], strict=True),
                )
        except ConfigurationError as e:
            # What is left of a column's values says how far it came.
            if (left := length_hint(taken)) < len(batch):
                e.numbers["row"] = str(len(batch) - left - 1)
            raise

    def _error(self, cause: Exception) -> SeqdedupeError:
        # Of a value that it has no type for, an error of the driver's own: no connection was lost.
        if isinstance(cause, sqlite3.InterfaceError):
            return error("INVALID_OUTPUT", f"{self.database} refuses: {one_line(cause)}")
        return super()._error(cause)

    def _fits(self, field: pa.Field, there: Any) -> bool:
        kind, affinity = kind_of(field), _affinity(there)
        if kind is Kind.DECIMAL and affinity == "NUMERIC":
            return bool(field.type.precision <= _EXACT_DIGITS)
        # Text that is no number stays text in a column of numbers: DATETIME, DATE and JSON are declared so.
        is_no_number = kind in (Kind.TIMESTAMP, Kind.LOCAL_TIMESTAMP, Kind.DATE, Kind.JSON, Kind.BINARY)
        takes_numbers = kind in (Kind.BOOLEAN, Kind.INTEGER, Kind.FLOAT)
        return affinity in {"BLOB", _DECLARED[kind]} or (affinity == "NUMERIC" and (is_no_number or takes_numbers))


def _affinity(declared: str) -> str:
    """What a column makes of a value, by the rules of https://sqlite.org/datatype3.html#determination_of_column_affinity."""
    declared = declared.upper()
    for words, affinity in (
        (("INT",), "INTEGER"),
        (("CHAR", "CLOB", "TEXT"), "TEXT"),
        (("BLOB",), "BLOB"),
        (("REAL", "FLOA", "DOUB"), "REAL"),
    ):
        if any(word in declared for word in words):
            return affinity
    return "NUMERIC" if declared else "BLOB"


def _values(kind: Kind, column: pa.Array) -> list[object]:
    if kind is Kind.JSON:
        return list(json_texts(column))
    return list((_texts(column, kind) if kind in _AS_TEXT else column).to_pylist())


def _texts(column: pa.Array, kind: Kind) -> pa.Array:
    if kind is Kind.TIMESTAMP:
        # By way of numbers, which are in UTC: Arrow is fifty times as slow with a time zone to think of.
        column = column.cast(pa.int64()).cast(pa.timestamp(column.type.unit))
    texts = column.cast(pa.string())
    # For years that ISO 8601 has no four digits for, Arrow prints a remark in angle brackets.
    if pc.any(pc.starts_with(texts, "<")).as_py():
        raise ValueError("a time outside the years 0 to 9999")
    return pc.binary_join_element_wise(texts, "Z", "") if kind is Kind.TIMESTAMP else texts
