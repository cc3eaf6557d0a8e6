"""Outboxes in real databases."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text

from seqdedupe.client import Client, Message
from seqdedupe.services.outbox import Counters, Outbox, Relay, ddl
from seqdedupe.services.outbox.store import database_url
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from tests.spark.postgres import postgres_url as postgres_url

NAME = "shop"


class Database:
    """A database with an outbox, as a service has it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.kind = database_url(url).get_backend_name()
        driver = "+psycopg" if self.kind == "postgresql" else ""
        self.engine: Engine = create_engine(url.replace(self.kind, self.kind + driver, 1))
        self.script(ddl(self.kind))

    def script(self, statements: str) -> None:
        """Runs a script as an operator does, and not as the relay."""
        with self.engine.connect() as connection:
            raw: Any = connection.connection.driver_connection
            if self.kind == "sqlite":
                raw.executescript(statements)
            else:
                raw.execute(statements)
            raw.commit()

    def as_relay(self, statements: str) -> None:
        """The same with the triggers that guard the table out of the way."""
        if self.kind == "postgresql":
            statements = f"SET LOCAL seqdedupe.outbox_relay = 'on'; {statements}"
        else:
            deletes = "UPDATE outbox_token SET relay_deletes"
            statements = f"{deletes} = 1; {statements}; {deletes} = 0;"
        self.script(statements)

    def add(self, *payloads: bytes, kind: str = "order", key: str = "7", id: str | None = None) -> None:
        """Rows in one transaction."""
        with self.engine.begin() as connection:
            for payload in payloads:
                Outbox(connection).add(kind, key, "OrderPlaced", payload, id=id)

    def value(self, query: str) -> Any:
        with self.engine.connect() as connection:
            return connection.execute(text(query)).scalar_one()

    def rows(self) -> int:
        return int(self.value("SELECT count(*) FROM outbox"))

    @property
    def token(self) -> str:
        return str(self.value("SELECT token FROM outbox_token"))


@pytest.fixture
def postgres(postgres_url: str) -> Iterator[Database]:
    database = Database(postgres_url)
    yield database
    database.engine.dispose()


@pytest.fixture(params=["postgresql", "sqlite"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    if request.param == "postgresql":
        url = request.getfixturevalue("postgres_url")
    database = Database(url)
    yield database
    database.engine.dispose()


async def relay_all(sidecar: Sidecar, database: Database, topic: str, name: str = NAME) -> Counters:
    """What can be read is published; what the relay says of it."""
    async with Client(sidecar.address) as client:
        relay = Relay(client, database.url, topic, name, report=lambda line: None)
        async with asyncio.timeout(LAST_RESORT_SECONDS):
            await relay.run(follow=False)
        return relay.counters


async def messages(sidecar: Sidecar, topic: str) -> list[Message]:
    async with Client(sidecar.address) as client, client.reader(topic) as reader:
        return [message async for message in reader]


async def payloads(sidecar: Sidecar, topic: str) -> list[bytes]:
    return [message.payload or b"" for message in await messages(sidecar, topic)]
