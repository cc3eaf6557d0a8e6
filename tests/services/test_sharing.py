"""A consumer of a partitioned topic: who has which partition, and anyone who dies, each message once. Costs 10 s."""

import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Connection, Engine, create_engine, func, insert, select, text, update

from seqdedupe.client.blocking import Client
from seqdedupe.client.message import Message
from seqdedupe.client.reader import PartitionedPosition
from seqdedupe.databases.tables import make_tables
from seqdedupe.errors import ConfigurationError
from seqdedupe.message_id import Position
from seqdedupe.services.consumer import Consumer, ConsumerConfig, database
from seqdedupe.services.consumer.database import (
    CONSUMERS,
    METADATA,
    PROCESSES,
    PartOwnership,
    Processes,
    fair_share,
    row_name,
)
from seqdedupe.services.consumer.dead_letters import drop, retry, set_aside
from seqdedupe.services.consumer.work import carry_out
from seqdedupe.testing import Sidecar
from tests.processes import running
from tests.services.conftest import KINDS, url_of
from tests.services.effects import TIMEOUT_SECONDS, effects, until
from tests.services.killed import dead_letters, live_and_die

ROOT = Path(__file__).parents[2]
PARTITIONS = 4
KILLS = 2
"""For each database, in the suite; a campaign has more."""
KEYS = [f"k{n}" for n in range(8)]


@pytest.fixture
def publish(client: Client, topic: str) -> Callable[[int, int], None]:
    return publishing(client, topic)


def publishing(client: Client, topic: str) -> Callable[[int, int], None]:
    """Numbers from one on, this many, to a topic of four partitions, by turns with each of the keys."""
    client.admin.create_topic(topic, partitions=PARTITIONS)

    def publish(first: int, count: int) -> None:
        with client.producer(topic, "p") as producer:
            for n in range(first, first + count):
                producer.send(b"%d" % n, n, key=KEYS[n % len(KEYS)])

    return publish


def make_table(engine: Engine) -> None:
    make_tables(engine, METADATA)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE effects (place BIGINT, what VARCHAR(100))"))


def write(connection: Connection, message: Message) -> None:
    number = int(message.payload or b"")
    connection.execute(text("INSERT INTO effects VALUES (:number, :key)"), {"number": number, "key": KEYS[number % 8]})


def written(engine: Engine) -> list[int]:
    with engine.connect() as connection:
        return list(connection.execute(text("SELECT place FROM effects")).scalars())


def shares(engine: Engine) -> list[int]:
    """How many partitions each process has, the most first."""
    with engine.connect() as connection:
        owners = Counter(connection.execute(select(CONSUMERS.c.owner)).scalars())
    owners.pop("", None)
    return sorted(owners.values(), reverse=True)


@contextmanager
def following(consumer: Consumer) -> Iterator[None]:
    thread = threading.Thread(target=consumer.run)
    thread.start()
    try:
        yield
    finally:
        consumer.stop()
        thread.join(TIMEOUT_SECONDS)
        assert not thread.is_alive()


def test_each_message_once_and_on_from_there(
    engine: Engine, client: Client, topic: str, publish: Callable[[int, int], None]
) -> None:
    make_table(engine)
    count = 0
    for more in (600, 40, 0):
        publish(count, more)
        count += more
        Consumer(client, topic, "c", engine, write).run(follow=False)
        found = written(engine)
        assert sorted(found) == list(range(count))
    if engine.dialect.name == "sqlite":
        for key in range(len(KEYS)):
            places = [n for n in found if n % len(KEYS) == key]
            assert places == sorted(places)
    with engine.connect() as connection:
        rows = connection.execute(select(CONSUMERS.c.name, CONSUMERS.c.topic, CONSUMERS.c.owner)).all()
        assert connection.execute(select(func.count()).select_from(PROCESSES)).scalar_one() == 0
    assert sorted(row.name for row in rows) == [row_name("c", k) for k in range(PARTITIONS)]
    assert {row.owner for row in rows} == {""}
    assert all(row.topic.endswith(row.name[1:]) for row in rows)


