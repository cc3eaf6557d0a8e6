"""The tables of consumers, in the user's database, beside what the handlers write."""

from typing import Any

from sqlalchemy import BigInteger, Column, Integer, MetaData, String

from seqdedupe.databases.tables import bytes_type, name_type, table, text_type

FORMAT_VERSION = 1

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
