"""Receipts made by hand, as a log may give them whose message IDs do not follow from the indexes."""

import itertools
from dataclasses import fields
from typing import Any, cast

import numpy as np
import pytest
from google.protobuf.message import DecodeError

from broker_sidecar.services.publish_service import encode_receipt
from seqdedupe import wire
from seqdedupe.batch import Binary, single_producer
from seqdedupe.client import blocking, publish_calls
from seqdedupe.client import pending as pending_module
from seqdedupe.client.pending import BatchResult, PendingBatch, Verdict
from seqdedupe.client.publish_calls import StreamAnswer, decode_answer
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.log.contract import Run
from seqdedupe.message_id import MessageId
from seqdedupe.topic.frame import FrameReceipt
from seqdedupe.v1 import batch_pb2, publish_pb2

NOT_DUP, DUP = Verdict.NOT_DUP, Verdict.DUP

TWO_LEDGERS = {"run_rows": [2, 3], "run_ledger_ids": [7, 8], "run_entry_ids": [41, 0], "run_batch_indexes": [-1, -1]}
"""A ledger rolled over in mid-frame; every row is an entry."""

ENTRIES_OF_TWO = {
    "run_rows": [2, 2, 1],
    "run_ledger_ids": [7, 7, 7],
    "run_entry_ids": [41, 42, 43],
    "run_batch_indexes": [0, 0, -1],
}
"""Rows share entries; the last one has its own entry."""


def pending_batch(rows: int) -> PendingBatch:
    pending = PendingBatch()
    ids = np.arange(rows, dtype=np.int64)
    pending.seal(single_producer(b"p", 0, -1, ids, Binary.of_all([b""] * rows)), 100)
    return pending


def answered(rows: int, raw: bytes) -> PendingBatch:
    """A batch of this many rows after the answer with its receipt."""
    pending = pending_batch(rows)
    [(_, receipt)] = decode_answer(raw, lambda _: rows).receipts
    pending.record(receipt)
    return pending


def message_ids(pending: PendingBatch) -> list[MessageId | None]:
    result = pending.result()
    return [result[row].message_id for row in range(len(result))]


def answer(first: tuple[int, int, int], **columns: Any) -> bytes:
    ledger_id, entry_id, batch_index = first
    first_message_id = batch_pb2.MessageId(ledger_id=ledger_id, entry_id=entry_id, batch_index=batch_index)
    usual: dict[str, Any] = {"frame": 1, "first_index": 100, "first_message_id": first_message_id}
    receipt = publish_pb2.Receipt(**(usual | columns))
    return publish_pb2.PublishStreamResponse(receipts=[receipt], incarnation=1).SerializeToString()


@pytest.mark.parametrize("first", [(7, 41, -1), (7, 41, 3)])
def test_a_receipt_of_new_rows_is_the_same_with_their_verdicts_and_without(first: tuple[int, int, int]) -> None:
    """Without them all columns are made at once; with them they are merged."""
    at_once = answered(4, answer(first)).result()
    merged = answered(4, answer(first, verdicts=[NOT_DUP] * 4)).result()
    for column in fields(BatchResult):
        one, other = getattr(at_once, column.name), getattr(merged, column.name)
        assert (one.dtype, one.tolist()) == (other.dtype, other.tolist())


def test_a_ledger_that_rolled_over_in_mid_frame() -> None:
    pending = answered(5, answer((7, 41, -1), **TWO_LEDGERS))
    expected = [(7, 41, -1), (7, 42, -1), (8, 0, -1), (8, 1, -1), (8, 2, -1)]
    assert message_ids(pending) == [MessageId(*one) for one in expected]
    assert [pending.result()[row].index for row in range(5)] == [100, 101, 102, 103, 104]


def test_rows_that_share_entries() -> None:
    pending = answered(5, answer((7, 41, 0), **ENTRIES_OF_TWO))
    expected = [(7, 41, 0), (7, 41, 1), (7, 42, 0), (7, 42, 1), (7, 43, -1)]
    assert message_ids(pending) == [MessageId(*one) for one in expected]