def test_processes_share_and_what_one_leaves_the_others_take(
    engine: Engine, client: Client, topic: str, publish: Callable[[int, int], None]
) -> None:
    make_table(engine)
    publish(0, 100)
    with following(Consumer(client, topic, "c", engine, write)):
        until(lambda: shares(engine) == [4])
        with following(Consumer(client, topic, "c", engine, write)):
            until(lambda: shares(engine) == [2, 2])
            publish(100, 100)
            with following(Consumer(client, topic, "c", engine, write)):
                until(lambda: shares(engine) == [2, 1, 1])
                publish(200, 100)
                until(lambda: len(written(engine)) >= 300)
        until(lambda: shares(engine) == [4])
        publish(300, 100)
        until(lambda: len(written(engine)) >= 400)
    assert sorted(written(engine)) == list(range(400))


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_killed_processes(
    request: pytest.FixtureRequest,
    shared_sidecar: Sidecar,
    topic: str,
    publish: Callable[[int, int], None],
    kind: str,
) -> None:
    kill_sharers(url_of(request, kind), shared_sidecar, topic, publish, KILLS, random.Random(3))


def kill_sharers(
    url: str, sidecar: Sidecar, topic: str, publish: Callable[[int, int], None], kills: int, dice: random.Random
) -> None:
    """For two processes that share the partitions one is killed this many times while both work; the last one has
    all."""
    engine = create_engine(url)
    make_table(engine)
    command = [sys.executable, "-m", "tests.services.worker", sidecar.address, topic, url]
    with ExitStack() as stack:
        processes = [stack.enter_context(running(command, cwd=ROOT)) for _ in range(2)]
        count = 100
        publish(0, count)
        for kill in range(kills):
            until(lambda: shares(engine) == [2, 2])
            publish(count, 2000)
            until(lambda: len(written(engine)) > count + dice.randrange(1000))  # noqa: B023
            count += 2000
            processes[kill % 2].kill()
            processes[kill % 2].wait()
            if kill < kills - 1:
                processes[kill % 2] = stack.enter_context(running(command, cwd=ROOT))
        until(lambda: len(written(engine)) >= count)
        until(lambda: shares(engine) == [4])
    assert sorted(map(int, effects(engine))) == list(range(count))
    engine.dispose()


@pytest.mark.parametrize("seed", range(3))
def test_whatever_it_does_when_it_dies_each_message_takes_effect_once(
    request: pytest.FixtureRequest, client: Client, topic: str, publish: Callable[[int, int], None], seed: int
) -> None:
    engine = create_engine(url_of(request, KINDS[seed]))
    make_table(engine)
    publish(0, 80)
    always = live_and_die(seed + 1, client, topic, engine, write, lambda message: int(message.payload or b""))
    found = written(engine)
    assert sorted(found) == [n for n in range(80) if n not in always]
    assert len(dead_letters(engine)) == len([n for n in always if n < 80])
    if engine.dialect.name == "sqlite":
        for key in range(len(KEYS)):
            places = [n for n in found if n % len(KEYS) == key]
            assert places == sorted(places)
    engine.dispose()


def test_fair_shares() -> None:
    for count in range(1, 6):
        living = [f"p{n}" for n in range(count)]
        for partitions in range(1, 12):
            dice = random.Random(partitions)
            owners = [dice.choice([*living, "", "dead"]) for _ in range(partitions)]
            each = [fair_share(one, living, owners, partitions) for one in living]
            assert sum(each) == partitions
            assert max(each) - min(each) <= 1
    # Who has the odd one keeps it, and who is not listed yet counts.
    assert [fair_share(one, ["a", "b"], ["b", "b", "a"], 3) for one in ("a", "b")] == [1, 2]
    assert fair_share("a", ["b"], ["b", "b"], 2) == 1


