"""`seqdedupe compile` compiles for all who use an installation. The one here has the kernels of this suite, and nothing
says so: compiling is quick then."""

import json
import os
import shutil
import site
import stat
import subprocess
import sys
import venv
from collections.abc import Mapping
from pathlib import Path

import numba
import pytest

from broker_sidecar import kernels
from seqdedupe.testing import LAST_RESORT_SECONDS

COMMAND = "from seqdedupe.cli.main import main; main()"
STARTS = """
import sys
from broker_sidecar import kernels
must_compile = kernels.prepare(sys.argv[1])
if not must_compile:
    import broker_sidecar.server
    from seqdedupe.core import rule
    assert rule.decide.stats.cache_hits and not rule.decide.stats.cache_misses, rule.decide.stats
print(must_compile)
"""
"""As a service that has no folder but that of its data."""


@pytest.fixture
def installation(tmp_path: Path) -> Path:
    """Its own environment, with the packages of this one."""
    folder = tmp_path / "installation"
    venv.create(folder, symlinks=True)
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "packages.pth").write_text(f"import site; site.addsitedir({site.getsitepackages()[0]!r})\n")
    there = kernels._folder("")
    assert there is not None
    kept = folder / "lib" / "seqdedupe-kernels" / there.name
    shutil.copytree(there, kept)
    (kept / kernels._COMPLETE).unlink(missing_ok=True)
    return folder


def run(installation: Path, *words: str, **environment: str) -> str:
    variables: Mapping[str, str] = os.environ | environment
    command = [str(installation / "bin" / "python"), "-c", *words]
    done = subprocess.run(
        command, env=variables, capture_output=True, text=True, timeout=LAST_RESORT_SECONDS, umask=0o077, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_service_finds_what_was_compiled_for_its_installation(installation: Path, tmp_path: Path) -> None:
    def starts(data: str) -> str:
        return run(installation, STARTS, str(tmp_path / data), XDG_CACHE_HOME="/proc").strip()

    assert starts("control") == "True"
    said = json.loads(run(installation, COMMAND, "compile", "--json"))
    kept = Path(said["folder"])
    assert kept.parent == installation / "lib" / "seqdedupe-kernels"
    assert f"numba {numba.__version__}, Python {sys.version_info.major}.{sys.version_info.minor}" in said["fits"]
    # Anyone who runs the service may read it, no matter what the umask of who installs is.
    places = [kept.parent, kept, *kept.rglob("*")]
    assert {stat.S_IMODE(place.stat().st_mode) for place in places} == {0o755, 0o644}
    assert starts("data") == "False"
    copied = tmp_path / "data" / "kernels" / kept.name
    assert sorted(file.name for file in copied.rglob("*")) == sorted(file.name for file in kept.rglob("*"))
    # A second time it has nothing to do, and says the same.
    assert json.loads(run(installation, COMMAND, "compile", "--json")) == said
    # numba unpickles what is there: nobody else may be able to write to it.
    kept.chmod(0o777)
    assert starts("other") == "True"


def test_a_user_who_cannot_write_to_the_installation_compiles_for_themselves(
    installation: Path, tmp_path: Path
) -> None:
    shutil.rmtree(installation / "lib" / "seqdedupe-kernels")
    (installation / "lib" / "seqdedupe-kernels").symlink_to("/proc")
    there = kernels._folder("")
    assert there is not None
    home = tmp_path / "home"
    shutil.copytree(there, home / "seqdedupe" / there.name)
    for folder in (home, home / "seqdedupe", home / "seqdedupe" / there.name):
        folder.chmod(0o700)
    said = json.loads(run(installation, COMMAND, "compile", "--json", XDG_CACHE_HOME=str(home)))
    assert said["folder"] == str(home / "seqdedupe" / there.name)
    assert stat.S_IMODE(Path(said["folder"]).stat().st_mode) == 0o700


def test_what_fits_another_cpu_is_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = kernels._name()
    assert kernels._name() == ours
    monkeypatch.setattr(numba.config, "CPU_NAME", "generic")
    assert kernels._name() != ours
    assert kernels.fits().startswith("generic, ")
