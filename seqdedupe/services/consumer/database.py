"""The consumer's database: the consumer's tables and rows, errors if the database cannot be used, and the detection of
tables without transactions.

Begin with `RowLease`: one process's lease on a consumer's row. The row contains the consumer's position and the working
process. For a partitioned topic there is one such row for each partition. The processes that share the partitions have
separate rows (`Processes`). `fair_share` is the number of partitions for each process.
"""

import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, cast

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Engine,
    Integer,
    MetaData,
    String,
    Table,
    delete,
    event,
    insert,
    select,
    text,
    update,
)
from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError

from seqdedupe.client.route import OnWaiting
from seqdedupe.databases.failures import Fault, codes_of, fault_of, refuses_entry, told
from seqdedupe.databases.tables import MARIADB, NO_AUTOCOMMIT, bytes_type, cure_of, name_type, table, text_type
from seqdedupe.errors import SeqdedupeError, UnavailableError, error
from seqdedupe.message_id import Position

# -- The tables of consumers, in the user's database, next to the data that the handlers write.

FORMAT_VERSION = 2
"""The format of a row of `CONSUMERS` that is made now. The consumer of a row of format 1 has no identity."""

METADATA = MetaData()

CONSUMERS = table(
    "seqdedupe_consumers",
    METADATA,
    Column("name", name_type(), primary_key=True),
    Column("format_version", Integer, nullable=False),
    Column("topic", name_type(), nullable=False),
    Column("purpose", name_type(), nullable=False),
    Column("position", String(255), nullable=False),
    Column("owner", String(32), nullable=False),
    Column("beat", BigInteger, nullable=False),
)
"""One row for each consumer: its position, the process that works (empty: none), and a counter, the beat, which shows
that this process is alive."""

IDENTITIES = table(
    "seqdedupe_consumer_identities",
    METADATA,
    Column("name", name_type(), primary_key=True),
    Column("identity", String(32), nullable=False),
)
"""A random identity for each row of `CONSUMERS`, made in the same transaction. It is in the deduplication IDs of dead
letters, and differs from that of a consumer with this name in another database."""

PROCESSES = table(
    "seqdedupe_consumer_processes",
    METADATA,
    Column("consumer", name_type(), primary_key=True),
    Column("token", String(32), primary_key=True),
    Column("beat", BigInteger, nullable=False),
)
"""One row for each process that runs a consumer of a partitioned topic, with a counter, the beat, which shows that the
process is alive. The rows of partitions contain the token of their owner."""


def content_columns() -> list[Column[Any]]:
    """Return the columns of a complete message. `dead_letters.content` fills these columns, and
    `dead_letters.message_of` reads them."""
    return [
        Column("position", String(255), nullable=False),
        Column("message_key", bytes_type()),
        Column("deduplication_id", bytes_type()),
        Column("payload", bytes_type()),
        Column("properties", text_type(), nullable=False),
        Column("producer_name", text_type(), nullable=False),
        Column("sequence_id", BigInteger, nullable=False),
        Column("event_time_ms", BigInteger, nullable=False),
        Column("publish_time_ms", BigInteger, nullable=False),
        Column("attempts", Integer, nullable=False),
        Column("error", text_type(), nullable=False),
    ]


def _message_columns() -> list[Column[Any]]:
    """Return the columns for a message, and for the consumer that has set the message aside."""
    return [
        Column("consumer", name_type(), primary_key=True),
        Column("incarnation", BigInteger, primary_key=True, autoincrement=False),
        Column("message_index", BigInteger, primary_key=True, autoincrement=False),
        Column("topic", name_type(), nullable=False),
        *content_columns(),
    ]


DEAD_LETTERS = table(
    "seqdedupe_dead_letters",
    METADATA,
    *_message_columns(),
    Column("given_up_ms", BigInteger, nullable=False),
    Column("dead_letter_topic", name_type()),
)
"""Messages that were given up. A row with a topic waits to be published to that topic, and is then deleted. A row
without a topic stays until a person handles it."""

PARKED = table(
    "seqdedupe_parked",
    METADATA,
    *_message_columns(),
    Column("key_hash", String(64), index=True),
    Column("next_attempt_ms", BigInteger, index=True),
)
"""Messages to try again later. Only the first message of a key has a time for the next attempt; later messages of the
key wait for it. The key's column contains the SHA-256 of the key, because long keys cannot be indexed."""

