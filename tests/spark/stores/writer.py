"""A process that writes range after range, to be killed: `python -m tests.spark.stores.writer STORE PLACE`.

STORE is a URL, or `class@@URL` for one of the wrong stores. It prints the index that it has committed; at PLACE it
prints `paused` and waits for ever.
"""

import signal
import sys
from collections.abc import Iterator
from functools import partial
from importlib import import_module

import pyarrow as pa

from seqdedupe_spark.stores.contract import Advance, OutputStore, StoreFactory
from seqdedupe_spark.stores.sql import SqliteStore
from seqdedupe_spark.stores.urls import from_url
from tests.spark.stores.conformance import JOB, TOPIC, numbers, over

BATCHES = 4
ROWS = 50
"""In each batch."""


def main(place: str, store: OutputStore, table: str = "flights") -> None:
    def reach(reached: str) -> None:
        if reached == place:
            print("paused", flush=True)
            signal.pause()

    def rows(start: int) -> Iterator[pa.RecordBatch]:
        for batch in range(BATCHES):
            first = start + 1 + batch * ROWS
            yield numbers(*range(first, first + ROWS))
            reach("rows")

    def changed() -> dict[str, int]:
        reach("watermarks")
        return {"a": index + BATCHES * ROWS} if store.keeps_watermarks else {}

    if isinstance(store, SqliteStore):
        store._connection.set_trace_callback(lambda statement: reach(statement.split("(")[0].strip()))
    index = store.positions(JOB)[TOPIC].position.index
    while True:
        print(index, flush=True)
        advance = over(index, index + BATCHES * ROWS)
        store.write(JOB, table, rows(index), [Advance(advance.range, 0, changed)])
        index += BATCHES * ROWS
        reach("after")


def opened(name: str) -> OutputStore:
    wrong, _, url = name.rpartition("@@")
    right = from_url(url)
    assert isinstance(right, partial)
    factory: StoreFactory = right
    if wrong:
        factory = partial(getattr(import_module("tests.spark.stores.test_planted"), wrong), *right.args)
    return factory()


if __name__ == "__main__":
    main(sys.argv[2], opened(sys.argv[1]))
