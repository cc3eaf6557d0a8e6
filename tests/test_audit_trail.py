"""The chain of an audit trail: everything that is done to a line shows."""

import json
from pathlib import Path

import pytest

from seqdedupe.audit_trail import MAX_LINE_BYTES, NO_LINE, TrailLink, encode, last_link, verify
from seqdedupe.errors import DamagedError, InvalidRequestError

LINES = 5


def trail(count: int = LINES, after: TrailLink = NO_LINE) -> tuple[list[bytes], TrailLink]:
    lines = []
    for number in range(count):
        line, after = encode(
            after, f"2026-01-31T09:30:0{number}+00:00", "denied", {"subject": f"s{number}", "topic": "t"}
        )
        lines.append(line)
    return lines, after


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


def test_a_whole_trail(path: Path) -> None:
    lines, last = trail()
    path.write_bytes(b"".join(lines))
    found = verify([path])
    assert (found.lines, found.first_number, found.chains, found.last, found.torn_bytes) == (LINES, 1, 1, last, 0)
    with path.open("rb") as file:
        assert last_link(file) == (last, path.stat().st_size)


@pytest.mark.parametrize("at", range(LINES - 1))
def test_any_changed_byte_shows(path: Path, at: int) -> None:
    lines, _ = trail()
    for place in range(len(lines[at]) - 1):
        changed = bytearray(lines[at])
        changed[place] ^= 1
        path.write_bytes(b"".join([*lines[:at], bytes(changed), *lines[at + 1 :]]))
        with pytest.raises(DamagedError):
            verify([path])


def test_the_last_line_shows_by_what_was_kept_of_it(path: Path) -> None:
    lines, last = trail()
    path.write_bytes(b"".join(lines).replace(b"s4", b"s5"))
    assert verify([path]).last != last
    assert not verify([path], last).has_expected
    path.write_bytes(b"".join(lines[:-1]))
    assert not verify([path], last).has_expected
    path.write_bytes(b"".join(lines))
    assert verify([path], last).has_expected


@pytest.mark.parametrize("at", range(1, LINES - 1))
def test_a_line_that_is_missing_or_there_twice_shows(path: Path, at: int) -> None:
    lines, _ = trail()
    for left in (lines[:at] + lines[at + 1 :], lines[:at] + lines[at - 1 :], lines[:at] + lines[at:][::-1]):
        path.write_bytes(b"".join(left))
        with pytest.raises(DamagedError, match=f":{at + 1}: "):
            verify([path])


def test_a_chain_goes_on_over_files(tmp_path: Path) -> None:
    first, link = trail()
    second, last = trail(after=link)
    older, newer = tmp_path / "1", tmp_path / "2"
    older.write_bytes(b"".join(first))
    newer.write_bytes(b"".join(second))
    assert verify([older, newer]).last == last
    assert verify([newer]).first_number == LINES + 1
    with pytest.raises(DamagedError, match="does not follow"):
        verify([newer, newer])
    newer.write_bytes(b"".join(second[1:]))
    with pytest.raises(DamagedError, match="2:1: "):
        verify([older, newer])


def test_a_chain_that_begins_anew_is_told(tmp_path: Path) -> None:
    older, newer = tmp_path / "1", tmp_path / "2"
    older.write_bytes(b"".join(trail()[0]))
    newer.write_bytes(b"".join(trail()[0]))
    assert verify([older, newer]).chains == 2
    newer.write_bytes(b"".join([*trail()[0], *trail()[0]]))
    with pytest.raises(DamagedError, match="does not follow"):
        verify([older, newer])


def test_a_line_that_was_cut_off(path: Path) -> None:
    lines, last = trail()
    path.write_bytes(b"".join(lines) + lines[0][:-1])
    found = verify([path])
    assert (found.last, found.torn_bytes) == (last, len(lines[0]) - 1)
    with path.open("rb") as file:
        assert last_link(file) == (last, len(b"".join(lines)))
    with pytest.raises(DamagedError, match="another file follows"):
        verify([path, path])


def test_nothing(path: Path) -> None:
    path.touch()
    assert verify([path]).lines == 0
    with path.open("rb") as file:
        assert last_link(file) == (NO_LINE, 0)


@pytest.mark.parametrize(
    "line", [b"", b"{}", b"[]", b"1", b"null", b"x", b"\xff", b'{"version":1}', b'{"version":"1"}']
)
def test_what_is_no_line(path: Path, line: bytes) -> None:
    path.write_bytes(line + b"\n")
    with pytest.raises(DamagedError, match="AUDIT_DAMAGED"):
        verify([path])
    with path.open("rb") as file, pytest.raises(DamagedError, match="AUDIT_DAMAGED"):
        last_link(file)


def test_a_file_of_something_else(path: Path) -> None:
    path.write_bytes(bytes(10 * MAX_LINE_BYTES))
    with pytest.raises(DamagedError, match="AUDIT_DAMAGED"):
        verify([path])
    with path.open("rb") as file, pytest.raises(DamagedError, match="AUDIT_DAMAGED"):
        last_link(file)


def test_a_newer_version(path: Path) -> None:
    values = json.loads(trail(1)[0][0]) | {"version": 2}
    path.write_text(json.dumps(values) + "\n")
    with pytest.raises(DamagedError, match="NEWER_FORMAT"):
        verify([path])


def test_texts_are_cut_and_lines_stay_lines(path: Path) -> None:
    line, _ = encode(NO_LINE, "now", "denied", {f"f{k}": "\U0001f600" * 10_000 for k in range(8)})
    assert line.count(b"\n") == 1
    assert len(line) <= MAX_LINE_BYTES
    path.write_bytes(line)
    assert verify([path]).lines == 1


def test_links_are_read_as_they_are_printed() -> None:
    _, last = trail()
    assert TrailLink.parse(str(last)) == last
    for text in ("", ":", "1", "1:", "1:abc", "x:" + "0" * 64, "-1:" + "0" * 64, "²:" + "0" * 64):
        with pytest.raises(InvalidRequestError):
            TrailLink.parse(text)
