"""Topics that other sidecars give to this one: AdminService's ReceiveTopic and SettleMove.

All of it is written beside the logs, where no start looks. The topic is this sidecar's from the moment that its record
says so, and not before.
"""

import asyncio
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc

from broker_sidecar.rpc import Context, columns, unary
from broker_sidecar.security.permissions import Permissions
from broker_sidecar.security.rules import Action
from broker_sidecar.security.trail import Trail
from broker_sidecar.snapshot_parts import Taking
from broker_sidecar.streams import Stream, Streams, messages
from seqdedupe import wire
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.files import write_all
from seqdedupe.format.tag import SECRET_BYTES
from seqdedupe.log.embedded.logs import EmbeddedLogs
from seqdedupe.log.embedded.segment import segment_path
from seqdedupe.names import topic_name
from seqdedupe.store.snapshots import Loaded, Snapshots
from seqdedupe.store.topics import TopicRecord, TopicState
from seqdedupe.topic.closed import Closed
from seqdedupe.topic.directory import Topics
from seqdedupe.topic.publishing import Topic
from seqdedupe.topic.shielded import shielded
from seqdedupe.v1 import admin_pb2

SYNC_BYTES = 8 * 1024 * 1024
"""What is written is synced in so large parts, so that little is left to be at the end, when nobody has the topic."""


