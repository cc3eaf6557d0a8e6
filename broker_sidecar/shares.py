"""The share of the sidecar's resources that each caller may use at once.

- `CallerShares` finds the limits of a caller in the rules.
- `Use` has the current use of one caller, including bytes per second.
- `Budget` is the memory that clients make the sidecar hold: frames in flight, unread answers, and pages for readers.
- `Share` is the part of a budget that one stream or call holds. This memory also counts for the caller's `Use`.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from seqdedupe.core.name_table import Pattern
from seqdedupe.errors import SeqdedupeError, error

BURST_SECONDS = 1.0
"""A caller that was silent for this time may send the bytes of this time at once."""

MAX_CURSORS_A_CALLER = 8
"""The most cursors of a caller in one topic, if rules apply to the caller and set no limit of cursors. This is a
quarter of the maximum of a topic."""

MOVES_PER_SECOND = 10
MOVED_BYTES_PER_SECOND = 2_500
"""The limits for the cursor moves of one caller in one topic. With these limits, the moves add at most 9 MB per hour to
the topic's log, for notes of every size."""

MAX_MOVE_WAIT_SECONDS = 5.0
"""The longest wait of a cursor move. A move that would wait longer is refused."""

_MAX_MOVED_TOPICS = 1_000
"""The number of topics for which a caller's next move time is stored. More are stored only while the caller has to wait
in those topics."""

DISK_SECONDS = 1.0
"""The time between two measurements of the logs' sizes. For this time, a caller may publish beyond its share."""


@dataclass(frozen=True, slots=True)
class CallerLimits:
    """The limits of a caller. None means no limit."""

    connections: int | None = None
    """Connections with open streams. All connections to a Unix socket count as one."""
    streams: int | None = None
    bytes_per_second: int | None = None
    """Bytes per second that the caller sends to the sidecar, on streams and with `Publish`, `Open` and `MoveCursor`."""
    bytes_in_flight: int | None = None
    """Bytes of frames without an answer, and of answers and pages that the caller has not read yet."""
    producer_names: int | None = None
    """Producer names in one topic under which the caller may publish. All known names count, even if other callers
    added them."""
    topics: int | None = None
    """Existing topics that the rules allow the caller to create. Topics that other callers created count too."""
    bytes_on_disk: int | None = None
    """Bytes in the logs of those topics. Messages that other callers have published count too."""
    cursors: int | None = None
    """Cursors in one topic whose names the caller may use. All existing cursors count, even if another caller created
    them."""


NO_LIMITS = CallerLimits()
OF_NOBODY = CallerLimits(streams=16)
"""The limits of all unknown callers together, regardless of the rules. Unknown callers may only watch the sidecar's
health."""

IN_ALL = ("bytes_per_second", "producer_names")
"""The limits that rules can set for all callers together. The other limits for all callers are in the configuration."""


@dataclass(frozen=True, slots=True)
class CallerShare:
    """The limits of each caller whose name matches one of the patterns in `subjects`."""

    name: str
    subjects: tuple[str, ...]
    limits: CallerLimits


