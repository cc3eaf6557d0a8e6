"""The log on a real broker, held against the suite that every log passes, in both formats."""

import asyncio
import itertools
import os
import time

import pulsar
import pulsar.asyncio
import pytest

from seqdedupe.errors import ConfigurationError, SeqdedupeError
from seqdedupe.log.contract import Failure, Log, LogName
from seqdedupe.log.pulsar import policies
from seqdedupe.log.pulsar.broker_wire import Brokers
from seqdedupe.log.pulsar.entries import EntryFormat, EntrySettings
from seqdedupe.log.pulsar.log import PulsarLog, PulsarResources
from seqdedupe.log.pulsar.logs import PulsarLogs
from seqdedupe.names import namespace_of
from seqdedupe.topic.base import State
from tests.log.conformance import LogConformance, LogHarness, replayed
from tests.log.conformance import Owner as OwnerOfLog
from tests.pulsar.members import MakeMember
from tests.pulsar.owners import LIMIT_SECONDS, Cluster, quiet, until

INCARNATION = 1_700_000_000_000_000


_openings = itertools.count(1)


def shared(cluster: Cluster, brokers: Brokers | None = None) -> PulsarResources:
    async def claim(_: str, known: int) -> int:
        return next(number for number in _openings if number > known)

    return PulsarResources(
        "one",
        "host:6680",
        lambda: time.time_ns() // 1_000_000,
        claim,
        cluster.admin,
        cluster.answers,
        brokers or Brokers(cluster.service_url),
    )


class PulsarHarness(LogHarness):
    has_clock = False
    failure = Failure.UNKNOWN
    trims = False
    takes_higher_terms_only = True

    def __init__(self, cluster: Cluster, topic: str, entry_format: EntryFormat) -> None:
        self._service_url = cluster.service_url
        self._topic = topic
        self._settings = EntrySettings(entry_format, "SEQUENCE_ID", 0, "host:6680")
        self._shared = shared(cluster)
        self._rival: pulsar.Client | None = None

    async def open(self, covered_index: int = 0, place: bytes = b"") -> Log:
        log = PulsarLog(self._shared, self._topic, INCARNATION, self._settings, place)
        await log.begin(covered_index)
        return log

    def refuse_writes(self, log: Log) -> None:
        # Somebody throws the owner out, and holds the topic.
        self._rival = pulsar.Client(self._service_url, logger=quiet())
        self._rival.create_producer(self._topic, access_mode=pulsar.ProducerAccessMode.ExclusiveWithFencing)

    def allow_writes(self, log: Log) -> None:
        assert self._rival is not None
        self._rival.close()


class TestPulsarLog(LogConformance):
    @pytest.fixture(params=[*EntryFormat, None], ids=["plain", "packed", "native", "plain and not deduplicated"])
    async def harness(self, request: pytest.FixtureRequest, cluster: Cluster, topic: str) -> LogHarness:
        await cluster.create(topic, deduplicates=request.param is not None)
        return PulsarHarness(cluster, topic, request.param or EntryFormat.PLAIN)


async def test_a_topic_that_becomes_unsafe_while_it_is_written_takes_nothing(
    cluster: Cluster, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policies, "LOOK_SECONDS", 0.5)
    await cluster.create(topic)
    log = PulsarLog(shared(cluster), topic, INCARNATION, EntrySettings(EntryFormat.PLAIN, "SEQUENCE_ID", 0, "h:1"))
    await log.begin(0)
    owner = await OwnerOfLog(log, 1).open()
    owner.append(0, 1)
    await owner.until_stored(1)
    await cluster.admin.set_policy(topic, "messageTTL?messageTTL=1", None)
    assert await owner.until_failed() is Failure.UNKNOWN
    for why in (owner.why, str(await _refused(log))):
        assert f"pulsar-admin topicPolicies set-message-ttl --ttl 0 {topic}" in why
    await cluster.admin.set_policy(topic, "messageTTL?messageTTL=0", None)

    async def is_open() -> bool:
        return await _refused(log) is None

    await until(is_open)
    await log.close()


async def test_where_messages_must_be_encrypted_a_topic_takes_nothing_and_says_why(
    member: MakeMember, namespace: str, cluster: Cluster
) -> None:
    """Pulsar takes the owner's producer away, and refuses a new one."""
    topic, other = f"persistent://{namespace}/t", f"persistent://{namespace}/other"
    one = member()
    await one.start()
    await one.run(one.topics.create(topic))
    await one.publish(topic, 0)
    await cluster.url.call("POST", f"namespaces/{namespace}/encryptionRequired", True)
    command = f"pulsar-admin namespaces set-encryption-required --disable {namespace}"
    await until(lambda: command in one.topics.get(topic).why)
    assert one.topics.get(topic).state is State.READ_ONLY
    with pytest.raises(ConfigurationError, match=command) as e:
        await one.run(one.topics.create(other))
    assert e.value.reason == "UNSAFE_TOPIC_POLICY"
    assert await cluster.admin.topics(namespace) == [topic]
    await cluster.url.call("POST", f"namespaces/{namespace}/encryptionRequired", False)
    await one.take(topic)
    assert await one.publish(topic, 1) == 1


