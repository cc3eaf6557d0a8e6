"""Names of topics, namespaces and producers, and the values that follow from a name alone: the partition of a message,
and the shard of a topic."""

import re
from collections.abc import Collection
from struct import iter_unpack

from seqdedupe.errors import InvalidRequestError, error
from seqdedupe.limits import MAX_NAME_BYTES

_SHORT_NAME = re.compile(r"[\w.:=\-]+", re.ASCII)
_FULL_NAME = re.compile(r"persistent://([\w.=\-]+)/([\w.=\-]+)/([\w.:=\-]+)", re.ASCII)
_NAMESPACE = re.compile(r"[\w.=\-]+/[\w.=\-]+", re.ASCII)
_PARTITION = re.compile(r"(.+)-partition-(\d+)", re.ASCII)
_SYSTEM_PREFIXES = ("__", "transaction_coordinator_assign")
_PENDING_ACKS = "__transaction_pending_ack"
_SYSTEM_NAMESPACE = "pulsar/system"
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def topic_name(name: str) -> str:
    """Return the full name, `persistent://tenant/namespace/name`, of a full or short topic name.

    As in Pulsar, the short name `name` stands for `persistent://public/default/name`, and `tenant/namespace/name`
    stands for `persistent://tenant/namespace/name`. Each part may contain ASCII letters, digits, `_`, `-`, `.` and `=`.
    The last part may also contain `:`. Raises INVALID_TOPIC_NAME.
    """
    full = name
    if _SHORT_NAME.fullmatch(name):
        full = f"persistent://public/default/{name}"
    elif "://" not in name:
        full = f"persistent://{name}"
    if not _FULL_NAME.fullmatch(full) or len(full.encode()) > MAX_NAME_BYTES:
        raise error(
            "INVALID_TOPIC_NAME",
            f"{name[:80]!r} is not a topic name: it should be persistent://tenant/namespace/name or a short name, "
            f"of ASCII letters, digits and any of _-.=:, at most {MAX_NAME_BYTES} bytes in all",
        )
    return full


def check_is_no_system_topic(topic: str) -> None:
    """Raise INVALID_TOPIC_NAME if Pulsar, or a program that runs in Pulsar, reserves this name for system topics."""
    whole = whole_of(topic) or topic
    local = whole.rpartition("/")[2]
    if local.startswith(_SYSTEM_PREFIXES) or local.endswith(_PENDING_ACKS) or namespace_of(whole) == _SYSTEM_NAMESPACE:
        raise error(
            "INVALID_TOPIC_NAME",
            f"{topic} has the name of a system topic of Pulsar's: names that begin with __ or with "
            f"transaction_coordinator_assign, that end with {_PENDING_ACKS}, or stand in {_SYSTEM_NAMESPACE}",
            hint="Choose another name.",
        )


def partition_name(whole: str, partition: int) -> str:
    """Return the full name of a partition of a partitioned topic, as in Pulsar. Raises INVALID_TOPIC_NAME."""
    return topic_name(f"{whole}-partition-{partition}")


def whole_of(topic: str) -> str | None:
    """Return the name of the partitioned topic that would have a partition with this name. Return None if no partition
    can have this name."""
    found = _PARTITION.fullmatch(topic)
    return found[1] if found else None


def number_of(partition: str) -> int:
    """Return the number in the name of a partition. Raises ValueError for any other name."""
    return int(partition.rpartition("-")[2])


def namespace_name(name: str) -> str:
    """Return a namespace's name, `tenant/namespace`, if it is valid. Raises INVALID_NAMESPACE."""
    if not _NAMESPACE.fullmatch(name) or len(name) > MAX_NAME_BYTES:
        raise error(
            "INVALID_NAMESPACE",
            f"{name[:80]!r} is not the name of a namespace: it should be tenant/namespace, of ASCII letters, digits "
            f"and any of _-.=, at most {MAX_NAME_BYTES} bytes in all",
        )
    return name


def is_namespace(name: str) -> bool:
    """Whether this is the name of a namespace, and not of a topic."""
    return _NAMESPACE.fullmatch(name) is not None


def namespace_of(topic: str) -> str:
    """Return the namespace of a topic's full name."""
    return topic.removeprefix("persistent://").rpartition("/")[0]


def decoded_producer_name(name: bytes) -> str:
    """Decode a producer name from bytes. Raises INVALID_NAME for bytes that are not UTF-8. Other rules are not
    checked."""
    try:
        return name.decode()
    except UnicodeDecodeError as e:
        raise error("INVALID_NAME", f"the producer name {name[:80]!r} is not UTF-8") from e


