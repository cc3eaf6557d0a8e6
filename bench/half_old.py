"""Batches of 256 rows of which half are old, against all new."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from bench import setup
from bench.figure import Figure, Ratio, over
from bench.publish import BATCHES, IN_FLIGHT, PAYLOAD, ROWS, published_rows
from seqdedupe.batch import Batch, Binary, single_producer
from seqdedupe.testing import Sidecar

_names = itertools.count()


def half_old(name: str) -> setup.MakeBatch:
    """Each batch sends the second half of the one two before it again: those have settled by then, or are Unknown."""
    payloads = Binary.of_all([PAYLOAD] * ROWS)
    half = ROWS // 2
    behind = 2 * IN_FLIGHT

    def make(k: int, epochs: np.ndarray) -> Batch:
        new = np.arange(k * half, (k + 1) * half)
        if k < behind:
            first = np.arange(k * half, k * half + half)
            return single_producer(name.encode(), int(epochs[0]), k * half - 1, first, Binary.of_all([PAYLOAD] * half))
        old = new - behind * half
        # The link: the highest ID sent below the first one, which is the one before it.
        return single_producer(name.encode(), int(epochs[0]), int(old[0]) - 1, np.concatenate([old, new]), payloads)

    return make


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    def half(address: str) -> float:
        name = f"half-{next(_names)}"
        seconds, _ = setup.run(setup.publish(address, [name], half_old(name), BATCHES, IN_FLIGHT))
        return ROWS * BATCHES / seconds

    with Sidecar(folder / "sidecar") as sidecar:
        yield Figure(
            arms={
                "half old": lambda: half(sidecar.address),
                "all new": lambda: published_rows(sidecar.address, ROWS, BATCHES, IN_FLIGHT),
            },
            ratios=[Ratio("half old ÷ all new", over("half old", "all new"), at_least=0.6)],
            notes=["arms in rows sent a second"],
        )
