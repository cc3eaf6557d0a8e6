"""Processes under one name: one works, and when it is killed another one takes over. Costs 30 s: ten processes."""

import os
import random
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from sqlalchemy import Engine, create_engine, select

from seqdedupe.client.blocking import Client
from seqdedupe.services.consumer.database import CONSUMERS, TAKE_OVER_SECONDS
from seqdedupe.testing import Sidecar
from tests.processes import running
from tests.services.conftest import Publish
from tests.services.effects import effects, make_table, numbers, until

ROOT = Path(__file__).parents[2]

KILLS = int(os.environ.get("TEST_KILLS", "2"))
"""For each database, in the suite; a campaign has more."""


def test_killed_workers(url: str, shared_sidecar: Sidecar, client: Client, topic: str, publish: Publish) -> None:
    engine = create_engine(url)
    make_table(engine)
    publish("0")
    dice = random.Random(7)
    command = [sys.executable, "-m", "tests.services.worker", shared_sidecar.address, topic, url]
    count = 1
    with ExitStack() as stack:
        processes = [stack.enter_context(running(command, cwd=ROOT)) for _ in range(2)]
        until(lambda: effects(engine) == ["0"])
        for kill in range(KILLS):
            publish(*numbers(3000, count))
            count += 3000
            # Somewhere in the middle of the work: no matter which of the two it is.
            until(lambda: len(effects(engine)) > count - 3000 + dice.randrange(1500))  # noqa: B023
            victim = processes[kill % 2]
            victim.kill()
            victim.wait()
            processes[kill % 2] = stack.enter_context(running(command, cwd=ROOT))
        until(lambda: len(effects(engine)) >= count)
        assert effects(engine) == sorted(numbers(count), key=int)
        assert _owners(engine) != [""]
    engine.dispose()


def test_who_stands_by_takes_over_within_seconds(
    sqlite: Engine, sqlite_url: str, shared_sidecar: Sidecar, client: Client, topic: str, publish: Publish
) -> None:
    make_table(sqlite)
    publish("0")
    command = [sys.executable, "-m", "tests.services.worker", shared_sidecar.address, topic, sqlite_url]
    began = time.monotonic()
    with running(command, cwd=ROOT) as first:
        until(lambda: effects(sqlite) == ["0"])
        start_seconds = time.monotonic() - began
        with running(command, cwd=ROOT):
            time.sleep(2.0)  # so that the second one stands by: nothing tells that it does
            [owner] = _owners(sqlite)
            first.kill()
            first.wait()
            killed = time.monotonic()
            publish("1")
            until(lambda: effects(sqlite) == ["0", "1"])
            assert _owners(sqlite) != [owner]
            # Some seconds of silence; the rest is the machine's, which has just shown how slow it is.
            assert time.monotonic() - killed < 2 * TAKE_OVER_SECONDS + 10 * start_seconds


def _owners(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.execute(select(CONSUMERS.c.owner)).scalars())
