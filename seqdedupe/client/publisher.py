"""A publisher: sends batches of messages with deduplication IDs, and resends a batch until all messages have receipts.

Begin with `Publisher`, at the end. A `Delivery` sends to one topic. A `PartitionedDelivery` has one `Delivery` for each
partition. `TopicHistory` detects if the topic was replaced since earlier receipts.
"""

import asyncio
import os
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np

from seqdedupe.address import SidecarAddress
from seqdedupe.batch import NO_INT64S, Batch, Binary, Int64s
from seqdedupe.client.builder import (
    BATCH_OVERHEAD_BYTES,
    Builder,
    Keys,
    Numbers,
    Payloads,
    Properties,
    PropertyRows,
    milliseconds,
)
from seqdedupe.client.connection import (
    NOT_A_SIDECAR,
    Backoff,
    channel_to,
    check_not_forked,
    may_break_for_a_frame,
    refusal_error,
)
from seqdedupe.client.pending import (
    HINT_OF_BREAKS,
    BatchResult,
    Breaks,
    InFlightBatch,
    Published,
    ReceiptColumns,
    Verdict,
)
from seqdedupe.client.producer_session import DELIVERY_TIMEOUT_SECONDS, ProducerConfig
from seqdedupe.client.publish_calls import StreamAnswer, exchange, publish_call
from seqdedupe.client.route import OnWaiting, Route, Sidecars, WaitingNotice
from seqdedupe.client.stream import ANSWER_TIMEOUT_SECONDS, FULL_MESSAGE_BYTES, MAX_FRAMES, SOON_SECONDS
from seqdedupe.errors import DataLossError, NotFoundError, SeqdedupeError, UnavailableError, error
from seqdedupe.figures import counted
from seqdedupe.limits import MAX_BATCH_BYTES, MAX_DEDUPLICATION_ID_BYTES, NO_SEQUENCE_ID
from seqdedupe.names import partition_name, partition_of, topic_name
from seqdedupe.wire import FRAMES_TAKEN

if TYPE_CHECKING:
    from seqdedupe.v1 import admin_pb2

# -- Delivery of batches with deduplication IDs to a topic: each batch is resent until all of it has its receipt.

MAX_PENDING_BYTES = 64 * 1024 * 1024
"""The maximum number of bytes that wait for receipts. A call that would exceed it waits until there is room."""

MAX_RUNS = 4096
"""The maximum number of runs of indexes that a publisher remembers. Of more runs, the lowest is dropped."""

_FIRST_DELAY_SECONDS = 0.02
_LONGEST_DELAY_SECONDS = 1.0


class _Call:
    """The batch of one `send` call. The object exists until all rows of the batch have receipts."""

    def __init__(self, batch: Batch, size_bytes: int, done: "asyncio.Future[BatchResult]") -> None:
        self.batch = batch
        self.size_bytes = size_bytes
        self.done = done
        self.result: BatchResult | None = None
        self.breaks = Breaks()
        self.is_uncertain = False  # whether a frame has got no answer, or UNKNOWN: a later refusal then proves nothing

    def record(self, receipt: ReceiptColumns) -> BatchResult:
        """Add this receipt to the result. Return the result if it is complete."""
        if self.result is None:
            self.result = BatchResult.of(np.full(len(self.batch), NO_SEQUENCE_ID, np.int64), receipt)
        else:
            self.result.merge(receipt)
        return self.result

    def fail(self, why: SeqdedupeError) -> None:
        """End the call with this error, or with OUTCOME_UNKNOWN if an earlier frame may have stored messages."""
        if self.done.done():
            return
        if self.is_uncertain and not isinstance(why, NotFoundError | UnavailableError | DataLossError):
            what = f"a batch of {counted(len(self.batch), 'message')} was sent, and may be in the log or not: {why}"
            why = error("OUTCOME_UNKNOWN", what, hint=why.hint, last_refusal=why.reason)
        self.done.set_exception(why)


