"""Business order: versions shuffled, repeated and missing, over two topics at once. Costs 10 s."""

import json
import random
import re
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
from sqlalchemy import Connection, Engine, create_engine, insert, select, text, update

from seqdedupe.client.blocking import Client
from seqdedupe.client.message import Message
from seqdedupe.errors import ConfigurationError, InvalidRequestError
from seqdedupe.services.consumer import Consumer, ConsumerConfig
from seqdedupe.services.consumer.database import DEAD_LETTERS
from seqdedupe.services.inbox import KEYS, PARKED, Inbox, InboxVerdict, checked, decide, in_cycles
from seqdedupe.testing import LAST_RESORT_SECONDS
from tests.services.effects import make_table, places_as_written, write

COMMAND = str(Path(sys.executable).with_name("seqdedupe"))

QUICK = ConsumerConfig(max_attempts=2, first_backoff_ms=1, poison="dead letter")


def versions_of(message: Message) -> Mapping[str, int]:
    """In the tests a payload is `X4 Y7`."""
    return {word[0]: int(word[1:]) for word in (message.payload or b"").decode().split()}


def inbox(engine: Engine, **more: object) -> Inbox:
    return Inbox("i", engine, write, **({"versions": versions_of} | more))  # type: ignore[arg-type]


def publish(client: Client, topic: str, *payloads: str) -> None:
    with client.producer(topic, "p") as producer:
        for payload in payloads:
            producer.send(payload.encode(), key=payload[:1])


def consume(client: Client, topic: str, engine: Engine, handle: Inbox, name: str = "c") -> None:
    Consumer(client, topic, name, engine, handle, config=QUICK).run(follow=False)


def written(engine: Engine) -> list[str]:
    """In SQLite, and in tables without deletions elsewhere: in the order in which it took effect."""
    order = " ORDER BY rowid" if engine.dialect.name == "sqlite" else ""
    with engine.connect() as connection:
        return list(connection.execute(text(f"SELECT what FROM effects{order}")).scalars())


def parked(engine: Engine) -> int:
    with engine.connect() as connection:
        return len(connection.execute(select(PARKED.c.id)).all())


def test_early_ones_wait_and_old_ones_are_dropped(engine: Engine, client: Client, topic: str) -> None:
    make_table(engine)
    publish(client, topic, "A3", "A2", "B1", "A1", "A2", "B3", "A5", "A4")
    handle = inbox(engine)
    consume(client, topic, engine, handle)
    assert sorted(written(engine)) == ["A1", "A2", "A3", "A4", "A5", "B1"]
    if engine.dialect.name == "sqlite":
        assert written(engine) == ["B1", "A1", "A2", "A3", "A4", "A5"]
    [waiting] = handle.waiting()
    assert (waiting.message.payload, dict(waiting.missing), waiting.in_cycle) == (b"B3", {"B": 2}, False)
    assert handle.waiting(longer_than_seconds=3600) == []
    with engine.connect() as connection:
        dropped = {row.name: row.dropped for row in connection.execute(select(KEYS))}
    assert dropped == {"A": 1, "B": 0}
    publish(client, topic, "B2")
    consume(client, topic, engine, handle)
    assert parked(engine) == 0
    assert handle.waiting() == []


def test_latest(engine: Engine, client: Client, topic: str) -> None:
    make_table(engine)
    publish(client, topic, "A3", "A2", "A7", "A7", "B0", "A9")
    consume(client, topic, engine, inbox(engine, order="latest"))
    assert sorted(written(engine)) == ["A3", "A7", "A9", "B0"]


def test_several_keys(engine: Engine, client: Client, topic: str) -> None:
    """A transfer waits for both accounts, and what comes after it for the transfer."""
    make_table(engine)
    publish(client, topic, "X3", "X2 Y2", "Y3", "X1", "Y1")
    consume(client, topic, engine, inbox(engine))
    assert sorted(written(engine)) == ["X1", "X2 Y2", "X3", "Y1", "Y3"]
    if engine.dialect.name == "sqlite":
        assert written(engine)[:3] == ["X1", "Y1", "X2 Y2"]
    assert parked(engine) == 0


def test_cycles_are_told(sqlite: Engine, client: Client, topic: str) -> None:
    make_table(sqlite)
    publish(client, topic, "X2 Y1", "X1 Y2", "X3", "Z2")
    handle = inbox(sqlite)
    consume(client, topic, sqlite, handle)
    # Those that were parked in the same millisecond come in any order.
    assert {one.message.payload: one.in_cycle for one in handle.waiting()} == {
        b"X2 Y1": True,
        b"X1 Y2": True,
        b"X3": False,
        b"Z2": False,
    }
    assert written(sqlite) == []


