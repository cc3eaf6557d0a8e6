"""A record of columns as JSON, the same bytes on every run and machine. docs/reference/cli.md lists the types."""

import base64
import json
import math
from collections.abc import Sequence
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from seqdedupe.limits import MAX_SEQUENCE_ID

_MOST_SHOWN = 40
_MICROSECOND = timedelta(microseconds=1)


class BadValueError(Exception):
    """The problem of a record, as text that follows its place: 'has the sequence ID …'."""


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
