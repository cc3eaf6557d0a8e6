"""The relay on real databases with a real sidecar: each row once, no matter what it is made of.

Costs: one sidecar, one PostgreSQL, about 20 seconds.
"""

import asyncio
import json
import time
import uuid
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from seqdedupe.client import Client
from seqdedupe.errors import ConfigurationError, FencedError, InvalidRequestError, SeqdedupeError, UnavailableError
from seqdedupe.limits import MAX_PAYLOAD_BYTES
from seqdedupe.services.outbox import Outbox, Relay, ddl, run_relay
from seqdedupe.services.outbox.relay import token_name
from seqdedupe.services.outbox.store import PAGE_ROWS, RowPage, open_store
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from tests.services.outbox.conftest import NAME, Database, messages, payloads, relay_all


async def test_rows_become_messages_and_go(shared_sidecar: Sidecar, topic: str, database: Database) -> None:
    with database.engine.begin() as connection:
        one = Outbox(connection).add("order", "7", "OrderPlaced", b"\x00\xff", id=uuid.uuid4())
        Outbox(connection).add("order", "8", "OrderPaid", None)
    counters = await relay_all(shared_sidecar, database, topic)
    first, second = await messages(shared_sidecar, topic)
    assert (first.payload, first.key, second.payload, second.key) == (b"\x00\xff", b"7", None, b"8")
    assert first.properties == {"id": str(one), "aggregatetype": "order", "type": "OrderPlaced"}
    assert first.producer_name == token_name(NAME, database.token)
    assert (counters.published, counters.found, counters.set_aside, database.rows()) == (2, 0, 0, 0)
    # Begun again there is nothing to do, and what comes then goes on after that.
    database.add(b"third")
    assert (await relay_all(shared_sidecar, database, topic)).published == 1
    assert await payloads(shared_sidecar, topic) == [b"\x00\xff", b"", b"third"]


async def test_a_topic_of_deduplication_ids_is_refused_before_the_outbox_is_bound(
    shared_sidecar: Sidecar, topic: str, database: Database
) -> None:
    """The hint can be followed: the outbox is not bound to the wrong topic."""
    async with Client(shared_sidecar.address) as client:
        await client.admin.create_topic(topic, deduplication_mode="deduplication-id", partitions=2)
        for rows in range(2):  # without rows, too
            with pytest.raises(ConfigurationError, match=f"{topic} is a topic of deduplication IDs") as e:
                await relay_all(shared_sidecar, database, topic)
            assert e.value.reason == "INVALID_OPTION"
            assert "seqdedupe topics create NAME" in e.value.hint
            bound = database.value("SELECT count(*) FROM outbox_token WHERE producer IS NOT NULL OR topic IS NOT NULL")
            assert (bound, database.rows()) == (0, rows)
            database.add(b"one")
        await client.admin.create_topic(f"{topic}-2")
    assert (await relay_all(shared_sidecar, database, f"{topic}-2")).published == 2


async def test_rows_for_a_topic_of_deduplication_ids_are_set_aside(
    shared_sidecar: Sidecar, topic: str, database: Database
) -> None:
    async with Client(shared_sidecar.address) as client:
        await client.admin.create_topic(f"{topic}-order", deduplication_mode="deduplication-id")
    database.add(b"one")
    database.add(b"two", kind="invoice")
    counters = await relay_all(shared_sidecar, database, topic + "-{aggregatetype}")
    assert (counters.published, counters.set_aside, database.rows()) == (1, 1, 0)
    assert "is a topic of deduplication IDs" in database.value("SELECT reason FROM outbox_aside")


async def test_nothing_is_bound_before_the_sidecar_answers(tmp_path: Path) -> None:
    """A relay that follows waits: the kind of its topic is not known."""
    database = Database(f"sqlite:///{tmp_path / 'shop.db'}")
    async with Client("127.0.0.1:1") as client:
        relay = Relay(client, database.url, "t", NAME)
        running = asyncio.create_task(relay.run())
        try:
            async with asyncio.timeout(LAST_RESORT_SECONDS):
                while relay.activity.failures.total() < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert database.value("SELECT topic FROM outbox_token") is None
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            database.engine.dispose()


