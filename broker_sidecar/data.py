"""The contents of a data directory, opened: the store, the logs, and the topics on them."""

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from broker_sidecar.cluster.departures import Departures
from broker_sidecar.cluster.peers import Neighbours, Peers, claim_of, listed
from broker_sidecar.config import Config
from seqdedupe.address import SidecarAddress
from seqdedupe.errors import INSTALL_HINT, SeqdedupeError, error
from seqdedupe.log.contract import Logs
from seqdedupe.log.embedded.commit import Committer
from seqdedupe.log.embedded.logs import EmbeddedLogs, incarnations
from seqdedupe.store import directories
from seqdedupe.store.db import Store
from seqdedupe.store.parts import LogKind, TopicRecord, TopicState
from seqdedupe.topic.attached import AttachedTopic
from seqdedupe.topic.base import State
from seqdedupe.topic.clock import Clock
from seqdedupe.topic.directory import Topics
from seqdedupe.topic.listing import Fetching
from seqdedupe.topic.lives import BrokersTopics, PublishedTopics
from seqdedupe.topic.policy import BYTES_A_MB, Applied
from seqdedupe.topic.topic import Topic
from seqdedupe.topic.window_runs import WindowMemory
from seqdedupe.transfer.backup import LastBackup

if TYPE_CHECKING:
    from broker_sidecar.cluster.pulsar_cluster import LogCluster

logger = logging.getLogger("seqdedupe.server")

LOOK_SECONDS = 60.0
"""The maximum time until this process knows a topic that another sidecar has created, unless a client opens a producer
on the topic earlier."""

RETENTION_SECONDS = 300.0
"""The interval between searches for messages that retention by time may drop. The searches include topics without new
messages."""

EXIT_FATAL = 70
"""The exit status when the log can no longer be trusted. Recovery at the next start decides."""


def fatal(why: str) -> None:
    """End the process."""
    # End at once: code that continued to run could acknowledge messages that are not on the disk.
    logger.critical("the sidecar ends: %s", why)
    logging.shutdown()
    os._exit(EXIT_FATAL)


class Data:
    """The data directory of a sidecar. It has `topics` if the sidecar writes the logs itself, and `brokers_topics` if a
    broker writes them.

    Raises INVALID_CONFIGURATION if the directory contains logs although the key `log` has a value other than
    `embedded`. Raises the errors of `Store.open` and `LogCluster`.
    """

    def __init__(
        self,
        config: Config,
        on_state: Callable[[str, State | None], None],
        *,
        rebuild_store: bool = False,
        gives_up_journal: bool = False,
    ) -> None:
        self._config = config
        folder = Path(config.data_directory)
        if config.log != "embedded":
            _check_no_logs(config.log, folder / "logs")
        self.store = store = Store.open(folder / "store")
        self._clock = Clock(store)
        self.last_backup = LastBackup(store)
        self.logs: EmbeddedLogs | None = None
        self.peers: Peers | None = None
        self.leaving: Departures | None = None
        self.cluster: LogCluster | None = None
        self.topics: Topics[Topic] | None = None
        self.brokers_topics: Topics[AttachedTopic] | None = None
        settings: dict[str, Any] = {
            "on_state": on_state,
            "max_topics": config.max_topics,
            "allow_auto_topic_creation": config.allow_auto_topic_creation,
            "applied": _applied(config),
        }
        if config.log == "broker":
            self.brokers_topics = Topics(store, lambda told: BrokersTopics(store, on_state=told), **settings)
            return
        logs: Logs
        if config.log == "pulsar":
            self.cluster = _cluster(config, store)
            kind, logs = LogKind.PULSAR, self.cluster.logs
        else:
            self.peers = _peers(config, store)
            self.logs = self._own_logs(folder / "logs", gives_up_journal)
            kind, logs = LogKind.EMBEDDED, self.logs
        self.topics = Topics(
            store,
            lambda told: PublishedTopics(
                store,
                logs,
                log=kind,
                on_state=told,
                rebuild_store=rebuild_store,
                stands_by=self._stands_by,
                window_memory=WindowMemory(config.deduplication_window_memory_in_mb * BYTES_A_MB),
                clock=self._clock,
            ),
            rebuild_store=rebuild_store,
            ownership=self.peers,
            **settings,
        )
        if self.logs is not None:
            _remove_arrivals(store, self.logs)
            self.leaving = Departures(self.logs, self.topics, Neighbours(listed(config)))

    def _own_logs(self, folder: Path, gives_up_journal: bool) -> EmbeddedLogs:
        store, clock = self.store, self._clock
        return EmbeddedLogs(
            folder,
            earliest_ms=lambda: clock.now().earliest_ms,
            fatal=fatal,
            has_journal=store.has_journal,
            tell_journal=store.tell_journal,
            gives_up_journal=gives_up_journal,
            known_names=lambda: _names(store),
        )

    def _stands_by(self, topic: str) -> bool:
        return self._config.standby and self.cluster is not None and self.cluster.is_near(topic)

    @property
    def all_topics(self) -> Topics[Any]:
        """The topics of either kind."""
        topics = self.topics or self.brokers_topics
        if topics is None:
            raise RuntimeError("a data directory has topics of one kind")
        return topics

    @property
    def committer(self) -> Committer | None:
        """The thread that writes the sidecar's own logs, if the thread already runs."""
        return self.logs.running_committer if self.logs is not None else None

    @property
    def clock_ahead_ms(self) -> int:
        """The number of milliseconds by which the clock was ahead of the last trusted time at the start, if suspicious;
        else 0."""
        return self._clock.ahead_ms

    def has_moved(self, record: TopicRecord) -> bool:
        """Return whether a topic of this sidecar has moved to another sidecar. Raises OSError."""
        return self.logs is not None and self.logs.has_moved(record.incarnation)

    def begin_looking(self) -> None:
        """Start the background checks: of the clock; for messages that retention drops; for damage, if configured.

        In a cluster, also look for new topics, and fetch the state of topics whose state is missing in this sidecar."""
        self.all_topics.in_background(self._clock.keep_looking())
        if self.logs is not None and self.topics is not None:
            self.topics.in_background(_keep_trimming(self.topics))
        if self.logs is not None and (bytes_per_second := self._config.scrub_bytes_per_second):
            self.logs.scrub(bytes_per_second)
        if self.cluster is not None:
            self.all_topics.in_background(_keep_looking(self.all_topics))
            fetching = Fetching(self.all_topics, self.cluster.owner_of, self.cluster.neighbours.snapshot_of)
            self.all_topics.in_background(fetching.run())

    def listens(self, address: SidecarAddress) -> None:
        """Record the address at which the sidecar listens. This address is advertised unless the configuration contains
        an advertised address."""
        advertised = self._config.advertised_address
        reached_at = str(SidecarAddress.parse(advertised) if advertised else address)
        if self.cluster is not None and not advertised:
            self.cluster.shared.address = reached_at
        if self.leaving is not None:
            self.leaving.address = reached_at
        if self.peers is not None:
            self.all_topics.in_background(self.peers.keep_looking(fatal))

    async def close(self) -> None:
        """Close files, locks, connections and threads."""
        if self.logs is not None:
            await self.logs.close()
        await asyncio.to_thread(self.store.close)


