"""An event loop that goes only as far as the test says: nothing happens by itself, and time stands still."""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple

from seqdedupe.errors import SeqdedupeError

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class StepLoop(asyncio.AbstractEventLoop):
    """The loop of one process. What asyncio runs on it waits until `run`, `run_job` or `advance` is called.

    `jobs` are calls handed to a thread: each is run when the test says so, in its thread if `with_threads`.
    `failures` are the exceptions with which tasks ended.
    """

    def __init__(self, *, with_threads: bool) -> None:
        self._with_threads = with_threads
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[asyncio.TimerHandle] = []
        self._now = 0.0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ended = False
        self.jobs: deque[tuple[Executor | None, Callable[[], Any], asyncio.Future[Any]]] = deque()
        self.failures: list[BaseException] = []

    # What the test commands.

    def run(self, steps: int | None = None) -> None:
        """Runs this many steps (None: until nothing is left to do but jobs and timers)."""
        while self._ready and steps != 0:
            handle = self._ready.popleft()
            if not handle.cancelled():
                handle._run()
            if steps is not None:
                steps -= 1

    def run_job(self, at: int = 0) -> None:
        """The oldest job is done, or another one, in its thread; anyone who waits for it will go on in the next
        step."""
        executor, work, future = self.jobs[at]
        del self.jobs[at]
        try:
            # What any thread may do can be done here.
            result = executor.submit(work).result() if self._with_threads and executor is not None else work()
        except SeqdedupeError as e:
            if not future.cancelled():
                future.set_exception(e)
        else:
            if not future.cancelled():
                future.set_result(result)

    def advance(self, seconds: float) -> None:
        """Time passes: timers that are due will run in the next step."""
        self._now += seconds
        while self._timers and self._timers[0].when() <= self._now:
            timer = heapq.heappop(self._timers)
            if not timer.cancelled():
                self._ready.append(timer)

    def end(self) -> None:
        """The process is gone: nothing of it runs any more."""
        self._ended = True
        for task in self._tasks:
            # Nobody is to learn that it was pending, and it is not cancelled: it just never goes on.
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        for task in self._tasks:
            task.get_coro().close()
        self._tasks.clear()
        self._ready.clear()
        self._timers.clear()
        self.jobs.clear()

    # What asyncio asks of a loop.

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        if not self._ended:
            self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, timer)
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass

    def time(self) -> float:
        return self._now

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, **options)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.failures.append(error)

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self.create_future()
        self.jobs.append((executor, lambda: func(*args), future))
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self._ended:
            self.failures.append(context.get("exception") or RuntimeError(context["message"]))

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return not self._ended

    def is_closed(self) -> bool:
        return self._ended
