"""An outbox in PostgreSQL. A page comes as one row of few long values, which the server makes: no row is ever an object
here, and what is read goes on as columns."""

import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any

import numpy as np
import psycopg
from psycopg import Connection, sql
from sqlalchemy.engine import URL

from seqdedupe.batch import Int64s
from seqdedupe.databases import failures
from seqdedupe.databases.postgres import CONNECTION
from seqdedupe.limits import MAX_PAYLOAD_BYTES
from seqdedupe.services.outbox.ddl import CHANNEL, POSTGRES_TRIGGERS, RELAY_SETTING
from seqdedupe.services.outbox.rows import (
    ASIDE_TABLE,
    COLUMNS,
    ORDINAL_BITS,
    SEQUENCE_ID,
    TABLE,
    TOKEN_TABLE,
    Page,
    column_of,
    page_of,
)
from seqdedupe.services.outbox.steps import State
from seqdedupe.services.outbox.store import (
    PAGE_BYTES,
    PAGE_ROWS,
    Lag,
    Store,
    bad_outbox,
    changed,
    unavailable,
)

LOCK_TIMEOUT_SECONDS = 30
"""How long to wait for another transaction."""

_APPLICATION = {"application_name": "seqdedupe outbox relay"}

# The order of the index is the order of the rows; a plan that sorts the whole table would be made for tables whose
# statistics are old.
_SESSION = (
    f"SET {RELAY_SETTING} = 'on'; SET default_transaction_isolation = 'read committed'; "
    "SET standard_conforming_strings = on; SET enable_seqscan = off; SET enable_bitmapscan = off; SET jit = off; "
    f"SET synchronous_commit = on; SET lock_timeout = '{LOCK_TIMEOUT_SECONDS}s'"
)

_ID_TYPES = ("uuid", "text", "varchar", "bpchar", "bytea")
"""Numbers would come again, with other rows, after a restore."""

_XMIN = f"(SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint << {ORDINAL_BITS})"
_XMAX = f"(SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint << {ORDINAL_BITS})"

_NULL = b"\xff"

_ROW_BYTES = 64
"""What a row without payload counts of a page."""

# One statement has one snapshot: the bound is that of the rows it reads. How many fit is found out before a payload is
# looked at, mostly by one sum; one that is too large is never sent. Texts in UTF-8 have neither the byte between two
# values nor that in place of NULL.
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
_TRIGGERS = "SELECT tgname FROM pg_trigger WHERE tgrelid = to_regclass(%s) AND tgenabled IN ('O', 'A')"
_SAME_ROWS = "FROM unnest(%s::bigint[], %s::text[]) AS given(s, i)"

_HOLDER = (
    "SELECT concat_ws(', ', 'process ' || pid, nullif(application_name, ''), usename, state), "
    "extract(epoch FROM clock_timestamp() - xact_start)::float8 FROM pg_stat_activity "
    "WHERE backend_xid IS NOT NULL AND pid <> pg_backend_pid() "
    "UNION ALL SELECT 'prepared transaction ' || gid, extract(epoch FROM clock_timestamp() - prepared)::float8 "
    "FROM pg_prepared_xacts ORDER BY 2 DESC NULLS LAST LIMIT 1"
)


def store(url: URL) -> "PostgresStore":
    return PostgresStore(url.set(drivername="postgresql").render_as_string(hide_password=False))


