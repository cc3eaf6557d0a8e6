"""A publish stream to one topic, and the producers that share it: their frames out, and to each its answers."""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import grpc.aio

from seqdedupe.address import SidecarAddress
from seqdedupe.client.connection import CALL_TIMEOUT_SECONDS, typed_errors
from seqdedupe.client.exchange import exchange, publish_call
from seqdedupe.client.frames import decode_answer, refusal_error
from seqdedupe.client.merging import Part, parts_of, whole
from seqdedupe.client.openings import Openings
from seqdedupe.client.outbox import Frame
from seqdedupe.client.receipts import ReceiptColumns
from seqdedupe.errors import SeqdedupeError, error

ANSWER_TIMEOUT_SECONDS = 30.0
"""If frames are out and nothing is answered for so long, the connection counts as broken."""

FULL_MESSAGE_BYTES = 160 * 1024
"""Frames that are ready together go out in one message until it is as large as this. More gains nothing, and keeps
the sidecar waiting. With the largest batch after it, it stays well below what the sidecar takes."""

SMALL_MESSAGE_BYTES = FULL_MESSAGE_BYTES // 2
"""One that has more does not wait for what may come: it costs more than the company would save."""

MAX_FRAMES = 256
"""In one message."""

SLOT_SECONDS = 1.0
"""A stream that is not taken by then goes over another connection: this one may have all that it is allowed to have."""

SOON_SECONDS = 10.0
"""What ends a stream because of a frame does so by then. Later it is a time-out, which says nothing of the frame."""


class Answers(NamedTuple):
    """Those to frames of one producer, by their numbers."""

    receipts: list[tuple[int, ReceiptColumns]]
    refusals: list[tuple[int, SeqdedupeError | None]]
    """None: the frame was refused because of others, or its answer says nothing; it can be sent again at once."""
    durable_index: int = 0
    """Below it all messages of the topic are durable."""


class Sender(Protocol):
    """What a producer's session is to a stream."""

    @property
    def name(self) -> str: ...

    @property
    def waits_for_answers(self) -> bool: ...

    @property
    def waits_until_durable(self) -> bool:
        """Whether it has a receipt of what is not durable yet."""

    @property
    def is_suspect(self) -> bool:
        """Whether its next frame may be what breaks connections: then it goes when nothing else is out."""

    def next_frame(self) -> Frame | None:
        """Its next one, if there is any to be sent now."""

    def take(self, incarnation: int, term: int, answers: Answers) -> bool:
        """Takes answers; whether these were the last ones that matter to it. What it raises ends it alone."""


@dataclass(slots=True, eq=False)
class Link:
    """A connection, and how many publish streams are open over it."""

    channel: grpc.aio.Channel
    streams: int = 0


