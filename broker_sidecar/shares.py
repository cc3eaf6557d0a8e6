"""How much of a sidecar each caller may use at once: what the rules say, what each uses now, and the memory of all.

`CallerShares` finds the limits of a caller; `Use` has what it uses, of the bytes a second among it. `Budget` is the
memory that clients make the sidecar hold, which is frames in flight, answers that wait to be read, and pages for
readers; `Share` is what one stream or call holds of it, for its caller's `Use`.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from seqdedupe.core.patterns import Pattern
from seqdedupe.errors import SeqdedupeError, error

BURST_SECONDS = 1.0
"""Who was silent for so long may send as much at once as in this time."""

MAX_CURSORS_A_CALLER = 8
"""In one topic, of callers for whom rules count, where their share says nothing else: a quarter of all of a topic's."""

MOVES_PER_SECOND = 10
MOVED_BYTES_PER_SECOND = 2_500
"""Moving cursors of a topic, for one caller: in an hour these are 9 MB of its log, whatever the notes hold."""

MAX_MOVE_WAIT_SECONDS = 5.0
"""A move that would have to wait for longer is refused."""

_MAX_MOVED_TOPICS = 1_000
"""Of which is remembered when a caller may move cursors again; more, as long as it may not yet."""

DISK_SECONDS = 1.0
"""What logs hold is looked at so often: so long a caller may go on that is over its share."""


@dataclass(frozen=True, slots=True)
class CallerLimits:
    """At most so much; None: as much as there is."""

    connections: int | None = None
    """From which streams are open. (Of Unix sockets nobody says which connection it is.)"""
    streams: int | None = None
    bytes_per_second: int | None = None
    """That are sent to the sidecar: on streams, by `Publish`, `Open` and `MoveCursor`."""
    bytes_in_flight: int | None = None
    """Frames that have no answer yet, and answers and pages that were not read yet."""
    producer_names: int | None = None
    """In any one topic, under which it may publish: those that are known count, whoever has made them known."""
    topics: int | None = None
    """That it may create: those that are there count, whoever has made them."""
    bytes_on_disk: int | None = None
    """In the logs of those topics, whoever has published to them."""
    cursors: int | None = None
    """In any one topic, with names that are its own: those that are there count, whoever has made them."""


NO_LIMITS = CallerLimits()
OF_NOBODY = CallerLimits(streams=16)
"""Of those who are not known, all together, whatever the rules say: they watch the health of the whole."""

IN_ALL = ("bytes_per_second", "producer_names")
"""What can be limited for all callers together; the configuration limits the others."""


@dataclass(frozen=True, slots=True)
class CallerShare:
    """What each caller with such a name may use."""

    name: str
    subjects: tuple[str, ...]
    limits: CallerLimits


class Use:
    """What one caller uses, or all of them together."""

    def __init__(self, name: str, limits: CallerLimits) -> None:
        self.name = name
        self.limits = limits
        self.held_bytes = 0
        """In flight."""
        self.disk_bytes = 0
        """On disk, at `disk_counted_at`."""
        self.disk_counted_at = -math.inf
        self._paid_until = 0.0
        """When what has come will have been as much as may come."""
        self._moves_paid_until: dict[str, float] = {}
        """The same of moved cursors, by topic."""

    def fits(self, size: int) -> bool:
        """Whether so many more bytes may be in flight. One thing may always, or it never could."""
        limit = self.limits.bytes_in_flight
        return limit is None or not self.held_bytes or self.held_bytes + size <= limit

    def spend(self, size: int, now_seconds: float) -> None:
        """So many bytes have come."""
        if (limit := self.limits.bytes_per_second) is not None:
            self._paid_until = max(self._paid_until, now_seconds - BURST_SECONDS) + size / limit

    def rest_seconds(self, now_seconds: float) -> float:
        """For how long nothing more is taken."""
        return max(0.0, self._paid_until - now_seconds) if self.limits.bytes_per_second is not None else 0.0

    def move(self, topic: str, size: int, now_seconds: float) -> float:
        """A cursor of the topic is to be moved, which adds so many bytes to its log. Returns for how long that has to
        wait. Raises SHARE_EXCEEDED, and nothing has come, if that is too long."""
        paid_until = self._moves_paid_until
        if len(paid_until) >= _MAX_MOVED_TOPICS:
            self._moves_paid_until = paid_until = {t: at for t, at in paid_until.items() if at > now_seconds}
        begins = max(paid_until.get(topic, -math.inf), now_seconds - BURST_SECONDS)
        wait_seconds = max(0.0, begins - now_seconds)
        if wait_seconds > MAX_MOVE_WAIT_SECONDS:
            delay_ms = int(wait_seconds * 1000) + 1
            raise self.exceeded("cursor_moves", "more cursor moves a second have come", delay_ms, MOVES_PER_SECOND)
        paid_until[topic] = begins + max(1 / MOVES_PER_SECOND, size / MOVED_BYTES_PER_SECOND)
        return wait_seconds

    def check(self, what: str, count: int, *, otherwise: int | None = None) -> None:
        """Raises SHARE_EXCEEDED if so many are more than it may have of this, one of the limits; `otherwise` is in
        force where it is not limited."""
        limit = getattr(self.limits, what)
        limit = otherwise if limit is None else limit
        if limit is not None and count > limit:
            raise self.exceeded(what, f"{what.replace('_', ' ')} would be {count}", limit=limit)

    def exceeded(
        self, what: str, message: str, retry_delay_ms: int | None = None, limit: int | None = None
    ) -> SeqdedupeError:
        """The error for this limit; `limit` where it is not one of its own."""
        limit = getattr(self.limits, what) if limit is None else limit
        why = f"the share of {self.name}: {message}, and {limit} is the limit"
        return error("SHARE_EXCEEDED", why, retry_delay_ms=retry_delay_ms, share=what, limit=limit)


