"""The exclusive producer on a real broker: what it confirms stands there once, in order, and nobody else's between."""

import asyncio
from collections.abc import AsyncIterator

import pulsar
import pulsar.asyncio
import pytest

from pulsar_broker.standalone import Broker
from seqdedupe.errors import SeqdedupeError
from seqdedupe.log.pulsar import writer as writers
from seqdedupe.log.pulsar.broker_wire import MAX_SINGLE_OUTSTANDING
from seqdedupe.log.pulsar.entries import EntryFormat, PulsarMessage
from seqdedupe.log.pulsar.writer import PRODUCER_NAMES, open_writer
from tests.pulsar.line import Line
from tests.pulsar.owners import Cluster, Owner, until


def numbered(first: int, entries: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, first + entries)]


def append(writer: writers.EntryWriter, payloads: list[bytes]) -> None:
    writer.append([PulsarMessage(payload, {}) for payload in payloads])


@pytest.fixture
async def line(broker: Broker) -> AsyncIterator[Line]:
    async with Line(broker) as line:
        yield line


async def test_what_is_confirmed_stands_there_in_order(cluster: Cluster, topic: str) -> None:
    await cluster.create(topic)
    async with Owner(cluster.service_url, topic) as owner:
        writer = await owner.open()
        # More than may be in flight.
        payloads = numbered(0, MAX_SINGLE_OUTSTANDING + 2000)
        append(writer, payloads)
        await owner.until_confirmed(1 + len(payloads))
        await writer.close()
        stored = await cluster.read(topic)
        assert [entry.payload for entry in stored] == [b"marker", *payloads]
        assert [entry.message_id for entry in stored] == owner.confirmed
        assert {entry.opening for entry in stored} == {owner.opening}


async def test_a_message_is_as_a_stock_consumer_expects_it(cluster: Cluster, topic: str) -> None:
    await cluster.create(topic)
    client = pulsar.Client(cluster.service_url)
    async with Owner(cluster.service_url, topic) as owner:
        writer = await owner.open()
        writer.append([PulsarMessage(None, {"a": "b", "ü": "ö"}, "käy", 1_700_000_000_123), PulsarMessage(b"", {})])
        await owner.until_confirmed(3)
        await writer.close()
    reader = await asyncio.to_thread(client.create_reader, topic, pulsar.MessageId.earliest)
    marker, null, empty = [await asyncio.to_thread(reader.read_next, 30_000) for _ in range(3)]
    client.close()
    assert marker.producer_name() == "seqdedupe-one-0"
    assert (null.properties(), null.partition_key(), null.event_timestamp()) == (
        {"a": "b", "ü": "ö"},
        "käy",
        1_700_000_000_123,
    )
    assert (null.has_null_value(), empty.has_null_value(), empty.data()) == (True, False, b"")


async def test_another_writer_is_refused_and_disturbs_nobody(cluster: Cluster, topic: str) -> None:
    await cluster.create(topic)
    async with Owner(cluster.service_url, topic) as owner, Owner(cluster.service_url, topic, "two") as other:
        writer = await owner.open()
        same_name = Owner(cluster.service_url, topic)
        for second in (other, same_name):
            with pytest.raises(SeqdedupeError, match="NOT_OWNER"):
                await second.open()
        await same_name.client.close()
        append(writer, numbered(0, 10))
        await owner.until_confirmed(11)
        assert (await cluster.admin.stats(topic)).publishers[0].metadata == {"address": "one"}
        await writer.close()


async def test_a_stock_producer_keeps_the_topic(cluster: Cluster, topic: str) -> None:
    await cluster.create(topic)
    async with Owner(cluster.service_url, topic) as owner:
        stock = await owner.client.create_producer(topic)
        with pytest.raises(SeqdedupeError, match="NOT_OWNER"):
            await owner.open()
        await stock.close()
        await (await owner.open()).close()


async def test_sequence_ids_rise_over_openings_of_a_name(cluster: Cluster, topic: str) -> None:
    await cluster.create(topic)
    async with Owner(cluster.service_url, topic) as owner:
        openings = []
        for name_number in (0, PRODUCER_NAMES - 1, PRODUCER_NAMES):
            writer = await owner.open(name_number)
            assert writer.name_number == name_number % PRODUCER_NAMES
            openings.append(writer.opening)
            await writer.close()
        assert owner.known == [0, 0, openings[0]], "it does not ask what Pulsar knows of the name"
        # An opening number that was used before is stored all the same, if only it is above that.
        assert [entry.opening for entry in await cluster.read(topic)] == openings


