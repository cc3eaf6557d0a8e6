"""Partitioned topics of Pulsar whose partitions are logs: what one says of itself, and where it is in its life.

The properties of a partitioned topic change in one step, whatever becomes of its partitions. So they say which logs
there are. While it is being made nobody uses them but its maker; once it is being deleted, nobody begins to.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum
from typing import NamedTuple

import _pulsar
import pulsar.schema

from seqdedupe.entry_properties import PARTITIONS, PREFIX
from seqdedupe.errors import NotFoundError, SeqdedupeError, error
from seqdedupe.log.contract import LogName
from seqdedupe.log.pulsar.admin_url import PulsarAdmin
from seqdedupe.names import namespace_of, partition_name, whole_of

# -- The schema of a topic: what consumers of Pulsar's own clients decode its messages by. Pulsar keeps it.

TYPES = ("AVRO", "JSON", "PROTOBUF", "STRING", "INT8", "INT16", "INT32", "INT64", "FLOAT", "DOUBLE")
"""The client has names for them, and sends their definitions as the admin URL answers them."""


class Schema(NamedTuple):
    """A schema as the admin URL takes it."""

    type: str
    definition: str
    """Empty for types that need none."""
    properties: dict[str, str]

    def of_client(self) -> pulsar.schema.Schema:
        """The same for a producer of the client's, which is given encoded messages."""
        return _OfBytes(_pulsar.SchemaInfo(_pulsar.SchemaType.__members__[self.type], self.type, self.definition))


class _OfBytes(pulsar.schema.Schema):  # type: ignore[misc]  # the library has no types
    def __init__(self, info: _pulsar.SchemaInfo) -> None:
        # As the library's own classes do, which make a definition of a class of Python's.
        self._schema_info = info


def parse(text: str) -> Schema:
    """Return the schema that a caller gives, in the form that `pulsar-admin schemas upload` takes.

    Raises INVALID_REQUEST.
    """
    try:
        given = json.loads(text)
        kind, definition = given["type"], given.get("schema", "")
        properties = dict(given.get("properties") or {})
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise _invalid(f"it should be a JSON object with `type`, `schema` and `properties`: {e!r}") from e
    if kind not in TYPES:
        raise _invalid(f"its type is {kind!r}: it should be one of {', '.join(TYPES)}")
    if not all(isinstance(one, str) for one in (definition, *properties.values())):
        raise _invalid("`schema` and the values of `properties` should be text")
    return Schema(kind, definition, properties)


def _invalid(why: str) -> Exception:
    hint = "Give what `pulsar-admin schemas upload` takes, as a text of JSON."
    return error("INVALID_REQUEST", f"schema: {why}", hint=hint)


async def schema_of(topic: str, admin: PulsarAdmin) -> Schema:
    """Return the newest schema of a topic that was created with one. Raises LOG_REFUSED if Pulsar has none."""
    try:
        type_name, definition = await admin.schema(topic)
    except NotFoundError as e:
        raise error(
            "LOG_REFUSED",
            f"{topic} was created with a schema, and Pulsar has none of it now",
            hint=f"Upload it again: pulsar-admin schemas upload --filename FILE {topic}",
        ) from e
    if type_name not in TYPES:
        raise error("LOG_REFUSED", f"the schema of {topic} is of type {type_name}, which a sidecar cannot name")
    return Schema(type_name, definition, {})


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


async def look_at(admin: PulsarAdmin, topic: str) -> Whole | None:
    """What a partitioned topic says; None if it is not there, or not a log's. Raises LOG_DAMAGED, and as
    `PulsarAdmin`."""
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


async def begin(admin: PulsarAdmin, topic: str, first_incarnation: int, partitions: int, maker: str) -> None:
    """Makes a partitioned topic of which its maker alone knows until it is `announce`d. One that was begun stays.

    Raises TOPIC_EXISTS, and as `PulsarAdmin`.
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


async def announce(admin: PulsarAdmin, topic: str) -> None:
    """Lets everybody use a partitioned topic that was begun. Raises LOG_REFUSED: then it is not certain that they do
    not, and it is to be removed."""
    try:
        await admin.set_properties(topic, {LIFE: Life.MADE.value})
    except SeqdedupeError:
        # It may have been done all the same.
        there = await look_at(admin, topic)
        if there is None or there.life is not Life.MADE:
            raise


async def remove(admin: PulsarAdmin, whole: Whole) -> None:
    """Deletes a partitioned topic. Nobody begins to use it from now on.

    Raises TOPIC_IN_USE while somebody is connected to a partition, and as `PulsarAdmin`: then it is to be tried again.
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


async def _sweep(admin: PulsarAdmin, topic: str) -> None:
    """Deletes empty partitions without their topic: a client that is still connected when it is deleted can let Pulsar
    make one anew, and nobody could make the topic then."""
    left = [name for name in await admin.topics(namespace_of(topic)) if whole_of(name) == topic]
    if not left or topic in await admin.partitioned_topics(namespace_of(topic)):
        return
    for name in left:
        with suppress(NotFoundError):
            if not await admin.has_had_entries(name):
                await admin.delete_topic(name)
