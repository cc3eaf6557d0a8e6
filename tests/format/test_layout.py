"""The check of everything that is sent: canonical batches pass, no matter what else is refused, nothing crashes."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqdedupe import batch as batches
from seqdedupe.batch import Batch, Binary, canonical, decode
from seqdedupe.format import layout
from seqdedupe.format.layout import PLACES, PRODUCERS, ROWS
from seqdedupe.limits import MAX_PAYLOAD_BYTES
from seqdedupe.v1 import batch_pb2
from tests.batches import batch, put_columns
from tests.plain import PLAIN

NAMES = st.sampled_from(["a", "b", "producer-2", "ü"])


@st.composite
def any_batch(draw: st.DrawFn) -> Batch:
    """A valid batch with every kind of column, there or not."""
    chosen = draw(st.lists(NAMES, min_size=1, max_size=12))
    at: dict[str, int] = {}
    rows = []
    for name in chosen:
        at[name] = at.get(name, -1) + draw(st.integers(1, 2**40))
        rows.append((name, at[name]))
    payloads = draw(st.lists(st.none() | st.binary(max_size=20), min_size=len(rows), max_size=len(rows)))
    keys = draw(st.none() | st.lists(st.none() | st.binary(max_size=5), min_size=len(rows), max_size=len(rows)))
    texts = st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=2)
    row_properties = draw(st.none() | st.lists(texts, min_size=len(rows), max_size=len(rows)))
    times: dict[str, Any] = {"event_times_ms": np.arange(1, len(rows) + 1)} if draw(st.booleans()) else {}
    made = batch(
        rows,
        payloads=payloads,
        keys=keys,
        row_properties=row_properties,
        **times,
    )
    if draw(st.booleans()):
        made.complete_up_to = np.arange(len(made.epochs)) * 10
    if draw(st.booleans()):
        ids = st.lists(st.binary(max_size=6), min_size=len(rows), max_size=len(rows))
        made.deduplication_ids = Binary.of_all(draw(ids))
    return made


def check(encoded: bytes) -> tuple[int, np.ndarray]:
    """The compiled check's answer, which must be the plain one's."""
    places = np.zeros(PLACES, np.int64)
    plain_places = np.zeros(PLACES, np.int64)
    wrong = layout.layout(np.frombuffer(encoded, np.uint8), 0, len(encoded), places)
    plain_wrong = PLAIN["layout"].layout(np.frombuffer(encoded, np.uint8), 0, len(encoded), plain_places)
    assert (wrong, list(places)) == (plain_wrong, list(plain_places))
    return wrong, places


@given(any_batch())
def test_what_python_encodes_is_canonical_and_what_protobuf_makes_of_it(b: Batch) -> None:
    encoded = b.encode()
    wrong, places = check(encoded)
    assert wrong == layout.CANONICAL
    assert (places[ROWS], places[PRODUCERS]) == (len(b), len(b.epochs))
    assert batch_pb2.Batch.FromString(encoded).SerializeToString() == encoded
    assert decode(encoded).encode() == encoded
    assert canonical(encoded) == encoded


@given(any_batch(), st.data())
def test_a_batch_of_some_rows_is_canonical_and_holds_those_rows(b: Batch, data: st.DataObject) -> None:
    rows = sorted(data.draw(st.sets(st.integers(0, len(b) - 1), min_size=1)))
    taken = b.take(np.array(rows))
    wrong, _ = check(taken.encode())
    assert wrong == layout.CANONICAL
    taken = decode(taken.encode())
    for at, row in enumerate(rows):
        assert taken.names()[taken.producer_of(at)] == b.names()[b.producer_of(row)]
        assert taken.sequence_ids[at] == b.sequence_ids[row]
        assert taken.payloads[at] == b.payloads[row]
        assert taken.keys[at] == b.keys[row]
        assert taken.properties_of(at) == b.properties_of(row)
        assert taken.deduplication_ids[at] == b.deduplication_ids[row]
        if len(b.complete_up_to):
            assert taken.complete_up_to[taken.producer_of(at)] == b.complete_up_to[b.producer_of(row)]
        before = [i for i in range(row) if b.producer_of(i) == b.producer_of(row)]
        if taken.producer_of(at) not in [taken.producer_of(i) for i in range(at)]:
            link = b.sequence_ids[before[-1]] if before else b.previous_sequence_ids[b.producer_of(row)]
            assert taken.previous_sequence_ids[taken.producer_of(at)] == link


def fits(offsets: list[int], values: int, blob: bytes | int) -> bool:
    size = blob if isinstance(blob, int) else len(blob)
    return (
        len(offsets) == values + 1
        and offsets[0] == 0
        and offsets[-1] == size
        and all(a <= b for a, b in itertools.pairwise(offsets))
    )


def independent_verdict(encoded: bytes) -> bool:
    """Whether a batch is what batch.proto says, read with the published schema and plain Python."""
    m = batch_pb2.Batch.FromString(encoded)
    has_producers = bool(m.producer_name_offsets or m.producer_names or m.epochs or m.previous_sequence_ids) or bool(
        m.producer_indexes or m.sequence_ids
    )
    n, p = len(m.sequence_ids), len(m.epochs)
    if not has_producers:
        n = len(m.deduplication_id_offsets) - 1

    if m.deduplication_id_offsets:
        if not fits(list(m.deduplication_id_offsets), n, m.deduplication_ids):
            return False
    elif m.deduplication_ids or not has_producers:
        return False
    if len(m.complete_up_to) not in (0, p):
        return False
    if has_producers and not producers_fit(m, n, p):
        return False
    return 1 <= n <= 65_536 and values_fit(m, n)


def producers_fit(m: batch_pb2.Batch, n: int, p: int) -> bool:
    owners = list(m.producer_indexes) or [0] * n
    if not (1 <= p <= n and n <= 65_536 and len(m.previous_sequence_ids) == p and len(owners) == n):
        return False
    if p > 1 and not m.producer_indexes:
        return False
    if not all(0 <= o < p for o in owners) or len(set(owners)) < p:
        return False
    if not fits(list(m.producer_name_offsets), p, m.producer_names):
        return False
    lengths = np.diff(m.producer_name_offsets)
    if not all(1 <= size <= 255 for size in lengths):
        return False
    last: dict[int, int] = {}
    for owner, sequence_id in zip(owners, m.sequence_ids, strict=True):
        if sequence_id < 0 or sequence_id <= last.get(owner, -1):
            return False
        last[owner] = sequence_id
    return True


def values_fit(m: batch_pb2.Batch, n: int) -> bool:
    bitmap = (n + 7) // 8
    if len(m.event_times_ms) not in (0, n):
        return False
    if m.key_offsets:
        if not fits(list(m.key_offsets), n, m.keys) or len(m.key_validity) not in (0, bitmap):
            return False
    elif m.keys or m.key_validity:
        return False
    if m.property_offsets:
        count = len(m.property_name_offsets) - 1
        if count < 0 or not (
            fits(list(m.property_offsets), n, count)
            and fits(list(m.property_name_offsets), count, m.property_names)
            and fits(list(m.property_value_offsets), count, m.property_values)
        ):
            return False
    elif m.property_name_offsets or m.property_names or m.property_value_offsets or m.property_values:
        return False
    return fits(list(m.payload_offsets), n, m.payloads) and len(m.payload_validity) in (0, bitmap)


@given(any_batch(), st.data())
def test_a_batch_with_changed_bytes_passes_only_if_it_is_still_a_batch(b: Batch, data: st.DataObject) -> None:
    encoded = bytearray(b.encode())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(encoded) - 1))
        match data.draw(st.sampled_from(["flip", "cut", "insert"])):
            case "flip":
                encoded[at] ^= data.draw(st.integers(1, 255))
            case "cut":
                del encoded[at : at + data.draw(st.integers(1, 9))]
            case "insert":
                encoded[at:at] = data.draw(st.binary(min_size=1, max_size=9))
        if not encoded:
            break
    wrong, _ = check(bytes(encoded))
    if wrong == layout.CANONICAL:
        assert independent_verdict(bytes(encoded))
        assert batch_pb2.Batch.FromString(bytes(encoded)).SerializeToString() == bytes(encoded)


@given(st.binary(max_size=300))
def test_random_bytes_are_refused_or_a_batch(encoded: bytes) -> None:
    wrong, _ = check(encoded)
    assert wrong != layout.CANONICAL or independent_verdict(encoded)


def test_a_legal_but_unusual_encoding_is_accepted_and_re_encoded() -> None:
    usual = batch([("a", 1), ("a", 2)]).encode()
    fields = decode(usual)
    first, second = (batch_pb2.Batch(sequence_ids=[i]).SerializeToString() for i in (1, 2))
    without_ids = fields.take(np.array([0, 1]))
    without_ids.sequence_ids = batches.NO_INT64S
    # The payloads first, then the rest, the IDs in two pieces and an unknown field at the end.
    unusual = without_ids.encode() + first + second + b"\xf8\x3f\x01"
    assert check(unusual)[0] == layout.NOT_CANONICAL
    assert canonical(unusual) == usual


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"sequence_ids": []}, layout.NO_ROWS),
        ({"sequence_ids": [-1, 0, 1]}, layout.BAD_SEQUENCE_ID),
        ({"sequence_ids": [5, 5, 6]}, layout.NOT_ASCENDING),
        ({"sequence_ids": [7, 6, 5]}, layout.NOT_ASCENDING),
        ({"epochs": []}, layout.BAD_NAMES),
        ({"epochs": [1, 2]}, layout.BAD_NAMES),
        ({"previous_sequence_ids": []}, layout.BAD_NAMES),
        ({"producer_names": b"ab"}, layout.BAD_NAMES),
        ({"producer_names": b"", "producer_name_offsets": [0, 0]}, layout.BAD_NAME_LENGTH),
        ({"producer_names": b"x" * 256, "producer_name_offsets": [0, 256]}, layout.BAD_NAME_LENGTH),
        ({"event_times_ms": [1]}, layout.BAD_EVENT_TIMES),
        ({"keys": b"k"}, layout.BAD_KEYS),
        ({"key_offsets": [0, 1, 2, 4], "keys": b"kkk"}, layout.BAD_KEYS),
        ({"key_offsets": [0, 2, 1, 3], "keys": b"kkk"}, layout.BAD_KEYS),
        ({"key_offsets": [0, 1, 2, 3], "keys": b"kkk", "key_validity": b"\1\1"}, layout.BAD_KEYS),
        ({"property_names": b"n"}, layout.BAD_PROPERTIES),
        ({"property_offsets": [0, 0, 0, 1]}, layout.BAD_PROPERTIES),
        ({"payload_offsets": [0, 1, 2]}, layout.BAD_PAYLOADS),
        ({"payload_offsets": [1, 1, 2, 3]}, layout.BAD_PAYLOADS),
        ({"payload_offsets": [0, 1, 2, 2**31 - 1]}, layout.BAD_PAYLOADS),
        ({"payload_offsets": [0, -1, 2, 3]}, layout.BAD_PAYLOADS),
        ({"payload_validity": b"\1\1"}, layout.BAD_PAYLOADS),
        ({"complete_up_to": [1, 2]}, layout.BAD_COMPLETE_UP_TO),
        ({"deduplication_ids": b"abc"}, layout.BAD_DEDUPLICATION_IDS),
        ({"deduplication_id_offsets": [0, 1, 3], "deduplication_ids": b"abc"}, layout.BAD_DEDUPLICATION_IDS),
        ({"deduplication_id_offsets": [0, 1, 2, 2], "deduplication_ids": b"abc"}, layout.BAD_DEDUPLICATION_IDS),
    ],
)
def test_each_wrong_column_is_named(change: dict[str, object], wrong: int) -> None:
    message = batch_pb2.Batch(
        producer_name_offsets=[0, 1],
        producer_names=b"a",
        epochs=[1],
        previous_sequence_ids=[-1],
        sequence_ids=[5, 6, 7],
        payload_offsets=[0, 1, 2, 3],
        payloads=b"xyz",
    )
    assert check(message.SerializeToString())[0] == layout.CANONICAL
    put_columns(message, change)
    assert check(message.SerializeToString())[0] == wrong


@pytest.mark.parametrize(
    ("indexes", "wrong"),
    [([], layout.BAD_PRODUCER_COLUMN), ([0, 2], layout.BAD_PRODUCER_INDEX), ([0, -1], layout.BAD_PRODUCER_INDEX),
     ([0, 0], layout.UNUSED_PRODUCER), ([0, 1, 1], layout.BAD_PRODUCER_COLUMN)],
)  # fmt: skip
def test_a_producer_column_that_does_not_fit_is_refused(indexes: list[int], wrong: int) -> None:
    b = batch([("a", 1), ("b", 1)])
    b.producer_indexes = np.array(indexes, np.int32)
    if indexes == [0, 0]:
        b.sequence_ids = np.array([1, 2])
    assert check(b.encode())[0] == wrong


def test_one_payload_over_the_limit_is_refused_and_one_at_the_limit_is_not() -> None:
    for size, wrong in ((MAX_PAYLOAD_BYTES, layout.CANONICAL), (MAX_PAYLOAD_BYTES + 1, layout.PAYLOAD_TOO_LARGE)):
        encoded = batch([("a", 1), ("a", 2)], payloads=[b"x", b"y" * size]).encode()
        places = np.zeros(PLACES, np.int64)
        assert layout.layout(np.frombuffer(encoded, np.uint8), 0, len(encoded), places) == wrong


def test_too_many_rows_are_refused() -> None:
    encoded = batch([("a", i) for i in range(65_537)], payloads=[b""] * 65_537).encode()
    places = np.zeros(PLACES, np.int64)
    assert layout.layout(np.frombuffer(encoded, np.uint8), 0, len(encoded), places) == layout.TOO_MANY_ROWS


def test_a_batch_of_deduplication_ids_may_leave_its_producers_out() -> None:
    message = batch_pb2.Batch(
        deduplication_id_offsets=[0, 1, 3], deduplication_ids=b"abc", payload_offsets=[0, 1, 2], payloads=b"xy"
    )
    wrong, places = check(message.SerializeToString())
    assert (wrong, places[ROWS], places[PRODUCERS]) == (layout.CANONICAL, 2, 0)
    assert independent_verdict(message.SerializeToString())
    for change, wrong in (
        ({"sequence_ids": [1, 2]}, layout.BAD_NAMES),
        ({"epochs": [1]}, layout.NO_ROWS),
        ({"complete_up_to": [1]}, layout.BAD_COMPLETE_UP_TO),
        ({"deduplication_id_offsets": [0], "deduplication_ids": b""}, layout.NO_ROWS),
        ({"deduplication_id_offsets": [0, 2, 1], "deduplication_ids": b"a"}, layout.BAD_DEDUPLICATION_IDS),
    ):
        changed = batch_pb2.Batch.FromString(message.SerializeToString())
        put_columns(changed, change)
        assert check(changed.SerializeToString())[0] == wrong, change
        assert not independent_verdict(changed.SerializeToString())
