"""The common part of all stores in an SQL database.

`SqlStore` implements every call. Begin with its `write`. Subclasses are the dialects, which open transactions, create
tables, insert rows and list columns:

- `SqliteStore`, in this module, for SQLite.
- `postgresql`, which writes rows with binary COPY.
- `general`, for MariaDB, MySQL and all other databases that SQLAlchemy supports.
"""

import base64
import datetime
import decimal
import json
import sqlite3
import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from operator import length_hint
from pathlib import Path
from typing import Any, Generic, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from seqdedupe.databases.failures import Fault, fault_of, told
from seqdedupe.errors import ConfigurationError, SeqdedupeError, error
from seqdedupe.message_id import Position
from seqdedupe_spark.stores.contract import (
    FORMAT_VERSION,
    Advance,
    Beside,
    Binding,
    Column,
    Kind,
    OutputStore,
    Stored,
    Watermarks,
    check_format,
    check_replacement,
    check_schema,
    check_table,
    converted,
    in_batch,
    kind_of,
    one_line,
)

C = TypeVar("C")

Values = Mapping[str, object] | list[dict[str, object]]

POSITIONS, WATERMARKS, JOBS = "seqdedupe_positions", "seqdedupe_watermarks", "seqdedupe_jobs"

OWN_TABLES: Mapping[str, tuple[int, Mapping[str, str]]] = {
    POSITIONS: (
        2,
        {
            "job": "name",
            "topic": "name",
            "epoch": "bigint",
            "incarnation": "bigint",
            "message_index": "bigint",
            "position": "position",
        },
    ),
    WATERMARKS: (3, {"job": "name", "topic": "name", "producer_name": "name", "sequence_id": "bigint"}),
    JOBS: (1, {"job": "name", "format_version": "integer", "output_table": "name", "deduplicate": "boolean"}),
}
"""The tables for a job's positions. Each has the number of its key columns, and its columns with their kinds. The key
columns are first, and no column may be null. The dialect maps kinds to types."""

_BIND = f"INSERT INTO {JOBS} (job, format_version, output_table, deduplicate) VALUES (:job, :version, :table, :drops)"
_BOUND = f"SELECT format_version, output_table, deduplicate FROM {JOBS} WHERE job = :job"
_POSITIONS_OF = f"SELECT topic, epoch, position FROM {POSITIONS} WHERE job = :job"
_WATERMARKS_OF = (
    # One statement reads a consistent state. Two statements in one transaction may not.
    f"SELECT epoch, position, NULL, NULL FROM {POSITIONS} WHERE job = :job AND topic = :topic UNION ALL "
    f"SELECT NULL, NULL, producer_name, sequence_id FROM {WATERMARKS} WHERE job = :job AND topic = :topic"
)
_CELLS = ("epoch", "incarnation", "message_index", "position")
_STORE = (
    f"INSERT INTO {POSITIONS} (job, topic, {', '.join(_CELLS)}) "
    f"VALUES (:job, :topic, {', '.join(f':{one}' for one in _CELLS)})"
)
_MOVE = (
    f"UPDATE {POSITIONS} SET {', '.join(f'{one} = :{one}' for one in _CELLS)} "
    f"WHERE job = :job AND topic = :topic AND {' AND '.join(f'{one} = :old_{one}' for one in _CELLS)}"
)
_RAISE = (
    f"INSERT INTO {WATERMARKS} (job, topic, producer_name, sequence_id) VALUES (:job, :topic, :producer, :sequence_id) "
    "ON CONFLICT (job, topic, producer_name) DO UPDATE SET sequence_id = excluded.sequence_id"
)
_FORGET = f"DELETE FROM {WATERMARKS} WHERE job = :job AND topic = :topic"


