"""Retention: before the log's beginning is dropped, what is in force and stated only there is written again."""

import logging

from seqdedupe.errors import SeqdedupeError
from seqdedupe.topic import control
from seqdedupe.topic.control import Purge, Reset
from seqdedupe.topic.logged import LoggedTopic

logger = logging.getLogger("seqdedupe.topic")


async def trim(topic: LoggedTopic) -> None:
    """Drops what the topic's policy lets go; what is covered after this has begun waits for the next snapshot."""
    retention = None
    try:
        await topic.log.snapshot_is_durable(topic.snapshotter.opaque)
        while retention != (retention := topic.applied.retention):
            first = await topic.log.may_trim_to(topic.snapshot_index, retention)
            if first > topic.log.first_index:
                await state_again(topic, first)
                await topic.log.trim(first)
    except SeqdedupeError as e:
        logger.warning("topic %s: retention waits for the next snapshot: %s", topic.name, e)


async def state_again(topic: LoggedTopic, first_index: int) -> None:
    """What is in force and stated only below this index is written again: the log alone must tell all of it.

    The policy always is, and with it the term: the markers go too, and no term must ever come twice.
    """
    if topic.policy_stated < first_index:
        await topic.append_change(topic.newest_policy)
    if topic.producers.has_forgotten and topic.producers.forgotten_stated < first_index:
        await topic.append_change(Purge([]))
    parts = control.stated_again(topic.producers, first_index)
    while True:
        while topic.flight.has(Reset) or topic.flight.has(Purge):
            # What is stated as it is now would stand after it, and take it back.
            await topic.flight.all_of_now()
        if (part := next(parts, None)) is None:
            return
        await topic.append_change(part)
