"""The records of a file (lines, CSV, JSON lines or Parquet), and the check that the file does not change during the
read."""

import csv
import difflib
import gzip
import io
import json
import os
import re
import stat
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, Self

from seqdedupe.cli.record_values import (
    PARQUET,
    BadParquetError,
    BadValueError,
    ParquetRows,
    json_of,
    key_of,
    sequence_id_of,
)
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.figures import counted
from seqdedupe.limits import MAX_PAYLOAD_BYTES, MAX_SEQUENCE_ID

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

# -- A file that notices when it becomes another one during the read.

_TAIL_BYTES = 4096
"""The number of last-read bytes that are checked again after each read."""


class ChangedError(Exception):
    """The file has changed since the read began. The text says how."""


class SteadyFile(io.FileIO):
    """The raw bytes of a file, or of standard input (None). The file may grow during the read. Any other change raises
    ChangedError.

    Each read of a regular file first checks that the bytes read before are still in the file, and then returns the next
    bytes. So if another process cuts and rewrites the file, the read does not continue in the middle of the new
    content. `check` compares the rest of the file. If the file also grew, a change before the last 4 KiB read is not
    detected.
    """

    def __init__(self, path: Path | None) -> None:
        super().__init__(0 if path is None else path, closefd=path is not None)
        self._path = path
        self._tail, self._tail_end = b"", 0
        status = os.fstat(self.fileno())
        self.is_regular = stat.S_ISREG(status.st_mode)
        self._size, self._modified_ns = status.st_size, status.st_mtime_ns

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        """Read as any raw file. Raises ChangedError."""
        start = self.tell() if self.is_regular else 0
        count = super().readinto(buffer) or 0
        if not self.is_regular:
            return count
        before = self._tail
        if os.pread(self.fileno(), len(before), self._tail_end - len(before)) != before:
            raise ChangedError("was cut or rewritten")
        if count:
            read = bytes(memoryview(buffer)[max(0, count - _TAIL_BYTES) : count])
            before = before if start == self._tail_end else b""
            self._tail, self._tail_end = (before + read)[-_TAIL_BYTES:], start + count
        return count

    def check(self, *, is_complete: bool) -> None:
        """Raise ChangedError in these cases: the name now belongs to another file, this file was cut, or a complete
        file was written to without growing. The name is not checked for a pipe that was read to its end."""
        own = os.fstat(self.fileno())
        if self._path is not None and (self.is_regular or not is_complete):
            named = None
            with suppress(FileNotFoundError):
                named = os.stat(self._path)
            if named is None or not os.path.samestat(own, named):
                raise ChangedError("was replaced, moved or removed")
        if not self.is_regular:
            return
        if own.st_size < self._size:
            raise ChangedError("was cut")
        if is_complete and own.st_size == self._size and own.st_mtime_ns != self._modified_ns:
            raise ChangedError("was rewritten")
        self._size, self._modified_ns = own.st_size, own.st_mtime_ns


# -- A line of JSON, and the value in it at a path: `after.id`, `meta.keys[0]`.

_STEP = re.compile(r"(?:^|(?!^)\.)([^.\[\]]+)|\[([0-9]{1,9})\]")
_MOST_SHOWN = 40
_MOST_DIGITS_OF_JSON = 640
"""The maximum number of digits of an integer, because Python may refuse to convert more digits. A longer number becomes
a float, which is neither a sequence ID nor a key."""

_REPEATED = object()
"""A placeholder for the value of a member that an object contains more than once. JSON does not define which of the
values is valid."""


class BadLineError(Exception):
    """The problem of a line. The text continues a sentence that begins with the line's place: 'is not JSON: …', 'has no
    member …'."""


def parse(line: bytes) -> Any:
    """Return the value of a line. Raises BadLineError."""
    try:
        return _DECODER.decode(line.decode())
    except UnicodeDecodeError as e:
        raise BadLineError(f"is not JSON: byte {e.start + 1} is not UTF-8") from e
    except json.JSONDecodeError as e:
        raise BadLineError(f"is not JSON: {e.msg[0].lower()}{e.msg[1:]} (character {e.pos + 1})") from e
    except RecursionError as e:
        raise BadLineError("is JSON that is nested too deep") from e


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        seen = set[str]()
        for name, _ in pairs:
            if name in seen:
                members[name] = _REPEATED
            seen.add(name)
    return members


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= _MOST_DIGITS_OF_JSON else float(digits)


def _refuse_constant(name: str) -> NoReturn:
    raise BadLineError(f"is not JSON: it has {name}, which JSON does not know")


