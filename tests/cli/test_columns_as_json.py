"""CSV records and rows of Parquet files as JSON objects: always the same bytes, and what cannot be one."""

import datetime as dt
import json
import os
import threading
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from seqdedupe.cli.record_source import RecordSource, SourceRecord
from seqdedupe.errors import SeqdedupeError
from seqdedupe.limits import MAX_PAYLOAD_BYTES
from tests.cli.conftest import Run

DAY = dt.date(2024, 2, 29)
MOMENT = dt.datetime(2024, 2, 29, 12, 30, 15, 5)

VALUES: list[tuple[Any, list[Any], str]] = [
    (pa.int64(), [-5], "-5"),
    (pa.uint64(), [2**64 - 1], "18446744073709551615"),
    (pa.bool_(), [True], "true"),
    (pa.null(), [None], "null"),
    (pa.int32(), [None], "null"),
    (pa.float64(), [0.1], "0.1"),
    (pa.float64(), [float("nan")], '"NaN"'),
    (pa.float64(), [float("-inf")], '"-Infinity"'),
    (pa.list_(pa.float64()), [[1.0, float("inf")]], '[1.0,"Infinity"]'),
    (pa.decimal128(10, 2), [Decimal("12.50")], '"12.50"'),
    (pa.decimal256(60, 3), [Decimal("-0.001")], '"-0.001"'),
    (pa.string(), ['é "\n\x00'], '"é \\"\\n\\u0000"'),
    (pa.binary(), [b"\xff\x00"], '"/wA="'),
    (pa.binary(2), [b"\xff\x00"], '"/wA="'),
    (pa.date32(), [DAY], '"2024-02-29"'),
    (pa.date64(), [DAY], '"2024-02-29"'),
    (pa.timestamp("us"), [MOMENT], '"2024-02-29T12:30:15.000005"'),
    (pa.timestamp("ms", tz="Europe/Berlin"), [0], '"1970-01-01T00:00:00.000Z"'),
    (pa.timestamp("ns"), [-1], '"1969-12-31T23:59:59.999999999"'),
    (pa.time32("ms"), [dt.time(1, 2, 3)], '"01:02:03.000"'),
    (pa.time64("ns"), [1], '"00:00:00.000000001"'),
    (pa.duration("us"), [7], "7"),
    (pa.dictionary(pa.int32(), pa.string()), ["a"], '"a"'),
    (pa.list_(pa.timestamp("us")), [[MOMENT, None]], '["2024-02-29T12:30:15.000005",null]'),
    (pa.list_(pa.date32(), 2), [[DAY, DAY]], '["2024-02-29","2024-02-29"]'),
    (pa.struct([("b", pa.date32()), ("a", pa.int8())]), [{"a": 1, "b": DAY}], '{"b":"2024-02-29","a":1}'),
    (pa.map_(pa.string(), pa.date32()), [[("k", DAY), ("j", None)]], '[["k","2024-02-29"],["j",null]]'),
]


def records(path: Path, **options: Any) -> list[SourceRecord]:
    with RecordSource(path, **options) as source:
        source.check()
        return list(source)


def refusal(path: Path, reason: str = "INVALID_SOURCE", **options: Any) -> str:
    with pytest.raises(SeqdedupeError) as caught:
        records(path, **options)
    assert caught.value.reason == reason
    return caught.value.message.removeprefix(f"{path}")


def write(path: Path, columns: dict[str, Any]) -> Path:
    parquet.write_table(pa.table(columns), path, row_group_size=700)
    return path


@pytest.mark.parametrize(("kind", "values", "text"), VALUES, ids=[str(kind) for kind, _, _ in VALUES])
def test_what_a_type_becomes(tmp_path: Path, kind: Any, values: list[Any], text: str) -> None:
    path = write(tmp_path / "a.parquet", {"x": pa.array(values, kind)})
    assert [record.payload.decode() for record in records(path)] == [f'{{"x":{text}}}']


