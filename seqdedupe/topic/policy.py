"""The values that an operator may set for a topic, for a namespace, and for the sidecar. A topic's value has precedence
over the namespace's value, and the namespace's value has precedence over the sidecar's value.

The names are the same as the fields of `TopicPolicy` in admin.proto and of `ControlPolicy` in batch.proto. So the code
here reads and fills messages of both types.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import cached_property
from typing import Any

from seqdedupe.errors import error
from seqdedupe.exports import WINDOW_CHECKSUM_BYTES
from seqdedupe.limits import FlushInterval, Retention, WindowLimits
from seqdedupe.message_id import Position
from seqdedupe.store.parts import LogKind

# -- The window of deduplication IDs that was imported into a topic. It is stored, and changes, with the topic's policy.
#
# The log states which window was imported; only the store has the IDs.


@dataclass(frozen=True, slots=True)
class ImportedWindow:
    """The checksum of the imported file, the number of IDs, and the latest publish time, in ms since 1970."""

    checksum: bytes
    ids: int
    last_time_ms: int

    def fill(self, message: Any) -> None:
        """Set the fields of a `ControlImportedWindow`."""
        message.checksum, message.ids, message.last_publish_time_ms = self.checksum, self.ids, self.last_time_ms


def imported_window_of(message: Any) -> ImportedWindow:
    """Return the imported window in a message. Raises ValueError if it is not valid."""
    if len(message.checksum) != WINDOW_CHECKSUM_BYTES or min(message.ids, message.last_publish_time_ms) < 0:
        raise ValueError("it names an imported window that cannot be")
    return ImportedWindow(message.checksum, message.ids, message.last_publish_time_ms)


# -- Named cursors: how far a reader has read a topic. They are stored with the topic's policy, and change one by one.

MAX_CURSORS = 32
"""The maximum number of cursors of a topic. All cursors are in the topic's policy, and so in each snapshot."""

MAX_NOTE_BYTES = 1024


@dataclass(frozen=True, slots=True)
class NamedCursor:
    """A cursor: its position, a note on its use, and the log size (MB) up to which retention keeps the messages after
    it (0: not at all)."""

    name: str
    position: Position
    note: str = ""
    hold_retention_in_mb: int = 0


def fill_cursors(cursors: Iterable[NamedCursor], messages: Any) -> None:
    """Add the cursors to the `ControlCursor`s or `TopicCursor`s of a message."""
    for cursor in cursors:
        fill_cursor(cursor, messages.add())


def fill_cursor(cursor: NamedCursor, message: Any) -> None:
    """Set the fields of a `ControlCursor` or `TopicCursor`."""
    message.name, message.note = cursor.name, cursor.note
    message.hold_retention_in_mb = cursor.hold_retention_in_mb
    message.position.SetInParent()
    message.position.ParseFromString(cursor.position.to_bytes())


def cursors_of(messages: Iterable[Any]) -> tuple[NamedCursor, ...]:
    """Return the cursors of a message."""
    return tuple(
        NamedCursor(one.name, Position.from_proto(one.position), one.note, one.hold_retention_in_mb) for one in messages
    )


NO_LIMIT = -1
"""The value for an unlimited retention."""

NEVER = 0
"""The value of a timeout that is disabled."""

LARGEST = 2**31 - 1

LARGEST_WINDOW = 2**40
"""The largest limit of a window, in messages or bytes."""

LONGEST_FLUSH_INTERVAL_MS = 10_000
"""The maximum interval. A client that flushes or closes a producer waits for this interval, and gives up after three
times the interval."""

BYTES_A_MB = 1024 * 1024
_MILLISECONDS_A_MINUTE = 60_000

LEAST = {
    "deduplication_entries_interval": 1,
    "deduplication_snapshot_interval_seconds": 0,
    "retention_size_in_mb": NO_LIMIT,
    "retention_time_in_minutes": NO_LIMIT,
    "deduplication_producer_inactivity_timeout_minutes": NEVER,
    "log_flush_interval_messages": 1,
    "log_flush_interval_ms": 0,
    "deduplication_window_max_messages": 1,
    "deduplication_window_max_bytes": NO_LIMIT,
    "deduplication_window_max_minutes": NO_LIMIT,
}
"""The smallest value of each numeric policy."""

MOST = {
    "log_flush_interval_ms": LONGEST_FLUSH_INTERVAL_MS,
    "deduplication_window_max_messages": LARGEST_WINDOW,
    "deduplication_window_max_bytes": LARGEST_WINDOW,
}
"""The largest values of numeric policies, if they are not LARGEST."""

