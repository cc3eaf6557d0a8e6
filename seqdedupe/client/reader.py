"""The reader of a topic or of a topic's partitions. It delivers messages in order. After a reconnect it neither skips
nor repeats a message."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Literal, NamedTuple

import grpc.aio
from google.protobuf.message import DecodeError

from seqdedupe import wire
from seqdedupe.batch import decode
from seqdedupe.client.connection import (
    CALL_TIMEOUT_SECONDS,
    IMPATIENT_SECONDS,
    KEEPALIVE_SECONDS,
    NOT_A_SIDECAR,
    Backoff,
    channel_to,
    check_not_forked,
    of_known_topic,
    typed_errors,
)
from seqdedupe.client.cursor import Cursor, CursorMoves, Kept
from seqdedupe.client.message import Message, Messages, StoredBatch
from seqdedupe.client.pending import NO_PARTITION
from seqdedupe.client.route import OnWaiting, Route, Sidecars, WaitingNotice
from seqdedupe.errors import SeqdedupeError, UnavailableError, error
from seqdedupe.figures import counted
from seqdedupe.message_id import MessageId, MessageIds, Position, checked_index
from seqdedupe.names import topic_name
from seqdedupe.v1 import read_pb2

Start = Position | MessageId | int | Literal["earliest", "latest"]
"""Where to start: after a position or a message ID, at an index, with the first stored message, or with the next
message published.