def test_rows_have_numbers_ids_and_keys(tmp_path: Path) -> None:
    count = 2500
    ids = [2 * number for number in range(count)]
    path = write(tmp_path / "a.parquet", {"id": ids, "key": [None, *map(str, ids[1:])]})
    found = records(path, sequence_id_column="id", key_column="key")
    assert [(one.number, one.sequence_id, one.line) for one in found] == [(n, 2 * n, n + 1) for n in range(count)]
    assert [one.key for one in found] == [None, *(b"%d" % number for number in ids[1:])]
    assert json.loads(found[-1].payload) == {"id": ids[-1], "key": str(ids[-1])}
    assert [one.sequence_id for one in records(path)] == list(range(count))
    assert [one.key for one in records(path, key_column="id")][-1] == b"%d" % ids[-1]
    path.rename(tmp_path / "a")  # its first bytes tell what it is
    assert records(tmp_path / "a", sequence_id_column="id", key_column="key") == found


@pytest.mark.parametrize("value", [None, -1, 2**63])
def test_what_is_no_sequence_id(tmp_path: Path, value: int | None) -> None:
    path = write(tmp_path / "a.parquet", {"id": pa.array([5, value], pa.uint64() if value == 2**63 else pa.int64())})
    said = refusal(path, sequence_id_column="id")
    assert said.startswith(", row 2, has the sequence ID ")
    assert said.endswith("; nothing was sent")


def test_ids_that_do_not_rise_are_found_before_anything_is_sent(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"id": [5, 7, 7]})
    assert refusal(path, "NOT_ASCENDING", sequence_id_column="id").startswith(", row 3, has sequence ID 7 after 7")


@pytest.mark.parametrize(
    ("columns", "options", "what"),
    [
        ({"x": ["a"]}, {"key_column": "y"}, " has no column 'y'"),
        ({"x": ["a"]}, {"sequence_id_column": "x"}, ", row 1, has the sequence ID 'a' in 'x'"),
        ({"x": [1.5]}, {"key_column": "x"}, ", row 1, has the key 1.5 in 'x'"),
        ({"x": pa.array([0, 2**50], pa.timestamp("ms"))}, {}, ", row 2, has a date "),
    ],
)
def test_what_is_wrong_with_rows(tmp_path: Path, columns: dict[str, Any], options: dict[str, str], what: str) -> None:
    assert refusal(write(tmp_path / "a.parquet", columns), **options).startswith(what)


def test_text_that_is_not_utf_8_and_two_columns_of_one_name(tmp_path: Path) -> None:
    broken = pa.array([b"a", b"\xff"]).view(pa.string())
    said = refusal(write(tmp_path / "a.parquet", {"x": broken}))
    assert said.startswith(" has text after row 0 that is not UTF-8")
    parquet.write_table(pa.table([[1], [2]], names=["x", "x"]), tmp_path / "b.parquet")
    assert refusal(tmp_path / "b.parquet").startswith(" has the column 'x' more than once")


def test_a_row_that_is_too_large(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"x": ["a", "x" * MAX_PAYLOAD_BYTES]})
    assert refusal(path, "MESSAGE_TOO_LARGE").startswith(", row 2, is longer as JSON than a payload may be")


def test_a_file_that_is_cut_or_no_parquet(tmp_path: Path) -> None:
    whole = write(tmp_path / "a.parquet", {"x": list(range(10_000))}).read_bytes()
    for data in (whole[:-20], whole[: len(whole) // 2], b"PAR1", b"x" * 100):
        (tmp_path / "a.parquet").write_bytes(data)
        assert refusal(tmp_path / "a.parquet").startswith(" is no Parquet file, or is damaged: ")
    assert "--follow" not in refusal(tmp_path / "a.parquet")


def test_what_is_read_from_its_end_is_neither_followed_nor_piped(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"x": [1]})
    with pytest.raises(SeqdedupeError, match="is a Parquet file, and cannot be followed"):
        RecordSource(path, follow=True)
    os.mkfifo(tmp_path / "pipe")
    feeder = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(path.read_bytes(),))
    feeder.start()
    with pytest.raises(SeqdedupeError, match="in a pipe: it is read from its end"):
        RecordSource(tmp_path / "pipe")
    feeder.join()


