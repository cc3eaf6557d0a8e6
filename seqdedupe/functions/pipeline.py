"""From inputs to acknowledgements: a thread publishes outputs, and acknowledges each input once they are settled."""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Protocol

from seqdedupe.client.sidecars import Sidecars
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.functions.backlog import Row
from seqdedupe.functions.identity import Identity
from seqdedupe.functions.outputs import Callback, Output
from seqdedupe.functions.process import ending, traceback_of
from seqdedupe.functions.publisher import Publisher
from seqdedupe.functions.settings import Settings

logger = logging.getLogger("seqdedupe.functions")

LOOK_SECONDS = 0.1
"""Whoever waits looks so often whether the process is to stop."""
REPORT_SECONDS = 1.0
INPUT_BYTES = 512
"""What an input takes beside its outputs."""

Report = Callable[[dict[str, int], int], None]
"""Told what outputs came to, as `Pipeline.counts` does, and how many inputs are not acknowledged."""


class Process(Protocol):
    """The process that the function runs in."""

    @property
    def is_stopping(self) -> bool:
        """Whether it was told to end."""

    def end(self, why: str, *, failed: bool) -> None:
        """Ends it at once: what is not acknowledged comes again, in order. In a test it may return."""


class Input:
    """An input that is not acknowledged. `acknowledge` is called once, from the pipeline's thread."""

    __slots__ = ("acknowledge", "lane", "left", "since_seconds", "size_bytes")

    def __init__(self, lane: str, acknowledge: Callable[[], None]) -> None:
        self.lane = lane
        """Its topic or partition: one is acknowledged in order."""
        self.acknowledge = acknowledge
        self.left = 0
        """Outputs that are not settled."""
        self.size_bytes = INPUT_BYTES
        self.since_seconds = 0.0


class Pipeline:
    """What a function's inputs have under way. `add`, `settle` and `persisted` belong to the thread of `process`."""

    def __init__(self, settings: Settings, sidecars: Sidecars, process: Process, report: Report) -> None:
        """`report` is called again and again in the pipeline's thread, whatever waits."""
        self._settings = settings
        self._process = process
        self._report = report
        self._sidecars = sidecars
        self._loop = asyncio.new_event_loop()
        self._publishers: dict[str, Publisher] = {}
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

    def add(self, one: Input, identity: Identity, outputs: Iterable[Output]) -> None:
        """Hands over an input with its outputs, in order. Waits while too much is under way."""
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
        """Returns when everything is acknowledged."""
        self._wait_until(lambda: not self._inputs)

    def persisted(self, topic: str, name: str) -> int:
        """The highest sequence ID that a topic holds under a name; -1 if there is none."""

        async def ask() -> int:
            return await self._publisher(topic).persisted(name)

        asked = asyncio.run_coroutine_threadsafe(ask(), self._loop)
        asked.add_done_callback(lambda _: self._notify())
        self._wait_until(asked.done)
        return asked.result()

    def _wait_until(self, is_so: Callable[[], bool]) -> None:
        """Waits for inputs that are under way already, or for a question. Does not rest on the pipeline's thread alone:
        a callback of the function's may keep that."""
        began = time.monotonic()
        with self._room:
            while not is_so():
                self._room.wait(LOOK_SECONDS)
                if self._process.is_stopping:
                    self._process.end("the instance was told to stop", failed=False)
                if self._is_too_late(began):
                    self._give_up()

    def _is_too_late(self, since_seconds: float) -> bool:
        return time.monotonic() - since_seconds > self._settings.give_up_after_seconds

    def close(self) -> None:
        """Ends what it does; its thread stays, idle. What is under way is not acknowledged, published or not."""

        async def cancel() -> None:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(cancel(), self._loop).result()

    @property
    def in_flight(self) -> int:
        """Inputs that are not acknowledged."""
        return self._inputs

    def counts(self) -> dict[str, int]:
        """How many outputs were new, duplicates, of unknown outcome, and how often publishing began again."""
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
        except BaseException as e:  # noqa: BLE001 (an instance without this thread would wait for ever)
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
            # Pulsar's runtime closes its consumers first: nothing can be acknowledged any more.
            self._process.end("the instance was told to stop", failed=False)
        if not isinstance(e, SeqdedupeError):
            logger.error("a defect in the wrapper", exc_info=e)
        self._process.end(ending(e), failed=True)

    def _publisher(self, topic: str) -> Publisher:
        found = self._publishers.get(topic)
        if found is None:
            found = self._publishers[topic] = Publisher(self._sidecars, topic, self._has_begun)
            self._start(found.run())
        return found

    def _take(self) -> None:
        # First: what is handed over from now on wakes this again, or is found below.
        self._is_woken = False
        try:
            while self._handed_over:
                one, rows = self._handed_over.popleft()
                self._lanes.setdefault(one.lane, deque()).append(one)
                for topic, of_topic in rows.items():
                    self._publisher(topic).add(of_topic)
                self._acknowledge_soon(one)
        except Exception as e:  # noqa: BLE001 (whatever it is: nothing may wait for ever)
            self._end_because(e)

    def _settler(self, one: Input, output: Output) -> Callable[[], None]:
        """What is called when the output is settled."""

        def settled() -> None:
            one.left -= 1
            if output.callback is not None:
                _call_back(output.callback, output.topic)
            self._acknowledge_soon(one)

        return settled

    def _acknowledge_soon(self, one: Input) -> None:
        """An input may have settled. All that settle at the same time are acknowledged together."""
        if not one.left and not self._is_acknowledging:
            self._is_acknowledging = True
            self._loop.call_soon(self._acknowledge)

    def _acknowledge(self) -> None:
        """Acknowledges, in each lane, the oldest inputs that have all settled."""
        self._is_acknowledging = False
        count = size = 0
        try:
            for inputs in self._lanes.values():
                while inputs and not inputs[0].left:
                    done = inputs.popleft()
                    done.acknowledge()
                    count += 1
                    size += done.size_bytes
        except Exception as e:  # noqa: BLE001 (whatever it is: nothing may wait for ever)
            self._end_because(e)
        with self._room:
            self._inputs -= count
            self._bytes -= size
            self._room.notify_all()

    def _notify(self) -> None:
        with self._room:
            self._room.notify_all()

    async def _watch(self) -> None:
        """Reports, and ends the process when an input has waited for too long."""
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            self._report(self.counts(), self._inputs)
            oldest = min((inputs[0].since_seconds for inputs in self._lanes.values() if inputs), default=None)
            if oldest is not None and self._is_too_late(oldest):
                self._give_up()

    def _give_up(self) -> None:
        waiting = [one for one in list(self._publishers.values()) if one.backlog.has_work]
        trouble = next((one.trouble for one in waiting if one.trouble is not None), None)
        why = trouble or error("OUTCOME_UNKNOWN", "no output has been settled")
        self._process.end(
            f"an input has waited for {self._settings.give_up_after_seconds} seconds: {why} {why.hint}", failed=True
        )


def _call_back(callback: Callback, topic: str) -> None:
    import pulsar

    try:
        callback(pulsar.Result.Ok, None)
    except BaseException as e:  # noqa: BLE001 (`sys.exit` too: it would end this thread)
        logger.error("the callback of an output for %s has failed\n%s", topic, traceback_of(e))
