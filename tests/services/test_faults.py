"""Whose fault a failure is: messages that end the connection, and databases that take no writes. Costs 20 s."""

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, event, select, text
from sqlalchemy.exc import OperationalError

from seqdedupe.client.blocking import Client
from seqdedupe.client.message import Message
from seqdedupe.errors import ConfigurationError, SeqdedupeError, UnavailableError
from seqdedupe.services.consumer import Consumer, ConsumerConfig, database
from seqdedupe.services.consumer import consumer as consumer_module
from seqdedupe.services.consumer.database import DEAD_LETTERS
from seqdedupe.services.consumer.dead_letters import retry
from seqdedupe.services.consumer.work import Poison
from seqdedupe.services.inbox import Inbox
from tests.services.conftest import Publish, url_of
from tests.services.effects import TIMEOUT_SECONDS, effects, make_table, numbers, until, write, write_all

DEAD = ConsumerConfig(max_attempts=2, first_backoff_ms=1, poison="dead letter")


class Told:
    """What a consumer says while it waits."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, failure: UnavailableError) -> None:
        self.lines.append(str(failure))

    def has(self, *words: str) -> bool:
        return any(all(word in line for word in words) for line in self.lines)


@contextmanager
def running(consumer: Consumer) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=consumer.run)
    thread.start()
    try:
        yield thread
    finally:
        consumer.stop()
        thread.join(TIMEOUT_SECONDS)
        assert not thread.is_alive()


def dead(engine: Engine) -> list[tuple[int, str]]:
    with engine.begin() as connection:
        wanted = select(DEAD_LETTERS.c.message_index, DEAD_LETTERS.c.error).order_by(DEAD_LETTERS.c.message_index)
        return [(row.message_index, row.error) for row in connection.execute(wanted)]


@pytest.fixture
def postgres(request: pytest.FixtureRequest) -> Iterator[Engine]:
    made = create_engine(url_of(request, "postgresql"))
    make_table(made)
    yield made
    made.dispose()


@pytest.fixture
def mariadb(request: pytest.FixtureRequest) -> Iterator[Engine]:
    made = create_engine(url_of(request, "mariadb"))
    make_table(made)
    yield made
    made.dispose()


def terminates(connection: Connection) -> None:
    """The statement costs the server its process."""
    connection.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))


def idles(connection: Connection) -> None:
    """Longer than the server lets it."""
    connection.execute(text("SET idle_in_transaction_session_timeout = 1"))
    pid = connection.execute(text("SELECT pg_backend_pid()")).scalar_one()
    # In a transaction the server would show the same processes again and again.
    with connection.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as other:
        there = text("SELECT count(*) FROM pg_stat_activity WHERE pid = :pid")
        until(lambda: not other.execute(there, {"pid": pid}).scalar_one())
    connection.execute(text("SELECT 1"))


def takes_too_long(connection: Connection) -> None:
    connection.execute(text("SET LOCAL statement_timeout = 1"))
    connection.execute(text("SELECT pg_sleep(60)"))


@pytest.mark.parametrize("ends", [terminates, idles, takes_too_long])
def test_a_message_that_ends_the_connection_is_named(
    postgres: Engine, client: Client, topic: str, publish: Publish, ends: Callable[[Connection], None]
) -> None:
    publish(*numbers(20))

    def handle(connection: Connection, message: Message) -> None:
        write(connection, message)
        if message.index == 7:
            ends(connection)

    Consumer(client, topic, "c", postgres, handle, config=DEAD).run(follow=False)
    assert effects(postgres) == sorted(set(numbers(20)) - {"7"}, key=int)
    [(index, why)] = dead(postgres)
    assert index == 7
    assert any(word in why for word in ("ended", "lost", "ended the connection"))


@pytest.mark.parametrize("poison", ["retry later", "stop"])
def test_a_message_that_is_larger_than_a_packet(mariadb: Engine, client: Client, topic: str, poison: Poison) -> None:
    """Nor does it fit into the dead letters: only its place stands there."""
    with client.producer(topic, "p") as producer:
        for payload in (b"0", b"1", bytes(3_000_000), b"3", b"4"):
            producer.send(payload)

    def handle(connection: Connection, message: Message) -> None:
        write(connection, message)
        connection.execute(text("INSERT INTO payloads VALUES (:payload)"), {"payload": message.payload})

    with mariadb.connect() as connection:
        connection.execute(text("CREATE TABLE payloads (payload LONGBLOB)"))
        largest = connection.execute(text("SELECT @@GLOBAL.max_allowed_packet")).scalar_one()
        connection.execute(text("SET GLOBAL max_allowed_packet = 1048576"))
    mariadb.dispose()
    run = Consumer(client, topic, "c", mariadb, handle, config=replace(DEAD, poison=poison)).run
    try:
        if poison == "stop":
            with pytest.raises(ConfigurationError, match=r"index 2 of .*max_allowed_packet"):
                run(follow=False)
            assert effects(mariadb) == ["0", "1"]
        else:
            run(follow=False)
            assert effects(mariadb) == ["0", "1", "3", "4"]
            [(index, why)] = dead(mariadb)
            assert index == 2
            assert "max_allowed_packet" in why
            with pytest.raises(SeqdedupeError, match="without their content"):
                retry(mariadb, "c", [2])
    finally:
        with mariadb.connect() as connection:
            connection.execute(text(f"SET GLOBAL max_allowed_packet = {largest}"))
        mariadb.dispose()


def read_only_postgres(engine: Engine, on: bool) -> None:
    """As a server that was failed over to: connections are gone, and new ones take no writes."""
    name = engine.url.database
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("SET default_transaction_read_only = off"))
        connection.execute(text(f"ALTER DATABASE {name} SET default_transaction_read_only = {'on' if on else 'off'}"))
        others = (
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = :name AND pid <> pg_backend_pid()"
        )
        connection.execute(text(others), {"name": name})
    engine.dispose()


def read_only_mariadb(engine: Engine, on: bool) -> None:
    with engine.connect() as connection:
        connection.execute(text(f"SET GLOBAL read_only = {int(on)}"))


def full_sqlite(engine: Engine, on: bool) -> None:
    """The file may not grow."""
    if on:
        event.listen(engine, "connect", _may_not_grow)
    else:
        event.remove(engine, "connect", _may_not_grow)
    engine.dispose()


def _may_not_grow(connection: Any, _record: object) -> None:
    connection.execute("PRAGMA max_page_count = 1")


@pytest.mark.parametrize(
    ("kind", "breaks", "cause", "poison"),
    [
        ("postgresql", read_only_postgres, "read-only", "stop"),
        ("mariadb", read_only_mariadb, "read-only", "dead letter"),
        ("sqlite", full_sqlite, "disk", "retry later"),
    ],
)
def test_a_database_that_takes_no_writes_is_waited_for(
    request: pytest.FixtureRequest,
    client: Client,
    topic: str,
    publish: Publish,
    kind: str,
    breaks: Callable[[Engine, bool], None],
    cause: str,
    poison: Poison,
) -> None:
    """However long: it is said, and no message is to blame."""
    url = url_of(request, kind)
    engine, others = create_engine(url), create_engine(url)
    make_table(engine)
    if kind == "mariadb":
        engine = plain_user(others)
    told = Told()
    publish(*numbers(3))

    def handle(connection: Connection, message: Message) -> None:
        write(connection, message)
        connection.execute(text("INSERT INTO bulk VALUES (:bulk)"), {"bulk": "x" * 100_000})

    with engine.begin() as connection:
        connection.execute(
            text("CREATE TABLE bulk (bulk TEXT)" if kind != "mariadb" else "CREATE TABLE bulk (bulk LONGTEXT)")
        )
    config = replace(DEAD, poison=poison, max_attempts=1)
    try:
        with running(Consumer(client, topic, "c", engine, handle, config=config, on_waiting=told)) as thread:
            until(lambda: effects(others) == numbers(3))
            breaks(engine if kind == "sqlite" else others, True)
            try:
                publish(*numbers(10, 3))
                until(lambda: told.has(cause) and len(told.lines) >= 2)
                assert thread.is_alive()
                assert dead(others) == []
            finally:
                breaks(engine if kind == "sqlite" else others, False)
            until(lambda: effects(others) == numbers(13))
        assert dead(others) == []
    finally:
        engine.dispose()
        others.dispose()


def plain_user(root: Engine) -> Engine:
    """Root writes into a read-only MariaDB."""
    with root.connect() as connection:
        connection.execute(text("CREATE USER IF NOT EXISTS plain@localhost IDENTIFIED BY 'plain'"))
        connection.execute(text("GRANT ALL ON *.* TO plain@localhost"))
        connection.execute(text("REVOKE SUPER, READ ONLY ADMIN ON *.* FROM plain@localhost"))
    return create_engine(root.url.set(username="plain", password="plain"))


def test_a_full_disk_onto_which_a_dead_letter_fits(
    client: Client, topic: str, publish: Publish, sqlite: Engine
) -> None:
    """A small write works, and no message is set aside all the same: the handler's rows find no room."""
    make_table(sqlite)
    told = Told()
    has_room = threading.Event()
    publish(*numbers(5))

    def handle(connection: Connection, message: Message) -> None:
        write(connection, message)
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        connection.exec_driver_sql(f"PRAGMA max_page_count = {10**6 if has_room.is_set() else pages + 5}")
        connection.exec_driver_sql("CREATE TABLE IF NOT EXISTS reports (report BLOB)")
        connection.exec_driver_sql("INSERT INTO reports VALUES (zeroblob(400000))")

    config = replace(DEAD, max_attempts=1)
    with running(Consumer(client, topic, "c", sqlite, handle, config=config, on_waiting=told)):
        until(lambda: told.has("disk", "the message with index 0"))
        assert dead(sqlite) == []
        has_room.set()
        until(lambda: effects(sqlite) == numbers(5))
    assert dead(sqlite) == []


