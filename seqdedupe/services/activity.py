"""What a service has done and how far behind it is, in plain numbers: the service writes them, metrics show them.

`Activity` is counted where the work is done. `lag_after` asks a sidecar how far a position is behind its topic's end.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import Enum
from typing import Any, NamedTuple, Protocol, TypeVar

from seqdedupe.client import Client, TopicEnds
from seqdedupe.errors import DamagedError, PositionError, SeqdedupeError
from seqdedupe.message_id import Position

T = TypeVar("T")

ANSWER_SECONDS = 20.0
"""A look at the lag ends without a result after so long."""

AT_ONCE = 16
"""So many topics are asked for at once."""

_OF_DATABASES = ("OUTPUT_UNAVAILABLE", "OUTBOX_UNAVAILABLE")
"""Of a look at the lag they say nothing: that asks the sidecar."""

UNTYPED = "OTHER"
"""The reason of a failure that is none of `seqdedupe.errors`."""


class State(Enum):
    """What a service does at the moment."""

    RUNNING = "running"
    """It works, or has done all there is."""
    WAITING = "waiting"
    """It cannot go on until something else answers: its reason says what."""
    STANDBY = "standby"
    """Another process works, and this one would take over."""
    STOPPED = "stopped"
    """It has not begun, or has ended: with a reason if it failed."""


class Lag(NamedTuple):
    """How far behind a service is."""

    messages: int
    """Not processed yet."""
    oldest_ms: int | None
    """When the oldest of them was published, in milliseconds since 1970; None if there is none, or it is not known."""

    @property
    def seconds(self) -> float | None:
        """The age of the oldest message that is not processed; 0 if there is none, None if it is not known."""
        if not self.messages:
            return 0.0
        return None if self.oldest_ms is None else max(0.0, time.time() - self.oldest_ms / 1000)


NO_LAG = Lag(0, None)


class Activity:
    """Counts from when it is made. One service writes, any thread reads: each number is right by itself."""

    def __init__(self, kind: str, name: str) -> None:
        self.kind = kind
        self.name = name
        self.messages = 0
        """Processed for good."""
        self.duplicates = 0
        """Found to be processed already, and skipped."""
        self.set_aside = 0
        """Put aside for people, or to be tried again."""
        self.failures: Counter[str] = Counter()
        """By reason. What is tried again counts each time."""
        self.last_success_seconds: float | None = None
        """When something was processed last, in seconds since 1970."""
        self.state = State.STOPPED
        self.reason = ""
        """Of the state, if that has one."""
        self.lag: Lag | None = None
        """As it was looked at last; None if it is not known, or another process works."""

    def done(self, messages: int, *, duplicates: int = 0, set_aside: int = 0) -> None:
        """So many have been processed, or dealt with otherwise."""
        self.messages += messages
        self.duplicates += duplicates
        self.set_aside += set_aside
        self.last_success_seconds = time.time()
        self.runs()

    def failed(self, failure: BaseException) -> str:
        """Counts it; its reason."""
        reason = failure.reason if isinstance(failure, SeqdedupeError) else UNTYPED
        self.failures[reason] += 1
        return reason

    def runs(self) -> None:
        """Nothing is waited for."""
        self.state, self.reason = State.RUNNING, ""

    def waits(self, failure: SeqdedupeError) -> None:
        """Until what has failed works again."""
        self.state, self.reason = State.WAITING, self.failed(failure)

    def stands_by(self) -> None:
        """Another process works."""
        self.state, self.reason, self.lag = State.STANDBY, "", None

    @property
    def is_at_work(self) -> bool:
        """Whether it is this process that works, if it can."""
        return self.state in (State.RUNNING, State.WAITING)

    def see(self, lag: Lag | None) -> None:
        """The lag as it was found now; None if it is not known where the service stands."""
        if lag is None and self.state is State.WAITING:
            return  # what it was when the wait began says more
        if lag is not None and not lag.messages and self.state is State.WAITING and self.reason not in _OF_DATABASES:
            self.runs()  # nothing is left that could be waited for
        self.lag = lag if self.is_at_work else None

    @contextmanager
    def life(self) -> Iterator[None]:
        """Runs until the block ends. What it raises is why it has stopped. Within another such block it changes
        nothing."""
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
    """What metrics can be served of: a `Consumer`, a `Pipe`, a `Relay`."""

    @property
    def activity(self) -> Activity: ...

    def look_at_lag(self) -> Lag | None:
        """Finds out how far behind the service is; None if another process works. Blocks; from a thread of its own.

        Raises SeqdedupeError, TimeoutError if it cannot be found out now."""


def answer_of(call: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> T:
    """What the coroutine returns, run on another thread's event loop. Raises TimeoutError after ANSWER_SECONDS."""
    asked = asyncio.run_coroutine_threadsafe(call, loop)
    try:
        return asked.result(ANSWER_SECONDS)
    finally:
        asked.cancel()


# -- How far behind a position is.


async def lag_after(client: Client, topic: str, position: Position) -> Lag:
    """How many messages of the topic follow a position, and how old the first of them is: reads that one alone.

    A position of a topic that was deleted and made anew is before all that there is now. Raises what `Client.ends` and
    readers do; not for messages that are gone by retention, which do not count."""
    ends = await client.ends(topic)
    first_index = _first_after(position, ends)
    if first_index > ends.last.index:
        return NO_LAG
    return Lag(ends.last.index + 1 - first_index, await _publish_time_ms(client, topic, first_index))


def _first_after(position: Position, ends: TopicEnds) -> int:
    is_of_this = position.incarnation == ends.last.incarnation
    return max(position.index + 1 if is_of_this else 0, ends.first_index)


async def _publish_time_ms(client: Client, topic: str, index: int) -> int | None:
    # It may be gone by now, or damaged; and a reader would wait for a sidecar that has gone.
    with suppress(PositionError, DamagedError, TimeoutError):
        async with asyncio.timeout(ANSWER_SECONDS), client.reader(topic, index, stop_index=index + 1) as reader:
            async for message in reader:
                return message.publish_time_ms
    return None


async def lags_after(client: Client, positions: Mapping[str, Position]) -> dict[str, Lag]:
    """`lag_after` of several topics, by their positions."""
    lags: dict[str, Lag] = {}
    topics = list(positions)
    for first in range(0, len(topics), AT_ONCE):
        some = topics[first : first + AT_ONCE]
        found = await asyncio.gather(*(lag_after(client, topic, positions[topic]) for topic in some))
        lags |= zip(some, found, strict=True)
    return lags


async def lag_of_all(client: Client, positions: Mapping[str, Position]) -> Lag | None:
    """That of several topics together; None if there are none."""
    return total((await lags_after(client, positions)).values()) if positions else None


def total(lags: Collection[Lag]) -> Lag:
    """The sum of the messages, and the oldest."""
    oldest = [lag.oldest_ms for lag in lags if lag.oldest_ms is not None]
    return Lag(sum(lag.messages for lag in lags), min(oldest, default=None))
