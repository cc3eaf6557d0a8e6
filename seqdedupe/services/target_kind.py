"""The kind of the topic that a relay or a pipe publishes to: it must be one of sequence IDs."""

from seqdedupe.client import Client
from seqdedupe.errors import SeqdedupeError, UnavailableError, error
from seqdedupe.v1 import admin_pb2


def check_kind(topic: admin_pb2.Topic, who: str) -> None:
    """Raise INVALID_OPTION for a topic of deduplication IDs."""
    if topic.deduplication_mode == admin_pb2.DEDUPLICATION_MODE_DEDUPLICATION_ID:
        raise error(
            "INVALID_OPTION",
            f"{topic.name} is a topic of deduplication IDs, and {who} publishes with sequence IDs",
            hint="Give another topic. `seqdedupe topics create NAME` makes one of sequence IDs.",
        )


async def check_target(client: Client, topic: str, who: str) -> None:
    """Raise INVALID_OPTION for a topic of deduplication IDs; UnavailableError if the sidecar does not answer.

    A topic that does not exist has sequence IDs once it is made. Where the sidecar does not let the caller ask, its
    refusal shows when the topic is opened.
    """
    try:
        found = await client.admin.topic(topic)
    except UnavailableError:
        raise
    except SeqdedupeError:
        return
    check_kind(found, who)