def test_a_deadlock_is_repeated_whole(postgres: Engine, client: Client, topic: str, publish: Publish) -> None:
    publish(*numbers(8))
    sizes: list[int] = []

    def handle(connection: Connection, messages: list[Message]) -> None:
        sizes.append(len(messages))
        for message in messages:
            write(connection, message)
        if len(sizes) <= 3:
            connection.execute(text("DO $$ BEGIN RAISE EXCEPTION 'said' USING ERRCODE = '40P01'; END $$"))

    config = replace(DEAD, max_attempts=1)
    Consumer(client, topic, "c", postgres, handle, in_batches=True, config=config).run(follow=False)
    assert sizes == [8] * 4
    assert effects(postgres) == numbers(8)
    assert dead(postgres) == []


@pytest.mark.parametrize("in_batches", [False, True])
def test_messages_that_only_work_together_are_applied_together(
    postgres: Engine, client: Client, topic: str, publish: Publish, in_batches: bool
) -> None:
    """Their rows refer to each other, and a bad message cuts their batch; of others one comes later, or never."""
    with postgres.begin() as connection:
        connection.execute(
            text("CREATE TABLE circle (id text PRIMARY KEY, next text REFERENCES circle DEFERRABLE INITIALLY DEFERRED)")
        )
    publish("bad", "a b", "b a", "c c", "bad", "d e", "e d", "f none", "g g", "h i")
    tried: list[str] = []

    def handle(connection: Connection, given: Any) -> None:
        for message in given if in_batches else [given]:
            row, _, to = (message.payload or b"").decode().partition(" ")
            tried.append(row)
            if row == "bad":
                raise ValueError("not this one")
            if row == "h" and tried.count("h") == 1:
                publish("i h")
            connection.execute(text("INSERT INTO circle VALUES (:row, :to)"), {"row": row, "to": to})

    consumer = Consumer(client, topic, "c", postgres, handle, in_batches=in_batches, config=DEAD)
    with running(consumer), postgres.connect() as connection:

        def rows() -> list[str]:
            with connection.begin():
                return list(connection.execute(text("SELECT id FROM circle ORDER BY id")).scalars())

        until(lambda: rows() == list("abcdeghi"))
    assert [index for index, _ in dead(postgres)] == [0, 4, 7]


