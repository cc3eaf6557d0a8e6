"""The store for MariaDB, MySQL, and every other database with transactions that SQLAlchemy supports. It is general, but
slow."""

import datetime
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.dialects import mysql
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.sql import quoted_name
from sqlalchemy.types import TypeEngine

from seqdedupe.databases import tables
from seqdedupe.databases.failures import Fault, ended, fault_of, lost_connection, told
from seqdedupe.databases.tables import MARIADB, UrlError, bytes_type, name_type, text_type, url_of
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe_spark.stores.contract import Advance, Binding, Column, Kind, Take, Watermarks, converted, kind_of
from seqdedupe_spark.stores.sql import (
    OWN_TABLES,
    POSITIONS,
    WATERMARKS,
    SqlStore,
    Values,
    json_texts,
    quoted,
    split_name,
)

# -- The conversion of Arrow's types and values for SQLAlchemy.

_UINT64_DIGITS = 20
_MICROSECONDS = 6


def declared(field: pa.Field) -> TypeEngine[Any]:
    """Return the type of a new column that holds the values of this field."""
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
    """Whether a column of this type accepts the values of this field. If the column has a lower precision than the
    values, the database rounds the values."""
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
            # SQLAlchemy returns the values of a MariaDB DOUBLE as decimals, too.
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


def _values(kind: Kind, array: pa.Array) -> list[object]:
    """Return the values for the driver. Raises one of `BAD_VALUES` for a value that cannot be a Python value or
    JSON."""
    if kind is Kind.JSON:
        return list(json_texts(array))
    if kind is Kind.TIMESTAMP:
        # MariaDB's drivers drop time zones, so times are converted to UTC first.
        array = array.cast(pa.timestamp("us", "UTC"))
    elif kind is Kind.LOCAL_TIMESTAMP:
        array = array.cast(pa.timestamp("us"))
    return list(array.to_pylist())


MAX_NAME_CHARACTERS = 255
"""The longest name of a job. MariaDB's indexes do not accept more characters."""

LOCK_TIMEOUT_SECONDS = 30
"""The longest wait for another transaction, in databases that have such a setting (MariaDB and MySQL)."""

IDLE_TIMEOUT_SECONDS = 60
"""The longest idle time of a transaction, in databases that have such a setting (MariaDB)."""

_MYSQL_SESSION = (
    # Without this mode, the database truncates a value that does not fit, or stores 0, and only warns.
    "SET SESSION sql_mode = 'TRADITIONAL,NO_AUTO_VALUE_ON_ZERO', time_zone = '+00:00', "
    f"innodb_lock_wait_timeout = {LOCK_TIMEOUT_SECONDS}"
    # Only MariaDB reads this setting. With it, a session that changes a table waits at most this time for the
    # transaction of a suspended process.
    f"/*M!100300 , idle_transaction_timeout = {IDLE_TIMEOUT_SECONDS} */"
)

_MYSQL_TRANSACTIONS = sa.text(
    "SELECT COALESCE(e.transactions, 'NO'), COALESCE(e.xa, 'NO') FROM information_schema.tables t "
    "LEFT JOIN information_schema.engines e ON t.engine = e.engine "
    "WHERE t.table_schema = COALESCE(:schema, DATABASE()) AND t.table_name = :name"
)
"""Whether a table's engine has transactions, and whether its changes are committed together with the changes in tables
of other engines."""

_CREATE_ATTEMPTS = 5
"""If several processes create the same table at once, one process succeeds. The others find the table when they try
again."""

_NAMES_A_STATEMENT = 1000

_OWN_TYPES: dict[str, TypeEngine[Any]] = {
    "name": name_type(),
    "position": sa.String(255),
    "bigint": sa.BigInteger(),
    "integer": sa.Integer(),
    "boolean": sa.Boolean(),
}

METADATA = sa.MetaData()
for _name, (_key, _kinds) in OWN_TABLES.items():
    _columns = [
        sa.Column(one, _OWN_TYPES[kind], primary_key=place < _key, nullable=False)
        for place, (one, kind) in enumerate(_kinds.items())
    ]
    tables.table(_name, METADATA, *_columns)
_WATERMARKS = METADATA.tables[WATERMARKS]

_PARAMETERS: dict[str, TypeEngine[Any]] = {
    **dict.fromkeys(("job", "topic", "table"), name_type()),
    "drops": sa.Boolean(),
}
"""The types of statement parameters that SQLAlchemy cannot derive from the Python value."""


