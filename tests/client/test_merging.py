"""Several producers' batches in one frame, and its receipt: each part is what it would be alone."""

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqdedupe.batch import NO_INT32S, Batch, Binary, properties, single_producer
from seqdedupe.client.pending import BatchResult, InFlightBatch, ReceiptColumns, Verdict
from seqdedupe.client.stream import SMALL_BATCH_BYTES, ProducerFrame, parts_of, whole
from seqdedupe.limits import MAX_BATCH_ROWS
from seqdedupe.message_id import MessageId

some_bytes = st.binary(max_size=3)
some_pairs = st.dictionaries(st.text(max_size=2), st.text(max_size=2), max_size=2)
messages = st.tuples(st.none() | some_bytes, st.none() | some_bytes, st.integers(0, 2), some_pairs)


def payload_column(values: list[bytes | None]) -> Binary:
    """As the client lays it out: never omitted."""
    column = Binary.of(values)
    return column or Binary(np.zeros(len(values) + 1, np.int32), b"", bytes((len(values) + 7) // 8))


def batch_of(producer: int, rows: list[Any], complete_up_to: int | None) -> Batch:
    times = np.array([row[2] for row in rows], np.int64)
    offsets, names, values = properties([row[3] for row in rows])
    more = {} if complete_up_to is None else {"complete_up_to": np.array([complete_up_to], np.int64)}
    batch = single_producer(
        b"p%d" % producer,
        100 + producer,
        producer - 1,
        np.arange(len(rows)) + 10 * producer,
        payload_column([row[0] for row in rows]),
        keys=Binary.of([row[1] for row in rows]),
        property_offsets=offsets,
        property_names=names,
        property_values=values,
        **more,
    )
    if times.any():
        batch.event_times_ms = times
    return batch


def contents(batch: Batch, rows: range) -> list[Any]:
    times = batch.event_times_ms if len(batch.event_times_ms) else np.zeros(len(batch), np.int64)
    return [
        (
            batch.names()[batch.producer_of(row)],
            batch.epochs[batch.producer_of(row)],
            batch.previous_sequence_ids[batch.producer_of(row)],
            batch.sequence_ids[row],
            batch.payloads[row],
            batch.keys[row],
            times[row],
            batch.properties_of(row),
        )
        for row in rows
    ]


@given(
    st.lists(
        st.tuples(st.lists(messages, min_size=1, max_size=10), st.none() | st.integers(0, 5)), min_size=1, max_size=5
    )
)
def test_a_shared_frame_holds_what_its_parts_do(given_batches: list[Any]) -> None:
    batches = [batch_of(p, rows, up_to) for p, (rows, up_to) in enumerate(given_batches)]
    frame = whole([InFlightBatch(7 + p, batch, 1) for p, batch in enumerate(batches)])
    assert frame.number == 7
    first = 0
    for p, batch in enumerate(batches):
        part = range(first, first + len(batch))
        assert contents(frame.batch, part) == contents(batch, range(len(batch)))
        expected = batch.complete_up_to.tolist() or [-1]
        assert (frame.batch.complete_up_to.tolist() or [-1] * len(batches))[p : p + 1] == expected
        first += len(batch)
    assert first == len(frame.batch)
    # What nobody has is omitted, as the canonical form wants it.
    assert bool(frame.batch.keys) == any(bool(batch.keys) for batch in batches)
    assert bool(len(frame.batch.property_offsets)) == any(len(batch.property_offsets) for batch in batches)
    assert bool(len(frame.batch.event_times_ms)) == any(len(batch.event_times_ms) for batch in batches)
    assert bool(len(frame.batch.producer_indexes)) == (len(batches) > 1)


def part(name: str, rows: int = 1, size_bytes: int = 100, *, goes_alone: bool = False) -> ProducerFrame[str]:
    column = Binary.of_all([b""] * rows)
    return ProducerFrame(
        name, InFlightBatch(0, single_producer(name.encode(), 0, -1, np.arange(rows), column), size_bytes), goes_alone
    )


@pytest.mark.parametrize(
    ("parts", "frames"),
    [
        ([part("a"), part("b"), part("c")], ["abc"]),
        ([part("a"), part("b"), part("a"), part("b")], ["ab", "ab"]),
        ([part("a"), part("b", size_bytes=SMALL_BATCH_BYTES + 1), part("c"), part("d")], ["a", "b", "cd"]),
        ([part("a"), part("b", goes_alone=True), part("c")], ["a", "b", "c"]),
        ([part("a", goes_alone=True), part("b"), part("c")], ["a", "bc"]),
        ([part("a", MAX_BATCH_ROWS - 1), part("b"), part("c")], ["ab", "c"]),
        ([], []),
    ],
)
def test_which_parts_share_a_frame(parts: list[ProducerFrame[str]], frames: list[str]) -> None:
    assert ["".join(part.sender for part in frame) for frame in parts_of(parts)] == frames


def receipt_of(verdicts: list[int], runs: list[int], place: int, rng: random.Random) -> ReceiptColumns:
    """A receipt with these verdicts; the rows that were stored stand in runs of these lengths, at most."""
    stored = verdicts.count(Verdict.NOT_DUP)
    lengths: list[int] = []
    while sum(lengths) < stored:
        lengths.append(min(runs[len(lengths) % len(runs)], stored - sum(lengths)))
    ids = [MessageId(7 + run, 100 * run, place) for run in range(max(len(lengths), 1))]
    known = [row for row, verdict in enumerate(verdicts) if verdict == Verdict.DUP and rng.random() < 0.7]
    has_runs = len(lengths) > 1
    return ReceiptColumns(
        np.array([] if stored == len(verdicts) else verdicts, np.uint8),
        1000 if stored else -1,
        ids[0] if stored else MessageId(-1, -1, -1),
        np.array(known, np.uint32),
        np.array(known, np.int64) + 500,
        np.full(len(known), 3, np.int64),
        np.array(known, np.int64) + 600,
        np.array(known if place >= 0 else [], np.int32),
        np.array(lengths if has_runs else [], np.uint32),
        np.array([one.ledger_id for one in ids] if has_runs else [], np.int64),
        np.array([one.entry_id for one in ids] if has_runs else [], np.int64),
        np.array([one.batch_index for one in ids], np.int32) if has_runs else NO_INT32S,
    )


@given(
    st.lists(st.lists(st.sampled_from([1, 1, 2, 3]), min_size=1, max_size=6), min_size=1, max_size=5),
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.sampled_from([-1, 5]),
    st.randoms(use_true_random=False),
)
def test_a_cut_receipt_says_what_the_whole_one_did(
    parts: list[list[int]], runs: list[int], place: int, rng: random.Random
) -> None:
    verdicts = [verdict for one in parts for verdict in one]
    receipt = receipt_of(verdicts, runs, place, rng)
    expected = BatchResult.undecided(np.arange(len(verdicts)))
    expected.merge(receipt)
    first = 0
    for one in parts:
        stop = first + len(one)
        result = BatchResult.undecided(np.arange(first, stop))
        result.merge(receipt.cut(first, stop))
        for column in ("verdicts", "indexes", "ledger_ids", "entry_ids", "batch_indexes"):
            assert getattr(result, column).tolist() == getattr(expected, column)[first:stop].tolist(), column
        first = stop
