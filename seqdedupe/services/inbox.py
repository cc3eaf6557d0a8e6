"""The inbox: messages take effect in the order of their versions, in any order of arrival. An `Inbox` is placed in
front of a handler. It restores the order of the versions that the application has given to the messages.

The tables come first, with the queries that need no handler. Then come the decision about a message, and `Inbox`.
"""

import hashlib
import json
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, Literal, NamedTuple

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Engine,
    Index,
    MetaData,
    Row,
    String,
    delete,
    insert,
    select,
    update,
)
from sqlalchemy.dialects import mysql, postgresql, sqlite

from seqdedupe.client.message import Message
from seqdedupe.databases.failures import Fault, fault_of, lost_connection
from seqdedupe.databases.tables import MARIADB, make_tables, name_type, table, text_type
from seqdedupe.errors import error
from seqdedupe.services.consumer.consumer import purpose_of
from seqdedupe.services.consumer.database import Away, content_columns, reaching
from seqdedupe.services.consumer.dead_letters import content, message_of, why
from seqdedupe.services.consumer.work import check_deferred

# -- The tables of inboxes, in the user's database.

METADATA = MetaData()

KEYS = table(
    "seqdedupe_inbox_keys",
    METADATA,
    Column("inbox", name_type(100), primary_key=True),
    Column("name", name_type(), primary_key=True),
    Column("version", BigInteger, nullable=False),
    Column("dropped", BigInteger, nullable=False),
    Column("locked", BigInteger, nullable=False),
)
"""One row for each key: the last version applied, and the number of messages dropped. Every transaction that decides
about the key changes `locked`. This update blocks all other such transactions, even at an isolation level that reads
from a snapshot."""

PARKED = table(
    "seqdedupe_inbox_parked",
    METADATA,
    Column("id", String(32), primary_key=True),
    Column("inbox", name_type(100), nullable=False),
    Column("waits_for_key", name_type(), nullable=False),
    Column("waits_for_version", BigInteger, nullable=False),
    Column("versions", text_type(), nullable=False),
    Column("parked_ms", BigInteger, nullable=False),
    *content_columns(),
)
"""One row for each message that arrived too early: the message's versions by key (JSON), and one version that the
message waits for."""

Index("seqdedupe_inbox_waits", PARKED.c.inbox, PARKED.c.waits_for_key, PARKED.c.waits_for_version)


class Waiting(NamedTuple):
    """A message that is parked."""

    message: Message
    versions: Mapping[str, int]
    """The version that the message has for each of its keys."""

    missing: Mapping[str, int]
    """For each key, the version that must be applied before this message and is not applied yet. Empty if the handler
    has failed for the message itself."""

    seconds: float
    """The time in seconds since the message was parked."""

    error: str
    """The error of the handler when it was called for this message; empty if it was not called yet."""

    in_cycle: bool
    """Whether the message waits, through other messages, for itself. No further message can end such a wait."""


def in_cycles(parked: Sequence[tuple[Mapping[str, int], Mapping[str, int]]]) -> list[bool]:
    """Return for each parked message whether the message waits for itself, through other parked messages. Each item of
    `parked` contains the message's versions, and the versions for which the message waits.

    A message is in a cycle if its strongly connected component has more than one message, or an edge from the message
    to itself.
    """
    provider = {(key, version): i for i, (versions, _) in enumerate(parked) for key, version in versions.items()}
    needs = [sorted({provider[wanted] for wanted in missing.items() if wanted in provider}) for _, missing in parked]
    found = [False] * len(parked)
    for part in _connected(needs):
        if len(part) > 1 or part[0] in needs[part[0]]:
            for i in part:
                found[i] = True
    return found


