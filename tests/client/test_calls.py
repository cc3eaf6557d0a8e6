"""The calls that are neither publish nor read streams, with several sidecars: to whom they go, and how often."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from seqdedupe.cli.commands import cli
from seqdedupe.client import (
    Client,
    DataLossError,
    InvalidRequestError,
    NotFoundError,
    OutcomeUnknownError,
    UnavailableError,
    blocking,
    route,
)
from seqdedupe.client.cursor import Kept
from seqdedupe.command import run_command
from seqdedupe.message_id import Position
from seqdedupe.names import topic_name
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from seqdedupe.v1 import admin_pb2, publish_pb2
from seqdedupe_spark.range_reader import read_stored
from seqdedupe_spark.ranges import TopicRange
from tests.client.fake_sidecar import FakeSidecar, Refused, fake_sidecar
from tests.client.fronts import Front, addresses, fronts, in_order, move
from tests.client.helpers import read_all, until
from tests.client.proxy import Proxy

BROKE = Refused(grpc.StatusCode.UNAVAILABLE)
"""As when a connection breaks within a call: nobody knows whether it was carried out."""

SOMETHING = admin_pb2.GetTopicResponse(topic=admin_pb2.Topic(name=topic_name("t"))).SerializeToString()
"""An answer that is not empty, as those to most calls never are: `GetTopic`'s, and good enough for others."""


@pytest.fixture
async def three(shared_sidecar: Sidecar, topic: str) -> AsyncIterator[list[Front]]:
    """Three sidecars over one log; the last one in the topic's order owns it, and the others name it."""
    async with fronts(shared_sidecar.address) as some, Client(shared_sidecar.address) as client:
        await client.admin.create_topic(topic)
        async with client.producer(topic, "p") as producer:
            for _ in range(10):
                await producer.send(b"x")
        some = in_order(some, topic)
        move(some, some[-1])
        yield some


@pytest.fixture
async def fakes() -> AsyncIterator[list[FakeSidecar]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(fake_sidecar()) for _ in range(2)]


def refuse(e: Refused) -> Callable[[str], bytes]:
    def on_unary(_: str) -> bytes:
        raise e

    return on_unary


async def test_what_a_request_cannot_say_is_refused_here(shared_sidecar: Sidecar, topic: str) -> None:
    no_text, too_much = "caf\udce9", 2**63
    async with Client(shared_sidecar.address) as client:
        admin = client.admin
        for refused in (
            admin.create_topic(topic, partitions=too_much),
            admin.create_topic(topic, entry_format="wide"),
            admin.create_topic(topic, entry_format="packed"),
            admin.create_topic(topic, schema='{"type": "STRING"}'),
            admin.producer(topic, no_text),
            admin.message_state(topic, no_text, 0),
            admin.message_state(topic, "p", too_much),
            admin.in_flight(topic, longer_than_ms=too_much),
            admin.reset_producer(topic, "p", too_much),
            admin.remove_policy(topic, no_text),
            admin.remove_policy("public/default", no_text),
            admin.forget_sidecar(no_text),
            admin.move_topic(topic, no_text),
        ):
            with pytest.raises(InvalidRequestError):
                await refused
        with pytest.raises(NotFoundError):
            await admin.topic(topic)


async def test_a_sidecar_that_is_back_is_reached_at_once(shared_sidecar: Sidecar, topic: str) -> None:
    """gRPC would say for a while that it was refused; and where nothing listens that is said at once."""
    async with Proxy(shared_sidecar.address) as proxy:
        address = proxy.address
    async with Client(address) as client:
        for _ in range(20):
            with pytest.raises(UnavailableError, match="refused"):
                await client.admin.version()
        async with Proxy(shared_sidecar.address, int(address.rpartition(":")[2])):
            await client.admin.version()