class SqlStore(OutputStore, Generic[C]):
    """Rows and positions in one SQL database. `C` is the type of the dialect's connection.

    By default, `write` holds all rows of a transaction in memory. The transaction begins only after the last row has
    been read, so it is short.
    """

    database = "the database"
    """The name of the database in an error about refused rows."""
    raises: tuple[type[Exception], ...] = ()
    """The exceptions that the driver raises."""

    def __init__(self, place: str, format_place: str | None = None) -> None:
        """Set the names for error messages: `place` in "… cannot be used", and `format_place` for positions of another
        format."""
        self._place = place
        self._format_place = format_place or place

    # -- The methods that a dialect implements.

    @abstractmethod
    def _reading(self) -> AbstractContextManager[C]:
        """Return a connection for one statement. Exceptions of the driver are translated as in `_errors`."""

    @abstractmethod
    def _transaction(self) -> AbstractContextManager[C]:
        """Begin a transaction for writing. When the block ends, either all changes are durable or none."""

    @abstractmethod
    def _making(self, table: str | None = None, schema: pa.Schema | None = None) -> AbstractContextManager[C]:
        """Create our own tables and the given table if they are missing, and begin a transaction."""

    @abstractmethod
    def _execute(self, connection: C, statement: str, values: Values) -> Any:
        """Run a statement with the values of its `:name` parameters. If `values` is a list, run the statement once per
        item. The result has `rowcount` and, for a query, `fetchall`."""

    @abstractmethod
    def _columns_of(self, connection: C, table: str) -> dict[str, Column]:
        """Return the columns of a table; an empty dictionary if the table is missing."""

    @abstractmethod
    def _fits(self, field: pa.Field, there: Any) -> bool:
        """Whether a column of this type accepts the field's values and returns them unchanged."""

    def _check_kept(self, connection: C, tables: Iterable[str]) -> None:
        """Raise INVALID_OUTPUT if rows and positions would not be committed together, or would not survive a crash
        together."""

    def _look_first(self, connection: C, job: str, tables: Sequence[str], advances: Sequence[Advance]) -> None:
        """Check the tables and positions in the transaction of a write, before its rows are inserted."""

    def _look_last(self, connection: C) -> None:
        """Check in the transaction of a write, before it commits."""

    @abstractmethod
    def _insert(self, connection: C, table: str, batch: pa.RecordBatch) -> None:
        """Insert all rows. Raises INVALID_OUTPUT with the number of the row that the database refuses."""

    def _raise(self, connection: C, job: str, topic: str, watermarks: Watermarks) -> None:
        """Replace the stored watermarks of these producers."""
        rows = [
            {"job": job, "topic": topic, "producer": name, "sequence_id": sequence_id}
            for name, sequence_id in watermarks.items()
        ]
        if rows:
            self._execute(connection, _RAISE, rows)

    # -- The methods that all dialects share.

    def bind(self, job: str, binding: Binding) -> Binding:
        values = {"job": job, "version": FORMAT_VERSION, "table": binding.table, "drops": binding.deduplicate}
        with self._making() as connection:
            self._add(connection, _BIND, values)
            ((version, table, deduplicate),) = self._rows(connection, _BOUND, job=job)
        check_format(version, self._format_place)
        return Binding(table, bool(deduplicate))

    def has_table(self, table: str) -> bool:
        with self._reading() as connection:
            return bool(self._columns_of(connection, table))

    def prepare(self, table: str, schema: pa.Schema) -> None:
        split_name(table)
        check_schema(schema)
        with self._making(table, schema) as connection:
            self._check_fits(connection, table, [schema])
            self._check_kept(connection, [table])

    def positions(self, job: str) -> dict[str, Stored]:
        with self._reading() as connection:
            rows = self._rows(connection, _POSITIONS_OF, job=job)
        return {topic: from_cells(*rest) for topic, *rest in rows}

    def watermarks(self, job: str, topic: str) -> tuple[Stored | None, dict[str, int]]:
        with self._reading() as connection:
            rows = self._rows(connection, _WATERMARKS_OF, job=job, topic=topic)
        stored = next((from_cells(*row[:2]) for row in rows if row[0] is not None), None)
        return stored, {name: sequence_id for _, _, name, sequence_id in rows if name is not None}

    def replace(self, job: str, topic: str, expected: Stored | None, new: Stored) -> bool:
        check_replacement(topic, expected, new)
        with self._transaction() as connection:
            is_replaced = self._move(connection, job, topic, expected, new)
            if is_replaced:
                self._execute(connection, _FORGET, {"job": job, "topic": topic})
        return is_replaced

    def write(
        self,
        job: str,
        table: str,
        batches: Iterator[pa.RecordBatch],
        advances: Sequence[Advance],
        beside: Beside | None = None,
    ) -> int:
        """Write in four steps:

        1. Read all rows, then the watermarks and the rows of `beside`.

        2. Begin the transaction and check the tables, which then do not change until the transaction ends.

        3. Insert the rows.

        4. Compare and move each position, and raise the watermarks. All writers do this last, and in the same order of
           topics.
        """
        # 1.
        collected = list(batches)
        changed = [advance.changed_watermarks() for advance in advances]
        others = beside and beside.rows()
        written = {table: collected} if any(map(len, collected)) else {}
        if beside and others:
            written[beside.table] = [others]
        with self._transaction() as connection:
            # 2.
            self._look_first(connection, job, list(written), advances)
            for name, some in written.items():
                self._check_fits(connection, name, {one.schema for one in some if len(one)})
            # 3.
            for number, batch in enumerate(collected):
                if len(batch):
                    with in_batch(number):
                        self._insert(connection, table, batch)
            if beside and others:
                self._insert(connection, beside.table, others)
            # 4. The same order for all writers, so that two writers never wait for each other.
            for advance, watermarks in sorted(zip(advances, changed, strict=True), key=lambda one: one[0].range.topic):
                self._advance(connection, job, advance)
                self._raise(connection, job, advance.range.topic, watermarks)
            self._look_last(connection)
        return sum(map(len, collected))

    def _advance(self, connection: C, job: str, advance: Advance) -> None:
        """Move a position, which is locked until the transaction ends. Raises POSITION_CHANGED."""
        start, end = Stored(advance.range.start, advance.epoch), Stored(advance.range.end, advance.epoch)
        if not self._move(connection, job, advance.range.topic, start, end):
            raise error("POSITION_CHANGED", f"the position of job {job!r} is no longer the start of {advance.range}")

    def _move(self, connection: C, job: str, topic: str, expected: Stored | None, new: Stored) -> bool:
        """Set a position if it has the expected state. Return whether it had that state."""
        values = {"job": job, "topic": topic, **cells(new)}
        if expected is None:
            return self._add(connection, _STORE, values)
        old = {f"old_{name}": cell for name, cell in cells(expected).items()}
        return bool(self._execute(connection, _MOVE, values | old).rowcount == 1)

    def _add(self, connection: C, statement: str, values: Mapping[str, object]) -> bool:
        """Insert a row unless a row with its key exists. Return whether the row was inserted."""
        return bool(self._execute(connection, statement + " ON CONFLICT DO NOTHING", values).rowcount == 1)

    def _rows(self, connection: C, statement: str, **values: object) -> list[Any]:
        found: list[Any] = self._execute(connection, statement, values).fetchall()
        return found

    def _check_fits(self, connection: C, table: str, schemas: Iterable[pa.Schema]) -> None:
        """Raise INVALID_OUTPUT if the table does not accept rows of these schemas."""
        columns = self._columns_of(connection, table)
        for schema in schemas:
            check_table(table, schema, columns, self._fits)

    def _make_own(self, connection: C, types: Mapping[str, str], suffixes: Mapping[str, str]) -> None:
        """Create our own tables if they are missing."""
        self._check_format_of_positions(connection)
        for table, (key, columns) in OWN_TABLES.items():
            declared = "".join(f"{name} {types[kind]} NOT NULL, " for name, kind in columns.items())
            key_columns = ", ".join(list(columns)[:key])
            statement = f"CREATE TABLE IF NOT EXISTS {table} ({declared}PRIMARY KEY ({key_columns}))"
            self._execute(connection, statement + suffixes.get(table, ""), {})

    def _check_format_of_positions(self, connection: C) -> None:
        columns = self._columns_of(connection, POSITIONS)
        if columns and "position" not in columns:
            check_format(1, self._format_place)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except self.raises as e:
            raise self._error(e) from e

    def _error(self, cause: Exception) -> SeqdedupeError:
        if fault_of(cause) is Fault.MESSAGE:
            return error("INVALID_OUTPUT", f"{self.database} refuses: {told(cause)}")
        return error("OUTPUT_UNAVAILABLE", f"{self._place} cannot be used: {told(cause)}")


