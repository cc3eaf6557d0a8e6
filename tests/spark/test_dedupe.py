"""The watermark rule in a worker, against a plain loop over single messages."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqdedupe.batch import decode
from seqdedupe.client.message import StoredBatch
from seqdedupe.limits import MAX_SEQUENCE_ID
from seqdedupe_spark.dedupe import Deduplicator
from tests.batches import Row, batch

NAMES = ["a", "b", "ü", "d" * 255]
IDS = st.one_of(st.integers(0, 12), st.integers(MAX_SEQUENCE_ID - 3, MAX_SEQUENCE_ID))


def stored(rows: list[Row]) -> StoredBatch:
    return StoredBatch(decode(batch(rows).encode()), 0, 0, 1)


@st.composite
def batches(draw: st.DrawFn) -> list[Row]:
    """The rows of a batch: those of one producer rise strictly, those of several are mixed."""
    ids = draw(st.dictionaries(st.sampled_from(NAMES), st.sets(IDS, min_size=1, max_size=5), min_size=1))
    left = {name: sorted(of_name, reverse=True) for name, of_name in ids.items()}
    order = draw(st.permutations([name for name, of_name in left.items() for _ in of_name]))
    return [(name, left[name].pop()) for name in order]


def plain(watermarks: dict[str, int], history: list[list[Row]]) -> tuple[list[list[int]], dict[str, int]]:
    """The rule, message by message: which rows of each batch count, and the watermarks that have risen."""
    highest = dict(watermarks)
    kept: list[list[int]] = []
    for rows in history:
        kept.append([])
        for row, (name, sequence_id) in enumerate(rows):
            if sequence_id > highest.get(name, -1):
                highest[name] = sequence_id
                kept[-1].append(row)
    return kept, {name: top for name, top in highest.items() if top != watermarks.get(name, -1)}


@given(watermarks=st.dictionaries(st.sampled_from(NAMES), IDS), history=st.lists(batches(), max_size=12))
def test_it_is_the_rule_message_by_message(watermarks: dict[str, int], history: list[list[Row]]) -> None:
    deduplicator = Deduplicator(watermarks)
    kept = []
    for rows in history:
        found = deduplicator.keep(stored(rows))
        assert found is None or len(found) < len(rows), "None is how it says all"
        kept.append(list(range(len(rows))) if found is None else found.tolist())
    assert (kept, deduplicator.changed()) == plain(watermarks, history)


def test_it_goes_on_from_the_watermarks_that_another_one_left() -> None:
    first = Deduplicator({"a": 4})
    assert first.keep(stored([("a", 5), ("b", 0)])) is None
    assert first.changed() == {"a": 5, "b": 0}
    second = Deduplicator({"a": 4} | first.changed())
    kept = second.keep(stored([("a", 5), ("b", 0), ("b", 1)]))
    assert kept is not None
    assert kept.tolist() == [2]
    assert second.changed() == {"b": 1}


@pytest.mark.parametrize("known", [0, 1, 63, 64, 65, 1000])
def test_more_producers_than_there_was_room_for(known: int) -> None:
    deduplicator = Deduplicator({f"p{i}": 0 for i in range(known)})
    rows = [(f"p{i}", 1) for i in range(3000)]
    assert deduplicator.keep(stored(rows)) is None
    kept = deduplicator.keep(stored(rows))
    assert isinstance(kept, np.ndarray)
    assert not len(kept)
    assert deduplicator.changed() == dict(rows)
