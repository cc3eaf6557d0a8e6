"""The consumer in one process, in three kinds of databases. Costs 20 s on an idle machine."""

import asyncio
import threading
from collections.abc import Callable

import pytest
from sqlalchemy import Connection, Engine, NullPool, create_engine, text

from seqdedupe.client import Client as AsyncClient
from seqdedupe.client.blocking import Client
from seqdedupe.client.message import Message
from seqdedupe.errors import ConfigurationError, NotFoundError, PositionError, SeqdedupeError
from seqdedupe.services.consumer import Consumer, ConsumerConfig, database
from seqdedupe.services.consumer.database import CONSUMERS, METADATA
from seqdedupe.services.outbox import Outbox
from seqdedupe.testing import Sidecar
from tests.services.conftest import Publish
from tests.services.effects import TIMEOUT_SECONDS, effects, make_table, numbers, until, write, write_all

QUICK = ConsumerConfig(first_backoff_ms=1)


@pytest.mark.parametrize("in_batches", [False, True])
def test_each_message_once_and_on_from_there(
    engine: Engine, client: Client, topic: str, publish: Publish, in_batches: bool
) -> None:
    make_table(engine)
    publish(*numbers(2500))
    handle = write_all if in_batches else write
    for count in (2500, 2600, 2600):
        consumer = Consumer(client, topic, "c", engine, handle, in_batches=in_batches)
        consumer.run(follow=False)
        assert effects(engine) == numbers(count)
        assert consumer.position is not None
        assert consumer.position.index == count - 1
        if count == 2500:
            publish(*numbers(100, 2500))


def test_transactions_have_what_is_there(sqlite: Engine, client: Client, topic: str, publish: Publish) -> None:
    """Many messages while it is behind, one when it has caught up."""
    make_table(sqlite)
    sizes: list[int] = []

    def handle(connection: Connection, messages: list[Message]) -> None:
        sizes.append(len(messages))
        write_all(connection, messages)

    publish(*numbers(3000))
    consumer = Consumer(client, topic, "c", sqlite, handle, in_batches=True)
    thread = threading.Thread(target=consumer.run)
    thread.start()
    until(lambda: sum(sizes) == 3000)
    assert max(sizes) == 1000
    assert len(sizes) < 30
    for n in range(3):
        publish(str(3000 + n))
        until(lambda n=n: sum(sizes) == 3001 + n)  # type: ignore[misc]
    assert sizes[-3:] == [1, 1, 1]
    consumer.stop()
    thread.join(TIMEOUT_SECONDS)
    assert effects(sqlite) == numbers(3003)


def test_without_follow_it_waits_for_nobody_who_has_applied_all(
    sqlite: Engine, client: Client, topic: str, publish: Publish
) -> None:
    """The other one works on for ever, and never stands back."""
    make_table(sqlite)
    publish(*numbers(3))
    working = Consumer(client, topic, "c", sqlite, write)
    thread = threading.Thread(target=working.run)
    thread.start()
    until(lambda: effects(sqlite) == numbers(3))
    once = threading.Thread(target=Consumer(client, topic, "c", sqlite, write).run, kwargs={"follow": False})
    once.start()
    once.join(TIMEOUT_SECONDS)
    is_over = not once.is_alive()
    working.stop()
    thread.join(TIMEOUT_SECONDS)
    once.join(TIMEOUT_SECONDS)
    assert is_over
    assert effects(sqlite) == numbers(3)


def test_a_batch_that_fails_is_cut_until_the_bad_message_is_alone(
    engine: Engine, client: Client, topic: str, publish: Publish
) -> None:
    make_table(engine)
    publish(*numbers(1000))
    tried: list[int] = []

    def handle(connection: Connection, messages: list[Message]) -> None:
        tried.append(len(messages))
        write_all(connection, messages)
        if any(message.index == 700 for message in messages):
            raise ValueError("700 is not to be borne")

    with pytest.raises(ConfigurationError, match=r"index 700 of .*tried 5 times.*ValueError: 700 is not") as e:
        Consumer(client, topic, "c", engine, handle, in_batches=True, config=QUICK).run(follow=False)
    assert e.value.reason == "HANDLER_FAILED"
    assert isinstance(e.value.__cause__, ValueError)
    assert effects(engine) == numbers(700)
    assert len(tried) < 40
    assert tried[-5:] == [1] * 5
    Consumer(client, topic, "c", engine, write_all, in_batches=True, purpose=f"{__name__}.{handle.__qualname__}").run(
        follow=False
    )
    assert effects(engine) == numbers(1000)


