"""The reader against a real sidecar: every message once, in order, from where it was asked to."""

import asyncio
import shutil
from typing import Any

import pytest
from grpc.aio._call import UnaryStreamCall

from seqdedupe.client import (
    Client,
    InvalidRequestError,
    Message,
    MessageId,
    NotFoundError,
    Position,
    PositionError,
    ProducerConfig,
)
from seqdedupe.client import reader as reading
from seqdedupe.client.reader import Reader, Start
from seqdedupe.client.route import Sidecars
from seqdedupe.errors import SeqdedupeError
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from tests.client.helpers import until
from tests.client.proxy import Proxy


async def publish(sidecar: Sidecar, topic: str, count: int, size_bytes: int = 0, batch_rows: int = 10) -> None:
    config = ProducerConfig(max_batch_rows=batch_rows, linger_ms=1000)
    async with Client(sidecar.address) as client, client.producer(topic, "p", config) as producer:
        for _ in range(count):
            number = producer.last_sequence_id + 1
            await producer.send(b"%d" % number + b"." * size_bytes)


async def take(reader: Reader, count: int) -> list[Message]:
    return [await anext(reader) for _ in range(count)]


async def positions(sidecar: Sidecar, topic: str) -> list[Position]:
    async with Client(sidecar.address) as client, client.reader(topic) as reader:
        return [message.position async for message in reader]


def indexes(messages: list[Message]) -> list[int]:
    assert [m.payload for m in messages] == [b"%d" % m.index for m in messages]
    return [m.index for m in messages]


async def test_it_starts_where_it_is_told(shared_sidecar: Sidecar, topic: str) -> None:
    await publish(shared_sidecar, topic, 35)
    known = await positions(shared_sidecar, topic)
    starts: list[tuple[Start, int]] = [
        ("earliest", 0),
        (0, 0),
        (17, 17),
        (35, 35),
        (Position.start(known[0].incarnation), 0),
        (known[0], 1),
        (known[16], 17),
        (known[34], 35),
        (MessageId(known[0].incarnation, 16), 17),
        ("latest", 35),
    ]
    async with Client(shared_sidecar.address) as client:
        for start, first in starts:
            async with client.reader(topic, start) as reader:
                assert indexes([message async for message in reader]) == list(range(first, 35)), start
            async with client.reader(topic, start) as reader:
                stored = [batch async for batch in reader.batches()]
                assert sum(map(len, stored)) == 35 - first
                assert [batch.base_index for batch in stored][:1] == [first][: len(stored)]
            async with client.reader(topic, start, follow=True) as reader:
                assert indexes(await take(reader, 35 - first)) == list(range(first, 35))
                assert await anything_more(reader) is False


async def test_its_position_says_the_history(sidecar: Sidecar) -> None:
    """Each message's own, also in what is left of a batch and where it waits for the next one."""
    await publish(sidecar, "t", 25)
    await asyncio.to_thread(sidecar.restart)
    await publish(sidecar, "t", 25)
    known = await positions(sidecar, "t")
    ownerships = [position.ownership for position in known]
    assert 0 not in ownerships
    assert [ownerships.index(one) for one in ownerships] == [0] * 25 + [25] * 25
    async with Client(sidecar.address) as client:
        for row in (0, 3, 9, 24, 25, 49):
            async with client.reader("t") as reader:
                await take(reader, row + 1)
                assert reader.position == known[row]
                if reader.has_in_hand() and (rest := reader.rest_in_hand()):
                    assert [rest.position(i) for i in range(len(rest))] == known[row + 1 : row + 1 + len(rest)]
                    assert reader.position == known[row + len(rest)]
        async with client.reader("t", "latest", follow=True) as reader:
            assert await anything_more(reader) is False
            assert reader.position == known[-1]
        wrong = known[30]._replace(ownership=ownerships[0])
        async with client.reader("t", wrong) as reader:
            with pytest.raises(PositionError, match="POSITION_DIVERGED"):
                await anext(reader)


async def anything_more(reader: Reader) -> bool:
    """Whether something comes within a moment, once it is connected; the reader goes on afterwards."""
    fetching = asyncio.ensure_future(reader.fetch())
    await until(lambda: fetching.done() or reader._call is not None)
    await asyncio.wait({fetching}, timeout=0.02)
    if fetching.done():
        return fetching.result()
    fetching.cancel()
    await asyncio.wait({fetching})
    return False


