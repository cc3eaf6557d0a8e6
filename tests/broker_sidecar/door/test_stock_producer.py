"""What a stock producer holds while its topic answers late, or not at all."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from broker_sidecar import kernels
from broker_sidecar.door import pulsar_connection
from broker_sidecar.door.entry_batches import ProducerSession
from broker_sidecar.door.pulsar_connection import PulsarConnection
from broker_sidecar.door.stock_producer import PendingEntry, StockProducer
from broker_sidecar.shares import MAX_HELD_BYTES, NO_LIMITS, Budget, CallerLimits, Share, Use
from seqdedupe.core.rule import DUP, UNKNOWN
from seqdedupe.pulsar_wire.frames import command_frame, command_of, frame_of
from seqdedupe.pulsar_wire.pulsar_api_pb2 import BaseCommand, CommandPing, CommandPong, CommandSend, CommandSubscribe
from seqdedupe.topic.frame import NONE_KNOWN, FrameReceipt
from tests.broker_sidecar.door.wire import batch, single


class LateTopic:
    """A topic that never settles the first frame, and gives all later ones this verdict at once."""

    def __init__(self, verdict: int) -> None:
        self.name = "t"
        self.flight = SimpleNamespace(wait_for_room=self._nothing)
        self.log = SimpleNamespace(schema=None, entry_format="")
        self.applied = SimpleNamespace(deduplication_enabled=True)
        self.settled = asyncio.Event()
        self._verdict = verdict

    async def _nothing(self) -> None:
        pass

    async def all_settled(self) -> None:
        await self.settled.wait()

    def connect(self, _: object) -> Any:
        return SimpleNamespace()

    def disconnect(self, _: object) -> None:
        pass

    def admit(self, _: bytes, number: int, reply: Any, __: object, *, sent: object) -> None:
        if number > 1:
            reply(FrameReceipt(number, np.array([self._verdict], np.uint8), -1, (), *NONE_KNOWN))


def producer_of(topic: Any, share: Share, answered: list[PendingEntry]) -> StockProducer:
    stream: Any = SimpleNamespace(share=share, frames_in_flight=0, moves=lambda: None)
    return StockProducer(
        topic,
        ProducerSession(b"p", 1),
        -1,
        stream,
        None,
        answered.append,
        lambda e: pytest.fail(str(e)),
        goes_on=True,
        schema_version=b"",
    )


@pytest.mark.parametrize(("verdict", "payload_bytes", "least"), [(UNKNOWN, 100_000, 900_000), (DUP, 1, 5_000)])
def test_entries_that_wait_behind_another_count(verdict: int, payload_bytes: int, least: int) -> None:
    """The control: a client could send them without end while the disk did not answer."""
    kernels.prepare()

    async def run() -> None:
        topic: Any = LateTopic(verdict)
        share = Share(Budget(lambda _: None, MAX_HELD_BYTES), Use("u", NO_LIMITS))
        answered: list[PendingEntry] = []
        producer = producer_of(topic, share, answered)
        for _ in range(10):
            await producer.send(CommandSend(producer_id=1, sequence_id=0), single(0, bytes(payload_bytes)))
        first_bytes = 2048 + payload_bytes
        assert share.held_bytes - first_bytes > least - payload_bytes
        assert not answered
        producer.close()
        topic.settled.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        # Only the first frame is in flight.
        assert share.held_bytes < first_bytes + 200

    asyncio.run(run())


class WaitingTopic(LateTopic):
    """The first frame's copy is in flight. Others are answered by the test, and there is room when it says so."""

    def __init__(self) -> None:
        super().__init__(UNKNOWN)
        self.room = asyncio.Event()
        self.flight = SimpleNamespace(wait_for_room=self.room.wait)
        self.answers: list[Any] = []

    def admit(self, _: bytes, number: int, reply: Any, __: object, *, sent: object) -> None:
        def answer(verdict: int) -> None:
            reply(FrameReceipt(number, np.array([verdict], np.uint8), -1, (), *NONE_KNOWN))

        self.answers.append(answer)


async def test_an_entry_whose_copy_was_in_flight_is_not_answered_before_it_was_judged_again() -> None:
    """The control: while it waited for room, the answer to the next entry acknowledged it too."""
    kernels.prepare()
    topic: Any = WaitingTopic()
    answered: list[PendingEntry] = []
    producer = producer_of(topic, Share(Budget(lambda _: None, MAX_HELD_BYTES), Use("u", NO_LIMITS)), answered)
    topic.room.set()
    for k in range(2):
        await producer.send(CommandSend(producer_id=1, sequence_id=k), single(k))
    topic.answers[0](UNKNOWN)
    topic.room.clear()
    topic.settled.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    topic.answers[1](DUP)
    assert not answered
    topic.answers[2](DUP)
    assert [entry.sequence_id for entry in answered] == [0, 1]


