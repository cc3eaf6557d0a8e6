"""The pipe: it copies all partitions of a source to the target, and has standby processes.

Begin with `Pipe`. A `Lane` copies one source topic or partition, and `start_of` finds the position where the lane
continues. `BlockingPipe` is a pipe for threads.
"""

import asyncio
import logging
import queue
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from seqdedupe.client import Client, Persisted, Producer, ProducerConfig, Reader, StoredBatch, TopicEnds
from seqdedupe.client.blocking import Client as BlockingClient
from seqdedupe.client.blocking._sync import AnyCursor, on_loop
from seqdedupe.client.blocking.loop import event_loop
from seqdedupe.client.connection import NOT_A_SIDECAR, Backoff
from seqdedupe.client.cursor import Cursor, CursorMoves, Kept
from seqdedupe.errors import FencedError, InvalidRequestError, NotFoundError, SeqdedupeError, UnavailableError, error
from seqdedupe.figures import counted
from seqdedupe.limits import MAX_NAME_BYTES, MAX_PARTITIONS
from seqdedupe.message_id import Position
from seqdedupe.names import new_producer_name, partition_name, source_name, topic_name
from seqdedupe.services import Stillness, check_target
from seqdedupe.services.activity import Activity, Lag, answer_of, lag_of_all
from seqdedupe.services.pipe.outputs import Calling, Function, OutputBatch, index_of

T = TypeVar("T")

logger = logging.getLogger("seqdedupe.pipe")

# -- The position where a pipe reads on: from the outputs in the target, or from a cursor that is further. No I/O.

_ANOTHER_NAME = "If the lost messages do not matter, give the pipe another name. It begins with the first message left."


def start_of(source: str, ends: TopicEnds, complete_up_to: int, persisted: Sequence[Persisted]) -> Position:
    """Return the position after which the lane continues to read. `complete_up_to` and `persisted` are the target's
    answers when the lane opened its producer.

    The lane processes the last input again. The outputs of that input were one frame, but a log that stores each
    message separately may contain only the first of them. Outputs that are already in the target are answered DUP.

    Raises POSITION_TRIMMED if messages that the pipe has not read are trimmed, and POSITION_AFTER_END if the source has
    lost messages that the pipe has read.
    """
    incarnation, first_index = ends.last.incarnation, ends.first_index
    if complete_up_to < 0:
        if first_index and any(one.sequence_id >= 0 for one in persisted):
            raise error(
                "POSITION_TRIMMED",
                f"retention has removed the messages of {source} before index {first_index}, and the partitions of the "
                "target no longer say which were piped: some may never have been",
                hint=_ANOTHER_NAME + " Messages that are left and were piped already are then published twice.",
                first_index=first_index,
            )
        return Position.before(incarnation, first_index)
    index = index_of(complete_up_to)
    if index > ends.last.index:
        raise error(
            "POSITION_AFTER_END",
            f"the target holds outputs of message {index} of {source}, which ends with index {ends.last.index}",
            index=index,
            end_index=ends.last.index + 1,
        )
    if index + 1 < first_index:
        raise error(
            "POSITION_TRIMMED",
            f"the pipe has read {source} up to index {index}, and the first message left has index {first_index}: "
            f"retention has removed {first_index - index - 1:,} that it has not read",
            hint=_ANOTHER_NAME + " None of those left was published under this name.",
            index=index,
            first_index=first_index,
        )
    return Position.before(incarnation, max(index, first_index))


def later(start: Position, kept: Kept | None, persisted: Sequence[Persisted]) -> Position:
    """Return the position in a cursor if the position is usable; otherwise `start`.

    The position must belong to this source and must not be before `start`. The target must still contain everything
    that it contained when the cursor was moved.
    """
    if kept is None or kept.position.incarnation != start.incarnation or kept.position.index < start.index:
        return start
    return kept.position if _holds(persisted, kept.note) else start


