"""Memory that clients make the sidecar hold: frames in flight, answers that wait to be read, pages for readers."""

import asyncio
import ctypes
import logging
from collections import Counter
from collections.abc import Callable

from broker_sidecar.security.subject import Use
from seqdedupe.errors import error

MAX_HELD_BYTES = 96 * 1024 * 1024
"""For all clients together. With what gRPC holds for 20 streams the process grows by less than 200 MB
(`python -m bench stalled_disk`)."""

READING_PART = 2
"""Answers that only inform, such as pages, may take the n-th part of it. The rest is for those who publish."""

MAX_SHARE_BYTES = 16 * 1024 * 1024
"""Of one stream that has so much, nothing more is taken."""

TICK_SECONDS = 0.02
"""While somebody waits for memory, this often it is looked whether there is some."""


class Budget:
    """The memory of all clients. It is shared fairly: nobody may hold more than is left for the others.

    So one alone gets half of it at most, a hundred a hundredth each, and however many there are, whoever asks for
    little finds room. `relieve` is called now and then while somebody waits.

    A budget `within` another one is for memory that is given in turn (`Share.reserve`). There the same is true of all
    that one caller has together: half of it is left for others. What the other budget has no room for it has none for.
    """

    def __init__(
        self, relieve: Callable[["Budget"], None], limit_bytes: int, *, within: "Budget | None" = None
    ) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self._within = within
        self._held_by: Counter[Use] = Counter()
        """Within another one: what each caller holds."""
        self.read_bytes = 0
        """What has been read and is not admitted yet. It keeps others from being read, but not from being admitted:
        else all could wait for each other."""
        self._relieve = relieve
        self._waiting: dict[Share, None] = {}
        self._ticks = False

    @property
    def free_bytes(self) -> int:
        """What nobody holds."""
        free = self.limit_bytes - self.held_bytes
        return free if self._within is None else min(free, self._within.free_bytes)

    def free_for(self, use: Use, *, to_read: bool = False) -> int:
        """What of this a stream of the caller may take that holds nothing."""
        if self._within is None:
            return self.free_bytes - self.read_bytes * to_read
        return self.free_bytes - self._held_by[use]

    @property
    def gives_to_anybody(self) -> bool:
        """Whether somebody would wait for ever otherwise: for something large, or for those who publish."""
        return self._within is not None and not self.held_bytes

    def take(self, use: Use, size: int) -> None:
        """The caller holds so much more, or less."""
        self.held_bytes += size
        if self._within is not None:
            self._within.take(use, size)
            self._held_by[use] += size
            if not self._held_by[use]:
                del self._held_by[use]
            if size < 0 and self._waiting:
                self._look()

    @property
    def waiting(self) -> set[Use]:
        """The callers of those who wait."""
        return {share.use for share in self._waiting}

    def is_others_turn(self) -> bool:
        """Whether a stream waits whose client has shown that it reads."""
        return any(share.has_been_read for share in self._waiting)

    def wait(self, share: "Share") -> None:
        """`share.look` is called every now and then from here on."""
        self._waiting[share] = None
        if not self._ticks:
            self._ticks = True
            asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)

    def refuses(self, share: "Share") -> None:
        """It does not wait: so it is looked at once whether others hold what they do not need."""
        self._waiting[share] = None
        self._relieve(self)
        self.wait_no_more(share)

    def wait_no_more(self, share: "Share") -> None:
        self._waiting.pop(share, None)

    def _look(self) -> None:
        """First those go on whose callers hold least; of one caller, those whose clients have shown that they read."""
        for share in sorted(self._waiting, key=lambda share: (self._held_by[share.use], not share.has_been_read)):
            share.look()

    def _tick(self) -> None:
        self._look()
        self._ticks = bool(self._waiting)
        if self._ticks:
            self._relieve(self)
            asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)


