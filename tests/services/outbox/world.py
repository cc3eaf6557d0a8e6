"""A database, a topic and relays that are no real ones: any order of commits, any kill, any restore.

The relay's steps are the real ones. Each is done here in one go; a relay may be killed before or after any of them, and
its messages may be in flight for any time.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from seqdedupe.errors import error
from seqdedupe.names import partition_of
from seqdedupe.services.outbox import steps
from seqdedupe.services.outbox.postgres_outbox import Horizon
from seqdedupe.services.outbox.relay import ANYWHERE, SeenTopic, is_one_of, token_name
from seqdedupe.services.outbox.store import ORDINAL_BITS, OutboxState, RowPage, page_of

TOPIC = "topic"
NAME = "shop"
PAGE_ROWS = 3
MOST_LINGERING = 3


class Row(NamedTuple):
    number: int
    id: str


@dataclass(eq=False)
class Transaction:
    xid: int | None = None
    """From its first write on."""
    rows: list[Row] = field(default_factory=list)
    versions: dict[bytes, int] = field(default_factory=dict)
    """For the aggregates that it has changed, and locked."""


@dataclass
class Database:
    """PostgreSQL as far as a relay sees it."""

    next_xid: int = 100
    last_number: int = 0
    highest_ended: int = 99
    open: list[Transaction] = field(default_factory=list)
    rows: dict[int, Row] = field(default_factory=dict)
    versions: dict[bytes, int] = field(default_factory=dict)
    """For each aggregate, as it is committed."""
    token: str = "0" * 16
    tokens: int = 0
    aside: list[Row] = field(default_factory=list)
    committed: set[str] = field(default_factory=set)
    """For every row there ever was in this history."""

    @property
    def xmin(self) -> int:
        return min((one.xid for one in self.open if one.xid is not None), default=self.next_xid)

    def begin(self) -> Transaction:
        self.open.append(transaction := Transaction())
        return transaction

    def write(self, transaction: Transaction) -> int:
        if transaction.xid is None:
            transaction.xid = self.next_xid
            self.next_xid += 1
        return transaction.xid

    def next_number(self) -> int:
        self.last_number += 1
        return self.last_number

    def make_room(self) -> None:
        """Rows above the sequence go further up."""
        far = max(self.rows, default=0) + 1000
        self.rows = {
            row.number: row
            for row in (one._replace(number=one.number + far * (n > self.last_number)) for n, one in self.rows.items())
        }

    def end(self, transaction: Transaction) -> None:
        self.open.remove(transaction)
        self.highest_ended = max(self.highest_ended, transaction.xid or 0)

    def commit(self, transaction: Transaction) -> None:
        if transaction.rows:
            self.write(transaction)
        self.end(transaction)
        self.rows |= {row.number: row for row in transaction.rows}
        self.versions |= transaction.versions
        self.committed |= {row.id for row in transaction.rows}

    def gone(self, page: RowPage) -> list[Row]:
        """The rows of a page that are there, with the same `id`."""
        named = zip(page.sequence_ids.tolist(), page.ids(), strict=True)
        return [self.rows[n] for n, one in named if n in self.rows and self.rows[n].id == one.decode()]

    def delete(self, page: RowPage) -> list[Row]:
        gone = self.gone(page)
        for row in gone:
            del self.rows[row.number]
        return gone


@dataclass
class Message:
    name: str
    number: int
    id: str
    partition: int


@dataclass
class Topic:
    """What the sidecar has: the log, and who owns each name. For a partitioned topic the log has all partitions."""

    partitions: int = 1
    log: list[Message] = field(default_factory=list)
    trimmed: int = 0
    owners: dict[str, int] = field(default_factory=dict)
    opened: int = 0

    def open(self, name: str) -> int:
        self.opened += 1
        self.owners[name] = self.opened
        return self.opened

    def persisted(self, name: str, partition: int | None = None) -> int:
        """The highest number, of one partition or of all."""
        of_name = (one for one in self.log if one.name == name)
        return max((one.number for one in of_name if partition in (None, one.partition)), default=-1)

    def partition(self, id: str) -> int:
        """The keys are such that rows go to the partitions by turns."""
        return partition_of(key_of(id), b"", self.partitions)


class Flight(NamedTuple):
    """What is on its way to a partition."""

    page: RowPage
    owner: int
    name: str
    partition: int


class Relay:
    """One process. `step` does the next step; raises FencedError as the real one does."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.database = world.database
        self.steps = world.relay()
        self.flight: list[Flight] = []
        self.proven: list[RowPage] = []
        self.owner = 0
        self.name = ""
        self.is_over = False
        self.horizon = Horizon()
        self._looked: tuple[int, int] | None = None
        self._lingered = 0
        self._answer: Any = None

    def step(self) -> None:
        try:
            step = self.steps.send(self._answer)
        except StopIteration:
            self.is_over = True
            return
        self._answer = self._do(step)

    def arrive(self, choice: int = 0) -> None:
        """The oldest batch in flight to one of the partitions reaches it."""
        topic = self.world.topic
        places = {flight.partition: place for place, flight in reversed(list(enumerate(self.flight)))}
        page, owner, name, partition = self.flight.pop(sorted(places.values())[choice % len(places)])
        if topic.owners[name] != owner:
            raise error("FENCED", "another relay has it")
        persisted = topic.persisted(name, partition)
        new = [row for row, number in enumerate(page.sequence_ids.tolist()) if number > persisted]
        ids = page.ids()
        topic.log += [Message(name, int(page.sequence_ids[row]), ids[row].decode(), partition) for row in new]
        self.proven.append(page.take(np.array(new, np.int64)))

    def delete(self) -> None:
        """What receipts prove."""
        if self.world.database is not self.database:
            self.proven.clear()  # its connections are gone, and what they read with them
            raise error("OUTBOX_UNAVAILABLE", "the connection is lost")
        for page in self.proven:
            self.database.delete(page)
        self.proven.clear()

    def _do(self, step: steps.Step) -> Any:
        if self.world.database is not self.database:
            raise error("OUTBOX_UNAVAILABLE", "the connection is lost")
        database, topic = self.database, self.world.topic
        match step:
            case steps.ReadState(number):
                upcoming = self.world.next_sequence_id(database)
                return OutboxState(database.token, upcoming, number < upcoming)
            case steps.OpenTopic(_, token):
                self.name = token_name(NAME, token)
                names = [name for name in topic.owners if is_one_of(NAME)(name)]
                for name in names if self.world.fences else ():
                    topic.open(name)
                self.owner = topic.open(self.name)
                highest = max((topic.persisted(name) for name in topic.owners), default=-1)
                parts = range(topic.partitions)
                persisted = tuple(topic.persisted(self.name, k) for k in parts)
                if not self.world.by_partition:
                    persisted = (min(persisted),)
                return steps.OpenedProducer(self.name, persisted, highest)
            case steps.ReadRows(after):
                bound = self._bound()
                return _page(sorted(row for row in database.rows.values() if after < row.number <= bound)[:PAGE_ROWS])
            case steps.ReadElsewhere():
                far = self.world.next_sequence_id(database)
                return _page(sorted(row for row in database.rows.values() if row.number >= far)[:PAGE_ROWS])
            case steps.Find(_, page, at_any_number):
                return self._find(page, at_any_number)
            case steps.Publish(_, page):
                each = np.array([topic.partition(one.decode()) for one in page.ids()])
                for k in np.unique(each).tolist():
                    part = page.take(np.flatnonzero(each == k))
                    self.flight.append(Flight(part, self.owner, self.name, k))
            case steps.Settle():
                while self.flight:
                    self.arrive()
                self.delete()
            case steps.Delete(page):
                database.delete(page)
            case steps.SetRowsAside(page, _):
                database.aside += database.delete(page)
            case steps.Renumber(page):
                gone = database.delete(page)
                transaction = database.begin()
                xid = database.write(transaction)
                numbers = (xid << ORDINAL_BITS) + np.arange(len(gone))
                if not self.world.by_transaction:
                    database.make_room()
                    numbers = np.array([database.next_number() for _ in gone])
                transaction.rows = [Row(n, row.id) for n, row in zip(numbers.tolist(), gone, strict=True)]
                database.commit(transaction)
            case steps.ReplaceToken(token):
                if database.token == token:
                    self.world.tokens += 1
                    database.token = f"{self.world.tokens:016x}"
            case steps.Wait():
                return True
            case steps.AwaitLeft():
                self._lingered += 1
                return self._lingered <= MOST_LINGERING
        return None

    def _bound(self) -> int:
        """For what a relay notes it reads one thing now, and the other one has read before: anything may have happened
        in between."""
        world, database = self.world, self.database
        if world.by_transaction:
            return (database.xmin << ORDINAL_BITS) - 1
        if not world.bounds:
            return database.last_number
        looked, self._looked = self._looked, (database.last_number, world.next_transaction(database))
        if looked is not None:
            (number, _), (_, transaction) = looked, self._looked
            if not world.numbers_first:
                (_, transaction), (number, _) = looked, self._looked
            self.horizon.note(number, transaction, database.xmin)
        return self.horizon.bound

    def _find(self, page: RowPage, at_any_number: bool) -> steps.FoundRows:
        seen = SeenTopic(is_whole=not self.world.topic.trimmed)
        wanted = set(page.sequence_ids.tolist())
        for index, one in enumerate(self.world.topic.log):
            seen.persisted[one.name] = max(seen.persisted.get(one.name, -1), one.number)
            if index >= self.world.topic.trimmed:
                seen.lowest.setdefault(one.name, one.number)
                if at_any_number or one.number in wanted:
                    seen.ids.setdefault(ANYWHERE if at_any_number else one.number, set()).add(one.id.encode())
        named = list(zip(page.sequence_ids.tolist(), page.ids(), strict=True))
        there = [row for row, (n, one) in enumerate(named) if one in seen.ids.get(ANYWHERE if at_any_number else n, ())]
        untold = [
            row
            for row, (n, _) in enumerate(named)
            if row not in there and not seen.lacks(ANYWHERE if at_any_number else n)
        ]
        if not self.world.compares:
            there, untold = list(range(len(page))), []
        return steps.FoundRows(np.array(there, np.int64), np.array(untold, np.int64))


