"""MariaDB, MySQL, and any other database with transactions that SQLAlchemy speaks: the general store, a slow one."""

import datetime
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Insert,
    Integer,
    MetaData,
    NullPool,
    String,
    Table,
    TableClause,
    bindparam,
    column,
    create_engine,
    delete,
    event,
    insert,
    inspect,
    literal,
    make_url,
    select,
    table,
    text,
    update,
)
from sqlalchemy.dialects import mysql
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.sql import quoted_name
from sqlalchemy.types import TypeEngine

from seqdedupe.databases import tables
from seqdedupe.databases.failures import Fault, ended, fault_of, lost_connection, told
from seqdedupe.databases.tables import MARIADB, bytes_type, text_type
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe_spark.stores import kinds
from seqdedupe_spark.stores.contract import (
    FORMAT_VERSION,
    Advance,
    Beside,
    Binding,
    OutputStore,
    Stored,
    Take,
    check_format,
    check_replacement,
)
from seqdedupe_spark.stores.kinds import (
    BAD_VALUES,
    Kind,
    bad_value,
    check_schema,
    check_table,
    first_bad,
    from_cells,
    in_batch,
    json_texts,
    kind_of,
)

# -- Arrow's types and values, as databases behind SQLAlchemy have them.

_UINT64_DIGITS = 20
_MICROSECONDS = 6


def declared(field: pa.Field) -> TypeEngine[Any]:
    """The type of a column that is made for the values of this one."""
    match kind_of(field):
        case Kind.BOOLEAN:
            return sa.Boolean()
        case Kind.INTEGER:
            return sa.Numeric(_UINT64_DIGITS, 0) if field.type == pa.uint64() else sa.BigInteger()
        case Kind.FLOAT:
            return sa.Double()
        case Kind.DECIMAL:
            return sa.Numeric(field.type.precision, field.type.scale)
        case Kind.BINARY:
            return bytes_type()
        case Kind.TIMESTAMP | Kind.LOCAL_TIMESTAMP as kind:
            exact = mysql.DATETIME(fsp=_MICROSECONDS)
            return sa.DateTime(timezone=kind is Kind.TIMESTAMP).with_variant(exact, *MARIADB)
        case Kind.DATE:
            return sa.Date()
        case _:
            return text_type()


def fits(field: pa.Field, there: TypeEngine[Any], is_mysql: bool) -> bool:
    """Whether a column of this type takes the values. A precision of its own rounds, as the database does."""
    try:
        python = there.python_type
    except NotImplementedError:
        return False
    match kind_of(field):
        case Kind.BOOLEAN:
            return python in (bool, int)
        case Kind.INTEGER:
            return python is int or (isinstance(there, sa.Numeric) and not isinstance(there, sa.Float))
        case Kind.FLOAT:
            wide = pa.types.is_float64(field.type)
            return isinstance(there, sa.Double) or (not wide and isinstance(there, sa.Float))
        case Kind.DECIMAL:
            # SQLAlchemy gives what MariaDB has in a DOUBLE as decimals, too.
            return isinstance(there, sa.Numeric) and not isinstance(there, sa.Float)
        case Kind.TEXT:
            return python is str
        case Kind.BINARY:
            return python is bytes
        case Kind.TIMESTAMP | Kind.LOCAL_TIMESTAMP as kind:
            return python is datetime.datetime and (
                is_mysql or getattr(there, "timezone", False) is (kind is Kind.TIMESTAMP)
            )
        case Kind.DATE:
            return python is datetime.date
        case Kind.JSON:
            return python is str or isinstance(there, sa.JSON)
    return True


def values(kind: Kind, array: pa.Array) -> list[object]:
    """The values for the driver. Raises one of `kinds.BAD_VALUES` for what Python, or JSON, does not have."""
    if kind is Kind.JSON:
        return list(json_texts(array))
    if kind is Kind.TIMESTAMP:
        # MariaDB's drivers leave the zone out, whichever it is.
        array = array.cast(pa.timestamp("us", "UTC"))
    elif kind is Kind.LOCAL_TIMESTAMP:
        array = array.cast(pa.timestamp("us"))
    return list(array.to_pylist())


