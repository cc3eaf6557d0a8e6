"""An outbox in PostgreSQL. The server returns each page as one row with a few long values. The relay keeps the data in
columns, and makes no Python object for each row of the outbox."""

import secrets
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import psycopg
from psycopg import Connection, sql
from sqlalchemy.engine import URL

from seqdedupe.batch import Binary, Int64s
from seqdedupe.databases.tables import CONNECTION, POSTGRESQL_UNSAFE_TABLES, cure_of
from seqdedupe.limits import MAX_PAYLOAD_BYTES, NO_SEQUENCE_ID
from seqdedupe.services.outbox.store import (
    ASIDE_TABLE,
    COLUMNS,
    ORDINAL_BITS,
    PAGE_BYTES,
    PAGE_ROWS,
    SEQUENCE_ID,
    TABLE,
    TOKEN_TABLE,
    Lag,
    OutboxState,
    OutboxStore,
    RowPage,
    bad_outbox,
    changed,
    check_columns,
    check_names,
    converted_errors,
    page_of,
    unavailable,
)
from seqdedupe.services.outbox.table import CHANNEL, DELETED, ID_TYPES, NUMBERING, POSTGRES_TRIGGERS, RELAY_SETTING

# -- The number up to which all rows of an outbox in PostgreSQL are there that ever will be.
# A row takes its number from a sequence when it is inserted, and its transaction commits later. So row 7 may be
# committed before row 6. A relay that has read row 7 would then miss row 6, unless the relay knows that no open
# transaction has row 6.
#
# A transaction gets an ID before it takes a number. So first read the last number taken, and then the next transaction
# ID. All transactions that have taken a number up to the last number have IDs below this next ID. Once all transactions
# with such IDs have ended, the committed rows among these numbers can be read, and no further rows appear among them.
#
# The next ID is not the `xmax` of a snapshot. `xmax` is the ID after the highest ID that has ended, and transactions
# with higher IDs may be running.

NOTHING = -(2**63)
"""A number below all row numbers."""

MOST_NOTES = 1000
"""The maximum number of notes. If a transaction stays open for hours, the last note is replaced by later notes."""


class Horizon:
    """What a relay has learned about numbers and transactions. The relay starts with a new `Horizon` for every new
    connection, because the connection may lead to another server."""

    def __init__(self) -> None:
        self.bound = NOTHING
        """All rows up to this number can be read."""
        self._notes: deque[tuple[int, int]] = deque()

    def is_at(self, last_number: int) -> bool:
        """Return whether all rows up to `last_number` can be read."""
        return last_number <= self.bound

    def note(self, last_number: int, next_transaction: int, oldest_running: int) -> bool:
        """Record a note. `last_number` must be read before the statement that reads the other two numbers.

        `oldest_running` is the lowest ID of a running transaction; if none is running, the next ID. Return whether
        `bound` has increased.
        """
        before = self.bound
        if last_number > (self._notes[-1][0] if self._notes else before):
            if len(self._notes) == MOST_NOTES:
                self._notes.pop()
            self._notes.append((last_number, next_transaction))
        while self._notes and self._notes[0][1] <= oldest_running:
            self.bound, _ = self._notes.popleft()
        return self.bound > before


LOCK_TIMEOUT_SECONDS = 30
"""The maximum time to wait for another transaction."""

_APPLICATION = {"application_name": "seqdedupe outbox relay"}

# The order of the index is the order of the rows. Without these settings, the server could choose a plan that sorts the
# whole table if the table's statistics are old.
_SESSION = (
    f"SET {RELAY_SETTING} = 'on'; SET default_transaction_isolation = 'read committed'; "
    "SET standard_conforming_strings = on; SET enable_seqscan = off; SET enable_bitmapscan = off; SET jit = off; "
    f"SET synchronous_commit = on; SET lock_timeout = '{LOCK_TIMEOUT_SECONDS}s'"
)

_OLDEST_RUNNING = "pg_snapshot_xmin(pg_current_snapshot())"
_XMAX = "pg_snapshot_xmax(pg_current_snapshot())"
# The age of a transaction ID is its distance from the next ID at this moment, not at the time of the snapshot.
_TRANSACTIONS = f"SELECT {_XMAX}::text::bigint + age({_XMAX}::xid), {_OLDEST_RUNNING}::text::bigint"

