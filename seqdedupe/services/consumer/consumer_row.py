"""A consumer's row in the database: its position, and which of its processes works.

`RowLease` is one process's hold on it. Where the topic is partitioned each partition has such a row, and the processes
that share them have rows of their own (`Processes`); `fair_share` says how many partitions each is to have.
"""

import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from sqlalchemy import Connection, Engine, delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from seqdedupe.client.route import OnWaiting
from seqdedupe.databases.tables import NO_AUTOCOMMIT
from seqdedupe.errors import UnavailableError, error
from seqdedupe.message_id import Position
from seqdedupe.services.consumer import database
from seqdedupe.services.consumer.database import CONSUMERS, FORMAT_VERSION, PROCESSES

NOBODY = ""

TAKE_OVER_SECONDS = 3.0
"""A process of which the row has said nothing for so long, by the clock of who stands by, has ended."""

KEEP_UP_SECONDS = 1.0
"""So often, at most, the row says that this process lives, and the parked messages are looked at."""

HELD_SECONDS = 15.0
"""A row that has been locked for so long, at each look, is spoken of: a transaction is over within that, unless its
owner is frozen or its handler waits."""


def row_name(consumer: str, partition: int) -> str:
    """The name of a partition's row, and of what was set aside there."""
    return f"{consumer}-partition-{partition}"


def positions_of(engine: Engine, consumer: str) -> dict[str, Position]:
    """Up to where a consumer has come, by the topic or each partition of it. Raises INVALID_OPTION if the database does
    not know it."""
    number = re.compile(re.escape(row_name(consumer, 0)[:-1]) + "[0-9]+")
    with engine.connect() as connection:
        rows = connection.execute(select(CONSUMERS.c.name, CONSUMERS.c.topic, CONSUMERS.c.position)).all()
    found = [row for row in rows if row.name == consumer or number.fullmatch(row.name)]
    if not found:
        what = f"no consumer {consumer!r} has a position in this database"
        raise error("INVALID_OPTION", what, hint=f"It has: {', '.join(sorted(row.name for row in rows)) or 'none'}.")
    return {row.topic: Position.parse(row.position) for row in sorted(found, key=lambda row: (len(row.name), row.name))}


class Lost(Exception):
    """Another process has moved the position, or taken the consumer over: nothing was committed."""


class SeenRow(NamedTuple):
    """What the row says: `beat` grows with everything that the owner does."""

    owner: str
    beat: int
    position: str


