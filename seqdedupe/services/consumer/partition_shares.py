"""A consumer of a partitioned topic: its processes share the partitions, and each works on its part."""

import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from sqlalchemy import Connection, Engine, Row, delete, insert, select, update
from sqlalchemy.exc import SQLAlchemyError

from seqdedupe.client.route import OnWaiting
from seqdedupe.errors import UnavailableError
from seqdedupe.message_id import Position
from seqdedupe.services.consumer import consumer_row, database
from seqdedupe.services.consumer.consumer_row import KEEP_UP_SECONDS, NOBODY, Held, Lost, RowLease, SeenRow, row_name
from seqdedupe.services.consumer.database import CONSUMERS, PROCESSES
from seqdedupe.services.consumer.message_arrivals import Arrivals, Stop, is_there, wait_for_any
from seqdedupe.services.consumer.work import Work

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
        if time.monotonic() - self._beat_at < consumer_row.KEEP_UP_SECONDS:
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
            if now - since >= consumer_row.TAKE_OVER_SECONDS and self._remove(token, beat):
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


LOOK_SECONDS = 0.5
"""So often it is looked at who lives, and what is whose."""


class PartitionWork(NamedTuple):
    """What it takes to work on a partition."""

    work: Work
    arrivals: Arrivals


Begin = Callable[[str, str, RowLease, str], PartitionWork]
"""Begins to work: the row's name, the topic, the hold on the row, the position."""


class PartitionShares:
    """One process's share: `work` is its whole life, in one thread."""

    def __init__(
        self,
        engine: Engine,
        consumer: str,
        topics: Sequence[str],
        stop: Stop,
        begin: Begin,
        on_waiting: OnWaiting | None = None,
    ) -> None:
        self._engine = engine
        self._topics = topics
        self._stop = stop
        self._begin = begin
        self._names = [row_name(consumer, k) for k in range(len(topics))]
        self._processes = Processes(engine, consumer, on_waiting)
        self._holds = [PartOwnership(engine, name, self._processes) for name in self._names]
        self._parts: dict[int, PartitionWork] = {}
        self._looked_at = float("-inf")

    @property
    def is_working(self) -> bool:
        """Whether this process has any partition."""
        return bool(self._parts)

    def register(self, purpose: str, starts: Sequence[Position]) -> None:
        """Makes the partitions' rows, see `RowLease.register`."""
        for hold, topic, start in zip(self._holds, self._topics, starts, strict=True):
            hold.register(topic, purpose, start)

    def work(self, most: int, ends: Sequence[Position] | None, beside: Callable[[], None]) -> None:
        """Until every partition has come to these ends, whoever works on it, and nothing parked is due; without them
        until it is stopped, which raises Stopped. Of each partition in turn there are at most so many messages in a
        transaction. `beside` is called between them. Raises Away, and what work and readers do."""
        while True:
            if time.monotonic() - self._looked_at >= LOOK_SECONDS:
                self._look()
            beside()
            is_idle = True
            for k in list(self._parts):
                self._stop.check()
                is_idle = not self._turn(k, most) and is_idle
            if is_idle:
                if ends is not None and self._have_come_to(ends) and self._finish():
                    return
                wait_for_any([part.arrivals for part in self._parts.values()], self._stop, LOOK_SECONDS)

    def _turn(self, k: int, most: int) -> bool:
        part = self._parts[k]
        try:
            if not part.work.has_messages:
                part.work.take(part.arrivals.take(most))
            worked = part.work.has_messages
            if worked:
                part.work.apply(partial(part.arrivals.take_more, most, self._stop, KEEP_UP_SECONDS))
            part.work.keep_up()
        except Lost:
            self._drop(k)
            self._looked_at = float("-inf")
            return True
        return worked

    def _look(self) -> None:
        """Gives back what is above this process's share, and takes what is below it and nobody's."""
        with database.reaching():
            self._processes.beat()
            # In this order: who has a partition by now is among those that live.
            rows = self._rows()
            living = self._processes.living()
            token = self._processes.token
            mine = [k for k, row in enumerate(rows) if row.owner == token]
            for k in set(self._parts).difference(mine):
                self._drop(k)
            share = fair_share(token, living, (row.owner for row in rows), len(rows))
            for k in mine[share:]:
                self._drop(k)
                self._holds[k].release()
            mine = mine[:share]
            for k, row in enumerate(rows):
                is_free = row.owner == NOBODY or row.owner not in living
                if is_free and len(mine) < share and self._holds[k].take(SeenRow(row.owner, row.beat, row.position)):
                    mine.append(k)
        for k in mine:
            if k not in self._parts:
                self._parts[k] = self._begin(self._names[k], self._topics[k], self._holds[k], rows[k].position)
        self._looked_at = time.monotonic()

    def _rows(self) -> list[Row[str, str, int, str]]:
        wanted = select(CONSUMERS.c.name, CONSUMERS.c.owner, CONSUMERS.c.beat, CONSUMERS.c.position)
        with self._engine.begin() as connection:
            found = {row.name: row for row in connection.execute(wanted.where(CONSUMERS.c.name.in_(self._names)))}
        return [found[name] for name in self._names]

    def _have_come_to(self, ends: Sequence[Position]) -> bool:
        """Nor has a process that ended left a partition behind, where something may be parked."""
        with database.reaching():
            rows = self._rows()
        working = self._processes.shown | {self._processes.token}
        return all(is_there(row.position, end) and row.owner in working for row, end in zip(rows, ends, strict=True))

    def _finish(self) -> bool:
        for k, part in list(self._parts.items()):
            try:
                part.work.finish()
            except Lost:
                self._drop(k)
                self._looked_at = float("-inf")
                return False
        return True

    def _drop(self, k: int) -> None:
        if (part := self._parts.pop(k, None)) is not None:
            part.arrivals.close()

    def drop_all(self) -> None:
        """What it has is begun anew, at the stored positions."""
        self._looked_at = float("-inf")
        for k in list(self._parts):
            self._drop(k)

    def leave(self) -> None:
        """Gives back all, after `drop_all`. If it cannot be said, the others find out by themselves."""
        with suppress(SQLAlchemyError):
            self._processes.leave()