def note_of(persisted: Sequence[Persisted], sequence_id: int) -> str:
    """Return a note for a cursor: the incarnation of a target without partitions, and the last output in this
    target."""
    return f"{persisted[0].incarnation}:{sequence_id}"


def _holds(persisted: Sequence[Persisted], note: str) -> bool:
    incarnation, _, sequence_id = note.partition(":")
    if not (incarnation.isdecimal() and sequence_id.removeprefix("-").isdecimal()):
        return False  # the note comes from another owner of the cursor
    return persisted[0].incarnation == int(incarnation) and persisted[0].sequence_id >= int(sequence_id)


async def piped_up_to(
    client: Client, source: str, target: str, name: str, cursor: str | None = None
) -> dict[str, Position]:
    """Return a position for the source or each of its partitions: the position up to which the target contains outputs
    of the pipe NAME. If the pipe's cursor has a later position, return that position. Earlier messages may have no
    outputs.

    Without a cursor, the pipe may have read further than this. Raises NotFoundError; INVALID_NAME for the cursor;
    INVALID_REQUEST if the target is partitioned, because only the pipe itself can then find the position.
    """
    there = await client.admin.topic(target)
    if there.partitions:
        what = f"{there.name} has {counted(there.partitions, 'partition')}: it is not known which outputs it contains"
        raise error("INVALID_REQUEST", what, hint="The metrics of the running pipe show its lag: --metrics-listen.")
    source = topic_name(source)
    partitions = await client.partitions(source)
    sources = [partition_name(source, k) for k in range(partitions)] or [source]
    positions = {}
    for one in sources:
        ends = await client.ends(one)
        index, persisted = ends.first_index, -1
        with suppress(NotFoundError):  # no output yet
            producer = await client.admin.producer(target, source_name(name, one, ends.last.incarnation))
            persisted = producer.persisted
            index = index_of(persisted) + 1
        positions[one] = Position.before(ends.last.incarnation, index)
        if cursor is not None:
            kept = await client.cursor(one, cursor).read()
            last = Persisted(there.name, persisted, None, there.incarnation)
            positions[one] = later(positions[one], kept, [last])
    return positions


# -- One source, a topic or a partition, on its way to the target.

IDLE_SECONDS = 1.0
"""After this time without a message, the pipe waits until all outputs are durable, and moves the cursor."""

CURSOR_SECONDS = 5.0
"""The time between two moves of the cursor while messages arrive."""

READ_TIMEOUT_SECONDS = 120.0
"""A pipe without `follow` fails if it makes no progress for this time although there are messages to read."""

SEND_SECONDS = 1.0
"""The maximum time that outputs wait to be sent together with other outputs, even if the function is slow."""

GATHERED_ROWS = 4096
"""The maximum number of waiting messages that are passed to the function's thread together."""

_FOLLOWING = ProducerConfig(delivery_timeout_seconds=None)


