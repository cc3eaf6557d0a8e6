"""Reads the rows of a database query, sorted by a column of integers, up to a bound. No transaction can add a row below
the bound any more."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from seqdedupe.cli.record_source import SourceRecord
from seqdedupe.cli.record_values import BadValueError, json_of, key_of, sequence_id_of, shown
from seqdedupe.command import needing
from seqdedupe.databases.failures import Fault, codes_of, fault_of, told
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.limits import MAX_PAYLOAD_BYTES

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine, Row, Select

_PAGE_ROWS = 1000
"""The number of rows read at once. Each read is a separate transaction, so no transaction stays open while messages are
sent."""

_POLL_SECONDS = 0.05
_TELL_SECONDS = 1.0
"""After waiting this long for other transactions, the command prints that."""

_HINT_QUERY = "Correct the query, or name columns of the query."
_HINT_SETTLED = (
    "If each transaction commits within SECONDS after it takes its sequence ID, give --settled-after SECONDS. "
    "If a transaction commits later, its rows are lost (docs/reference/cli.md)."
)

_WRITING_STATE = "25006"
"""PostgreSQL's SQLSTATE for a write in a transaction that only reads."""

# -- PostgreSQL. A transaction that inserts a row locks the table before the row takes a number from a sequence, and
# until its end. So first read the highest number, and then find the transactions with such a lock. When all of these
# have ended, every lower number is committed or will never be. Transaction IDs do not show that: a row takes its number
# before its transaction has an ID.
#
# The tables of the query are the tables on which this transaction itself has locks, and the tables of which these are
# partitions: an insert locks the partition after the row has its number. A prepared transaction continues under its own
# name. In older versions, and after a restart, it continues under another name that begins with -1.

_OWN_RELATIONS = (
    "WITH own AS (SELECT DISTINCT relation FROM pg_locks WHERE locktype = 'relation' AND pid = pg_backend_pid() "
    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())) "
    "SELECT relation::bigint FROM own "
    "UNION SELECT relid::oid::bigint FROM own, pg_partition_ancestors(relation::regclass) AS ancestors(relid)"
)
_WRITES = (
    "locktype = 'relation' AND relation::bigint = ANY (:relations) AND mode = 'RowExclusiveLock' AND granted "
    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)
_WRITERS = f"SELECT DISTINCT virtualtransaction FROM pg_locks WHERE {_WRITES}"
_LEFT = (
    "SELECT DISTINCT coalesce('process ' || pid, 'a prepared transaction') FROM pg_locks "
    f"WHERE virtualtransaction = ANY (:writers) OR (virtualtransaction LIKE '-1/%' AND {_WRITES}) ORDER BY 1"
)
_FOREIGN = "SELECT relname FROM pg_class WHERE oid::bigint = ANY (:relations) AND relkind IN ('f', 'm') LIMIT 1"
# A sequence belongs to a column (serial, identity), or a column's default uses the sequence.
_DISORDERLY = (
    "SELECT seqrelid::regclass::text FROM pg_sequence WHERE (seqcache > 1 OR seqincrement < 0 OR seqcycle) AND ("
    "EXISTS (SELECT FROM pg_depend WHERE classid = 'pg_class'::regclass AND objid = seqrelid "
    "AND refclassid = 'pg_class'::regclass AND refobjid::bigint = ANY (:relations)) "
    "OR EXISTS (SELECT FROM pg_depend JOIN pg_attrdef ON pg_attrdef.oid = objid "
    "WHERE classid = 'pg_attrdef'::regclass AND refclassid = 'pg_class'::regclass AND refobjid = seqrelid "
    "AND adrelid::bigint = ANY (:relations))) LIMIT 1"
)
_SUBSCRIBED = "SELECT srrelid::regclass::text FROM pg_subscription_rel WHERE srrelid::bigint = ANY (:relations) LIMIT 1"