def test_what_passes_is_tried_again_in_place(engine: Engine, client: Client, topic: str, publish: Publish) -> None:
    make_table(engine)
    publish(*numbers(10))
    left = {3: 4, 7: 2}

    def handle(connection: Connection, message: Message) -> None:
        write(connection, message)
        if left.get(message.index):
            left[message.index] -= 1
            raise OSError("not now")

    Consumer(client, topic, "c", engine, handle, config=QUICK).run(follow=False)
    assert effects(engine) == numbers(10)
    # The batch, its halves, and so on take some of what the message has coming.
    assert left == {3: 0, 7: 0}


@pytest.mark.parametrize("how", ["commit", "raw commit", "rollback", "raw rollback", "close", "ddl"])
def test_a_handler_that_ends_the_transaction_is_refused(
    engine: Engine, client: Client, topic: str, publish: Publish, how: str
) -> None:
    make_table(engine)
    publish(*numbers(2))

    def handle(connection: Connection, message: Message) -> None:
        write(connection, message)
        if how == "ddl":
            connection.execute(text("CREATE TABLE IF NOT EXISTS other (x INTEGER)"))
        elif how.startswith("raw"):
            connection.exec_driver_sql(how.split()[1].upper())
        else:
            getattr(connection, how)()

    consumer = Consumer(client, topic, "c", engine, handle, config=QUICK)
    if how == "ddl" and engine.dialect.name not in ("mysql", "mariadb"):
        consumer.run(follow=False)  # there it is part of the transaction
        return
    with pytest.raises(ConfigurationError) as e:
        consumer.run(follow=False)
    assert e.value.reason == "TRANSACTION_ENDED"
    with engine.begin() as connection:
        assert connection.execute(CONSUMERS.select()).one().position.endswith("/start@-1")


def test_handlers_may_add_to_an_outbox(engine: Engine, client: Client, topic: str, publish: Publish) -> None:
    """In any database: of text as of JSON."""
    columns = ", ".join(f"{name} VARCHAR(100)" for name in ("id", "aggregatetype", "aggregateid", "type", "payload"))
    with engine.begin() as connection:
        connection.execute(text(f"CREATE TABLE outbox ({columns})"))

    def handle(connection: Connection, message: Message) -> None:
        Outbox(connection).add("order", "7", "OrderPlaced", (message.payload or b"").decode())
        Outbox(connection).add("order", "7", "OrderPlaced", {"order": message.index})

    publish("one")
    Consumer(client, topic, "c", engine, handle).run(follow=False)
    with engine.begin() as connection:
        found = connection.execute(text("SELECT payload FROM outbox")).scalars().all()
    assert sorted(found) == ["one", '{"order": 0}']


def test_handlers_may_use_savepoints(engine: Engine, client: Client, topic: str, publish: Publish) -> None:
    make_table(engine)
    publish(*numbers(4))

    def handle(connection: Connection, message: Message) -> None:
        with connection.begin_nested() as nested:
            write(connection, message)
            if message.index % 2:
                nested.rollback()

    Consumer(client, topic, "c", engine, handle).run(follow=False)
    assert effects(engine) == ["0", "2"]


