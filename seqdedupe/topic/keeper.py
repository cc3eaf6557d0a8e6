"""Stores the data of a topic that the next start needs, and removes the data of unused producers. Begin with `Keeper`.

`Snapshotter` decides when a topic's numbers are written to the store. `Inactivity` makes a topic forget unused
producers. `Inactivity` examines a topic three times within the timeout of the topic's policy, as Pulsar does. Each
examination counts as a third of the timeout. So the timeout includes only the time in which this process runs and the
topic accepts messages, even if the clock jumps. After a restart, and after a change of the policy, every name has a
full timeout. `RestoredState` is the state found at start.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from seqdedupe.core.id_runs import IdRun, ImportedIds
from seqdedupe.core.id_window import IdWindow
from seqdedupe.core.producers import Bools, LettingGo, Producers
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.format.jit import Int64s
from seqdedupe.message_id import Position
from seqdedupe.store.db import Store
from seqdedupe.store.snapshots import Delta, Loaded, Snapshots
from seqdedupe.store.windows import StoredIds
from seqdedupe.tasks import retrieve
from seqdedupe.topic.control import STATED_A_RECORD, encode
from seqdedupe.topic.policy import NEVER, Applied, Policy

# -- The times when a topic's numbers go to the store: one snapshot at a time, shared by all callers that wait.

_snapshots_logger = logging.getLogger("seqdedupe.snapshots")


IDLE_SECONDS = 10.0
"""The total time that a snapshot waits for RocksDB to process earlier writes. After this time the snapshot fails."""


class Snapshotter:
    """Takes the snapshots of a topic's numbers: when requested, and automatically after changes (`stored`).

    `describe` returns the current term, the position of the last confirmed message, the bytes of the policy, and the
    bytes of the position in a broker's own log. These values and the numbers are copied in one step of the event loop,
    so that position and state belong together. Syncing runs in the background. `window` returns the window of a topic
    of deduplication IDs. `on_durable` is called when a snapshot up to `next_index` is durable.
    """

    def __init__(
        self,
        topic: str,
        store: Store,
        snapshots: Snapshots,
        producers: Producers,
        describe: Callable[[], tuple[int, Position, bytes, bytes]],
        *,
        next_index: int,
        applied: Applied,
        on_durable: Callable[[], None],
        window: Callable[[], IdWindow | None] = lambda: None,
    ) -> None:
        self.next_index = next_index
        """The index below which the last durable snapshot covers all messages."""
        self.opaque = b""
        """The log's place in the last durable snapshot that this object has taken."""
        self.taken = self.failed = 0
        """The numbers of snapshots that became durable, and of snapshots that failed, since the topic was opened."""
        self.durable_at = asyncio.get_running_loop().time()
        """The time when the last snapshot became durable, or when the topic was opened, by the event loop's clock."""
        self._topic = topic
        self._store = store
        self._snapshots = snapshots
        self._producers = producers
        self._describe = describe
        self._every_entries = applied.deduplication_entries_interval
        self._after_seconds = applied.deduplication_snapshot_interval_seconds
        self._on_durable = on_durable
        self._window = window
        loaded = window()
        self._pieces_stored = loaded.memory_index if loaded is not None else 0
        """In the last durable snapshot: the index of the first ID that is not in a run."""
        self.on_stored: Callable[[], None] = lambda: None
        """A function that is called when the window may have grown, and when a snapshot has become durable."""
        self._names_stored = len(producers)
        self._is_renumbered = False
        """Whether producers have different numbers from those in the last durable snapshot."""
        self._entries = 0
        self._timer: asyncio.TimerHandle | None = None
        self._running = asyncio.Lock()
        self._next: asyncio.Task[None] | None = None
        self._compaction: asyncio.Task[None] | None = None
        self._closed = False

    def apply(self, applied: Applied) -> None:
        """Use the intervals of this policy from now on."""
        entries, seconds = applied.deduplication_entries_interval, applied.deduplication_snapshot_interval_seconds
        if (entries, seconds) == (self._every_entries, self._after_seconds):
            return
        self._every_entries, self._after_seconds = entries, seconds
        has_news = self._timer is not None or self._entries > 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if has_news:
            self._start_timer()
        self.stored(0)

    def stored(self, entries: int) -> None:
        """Count `entries` new confirmed batches. Take a snapshot if one is due."""
        self._entries += entries
        self.on_stored()
        if self._entries >= self._every_entries and self._next is None:
            self._entries = 0
            self._take_by_itself()
        elif entries:
            self._start_timer()

    def _start_timer(self) -> None:
        if self._timer is None and self._after_seconds and not self._closed:
            self._timer = asyncio.get_running_loop().call_later(self._after_seconds, self._time_is_up)

    def _time_is_up(self) -> None:
        self._timer = None
        self._take_by_itself()

    def _take_by_itself(self) -> None:
        if self._next is None and not self._closed:
            self._next = asyncio.ensure_future(self._take())
            self._next.add_done_callback(self._warn)

    def _warn(self, snapshot: "asyncio.Task[None]") -> None:
        """Log the failure of an automatic snapshot, for which no caller waits."""
        if not snapshot.cancelled() and (e := snapshot.exception()) is not None:
            _snapshots_logger.warning("no snapshot of topic %s: %s", self._topic, e)

    async def take(self) -> None:
        """Take a snapshot that begins after this call, and wait until it is durable. Raises STORE_UNAVAILABLE,
        DRAINING.

        A failure loses no data: the next snapshot contains everything that this snapshot would have contained.
        """
        if self._closed:
            raise error("DRAINING", "the topic is closed")
        if self._next is None:
            self._next = asyncio.ensure_future(self._take())
            self._next.add_done_callback(retrieve)
        await asyncio.shield(self._next)

    @asynccontextmanager
    async def stands_still(self) -> AsyncIterator[None]:
        """Within the block, no snapshot is written, because the producers' numbers may change."""
        async with self._running:
            if self._compaction is not None:
                await asyncio.wait({self._compaction})
            yield

    def renumbered(self) -> None:
        """Record that the producers have new numbers. The next snapshot replaces all stored data."""
        self._is_renumbered = True
        self._names_stored = 0

    async def finish(self) -> None:
        """Wait until the current snapshot, if any, is durable or has failed."""
        async with self._running:
            pass

    async def forget(self, due: Callable[[], Int64s], forget: Callable[[Int64s], None]) -> None:
        """Write a snapshot without the producers that `due` returns at its start, and wait until it is durable.

        Raises the errors of `take`. `forget` is called with these producers before the next snapshot is taken: some may
        have come back meanwhile.
        """
        snapshot = asyncio.ensure_future(self._forget(due, forget))
        snapshot.add_done_callback(retrieve)
        await asyncio.shield(snapshot)

    async def _take(self) -> None:
        async with self._running:
            self._next = None
            await self._write(None)

    async def _forget(self, due: Callable[[], Int64s], forget: Callable[[Int64s], None]) -> None:
        async with self._running:
            if self._closed:
                raise error("DRAINING", "the topic is closed")
            forgotten = due()
            await self._write(forgotten)
            forget(forgotten)

    async def _write(self, forgotten: Int64s | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        term, position, policy, opaque = self._describe()
        changed, persisted, epochs, stated = self._producers.collect_dirty(forgotten)
        known = len(self._producers)
        forgets = forgotten is not None and len(forgotten) > 0
        window = self._window()
        clears = window.older.clears if window is not None else 0
        try:
            delta = Delta(
                term=term,
                next_index=position.index + 1,
                message_id=position.message_id,
                ownership=position.ownership,
                first_name=self._names_stored,
                names=self._producers.names_from(self._names_stored),
                slots=changed,
                persisted=persisted,
                epochs=epochs,
                stated=stated,
                policy=policy,
                opaque=opaque,
                has_forgotten=self._producers.has_forgotten or forgets,
            )
            if window is not None:
                delta = replace(delta, ids=await self._ids(window, delta.next_index))
            if self._is_renumbered:
                opening = await self._snapshots.write_anew(delta)
            else:
                opening = self._snapshots.write_delta(delta)
            await self._store.flush(opening)
        except BaseException:
            # After any error, a later snapshot must contain these producers.
            self._producers.mark_dirty(changed)
            self.failed += 1
            self._start_timer()
            raise
        self._names_stored = known
        self._is_renumbered = False
        if window is not None and delta.ids is not None:
            self._pieces_stored = delta.ids.pieces_index
            if window.older.clears == clears:
                self._named(window, delta.ids.runs)
        self.next_index, self.opaque = position.index + 1, opaque
        self.taken += 1
        self.durable_at = asyncio.get_running_loop().time()
        self._on_durable()
        self.on_stored()
        if self._compaction is None or self._compaction.done():
            self._compaction = asyncio.ensure_future(self._compact())

    async def _ids(self, window: IdWindow, next_index: int) -> StoredIds:
        """Return the window as of this index, where the log currently ends. When this returns, all pieces of the window
        except the last are written.

        Other tasks run meanwhile. Raises STORE_UNAVAILABLE if the store is too slow. The next snapshot then continues
        after the written pieces.
        """
        now = asyncio.get_running_loop().time
        left_seconds = IDLE_SECONDS
        runs = window.older.to_name(window.first_index)
        while True:
            # IDs that are forgotten meanwhile need not be written.
            first_index = min(window.first_index, next_index)
            named = tuple(run for run in runs if run.end_index > first_index)
            ids = StoredIds(window.key, first_index, next_index, named)
            ids.last = window.piece(max(self._snapshots.pieces_index, ids.pieces_index), next_index)
            if ids.last is None or ids.last.end_index == next_index:
                break
            self._snapshots.write_piece(ids.last)
            await asyncio.sleep(0)
            began = now()
            await self._store.wait_until_idle(left_seconds)
            left_seconds -= now() - began
        if ids.pieces_index > self._pieces_stored:
            ids.moved_from = self._pieces_stored
        return ids

    def _named(self, window: IdWindow, runs: tuple[IdRun, ...]) -> None:
        """Put the runs in force that a durable snapshot names, and drop the runs that are not needed any more."""
        generation = window.older.generation
        window.named(runs)
        if window.older.generation != generation:
            self._snapshots.drop_left_over(window, end=window.older.next_number)

    async def _compact(self) -> None:
        try:
            await self._snapshots.compact_if_due()
        except SeqdedupeError as e:
            _snapshots_logger.warning("snapshots of topic %s were not compacted: %s", self._topic, e)
        except Exception as e:
            # After any error no data is lost, and the topic that waits for this can be closed.
            _snapshots_logger.error("snapshots of topic %s were not compacted", self._topic, exc_info=e)

    async def close(self) -> None:
        """Wait for work in progress, and take no more snapshots."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._next is not None:
            await asyncio.wait({self._next})
        await self.finish()
        if self._compaction is not None:
            await self._compaction


# -- The store's data of a topic, read into memory, from which the topic is opened.


@dataclass(frozen=True, slots=True)
class RestoredState:
    """The state of one topic, as read from the store at start. Only that topic may use and change this object. No data
    of the topic may have been written since the state was read."""

    snapshots: Snapshots
    loaded: Loaded | None
    """The newest snapshot of the topic."""
    producers: Producers
    """The producers of that snapshot."""
    imported: ImportedIds | None = None

    @staticmethod
    def load(snapshots: Snapshots) -> "RestoredState":
        """Read the state. The call takes long, and any thread may make it. Raises the errors of `Snapshots.load`."""
        loaded = snapshots.load()
        return RestoredState(snapshots, loaded, producers_of(loaded))


def producers_of(loaded: Loaded | None) -> Producers:
    """Return the producers of a snapshot. They take over the snapshot's names."""
    producers = Producers()
    if loaded is not None:
        producers.load(loaded.names, loaded.persisted, loaded.epochs, loaded.stated)
        producers.has_forgotten = loaded.has_forgotten
    return producers


logger = logging.getLogger("seqdedupe.topic")

LET_GO_SHARE = 4
"""Rows and names are freed when one in this number is empty. Freeing them needs a pass over all rows, and a whole
snapshot."""

LOOKS_A_TIMEOUT = 3
DUE_PERIODS = LOOKS_A_TIMEOUT + 1
"""The number of idle periods after which a producer is due. At the first examination, less than a period may have
passed since the producer's last use."""

ROWS_A_STEP = 65_536
"""The number of rows examined before other tasks run."""

EXAMPLES = 3
"""The number of names that are logged."""

SECONDS_A_MINUTE = 60


class KeptTopic(Protocol):
    """The members of a topic that its keeper uses; `base.TopicBase` describes each of them."""

    name: str
    term: int
    policy: Policy
    applied: Applied
    confirmed_index: int
    producers: Producers

    @property
    def window(self) -> IdWindow | None: ...

    @property
    def last_position(self) -> Position: ...

    @property
    def is_serving(self) -> bool: ...

    def log_place(self) -> bytes: ...

    def check_knows_its_end(self) -> None: ...

    def snapshot_is_durable(self) -> None: ...

    def in_use(self) -> list[Int64s]: ...

    async def purge(self, numbers: Int64s) -> int: ...

    def renumber(self, new_numbers: Int64s) -> None: ...

    def spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]": ...


