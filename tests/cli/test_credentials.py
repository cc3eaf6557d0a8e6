"""Commands and a sidecar that wants to know who calls."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from seqdedupe.cli.commands import cli
from seqdedupe.testing import Sidecar
from tests import warm
from tests.certificates import Authority, guarded_sidecar
from tests.cli.conftest import COMMAND, TIMEOUT_SECONDS, Run, lines

FILES = ("--token-file", "--tls-ca-file", "--tls-certificate-file", "--tls-key-file")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def shared_sidecar(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[Sidecar]:
    with guarded_sidecar(tmp_path_factory.mktemp("cli"), authority) as sidecar:
        yield sidecar


@pytest.fixture
def token(shared_sidecar: Sidecar) -> str:
    return shared_sidecar.token_file.read_text().strip()


@pytest.fixture
def told(shared_sidecar: Sidecar, authority: Authority) -> list[str]:
    """The options with which a command gets in."""
    return ["--token-file", str(shared_sidecar.token_file), "--tls-ca-file", str(authority.ca_file)]


@pytest.fixture
def environment(shared_sidecar: Sidecar, tmp_path: Path) -> dict[str, str]:
    return os.environ | {"SEQDEDUPE_ADDRESS": shared_sidecar.address, "HOME": str(tmp_path)}


def test_options_and_environment_let_a_command_in(
    run: Run, told: list[str], token: str, authority: Authority, tmp_path: Path
) -> None:
    (tmp_path / "a").write_bytes(lines(3))
    run("publish", "a", "--topic", "t", "--producer", "p", *told)
    ca = {"SEQDEDUPE_TLS_CA_FILE": str(authority.ca_file)}
    assert run("read", "t", SEQDEDUPE_TOKEN_FILE=told[1], **ca).stdout == lines(3)
    assert run("read", "t", SEQDEDUPE_TOKEN=token, **ca).stdout == lines(3)
    run("bench", "b", "--messages", "1", *told)
    for command in (["topics"], ["topics", "show", "t"], ["producers", "t"], ["policy", "get", "t"], ["version"]):
        run(*command, "--json", *told)
    usual = tmp_path / ".config" / "seqdedupe" / "token"
    usual.parent.mkdir(parents=True)
    usual.write_text(token)
    run("topics", **ca)
    # What the command line says comes before what the environment says.
    wrong = {"SEQDEDUPE_TOKEN": "wr0ng", "SEQDEDUPE_TLS_CA_FILE": "nowhere"}
    run("topics", *told, **wrong)


def test_without_them_it_says_what_to_do_in_one_line(
    run: Run, told: list[str], token: str, authority: Authority
) -> None:
    ca = {"SEQDEDUPE_TLS_CA_FILE": str(authority.ca_file)}
    for more in ({}, {"SEQDEDUPE_TOKEN": "wr0ng"}):
        said = run("topics", status=1, **ca, **more).stderr
        assert b"[UNAUTHENTICATED]" in said
        assert b"SEQDEDUPE_TOKEN_FILE" in said
        assert b"wr0ng" not in said
    said = run("topics", "--json", *told[:2], "--tls-ca-file", "nowhere", status=1).stderr
    assert json.loads(said)["error"]["reason"] == "INVALID_CREDENTIALS"
    assert b"'nowhere' cannot be read: No such file" in said
    assert b"to files that this process can read" in said
    # gRPC adds nothing of its own.
    with warm.cold():
        assert b"[UNREACHABLE]" in run("topics", *told[:2], status=1).stderr
        ca["SEQDEDUPE_TLS_CA_FILE"] = str(Authority(authority.ca_file.parent, "other").ca_file)
        said = run("topics", *told[:2], status=1, **ca).stderr
    assert b"[TLS_FAILED] This client does not trust the authority of the sidecar's certificate" in said
    assert token.encode() not in said


def test_no_command_takes_a_token_where_all_can_see_it(run: Run, told: list[str]) -> None:
    assert b"--token" in run("topics", "--token", "s3cr3t", status=2).stderr
    assert b"Options come after" in run("topics", *told, "show", "t", status=2).stderr


def test_each_command_that_takes_an_address_takes_the_files_too() -> None:
    def commands(group: click.Group) -> Iterator[click.Command]:
        context = click.Context(group)
        for name in group.list_commands(context):
            one = group.get_command(context, name)
            assert one is not None
            yield one
            if isinstance(one, click.Group):
                yield from commands(one)

    found = 0
    for command in commands(cli):
        names = {name for option in command.params for name in option.opts}
        if "--address" in names:
            found += 1
            assert names.issuperset(FILES), command
            assert "--token" not in names, command
    assert found > 20


def test_help_says_where_they_come_from(environment: dict[str, str]) -> None:
    done = subprocess.run([COMMAND, "read", "--help"], capture_output=True, env=environment, timeout=TIMEOUT_SECONDS)
    text = " ".join(done.stdout.decode().split())
    assert "--token-file FILE" in text
    assert "[env var: SEQDEDUPE_TOKEN_FILE]" in text
