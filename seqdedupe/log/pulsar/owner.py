"""Who owns a topic: what its statistics say of who writes to it, and else its last marker."""

from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.log.pulsar.admin import Admin

ADDRESS = "address"
"""The property of a sidecar's producer that says where the sidecar can be reached."""


async def not_owner(
    e: SeqdedupeError, admin: Admin, topic: str, own_address: str, marked_address: str
) -> SeqdedupeError:
    """A NOT_OWNER with `owner_address` where that is known, and is not this sidecar's own: a producer of its own that
    it has lost may still be listed."""
    try:
        address = await owner_of(topic, admin)
    except SeqdedupeError:
        address = marked_address
    if not address or address == own_address:
        return e
    return error("NOT_OWNER", f"{e.message}; it is the sidecar at {address}", owner_address=address)


async def owner_of(topic: str, admin: Admin) -> str:
    """The address of the sidecar that writes to the topic; empty if none does. Raises why it is not known now."""
    publishers = (await admin.stats(topic)).publishers
    return publishers[0].metadata.get(ADDRESS, "") if publishers else ""