@pytest.mark.parametrize("deduplicates", [True, False])
@pytest.mark.parametrize("fault", ["cut", "unload", "thrown out"])
async def test_what_has_no_receipt_is_unknown_and_never_sent_again(
    cluster: Cluster, line: Line, topic: str, fault: str, deduplicates: bool
) -> None:
    """A stock producer doubles it without Pulsar's deduplication: see `test_settling`."""
    await cluster.create(topic, deduplicates=deduplicates)
    async with Owner(line.service_url, topic) as owner, Owner(cluster.service_url, topic, "two") as other:
        writer = await owner.open()
        append(writer, numbered(0, 10))
        await owner.until_confirmed(11)
        line.hold_answers()
        append(writer, numbered(10, 50))
        await cluster.until_received(topic, 61)
        match fault:
            case "cut":
                line.cut()
            case "unload":
                await cluster.admin.unload(topic)
                line.let_answers_through()
            case _:
                mode = pulsar.ProducerAccessMode.ExclusiveWithFencing
                await (await other.client.create_producer(topic, access_mode=mode)).close()
                line.let_answers_through()
        append(writer, numbered(60, 10))
        await until(lambda: owner.failure is not None)
        assert fault != "cut" or len(owner.confirmed) == 11
        await writer.close()
        stored = await cluster.read(topic)
        assert [entry.payload for entry in stored] == [b"marker", *numbered(0, 60)]
        assert [entry.message_id for entry in stored[: len(owner.confirmed)]] == owner.confirmed
        again = await owner.open_when_free(writer.name_number + 1, marker=b"again")
        append(again, numbered(100, 5))
        await owner.until_confirmed(6)
        await again.close()


async def test_one_that_was_replaced_meanwhile_does_not_come_back(cluster: Cluster, line: Line, topic: str) -> None:
    await cluster.create(topic)
    async with Owner(line.service_url, topic) as owner, Owner(cluster.service_url, topic, "two") as other:
        writer = await owner.open()
        line.cut(and_stay_down=True)
        await (await other.open_when_free(marker=b"other")).close()
        await cluster.until_nobody_writes(topic)
        append(writer, numbered(0, 5))
        line.mend()
        await until(lambda: owner.failure is not None)
        assert (len(owner.confirmed), owner.doubtful) == (1, None)
        await writer.close()
        assert [entry.payload for entry in await cluster.read(topic)] == [b"marker", b"other"]


async def test_one_that_lost_the_topic_is_told_and_nothing_of_it_lands(
    cluster: Cluster, line: Line, topic: str
) -> None:
    await cluster.create(topic)
    async with Owner(line.service_url, topic) as owner, Owner(cluster.service_url, topic, "two") as other:
        writer = await owner.open()
        line.cut(and_stay_down=True)
        append(writer, numbered(0, 5))
        others = await other.open_when_free(marker=b"other")
        line.mend()
        await until(lambda: owner.failure is not None)
        assert (len(owner.confirmed), owner.doubtful) == (1, None)
        append(writer, numbered(5, 5))
        append(others, numbered(100, 5))
        await other.until_confirmed(6)
        await writer.close()
        stored = await cluster.read(topic)
        assert [entry.payload for entry in stored] == [b"marker", b"other", *numbered(100, 5)]
        await others.close()


