"""Scanning records: compiled and plain are one, and no matter what is not a record as it was written is refused."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqdedupe.batch import Int64s
from seqdedupe.format import headers, records
from seqdedupe.format.headers import NO_KEY, key_of
from seqdedupe.format.layout import COLUMNS_END, OWNERSHIP, RECORD_END, ROWS, TERM
from seqdedupe.message_id import MessageIds
from seqdedupe.v1 import batch_pb2, read_pb2
from tests.log.batches import SECRET, encoded_batch
from tests.plain import PLAIN

KEY = key_of(SECRET)
TOKENS = (b"\xffirst token.....", b"the second token")
INCARNATION = 5


def made(body: bytes, body_tag: int, at: int, index: int, rows: int = 0, **others: Any) -> bytes:
    place: dict[str, Any] = {
        "column_bytes": len(body),
        "incarnation": INCARNATION,
        "file_offset": at,
        "base_index": index,
        "publish_time_ms": 9,
        "synced_offset": 0,
        "ownership": headers.ownership_of(TOKENS[0]),
        "key": KEY,
    } | others
    return headers.header(body, body_tag, rows=rows, **place) + body


def small_log() -> bytes:
    """Two ownerships: marker, batch, control record each."""
    raw, index = b"", 0
    for term, token in enumerate(TOKENS, 1):
        raw += headers.marker_record(
            term,
            token,
            incarnation=INCARNATION,
            file_offset=len(raw),
            next_index=index,
            publish_time_ms=9,
            synced_offset=0,
            key=KEY,
        )
        ownership = headers.ownership_of(token)
        body, rows, column_bytes = encoded_batch(10 * term, 3)
        raw += made(body, headers.BATCH_TAG, len(raw), index, rows, column_bytes=column_bytes, ownership=ownership)
        index += rows
        control = batch_pb2.Control(policy=batch_pb2.ControlPolicy(deduplication_enabled=True)).SerializeToString()
        raw += made(control, headers.CONTROL_TAG, len(raw), index, ownership=ownership)
    return raw


LOG = small_log()


def scanned(raw: bytes, key: Int64s = KEY, ownership: int = 0) -> tuple[int, list[int], np.ndarray]:
    """Why the scan stopped, its result and table: the compiled kernel's, which must be the plain one's."""
    view = np.frombuffer(raw, np.uint8)
    found = []
    for module in (records, PLAIN["records"]):
        table, result = records.new_table(10), records.new_result(ownership)
        why = module.scan(view, INCARNATION, 0, 0, key, table, result)
        found.append((why, result.tolist(), table[: result[0]].copy()))
    assert found[0][:2] == found[1][:2]
    assert (found[0][2] == found[1][2]).all()
    return found[0]


def test_what_was_written_is_read() -> None:
    why, result, table = scanned(LOG)
    assert (why, result[:2]) == (records.END, [6, len(LOG)])
    assert table[:, ROWS].tolist() == [0, 3, 0] * 2
    assert table[:, TERM].tolist() == [1, 0, 0, 2, 0, 0]
    assert [records.ownership(places) for places in table] == [
        headers.ownership_of(token) for token in TOKENS for _ in range(3)
    ]
    assert result[2] == table[-1, OWNERSHIP]
    assert records.marker_token(LOG, table[3]) == TOKENS[1]
    assert batch_pb2.Control.FromString(records.body_of(LOG, table[2])).policy.deduplication_enabled
    assert scanned(LOG, NO_KEY)[0] == records.END
    assert scanned(LOG, key_of(bytes(16)))[:2] == (records.DAMAGED, [0, 0, 0])


@given(st.integers(0, len(LOG) - 1), st.integers(1, 255), st.booleans())
def test_any_byte_changed_is_noticed_by_who_has_the_key(at: int, flip: int, cut: bool) -> None:
    raw = bytearray(LOG)
    raw[at] ^= flip
    why, result, table = scanned(bytes(raw[:at] if cut else raw))
    assert result[1] <= at or why in (records.END, records.INCOMPLETE)
    if result[1] > at:
        # A payload is looked at when it is read.
        hit = next(places for places in table if places[RECORD_END] > at)
        assert hit[ROWS]
        assert at >= hit[COLUMNS_END]


def test_a_record_is_of_the_owner_before_it() -> None:
    first = int(scanned(LOG)[2][0, OWNERSHIP])
    assert scanned(LOG, ownership=first ^ 1)[0] == records.END, "a marker begins an ownership of its own"
    body, rows, column_bytes = encoded_batch(0, 1)
    alone = made(body, headers.BATCH_TAG, 0, 0, rows, column_bytes=column_bytes)
    assert scanned(alone, ownership=first)[0] == records.END
    assert scanned(alone, ownership=first ^ 1)[0] == records.OTHER_OWNER


@pytest.mark.parametrize("size", [0, 1, 8, 9, 11, 26, 28])
def test_a_marker_of_another_size_is_damage(size: int) -> None:
    body = (LOG[headers.HEADER_BYTES :][: headers.MARKER_BYTES] + bytes(9))[:size]
    assert scanned(made(body, headers.MARKER_TAG, 0, 0))[0] == records.DAMAGED


@pytest.mark.parametrize(
    ("tag", "others"),
    [
        (headers.CONTROL_TAG, {"rows": 1}),
        (headers.CONTROL_TAG, {"column_bytes": 3}),
        (headers.MARKER_TAG, {"rows": 1}),
        (headers.MARKER_TAG, {"column_bytes": 3}),
        (headers.MARKER_TAG, {"ownership": 1}),
        (headers.MARKER_TAG, {"synced_offset": 1}),
        (headers.CONTROL_TAG + 8 * 8, {}),
    ],
)
def test_a_record_that_does_not_fit_together_is_damage(tag: int, others: dict[str, int]) -> None:
    marker = LOG[headers.HEADER_BYTES :][: headers.MARKER_BYTES]
    assert scanned(made(marker, headers.MARKER_TAG, 0, 0))[0] == records.END
    assert scanned(made(marker, tag, 0, 0, **others))[0] == records.DAMAGED


def test_a_stored_record_has_no_message_ids() -> None:
    """Only what is made for readers has them: a log that finds some has not written them."""
    body, rows, column_bytes = encoded_batch(0, 3)
    ids = MessageIds.of([(2, 7, 0, -1), (1, 8, 0, -1)]).encode()
    whole = made(body, headers.BATCH_TAG, 0, 0, rows, column_bytes=column_bytes, after_body_bytes=len(ids)) + ids
    assert [record.rows for record in read_pb2.ReadResponse.FromString(whole).records] == [rows]
    assert scanned(whole)[0] == records.DAMAGED
    assert scanned(whole, NO_KEY)[0] == records.DAMAGED
    assert scanned(made(body, headers.BATCH_TAG, 0, 0, rows, column_bytes=column_bytes) + ids)[0] != records.END


def test_a_batch_without_producers_has_deduplication_ids() -> None:
    message = batch_pb2.Batch(deduplication_id_offsets=[0, 1], deduplication_ids=b"a", payload_offsets=[0, 0])
    columns = batch_pb2.Batch(deduplication_id_offsets=[0, 1], deduplication_ids=b"a").SerializeToString()
    raw = made(message.SerializeToString(), headers.BATCH_TAG, 0, 0, 1, column_bytes=len(columns))
    assert scanned(raw)[0] == records.END
