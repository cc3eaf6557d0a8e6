"""Rows of Arrow to the columns of a batch, topic by topic, in pieces that fit into a frame."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from seqdedupe.batch import Binary, Int64s, PropertyColumns
from seqdedupe.errors import error
from seqdedupe.limits import MAX_DEDUPLICATION_ID_BYTES, MAX_PAYLOAD_BYTES
from seqdedupe.names import topic_name
from seqdedupe_spark.sink.identity import Seen, ids_of
from seqdedupe_spark.sink.layout import ID, ORDINAL, SOURCE, Layout

FRAME_ROWS = 4096
FRAME_BYTES = 1024 * 1024
"""What a frame has at most, unless it is a single row."""

_PARTS = ("value", "__key", "__eventTime", "__messageProperties")
_ID_COLUMN = "id"


class Frame(NamedTuple):
    """What `Publisher.send_batch` takes."""

    payloads: Binary
    deduplication_ids: Binary
    keys: Binary | None
    event_times_ms: Int64s | None
    properties: PropertyColumns | None
    size_bytes: int

    def __len__(self) -> int:
        return len(self.payloads.offsets) - 1


def joined(batches: Iterable[pa.RecordBatch], is_idle: Callable[[], bool]) -> Iterator[pa.RecordBatch]:
    """The same rows in batches of about a frame: as many are joined as fit, unless nothing is under way."""
    held: list[pa.RecordBatch] = []
    rows = size_bytes = 0
    for batch in batches:
        if held and (rows + len(batch) > FRAME_ROWS or size_bytes + batch.nbytes > FRAME_BYTES):
            yield pa.concat_batches(held)
            held, rows, size_bytes = [], 0, 0
        held.append(batch)
        rows, size_bytes = rows + len(batch), size_bytes + batch.nbytes
        if is_idle():
            yield pa.concat_batches(held)
            held, rows, size_bytes = [], 0, 0
    if held:
        yield pa.concat_batches(held)


def frames_of(batch: pa.RecordBatch, layout: Layout, seen: Seen) -> Iterator[tuple[str, Frame]]:
    """The rows in frames, with the topic that each is for.

    Raises InvalidRequestError before the first one: INVALID_DEDUPLICATION_ID, INVALID_REQUEST for what no message can
    have, INVALID_TOPIC_NAME, MESSAGE_TOO_LARGE, AMBIGUOUS_IDENTITY.
    """
    if not len(batch):
        return
    ids = _ids(batch, layout, seen)
    columns = {meaning: batch.column(name) for meaning, name in layout.columns.items()}
    _check_sizes(columns["value"], ids)
    kept = [name for name in _PARTS if name in columns]
    rows = pa.RecordBatch.from_arrays([ids, *(columns[name] for name in kept)], [_ID_COLUMN, *kept])
    for topic, part in [(layout.topic, rows)] if layout.topic is not None else _by_topic(columns["__topic"], rows):
        for piece in pieces(part):
            yield topic, frame_of(piece)


def _by_topic(topics: pa.Array, rows: pa.RecordBatch) -> list[tuple[str, pa.RecordBatch]]:
    _check_there("__topic", topics)
    encoded = topics.dictionary_encode()
    names = [topic_name(name) for name in encoded.dictionary.to_pylist()]
    return [(name, rows.filter(pc.equal(encoded.indices, place))) for place, name in enumerate(names)]


def _ids(batch: pa.RecordBatch, layout: Layout, seen: Seen) -> pa.Array:
    """The identity of each row: its own ID, or of a source topic without IDs the message that it comes from."""
    if ID not in layout.columns:
        return _source_ids(batch, layout, seen)
    ids = _own_ids(batch, layout)
    if not layout.has_source:
        _check_there(layout.columns[ID], ids)
    if ids.null_count == len(ids):
        return _source_ids(batch, layout, seen)
    if ORDINAL in layout.columns:
        raise error(
            "INVALID_REQUEST",
            f"rows have both {layout.columns[ID]} and {layout.columns[ORDINAL]}: an ID names a row alone, so all but "
            "the first row of a message would be lost",
            hint=f"Drop {layout.columns[ID]}, so that the message and the ordinal name the row. Or drop the ordinal, "
            "and make the ID of both.",
        )
    if not ids.null_count:
        return ids
    _check_whole_topics(batch.column(layout.columns[SOURCE[0]]), ids)
    derived = _source_ids(batch.filter(ids.is_null()), layout, seen)
    return pc.replace_with_mask(ids, ids.is_null(), derived)


def _own_ids(batch: pa.RecordBatch, layout: Layout) -> pa.Array:
    """The rows' own IDs; null where they have none."""
    name, other = layout.columns[ID], layout.other_id
    ids = batch.column(name).cast(pa.binary())
    if other is not None:
        others = batch.column(other).cast(pa.binary())
        differ = pc.sum(pc.and_(others.is_valid(), pc.fill_null(pc.not_equal(ids, others), True))).as_py()
        if differ:
            raise error(
                "INVALID_REQUEST",
                f"the columns {name} and {other} say different IDs in {differ:,} of {len(ids):,} rows",
                hint=f"Drop {other}, if {name} is the rows' identity.",
            )
    sizes = pc.fill_null(pc.binary_length(ids), 1).to_numpy()
    if len(bad := np.flatnonzero((sizes < 1) | (sizes > MAX_DEDUPLICATION_ID_BYTES))):
        what = (
            f"{name} cannot be an ID in {len(bad):,} of {len(ids):,} rows, the first of which has {sizes[bad[0]]} bytes"
        )
        raise error("INVALID_DEDUPLICATION_ID", f"{what}: it should have 1 to {MAX_DEDUPLICATION_ID_BYTES}")
    return ids