_SEQUENCE = f"pg_get_serial_sequence('{TABLE}', '{SEQUENCE_ID}')"

# In a table that has no sequence yet, a row's number consists of its transaction's ID and an ordinal.
_XMIN = f"(SELECT {_OLDEST_RUNNING}::text::bigint << {ORDINAL_BITS} WHERE {_SEQUENCE} IS NULL)"
_XMAX_NUMBER = f"(SELECT {_XMAX}::text::bigint << {ORDINAL_BITS})"

_ROOM = 1 << 32
"""The numbers kept free for other rows below the rows of a dump while these rows are renumbered."""

_NULL = b"\xff"

_ROW_BYTES = 64
"""The number of bytes counted for a row in addition to its payload."""

# One statement has one snapshot, so the bound belongs to the rows that the statement reads. The number of rows that fit
# is computed before any payload is read, usually from one sum. A payload that is too large is never sent. Texts in
# UTF-8 contain neither the byte that separates two values nor the byte that represents NULL.
_PAGE = (
    "SELECT string_agg(int8send(s), ''), {texts}, string_agg(int4send(coalesce(n, -1)), ''), "
    "string_agg(CASE WHEN n <= {most} THEN p END, '') "
    "FROM (SELECT s, k, i, a, t, p, CASE WHEN size > {most} THEN size ELSE octet_length(p) END AS n "
    "FROM (SELECT {number} AS s, aggregateid::text AS k, {id} AS i, aggregatetype::text AS a, type::text AS t, "
    "{size} AS size, CASE WHEN {size} <= {most} THEN {payload} END AS p {rows} LIMIT "
    "(SELECT CASE WHEN coalesce(sum(coalesce(size, 0) + {row_bytes}), 0) <= {page_bytes} THEN {page_rows} "
    "ELSE (SELECT count(*) FROM (SELECT sum(coalesce(size, 0) + {row_bytes}) "
    "OVER (ORDER BY s ROWS UNBOUNDED PRECEDING) - coalesce(size, 0) - {row_bytes} AS size_before "
    "FROM ({sizes}) AS sized) AS fitting "
    "WHERE size_before < {page_bytes}) END FROM ({sizes}) AS sized)) AS r OFFSET 0) AS q"
)
_TEXTS = ", ".join(f"string_agg(coalesce(textsend({column}), '\\xff'), '\\x00')" for column in "kiat")

_COLUMNS = (
    "SELECT attname, typname, attnotnull FROM pg_attribute JOIN pg_type ON pg_type.oid = atttypid "
    "WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped"
)
_IS_UNIQUE = (
    "SELECT 1 FROM pg_index WHERE indrelid = to_regclass(%s) AND indisunique AND indisvalid AND indnkeyatts = 1 AND "
    "indpred IS NULL AND pg_get_indexdef(indexrelid, 1, true) = %s"
)
_TRIGGERS = (
    "SELECT tgname, proname FROM pg_trigger JOIN pg_proc ON pg_proc.oid = tgfoid "
    "WHERE tgrelid = to_regclass(%s) AND tgenabled IN ('O', 'A')"
)
# A column of text accepts any type, as in PostgreSQL's assignments.
_UNLIKE = (
    "SELECT attname, format_type(ours.atttypid, ours.atttypmod), format_type(wanted.atttypid, wanted.atttypmod) "
    "FROM pg_attribute AS ours JOIN pg_attribute AS wanted USING (attname) JOIN pg_type ON pg_type.oid = ours.atttypid "
    "WHERE ours.attrelid = to_regclass(%s) AND wanted.attrelid = to_regclass(%s) AND wanted.attnum > 0 "
    "AND NOT wanted.attisdropped AND ours.atttypid <> wanted.atttypid AND typcategory <> 'S' AND NOT EXISTS ("
    "SELECT FROM pg_cast WHERE castsource = wanted.atttypid AND casttarget = ours.atttypid AND castcontext <> 'e')"
)
_UNSAFE = POSTGRESQL_UNSAFE_TABLES.format(names="%s")
_TABLES = (TABLE, TOKEN_TABLE, ASIDE_TABLE)
_SAME_ROWS = "FROM unnest(%s::bigint[], %s::text[]) AS given(s, i)"

