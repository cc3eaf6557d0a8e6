"""The demo on few flights, and with deduplication switched off."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from seqdedupe.testing import LAST_RESORT_SECONDS
from tests.spark.run_job import QUICK

FLIGHTS = 2000
TIMEOUT_SECONDS = 2 * LAST_RESORT_SECONDS

pytestmark = pytest.mark.timeout(TIMEOUT_SECONDS)

Ended = tuple[int, str]
"""The exit status and what it printed."""


def run(*options: str) -> Ended:
    process = subprocess.Popen(
        [sys.executable, "-m", "demo", "--flights", str(FLIGHTS), *options],
        cwd=Path(__file__).parents[1],
        env=os.environ | QUICK,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        printed = process.communicate(timeout=TIMEOUT_SECONDS)[0]
        return process.returncode, printed
    finally:
        process.terminate()
        process.communicate()


def _total(printed: str) -> list[int]:
    """sent, NotDup, Dup, Unknown; in the log, missing, doubled; in the table, missing, doubled"""
    found = re.search(r"^ *total(( +[\d,]+){10})$", printed, re.MULTILINE)
    assert found, printed
    return [int(number.replace(",", "")) for number in found[1].split()]


def test_every_flight_is_there_once() -> None:
    status, printed = run()
    sent, not_dup, dup, _, *topic_and_table = _total(printed)
    assert status == 0, printed
    assert topic_and_table == [FLIGHTS, 0, 0] * 2
    assert dup > 0
    assert sent > FLIGHTS >= not_dup
    in_flight = re.findall(r"killed the (\w+)[^\n]* \(-9\) with ([\d,]+)[^\n]* in flight", printed)
    assert sorted(what for what, _ in in_flight) == ["producer", "sidecar", "sidecar", "sidecar"]
    assert all(number != "0" for what, number in in_flight if what == "sidecar")
    kills = re.findall(r"killed the reader job \(-9\) with ([\d,]+) rows in the table, (deleted)?", printed)
    assert [what for _, what in kills] == ["", "deleted"]
    assert all(0 < int(rows.replace(",", "")) < FLIGHTS for rows, _ in kills)
    assert "\nclean: 1 topic\n" in printed


def test_without_deduplication_there_are_doubles() -> None:
    status, printed = run("--no-deduplication")
    _, _, dup, _, in_the_log, missing, doubled, *table = _total(printed)
    assert status == 1, printed
    assert dup == missing == 0
    assert doubled == in_the_log - FLIGHTS > 0
    found = re.search(r"^ *doubled +([\d,]+)", printed, re.MULTILINE)
    assert found, printed
    assert int(found[1].replace(",", "")) == doubled, "the audit counts them too"
    assert table == [FLIGHTS, 0, 0], "the reader job drops what the topic holds twice"
