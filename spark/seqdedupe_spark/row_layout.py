"""Converts Arrow rows to the columns of batches, by topic. It defines the meaning of the rows' columns, and the ID of
each row."""

import difflib
import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    BinaryType,
    ByteType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
    TimestampType,
)

from seqdedupe.batch import Binary, Int64s, PropertyColumns
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.figures import counted
from seqdedupe.limits import MAX_DEDUPLICATION_ID_BYTES, MAX_PAYLOAD_BYTES
from seqdedupe.names import topic_name
from seqdedupe_spark.message_columns import columns_of

# -- The identity of rows from a source: topic, incarnation, index, and ordinal among the rows of one message.
#
# If two rows had the same identity, the second row would count as a copy of the first, and be lost. `SeenIdentities`
# detects this.

INDEX_BITS = 43
MAX_INDEX = (1 << INDEX_BITS) - 1
MAX_ORDINAL = (1 << 63 - INDEX_BITS) - 1
"""An index and an ordinal make one number of 63 bits."""

MAX_TOPIC_BYTES = 200
"""The maximum length of a topic name in an ID. For a longer name, the ID contains the hash of the name, so that the ID
has at most 255 bytes."""

Source = tuple[str, int]
"""A topic and its incarnation."""

_NONE: Int64s = np.empty((0, 2), np.int64)


@lru_cache(1024)
def name_in_id(topic: str) -> str:
    """Return the text that stands for a topic in the IDs of rows that come from the topic."""
    if len(topic) <= MAX_TOPIC_BYTES:
        return topic
    return "sha256:" + hashlib.sha256(topic.encode()).hexdigest()


def ids_of(topics: pa.Array, incarnations: pa.Array, indexes: pa.Array, ordinals: pa.Array) -> pa.Array:
    """Return `topic/incarnation/index/ordinal` for each row, with decimal numbers. This format is documented, and must
    never change."""
    encoded = topics.dictionary_encode()
    names = pa.array([name_in_id(name) for name in encoded.dictionary.to_pylist()], pa.string())
    parts = (names.take(encoded.indices), *(one.cast(pa.string()) for one in (incarnations, indexes, ordinals)))
    return pc.binary_join_element_wise(*parts, "/").cast(pa.binary())


class SeenIdentities:
    """The identities that a task has seen from each source, stored as runs of numbers. Rows that arrive in order need
    almost no memory. Other rows need 16 bytes each."""

    def __init__(self) -> None:
        self._runs: dict[Source, Int64s] = {}
        self._new: dict[Source, list[Int64s]] = {}

    def __bool__(self) -> bool:
        """Return whether any row was identified by its source message."""
        return bool(self._runs or self._new)

    def add(self, topics: pa.Array, incarnations: Int64s, indexes: Int64s, ordinals: Int64s) -> None:
        """Add rows. Raises INVALID_REQUEST for numbers out of range. Raises AMBIGUOUS_IDENTITY for an identity that has
        occurred before. Some repeated identities are detected only by `merged`."""
        for what, column, most in ((("__index"), indexes, MAX_INDEX), ("__ordinal", ordinals, MAX_ORDINAL)):
            if len(bad := np.flatnonzero((column < 0) | (column > most))):
                raise error("INVALID_REQUEST", f"{what} is {column[bad[0]]}: it should be 0 to {most}")
        numbers = ordinals << INDEX_BITS | indexes
        encoded = topics.dictionary_encode()
        of_rows = encoded.indices.to_numpy()
        for place, topic in enumerate(encoded.dictionary.to_pylist()):
            of_topic = of_rows == place
            for incarnation in np.unique(incarnations[of_topic]).tolist():
                self._add((topic, incarnation), numbers[of_topic & (incarnations == incarnation)])

    def _add(self, source: Source, numbers: Int64s) -> None:
        new = self._new.setdefault(source, [])
        new.append(merged(source, [np.column_stack([numbers, numbers])]))
        # Merged when their number reaches the earlier number, so each run is merged only a few times.
        if sum(map(len, new)) >= len(self._runs.get(source, _NONE)):
            self._merge(source)

    def _merge(self, source: Source) -> None:
        self._runs[source] = merged(source, [self._runs.get(source, _NONE), *self._new.pop(source, [])])

    def packed(self) -> dict[Source, bytes]:
        """Return all identities as runs, for `check_apart`. Raises AMBIGUOUS_IDENTITY."""
        for source in list(self._new):
            self._merge(source)
        return {
            source: zlib.compress(np.diff(runs.ravel(), prepend=0).tobytes(), 1) for source, runs in self._runs.items()
        }