# The transaction with the lowest ID in all databases of the server: it has written, and has not ended.
_HOLDER = (
    "SELECT concat_ws(', ', 'process ' || pid, 'database ' || datname, nullif(application_name, ''), "
    "'user ' || usename, state), "
    "extract(epoch FROM clock_timestamp() - xact_start)::float8, age(backend_xid) FROM pg_stat_activity "
    "WHERE backend_xid IS NOT NULL AND pid <> pg_backend_pid() "
    "UNION ALL SELECT 'prepared transaction ' || gid || ', database ' || database, "
    "extract(epoch FROM clock_timestamp() - prepared)::float8, age(transaction) "
    "FROM pg_prepared_xacts ORDER BY 3 DESC LIMIT 1"
)
# These rows certainly wait: a relay has noted their numbers when their own transactions had ended, and the open
# transaction had not.
_WAITING = f"age(xmin) <= age({_OLDEST_RUNNING}::xid)"


_errors = partial(converted_errors, "PostgreSQL", psycopg.Error)


def store(url: URL) -> "PostgresOutbox":
    return PostgresOutbox(url.set(drivername="postgresql").render_as_string(hide_password=False))


class PostgresOutbox(OutboxStore):
    """The outbox at a libpq URL, with separate connections for reading and for deleting."""

    poll_seconds = 0.01
    idle_poll_seconds = 0.5

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._reading: Connection | None = None
        self._removing: Connection | None = None
        self._read_lock = threading.Lock()
        self._lock = threading.Lock()  # for `_removing`, which two threads use
        self._id = self._page = self._page_elsewhere = ""
        self._is_elsewhere = self._is_readable = ""
        self._next_sequence_id = self._has_had = self._noting = ""
        self._sequence: str | None = None
        """The name of the sequence as it is written in statements, if the table has a sequence."""
        self._horizon = Horizon()
        self._is_told = False  # notifications since the last read

    def open(self) -> None:
        self.close()
        with self._read_lock, self._lock, _errors():
            given = psycopg.conninfo.conninfo_to_dict(self._dsn)
            dsn = psycopg.conninfo.make_conninfo("", **(CONNECTION | _APPLICATION | given))
            self._reading = psycopg.connect(dsn, autocommit=True)
            self._removing = psycopg.connect(dsn, autocommit=True)
            for connection in (self._reading, self._removing):
                connection.execute(_SESSION.encode())
            self._check(self._reading)
            self._reading.add_notify_handler(lambda notification: self._hear())
            self._reading.execute(f"LISTEN {CHANNEL}".encode())

    def close(self) -> None:
        with self._read_lock, self._lock:  # first wait for an earlier call whose caller no longer waits
            for connection in (self._reading, self._removing):
                if connection is not None:
                    with suppress(psycopg.Error):
                        connection.close()
            self._reading = self._removing = None

    def _check(self, connection: Connection) -> None:
        encoding = connection.execute("SHOW server_encoding").fetchall()[0][0]
        if encoding != "UTF8":
            raise bad_outbox(f"the database's encoding is {encoding}, and should be UTF8")
        kinds = _columns(connection, TABLE, (*COLUMNS, SEQUENCE_ID))
        _columns(connection, TOKEN_TABLE, ("token", "producer", "topic"))
        check_names(kinds)
        # A row is set aside completely, with all additional columns of its table.
        _columns(connection, ASIDE_TABLE, (*kinds, "reason", "set_aside_at"))
        for table, kind in connection.execute(_UNSAFE, (list(_TABLES),)).fetchall():
            what = f"the table {table} is {kind}: after a crash it would not hold what the other tables hold"
            raise bad_outbox(what, cure_of(table, kind))
        if kinds[SEQUENCE_ID] != ("int8", True):
            raise bad_outbox(f"{TABLE}.{SEQUENCE_ID} should be bigint NOT NULL")
        if kinds["id"][0] not in ID_TYPES or not kinds["id"][1]:
            raise bad_outbox(
                f"{TABLE}.id is {kinds['id'][0]}, and should be one of {', '.join(ID_TYPES)}, NOT NULL: an id must "
                "never come again, and numbers do after a restore"
            )
        for name, ours, wanted in connection.execute(_UNLIKE, (ASIDE_TABLE, TABLE)).fetchall():
            raise bad_outbox(
                f"{ASIDE_TABLE}.{name} is {ours}, and {TABLE}.{name} is {wanted}: no row could be set aside",
                f"Give both the same type: ALTER TABLE {ASIDE_TABLE} ALTER {name} TYPE {wanted} USING …",
            )
        if connection.execute(_IS_UNIQUE, (TABLE, SEQUENCE_ID)).fetchone() is None:
            raise bad_outbox(f"{TABLE}.{SEQUENCE_ID} has no unique index")
        there: dict[str, str] = dict(connection.execute(_TRIGGERS, (TABLE,)).fetchall())
        for name in POSTGRES_TRIGGERS:
            if name not in there:
                raise bad_outbox(f"{TABLE} lacks the trigger {name}, or it is disabled")
        if connection.execute(f"SELECT 1 FROM {TOKEN_TABLE}".encode()).fetchone() is None:
            raise bad_outbox(f"{TOKEN_TABLE} has no row")
        self._use_numbers(connection, there["outbox_number"])
        self._id = _id_text(kinds["id"][0])
        payload = kinds["payload"][0]
        self._page = _page_query(self._id, payload, f"{SEQUENCE_ID} > %(after)s AND {self._is_readable}")
        self._page_elsewhere = _page_query(self._id, payload, self._is_elsewhere)

    def _use_numbers(self, connection: Connection, function: str) -> None:
        """Use numbers from a sequence, or numbers as an older version assigned them."""
        [(found,)] = connection.execute(f"SELECT {_SEQUENCE}::regclass::oid".encode()).fetchall()
        self._horizon = Horizon()
        self._sequence = None if found is None else f"{found}::oid::regclass"
        if found is None:
            self._next_sequence_id = _XMAX_NUMBER
            self._has_had = f"%(number)s < {_XMAX_NUMBER}"
            self._noting = "WITH "
            self._is_readable = f"{SEQUENCE_ID} < {_XMIN}"
            self._is_elsewhere = f"{SEQUENCE_ID} >= {_XMAX_NUMBER}"
            return
        if function != NUMBERING:
            raise bad_outbox(
                f"the trigger outbox_number of {TABLE} calls {function}, which numbers rows as an older version did"
            )
        self._next_sequence_id = f"{self._last_number()} + 1"
        # After a crash a sequence continues above the numbers that were logged ahead. So the sequence's number does not
        # show that rows were lost.
        self._has_had = f"%(number)s <= {DELETED} OR EXISTS (SELECT FROM {TABLE} WHERE {SEQUENCE_ID} = %(number)s)"
        _columns(connection, TOKEN_TABLE, (DELETED,))
        self._noting = f"WITH noted AS (UPDATE {TOKEN_TABLE} SET {DELETED} = greatest({DELETED}, %(last)s)), "
        self._is_readable = f"{SEQUENCE_ID} <= %(bound)s"
        # The statement's snapshot is older: no row in it has a number that was taken later.
        self._is_elsewhere = f"{SEQUENCE_ID} > (SELECT {self._last_number()})"

    def _last_number(self) -> str:
        # The sequence's own row, if selected, may show a number that is not taken yet. The row is changed in place,
        # first to the number that is logged ahead. This function locks the row.
        return f"pg_sequence_last_value({self._sequence})"

    def _advance(self) -> bool:
        """Find out up to which number rows can be read now. Return whether this number has increased."""
        if self._sequence is None:
            [(is_older,)] = self._read(f"SELECT {_SEQUENCE} IS NULL").fetchall()
            if not is_older:
                raise unavailable("its table takes numbers from a sequence since this relay began")
            return False
        [(last,)] = self._read(f"SELECT {self._last_number()}").fetchall()
        if last is None:
            raise bad_outbox(f"the relay may not use the sequence of {TABLE}.{SEQUENCE_ID}")
        if self._horizon.is_at(last):
            return False
        [now] = self._read(_TRANSACTIONS).fetchall()
        return self._horizon.note(last, *now)

    def bind(self, producer: str, topic: str) -> None:
        with self._using() as connection:
            claim = f"UPDATE {TOKEN_TABLE} SET producer = %s, topic = %s WHERE producer IS NULL AND topic IS NULL"
            connection.execute(claim.encode(), (producer, topic))
            [now] = connection.execute(f"SELECT producer, topic FROM {TOKEN_TABLE}".encode()).fetchall()
        for what, is_now, told in zip(("under", "to"), now, (producer, topic), strict=True):
            if is_now != told:
                raise changed(what, is_now, told)

    def state(self, number: int = NO_SEQUENCE_ID) -> OutboxState:
        query = f"SELECT token, {self._next_sequence_id}, {self._has_had} FROM {TOKEN_TABLE}"
        with self._reader():
            [row] = self._read(query, {"number": number}).fetchall()
        return OutboxState(*row)

    def _hear(self) -> None:
        self._is_told = True

    def read(self, after: int) -> RowPage:
        with self._reader():
            self._is_told = False
            page = self._read_page(after)
            return self._read_page(after) if not len(page) and self._advance() else page

    def _read_page(self, after: int) -> RowPage:
        if self._sequence is not None and after >= self._horizon.bound:
            return _page([None] * 7)
        bounds = {"after": after, "bound": self._horizon.bound}
        return _page(self._read(self._page, bounds, binary=True).fetchone())

    def read_elsewhere(self) -> RowPage:
        with self._reader():
            return _page(self._read(self._page_elsewhere, binary=True).fetchone())

    def oldest(self) -> int | None:
        query = f"SELECT min({SEQUENCE_ID}) FROM {TABLE} WHERE {self._is_readable} OR {self._is_elsewhere}"
        with self._reader():
            self._advance()
            [row] = self._read(query, {"bound": self._horizon.bound}).fetchall()
        return row[0]  # type: ignore[no-any-return]

    def has_more(self, after: int) -> bool:
        with self._reader():
            found = self._read(f"SELECT 1 FROM {TABLE} WHERE {SEQUENCE_ID} > %s LIMIT 1", (after,)).fetchone()
            if self._reading is not None:
                # A notification that arrived together with the answer does not make the connection readable again.
                self._reading.pgconn.consume_input()
                self._is_told |= self._reading.pgconn.notifies() is not None
        return found is not None or self._is_told

    def _read(self, query: str, parameters: Any = (), *, binary: bool = False) -> "psycopg.Cursor[Any]":
        connection = self._reading
        if connection is None:
            raise unavailable("it is not connected")
        return connection.execute(query.encode(), parameters, binary=binary)

    def delete(self, pages: Sequence[RowPage]) -> None:
        rest = [page for page in pages if not (page.ids_as_read is not None and self._delete_range(page))]
        if rest:
            self._delete_each(rest)

    def _delete_range(self, page: RowPage) -> bool:
        """Delete the rows between the first and the last row of a page, if they are exactly the rows of the page. This
        takes a third of the work of deleting single rows. Return whether the rows were deleted; if not, nothing has
        changed."""
        query = (
            f"{self._noting}gone AS (DELETE FROM {TABLE} WHERE {SEQUENCE_ID} BETWEEN %(first)s AND %(last)s "
            f"RETURNING {SEQUENCE_ID} AS s, {self._id} AS i) SELECT 1 / (string_agg(int8send(s), '') = %(numbers)b "
            "AND string_agg(textsend(i), '\\x00') = %(ids)b)::int FROM gone"
        )
        numbers = page.sequence_ids.astype(">i8").tobytes()
        values = {"first": int(page.sequence_ids[0]), "last": page.last, "numbers": numbers, "ids": page.ids_as_read}
        with self._using() as connection:
            try:
                connection.execute(query.encode(), values)
            except psycopg.errors.DivisionByZero:
                return False
        return True

    def _delete_each(self, pages: Sequence[RowPage]) -> None:
        numbers = np.concatenate([page.sequence_ids for page in pages])
        ids = [one for page in pages for one in page.ids()]
        with self._using() as connection:
            # Limit the range to the page, because the server might otherwise read the whole table.
            all_numbers, all_ids = _arrays(numbers, ids)
            connection.execute(
                f"{self._noting}gone AS (SELECT * FROM unnest(%(numbers)s::bigint[], %(ids)s::text[]) AS given(s, i)) "
                f"DELETE FROM {TABLE} USING gone WHERE {SEQUENCE_ID} = s "
                f"AND {SEQUENCE_ID} BETWEEN %(first)s AND %(last)s AND {self._id} = i".encode(),
                {
                    "numbers": all_numbers,
                    "ids": all_ids,
                    "first": int(numbers.min()),
                    "last": int(numbers.max()),
                },
            )

    def set_aside(self, page: RowPage, reason: str) -> None:
        with self._using() as connection:
            names = sql.SQL(", ").join(map(sql.Identifier, self._all_columns(connection)))
            move = sql.SQL(
                f"WITH gone AS (DELETE FROM {TABLE} USING (SELECT * {_SAME_ROWS}) AS bad WHERE {SEQUENCE_ID} = s "
                f"AND {self._id} = i RETURNING {TABLE}.*) "
                f"INSERT INTO {ASIDE_TABLE} ({{names}}, reason) SELECT {{names}}, %s FROM gone"
            ).format(names=names)
            connection.execute(move, (*_arrays(page.sequence_ids, page.ids()), reason))

    def _all_columns(self, connection: Connection) -> list[str]:
        return [row[0] for row in connection.execute(_COLUMNS, (TABLE,))]

    def renumber(self, page: RowPage) -> None:
        numbers = page.sequence_ids
        number = f"(pg_current_xact_id()::text::bigint << {ORDINAL_BITS}) | (row_number() OVER (ORDER BY s) - 1)"
        with self._using() as connection:
            if self._sequence is not None:
                numbers = numbers + self._make_room(connection)
                # As in the trigger, the transaction gets an ID before it takes a number.
                number = f"nextval(CASE WHEN pg_current_xact_id() IS NOT NULL THEN {self._sequence} END)"
            connection.execute(
                f"WITH old AS MATERIALIZED (SELECT s, i, {number} AS number "
                f"FROM (SELECT s, i {_SAME_ROWS} ORDER BY s) AS given) "
                f"UPDATE {TABLE} SET {SEQUENCE_ID} = number FROM old "
                f"WHERE {SEQUENCE_ID} = s AND {self._id} = i".encode(),
                _arrays(numbers, page.ids()),
            )

    def _make_room(self, connection: Connection) -> int:
        """If rows have numbers above the sequence, move these rows further up, so that the sequence cannot reach them.
        Return the distance."""
        [(first, last)] = connection.execute(
            f"SELECT min({SEQUENCE_ID}) - n, max({SEQUENCE_ID}) - n FROM {TABLE}, "
            f"(SELECT {self._last_number()} AS n OFFSET 0) AS taken WHERE {SEQUENCE_ID} > n GROUP BY n".encode()
        ).fetchall() or [(_ROOM, 0)]
        if first >= _ROOM:
            return 0
        far: int = last + _ROOM
        move = f"UPDATE {TABLE} SET {SEQUENCE_ID} = {SEQUENCE_ID} + %s WHERE {self._is_elsewhere}"
        connection.execute(move.encode(), (far,))
        return far

    def replace_token(self, token: str) -> None:
        with self._using() as connection:
            replace = f"UPDATE {TOKEN_TABLE} SET token = %s WHERE token = %s"
            connection.execute(replace.encode(), (secrets.token_hex(8), token))

    def lag(self) -> Lag:
        with self._using() as connection:
            count = (
                f"SELECT count(*), count(*) FILTER (WHERE {_WAITING}), "
                f"(SELECT count(*) FROM {ASIDE_TABLE}) FROM {TABLE}"
            )
            [(rows, unreadable, aside)] = connection.execute(count.encode()).fetchall()
            holder = connection.execute(_HOLDER.encode()).fetchone() if rows else None
        held_by, seconds, _ = holder or ("", 0.0, 0)
        return Lag(rows, unreadable, held_by or "", seconds or 0.0, aside)

    @property
    def file_number(self) -> int | None:
        return None if self._reading is None else self._reading.fileno()

    @contextmanager
    def _reader(self) -> Iterator[None]:
        with self._read_lock, _errors():
            yield

    @contextmanager
    def _using(self) -> Iterator[Connection]:
        with self._lock, _errors():
            if self._removing is None:
                raise unavailable("it is not connected")
            yield self._removing