class PostgresStore(Store):
    """By a libpq URL, with a connection for reading and one for deleting beside it."""

    poll_seconds = 0.01
    idle_poll_seconds = 0.5

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._reading: Connection | None = None
        self._removing: Connection | None = None
        self._read_lock = threading.Lock()
        self._lock = threading.Lock()  # of `_removing`, which two threads use
        self._id = self._page = self._page_elsewhere = ""
        self._is_told = False  # since the last read

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
        with self._read_lock, self._lock:  # a call that nobody waits for any more is ended first
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
        # A row that is set aside goes there as a whole, whatever else its table has.
        _columns(connection, ASIDE_TABLE, (*kinds, "reason", "set_aside_at"))
        if kinds[SEQUENCE_ID] != ("int8", True):
            raise bad_outbox(f"{TABLE}.{SEQUENCE_ID} should be bigint NOT NULL")
        if kinds["id"][0] not in _ID_TYPES or not kinds["id"][1]:
            raise bad_outbox(
                f"{TABLE}.id is {kinds['id'][0]}, and should be one of {', '.join(_ID_TYPES)}, NOT NULL: an id must "
                "never come again, and numbers do after a restore"
            )
        if connection.execute(_IS_UNIQUE, (TABLE, SEQUENCE_ID)).fetchone() is None:
            raise bad_outbox(f"{TABLE}.{SEQUENCE_ID} has no unique index")
        there = {row[0] for row in connection.execute(_TRIGGERS, (TABLE,))}
        for name in POSTGRES_TRIGGERS:
            if name not in there:
                raise bad_outbox(f"{TABLE} lacks the trigger {name}, or it is disabled")
        if connection.execute(f"SELECT 1 FROM {TOKEN_TABLE}".encode()).fetchone() is None:
            raise bad_outbox(f"{TOKEN_TABLE} has no row")
        self._id = _id_text(kinds["id"][0])
        self._page = _page_query(
            self._id, kinds["payload"][0], f"{SEQUENCE_ID} > %(after)s AND {SEQUENCE_ID} < {_XMIN}"
        )
        self._page_elsewhere = _page_query(self._id, kinds["payload"][0], f"{SEQUENCE_ID} >= {_XMAX}")

    def bind(self, producer: str, topic: str) -> None:
        with self._using() as connection:
            claim = f"UPDATE {TOKEN_TABLE} SET producer = %s, topic = %s WHERE producer IS NULL AND topic IS NULL"
            connection.execute(claim.encode(), (producer, topic))
            [now] = connection.execute(f"SELECT producer, topic FROM {TOKEN_TABLE}".encode()).fetchall()
        for what, is_now, told in zip(("under", "to"), now, (producer, topic), strict=True):
            if is_now != told:
                raise changed(what, is_now, told)

    def state(self) -> State:
        with self._reader():
            [row] = self._read(f"SELECT token, {_XMAX} FROM {TOKEN_TABLE}").fetchall()
        return State(*row)

    def _hear(self) -> None:
        self._is_told = True

    def read(self, after: int) -> Page:
        with self._reader():
            self._is_told = False
            return _page(self._read(self._page, {"after": after}, binary=True).fetchone())

    def read_elsewhere(self) -> Page:
        with self._reader():
            return _page(self._read(self._page_elsewhere, binary=True).fetchone())

    def oldest(self) -> int | None:
        query = f"SELECT min({SEQUENCE_ID}) FROM {TABLE} WHERE {SEQUENCE_ID} < {_XMIN} OR {SEQUENCE_ID} >= {_XMAX}"
        with self._reader():
            [row] = self._read(query).fetchall()
        return row[0]  # type: ignore[no-any-return]

    def has_more(self, after: int) -> bool:
        with self._reader():
            found = self._read(f"SELECT 1 FROM {TABLE} WHERE {SEQUENCE_ID} > %s LIMIT 1", (after,)).fetchone()
            if self._reading is not None:
                # What came with the answer is not heard of by waiting until there is more to read.
                self._reading.pgconn.consume_input()
                self._is_told |= self._reading.pgconn.notifies() is not None
        return found is not None or self._is_told

    def _read(self, query: str, parameters: Any = (), *, binary: bool = False) -> "psycopg.Cursor[Any]":
        connection = self._reading
        if connection is None:
            raise unavailable("it is not connected")
        return connection.execute(query.encode(), parameters, binary=binary)

    def delete(self, pages: Sequence[Page]) -> None:
        rest = [page for page in pages if not (page.ids_as_read is not None and self._delete_range(page))]
        if rest:
            self._delete_each(rest)

    def _delete_range(self, page: Page) -> bool:
        """Deletes what stands between a page's first and last row, if these are exactly its rows: a third of the work.
        Answers whether they are; if not, nothing is changed."""
        query = (
            f"WITH gone AS (DELETE FROM {TABLE} WHERE {SEQUENCE_ID} BETWEEN %s AND %s "
            f"RETURNING {SEQUENCE_ID} AS s, {self._id} AS i) SELECT 1 / (string_agg(int8send(s), '') = %b AND "
            "string_agg(textsend(i), '\\x00') = %b)::int FROM gone"
        )
        numbers = page.sequence_ids.astype(">i8").tobytes()
        with self._using() as connection:
            try:
                connection.execute(query.encode(), (int(page.sequence_ids[0]), page.last, numbers, page.ids_as_read))
            except psycopg.errors.DivisionByZero:
                return False
        return True

    def _delete_each(self, pages: Sequence[Page]) -> None:
        numbers = np.concatenate([page.sequence_ids for page in pages])
        ids = [one for page in pages for one in page.ids()]
        with self._using() as connection:
            # Between its bounds, or it might go through the whole table.
            connection.execute(
                f"DELETE FROM {TABLE} USING (SELECT * {_SAME_ROWS}) AS gone WHERE {SEQUENCE_ID} = s "
                f"AND {SEQUENCE_ID} BETWEEN %s AND %s AND {self._id} = i".encode(),
                (*_arrays(numbers, ids), int(numbers.min()), int(numbers.max())),
            )

    def set_aside(self, page: Page, reason: str) -> None:
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

    def renumber(self, page: Page) -> None:
        number = f"(pg_current_xact_id()::text::bigint << {ORDINAL_BITS}) | (place - 1)"
        with self._using() as connection:
            connection.execute(
                f"UPDATE {TABLE} SET {SEQUENCE_ID} = {number} FROM (SELECT s, i, row_number() OVER (ORDER BY s) "
                f"AS place {_SAME_ROWS}) AS old WHERE {SEQUENCE_ID} = s AND {self._id} = i".encode(),
                _arrays(page.sequence_ids, page.ids()),
            )

    def replace_token(self, token: str) -> None:
        with self._using() as connection:
            replace = f"UPDATE {TOKEN_TABLE} SET token = %s WHERE token = %s"
            connection.execute(replace.encode(), (secrets.token_hex(8), token))

    def lag(self) -> Lag:
        with self._using() as connection:
            count = (
                f"SELECT count(*), count(*) FILTER (WHERE {SEQUENCE_ID} >= {_XMIN}), "
                f"(SELECT count(*) FROM {ASIDE_TABLE}) FROM {TABLE}"
            )
            [(rows, unreadable, aside)] = connection.execute(count.encode()).fetchall()
            holder = connection.execute(_HOLDER.encode()).fetchone() if unreadable else None
        held_by, seconds = holder or ("", 0.0)
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
    """Each column's type, and whether it is NOT NULL."""
    found = {row[0]: (row[1], row[2]) for row in connection.execute(_COLUMNS, (table,))}
    if not found:
        raise bad_outbox(f"there is no table {table}")
    for name in wanted:
        if name not in found:
            raise bad_outbox(f"the table {table} has no column {name}")
    return found