ONLY_ON = {
    "overlap": LogKind.BROKER,
    "retention_size_in_mb": LogKind.EMBEDDED,
    "retention_time_in_minutes": LogKind.EMBEDDED,
    "log_flush_interval_messages": LogKind.EMBEDDED,
    "log_flush_interval_ms": LogKind.EMBEDDED,
    "deduplication_window_max_messages": LogKind.EMBEDDED,
    "deduplication_window_max_bytes": LogKind.EMBEDDED,
    "deduplication_window_max_minutes": LogKind.EMBEDDED,
}
"""The kind of log that each of these values needs. Topics on other kinds of log ignore the value."""

WINDOW = tuple(name for name in ONLY_ON if name.startswith("deduplication_window"))
"""The values that topics of sequence IDs ignore. None of these values may be 0."""


class GapPolicy(Enum):
    """The treatment of a message whose ID does not directly follow the producer's last ID. The values are the same as
    on the wire."""

    ALLOW = 1
    REJECT = 2
    """Refuse the frame, or a broker's check, with GAP. The first ID of a producer may have any value."""


class OverlapPolicy(Enum):
    """The treatment of a range in a broker's log of which only the first IDs are persisted. The values are the same as
    on the wire."""

    PULSAR = 1
    """Answer DUP, as Pulsar does. The new messages of the range are lost."""
    REJECT = 2
    """Refuse the range. Retries never help: the sender must split the range."""


class DeduplicationRoute(Enum):
    """The way in which messages with deduplication IDs are assigned to partitions. The values are the same as on the
    wire (`DeduplicationRoute`)."""

    ID = 1
    KEY = 2
    """Every message must have a key."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The values set for one topic or one namespace; the policy is always replaced as a whole. The value None means
    that the value is inherited."""

    deduplication_enabled: bool | None = None
    overlap: OverlapPolicy | None = None
    deduplication_entries_interval: int | None = None
    deduplication_snapshot_interval_seconds: int | None = None
    retention_size_in_mb: int | None = None
    retention_time_in_minutes: int | None = None
    gap: GapPolicy | None = None
    deduplication_producer_inactivity_timeout_minutes: int | None = None
    log_flush_interval_messages: int | None = None
    log_flush_interval_ms: int | None = None
    deduplication_window_max_messages: int | None = None
    deduplication_window_max_bytes: int | None = None
    deduplication_window_max_minutes: int | None = None
    by_deduplication_id: bool = False
    """Whether the topic is a topic of deduplication IDs. This is permanent: it is set only when the topic is
    created."""
    route: DeduplicationRoute | None = None
    """The route of a partition of a topic of deduplication IDs. This is permanent, too."""
    cursors: tuple[NamedCursor, ...] = ()
    """The cursors, sorted by name. Operators do not set them like the values in `NAMES`, but they are stored and
    changed together with the values."""
    imported: ImportedWindow | None = None
    """The import into a topic of deduplication IDs, until all imported IDs have expired. It is stored like the
    cursors."""

    def with_values_of(self, other: "Policy") -> "Policy":
        """Return this policy with the values that are set in the other policy."""
        return replace(self, **_values(other))

    def without(self, names: list[str]) -> "Policy":
        """Return this policy without the values of these names (no names: without any values). Raises
        INVALID_REQUEST."""
        for name in names:
            if name not in NAMES:
                raise error("INVALID_REQUEST", f"no policy is named {name!r}: there are {', '.join(NAMES)}")
        none: dict[str, Any] = dict.fromkeys(names or NAMES)
        return replace(self, **none)

    def check(self) -> "Policy":
        """Raise INVALID_REQUEST if a number is out of its range."""
        for name, least in LEAST.items():
            value = getattr(self, name)
            most = MOST.get(name, LARGEST)
            if value is not None and not least <= value <= most:
                raise error("INVALID_REQUEST", f"{name} is {value}: it should be {least} to {most}")
            if name in WINDOW and value == 0:
                raise error("INVALID_REQUEST", f"{name} is 0: then no copy would be recognized; it should be 1 or more")
        return self

    def check_has_effect(self, log: LogKind) -> "Policy":
        """Raise INVALID_REQUEST if a value is set that topics on this kind of log ignore."""
        for name in _values(self).keys() & ONLY_ON.keys():
            if ONLY_ON[name] is not log:
                where = "a broker's own log" if ONLY_ON[name] is LogKind.BROKER else "the sidecar's own log"
                raise error("INVALID_REQUEST", f"{name} has an effect only on topics on {where}, and these are not")
        return self

    def check_fits(self, *, by_deduplication_id: bool) -> "Policy":
        """Raise INVALID_REQUEST if a value is set that topics of this mode ignore."""
        if not by_deduplication_id and (name := next(iter(_values(self).keys() & set(WINDOW)), None)):
            raise error("INVALID_REQUEST", f"{name} has an effect only on topics of deduplication IDs, and this is not")
        return self

    def fill(self, message: Any) -> None:
        """Set the fields of a `TopicPolicy` or `ControlPolicy`."""
        for name, value in _values(self).items():
            setattr(message, name, value.value if isinstance(value, Enum) else value)

    @staticmethod
    def of(message: Any) -> "Policy":
        """Return the values set in a `TopicPolicy` or `ControlPolicy`. Raises ValueError for a value unknown to this
        version.

        The ranges of numbers are not checked.
        """
        values = {name: getattr(message, name) for name in NAMES if message.HasField(name)}
        for name, kind in (("gap", GapPolicy), ("overlap", OverlapPolicy)):
            if name in values:
                values[name] = kind(values[name])
        return Policy(**values)

    @staticmethod
    def of_request(message: Any) -> "Policy":
        """Return the values set in a `TopicPolicy` of a request. Raises INVALID_REQUEST for invalid values."""
        try:
            return Policy.of(message).check()
        except ValueError as e:
            raise error("INVALID_REQUEST", f"the policy has a value that this sidecar does not know: {e}") from e


