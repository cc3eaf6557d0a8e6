"""`config check`: all that a start would refuse, and nothing locked, made or written."""

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from seqdedupe.files import locked_directory
from seqdedupe.store.directories import MANIFEST_FILE
from seqdedupe.testing import Sidecar
from tests.broker_sidecar.door.several import first_of_free_ports
from tests.certificates import DAY, NOW, Authority
from tests.cli.conftest import COMMAND, TIMEOUT_SECONDS, Run


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """No key of a sidecar; the user's home is a folder of the test's own."""
    cleared = {name: value for name, value in os.environ.items() if not name.startswith(("SEQDEDUPE_", "XDG_"))}
    return cleared | {"HOME": str(tmp_path / "home")}


@pytest.fixture(autouse=True)
def unchanged(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[None]:
    """No test of this file changes what it has set up: `settled` takes down what that is."""
    yield
    if (before := SETTLED.pop(tmp_path, None)) is not None:
        assert state_of(tmp_path) == before


SETTLED: dict[Path, dict[str, tuple[int, int]]] = {}


def state_of(folder: Path) -> dict[str, tuple[int, int]]:
    """What is there, with times of change."""
    return {str(path): (found.st_mtime_ns, found.st_ino) for path in folder.rglob("*") for found in [path.lstat()]}


def write(folder: Path, **keys: object) -> str:
    """A configuration; nothing may change from now on."""
    path = folder / "sidecar.toml"
    path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items()))
    SETTLED[folder] = state_of(folder)
    return path.name


def problems(run: Run, *arguments: str, status: int, **more: str) -> dict[str, tuple[bool, str]]:
    """By key: whether it is an error, and what it is."""
    done = run("config", "check", *arguments, "--json", status=status, **more)
    if status:
        assert json.loads(done.stderr)["error"]["reason"] == "INVALID_CONFIGURATION"
    found = json.loads(done.stdout)["problems"]
    return {one["key"] or one["message"]: (one["is_error"], one["message"]) for one in found}


def starts(folder: Path, file: str, environment: dict[str, str]) -> "subprocess.CompletedProcess[bytes]":
    """What a real start says, which ends."""
    assert state_of(folder) == SETTLED.pop(folder)  # a start makes what it needs
    command = [COMMAND, "serve", "--config", file]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=TIMEOUT_SECONDS)


def test_a_valid_one_is_said_to_be(run: Run, tmp_path: Path) -> None:
    file = write(tmp_path, data_directory="new/data", listen="127.0.0.1:0")
    assert run("config", "check", file).stdout == b"the configuration is valid\n"
    assert run("config", "check", SEQDEDUPE_DATA_DIRECTORY="d", SEQDEDUPE_LISTEN="127.0.0.1:0").stdout.count(b"\n") == 1


def test_every_key_that_is_wrong_is_named(run: Run, tmp_path: Path, environment: dict[str, str]) -> None:
    file = write(
        tmp_path,
        colour="red",
        max_topics="many",
        max_streams=0,
        log="paper",
        listen="nowhere",
        workers=9999,
        tls_certificate_file="c.pem",
        instance_name="a b",
        socket_mode="9",
    )
    found = problems(run, file, status=2, SEQDEDUPE_DRAIN_TIMEOUT_SECONDS="x")
    expected = {"colour", "max_topics", "max_streams", "log", "listen", "workers", "tls_key_file", "instance_name"}
    assert expected | {"socket_mode", "data_directory", "drain_timeout_seconds"} == set(found)
    assert all(is_error for is_error, _ in found.values())
    assert found["max_streams"][1].endswith("(given by the file sidecar.toml)")
    assert "SEQDEDUPE_DRAIN_TIMEOUT_SECONDS in the environment" in found["drain_timeout_seconds"][1]
    # The control: a start names one of them.
    said = starts(tmp_path, file, environment)
    assert said.returncode == 2
    assert sum(message.encode() in said.stderr for _, message in found.values()) == 1


def test_each_key_stands_in_one_line(run: Run, tmp_path: Path) -> None:
    file = write(tmp_path, data_directory="data", listen="127.0.0.1:0", max_topics=0, max_streams=0)
    done = run("config", "check", file, status=2)
    shown = done.stdout.decode().splitlines()
    assert [line[:19] for line in shown] == ["error: max_topics i", "error: max_streams "]
    assert b"has 2 errors: a start would end with the first [INVALID_CONFIGURATION]" in done.stderr


@pytest.mark.parametrize("text", [None, "max_topics = ", "\udcff"])
def test_a_file_that_cannot_be_read_is_one_problem(run: Run, tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "x.toml").write_bytes(text.encode(errors="surrogateescape"))
    assert b"x.toml cannot be read" in run("config", "check", "x.toml", status=2).stdout


