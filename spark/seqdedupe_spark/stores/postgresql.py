"""The store for a PostgreSQL database. Rows are written with binary COPY, and positions with compare-and-set."""

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import Connection
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import TransactionStatus

from seqdedupe.databases.failures import ended
from seqdedupe.databases.tables import (
    CONNECTION,
    POSTGRESQL_UNSAFE_TABLES,
    POSTGRESQL_UNSAFE_WRITES,
    UrlError,
    check_outlives_a_crash,
    check_password_ends,
)
from seqdedupe.errors import SeqdedupeError, UnavailableError, error
from seqdedupe_spark.stores.contract import (
    Advance,
    Beside,
    Column,
    Kind,
    Stored,
    Take,
    Watermarks,
    bad_value,
    check_table,
    converted,
    in_batch,
    kind_of,
    one_line,
)
from seqdedupe_spark.stores.sql import (
    JOBS,
    OWN_TABLES,
    POSITIONS,
    WATERMARKS,
    SqlStore,
    Values,
    cells,
    json_texts,
    quoted,
    split_name,
)

# -- Writing rows to PostgreSQL: the column types that accept each Arrow type, and a batch as binary COPY.

_TYPES: dict[Kind, tuple[str, ...]] = {
    Kind.BOOLEAN: ("boolean",),
    Kind.INTEGER: ("bigint", "integer", "smallint", "numeric"),
    Kind.FLOAT: ("double precision", "real"),
    Kind.DECIMAL: ("numeric",),
    Kind.TEXT: ("text", "character varying", "character", "json", "jsonb"),
    Kind.BINARY: ("bytea",),
    Kind.TIMESTAMP: ("timestamp with time zone",),
    Kind.LOCAL_TIMESTAMP: ("timestamp without time zone",),
    Kind.DATE: ("date",),
    Kind.JSON: ("jsonb", "json", "text", "character varying"),
    Kind.NULL: ("text",),
}
"""The column types that accept each kind. A new table has the first type of its kind, unless `_NARROW` has another."""

_NARROW = {
    pa.int8(): "smallint",
    pa.uint8(): "smallint",
    pa.int16(): "smallint",
    pa.uint16(): "integer",
    pa.int32(): "integer",
    pa.uint64(): "numeric",
    pa.float16(): "real",
    pa.float32(): "real",
}
"""The column types in a new table for these Arrow types."""

_EPOCH_DAYS = 10_957
"""Day 0 of PostgreSQL's dates, 2000-01-01, in days after day 0 of Arrow's dates."""

_EPOCH_MICROSECONDS = _EPOCH_DAYS * 86_400_000_000

# For each column type: the Arrow type to which values are cast and checked (None: no cast), and the type with the same
# bytes in COPY. Times are sent as the numbers that PostgreSQL uses. So no datetime object is needed per row.
_CASTS: dict[str, tuple[pa.DataType | None, str]] = {
    "boolean": (None, "bool"),
    "smallint": (pa.int16(), "int2"),
    "integer": (pa.int32(), "int4"),
    "bigint": (pa.int64(), "int8"),
    "numeric": (None, "numeric"),
    "real": (pa.float32(), "float4"),
    "double precision": (pa.float64(), "float8"),
    "bytea": (None, "bytea"),
    "timestamp with time zone": (pa.timestamp("us", "UTC"), "int8"),
    "timestamp without time zone": (pa.timestamp("us"), "int8"),
    "date": (pa.date32(), "int4"),
}


