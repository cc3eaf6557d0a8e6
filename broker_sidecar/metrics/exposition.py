"""`/metrics`: what is counted and looked at, in the format that Prometheus asks for."""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from broker_sidecar import rpc
from broker_sidecar.config import Config
from broker_sidecar.connections import Connections
from broker_sidecar.data import Data
from broker_sidecar.metrics import families
from broker_sidecar.metrics.calls import Calls
from broker_sidecar.metrics.families import by_label, counter_of, gauge_of, histogram_of
from broker_sidecar.metrics.loop_delay import LoopDelay
from broker_sidecar.metrics.topics import Looked, TopicsTally
from broker_sidecar.read import ReadService
from broker_sidecar.streams import Streams
from broker_sidecar.web.server import LOOP_SECONDS, Request, Response, on_loop
from seqdedupe.errors import REASONS

FRESH_SECONDS = 0.5
"""Who asks again within so long is shown the same: however often it is asked, looking costs little."""


@dataclass(frozen=True)
class Sources:
    """Where everything is counted."""

    config: Config
    data: Data
    streams: Streams
    connections: Connections
    calls: Calls
    reading: ReadService | None
    """None where a broker's own log holds the messages."""
    is_configuration_in_force: Callable[[], bool]
    """Whether the files that an operator may replace are in force as they are now."""


class Metrics(Collector):
    """The route, to be made on the event loop. Numbers of one answer may be some milliseconds apart."""

    def __init__(self, sources: Sources) -> None:
        self._from = sources
        self._loop = asyncio.get_running_loop()
        self._loop_delay = LoopDelay()
        self._tally = TopicsTally(sources.data.all_topics)
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        self._one_at_a_time = threading.Lock()
        self._made: dict[str, tuple[float, bytes]] = {}
        """By content type: when, and what."""

    def close(self) -> None:
        self._loop_delay.close()

    def __call__(self, request: Request) -> Response:
        """What is asked for at `/metrics`. Raises TimeoutError if the event loop stands still."""
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        if not self._one_at_a_time.acquire(timeout=LOOP_SECONDS):
            raise TimeoutError
        try:
            made_at, body = self._made.get(content_type, (-FRESH_SECONDS, b""))
            if time.monotonic() - made_at >= FRESH_SECONDS:
                body = encode(self._registry)
                self._made[content_type] = time.monotonic(), body
        finally:
            self._one_at_a_time.release()
        return Response(body, content_type)

    def describe(self) -> list[Metric]:
        """Nothing: the registry need not look to know the names."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All but those of the process, which are not made here."""
        yield InfoMetricFamily(
            "seqdedupe_build", "Which version this is.", {"version": version("seqdedupe"), "log": self._from.config.log}
        )
        yield gauge_of(
            "seqdedupe_configuration_in_force",
            "Whether the files that may be replaced are in force as they are now: 1, or 0.",
            self._from.is_configuration_in_force(),
        )
        yield from families.of_topics(on_loop(self._loop, self._look))
        yield from families.of_calls(list(self._from.calls.methods.values()))
        refusals = CounterMetricFamily("seqdedupe_refusals", "Errors that callers were told.", labels=("reason",))
        # Those that nobody was told yet too: what rises from nothing at all, Prometheus does not see rise.
        yield by_label(refusals, ((reason, rpc.refusals[reason]) for reason in REASONS))
        yield from self._of_clients()
        yield from self._of_readers()
        yield from self._of_a_cluster()
        yield from self._of_the_machine()

    async def _look(self) -> Looked:
        reading = self._from.reading
        return await self._tally.look(list(reading.readings) if reading is not None else ())

    def _of_clients(self) -> Iterator[Metric]:
        streams = self._from.streams
        yield gauge_of("seqdedupe_streams", "Streams that are open.", len(streams))
        yield gauge_of("seqdedupe_streams_limit", "Streams that may be open.", streams.limit)
        ended = CounterMetricFamily("seqdedupe_evicted_streams", "Streams ended for others' sake.", labels=("why",))
        yield by_label(ended, (("idle", streams.gave_way), ("unread", streams.unread)))
        connections = self._from.connections
        open_now = GaugeMetricFamily("seqdedupe_connections", "TCP connections that are open.", labels=("caller",))
        yield by_label(open_now, zip(("known", "unknown"), connections.count(), strict=True))
        about = (
            "Connections ended, for a lack of authenticated calls or of places, or for what clients left "
            "unread or sent in part."
        )
        ended = CounterMetricFamily("seqdedupe_ended_connections", about, labels=("why",))
        yield by_label(ended, connections.ended.items())
        budget = streams.budget
        yield gauge_of("seqdedupe_budget_bytes", "Memory held for clients: frames, answers, pages.", budget.held_bytes)
        yield gauge_of("seqdedupe_budget_limit_bytes", "Memory that may be held for clients.", budget.limit_bytes)

    def _of_readers(self) -> Iterator[Metric]:
        if (reading := self._from.reading) is None:
            return
        yield gauge_of("seqdedupe_readers", "Streams of readers that are open.", len(reading.readings))
        yield counter_of("seqdedupe_sent_messages", "Messages sent to readers.", reading.sent_messages)
        yield counter_of("seqdedupe_sent_bytes", "Bytes of messages sent to readers.", reading.sent_bytes)

    def _of_a_cluster(self) -> Iterator[Metric]:
        cluster = self._from.data.cluster
        looks = cluster.shared.looks if cluster is not None else None
        yield gauge_of(
            "seqdedupe_pulsar_unsafe_topics",
            "Topics that take nothing, because their policies in Pulsar let messages be lost or doubled.",
            len(looks.unsafe) if looks is not None else 0,
        )
        yield gauge_of(
            "seqdedupe_pulsar_policies_seen_timestamp_seconds",
            "When the policies of the Pulsar topic seen longest ago were seen; 0 if there is none.",
            min(list(looks.seen_at.values()), default=0.0) if looks is not None else 0.0,
        )

    def _of_the_machine(self) -> Iterator[Metric]:
        yield gauge_of(
            "seqdedupe_clock_ahead_seconds",
            "How far the clock was ahead of the last believed time at the start, where that is over a day; else 0.",
            self._from.data.clock_ahead_ms / 1000,
        )
        yield histogram_of(
            "seqdedupe_event_loop_delay_seconds",
            "How late the event loop came to what was due.",
            self._loop_delay.seconds,
        )
        if (committer := self._from.data.committer) is not None:
            yield histogram_of(
                "seqdedupe_sync_seconds", "What it took to make a round's writes durable.", committer.sync_seconds
            )
            yield histogram_of("seqdedupe_commit_group_batches", "Batches that a round wrote.", committer.group_batches)
        disk = os.statvfs(self._from.config.data_directory)
        sizes = (("free", disk.f_bavail * disk.f_frsize), ("all", disk.f_blocks * disk.f_frsize))
        about = "Size of the data directory's file system, and what of it the sidecar may still use."
        yield by_label(GaugeMetricFamily("seqdedupe_disk_bytes", about, labels=("part",)), sizes)