def check_apart(of_tasks: Iterable[dict[Source, bytes]]) -> None:
    """Raise AMBIGUOUS_IDENTITY if two tasks have seen the same identity."""
    packed: dict[Source, list[bytes]] = {}
    for one in of_tasks:
        for source, runs in one.items():
            packed.setdefault(source, []).append(runs)
    for source, several in packed.items():
        if len(several) > 1:
            merged(source, [np.frombuffer(zlib.decompress(one), np.int64).cumsum().reshape(-1, 2) for one in several])


def merged(source: Source, several: list[Int64s]) -> Int64s:
    """Join the runs, and return them in ascending order, each with its first and last number. Raises AMBIGUOUS_IDENTITY
    if two runs overlap."""
    runs = np.concatenate(several)
    if len(runs) < 2:
        return runs
    runs = runs[np.argsort(runs[:, 0], kind="stable")]
    firsts, lasts = runs[1:, 0], runs[:-1, 1]
    if len(twice := np.flatnonzero(firsts <= lasts)):
        raise _ambiguous(source, int(firsts[twice[0]]))
    ends = np.flatnonzero(firsts != lasts + 1)
    return np.column_stack([runs[np.append(0, ends + 1), 0], runs[np.append(ends, len(runs) - 1), 1]])


def _ambiguous(source: Source, number: int) -> SeqdedupeError:
    topic, _ = source
    index, ordinal = number & MAX_INDEX, number >> INDEX_BITS
    return error(
        "AMBIGUOUS_IDENTITY",
        f"several rows come from the message with index {index} of {topic}, and have the same ordinal {ordinal}",
        topic=topic,
        index=index,
    )


# -- The meaning of the columns of a sink's rows, checked before anything is written.

ID = "deduplicationId"
ORDINAL = "__ordinal"
SOURCE = ("__topic", "__incarnation", "__index")
"""The columns that identify the source message of a row: its topic, incarnation and index."""

_BYTES = (BinaryType, StringType)

_TYPES: dict[str, tuple[type[DataType], ...]] = {
    "value": _BYTES,
    "__key": _BYTES,
    "__eventTime": (TimestampType,),
    "__messageProperties": (MapType,),
    "__topic": (StringType,),
    ID: _BYTES,
    "__incarnation": (LongType,),
    "__index": (LongType,),
    ORDINAL: (ByteType, ShortType, IntegerType, LongType),
}
"""The columns that have a meaning, and their allowed types. Names with and without `__` are equivalent. All other
columns of the source are ignored."""

_MEANING = {alias: name for name in _TYPES for alias in (name, name.removeprefix("__"))} | {f"__{ID}": ID}

_OF_SOURCE = frozenset(name for plain in (False, True) for name in columns_of(True, plain).names)

_SEQUENCE = ("__producerName", "__sequenceId", "producerName", "sequenceId")


@dataclass(frozen=True)
class RowLayout:
    """The names of the columns that contain the parts of a message."""

    topic: str | None
    """The topic of all rows. None: the column `__topic` contains the topic."""
    columns: Mapping[str, str]
    """The names of the columns in the rows, by their meaning: the names of `_TYPES`."""
    other_id: str | None
    """`__deduplicationId`, if there are two columns of IDs. Either both columns contain the same IDs, or this column
    contains none."""

    @property
    def has_source(self) -> bool:
        """Whether a row without an ID is identified by its source message."""
        return self.topic is not None and self.columns.keys() >= set(SOURCE)


