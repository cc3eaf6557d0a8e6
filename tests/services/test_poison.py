"""Messages that the handler refuses: the dead letters, retries in the order of their keys, and people. Costs 15 s."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import Connection, Engine, Table, create_engine, delete, select, update

from seqdedupe.client.blocking import Client
from seqdedupe.client.message import Message
from seqdedupe.errors import ConfigurationError, SeqdedupeError
from seqdedupe.limits import MAX_BATCH_BYTES, MAX_PAYLOAD_BYTES, MIN_EVENT_TIME_MS
from seqdedupe.services.consumer import Consumer, ConsumerConfig, database, work
from seqdedupe.services.consumer.database import DEAD_LETTERS, FORMAT_VERSION, IDENTITIES, PARKED
from seqdedupe.services.consumer.dead_letters import DeadLetterPublisher, SetAside, deduplication_id, drop, retry
from tests.services.conftest import Publish
from tests.services.effects import TIMEOUT_SECONDS, effects, make_table, numbers, places_as_written, until, write
from tests.services.killed import Killed

COMMAND = str(Path(sys.executable).with_name("seqdedupe"))
DEAD = ConsumerConfig(max_attempts=2, first_backoff_ms=1, poison="dead letter")
LATER = ConsumerConfig(max_attempts=2, first_backoff_ms=1, poison="retry later", max_retries=3, first_retry_delay_ms=1)
SLOW = ConsumerConfig(max_attempts=1, poison="retry later", first_retry_delay_ms=3_600_000)
FOR_EVER = replace(LATER, max_retries=10**6)


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is parked is looked at after every transaction."""
    monkeypatch.setattr(database, "KEEP_UP_SECONDS", 0.0)


@contextmanager
def running(consumer: Consumer) -> Iterator[None]:
    thread = threading.Thread(target=consumer.run)
    thread.start()
    try:
        until(lambda: consumer.is_working)
        yield
    finally:
        consumer.stop()
        thread.join(TIMEOUT_SECONDS)
        assert not thread.is_alive()


def indexes(engine: Engine, table: Table) -> list[int]:
    with engine.begin() as connection:
        return list(connection.execute(select(table.c.message_index).order_by(table.c.message_index)).scalars())


def refusing(*bad: int) -> tuple[Callable[[Connection, Message], None], set[int]]:
    """A handler that refuses these, as long as they stand in the set."""
    left = set(bad)

    def handle(connection: Connection, message: Message) -> None:
        write(connection, message)
        if message.index in left:
            # What no database takes in a text: NUL, and half of a surrogate pair.
            raise ValueError(f"{message.index} is bad\x00\ud800")

    return handle, left


def test_dead_letters(engine: Engine, client: Client, topic: str, publish: Publish) -> None:
    make_table(engine)
    with client.producer(topic, "p") as producer:
        for n in range(20):
            producer.send(b"%d" % n, key=f"k{n}", event_time=n + 1, properties={"n": "ä"})
    handle, _ = refusing(3, 17)
    Consumer(client, topic, "c", engine, handle, config=DEAD).run(follow=False)
    assert effects(engine) == [str(n) for n in range(20) if n not in (3, 17)]
    with engine.begin() as connection:
        first, second = connection.execute(select(DEAD_LETTERS).order_by(DEAD_LETTERS.c.message_index)).all()
    assert (first.message_index, second.message_index) == (3, 17)
    assert (bytes(first.payload), bytes(first.message_key), json.loads(first.properties)) == (b"3", b"k3", {"n": "ä"})
    assert (first.producer_name, first.sequence_id, first.event_time_ms, first.attempts) == ("p", 3, 4, 2)
    assert first.error == "ValueError: 3 is bad\\ud800"


def test_retries_later_keep_the_order_of_each_key(engine: Engine, client: Client, topic: str, publish: Publish) -> None:
    make_table(engine)
    publish(*numbers(12), keys=["a", "b", None] * 4)
    handle, left = refusing(3, 5)
    with running(Consumer(client, topic, "c", engine, handle, config=FOR_EVER)):
        until(lambda: len(effects(engine)) == 8)
        # What has no key waits for nobody.
        assert indexes(engine, PARKED) == [3, 5, 6, 9]
        publish("12", keys=["a"])
        until(lambda: indexes(engine, PARKED) == [3, 5, 6, 9, 12])
        left.clear()
        until(lambda: len(effects(engine)) == 13)
    assert effects(engine) == sorted(numbers(13), key=int)
    assert indexes(engine, PARKED) == indexes(engine, DEAD_LETTERS) == []
    if engine.dialect.name == "sqlite":
        assert [place for place in places_as_written(engine) if place % 3 == 0] == [0, 3, 6, 9, 12]