class GeneralStore(SqlStore[sa.Connection]):
    """Rows and positions in one database, given by an SQLAlchemy URL with the driver's name (`mysql+pymysql://…`).

    The database must have transactions, and must report the number of rows that an UPDATE has matched. In MariaDB and
    MySQL, every table is checked for transactions; other databases are not checked. `write` holds all rows of a
    transaction in memory, and inserts many rows with one call of the driver. Times with a zone are stored in UTC. Maps,
    lists and structs are stored as JSON. Raises INVALID_OPTION if the URL cannot be used. The error never shows a
    password.
    """

    raises = (SQLAlchemyError,)

    def __init__(self, url: str) -> None:
        try:
            parsed = url_of(url)
            self._engine = sa.create_engine(parsed, poolclass=sa.NullPool, isolation_level="READ COMMITTED")
        except UrlError as e:
            raise error("INVALID_OPTION", f"the store's URL {e}") from None
        except (ArgumentError, NoSuchModuleError, ImportError, ValueError):
            what = "the store's URL is invalid for SQLAlchemy, or its driver is not installed"
            raise error(
                "INVALID_OPTION",
                what,
                hint="For example, use mysql+pymysql://user@host/database, and pip install pymysql.",
            ) from None
        dialect = self._engine.dialect
        if dialect.name == "sqlite" or not dialect.supports_sane_rowcount:
            what = f"store: {dialect.name} does not report the number of changed rows, or is not a server"
            raise error("UNSUPPORTED_STORE", what)
        self._is_mysql = dialect.name in tables.MARIADB
        self._is_postgres = dialect.name == "postgresql"
        shown = parsed.render_as_string(hide_password=True)
        super().__init__(f"the database {shown}", shown)
        if self._is_mysql:
            sa.event.listen(self._engine, "connect", _begin_session)

    def close(self) -> None:
        self._engine.dispose()

    def bind(self, job: str, binding: Binding) -> Binding:
        if len(job) > MAX_NAME_CHARACTERS:
            raise error("INVALID_OPTION", f"job: the name has more than {MAX_NAME_CHARACTERS} characters")
        return super().bind(job, binding)

    @contextmanager
    def _transaction(self) -> Iterator[sa.Connection]:
        with self._errors(), self._engine.begin() as connection:
            yield connection

    _reading = _transaction

    @contextmanager
    def _making(self, table: str | None = None, schema: pa.Schema | None = None) -> Iterator[sa.Connection]:
        with self._errors():
            tables.make_tables(self._engine, METADATA)
            if table is not None:
                self._create(table, schema or pa.schema([]))
        with self._transaction() as connection:
            self._check_kept(connection, OWN_TABLES)
            yield connection

    def _create(self, table: str, schema: pa.Schema) -> None:
        of_schema, name = _split(table)
        columns = (sa.Column(quoted_name(field.name, True), declared(field)) for field in schema)
        output = tables.table(quoted_name(name, True), sa.MetaData(schema=of_schema), *columns)
        for attempt in range(1, _CREATE_ATTEMPTS + 1):
            try:
                output.create(self._engine, checkfirst=True)
                return
            except DBAPIError:
                if attempt == _CREATE_ATTEMPTS:
                    raise

    def _execute(self, connection: sa.Connection, statement: str, values: Values) -> Any:
        typed = (sa.bindparam(name, type_=kind) for name, kind in _PARAMETERS.items() if name in values)
        return connection.execute(sa.text(statement).bindparams(*typed), values)

    def _rows(self, connection: sa.Connection, statement: str, **values: object) -> list[Any]:
        # MariaDB returns names as bytes.
        rows = super()._rows(connection, statement, **values)
        return [tuple(cell.decode() if isinstance(cell, bytes) else cell for cell in row) for row in rows]

    def _add(self, connection: sa.Connection, statement: str, values: Mapping[str, object]) -> bool:
        try:
            with connection.begin_nested():
                self._execute(connection, statement, values)
        except IntegrityError:
            return False
        return True

    def _check_kept(self, connection: sa.Connection, names: Iterable[str]) -> None:
        """Raise INVALID_OUTPUT if rows and positions would not be committed together, or would not survive a crash
        together."""
        for name in names if self._is_mysql else ():
            schema, last = _split(name)
            row = connection.execute(_MYSQL_TRANSACTIONS, {"schema": schema, "name": last}).one_or_none()
            if row is not None and row != ("YES", "YES"):
                what = (
                    "no transactions"
                    if row[0] != "YES"
                    else "transactions that are separate from those of other tables"
                )
                hint = f"ALTER TABLE {name} ENGINE = InnoDB"
                raise error("INVALID_OUTPUT", f"the table {name} has {what}", hint=hint)
        if self._is_postgres:
            quoted_names = [quoted(*split_name(name)) for name in names]
            asked = sa.text(tables.POSTGRESQL_UNSAFE_TABLES.format(names=":names"))
            tables.check_outlives_a_crash(connection.execute(asked, {"names": quoted_names}).first())

    def _check_fits(self, connection: sa.Connection, table: str, schemas: Iterable[pa.Schema]) -> None:
        # In databases where reading a table locks its definition, this read keeps the columns unchanged until the
        # transaction ends.
        connection.execute(sa.select(sa.literal(1)).select_from(_named(table)).limit(0))
        super()._check_fits(connection, table, schemas)

    def _columns_of(self, connection: sa.Connection, table: str) -> dict[str, Column]:
        schema, name = _split(table)
        found = sa.inspect(connection).get_columns(name, schema)
        return {one["name"]: Column(one["type"], _is_required(one)) for one in found}

    def _fits(self, field: pa.Field, there: Any) -> bool:
        return fits(field, there, self._is_mysql)

    def has_table(self, table: str) -> bool:
        schema, name = _split(table)
        with self._reading() as connection:
            return sa.inspect(connection).has_table(name, schema)

    def _look_first(
        self, connection: sa.Connection, job: str, tables: Sequence[str], advances: Sequence[Advance]
    ) -> None:
        for name in (*tables, POSITIONS, WATERMARKS):
            connection.execute(sa.select(sa.literal(1)).select_from(_named(name)).limit(0))
        if self._is_mysql:
            self._check_kept(connection, [*tables, POSITIONS, WATERMARKS])

    def _look_last(self, connection: sa.Connection) -> None:
        if self._is_postgres:
            tables.check_outlives_a_crash(connection.exec_driver_sql(tables.POSTGRESQL_UNSAFE_WRITES).first())

    def _insert(self, connection: sa.Connection, table: str, batch: pa.RecordBatch) -> None:
        statement, rows = _insertion(table, batch)

        def take(some: Sequence[dict[str, Any]]) -> DBAPIError | None:
            """Insert these rows. If the database refuses the rows, insert no row, and return the reason."""
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
                raise error("OUTPUT_UNAVAILABLE", f"the database now accepts what it has just refused: {told(failure)}")
            raise error("INVALID_OUTPUT", f"the database refuses: {told(failure)}", row=row) from failure

    def _raise(self, connection: sa.Connection, job: str, topic: str, watermarks: Watermarks) -> None:
        names, mine = list(watermarks), _WATERMARKS.c
        for first in range(0, len(names), _NAMES_A_STATEMENT):
            some = names[first : first + _NAMES_A_STATEMENT]
            of_some = (mine.job == job) & (mine.topic == topic) & mine.producer_name.in_(some)
            connection.execute(sa.delete(_WATERMARKS).where(of_some))
            rows = [{"job": job, "topic": topic, "producer_name": one, "sequence_id": watermarks[one]} for one in some]
            connection.execute(sa.insert(_WATERMARKS), rows)

    @contextmanager
    def trial(self, table: str) -> Iterator[Take]:
        with self._errors(), self._engine.connect() as connection:

            def take(rows: pa.RecordBatch) -> SeqdedupeError | None:
                try:
                    with connection.begin_nested():
                        connection.execute(*_insertion(table, rows))
                        if self._is_postgres:
                            connection.execute(sa.text("SET CONSTRAINTS ALL IMMEDIATE"))
                except DBAPIError as e:
                    if fault_of(e) is not Fault.MESSAGE and not ended(e):
                        raise
                    if lost_connection(e):
                        # The next rows need a new transaction on a new connection.
                        connection.invalidate()
                        connection.rollback()
                    failure = self._error(e)
                    failure.__cause__ = e
                    return failure
                return None

            yield take


