"""A topic on a real broker is deleted while other sidecars know it, follow it and would take it."""

import pytest

from pulsar_broker.standalone import START_TIMEOUT_SECONDS
from seqdedupe.errors import SeqdedupeError
from seqdedupe.log.pulsar import wholes
from seqdedupe.topic.state import State
from tests.pulsar.members import MakeMember, Member
from tests.pulsar.owners import Cluster, until

pytestmark = pytest.mark.timeout(START_TIMEOUT_SECONDS * 4)


@pytest.fixture
def name(namespace: str) -> str:
    return f"persistent://{namespace}/t"


async def owner_and_standby(member: MakeMember, name: str) -> tuple[Member, Member]:
    """One that has published a message into the topic, and one that has read it."""
    one, other = member(), member(is_standby=True)
    await one.start()
    await one.run(one.topics.create(name))
    await other.start()
    assert other.topics.live[name].state is State.STANDBY
    assert await one.publish(name, 1) == 0
    await until(lambda: other.topics.live[name].confirmed_index == 1)
    return one, other


async def test_whoever_follows_a_topic_lets_go_of_it_when_it_is_deleted(
    member: MakeMember, name: str, cluster: Cluster, namespace: str
) -> None:
    one, other = await owner_and_standby(member, name)
    await one.run(one.topics.delete(name))
    assert name not in one.topics.live
    await until(lambda: "is being deleted" in other.topics.live[name].why)
    assert await cluster.admin.topics(namespace) == [name], "the standby reads there"
    with pytest.raises(SeqdedupeError, match="is being deleted"):
        await one.run(one.topics.create(name))
    await other.look()
    assert name not in other.topics.live
    assert name not in other.topics.closed

    async def is_gone() -> bool:
        return await cluster.admin.topics(namespace) == []

    await until(is_gone)
    await one.run(one.topics.create(name))
    assert await one.publish(name, 1) == 0, "nothing of the old one is there"
    await other.look()
    assert other.topics.live[name].state is State.STANDBY


async def test_who_comes_meanwhile_does_not_begin_to_use_it(member: MakeMember, name: str, cluster: Cluster) -> None:
    one, other = await owner_and_standby(member, name)
    await one.run(one.topics.delete(name))
    await other.kill()
    await other.start()
    new = member()
    await new.start()
    for each in (other, new):
        assert name not in each.topics.live
        assert name not in each.topics.closed


async def test_without_saying_so_the_standby_has_it(
    member: MakeMember, name: str, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control arm: Pulsar does not delete what somebody reads."""
    one, other = await owner_and_standby(member, name)
    monkeypatch.setattr(wholes, "is_going", lambda properties: False)
    monkeypatch.setattr("seqdedupe.log.pulsar.guarding.is_going", lambda properties: False)
    await one.run(one.topics.delete(name))
    await until(lambda: other.topics.live[name].state is State.SERVING)
    await other.look()
    assert await other.publish(name, 2) == 1
