"""Cutting a frame to its new rows: the quick way and the general one must give the same bytes."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from seqdedupe.batch import Binary, decode, properties, without_producers
from seqdedupe.core.producers import Producers
from seqdedupe.core.rule import DUP, NOT_DUP
from seqdedupe.format.jit import Uint8s
from seqdedupe.topic.frame import NumbersCache, check, check_by_id, cut
from tests.batches import batch


@given(st.data())
def test_cut_keeps_the_new_rows_and_nothing_else(data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from("ab"), min_size=1, max_size=9))
    rows = [(name, 3 * i + 1) for i, name in enumerate(names)]
    n = len(rows)
    payloads = data.draw(st.lists(st.none() | st.binary(max_size=3), min_size=n, max_size=n))
    if data.draw(st.booleans()):
        payloads = [p or b"" for p in payloads]
    keys = data.draw(st.none() | st.just([b"k"] * n))
    more = data.draw(_columns(n))
    encoded = batch(rows, payloads=payloads, keys=keys, **more).encode()
    producers = Producers()
    for name in "ab":
        producers.open(np.array([producers.add(name.encode())]), np.array([1]))
    frame = check(encoded, producers, NumbersCache())
    new, verdicts = data.draw(_new_rows(n))
    part = cut(frame, verdicts)
    assert part.encoded == decode(encoded).take(np.array(new)).encode()
    assert part.rows == len(new)
    kept = [name.encode() for name in decode(part.encoded).names()]
    assert [producers.number(name) for name in kept] == part.producer_rows.tolist()


@given(st.data())
def test_the_same_of_a_frame_of_deduplication_ids(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 20))
    values = st.lists(st.none() | st.binary(max_size=3), min_size=n, max_size=n)
    payloads = batch([("", 0)] * n, payloads=data.draw(values)).payloads
    ids = Binary.of_all(data.draw(st.lists(st.binary(min_size=1, max_size=20), min_size=n, max_size=n)))
    more = data.draw(_columns(n))
    if (row_properties := more.pop("row_properties", None)) is not None:
        more["property_offsets"], more["property_names"], more["property_values"] = properties(row_properties)
    encoded = without_producers(ids, payloads, keys=Binary.of(data.draw(values)), **more).encode()
    new, verdicts = data.draw(_new_rows(n))
    part = cut(check_by_id(encoded), verdicts)
    assert part.encoded == decode(encoded).take(np.array(new)).encode()
    assert part.rows == len(new)


def _columns(n: int) -> st.SearchStrategy[dict[str, Any]]:
    """Those that a batch may leave out."""
    names = st.dictionaries(st.sampled_from(["a", "bc", "d"]), st.text("xyz", max_size=3), max_size=2)
    return st.fixed_dictionaries(
        {},
        optional={
            "event_times_ms": st.just(np.arange(1, n + 1)),
            "row_properties": st.lists(names, min_size=n, max_size=n),
        },
    )


@st.composite
def _new_rows(draw: st.DrawFn, n: int) -> tuple[list[int], Uint8s]:
    """Which rows are new, and the verdicts that say so."""
    if draw(st.booleans()):
        first = draw(st.integers(0, n - 1))
        new = list(range(first, draw(st.integers(first + 1, n))))
    else:
        new = sorted(draw(st.sets(st.integers(0, n - 1), min_size=1)))
    verdicts = np.full(n, DUP, np.uint8)
    verdicts[new] = NOT_DUP
    return new, verdicts