def _begin_session(connection: Any, _record: object) -> None:
    with connection.cursor() as cursor:
        cursor.execute(_MYSQL_SESSION)


def _split(name: str) -> tuple[str | None, str]:
    *schema, last = split_name(name)
    return (schema[0] if schema else None), last


def _named(name: str, columns: Sequence[str] = ()) -> sa.TableClause:
    """Return a reference to the table of this name, with these of its columns."""
    schema, last = _split(name)
    return sa.table(quoted_name(last, True), *(sa.column(quoted_name(one, True)) for one in columns), schema=schema)


def _is_required(found: Any) -> bool:
    has_default = found.get("default") is not None or found.get("autoincrement") is True or "computed" in found
    return not found["nullable"] and not has_default and "identity" not in found


def _insertion(table: str, batch: pa.RecordBatch) -> tuple[sa.Insert, list[dict[str, Any]]]:
    """Return the INSERT statement, and its parameters for each row."""
    names = batch.schema.names
    into = _named(table, names)
    # Parameters are named by number, because a column's name may contain any character.
    statement = sa.insert(into).values({into.c[one]: sa.bindparam(f"p{n}") for n, one in enumerate(names)})
    keys = [f"p{n}" for n in range(len(names))]
    columns = [
        converted(field.name, partial(_values, kind_of(field)), array)
        for field, array in zip(batch.schema, batch.columns, strict=True)
    ]
    return statement, [dict(zip(keys, row, strict=True)) for row in zip(*columns, strict=True)]


def _first_refused(rows: Sequence[dict[str, Any]], take: Callable[[Sequence[dict[str, Any]]], object]) -> int:
    """Return the number of the first row that `take` refuses. At least one row must be refused. The earlier rows are
    inserted, because the refused row may conflict with an earlier row."""
    first, count = 0, len(rows)
    while count > 1:
        half = count // 2
        if take(rows[first : first + half]) is None:
            first, count = first + half, count - half
        else:
            count = half
    return first
