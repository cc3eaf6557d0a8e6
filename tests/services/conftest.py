"""Databases of three kinds, a client, and topics with messages."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine

from seqdedupe.client.blocking import Client
from seqdedupe.testing import Sidecar
from tests.services.mariadb import mariadb_url as mariadb_url
from tests.spark.postgres import postgres_url as postgres_url

KINDS = ("sqlite", "postgresql", "mariadb")


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'database'}"


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest) -> str:
    """An empty database of each kind."""
    return url_of(request, request.param)


def url_of(request: pytest.FixtureRequest, kind: str) -> str:
    if kind == "postgresql":
        return str(request.getfixturevalue("postgres_url")).replace("postgresql://", "postgresql+psycopg://")
    return str(request.getfixturevalue(f"{kind}_url"))


@pytest.fixture
def engine(url: str) -> Iterator[Engine]:
    yield from _engine(url)


@pytest.fixture
def sqlite(sqlite_url: str) -> Iterator[Engine]:
    yield from _engine(sqlite_url)


def _engine(url: str) -> Iterator[Engine]:
    made = create_engine(url)
    yield made
    made.dispose()


@pytest.fixture
def client(shared_sidecar: Sidecar) -> Iterator[Client]:
    with Client(shared_sidecar.address) as made:
        yield made


Publish = Callable[..., None]


@pytest.fixture
def publish(client: Client, topic: str) -> Publish:
    """Publishes payloads to the topic, with the sequence IDs that follow; of `keys` each is one's key."""

    def publish(*payloads: str, keys: list[str | None] | None = None) -> None:
        with client.producer(topic, "p") as producer:
            for payload, key in zip(payloads, keys or [None] * len(payloads), strict=True):
                producer.send(payload.encode(), key=key)

    return publish