# -- Errors if the database cannot be used, the sessions that lock a row, and tables without transactions.

_NO_SAVEPOINT = 1178
_NOT_ROLLED_BACK = 1196
"""The codes that MariaDB reports after a rollback of a write to a table without transactions. One code is for storage
engines without savepoints, the other for all other engines."""

_TABLES_MADE = "SHOW SESSION STATUS WHERE variable_name RLIKE '^Com_(create|drop)_(temporary_)?table$'"

_WRITES = re.compile(r"\s*(?:insert|update|delete|replace|load|with|call)\b", re.IGNORECASE)


_POSTGRESQL_HOLDER = """
SELECT a.pid, a.usename, COALESCE(a.application_name, ''), a.state,
EXTRACT(EPOCH FROM clock_timestamp() - a.xact_start)::int
FROM {table} t JOIN pg_stat_activity a ON a.backend_xid = t.xmax WHERE {where}
"""
_MARIADB_HOLDER = """
SELECT t.trx_mysql_thread_id, COALESCE(p.user, '?'), COALESCE(p.host, ''), COALESCE(p.command, ''),
TIMESTAMPDIFF(SECOND, t.trx_started, NOW())
FROM information_schema.innodb_trx t LEFT JOIN information_schema.processlist p ON p.id = t.trx_mysql_thread_id
WHERE t.trx_rows_modified > 0 ORDER BY t.trx_started LIMIT 1
"""


class Away(Exception):
    """The database cannot be used now, or has undone the transaction. Look up in the database what was committed."""

    def __init__(self, cause: BaseException, more: str = "", before_next: Callable[[], None] | None = None) -> None:
        super().__init__(cause)
        self.cause = cause
        self.before_next = before_next
        """An action to take before the next attempt, outside any transaction. The action may raise Away, too."""
        self.failure = unavailable(f"the consumer's database cannot be used now: {told(cause)}{more}")


def unavailable(what: str, hint: str = "It is tried again.") -> UnavailableError:
    """Return the error for `on_waiting`."""
    return cast(UnavailableError, error("OUTPUT_UNAVAILABLE", what, hint=hint))


@contextmanager
def reaching(*, at_start: bool = False) -> Iterator[None]:
    """Raise Away for temporary failures of the database, and INVALID_OUTPUT if the database refuses a statement for
    another reason. At the start, also raise INVALID_OUTPUT if the database does not exist or refuses the user."""
    try:
        yield
    except SQLAlchemyError as e:
        if fault_of(e) is not Fault.MESSAGE and not (at_start and refuses_entry(e)):
            raise Away(e) from e
        hint = "See why, and whether the user of the database may do it."
        raise error("INVALID_OUTPUT", f"the consumer's tables cannot be used: {told(e)}", hint=hint) from e


def age_seconds(connection: Connection) -> float:
    """Return how long the database server has been running. SQLite has no server that could be restarted."""
    dialect = connection.dialect.name
    if dialect == "postgresql":
        wanted = "SELECT EXTRACT(EPOCH FROM clock_timestamp() - pg_postmaster_start_time())"
        return float(connection.exec_driver_sql(wanted).scalar_one())
    if dialect in MARIADB:
        # The uptime is given in whole seconds, so round up.
        return float(connection.exec_driver_sql("SHOW GLOBAL STATUS LIKE 'Uptime'").one()[1]) + 1
    return float("inf")


def holder(engine: Engine, table: Table, where: str, values: Mapping[str, str]) -> UnavailableError:
    """Return an error that names the server session whose transaction locks the row. If the server reports them to this
    user, the error contains the duration of the lock, and the way to end the session. With MariaDB, the error names the
    oldest transaction that has written."""
    found = None
    try:
        with engine.connect() as connection:
            if connection.dialect.name == "postgresql":
                wanted = _POSTGRESQL_HOLDER.format(table=table.name, where=where)
                found = connection.execute(text(wanted), values).first()
            elif connection.dialect.name in MARIADB:
                found = connection.execute(text(_MARIADB_HOLDER)).first()
    except SQLAlchemyError:
        pass
    name = " of ".join(values.values())
    what = f"another process holds {name} in {table.name}, in a transaction that does not end"
    if found is None:
        return unavailable(what, "Look for a session that is idle in a transaction, and end it.")
    number, user, client, state, seconds = found
    end = f"SELECT pg_terminate_backend({number})" if engine.dialect.name == "postgresql" else f"KILL {number}"
    session = f"{'process' if engine.dialect.name == 'postgresql' else 'connection'} {number} of the server"
    return unavailable(
        f"{what}: it began {seconds} seconds ago, in {session} (user {user}, {client or '-'}, {state})",
        f"If it is frozen, end its transaction: {end}",
    )