class Lane:
    """Copies one source topic or partition to a target, under one producer name. Its only state is the outputs in the
    target under this name."""

    def __init__(
        self,
        client: Client,
        source: str,
        target: str,
        function: Function,
        name: str,
        cursor: Cursor | None,
        activity: Activity,
    ) -> None:
        self.source = source
        self.target = target
        self.producer_name = ""
        """The producer name of the outputs. It is known after `run` has looked up the source."""
        self.counts = {"inputs": 0, "outputs": 0, "outputs_again": 0}
        """The counts of all runs: the messages for which the function was called, the outputs sent, and the outputs
        that were sent again although the target was known to contain them."""
        self.position: Position | None = None
        """The position up to which all outputs have been sent. None until `run` has determined where it begins."""
        self._activity = activity
        self._client = client
        self._function = function
        self._name = name
        self._cursor = None if cursor is None else CursorMoves(cursor)
        # the position to store in the cursor once all outputs up to this position are durable
        self._next: Kept | None = None
        self._next_id = -1  # the sequence ID of the last of these outputs
        self._look_at = 0.0
        self._calling: Calling | None = None  # set while messages are copied
        self._stopped = asyncio.Event()

    def stop(self) -> bool:
        """End `run` after the current message. All outputs sent until then are durable when `run` ends. Return False if
        no message is being copied; the caller may then cancel `run`."""
        self._stopped.set()
        if self._calling is None:
            return False
        self._calling.stop()
        return True

    async def run(self, executor: Executor, *, follow: bool) -> None:
        """Read, call the function and publish, up to the current end of the source, or with `follow` without end. When
        `run` returns, the outputs are durable.

        Raises the error that ended the run. The caller may call `run` again; the lane then continues from the outputs
        in the target.
        """
        ends = await self._client.ends(self.source)
        self.producer_name = source_name(self._name, self.source, ends.last.incarnation)
        config = _FOLLOWING if follow else ProducerConfig()
        waits = self._activity.waits
        async with self._client.producer(self.target, self.producer_name, config, on_waiting=waits) as producer:
            start = start_of(self.source, ends, producer.persisted_sequence_id, producer.persisted)
            if self._cursor is not None:
                start = await self._later(self._cursor, start, producer)
            self.position = start
            self._activity.runs()
            async with self._client.reader(self.source, start, follow=follow, on_waiting=waits) as reader:
                await self._copy(reader, producer, executor, follow=follow)

    async def _later(self, cursor: CursorMoves, start: Position, producer: Producer) -> Position:
        if producer.persisted[0].topic != self.target:
            what = f"{self.target} is partitioned: a cursor cannot store the positions of several partitions"
            raise error("INVALID_REQUEST", what, hint="Leave the cursor out: it only saves reading again.")
        kept = await cursor.read()
        self._next = None
        self._look_at = asyncio.get_running_loop().time() + CURSOR_SECONDS
        return later(start, kept, producer.persisted)

    async def _copy(self, reader: Reader, producer: Producer, executor: Executor, *, follow: bool) -> None:
        calling = self._calling = Calling(self._function, self.source)
        try:
            wait_seconds = None if follow else READ_TIMEOUT_SECONDS
            while calling.failure is None and (batches := await self._next_batches(reader, producer, wait_seconds)):
                self.counts["inputs"] += sum(map(len, batches))
                calling.take(batches)
                while await self._fill(calling, executor, producer):
                    await self._send(calling.frame(), producer)
                    self._note_progress(reader)
                    await self._move_cursor(reader, producer, now=False)
                    if self._stopped.is_set():
                        break
                if calling.failure is not None or not (reader.has_in_hand() or reader.take_record()):
                    await self._send(calling.frame(), producer)
                    self._note_progress(reader)
                    await self._move_cursor(reader, producer, now=False)
            await self._send(calling.frame(), producer)
            self._note_progress(reader)
            await producer.flush()
            if calling.failure is not None:
                raise calling.failure
            await self._move_cursor(reader, producer, now=True)
        finally:
            calling.stop()
            self._calling = None

    async def _fill(self, calling: Calling, executor: Executor, producer: Producer) -> bool:
        """Call the function for the next messages. Meanwhile, send the ready outputs at intervals. Return whether there
        may be more outputs."""
        loop = asyncio.get_running_loop()
        filling = loop.run_in_executor(executor, calling.fill)
        try:
            while not (await asyncio.wait({filling}, timeout=SEND_SECONDS))[0]:
                await self._send(calling.ready(), producer)
                if self._cursor is not None and loop.time() >= self._look_at:
                    calling.hurry()
        finally:
            filling.cancel()
        return filling.result()

    async def _send(self, frame: OutputBatch | None, producer: Producer) -> None:
        if frame is not None:
            payloads, sequence_ids, keys, times, properties = frame
            self.counts["outputs"] += len(sequence_ids)
            again = int((sequence_ids <= producer.persisted_sequence_id).sum())
            self.counts["outputs_again"] += again
            self._activity.duplicates += again
            await producer.send_batch(payloads, sequence_ids, keys=keys, event_times_ms=times, properties=properties)

    async def _next_batches(self, reader: Reader, producer: Producer, wait_seconds: float | None) -> list[StoredBatch]:
        """Return the batches that have arrived, and wait for the first of them. Return no batches at the end.

        Raises an error of the producer as soon as the producer fails; otherwise the error would be noticed only with
        the next message. Raises UNREACHABLE if no message arrives for `wait_seconds`.
        """
        if self._stopped.is_set():
            return []
        if not (reader.has_in_hand() or reader.take_record()):
            fetching = asyncio.ensure_future(reader.fetch())
            stopped = asyncio.ensure_future(self._stopped.wait())
            first = asyncio.FIRST_COMPLETED
            try:
                done, _ = await asyncio.wait({fetching, stopped}, timeout=IDLE_SECONDS, return_when=first)
                if not done:
                    await producer.flush()
                    await self._move_cursor(reader, producer, now=True)
                    done, _ = await asyncio.wait({fetching, stopped}, timeout=wait_seconds, return_when=first)
                    if not done:
                        what = f"{self.source} has not been read for {wait_seconds} seconds"
                        raise error("UNREACHABLE", what)
                if self._stopped.is_set() or not fetching.result():
                    return []
            finally:
                fetching.cancel()
                stopped.cancel()
                await asyncio.gather(fetching, stopped, return_exceptions=True)
        batches: list[StoredBatch] = []
        rows = 0
        while rows < GATHERED_ROWS and (reader.has_in_hand() or reader.take_record()):
            stored = reader.rest_in_hand()
            if stored is None:
                break
            batches.append(stored)
            rows += len(stored)
        return batches

    async def _move_cursor(self, reader: Reader, producer: Producer, *, now: bool) -> None:
        """Move the cursor to the position up to which all outputs are durable, if the interval has passed. With `now`,
        move the cursor at once, because all outputs sent are durable."""
        if self._cursor is None or not (now or asyncio.get_running_loop().time() >= self._look_at):
            return
        if self._next is None or now:
            self._set_next(reader, producer)
        if self._next is None or producer.durable_sequence_id < self._next_id:
            return
        if self._next != self._cursor.kept:
            await self._cursor.move(self._next)
        self._look_at = asyncio.get_running_loop().time() + CURSOR_SECONDS
        self._next = None

    def _sent_up_to(self, reader: Reader) -> Position | None:
        """Return the position of the last message whose outputs have all been sent; None if there is no such
        message."""
        position, calling = reader.position, self._calling
        if calling is not None and not calling.is_done:
            position = None if calling.last is None else calling.last.position
        return position

    def _note_progress(self, reader: Reader) -> None:
        position = self._sent_up_to(reader)
        if position is not None and self.position is not None and position.index > self.position.index:
            self._activity.done(position.index - self.position.index)
            self.position = position

    def _set_next(self, reader: Reader, producer: Producer) -> None:
        position = self._sent_up_to(reader)
        if position is not None and position.message_id is not None:
            self._next_id = max(producer.last_sequence_id, producer.persisted_sequence_id)
            self._next = Kept(position, note_of(producer.persisted, self._next_id))


