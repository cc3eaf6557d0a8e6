"""The pipeline: its thread publishes the outputs of inputs, and acknowledges each input when all outputs of the input
are settled.

Begin with `Pipeline`. It has one `OutputPublisher`, the first class in this file, for each topic.
"""

import asyncio
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Protocol, TypeVar

import grpc.aio

from seqdedupe.client.client import Client
from seqdedupe.client.connection import (
    NOT_A_SIDECAR,
    Backoff,
    channel_to,
    error_of_reason,
    of_known_topic,
    refusal_error,
)
from seqdedupe.client.message import Message
from seqdedupe.client.pending import InFlightBatch
from seqdedupe.client.publish_calls import StreamAnswer, exchange, open_sessions, publish_call
from seqdedupe.client.route import Route, Sidecars
from seqdedupe.errors import NEVER, FencedError, SeqdedupeError, UnavailableError, error
from seqdedupe.functions import ending, traceback_of
from seqdedupe.functions.backlog import Backlog, Row
from seqdedupe.functions.deployment import FunctionSettings
from seqdedupe.functions.identity import Callback, FunctionOutput, InputIdentity, InputTopic
from seqdedupe.message_id import MessageId
from seqdedupe.v1 import publish_pb2

# -- The publisher of one topic. Until the process ends it opens sessions, sends and takes answers, and begins again
# after any trouble.
#
# It never gives up an output on its own: a later stream sends all unsettled outputs again, in their order.

SAY_EVERY_SECONDS = 10.0
"""The interval of log lines while no output can be published."""
ANSWER_TIMEOUT_SECONDS = 30.0
"""If frames are in flight and no answer arrives for this time, the connection counts as broken."""
SHORTEST_TRUCE_SECONDS = 0.1
LONGEST_TRUCE_SECONDS = 1.0
"""The maximum length of a random pause. When another instance has taken a producer name, this instance waits for such a
pause before it takes the name back."""
NAMES_PER_OPEN = 3000
"""The maximum number of names, with maximum length and epochs, in one call, which may have 1 MiB."""

_FIRST_DELAY_SECONDS = 0.05
_LONGEST_DELAY_SECONDS = 2.0
_TRIED_AGAIN = frozenset({"FENCED", "INVALID_EPOCH", "PREDECESSOR_MISSING", "OUTCOME_UNKNOWN"})
"""The reasons after which a new stream with resumed or new sessions helps, in addition to the reasons that the sidecar
marks as retriable."""


