"""A database that is away, or takes no writes, when a consumer, an inbox or a relay starts. Costs 10 s."""

import asyncio
import gc
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine, event, inspect, make_url

from seqdedupe.client import Client as AsyncClient
from seqdedupe.client.blocking import Client
from seqdedupe.databases.tables import make_tables
from seqdedupe.errors import ConfigurationError, UnavailableError
from seqdedupe.services.consumer import Consumer
from seqdedupe.services.consumer.database import METADATA
from seqdedupe.services.inbox import Inbox
from seqdedupe.services.outbox import Relay
from seqdedupe.services.outbox import sqlite_outbox as outbox_sqlite
from seqdedupe.testing import Sidecar
from tests.services.conftest import Publish, url_of
from tests.services.effects import TIMEOUT_SECONDS, effects, make_table, numbers, until, write
from tests.services.outbox.conftest import NAME, Database
from tests.services.restorable import Restorable
from tests.services.test_faults import Told, plain_user, read_only_mariadb, read_only_postgres, running


def behind(url: str, folder: Path) -> tuple[str, Callable[[], None]]:
    """The URL of a server at a socket that is not there, and what puts it there."""
    made = make_url(url)
    if made.get_backend_name() == "postgresql":
        link, real = folder / ".s.PGSQL.5432", Path(str(made.query["host"])) / ".s.PGSQL.5432"
        return str(made.update_query_dict({"host": str(folder)})), lambda: link.symlink_to(real)
    link, real = folder / "socket", Path(str(made.query["unix_socket"]))
    return str(made.update_query_dict({"unix_socket": str(link)})), lambda: link.symlink_to(real)


@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")  # PyMySQL's, of one that is not there
@pytest.mark.parametrize("kind", ["postgresql", "mariadb"])
def test_a_consumer_and_its_inbox_wait_for_a_server_that_cannot_be_reached(
    request: pytest.FixtureRequest, client: Client, topic: str, publish: Publish, kind: str, tmp_path: Path
) -> None:
    publish(*numbers(3), keys=["a", "a", "a"])
    told = Told()
    url = url_of(request, kind)
    away, put_there = behind(url, tmp_path)
    root, engine = create_engine(url), create_engine(away)
    make_table(root)
    inbox = Inbox("i", engine, write, key=lambda message: message.key or b"", version=lambda message: message.index + 1)
    with running(Consumer(client, topic, "c", engine, inbox, on_waiting=told)) as thread:
        until(lambda: len(told.lines) >= 2)
        assert thread.is_alive()
        put_there()
        until(lambda: effects(root) == numbers(3))
    assert told.has("cannot be reached")
    assert told.has("its tables are made next")
    engine.dispose()
    root.dispose()
    gc.collect()


def locked_sqlite(url: str) -> Callable[[], None]:
    holder = sqlite3.connect(url.removeprefix("sqlite:///"), check_same_thread=False)
    holder.execute("BEGIN IMMEDIATE")
    return holder.close


@pytest.mark.parametrize(("kind", "cause"), [("postgresql", "read-only"), ("mariadb", "read-only"), ("sqlite", "lock")])
def test_a_consumer_waits_for_a_database_that_takes_no_writes(
    request: pytest.FixtureRequest, client: Client, topic: str, publish: Publish, kind: str, cause: str
) -> None:
    url = url_of(request, kind)
    root = create_engine(url)
    engine = plain_user(root) if kind == "mariadb" else create_engine(url, **_IMPATIENT.get(kind, {}))
    make_table(root)
    publish(*numbers(3))
    told = Told()
    if kind == "sqlite":
        mend = locked_sqlite(url)
    else:
        breaks = read_only_postgres if kind == "postgresql" else read_only_mariadb
        breaks(root, True)
        mend = lambda: breaks(root, False)  # noqa: E731
    with ExitStack() as stack:
        stack.callback(mend)
        with running(Consumer(client, topic, "c", engine, write, on_waiting=told)) as thread:
            until(lambda: told.has(cause) and len(told.lines) >= 2)
            assert thread.is_alive()
            stack.close()
            until(lambda: effects(root) == numbers(3))
    engine.dispose()
    root.dispose()


_IMPATIENT = {"sqlite": {"connect_args": {"timeout": 0.1}}}


def test_a_consumer_that_waits_at_its_start_says_so_and_stops(
    client: Client, topic: str, publish: Publish, caplog: pytest.LogCaptureFixture
) -> None:
    """Without `on_waiting` it is in the log."""
    publish("0")
    nobody = create_engine("postgresql+psycopg://nobody@127.0.0.1:1/nothing")
    consumer = Consumer(client, topic, "c", nobody, write)
    with running(consumer):
        until(lambda: "cannot be used now" in caplog.text)
    assert consumer.position is None


async def test_it_is_stopped_under_asyncio_too(shared_sidecar: Sidecar, topic: str, publish: Publish) -> None:
    publish("0")
    nobody = create_engine("postgresql+psycopg://nobody@127.0.0.1:1/nothing")
    async with AsyncClient(shared_sidecar.address) as client:
        consumer = Consumer(client, topic, "c", nobody, write, on_waiting=lambda failure: consumer.stop())
        await consumer.run_async()