async def test_following_goes_on_with_what_is_published(shared_sidecar: Sidecar, topic: str) -> None:
    await publish(shared_sidecar, topic, 5)
    async with (
        Client(shared_sidecar.address) as client,
        client.reader(topic, "latest", follow=True) as latest,
        client.reader(topic, follow=True) as all_of,
    ):
        assert await anything_more(latest) is False
        await publish(shared_sidecar, topic, 7)
        assert indexes(await take(latest, 7)) == list(range(5, 12))
        assert indexes(await take(all_of, 12)) == list(range(12))


async def test_latest_is_fixed_when_it_connects_not_when_it_connects_again(shared_sidecar: Sidecar, topic: str) -> None:
    await publish(shared_sidecar, topic, 5)
    async with Proxy(shared_sidecar.address) as proxy, Client(proxy.address) as client:
        reader = client.reader(topic, "latest", follow=True)
        assert await anything_more(reader) is False
        proxy.refuses = True
        proxy.cut()
        await publish(shared_sidecar, topic, 3)
        proxy.refuses = False
        assert indexes(await take(reader, 3)) == [5, 6, 7]
        await reader.close()


@pytest.mark.parametrize("is_noticed", [True, False], ids=["as it is", "control: nobody listens for it"])
async def test_a_way_that_is_silent_is_left(
    shared_sidecar: Sidecar, topic: str, monkeypatch: pytest.MonkeyPatch, is_noticed: bool
) -> None:
    """Long before gRPC's own pings find it; a proxy that speaks HTTP/2 would even answer those."""
    monkeypatch.setattr(reading, "KEEPALIVE_SECONDS", 1)
    if not is_noticed:
        monkeypatch.setattr(reading, "_MISSED", 1_000)
    await publish(shared_sidecar, topic, 1)
    async with (
        Proxy(shared_sidecar.address) as proxy,
        Client(proxy.address) as client,
        client.reader(topic, follow=True) as reader,
    ):
        assert indexes(await take(reader, 1)) == [0]
        reads = asyncio.ensure_future(take(reader, 1))
        # While it is only the topic that is silent, nobody leaves.
        passed = proxy.passed_answers
        await until(lambda: proxy.passed_answers > passed + 3)
        assert proxy.connections == 1
        proxy.stall()
        await publish(shared_sidecar, topic, 1)
        if is_noticed:
            await until(lambda: proxy.connections > 1)
        else:
            await asyncio.sleep(4)
            assert proxy.connections == 1
        proxy.go_on()
        assert indexes(await reads) == [1]


async def test_the_end_is_fixed_when_it_connects(shared_sidecar: Sidecar, topic: str) -> None:
    await publish(shared_sidecar, topic, 400)
    async with Proxy(shared_sidecar.address) as proxy, Client(proxy.address) as client, client.reader(topic) as reader:
        await take(reader, 1)
        await publish(shared_sidecar, topic, 5)
        proxy.cut()
        assert [message.index async for message in reader] == list(range(1, 400))
    async with Client(shared_sidecar.address) as client, client.reader(topic) as reader:
        assert [message.index async for message in reader] == list(range(405))


@pytest.mark.parametrize("restored", [True, False])
async def test_an_end_that_is_gone_is_not_waited_for(sidecar: Sidecar, restored: bool) -> None:
    """The control arm restarts with the data that it had, and reads up to the end."""
    copy = sidecar.folder / "copy"
    await publish(sidecar, "t", 2)
    await asyncio.to_thread(sidecar.kill)
    await asyncio.to_thread(shutil.copytree, sidecar.data, copy)
    await asyncio.to_thread(sidecar.start)
    await publish(sidecar, "t", 58, size_bytes=1_000_000, batch_rows=1)
    async with Client(sidecar.address) as client, client.reader("t") as reader, asyncio.timeout(LAST_RESORT_SECONDS):
        await take(reader, 1)
        await asyncio.to_thread(sidecar.kill)
        if restored:
            await asyncio.to_thread(shutil.rmtree, sidecar.data)
            await asyncio.to_thread(copy.rename, sidecar.data)
        await asyncio.to_thread(sidecar.start)
        if not restored:
            assert len(await take(reader, 59)) == 59
            with pytest.raises(StopAsyncIteration):
                await take(reader, 1)
            return
        with pytest.raises(PositionError) as raised:
            await take(reader, 60)
    assert raised.value.reason == "POSITION_AFTER_END"


