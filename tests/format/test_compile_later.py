"""A kernel that is compiled later gives the same results before, as Python's own numbers, and afterwards."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from seqdedupe.testing import LAST_RESORT_SECONDS

SAME_FILES = (
    "tests/format/test_crc.py",
    "tests/format/test_layout.py",
    "tests/format/test_records.py",
    "tests/core/test_rule.py",
)
"""They compare kernels with other implementations, and with Pulsar's rule."""

PROGRAM = """
import numpy as np
from seqdedupe.format import jit
jit.compile_later()
from seqdedupe.format import headers, records
from seqdedupe.limits import MAX_SEQUENCE_ID

@jit.kernel()
def overflow(a: int, b: int, bits: int) -> int:
    return jit.add64(jit.shl64(a, bits), jit.rotl64(b, bits))

@jit.kernel(bare=True)
def is_large(numbers: jit.Int64s) -> bool:
    return numbers[0] > numbers[1]

@jit.kernel()
def calls(raw: jit.Bytes, at: int) -> int:
    return overflow(jit.load64(raw, at), jit.load32(raw, at), 13)

raw = np.frombuffer(bytes(range(1, 200)), np.uint8)
largest = np.array([MAX_SEQUENCE_ID, -5], np.int64)

def results():
    return (
        [overflow(a, b, bits) for a in (largest[0], -1, 7) for b in (largest[1], 3) for bits in (1, 13, 63)],
        is_large(largest), is_large(largest[::-1].copy()), [calls(raw, at) for at in range(9)],
        records.crc32c(0, raw, 3, 190),
    )

plain = results()
kinds = [type(value) for found in plain for value in (found if isinstance(found, list) else [found])]
assert set(kinds) == {int, bool}, kinds
assert not overflow.signatures, "it is compiled"
assert records.crc32c.signatures and headers.siphash.signatures
jit.compile_now()
assert len(overflow.signatures) == len(calls.signatures) == 1
assert results() == plain
try:
    is_large(np.array([1.5, 2.5]))
except TypeError:
    pass
else:
    raise AssertionError("it takes what its annotations do not name")

@jit.kernel()
def at_once(a: int) -> int:
    return a

assert at_once.signatures
"""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTEST_ADDOPTS": ""}
    return subprocess.run(
        [sys.executable, *words], cwd=root, env=environment, capture_output=True, text=True, timeout=LAST_RESORT_SECONDS
    )


def test_plain_and_compiled_are_the_same() -> None:
    done = run("-c", PROGRAM)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("file", SAME_FILES)
def test_what_kernels_are_held_against_holds_for_plain_ones(file: str) -> None:
    done = run("-m", "pytest", "-q", "-n", "0", "-p", "tests.plain_kernels", file)
    assert done.returncode == 0, done.stdout[-3000:]
