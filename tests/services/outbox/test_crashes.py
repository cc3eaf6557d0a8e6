"""Real crashes: the relay killed while writers commit in any order, and PostgreSQL restored to an older state.

Costs: one sidecar, one PostgreSQL of its own, about ten relays one after the other; about 20 seconds.
"""

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psycopg
import pytest

from seqdedupe.client import Client
from seqdedupe.services.outbox import Relay, run_relay
from seqdedupe.services.outbox import steps as outbox_steps
from seqdedupe.services.outbox.store import RowPage
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from tests.processes import running
from tests.services.outbox.conftest import NAME, Database, messages, payloads, relay_all
from tests.services.restorable import Restorable

KILLS = 8
WRITERS = 4
ORDERS = 2
_CHANGE = "UPDATE orders SET version = version + 1 WHERE number = %s RETURNING version"
_INSERT = (
    "INSERT INTO outbox (id, aggregatetype, aggregateid, type, payload) "
    "VALUES (gen_random_uuid(), 'order', %s, 'OrderPlaced', %s)"
)


class Writer(threading.Thread):
    """Commits, or not, at its leisure: transactions overlap with those of the others.

    Each writes something first, and then changes an order that others change, too: who begins first may commit last.
    """

    def __init__(self, url: str, number: int, stop: threading.Event) -> None:
        super().__init__()
        self._url, self._number, self._ended = url, number, stop
        self.committed: list[bytes] = []

    def run(self) -> None:
        dice = random.Random(self._number)
        with psycopg.connect(self._url) as connection:
            while not self._ended.is_set():
                connection.execute("INSERT INTO audit VALUES ('begins')")
                self._ended.wait(dice.random() * 0.02)
                order = dice.randrange(ORDERS)
                rows = []
                for _ in range(dice.randrange(1, 5)):
                    [(version,)] = connection.execute(_CHANGE, (order,)).fetchall()
                    rows.append(b"%d %d" % (order, version))
                    connection.execute(_INSERT, (str(order), rows[-1]))
                    self._ended.wait(dice.random() * 0.02)
                if dice.random() < 0.2:
                    connection.rollback()
                else:
                    connection.commit()
                    self.committed += rows


def test_the_relay_is_killed_while_writers_commit(shared_sidecar: Sidecar, topic: str, postgres: Database) -> None:
    """Each row once, and the rows of an order in the order of its versions, which is that of the commits."""
    postgres.script(
        "CREATE TABLE audit (line text); CREATE TABLE orders (number int, version int); "
        f"INSERT INTO orders SELECT n, 0 FROM generate_series(0, {ORDERS - 1}) n"
    )
    stop = threading.Event()
    writers = [Writer(postgres.url, number, stop) for number in range(WRITERS)]
    for writer in writers:
        writer.start()
    dice = random.Random(0)
    command = [str(Path(sys.executable).with_name("seqdedupe")), "outbox", "relay", "--database", postgres.url]
    command += ["--topic", topic, "--producer", NAME, "--address", shared_sidecar.address]
    try:
        for _ in range(KILLS):
            with running(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
                _until_a_row_goes(postgres, process)
                time.sleep(dice.random() * 0.3)  # killed at any moment
                os.kill(process.pid, signal.SIGKILL)
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    counters = run_relay(shared_sidecar.address, postgres.url, topic, NAME, follow=False)
    found = asyncio.run(payloads(shared_sidecar, topic))
    committed = [row for writer in writers for row in writer.committed]
    assert Counter(found) == Counter(committed)
    for order in range(ORDERS):
        versions = [int(row.split()[1]) for row in found if row.startswith(b"%d " % order)]
        assert versions == list(range(1, len(versions) + 1))
    assert (counters.tokens_replaced, counters.set_aside, postgres.rows()) == (0, 0, 0)


def _until_a_row_goes(database: Database, relay: subprocess.Popen[bytes]) -> None:
    """So that each relay has done something."""
    first = database.value("SELECT coalesce(min(sequence_id), -1) FROM outbox")
    over_at = time.monotonic() + LAST_RESORT_SECONDS
    while database.value("SELECT coalesce(min(sequence_id), -1) FROM outbox") == first:
        assert relay.poll() is None, relay.communicate()
        assert time.monotonic() < over_at
        time.sleep(0.02)


@pytest.fixture
def server() -> Iterator[Restorable]:
    server = Restorable(fsync="off")
    server.start()
    yield server
    server.stop()


async def test_postgres_is_restored_to_an_older_state(shared_sidecar: Sidecar, topic: str, server: Restorable) -> None:
    """While the relay runs. Old transaction numbers come again, with other rows, and what it had deleted is there."""
    database = Database(server.url)
    database.add(b"first")
    await relay_all(shared_sidecar, database, topic)
    database.add(b"kept in the backup")
    await asyncio.to_thread(server.save)
    async with Client(shared_sidecar.address) as client:
        one = Relay(client, server.url, topic, NAME, report=lambda line: None)
        running = asyncio.create_task(one.run())
        for number in range(20):
            await asyncio.to_thread(_add, database, b"lost history %d" % number)
        await _until_empty(database)
        await asyncio.to_thread(server.restore)
        for number in range(25):
            await asyncio.to_thread(_add, database, b"new history %d" % number)
        await _until_empty(database)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    found = await payloads(shared_sidecar, topic)
    wanted = [b"first", b"kept in the backup", *(b"lost history %d" % n for n in range(20))]
    assert found == [*wanted, *(b"new history %d" % n for n in range(25))]
    names = {message.producer_name for message in await messages(shared_sidecar, topic)}
    assert len(names) == 2
    assert one.counters.tokens_replaced == 1
    database.engine.dispose()


def _add(database: Database, payload: bytes) -> None:
    database.engine.dispose()  # what was connected to the server that is gone
    database.add(payload)


async def _until_empty(database: Database) -> None:
    async with asyncio.timeout(LAST_RESORT_SECONDS):
        while await asyncio.to_thread(database.rows):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_a_relay_that_does_not_compare_loses_rows_after_a_restore(
    shared_sidecar: Sidecar, topic: str, server: Restorable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control arm: what is Dup is deleted."""

    async def all_there(client: Client, topic: str, name: str, page: RowPage, **_: object) -> outbox_steps.FoundRows:
        return outbox_steps.FoundRows(np.arange(len(page)), np.zeros(0, np.int64))

    monkeypatch.setattr("seqdedupe.services.outbox.relay.find", all_there)
    database = Database(server.url)
    await asyncio.to_thread(server.save)
    _add(database, b"lost history")
    await relay_all(shared_sidecar, database, topic)
    await asyncio.to_thread(server.restore)
    _add(database, b"new history")
    await relay_all(shared_sidecar, database, topic)
    assert (await payloads(shared_sidecar, topic), database.rows()) == ([b"lost history"], 0)
    database.engine.dispose()