def _id_text(kind: str) -> str:
    return "encode(id, 'hex')" if kind == "bytea" else "id::text"


def _columns(connection: Connection, table: str, wanted: Sequence[str]) -> dict[str, tuple[str, bool]]:
    """Return the type of each column, and whether the column is NOT NULL."""
    found = {row[0]: (row[1], row[2]) for row in connection.execute(_COLUMNS, (table,))}
    check_columns(table, found, wanted)
    return found


def _page_query(id_text: str, payload: str, where: str) -> str:
    # This applies to jsonb too: a number of a few bytes may have a hundred thousand digits as text.
    size = "octet_length(payload)" if payload == "bytea" else "octet_length(payload::text)"
    rows = f"FROM {TABLE} WHERE {where} ORDER BY {SEQUENCE_ID}"
    return _PAGE.format(
        number=SEQUENCE_ID,
        id=id_text,
        payload="payload" if payload == "bytea" else "textsend(payload::text)",
        size=size,
        rows=rows,
        sizes=f"SELECT {SEQUENCE_ID} AS s, {size} AS size {rows} LIMIT {PAGE_ROWS}",
        texts=_TEXTS,
        page_rows=PAGE_ROWS,
        row_bytes=_ROW_BYTES,
        page_bytes=PAGE_BYTES,
        most=MAX_PAYLOAD_BYTES,
    )


