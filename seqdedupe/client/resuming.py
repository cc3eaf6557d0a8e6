"""From where the source of a partitioned topic's producer has to be sent again: its last messages say it."""

from collections.abc import Iterable
from typing import NamedTuple

from seqdedupe.client.reader import Reader
from seqdedupe.client.sidecars import Sidecars
from seqdedupe.errors import PositionError
from seqdedupe.limits import NO_SEQUENCE_ID
from seqdedupe.message_id import Position


class Persisted(NamedTuple):
    """The last message of a producer that a topic had when its session started."""

    topic: str
    """The full name; where the topic is partitioned, that of a partition."""
    sequence_id: int
    """-1 if there was none."""
    position: Position | None
    """None if it is no longer known, or there was none."""
    incarnation: int
    """Which creation of that topic it is."""


async def complete_up_to(sidecars: Sidecars, producer_name: str, last: Iterable[Persisted]) -> int:
    """The highest ID up to which the last messages of the producer say that everything is settled; -1 if none does.

    A message that retention has dropped says nothing: going on from an earlier ID only costs time.
    """
    highest = NO_SEQUENCE_ID
    for one in last:
        if one.position is None:
            continue
        index = one.position.index
        async with Reader(sidecars, one.topic, index, stop_index=index + 1) as reader:
            try:
                stored = await reader.next_batch()
            except PositionError as e:
                if e.reason != "POSITION_TRIMMED":
                    raise
                continue
        if stored is not None and len(stored.batch.complete_up_to):
            of_producer = stored.batch.names().index(producer_name)
            highest = max(highest, int(stored.batch.complete_up_to[of_producer]))
    return highest