MAX_NAME_CHARACTERS = 255
"""Of a job: MariaDB's indexes take no more."""

LOCK_TIMEOUT_SECONDS = 30
"""How long to wait for another transaction, where the database can be told (MariaDB and MySQL)."""

IDLE_TIMEOUT_SECONDS = 60
"""How long a transaction may stand still, where the database can be told (MariaDB)."""

_MYSQL_SESSION = (
    # Else a value that does not fit is cut, or becomes 0, with a warning.
    "SET SESSION sql_mode = 'TRADITIONAL,NO_AUTO_VALUE_ON_ZERO', time_zone = '+00:00', "
    f"innodb_lock_wait_timeout = {LOCK_TIMEOUT_SECONDS}"
    # In MariaDB alone: who changes a table waits no longer for a transaction whose process has stopped.
    f"/*M!100300 , idle_transaction_timeout = {IDLE_TIMEOUT_SECONDS} */"
)

_MYSQL_TRANSACTIONS = text(
    "SELECT COALESCE(e.transactions, 'NO'), COALESCE(e.xa, 'NO') FROM information_schema.tables t "
    "LEFT JOIN information_schema.engines e ON t.engine = e.engine "
    "WHERE t.table_schema = COALESCE(:schema, DATABASE()) AND t.table_name = :name"
)
"""Whether a table's engine has transactions, and commits them together with those of other engines."""

_CREATE_ATTEMPTS = 5
"""Of those who make the same table at once one does, and the others find it there when they look again."""

_NAMES_A_STATEMENT = 1000

METADATA = MetaData()

POSITIONS = tables.table(
    "seqdedupe_positions",
    METADATA,
    Column("job", tables.name_type(), primary_key=True),
    Column("topic", tables.name_type(), primary_key=True),
    Column("epoch", BigInteger, nullable=False),
    Column("incarnation", BigInteger, nullable=False),
    Column("message_index", BigInteger, nullable=False),
    Column("position", String(255), nullable=False),
)
WATERMARKS = tables.table(
    "seqdedupe_watermarks",
    METADATA,
    Column("job", tables.name_type(), primary_key=True),
    Column("topic", tables.name_type(), primary_key=True),
    Column("producer_name", tables.name_type(), primary_key=True),
    Column("sequence_id", BigInteger, nullable=False),
)
JOBS = tables.table(
    "seqdedupe_jobs",
    METADATA,
    Column("job", tables.name_type(), primary_key=True),
    Column("format_version", Integer, nullable=False),
    Column("output_table", tables.name_type(), nullable=False),
    Column("deduplicate", Boolean, nullable=False),
)