def _page(row: Any) -> RowPage:
    numbers, keys, ids, kinds, types, payload_lengths, payloads = row
    if numbers is None:
        return page_of([], [], [], [], [], [])
    sizes = np.frombuffer(payload_lengths, ">i4").astype(np.int64)
    properties = (ids, kinds, types)
    by_property = np.stack([_lengths(column) for column in properties], axis=1)
    there = by_property >= 0
    values = b"".join(chain.from_iterable(zip(*map(_values, properties), strict=True)))
    return RowPage(
        np.frombuffer(numbers, ">i8").astype(np.int64),
        _column(_lengths(keys), b"".join(_values(keys)), may_be_left_out=True),
        _column(np.where(sizes > MAX_PAYLOAD_BYTES, -1, sizes), payloads or b"", may_be_left_out=False),
        np.maximum(sizes, 0),
        _column(by_property[there], values, may_be_left_out=False),
        there,
        ids_as_read=ids,
    )


def _column(lengths: Int64s, data: bytes, *, may_be_left_out: bool) -> Binary:
    """Return a column whose values are adjacent in `data`. A negative length means NULL."""
    present = lengths >= 0
    if may_be_left_out and not present.any():
        return Binary()
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(np.maximum(lengths, 0), out=offsets[1:])
    validity = b"" if present.all() else np.packbits(present, bitorder="little").tobytes()
    return Binary(offsets, data, validity)


def _lengths(column: bytes) -> Int64s:
    """Return the lengths of the texts in a column; -1 for NULL."""
    data = np.frombuffer(column, np.uint8)
    ends = np.append(np.flatnonzero(data == 0), len(data))
    lengths = np.diff(ends, prepend=-1) - 1
    if _NULL in column:
        lengths[data[np.minimum(ends - lengths, len(data) - 1)] == _NULL[0]] = -1
    return lengths


def _values(column: bytes) -> list[bytes]:
    return column.replace(_NULL, b"").split(b"\0")


def _arrays(numbers: Int64s, ids: list[bytes]) -> tuple[str, list[str] | str]:
    """Return the numbers and the IDs as text that the server can read. This takes a fraction of the time of a list of
    parameters."""
    joined = b'","'.join(ids)
    plain = b"\\" not in joined and joined.count(b'"') == 2 * (len(ids) - 1)
    texts: list[str] | str = '{"' + joined.decode() + '"}' if plain else [one.decode() for one in ids]
    return "{" + ",".join(map(str, numbers.tolist())) + "}", texts