class TopicHistory:
    """The facts about a topic, collected from the topic's receipts. A receipt that contradicts these facts comes from
    an older copy of the topic's log, or from a topic that was recreated under the same name. Receipts arrive in any
    order, and a duplicate has the index of its original message. So a low index alone proves nothing."""

    def __init__(self) -> None:
        self.has_receipts = False
        self.term = 0
        """The highest term of an answer."""
        self._incarnation = 0
        self._durable_index = 0  # the sidecar has reported that everything below this index is durable
        self._floor = 0  # the value of `_durable_index` when the stream began
        self._first_indexes: list[int] = []  # the first indexes of the runs assigned to new messages, rising
        self._next_indexes: list[int] = []

    def begin_stream(self) -> None:
        """Begin a new stream: its requests are sent after all earlier receipts have arrived."""
        self._floor = self._durable_index

    def take(self, incarnation: int, term: int, durable_index: int) -> None:
        """Record the topic's state from an answer with receipts, whose term is not too low. Raises DATA_LOSS."""
        if self.has_receipts and incarnation != self._incarnation:
            what = f"the topic was recreated: its incarnation is {incarnation}, and was {self._incarnation} before"
            raise error("DATA_LOSS", what, incarnation=incarnation, incarnation_before=self._incarnation)
        if 0 < durable_index < self._floor:
            raise error(
                "DATA_LOSS",
                f"the topic ends before index {durable_index}, and was durable up to {self._floor} before",
                durable_index=durable_index,
                durable_index_before=self._floor,
            )
        self.has_receipts, self._incarnation = True, incarnation
        self.term = max(self.term, term)
        self._durable_index = max(self._durable_index, durable_index)

    def given(self, first_index: int, rows: int) -> None:
        """Record that `rows` new messages have the indexes from `first_index` on. Raises DATA_LOSS if one of these
        indexes was assigned before."""
        next_index = first_index + rows
        firsts, nexts = self._first_indexes, self._next_indexes
        at = bisect_left(firsts, next_index)  # the runs from `at` on begin after the new run
        if at and nexts[at - 1] > first_index:
            index = max(first_index, firsts[at - 1])
            raise error("DATA_LOSS", f"index {index} was given to another message before", index=index)
        self._durable_index = max(self._durable_index, next_index)
        after = at < len(firsts) and firsts[at] == next_index
        if at and nexts[at - 1] == first_index:
            nexts[at - 1] = nexts[at] if after else next_index
            if after:
                del firsts[at], nexts[at]
        elif after:
            firsts[at] = first_index
        else:
            firsts.insert(at, first_index)
            nexts.insert(at, next_index)
        if len(firsts) > MAX_RUNS:
            del firsts[0], nexts[0]


