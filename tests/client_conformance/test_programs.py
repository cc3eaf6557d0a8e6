"""How the programs of compiled clients are built: once, again when their sources change, and not without a compiler."""

import fcntl
import subprocess
import threading
import time
from pathlib import Path
from typing import IO

import pytest

from seqdedupe.testing import LAST_RESORT_SECONDS
from tests.client_conformance.programs import Compiled
from tests.tiers import Service

SHELL = Service("Shell", ("sh",), "build it")
BUILD = "cp source made && echo built >> ../log"


def compiled(folder: Path, build: str = BUILD, fetch: str = "true", service: Service = SHELL) -> Compiled:
    """A program that a shell copies, and logs it."""
    source = folder / "client" / "source"
    source.parent.mkdir(exist_ok=True)
    if not source.exists():
        source.write_text("first")
    return Compiled(service, source.parent, [source], ["sh", "-c", fetch], ["sh", "-c", build], source.parent / "made")


def builds(folder: Path) -> int:
    return len((folder / "log").read_text().splitlines()) if (folder / "log").exists() else 0


def test_it_is_built_once_however_many_want_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them are at it before the first build ends: they build, or wait for the lock."""
    slow = f"echo begun >> ../begun && until [ -e ../go ]; do sleep 0.01; done && {BUILD}"
    program = compiled(tmp_path, slow)
    lock = fcntl.flock
    waiting: list[int] = []

    def noted(file: IO[str], operation: int) -> None:
        waiting.append(1)
        lock(file, operation)
        waiting.pop()

    def at_it() -> int:
        begun = tmp_path / "begun"
        return len(waiting) + (len(begun.read_text().splitlines()) if begun.exists() else 0)

    monkeypatch.setattr(fcntl, "flock", noted)
    wanting = [threading.Thread(target=program.ensure, daemon=True) for _ in range(3)]
    for thread in wanting:
        thread.start()
    ends = time.monotonic() + LAST_RESORT_SECONDS
    while at_it() < len(wanting) and time.monotonic() < ends:
        time.sleep(0.01)
    assert at_it() == len(wanting)
    (tmp_path / "go").touch()
    for thread in wanting:
        thread.join()
    assert program.ensure().read_text() == "first"
    assert builds(tmp_path) == 1


def test_it_is_built_again_when_a_source_changes_or_it_is_gone(tmp_path: Path) -> None:
    program = compiled(tmp_path)
    program.ensure()
    (program.folder / "source").write_text("second")
    assert program.ensure().read_text() == "second"
    program.made.unlink()
    assert program.ensure().read_text() == "second"
    assert builds(tmp_path) == 3


def test_a_program_of_which_the_build_failed_is_not_used(tmp_path: Path) -> None:
    compiled(tmp_path).ensure()
    (tmp_path / "client" / "source").write_text("second")
    with pytest.raises(subprocess.CalledProcessError):
        compiled(tmp_path, "exit 1").ensure()
    (tmp_path / "client" / "source").write_text("first")
    compiled(tmp_path).ensure()
    assert builds(tmp_path) == 2


@pytest.mark.parametrize(
    ("fetch", "service"), [("exit 1", SHELL), ("true", SHELL._replace(programs=("no-such-program",)))]
)
def test_without_a_compiler_or_what_it_needs_tests_are_skipped(tmp_path: Path, fetch: str, service: Service) -> None:
    with pytest.raises(pytest.skip.Exception, match=r"^no Shell \(build it\)$"):
        compiled(tmp_path, fetch=fetch, service=service).ensure()
    assert builds(tmp_path) == 0
