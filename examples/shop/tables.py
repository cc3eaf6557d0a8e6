"""The two databases: what the order service writes, and what the payment service does."""

from typing import Any

from sqlalchemy import BigInteger, Column, Engine, Integer, MetaData, String, Table, create_engine, event, insert

from seqdedupe.services.outbox import ddl
from seqdedupe.testing import LAST_RESORT_SECONDS

BUSY_TIMEOUT_SECONDS = LAST_RESORT_SECONDS

CUSTOMERS = ("ada", "ben", "cleo", "dora", "emil", "fay", "gus")

ORDERS_DATABASE = MetaData()
PAYMENTS_DATABASE = MetaData()

ORDERS = Table(
    "orders",
    ORDERS_DATABASE,
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("customer", String(20)),
    Column("version", BigInteger),
    Column("cents", BigInteger),
)
"""Orders, and refunds: those with cents below 0. `version` counts what happened to a customer: 1, 2, 3, …"""

ACCOUNTS = Table(
    "accounts",
    PAYMENTS_DATABASE,
    Column("customer", String(20), primary_key=True),
    Column("cents", BigInteger, nullable=False),
)

BOOKINGS = Table(
    "bookings",
    PAYMENTS_DATABASE,
    Column("place", Integer, primary_key=True),
    Column("number", Integer, nullable=False),
    Column("customer", String(20), nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("cents", BigInteger, nullable=False),
)
"""In the order in which they were made. Nothing in it is unique: a message that took effect twice would show."""


def connect(url: str) -> Engine:
    """The database at a URL, `sqlite:///path` or `postgresql+psycopg://…`."""
    if not url.startswith("sqlite:"):
        return create_engine(url)
    # One writes at a time, and the others wait for as long as it takes.
    engine = create_engine(url, connect_args={"timeout": BUSY_TIMEOUT_SECONDS})
    # Readers and a writer then do not wait for each other; a commit is durable, as it is without.
    event.listen(engine, "connect", lambda raw, _: raw.executescript("PRAGMA journal_mode = WAL"))
    return engine


def make_orders_database(url: str) -> None:
    """The service's table, and beside it what `seqdedupe outbox ddl` prints."""
    engine = connect(url)
    ORDERS_DATABASE.create_all(engine)
    with engine.connect() as connection:
        raw: Any = connection.connection.driver_connection
        script = raw.executescript if engine.dialect.name == "sqlite" else raw.execute
        script(ddl(engine.dialect.name))
        raw.commit()
    engine.dispose()


def make_payments_database(url: str) -> None:
    """What consumers and inboxes need is made by them."""
    engine = connect(url)
    PAYMENTS_DATABASE.create_all(engine)
    with engine.begin() as connection:
        connection.execute(insert(ACCOUNTS), [{"customer": name, "cents": 0} for name in CUSTOMERS])
    engine.dispose()
