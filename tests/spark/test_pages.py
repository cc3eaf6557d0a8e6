"""What the pages about Spark show is what happens."""

import os
import time
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from seqdedupe.testing import Sidecar
from tests.pages import Reader, runnable
from tests.spark.run_job import QUICK
from tests.test_pages import SPARK_PAGES


@pytest.mark.parametrize("page", SPARK_PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_the_page_is_true(page: Path, spark: SparkSession, tmp_path: Path) -> None:
    """`SparkSession.builder.getOrCreate()` of a page gives the session that all tests share."""
    with Sidecar(tmp_path / "sidecar") as sidecar:
        folder = tmp_path / "reader"
        folder.mkdir()
        reader = Reader(folder, os.environ | QUICK | {"SEQDEDUPE_ADDRESS": sidecar.address}, sidecar.address)
        try:
            reader.follow(page)
            started = sum(block.text.count(".writeStream") for block in runnable(page))
            queries = spark.streams.active
            while not all(query.recentProgress for query in queries if query.isActive):
                time.sleep(0.05)
            assert [query.exception() for query in queries] == [None] * started
        finally:
            for query in spark.streams.active:
                query.stop()
            reader.close()