class OutputPublisher:
    """Publishes the outputs for one topic, on one event loop."""

    def __init__(self, sidecars: Sidecars, topic: str, has_begun: asyncio.Event) -> None:
        """Create a publisher. All publishers of the function share `has_begun`, which is set when a sidecar has
        answered one of them."""
        self.backlog = Backlog()
        self.unknown = self.resumes = 0
        self.trouble: SeqdedupeError | None = None
        """The reason why no output can be published now; None if no such reason is known."""
        self._sidecars = sidecars
        self._route = Route(sidecars, topic)
        self._topic = topic
        self._incarnation = self._term = 0
        self._durable_index = 0  # the highest in an answer: below it, everything is durable
        self._has_begun = has_begun
        self._work = asyncio.Event()
        self._backoff = Backoff(_FIRST_DELAY_SECONDS, _LONGEST_DELAY_SECONDS)
        self._answered_at = 0.0
        self._said_at = float("-inf")

    def add(self, rows: list[Row]) -> None:
        """Add an input's outputs for this topic. Outputs added earlier are published first."""
        self.backlog.add(rows)
        self._work.set()

    async def persisted(self, name: str) -> int:
        """Return the highest sequence ID that the topic contains under a producer name; -1 if there is none. Waits for
        the sidecar."""
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.backlog.ask(name, answer.set_result)
        self._work.set()
        return await answer

    async def run(self) -> None:
        """Publish until cancelled. Raises errors after which a retry cannot help. Raises NOT_A_SIDECAR only if no
        sidecar has ever answered."""
        while True:
            await self._wait_for_work()
            try:
                await self._connect()
            except SeqdedupeError as e:
                if not (isinstance(e, UnavailableError) or e.retry_delay_ms >= 0 or e.reason in _TRIED_AGAIN):
                    if self._incarnation:
                        of_known_topic(e)
                    raise
                if e.reason == "STREAM_IDLE" and not self.backlog.has_work:
                    continue
                self.resumes += 1
                moves_on = isinstance(e, UnavailableError) and self._route.moves_on(e)
                if e.reason == NOT_A_SIDECAR and not (moves_on or self._has_begun.is_set()):
                    raise
                self._say(self._route.told() if isinstance(e, UnavailableError) else e)
                if not moves_on and not isinstance(e, FencedError):
                    await asyncio.sleep(max(self._backoff.next_seconds(), e.retry_delay_ms / 1000))

    def _say(self, e: SeqdedupeError) -> None:
        self.trouble = e
        if (now := time.monotonic()) - self._said_at >= SAY_EVERY_SECONDS:
            self._said_at = now
            logger.warning("waiting to publish to %s: %s %s", self._topic, e, e.hint)

    async def _wait_for_work(self) -> None:
        while not self.backlog.has_work:
            self._work.clear()
            await self._work.wait()

    async def _connect(self) -> None:
        self.backlog.rewind()
        async with channel_to(self._sidecars, self._route.address) as channel:
            await self._resume(channel)
            self.backlog.forget_idle()
            await self._open(channel)
            self._answered_at = time.monotonic()
            await exchange(
                publish_call(channel),
                self._route.address,
                self._topic,
                frames=lambda: self._frames_to_send(channel),
                rows_of=self.backlog.rows_of,
                take=self._take,
                watch=self._watch,
            )

    # -- sessions ----------------------------------------------------------------------------------------------

    async def _resume(self, channel: grpc.aio.Channel) -> None:
        """Resume the existing sessions. If another instance has taken a name, take the name back after a pause."""
        sessions = list(self.backlog.sessions().items())
        fenced = False
        for first in range(0, len(sessions), NAMES_PER_OPEN):
            some = dict(sessions[first : first + NAMES_PER_OPEN])
            answer = await self._call_open(channel, list(some), list(some.values()))
            refused = {refusal.index: refusal for refusal in answer.refusals}
            for place, name in enumerate(some):
                if place not in refused:
                    is_forgotten = place in answer.forgotten
                    self.backlog.opened(name, answer.epochs[place], answer.persisted[place], is_forgotten=is_forgotten)
                elif refused[place].reason == "FENCED":
                    fenced |= self.backlog.lost(name)
                else:
                    raise self._lost(refused[place].message)
        if fenced:
            logger.info("another instance publishes to %s under the names of this one", self._topic)
            await asyncio.sleep(random.uniform(SHORTEST_TRUCE_SECONDS, LONGEST_TRUCE_SECONDS))

    async def _open(self, channel: grpc.aio.Channel) -> None:
        """Start sessions for the names that have no session."""
        while names := self.backlog.unopened()[:NAMES_PER_OPEN]:
            answer = await self._call_open(channel, names, [])
            for refusal in answer.refusals:
                raise error_of_reason(refusal.reason, refusal.message, NEVER, {})
            if self._incarnation not in (0, answer.incarnation):
                raise self._lost("it was created again")
            self._incarnation = answer.incarnation
            for name, epoch, persisted in zip(names, answer.epochs, answer.persisted, strict=True):
                self.backlog.opened(name, epoch, persisted)

    def _lost(self, why: str) -> SeqdedupeError:
        return error("DATA_LOSS", f"the sidecar does not know the sessions that it has opened for {self._topic}: {why}")

    async def _call_open(
        self, channel: grpc.aio.Channel, names: list[str], epochs: list[int]
    ) -> publish_pb2.OpenResponse:
        # While the call runs, the stream may bring later answers.
        term, durable_index = self._term, self._durable_index
        try:
            answer = await open_sessions(channel, self._route.address, self._topic, names, epochs)
        except SeqdedupeError as e:
            if (doubted := self._route.doubted(e)) is not e:
                raise doubted from e
            raise
        self._has_begun.set()
        self._answered_at = time.monotonic()
        is_older = self._route.check_term(answer.term, term)
        if is_older or (answer.HasField("durable_index") and answer.durable_index < durable_index):
            why = f"durable index {answer.durable_index} ({durable_index} before), term {answer.term} ({term} before)"
            raise error("DATA_LOSS", f"the sidecar answers with an older state of {self._topic} than before: {why}")
        self._heard(answer.term, answer.durable_index)
        return answer

    def _heard(self, term: int, durable_index: int) -> None:
        if term >= self._term:
            self._term, self._durable_index = term, max(self._durable_index, durable_index)

    # -- the stream --------------------------------------------------------------------------------------------

    async def _frames_to_send(self, channel: grpc.aio.Channel) -> list[InFlightBatch]:
        """Return the next frame. Waits until there is a frame to send."""
        while True:
            if (frame := self.backlog.next_frame()) is not None:
                return [InFlightBatch(frame.number, frame.batch, 0)]
            if self.backlog.unopened():
                await self._open(channel)
            else:
                self._work.clear()
                await self._work.wait()

    def _take(self, answer: StreamAnswer) -> None:
        self._answered_at = time.monotonic()
        self._heard(answer.term, answer.durable_index)
        for number, receipt in answer.receipts:
            if not self.backlog.receipt(number, receipt.verdicts):
                self.unknown += 1
                raise error("RECOVERING", "a copy of an output is in flight, and its outcome is not known yet")
            self._backoff.reset()
            self._route.goes_well()
            if self.trouble is not None:
                logger.info("publishing to %s goes on", self._topic)
                self.trouble = None
        if not self.backlog.waits_for_answers:
            self._work.set()  # outputs that begin under a new name have waited for the settlement of earlier frames
        for refusal in answer.refusals:
            if self.backlog.rows_of(refusal.frame) is not None:
                raise refusal_error(refusal)

    async def _watch(self) -> None:
        """End the stream if frames wait too long for an answer."""
        while True:
            await asyncio.sleep(ANSWER_TIMEOUT_SECONDS / 10)
            if not self.backlog.waits_for_answers:
                self._answered_at = time.monotonic()
            elif time.monotonic() - self._answered_at > ANSWER_TIMEOUT_SECONDS:
                raise error("UNREACHABLE", f"the sidecar at {self._route.address} has not answered for a long time")