def without_transactions(engine: Engine) -> frozenset[str]:
    """Return the tables of the database whose storage engine has no transactions, such as MyISAM and Aria in
    MariaDB."""
    if engine.dialect.name not in MARIADB:
        return frozenset()
    with engine.connect() as connection:
        return _without_transactions(connection)


def _without_transactions(connection: Connection) -> frozenset[str]:
    found = connection.execute(
        text(
            "SELECT t.table_name FROM information_schema.tables t "
            "LEFT JOIN information_schema.engines e ON t.engine = e.engine WHERE t.table_schema = DATABASE() "
            "AND t.table_type = 'BASE TABLE' AND COALESCE(e.transactions, 'NO') <> 'YES'"
        )
    )
    return frozenset(str(name) for (name,) in found)


def check_mariadb_writes(connection: Connection) -> None:
    """Raise NOT_TRANSACTIONAL if the transaction has written to a table without transactions. Call this at the end of
    the transaction.

    The check covers every statement, view and trigger, and also tables that have just been changed to such a storage
    engine. The server reports these writes when a savepoint is rolled back. But it also reports writes to temporary
    tables. So the check is skipped for a session that has made or dropped a temporary table.
    """
    try:
        connection.exec_driver_sql("SAVEPOINT seqdedupe_written")
    except DBAPIError as e:
        if codes_of(e)[1] != _NO_SAVEPOINT:
            raise
    else:
        done = connection.exec_driver_sql("ROLLBACK TO SAVEPOINT seqdedupe_written")
        # Most drivers provide the number of warnings.
        if not getattr(done.context.cursor, "warning_count", 1):
            return
        if all(row[1] != _NOT_ROLLED_BACK for row in connection.exec_driver_sql("SHOW WARNINGS")):
            return
        tables = {name: int(count) for name, count in connection.execute(text(_TABLES_MADE))}
        # MySQL counts temporary tables together with other tables.
        if any(({name: count for name, count in tables.items() if "temporary" in name} or tables).values()):
            return
    raise not_transactional(" or ".join(sorted(_without_transactions(connection))) or "of another database")


@contextmanager
def refusing_writes(connection: Connection, tables: frozenset[str]) -> Iterator[None]:
    """Within the block, refuse each statement that writes and names one of these tables, before the statement is
    executed."""
    if not tables:
        yield
        return
    names = re.compile(r"(?<![\w$])(?:" + "|".join(map(re.escape, sorted(tables))) + r")(?![\w$])", re.IGNORECASE)

    def look(_connection: Connection, _cursor: object, statement: str, *_: object) -> None:
        found = names.search(statement)
        if found and _WRITES.match(statement):
            raise not_transactional(found[0])

    event.listen(connection, "before_cursor_execute", look)
    try:
        yield
    finally:
        event.remove(connection, "before_cursor_execute", look)


def not_transactional(table: str, kind: str = "") -> SeqdedupeError:
    """Return the error for a table whose changes cannot be undone, or are not kept together with the changes in other
    tables."""
    if kind:
        what = f"the table {table} is {kind}: what is written there is not kept together with the position"
        return error("NOT_TRANSACTIONAL", what, hint=cure_of(table, kind))
    what = f"the table {table} has no transactions: what is written there stays, committed or not"
    # If several tables may be meant, the general hint applies.
    hint = f"ALTER TABLE {table} ENGINE = InnoDB" if table.isidentifier() else None
    return error("NOT_TRANSACTIONAL", what, hint=hint)


# -- A consumer's row.

NOBODY = ""

TAKE_OVER_SECONDS = 3.0
"""A process counts as ended if its row has not changed for this time, measured by the clock of the standby process."""

KEEP_UP_SECONDS = 1.0
"""The minimum time between two updates that show that the process is alive, and between two looks at the parked
messages."""

HELD_SECONDS = 15.0
"""If a row was locked at each look for this time, the consumer reports it. A transaction ends sooner, unless the
process that owns the row is frozen or its handler waits."""


def row_name(consumer: str, partition: int) -> str:
    """Return the name of a partition's row. Messages that are set aside from the partition have the same consumer
    name."""
    return f"{consumer}-partition-{partition}"


