"""Topics that exist in Pulsar and become logs: the conditions for a take-over, and the data that the topic's properties
keep.

When the topic is opened, entries before the first marker are judged by their own producer names and sequence IDs. Only
Pulsar's own deduplication, if it is on, knows the producers of trimmed entries. Later, Pulsar's deduplication also
counts entries of sidecars, even void entries. So the numbers are copied once, before the topic becomes a log, and
stored in a property.

A job may have read the entries up to a place before. Then the property has the higher number of both, and the topic is
read only from that place on.
"""

import base64
import json
import zlib
from collections.abc import Mapping, Sequence

from seqdedupe.entry_properties import PREFIX
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.figures import counted
from seqdedupe.limits import MAX_SEQUENCE_ID, NO_SEQUENCE_ID
from seqdedupe.log.pulsar.admin_url import PulsarAdmin, StoredBefore, entry_in
from seqdedupe.log.pulsar.broker_wire import Brokers, open_reader
from seqdedupe.log.pulsar.entries import PulsarEntry
from seqdedupe.log.pulsar.ledgers import Ledgers
from seqdedupe.log.pulsar.policies import check_takes_producers
from seqdedupe.log.pulsar.reader import read_existing
from seqdedupe.message_id import NOWHERE, MessageId
from seqdedupe.v1.admin_pb2 import StockEntry, StockTopic, StockWatermarks

TAKEN_OVER = PREFIX + "taken_over"
"""A topic's property: its last entry before it became a log, as `ledger:entry`."""
NUMBERS = PREFIX + "earlier"
"""A topic's property: the highest sequence ID of each producer by Pulsar's own deduplication, and by the job that has
read the topic: JSON, zlib, base64."""
READ = PREFIX + "earlier_read"
"""A topic's property: the last entry that the job has read, and the CRC-32 of NUMBERS: `ledger:entry:checksum`. If the
checksum differs, another attempt has replaced NUMBERS. All entries are read then."""
MAX_NUMBERS_BYTES = 512 * 1024
"""The most bytes of NUMBERS. Pulsar keeps properties in its metadata store, which takes 1 MiB for a topic."""
_SHOWN = 5


async def check_can_be_taken_over(admin: PulsarAdmin, topics: Sequence[str]) -> None:
    """Check everything that can be checked before anything is changed. Raises TOPIC_NOT_FOUND, TOPIC_IN_USE,
    TOPIC_TERMINATED, INVALID_REQUEST, UNSAFE_TOPIC_POLICY, and the errors of `PulsarAdmin`."""
    for topic in topics:
        await check_takes_producers(admin, topic)
        if await admin.is_terminated(topic):
            raise error("TOPIC_TERMINATED", f"{topic} was terminated in Pulsar: it takes nothing more, for good")
        stats = await admin.stats(topic)
        if stats.replicated_to:
            raise error(
                "INVALID_REQUEST",
                f"{topic} is replicated, with the clusters {', '.join(stats.replicated_to)}: their producers would "
                "write to it too",
                hint=f"End the replication: pulsar-admin topics set-replication-clusters --clusters NAME {topic}",
            )
        if stats.publishers:
            names = [publisher.name for publisher in stats.publishers]
            others = ", …" if len(names) > _SHOWN else ""
            raise error(
                "TOPIC_IN_USE",
                f"{counted(len(names), 'producer')} of Pulsar's clients {'is' if len(names) == 1 else 'are'} connected "
                f"to {topic}: {', '.join(names[:_SHOWN])}{others}",
                hint="Stop these producers, or let them publish to the sidecar's door. Then take over the topic.",
            )


def properties_of(before: StoredBefore, read: StockTopic | None = None) -> dict[str, str]:
    """Return the properties that describe the earlier content of the topic, of which a job may have read a part. Raises
    INVALID_REQUEST if the properties are too large, or if the job has read other entries."""
    numbers = {name: number for name, number in before.numbers.items() if 0 <= number <= MAX_SEQUENCE_ID}
    if read is not None:
        check_ledgers(read, before.ledgers)
        for name, number in zip(read.producer_names, read.persisted, strict=True):
            numbers[name] = max(number, numbers.get(name, NO_SEQUENCE_ID))
    text = text_of(numbers)
    # An earlier attempt may have left numbers.
    properties = {TAKEN_OVER: str(before.last), NUMBERS: text}
    if read is not None and read.HasField("last"):
        properties[READ] = f"{_place(read.last)}:{zlib.crc32(text.encode()):08x}"
    return properties


def text_of(numbers: Mapping[str, int]) -> str:
    """Return the property NUMBERS. Raises INVALID_REQUEST if it is too large."""
    text = base64.b64encode(zlib.compress(json.dumps(numbers).encode())).decode() if numbers else ""
    if len(text) > MAX_NUMBERS_BYTES:
        raise error(
            "INVALID_REQUEST",
            f"Pulsar's deduplication or a job knows {counted(len(numbers), 'producer')} of the topic, too many for its "
            f"properties: {len(text)} bytes of {MAX_NUMBERS_BYTES}",
            hint="Brokers forget idle producers after brokerDeduplicationProducerInactivityTimeoutMinutes. Watermarks "
            "of a job can be omitted.",
        )
    return text


