"""A topic on a real broker is deleted while other sidecars know it, follow it and would take it."""

from collections.abc import Container

import pytest

from seqdedupe.errors import UnavailableError
from seqdedupe.log.pulsar import content, policies, wholes
from seqdedupe.log.pulsar.admin_url import PulsarAdmin
from seqdedupe.topic import directory
from seqdedupe.topic.base import State
from seqdedupe.topic.policy import Policy
from tests.pulsar.members import MakeMember, Member
from tests.pulsar.owners import Cluster, until


@pytest.fixture
def name(namespace: str) -> str:
    return f"persistent://{namespace}/t"


async def owner_and_standby(member: MakeMember, name: str) -> tuple[Member, Member]:
    """One that has published a message into the topic, and one that has read it."""
    one, other = member(), member(is_standby=True)
    await one.start()
    await one.run(one.topics.create(name))
    await other.start()
    assert other.topics.get(name).state is State.STANDBY
    assert await one.publish(name, 1) == 0
    await until(lambda: other.topics.get(name).confirmed_index == 1)
    return one, other


async def test_whoever_follows_a_topic_lets_go_of_it_when_it_is_deleted(
    member: MakeMember, name: str, cluster: Cluster, namespace: str
) -> None:
    one, other = await owner_and_standby(member, name)
    await one.run(one.topics.delete(name))
    assert one.topics.registry.topic(name) is None
    await until(lambda: "is being deleted" in other.topics.get(name).why)
    assert await cluster.admin.topics(namespace) == [name], "the standby reads there"
    await other.look()
    assert other.topics.registry.topic(name) is None
    assert other.topics.registry.entry(name).closed is None

    async def is_gone() -> bool:
        return await cluster.admin.topics(namespace) == []

    await until(is_gone)
    await one.run(one.topics.create(name))
    assert await one.publish(name, 1) == 0, "nothing of the old one is there"
    await other.look()
    assert other.topics.get(name).state is State.STANDBY


async def test_who_comes_meanwhile_does_not_begin_to_use_it(member: MakeMember, name: str, cluster: Cluster) -> None:
    one, other = await owner_and_standby(member, name)
    await one.run(one.topics.delete(name))
    await other.kill()
    await other.start()
    new = member()
    await new.start()
    for each in (other, new):
        assert each.topics.registry.topic(name) is None
        assert each.topics.registry.entry(name).closed is None


