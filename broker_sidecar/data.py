"""What a data directory holds, opened: the store, the logs, and the topics on them."""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from broker_sidecar.config import Config
from seqdedupe.log.embedded.logs import EmbeddedLogs
from seqdedupe.store.db import Store
from seqdedupe.topic.directory import Topics
from seqdedupe.topic.snapshotter import Intervals
from seqdedupe.topic.state import State

logger = logging.getLogger("seqdedupe.server")

MB = 1024 * 1024
MILLISECONDS_A_MINUTE = 60_000
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
    """The data directory of a sidecar. Raises what `Store.open` raises."""

    def __init__(
        self, config: Config, on_state: Callable[[str, State | None], None], *, rebuild_store: bool = False
    ) -> None:
        folder = Path(config.data_directory)
        size = config.default_retention_size_in_mb
        minutes = config.default_retention_time_in_minutes
        self._store = Store.open(folder / "store")
        self._logs = EmbeddedLogs(
            folder / "logs",
            clock_ms=_clock_ms,
            fatal=_fatal,
            retention_size_bytes=None if size < 0 else size * MB,
            retention_time_ms=None if minutes < 0 else minutes * MILLISECONDS_A_MINUTE,
        )
        self.topics = Topics(
            self._store,
            self._logs,
            max_topics=config.max_topics,
            allow_auto_topic_creation=config.allow_auto_topic_creation,
            intervals=Intervals(config.deduplication_entries_interval, config.deduplication_snapshot_interval_seconds),
            on_state=on_state,
            rebuild_store=rebuild_store,
        )

    async def close(self) -> None:
        """Lets go of files, locks and threads."""
        await self._logs.close()
        await asyncio.to_thread(self._store.close)
