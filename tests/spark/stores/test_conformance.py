"""The suite, on every store that there is."""

from pathlib import Path

import pytest

from tests.spark.stores.conformance import StoreConformance, StoreHarness
from tests.spark.stores.harnesses import DeltaHarness, MariaDBHarness, PostgresHarness, SqlHarness, SqliteHarness


class TestSqlite(StoreConformance):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> StoreHarness:
        return SqliteHarness(tmp_path)


class TestPostgres(StoreConformance):
    @pytest.fixture
    def harness(self, postgres_url: str) -> StoreHarness:
        return PostgresHarness(postgres_url)


class TestDelta(StoreConformance):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> StoreHarness:
        return DeltaHarness(tmp_path)


class TestDeltaOnS3(StoreConformance):
    @pytest.fixture
    def harness(self, lake: str) -> StoreHarness:
        return DeltaHarness(f"s3://{lake}")


class TestMariaDB(StoreConformance):
    @pytest.fixture
    def harness(self, mariadb_url: str) -> StoreHarness:
        return MariaDBHarness(mariadb_url)


class TestAnyDatabase(StoreConformance):
    """PostgreSQL as one of those that SQLAlchemy speaks."""

    @pytest.fixture
    def harness(self, postgres_url: str) -> StoreHarness:
        return SqlHarness(postgres_url.replace("postgresql://", "postgresql+psycopg://"))
