"""What a cluster's topics show of its sidecars, and which of these can be forgotten."""

from typing import Any

import pytest

from seqdedupe.errors import InvalidRequestError, NotFoundError, UnavailableError, error
from seqdedupe.log.pulsar.admin_url import AdminUrl, ConnectedProducer, PulsarAdmin, Subscription, TopicStats
from seqdedupe.log.pulsar.topic_owner import forget, not_owner, sidecars
from seqdedupe.log.pulsar.writer import RESERVED

NAMESPACES = ("a/b", "a/c")


def kept(name: str, address: str = "", entries: int = 0, size: int = 0, consumers: int = 0) -> Subscription:
    return Subscription(name, {"address": address} if address else {}, entries, size, consumers)


def writes(name: str, address: str | None) -> ConnectedProducer:
    return ConnectedProducer(name, {} if address is None else {"address": address})


class FakeAdmin(PulsarAdmin):
    """Topics by their local names, the first letter of which is that of their namespace."""

    def __init__(self, **topics: TopicStats) -> None:
        super().__init__(AdminUrl("http://127.0.0.1:1"))
        self.by_name = {f"persistent://a/{name[0]}/{name}": stats for name, stats in topics.items()}
        self.failing: set[str] = set()

    async def topics(self, namespace: str) -> list[str]:
        return [name for name in self.by_name if f"/{namespace}/" in name] + [f"persistent://{namespace}/gone"]

    async def stats(self, topic: str) -> TopicStats:
        if topic.endswith("/gone"):
            raise error("TOPIC_NOT_FOUND", "it was deleted meanwhile")
        if topic in self.failing:
            raise error("LOG_UNREADABLE", "nobody answers")
        return self.by_name[topic]

    async def delete_subscription(self, topic: str, name: str) -> None:
        if topic in self.failing:
            raise error("LOG_REFUSED", "nobody answers")
        stats = self.by_name[topic]
        left = tuple(each for each in stats.subscriptions if each.name != name)
        if left == stats.subscriptions:
            raise error("TOPIC_NOT_FOUND", "there is no such subscription")
        self.by_name[topic] = stats._replace(subscriptions=left)

    def subscribed(self, name: str) -> list[str]:
        every = ((topic, each.name) for topic, stats in self.by_name.items() for each in stats.subscriptions)
        return [topic for topic, subscription in every if subscription == name]


def cluster() -> FakeAdmin:
    """`one` owns a topic, `two-1` only follows, `three` is gone; somebody had deleted one of its subscriptions."""
    return FakeAdmin(
        b1=TopicStats(
            (writes("seqdedupe-one-7", "one:1"),),
            0,
            (
                kept("seqdedupe-one", "one:1", 5, 50),
                kept("seqdedupe-two-1", "two:1", 7, 70),
                kept("seqdedupe-three", "three:1", 1, 2),
                kept("a-job", "", 1000, 1000),
                kept("seqdedupe-job-1", "", 1000, 1000),
                kept("pulsar.dedup"),
            ),
        ),
        b2=TopicStats((writes("somebody", None),), 0, (kept("seqdedupe-one", "one:1", 1, 10),)),
        c1=TopicStats((writes("seqdedupe-somebody-1", None),), 0, (kept("seqdedupe-three", "", 3, 4),)),
    )


async def test_the_writer_of_native_entries_is_its_sidecar() -> None:
    there = TopicStats((writes(f"seqdedupe-one-{RESERVED}3", "one:1"),), 0)
    [one] = await sidecars(FakeAdmin(b1=there), NAMESPACES)
    assert (one.name, one.addresses, one.topics_owned) == ("one", {"one:1"}, 1)


async def nobody(_: str) -> str | None:
    return None


async def test_sidecars_are_seen_by_their_producers_and_subscriptions() -> None:
    found = await sidecars(cluster(), NAMESPACES)
    assert [
        (one.name, one.addresses, one.is_connected, one.topics_owned, one.subscribed, one.kept_entries, one.kept_bytes)
        for one in found
    ] == [
        ("one", {"one:1"}, True, 1, ["persistent://a/b/b1", "persistent://a/b/b2"], 6, 60),
        ("three", {"three:1"}, False, 0, ["persistent://a/b/b1", "persistent://a/c/c1"], 4, 6),
        ("two-1", {"two:1"}, False, 0, ["persistent://a/b/b1"], 7, 70),
    ]