def positions_of(engine: Engine, consumer: str) -> dict[str, Position]:
    """Return the positions of a consumer, by its topic or by partition. Raises INVALID_OPTION if the consumer does not
    exist in the database."""
    number = re.compile(re.escape(row_name(consumer, 0)[:-1]) + "[0-9]+")
    with engine.connect() as connection:
        rows = connection.execute(select(CONSUMERS.c.name, CONSUMERS.c.topic, CONSUMERS.c.position)).all()
    found = [row for row in rows if row.name == consumer or number.fullmatch(row.name)]
    if not found:
        what = f"no consumer {consumer!r} has a position in this database"
        raise error("INVALID_OPTION", what, hint=f"It has: {', '.join(sorted(row.name for row in rows)) or 'none'}.")
    return {row.topic: Position.parse(row.position) for row in sorted(found, key=lambda row: (len(row.name), row.name))}


class Lost(Exception):
    """Another process has moved the position, or has taken over the consumer. The transaction was not committed."""


class SeenRow(NamedTuple):
    """The contents of the row. Every action of the owner increases `beat`."""

    owner: str
    beat: int
    position: str


class RowLease:
    """The lease of one process on the row. Every transaction of the owner begins with `hold` and ends with `move`.

    `hold` locks the row, and fails if the position or the owner has changed. `move` is the compare-and-set that decides
    whether the transaction is valid.
    """

    def __init__(self, engine: Engine, name: str, token: str | None = None) -> None:
        self._engine = engine
        self._name = name
        self.token = token or uuid.uuid4().hex
        self._mine = (CONSUMERS.c.name == name) & (CONSUMERS.c.owner == self.token)

    def register(self, topic: str, purpose: str, start: Position) -> None:
        """Insert the row if it does not exist. Raises CONSUMER_CHANGED if the row belongs to another topic or purpose,
        NEWER_FORMAT."""
        mine = select(CONSUMERS).where(CONSUMERS.c.name == self._name)
        with self._engine.connect() as connection:
            found = connection.execute(mine).one_or_none()
        # the INSERT of an existing row would wait for the end of its owner's transaction, for any length of time
        if found is None:
            row = {"name": self._name, "format_version": FORMAT_VERSION, "topic": topic, "purpose": purpose}
            with suppress(IntegrityError), self._engine.begin() as connection:
                connection.execute(insert(CONSUMERS).values(row | _new(start)))
                _identify(connection, self._name)
            with self._engine.connect() as connection:
                found = connection.execute(mine).one()
        if not 1 <= found.format_version <= FORMAT_VERSION:
            what = f"the consumer {self._name!r} has format {found.format_version}; this version reads {FORMAT_VERSION}"
            raise error("NEWER_FORMAT", what)
        for what, given, stored in (("topic", topic, found.topic), ("purpose", purpose, found.purpose)):
            if given != stored:
                raise error(
                    "CONSUMER_CHANGED",
                    f"the consumer {self._name!r} of this database has the {what} {stored}, and not {given}",
                )

    def look(self) -> SeenRow | None:
        """Return the contents of the row. Return None while the owner is in a transaction, if the database reports
        that."""
        wanted = select(CONSUMERS.c.owner, CONSUMERS.c.beat, CONSUMERS.c.position)
        with self._engine.begin() as connection:
            found = connection.execute(
                wanted.where(CONSUMERS.c.name == self._name).with_for_update(skip_locked=True)
            ).one_or_none()
        return SeenRow(*found) if found else None

    def take(self, seen: SeenRow) -> bool:
        """Make this process the owner, if the row has not changed since `seen`. Return whether this process is now the
        owner."""
        with self._engine.begin() as connection:
            unchanged = (CONSUMERS.c.owner == seen.owner) & (CONSUMERS.c.beat == seen.beat)
            taken = connection.execute(
                update(CONSUMERS)
                .where((CONSUMERS.c.name == self._name) & unchanged)
                .values(owner=self.token, beat=CONSUMERS.c.beat + 1)
            )
            return taken.rowcount == 1

    def hold(self, connection: Connection, position: str) -> None:
        """Lock the row until the transaction ends. Raises Lost.

        The lock is a write, and the transaction's first statement. So SQLite begins a transaction that may write, and
        no snapshot is older than the lock.
        """
        self._set(connection, position, position)

    def move(self, connection: Connection, position: str, to: str) -> None:
        """Compare the stored position, and set the new position. Raises Lost."""
        self._set(connection, position, to)

    def beat(self) -> None:
        """Show the standby processes that this process is alive. Raises Lost."""
        self.write()

    def write(self) -> None:
        """Write in a separate small transaction, to find out whether the database accepts writes. Raises Lost."""
        with self._engine.begin() as connection:
            found = connection.execute(update(CONSUMERS).where(self._mine).values(beat=CONSUMERS.c.beat + 1))
            if found.rowcount != 1:
                raise Lost

    def _set(self, connection: Connection, position: str, to: str) -> None:
        still = self._mine & (CONSUMERS.c.position == position)
        moved = update(CONSUMERS).where(still).values(beat=CONSUMERS.c.beat + 1, position=to)
        if connection.execute(moved).rowcount != 1:
            raise Lost

    def holder(self) -> UnavailableError:
        """Return an error that names the session that locks the row, and describes how to end that session."""
        return holder(self._engine, CONSUMERS, "t.name = :name", {"name": self._name})

    def release(self) -> None:
        """Release the row, so that another process can take it at once."""
        with self._engine.begin() as connection:
            connection.execute(update(CONSUMERS).where(self._mine).values(owner=NOBODY, beat=CONSUMERS.c.beat + 1))


