"""Giving a topic of this sidecar's own log to another sidecar, while producers and readers go on.

Most of the log is copied while the topic serves, and a snapshot. Then nothing is taken, the rest of the log follows,
and a file in its folder says that the topic is leaving: from there on the other sidecar alone says who has it. Until
that file is there everything that goes wrong leaves the topic as it was; afterwards the other one is asked until it
answers.
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

# -- What another sidecar is given of a topic: its log, most of it while the topic serves, and a snapshot.

PIECE_BYTES = 1024 * 1024 - 1024
"""Of what a message holds."""
ROUNDS = 20
"""So often what has come meanwhile is copied while the topic serves, until little is left."""
SLOW_ROUND = 3
"""From this one on those who publish wait every other TURN_SECONDS: where they take all that the machine has, what is
copied would never catch up."""
TURN_SECONDS = 0.25
READ_SECONDS = 600.0
"""For the other sidecar to read the snapshot, while the topic serves here."""
REST_BYTES = 4 * 1024 * 1024
"""So much is little."""
MAX_REST_BYTES = 64 * 1024 * 1024
"""What may be left in the end for when the topic takes nothing: where it is more, it grows faster than it is copied."""
REST_SECONDS = 10.0
"""For what is left then; given up after that, and the topic goes on here."""


class Giving:
    """What is given of a topic, on a call of ReceiveTopic."""

    def __init__(self, logs: EmbeddedLogs, store: Store, record: TopicRecord, call: Any) -> None:
        self._logs = logs
        self._store = store
        self._record = record
        self._call = call
        self._sent: dict[int, int] = {}
        """Of each segment, by its first index."""
        self._slowed: Topic | None = None
        self._turn: asyncio.TimerHandle | None = None
        self._why = giving_away(record.name)
        self._reads_snapshot = False
        """Whether the other one says when it has read the snapshot: an earlier version reads it at the end."""
        self._imported: ImportedWindow | None = None
        """What the store had when its records were sent."""

    async def begin(self) -> str:
        """Which data directory takes it, and by which move. Raises what that one refuses it for."""
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
            raise error("MOVE_FAILED", "the other sidecar does not say who it is")
        return receiver

    async def copy_while_it_serves(self, topic: Topic) -> None:
        """Log and snapshot, until the other one has read that, and little of the log is left. Raises MOVE_FAILED if
        that grows faster than it is copied."""
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
        """What is in flight settles, and follows. Raises MOVE_FAILED if that takes long, or a window was imported."""
        try:
            async with asyncio.timeout(REST_SECONDS):
                await topic.all_settled()
                if topic.policy.imported not in (None, self._imported):
                    raise error("MOVE_FAILED", "a window was imported meanwhile")
                await self._copy_log()
        except TimeoutError as e:
            why = f"what was in flight was not stored there within {REST_SECONDS:.0f} s"
            raise error("MOVE_FAILED", why) from e

    async def _copy_log(self) -> int:
        """Sends what was not sent yet; how many bytes that was. Raises LOG_DAMAGED; LOG_UNREADABLE, OSError."""
        if (parts := self._logs.parts().get(self._record.incarnation)) is None:
            raise error("MOVE_FAILED", "its log was closed")
        count = 0
        for part in parts:
            if (at := self._sent.get(part.base_index)) is None:
                await asyncio.to_thread(_check, part)
                at = 0
                if not part.end:
                    # What it begins with counts.
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
        """Holds the topic until this turn is over, if it is one of those, and no longer whatever the other sidecar
        does."""
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
        """All of it is there: the other one has it, and serves it, on return."""
        await self._send(end=admin_pb2.MovedEnd(next_index=next_index))
        await self._answer(TAKE_SECONDS)

    async def _send(self, **fields: Any) -> None:
        try:
            async with _in_time(SILENT_SECONDS):
                await self._call.write(admin_pb2.ReceiveTopicRequest(**fields))
        except asyncio.InvalidStateError:
            # The call is over: this says why.
            await self._call.read()
            raise

    async def _answer(self, seconds: float) -> admin_pb2.ReceiveTopicResponse:
        async with _in_time(seconds):
            answer = await self._call.read()
        if answer is grpc.aio.EOF:
            raise error("MOVE_FAILED", "the other sidecar ended it without an answer")
        found: admin_pb2.ReceiveTopicResponse = answer
        return found


def giving_away(name: str) -> SeqdedupeError:
    """What whoever publishes is told."""
    return error("RECOVERING", f"topic {name} is being moved to another sidecar")


@asynccontextmanager
async def _in_time(seconds: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as e:
        raise error("UNREACHABLE", f"the other sidecar does not go on within {seconds:.0f} s") from e


def _check(part: DurablePart) -> None:
    """Raises LOG_DAMAGED: what is damaged is not moved; NEWER_FORMAT, OSError."""
    for found in inspect_part(part, os.pread):
        if isinstance(found, Damage):
            why = f"{found.file}, byte {found.offset}: {found.what}"
            raise error("LOG_DAMAGED", why, file=found.file, offset=found.offset)


def _read(part: DurablePart, offset: int) -> bytes:
    with part.path.open("rb", buffering=0) as file:
        data = os.pread(file.fileno(), min(PIECE_BYTES, part.end - offset), offset)
    if not data:
        raise error("MOVE_FAILED", f"{part.path} ends at {offset}, and should go on to {part.end}")
    return data


def _pieces(parts: Iterator[bytes]) -> Iterator[bytes]:
    """The same bytes, in pieces that a message may have."""
    waiting = bytearray()
    for part in parts:
        waiting += part
        while len(waiting) > PIECE_BYTES:
            yield bytes(waiting[:PIECE_BYTES])
            del waiting[:PIECE_BYTES]
    yield bytes(waiting)


# -- A topic that leaves, from the call that moves it until it is certain who has it.


class Departures:
    """Moves that are under way, and those of which it is still to be found out what became of them.

    What a topic is to this sidecar is said by the files in its log's folder:

        served here ── moved.leave ──> leaving ── the other one has it: moved.has_left ──> moved
             ^                            │                                                 │ it serves it, and knows
             └── it has it not: stays ────┘                                                 v
                                                                      nothing is left but where it went
    """

    def __init__(self, logs: EmbeddedLogs, topics: Topics[Topic], others: Neighbours) -> None:
        self.address = ""
        """Where this sidecar is reached, once it listens."""
        self._logs = logs
        self._topics = topics
        self._others = others

    def go_on(self) -> None:
        """After a start: asks what became of those that were leaving, and removes what is not needed any more."""
        self._topics.in_background(self._go_on())

    async def _go_on(self) -> None:
        for record, to in await asyncio.to_thread(self._not_settled, [*self._topics.known_records()]):
            self._topics.in_background(self._settle(record, to))

    def _not_settled(self, of: list[TopicRecord]) -> list[tuple[TopicRecord, To]]:
        found: list[tuple[TopicRecord, To]] = []
        for record in of:
            folder = self._logs.folder_of(record.incarnation)
            # Where they cannot be read the topic says so.
            with suppress(SeqdedupeError, OSError):
                if (to := log_folder.leaving_to(folder)) is None and (to := log_folder.moved_to(folder)) is not None:
                    to = to if log_folder.has_messages(folder) else None
                if to is not None:
                    found.append((record, to))
        return found

    async def move(self, name: str, to: str) -> str:
        """Gives the topic to the sidecar at this address, which serves it on return; to this one: it has it already.
        Goes on if the caller does not.

        Raises INVALID_ADDRESS, INVALID_REQUEST, DRAINING, MOVE_FAILED, and why the topic does not serve.
        """
        try:
            topic = await find(self._topics, name)
        except SeqdedupeError as e:
            record = self._topics.registry.record(topic_name(name))
            is_there = e.reason == "NOT_OWNER" and e.numbers.get("owner_address") == to
            if is_there and record is not None and self._logs.has_moved(record.incarnation):
                # It has been done before.
                return to
            raise
        topic.check_serving()
        if not to:
            why = f"to which sidecar topic {topic.name} is to go was not said"
            hint = "Say it (`--to ADDRESS`). Only in a cluster whoever takes it may have it."
            raise error("INVALID_ADDRESS", why, hint=hint)
        if str(SidecarAddress.parse(to)) == self.address:
            return to
        if self._logs.has_arrived(topic.incarnation):
            # That one asks here whether it came, and is told no where it has gone on.
            why = f"the sidecar that topic {topic.name} came from does not know yet that it is here"
            raise error("RECOVERING", why)
        if (address := self._others.allowed(to)) is None:
            hint = (
                "Name the other sidecar among this one's `peers`: all of the log goes there, and what makes it its own."
            )
            raise error("INVALID_ADDRESS", f"{to!r} is none of the sidecars that a topic may be given to", hint=hint)
        if self._topics.partitions_beside(topic.name):
            raise error("INVALID_REQUEST", f"{topic.name} is a partition: they stay together")
        entry = self._topics.registry.entry(topic.name)
        entry.change_to(Phase.MOVING)
        # A sidecar that drains gives it up, wherever it is.
        moving = self._topics.in_background(self._move(topic, str(address)))
        entry.under_way = moving
        moving.add_done_callback(partial(self._ended, entry))
        await asyncio.wait({moving})
        if moving.cancelled():
            raise error(
                "DRAINING", f"the sidecar is shutting down: who has topic {topic.name} is known when it is back"
            )
        moving.result()
        return str(address)

    def _ended(self, entry: RegistryEntry[Topic], moving: "asyncio.Task[None]") -> None:
        if entry.under_way is moving:
            entry.ended(Phase.MOVING)
            self._topics.registry.tidy(entry.name)
        retrieve(moving)

    async def _move(self, topic: Topic, address: str) -> None:
        """The other sidecar serves the topic on return:

        1. The other sidecar says which data directory takes the topic.
        2. Log and snapshot are copied while the topic serves here.
        3. The topic takes nothing more. What is in flight settles, and the rest of the log follows.
        4. A file in the log's folder says that the topic is leaving, durably.
        5. The other sidecar makes the topic its own.
        6. The topic is closed here, and the other sidecar is asked until it is certain who has it.

        Whatever goes wrong up to 3 leaves the topic here as it was; after 4 the other sidecar alone says who has it.
        Raises MOVE_FAILED.
        """
        if (record := self._topics.registry.record(topic.name)) is None:
            raise self._topics.ownership.missing(topic.name)
        folder = self._logs.folder_of(record.incarnation)
        to: To | None = None
        try:
            async with self._others.giving(address) as call, self._logs.kept():
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
                    # From here on it need not stay, whatever is raised.
                    to = To(address, receiver)
                    await asyncio.to_thread(log_folder.leave, folder, to)  # 4
                    await giving.end(topic.confirmed_index)  # 5
                finally:
                    if to is None:
                        topic.release(why_held)
        except Exception as e:
            if not isinstance(e, SeqdedupeError | OSError | grpc.aio.AioRpcError | asyncio.InvalidStateError):
                logger.error("topic %s could not be moved", topic.name, exc_info=e)
            # Whatever it is: a topic that may have left is let go of, and one that has not is taken up again.
            why = e.message if isinstance(e, SeqdedupeError) else f"{type(e).__name__}: {e}"
            if to is None:
                raise error("MOVE_FAILED", f"topic {topic.name} stays here: {why}") from e
            logger.warning("what became of moving topic %s to %s is being found out: %s", topic.name, address, why)
        if to is not None:
            await self._let_go(topic, record, to)  # 6
            await self._found_out(record, to)

    async def _let_go(self, topic: Topic, record: TopicRecord, to: To) -> None:
        """Whoever uses the topic here comes again, and is told where it is."""
        why = log_folder.not_here(to, "has it, or is asked whether it has it")
        async with self._topics.registry.locked(record.name) as entry:
            entry.found = Closed(record, why, State.STANDBY)
            self._topics.on_state(record.name, State.STANDBY)
            topic.has_successor = True
            await topic.close("it was moved to another sidecar")

    async def _found_out(self, record: TopicRecord, to: To) -> None:
        """Returns when the other one has the topic. Raises MOVE_FAILED if it has not, or that is not known soon."""
        settling = self._topics.in_background(self._settle(record, to))
        await asyncio.wait({settling}, timeout=TAKE_SECONDS)
        folder = self._logs.folder_of(record.incarnation)
        # Or it was, and has come back.
        if log_folder.moved_to(folder) is not None or self._is_gone(record):
            return
        why = "does not say whether it has it, and is asked"
        if log_folder.leaving_to(folder) is None:
            why = "has it not: it is taken again here"
        raise error("MOVE_FAILED", f"topic {record.name}: the sidecar at {to.address} {why}")

    async def _settle(self, record: TopicRecord, to: To) -> None:
        """Asks until it is certain who has the topic. If the other one has it not it is opened here again; if it has,
        nothing is left of it here once that one serves it."""
        said = ""

        async def is_settled() -> bool:
            nonlocal said
            try:
                return await self._is_settled(record, to)
            except Exception as e:
                # Whatever it is: who gives up asking leaves the topic with nobody.
                if f"{type(e).__name__}: {e}" != said:
                    said = f"{type(e).__name__}: {e}"
                    is_defect = not isinstance(e, SeqdedupeError | OSError)
                    what = "who has topic %s is not known yet: %s"
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
        """Asks, and obeys. Raises why the other one does not answer; OSError, STORE_UNAVAILABLE."""
        folder = self._logs.folder_of(record.incarnation)
        if log_folder.moved_to(folder) is None:
            answer = await self._ask(record, to, is_known=False)
            async with self._topics.registry.locked(record.name):
                if self._is_gone(record):
                    return True
                await asyncio.to_thread(log_folder.has_left if answer.has_it else log_folder.stays, folder)
                if answer.has_it and log_folder.moved_to(folder) is None:
                    raise error("MOVE_FAILED", f"the sidecar at {to.address} has it, and was not told that it may")
            logger.info("topic %s %s", record.name, f"was moved to {to.address}" if answer.has_it else "stays here")
            if not answer.has_it:
                return True
        answer = await self._ask(record, to, is_known=True)
        if answer.is_serving:
            # It may come back meanwhile.
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
        answer: admin_pb2.SettleMoveResponse = await self._others.ask(to.address, "SettleMove", request, TAKE_SECONDS)
        return answer

    def _is_gone(self, record: TopicRecord) -> bool:
        """Whether the topic that was given away is not what has its name now: it has come back, perhaps."""
        return self._topics.registry.record(record.name) is not record
