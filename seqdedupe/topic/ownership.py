"""Whose a topic is, where topics are spread over processes by their names."""

from collections.abc import Iterable

from seqdedupe.errors import SeqdedupeError, error


class Ownership:
    """Of a process that has all topics there are, or is told by its log which ones."""

    def check(self, topic: str) -> None:
        """Raises NOT_OWNER if a topic of this full name is another process's."""

    def check_found(self, topics: Iterable[str]) -> None:
        """Raises SHARD_CLAIMED_TWICE if a topic that was found in the data directory is another process's."""

    def missing(self, topic: str) -> SeqdedupeError:
        """What is said of a topic that is not here, though it is of this process."""
        return error("TOPIC_NOT_FOUND", f"there is no topic {topic}", topic=topic)
