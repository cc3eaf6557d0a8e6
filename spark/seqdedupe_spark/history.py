"""A history in Parquet files: which columns it has, and what is said of one that cannot be."""

from collections.abc import Sequence

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import DataType, DecimalType, StructType

from seqdedupe.errors import SeqdedupeError, error

TOPIC_COLUMN = "__topic"
"""Where files have it, all rows have to say the same."""


def read_parquet(spark: SparkSession, paths: Sequence[str]) -> DataFrame:
    """Files, folders or globs. Raises INVALID_SOURCE if they are not there, or not Parquet."""
    try:
        return spark.read.parquet(*paths)
    except AnalysisException as e:
        raise error("INVALID_SOURCE", f"--parquet: {str(e).splitlines()[0]}") from e


def names(column: str) -> tuple[str, str]:
    """As the data source calls it, and without the leading `__`."""
    return column, column.removeprefix("__")


def column_of(schema: StructType, option: str, given: str | None, usual: str, what: str, *types: type[DataType]) -> str:
    """The column that was given, or is there by its usual name. Raises INVALID_SOURCE if it is not there, or of another
    type than these, which are `what`."""
    wanted = (given,) if given is not None else names(usual)
    there_are = [name for name in wanted if name in schema.names]
    if len(there_are) > 1:
        raise error("INVALID_SOURCE", f"{option}: the files have the columns {' and '.join(there_are)}: say which")
    name = there_are[0] if there_are else None
    if name is None:
        there = ", ".join(schema.names[:20])
        raise error("INVALID_SOURCE", f"{option}: the files have no column {' or '.join(wanted)}; they have {there}")
    kind = schema[name].dataType
    if not isinstance(kind, types) or (isinstance(kind, DecimalType) and kind.scale):
        raise error("INVALID_SOURCE", f"{option}: the column {name} is {kind.simpleString()}, it should be {what}")
    return name


def topic_column_of(schema: StructType) -> str | None:
    """That of the topics, if it is there."""
    return next((name for name in names(TOPIC_COLUMN) if name in schema.names), None)


def bad(column: str, what: str) -> SeqdedupeError:
    """The error of a column that holds this."""
    return error("INVALID_SOURCE", f"the column {column} holds {what}")


def quoted(name: str) -> str:
    """A column's name in an expression."""
    return "`" + name.replace("`", "``") + "`"
