"""What a topic has handed to its log, and whose outcome is not known yet."""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from seqdedupe.errors import SeqdedupeError
from seqdedupe.format.columns import PRODUCER_INDEXES, SEQUENCE_IDS, size, start
from seqdedupe.format.jit import Int64s
from seqdedupe.tasks import Broadcast
from seqdedupe.topic.control import Change, CursorChange, Purge, Reset
from seqdedupe.topic.frame import Frame, FrameReceipt, Reply
from seqdedupe.topic.policy import Policy

MAX_IN_FLIGHT_BYTES = 64 * 1024 * 1024
"""Admitted and not settled, in one topic."""

MAX_IN_FLIGHT_FRAMES = 16_384

LISTED_AT_ONCE = 16
"""So many frames are looked through in one step of the event loop: the largest take some ms each."""

FRAMES_A_PART = 256
"""Whose producers are looked at in one step."""


@dataclass(slots=True, eq=False)
class Admitted:
    """A frame whose new rows are in flight."""

    frame: Frame
    receipt: FrameReceipt
    reply: Reply
    since_seconds: float
    """When it was admitted, by the event loop's clock."""
    when_durable: Callable[[], None] | None = None
    """Set where the receipt may be given before it is: called when it is."""
    is_told: bool = False
    """Whether the receipt was given early."""

    @property
    def body(self) -> bytes:
        """What was handed to the log."""
        return self.frame.encoded


@dataclass(slots=True, eq=False)
class Changing:
    """A control record in flight. `done` raises why it was not stored; who waits for it may be gone."""

    body: bytes
    change: Change
    done: "asyncio.Future[None]"

    def settled(self, why: SeqdedupeError | None = None) -> None:
        """It is stored, or why it is not."""
        if self.done.cancelled():
            return
        if why is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(why)
            # Nobody need ask.
            self.done.exception()


@dataclass(slots=True)
class InFlight:
    """What a producer has in flight: lowest and highest ID, and since when."""

    first_id: int
    last_id: int
    since_seconds: float

    def add(self, first_id: int, last_id: int) -> None:
        """These too, which came later."""
        self.first_id, self.last_id = min(self.first_id, first_id), max(self.last_id, last_id)


