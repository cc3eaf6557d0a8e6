"""`make install` into a folder, and what is there then: a command that serves, a unit, a configuration.

Its packages come from the network, so what needs them runs in `make campaign`, before a release. The rest is put in its
place by the same rules.
"""

import os
import shutil
import stat
import subprocess
from configparser import RawConfigParser
from pathlib import Path

import pytest

from broker_sidecar.config import load
from tests.broker_sidecar.manager import TIMEOUT_SECONDS, managing
from tests.deploy.durations import longest_stop_seconds
from tests.processes import running
from tests.tiers import SYSTEMD

ROOT = Path(__file__).parents[2]
SOURCES = ("Makefile", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md")
SOURCE_FOLDERS = ("deploy", "docs", "seqdedupe", "broker_sidecar", "spark")
LIBRARY = "usr/local/lib/seqdedupe"
UNITS = "usr/local/lib/systemd/system"
UNIT = f"{UNITS}/seqdedupe.service"
BACKUP_UNIT = f"{UNITS}/seqdedupe-backup.service"
BACKUP_TIMER = f"{UNITS}/seqdedupe-backup.timer"
CONFIGURATION = "etc/seqdedupe/seqdedupe.toml"
MOST_EXPOSED = 11
"""`systemd-analyze security` gives 1.1 of 10: numba writes what is executed then, and a server needs the network."""


def make(source: Path, what: str, root: Path) -> None:
    environment = os.environ | {"SOURCE_DATE_EPOCH": "1700000000"}
    command = ["make", what, f"DESTDIR={root}", f"PYTHON={shutil.which('python3')}"]
    done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources as in a source archive: no repository, nothing that was built before."""
    copy = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        shutil.copy(ROOT / name, copy / name)
    for name in SOURCE_FOLDERS:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    return copy


@pytest.fixture(scope="module")
def installed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where it was installed, packages and all."""
    root = tmp_path_factory.mktemp("installed")
    make(source, "install", root)
    return root


def put_in_place(source: Path, root: Path) -> None:
    """What `make install` does after its packages are there: its own rules, run by a shell."""
    # Within another make it would say where it is, among the rules.
    command = ["make", "--no-print-directory", "-n", "install", f"DESTDIR={root}"]
    dry = subprocess.run(command, cwd=source, capture_output=True, text=True, check=True)
    script = dry.stdout[dry.stdout.index("install -d ") :]
    subprocess.run(["sh", "-ec", script], cwd=source, capture_output=True, check=True)


@pytest.fixture(scope="module")
def root(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all but the packages is in its place, with a program that does nothing."""
    root = tmp_path_factory.mktemp("root")
    program = root / LIBRARY / "bin" / "seqdedupe"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    put_in_place(source, root)
    return root


@pytest.fixture(scope="module")
def unit(root: Path) -> dict[str, dict[str, str]]:
    """The unit's sections; of a key that is there twice the last one."""
    parser = RawConfigParser(strict=False, delimiters=("=",), comment_prefixes=("#",))
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(root / UNIT)
    return {name: dict(parser[name]) for name in parser.sections()}


@pytest.fixture(scope="module")
def systemd_analyze() -> str:
    """The program; without it nothing is known about the unit, which only `.ci/run` makes a failure."""
    SYSTEMD.check()
    return SYSTEMD.programs[0]


def test_what_was_installed_serves_as_the_unit_has_it(
    installed: Path, unit: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    """Started as systemd starts it, but for what only root may: another folder for the data, and its own address.
    Kernels are not compiled: that takes half a minute in a new place, and is the same everywhere."""
    program, *words = unit["Service"]["ExecStart"].split()
    assert program == f"/{LIBRARY}/bin/seqdedupe"
    words = [str(installed / CONFIGURATION) if word == f"/{CONFIGURATION}" else word for word in words]
    # The interpreter that the program names is where it will be, not where it is.
    first = (installed / program[1:]).read_text().splitlines()[0]
    assert first in (f"#!/{LIBRARY}/bin/python", f"#!/{LIBRARY}/bin/python3")
    command = [str(installed / LIBRARY / "bin" / "python"), str(installed / program[1:]), *words]
    kept = ["--data-directory", str(tmp_path / "data"), "--listen", f"unix:{tmp_path}/s"]
    kept += ["--audit-file", str(tmp_path / "audit.jsonl")]
    with managing() as told:
        environment = told.environment | {"PATH": os.environ["PATH"], "NUMBA_DISABLE_JIT": "1"}
        with running([*command, *kept], env=environment, cwd="/") as process:
            told.until(lambda line: line == "READY=1")
            process.terminate()
            assert process.wait(TIMEOUT_SECONDS) == 0


def test_nothing_says_where_it_was_built(installed: Path) -> None:
    """A package is made in another folder than the one where it is installed."""
    texts = [path for path in (installed / LIBRARY / "bin").iterdir() if not path.is_symlink()]
    texts += [installed / UNIT, installed / LIBRARY / "pyvenv.cfg", installed / CONFIGURATION]
    assert len(texts) > 4
    for text in texts:
        assert str(installed) not in text.read_text(errors="replace"), text
    assert (installed / "usr/local/bin/seqdedupe").resolve() == installed / LIBRARY / "bin" / "seqdedupe"
    unit = (installed / UNIT).read_text()
    assert "@" not in unit.replace("@system-service", "").replace("@privileged @resources", "")


def test_it_is_killed_only_after_it_has_drained(root: Path, unit: dict[str, dict[str, str]]) -> None:
    service = unit["Service"]
    config = load(root / CONFIGURATION, {}, {})
    assert int(service["TimeoutStopSec"]) > longest_stop_seconds(config.drain_timeout_seconds)
    assert (service["KillSignal"], service["KillMode"], service["Type"]) == ("SIGTERM", "mixed", "notify")
    assert config.data_directory == f"/var/lib/{service['StateDirectory']}"
    assert Path(config.audit_file).parent == Path("/var/log", service["LogsDirectory"])
    assert f"{config.audit_file} {config.audit_file}.* {{" in (root / "etc/logrotate.d/seqdedupe").read_text()
    # The kernels are compiled, and made executable, by the process itself.
    assert "MemoryDenyWriteExecute" not in service


def test_nobody_else_can_make_a_socket_where_it_listens(root: Path, unit: dict[str, dict[str, str]]) -> None:
    """Who could would be shown the tokens of clients while the service is away. Its group may connect."""
    service = unit["Service"]
    config = load(root / CONFIGURATION, {}, {})
    assert Path(config.listen.removeprefix("unix:")).parent == Path("/run", service["RuntimeDirectory"])
    assert int(service["RuntimeDirectoryMode"], 8) & 0o022 == 0
    assert config.also_listen == ""
    assert (config.socket_mode, service["Group"]) == ("660", "seqdedupe")


@pytest.mark.parametrize("path", [UNIT, BACKUP_UNIT])
def test_systemd_understands_the_unit_and_finds_it_closed(
    root: Path, systemd_analyze: str, tmp_path: Path, path: str
) -> None:
    here = tmp_path / Path(path).name
    here.write_text((root / path).read_text().replace("/usr/local", str(root / "usr/local")))
    done = subprocess.run([systemd_analyze, "verify", "--man=no", here], capture_output=True, text=True, check=False)
    assert (done.returncode, [line for line in done.stderr.splitlines() if "seqdedupe" in line]) == (0, [])
    judged = [systemd_analyze, "security", "--offline=yes", "--no-pager", f"--threshold={MOST_EXPOSED}"]
    done = subprocess.run([*judged, here], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    # The control arm: what is open is found to be that.
    here.write_text(here.read_text().replace("ProtectSystem=strict\n", "").replace("NoNewPrivileges=yes\n", ""))
    assert subprocess.run([*judged, here], capture_output=True, check=False).returncode != 0


def test_systemd_understands_the_timer_and_knows_when(root: Path, systemd_analyze: str, tmp_path: Path) -> None:
    for path in (BACKUP_UNIT, BACKUP_TIMER):
        text = (root / path).read_text().replace("/usr/local", str(root / "usr/local"))
        (tmp_path / Path(path).name).write_text(text)
    timer = tmp_path / Path(BACKUP_TIMER).name
    done = subprocess.run([systemd_analyze, "verify", "--man=no", timer], capture_output=True, text=True, check=False)
    assert (done.returncode, [line for line in done.stderr.splitlines() if "seqdedupe" in line]) == (0, [])
    [when] = [line.partition("=")[2] for line in timer.read_text().splitlines() if line.startswith("OnCalendar=")]
    subprocess.run([systemd_analyze, "calendar", when], capture_output=True, check=True)


def test_the_backup_is_of_the_sidecar_that_is_installed(root: Path, unit: dict[str, dict[str, str]]) -> None:
    text = (root / BACKUP_UNIT).read_text().replace("\\\n", " ")
    found = dict(line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))
    program, *words = found["ExecStart"].split()
    assert program == unit["Service"]["ExecStart"].split()[0]
    config = load(root / CONFIGURATION, {}, {})
    assert words[:2] == ["backup", "make"]
    assert words[words.index("--address") + 1] == config.listen
    assert words[words.index("--token-file") + 1] == f"{config.data_directory}/token"
    assert (found["User"], found["StateDirectory"]) == (unit["Service"]["User"], unit["Service"]["StateDirectory"])


def test_a_second_install_keeps_the_configuration_and_uninstall_too(source: Path, tmp_path: Path) -> None:
    (tmp_path / CONFIGURATION).parent.mkdir(parents=True)
    (tmp_path / CONFIGURATION).write_text("# mine\n")
    put_in_place(source, tmp_path)
    assert (tmp_path / CONFIGURATION).read_text() == "# mine\n"
    assert stat.S_IMODE((tmp_path / UNIT).stat().st_mode) == 0o644
    (tmp_path / LIBRARY).mkdir(parents=True)
    make(source, "uninstall", tmp_path)
    left = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if not path.is_dir()]
    assert left == [CONFIGURATION]
