"""`seqdedupe outbox`, and the page of it. Costs: one sidecar, one PostgreSQL, a few commands; about 10 seconds."""

import json
import re
import signal
import sqlite3
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine

from seqdedupe.cli.commands import cli
from seqdedupe.errors import InvalidRequestError
from seqdedupe.limits import MAX_PAYLOAD_BYTES
from seqdedupe.services.outbox import Outbox, ddl
from seqdedupe.services.outbox import steps as outbox_steps
from seqdedupe.services.outbox.postgres_outbox import Horizon
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from tests.cli.conftest import COMMAND
from tests.processes import running
from tests.services.outbox.conftest import NAME, Database, payloads, relay_all


def run(*arguments: str, status: int = 0) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run([COMMAND, "outbox", *arguments], capture_output=True, text=True, timeout=LAST_RESORT_SECONDS)
    assert done.returncode == status, done.stderr
    return done


def test_from_nothing_to_messages(shared_sidecar: Sidecar, topic: str, tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    with sqlite3.connect(path) as connection:
        connection.executescript(run("ddl", "sqlite").stdout)
        connection.execute("INSERT INTO outbox (id, aggregatetype, aggregateid, type) VALUES ('a', 'b', 'c', 'd')")
    connection.close()
    database = ("--database", f"sqlite:///{path}")
    relay = ("relay", *database, "--topic", topic, "--producer", NAME, "--address", shared_sidecar.address, "--once")
    assert json.loads(run("lag", *database, "--json").stdout)["rows"] == 1
    said = "1 published, 0 found there, 0 set aside\nleft: 0 rows in outbox, 0 in outbox_aside\n"
    assert run(*relay).stdout == said
    assert json.loads(run(*relay, "--json").stdout)["published"] == 0
    assert run("lag", *database).stdout == "0 rows in the outbox, 0 set aside\n"


def test_what_is_left_is_said_at_the_end(
    shared_sidecar: Sidecar, topic: str, postgres: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("seqdedupe.services.outbox.relay.ONCE_SECONDS", 0.0)
    relay = ["relay", "--database", postgres.url, "--topic", topic, "--producer", NAME, "--once", "--address"]
    with postgres.engine.connect() as slow:
        pid = slow.execute(text("SELECT pg_backend_pid()")).scalar_one()
        Outbox(slow).add("order", "7", "OrderPlaced", b"first")
        postgres.add(b"second")
        postgres.add(b"third")
        done = CliRunner().invoke(cli, ["outbox", *relay, shared_sidecar.address])
        assert (done.exit_code, done.output.count("\n")) == (0, 2)
        last = done.output.splitlines()[-1]
        assert re.fullmatch(rf"left: 2 rows in outbox \(they wait .* process {pid}, .*\), 0 in outbox_aside", last)
        slow.commit()
    postgres.add(bytes(MAX_PAYLOAD_BYTES + 1))
    done = CliRunner().invoke(cli, ["outbox", *relay, shared_sidecar.address, "--json"])
    found = json.loads(done.stdout)
    assert (done.exit_code, found["published"], found["set_aside"]) == (0, 3, 1)
    assert found["left"] == {
        "rows": 0, "unreadable_rows": 0, "held_by": "", "held_seconds": 0.0, "set_aside_rows": 1,
    }  # fmt: skip


def test_what_is_amiss_is_one_line(shared_sidecar: Sidecar, topic: str, tmp_path: Path) -> None:
    relay = ("--topic", topic, "--producer", NAME, "--address", shared_sidecar.address, "--once")
    urls = {
        f"sqlite:///{tmp_path / 'none.db'}": "OUTBOX_UNAVAILABLE",
        "mysql://root:secret@localhost/shop": "INVALID_CONFIGURATION",
        "postgresql://root:secret@127.0.0.1:1/shop": "OUTBOX_UNAVAILABLE",
    }
    for url, reason in urls.items():
        said = run("relay", "--database", url, *relay, status=2 if reason == "INVALID_CONFIGURATION" else 1).stderr
        assert f"[{reason}]" in said
        assert "secret" not in said
        assert said.count("\n") == 1
    said = run("lag", "--database", f"sqlite:///{tmp_path / 'none.db'}", status=1).stderr
    assert f"there is no file {tmp_path / 'none.db'}" in said
    assert "seqdedupe outbox ddl sqlite" in said


def test_an_empty_outbox_hides_no_sidecar_that_refuses(postgres: Database, tmp_path: Path) -> None:
    relay = ("relay", "--database", postgres.url, "--topic", "t", "--producer", NAME, "--address")
    assert "[UNREACHABLE]" in run(*relay, "127.0.0.1:1", "--once", status=1).stderr
    (tmp_path / "token").write_text("wrong")
    wrong = ("--token-file", str(tmp_path / "token"))
    with Sidecar(tmp_path / "data", authentication="token") as sidecar:
        for once in ((), ("--once",)):
            assert "[UNAUTHENTICATED]" in run(*relay, sidecar.address, *wrong, *once, status=1).stderr
        right = ("--token-file", str(sidecar.token_file))
        assert "0 published" in run(*relay, sidecar.address, *right, "--once").stdout
    with running([COMMAND, "outbox", *relay, "127.0.0.1:1"], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "[UNREACHABLE]" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(LAST_RESORT_SECONDS) == 130
        assert "Traceback" not in process.stderr.read()


def test_what_cannot_be_added(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    with sqlite3.connect(path) as made:
        made.executescript(ddl("sqlite"))
    made.close()
    engine = create_engine(f"sqlite:///{path}")
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with engine.begin() as connection:
        for values, words in (
            ({"id": 5}, "the id of an outbox's row is 5"),
            ({"id": ""}, "and not empty"),
            ({"id": b""}, "and not empty"),
            ({"id": "\ud800"}, "the id of an outbox's row is not valid Unicode"),
            ({"payload": "\ud800"}, "the payload of"),
            ({"payload": {"a": "\ud800"}}, "the payload of"),
            ({"payload": {"a": float("nan")}}, "cannot be JSON"),
            ({"payload": [{1, 2}]}, "cannot be JSON"),
            ({"payload": {1: "a", "1": "b"}}, 'two keys of an object would both be "1"'),
            ({"payload": [{"a": [{None: 1, "null": 2}]}]}, 'two keys of an object would both be "null"'),
            ({"payload": deep}, "cannot be JSON"),
            ({"payload": 7}, "it should be bytes, text"),
            ({"aggregateid": "\ud800"}, "the aggregateid of"),
            ({"aggregateid": b"4711"}, "the aggregateid of an outbox's row is b'4711': it should be text"),
        ):
            row: dict[str, Any] = {"aggregatetype": "order", "aggregateid": 7, "type": "Placed", "payload": b"x"}
            with pytest.raises(InvalidRequestError, match=words):
                Outbox(connection).add(**(row | values))
        assert Outbox(connection).add("order", 7, "Placed", {"a": "ü"}, id=b"\xff\x00") == b"\xff\x00"
        assert connection.execute(text("SELECT count(*) FROM outbox")).scalar_one() == 1
    engine.dispose()


def test_what_the_ddl_may_be_asked_for() -> None:
    assert "payload jsonb" in run("ddl", "postgresql", "--payload", "jsonb").stdout
    assert "pg_advisory_xact_lock" in run("ddl", "postgresql", "--lock-aggregates").stdout
    assert "pg_advisory_xact_lock" not in run("ddl", "postgresql").stdout
    assert "[INVALID_CONFIGURATION]" in run("ddl", "sqlite", "--payload", "jsonb", status=2).stderr


def test_the_ddl_may_be_run_again(database: Database) -> None:
    database.add(b"one")
    token = database.token
    database.script(ddl(database.kind))
    assert (database.rows(), database.token) == (1, token)


def test_the_ddl_on_a_table_of_debezium(postgres: Database) -> None:
    postgres.script(
        "DROP TABLE outbox; CREATE TABLE outbox (id uuid PRIMARY KEY, aggregatetype varchar(255) NOT NULL, "
        "aggregateid varchar(255) NOT NULL, type varchar(255) NOT NULL, payload jsonb)"
    )
    postgres.script(ddl("postgresql"))
    with postgres.engine.begin() as connection:
        Outbox(connection).add("order", "7", "OrderPlaced", {"amount": 7})
    assert postgres.value("SELECT sequence_id > 0 FROM outbox") is True


@pytest.mark.parametrize(
    ("broken", "said", "cure"),
    [
        (
            "CREATE TABLE outbox (id uuid PRIMARY KEY, aggregatetype text NOT NULL, "
            "aggregateid text NOT NULL, type text NOT NULL, payload jsonb); "
            "INSERT INTO outbox VALUES (gen_random_uuid(), 'order', '7', 'OrderPlaced', '{}')",
            "the table outbox has rows without sequence_id",
            "TRUNCATE outbox",
        ),
        (
            "CREATE TABLE outbox (id int PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload text)",
            "outbox.id is none of uuid",
            "DROP TABLE outbox",
        ),
        (
            "CREATE TABLE outbox (id uuid PRIMARY KEY)",
            "the table outbox has no column aggregatetype",
            "DROP TABLE outbox",
        ),
        ("CREATE VIEW outbox AS SELECT 1 AS id", "outbox is no plain table", "DROP VIEW outbox"),
        (
            "CREATE FUNCTION outbox_guard() RETURNS int LANGUAGE sql AS 'SELECT 1'",
            "cannot change return type",
            "DROP FUNCTION outbox_guard",
        ),
    ],
)
async def test_statements_that_fail_change_nothing(
    shared_sidecar: Sidecar, topic: str, postgres: Database, broken: str, said: str, cure: str
) -> None:
    """By psql as it is: each statement is a transaction there, and it goes on after one that fails."""
    everything = (
        "SELECT string_agg(one, chr(10) ORDER BY one) FROM (SELECT attrelid::regclass || '.' || attname FROM "
        "pg_attribute JOIN pg_class c ON c.oid = attrelid WHERE relnamespace = 'public'::regnamespace UNION ALL SELECT "
        "tgrelid::regclass || ' ' || tgname FROM pg_trigger UNION ALL SELECT proname || prosrc FROM pg_proc WHERE "
        "pronamespace = 'public'::regnamespace) AS found (one)"
    )
    made = "TABLE outbox, outbox_token, outbox_aside; DROP FUNCTION outbox_notify, outbox_take_number, outbox_guard"
    postgres.script(f"DROP {made}; {broken}")
    before = postgres.value(everything)
    script = ddl("postgresql")

    def psql() -> str:
        command = ["psql", "--no-psqlrc", "--file=-", postgres.url]
        return subprocess.run(command, input=script, text=True, check=False, capture_output=True).stderr

    assert said in psql()
    assert postgres.value(everything) == before
    postgres.script(cure)
    assert "ERROR" not in psql()
    assert "ERROR" not in psql()
    postgres.add(b"{}")
    await relay_all(shared_sidecar, postgres, topic)
    assert await payloads(shared_sidecar, topic) == [b"{}"]


async def test_adding_under_asyncio(postgres: Database) -> None:
    engine = create_async_engine(postgres.url.replace("postgresql", "postgresql+psycopg", 1))
    async with engine.begin() as connection:
        await connection.run_sync(lambda one: Outbox(one).add("order", "7", "OrderPlaced", b"one"))
        assert (await connection.execute(text("SELECT count(*) FROM outbox"))).scalar_one() == 1
    await engine.dispose()


def test_the_page_names_what_there_is() -> None:
    page = (Path(__file__).parents[3] / "docs" / "guides" / "outbox.md").read_text()
    helped = "".join(run(command, "--help").stdout for command in ("ddl", "relay", "lag"))
    for name in re.findall(r"--[a-z][a-z-]+", page):
        assert name in helped


def reads_all(horizon: Horizon, last_number: int, *_: int) -> bool:
    horizon.bound = last_number
    return True


@pytest.mark.parametrize("is_planted", [False, True])
async def test_a_relay_by_serial_number_loses_messages(
    shared_sidecar: Sidecar, topic: str, postgres: Database, monkeypatch: pytest.MonkeyPatch, is_planted: bool
) -> None:
    """The control arm: it reads what is committed, in the order of the numbers, and what is Dup is deleted."""
    monkeypatch.setattr("seqdedupe.services.outbox.relay.ONCE_SECONDS", 0.0)
    if is_planted:

        async def all_there(*given: object, **_: object) -> outbox_steps.FoundRows:

            page = given[3]
            return outbox_steps.FoundRows(np.arange(len(page)), np.zeros(0, np.int64))  # type: ignore[arg-type]

        monkeypatch.setattr(Horizon, "note", reads_all)
        monkeypatch.setattr("seqdedupe.services.outbox.relay.find", all_there)
    with postgres.engine.connect() as slow:
        Outbox(slow).add("order", "7", "OrderPlaced", b"six")
        postgres.add(b"seven")
        await relay_all(shared_sidecar, postgres, topic)
        slow.commit()
    await relay_all(shared_sidecar, postgres, topic)
    wanted = [b"seven"] if is_planted else [b"six", b"seven"]
    assert (await payloads(shared_sidecar, topic), postgres.rows()) == (wanted, 0)