class PublishStream:
    """A stream, from the call to its end. Each sender has its turn, one frame at a time; small frames become one.

    A sender that leaves, or is sent away, leaves the others alone. When the stream ends all of them are told why.
    """

    def __init__(self, first: Link, second: Link, address: SidecarAddress, topic: str) -> None:
        """It goes over the first connection, or the second one if that has no place for it; `Open` over the second one.
        So streams that take all places of a connection do not keep `Open` from being called."""
        self.users = 0
        """How many hold it; counted by whoever hands it out."""
        self.openings = Openings(second.channel, address, topic)
        self.ended_alone = False
        """Whether it has ended soon after a frame of one sender, with nothing else out."""
        self._first, self._second = first, second
        self._link: Link | None = None  # that counts it
        self._address = address
        self._topic = topic
        self._call = publish_call(first.channel)
        self._senders: dict[Sender, asyncio.Future[None]] = {}
        """Each with what tells it to leave."""
        self._ready: deque[Sender] = deque()
        self._is_ready: set[Sender] = set()
        self._waits_for_lone = False
        """While the frame of a suspect is out: nothing else goes."""
        self._goes_alone: set[Sender] = set()
        """Whose frames share none with others until one has its receipt."""
        self._out: dict[int, list[Part[Sender]]] = {}
        """What the frames consist of that wait for their answers, by number."""
        self._not_durable: set[Sender] = set()
        """Who has a receipt of what is not durable yet."""
        self._durable_index = 0
        self._term = 0
        """The highest that was answered; what has a lower one says nothing."""
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
        """Ends it. Nobody uses it any more."""
        self._task.cancel()
        await asyncio.gather(self._task, self.openings.close(), return_exceptions=True)

    async def begin(self, *, has_topic: bool) -> None:
        """Waits for the sidecar to take the stream. Raises what it is refused for, if that is known by then.

        If the topic is known to be there the stream says at once what it is for: the sidecar waits for that only for
        seconds, and the `Open` that comes next may take longer."""
        await self._begun.wait()
        if has_topic:
            self._is_used.set()
        await self.check()

    async def check(self) -> None:
        """Raises what the stream has ended with. After the answer to a call that was made since `begin`, a stream that
        was refused has ended."""
        if self._call.done():
            self._is_used.set()
            await self._over.wait()
        if self._end is not None:
            raise self._end.with_traceback(None)

    async def serve(self, sender: Sender) -> None:
        """Sends what the sender has and gives it its answers, until it has taken the last one. Raises what it raises
        then, and what the stream ends with."""
        if self._end is not None:
            raise self._end.with_traceback(None)
        leaving = self._senders[sender] = asyncio.get_running_loop().create_future()
        self._is_used.set()
        self.ready(sender)
        try:
            await leaving
        finally:
            del self._senders[sender]
            self._goes_alone.discard(sender)
            self._not_durable.discard(sender)

    def ready(self, sender: Sender) -> None:
        """It may have something to send; it says so itself whenever that is news."""
        if sender not in self._is_ready:
            self._is_ready.add(sender)
            self._ready.append(sender)
            self._work.set()

    async def _run(self) -> None:
        try:
            with typed_errors(self._address):
                await self._until_taken()
            self._begun.set()
            # Before its first Open there need be no topic.
            await self._is_used.wait()
            frames, take, watch = self._frames_to_send, self._take, self._watch
            what = self._call, self._address, self._topic
            await exchange(*what, frames=frames, take=take, watch=watch, early_receipts=True)
        except Exception as e:  # noqa: BLE001 (whatever it is, nobody may wait for answers that nobody reads)
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
            for leaving in self._senders.values():
                _send_away(leaving, self._end)

    async def _until_taken(self) -> None:
        """Until the sidecar has taken the stream. Raises TOO_MANY_STREAMS if others are open over the connection, else
        UNREACHABLE."""
        first, second = self._first, self._second
        if await self._is_taken(SLOT_SECONDS):
            self._count(first)
            return
        # So many as the first one has it may be allowed too, and one is for `Open`.
        if second.streams + 1 < first.streams:
            self._count(second)
            self._call.cancel()
            self._call = publish_call(second.channel)
        if not await self._is_taken(CALL_TIMEOUT_SECONDS - SLOT_SECONDS):
            others = first.streams + second.streams - (self._link is not None)
            if not others:
                raise error("UNREACHABLE", f"the sidecar at {self._address} does not take a stream")
            raise error(
                "TOO_MANY_STREAMS",
                f"the connection to {self._address} has no free stream: {others} are open, and the sidecar, or a proxy "
                "on the way, seems to allow no more",
                hint="Let the proxy allow more streams a connection (nginx: http2_max_concurrent_streams), or publish "
                "to fewer topics with one client.",
            )
        if self._link is None:
            self._count(first)

    def _count(self, link: Link) -> None:
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

    async def _frames_to_send(self) -> Sequence[Frame]:
        """The next ones for a message; waits until there are any.

        While others are on their way a small message waits for as long as each turn of the event loop brings more:
        whoever sends several batches one after the other is not done with the first.
        """
        parts: list[Part[Sender]] = []
        while not self._add_ready(parts):
            self._work.clear()
            await self._work.wait()
        is_more_likely = len(self._out) > 0
        while is_more_likely and _size_bytes(parts) < SMALL_MESSAGE_BYTES:
            await asyncio.sleep(0)
            is_more_likely = self._add_ready(parts)
        return [self._frame_of(some) for some in parts_of(parts)]

    def _add_ready(self, parts: list[Part[Sender]]) -> bool:
        """Adds what is ready to be sent now, for one message; whether there was anything."""
        if not self._out:
            self._answered_at = asyncio.get_running_loop().time()
        before = len(parts)
        size_bytes = _size_bytes(parts)
        self._waits_for_lone = self._waits_for_lone and bool(self._out)
        while self._ready and not self._waits_for_lone and size_bytes < FULL_MESSAGE_BYTES and len(parts) < MAX_FRAMES:
            if self._ready[0].is_suspect and (parts or self._out):
                break
            sender = self._ready.popleft()
            self._is_ready.discard(sender)
            frame = sender.next_frame() if self._is_here(sender) else None
            if frame is not None:
                parts.append(Part(sender, frame, sender in self._goes_alone))
                size_bytes += frame.size_bytes
                self.ready(sender)
                self._waits_for_lone = sender.is_suspect
        return len(parts) > before

    def _frame_of(self, parts: list[Part[Sender]]) -> Frame:
        frame = whole([part.frame for part in parts])
        self._out[frame.number] = parts
        return frame

    def _is_here(self, sender: Sender) -> bool:
        leaving = self._senders.get(sender)
        return leaving is not None and not leaving.done()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(ANSWER_TIMEOUT_SECONDS / 10)
            silence = asyncio.get_running_loop().time() - self._answered_at
            if silence > ANSWER_TIMEOUT_SECONDS and any(sender.waits_for_answers for sender in self._senders):
                raise error("OUTCOME_UNKNOWN", f"{self._address} has not answered for {silence:.0f} seconds")

    # -- in ----------------------------------------------------------------------------------------------------

    def _take(self, raw: bytes) -> bool:
        self._answered_at = asyncio.get_running_loop().time()
        answer = decode_answer(raw, self._rows_of)
        self._term = max(self._term, self.openings.term, answer.term)
        told: dict[Sender, Answers] = {}
        durable_index = 0
        if answer.term < self._term:
            # An `Open` of one of them was faster. This says nothing, and nothing else will be said of these frames.
            for number in (*(frame for frame, _ in answer.receipts), *(old.frame for old in answer.refusals)):
                _put_back(self._out.pop(number, []), told)
        else:
            durable_index = answer.durable_index
            for number, receipt in answer.receipts:
                self._take_receipt(self._out.pop(number, []), receipt, told)
            for refusal in answer.refusals:
                self._take_refusal(self._out.pop(refusal.frame, []), refusal, told)
            if durable_index != self._durable_index:
                self._durable_index = durable_index
                for sender in self._not_durable:
                    _of(sender, told)
        if not self._out:
            self._work.set()  # a suspect's frame may wait for that, or others for its answer
        for sender, answers in told.items():
            if not self._is_here(sender):
                continue
            try:
                new = Answers(answers.receipts, answers.refusals, durable_index)
                if sender.take(answer.incarnation, self._term, new):
                    self._senders[sender].set_result(None)
            except Exception as e:  # noqa: BLE001 (whatever it is, it is this one's)
                _send_away(self._senders[sender], e)
            if sender.waits_until_durable:
                self._not_durable.add(sender)
            else:
                self._not_durable.discard(sender)
        return False

    def _rows_of(self, frame: int) -> int | None:
        parts = self._out.get(frame)
        return None if parts is None else sum(len(part) for part in parts)

    def _take_receipt(self, parts: list[Part[Sender]], receipt: ReceiptColumns, told: dict[Sender, Answers]) -> None:
        first = 0
        for part in parts:
            columns = receipt if len(parts) == 1 else receipt.cut(first, first + len(part))
            first += len(part)
            self._goes_alone.discard(part.sender)
            _of(part.sender, told).receipts.append((part.frame.number, columns))

    def _take_refusal(self, parts: list[Part[Sender]], refusal: Any, told: dict[Sender, Answers]) -> None:
        """A shared frame that is refused because of some of its producers, or for good, is taken apart: those that are
        the cause, or may be, go again in frames of their own, which say what becomes of them."""
        named = {producer.producer_name for producer in refusal.producers}
        why: SeqdedupeError | None = refusal_error(refusal)
        if len(parts) > 1 and (named or refusal.retry_delay_ms < 0):
            why = None
            causes = [part.sender for part in parts if part.sender.name in named] or [part.sender for part in parts]
            self._goes_alone.update(sender for sender in causes if self._is_here(sender))
        for part in parts:
            _of(part.sender, told).refusals.append((part.frame.number, why))


def _send_away(leaving: asyncio.Future[None], why: Exception) -> None:
    if not leaving.done():
        leaving.set_exception(why)
        # It may be cancelled before it is told.
        leaving.exception()


def _size_bytes(parts: list[Part[Sender]]) -> int:
    return sum(part.frame.size_bytes for part in parts)


def _put_back(parts: list[Part[Sender]], told: dict[Sender, Answers]) -> None:
    for part in parts:
        _of(part.sender, told).refusals.append((part.frame.number, None))


def _of(sender: Sender, told: dict[Sender, Answers]) -> Answers:
    return told.setdefault(sender, Answers([], []))
