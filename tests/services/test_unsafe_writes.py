"""Where rows really land in PostgreSQL, and whether it is committed with the rest. Costs a second."""

from collections.abc import Iterator
from urllib.parse import urlsplit

import psycopg
import pytest

from seqdedupe.databases.tables import POSTGRESQL_UNSAFE_WRITES

SCHEMA = """
CREATE TABLE parts (a int) PARTITION BY RANGE (a);
CREATE TABLE logged PARTITION OF parts FOR VALUES FROM (0) TO (10);
CREATE UNLOGGED TABLE unlogged PARTITION OF parts FOR VALUES FROM (10) TO (20);
CREATE TABLE parent (a int);
CREATE UNLOGGED TABLE child () INHERITS (parent);
CREATE VIEW updatable AS SELECT * FROM child;
CREATE VIEW triggered AS SELECT 1 AS a;
CREATE FUNCTION write() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN INSERT INTO child VALUES (NEW.a); RETURN NEW; END $$;
CREATE TRIGGER written INSTEAD OF INSERT ON triggered FOR EACH ROW EXECUTE FUNCTION write();
CREATE TABLE there (a int);
CREATE EXTENSION postgres_fdw;
CREATE SERVER other FOREIGN DATA WRAPPER postgres_fdw OPTIONS (host '{host}', dbname '{database}');
CREATE USER MAPPING FOR CURRENT_USER SERVER other;
CREATE FOREIGN TABLE elsewhere (a int) SERVER other OPTIONS (table_name 'there');
"""

UNLOGGED, FOREIGN = "an unlogged table", "a foreign table"


@pytest.fixture
def connection(postgres_url: str) -> Iterator["psycopg.Connection[tuple[str, str]]"]:
    url = urlsplit(postgres_url)
    schema = SCHEMA.format(host=url.query.removeprefix("host="), database=url.path[1:])
    with psycopg.connect(postgres_url) as connection:
        connection.execute(schema.encode())
        connection.commit()
        yield connection


@pytest.mark.parametrize(
    ("statement", "found"),
    [
        ("INSERT INTO parts VALUES (1)", []),
        ("INSERT INTO parts VALUES (11)", [("unlogged", UNLOGGED)]),
        ("INSERT INTO parent VALUES (1)", []),
        ("UPDATE parent SET a = 2", [("child", UNLOGGED)]),
        ("INSERT INTO updatable VALUES (1)", [("child", UNLOGGED)]),
        ("INSERT INTO triggered VALUES (1)", [("child", UNLOGGED)]),
        ("INSERT INTO elsewhere VALUES (1)", [("elsewhere", FOREIGN)]),
        ("SELECT * FROM child FOR UPDATE", []),
        ("CREATE TEMPORARY TABLE own (a int); INSERT INTO own VALUES (1)", []),
    ],
)
def test_where_rows_land(
    connection: "psycopg.Connection[tuple[str, str]]", statement: str, found: list[tuple[str, str]]
) -> None:
    connection.execute(statement.encode())
    assert connection.execute(POSTGRESQL_UNSAFE_WRITES).fetchall() == found


def test_a_partition_that_was_added_since(connection: "psycopg.Connection[tuple[str, str]]", postgres_url: str) -> None:
    """What was looked at before the transaction says nothing of it."""
    assert connection.execute(POSTGRESQL_UNSAFE_WRITES).fetchall() == []
    with psycopg.connect(postgres_url) as other:
        other.execute("CREATE UNLOGGED TABLE added PARTITION OF parts DEFAULT")
    connection.execute("INSERT INTO parts VALUES (99)")
    assert connection.execute(POSTGRESQL_UNSAFE_WRITES).fetchall() == [("added", UNLOGGED)]
