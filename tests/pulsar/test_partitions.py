"""Partitioned topics on a real broker: for everybody all partitions are there, or none, no matter what ends in
between."""

import asyncio
import itertools
import logging
from types import SimpleNamespace

import pulsar
import pytest

from seqdedupe.errors import SeqdedupeError
from seqdedupe.log.pulsar import wholes
from seqdedupe.log.pulsar.admin_url import PulsarAdmin
from seqdedupe.log.pulsar.wholes import Whole
from seqdedupe.names import partition_name
from seqdedupe.testing import LAST_RESORT_SECONDS
from seqdedupe.topic import directory
from seqdedupe.topic.base import State
from seqdedupe.topic.policy import Policy
from tests.pulsar.members import Kill, MakeMember, Member, reason_of
from tests.pulsar.owners import Cluster, quiet, until
from tests.records_of import record_of

PARTITIONS = 2
CHANGES_OF_A_CREATION = 8
"""Calls that change something: the whole, three for each partition (properties, subscription, whose), and the last."""


@pytest.fixture
def whole(namespace: str) -> str:
    return f"persistent://{namespace}/w"


def parts_of(whole: str) -> list[str]:
    return [partition_name(whole, k) for k in range(PARTITIONS)]


async def create(one: Member, whole: str) -> None:
    await one.run(directory.create_partitioned(one.topics, whole, PARTITIONS, Policy(deduplication_entries_interval=7)))


async def delete(one: Member, whole: str) -> None:
    await one.run(directory.delete_partitioned(one.topics, whole))


def is_there(one: Member, whole: str) -> bool:
    """Whether it has all partitions, and each can be used. Otherwise it knows nothing of them."""
    used = [name for name in parts_of(whole) if one.topics.registry.topic(name) is not None]
    assert {one.topics.get(name).state for name in used} <= {State.SERVING, State.STANDBY}
    assert used in ([], parts_of(whole)), "a half"
    assert (whole in one.topics.partitions) == bool(used)
    assert not one.topics.registry.closed_topics()
    return bool(used)


async def in_cluster(cluster: Cluster, namespace: str) -> list[str]:
    return [*await cluster.admin.partitioned_topics(namespace), *await cluster.admin.topics(namespace)]


def said_by_markers(service_url: str, topic: str) -> list[str]:
    """How many partitions there are, by each marker in one of them."""
    client = pulsar.Client(service_url, logger=quiet())
    try:
        reader, found = client.create_reader(topic, pulsar.MessageId.earliest), list[str]()
        while reader.has_message_available():
            properties = reader.read_next(timeout_millis=int(LAST_RESORT_SECONDS * 1000)).properties()
            found += [properties["seqdedupe.partitions"]] if properties["seqdedupe.kind"] == "marker" else []
        return found
    finally:
        client.close()


async def until_gone(cluster: Cluster, namespace: str) -> None:
    async def is_gone() -> bool:
        return not await cluster.admin.partitioned_topics(namespace)

    await until(is_gone)


async def test_a_crash_at_any_step_of_a_creation_leaves_all_or_nothing(
    member: MakeMember, whole: str, cluster: Cluster, namespace: str
) -> None:
    """For the sidecar that is started again, and for another one that looks at any time."""
    one, other = member(), member()
    await one.start()
    await other.start()
    for at in itertools.count(1):
        one.url.fails(at, kills=True)
        try:
            await create(one, whole)
        except Kill:
            pass
        else:
            break
        await one.kill()
        await other.look()
        seen = is_there(other, whole)
        assert seen == (at == CHANGES_OF_A_CREATION)
        await one.start()
        assert is_there(one, whole) == seen
        if seen:
            assert {topic.policy.deduplication_entries_interval for topic in one.topics.registry.open_topics()} == {7}
            await delete(one, whole)
            await other.look()
        await until_gone(cluster, namespace)
    assert at == CHANGES_OF_A_CREATION + 1
    assert is_there(one, whole)


async def test_a_creation_of_which_a_call_fails_leaves_nothing(
    member: MakeMember, whole: str, cluster: Cluster, namespace: str
) -> None:
    one = member()
    await one.start()
    for at in range(1, CHANGES_OF_A_CREATION):
        one.url.fails(at)
        assert await reason_of(create(one, whole)) == "LOG_REFUSED"
        assert not is_there(one, whole)
        await until_gone(cluster, namespace)
    # What was announced is there, although nobody said so.
    one.url.fails(CHANGES_OF_A_CREATION)
    await create(one, whole)
    assert is_there(one, whole)


