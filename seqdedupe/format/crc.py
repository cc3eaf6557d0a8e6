"""CRC32C (Castagnoli) as a kernel, eight bytes a step, for scanning many small records without leaving the loop."""

import numpy as np

from seqdedupe.format.jit import Bytes, crc_step, kernel, load32, load64

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

    @kernel()
    def crc32c(before: int, raw: Bytes, start: int, end: int) -> int:
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
    _LANE_BYTES = 512
    """The instruction takes three cycles and one can be begun in each: three stretches side by side."""

    def _lane_tables() -> np.ndarray:
        """Four tables: what each byte of a remainder becomes after `_LANE_BYTES` zero bytes."""
        tables = np.zeros((4, 256), np.int64)
        for place in range(4):
            remainders = np.arange(256, dtype=np.int64) << (8 * place)
            for _ in range(_LANE_BYTES):
                remainders = (remainders >> 8) ^ TABLES[0, remainders & 0xFF]
            tables[place] = remainders
        return tables

    LANES = _lane_tables()

    @kernel()
    def crc32c(before: int, raw: Bytes, start: int, end: int) -> int:
        """The same, by the processor's instruction: many times as fast."""
        crc = before ^ 0xFFFFFFFF
        at = start
        while at + 3 * _LANE_BYTES <= end:
            second = third = 0
            for here in range(at, at + _LANE_BYTES, 8):
                crc = crc_step(crc, load64(raw, here))
                second = crc_step(second, load64(raw, here + _LANE_BYTES))
                third = crc_step(third, load64(raw, here + 2 * _LANE_BYTES))
            for lane in (second, third):
                crc = (
                    LANES[0, crc & 0xFF]
                    ^ LANES[1, (crc >> 8) & 0xFF]
                    ^ LANES[2, (crc >> 16) & 0xFF]
                    ^ LANES[3, crc >> 24]
                    ^ lane
                )
            at += 3 * _LANE_BYTES
        while at + 8 <= end:
            crc = crc_step(crc, load64(raw, at))
            at += 8
        while at < end:
            crc = (crc >> 8) ^ TABLES[0, (crc ^ int(raw[at])) & 0xFF]
            at += 1
        return crc ^ 0xFFFFFFFF
