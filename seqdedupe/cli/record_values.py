"""Records of columns: the rows of a Parquet file, and the conversion of any row to JSON. The JSON has the same bytes in
every run and on every machine.

docs/reference/cli.md lists the types.
"""

import base64
import json
import math
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import IO, Any
from uuid import UUID

from seqdedupe.command import needing
from seqdedupe.limits import MAX_SEQUENCE_ID

_MOST_SHOWN = 40
_MICROSECOND = timedelta(microseconds=1)


class BadValueError(Exception):
    """The problem of a record. The text continues a sentence that begins with the record's place: 'has the sequence ID
    …'."""


def json_of(names: Sequence[str], values: Sequence[Any]) -> bytes:
    """Return the object with these members, in this order. Raises BadValueError."""
    members = dict(zip(names, values, strict=True))
    try:
        try:
            return _dump(members).encode()
        except ValueError as e:
            if isinstance(e, UnicodeEncodeError):
                raise
            return _dump(_without_special(members)).encode()  # NaN or an infinity is among them
    except UnicodeEncodeError as e:
        raise BadValueError("has text that is not UTF-8, and JSON has no other") from e
    except RecursionError as e:
        raise BadValueError("has a value that is nested too deep") from e


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=_text)


def _without_special(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_special(member) for name, member in value.items()}
    if isinstance(value, list | tuple):
        return [_without_special(element) for element in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _text(value: Any) -> str:
    """Return the text of a value for which JSON has no form."""
    match value:
        case Decimal():
            return format(value, "f")
        case bytes() | bytearray() | memoryview():
            return base64.b64encode(value).decode()
        case datetime(tzinfo=None):
            return value.isoformat(timespec="microseconds")
        case datetime():
            return value.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"
        case date():
            return value.isoformat()
        case time():
            return value.isoformat(timespec="microseconds")
        case timedelta():
            sign = "-" if value < timedelta() else ""
            seconds, microseconds = divmod(abs(value) // _MICROSECOND, 1_000_000)
            return f"{sign}{seconds}.{microseconds:06d}"
        case UUID():
            return str(value)
    raise BadValueError(f"has a value of the type {type(value).__name__}, which has no form in JSON here")


def sequence_id_of(value: Any, name: str) -> int:
    """Return the sequence ID. Raises BadValueError unless it is an integer, 0 to 2^63 - 1."""
    if type(value) is not int or not 0 <= value <= MAX_SEQUENCE_ID:
        raise BadValueError(
            f"has the sequence ID {shown(value)} in {name!r}: it should be a whole number from 0 to 2^63 - 1"
        )
    return value


def key_of(value: Any, name: str) -> bytes | None:
    """Return text in UTF-8, an integer's digits, or bytes. None means no key. Raises BadValueError."""
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, bool) or not isinstance(value, int | str | UUID):
        raise BadValueError(f"has the key {shown(value)} in {name!r}: it should be text, bytes or an integer")
    try:
        return str(value).encode()
    except UnicodeEncodeError as e:
        raise BadValueError(f"has a key in {name!r} that is not UTF-8") from e


def shown(value: Any) -> str:
    """Return the value as an error shows it."""
    return "NULL" if value is None else repr(value)[:_MOST_SHOWN]


# -- Parquet: rows as Python values. A value without an exact one, such as a time in nanoseconds, is text.

PARQUET = b"PAR1"
"""The first bytes of a file."""

_ROWS = 1000
"""The number of rows that are in memory as values at once."""

_DIGITS = {"s": 0, "ms": 3, "us": 6, "ns": 9}
_EPOCH = date(1970, 1, 1)
_DAY_SECONDS = 24 * 60 * 60

_AS_THEY_ARE = (
    "null", "boolean", "integer", "floating", "decimal", "string", "large_string", "binary", "large_binary",
    "fixed_size_binary",
)  # fmt: skip
"""The types whose values Python has."""

Convert = Callable[[Any], Any]


class BadParquetError(Exception):
    """The problem of the file. The text continues a sentence that begins with the file's name: 'is damaged: …', 'has
    the column …'."""


class ParquetRows:
    """The names of the columns, and the rows in the order of the file. `values` converts a row to Python values.

    Raises INVALID_CONFIGURATION if pyarrow is not installed; BadParquetError.
    """

    def __init__(self, file: IO[bytes]) -> None:
        with needing("a Parquet file needs", "parquet"):
            import pyarrow
            from pyarrow import parquet
        self._arrow = pyarrow
        try:
            self._file = parquet.ParquetFile(file, pre_buffer=False)
            fields = list(self._file.schema_arrow)
        except pyarrow.ArrowException as e:
            raise _damaged(e, 0) from e
        self.names = [field.name for field in fields]
        if not fields:
            raise BadParquetError("has no columns")
        if again := [name for name in self.names if self.names.count(name) > 1]:
            raise BadParquetError(f"has the column {again[0]!r} more than once")
        self._plans = [_plan(pyarrow, field.type, field.name) for field in fields]
        self._converts = any(convert for _, convert in self._plans)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        rows = 0
        try:
            for batch in self._file.iter_batches(batch_size=_ROWS):
                yield from zip(*map(_taken_out, batch.columns, self._plans), strict=True)
                rows += len(batch)
        except self._arrow.ArrowException as e:
            raise _damaged(e, rows) from e
        except UnicodeDecodeError as e:
            raise BadParquetError(f"has text after row {rows} that is not UTF-8, and JSON has no other") from e

    def values(self, row: tuple[Any, ...]) -> Sequence[Any]:
        """Return the values in the order of `names`."""
        if not self._converts:
            return row
        return [_converted(value, convert) for value, (_, convert) in zip(row, self._plans, strict=True)]


def _taken_out(column: Any, plan: tuple[Any, Convert | None]) -> list[Any]:
    kind, _ = plan
    values: list[Any] = (column if column.type == kind else column.cast(kind)).to_pylist()
    return values


def _damaged(e: Exception, rows: int) -> BadParquetError:
    after = f" after row {rows}" if rows else ""
    return BadParquetError(f"is no Parquet file, or is damaged{after}: {' '.join(str(e).split())}")


def _plan(arrow: Any, kind: Any, name: str) -> tuple[Any, Convert | None]:
    """Return the type to which a column is cast before its values are read, and a function that converts each value.
    Times are read as integers, because Python has no times with nanoseconds."""
    types = arrow.types
    if isinstance(kind, arrow.BaseExtensionType):
        return _plan(arrow, kind.storage_type, name)
    if types.is_dictionary(kind):
        return _plan(arrow, kind.value_type, name)
    if types.is_timestamp(kind):
        zone = "" if kind.tz is None else "Z"
        return arrow.int64(), _unless_null(lambda value: _timestamp(value, kind.unit, zone))
    if types.is_date32(kind):
        return arrow.int32(), _unless_null(_date)
    if types.is_date64(kind):
        return arrow.int64(), _unless_null(lambda value: _date(value // (_DAY_SECONDS * 1000)))
    if types.is_time(kind):
        return arrow.int32() if types.is_time32(kind) else arrow.int64(), _unless_null(
            lambda value: _time(value, kind.unit)
        )
    if types.is_duration(kind):
        return arrow.int64(), None
    if types.is_float16(kind):
        return arrow.float32(), None
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _list_plan(arrow, kind, name)
    if types.is_map(kind):
        key, convert_key = _plan(arrow, kind.key_type, name)
        item, convert_item = _plan(arrow, kind.item_type, name)
        return arrow.map_(key, item), _unless_null(
            lambda pairs: [[_converted(k, convert_key), _converted(v, convert_item)] for k, v in pairs]
        )
    if types.is_struct(kind):
        return _struct_plan(arrow, kind, name)
    if not any(getattr(types, f"is_{one}")(kind) for one in _AS_THEY_ARE):
        raise BadParquetError(f"has the column {name!r} of the type {kind}, which is not read")
    return kind, None


def _list_plan(arrow: Any, kind: Any, name: str) -> tuple[Any, Convert | None]:
    element, convert = _plan(arrow, kind.value_type, name)
    field = arrow.field(kind.value_field.name, element)
    if arrow.types.is_fixed_size_list(kind):
        plain = arrow.list_(field, kind.list_size)
    else:
        plain = arrow.large_list(field) if arrow.types.is_large_list(kind) else arrow.list_(field)
    return plain, convert and _unless_null(lambda values: [convert(value) for value in values])


def _struct_plan(arrow: Any, kind: Any, name: str) -> tuple[Any, Convert | None]:
    fields = [kind.field(place) for place in range(kind.num_fields)]
    if len({field.name for field in fields}) < len(fields):
        raise BadParquetError(f"has the column {name!r} with two members of one name")
    plans = {field.name: _plan(arrow, field.type, name) for field in fields}
    plain = arrow.struct([arrow.field(member, one) for member, (one, _) in plans.items()])
    if not any(convert for _, convert in plans.values()):
        return plain, None
    return plain, _unless_null(
        lambda members: {member: _converted(members[member], convert) for member, (_, convert) in plans.items()}
    )


def _unless_null(convert: Convert) -> Convert:
    return lambda value: None if value is None else convert(value)


def _converted(value: Any, convert: Convert | None) -> Any:
    return value if convert is None else convert(value)


def _timestamp(value: int, unit: str, zone: str) -> str:
    per_second = 10 ** _DIGITS[unit]
    days, rest = divmod(value, _DAY_SECONDS * per_second)
    return f"{_date(days)}T{_time(rest, unit)}{zone}"


def _date(days: int) -> str:
    try:
        return (_EPOCH + timedelta(days)).isoformat()
    except OverflowError as e:
        raise BadValueError(f"has a date {days:,} days from 1970, which is not in the years 1 to 9999") from e


def _time(value: int, unit: str) -> str:
    digits = _DIGITS[unit]
    seconds, fraction = divmod(value, 10**digits)
    text = f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
    return f"{text}.{fraction:0{digits}d}" if digits else text