# -- All sources, and the processes that stand by.

STANDBY_FIRST_SECONDS = 5.0
STANDBY_LONGEST_SECONDS = 300.0
"""A fenced pipe takes over if no new output has been published under its name for this time. If the pipe is fenced
again before it has published any output, the time doubles."""

_LOOK_SECONDS = 1.0
_FIRST_DELAY_SECONDS = 0.1
_LONGEST_DELAY_SECONDS = 5.0
_LARGEST_NUMBER = 10**19 - 1
"""A stand-in for an unknown incarnation. No name is longer than a name with this number."""


class Pipe:
    """A Python function between two topics: `await Pipe(client, "orders", "invoices", function, name="billing").run()`.

    The pipe calls the function for each message of the source, in order, in a separate thread, one call at a time. The
    function returns bytes (a payload, which keeps the key), an `Output`, several of these, or None. The target contains
    each output of a message exactly once and in order, after any kill. This requires that the function returns the same
    number of outputs, in the same order, when it is called again for a message. For a partitioned target the keys must
    be the same, too. All other effects of the function happen at least once.

    The pipe's name is its identity. The name must be the same at every start, and no other pipe into the same target
    may use it. The target is the only state. Outputs have the producer name `NAME/SOURCE/INCARNATION`, where SOURCE is
    the full name of the topic or partition. The sequence ID of an output is the message's index << 10 | the output's
    number. Each partition of a partitioned source is read separately, with a separate producer name.

    `cursor` is an optional function that makes a cursor for the full name of the source or of each of its partitions.
    With a cursor, the pipe need not read messages without outputs again after a restart. The pipe uses the cursor only
    while the target still contains all outputs that the target contained when the cursor was moved.

    Raises INVALID_TOPIC_NAME, INVALID_NAME, INVALID_REQUEST for invalid names.
    """

    def __init__(
        self,
        client: Client,
        source: str,
        target: str,
        function: Function,
        *,
        name: str,
        cursor: Callable[[str], Cursor] | None = None,
    ) -> None:
        self.source, self.target = topic_name(source), topic_name(target)
        self.name = name
        self.activity = Activity("pipe", name)
        """The counts and state, for `seqdedupe.services.metrics`."""
        _check_names(name, self.source)
        if self.source == self.target:
            raise error("INVALID_REQUEST", f"a pipe from {self.source} to itself would never end")
        self._client = client
        self._function = function
        self._cursor = cursor
        self._lanes: list[Lane] = []
        self._tasks: list[asyncio.Task[Any]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_stopped = False

    @property
    def counts(self) -> dict[str, int]:
        """The counts of the last run: messages read (`inputs`), outputs sent (`outputs`), and outputs sent although the
        target was known to contain them (`outputs_again`). To find the position to continue from, the pipe sends the
        outputs of the last message again."""
        counted = ("inputs", "outputs", "outputs_again")
        return {what: sum(lane.counts[what] for lane in self._lanes) for what in counted}

    def look_at_lag(self) -> Lag | None:
        """Return the number of messages of the source whose outputs are not sent yet. Return None if the number is not
        known, or another pipe works. The call asks the sidecar and blocks: make it from a separate thread. Raises
        SeqdedupeError, TimeoutError."""
        positions = {lane.source: lane.position for lane in list(self._lanes) if lane.position is not None}
        return None if self._loop is None else answer_of(lag_of_all(self._client, positions), self._loop)

    async def run(self, *, follow: bool = False, executor: Executor | None = None) -> None:
        """Process the messages that the source contains now. When this returns, all outputs are durable. With `follow`,
        process messages without end.

        If two pipes have the same name, the pipe that was started later works. The other pipe raises FencedError. With
        `follow` it stands by instead, and takes over when the working pipe has published no output for some seconds. So
        while there is nothing to do, the two pipes may take turns.

        Raises:

        - INVALID_OPTION, at the start, for a target of deduplication IDs.
        - FUNCTION_FAILED, which identifies the message, if the function raises or returns something that cannot be
          published.
        - MESSAGE_TOO_LARGE if the function returns the message itself, and the copy is too large with the properties
          that the pipe adds. After this error and FUNCTION_FAILED, the outputs of earlier messages are durable.
        - PositionError (POSITION_TRIMMED, POSITION_AFTER_END, POSITION_DIVERGED) if messages were trimmed before the
          pipe read them, if messages that the pipe has read no longer exist, or if the source was deleted and recreated
          meanwhile.
        - NotFoundError, DataLossError if the target was deleted and recreated. If the pipe is started again, it
          continues with the present topics. It reads a new source from the beginning. Into a new target it copies
          everything that the source still contains.
        - NOT_A_SIDECAR if another server answers at the start.
        - Without `follow`: UnavailableError if the sidecar does not answer or accepts nothing for a long time.

        Outputs are sent as soon as there are enough for a frame, and after a second at the latest. `stop` ends the run.

        After a cancellation, outputs that were sent may or may not be in the target; a later run finds out. `executor`
        calls the function; by default it is a thread of this run.
        """
        self._loop, self._lanes = asyncio.get_running_loop(), []
        with self.activity.life():
            await self._run(follow=follow, executor=executor)

    async def _run(self, *, follow: bool, executor: Executor | None) -> None:
        own = ThreadPoolExecutor(1, "seqdedupe-pipe") if executor is None else None
        try:
            [sources] = await self._all([asyncio.create_task(self._sources(follow=follow))]) or [[]]
            cursors = [None if self._cursor is None else self._cursor(source) for source in sources]
            self._lanes = [
                Lane(self._client, source, self.target, self._function, self.name, cursor, self.activity)
                for source, cursor in zip(sources, cursors, strict=True)
            ]
            work = self._follow if follow else self._run_once
            await self._all([asyncio.create_task(work(lane, executor or own)) for lane in self._lanes])  # type: ignore[arg-type]
        finally:
            if own is not None:
                own.shutdown(wait=False, cancel_futures=True)

    def stop(self) -> None:
        """End `run` permanently after the current message. All outputs so far are durable when `run` returns. May be
        called from any thread, and from a signal handler."""
        self._is_stopped = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        at_work = {task for lane, task in zip(self._lanes, self._tasks, strict=False) if lane.stop()}
        for task in set(self._tasks) - at_work:
            task.cancel()

    async def _all(self, tasks: list[asyncio.Task[T]]) -> list[T]:
        """Return the results of all tasks; nothing if the pipe was stopped. When this function ends, for any reason, it
        also ends the tasks."""
        self._tasks = list(tasks)
        if self._is_stopped:
            self._end()
        try:
            return await asyncio.gather(*tasks)
        except asyncio.CancelledError:
            me = asyncio.current_task()
            if not self._is_stopped or (me is not None and me.cancelling()):
                raise
            for ended in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(ended, Exception):
                    raise ended from None
            return []
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _sources(self, *, follow: bool) -> list[str]:
        """Check the target, and return the source; for a partitioned source, return the source's partitions."""
        backoff = Backoff(_FIRST_DELAY_SECONDS, _LONGEST_DELAY_SECONDS)
        while True:
            try:
                await check_target(self._client, self.target, "a pipe")
                await self._client.ends(self.source)
            except InvalidRequestError as e:
                if e.reason != "TOPIC_IS_PARTITIONED":
                    raise
                return [partition_name(self.source, k) for k in range(int(e.numbers["partitions"]))]
            except UnavailableError as e:
                if not follow or e.reason == NOT_A_SIDECAR:
                    raise
                self.activity.waits(e)
                await _wait(backoff, self.source, e)
            else:
                return [self.source]

    async def _run_once(self, lane: Lane, executor: Executor) -> None:
        await lane.run(executor, follow=False)

    async def _follow(self, lane: Lane, executor: Executor) -> None:
        """Run the lane until it fails permanently. Wait until temporary failures are over, and stand by while another
        pipe with the same name works."""
        backoff = Backoff(_FIRST_DELAY_SECONDS, _LONGEST_DELAY_SECONDS)
        standby_seconds = STANDBY_FIRST_SECONDS
        while True:
            before = lane.counts["outputs"]
            try:
                await lane.run(executor, follow=True)
                return  # the lane was stopped
            except FencedError as e:
                if lane.counts["outputs"] > before:
                    standby_seconds = STANDBY_FIRST_SECONDS
                lane.position = None
                self.activity.failed(e)
                self.activity.stands_by()
                logger.info("the pipe %s stands by for %s: %s", self.name, lane.source, e)
                await self._stand_by(lane, standby_seconds)
                standby_seconds = min(2 * standby_seconds, STANDBY_LONGEST_SECONDS)
            except UnavailableError as e:
                if lane.counts["outputs"] > before:
                    backoff.reset()
                self.activity.waits(e)
                await _wait(backoff, lane.source, e)

    async def _stand_by(self, lane: Lane, seconds: float) -> None:
        """Wait until no new output has been published under the lane's name for this time."""
        stillness = Stillness(seconds)
        while True:
            if stillness.has_lasted(await self._last_sequence_id(lane)):
                return
            await asyncio.sleep(min(_LOOK_SECONDS, seconds))

    async def _last_sequence_id(self, lane: Lane) -> int | None:
        """Return the last sequence ID that the target contains; None if the ID cannot be determined. Without the ID,
        only the time decides whether the standby pipe takes over."""
        try:
            return (await self._client.admin.producer(lane.target, lane.producer_name)).persisted
        except SeqdedupeError:
            return None


def _check_names(name: str, source: str) -> None:
    longest = source_name(name, f"{source}-partition-{MAX_PARTITIONS - 1}", _LARGEST_NUMBER)
    if not name or len(longest.encode(errors="replace")) > MAX_NAME_BYTES:
        raise error(
            "INVALID_NAME",
            f"the pipe {name[:80]!r} from {source} cannot name its outputs: its name is missing or too long",
            hint=f"Its name and the source's have {MAX_NAME_BYTES - len(longest) + len(name) + len(source)} bytes.",
        )
    try:
        new_producer_name(longest)
    except InvalidRequestError as e:
        what = f"the pipe {name[:80]!r} cannot name its outputs: {e.message}"
        raise error("INVALID_NAME", what, hint="Give the pipe a name of UTF-8 text without control characters.") from e


async def _wait(backoff: Backoff, source: str, why: UnavailableError) -> None:
    logger.warning("the pipe waits to go on with %s: %s %s", source, why, why.hint)
    await asyncio.sleep(max(backoff.next_seconds(), why.retry_delay_ms / 1000))


# -- For threads: the function is called in the thread that waits.


class CallerThread(Executor):
    """Executes calls that coroutines on the client's event loop submit. The calls run in the thread that waits in
    `run`."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> "Future[T]":
        future: Future[T] = Future()

        def work() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(fn(*args, **kwargs))
                except Exception as e:  # noqa: BLE001 (the future's waiter gets it)
                    future.set_exception(e)

        self._work.put(work)
        return future

    def run(self, begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Start the coroutine on the client's event loop, and wait for its end while executing submitted calls. If the
        wait is interrupted, the coroutine is cancelled, and has ended when `run` raises."""

        async def all_of_it() -> T:
            try:
                return await begin()
            finally:
                self._work.put(None)

        running = asyncio.run_coroutine_threadsafe(all_of_it(), event_loop())
        try:
            while (work := self._work.get()) is not None:
                work()
        except BaseException:
            running.cancel()
            while self._work.get() is not None:
                pass
            raise
        return running.result()


class BlockingPipe:
    """A `Pipe` with a client of `seqdedupe.client.blocking`. Its `run` blocks, and calls the function in the caller's
    thread."""

    def __init__(
        self,
        client: BlockingClient,
        source: str,
        target: str,
        function: Function,
        *,
        name: str,
        cursor: Callable[[str], AnyCursor] | None = None,
    ) -> None:
        of = None if cursor is None else lambda topic: on_loop(cursor(topic))
        self._pipe = Pipe(client.on_loop, source, target, function, name=name, cursor=of)

    @property
    def activity(self) -> Activity:
        """See `Pipe.activity`."""
        return self._pipe.activity

    def look_at_lag(self) -> Lag | None:
        """See `Pipe.look_at_lag`."""
        return self._pipe.look_at_lag()

    @property
    def counts(self) -> dict[str, int]:
        """See `Pipe.counts`."""
        return self._pipe.counts

    def stop(self) -> None:
        """See `Pipe.stop`."""
        self._pipe.stop()

    def run(self, *, follow: bool = False) -> None:
        """See `Pipe.run`. An exception from a signal handler, such as Ctrl-C's, ends the run."""
        caller = CallerThread()
        caller.run(lambda: self._pipe.run(follow=follow, executor=caller))