async def test_two_sidecars_with_one_name_are_seen_by_their_addresses() -> None:
    admin = FakeAdmin(
        b1=TopicStats((writes("seqdedupe-one-0", "here:1"),), 0, (kept("seqdedupe-one", "here:1"),)),
        b2=TopicStats((writes("seqdedupe-one-1", "there:1"),), 0, (kept("seqdedupe-one", "here:1"),)),
    )
    [one] = await sidecars(admin, NAMESPACES)
    assert one.addresses == {"here:1", "there:1"}


async def test_a_list_that_is_not_whole_is_none() -> None:
    admin = cluster()
    admin.failing.add("persistent://a/b/b2")
    with pytest.raises(UnavailableError, match="LOG_UNREADABLE"):
        await sidecars(admin, NAMESPACES)


async def test_the_subscriptions_of_a_sidecar_that_is_gone_are_removed_and_no_others() -> None:
    admin = cluster()
    others = [name for name in ("seqdedupe-one", "seqdedupe-two-1", "a-job") for _ in admin.subscribed(name)]
    assert await forget(admin, NAMESPACES, "three", nobody) == ["persistent://a/b/b1", "persistent://a/c/c1"]
    assert admin.subscribed("seqdedupe-three") == []
    assert [name for name in ("seqdedupe-one", "seqdedupe-two-1", "a-job") for _ in admin.subscribed(name)] == others
    with pytest.raises(NotFoundError, match="SIDECAR_NOT_FOUND"):
        await forget(admin, NAMESPACES, "three", nobody)


@pytest.mark.parametrize("name", ["two", "two-", "", "job", "job-1", "somebody"])
async def test_who_is_no_sidecar_is_not_forgotten(name: str) -> None:
    admin = cluster()
    with pytest.raises(NotFoundError, match="SIDECAR_NOT_FOUND"):
        await forget(admin, NAMESPACES, name, nobody)


@pytest.mark.parametrize(
    ("name", "stats"),
    [
        ("three", TopicStats((writes("seqdedupe-three-0", "three:1"),), 0)),
        ("three", TopicStats((), 0, (kept("seqdedupe-three", consumers=1),))),
    ],
)
async def test_one_that_is_connected_anywhere_is_not_forgotten(name: str, stats: TopicStats) -> None:
    admin = cluster()
    admin.by_name["persistent://a/c/c2"] = stats
    with pytest.raises(InvalidRequestError, match="SIDECAR_ALIVE"):
        await forget(admin, NAMESPACES, name, nobody)
    assert len(admin.subscribed("seqdedupe-three")) >= 2


@pytest.mark.parametrize(("there", "is_alive"), [("three", True), ("its successor", False), (None, False)])
async def test_one_that_owns_nothing_is_asked_at_its_address(there: str | None, is_alive: bool) -> None:
    asked: list[str] = []

    async def name_at(address: str) -> str | None:
        asked.append(address)
        return there

    admin = cluster()
    if is_alive:
        with pytest.raises(InvalidRequestError, match="answers at three:1"):
            await forget(admin, NAMESPACES, "three", name_at)
    else:
        await forget(admin, NAMESPACES, "three", name_at)
    assert asked == ["three:1"]
    assert bool(admin.subscribed("seqdedupe-three")) is is_alive


async def test_what_could_not_be_removed_is_told_and_removed_by_the_next_call() -> None:
    admin = cluster()

    async def fails_later(_: str) -> None:
        admin.failing.add("persistent://a/b/b1")

    with pytest.raises(UnavailableError, match=r"1 of 2 .* not those on persistent://a/b/b1: nobody answers"):
        await forget(admin, NAMESPACES, "three", fails_later)
    assert admin.subscribed("seqdedupe-three") == ["persistent://a/b/b1"]
    admin.failing.clear()
    assert await forget(admin, NAMESPACES, "three", nobody) == ["persistent://a/b/b1"]


@pytest.mark.parametrize(("own_name", "is_told"), [("one", True), ("on", False), ("two", False)])
async def test_an_owner_with_the_same_instance_name_elsewhere_is_told_loudly(
    own_name: str, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    held: Any = error("NOT_OWNER", "another writer holds it")
    told = await not_owner(held, cluster(), "persistent://a/b/b1", "here:1", own_name, "")
    assert told.numbers == {"owner_address": "one:1"}
    assert ("instance name one" in told.message) is is_told
    assert ("instance name one" in caplog.text) is is_told
    own = await not_owner(held, cluster(), "persistent://a/b/b1", "one:1", own_name, "")
    assert "owner_address" not in own.numbers
    assert ("another process with the same name and address" in own.message) is is_told
