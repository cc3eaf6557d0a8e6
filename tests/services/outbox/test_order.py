"""The order of an aggregate's rows, by its own oracle: the version that its row in the service's table had.

In a real PostgreSQL, with tables as they are made today, and as an older version made them. Costs: one sidecar, two
PostgreSQL, about 15 seconds.
"""

import asyncio
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import numpy as np
import psycopg
import pytest
from psycopg import Connection

from seqdedupe.client import Client
from seqdedupe.errors import SeqdedupeError
from seqdedupe.services.outbox import Relay, ddl
from seqdedupe.services.outbox.store import OutboxStore, open_store
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from tests.services.outbox.conftest import NAME, Database, messages, payloads, relay_all
from tests.spark.postgres import PostgresServer

BY_TRANSACTION = (Path(__file__).parent / "numbered_by_transaction.sql").read_text()
"""What `seqdedupe outbox ddl postgresql` printed before there was a sequence."""

NUMBERED_FIRST = """
CREATE OR REPLACE FUNCTION outbox_take_number() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.sequence_id := nextval('outbox_numbers');
    RETURN NEW;
END $$
"""
"""A control arm: the transaction has no ID when its row takes a number."""

_INSERT = (
    "INSERT INTO outbox (id, aggregatetype, aggregateid, type, payload) "
    "VALUES (gen_random_uuid(), 'order', %s, 'Changed', %s)"
)


def add(connection: Connection, payload: bytes, key: str = "1") -> None:
    connection.execute(_INSERT, (key, payload))


def change(connection: Connection) -> None:
    """The next version of the order, told of in the same transaction."""
    [(version,)] = connection.execute("UPDATE orders SET version = version + 1 RETURNING version").fetchall()
    add(connection, b"version %d" % version)


@pytest.fixture
def older(postgres: Database) -> Database:
    """A database whose outbox an older version made."""
    postgres.script(f"DROP TABLE outbox, outbox_token, outbox_aside; {BY_TRANSACTION}")
    return postgres


@pytest.fixture
def store(postgres: Database) -> Iterator[OutboxStore]:
    with opened(postgres.url) as store:
        yield store


@contextmanager
def opened(url: str) -> Iterator[OutboxStore]:
    store = open_store(url)
    try:
        store.open()
        yield store
    finally:
        store.close()


def upgrade(database: Database) -> None:
    """As an operator does it: each statement is a transaction."""
    psql = ["psql", "--quiet", "--set", "ON_ERROR_STOP=1", database.url]
    subprocess.run(psql, input=ddl("postgresql"), text=True, check=True, capture_output=True)


@pytest.mark.parametrize("is_older", [False, True])
async def test_who_begins_first_and_commits_last_is_published_last(
    shared_sidecar: Sidecar, topic: str, postgres: Database, request: pytest.FixtureRequest, is_older: bool
) -> None:
    """For one row, which the one changes after the other has committed. In a table of an older version, which is the
    control arm, the numbers are those of the first writes."""
    if is_older:
        request.getfixturevalue("older")
    postgres.script("CREATE TABLE orders (version int); INSERT INTO orders VALUES (1); CREATE TABLE audit (line text)")
    with psycopg.connect(postgres.url) as early, psycopg.connect(postgres.url) as late:
        early.execute("INSERT INTO audit VALUES ('looks at the order')")
        change(late)
        late.commit()
        change(early)
        early.commit()
    await relay_all(shared_sidecar, postgres, topic)
    found = await payloads(shared_sidecar, topic)
    assert found == ([b"version 3", b"version 2"] if is_older else [b"version 2", b"version 3"])


@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_no_row_is_read_before_an_earlier_one_whose_transaction_is_open(
    postgres: Database, store: OutboxStore, isolation: str
) -> None:
    """No matter what snapshot it has, in a savepoint or not; and what a transaction that began later does holds nothing
    back of what was seen before."""
    with psycopg.connect(postgres.url) as one, psycopg.connect(postgres.url, autocommit=True) as other:
        one.execute(f"SET TRANSACTION ISOLATION LEVEL {isolation}; SELECT count(*) FROM outbox".encode())
        add(other, b"first")
        one.execute("SAVEPOINT rolled_back")
        add(one, b"never")
        one.execute("ROLLBACK TO rolled_back; SAVEPOINT kept")
        add(one, b"second")
        one.execute("RELEASE kept")
        add(other, b"third")
        assert len(store.read(-1)) == 0
        with psycopg.connect(postgres.url) as later:
            later.execute("CREATE TABLE held_by_nobody (i int)")
            one.commit()
            assert len(store.read(-1)) == 3
            add(other, b"fourth")
            last = store.read(-1).last
            assert (store.has_more(last), len(store.read(last))) == (True, 0)
        assert len(store.read(last)) == 1
    page = store.read(-1)
    assert [page.payloads[row] for row in range(len(page))] == [b"first", b"second", b"third", b"fourth"]


