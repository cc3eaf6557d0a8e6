"""A publish stream to one topic. Several producers share the stream, and their small frames are combined into one
message.

Begin with `PublishStream`. The functions before it combine small frames (`parts_of`, `whole`). The classes after it
manage the connections that the producers of a client share, with one stream for each topic.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import grpc.aio
import numpy as np

from seqdedupe.address import SidecarAddress
from seqdedupe.batch import NO_INT32S, NO_INT64S, Batch, Binary, Int32s, Int64s
from seqdedupe.client.connection import CALL_TIMEOUT_SECONDS, channel_to, refusal_error, typed_errors
from seqdedupe.client.pending import InFlightBatch, ReceiptColumns
from seqdedupe.client.publish_calls import Openings, StreamAnswer, exchange, publish_call
from seqdedupe.client.route import Sidecars
from seqdedupe.errors import SeqdedupeError, UnavailableError, error
from seqdedupe.limits import MAX_BATCH_ROWS, NO_SEQUENCE_ID

# -- Frames of several producers combined into one: a message then costs less.

SMALL_BATCH_BYTES = 16 * 1024
"""A batch above this size is sent in a separate frame: copying the batch would cost more than combining saves."""

S = TypeVar("S")


@dataclass(slots=True)
class ProducerFrame(Generic[S]):
    """A producer's frame, sent alone or as a part of a combined frame."""

    sender: S
    frame: InFlightBatch
    goes_alone: bool

    def __len__(self) -> int:
        """Return the number of rows of the frame."""
        return len(self.frame.batch)


def parts_of(parts: Sequence[ProducerFrame[S]]) -> list[list[ProducerFrame[S]]]:
    """Return the frames that contain these parts, in the same order. Adjacent parts may be combined into one frame,
    which contains each producer at most once."""
    if len(parts) == 1:
        return [[*parts]]
    frames: list[list[ProducerFrame[S]]] = []
    names: set[bytes] = set()
    rows = 0
    is_open = False
    for part in parts:
        name, is_small = part.frame.batch.producer_names.data, part.frame.size_bytes <= SMALL_BATCH_BYTES
        is_small = is_small and not part.goes_alone
        if is_open and is_small and name not in names and rows + len(part) <= MAX_BATCH_ROWS:
            frames[-1].append(part)
        else:
            frames.append([part])
            names.clear()
            rows = 0
        names.add(name)
        rows += len(part)
        is_open = is_small
    return frames


def whole(frames: Sequence[InFlightBatch]) -> InFlightBatch:
    """Combine frames of several producers into one frame. The combined frame has the number of the first frame."""
    if len(frames) == 1:
        return frames[0]
    return InFlightBatch(
        frames[0].number, _whole([frame.batch for frame in frames]), sum(frame.size_bytes for frame in frames)
    )


def _whole(batches: Sequence[Batch]) -> Batch:
    rows = [len(batch) for batch in batches]
    pairs = [max(len(batch.property_names.offsets) - 1, 0) for batch in batches]
    return Batch(
        producer_names=_joined([batch.producer_names for batch in batches], [1] * len(batches)),
        epochs=np.concatenate([batch.epochs for batch in batches]),
        previous_sequence_ids=np.concatenate([batch.previous_sequence_ids for batch in batches]),
        producer_indexes=np.repeat(np.arange(len(batches), dtype=np.int32), rows),
        sequence_ids=np.concatenate([batch.sequence_ids for batch in batches]),
        payloads=_joined([batch.payloads for batch in batches], rows),
        event_times_ms=_filled([batch.event_times_ms for batch in batches], rows, 0),
        keys=_joined([batch.keys for batch in batches], rows),
        property_offsets=_offsets([batch.property_offsets for batch in batches], rows, pairs),
        property_names=_joined([batch.property_names for batch in batches], pairs),
        property_values=_joined([batch.property_values for batch in batches], pairs),
        complete_up_to=_filled([batch.complete_up_to for batch in batches], [1] * len(batches), NO_SEQUENCE_ID),
    )


