"""Partitioned topics of Pulsar whose partitions are logs: their properties, and the stage of their life.

The properties of a partitioned topic change in one step, independently of the partitions. So these properties define
which logs exist. While the topic is being made, only the sidecar that makes the topic uses it. While the topic is being
deleted, no sidecar begins to use it.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum
from typing import NamedTuple

from seqdedupe.entry_properties import PARTITIONS, PREFIX
from seqdedupe.errors import NotFoundError, SeqdedupeError, error
from seqdedupe.figures import counted
from seqdedupe.log.contract import LogName, TopicSchema
from seqdedupe.log.pulsar.admin_url import PulsarAdmin
from seqdedupe.names import namespace_of, partition_name, whole_of
from seqdedupe.pulsar_wire.pulsar_api_pb2 import Schema as WireSchema

# -- The schema of a topic. Consumers with Pulsar's own clients decode its messages by it. Pulsar keeps it.

TYPES = {
    "AVRO": WireSchema.Avro,
    "JSON": WireSchema.Json,
    "PROTOBUF": WireSchema.Protobuf,
    "STRING": WireSchema.String,
    "INT8": WireSchema.Int8,
    "INT16": WireSchema.Int16,
    "INT32": WireSchema.Int32,
    "INT64": WireSchema.Int64,
    "FLOAT": WireSchema.Float,
    "DOUBLE": WireSchema.Double,
}
"""The supported types, by their names in the admin URL. Brokers accept their definitions as the admin URL returns
them."""


class Schema(NamedTuple):
    """A schema as the admin URL takes it."""

    type: str
    definition: str
    """The definition; empty for types that need none."""
    properties: dict[str, str]
    version: int = -1
    """The version in Pulsar; -1 if it is not known."""

    @property
    def shown(self) -> TopicSchema:
        """The schema as the log shows it."""
        return TopicSchema(self.type, self.definition, self.version)

    def of_wire(self) -> WireSchema:
        """Return the schema for the command that opens a producer."""
        return WireSchema(name=self.type, type=TYPES[self.type], schema_data=self.definition.encode())


def parse(text: str) -> Schema:
    """Return the schema in the text that a caller passes. The text has the form that `pulsar-admin schemas upload`
    accepts.

    Raises INVALID_REQUEST.
    """
    try:
        given = json.loads(text)
        kind, definition = given["type"], given.get("schema", "")
        properties = dict(given.get("properties") or {})
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise _invalid(f"it should be a JSON object with `type`, `schema` and `properties`: {e!r}") from e
    if not isinstance(kind, str) or kind not in TYPES:
        raise _invalid(f"its type is {kind!r}: it should be one of {', '.join(TYPES)}")
    if not all(isinstance(one, str) for one in (definition, *properties.values())):
        raise _invalid("`schema` and the values of `properties` should be text")
    return Schema(kind, definition, properties)


def _invalid(why: str) -> Exception:
    hint = "Give what `pulsar-admin schemas upload` takes, as a text of JSON."
    return error("INVALID_REQUEST", f"schema: {why}", hint=hint)


async def schema_of(topic: str, admin: PulsarAdmin) -> Schema:
    """Return the newest schema of a topic that was created with a schema. Raises LOG_REFUSED if Pulsar has no schema of
    this topic."""
    try:
        type_name, definition, version = await admin.schema(topic)
    except NotFoundError as e:
        raise error(
            "LOG_REFUSED",
            f"{topic} was created with a schema, and Pulsar has none of it now",
            hint=f"Upload the schema again: pulsar-admin schemas upload --filename FILE {topic}",
        ) from e
    if type_name not in TYPES:
        raise error("LOG_REFUSED", f"the schema of {topic} is of type {type_name}, which a sidecar does not support")
    return Schema(type_name, definition, {}, version)


FIRST_INCARNATION = PREFIX + "first_incarnation"
LIFE = PREFIX + "life"
MAKER = PREFIX + "maker"

NO_LOG = "Choose another name. Or take the topic over, with its messages: seqdedupe topics create --take-over"
"""The hint if a name is taken by a topic that no sidecar has made."""


class Life(Enum):
    """The stage of its life."""

    MAKING = "making"
    MADE = "made"
    DELETING = "deleting"


def is_going(properties: Mapping[str, str]) -> bool:
    """Return whether a topic, partitioned or not, is marked as being deleted."""
    return properties.get(LIFE) == Life.DELETING.value


class Whole(NamedTuple):
    """A partitioned topic whose partitions are logs."""

    topic: str
    first_incarnation: int
    """The incarnation of partition 0. The incarnations of the others count up from it."""
    partitions: int
    """The number of partitions that it was made with. It never changes."""
    life: Life
    maker: str
    """The instance name of the sidecar that made it."""
    unused_partitions: int
    """The number of partitions that Pulsar has added later."""

    @property
    def topics(self) -> dict[int, str]:
        """The names of its partitions by incarnation. They exist unless they have been lost."""
        return {self.first_incarnation + k: partition_name(self.topic, k) for k in range(self.partitions)}

    @property
    def logs(self) -> list[LogName]:
        """Its partitions, for the list of all logs."""
        is_going = self.life is Life.DELETING
        return [
            LogName(incarnation, topic, self.partitions, is_going, self.unused_partitions)
            for incarnation, topic in self.topics.items()
        ]


async def look_at(admin: PulsarAdmin, topic: str) -> Whole | None:
    """Return the data in a partitioned topic's properties; None if the topic does not exist or is not a log. Raises
    LOG_DAMAGED, and the errors of `PulsarAdmin`."""
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
    """Make a partitioned topic. Only this sidecar uses the topic until `announce` is called. If an earlier call has
    begun the topic, keep the topic.

    Raises TOPIC_EXISTS, and the errors of `PulsarAdmin`.
    """
    await _sweep(admin, topic)
    properties = _properties(first_incarnation, partitions, Life.MAKING, maker)
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
        what, hint = f"the partitioned topic {topic} is being deleted", "Try again when all sidecars have released it."
    else:
        what, hint = f"the topic {topic} is there already, with {counted(there.partitions, 'partition')}", None
    return error("TOPIC_EXISTS", what, hint=hint, topic=topic)


async def check_is_no_log(admin: PulsarAdmin, topic: str) -> None:
    """Raise TOPIC_EXISTS if a partitioned topic is that of sidecars."""
    if (there := await look_at(admin, topic)) is not None:
        raise _exists(topic, there)


async def take_over(admin: PulsarAdmin, topic: str, first_incarnation: int, partitions: int, maker: str) -> None:
    """Let all sidecars use a partitioned topic that no sidecar made, in one step. The partitions must already have
    their properties. The call may be repeated."""
    await admin.set_properties(topic, _properties(first_incarnation, partitions, Life.MADE, maker))


def _properties(first_incarnation: int, partitions: int, life: Life, maker: str) -> dict[str, str]:
    return {
        FIRST_INCARNATION: str(first_incarnation),
        PARTITIONS: str(partitions),
        LIFE: life.value,
        MAKER: maker,
    }


async def announce(admin: PulsarAdmin, topic: str) -> None:
    """Let all sidecars use a partitioned topic that was begun. Raises LOG_REFUSED. After this error some sidecars may
    already use the topic, and the caller must remove the topic."""
    try:
        await admin.set_properties(topic, {LIFE: Life.MADE.value})
    except SeqdedupeError:
        # Pulsar may have set the properties all the same.
        there = await look_at(admin, topic)
        if there is None or there.life is not Life.MADE:
            raise


async def remove(admin: PulsarAdmin, whole: Whole) -> None:
    """Delete a partitioned topic. From now on no sidecar begins to use it.

    Raises TOPIC_IN_USE while a client is connected to a partition, and the errors of `PulsarAdmin`. After an error the
    call must be repeated.
    """
    # Looking at all topics takes a while. Another sidecar may have deleted this topic and made it again.
    if (there := await look_at(admin, whole.topic)) is not None:
        if there.first_incarnation != whole.first_incarnation:
            return
        with suppress(NotFoundError):
            if there.life is not Life.DELETING:
                await admin.set_properties(whole.topic, {LIFE: Life.DELETING.value})
            await admin.delete_partitioned(whole.topic)
    await _sweep(admin, whole.topic)


async def _sweep(admin: PulsarAdmin, topic: str) -> None:
    """Delete empty partitions whose partitioned topic does not exist. A client that is connected during a deletion can
    make Pulsar create a partition again. Without this cleanup, no sidecar could then create the topic."""
    left = [name for name in await admin.topics(namespace_of(topic)) if whole_of(name) == topic]
    if not left or topic in await admin.partitioned_topics(namespace_of(topic)):
        return
    for name in left:
        with suppress(NotFoundError):
            if not await admin.has_had_entries(name):
                await admin.delete_topic(name)