async def test_what_is_rolled_back_is_not_published(shared_sidecar: Sidecar, topic: str, database: Database) -> None:
    with database.engine.connect() as connection:
        Outbox(connection).add("order", "7", "OrderPlaced", b"never")
        connection.rollback()
        Outbox(connection).add("order", "7", "OrderPlaced", b"once")
        connection.commit()
    await relay_all(shared_sidecar, database, topic)
    assert await payloads(shared_sidecar, topic) == [b"once"]


async def test_a_row_that_was_published_and_not_deleted_is_not_published_again(
    shared_sidecar: Sidecar, topic: str, database: Database
) -> None:
    """As after a kill between the receipt and the delete."""
    database.script("CREATE TABLE kept AS SELECT * FROM outbox")
    database.add(b"one", b"two", b"three")
    database.script("INSERT INTO kept SELECT * FROM outbox")
    await relay_all(shared_sidecar, database, topic)
    database.script("INSERT INTO outbox SELECT * FROM kept")
    token = database.token
    counters = await relay_all(shared_sidecar, database, topic)
    assert (counters.published, counters.found, database.rows(), database.token) == (0, 3, 0, token)
    assert await payloads(shared_sidecar, topic) == [b"one", b"two", b"three"]


async def test_old_numbers_with_other_rows_get_a_new_token(
    shared_sidecar: Sidecar, topic: str, database: Database
) -> None:
    """As after a restore: the numbers come again, and a relay that went by them would delete what nobody published."""
    database.script("CREATE TABLE kept AS SELECT * FROM outbox")
    database.add(b"one", b"two", b"three", b"four")
    database.script("INSERT INTO kept SELECT * FROM outbox")
    await relay_all(shared_sidecar, database, topic)
    token = database.token
    other = "id = gen_random_uuid()" if database.kind == "postgresql" else "id = 'another ' || id"
    for column in (other, "payload = " + ("'new'::bytea" if database.kind == "postgresql" else "x'6e6577'")):
        database.script(f"UPDATE kept SET {column} WHERE sequence_id > (SELECT min(sequence_id) FROM kept)")
    database.script("INSERT INTO outbox SELECT * FROM kept")
    database.add(b"five")
    counters = await relay_all(shared_sidecar, database, topic)
    assert (counters.found, counters.tokens_replaced, counters.published, database.rows()) == (1, 1, 4, 0)
    assert database.token != token
    assert await payloads(shared_sidecar, topic) == [b"one", b"two", b"three", b"four", b"new", b"new", b"new", b"five"]
    # Under the new name, too, what is there is found.
    database.script("INSERT INTO outbox SELECT * FROM kept")
    again = await relay_all(shared_sidecar, database, topic)
    assert (again.found, again.tokens_replaced, again.published, database.rows()) == (4, 0, 0, 0)


async def test_rows_restored_from_a_dump_get_new_numbers(
    shared_sidecar: Sidecar, topic: str, postgres: Database
) -> None:
    """They are not below xmax, and there are more of them than a page has."""
    far = "(pg_snapshot_xmax(pg_current_snapshot())::text::bigint << 24) * 3"
    postgres.script(
        "INSERT INTO outbox (sequence_id, id, aggregatetype, aggregateid, type, payload) SELECT "
        f"{far} + n, gen_random_uuid(), 'order', n, 'OrderPlaced', n::text::bytea FROM generate_series(1, 12000) n"
    )
    postgres.add(b"after")
    counters = await relay_all(shared_sidecar, postgres, topic)
    assert (counters.renumbered, counters.published, postgres.rows()) == (12_000, 12_001, 0)
    found = await payloads(shared_sidecar, topic)
    assert sorted(found) == sorted([b"after", *(b"%d" % n for n in range(1, 12_001))])
    assert [one for one in found if one != b"after"] == [b"%d" % n for n in range(1, 12_001)]
    # Next to them, an ordinary row goes on as ever.
    postgres.add(b"later")
    assert (await relay_all(shared_sidecar, postgres, topic)).tokens_replaced == 0
    assert (await payloads(shared_sidecar, topic))[-1] == b"later"


