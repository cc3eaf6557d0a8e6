"""The identity of rows that come from a source: topic, incarnation, index, and ordinal among those of one message.

An identity that comes twice would make the second row a copy of the first, and lose it: `Seen` finds that.
"""

import hashlib
import zlib
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from seqdedupe.batch import Int64s
from seqdedupe.errors import SeqdedupeError, error

INDEX_BITS = 43
MAX_INDEX = (1 << INDEX_BITS) - 1
MAX_ORDINAL = (1 << 63 - INDEX_BITS) - 1
"""An index and an ordinal make one number of 63 bits."""

MAX_TOPIC_BYTES = 200
"""Of a topic with a longer name an ID has the hash of the name, so that it stays below 255 bytes."""

Source = tuple[str, int]
"""A topic and its incarnation."""

_NONE: Int64s = np.empty((0, 2), np.int64)


@lru_cache(1024)
def name_in_id(topic: str) -> str:
    """How a topic stands in the IDs of rows that come from it."""
    if len(topic) <= MAX_TOPIC_BYTES:
        return topic
    return "sha256:" + hashlib.sha256(topic.encode()).hexdigest()


def ids_of(topics: pa.Array, incarnations: pa.Array, indexes: pa.Array, ordinals: pa.Array) -> pa.Array:
    """`topic/incarnation/index/ordinal` of each row, numbers in decimal: documented, and never to change."""
    encoded = topics.dictionary_encode()
    names = pa.array([name_in_id(name) for name in encoded.dictionary.to_pylist()], pa.string())
    parts = (names.take(encoded.indices), *(one.cast(pa.string()) for one in (incarnations, indexes, ordinals)))
    return pc.binary_join_element_wise(*parts, "/").cast(pa.binary())


class Seen:
    """The identities that a task has seen of each source, as runs of numbers: next to nothing where rows come in order,
    else 16 bytes a row."""

    def __init__(self) -> None:
        self._runs: dict[Source, Int64s] = {}
        self._new: dict[Source, list[Int64s]] = {}

    def __bool__(self) -> bool:
        """Whether any row was known by the message it comes from."""
        return bool(self._runs or self._new)

    def add(self, topics: pa.Array, incarnations: Int64s, indexes: Int64s, ordinals: Int64s) -> None:
        """Adds rows. Raises INVALID_REQUEST for numbers out of range, and AMBIGUOUS_IDENTITY for an identity that came
        before; for some of those only later."""
        for what, column, most in ((("__index"), indexes, MAX_INDEX), ("__ordinal", ordinals, MAX_ORDINAL)):
            if len(bad := np.flatnonzero((column < 0) | (column > most))):
                raise error("INVALID_REQUEST", f"{what} is {column[bad[0]]}: it should be 0 to {most}")
        numbers = ordinals << INDEX_BITS | indexes
        encoded = topics.dictionary_encode()
        of_rows = encoded.indices.to_numpy()
        for place, topic in enumerate(encoded.dictionary.to_pylist()):
            of_topic = of_rows == place
            for incarnation in np.unique(incarnations[of_topic]).tolist():
                self._add((topic, incarnation), numbers[of_topic & (incarnations == incarnation)])

    def _add(self, source: Source, numbers: Int64s) -> None:
        new = self._new.setdefault(source, [])
        new.append(merged(source, [np.column_stack([numbers, numbers])]))
        # Merged when they are as many as before, each run is merged a few times only.
        if sum(map(len, new)) >= len(self._runs.get(source, _NONE)):
            self._merge(source)

    def _merge(self, source: Source) -> None:
        self._runs[source] = merged(source, [self._runs.get(source, _NONE), *self._new.pop(source, [])])

    def packed(self) -> dict[Source, bytes]:
        """All of them, for `check_apart`. Raises AMBIGUOUS_IDENTITY."""
        for source in list(self._new):
            self._merge(source)
        return {
            source: zlib.compress(np.diff(runs.ravel(), prepend=0).tobytes(), 1) for source, runs in self._runs.items()
        }


def check_apart(of_tasks: Iterable[dict[Source, bytes]]) -> None:
    """Raises AMBIGUOUS_IDENTITY if two tasks have seen the same identity."""
    packed: dict[Source, list[bytes]] = {}
    for one in of_tasks:
        for source, runs in one.items():
            packed.setdefault(source, []).append(runs)
    for source, several in packed.items():
        if len(several) > 1:
            merged(source, [np.frombuffer(zlib.decompress(one), np.int64).cumsum().reshape(-1, 2) for one in several])


def merged(source: Source, several: list[Int64s]) -> Int64s:
    """Runs, each with its first and last number, as few and rising. Raises AMBIGUOUS_IDENTITY if two overlap."""
    runs = np.concatenate(several)
    if len(runs) < 2:
        return runs
    runs = runs[np.argsort(runs[:, 0], kind="stable")]
    firsts, lasts = runs[1:, 0], runs[:-1, 1]
    if len(twice := np.flatnonzero(firsts <= lasts)):
        raise _ambiguous(source, int(firsts[twice[0]]))
    ends = np.flatnonzero(firsts != lasts + 1)
    return np.column_stack([runs[np.append(0, ends + 1), 0], runs[np.append(ends, len(runs) - 1), 1]])


def _ambiguous(source: Source, number: int) -> SeqdedupeError:
    topic, _ = source
    index, ordinal = number & MAX_INDEX, number >> INDEX_BITS
    return error(
        "AMBIGUOUS_IDENTITY",
        f"several rows come from the message with index {index} of {topic}, with ordinal {ordinal}",
        topic=topic,
        index=index,
    )
