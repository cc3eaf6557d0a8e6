"""Few descriptors: however many topics and connections there are, the store and the logs have theirs."""

import asyncio
import socket
from pathlib import Path

import psutil

from seqdedupe.address import SidecarAddress
from seqdedupe.client import Client as SidecarClient
from seqdedupe.errors import EXIT_WRONG
from seqdedupe.testing import Sidecar
from tests.broker_sidecar import with_constants
from tests.broker_sidecar.calls import NOT_DUP, Client, batch, refused, verdicts

LIMIT = 400
TOPICS = 600


def few_files(folder: Path, soft: int, hard: int, **constants: object) -> Sidecar:
    environment = with_constants.environment(**constants) | {with_constants.FILES: f"{soft} {hard}"}
    return Sidecar(folder, module=with_constants.MODULE, environment=environment)


async def make_topics(sidecar: Sidecar) -> None:
    """Makes them, several at a time, each with a message in it."""
    client = Client(sidecar.address)
    numbers = iter(range(TOPICS))

    async def some() -> None:
        async with SidecarClient(sidecar.address) as own:
            for i in numbers:
                await own.admin.create_topic(f"t{i}")

    await asyncio.gather(*(some() for _ in range(8)))
    for i in range(TOPICS):
        epochs = client.epochs(f"t{i}", "p")
        assert verdicts(client.publish_unary(f"t{i}", batch([("p", 0)], epochs)), 1) == [NOT_DUP]
    client.close()


async def test_many_topics_on_few_descriptors(tmp_path: Path) -> None:
    """The soft limit is raised; 600 topics are made, written and, after kill -9, all read and written again."""
    with few_files(tmp_path, LIMIT // 2, LIMIT) as sidecar:
        await make_topics(sidecar)
        assert psutil.Process(sidecar.pid).num_fds() < LIMIT
        sidecar.restart()
        client = Client(sidecar.address)
        for i in range(0, TOPICS, 50):
            epochs = client.epochs(f"t{i}", "p")
            client.publish_unary(f"t{i}", batch([("p", 1)], epochs))
            assert client.rows(f"t{i}") == [("p", 0), ("p", 1)]
        client.close()
        assert not [entry for entry in sidecar.log if entry["level"] in ("error", "critical")]


def topics_beside_many_connections(sidecar: Sidecar) -> None:
    """Topics are made and written while there are more connections than descriptors."""
    client = Client(sidecar.address)
    client.open("before", "p")
    address = SidecarAddress.parse(sidecar.address)
    connections = [socket.create_connection((address.host, address.port)) for _ in range(2 * LIMIT)]
    try:
        for i in range(20):
            epochs = client.epochs(f"t{i}", "p")
            assert verdicts(client.publish_unary(f"t{i}", batch([("p", 0)], epochs)), 1) == [NOT_DUP]
    finally:
        client.close()
        for connection in connections:
            connection.close()


def test_many_connections_leave_the_store_and_the_logs_theirs(tmp_path: Path) -> None:
    with few_files(tmp_path, LIMIT, LIMIT) as sidecar:
        topics_beside_many_connections(sidecar)
        assert not [entry for entry in sidecar.log if entry["level"] in ("error", "critical")]


def test_the_control_connections_without_a_limit_take_them_all(tmp_path: Path) -> None:
    with few_files(tmp_path, LIMIT, LIMIT, server__RESERVE=-LIMIT * LIMIT) as sidecar:
        refusal = refused(lambda: topics_beside_many_connections(sidecar))
        assert "Too many open files" in refusal.message


def test_too_few_descriptors_are_one_clear_line(tmp_path: Path) -> None:
    sidecar = few_files(tmp_path, 100, 100)
    sidecar.spawn()
    assert sidecar.wait() == EXIT_WRONG
    [line] = sidecar.errors
    assert line.startswith("seqdedupe: the process may open 100 files")
    assert "LimitNOFILE" in line
