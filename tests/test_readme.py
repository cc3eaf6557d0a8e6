"""What the README says is tried: its commands and its program, against a real sidecar."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from tests import warm
from tests.conftest import StartSidecar
from tests.processes import running
from tests.spark.run_job import QUICK

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
COMMAND = Path(sys.executable).parent / "seqdedupe"


@pytest.fixture(autouse=True)
def as_for_a_user() -> Iterator[None]:
    with warm.cold():
        yield


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


EXPORT = "export SEQDEDUPE_TOKEN_FILE=$PWD/data/token"


@pytest.fixture
def closed(start_sidecar: StartSidecar) -> Sidecar:
    """As `seqdedupe serve` starts it."""
    return start_sidecar(authentication="token")


def environment_of(sidecar: Sidecar) -> dict[str, str]:
    return os.environ | {"SEQDEDUPE_ADDRESS": sidecar.address, "SEQDEDUPE_TOKEN_FILE": str(sidecar.token_file)}


def test_the_program_publishes_and_reads_back(closed: Sidecar) -> None:
    (program,) = blocks("python")
    assert "127.0.0.1:6660" in program
    program = program.replace("127.0.0.1:6660", closed.address)
    command, environment = [sys.executable, "-c", program], environment_of(closed)
    for first in (0, 100):
        ran = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=LAST_RESORT_SECONDS, check=False
        )
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.count("NOT_DUP") == 100
        assert f"{first + 99} order-service {first + 99} b'order {first + 99}'" in ran.stdout


def test_the_commands_do_what_they_are_shown_for(closed: Sidecar, tmp_path: Path) -> None:
    shown = [line[2:] for block in blocks("console") for line in block.splitlines() if line.startswith("$ ")]
    assert shown.index(EXPORT) > shown.index("seqdedupe serve --data-directory ./data")
    shown.remove(EXPORT)
    commands = [shlex.split(line.partition("#")[0]) for line in shown if not line.startswith("make")]
    assert [command[1] for command in commands] == ["serve", "publish", "read", "topics", "job", "job"]
    (tmp_path / "events.csv").write_text("id,what\n" + "".join(f"{i},event {i}\n" for i in range(5)))
    environment = environment_of(closed) | QUICK
    output = []
    for command in commands[1:]:
        ran = subprocess.run(
            [COMMAND, *command[1:]],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LAST_RESORT_SECONDS,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        output.append(ran.stdout)
    assert output[1].splitlines() == ["0,event 0", "1,event 1", "2,event 2"]
    assert "events" in output[2]
    assert "5 messages read, 5 rows written" in output[3]
    assert output[4].splitlines()[-1] == "clean: 1 topic"


def test_the_sidecar_starts_as_shown(tmp_path: Path) -> None:
    """`seqdedupe serve` with the flags of the README, but for the address."""
    command: list[str | Path] = [COMMAND, "serve", "--data-directory", "./data", "--listen", "127.0.0.1:0"]
    with running(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if '"serving"' in line:
                break
        else:
            pytest.fail("it never served")
        process.terminate()
        process.stderr.read()
        assert process.wait(LAST_RESORT_SECONDS) == 0
    assert (tmp_path / "data" / "store").is_dir()
    assert (tmp_path / "data" / "token").is_file()


def test_every_file_that_the_readme_points_to_is_there() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    missing = [link for link in links if "://" not in link and not (ROOT / link).exists()]
    assert len(links) > 5
    assert missing == []