def test_tables_that_are_half_made_are_completed(
    mariadb_url: str, client: Client, topic: str, publish: Publish
) -> None:
    """MariaDB commits each statement that makes one: tables are there without those that come later, or without their
    indexes."""
    root = create_engine(mariadb_url)
    database = root.url.database
    make_table(root)
    publish("0")
    with root.begin() as connection:
        connection.execute(text("CREATE OR REPLACE USER half@localhost"))
        connection.execute(text(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {database}.* TO half@localhost"))
    engine = create_engine(root.url.set(username="half"), poolclass=NullPool)  # what is granted counts for new sessions

    def consume() -> str:
        try:
            Consumer(client, topic, "c", engine, write).run(follow=False)
        except ConfigurationError as e:
            return str(e)
        return ""

    indexes = {index.name for made in METADATA.sorted_tables for index in made.indexes}
    for right in (*(f"CREATE ON {database}.{name}" for name in sorted(METADATA.tables)), f"INDEX ON {database}.*"):
        said = consume()
        assert "command denied" in said
        assert "[INVALID_OUTPUT]" in said
        with root.begin() as connection:
            connection.execute(text(f"GRANT {right} TO half@localhost"))
    assert (consume(), effects(root)) == ("", ["0"])
    with root.begin() as connection:
        found = connection.execute(
            text("SELECT index_name FROM information_schema.statistics WHERE table_schema = :of"), {"of": database}
        )
        assert indexes <= set(found.scalars())
        connection.execute(text("DROP USER half@localhost"))
    engine.dispose()
    root.dispose()


def test_tables_without_transactions_are_refused(
    mariadb_url: str, client: Client, topic: str, publish: Publish
) -> None:
    engine = create_engine(mariadb_url)
    make_table(engine, " ENGINE=MyISAM")
    publish(*numbers(2))
    with pytest.raises(ConfigurationError, match=r"the table effects has no .* in hand: the messages 0 to 1 of ") as e:
        Consumer(client, topic, "c", engine, write).run(follow=False)
    assert (e.value.reason, e.value.hint) == ("NOT_TRANSACTIONAL", "ALTER TABLE effects ENGINE = InnoDB")
    assert effects(engine) == []
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE seqdedupe_consumers ENGINE = Aria"))
    with pytest.raises(ConfigurationError, match="seqdedupe_consumers has no transactions"):
        Consumer(client, topic, "c", engine, write).run(follow=False)
    engine.dispose()


WRITES = {
    "its own engine": ("ALTER TABLE copies ENGINE = MyISAM", True),
    "an engine without savepoints": ("ALTER TABLE copies ENGINE = Aria", True),
    "a trigger": ("CREATE TRIGGER t AFTER INSERT ON copies FOR EACH ROW INSERT INTO old VALUES (NEW.place)", True),
    "a view": ("DROP TABLE copies; CREATE VIEW copies AS SELECT * FROM old", True),
    "none": ("ALTER TABLE copies ENGINE = InnoDB", False),
    "a temporary table": ("CREATE TEMPORARY TABLE copies (place BIGINT) ENGINE=MEMORY", False),
    "a temporary table that is not there": ("DROP TEMPORARY TABLE IF EXISTS gone", False),
}


@pytest.mark.parametrize(("statements", "is_refused"), WRITES.values(), ids=WRITES)
def test_a_write_that_ends_in_a_table_without_transactions_is_found(
    mariadb_url: str, client: Client, topic: str, publish: Publish, statements: str, is_refused: bool
) -> None:
    """The table is altered while the consumer runs, or is one that no statement names."""
    engine = create_engine(mariadb_url)
    make_table(engine)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE copies (place BIGINT)"))
        connection.execute(text("CREATE TABLE old (place BIGINT) ENGINE=MEMORY"))
    publish("0")
    to_alter = statements.split("; ")

    def handle(connection: Connection, message: Message) -> None:
        while to_alter:
            with engine.begin() as other:
                (connection if "TEMPORARY" in statements else other).execute(text(to_alter.pop(0)))
        connection.execute(text("INSERT INTO copies VALUES (:place)"), {"place": message.index})
        write(connection, message)

    run = Consumer(client, topic, "c", engine, handle).run
    if is_refused:
        with pytest.raises(ConfigurationError, match="has no transactions") as e:
            run(follow=False)
        assert e.value.reason == "NOT_TRANSACTIONAL"
        assert "old" in e.value.message
        assert effects(engine) == []
    else:
        run(follow=False)
        assert effects(engine) == ["0"]
    engine.dispose()


def test_an_engine_that_commits_each_statement_is_refused(
    url: str, client: Client, topic: str, publish: Publish
) -> None:
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    make_table(engine)
    publish("1")
    with pytest.raises(ConfigurationError, match="the consumer's engine commits each statement") as e:
        Consumer(client, topic, "c", engine, write).run(follow=False)
    assert 'no isolation_level="AUTOCOMMIT"' in e.value.hint
    assert effects(engine) == []
    with engine.begin() as connection:
        assert not connection.execute(CONSUMERS.select()).all()
    engine.dispose()


def test_a_name_has_one_topic_and_one_purpose(engine: Engine, client: Client, topic: str, publish: Publish) -> None:
    make_table(engine)
    publish("1")
    Consumer(client, topic, "c", engine, write).run(follow=False)
    client.admin.create_topic(f"{topic}-other")
    for other in (
        Consumer(client, f"{topic}-other", "c", engine, write),
        Consumer(client, topic, "c", engine, write_all),
    ):
        with pytest.raises(ConfigurationError) as e:
            other.run(follow=False)
        assert e.value.reason == "CONSUMER_CHANGED"
    # Names are distinguished byte by byte.
    Consumer(client, topic, "C", engine, write).run(follow=False)
    assert effects(engine) == ["1", "1"]


def test_a_topic_made_anew_is_noticed(sqlite: Engine, client: Client, topic: str, publish: Publish) -> None:
    make_table(sqlite)
    publish(*numbers(3))
    Consumer(client, topic, "c", sqlite, write).run(follow=False)
    client.admin.delete_topic(topic)
    publish(*numbers(5))
    with pytest.raises(PositionError) as e:
        Consumer(client, topic, "c", sqlite, write).run(follow=False)
    assert e.value.reason == "POSITION_OF_ANOTHER_INCARNATION"
    assert effects(sqlite) == numbers(3)


def test_it_starts_where_it_is_told(sqlite: Engine, client: Client, topic: str, publish: Publish) -> None:
    make_table(sqlite)
    publish(*numbers(5))
    Consumer(client, topic, "late", sqlite, write, start="latest").run(follow=False)
    publish("5")
    Consumer(client, topic, "late", sqlite, write, start="latest").run(follow=False)
    assert effects(sqlite) == ["5"]
    Consumer(client, topic, "there", sqlite, write, start=client.position_at(topic, 3)).run(follow=False)
    assert effects(sqlite) == ["4", "5", "5"]


def test_what_cannot_be(sqlite: Engine, client: Client, topic: str, publish: Publish) -> None:
    async def coroutine(connection: Connection, message: Message) -> None:
        raise AssertionError

    def refused(reason: str, do: Callable[[], object]) -> SeqdedupeError:
        with pytest.raises(SeqdedupeError) as e:
            do()
        assert e.value.reason == reason
        return e.value

    refused("INVALID_OPTION", lambda: Consumer(client, topic, "", sqlite, write))
    refused("INVALID_OPTION", lambda: Consumer(client, topic, "a\nb", sqlite, write))
    refused("INVALID_OPTION", lambda: Consumer(client, topic, "c", "sqlite://", write))  # type: ignore[arg-type]
    refused("INVALID_OPTION", lambda: Consumer(client, topic, "c", sqlite, coroutine))
    for start in ("middle", 5, None):
        refused("INVALID_OPTION", lambda: Consumer(client, topic, "c", sqlite, write, start=start))  # type: ignore[arg-type]  # noqa: B023
    refused("INVALID_OPTION", lambda: ConsumerConfig(max_attempts=0))
    refused("INVALID_OPTION", lambda: ConsumerConfig(poison="ignore"))  # type: ignore[arg-type]
    refused("INVALID_OPTION", lambda: ConsumerConfig(first_backoff_ms=-1))
    refused("INVALID_TOPIC_NAME", lambda: Consumer(client, "a b", "c", sqlite, write))
    with pytest.raises(NotFoundError):
        Consumer(client, topic, "c", sqlite, write).run(follow=False)
    publish("1")
    consumer = Consumer(client, topic, "c", sqlite, lambda *given: coroutine(*given))
    refused("INVALID_OPTION", lambda: consumer.run(follow=False))
    refused("INVALID_OPTION", lambda: asyncio.run(consumer.run_async()))
    # Its own table is another program's, and the handler's is not there.
    refused("HANDLER_FAILED", lambda: Consumer(client, topic, "d", sqlite, write, config=QUICK).run(follow=False))
    METADATA.drop_all(sqlite)
    with sqlite.begin() as connection:
        connection.execute(text("CREATE TABLE seqdedupe_parked (consumer TEXT)"))
    failure = refused("INVALID_OUTPUT", lambda: Consumer(client, topic, "c", sqlite, write).run(follow=False))
    assert "no column attempts" in failure.message


async def test_asyncio(engine: Engine, shared_sidecar: Sidecar, topic: str, publish: Publish) -> None:
    make_table(engine)
    await asyncio.to_thread(publish, *numbers(100))
    async with AsyncClient(shared_sidecar.address) as client:
        await Consumer(client, topic, "c", engine, write).run_async(follow=False)
        assert effects(engine) == numbers(100)
        with pytest.raises(ConfigurationError, match="purpose"):
            await Consumer(client, topic, "c", engine, write_all).run_async(follow=False)


async def test_cancelled_at_any_time_it_ends_with_that(
    sqlite: Engine, shared_sidecar: Sidecar, topic: str, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of a millisecond through the start, the messages, and the waiting for more; twice at a time too."""
    make_table(sqlite)
    await asyncio.to_thread(publish, *numbers(40))
    config = ConsumerConfig(max_batch_messages=1)
    for step in range(60):
        async with AsyncClient(shared_sidecar.address) as client:
            consumer = Consumer(client, topic, "c", sqlite, write, config=config)
            task = asyncio.create_task(consumer.run_async())
            await asyncio.sleep(step / 1000)
            task.cancel()
            if step % 2:
                await asyncio.sleep(0)
                task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        # Nothing of it goes on: no thread, no transaction, nobody whom another one would wait for.
        assert not [thread for thread in threading.enumerate() if thread.name == "seqdedupe-c"]
        found = effects(sqlite)
        assert found == numbers(len(found))
    async with AsyncClient(shared_sidecar.address) as client:
        monkeypatch.setattr(database, "TAKE_OVER_SECONDS", 1e9)
        await Consumer(client, topic, "c", sqlite, write).run_async(follow=False)
    assert effects(sqlite) == numbers(40)


def test_names_that_differ_by_case_or_a_blank_are_two(engine: Engine, client: Client, topic: str) -> None:
    """In MariaDB also text with a binary collation is the same as with a blank behind it."""
    make_table(engine)
    with client.producer(topic, "p") as producer:
        producer.send(b"1")
    for name in ("one", "one ", "One"):
        Consumer(client, topic, name, engine, write, purpose="p").run(follow=False)
    assert effects(engine) == ["1"] * 3