def _connected(edges: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the strongly connected components, by Tarjan's algorithm without recursion, because chains may be long."""
    order: dict[int, int] = {}
    low: dict[int, int] = {}
    on_stack: set[int] = set()
    stack: list[int] = []
    parts: list[list[int]] = []
    for root in range(len(edges)):
        if root in order:
            continue
        work = [(root, 0)]
        while work:
            node, next_edge = work.pop()
            if next_edge == 0:
                order[node] = low[node] = len(order)
                stack.append(node)
                on_stack.add(node)
            else:
                low[node] = min(low[node], low[edges[node][next_edge - 1]])
            for i in range(next_edge, len(edges[node])):
                target = edges[node][i]
                if target not in order:
                    work += [(node, i + 1), (target, 0)]
                    break
                if target in on_stack:
                    low[node] = min(low[node], order[target])
            else:
                if low[node] == order[node]:
                    part: list[int] = []
                    while not part or part[-1] != node:
                        part.append(stack.pop())
                        on_stack.discard(part[-1])
                    parts.append(part)
    return parts


# -- Queries of people about parked messages. They need no handler.


def waiting_in(engine: Engine, name: str, longer_than_seconds: float = 0.0) -> list[Waiting]:
    """Return the messages that the inbox with this name has parked for longer than this time. The message parked
    longest comes first."""
    with engine.begin() as connection:
        mine = select(PARKED).where(PARKED.c.inbox == name).order_by(PARKED.c.parked_ms, PARKED.c.id)
        rows = connection.execute(mine).all()
        names = select(KEYS.c.name, KEYS.c.version).where(KEYS.c.inbox == name)
        applied = {row.name: row.version for row in connection.execute(names)}
    parked = []
    for row in rows:
        versions: dict[str, int] = json.loads(row.versions)
        missing = {key: version - 1 for key, version in versions.items() if applied.get(key, -1) < version - 1}
        parked.append((versions, missing))
    now_ms = time.time_ns() // 1_000_000
    found = [
        Waiting(message_of(row), versions, missing, (now_ms - row.parked_ms) / 1000, row.error, is_in_cycle)
        for row, (versions, missing), is_in_cycle in zip(rows, parked, in_cycles(parked), strict=True)
    ]
    return [one for one in found if one.seconds >= longer_than_seconds]


def check_used(engine: Engine, name: str) -> None:
    """Raise INVALID_OPTION if no message has passed an inbox with this name in this database."""
    with engine.begin() as connection:
        for table in (KEYS, PARKED):
            if connection.execute(select(table.c.inbox).where(table.c.inbox == name).limit(1)).first():
                return
    what = f"no message has passed an inbox {name!r} in this database"
    raise error("INVALID_OPTION", what, hint="Check the inbox's name.")


# -- The decision about a message, from its versions and those applied. It does no I/O.

Order = Literal["contiguous", "latest"]

MAX_VERSION = 2**63 - 1
MAX_KEY_LENGTH = 255

Versions = Mapping[str, int]
"""By key: the version of the key that a message has, or the last version applied."""


class InboxVerdict(Enum):
    APPLY = "apply"
    DROP = "drop"
    PARK = "park"


class InboxDecision(NamedTuple):
    """The decision about a message. The decision PARK also contains a key, and the version of this key that must be
    applied before the message."""

    verdict: InboxVerdict
    key: str = ""
    version: int = 0


def decide(order: Order, wanted: Versions, applied: Versions) -> InboxDecision:
    """Decide what happens to a message.

    - DROP: no version of the message is above the last version applied for its key.
    - APPLY: all versions of the message are above the last versions applied. With "contiguous", the preceding version
      of every key must also have been applied.
    - PARK: with "contiguous", if a preceding version is not applied yet. The message waits for the first key for which
      this is the case.

    Raises INVALID_VERSION if some versions of the message are above the last versions applied and others are not: then
    two messages claim the same version.
    """
    passed = [key for key in sorted(wanted) if wanted[key] <= applied[key]]
    if len(passed) == len(wanted):
        return InboxDecision(InboxVerdict.DROP)
    if passed:
        rest = sorted(set(wanted).difference(passed))
        raise error(
            "INVALID_VERSION",
            f"version {wanted[passed[0]]} of {passed[0]!r} was applied already ({applied[passed[0]]} is the last one), "
            f"and version {wanted[rest[0]]} of {rest[0]!r} was not: they should come in one message",
        )
    if order == "contiguous":
        for key in sorted(wanted):
            if wanted[key] - 1 != applied[key]:
                return InboxDecision(InboxVerdict.PARK, key, wanted[key] - 1)
    return InboxDecision(InboxVerdict.APPLY)


def name_of(key: str | bytes) -> str:
    """Return the name of a key in the tables. Two different keys never have the same name. Bytes that are valid UTF-8
    are the same key as the text that they encode. The name of all other bytes is a hash."""
    if isinstance(key, str):
        return key
    try:
        name = key.decode()
    except UnicodeDecodeError:
        name = ""
    return name if _is_name(name) else "bytes:" + hashlib.sha256(b"seqdedupe inbox key\x00" + key).hexdigest()


def _is_name(text: str) -> bool:
    return 1 <= len(text) <= MAX_KEY_LENGTH and "\x00" not in text


def former_name_of(key: str | bytes) -> str | None:
    """Return the name that earlier versions of this product gave to a key of bytes that are not UTF-8. Several keys may
    have shared this name. Return None for all other keys."""
    former = key.decode(errors="replace") if isinstance(key, bytes) else key
    return former if former != name_of(key) and _is_name(former) else None


def checked(found: object) -> dict[str, int]:
    """Return the versions unchanged if they are valid. Raises INVALID_VERSION."""
    if not isinstance(found, Mapping) or not found:
        raise error("INVALID_VERSION", f"the versions are {found!r:.80}: they should be a mapping of keys to numbers")
    versions: dict[str, int] = {}
    for key, version in found.items():
        name = name_of(key) if isinstance(key, str | bytes) and key else ""
        if not _is_name(name):
            what = f"the key {key!r:.80} should be bytes, or text of 1 to {MAX_KEY_LENGTH} characters"
            raise error("INVALID_VERSION", what)
        if name in versions:
            raise error("INVALID_VERSION", f"the key {name!r:.80} has two versions, as text and as bytes")
        if isinstance(version, bool) or not isinstance(version, int) or not 0 <= version <= MAX_VERSION:
            raise error(
                "INVALID_VERSION",
                f"the version of {name!r:.80} is {version!r:.80}: it should be a number from 0 to {MAX_VERSION}",
            )
        versions[name] = version
    return versions


Handle = Callable[[Connection, Message], object]

MAX_NAME_LENGTH = 100

_MOST_LOSSES = 2
"""A parked message is skipped if the connection was lost this number of times while the message was handled. The number
is lower than the number after which a consumer blames the message that caused the call."""

_REPLACED = "\N{REPLACEMENT CHARACTER}"
"""The replacement character, which is in names that earlier versions gave to keys of bytes that are not UTF-8."""


class Inbox:
    """A handler that orders messages and passes them to an inner handler: `Consumer(client, topic, name, engine,
    Inbox(…), in_batches=True)`.

    With `in_batches` the inbox locks all keys of a batch together. The inner handler still receives single messages.
    Without `in_batches`, consumers that share the inbox may run into deadlocks, which cost time.

    `key(message)` returns the key of a message, and `version(message)` returns the message's version of this key.
    Alternatively, `versions(message)` returns the versions of several keys together (`{"X": 4, "Y": 7}`: a transfer
    between two accounts). `order` has one of these values:

    * "contiguous": a message is handled after the preceding version of each of its keys. A message that arrives too
      early is parked, in the consumer's transaction. The parked message is handled in the same transaction as the
      message for which it waits. The first version of every key is `first_version`.
    * "latest": a message is handled if its version is above the last version handled.

    With either value, a message that is not above the last version is dropped and counted. So every version takes
    effect at most once and in order, with any number of topics and consumers that share the inbox. Before the decision,
    the inbox locks the rows of all keys of a message, in sorted order. `waiting` lists the messages that stay parked,
    with the reason. Without an action by a person, they stay parked.

    If the handler refuses a parked message when its turn comes, the message stays parked with the error. The messages
    that wait for it stay parked too. `sweep` tries such messages again. Raises INVALID_OPTION, and INVALID_OUTPUT if
    the tables cannot be made. If the database is unavailable, the consumer waits for the database, and the tables are
    made later. For a message without a key or a version, the inbox raises INVALID_VERSION to the consumer, like an
    exception of the handler for the message that has just arrived.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        handle: Handle,
        *,
        key: Callable[[Message], str | bytes] | None = None,
        version: Callable[[Message], int] | None = None,
        versions: Callable[[Message], Mapping[str, int]] | None = None,
        order: Order = "contiguous",
        first_version: int = 1,
    ) -> None:
        if not 1 <= len(name) <= MAX_NAME_LENGTH or not name.isprintable():
            raise _option(
                f"the inbox's name is {name[:80]!r}: it should be 1 to {MAX_NAME_LENGTH} printable characters"
            )
        if (key is None) != (version is None) or (key is None) == (versions is None):
            raise _option("an inbox takes key and version, or versions")
        if order not in ("contiguous", "latest") or not 0 <= first_version <= MAX_VERSION:
            raise _option(
                f"the order is {order!r} from {first_version}: it should be 'contiguous' or 'latest', from 0 up"
            )
        self.name = name
        self._engine = engine
        self._handle = handle
        self._key, self._version, self._versions = key, version, versions
        self._order = order
        self._losses: dict[str, list[str]] = {}
        self._before_all = first_version - 1 if order == "contiguous" else -1
        # When another process takes the consumer over, the purpose must be the same, with or without an inbox in front
        # of the handler.
        self.__module__, self.__qualname__ = "inbox", f"{name}({purpose_of(handle)})"
        self._away: Away | None = None
        """The reason why the tables may not exist yet."""
        try:
            self._make_tables()
        except Away as e:
            self._away = e

    def _make_tables(self) -> None:
        with reaching(at_start=True):
            make_tables(self._engine, METADATA)
        self._away = None

    def __call__(self, connection: Connection, message: Message | list[Message]) -> None:
        """Handle one message or a batch, as the handler of a consumer."""
        if self._away is not None:
            # The tables cannot be made within this transaction: SQLite allows only one writer, and MariaDB would
            # commit.
            raise Away(self._away.cause, " (when the inbox was made; its tables are made next)", self._make_tables)
        messages = message if isinstance(message, list) else [message]
        each = [(one, self._of(one)) for one in messages]
        if len(each) > 1:
            # Lock all keys at once: two batches that lock the same keys in different orders would wait for each other.
            self._lock(connection, {key for _, wanted in each for key in wanted})
        for one, wanted in each:
            self._take(connection, one, wanted)

    def _take(self, connection: Connection, message: Message, wanted: Mapping[str, int]) -> None:
        applied = self._lock(connection, wanted)
        applied |= self._continued(connection, message, wanted, applied)
        decision = decide(self._order, wanted, applied)
        if decision.verdict is InboxVerdict.DROP:
            self._count_dropped(connection, wanted)
        elif decision.verdict is InboxVerdict.PARK:
            connection.execute(
                insert(PARKED).values(
                    id=uuid.uuid4().hex,
                    inbox=self.name,
                    waits_for_key=decision.key,
                    waits_for_version=decision.version,
                    versions=json.dumps(wanted),
                    parked_ms=_now_ms(),
                    **content(message, 0, ""),
                )
            )
        else:
            self._handle(connection, message)
            self._apply(connection, wanted)
            self._wake(connection, wanted)

    def _of(self, message: Message) -> dict[str, int]:
        return checked(self._given(message))

    def _given(self, message: Message) -> Mapping[Any, Any]:
        if self._versions is not None:
            return self._versions(message)
        if self._key is None or self._version is None:
            raise _option("an inbox takes key and version, or versions")
        return {self._key(message): self._version(message)}

    def _continued(
        self, connection: Connection, message: Message, wanted: Mapping[str, int], applied: Mapping[str, int]
    ) -> dict[str, int]:
        """Return the versions of the keys that are new under their present name but had a row under their former name.
        If the message has the next version after that row, the key continues with this version. Several keys may have
        shared that row, so otherwise the key begins again."""
        found: dict[str, int] = {}
        for key in self._given(message) if self._order == "contiguous" else ():
            name, former = name_of(key), former_name_of(key)
            if former is not None and applied[name] == self._before_all:
                row = connection.execute(select(KEYS.c.version).where(self._is(former))).one_or_none()
                if row is not None and row.version == wanted[name] - 1:
                    found[name] = row.version
        return found

    def _lock(self, connection: Connection, keys: Iterable[str]) -> dict[str, int]:
        """Lock these keys until the transaction ends, so that no other transaction decides about them. Return the last
        versions applied."""
        names = sorted(keys)
        for name in names:
            connection.execute(
                _insert_if_missing(connection.dialect.name),
                {"inbox": self.name, "name": name, "version": self._before_all, "dropped": 0, "locked": 0},
            )
        for name in names:
            connection.execute(update(KEYS).where(self._is(name)).values(locked=KEYS.c.locked + 1))
        wanted = select(KEYS.c.name, KEYS.c.version).where((KEYS.c.inbox == self.name) & KEYS.c.name.in_(names))
        return {row.name: row.version for row in connection.execute(wanted.with_for_update())}

    def _is(self, name: str) -> Any:
        return (KEYS.c.inbox == self.name) & (KEYS.c.name == name)

    def _apply(self, connection: Connection, wanted: Mapping[str, int]) -> None:
        for name in sorted(wanted):
            connection.execute(update(KEYS).where(self._is(name)).values(version=wanted[name]))

    def _count_dropped(self, connection: Connection, wanted: Mapping[str, int]) -> None:
        for name in sorted(wanted):
            connection.execute(update(KEYS).where(self._is(name)).values(dropped=KEYS.c.dropped + 1))

    def _wake(self, connection: Connection, applied: Mapping[str, int]) -> None:
        """Decide again about all messages that wait for these versions. If such a message is applied, also decide again
        about the messages that wait for the versions of the applied message."""
        pending = sorted(applied.items())
        while pending:
            key, version = pending.pop()
            waits = (PARKED.c.inbox == self.name) & (PARKED.c.waits_for_key == key)
            # Use a locking read: in MariaDB, a plain read shows the state at the transaction's first read.
            wanted = select(PARKED).where(waits & (PARKED.c.waits_for_version == version)).with_for_update()
            for row in connection.execute(wanted.order_by(PARKED.c.parked_ms, PARKED.c.id)).all():
                pending += self._look_again(connection, row).items()

    def _look_again(self, connection: Connection, row: Row[Any]) -> Mapping[str, int]:
        """Decide again about a parked message. Return the versions that were applied."""
        wanted: dict[str, int] = json.loads(row.versions)
        this = PARKED.c.id == row.id
        if len(losses := self._losses.get(row.id, [])) >= _MOST_LOSSES:
            # The transaction of the message that caused this call was lost with the connection, too.
            del self._losses[row.id]
            connection.execute(update(PARKED).where(this).values(attempts=PARKED.c.attempts + 1, error=losses[-1]))
            return {}
        if any(_REPLACED in name for name in wanted):
            message = message_of(row)
            wanted = self._of(message)
            applied = self._lock(connection, wanted)
            applied |= self._continued(connection, message, wanted, applied)
        else:
            applied = self._lock(connection, wanted)
        try:
            decision = decide(self._order, wanted, applied)
            if decision.verdict is InboxVerdict.PARK:
                waits = {"waits_for_key": decision.key, "waits_for_version": decision.version}
                values = waits | {"versions": json.dumps(wanted)}
                connection.execute(update(PARKED).where(this).values(**values))
                return {}
            # If the handler fails, only the effects of this message are undone: the message that caused this call is
            # not responsible.
            with connection.begin_nested():
                if decision.verdict is InboxVerdict.DROP:
                    self._count_dropped(connection, wanted)
                else:
                    self._handle(connection, message_of(row))
                    self._apply(connection, wanted)
                connection.execute(delete(PARKED).where(this))
                check_deferred(connection)
            self._losses.pop(row.id, None)
        except Exception as e:
            if lost_connection(e):
                self._losses.setdefault(row.id, []).append(why(e))
                raise
            if fault_of(e) in (Fault.DATABASE, Fault.REPEAT):
                raise
            connection.execute(update(PARKED).where(this).values(attempts=PARKED.c.attempts + 1, error=why(e)))
            return {}
        return wanted if decision.verdict is InboxVerdict.APPLY else {}

    def sweep(self) -> int:
        """Try all parked messages again, each in a separate transaction. Return the number of messages that are no
        longer parked.

        Use this for messages that the handler has refused, or that were skipped for another reason. Consumers may run
        at the same time.
        """
        mine = PARKED.c.inbox == self.name
        with self._engine.begin() as connection:
            ids = connection.execute(select(PARKED.c.id).where(mine).order_by(PARKED.c.parked_ms)).scalars().all()
        for one in ids:
            with self._engine.begin() as connection:
                # Lock the keys first, as in all transactions. The row may be deleted by then.
                row = connection.execute(select(PARKED).where(PARKED.c.id == one)).one_or_none()
                if row is None:
                    continue
                self._lock(connection, json.loads(row.versions))
                still = connection.execute(select(PARKED).where(PARKED.c.id == one).with_for_update()).one_or_none()
                if still is not None:
                    self._wake(connection, self._look_again(connection, still))
        with self._engine.begin() as connection:
            left = connection.execute(select(PARKED.c.id).where(mine & PARKED.c.id.in_(ids))).scalars().all()
        return len(ids) - len(left)

    def waiting(self, longer_than_seconds: float = 0.0) -> list[Waiting]:
        """Return the messages parked for longer than this time, with their missing versions, and whether they are in a
        cycle. The message parked longest comes first."""
        return waiting_in(self._engine, self.name, longer_than_seconds)


def _insert_if_missing(dialect: str) -> Any:
    if dialect in MARIADB:
        return mysql.insert(KEYS).prefix_with("IGNORE")
    return (postgresql.insert(KEYS) if dialect == "postgresql" else sqlite.insert(KEYS)).on_conflict_do_nothing()


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _option(what: str) -> Exception:
    return error("INVALID_OPTION", what, hint="docs/guides/inbox.md lists the messages that an inbox accepts.")