def test_cycles_of_a_graph() -> None:
    chain = [({"X": n + 1}, {"X": n}) for n in range(1, 5000)]
    assert not any(in_cycles(chain))
    ring = [({"A": 1, "B": 2}, {"B": 1}), ({"B": 1, "C": 2}, {"C": 1}), ({"C": 1, "A": 2}, {"A": 1})]
    # The third waits for the first one, which waits for the second, which waits for the third.
    assert in_cycles(ring) == [True, True, True]
    assert in_cycles([*ring, ({"A": 3}, {"A": 2})]) == [True, True, True, False]
    assert in_cycles([]) == []


@pytest.mark.parametrize("in_batches", [False, True])
def test_two_consumers_at_once_wake_what_the_other_one_parks(
    url: str, client: Client, topic: str, in_batches: bool
) -> None:
    """Two topics have every other version of each key, in any order; both are consumed at the same time."""
    engine = create_engine(url)
    make_table(engine)
    dice = random.Random(5)
    parts: list[list[str]] = [[], []]
    for key in "ABC":
        for version in range(1, 41):
            parts[dice.randrange(2)].append(f"{key}{version}")
    for number, part in enumerate(parts):
        dice.shuffle(part)
        publish(client, f"{topic}-{number}", *part)
    handle = inbox(engine)
    failures: list[BaseException] = []
    waited_for: list[BaseException] = []

    def work(number: int) -> None:
        try:
            config = ConsumerConfig(max_batch_messages=3)
            which = (client, f"{topic}-{number}", f"c{number}", engine, handle)
            Consumer(*which, in_batches=in_batches, config=config, on_waiting=waited_for.append).run(follow=False)
        except BaseException as e:
            failures.append(e)
            raise

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    if in_batches and engine.dialect.name == "postgresql":
        assert waited_for == []  # no deadlock
    assert parked(engine) == 0
    assert sorted(written(engine)) == sorted(f"{key}{version}" for key in "ABC" for version in range(1, 41))
    if engine.dialect.name == "sqlite":
        for key in "ABC":
            assert [one for one in written(engine) if one[0] == key] == [f"{key}{n}" for n in range(1, 41)]
    engine.dispose()