class RowLease:
    """One process's hold on the row. Every transaction of the owner begins and ends with it.

    `hold` locks the row and fails if the position or the owner is another; `move` is the compare-and-set that decides.
    """

    def __init__(self, engine: Engine, name: str, token: str | None = None) -> None:
        self._engine = engine
        self._name = name
        self.token = token or uuid.uuid4().hex
        self._mine = (CONSUMERS.c.name == name) & (CONSUMERS.c.owner == self.token)

    def register(self, topic: str, purpose: str, start: Position) -> None:
        """Makes the row if it is not there. Raises CONSUMER_CHANGED if it is another consumer's, NEWER_FORMAT."""
        mine = select(CONSUMERS).where(CONSUMERS.c.name == self._name)
        with self._engine.connect() as connection:
            found = connection.execute(mine).one_or_none()
        if found is None:  # an INSERT that finds it there waits for its owner's transaction, whatever that waits for
            row = {"name": self._name, "format_version": FORMAT_VERSION, "topic": topic, "purpose": purpose}
            with suppress(IntegrityError), self._engine.begin() as connection:
                connection.execute(insert(CONSUMERS).values(row | _new(start)))
            with self._engine.connect() as connection:
                found = connection.execute(mine).one()
        if found.format_version != FORMAT_VERSION:
            what = f"the consumer {self._name!r} has format {found.format_version}; this version reads {FORMAT_VERSION}"
            raise error("NEWER_FORMAT", what)
        for what, given, stored in (("topic", topic, found.topic), ("purpose", purpose, found.purpose)):
            if given != stored:
                raise error(
                    "CONSUMER_CHANGED",
                    f"the consumer {self._name!r} of this database has the {what} {stored}, and not {given}",
                )

    def look(self) -> SeenRow | None:
        """What the row says now; None while its owner is in a transaction, where the database can tell."""
        wanted = select(CONSUMERS.c.owner, CONSUMERS.c.beat, CONSUMERS.c.position)
        with self._engine.begin() as connection:
            found = connection.execute(
                wanted.where(CONSUMERS.c.name == self._name).with_for_update(skip_locked=True)
            ).one_or_none()
        return SeenRow(*found) if found else None

    def take(self, seen: SeenRow) -> bool:
        """Makes this process the owner, if nothing has happened since that was seen."""
        with self._engine.begin() as connection:
            unchanged = (CONSUMERS.c.owner == seen.owner) & (CONSUMERS.c.beat == seen.beat)
            taken = connection.execute(
                update(CONSUMERS)
                .where((CONSUMERS.c.name == self._name) & unchanged)
                .values(owner=self.token, beat=CONSUMERS.c.beat + 1)
            )
            return taken.rowcount == 1

    def hold(self, connection: Connection, position: str) -> None:
        """Locks the row to the end of the transaction. A write, and the first statement: so SQLite begins a transaction
        that may write, and no snapshot is older than the lock. Raises Lost."""
        self._set(connection, position, position)

    def move(self, connection: Connection, position: str, to: str) -> None:
        """The compare-and-set. Raises Lost."""
        self._set(connection, position, to)

    def beat(self) -> None:
        """Tells those who stand by that this process lives. Raises Lost."""
        self.write()

    def write(self) -> None:
        """A small transaction of its own, which shows that the database takes work. Raises Lost."""
        with self._engine.begin() as connection:
            found = connection.execute(update(CONSUMERS).where(self._mine).values(beat=CONSUMERS.c.beat + 1))
            if found.rowcount != 1:
                raise Lost

    def _set(self, connection: Connection, position: str, to: str) -> None:
        still = self._mine & (CONSUMERS.c.position == position)
        moved = update(CONSUMERS).where(still).values(beat=CONSUMERS.c.beat + 1, position=to)
        if connection.execute(moved).rowcount != 1:
            raise Lost

    def holder(self) -> UnavailableError:
        """Which session holds the row, and how to end it."""
        return database.holder(self._engine, CONSUMERS, "t.name = :name", {"name": self._name})

    def release(self) -> None:
        """So that another process need not wait."""
        with self._engine.begin() as connection:
            connection.execute(update(CONSUMERS).where(self._mine).values(owner=NOBODY, beat=CONSUMERS.c.beat + 1))


class Held:
    """Says of a row that stays locked who holds it: from time to time, while that lasts."""

    def __init__(self, on_waiting: OnWaiting | None) -> None:
        self._on_waiting = on_waiting
        self._since: float | None = None

    def look(self, is_locked: bool, holder: Callable[[], UnavailableError]) -> None:
        """It is locked now, or is not."""
        now = time.monotonic()
        if not is_locked:
            self._since = None
        elif self._since is None:
            self._since = now
        elif now - self._since >= HELD_SECONDS and self._on_waiting is not None:
            self._since = now
            self._on_waiting(holder())


def check_transactions(engine: Engine) -> None:
    """Raises NOT_TRANSACTIONAL if a row that was rolled back is there: an engine with AUTOCOMMIT, for instance."""
    probe = f"probe {uuid.uuid4().hex}"
    row = {"name": probe, "format_version": FORMAT_VERSION, "topic": "", "purpose": ""}
    with engine.connect() as connection:
        connection.execute(insert(CONSUMERS).values(row | _new(Position.start(0))))
        connection.rollback()
        stayed = connection.execute(delete(CONSUMERS).where(CONSUMERS.c.name == probe)).rowcount
        connection.commit()
    if stayed:
        what = f"the consumer's engine commits each statement: a row that it rolled back stayed in {CONSUMERS.name}"
        raise error("NOT_TRANSACTIONAL", what, hint=NO_AUTOCOMMIT)


def _new(start: Position) -> dict[str, object]:
    return {"position": str(start), "owner": NOBODY, "beat": 0}


# -- The processes that share a consumer of a partitioned topic: which of them live, and what is whose.


