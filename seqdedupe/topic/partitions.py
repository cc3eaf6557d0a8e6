"""Which partitioned topics there are, each with so many partitions: names that other topics cannot have."""

from collections.abc import Iterator

from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.names import partition_name, whole_of
from seqdedupe.store.topics import TopicRecord


class Partitions:
    """Partitioned topics by full name, and how many partitions each has."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self.unused: dict[str, int] = {}
        """How many a cluster has added later, where it has: nobody uses them."""

    def __contains__(self, name: str) -> bool:
        return name in self._counts

    def __iter__(self) -> Iterator[str]:
        return iter(self._counts)

    def names(self, whole: str) -> list[str]:
        """The full names of a topic's partitions, in order. Raises KeyError."""
        return [partition_name(whole, k) for k in range(self._counts[whole])]

    def claim(self, whole: str, partitions: int) -> None:
        """There is a partitioned topic of this name from now on."""
        self._counts[whole] = partitions

    def release(self, whole: str) -> None:
        """There is none any more."""
        del self._counts[whole]

    def learn(self, record: TopicRecord) -> SeqdedupeError | None:
        """What a stored record says of the partitioned topic of which it is a partition; why that cannot be."""
        whole = whole_of(record.name)
        known = self._counts.setdefault(whole, record.partitions) if whole is not None else 0
        if whole is not None and known == record.partitions and record.name in self.names(whole):
            return None
        why = f"the record of {record.name} says that it is one of {record.partitions} partitions"
        return error("STORE_DAMAGED", why if whole is None else f"{why}, and another one of {whole} says {known}")

    def check_is_none(self, name: str) -> None:
        """Raises TOPIC_IS_PARTITIONED for the name of a partitioned topic: it has no log of its own."""
        if name in self._counts:
            count = self._counts[name]
            message = f"the topic {name} is partitioned: its messages are in {partition_name(name, 0)} and on, {count}"
            raise error("TOPIC_IS_PARTITIONED", f"{message} in all", topic=name, partitions=count)

    def check_is_free(self, name: str) -> None:
        """Raises TOPIC_EXISTS, INVALID_TOPIC_NAME if a topic of this name would be taken for a partitioned one, or for
        a partition of one."""
        if name in self._counts:
            count = self._counts[name]
            raise error("TOPIC_EXISTS", f"the topic {name} is there already, with {count} partitions", topic=name)
        whole = whole_of(name)
        if whole is not None and whole in self._counts:
            raise error(
                "INVALID_TOPIC_NAME",
                f"{name} would be taken for a partition of {whole}, which has {self._counts[whole]} for good",
                hint="Choose another name.",
            )
