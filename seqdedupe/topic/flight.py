"""What a topic has handed to its log, and whose outcome is not known yet."""

from collections import deque
from dataclasses import dataclass

from seqdedupe.topic.admission import Frame
from seqdedupe.topic.answers import Receipt, Reply
from seqdedupe.topic.broadcast import Broadcast

MAX_IN_FLIGHT_BYTES = 64 * 1024 * 1024
"""Admitted and not settled, in one topic."""

MAX_IN_FLIGHT_FRAMES = 16_384


@dataclass(slots=True, eq=False)
class Admitted:
    """A frame whose new rows are in flight."""

    frame: Frame
    receipt: Receipt
    reply: Reply

    def answer(self) -> None:
        """The frame is stored."""
        self.reply(self.receipt)


class Flight:
    """Frames in the order in which they were handed over, which is that in which they settle."""

    def __init__(self) -> None:
        self._admitted: deque[Admitted] = deque()
        self._bytes = 0
        self._ever = 0
        self._settled = Broadcast()

    def __len__(self) -> int:
        return len(self._admitted)

    def add(self, admitted: Admitted) -> None:
        """The newest."""
        self._admitted.append(admitted)
        self._bytes += len(admitted.frame.encoded)
        self._ever += 1

    @property
    def oldest(self) -> Admitted | None:
        """The one that settles next."""
        return self._admitted[0] if self._admitted else None

    def take(self) -> Admitted:
        """The oldest, which has settled. `tell` has to follow."""
        admitted = self._admitted.popleft()
        self._bytes -= len(admitted.frame.encoded)
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
