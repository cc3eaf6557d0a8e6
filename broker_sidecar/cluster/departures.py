"""Moving a topic of this sidecar's own log to another sidecar, while producers and readers continue.

Most of the log and a snapshot are copied while the topic serves. After that, the topic accepts no messages, and the
rest of the log is copied. When everything is copied, this sidecar writes a file into the log's folder. The file records
that the topic is leaving. While the file exists, only the other sidecar decides which sidecar has the topic. A failure
before the file is written does not change the topic. After a failure later, this sidecar asks the other sidecar until
the other sidecar answers.
"""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import grpc.aio

from broker_sidecar.cluster.peers import SILENT_SECONDS, TAKE_SECONDS, Neighbours
from seqdedupe.address import SidecarAddress
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.format import headers
from seqdedupe.log.embedded import log_folder
from seqdedupe.log.embedded.inspection import Damage, DurablePart, inspect_part
from seqdedupe.log.embedded.log_folder import MOVE_BYTES, RECEIVER_BYTES, To
from seqdedupe.log.embedded.logs import EmbeddedLogs
from seqdedupe.names import topic_name
from seqdedupe.store.db import Store
from seqdedupe.store.parts import FORMAT_VERSION, TopicRecord, snapshot_range
from seqdedupe.store.snapshots import Snapshots
from seqdedupe.tasks import again_until, retrieve
from seqdedupe.topic.base import State
from seqdedupe.topic.directory import Topics, find
from seqdedupe.topic.policy import ImportedWindow
from seqdedupe.topic.registry import Closed, Phase, RegistryEntry
from seqdedupe.topic.topic import Topic
from seqdedupe.transfer.stored_records import row_bytes
from seqdedupe.v1 import admin_pb2

logger = logging.getLogger("seqdedupe.server")

# -- The data that another sidecar receives: the log, most of it while the topic serves, and a snapshot.

PIECE_BYTES = 1024 * 1024 - 1024
"""The most bytes of data in one message."""
ROUNDS = 20
"""The most rounds that copy newly arrived messages while the topic serves, until little is left."""
SLOW_ROUND = 3
"""From this round on, publishers wait in every second period of TURN_SECONDS. Otherwise the copy would never catch up
with publishers that use the whole machine."""
TURN_SECONDS = 0.25
READ_SECONDS = 600.0
"""The time for the other sidecar to read the snapshot, while the topic serves here."""
REST_BYTES = 4 * 1024 * 1024
"""A rest of this size counts as little."""
MAX_REST_BYTES = 64 * 1024 * 1024
"""The maximum number of bytes that may remain when the topic stops accepting messages. If more bytes remain, the log
grows faster than it is copied."""
REST_SECONDS = 10.0
"""The time to copy the rest. After that the move ends, and the topic continues here."""