@pytest.mark.parametrize("asks_first", [True, False])
def test_a_row_has_a_number_only_when_its_transaction_has_an_id(
    postgres: Database, store: OutboxStore, asks_first: bool
) -> None:
    """It is held between taking its number and being written, when nothing else has given its transaction an ID."""
    if not asks_first:
        postgres.script(NUMBERED_FIRST)
    postgres.script(
        "CREATE FUNCTION outbox_stall() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "PERFORM pg_advisory_xact_lock_shared(7); RETURN NEW; END $$; "
        "CREATE TRIGGER outbox_stall BEFORE INSERT ON outbox FOR EACH ROW WHEN (NEW.aggregateid = 'stalls') "
        "EXECUTE FUNCTION outbox_stall()"
    )
    command = [
        "psql", "--quiet", postgres.url, "--command",
        "INSERT INTO outbox (id, aggregatetype, aggregateid, type) VALUES (gen_random_uuid(), 'order', 'stalls', 't')",
    ]  # fmt: skip
    with psycopg.connect(postgres.url, autocommit=True) as lock:
        add(lock, b"a sequence logs its next numbers, and for that asks for an ID, with the first one alone")
        lock.execute("SELECT pg_advisory_lock(7)")
        stalled = subprocess.Popen(command)
        try:
            while not lock.execute("SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted").fetchone():
                assert stalled.poll() is None
            add(lock, b"next")
            assert len(store.read(-1)) == (0 if asks_first else 2)
        finally:
            lock.execute("SELECT pg_advisory_unlock(7)")
            assert stalled.wait(LAST_RESORT_SECONDS) == 0
    assert len(store.read(-1)) == 3


async def test_a_table_of_an_older_version_is_upgraded_while_its_relay_runs(
    shared_sidecar: Sidecar, topic: str, older: Database
) -> None:
    """What has old numbers is published first, and the numbers go on above them."""
    reported: list[str] = []
    async with Client(shared_sidecar.address) as client:
        relay = Relay(client, older.url, topic, NAME, report=reported.append)
        running = asyncio.create_task(relay.run())
        with psycopg.connect(older.url) as one, psycopg.connect(older.url, autocommit=True) as other:
            one.execute("CREATE TABLE audit (line text)")
            for number in range(5):
                add(other, b"old %d" % number)
            add(one, b"old, and open while it is upgraded")
            upgrading = asyncio.create_task(asyncio.to_thread(upgrade, older))
            waits = "SELECT 1 FROM pg_locks WHERE relation = 'outbox'::regclass AND NOT granted"
            while not one.execute(waits).fetchone():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            one.commit()
            await upgrading
            for number in range(5):
                add(other, b"new %d" % number)
            async with asyncio.timeout(LAST_RESORT_SECONDS):
                while older.rows():
                    assert not running.done()
                    await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    found = await messages(shared_sidecar, topic)
    old = [b"old, and open while it is upgraded", *(b"old %d" % n for n in range(5))]
    assert [message.payload for message in found] == [*old, *(b"new %d" % n for n in range(5))]
    numbers = [message.sequence_id for message in found]
    assert numbers == sorted(set(numbers))
    assert relay.counters.tokens_replaced == relay.counters.renumbered == 0
    # An old version's statements, run once more, would number rows below all others.
    older.script(BY_TRANSACTION)
    with pytest.raises(SeqdedupeError, match="as an older version did") as e:
        await relay_all(shared_sidecar, older, topic)
    assert e.value.reason == "INVALID_OUTBOX"
    upgrade(older)
    older.add(b"last")
    await relay_all(shared_sidecar, older, topic)
    assert (await messages(shared_sidecar, topic))[-1].sequence_id > numbers[-1]


