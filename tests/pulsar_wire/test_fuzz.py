"""Mutated batches, entries and streams: read as protobuf reads them or refused, with bounded memory."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from seqdedupe.testing import LAST_RESORT_SECONDS

ROOT = Path(__file__).parents[2]


def fuzz(kind: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "tests.kernels", "tests.pulsar_wire.fuzz", kind, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LAST_RESORT_SECONDS, check=False)


@pytest.mark.timeout(LAST_RESORT_SECONDS)
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("rows", {"MALFORMED_MESSAGE", "read"}),
        ("entries", {"INVALID_SEQUENCE_ID", "MALFORMED_MESSAGE", "MESSAGE_TOO_LARGE", "read"}),
        ("streams", {"MALFORMED_MESSAGE", "MESSAGE_TOO_LARGE", "read"}),
    ],
)
def test_mutations_are_read_or_refused(kind: str, expected: set[str]) -> None:
    done = fuzz(kind, "--cases", 20_000, "--seed", 1)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout[-2000:] + done.stderr
    seen = {pair.split("=")[0] for pair in done.stdout.splitlines()[-1].split()[1:]}
    assert expected <= seen, "the mutations do not get everywhere"


def test_a_read_out_of_bounds_is_noticed() -> None:
    assert fuzz("rows", "--cases", 1000, "--planted").returncode == -signal.SIGSEGV
