"""What the shell offers for a word that has begun: the names of commands, of their options, and of profiles."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from seqdedupe.cli import commands
from tests.cli.conftest import COMMAND, TIMEOUT_SECONDS
from tests.cli.test_start import SHOW, SLOW


def asked(line: str) -> dict[str, str]:
    """The environment with which a shell's script asks about the last word of a line."""
    return os.environ | {
        "_SEQDEDUPE_COMPLETE": "bash_complete",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split(" ")) - 1),
    }


def offered(line: str, **more: str) -> list[str]:
    """What the shell offers."""
    done = subprocess.run(
        [COMMAND], env=asked(line) | more, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=True
    )
    assert done.stderr == ""
    return [line.partition(",")[2] for line in done.stdout.splitlines() if line]


def test_names_of_commands_and_options_are_offered() -> None:
    assert offered("seqdedupe re") == ["read", "rebuild-topic", "reset-producer", "restore"]
    assert len(offered("seqdedupe ")) > 25
    assert offered("seqdedupe topics cr") == ["create"]
    assert offered("seqdedupe read orders --t") == [
        "--to",
        "--tail",
        "--token-file",
        "--tls-ca-file",
        "--tls-certificate-file",
        "--tls-key-file",
    ]
    assert offered("seqdedupe no-such-command x") == []


def test_names_of_jobs_and_their_options_are_offered() -> None:
    assert offered("seqdedupe job ") == ["audit", "bootstrap", "lag", "positions", "reset", "run"]
    assert offered("seqdedupe job r") == ["reset", "run"]
    assert "--table" in offered("seqdedupe job run --")
    assert "--topics-pattern" in offered("seqdedupe job audit orders --")
    assert offered("seqdedupe job run --tab") == ["--table"]
    assert offered("seqdedupe job no-such-job x") == []
    assert offered("seqdedupe job run --job ") == []


def test_jobs_are_those_that_there_are() -> None:
    reader_job = pytest.importorskip("seqdedupe_spark.reader_job")
    for name, line in commands._JOBS.items():
        if name not in commands._MODULES:
            assert reader_job.cli.commands[name].short_help == line
    assert set(commands._JOBS) == {*reader_job.cli.commands, *commands._MODULES}


def test_names_of_profiles_are_offered(tmp_path: Path) -> None:
    (tmp_path / "seqdedupe").mkdir()
    (tmp_path / "seqdedupe" / "profiles.toml").write_text("[production]\n[staging]\n")
    assert offered("seqdedupe read --profile pr", XDG_CONFIG_HOME=str(tmp_path)) == ["production"]
    (tmp_path / "seqdedupe" / "profiles.toml").write_text("[production")
    assert offered("seqdedupe read --profile pr", XDG_CONFIG_HOME=str(tmp_path)) == []


@pytest.mark.parametrize(
    ("line", "is_slow"),
    [("seqdedupe re", False), ("seqdedupe ", False), ("seqdedupe job ", False), ("seqdedupe read -", True)],
)
def test_names_of_commands_are_offered_without_what_commands_need(line: str, is_slow: bool) -> None:
    """The control: options are the command's, which is imported for them."""
    done = subprocess.run([sys.executable, "-c", SHOW], env=asked(line), capture_output=True, text=True)
    modules = set(done.stdout.splitlines()[-1].split())
    assert "click.shell_completion" in modules
    assert modules.isdisjoint(SLOW) is not is_slow


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script(shell: str, tmp_path: Path) -> None:
    environment = os.environ | {"_SEQDEDUPE_COMPLETE": f"{shell}_source"}
    done = subprocess.run([COMMAND], env=environment, capture_output=True, text=True, check=True)
    assert f"_SEQDEDUPE_COMPLETE={shell}_complete" in done.stdout


def test_bash_takes_the_script(tmp_path: Path) -> None:
    """In a real bash the function of the script offers what the command says."""
    script = tmp_path / "seqdedupe.bash"
    environment = os.environ | {"PATH": f"{Path(COMMAND).parent}:{os.environ['PATH']}"}
    with script.open("w") as file:
        source = environment | {"_SEQDEDUPE_COMPLETE": "bash_source"}
        subprocess.run([COMMAND], env=source, stdout=file, check=True)
    ask = (
        f"source {script}; COMP_WORDS=(seqdedupe topics de); COMP_CWORD=2; "
        "_seqdedupe_completion seqdedupe de topics; echo ${COMPREPLY[@]}"
    )
    done = subprocess.run(["bash", "-c", ask], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "delete\n"
