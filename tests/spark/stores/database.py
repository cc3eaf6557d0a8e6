"""Waiting for what a PostgreSQL server does, and making it wait."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg

from tests.spark.stores.conformance import LIMIT_SECONDS


@contextmanager
def waits(url: str, trigger: str) -> Iterator[Callable[[], None]]:
    """The trigger's event waits in the server until the block ends. Gives what returns when one does wait."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN PERFORM pg_advisory_xact_lock_shared(1); RETURN NULL; END $$"
        )
        connection.execute(f"CREATE CONSTRAINT TRIGGER wait {trigger} FOR EACH ROW EXECUTE FUNCTION wait()".encode())
        connection.execute("SELECT pg_advisory_lock(1)")
        yield lambda: until(connection, "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")


COMMIT = "AFTER INSERT ON flights DEFERRABLE INITIALLY DEFERRED"
"""The trigger that runs in the commit of a transaction that has written rows."""

MOVE = "AFTER UPDATE ON seqdedupe_positions"
"""The trigger that runs after the statement that moves a position."""


def wait_for_the_end(url: str) -> None:
    """Until the server has noticed that its other clients are gone."""
    with psycopg.connect(url, autocommit=True) as connection:
        others = "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        until(connection, f"SELECT 1 WHERE NOT EXISTS (SELECT 1 {others})")


def until(connection: psycopg.Connection, query: str) -> None:
    """Until the query has a row."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while connection.execute(query.encode()).fetchone() is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
