"""Mutated batches and records: compiled and plain kernels say the same, and nothing is read out of bounds."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from seqdedupe.format import layout, records
from seqdedupe.testing import LAST_RESORT_SECONDS

ROOT = Path(__file__).parents[2]

OF_LARGE_BATCHES = {layout.TOO_MANY_ROWS, layout.PAYLOAD_TOO_LARGE}
VERDICTS = set(range(layout.CANONICAL, layout.BAD_DEDUPLICATION_IDS + 1))
STOPS = {records.END, records.INCOMPLETE, records.DAMAGED, records.NOT_CONTIGUOUS, records.OTHER_OWNER}


def fuzz(kind: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "tests.kernels", "tests.format.fuzz", kind, *map(str, arguments)]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=2 * LAST_RESORT_SECONDS, check=False
    )


@pytest.mark.timeout(2 * LAST_RESORT_SECONDS)
@pytest.mark.parametrize(
    ("kind", "cases", "seed", "expected"),
    [
        ("batches", 100_000, 1, VERDICTS - OF_LARGE_BATCHES),
        ("records", 30_000, 3, STOPS),
    ],
)
def test_compiled_and_plain_agree_about_mutations(kind: str, cases: int, seed: int, expected: set[int]) -> None:
    done = fuzz(kind, "--cases", cases, "--seed", seed)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout[-2000:] + done.stderr
    seen = {int(pair.split("=")[0]) for pair in done.stdout.splitlines()[-1].split()[1:]}
    assert expected <= seen, "the mutations do not get everywhere"


@pytest.mark.parametrize("planted", ["reads_past_the_end", "reads_before_the_start"])
def test_a_read_out_of_bounds_is_noticed(planted: str) -> None:
    done = fuzz("batches", "--cases", 1000, "--planted", planted)
    assert done.returncode == -signal.SIGSEGV
    assert done.stdout.splitlines() == ["block 0"]


def test_another_verdict_is_noticed() -> None:
    done = fuzz("batches", "--cases", 20_000, "--planted", "takes_an_id_twice")
    assert done.returncode == 1
    assert "layout of" in done.stdout
