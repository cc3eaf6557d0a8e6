"""Commands of callers with narrow rights: each needs the rights that the documentation says, from its first run on."""

import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from seqdedupe.services.outbox import ddl
from seqdedupe.testing import Sidecar
from tests.broker_sidecar.security.signing import AUDIENCE, Issuer, write_keys
from tests.cli.conftest import Run, lines

RULES = """
[[allow]]
subjects = ["writer", "comparer"]
actions = ["publish", "create"]
topics = ["*"]

[[allow]]
subjects = ["relay"]
actions = ["publish", "observe", "create"]
topics = ["*"]

[[allow]]
subjects = ["comparer"]
actions = ["read"]
topics = ["*"]
"""


@pytest.fixture(scope="module")
def issuer() -> Issuer:
    return Issuer("one")


@pytest.fixture(scope="module")
def shared_sidecar(tmp_path_factory: pytest.TempPathFactory, issuer: Issuer) -> Iterator[Sidecar]:
    folder = tmp_path_factory.mktemp("rights")
    (folder / "rules.toml").write_text(RULES)
    keys = write_keys(folder / "keys.json", [issuer.jwk()])
    with Sidecar(
        folder,
        authentication="token",
        token_keys_file=keys,
        token_audience=AUDIENCE,
        rules_file=folder / "rules.toml",
    ) as sidecar:
        yield sidecar


@pytest.fixture
def environment(shared_sidecar: Sidecar) -> dict[str, str]:
    return os.environ | {"SEQDEDUPE_ADDRESS": shared_sidecar.address}


def test_publishing_without_the_right_to_read_is_refused_at_the_first_run_or_goes_on(
    run: Run, issuer: Issuer, shared_sidecar: Sidecar, tmp_path: Path
) -> None:
    writer = {"SEQDEDUPE_TOKEN": issuer.token(sub="writer")}
    comparer = {"SEQDEDUPE_TOKEN": issuer.token(sub="comparer")}
    publish = ("publish", "a", "--topic", "t", "--producer", "p")
    (tmp_path / "a").write_bytes(lines(3))
    said = run(*publish, status=1, **writer).stderr
    assert b"'writer' may not read persistent://public/default/t [NOT_ALLOWED]" in said
    assert b"--trust-source" in said
    # Trusted, the source needs no comparison: the sidecar's answer says where to continue.
    assert b"3 NotDup" in run(*publish, "--trust-source", **writer).stdout
    (tmp_path / "a").write_bytes(lines(5))
    assert b"resumed after sequence ID 2: 2 NotDup, 0 Dup" in run(*publish, "--trust-source", **writer).stdout
    # Who may read compares.
    (tmp_path / "a").write_bytes(lines(6))
    assert b"resumed after sequence ID 4: 1 NotDup" in run(*publish, **comparer).stdout
    assert run("read", "t", **comparer).stdout == lines(6)


def test_a_relay_that_may_not_read_ends_at_its_start_and_not_after_its_first_crash(
    run: Run, issuer: Issuer, tmp_path: Path
) -> None:
    with sqlite3.connect(tmp_path / "shop.db") as connection:
        connection.executescript(ddl("sqlite"))
    connection.close()
    relay = ("outbox", "relay", "--database", "sqlite:///shop.db", "--topic", "outbox", "--producer", "shop", "--once")
    said = run(*relay, status=1, SEQDEDUPE_TOKEN=issuer.token(sub="relay")).stderr
    assert b"'relay' may not read persistent://public/default/outbox [NOT_ALLOWED]" in said


def test_a_reader_without_rights_learns_of_the_right_to_read(run: Run, issuer: Issuer, tmp_path: Path) -> None:
    nobody = {"SEQDEDUPE_TOKEN": issuer.token(sub="nobody")}
    (tmp_path / "a").write_bytes(lines(1))
    for command in (("read", "t"), ("publish", "a", "--topic", "t", "--producer", "p", "--verify")):
        said = run(*command, status=1, **nobody).stderr
        assert b"'nobody' may not read persistent://public/default/t [NOT_ALLOWED]" in said
    any_of = (
        b"'nobody' may not observe, publish, read, administer or attach persistent://public/default/t [NOT_ALLOWED]"
    )
    assert any_of in run("topics", "show", "t", status=1, **nobody).stderr
