"""What a topic has handed to its log, and whose outcome is not known yet."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from seqdedupe.errors import SeqdedupeError
from seqdedupe.topic.admission import Frame
from seqdedupe.topic.answers import Receipt, Reply
from seqdedupe.topic.broadcast import Broadcast
from seqdedupe.topic.control import Change
from seqdedupe.topic.policy import Policy

MAX_IN_FLIGHT_BYTES = 64 * 1024 * 1024
"""Admitted and not settled, in one topic."""

MAX_IN_FLIGHT_FRAMES = 16_384


@dataclass(slots=True, eq=False)
class Admitted:
    """A frame whose new rows are in flight."""

    frame: Frame
    receipt: Receipt
    reply: Reply

    @property
    def body(self) -> bytes:
        """What was handed to the log."""
        return self.frame.encoded


@dataclass(slots=True, eq=False)
class Changing:
    """A control record in flight. `settled` is told that it is stored, or why it is not."""

    body: bytes
    change: Change
    settled: Callable[[SeqdedupeError | None], None]


class Flight:
    """Frames and control records in the order in which they were handed over, which is that in which they settle."""

    def __init__(self) -> None:
        self._admitted: deque[Admitted | Changing] = deque()
        self._bytes = 0
        self._ever = 0
        self._settled = Broadcast()

    def __len__(self) -> int:
        return len(self._admitted)

    def add(self, admitted: Admitted | Changing) -> None:
        """The newest."""
        self._admitted.append(admitted)
        self._bytes += len(admitted.body)
        self._ever += 1

    @property
    def newest_policy(self) -> Policy | None:
        """The one that will be set when all of these have settled; None if none of them sets it."""
        changes = (item.change for item in reversed(self._admitted) if isinstance(item, Changing))
        return next((change for change in changes if isinstance(change, Policy)), None)

    @property
    def oldest(self) -> Admitted | Changing | None:
        """The one that settles next."""
        return self._admitted[0] if self._admitted else None

    def take(self) -> Admitted | Changing:
        """The oldest, which has settled. `tell` has to follow."""
        admitted = self._admitted.popleft()
        self._bytes -= len(admitted.body)
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