class QuerySource:
    """Returns the rows whose sequence ID is at or above `after` as records. The payload of a record is a JSON object
    with the row's columns.

    The source also returns a row that is committed later than a row with a higher ID. In SQLite, one transaction writes
    at a time. In PostgreSQL, the source waits for the transactions that have written to the query's tables; rows must
    take their IDs from a sequence when they are inserted. In other databases, and in a replica of PostgreSQL, each
    transaction must commit within `settled_after_seconds` after it has taken an ID.

    Errors of the query or its rows are INVALID_SOURCE, NOT_ASCENDING or MESSAGE_TOO_LARGE. If the database cannot be
    used now, the error is SOURCE_UNAVAILABLE.
    """

    numbers_are_ids = False
    keeps_records = False
    noun = "query"
    unfinished_line = None
    size_bytes = read_bytes = 0

    def __init__(
        self,
        url: str,
        query: str,
        *,
        sequence_id_column: str,
        key_column: str | None = None,
        settled_after_seconds: float | None = None,
        on_waiting: Callable[[SeqdedupeError], None],
    ) -> None:
        self.after = -1
        self.before_waiting: Callable[[], None] = lambda: None
        self._query = query.strip().removesuffix(";").replace(":", "\\:")  # otherwise SQLAlchemy sees parameters there
        self._id_column = sequence_id_column
        self._key_column = key_column
        self._settled_after_seconds = settled_after_seconds
        self._on_waiting = on_waiting
        self._names: list[str] = []
        self._engine = _engine(url)
        self._connection: Connection | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._connection is not None:
            self._connection.close()
        self._engine.dispose()

    def check(self) -> None:
        """Check the columns, look for rows without an ID, and choose how to find the bound below which no row can be
        added."""
        from sqlalchemy import column, text

        with self._transaction() as connection:
            result = connection.execute(self._select(text("*")).where(text("1 = 0")))
            self._names = list(result.keys())
            for name in self._names:
                if self._names.count(name) > 1:
                    raise _bad(f"has the column {name!r} more than once")
            for wanted in (self._id_column, self._key_column):
                if wanted is not None and wanted not in self._names:
                    raise _bad(f"has no column {wanted!r}: it has {', '.join(self._names)}")
            if connection.execute(self._select(text("1")).where(column(self._id_column).is_(None)).limit(1)).first():
                raise _bad(f"has a row whose sequence ID in {self._id_column!r} is NULL")
        if self._engine.dialect.name == "postgresql":
            self._look_at_postgresql()
        elif self._engine.dialect.name != "sqlite" and self._settled_after_seconds is None:
            what = f"cannot be published from {self._engine.dialect.name}: rows that are committed late would be missed"
            raise _bad(what, _HINT_SETTLED)

    def __iter__(self) -> Iterator[SourceRecord]:
        bound = self._settled_bound()
        if bound is None:
            return
        lower = None if self.after < 0 else min(self.after, bound)
        number, last = 0, -1
        while True:
            rows = self._page(lower, bound)
            for place, row in enumerate(rows):
                record = self._record(number, row)
                if record.sequence_id == last:
                    if place == 0:
                        continue  # this page begins again with this row, so that a second one is seen
                    raise error("NOT_ASCENDING", f"the query has two rows with sequence ID {last}", hint=_HINT_TWICE)
                last = record.sequence_id
                number += 1
                yield record
            if len(rows) <= _PAGE_ROWS:
                return
            lower = last

    def _record(self, number: int, row: "Row[Any]") -> SourceRecord:
        values: Sequence[Any] = tuple(row)
        members = dict(zip(self._names, values, strict=True))
        try:
            sequence_id = sequence_id_of(members[self._id_column], self._id_column)
            key = None if self._key_column is None else key_of(members[self._key_column], self._key_column)
            payload = json_of(self._names, values)
        except BadValueError as e:
            raise _bad(f"has a row with {self._id_column} = {shown(members[self._id_column])} that {e}") from e
        if len(payload) > MAX_PAYLOAD_BYTES:
            what = f"the query's row with sequence ID {sequence_id} is longer as JSON than a payload may be"
            raise error("MESSAGE_TOO_LARGE", f"{what}: {MAX_PAYLOAD_BYTES} bytes")
        return SourceRecord(number, sequence_id, payload, key, number + 1)

    def _page(self, lower: int | None, bound: int) -> "Sequence[Row[Any]]":
        from sqlalchemy import column, text

        ids: Any = column(self._id_column)
        select = self._select(text("*")).where(ids <= bound).order_by(ids).limit(_PAGE_ROWS + 1)
        with self._transaction() as connection:
            return connection.execute(select if lower is None else select.where(ids >= lower)).all()

    def _settled_bound(self) -> int | None:
        """Return the highest ID below which no transaction can add a row any more; None if there are no rows."""
        writers, relations = list[str](), list[int]()
        with self._transaction() as connection:
            bound = self._highest(connection)
            if self._engine.dialect.name == "postgresql":
                relations = self._relations(connection)
                writers = self._writers(connection, relations)
        if bound is not None and relations:
            self._wait_for(writers, relations)
        if bound is not None and self._settled_after_seconds:
            time.sleep(self._settled_after_seconds)
        return bound

    def _highest(self, connection: "Connection") -> int | None:
        from sqlalchemy import column, func

        highest = connection.execute(self._select(func.max(column(self._id_column)))).scalar()
        if highest is not None and (type(highest) is not int or highest < 0):
            what = (
                f"has {shown(highest)} as the highest sequence ID in {self._id_column!r}: it should be a whole number"
            )
            raise _bad(f"{what} from 0 to 2^63 - 1")
        return highest

    def _look_at_postgresql(self) -> None:
        with self._transaction() as connection:
            self._highest(connection)  # which takes the locks
            relations = self._relations(connection)
            for name in self._run(connection, _DISORDERLY, relations=relations):
                what = f"takes IDs from the sequence {name}, which does not give them in order"
                raise _bad(what, "Let the sequence have CACHE 1, rise and not cycle: ALTER SEQUENCE … CACHE 1.")
            if self._settled_after_seconds is not None:
                return
            if self._run(connection, "SELECT pg_is_in_recovery()") == [True]:
                raise _bad(
                    "cannot be published from a replica: it does not show the transactions that write", _HINT_SETTLED
                )
            for name in self._run(connection, _FOREIGN, relations=relations):
                what = f"reads {name}, a foreign table or materialized view: its writers are not known"
                raise _bad(what, _HINT_SETTLED)
            for name in self._run(connection, _SUBSCRIBED, relations=relations):
                what = f"reads {name}, which a subscription fills: its rows arrive in the order of their commits"
                raise _bad(what, _HINT_SETTLED)

    def _relations(self, connection: "Connection") -> list[int]:
        """Return the tables of the query, which this transaction has just read."""
        return self._run(connection, _OWN_RELATIONS)

    def _writers(self, connection: "Connection", relations: list[int]) -> list[str]:
        """Return the open transactions that have written to these tables."""
        return self._run(connection, _WRITERS, relations=relations)

    def _wait_for(self, writers: list[str], relations: list[int]) -> None:
        """Wait until these transactions have ended."""
        tell_at = time.monotonic() + _TELL_SECONDS
        while True:
            with self._transaction() as connection:
                left = self._run(connection, _LEFT, writers=writers, relations=relations)
            if not left:
                return
            if time.monotonic() >= tell_at:
                tell_at = float("inf")
                what = f"rows wait for transactions that have written to the query's tables: {', '.join(left)}"
                self._on_waiting(error("SOURCE_UNAVAILABLE", what))
            time.sleep(_POLL_SECONDS)

    def _run(self, connection: "Connection", statement: str, **parameters: Any) -> list[Any]:
        from sqlalchemy import text

        escaped = statement.replace("::", "\\:\\:")
        return list(connection.execute(text(escaped), parameters).scalars())

    def _select(self, what: Any) -> "Select[Any]":
        from sqlalchemy import select, text

        return select(what).select_from(text(f"(\n{self._query}\n) rows_of_query"))

    @contextmanager
    def _transaction(self) -> Iterator["Connection"]:
        from sqlalchemy.exc import SQLAlchemyError

        try:
            if self._connection is None:
                self._connection = self._engine.connect()
                if self._engine.dialect.name == "sqlite":
                    # Before it has read the schema, SQLite reports a missing column as a change of the schema.
                    self._run(self._connection, "SELECT 1 FROM sqlite_master LIMIT 1")
            yield self._connection
            self._connection.rollback()
        except SQLAlchemyError as e:
            if fault_of(e) is Fault.MESSAGE or codes_of(e)[0] == _WRITING_STATE:
                raise _bad(f"is refused by the database: {told(e)}") from e
            raise error("SOURCE_UNAVAILABLE", f"the query's database cannot be used: {told(e)}") from e


