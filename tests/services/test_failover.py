"""Relay and consumer while their PostgreSQL is restarted, put back from a base backup, failed over to a replica.

Both services have one database: `effects` is what the consumer makes of what the relay has published. Costs 15 s: two
servers, each started a few times.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest
from sqlalchemy import create_engine

from seqdedupe.client.blocking import Client
from seqdedupe.services.consumer import Consumer
from seqdedupe.services.outbox import Relay
from seqdedupe.testing import Sidecar
from tests.services.effects import TIMEOUT_SECONDS, make_table, until, write
from tests.services.outbox.conftest import NAME, Database
from tests.services.restorable import Restorable


class Scene:
    """A database at any of the servers takes writes, a topic, a relay and a consumer that follow."""

    def __init__(self, sidecar: Sidecar, topic: str, servers: list[Restorable]) -> None:
        self.servers = servers
        self.said: list[str] = []
        self._sidecar = sidecar
        self._topic = topic
        self._rows = 0

    def dsn(self) -> str:
        hosts = ",".join(str(server.folder) for server in self.servers)
        return f"postgresql://postgres@/postgres?host={hosts}&target_session_attrs=read-write"

    def add(self, what: str, count: int = 5) -> list[bytes]:
        """Rows, each in its own transaction; waits for a server that takes them."""
        rows = [f"{what} {self._rows + n}".encode() for n in range(count)]
        self._rows += count
        for row in rows:
            with self.connected() as connection:
                connection.execute(
                    "INSERT INTO outbox (id, aggregatetype, aggregateid, type, payload) "
                    "VALUES (gen_random_uuid(), 'order', '7', 'OrderPlaced', %s)",
                    (row,),
                )
        return rows

    @contextmanager
    def connected(self) -> Iterator["psycopg.Connection[tuple[bytes]]"]:
        found: list[psycopg.Connection[tuple[bytes]]] = []

        def is_there() -> bool:
            try:
                found.append(psycopg.connect(self.dsn()))
            except psycopg.OperationalError:
                return False
            return True

        until(is_there)
        with found[0] as connection:
            yield connection

    def all_is_applied(self) -> None:
        """Until nothing is in the outbox, and the consumer has applied all that is in the topic."""

        def is_so() -> bool:
            try:
                with psycopg.connect(self.dsn()) as connection:
                    left = connection.execute("SELECT count(*) FROM outbox").fetchone()
                    effects = connection.execute("SELECT count(*) FROM effects").fetchone()
            except psycopg.OperationalError:
                return False
            return left == (0,) and effects == (len(self.messages()),)

        until(is_so)

    def messages(self) -> list[bytes]:
        with Client(self._sidecar.address) as client, client.reader(self._topic) as reader:
            return [message.payload or b"" for message in reader]

    def effects(self) -> list[bytes]:
        with self.connected() as connection:
            found = connection.execute("SELECT what FROM effects ORDER BY ctid").fetchall()
        return [str(what).encode() for (what,) in found]

    def says_what_is_lost(self) -> bool:
        """It depends on how far the database has come when the relay looks which of its two lines it is."""
        return any("has lost rows that are published" in line for line in self.said)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        engine = create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(self.dsn()))
        make_table(engine)
        with Client(self._sidecar.address) as client:
            client.admin.create_topic(self._topic)
            consumer = Consumer(client, self._topic, "c", engine, write)
            loop = asyncio.new_event_loop()
            relaying = threading.Thread(target=self._relay, args=(loop,))
            consuming = threading.Thread(target=consumer.run)
            relaying.start()
            consuming.start()
            try:
                yield
            finally:
                consumer.stop()
                loop.call_soon_threadsafe(self._task.cancel)
                for thread in (relaying, consuming):
                    thread.join(TIMEOUT_SECONDS)
                    assert not thread.is_alive()
                engine.dispose()

    def _relay(self, loop: asyncio.AbstractEventLoop) -> None:
        from seqdedupe.client import Client as AsyncClient

        async def relay() -> None:
            async with AsyncClient(self._sidecar.address) as client:
                await Relay(client, self.dsn(), self._topic, NAME, report=self.said.append).run()

        self._task = loop.create_task(relay())
        with pytest.raises(asyncio.CancelledError):
            loop.run_until_complete(self._task)
        loop.close()


@pytest.fixture
def servers() -> Iterator[list[Restorable]]:
    """A primary that serves, and another one that nobody has started."""
    made = [Restorable(fsync="off", shared_buffers="16MB") for _ in range(2)]
    made[0].start()
    yield made
    for server in made:
        server.stop()


def test_restarted_put_back_and_failed_over(shared_sidecar: Sidecar, topic: str, servers: list[Restorable]) -> None:
    primary, replica = servers
    Database(primary.url).engine.dispose()  # makes the outbox
    scene = Scene(shared_sidecar, topic, servers)
    with scene.at_work():
        rows = scene.add("first")
        scene.all_is_applied()

        primary.crash()
        primary.start()
        rows += scene.add("after a restart")
        scene.all_is_applied()
        assert scene.messages() == rows

        primary.save_base_backup()
        rows += scene.add("lost with the restore")
        scene.all_is_applied()
        primary.restore()
        rows += scene.add("after the base backup", 8)
        scene.all_is_applied()
        assert scene.messages() == rows
        assert scene.effects() == rows  # what the database has lost is in the topic, and so applied again
        assert scene.says_what_is_lost()

        replica.follow(primary)
        rows += scene.add("on both")
        scene.all_is_applied()
        until(lambda: _rows(replica) == len(rows))
        replica.stop_following()
        rows += scene.add("on the primary alone")
        scene.all_is_applied()
        scene.said.clear()
        primary.crash()
        replica.promote()
        rows += scene.add("on the replica", 12)
        scene.all_is_applied()
        assert scene.says_what_is_lost()
    assert scene.messages() == rows
    assert scene.effects() == rows
    assert max(Counter(scene.messages()).values()) == 1


def _rows(server: Restorable) -> int:
    with psycopg.connect(server.url) as connection:
        found = connection.execute("SELECT count(*) FROM effects").fetchone()
    return int(found[0]) if found else 0
