"""Publishing under 1,024 names, 256 rows a frame, by a caller whose names are judged by rules, against the operator."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from bench import setup
from bench.callers import ruled
from bench.figure import Figure, Ratio, over
from bench.publish import IN_FLIGHT, PAYLOAD
from seqdedupe.batch import Batch, Binary

NAMES = 1_024
ROWS = 256
BATCHES = 2_000

RULES = """
[[allow]]
subjects = ["gateway"]
actions = ["publish", "create"]
topics = ["*"]

[[deny]]
subjects = ["*"]
actions = ["publish"]
topics = ["*"]
producers = ["*-secret", "admin/**"]
"""

_topics = itertools.count()


def in_turn(names: list[str]) -> setup.MakeBatch:
    """Batches with a row each of the next names."""
    payloads = Binary.of_all([PAYLOAD] * ROWS)
    encoded = [Binary.of_all([name.encode() for name in names[at : at + ROWS]]) for at in range(0, NAMES, ROWS)]
    indexes = np.arange(ROWS, dtype=np.int32)

    def make(k: int, epochs: np.ndarray) -> Batch:
        turn, part = divmod(k, len(encoded))
        return Batch(
            producer_names=encoded[part],
            epochs=epochs[part * ROWS : (part + 1) * ROWS],
            previous_sequence_ids=np.full(ROWS, turn - 1, np.int64),
            producer_indexes=indexes,
            sequence_ids=np.full(ROWS, turn, np.int64),
            payloads=payloads,
        )

    return make


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    names = [f"device-{k}" for k in range(NAMES)]

    with ruled(folder / "sidecar", RULES) as served:

        def published(metadata: setup.Metadata) -> float:
            topic = f"t{next(_topics)}"
            work = setup.publish(
                served.sidecar.address, names, in_turn(names), BATCHES, IN_FLIGHT, topic, metadata=metadata
            )
            return ROWS * BATCHES / setup.run(work)[0]

        yield Figure(
            arms={
                "rules": lambda: published(served.as_caller("gateway")),
                "operator": lambda: published(served.as_operator()),
            },
            ratios=[Ratio("with rules ÷ without", over("rules", "operator"), at_least=0.97)],
            notes=["arms in rows a second"],
        )
