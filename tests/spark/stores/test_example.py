"""The example of a store passes the suite."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from examples.store.json_store import JsonStore
from seqdedupe_spark.stores.contract import StoreFactory
from tests.spark.stores.conformance import StoreConformance, StoreHarness


class JsonHarness(StoreHarness):
    refuses_values = False
    types = (pa.bool_(), pa.int8(), pa.int64(), pa.uint64(), pa.float64(), pa.string(), pa.list_(pa.int64()))

    def __init__(self, folder: Path) -> None:
        self.path = folder / "output.json"

    @property
    def factory(self) -> StoreFactory:
        return partial(JsonStore, self.path)

    def rows(self) -> list[dict[str, Any]]:
        table = json.loads(self.path.read_text())["tables"][self.table]
        return [dict.fromkeys(table["columns"]) | row for row in table["rows"]]


class TestJsonStore(StoreConformance):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> StoreHarness:
        return JsonHarness(tmp_path)
