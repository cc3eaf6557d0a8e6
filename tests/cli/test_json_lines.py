"""JSON lines, good and bad, as a source and published by a process."""

import gzip
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from seqdedupe.cli.record_source import JsonPath, RecordSource, SourceRecord
from seqdedupe.errors import SeqdedupeError
from seqdedupe.limits import MAX_SEQUENCE_ID
from tests.cli.conftest import COMMAND, TIMEOUT_SECONDS, Run
from tests.processes import running

CHANGES = b"""{"after": {"id": 5}, "meta": {"keys": ["a"]}}

{"after": {"id":  7},\t"meta": {"keys": ["b", 1]}, "more": 1.0}\r
"""
PATHS = ("--sequence-id-path", "after.id", "--key-path", "meta.keys[0]")


def records(folder: Path, data: bytes, name: str = "a.jsonl", **options: Any) -> list[SourceRecord]:
    options = {key: JsonPath.parse(text) if key.endswith("path") else text for key, text in options.items()}
    (folder / name).write_bytes(data)
    with RecordSource(folder / name, final=True, **options) as source:
        return list(source)


def refusal(folder: Path, data: bytes, **options: str) -> str:
    with pytest.raises(SeqdedupeError) as caught:
        records(folder, data, **options)
    assert caught.value.reason == "INVALID_SOURCE"
    return caught.value.message.partition("a.jsonl, ")[2]


def test_paths_give_sequence_ids_and_keys_and_payloads_are_the_lines(tmp_path: Path) -> None:
    first, _, second, _ = CHANGES.split(b"\n")
    expected = [SourceRecord(0, 5, first, b"a", 1), SourceRecord(1, 7, second.rstrip(b"\r"), b"b", 3)]
    paths = {"sequence_id_path": "after.id", "key_path": "meta.keys[0]"}
    assert records(tmp_path, CHANGES, **paths) == expected
    assert records(tmp_path, CHANGES, name="a.NDJSON", **paths) == expected
    assert records(tmp_path, gzip.compress(CHANGES), name="a.jsonl.gz", **paths) == expected
    assert records(tmp_path, CHANGES, name="a", **paths) == expected
    by_number = records(tmp_path, CHANGES, name="a", form="jsonl")
    assert [(r.number, r.sequence_id, r.key) for r in by_number] == [(0, 0, None), (1, 1, None)]
    assert [r.payload for r in records(tmp_path, CHANGES, name="a")] == [first, b"", second.rstrip(b"\r")]


def test_a_byte_order_mark_is_no_part_of_the_first_record(tmp_path: Path) -> None:
    assert records(tmp_path, b"\xef\xbb\xbf[3]\n", sequence_id_path="[0]") == [SourceRecord(0, 3, b"[3]", None, 1)]


@pytest.mark.parametrize("number", [0, MAX_SEQUENCE_ID])
def test_the_lowest_and_the_highest_sequence_id(tmp_path: Path, number: int) -> None:
    assert records(tmp_path, b"[[%d]]" % number, sequence_id_path="[0][0]")[0].sequence_id == number


@pytest.mark.parametrize(
    "value",
    ["-1", "1.0", "1e3", '"1"', "true", "false", "null", "[]", "{}", '[{"a":1}]', str(MAX_SEQUENCE_ID + 1), "9" * 5000],
)
def test_what_is_no_sequence_id(tmp_path: Path, value: str) -> None:
    data = f'{{"id": 0}}\n{{"id": {value}}}\n'.encode()
    said = refusal(tmp_path, data, sequence_id_path="id")
    assert said.startswith("line 2, has the sequence ID ")
    assert said.endswith(" in 'id': it should be a whole number from 0 to 2^63 - 1")
    assert len(said) < 150


@pytest.mark.parametrize(
    ("value", "key"), [('""', b""), ('"\\u00e9"', "é".encode()), ("42", b"42"), ("9" * 30, b"9" * 30), ("null", None)]
)
def test_keys(tmp_path: Path, value: str, key: bytes | None) -> None:
    assert records(tmp_path, f"[{value}]".encode(), key_path="[0]")[0].key == key


