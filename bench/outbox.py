"""The outbox's relay from PostgreSQL, rows of 200 B, against reading the same rows with psycopg and doing nothing.

And how long it takes from inserting a row, its commit included, until its message is durable and read.
"""

import asyncio
import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

from bench import setup
from bench.figure import Figure, Ratio, over, percentiles_ms, shown
from seqdedupe.client import Client
from seqdedupe.services.outbox import Relay, ddl
from seqdedupe.testing import Sidecar
from tests.spark.postgres import PostgresServer

ROWS = 100_000
BATCH_ROWS = 5_000
COMMITS = 100
COLUMNS = "id, aggregatetype, aggregateid, type, payload"

_topics = itertools.count()
_FILL = (
    f"INSERT INTO outbox ({COLUMNS}) SELECT gen_random_uuid(), 'order', n, 'OrderPlaced', "
    f"decode(repeat('78', 200), 'hex') FROM generate_series(1, {ROWS}) n"
)
_FORGET = "UPDATE outbox_token SET producer = NULL, topic = NULL, token = left(md5(random()::text), 16)"


def _new_topic(url: str) -> str:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(_FORGET.encode())
    return f"outbox-{next(_topics)}"


def _fill(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(b"SET seqdedupe.outbox_relay = 'on'; TRUNCATE outbox")
        connection.execute(_FILL.encode())
        connection.execute(b"VACUUM ANALYZE outbox")
        connection.execute(b"CHECKPOINT")


def _read(url: str) -> float:
    """Rows a second, in pages by the index, in the driver's fastest form."""
    _fill(url)
    query = f"SELECT sequence_id, {COLUMNS} FROM outbox WHERE sequence_id > %s ORDER BY sequence_id LIMIT {BATCH_ROWS}"
    began = time.perf_counter()
    after, count = -1, 0
    with psycopg.connect(url, autocommit=True) as connection:
        while rows := connection.execute(query.encode(), (after,), binary=True).fetchall():
            after, count = rows[-1][0], count + len(rows)
    assert count == ROWS
    return ROWS / (time.perf_counter() - began)


async def _relay(address: str, url: str) -> float:
    """Rows a second: published, durable, and deleted."""
    _fill(url)
    topic = _new_topic(url)
    async with Client(address) as client:
        relay = Relay(client, url, topic, "bench")
        began = time.perf_counter()
        await relay.run(follow=False)
        assert relay.counters.published == ROWS
        return ROWS / (time.perf_counter() - began)


async def _latency(address: str, url: str) -> dict[str, float]:
    """From sending a row, with its commit, to the moment at which a reader has its message."""
    topic = _new_topic(url)
    seconds: list[float] = []
    insert = f"INSERT INTO outbox ({COLUMNS}) VALUES (gen_random_uuid(), 'order', '7', 'OrderPlaced', 'x')".encode()
    async with Client(address) as client, await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        await client.admin.create_topic(topic)
        relaying = asyncio.create_task(Relay(client, url, topic, "bench").run())
        async with client.reader(topic, follow=True) as reader:
            for _ in range(COMMITS):
                began = time.perf_counter()
                await connection.execute(insert)
                await anext(reader)
                seconds.append(time.perf_counter() - began)
        relaying.cancel()
        await asyncio.gather(relaying, return_exceptions=True)
    return percentiles_ms(seconds)


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    server = PostgresServer()  # with its defaults: what it commits is on the disk
    server.start()
    try:
        with Sidecar(folder / "sidecar") as sidecar:
            with psycopg.connect(server.url, autocommit=True) as connection:
                connection.execute(ddl("postgresql").encode())
            yield Figure(
                arms={
                    "relay": lambda: setup.run(_relay(sidecar.address, server.url)),
                    "reading alone": lambda: _read(server.url),
                    "commit → durable": lambda: setup.run(_latency(sidecar.address, server.url)),
                },
                ratios=[
                    Ratio("relay ÷ reading the same rows", over("relay", "reading alone"), at_least=0.5),
                    shown("commit → durable, p50"),
                    shown("commit → durable, p99"),
                ],
                rounds=5,
                notes=["arms in rows a second, and milliseconds"],
            )
    finally:
        server.stop()