A message ID alone must be from the embedded log, where it contains the index. For other logs, use a position.
"""

_READ_STREAM = "/seqdedupe.v1.ReadService/ReadStream"
_GET_LAST_MESSAGE_ID = "/seqdedupe.v1.ReadService/GetLastMessageId"
_FIRST_DELAY_SECONDS = 0.02
_LONGEST_DELAY_SECONDS = 2.0

_MISSED = 2
"""The connection counts as broken after the sidecar has omitted this number of heartbeats. Pings are not sufficient,
because a proxy may answer them for a host that does not respond."""

MAX_MISFITS = 5
"""The maximum number of consecutive streams whose answers do not follow the messages read so far. A component
between client and sidecar may repeat or drop answers. After one more such stream, the reader ends with the first
inconsistency."""


class Reader(Messages):
    """Reads a topic: `async for message in reader`, or `async for stored in reader.batches()` for whole batches.

    `start` is one of: a position or message ID (the reader starts after it), an index, "earliest" (the first stored
    message), or "latest" (the first message published after the reader has connected). By default the reader ends with
    the last message that existed when the reader connected. With `follow` the reader never ends. With `stop_index` the
    reader ends before that index, and waits for messages that do not exist yet. After a lost connection, or while the
    topic recovers, the reader waits without a time limit and then continues. The reader skips and repeats no message.
    `position` is the position of the last message returned.

    With a `cursor` the reader starts after the cursor's position. If the cursor has no position, the reader starts at
    `start`. `save_position` moves the cursor. Call it when the effects of all messages returned so far are complete.
    After a crash, the reader returns the messages since the last saved position again. So their effects should be
    idempotent.

    If an answer does not follow the earlier answers, the reader reads again over a new stream. If that does not help,
    it raises ANSWERS_INCONSISTENT.

    A message that is damaged on the sidecar's disk ends the reader. With `skip_damaged` the reader continues with the
    next readable message. `skipped` contains the indexes of the missing messages before the reader returns any later
    message.

    `on_waiting` is called on the event loop, with the reason, if the reader has waited for a second for the sidecar or
    for the topic's recovery. It is called once for each such wait. Waiting for new messages does not count.

    The reader raises these errors:

    - `PositionError`: the messages are trimmed, the topic was recreated, or the topic now ends before the end that it
      had when the reader connected.
    - `NotFoundError`: the topic is unknown.
    - `DamagedError`: stored messages are damaged (not with `skip_damaged`), or answers are inconsistent.
    """

    def __init__(
        self,
        sidecars: Sidecars,
        topic: str,
        start: Start = "earliest",
        *,
        follow: bool = False,
        stop_index: int | None = None,
        skip_damaged: bool = False,
        on_waiting: OnWaiting | None = None,
        partition: int = NO_PARTITION,
        cursor: Cursor | None = None,
    ) -> None:
        if stop_index is not None and follow:
            what = f"stop_index is {stop_index}: a reader that follows has no end"
            raise error("INVALID_REQUEST", what, hint="Omit stop_index, or follow.")
        self.topic = topic_name(topic)
        self.skipped: list[range] = []
        """With `skip_damaged`, the indexes of the messages skipped, in order."""
        self._partition = partition
        self._cursor = None if cursor is None else CursorMoves(cursor)
        self._knows_cursor = cursor is None
        self._skip_damaged = skip_damaged
        self._waiting = WaitingNotice(on_waiting)
        self._sidecars = sidecars
        self._route = Route(sidecars, self.topic)
        self._start = start
        self._follow = follow
        self._incarnation: int | None = None
        self._is_topic_known = False
        """Whether a sidecar has answered that the topic exists."""
        self._next_index: int | None = None  # None: unknown before the first message
        self._stop_index = None if stop_index is None else checked_index(stop_index)
        self._stops_at_end = stop_index is None and not follow  # the first connection sets the stop index
        self._after: Position | None = None
        self._channel: grpc.aio.Channel | None = None
        self._call: grpc.aio.UnaryStreamCall[Any, Any] | None = None
        self._silent_seconds: float | None = None
        """The connection counts as broken if the stream is silent for longer than this. None: no limit."""
        self._records: list[Any] = []  # the records of the last answer, in reverse
        self._stored: StoredBatch | None = None  # the batch in hand, and the next row of it
        self._row = 0
        self._closed = False
        self._has_begun = False  # a sidecar has answered
        self._misfits: list[SeqdedupeError] = []
        """The inconsistencies of answers: one for each stream since a stream last made progress."""
        self._is_misled = False
        """Whether the current stream had an inconsistent answer."""
        self._backoff = Backoff(_FIRST_DELAY_SECONDS, _LONGEST_DELAY_SECONDS)
        if isinstance(start, Position):
            self._read_on_after(start)
        elif isinstance(start, MessageId):
            self._read_on_after(Position.of(start))
        elif isinstance(start, int):
            self._next_index = checked_index(start)
        elif start not in ("earliest", "latest"):
            raise error("INVALID_POSITION", f"{start!r} is neither a position nor 'earliest' nor 'latest'")
        self._before: Position | None = self._after  # the position before the batch in hand

    def _read_on_after(self, position: Position) -> None:
        self._after, self._incarnation, self._next_index = position, position.incarnation, position.index + 1

    async def save_position(self) -> None:
        """Move the cursor to `position`. When the call returns, the new position is durable. If there is no position
        yet, or the cursor already has this position, nothing changes. Raises CURSOR_MOVED if another owner has moved
        the cursor since this reader read it; INVALID_REQUEST if the reader has no cursor. Raises OUTCOME_UNKNOWN if the
        answer was lost; then call `save_position` again."""
        if self._cursor is None:
            raise error("INVALID_REQUEST", f"this reader of {self.topic} was given no cursor")
        position = self.position
        kept = self._cursor.kept
        if position is not None and self._knows_cursor and not (kept and kept.position == position):
            await self._cursor.move(Kept(position))

    async def _start_at_cursor(self, cursor: CursorMoves) -> None:
        kept = await cursor.read()
        if kept is not None:
            self._read_on_after(kept.position)
            self._before = kept.position
        self._knows_cursor = True

    @property
    def position(self) -> Position | None:
        """The position of the last message returned. Before the reader returns the first message, this is the start
        position, or None while the start position is not known."""
        stored, row = self._stored, self._row  # Read in this order: the event loop may fetch the next batch meanwhile.
        return stored.position(row - 1) if stored is not None and row else self._before

    def has_in_hand(self) -> bool:
        return self._stored is not None and self._row < len(self._stored)

    def next_in_hand(self) -> Message | None:
        if self._stored is None or self._row >= len(self._stored):
            return None
        self._row += 1
        return Message(self._stored, self._row - 1)

    def rest_in_hand(self) -> StoredBatch | None:
        stored, row = self._stored, self._row
        if stored is None:
            return None
        self._row = len(stored)
        return stored.rest(row)

    async def fetch(self) -> bool:
        check_not_forked()
        if not self._knows_cursor and self._cursor is not None:
            await self._start_at_cursor(self._cursor)
        while not self._closed:
            try:
                if self.take_record():
                    return True
                if self._is_misled:
                    await self._begin_again()
                    continue
                with typed_errors(self._route.address):
                    if self._call is None and not await self._connect():
                        return False
                    if not await self._receive():
                        return False
            except SeqdedupeError as failure:
                await self._disconnect()
                e = self._route.doubted(failure)
                if not isinstance(e, UnavailableError):
                    if self._is_topic_known:
                        of_known_topic(failure)
                    raise
                moves_on = self._route.moves_on(e)
                if e.reason == NOT_A_SIDECAR and not (moves_on or self._has_begun):
                    raise
                self._waiting.waits(self._route.told())
                if not moves_on:
                    await asyncio.sleep(max(self._backoff.next_seconds(), e.retry_delay_ms / 1000))
            except BaseException:
                # The call was cancelled or refused: drop the stream, and let a later call start from the position.
                await self._disconnect()
                raise
        return False

    def take_record(self) -> bool:
        if self._closed or not self._records:
            return False
        try:
            self._take_in_hand(self._records[-1])
        except SeqdedupeError as e:
            self._doubt(e)
            return False
        self._records.pop()
        return True

    def _doubt(self, misfit: SeqdedupeError) -> None:
        """Accept no further answers from the current stream, because an answer was inconsistent. `fetch` then opens
        another stream."""
        self._misfits.append(misfit)
        self._is_misled = True
        self._records.clear()

    async def _begin_again(self) -> None:
        """Disconnect and pause, so that the reader connects again. After too many inconsistent streams, raise the first
        inconsistency."""
        await self._disconnect()
        if len(self._misfits) > MAX_MISFITS:
            first, *_ = self._misfits
            self._misfits.clear()
            raise first
        await asyncio.sleep(_FIRST_DELAY_SECONDS * 2 ** len(self._misfits))

    async def close(self) -> None:
        self._closed = True
        await self._disconnect()

    async def _disconnect(self) -> None:
        channel, call = self._channel, self._call
        self._channel = self._call = None
        self._is_misled = False
        self._records.clear()
        if call is not None:
            call.cancel()
        if channel is not None:
            await channel.close()

    async def _connect(self) -> bool:
        """Begin to read at the next index. Return false if there is nothing to read, or the reader was closed."""
        channel = self._channel = channel_to(self._sidecars, self._route.address)
        # Without a next index: retention may have trimmed everything before the stop index.
        may_be_trimmed = self._next_index is None and self._stop_index is not None
        if self._incarnation is None or may_be_trimmed or (self._stops_at_end and not self._is_at_stop):
            await self._look_at_the_ends(channel)
        if self._is_at_stop or self._closed:
            return False
        request = read_pb2.ReadStreamRequest(
            topic=self.topic,
            start=self._read_start(),
            skip_damaged=self._skip_damaged,
            alive_ms=1000 * (KEEPALIVE_SECONDS if self._route.is_one else IMPATIENT_SECONDS),
        )
        if self._stop_index is None:
            request.follow = True
        else:
            request.stop_index = self._stop_index
        self._silent_seconds = None
        call: grpc.aio.UnaryStreamCall[Any, Any] = channel.unary_stream(
            _READ_STREAM,
            request_serializer=read_pb2.ReadStreamRequest.SerializeToString,
        )(request)
        self._call = call
        # A sidecar sends the metadata at once, even if there is no message to read.
        try:
            async with asyncio.timeout(CALL_TIMEOUT_SECONDS):
                await call.initial_metadata()
        except TimeoutError as e:
            what = f"the sidecar at {self._route.address} has not begun to answer a read stream in time"
            raise error("OUTCOME_UNKNOWN", what, hint="The sidecar's log shows what the sidecar waits for.") from e
        self._has_begun |= not call.done()
        return True

    @property
    def _is_at_stop(self) -> bool:
        return self._stop_index is not None and (self._next_index or 0) >= self._stop_index

    async def _look_at_the_ends(self, channel: grpc.aio.Channel) -> None:
        """Determine the position of "latest" and the end of the topic once, so that both stay the same after a
        reconnect."""
        answer: read_pb2.GetLastMessageIdResponse | None = await channel.unary_unary(
            _GET_LAST_MESSAGE_ID,
            request_serializer=read_pb2.GetLastMessageIdRequest.SerializeToString,
            response_deserializer=read_pb2.GetLastMessageIdResponse.FromString,
        )(read_pb2.GetLastMessageIdRequest(topic=self.topic), timeout=CALL_TIMEOUT_SECONDS)
        if answer is None or not answer.last.incarnation:
            raise DecodeError("it does not say where the topic ends")
        self._has_begun = True
        last = Position.from_proto(answer.last)
        self._check_incarnation(last.incarnation)
        if self._start == "latest" and self._after is None:
            self._read_on_after(last)
            self._before = last
        if self._next_index is None and self._stop_index is not None and self._stop_index <= answer.first_index:
            self._next_index = answer.first_index  # retention has trimmed everything before the stop
        if self._stops_at_end:
            if self._stop_index is not None and self._stop_index > last.index + 1:
                raise error(
                    "POSITION_AFTER_END",
                    f"{self.topic} ended with index {self._stop_index - 1} when this reader began, and ends with index "
                    f"{last.index} now",
                    index=self._stop_index,
                    end_index=last.index + 1,
                )
            if self._stop_index is None:
                self._stop_index = last.index + 1
            if self._next_index is not None and self._next_index > self._stop_index:
                asked = f"index {self._next_index}" if self._after is None else f"the position {self._after}"
                raise error(
                    "POSITION_AFTER_END",
                    f"{asked} is after the end of {self.topic}, whose next message gets index {self._stop_index}",
                    hint=f"Start at an index up to {self._stop_index}, or at the latest."
                    if self._after is None
                    else None,
                    index=self._next_index,
                    end_index=self._stop_index,
                )

    def _read_start(self) -> read_pb2.ReadStart:
        # After skipped messages, continue at the index: the position before the skipped messages would return them
        # again.
        if self._after is not None and self._next_index == self._after.index + 1:
            return read_pb2.ReadStart(after=self._after.to_proto())
        if self._next_index is not None:
            return read_pb2.ReadStart(index=self._next_index)
        return read_pb2.ReadStart(earliest=True)

    async def _receive(self) -> bool:
        """Handle the next answer. Return false when the stream has ended at the stop index."""
        call = self._call
        if call is None:
            return False
        try:
            async with asyncio.timeout(self._silent_seconds):
                raw = await call.read()
        except TimeoutError as e:
            what = f"the sidecar at {self._route.address} was to say that it is there, and was silent for"
            raise error("UNREACHABLE", f"{what} {self._silent_seconds:.0f} s") from e
        if not isinstance(raw, bytes):  # grpc.aio.EOF
            if self._is_at_stop:
                return False
            raise error("UNREACHABLE", f"the sidecar at {self._route.address} ended the stream before its end")
        answer = wire.ReadStreamResponse.FromString(raw)
        if not answer.incarnation:
            raise DecodeError("there is no incarnation in it")
        if answer.alive_ms:
            self._silent_seconds = _MISSED * answer.alive_ms / 1000
        self._waiting.goes_on()
        try:
            self._check_incarnation(answer.incarnation)
            if answer.HasField("skipped"):
                self._skip(answer.skipped.first_index, answer.skipped.next_index)
        except SeqdedupeError as e:
            self._doubt(e)
            return True
        self._records = [record for record in reversed(answer.records) if record.HasField("batch")]
        if self._records:
            self._goes_well()
        return True

    def _check_incarnation(self, incarnation: int) -> None:
        self._is_topic_known = True
        if self._incarnation not in (None, incarnation):
            raise error(
                "POSITION_OF_ANOTHER_INCARNATION",
                f"{self.topic} is the incarnation {incarnation}, and the position is of {self._incarnation}: the "
                "topic was deleted and created again, or the position is of another topic",
                incarnation=incarnation,
                position_incarnation=self._incarnation,
            )
        self._incarnation = incarnation

    def _skip(self, first_index: int, next_index: int) -> None:
        """Record the indexes that the sidecar skips. After a reconnect the sidecar may report some of these indexes
        again."""
        expected = first_index if self._next_index is None else self._next_index
        if first_index > expected:
            raise self._not_the_next(f"{first_index} to {next_index - 1} were skipped", first_index)
        if expected < next_index:
            self.skipped.append(range(expected, next_index))
            self._next_index = next_index
            self._misfits.clear()
        self._goes_well()

    def _goes_well(self) -> None:
        self._backoff.reset()
        self._route.goes_well()

    def _not_the_next(self, what: str, index: int) -> SeqdedupeError:
        read = "was not read yet" if self._next_index is None else f"was read up to index {self._next_index}"
        return error(
            "ANSWERS_INCONSISTENT",
            f"{self.topic} {read}, then {what}",
            expected_index=self._next_index,
            index=index,
        )

    def _take_in_hand(self, record: Any) -> None:
        incarnation, base_index = record.incarnation, record.base_index
        self._check_incarnation(incarnation)
        try:
            batch = decode(record.batch)
        except SeqdedupeError as e:
            raise self._not_the_next(f"came {base_index}, whose batch is none", base_index) from e
        if record.rows != len(batch) or self._next_index not in (None, base_index):
            raise self._not_the_next(
                f"came {base_index} with {len(batch)} of {counted(record.rows, 'row')}", base_index
            )
        try:
            ids = MessageIds.of_record(record)
        except ValueError as e:
            what = f"the message IDs of {self.topic} from index {base_index} on are wrong: {e}"
            raise error("ANSWERS_INCONSISTENT", what, index=base_index) from e
        self._before = self.position
        publish_time_ms, ownership = record.publish_time_ms, record.ownership
        self._row = 0
        self._stored = StoredBatch(batch, base_index, publish_time_ms, incarnation, ownership, ids, self._partition)
        self._read_on_after(self._stored.position(len(batch) - 1))
        self._misfits.clear()


# -- The reader of a partitioned topic: the messages of each partition in order, the partitions in turn.

_FORM = "partitions-1:"
"""The prefix of a position's text. It identifies the version of the format."""

