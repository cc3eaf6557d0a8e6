"""The durable subscriptions of stock consumers: the subscribed consumers, the active consumer that receives messages,
and the acknowledged messages.

A subscription's position is the cursor with the subscription's name. Nothing else is stored: when a consumer ends, the
next consumer begins at the cursor.
"""

import asyncio
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import Protocol

from seqdedupe.errors import error
from seqdedupe.limits import MAX_INDEX

MAX_RANGES = 1_000
"""The maximum number of acknowledged ranges after unacknowledged messages. Above this number, the ranges farthest from
the cursor are forgotten first. The messages of a forgotten range are sent again when the cursor reaches the range,
which does no harm."""


class Acknowledged:
    """The indexes that a consumer has acknowledged: all indexes below `next_index`, and separate ranges above it."""

    def __init__(self, next_index: int) -> None:
        self.next_index = next_index
        """The first index that is not acknowledged. The cursor is before this index."""
        self._begins: list[int] = []
        self._ends: list[int] = []
        """The ranges in order. They do not touch each other, nor `next_index`."""
        self._forgotten = MAX_INDEX + 1
        """The first index that was forgotten."""

    def add(self, first: int, stop: int) -> None:
        """Acknowledge the indexes from `first` to before `stop`."""
        first = max(first, self.next_index)
        if first >= stop:
            return
        low = bisect_left(self._ends, first)
        high = bisect_right(self._begins, stop)
        if low < high:
            first, stop = min(first, self._begins[low]), max(stop, self._ends[high - 1])
        self._begins[low:high], self._ends[low:high] = [first], [stop]
        if self._begins[0] <= self.next_index:
            self.next_index = self._ends[0]
            del self._begins[0], self._ends[0]
        elif len(self._begins) > MAX_RANGES:
            self._forgotten = min(self._forgotten, self._begins[-1])
            del self._begins[-1], self._ends[-1]

    def add_all_below(self, stop: int) -> None:
        """Acknowledge all indexes below `stop`."""
        self.add(self.next_index, stop)

    def has_reached_forgotten(self) -> bool:
        """Return whether the messages from `next_index` on must be sent again, because some were forgotten. After that,
        no message counts as forgotten."""
        has_reached = self.next_index >= self._forgotten
        if has_reached:
            self._forgotten = MAX_INDEX + 1
        return has_reached

    def first_open(self, index: int) -> int:
        """Return the first index at or after this one that is not acknowledged."""
        index = max(index, self.next_index)
        place = bisect_right(self._begins, index) - 1
        return self._ends[place] if place >= 0 and index < self._ends[place] else index

    def open_until(self, index: int) -> int:
        """Return the first acknowledged index after `index`, which must not be acknowledged. If there is none, return a
        number above all indexes."""
        place = bisect_right(self._begins, index)
        return self._begins[place] if place < len(self._begins) else MAX_INDEX + 1


class Subscriber(Protocol):
    """A consumer, as a subscription knows it."""

    subscription_key: tuple[str, str]
    """The topic and the name."""
    is_failover: bool
    priority_level: int
    is_leaving: bool
    gone: asyncio.Event
    """An event that is set when the consumer has moved the cursor for the last time, and has left the subscription."""

    def activate(self) -> None:
        """Begin to receive."""

    def abort(self) -> None:
        """End its connection at once."""

    async def is_alive(self) -> bool:
        """Ask its client whether it is there."""


@dataclass(slots=True)
class _Subscription:
    active: Subscriber
    subscribers: list[Subscriber]
    """In the order of their arrival."""


class Subscriptions:
    """The durable subscriptions with consumers."""

    def __init__(self) -> None:
        self._all: dict[tuple[str, str], _Subscription] = {}

    async def join(self, new: Subscriber) -> None:
        """Add a consumer, and activate the consumer if no other consumer is active.

        If another consumer is leaving, wait for it. If another consumer's client no longer answers, end that consumer:
        it may be an earlier connection of the same client. Raises CONSUMER_BUSY if another consumer excludes this
        consumer.
        """
        key = topic, name = new.subscription_key
        while (found := self._all.get(key)) is not None:
            active = found.active
            if not active.is_leaving and not await active.is_alive():
                active.abort()
                await active.gone.wait()
            elif active.is_leaving:
                await active.gone.wait()
            elif new.is_failover and active.is_failover:
                found.subscribers.append(new)
                return
            elif found.active is active:
                raise error("CONSUMER_BUSY", f"the subscription {name!r} of {topic} has an exclusive consumer")
        self._all[key] = _Subscription(new, [new])
        new.activate()

    def is_alone(self, subscriber: Subscriber) -> bool:
        """Return whether the subscription has no other consumer."""
        return self._all[subscriber.subscription_key].subscribers == [subscriber]

    def leave(self, subscriber: Subscriber) -> None:
        """Remove a consumer. If this consumer was active, the next consumer takes over: the consumer that came first
        among the consumers with the lowest priority level."""
        found = self._all.get(subscriber.subscription_key)
        if found is None or subscriber not in found.subscribers:
            return
        found.subscribers.remove(subscriber)
        if not found.subscribers:
            del self._all[subscriber.subscription_key]
        elif found.active is subscriber:
            staying = [one for one in found.subscribers if not one.is_leaving] or found.subscribers
            found.active = min(staying, key=lambda one: one.priority_level)
            found.active.activate()