class Processes:
    """The rows of all processes of a consumer; this one has the row `token`."""

    def __init__(self, engine: Engine, consumer: str, on_waiting: OnWaiting | None = None) -> None:
        self.token = uuid.uuid4().hex
        self.shown: set[str] = set()
        """The others that have shown since this process began that they live."""
        self._engine = engine
        self._consumer = consumer
        self._all = PROCESSES.c.consumer == consumer
        self._mine = self._all & (PROCESSES.c.token == self.token)
        self._seen: dict[str, tuple[int, float]] = {}
        self._held: dict[str, Held] = {}
        self._on_waiting = on_waiting
        self._beat_at = float("-inf")

    def beat(self) -> None:
        """Tells the others that this process lives, if it is time for that."""
        if time.monotonic() - self._beat_at < KEEP_UP_SECONDS:
            return
        with self._engine.begin() as connection:
            if not self._touch(connection):
                row = {"consumer": self._consumer, "token": self.token, "beat": 0}
                connection.execute(insert(PROCESSES).values(row))
        self._beat_at = time.monotonic()

    def hold(self, connection: Connection) -> None:
        """To the end of the transaction nobody takes this process for dead, however long that takes. Raises Lost if
        somebody has."""
        if not self._touch(connection):
            self._beat_at = float("-inf")
            raise Lost
        self._beat_at = time.monotonic()

    def _touch(self, connection: Connection) -> bool:
        moved = update(PROCESSES).where(self._mine).values(beat=PROCESSES.c.beat + 1)
        return connection.execute(moved).rowcount == 1

    def living(self) -> set[str]:
        """All that live, by their tokens. One whose row has said nothing for `TAKE_OVER_SECONDS`, by this process's
        clock, loses it: should it live after all, its next transaction fails."""
        with self._engine.begin() as connection:
            tokens = set(connection.execute(select(PROCESSES.c.token).where(self._all)).scalars())
            # A row that is locked is that of a process within a transaction, where the database can tell.
            idle = select(PROCESSES.c.token, PROCESSES.c.beat).where(self._all).with_for_update(skip_locked=True)
            beats: dict[str, int] = {row.token: row.beat for row in connection.execute(idle)}
        now, before = time.monotonic(), self._seen
        self._held = {token: self._held.get(token, Held(self._on_waiting)) for token in tokens}
        for token, held in self._held.items():
            held.look(token not in beats, partial(self._holder, token))
        self.shown |= tokens.difference(beats)
        self.shown |= {token for token, beat in beats.items() if token in before and before[token][0] != beat}
        # Since when each of these has said nothing.
        self._seen = {
            token: before[token] if token in before and before[token][0] == beat else (beat, now)
            for token, beat in beats.items()
            if token != self.token
        }
        for token, (beat, since) in self._seen.items():
            if now - since >= TAKE_OVER_SECONDS and self._remove(token, beat):
                tokens.discard(token)
        self.shown &= tokens
        return tokens

    def _holder(self, token: str) -> UnavailableError:
        values = {"token": token, "consumer": self._consumer}
        return database.holder(self._engine, PROCESSES, "t.token = :token AND t.consumer = :consumer", values)

    def _remove(self, token: str, beat: int) -> bool:
        unchanged = self._all & (PROCESSES.c.token == token) & (PROCESSES.c.beat == beat)
        with self._engine.begin() as connection:
            return connection.execute(delete(PROCESSES).where(unchanged)).rowcount == 1

    def leave(self) -> None:
        """Gives back all that this process has, so that the others need not wait."""
        with self._engine.begin() as connection:
            theirs = {"owner": NOBODY, "beat": CONSUMERS.c.beat + 1}
            connection.execute(update(CONSUMERS).where(CONSUMERS.c.owner == self.token).values(theirs))
            connection.execute(delete(PROCESSES).where(self._mine))


def fair_share(token: str, living: Collection[str], owners: Iterable[str], partitions: int) -> int:
    """How many partitions a process is to have. All of them together have all; who has more already keeps the odd one,
    so that nothing moves without need."""
    has = Counter(owners)
    order = sorted({token, *living}, key=lambda one: (-has[one], one))
    each, odd = divmod(partitions, len(order))
    return each + (order.index(token) < odd)


class PartOwnership(RowLease):
    """The hold on a partition's row by a process that lives as long as its own row says so."""

    def __init__(self, engine: Engine, name: str, processes: Processes) -> None:
        super().__init__(engine, name, processes.token)
        self._processes = processes

    def hold(self, connection: Connection, position: str) -> None:
        self._processes.hold(connection)
        super().hold(connection, position)

    def beat(self) -> None:
        self._processes.beat()
