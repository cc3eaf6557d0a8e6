"""Memory that clients make the sidecar hold: frames in flight, answers that wait to be read, pages for readers."""

import asyncio
from collections.abc import Callable

from broker_sidecar.security.shares import Use
from seqdedupe.errors import error

MAX_HELD_BYTES = 96 * 1024 * 1024
"""For all clients together. With what gRPC holds for 20 streams the process grows by less than 200 MB
(`python -m bench stalled_disk`)."""

MAX_SHARE_BYTES = 16 * 1024 * 1024
"""Of one stream that has so much, nothing more is taken."""

TICK_SECONDS = 0.02
"""While somebody waits for memory, this often it is looked whether there is some."""


class Budget:
    """The memory of all clients. It is shared fairly: nobody may hold more than is left for the others.

    So one alone gets half of it at most, a hundred a hundredth each, and however many there are, whoever asks for
    little finds room. `relieve` is called now and then while somebody waits.
    """

    def __init__(self, relieve: Callable[[], None], limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self.read_bytes = 0
        """What has been read and is not admitted yet. It keeps others from being read, but not from being admitted:
        else all could wait for each other."""
        self._relieve = relieve
        self._waiting: dict[Share, None] = {}

    @property
    def free_bytes(self) -> int:
        return self.limit_bytes - self.held_bytes

    def wait(self, share: "Share") -> None:
        """`share.look` is called every now and then from here on."""
        if not self._waiting:
            asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)
        self._waiting[share] = None

    def wait_no_more(self, share: "Share") -> None:
        self._waiting.pop(share, None)

    def _tick(self) -> None:
        for share in list(self._waiting):
            share.look()
        if self._waiting:
            self._relieve()
            asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)


class Share:
    """What one stream or call holds, which counts for the `use` of its caller."""

    def __init__(self, budget: Budget, use: Use) -> None:
        self._budget = budget
        self._use = use
        self.held_bytes = 0
        self._read_bytes = 0
        self._wanted_bytes = 0
        self._wants_to_read = False
        self._found: asyncio.Future[None] | None = None

    @property
    def free_bytes(self) -> int:
        """What nobody holds."""
        return self._budget.free_bytes

    def fits(self, size: int, *, to_read: bool = False) -> bool:
        """Whether so much more may be taken, or read in order to be taken then."""
        held, budget = self.held_bytes, self._budget
        free_bytes = budget.free_bytes - budget.read_bytes if to_read else budget.free_bytes
        if held + size > free_bytes or held >= MAX_SHARE_BYTES:
            return False
        return self._use.fits(size)

    def check(self, size: int, why: str) -> None:
        """Raises QUEUE_FULL with this text, or SHARE_EXCEEDED, unless so much more may be taken."""
        if not self._use.fits(size):
            raise self._use.exceeded("bytes_in_flight", f"{self._use.held_bytes} bytes are in flight")
        if not self.fits(size):
            raise error("QUEUE_FULL", why)

    def take(self, size: int) -> None:
        """Takes it, whether it fits or not: what has come into being is counted."""
        self.held_bytes += size
        self._budget.held_bytes += size
        self._use.held_bytes += size

    def has_read(self, size: int) -> None:
        """The bytes of the message that has been read last and is not admitted yet."""
        self._budget.read_bytes += size - self._read_bytes
        self._read_bytes = size

    def give_back(self, size: int) -> None:
        self.held_bytes -= size
        self._budget.held_bytes -= size
        self._use.held_bytes -= size
        self.look()

    def look(self) -> None:
        """Goes on if what is waited for fits now."""
        if self._found is not None and not self._found.done() and self._fits_now():
            self._found.set_result(None)

    def _fits_now(self) -> bool:
        return self.fits(self._wanted_bytes, to_read=self._wants_to_read)

    async def wait_for(self, size: int, *, to_read: bool = False) -> None:
        """Returns when so much more may be taken, or read."""
        self._wanted_bytes, self._wants_to_read = size, to_read
        while not self._fits_now():
            self._found = asyncio.get_running_loop().create_future()
            self._budget.wait(self)
            try:
                await self._found
            finally:
                self._found = None
                self._budget.wait_no_more(self)