async def test_it_stops_before_an_index_also_one_that_is_not_there_yet(shared_sidecar: Sidecar, topic: str) -> None:
    await publish(shared_sidecar, topic, 25)
    async with Client(shared_sidecar.address) as client:
        for start, stop in ((0, 25), (0, 24), (3, 4), (7, 7), (20, 25)):
            async with client.reader(topic, start, stop_index=stop) as reader:
                assert indexes([message async for message in reader]) == list(range(start, stop))
        async with client.reader(topic, 20, stop_index=31) as reader:
            assert indexes(await take(reader, 5)) == list(range(20, 25))
            await publish(shared_sidecar, topic, 10)
            assert indexes([message async for message in reader]) == list(range(25, 31))
        with pytest.raises(InvalidRequestError, match="follows"):
            client.reader(topic, follow=True, stop_index=3)
        with pytest.raises(InvalidRequestError, match="-1"):
            client.reader(topic, stop_index=-1)


async def test_ends_and_places_of_a_topic(shared_sidecar: Sidecar, topic: str) -> None:
    async with Client(shared_sidecar.address) as client:
        with pytest.raises(NotFoundError):
            await client.ends(topic)
        incarnation = (await client.admin.create_topic(topic)).incarnation
        assert await client.ends(topic) == (0, Position.start(incarnation))
        assert await client.locate_time(topic, 0) == (incarnation, 0)
        await publish(shared_sidecar, topic, 25, size_bytes=1000)
        last = (await positions(shared_sidecar, topic))[-1]
        assert last.ownership
        assert last == Position(incarnation, MessageId(incarnation, 24), 24, last.ownership)
        assert await client.ends(topic) == (0, last)
        assert await client.locate_time(topic, 0) == (incarnation, 0)
        assert await client.locate_time(topic, 2**60) == (incarnation, 25)
        near = await client.locate_bytes(topic, 10, 1)
        assert near.incarnation == incarnation
        assert 10 < near.index <= 20
        assert await client.locate_bytes(topic, 0, 1_000_000) == (incarnation, 25)
        with pytest.raises(PositionError):
            await client.locate_bytes(topic, 26, 1)
        places = await positions(shared_sidecar, topic)
        assert [await client.position_at(topic, index) for index in (0, 13, 24)] == [places[0], places[13], last]
        for beyond in (25, 26):
            with pytest.raises(PositionError):
                await client.position_at(topic, beyond)


async def test_numbers_that_no_topic_has_are_refused_as_any_that_one_lacks(shared_sidecar: Sidecar, topic: str) -> None:
    await publish(shared_sidecar, topic, 3)
    async with Client(shared_sidecar.address) as client:
        for last in (2**63 - 2, 2**63 - 1):
            for refused in (client.position_at(topic, last), client.locate_bytes(topic, last, 1)):
                with pytest.raises(PositionError):
                    await refused
            with pytest.raises(PositionError):
                await client.reader(topic, last).next_batch()
        for none in (-1, 2**63, 2**200):
            for refused in (client.position_at(topic, none), client.locate_bytes(topic, none, 1)):
                with pytest.raises(InvalidRequestError, match=f"{none} is not an index"):
                    await refused
            with pytest.raises(InvalidRequestError, match=f"{none} is not an index"):
                client.reader(topic, none)
            with pytest.raises(InvalidRequestError, match=f"{none} is not an index"):
                client.reader(topic, stop_index=none)
        async with client.reader(topic, 2, stop_index=2**63 - 1) as reader:
            assert indexes(await take(reader, 1)) == [2]
        for much in (2**63 - 1, 2**63, 2**200):
            assert (await client.locate_bytes(topic, 0, much)).index == 3
            assert (await client.locate_time(topic, much)).index == 3
            assert (await client.locate_time(topic, -much)).index == 0


