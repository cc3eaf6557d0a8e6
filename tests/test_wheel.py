"""What is installed: a wheel has all packages, and Spark finds the data source in it."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import pyspark_seqdedupe
from seqdedupe_spark.session import workers_path

ROOT = Path(__file__).parents[1]
PARTS = ("pyproject.toml", "README.md", "LICENSE", "seqdedupe", "broker_sidecar", "spark")
FOLDERS = {"seqdedupe": ROOT, "broker_sidecar": ROOT, "seqdedupe_spark": ROOT / "spark"}
"""The packages, and where each one lies in the repository."""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel holds."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "source"
    copy.mkdir()
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(ROOT / part, copy / part)
    command = [sys.executable, "-m", "uv", "build", "-q", "--wheel", "--offline", "--no-build-isolation"]
    command += ["--python", sys.executable, "--out-dir", str(folder), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(folder / "installed")
    return folder / "installed"


def test_every_file_is_in_it(installed: Path) -> None:
    for package, folder in FOLDERS.items():
        missing = [
            path.relative_to(folder)
            for path in (folder / package).rglob("*")
            if path.is_file() and path.suffix != ".pyc" and not (installed / path.relative_to(folder)).exists()
        ]
        assert missing == []


def test_nothing_else_comes_into_an_environment(installed: Path) -> None:
    """Above all no package that is named `spark`, as those of others are."""
    found = {path.name for path in installed.iterdir() if not path.name.endswith((".dist-info", "__pycache__"))}
    assert found == {*FOLDERS, "pyspark_seqdedupe.py"}


LOOK = (
    "import pkgutil\n"
    "names = [m.name for m in pkgutil.iter_modules() if m.name.startswith('pyspark_')]\n"
    "import pyspark_seqdedupe\n"
    "print(names, pyspark_seqdedupe.__file__, pyspark_seqdedupe.DefaultSource.name())"
)
"""Looks for data sources as Spark does: by the names of the modules there are."""


def test_spark_finds_the_source_in_it(installed: Path, tmp_path: Path) -> None:
    program = f"import sys; sys.path.insert(0, {str(installed)!r})\n{LOOK}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.stdout.split() == ["['pyspark_seqdedupe']", str(installed / "pyspark_seqdedupe.py"), "seqdedupe"], (
        done.stderr
    )


def test_the_workers_of_our_sessions_find_it_wherever_we_run(tmp_path: Path) -> None:
    """Also after an editable install, which has no folder on the path."""
    environment = os.environ | {"PYTHONPATH": workers_path()}
    done = subprocess.run(
        [sys.executable, "-c", LOOK], capture_output=True, text=True, cwd=tmp_path, env=environment, check=False
    )
    assert done.stdout.split() == ["['pyspark_seqdedupe']", str(Path(pyspark_seqdedupe.__file__)), "seqdedupe"], (
        done.stderr
    )