_HINT_TWICE = "A join may repeat rows. Correct the query, or name a column with a different value in each row."


def _bad(what: str, hint: str = _HINT_QUERY) -> SeqdedupeError:
    return error("INVALID_SOURCE", f"the query {what}", hint=hint)


def _engine(url: str) -> "Engine":
    """Return an engine for the URL. Raises INVALID_SOURCE or INVALID_CONFIGURATION, which quote no password."""
    with needing("a query needs", "services"):
        from sqlalchemy import create_engine
        from sqlalchemy.exc import ArgumentError

        from seqdedupe.databases.tables import UrlError, missing_file, url_of
    hint = "Give a URL of SQLAlchemy, such as postgresql://user@host/database, and install the database's driver."
    try:
        parsed = url_of(url)
        if parsed.drivername == "postgresql":
            parsed = parsed.set(drivername="postgresql+psycopg")
        if parsed.get_backend_name() == "sqlite" and (what := missing_file(parsed.database)):
            raise error("INVALID_SOURCE", what, hint="Name the query's database.")
        is_postgresql = parsed.get_backend_name() == "postgresql"
        return create_engine(parsed, execution_options={"postgresql_readonly": True} if is_postgresql else {})
    except UrlError as e:
        raise error("INVALID_SOURCE", f"the URL of the query's database {e}", hint=hint) from None
    except ArgumentError:  # SQLAlchemy knows no such database
        raise error("INVALID_SOURCE", "the URL of the query's database cannot be read", hint=hint) from None
    except ModuleNotFoundError as e:
        what = f"the query's database needs {e.name}, which is not installed"
        raise error("INVALID_CONFIGURATION", what, hint=hint) from e
