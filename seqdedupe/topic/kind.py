"""What the directory of topics needs of a kind of log: topics on it, and what is there."""

from collections.abc import Container
from typing import Protocol, TypeVar

from seqdedupe.log.contract import AS_USUAL, Layout, LogName
from seqdedupe.store.snapshots import Loaded
from seqdedupe.store.topics import LogKind, TopicRecord
from seqdedupe.topic.base import TopicBase
from seqdedupe.topic.keeper import Stored
from seqdedupe.topic.policy import Applied

T_co = TypeVar("T_co", bound=TopicBase, covariant=True)


class TopicKind(Protocol[T_co]):
    """Topics on one kind of log."""

    log: LogKind

    async def list(self, without: Container[str] = ()) -> list[LogName]:
        """The logs that are there. See `Logs.list`."""

    async def make(self, record: TopicRecord, applied: Applied, layout: Layout = AS_USUAL) -> T_co:
        """A topic on a new log, ready to be used, which inherits this policy. `layout`: see `Logs.create`.

        Raises why there is none; then the log is `delete`d.
        """

    async def load(self, record: TopicRecord) -> Stored:
        """What the store has of a topic, which takes long where that is much. Raises what is damaged,
        STORE_UNAVAILABLE."""

    async def open(
        self, record: TopicRecord, applied: Applied, *, without_snapshot: bool = False, stored: Stored | None = None
    ) -> T_co:
        """A topic on the log that is there, which inherits this policy. `without_snapshot`: it need not have one.
        `stored` is what `load` has answered, if it was asked before.

        Raises what is damaged, or why it cannot be opened now.
        """

    async def check_snapshot(self, record: TopicRecord, live: TopicBase | None, loaded: Loaded | None) -> None:
        """Whether a topic can go on from this snapshot, or from its log alone. Changes nothing.

        `live` is the topic if it is open, or was until it was closed just now.


        Raises POSITION_AFTER_END, POSITION_TRIMMED, POSITION_DIVERGED, INVALID_REQUEST, LOG_INCOMPLETE, and why the log
        cannot be looked at.
        """

    async def announce(self, whole: str) -> None:
        """All partitions of a new partitioned topic are ready. See `Logs.announce`."""

    async def delete(self, *incarnations: int) -> None:
        """Removes logs that are not open, those that are there. See `Logs.delete`."""
