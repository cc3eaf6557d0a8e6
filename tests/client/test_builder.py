"""The builder: what is sent comes out of the encoded batch as it went in, and what cannot be sent changes nothing."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqdedupe.batch import Batch, Binary, decode
from seqdedupe.client.builder import Builder
from seqdedupe.client.pending import PendingBatch
from seqdedupe.client.producer_session import ProducerConfig
from seqdedupe.errors import InvalidRequestError
from seqdedupe.limits import (
    MAX_BATCH_BYTES,
    MAX_EVENT_TIME_MS,
    MAX_PAYLOAD_BYTES,
    MAX_SEQUENCE_ID,
    MIN_EVENT_TIME_MS,
)

Row = tuple[int, bytes | None, bytes | None, int, dict[str, str]]


class Built:
    """A builder and what it has handed over."""

    def __init__(self, persisted: int = -1, **config: Any) -> None:
        self.sealed: list[PendingBatch] = []
        self.builder = Builder(b"p", persisted, ProducerConfig(**config), self.sealed.append)

    def batches(self) -> list[Batch]:
        assert all(pending.batch is not None for pending in self.sealed)
        return [decode(pending.batch.encode()) for pending in self.sealed if pending.batch]

    def rows(self) -> list[Row]:
        self.builder.seal()
        return [
            (
                int(batch.sequence_ids[row]),
                batch.payloads[row],
                batch.keys[row],
                int(batch.event_times_ms[row]) if len(batch.event_times_ms) else 0,
                batch.properties_of(row),
            )
            for batch in self.batches()
            for row in range(len(batch))
        ]


messages = st.lists(
    st.tuples(
        st.integers(1, 10),
        st.none() | st.binary(max_size=20),
        st.none() | st.binary(max_size=5),
        st.integers(MIN_EVENT_TIME_MS, MAX_EVENT_TIME_MS) | st.sampled_from([MIN_EVENT_TIME_MS, MAX_EVENT_TIME_MS, 0]),
        st.dictionaries(st.text("aé", max_size=3), st.text("äb", max_size=3)),
    ),
    min_size=1,
    max_size=40,
)


@given(messages, st.integers(1, 7), st.integers(1, 300))
def test_what_goes_in_comes_out(
    gaps: list[tuple[int, bytes | None, bytes | None, int, dict[str, str]]], max_rows: int, max_bytes: int
) -> None:
    built = Built(max_batch_rows=max_rows, max_batch_bytes=max_bytes)
    sent: list[Row] = []
    places: list[tuple[PendingBatch, int]] = []
    sequence_id = -1
    for gap, payload, key, event_time, properties in gaps:
        sequence_id += gap
        explicit = None if gap == 1 else sequence_id
        places.append(built.builder.append(payload, explicit, key, event_time or None, properties))
        sent.append((sequence_id, payload, key, event_time, properties))
    assert built.rows() == sent
    assert all(len(pending.sequence_ids) <= max_rows for pending in built.sealed)
    assert [int(pending.sequence_ids[row]) for pending, row in places] == [row[0] for row in sent]
    for pending, batch in zip(built.sealed, built.batches(), strict=True):
        assert pending.size_bytes >= len(batch.encode())


@given(messages)
def test_columns_and_single_messages_make_the_same_batch(
    gaps: list[tuple[int, bytes | None, bytes | None, int, dict[str, str]]],
) -> None:
    ids = np.cumsum([gap for gap, *_ in gaps]).astype(np.int64)
    single, columns = Built(max_batch_bytes=MAX_BATCH_BYTES), Built()
    for sequence_id, (_, payload, key, event_time, properties) in zip(ids.tolist(), gaps, strict=True):
        single.builder.append(payload, sequence_id, key, event_time, properties)
    single.builder.seal()
    _, payloads, keys, times, properties_of_rows = zip(*gaps, strict=True)
    columns.builder.add_columns(payloads, ids, keys, times, properties_of_rows)
    assert [batch.encode() for batch in single.batches()] == [batch.encode() for batch in columns.batches()]


def test_a_batch_is_sealed_by_rows_and_by_bytes() -> None:
    built = Built(max_batch_rows=3)
    for _ in range(7):
        built.builder.append(b"", None, None, None, None)
    assert [len(pending.sequence_ids) for pending in built.sealed] == [3, 3]
    built = Built(max_batch_bytes=10_000)
    for _ in range(7):
        built.builder.append(b"x" * 4000, None, None, None, None)
    assert [len(pending.sequence_ids) for pending in built.sealed] == [3, 3]


def test_no_batch_is_above_the_limit_however_large_its_last_message_is() -> None:
    built = Built(max_batch_bytes=MAX_BATCH_BYTES)
    for _ in range(5):
        built.builder.append(b"x" * MAX_PAYLOAD_BYTES, None, None, None, None)
        built.builder.append(b"y", None, b"k" * 1_900_000, None, None)
    built.builder.seal()
    assert sum(len(pending.sequence_ids) for pending in built.sealed) == 10
    assert all(len(batch.encode()) <= MAX_BATCH_BYTES for batch in built.batches())


def test_event_times_are_milliseconds() -> None:
    built = Built()
    moment = datetime(2024, 2, 29, 12, 0, 0, 123_999, tzinfo=timezone(timedelta(hours=2)))
    built.builder.append(b"", None, None, moment, None)
    built.builder.append(b"", None, None, datetime(1969, 12, 31, 23, 59, 59, tzinfo=UTC), None)
    assert [row[3] for row in built.rows()] == [1_709_200_800_123, -1000]


def test_automatic_ids_go_on_above_all_that_is_persisted_or_sent() -> None:
    built = Built(persisted=100)
    assert built.builder.last_sequence_id == 100
    built.builder.append(b"", 50, None, None, None)
    assert built.builder.last_sequence_id == 100
    built.builder.append(b"", None, None, None, None)
    built.builder.append(b"", 200, None, None, None)
    built.builder.add_columns([b"", b""], None, None, None, None)
    assert [row[0] for row in built.rows()] == [50, 101, 200, 201, 202]
    assert built.builder.last_sequence_id == 202


def test_the_last_id_of_all_can_be_sent_and_none_after_it() -> None:
    built = Built(persisted=MAX_SEQUENCE_ID - 2)
    built.builder.append(b"", None, None, None, None)
    built.builder.append(b"", None, None, None, None)
    for act in (
        lambda: built.builder.append(b"", None, None, None, None),
        lambda: built.builder.add_columns([b""], None, None, None, None),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            act()
        assert caught.value.reason == "INVALID_SEQUENCE_ID"
    assert [row[0] for row in built.rows()] == [MAX_SEQUENCE_ID - 1, MAX_SEQUENCE_ID]


def test_what_is_changed_after_it_was_sent_is_sent_as_it_was() -> None:
    built = Built()
    payload, properties = bytearray(b"before"), {"a": "before"}
    built.builder.append(payload, None, None, None, properties)  # type: ignore[arg-type]
    payload[:] = b"after!"
    properties["a"] = "after"
    assert built.rows() == [(0, b"before", None, 0, {"a": "before"})]


Act = Callable[[Builder], object]


def one(
    payload: Any = b"", sequence_id: Any = None, key: Any = None, event_time: Any = None, properties: Any = None
) -> Act:
    return lambda builder: builder.append(payload, sequence_id, key, event_time, properties)


def columns(payloads: Any, ids: Any = None, keys: Any = None, times: Any = None, properties: Any = None) -> Act:
    return lambda builder: builder.add_columns(payloads, ids, keys, times, properties)


def binary(offsets: list[int], data: bytes, validity: bytes = b"") -> Binary:
    return Binary(np.array(offsets, np.int32), data, validity)


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (one(sequence_id=-1), "INVALID_SEQUENCE_ID"),
        (one(sequence_id=2**63), "INVALID_SEQUENCE_ID"),
        (one(sequence_id="5"), "INVALID_SEQUENCE_ID"),
        (one(sequence_id=7), "NOT_ASCENDING"),
        (one(sequence_id=3), "NOT_ASCENDING"),
        (one("text"), "INVALID_REQUEST"),
        (one(17), "INVALID_REQUEST"),
        (one(b"x" * (MAX_PAYLOAD_BYTES + 1)), "MESSAGE_TOO_LARGE"),
        (one(bytearray(MAX_PAYLOAD_BYTES + 1)), "MESSAGE_TOO_LARGE"),
        (one(b"x", key=b"k" * MAX_BATCH_BYTES), "BATCH_TOO_LARGE"),
        (one(b"x", properties={"a": "v" * MAX_BATCH_BYTES}), "BATCH_TOO_LARGE"),
        (one(b"x", key=5), "INVALID_REQUEST"),
        (one(b"x", key="\ud800"), "INVALID_REQUEST"),
        (one(b"x", properties={"a": "\ud800"}), "INVALID_REQUEST"),
        (one(b"x", properties={"a": 5}), "INVALID_REQUEST"),
        (one(b"x", properties={5: "a"}), "INVALID_REQUEST"),
        (one(b"x", event_time=datetime(2024, 1, 1)), "INVALID_REQUEST"),
        (one(b"x", event_time=2**63), "INVALID_REQUEST"),
        (one(b"x", event_time=-(2**63) - 1), "INVALID_REQUEST"),
        (columns([]), "INVALID_BATCH"),
        (columns([b""] * 65_537), "INVALID_BATCH"),
        (columns(Binary()), "INVALID_BATCH"),
        (columns([b"", b""], [9, 9]), "NOT_ASCENDING"),
        (columns([b"", b"", b""], [9, 11, 10]), "NOT_ASCENDING"),
        (columns([b"", b""], [7, 8]), "NOT_ASCENDING"),
        (columns([b""], [-1]), "INVALID_SEQUENCE_ID"),
        (columns([b"", b""], [8]), "INVALID_BATCH"),
        (columns([b""], [[8]]), "INVALID_BATCH"),
        (columns([b""], [8.5]), "INVALID_SEQUENCE_ID"),
        (columns([b""], np.array([2**63], np.uint64)), "INVALID_SEQUENCE_ID"),
        (columns(["text"]), "INVALID_REQUEST"),
        (columns([b""], keys=[b"a", b"b"]), "INVALID_BATCH"),
        (columns([b""], keys=[5]), "INVALID_REQUEST"),
        (columns([b""], times=[1, 2]), "INVALID_BATCH"),
        (columns([b""], properties=[{}, {}]), "INVALID_BATCH"),
        (columns([b""], properties=[{"a": 5}]), "INVALID_BATCH"),
        (columns([b""], properties=[{"a": "\ud800"}]), "INVALID_BATCH"),
        (columns(binary([1, 2], b"ab")), "INVALID_BATCH"),
        (columns(binary([0, 1], b"ab")), "INVALID_BATCH"),
        (columns(binary([0, 2, 1, 2], b"ab")), "INVALID_BATCH"),
        (columns(binary([0, 2], b"ab", b"\1\1")), "INVALID_BATCH"),
        (columns(Binary(np.array([0, 2], np.int64), b"ab")), "INVALID_BATCH"),
        (columns([b"x" * (MAX_PAYLOAD_BYTES + 1)]), "MESSAGE_TOO_LARGE"),
        (columns([b"x" * MAX_PAYLOAD_BYTES] * 2), "BATCH_TOO_LARGE"),
    ],
)
def test_what_cannot_be_sent_is_refused_and_changes_nothing(act: Act, reason: str) -> None:
    built = Built()
    built.builder.append(b"before", 7, b"key", 5, {"a": "b"})
    with pytest.raises(InvalidRequestError) as caught:
        act(built.builder)
    assert caught.value.reason == reason
    assert not built.sealed
    built.builder.append(b"after", None, None, None, None)
    assert built.rows() == [(7, b"before", b"key", 5, {"a": "b"}), (8, b"after", None, 0, {})]


@pytest.mark.parametrize(
    "keys",
    [
        {"max_batch_rows": 0},
        {"max_batch_rows": 65_537},
        {"max_batch_bytes": MAX_BATCH_BYTES + 1},
        {"max_in_flight_batches": 0},
        {"max_in_flight_bytes": -5},
        {"linger_ms": -1.0},
        {"linger_ms": float("nan")},
        {"delivery_timeout_seconds": -1.0},
    ],
)
def test_a_configuration_that_cannot_be_is_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(keys))):
        ProducerConfig(**keys)
