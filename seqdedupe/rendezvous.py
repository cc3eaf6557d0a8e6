"""In which order the sidecars of a topic are tried: a hash, so that all clients and sidecars find the same order."""

from collections.abc import Iterable
from hashlib import sha256


def in_order(topic: str, addresses: Iterable[str]) -> list[str]:
    """The addresses in the order in which they are tried for the topic with this full name.

    The weight of an address is the first 8 bytes, as an unsigned big-endian number, of the SHA-256 of the topic's
    name, a line feed and the address, in UTF-8. The highest comes first. So topics spread evenly, and an address more,
    or less, moves no topic between the others.
    """
    return sorted(addresses, key=lambda address: sha256(f"{topic}\n{address}".encode()).digest()[:8], reverse=True)
