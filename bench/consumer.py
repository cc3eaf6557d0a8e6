"""A transactional consumer into PostgreSQL, rows a second, against psycopg's executemany alone of the same rows."""

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from sqlalchemy import Connection, Engine, create_engine, text

from bench.figure import Figure, Ratio, over
from seqdedupe.client.blocking import Client
from seqdedupe.client.message import Message
from seqdedupe.services.consumer import Consumer
from seqdedupe.testing import Sidecar
from tests.spark.postgres import PostgresServer

MESSAGES = 30_000
PAYLOAD = b"x" * 200
TRANSACTION = 1000
"""Rows; a consumer that is behind takes as many, if they are there."""

_INSERT = text("INSERT INTO by_consumer VALUES (:place, :payload)")

_names = itertools.count()


def _handle(connection: Connection, messages: list[Message]) -> None:
    connection.execute(_INSERT, [{"place": message.index, "payload": message.payload} for message in messages])


def _consumer(client: Client, engine: Engine) -> float:
    """From the beginning of the topic, into an empty table."""
    with engine.begin() as connection:
        connection.execute(text("TRUNCATE by_consumer"))
    consumer = Consumer(client, "bench", f"bench-{next(_names)}", engine, _handle, in_batches=True)
    began = time.perf_counter()
    consumer.run(follow=False)
    seconds = time.perf_counter() - began
    with engine.begin() as connection:
        assert connection.execute(text("SELECT count(*) FROM by_consumer")).scalar_one() == MESSAGES
    return MESSAGES / seconds


def _executemany(url: str) -> float:
    rows = [(index, PAYLOAD) for index in range(MESSAGES)]
    with psycopg.connect(url) as connection, connection.cursor() as cursor:
        cursor.execute("TRUNCATE by_executemany")
        connection.commit()
        began = time.perf_counter()
        for first in range(0, MESSAGES, TRANSACTION):
            cursor.executemany("INSERT INTO by_executemany VALUES (%s, %s)", rows[first : first + TRANSACTION])
            connection.commit()
        return MESSAGES / (time.perf_counter() - began)


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    server = PostgresServer()
    server.start()
    try:
        with Sidecar(folder / "sidecar") as sidecar, Client(sidecar.address) as client:
            with client.producer("bench", "p") as producer:
                producer.send_batch([PAYLOAD] * MESSAGES, list(range(MESSAGES))).result(60)
            engine = create_engine(server.url.replace("postgresql://", "postgresql+psycopg://"))
            with engine.begin() as connection:
                for table in ("by_consumer", "by_executemany"):
                    connection.execute(text(f"CREATE TABLE {table} (place BIGINT, payload BYTEA)"))
            yield Figure(
                arms={
                    "consumer": lambda: _consumer(client, engine),
                    "executemany": lambda: _executemany(server.url),
                },
                ratios=[Ratio("consumer ÷ psycopg executemany alone", over("consumer", "executemany"), at_least=0.5)],
                rounds=3,
                notes=[f"arms in rows a second, {TRANSACTION:,} rows a transaction"],
            )
            engine.dispose()
    finally:
        server.stop()