def test_only_the_rows_that_were_stored_have_a_place_in_the_runs() -> None:
    verdicts = [DUP, NOT_DUP, DUP, NOT_DUP, NOT_DUP]
    columns = {"run_rows": [1, 2], "run_ledger_ids": [7, 8], "run_entry_ids": [9, 0], "run_batch_indexes": [-1, -1]}
    known = {"known_rows": [2], "known_indexes": [4], "known_ledger_ids": [3], "known_entry_ids": [5]}
    pending = answered(5, answer((7, 9, -1), verdicts=[int(v) for v in verdicts], **columns, **known))
    expected = [None, MessageId(7, 9), MessageId(3, 5), MessageId(8, 0), MessageId(8, 1)]
    assert message_ids(pending) == expected
    assert [pending.result()[row].index for row in range(5)] == [-1, 100, 4, 101, 102]


def test_runs_in_an_unusual_encoding() -> None:
    usual = answer((7, 41, -1), **TWO_LEDGERS)
    receipt = publish_pb2.PublishStreamResponse.FromString(usual).receipts[0]
    receipt.ClearField("run_rows")
    unpacked = b"".join(bytes((10 << 3 | 5,)) + rows.to_bytes(4, "little") for rows in TWO_LEDGERS["run_rows"])
    body = receipt.SerializeToString() + unpacked
    number = publish_pb2.PublishStreamResponse.DESCRIPTOR.fields_by_name["receipts"].number
    of_a_topic = publish_pb2.PublishStreamResponse(incarnation=1).SerializeToString()
    raw = bytes((number << 3 | 2, len(body))) + body + of_a_topic
    assert raw != usual
    assert message_ids(answered(5, raw)) == message_ids(answered(5, usual))


def test_runs_of_another_number_of_rows_are_no_receipt() -> None:
    with pytest.raises(DecodeError, match="does not fit its frame, which has 4 rows"):
        answered(4, answer((7, 41, -1), **TWO_LEDGERS)).result()


@pytest.mark.parametrize(
    ("first", "columns"),
    [
        ((7, 41, -1), {}),
        ((7, 41, 3), {}),
        ((7, 41, -1), TWO_LEDGERS),
        ((7, 41, 0), ENTRIES_OF_TWO),
        ((7, 41, -1), {"verdicts": [int(v) for v in (DUP, NOT_DUP, DUP, NOT_DUP, NOT_DUP)]}),
    ],
)
def test_one_row_is_told_the_same_as_all_of_them(first: tuple[int, int, int], columns: dict[str, Any]) -> None:
    """Whether the columns of all have been made or not."""
    pending, other = answered(5, answer(first, **columns)), answered(5, answer(first, **columns))
    pending.partition = other.partition = 4
    result = other.result()
    assert [pending.published(row) for row in range(5)] == [result[row] for row in range(5)]
    assert len({result[row].message_id for row in range(5)}) > 1


def test_one_row_of_a_batch_that_failed_raises_too() -> None:
    pending = pending_batch(2)
    pending.fail(error("OUTCOME_UNKNOWN", "given up"))
    with pytest.raises(SeqdedupeError, match="given up"):
        pending.published(1)


EARLY = answer((-1, -1, -1), durable_at=102)