def _page_query(id_text: str, payload: str, where: str) -> str:
    # Of jsonb too: a number of a few bytes may have a hundred thousand digits as text.
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


def _page(row: Any) -> Page:
    numbers, keys, ids, kinds, types, payload_lengths, payloads = row
    if numbers is None:
        return page_of([], [], [], [], [], [])
    sizes = np.frombuffer(payload_lengths, ">i4").astype(np.int64)
    properties = (ids, kinds, types)
    by_property = np.stack([_lengths(column) for column in properties], axis=1)
    there = by_property >= 0
    values = b"".join(chain.from_iterable(zip(*map(_values, properties), strict=True)))
    return Page(
        np.frombuffer(numbers, ">i8").astype(np.int64),
        column_of(_lengths(keys), b"".join(_values(keys)), may_be_left_out=True),
        column_of(np.where(sizes > MAX_PAYLOAD_BYTES, -1, sizes), payloads or b"", may_be_left_out=False),
        np.maximum(sizes, 0),
        column_of(by_property[there], values, may_be_left_out=False),
        there,
        ids_as_read=ids,
    )


def _lengths(column: bytes) -> Int64s:
    """Of the texts of a column; -1 for NULL."""
    data = np.frombuffer(column, np.uint8)
    ends = np.append(np.flatnonzero(data == 0), len(data))
    lengths = np.diff(ends, prepend=-1) - 1
    if _NULL in column:
        lengths[data[np.minimum(ends - lengths, len(data) - 1)] == _NULL[0]] = -1
    return lengths


def _values(column: bytes) -> list[bytes]:
    return column.replace(_NULL, b"").split(b"\0")


def _arrays(numbers: Int64s, ids: list[bytes]) -> tuple[str, list[str] | str]:
    """Both as text that the server reads, which takes a fraction of what a list of parameters does."""
    joined = b'","'.join(ids)
    plain = b"\\" not in joined and joined.count(b'"') == 2 * (len(ids) - 1)
    texts: list[str] | str = '{"' + joined.decode() + '"}' if plain else [one.decode() for one in ids]
    return "{" + ",".join(map(str, numbers.tolist())) + "}", texts


@contextmanager
def _errors() -> Iterator[None]:
    """The driver's errors as ours. None quotes the URL."""
    try:
        yield
    except psycopg.Error as e:
        if failures.fault_of(e) is not failures.Fault.MESSAGE:
            raise unavailable(failures.told(e)) from e
        raise bad_outbox(f"PostgreSQL refuses it: {failures.told(e)}") from e
