"""Files, good and bad."""

import bz2
import gzip
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from seqdedupe.cli.record_source import RecordSource, SourceRecord
from seqdedupe.errors import SeqdedupeError
from seqdedupe.limits import MAX_PAYLOAD_BYTES, MAX_SEQUENCE_ID
from seqdedupe.testing import LAST_RESORT_SECONDS

CSV = b'id,name,note\r\n1,a,"two\r\nlines, ""quoted"""\r\n\r\n3,b,x\n7,\xff\xfe,end'
CSV_PAYLOADS = [b'1,a,"two\r\nlines, ""quoted"""', b"3,b,x", b"7,\xff\xfe,end"]
CSV_LINES = [2, 5, 6]


def _records(path: Path, final: bool = True, **options: Any) -> list[SourceRecord]:
    with RecordSource(path, final=final, **options) as source:
        return list(source)


def _write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_lines_are_taken_byte_for_byte(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.txt", b"one\n\n \xff\x00\r\nlast\rone\r\nend")
    payloads = [b"one", b"", b" \xff\x00", b"last\rone", b"end"]
    assert _records(path) == [SourceRecord(i, i, payload, None, i + 1) for i, payload in enumerate(payloads)]


def test_csv_records_are_taken_byte_for_byte(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.csv", CSV)
    assert _records(path) == [
        SourceRecord(i, i, payload, None, line)
        for (i, payload), line in zip(enumerate(CSV_PAYLOADS), CSV_LINES, strict=True)
    ]


def test_columns_give_sequence_ids_and_keys(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.csv", CSV)
    keys = [b"a", b"b", b"\xff\xfe"]
    columns = zip(range(3), (1, 3, 7), CSV_PAYLOADS, keys, CSV_LINES, strict=True)
    expected = [SourceRecord(*fields) for fields in columns]
    assert _records(path, sequence_id_column="id", key_column="name") == expected


def test_a_byte_order_mark_is_not_part_of_the_first_name(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.csv", b"\xef\xbb\xbfid\n5\n")
    assert _records(path, sequence_id_column="id") == [SourceRecord(0, 5, b"5", None, 2)]


@pytest.mark.parametrize("name", ["a.csv.gz", "a.CSV", "a"])
def test_the_name_or_a_column_tells_csv(tmp_path: Path, name: str) -> None:
    path = _write(tmp_path / name, gzip.compress(CSV) if name.endswith(".gz") else CSV)
    as_csv = [record.payload for record in _records(path, key_column="name")]
    assert as_csv == CSV_PAYLOADS
    assert len(_records(path)) == (6 if name == "a" else 3)
    assert len(_records(path, form="lines")) == 6


def test_a_zip_of_one_file(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.mkdir("folder")
        archive.writestr("folder/a.csv", CSV)
    assert [record.payload for record in _records(path)] == CSV_PAYLOADS


def test_a_zip_in_a_pipe_is_refused_for_what_it_is(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a")
    feeder = threading.Thread(target=_write, args=(tmp_path / "a", b"PK\x03\x04 and so on"))
    feeder.start()
    with pytest.raises(SeqdedupeError, match="cannot be read from a pipe"):
        _records(tmp_path / "a")
    feeder.join()


def test_standard_input_that_does_not_block_is_read_to_its_end() -> None:
    program = """
import os, threading
from seqdedupe.cli.record_source import STANDARD_INPUT, RecordSource
read_end, write_end = os.pipe()
os.set_blocking(read_end, False)
os.dup2(read_end, 0)
os.write(write_end, b"one\\n")
def write_the_rest():
    os.write(write_end, b"two\\n")
    os.close(write_end)
for record in RecordSource(STANDARD_INPUT):
    print(record.payload.decode())
    if record.number == 0:
        threading.Timer(0.5, write_the_rest).start()
"""
    assert subprocess.check_output([sys.executable, "-c", program], timeout=LAST_RESORT_SECONDS) == b"one\ntwo\n"


def test_no_lines_are_no_records_and_a_header_alone_none_either(tmp_path: Path) -> None:
    assert _records(_write(tmp_path / "a", b"")) == []
    assert _records(_write(tmp_path / "a.csv", b"id\n")) == []


def test_the_longest_line_fits_and_one_byte_more_does_not(tmp_path: Path) -> None:
    longest = b"x" * MAX_PAYLOAD_BYTES
    assert _records(_write(tmp_path / "a", longest + b"\r\n" + longest)) == [
        SourceRecord(0, 0, longest, None, 1),
        SourceRecord(1, 1, longest, None, 2),
    ]
    with pytest.raises(SeqdedupeError) as caught:
        _records(_write(tmp_path / "b", b"short\nx" + longest + b"\n"))
    assert caught.value.reason == "MESSAGE_TOO_LARGE"
    assert "line 2" in caught.value.message


def test_the_highest_sequence_id_is_taken(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.csv", b"id\n%d\n" % MAX_SEQUENCE_ID)
    assert _records(path, sequence_id_column="id")[0].sequence_id == MAX_SEQUENCE_ID


@pytest.mark.parametrize(
    "text", ["x", "", "-1", "1.0", "1e3", " 1", str(MAX_SEQUENCE_ID + 1), "²", "٣", "1_0", "9" * 5000]
)
def test_what_is_no_sequence_id(tmp_path: Path, text: str) -> None:
    path = _write(tmp_path / "a.csv", f"id,n\n0,a\n{text},b\n".encode())
    with pytest.raises(SeqdedupeError, match=r"line 3, has the sequence ID") as caught:
        _records(path, sequence_id_column="id")
    assert caught.value.reason == "INVALID_SOURCE"


@pytest.mark.parametrize("second", [5, 4])
def test_ids_that_do_not_rise(tmp_path: Path, second: int) -> None:
    path = _write(tmp_path / "a.csv", b"id\n5\n%d\n" % second)
    with pytest.raises(SeqdedupeError, match=f"line 3, has sequence ID {second} after 5") as caught:
        _records(path, sequence_id_column="id")
    assert caught.value.reason == "NOT_ASCENDING"


@pytest.mark.parametrize(
    ("column", "guess"), [("nmae", "did you mean 'Name'"), ("name", "did you mean 'Name'"), ("zzz", "it has id, Name")]
)
def test_an_unknown_column_names_the_nearest(tmp_path: Path, column: str, guess: str) -> None:
    with pytest.raises(SeqdedupeError, match=guess):
        _records(_write(tmp_path / "a.csv", b"id,Name\n"), key_column=column)


def test_a_named_column_must_be_there_once(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.csv", b"id,n,id\n1,a,2\n")
    with pytest.raises(SeqdedupeError, match="has the column 'id' more than once") as caught:
        _records(path, sequence_id_column="id")
    assert caught.value.reason == "INVALID_SOURCE"
    assert len(_records(path, key_column="n")) == 1


@pytest.mark.parametrize(
    ("make", "hint"),
    [
        (lambda path: path, "Check the name and the folder"),
        (lambda path: _folder(path), "Give a file"),
        (lambda path: _cut_gzip(path), "This copy of the file is damaged"),
        (lambda path: _flipped_gzip(path), "This copy of the file is damaged"),
        (lambda path: _zip(path, "a", "b"), "Unpack the zip, and publish each file"),
        (lambda path: _encrypted_zip(path), "Unpack the file first"),
    ],
)
def test_the_hint_fits_what_is_wrong(tmp_path: Path, make: Callable[[Path], Path], hint: str) -> None:
    with pytest.raises(SeqdedupeError) as caught:
        _records(make(tmp_path / "a"))
    assert caught.value.hint.startswith(hint)


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


def _cut_gzip(path: Path) -> Path:
    return _write(path, gzip.compress(bytes(range(256)) * 10)[:-12])


def _flipped_gzip(path: Path) -> Path:
    data = bytearray(gzip.compress(CSV))
    data[-6] ^= 1
    return _write(path, bytes(data))


def _zip(path: Path, *names: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, CSV)
    return path


def _flipped_zip(path: Path) -> Path:
    data = _zip(path, "a").read_bytes()
    return _write(path, data.replace(b"quoted", b"Quoted"))


def _encrypted_zip(path: Path) -> Path:
    data = bytearray(_zip(path, "a").read_bytes())
    data[6] |= 1
    data[data.index(b"PK\x01\x02") + 8] |= 1
    return _write(path, bytes(data))


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda path: path, "No such file"),
        (_folder, "Is a directory"),
        (lambda path: _write(path, b""), "is empty"),
        (lambda path: _write(path, b"\n\n"), "is empty"),
        (lambda path: _write(path, b'id,n\n1,"a\n'), "line 2, is not CSV: its quotes are still open at the end"),
        (lambda path: _write(path, b'\n"id,n\n1,a\n'), "line 2, is not CSV: its quotes are still open at the end"),
        (lambda path: _write(path, b"\xfd7zXZ\x00\x00"), "is compressed with xz, which is not read: unpack it first"),
        (lambda path: _write(path, bz2.compress(CSV)), "is compressed with bz2"),
        (lambda path: _write(path, b"\x28\xb5\x2f\xfd"), "is compressed with zstd"),
        (lambda path: _write(path, b'id,n\n1,"a"b\n'), "is not CSV"),
        (lambda path: _write(path, b"id,n\n1\n"), "line 2, has 1 fields, the header 2"),
        (lambda path: _write(path, b"id,n\n1,2,3\n"), "line 2, has 3 fields, the header 2"),
        (_cut_gzip, "is damaged"),
        (_flipped_gzip, "cannot be read: CRC check failed|is damaged"),
        (lambda path: _write(path, _zip(path, "a").read_bytes()[:-30]), "is damaged"),
        (_flipped_zip, "is damaged: Bad CRC"),
        (_encrypted_zip, "cannot be unpacked"),
        (lambda path: _zip(path, "a", "b"), "a zip of 2 files, not of one: a, b"),
        (lambda path: _zip(path), "a zip of 0 files"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file(tmp_path: Path, make: Callable[[Path], Path], what: str) -> None:
    with pytest.raises(SeqdedupeError, match=what) as caught:
        _records(make(tmp_path / "a.csv"), form="csv")
    assert caught.value.reason == "INVALID_SOURCE"


@pytest.mark.parametrize("delimiter", [";", "\t", "|"])
def test_a_header_with_another_delimiter_is_told_from_one_without_the_column(tmp_path: Path, delimiter: str) -> None:
    with pytest.raises(SeqdedupeError, match="has no column 'id': its header has no comma, but") as caught:
        _records(_write(tmp_path / "a.csv", f"id{delimiter}x\n".encode()), key_column="id")
    assert "--format lines" in caught.value.hint
    with pytest.raises(SeqdedupeError, match="did you mean 'id'"):
        _records(_write(tmp_path / "a.csv", f"id,x{delimiter}\n".encode()), key_column="ID")


def test_columns_need_csv(tmp_path: Path) -> None:
    with pytest.raises(SeqdedupeError, match="has no columns"):
        _records(_write(tmp_path / "a.csv", CSV), form="lines", key_column="id")