@dataclass(eq=False)
class _Arrival:
    """One that is under way."""

    record: TopicRecord
    folder: Path
    stream: Stream
    sizes: dict[int, int] = field(default_factory=dict)
    """Of each segment, how much has come."""
    snapshot: Taking = field(default_factory=Taking)
    _unsynced: int = 0

    def write(self, base_index: int, offset: int, data: bytes) -> None:
        """The next part of a segment. Blocks. Raises MOVE_FAILED if it is not the next; OSError."""
        if offset != self.sizes.get(base_index, 0) or base_index < max(self.sizes, default=0):
            raise error("MOVE_FAILED", f"a part of the log came that is not the next: {base_index}, {offset}")
        file = os.open(segment_path(self.folder, base_index), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            write_all(file, data, offset)
            self._unsynced += len(data)
            if self._unsynced >= SYNC_BYTES:
                os.fdatasync(file)
                self._unsynced = 0
        finally:
            os.close(file)
        self.sizes[base_index] = offset + len(data)


class Arriving:
    """The handlers. `logs` and `topics` are the sidecar's own; None if it has none."""

    def __init__(
        self,
        logs: EmbeddedLogs | None,
        topics: Topics[Topic] | None,
        streams: Streams,
        permissions: Permissions,
        trail: Trail,
    ) -> None:
        self._logs = logs
        self._topics = topics
        self._streams = streams
        self._permissions = permissions
        self._trail = trail
        self._under_way: dict[str, _Arrival] = {}

    def methods(self) -> "dict[str, grpc.RpcMethodHandler[Any, Any]]":
        """By the name of the call."""
        return {
            "ReceiveTopic": grpc.stream_stream_rpc_method_handler(self._streams.handler(self._receive)),
            "SettleMove": unary(admin_pb2.SettleMoveRequest, self._settle),
        }

    def _own(self) -> tuple[EmbeddedLogs, Topics[Topic]]:
        if self._logs is None or self._topics is None:
            raise error("INVALID_REQUEST", "this is only for sidecars with logs of their own")
        return self._logs, self._topics

    async def _receive(self, _requests: object, _context: Context, stream: Stream) -> None:
        logs, topics = self._own()
        arrival: _Arrival | None = None
        try:
            async for data in messages(stream):
                request = columns(wire.ReceiveTopicRequest, admin_pb2.ReceiveTopicRequest, data)
                if arrival is None:
                    arrival = await self._begin(logs, topics, request.head, stream)
                    await stream.write(admin_pb2.ReceiveTopicResponse().SerializeToString())
                elif request.HasField("log"):
                    part = request.log
                    await asyncio.to_thread(arrival.write, part.base_index, part.offset, part.data)
                elif request.HasField("snapshot"):
                    arrival.snapshot.add(request.snapshot)
                elif request.is_all:
                    async with self._trail.change("ReceiveTopic", f"topic: {arrival.record.name}"):
                        await self._finish(logs, topics, arrival)
                    await stream.write(admin_pb2.ReceiveTopicResponse().SerializeToString())
                    return
        finally:
            if arrival is not None and self._under_way.get(arrival.record.name) is arrival:
                del self._under_way[arrival.record.name]

    async def _begin(self, logs: EmbeddedLogs, topics: Topics[Topic], head: Any, stream: Stream) -> _Arrival:
        """Raises NOT_ALLOWED, TOPIC_EXISTS, NOT_OWNER, TOO_MANY_TOPICS, MOVE_FAILED if it is coming already."""
        name = topic_name(head.topic)
        self._permissions.check_topic(Action.ADMINISTER, name)
        if len(head.secret) != SECRET_BYTES:
            raise error("INVALID_REQUEST", f"the secret of a log has {SECRET_BYTES} bytes")
        record = TopicRecord(name, head.incarnation, TopicState.CREATING, head.secret)
        if name in self._under_way:
            raise error("MOVE_FAILED", f"topic {name} is being moved here already")
        _check_is_free(topics, record)
        # Before anything is waited for: nobody else receives it.
        arrival = self._under_way[name] = _Arrival(record, logs.arriving(record.incarnation), stream)
        try:
            await asyncio.to_thread(logs.begin_arrival, record.incarnation)
        except BaseException:
            del self._under_way[name]
            raise
        return arrival

    async def _finish(self, logs: EmbeddedLogs, topics: Topics[Topic], arrival: _Arrival) -> None:
        head, loaded = arrival.snapshot.finish()
        record = arrival.record
        if (head.topic, head.position.incarnation) != (record.name, record.incarnation):
            raise error("MOVE_FAILED", f"the snapshot is of {head.topic}, and the log of {record.name}")
        # Who asks what became of it has taken it out, and it never comes to be; or finds it among those being made.
        if self._under_way.pop(record.name, None) is not arrival:
            raise error("MOVE_FAILED", f"topic {record.name} is not taken any more: it was asked what became of it")
        _check_is_free(topics, record)
        await shielded(topics.creating, record.name, _take(logs, topics, record, loaded))

    async def _settle(self, request: admin_pb2.SettleMoveRequest) -> admin_pb2.SettleMoveResponse:
        _, topics = self._own()
        name = topic_name(request.topic)
        if (arrival := self._under_way.pop(name, None)) is not None:
            arrival.stream.end(error("MOVE_FAILED", f"it was asked what became of the move of topic {name}"))
        if taking := topics.creating.get(name):
            await asyncio.wait({taking})
        topics.stored.check_written(name)
        record = topics.records.get(name)
        return admin_pb2.SettleMoveResponse(has_it=record is not None and record.incarnation == request.incarnation)


def _check_is_free(topics: Topics[Topic], record: TopicRecord) -> None:
    name = record.name
    topics.check_takes_changes(name)
    topics.partitions.check_is_free(name)
    if name in topics.records or name in topics.creating or name in topics.deleting:
        raise error("TOPIC_EXISTS", f"the topic {name} is there already", topic=name)
    topics.stored.check_is_free(record.incarnation, topics.records.values())
    topics.check_room()


async def _take(logs: EmbeddedLogs, topics: Topics[Topic], record: TopicRecord, loaded: Loaded) -> Topic:
    """Makes the topic this sidecar's, and opens it."""
    # A start that finds the record as it is now removes the log with it.
    await topics.store.put_topics(record)
    active = replace(record, state=TopicState.ACTIVE)
    try:
        await asyncio.to_thread(logs.end_arrival, record.incarnation, record.name, record.secret)
        await topics.kind.check_snapshot(record, None, loaded)
        await topics.store.flush(await Snapshots(topics.store, record.incarnation).write_anew(loaded.whole()))
        await topics.store.put_topics(active)
    except Exception as e:
        await topics.stored.undo(record)
        raise e if isinstance(e, SeqdedupeError) else error("MOVE_FAILED", f"the log was not taken: {e}") from e
    topics.records[record.name] = active
    topics.closed[record.name] = Closed(active, error("RECOVERING", "it was moved here"))
    await topics.opened(active)
    topic = topics.live.get(record.name)
    if topic is None:
        topics.in_background(topics.go_on_opening(active))
        raise error("RECOVERING", f"topic {record.name} is here, and cannot be opened yet")
    await topic.recover()
    return topic