def _check_whole_topics(topics: pa.Array, ids: pa.Array) -> None:
    """Raises INVALID_DEDUPLICATION_ID if only some rows of a topic have IDs."""
    for topic in pc.unique(topics.filter(ids.is_valid())).to_pylist():
        missing = pc.sum(pc.and_(pc.fill_null(pc.equal(topics, topic), False), ids.is_null())).as_py()
        if missing:
            what = f"{ID} is null in {missing:,} rows of {topic}, and not in others of that topic"
            raise error("INVALID_DEDUPLICATION_ID", what)


def _source_ids(batch: pa.RecordBatch, layout: Layout, seen: Seen) -> pa.Array:
    names = [layout.columns[name] for name in SOURCE]
    topics, incarnations, indexes = (batch.column(name) for name in names)
    ordinal = layout.columns.get(ORDINAL, ORDINAL)
    ordinals = batch.column(ordinal) if ORDINAL in layout.columns else pa.repeat(pa.scalar(0, pa.int64()), len(batch))
    for name, column in zip((*names, ordinal), (topics, incarnations, indexes, ordinals), strict=True):
        _check_there(name, column)
    ordinals = ordinals.cast(pa.int64())
    seen.add(topics, *(column.to_numpy() for column in (incarnations, indexes, ordinals)))
    return ids_of(topics, incarnations, indexes, ordinals)


def _check_there(name: str, column: pa.Array) -> None:
    if column.null_count:
        reason = "INVALID_DEDUPLICATION_ID" if name.endswith(ID) else "INVALID_REQUEST"
        what = f"{name} is null in {column.null_count:,} of {len(column):,} rows, which have no identity without it"
        raise error(reason, what if name != "__topic" else f"{name} is null in {column.null_count:,} rows")


def _check_sizes(values: pa.Array, ids: pa.Array) -> None:
    sizes = pc.fill_null(pc.binary_length(values), 0).to_numpy()
    largest = int(sizes.argmax())
    if sizes[largest] > MAX_PAYLOAD_BYTES:
        what = f"the value of the row with the ID {ids[largest].as_py()!r} has {sizes[largest]} bytes"
        raise error("MESSAGE_TOO_LARGE", f"{what}: at most {MAX_PAYLOAD_BYTES} are taken")


def pieces(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """The rows, cut so that each piece fits into a frame."""
    count = len(rows)
    if count > FRAME_ROWS:
        for first in range(0, count, FRAME_ROWS):
            yield from pieces(rows.slice(first, FRAME_ROWS))
    elif count > 1 and rows.nbytes > FRAME_BYTES:
        yield from pieces(rows.slice(0, count // 2))
        yield from pieces(rows.slice(count // 2))
    else:
        yield rows


def frame_of(rows: pa.RecordBatch) -> Frame:
    """Of a piece, whose columns are named as the sink takes them, with the IDs in `id` where there are any."""
    there = rows.schema.names
    return Frame(
        _binary(rows.column("value")),
        _binary(rows.column(_ID_COLUMN)) if _ID_COLUMN in there else Binary(),
        _binary(rows.column("__key")) if "__key" in there else None,
        _milliseconds(rows.column("__eventTime")) if "__eventTime" in there else None,
        _properties(rows.column("__messageProperties")) if "__messageProperties" in there else None,
        rows.nbytes,
    )


def _binary(column: pa.Array) -> Binary:
    column = column.cast(pa.binary())
    validity = b""
    if column.null_count:
        validity = np.packbits(column.is_valid().to_numpy(zero_copy_only=False), bitorder="little").tobytes()
        column = pc.fill_null(column, b"")
    _, offsets, data = column.buffers()
    bounds = np.frombuffer(offsets, np.int32, len(column) + 1, 4 * column.offset)
    first, end = int(bounds[0]), int(bounds[-1])
    return Binary(bounds - np.int32(first), bytes(memoryview(data)[first:end]) if data else b"", validity)


def _milliseconds(column: pa.Array) -> Int64s:
    times = pc.fill_null(column.cast(pa.timestamp("us", "UTC")).cast(pa.int64()), 0)
    return times.to_numpy() // np.int64(1000)  # type: ignore[no-any-return]


def _properties(column: pa.MapArray) -> PropertyColumns | None:
    if column.null_count:
        # Null is none, and what stands in the place of a null is not to be looked at.
        column = pa.array([one or [] for one in column.to_pylist()], column.type)
    offsets = column.offsets.to_numpy()
    first, end = int(offsets[0]), int(offsets[-1])
    if first == end:
        return None
    names, values = (child.slice(first, end - first) for child in (column.keys, column.items))
    if values.null_count:
        raise error("INVALID_REQUEST", "__messageProperties: a property is null, it should be text")
    return PropertyColumns((offsets - first).astype(np.int32), _binary(names), _binary(values))