def test_without_the_order_of_keys_later_ones_come_first(
    sqlite: Engine, client: Client, topic: str, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control arm: a table of retries that is not asked for the key."""
    monkeypatch.setattr(SetAside, "keys_parked", lambda *_: set())
    make_table(sqlite)
    publish(*numbers(4), keys=["a"] * 4)
    handle, left = refusing(1)
    with running(Consumer(client, topic, "c", sqlite, handle, config=FOR_EVER)):
        until(lambda: len(effects(sqlite)) == 3)
        left.clear()
        until(lambda: len(effects(sqlite)) == 4)
    assert places_as_written(sqlite) == [0, 2, 3, 1]


def test_in_the_end_it_is_given_up_and_the_next_of_its_key_has_its_turn(
    engine: Engine, client: Client, topic: str, publish: Publish
) -> None:
    make_table(engine)
    publish(*numbers(6), keys=["a", "b"] * 3)
    handle, _ = refusing(0, 2)
    with running(Consumer(client, topic, "c", engine, handle, config=LATER)):
        until(lambda: indexes(engine, DEAD_LETTERS) == [0, 2] and len(effects(engine)) == 4)
    assert indexes(engine, PARKED) == []
    with engine.begin() as connection:
        attempts = list(connection.execute(select(DEAD_LETTERS.c.attempts)).scalars())
    # The second one was behind, and so was first tried as a retry.
    assert attempts[0] == 5
    assert attempts[1] in (3, 4, 5)


def test_what_is_parked_is_tried_also_when_poison_is_now_to_stop(
    sqlite: Engine, client: Client, topic: str, publish: Publish
) -> None:
    make_table(sqlite)
    publish(*numbers(4), keys=["a"] * 4)
    handle, left = refusing(1)
    Consumer(client, topic, "c", sqlite, handle, config=SLOW).run(follow=False)
    assert indexes(sqlite, PARKED) == [1, 2, 3]
    left.clear()
    publish("4", keys=["a"])
    retry(sqlite, "c", [])
    with running(Consumer(client, topic, "c", sqlite, handle)):
        until(lambda: len(effects(sqlite)) == 5)
    assert places_as_written(sqlite) == [0, 1, 2, 3, 4]


def test_people_retry_and_drop(engine: Engine, client: Client, topic: str, publish: Publish) -> None:
    make_table(engine)
    publish(*numbers(6), keys=["a"] * 6)
    handle, left = refusing(1, 3)

    def run() -> None:
        Consumer(client, topic, "c", engine, handle, config=SLOW).run(follow=False)

    run()
    assert indexes(engine, PARKED) == [1, 2, 3, 4, 5]
    run()
    assert effects(engine) == ["0"]
    assert drop(engine, "c", [1]) == 1
    run()  # 2 has its turn, and 3 fails
    assert effects(engine) == ["0", "2"]
    left.clear()
    run()
    assert effects(engine) == ["0", "2"]
    assert retry(engine, "c", []).now == 1
    run()
    assert effects(engine) == ["0", "2", "3", "4", "5"]
    assert indexes(engine, PARKED) == []
    with pytest.raises(ConfigurationError, match="there is no consumer 'd'"):
        retry(engine, "d", [])
    for change in (retry, drop):
        with pytest.raises(ConfigurationError, match="set aside no message with index 98, 99"):
            change(engine, "c", [99, 98])


def test_a_run_that_does_not_follow_tries_at_its_end_what_is_due(
    engine: Engine, client: Client, topic: str, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However short it is: it never comes to what is done from time to time."""
    monkeypatch.setattr(database, "KEEP_UP_SECONDS", 3600.0)
    monkeypatch.setattr(work, "MAX_RETRIES_IN_A_ROW", 2)
    make_table(engine)
    publish(*numbers(8), keys=["a", "b"] * 4)
    handle, left = refusing(0, 1)

    def run() -> None:
        Consumer(client, topic, "c", engine, handle, config=SLOW).run(follow=False)

    run()
    assert indexes(engine, PARKED) == list(range(8))
    left.remove(0)
    publish("8", keys=["a"])
    run()  # nothing is due
    assert effects(engine) == []
    assert retry(engine, "c", [0]).now == 1
    publish("9", keys=["a"])
    run()
    assert effects(engine) == ["0", "2", "4", "6", "8", "9"]
    assert indexes(engine, PARKED) == [1, 3, 5, 7]
    left.clear()
    assert retry(engine, "c", []).now == 1
    run()  # there is nothing new
    assert indexes(engine, PARKED) == []
    assert len(effects(engine)) == 10


def test_a_dead_letter_is_tried_again_before_what_is_parked_with_its_key(
    sqlite: Engine, client: Client, topic: str, publish: Publish
) -> None:
    make_table(sqlite)
    publish(*numbers(4), keys=["a"] * 4)
    handle, left = refusing(1, 2)
    Consumer(client, topic, "c", sqlite, handle, config=ConsumerConfig(max_attempts=1, poison="dead letter")).run(
        follow=False
    )
    assert indexes(sqlite, DEAD_LETTERS) == [1, 2]
    left.clear()
    assert retry(sqlite, "c", [2]) == (1, [], [])
    assert retry(sqlite, "c", [1, 2]) == (1, [2], [])
    Consumer(client, topic, "c", sqlite, handle, config=SLOW).run(follow=False)
    assert places_as_written(sqlite) == [0, 3, 1, 2]


def test_an_index_is_taken_as_it_is_shown(
    sqlite: Engine, sqlite_url: str, client: Client, topic: str, publish: Publish
) -> None:
    make_table(sqlite)
    publish(*numbers(1001))
    handle, _ = refusing(1000)
    Consumer(client, topic, "c", sqlite, handle, config=SLOW).run(follow=False)
    command = [COMMAND, "consumer", "parked", "c", "--database", sqlite_url]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[1].split()
    command[2:4] = ["drop", "c", shown[1]]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "1 message of c is removed\n"


def test_the_command(sqlite: Engine, sqlite_url: str, client: Client, topic: str, publish: Publish) -> None:
    def command(*words: str, status: int = 0) -> str:
        command = [COMMAND, "consumer", *words, "--database", sqlite_url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
        assert done.returncode == status, done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout + done.stderr

    assert "there is no file" in command("parked", "c", status=1)
    assert not Path(sqlite.url.database or "").exists()
    make_table(sqlite)
    publish(*numbers(3), keys=["a\x1b", "b", "b"])
    handle, left = refusing(0, 1)
    Consumer(client, topic, "c", sqlite, handle, config=SLOW).run(follow=False)
    shown = command("parked", "c").splitlines()
    assert shown[0].split() == ["STATE", "INDEX", "KEY", "ATTEMPTS", "NEXT", "MS", "ERROR"]
    assert [line.split()[:3] for line in shown[1:]] == [
        ["parked", "0", r"a\x1b"],
        ["parked", "1", "b"],
        ["parked", "2", "b"],
    ]
    listed = json.loads(command("parked", "c", "--json"))
    assert f" {listed[0]['next_attempt_ms']} " in shown[1]
    assert [(one["index"], one["next_attempt_ms"] is None) for one in listed] == [(0, False), (1, False), (2, True)]
    assert command("drop", "c", "0") == "1 message of c is removed\n"
    assert json.loads(command("retry", "c", "--json")) == {"retried": 1, "behind": [], "leaving": []}
    assert command("retry", "c", "2").splitlines() == [
        "0 messages of c are tried again when the consumer runs",
        "2 waits for an earlier message of its key",
    ]
    assert "set aside no message with index 99 [INVALID_OPTION]" in command("retry", "c", "1", "99", status=1)
    assert "there is no consumer 'd' in this database [INVALID_OPTION]" in command("parked", "d", status=1)
    left.clear()
    Consumer(client, topic, "c", sqlite, handle, config=SLOW).run(follow=False)
    assert places_as_written(sqlite) == [1, 2]


def test_dead_letters_go_to_a_topic_once(
    engine: Engine, client: Client, topic: str, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No matter what dies between the topic and the table, and in any order they were given up."""
    make_table(engine)
    letters = f"{topic}-dead"
    client.admin.create_topic(letters, deduplication_mode="deduplication-id")
    with client.producer(topic, "p") as producer:
        times = [MIN_EVENT_TIME_MS if n == 17 else n + 1 for n in range(20)]
        keys, payloads = [f"k{n}" for n in range(20)], [b"%d" % n for n in range(20)]
        producer.send_batch(payloads, keys=keys, event_times_ms=times, properties=[{"n": "ä"}] * 20)
    handle, left = refusing(3, 17)
    settle = DeadLetterPublisher._settle
    monkeypatch.setattr(DeadLetterPublisher, "keep_up", lambda _: None)  # both go at the end
    monkeypatch.setattr(DeadLetterPublisher, "_settle", _killed)  # it is there, and nobody deletes it
    with pytest.raises(Killed):
        Consumer(client, topic, "c", engine, handle, config=replace(DEAD, dead_letter_topic=letters)).run(follow=False)
    monkeypatch.setattr(DeadLetterPublisher, "_settle", settle)
    assert indexes(engine, DEAD_LETTERS) == [3, 17]
    assert retry(engine, "c", [3]) == (0, [], [3])  # it is on its way
    left.clear()
    Consumer(client, topic, "c", engine, handle, config=DEAD).run(follow=False)  # also when it is no longer asked for
    assert indexes(engine, DEAD_LETTERS) == []
    with client.reader(letters) as reader:
        found = {message.payload: message for message in reader}
        assert reader.position is not None
        assert reader.position.index == 1  # each once
    incarnation = client.ends(topic).last.incarnation
    one = found[b"3"]
    assert set(found) == {b"17", b"3"}
    with engine.connect() as connection:
        identity = connection.execute(select(IDENTITIES.c.identity)).scalar_one()
    assert one.deduplication_id == f"c/persistent://public/default/{topic}/{incarnation}/3/{identity}".encode()
    assert (one.key, one.event_time_ms, one.properties["n"]) == (b"k3", 4, "ä")
    assert found[b"17"].event_time_ms == MIN_EVENT_TIME_MS
    assert one.properties["EXCEPTION_MESSAGE"] == "ValueError: 3 is bad\\ud800"
    assert one.properties["REAL_TOPIC"] == f"persistent://public/default/{topic}"
    assert one.properties["ORIGIN_MESSAGE_ID"] == f"{incarnation}:3"
    assert effects(engine) == [str(n) for n in range(20) if n not in (3, 17)]


def _killed(*_: object) -> None:
    raise Killed


def test_a_topic_of_sequence_ids_would_lose_dead_letters(
    sqlite: Engine, client: Client, topic: str, publish: Publish
) -> None:
    """They come in another order than they were sent in: so it is refused before anything is done."""
    make_table(sqlite)
    publish("0")
    client.admin.create_topic(f"{topic}-dead")
    for letters, reason in ((f"{topic}-dead", "INVALID_OPTION"), (f"{topic}-none", "TOPIC_NOT_FOUND")):
        config = ConsumerConfig(poison="dead letter", dead_letter_topic=letters)
        with pytest.raises(SeqdedupeError) as e:
            Consumer(client, topic, "c", sqlite, write, config=config).run(follow=False)
        assert e.value.reason == reason
    with pytest.raises(SeqdedupeError) as e:
        ConsumerConfig(dead_letter_topic="a b")
    assert e.value.reason == "INVALID_TOPIC_NAME"
    assert effects(sqlite) == []


def test_a_dead_letter_that_is_too_large_stays(
    sqlite: Engine, client: Client, topic: str, publish: Publish, caplog: pytest.LogCaptureFixture
) -> None:
    make_table(sqlite)
    letters = f"{topic}-dead"
    client.admin.create_topic(letters, deduplication_mode="deduplication-id")
    with client.producer(topic, "p") as producer:
        # With what a dead letter says of itself it is more than a batch may have.
        property_bytes = MAX_BATCH_BYTES - MAX_PAYLOAD_BYTES - 600
        producer.send(bytes(MAX_PAYLOAD_BYTES), properties={"n": "x" * property_bytes}).result()
        producer.send(b"1")

    def handle(connection: Connection, message: Message) -> None:
        raise ValueError

    config = replace(DEAD, dead_letter_topic=letters)
    Consumer(client, topic, "c", sqlite, handle, config=config).run(follow=False)
    assert indexes(sqlite, DEAD_LETTERS) == [0]
    assert client.ends(letters).last.index == 0
    [told] = [record for record in caplog.records if "stays in its table" in record.message]
    assert told.exc_info is None
    assert "[BATCH_TOO_LARGE]" in told.message
    assert retry(sqlite, "c", [0]).now == 1


@pytest.mark.parametrize("config", [DEAD, LATER], ids=lambda config: config.poison)
def test_a_message_that_was_set_aside_has_its_deduplication_id(
    engine: Engine, client: Client, topic: str, config: ConsumerConfig
) -> None:
    client.admin.create_topic(topic, deduplication_mode="deduplication-id")
    with client.publisher(topic) as publisher:
        publisher.send(b"x", deduplication_id=b"evt\x00\xff")
    seen: list[bytes | None] = []

    def handle(connection: Connection, message: Message) -> None:
        seen.append(message.deduplication_id)
        if len(seen) < 3:
            raise ValueError

    Consumer(client, topic, "c", engine, handle, config=config).run(follow=False)
    if config is DEAD:
        retry(engine, "c", [0])
        Consumer(client, topic, "c", engine, handle, config=config).run(follow=False)
    assert len(seen) >= 3
    assert set(seen) == {b"evt\x00\xff"}


def test_dead_letters_have_no_key_of_their_own(sqlite: Engine, client: Client, topic: str, publish: Publish) -> None:
    """Into a topic that wants one of each message they would not go; what was meant for another topic, or one that is
    gone, stays for people."""
    letters = f"{topic}-letters"
    client.admin.create_topic(letters, partitions=2, deduplication_mode="deduplication-id", deduplication_route="key")
    publish("0", "1")
    handle, _ = refusing(0)
    with pytest.raises(SeqdedupeError, match="by key") as raised:
        Consumer(client, topic, "c", sqlite, handle, config=replace(DEAD, dead_letter_topic=letters)).run(follow=False)
    assert raised.value.reason == "INVALID_OPTION"
    make_table(sqlite)
    Consumer(client, topic, "c", sqlite, handle, config=DEAD).run(follow=False)
    with sqlite.begin() as connection:
        connection.execute(update(DEAD_LETTERS).values(dead_letter_topic=f"persistent://public/default/{letters}-gone"))
    Consumer(client, topic, "c", sqlite, handle, config=DEAD).run(follow=False)
    assert indexes(sqlite, DEAD_LETTERS) == [0]


def test_the_ids_of_dead_letters() -> None:
    assert deduplication_id("c", "t", 1, 2, None) == "c/t/1/2"
    assert deduplication_id("c", "t", 1, 2, "abc") == "c/t/1/2/abc"
    long = deduplication_id("c" * 200, "t" * 60, 1, 2, None)
    assert len(long) == 64
    assert long != deduplication_id("c" * 200, "t" * 60, 1, 3, None)


@pytest.mark.parametrize(("format_version", "letters_there"), [(FORMAT_VERSION, 2), (1, 1)])
def test_dead_letters_of_one_name_in_two_databases(
    client: Client,
    topic: str,
    publish: Publish,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    format_version: int,
    letters_there: int,
) -> None:
    """Each database has an identity. The control arm, rows of format 1, loses the letter of the second database."""
    letters = f"{topic}-dead"
    client.admin.create_topic(letters, deduplication_mode="deduplication-id")
    publish("0")
    monkeypatch.setattr(database, "FORMAT_VERSION", format_version)
    handle, _ = refusing(0)
    for name in ("one", "two"):
        engine = create_engine(f"sqlite:///{tmp_path / name}.db")
        make_table(engine)
        Consumer(client, topic, "c", engine, handle, config=replace(DEAD, dead_letter_topic=letters)).run(follow=False)
        assert indexes(engine, DEAD_LETTERS) == []
        engine.dispose()
    with client.reader(letters) as reader:
        assert len(list(reader)) == letters_there


@pytest.mark.parametrize("has_other_identity", [False, True])
def test_a_dead_letter_of_format_1_that_is_in_the_topic_already(
    engine: Engine,
    client: Client,
    topic: str,
    publish: Publish,
    monkeypatch: pytest.MonkeyPatch,
    has_other_identity: bool,
) -> None:
    """As when an update stops the consumer between the topic and the table. The letter keeps its ID, also if the row
    was made again by the earlier version."""
    make_table(engine)
    letters = f"{topic}-dead"
    client.admin.create_topic(letters, deduplication_mode="deduplication-id")
    publish("0")
    handle, _ = refusing(0)
    config = replace(DEAD, dead_letter_topic=letters)
    with monkeypatch.context() as former:
        former.setattr(database, "FORMAT_VERSION", 1)
        former.setattr(database, "identities_of", lambda *_: {})
        former.setattr(DeadLetterPublisher, "_settle", _killed)
        with pytest.raises(Killed):
            Consumer(client, topic, "c", engine, handle, config=config).run(follow=False)
    if not has_other_identity:
        with engine.begin() as connection:
            connection.execute(delete(IDENTITIES))
    assert indexes(engine, DEAD_LETTERS) == [0]
    Consumer(client, topic, "c", engine, handle, config=config).run(follow=False)
    assert indexes(engine, DEAD_LETTERS) == []
    with client.reader(letters) as reader:
        assert [message.deduplication_id for message in reader] == [
            f"c/persistent://public/default/{topic}/{client.ends(topic).last.incarnation}/0".encode()
        ]