def test_who_is_within_a_transaction_lives(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long that takes. Who says nothing otherwise loses its row, and then its transactions."""
    monkeypatch.setattr(database, "TAKE_OVER_SECONDS", 0.0)
    engine = create_engine(url)
    make_tables(engine, METADATA)
    one, other = Processes(engine, "c"), Processes(engine, "c")
    one.beat()
    if engine.dialect.name != "sqlite":  # where it holds off all who would write
        with engine.begin() as connection:
            one.hold(connection)
            for _ in range(3):
                assert one.token in other.living()
    assert other.living() == set()
    with engine.begin() as connection, pytest.raises(database.Lost):
        one.hold(connection)
    one.beat()
    with engine.begin() as connection:
        one.hold(connection)
    engine.dispose()


def _always(self: database.RowLease, connection: Connection, position: str, to: str) -> None:
    connection.execute(update(CONSUMERS).where(CONSUMERS.c.name == self._name).values(position=to))


@pytest.mark.parametrize("compares", [True, False], ids=["", "control: without comparing"])
def test_who_was_taken_for_dead_commits_nothing(
    sqlite: Engine, monkeypatch: pytest.MonkeyPatch, compares: bool
) -> None:
    """A process stalls, another one takes its partition and applies the message; then the first one wakes up."""
    monkeypatch.setattr(database, "TAKE_OVER_SECONDS", 0.0)
    if not compares:
        monkeypatch.setattr(database.RowLease, "_set", _always)
        monkeypatch.setattr(Processes, "hold", lambda self, connection: None)
    make_table(sqlite)
    make_tables(sqlite, METADATA)
    start = Position.before(7, 0)
    holds = []
    for _ in range(2):
        processes = Processes(sqlite, "c")
        hold = PartOwnership(sqlite, "c-partition-0", processes)
        hold.register("t", "p", start)
        processes.beat()
        assert processes.living() == {hold.token}
        row = hold.look()
        assert row is not None
        assert hold.take(row)
        holds.append(hold)
    commits = 0
    for hold in reversed(holds):
        try:
            carry_out(sqlite, hold, str(start), frozenset(), lambda connection: str(Position.before(7, 1)))
        except database.Lost:
            continue
        commits += 1
    assert commits == (1 if compares else 2)


def test_what_is_set_aside_is_a_partition_s(
    sqlite: Engine, client: Client, topic: str, publish: Callable[[int, int], None]
) -> None:
    """For all partitions it is listed and tried again by the consumer's name; an index wants the partition's."""
    make_table(sqlite)
    publish(0, 40)
    bad = {3, 5, 11, 12}

    def handle(connection: Connection, message: Message) -> None:
        write(connection, message)
        if int(message.payload or b"") in bad:
            raise ValueError

    config = ConsumerConfig(max_attempts=1, poison="retry later", first_retry_delay_ms=3_600_000)
    Consumer(client, topic, "c", sqlite, handle, config=config).run(follow=False)
    # What waits behind 3 and 5 with their keys, too: 11 is one of those.
    assert len(written(sqlite)) == 40 - 5 - 5 - 4
    found = set_aside(sqlite, "c", 100)
    assert len(found) == 14
    [one] = [row for _, row in found if row.payload == b"12"]
    assert one.consumer in {row_name("c", k) for k in range(PARTITIONS)}
    for change in (retry, drop):
        with pytest.raises(ConfigurationError, match="4 partitions, each with separate indexes"):
            change(sqlite, "c", [one.message_index])
    assert drop(sqlite, one.consumer, [one.message_index]) == 1
    bad.clear()
    assert retry(sqlite, "c", []).now >= 2
    # A process that was killed has its partitions still, at whose ends nothing is new.
    with sqlite.begin() as connection:
        connection.execute(update(CONSUMERS).values(owner="killed"))
        connection.execute(insert(PROCESSES).values(consumer="c", token="killed", beat=0))
    Consumer(client, topic, "c", sqlite, handle, config=config).run(follow=False)
    assert set_aside(sqlite, "c", 1) == []
    assert sorted(written(sqlite)) == [n for n in range(40) if n != 12]


def test_starts_and_names(sqlite: Engine, client: Client, topic: str, publish: Callable[[int, int], None]) -> None:
    make_table(sqlite)
    publish(0, 50)
    Consumer(client, topic, "late", sqlite, write, start="latest").run(follow=False)
    assert written(sqlite) == []
    with client.partitioned_reader(topic) as reader:
        for _ in range(30):
            next(reader)
        position = reader.position
    assert position is not None
    Consumer(client, topic, "there", sqlite, write, start=position).run(follow=False)
    assert len(written(sqlite)) == 20
    for wrong in (client.ends(f"{topic}-partition-0").last, PartitionedPosition(position.partitions[:2])):
        with pytest.raises(ConfigurationError) as e:
            Consumer(client, topic, "c", sqlite, write, start=wrong).run(follow=False)
        assert e.value.reason == "INVALID_OPTION"
    with pytest.raises(ConfigurationError) as e:
        Consumer(client, topic, "c" * 250, sqlite, write).run(follow=False)
    assert e.value.reason == "INVALID_OPTION"
    client.admin.create_topic(f"{topic}-other", partitions=2)
    with pytest.raises(ConfigurationError) as e:
        Consumer(client, f"{topic}-other", "late", sqlite, write).run(follow=False)
    assert e.value.reason == "CONSUMER_CHANGED"
