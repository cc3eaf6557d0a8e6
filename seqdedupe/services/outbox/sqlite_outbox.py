"""An outbox in SQLite. SQLite allows one writer at a time, so numbers follow the order of commits, and no row has to
wait for an open transaction."""

import secrets
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from sqlalchemy.engine import URL

from seqdedupe.databases.tables import missing_file
from seqdedupe.limits import MAX_PAYLOAD_BYTES, NO_SEQUENCE_ID
from seqdedupe.services.outbox.store import (
    ASIDE_TABLE,
    COLUMNS,
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
from seqdedupe.services.outbox.table import SQLITE_TRIGGERS

BUSY_TIMEOUT_SECONDS = 30.0

# An id is compared in the text form that is published. A number may be used again for another row.
_ID = "CASE typeof(id) WHEN 'blob' THEN lower(hex(id)) WHEN 'text' THEN id END"
_ID_BYTES = f"CAST({_ID} AS BLOB)"
"""The bytes to compare: also a text that is not valid UTF-8 has bytes."""

_PAGE = (
    f"SELECT {SEQUENCE_ID}, {_ID_BYTES}, CAST(aggregatetype AS BLOB), CAST(aggregateid AS BLOB), "
    f"CAST(type AS BLOB), length(CAST(payload AS BLOB)), "
    f"CASE WHEN length(CAST(payload AS BLOB)) <= {MAX_PAYLOAD_BYTES} THEN CAST(payload AS BLOB) END "
    f"FROM {TABLE} WHERE {SEQUENCE_ID} > ? ORDER BY {SEQUENCE_ID} LIMIT {PAGE_ROWS}"
)
_FETCH_ROWS = 100


_errors = partial(converted_errors, "SQLite", sqlite3.Error)


def store(url: URL) -> "SqliteOutbox":
    if not url.database or url.database == ":memory:":
        raise bad_outbox("an outbox in memory is seen by nobody else: name a file")
    return SqliteOutbox(url.database)


class SqliteOutbox(OutboxStore):
    """The outbox in the file at this path."""

    poll_seconds = idle_poll_seconds = 0.01

    def __init__(self, path: str) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None
        self._lock = threading.Lock()

    def open(self) -> None:
        self.close()
        with self._lock, _errors():
            uri = "file:" + self._path.replace("%", "%25").replace("?", "%3f").replace("#", "%23") + "?mode=rw"
            try:
                connection = sqlite3.connect(
                    uri, BUSY_TIMEOUT_SECONDS, isolation_level=None, check_same_thread=False, uri=True
                )
            except sqlite3.OperationalError as e:
                if (what := missing_file(self._path)) is None:
                    raise
                hint = "Is its path right? `seqdedupe outbox ddl sqlite | sqlite3 FILE` makes an outbox."
                raise unavailable(what, hint) from e
            self._connection = connection
            _check(connection)

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            self._connection = None

    def bind(self, producer: str, topic: str) -> None:
        with self._removing() as connection:
            connection.execute(
                f"UPDATE {TOKEN_TABLE} SET producer = ?, topic = ? WHERE producer IS NULL AND topic IS NULL",
                (producer, topic),
            )
            now = connection.execute(f"SELECT producer, topic FROM {TOKEN_TABLE}").fetchone()
        for what, is_now, told in zip(("under", "to"), now, (producer, topic), strict=True):
            if is_now != told:
                raise changed(what, is_now, told)

    def state(self, number: int = NO_SEQUENCE_ID) -> OutboxState:
        with self._using() as connection:
            [token] = connection.execute(f"SELECT token FROM {TOKEN_TABLE}").fetchone()
            last = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = ?", (TABLE,)).fetchone()
        next_sequence_id = (last[0] if last else 0) + 1
        return OutboxState(token, next_sequence_id, number < next_sequence_id)

    def read(self, after: int) -> RowPage:
        rows: list[tuple[int, bytes, bytes, bytes, bytes, int, bytes]] = []
        size = 0
        with self._using() as connection:
            cursor = connection.execute(_PAGE, (after,))
            while size <= PAGE_BYTES and (fetched := cursor.fetchmany(_FETCH_ROWS)):
                rows += fetched
                size += sum(len(row[6] or b"") for row in fetched)
            cursor.close()
        if not rows:
            return page_of([], [], [], [], [], [])
        numbers, ids, kinds, keys, types, sizes, payloads = zip(*rows, strict=True)
        return page_of(numbers, ids, kinds, keys, types, payloads, [one or 0 for one in sizes])

    def read_elsewhere(self) -> RowPage:
        return page_of([], [], [], [], [], [])  # AUTOINCREMENT continues above all restored rows

    def oldest(self) -> int | None:
        with self._using() as connection:
            [oldest] = connection.execute(f"SELECT min({SEQUENCE_ID}) FROM {TABLE}").fetchone()
        return oldest  # type: ignore[no-any-return]

    def has_more(self, after: int) -> bool:
        return False

    def delete(self, pages: Sequence[RowPage]) -> None:
        gone = [row for page in pages for row in _named(page)]
        with self._removing() as connection:
            connection.executemany(f"DELETE FROM {TABLE} WHERE {SEQUENCE_ID} = ? AND {_ID_BYTES} IS ?", gone)

    def set_aside(self, page: RowPage, reason: str) -> None:
        with self._removing() as connection:
            all_names, there = _quoted_columns(connection, TABLE), _quoted_columns(connection, ASIDE_TABLE)
            for column in all_names:
                if column.lower() not in map(str.lower, there):
                    connection.execute(f"ALTER TABLE {ASIDE_TABLE} ADD {column}")
            names = ", ".join(all_names)
            for number, name in _named(page):
                connection.execute(
                    f"INSERT INTO {ASIDE_TABLE} ({names}, reason) SELECT {names}, ? FROM {TABLE} "
                    f"WHERE {SEQUENCE_ID} = ? AND {_ID_BYTES} IS ?",
                    (reason, number, name),
                )
                connection.execute(f"DELETE FROM {TABLE} WHERE {SEQUENCE_ID} = ? AND {_ID_BYTES} IS ?", (number, name))

    def renumber(self, page: RowPage) -> None:
        raise NotImplementedError("no row is from elsewhere")

    def replace_token(self, token: str) -> None:
        with self._removing() as connection:
            connection.execute(f"UPDATE {TOKEN_TABLE} SET token = ? WHERE token = ?", (secrets.token_hex(8), token))

    def lag(self) -> Lag:
        with self._using() as connection:
            [rows] = connection.execute(f"SELECT count(*) FROM {TABLE}").fetchone()
            [aside] = connection.execute(f"SELECT count(*) FROM {ASIDE_TABLE}").fetchone()
        return Lag(rows, 0, "", 0.0, aside)

    @contextmanager
    def _using(self) -> Iterator[sqlite3.Connection]:
        with self._lock, _errors():
            if self._connection is None:
                raise unavailable("it is not open")
            yield self._connection

    @contextmanager
    def _removing(self) -> Iterator[sqlite3.Connection]:
        """Begin a transaction in which the trigger allows deletes."""
        with self._using() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                connection.execute(f"UPDATE {TOKEN_TABLE} SET relay_deletes = 1")
                yield connection
                connection.execute(f"UPDATE {TOKEN_TABLE} SET relay_deletes = 0")
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise


def _named(page: RowPage) -> list[tuple[int, bytes | None]]:
    """Return the number and the `id` of each row."""
    there = page.there[:, 0].tolist()
    return [
        (number, one if is_there else None)
        for number, one, is_there in zip(page.sequence_ids.tolist(), page.ids(), there, strict=True)
    ]


def _quoted_columns(connection: sqlite3.Connection, table: str) -> list[str]:
    """Return the names of the columns, including computed columns."""
    return ['"' + row[1].replace('"', '""') + '"' for row in connection.execute(f"PRAGMA table_xinfo({table})")]


def _check(connection: sqlite3.Connection) -> None:
    wanted = {
        TABLE: (*COLUMNS, SEQUENCE_ID),
        TOKEN_TABLE: ("token", "producer", "topic", "relay_deletes"),
        ASIDE_TABLE: (*COLUMNS, SEQUENCE_ID, "reason"),
    }
    for table, names in wanted.items():
        found = {row[1]: row for row in connection.execute(f"PRAGMA table_info({table})")}
        check_columns(table, found, names)
        if table == TABLE:
            check_names(name.lower() for name in found)
        if table == TABLE and "INT" in found["id"][2].upper():
            raise bad_outbox(
                f"{TABLE}.id is {found['id'][2]}: an id must never come again, and numbers do after a restore"
            )
    [made] = connection.execute("SELECT upper(sql) FROM sqlite_master WHERE name = ?", (TABLE,)).fetchone()
    if "AUTOINCREMENT" not in made:
        raise bad_outbox(f"{TABLE}.{SEQUENCE_ID} should be INTEGER PRIMARY KEY AUTOINCREMENT")
    there = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'")}
    for name in SQLITE_TRIGGERS:
        if name not in there:
            raise bad_outbox(f"{TABLE} lacks the trigger {name}")
    if connection.execute(f"SELECT 1 FROM {TOKEN_TABLE}").fetchone() is None:
        raise bad_outbox(f"{TOKEN_TABLE} has no row")
