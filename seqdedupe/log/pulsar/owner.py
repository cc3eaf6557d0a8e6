"""Who owns a topic: what its statistics say of who writes to it, and else its last marker."""

import logging

from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.log.pulsar.admin import Admin

logger = logging.getLogger("seqdedupe.log")

ADDRESS = "address"
"""The property of a sidecar's producer that says where the sidecar can be reached."""


async def not_owner(
    e: SeqdedupeError, admin: Admin, topic: str, own_address: str, own_name: str, marked_address: str
) -> SeqdedupeError:
    """A NOT_OWNER with `owner_address` where that is known, and is not this sidecar's own: a producer of its own that
    it has lost may still be listed. One with the sidecar's own name at another address is told loudly: each of the two
    moves the subscription that keeps what both need."""
    name = ""
    try:
        publishers = (await admin.stats(topic)).publishers
        if publishers:
            name, address = publishers[0].name.rpartition("-")[0], publishers[0].metadata.get(ADDRESS, "")
        else:
            address = ""
    except SeqdedupeError:
        address = marked_address
    if not address or address == own_address:
        return e
    message = f"{e.message}; it is the sidecar at {address}"
    if name == f"seqdedupe-{own_name}":
        message += f", which has this one's instance name {own_name}: is its data directory a copy? Give one a new one"
        logger.error("%s", message)
    return error("NOT_OWNER", message, owner_address=address)
