"""The comparison with other brokers: its table, with a broker that cannot be had on this machine."""

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from bench.compare.broker import Mode
from bench.compare.embedded import BROKER
from bench.compare.kafka import BROKER as KAFKA
from bench.compare.kills import lost_and_doubled
from bench.compare.load import Load, payload
from bench.compare.resending import Window, publish
from bench.compare.worker import counted

REPOSITORY = Path(__file__).parents[1]
TIMEOUT_SECONDS = 400.0


def test_the_table_has_our_column_and_says_why_another_is_missing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.compare", "--brokers", "embedded", "kafka", "--seconds", "0.1"]
    command += ["--rounds", "1", "--kills", "1", "--cache", str(tmp_path / "cache")]
    command += ["--json", str(tmp_path / "figures.json")]
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env=os.environ | {"PATH": str(tmp_path / "empty")},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    head, _, synced, _, latency, read, killed, *_ = done.stdout.splitlines()
    assert [cell.strip() for cell in head.split("|")[2:4]] == [
        f"{BROKER.name} {BROKER.version}",
        f"{KAFKA.name} {KAFKA.version}",
    ]
    assert synced.split("|")[3].strip() == "not available: there is no java"
    assert "0 lost, 0 doubled of" in killed
    assert [row.split("|")[3].strip() for row in (latency, read, killed)] == ["–", "–", "–"]

    ours, theirs = json.loads((tmp_path / "figures.json").read_text())["brokers"]
    assert ours["not_available"] is None
    assert ours["problems"] == []
    assert set(ours["figures"]) == {f"published/s, {Mode.SYNCED}", "read/s", "p50 ms", "p99 ms"}
    assert all(values[0] > 0 for values in ours["figures"].values())
    assert ours["killed"]["messages"] >= 10_000
    assert theirs["not_available"] == "there is no java"
    assert theirs["figures"] == {}
    assert not list((tmp_path / "cache").iterdir()), "data folders are removed, and nothing was downloaded"


@pytest.mark.parametrize(("copies", "lost", "doubled"), [([1, 2, 3], 0, 0), ([1, 3], 1, 0), ([1, 2, 2, 3, 3, 3], 0, 3)])
def test_lost_and_doubled_are_counted_by_the_numbers_in_the_payloads(
    copies: list[int], lost: int, doubled: int
) -> None:
    read = counted([payload(number) for number in copies], seconds=1.0)
    assert lost_and_doubled(3, read) == {"messages": 3, "lost": lost, "doubled": doubled}


async def test_what_is_sent_again_leaves_no_number_out() -> None:
    stored: set[int] = set()
    window = Window()

    class Sender:
        """Every seventh message breaks the connection the first time, which the next call notices."""

        async def send(self, number: int, data: bytes) -> None:
            if number % 7 == 0 and number not in broken:
                broken.add(number)
                window.breaks("as planned")
            else:
                stored.add(number)
                window.confirm(number)

        async def flush(self) -> None: ...

    @asynccontextmanager
    async def connect() -> AsyncIterator[Sender]:
        yield Sender()

    broken: set[int] = set()
    load = Load(seconds=60, most=50)
    await publish(load, window, connect, ())
    assert broken
    assert stored == set(range(1, 51))