async def test_without_an_answer_the_outcome_is_unknown_and_opening_again_tells(
    broker: Broker, cluster: Cluster, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.create(topic)
    monkeypatch.setattr(writers, "SEND_TIMEOUT_SECONDS", 4.0)
    async with Owner(cluster.service_url, topic) as owner:
        writer = await owner.open()
        append(writer, numbered(0, 5))
        await owner.until_confirmed(6)
        broker.freeze()
        try:
            append(writer, numbered(5, 20))
            await until(lambda: owner.failure is not None)
        finally:
            broker.thaw()
        assert owner.failure is not None
        assert "has not answered" in owner.failure
        assert owner.confirmed[6:] == []
        await writer.close()

        monkeypatch.undo()
        again = await owner.open_when_free(writer.name_number + 1, marker=b"again")
        append(again, numbered(100, 5))
        await owner.until_confirmed(6)
        payloads = [entry.payload for entry in await cluster.read(topic)]
        before, after = payloads[: payloads.index(b"again")], payloads[payloads.index(b"again") :]
        # A prefix of what was unknown, and nothing of it after the marker.
        assert before == [b"marker", *numbered(0, 25)][: len(before)]
        assert len(before) >= 6
        assert after == [b"again", *numbered(100, 5)]
        await again.close()


async def test_a_broker_that_was_killed_has_all_that_was_confirmed(
    mortal_broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = mortal_broker
    cluster = Cluster(broker.service_url, broker.admin_url)
    await cluster.create(topic)
    monkeypatch.setattr(writers, "SEND_TIMEOUT_SECONDS", 4.0)
    async with Owner(cluster.service_url, topic) as owner:
        writer = await owner.open()
        append(writer, numbered(0, 3000))
        await until(lambda: len(owner.confirmed) > 500)
        await asyncio.to_thread(broker.kill)
        append(writer, numbered(3000, 100))
        await until(lambda: owner.failure is not None)
        confirmed = owner.confirmed
        await writer.close()

        monkeypatch.undo()
        broker.spawn()
        await asyncio.to_thread(broker.wait_until_healthy)
        again = await owner.open_when_free(writer.name_number + 1, marker=b"again")
        append(again, numbered(4000, 5))
        await owner.until_confirmed(6)
        await again.close()
        stored = await cluster.read(topic)
        assert [entry.message_id for entry in stored[: len(confirmed)]] == confirmed
        until_marker = len(stored) - 6
        assert until_marker >= len(confirmed)
        assert [entry.payload for entry in stored[:until_marker]] == [b"marker", *numbered(0, 3100)][:until_marker]
        assert [entry.payload for entry in stored[until_marker:]] == [b"again", *numbered(4000, 5)]


async def test_an_opening_that_nobody_waits_for_does_not_keep_the_topic(
    cluster: Cluster, line: Line, topic: str
) -> None:
    await cluster.create(topic)
    async with Owner(line.service_url, topic) as owner, Owner(cluster.service_url, topic, "two") as other:
        first = await owner.open()
        await first.close()
        line.hold_answers_after(b"seqdedupe-one-1")
        opening = asyncio.ensure_future(owner.open(1))
        await cluster.until_somebody_writes(topic)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        line.let_answers_through()
        await (await other.open_when_free()).close()


async def test_an_opening_whose_number_cannot_be_claimed_does_not_keep_the_topic(cluster: Cluster, topic: str) -> None:
    await cluster.create(topic)

    async def refuse(_: int) -> int:
        raise OSError("no space left on device")

    async with Owner(cluster.service_url, topic) as owner:
        with pytest.raises(OSError, match="no space left"):
            await open_writer(owner.brokers, topic, "one", 0, refuse, {}, lambda _: None, EntryFormat.PLAIN)
        await (await owner.open()).close()


async def test_no_more_is_in_flight_than_the_bounds_say(
    cluster: Cluster, line: Line, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.create(topic)
    async with Owner(line.service_url, topic) as owner:
        writer = await owner.open()
        await owner.until_confirmed(1)
        for holder, bound, value in ((writer._producer, "max_in_flight", 3), (writers, "MAX_IN_FLIGHT_BYTES", 25)):
            with monkeypatch.context() as patch:
                patch.setattr(holder, bound, value)
                line.hold_answers()
                before = len(owner.confirmed)
                append(writer, [b"ten bytes!"] * 10)
                await cluster.until_received(topic, before + 3)
                stored = len(await cluster.read(topic))
                line.let_answers_through()
                await owner.until_confirmed(before + 10)
                assert stored == before + 3
        await writer.close()


async def test_a_closed_writer_settles_nothing_more(cluster: Cluster, line: Line, topic: str) -> None:
    await cluster.create(topic)
    async with Owner(line.service_url, topic) as owner:
        writer = await owner.open()
        line.hold_answers()
        append(writer, numbered(0, 5))
        closing = asyncio.ensure_future(writer.close())
        await cluster.until_received(topic, 6)
        line.let_answers_through()
        await closing
        append(writer, numbered(5, 5))
        assert (len(owner.confirmed), owner.doubtful, owner.failure) == (1, None, None)
        assert [entry.payload for entry in await cluster.read(topic)] == [b"marker", *numbered(0, 5)]
