"""A consumer that dies at any step: an exception that nothing catches plays the end of the process."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Engine, select

from seqdedupe.client.blocking import Client
from seqdedupe.client.message import Message
from seqdedupe.services.consumer import Consumer, ConsumerConfig, database
from seqdedupe.services.consumer.database import DEAD_LETTERS, PARKED
from tests.services.effects import write

MAX_LIVES = 500


class Killed(BaseException):
    """The process has ended here."""


@contextmanager
def mortal(engine: Engine, die: Callable[[], None]) -> Iterator[None]:
    """Before and after each COMMIT it may die. Who is dead takes nothing back and tells nobody."""
    dialect: Any = engine.dialect
    commit, let_go, take_over, keep_up = (
        dialect.do_commit,
        Consumer._let_go,
        database.TAKE_OVER_SECONDS,
        database.KEEP_UP_SECONDS,
    )

    def do_commit(connection: Any) -> None:
        die()
        commit(connection)
        die()

    dialect.do_commit = do_commit
    Consumer._let_go = lambda self: None  # type: ignore[method-assign]
    database.TAKE_OVER_SECONDS = 0.0
    database.KEEP_UP_SECONDS = 0.0
    try:
        yield
    finally:
        dialect.do_commit = commit
        Consumer._let_go = let_go  # type: ignore[method-assign]
        database.TAKE_OVER_SECONDS = take_over
        database.KEEP_UP_SECONDS = keep_up


def live_and_die(
    seed: int,
    client: Client,
    topic: str,
    engine: Engine,
    write: Callable[[Connection, Message], None] = write,
    number_of: Callable[[Message], int] = lambda message: message.index,
) -> set[int]:
    """Consumes the topic to its end, over as many lives as it takes. For the seed are where it dies, when the handler
    fails by chance, which messages it always refuses, and what becomes of them. Returns their numbers."""
    dice = random.Random(seed)
    poison = dice.choice(["stop", "dead letter", "retry later"])
    always = set() if poison == "stop" else {n for n in range(200) if dice.random() < 0.05}
    config = ConsumerConfig(
        max_batch_messages=dice.choice([1, 7, 40]),
        max_attempts=1000 if poison == "stop" else 2,
        first_backoff_ms=0,
        poison=poison,  # type: ignore[arg-type]
        max_retries=3,
        first_retry_delay_ms=0,
    )

    def die() -> None:
        if dice.random() < 0.01:
            raise Killed

    def handle(connection: Connection, message: Message) -> None:
        die()
        write(connection, message)
        die()
        if number_of(message) in always or (poison == "stop" and dice.random() < 0.02):
            raise ValueError("by chance, or always")

    with mortal(engine, die):
        for _ in range(MAX_LIVES):
            try:
                Consumer(client, topic, "c", engine, handle, purpose="dying", config=config).run(follow=False)
                with engine.connect() as connection:
                    if connection.execute(select(PARKED.c.consumer)).first() is None:
                        return always
            except Killed:
                engine.dispose()
    raise AssertionError("it has not come to the end")


def dead_letters(engine: Engine) -> list[int]:
    with engine.connect() as connection:
        return list(connection.execute(select(DEAD_LETTERS.c.message_index)).scalars())
