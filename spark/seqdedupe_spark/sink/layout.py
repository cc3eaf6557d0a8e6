"""What the columns of the rows mean that a sink is given, checked before anything is written."""

import difflib
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
"""The columns that mean something, and what they may be. All others of the source are passed over."""

_OF_SOURCE = frozenset(columns_of(True, False).names)

_SEQUENCE = ("__producerName", "__sequenceId", "producerName", "sequenceId")


@dataclass(frozen=True)
class Layout:
    """Where the parts of a message stand. What it does not say, the names of the columns do."""

    topic: str | None
    """That of all rows; None: the column `__topic` says it."""
    by_source: bool
    """Whether a row is known by the message it comes from, else by its own ID."""
    columns: frozenset[str]


def layout_of(schema: StructType, topic: str | None) -> Layout:
    """The layout of rows with this schema for a topic, or for those that they name.

    Raises ConfigurationError (INVALID_OPTION) that names the column that is missing, unknown or of another type.
    """
    names = schema.fieldNames()
    for name in names:
        if names.count(name) > 1:
            raise _wrong(f"there are several columns {name}")
        if name in _SEQUENCE[2:]:
            raise _by_sequence(name)
        if name not in _TYPES and name not in _OF_SOURCE:
            near = difflib.get_close_matches(name, _TYPES, 1)
            advice = f"did you mean {near[0]}?" if near else f"there are {', '.join(_TYPES)}"
            raise _wrong(f"the sink has no column {name}: {advice}", hint="Select the columns that are to be written.")
        _check_type(name, schema[name].dataType)
    if "value" not in names:
        raise _wrong("the rows have no column value")
    if topic is None and "__topic" not in names:
        raise _wrong("which topic? Give the option topic, or the rows a column __topic")
    return Layout(topic, _is_by_source(names, topic), frozenset(names))


def _is_by_source(names: list[str], topic: str | None) -> bool:
    if ID in names:
        if ORDINAL in names:
            raise _wrong(f"{ORDINAL} tells rows of one message of a source apart: {ID} does that alone")
        return False
    missing = [name for name in SOURCE if name not in names]
    if not missing and topic is not None:
        return True
    if missing and (found := next((name for name in _SEQUENCE if name in names), None)):
        raise _by_sequence(found)
    what = f"the rows have no identity: neither {ID}, nor " + ", ".join(SOURCE[:-1]) + f" and {SOURCE[-1]} of a source"
    if not missing:
        what = f"the rows have no {ID}: without the option topic, __topic is where they go, not where they come from"
    hint = "Only what names a row, whoever computes it again, keeps it from being written twice."
    if "__deduplicationId" in names:
        hint = f"To let the source's deduplication IDs name the rows, rename __deduplicationId to {ID}."
    raise _wrong(what, hint=hint)


def _check_type(name: str, kind: DataType) -> None:
    wanted = _TYPES.get(name)
    if wanted is None:
        return
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
