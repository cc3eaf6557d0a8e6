"""1,000 names in batches of 1,000 rows, the same list each frame, against one name."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from bench import setup
from bench.figure import Figure, Ratio, over
from bench.publish import IN_FLIGHT, PAYLOAD, published_rows
from seqdedupe.batch import Batch, Binary
from seqdedupe.testing import Sidecar

NAMES = 1_000
BATCHES = 600

_topics = itertools.count()


def round_robin(names: list[str]) -> setup.MakeBatch:
    """Batches with one row of each name."""
    payloads = Binary.of_all([PAYLOAD] * len(names))
    encoded = Binary.of_all([name.encode() for name in names])
    indexes = np.arange(len(names), dtype=np.int32)

    def make(k: int, epochs: np.ndarray) -> Batch:
        return Batch(
            producer_names=encoded,
            epochs=epochs,
            previous_sequence_ids=np.full(len(names), k - 1, np.int64),
            producer_indexes=indexes,
            sequence_ids=np.full(len(names), k, np.int64),
            payloads=payloads,
        )

    return make


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    def many(address: str) -> float:
        run = next(_topics)
        names = [f"run-{run}-name-{i}" for i in range(NAMES)]
        seconds, _ = setup.run(setup.publish(address, names, round_robin(names), BATCHES, IN_FLIGHT))
        return NAMES * BATCHES / seconds

    with Sidecar(folder / "sidecar") as sidecar:
        yield Figure(
            arms={
                "many names": lambda: many(sidecar.address),
                "one name": lambda: published_rows(sidecar.address, NAMES, BATCHES, IN_FLIGHT),
            },
            ratios=[Ratio("1,000 names ÷ one name", over("many names", "one name"), at_least=0.7)],
            notes=["arms in rows a second"],
        )