class Held:
    """If a row stays locked, reports at intervals the database session that holds the lock."""

    def __init__(self, on_waiting: OnWaiting | None) -> None:
        self._on_waiting = on_waiting
        self._since: float | None = None

    def look(self, is_locked: bool, holder: Callable[[], UnavailableError]) -> None:
        """Record whether the row is locked now. If the row has been locked for HELD_SECONDS, report the session that
        holds the lock."""
        now = time.monotonic()
        if not is_locked:
            self._since = None
        elif self._since is None:
            self._since = now
        elif now - self._since >= HELD_SECONDS and self._on_waiting is not None:
            self._since = now
            self._on_waiting(holder())


def check_transactions(engine: Engine) -> None:
    """Raise NOT_TRANSACTIONAL if a row still exists after a rollback, for instance with an engine in AUTOCOMMIT."""
    probe = f"probe {uuid.uuid4().hex}"
    row = {"name": probe, "format_version": FORMAT_VERSION, "topic": "", "purpose": ""}
    with engine.connect() as connection:
        connection.execute(insert(CONSUMERS).values(row | _new(Position.start(0))))
        connection.rollback()
        stayed = connection.execute(delete(CONSUMERS).where(CONSUMERS.c.name == probe)).rowcount
        connection.commit()
    if stayed:
        what = f"the consumer's engine commits each statement: a row that it rolled back stayed in {CONSUMERS.name}"
        raise error("NOT_TRANSACTIONAL", what, hint=NO_AUTOCOMMIT)


def _new(start: Position) -> dict[str, object]:
    return {"position": str(start), "owner": NOBODY, "beat": 0}


def _identify(connection: Connection, name: str) -> None:
    """Give the row of a consumer an identity. If a person has deleted an earlier row with this name, the new row gets
    the identity of the earlier row, because dead letters of the earlier row may not be published yet."""
    mine = select(IDENTITIES.c.name).where(IDENTITIES.c.name == name)
    if connection.execute(mine).first() is None:
        connection.execute(insert(IDENTITIES).values(name=name, identity=uuid.uuid4().hex))


def identities_of(connection: Connection, names: Collection[str]) -> dict[str, str]:
    """Return the identities of consumers' rows, by name. Rows of format 1 have no identity."""
    wanted = select(IDENTITIES.c.name, IDENTITIES.c.identity).join(CONSUMERS, CONSUMERS.c.name == IDENTITIES.c.name)
    wanted = wanted.where(IDENTITIES.c.name.in_(names) & (CONSUMERS.c.format_version > 1))
    return {row.name: row.identity for row in connection.execute(wanted)}


# -- The processes that share a consumer of a partitioned topic: which of them live, and which partitions each has.