@pytest.mark.parametrize("value", ["1.5", "true", "[]", "{}", '"\\ud800"', "9" * 5000])
def test_what_is_no_key(tmp_path: Path, value: str) -> None:
    assert refusal(tmp_path, f"[{value}]".encode(), key_path="[0]").startswith("line 1, has ")


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b"{", "is not JSON: expecting property name enclosed in double quotes (character 2)"),
        (b"x", "is not JSON: expecting value (character 1)"),
        (b"1 2", "is not JSON: extra data (character 3)"),
        (b"{'id': 1}", "is not JSON: "),
        (b'{"id": NaN}', "is not JSON: it has NaN, which JSON does not know"),
        (b'{"id": -Infinity}', "is not JSON: it has -Infinity"),
        (b'{"id": "\xff"}', "is not JSON: byte 9 is not UTF-8"),
        ('{"id": 1}'.encode("utf-16"), "is not JSON: "),
        (b"\x00", "is not JSON: "),
        (b"\x0c", "is not JSON: "),
        (b" \t", None),
        (b'"\x1b]0;t\x07"', "is not JSON: invalid control character at (character 2)"),
        (b"[" * 200_000, "is JSON that is nested too deep"),
        (b'{"a":' * 200_000, "is JSON that is nested too deep"),
    ],
)
def test_what_is_no_json(tmp_path: Path, line: bytes, what: str | None) -> None:
    data = b'{"id": 0}\n' + line + b"\n"
    if what is None:  # a line that is blank
        assert len(records(tmp_path, data)) == 1
    else:
        for options in ({}, {"sequence_id_path": "id"}):
            assert refusal(tmp_path, data, **options).startswith(f"line 2, {what}")


@pytest.mark.parametrize(
    ("line", "path", "what"),
    [
        ('{"before": {}, "op": 1}', "after.id", "has no 'after.id': it has before, op"),
        ('{"after": null}', "after.id", "has no 'after.id': 'after' is null"),
        ('{"after": {"ID": 1}}', "after.id", "has no 'after.id': 'after' has ID"),
        ('{"after": {}}', "after.id", "has no 'after.id': 'after' is an empty object"),
        ('{"after": "id"}', "after.id", "has no 'after.id': 'after' is \"id\""),
        ('{"a": [[7]]}', "a[0][1]", "has no 'a[0][1]': 'a[0]' has 1 element"),
        ('{"a": {"0": 7}}', "a[0]", "has no 'a[0]': 'a' has 0"),
        ("[1, 2]", "id", "has no 'id': it has 2 elements"),
        ("12", "id", "has no 'id': it is 12"),
        (json.dumps(dict.fromkeys("abcdefg")), "id", "has no 'id': it has a, b, c, d, e, …"),
        ('{"id": 1, "id": 2}', "id", "has 'id' more than once"),
        ('{"a": {"id": 1}, "a": {"id": 1}}', "a.id", "has 'a' more than once"),
    ],
)
def test_a_member_that_is_not_there(tmp_path: Path, line: str, path: str, what: str) -> None:
    for option in ("sequence_id_path", "key_path"):
        assert refusal(tmp_path, line.encode(), **{option: path}) == f"line 1, {what}"


def test_a_member_twice_that_nobody_asks_for_is_let_be(tmp_path: Path) -> None:
    assert records(tmp_path, b'{"id": 1, "x": 1, "x": 2}', sequence_id_path="id")[0].sequence_id == 1


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("id", ("id",)),
        ("after.id", ("after", "id")),
        ("meta.keys[0]", ("meta", "keys", 0)),
        ("[3].a[12][0].@b c-d", (3, "a", 12, 0, "@b c-d")),
    ],
)
def test_paths(text: str, steps: tuple[str | int, ...]) -> None:
    assert JsonPath.parse(text) == JsonPath(text, steps)


