"""All Pulsar topics that are logs of a sidecar: what says so stands in the properties of the topic itself."""

from collections.abc import Container, Mapping, Sequence
from contextlib import suppress

from seqdedupe.errors import NotFoundError, SeqdedupeError, error
from seqdedupe.log.contract import LogName
from seqdedupe.log.pulsar.entries import FORMAT, MODE, PARTITIONS, PREFIX, EntryFormat, Settings
from seqdedupe.log.pulsar.log import PulsarLog, Shared
from seqdedupe.log.pulsar.owner import ADDRESS
from seqdedupe.log.pulsar.policies import ensure_safe
from seqdedupe.names import namespace_of

INCARNATION = PREFIX + "incarnation"
"""A property of the topic."""
_MODE_IDS = "SEQUENCE_ID"


class PulsarLogs:
    """The logs of some namespaces of a cluster. Satisfies `seqdedupe.log.contract.Logs`.

    New topics get `entry_format`. Each log keeps its messages by a durable subscription,
    `seqdedupe-<instance name>`, from where the last durable snapshot says that the topic begins. With
    `may_change_policies` a topic's own policies are set where they are not safe (`policies.ensure_safe`).
    """

    def __init__(
        self,
        shared: Shared,
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
        """By incarnation, as they were found last."""

    async def create(
        self, incarnation: int, topic: str, secret: bytes, partitions: int = 0, entry_format: str = ""
    ) -> None:
        """See `Logs.create`. A topic that is there and is no log raises TOPIC_EXISTS. The secret is not used.

        Raises INVALID_NAMESPACE for a topic that would not be found again, INVALID_REQUEST for partitions.
        """
        if partitions:
            why = "topics of a cluster cannot be made with partitions"
            raise error("INVALID_REQUEST", why, hint="Make topics without partitions, or use the embedded log.")
        if namespace_of(topic) not in self._namespaces:
            raise error(
                "INVALID_NAMESPACE",
                f"the namespace of {topic} is none of {', '.join(self._namespaces)}",
                hint="Add it to pulsar.namespaces, or name the topic in one of them.",
            )
        properties = {
            INCARNATION: str(incarnation),
            FORMAT: EntryFormat(entry_format or self._entry_format).value,
            MODE: _MODE_IDS,
            PARTITIONS: "0",
        }
        try:
            await self._admin.create_topic(topic, properties)
        except SeqdedupeError as e:
            if e.reason != "TOPIC_EXISTS":
                raise
            if (await self._admin.properties(topic)).get(INCARNATION) != str(incarnation):
                raise error(
                    "TOPIC_EXISTS", f"Pulsar has a topic {topic} already, which this sidecar did not make"
                ) from e
        await ensure_safe(self._admin, topic, may_change=self._may_change_policies, is_new=True)
        await self._admin.create_subscription(topic, self._shared.subscription)
        self._topics[incarnation] = topic

    async def list(self, without: Container[str] = ()) -> list[LogName]:
        """See `Logs.list`. Each topic is asked for its properties, but for those `without`."""
        await self._look(without)
        return sorted(LogName(incarnation, topic) for incarnation, topic in self._topics.items())

    async def open(
        self, incarnation: int, covered_index: int, secret: bytes | None = None, place: bytes = b""
    ) -> PulsarLog:
        """See `Logs.open`. Raises UNSAFE_TOPIC_POLICY too, and NO_STATE if the topic does not go on from the place."""
        if incarnation not in self._topics:
            await self._look()
        topic = self._topics.get(incarnation)
        if topic is None:
            raise error(
                "LOG_DAMAGED",
                f"no topic in {', '.join(self._namespaces)} is the log {incarnation}",
                hint="If it was deleted in Pulsar on purpose, say so: seqdedupe topics delete. Then its name is free.",
            )
        properties = await self._admin.properties(topic)
        await ensure_safe(self._admin, topic, may_change=self._may_change_policies)
        # Before anything is looked for, so that it stays. Who comes new to the topic has none yet.
        await self._admin.create_subscription(topic, self._shared.subscription)
        # So that others know whose it is, also while this sidecar owns nothing.
        whose = {ADDRESS: self._shared.address}
        await self._admin.set_subscription_properties(topic, self._shared.subscription, whose)
        log = PulsarLog(self._shared, topic, incarnation, self._settings(topic, properties), place)
        try:
            await log.begin(covered_index)
            if log.is_empty and await self._admin.has_had_entries(topic):
                raise error("NO_STATE", f"{topic} had entries, and none is left")
        except BaseException:
            await log.close()
            raise
        return log

    async def delete(self, incarnation: int) -> None:
        """See `Logs.delete`. The topic goes with its subscriptions. Raises TOPIC_IN_USE if somebody is connected."""
        await self._look()
        topic = self._topics.pop(incarnation, None)
        if topic is not None:
            with suppress(NotFoundError):
                await self._admin.delete_topic(topic)

    async def close(self) -> None:
        """See `Logs.close`. The client is its owner's."""

    async def _look(self, without: Container[str] = ()) -> None:
        """Which topics are logs."""
        found = {incarnation: topic for incarnation, topic in self._topics.items() if topic in without}
        for namespace in self._namespaces:
            for topic in await self._admin.topics(namespace):
                if topic in without:
                    continue
                # It may have been deleted meanwhile.
                with suppress(NotFoundError):
                    incarnation = (await self._admin.properties(topic)).get(INCARNATION, "")
                    if incarnation.isdecimal():
                        found[int(incarnation)] = topic
        self._topics = found

    def _settings(self, topic: str, properties: Mapping[str, str]) -> Settings:
        try:
            entry_format, partitions = EntryFormat(properties[FORMAT]), int(properties[PARTITIONS])
            return Settings(entry_format, properties[MODE], partitions, self._shared.address)
        except (KeyError, ValueError) as e:
            raise error("LOG_DAMAGED", f"the properties of {topic} do not say {e}") from e
