"""The contract between a relay and a database: the rows and states that they exchange, the methods of a database's
outbox (`OutboxStore`), and the choice of the implementation by the database's URL."""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from sqlalchemy.engine import URL

from seqdedupe.batch import NO_INT64S, Binary, Int64s, PropertyColumns
from seqdedupe.databases import failures
from seqdedupe.databases.tables import UrlError, url_of
from seqdedupe.errors import InvalidRequestError, SeqdedupeError, error
from seqdedupe.limits import MAX_PAYLOAD_BYTES, NO_SEQUENCE_ID

# -- A page of rows, as columns. The columns go unchanged into a batch of the client, without an object for each row.
# The table and its columns have the names of Debezium's outbox router, so that users of Debezium can switch.

TABLE = "outbox"
TOKEN_TABLE = "outbox_token"
ASIDE_TABLE = "outbox_aside"

COLUMNS = ("id", "aggregatetype", "aggregateid", "type", "payload")
"""The columns of Debezium. `aggregateid` becomes the key, `payload` the payload."""

SEQUENCE_ID = "sequence_id"
"""The column that is added to Debezium's columns. It determines the order and the sequence IDs in which rows are
published."""

PROPERTIES = ("id", "aggregatetype", "type")
"""The columns whose values become properties with the same names, unless the value is NULL."""

ORDINAL_BITS = 24
"""The number of low bits of a sequence ID in a PostgreSQL table that an older version made. These bits are the row's
number in its transaction. The bits above are the transaction's ID."""

MAX_REST_BYTES = 1024 * 1024
"""The maximum size of a row's key and properties. Together with a payload of maximum size they fit into a batch."""

_NAMES = [name.encode() for name in PROPERTIES]
_ALL_NAMES = b"".join(_NAMES)
_NAME_ENDS = np.cumsum([len(name) for name in _NAMES]).astype(np.int32)

Route = Callable[[str], str]
"""The function that returns the topic of an aggregate type. Raises InvalidRequestError if there is no topic."""