async def test_aggregate_types_are_routed(shared_sidecar: Sidecar, topic: str, database: Database) -> None:
    for number in range(4):
        database.add(b"%d" % number, kind=f"{topic}-{number % 2}")
    database.add(b"nowhere", kind="no / topic")
    counters = await relay_all(shared_sidecar, database, "{aggregatetype}")
    assert (counters.published, counters.set_aside, database.rows()) == (4, 1, 0)
    assert await payloads(shared_sidecar, f"{topic}-0") == [b"0", b"2"]
    assert await payloads(shared_sidecar, f"{topic}-1") == [b"1", b"3"]
    assert "topic" in database.value("SELECT reason FROM outbox_aside")


async def test_a_partitioned_topic(shared_sidecar: Sidecar, topic: str, database: Database) -> None:
    async with Client(shared_sidecar.address) as client:
        await client.admin.create_topic(topic, partitions=3)
    database.script("CREATE TABLE kept AS SELECT * FROM outbox")
    for key in "abcdef":
        database.add(key.encode() + b"1", key.encode() + b"2", key=key)
    database.script("INSERT INTO kept SELECT * FROM outbox")
    await relay_all(shared_sidecar, database, topic)
    database.script("INSERT INTO outbox SELECT * FROM kept")
    counters = await relay_all(shared_sidecar, database, topic)
    assert (counters.found, counters.published, counters.tokens_replaced) == (12, 0, 0)
    async with Client(shared_sidecar.address) as client, client.partitioned_reader(topic) as reader:
        found = [message.payload or b"" async for message in reader]
    assert sorted(found) == sorted(key.encode() + n for key in "abcdef" for n in (b"1", b"2"))
    for key in "abcdef":
        assert found.index(key.encode() + b"1") < found.index(key.encode() + b"2")


async def test_a_topic_that_is_made_later_gets_its_rows(topic: str, database: Database) -> None:
    """Only what came before is set aside."""
    with Sidecar(allow_auto_topic_creation=False) as sidecar:
        async with Client(sidecar.address) as client:
            await client.admin.create_topic(f"{topic}-a")
            relay = Relay(client, database.url, f"{topic}-{{aggregatetype}}", NAME, report=lambda line: None)
            running = asyncio.create_task(relay.run())
            database.add(b"first", kind="a")
            database.add(b"before there is a topic", kind="b")
            await _until(database, 0)
            await client.admin.create_topic(f"{topic}-b")
            database.add(b"second", kind="b")
            await _until(database, 0)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        assert await payloads(sidecar, f"{topic}-b") == [b"second"]
    assert database.value("SELECT count(*) FROM outbox_aside") == 1


async def test_what_cannot_be_published_blocks_nobody(shared_sidecar: Sidecar, topic: str, database: Database) -> None:
    """And twice set aside is there twice: somebody put it back."""
    large = bytes(MAX_PAYLOAD_BYTES + 1)
    database.add(b"before", large, b"after")
    database.add(bytes(MAX_PAYLOAD_BYTES), b"last")
    reported: list[str] = []
    async with Client(shared_sidecar.address) as client:
        one = Relay(client, database.url, topic, NAME, report=reported.append)
        await one.run(follow=False)
    assert one.counters.set_aside == len(reported) == 1
    assert [len(found) for found in await payloads(shared_sidecar, topic)] == [6, 5, MAX_PAYLOAD_BYTES, 4]
    assert f"{MAX_PAYLOAD_BYTES + 1} bytes" in database.value("SELECT reason FROM outbox_aside")
    columns = "id, aggregatetype, aggregateid, type, payload"
    database.script(f"INSERT INTO outbox ({columns}) SELECT {columns} FROM outbox_aside")
    await relay_all(shared_sidecar, database, topic)
    assert database.value("SELECT count(*) FROM outbox_aside") == 2
    assert database.value("SELECT min(length(payload)) FROM outbox_aside") == len(large)


async def test_a_number_that_is_none_is_set_aside(shared_sidecar: Sidecar, topic: str, database: Database) -> None:
    """As an ORM writes it that fills every column."""
    database.add(b"good")
    columns = "sequence_id, id, aggregatetype, aggregateid, type, payload"
    database.script(f"INSERT INTO outbox ({columns}) VALUES (-1, '{uuid.uuid4()}', 'order', '7', 'OrderPlaced', NULL)")
    counters = await relay_all(shared_sidecar, database, topic)
    assert (counters.published, counters.set_aside, counters.tokens_replaced, database.rows()) == (1, 1, 0, 0)
    assert "sequence_id is -1" in database.value("SELECT reason FROM outbox_aside")
    assert await payloads(shared_sidecar, topic) == [b"good"]


