"""Columns that partition a Delta table, and those that it gets later."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pytest
from deltalake import DeltaTable, Field

from seqdedupe.errors import ConfigurationError
from seqdedupe_spark.stores.contract import OutputStore, Stored
from seqdedupe_spark.stores.delta import DeltaStore
from seqdedupe_spark.stores.urls import from_url
from tests.spark.stores.conformance import JOB, SCHEMA, TOPIC, at, ns, numbers, over, refused, samples
from tests.spark.stores.harnesses import DeltaHarness

MORE = pa.schema([*SCHEMA, pa.field("more", pa.uint64()), pa.field("tags", pa.map_(pa.string(), pa.string()))])


@pytest.fixture
def harness(tmp_path: Path) -> DeltaHarness:
    return DeltaHarness(tmp_path)


def opened(harness: DeltaHarness, options: str) -> OutputStore:
    return from_url(f"delta://{harness.uri}?{options}")()


def begin(harness: DeltaHarness, store: OutputStore, schema: pa.Schema = SCHEMA) -> None:
    store.prepare(harness.table, schema)
    assert store.replace(JOB, TOPIC, None, Stored(at(-1), 0))


PARTITIONING = [
    pa.bool_(),
    pa.int16(),
    pa.int64(),
    pa.string(),
    pa.large_string(),
    pa.date32(),
    pa.timestamp("us", "UTC"),
    pa.timestamp("us"),
]


@pytest.mark.parametrize("kind", PARTITIONING, ids=str)
def test_a_table_is_partitioned_when_it_is_made(harness: DeltaHarness, kind: pa.DataType) -> None:
    schema = pa.schema({"n": pa.int64(), "p": kind})
    values = [value for value in samples(kind) if value != ""]
    if pa.types.is_string(kind):
        values += ["a/b=c", "%41", " ", ".", "..", "null"]
    with opened(harness, "partitionBy=p") as store:
        begin(harness, store, schema)
        rows = pa.record_batch([range(len(values)), pa.array(values, kind)], schema=schema)
        store.write(JOB, harness.table, iter([rows]), [over(-1, 5)])
        assert store.positions(JOB) == {TOPIC: Stored(at(5), 0)}
    found = sorted(harness.rows(), key=lambda row: row["n"])
    assert [row["p"] for row in found] == values
    assert DeltaTable(harness.uri).metadata().partition_columns == ["p"]
    # Another job may leave it out, or name the same.
    for options in ("", "partitionBy=p"):
        with opened(harness, options) as store:
            store.prepare(harness.table, schema)


@pytest.mark.parametrize("text", ["", "x" * 201, "é" * 40, "__HIVE_DEFAULT_PARTITION__"])
def test_a_text_that_cannot_name_a_folder_names_its_row(harness: DeltaHarness, text: str) -> None:
    with opened(harness, "partitionBy=text") as store:
        begin(harness, store)
        rows = [numbers(1), pa.record_batch({"n": [2, 3], "text": ["b", text]}, SCHEMA)]
        with pytest.raises(ConfigurationError, match="INVALID_OUTPUT") as caught:
            store.write(JOB, harness.table, iter(rows), [over(-1, 0)])
        assert "partitions the table" in str(caught.value)
        assert (caught.value.numbers["batch"], caught.value.numbers["row"]) == ("1", "1")
    assert ns(harness) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("partitionBy=m", ("partitioned by m", "no column")),
        ("partitionBy=n,n", ("twice",)),
        ("partitionBy=n,text", ("at least one column must not partition it",)),
    ],
)
def test_columns_that_cannot_partition(harness: DeltaHarness, options: str, said: tuple[str, ...]) -> None:
    with opened(harness, options) as store, refused("INVALID_OUTPUT", *said):
        store.prepare(harness.table, SCHEMA)
    assert not Path(harness.uri).exists()


def test_a_column_whose_name_leaves_no_room_for_its_texts(harness: DeltaHarness) -> None:
    """A folder's name has 255 bytes: the column's, a `=`, and up to 200 of the text."""
    for length, fits in ((55, False), (54, True)):
        name = "n" * length
        schema = pa.schema([("v", pa.int64()), (name, pa.string())])
        with opened(harness, f"partitionBy={name}") as store:
            if not fits:
                with refused("INVALID_OUTPUT", "more than 54 bytes"):
                    store.prepare(harness.table, schema)
                continue
            begin(harness, store, schema)
            rows = pa.record_batch([pa.array([1]), pa.array(["y" * 200])], schema=schema)
            assert store.write(JOB, harness.table, iter([rows]), [over(-1, 0)]) == 1


@pytest.mark.parametrize("character", [*map(chr, range(32)), "\x7f", "/"])
def test_a_column_whose_name_no_folder_can_have(harness: DeltaHarness, character: str) -> None:
    name = f"a{character}b"
    schema = pa.schema([("v", pa.int64()), (name, pa.string())])
    said = "NUL" if character == "\0" else "control characters or slashes"
    with opened(harness, f"partitionBy={quote(name)}") as store, refused("INVALID_OUTPUT", said):
        store.prepare(harness.table, schema)
    assert not Path(harness.uri).exists()


def test_any_other_character_names_a_folder(harness: DeltaHarness) -> None:
    """And everything that a column is called that does not partition, line feeds and slashes among it."""
    others = [chr(code) for code in range(32, 127) if chr(code) not in "/,"]
    names = [f"a{''.join(others[k : k + 20])}z" for k in range(0, len(others), 20)]
    for k, name in enumerate([*names, "..", "é\x85é", "="]):
        schema = pa.schema([("v\n/\t", pa.int64()), (name, pa.string())])
        one = DeltaHarness(f"{harness.uri}-{k}")
        with opened(one, f"partitionBy={quote(name)}") as store:
            begin(one, store, schema)
            store.write(JOB, one.table, iter([pa.record_batch([[1], ["x"]], schema=schema)]), [over(-1, 0)])
        assert one.rows() == [{"v\n/\t": 1, name: "x"}]


@pytest.mark.parametrize("options", ["", "partitionBy=text", "mergeSchema=true"])
def test_names_that_differ_by_case_alone(harness: DeltaHarness, options: str) -> None:
    schema = pa.schema([*SCHEMA, pa.field("Text", pa.string())])
    said = ("both", "text", "Text")
    with opened(harness, options) as store:
        with refused("INVALID_OUTPUT", *said):
            store.prepare(harness.table, schema)
        assert not Path(harness.uri).exists()
        store.prepare(harness.table, SCHEMA)
        with refused("INVALID_OUTPUT", *said):
            store.prepare(harness.table, pa.schema([schema.field("n"), schema.field("Text")]))
    assert DeltaTable(harness.uri).version() == 0


def test_a_partition_named_twice_by_another_case(harness: DeltaHarness) -> None:
    with opened(harness, "partitionBy=text,TEXT") as store, refused("INVALID_OUTPUT", "twice"):
        store.prepare(harness.table, SCHEMA)


@pytest.mark.parametrize(
    "kind",
    [
        pa.struct({"a": pa.int64(), "A": pa.int64()}),
        pa.list_(pa.struct({"é": pa.int64(), "É": pa.int64()})),
        pa.map_(pa.string(), pa.struct({"a\0b": pa.int64()})),
    ],
    ids=str,
)
def test_fields_of_a_struct_that_have_one_name(harness: DeltaHarness, kind: pa.DataType) -> None:
    with harness.factory() as store, refused("INVALID_OUTPUT", "cannot have"):
        store.prepare(harness.table, pa.schema({"n": pa.int64(), "s": kind}))
    assert not Path(harness.uri).exists()


@pytest.mark.parametrize(
    "kind", [pa.float64(), pa.binary(), pa.decimal128(9, 2), pa.uint64(), pa.list_(pa.int64())], ids=str
)
def test_types_that_do_not_come_back_from_the_name_of_a_folder(harness: DeltaHarness, kind: pa.DataType) -> None:
    schema = pa.schema({"n": pa.int64(), "p": kind})
    with opened(harness, "partitionBy=p") as store, refused("INVALID_OUTPUT", "partitioned by p"):
        store.prepare(harness.table, schema)
    assert not Path(harness.uri).exists()


def test_a_table_that_others_have_partitioned_so_is_refused(harness: DeltaHarness) -> None:
    DeltaTable.create(harness.uri, pa.schema({"n": pa.int64(), "p": pa.binary()}), partition_by=["p"])
    with harness.factory() as store, refused("INVALID_OUTPUT", "partitioned by p"):
        store.prepare(harness.table, pa.schema({"n": pa.int64()}))


def test_a_table_that_is_there_keeps_its_partitions(harness: DeltaHarness) -> None:
    with harness.factory() as store:
        store.prepare(harness.table, SCHEMA)
    with (
        opened(harness, "partitionBy=text") as store,
        refused("INVALID_OUTPUT", "partitionBy is text", "not partitioned"),
    ):
        store.prepare(harness.table, SCHEMA)


def test_new_columns_are_added(harness: DeltaHarness) -> None:
    with harness.factory() as store:
        begin(harness, store)
        store.write(JOB, harness.table, iter([numbers(0)]), [over(-1, 0)])
        with pytest.raises(ConfigurationError, match=r"more \(uint64\) is missing; tags .* is missing") as caught:
            store.prepare(harness.table, MORE)
        assert "mergeSchema=true" in caught.value.hint
        version = DeltaTable(harness.uri).version()
        with opened(harness, "mergeSchema=true") as merging:
            for _ in range(2):
                merging.prepare(harness.table, MORE)
            assert DeltaTable(harness.uri).version() == version + 1
            more: dict[str, Any] = {"n": 1, "text": "1", "more": 2**64 - 1, "tags": {"a": "b"}}
            merging.write(JOB, harness.table, iter([pa.RecordBatch.from_pylist([more], MORE)]), [over(0, 1)])
        # A job that does not have them goes on.
        store.write(JOB, harness.table, iter([numbers(2)]), [over(1, 2)])
        assert store.positions(JOB) == {TOPIC: Stored(at(2), 0)}
    found = sorted(harness.rows(), key=lambda row: row["n"])
    assert [(row["more"], row["tags"]) for row in found] == [(None, None), (2**64 - 1, {"a": "b"}), (None, None)]


def test_a_type_that_does_not_fit_adds_no_column(harness: DeltaHarness) -> None:
    with opened(harness, "mergeSchema=true") as store:
        begin(harness, store)
        with refused("INVALID_OUTPUT", "n is int64, which does not accept string"):
            store.prepare(harness.table, pa.schema({"n": pa.string(), "new": pa.int64()}))
    assert DeltaTable(harness.uri).schema().to_arrow().names == ["n", "text"]


def test_a_column_comes_in_the_middle_of_a_write(harness: DeltaHarness) -> None:
    with harness.factory() as store:
        begin(harness, store)

        def rows(before: bool) -> Iterator[pa.RecordBatch]:
            if before:
                with opened(harness, "mergeSchema=true") as merging:
                    merging.prepare(harness.table, MORE)
            yield numbers(0)

        with refused("OUTPUT_UNAVAILABLE", "the columns of the Delta table"):
            store.write(JOB, harness.table, rows(before=True), [over(-1, 0)])
        assert ns(harness) == []
        store.write(JOB, harness.table, rows(before=False), [over(-1, 0)])
    assert ns(harness) == [0]


def test_two_add_the_same_columns(harness: DeltaHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    with harness.factory() as store:
        begin(harness, store)
    add = DeltaStore._add_columns

    def second(self: DeltaStore, found: DeltaTable, missing: list[pa.Field]) -> None:
        self._found().alter.add_columns([Field.from_arrow(field) for field in missing])
        add(self, found, missing)

    monkeypatch.setattr(DeltaStore, "_add_columns", second)
    with opened(harness, "mergeSchema=true") as store:
        store.prepare(harness.table, MORE)
    assert DeltaTable(harness.uri).schema().to_arrow().names == MORE.names


AB = pa.struct({"a": pa.int64(), "b": pa.int64()})


@pytest.mark.parametrize("options", ["", "mergeSchema=true"])
@pytest.mark.parametrize(
    ("there", "given"),
    [
        (pa.struct({"a": pa.int64()}), AB),
        (pa.list_(pa.struct({"a": pa.int64()})), pa.list_(AB)),
        (pa.map_(pa.string(), pa.struct({"a": pa.int64()})), pa.map_(pa.string(), AB)),
        (pa.struct({"s": pa.struct({"a": pa.int64()})}), pa.struct({"s": AB})),
        (pa.struct({"a": pa.int64(), "b": pa.string()}), AB),
        (pa.struct({"a": pa.int64()}), pa.list_(pa.int64())),
        (pa.map_(pa.string(), pa.string()), AB),
        (pa.decimal128(10, 2), pa.int64()),
        (pa.decimal128(20, 2), pa.int64()),
        (pa.decimal128(4, 0), pa.int16()),
    ],
    ids=str,
)
def test_a_column_that_would_drop_something_is_refused(
    harness: DeltaHarness, there: pa.DataType, given: pa.DataType, options: str
) -> None:
    DeltaTable.create(harness.uri, pa.schema({"n": pa.int64(), "c": there}))
    with opened(harness, options) as store, refused("INVALID_OUTPUT", "does not accept"):
        store.prepare(harness.table, pa.schema({"n": pa.int64(), "c": given}))


@pytest.mark.parametrize(
    ("there", "given", "value", "found"),
    [
        (AB, pa.struct({"b": pa.int64(), "a": pa.int64()}), {"a": 1, "b": 2}, {"a": 1, "b": 2}),
        (AB, pa.struct({"b": pa.int32()}), {"b": 2}, {"a": None, "b": 2}),
        (pa.list_(AB), pa.large_list(pa.struct({"b": pa.int64()})), [{"b": 2}], [{"a": None, "b": 2}]),
        (pa.decimal128(21, 2), pa.int64(), 2**63 - 1, 2**63 - 1),
        (pa.decimal128(5, 0), pa.int16(), -(2**15), -(2**15)),
    ],
    ids=str,
)
def test_a_column_that_has_room_for_more(
    harness: DeltaHarness, there: pa.DataType, given: pa.DataType, value: Any, found: Any
) -> None:
    schema = pa.schema({"n": pa.int64(), "c": given})
    DeltaTable.create(harness.uri, pa.schema({"n": pa.int64(), "c": there}))
    with harness.factory() as store:
        begin(harness, store, schema)
        rows = pa.record_batch([[0], pa.array([value], given)], schema=schema)
        store.write(JOB, harness.table, iter([rows]), [over(-1, 0)])
    assert harness.rows() == [{"n": 0, "c": found}]
