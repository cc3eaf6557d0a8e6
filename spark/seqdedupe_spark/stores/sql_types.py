"""Arrow's types and values, as databases behind SQLAlchemy have them."""

import datetime
from typing import Any

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.dialects import mysql
from sqlalchemy.types import TypeEngine

from seqdedupe.databases.tables import MARIADB, bytes_type, text_type
from seqdedupe_spark.stores.kinds import Kind, json_texts, kind_of

_UINT64_DIGITS = 20
_MICROSECONDS = 6


def declared(field: pa.Field) -> TypeEngine[Any]:
    """The type of a column that is made for the values of this one."""
    match kind_of(field):
        case Kind.BOOLEAN:
            return sa.Boolean()
        case Kind.INTEGER:
            return sa.Numeric(_UINT64_DIGITS, 0) if field.type == pa.uint64() else sa.BigInteger()
        case Kind.FLOAT:
            return sa.Double()
        case Kind.DECIMAL:
            return sa.Numeric(field.type.precision, field.type.scale)
        case Kind.BINARY:
            return bytes_type()
        case Kind.TIMESTAMP | Kind.LOCAL_TIMESTAMP as kind:
            exact = mysql.DATETIME(fsp=_MICROSECONDS)
            return sa.DateTime(timezone=kind is Kind.TIMESTAMP).with_variant(exact, *MARIADB)
        case Kind.DATE:
            return sa.Date()
        case _:
            return text_type()


def fits(field: pa.Field, there: TypeEngine[Any], is_mysql: bool) -> bool:
    """Whether a column of this type takes the values. A precision of its own rounds, as the database does."""
    try:
        python = there.python_type
    except NotImplementedError:
        return False
    match kind_of(field):
        case Kind.BOOLEAN:
            return python in (bool, int)
        case Kind.INTEGER:
            return python is int or (isinstance(there, sa.Numeric) and not isinstance(there, sa.Float))
        case Kind.FLOAT:
            wide = pa.types.is_float64(field.type)
            return isinstance(there, sa.Double) or (not wide and isinstance(there, sa.Float))
        case Kind.DECIMAL:
            # SQLAlchemy gives what MariaDB has in a DOUBLE as decimals, too.
            return isinstance(there, sa.Numeric) and not isinstance(there, sa.Float)
        case Kind.TEXT:
            return python is str
        case Kind.BINARY:
            return python is bytes
        case Kind.TIMESTAMP | Kind.LOCAL_TIMESTAMP as kind:
            return python is datetime.datetime and (
                is_mysql or getattr(there, "timezone", False) is (kind is Kind.TIMESTAMP)
            )
        case Kind.DATE:
            return python is datetime.date
        case Kind.JSON:
            return python is str or isinstance(there, sa.JSON)
    return True


def values(kind: Kind, array: pa.Array) -> list[object]:
    """The values for the driver. Raises one of `kinds.BAD_VALUES` for what Python, or JSON, does not have."""
    if kind is Kind.JSON:
        return list(json_texts(array))
    if kind is Kind.TIMESTAMP:
        # MariaDB's drivers leave the zone out, whichever it is.
        array = array.cast(pa.timestamp("us", "UTC"))
    elif kind is Kind.LOCAL_TIMESTAMP:
        array = array.cast(pa.timestamp("us"))
    return list(array.to_pylist())
