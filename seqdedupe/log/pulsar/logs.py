"""All Pulsar topics that are logs of a sidecar. The properties of the topic itself mark it as a log."""

import logging
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress

from seqdedupe.entry_properties import (
    FORMAT,
    FORMAT_VERSION,
    INCARNATION,
    MODE,
    PARTITIONS,
    SCHEMA_VERSION,
    VERSION,
    check_version,
)
from seqdedupe.errors import NotFoundError, SeqdedupeError, error
from seqdedupe.log.contract import AS_USUAL, Layout, LogName
from seqdedupe.log.pulsar import taking_over, wholes
from seqdedupe.log.pulsar.entries import EntryFormat, EntrySettings
from seqdedupe.log.pulsar.log import PulsarLog, PulsarResources
from seqdedupe.log.pulsar.policies import check_takes_producers, ensure_safe
from seqdedupe.log.pulsar.topic_owner import ADDRESS
from seqdedupe.log.pulsar.wholes import LIFE, Life, Whole
from seqdedupe.names import check_is_no_system_topic, namespace_of, number_of, partition_name, whole_of

logger = logging.getLogger("seqdedupe.log")

_MODE_IDS = "SEQUENCE_ID"


class PulsarLogs:
    """The logs of some namespaces of a cluster. Satisfies `seqdedupe.log.contract.Logs`.

    New topics get `entry_format`, but topics with a schema get `plain` instead of `native`. A durable subscription,
    `seqdedupe-<instance name>`, retains the messages of each log, from the topic's beginning in the last durable
    snapshot on. With `may_change_policies`, unsafe policies of a topic are replaced (`policies.ensure_safe`).
    """

    def __init__(
        self,
        shared: PulsarResources,
        namespaces: Sequence[str],
        entry_format: EntryFormat,
        *,
        may_change_policies: bool,
    ) -> None:
        self._shared = shared
        self._admin = shared.admin
        self._namespaces = namespaces
        self._entry_format = entry_format
        self._may_change_policies = may_change_policies
        self._topics: dict[int, str] = {}
        """By incarnation, as last found, including partitions."""
        self._going: set[int] = set()
        """The topics among them that are no partitions and are being deleted, by any sidecar."""
        self._wholes: dict[str, Whole] = {}
        """Partitioned topics by name, as last found."""

    async def create(
        self, incarnation: int, topic: str, secret: bytes, partitions: int = 0, layout: Layout = AS_USUAL
    ) -> None:
        """See `Logs.create`. An existing topic that is not a log raises TOPIC_EXISTS. The secret is not used.

        The partitions of a topic are made in order, and have consecutive incarnations.

        Raises INVALID_NAMESPACE for a topic outside the configured namespaces; INVALID_TOPIC_NAME for a name that
        Pulsar reserves or uses for partitions; INVALID_REQUEST for an invalid schema; UNSAFE_TOPIC_POLICY.
        """
        self._check_name(topic)
        entry_format, schema = self._parsed(topic, layout)
        properties = _properties_of(incarnation, partitions, entry_format, has_schema=schema is not None)
        await check_takes_producers(self._admin, topic)
        if partitions:
            await self._create_partition(incarnation, topic, partitions, properties)
        else:
            await self._create_topic(incarnation, topic, properties)
        await ensure_safe(self._admin, topic, may_change=self._may_change_policies, is_new=True)
        if schema is not None and not (partitions and number_of(topic)):
            # Partitions have the schema of their topic.
            await self._admin.upload_schema(topic, schema.type, schema.definition, schema.properties)
        await self._admin.create_subscription(topic, self._shared.subscription)
        self._topics[incarnation] = topic

    def _check_name(self, topic: str) -> None:
        check_is_no_system_topic(topic)
        if namespace_of(topic) not in self._namespaces:
            raise error(
                "INVALID_NAMESPACE",
                f"the namespace of {topic} is none of {', '.join(self._namespaces)}",
                hint="Add the namespace to pulsar.namespaces, or choose a topic in one of these namespaces.",
            )

    def _parsed(self, topic: str, layout: Layout) -> tuple[EntryFormat, wholes.Schema | None]:
        # Of the formats that stock consumers read, only plain entries have the topic's schema.
        is_typed = bool(layout.schema) and self._entry_format is EntryFormat.NATIVE
        entry_format = EntryFormat(layout.entry_format or (EntryFormat.PLAIN if is_typed else self._entry_format))
        schema = wholes.parse(layout.schema) if layout.schema else None
        if schema is not None and entry_format is not EntryFormat.PLAIN:
            why = f"{topic} cannot have a schema: its entries are {entry_format.value}, batches of the sidecar's own"
            raise error(
                "INVALID_REQUEST", why, hint="Create the topic with the entry format plain, or without a schema."
            )
        return entry_format, schema

    async def take_over(
        self, topic: str, incarnations: Callable[[int], Sequence[int]], layout: Layout = AS_USUAL
    ) -> None:
        """See `Logs.take_over`. Also raises TOPIC_TERMINATED, UNSAFE_TOPIC_POLICY, INVALID_NAMESPACE,
        INVALID_TOPIC_NAME.

        This sidecar's subscription begins with the topic's first entries, so Pulsar keeps these entries. Then the
        topic's properties make the topic a log, in one step. For a partitioned topic, each partition first gets its
        properties. The properties of the partitioned topic then take effect for all partitions. After an earlier crash,
        only the subscription and the safe policies remain. Two sidecars must not take over the same partitioned topic
        at the same time.
        """
        self._check_name(topic)
        if whole_of(topic) is not None:
            raise error(
                "INVALID_TOPIC_NAME", f"{topic} has the name of a partition", hint="Take over the partitioned topic."
            )
        entry_format, schema = self._parsed(topic, layout)
        partitions = await self._admin.partitions(topic)
        if partitions:
            await wholes.check_is_no_log(self._admin, topic)
        elif INCARNATION in (properties := await self._admin.properties(topic)):
            raise _exists(topic, properties)
        names = [partition_name(topic, k) for k in range(partitions)] or [topic]
        reads = taking_over.reads_of(names, layout.watermarks)
        await taking_over.check_can_be_taken_over(self._admin, names)
        for read in reads:
            if read is not None:
                await taking_over.check_was_read(self._admin, self._shared.brokers, read)
        numbers = incarnations(len(names))
        for name in names:
            await ensure_safe(self._admin, name, may_change=self._may_change_policies)
        if schema is not None:
            await self._admin.upload_schema(topic, schema.type, schema.definition, schema.properties)
        for name, incarnation, read in zip(names, numbers, reads, strict=True):
            await self._admin.create_subscription(name, self._shared.subscription)
            # Later than the subscription: what is trimmed before is in the broker's numbers.
            before = taking_over.properties_of(await self._admin.stored_before(name), read)
            if not partitions and INCARNATION in (properties := await self._admin.properties(name)):
                # Another sidecar was faster, and may have acknowledged messages already.
                raise _exists(name, properties)
            of_log = _properties_of(incarnation, partitions, entry_format, has_schema=schema is not None)
            await self._admin.set_properties(name, of_log | before)
        if partitions:
            await wholes.take_over(self._admin, topic, numbers[0], partitions, self._shared.instance_name)

    async def _create_topic(self, incarnation: int, topic: str, properties: Mapping[str, str]) -> None:
        try:
            await self._admin.create_topic(topic, properties)
        except SeqdedupeError as e:
            if e.reason == "TOPIC_IN_USE" and whole_of(topic) is not None:
                why = f"{topic} has the name of a partition, which Pulsar keeps for those of partitioned topics"
                raise error("INVALID_TOPIC_NAME", why, hint="Choose another name.") from e
            if e.reason != "TOPIC_EXISTS":
                raise
            properties = await self._admin.properties(topic)
            if properties.get(INCARNATION) != str(incarnation):
                raise _exists(topic, properties) from e

    async def _create_partition(
        self, incarnation: int, topic: str, partitions: int, properties: Mapping[str, str]
    ) -> None:
        """Set the properties of a partition. With the first partition, Pulsar first makes all partitions."""
        number, whole = number_of(topic), whole_of(topic) or ""
        if number == 0:
            await wholes.begin(self._admin, whole, incarnation, partitions, self._shared.instance_name)
        await self._admin.set_properties(topic, properties)

    async def announce(self, whole: str) -> None:
        """See `Logs.announce`."""
        await wholes.announce(self._admin, whole)

    async def list(self, without: Container[str] = ()) -> list[LogName]:
        """See `Logs.list`. Asks for the properties of each topic, partitioned or not, except those in `without`."""
        await self._look(without)
        topics = [
            LogName(incarnation, topic, is_going=incarnation in self._going)
            for incarnation, topic in self._topics.items()
            if whole_of(topic) is None
        ]
        announced = [whole for whole in self._wholes.values() if whole.life is not Life.MAKING]
        return sorted([*topics, *(log for whole in announced for log in whole.logs)])

    async def open(
        self, incarnation: int, covered_index: int, secret: bytes | None = None, place: bytes = b""
    ) -> PulsarLog:
        """See `Logs.open`. Also raises UNSAFE_TOPIC_POLICY, and NO_STATE if the topic does not continue from the
        place."""
        if incarnation not in self._topics:
            await self._look()
        topic = self._topics.get(incarnation)
        if topic is None:
            raise error(
                "LOG_DAMAGED",
                f"no topic in {', '.join(self._namespaces)} is the log {incarnation}",
                hint="If it was deleted in Pulsar on purpose, say so: seqdedupe topics delete. Then its name is free.",
            )
        properties = await self._properties(topic, incarnation)
        settings = self._settings(topic, properties)
        await ensure_safe(self._admin, topic, may_change=self._may_change_policies)
        # The subscription comes first, so that the entries stay. A sidecar that is new to the topic has none yet.
        await self._admin.create_subscription(topic, self._shared.subscription)
        # Other sidecars can then tell whose subscription it is, even while this sidecar owns nothing.
        whose = {ADDRESS: self._shared.address}
        await self._admin.set_subscription_properties(topic, self._shared.subscription, whose)
        before, numbers = taking_over.last_before(properties), taking_over.numbers_before(properties)
        begins_at = taking_over.read_before(properties)
        log = PulsarLog(self._shared, topic, incarnation, settings, place, numbers, begins_at)
        try:
            await log.begin(covered_index)
            if log.is_empty and await self._admin.has_had_entries(topic, before):
                raise error("NO_STATE", f"{topic} had entries, and none is left")
        except BaseException:
            await log.close()
            raise
        return log

    async def _properties(self, topic: str, incarnation: int) -> dict[str, str]:
        try:
            properties = await self._admin.properties(topic)
        except NotFoundError as e:
            raise error("LOG_DAMAGED", f"Pulsar has no topic {topic} any more") from e
        if properties.get(INCARNATION) != str(incarnation):
            # Pulsar automatically makes a deleted partition again when a client connects to it.
            raise error("LOG_DAMAGED", f"the topic {topic} was deleted in Pulsar and created again: it has no log")
        return properties

    async def delete(self, *incarnations: int) -> None:
        """See `Logs.delete`. Topics are deleted with their subscriptions. Raises TOPIC_IN_USE if a client is
        connected."""
        await self._look()
        for whole in list(self._wholes.values()):
            if whole.first_incarnation in incarnations:
                await wholes.remove(self._admin, whole)
                self._wholes.pop(whole.topic, None)
                for incarnation in whole.topics:
                    self._topics.pop(incarnation, None)
        for incarnation in incarnations:
            if (topic := self._topics.pop(incarnation, None)) is not None:
                # Looking at all topics takes a while. Another sidecar may have deleted this topic and made it again.
                with suppress(NotFoundError):
                    if (await self._admin.properties(topic)).get(INCARNATION) == str(incarnation):
                        # Another sidecar that has it open then releases it, and no sidecar takes it.
                        await self._admin.set_properties(topic, {LIFE: Life.DELETING.value})
                        await self._admin.delete_topic(topic)

    async def close(self) -> None:
        """See `Logs.close`. The owner of the client closes it."""

    async def _look(self, without: Container[str] = ()) -> None:
        """Find which topics are logs."""
        found = {
            incarnation: topic
            for incarnation, topic in self._topics.items()
            if topic in without and whole_of(topic) is None
        }
        found_wholes, going = dict[str, Whole](), set[int]()
        for namespace in self._namespaces:
            for topic in await self._admin.partitioned_topics(namespace):
                if (whole := await wholes.look_at(self._admin, topic)) is not None:
                    found_wholes[topic] = whole
                    found |= whole.topics
            for topic in await self._admin.topics(namespace):
                if topic in without or whole_of(topic) is not None:
                    # The partitioned topic lists its partitions.
                    continue
                # The topic may have been deleted meanwhile.
                with suppress(NotFoundError):
                    properties = await self._admin.properties(topic)
                    if (incarnation := properties.get(INCARNATION, "")).isdecimal():
                        found[int(incarnation)] = topic
                        if wholes.is_going(properties):
                            going.add(int(incarnation))
        self._warn(found_wholes)
        self._topics, self._wholes, self._going = found, found_wholes, going

    def _warn(self, found: Mapping[str, Whole]) -> None:
        """Warn of partitions that Pulsar has added, once."""
        for topic, whole in found.items():
            before = self._wholes.get(topic)
            if whole.unused_partitions and (before is None or before.unused_partitions != whole.unused_partitions):
                logger.warning(
                    "topic %s was made with %d partitions, for good: %d that Pulsar has added are not used, and "
                    "nobody reads what others publish there",
                    topic,
                    whole.partitions,
                    whole.unused_partitions,
                )

    def _settings(self, topic: str, properties: Mapping[str, str]) -> EntrySettings:
        try:
            version = int(properties.get(FORMAT_VERSION, VERSION))
            check_version(version, f"the topic {topic}")
            entry_format, partitions = EntryFormat(properties[FORMAT]), int(properties[PARTITIONS])
            return EntrySettings(entry_format, properties[MODE], partitions, self._shared.address, version)
        except (KeyError, ValueError) as e:
            raise error("LOG_DAMAGED", f"the properties of {topic} do not say {e}") from e


def _properties_of(incarnation: int, partitions: int, entry_format: EntryFormat, *, has_schema: bool) -> dict[str, str]:
    properties = {
        INCARNATION: str(incarnation),
        FORMAT: entry_format.value,
        MODE: _MODE_IDS,
        PARTITIONS: str(partitions),
    }
    return properties | ({FORMAT_VERSION: str(SCHEMA_VERSION)} if has_schema else {})


def _exists(topic: str, properties: Mapping[str, str]) -> SeqdedupeError:
    """Return the error for a new topic if a topic with the same name and these properties exists."""
    if wholes.is_going(properties):
        what = f"{topic} is being deleted, and a sidecar is still connected to it"
        hint = "Try again in a minute: sidecars release it within that time."
    elif INCARNATION in properties:
        what, hint = f"another sidecar has made the topic {topic}", None
    else:
        what, hint = f"Pulsar has a topic {topic} already, which no sidecar has made", wholes.NO_LOG
    return error("TOPIC_EXISTS", what, hint=hint, topic=topic)