class CallerShares:
    """The shares in force, and what each caller uses of its own."""

    def __init__(self, shares: Sequence[CallerShare], in_all: CallerLimits) -> None:
        self._shares = shares
        self._uses: dict[str, Use] = {}
        self.in_all = Use("all callers together", in_all)

    def of(self, subject: str) -> Use:
        """The use of the caller with this name; empty: of all who are not known."""
        if (use := self._uses.get(subject)) is None:
            use = self._uses[subject] = Use(
                repr(subject) if subject else "all who are not known", self._limits_of(subject)
            )
        return use

    def replace(self, shares: Sequence[CallerShare], in_all: CallerLimits) -> None:
        """These are in force from now on."""
        self._shares, self.in_all.limits = shares, in_all
        for subject, use in self._uses.items():
            use.limits = self._limits_of(subject)
            use.disk_counted_at = -math.inf  # the rules say which topics count

    def _limits_of(self, subject: str) -> CallerLimits:
        """Those of the first share that is about this caller; of an empty name, nobody's."""
        if not subject:
            return OF_NOBODY
        name = subject.encode(errors="surrogatepass")
        about = (s.limits for s in self._shares if any(Pattern(text).matches(name) for text in s.subjects))
        return next(about, NO_LIMITS)

    def rest_seconds(self, use: Use, now_seconds: float) -> float:
        """For how long nothing more is taken from this caller."""
        return max(use.rest_seconds(now_seconds), self.in_all.rest_seconds(now_seconds))

    def spend(self, use: Use, size: int, now_seconds: float) -> None:
        """So many bytes have come from this caller."""
        use.spend(size, now_seconds)
        self.in_all.spend(size, now_seconds)

    def check_rate(self, use: Use, size: int, now_seconds: float) -> None:
        """Counts a unary call's bytes. Raises SHARE_EXCEEDED, with how long to wait, if nothing more is taken now."""
        for one in (use, self.in_all):
            if rest_seconds := one.rest_seconds(now_seconds):
                delay_ms = int(rest_seconds * 1000) + 1
                raise one.exceeded("bytes_per_second", "more bytes a second have come", delay_ms)
        self.spend(use, size, now_seconds)


# -- Memory that clients make the sidecar hold: frames in flight, answers that wait to be read, pages for readers.

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
        self.within = within
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
        return free if self.within is None else min(free, self.within.free_bytes)

    def free_for(self, use: Use, *, to_read: bool = False) -> int:
        """What of this a stream of the caller may take that holds nothing."""
        if self.within is None:
            return self.limit_bytes - self.held_bytes - self.read_bytes * to_read
        return self.free_bytes - self._held_by[use]

    @property
    def gives_to_anybody(self) -> bool:
        """Whether somebody would wait for ever otherwise: for something large, or for those who publish."""
        return self.within is not None and not self.held_bytes

    def take(self, use: Use, size: int) -> None:
        """The caller holds so much more, or less."""
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
        return self.use.limits.bytes_in_flight is None or self.use.fits(size)

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
        budget = self._budget
        if budget.within is None:
            budget.held_bytes += size
        else:
            budget.take(self.use, size)

    def has_read(self, size: int) -> None:
        """The bytes of the message that has been read last and is not admitted yet."""
        self._budget.read_bytes += size - self._read_bytes
        self._read_bytes = size

    def give_back(self, size: int) -> None:
        self.take(-size)
        if self._found is not None:
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
