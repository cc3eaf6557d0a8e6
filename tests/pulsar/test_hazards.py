"""What goes wrong with Pulsar's own deduplication, shown on a broker, and does not with a topic over its log."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pulsar
import pytest

from pulsar_broker.standalone import Broker
from seqdedupe.core.rule import NOT_DUP
from seqdedupe.errors import SeqdedupeError
from seqdedupe.log.pulsar import writer
from seqdedupe.log.pulsar.entries import EntryFormat
from seqdedupe.topic.base import State
from seqdedupe.topic.frame import FrameReceipt, NumbersCache, Refusal
from seqdedupe.topic.operations import open_sessions
from tests.batches import batch
from tests.conformance.cases import Difference, differences
from tests.pulsar.conftest import StartBroker
from tests.pulsar.drivers import OfPulsar, OfTopic
from tests.pulsar.owners import Cluster, kill_and_start, quiet, until
from tests.pulsar.publishers import Process
from tests.pulsar.wire import Publish, open_producer

HEADING = "What was shown on a broker"
CLIENTS_BATCHES, REFUSED_WRITE = "batches_of_pythons_client", "refused_write"
BOOKIES_LIMIT_BYTES = 100_000


def on_the_page(case: str, pulsars: list[str], here: list[str]) -> None:
    """Step by step; the last ones are the logs."""
    assert len(pulsars) == len(here)
    rows = {
        Difference(case, step % len(pulsars), theirs, ours)
        for step, (theirs, ours) in enumerate(zip(pulsars, here, strict=True), 1)
        if theirs != ours
    }
    assert rows == {row for row in differences(HEADING) if row.case == case}


def test_the_page_lists_nothing_else() -> None:
    assert {row.case for row in differences(HEADING)} == {CLIENTS_BATCHES, REFUSED_WRITE}


async def test_batches_of_pythons_client(broker: Broker, topic: str, tmp_path: Path) -> None:
    """For a batch it says the first ID only."""
    cluster = Cluster(broker.service_url, broker.admin_url)
    batches = [[10, 20, 30], [20, 30], [10, 40]]
    for one in (topic, f"{topic}-here"):
        await cluster.create(one)
    answers = await asyncio.to_thread(_sent_by_pythons_client, cluster.service_url, topic, batches)
    pulsars = [*answers, await OfPulsar(cluster, topic).log()]

    here = OfTopic(
        cluster, f"{topic}-here", lambda: Process(cluster, f"{topic}-here", EntryFormat.PLAIN, tmp_path, "one")
    )
    await here.start()
    await here.do({"op": "open", "session": "s", "producer": "A"})
    steps = [{"op": "publish", "session": "s", "sequence_id": ids[0], "message_ids": ids} for ids in batches]
    ours = [await here.do(step) for step in steps]
    on_the_page(CLIENTS_BATCHES, pulsars, [*ours, await here.log()])
    await here.close()


def _sent_by_pythons_client(service_url: str, topic: str, batches: list[list[int]]) -> list[str]:
    client = pulsar.Client(service_url, logger=quiet())
    try:
        producer = client.create_producer(
            topic, producer_name="A", batching_enabled=True, batching_max_publish_delay_ms=60_000
        )
        words: list[str] = []
        for ids in batches:
            places: list[Any] = []
            for sequence_id in ids:
                producer.send_async(b"%d" % sequence_id, partial(_hear, places), sequence_id=sequence_id)
            producer.flush()
            words += {"dup" if place.ledger_id() < 0 else "stored" for place in places}
        return words
    finally:
        client.close()


def _hear(places: list[Any], result: pulsar.Result, place: Any) -> None:
    assert result == pulsar.Result.Ok
    places.append(place)


async def test_a_write_that_is_refused(
    start_broker: StartBroker, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bookie does not take 2, which is too large for it; then the broker starts again, and 2 is sent in small."""
    broker = start_broker(nettyMaxFrameSizeBytes=BOOKIES_LIMIT_BYTES)
    cluster = Cluster(broker.service_url, broker.admin_url)
    theirs, ours = topic, f"{topic}-here"
    for one in (theirs, ours):
        await cluster.create(one)
    monkeypatch.setattr(writer, "SEND_TIMEOUT_SECONDS", 2.0)
    too_large = bytes(2 * BOOKIES_LIMIT_BYTES)

    producer = await open_producer(cluster.service_url, theirs, "A")
    process = Process(cluster, ours, EntryFormat.PLAIN, tmp_path, "one")
    has = await process.start()
    opened = await open_sessions(has, ["A"], None)
    answers: list[FrameReceipt | Refusal] = []

    def send(sequence_id: int, epoch: int, payload: bytes = b"") -> None:
        link = sequence_id - 1 or -1
        content = batch([("A", sequence_id)], epochs={"A": epoch}, links={"A": link}, payloads=[payload])
        has.admit(content.encode(), sequence_id, answers.append, NumbersCache())

    producer.send([Publish(1)])
    send(1, opened.epochs[0])
    pulsars, here = [await producer.answer(), "", ""], ["stored", "", ""]
    await until(lambda: isinstance(answers[0] if answers else None, FrameReceipt))
    producer.send([Publish(2, payload=too_large), Publish(3)])
    send(2, opened.epochs[0], too_large)
    send(3, opened.epochs[0])
    await until(lambda: has.state is not State.SERVING)
    assert len(answers) == 1

    # Anyone who comes back meanwhile, and goes on after what it learns.
    await producer.close()
    producer = await open_producer(cluster.service_url, theirs, "A")
    pulsars.append(f"last ID {producer.last_sequence_id}")
    here.append(await _opened(process))
    for sequence_id in (2, 3):
        producer.send([Publish(sequence_id)])
        pulsars.append(await producer.answer())
        here.append(await _opened(process))
    await producer.close()

    await kill_and_start(broker)
    producer = await open_producer(cluster.service_url, theirs, "A")
    pulsars.append(f"last ID {producer.last_sequence_id}")
    await until(lambda: has.state is State.SERVING)
    assert [type(answer) for answer in answers] == [FrameReceipt, Refusal, Refusal]
    here.append(await _opened(process))
    opened = await open_sessions(has, ["A"], None)
    for sequence_id in (2, 3):
        producer.send([Publish(sequence_id)])
        pulsars.append(await producer.answer())
        send(sequence_id, opened.epochs[0])
        await until(lambda expected=sequence_id + 2: len(answers) == expected)
        answer = answers[-1]
        assert isinstance(answer, FrameReceipt)
        here.append("stored" if answer.verdicts is None or answer.verdicts[0] == NOT_DUP else "dup")
    await producer.close()
    pulsars.append(await OfPulsar(cluster, theirs).log())
    here.append(" ".join(f"A:{i}" for i in range(1, has.confirmed_index + 1)))
    on_the_page(REFUSED_WRITE, pulsars, here)
    await process.close()


async def _opened(process: Process) -> str:
    """What a producer learns that comes back."""
    try:
        return f"last ID {(await open_sessions(process.topic, ['A'], None)).persisted[0]}"
    except SeqdedupeError as e:
        return e.reason