class Keeper:
    """The snapshots of a topic's numbers, and the regular search for producers to forget."""

    def __init__(self, topic: KeptTopic, store: Store, snapshots: Snapshots) -> None:
        self._topic = topic
        self.snapshotter = Snapshotter(
            topic.name,
            store,
            snapshots,
            topic.producers,
            lambda: (topic.term, topic.last_position, encode(topic.policy), topic.log_place()),
            next_index=topic.confirmed_index,
            applied=topic.applied,
            on_durable=topic.snapshot_is_durable,
            window=lambda: topic.window,
        )
        self.inactivity = Inactivity(
            topic.name,
            topic.producers,
            topic.applied,
            is_counting=lambda: topic.is_serving,
            in_use=topic.in_use,
            purge=lambda numbers: topic.purge(numbers),
            let_go=self._let_go_of_empty,
            spawn=topic.spawn,
        )

    def apply(self, applied: Applied) -> None:
        """Put this policy in force."""
        self.snapshotter.apply(applied)
        self.inactivity.apply(applied)

    @property
    def snapshot_index(self) -> int:
        """The index below which the last durable snapshot covers all messages."""
        return self.snapshotter.next_index

    async def snapshot(self) -> None:
        """Take a snapshot and wait until it is durable.

        Raises STORE_UNAVAILABLE (the next snapshot will contain the same data). Raises the errors of
        `check_knows_its_end`: until this process owns the log, the contents of the log may not be durable.
        """
        self._topic.check_knows_its_end()
        await self.snapshotter.take()

    async def snapshot_in_background(self) -> None:
        """Call `snapshot`. If it fails, log a warning."""
        try:
            await self.snapshot()
        except SeqdedupeError as e:
            logger.warning("no snapshot of topic %s: %s", self._topic.name, e)

    async def _let_go_of_empty(self) -> None:
        """If many producers have no data, free their names and rows, here and in the store."""
        is_free = self._free()
        if np.count_nonzero(is_free) < max(len(is_free), 1) / LET_GO_SHARE:
            return
        letting_go = LettingGo(self._topic.producers, is_free)
        async with self.snapshotter.stands_still():
            for _ in letting_go.prepare():
                await asyncio.sleep(0)
            self._topic.renumber(letting_go.finish(self._free()))
            self.snapshotter.renumbered()
        for _ in letting_go.clear():
            await asyncio.sleep(0)
        await self.snapshot()

    def _free(self) -> Bools:
        """Return, by producer number, whether the producer has no data and is not in use."""
        is_free = self._topic.producers.empty()
        for numbers in self._topic.in_use():
            is_free[numbers] = False
        return is_free