def layout_of(schema: StructType, topic: str | None) -> RowLayout:
    """Return the layout of rows with this schema, for a topic or for the topics in the rows.

    Raises ConfigurationError (INVALID_OPTION) that names a column that is missing, unknown or has a different type.
    """
    names = schema.fieldNames()
    columns: dict[str, str] = {}
    other_id = None
    for name in names:
        if names.count(name) > 1:
            raise _wrong(f"there are several columns {name}")
        if name not in _MEANING:
            if name not in _OF_SOURCE:
                near = difflib.get_close_matches(name, _TYPES, 1)
                advice = f"did you mean {near[0]}?" if near else f"the columns are {', '.join(_TYPES)}"
                raise _wrong(f"the sink has no column {name}: {advice}", hint="Select the columns to write.")
            continue
        meaning = _MEANING[name]
        _check_type(name, meaning, schema[name].dataType)
        if meaning == ID and meaning in columns:
            columns[meaning], other_id = ID, f"__{ID}"
        elif meaning in columns:
            raise _wrong(f"the columns {columns[meaning]} and {name} mean the same: drop one of them")
        else:
            columns[meaning] = name
    if "value" not in columns:
        raise _wrong("the rows have no column value")
    if topic is None and "__topic" not in columns:
        raise _wrong("no topic is named: give the option topic, or a column __topic")
    layout = RowLayout(topic, columns, other_id)
    _check_identity(layout, names)
    return layout


def _check_identity(layout: RowLayout, names: list[str]) -> None:
    columns = layout.columns
    if layout.has_source:
        return
    if ID in columns:
        if ORDINAL in columns:
            raise _wrong(f"{ORDINAL} is only for rows without {columns[ID]}, which identifies a row alone")
        return
    missing = [name for name in SOURCE if name not in columns]
    if missing and (found := next((name for name in _SEQUENCE if name in names), None)):
        raise _by_sequence(found)
    what = f"the rows have no identity: neither {ID}, nor " + ", ".join(SOURCE[:-1]) + f" and {SOURCE[-1]} of a source"
    if not missing:
        what = f"the rows have no {ID}: without the option topic, __topic is the target of the rows, not their source"
    raise _wrong(
        what,
        hint="A row needs an identity that stays the same when it is computed again. Otherwise it is written twice.",
    )


def _check_type(name: str, meaning: str, kind: DataType) -> None:
    wanted = _TYPES[meaning]
    fits = isinstance(kind, wanted)
    if isinstance(kind, MapType):
        fits = isinstance(kind.keyType, StringType) and isinstance(kind.valueType, StringType)
    if not fits:
        shown = "map<string,string>" if MapType in wanted else " or ".join(one.typeName() for one in wanted)
        shown = shown.replace("long", "bigint")
        raise _wrong(f"column {name} is {kind.simpleString()}, it should be {shown}")


def _by_sequence(name: str) -> SeqdedupeError:
    return _wrong(
        f"column {name}: the sink writes by deduplication ID",
        hint="A task that is tried again may get other rows, which breaks sequence IDs. Use "
        "seqdedupe_spark.publish.publish(df), which publishes the rows of each producer in one session.",
    )


def _wrong(what: str, hint: str = "docs/guides/spark-sink.md lists the columns and their types.") -> SeqdedupeError:
    return error("INVALID_OPTION", what, hint=hint)


FRAME_ROWS = 4096
FRAME_BYTES = 1024 * 1024
"""The largest size of a frame, unless it is a single row."""

_PARTS = ("value", "__key", "__eventTime", "__messageProperties")
_ID_COLUMN = "id"


class SinkFrame(NamedTuple):
    """The arguments of `Publisher.send_batch`."""

    payloads: Binary
    deduplication_ids: Binary
    keys: Binary | None
    event_times_ms: Int64s | None
    properties: PropertyColumns | None
    size_bytes: int

    def __len__(self) -> int:
        return len(self.payloads.offsets) - 1


def joined(batches: Iterable[pa.RecordBatch], is_idle: Callable[[], bool]) -> Iterator[pa.RecordBatch]:
    """Yield the same rows in batches of about the size of a frame. While other frames are in flight, batches are joined
    if they fit."""
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


