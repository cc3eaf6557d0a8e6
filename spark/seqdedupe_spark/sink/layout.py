"""What the columns of the rows mean that a sink is given, checked before anything is written."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

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

from seqdedupe.errors import SeqdedupeError, error
from seqdedupe_spark.columns import columns_of

ID = "deduplicationId"
ORDINAL = "__ordinal"
SOURCE = ("__topic", "__incarnation", "__index")
"""The columns of the source that say which message of which topic a row comes from."""

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
"""The columns that mean something, and what they may be. With and without `__` they are the same. All others of the
source are passed over."""

_MEANING = {alias: name for name in _TYPES for alias in (name, name.removeprefix("__"))} | {f"__{ID}": ID}

_OF_SOURCE = frozenset(name for plain in (False, True) for name in columns_of(True, plain).names)

_SEQUENCE = ("__producerName", "__sequenceId", "producerName", "sequenceId")


@dataclass(frozen=True)
class Layout:
    """Where the parts of a message stand. What it does not say, the names of the columns do."""

    topic: str | None
    """That of all rows; None: the column `__topic` says it."""
    columns: Mapping[str, str]
    """What the columns are called in the rows, by what they mean: the names of `_TYPES`."""
    other_id: str | None
    """`__deduplicationId`, if there are two columns of IDs. Both may say the same, or this one nothing."""

    @property
    def has_source(self) -> bool:
        """Whether a row without an ID is known by the message it comes from."""
        return self.topic is not None and self.columns.keys() >= set(SOURCE)


def layout_of(schema: StructType, topic: str | None) -> Layout:
    """The layout of rows with this schema for a topic, or for those that they name.

    Raises ConfigurationError (INVALID_OPTION) that names the column that is missing, unknown or of another type.
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
                advice = f"did you mean {near[0]}?" if near else f"there are {', '.join(_TYPES)}"
                raise _wrong(
                    f"the sink has no column {name}: {advice}", hint="Select the columns that are to be written."
                )
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
        raise _wrong("which topic? Give the option topic, or the rows a column __topic")
    layout = Layout(topic, columns, other_id)
    _check_identity(layout, names)
    return layout


def _check_identity(layout: Layout, names: list[str]) -> None:
    columns = layout.columns
    if layout.has_source:
        return
    if ID in columns:
        if ORDINAL in columns:
            raise _wrong(f"{ORDINAL} tells rows of one message of a source apart: {columns[ID]} does that alone")
        return
    missing = [name for name in SOURCE if name not in columns]
    if missing and (found := next((name for name in _SEQUENCE if name in names), None)):
        raise _by_sequence(found)
    what = f"the rows have no identity: neither {ID}, nor " + ", ".join(SOURCE[:-1]) + f" and {SOURCE[-1]} of a source"
    if not missing:
        what = f"the rows have no {ID}: without the option topic, __topic is where they go, not where they come from"
    raise _wrong(what, hint="Only what names a row, whoever computes it again, keeps it from being written twice.")


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
        hint="Tasks deal rows out anew when they are tried again, which sequence IDs do not survive: "
        "seqdedupe_spark.publish.publish(df) sorts them by producer, and publishes each producer's in one session.",
    )


def _wrong(what: str, hint: str = "docs/spark-sink.md lists the columns and their types.") -> SeqdedupeError:
    return error("INVALID_OPTION", what, hint=hint)