logger = logging.getLogger("seqdedupe.functions")

LOOK_SECONDS = 0.1
"""The interval at which waiting calls check whether the process was asked to stop."""
REPORT_SECONDS = 1.0
INPUT_BYTES = 512
"""The number of bytes counted for an input in addition to its outputs."""

T = TypeVar("T")

Report = Callable[[dict[str, int], int], None]
"""A function that receives the counts of `Pipeline.counts`, and the number of unacknowledged inputs."""


class Process(Protocol):
    """The process in which the function runs."""

    @property
    def is_stopping(self) -> bool:
        """Whether the process was asked to end."""

    def end(self, why: str, *, failed: bool) -> None:
        """End the process at once. Pulsar then delivers the unacknowledged inputs again, in order. In a test, this call
        may return."""


class Input:
    """An unacknowledged input. `acknowledge` is called once, from the pipeline's thread."""

    __slots__ = ("acknowledge", "lane", "left", "since_seconds", "size_bytes")

    def __init__(self, lane: str, acknowledge: Callable[[], None]) -> None:
        self.lane = lane
        """The topic or partition of the input. The inputs of a lane are acknowledged in order."""
        self.acknowledge = acknowledge
        self.left = 0
        """The number of outputs that are not settled yet."""
        self.size_bytes = INPUT_BYTES
        self.since_seconds = 0.0


