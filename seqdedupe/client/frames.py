"""The messages of a publish stream: frames out, answers in."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from seqdedupe import wire
from seqdedupe.client.connection import error_of_reason
from seqdedupe.client.outbox import Frame
from seqdedupe.client.receipts import ReceiptColumns
from seqdedupe.client.route import OWNER_ADDRESS
from seqdedupe.errors import SeqdedupeError
from seqdedupe.message_id import MessageId
from seqdedupe.v1 import publish_pb2

_NO_MESSAGE_ID = MessageId(-1, -1, -1)


def encode_frames(frames: Sequence[Frame]) -> bytes:
    """A PublishStreamRequest with these frames."""
    message: list[bytes | memoryview] = []
    for frame in frames:
        message += wire.frame_parts(frame.number, frame.batch.encoded_parts())
    return b"".join(message)


class Answer(NamedTuple):
    """A PublishStreamResponse."""

    receipts: list[tuple[int, ReceiptColumns]]
    """Each with the number of its frame."""
    refusals: Sequence[Any]
    incarnation: int
    term: int
    durable_index: int


def decode_answer(raw: bytes, rows_of: Callable[[int], int | None]) -> Answer:
    """The answer in these bytes. `rows_of` says how many rows a frame has that is out; receipts of others may be left
    out.

    Raises DecodeError if no sidecar has made it: all that is not empty, as a greeting is, says which topic it is of."""
    if (usual := _usual_answer(raw)) is not None and usual.incarnation:
        return usual
    answer = wire.PublishStreamResponse.FromString(raw)
    if raw and not answer.incarnation:
        raise DecodeError("there is no incarnation in it")
    if not all(_is_plain(receipt, rows_of(receipt.frame)) for receipt in answer.receipts):
        answer = wire.PublishStreamResponse.FromString(_canonical(raw))
    out = [receipt for receipt in answer.receipts if rows_of(receipt.frame) is not None]
    receipts = [(receipt.frame, receipt_columns(receipt)) for receipt in out]
    return Answer(receipts, answer.refusals, answer.incarnation, answer.term, answer.durable_index)


def _usual_answer(raw: bytes) -> Answer | None:
    """The answer of fixed width, in a fraction of the time; None if it is another one."""
    end = len(raw) - wire.STATE.size
    if end < 0 or end % wire.ALL_NEW.size:
        return None
    a, incarnation, b, term, c, durable_index = wire.STATE.unpack_from(raw, end)
    if (a, b, c) != wire.STATE_TAGS:
        return None
    receipts = []
    for at in range(0, end, wire.ALL_NEW.size):
        a, b, c, frame, d, first_index, e, f, g, ledger_id, h, entry_id, i, j = wire.ALL_NEW.unpack_from(raw, at)
        if (a, b, c, d, e, f, g, h, i, j) != wire.ALL_NEW_TAGS:
            return None
        receipts.append((frame, ReceiptColumns.all_stored(first_index, MessageId(ledger_id, entry_id))))
    return Answer(receipts, (), incarnation, term, durable_index)


def _is_plain(receipt: Any, rows: int | None) -> bool:
    """Whether the columns, read as bytes, are all there; a legal but unusual encoding would hide some."""
    if rows is None:
        return True
    known, runs = len(receipt.known_rows) // 4, len(receipt.run_rows) // 4
    return (
        len(receipt.verdicts) in (0, rows)
        and len(receipt.known_indexes) == len(receipt.known_ledger_ids) == len(receipt.known_entry_ids) == 8 * known
        and len(receipt.known_batch_indexes) in (0, 4 * known)
        and len(receipt.run_ledger_ids) == len(receipt.run_entry_ids) == 8 * runs
        and len(receipt.run_batch_indexes) == 4 * runs
        and len(receipt.imported_rows) % 4 == 0
        and not len(UnknownFieldSet(receipt))
    )


def _canonical(raw: bytes) -> bytes:
    answer = publish_pb2.PublishStreamResponse.FromString(raw)
    answer.DiscardUnknownFields()
    return answer.SerializeToString()


def receipt_columns(receipt: Any) -> ReceiptColumns:
    """The columns of a receipt in the alias schema."""
    first = _NO_MESSAGE_ID
    if receipt.HasField("first_message_id"):
        first = MessageId.from_proto(receipt.first_message_id)
    if not (receipt.verdicts or receipt.known_rows or receipt.run_rows):
        return ReceiptColumns.all_stored(receipt.first_index, first, receipt.durable_at)
    return ReceiptColumns(
        np.frombuffer(receipt.verdicts, np.uint8),
        receipt.first_index,
        first,
        np.frombuffer(receipt.known_rows, "<u4"),
        np.frombuffer(receipt.known_indexes, "<i8"),
        np.frombuffer(receipt.known_ledger_ids, "<i8"),
        np.frombuffer(receipt.known_entry_ids, "<i8"),
        np.frombuffer(receipt.known_batch_indexes, "<i4"),
        np.frombuffer(receipt.run_rows, "<u4"),
        np.frombuffer(receipt.run_ledger_ids, "<i8"),
        np.frombuffer(receipt.run_entry_ids, "<i8"),
        np.frombuffer(receipt.run_batch_indexes, "<i4"),
        receipt.durable_at,
        np.frombuffer(receipt.imported_rows, "<u4"),
    )


def refusal_error(refusal: Any) -> SeqdedupeError:
    """The error that one of the answer's refusals stands for, with the numbers of a producer that caused it."""
    numbers: dict[str, str] = {}
    for producer in refusal.producers:
        numbers = {
            "epoch": str(producer.epoch),
            "current_epoch": str(producer.current_epoch),
            "sequence_id": str(producer.sequence_id),
            "previous_sequence_id": str(producer.previous_sequence_id),
            "pushed": str(producer.pushed),
            "persisted": str(producer.persisted),
        }
        if producer.HasField("expected_sequence_id"):
            numbers["expected_sequence_id"] = str(producer.expected_sequence_id)
    if refusal.owner_address:
        numbers[OWNER_ADDRESS] = refusal.owner_address
    return error_of_reason(refusal.reason, refusal.message, refusal.retry_delay_ms, numbers)