def _filled(columns: Sequence[Int64s], rows: Sequence[int], none: int) -> Int64s:
    """Return one column for all batches. The rows of a batch without the column get the value `none`. The result is
    empty if no batch has the column."""
    if not any(map(len, columns)):
        return NO_INT64S
    return np.concatenate(
        [column if len(column) else np.full(n, none, np.int64) for column, n in zip(columns, rows, strict=True)]
    )


def _offsets(columns: Sequence[Int32s], rows: Sequence[int], ends: Sequence[int]) -> Int32s:
    """Return the offsets of all batches, one batch after the other. `ends` contains the last offset of each batch.
    Empty if no batch has offsets."""
    if not any(map(len, columns)):
        return NO_INT32S
    parts: list[Int32s] = [np.zeros(1, np.int32)]
    end = 0
    for column, n, last in zip(columns, rows, ends, strict=True):
        parts.append((column[1:] if len(column) else np.zeros(n, np.int32)) + np.int32(end))
        end += last
    return np.concatenate(parts)


def _joined(columns: Sequence[Binary], rows: Sequence[int]) -> Binary:
    """Return one column for all batches. In a batch without the column, all values are absent. The result is empty if
    no batch has the column."""
    if not any(columns):
        return Binary()
    offsets = _offsets([column.offsets for column in columns], rows, [len(column.data) for column in columns])
    validity = b""
    if not all(columns) or any(column.validity for column in columns):
        there = np.concatenate([_there(column, n) for column, n in zip(columns, rows, strict=True)])
        validity = b"" if there.all() else np.packbits(there, bitorder="little").tobytes()
    return Binary(offsets, b"".join([column.data for column in columns]), validity)