async def test_without_the_announcement_others_take_halves(
    member: MakeMember, whole: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control arm: everything that is in the cluster counts."""
    monkeypatch.setattr("seqdedupe.log.pulsar.logs.Life", SimpleNamespace(MAKING=None))
    one, other = member(), member()
    await one.start()
    await other.start()
    # The first partition is made, the second one has no properties.
    one.url.fails(3, kills=True)
    with pytest.raises(Kill):
        await create(one, whole)
    await one.kill()
    await other.look()
    first, second = parts_of(whole)
    assert await other.publish(first, 1) == 0
    assert other.topics.registry.topic(second) is None


async def test_two_that_make_one_at_once(member: MakeMember, whole: str) -> None:
    """One of them does, and the other one knows it then, as does who is asked for it."""
    some = member(), member(), member()
    for one in some:
        await one.start()
    *two, third = some
    reasons = await asyncio.gather(*(reason_of(create(one, whole)) for one in two))
    assert sorted(reasons) == ["", "TOPIC_EXISTS"]
    for one in two:
        await one.look()
        assert is_there(one, whole)
    assert await reason_of(third.run(third.topics.get_or_create(whole))) == "TOPIC_IS_PARTITIONED"
    assert is_there(third, whole)
    incarnations = [[record_of(one.topics, name).incarnation for name in parts_of(whole)] for one in some]
    assert incarnations[0] == incarnations[1] == incarnations[2]


async def test_what_another_one_has_half_made_is_refused_and_says_so(
    member: MakeMember, whole: str, cluster: Cluster, namespace: str
) -> None:
    one, other = member(), member()
    await one.start()
    await other.start()
    one.url.fails(2, kills=True)
    with pytest.raises(Kill):
        await create(one, whole)
    await one.kill()
    with pytest.raises(SeqdedupeError, match="TOPIC_EXISTS") as caught:
        await create(other, whole)
    assert "is making the partitioned topic" in caught.value.message
    assert f"delete-partitioned-topic {whole}" in caught.value.hint
    assert not is_there(other, whole)
    # Anyone who had begun takes it back.
    await one.start()
    await until_gone(cluster, namespace)
    await create(other, whole)
    assert is_there(other, whole)


async def test_what_no_sidecar_made_is_left_alone(
    member: MakeMember, whole: str, cluster: Cluster, namespace: str
) -> None:
    one = member()
    await one.start()
    await cluster.admin.create_partitioned(whole, 3, {"theirs": "yes"})
    before = await in_cluster(cluster, namespace)
    plain = f"{whole}-plain"
    await cluster.admin.create_topic(plain, {})
    assert await reason_of(create(one, whole)) == "TOPIC_EXISTS"
    assert await reason_of(create(one, plain)) == "TOPIC_EXISTS"
    for name, reason in ((whole, "TOPIC_EXISTS"), (partition_name(whole, 1), "TOPIC_EXISTS")):
        assert await reason_of(one.run(one.topics.create(name))) == reason
    for name in (partition_name(whole, 3), partition_name(plain, 0)):
        assert await reason_of(one.run(one.topics.create(name))) == "INVALID_TOPIC_NAME"
    assert sorted(await in_cluster(cluster, namespace)) == sorted([*before, plain])
    assert await cluster.admin.partitioned(whole) == (3, {"theirs": "yes"})
    assert one.topics.all() == []
    # Nor has anything of it stayed in the store.
    assert one.store.topics() == []


async def shared_out(member: MakeMember, whole: str) -> tuple[Member, Member]:
    """Two sidecars: the first one has partition 0, the second one partition 1."""
    one, other = member(), member()
    await one.start()
    await create(one, whole)
    await other.start()
    await one.stop()
    await other.take(parts_of(whole)[1])
    await one.start()
    assert one.topics.get(parts_of(whole)[0]).state is State.SERVING
    return one, other


async def test_partitions_have_owners_of_their_own_and_are_deleted_with_the_whole(
    member: MakeMember, whole: str, cluster: Cluster, namespace: str
) -> None:
    one, other = await shared_out(member, whole)
    first, second = parts_of(whole)
    assert (await one.publish(first, 1), await other.publish(second, 2)) == (0, 0)
    for wrong, name, owner in ((one, second, other), (other, first, one)):
        with pytest.raises(SeqdedupeError, match="NOT_OWNER") as caught:
            await wrong.publish(name, 3)
        assert caught.value.numbers["owner_address"] == owner.address
    before = {record.incarnation for record in one.store.topics()}
    # It ends when it is certain for everybody that the topic goes, and nothing else was done.
    one.url.fails(1, kills=True)
    with pytest.raises(Kill):
        await delete(one, whole)
    await one.kill()
    await one.start()
    assert not is_there(one, whole)
    assert await reason_of(create(one, whole)) == "TOPIC_EXISTS"
    assert await reason_of(other.publish(second, 3)) == "", "it does not know yet"
    await other.look()
    assert not is_there(other, whole)
    await until_gone(cluster, namespace)
    # And when all of it is gone, and the store does not say so.
    await create(one, whole)
    one.url.fails(2, kills=True)
    with pytest.raises(Kill):
        await delete(one, whole)
    await one.kill()
    assert await in_cluster(cluster, namespace) == []
    await one.start()
    await create(one, whole)
    assert not before & {record.incarnation for record in one.store.topics()}
    assert await one.publish(second, 1) == 0, "nothing of the old one is there"
    await other.look()
    assert is_there(other, whole)


async def test_without_saying_so_first_others_go_on_with_what_is_deleted(
    member: MakeMember, whole: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control arm: Pulsar deletes what nobody uses, and the owner of another partition is not told."""
    one, other = await shared_out(member, whole)

    async def silent(admin: PulsarAdmin, whole: Whole) -> None:
        await admin.delete_partitioned(whole.topic)

    monkeypatch.setattr(wholes, "remove", silent)
    await delete(one, whole)
    await other.look()
    assert whole in other.topics.partitions
    assert await other.publish(parts_of(whole)[1], 1) == 0


async def test_partitions_that_pulsar_adds_are_not_used(
    member: MakeMember, whole: str, cluster: Cluster, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    one = member()
    await one.start()
    await create(one, whole)
    path = whole.replace("://", "/")
    await cluster.url.call("POST", f"{path}/partitions", PARTITIONS + 3)
    caplog.set_level(logging.WARNING, "seqdedupe.log")
    for _ in range(2):
        await one.look()
    assert is_there(one, whole)
    assert one.topics.partitions.unused == {whole: 3}
    said = [
        record.getMessage() for record in caplog.records if "3 that Pulsar has added are not used" in record.message
    ]
    assert len(said) == 1
    # Who comes new sees the same.
    await one.stop()
    new = member()
    await new.start()
    assert is_there(new, whole)
    assert (new.topics.partitions.names(whole), new.topics.partitions.unused) == (parts_of(whole), {whole: 3})
    for name in parts_of(whole):
        said = await asyncio.to_thread(said_by_markers, cluster.service_url, name)
        assert len(said) >= 2
        assert set(said) == {str(PARTITIONS)}, "for good"
    await delete(new, whole)
    assert await in_cluster(cluster, namespace) == []


async def test_a_partition_that_was_deleted_in_pulsar_is_never_left_out(
    member: MakeMember, whole: str, cluster: Cluster
) -> None:
    one = member()
    await one.start()
    await create(one, whole)
    await one.stop()
    first, second = parts_of(whole)
    await cluster.admin.delete_topic(second)
    path = whole.replace("://", "/")
    for is_made_anew in (False, True):
        if is_made_anew:
            # As Pulsar does by itself when somebody connects.
            await cluster.url.call("POST", f"{path}/createMissedPartitions")
        new = member()
        await new.start()

        def is_damaged(new: Member = new) -> bool:
            closed = new.topics.registry.entry(second).closed
            return closed is not None and closed.state is State.DAMAGED

        await until(is_damaged)
        assert ("created again" in str(getattr(new.topics.registry.entry(second).closed, "why", ""))) == is_made_anew
        await new.take(first)
        assert await reason_of(delete(new, whole)) == "LOG_DAMAGED"
        await new.stop()