def test_a_parquet_file_is_published_and_gone_on_with(run: Run, tmp_path: Path) -> None:
    publish = ("publish", "a.parquet", "--topic", "rows", "--producer", "p", "--sequence-id-column", "id")
    write(tmp_path / "a.parquet", {"id": [1, 3], "at": [MOMENT, MOMENT]})
    assert b"2 records read: 2 NotDup" in run(*publish).stdout
    write(tmp_path / "a.parquet", {"id": [1, 3, 4], "at": [MOMENT] * 3})
    assert b"3 records read, resumed after sequence ID 3: 1 NotDup" in run(*publish).stdout
    assert b"3 the same" in run(*publish, "--verify").stdout
    assert run("read", "rows").stdout.splitlines()[0] == b'{"id":1,"at":"2024-02-29T12:30:15.000005"}'
    write(tmp_path / "a.parquet", {"id": [1, 3, 4, 5], "at": [MOMENT, MOMENT + dt.timedelta(1), MOMENT, MOMENT]})
    assert b"[SOURCE_CHANGED]" in run(*publish, status=1).stderr
    by_id = ("publish", "a.parquet", "--topic", "by-id", "--deduplication-id-column", "id")
    run("topics", "create", "by-id", "--deduplication-mode", "deduplication-id")
    for not_dup, dup in ((4, 0), (0, 4)):
        assert f"{not_dup} NotDup, {dup} Dup".encode() in run(*by_id).stdout


# -- CSV.

CSV = '\ufeffid,"the name"\r\n1,"a ""b"",\r\nc"\r\n\r\n2,é\n'


def test_csv_records_are_objects_with_the_headers_names(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(CSV, newline="")
    found = records(tmp_path / "a.csv", as_json=True, sequence_id_column="id", key_column="the name")
    assert [one.payload.decode() for one in found] == [
        '{"id":"1","the name":"a \\"b\\",\\r\\nc"}',
        '{"id":"2","the name":"é"}',
    ]
    assert [(one.sequence_id, one.line) for one in found] == [(1, 2), (2, 5)]
    assert found[1].key == "é".encode()


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"a,b,a\n1,2,3\n", ", line 1, has the column 'a' more than once"),
        (b"a,b\n1,2\n1,2,3\n", ", line 3, has 3 fields, the header 2"),
        (b"a,b\n1\n", ", line 2, has 1 fields, the header 2"),
        (b"a,b\n1,2\n1,\xff\n", ", line 3, has text that is not UTF-8"),
    ],
)
def test_what_csv_makes_no_json(tmp_path: Path, data: bytes, what: str) -> None:
    (tmp_path / "a.csv").write_bytes(data)
    said = refusal(tmp_path / "a.csv", as_json=True)
    assert said.startswith(what)
    assert said.endswith("; nothing was sent") or "more than once" in what


@pytest.fixture
def csv_file(tmp_path: Path) -> Path:
    (tmp_path / "a.csv").write_text("id,name\n1,a\n2,b\n")
    return tmp_path / "a.csv"


def test_csv_is_published_as_json_and_lines_are_not(run: Run, csv_file: Path) -> None:
    publish = ("publish", "a.csv", "--topic", "objects", "--producer", "p", "--as", "json")
    run(*publish)
    assert run("read", "objects").stdout == b'{"id":"1","name":"a"}\n{"id":"2","name":"b"}\n'
    assert b": 0 NotDup" in run(*publish).stdout
    assert b"[SOURCE_CHANGED]" in run(*publish[:-2], status=1).stderr  # the same file, otherwise
    assert "has no columns to make JSON of" in refusal(csv_file, form="lines", as_json=True)
