"""Pages of rows in columns: the messages they become, NULLs among them. Costs: nothing."""

from collections.abc import Sequence

import numpy as np
import pytest

from seqdedupe.batch import Batch, single_producer
from seqdedupe.errors import error
from seqdedupe.limits import MAX_PAYLOAD_BYTES
from seqdedupe.services.outbox.store import MAX_REST_BYTES, RowPage, page_of

Row = tuple[int, bytes | None, bytes | None, bytes | None, bytes | None, bytes | None]

ROWS: list[Row] = [
    (5, b"a", b"order", b"7", b"Placed", b"one"),
    (6, b"b", None, None, b"Paid", None),
    (9, b"c", b"order", b"", None, b""),
    (10, b"d", b"bill", b"8", b"", b"four"),
]


def a_page(rows: Sequence[Row] = ROWS) -> RowPage:
    numbers, ids, kinds, keys, types, payloads = zip(*rows, strict=True)
    return page_of(numbers, ids, kinds, keys, types, payloads)


def batch_of(page: RowPage) -> Batch:
    batch = single_producer(b"p", 1, -1, page.sequence_ids, page.payloads)
    batch.keys = page.keys
    batch.property_offsets, batch.property_names, batch.property_values = page.properties()
    return batch


def check(page: RowPage, rows: Sequence[Row]) -> None:
    batch = batch_of(page)
    for place, (number, one, kind, key, type_, payload) in enumerate(rows):
        named = {"id": one, "aggregatetype": kind, "type": type_}
        assert batch.properties_of(place) == {
            name: value.decode() for name, value in named.items() if value is not None
        }
        assert (batch.sequence_ids[place], batch.keys[place], batch.payloads[place]) == (number, key, payload)
    assert page.ids() == [row[1] for row in rows]


@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [0], [1], [2, 3], [0, 3], [1, 2]])
def test_any_rows_of_a_page(rows: list[int]) -> None:
    check(a_page().take(np.array(rows, np.int64)), [ROWS[row] for row in rows])


@pytest.mark.parametrize("most_bytes", [1, 10, 20, 1000])
def test_a_page_is_cut_by_bytes(most_bytes: int) -> None:
    parts = list(a_page().cut(most_bytes))
    assert [number for part in parts for number in part.sequence_ids.tolist()] == [5, 6, 9, 10]
    assert (len(parts) == 1) is (most_bytes == 1000)
    first = 0
    for part in parts:
        check(part, ROWS[first : first + len(part)])
        first += len(part)


def test_pages_by_topics() -> None:
    def route(kind: str) -> str:
        return {"order": "orders", "bill": "bills"}[kind]

    there = [row for row in ROWS if row[2] is not None]
    found = a_page(there).by_topic(route, "")
    assert [(topic, page.sequence_ids.tolist()) for topic, page in found] == [("orders", [5, 9]), ("bills", [10])]
    assert [topic for topic, _ in a_page().by_topic(None, "one")] == ["one"]


def test_what_cannot_be_published() -> None:
    def route(kind: str) -> str:
        if kind == "bad":
            raise error("INVALID_TOPIC_NAME", "no topic")
        return kind

    rows: list[Row] = [
        (1, b"a", b"order", b"7", b"", bytes(MAX_PAYLOAD_BYTES + 1)),
        (2, b"b", b"order", bytes(MAX_REST_BYTES + 1), b"", b""),
        (3, b"c", b"order", b"7", b"\xff", b""),
        (4, b"d", b"bad", b"7", b"", b""),
        (5, None, b"order", b"7", b"", b""),
        (6, b"e", None, b"7", b"", b""),
        (7, b"f", b"order", b"7", b"", bytes(MAX_PAYLOAD_BYTES)),
        (8, b"", b"order", b"7", b"", b""),
        (9, b"g", b"", b"7", None, b""),
    ]
    found = a_page(rows).unpublishable(route)
    words = ["payload", "more than", "UTF-8", "no topic", "id is NULL", "aggregatetype is NULL", ""]
    words += ["id is empty", "aggregatetype is empty"]
    assert sorted(found) == [0, 1, 2, 3, 4, 5, 7, 8]
    assert all(words[row] in why for row, why in found.items())
    assert sorted(a_page(rows).unpublishable(None)) == [0, 1, 2, 4, 7]
