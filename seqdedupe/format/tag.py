"""SipHash-2-4 (Aumasson and Bernstein) as a kernel: by which a header is known to be one of ours.

Only who has the key can make the tag that belongs to some bytes. Words are signed here, their bits are what counts.
"""

import numpy as np

from seqdedupe.format.jit import Bytes, Int64s, add64, for_kernels, kernel, load64, rotl64, shl64

SECRET_BYTES = 16

NO_KEY: Int64s = np.zeros(0, np.int64)
"""Tags are neither made nor checked: for records that were checked before."""

_V0, _V1, _V2, _V3 = 0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573


def key_of(secret: bytes) -> Int64s:
    """The key in the form that kernels take, of SECRET_BYTES bytes."""
    return np.frombuffer(secret, "<i8").astype(np.int64)


@for_kernels
def _round(v0: int, v1: int, v2: int, v3: int) -> tuple[int, int, int, int]:
    v0 = add64(v0, v1)
    v1 = rotl64(v1, 13) ^ v0
    v0 = rotl64(v0, 32)
    v2 = add64(v2, v3)
    v3 = rotl64(v3, 16) ^ v2
    v0 = add64(v0, v3)
    v3 = rotl64(v3, 21) ^ v0
    v2 = add64(v2, v1)
    v1 = rotl64(v1, 17) ^ v2
    v2 = rotl64(v2, 32)
    return v0, v1, v2, v3


@for_kernels
def _take(v0: int, v1: int, v2: int, v3: int, word: int) -> tuple[int, int, int, int]:
    v0, v1, v2, v3 = _round(v0, v1, v2, v3 ^ word)
    v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    return v0 ^ word, v1, v2, v3


@kernel(bare=True)
def siphash(raw: Bytes, begin: int, end: int, key: Int64s) -> int:
    """The SipHash-2-4 of `raw[begin:end]`."""
    k0, k1 = int(key[0]), int(key[1])
    v0, v1, v2, v3 = _V0 ^ k0, _V1 ^ k1, _V2 ^ k0, _V3 ^ k1
    at = begin
    while at + 8 <= end:
        v0, v1, v2, v3 = _take(v0, v1, v2, v3, load64(raw, at))
        at += 8
    word = shl64((end - begin) & 0xFF, 56)
    for i in range(end - at):
        word |= shl64(int(raw[at + i]), 8 * i)
    v0, v1, v2, v3 = _take(v0, v1, v2, v3, word)
    v2 ^= 0xFF
    for _ in range(4):
        v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    return v0 ^ v1 ^ v2 ^ v3