class Delivery:
    """Sends to one topic, on one event loop. The public class `Publisher` uses it, and states the guarantee."""

    def __init__(
        self,
        sidecars: Sidecars,
        topic: str,
        on_waiting: OnWaiting | None,
        timeout_seconds: float | None,
        describe: "Callable[[], Awaitable[admin_pb2.Topic]] | None" = None,
    ) -> None:
        self.topic = topic
        self._describe = describe
        self._on_waiting = on_waiting
        self._spread: PartitionedDelivery | None = None
        self._sidecars = sidecars
        self._route = Route(sidecars, topic)
        self._backoff = Backoff(_FIRST_DELAY_SECONDS, _LONGEST_DELAY_SECONDS)
        self._waiting = WaitingNotice(on_waiting)
        self._timeout_seconds = timeout_seconds
        self._ready: deque[_Call] = deque()
        self._out: dict[int, _Call] = {}
        self._pending_bytes = 0
        self._frames_ever = 0
        self._waits_for_lone = False  # whether a suspect frame is in flight: then nothing else is sent
        self._is_taken = False  # whether the sidecar has answered anything on this stream
        self._answered_at = 0.0
        self._delay_until = 0.0
        self._news = asyncio.Event()
        self._room = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None
        self._failure: SeqdedupeError | None = None
        self._passed_on: list[asyncio.Task[None]] = []  # calls from before the topic was known to be partitioned
        self._last_refusal: UnavailableError | None = None
        self._is_in_trouble = False  # whether an attempt has failed or was refused since the last receipts of a call
        self._is_closed = False
        self._has_begun = False  # a sidecar has answered
        self._history = TopicHistory()

    def open(self) -> None:
        """Start to send."""
        check_not_forked()
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """End the delivery. Calls in progress raise OUTCOME_UNKNOWN; later calls raise INVALID_REQUEST."""
        self._is_closed = True
        self._fail(error("OUTCOME_UNKNOWN", f"the publisher of {self.topic} was closed"))
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._spread is not None:
            await self._spread.close()
            await asyncio.gather(*self._passed_on)

    def abandon(self) -> None:
        """End the work because no caller can close the delivery any more. May be called from any thread."""
        if self._task is not None:
            self._task.get_loop().call_soon_threadsafe(self._task.cancel)
        if self._spread is not None:
            self._spread.abandon()

    async def send(self, batch: Batch) -> BatchResult:
        """Send the batch until its messages are in the log. Raises the errors of `Publisher.send_batch`."""
        self._check_is_open()
        size_bytes = BATCH_OVERHEAD_BYTES + sum(map(len, batch.encoded_parts()))
        if size_bytes > MAX_BATCH_BYTES:
            raise error("BATCH_TOO_LARGE", f"the batch has {size_bytes} bytes: at most {MAX_BATCH_BYTES} are accepted")
        try:
            async with asyncio.timeout(self._timeout_seconds):
                return await self._deliver(batch, size_bytes)
        except TimeoutError as e:
            raise self._given_up() from e

    async def _deliver(self, batch: Batch, size_bytes: int) -> BatchResult:
        async with self._room:
            await self._room.wait_for(
                lambda: not self._pending_bytes or self._pending_bytes + size_bytes <= MAX_PENDING_BYTES
            )
        self._check_is_open()
        if self._spread is not None:
            return await self._spread.send(batch)
        call = _Call(batch, size_bytes, asyncio.get_running_loop().create_future())
        self._pending_bytes += size_bytes
        self._ready.append(call)
        self._news.set()
        try:
            return await call.done
        finally:
            if call.done.cancelled():
                with suppress(ValueError):  # the batch is in flight
                    self._ready.remove(call)
            self._pending_bytes -= size_bytes
            async with self._room:
                self._room.notify_all()

    def _given_up(self) -> SeqdedupeError:
        why = self._last_refusal
        because = "" if why is None else f": {why}"
        return error(
            "OUTCOME_UNKNOWN",
            f"no receipt from {self.topic} within {self._timeout_seconds:g} seconds{because}; what was sent may be in "
            "the log or not",
            hint="Send it again with the same deduplication ID." if why is None else why.hint,
        )

    def _check_is_open(self) -> None:
        if self._is_closed:
            raise error("INVALID_REQUEST", f"the publisher of {self.topic} was closed: nothing was sent")
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        if self._task is None:
            raise error("INVALID_REQUEST", "the publisher is not open", hint="`async with client.publisher(topic)`.")

    # -- the stream ----------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        is_partitioned = False
        while True:
            await self._until_ready()
            try:
                if is_partitioned:
                    await self._spread_out()
                    return
                await self._connect()
            except UnavailableError as e:
                if e.reason == "STREAM_IDLE" and not self._ready:
                    continue
                self._is_in_trouble = True
                moves_on = self._route.moves_on(e)
                if e.reason == NOT_A_SIDECAR and not (moves_on or self._has_begun):
                    self._end_calls(e)
                    continue
                self._waits(self._route.told())
                if not moves_on:
                    await asyncio.sleep(max(self._backoff.next_seconds(), e.retry_delay_ms / 1000))
            except SeqdedupeError as failure:
                self._has_begun = self._is_in_trouble = True
                if failure.reason == "TOPIC_IS_PARTITIONED" and self._describe is not None and not is_partitioned:
                    is_partitioned = True
                    continue
                doubted = self._route.doubted(failure)
                if not isinstance(doubted, UnavailableError):
                    if failure.reason == "TOPIC_NOT_FOUND" and self._history.has_receipts:
                        why = f"the sidecar does not know the topic for which it has sent receipts: {failure.message}"
                        failure = error("DATA_LOSS", why)
                    self._fail(failure)
                    return
                self._route.moves_on(doubted)
                await asyncio.sleep(self._backoff.next_seconds())
            except Exception as e:  # noqa: BLE001 (any failure ends the calls: no task reads their answers any more)
                self._fail(error("INTERNAL", f"the publisher of {self.topic} has failed: {type(e).__name__}: {e}"))
                return

    async def _spread_out(self) -> None:
        """Make a delivery for each partition of the topic, and pass the waiting calls on to them."""
        if self._describe is None:
            raise error("TOPIC_IS_PARTITIONED", f"{self.topic} is partitioned")
        from seqdedupe.topic_facts import is_routed_by_key  # only for partitioned topics

        found = await self._describe()
        by_key = is_routed_by_key(found)
        if not found.deduplication_route:
            hint = "Publish with a producer: `client.producer(topic, name)`."
            raise error("INVALID_BATCH", f"{self.topic} takes no deduplication IDs", hint=hint)
        parts = [
            Delivery(self._sidecars, partition_name(self.topic, k), self._on_waiting, self._timeout_seconds)
            for k in range(found.partitions)
        ]
        for part in parts:
            part._has_begun = True
            part.open()
        self._spread = spread = PartitionedDelivery(parts, by_key=by_key)
        self._passed_on = [asyncio.create_task(_pass_on(call, spread)) for call in self._ready]
        self._ready.clear()

    async def _connect(self) -> None:
        """Send frames and handle answers until the stream ends. Batches without a receipt are sent again later."""
        address = self._route.address
        channel = channel_to(self._sidecars, address)
        is_refused = False
        try:
            self._answered_at = asyncio.get_running_loop().time()
            self._is_taken = False
            self._history.begin_stream()
            await exchange(
                publish_call(channel),
                address,
                self.topic,
                frames=self._frames,
                rows_of=self._rows_of,
                take=self._take,
                watch=lambda: self._watch(address),
            )
        except SeqdedupeError as e:
            # A sidecar accepts a stream before it reads a frame.
            is_refused = e.numbers.get(FRAMES_TAKEN) == "0" or not (self._is_taken or isinstance(e, UnavailableError))
            if isinstance(e, UnavailableError) and may_break_for_a_frame(e):
                self._broke(e)
            raise
        finally:
            for call in self._out.values():
                call.is_uncertain = call.is_uncertain or not is_refused
            self._ready.extendleft(call for call in reversed(self._out.values()) if not call.done.done())
            self._out.clear()
            with suppress(asyncio.CancelledError):
                await channel.close()

    def _broke(self, why: SeqdedupeError) -> None:
        """Count a broken connection for each call in flight. A call that was alone on too many of them fails."""
        now = asyncio.get_running_loop().time()
        is_alone = self._is_taken and len(self._out) == 1 and now - self._answered_at < SOON_SECONDS
        for call in self._out.values():
            if call.breaks.add(why, now, is_alone=is_alone):
                what = call.breaks.why(f"a batch of {counted(len(call.batch), 'message')}", call.size_bytes)
                call.fail(error("OUTCOME_UNKNOWN", f"{what}: {why}", hint=HINT_OF_BREAKS))

    async def _until_ready(self) -> None:
        while not self._ready or (self._out and (self._ready[0].breaks.is_suspect or self._waits_for_lone)):
            self._news.clear()
            await self._news.wait()
        if (left_seconds := self._delay_until - asyncio.get_running_loop().time()) > 0:
            await asyncio.sleep(left_seconds)

    async def _until_taken(self) -> None:
        """Wait until the sidecar answers on this stream. If it does not, a frame is not the cause of the end."""
        while not self._is_taken:
            self._news.clear()
            await self._news.wait()

    async def _frames(self) -> list[InFlightBatch]:
        await self._until_ready()
        # The suspect frame for which this stream waited may have ended meanwhile.
        if self._ready and self._ready[0].breaks.is_suspect:
            with suppress(TimeoutError):
                async with asyncio.timeout(SOON_SECONDS):
                    await self._until_taken()
        if not self._out:
            self._answered_at = asyncio.get_running_loop().time()
        frames: list[InFlightBatch] = []
        size_bytes = 0
        while self._ready and size_bytes < FULL_MESSAGE_BYTES and len(frames) < MAX_FRAMES:
            if frames and self._ready[0].breaks.is_suspect:
                break
            call = self._ready.popleft()
            if call.done.done():
                continue
            self._frames_ever += 1
            self._out[self._frames_ever] = call
            frames.append(InFlightBatch(self._frames_ever, call.batch, call.size_bytes))
            size_bytes += call.size_bytes
            self._waits_for_lone = call.breaks.is_suspect
            if call.breaks.is_suspect:
                break
        return frames

    async def _watch(self, address: SidecarAddress) -> None:
        while True:
            await asyncio.sleep(ANSWER_TIMEOUT_SECONDS / 10)
            silence = asyncio.get_running_loop().time() - self._answered_at
            if self._out and silence > ANSWER_TIMEOUT_SECONDS:
                raise error("OUTCOME_UNKNOWN", f"{address} has not answered for {silence:.0f} seconds")

    def _rows_of(self, number: int) -> int | None:
        call = self._out.get(number)
        return None if call is None else len(call.batch)

    def _take(self, answer: StreamAnswer) -> None:
        self._answered_at = asyncio.get_running_loop().time()
        self._has_begun = self._is_taken = True
        if answer.receipts:
            self._check_history(answer)
        for number, receipt in answer.receipts:
            if (call := self._out.get(number)) is not None:
                # The call stays in `_out` until its receipt is checked. Otherwise a failure would not reach it.
                result = call.record(receipt)
                call.breaks.clear()
                del self._out[number]
                self._decided(call, result)
        moved: SeqdedupeError | None = None
        for refusal in answer.refusals:
            if (call := self._out.get(refusal.frame)) is not None:
                why = self._route.believed(refusal_error(refusal), answer.term, self._history.term)
                if why.reason in ("NOT_OWNER", "DRAINING"):
                    moved = why  # the frame stays in `_out`, from where `_connect` takes what is sent again elsewhere
                else:
                    del self._out[refusal.frame]
                    self._refused(call, why)
                    if self._route.has_lasted(why):
                        moved = why
        if not self._out:
            # a suspect frame may wait for this answer, or other frames may wait for the suspect's answer
            self._news.set()
        if moved is not None:
            raise moved

    def _check_history(self, answer: StreamAnswer) -> None:
        """Check an answer before its receipts are accepted. A former owner answers duplicates from memory. Raises
        DATA_LOSS, NOT_OWNER."""
        history = self._history
        if self._route.check_term(answer.term, history.term):
            what = f"the sidecar answers with an older state than before: term {answer.term} ({history.term} before)"
            raise error("DATA_LOSS", what, term=answer.term, term_before=history.term)
        history.take(answer.incarnation, answer.term, answer.durable_index)
        for number, receipt in answer.receipts:
            if (call := self._out.get(number)) is not None and receipt.first_index >= 0:
                is_mixed = len(receipt.verdicts) > 0
                rows = np.count_nonzero(receipt.verdicts == Verdict.NOT_DUP) if is_mixed else len(call.batch)
                if rows:
                    history.given(receipt.first_index, int(rows))

    def _waits(self, why: UnavailableError) -> None:
        self._last_refusal = why
        self._waiting.waits(why)

    def _decided(self, call: _Call, result: BatchResult) -> None:
        if self._is_in_trouble:
            self._is_in_trouble = False
            self._last_refusal = None
            self._route.goes_well()
            self._waiting.goes_on()
            self._backoff.reset()
        if result.verdicts.all():
            if not call.done.done():
                call.done.set_result(result)
        else:
            # Copies of some messages are in flight, from this client or another one.
            call.is_uncertain = True
            self._again(call, self._backoff.next_seconds())

    def _refused(self, call: _Call, why: SeqdedupeError) -> None:
        if not isinstance(why, UnavailableError):
            call.fail(why)
            return
        call.is_uncertain = call.is_uncertain or why.reason == "OUTCOME_UNKNOWN"
        self._waits(why)
        self._again(call, max(self._backoff.next_seconds(), why.retry_delay_ms / 1000))

    def _again(self, call: _Call, delay_seconds: float) -> None:
        self._is_in_trouble = True
        self._delay_until = max(self._delay_until, asyncio.get_running_loop().time() + delay_seconds)
        self._ready.append(call)
        self._news.set()

    def _fail(self, why: SeqdedupeError) -> None:
        self._failure = self._failure or why
        self._end_calls(why)

    def _end_calls(self, why: SeqdedupeError) -> None:
        """End all calls made so far with this error. Later calls are attempted."""
        for call in (*self._out.values(), *self._ready):
            call.fail(why)
        self._out.clear()
        self._ready.clear()


