"""Compiled kernels are unpickled: they are kept only where nobody else can write, and only by the sidecar."""

import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from broker_sidecar import kernels
from broker_sidecar.kernels import is_ours_alone
from seqdedupe.format import jit
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from tests.first_imports import ROOT, RUNNER, Imports, sources

SOMEBODY = 54_321
GiveAway = Callable[[Path], None]


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    """A folder that belongs to us alone."""
    folder = tmp_path / "ours"
    folder.mkdir(mode=0o700)
    assert is_ours_alone(folder)
    return folder


@pytest.fixture
def give_away(monkeypatch: pytest.MonkeyPatch) -> GiveAway:
    """Gives what stands at a path to another user; where only root can, we become another one."""

    def give(path: Path) -> None:
        if os.geteuid() == 0:
            os.chown(path, SOMEBODY, -1, follow_symlinks=False)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: SOMEBODY)

    return give


def test_a_folder_of_somebody_else_is_not_ours_alone_nor_what_is_below_it(ours: Path, give_away: GiveAway) -> None:
    below = ours / "a" / "b"
    below.mkdir(parents=True, mode=0o700)
    assert is_ours_alone(below)
    give_away(ours)
    assert not is_ours_alone(ours)
    assert not is_ours_alone(below)


@pytest.mark.parametrize(
    ("mode", "is_safe"), [(0o700, True), (0o755, True), (0o770, False), (0o702, False), (0o1777, True)]
)
@pytest.mark.parametrize("where", ["folder", "parent", "two above"])
def test_where_others_can_write_is_not_ours_alone_unless_they_cannot_replace_ours(
    ours: Path, mode: int, is_safe: bool, where: str
) -> None:
    folder = ours / "a" / "b"
    folder.mkdir(parents=True, mode=0o700)
    {"folder": folder, "parent": folder.parent, "two above": ours}[where].chmod(mode)
    assert is_ours_alone(folder) is is_safe


def test_a_link_is_followed_every_step_of_the_way(ours: Path, tmp_path: Path, give_away: GiveAway) -> None:
    shared = tmp_path / "shared"
    (shared / "theirs").mkdir(parents=True)
    (ours / "to-ours").symlink_to("../ours")
    (ours / "to-theirs").symlink_to(shared / "theirs")
    (shared / "to-ours").symlink_to(ours)
    (ours / "back-and-forth").symlink_to("../shared/to-ours")
    links = [ours / "to-ours", ours / "to-theirs", shared / "to-ours", ours / "back-and-forth"]
    assert all(map(is_ours_alone, links))
    shared.chmod(0o777)
    assert [is_ours_alone(link) for link in links] == [True, False, False, False]
    (ours / "round").symlink_to("round")
    assert not is_ours_alone(ours / "round")
    assert not is_ours_alone(ours / "missing")
    give_away(ours / "to-ours")
    assert not is_ours_alone(ours / "to-ours")


def kept(monkeypatch: pytest.MonkeyPatch, data: str) -> Path | None:
    """The folder that `prepare` decides for."""
    chosen: list[Path] = []
    monkeypatch.setattr(jit, "keep_compiled", chosen.append)
    assert kernels.prepare(data), "nothing has been compiled"
    return chosen[0] if chosen else None


def test_a_folder_is_made_that_others_cannot_even_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home" / "cache"))
    umask = os.umask(0)
    try:
        folder = kept(monkeypatch, str(tmp_path / "data"))
    finally:
        os.umask(umask)
    assert folder is not None
    assert folder.parent == tmp_path / "home" / "cache" / "seqdedupe"
    made = [folder, folder.parent, folder.parent.parent, tmp_path / "home"]
    assert [stat.S_IMODE(place.stat().st_mode) for place in made] == [0o700] * 4
    assert not (tmp_path / "data").exists()


def foreign(home: Path, give_away: GiveAway) -> None:
    home.mkdir(mode=0o700)
    give_away(home)


def writable_for_the_group(home: Path, _: GiveAway) -> None:
    home.mkdir()
    home.chmod(0o770)


def planted_link(home: Path, _: GiveAway) -> None:
    # Somebody made the folder before us, where all may make one.
    theirs = home.with_name("theirs")
    theirs.mkdir()
    theirs.chmod(0o777)
    home.mkdir(mode=0o700)
    (home / "seqdedupe").symlink_to(theirs)