class Share:
    """What one stream or call holds, which counts for the `use` of its caller."""

    def __init__(self, budget: Budget, use: Use) -> None:
        self._budget = budget
        self.use = use
        self.held_bytes = 0
        self.has_been_read = False
        """Whether the client has taken something that was reserved for it."""
        self._read_bytes = 0
        self._wanted_bytes = 0
        self._wants_to_read = False
        self._is_given = False
        """Whether what is waited for is taken as soon as it is there."""
        self._found: asyncio.Future[None] | None = None

    @property
    def free_part(self) -> float:
        """Which part of the whole it could take if it held nothing."""
        return max(0, self._budget.free_for(self.use)) / self._budget.limit_bytes

    def is_others_turn(self) -> bool:
        """Whether a stream waits whose client has shown that it reads."""
        return self._budget.is_others_turn()

    def fits(self, size: int, *, to_read: bool = False) -> bool:
        """Whether so much more may be taken, or read in order to be taken then."""
        held = self.held_bytes
        is_too_much = held + size > self._budget.free_for(self.use, to_read=to_read) or held >= MAX_SHARE_BYTES
        if is_too_much and not self._budget.gives_to_anybody:
            return False
        return self.use.fits(size)

    def check(self, size: int, why: str) -> None:
        """Raises QUEUE_FULL with this text, or SHARE_EXCEEDED, unless so much more may be taken."""
        if not self.use.fits(size):
            raise self.use.exceeded("bytes_in_flight", f"{self.use.held_bytes} bytes are in flight")
        if not self.fits(size):
            self._budget.refuses(self)
            raise error("QUEUE_FULL", why)

    def take(self, size: int) -> None:
        """Takes it, whether it fits or not: what has come into being is counted."""
        self.held_bytes += size
        self.use.held_bytes += size
        self._budget.take(self.use, size)

    def has_read(self, size: int) -> None:
        """The bytes of the message that has been read last and is not admitted yet."""
        self._budget.read_bytes += size - self._read_bytes
        self._read_bytes = size

    def give_back(self, size: int) -> None:
        self.take(-size)
        self.look()

    def look(self) -> None:
        """Goes on if what is waited for fits now."""
        if self._found is not None and not self._found.done() and self._fits_now():
            if self._is_given:
                self.take(self._wanted_bytes)
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

    async def reserve(self, size: int) -> None:
        """Takes so much more when its turn has come."""
        if self.fits(size):
            self.take(size)
            return
        self._wanted_bytes, self._wants_to_read, self._is_given = size, False, True
        found = self._found = asyncio.get_running_loop().create_future()
        self._budget.wait(self)
        try:
            await found
        except asyncio.CancelledError:
            if found.done() and not found.cancelled():
                self.give_back(size)
            raise
        finally:
            self._found, self._is_given = None, False
            self._budget.wait_no_more(self)


# -- What the C library does with freed memory.

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Parameters of glibc's mallopt(3), with values in bytes."""

_AT_START = ((_TRIM_THRESHOLD, 8 << 20), (_MMAP_THRESHOLD, 4 << 20))
_WHILE_SERVING = ((_TRIM_THRESHOLD, 1 << 30), (_TOP_PAD, 64 << 20), (_MMAP_THRESHOLD, 256 << 20))


def give_back_freed_memory() -> None:
    """Gives large blocks back as soon as start-up frees them, where the C library is glibc.

    Each thread frees into a heap of its own, and what stays at the end of one cannot be given back later: tens of
    megabytes for each thread that reads a log or a snapshot.
    """
    _set(_AT_START)


def keep_freed_memory() -> None:
    """Gives back what start-up has freed, and keeps what is freed from now on, where the C library is glibc.

    Pages given back while serving have to be fetched again, at microseconds a page.
    """
    _set(_WHILE_SERVING)


def _set(parameters: tuple[tuple[int, int], ...]) -> None:
    try:
        library = ctypes.CDLL(None)
        library.malloc_trim(0)
        for parameter, value in parameters:
            library.mallopt(parameter, value)
    except (AttributeError, OSError, TypeError):
        logging.getLogger("seqdedupe.server").debug("the C library has no mallopt")
