"""`seqdedupe serve --dev`: what it prints works as it stands, and nothing is left of it."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from seqdedupe.address import DEFAULT_ADDRESS
from seqdedupe.testing import LAST_RESORT_SECONDS

SEQDEDUPE = str(Path(sys.executable).with_name("seqdedupe"))


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Where temporary folders are in one that belongs to the test, and the command is found."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("SEQDEDUPE_")}
    return ours | {
        "TMPDIR": str(tmp_path),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }


@contextmanager
def dev(environment: dict[str, str], *flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """One that serves, and what it has printed."""
    command = [SEQDEDUPE, "serve", "--dev", "--log-level", "error", *flags]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            printed = ""
            while " read " not in printed:
                line = process.stdout.readline()
                assert line, printed
                printed += line
            yield process, printed
        finally:
            process.kill()


def folders(tmp_path: Path) -> list[Path]:
    return list(tmp_path.glob("seqdedupe-dev-*"))


@pytest.mark.parametrize("ends_with", [signal.SIGTERM, signal.SIGINT])
def test_what_it_prints_works_and_its_data_go_with_it(
    environment: dict[str, str], tmp_path: Path, ends_with: signal.Signals
) -> None:
    with dev(environment) as (process, printed):
        [folder] = folders(tmp_path)
        assert f"When it ends, it deletes its data in {folder}." in printed
        publish, read = (line.strip() for line in printed.splitlines() if line.startswith("    "))
        for command, wanted in ((publish, "2 NotDup, 0 Dup"), (publish, "0 NotDup, 0 Dup"), (read, "one")):
            done = subprocess.run(
                ["sh", "-c", command],
                env=environment,
                capture_output=True,
                text=True,
                timeout=LAST_RESORT_SECONDS,
                check=False,
            )
            assert (done.returncode, wanted in done.stdout) == (0, True), (command, done.stdout, done.stderr)
        process.send_signal(ends_with)
        assert process.wait(LAST_RESORT_SECONDS) == 0
    assert folders(tmp_path) == []


def test_where_the_usual_port_is_taken_it_has_another_one(environment: dict[str, str]) -> None:
    host, _, port = DEFAULT_ADDRESS.partition(":")
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind((host, int(port)))
        except OSError:
            pass  # somebody else has it
        else:
            taken.listen()
        with dev(environment) as (_, printed):
            addresses = set(re.findall(r"127\.0\.0\.1:\d+", printed))
    assert len(addresses) == 1
    assert DEFAULT_ADDRESS not in addresses


@pytest.mark.parametrize(
    ("flags", "variables", "file", "said"),
    [
        (["--data-directory", "here"], {}, "", "data_directory (given by a flag) contradicts --dev"),
        ([], {"SEQDEDUPE_WORKERS": "2"}, "", "workers (given by SEQDEDUPE_WORKERS in the environment) contradicts"),
        ([], {}, 'authentication = "token"', "authentication (given by the file configuration) contradicts --dev"),
        ([], {}, '[pulsar]\nadmin_url = "http://h"', "pulsar.admin_url (given by the file configuration) contradicts"),
        (["--listen", "0.0.0.0:7000"], {}, "", "[INSECURE_LISTEN]"),
        (["--rebuild-store"], {}, "", "--dev begins without data"),
    ],
)
def test_a_configuration_that_contradicts_it_is_an_error_and_leaves_nothing(
    environment: dict[str, str], tmp_path: Path, flags: list[str], variables: dict[str, str], file: str, said: str
) -> None:
    if file:
        (tmp_path / "configuration").write_text(file)
        flags = [*flags, "--config", "configuration"]
    done = subprocess.run(
        [SEQDEDUPE, "serve", "--dev", *flags],
        env=environment | variables,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LAST_RESORT_SECONDS,
        check=False,
    )
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir() if path.name != "configuration"] == []


def test_keys_that_do_not_contradict_it_are_taken(environment: dict[str, str], tmp_path: Path) -> None:
    with dev(environment, "--listen", f"unix:{tmp_path}/s") as (_, printed):
        assert f"--address unix:{tmp_path}/s" in printed
        assert (tmp_path / "s").is_socket()
    # The control arm: one that is killed cannot delete anything.
    assert len(folders(tmp_path)) == 1