async def test_who_owns_a_topic_that_somebody_else_deletes_lets_go_of_it(
    member: MakeMember, name: str, cluster: Cluster, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policies, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(policies, "is_going", lambda properties: False)
    one, other = member(), member()
    await one.start()
    await one.run(one.topics.create(name))
    await other.start()
    await other.run(other.topics.delete(name))
    # It has not seen it yet.
    await one.look()
    assert await one.publish(name, 1) == 0
    monkeypatch.setattr(policies, "is_going", wholes.is_going)
    await until(lambda: "is being deleted" in one.topics.get(name).why)
    await until(lambda: one.topics.get(name).state is State.STANDBY)
    await one.look()
    assert one.topics.registry.topic(name) is None

    async def is_gone() -> bool:
        return await cluster.admin.topics(namespace) == []

    await until(is_gone)


async def test_without_saying_so_the_standby_has_it(
    member: MakeMember, name: str, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control arm: Pulsar does not delete what somebody reads."""
    one, other = await owner_and_standby(member, name)
    monkeypatch.setattr(wholes, "is_going", lambda properties: False)
    monkeypatch.setattr("seqdedupe.log.pulsar.policies.is_going", lambda properties: False)
    await one.run(one.topics.delete(name))
    await until(lambda: other.topics.get(name).state is State.SERVING)
    await other.look()
    assert await other.publish(name, 2) == 1


async def make(one: Member, name: str, partitions: int) -> None:
    await one.run(
        directory.create_partitioned(one.topics, name, partitions, Policy()) if partitions else one.topics.create(name)
    )


async def delete(one: Member, name: str, partitions: int) -> None:
    await one.run(directory.delete_partitioned(one.topics, name) if partitions else one.topics.delete(name))


@pytest.mark.parametrize("partitions", [0, 2])
async def test_a_late_deletion_does_nothing_to_the_new_one(
    member: MakeMember, name: str, partitions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who finishes a deletion looks at all topics first, and meanwhile it is finished and the topic made again."""
    one, other = member(), member()
    await one.start()
    await make(one, name, partitions)
    old = [log.incarnation for log in await one.logs.list()]
    await other.start()
    # Its readers would hinder the deletion.
    for topic in other.topics.registry.open_topics():
        await topic.close("it has let go")
    look = other.logs._look

    async def look_long(without: Container[str] = ()) -> None:
        await look(without)
        monkeypatch.setattr(other.logs, "_look", look)
        await delete(one, name, partitions)
        await until(lambda: not one.topics.registry.names() and not one.store.topics())
        await make(one, name, partitions)

    monkeypatch.setattr(other.logs, "_look", look_long)
    await other.logs.delete(*old)
    new = await one.logs.list()
    assert len(new) == len(old)
    assert not {log.incarnation for log in new} & set(old)
    assert not any(log.is_going for log in new)


async def made_anew(one: Member, other: Member, name: str, partitions: int, cluster: Cluster, namespace: str) -> str:
    """A topic, or one of its partitions, that both know with two messages; one has deleted it and made it again with
    one message, and ended, while the other one did not look."""
    first = f"{name}-partition-0" if partitions else name

    async def is_gone() -> bool:
        return not [*await cluster.admin.topics(namespace), *await cluster.admin.partitioned_topics(namespace)]

    await one.start()
    await make(one, name, partitions)
    assert [await one.publish(first, sequence_id) for sequence_id in (0, 1)] == [0, 1]
    await other.start()
    assert other.topics.get(first).state is State.STANDBY
    assert other.topics.get(first).confirmed_index == 2
    await delete(one, name, partitions)
    await until(is_gone)
    await make(one, name, partitions)
    assert await one.publish(first, 0) == 0
    await one.kill()
    await cluster.until_nobody_writes(first)
    return first


@pytest.mark.parametrize("partitions", [0, 2])
async def test_who_did_not_look_meanwhile_follows_the_new_one(
    member: MakeMember,
    name: str,
    cluster: Cluster,
    namespace: str,
    partitions: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # So that the readers of who does not look do not hinder the deletion for long.
    monkeypatch.setattr(content, "IDLE_SECONDS", 0.1)
    one, other = member(), member()
    first = await made_anew(one, other, name, partitions, cluster, namespace)
    old = other.topics.get(first)
    with pytest.raises(UnavailableError, match="NOT_OWNER"):
        await other.run(old.owner.take())
    assert "created again" in old.why
    await other.look()
    new = await other.take(first)
    assert (new.confirmed_index, new.incarnation > old.incarnation) == (1, True)
    assert await other.publish(first, 1) == 1, "what the old one had is new"
    await one.start()
    assert one.topics.get(first).confirmed_index == 2


async def test_without_looking_at_the_incarnation_it_is_damaged(
    member: MakeMember, name: str, cluster: Cluster, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control arm: anyone who asks learns so for good."""
    monkeypatch.setattr(content, "IDLE_SECONDS", 0.1)

    async def stays(topic: str, incarnation: int, admin: PulsarAdmin) -> None:
        return

    monkeypatch.setattr("seqdedupe.log.pulsar.log.check_stays", stays)
    one, other = member(), member()
    await made_anew(one, other, name, 0, cluster, namespace)
    old = other.topics.get(name)
    with pytest.raises(UnavailableError):
        await other.run(old.owner.take())
    await until(lambda: old.state is State.DAMAGED)
