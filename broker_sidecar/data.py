"""What a data directory holds, opened: the store, the logs, and the topics on them."""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from broker_sidecar.config import Config
from seqdedupe.errors import error
from seqdedupe.log.embedded.logs import EmbeddedLogs
from seqdedupe.store.db import Store
from seqdedupe.topic.attached import AttachedTopic
from seqdedupe.topic.directory import Topics
from seqdedupe.topic.of_brokers import BrokersTopics
from seqdedupe.topic.policy import Applied, GapPolicy, OverlapPolicy
from seqdedupe.topic.published import PublishedTopics
from seqdedupe.topic.publishing import Topic
from seqdedupe.topic.state import State

logger = logging.getLogger("seqdedupe.server")

EXIT_FATAL = 70
"""Exit status when the log can no longer be trusted: recovery at the next start decides."""


def _clock_ms() -> int:
    return time.time_ns() // 1_000_000


def _fatal(why: str) -> None:
    # At once: whatever would still run could acknowledge what is not on the disk.
    logger.critical("the sidecar ends: %s", why)
    logging.shutdown()
    os._exit(EXIT_FATAL)


class Data:
    """The data directory of a sidecar: `topics` if the logs are its own, `brokers_topics` if they are a broker's.

    Raises INVALID_CONFIGURATION if `log` is a broker's and there are logs, and what `Store.open` raises.
    """

    def __init__(
        self, config: Config, on_state: Callable[[str, State | None], None], *, rebuild_store: bool = False
    ) -> None:
        folder = Path(config.data_directory)
        if config.log == "broker":
            _check_no_logs(folder / "logs")
        self._store = store = Store.open(folder / "store")
        self._logs: EmbeddedLogs | None = None
        self._scrub_bytes_per_second = config.scrub_bytes_per_second
        self.topics: Topics[Topic] | None = None
        self.brokers_topics: Topics[AttachedTopic] | None = None
        limits: dict[str, Any] = {
            "max_topics": config.max_topics,
            "allow_auto_topic_creation": config.allow_auto_topic_creation,
            "applied": _applied(config),
        }
        if config.log == "broker":
            self.brokers_topics = Topics(
                store,
                lambda told: BrokersTopics(
                    store,
                    admission_timeout_seconds=config.admission_timeout_seconds,
                    on_state=told,
                ),
                on_state=on_state,
                **limits,
            )
            return
        self._logs = logs = EmbeddedLogs(folder / "logs", clock_ms=_clock_ms, fatal=_fatal)
        self.topics = Topics(
            store,
            lambda told: PublishedTopics(store, logs, on_state=told, rebuild_store=rebuild_store),
            on_state=on_state,
            rebuild_store=rebuild_store,
            **limits,
        )

    @property
    def all_topics(self) -> Topics[Any]:
        """Whichever there are."""
        topics = self.topics or self.brokers_topics
        if topics is None:
            raise RuntimeError("a data directory has topics of one kind")
        return topics

    def begin_scrub(self) -> None:
        """Looks for damage in the background from now on, if the configuration says so."""
        if self._logs is not None and self._scrub_bytes_per_second:
            self._logs.scrub(self._scrub_bytes_per_second)

    async def close(self) -> None:
        """Lets go of files, locks and threads."""
        if self._logs is not None:
            await self._logs.close()
        await asyncio.to_thread(self._store.close)


def _check_no_logs(folder: Path) -> None:
    """Raises INVALID_CONFIGURATION if there are any: without the store's records nobody else would notice them."""
    if folder.is_dir() and any(entry.is_dir() for entry in folder.iterdir()):
        raise error(
            "INVALID_CONFIGURATION", f"log = 'broker': the data directory has logs of a sidecar's own, in {folder}",
            key="log",
        )  # fmt: skip


def _applied(config: Config) -> Applied:
    """What the sidecar's configuration says, and a topic or namespace may say otherwise."""
    return Applied(
        deduplication_enabled=config.deduplication_enabled,
        overlap=OverlapPolicy[config.overlap_policy.upper()],
        deduplication_entries_interval=config.deduplication_entries_interval,
        deduplication_snapshot_interval_seconds=config.deduplication_snapshot_interval_seconds,
        retention_size_in_mb=config.default_retention_size_in_mb,
        retention_time_in_minutes=config.default_retention_time_in_minutes,
        gap=GapPolicy[config.gap_policy.upper()],
        deduplication_producer_inactivity_timeout_minutes=config.deduplication_producer_inactivity_timeout_minutes,
    )