class SqlStore(OutputStore):
    """Rows and positions in one database, by an SQLAlchemy URL with the driver's name (`mysql+pymysql://…`).

    The database has to have transactions, and to say how many rows an UPDATE has found: of MariaDB and MySQL every
    table is looked at, of others it is believed. `write` holds all rows of a transaction in memory, and inserts them as
    the driver does many. Times with a zone are stored in UTC, maps, lists and structs as JSON. Raises INVALID_OPTION if
    the URL cannot be used, which never quotes a password.
    """

    def __init__(self, url: str) -> None:
        try:
            parsed = make_url(url)
            self._engine = create_engine(parsed, poolclass=NullPool, isolation_level="READ COMMITTED")
        except (ArgumentError, NoSuchModuleError, ImportError, ValueError):
            what = "the store's URL is none of SQLAlchemy's, or its driver is not installed"
            raise error(
                "INVALID_OPTION", what, hint="mysql+pymysql://user@host/database, and pip install pymysql"
            ) from None
        dialect = self._engine.dialect
        if dialect.name == "sqlite" or not dialect.supports_sane_rowcount:
            what = f"store: {dialect.name} does not say what a statement has changed, or is no server"
            raise error("UNSUPPORTED_STORE", what)
        self._is_mysql = dialect.name in tables.MARIADB
        self._is_postgres = dialect.name == "postgresql"
        self._place = parsed.render_as_string(hide_password=True)
        if self._is_mysql:
            event.listen(self._engine, "connect", _begin_session)

    def close(self) -> None:
        self._engine.dispose()

    def bind(self, job: str, binding: Binding) -> Binding:
        if len(job) > MAX_NAME_CHARACTERS:
            raise error("INVALID_OPTION", f"job: the name has more than {MAX_NAME_CHARACTERS} characters")
        new = {"job": job, "format_version": FORMAT_VERSION, "output_table": binding.table}
        with self._errors():
            self._make_own_tables()
            try:
                with self._engine.begin() as connection:
                    connection.execute(insert(JOBS).values(**new, deduplicate=binding.deduplicate))
            except IntegrityError:
                pass
            with self._engine.begin() as connection:
                stored = connection.execute(select(JOBS).where(JOBS.c.job == job)).one()
        check_format(stored.format_version, self._place)
        return Binding(stored.output_table, bool(stored.deduplicate))

    def _make_own_tables(self) -> None:
        tables.make_tables(self._engine, METADATA)
        with self._engine.begin() as connection:
            self._check_kept(connection, METADATA.tables)

    def _check_kept(self, connection: Connection, names: Iterable[str]) -> None:
        """Raises INVALID_OUTPUT if rows and positions would not be committed, and be there after a crash, together."""
        for name in names if self._is_mysql else ():
            schema, last = _split(name)
            row = connection.execute(_MYSQL_TRANSACTIONS, {"schema": schema, "name": last}).one_or_none()
            if row is not None and row != ("YES", "YES"):
                what = "no transactions" if row[0] != "YES" else "transactions that are not one with those of others"
                hint = f"ALTER TABLE {name} ENGINE = InnoDB"
                raise error("INVALID_OUTPUT", f"the table {name} has {what}", hint=hint)
        if self._is_postgres:
            quoted_names = [kinds.quoted(*kinds.split_name(name)) for name in names]
            asked = text(tables.POSTGRESQL_UNSAFE_TABLES.format(names=":names"))
            _refuse(connection.execute(asked, {"names": quoted_names}).first())

    def _check_fits(self, connection: Connection, name: str, schemas: Iterable[pa.Schema]) -> None:
        """Raises INVALID_OUTPUT if the table does not take such rows. Its columns stay as they are until the end of the
        transaction, in databases where reading a table locks what it is."""
        connection.execute(select(literal(1)).select_from(_named(name)).limit(0))
        of_schema, last = _split(name)
        found = inspect(connection).get_columns(last, of_schema)
        there = {one["name"]: kinds.Column(str(one["type"]), _is_required(one)) for one in found}
        types = {one["name"]: one["type"] for one in found}
        for schema in schemas:
            check_table(name, schema, there, lambda field, _: fits(field, types[field.name], self._is_mysql))

    def has_table(self, table: str) -> bool:
        schema, name = _split(table)
        with self._errors():
            return inspect(self._engine).has_table(name, schema)

    def prepare(self, table: str, schema: pa.Schema) -> None:
        of_schema, name = _split(table)
        check_schema(schema)
        columns = (Column(quoted_name(field.name, True), declared(field)) for field in schema)
        output = tables.table(quoted_name(name, True), MetaData(schema=of_schema), *columns)
        with self._errors():
            self._make_own_tables()
            self._create(output)
            with self._engine.begin() as connection:
                self._check_fits(connection, table, [schema])
                self._check_kept(connection, [table])

    def _create(self, output: Table) -> None:
        for attempt in range(1, _CREATE_ATTEMPTS + 1):
            try:
                output.create(self._engine, checkfirst=True)
                return
            except DBAPIError:
                if attempt == _CREATE_ATTEMPTS:
                    raise

    def positions(self, job: str) -> dict[str, Stored]:
        wanted = select(POSITIONS.c.topic, POSITIONS.c.epoch, POSITIONS.c.position).where(POSITIONS.c.job == job)
        with self._errors(), self._engine.begin() as connection:
            return {topic: from_cells(*rest) for topic, *rest in connection.execute(wanted)}

    def watermarks(self, job: str, topic: str) -> tuple[Stored | None, dict[str, int]]:
        # One statement sees one moment, also where two in a transaction do not.
        same = (WATERMARKS.c.job == POSITIONS.c.job) & (WATERMARKS.c.topic == POSITIONS.c.topic)
        columns = (POSITIONS.c.epoch, POSITIONS.c.position, WATERMARKS.c.producer_name, WATERMARKS.c.sequence_id)
        wanted = select(*columns).select_from(POSITIONS.outerjoin(WATERMARKS, same)).where(_of(POSITIONS, job, topic))
        with self._errors(), self._engine.begin() as connection:
            rows = connection.execute(wanted).all()
        if not rows:
            return None, {}
        found = {name: sequence_id for _, _, name, sequence_id in rows if name is not None}
        return from_cells(rows[0].epoch, rows[0].position), found

    def replace(self, job: str, topic: str, expected: Stored | None, new: Stored) -> bool:
        check_replacement(topic, expected, new)
        with self._errors():
            try:
                with self._engine.begin() as connection:
                    if expected is None:
                        connection.execute(insert(POSITIONS).values(job=job, topic=topic, **_cells(new)))
                    elif not _move(connection, job, topic, expected, new):
                        return False
                    connection.execute(delete(WATERMARKS).where(_of(WATERMARKS, job, topic)))
            except IntegrityError:
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
        collected = list(batches)
        changed = [advance.changed_watermarks() for advance in advances]
        others = beside and beside.rows()
        # In the same order by all: of two that move the same positions neither holds what the other waits for.
        moves = sorted(zip(advances, changed, strict=True), key=lambda one: one[0].range.topic)
        written = {table: collected} if any(map(len, collected)) else {}
        if beside and others:
            written[beside.table] = [others]
        with self._errors(), self._engine.begin() as connection:
            # What a table is, is looked at here, and stays so from here on.
            for name, some in written.items():
                self._check_fits(connection, name, {one.schema for one in some})
            for own in (POSITIONS, WATERMARKS):
                connection.execute(select(literal(1)).select_from(own).limit(0))
            if self._is_mysql:
                self._check_kept(connection, [*written, POSITIONS.name, WATERMARKS.name])
            for number, batch in enumerate(collected):
                if len(batch):
                    with in_batch(number):
                        _insert(connection, table, batch)
            if beside and others:
                _insert(connection, beside.table, others)
            for advance, watermarks in moves:
                start, end, topic = advance.range.start, advance.range.end, advance.range.topic
                if not _move(connection, job, topic, Stored(start, advance.epoch), Stored(end, advance.epoch)):
                    raise error(
                        "POSITION_CHANGED", f"the position of job {job!r} is no longer the start of {advance.range}"
                    )
                _raise(connection, job, topic, watermarks)
            if self._is_postgres:
                _refuse(connection.exec_driver_sql(tables.POSTGRESQL_UNSAFE_WRITES).first())
        return sum(map(len, collected))

    @contextmanager
    def trial(self, table: str) -> Iterator[Take]:
        with self._errors(), self._engine.connect() as connection:

            def take(rows: pa.RecordBatch) -> SeqdedupeError | None:
                try:
                    with connection.begin_nested():
                        connection.execute(*_insertion(table, rows))
                        if self._is_postgres:
                            connection.execute(text("SET CONSTRAINTS ALL IMMEDIATE"))
                except DBAPIError as e:
                    if fault_of(e) is not Fault.MESSAGE and not ended(e):
                        raise
                    if lost_connection(e):
                        # The next rows are put into a new transaction, on another connection.
                        connection.invalidate()
                        connection.rollback()
                    failure = self._error(e)
                    failure.__cause__ = e
                    return failure
                return None

            yield take

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except SQLAlchemyError as e:
            raise self._error(e) from e

    def _error(self, cause: SQLAlchemyError) -> SeqdedupeError:
        if fault_of(cause) is Fault.MESSAGE:
            return error("INVALID_OUTPUT", f"the database refuses: {told(cause)}")
        return error("OUTPUT_UNAVAILABLE", f"the database {self._place} cannot be used: {told(cause)}")