_NO_VALUES = ("cursors", "by_deduplication_id", "route", "imported")
NAMES = tuple(item.name for item in fields(Policy) if item.name not in _NO_VALUES)


@dataclass(frozen=True)
class Applied:
    """The policy in force: like `Policy`, but every value is set. Each frame uses it, so values that are computed from
    it are cached."""

    deduplication_enabled: bool = True
    """False: rows that would be DUP or UNKNOWN are NOT_DUP. Sessions, links, failures and numbers do not change."""
    overlap: OverlapPolicy = OverlapPolicy.REJECT
    """See `ONLY_ON`."""
    deduplication_entries_interval: int = 1000
    """The number of stored batches after which a snapshot is taken."""
    deduplication_snapshot_interval_seconds: float = 120
    """The time from the first change since the last snapshot until the next snapshot; 0: no snapshot by time."""
    retention_size_in_mb: int = NO_LIMIT
    retention_time_in_minutes: int = NO_LIMIT
    gap: GapPolicy = GapPolicy.ALLOW
    deduplication_producer_inactivity_timeout_minutes: int = NEVER
    """The time after which an unused producer is forgotten."""
    log_flush_interval_messages: int = 1
    """See `ONLY_ON`. The log is synced when this number of messages is written and not synced, or after
    `log_flush_interval_ms`."""
    log_flush_interval_ms: int = 0
    """The log is also synced when the first unsynced message is this old. The default is every commit."""
    deduplication_window_max_messages: int = 10_000_000
    """See `TopicPolicy` in admin.proto."""
    deduplication_window_max_bytes: int = 2**30
    deduplication_window_max_minutes: int = NO_LIMIT

    @cached_property
    def flush_interval(self) -> FlushInterval:
        """The flush interval, in the form that the log needs."""
        return FlushInterval(self.log_flush_interval_messages, self.log_flush_interval_ms)

    @cached_property
    def window(self) -> WindowLimits:
        """The limits, in the form that the window of deduplication IDs needs."""
        minutes = self.deduplication_window_max_minutes
        return WindowLimits(
            self.deduplication_window_max_messages,
            self.deduplication_window_max_bytes,
            NO_LIMIT if minutes < 0 else minutes * _MILLISECONDS_A_MINUTE,
        )

    @cached_property
    def retention(self) -> Retention:
        """The retention, in the units that the log needs."""
        size_mb, minutes = self.retention_size_in_mb, self.retention_time_in_minutes
        return Retention(
            None if size_mb < 0 else size_mb * BYTES_A_MB,
            None if minutes < 0 else minutes * _MILLISECONDS_A_MINUTE,
        )

    @property
    def forgets(self) -> bool:
        """Whether the topic forgets unused producers: never while deduplication is disabled, as in Pulsar."""
        return self.deduplication_enabled and self.deduplication_producer_inactivity_timeout_minutes != NEVER

    def fill(self, message: Any) -> None:
        """Set the fields of a message, like `Policy.fill`."""
        Policy(*(getattr(self, name) for name in NAMES)).fill(message)

    def under(self, policy: Policy) -> "Applied":
        """Return the policy in force for a topic that inherits this policy and sets `policy`."""
        return replace(self, **_values(policy))


def _values(policy: Policy) -> dict[str, Any]:
    """Return the values that are set, by name."""
    return {name: value for name in NAMES if (value := getattr(policy, name)) is not None}
