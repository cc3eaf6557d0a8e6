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
from bench.compare.column import Column, Sizes
from bench.compare.embedded import BROKER
from bench.compare.kafka import BROKER as KAFKA
from bench.compare.kills import lost_and_doubled
from bench.compare.load import Load, payload
from bench.compare.resending import Window, publish
from bench.compare.table import machine, markdown
from bench.compare.usage import cpu_seconds, resident_bytes
from bench.compare.worker import counted
from seqdedupe.testing import LAST_RESORT_SECONDS

REPOSITORY = Path(__file__).parents[1]
TIMEOUT_SECONDS = LAST_RESORT_SECONDS
FIGURES = ("published", "ready", "steady")


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
    head, _, *rows = done.stdout.split("\n\n")[0].splitlines()
    assert [cell.strip() for cell in head.split("|")[2:4]] == [
        f"{BROKER.name} {BROKER.version}",
        f"{KAFKA.name} {KAFKA.version}",
    ]
    cells = {name.strip(): [ours.strip(), theirs.strip()] for _, name, ours, theirs, _ in (r.split("|") for r in rows)}
    assert cells["durable: messages/s, one a call · CPU"][1] == "not available: there is no java"
    read, killed = cells["messages/s read back, one by one"], cells["after 1 kill -9 of the broker under load"]
    assert "0 lost, 0 doubled of" in killed[0]
    assert [read[1], killed[1]] == ["–", "–"]

    ours, theirs = json.loads((tmp_path / "figures.json").read_text())["brokers"]
    assert ours["not_available"] is None
    assert ours["problems"] == []
    figures = [f"{figure}{what}" for figure in FIGURES for what in ("/s", " CPU")]
    figures += [f"{figure} {p}" for figure in ("steady", "single") for p in ("p50", "p99")]
    figures += ["read/s", "server MB", "client MB"]
    assert set(ours["figures"]) == {f"{figure}, {Mode.SYNCED}" for figure in figures}
    assert all(values[0] > 0 for values in ours["figures"].values())
    assert ours["killed"]["messages"] >= 10_000
    assert theirs["not_available"] == "there is no java"
    assert theirs["figures"] == {}
    assert not list((tmp_path / "cache").iterdir()), "data folders are removed, and nothing was downloaded"


def test_each_ratio_is_of_one_round_and_those_who_do_not_keep_up_have_no_latencies() -> None:
    """A broker that has failed has fewer rounds; a mean of rounds would let one good round hide two bad ones."""
    values = {"published/s": [30.0, 30, 90], "ready/s": [20.0, 20, 20], "steady CPU": [13.0, 14, 15]}
    values |= {"steady p99": [5.0, 5, 5], "steady p50": [1.0, 1, 1], "single p50": [1.1, 1.1, 1.1]}
    ours, theirs = Column(BROKER), Column(KAFKA)
    ours.figures = {f"{name}, {Mode.SYNCED}": v for name, v in values.items()}
    theirs.figures = {f"{name}, {Mode.SYNCED}": [10.0, 20] for name in values}
    theirs.figures |= {f"steady/s, {Mode.SYNCED}": [20_000.0, 12_000], f"single p50, {Mode.PAGE_CACHE}": [1.0]}
    table, _, ratios = markdown([ours, theirs], Sizes(3, 1, 0), machine()).split("\n\n")
    assert [row.split("|")[2:5] for row in ratios.splitlines()[2:]] == [
        [" 0.08 (0.06–0.11) ", " ≤ 1.2 ", " reached "],
        [" 1.00 (0.70–1.30) ", " ≤ 1.3 ", " reached "],
        [" 0.38 (0.25–0.50) ", " ≤ 1 ", " reached "],
        [" 1.50 (1.00–2.00) ", " ≥ 2.2 ", " not reached "],
        [" 2.25 (1.50–3.00) ", " ≥ 1.5 ", " reached "],
    ]
    spread = "1.00 (1.00–1.00) / 5.00 (5.00–5.00) · 14.00 (13.00–15.00)"
    assert f"| {spread} | only 16k (12k–20k) a second · 15.00 (10.00–20.00) |" in table
    assert "round by round" not in markdown([ours], Sizes(3, 1, 0), machine()), "there is nothing to compare with"


def test_what_a_server_takes_is_that_of_its_session_with_the_children() -> None:
    busy = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {busy!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert cpu_seconds(process.pid) > 0.2
        assert resident_bytes(process.pid) > 2 * 5_000_000, "two interpreters"
        process.communicate(b"\n")
    assert cpu_seconds(process.pid) == 0


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