class Use:
    """The current use of one caller, or of all callers together."""

    def __init__(self, name: str, limits: CallerLimits) -> None:
        self.name = name
        self.limits = limits
        self.held_bytes = 0
        """The number of bytes in flight."""
        self.disk_bytes = 0
        """The number of bytes on disk at the time `disk_counted_at`."""
        self.disk_counted_at = -math.inf
        self._paid_until = 0.0
        """Until this time, the bytes received so far use up the allowed rate."""
        self._moves_paid_until: dict[str, float] = {}
        """For each topic, the time until which the cursor moves so far use up the allowed rate."""

    def fits(self, size: int) -> bool:
        """Return whether `size` more bytes may be in flight. If no bytes are in flight, every size is allowed, because
        otherwise a large item could never be sent."""
        limit = self.limits.bytes_in_flight
        return limit is None or not self.held_bytes or self.held_bytes + size <= limit

    def spend(self, size: int, now_seconds: float) -> None:
        """Count `size` received bytes."""
        if (limit := self.limits.bytes_per_second) is not None:
            self._paid_until = max(self._paid_until, now_seconds - BURST_SECONDS) + size / limit

    def rest_seconds(self, now_seconds: float) -> float:
        """Return the time for which no more bytes are accepted."""
        return max(0.0, self._paid_until - now_seconds) if self.limits.bytes_per_second is not None else 0.0

    def move(self, topic: str, size: int, now_seconds: float) -> float:
        """Count a cursor move, which adds `size` bytes to the topic's log. Return the time in seconds that the move
        must wait.

        Raises SHARE_EXCEEDED, and counts nothing, if this time is above MAX_MOVE_WAIT_SECONDS.
        """
        paid_until = self._moves_paid_until
        if len(paid_until) >= _MAX_MOVED_TOPICS:
            self._moves_paid_until = paid_until = {t: at for t, at in paid_until.items() if at > now_seconds}
        begins = max(paid_until.get(topic, -math.inf), now_seconds - BURST_SECONDS)
        wait_seconds = max(0.0, begins - now_seconds)
        if wait_seconds > MAX_MOVE_WAIT_SECONDS:
            delay_ms = int(wait_seconds * 1000) + 1
            raise self.exceeded(
                "cursor_moves", "there are too many cursor moves per second", delay_ms, MOVES_PER_SECOND
            )
        paid_until[topic] = begins + max(1 / MOVES_PER_SECOND, size / MOVED_BYTES_PER_SECOND)
        return wait_seconds

    def check(self, what: str, count: int, *, otherwise: int | None = None) -> None:
        """Raise SHARE_EXCEEDED if `count` is above the limit named `what`. `otherwise` is the limit if the rules do not
        set this limit."""
        limit = getattr(self.limits, what)
        limit = otherwise if limit is None else limit
        if limit is not None and count > limit:
            raise self.exceeded(what, f"{what.replace('_', ' ')} would be {count}", limit=limit)

    def exceeded(
        self, what: str, message: str, retry_delay_ms: int | None = None, limit: int | None = None
    ) -> SeqdedupeError:
        """Return the error for the limit named `what`. `limit` is the value of the limit if the rules do not set this
        limit."""
        limit = getattr(self.limits, what) if limit is None else limit
        why = f"the share of {self.name} is exceeded: {message}, and the limit is {limit}"
        return error("SHARE_EXCEEDED", why, retry_delay_ms=retry_delay_ms, share=what, limit=limit)


class CallerShares:
    """The shares in force, and the current use of each caller."""

    def __init__(self, shares: Sequence[CallerShare], in_all: CallerLimits) -> None:
        self._shares = shares
        self._uses: dict[str, Use] = {}
        self.in_all = Use("all callers together", in_all)

    def of(self, subject: str) -> Use:
        """Return the use of the caller with this name. For an empty name, return the use of all unknown callers."""
        if (use := self._uses.get(subject)) is None:
            use = self._uses[subject] = Use(
                repr(subject) if subject else "all unknown callers", self._limits_of(subject)
            )
        return use

    def replace(self, shares: Sequence[CallerShare], in_all: CallerLimits) -> None:
        """Replace the shares, for example after the rules have changed."""
        self._shares, self.in_all.limits = shares, in_all
        for subject, use in self._uses.items():
            use.limits = self._limits_of(subject)
            use.disk_counted_at = -math.inf  # count again, because the rules decide which topics count

    def _limits_of(self, subject: str) -> CallerLimits:
        """Return the limits of the first share that matches this caller. For an empty name, return the limits of
        unknown callers."""
        if not subject:
            return OF_NOBODY
        name = subject.encode(errors="surrogatepass")
        about = (s.limits for s in self._shares if any(Pattern(text).matches(name) for text in s.subjects))
        return next(about, NO_LIMITS)

    def rest_seconds(self, use: Use, now_seconds: float) -> float:
        """Return the time for which no more bytes are accepted from this caller."""
        return max(use.rest_seconds(now_seconds), self.in_all.rest_seconds(now_seconds))

    def spend(self, use: Use, size: int, now_seconds: float) -> None:
        """Count `size` bytes received from this caller."""
        use.spend(size, now_seconds)
        self.in_all.spend(size, now_seconds)

    def check_rate(self, use: Use, size: int, now_seconds: float) -> None:
        """Count the bytes of a unary call. Raises SHARE_EXCEEDED, with the time to wait, if no more bytes are accepted
        now."""
        for one in (use, self.in_all):
            if rest_seconds := one.rest_seconds(now_seconds):
                delay_ms = int(rest_seconds * 1000) + 1
                raise one.exceeded("bytes_per_second", "there are too many bytes per second", delay_ms)
        self.spend(use, size, now_seconds)