_PARTITIONED = "Begin at earliest or latest, or at a position that a reader of the whole topic gave."


class PartitionedPosition(NamedTuple):
    """The position of a reader of a partitioned topic: one position for each partition, in the order of the partition
    numbers.

    `str()` returns a text that `parse` reads. Two partitioned positions have no order.
    """

    partitions: tuple[Position, ...]

    def __str__(self) -> str:
        return _FORM + ",".join(map(str, self.partitions))

    @staticmethod
    def parse(text: str) -> "PartitionedPosition":
        """Parse the text of a position that `str()` returned. Raises INVALID_POSITION."""
        if not text.startswith(_FORM):
            what = f"{text[:80]!r} is not a position in a partitioned topic, such as {_FORM}123@45,…"
            raise error("INVALID_POSITION", what, hint=_PARTITIONED)
        return PartitionedPosition(tuple(Position.parse(one) for one in text.removeprefix(_FORM).split(",")))


PartitionedStart = PartitionedPosition | Literal["earliest", "latest"]


class PartitionEnds(NamedTuple):
    """Two positions of a partition: before the partition's first stored message, and after the partition's last
    message."""

    earliest: Position
    latest: Position


class PartitionedReader(Messages):
    """Reads all partitions of a topic: `async for message in reader`, or `reader.batches()` for whole batches.

    The reader uses one `Reader` for each partition, with the behaviour described there. It returns batches of the
    partitions in turn, as the batches arrive. Messages of different partitions have no order. The reader ends when the
    readers of all partitions have ended; with `follow` it never ends. `message.partition` is the partition of a
    message. To continue later, start at `position`.

    `Client.partitioned_reader` makes a partitioned reader. The function `ends` looks up the ends of all partitions, and
    the function `part` makes the reader of one partition. A reader raises the errors of `Reader`, INVALID_REQUEST for a
    topic without partitions, and INVALID_POSITION for a position with a different number of partitions.
    """

    def __init__(
        self,
        topic: str,
        start: PartitionedStart,
        ends: Callable[[], Awaitable[list[PartitionEnds]]],
        part: Callable[[int, Start], Reader],
    ) -> None:
        if not isinstance(start, PartitionedPosition) and start not in ("earliest", "latest"):
            what = f"{start!r} is neither a position in a partitioned topic nor 'earliest' nor 'latest'"
            raise error("INVALID_POSITION", what, hint=_PARTITIONED)
        self.topic = topic
        self._start = start
        self._ends = ends
        self._part = part
        self._readers: list[Reader] = []
        self._fetching: dict[int, asyncio.Task[bool]] = {}
        self._ended: set[int] = set()
        self._starts: tuple[Position, ...] = ()
        self._turn = 0  # the partition of the current or last batch
        self._holds = False  # whether there is a current batch
        self._closed = False

    @property
    def position(self) -> PartitionedPosition | None:
        """The position of each partition, after the last message returned from the partition. Before the first read:
        the start position; None without a start position."""
        if not self._readers:
            return self._start if isinstance(self._start, PartitionedPosition) else None
        each = zip(self._readers, self._starts, strict=True)
        return PartitionedPosition(tuple(reader.position or start for reader, start in each))

    @property
    def skipped(self) -> dict[int, list[range]]:
        """With `skip_damaged`, this contains the indexes of skipped messages, in order, for each partition."""
        return {k: reader.skipped for k, reader in enumerate(self._readers)}

    def has_in_hand(self) -> bool:
        return self._holds and self._readers[self._turn].has_in_hand()

    def next_in_hand(self) -> Message | None:
        return self._readers[self._turn].next_in_hand() if self._holds else None

    def rest_in_hand(self) -> StoredBatch | None:
        return self._readers[self._turn].rest_in_hand() if self._holds else None

    def take_record(self) -> bool:
        """Make a received record the current batch, from the next partition that has a record. Otherwise the same as
        for a single topic."""
        if not self._readers:
            return False
        self._holds = False
        count = len(self._readers)
        for k in ((self._turn + 1 + i) % count for i in range(count)):
            reader = self._readers[k]
            task = self._fetching.get(k)
            if task is not None:
                if not task.done():
                    continue
                del self._fetching[k]
                if not task.result():
                    self._ended.add(k)
            if reader.has_in_hand() or reader.take_record():
                self._turn, self._holds = k, True
                return True
        return False

    async def fetch(self) -> bool:
        if not self._readers and not self._closed:
            await self._open()
        while not self._closed:
            if self.take_record():
                return True
            for k, reader in enumerate(self._readers):
                if k not in self._ended and k not in self._fetching:
                    self._fetching[k] = asyncio.ensure_future(reader.fetch())
            if not self._fetching:
                return False
            await asyncio.wait(self._fetching.values(), return_when=asyncio.FIRST_COMPLETED)
        return False

    async def _open(self) -> None:
        ends = await self._ends()
        if isinstance(self._start, PartitionedPosition):
            self._starts = self._start.partitions
            if len(self._starts) != len(ends):
                what = f"the position has {counted(len(self._starts), 'partition')}, and {self.topic} has {len(ends)}"
                raise error(
                    "INVALID_POSITION",
                    what,
                    hint="The position is of a different topic, or the topic was created again.",
                )
        else:
            self._starts = tuple(one.earliest if self._start == "earliest" else one.latest for one in ends)
        self._readers = [self._part(k, start) for k, start in enumerate(self._starts)]
        for reader in self._readers:
            reader._has_begun = True  # a sidecar has answered

    async def close(self) -> None:
        self._closed = True
        for reader in self._readers:
            await reader.close()
        for task in self._fetching.values():
            task.cancel()
        await asyncio.gather(*self._fetching.values(), return_exceptions=True)
