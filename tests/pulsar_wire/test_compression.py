"""Compression: bounded by the size that an entry states."""

import sys
import tracemalloc
import zlib

import pytest

from seqdedupe.errors import SeqdedupeError
from seqdedupe.pulsar_wire import frames
from seqdedupe.pulsar_wire.frames import COMPRESSIONS, compress, decompress
from seqdedupe.pulsar_wire.pulsar_api_pb2 import LZ4, NONE, SNAPPY, ZLIB, ZSTD, CompressionType

MAX_BYTES = 1_000_000
DATA = b"hello " * 5000


@pytest.mark.parametrize("kind", COMPRESSIONS)
@pytest.mark.parametrize("data", [b"", b"x", DATA])
def test_what_is_compressed_is_decompressed(kind: CompressionType.ValueType, data: bytes) -> None:
    for given in (data, memoryview(data), memoryview(bytearray(data))):
        assert decompress(kind, compress(kind, given), len(data), MAX_BYTES) == data


@pytest.mark.parametrize("kind", [LZ4, ZLIB, ZSTD, SNAPPY])
@pytest.mark.parametrize("difference", [-1, 1, -len(DATA), 10_000])
def test_another_size_than_stated_is_refused(kind: CompressionType.ValueType, difference: int) -> None:
    with pytest.raises(SeqdedupeError, match="MALFORMED_MESSAGE"):
        decompress(kind, compress(kind, DATA), len(DATA) + difference, MAX_BYTES)


@pytest.mark.parametrize("kind", [LZ4, ZLIB, ZSTD, SNAPPY])
def test_what_is_not_compressed_is_refused(kind: CompressionType.ValueType) -> None:
    for data in (b"", b"\xff" * 20, bytes(compress(kind, DATA))[:20]):
        with pytest.raises(SeqdedupeError, match="MALFORMED_MESSAGE"):
            decompress(kind, data, len(DATA), MAX_BYTES)


@pytest.mark.parametrize("kind", [LZ4, ZLIB, ZSTD, SNAPPY])
def test_more_than_the_limit_is_refused_before_it_is_allocated(kind: CompressionType.ValueType) -> None:
    bomb = compress(kind, bytes(50 * MAX_BYTES))
    for size, reason in ((50 * MAX_BYTES, "MESSAGE_TOO_LARGE"), (MAX_BYTES, "MALFORMED_MESSAGE")):
        tracemalloc.start()
        try:
            with pytest.raises(SeqdedupeError, match=reason):
                decompress(kind, bomb, size, MAX_BYTES)
            assert tracemalloc.get_traced_memory()[1] < 4 * MAX_BYTES
        finally:
            tracemalloc.stop()


def test_a_stream_without_an_end_is_read() -> None:
    stream = zlib.compressobj()
    data = stream.compress(DATA) + stream.flush(zlib.Z_SYNC_FLUSH)
    assert decompress(ZLIB, data, len(DATA), MAX_BYTES) == DATA


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(SeqdedupeError, match="MALFORMED_MESSAGE"):
        decompress(9, b"", 0, MAX_BYTES)  # type: ignore[arg-type]
    with pytest.raises(SeqdedupeError, match="MALFORMED_MESSAGE"):
        compress(9, b"")  # type: ignore[arg-type]


def test_without_the_package_its_name_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    frames._codecs.cache_clear()
    monkeypatch.setitem(sys.modules, "cramjam", None)
    assert decompress(NONE, b"x", 1, MAX_BYTES) == b"x"
    assert decompress(ZLIB, compress(ZLIB, b"x"), 1, MAX_BYTES) == b"x"
    with pytest.raises(SeqdedupeError, match="cramjam"):
        compress(LZ4, b"x")
