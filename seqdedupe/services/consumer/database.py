"""The consumer's database: errors if the database cannot be used, the sessions that lock a row, and tables without
transactions."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from sqlalchemy import BigInteger, Column, Connection, Engine, Integer, MetaData, String, Table, event, text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from seqdedupe.databases.failures import Fault, codes_of, fault_of, refuses_entry, told
from seqdedupe.databases.tables import MARIADB, bytes_type, cure_of, name_type, table, text_type
from seqdedupe.errors import SeqdedupeError, UnavailableError, error

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
    """Return the columns of a message, and of the consumer that has set the message aside."""
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
    """Return an error that names the server session whose transaction locks the row. As far as the server reports this
    to the user, the error contains the duration of the lock, and how to end it. With MariaDB, the error names the
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
