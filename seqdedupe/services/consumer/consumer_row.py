"""A consumer's row in the database: its position, and the process that works.

`RowLease` is the hold of one process on the row. For a partitioned topic there is one such row for each partition. The
processes that share the partitions have separate rows (`Processes`). `fair_share` is the number of partitions for each
process.
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
from seqdedupe.services.consumer.database import CONSUMERS, FORMAT_VERSION, IDENTITIES, PROCESSES

NOBODY = ""

TAKE_OVER_SECONDS = 3.0
"""A process counts as ended if its row has not changed for this time, measured by the clock of the standby process."""

KEEP_UP_SECONDS = 1.0
"""The minimum time between two updates that show that the process is alive, and between two looks at the parked
messages."""

HELD_SECONDS = 15.0
"""If a row was locked at each look for this time, the consumer reports it. A transaction ends sooner, unless the
process that owns the row is frozen or its handler waits."""


def row_name(consumer: str, partition: int) -> str:
    """Return the name of a partition's row. Messages that are set aside from the partition have the same consumer
    name."""
    return f"{consumer}-partition-{partition}"


def positions_of(engine: Engine, consumer: str) -> dict[str, Position]:
    """Return the positions of a consumer, by its topic or by partition. Raises INVALID_OPTION if the consumer does not
    exist in the database."""
    number = re.compile(re.escape(row_name(consumer, 0)[:-1]) + "[0-9]+")
    with engine.connect() as connection:
        rows = connection.execute(select(CONSUMERS.c.name, CONSUMERS.c.topic, CONSUMERS.c.position)).all()
    found = [row for row in rows if row.name == consumer or number.fullmatch(row.name)]
    if not found:
        what = f"no consumer {consumer!r} has a position in this database"
        raise error("INVALID_OPTION", what, hint=f"It has: {', '.join(sorted(row.name for row in rows)) or 'none'}.")
    return {row.topic: Position.parse(row.position) for row in sorted(found, key=lambda row: (len(row.name), row.name))}


class Lost(Exception):
    """Another process has moved the position, or has taken over the consumer. The transaction was not committed."""


class SeenRow(NamedTuple):
    """The contents of the row. Every action of the owner increases `beat`."""

    owner: str
    beat: int
    position: str


class RowLease:
    """The hold of one process on the row. Every transaction of the owner begins with `hold` and ends with `move`.

    `hold` locks the row, and fails if the position or the owner has changed. `move` is the compare-and-set that decides
    whether the transaction is valid.
    """

    def __init__(self, engine: Engine, name: str, token: str | None = None) -> None:
        self._engine = engine
        self._name = name
        self.token = token or uuid.uuid4().hex
        self._mine = (CONSUMERS.c.name == name) & (CONSUMERS.c.owner == self.token)

    def register(self, topic: str, purpose: str, start: Position) -> None:
        """Insert the row if it does not exist. Raises CONSUMER_CHANGED if the row belongs to another topic or purpose,
        NEWER_FORMAT."""
        mine = select(CONSUMERS).where(CONSUMERS.c.name == self._name)
        with self._engine.connect() as connection:
            found = connection.execute(mine).one_or_none()
        # the INSERT of an existing row would wait for the end of its owner's transaction, for any length of time
        if found is None:
            row = {"name": self._name, "format_version": FORMAT_VERSION, "topic": topic, "purpose": purpose}
            with suppress(IntegrityError), self._engine.begin() as connection:
                connection.execute(insert(CONSUMERS).values(row | _new(start)))
                _identify(connection, self._name)
            with self._engine.connect() as connection:
                found = connection.execute(mine).one()
        if not 1 <= found.format_version <= FORMAT_VERSION:
            what = f"the consumer {self._name!r} has format {found.format_version}; this version reads {FORMAT_VERSION}"
            raise error("NEWER_FORMAT", what)
        for what, given, stored in (("topic", topic, found.topic), ("purpose", purpose, found.purpose)):
            if given != stored:
                raise error(
                    "CONSUMER_CHANGED",
                    f"the consumer {self._name!r} of this database has the {what} {stored}, and not {given}",
                )

    def look(self) -> SeenRow | None:
        """Return the contents of the row. Return None while the owner is in a transaction, if the database reports
        that."""
        wanted = select(CONSUMERS.c.owner, CONSUMERS.c.beat, CONSUMERS.c.position)
        with self._engine.begin() as connection:
            found = connection.execute(
                wanted.where(CONSUMERS.c.name == self._name).with_for_update(skip_locked=True)
            ).one_or_none()
        return SeenRow(*found) if found else None

    def take(self, seen: SeenRow) -> bool:
        """Make this process the owner, if the row has not changed since `seen`. Return whether this process is now the
        owner."""
        with self._engine.begin() as connection:
            unchanged = (CONSUMERS.c.owner == seen.owner) & (CONSUMERS.c.beat == seen.beat)
            taken = connection.execute(
                update(CONSUMERS)
                .where((CONSUMERS.c.name == self._name) & unchanged)
                .values(owner=self.token, beat=CONSUMERS.c.beat + 1)
            )
            return taken.rowcount == 1

    def hold(self, connection: Connection, position: str) -> None:
        """Lock the row until the transaction ends. Raises Lost.

        The lock is a write, and the transaction's first statement. So SQLite begins a transaction that may write, and
        no snapshot is older than the lock.
        """
        self._set(connection, position, position)

    def move(self, connection: Connection, position: str, to: str) -> None:
        """Compare the stored position, and set the new position. Raises Lost."""
        self._set(connection, position, to)

    def beat(self) -> None:
        """Show the standby processes that this process is alive. Raises Lost."""
        self.write()

    def write(self) -> None:
        """Write in a separate small transaction, to find out whether the database accepts writes. Raises Lost."""
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
        """Return an error that names the session that locks the row, and how to end that session."""
        return database.holder(self._engine, CONSUMERS, "t.name = :name", {"name": self._name})

    def release(self) -> None:
        """Release the row, so that another process can take it at once."""
        with self._engine.begin() as connection:
            connection.execute(update(CONSUMERS).where(self._mine).values(owner=NOBODY, beat=CONSUMERS.c.beat + 1))


class Held:
    """Reports, at intervals, the session that holds a row which stays locked."""

    def __init__(self, on_waiting: OnWaiting | None) -> None:
        self._on_waiting = on_waiting
        self._since: float | None = None

    def look(self, is_locked: bool, holder: Callable[[], UnavailableError]) -> None:
        """Note whether the row is locked now. If it has been locked for HELD_SECONDS, report the session that holds
        it."""
        now = time.monotonic()
        if not is_locked:
            self._since = None
        elif self._since is None:
            self._since = now
        elif now - self._since >= HELD_SECONDS and self._on_waiting is not None:
            self._since = now
            self._on_waiting(holder())


def check_transactions(engine: Engine) -> None:
    """Raise NOT_TRANSACTIONAL if a row still exists after a rollback, for instance with an engine in AUTOCOMMIT."""
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


def _identify(connection: Connection, name: str) -> None:
    """Give the row of a consumer an identity. If a person has deleted an earlier row with this name, the new row gets
    the identity of the earlier row, because dead letters of the earlier row may not be published yet."""
    mine = select(IDENTITIES.c.name).where(IDENTITIES.c.name == name)
    if connection.execute(mine).first() is None:
        connection.execute(insert(IDENTITIES).values(name=name, identity=uuid.uuid4().hex))


def identities_of(connection: Connection, names: Collection[str]) -> dict[str, str]:
    """Return the identities of consumers' rows, by name. Rows of format 1 have no identity."""
    wanted = select(IDENTITIES.c.name, IDENTITIES.c.identity).join(CONSUMERS, CONSUMERS.c.name == IDENTITIES.c.name)
    wanted = wanted.where(IDENTITIES.c.name.in_(names) & (CONSUMERS.c.format_version > 1))
    return {row.name: row.identity for row in connection.execute(wanted)}


