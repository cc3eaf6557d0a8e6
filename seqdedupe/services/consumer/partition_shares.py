"""The share of a partitioned topic that this process works on. Begin with `PartitionShares`."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from sqlalchemy import Engine, Row, select
from sqlalchemy.exc import SQLAlchemyError

from seqdedupe.client.route import OnWaiting
from seqdedupe.message_id import Position
from seqdedupe.services.consumer import database
from seqdedupe.services.consumer.consumer_row import (
    KEEP_UP_SECONDS,
    NOBODY,
    Lost,
    PartOwnership,
    Processes,
    RowLease,
    SeenRow,
    fair_share,
    row_name,
)
from seqdedupe.services.consumer.database import CONSUMERS
from seqdedupe.services.consumer.message_arrivals import LOOK_SECONDS, Arrivals, Stop, is_there, wait_for_any
from seqdedupe.services.consumer.work import Work


class PartitionWork(NamedTuple):
    """The objects that work on one partition."""

    work: Work
    arrivals: Arrivals


Begin = Callable[[str, str, RowLease, str], PartitionWork]
"""The function that begins the work on a partition. Its parameters are the row's name, the topic, the hold on the row,
and the position."""


class PartitionShares:
    """The share of one process. `work` is the main loop, in one thread."""

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
        """Whether this process has at least one partition."""
        return bool(self._parts)

    @property
    def positions(self) -> dict[str, Position]:
        """The positions of the partitions that this process has, by topic. Any thread may read them."""
        return {self._topics[k]: Position.parse(part.work.position) for k, part in list(self._parts.items())}

    def register(self, purpose: str, starts: Sequence[Position]) -> None:
        """Insert the rows of the partitions, see `RowLease.register`."""
        for hold, topic, start in zip(self._holds, self._topics, starts, strict=True):
            hold.register(topic, purpose, start)

    def work(self, most: int, ends: Sequence[Position] | None, beside: Callable[[], None]) -> None:
        """Work until every partition has reached these ends, in this or another process, and no parked message is due.

        Without ends, work until a stop is requested, which raises Stopped. The partitions are processed in turn. A
        transaction contains at most `most` messages. Between the turns, `beside` is called. Raises Away, and the errors
        of the work and of readers.
        """
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
        """Release the partitions above this process's share. If the process has fewer partitions than its share, take
        free partitions."""
        with database.reaching():
            self._processes.beat()
            # The order of these two queries matters: a process that has a partition by the second query is among the
            # processes that are alive.
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
        """Return whether all partitions have reached these ends, and each has an owner that is alive. A process that
        ended may have left a partition with parked messages."""
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
        """Close all partitions. Later they restart from the stored positions."""
        self._looked_at = float("-inf")
        for k in list(self._parts):
            self._drop(k)

    def leave(self) -> None:
        """Release all partitions, after `drop_all`. If the database cannot record this, the other processes detect it
        by a timeout."""
        with suppress(SQLAlchemyError):
            self._processes.leave()
