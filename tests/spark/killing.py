"""What the tests that kill jobs share: two topics, gates, and a job that writes both into a table."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from spark.job import JobConfig
from tests.sidecar import Sidecar
from tests.spark.jobs import JOB, TABLE, Database, Gate, GatedStore, each_once, publish, source

BOTH = {"persistent://public/default/a": 600, "persistent://public/default/b": 400}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with Sidecar(tmp_path_factory.mktemp("sidecar")) as sidecar:
        for topic, count in BOTH.items():
            publish(sidecar.address, topic, count)
        yield sidecar.address


@pytest.fixture
def gates(tmp_path: Path) -> Iterator[Callable[[], Gate]]:
    """New gates; all of them are open when the test ends, so that nobody stays behind."""
    made: list[Gate] = []

    def make() -> Gate:
        made.append(Gate(tmp_path / f"gate-{len(made)}"))
        return made[-1]

    yield make
    for gate in made:
        gate.open()


def config(address: str, database: Database, rows: int = 250) -> JobConfig:
    return JobConfig(JOB, source(address, topics=",".join(BOTH), maxOffsetsPerTrigger=rows), database.store, TABLE)


def gated(given: JobConfig, gate: Gate, where: str) -> JobConfig:
    return replace(given, store=partial(GatedStore, given.store, gate, where))


def all_are_there(database: Database) -> None:
    for topic, count in BOTH.items():
        each_once(database.indexes(topic), count)
