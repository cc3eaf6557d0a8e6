"""The messages of PublishService as bytes: frames in, answers out."""

import struct
from typing import Any

import numpy as np

from broker_sidecar.rpc import parse
from seqdedupe import wire
from seqdedupe.errors import error
from seqdedupe.topic.answers import Receipt, Refusal
from seqdedupe.topic.publishing import Topic
from seqdedupe.v1 import publish_pb2

MAX_FRAMES = 256
"""In one message of a stream: they are admitted in one go, and others wait for their turn."""

MAX_FIELDS = 2 * MAX_FRAMES
"""In one message of a stream, the topic and fields of newer clients among them."""

# What a receipt has in the end that is given early.
_DURABLE_AT = struct.Struct("<Bq")

_NO_BATCH_INDEX = b"\xff" * 4

_NUMBER_BYTES = 9
"""`Frame.number` with its tag."""


def parse_publish(data: bytes) -> tuple[str, bytes]:
    """Topic and batch of a unary request. Raises MALFORMED_MESSAGE."""
    request = parse(wire.PublishRequest, data)
    if len(data) == _field_bytes(len(request.topic.encode())) + _field_bytes(len(request.batch)):
        return request.topic, request.batch
    # A batch in several pieces is legal, protobuf merges them, but the alias schema shows only the last one. So a
    # request that is not as long as its parts is read with the published schema.
    published = parse(publish_pb2.PublishRequest, data)
    return published.topic, published.batch.SerializeToString()


def parse_frames(data: bytes) -> tuple[str, list[tuple[int, bytes]]]:
    """Topic and frames (number, batch) of a message of the stream. Raises MALFORMED_MESSAGE, INVALID_REQUEST."""
    frames: list[tuple[int, bytes]] = []
    at = 0
    # What all but a stream's first message look like: frames, each its number and then its batch. Half the cost of
    # parsing one, and a large batch is copied once instead of twice.
    while len(frames) <= MAX_FRAMES and data[at : at + 1] == wire.FRAMES_TAG:
        frame_bytes, number_at = wire.read_varint(data, at + 1)
        batch_at = number_at + _NUMBER_BYTES
        batch_bytes, start = wire.read_varint(data, batch_at + 1)
        at = start + batch_bytes
        if batch_bytes < 0 or at > len(data) or at != number_at + frame_bytes:
            break
        if data[number_at : number_at + 1] != wire.NUMBER_TAG or data[batch_at : batch_at + 1] != wire.BATCH_TAG:
            break
        frames.append((int.from_bytes(data[number_at + 1 : batch_at], "little"), data[start:at]))
        if at == len(data) and len(frames) <= MAX_FRAMES:
            return "", frames
    _check_number_of_fields(data)
    request = parse(wire.PublishStreamRequest, data)
    size = _field_bytes(len(request.topic.encode()))
    for frame in request.frames:
        size += _field_bytes((frame.number and _NUMBER_BYTES) + _field_bytes(len(frame.batch)))
    if size != len(data):  # as in `parse_publish`
        request = parse(publish_pb2.PublishStreamRequest, data)
        return request.topic, [(frame.number, frame.batch.SerializeToString()) for frame in request.frames]
    return request.topic, [(frame.number, frame.batch) for frame in request.frames]


def takes_early_receipts(data: bytes) -> bool:
    """Whether the first message of the stream says so. Raises MALFORMED_MESSAGE."""
    _check_number_of_fields(data)
    return bool(parse(wire.PublishStreamRequest, data).early_receipts)


def _check_number_of_fields(data: bytes) -> None:
    """Raises INVALID_REQUEST if there are too many frames or fields to make objects of, MALFORMED_MESSAGE.

    16 MiB hold millions of empty frames; parsed, they are a gigabyte.
    """
    at = frames = 0
    for _ in range(MAX_FIELDS):
        if at >= len(data):
            return
        frames += data[at : at + 1] == wire.FRAMES_TAG
        if frames > MAX_FRAMES:
            raise error("INVALID_REQUEST", f"a message has more than {MAX_FRAMES} frames")
        at = wire.skip_field(data, at)
        if at < 0:
            raise error("MALFORMED_MESSAGE", "the request is not a PublishStreamRequest")
    if at < len(data):
        raise error("INVALID_REQUEST", f"a message has more than {MAX_FIELDS} fields")


