"""What a sidecar's topics know of a name."""

from typing import Any

from seqdedupe.store.parts import TopicRecord
from seqdedupe.topic.directory import Topics


def record_of(topics: Topics[Any], name: str) -> TopicRecord:
    """The record of the topic of this full name, which is there."""
    record = topics.registry.record(name)
    assert record is not None, name
    return record
