"""Reading a topic between two points: in steps, or a part at a time, which is kept for whoever reads on."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator

import pulsar.asyncio

from seqdedupe.errors import error
from seqdedupe.log.contract import Entries
from seqdedupe.log.pulsar.collecting import Collector
from seqdedupe.log.pulsar.entries import NOWHERE, Entry
from seqdedupe.log.pulsar.places import STEP_BYTES, Point, begins_record, size_of
from seqdedupe.log.pulsar.reader import Reader, open_reader
from seqdedupe.log.pulsar.terms import Terms, gap
from seqdedupe.message_id import MessageId

READ_TIMEOUT_SECONDS = 30.0
"""An entry that stands there comes sooner, or Pulsar is in trouble."""
KEPT_PARTS = 8


async def next_entries(reader: Reader, topic: str) -> list[Entry]:
    """The next entries of a topic, where some must be. Raises LOG_UNREADABLE."""
    try:
        async with asyncio.timeout(READ_TIMEOUT_SECONDS):
            return await reader.read()
    except TimeoutError as e:
        why = f"{topic}: an entry that should be there did not come for {READ_TIMEOUT_SECONDS:.0f} s"
        raise error("LOG_UNREADABLE", why) from e


class Parts:
    """Reads one topic. So many entries are fetched ahead."""

    def __init__(self, client: pulsar.asyncio.Client, topic: str, queue_entries: int) -> None:
        self._client = client
        self._topic = topic
        self._queue_entries = queue_entries
        self._kept: OrderedDict[tuple[MessageId | None, MessageId | None], list[Entries]] = OrderedDict()

    async def open_reader(self, point: Point) -> Reader:
        """One whose first entry is the valid one before the point. Raises LOG_UNREADABLE."""
        return await open_reader(self._client, self._topic, point.message_id, self._queue_entries)

    async def steps(self, start: Point, end: Point, collector: Collector) -> AsyncGenerator[Entries, None]:
        """All that stands between the points, about STEP_BYTES a time, by a collector that begins at the first.

        Raises what the collector does, LOG_GAP if the end is not as it was known, LOG_UNREADABLE.
        """
        if end.message_id is None or end.message_id == start.message_id:
            return
        reader = await self.open_reader(start)
        size_bytes = 0
        try:
            last = NOWHERE
            while last < end.message_id:
                for entry in await next_entries(reader, self._topic):
                    last = entry.message_id
                    if last > end.message_id:
                        break
                    if last == start.message_id:
                        continue
                    if size_bytes >= STEP_BYTES and begins_record(entry.message):
                        size_bytes = 0
                        if (found := collector.take()) is not None:
                            yield found
                    collector.add(entry)
                    size_bytes += size_of(entry.message)
            if collector.terms.standing != end.standing:
                raise gap(f"it does not end with the entry at {end.message_id} any more", collector.terms.next_index)
            if (found := collector.take()) is not None:
                yield found
        finally:
            await reader.close()

    async def part(self, start: Point, end: Point) -> list[Entries]:
        """All that stands between two points that follow each other. Raises what `steps` does."""
        key = start.message_id, end.message_id
        found = self._kept.get(key)
        if found is None:
            collector = Collector(Terms(start.standing), start.publish_time_ms)
            found = [step async for step in self.steps(start, end, collector)]
            self._kept[key] = found
            if len(self._kept) > KEPT_PARTS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return found