def _field_bytes(size: int) -> int:
    """How long a field of so many bytes is encoded, with a tag of one byte."""
    return size and 1 + len(wire.varint(size)) + size


def encode_receipt(topic: Topic, receipt: Receipt) -> bytes:
    """An element of `PublishStreamResponse.receipts`, or `PublishResponse.receipt`: tag and length included."""
    if receipt.verdicts is None and len(receipt.runs) == 1 and (first := receipt.runs[0]).batch_index == -1:
        durable_at = _DURABLE_AT.pack(14 << 3 | 1, receipt.durable_at) if receipt.durable_at else b""
        receipts, size, frame, index, message_id, id_size, ledger, entry, place, none = wire.ALL_NEW_TAGS
        return wire.ALL_NEW.pack(
            receipts, size + len(durable_at),
            frame, receipt.frame,
            index, receipt.first_index,
            message_id, id_size,
            ledger, first.ledger_id, entry, first.entry_id, place, none,
        ) + durable_at  # fmt: skip
    return b"".join(wire.length_delimited(1, _receipt_message(topic, receipt).SerializeToString()))


def _receipt_message(topic: Topic, receipt: Receipt) -> Any:
    """The receipt as a message of the alias schema."""
    message = wire.Receipt(frame=receipt.frame, first_index=receipt.first_index, durable_at=receipt.durable_at)
    if receipt.verdicts is not None:
        message.verdicts = receipt.verdicts.tobytes()
    if receipt.runs:
        first = message.first_message_id
        _, first.ledger_id, first.entry_id, first.batch_index = receipt.runs[0]
    if len(receipt.runs) > 1:
        rows, ledger_ids, entry_ids, places = zip(*receipt.runs, strict=True)
        message.run_rows = np.array(rows, np.uint32).tobytes()
        message.run_ledger_ids = np.array(ledger_ids, np.int64).tobytes()
        message.run_entry_ids = np.array(entry_ids, np.int64).tobytes()
        message.run_batch_indexes = np.array(places, np.int32).tobytes()
    if len(receipt.imported_rows):
        message.imported_rows = receipt.imported_rows.astype(np.uint32).tobytes()
    if len(receipt.known_rows):
        ledgers, entries, batch_indexes = topic.log.known_message_ids(receipt.known_indexes)
        message.known_rows = receipt.known_rows.astype(np.uint32).tobytes()
        message.known_indexes = receipt.known_indexes.tobytes()
        message.known_ledger_ids = ledgers.tobytes()
        message.known_entry_ids = entries.tobytes()
        if (known_batch_indexes := batch_indexes.tobytes()) != _NO_BATCH_INDEX * len(batch_indexes):
            message.known_batch_indexes = known_batch_indexes
    return message


def encode_refusal(refusal: Refusal) -> bytes:
    """An element of `PublishStreamResponse.refusals`, tag and length included."""
    e = refusal.error
    message = publish_pb2.Refusal(
        frame=refusal.frame,
        reason=e.reason,
        message=e.message,
        retry_delay_ms=e.retry_delay_ms,
        owner_address=e.numbers.get("owner_address", ""),
        producers=[
            publish_pb2.ProducerRefusal(
                producer_name=p.name,
                epoch=p.epoch,
                current_epoch=p.current_epoch,
                sequence_id=p.sequence_id,
                previous_sequence_id=p.previous_sequence_id,
                pushed=p.pushed,
                persisted=p.persisted,
                expected_sequence_id=p.expected_sequence_id,
            )
            for p in refusal.producers
        ],
    )
    return b"".join(wire.length_delimited(2, message.SerializeToString()))