# -- The conversion of names and values for SQL.


def cells(stored: Stored) -> dict[str, object]:
    """Return the cells of a row in the table of positions: epoch, incarnation, index and the whole position as text."""
    position = stored.position
    return dict(zip(_CELLS, (stored.epoch, position.incarnation, position.index, str(position)), strict=True))


def from_cells(epoch: int, position: str) -> Stored:
    """Return the stored state. The cells for epoch and position contain the complete state."""
    return Stored(Position.parse(position), epoch)


def split_name(table: str) -> list[str]:
    """Return the parts of `name` or `schema.name`. Raises INVALID_OUTPUT."""
    parts = table.split(".")
    if len(parts) > 2 or not all(parts) or "\0" in table:
        raise error("INVALID_OUTPUT", f"the table's name {table[:80]!r} is not name or schema.name")
    return parts


def quoted(*parts: str) -> str:
    """Return a name with these parts, quoted for SQL."""
    return ".".join('"' + part.replace('"', '""') + '"' for part in parts)


def json_texts(column: pa.Array) -> list[str | None]:
    """Return maps, lists and structs as JSON. Maps are converted to objects, bytes to base64, times to ISO 8601, and
    decimals to text.

    Raises KeyError if a map has a key twice, and TypeError or ValueError for values that JSON does not have, such as
    NaN.
    """
    values = column.to_pylist(maps_as_pydicts="strict")
    return [
        None if value is None else json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain)
        for value in values
    ]


