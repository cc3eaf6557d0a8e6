"""A SQLite file: the store that needs no server. One writer at a time."""

import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import length_hint
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from seqdedupe.databases.failures import Fault, fault_of, told
from seqdedupe.errors import ConfigurationError, error
from seqdedupe_spark.stores.contract import (
    FORMAT_VERSION,
    Advance,
    Beside,
    Binding,
    OutputStore,
    Stored,
    check_format,
    check_replacement,
)
from seqdedupe_spark.stores.kinds import (
    BAD_VALUES,
    Column,
    Kind,
    bad_value,
    check_schema,
    check_table,
    first_bad,
    from_cells,
    in_batch,
    json_texts,
    kind_of,
    one_line,
    quoted,
    split_name,
    to_cells,
)

BUSY_TIMEOUT_SECONDS = 60.0
"""How long to wait for another writer. A transaction reads no input, so each is short."""

_RETRY_SECONDS = 0.01

_PRIMARY = 0xFF
"""The bits of an error code that say what went wrong; the others say where."""

_OWN_TABLES = (
    "CREATE TABLE IF NOT EXISTS seqdedupe_positions (job TEXT NOT NULL, topic TEXT NOT NULL, epoch INTEGER NOT NULL, "
    "incarnation INTEGER NOT NULL, message_index INTEGER NOT NULL, position TEXT NOT NULL, PRIMARY KEY (job, topic))",
    "CREATE TABLE IF NOT EXISTS seqdedupe_watermarks (job TEXT NOT NULL, topic TEXT NOT NULL, "
    "producer_name TEXT NOT NULL, sequence_id INTEGER NOT NULL, PRIMARY KEY (job, topic, producer_name)) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS seqdedupe_jobs (job TEXT PRIMARY KEY NOT NULL, format_version INTEGER NOT NULL, "
    "output_table TEXT NOT NULL, deduplicate INTEGER NOT NULL)",
)

_DECLARED = {
    Kind.NULL: "TEXT",
    Kind.BOOLEAN: "INTEGER",
    Kind.INTEGER: "INTEGER",
    Kind.FLOAT: "REAL",
    Kind.DECIMAL: "TEXT",
    Kind.TEXT: "TEXT",
    Kind.BINARY: "BLOB",
    Kind.TIMESTAMP: "TEXT",
    Kind.LOCAL_TIMESTAMP: "TEXT",
    Kind.DATE: "TEXT",
    Kind.JSON: "TEXT",
}

_AS_TEXT = frozenset({Kind.DECIMAL, Kind.TIMESTAMP, Kind.LOCAL_TIMESTAMP, Kind.DATE})

_EXACT_DIGITS = 15
"""Up to so many digits a decimal in a column of numbers stays what it was."""