@pytest.mark.parametrize("of", [pending_module.Receipt, blocking.Receipt])
@pytest.mark.parametrize("of_batch", [pending_module.BatchReceipt, blocking.BatchReceipt])
def test_what_fails_after_its_early_receipt_is_never_durable(of: Any, of_batch: Any) -> None:
    """Anyone who learned keeps what it learned; the control arm is the same batch, not given up."""
    lost, kept, spread = (answered(2, EARLY) for _ in range(3))
    of_all = pending_module.SpreadBatch(np.arange(4), [(np.arange(2), kept), (np.arange(2, 4), spread)])
    receipts = [of(lost, 1), of_batch(lost), of(kept, 1), of_batch(kept), of_batch(of_all)]
    assert not any(receipt.is_durable() for receipt in receipts)
    lost.fail(error("OUTCOME_UNKNOWN", "given up"))
    kept.become_durable()
    spread.fail(error("OUTCOME_UNKNOWN", "given up"))
    assert [receipt.is_durable() for receipt in receipts] == [False, False, True, True, False]
    assert lost.published(1).index == kept.durable_published(1).index == 101
    for pending in (lost, of_all):
        with pytest.raises(SeqdedupeError, match="given up"):
            pending.durable_result()


def usual(*receipts: FrameReceipt) -> bytes:
    """An answer as the sidecar makes it."""
    state = [value for pair in zip(wire.STATE_TAGS, (2**40 + 1, 3, 2**33), strict=True) for value in pair]
    return b"".join(encode_receipt(cast(Any, None), receipt) for receipt in receipts) + wire.STATE.pack(*state)


def read(answer: StreamAnswer) -> Any:
    """What the client takes from an answer of frames of which all rows are new."""
    receipts = [(frame, it.first_index, it.first_message_id, it.durable_at) for frame, it in answer.receipts]
    return receipts, list(answer.refusals), answer.incarnation, answer.term, answer.durable_index


@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_answer_of_fixed_width_is_read_as_protobuf_reads_it(count: int) -> None:
    runs = [(Run(2, 2**40, 2**33 + frame),) for frame in range(count)]
    raw = usual(*(FrameReceipt(frame, None, 2**33 + frame, runs[frame]) for frame in range(count)))
    # Fields may come in any order: in this one it is not the usual answer.
    other_order = raw[-wire.STATE.size :] + raw[: -wire.STATE.size]
    assert read(decode_answer(raw, lambda _: 2)) == read(decode_answer(other_order, lambda _: 2))
    assert count == 0 or publish_calls._usual_answer(other_order) is None


def test_one_byte_that_differs_makes_no_answer_that_protobuf_would_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = usual(FrameReceipt(1, None, 100, (Run(2, 7, 41),)), FrameReceipt(2, None, 102, (Run(2, 7, 43),)))
    found = 0
    for at, bit in itertools.product(range(len(raw)), range(8)):
        changed = raw[:at] + bytes((raw[at] ^ 1 << bit,)) + raw[at + 1 :]
        if (answer := publish_calls._usual_answer(changed)) is not None:
            found += 1
            with monkeypatch.context() as patch:
                patch.setattr(publish_calls, "_usual_answer", lambda _: None)
                assert read(answer) == read(decode_answer(changed, lambda _: 2))
    # The bits of the numbers but for the signs of indexes: the others are tags and lengths.
    assert found == 8 * 8 * (2 * 4 + 3) - 2


@pytest.mark.parametrize("verdict", [Verdict.DUP, Verdict.UNKNOWN])
def test_one_bit_that_differs_makes_no_message_stored_that_is_not(verdict: Verdict) -> None:
    raw = answer((-1, -1, -1), first_index=-1, verdicts=[verdict] * 3)
    for at, bit in itertools.product(range(len(raw)), range(8)):
        try:
            decoded = decode_answer(raw[:at] + bytes((raw[at] ^ 1 << bit,)) + raw[at + 1 :], lambda _: 3)
        except DecodeError:
            continue
        for _, receipt in decoded.receipts:
            assert len(receipt.verdicts) == 3
            assert NOT_DUP not in receipt.verdicts


def test_an_early_receipt_says_up_to_which_index_it_waits() -> None:
    raw = usual(FrameReceipt(1, None, 100, (Run(2, 7, 41),), durable_at=102))
    [(frame, receipt)] = decode_answer(raw, lambda _: 2).receipts
    assert (frame, receipt.first_index, receipt.durable_at) == (1, 100, 102)
