"""A sidecar whose data was restored to an older copy and has grown again: positions of what it has lost are refused."""

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from seqdedupe.message_id import MessageId, Position
from seqdedupe.testing import Sidecar
from seqdedupe.v1 import admin_pb2, read_pb2
from tests.broker_sidecar.calls import Client, batch, refused

COMMON, ROWS = 3, 6


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[Sidecar]:
    sidecar = Sidecar(tmp_path / "sidecar")
    yield sidecar
    sidecar.kill()


def grow(sidecar: Sidecar, *, to: int) -> None:
    client = Client(sidecar.address)
    epochs = client.epochs("t", "p")
    for i in range(client.end_index("t"), to):
        client.publish_unary("t", batch([("p", i)], epochs))
    client.close()


def all_positions(client: Client) -> list[Position]:
    """For all messages, as a reader makes them of what it learns."""
    records = list(client.records("t"))
    assert [record.rows for record in records] == [1] * len(records)
    return [
        Position(
            record.incarnation, MessageId.of(record.incarnation, record.base_index), record.base_index, record.ownership
        )
        for record in records
    ]


def last_position(client: Client) -> Position:
    """The last one, of which all who say it must say the same."""
    told: list[Any] = [
        client.reading.GetLastMessageId(read_pb2.GetLastMessageIdRequest(topic="t")).last,
        client.topic("t").last,
        client.admin.Snapshot(admin_pb2.SnapshotRequest(topic="t")).position,
        *(topic.last for topic in client.admin.ListTopics(admin_pb2.ListTopicsRequest()).topics),
    ]
    assert len(told) == 4
    (last,) = {Position.from_proto(one) for one in told}
    return last


def read_after(client: Client, position: Position) -> list[int]:
    """The indexes of what is read by a stream; a page begins with the same."""
    after = position.to_proto()
    indexes = [record.base_index for record in client.records("t", after=after)]
    page = client.reading.Read(read_pb2.ReadRequest(topic="t", start=read_pb2.ReadStart(after=after)))
    assert [record.base_index for record in page.records][:1] == indexes[:1]
    return indexes


def test_the_last_position_is_that_of_the_last_message_whoever_wrote_it(sidecar: Sidecar) -> None:
    ownerships: list[int] = []
    for rows, stopped in ((2, False), (2, True), (4, True), (4, False)):
        sidecar.start()
        client = Client(sidecar.address)
        if ownerships:
            # Before this process has appended anything: from the log, or the snapshot.
            assert last_position(client) == all_positions(client)[-1]
        grow(sidecar, to=rows)
        last = last_position(client)
        assert last == all_positions(client)[-1]
        ownerships.append(last.ownership)
        client.close()
        if stopped:
            sidecar.stop()
        sidecar.kill()
    assert 0 not in ownerships
    assert [ownerships.index(one) for one in ownerships] == [0, 0, 2, 2]


def test_a_position_of_a_history_that_was_lost_is_refused(sidecar: Sidecar) -> None:
    sidecar.start()
    grow(sidecar, to=COMMON)
    assert sidecar.stop() == 0
    copy = shutil.copytree(sidecar.data, sidecar.folder / "copy")
    sidecar.start()
    grow(sidecar, to=ROWS)
    client = Client(sidecar.address)
    old = all_positions(client)
    assert [read_after(client, position) for position in old] == [list(range(i + 1, ROWS)) for i in range(ROWS)]
    client.close()
    assert sidecar.stop() == 0
    shutil.rmtree(sidecar.data)
    copy.rename(sidecar.data)
    sidecar.start()
    grow(sidecar, to=ROWS + 1)
    client = Client(sidecar.address)
    for index, position in enumerate(old):
        rest = list(range(index + 1, ROWS + 1))
        if index < COMMON:
            assert read_after(client, position) == rest
            continue
        after = position.to_proto()
        request = read_pb2.ReadRequest(topic="t", start=read_pb2.ReadStart(after=after))
        for call in (partial(client.reading.Read, request), partial(client.rows, "t", after=after)):
            answer = refused(call)
            assert (answer.reason, answer.numbers["index"]) == ("POSITION_DIVERGED", str(index))
        # Index and message ID are there: nothing else tells the two histories apart.
        assert read_after(client, position._replace(ownership=0)) == rest
    client.close()