class SqliteStore(OutputStore):
    """Rows and positions in one SQLite file, which is made if it is missing, unless `create` is off; its folder is not.

    Booleans are stored as 0 and 1, times in ISO 8601 (UTC with a Z where the type has a zone), decimals as text, maps,
    lists and structs as JSON; NaN, which SQLite does not know, as null. `write` holds all rows of a transaction in
    memory. Raises INVALID_OPTION if the folder, or the file that is not to be made, is not there, OUTPUT_UNAVAILABLE
    if the file cannot be opened.
    """

    is_local = True

    def __init__(
        self, path: str | Path, *, create: bool = True, busy_timeout_seconds: float = BUSY_TIMEOUT_SECONDS
    ) -> None:
        self._path = path
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

    def bind(self, job: str, binding: Binding) -> Binding:
        with self._transaction():
            self._make_own_tables()
            self._connection.execute(
                "INSERT OR IGNORE INTO seqdedupe_jobs VALUES (?, ?, ?, ?)", (job, FORMAT_VERSION, *binding)
            )
            version, table, deduplicate = self._connection.execute(
                "SELECT format_version, output_table, deduplicate FROM seqdedupe_jobs WHERE job = ?", (job,)
            ).fetchone()
        check_format(version, str(self._path))
        return Binding(table, bool(deduplicate))

    def has_table(self, table: str) -> bool:
        with self._errors():
            return bool(self._columns_of(split_name(table)))

    def _make_own_tables(self) -> None:
        columns = self._columns_of(["seqdedupe_positions"])
        if columns and "position" not in [name for name, *_ in columns]:
            check_format(1, str(self._path))
        for statement in _OWN_TABLES:
            self._connection.execute(statement)

    def _columns_of(self, parts: Sequence[str]) -> list[tuple[str, str, int]]:
        """Name, declared type, and whether it has to be given, of each column; none if there is no such table."""
        return self._connection.execute(
            'SELECT name, type, "notnull" AND dflt_value IS NULL FROM pragma_table_info(?, ?)',
            (parts[-1], parts[0] if len(parts) > 1 else "main"),
        ).fetchall()

    def prepare(self, table: str, schema: pa.Schema) -> None:
        parts = split_name(table)
        check_schema(schema)
        declared = ", ".join(f"{quoted(field.name)} {_DECLARED[kind_of(field)]}" for field in schema)
        with self._transaction():
            self._make_own_tables()
            self._connection.execute(f"CREATE TABLE IF NOT EXISTS {quoted(*parts)} ({declared})")
            self._check_fits(table, schema)

    def _check_fits(self, table: str, schema: pa.Schema) -> None:
        """Raises INVALID_OUTPUT if the table does not take such rows."""
        names = {name.lower(): name for name in schema.names}
        rows = self._columns_of(split_name(table))
        columns = {names.get(name.lower(), name): Column(kind, bool(required)) for name, kind, required in rows}
        check_table(table, schema, columns, _fits)

    def positions(self, job: str) -> dict[str, Stored]:
        with self._errors():
            rows = self._connection.execute(
                "SELECT topic, epoch, position FROM seqdedupe_positions WHERE job = ?", (job,)
            ).fetchall()
        return {topic: from_cells(*rest) for topic, *rest in rows}

    def watermarks(self, job: str, topic: str) -> tuple[Stored | None, dict[str, int]]:
        with self._transaction("BEGIN"):
            stored = self._stored(job, topic)
            rows = self._connection.execute(
                "SELECT producer_name, sequence_id FROM seqdedupe_watermarks WHERE job = ? AND topic = ?", (job, topic)
            ).fetchall()
        return stored, dict(rows)

    def replace(self, job: str, topic: str, expected: Stored | None, new: Stored) -> bool:
        check_replacement(topic, expected, new)
        with self._transaction():
            if self._stored(job, topic) != expected:
                return False
            self._store(job, topic, new)
            self._connection.execute("DELETE FROM seqdedupe_watermarks WHERE job = ? AND topic = ?", (job, topic))
        return True

    def write(
        self,
        job: str,
        table: str,
        batches: Iterator[pa.RecordBatch],
        advances: Sequence[Advance],
        beside: Beside | None = None,
    ) -> int:
        name = quoted(*split_name(table))
        collected = list(batches)
        changed = [advance.changed_watermarks() for advance in advances]
        others = beside and beside.rows()
        with self._transaction():
            for advance in advances:
                self._check(job, advance)
            for schema in {batch.schema for batch in collected if len(batch)}:
                self._check_fits(table, schema)
            for number, batch in enumerate(collected):
                if len(batch):
                    with in_batch(number):
                        self._insert(name, batch)
            if beside and others:
                self._insert(quoted(*split_name(beside.table)), others)
            for advance, watermarks in zip(advances, changed, strict=True):
                topic = advance.range.topic
                self._connection.executemany(
                    "INSERT OR REPLACE INTO seqdedupe_watermarks VALUES (?, ?, ?, ?)",
                    ((job, topic, producer, sequence_id) for producer, sequence_id in watermarks.items()),
                )
                self._store(job, topic, Stored(advance.range.end, advance.epoch))
        return sum(map(len, collected))

    def _insert(self, name: str, batch: pa.RecordBatch) -> None:
        names = ", ".join(map(quoted, batch.schema.names))
        places = ", ".join("?" * batch.num_columns)
        statement = f"INSERT INTO {name} ({names}) VALUES ({places})"
        first, *others = _columns(batch)
        taken = iter(first)
        try:
            with self._errors():
                self._connection.executemany(statement, zip(taken, *others, strict=True))
        except ConfigurationError as e:
            # What is left of a column's values says how far it came.
            if (left := length_hint(taken)) < len(batch):
                e.numbers["row"] = str(len(batch) - left - 1)
            raise

    def _check(self, job: str, advance: Advance) -> None:
        advance.check(job, self._stored(job, advance.range.topic))

    def _stored(self, job: str, topic: str) -> Stored | None:
        row = self._connection.execute(
            "SELECT epoch, position FROM seqdedupe_positions WHERE job = ? AND topic = ?", (job, topic)
        ).fetchone()
        return row and from_cells(*row)

    def _store(self, job: str, topic: str, new: Stored) -> None:
        self._connection.execute(
            "INSERT OR REPLACE INTO seqdedupe_positions VALUES (?, ?, ?, ?, ?, ?)", (job, topic, *to_cells(new))
        )

    @contextmanager
    def _transaction(self, begin: str = "BEGIN IMMEDIATE") -> Iterator[None]:
        """One transaction: all of it is durable when the block ends, or nothing."""
        with self._errors():
            self._connection.execute(begin)
            try:
                yield
                self._connection.execute("COMMIT")
            finally:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.InterfaceError, OverflowError) as e:
            raise error("INVALID_OUTPUT", f"SQLite refuses: {one_line(e)}") from e
        except sqlite3.DatabaseError as e:
            if fault_of(e) is Fault.MESSAGE:
                raise error("INVALID_OUTPUT", f"SQLite refuses: {told(e)}") from e
            raise error("OUTPUT_UNAVAILABLE", f"the SQLite file {self._path} cannot be used: {told(e)}") from e


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


def _fits(field: pa.Field, declared: str) -> bool:
    """Whether a column that was declared so gives back the very value."""
    kind, affinity = kind_of(field), _affinity(declared)
    if kind is Kind.DECIMAL and affinity == "NUMERIC":
        return bool(field.type.precision <= _EXACT_DIGITS)
    # Text that is no number stays text in a column of numbers: DATETIME, DATE and JSON are declared so.
    is_no_number = kind in (Kind.TIMESTAMP, Kind.LOCAL_TIMESTAMP, Kind.DATE, Kind.JSON, Kind.BINARY)
    takes_numbers = kind in (Kind.BOOLEAN, Kind.INTEGER, Kind.FLOAT)
    return affinity in {"BLOB", _DECLARED[kind]} or (affinity == "NUMERIC" and (is_no_number or takes_numbers))


def _columns(batch: pa.RecordBatch) -> list[list[object]]:
    """The values for SQLite, column by column."""
    columns: list[list[object]] = []
    for field, column in zip(batch.schema, batch.columns, strict=True):
        kind = kind_of(field)
        try:
            columns.append(_values(kind, column))
        except BAD_VALUES as e:
            raise bad_value(field.name, first_bad(partial(_values, kind), column), e) from e
    return columns


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