# -- Memory that clients make the sidecar hold: frames in flight, unread answers, pages for readers.

MAX_HELD_BYTES = 96 * 1024 * 1024
"""The most bytes held for all clients together. With this limit, and with gRPC's memory for 20 streams, the process
grows by less than 200 MB (`python -m bench stalled_disk`)."""

READING_PART = 2
"""Answers of calls that do not publish, such as pages, may use this fraction (1/n) of MAX_HELD_BYTES. The rest is
reserved for publishing."""

MAX_SHARE_BYTES = 16 * 1024 * 1024
"""From a stream that holds this number of bytes, no more messages are read."""

TICK_SECONDS = 0.02
"""The time between two checks for free memory while a stream waits."""


class Budget:
    """The memory that all clients together may make the sidecar hold. A stream may hold at most as much memory as
    remains free afterwards.

    So a single stream gets at most half of the budget, and each of a hundred streams gets about a hundredth. A small
    request finds room, no matter how many streams there are. `relieve` is called regularly while a stream waits.

    A budget `within` an outer budget is for memory that streams receive one after the other (`Share.reserve`). In such
    an inner budget, the rule applies to the total of each caller: a caller may hold at most as much memory as remains
    free afterwards. If the outer budget has no room, the inner budget has no room either.
    """

    def __init__(
        self, relieve: Callable[["Budget"], None], limit_bytes: int, *, within: "Budget | None" = None
    ) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self.within = within
        self._held_by: Counter[Use] = Counter()
        """The bytes that each caller holds. Only an inner budget counts them."""
        self.read_bytes = 0
        """The bytes of messages that were read and are not admitted yet. These bytes block further reads, but not
        admission. Otherwise all streams could wait for each other."""
        self._relieve = relieve
        self._waiting: dict[Share, None] = {}
        self._ticks = False

    @property
    def free_bytes(self) -> int:
        """The bytes that no stream holds."""
        free = self.limit_bytes - self.held_bytes
        return free if self.within is None else min(free, self.within.free_bytes)

    def free_for(self, use: Use, *, to_read: bool = False) -> int:
        """Return the number of bytes that a stream of this caller may hold if it holds nothing now."""
        if self.within is None:
            return self.limit_bytes - self.held_bytes - self.read_bytes * to_read
        return self.free_bytes - self._held_by[use]

    @property
    def gives_to_anybody(self) -> bool:
        """Whether a request of every size is granted now. Otherwise a large request, or a request while publishers hold
        much memory, could wait for ever."""
        return self.within is not None and not self.held_bytes

    def take(self, use: Use, size: int) -> None:
        """Add `size`, which may be negative, to the bytes that the caller holds."""
        self.held_bytes += size
        if self.within is not None:
            self.within.take(use, size)
            self._held_by[use] += size
            if not self._held_by[use]:
                del self._held_by[use]
            if size < 0 and self._waiting:
                self._look()

    @property
    def waiting(self) -> set[Use]:
        """The callers of the waiting streams."""
        return {share.use for share in self._waiting}

    def is_others_turn(self) -> bool:
        """Return whether a stream is waiting whose client has shown that it reads."""
        return any(share.has_been_read for share in self._waiting)

    def wait(self, share: "Share") -> None:
        """Call `share.look` regularly, until `wait_no_more`."""
        self._waiting[share] = None
        if not self._ticks:
            self._ticks = True
            asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)

    def refuses(self, share: "Share") -> None:
        """Call `relieve` at once, because a share is refused memory and does not wait. Other streams may hold memory
        that they do not need."""
        self._waiting[share] = None
        self._relieve(self)
        self.wait_no_more(share)

    def wait_no_more(self, share: "Share") -> None:
        self._waiting.pop(share, None)

    def _look(self) -> None:
        """Wake the waiting streams whose wanted memory is free. Streams of callers that hold the least are first. Among
        equals, streams whose clients have shown that they read are first."""
        for share in sorted(self._waiting, key=lambda share: (self._held_by[share.use], not share.has_been_read)):
            share.look()

    def _tick(self) -> None:
        self._look()
        self._ticks = bool(self._waiting)
        if self._ticks:
            self._relieve(self)
            asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)