def last_before(properties: Mapping[str, str]) -> MessageId:
    """Return the topic's last entry from before it became a log, as the topic's properties state it. If no sidecar took
    over the topic, return a place before all entries. Raises LOG_DAMAGED."""
    if TAKEN_OVER not in properties:
        return NOWHERE
    try:
        return entry_in(properties[TAKEN_OVER])
    except ValueError as e:
        raise error("LOG_DAMAGED", f"a topic's property {TAKEN_OVER} does not say a place: {e}") from e


def numbers_before(properties: Mapping[str, str]) -> dict[str, int]:
    """Return the producers' sequence IDs that its properties keep. Raises LOG_DAMAGED."""
    if not (text := properties.get(NUMBERS)):
        return {}
    try:
        numbers = json.loads(zlib.decompress(base64.b64decode(text, validate=True)))
        return {str(name): int(number) for name, number in numbers.items()}
    except (ValueError, TypeError, AttributeError, zlib.error) as e:
        raise error("LOG_DAMAGED", f"a topic's property {NUMBERS} cannot be read: {e}") from e


def read_before(properties: Mapping[str, str]) -> MessageId | None:
    """Return the entry up to which the producers are in `numbers_before`; None if there is no such entry. Raises
    LOG_DAMAGED."""
    place, _, checksum = properties.get(READ, "").rpartition(":")
    try:
        if not place or int(checksum, 16) != zlib.crc32(properties.get(NUMBERS, "").encode()):
            return None
        return entry_in(place)
    except ValueError as e:
        raise error("LOG_DAMAGED", f"a topic's property {READ} does not say a place: {e}") from e


# -- What a job has read of a topic: it counts only for that very topic.


def stock_entry_of(entry: PulsarEntry) -> StockEntry:
    """Return what identifies an entry."""
    ledger_id, entry_id, _ = entry.message_id
    return StockEntry(
        ledger_id=ledger_id,
        entry_id=entry_id,
        publish_time_ms=entry.publish_time_ms,
        producer_name=entry.producer_name,
        sequence_id=entry.sequence_id,
    )


def reads_of(names: Sequence[str], watermarks: StockWatermarks | None) -> list[StockTopic | None]:
    """Return what was read of each of these topics. Raises INVALID_REQUEST if the watermarks are of other topics, or
    invalid."""
    if watermarks is None:
        return [None] * len(names)
    if (read := [one.topic for one in watermarks.topics]) != [*names]:
        raise _unusable(f"the watermarks are those of {', '.join(read[:_SHOWN]) or 'no topic'}, not of {names[0]}")
    for one in watermarks.topics:
        is_whole = len(one.producer_names) == len(one.persisted) and len(one.ledger_ids) == len(one.ledger_entries)
        if not is_whole or not all(0 <= number <= MAX_SEQUENCE_ID for number in one.persisted):
            raise _unusable(f"the watermarks of {one.topic} are not as a job writes them")
        if one.HasField("first") != one.HasField("last") or (one.producer_names and not one.HasField("last")):
            raise _unusable(f"the watermarks of {one.topic} are of no entry")
    return [*watermarks.topics]


def check_ledgers(read: StockTopic, ledgers: Ledgers) -> None:
    """Raise INVALID_REQUEST unless the entries that were read are those of these ledgers, of which the first may be
    trimmed. The last entry that was read must be stored."""
    if not read.HasField("last"):
        return
    last = _place(read.last)
    if ledgers.ordinal(last) is None:
        raise _unusable(
            f"the watermarks of {read.topic} are of its entries up to {last}, which is not stored: the topic was "
            "truncated or trimmed later, or created again, or is of another cluster"
        )
    stored = ledgers.up_to(last)
    if stored != [*zip(read.ledger_ids, read.ledger_entries, strict=True)][-len(stored) :]:
        raise _unusable(f"the ledgers of {read.topic} up to {last} are not those whose entries were read")


async def check_was_read(admin: PulsarAdmin, brokers: Brokers, read: StockTopic) -> None:
    """Raise INVALID_REQUEST unless the topic has the entries that were read, by its ledgers, and by the first and the
    last entry. Raises LOG_UNREADABLE, and the errors of `PulsarAdmin`."""
    if not read.HasField("last"):
        return
    ledgers = await admin.ledgers(read.topic)
    check_ledgers(read, ledgers)
    for expected in (read.first, read.last):
        if ledgers.ordinal(_place(expected)) is None:
            # It was trimmed.
            continue
        reader = await open_reader(brokers, read.topic, _place(expected), None)
        try:
            found, *_ = await read_existing(reader, read.topic)
        finally:
            await reader.close()
        if stock_entry_of(found) != expected:
            raise _unusable(f"the entry at {_place(expected)} of {read.topic} is not the one that was read")


def _place(entry: StockEntry) -> MessageId:
    return MessageId(entry.ledger_id, entry.entry_id)


def _unusable(why: str) -> SeqdedupeError:
    return error(
        "INVALID_REQUEST",
        why,
        hint="Read the topic again: seqdedupe job bootstrap FILE --topic TOPIC --address pulsar://… Or omit the "
        "watermarks: then the sidecar reads the topic.",
    )