def read_only(home: Path, _: GiveAway) -> None:
    home.symlink_to("/proc")


def file(home: Path, _: GiveAway) -> None:
    home.touch()


@pytest.mark.parametrize("bad", [foreign, writable_for_the_group, planted_link, read_only, file])
def test_a_bad_home_gives_way_to_the_data_directory_and_without_one_nothing_is_kept(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    give_away: GiveAway,
    bad: Callable[[Path, GiveAway], None],
) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    bad(home, give_away)
    assert kept(monkeypatch, "") is None
    if bad is foreign and os.geteuid() == SOMEBODY:
        return  # what we make is not ours in this test
    data = tmp_path / "data"
    folder = kept(monkeypatch, str(data))
    assert folder is not None
    assert folder.parent == data / "kernels"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o777)
    assert kept(monkeypatch, str(data)) is None, "others can write there"


def test_importing_the_core_writes_nothing(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    environment = os.environ | {"HOME": str(home), "XDG_CACHE_HOME": str(home), "TMPDIR": str(home)}
    program = "import seqdedupe.format.jit as jit, seqdedupe.core.rule as rule; assert rule.decide.signatures"
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=LAST_RESORT_SECONDS)
    assert list(home.rglob("*")) == []


def test_a_start_that_compiles_says_so_and_the_next_one_has_no_need_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    sidecar = Sidecar(tmp_path / "sidecar")

    sidecar.spawn()
    while not list((tmp_path / "home").rglob("*.nbi")):
        sidecar.check_running()
        time.sleep(0.01)
    # It is broken off, and has kept some of them.
    sidecar.kill()
    sidecar.start()
    sidecar.kill()
    sidecar.start()
    sidecar.kill()
    assert sum("compiling" in line for line in sidecar.errors) == 1 + 1


@pytest.fixture(scope="module")
def imports() -> Imports:
    return Imports(sources())


def test_no_program_imports_kernels_before_it_is_known_where_they_are_kept(imports: Imports) -> None:
    """Each start would compile them, which takes ten seconds of CPU."""
    assert imports.all_too_early() == []
    programs = imports.programs()
    assert {"broker_sidecar.__main__", "bench.__main__", "seqdedupe_spark.reader_job"} < {*programs}
    # Those that are for the runner are given to it wherever that is said.
    modules = sources()
    others = [ROOT / "Makefile", *ROOT.glob("docs/**/*.md")]
    places = [*modules.items(), *((str(path), path.read_text()) for path in others)]
    for_runner = [name for name in programs if f"{RUNNER} {name} " in modules[name]]
    assert len(for_runner) > 5
    for name in for_runner:
        assert [where for where, text in places if f"-m {name}" in text or f'"-m", "{name}"' in text] == []


USES_KERNELS = "from seqdedupe.core import rule\n"
MAIN = 'if __name__ == "__main__":\n    '
PREPARES = "from broker_sidecar import kernels\n"


@pytest.mark.parametrize(
    ("program", "is_early"),
    [
        (f"{USES_KERNELS}{MAIN}print(rule)\n", True),
        # By another module that does; by one that does so within.
        (f"import seqdedupe.log.embedded.logs\n{MAIN}pass\n", True),
        (f"{PREPARES}{MAIN}{USES_KERNELS}    kernels.prepare()\n", True),
        (f"def main() -> None:\n    {USES_KERNELS}\n{MAIN}main()\n", True),
        (f"def work() -> None:\n    {USES_KERNELS}", True),
        (f"{PREPARES}{USES_KERNELS}kernels.prepare()\n{MAIN}pass\n", True),
        (f"{PREPARES}def run() -> None:\n    {USES_KERNELS}    kernels.prepare()\n{MAIN}run()\n", True),
        (f"{PREPARES}{MAIN}kernels.prepare()\n    {USES_KERNELS}", False),
        (f"{PREPARES}def work() -> None:\n    {USES_KERNELS}{MAIN}kernels.prepare()\n    work()\n", False),
        (f'"""`{RUNNER} planted --seed 1`"""\n{USES_KERNELS}{MAIN}print(rule)\n', False),
        (f"import seqdedupe.errors\n{MAIN}pass\n", False),
        (USES_KERNELS, False),
    ],
)
def test_a_program_that_does_is_found(imports: Imports, program: str, is_early: bool) -> None:
    assert bool(imports.too_early("planted", program)) is is_early