class Share:
    """The memory that one stream or call holds. It counts for the `use` of its caller."""

    def __init__(self, budget: Budget, use: Use) -> None:
        self._budget = budget
        self.use = use
        self.held_bytes = 0
        self.has_been_read = False
        """Whether the client has read an answer for which memory was reserved."""
        self._read_bytes = 0
        self._wanted_bytes = 0
        self._wants_to_read = False
        self._is_given = False
        """Whether `look` itself takes the wanted memory as soon as it is free."""
        self._found: asyncio.Future[None] | None = None

    @property
    def free_part(self) -> float:
        """The fraction of the budget that this share could hold if it held nothing now."""
        return max(0, self._budget.free_for(self.use)) / self._budget.limit_bytes

    def is_others_turn(self) -> bool:
        """Return whether a stream is waiting whose client has shown that it reads."""
        return self._budget.is_others_turn()

    def fits(self, size: int, *, to_read: bool = False) -> bool:
        """Return whether `size` more bytes may be held. With `to_read`, return whether a message of this size may be
        read, to be held later."""
        held = self.held_bytes
        is_too_much = held + size > self._budget.free_for(self.use, to_read=to_read) or held >= MAX_SHARE_BYTES
        if is_too_much and not self._budget.gives_to_anybody:
            return False
        return self.use.limits.bytes_in_flight is None or self.use.fits(size)

    def check(self, size: int, why: str) -> None:
        """Raise QUEUE_FULL with the text `why`, or SHARE_EXCEEDED, unless `size` more bytes may be held."""
        if not self.use.fits(size):
            raise self.use.exceeded("bytes_in_flight", f"{self.use.held_bytes} bytes are in flight")
        if not self.fits(size):
            self._budget.refuses(self)
            raise error("QUEUE_FULL", why)

    def take(self, size: int) -> None:
        """Count `size` more bytes, even above the limit, because allocated memory must be counted."""
        self.held_bytes += size
        self.use.held_bytes += size
        budget = self._budget
        if budget.within is None:
            budget.held_bytes += size
        else:
            budget.take(self.use, size)

    def has_read(self, size: int) -> None:
        """Record the size of the message that was read last. This message is not admitted yet."""
        self._budget.read_bytes += size - self._read_bytes
        self._read_bytes = size

    def give_back(self, size: int) -> None:
        self.take(-size)
        if self._found is not None:
            self.look()

    def look(self) -> None:
        """Wake the waiting code if the wanted memory is free now."""
        if self._found is not None and not self._found.done() and self._fits_now():
            if self._is_given:
                self.take(self._wanted_bytes)
            self._found.set_result(None)

    def _fits_now(self) -> bool:
        return self.fits(self._wanted_bytes, to_read=self._wants_to_read)

    async def wait_for(self, size: int, *, to_read: bool = False) -> None:
        """Wait until `size` more bytes may be held or, with `to_read`, read."""
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
        """Wait until it is this share's turn, and count `size` more bytes."""
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
