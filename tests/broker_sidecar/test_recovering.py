"""A sidecar whose topic recovers slowly: what readers learn meanwhile, and who gets through."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from seqdedupe.client import Client as Library
from seqdedupe.message_id import Position
from seqdedupe.testing import Sidecar
from seqdedupe.v1 import admin_pb2, read_pb2
from tests.broker_sidecar.calls import Client, batch, refused
from tests.broker_sidecar.gate import Gate

ROWS = 40


@pytest.fixture
def recovering(tmp_path: Path) -> Iterator[tuple[Sidecar, Gate, Position]]:
    """A killed sidecar whose topic's snapshot covers half of its messages, started again, its marker not yet synced."""
    sidecar = Sidecar(tmp_path / "sidecar")
    sidecar.start()
    client = Client(sidecar.address)
    epochs = client.epochs("t", "p")
    for i in range(ROWS):
        client.publish_unary("t", batch([("p", i)], epochs))
        if i == ROWS // 2:
            client.admin.Snapshot(admin_pb2.SnapshotRequest(topic="t"))
    position = Position.from_proto(client.topic("t").last)
    client.close()
    sidecar.kill()
    gate = Gate(tmp_path / "gate")
    gate.close()
    started = threading.Thread(target=gate.start, args=(sidecar,))
    started.start()
    channel = Client(sidecar.address)
    while True:
        try:
            if channel.topic("t").state == admin_pb2.TOPIC_STATE_RECOVERING and gate.holds:
                break
        except grpc.RpcError:
            pass
    channel.close()
    yield sidecar, gate, position
    gate.open()
    started.join()
    sidecar.kill()


def test_the_end_is_not_told_and_what_is_certain_is_read(recovering: tuple[Sidecar, Gate, Position]) -> None:
    sidecar, gate, position = recovering
    client = Client(sidecar.address)
    certain = client.topic("t").last.index + 1
    assert ROWS // 2 < certain <= ROWS
    after = {"after": position.to_proto()}
    calls: dict[str, Callable[[], object]] = {
        "the end": lambda: client.end_index("t"),
        "a page at the end of what is certain": lambda: client.reading.Read(
            read_pb2.ReadRequest(topic="t", start=read_pb2.ReadStart(index=certain))
        ),
        "latest": lambda: client.rows("t", latest=True),
        "a stream to the end": lambda: client.rows("t"),
        "a time": lambda: client.reading.Locate(read_pb2.LocateRequest(topic="t", publish_time_ms=2**62)),
    }
    if certain < ROWS:
        calls["a good position"] = lambda: client.rows("t", **after)
    for what, call in calls.items():
        answer = refused(call)
        assert (answer.reason, answer.retry_delay_ms > 0) == ("RECOVERING", True), what
    page = client.reading.Read(read_pb2.ReadRequest(topic="t"))
    assert sum(record.rows for record in page.records) == certain
    assert page.end_index == -1
    gate.open()
    follow = read_pb2.ReadStreamRequest(topic="t", start=read_pb2.ReadStart(index=1), stop_index=ROWS)
    rows = [record.rows for answer in client.reading.ReadStream(follow) for record in answer.records]
    assert sum(rows) == ROWS - 1
    client.close()


async def test_readers_of_the_library_get_through(recovering: tuple[Sidecar, Gate, Position]) -> None:
    """One that follows from a good position, and one to the end, which does not stop early."""
    sidecar, gate, position = recovering

    async def to_the_end() -> int:
        async with Library(sidecar.address) as client, client.reader("t") as reader:
            return len([message async for message in reader])

    async def next_one() -> int:
        async with Library(sidecar.address) as client, client.reader("t", position, follow=True) as reader:
            return (await anext(reader)).index

    readers = [asyncio.ensure_future(to_the_end()), asyncio.ensure_future(next_one())]
    done, _ = await asyncio.wait(readers, timeout=1)
    assert not done
    gate.open()
    assert await readers[0] == ROWS
    client = Client(sidecar.address)
    await asyncio.to_thread(lambda: client.publish_unary("t", batch([("p", ROWS)], client.epochs("t", "p"))))
    client.close()
    assert await readers[1] == ROWS
