"""Who published into a topic before it had an owner: its first owner states it, so that its log tells it for good."""

import asyncio
import logging

import numpy as np

from seqdedupe.core.rule import DURABLE_EPOCH, PERSISTED
from seqdedupe.errors import SeqdedupeError
from seqdedupe.limits import NO_EPOCH, NO_SEQUENCE_ID
from seqdedupe.names import producer_name
from seqdedupe.topic.control import STATED_A_RECORD, Import
from seqdedupe.topic.logged import LoggedTopic

logger = logging.getLogger("seqdedupe.topic")


def state(topic: LoggedTopic) -> None:
    """Hands the watermarks of those to the log of whom it says nothing yet. Whoever opens the topic comes after that.

    If that fails, the topic recovers, and it is done again. The topic serves.
    """
    unsaid = {
        name.encode(): sequence_id
        for name, sequence_id in topic.log.earlier.items()
        if _may_come(name) and not _is_known(topic, name.encode())
    }
    names, persisted = list(unsaid), np.array(list(unsaid.values()), np.int64)
    for start in range(0, len(names), STATED_A_RECORD):
        stop = start + STATED_A_RECORD
        part = Import(names[start:stop], persisted[start:stop], start // STATED_A_RECORD, stop >= len(names))
        topic.append_change(part).add_done_callback(_retrieve)
    if names:
        logger.info("topic %s: the watermarks of %d producers from before it had an owner", topic.name, len(names))


def _may_come(name: str) -> bool:
    """Whether a producer of that name can ever open the topic."""
    try:
        producer_name(name)
    except SeqdedupeError:
        return False
    return True


def _is_known(topic: LoggedTopic, name: bytes) -> bool:
    number = topic.producers.number(name)
    if number is None:
        return False
    row = topic.producers.numbers[number]
    return bool(row[PERSISTED] > NO_SEQUENCE_ID or row[DURABLE_EPOCH] > NO_EPOCH)


def _retrieve(stated: "asyncio.Future[None]") -> None:
    """Nobody waits for it."""
    if not stated.cancelled():
        stated.exception()
