"""Conversion of policies and topics between the library's types and the messages of `admin.proto`."""

import time
from collections.abc import Sequence

from seqdedupe.names import whole_of
from seqdedupe.topic.base import State, TopicBase
from seqdedupe.topic.policy import Applied, Policy
from seqdedupe.topic.registry import Closed
from seqdedupe.topic.topic import Topic
from seqdedupe.v1 import admin_pb2


def policy_to_proto(policy: Policy | Applied) -> admin_pb2.TopicPolicy:
    """Return a policy that is set, or the policy in force, as a message."""
    message = admin_pb2.TopicPolicy()
    policy.fill(message)
    return message


ENTRY_FORMATS = {
    "": admin_pb2.ENTRY_FORMAT_UNSPECIFIED,
    "plain": admin_pb2.ENTRY_FORMAT_PLAIN,
    "packed": admin_pb2.ENTRY_FORMAT_PACKED,
    "native": admin_pb2.ENTRY_FORMAT_NATIVE,
}


WORST_FIRST = (
    State.DAMAGED,
    State.RECOVERING,
    State.TERMINATED,
    State.STANDBY,
    State.READ_ONLY,
    State.DRAINING,
)

_SUMMED = (
    "log_bytes",
    "not_dup",
    "dup",
    "unknown",
    "refused",
    "resets",
    "purged",
    "resumed_after_purge",
    "damaged_places",
    "damaged_messages",
    "log_void",
    "log_repeats",
    "log_foreign",
    "log_earlier",
    "may_lose_messages",
    "not_durable_messages",
    "window_messages",
    "window_forgotten",
    "window_memory_bytes",
    "window_imported",
)
"""Fields for which a partitioned topic has the sum over its partitions."""


def partitioned_to_proto(whole: str, partitions: Sequence[TopicBase | Closed | None], unused: int) -> admin_pb2.Topic:
    """Return a partitioned topic as it is now. None is a missing partition."""
    message = admin_pb2.Topic(
        name=whole,
        partitions=len(partitions),
        unused_partitions=unused,
        state=State.SERVING.value,  # type: ignore[arg-type]
    )
    parts = [topic_to_proto(topic) for topic in partitions if topic is not None]
    for name in _SUMMED:
        setattr(message, name, sum(getattr(part, name) for part in parts))
    for name in ("deduplication_mode", "deduplication_route"):
        setattr(message, name, max((getattr(part, name) for part in parts), default=0))
    if with_policy := [part for part in parts if part.HasField("policy")]:
        # The partitions share a policy. If one was set separately, report the guarantees that hold in all of them.
        weakest = min(with_policy, key=lambda part: part.policy.deduplication_enabled)
        message.policy.CopyFrom(weakest.policy)
    message.window_first_publish_time_ms = max(
        (part.window_first_publish_time_ms for part in parts if part.window_forgotten), default=0
    )
    message.window_imported_missing = any(part.window_imported_missing for part in parts)
    message.may_lose_ms = max((part.may_lose_ms for part in parts), default=0)
    message.entry_format = max((part.entry_format for part in parts), default=0)  # type: ignore[assignment]
    for state in WORST_FIRST:
        if one := next((part for part in parts if part.state == state.value), None):
            message.state, message.why = one.state, f"{one.name}: {one.why}"
            break
    if missing := [k for k, topic in enumerate(partitions) if topic is None]:
        message.state = State.DAMAGED.value  # type: ignore[assignment]
        message.why = f"these partitions are missing: {', '.join(map(str, missing))}"
    return message


def topic_to_proto(topic: TopicBase | Closed, partitions: int = 0) -> admin_pb2.Topic:
    """Return a topic as it is now. `partitions` is from its record."""
    message = _topic_to_proto(topic)
    if partitions:
        message.partition_of = whole_of(message.name) or ""
    return message


def _topic_to_proto(topic: TopicBase | Closed) -> admin_pb2.Topic:
    if isinstance(topic, Closed):
        return admin_pb2.Topic(
            name=topic.record.name,
            incarnation=topic.record.incarnation,
            state=topic.state.value,  # type: ignore[arg-type]
            why=f"{topic.told} {topic.why.hint}" if topic.state is State.DAMAGED else str(topic.why),
        )
    counters, damage, skipped = topic.counters, topic.damage_found, topic.skipped
    interval = topic.applied.flush_interval
    message = admin_pb2.Topic(
        name=topic.name,
        incarnation=topic.incarnation,
        term=topic.term,
        state=topic.state.value,  # type: ignore[arg-type]
        policy=policy_to_proto(topic.applied),
        set_policy=policy_to_proto(topic.policy),
        first_index=topic.first_index,
        last=topic.certain_position.to_proto(),
        producers=topic.producers.known_count(),
        log_bytes=topic.log_bytes,
        snapshot_index=topic.keeper.snapshot_index,
        not_dup=counters.not_dup,
        dup=counters.dup,
        unknown=counters.unknown,
        refused=counters.refused,
        why=topic.why,
        resets=counters.resets,
        purged=counters.purged,
        resumed_after_purge=counters.resumed_after_purge,
        damaged_places=damage.places,
        damaged_messages=damage.messages,
        log_void=skipped.void,
        log_repeats=skipped.repeats,
        log_foreign=skipped.foreign,
        log_earlier=skipped.earlier,
        entry_format=ENTRY_FORMATS[topic.entry_format],
        may_lose_messages=0 if interval.is_every_commit else interval.messages - 1,
        may_lose_ms=0 if interval.is_every_commit else interval.ms,
        not_durable_messages=topic.not_durable,
    )
    _fill_window(message, topic)
    return message


def _fill_window(message: admin_pb2.Topic, topic: TopicBase) -> None:
    """Set how the topic distinguishes messages, and how far back it can recognize duplicates."""
    window = topic.window
    if window is None:
        # For a topic without a snapshot, this is not known before its log is read.
        if topic.knows_its_end:
            message.deduplication_mode = admin_pb2.DEDUPLICATION_MODE_SEQUENCE_ID
        return
    message.deduplication_mode = admin_pb2.DEDUPLICATION_MODE_DEDUPLICATION_ID
    if topic.policy.route is not None:
        message.deduplication_route = topic.policy.route.value  # type: ignore[assignment]
    message.window_first_index = message.window_forgotten = window.first_index
    message.window_first_publish_time_ms = window.first_time_ms
    if window.first_index and not len(window):
        # Everything in the window is forgotten, and the time is not known: only messages from now on will be known.
        message.window_first_publish_time_ms = time.time_ns() // 1_000_000
    message.window_messages = len(window)
    message.window_memory_bytes = window.memory_bytes
    if topic.policy.imported is not None:
        message.window_imported = topic.policy.imported.ids
    if isinstance(topic, Topic):
        message.window_memory_bytes += topic.ids.imported.memory_bytes
        message.window_imported_missing = topic.ids.imported.is_missing
    message.window_messages_on_disk = window.on_disk