class Processes:
    """The rows of all processes of a consumer. The row of this process has the key `token`."""

    def __init__(self, engine: Engine, consumer: str, on_waiting: OnWaiting | None = None) -> None:
        self.token = uuid.uuid4().hex
        self.shown: set[str] = set()
        """The other processes that have shown that they are alive, since this process began."""
        self._engine = engine
        self._consumer = consumer
        self._all = PROCESSES.c.consumer == consumer
        self._mine = self._all & (PROCESSES.c.token == self.token)
        self._seen: dict[str, tuple[int, float]] = {}
        self._held: dict[str, Held] = {}
        self._on_waiting = on_waiting
        self._beat_at = float("-inf")

    def beat(self) -> None:
        """Show the other processes that this process is alive, if the interval has passed."""
        if time.monotonic() - self._beat_at < KEEP_UP_SECONDS:
            return
        with self._engine.begin() as connection:
            if not self._touch(connection):
                row = {"consumer": self._consumer, "token": self.token, "beat": 0}
                connection.execute(insert(PROCESSES).values(row))
        self._beat_at = time.monotonic()

    def hold(self, connection: Connection) -> None:
        """Prevent the other processes from declaring this process dead until the transaction ends, even if the
        transaction is long. Raises Lost if another process has already declared this process dead."""
        if not self._touch(connection):
            self._beat_at = float("-inf")
            raise Lost
        self._beat_at = time.monotonic()

    def _touch(self, connection: Connection) -> bool:
        moved = update(PROCESSES).where(self._mine).values(beat=PROCESSES.c.beat + 1)
        return connection.execute(moved).rowcount == 1

    def living(self) -> set[str]:
        """Return the tokens of all processes that are alive.

        If a process's row has not changed for `TAKE_OVER_SECONDS`, by this process's clock, the row is deleted, and the
        process is not alive. If that process still runs, its next transaction fails.
        """
        with self._engine.begin() as connection:
            tokens = set(connection.execute(select(PROCESSES.c.token).where(self._all)).scalars())
            # If the database reports locks: a locked row belongs to a process that is in a transaction.
            idle = select(PROCESSES.c.token, PROCESSES.c.beat).where(self._all).with_for_update(skip_locked=True)
            beats: dict[str, int] = {row.token: row.beat for row in connection.execute(idle)}
        now, before = time.monotonic(), self._seen
        self._held = {token: self._held.get(token, Held(self._on_waiting)) for token in tokens}
        for token, held in self._held.items():
            held.look(token not in beats, partial(self._holder, token))
        self.shown |= tokens.difference(beats)
        self.shown |= {token for token, beat in beats.items() if token in before and before[token][0] != beat}
        # The time since which the row of each process has not changed.
        self._seen = {
            token: before[token] if token in before and before[token][0] == beat else (beat, now)
            for token, beat in beats.items()
            if token != self.token
        }
        for token, (beat, since) in self._seen.items():
            if now - since >= TAKE_OVER_SECONDS and self._remove(token, beat):
                tokens.discard(token)
        self.shown &= tokens
        return tokens

    def _holder(self, token: str) -> UnavailableError:
        values = {"token": token, "consumer": self._consumer}
        return holder(self._engine, PROCESSES, "t.token = :token AND t.consumer = :consumer", values)

    def _remove(self, token: str, beat: int) -> bool:
        unchanged = self._all & (PROCESSES.c.token == token) & (PROCESSES.c.beat == beat)
        with self._engine.begin() as connection:
            return connection.execute(delete(PROCESSES).where(unchanged)).rowcount == 1

    def leave(self) -> None:
        """Release all partitions of this process, so that the other processes can take them at once."""
        with self._engine.begin() as connection:
            theirs = {"owner": NOBODY, "beat": CONSUMERS.c.beat + 1}
            connection.execute(update(CONSUMERS).where(CONSUMERS.c.owner == self.token).values(theirs))
            connection.execute(delete(PROCESSES).where(self._mine))


def fair_share(token: str, living: Collection[str], owners: Iterable[str], partitions: int) -> int:
    """Return the number of partitions for a process. The shares of all processes add up to all partitions. If the
    division leaves a remainder, the processes that already have more partitions keep them, so that no partition moves
    without need."""
    has = Counter(owners)
    order = sorted({token, *living}, key=lambda one: (-has[one], one))
    each, odd = divmod(partitions, len(order))
    return each + (order.index(token) < odd)


class PartOwnership(RowLease):
    """The lease on a partition's row. The process counts as alive as long as its own row in `Processes` changes."""

    def __init__(self, engine: Engine, name: str, processes: Processes) -> None:
        super().__init__(engine, name, processes.token)
        self._processes = processes

    def hold(self, connection: Connection, position: str) -> None:
        self._processes.hold(connection)
        super().hold(connection, position)

    def beat(self) -> None:
        self._processes.beat()