async def test_calls_of_a_topic_go_to_its_owner(three: list[Front], topic: str, tmp_path: Path) -> None:
    async with Client(addresses(three)) as client:
        admin = client.admin
        assert (await client.ends(topic)).last.index == 9
        assert (await client.position_at(topic, 3)).index == 3
        assert (await client.locate_time(topic, 0)).index == 0
        assert [producer.name for producer in await admin.producers(topic)] == ["p"]
        policy = admin_pb2.TopicPolicy(deduplication_snapshot_interval_seconds=77)
        assert (await admin.set_policy(topic, policy)).set == policy
        assert (await admin.policy(topic)).set == policy
        assert await admin.export_watermarks(topic, tmp_path / "watermarks") == 1
        assert (await admin.export_snapshot(topic, tmp_path / "snapshot")).producers == 1
        await admin.import_snapshot(topic, tmp_path / "snapshot")
        assert (await admin.reset_producer(topic, "p", 4)).persisted_before == 9
        calls = [front.calls for front in three]
        # The first call was sent on; it is known from then on where the topic is.
        assert [len(some) for some in calls[:2]] == [1, 0]
        move(three, three[1])
        assert (await admin.producer(topic, "p")).persisted == 4
        await admin.delete_topic(topic)
        # What stands between passes no trailing metadata on, so an empty answer is asked about.
        assert three[1].calls == ["GetProducer", "DeleteTopic", "GetVersion"]


async def test_a_topic_that_moves_is_waited_for(three: list[Front], topic: str) -> None:
    move(three, None)
    async with Client(addresses(three)) as client:
        ends = asyncio.create_task(client.ends(topic))
        await until(lambda: sum(front.calls.count("GetLastMessageId") for front in three) > 6)
        assert not ends.done()
        move(three, three[0])
        assert (await ends).last.index == 9


async def test_one_address_says_at_once_who_owns_the_topic(three: list[Front], topic: str) -> None:
    """As ever: to go there is for anyone who knows more than one."""
    async with Client(three[0].address) as client:
        with pytest.raises(UnavailableError) as caught:
            await client.admin.topic(topic)
    assert (caught.value.reason, caught.value.numbers["owner_address"]) == ("NOT_OWNER", three[-1].address)
    assert three[0].calls == ["GetTopic"]
    assert not three[-1].calls


async def test_a_change_whose_answer_is_lost_has_an_unknown_outcome(shared_sidecar: Sidecar, topic: str) -> None:
    async with (
        Client(shared_sidecar.address) as direct,
        Proxy(shared_sidecar.address) as proxy,
        Client(proxy.address) as client,
    ):
        async with direct.producer(topic, "p") as producer:
            await producer.send_batch([b""] * 5)
        new = f"{topic}-new"
        policy = admin_pb2.TopicPolicy(deduplication_snapshot_interval_seconds=77)
        position = await direct.position_at(topic, 3)

        async def is_there(name: str) -> bool:
            return topic_name(name) in [one.name for one in await direct.admin.topics()]

        async def is_made() -> bool:
            return await is_there(new)

        async def is_set() -> bool:
            return (await direct.admin.policy(topic)).set == policy

        async def is_reset() -> bool:
            return (await direct.admin.producer(topic, "p")).persisted == 1

        async def is_moved() -> bool:
            return await direct.cursor(topic, "c").read() is not None

        async def is_gone() -> bool:
            return not await is_there(topic)

        for change, is_in_force in (
            (lambda: client.admin.create_topic(new), is_made),
            (lambda: client.admin.set_policy(topic, policy), is_set),
            (lambda: client.admin.reset_producer(topic, "p", 1), is_reset),
            (lambda: client.cursor(topic, "c").compare_and_set(None, Kept(position)), is_moved),
            (lambda: client.admin.delete_topic(topic), is_gone),
        ):
            await client.admin.version()
            proxy.swallows_answers = True
            changing = asyncio.ensure_future(change())
            async with asyncio.timeout(LAST_RESORT_SECONDS):
                while not await is_in_force():  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            proxy.swallows_answers = False
            proxy.cut()
            with pytest.raises(OutcomeUnknownError, match=r"may be in force: .* broke off") as caught:
                await changing
            assert "Look whether the change is in force" in caught.value.hint
        # The control arm: what was certainly not sent has changed nothing.
        address = proxy.address
    async with Client(address) as client:
        with pytest.raises(UnavailableError) as refused:
            await client.admin.create_topic(new)
        assert refused.value.reason == "UNREACHABLE"


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNIMPLEMENTED])
async def test_what_changes_something_is_not_done_twice(fakes: list[FakeSidecar], code: grpc.StatusCode) -> None:
    """The connection breaks when the first sidecar has it, or something on the way answers. What only looks is asked of
    the second one."""
    first, second = fakes
    asked: list[str] = []
    first.on_unary = refuse(Refused(code))

    def answer(method: str) -> bytes:
        asked.append(method.rpartition("/")[2])
        return SOMETHING

    second.on_unary = answer
    async with Client(f"{first.address},{second.address}") as client:
        client._calls._found_at["persistent://public/default/t"] = client._sidecars.addresses[0]
        for change in (
            lambda: client.admin.create_topic("t"),
            lambda: client.admin.delete_topic("t"),
            lambda: client.admin.reset_producer("t", "p", 3),
            lambda: client.admin.snapshot("t"),
            lambda: client.admin.set_policy("public/default", admin_pb2.TopicPolicy()),
        ):
            with pytest.raises(UnavailableError) as caught:
                await change()
            assert caught.value.reason == "OUTCOME_UNKNOWN"
        assert not asked
        await client.admin.topic("t")
        await client.admin.version()
    assert asked == ["GetTopic", "GetVersion"]


