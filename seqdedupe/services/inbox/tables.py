"""The tables of inboxes, in the user's database."""

from sqlalchemy import BigInteger, Column, Index, MetaData, String

from seqdedupe.databases.tables import name_type, table, text_type
from seqdedupe.services.consumer.tables import content_columns

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
"""A row for each key: the last version applied, and how many messages were dropped. `locked` changes whenever somebody
decides about the key: an update holds off all others, also where a transaction reads from a snapshot."""

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
"""A row for each message that came early: the versions that it is of its keys (JSON), and one that it waits for."""

Index("seqdedupe_inbox_waits", PARKED.c.inbox, PARKED.c.waits_for_key, PARKED.c.waits_for_version)