def _names(store: Store) -> dict[int, tuple[str, int]]:
    """Return the active topics by incarnation, with their numbers of partitions."""
    active = (record for record in store.topics() if record.state is TopicState.ACTIVE)
    return {record.incarnation: (record.name, record.partitions) for record in active}


def _remove_arrivals(store: Store, logs: EmbeddedLogs) -> None:
    """Drop topics that were still arriving from other sidecars when the process ended.

    Data that cannot be removed now is removed by a later start. The folders are removed last, because they show which
    parts are still in the store.
    """
    try:
        coming = logs.empty_arrivals()
        # If a topic has moved away and did not finish coming back, its snapshots are not needed either.
        here = {one.incarnation for one in store.topics() if one.state is TopicState.ACTIVE}
        coming -= {one for one in here & coming if not logs.has_moved(one)}
        if coming:
            store.remove_snapshots(sorted(coming))
        logs.remove_arrivals()
    except (SeqdedupeError, OSError) as e:
        logger.warning("the rest of unfinished moves from other sidecars cannot be removed now: %s", e)


async def _keep_looking(topics: Topics[Any]) -> None:
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        try:
            await topics.looking.once()
        except SeqdedupeError as e:
            logger.warning("the search for new topics in the cluster has failed: %s", e)


async def _keep_trimming(topics: Topics[Topic]) -> None:
    """Trim one topic after the other, so that other work gets its turn even with very many topics."""
    while True:
        await asyncio.sleep(RETENTION_SECONDS)
        for entry in topics.registry:
            if (topic := entry.topic) is not None:
                topic.trimmer.look_by_time()
            await asyncio.sleep(0)


def _peers(config: Config, store: Store) -> Peers | None:
    """Return the sidecars with the other shards, None if there are none. When this returns, the directory's claim is
    durable.

    Raises SHARD_CLAIMED_TWICE if the directory has a topic of another shard, and the errors of `claim_of`.
    """
    claim, is_said = claim_of(config)
    if claim is None:
        return None
    peers = Peers(claim, listed(config))
    peers.check_found(record.name for record in store.topics())
    if not is_said:
        directories.write(Path(config.data_directory), claim)
    return peers


def _cluster(config: Config, store: Store) -> "LogCluster":
    try:
        from broker_sidecar.cluster.pulsar_cluster import LogCluster
    except ModuleNotFoundError as e:
        raise error(
            "INVALID_CONFIGURATION",
            f"log = 'pulsar' needs {e.name}, which is not installed",
            hint=INSTALL_HINT.format("sidecar,pulsar"),
            key="log",
        ) from e
    return LogCluster(config, store)


def _check_no_logs(log: str, folder: Path) -> None:
    """Raise INVALID_CONFIGURATION if there are logs. Logs without records in the store would otherwise be ignored."""
    if folder.is_dir() and incarnations(folder):
        raise error(
            "INVALID_CONFIGURATION", f"log = {log!r}: the data directory has embedded logs, in {folder}",
            key="log",
        )  # fmt: skip


def _applied(config: Config) -> Applied:
    """Return the values of the configuration that the policy of a topic or namespace may override."""
    return Applied(
        deduplication_entries_interval=config.deduplication_entries_interval,
        deduplication_snapshot_interval_seconds=config.deduplication_snapshot_interval_seconds,
        retention_size_in_mb=config.default_retention_size_in_mb,
        retention_time_in_minutes=config.default_retention_time_in_minutes,
        deduplication_producer_inactivity_timeout_minutes=config.deduplication_producer_inactivity_timeout_minutes,
    )
