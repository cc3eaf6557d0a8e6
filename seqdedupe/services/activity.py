"""What a service has done and how far behind it is, in plain numbers: the service writes them, metrics show them.

The service counts in `Activity` while it works. `lag_after` asks a sidecar how far a position is behind its topic's
end.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import Enum
from typing import Any, NamedTuple, Protocol, TypeVar

from seqdedupe.client import Client
from seqdedupe.errors import DamagedError, PositionError, SeqdedupeError
from seqdedupe.figures import first_unread
from seqdedupe.message_id import Position

T = TypeVar("T")

ANSWER_SECONDS = 20.0
"""The time limit of a look at the lag. After it, the look ends without a result."""

AT_ONCE = 16
"""The number of topics that are asked for at the same time."""

_OF_DATABASES = ("OUTPUT_UNAVAILABLE", "OUTBOX_UNAVAILABLE")
"""Failures of a database. A look at the lag proves nothing about them, because it asks only the sidecar."""

UNTYPED = "OTHER"
"""The reason of a failure that is none of `seqdedupe.errors`."""


class State(Enum):
    """The present action of a service."""

    RUNNING = "running"
    """It works, or has done all the work there is."""
    WAITING = "waiting"
    """It cannot continue until something else answers. Its reason names that."""
    STANDBY = "standby"
    """Another process works. This process takes over if the other one ends."""
    STOPPED = "stopped"
    """It has not begun, or has ended. It has a reason if it failed."""


class Lag(NamedTuple):
    """How far behind a service is."""

    messages: int
    """The number of messages that are not processed yet."""
    oldest_ms: int | None
    """The publish time of the oldest of them, in milliseconds since 1970. None if there is none, or it is not known."""

    @property
    def seconds(self) -> float | None:
        """The age of the oldest message that is not processed; 0 if there is none, None if it is not known."""
        if not self.messages:
            return 0.0
        return None if self.oldest_ms is None else max(0.0, time.time() - self.oldest_ms / 1000)


NO_LAG = Lag(0, None)


class Activity:
    """Counts since the object was made. One service writes and any thread reads. Each number is correct on its own."""

    def __init__(self, kind: str, name: str) -> None:
        self.kind = kind
        self.name = name
        self.messages = 0
        """The number of messages processed for good."""
        self.duplicates = 0
        """The number of messages that had been processed already, and were skipped."""
        self.set_aside = 0
        """The number of messages put aside for people, or for another attempt."""
        self.failures: Counter[str] = Counter()
        """The number of failures by reason. Each attempt counts."""
        self.last_success_seconds: float | None = None
        """The time when something was processed last, in seconds since 1970."""
        self.state = State.STOPPED
        self.reason = ""
        """The reason of the state, if it has one."""
        self.lag: Lag | None = None
        """The lag at the last look. None if it is not known, or another process works."""

    def done(self, messages: int, *, duplicates: int = 0, set_aside: int = 0) -> None:
        """Count this number of messages as processed, or as dealt with otherwise."""
        self.messages += messages
        self.duplicates += duplicates
        self.set_aside += set_aside
        self.last_success_seconds = time.time()
        self.runs()

    def failed(self, failure: BaseException) -> str:
        """Count the failure and return its reason."""
        reason = failure.reason if isinstance(failure, SeqdedupeError) else UNTYPED
        self.failures[reason] += 1
        return reason

    def runs(self) -> None:
        """Note that the service works and waits for nothing."""
        self.state, self.reason = State.RUNNING, ""

    def waits(self, failure: SeqdedupeError) -> None:
        """Note that the service waits until the failed part works again."""
        self.state, self.reason = State.WAITING, self.failed(failure)

    def stands_by(self) -> None:
        """Note that another process works."""
        self.state, self.reason, self.lag = State.STANDBY, "", None

    @property
    def is_at_work(self) -> bool:
        """Whether this process is the one that works, if it can."""
        return self.state in (State.RUNNING, State.WAITING)

    def see(self, lag: Lag | None) -> None:
        """Take the lag as it was found now. None if the position of the service is not known."""
        if lag is None and self.state is State.WAITING:
            return  # the lag at the start of the wait says more
        if lag is not None and not lag.messages and self.state is State.WAITING and self.reason not in _OF_DATABASES:
            self.runs()  # nothing is left to wait for
        self.lag = lag if self.is_at_work else None

    @contextmanager
    def life(self) -> Iterator[None]:
        """Run until the block ends. An exception of the block is the reason why the service has stopped. Within another
        such block this changes nothing."""
        if self.state is not State.STOPPED:
            yield
            return
        self.runs()
        reason = ""
        try:
            yield
        except Exception as e:
            reason = self.failed(e)
            raise
        finally:
            self.state, self.reason, self.lag = State.STOPPED, reason, None


class Service(Protocol):
    """A service whose metrics can be served: a `Consumer`, a `Pipe`, a `Relay`."""

    @property
    def activity(self) -> Activity: ...

    def look_at_lag(self) -> Lag | None:
        """Find out how far behind the service is. None if another process works. This blocks: call it from a separate
        thread.

        Raises SeqdedupeError, TimeoutError if the lag cannot be found out now.
        """


def answer_of(call: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> T:
    """Return the result of the coroutine, run on another thread's event loop. Raises TimeoutError after
    ANSWER_SECONDS."""
    asked = asyncio.run_coroutine_threadsafe(call, loop)
    try:
        return asked.result(ANSWER_SECONDS)
    finally:
        asked.cancel()


# -- How far behind a position is.


async def lag_after(client: Client, topic: str, position: Position) -> Lag:
    """Return the number of the topic's messages after a position, and the age of the first. Only that message is read.

    If a topic was deleted and created again, a position of the old topic is before all its messages. Raises the errors
    of `Client.ends` and of readers, but not for messages that retention has dropped. Those do not count.
    """
    ends = await client.ends(topic)
    first_index = first_unread(position, ends.last.incarnation, ends.first_index)
    if first_index > ends.last.index:
        return NO_LAG
    return Lag(ends.last.index + 1 - first_index, await _publish_time_ms(client, topic, first_index))


async def _publish_time_ms(client: Client, topic: str, index: int) -> int | None:
    # The message may be gone by now, or damaged; and a reader would wait for a sidecar that is not there any more.
    with suppress(PositionError, DamagedError, TimeoutError):
        async with asyncio.timeout(ANSWER_SECONDS), client.reader(topic, index, stop_index=index + 1) as reader:
            async for message in reader:
                return message.publish_time_ms
    return None


async def lags_after(client: Client, positions: Mapping[str, Position]) -> dict[str, Lag]:
    """Return the result of `lag_after` for several topics, by topic."""
    lags: dict[str, Lag] = {}
    topics = list(positions)
    for first in range(0, len(topics), AT_ONCE):
        some = topics[first : first + AT_ONCE]
        found = await asyncio.gather(*(lag_after(client, topic, positions[topic]) for topic in some))
        lags |= zip(some, found, strict=True)
    return lags


async def lag_of_all(client: Client, positions: Mapping[str, Position]) -> Lag | None:
    """Return the lag of several topics together; None if there are none."""
    return total((await lags_after(client, positions)).values()) if positions else None


def total(lags: Collection[Lag]) -> Lag:
    """Return the sum of the messages, and the oldest time."""
    oldest = [lag.oldest_ms for lag in lags if lag.oldest_ms is not None]
    return Lag(sum(lag.messages for lag in lags), min(oldest, default=None))