def test_what_was_not_woken_a_sweep_finds(
    sqlite: Engine, client: Client, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control arm: an inbox that wakes nobody leaves messages behind; the sweep is what then saves them."""
    make_table(sqlite)
    publish(client, topic, "A3", "A2", "A1")
    handle = inbox(sqlite)
    with monkeypatch.context() as planted:
        planted.setattr(Inbox, "_wake", lambda *_: None)
        consume(client, topic, sqlite, handle)
    assert written(sqlite) == ["A1"]
    assert handle.sweep() == 2
    assert written(sqlite) == ["A1", "A2", "A3"]
    assert handle.sweep() == 0


def test_a_parked_message_that_fails_is_not_the_fault_of_what_wakes_it(
    engine: Engine, client: Client, topic: str
) -> None:
    make_table(engine)
    bad = {"A2"}

    def handle(connection: Connection, message: Message) -> None:
        write(connection, message)
        if (message.payload or b"").decode() in bad:
            raise ValueError("no")

    front = Inbox("i", engine, handle, versions=versions_of)
    publish(client, topic, "A3", "A2", "A1")
    consume(client, topic, engine, front)
    assert written(engine) == ["A1"]
    assert [(one.message.payload, one.error) for one in front.waiting()] == [(b"A3", ""), (b"A2", "ValueError: no")]
    assert front.sweep() == 0
    bad.clear()
    assert front.sweep() == 2
    assert sorted(written(engine)) == ["A1", "A2", "A3"]


CODE = """
from sqlalchemy import create_engine
from seqdedupe.services.inbox import Inbox

inbox = Inbox("i", create_engine({url!r}), lambda connection, message: None, key=lambda m: m.key, version=lambda m: 1)
"""


def test_the_command(sqlite: Engine, sqlite_url: str, client: Client, topic: str, tmp_path: Path) -> None:
    def command(*words: str, status: int = 0) -> str:
        command = [COMMAND, "inbox", *words]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, timeout=LAST_RESORT_SECONDS, check=False
        )
        assert done.returncode == status, done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout + done.stderr

    where = ("--database", sqlite_url)
    assert "there is no file" in command("waiting", "i", *where, status=1)
    assert not Path(sqlite.url.database or "").exists()
    sqlite.connect().close()
    assert "no such table" in command("waiting", "i", *where, status=1)
    publish(client, topic, "X1", "X4", "Y2 Z1", "Y1 Z2", "X2", "X3")

    def refusing(_connection: Connection, message: Message) -> None:
        if message.payload == b"X4":
            raise ValueError("no\x1b")

    consume(client, topic, sqlite, Inbox("i", sqlite, refusing, versions=versions_of))
    shown = command("waiting", "i", *where).splitlines()
    assert shown[0].split() == ["INDEX", "VERSIONS", "WAITS", "FOR", "SECONDS", "ERROR"]
    # Those that were parked in the same millisecond come in any order.
    rows = sorted(re.split("  +", line.strip()) for line in shown[1:])
    assert [(row[:3], row[4:]) for row in rows] == [
        (["1", "X 4", "-"], [r"ValueError: no\x1b"]),
        (["2", "Y 2, Z 1", "Y 1 (a cycle)"], []),
        (["3", "Y 1, Z 2", "Z 1 (a cycle)"], []),
    ]
    listed = {one["index"]: one for one in json.loads(command("waiting", "i", *where, "--json"))}
    assert [(one["missing"], one["in_cycle"]) for _, one in sorted(listed.items())] == [
        ({}, False),
        ({"Y": 1}, True),
        ({"Z": 1}, True),
    ]
    assert json.loads(command("waiting", "i", *where, "--json", "--longer-than", "3600")) == []
    assert "no message has passed an inbox 'j'" in command("waiting", "j", *where, status=1)
    (tmp_path / "booking.py").write_text(CODE.format(url=sqlite_url))
    assert json.loads(command("sweep", "booking:inbox", "--json")) == {"handled": 1, "parked": 2}
    assert command("sweep", "booking:inbox") == "0 messages are no longer parked in i, 2 still\n"
    for wrong in ("booking", "booking:Inbox", "nowhere:inbox"):
        command("sweep", wrong, status=2)


def test_the_rule() -> None:
    assert decide("contiguous", {"A": 1, "B": 3}, {"A": 0, "B": 2}).verdict is InboxVerdict.APPLY
    assert decide("contiguous", {"A": 1, "B": 3}, {"A": 0, "B": 1}) == (InboxVerdict.PARK, "B", 2)
    assert decide("contiguous", {"A": 1, "B": 3}, {"A": 1, "B": 3}).verdict is InboxVerdict.DROP
    assert decide("latest", {"A": 9}, {"A": 0}).verdict is InboxVerdict.APPLY
    with pytest.raises(InvalidRequestError, match="version 1 of 'A' was applied already"):
        decide("contiguous", {"A": 1, "B": 3}, {"A": 1, "B": 2})
    for wrong in (
        None,
        {},
        {"": 1},
        {"a" * 256: 1},
        {"a\x00": 1},
        {1: 1},
        {"a": -1},
        {"a": True},
        {"a": "1"},
        {"a": 2**63},
    ):
        with pytest.raises(InvalidRequestError) as e:
            checked(wrong)
        assert e.value.reason == "INVALID_VERSION"
    assert "from 0 to 9223372036854775807" in e.value.message
    assert checked({b"a": 1}) == {"a": 1}


def keyed(engine: Engine, **more: object) -> Inbox:
    """Keys as the messages have them, whose payload is the version."""
    of = {"key": lambda message: message.key, "version": lambda message: int(message.payload)}
    return Inbox("i", engine, write, **(of | more))  # type: ignore[arg-type]


def test_no_two_keys_of_bytes_are_one(engine: Engine, client: Client, topic: str) -> None:
    """Whether they are text in some other encoding, or none."""
    make_table(engine)
    keys = [
        "Müller".encode("latin-1"),
        "Möller".encode("latin-1"),
        "Müller".encode(),
        b"\x80",
        b"\x81",
        b"\x00",
        b"\xff" * 2000,
    ]
    with client.producer(topic, "p") as producer:
        for version in (b"1", b"2"):
            for key in keys:
                producer.send(version, key=key)
    consume(client, topic, engine, keyed(engine))
    assert sorted(written(engine)) == ["1"] * len(keys) + ["2"] * len(keys)
    with engine.connect() as connection:
        names = connection.execute(select(KEYS.c.name)).scalars().all()
    assert "Müller" in names
    assert len(set(names)) == len(keys)


def test_a_key_that_was_stored_under_a_name_of_several_goes_on(sqlite: Engine, client: Client, topic: str) -> None:
    """Earlier versions put U+FFFD for what is no text. What was parked under such a name is found by a sweep."""
    make_table(sqlite)
    handle = keyed(sqlite)
    with sqlite.begin() as connection:
        former = {"inbox": "i", "name": "M\ufffdller", "version": 3, "dropped": 0, "locked": 0}
        connection.execute(insert(KEYS).values(former))
    with client.producer(topic, "p") as producer:
        producer.send(b"5", key="Müller".encode("latin-1"))
        producer.send(b"6", key="Müller".encode("latin-1"))
    consume(client, topic, sqlite, handle)
    assert parked(sqlite) == 2
    with sqlite.begin() as connection:  # as an earlier version parked them
        for version in (5, 6):
            row = {"waits_for_key": "M\ufffdller", "versions": json.dumps({"M\ufffdller": version})}
            connection.execute(update(PARKED).where(PARKED.c.waits_for_version == version - 1).values(row))
    with client.producer(topic, "p") as producer:
        producer.send(b"4", key="Müller".encode("latin-1"))
        producer.send(b"1", key="Möller".encode("latin-1"))
    consume(client, topic, sqlite, handle)
    assert written(sqlite) == ["4", "1"]
    assert handle.sweep() == 2
    assert written(sqlite) == ["4", "1", "5", "6"]


def test_a_key_as_text_and_as_bytes_is_one() -> None:
    with pytest.raises(InvalidRequestError, match="two versions"):
        checked({"a": 1, b"a": 2})


def test_what_cannot_be(sqlite: Engine, client: Client, topic: str, tmp_path: Path) -> None:
    make_table(sqlite)
    for wrong in (
        {"versions": None},
        {"key": lambda message: message.key},
        {"order": "any"},
        {"first_version": -1},
    ):
        with pytest.raises(ConfigurationError) as e:
            inbox(sqlite, **wrong)
        assert e.value.reason == "INVALID_OPTION"
    with pytest.raises(ConfigurationError):
        Inbox("", sqlite, write, versions=versions_of)
    # A message without a version is poison, and the others go on.
    publish(client, topic, "A1", "?", "A2")
    consume(client, topic, sqlite, inbox(sqlite))
    assert places_as_written(sqlite) == [0, 2]


def test_what_has_no_key_or_no_version_is_set_aside_and_the_others_go_on(
    sqlite: Engine, client: Client, topic: str
) -> None:
    """Versions in JSON, as many have them: what is none, what is no number, and what is not there."""
    make_table(sqlite)
    bad: list[tuple[bytes, str | None, str]] = [
        (b"no JSON", "a", "JSONDecodeError"),
        (b"[1]", "a", "TypeError"),
        (b"{}", "a", "KeyError: 'version'"),
        (b'{"version": "2"}', "a", "INVALID_VERSION"),
        (b'{"version": 2.0}', "a", "INVALID_VERSION"),
        (b'{"version": null}', "a", "INVALID_VERSION"),
        (b'{"version": -1}', "a", "INVALID_VERSION"),
        (b'{"version": true}', "a", "INVALID_VERSION"),
        (b'{"version": 2}', None, "INVALID_VERSION"),
        (b'{"version": 2}', "", "INVALID_VERSION"),
        (b"", "a", "JSONDecodeError"),
    ]
    with client.producer(topic, "p") as producer:
        producer.send(b'{"version": 1}', key="a")
        for payload, key, _ in bad:
            producer.send(payload, key=key)
        producer.send(b'{"version": 2}', key="a")
    front = Inbox(
        "i",
        sqlite,
        write,
        key=lambda message: message.key,  # type: ignore[arg-type,return-value]
        version=lambda message: json.loads(message.payload or b"")["version"],
    )
    consume(client, topic, sqlite, front)
    assert places_as_written(sqlite) == [0, len(bad) + 1]
    with sqlite.connect() as connection:
        errors = connection.execute(select(DEAD_LETTERS.c.error).order_by(DEAD_LETTERS.c.message_index)).scalars().all()
    for error, (_, _, why) in zip(errors, bad, strict=True):
        assert why in error
    assert front.waiting() == []


def test_keys_that_differ_by_case_or_a_blank_are_several(engine: Engine, client: Client, topic: str) -> None:
    make_table(engine)
    handle = inbox(engine, versions=lambda message: {(message.key or b"").decode(): 1})
    with client.producer(topic, "p") as producer:
        for key in ("ann", "ann ", "Ann"):
            producer.send(key.encode(), key=key)
    consume(client, topic, engine, handle)
    assert sorted(written(engine)) == ["Ann", "ann", "ann "]
