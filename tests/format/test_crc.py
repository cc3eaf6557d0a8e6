"""The checksum kernels against another implementation, for every length that they treat differently."""

import os
import random
import subprocess
import sys

import google_crc32c
import numpy as np

from seqdedupe.format.records import crc32c
from seqdedupe.testing import LAST_RESORT_SECONDS

PROGRAM = """
import random, google_crc32c, numpy as np
from seqdedupe.format import records as crc
assert crc.crc_step is None, "the processor's instruction was to be left out"
data = random.Random(1).randbytes(3000)
raw = np.frombuffer(data, np.uint8)
for end in range(0, 3000, 7):
    assert crc.crc32c(0, raw, 5, max(end, 5)) == google_crc32c.value(data[5 : max(end, 5)]), end
"""


def test_it_is_crc32c_of_any_length_from_any_start() -> None:
    data = random.Random(0).randbytes(10_000)
    raw = np.frombuffer(data, np.uint8)
    assert crc32c(0, np.frombuffer(b"123456789", np.uint8), 0, 9) == 0xE3069283
    for length in [*range(64), *range(1500, 1600), *range(3050, 3090), 9000]:
        for start in (0, 1, 7, 8, 513):
            expected = google_crc32c.value(data[start : start + length])
            assert crc32c(0, raw, start, start + length) == expected, (start, length)


def test_it_goes_on_from_what_came_before() -> None:
    data = random.Random(2).randbytes(8000)
    raw = np.frombuffer(data, np.uint8)
    for cut in (0, 1, 8, 255, 1536, 1537, 6000, 8000):
        assert crc32c(crc32c(0, raw, 0, cut), raw, cut, 8000) == google_crc32c.value(data), cut


def test_it_is_the_same_without_the_processors_instruction() -> None:
    environment = os.environ | {"NUMBA_CPU_NAME": "generic"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, timeout=LAST_RESORT_SECONDS
    )
    assert (done.returncode, done.stderr) == (0, "")