# -- The processes that share a consumer of a partitioned topic: which of them live, and which partitions each has.


class Processes:
    """The rows of all processes of a consumer. The row of this process has the key `token`."""

    def __init__(self, engine: Engine, consumer: str, on_waiting: OnWaiting | None = None) -> None:
        self.token = uuid.uuid4().hex
        self.shown: set[str] = set()
        """The other processes that have shown that they are alive, since this process began."""
        self._engine = engine
        self._consumer = consumer
        self._all = PROCESSES.c.consumer == consumer
        self._mine = self._all & (PROCESSES.c.token == self.token)
        self._seen: dict[str, tuple[int, float]] = {}
        self._held: dict[str, Held] = {}
        self._on_waiting = on_waiting
        self._beat_at = float("-inf")

    def beat(self) -> None:
        """Show the other processes that this process is alive, if the interval has passed."""
        if time.monotonic() - self._beat_at < KEEP_UP_SECONDS:
            return
        with self._engine.begin() as connection:
            if not self._touch(connection):
                row = {"consumer": self._consumer, "token": self.token, "beat": 0}
                connection.execute(insert(PROCESSES).values(row))
        self._beat_at = time.monotonic()

    def hold(self, connection: Connection) -> None:
        """Prevent the other processes from declaring this process dead until the transaction ends, even if the
        transaction is long. Raises Lost if another process has already declared this process dead."""
        if not self._touch(connection):
            self._beat_at = float("-inf")
            raise Lost
        self._beat_at = time.monotonic()

    def _touch(self, connection: Connection) -> bool:
        moved = update(PROCESSES).where(self._mine).values(beat=PROCESSES.c.beat + 1)
        return connection.execute(moved).rowcount == 1

    def living(self) -> set[str]:
        """Return the tokens of all processes that are alive.

        A process loses its row if the row has not changed for `TAKE_OVER_SECONDS`, by this process's clock. If the
        process that lost its row is still alive, the next transaction of that process fails.
        """
        with self._engine.begin() as connection:
            tokens = set(connection.execute(select(PROCESSES.c.token).where(self._all)).scalars())
            # If the database reports locks: a locked row belongs to a process that is in a transaction.
            idle = select(PROCESSES.c.token, PROCESSES.c.beat).where(self._all).with_for_update(skip_locked=True)
            beats: dict[str, int] = {row.token: row.beat for row in connection.execute(idle)}
        now, before = time.monotonic(), self._seen
        self._held = {token: self._held.get(token, Held(self._on_waiting)) for token in tokens}
        for token, held in self._held.items():
            held.look(token not in beats, partial(self._holder, token))
        self.shown |= tokens.difference(beats)
        self.shown |= {token for token, beat in beats.items() if token in before and before[token][0] != beat}
        # The time since which the row of each process has not changed.
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
        """Release all partitions of this process, so that the other processes can take them at once."""
        with self._engine.begin() as connection:
            theirs = {"owner": NOBODY, "beat": CONSUMERS.c.beat + 1}
            connection.execute(update(CONSUMERS).where(CONSUMERS.c.owner == self.token).values(theirs))
            connection.execute(delete(PROCESSES).where(self._mine))


def fair_share(token: str, living: Collection[str], owners: Iterable[str], partitions: int) -> int:
    """Return the number of partitions for a process. The shares of all processes add up to all partitions. If the
    division leaves a remainder, the processes that already have more partitions keep them, so that no partition moves
    without need."""
    has = Counter(owners)
    order = sorted({token, *living}, key=lambda one: (-has[one], one))
    each, odd = divmod(partitions, len(order))
    return each + (order.index(token) < odd)


class PartOwnership(RowLease):
    """The hold on a partition's row. The process counts as alive as long as the process's separate row shows that."""

    def __init__(self, engine: Engine, name: str, processes: Processes) -> None:
        super().__init__(engine, name, processes.token)
        self._processes = processes

    def hold(self, connection: Connection, position: str) -> None:
        self._processes.hold(connection)
        super().hold(connection, position)

    def beat(self) -> None:
        self._processes.beat()
