"""Runs of message IDs against a plain loop over their rows."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqdedupe import wire
from seqdedupe.message_id import MessageId, MessageIds
from seqdedupe.v1 import batch_pb2

Run = tuple[int, int, int, int]

SMALL = st.tuples(st.integers(1, 4), st.integers(0, 2), st.integers(0, 4), st.integers(-1, 3))
LARGE = st.tuples(
    st.integers(0, 2**32 - 1), st.integers(-1, 2**63 - 1), st.integers(-(2**63), 2**63 - 1), st.integers(-2, 2**31 - 1)
)
NEAR_THE_END = st.tuples(
    st.integers(1, 3), st.just(2**63 - 1), st.integers(2**63 - 4, 2**63 - 1), st.integers(2**31 - 4, 2**31 - 1)
)
RUNS = st.lists(SMALL | NEAR_THE_END | NEAR_THE_END.map(lambda run: (*run[:3], -1)), min_size=1, max_size=5)


def plain(runs: list[Run]) -> list[MessageId]:
    """The message IDs, as batch.proto says them."""
    return [
        MessageId(ledger, entry + step, -1) if place == -1 else MessageId(ledger, entry, place + step)
        for rows, ledger, entry, place in runs
        for step in range(rows)
    ]


def are_right(runs: list[Run], rows: int) -> bool:
    """Whether a record of this many rows can have these runs, as batch.proto says."""
    if sum(run[0] for run in runs) != rows or any(run[0] < 1 for run in runs):
        return False
    ids = plain(runs)
    in_range = all(
        0 <= one.ledger_id < 2**63 and 0 <= one.entry_id < 2**63 and -1 <= one.batch_index < 2**31 for one in ids
    )
    return in_range and all(before < after for before, after in pairwise(ids))


def record(runs: list[Run], rows: int) -> batch_pb2.Record:
    rows_of, ledgers, entries, places = zip(*runs, strict=True)
    return batch_pb2.Record(
        rows=rows, run_rows=rows_of, run_ledger_ids=ledgers, run_entry_ids=entries, run_batch_indexes=places
    )


def decoded(message: batch_pb2.Record) -> MessageIds | None:
    return MessageIds.of_record(wire.Record.FromString(message.SerializeToString()))


def listed(ids: MessageIds) -> list[MessageId]:
    columns = ids.columns()
    assert [column.dtype for column in columns] == [np.int64, np.int64, np.int32]
    found = [MessageId(*map(int, one)) for one in zip(*columns, strict=True)]
    assert found == [ids[row] for row in range(len(ids))]
    return found


@given(st.lists(SMALL, min_size=1, max_size=5), st.data())
def test_rows_and_cuts_are_those_of_a_plain_loop(runs: list[Run], data: st.DataObject) -> None:
    ids, expected = MessageIds.of(runs), plain(runs)
    assert listed(ids) == expected
    first = data.draw(st.integers(0, len(expected) - 1))
    stop = data.draw(st.integers(first + 1, len(expected)))
    cut = ids.cut(first, stop)
    assert listed(cut) == expected[first:stop]
    assert listed(ids) == expected, "cutting changes nothing"
    encoded = batch_pb2.Record.FromString(cut.encode())
    again = zip(encoded.run_rows, encoded.run_ledger_ids, encoded.run_entry_ids, encoded.run_batch_indexes, strict=True)
    assert plain(list(again)) == expected[first:stop]


@given(RUNS | st.lists(LARGE, min_size=1, max_size=1), st.sampled_from((0, 0, 0, -1, 1)))
def test_what_a_record_brings_is_taken_if_it_is_right(runs: list[Run], more: int) -> None:
    rows = sum(run[0] for run in runs)
    if rows > 100:  # of an oracle that makes them one by one
        runs = [(1, *run[1:]) for run in runs]
        rows = len(runs)
    message = record(runs, max(rows + more, 0))
    if are_right(runs, message.rows):
        ids = decoded(message)
        assert ids is not None
        assert listed(ids) == plain(runs)
    else:
        with pytest.raises(ValueError, match=r"run|rise|rows"):
            decoded(message)


GOOD: list[Run] = [(2, 7, 41, -1), (3, 8, 0, 0)]


@pytest.mark.parametrize(
    ("runs", "rows", "why"),
    [
        (GOOD, 4, "there are 5 for 4 rows"),
        (GOOD, 6, "there are 5 for 6 rows"),
        ([GOOD[0], (0, 8, 0, 0), (3, 8, 0, 0)], 5, "run 1 has no rows"),
        ([GOOD[1], GOOD[0]], 5, "do not rise at run 1"),
        ([GOOD[0], (3, 7, 42, -1)], 5, "do not rise at run 1"),
        ([GOOD[1], (2, 8, 0, 2)], 5, "do not rise at run 1"),
        ([(5, -1, 0, -1)], 5, "run 0 has no message IDs"),
        ([(5, 0, -1, -1)], 5, "run 0 has no message IDs"),
        ([(5, 0, 0, -2)], 5, "run 0 has no message IDs"),
        ([(5, 0, 2**63 - 5, -1)], 5, None),
        ([(5, 0, 2**63 - 4, -1)], 5, "run 0 has no message IDs"),
        ([(5, 0, 0, 2**31 - 5)], 5, None),
        ([(5, 0, 0, 2**31 - 4)], 5, "run 0 has no message IDs"),
    ],
)
def test_what_is_wrong_is_said(runs: list[Run], rows: int, why: str | None) -> None:
    if why is None:
        assert decoded(record(runs, rows)) is not None
    else:
        with pytest.raises(ValueError, match=why):
            decoded(record(runs, rows))


@pytest.mark.parametrize("left_out", ["run_rows", "run_ledger_ids", "run_entry_ids", "run_batch_indexes"])
def test_a_column_that_is_missing(left_out: Any) -> None:
    message = record(GOOD, 5)
    assert decoded(message) is not None
    message.ClearField(left_out)
    with pytest.raises(ValueError, match="different lengths"):
        decoded(message)


def test_none_at_all_leaves_them_to_the_index() -> None:
    assert decoded(batch_pb2.Record(rows=5)) is None