async def test_an_id_that_is_no_text_is_set_aside(shared_sidecar: Sidecar, topic: str, tmp_path: Path) -> None:
    """SQLite takes any bytes for a text."""
    sqlite = Database(f"sqlite:///{tmp_path / 'shop.db'}")
    columns = "id, aggregatetype, aggregateid, type, payload"
    sqlite.script(f"INSERT INTO outbox ({columns}) VALUES (CAST(x'ff' AS TEXT), 'order', '7', 'OrderPlaced', 'bad')")
    sqlite.add(b"good")
    counters = await relay_all(shared_sidecar, sqlite, topic)
    assert (counters.published, counters.set_aside, sqlite.rows()) == (1, 1, 0)
    assert await payloads(shared_sidecar, topic) == [b"good"]


async def test_only_the_relay_deletes(database: Database) -> None:
    database.add(b"one")
    for statement in ("DELETE FROM outbox", "UPDATE outbox SET type = 'x'"):
        with database.engine.begin() as connection, pytest.raises(DBAPIError, match=r"outbox"):
            connection.execute(text(statement))
    if database.kind == "postgresql":
        with database.engine.begin() as connection, pytest.raises(DBAPIError, match="only the relay"):
            connection.execute(text("TRUNCATE outbox"))
    # As many set-ups have it: a relay that reads would never see the row.
    with database.engine.connect() as connection:
        Outbox(connection).add("order", "7", "OrderPlaced", b"two")
        with pytest.raises(DBAPIError, match="only the relay"):
            connection.execute(text("DELETE FROM outbox"))
    assert database.rows() == 1


@pytest.mark.parametrize("changed", ["id = gen_random_uuid()", "sequence_id = sequence_id + 100"])
async def test_rows_are_told_apart_by_number_and_id(postgres: Database, changed: str) -> None:
    """What was read, and is another row by now, is not deleted; all others are."""
    store = open_store(postgres.url)
    store.open()
    postgres.add(b"one", b"two", b"three")
    page = store.read(-1)
    postgres.as_relay(f"UPDATE outbox SET {changed} WHERE payload = 'two'")
    store.delete([page])
    assert postgres.value("SELECT string_agg(convert_from(payload, 'UTF8'), ' ') FROM outbox") == "two"
    postgres.add(b"four", b"five")
    page = store.read(page.last)
    postgres.as_relay("DELETE FROM outbox WHERE payload = 'four'")
    store.delete([page])
    store.close()
    assert postgres.rows() == 1


@pytest.mark.parametrize("kind", ["jsonb", "json", "text"])
async def test_payloads_of_other_kinds(shared_sidecar: Sidecar, topic: str, postgres: Database, kind: str) -> None:
    for table in ("outbox", "outbox_aside"):
        postgres.script(f"ALTER TABLE {table} ALTER payload TYPE {kind} USING NULL")
        postgres.script(f"ALTER TABLE {table} ALTER aggregateid TYPE bigint USING 0, ALTER id TYPE text")
    payload = {"amount": 7, "text": "ü\\n\\"}
    with postgres.engine.begin() as connection:
        outbox = Outbox(connection)
        outbox.add("order", 2**62, "OrderPlaced", json.dumps(payload) if kind == "text" else payload, id='a"\\{b')
        outbox.add("order", 1, "OrderPlaced", None)
    await relay_all(shared_sidecar, postgres, topic)
    first, second = await messages(shared_sidecar, topic)
    assert (json.loads(first.payload or b""), first.key) == (payload, b"%d" % 2**62)
    assert (first.properties["id"], second.payload, postgres.rows()) == ('a"\\{b', None, 0)


async def test_a_number_in_jsonb_that_is_long_as_text(shared_sidecar: Sidecar, topic: str, postgres: Database) -> None:
    """Some bytes in the table, more than a message may have in the topic: set aside, and a page of them is no page."""
    for table in ("outbox", "outbox_aside"):
        postgres.script(f"ALTER TABLE {table} ALTER payload TYPE jsonb USING NULL")
    columns = "id, aggregatetype, aggregateid, type, payload"
    many = f"('[' || repeat('1e131000,', {MAX_PAYLOAD_BYTES // 131_000 + 1}) || '7]')::jsonb"
    postgres.script(
        f"INSERT INTO outbox ({columns}) SELECT gen_random_uuid(), 'order', '7', 'OrderPlaced', {many} "
        "FROM generate_series(1, 3)"
    )
    postgres.script(f"INSERT INTO outbox ({columns}) VALUES (gen_random_uuid(), 'order', '7', 'OrderPlaced', '8')")
    counters = await relay_all(shared_sidecar, postgres, topic)
    assert (counters.published, counters.set_aside, postgres.rows()) == (1, 3, 0)
    assert await payloads(shared_sidecar, topic) == [b"8"]