@dataclass(slots=True)
class RowPage:
    """Rows of the outbox, in ascending order of sequence IDs."""

    sequence_ids: Int64s
    keys: Binary
    payloads: Binary
    sizes: Int64s
    """The size of each payload in bytes, even if the payload is too large to be read; 0 for NULL."""
    values: Binary
    """The values of the properties, row by row, in the order of `PROPERTIES`. NULLs are omitted."""
    there: npt.NDArray[np.bool_]
    """Whether each row has each property, one column per property."""
    ids_as_read: bytes | None = None
    """The `id`s, separated by NUL. Set only if the table had no other rows between the first and the last row when the
    page was read."""

    def __len__(self) -> int:
        return len(self.sequence_ids)

    @property
    def last(self) -> int:
        return int(self.sequence_ids[-1])

    def column(self, name: str) -> list[bytes | None]:
        """Return the values of a property."""
        place = PROPERTIES.index(name)
        starts = np.cumsum(self.there.ravel())  # the end offset of each value
        places = starts.reshape(self.there.shape)[:, place] - 1
        offsets, data = self.values.offsets, self.values.data
        firsts, lasts = offsets[places].tolist(), offsets[places + 1].tolist()
        if self.there[:, place].all():
            return [data[first:last] for first, last in zip(firsts, lasts, strict=True)]
        return [
            data[first:last] if is_there else None
            for first, last, is_there in zip(firsts, lasts, self.there[:, place].tolist(), strict=True)
        ]

    def ids(self) -> list[bytes]:
        """Return the `id`s of the rows as text. A row without an `id` is never published, and its text is empty."""
        return [one or b"" for one in self.column("id")]

    def properties(self) -> PropertyColumns:
        """Return the property columns of a batch."""
        rows = len(self)
        if self.there.all():
            offsets = np.arange(rows + 1, dtype=np.int32) * np.int32(len(PROPERTIES))
            ends = (_NAME_ENDS + np.arange(rows, dtype=np.int32)[:, None] * _NAME_ENDS[-1]).ravel()
            name_offsets = np.concatenate((np.zeros(1, np.int32), ends.astype(np.int32)))
            return PropertyColumns(offsets, Binary(name_offsets, _ALL_NAMES * rows), self.values)
        offsets = np.concatenate(([0], np.cumsum(self.there.sum(axis=1)))).astype(np.int32)
        names = [_NAMES[place] for place in np.nonzero(self.there)[1]]
        return PropertyColumns(offsets, Binary.of_all(names), self.values)

    def take(self, rows: Int64s) -> "RowPage":
        """Return a page of the rows at these places, which are in ascending order."""
        if len(rows) == len(self):
            return self
        ends = np.concatenate(([0], np.cumsum(self.there.sum(axis=1))))
        picked = [np.arange(ends[row], ends[row + 1]) for row in rows.tolist()]
        values = np.concatenate(picked).astype(np.int64) if picked else NO_INT64S
        return RowPage(
            self.sequence_ids[rows],
            _keys_of(self.keys.take(rows)),
            self.payloads.take(rows),
            self.sizes[rows],
            self.values.take(values),
            self.there[rows],
        )

    def cut(self, max_bytes: int) -> Iterator["RowPage"]:
        """Yield the page in parts. A part has at least one row, and at most about `max_bytes` bytes."""
        total = int(self.sizes.sum()) + len(self.values.data) + len(self.keys.data)
        if total <= max_bytes:
            yield self
            return
        per_row = (total - int(self.sizes.sum())) // len(self) + 1
        first, size = 0, 0
        for row, payload_bytes in enumerate(self.sizes.tolist()):
            size += payload_bytes + per_row
            if size > max_bytes and row > first:
                yield self.take(np.arange(first, row))
                first, size = row, payload_bytes + per_row
        yield self.take(np.arange(first, len(self)))

    def unpublishable(self, route: Route | None) -> dict[int, str]:
        """Return the rows that can never be published, each with the reason."""
        found: dict[int, str] = {}
        for row in np.flatnonzero(self.sizes > MAX_PAYLOAD_BYTES).tolist():
            found[row] = f"a payload of {self.sizes[row]} bytes: at most {MAX_PAYLOAD_BYTES} are taken"
        for row in np.flatnonzero(self.sequence_ids < 0).tolist():
            found[row] = f"its {SEQUENCE_ID} is {self.sequence_ids[row]}: leave it out, and it gets one"
        for row in np.flatnonzero(~self.there[:, 0]).tolist():
            found[row] = "its id is NULL, or a number"
        for row in self._without_id():
            found[row] = "its id is empty"
        if len(self.keys.data) + len(self.values.data) > MAX_REST_BYTES:
            found |= dict.fromkeys(self._too_large(), f"key and properties have more than {MAX_REST_BYTES} bytes")
        if not _is_utf8(self.values.data):
            for name in PROPERTIES:
                bad = (row for row, value in enumerate(self.column(name)) if not _is_utf8(value or b""))
                found |= dict.fromkeys(bad, f"its {name} is not UTF-8")
        if route is not None:
            found |= self._without_topic(route, found)
        return found

    def _without_id(self) -> list[int]:
        """Return the rows whose `id` is an empty text."""
        there = self.there.ravel()
        sizes = np.zeros(len(there), np.int64)
        sizes[there] = np.diff(self.values.offsets)
        return [int(row) for row in np.flatnonzero(self.there[:, 0] & (sizes.reshape(self.there.shape)[:, 0] == 0))]

    def _too_large(self) -> list[int]:
        ends = np.concatenate(([0], np.cumsum(self.there.sum(axis=1))))
        sizes = np.diff(self.values.offsets[ends].astype(np.int64))
        if self.keys:
            sizes = sizes + np.diff(self.keys.offsets)
        return [int(row) for row in np.flatnonzero(sizes > MAX_REST_BYTES)]

    def _without_topic(self, route: Route, known: dict[int, str]) -> dict[int, str]:
        bad: dict[int, str] = {}
        why: dict[bytes | None, str] = {}
        for row, kind in enumerate(self.column("aggregatetype")):
            if row not in known:
                if kind not in why:
                    why[kind] = _why_no_topic(route, kind)
                if why[kind]:
                    bad[row] = why[kind]
        return bad

    def by_topic(self, route: Route | None, topic: str) -> list[tuple[str, "RowPage"]]:
        """Return the page divided by topics. Without a route there is one topic."""
        if route is None:
            return [(topic, self)]
        rows: dict[bytes, list[int]] = {}
        for row, kind in enumerate(self.column("aggregatetype")):
            rows.setdefault(kind or b"", []).append(row)
        topics: dict[str, list[int]] = {}
        for kind, of_kind in rows.items():
            topics.setdefault(route(kind.decode()), []).extend(of_kind)
        return [(name, self.take(np.array(sorted(picked), np.int64))) for name, picked in topics.items()]


