"""The tables of consumers, in the user's database, beside what the handlers write."""

from typing import Any

from sqlalchemy import BigInteger, Column, Dialect, Engine, Integer, LargeBinary, MetaData, String, Table, Text, inspect
from sqlalchemy.dialects import mysql
from sqlalchemy.exc import DBAPIError
from sqlalchemy.types import TypeDecorator, TypeEngine

from seqdedupe.errors import error

FORMAT_VERSION = 1

_MARIADB = ("mysql", "mariadb")
_UTF8_BYTES = 4
"""Of a character, at most."""

_CREATE_ATTEMPTS = 3
"""Of two processes that make the same table at once one fails, and finds it there when it looks again."""


class name_type(TypeDecorator[str]):  # noqa: N801 (a type, named as SQLAlchemy names its functions for them)
    """Text that is compared byte by byte. In MariaDB and MySQL it is stored as its UTF-8: otherwise they take `a`, `A`
    and `a ` for the same, the last one also with a binary collation."""

    impl = String
    cache_ok = True

    def __init__(self, length: int = 255) -> None:
        super().__init__(length)
        self.length = length

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        if dialect.name in _MARIADB:
            return dialect.type_descriptor(mysql.VARBINARY(_UTF8_BYTES * self.length))
        return dialect.type_descriptor(String(self.length))

    def process_bind_param(self, value: str | None, dialect: Dialect) -> Any:
        return value.encode() if value is not None and dialect.name in _MARIADB else value

    def process_result_value(self, value: Any | None, dialect: Dialect) -> str | None:
        return value.decode() if isinstance(value, bytes) else value


def bytes_type() -> TypeEngine[bytes]:
    """Bytes of any length."""
    return LargeBinary().with_variant(mysql.LONGBLOB(), *_MARIADB)


def text_type() -> TypeEngine[str]:
    """Text of any length."""
    return Text().with_variant(mysql.LONGTEXT(charset="utf8mb4"), *_MARIADB)


def table(name: str, metadata: MetaData, *columns: Column[Any]) -> Table:
    """A table with transactions."""
    return Table(name, metadata, *columns, mysql_engine="InnoDB", mariadb_engine="InnoDB")


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
"""A row for each consumer: up to where it has come, which process works (empty: none), and that it lives."""

PROCESSES = table(
    "seqdedupe_consumer_processes",
    METADATA,
    Column("consumer", name_type(), primary_key=True),
    Column("token", String(32), primary_key=True),
    Column("beat", BigInteger, nullable=False),
)
"""A row for each process that runs a consumer of a partitioned topic, and that it lives. Its token stands as the owner
of partitions."""


def content_columns() -> list[Column[Any]]:
    """A message, whole: `set_aside.content` fills them, `set_aside.message_of` reads them."""
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
    """A message, and which consumer has set it aside."""
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
"""What was given up. With a topic it waits to be published there, and then goes; without one it stays for people."""

PARKED = table(
    "seqdedupe_parked",
    METADATA,
    *_message_columns(),
    Column("key_hash", String(64), index=True),
    Column("next_attempt_ms", BigInteger, index=True),
)
"""What is tried again later. Of one key (its SHA-256 is here: long keys cannot be indexed) only the first one has a
time for it, the others wait behind it."""


def make_tables(engine: Engine, metadata: MetaData = METADATA) -> None:
    """Makes those that are not there. Raises INVALID_OUTPUT if one of that name has not all columns."""
    for attempt in range(1, _CREATE_ATTEMPTS + 1):
        try:
            metadata.create_all(engine)
            break
        except DBAPIError:
            if attempt == _CREATE_ATTEMPTS:
                raise
    found = inspect(engine)
    for wanted in metadata.sorted_tables:
        names = {column["name"] for column in found.get_columns(wanted.name)}
        missing = sorted(set(wanted.columns.keys()) - names)
        if missing:
            raise error(
                "INVALID_OUTPUT",
                f"the table {wanted.name} has no column {', '.join(missing)}",
                hint="It is of another program or version: rename it, or use another database or schema.",
            )
