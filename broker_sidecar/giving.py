"""What another sidecar is given of a topic: its log, most of it while the topic serves, and a snapshot."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from broker_sidecar.neighbours import SILENT_SECONDS, TAKE_SECONDS
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.format import headers
from seqdedupe.log.embedded.arrival import MOVE_BYTES, RECEIVER_BYTES
from seqdedupe.log.embedded.inspection import Damage, DurablePart, inspect_part
from seqdedupe.log.embedded.logs import EmbeddedLogs
from seqdedupe.store import records
from seqdedupe.store.db import Store
from seqdedupe.store.incoming import row_bytes
from seqdedupe.store.topics import TopicRecord
from seqdedupe.topic.imported_window import ImportedWindow
from seqdedupe.topic.publishing import Topic
from seqdedupe.v1 import admin_pb2

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
            store_format_version=records.FORMAT_VERSION,
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
        await topic.snapshot()
        self._imported = topic.policy.imported
        rows = self._store.scan(*records.snapshot_range(self._record.incarnation))
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
