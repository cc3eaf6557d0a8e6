"""A PostgreSQL database: rows go in by binary COPY, positions by compare-and-set."""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import Connection
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import TransactionStatus

from seqdedupe.databases.failures import Fault, ended, fault_of, told
from seqdedupe.databases.tables import CONNECTION, POSTGRESQL_UNSAFE_TABLES, POSTGRESQL_UNSAFE_WRITES, cure_of
from seqdedupe.errors import SeqdedupeError, UnavailableError, error
from seqdedupe_spark.stores.contract import (
    FORMAT_VERSION,
    Advance,
    Beside,
    Binding,
    OutputStore,
    Stored,
    Take,
    Watermarks,
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

# -- How rows go into PostgreSQL: which of its types take which Arrow types, and a batch as binary COPY.

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
"""Which types take a kind; the first is what a new table gets."""

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
"""What a new table gets instead."""

_EPOCH_DAYS = 10_957
"""PostgreSQL's first day, 2000-01-01, in days after that of Arrow."""

_EPOCH_MICROSECONDS = _EPOCH_DAYS * 86_400_000_000

# For a type: what Arrow casts to, with a look at each value; and the type that has the same bytes in COPY. Times go as
# the numbers that they are there, so no row costs a datetime.
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


def copy_in(connection: Connection, parts: Sequence[str], batch: pa.RecordBatch, columns: Mapping[str, Column]) -> None:
    """Sends the rows, in one COPY. Raises INVALID_OUTPUT for a value that its column cannot take."""
    cells, types = [], []
    for field, column in zip(batch.schema, batch.columns, strict=True):
        base = _base(columns[field.name].type)
        try:
            values, wire = _cells(field, column, base)
        except BAD_VALUES as e:
            raise bad_value(field.name, first_bad(lambda part: _cells(field, part, base), column), e) from e  # noqa: B023
        if kind_of(field) is Kind.TEXT and (row := _first_nul(column)) is not None:
            raise bad_value(field.name, row, "it has a NUL character, which PostgreSQL text does not")
        cells.append(values)
        types.append(wire)
    names = ", ".join(map(quoted, batch.schema.names))
    statement = f"COPY {quoted(*parts)} ({names}) FROM STDIN (FORMAT BINARY)"
    with connection.cursor() as cursor, cursor.copy(statement.encode()) as copy:
        copy.set_types(types)
        for number, cells_of_row in enumerate(zip(*cells, strict=True)):
            try:
                copy.write_row(cells_of_row)
            except psycopg.Error as e:
                if e.sqlstate is not None:
                    raise
                raise error("INVALID_OUTPUT", f"a value cannot be written: {one_line(e)}", row=number) from e


def _first_nul(column: pa.Array) -> int | None:
    found = pc.index(pc.fill_null(pc.match_substring(column, "\0"), False), True).as_py()
    return found if found >= 0 else None


def _cells(field: pa.Field, column: pa.Array, base: str) -> tuple[list[Any], str]:
    """The values for a column of that type, and the type that they are to be sent as."""
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
        # The version of its form, which stands before the text.
        values = [value if value is None else "\1" + value for value in values]
    return values, wire


def _base(declared: str) -> str:
    """The type without its precision or length."""
    return re.sub(r"\([\d,-]+\)", "", declared)


def fits(field: pa.Field, declared: str) -> bool:
    """Whether a column of that type takes the field's values, as far as they are in its range."""
    if declared.startswith("real"):
        return bool(pa.types.is_floating(field.type) and field.type.bit_width <= 32)
    return _base(declared) in _TYPES[kind_of(field)]


def declared_type(field: pa.Field) -> str:
    """The type of a new column."""
    return _NARROW.get(field.type, _TYPES[kind_of(field)][0])


IDLE_TIMEOUT_SECONDS = 60
"""So long may the next batch of rows be in coming; then the server ends the transaction, and lets go of its locks."""

LOCK_TIMEOUT_SECONDS = 30
"""How long to wait for another transaction, such as one that moves the same position."""

GIVE_WAY_SECONDS = 5.0
"""A transaction that another session waits for this long, as an ALTER TABLE does, is rolled back between two batches;
its range is written again after that session."""

_LOOK_SECONDS = 1.0
"""How often a transaction looks whether another session waits for it."""

_APPLICATION = {"application_name": "seqdedupe"}

_SESSION = (
    # With it a statement that has waited for another transaction looks at what that has made.
    "SET default_transaction_isolation = 'read committed'; "
    f"SET idle_in_transaction_session_timeout = '{IDLE_TIMEOUT_SECONDS}s'; "
    f"SET lock_timeout = '{LOCK_TIMEOUT_SECONDS}s'; "
    "SET tcp_keepalives_idle = 30; SET tcp_keepalives_interval = 10; SET tcp_keepalives_count = 3"
)

_LINE = re.compile(r"^COPY .*, line (\d+)", re.MULTILINE)
"""Where PostgreSQL says which row of a COPY it refuses."""

_PREPARE_LOCK = 0x5E9DED09E
"""The advisory lock of those who make tables: CREATE TABLE IF NOT EXISTS alone fails when two run it at once."""

_OWN_TABLES = (
    "CREATE TABLE IF NOT EXISTS seqdedupe_positions (job text, topic text, epoch bigint NOT NULL, "
    "incarnation bigint NOT NULL, message_index bigint NOT NULL, position text NOT NULL, PRIMARY KEY (job, topic))",
    "CREATE TABLE IF NOT EXISTS seqdedupe_watermarks (job text, topic text, producer_name text, "
    "sequence_id bigint NOT NULL, PRIMARY KEY (job, topic, producer_name))",
    "CREATE TABLE IF NOT EXISTS seqdedupe_jobs (job text PRIMARY KEY, format_version integer NOT NULL, "
    "output_table text NOT NULL, deduplicate boolean NOT NULL)",
)

_MOVED = ("seqdedupe_positions", "seqdedupe_watermarks")
_OWN_NAMES = (*_MOVED, "seqdedupe_jobs")

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
"""The sessions that wait for a table that this transaction writes to, and the tables."""

# Each of these fails with a division by zero, and takes the transaction with it, unless it changes one row.
_INSERT = (
    "WITH moved AS (INSERT INTO seqdedupe_positions (job, topic, epoch, incarnation, message_index, position) "
    "VALUES (%s, %s, %s, %s, %s, %s) ON CONFLICT DO NOTHING RETURNING 1) SELECT 1 / count(*) FROM moved; "
)
_MOVE = (
    "WITH moved AS (UPDATE seqdedupe_positions SET (epoch, incarnation, message_index, position) = (%s, %s, %s, %s) "
    "WHERE job = %s AND topic = %s AND (epoch, incarnation, message_index, position) = (%s, %s, %s, %s) RETURNING 1) "
    "SELECT 1 / count(*) FROM moved; "
)
_RAISE = (
    "INSERT INTO seqdedupe_watermarks SELECT %s, %s, * FROM unnest(%s::text[], %s::bigint[]) "
    "ON CONFLICT (job, topic, producer_name) DO UPDATE SET sequence_id = excluded.sequence_id; "
)
_FORGET = "DELETE FROM seqdedupe_watermarks WHERE job = %s AND topic = %s; "


class PostgresStore(OutputStore):
    """Rows and positions in one PostgreSQL database, reached by a URL or a libpq connection string.

    It connects when it is first used, and again after the connection was lost. Rows are sent while they are read, one
    COPY for each batch, so that between batches the server may end a transaction that stalls. How durable a commit is
    the server's `synchronous_commit` says.
    """

    def __init__(self, dsn: str) -> None:
        """Raises ConfigurationError (INVALID_OPTION), which does not quote the password."""
        try:
            self._dsn = make_conninfo("", **(CONNECTION | _APPLICATION | conninfo_to_dict(dsn)))
        except psycopg.ProgrammingError:
            # What libpq says here may quote it.
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

    def bind(self, job: str, binding: Binding) -> Binding:
        with self._using() as connection:
            if not _columns_of(connection, ["seqdedupe_jobs"]):
                with connection.transaction():
                    _make_tables(connection)
            _check_format_of_positions(connection)
            found = self._bound(connection, job)
            if found is None:
                connection.execute(
                    "INSERT INTO seqdedupe_jobs VALUES (%s, %s, %s, %s) ON CONFLICT DO NOTHING",
                    (job, FORMAT_VERSION, *binding),
                )
                found = self._bound(connection, job)
        version, *bound = found or (FORMAT_VERSION, *binding)
        check_format(version, "the PostgreSQL database")
        return Binding(*bound)

    def _bound(self, connection: Connection, job: str) -> tuple[Any, ...] | None:
        return connection.execute(
            "SELECT format_version, output_table, deduplicate FROM seqdedupe_jobs WHERE job = %s", (job,)
        ).fetchone()

    def has_table(self, table: str) -> bool:
        with self._using() as connection:
            return bool(_columns_of(connection, split_name(table)))

    def prepare(self, table: str, schema: pa.Schema) -> None:
        parts = split_name(table)
        check_schema(schema)
        declared = ", ".join(f"{quoted(field.name)} {declared_type(field)}" for field in schema)
        with self._using() as connection, connection.transaction():
            columns = _columns_of(connection, parts)
            if not columns or not _columns_of(connection, ["seqdedupe_jobs"]):
                _make_tables(connection, f"CREATE TABLE IF NOT EXISTS {quoted(*parts)} ({declared})")
                columns = _columns_of(connection, parts)
            _check_outlives_a_crash(connection, parts, *([name] for name in _OWN_NAMES))
        check_table(table, schema, columns, fits)

    def positions(self, job: str) -> dict[str, Stored]:
        with self._using() as connection:
            rows = connection.execute(
                "SELECT topic, epoch, position FROM seqdedupe_positions WHERE job = %s", (job,)
            ).fetchall()
        return {topic: from_cells(*rest) for topic, *rest in rows}

    def watermarks(self, job: str, topic: str) -> tuple[Stored | None, dict[str, int]]:
        with self._using() as connection, connection.transaction():
            connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            row = connection.execute(
                "SELECT epoch, position FROM seqdedupe_positions WHERE job = %s AND topic = %s", (job, topic)
            ).fetchone()
            rows = connection.execute(
                "SELECT producer_name, sequence_id FROM seqdedupe_watermarks WHERE job = %s AND topic = %s",
                (job, topic),
            ).fetchall()
        return from_cells(*row) if row else None, dict(rows)

    def replace(self, job: str, topic: str, expected: Stored | None, new: Stored) -> bool:
        check_replacement(topic, expected, new)
        if expected is None:
            statement, values = _INSERT, [job, topic, *to_cells(new)]
        else:
            statement, values = _MOVE, [*to_cells(new), job, topic, *to_cells(expected)]
        with self._using() as connection:
            try:
                _commit(connection, statement + _FORGET, [*values, job, topic])
            except psycopg.errors.DivisionByZero as e:
                if not _is_ours(e):
                    raise
                return False
        return True

    def write(
        self,
        job: str,
        table: str,
        batches: Iterator[pa.RecordBatch],
        advances: Sequence[Advance],
        beside: Beside | None = None,
    ) -> int:
        parts = split_name(table)
        rows = 0
        columns: dict[str, Column] | None = None
        with _errors():
            # This very connection until the end: after a new one the rows sent so far would be missing.
            connection = self._connection()
        others = _Others(connection)
        try:
            for number, batch in enumerate(batches):
                if len(batch):
                    with in_batch(number), _errors():
                        columns = columns or _lock(connection, parts)
                        check_table(table, batch.schema, columns, fits)
                        copy_in(connection, parts, batch, columns)
                        others.give_way()
                    rows += len(batch)
            changed = [advance.changed_watermarks() for advance in advances]
            if beside and len(letters := beside.rows()):
                with _errors():
                    other_parts = split_name(beside.table)
                    copy_in(connection, other_parts, letters, _lock(connection, other_parts))
            with _errors():
                _check_landed(connection)
                _move(connection, job, list(zip(advances, changed, strict=True)))
        finally:
            _roll_back(connection)
        return rows

    @contextmanager
    def trial(self, table: str) -> Iterator[Take]:
        parts = split_name(table)
        columns: dict[str, Column] = {}
        others: _Others | None = None

        def take(rows: pa.RecordBatch) -> SeqdedupeError | None:
            nonlocal columns, others
            with _errors():
                connection = self._connection()
                if others is None or connection.info.transaction_status is TransactionStatus.IDLE:
                    columns, others = _lock(connection, parts), _Others(connection)
                    check_table(table, rows.schema, columns, fits)
                others.give_way()
                connection.execute("SAVEPOINT trial")
            try:
                with _errors():
                    copy_in(connection, parts, rows, columns)
                    connection.execute("SET CONSTRAINTS ALL IMMEDIATE; RELEASE SAVEPOINT trial")
            except SeqdedupeError as e:
                if isinstance(e, UnavailableError) and not (e.__cause__ and ended(e.__cause__)):
                    raise
                if not connection.closed:
                    with _errors():
                        connection.execute("ROLLBACK TO SAVEPOINT trial")
                return e
            return None

        try:
            yield take
        finally:
            if self._open is not None and not self._open.closed:
                _roll_back(self._open)

    @contextmanager
    def _using(self) -> Iterator[Connection]:
        with _errors():
            connection = self._connection()
            try:
                yield connection
            finally:
                _roll_back(connection)


def _move(connection: Connection, job: str, moves: list[tuple[Advance, Watermarks]]) -> None:
    """Moves the positions, which must be the starts of the ranges, raises the watermarks, and commits."""
    statements, values = "", []
    # In one order, so that two never wait for each other.
    for advance, watermarks in sorted(moves, key=lambda move: move[0].range.topic):
        topic, start, end = advance.range.topic, advance.range.start, advance.range.end
        statements += _MOVE
        values += [*to_cells(Stored(end, advance.epoch)), job, topic, *to_cells(Stored(start, advance.epoch))]
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
    """Whether one of our statements has divided, not a trigger: PostgreSQL names the function that one is in."""
    return not failure.diag.context


def _commit(connection: Connection, statements: str, values: Sequence[object]) -> None:
    """Runs the statements and commits, in one message to the server.

    It takes the locks that others wait for and lets go of them with no word from here in between: a writer that stalls
    holds none of them.
    """
    psycopg.ClientCursor(connection).execute((_begin(connection) + statements + "COMMIT").encode(), values)


def _make_tables(connection: Connection, *more: str) -> None:
    """Makes the tables of our own, and others, where they are missing."""
    connection.execute("SELECT pg_advisory_xact_lock(%s)", (_PREPARE_LOCK,))
    _check_format_of_positions(connection)
    for statement in (*_OWN_TABLES, *more):
        connection.execute(statement.encode())


def _check_format_of_positions(connection: Connection) -> None:
    columns = _columns_of(connection, ["seqdedupe_positions"])
    if columns and "position" not in columns:
        check_format(1, "the PostgreSQL database")


def _columns_of(connection: Connection, parts: Sequence[str]) -> dict[str, Column]:
    """The columns of a table; none if it is missing."""
    rows = connection.execute(_COLUMNS, (quoted(*parts),)).fetchall()
    return {name: Column(declared, required) for name, declared, required in rows}


def _lock(connection: Connection, parts: Sequence[str]) -> dict[str, Column]:
    """The columns of a table, which stay as they are until the end of the transaction; begins one if there is none."""
    connection.execute(f"{_begin(connection)}LOCK TABLE ONLY {quoted(*parts)} IN ROW EXCLUSIVE MODE".encode())
    return _columns_of(connection, parts)


def _begin(connection: Connection) -> str:
    """What a statement begins with that needs a transaction."""
    return "BEGIN; " if connection.info.transaction_status is TransactionStatus.IDLE else ""


def _check_outlives_a_crash(connection: Connection, *tables: Sequence[str]) -> None:
    """Raises INVALID_OUTPUT if rows and positions would not be there together after the server has crashed."""
    names = [quoted(*parts) for parts in tables]
    _refuse(connection.execute(POSTGRESQL_UNSAFE_TABLES.format(names="%s").encode(), (names,)).fetchone())


def _check_landed(connection: Connection) -> None:
    """The same, of what this transaction has written to, and of our own tables, which it then writes to."""
    statements = f"{_begin(connection)}LOCK TABLE {', '.join(_MOVED)} IN ROW EXCLUSIVE MODE; {POSTGRESQL_UNSAFE_WRITES}"
    cursor = connection.execute(statements.encode())
    while cursor.nextset():
        pass
    _refuse(cursor.fetchone())


def _refuse(found: tuple[Any, ...] | None) -> None:
    if found:
        what = f"table {found[0]} is {found[1]}: after a crash it would not hold what the other tables hold"
        raise error("INVALID_OUTPUT", what, hint=cure_of(*found))


class _Others:
    """The sessions that wait for this transaction. None waits for long."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._look_at = time.monotonic() + _LOOK_SECONDS
        self._since: float | None = None

    def give_way(self) -> None:
        """Raises OUTPUT_UNAVAILABLE if somebody has waited for GIVE_WAY_SECONDS to change a table."""
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
            raise error("OUTPUT_UNAVAILABLE", f"{what}: nothing is written now, the rows are written after it")


def _roll_back(connection: Connection) -> None:
    """Ends a transaction that is open."""
    if connection.info.transaction_status is not TransactionStatus.IDLE:
        try:
            connection.rollback()
        except psycopg.Error:
            connection.close()


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except psycopg.Error as e:
        if fault_of(e) is not Fault.MESSAGE:
            raise error("OUTPUT_UNAVAILABLE", f"the PostgreSQL database cannot be used: {told(e)}") from e
        failure = error("INVALID_OUTPUT", f"PostgreSQL refuses: {told(e)}")
        if line := _LINE.search(e.diag.context or ""):
            failure.numbers["row"] = str(int(line[1]) - 1)
        raise failure from e