class Giving:
    """Sends the data of a topic on a call of ReceiveTopic."""

    def __init__(self, logs: EmbeddedLogs, store: Store, record: TopicRecord, call: Any) -> None:
        self._logs = logs
        self._store = store
        self._record = record
        self._call = call
        self._sent: dict[int, int] = {}
        """For each segment, by the segment's first index: the number of bytes sent."""
        self._slowed: Topic | None = None
        self._turn: asyncio.TimerHandle | None = None
        self._why = giving_away(record.name)
        self._reads_snapshot = False
        """Whether the other sidecar confirms that it has read the snapshot. An earlier version reads the snapshot only
        at the end."""
        self._imported: ImportedWindow | None = None
        """The imported window in the store when its records were sent."""

    async def begin(self) -> str:
        """Begin the move. Return the identity of the data directory that receives the topic, and of the move. Raises
        the other sidecar's refusal."""
        record = self._record
        secret = await asyncio.to_thread(self._logs.secret_of, record.incarnation, record.secret)
        head = admin_pb2.MovedTopic(
            topic=record.name,
            incarnation=record.incarnation,
            secret=secret,
            log_format_version=headers.FORMAT_VERSION,
            store_format_version=FORMAT_VERSION,
        )
        await self._send(head=head)
        answer = await self._answer(SILENT_SECONDS)
        self._reads_snapshot = answer.reads_snapshot
        receiver: str = answer.receiver.hex()
        if len(receiver) != 2 * (RECEIVER_BYTES + MOVE_BYTES):
            raise error("MOVE_FAILED", "the other sidecar does not name its data directory")
        return receiver

    async def copy_while_it_serves(self, topic: Topic) -> None:
        """Copy log and snapshot until the other sidecar has read the snapshot and only a small part of the log remains.

        Raises MOVE_FAILED if the log grows faster than it is copied.
        """
        await self._catch_up(topic)
        await topic.keeper.snapshot()
        self._imported = topic.policy.imported
        rows = self._store.scan(*snapshot_range(self._record.incarnation))
        pieces = _pieces(row_bytes(key, value) for key, value in rows)
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            await self._send(snapshot=piece)
        if self._reads_snapshot:
            await self._send(snapshot_end=True)
            await self._answer(READ_SECONDS)
        await self._catch_up(topic)

    async def _catch_up(self, topic: Topic) -> None:
        try:
            for number in range(ROUNDS):
                self._slowed = topic if number >= SLOW_ROUND else None
                if (size_bytes := await self._copy_log()) <= REST_BYTES:
                    return
        finally:
            self._slowed = None
            self._end_turn(topic)
        if size_bytes > MAX_REST_BYTES:
            raise error("MOVE_FAILED", f"its log grows faster than it is copied: {size_bytes} bytes came meanwhile")

    async def copy_rest(self, topic: Topic) -> None:
        """Wait until messages in flight settle, and copy the rest. Raises MOVE_FAILED if this takes too long, or if a
        window was imported meanwhile."""
        try:
            async with asyncio.timeout(REST_SECONDS):
                await topic.all_settled()
                if topic.policy.imported not in (None, self._imported):
                    raise error("MOVE_FAILED", "a window of deduplication IDs was imported during the move")
                await self._copy_log()
        except TimeoutError as e:
            why = f"the messages in flight were not stored and copied within {REST_SECONDS:.0f} s"
            raise error("MOVE_FAILED", why) from e

    async def _copy_log(self) -> int:
        """Send the part of the log that was not sent yet. Return its size in bytes. Raises LOG_DAMAGED; LOG_UNREADABLE,
        OSError."""
        if (parts := self._logs.parts().get(self._record.incarnation)) is None:
            raise error("MOVE_FAILED", "its log was closed")
        count = 0
        for part in parts:
            if (at := self._sent.get(part.base_index)) is None:
                await asyncio.to_thread(_check, part)
                at = 0
                if not part.end:
                    # An empty segment is sent too, because its base index is needed.
                    await self._send_log(part.base_index, 0, b"")
            while at < part.end:
                data = await asyncio.to_thread(_read, part, at)
                await self._send_log(part.base_index, at, data)
                at += len(data)
                count += len(data)
        return count

    async def _send_log(self, base_index: int, offset: int, data: bytes) -> None:
        if self._slowed is not None:
            self._take_turn(self._slowed)
        await self._send(log=admin_pb2.LogPart(base_index=base_index, offset=offset, data=data))
        self._sent[base_index] = offset + len(data)

    def _take_turn(self, topic: Topic) -> None:
        """Hold the topic until the end of this period, if the period belongs to the copy. The hold ends in time even if
        the other sidecar does not answer."""
        self._end_turn(topic)
        turns = time.monotonic() / TURN_SECONDS
        if int(turns) % 2:
            topic.hold(self._why)
            left_seconds = (1 - turns % 1) * TURN_SECONDS
            self._turn = asyncio.get_running_loop().call_later(left_seconds, topic.release, self._why)

    def _end_turn(self, topic: Topic) -> None:
        if self._turn is not None:
            self._turn.cancel()
        topic.release(self._why)

    async def end(self, next_index: int) -> None:
        """Report that everything was sent. When this returns, the other sidecar has the topic and serves it."""
        await self._send(end=admin_pb2.MovedEnd(next_index=next_index))
        await self._answer(TAKE_SECONDS)

    async def _send(self, **fields: Any) -> None:
        try:
            async with _in_time(SILENT_SECONDS):
                await self._call.write(admin_pb2.ReceiveTopicRequest(**fields))
        except asyncio.InvalidStateError:
            # The call is over, and this raises the reason.
            await self._call.read()
            raise

    async def _answer(self, seconds: float) -> admin_pb2.ReceiveTopicResponse:
        async with _in_time(seconds):
            answer = await self._call.read()
        if answer is grpc.aio.EOF:
            raise error("MOVE_FAILED", "the other sidecar ended the move without an answer")
        found: admin_pb2.ReceiveTopicResponse = answer
        return found