async def test_a_batch_in_hand_is_not_in_the_position_before_a_message_of_it_was_handed_out(
    shared_sidecar: Sidecar, topic: str
) -> None:
    """Who stores the position when a call was interrupted would lose the batch."""
    await publish(shared_sidecar, topic, 20)  # in batches of 10
    places = await positions(shared_sidecar, topic)
    async with Client(shared_sidecar.address) as client, client.reader(topic) as reader:
        assert await reader.fetch()
        before = reader.position
        assert before is None
        await take(reader, 10)
        assert await reader.fetch()
        assert reader.position == places[9]
        await take(reader, 1)
        assert reader.position == places[10]
    async with Client(shared_sidecar.address) as client, client.reader(topic, places[4]) as reader:
        assert await reader.fetch()
        assert reader.position == places[4]
        assert await reader.next_batch()
        assert reader.position == places[9]


async def test_messages_and_batches_of_one_reader_go_together(shared_sidecar: Sidecar, topic: str) -> None:
    await publish(shared_sidecar, topic, 21)  # in batches of 10, 10 and 1
    async with Client(shared_sidecar.address) as client, client.reader(topic) as reader:
        before = reader.position
        assert before is None
        assert indexes(await take(reader, 4)) == [0, 1, 2, 3]
        assert reader.position is not None
        assert reader.position.index == 3
        rest = await reader.next_batch()
        assert rest is not None
        assert (rest.base_index, len(rest), rest.batch.payloads[0]) == (4, 6, b"4")
        assert reader.position.index == 9
        whole = await reader.next_batch()
        assert whole is not None
        assert (whole.base_index, len(whole)) == (10, 10)
        assert reader.position == whole.position(9)
        assert indexes(await take(reader, 1)) == [20]
        assert await reader.next_batch() is None
        assert reader.position.index == 20


async def test_an_empty_topic_has_nothing_to_read(shared_sidecar: Sidecar, topic: str) -> None:
    async with Client(shared_sidecar.address) as client:
        with pytest.raises(NotFoundError):
            await anext(client.reader(topic))
        await client.admin.create_topic(topic)
        starts: list[Start] = ["earliest", "latest", 0]
        for start in starts:
            async with client.reader(topic, start) as reader:
                assert [message async for message in reader] == []


@pytest.mark.parametrize("start", [MessageId(1, 2, 0), MessageId(1, -1), MessageId(-1, 2)])
def test_a_message_id_that_is_not_of_the_embedded_log_is_no_position(start: MessageId) -> None:
    with pytest.raises(SeqdedupeError, match="is not the ID of a message of the embedded log") as caught:
        Reader(Sidecars.parse("127.0.0.1:1"), "t", start)
    assert caught.value.reason == "INVALID_POSITION"


@pytest.mark.parametrize("follow", [False, True])
async def test_positions_that_cannot_be_read_on_from(shared_sidecar: Sidecar, topic: str, follow: bool) -> None:
    await publish(shared_sidecar, topic, 3)
    last = (await positions(shared_sidecar, topic))[-1]
    id_after_the_end = MessageId(last.incarnation, 3)
    another, after_end = "POSITION_OF_ANOTHER_INCARNATION", "POSITION_AFTER_END"
    starts: list[tuple[Start, str]] = [
        (Position(last.incarnation + 1, None, -1), another),
        (Position(last.incarnation + 1, MessageId(last.incarnation + 1, 1), 1), another),
        (MessageId(last.incarnation - 1, 1), another),
        (Position(last.incarnation, id_after_the_end, 3), after_end),
        (id_after_the_end, after_end),
        (4, after_end),
    ]
    async with Client(shared_sidecar.address) as client:
        for start, reason in starts:
            async with client.reader(topic, start, follow=follow) as reader:
                with pytest.raises(PositionError) as caught:
                    await anext(reader)
                assert caught.value.reason == reason, start
        for bad in (-1, "newest"):
            with pytest.raises(InvalidRequestError):
                client.reader(topic, bad)  # type: ignore[arg-type]