def copy_in(connection: Connection, table: str, batch: pa.RecordBatch, columns: Mapping[str, Column]) -> None:
    """Send the rows in one COPY. Raises INVALID_OUTPUT for a value that its column cannot hold."""
    sent, types = [], []
    for field, column in zip(batch.schema, batch.columns, strict=True):
        values, wire = converted(field.name, partial(_sendable, field, _base(columns[field.name].type)), column)
        if kind_of(field) is Kind.TEXT and (row := _first_nul(column)) is not None:
            raise bad_value(field.name, row, "it has a NUL character, which PostgreSQL text cannot have")
        sent.append(values)
        types.append(wire)
    names = ", ".join(map(quoted, batch.schema.names))
    statement = f"COPY {_quoted(table)} ({names}) FROM STDIN (FORMAT BINARY)"
    with connection.cursor() as cursor, cursor.copy(statement.encode()) as copy:
        copy.set_types(types)
        for number, row_sent in enumerate(zip(*sent, strict=True)):
            try:
                copy.write_row(row_sent)
            except psycopg.Error as e:
                if e.sqlstate is not None:
                    raise
                raise error("INVALID_OUTPUT", f"a value cannot be written: {one_line(e)}", row=number) from e


def _first_nul(column: pa.Array) -> int | None:
    found = pc.index(pc.fill_null(pc.match_substring(column, "\0"), False), True).as_py()
    return found if found >= 0 else None


def _sendable(field: pa.Field, base: str, column: pa.Array) -> tuple[list[Any], str]:
    """Return the values for a column of the type `base`, and the type in which the values are sent."""
    if kind_of(field) is Kind.JSON:
        values, wire = json_texts(column), "text"
    else:
        target, wire = _CASTS.get(base, (None, "text"))
        if target is not None:
            column = column.cast(target)
        if pa.types.is_timestamp(column.type):
            column = pc.subtract_checked(column.cast(pa.int64()), _EPOCH_MICROSECONDS)
        elif pa.types.is_date(column.type):
            column = pc.subtract_checked(column.cast(pa.int32()), _EPOCH_DAYS)
        values = column.to_pylist()
    if base == "jsonb":
        # The binary form of jsonb has a version number before the text.
        values = [value if value is None else "\1" + value for value in values]
    return values, wire


def _base(declared: str) -> str:
    """Return the type without its precision or length."""
    return re.sub(r"\([\d,-]+\)", "", declared)


def fits(field: pa.Field, declared: str) -> bool:
    """Whether a column of that type accepts the field's values. Values outside the column's range are found when they
    are written."""
    if declared.startswith("real"):
        return bool(pa.types.is_floating(field.type) and field.type.bit_width <= 32)
    return _base(declared) in _TYPES[kind_of(field)]


def declared_type(field: pa.Field) -> str:
    """Return the type of a new column."""
    return _NARROW.get(field.type, _TYPES[kind_of(field)][0])


IDLE_TIMEOUT_SECONDS = 60
"""The longest wait for the next batch of rows. After this time, the server ends the transaction and releases its
locks."""

LOCK_TIMEOUT_SECONDS = 30
"""The longest wait for another transaction, such as a transaction that moves the same position."""

GIVE_WAY_SECONDS = 5.0
"""If another session, such as an ALTER TABLE, waits for a transaction for this time, the transaction is rolled back
between two batches. Its rows are written again after the other session has finished."""

_LOOK_SECONDS = 1.0
"""The time between two checks whether another session waits for the transaction."""

_APPLICATION = {"application_name": "seqdedupe"}

_SESSION = (
    # With this level, a statement that has waited for another transaction sees the result of that transaction.
    "SET default_transaction_isolation = 'read committed'; "
    f"SET idle_in_transaction_session_timeout = '{IDLE_TIMEOUT_SECONDS}s'; "
    f"SET lock_timeout = '{LOCK_TIMEOUT_SECONDS}s'; "
    "SET tcp_keepalives_idle = 30; SET tcp_keepalives_interval = 10; SET tcp_keepalives_count = 3"
)

_LINE = re.compile(r"^COPY .*, line (\d+)", re.MULTILINE)
"""The part of PostgreSQL's message that has the number of the refused row of a COPY."""

_PREPARE_LOCK = 0x5E9DED09E
"""The advisory lock of sessions that create tables. Without the lock, CREATE TABLE IF NOT EXISTS can fail when two
sessions run it at once."""

_OWN_TYPES = {kind: kind for kind in ("bigint", "integer", "boolean")} | {"name": "text", "position": "text"}