_DECODER = json.JSONDecoder(object_pairs_hook=_members, parse_int=_integer, parse_constant=_refuse_constant)


@dataclass(frozen=True)
class JsonPath:
    """The place of a value: members of objects by name, elements of arrays by their index from 0."""

    text: str
    steps: tuple[str | int, ...]

    @staticmethod
    def parse(text: str) -> "JsonPath":
        """Return the path. Raises ValueError for text that is no path."""
        steps = list[str | int]()
        end = 0
        while step := _STEP.match(text, end):
            steps.append(step[1] if step[1] is not None else int(step[2]))
            end = step.end()
        if not steps or end < len(text):
            raise ValueError(text)
        return JsonPath(text, tuple(steps))

    def sequence_id(self, value: Any) -> int:
        """Return the sequence ID at this place. Raises BadLineError unless it is an integer of JSON, 0 to 2^63 - 1."""
        found = self._find(value)
        if type(found) is not int or not 0 <= found <= MAX_SEQUENCE_ID:
            raise BadLineError(
                f"has the sequence ID {_shown(found)} in {self.text!r}: it should be a whole number from 0 to 2^63 - 1"
            )
        return found

    def key(self, value: Any) -> bytes | None:
        """Return the key at this place: a string, or an integer's digits; null means none. Raises BadLineError."""
        found = self._find(value)
        if found is None:
            return None
        if type(found) is not int and not isinstance(found, str):
            raise BadLineError(f"has the key {_shown(found)} in {self.text!r}: it should be a string or an integer")
        try:
            return str(found).encode()
        except UnicodeEncodeError as e:
            raise BadLineError(f"has a key in {self.text!r} that is no text: half of a surrogate pair is in it") from e

    def _find(self, value: Any) -> Any:
        parent = "it"
        for place, step in enumerate(self.steps):
            if isinstance(step, str):
                is_there = isinstance(value, dict) and step in value
            else:
                is_there = isinstance(value, list) and step < len(value)
            if not is_there:
                raise BadLineError(f"has no {self.text!r}: {parent} {_content(value)}")
            value = value[step]
            parent = repr(_path_text(self.steps[: place + 1]))
            if value is _REPEATED:
                raise BadLineError(f"has {parent} more than once")
        return value


def _path_text(steps: tuple[str | int, ...]) -> str:
    return "".join(f".{step}" if isinstance(step, str) else f"[{step}]" for step in steps).removeprefix(".")


def _content(value: Any) -> str:
    """Return a description of the value's contents, or of the value itself."""
    if isinstance(value, dict) and value:
        names = [name[:_MOST_SHOWN] for name, _ in zip(value, range(_MOST_NAMES_SHOWN), strict=False)]
        return "has " + ", ".join(names) + (", …" if len(value) > len(names) else "")
    if isinstance(value, list):
        return f"has {counted(len(value), 'element')}"
    return f"is {_shown(value)}"


def _shown(value: Any) -> str:
    if isinstance(value, dict | list):
        return ("an" if value else "an empty") + (" object" if isinstance(value, dict) else " array")
    if isinstance(value, str):
        return json.dumps(value[:_MOST_SHOWN], ensure_ascii=False)
    return json.dumps(value)[:_MOST_SHOWN]


STANDARD_INPUT = Path("-")

Form = Literal["lines", "csv", "jsonl", "parquet"]

