"""The stores that there are, for the suite that every store must pass."""

import datetime
import decimal
import json
import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import sqlalchemy
from deltalake import DeltaTable
from psycopg.rows import dict_row

from seqdedupe_spark.stores.contract import StoreFactory
from seqdedupe_spark.stores.delta import DeltaStore
from seqdedupe_spark.stores.general import GeneralStore
from seqdedupe_spark.stores.postgresql import PostgresStore
from seqdedupe_spark.stores.sql import SqliteStore
from tests.spark.stores.conformance import StoreHarness


class SqliteHarness(StoreHarness):
    def __init__(self, folder: Path) -> None:
        self.path = folder / "output.db"

    @property
    def factory(self) -> StoreFactory:
        return partial(SqliteStore, self.path)

    def rows(self) -> list[dict[str, Any]]:
        with closing(sqlite3.connect(self.path)) as connection:
            connection.row_factory = sqlite3.Row
            return [dict(row) for row in connection.execute(f'SELECT * FROM "{self.table}"')]

    def shown(self, field: pa.Field, value: Any) -> Any:
        if isinstance(value, datetime.datetime):
            unit = "milliseconds" if field.type.unit == "ms" else "microseconds"
            return value.isoformat(" ", unit).replace("+00:00", "Z")
        if isinstance(value, datetime.date | decimal.Decimal):
            return str(value)
        if isinstance(value, dict | list):
            return json.dumps(value, ensure_ascii=False)
        return value


class PostgresHarness(StoreHarness):
    types = (*StoreHarness.types, pa.uint64())

    def __init__(self, url: str) -> None:
        self.url = url

    @property
    def factory(self) -> StoreFactory:
        return partial(PostgresStore, self.url)

    def rows(self) -> list[dict[str, Any]]:
        with psycopg.connect(self.url, row_factory=dict_row) as connection:
            connection.execute("SET TIME ZONE 'UTC'")
            return connection.execute(f'SELECT * FROM "{self.table}"'.encode()).fetchall()


class DeltaHarness(StoreHarness):
    types = (*StoreHarness.types, pa.uint64())

    def __init__(self, folder: Path | str) -> None:
        self.uri = f"{folder}/{self.table}"

    @property
    def factory(self) -> StoreFactory:
        return partial(DeltaStore, self.uri)

    def rows(self) -> list[dict[str, Any]]:
        table = pa.table(DeltaTable(self.uri).to_pyarrow_table())
        found: list[dict[str, Any]] = table.to_pylist(maps_as_pydicts="strict")
        return found


class SqlHarness(StoreHarness):
    """A database behind SQLAlchemy, by its URL."""

    types = (*StoreHarness.types, pa.uint64())

    def __init__(self, url: str) -> None:
        self.url = url

    @property
    def factory(self) -> StoreFactory:
        return partial(GeneralStore, self.url)

    def rows(self) -> list[dict[str, Any]]:
        engine = sqlalchemy.create_engine(self.url, poolclass=sqlalchemy.NullPool)
        with engine.connect() as connection:
            found = connection.execute(sqlalchemy.select("*").select_from(sqlalchemy.table(self.table)))
            return [dict(row) for row in found.mappings()]

    def shown(self, field: pa.Field, value: Any) -> Any:
        if isinstance(value, dict | list):
            return json.dumps(value, ensure_ascii=False)
        return value


class MariaDBHarness(SqlHarness):
    # It has no infinity.
    types = tuple(kind for kind in SqlHarness.types if not pa.types.is_floating(kind))

    def shown(self, field: pa.Field, value: Any) -> Any:
        if isinstance(value, datetime.datetime):
            return value.replace(tzinfo=None)
        return super().shown(field, value)