def giving_away(name: str) -> SeqdedupeError:
    """Return the error that publishers receive while the topic is moving."""
    return error("RECOVERING", f"topic {name} is being moved to another sidecar")


@asynccontextmanager
async def _in_time(seconds: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as e:
        raise error("UNREACHABLE", f"the other sidecar did not continue within {seconds:.0f} s") from e


def _check(part: DurablePart) -> None:
    """Raise LOG_DAMAGED if the segment is damaged: damaged data is not moved. Raises NEWER_FORMAT, OSError."""
    for found in inspect_part(part, os.pread):
        if isinstance(found, Damage):
            why = f"{found.file}, byte {found.offset}: {found.what}"
            raise error("LOG_DAMAGED", why, file=found.file, offset=found.offset)


def _read(part: DurablePart, offset: int) -> bytes:
    with part.path.open("rb", buffering=0) as file:
        data = os.pread(file.fileno(), min(PIECE_BYTES, part.end - offset), offset)
    if not data:
        raise error("MOVE_FAILED", f"{part.path} ends at byte {offset}, and should end at byte {part.end}")
    return data


def _pieces(parts: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the bytes in pieces that each fit into a message."""
    waiting = bytearray()
    for part in parts:
        waiting += part
        while len(waiting) > PIECE_BYTES:
            yield bytes(waiting[:PIECE_BYTES])
            del waiting[:PIECE_BYTES]
    yield bytes(waiting)


# -- A departing topic, from the call that moves it until it is certain who has it.


class Departures:
    """Moves in progress, and moves with an unknown outcome.

    Files in the folder of the topic's log record the state of the topic in this sidecar:

    - served here -> leaving: the move has stopped the topic (`log_folder.leave`).
    - leaving -> served here: the other sidecar does not have the topic (`log_folder.stays`).
    - leaving -> moved: the other sidecar has the topic (`log_folder.has_left`).
    - moved -> only the topic's new address: the other sidecar serves the topic, and has been notified of the state
      "moved".
    """

    def __init__(self, logs: EmbeddedLogs, topics: Topics[Topic], others: Neighbours) -> None:
        self.address = ""
        """The address of this sidecar, once it listens."""
        self._logs = logs
        self._topics = topics
        self.others = others

    def go_on(self) -> None:
        """After a start: ask other sidecars about topics that were leaving, and remove data that is no longer
        needed."""
        self._topics.in_background(self._go_on())

    async def _go_on(self) -> None:
        for record, to in await asyncio.to_thread(self._not_settled, [*self._topics.known_records()]):
            self._topics.in_background(self._settle(record, to))

    def _not_settled(self, of: list[TopicRecord]) -> list[tuple[TopicRecord, To]]:
        found: list[tuple[TopicRecord, To]] = []
        for record in of:
            folder = self._logs.folder_of(record.incarnation)
            # If the files cannot be read, the topic reports it.
            with suppress(SeqdedupeError, OSError):
                if (to := log_folder.leaving_to(folder)) is None and (to := log_folder.moved_to(folder)) is not None:
                    to = to if log_folder.has_messages(folder) else None
                if to is not None:
                    found.append((record, to))
        return found

    async def move(self, name: str, to: str) -> str:
        """Move the topic to the sidecar at this address. When this returns, that sidecar serves the topic. If `to` is
        this sidecar, do nothing.

        The move continues if the caller disconnects.

        Raises INVALID_ADDRESS, INVALID_REQUEST, DRAINING, MOVE_FAILED, and the reason why the topic does not serve.
        """
        try:
            topic = await find(self._topics, name)
        except SeqdedupeError as e:
            record = self._topics.registry.record(topic_name(name))
            is_there = e.reason == "NOT_OWNER" and e.numbers.get("owner_address") == to
            if is_there and record is not None and self._logs.has_moved(record.incarnation):
                # The topic has been moved before.
                return to
            raise
        topic.check_serving()
        if not to:
            why = f"topic {topic.name} cannot be moved: the request names no sidecar"
            hint = "Name one: `--to ADDRESS`. Only with log = pulsar can the address be omitted."
            raise error("INVALID_ADDRESS", why, hint=hint)
        if str(SidecarAddress.parse(to)) == self.address:
            return to
        if self._logs.has_arrived(topic.incarnation):
            # The previous sidecar of the topic still asks here whether the topic arrived. If the topic had moved on,
            # the answer would be no.
            why = f"topic {topic.name} cannot be moved yet: the sidecar that it came from has not recorded its arrival"
            raise error("RECOVERING", why)
        if (address := self.others.allowed(to)) is None:
            hint = "Add it to this sidecar's `peers`. The sidecars in this list receive whole logs and their secrets."
            raise error("INVALID_ADDRESS", f"{to!r} is none of the sidecars that topics may be moved to", hint=hint)
        if self._topics.partitions_beside(topic.name):
            raise error(
                "INVALID_REQUEST", f"topic {topic.name} is a partition: the partitions of a topic stay together"
            )
        entry = self._topics.registry.entry(topic.name)
        entry.change_to(Phase.MOVING)
        # A draining sidecar abandons the move at any step.
        moving = self._topics.in_background(self._move(topic, str(address)))
        entry.under_way = moving
        moving.add_done_callback(partial(self._ended, entry))
        await asyncio.wait({moving})
        if moving.cancelled():
            raise error(
                "DRAINING",
                f"the sidecar is shutting down: after its next start it finds out which sidecar has topic {topic.name}",
            )
        moving.result()
        return str(address)

    def _ended(self, entry: RegistryEntry[Topic], moving: "asyncio.Task[None]") -> None:
        if entry.under_way is moving:
            entry.ended(Phase.MOVING)
            self._topics.registry.tidy(entry.name)
        retrieve(moving)

    async def _move(self, topic: Topic, address: str) -> None:
        """Move the topic. When this returns, the other sidecar serves the topic. The steps are:

        1. The other sidecar states which data directory receives the topic.
        2. Log and snapshot are copied while the topic serves here.
        3. The topic accepts no more messages. Messages in flight settle, and the rest of the log is copied.
        4. A file in the log's folder states durably that the topic is leaving.
        5. The other sidecar becomes the owner of the topic.
        6. The topic is closed here, and the other sidecar is asked until it is certain which sidecar has the topic.

        A failure up to step 3 leaves the topic here unchanged. After step 4 only the other sidecar decides which
        sidecar has the topic. Raises MOVE_FAILED.
        """
        if (record := self._topics.registry.record(topic.name)) is None:
            raise self._topics.ownership.missing(topic.name)
        folder = self._logs.folder_of(record.incarnation)
        to: To | None = None
        try:
            async with self.others.giving(address) as call, self._logs.kept():
                giving = Giving(self._logs, self._topics.store, record, call)
                receiver = await giving.begin()  # 1
                await giving.copy_while_it_serves(topic)  # 2
                topic.check_serving()
                term = topic.term
                why_held = giving_away(topic.name)
                topic.hold(why_held)
                try:
                    await giving.copy_rest(topic)  # 3
                    if topic.state is not State.SERVING or topic.term != term:
                        raise error("MOVE_FAILED", f"its log has failed meanwhile: {topic.state.name} {topic.why}")
                    # From here on the topic may have left, whatever error occurs.
                    to = To(address, receiver)
                    await asyncio.to_thread(log_folder.leave, folder, to)  # 4
                    await giving.end(topic.confirmed_index)  # 5
                finally:
                    if to is None:
                        topic.release(why_held)
        except Exception as e:
            if not isinstance(e, SeqdedupeError | OSError | grpc.aio.AioRpcError | asyncio.InvalidStateError):
                logger.error("topic %s could not be moved", topic.name, exc_info=e)
            # After any error: release a topic that may have left, and serve a topic that has not left.
            why = e.message if isinstance(e, SeqdedupeError) else f"{type(e).__name__}: {e}"
            if to is None:
                raise error("MOVE_FAILED", f"topic {topic.name} stays here: {why}") from e
            logger.warning(
                "it is not known yet whether topic %s has moved to %s, and the sidecar keeps asking: %s",
                topic.name,
                address,
                why,
            )
        if to is not None:
            await self._let_go(topic, record, to)  # 6
            await self._found_out(record, to)

    async def _let_go(self, topic: Topic, record: TopicRecord, to: To) -> None:
        """Close the topic here. Its clients call again, and the error then contains the topic's new address."""
        why = log_folder.not_here(to, "has it, or is being asked whether it has it")
        async with self._topics.registry.locked(record.name) as entry:
            entry.found = Closed(record, why, State.STANDBY)
            self._topics.on_state(record.name, State.STANDBY)
            topic.has_successor = True
            await topic.close("it was moved to another sidecar")

    async def _found_out(self, record: TopicRecord, to: To) -> None:
        """Return when the other sidecar has the topic. Raises MOVE_FAILED if the other sidecar does not have the topic,
        or does not answer soon."""
        settling = self._topics.in_background(self._settle(record, to))
        await asyncio.wait({settling}, timeout=TAKE_SECONDS)
        folder = self._logs.folder_of(record.incarnation)
        # Or the topic was moved to that sidecar, and was moved back.
        if log_folder.moved_to(folder) is not None or self._is_gone(record):
            return
        why = "does not say whether it has the topic; this sidecar keeps asking"
        if log_folder.leaving_to(folder) is None:
            why = "does not have it, and this sidecar takes it again"
        raise error("MOVE_FAILED", f"topic {record.name}: the sidecar at {to.address} {why}")

    async def _settle(self, record: TopicRecord, to: To) -> None:
        """Ask until it is certain which sidecar has the topic.

        If the other sidecar does not have the topic, open the topic here again. Otherwise remove the topic here once
        the other sidecar serves it.
        """
        said = ""

        async def is_settled() -> bool:
            nonlocal said
            try:
                return await self._is_settled(record, to)
            except Exception as e:
                # Continue after any error. If this sidecar stopped asking, no sidecar might have the topic.
                if f"{type(e).__name__}: {e}" != said:
                    said = f"{type(e).__name__}: {e}"
                    is_defect = not isinstance(e, SeqdedupeError | OSError)
                    what = "it is not known yet which sidecar has topic %s: %s"
                    logger.warning(what, record.name, e, exc_info=e if is_defect else None)
                return False

        if not await is_settled():
            await again_until(is_settled)
        if not self._is_gone(record) and log_folder.moved_to(self._logs.folder_of(record.incarnation)) is None:
            if not await self._topics.lives.opened(record):
                self._topics.in_background(self._topics.lives.go_on_opening(record))
            elif topic := self._topics.registry.topic(record.name):
                await topic.recover()

    async def _is_settled(self, record: TopicRecord, to: To) -> bool:
        """Ask once, and act on the answer. Raises the reason if there is no answer; OSError, STORE_UNAVAILABLE."""
        folder = self._logs.folder_of(record.incarnation)
        if log_folder.moved_to(folder) is None:
            answer = await self._ask(record, to, is_known=False)
            async with self._topics.registry.locked(record.name):
                if self._is_gone(record):
                    return True
                await asyncio.to_thread(log_folder.has_left if answer.has_it else log_folder.stays, folder)
                if answer.has_it and log_folder.moved_to(folder) is None:
                    raise error("MOVE_FAILED", f"the sidecar at {to.address} has it, but no move is recorded here")
            logger.info("topic %s %s", record.name, f"was moved to {to.address}" if answer.has_it else "stays here")
            if not answer.has_it:
                return True
        answer = await self._ask(record, to, is_known=True)
        if answer.is_serving:
            # The topic may come back meanwhile.
            async with self._topics.registry.locked(record.name):
                if not self._is_gone(record):
                    await asyncio.to_thread(self._logs.remove_moved, record.incarnation)
                    await self._topics.store.flush(Snapshots(self._topics.store, record.incarnation).remove())
        return bool(answer.is_serving or not answer.has_it)

    async def _ask(self, record: TopicRecord, to: To, *, is_known: bool) -> admin_pb2.SettleMoveResponse:
        request = admin_pb2.SettleMoveRequest(
            topic=record.name,
            incarnation=record.incarnation,
            receiver=bytes.fromhex(to.receiver),
            is_known=is_known,
        )
        answer: admin_pb2.SettleMoveResponse = await self.others.ask(to.address, "SettleMove", request, TAKE_SECONDS)
        return answer

    def _is_gone(self, record: TopicRecord) -> bool:
        """Return whether the name now belongs to a different record than the moved topic's record, for example because
        the topic was moved back."""
        return self._topics.registry.record(record.name) is not record