def _refuse(found: Any) -> None:
    if found:
        what = f"the table {found[0]} is {found[1]}: after a crash it would not hold what the other tables hold"
        raise error("INVALID_OUTPUT", what, hint=tables.cure_of(*found))


def _begin_session(connection: Any, _record: object) -> None:
    with connection.cursor() as cursor:
        cursor.execute(_MYSQL_SESSION)


def _split(name: str) -> tuple[str | None, str]:
    *schema, last = kinds.split_name(name)
    return (schema[0] if schema else None), last


def _named(name: str, columns: Sequence[str] = ()) -> TableClause:
    """A table of this name, with these columns of it."""
    schema, last = _split(name)
    return table(quoted_name(last, True), *(column(quoted_name(one, True)) for one in columns), schema=schema)


def _is_required(found: Any) -> bool:
    has_default = found.get("default") is not None or found.get("autoincrement") is True or "computed" in found
    return not found["nullable"] and not has_default and "identity" not in found


def _cells(stored: Stored) -> dict[str, object]:
    return dict(zip(("epoch", "incarnation", "message_index", "position"), kinds.to_cells(stored), strict=True))


def _of(table: Table, job: str, topic: str) -> Any:
    return (table.c.job == job) & (table.c.topic == topic)


def _move(connection: Connection, job: str, topic: str, expected: Stored, new: Stored) -> bool:
    """The compare-and-set: whether what was expected was there. The position is locked from then on."""
    same = [POSITIONS.c[name] == cell for name, cell in _cells(expected).items()]
    moved = update(POSITIONS).where(_of(POSITIONS, job, topic), *same).values(**_cells(new))
    return connection.execute(moved).rowcount == 1


