"""The compression of entries: Pulsar's five types, each bounded by the size that the entry states. Pure.

The codecs of other libraries are imported when they are needed: the extra `pulsar` has them.
"""

import zlib
from collections.abc import Callable
from functools import cache
from types import ModuleType

from seqdedupe.errors import INSTALL_HINT, error
from seqdedupe.pulsar_wire.frames import Buffer, malformed
from seqdedupe.pulsar_wire.pulsar_api_pb2 import LZ4, NONE, SNAPPY, ZLIB, ZSTD, CompressionType

TYPES = (NONE, LZ4, ZLIB, ZSTD, SNAPPY)


def compress(kind: CompressionType.ValueType, data: Buffer) -> Buffer:
    """Return the data compressed, as Pulsar's clients do it. NONE returns the same object.

    Raises MALFORMED_MESSAGE for an unknown type, INVALID_CONFIGURATION if the codec is not installed.
    """
    if kind == NONE:
        return data
    if kind == ZLIB:
        return zlib.compress(data)
    codecs = _codecs()
    if kind == LZ4:
        return memoryview(codecs.lz4.compress_block(data, store_size=False))
    if kind == ZSTD:
        return memoryview(codecs.zstd.compress(data))
    if kind == SNAPPY:
        return memoryview(codecs.snappy.compress_raw(data))
    raise _unknown(kind)


def decompress(kind: CompressionType.ValueType, data: Buffer, size: int, max_bytes: int) -> Buffer:
    """Return the `size` bytes that the data are when decompressed. NONE returns the same object.

    Allocates `size` bytes, and only if they are at most `max_bytes`. A ZLIB stream without an end is accepted: brokers
    write one when they compact a topic. Raises MESSAGE_TOO_LARGE, MALFORMED_MESSAGE, INVALID_CONFIGURATION.
    """
    if kind == NONE:
        return data
    if size > max_bytes:
        raise error("MESSAGE_TOO_LARGE", f"a payload of {size} bytes is larger than {max_bytes}", size=size)
    if kind == ZLIB:
        result: Buffer = _inflated(data, size)
    elif kind in (LZ4, ZSTD, SNAPPY):
        result = _filled(_decoder(kind), data, size)
    else:
        raise _unknown(kind)
    return result


def _inflated(data: Buffer, size: int) -> bytes:
    stream = zlib.decompressobj()
    try:
        # One byte more shows a payload that is larger than it says. 0 would mean no limit.
        result = stream.decompress(data, size + 1)
    except zlib.error as e:
        raise malformed(f"a payload is not compressed as it says: {e}") from e
    if len(result) != size:
        raise _size_differs(size)
    return result


def _filled(decode: Callable[[Buffer, bytearray], int], data: Buffer, size: int) -> Buffer:
    result = bytearray(size)
    try:
        filled = decode(data, result)
    except _codecs().DecompressionError as e:
        raise malformed(f"a payload of {size} bytes is not compressed as it says: {e}") from e
    if filled != size:
        raise _size_differs(size)
    return result


def _decoder(kind: CompressionType.ValueType) -> Callable[[Buffer, bytearray], int]:
    """Return a function that decodes into a buffer, and fails if there is more than the buffer has room for."""
    codecs = _codecs()
    decoders: dict[int, Callable[[Buffer, bytearray], int]] = {
        LZ4: codecs.lz4.decompress_block_into,
        ZSTD: codecs.zstd.decompress_into,
        SNAPPY: codecs.snappy.decompress_raw_into,
    }
    return decoders[kind]


@cache
def _codecs() -> ModuleType:
    try:
        import cramjam
    except ImportError as e:
        raise error(
            "INVALID_CONFIGURATION",
            "LZ4, ZSTD and SNAPPY need the package cramjam, which is not installed",
            hint=INSTALL_HINT.format("pulsar"),
        ) from e
    return cramjam


def _size_differs(size: int) -> Exception:
    return malformed(f"a payload says {size} bytes, and has another size when decompressed")


def _unknown(kind: int) -> Exception:
    return malformed(f"compression {kind} is none that Pulsar 4 has")
