"""Topics that exist in Pulsar and become logs: the conditions for a take-over, and the data that the topic's properties
keep.

When the topic is opened, entries before the first marker are judged by their own producer names and sequence IDs. Only
Pulsar's own deduplication, if it is on, knows the producers of trimmed entries. Later, Pulsar's deduplication also
counts entries of sidecars, even void entries. So the numbers are copied once, before the topic becomes a log, and
stored in a property.
"""

import base64
import json
import zlib
from collections.abc import Mapping, Sequence

from seqdedupe.entry_properties import PREFIX
from seqdedupe.errors import error
from seqdedupe.figures import counted
from seqdedupe.limits import MAX_SEQUENCE_ID
from seqdedupe.log.pulsar.admin_url import PulsarAdmin, StoredBefore, entry_in
from seqdedupe.log.pulsar.policies import check_takes_producers
from seqdedupe.message_id import NOWHERE, MessageId

TAKEN_OVER = PREFIX + "taken_over"
"""A topic's property: its last entry before it became a log, as `ledger:entry`."""
NUMBERS = PREFIX + "earlier"
"""A topic's property: the highest sequence ID of each producer by Pulsar's own deduplication: JSON, zlib, base64."""
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


def properties_of(before: StoredBefore) -> dict[str, str]:
    """Return the properties that describe the earlier content of the topic. Raises INVALID_REQUEST if the properties
    are too large."""
    numbers = {name: number for name, number in before.numbers.items() if 0 <= number <= MAX_SEQUENCE_ID}
    text = base64.b64encode(zlib.compress(json.dumps(numbers).encode())).decode() if numbers else ""
    if len(text) > MAX_NUMBERS_BYTES:
        raise error(
            "INVALID_REQUEST",
            f"Pulsar's deduplication knows {counted(len(numbers), 'producer')} of the topic, too many for its "
            f"properties: {len(text)} bytes of {MAX_NUMBERS_BYTES}",
            hint="Brokers forget idle producers after brokerDeduplicationProducerInactivityTimeoutMinutes.",
        )
    # An earlier attempt may have left numbers.
    return {TAKEN_OVER: str(before.last), NUMBERS: text}


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
