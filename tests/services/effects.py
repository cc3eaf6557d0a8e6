"""What handlers of the tests write, and how it is looked at."""

import time
from collections.abc import Callable

from sqlalchemy import Connection, Engine, text

from seqdedupe.client.message import Message
from seqdedupe.testing import LAST_RESORT_SECONDS

TIMEOUT_SECONDS = LAST_RESORT_SECONDS


def make_table(engine: Engine, more: str = "") -> None:
    with engine.begin() as connection:
        connection.execute(text(f"CREATE TABLE effects (place BIGINT, what VARCHAR(100)){more}"))


def write(connection: Connection, message: Message) -> None:
    values = {"place": message.index, "what": (message.payload or b"").decode()}
    connection.execute(text("INSERT INTO effects VALUES (:place, :what)"), values)


def write_all(connection: Connection, messages: list[Message]) -> None:
    for message in messages:
        write(connection, message)


def effects(engine: Engine) -> list[str]:
    """By their place in the topic."""
    with engine.begin() as connection:
        return list(connection.execute(text("SELECT what FROM effects ORDER BY place, what")).scalars())


def places_as_written(engine: Engine) -> list[int]:
    """In SQLite: the messages' indexes in the order in which they took effect."""
    with engine.begin() as connection:
        return list(connection.execute(text("SELECT place FROM effects ORDER BY rowid")).scalars())


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def numbers(count: int, first: int = 0) -> list[str]:
    return [str(n) for n in range(first, first + count)]