class World:
    """Everything, with the rules that a control arm takes away."""

    def __init__(
        self,
        *,
        fences: bool = True,
        compares: bool = True,
        bounds: bool = True,
        by_transaction: bool = False,
        asks_first: bool = True,
        numbers_first: bool = True,
        by_xmax: bool = False,
        partitions: int = 1,
        by_partition: bool = True,
    ) -> None:
        self.by_partition = by_partition
        self.by_transaction = by_transaction
        """Rows are numbered by transaction and ordinal, as an older version did."""
        self.asks_first = asks_first
        """For the transaction's ID, before a row takes its number."""
        self.numbers_first = numbers_first
        """The relay notes the last number, and then the next transaction's ID."""
        self.by_xmax = by_xmax
        """It takes a snapshot's for the next transaction's ID."""
        self.fences = fences
        self.compares = compares
        self.bounds = bounds
        self.database = Database()
        self.topic = Topic(partitions)
        self.tokens = 0
        self.backup: Database | None = None
        self.ids = count(1)
        self.version_of: dict[str, int] = {}
        """That of its aggregate which the row tells of."""
        self.relay: Callable[[], steps.Steps] = lambda: steps.relay(TOPIC, None, follow=False)

    def next_transaction(self, database: Database) -> int:
        return database.highest_ended + 1 if self.by_xmax else database.next_xid

    def next_sequence_id(self, database: Database) -> int:
        return database.next_xid << ORDINAL_BITS if self.by_transaction else database.last_number + 1

    def insert(self, transaction: Transaction) -> None:
        """Changes an aggregate that nobody else has locked, and tells of that."""
        database = self.database
        locked = {key for one in database.open if one is not transaction for key in one.versions}
        id = next(id for id in (f"id {n}" for n in self.ids) if key_of(id) not in locked) if len(locked) < 3 else None
        if id is None:
            return  # it waits
        key = key_of(id)
        self.version_of[id] = transaction.versions.get(key, database.versions.get(key, 0)) + 1
        transaction.versions[key] = self.version_of[id]
        if self.asks_first:
            database.write(transaction)
        number = database.next_number()
        if self.by_transaction:
            number = (database.write(transaction) << ORDINAL_BITS) + len(transaction.rows)
        transaction.rows.append(Row(number, id))

    def is_out_of_order(self) -> bool:
        """Whether rows of an aggregate, of the history that is left, are in another order than its versions."""
        versions: dict[bytes, int] = {}
        for message in self.topic.log:
            if message.id in self.database.committed:
                version = self.version_of[message.id]
                if version <= versions.get(key_of(message.id), 0):
                    return True
                versions[key_of(message.id)] = version
        return False

    def take_backup(self) -> None:
        self.backup = copy.deepcopy(self.database)

    def restore(self) -> None:
        """The database as it was: what was open then is gone, its number too; connections break."""
        if self.backup is not None:
            self.database = copy.deepcopy(self.backup)
            self.database.open.clear()

    def restore_dump(self, *, has_sequence: bool = False) -> None:
        """Into a new database, whose transactions begin low, and numbers too unless the sequence is in the dump."""
        if self.backup is not None:
            rows = dict(self.backup.rows)
            ids = {row.id for row in rows.values()}
            last = self.backup.last_number if has_sequence else 0
            self.database = Database(50, last, 49, rows=rows, token=self.backup.token, committed=ids)
            self.database.versions = dict(self.backup.versions)
            # That the old database then goes on, too, is beyond what a relay can know: the two have one token.
            self.backup = None


def _page(rows: list[Row]) -> RowPage:
    ids = [row.id.encode() for row in rows]
    nothing = [b""] * len(rows)
    keys = [key_of(row.id) for row in rows]
    return page_of([row.number for row in rows], ids, nothing, keys, nothing, nothing)


def key_of(id: str) -> bytes:
    """One of a few keys."""
    return b"key %d" % (int(id.split()[1]) % 3)