def _plain(value: object) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return str(value)
    raise TypeError(f"there is no JSON for {type(value).__name__}")


# -- SQLite: the smallest dialect. It needs no server, and has one writer at a time.

BUSY_TIMEOUT_SECONDS = 60.0
"""The longest wait for another writer. Transactions are short, because they do not read input."""

_RETRY_SECONDS = 0.01

_PRIMARY = 0xFF
"""The bits of SQLite's error code that hold the primary result code. The other bits hold details."""

_DECLARED = dict.fromkeys(Kind, "TEXT") | {
    Kind.BOOLEAN: "INTEGER",
    Kind.INTEGER: "INTEGER",
    Kind.FLOAT: "REAL",
    Kind.BINARY: "BLOB",
}

_OWN_TYPES = dict.fromkeys(("name", "position"), "TEXT") | dict.fromkeys(("bigint", "integer", "boolean"), "INTEGER")

_AS_TEXT = frozenset({Kind.DECIMAL, Kind.TIMESTAMP, Kind.LOCAL_TIMESTAMP, Kind.DATE})

_EXACT_DIGITS = 15
"""A decimal with at most this number of digits is stored unchanged in a column of numbers."""


class SqliteStore(SqlStore[sqlite3.Connection]):
    """Rows and positions in one SQLite file. A missing file is created, unless `create` is false. A missing folder is
    not created.

    Values are stored as follows:

    - Booleans: 0 and 1.
    - Times: ISO 8601; UTC with a Z if the type has a zone.
    - Decimals: text.
    - Maps, lists and structs: JSON.
    - NaN, which SQLite does not have: null.

    `write` holds all rows of a transaction in memory. Raises INVALID_OPTION if the folder is missing, or if the file is
    missing and `create` is false; OUTPUT_UNAVAILABLE if the file cannot be opened.
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
        # Unlike other statements, this one does not wait for another connection that changes the mode at the same time.
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
            # SQLite ignores case in the names of columns.
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
        # No other writer can have changed the position since `_look_first`, so it is not compared again.
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
            # The number of values not consumed yet shows which row was refused.
            if (left := length_hint(taken)) < len(batch):
                e.numbers["row"] = str(len(batch) - left - 1)
            raise

    def _error(self, cause: Exception) -> SeqdedupeError:
        # The driver raises InterfaceError for a value of an unsupported type. The connection is not lost.
        if isinstance(cause, sqlite3.InterfaceError):
            return error("INVALID_OUTPUT", f"{self.database} refuses: {one_line(cause)}")
        return super()._error(cause)

    def _fits(self, field: pa.Field, there: Any) -> bool:
        kind, affinity = kind_of(field), _affinity(there)
        if kind is Kind.DECIMAL and affinity == "NUMERIC":
            return bool(field.type.precision <= _EXACT_DIGITS)
        # A text that is not a number stays text in a column with NUMERIC affinity. Columns declared DATETIME, DATE or
        # JSON have this affinity.
        is_no_number = kind in (Kind.TIMESTAMP, Kind.LOCAL_TIMESTAMP, Kind.DATE, Kind.JSON, Kind.BINARY)
        takes_numbers = kind in (Kind.BOOLEAN, Kind.INTEGER, Kind.FLOAT)
        return affinity in {"BLOB", _DECLARED[kind]} or (affinity == "NUMERIC" and (is_no_number or takes_numbers))


def _affinity(declared: str) -> str:
    """Return the affinity of a declared type, by the rules of
    https://sqlite.org/datatype3.html#determination_of_column_affinity."""
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
        # Cast through numbers, which are in UTC. With a time zone, Arrow's cast to text is fifty times as slow.
        column = column.cast(pa.int64()).cast(pa.timestamp(column.type.unit))
    texts = column.cast(pa.string())
    # If a year does not have four digits, Arrow returns a remark in angle brackets.
    if pc.any(pc.starts_with(texts, "<")).as_py():
        raise ValueError("a time outside the years 0 to 9999")
    return pc.binary_join_element_wise(texts, "Z", "") if kind is Kind.TIMESTAMP else texts
