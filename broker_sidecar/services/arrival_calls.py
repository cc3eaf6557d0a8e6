"""The arrival of a topic from another sidecar: the calls ReceiveTopic and SettleMove.

Begin with `ArrivalCalls`. `Coming` is an arriving topic. An arrival ends in one of two ways: the topic becomes a topic
of this sidecar, or all its data is removed.

The log is written next to the sidecar's own logs, into a folder that a start of the sidecar does not open. The snapshot
is written into the store, under an incarnation that belongs to no topic of this sidecar. The snapshot is read before
the other sidecar stops accepting messages. Later messages are read from the log. The topic belongs to this sidecar from
the moment at which its record states so.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import grpc
import grpc.aio

from broker_sidecar.data import Data
from broker_sidecar.gate import Guard
from broker_sidecar.rpc import Context, parse_small, unary
from broker_sidecar.security.rules import Action
from broker_sidecar.streams import Stream, Streams
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.format import headers
from seqdedupe.format.headers import SECRET_BYTES
from seqdedupe.log.embedded import log_folder
from seqdedupe.log.embedded.log import EmbeddedLog
from seqdedupe.log.embedded.log_folder import MOVE_BYTES, RECEIVER_BYTES, Arrival
from seqdedupe.log.embedded.logs import EmbeddedLogs
from seqdedupe.names import topic_name
from seqdedupe.store import parts
from seqdedupe.store.db import Store
from seqdedupe.store.parts import TopicRecord, TopicState
from seqdedupe.tasks import again_until
from seqdedupe.topic.base import State
from seqdedupe.topic.directory import Topics
from seqdedupe.topic.keeper import RestoredState
from seqdedupe.topic.lives import TopicKind
from seqdedupe.topic.registry import Phase
from seqdedupe.topic.topic import Topic
from seqdedupe.transfer.stored_records import IncomingSnapshot
from seqdedupe.v1 import admin_pb2

logger = logging.getLogger("seqdedupe.server")

T = TypeVar("T")


@dataclass(eq=False)
class Coming:
    """An arriving topic. One thread makes all writes for the topic in order, even if the caller no longer waits.

    coming ── all data is here, and no sidecar has asked for the outcome ──> taken: the record says so
       └── anything else ──> dropped: no data is left
    """

    record: TopicRecord
    arrival: Arrival
    snapshot: IncomingSnapshot
    stream: Stream
    receiver: bytes = b""
    """The answer to the sending sidecar: the identity of this data directory, and the move."""
    stored: RestoredState | None = None
    """The snapshot, once all of it has arrived."""
    is_taken: bool = False
    """Whether this sidecar is taking over the topic. The takeover continues even if the call ends."""
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "seqdedupe-arriving"))

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run `work` in the thread. Raises MOVE_FAILED if it raises OSError, for example because the disk is full."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)
        except OSError as e:
            raise error("MOVE_FAILED", f"topic {self.record.name} cannot be written here: {e}") from e

    async def read(self, kind: TopicKind[Topic]) -> RestoredState:
        """Return the complete snapshot, which is read at the first call. Raises the reason if the snapshot is invalid,
        STORE_UNAVAILABLE."""
        if self.stored is None:
            await self.snapshot.finish()
            self.stored = await kind.load(self.record)
        return self.stored

    def end(self, topics: Topics[Topic]) -> None:
        """Remove all data of the arriving topic, now or after the next start, unless the topic now belongs to this
        sidecar."""
        if topics.is_draining:
            self._thread.shutdown(wait=False)
        else:
            topics.in_background(self._drop(topics.store))

    async def _drop(self, store: Store) -> None:
        try:
            if not await self._is_dropped(store):
                await again_until(lambda: self._is_dropped(store))
        finally:
            self._thread.shutdown(wait=False)

    async def _is_dropped(self, store: Store) -> bool:
        try:
            # Messages go first, because a full disk allows no removal from the store. The folder goes last, because it
            # shows that something is left. While it exists, no topic with this incarnation can arrive.
            await self.run(self.arrival.remove_messages)
            # This is known now: the thread has finished the work of an abandoned call.
            if not self.arrival.has_begun:
                return True
            await store.remove_snapshot(self.record.incarnation)
            await self.run(self.arrival.remove)
        except SeqdedupeError as e:
            logger.warning("the received part of topic %s cannot be removed now: %s", self.record.name, e)
            return False
        return True


SILENT_SECONDS = 60.0
"""The maximum time without a message from the other sidecar. It may wait for its disk, and its clients may slow down
the copy."""


class ArrivalCalls:
    """The handlers. A sidecar accepts arriving topics only if it has its own logs and all shards."""

    def __init__(self, data: Data, streams: Streams, guard: Guard) -> None:
        self._logs = data.logs if data.peers is None else None
        self._topics = data.topics
        self._streams = streams
        self._permissions = guard.permissions
        self._trail = guard.trail
        self._under_way: dict[str, Coming] = {}

    def methods(self) -> "dict[str, grpc.RpcMethodHandler[Any, Any]]":
        """Return the handlers by the name of the call."""
        return {
            "ReceiveTopic": grpc.stream_stream_rpc_method_handler(self._streams.handler(self._receive_topic)),
            "SettleMove": unary(admin_pb2.SettleMoveRequest, self._settle_move),
        }

    def check_is_known(self, name: str) -> None:
        """Raise RECOVERING if the sidecar from which this topic came may not have recorded yet that the topic arrived.

        If the topic were deleted or moved on now, that sidecar would take it over again.
        """
        record = self._topics.registry.record(name) if self._topics is not None else None
        if self._logs is not None and record is not None and self._logs.has_arrived(record.incarnation):
            raise error(
                "RECOVERING",
                f"topic {name} cannot be changed yet: the sidecar that it came from has not recorded its arrival",
            )

    def _own(self) -> tuple[EmbeddedLogs, Topics[Topic]]:
        if self._logs is None or self._topics is None:
            raise error("INVALID_REQUEST", "this call is only for sidecars with embedded logs and without shards")
        return self._logs, self._topics

    async def _receive_topic(self, _requests: object, _context: Context, stream: Stream) -> None:
        """Receive a topic. When the last answer is written, this sidecar has the topic and serves it. The steps are:

        1. The first message names the topic. No other topic of that name can arrive meanwhile.
        2. The answer identifies this data directory, and the move.
        3. Parts of the log and pieces of the snapshot arrive. The snapshot is read when it is complete.
        4. The topic's record states that the topic belongs to this sidecar, unless the other sidecar has meanwhile
           asked for the outcome.

        A failure up to step 3 leaves no data of the topic.
        """
        logs, topics = self._own()
        head = parse_small(admin_pb2.ReceiveTopicRequest, await stream.read_first() or b"").head
        self._permissions.check_topic(Action.ADMINISTER, topic_name(head.topic))
        coming = self._begun(logs, topics, head, stream)  # 1
        # This stream does not give way to another one.
        stream.frames_in_flight += 1
        try:
            coming.receiver = bytes.fromhex(await coming.run(logs.receiver)) + secrets.token_bytes(MOVE_BYTES)
            await coming.run(coming.arrival.begin, coming.record.name, coming.record.secret)
            await _keep_from_who_had_it(topics, coming.record)
            answer = admin_pb2.ReceiveTopicResponse(receiver=coming.receiver, reads_snapshot=True).SerializeToString()
            await stream.write(answer)  # 2
            while not (request := await _next(stream)).HasField("end"):  # 3
                if request.HasField("log"):
                    part = request.log
                    await coming.run(coming.arrival.write, part.base_index, part.offset, part.data)
                elif request.snapshot_end:
                    await coming.read(topics.kind)
                    await stream.write(answer)
                elif coming.stored is not None:
                    raise error("INVALID_REQUEST", "a part of the snapshot came after its end")
                else:
                    await coming.snapshot.add(request.snapshot)
            # A sidecar of an earlier version does not report the end of the snapshot.
            stored = await coming.read(topics.kind)
            async with self._trail.change("ReceiveTopic", f"topic: {coming.record.name}"):
                await self._finish(logs, topics, coming, stored, request.end.next_index)  # 4
            await stream.write(answer)
        finally:
            if self._under_way.get(coming.record.name) is coming:
                del self._under_way[coming.record.name]
            if not coming.is_taken:
                coming.end(topics)

    def _begun(self, logs: EmbeddedLogs, topics: Topics[Topic], head: Any, stream: Stream) -> Coming:
        """Begin an arrival. From now on no other sidecar can move a topic of that name here.

        Raises TOPIC_EXISTS, TOO_MANY_TOPICS, NEWER_FORMAT, OLDER_FORMAT, INVALID_REQUEST; MOVE_FAILED if the topic is
        already arriving.
        """
        name = topic_name(head.topic)
        if len(head.secret) != SECRET_BYTES:
            raise error("INVALID_REQUEST", f"the secret of a log has {SECRET_BYTES} bytes")
        for what, version, known in (
            ("log", head.log_format_version, headers.FORMAT_VERSION),
            ("store", head.store_format_version, parts.FORMAT_VERSION),
        ):
            if version != known:
                raise parts.other_format(f"the {what} of the sidecar that sends topic {name}", version, known)
        if name in self._under_way:
            raise error("MOVE_FAILED", f"topic {name} is being moved here already")
        record = TopicRecord(name, head.incarnation, TopicState.CREATING, head.secret)
        _check_is_free(logs, topics, record)
        snapshot = IncomingSnapshot(topics.store, record.incarnation)
        coming = self._under_way[name] = Coming(record, logs.arrival(record.incarnation), snapshot, stream)
        return coming

    async def _finish(
        self, logs: EmbeddedLogs, topics: Topics[Topic], coming: Coming, stored: RestoredState, next_index: int
    ) -> None:
        name = coming.record.name
        # SettleMove may have removed the entry. Then the topic is never taken. A later call finds it in creation.
        if self._under_way.pop(name, None) is not coming:
            raise error(
                "MOVE_FAILED",
                f"topic {name} is no longer accepted: the other sidecar has asked for the outcome of its move",
            )
        _check_is_free(logs, topics, coming.record)
        coming.is_taken = True
        await topics.registry.run(Phase.CREATING, name, partial(self._taken, topics, coming, stored, next_index))

    async def _taken(self, topics: Topics[Topic], coming: Coming, stored: RestoredState, next_index: int) -> Topic:
        try:
            return await _take(topics, coming, stored, next_index)
        finally:
            coming.end(topics)

    async def _settle_move(self, request: admin_pb2.SettleMoveRequest) -> admin_pb2.SettleMoveResponse:
        logs, topics = self._own()
        name = topic_name(request.topic)
        if request.receiver[:RECEIVER_BYTES].hex() != await asyncio.to_thread(logs.receiver):
            raise error("MOVE_FAILED", f"topic {name} was moved to another data directory than this sidecar's")
        coming = self._under_way.get(name)
        if coming is not None and coming.record.incarnation == request.incarnation:
            del self._under_way[name]
            coming.stream.end(
                error("MOVE_FAILED", f"the other sidecar has asked for the outcome of the move of topic {name}")
            )
        entry = topics.registry.get(name)
        if entry is not None and entry.phase is Phase.CREATING and entry.under_way is not None:
            await asyncio.wait({entry.under_way})
        topics.stored.check_written(name)
        record = topics.registry.record(name)
        if record is None or record.incarnation != request.incarnation:
            return admin_pb2.SettleMoveResponse()
        folder, has_moved = logs.folder_of(record.incarnation), logs.has_moved(record.incarnation)
        if request.is_known:
            await asyncio.to_thread(log_folder.is_known, folder, request.receiver.hex())
        elif has_moved:
            # A sidecar does not forward a topic until the sender has recorded that the topic arrived. So this topic was
            # here before, and was not moved back.
            return admin_pb2.SettleMoveResponse()
        elif log_folder.leaving_to(folder) is not None:
            raise error(
                "MOVE_FAILED", f"topic {name} was moved away from here too: it is not known yet which sidecar has it"
            )
        topic = topics.registry.topic(name)
        is_serving = topic.state is State.SERVING if topic is not None else has_moved
        return admin_pb2.SettleMoveResponse(has_it=True, is_serving=is_serving)


async def _next(stream: Stream) -> admin_pb2.ReceiveTopicRequest:
    """Return the next request on the stream from the sidecar that moves a topic to this sidecar. Raises STREAM_IDLE if
    no request arrives for SILENT_SECONDS. Raises MOVE_FAILED if the other sidecar has ended the stream."""
    try:
        async with asyncio.timeout(SILENT_SECONDS):
            data = await stream.read()
    except TimeoutError as e:
        raise error(
            "STREAM_IDLE", f"the sidecar that moves a topic here sent nothing for {SILENT_SECONDS:.0f} s"
        ) from e
    if data is grpc.aio.EOF:
        raise error("MOVE_FAILED", "the sidecar that moves a topic here ended the stream before the topic was complete")
    return parse_small(admin_pb2.ReceiveTopicRequest, data)


async def _keep_from_who_had_it(topics: Topics[Topic], record: TopicRecord) -> None:
    """Cancel a pending removal of this topic's remains. The topic was moved away earlier, and is now being moved
    back."""
    # A topic that was not used since the start is examined now, so that its record shows the sidecar to which the topic
    # was moved.
    await topics.waiting.use(record.name)
    async with topics.registry.locked(record.name) as entry:
        if entry.record is not None and entry.record.incarnation == record.incarnation:
            entry.record = replace(entry.record)


def _check_is_free(logs: EmbeddedLogs, topics: Topics[Topic], record: TopicRecord) -> None:
    """Raise TOPIC_EXISTS and other errors if the topic cannot be accepted. The name of a topic that moved away is
    free."""
    name = record.name
    topics.check_takes_changes(name)
    topics.partitions.check_is_free(name)
    entry = topics.registry.get(name)
    former = None if entry is None else entry.record
    if former is not None and not logs.has_moved(former.incarnation):
        raise error("TOPIC_EXISTS", f"topic {name} exists already", topic=name)
    if entry is not None:
        entry.check_may(Phase.CREATING)
    if former is None or former.incarnation != record.incarnation:
        topics.stored.check_is_free(record.incarnation, topics.known_records())
    topics.check_room()


async def _take(topics: Topics[Topic], coming: Coming, stored: RestoredState, next_index: int) -> Topic:
    """Make the topic this sidecar's own. When this returns, this sidecar serves the topic."""

    def check_is_whole(topic: Topic) -> None:
        # A crash may leave a half-written record. The other sidecar has not sent one.
        is_torn = isinstance(topic.log, EmbeddedLog) and topic.log.cut_bytes
        if is_torn or topic.confirmed_index != next_index:
            why = f"its log ends with index {topic.confirmed_index}, and should end with {next_index}"
            raise error("MOVE_FAILED", f"topic {name} did not arrive complete: {why}")

    name = coming.record.name
    try:
        async with topics.registry.locked(name):
            former = await _forgotten(topics, coming.record)

            async def put() -> None:
                if former:
                    # Remove the stored address of the sidecar to which the topic was moved. The topic's record is
                    # another object by now.
                    await topics.kind.delete(coming.record.incarnation)
                await coming.run(coming.arrival.finish, coming.receiver.hex())

            return await topics.lives.take_in(coming.record, stored, put, check_is_whole)
    except SeqdedupeError:
        raise
    except Exception as e:
        raise error("MOVE_FAILED", f"topic {name} was not accepted: {type(e).__name__}: {e}") from e


async def _forgotten(topics: Topics[Topic], record: TopicRecord) -> bool:
    """Forget a topic of this name that moved away and of which only the new address is stored.

    Return whether the forgotten topic had the same incarnation. In this case, the stored address must still be removed.
    """
    former = topics.registry.record(record.name)
    if former is None:
        return False
    topics.lives.forget(record.name)
    if former.incarnation == record.incarnation:
        return True
    await _remove(topics, former)
    return False


async def _remove(topics: Topics[Topic], former: TopicRecord) -> None:
    """Remove the rest of a moved topic that is no longer among the records.

    Raises the reason if the removal fails now. The removal is tried again later, and the topic's incarnation stays in
    use until then.
    """
    try:
        await topics.stored.remove(replace(former, state=TopicState.DELETING))
    except SeqdedupeError:
        await topics.stored.undo(former)
        raise
