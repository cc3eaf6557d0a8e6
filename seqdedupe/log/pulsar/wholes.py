"""Partitioned topics of Pulsar whose partitions are logs: what one says of itself, and where it is in its life.

The properties of a partitioned topic change in one step, whatever becomes of its partitions. So they say which logs
there are. While it is being made nobody uses them but its maker; once it is being deleted, nobody begins to.
"""

from collections.abc import Mapping
from contextlib import suppress
from enum import Enum
from typing import NamedTuple

from seqdedupe.entry_properties import PARTITIONS, PREFIX
from seqdedupe.errors import NotFoundError, SeqdedupeError, error
from seqdedupe.log.contract import LogName
from seqdedupe.log.pulsar.admin import Admin
from seqdedupe.names import namespace_of, partition_name, whole_of

FIRST_INCARNATION = PREFIX + "first_incarnation"
LIFE = PREFIX + "life"
MAKER = PREFIX + "maker"

NO_LOG = "Choose another name: what no sidecar has made cannot become a log."
"""The hint where a name is taken by such a topic."""


class Life(Enum):
    """Where it is in its life."""

    MAKING = "making"
    MADE = "made"
    DELETING = "deleting"


def is_going(properties: Mapping[str, str]) -> bool:
    """Whether a topic, partitioned or not, says that it is being deleted."""
    return properties.get(LIFE) == Life.DELETING.value


class Whole(NamedTuple):
    """A partitioned topic whose partitions are logs."""

    topic: str
    first_incarnation: int
    """That of partition 0; those of the others count on."""
    partitions: int
    """So many it was made with, for good."""
    life: Life
    maker: str
    """The instance name of the sidecar that made it."""
    unused_partitions: int
    """So many Pulsar has added later."""

    @property
    def topics(self) -> dict[int, str]:
        """Its partitions by incarnation. They are there unless they have been lost."""
        return {self.first_incarnation + k: partition_name(self.topic, k) for k in range(self.partitions)}

    @property
    def logs(self) -> list[LogName]:
        """The same, for the list of all logs."""
        is_going = self.life is Life.DELETING
        return [
            LogName(incarnation, topic, self.partitions, is_going, self.unused_partitions)
            for incarnation, topic in self.topics.items()
        ]


async def look_at(admin: Admin, topic: str) -> Whole | None:
    """What a partitioned topic says; None if it is not there, or not a log's. Raises LOG_DAMAGED, and as `Admin`."""
    try:
        found = await admin.partitioned(topic)
    except NotFoundError:
        return None
    said = found.properties
    if not found.partitions or FIRST_INCARNATION not in said:
        return None
    try:
        first, partitions, life = int(said[FIRST_INCARNATION]), int(said[PARTITIONS]), Life(said[LIFE])
        return Whole(topic, first, partitions, life, said[MAKER], found.partitions - partitions)
    except (KeyError, ValueError) as e:
        raise error("LOG_DAMAGED", f"the properties of the partitioned topic {topic} do not say {e}") from e


async def begin(admin: Admin, topic: str, first_incarnation: int, partitions: int, maker: str) -> None:
    """Makes a partitioned topic of which its maker alone knows until it is `announce`d. One that was begun stays.

    Raises TOPIC_EXISTS, and as `Admin`.
    """
    await _sweep(admin, topic)
    properties = {
        FIRST_INCARNATION: str(first_incarnation),
        PARTITIONS: str(partitions),
        LIFE: Life.MAKING.value,
        MAKER: maker,
    }
    try:
        await admin.create_partitioned(topic, partitions, properties)
    except SeqdedupeError as e:
        if e.reason != "TOPIC_EXISTS":
            raise
        there = await look_at(admin, topic)
        if there is None or there.first_incarnation != first_incarnation:
            raise _exists(topic, there) from e


def _exists(topic: str, there: Whole | None) -> SeqdedupeError:
    if there is None:
        what, hint = f"Pulsar has a topic {topic} already, or a partition of it, which no sidecar made", NO_LOG
    elif there.life is Life.MAKING:
        what = f"the sidecar {there.maker} is making the partitioned topic {topic}, or has not ended that"
        hint = (
            "If it is not running, start it: it takes back what it had not finished. If it is gone for good: "
            f"pulsar-admin topics delete-partitioned-topic {topic}"
        )
    elif there.life is Life.DELETING:
        what, hint = f"the partitioned topic {topic} is being deleted", "Try again when all sidecars have let go of it."
    else:
        what, hint = f"the topic {topic} is there already, with {there.partitions} partitions", None
    return error("TOPIC_EXISTS", what, hint=hint, topic=topic)


async def announce(admin: Admin, topic: str) -> None:
    """Lets everybody use a partitioned topic that was begun. Raises LOG_REFUSED: then it is not certain that they do
    not, and it is to be removed."""
    try:
        await admin.set_properties(topic, {LIFE: Life.MADE.value})
    except SeqdedupeError:
        # It may have been done all the same.
        there = await look_at(admin, topic)
        if there is None or there.life is not Life.MADE:
            raise


async def remove(admin: Admin, whole: Whole) -> None:
    """Deletes a partitioned topic. Nobody begins to use it from now on.

    Raises TOPIC_IN_USE while somebody is connected to a partition, and as `Admin`: then it is to be tried again.
    """
    # Looking at all topics takes a while, and somebody else may have deleted this one and made it anew.
    if (there := await look_at(admin, whole.topic)) is not None:
        if there.first_incarnation != whole.first_incarnation:
            return
        with suppress(NotFoundError):
            if there.life is not Life.DELETING:
                await admin.set_properties(whole.topic, {LIFE: Life.DELETING.value})
            await admin.delete_partitioned(whole.topic)
    await _sweep(admin, whole.topic)


async def _sweep(admin: Admin, topic: str) -> None:
    """Deletes empty partitions without their topic: a client that is still connected when it is deleted can let Pulsar
    make one anew, and nobody could make the topic then."""
    left = [name for name in await admin.topics(namespace_of(topic)) if whole_of(name) == topic]
    if not left or topic in await admin.partitioned_topics(namespace_of(topic)):
        return
    for name in left:
        with suppress(NotFoundError):
            if not await admin.has_had_entries(name):
                await admin.delete_topic(name)