@pytest.mark.parametrize(
    "text", ["", ".", ".a", "a.", "a..b", "a[", "a[]", "a[x]", "a[-1]", "a[0]b", "a.[0]", "a]", "[٣]"]
)
def test_what_is_no_path(text: str) -> None:
    with pytest.raises(ValueError):
        JsonPath.parse(text)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"form": "csv", "key_path": "id"}, "has no paths: it is read as CSV"),
        ({"form": "lines", "sequence_id_path": "id"}, "has no paths: it is read as lines"),
        ({"form": "jsonl", "key_column": "id"}, "has no columns: it is read as JSON lines"),
        ({"name": "a.jsonl", "key_column": "id"}, "has no columns: it is read as JSON lines"),
        ({"name": "a.csv", "key_path": "id"}, "has no paths: it is read as CSV"),
    ],
)
def test_paths_need_json_and_columns_csv(tmp_path: Path, options: dict[str, str], what: str) -> None:
    with pytest.raises(SeqdedupeError, match=what):
        records(tmp_path, b"", **options)


def test_published_read_and_gone_on_with(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(CHANGES)
    publish = ("publish", "a.jsonl", "--topic", "changes", "--producer", "p", *PATHS)
    assert (
        run(*publish).stdout == b"2 records read: 2 NotDup, 0 Dup; made the topic persistent://public/default/changes\n"
    )
    messages = [json.loads(line) for line in run("read", "changes", "--json").stdout.splitlines()]
    assert [(m["sequence_id"], m["key"], m["properties"]["seqdedupe.record"]) for m in messages] == [
        (5, "a", "0"),
        (7, "b", "1"),
    ]
    # An unfinished last line waits, and what was inserted before the watermark is refused.
    more = b'{"after": {"id": 9}, "meta": {"keys": [null]}}'
    (tmp_path / "a.jsonl").write_bytes(CHANGES + more)
    done = subprocess.run(
        [COMMAND, *publish, "--address", _address(run)], cwd=tmp_path, capture_output=True, timeout=TIMEOUT_SECONDS
    )
    assert done.returncode == 1
    assert b"line 4, the last one, does not end with a newline; it was not published" in done.stderr
    (tmp_path / "a.jsonl").write_bytes(CHANGES + more + b"\n")
    assert b"resumed after sequence ID 7: 1 NotDup" in run(*publish).stdout
    (tmp_path / "a.jsonl").write_bytes(b'{"after": {"id": 1}, "meta": {"keys": [""]}}\n' + CHANGES + more + b"\n")
    error = run(*publish, status=1).stderr
    assert b"is number 3, and was number 2 when it was published: records were inserted" in error
    assert b"[SOURCE_CHANGED]" in error


def _address(run: Run) -> str:
    """For the sidecar that the command runs against."""
    return run("version").stdout.decode().partition("serving at ")[2].split(" ")[0]


def test_what_is_wrong_is_known_before_anything_is_sent(run: Run, tmp_path: Path) -> None:
    publish = ("publish", "a.jsonl", "--topic", "unsent", "--producer", "p", "--sequence-id-path", "id")
    for bad, reason in (
        (b'{"id": 4}', b"NOT_ASCENDING"),
        (b'{"id": 6.0}', b"INVALID_SOURCE"),
        (b"{", b"INVALID_SOURCE"),
    ):
        (tmp_path / "a.jsonl").write_bytes(b'{"id": 5}\n\n' + bad + b"\n")
        error = run(*publish, status=1).stderr
        assert b"a.jsonl, line 3, " in error
        assert b"[" + reason + b"]" in error
    assert b"default/unsent" not in run("topics", "--json").stdout


def test_a_growing_file_is_followed(run: Run, tmp_path: Path, environment: dict[str, str]) -> None:
    run("topics", "create", "grown")
    publish = [COMMAND, "publish", "a", "--topic", "grown", "--producer", "p", "--sequence-id-path", "id", "--follow"]
    with (tmp_path / "a").open("wb", buffering=0) as file:
        file.write(b'{"id": 1}\n{"i')
        with running(publish, cwd=tmp_path, env=environment, stderr=subprocess.PIPE) as process:
            assert process.stderr is not None
            assert run("read", "grown", "--follow", "--limit", "1").stdout == b'{"id": 1}\n'
            file.write(b'd": 3}\n')
            assert run("read", "grown", "--follow", "--limit", "2").stdout == b'{"id": 1}\n{"id": 3}\n'
            file.write(b'{"id": 2}\n')
            assert b"a, line 3, has sequence ID 2 after 3: they should rise; 2 of the 2" in process.stderr.read()
            assert process.wait(TIMEOUT_SECONDS) == 1
