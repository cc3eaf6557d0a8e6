"""The counts of a service, and its lag behind the topic, as plain numbers. The service writes these numbers, and the
metrics server shows them.

A service counts its work in `Activity`. `lag_after` asks a sidecar how many messages follow a position.
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
"""The time limit for measuring the lag. After this time, the measurement ends without a result."""

AT_ONCE = 16
"""The number of topics whose lag is measured at the same time."""

_OF_DATABASES = ("OUTPUT_UNAVAILABLE", "OUTBOX_UNAVAILABLE")
"""Failures of a database. Measuring the lag does not show whether such a failure is over, because it asks only the
sidecar."""

UNTYPED = "OTHER"
"""The reason of a failure that is not an error of `seqdedupe.errors`."""


class State(Enum):
    """The current state of a service."""

    RUNNING = "running"
    """The service works, or has done all available work."""
    WAITING = "waiting"
    """The service cannot continue until another system responds. The reason identifies that system."""
    STANDBY = "standby"
    """Another process does the work. This process takes over if the other process ends."""
    STOPPED = "stopped"
    """The service has not started, or has ended. If it failed, there is a reason."""


class Lag(NamedTuple):
    """The number and age of the messages that a service has not processed yet."""

    messages: int
    """The number of messages that are not processed yet."""
    oldest_ms: int | None
    """The publish time of the oldest unprocessed message, in milliseconds since 1970. None if there is no such message,
    or the time is not known."""

    @property
    def seconds(self) -> float | None:
        """The age of the oldest unprocessed message; 0 if there is no such message, None if the age is not known."""
        if not self.messages:
            return 0.0
        return None if self.oldest_ms is None else max(0.0, time.time() - self.oldest_ms / 1000)


NO_LAG = Lag(0, None)


class Activity:
    """Counts since this object was created. One service writes the counts, and any thread reads them. Each number is
    correct, but the numbers may come from different moments."""

    def __init__(self, kind: str, name: str) -> None:
        self.kind = kind
        self.name = name
        self.messages = 0
        """The number of messages that are processed completely."""
        self.duplicates = 0
        """The number of messages that were skipped because they had been processed before."""
        self.set_aside = 0
        """The number of messages set aside, to be examined by a person or tried again later."""
        self.failures: Counter[str] = Counter()
        """The number of failures by reason. Each failed attempt is counted."""
        self.last_success_seconds: float | None = None
        """The time when a message was last processed, in seconds since 1970."""
        self.state = State.STOPPED
        self.reason = ""
        """The reason for the state; empty if there is none."""
        self.lag: Lag | None = None
        """The lag when it was last measured. None if the lag is not known, or another process does the work."""

    def done(self, messages: int, *, duplicates: int = 0, set_aside: int = 0) -> None:
        """Count this number of messages as processed, as duplicates, or as set aside."""
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
        """Record that the service works, and does not wait for another system."""
        self.state, self.reason = State.RUNNING, ""

    def waits(self, failure: SeqdedupeError) -> None:
        """Record that the service waits until a failed system works again."""
        self.state, self.reason = State.WAITING, self.failed(failure)

    def stands_by(self) -> None:
        """Record that another process does the work."""
        self.state, self.reason, self.lag = State.STANDBY, "", None

    @property
    def is_at_work(self) -> bool:
        """Whether this process does the service's work, or waits for another system in order to do the work. A standby
        process is not at work."""
        return self.state in (State.RUNNING, State.WAITING)

    def see(self, lag: Lag | None) -> None:
        """Record the lag that was just measured. None means that the position of the service is not known."""
        if lag is None and self.state is State.WAITING:
            return  # the lag at the start of the wait contains more information
        if lag is not None and not lag.messages and self.state is State.WAITING and self.reason not in _OF_DATABASES:
            self.runs()  # there is nothing left to wait for
        self.lag = lag if self.is_at_work else None

    @contextmanager
    def life(self) -> Iterator[None]:
        """Mark the service as running until the block ends. If the block ends with an exception, that exception becomes
        the reason why the service has stopped. A nested block of this kind changes nothing."""
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
        """Measure the service's lag. Return None if another process does the work. The call blocks: make it from a
        separate thread.

        Raises SeqdedupeError or TimeoutError if the lag cannot be measured now.
        """


def answer_of(call: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> T:
    """Run the coroutine on another thread's event loop, and return the result. Raises TimeoutError after
    ANSWER_SECONDS."""
    asked = asyncio.run_coroutine_threadsafe(call, loop)
    try:
        return asked.result(ANSWER_SECONDS)
    finally:
        asked.cancel()


# -- How far behind a position is.


async def lag_after(client: Client, topic: str, position: Position) -> Lag:
    """Return the number of the topic's messages after a position, and the age of the first of them. Only that message
    is read.

    If the topic was deleted and recreated, all messages of the new topic are after a position of the old topic. Raises
    the errors of `Client.ends` and of readers. Messages that retention has removed cause no error and are not counted.
    """
    ends = await client.ends(topic)
    first_index = first_unread(position, ends.last.incarnation, ends.first_index)
    if first_index > ends.last.index:
        return NO_LAG
    return Lag(ends.last.index + 1 - first_index, await _publish_time_ms(client, topic, first_index))


async def _publish_time_ms(client: Client, topic: str, index: int) -> int | None:
    # The message may be removed or damaged by now. And a reader would wait without limit for a sidecar that is down.
    with suppress(PositionError, DamagedError, TimeoutError):
        async with asyncio.timeout(ANSWER_SECONDS), client.reader(topic, index, stop_index=index + 1) as reader:
            async for message in reader:
                return message.publish_time_ms
    return None


async def lags_after(client: Client, positions: Mapping[str, Position]) -> dict[str, Lag]:
    """Measure `lag_after` for several topics. Return the lags by topic."""
    lags: dict[str, Lag] = {}
    topics = list(positions)
    for first in range(0, len(topics), AT_ONCE):
        some = topics[first : first + AT_ONCE]
        found = await asyncio.gather(*(lag_after(client, topic, positions[topic]) for topic in some))
        lags |= zip(some, found, strict=True)
    return lags


async def lag_of_all(client: Client, positions: Mapping[str, Position]) -> Lag | None:
    """Return the total lag of several topics; None if there are no topics."""
    return total((await lags_after(client, positions)).values()) if positions else None


def total(lags: Collection[Lag]) -> Lag:
    """Return the sum of the messages, and the oldest time."""
    oldest = [lag.oldest_ms for lag in lags if lag.oldest_ms is not None]
    return Lag(sum(lag.messages for lag in lags), min(oldest, default=None))
