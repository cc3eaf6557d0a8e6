"""What a relay needs of a database: a contract, and which of them a URL is of."""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.limits import NO_SEQUENCE_ID
from seqdedupe.services.outbox.row_page import ASIDE_TABLE, TABLE, RowPage
from seqdedupe.services.outbox.steps import OutboxState

PAGE_ROWS = 5000
PAGE_BYTES = 2 * 1024 * 1024
"""A page ends after the row with which it has so many bytes, or so many rows."""

_DRIVERS = {"postgresql": "psycopg", "sqlite": "sqlite3"}
_MODULES = {"postgresql": "postgres_outbox", "sqlite": "sqlite_outbox"}


@dataclass(frozen=True, slots=True)
class Lag:
    """How far behind the relay is."""

    rows: int
    """Committed, and not deleted yet."""
    unreadable_rows: int
    """Of these, they were committed by transactions that began to write after one which is still open: so they wait
    for it, as it might have rows before them. Of the others those wait, too, that no relay has seen since it began."""
    held_by: str
    """Which one that is, of all databases of the server, as far as that tells; empty if there are no rows, or if no
    transaction is open that has written."""
    held_seconds: float
    set_aside_rows: int


class OutboxStore(ABC):
    """The outbox in a database. Its methods block; threads may share it, and `delete` runs beside reading.

    They raise UnavailableError (OUTBOX_UNAVAILABLE) when the database cannot be used now: `open` then begins anew, with
    all connections, so that what one has read another one deletes in the same database.
    """

    poll_seconds: float
    """So often to look for rows while there may be some of which nothing is heard."""
    idle_poll_seconds: float
    """The same where the database would tell of new ones."""

    @abstractmethod
    def open(self) -> None:
        """Connects and checks the tables. Raises ConfigurationError (INVALID_OUTBOX), which says what is amiss."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of the connections."""

    @abstractmethod
    def bind(self, producer: str, topic: str) -> None:
        """The outbox is published under this name to this topic from now on. Raises ConfigurationError (OUTBOX_CHANGED)
        if it has been under another one, or to another: its rows would be published twice."""

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
        """The sequence ID of the first row that a relay would look at now, from elsewhere or not."""

    @abstractmethod
    def has_more(self, after: int) -> bool:
        """Whether there is a row after this one, which may have to wait."""

    @abstractmethod
    def delete(self, pages: Sequence[RowPage]) -> None:
        """Deletes these rows, told apart by sequence ID and `id`."""

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
        """Counted now; it reads the whole table."""

    @property
    def file_number(self) -> int | None:
        """What becomes readable when rows were inserted; None if nothing does."""
        return None


def open_store(database: str) -> OutboxStore:
    """The outbox at a URL of SQLAlchemy's, `postgresql://…` or `sqlite:///…`. Nothing is connected yet.

    Raises ConfigurationError (INVALID_CONFIGURATION), which does not quote the password.
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
    """As SQLAlchemy reads it. Raises ConfigurationError (INVALID_CONFIGURATION), which does not quote it."""
    try:
        url = make_url(database)
        kind = url.get_backend_name()
    except ArgumentError:
        kind = ""
    if kind not in _DRIVERS:
        raise error(
            "INVALID_CONFIGURATION",
            "the database's URL is not one of a database that an outbox may be in" + (f": {kind}" if kind else ""),
            hint="Write it as SQLAlchemy does: postgresql://user@host/database, sqlite:///path.",
        )
    return url


def bad_outbox(what: str, hint: str | None = None) -> SeqdedupeError:
    return error("INVALID_OUTBOX", what, hint=hint)


def check_names(columns: Iterable[str]) -> None:
    """Raises INVALID_OUTBOX for a column of the outbox that would be in the table of rows set aside twice."""
    for name in sorted({"reason", "set_aside_at"}.intersection(columns)):
        raise bad_outbox(f"{TABLE} has a column {name}, which {ASIDE_TABLE} needs for itself: rename it")


def changed(what: str, is_now: str, told: str) -> SeqdedupeError:
    return error(
        "OUTBOX_CHANGED",
        f"this outbox is published {what} {is_now!r}, and the relay was told {told!r}: what was published and is not "
        "deleted yet would be published twice",
    )


def unavailable(why: str, hint: str | None = None) -> SeqdedupeError:
    return error("OUTBOX_UNAVAILABLE", f"the outbox's database cannot be used: {' '.join(why.split())}", hint=hint)
