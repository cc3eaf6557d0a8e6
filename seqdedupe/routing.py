"""Which partition of a partitioned topic a message belongs to: a hash, so that a copy always meets its original."""

from struct import iter_unpack

_MASK32 = 0xFFFFFFFF
_MASK31 = 0x7FFFFFFF


def partition_of(key: bytes | None, producer_name: bytes, partitions: int) -> int:
    """The partition, from 0 to `partitions - 1`, of a message with this key, or None, and this producer.

    By the key where there is one, the empty key too; else by the producer name. Never by turns. As Pulsar's clients
    have it with `Murmur3_32Hash`: the hash without its sign bit, modulo the number of partitions.
    """
    return (murmur3_32(producer_name if key is None else key) & _MASK31) % partitions


def murmur3_32(data: bytes) -> int:
    """MurmurHash3_x86_32 (Austin Appleby) of some bytes with the seed 0, as an unsigned number."""
    whole = len(data) & ~3
    h = 0
    for (word,) in iter_unpack("<I", data[:whole]):
        h ^= _mixed(word)
        h = (h << 13 | h >> 19) & _MASK32
        h = h * 5 + 0xE6546B64 & _MASK32
    # The bytes that are left make a last word; without any it is 0, which changes nothing.
    h ^= _mixed(int.from_bytes(data[whole:], "little"))
    h ^= len(data)
    h ^= h >> 16
    h = h * 0x85EBCA6B & _MASK32
    h ^= h >> 13
    h = h * 0xC2B2AE35 & _MASK32
    return h ^ h >> 16


def _mixed(word: int) -> int:
    word = word * 0xCC9E2D51 & _MASK32
    word = (word << 15 | word >> 17) & _MASK32
    return word * 0x1B873593 & _MASK32
