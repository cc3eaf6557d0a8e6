"""Comparing by `id` what a topic holds at a sequence ID with the row that has it."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from seqdedupe.batch import Batch, Int64s
from seqdedupe.client import Client
from seqdedupe.errors import PositionError
from seqdedupe.limits import MAX_SEQUENCE_ID
from seqdedupe.names import partition_name, partition_of
from seqdedupe.services.outbox.rows import Page
from seqdedupe.services.outbox.steps import Found

_NEAR_END = 65_536
"""So many messages from the end are looked at first: what a relay that was killed has left is there."""

_ID = "id"

ANYWHERE = -1
"""In place of a sequence ID."""


def token_name(name: str, token: str) -> str:
    """The producer name of the relay NAME under a token."""
    return f"{name}/{token}"


def is_one_of(name: str) -> Callable[[str], bool]:
    """Whether a producer name is the relay's, under whatever token."""
    pattern = re.compile(re.escape(name) + "/[0-9a-f]{16}")
    return lambda producer: pattern.fullmatch(producer) is not None


@dataclass(frozen=True, slots=True)
class Wanted:
    """The rows that are looked for, in whatever page they stand."""

    page: Page
    at_any_number: bool
    is_ours: Callable[[str], bool]
    ids: frozenset[bytes]

    def there(self, seen: Sequence["Seen"]) -> Int64s:
        """The places of those that were found."""
        rows = [
            row
            for row, (number, one) in enumerate(zip(self.page.sequence_ids.tolist(), self.page.ids(), strict=True))
            if any(one in part.ids.get(ANYWHERE if self.at_any_number else number, ()) for part in seen)
        ]
        return np.array(rows, np.int64)


@dataclass(slots=True)
class Seen:
    """What was read of one topic, or of one partition."""

    is_whole: bool = False
    """Its log still begins with its first message."""
    ids: dict[int, set[bytes]] = field(default_factory=dict)
    """The `id`s at the sequence IDs that are wanted; where any will do, those that are wanted, at ANYWHERE."""
    lowest: dict[str, int] = field(default_factory=dict)
    """The lowest sequence ID that each of the names has in it."""
    persisted: dict[str, int] = field(default_factory=dict)
    """The highest one that each of the names ever had."""

    def take(self, batch: Batch, wanted: Wanted) -> None:
        """Notes what a batch has of it."""
        for place, name in enumerate(batch.names()):
            if not wanted.is_ours(name):
                continue
            rows = np.arange(len(batch))
            if len(batch.producer_indexes):
                rows = np.flatnonzero(batch.producer_indexes == place)
            numbers = batch.sequence_ids[rows]
            self.lowest[name] = min(self.lowest.get(name, MAX_SEQUENCE_ID), int(numbers[0]))
            if not wanted.at_any_number:
                rows = rows[np.isin(numbers, wanted.page.sequence_ids)]
            for row in rows.tolist():
                one = batch.properties_of(row).get(_ID, "").encode()
                if one in wanted.ids:
                    number = ANYWHERE if wanted.at_any_number else int(batch.sequence_ids[row])
                    self.ids.setdefault(number, set()).add(one)

    def lacks(self, number: int) -> bool:
        """Whether it is certain that none of the names ever published this sequence ID, or anything where it is
        ANYWHERE, which was not found: the messages among which it would stand are all there."""
        if self.is_whole:
            return True
        return all(
            self.lowest.get(name, MAX_SEQUENCE_ID) <= number
            for name, persisted in self.persisted.items()
            if persisted >= max(number, 0)
        )


async def find(client: Client, topic: str, name: str, page: Page, *, at_any_number: bool) -> Found:
    """Which rows of a page the topic holds, and of which it cannot be told. Reads the topic's end, and all of it if
    that does not have all of them."""
    while True:
        try:
            return await _find(client, topic, Wanted(page, at_any_number, is_one_of(name), frozenset(page.ids())))
        except PositionError as e:
            if e.reason != "POSITION_TRIMMED":  # retention was faster: there is less to read now
                raise


async def _find(client: Client, topic: str, wanted: Wanted) -> Found:
    partitions = (await client.admin.topic(topic)).partitions
    parts = [partition_name(topic, k) for k in range(partitions)] if partitions else [topic]
    seen = [Seen() for _ in parts]
    ends = [await client.ends(part) for part in parts]
    begin_at = [max(one.first_index, one.last.index + 1 - _NEAR_END) for one in ends]
    for number, part in enumerate(parts):
        await _read(client, part, seen[number], begin_at[number], ends[number].last.index + 1, wanted)
    if len(wanted.there(seen)) < len(wanted.page):
        for number, part in enumerate(parts):
            first_index = ends[number].first_index
            await _read(client, part, seen[number], first_index, begin_at[number], wanted)
            seen[number].is_whole = first_index == 0
            producers = await client.admin.producers(part)
            seen[number].persisted = {one.name: one.persisted for one in producers if wanted.is_ours(one.name)}
    there = wanted.there(seen)
    missing = np.setdiff1d(np.arange(len(wanted.page)), there)
    untold = [row for row in missing.tolist() if not _is_certainly_missing(wanted, row, seen)]
    return Found(there, np.array(untold, np.int64))


async def _read(client: Client, topic: str, seen: Seen, first_index: int, stop_index: int, wanted: Wanted) -> None:
    if first_index >= stop_index:
        return
    async with client.reader(topic, first_index, stop_index=stop_index) as reader:
        async for stored in reader.batches():
            seen.take(stored.batch, wanted)


def _is_certainly_missing(wanted: Wanted, row: int, seen: list[Seen]) -> bool:
    number = ANYWHERE if wanted.at_any_number else int(wanted.page.sequence_ids[row])
    key = wanted.page.keys[row]
    if key is not None:
        return seen[partition_of(key, b"", len(seen))].lacks(number)
    return all(part.lacks(number) for part in seen)