_COLUMNS = (
    "SELECT attname, format_type(atttypid, atttypmod), attnotnull AND NOT atthasdef AND attidentity = '' "
    "FROM pg_attribute WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped"
)

_WAITING = (
    "SELECT other.pid, other.relation::regclass::text FROM pg_locks mine JOIN pg_locks other "
    "USING (locktype, database, relation) WHERE locktype = 'relation' AND mine.pid = pg_backend_pid() "
    "AND mine.mode = 'RowExclusiveLock' AND NOT other.granted "
    "AND other.mode IN ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')"
)
"""Find the sessions that wait for a table to which this transaction writes, and the tables."""

_PARAMETER = re.compile(r":(\w+)")

_MOVE = (
    # If the UPDATE does not change a row, the statement fails with a division by zero, which ends the transaction.
    "WITH moved AS (UPDATE seqdedupe_positions SET (epoch, incarnation, message_index, position) = (%s, %s, %s, %s) "
    "WHERE job = %s AND topic = %s AND (epoch, incarnation, message_index, position) = (%s, %s, %s, %s) RETURNING 1) "
    "SELECT 1 / count(*) FROM moved; "
)
_RAISE = (
    "INSERT INTO seqdedupe_watermarks SELECT %s, %s, * FROM unnest(%s::text[], %s::bigint[]) "
    "ON CONFLICT (job, topic, producer_name) DO UPDATE SET sequence_id = excluded.sequence_id; "
)


