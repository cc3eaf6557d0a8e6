"""Watermarks of a topic, out of it, and into one that nobody has used yet."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Generic, TypeVar

import numpy as np

from seqdedupe.core.rule import PERSISTED
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.format.jit import Int64s
from seqdedupe.names import decoded_producer_name, new_producer_name
from seqdedupe.topic.attached import AttachedTopic
from seqdedupe.topic.base import State, TopicBase
from seqdedupe.topic.control import Import, ImportParts
from seqdedupe.topic.sessions import NAMES_A_STEP
from seqdedupe.topic.topic import Topic

EXPORTED_AT_ONCE = 4096
"""Producers; with the longest names they take about 1 MiB."""

Watermarks = tuple[list[bytes], Int64s]
"""Names, and the highest persisted sequence ID of each."""


def watermarks(topic: TopicBase) -> Iterator[Watermarks]:
    """Those of all producers that have one, as of this call.

    Raises RECOVERING, LOG_DAMAGED, NOT_ATTACHED while they are not certain, DRAINING, TOPIC_NOT_FOUND.
    """
    if topic.state is not State.READ_ONLY:
        topic.check_serving()
    if isinstance(topic, AttachedTopic) and topic.state is not State.SERVING:
        raise error("NOT_ATTACHED", f"what the log of topic {topic.name} holds is not known: {topic.why}")
    names = topic.producers.names_from(0)
    persisted = topic.producers.numbers[: len(names), PERSISTED].copy()
    return _parts(names, persisted)


def _parts(names: list[bytes], persisted: Int64s) -> Iterator[Watermarks]:
    for start in range(0, len(names), EXPORTED_AT_ONCE):
        some = persisted[start : start + EXPORTED_AT_ONCE]
        known = np.flatnonzero(some >= 0)
        if len(known):
            yield [names[start + number] for number in known.tolist()], some[known]


Imported = TypeVar("Imported", Topic, AttachedTopic)


class WatermarksImport(ABC, Generic[Imported]):
    """An import into one topic; an earlier one that is not finished never will be.

    Nothing of it is in force, and none of it ever will be, unless `finish` is called; `close` has to be. All raise
    TOPIC_IN_USE, and why the topic takes nothing now.
    """

    def __init__(self, topic: Imported) -> None:
        self._topic: Imported = topic
        self._order = _Order()
        self._check_unused()
        topic.newest_import = self

    @abstractmethod
    async def add(self, names: list[bytes], persisted: Int64s) -> None:
        """Some more. Over all calls the names rise. Raises INVALID_NAME, INVALID_SEQUENCE_ID, INVALID_REQUEST too."""

    @abstractmethod
    async def finish(self) -> None:
        """All of it is in force and durable on return. Raises why it could not be: then it is not, or it is as a whole.

        It holds the event loop, some 40 ms for a million producers, 170 if it is repeated.
        """

    def close(self) -> None:
        """Lets go of what it holds."""
        if self._topic.newest_import is self:
            self._topic.newest_import = None

    def _check(self) -> None:
        self._check_unused()
        if self._topic.newest_import is not self:
            raise error("TOPIC_IN_USE", f"another import into topic {self._topic.name} was begun meanwhile")

    @abstractmethod
    def _check_unused(self) -> None: ...


def begin_import(topic: TopicBase) -> WatermarksImport[Any]:
    """An import into this topic. Raises as all of it."""
    if isinstance(topic, Topic):
        return _ImportIntoLog(topic)
    if isinstance(topic, AttachedTopic):
        return _ImportIntoStore(topic)
    raise error("INTERNAL", f"no watermarks can be imported into {topic.name}")


class _ImportIntoLog(WatermarksImport[Topic]):
    """Parts are control records as they come. The last one is written only if nobody has opened the topic by then:
    who opens it later waits until that, which stands before, has settled."""

    def __init__(self, topic: Topic) -> None:
        super().__init__(topic)
        self._parts = 0
        self._may_be_complete = False

    async def add(self, names: list[bytes], persisted: Int64s) -> None:
        await self._order.check(names, persisted)
        await self._append(names, persisted, is_last=False)

    async def finish(self) -> None:
        self._may_be_complete = True
        await self._append([], np.zeros(0, np.int64), is_last=True)

    async def _append(self, names: list[bytes], persisted: Int64s, *, is_last: bool) -> None:
        self._check()
        part = Import(names, persisted, self._parts, is_last)
        self._parts += 1
        await self._topic.append_change(part)

    def close(self) -> None:
        # What the log may yet complete has to count then, as it will when it is replayed.
        if self._topic.newest_import is self and not self._may_be_complete:
            self._topic.import_parts.clear()
        super().close()

    def _check_unused(self) -> None:
        topic = self._topic
        topic.check_serving()
        if topic.next_index > 0:
            raise in_use(topic, "it has messages")
        if topic.producers.has_sessions():
            raise in_use(topic, "a producer has opened it, or was reset")


class _ImportIntoStore(WatermarksImport[AttachedTopic]):
    """The log is a broker's own: what was imported is in the store alone."""

    def __init__(self, topic: AttachedTopic) -> None:
        super().__init__(topic)
        self._parts = ImportParts()
        self._count = 0

    async def add(self, names: list[bytes], persisted: Int64s) -> None:
        self._check()
        await self._order.check(names, persisted)
        self._check()
        self._parts.add(Import(names, persisted, self._count, is_last=False))
        self._count += 1

    async def finish(self) -> None:
        self._check()
        last = Import([], np.zeros(0, np.int64), self._count, is_last=True)
        if (complete := self._parts.add(last)) is not None:
            complete.apply(self._topic.producers, 0)
        await self._topic.keeper.snapshot()

    def _check_unused(self) -> None:
        topic = self._topic
        topic.check_serving()
        if topic.confirmed_index > 0:
            raise in_use(topic, "its log has entries")
        if topic.is_attached:
            raise in_use(topic, "a broker is attached")


class _Order:
    """Checks names and IDs, and that the names rise over all calls."""

    def __init__(self) -> None:
        self._last = b""

    async def check(self, names: list[bytes], persisted: Int64s) -> None:
        if len(names) != len(persisted):
            raise error("INVALID_REQUEST", f"persisted has {len(persisted)} values for {len(names)} producer names")
        for place, (before, name) in enumerate(pairwise([self._last, *names]), 1):
            if place % NAMES_A_STEP == 0:
                await asyncio.sleep(0)
            new_producer_name(decoded_producer_name(name))
            if name <= before:
                raise error("INVALID_REQUEST", f"the producer name {name!r} comes after {before!r}: names have to rise")
        if len(names):
            self._last = names[-1]
        below = np.flatnonzero(persisted < 0)
        if len(below):
            which = int(below[0])
            raise error("INVALID_SEQUENCE_ID", f"{persisted[which]} of producer {names[which]!r} is no sequence ID")


def in_use(topic: TopicBase, why: str) -> SeqdedupeError:
    """Why nothing is imported."""
    return error("TOPIC_IN_USE", f"watermarks cannot be imported into topic {topic.name}: {why}")