def producer_name(name: str) -> bytes:
    """Return the UTF-8 form of a producer name, 1 to 255 bytes. Raises INVALID_NAME."""
    try:
        encoded = name.encode()
    except UnicodeEncodeError as e:
        raise error("INVALID_NAME", f"the producer name {name[:80]!r} is not valid Unicode") from e
    check_name_length(encoded)
    return encoded


def is_producer_name(name: str) -> bool:
    """Return whether `producer_name` accepts the name: whether a producer with this name can ever open a topic."""
    try:
        producer_name(name)
    except InvalidRequestError:
        return False
    return True


def check_name_length(encoded: bytes) -> None:
    """Raise INVALID_NAME if a producer name does not have 1 to 255 bytes."""
    if not 1 <= len(encoded) <= MAX_NAME_BYTES:
        raise error(
            "INVALID_NAME",
            f"a producer name is {len(encoded)} bytes long: it should be 1 to {MAX_NAME_BYTES}",
        )


def new_producer_name(name: str) -> bytes:
    """Do the same as `producer_name` for a new name. A new name must not have control characters. Raises
    INVALID_NAME."""
    encoded = producer_name(name)
    if _CONTROL.search(name):
        raise error("INVALID_NAME", f"the producer name {name[:80]!r} has a control character")
    return encoded


def check_cursor_name(name: str) -> None:
    """Raise INVALID_NAME if no cursor can have this name."""
    try:
        new_producer_name(name)
    except InvalidRequestError as e:
        limits = f"1 to {MAX_NAME_BYTES} bytes and no control characters"
        what = f"{name[:80]!r} is no name of a cursor: it should have {limits}"
        raise error("INVALID_NAME", what, hint="Give the cursor another name, for example mailer/payments.") from e


def source_name(name: str, topic: str, creation: int) -> str:
    """Return the producer name for the outputs of a topic's messages. The name is the same in every process.

    `name` is the name of the function or pipe. `topic` is the full name of the topic or partition. `creation` (an
    incarnation or a ledger) distinguishes topics with the same name, because a recreated topic counts from 0 again. No
    two sources have the same name.
    """
    return f"{name}/{topic}/{creation}"


# -- The partition of a message: a hash, so that a copy always meets its original.

_MASK32 = 0xFFFFFFFF
_MASK31 = 0x7FFFFFFF


def partition_of(key: bytes | None, producer_name: bytes, partitions: int) -> int:
    """Return the partition, from 0 to `partitions - 1`, of a message of this producer with this key (None: no key).

    If the message has a key (which may be empty), the key selects the partition. Otherwise the producer name selects
    the partition. Messages are never distributed round-robin. The rule is the same as in Pulsar's clients with
    `Murmur3_32Hash`: the hash without its sign bit, modulo the number of partitions.
    """
    return (murmur3_32(producer_name if key is None else key) & _MASK31) % partitions


def murmur3_32(data: bytes) -> int:
    """Return MurmurHash3_x86_32 (Austin Appleby) of these bytes with the seed 0, as an unsigned number."""
    whole = len(data) & ~3
    h = 0
    for (word,) in iter_unpack("<I", data[:whole]):
        h ^= _mixed(word)
        h = (h << 13 | h >> 19) & _MASK32
        h = h * 5 + 0xE6546B64 & _MASK32
    # The remaining bytes make a last word. Without any it is 0, which changes nothing.
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


# -- The shard of a topic: each of several processes has some shards, and a topic's name decides its shard.

SHARDS = 64
"""The number of shards, which never changes: a data directory records the number that it was made with."""

ALL_SHARDS = frozenset(range(SHARDS))


def shard_of(name: str) -> int:
    """Return the shard, from 0 to `SHARDS - 1`, of a topic's full name, or of a namespace.

    A partition has the shard of its partitioned topic, so that one process makes and deletes all partitions together.
    """
    return murmur3_32((whole_of(name) or name).encode()) % SHARDS


def shards_of_worker(worker: int, workers: int) -> frozenset[int]:
    """Return the shards of a worker. Workers are counted from 0 to `workers - 1`. The ranges of two workers differ by
    at most one in length."""
    return frozenset(shard for shard in ALL_SHARDS if shard * workers // SHARDS == worker)


def to_text(shards: Collection[int]) -> str:
    """Return shards as text: `0-15,20`."""
    stretches: list[list[int]] = []
    for shard in sorted(shards):
        if stretches and stretches[-1][1] == shard - 1:
            stretches[-1][1] = shard
        else:
            stretches.append([shard, shard])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in stretches)


def from_text(text: str) -> frozenset[int]:
    """Return the shards in a text such as `0-15,20`, in any order. Raises INVALID_REQUEST."""
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