def test_an_upgrade_within_a_long_transaction_goes_on_above_all_numbers(older: Database) -> None:
    """For transactions that began after it, and of its own; by a superuser, on a table of somebody else."""
    owner = "outbox_owner"
    older.script(f"CREATE ROLE {owner}; GRANT CREATE ON SCHEMA public TO {owner}; ALTER TABLE outbox OWNER TO {owner}")
    with psycopg.connect(older.url) as migrating, psycopg.connect(older.url, autocommit=True) as other:
        migrating.execute("CREATE TABLE audit (line text)")
        add(migrating, b"of the migration")
        migrating.commit()
        migrating.execute("INSERT INTO audit VALUES ('has an ID')")
        for _ in range(3):
            add(other, b"old")
        migrating.execute(ddl("postgresql").encode())
        migrating.commit()
        add(other, b"new")
        highest = other.execute("SELECT payload FROM outbox ORDER BY sequence_id DESC").fetchone()
    assert highest == (b"new",)
    with psycopg.connect(older.url) as serializable:
        serializable.execute("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")
        with pytest.raises(psycopg.errors.RaiseException, match="READ COMMITTED"):
            serializable.execute(ddl("postgresql").encode())
    older.script(f"REASSIGN OWNED BY {owner} TO CURRENT_USER; DROP OWNED BY {owner}; DROP ROLE {owner}")


def test_rows_of_a_dump_are_renumbered_where_the_sequence_has_not_come(postgres: Database, store: OutboxStore) -> None:
    """They stand where the next numbers would be: nobody else's row gets one of theirs meanwhile."""
    postgres.script(
        "INSERT INTO outbox (sequence_id, id, aggregatetype, aggregateid, type, payload) SELECT last_value + n, "
        "gen_random_uuid(), 'order', '1', 'Changed', n::text::bytea FROM outbox_numbers, generate_series(1, 4) n"
    )
    page = store.read_elsewhere()
    assert (len(page), len(store.read(-1))) == (4, 0)
    store.renumber(page.take(np.arange(2)))
    postgres.add(b"5")
    rest = store.read_elsewhere()
    assert len(rest) == 2
    store.renumber(rest)
    assert len(store.read_elsewhere()) == 0
    found = store.read(-1)
    assert [found.payloads[row] for row in range(5)] == [b"1", b"2", b"5", b"3", b"4"]


def test_a_service_needs_no_right_but_to_insert(postgres: Database) -> None:
    """Nor the table's schema in its search path."""
    postgres.script(
        "CREATE ROLE outbox_service; GRANT INSERT ON outbox TO outbox_service; SET ROLE outbox_service; "
        "SET search_path = pg_catalog; INSERT INTO public.outbox (id, aggregatetype, aggregateid, type) "
        "VALUES (gen_random_uuid(), 'order', '1', 'Changed'); RESET ALL; RESET ROLE; "
        "DROP OWNED BY outbox_service; DROP ROLE outbox_service"
    )
    assert postgres.rows() == 1


def test_rows_of_an_aggregate_wait_for_each_other_where_that_was_asked_for(postgres: Database) -> None:
    """For transactions that do not lock the aggregate itself."""
    postgres.script(ddl("postgresql", lock_aggregates=True))
    with psycopg.connect(postgres.url) as one, psycopg.connect(postgres.url, autocommit=True) as other:
        other.execute("SET lock_timeout = '100ms'")
        add(one, b"first")
        add(other, b"of another aggregate", key="2")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            add(other, b"second")
        one.commit()
        add(other, b"second")


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    server = PostgresServer(fsync="off", max_prepared_transactions=2)
    server.start()
    yield server
    server.stop()


def test_the_one_that_holds_is_named(server: PostgresServer) -> None:
    """Not the one that began first, nor one of this database alone: the one with the oldest ID of the whole server."""
    database = Database(server.url)
    elsewhere = urlunsplit(urlsplit(server.url)._replace(path="/other"))
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("CREATE DATABASE other")
    with (
        opened(server.url) as store,
        psycopg.connect(server.url, application_name="report") as harmless,
        psycopg.connect(elsewhere, application_name="nightly job") as holder,
    ):
        assert store.lag().held_by == ""
        harmless.execute("SELECT 1")
        holder.execute("CREATE TABLE lines (i int)")
        pid = holder.info.backend_pid
        database.add(b"one")
        harmless.execute("CREATE TABLE lines (i int)")
        lag = store.lag()
        assert lag.unreadable_rows == 1
        assert lag.held_by == f"process {pid}, database other, nightly job, user postgres, idle in transaction"
        holder.execute("PREPARE TRANSACTION 'forgotten'")
        lag = store.lag()
        assert (lag.unreadable_rows, lag.held_by) == (1, "prepared transaction forgotten, database other")
        assert len(store.read(-1)) == 0
        harmless.rollback()
        holder.rollback()
        holder.autocommit = True
        holder.execute("COMMIT PREPARED 'forgotten'")
        assert (store.lag().held_by, store.lag().unreadable_rows, len(store.read(-1))) == ("", 0, 1)
    database.engine.dispose()