class PartitionedDelivery:
    """Spreads the batches of a publisher over the partitions. `parts` are the open deliveries to the partitions, in
    order."""

    def __init__(self, parts: Sequence[Delivery], *, by_key: bool) -> None:
        self._parts = parts
        self._by_key = by_key

    async def send(self, batch: Batch) -> BatchResult:
        """Send a batch, and return when all of its messages are in the log. Raises the error of the first partition
        that failed. The messages of other partitions may then be in the log; they are answered DUP if sent again.
        Raises INVALID_BATCH if a key is missing."""
        if self._by_key and (absent := [row for row in range(len(batch)) if not batch.keys.is_there(row)]):
            why = f"row {absent[0]} has no key, but in this topic the key selects the partition"
            raise error("INVALID_BATCH", why, hint="Give every message a key.")
        some = self._rows_by_partition(batch)
        sent = await asyncio.gather(
            *(self._parts[k].send(batch.take(rows)) for k, rows in some), return_exceptions=True
        )
        result = BatchResult.undecided(np.full(len(batch), NO_SEQUENCE_ID, np.int64))
        for (k, rows), outcome in zip(some, sent, strict=True):
            if isinstance(outcome, SeqdedupeError) and outcome.reason == "INVALID_REQUEST" and len(some) > 1:
                # The delivery was closed meanwhile. Only for this partition is it certain that nothing was sent.
                raise error("OUTCOME_UNKNOWN", f"nothing went to partition {k}: {outcome.message}") from outcome
            if isinstance(outcome, BaseException):
                raise outcome
            result.put(rows, outcome)
            result.partitions[rows] = k
        return result

    def _rows_by_partition(self, batch: Batch) -> list[tuple[int, Int64s]]:
        column = batch.keys if self._by_key else batch.deduplication_ids
        of_rows = np.array([partition_of(value, b"", len(self._parts)) for value in column.values()], np.int64)
        return [(int(k), np.flatnonzero(of_rows == k)) for k in np.unique(of_rows)]

    def abandon(self) -> None:
        """Abandon all deliveries."""
        for part in self._parts:
            part.abandon()

    async def close(self) -> None:
        """Close all deliveries."""
        await asyncio.gather(*(part.close() for part in self._parts))