class Flight:
    """Frames and control records in the order in which they were handed over, which is that in which they settle."""

    def __init__(self) -> None:
        self._admitted: deque[Admitted | Changing] = deque()
        self._changes: Counter[type[Change]] = Counter()
        self._bytes = 0
        self._ever = 0
        self._written = 0
        """So many of the oldest are in the log, and not known to be durable."""
        self._settled = Broadcast()

    def __len__(self) -> int:
        return len(self._admitted)

    def __iter__(self) -> Iterator[Admitted | Changing]:
        """The oldest first."""
        return iter(self._admitted)

    @property
    def bytes(self) -> int:
        """Of all that was handed over."""
        return self._bytes

    def add(self, admitted: Admitted | Changing) -> None:
        """The newest. Raises MemoryError, and is as it was."""
        self._admitted.append(admitted)
        if isinstance(admitted, Admitted):
            self._bytes += len(admitted.frame.encoded)
        else:
            self._bytes += len(admitted.body)
            self._changes[type(admitted.change)] += 1
        self._ever += 1

    def take_back(self) -> None:
        """The newest was not handed over after all."""
        newest = self._admitted.pop()
        self._bytes -= len(newest.body)
        if isinstance(newest, Changing):
            self._changes[type(newest.change)] -= 1
        self._ever -= 1

    def newest_policy(self, policy: Policy) -> Policy:
        """The one that will be set when all of these have settled, where this one is set now."""
        if self._changes[Policy] or self._changes[CursorChange]:
            for item in self._admitted:
                if isinstance(item, Changing):
                    if isinstance(item.change, Policy):
                        policy = item.change
                    elif isinstance(item.change, CursorChange):
                        policy = item.change.applied_to(policy)
        return policy

    @property
    def oldest(self) -> Admitted | Changing | None:
        """The one that settles next."""
        return self._admitted[0] if self._admitted else None

    def since(self, number: int, sequence_id: int) -> float | None:
        """Since when a producer's message has been in flight; that of its oldest copy, or None."""
        for frame, since in self._frames():
            producer_rows, ids = _columns(frame)
            if (ids[producer_rows == number] == sequence_id).any():
                return since
        return None

    def by_producer(self, until_seconds: float) -> Iterator[dict[int, InFlight]]:
        """What has been in flight since that time or longer, by producer number; some frames at once, the oldest first.

        Each part is as it is when it is asked for: without what has settled, and what has come since the first.
        """
        at, end = 0, self._ever
        while (at := max(at, self._ever - len(self._admitted))) < end:
            settled = self._ever - len(self._admitted)
            some = list(islice(self._admitted, at - settled, min(at + LISTED_AT_ONCE, end) - settled))
            at += len(some)
            found: dict[int, InFlight] = {}
            for item in some:
                if isinstance(item, Changing):
                    continue
                if item.since_seconds > until_seconds:
                    at = end
                    break
                producer_rows, ids = _columns(item.frame)
                for number, first, last in _spans(producer_rows, ids):
                    known = found.setdefault(number, InFlight(first, last, item.since_seconds))
                    known.add(first, last)
            yield found

    def _frames(self) -> Iterator[tuple[Frame, float]]:
        return ((item.frame, item.since_seconds) for item in self._admitted if isinstance(item, Admitted))

    def has(self, kind: type[Reset] | type[Purge]) -> bool:
        """Whether producers are being reset, or forgotten."""
        return self._changes[kind] > 0

    def producer_rows(self) -> list[Int64s]:
        """The producers of all frames, in parts."""
        rows = [frame.producer_rows for frame, _ in self._frames()]
        return [np.concatenate(rows[first : first + FRAMES_A_PART]) for first in range(0, len(rows), FRAMES_A_PART)]

    def renumber(self, new_numbers: Int64s) -> None:
        """Producers have other numbers from now on, by their old ones."""
        for frame, _ in self._frames():
            frame.producer_rows = new_numbers[frame.producer_rows]

    def written(self, count: int) -> list[Admitted | Changing]:
        """So many more are written: the oldest of which that was not known."""
        some = list(islice(self._admitted, self._written, self._written + count))
        self._written += count
        return some

    def rows_told_early(self) -> int:
        """Of how many messages it is known only that they are written, and their senders were told."""
        written = islice(self._admitted, self._written)
        return sum(item.frame.rows for item in written if isinstance(item, Admitted) and item.is_told)

    def take(self) -> Admitted | Changing:
        """The oldest, which has settled. `tell` has to follow."""
        admitted = self._admitted.popleft()
        if self._written:
            self._written -= 1
        if isinstance(admitted, Admitted):
            self._bytes -= len(admitted.frame.encoded)
        else:
            self._bytes -= len(admitted.body)
            self._changes[type(admitted.change)] -= 1
        return admitted

    def tell(self) -> None:
        """Whoever waits may look again."""
        self._settled.tell()

    def has_room(self) -> bool:
        """Whether another frame may be admitted now."""
        return self._bytes < MAX_IN_FLIGHT_BYTES and len(self._admitted) < MAX_IN_FLIGHT_FRAMES

    async def wait_for_room(self) -> None:
        """Returns when another frame may be admitted."""
        while not self.has_room():
            await self._settled.wait()

    async def all_of_now(self) -> None:
        """Returns when all that is in flight now has settled."""
        last = self._ever
        while self._ever - len(self._admitted) < last:
            await self._settled.wait()


def _columns(frame: Frame) -> tuple[Int64s, Int64s]:
    """Of each row of a frame its producer's number and its sequence ID."""
    ids = np.frombuffer(frame.encoded, np.int64, frame.rows, start(frame.places, SEQUENCE_IDS))
    several = size(frame.places, PRODUCER_INDEXES) > 0
    indexes = np.frombuffer(
        frame.encoded, np.int32, frame.rows if several else 0, start(frame.places, PRODUCER_INDEXES)
    )
    return frame.producer_rows[indexes] if len(indexes) else np.repeat(frame.producer_rows, len(ids)), ids


def _spans(producer_rows: Int64s, ids: Int64s) -> Iterator[tuple[int, int, int]]:
    """Each producer's number with its first and its last ID: they rise within a frame."""
    order = np.argsort(producer_rows, kind="stable")
    sorted_rows, sorted_ids = producer_rows[order], ids[order]
    first = np.flatnonzero(np.diff(sorted_rows, prepend=-1))
    last = np.append(first[1:] - 1, len(order) - 1)
    return zip(sorted_rows[first].tolist(), sorted_ids[first].tolist(), sorted_ids[last].tolist(), strict=True)