def page_of(
    sequence_ids: Sequence[int],
    ids: Sequence[bytes | None],
    kinds: Sequence[bytes | None],
    keys: Sequence[bytes | None],
    types: Sequence[bytes | None],
    payloads: Sequence[bytes | None],
    sizes: Sequence[int] | None = None,
) -> RowPage:
    """Return a page with these values. The value None stands for NULL."""
    flat = [value for row in zip(ids, kinds, types, strict=True) for value in row]
    there = np.array([value is not None for value in flat], np.bool_).reshape(len(sequence_ids), len(PROPERTIES))
    return RowPage(
        np.array(sequence_ids, np.int64),
        Binary.of(keys),
        payload_column(payloads),
        np.array([len(one or b"") for one in payloads] if sizes is None else sizes, np.int64),
        Binary.of_all([value for value in flat if value is not None]),
        there,
    )


def payload_column(payloads: Sequence[bytes | None]) -> Binary:
    """Return a payload column. In contrast to a key column it is never omitted: if no row has a payload, the column
    contains a NULL for each row."""
    column = Binary.of(payloads)
    if column or not payloads:
        return column if column else Binary.of_all([])
    return Binary.of_all([b""] * len(payloads), bytes((len(payloads) + 7) // 8))


def _keys_of(keys: Binary) -> Binary:
    """Return the key column. If no row has a key, return a column without offsets, which is omitted from the batch."""
    return Binary() if keys.validity and not any(keys.validity) else keys


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _why_no_topic(route: Route, kind: bytes | None) -> str:
    if not kind:
        return f"its aggregatetype is {'NULL' if kind is None else 'empty'}, and says the topic"
    try:
        route(kind.decode())
    except InvalidRequestError as e:
        return e.message
    return ""


# -- The contract: what a database's outbox does for a relay.

PAGE_ROWS = 5000
PAGE_BYTES = 2 * 1024 * 1024
"""A page ends with the row that brings the page to this number of bytes or rows."""

_DRIVERS = {"postgresql": "psycopg", "sqlite": "sqlite3"}
_MODULES = {"postgresql": "postgres_outbox", "sqlite": "sqlite_outbox"}


class OutboxState(NamedTuple):
    """The state that the database reports."""

    token: str
    next_sequence_id: int
    """All rows inserted from now on have numbers at or above this one. All rows inserted before in this database have
    numbers below it."""
    has_had: bool
    """Whether a row with the number in question has ever existed, as far as the database knows."""


@dataclass(frozen=True, slots=True)
class Lag:
    """The rows that the relay has not deleted yet, and the transaction that delays rows."""

    rows: int
    """The number of rows committed and not deleted yet."""
    unreadable_rows: int
    """The number of unpublished rows that wait for an open transaction, which might have rows before them. (Their own
    transactions began to write after the open transaction.) Rows that no relay has seen since this relay began also
    wait, but are not counted."""
    held_by: str
    """The transaction for which these rows wait, in any database of the server, as far as the server reports it. Empty
    if no rows wait, or if no open transaction has written."""
    held_seconds: float
    set_aside_rows: int


class OutboxStore(ABC):
    """The outbox in a database. Its methods block. Threads may share the object, and `delete` may run while a second
    thread reads.

    The methods raise UnavailableError (OUTBOX_UNAVAILABLE) when the database cannot be used now. `open` then replaces
    all connections, so that rows are read from and deleted in the same database.
    """

    poll_seconds: float
    """The time between two reads while there may be rows of which the database does not notify the relay."""
    idle_poll_seconds: float
    """The time between two reads while the database notifies the relay of new rows."""

    @abstractmethod
    def open(self) -> None:
        """Connect and check the tables. Raises ConfigurationError (INVALID_OUTBOX), which names the problem."""

    @abstractmethod
    def close(self) -> None:
        """Close the connections."""

    @abstractmethod
    def bind(self, producer: str, topic: str) -> None:
        """Record that the outbox is published under this producer name to this topic from now on. Raises
        ConfigurationError (OUTBOX_CHANGED) if another name or topic is recorded: the rows would be published twice."""

    @abstractmethod
    def state(self, number: int = NO_SEQUENCE_ID) -> OutboxState:
        """See `steps.ReadState`."""

    @abstractmethod
    def read(self, after: int) -> RowPage:
        """See `steps.ReadRows`."""

    @abstractmethod
    def read_elsewhere(self) -> RowPage:
        """See `steps.ReadElsewhere`."""

    @abstractmethod
    def oldest(self) -> int | None:
        """Return the sequence ID of the row that a relay would read first now, including restored rows."""

    @abstractmethod
    def has_more(self, after: int) -> bool:
        """Return whether there is a later row, even if the later row must wait for an open transaction."""

    @abstractmethod
    def delete(self, pages: Sequence[RowPage]) -> None:
        """Delete these rows, each identified by its sequence ID and `id`."""

    @abstractmethod
    def set_aside(self, page: RowPage, reason: str) -> None:
        """See `steps.SetRowsAside`."""

    @abstractmethod
    def renumber(self, page: RowPage) -> None:
        """See `steps.Renumber`."""

    @abstractmethod
    def replace_token(self, token: str) -> None:
        """See `steps.ReplaceToken`."""

    @abstractmethod
    def lag(self) -> Lag:
        """Return the current lag. This reads the whole table."""

    @property
    def file_number(self) -> int | None:
        """The number of the file descriptor that becomes readable when rows were inserted; None if the store has no
        such descriptor."""
        return None


def open_store(database: str) -> OutboxStore:
    """Return the outbox at a URL of SQLAlchemy, `postgresql://…` or `sqlite:///…`. The function does not connect yet.

    Raises ConfigurationError (INVALID_CONFIGURATION), whose text does not contain the password.
    """
    url = database_url(database)
    kind = url.get_backend_name()
    try:
        module = importlib.import_module(f"seqdedupe.services.outbox.{_MODULES[kind]}")
    except ModuleNotFoundError as e:
        if e.name != _DRIVERS[kind]:
            raise
        raise error(
            "INVALID_CONFIGURATION",
            f"an outbox in {kind} needs {e.name}",
            hint="Install it: pip install psycopg[binary]",
        ) from e
    store: OutboxStore = module.store(url)
    return store


def database_url(database: str) -> URL:
    """Return the URL as parsed by SQLAlchemy. Raises ConfigurationError (INVALID_CONFIGURATION), whose text does not
    contain the URL."""
    hint = "Write it as SQLAlchemy does: postgresql://user@host/database, sqlite:///path."
    try:
        url = url_of(database)
    except UrlError as e:
        raise error("INVALID_CONFIGURATION", f"the URL of the outbox's database {e}", hint=hint) from None
    kind = url.get_backend_name()
    if kind not in _DRIVERS:
        raise error(
            "INVALID_CONFIGURATION",
            f"the database's URL is not one of a database that an outbox may be in: {kind}",
            hint=hint,
        )
    return url


def bad_outbox(what: str, hint: str | None = None) -> SeqdedupeError:
    return error("INVALID_OUTBOX", what, hint=hint)


def check_columns(table: str, there: Collection[str], wanted: Iterable[str]) -> None:
    """Raise INVALID_OUTBOX for a table that does not exist, or lacks a column. `there` are the columns that exist."""
    if not there:
        raise bad_outbox(f"there is no table {table}")
    for name in wanted:
        if name not in there:
            raise bad_outbox(f"the table {table} has no column {name}")


def check_names(columns: Iterable[str]) -> None:
    """Raise INVALID_OUTBOX for a column of the outbox whose name already exists in the table of rows set aside."""
    for name in sorted({"reason", "set_aside_at"}.intersection(columns)):
        raise bad_outbox(f"{TABLE} has a column {name}, which {ASIDE_TABLE} needs for itself: rename it")


def changed(what: str, is_now: str, told: str) -> SeqdedupeError:
    return error(
        "OUTBOX_CHANGED",
        f"this outbox is published {what} {is_now!r}, and the relay was started with {told!r}: rows that are "
        "published and not deleted yet would be published twice",
    )


def unavailable(why: str, hint: str | None = None) -> SeqdedupeError:
    return error("OUTBOX_UNAVAILABLE", f"the outbox's database cannot be used: {' '.join(why.split())}", hint=hint)


@contextmanager
def converted_errors(database: str, kind: type[Exception]) -> Iterator[None]:
    """Convert the errors of the database's driver, which have this type, to errors of seqdedupe. No error contains the
    URL."""
    try:
        yield
    except kind as e:
        if failures.fault_of(e) is not failures.Fault.MESSAGE:
            raise unavailable(failures.told(e)) from e
        raise bad_outbox(f"{database} refuses it: {failures.told(e)}") from e