def refused(client: Client, topic: str, url: str) -> str:
    """What a consumer ends with at once, and so does an inbox."""
    engine = create_engine(url)
    with pytest.raises(ConfigurationError) as e:
        Consumer(client, topic, "c", engine, write).run()
    assert e.value.reason == "INVALID_OUTPUT"
    with pytest.raises(ConfigurationError):
        Inbox("i", engine, write, versions=lambda message: {})
    engine.dispose()
    return e.value.message


def test_what_no_waiting_cures_ends_it(
    client: Client, topic: str, publish: Publish, postgres_url: str, mariadb_url: str, tmp_path: Path
) -> None:
    """The control arm."""
    publish("0")
    postgres = postgres_url.replace("postgresql://", "postgresql+psycopg://")
    assert "no such database" in refused(client, topic, postgres.replace("/test_", "/none_"))
    assert "does not let this user in" in refused(client, topic, postgres.replace("postgres@", "nobody@"))
    assert "no such database" in refused(client, topic, mariadb_url.replace("/test_", "/none_"))
    assert "does not let this user in" in refused(client, topic, mariadb_url.replace("root@", "root:wrong@"))
    assert "cannot be opened" in refused(client, topic, f"sqlite:///{tmp_path / 'missing' / 'database'}")


@contextmanager
def relaying(sidecar: Sidecar, url: str, topic: str, said: list[str]) -> Iterator[None]:
    """A relay that follows; it has not ended before the block has."""
    loop = asyncio.new_event_loop()

    async def relay() -> None:
        async with AsyncClient(sidecar.address) as client:
            await Relay(client, url, topic, NAME, report=said.append).run()

    task = loop.create_task(relay())
    ended: list[BaseException] = []

    def work() -> None:
        try:
            loop.run_until_complete(task)
        except BaseException as e:  # noqa: BLE001
            ended.append(e)
        loop.close()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
        assert not ended
    finally:
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(task.cancel)
        thread.join(TIMEOUT_SECONDS)
        assert not thread.is_alive()


def published(client: Client, topic: str) -> list[bytes | None]:
    with client.reader(topic) as reader:
        return [message.payload for message in reader]


def test_a_relay_waits_for_a_server_that_is_not_up(shared_sidecar: Sidecar, client: Client, topic: str) -> None:
    client.admin.create_topic(topic)
    said: list[str] = []
    with ExitStack() as stack:
        server = Restorable(fsync="off", shared_buffers="16MB")
        stack.callback(server.stop)
        server.start()
        database = Database(server.url)
        database.add(b"one", b"two")
        database.engine.dispose()
        server.crash()
        with relaying(shared_sidecar, server.url, topic, said):
            until(lambda: len(said) >= 2)
            server.start()
            until(lambda: published(client, topic) == [b"one", b"two"])
        assert "cannot be used" in said[0]
        # The control arm.
        assert "no such database" in ends(shared_sidecar, server.url.replace("/postgres?", "/none?"), topic)
        with psycopg.connect(server.url, autocommit=True) as connection:
            connection.execute("ALTER USER postgres PASSWORD 'right'")
            (server.folder / "data" / "pg_hba.conf").write_text("local all postgres scram-sha-256\n")
            connection.execute("SELECT pg_reload_conf()")
        wrong = server.url.replace("postgres@", "postgres:wrong@")
        until(lambda: not connects(wrong))
        assert "does not let this user in" in ends(shared_sidecar, wrong, topic)
        assert "does not let this user in" in ends(shared_sidecar, server.url, topic)


def connects(url: str) -> bool:
    try:
        psycopg.connect(url).close()
    except psycopg.OperationalError:
        return False
    return True


def ends(sidecar: Sidecar, url: str, topic: str) -> str:
    """What a relay that follows ends with at once."""

    async def relay() -> None:
        async with AsyncClient(sidecar.address) as client:
            await Relay(client, url, topic, NAME, report=lambda line: None).run()

    with pytest.raises(UnavailableError) as e:
        asyncio.run(relay())
    assert e.value.reason == "OUTBOX_UNAVAILABLE"
    return e.value.message


def test_a_relay_waits_for_a_file_that_takes_no_writes(
    shared_sidecar: Sidecar, client: Client, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.admin.create_topic(topic)
    monkeypatch.setattr(outbox_sqlite, "BUSY_TIMEOUT_SECONDS", 0.1)
    database = Database(f"sqlite:///{tmp_path / 'database'}")
    database.add(b"one")
    database.engine.dispose()
    free = locked_sqlite(database.url)
    said: list[str] = []
    with relaying(shared_sidecar, database.url, topic, said):
        until(lambda: len(said) >= 2)
        free()
        until(lambda: published(client, topic) == [b"one"])
    assert "lock" in said[0]
    assert "there is no file" in ends(shared_sidecar, f"sqlite:///{tmp_path / 'none'}", topic)


def test_another_process_is_first_with_each_table(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'out.db'}")

    def before(_: Any, __: Any, statement: str, *___: Any) -> None:
        if statement.strip().startswith("CREATE"):
            with closing(sqlite3.connect(tmp_path / "out.db")) as other:
                other.execute(statement)
                other.commit()

    event.listen(engine, "before_cursor_execute", before)
    make_tables(engine, METADATA)
    assert set(inspect(engine).get_table_names()) == set(METADATA.tables)
    engine.dispose()