class Inactivity:
    """The regular search for producers of a topic that are due: once per period, as long as the policy has a timeout.

    `is_counting` returns whether the topic accepts messages. `in_use` returns, in parts, the producers held now by
    anything other than a stream (see `Activity`). `purge` forgets producers durably and returns their number; `let_go`
    frees the names and rows of producers without data. Work that takes time is a task of the topic (`spawn`).
    """

    def __init__(
        self,
        topic: str,
        producers: Producers,
        applied: Applied,
        *,
        is_counting: Callable[[], bool],
        in_use: Callable[[], list[Int64s]],
        purge: Callable[[Int64s], Awaitable[int]],
        let_go: Callable[[], Awaitable[None]],
        spawn: Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"],
    ) -> None:
        self._topic = topic
        self._producers = producers
        self._is_counting = is_counting
        self._in_use = in_use
        self._purge = purge
        self._let_go = let_go
        self._spawn = spawn
        self._minutes = NEVER
        self._is_closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._look: asyncio.Task[None] | None = None
        self.apply(applied)

    def apply(self, applied: Applied) -> None:
        """Put this policy in force. If the timeout changes, every producer starts with a full timeout."""
        minutes = applied.deduplication_producer_inactivity_timeout_minutes if applied.forgets else NEVER
        if minutes != self._minutes and not self._is_closed:
            self._minutes = minutes
            self._producers.activity.renew_all()
            self._set_timer()

    def close(self) -> None:
        """Stop searching, even if the policy changes later."""
        self._is_closed = True
        self._minutes = NEVER
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._minutes != NEVER:
            period_seconds = self._minutes * SECONDS_A_MINUTE / LOOKS_A_TIMEOUT
            self._timer = asyncio.get_running_loop().call_later(period_seconds, self._period_is_over)

    def _period_is_over(self) -> None:
        if self._look is None or self._look.done():
            self._look = self._spawn(self._look_through())
        self._set_timer()

    async def _look_through(self) -> None:
        try:
            await self.look()
        except SeqdedupeError as e:
            logger.warning(
                "topic %s: producers that are due to be forgotten wait for the next look: %s", self._topic, e
            )

    async def look(self) -> None:
        """Count a period that has passed, and forget the producers that are due. Raises the reason of a failure. The
        next period tries again."""
        if not self._is_counting():
            return
        producers = self._producers
        minutes, purged, examples = self._minutes, 0, list[bytes]()
        for first in range(0, len(producers), ROWS_A_STEP):
            producers.activity.pass_period(first, min(first + ROWS_A_STEP, len(producers)))
            await asyncio.sleep(0)
        # Do this afterwards: a client that releases a producer in a moment has used it until then.
        for _ in producers.activity.use_shared():
            await asyncio.sleep(0)
        for numbers in self._in_use():
            producers.activity.use(numbers)
            await asyncio.sleep(0)
        for first in range(0, len(producers), ROWS_A_STEP):
            end = min(first + ROWS_A_STEP, len(producers))
            for start in range(first, end, STATED_A_RECORD):
                # Determine the due producers again each time: a client may have come back meanwhile.
                due = producers.due(DUE_PERIODS, start, min(start + STATED_A_RECORD, end))
                if len(due) and self._minutes == minutes != NEVER:
                    examples += producers.names_of(due[: EXAMPLES + 1]) if not purged else []
                    purged += await self._purge(due)
            await asyncio.sleep(0)
        if purged:
            logger.warning(
                "topic %s: %d producers that nobody had used for %d minutes are forgotten (%s): what they send again "
                "counts as new, even if it is stored",
                self._topic,
                purged,
                minutes,
                shown(examples),
            )
        await self._let_go()


def shown(names: list[bytes]) -> str:
    """Return a few of the names, for the log."""
    some = ", ".join(repr(name.decode()) for name in names[:EXAMPLES])
    return f"{some}, …" if len(names) > EXAMPLES else some
