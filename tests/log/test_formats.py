"""`docs/internals/formats.md` and what the log writes are the same."""

import re
from pathlib import Path

import numpy as np

from seqdedupe.format import headers
from seqdedupe.format.headers import key_of, siphash
from tests.log.batches import SECRET, encoded_batch

KEY = key_of(SECRET)
DOCUMENT = Path(__file__).parents[2] / "docs" / "internals" / "formats.md"
ROW = re.compile(r"^ +(\d+) +(\d+)  ([0-9A-F]{2}(?: [0-9A-F]{2})*)(?: .*)?$", re.MULTILINE)
VALUE = re.compile(r"^ +(\d+) +(\d+) +([a-z_0-9]+): ", re.MULTILINE)


def log_section() -> str:
    return DOCUMENT.read_text().split("\n## Log\n")[1].split("\n## ")[0]


def tags(text: str) -> dict[int, bytes]:
    """Offset to fixed bytes, of a drawing."""
    return {int(at): bytes.fromhex(fixed) for at, _, fixed in ROW.findall(text)}


def test_the_drawn_header_is_the_one_written() -> None:
    place = {
        "incarnation": 1 << 60 | 2,
        "file_offset": 3,
        "publish_time_ms": 4,
        "synced_offset": 5,
    }
    batch, rows, column_bytes = encoded_batch(7, 6)
    header = headers.header(
        batch,
        headers.BATCH_TAG,
        rows=rows,
        column_bytes=column_bytes,
        base_index=8,
        ownership=1 << 63 | 10,
        key=KEY,
        **place,
    )
    drawing = log_section().split("### Record")[1].split("### Marker")[0]
    found = tags(drawing)
    assert len(found) == 14
    for at, fixed in found.items():
        assert header[at : at + len(fixed)] == fixed, at
    values = {name: (int(at), int(size)) for at, size, name in VALUE.findall(drawing)}
    expected = place | {"format_version": 2, "base_index": 8, "rows": rows, "column_bytes": column_bytes}
    expected["ownership"] = 1 << 63 | 10
    expected["tag"] = siphash(np.frombuffer(header, np.uint8), 0, 86, KEY) % 2**64
    for name, value in expected.items():
        at, size = values.pop(name)
        assert int.from_bytes(header[at : at + size], "little") == value, name
    assert set(values) == {"column_crc32c", "payload_crc32c"}
    assert len(header) == headers.HEADER_BYTES == 100

    marker = headers.marker_record(9, b"t" * 16, next_index=8, key=KEY, **place)
    found = tags(log_section().split("### Marker")[1].split("### Torn")[0])
    assert len(found) == 2
    for at, fixed in found.items():
        assert marker[at : at + len(fixed)] == fixed, at
    assert int.from_bytes(marker[101:109], "little") == 9
    assert marker[111:] == b"t" * 16
    assert len(marker) == 127
    assert marker[94] == 0x72
    assert marker[67:75] == b"t" * 8