class Pipeline:
    """The inputs in flight of a function. Only the thread of `process` may call `add`, `settle`, `persisted` and
    `message`."""

    def __init__(self, settings: FunctionSettings, sidecars: Sidecars, process: Process, report: Report) -> None:
        """Start the pipeline's thread. The thread calls `report` at intervals, even while inputs wait."""
        self._settings = settings
        self._process = process
        self._report = report
        self._sidecars = sidecars
        self._loop = asyncio.new_event_loop()
        self._client = Client(settings.sidecar_address, sidecars.credentials)
        self._input_topics: dict[str, InputTopic] = {}
        self._publishers: dict[str, OutputPublisher] = {}
        self._has_begun = asyncio.Event()
        self._lanes: dict[str, deque[Input]] = {}
        self._room = threading.Condition()
        self._inputs = self._bytes = 0
        self._handed_over: deque[tuple[Input, dict[str, list[Row]]]] = deque()
        self._is_woken = False
        self._is_acknowledging = False
        self._tasks: set[asyncio.Task[Any]] = set()
        threading.Thread(target=self._run, name="seqdedupe-functions", daemon=True).start()

    # -- the thread of process() -------------------------------------------------------------------------------

    def add(self, one: Input, identity: InputIdentity, outputs: Iterable[FunctionOutput]) -> None:
        """Add an input and its outputs to the pipeline, in order. Waits while too much data is in flight."""
        rows: dict[str, list[Row]] = {}
        for output in outputs:
            of_topic = rows.setdefault(output.topic, [])
            name = identity.producer_name(len(of_topic))
            of_topic.append(Row(name, identity.sequence_id, output, self._settler(one, output)))
            one.left += 1
            one.size_bytes += output.size_bytes
        self._wait_until(self._has_room)
        with self._room:
            self._inputs += 1
            self._bytes += one.size_bytes
        one.since_seconds = time.monotonic()
        self._handed_over.append((one, rows))
        if not self._is_woken:
            self._is_woken = True
            self._loop.call_soon_threadsafe(self._take)

    def _has_room(self) -> bool:
        return self._inputs < self._settings.max_in_flight_messages and self._bytes < self._settings.max_in_flight_bytes

    def settle(self) -> None:
        """Wait until all inputs are acknowledged."""
        self._wait_until(lambda: not self._inputs)

    def persisted(self, topic: str, name: str) -> int:
        """Return the highest sequence ID that a topic contains under a producer name; -1 if there is none."""

        async def ask() -> int:
            return await self._publisher(topic).persisted(name)

        return self._asked(ask)

    def message(self, topic: str, message_id: MessageId) -> Message | None:
        """Return an input from a topic of native entries, read from the topic's sidecar; None if no valid message has
        this ID. Wait until the sidecar has confirmed this message or a later message. Raises the errors of
        `InputTopic`."""
        found = self._input_topics.get(topic)
        if found is None:
            found = self._input_topics[topic] = InputTopic(self._client, topic)
        if not found.covers(message_id):
            unconfirmed = error("OUTCOME_UNKNOWN", f"no sidecar has confirmed {message_id} of {topic}, or what follows")
            self._asked(lambda: found.read_up_to(message_id), lambda: found.trouble or unconfirmed)
        return found.message(message_id)

    def _asked(
        self, ask: Callable[[], Coroutine[Any, Any, T]], why: Callable[[], SeqdedupeError | None] = lambda: None
    ) -> T:
        """Run a coroutine in the pipeline's thread, and return the result. `why` returns the reason for a delay, if the
        reason is known."""
        asked = asyncio.run_coroutine_threadsafe(ask(), self._loop)
        asked.add_done_callback(lambda _: self._notify())
        self._wait_until(asked.done, why)
        return asked.result()

    def _wait_until(self, is_so: Callable[[], bool], why: Callable[[], SeqdedupeError | None] = lambda: None) -> None:
        """Wait until `is_so` returns true. Callers wait for inputs in flight, or for the answer to a query. The wait
        does not rely only on the pipeline's thread, because a callback of the function may block that thread."""
        began = time.monotonic()
        with self._room:
            while not is_so():
                self._room.wait(LOOK_SECONDS)
                if self._process.is_stopping:
                    self._process.end("the instance was asked to stop", failed=False)
                if self._is_too_late(began):
                    self._give_up(why())

    def _is_too_late(self, since_seconds: float) -> bool:
        return time.monotonic() - since_seconds > self._settings.give_up_after_seconds

    def close(self) -> None:
        """End all work. The thread continues to exist without work. Inputs in flight are not acknowledged, even if
        their outputs are published."""

        async def cancel() -> None:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            for topic in self._input_topics.values():
                await topic.close()
            await self._client.close()

        asyncio.run_coroutine_threadsafe(cancel(), self._loop).result()

    @property
    def in_flight(self) -> int:
        """The number of unacknowledged inputs."""
        return self._inputs

    def counts(self) -> dict[str, int]:
        """Return the numbers of new outputs, duplicates and unknown outcomes, and of restarts of publishing."""
        publishers = list(self._publishers.values())
        return {
            "not_dup": sum(one.backlog.not_dup for one in publishers),
            "dup": sum(one.backlog.dup for one in publishers),
            "unknown": sum(one.unknown for one in publishers),
            "resumes": sum(one.resumes for one in publishers),
        }

    # -- the pipeline's own thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._start(self._watch())
        try:
            self._loop.run_forever()
        except BaseException as e:  # noqa: BLE001 (an instance without this thread would wait forever)
            self._end_because(e)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (e := task.exception()) is not None:
            self._end_because(e)

    def _end_because(self, e: BaseException) -> None:
        if self._process.is_stopping:
            # Pulsar's runtime has closed its consumers before: no input can be acknowledged any more.
            self._process.end("the instance was asked to stop", failed=False)
        if not isinstance(e, SeqdedupeError):
            logger.error("a defect in the wrapper", exc_info=e)
        self._process.end(ending(e), failed=True)

    def _publisher(self, topic: str) -> OutputPublisher:
        found = self._publishers.get(topic)
        if found is None:
            found = self._publishers[topic] = OutputPublisher(self._sidecars, topic, self._has_begun)
            self._start(found.run())
        return found

    def _take(self) -> None:
        # Clear the flag first: inputs that arrive later set it again, or are found below.
        self._is_woken = False
        try:
            while self._handed_over:
                one, rows = self._handed_over.popleft()
                self._lanes.setdefault(one.lane, deque()).append(one)
                for topic, of_topic in rows.items():
                    self._publisher(topic).add(of_topic)
                self._acknowledge_soon(one)
        except Exception as e:  # noqa: BLE001 (any failure ends the process: inputs must not wait forever)
            self._end_because(e)

    def _settler(self, one: Input, output: FunctionOutput) -> Callable[[], None]:
        """Return the function to call when the output is settled."""

        def settled() -> None:
            one.left -= 1
            if output.callback is not None:
                _call_back(output.callback, output.topic)
            self._acknowledge_soon(one)

        return settled

    def _acknowledge_soon(self, one: Input) -> None:
        """Schedule acknowledgements if the input is settled. Inputs that settle at the same time are acknowledged
        together."""
        if not one.left and not self._is_acknowledging:
            self._is_acknowledging = True
            self._loop.call_soon(self._acknowledge)

    def _acknowledge(self) -> None:
        """In each lane, acknowledge the settled inputs that precede the first unsettled input."""
        self._is_acknowledging = False
        count = size = 0
        try:
            for inputs in self._lanes.values():
                while inputs and not inputs[0].left:
                    done = inputs.popleft()
                    done.acknowledge()
                    count += 1
                    size += done.size_bytes
        except Exception as e:  # noqa: BLE001 (any failure ends the process: inputs must not wait forever)
            self._end_because(e)
        with self._room:
            self._inputs -= count
            self._bytes -= size
            self._room.notify_all()

    def _notify(self) -> None:
        with self._room:
            self._room.notify_all()

    async def _watch(self) -> None:
        """Report the counts, and end the process when an input has waited for too long."""
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            self._report(self.counts(), self._inputs)
            oldest = min((inputs[0].since_seconds for inputs in self._lanes.values() if inputs), default=None)
            if oldest is not None and self._is_too_late(oldest):
                self._give_up()

    def _give_up(self, why: SeqdedupeError | None = None) -> None:
        waiting = [one for one in list(self._publishers.values()) if one.backlog.has_work]
        trouble = next((one.trouble for one in waiting if one.trouble is not None), None)
        why = why or trouble or error("OUTCOME_UNKNOWN", "no output has been settled")
        self._process.end(
            f"an input has waited for {self._settings.give_up_after_seconds} seconds: {why} {why.hint}", failed=True
        )


def _call_back(callback: Callback, topic: str) -> None:
    import pulsar

    try:
        callback(pulsar.Result.Ok, None)
    except BaseException as e:  # noqa: BLE001 (`sys.exit` too: it would end this thread)
        logger.error("the callback of an output for %s has failed\n%s", topic, traceback_of(e))
