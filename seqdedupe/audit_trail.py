"""The lines of an audit trail. Each line records an action or a refusal, and contains the hash of the previous line.

If somebody changes, removes or inserts a line, the chain breaks at this line, unless all following lines are also
rewritten. To detect rewritten lines, `verify` accepts the number and hash of a line that were stored elsewhere.

The format: `docs/internals/formats-audit.md`.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

from seqdedupe.errors import SeqdedupeError, error

FORMAT_VERSION = 1

MAX_LINE_BYTES = 64 * 1024
"""The maximum size of a line in bytes, including the newline. A file's last line begins at most this far from the
file's end."""

MAX_TEXT_BYTES = 2048
"""The maximum size of a text in a line, in bytes as written. A longer text is cut. The text of a request that names a
topic is always shorter."""

_CUT = "…"
"""The mark at the end of a cut text."""


@dataclass(frozen=True, slots=True)
class TrailLink:
    """The place of a line in its chain: the line's number, from 1, and the SHA-256 of the line without newline, in
    hex."""

    number: int
    hash: str

    def __str__(self) -> str:
        return f"{self.number}:{self.hash}"

    @classmethod
    def parse(cls, text: str) -> "TrailLink":
        """Return a link from its printed form. Raises INVALID_REQUEST."""
        number, _, found = text.partition(":")
        if not (number.isascii() and number.isdecimal()) or len(found) != len(NO_LINE.hash):
            raise error("INVALID_REQUEST", f"{text!r} is no line's number and hash, as verify prints them: NUMBER:HASH")
        return cls(int(number), found.lower())


NO_LINE = TrailLink(0, "0" * 64)
"""The link before the first line of a chain."""


@dataclass(frozen=True, slots=True)
class Verified:
    """The result of `verify`: the number of lines and chains, the last line, and whether the trail contains the
    expected line."""

    lines: int
    first_number: int
    """1, unless the files before were omitted."""
    chains: int
    last: TrailLink
    last_time: str
    has_expected: bool
    torn_bytes: int
    """The number of bytes after the last complete line. They belong to a line whose writing was interrupted."""


def encode(after: TrailLink, time: str, event: str, fields: Mapping[str, object]) -> tuple[bytes, TrailLink]:
    """Return the next line of a chain, with newline, and the link of this line. `time` is in UTC, in ISO 8601 form."""
    values = {
        "version": FORMAT_VERSION,
        "number": after.number + 1,
        "previous": after.hash,
        "time": time,
        "event": event,
    }
    for name, value in fields.items():
        values[name] = cut(value, MAX_TEXT_BYTES) if isinstance(value, str) else value
    line = json.dumps(values, separators=(",", ":")).encode()
    return line + b"\n", _link_of(after.number + 1, line)


def cut(text: str, most_bytes: int) -> str:
    """Return the text. If the text needs more than `most_bytes` in a line, cut the text, and mark the cut."""
    if len(text) <= most_bytes and _written_bytes(text) <= most_bytes:
        return text
    room = most_bytes - _written_bytes(_CUT)
    ends = accumulate(map(_written_bytes, text[:most_bytes]))
    return text[: sum(end <= room for end in ends)] + _CUT


def _written_bytes(text: str) -> int:
    return len(json.dumps(text)) - len('""')


def last_link(file: BinaryIO) -> tuple[TrailLink, int]:
    """Return the link of a file's last complete line, and the offset of that line's end. Any bytes after this offset
    are an incomplete line.

    Raises AUDIT_DAMAGED if the complete line is not a line of an audit trail, NEWER_FORMAT, OSError.
    """
    size = file.seek(0, 2)
    begin = max(0, size - 2 * MAX_LINE_BYTES)
    file.seek(begin)
    whole, found, torn = file.read().rpartition(b"\n")
    if not found:
        if begin:
            raise error("AUDIT_DAMAGED", "the end of the file is not a line of an audit trail")
        return NO_LINE, 0
    line = whole.rpartition(b"\n")[2]
    return _link_of(_values(line, "its last line")["number"], line), size - len(torn)


def verify(files: Iterable[Path], expected: TrailLink | None = None) -> Verified:
    """Check the chain of a trail's files, the oldest first.

    A file may begin a new chain, for example if the previous file was moved away while no sidecar ran. The result has
    the number of chains. Raises AUDIT_DAMAGED with the file and line where the chain is broken, NEWER_FORMAT, OSError.
    """
    last, last_time, lines, first_number, chains, torn = NO_LINE, "", 0, 0, 0, b""
    has_expected = expected is None
    for path in files:
        if torn:
            raise error("AUDIT_DAMAGED", f"the last line before {path} is cut off, and another file follows")
        with path.open("rb") as file:
            for place, ended in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES), b""), 1):
                line = ended.removesuffix(b"\n")
                if line == ended:
                    torn = ended
                    if file.read(1):
                        raise error(
                            "AUDIT_DAMAGED", f"{path}:{place}: this line is longer than any line of an audit trail"
                        )
                    break
                values = _values(line, f"{path}:{place}")
                begins = place == 1 and (values["number"], values["previous"]) == (1, NO_LINE.hash)
                if not begins and (values["number"], values["previous"]) != (last.number + 1, last.hash) and lines:
                    raise error(
                        "AUDIT_DAMAGED",
                        f"{path}:{place}: line {values['number']} does not follow line {last.number}: one of "
                        "them was changed, or lines between them were removed or added",
                    )
                first_number = first_number or values["number"]
                lines, chains = lines + 1, chains + (begins or not lines)
                last, last_time = _link_of(values["number"], line), str(values["time"])
                has_expected = has_expected or last == expected
    return Verified(lines, first_number, chains, last, last_time, has_expected, len(torn))


def _link_of(number: int, line: bytes) -> TrailLink:
    return TrailLink(number, hashlib.sha256(line).hexdigest())


def _values(line: bytes, where: str) -> dict[str, Any]:
    """Return the values of a line. Raises AUDIT_DAMAGED, NEWER_FORMAT."""
    try:
        values = json.loads(line)
        version = values["version"]
        if (
            version == FORMAT_VERSION
            and isinstance(values["number"], int)
            and {"previous", "time", "event"} <= values.keys()
        ):
            return dict(values)
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise _no_line(where) from e
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise error("NEWER_FORMAT", f"{where}: a line of version {version}; up to {FORMAT_VERSION} is known here")
    raise _no_line(where)


def _no_line(where: str) -> SeqdedupeError:
    return error("AUDIT_DAMAGED", f"{where}: this is not a line of an audit trail")
