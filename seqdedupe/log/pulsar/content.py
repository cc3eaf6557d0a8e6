"""What stands in a topic: read up to its end once, and from then on wherever somebody wants to read."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import NamedTuple

import numpy as np
import pulsar.asyncio

from seqdedupe.batch import Int32s, Int64s
from seqdedupe.errors import error
from seqdedupe.format import records
from seqdedupe.format.columns import BASE_INDEX, PUBLISH_TIME_MS, RECORD_END, RECORD_START, ROWS
from seqdedupe.log.contract import Entries, Location, Records, Runs
from seqdedupe.log.pulsar.collecting import Collector
from seqdedupe.log.pulsar.entries import KIND, NOWHERE, Owner
from seqdedupe.log.pulsar.parts import Parts, next_entries
from seqdedupe.log.pulsar.places import Places, Point, begins_record, is_batch, size_of
from seqdedupe.log.pulsar.terms import Terms, Verdict
from seqdedupe.message_id import MessageId


class Found(NamedTuple):
    """A valid entry that was read."""

    owner: Owner
    message_id: MessageId
    runs: Runs
    """Of its messages."""


class Content:
    """A topic for those who read. Nobody waits here for what is to come: what is known ends with `places.end`.

    The methods that `seqdedupe.log.contract.Log` has are as that says.
    """

    def __init__(self, client: pulsar.asyncio.Client, topic: str, incarnation: int, queue_entries: int) -> None:
        self.places = Places(incarnation)
        self.earlier: dict[str, int] = {}
        """After a replay from the beginning: the highest sequence IDs of those who published before the first marker,
        by producer."""
        self.marked_address = ""
        """Where the last owner can be reached, by its marker."""
        self._topic = topic
        self._parts = Parts(client, topic, queue_entries)

    async def read_on(self, up_to: MessageId | None) -> list[Found]:
        """Judges what stands after the known end, up to this entry; to the topic's end where that is none, or no place.

        Answers the valid entries. The known end is after them then, whatever is raised.
        """
        if up_to is not None and up_to.ledger_id < 0:
            up_to = None
        start = self.places.end
        terms, found = Terms(start.standing), list[Found]()
        reader = await self._parts.open_reader(start)
        try:
            while up_to is not None or not await reader.is_at_end():
                for entry in await next_entries(reader, self._topic):
                    message, message_id = entry.message, entry.message_id
                    if message_id != start.message_id and terms.judge(message) is Verdict.VALID:
                        time_ms = (KIND in message.properties and message.event_time_ms) or entry.publish_time_ms
                        runs = self.places.advance(
                            terms.standing,
                            message_id,
                            time_ms,
                            time_ms,
                            size_of(message),
                            begins_record=begins_record(message),
                            is_batch=is_batch(message),
                        )
                        found.append(Found(terms.owner, message_id, runs))
                        if terms.marker is not None:
                            self.marked_address = terms.marker.settings.address
                    if up_to is not None and message_id >= up_to:
                        return found
            return found
        finally:
            await reader.close()

    def _check_is_there(self, index: int, *, at_end: bool) -> None:
        if index < 0:
            raise error("POSITION_TRIMMED", f"the topic begins with index 0: {index} is before it", first_index=0)
        next_index = self.places.end.standing.next_index
        if index > next_index or (index == next_index and not at_end):
            raise error("POSITION_AFTER_END", f"index {index} is after the end, {next_index} is the next")

    async def replay(self, from_index: int) -> AsyncGenerator[Entries, None]:
        self._check_is_there(from_index, at_end=True)
        start, end = self.places.before(from_index), self.places.end
        collector = Collector(Terms(start.standing), start.publish_time_ms)
        if start.message_id is None:
            self.earlier = collector.earlier
        has_begun = not from_index
        async with aclosing(self._parts.steps(start, end, collector)) as steps:
            async for step in steps:
                if has_begun:
                    yield step
                    continue
                table = step.table
                rows_but_one = 0 if from_index == end.standing.next_index else table[:, ROWS] - 1
                begins = np.flatnonzero(table[:, BASE_INDEX] + rows_but_one >= from_index)
                if len(begins):
                    has_begun, k = True, int(begins[0])
                    yield Entries(step.raw, table[k:], step.runs[k:])

    async def read(self, from_index: int, stop_index: int, max_bytes: int) -> Records:
        self._check_is_there(from_index, at_end=False)
        raw: list[bytes] = []
        runs: list[Runs] = []
        left, index = max_bytes, from_index
        while index < stop_index and (left > 0 or not raw):
            start, end = self.places.part_of(index)
            for record, places, its_runs in await self._batches(start, end):
                if places[BASE_INDEX] + places[ROWS] <= from_index:
                    continue
                left -= len(record)
                if places[BASE_INDEX] >= stop_index or (raw and left < 0):
                    return Records(b"".join(raw), runs)
                raw.append(record)
                runs.append(its_runs)
            index = end.standing.next_index
        return Records(b"".join(raw), runs)

    async def _batches(self, start: Point, end: Point) -> list[tuple[bytes, Int64s, Runs]]:
        """The records of batches in a part, with places and message IDs."""
        return [
            (step.raw[places[RECORD_START] : places[RECORD_END]], places, runs)
            for step in await self._parts.part(start, end)
            for places, runs in zip(step.table, step.runs, strict=True)
            if runs
        ]

    def next_readable(self, from_index: int) -> int:
        """That index itself: what is damaged in a topic is damaged for whoever reads on over it."""
        self._check_is_there(from_index, at_end=True)
        return from_index

    async def locate_time(self, publish_time_ms: int, stop_index: int) -> int:
        index = self.places.before_time(publish_time_ms)
        while index < stop_index:
            start, end = self.places.part_of(index)
            for _, places, _ in await self._batches(start, end):
                if places[PUBLISH_TIME_MS] >= publish_time_ms:
                    return min(int(places[BASE_INDEX]), stop_index)
            index = end.standing.next_index
        return stop_index

    async def locate_bytes(self, from_index: int, size_bytes: int, stop_index: int) -> int:
        start, end = self.places.part_of(from_index)
        before = sum(len(r) for r, p, _ in await self._batches(start, end) if p[BASE_INDEX] + p[ROWS] <= from_index)
        wanted = start.size_bytes + before + size_bytes
        start, end = self.places.part_at(wanted)
        after, reached = end.standing.next_index, start.size_bytes
        for record, places, _ in await self._batches(start, end):
            reached += len(record)
            if reached >= wanted and places[BASE_INDEX] + places[ROWS] > from_index:
                after = int(places[BASE_INDEX] + places[ROWS])
                break
        return min(max(after, from_index + 1), stop_index)

    async def locate(self, index: int) -> Location:
        self._check_is_there(index, at_end=False)
        for _, places, runs in await self._batches(*self.places.part_of(index)):
            row = index - int(places[BASE_INDEX])
            for run in runs:
                if 0 <= row < run.rows:
                    return Location(run.message_id(row), records.ownership(places))
                row -= run.rows
        raise error("INTERNAL", f"{self._topic}: message {index} is not in its part")

    def known_message_ids(self, indexes: Int64s) -> tuple[Int64s, Int64s, Int32s]:
        found = [self.places.recent(index) or NOWHERE for index in indexes.tolist()]
        ledgers, entry_ids, batch_indexes = np.array(found, np.int64).reshape(-1, 3).T
        return ledgers, entry_ids, batch_indexes.astype(np.int32)