def frames_of(batch: pa.RecordBatch, layout: RowLayout, seen: SeenIdentities) -> Iterator[tuple[str, SinkFrame]]:
    """Yield the rows in frames, each with its topic.

    Before the first frame, raises InvalidRequestError: INVALID_DEDUPLICATION_ID, INVALID_REQUEST for values that no
    message can have, INVALID_TOPIC_NAME, MESSAGE_TOO_LARGE, AMBIGUOUS_IDENTITY.
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


def _ids(batch: pa.RecordBatch, layout: RowLayout, seen: SeenIdentities) -> pa.Array:
    """Return the identity of each row: the row's own ID. For a source topic without IDs, the identity is the source
    message."""
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
            f"rows have both {layout.columns[ID]} and {layout.columns[ORDINAL]}: an ID identifies a row alone, so all "
            "but the first row of a message would be lost",
            hint=f"Drop {layout.columns[ID]}, so that the message and the ordinal identify the row. Or drop the "
            "ordinal, and include it in the ID.",
        )
    if not ids.null_count:
        return ids
    _check_whole_topics(batch.column(layout.columns[SOURCE[0]]), ids)
    derived = _source_ids(batch.filter(ids.is_null()), layout, seen)
    return pc.replace_with_mask(ids, ids.is_null(), derived)


def _own_ids(batch: pa.RecordBatch, layout: RowLayout) -> pa.Array:
    """Return the rows' own IDs; null if they have none."""
    name, other = layout.columns[ID], layout.other_id
    ids = batch.column(name).cast(pa.binary())
    if other is not None:
        others = batch.column(other).cast(pa.binary())
        differ = pc.sum(pc.and_(others.is_valid(), pc.fill_null(pc.not_equal(ids, others), True))).as_py()
        if differ:
            raise error(
                "INVALID_REQUEST",
                f"the columns {name} and {other} have different IDs in {differ:,} of {counted(len(ids), 'row')}",
                hint=f"Drop {other}, if {name} is the rows' identity.",
            )
    sizes = pc.fill_null(pc.binary_length(ids), 1).to_numpy()
    if len(bad := np.flatnonzero((sizes < 1) | (sizes > MAX_DEDUPLICATION_ID_BYTES))):
        where = f"{len(bad):,} of {counted(len(ids), 'row')}"
        what = f"{name} cannot be an ID in {where}, the first of which has {sizes[bad[0]]} bytes"
        raise error("INVALID_DEDUPLICATION_ID", f"{what}: it should have 1 to {MAX_DEDUPLICATION_ID_BYTES}")
    return ids


def _check_whole_topics(topics: pa.Array, ids: pa.Array) -> None:
    """Raise INVALID_DEDUPLICATION_ID if only some rows of a topic have IDs."""
    for topic in pc.unique(topics.filter(ids.is_valid())).to_pylist():
        missing = pc.sum(pc.and_(pc.fill_null(pc.equal(topics, topic), False), ids.is_null())).as_py()
        if missing:
            what = f"{ID} is null in {counted(missing, 'row')} of {topic}, and not in others of that topic"
            raise error("INVALID_DEDUPLICATION_ID", what)


def _source_ids(batch: pa.RecordBatch, layout: RowLayout, seen: SeenIdentities) -> pa.Array:
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
        where = f"{column.null_count:,} of {counted(len(column), 'row')}"
        what = f"{name} is null in {where}: without it a row has no identity"
        raise error(reason, what if name != "__topic" else f"{name} is null in {counted(column.null_count, 'row')}")


def _check_sizes(values: pa.Array, ids: pa.Array) -> None:
    sizes = pc.fill_null(pc.binary_length(values), 0).to_numpy()
    largest = int(sizes.argmax())
    if sizes[largest] > MAX_PAYLOAD_BYTES:
        what = f"the value of the row with the ID {ids[largest].as_py()!r} has {sizes[largest]} bytes"
        raise error("MESSAGE_TOO_LARGE", f"{what}: at most {MAX_PAYLOAD_BYTES} are accepted")


def pieces(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield the rows, cut so that each piece fits into a frame."""
    count = len(rows)
    if count > FRAME_ROWS:
        for first in range(0, count, FRAME_ROWS):
            yield from pieces(rows.slice(first, FRAME_ROWS))
    elif count > 1 and rows.nbytes > FRAME_BYTES:
        yield from pieces(rows.slice(0, count // 2))
        yield from pieces(rows.slice(count // 2))
    else:
        yield rows


def frame_of(rows: pa.RecordBatch) -> SinkFrame:
    """Return the frame of a piece. Its columns have the sink's names, with the IDs in `id` if there are any."""
    there = rows.schema.names
    return SinkFrame(
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
        # Null means none. Values in the place of a null must not be read.
        column = pa.array([one or [] for one in column.to_pylist()], column.type)
    offsets = column.offsets.to_numpy()
    first, end = int(offsets[0]), int(offsets[-1])
    if first == end:
        return None
    names, values = (child.slice(first, end - first) for child in (column.keys, column.items))
    if values.null_count:
        raise error("INVALID_REQUEST", "__messageProperties: a property is null, but it should be text")
    return PropertyColumns((offsets - first).astype(np.int32), _binary(names), _binary(values))