def test_a_server_that_was_restarted_is_to_blame(
    postgres: Engine, client: Client, topic: str, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that ended is no attempt if the server is younger than the attempt."""
    ages = iter([0.0] * 10)
    monkeypatch.setattr(database, "age_seconds", lambda connection: next(ages, float("inf")))
    publish("0")
    tried: list[int] = []

    def handle(connection: Connection, message: Message) -> None:
        tried.append(message.index)
        write(connection, message)
        if len(tried) <= 10:
            terminates(connection)

    monkeypatch.setattr(consumer_module, "LONGEST_AWAY_SECONDS", 0.001)
    Consumer(client, topic, "c", postgres, handle, config=DEAD).run(follow=False)
    assert len(tried) == 11
    assert effects(postgres) == ["0"]
    assert dead(postgres) == []


def test_a_parked_message_that_ends_the_connection_is_passed_over(
    postgres: Engine, client: Client, topic: str, publish: Publish
) -> None:
    """What wakes it is applied, and what a deferred constraint refuses is not its fault either."""
    with postgres.begin() as connection:
        connection.execute(text("ALTER TABLE effects ADD CONSTRAINT one UNIQUE (what) DEFERRABLE INITIALLY DEFERRED"))
    publish("a2", "b2", "a1", "b1", keys=["a", "b", "a", "b"])

    def handle(connection: Connection, message: Message) -> None:
        write(connection, message)
        if message.payload == b"a2":
            terminates(connection)
        if message.payload == b"b2":
            connection.execute(text("INSERT INTO effects VALUES (9, 'b2')"))

    inbox = Inbox(
        "i",
        postgres,
        handle,
        key=lambda message: message.key or b"",
        version=lambda message: int((message.payload or b"")[1:]),
    )
    Consumer(client, topic, "c", postgres, inbox, config=DEAD).run(follow=False)
    assert sorted(effects(postgres)) == ["a1", "b1"]
    assert dead(postgres) == []
    errors = {one.message.payload: one.error for one in inbox.waiting()}
    assert "connection" in errors[b"a2"]
    assert "duplicate key" in errors[b"b2"]


@pytest.mark.parametrize("kind", ["postgresql", "mariadb"])
def test_who_stands_by_says_who_holds_the_row(
    request: pytest.FixtureRequest,
    client: Client,
    topic: str,
    publish: Publish,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """A consumer that is frozen within a transaction; its session is ended, as is said."""
    monkeypatch.setattr(database, "HELD_SECONDS", 0.0)
    engine = create_engine(url_of(request, kind))
    make_table(engine)
    publish("0")
    has_begun, may_end = threading.Event(), threading.Event()
    sessions: list[int] = []
    told = Told()

    def freezes(connection: Connection, message: Message) -> None:
        mine = "SELECT pg_backend_pid()" if kind == "postgresql" else "SELECT CONNECTION_ID()"
        sessions.append(connection.execute(text(mine)).scalar_one())
        write(connection, message)
        has_begun.set()
        may_end.wait(TIMEOUT_SECONDS)

    frozen = Consumer(client, topic, "c", engine, freezes, purpose="p", config=DEAD)
    second = Consumer(client, topic, "c", engine, write, purpose="p", on_waiting=told)
    with running(frozen):
        has_begun.wait(TIMEOUT_SECONDS)
        with running(second):
            until(lambda: told.has(str(sessions[0]), "seconds ago"))
            hint = f"SELECT pg_terminate_backend({sessions[0]})" if kind == "postgresql" else f"KILL {sessions[0]}"
            with engine.connect() as connection:
                connection.execute(text(hint))
            until(lambda: effects(engine) == ["0"])
            frozen.stop()
            may_end.set()
    assert effects(engine) == ["0"]
    engine.dispose()


@pytest.mark.parametrize("in_batches", [False, True])
def test_transactions_are_bounded_by_time(
    sqlite: Engine, client: Client, topic: str, publish: Publish, in_batches: bool
) -> None:
    make_table(sqlite)
    publish(*numbers(40))
    sizes: list[int] = []

    def handle(connection: Connection, given: Any) -> None:
        for message in given if in_batches else [given]:
            write(connection, message)
            time.sleep(0.02)

    @event.listens_for(sqlite, "commit")
    def look(_connection: Connection) -> None:
        with sqlite.connect() as other:
            sizes.append(len(other.execute(text("SELECT 1 FROM effects")).all()))

    config = ConsumerConfig(max_batch_messages=20, longest_transaction_ms=100)
    Consumer(client, topic, "c", sqlite, handle, in_batches=in_batches, config=config).run(follow=False)
    assert effects(sqlite) == numbers(40)
    assert len(set(sizes)) >= 4  # a transaction with all of them would show once


def test_what_is_told_of_waiting_ends_nothing(
    sqlite: Engine, client: Client, topic: str, publish: Publish, caplog: pytest.LogCaptureFixture
) -> None:
    """A function that takes no error, for instance: it is first called when the database is away."""
    make_table(sqlite)
    publish("0")
    full = [sqlite3.OperationalError("full")]
    full[0].sqlite_errorcode = sqlite3.SQLITE_FULL

    def handle(connection: Connection, message: Message) -> None:
        write(connection, message)
        while full:
            raise OperationalError("INSERT", {}, full.pop())

    wrong: Any = lambda: None  # noqa: E731
    Consumer(client, topic, "c", sqlite, handle, on_waiting=wrong).run(follow=False)
    assert effects(sqlite) == ["0"]
    assert (
        "on_waiting failed when it was called with: the consumer's database cannot be used now: the disk" in caplog.text
    )


def test_a_partition_that_no_crash_outlives(postgres: Engine, client: Client, topic: str, publish: Publish) -> None:
    """It is added while the consumer runs: the transaction itself is asked where it has written."""
    publish("0", "1")
    with postgres.begin() as connection:
        connection.execute(text("CREATE TABLE parts (n int) PARTITION BY RANGE (n)"))
        connection.execute(text("CREATE TABLE kept PARTITION OF parts FOR VALUES FROM (0) TO (1)"))

    def handle(connection: Connection, message: Message) -> None:
        write(connection, message)
        if message.index == 1:
            with postgres.begin() as other:
                other.execute(text("CREATE UNLOGGED TABLE added PARTITION OF parts FOR VALUES FROM (1) TO (2)"))
        connection.execute(text("INSERT INTO parts VALUES (:n)"), {"n": message.index})

    config = replace(DEAD, max_batch_messages=1)
    with pytest.raises(SeqdedupeError, match="added is an unlogged table") as raised:
        Consumer(client, topic, "c", postgres, handle, config=config).run(follow=False)
    assert raised.value.reason == "NOT_TRANSACTIONAL"
    assert effects(postgres) == ["0"]
    # For a batch the message is named that wrote there, and what is before it stays.
    with postgres.begin() as connection:
        connection.execute(text("CREATE TABLE rest PARTITION OF parts FOR VALUES FROM (2) TO (9)"))
        connection.execute(text("DELETE FROM seqdedupe_consumers"))
        connection.execute(text("DELETE FROM effects"))
    publish(*numbers(3, 2))

    def insert_all(connection: Connection, messages: list[Message]) -> None:
        write_all(connection, messages)
        for message in messages:
            connection.execute(text("INSERT INTO parts VALUES (:n)"), {"n": message.index})

    consumer = Consumer(client, topic, "c", postgres, insert_all, in_batches=True, config=DEAD)
    with pytest.raises(SeqdedupeError, match=r"in hand: the message with index 1 of ") as raised:
        consumer.run(follow=False)
    assert raised.value.hint == "ALTER TABLE added SET LOGGED"
    assert effects(postgres) == ["0"]
    with postgres.begin() as connection:
        connection.execute(text(raised.value.hint))
    Consumer(client, topic, "c", postgres, insert_all, in_batches=True, purpose=consumer.purpose).run(follow=False)
    assert effects(postgres) == numbers(5)
