"""Which process of several has a topic: each has some of the shards, and a topic is of one of them by its name."""

from collections.abc import Collection

from seqdedupe.errors import error
from seqdedupe.names import whole_of
from seqdedupe.routing import murmur3_32

SHARDS = 64
"""How many there are, for good: a data directory says of how many its shards are."""

ALL_SHARDS = frozenset(range(SHARDS))


def shard_of(name: str) -> int:
    """The shard, from 0 to `SHARDS - 1`, of a topic's full name, or of a namespace.

    That of a partition is that of the whole topic: its partitions are made and deleted together, by one process.
    """
    return murmur3_32((whole_of(name) or name).encode()) % SHARDS


def shards_of_worker(worker: int, workers: int) -> frozenset[int]:
    """What a worker has, from 0 on, of so many: stretches that differ by one in length at most."""
    return frozenset(shard for shard in ALL_SHARDS if shard * workers // SHARDS == worker)


def to_text(shards: Collection[int]) -> str:
    """Shards as a text: `0-15,20`."""
    stretches: list[list[int]] = []
    for shard in sorted(shards):
        if stretches and stretches[-1][1] == shard - 1:
            stretches[-1][1] = shard
        else:
            stretches.append([shard, shard])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in stretches)


def from_text(text: str) -> frozenset[int]:
    """Shards of a text as `to_text` makes it, in any order. Raises INVALID_REQUEST."""
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        if not (_is_shard(first) and _is_shard(last)) or int(last) < int(first):
            raise error("INVALID_REQUEST", f"{text!r} are no shards: they should be as 0-15,20, up to {SHARDS - 1}")
        found.update(range(int(first), int(last) + 1))
    return frozenset(found)


def _is_shard(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= len(str(SHARDS)) and int(text) < SHARDS
