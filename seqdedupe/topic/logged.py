"""A topic on a log of ours: what its log says of it, where its messages stand, and changes on their way there."""

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from seqdedupe.core.id_runs import Imported
from seqdedupe.core.id_window import IdWindow
from seqdedupe.core.producers import Producers
from seqdedupe.errors import SeqdedupeError
from seqdedupe.format.headers import SECRET_BYTES
from seqdedupe.format.jit import Int64s
from seqdedupe.format.layout import BASE_INDEX, PRODUCERS, PUBLISH_TIME_MS, ROWS
from seqdedupe.format.records import ownership
from seqdedupe.log.contract import DamageFound, Log, Runs, Skipped, last_of
from seqdedupe.message_id import MessageId, Position
from seqdedupe.store import imported as stored_import
from seqdedupe.store.db import Store
from seqdedupe.store.snapshots import Loaded, Snapshots
from seqdedupe.topic import control
from seqdedupe.topic.base import TopicBase
from seqdedupe.topic.control import Change, CursorChange, Purge
from seqdedupe.topic.flight import Admitted, Changing, Flight
from seqdedupe.topic.frame import NumbersCache
from seqdedupe.topic.policy import Applied, Policy
from seqdedupe.topic.recovery import RunsOf, Table
from seqdedupe.topic.window_imported import WindowImported
from seqdedupe.topic.window_memory import WindowMemory
from seqdedupe.topic.window_runs import LookedUp, WindowRuns

logger = logging.getLogger("seqdedupe.topic")