async def _pass_on(call: _Call, spread: PartitionedDelivery) -> None:
    try:
        result = await spread.send(call.batch)
    except Exception as e:  # noqa: BLE001 (the call raises any failure)
        if not call.done.done():
            call.done.set_exception(e)
    else:
        if not call.done.done():
            call.done.set_result(result)


Ids = Binary | Sequence[bytes | str]


def new_id() -> bytes:
    """Return a UUID of version 7, as 16 bytes: the time in milliseconds, then random bits."""
    number = (time.time_ns() // 1_000_000) << 80 | int.from_bytes(os.urandom(10), "big")
    number = number & ~(0xF << 76) | 0x7 << 76
    return (number & ~(0x3 << 62) | 0x2 << 62).to_bytes(16, "big")


class Publisher:
    """Sends to one topic of deduplication IDs. Use it as `async with client.publisher(topic) as publisher`.

    A call returns when all messages of the call are durable in the log, each exactly once, even if they were sent
    several times. If any client sends the same ID again within the topic's window, the answer is DUP, with the index
    and message ID of the original message. Calls in progress at the same time have no order.

    After a broken connection or a temporary refusal the publisher sends again. After `delivery_timeout_seconds` (None:
    no limit) the call raises OutcomeUnknownError, and the publisher continues. The messages of such a call, or of a
    cancelled call, may or may not be in the log. It is safe to repeat the call with the same ID.

    In a partitioned topic, the ID or the key of a message selects the partition, as set when the topic was created. If
    a call raises an error, the messages for some partitions may have been sent. A publisher belongs to one event loop.
    """

    def __init__(
        self,
        sidecars: Sidecars,
        topic: str,
        on_waiting: OnWaiting | None = None,
        delivery_timeout_seconds: float | None = DELIVERY_TIMEOUT_SECONDS,
        describe: "Callable[[], Awaitable[admin_pb2.Topic]] | None" = None,
    ) -> None:
        self.topic: str = topic_name(topic)
        config = ProducerConfig(delivery_timeout_seconds=delivery_timeout_seconds)  # the timeout is validated here
        self._checks = Builder(b"", NO_SEQUENCE_ID, config, lambda batch: None)
        self._delivery = Delivery(sidecars, self.topic, on_waiting, config.delivery_timeout_seconds, describe)

    async def __aenter__(self) -> Self:
        self._delivery.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the publisher. Calls in progress raise OUTCOME_UNKNOWN: wait for them first. Later calls raise
        INVALID_REQUEST."""
        await self._delivery.close()

    def abandon(self) -> None:
        """End the work because no caller can close the publisher any more. May be called from any thread."""
        self._delivery.abandon()

    async def send(
        self,
        payload: bytes | None,
        *,
        deduplication_id: bytes | str | None = None,
        key: bytes | str | None = None,
        event_time: datetime | int | None = None,
        properties: Properties | None = None,
    ) -> Published:
        """Send a message, and return when the message is in the log.

        The ID has 1 to 255 bytes; text is encoded as UTF-8. Without an ID the message gets a new ID, and keeps that ID
        when it is resent. A second call without an ID sends a different message.

        Raises InvalidRequestError. Raises OutcomeUnknownError if no receipt arrives within `delivery_timeout_seconds`,
        and instead of a refusal if the message may be in the log already. After AccessDeniedError, NotFoundError,
        DamagedError or DataLossError, the publisher has ended. DataLossError means that the topic contradicts earlier
        receipts.
        """
        ids = None if deduplication_id is None else [deduplication_id]
        times = None if event_time is None else [milliseconds(event_time)]
        keys, properties_of = None if key is None else [key], None if properties is None else [properties]
        return (await self.send_batch([payload], ids, keys=keys, event_times_ms=times, properties=properties_of))[0]

    async def send_batch(
        self,
        payloads: Payloads,
        deduplication_ids: Ids | None = None,
        *,
        keys: Keys | None = None,
        event_times_ms: Numbers | None = None,
        properties: PropertyRows | None = None,
    ) -> BatchResult:
        """Send messages in columns, at most 65,536 messages with 8 MiB together, and return when all messages are in
        the log. Otherwise the same as `send`.

        The result has arrays for `verdicts`, `indexes` and `message_ids`; its `sequence_ids` are -1. If an ID occurs
        twice in one batch, the second message is answered DUP of the first. Raises BATCH_TOO_LARGE."""
        rows = len(payloads.offsets) - 1 if isinstance(payloads, Binary) else len(payloads)
        batch = self._checks.check_columns(payloads, np.arange(rows), keys, event_times_ms, properties)
        batch.producer_names, batch.deduplication_ids = Binary(), _column(deduplication_ids, rows)
        batch.epochs = batch.previous_sequence_ids = batch.sequence_ids = NO_INT64S
        return await self._delivery.send(batch)


def _column(ids: Ids | None, rows: int) -> Binary:
    """Return the column of these IDs. Raises INVALID_DEDUPLICATION_ID, INVALID_BATCH."""
    if ids is None:
        ids = [new_id() for _ in range(rows)]
    column = ids if isinstance(ids, Binary) else Binary.of_all([_encoded(one) for one in ids])
    offsets = column.offsets
    sizes = offsets[1:] - offsets[:-1]
    if not column.validity and len(sizes) == rows and offsets[0] == 0 and offsets[-1] == len(column.data):
        if sizes.min() >= 1 and sizes.max() <= MAX_DEDUPLICATION_ID_BYTES:
            return column
        if sizes.min() >= 0:
            bad = np.flatnonzero((sizes < 1) | (sizes > MAX_DEDUPLICATION_ID_BYTES))[0]
            why = f"the deduplication ID of row {bad} has {sizes[bad]} bytes"
            raise error("INVALID_DEDUPLICATION_ID", f"{why}: it should have 1 to {MAX_DEDUPLICATION_ID_BYTES}")
    raise error("INVALID_BATCH", f"deduplication_ids must have one value for each of the {rows} rows")


def _encoded(one: object) -> bytes:
    if isinstance(one, str):
        try:
            return one.encode()
        except UnicodeEncodeError as e:
            raise error("INVALID_DEDUPLICATION_ID", f"the deduplication ID {one!r:.80} is not valid Unicode") from e
    if isinstance(one, bytes):
        return one
    raise error("INVALID_DEDUPLICATION_ID", f"a deduplication ID is {type(one).__name__}: it should be bytes or text")