@pytest.mark.parametrize("entry_format", ["", "native"])
def test_an_entry_above_its_callers_share_is_taken(entry_format: str) -> None:
    """An entry of a native topic counts twice. The control: its client waited for ever, since each entry that waits
    counts too."""
    kernels.prepare()

    async def run() -> None:
        topic: Any = LateTopic(DUP)
        topic.log.entry_format = entry_format
        share = Share(Budget(lambda _: None, MAX_HELD_BYTES), Use("u", CallerLimits(bytes_in_flight=10_000)))
        producer = producer_of(topic, share, [])
        entry = batch(1, size=6_000) if entry_format else single(1, bytes(12_000))
        sending = [
            asyncio.ensure_future(producer.send(CommandSend(producer_id=1, sequence_id=1), entry)) for _ in range(2)
        ]
        await asyncio.sleep(0)
        # The second one waits until the first one is answered.
        assert [task.done() for task in sending] == [True, False]
        assert share.held_bytes > 10_000
        sending[1].cancel()
        producer.close()

    asyncio.run(run())


def connection_of(writer: Any) -> PulsarConnection:
    nothing: Any = None
    return PulsarConnection(
        nothing,
        writer,
        "peer",
        topics=nothing,
        streams=nothing,
        permissions=nothing,
        publish=nothing,
        names=nothing,
        lookup=nothing,
        brokers=None,
        consumers_of=None,
        registry=None,
        find_caller=nothing,
        log_limit=None,
        large_frames=asyncio.Semaphore(),
    )


def test_a_connection_that_has_closed_is_not_alive() -> None:
    """The control: its producers were asked for by another client, whose request failed without an answer."""

    def write(_: bytes) -> None:
        raise RuntimeError

    closed: Any = SimpleNamespace(transport=SimpleNamespace(is_closing=lambda: True), write=write)
    assert not asyncio.run(connection_of(closed).is_alive())


PONG = command_frame(BaseCommand(type=BaseCommand.PONG, pong=CommandPong()))
MORE = command_frame(BaseCommand(type=BaseCommand.PING, ping=CommandPing()))


@pytest.mark.parametrize(
    ("comes", "ends", "waits_because", "is_there"),
    [
        (MORE, True, None, False),
        (MORE + PONG, False, None, True),
        (MORE, False, None, True),
        (b"", False, None, False),
        (b"", False, "the client does not read", False),
        (b"", False, "there is no room", True),
    ],
)
async def test_whether_a_client_is_there(
    monkeypatch: pytest.MonkeyPatch, comes: bytes, ends: bool, waits_because: str | None, is_there: bool
) -> None:
    """The control: the last data of a connection that its client had closed, and even its end, counted as an answer.
    The client's next connection then did not get the producer's name."""
    seconds = 900.0 if ends or comes.endswith(PONG) else 1.0 if comes else 0.0
    monkeypatch.setattr(pulsar_connection, "ALIVE_SECONDS", seconds)
    asked = asyncio.Event()
    connection = connection_of(
        SimpleNamespace(transport=SimpleNamespace(is_closing=lambda: False), write=lambda _: asked.set())
    )
    connection._reader = asyncio.StreamReader()

    async def serve() -> None:
        async for frame in connection._frames():
            await connection._take(frame, cast(Any, None))
        await connection._end()

    serving = None if waits_because else asyncio.ensure_future(serve())
    connection._is_draining = waits_because == "the client does not read"
    await asyncio.sleep(0)
    answer = asyncio.ensure_future(connection.is_alive())
    await asked.wait()
    if comes:
        connection._reader.feed_data(comes)
    if ends:
        connection._reader.feed_eof()
    assert (await answer) is is_there
    if serving is not None:
        serving.cancel()
        await asyncio.wait([serving])


def test_a_defect_in_a_request_ends_the_connection() -> None:
    """The control: the client waited for an answer, and nobody was told."""
    ended: list[bool] = []

    async def run() -> None:
        writer: Any = SimpleNamespace(transport=SimpleNamespace(abort=lambda: ended.append(True)))

        async def fails() -> None:
            raise RuntimeError

        connection_of(writer).start(fails())
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(run())
    assert ended


def test_with_a_cluster_consumers_are_told_where_to_go() -> None:
    """Their messages come from the cluster's brokers."""
    written: list[bytes] = []
    transport = SimpleNamespace(is_closing=lambda: False)
    writer: Any = SimpleNamespace(transport=transport, write=written.append)
    command = command_of("subscribe", CommandSubscribe(topic="t", subscription="s", consumer_id=1, request_id=9))
    frame, stream = frame_of(memoryview(command_frame(command))), cast(Any, None)
    asyncio.run(connection_of(writer)._take(frame, stream))
    answer = frame_of(memoryview(written[0])).command.error
    assert answer.request_id == 9
    assert "brokers' own URL" in answer.message
