"""Who owns a topic: what its statistics say of who writes to it, and else its last marker."""

import logging

from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.log.pulsar.admin import Admin, Publisher

logger = logging.getLogger("seqdedupe.log")

ADDRESS = "address"
"""The property of a sidecar's producer that says where the sidecar can be reached."""


async def not_owner(
    e: SeqdedupeError, admin: Admin, topic: str, own_address: str, own_name: str, marked_address: str
) -> SeqdedupeError:
    """A NOT_OWNER with `owner_address` where that is known, and is not this sidecar's own: a producer of its own that
    it has lost may still be listed. One with the sidecar's own name at another address is told loudly: each of the two
    moves the subscription that keeps what both need. One with both is told in the message: it may be either."""
    try:
        writer = await _writer(topic, admin)
        name, address = (writer.name.rpartition("-")[0], writer.metadata.get(ADDRESS, "")) if writer else ("", "")
    except SeqdedupeError:
        name, address = "", marked_address
    is_named_as_this = name == f"seqdedupe-{own_name}"
    if address == own_address and is_named_as_this:
        whose = "a producer of its own from before, of which Pulsar lets go, or another process that was given both"
        return error("NOT_OWNER", f"{e.message}; it has the name {own_name} and the address of this sidecar: {whose}")
    if not address or address == own_address:
        return e
    message = f"{e.message}; it is the sidecar at {address}"
    if is_named_as_this:
        message += (
            f", which has this one's instance name {own_name}: stop one of the two, and start it with an instance_name "
            "of its own and an empty data directory"
        )
        logger.error("%s", message)
    return error("NOT_OWNER", message, owner_address=address)


async def owner_of(topic: str, admin: Admin) -> str:
    """The address of the sidecar that writes to the topic; empty if none does. Raises why it is not known now."""
    writer = await _writer(topic, admin)
    return writer.metadata.get(ADDRESS, "") if writer else ""


async def _writer(topic: str, admin: Admin) -> Publisher | None:
    publishers = (await admin.stats(topic)).publishers
    return publishers[0] if publishers else None