async def test_a_look_goes_on_where_a_topic_does_not_recover(
    fakes: list[FakeSidecar], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not at once: only after it was repeated there for a while."""
    first, second = fakes
    recovering = Refused(grpc.StatusCode.UNAVAILABLE, "RECOVERING", 10)
    asked: list[FakeSidecar] = []

    def recovers(_: str) -> bytes:
        asked.append(first)
        if len(asked) == 3:
            monkeypatch.setattr(route, "LONGEST_REFUSAL_SECONDS", 0)
        raise recovering

    first.on_unary = recovers
    second.on_unary = lambda _: SOMETHING
    async with Client(f"{first.address},{second.address}") as client:
        client._calls._found_at["persistent://public/default/t"] = client._sidecars.addresses[0]
        await client.admin.topic("t")
    assert len(asked) == 3


async def test_what_certainly_was_not_sent_is_sent_to_the_next(fakes: list[FakeSidecar]) -> None:
    """The control arm of the test before: the first one is not there."""
    second = fakes[1]
    second.on_unary = lambda _: SOMETHING
    async with Client(f"127.0.0.1:1,{second.address}") as client:
        client._calls._found_at["persistent://public/default/t"] = client._sidecars.addresses[0]
        await client.admin.reset_producer("t", "p", 3)
        await client.admin.set_policy("public/default", admin_pb2.TopicPolicy())


async def test_a_listing_is_of_one_sidecar_and_whole(fakes: list[FakeSidecar]) -> None:
    """The first one breaks off between two pages: what it has listed counts for nothing."""
    first, second = fakes
    pages = iter([admin_pb2.ListTopicsResponse(topics=[admin_pb2.Topic(name="only here")], next="more")])

    def breaks_off(_: str) -> bytes:
        if (page := next(pages, None)) is None:
            raise BROKE
        return page.SerializeToString()

    first.on_unary = breaks_off
    whole = admin_pb2.ListTopicsResponse(topics=[admin_pb2.Topic(name=name) for name in ("a", "b")])
    second.on_unary = lambda _: whole.SerializeToString()
    async with Client(f"{first.address},{second.address}") as client:
        assert [topic.name for topic in await client.admin.topics()] == ["a", "b"]
        second.on_unary = refuse(BROKE)
        with pytest.raises(UnavailableError):
            await client.admin.topics()


@pytest.mark.parametrize("is_known", [True, False])
async def test_a_topic_that_one_sidecar_does_not_know_may_be_known_to_another(
    fakes: list[FakeSidecar], is_known: bool
) -> None:
    """A producer, one that resumes among them, a reader and a call."""
    by_address = {fake.address: fake for fake in fakes}
    first, second = (by_address[address] for address in route.in_order(topic_name("t"), by_address))
    unknown = Refused(grpc.StatusCode.NOT_FOUND, "TOPIC_NOT_FOUND")

    def not_found(_: Any) -> Any:
        raise unknown

    first.on_open = first.on_read = first.on_unary = not_found
    second.on_unary = lambda _: SOMETHING
    if not is_known:
        second.on_open = second.on_read = second.on_unary = not_found
    breaks = iter([True])

    def on_frame(frame: publish_pb2.Frame) -> list[Any]:
        if next(breaks, False):
            raise BROKE
        return [second.stored(frame)]

    second.on_frame = on_frame
    async with Client([fake.address for fake in fakes]) as client:
        if not is_known:
            for act in (client.admin.topic("t"), client.producer("t", "p").open(), anext(client.reader("t", 0))):
                with pytest.raises(NotFoundError):
                    await act
            return
        await client.admin.topic("t")
        async with client.producer("t", "p") as producer:
            assert (await (await producer.send(b""))).index == 0
        assert [list(request.epochs) for request in second.opens] == [[], [100]]
        assert len(first.opens) == 2


@pytest.mark.parametrize("terms", [(7, 8), (7, 5), (5, 5)])
async def test_a_lower_term_is_believed_only_of_all(fakes: list[FakeSidecar], terms: tuple[int, int]) -> None:
    """A producer has seen term 6. One that answers a lower one is not the owner; where all do, something is lost."""
    began = asyncio.Event()
    asked: list[int] = []

    def breaks(_: publish_pb2.Frame) -> list[Any]:
        for number, (fake, term) in enumerate(zip(fakes, terms, strict=True)):
            fake.on_open = lambda _, fake=fake, term=term, number=number: opened(fake, term, number)  # type: ignore[misc]
            fake.on_frame = lambda frame, fake=fake: [fake.stored(frame)]  # type: ignore[misc]
        began.set()
        raise BROKE

    def opened(fake: FakeSidecar, term: int, number: int) -> publish_pb2.OpenResponse:
        asked.append(number)
        fake.term = term
        return fake.opened(term=term)

    for fake in fakes:
        fake.term = 6
        fake.on_frame = breaks
    async with Client([fake.address for fake in fakes]) as client:
        producer = client.producer("t", "p")
        await producer.open()
        receipt = await producer.send(b"")
        if max(terms) > 6:
            assert (await receipt).index == 0
            await producer.close()
        else:
            with pytest.raises(DataLossError, match="term 5 "):
                await receipt
            assert set(asked) == {0, 1}
            await producer.abort()


async def test_commands_and_spark_take_the_list(
    three: list[Front],
    shared_sidecar: Sidecar,
    topic: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SEQDEDUPE_ADDRESS", addresses(three))
    (tmp_path / "more.txt").write_bytes(b"y\nz\n")

    def run(*arguments: str) -> str:
        assert run_command(cli, "seqdedupe", arguments=arguments) == 0
        return capsys.readouterr().out

    publish = ("publish", str(tmp_path / "more.txt"), "--topic", topic, "--producer", "file")
    assert "2 NotDup" in await asyncio.to_thread(run, *publish)
    assert "file" in await asyncio.to_thread(run, "producers", topic)
    assert topic in await asyncio.to_thread(run, "topics")
    assert f"one of {addresses(three)}" in await asyncio.to_thread(run, "version")
    assert await asyncio.to_thread(run, "reset-producer", topic, "file", "0")
    move(three, three[1])
    assert (await asyncio.to_thread(run, "read", topic, "--address", addresses(three))).count("x") >= 10
    ends = await asyncio.to_thread(lambda: blocking.Client(addresses(three)).ends(topic))
    whole = TopicRange(topic, Position.before(ends.last.incarnation, 0), ends.last)
    stored = await asyncio.to_thread(lambda: list(read_stored(addresses(three), whole)))
    assert sum(map(len, stored)) == len(await read_all(shared_sidecar, topic)) == 12