def _raise(connection: Connection, job: str, topic: str, watermarks: Any) -> None:
    names = list(watermarks)
    for first in range(0, len(names), _NAMES_A_STATEMENT):
        some = names[first : first + _NAMES_A_STATEMENT]
        connection.execute(delete(WATERMARKS).where(_of(WATERMARKS, job, topic), WATERMARKS.c.producer_name.in_(some)))
        rows = [{"job": job, "topic": topic, "producer_name": one, "sequence_id": watermarks[one]} for one in some]
        connection.execute(insert(WATERMARKS), rows)


def _insertion(name: str, batch: pa.RecordBatch) -> tuple[Insert, list[dict[str, Any]]]:
    """The statement, and its parameters for each row."""
    names = batch.schema.names
    into = _named(name, names)
    # Parameters by number: a column's name may be anything.
    statement = insert(into).values({into.c[one]: bindparam(f"p{n}") for n, one in enumerate(names)})
    keys = [f"p{n}" for n in range(len(names))]
    return statement, [dict(zip(keys, row, strict=True)) for row in zip(*_columns(batch), strict=True)]


def _insert(connection: Connection, name: str, batch: pa.RecordBatch) -> None:
    """All rows. Raises INVALID_OUTPUT with the row that the database refuses."""
    statement, rows = _insertion(name, batch)

    def take(some: Sequence[dict[str, Any]]) -> DBAPIError | None:
        """Why the database does not take these, after which none of them is there."""
        try:
            with connection.begin_nested():
                connection.execute(statement, some)
        except DBAPIError as e:
            if fault_of(e) is not Fault.MESSAGE:
                raise
            return e
        return None

    failure = take(rows)
    if failure is not None:
        row = _first_refused(rows, take)
        if take(rows[row : row + 1]) is None:
            raise error("OUTPUT_UNAVAILABLE", f"the database takes what it has just refused: {told(failure)}")
        raise error("INVALID_OUTPUT", f"the database refuses: {told(failure)}", row=row) from failure


def _first_refused(rows: Sequence[dict[str, Any]], take: Callable[[Sequence[dict[str, Any]]], object]) -> int:
    """The first row that is not taken, of rows of which one is not. Those before it are taken: it may be one of them
    that it cannot stand beside."""
    first, count = 0, len(rows)
    while count > 1:
        half = count // 2
        if take(rows[first : first + half]) is None:
            first, count = first + half, count - half
        else:
            count = half
    return first


def _columns(batch: pa.RecordBatch) -> list[list[object]]:
    columns: list[list[object]] = []
    for field, array in zip(batch.schema, batch.columns, strict=True):
        convert = partial(values, kinds.kind_of(field))
        try:
            columns.append(convert(array))
        except BAD_VALUES as e:
            raise bad_value(field.name, first_bad(convert, array), e) from e
    return columns