_FORMS_BY_SUFFIX: dict[str, Form] = {".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
_FORM_NAMES = {"lines": "lines", "csv": "CSV", "jsonl": "JSON lines", "parquet": "Parquet"}
_FORMS_WITH_COLUMNS = ("csv", "parquet")
_FORMS_WITH_PATHS = ("jsonl",)

_GZIP = b"\x1f\x8b"
_ZIP = (b"PK\x03\x04", b"PK\x05\x06")
_NOT_READ = {
    "xz": re.compile(rb"\xfd7zXZ\x00"),
    "bz2": re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"),
    "zstd": re.compile(rb"\x28\xb5\x2f\xfd"),
}
"""The first bytes of files with a compression that is not read."""

_MAGIC_BYTES = 10
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_MOST_NAMES_SHOWN = 5
_MOST_DIGITS = len(str(MAX_SEQUENCE_ID))
_WAIT_SECONDS = 0.2

_HINT_BEFORE = "Sort the file by its sequence IDs, or publish by record numbers."
_HINT_TOO_LATE = (
    "Under this producer name, a record cannot follow a record with a higher ID. Publish the late records, in "
    "order, under a different producer name."
)
_HINT_CHANGED_BEFORE = "Start the command again when the file no longer changes, or only grows."
_HINT_CHANGED = (
    "Start the command again with the unchanged file. If the file was moved, give its new name. The command "
    "continues after the last durable record. Publish the records that only the new file contains from a "
    "separate file, under a different producer name."
)
_HINTS_NO_PLACES = {
    "columns": (
        "For JSON lines give --sequence-id-path, --key-path and --deduplication-id-path. If the file is CSV "
        "with a different extension, give --format csv."
    ),
    "paths": (
        "For CSV and Parquet give --sequence-id-column, --key-column and --deduplication-id-column. If the "
        "file is JSON lines with a different extension, give --format jsonl."
    ),
}
_HINT_DELIMITER = "Only commas separate fields. Write the file with commas, or publish its lines (--format lines)."
_OTHER_DELIMITERS = re.compile("[;\t|]")
_HINT_ZIP = "Unpack the zip, and publish each file under a separate producer name."
_HINT_DAMAGED = "This copy of the file is damaged or incomplete. Get the file again."
_HINTS_UNREADABLE = {
    FileNotFoundError: "Check the name and the folder.",
    IsADirectoryError: "Give a file. Publish the files of a folder one by one, each under a separate producer name.",
    gzip.BadGzipFile: _HINT_DAMAGED,
}


class SourceRecord(NamedTuple):
    """A record. The payload is the record's text in the file, byte for byte, without the newline at the end."""

    number: int
    """The record's number from 0, after a CSV header."""
    sequence_id: int
    payload: bytes
    key: bytes | None
    line: int
    """The number of the line in which the record begins, counted from 1. In Parquet: the number of the row, counted
    from 1."""


class RecordSource:
    """The records of a file or of standard input (`-`), in the order of the file. Sequence IDs ascend.

    Every line is a record, also an empty line. Lines end with LF or CR LF. In a CSV file (recognized by the file's name
    or by `form`), the first record is the header, which is not counted. A quoted field may contain newlines, and empty
    lines are skipped. In JSON lines, each line is a value, and blank lines are skipped. The sequence ID is the record's
    number from 0, or a value in the record: of a column, or at a path. Bytes that are not UTF-8 stay unchanged, except
    in JSON. gzip files and zip files (with one file) are recognized by their first bytes.

    `as_json` converts each CSV record to a JSON object: the names come from the header, and all values are texts. A row
    of a Parquet file is always a JSON object. A Parquet file without its end is damaged.

    A last line without a newline may be incomplete, so the source returns this line only if the file is `final`. The
    same applies to a CSV record with an open quote at the end of the file. `unfinished_line` is then the number of the
    incomplete line. With `follow` the records do not end: the source calls `before_waiting` whenever it has to wait for
    more data.

    All problems of the file are INVALID_SOURCE, MESSAGE_TOO_LARGE, NOT_ASCENDING, SOURCE_INCOMPLETE for a header
    without its end, or SOURCE_CHANGED for a file that was cut, rewritten, replaced or removed during the read.
    """

    noun = "file"
    keeps_records = True
    """Whether published records stay in the source."""

    def __init__(
        self,
        path: Path,
        *,
        form: Form | None = None,
        sequence_id_column: str | None = None,
        key_column: str | None = None,
        sequence_id_path: JsonPath | None = None,
        key_path: JsonPath | None = None,
        as_json: bool = False,
        final: bool = False,
        follow: bool = False,
    ) -> None:
        self.unfinished_line: int | None = None
        self.before_waiting: Callable[[], None] = lambda: time.sleep(_WAIT_SECONDS)
        self._path = Path("standard input") if path == STANDARD_INPUT else path
        self._form = form
        self._columns = (sequence_id_column, key_column)
        self._paths = (sequence_id_path, key_path)
        self._as_json = as_json
        self._final = final
        self._follow = follow
        self._checking = False
        self._line = 0
        self._line_word = "line"
        with self._readable():
            self._steady = _standard_input() if path == STANDARD_INPUT else SteadyFile(path)
            self._raw = io.BufferedReader(self._steady)
            try:
                self._start = self._raw.tell() if self._steady.is_regular else 0
                self._begin()
            except BaseException:
                self._raw.close()
                raise

    def _begin(self) -> None:
        """Go to the first record."""
        self.unfinished_line = None
        self._quotes_are_open = False
        self._line = 0
        self._ended = False
        self._file, name = self._unpacked()
        if self._follow and self._file is not self._raw:
            raise self._bad("is compressed, and cannot be followed")
        form = self._form or _FORMS_BY_SUFFIX.get(Path(name.lower()).suffix) or self._told_form()
        for forms, places, what in (
            (_FORMS_WITH_COLUMNS, self._columns, "columns"),
            (_FORMS_WITH_PATHS, self._paths, "paths"),
        ):
            if places != (None, None) and form not in forms:
                raise self._bad(f"has no {what}: it is read as {_FORM_NAMES[form]}", hint=_HINTS_NO_PLACES[what])
        if self._as_json and form not in _FORMS_WITH_COLUMNS:
            what = f"has no columns to make JSON of: it is read as {_FORM_NAMES[form]}"
            raise self._bad(what, hint="--as json is only for CSV. If the file is CSV, give --format csv.")
        records = {
            "lines": self._line_records,
            "csv": self._csv_records,
            "jsonl": self._json_records,
            "parquet": self._parquet_records,
        }
        self._line_word = "row" if form == "parquet" else "line"
        self._records = records[form]()

    def _told_form(self) -> Form:
        """Return the form of a file whose name does not show it."""
        if self._file is self._raw and self._raw.peek(len(PARQUET))[: len(PARQUET)] == PARQUET:
            return "parquet"
        if self._columns != (None, None):
            return "csv"
        return "jsonl" if self._paths != (None, None) else "lines"

    @property
    def numbers_are_ids(self) -> bool:
        """Whether a record's sequence ID is its number."""
        return self._columns[0] is None and self._paths[0] is None

    def check(self) -> None:
        """Read the whole file once, and return to its beginning. So problems of the file are raised before any message
        is sent, and the error states that nothing was sent.

        A source that can be read only once (a pipe), or that grows, is not checked.
        """
        if self._steady.is_regular and not self._follow:
            self._checking = True
            for _ in self:
                pass
            self._checking = False
            with self._readable():
                self._raw.seek(self._start)
                self._begin()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._raw.close()

    @property
    def size_bytes(self) -> int:
        """The size of the file on disk; 0 if the file is not a regular file."""
        return os.fstat(self._raw.fileno()).st_size if self._steady.is_regular and not self._follow else 0

    @property
    def read_bytes(self) -> int:
        """The approximate number of bytes read of `size_bytes`."""
        return self._raw.tell() if self.size_bytes else 0

    def __iter__(self) -> Iterator[SourceRecord]:
        last = -1
        with self._readable():
            for record in self._records:
                if record.sequence_id <= last:
                    raise self._bad(
                        f"has sequence ID {record.sequence_id} after {last}: they should rise",
                        reason="NOT_ASCENDING",
                        hint=_HINT_BEFORE if self._checking else _HINT_TOO_LATE,
                    )
                last = record.sequence_id
                yield record
            self._steady.check(is_complete=True)

    def _unpacked(self) -> tuple[IO[bytes], str]:
        """Return the file within, and its name."""
        start = self._raw.peek(_MAGIC_BYTES)[:_MAGIC_BYTES]
        for form, magic in _NOT_READ.items():
            if magic.match(start):
                raise self._bad(
                    f"is compressed with {form}, which is not read: unpack it first", hint="Only gzip and zip are read."
                )
        if start.startswith(_GZIP):
            return io.BufferedReader(gzip.GzipFile(fileobj=self._raw)), self._path.name.removesuffix(".gz")
        if start.startswith(_ZIP):
            if not self._raw.seekable():
                what = "is a zip, whose list of files is at its end: it cannot be read from a pipe"
                raise self._bad(what, hint="Name the zip itself, or unpack it.")
            archive = zipfile.ZipFile(self._raw)
            names = [item.filename for item in archive.infolist() if not item.is_dir()]
            if len(names) != 1:
                shown = ", ".join(names[:_MOST_NAMES_SHOWN]) or "none"
                raise self._bad(f"is a zip of {len(names)} files, not of one: {shown}", hint=_HINT_ZIP)
            return archive.open(names[0]), names[0]
        return self._raw, self._path.name

    def _lines(self) -> Iterator[bytes]:
        while line := self._next_line():
            self._line += 1
            if len(_without_end(line)) > MAX_PAYLOAD_BYTES:
                raise self._bad(f"is longer than a payload may be: {MAX_PAYLOAD_BYTES} bytes", "MESSAGE_TOO_LARGE")
            yield line

    def _next_line(self) -> bytes:
        """Return a line with its newline, or more bytes than a line may have; nothing at the end of the file."""
        most_bytes = MAX_PAYLOAD_BYTES + 3
        line = self._file.readline(most_bytes)
        while self._follow and not line.endswith(b"\n") and len(line) < most_bytes:
            self._steady.check(is_complete=False)
            self.before_waiting()
            line += self._file.readline(most_bytes - len(line))
        if line.endswith(b"\n") or len(line) == most_bytes or (self._final and line):
            return line
        self._ended = True
        if line:
            self.unfinished_line = self._line + 1
        return b""

    def incomplete(self, done: str = "published") -> SeqdedupeError:
        """Return the error for an `unfinished_line`. `done` is a text about the other records, such as that they were
        published. The unfinished record was not processed."""
        if self._quotes_are_open:
            return error(
                "SOURCE_INCOMPLETE",
                f"{self._path}, line {self.unfinished_line}, where the last record begins: its quotes are still open "
                f"at the end of the file; it was not {done}",
                hint="If the file is complete, close the quotes. If it still grows, give --follow, or start the "
                "command again later.",
                line=self.unfinished_line,
            )
        return error(
            "SOURCE_INCOMPLETE",
            f"{self._path}, line {self.unfinished_line}, the last one, does not end with a newline; it was not {done}",
            line=self.unfinished_line,
        )

    def _line_records(self) -> Iterator[SourceRecord]:
        for number, line in enumerate(self._lines()):
            yield SourceRecord(number, number, _without_end(line), None, self._line)

    def _json_records(self) -> Iterator[SourceRecord]:
        id_path, key_path = self._paths
        number = 0
        for line in self._lines():
            payload = _without_end(line).removeprefix(_BYTE_ORDER_MARK if self._line == 1 else b"")
            if not payload.strip(b" \t\r"):
                continue
            try:
                value = parse(payload)
                sequence_id = number if id_path is None else id_path.sequence_id(value)
                key = None if key_path is None else key_path.key(value)
            except BadLineError as e:
                raise self._bad(str(e)) from e
            yield SourceRecord(number, sequence_id, payload, key, self._line)
            number += 1

    def _parquet_records(self) -> Iterator[SourceRecord]:
        """Read the names of the columns now, and read each row when the caller requests it."""
        if self._follow:
            raise self._bad(
                "is a Parquet file, and cannot be followed", hint="Wait until the file is complete, and omit --follow."
            )
        if self._file is not self._raw or not self._raw.seekable():
            what = "is a Parquet file within another one, or in a pipe: it is read from its end"
            raise self._bad(what, hint="Unpack the file, and name the unpacked file.")
        with self._no_bad_values():
            rows = ParquetRows(self._file)
        id_place, key_place = (None if name is None else self._place(rows.names, name) for name in self._columns)
        return self._parquet_rows(rows, id_place, key_place)

    def _parquet_rows(self, rows: ParquetRows, id_place: int | None, key_place: int | None) -> Iterator[SourceRecord]:
        names = rows.names
        with self._no_bad_values():
            for number, row in enumerate(rows):
                self._line = number + 1
                values = rows.values(row)
                sequence_id = number if id_place is None else sequence_id_of(values[id_place], names[id_place])
                key = None if key_place is None else key_of(values[key_place], names[key_place])
                yield SourceRecord(number, sequence_id, self._json(names, values), key, self._line)

    def _json(self, names: Sequence[str], values: Sequence[Any]) -> bytes:
        payload = json_of(names, values)
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise self._bad(f"is longer as JSON than a payload may be: {MAX_PAYLOAD_BYTES} bytes", "MESSAGE_TOO_LARGE")
        return payload

    @contextmanager
    def _no_bad_values(self) -> Iterator[None]:
        try:
            yield
        except BadValueError as e:
            raise self._bad(str(e)) from e
        except BadParquetError as e:
            self._line = 0
            raise self._bad(str(e)) from e

    def _csv_records(self) -> Iterator[SourceRecord]:
        """Read the header now, and read each record when the caller requests it."""
        taken: list[bytes] = []  # the lines of the current record

        def texts() -> Iterator[str]:
            for line in self._lines():
                taken.append(line)
                text = line.removeprefix(_BYTE_ORDER_MARK) if self._line == 1 else line
                yield text.decode(errors="surrogateescape")

        csv.field_size_limit(MAX_PAYLOAD_BYTES)
        rows = csv.reader(texts(), strict=True)
        while (header := self._next_row(rows, taken)) is not None and not header:
            taken.clear()
        if header is None and self.unfinished_line:
            raise self.incomplete()
        if header is None:
            raise self._bad("is empty: a CSV file begins with a header")
        id_place, key_place = (None if name is None else self._place(header, name) for name in self._columns)
        taken.clear()
        for name in header if self._as_json else ():
            self._place(header, name)
        return self._csv_rows(rows, taken, header, id_place, key_place)

    def _csv_rows(
        self, rows: Iterator[list[str]], taken: list[bytes], header: list[str], id_place: int | None,
        key_place: int | None,
    ) -> Iterator[SourceRecord]:  # fmt: skip
        number, width = 0, len(header)
        while (row := self._next_row(rows, taken)) is not None:
            payload, line = _without_end(b"".join(taken)), self._line - len(taken) + 1
            taken.clear()
            if not row:
                continue
            if len(row) != width:
                raise self._bad(f"has {len(row)} fields, the header {width}")
            sequence_id = number if id_place is None else self._sequence_id(row[id_place])
            key = None if key_place is None else row[key_place].encode(errors="surrogateescape")
            if self._as_json:
                with self._no_bad_values():
                    payload = self._json(header, row)
            yield SourceRecord(number, sequence_id, payload, key, line)
            number += 1

    def _next_row(self, rows: Iterator[list[str]], taken: list[bytes]) -> list[str] | None:
        try:
            return next(rows, None)
        except csv.Error:
            if not self._ended:
                raise
        # The file has ended within quotes.
        first = self._line - len(taken) + 1
        if self._final:
            raise error(
                "INVALID_SOURCE",
                f"{self._path}, line {first}, is not CSV: its quotes are still open at the end of the file",
                hint="Close the quotes, or give --format lines.",
            )
        self.unfinished_line, self._quotes_are_open = first, True
        return None

    def _place(self, header: list[str], name: str) -> int:
        if name not in header:
            if len(header) == 1 and (other := _OTHER_DELIMITERS.search(header[0])):
                what = f"has no column {name!r}: its header has no comma, but {other[0]!r}"
                raise self._bad(what, hint=_HINT_DELIMITER)
            near = difflib.get_close_matches(name, header, 1) or difflib.get_close_matches(
                name.lower(), [known.lower() for known in header], 1
            )
            guess = next((known for known in header if near and known.lower() == near[0].lower()), None)
            known = f"did you mean {guess!r}?" if guess else "it has " + ", ".join(header)
            raise self._bad(f"has no column {name!r}: {known}")
        if header.count(name) > 1:
            raise self._bad(f"has the column {name!r} more than once", hint="Give each column a different name.")
        return header.index(name)

    def _sequence_id(self, text: str) -> int:
        is_number = text.isascii() and text.isdecimal() and len(text.lstrip("0")) <= _MOST_DIGITS
        if not is_number or int(text) > MAX_SEQUENCE_ID:
            raise self._bad(f"has the sequence ID {text[:40]!r}: it should be a whole number from 0 to 2^63 - 1")
        return int(text)

    def _bad(self, what: str, reason: str = "INVALID_SOURCE", hint: str | None = None) -> SeqdedupeError:
        place = f", {self._line_word} {self._line}," if self._line else ""
        sent = "; nothing was sent" if self._checking else ""
        return error(reason, f"{self._path}{place} {what}{sent}", hint=hint)

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            raise self._bad(f"cannot be read: {e.strerror or e}", hint=_HINTS_UNREADABLE.get(type(e))) from e
        except (EOFError, zlib.error, zipfile.BadZipFile) as e:
            raise self._bad(f"is damaged: {e}", hint=_HINT_DAMAGED) from e
        except (NotImplementedError, RuntimeError) as e:  # a zip that is encrypted, or compressed in another way
            raise self._bad(f"cannot be unpacked: {e}", hint="Unpack the file first.") from e
        except csv.Error as e:
            raise self._bad(f"is not CSV: {e}") from e
        except ChangedError as e:
            hint = _HINT_CHANGED_BEFORE if self._checking else _HINT_CHANGED
            raise self._bad(f"{e} while it was read", reason="SOURCE_CHANGED", hint=hint) from e


def _standard_input() -> SteadyFile:
    os.set_blocking(0, True)  # otherwise a pipe without data at this moment would look like an ended pipe
    return SteadyFile(None)


def _without_end(line: bytes) -> bytes:
    return line.removesuffix(b"\n").removesuffix(b"\r")
