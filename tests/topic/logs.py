"""Logs in memory, for tests of what stands on all logs of a sidecar."""

from collections.abc import Callable, Container
from typing import Any

from seqdedupe.errors import error
from seqdedupe.log.contract import AS_USUAL, Layout, LogName
from tests.log.faulty import FaultyLog, Storage


class MemoryLogs:
    """Satisfies `seqdedupe.log.contract.Logs`. `storages` outlive the process; `before` hears the name of each call."""

    unfinished: frozenset[int] = frozenset()

    def __init__(self, storages: dict[int, tuple[str, Storage]], before: Callable[[str], None] = lambda name: None):
        self.storages = storages
        self.before = before

    async def create(
        self, incarnation: int, topic: str, secret: bytes, partitions: int = 0, layout: Layout = AS_USUAL
    ) -> None:
        self.before("create")
        _, storage = self.storages.setdefault(incarnation, (topic, Storage(incarnation)))
        storage.partitions = partitions

    async def open(self, incarnation: int, covered_index: int, secret: bytes | None = None, place: bytes = b"") -> Any:
        self.before("open")
        if incarnation not in self.storages:
            raise error("LOG_DAMAGED", f"there is no log {incarnation}")
        return FaultyLog(self.storages[incarnation][1], automatic=True)

    async def list(self, without: Container[str] = ()) -> list[LogName]:
        there = sorted(self.storages.items())
        return [
            LogName(incarnation, topic, storage.partitions, is_unfinished=incarnation in self.unfinished)
            for incarnation, (topic, storage) in there
        ]

    async def take_over(self, *_: object) -> None:
        self.before("take_over")

    async def announce(self, whole: str) -> None:
        self.before("announce")

    async def delete(self, *incarnations: int) -> None:
        for incarnation in incarnations:
            self.before("delete")
            self.storages.pop(incarnation, None)

    async def close(self) -> None:
        pass
