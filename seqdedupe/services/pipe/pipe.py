"""The pipe: all partitions of a source, each on its way to the target, and who stands by."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, TypeVar

from seqdedupe.client import Client
from seqdedupe.client.connection import NOT_A_SIDECAR, Backoff
from seqdedupe.client.cursor import Cursor
from seqdedupe.errors import FencedError, InvalidRequestError, SeqdedupeError, UnavailableError, error
from seqdedupe.limits import MAX_NAME_BYTES, MAX_PARTITIONS
from seqdedupe.names import new_producer_name, partition_name, source_name, topic_name
from seqdedupe.services.pipe.lane import Lane
from seqdedupe.services.pipe.outputs import Function
from seqdedupe.services.stillness import Stillness

T = TypeVar("T")

logger = logging.getLogger("seqdedupe.pipe")

STANDBY_FIRST_SECONDS = 5.0
STANDBY_LONGEST_SECONDS = 300.0
"""A pipe that was fenced takes over when nothing new has come under its name for so long; twice as long each time that
it is fenced again before it has published anything."""

_LOOK_SECONDS = 1.0
_FIRST_DELAY_SECONDS = 0.1
_LONGEST_DELAY_SECONDS = 5.0
_LARGEST_NUMBER = 10**19 - 1
"""Stands for an incarnation that is not known yet: no name is longer."""


class Pipe:
    """A Python function between two topics: `await Pipe(client, "orders", "invoices", function, name="billing").run()`.

    The function gets each message of the source, in order, in a thread of the pipe's own, one call at a time, and gives
    bytes (a payload, which keeps the key), an `Output`, several of these, or None. Of each message's outputs the
    target holds each exactly once and in order, whatever is killed, as long as the function gives as many outputs, in
    the same order, when it is called again for the same message; where the target is partitioned, with the same keys.
    What else the function does is done at least once.

    The pipe's name stands for its identity: it must be the same whenever the pipe is started, and no other pipe's into
    that target. Its only state is the target: outputs have the producer name `NAME/SOURCE/INCARNATION`, SOURCE being
    the full name of the topic or partition, and as sequence ID the message's index << 10 | the output's number. Of a
    partitioned source each partition is read by itself, with a producer name of its own.

    `cursor` makes, for the full name of the source or of each of its partitions, the cursor that saves reading again
    what gives no outputs; it is never needed, nor believed further than the target holds what it held then.

    Raises INVALID_TOPIC_NAME, INVALID_NAME, INVALID_REQUEST for names that cannot be.
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
        """Of the last run: messages that were read (`inputs`), outputs that were sent (`outputs`), and those among them
        that the target was known to hold already (`outputs_again`): those of its last message, to find it."""
        counted = ("inputs", "outputs", "outputs_again")
        return {what: sum(lane.counts[what] for lane in self._lanes) for what in counted}

    async def run(self, *, follow: bool = False, executor: Executor | None = None) -> None:
        """Pipes what the source holds now: when this returns all outputs of it are durable. With `follow`, for ever.

        Of two pipes of one name the one that was started later works. The other one raises FencedError; with `follow`
        it stands by, and takes over when nothing has come from the other for some seconds (they may take turns then
        while there is nothing to do).

        Raises FUNCTION_FAILED, with the message, if the function raises or gives what cannot be published, and
        MESSAGE_TOO_LARGE for a message that is passed on and has no room for what the pipe adds: what came before is
        durable then. Raises PositionError if messages are gone that were not read, or were read and are
        gone (POSITION_TRIMMED, POSITION_AFTER_END, POSITION_DIVERGED), and if the source is deleted meanwhile and made
        anew; NotFoundError, DataLossError if the target is. A pipe that is started again then goes on with what is
        there: a new source from its beginning; into a new target, all that the source still holds.
        Raises NOT_A_SIDECAR if what answers at the start is something else. Without `follow` raises UnavailableError
        for a sidecar that does not answer, or takes nothing, for long.

        Outputs are sent as soon as there are enough, and after a second at the latest. `stop` ends it.

        If it is cancelled, outputs that were sent may be in the target or not; a later run finds that out.
        `executor` calls the function; left out, a thread of this run.
        """
        self._loop, self._lanes = asyncio.get_running_loop(), []
        own = ThreadPoolExecutor(1, "seqdedupe-pipe") if executor is None else None
        try:
            [sources] = await self._all([asyncio.create_task(self._sources(follow=follow))]) or [[]]
            cursors = [None if self._cursor is None else self._cursor(source) for source in sources]
            self._lanes = [
                Lane(self._client, source, self.target, self._function, self.name, cursor)
                for source, cursor in zip(sources, cursors, strict=True)
            ]
            work = self._follow if follow else self._run_once
            await self._all([asyncio.create_task(work(lane, executor or own)) for lane in self._lanes])  # type: ignore[arg-type]
        finally:
            if own is not None:
                own.shutdown(wait=False, cancel_futures=True)

    def stop(self) -> None:
        """Ends `run` after the message under way, for good: all outputs so far are durable when it returns. From any
        thread, and from a signal's handler."""
        self._is_stopped = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        at_work = {task for lane, task in zip(self._lanes, self._tasks, strict=False) if lane.stop()}
        for task in set(self._tasks) - at_work:
            task.cancel()

    async def _all(self, tasks: list[asyncio.Task[T]]) -> list[T]:
        """What all of them give; nothing if it was stopped. Whatever ends this ends them, too."""
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
        """The source, or its partitions."""
        backoff = Backoff(_FIRST_DELAY_SECONDS, _LONGEST_DELAY_SECONDS)
        while True:
            try:
                await self._client.ends(self.source)
            except InvalidRequestError as e:
                if e.reason != "TOPIC_IS_PARTITIONED":
                    raise
                return [partition_name(self.source, k) for k in range(int(e.numbers["partitions"]))]
            except UnavailableError as e:
                if not follow or e.reason == NOT_A_SIDECAR:
                    raise
                await _wait(backoff, self.source, e)
            else:
                return [self.source]

    async def _run_once(self, lane: Lane, executor: Executor) -> None:
        await lane.run(executor, follow=False)

    async def _follow(self, lane: Lane, executor: Executor) -> None:
        """Until it fails for good: waits out what passes, and stands by while another pipe of the name works."""
        backoff = Backoff(_FIRST_DELAY_SECONDS, _LONGEST_DELAY_SECONDS)
        standby_seconds = STANDBY_FIRST_SECONDS
        while True:
            before = lane.counts["outputs"]
            try:
                await lane.run(executor, follow=True)
                return  # it was stopped
            except FencedError as e:
                if lane.counts["outputs"] > before:
                    standby_seconds = STANDBY_FIRST_SECONDS
                logger.info("the pipe %s stands by for %s: %s", self.name, lane.source, e)
                await self._stand_by(lane, standby_seconds)
                standby_seconds = min(2 * standby_seconds, STANDBY_LONGEST_SECONDS)
            except UnavailableError as e:
                if lane.counts["outputs"] > before:
                    backoff.reset()
                await _wait(backoff, lane.source, e)

    async def _stand_by(self, lane: Lane, seconds: float) -> None:
        """Until nothing new has come under the name for so long."""
        stillness = Stillness(seconds)
        while True:
            if stillness.has_lasted(await self._last_sequence_id(lane)):
                return
            await asyncio.sleep(min(_LOOK_SECONDS, seconds))

    async def _last_sequence_id(self, lane: Lane) -> int | None:
        """The last one that the target holds; None where that cannot be known: then time alone counts."""
        try:
            return (await self._client.admin.producer(lane.target, lane.producer_name)).persisted
        except SeqdedupeError:
            return None


def _check_names(name: str, source: str) -> None:
    longest = source_name(name, f"{source}-partition-{MAX_PARTITIONS - 1}", _LARGEST_NUMBER)
    if not name or len(longest.encode(errors="replace")) > MAX_NAME_BYTES:
        raise error(
            "INVALID_NAME",
            f"the pipe {name[:80]!r} from {source} cannot name its outputs: it has no name, or one too long",
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