async def test_a_topic_made_anew_ends_a_reader(shared_sidecar: Sidecar, topic: str) -> None:
    await publish(shared_sidecar, topic, 3)
    async with Client(shared_sidecar.address) as client, client.reader(topic, follow=True) as reader:
        await take(reader, 2)
        await client.admin.delete_topic(topic)
        await client.admin.create_topic(topic)
        await publish(shared_sidecar, topic, 5)
        await take(reader, 1)  # it had that one already
        with pytest.raises((PositionError, NotFoundError)):
            await anext(reader)


async def test_cut_connections_skip_and_double_nothing(shared_sidecar: Sidecar, topic: str) -> None:
    await publish(shared_sidecar, topic, 20000, size_bytes=1000, batch_rows=100)
    async with Proxy(shared_sidecar.address) as proxy, Client(proxy.address) as client, client.reader(topic) as reader:
        seen = []
        async for message in reader:
            seen.append(message.index)
            if len(seen) % 4000 == 0:
                proxy.cut()
        assert seen == list(range(20000))
        assert proxy.connections > 1


async def test_a_reader_lives_through_kill_9(sidecar: Sidecar) -> None:
    async with (
        Client(sidecar.address) as client,
        client.producer("t", "p") as producer,
        client.reader("t", follow=True) as reader,
    ):
        read: list[int] = []
        for kill in range(3):
            for _ in range(200):
                await producer.send(b"")
            if kill:
                restarting = asyncio.create_task(asyncio.to_thread(sidecar.restart))
                read += [m.sequence_id for m in await take(reader, 200)]
                await restarting
        await producer.flush()
        read += [m.sequence_id for m in await take(reader, 200)]
        assert await anything_more(reader) is False
        assert read == list(range(600))


async def test_a_slow_reader_holds_up_nobody(shared_sidecar: Sidecar, topic: str) -> None:
    await publish(shared_sidecar, topic, 100, size_bytes=10_000)
    async with Client(shared_sidecar.address) as client, client.reader(topic, follow=True) as slow:
        assert (await anext(slow)).index == 0
        async with asyncio.timeout(LAST_RESORT_SECONDS):
            await publish(shared_sidecar, topic, 1900, size_bytes=10_000)
            async with client.reader(topic) as quick:
                assert [m.index async for m in quick] == list(range(2000))
        assert [m.index for m in await take(slow, 1999)] == list(range(1, 2000))


async def test_a_cancelled_wait_loses_nothing(shared_sidecar: Sidecar, topic: str) -> None:
    await publish(shared_sidecar, topic, 1)
    async with Client(shared_sidecar.address) as client, client.reader(topic, follow=True) as reader:
        seen = indexes(await take(reader, 1))
        for _ in range(5):
            waiting = asyncio.create_task(anext(reader))
            await asyncio.sleep(0.01)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await publish(shared_sidecar, topic, 2)
            seen += indexes(await take(reader, 2))
        assert seen == list(range(11))


async def test_closing_ends_a_wait(shared_sidecar: Sidecar, topic: str) -> None:
    await publish(shared_sidecar, topic, 1)
    async with Client(shared_sidecar.address) as client:
        reader = client.reader(topic, follow=True)

        async def count() -> int:
            return len([message async for message in reader])

        counting = asyncio.create_task(count())
        await until(lambda: reader.position is not None)
        await reader.close()
        assert await asyncio.wait_for(counting, LAST_RESORT_SECONDS) == 1


@pytest.mark.parametrize("step", ["looked at the ends", "has begun to answer"])
async def test_a_reader_that_is_closed_while_it_connects_ends(
    shared_sidecar: Sidecar, topic: str, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Client(shared_sidecar.address) as client:
        await client.admin.create_topic(topic)
        reader = client.reader(topic, "latest", follow=True)
        owner: Any = Reader if step == "looked at the ends" else UnaryStreamCall
        name = "_look_at_the_ends" if step == "looked at the ends" else "initial_metadata"
        real = getattr(owner, name)
        closing: list[asyncio.Task[None]] = []

        async def closed_then(*arguments: Any) -> Any:
            found = await real(*arguments)
            closing.append(asyncio.create_task(reader.close()))
            await until(lambda: reader._closed)
            return found

        monkeypatch.setattr(owner, name, closed_then)
        assert await reader.fetch() is False
        await closing[0]
