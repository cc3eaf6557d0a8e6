"""A producer's session with the sidecar. The session opens, sends frames, handles the answers, and reconnects and
resumes until it is closed.

`ProducerConfig`, the configuration of a producer, comes first.
"""

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from seqdedupe.client.connection import NOT_A_SIDECAR, Backoff, may_break_for_a_frame, of_known_topic
from seqdedupe.client.pending import InFlightBatch, PendingBatch
from seqdedupe.client.publish_calls import Openings
from seqdedupe.client.route import OnWaiting, Route, WaitingNotice
from seqdedupe.client.send_queue import SendQueue
from seqdedupe.client.stream import Answers, PublishStream, SharedConnections
from seqdedupe.errors import AccessDeniedError, InvalidRequestError, SeqdedupeError, UnavailableError, error
from seqdedupe.limits import MAX_BATCH_BYTES, MAX_BATCH_ROWS
from seqdedupe.message_id import Position

# -- The configuration of a producer.

DELIVERY_TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class ProducerConfig:
    """How a producer gathers messages into batches, and how much data it may have in flight."""

    linger_ms: float = 1.0
    """The time after which a batch that is not full is sent. At 5,000 messages per second or more, the batch may
    wait up to five times as long. If nothing is in flight, the batch is sent as soon as the event loop runs the next
    task."""

    max_batch_rows: int = 1000
    """The number of messages in a full batch; at most 65,536."""

    max_batch_bytes: int = 128 * 1024
    """The approximate size of a full batch in bytes; at most 8 MiB."""

    max_in_flight_batches: int = 32
    """The number of batches without a receipt at which `send` waits."""

    max_in_flight_bytes: int = 16 * 1024 * 1024
    """The approximate number of bytes at which `send` waits. Messages count until they have a receipt and are known to
    be durable."""

    delivery_timeout_seconds: float | None = DELIVERY_TIMEOUT_SECONDS
    """A batch that has no receipt after this time ends the producer with OutcomeUnknownError, which contains the reason
    of the last refusal. The default is two minutes, as in Kafka. None: no limit, for programs that must not give up."""

    def __post_init__(self) -> None:
        most = {"max_batch_rows": MAX_BATCH_ROWS, "max_batch_bytes": MAX_BATCH_BYTES}
        for name in ("max_batch_rows", "max_batch_bytes", "max_in_flight_batches", "max_in_flight_bytes"):
            value = getattr(self, name)
            if not 1 <= value <= most.get(name, value):
                raise error("INVALID_REQUEST", f"{name} is {value}: it should be 1 to {most.get(name, 'any')}")
        for name in ("linger_ms", "delivery_timeout_seconds"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise error("INVALID_REQUEST", f"{name} is {value}: it should not be negative")


logger = logging.getLogger("seqdedupe.client")

OPEN_TIMEOUT_SECONDS = 30.0
"""The time limit for starting a session. Resuming a started session has no limit."""

CLOSE_TIMEOUT_SECONDS = 30.0
"""When this time has passed since `close` was called, the outcome of messages without a receipt is unknown."""

_FIRST_DELAY_SECONDS = 0.02
_LONGEST_DELAY_SECONDS = 2.0
_SHORTEST_WAIT_SECONDS = 0.01


class Session:
    """The session of one producer name on one topic. All methods run on one event loop.

    connecting --> opening --> serving        `_run`, again and again: `_connect` is all three
         ^            |           |
         +--- after a delay, or at once to another sidecar; or idle, until there is something to send

    any --> ended, by `stop` or with `failure`: messages without a receipt fail with it
    """

    def __init__(
        self,
        connections: SharedConnections,
        topic: str,
        name: str,
        config: ProducerConfig,
        on_waiting: OnWaiting | None = None,
    ) -> None:
        self.name = name
        self.persisted = -1
        self.persisted_position: Position | None = None
        self.queue = SendQueue()
        self.has_room = asyncio.Event()
        """Set while another batch may be added, and permanently after a failure."""
        self._connections = connections
        self._route = Route(connections.sidecars, topic)
        self._topic = topic
        self._config = config
        self._waiting = WaitingNotice(on_waiting)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._epoch: int | None = None
        self._started: asyncio.Future[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._added = asyncio.Event()
        self._stream: PublishStream | None = None  # while one serves the session
        self._rewinding: asyncio.TimerHandle | None = None
        self._is_in_trouble = False
        """Whether a call has failed or was refused since the last receipt."""
        self._resumed_in_vain = False
        """Whether the session was resumed after a refusal, and no receipt has arrived since."""
        self._backoff = Backoff(_FIRST_DELAY_SECONDS, _LONGEST_DELAY_SECONDS)
        self.has_room.set()

    @property
    def failure(self) -> SeqdedupeError | None:
        return self.queue.failure

    @property
    def _is_starting(self) -> bool:
        return self._started is not None and not self._started.done()

    @property
    def is_idle(self) -> bool:
        return not self.queue.without_receipt

    async def start(self) -> None:
        """Open the session. Raises the error that prevents this. Raises UnavailableError after OPEN_TIMEOUT_SECONDS, or
        at once if the server that answers is not a sidecar."""
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.create_future()
        self._run_task(self._run())
        if self._config.delivery_timeout_seconds is not None:
            self._run_task(self._enforce_delivery_timeout(self._config.delivery_timeout_seconds))
        try:
            await self._started
        except BaseException:
            await self.stop()
            raise

    def check_loop(self) -> None:
        """Raise INVALID_REQUEST if the current event loop is not the event loop of `start`: on another loop the call
        would never return."""
        if self._loop not in (None, asyncio.get_running_loop()):
            raise self._of_another_loop()

    def _of_another_loop(self) -> SeqdedupeError:
        what = f"producer {self.name!r} was opened on another event loop, and can only be used there"
        return error("INVALID_REQUEST", what, hint="Open, use and close a producer on one event loop.")

    def add(self, pending: PendingBatch) -> None:
        """Queue a sealed batch to be sent. If the session has failed, fail the batch."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop and self.failure is None:
            self.queue.failure = self._of_another_loop()
        pending.queued_at = loop.time()
        self.queue.add(pending)
        self._update_room()
        self._added.set()
        if self._stream is not None:
            self._stream.ready(self)

    def end_before(self, first: PendingBatch, what: str) -> None:
        """Give up this batch and all later batches, including batches added after this call. Earlier batches
        continue."""
        if self.failure is None:
            message = f"{what}; what has no receipt by now may still become durable, or not"
            self.queue.fail(error("OUTCOME_UNKNOWN", message), first)
            self._update_room()

    async def flush(self) -> None:
        """Wait until all currently queued batches have receipts and are durable. Raises the failure of a batch."""
        self.check_loop()
        for pending in self.queue.entries:
            await pending.wait_until_durable()
        if self.failure is not None:
            raise self.failure.with_traceback(None)

    async def close(self) -> None:
        """Flush for at most CLOSE_TIMEOUT_SECONDS, then stop. Raises the failure of a batch."""
        try:
            await asyncio.wait_for(self.flush(), CLOSE_TIMEOUT_SECONDS)
        except TimeoutError:
            await self.stop()
            await self.flush()
        finally:
            await self.stop()

    async def stop(self) -> None:
        """Stop now. Batches without a receipt fail with OutcomeUnknownError."""
        self.check_loop()
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            # Do this even if the call is cancelled, because other tasks wait for receipts.
            if len(self.queue):
                self._fail(self.queue.outcome_unknown(f"producer {self.name!r} was closed"))

    def _run_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Fail the session if one of its tasks ended because of a defect, or because the event loop ended: other tasks
        wait for receipts."""
        if task.cancelled():
            # `stop` removes its tasks from the list before it cancels them
            if task in self._tasks and self.failure is None:
                self._fail(self.queue.outcome_unknown(f"producer {self.name!r} has ended with its event loop"))
        elif (defect := task.exception()) is not None:
            self._fail(error("INTERNAL", f"a defect in the client: {defect!r}"))

    def _fail(self, failure: SeqdedupeError) -> None:
        self.queue.fail(failure)
        self._update_room()
        if self._started is not None and not self._started.done():
            self._started.set_exception(failure)

    def _update_room(self) -> None:
        queue = self.queue
        full = (
            queue.without_receipt >= self._config.max_in_flight_batches
            or queue.size_bytes >= self._config.max_in_flight_bytes
        )
        if full and queue.failure is None:
            self.has_room.clear()
        else:
            self.has_room.set()

    async def _enforce_delivery_timeout(self, timeout_seconds: float) -> None:
        """End the session and its connection when the oldest batch has waited for `timeout_seconds`.

        The session ends because later messages must not overtake messages that were given up. The next producer that
        opens the name waits until all messages in flight are settled. The answer to Open then contains the ID after
        which the producer must continue.
        """
        loop = asyncio.get_running_loop()
        while self.failure is None:
            since = min((entry.queued_at for entry in self.queue.entries if not entry.has_receipts), default=None)
            left_seconds = timeout_seconds + (since - loop.time() if since is not None else 0)
            if left_seconds <= 0:
                self._fail(self.queue.outcome_unknown(f"no receipt within {timeout_seconds:g} seconds"))
                for task in self._tasks:
                    if task is not asyncio.current_task():
                        task.cancel()
                return
            due_at = loop.time() + max(left_seconds, _SHORTEST_WAIT_SECONDS)
            await asyncio.sleep(due_at - loop.time())
            # While this process was suspended, nothing was sent or received. Start the same timeout again.
            await asyncio.sleep(min(loop.time() - due_at, timeout_seconds))

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + OPEN_TIMEOUT_SECONDS
        while self.failure is None or len(self.queue):
            try:
                await self._connect()
            except SeqdedupeError as failure:
                self._is_in_trouble = True
                # A sidecar that received the topic only then may also have refused the stream.
                e = self._route.doubted(failure)
                if not isinstance(e, UnavailableError):
                    # This refused a frame, not an Open: see `SendQueue.asks_for_resume`.
                    if e.reason == "INVALID_EPOCH":
                        continue
                    self._fail(self._of_resume(e))
                    return
                if e.reason == "STREAM_IDLE" and not len(self.queue) and not self._is_starting:
                    # The session stays. It resumes when there is something to send.
                    await self._wait_for_something_to_send()
                    continue
                moves_on = self._route.moves_on(e)
                why = self._route.told()
                self.queue.held_up(why)
                self._waiting.waits(why)
                is_final = loop.time() > give_up_at or (e.reason == NOT_A_SIDECAR and not moves_on)
                if self._is_starting and is_final:
                    self._fail(why)
                    return
                if not moves_on:
                    await asyncio.sleep(max(self._backoff.next_seconds(), e.retry_delay_ms / 1000))

    def _of_resume(self, failure: SeqdedupeError) -> SeqdedupeError:
        """Return the session's failure if the session cannot be resumed. The refusal of a resume contains no
        information about messages sent earlier, so the outcome of these messages is unknown."""
        if self._epoch is not None:
            of_known_topic(failure)
        if not isinstance(failure, AccessDeniedError) or self._is_starting or self.is_idle:
            return failure
        self.queue.held_up(failure)
        return self.queue.outcome_unknown(f"producer {self.name!r} may not go on")

    async def _wait_for_something_to_send(self) -> None:
        while not len(self.queue) and self.failure is None:
            self._added.clear()
            await self._added.wait()

    async def _connect(self) -> None:
        """Open or resume the session. Then send frames and handle answers until the stream ends."""
        async with self._connections.stream(self._route.address, self._topic) as stream:
            await stream.begin(has_topic=self._epoch is not None)
            await self._open(stream.openings)
            await stream.check()
            if self._is_starting and self._started is not None:
                self._started.set_result(None)
            if not len(self.queue):
                # Without messages in flight, no receipt would end this wait.
                self._waiting.goes_on()
            self._stream = stream
            try:
                await stream.serve(self)
            except UnavailableError as e:
                if stream.has_ended and may_break_for_a_frame(e):
                    self.queue.broke(e, asyncio.get_running_loop().time(), is_alone=stream.ended_alone)
                    self._update_room()
                raise
            finally:
                self._stream = None
                if self._rewinding is not None:
                    self._rewinding.cancel()
                    self._rewinding = None

    async def _open(self, openings: Openings) -> None:
        try:
            opened = await openings.open(self.name, self._epoch)
        except InvalidRequestError as e:
            if (doubted := self._route.doubted(e)) is not e:
                raise doubted from e
            if self._epoch is not None and e.reason in ("INVALID_EPOCH", "TOPIC_NOT_FOUND"):
                raise error(
                    "DATA_LOSS", f"the sidecar does not know the session that it has opened: {e.message}"
                ) from e
            raise
        # If the whole history was replaced, `SendQueue.open` decides which messages are lost.
        self._route.check_term(opened.term, self.queue.term)
        had_receipts = [entry for entry in self.queue.entries if entry.has_receipts]
        if self.queue.open(
            opened.incarnation,
            opened.term,
            opened.epoch,
            opened.persisted,
            is_forgotten=opened.is_forgotten,
            durable_index=opened.durable_index,
        ):
            logger.warning(
                "topic %s has forgotten producer %r, which was idle for longer than its policy allows: what is sent "
                "again counts as new, even if it is stored",
                self._topic,
                self.name,
            )
        # Batches that need another receipt wait from now on. The time before their first receipt does not count.
        for entry in had_receipts:
            if not entry.has_receipts:
                entry.queued_at = asyncio.get_running_loop().time()
        if self._epoch is None:
            self.persisted, self.persisted_position = opened.persisted, opened.position
        self._epoch = opened.epoch

    # -- the interface for a stream ------------------------------------------------------------------------------

    @property
    def waits_for_answers(self) -> bool:
        return self.queue.unanswered > 0 or self.waits_until_durable

    @property
    def waits_until_durable(self) -> bool:
        return not self.queue.is_all_durable

    @property
    def is_suspect(self) -> bool:
        return self.queue.breaks.is_suspect

    def next_frame(self) -> InFlightBatch | None:
        """Return the next frame to send now; None if there is no such frame."""
        return self.queue.next_frame()

    def take(self, incarnation: int, term: int, answers: Answers) -> bool:
        """Handle these answers, and return whether no further answers are needed. Raises an error if another stream or
        a resume is needed, or if the session ends."""
        if not self.queue.counts(incarnation, term):
            return False
        waiting = self.queue.without_receipt
        for frame, receipt in answers.receipts:
            self.queue.receipt(frame, receipt)
        self.queue.durable_up_to(answers.durable_index)
        if self._is_in_trouble and self.queue.without_receipt < waiting:
            self._is_in_trouble = self._resumed_in_vain = False
            self._backoff.reset()
            self._route.goes_well()
            self.queue.held_up(None)
            self._waiting.goes_on()
        for frame, why in answers.refusals:
            if why is None:
                self.queue.put_back(frame)
            else:
                self._refused(frame, why)
        self._update_room()
        if self.queue.must_rewind and not self.queue.unanswered:
            self._rewind_later()
        return self.failure is not None and not len(self.queue)

    def _refused(self, frame: int, why: SeqdedupeError) -> None:
        self._is_in_trouble = True
        of_known_topic(why)
        if not self._resumed_in_vain and self.queue.asks_for_resume(frame, why):
            self._resumed_in_vain = True
            raise why
        self.queue.refused(frame, why)
        if why.reason == "NOT_OWNER" or self._route.has_lasted(why):
            raise why  # the session resumes at the owner
        if isinstance(self.queue.last_refusal, UnavailableError):
            self._waiting.waits(self.queue.last_refusal)

    def _rewind_later(self) -> None:
        if self.queue.rewinds_at_once:
            self._rewind()
        elif self._rewinding is None:
            self._is_in_trouble = True
            delay_seconds = max(self._backoff.next_seconds(), self.queue.retry_delay_ms / 1000)
            self._rewinding = asyncio.get_running_loop().call_later(delay_seconds, self._rewind)

    def _rewind(self) -> None:
        self._rewinding = None
        self.queue.rewind()
        if self._stream is not None:
            self._stream.ready(self)