class PostgresStore(SqlStore[Connection]):
    """Rows and positions in one PostgreSQL database, given by a URL or a libpq connection string.

    The store connects when it is first used, and again after the connection was lost. Rows are sent while they are
    read, with one COPY per batch. So the server can end a stalled transaction between two batches. The server's setting
    `synchronous_commit` decides how durable a commit is.
    """

    database = "PostgreSQL"
    raises = (psycopg.Error,)

    def __init__(self, dsn: str) -> None:
        """Raise ConfigurationError (INVALID_OPTION) for an invalid URL, without quoting the password."""
        super().__init__("the PostgreSQL database")
        try:
            given = conninfo_to_dict(dsn)
            check_password_ends(given.get("password"), given.get("host"), given.get("dbname"))
            if not re.fullmatch(r"[\d,]*", str(given.get("port", ""))):
                raise UrlError("cannot be read")
            self._dsn = make_conninfo("", **(CONNECTION | _APPLICATION | given))
        except UrlError as e:
            raise error("INVALID_OPTION", f"the store's PostgreSQL URL {e}") from None
        except psycopg.ProgrammingError:
            # libpq's message may contain the password.
            raise error("INVALID_OPTION", "the store's PostgreSQL URL cannot be read") from None
        self._open: Connection | None = None

    def _connection(self) -> Connection:
        if self._open is None or self._open.closed:
            connection = psycopg.connect(self._dsn, autocommit=True)
            try:
                connection.execute(_SESSION)
            except psycopg.Error:
                connection.close()
                raise
            self._open = connection
        return self._open

    def close(self) -> None:
        if self._open is not None:
            self._open.close()

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with self._errors():
            connection = self._connection()
            try:
                yield connection
            finally:
                _roll_back(connection)

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        with self._reading() as connection, connection.transaction():
            yield connection

    @contextmanager
    def _making(self, table: str | None = None, schema: pa.Schema | None = None) -> Iterator[Connection]:
        with self._transaction() as connection:
            if not all(self._columns_of(connection, one) for one in {table or JOBS, JOBS}):
                # CREATE TABLE IF NOT EXISTS runs only if a table is missing: it fails for a user who may not create
                # tables. Two sessions must not run it at once.
                connection.execute("SELECT pg_advisory_xact_lock(%s)", (_PREPARE_LOCK,))
                self._make_own(connection, _OWN_TYPES, {})
                if table is not None:
                    declared = ", ".join(f"{quoted(one.name)} {declared_type(one)}" for one in schema or ())
                    connection.execute(f"CREATE TABLE IF NOT EXISTS {_quoted(table)} ({declared})".encode())
            self._check_format_of_positions(connection)
            yield connection

    def _execute(self, connection: Connection, statement: str, values: Values) -> psycopg.Cursor:
        with_names = _PARAMETER.sub(r"%(\1)s", statement).encode()
        if isinstance(values, list):
            cursor = connection.cursor()
            cursor.executemany(with_names, values)
            return cursor
        return connection.execute(with_names, values)

    def _columns_of(self, connection: Connection, table: str) -> dict[str, Column]:
        rows = connection.execute(_COLUMNS, (_quoted(table),)).fetchall()
        return {name: Column(declared, required) for name, declared, required in rows}

    def _fits(self, field: pa.Field, there: Any) -> bool:
        return fits(field, there)

    def _check_kept(self, connection: Connection, tables: Iterable[str]) -> None:
        names = [_quoted(one) for one in (*tables, *OWN_TABLES)]
        found = connection.execute(POSTGRESQL_UNSAFE_TABLES.format(names="%s").encode(), (names,)).fetchone()
        check_outlives_a_crash(found)

    def write(
        self,
        job: str,
        table: str,
        batches: Iterator[pa.RecordBatch],
        advances: Sequence[Advance],
        beside: Beside | None = None,
    ) -> int:
        rows = 0
        columns: dict[str, Column] | None = None
        with self._errors():
            # Keep this connection until the end: a new connection would not have the rows sent so far.
            connection = self._connection()
        others = _Others(connection)
        try:
            for number, batch in enumerate(batches):
                if len(batch):
                    with in_batch(number), self._errors():
                        columns = columns or self._lock(connection, table)
                        check_table(table, batch.schema, columns, fits)
                        copy_in(connection, table, batch, columns)
                        others.give_way()
                    rows += len(batch)
            changed = [advance.changed_watermarks() for advance in advances]
            if beside and len(letters := beside.rows()):
                with self._errors():
                    self._insert(connection, beside.table, letters)
            with self._errors():
                _check_landed(connection)
                _move(connection, job, list(zip(advances, changed, strict=True)))
        finally:
            _roll_back(connection)
        return rows

    @contextmanager
    def trial(self, table: str) -> Iterator[Take]:
        columns: dict[str, Column] = {}
        others: _Others | None = None

        def take(rows: pa.RecordBatch) -> SeqdedupeError | None:
            nonlocal columns, others
            with self._errors():
                connection = self._connection()
                if others is None or connection.info.transaction_status is TransactionStatus.IDLE:
                    columns, others = self._lock(connection, table), _Others(connection)
                    check_table(table, rows.schema, columns, fits)
                others.give_way()
                connection.execute("SAVEPOINT trial")
            try:
                with self._errors():
                    copy_in(connection, table, rows, columns)
                    connection.execute("SET CONSTRAINTS ALL IMMEDIATE; RELEASE SAVEPOINT trial")
            except SeqdedupeError as e:
                if isinstance(e, UnavailableError) and not (e.__cause__ and ended(e.__cause__)):
                    raise
                if not connection.closed:
                    with self._errors():
                        connection.execute("ROLLBACK TO SAVEPOINT trial")
                return e
            return None

        try:
            yield take
        finally:
            if self._open is not None and not self._open.closed:
                _roll_back(self._open)

    def _insert(self, connection: Connection, table: str, batch: pa.RecordBatch) -> None:
        copy_in(connection, table, batch, self._lock(connection, table))

    def _lock(self, connection: Connection, table: str) -> dict[str, Column]:
        """Return the columns of a table, and lock the table's definition until the transaction ends. Begin a
        transaction if none is open."""
        connection.execute(f"{_begin(connection)}LOCK TABLE ONLY {_quoted(table)} IN ROW EXCLUSIVE MODE".encode())
        return self._columns_of(connection, table)

    def _error(self, cause: Exception) -> SeqdedupeError:
        failure = super()._error(cause)
        context = cause.diag.context if isinstance(cause, psycopg.Error) else None
        if failure.reason == "INVALID_OUTPUT" and (line := _LINE.search(context or "")):
            failure.numbers["row"] = str(int(line[1]) - 1)
        return failure