def _there(column: Binary, rows: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return for each row whether its value is present."""
    if not column or not column.validity:
        return np.full(rows, bool(column), np.uint8)
    return np.unpackbits(np.frombuffer(column.validity, np.uint8), count=rows, bitorder="little")


ANSWER_TIMEOUT_SECONDS = 30.0
"""If frames are in flight and no answer comes for this time, the connection counts as broken."""

FULL_MESSAGE_BYTES = 160 * 1024
"""Frames that are ready at the same time are sent in one message until the message has this size. A larger message is
not more efficient, and delays the sidecar. Even with the largest batch added, the message is far below the sidecar's
limit."""

SMALL_MESSAGE_BYTES = FULL_MESSAGE_BYTES // 2
"""A message above this size does not wait for further frames: waiting would cost more than combining saves."""

MAX_FRAMES = 256
"""The most frames in one message."""

SLOT_SECONDS = 1.0
"""If the sidecar has not accepted a stream after this time, the client uses another connection: the first may have
reached its limit of streams."""

SOON_SECONDS = 10.0
"""If a component ends a stream because of a frame, it does so within this time. A stream that ends later has timed out,
and the frame is not the cause."""


MAX_OLD_ANSWERS = 1000
"""The maximum number of consecutive answers with a lower term than an earlier answer. After a takeover of the topic,
fewer such answers are in flight. If there are more, the earlier term was wrong."""


class Answers(NamedTuple):
    """The answers to the frames of one producer, by frame number."""

    receipts: list[tuple[int, ReceiptColumns]]
    refusals: list[tuple[int, SeqdedupeError | None]]
    """None: the frame was refused because of other producers, or its answer contains no decision. The frame can be sent
    again at once."""
    durable_index: int = 0
    """The index below which all messages of the topic are durable."""


class Sender(Protocol):
    """The interface of a producer's session to a stream."""

    @property
    def name(self) -> str: ...

    @property
    def waits_for_answers(self) -> bool: ...

    @property
    def waits_until_durable(self) -> bool:
        """Whether the session has a receipt for a message that is not durable yet."""

    @property
    def is_suspect(self) -> bool:
        """Whether the session's next frame may break connections. The stream sends such a frame when nothing else is in
        flight."""

    def next_frame(self) -> InFlightBatch | None:
        """Return the session's next frame to send now; None if there is none."""

    def take(self, incarnation: int, term: int, answers: Answers) -> bool:
        """Handle these answers, and return whether the session needs no further answers. If an error is raised, only
        this session leaves the stream."""


class Seat:
    """A sender's place on a stream. It exists as long as the stream sends the sender's frames."""

    def __init__(self, sender: Sender, leaving: asyncio.Future[None]) -> None:
        self.sender = sender
        self.leaving = leaving
        """The future that ends the seat."""
        self.is_ready = False
        """Whether the sender waits for its turn, because it may have something to send."""
        self.goes_alone = False
        """Whether the sender's frames are not combined with other frames. This ends when one of its frames has a
        receipt."""

    @property
    def is_taken(self) -> bool:
        """Whether the sender still uses the seat."""
        return not self.leaving.done()

    def send_away(self, why: Exception) -> None:
        """End the seat with this error. A seat that has already ended does not change."""
        if self.is_taken:
            self.leaving.set_exception(why)
            # Mark the exception as read: the sender's task may be cancelled before it reads the exception.
            self.leaving.exception()


class StreamChannel:
    """A connection, and the number of publish streams open over it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.streams = 0


class PublishStream:
    """A publish stream, from the call to its end. Senders take turns, one frame at a time; small frames are combined.

    If one sender leaves or is removed because of an error, the other senders are not affected. When the stream ends,
    all senders receive the reason.
    """

    def __init__(self, first: StreamChannel, second: StreamChannel, address: SidecarAddress, topic: str) -> None:
        """Begin the stream over the first connection, or over the second connection if no more streams fit on the
        first. `Open` calls use the second connection. So streams that use up the first connection do not block
        `Open`."""
        self.users = 0
        """The number of users, counted by `SharedConnections`."""
        self.openings = Openings(second.channel, address, topic)
        self.ended_alone = False
        """Whether the stream ended soon after a frame of one sender, with nothing else in flight."""
        self._first, self._second = first, second
        self._link: StreamChannel | None = None  # the connection whose `streams` includes this stream
        self._address = address
        self._topic = topic
        self._call = publish_call(first.channel)
        self._seats: dict[Sender, Seat] = {}
        self._turns: deque[Seat] = deque()
        self._waits_for_lone = False
        """Whether the frame of a suspect is in flight. Then nothing else is sent."""
        self._out: dict[int, list[ProducerFrame[Seat]]] = {}
        """The parts of the frames that wait for their answers, by frame number."""
        self._not_durable: set[Seat] = set()
        """The senders with a receipt for a message that is not durable yet."""
        self._durable_index = 0
        self._term = 0
        """The highest term in any answer. Answers with a lower term are ignored."""
        self._old_answers = 0
        """The number of ignored answers in a row."""
        self._work = asyncio.Event()
        self._answered_at = 0.0
        self._begun = asyncio.Event()
        self._is_used = asyncio.Event()
        self._end: Exception | None = None
        self._over = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    @property
    def has_ended(self) -> bool:
        return self._over.is_set()

    async def close(self) -> None:
        """End the stream. The caller ensures that no sender uses the stream any more."""
        self._task.cancel()
        await asyncio.gather(self._task, self.openings.close(), return_exceptions=True)

    async def begin(self, *, has_topic: bool) -> None:
        """Wait until the sidecar accepts the stream. If the sidecar has already refused the stream, raise the reason.

        If the topic is known to exist (`has_topic`), the stream sends the topic's name at once. The sidecar waits only
        a few seconds for the name, and the `Open` call that follows may take longer.
        """
        await self._begun.wait()
        if has_topic:
            self._is_used.set()
        await self.check()

    async def check(self) -> None:
        """Raise the error with which the stream has ended, if it has ended. If the sidecar refuses a stream, that
        stream has ended by the time when a later call is answered."""
        if self._call.done():
            self._is_used.set()
            await self._over.wait()
        if self._end is not None:
            raise self._end.with_traceback(None)

    async def serve(self, sender: Sender) -> None:
        """Send the sender's frames and pass the answers to the sender, until the sender needs no further answer. Raises
        the sender's errors, and the error with which the stream ends."""
        if self._end is not None:
            raise self._end.with_traceback(None)
        seat = self._seats[sender] = Seat(sender, asyncio.get_running_loop().create_future())
        self._is_used.set()
        self._queue(seat)
        try:
            await seat.leaving
        finally:
            del self._seats[sender]
            self._not_durable.discard(seat)

    def ready(self, sender: Sender) -> None:
        """Put the sender into the queue of senders. A sender calls this when it may have a new frame to send."""
        if (seat := self._seats.get(sender)) is not None:
            self._queue(seat)

    def _queue(self, seat: Seat) -> None:
        if not seat.is_ready:
            seat.is_ready = True
            self._turns.append(seat)
            self._work.set()

    async def _run(self) -> None:
        try:
            with typed_errors(self._address):
                await self._until_taken()
            self._begun.set()
            # Before the first Open the topic may not exist yet.
            await self._is_used.wait()
            await exchange(
                self._call,
                self._address,
                self._topic,
                frames=self._frames_to_send,
                rows_of=self._rows_of,
                take=self._take,
                watch=self._watch,
                early_receipts=True,
            )
        except Exception as e:  # noqa: BLE001 (any failure ends the senders: no task reads their answers any more)
            self._end = e
        finally:
            self._call.cancel()
            silence = asyncio.get_running_loop().time() - self._answered_at
            self.ended_alone = [len(parts) for parts in self._out.values()] == [1] and silence < SOON_SECONDS
            self._end = self._end or error("UNREACHABLE", f"the stream to {self._address} was closed")
            self._begun.set()
            if self._link is not None:
                self._link.streams -= 1
            self._over.set()
            for seat in self._seats.values():
                seat.send_away(self._end)

    async def _until_taken(self) -> None:
        """Wait until the sidecar has accepted the stream. If it does not, raise TOO_MANY_STREAMS if other streams are
        open over the connections, otherwise UNREACHABLE."""
        first, second = self._first, self._second
        if await self._is_taken(SLOT_SECONDS):
            self._count(first)
            return
        # The second connection may have the same limit of streams as the first. One of its streams is kept for `Open`.
        if second.streams + 1 < first.streams:
            self._count(second)
            self._call.cancel()
            self._call = publish_call(second.channel)
        if not await self._is_taken(CALL_TIMEOUT_SECONDS - SLOT_SECONDS):
            others = first.streams + second.streams - (self._link is not None)
            if not others:
                raise error("UNREACHABLE", f"the sidecar at {self._address} does not accept a stream")
            raise error(
                "TOO_MANY_STREAMS",
                f"the connection to {self._address} has no free stream: {others} are open, and the sidecar, or a proxy "
                "on the way, seems to allow no more",
                hint="Let the proxy allow more streams a connection (nginx: http2_max_concurrent_streams), or publish "
                "to fewer topics with one client.",
            )
        if self._link is None:
            self._count(first)

    def _count(self, link: StreamChannel) -> None:
        self._link = link
        link.streams += 1

    async def _is_taken(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._call.initial_metadata()
        except TimeoutError:
            return False
        return True

    # -- out ---------------------------------------------------------------------------------------------------

    async def _frames_to_send(self) -> Sequence[InFlightBatch]:
        """Return the next frames for one message. Waits until there are frames to send.

        While other frames are in flight, a small message waits as long as each turn of the event loop adds more frames.
        A caller that sends several batches in sequence may not have finished after the first batch.
        """
        parts: list[ProducerFrame[Seat]] = []
        while not self._add_ready(parts):
            self._work.clear()
            await self._work.wait()
        is_more_likely = len(self._out) > 0
        while is_more_likely and _size_bytes(parts) < SMALL_MESSAGE_BYTES:
            await asyncio.sleep(0)
            is_more_likely = self._add_ready(parts)
        return [self._frame_of(some) for some in parts_of(parts)]

    def _add_ready(self, parts: list[ProducerFrame[Seat]]) -> bool:
        """Add the frames that are ready now to this message. Return whether any frame was added."""
        if not self._out:
            self._answered_at = asyncio.get_running_loop().time()
        before = len(parts)
        size_bytes = _size_bytes(parts)
        self._waits_for_lone = self._waits_for_lone and bool(self._out)
        while self._turns and not self._waits_for_lone and size_bytes < FULL_MESSAGE_BYTES and len(parts) < MAX_FRAMES:
            if self._turns[0].sender.is_suspect and (parts or self._out):
                break
            seat = self._turns.popleft()
            seat.is_ready = False
            frame = seat.sender.next_frame() if seat.is_taken else None
            if frame is not None:
                parts.append(ProducerFrame(seat, frame, seat.goes_alone))
                size_bytes += frame.size_bytes
                self._queue(seat)
                self._waits_for_lone = seat.sender.is_suspect
        return len(parts) > before

    def _frame_of(self, parts: list[ProducerFrame[Seat]]) -> InFlightBatch:
        frame = whole([part.frame for part in parts])
        self._out[frame.number] = parts
        return frame

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(ANSWER_TIMEOUT_SECONDS / 10)
            silence = asyncio.get_running_loop().time() - self._answered_at
            if silence > ANSWER_TIMEOUT_SECONDS and any(sender.waits_for_answers for sender in self._seats):
                raise error("OUTCOME_UNKNOWN", f"{self._address} has not answered for {silence:.0f} seconds")

    # -- in ----------------------------------------------------------------------------------------------------

    def _take(self, answer: StreamAnswer) -> None:
        self._answered_at = asyncio.get_running_loop().time()
        self._term = max(self._term, self.openings.term, answer.term)
        told: dict[Seat, Answers] = {}
        durable_index = 0
        if answer.term < self._term:
            self._check_old_answers(answer.term)
            # An earlier answer to `Open` had a higher term. So this answer is ignored, and its frames get no other
            # answer.
            for number in (*(frame for frame, _ in answer.receipts), *(old.frame for old in answer.refusals)):
                _put_back(self._out.pop(number, []), told)
        else:
            self._old_answers = 0
            durable_index = answer.durable_index
            for number, receipt in answer.receipts:
                self._take_receipt(self._out.pop(number, []), receipt, told)
            for refusal in answer.refusals:
                self._take_refusal(self._out.pop(refusal.frame, []), refusal, told)
            if durable_index != self._durable_index:
                self._durable_index = durable_index
                for seat in self._not_durable:
                    _of(seat, told)
        if not self._out:
            # a suspect's frame may wait for this answer, or other frames may wait for the suspect's answer
            self._work.set()
        for seat, answers in told.items():
            if not seat.is_taken:
                continue
            try:
                new = Answers(answers.receipts, answers.refusals, durable_index)
                if seat.sender.take(answer.incarnation, self._term, new):
                    seat.leaving.set_result(None)
            except Exception as e:  # noqa: BLE001 (any failure ends only this sender)
                seat.send_away(e)
            if seat.sender.waits_until_durable:
                self._not_durable.add(seat)
            else:
                self._not_durable.discard(seat)

    def _check_old_answers(self, term: int) -> None:
        """End a stream on which only answers with an old term arrive. If the higher term in the earlier answer to
        `Open` was wrong, the next answers to `Open` will have the lower term too."""
        self._old_answers += 1
        if self._old_answers > MAX_OLD_ANSWERS:
            what = f"{self._address} goes on to answer with term {term}, lower than {self._term} before"
            raise error("UNREACHABLE", what)

    def _rows_of(self, frame: int) -> int | None:
        parts = self._out.get(frame)
        return None if parts is None else sum(len(part) for part in parts)

    def _take_receipt(
        self, parts: list[ProducerFrame[Seat]], receipt: ReceiptColumns, told: dict[Seat, Answers]
    ) -> None:
        first = 0
        for part in parts:
            columns = receipt if len(parts) == 1 else receipt.cut(first, first + len(part))
            first += len(part)
            part.sender.goes_alone = False
            _of(part.sender, told).receipts.append((part.frame.number, columns))

    def _take_refusal(self, parts: list[ProducerFrame[Seat]], refusal: Any, told: dict[Seat, Answers]) -> None:
        """Handle a refusal. If a combined frame is refused because of some of its producers, or permanently, the frame
        is split. The producers that are or may be the cause resend in separate frames, which get separate answers."""
        named = {producer.producer_name for producer in refusal.producers}
        why: SeqdedupeError | None = refusal_error(refusal)
        if len(parts) > 1 and (named or refusal.retry_delay_ms < 0):
            why = None
            seats = [part.sender for part in parts]
            for seat in [seat for seat in seats if seat.sender.name in named] or seats:
                seat.goes_alone = True
        for part in parts:
            _of(part.sender, told).refusals.append((part.frame.number, why))


def _size_bytes(parts: list[ProducerFrame[Seat]]) -> int:
    return sum(part.frame.size_bytes for part in parts)


def _put_back(parts: list[ProducerFrame[Seat]], told: dict[Seat, Answers]) -> None:
    for part in parts:
        _of(part.sender, told).refusals.append((part.frame.number, None))


def _of(seat: Seat, told: dict[Seat, Answers]) -> Answers:
    return told.setdefault(seat, Answers([], []))


# -- The connections that the producers of a client share: one to each sidecar, with a stream for each topic.
#
# Sessions are opened over a second connection, which closes after some seconds without a call. Proxies limit the number
# of streams of a connection, and publish streams may use all streams of the first connection.

_CONNECTION_IS_LOST = {"UNREACHABLE", "TLS_FAILED", "NOT_A_SIDECAR", "OUTCOME_UNKNOWN"}
"""The reasons with which a stream ends if its connection is lost or silent, or if a component between client and
sidecar has ended the stream. Another connection may help."""

_Place = tuple[asyncio.AbstractEventLoop, SidecarAddress]


class _Shared:
    """Two connections to one sidecar, and the publish streams over these connections, by topic."""

    def __init__(self, first: StreamChannel, second: StreamChannel) -> None:
        self.first = first
        self.second = second
        self.streams: dict[str, PublishStream] = {}
        self.users = 0


class SharedConnections:
    """Opens connections when a producer needs them, and closes them when no producer needs them any more.

    After a connection is lost, later callers use a new connection.
    """

    def __init__(self, sidecars: Sidecars) -> None:
        self.sidecars = sidecars
        self._shared: dict[_Place, _Shared] = {}

    @asynccontextmanager
    async def stream(self, address: SidecarAddress, topic: str) -> AsyncIterator[PublishStream]:
        """Provide the stream to this topic at this sidecar, for the duration of the block."""
        place = asyncio.get_running_loop(), address
        shared = self._shared.get(place)
        if shared is None:
            first = StreamChannel(channel_to(self.sidecars, address))
            second = StreamChannel(channel_to(self.sidecars, address, is_brief=True))
            shared = self._shared[place] = _Shared(first, second)
        shared.users += 1
        try:
            stream = shared.streams.get(topic)
            if stream is None or stream.has_ended:
                stream = shared.streams[topic] = PublishStream(shared.first, shared.second, address, topic)
            stream.users += 1
            try:
                yield stream
            except UnavailableError as e:
                if stream.has_ended and e.reason in _CONNECTION_IS_LOST:
                    self._forget(place, shared)
                raise
            finally:
                stream.users -= 1
                if not stream.users:
                    if shared.streams.get(topic) is stream:
                        del shared.streams[topic]
                    await stream.close()
        finally:
            shared.users -= 1
            if not shared.users:
                self._forget(place, shared)
                await shared.first.channel.close()
                await shared.second.channel.close()

    def _forget(self, place: _Place, shared: _Shared) -> None:
        if self._shared.get(place) is shared:
            del self._shared[place]