class LoggedTopic(TopicBase):
    """A topic of this process whose log is not a broker's own. Who owns the log is for `owning` to know.

    `on_state` is told each change of state, with one line why.
    """

    def __init__(
        self,
        name: str,
        log: Log,
        store: Store,
        snapshots: Snapshots,
        loaded: Loaded | None,
        *,
        applied: Applied,
        random_bytes: Callable[[int], bytes],
        on_state: Callable[[Any], None],
        window_memory: WindowMemory | None = None,
        imported: Imported | None = None,
        producers: Producers | None = None,
    ) -> None:
        self.log = log
        self.store = store
        self.window: IdWindow | None = loaded.window if loaded is not None else None
        """Of a topic of deduplication IDs."""
        self.imported = WindowImported(name, imported, lambda: self.policy, self._import_has_expired)
        self.window_runs = WindowRuns(store, log.incarnation, lambda: self.window, self.imported, self.snapshot)
        self._forgetting_import: asyncio.Task[None] | None = None
        self._window_memory = window_memory
        self._window_seen = (-1, -1)
        super().__init__(
            name,
            log.incarnation,
            store,
            snapshots,
            loaded,
            # Without a snapshot everything that is left in the log is read.
            first_index=log.first_index,
            applied=applied,
            on_state=on_state,
            producers=producers,
        )
        self.snapshotter.on_stored = self._window_may_have_grown
        self.flight = Flight()
        self.next_index = self.confirmed_index
        """That of the next message that is handed to the log."""
        log.flush_every(self.applied.flush_interval)
        self._streams: dict[int, Callable[[SeqdedupeError], None]] = {}
        self._random_bytes = random_bytes
        self._known_term = 0
        """The highest that a control record names."""
        self.policy_stated = -1
        """From this index on the log states the policy; -1: not known."""
        self.import_parts = control.ImportParts()
        if self.policy.by_deduplication_id:
            self._has_window(self.confirmed_index)
        self.wanted = asyncio.Event()
        """This sidecar is to try to take the topic now, if it has it not."""

    @property
    def first_index(self) -> int:
        return self.log.first_index

    @property
    def damage_found(self) -> DamageFound:
        return self.log.damage_found

    @property
    def skipped(self) -> Skipped:
        return self.log.skipped

    @property
    def not_durable(self) -> int:
        return self.flight.rows_told_early()

    def log_place(self) -> bytes:
        return self.log.place_at(self.confirmed_index)

    @property
    def entry_format(self) -> str:
        return self.log.entry_format

    @property
    def log_bytes(self) -> int:
        return self.log.size_bytes

    @property
    def last_position(self) -> Position:
        return Position(self.incarnation, self.last_message_id, self.confirmed_index - 1, self.last_ownership)

    @property
    def certain_position(self) -> Position:
        index = self.readable_index - 1
        known = MessageId(*(int(column[0]) for column in self.log.known_message_ids(np.array([index]))))
        if index < self.confirmed_index or known.ledger_id < 0:
            return self.last_position
        return Position(self.incarnation, known, index)

    async def position_before(self, index: int) -> Position:
        if index == self.confirmed_index:
            return self.last_position
        if index == 0:
            return Position.start(self.incarnation)
        location = await self.log.locate(index - 1)
        return Position(self.incarnation, location.message_id, index - 1, location.ownership)

    @property
    def readable_index(self) -> int:
        if self.knows_its_end:
            return self.confirmed_index
        return max(self.confirmed_index, self.log.certain_index)

    # -- what its log says -------------------------------------------------------------------------------------

    def _learn(self, chunk: bytes, table: Table, count: int, runs_of: RunsOf) -> None:
        """Records found in the log count from now on."""
        for batches, changes in control.runs(chunk, table[:count], self.log.place):
            if len(batches):
                self.producers.replay(chunk, batches, len(batches))
                self._replay_ids(chunk, batches)
            for change, term, index in changes:
                self._known_term = max(self._known_term, term)
                self._apply(change, index)
        # What is merged again may stand before the last message that is known.
        self.confirmed_index = max(self.confirmed_index, int(table[count - 1, BASE_INDEX] + table[count - 1, ROWS]))
        for last in np.flatnonzero(table[:count, ROWS] > 0)[-1:].tolist():
            self.last_ownership = ownership(table[last])
            self.last_message_id = last_of(runs_of(last))

    def _replay_ids(self, chunk: bytes, batches: Table) -> None:
        """The IDs in these records count from now on: where they stand in the log, which need not be where those in
        flight were to stand."""
        view = np.frombuffer(chunk, np.uint8)
        for places in batches[(batches[:, ROWS] > 0) & (batches[:, PRODUCERS] == 0)]:
            index = int(places[BASE_INDEX])
            window = self._has_window(index)
            window.fail()
            window.replay(view, places, index, int(places[PUBLISH_TIME_MS]), self.applied.window)

    async def look_up(self, encoded: bytes) -> LookedUp | None:
        """To be awaited before a frame of a topic of deduplication IDs is admitted, in the step that follows.

        Waits while the windows have more memory than they are to have, and reads what has to be read.
        """
        if self.window is None:
            return None
        if self._window_memory is not None:
            await self._window_memory.room()
        return await self.window_runs.look_up(encoded)

    def _window_may_have_grown(self) -> None:
        if self.window is None or self._window_memory is None:
            return
        seen = (self.window.chunks_opened, self.snapshotter.taken)
        if seen != self._window_seen:
            self._window_seen = seen
            self._window_memory.measure(self.window_runs, self.window)

    def _import_has_expired(self) -> None:
        if self._forgetting_import is None or self._forgetting_import.done():
            self._forgetting_import = self._spawn(self._forget_import())

    async def _forget_import(self) -> None:
        """Nothing is imported any more. If that cannot be now, the next frame has it tried again."""
        with suppress(SeqdedupeError):
            async with self.imported.changing:
                await self.append_change(replace(self.newest_policy, imported=None))
                self.imported.there = None
                # One that is under way may have written runs, of which something would be missing.
                self.newest_import = None
                stored_import.remove(self.store, self.incarnation)

    async def _end_tasks(self) -> None:
        # First: a snapshot that is under way, or an append that settles, would have it measured again.
        self.window_runs.close()
        if self._window_memory is not None:
            await self._window_memory.forget(self.window_runs)
        await super()._end_tasks()

    def _has_window(self, index: int) -> IdWindow:
        """The window of this topic, which is one of deduplication IDs; one that begins with this index if it had none.

        Retention may have dropped what said so first: then the first batch says it.
        """
        if self.window is None:
            self.window = IdWindow(self._random_bytes(SECRET_BYTES), index)
            if index:
                logger.error(
                    "topic %s: nothing is left of the deduplication IDs of its first %d messages, which retention has "
                    "dropped and the store has lost: copies of these are taken for new",
                    self.name,
                    index,
                )
        return self.window

    def _apply(self, change: Change, index: int) -> None:
        """A control record is in the log, before the message with this index."""
        if isinstance(change, Policy):
            if change.by_deduplication_id:
                self._has_window(index)
            self._put_in_force(change)
            # It may stand at the end of a segment that is dropped with the message before it.
            self.policy_stated = index - 1
        elif isinstance(change, CursorChange):
            # Nothing else of the policy is another one.
            self.policy = change.applied_to(self.policy)
        else:
            control.apply(change, self.import_parts, self.producers, index)

    def _put_in_force(self, policy: Policy) -> None:
        super()._put_in_force(policy)
        self.log.flush_every(self.applied.flush_interval)

    # -- changes -----------------------------------------------------------------------------------------------

    def append_change(self, change: Change) -> "asyncio.Future[None]":
        """Hands a control record to the log. Done when it is durable and in force; raises why it is not.

        Raises at once, and does nothing, unless the topic takes messages.
        """
        self.check_serving()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        body = control.encode(change, term=self.term, record_id=int.from_bytes(self._random_bytes(8), "little"))
        self._hand_over_change(Changing(body, change, done))
        return done

    @abstractmethod
    def _hand_over_change(self, item: Changing) -> None:
        """Hands a control record to the log."""

    async def set_policy(self, policy: Policy) -> None:
        """Sets the policy, as a whole: durable and in force, between two frames, on return.

        Raises why the topic takes nothing now, or LOG_REFUSED: then it is as it was. Whoever is cancelled here does not
        know.
        """
        await self.append_change(policy)

    @property
    def newest_policy(self) -> Policy:
        return self.flight.newest_policy(self.policy)

    def _in_use(self) -> list[Int64s]:
        return self.flight.producer_rows()

    async def _purge(self, numbers: Int64s) -> int:
        names = self.producers.names_of(numbers)
        await self.append_change(Purge(names))
        self.sessions.forget(names)
        return len(names)

    def _renumber(self, new_numbers: Int64s) -> None:
        self.flight.renumber(new_numbers)

    # -- streams and their frames ----------------------------------------------------------------------------------

    def connect(self, end: Callable[[SeqdedupeError], None] = lambda e: None) -> NumbersCache:
        """A stream begins: its cache. The producers that it uses are in use until `disconnect`.

        `end` is called if another sidecar has taken the topic: everything in flight has been answered by then.
        """
        cache = NumbersCache(stream=self.producers.activity.connect())
        self._streams[cache.stream] = end
        return cache

    def disconnect(self, cache: NumbersCache) -> None:
        """The stream with this cache has ended."""
        self.producers.activity.disconnect(cache.stream)
        self._streams.pop(cache.stream, None)

    def _answer(self, item: Admitted | Changing) -> None:
        try:
            if isinstance(item, Changing):
                item.settled()
                self.counters.count_change(item.change)
                return
            if item.is_told and item.when_durable is not None:
                item.when_durable()
            else:
                item.reply(item.receipt)
            self.counters.count(item.receipt, item.frame.rows)
            self.counters.stored_bytes += len(item.body)
        except Exception:
            # Others wait for their answers, and the topic for what comes after them.
            logger.exception("topic %s could not give an answer", self.name)

    def _answer_early(self, written: Sequence[Runs]) -> None:
        """Frames are in the log that a power cut may still take: their senders alone hear of it, if they asked to."""
        for item, runs in zip(self.flight.written(len(written)), written, strict=True):
            if isinstance(item, Admitted) and item.when_durable is not None:
                item.receipt.runs = runs
                item.receipt.durable_at = item.receipt.first_index + item.frame.rows
                item.is_told = True
                item.reply(item.receipt)
            else:
                # Its sender takes nothing less. Before the policy was in force nobody asked for the sync.
                self.log.flush()

    async def all_settled(self) -> None:
        """Returns when all that is in flight now has settled, whatever the flush policy."""
        self.log.flush()
        await self.flight.all_of_now()
