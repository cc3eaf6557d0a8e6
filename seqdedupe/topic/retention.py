"""Retention: the beginning of the log is dropped once a durable snapshot covers it.

First, statements that are still in force and that only this part of the log contains are written again.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Protocol

from seqdedupe.core.producers import Producers
from seqdedupe.core.rule import STATED
from seqdedupe.errors import SeqdedupeError
from seqdedupe.limits import Retention
from seqdedupe.log.contract import Log
from seqdedupe.topic import control
from seqdedupe.topic.base import State
from seqdedupe.topic.control import STATED_A_RECORD, Change, Purge, Reset
from seqdedupe.topic.frame import Flight
from seqdedupe.topic.keeper import Keeper
from seqdedupe.topic.policy import BYTES_A_MB, Applied, Policy

logger = logging.getLogger("seqdedupe.topic")


class Trimmed(Protocol):
    """The members of a topic that retention uses; `topic.Topic` and `base.TopicBase` describe each of them."""

    name: str
    incarnation: int
    log: Log
    flight: Flight
    producers: Producers
    keeper: Keeper
    state: State
    knows_its_end: bool
    policy: Policy
    applied: Applied
    policy_stated: int

    @property
    def newest_policy(self) -> Policy: ...

    def append_change(self, change: Change) -> "asyncio.Future[None]": ...

    def spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]": ...


class Trimmer:
    """The retention of a topic: it drops what the policy allows, in one background task at a time."""

    def __init__(self, topic: Trimmed) -> None:
        self._topic = topic
        self._looking: asyncio.Task[None] | None = None

    def look(self) -> None:
        """In the background, drop what may be dropped after a durable snapshot or a change of the policy."""
        if self._topic.state is not State.DRAINING and (self._looking is None or self._looking.done()):
            self._looking = self._topic.spawn(trim(self._topic))

    def look_by_time(self) -> None:
        """Drop messages that have become too old, even if no snapshot is taken. Call this at intervals."""
        if self._topic.knows_its_end and self._topic.applied.retention.age_ms is not None:
            self.look()


async def trim(topic: Trimmed) -> None:
    """Drop what the topic's policy allows to drop. Messages that are covered only after the start of this call wait for
    the next snapshot."""
    retention = None
    try:
        await topic.log.snapshot_is_durable(topic.keeper.snapshotter.opaque)
        while retention != (retention := topic.applied.retention):
            first = await _may_trim_to(topic, retention)
            if topic.state in (State.STANDBY, State.READ_ONLY):
                # Nothing can be written again on a full disk, so something must be dropped.
                await topic.log.trim(await _stated_from(topic, first))
            elif first > topic.log.first_index:
                await state_again(topic, first)
                await topic.log.trim(first)
    except SeqdedupeError as e:
        logger.warning("topic %s: retention waits for the next snapshot: %s", topic.name, e)


async def _may_trim_to(topic: Trimmed, retention: Retention) -> int:
    """Return the same as `Log.may_trim_to`, but keep messages for cursors with a hold on retention, up to the cursor's
    limit."""
    covered = topic.keeper.snapshot_index
    first = await topic.log.may_trim_to(covered, retention)
    for cursor in topic.policy.cursors:
        mb, position = cursor.hold_retention_in_mb, cursor.position
        if mb and position.incarnation == topic.incarnation:
            passed = await topic.log.may_trim_to(min(covered, position.index + 1), retention)
            beyond = await topic.log.may_trim_to(covered, Retention(mb * BYTES_A_MB, None))
            first = min(first, max(passed, beyond))
    return first


async def _stated_from(topic: Trimmed, first_index: int) -> int:
    """Return the highest index, up to `first_index`, from which on the log states everything that is in force without a
    new append."""
    producers = topic.producers
    stated = [first_index, topic.policy_stated]
    if producers.has_forgotten:
        stated.append(producers.forgotten_stated)
    generation = producers.generation
    for first in range(0, len(producers), STATED_A_RECORD):
        if len(below := producers.stated_below(first_index, first, first + STATED_A_RECORD)):
            stated.append(int(producers.numbers[below, STATED].min()))
        await asyncio.sleep(0)
    if generation != producers.generation:
        # Some producers have new numbers, and were examined before the renumbering.
        return topic.log.first_index
    return max(min(stated), topic.log.first_index)


async def state_again(topic: Trimmed, first_index: int) -> None:
    """Write again everything that is in force and stated only below this index: the log alone must be sufficient for
    recovery.

    The policy is always in force. The term is written with it, because the markers are dropped too, and no term may
    occur twice.
    """
    if topic.policy_stated < first_index:
        await topic.append_change(topic.newest_policy)
    if topic.producers.has_forgotten and topic.producers.forgotten_stated < first_index:
        await topic.append_change(Purge([]))
    parts = control.stated_again(topic.producers, first_index)
    while True:
        while topic.flight.has(Reset) or topic.flight.has(Purge):
            # The current state would be written after the change in flight, and undo that change.
            await topic.flight.all_of_now()
        if (part := next(parts, None)) is None:
            return
        if part.names:
            await topic.append_change(part)
        else:
            await asyncio.sleep(0)