def test_files_that_are_named_are_read(run: Run, tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "rules.toml").write_text("[[allow]]\nname = 5\n")
    (tmp_path / "keys.json").write_text("{}")
    keys: dict[str, Any] = {
        "data_directory": "data",
        "listen": "127.0.0.1:0",
        "rules_file": "rules.toml",
        "token_keys_file": "keys.json",
        "token_audience": "a",
        "peers": "127.0.0.1:7777",
        "peer_token_file": "none.token",
        "audit_file": "none/trail",
        "backup_directory": "none",
    }
    found = problems(run, write(tmp_path, **keys), status=2)
    assert any("rules.toml" in message and is_error for is_error, message in found.values())
    assert any("keys.json" in message and is_error for is_error, message in found.values())
    assert found["peer_token_file"][0]
    assert found["audit_file"][0]
    assert found["backup_directory"] == (False, "backup_directory = 'none': there is no such directory")
    assert starts(tmp_path, "sidecar.toml", environment).returncode != 0


@pytest.mark.parametrize("wrong", ["", "another key", "expired", "absent"])
def test_a_certificate_is_looked_at(run: Run, tmp_path: Path, wrong: str, environment: dict[str, str]) -> None:
    authority = Authority(tmp_path)
    own, other = authority.issue("own", "127.0.0.1"), authority.issue("other", "127.0.0.1")
    old = authority.issue("old", "127.0.0.1", not_before=NOW - 2 * DAY, not_after=NOW - DAY)
    certificate, key, said = {
        "": (own.certificate_file, own.key_file, ""),
        "another key": (own.certificate_file, other.key_file, "does not fit the key in"),
        "expired": (old.certificate_file, old.key_file, "is valid only from"),
        "absent": (tmp_path / "none.pem", own.key_file, "cannot be read: No such file"),
    }[wrong]
    keys = {"tls_certificate_file": str(certificate), "tls_key_file": str(key)}
    file = write(tmp_path, data_directory="data", listen="127.0.0.1:0", **keys)
    found = problems(run, file, status=2 if wrong else 0)
    assert [said in message for _, message in found.values()] == ([True] if wrong else [])
    if wrong:
        assert said.encode() in starts(tmp_path, file, environment).stderr


def test_a_data_directory_that_cannot_be_used_is_an_error(
    run: Run, tmp_path: Path, environment: dict[str, str]
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "backup").mkdir()
    (tmp_path / "backup" / MANIFEST_FILE).write_text("")
    for folder in ("file", "file/below", "backup"):
        file = write(tmp_path, data_directory=folder, listen="127.0.0.1:0")
        found = problems(run, file, status=2)
        assert list(found) == ["data_directory"]
        assert state_of(tmp_path) == SETTLED[tmp_path]
        assert found["data_directory"][1].encode() in starts(tmp_path, file, environment).stderr


def test_what_a_running_sidecar_has_is_a_warning(run: Run, tmp_path: Path) -> None:
    with Sidecar(tmp_path / "data") as sidecar:
        path = tmp_path / "sidecar.toml"
        path.write_text(f'data_directory = "{sidecar.data}"\nlisten = "{sidecar.address}"\n')
        shown = run("config", "check", path.name).stdout.decode()
        assert f"warning: the data directory {sidecar.data} is in use: process {sidecar.pid} " in shown
        assert f"warning: listen = '{sidecar.address}': cannot listen there" in shown
        assert shown.splitlines()[-1] == "the configuration is valid: warnings alone"
    # The control: now it has neither.
    path.write_text(f'data_directory = "{sidecar.data}"\nlisten = "127.0.0.1:0"\n')
    assert run("config", "check", path.name).stdout == b"the configuration is valid\n"


def test_a_start_is_not_held_up(run: Run, tmp_path: Path) -> None:
    """The directory can be locked while another process has it only looked at: here it is, the whole time."""
    folder = tmp_path / "data"
    folder.mkdir()
    with locked_directory(folder):
        file = write(tmp_path, data_directory="data", listen="127.0.0.1:0")
        found = problems(run, file, status=0)
        assert [(is_error, "is in use" in message) for is_error, message in found.values()] == [(False, True)]


def test_an_address_of_another_machine_is_an_error(run: Run, tmp_path: Path) -> None:
    file = write(tmp_path, data_directory="data", listen="192.0.2.1:0", allow_insecure_listen=True)
    ((is_error, message),) = problems(run, file, status=2).values()
    assert is_error
    assert "Cannot assign requested address" in message
    socket_file = write(tmp_path, data_directory="data", listen="unix:none/socket")
    assert problems(run, socket_file, status=2)["listen"][1].endswith("there is no directory 'none'")


def test_a_port_that_somebody_has_is_a_warning(run: Run, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        file = write(tmp_path, data_directory="data", listen=f"127.0.0.1:{port}")
        assert [is_error for is_error, _ in problems(run, file, status=0).values()] == [False]


def test_the_ports_of_all_workers_are_looked_at(run: Run, tmp_path: Path) -> None:
    first = first_of_free_ports(2)
    with socket.create_server(("127.0.0.1", first + 1)):
        keys = {"data_directory": "data", "listen": "unix:s", "pulsar_listen": f"127.0.0.1:{first}"}
        ((is_error, message),) = problems(run, write(tmp_path, **keys, workers=2), status=0).values()
        assert not is_error
        assert message.startswith(f"pulsar_listen = '127.0.0.1:{first + 1}': cannot listen there")
        # The control arm: one process has no second port.
        assert not problems(run, write(tmp_path, **keys), status=0)
