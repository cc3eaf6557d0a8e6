"""What the keyed tag of every record costs: reading records back, and writing their headers."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from bench.figure import Arm, Figure, Ratio, over
from seqdedupe.batch import Int64s
from seqdedupe.format import headers, records
from seqdedupe.format.headers import NO_KEY, key_of
from seqdedupe.format.layout import COLUMNS_END, layout_columns
from seqdedupe.log.embedded.writer import GROUP_APPENDS
from tests.batches import batch

KEY = key_of(b"of the benchmark")
RECORDS = 16 * GROUP_APPENDS
PAYLOAD = bytes(100)
TRIES = 7

Rate = Callable[[], float]


def encoded(rows: int) -> tuple[bytes, int]:
    """A batch of one producer, and its column bytes."""
    made = batch([("producer-1", i) for i in range(rows)], payloads=[PAYLOAD] * rows).encode()
    places = records.new_table(1)[0]
    layout_columns(np.frombuffer(made, np.uint8), 0, len(made), places)
    return made, int(places[COLUMNS_END])


def header(body: bytes, rows: int, column_bytes: int, index: int, file_offset: int, key: Int64s) -> bytes:
    return headers.header(
        body,
        headers.BATCH_TAG,
        rows=rows,
        column_bytes=column_bytes,
        incarnation=1,
        file_offset=file_offset,
        base_index=index,
        publish_time_ms=1,
        synced_offset=0,
        ownership=7,
        key=key,
    )


def best(rate: Rate) -> Rate:
    """The best of several, of what is over in milliseconds."""
    return lambda: max(rate() for _ in range(TRIES))


def scans(rows: int, key: Int64s) -> Rate:
    """Records a second that recovery's scan reads and checks."""
    body, column_bytes = encoded(rows)
    parts, offset = [], 0
    for k in range(RECORDS):
        parts += [header(body, rows, column_bytes, k * rows, offset, KEY), body]
        offset += len(parts[-2]) + len(body)
    raw = np.frombuffer(b"".join(parts), np.uint8)
    table = records.new_table(RECORDS)

    def rate() -> float:
        began = time.perf_counter()
        why = records.scan(raw, 1, 0, 0, key, table, records.new_result())
        seconds = time.perf_counter() - began
        assert why == records.END
        return RECORDS / seconds

    return best(rate)


def writes(rows: int, key: Int64s) -> Rate:
    """Headers a second that the commit thread makes, a full group at a time."""
    body, column_bytes = encoded(rows)

    def rate() -> float:
        began = time.perf_counter()
        for first in range(0, RECORDS, GROUP_APPENDS):
            made = [header(body, rows, column_bytes, k, k, NO_KEY) for k in range(first, first + GROUP_APPENDS)]
            if len(key):
                headers.with_tags(made, key)
        return RECORDS / (time.perf_counter() - began)

    return best(rate)


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    arms: dict[str, Arm] = {}
    ratios = []
    for rows in (1, 100):
        for what, make in (("records read", scans), ("headers written", writes)):
            name = f"{what} a second, {rows} rows each"
            arms[f"{name}, tagged"] = make(rows, KEY)
            arms[f"{name}, without"] = make(rows, NO_KEY)
            ratios.append(Ratio(f"{name}: tagged ÷ without", over(f"{name}, tagged", f"{name}, without")))
    yield Figure(arms=arms, ratios=ratios, rounds=5)
