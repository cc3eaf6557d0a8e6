"""Topics and policies as the messages of `admin.proto`."""

from seqdedupe.topic.closed import Closed
from seqdedupe.topic.policy import Applied, Policy
from seqdedupe.topic.state import State, TopicBase
from seqdedupe.v1 import admin_pb2


def policy_to_proto(policy: Policy | Applied) -> admin_pb2.TopicPolicy:
    """What is set, or what is in force."""
    message = admin_pb2.TopicPolicy()
    policy.fill(message)
    return message


def topic_to_proto(topic: TopicBase | Closed) -> admin_pb2.Topic:
    """A topic as it is now."""
    if isinstance(topic, Closed):
        return admin_pb2.Topic(
            name=topic.record.name,
            incarnation=topic.record.incarnation,
            state=topic.state.value,  # type: ignore[arg-type]
            why=f"{topic.why} {topic.why.hint}" if topic.state is State.DAMAGED else str(topic.why),
        )
    counters, damage = topic.counters, topic.damage_found
    return admin_pb2.Topic(
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
        snapshot_index=topic.snapshot_index,
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
    )
