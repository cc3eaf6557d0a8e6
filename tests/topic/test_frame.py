"""Cutting a frame to its new rows: the quick way and the general one must give the same bytes."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from seqdedupe.batch import decode
from seqdedupe.core.producers import Producers
from seqdedupe.core.rule import DUP, NOT_DUP
from seqdedupe.topic.frame import NumbersCache, check, cut
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
    times: dict[str, Any] = {"event_times_ms": np.arange(1, n + 1)} if data.draw(st.booleans()) else {}
    encoded = batch(rows, payloads=payloads, keys=keys, **times).encode()
    producers = Producers()
    for name in "ab":
        producers.open(np.array([producers.add(name.encode())]), np.array([1]))
    frame = check(encoded, producers, NumbersCache())
    if data.draw(st.booleans()):
        first = data.draw(st.integers(0, n - 1))
        new = list(range(first, data.draw(st.integers(first + 1, n))))
    else:
        new = sorted(data.draw(st.sets(st.integers(0, n - 1), min_size=1)))
    verdicts = np.full(n, DUP, np.uint8)
    verdicts[new] = NOT_DUP
    part = cut(frame, verdicts)
    assert part.encoded == decode(encoded).take(np.array(new)).encode()
    assert part.rows == len(new)
    kept = [name.encode() for name in decode(part.encoded).names()]
    assert [producers.number(name) for name in kept] == part.producer_rows.tolist()