async def test_a_terminated_topic_says_so(cluster: Cluster, topic: str) -> None:
    """To its owner and to others, although a broker says that the last owner still has it."""
    await cluster.create(topic)
    settings = EntrySettings(EntryFormat.PLAIN, "SEQUENCE_ID", 0, "h:1")
    log = PulsarLog(shared(cluster), topic, INCARNATION, settings)
    await log.begin(0)
    owner = await OwnerOfLog(log, 1).open()
    owner.append(0, 1)
    await owner.until_stored(1)
    await cluster.url.call("POST", topic.replace("://", "/") + "/terminate")
    owner.append(1, 1)
    assert await owner.until_failed() is Failure.UNKNOWN
    for each in (log, PulsarLog(shared(cluster), topic, INCARNATION, settings)):
        await each.begin(0)
        async with asyncio.timeout(LIMIT_SECONDS):
            await each.wait_until_free()
        refused = await _refused(each)
        assert refused is not None
        assert refused.reason == "TOPIC_TERMINATED"
        assert [record.rows for record in await replayed(each)] == [0, 1]
        await each.close()


async def _refused(log: PulsarLog) -> SeqdedupeError | None:
    try:
        await OwnerOfLog(log, next(_openings)).open()
    except SeqdedupeError as e:
        return e
    return None


async def test_a_topic_is_made_found_opened_kept_and_deleted(cluster: Cluster) -> None:
    namespace = f"public/logs-{os.getpid()}"
    await cluster.url.call("PUT", f"namespaces/{namespace}", {"subscription_expiration_time_minutes": 0})
    topic = f"persistent://{namespace}/t"
    await cluster.admin.create_topic(f"{topic}-of-somebody", {})

    def logs() -> PulsarLogs:
        return PulsarLogs(shared(cluster), [namespace], EntryFormat.PACKED, may_change_policies=True)

    ours = logs()
    assert await ours.list() == []
    for _ in range(2):
        await ours.create(INCARNATION, topic, b"")
    for name, why in ((topic, "another sidecar has made"), (f"{topic}-of-somebody", "which no sidecar has made")):
        with pytest.raises(SeqdedupeError, match=f"{why}.*TOPIC_EXISTS"):
            await ours.create(INCARNATION + 1, name, b"")
    log = await ours.open(INCARNATION, 0)
    owner = await OwnerOfLog(log, 1).open()
    owner.append(0, 3)
    await owner.until_stored(1)
    await log.close()

    others = logs()
    assert await others.list() == [LogName(INCARNATION, topic)]
    log = await others.open(INCARNATION, 0)
    assert log.certain_index == 3
    assert len(await replayed(log)) == 2
    await log.close()
    with pytest.raises(SeqdedupeError, match="LOG_DAMAGED"):
        await others.open(INCARNATION + 1, 0)

    stats = await cluster.url.get(f"persistent/{namespace}/t/internalStats")
    cursor = stats["cursors"]["seqdedupe-one"]
    assert cursor["markDeletePosition"].endswith(":-1"), "the subscription does not keep the first entry"
    for _ in range(2):
        await others.delete(INCARNATION)
    assert await others.list() == []
    assert await cluster.admin.topics(namespace) == [f"{topic}-of-somebody"]


async def test_a_topic_that_is_not_safe_is_no_log(cluster: Cluster, topic: str) -> None:
    logs = PulsarLogs(shared(cluster), [namespace_of(topic)], EntryFormat.PLAIN, may_change_policies=False)
    with pytest.raises(SeqdedupeError, match="UNSAFE_TOPIC_POLICY"):
        await logs.create(INCARNATION + 7, topic, b"")
    with pytest.raises(SeqdedupeError, match="UNSAFE_TOPIC_POLICY"):
        await logs.open(INCARNATION + 7, 0)


@pytest.mark.parametrize("entry_format", EntryFormat, ids=lambda entry_format: entry_format.value)
async def test_an_unloaded_topic_settles_everything(cluster: Cluster, topic: str, entry_format: EntryFormat) -> None:
    """Its ledger ends, and with it the opening: opening again and reading tells what came of the rest."""
    await cluster.create(topic)
    settings = EntrySettings(entry_format, "SEQUENCE_ID", 0, "host:6680")
    log = PulsarLog(shared(cluster), topic, INCARNATION, settings)
    term = 0
    while log.certain_index < 900:
        term += 1
        owner = await OwnerOfLog(log, term).open()
        first = log.certain_index
        for index in range(first, 900, 3):
            owner.append(index, min(3, 900 - index))
            if term == 1 and index % 300 == 150:
                await owner.until_settled(1)
                await cluster.admin.unload(topic)
        await owner.until_settled(len(range(first, 900, 3)))
    told = [(await log.locate(index)).message_id for index in range(0, 900, 30)]
    assert told == sorted(set(told))
    assert len({one.ledger_id for one in told}) > 1
    ids = [one for record in await replayed(log) for one in record.batch.sequence_ids]
    assert ids == list(range(900))
    await log.close()
