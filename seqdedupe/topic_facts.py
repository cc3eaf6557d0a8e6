"""Facts about topics in the messages of `admin.proto`. The terminal and the web page show these facts alike. Names that
people enter for values of these messages."""

from seqdedupe.errors import error
from seqdedupe.figures import first_unread
from seqdedupe.v1 import admin_pb2

ORDERS = {
    "rate": admin_pb2.STATISTICS_ORDER_RATE,
    "name": admin_pb2.STATISTICS_ORDER_NAME,
    "state": admin_pb2.STATISTICS_ORDER_STATE,
    "trouble": admin_pb2.STATISTICS_ORDER_TROUBLE,
    "snapshot": admin_pb2.STATISTICS_ORDER_SNAPSHOT,
}
"""Orders by the names that people enter."""

ENTRY_FORMATS = {
    "": admin_pb2.ENTRY_FORMAT_UNSPECIFIED,
    "plain": admin_pb2.ENTRY_FORMAT_PLAIN,
    "packed": admin_pb2.ENTRY_FORMAT_PACKED,
    "native": admin_pb2.ENTRY_FORMAT_NATIVE,
}
"""Entry formats by name. The empty name stands for the sidecar's default, or for a topic without a format."""


def state_name(state: int) -> str:
    """Return the name of a topic's state."""
    known = state in admin_pb2.TopicState.values()  # a newer sidecar may have more states
    return admin_pb2.TopicState.Name(state).removeprefix("TOPIC_STATE_") if known else str(state)  # type: ignore[arg-type]


def is_open(topic: admin_pb2.Topic) -> bool:
    """Return whether the state of the topic's log is known: the topic is not damaged, and has been opened."""
    return topic.HasField("last") and topic.state != admin_pb2.TOPIC_STATE_DAMAGED


def beyond_snapshot(topic: admin_pb2.Topic) -> int | None:
    """Return the number of messages after the last durable snapshot, which a start would read; None if not known."""
    return topic.last.index + 1 - topic.snapshot_index if is_open(topic) else None


def cursor_lag(cursor: admin_pb2.TopicCursor, topic: admin_pb2.Topic) -> int | None:
    """Return the number of messages after a cursor's position; None if the number is not known."""
    if not is_open(topic):
        return None
    first_index = first_unread(cursor.position, topic.last.incarnation, topic.first_index)
    return max(0, topic.last.index + 1 - first_index)


def is_routed_by_key(whole: admin_pb2.Topic) -> bool:
    """Return whether the key of a message selects its partition, in a topic of deduplication IDs. Raises RECOVERING
    while the sidecar has not yet learned the topic's deduplication route."""
    if whole.deduplication_mode == admin_pb2.DEDUPLICATION_MODE_UNSPECIFIED:
        raise error("RECOVERING", f"it is not known yet how the messages of topic {whole.name} find their partitions")
    return whole.deduplication_route == admin_pb2.DEDUPLICATION_ROUTE_KEY
