"""Who makes a call, as the sidecar knows it."""

import math
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv6Address
from typing import Literal
from urllib.parse import unquote

from seqdedupe.core.patterns import Pattern
from seqdedupe.errors import SeqdedupeError, error

OPERATOR = "operator"
"""The subject of the data directory's own token."""
ANONYMOUS = "anonymous"
"""Everybody, where `authentication = "none"`."""
RESERVED = frozenset({OPERATOR, ANONYMOUS})
"""No other token and no certificate makes a subject of such a name."""

MAX_NAME_BYTES = 255

_NETWORK_BYTES = 8
"""Of an IPv6 address: who has one has all that begin so."""


def can_be_name(name: str) -> bool:
    """Whether somebody may be called so: 1 to 255 bytes that can be printed."""
    return name.isprintable() and 0 < len(name.encode()) <= MAX_NAME_BYTES


def host_of(address: str) -> str:
    """A peer's address, as gRPC writes it, without its port: another connection of the same client is no other one."""
    return address.rpartition(":")[0] if address.startswith("ipv") else address.partition(":")[0]


def network_of(address: str) -> str:
    """The host, or of IPv6 the network that it can have any address of."""
    host = host_of(address)
    if not host.startswith("ipv6:"):
        return host
    text = unquote(host.removeprefix("ipv6:")).strip("[]").partition("%")[0]
    try:
        found = IPv6Address(text)
    except AddressValueError:
        return host
    if found.ipv4_mapped:
        return f"ipv4:{found.ipv4_mapped}"
    return f"ipv6:{IPv6Address(found.packed[:_NETWORK_BYTES].ljust(16, bytes(1)))}/64"


@dataclass(frozen=True, slots=True)
class Subject:
    """Who makes a call, and by what that is known."""

    name: str
    """Empty for one who is not known, who may ask for the health of the whole alone."""
    kind: Literal["token", "jwt", "certificate", "nobody"]
    """`token` is that of the data directory."""
    expires_at_seconds: float | None
    """Unix time, of a token that expires."""
    address: str
    """The caller's end of the connection, as gRPC writes it."""

    @property
    def is_unrestricted(self) -> bool:
        """Whether no rule is asked: the operator, and everybody where nobody is asked who they are."""
        return self.kind == "token" or (self.kind == "nobody" and self.name == ANONYMOUS)


_caller: ContextVar[Subject] = ContextVar("caller")


def caller() -> Subject:
    """Who makes the call that is being handled. A task that a handler makes has the same caller, however long it lives.

    Raises LookupError outside of a call.
    """
    return _caller.get()


def set_caller(subject: Subject) -> None:
    """From now on the caller of this task, and of those that it makes, is this one."""
    _caller.set(subject)


# -- How much of a sidecar each caller may use at once, and what each uses now.

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
class Limits:
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


NO_LIMITS = Limits()
OF_NOBODY = Limits(streams=16)
"""Of those who are not known, all together, whatever the rules say: they watch the health of the whole."""

IN_ALL = ("bytes_per_second", "producer_names")
"""What can be limited for all callers together; the configuration limits the others."""


@dataclass(frozen=True, slots=True)
class Share:
    """What each caller with such a name may use."""

    name: str
    subjects: tuple[str, ...]
    limits: Limits


class Use:
    """What one caller uses, or all of them together."""

    def __init__(self, name: str, limits: Limits) -> None:
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


class Shares:
    """The shares in force, and what each caller uses of its own."""

    def __init__(self, shares: Sequence[Share], in_all: Limits) -> None:
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

    def replace(self, shares: Sequence[Share], in_all: Limits) -> None:
        """These are in force from now on."""
        self._shares, self.in_all.limits = shares, in_all
        for subject, use in self._uses.items():
            use.limits = self._limits_of(subject)
            use.disk_counted_at = -math.inf  # the rules say which topics count

    def _limits_of(self, subject: str) -> Limits:
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