def _move(connection: Connection, job: str, moves: list[tuple[Advance, Watermarks]]) -> None:
    """Move the positions from the starts to the ends of the ranges, raise the watermarks, and commit. Raises
    POSITION_CHANGED if a position is not the start of its range."""
    statements, values = "", []
    # All writers use the same order, so that two writers never wait for each other.
    for advance, watermarks in sorted(moves, key=lambda move: move[0].range.topic):
        topic, start, end = advance.range.topic, advance.range.start, advance.range.end
        statements += _MOVE
        old, new = (cells(Stored(one, advance.epoch)).values() for one in (start, end))
        values += [*new, job, topic, *old]
        if watermarks:
            statements += _RAISE
            values += [job, topic, list(watermarks), list(watermarks.values())]
    try:
        _commit(connection, statements, values)
    except psycopg.errors.DivisionByZero as e:
        if not _is_ours(e):
            raise
        ranges = ", ".join(str(advance.range) for advance, _ in moves)
        raise error(
            "POSITION_CHANGED", f"a position of job {job!r} is no longer the start of its range: {ranges}"
        ) from e


def _is_ours(failure: psycopg.errors.DivisionByZero) -> bool:
    """Return whether the division by zero occurred in our own statement, and not in a trigger. For a trigger,
    PostgreSQL reports the function as the context."""
    return not failure.diag.context


def _commit(connection: Connection, statements: str, values: Sequence[object]) -> None:
    """Run the statements and commit, with one message to the server.

    The server acquires and releases the locks of these statements without waiting for another message from this
    process. So a stalled writer holds none of these locks.
    """
    psycopg.ClientCursor(connection).execute((_begin(connection) + statements + "COMMIT").encode(), values)


def _quoted(table: str) -> str:
    return quoted(*split_name(table))


def _begin(connection: Connection) -> str:
    """Return a prefix for a statement that needs a transaction: BEGIN if no transaction is open, else nothing."""
    return "BEGIN; " if connection.info.transaction_status is TransactionStatus.IDLE else ""


def _check_landed(connection: Connection) -> None:
    """Raise INVALID_OUTPUT unless all tables of this transaction survive a crash of the server together: the tables
    that it has written to, and the job's own tables, which it writes to next."""
    statements = (
        f"{_begin(connection)}LOCK TABLE {POSITIONS}, {WATERMARKS} IN ROW EXCLUSIVE MODE; {POSTGRESQL_UNSAFE_WRITES}"
    )
    cursor = connection.execute(statements.encode())
    while cursor.nextset():
        pass
    check_outlives_a_crash(cursor.fetchone())


class _Others:
    """Finds other sessions that wait for this transaction. If a session has waited for too long, `give_way` raises an
    error, which ends the transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._look_at = time.monotonic() + _LOOK_SECONDS
        self._since: float | None = None

    def give_way(self) -> None:
        """Raise OUTPUT_UNAVAILABLE if a session has waited for GIVE_WAY_SECONDS to change a table."""
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + _LOOK_SECONDS
        waiting = self._connection.execute(_WAITING).fetchone()
        if waiting is None:
            self._since = None
        elif self._since is None:
            self._since = now
        elif now - self._since >= GIVE_WAY_SECONDS:
            what = f"session {waiting[0]} has waited {now - self._since:.0f} s to change table {waiting[1]}"
            raise error("OUTPUT_UNAVAILABLE", f"{what}: the job waits, and writes the rows after it")


def _roll_back(connection: Connection) -> None:
    """End the transaction if one is open."""
    if connection.info.transaction_status is not TransactionStatus.IDLE:
        try:
            connection.rollback()
        except psycopg.Error:
            connection.close()
