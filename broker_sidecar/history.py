"""What happened in the topics in the last minutes, interval by interval.

Topics count anyway; what they have counted is looked at once an interval. So a message costs nothing more, and a topic
in which nothing happens next to nothing.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from broker_sidecar import rpc
from seqdedupe.topic.base import Counters
from seqdedupe.topic.directory import Topics
from seqdedupe.v1 import admin_pb2

INTERVAL_SECONDS = 3.0

INTERVALS = 200
"""So many are kept: ten minutes."""

MAX_HISTORIES = 5_000
"""Topics in which something happened meanwhile; of more there are no histories. One takes 4 kB."""

TOPICS_AT_ONCE = 256
"""So many are looked at in one step of the event loop."""

SERIES = ("not_dup", "dup", "unknown", "refused", "stored_bytes")
"""Fields of `Activity`, and counters of a topic."""

NOT_DUP, DUP, UNKNOWN, REFUSED = range(4)
"""Places among them."""

_MOST = 2**32 - 1
_NOTHING = (0,) * len(SERIES)
_PLACES = INTERVALS + 1
"""One more than is shown: that of the interval that is being written."""

Counts = tuple[int, ...]
"""By series."""

_counted: Callable[[Counters], Counts] = attrgetter(*SERIES)


@dataclass(slots=True)
class Past:
    """What happened in a topic, or in all of them."""

    ring: npt.NDArray[np.uint32] = field(default_factory=lambda: np.zeros((len(SERIES), _PLACES), np.uint32))
    last: Counts = _NOTHING
    """In the last interval."""
    sums: Counts = _NOTHING
    """In all intervals that are kept."""
    quiet_intervals: int = 0
    """So many ago something happened last."""

    def add(self, place: int, counts: Counts) -> None:
        """An interval is over, which takes the place of the oldest."""
        gone = self.ring[:, place].tolist()
        self.last = tuple(min(count, _MOST) for count in counts)
        self.sums = tuple(s + n - g for s, n, g in zip(self.sums, self.last, gone, strict=True))
        self.ring[:, place] = self.last
        self.quiet_intervals = 0 if any(counts) else self.quiet_intervals + 1


class History:
    """The pasts of `topics` from `begin` on."""

    def __init__(self, topics: Topics[Any]) -> None:
        self._topics = topics
        self._ended = 0
        """So many intervals have."""
        self._all = Past()
        self._pasts: dict[str, Past] = {}
        self._before: dict[str, Counts] = {}
        """What was counted at the end of the last one."""
        self._told: deque[Counter[str]] = deque(maxlen=_PLACES)
        """What callers were told by the end of each interval, the oldest first."""
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Looks once an interval from now on, until the topics are drained."""
        if self._task is None and not self._topics.is_draining:
            self.look()
            self._task = self._topics.in_background(self._run())

    def look(self) -> None:
        """The first interval begins."""
        self._before = {topic.name: _counted(topic.counters) for topic in self._topics.registry.open_topics()}
        self._told.append(rpc.refusals.copy())

    async def _run(self) -> None:
        clock = asyncio.get_running_loop().time
        end = clock()
        while True:
            end = max(end + INTERVAL_SECONDS, clock())
            await asyncio.sleep(end - clock())
            await self.end_interval()

    async def end_interval(self) -> None:
        """An interval is over, and the next one begins."""
        place = self._ended % _PLACES
        total = _NOTHING
        seen: dict[str, Counts] = {}
        for k, topic in enumerate(self._topics.registry.open_topics()):
            if k % TOPICS_AT_ONCE == TOPICS_AT_ONCE - 1:
                await asyncio.sleep(0)
            name = topic.name
            now = seen[name] = _counted(topic.counters)
            # A topic that was opened meanwhile counts from 0.
            before = self._before.get(name, _NOTHING)
            past = self._pasts.get(name)
            counts = _NOTHING
            if now != before:
                # What has counted less was opened anew.
                counts = tuple(n - b if n >= b else n for n, b in zip(now, before, strict=True))
                total = tuple(t + c for t, c in zip(total, counts, strict=True))
                if past is None and len(self._pasts) < MAX_HISTORIES:
                    past = self._pasts[name] = Past()
            if past is not None:
                past.add(place, counts)
        self._all.add(place, total)
        self._before = seen
        self._told.append(rpc.refusals.copy())
        self._ended += 1
        for name in [
            name for name, past in self._pasts.items() if name not in seen or past.quiet_intervals > INTERVALS
        ]:
            del self._pasts[name]

    # -- what is told of it ------------------------------------------------------------------------------------

    def past(self, name: str) -> Past | None:
        """That of a topic by its full name; None if nothing has happened, or it has none."""
        return self._pasts.get(name)

    def activity(self, past: Past | None = None) -> admin_pb2.Activity:
        """A past as it is told; without one that of all topics."""
        shown = min(self._ended, INTERVALS)
        places = np.arange(self._ended - shown, self._ended) % _PLACES
        values = (past or self._all).ring[:, places].tolist()
        return admin_pb2.Activity(**dict(zip(SERIES, values, strict=True)))

    def refusals(self) -> list[admin_pb2.ReasonCount]:
        """What callers were told meanwhile, the most frequent first."""
        since = rpc.refusals - self._told[0] if self._told else Counter[str]()
        return [admin_pb2.ReasonCount(reason=reason, count=count) for reason, count in since.most_common()]
