"""The contract between a relay and a database, and the choice of the database by its URL."""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from sqlalchemy.engine import URL

from seqdedupe.databases import failures
from seqdedupe.databases.tables import UrlError, url_of
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.limits import NO_SEQUENCE_ID
from seqdedupe.services.outbox.row_page import ASIDE_TABLE, TABLE, RowPage
from seqdedupe.services.outbox.steps import OutboxState

PAGE_ROWS = 5000
PAGE_BYTES = 2 * 1024 * 1024
"""A page ends with the row that brings the page to this number of bytes or rows."""

_DRIVERS = {"postgresql": "psycopg", "sqlite": "sqlite3"}
_MODULES = {"postgresql": "postgres_outbox", "sqlite": "sqlite_outbox"}


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
        """Return whether there is a row after this one, even if that row must wait for an open transaction."""

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
