"""A reader of a topic, with all that is known where it stands: it judges and collects what comes, a step at a time."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from seqdedupe.entry_properties import KIND
from seqdedupe.errors import UnavailableError, error
from seqdedupe.log.contract import Entries
from seqdedupe.log.pulsar.collecting import Collector
from seqdedupe.log.pulsar.entries import NOWHERE, Entry
from seqdedupe.log.pulsar.ledgers import Ledgers
from seqdedupe.log.pulsar.places import STEP_BYTES, Point, begins_record, size_of
from seqdedupe.log.pulsar.reader import Reader
from seqdedupe.log.pulsar.terms import Terms, Verdict, gap
from seqdedupe.message_id import MessageId

READ_TIMEOUT_SECONDS = 30.0
"""An entry that stands there comes sooner, or Pulsar is in trouble."""
KEPT_TIMEOUT_SECONDS = 3.0
"""The same for a reader that was kept: it may wait long before it connects again, and a new one does so at once."""

Hear = Callable[[Entry, Verdict, Point], None]
"""Is told each entry as it was judged, and the point after it."""


class Step(NamedTuple):
    """What stands between two points."""

    start: Point
    end: Point
    entries: Entries | None
    """None if that is nothing: no valid entry."""

    @property
    def is_full(self) -> bool:
        """Whether it ended for its size."""
        return self.end.size_bytes - self.start.size_bytes >= STEP_BYTES


class Cursor:
    """Reads on from a point. After an error or a cancelled call it is of no use any more but to be closed.

    The valid entry before the point must still be there: else what follows it may be gone too, and it is LOG_GAP.
    """

    def __init__(self, reader: Reader, topic: str, start: Point, ledgers: Callable[[], Awaitable[Ledgers]]) -> None:
        """`reader` begins with the valid entry before the point. `ledgers` answers those of the topic now."""
        self.here = start
        """Where the next step begins."""
        self.collector = Collector(Terms(start.standing, start.message_id), start.publish_time_ms)
        self.timeout_seconds = READ_TIMEOUT_SECONDS
        self.idle_since = 0.0
        self._reader = reader
        self._topic = topic
        self._ledgers = ledgers
        self._due = start.message_id if start.message_id.entry_id >= 0 else None
        self._last = NOWHERE
        """The entry that was judged last."""
        self._left: deque[Entry] = deque()

    async def step(self, limit: Point) -> Step:
        """What stands from here on, about STEP_BYTES, up to the limit, which is known to stand after this.

        Raises what the collector does, LOG_GAP if the limit is not as it was known, LOG_UNREADABLE.
        """
        start = self.here
        while self._last < limit.message_id:
            entry = await self._peek()
            if self._is_full(start, entry):
                return Step(start, self.here, self.collector.take())
            if entry.message_id <= limit.message_id:
                await self._judge(entry)
            else:
                break
        if self.here.standing != limit.standing:
            raise gap(f"it does not end with the entry at {limit.message_id} any more", self.here.next_index)
        return Step(start, self.here, self.collector.take())

    async def step_on(self, up_to: MessageId | None, hear: Hear) -> Step:
        """The same, up to an entry that may not be valid, or to the topic's end: a step that is not full reached it."""
        start = self.here
        while up_to is None or self._last < up_to:
            if up_to is None and not self._left and await self._reader.is_at_end():
                break
            try:
                entry = await self._peek()
            except UnavailableError:
                # Of a terminated topic the broker says that there is more.
                if up_to is not None or not (await self._ledgers()).is_last(self._last):
                    raise
                break
            if self._is_full(start, entry):
                break
            verdict = await self._judge(entry)
            if verdict is not None:
                hear(entry, verdict, self.here)
        return Step(start, self.here, self.collector.take())

    async def wait_for_more(self) -> None:
        """Returns when there is an entry that was not judged. Nothing is lost if this is cancelled."""
        while all(entry.message_id <= self._last or entry.message_id == self._due for entry in self._left):
            self._left.extend(await self._reader.read())

    def _is_full(self, start: Point, entry: Entry) -> bool:
        return self.here.size_bytes - start.size_bytes >= STEP_BYTES and begins_record(entry.message)

    async def _peek(self) -> Entry:
        """The next entry, which must be there. After a broker's crash some come again."""
        while not self._left or self._left[0].message_id <= self._last:
            if self._left:
                self._left.popleft()
                continue
            try:
                async with asyncio.timeout(self.timeout_seconds):
                    self._left.extend(await self._reader.read())
            except TimeoutError as e:
                why = f"an entry that should be there did not come for {self.timeout_seconds:.0f} s"
                raise error("LOG_UNREADABLE", f"{self._topic}: {why}") from e
        return self._left[0]

    async def _judge(self, entry: Entry) -> Verdict | None:
        """The verdict on the next entry; None for the one before the point where this began."""
        self._left.popleft()
        self._last = entry.message_id
        if self._due is not None:
            due, self._due = self._due, None
            if entry.message_id != due:
                raise gap(f"the entry at {due}, after which it goes on, is not there any more", self.here.next_index)
            return None
        verdict = await self.collector.add_over_borders(entry, self._ledgers)
        if verdict is Verdict.VALID:
            message = entry.message
            time_ms = (KIND in message.properties and message.event_time_ms) or entry.publish_time_ms
            standing = self.collector.terms.standing
            self.here = self.here.after(standing, entry.message_id, time_ms, time_ms, size_of(message))
        return verdict

    async def close(self) -> None:
        """Lets go of the reader."""
        await self._reader.close()
