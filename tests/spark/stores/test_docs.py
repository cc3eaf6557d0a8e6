"""The store that the documentation shows passes the suite."""

import json
import re
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest

from seqdedupe_spark.stores.contract import StoreFactory
from tests.spark.stores.conformance import StoreConformance, StoreHarness

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "spark-stores.md"


class JsonHarness(StoreHarness):
    refuses_values = False
    types = (pa.bool_(), pa.int8(), pa.int64(), pa.uint64(), pa.float64(), pa.string(), pa.list_(pa.int64()))

    def __init__(self, store: Any, folder: Path) -> None:
        self.store = store
        self.path = folder / "output.json"

    @property
    def factory(self) -> StoreFactory:
        return partial(self.store, self.path)

    def rows(self) -> list[dict[str, Any]]:
        table = json.loads(self.path.read_text())["tables"][self.table]
        return [dict.fromkeys(table["columns"]) | row for row in table["rows"]]


class TestJsonStore(StoreConformance):
    @pytest.fixture
    def harness(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StoreHarness:
        found = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
        assert found
        module = ModuleType("json_store")
        monkeypatch.setitem(sys.modules, "json_store", module)
        exec(compile(found[1], str(PAGE), "exec"), module.__dict__)
        return JsonHarness(module.JsonStore, tmp_path)