@pytest.mark.parametrize("kind", ["jsonb", "json", "text", "varchar", "bytea"])
async def test_bytes_and_texts_are_what_they_were(
    shared_sidecar: Sidecar, topic: str, postgres: Database, kind: str
) -> None:
    """Bytes in a column of text are no hexadecimal digits, and a column of JSON takes what says it is."""
    for table in ("outbox", "outbox_aside"):
        postgres.script(f"ALTER TABLE {table} ALTER payload TYPE {kind} USING NULL")
    given = '["\\\\xff", "ü"]'
    with postgres.engine.begin() as connection:
        for payload in (given.encode(), given, ["\\xff", "ü"]):
            Outbox(connection).add("order", "1", "OrderPlaced", payload)
    await relay_all(shared_sidecar, postgres, topic)
    assert await payloads(shared_sidecar, topic) == [given.encode()] * 3
    bad = {"bytea": 7, "text": b"\xff", "varchar": "\0"}.get(kind, b"{")
    with postgres.engine.begin() as connection, pytest.raises(InvalidRequestError, match="outbox"):
        Outbox(connection).add("order", "1", "OrderPlaced", bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("payload", ["jsonb", "json", "text"])
async def test_a_table_with_another_kind_of_payload(postgres: Database, payload: str) -> None:
    postgres.script(f"DROP TABLE outbox, outbox_token, outbox_aside; {ddl('postgresql', payload=payload)}")
    kinds = "SELECT string_agg(data_type, ' ') FROM information_schema.columns WHERE column_name = 'payload'"
    assert postgres.value(kinds) == f"{payload} {payload}"


async def test_an_id_fits_its_column(shared_sidecar: Sidecar, topic: str, postgres: Database) -> None:
    given = "{0F8FAD5B-D9CB-469F-A165-70867728950E}"
    with postgres.engine.begin() as connection:
        assert Outbox(connection).add("order", "7", "OrderPlaced", "text", id=given) == given
        for bad in ("order 7", b"0123456789abcdef"):
            with pytest.raises(InvalidRequestError, match=r"outbox\.id takes UUIDs alone"):
                Outbox(connection).add("order", "7", "OrderPlaced", b"", id=bad)
    await relay_all(shared_sidecar, postgres, topic)
    [message] = await messages(shared_sidecar, topic)
    assert (message.properties["id"], message.payload) == ("0f8fad5b-d9cb-469f-a165-70867728950e", b"text")


def commit_each(engine: Engine) -> Engine:
    """As `create_engine(…, isolation_level="AUTOCOMMIT")`."""
    return engine.execution_options(isolation_level="AUTOCOMMIT")


async def test_a_connection_that_commits_each_statement_is_refused(database: Database) -> None:
    """The row would stay although its transaction fails; nothing of it is written."""
    for engine in (commit_each(database.engine), create_engine(database.engine.url, isolation_level="AUTOCOMMIT")):
        with engine.connect() as connection, Session(bind=engine) as session:
            for one in (connection, session):
                with pytest.raises(SeqdedupeError) as e:
                    Outbox(one).add("order", "7", "OrderPlaced", b"never")
                assert e.value.reason == "NOT_TRANSACTIONAL"
                assert repr(database.engine.url.database) in e.value.message
                assert 'no isolation_level="AUTOCOMMIT"' in e.value.hint
        engine.dispose()
    assert database.rows() == 0
    # Next to it, a transaction is one; also if it is begun by hand, as for SQLite's savepoints.
    engine = create_engine(database.engine.url, isolation_level="AUTOCOMMIT")
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
    with engine.connect() as connection:
        Outbox(connection).add("order", "7", "OrderPlaced", b"rolled back")
        connection.exec_driver_sql("ROLLBACK")
    engine.dispose()
    assert database.rows() == 0


async def test_what_is_no_json_is_refused_in_the_service_s_own_transaction(
    shared_sidecar: Sidecar, topic: str, postgres: Database
) -> None:
    """Where the column is JSON; in one of bytes a payload is everything that it is."""
    for table in ("outbox", "outbox_aside"):
        postgres.script(f"ALTER TABLE {table} ALTER payload TYPE jsonb USING NULL")
    for payload in ("no JSON", b"{", float("nan")):
        with postgres.engine.begin() as connection, pytest.raises(InvalidRequestError):
            Outbox(connection).add("order", "7", "OrderPlaced", payload)  # type: ignore[arg-type]
    assert postgres.rows() == 0
    with postgres.engine.begin() as connection:
        Outbox(connection).add("order", "7", "OrderPlaced", {"amount": 7})
    await relay_all(shared_sidecar, postgres, topic)
    assert [json.loads(one) for one in await payloads(shared_sidecar, topic)] == [{"amount": 7}]


async def test_ids_of_bytes(shared_sidecar: Sidecar, topic: str, database: Database) -> None:
    if database.kind == "postgresql":
        for table in ("outbox", "outbox_aside"):
            database.script(f"ALTER TABLE {table} ALTER id TYPE bytea USING NULL")
    with database.engine.begin() as connection:
        Outbox(connection).add("order", "7", "OrderPlaced", b"one", id=b"\x00\xff\\")
    await relay_all(shared_sidecar, database, topic)
    [message] = await messages(shared_sidecar, topic)
    assert (message.properties["id"], database.rows()) == ("00ff5c", 0)


BROKEN = {
    "there is no table outbox": "DROP TABLE outbox",
    "there is no table outbox_token": "DROP TABLE outbox_token",
    "there is no table outbox_aside": "DROP TABLE outbox_aside",
    "no column type": "ALTER TABLE outbox DROP COLUMN type",
    "no column reason": "ALTER TABLE outbox_aside DROP COLUMN reason",
    "has no row": "DELETE FROM outbox_token",
    "a column reason, which": "ALTER TABLE outbox ADD reason text",
}
BROKEN_POSTGRES = {
    "no column sequence_id": "ALTER TABLE outbox DROP COLUMN sequence_id",
    "no unique index": "DROP INDEX outbox_sequence_id",
    "bigint NOT NULL": "ALTER TABLE outbox ALTER sequence_id DROP NOT NULL",
    "the trigger outbox_number": "DROP TRIGGER outbox_number ON outbox",
    "the trigger outbox_guard,": "ALTER TABLE outbox DISABLE TRIGGER outbox_guard",
    "id is int8": "ALTER TABLE outbox ALTER id TYPE bigint USING 0",
    "no column more": "ALTER TABLE outbox ADD more text",
    "outbox_aside.payload is bytea, and outbox.payload is text": "ALTER TABLE outbox ALTER payload TYPE text USING ''",
    "outbox is an unlogged table": "ALTER TABLE outbox SET UNLOGGED",
    "outbox_aside is an unlogged table": "ALTER TABLE outbox_aside SET UNLOGGED",
}
BROKEN_SQLITE = {
    "the trigger outbox_guard_delete": "DROP TRIGGER outbox_guard_delete",
    "outbox.id is INTEGER": "DROP TABLE outbox; CREATE TABLE outbox (sequence_id INTEGER PRIMARY KEY AUTOINCREMENT, "
    "id INTEGER, aggregatetype, aggregateid, type, payload)",
    "AUTOINCREMENT": "DROP TABLE outbox; CREATE TABLE outbox (sequence_id INTEGER PRIMARY KEY, id TEXT, aggregatetype, "
    "aggregateid, type, payload)",
}


async def test_a_half_made_outbox_is_refused(shared_sidecar: Sidecar, topic: str, database: Database) -> None:
    """Then what `ddl` prints, run again, is not enough for all of it: so each is broken in its own database."""
    more = BROKEN_POSTGRES if database.kind == "postgresql" else BROKEN_SQLITE
    for what, statement in (BROKEN | more).items():
        if database.kind == "postgresql":
            schema = f"s{uuid.uuid4().hex}"
            with database.engine.connect() as connection:
                connection.execute(text(f"CREATE SCHEMA {schema}"))
                connection.commit()
            broken = Database(f"{database.url}&options=-csearch_path%3D{schema}")
        else:
            broken = Database(database.url.replace("shop.db", f"{uuid.uuid4().hex}.db"))
        broken.script(statement)
        with pytest.raises(SeqdedupeError, match=what) as e:
            await relay_all(shared_sidecar, broken, topic)
        assert e.value.reason == "INVALID_OUTBOX"
        broken.engine.dispose()


async def test_a_column_that_was_added_is_set_aside_too(
    shared_sidecar: Sidecar, topic: str, database: Database
) -> None:
    """In PostgreSQL once the statements are run again."""
    for name in ("more", '"and ""more"'):
        added = f"ALTER TABLE outbox ADD {name} varchar(7) DEFAULT 'kept'"
        database.script(f"{added}; {ddl(database.kind) if database.kind == 'postgresql' else ''}")
        database.add(bytes(MAX_PAYLOAD_BYTES + 1))
        assert (await relay_all(shared_sidecar, database, topic)).set_aside == 1
        assert database.value(f"SELECT {name} FROM outbox_aside WHERE {name} IS NOT NULL") == "kept"
    assert database.value("SELECT count(*) FROM outbox_aside WHERE more = 'kept' AND length(payload) > 1") == 2


async def test_another_name_or_topic_is_refused(shared_sidecar: Sidecar, topic: str, database: Database) -> None:
    await relay_all(shared_sidecar, database, topic)
    for other in ({"topic": "another", "name": NAME}, {"topic": topic, "name": "another"}):
        with pytest.raises(SeqdedupeError) as e:
            await relay_all(shared_sidecar, database, **other)
        assert e.value.reason == "OUTBOX_CHANGED"


@pytest.mark.parametrize("url", ["mysql://localhost/shop", "nonsense", "sqlite://"])
async def test_a_database_that_cannot_be_is_refused(shared_sidecar: Sidecar, topic: str, url: str) -> None:
    async with Client(shared_sidecar.address) as client:
        with pytest.raises(SeqdedupeError) as e:
            Relay(client, url, topic, NAME)
    assert e.value.reason in ("INVALID_CONFIGURATION", "INVALID_OUTBOX")
    with pytest.raises(SeqdedupeError):
        run_relay(shared_sidecar.address, url, topic, NAME)


async def test_a_long_transaction_shows_as_lag(
    shared_sidecar: Sidecar, topic: str, postgres: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    with postgres.engine.connect() as elsewhere:
        Outbox(elsewhere).add("order", "7", "OrderPlaced", b"first")
        postgres.add(b"second")
        with monkeypatch.context() as hurried:
            hurried.setattr("seqdedupe.services.outbox.relay.ONCE_SECONDS", 0.0)
            assert (await relay_all(shared_sidecar, postgres, topic)).published == 0
        async with Client(shared_sidecar.address) as client:
            one = Relay(client, postgres.url, topic, NAME)
            one._store.open()
            lag = await one.lag()
            one._store.close()
        assert (lag.rows, lag.unreadable_rows) == (1, 1)
        assert "idle in transaction" in lag.held_by
        elsewhere.commit()
    assert (await relay_all(shared_sidecar, postgres, topic)).published == 2
    assert await payloads(shared_sidecar, topic) == [b"first", b"second"]


async def test_of_two_relays_one_is_fenced_and_takes_over(
    shared_sidecar: Sidecar, topic: str, database: Database
) -> None:
    async with Client(shared_sidecar.address) as client, Client(shared_sidecar.address) as other_client:
        one = Relay(client, database.url, topic, NAME, standby_seconds=0.2, report=lambda line: None)
        other = Relay(other_client, database.url, topic, NAME, standby_seconds=0.2, report=lambda line: None)
        first = asyncio.create_task(one.run())
        database.add(b"one")
        await _until(database, 0)
        second = asyncio.create_task(other.run())
        for number in range(20):
            database.add(b"%d" % number)
            await asyncio.sleep(0.02)
        await _until(database, 0)
        # Either of them is killed while it works, and the other one goes on.
        second.cancel()
        database.add(b"last")
        await _until(database, 0)
        first.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
    assert await payloads(shared_sidecar, topic) == [b"one", *(b"%d" % number for number in range(20)), b"last"]


async def test_rows_from_elsewhere_alone_are_reason_to_take_over(postgres: Database, shared_sidecar: Sidecar) -> None:
    far = "(pg_snapshot_xmax(pg_current_snapshot())::text::bigint << 24) * 3"
    postgres.script(
        "INSERT INTO outbox (sequence_id, id, aggregatetype, aggregateid, type) "
        f"VALUES ({far}, gen_random_uuid(), 'order', '7', 'OrderPlaced')"
    )
    async with Client(shared_sidecar.address) as client:
        one = Relay(client, postgres.url, "any", NAME, standby_seconds=0.1)
        one._store.open()
        async with asyncio.timeout(LAST_RESORT_SECONDS):
            await one._stand_by()
        one._store.close()


async def test_where_nothing_can_be_written_nobody_is_fenced(
    shared_sidecar: Sidecar, topic: str, postgres: Database
) -> None:
    """As in a replica: it is not taken for an outbox that is amiss, for it may become the primary."""
    await relay_all(shared_sidecar, postgres, topic)
    replica = f"{postgres.url}&options=-cdefault_transaction_read_only%3Don"
    own = token_name(NAME, postgres.token)
    async with Client(shared_sidecar.address) as client, client.producer(topic, own) as producer:
        said: list[str] = []
        relay = Relay(client, replica, topic, NAME, report=said.append)
        relaying = asyncio.create_task(relay.run())
        async with asyncio.timeout(LAST_RESORT_SECONDS):
            while relay.activity.failures["OUTBOX_UNAVAILABLE"] < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert not relaying.done()
        assert "read-only" in said[0]
        assert len(said) == 1
        relaying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await relaying
        with pytest.raises(UnavailableError, match="read-only") as e:
            await Relay(client, replica, topic, NAME).run(follow=False)
        assert e.value.reason == "OUTBOX_UNAVAILABLE"
        await producer.send_batch([b"mine"], [1 << 40])


async def test_without_follow_a_relay_that_is_fenced_ends(
    shared_sidecar: Sidecar, topic: str, postgres: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for nobody: not even for a relay that took its place and hangs."""
    postgres.add(*(b"%d" % number for number in range(PAGE_ROWS + 1)))
    loop = asyncio.get_running_loop()

    async def take_over() -> None:
        async with Client(shared_sidecar.address) as other:
            await other.producer(topic, token_name(NAME, postgres.token)).open()

    async with Client(shared_sidecar.address) as client:
        one = Relay(client, postgres.url, topic, NAME, report=lambda line: None)
        read = one._store.read

        def taken_over(after: int) -> RowPage:
            if after >= 0:
                while not one.counters.published:  # the page before is on its way
                    time.sleep(0.01)
                asyncio.run_coroutine_threadsafe(take_over(), loop).result()
            return read(after)

        monkeypatch.setattr(one._store, "read", taken_over)
        async with asyncio.timeout(LAST_RESORT_SECONDS):
            with pytest.raises(FencedError):
                await one.run(follow=False)
    await relay_all(shared_sidecar, postgres, topic)
    assert await payloads(shared_sidecar, topic) == [b"%d" % number for number in range(PAGE_ROWS + 1)]


async def _until(database: Database, rows: int) -> None:
    async with asyncio.timeout(LAST_RESORT_SECONDS):
        while database.rows() != rows:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_sidecar_that_is_away_is_reported_once_and_once_when_it_is_back(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'shop.db'}")
    database.add(b"one")
    with Sidecar(tmp_path) as sidecar:
        sidecar.kill()
        said: list[str] = []
        async with Client(sidecar.address) as client, asyncio.timeout(LAST_RESORT_SECONDS):
            relay = Relay(client, database.url, "orders", NAME, report=said.append)
            relaying = asyncio.create_task(relay.run())
            while relay.activity.failures.total() < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert len([line for line in said if line.startswith("trying again")]) == 1
            await asyncio.to_thread(sidecar.start)
            while not said[-1].startswith("working again (failed "):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            # It works again as soon as the sidecar answers, perhaps before the row has its receipt.
            while not relay.counters.published:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            relaying.cancel()
            with pytest.raises(asyncio.CancelledError):
                await relaying
        assert len([line for line in said if line.startswith("working again")]) == 1
    database.engine.dispose()
