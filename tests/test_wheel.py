"""What is installed: a wheel has all packages, and Spark finds the data source in it."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARTS = ("pyproject.toml", "README.md", "LICENSE", "seqdedupe", "broker_sidecar", "spark", "pyspark_seqdedupe.py")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel holds."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "source"
    copy.mkdir()
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / part, copy / part)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(folder / "installed")
    return folder / "installed"


def test_every_file_is_in_it(installed: Path) -> None:
    for package in ("seqdedupe", "broker_sidecar", "spark"):
        missing = [
            path.relative_to(ROOT)
            for path in (ROOT / package).rglob("*")
            if path.is_file() and path.suffix != ".pyc" and not (installed / path.relative_to(ROOT)).exists()
        ]
        assert missing == []


def test_spark_finds_the_source_in_it(installed: Path, tmp_path: Path) -> None:
    """As Spark looks for it: by the names of the modules there are."""
    program = (
        f"import sys, pkgutil; sys.path.insert(0, {str(installed)!r})\n"
        "names = [m.name for m in pkgutil.iter_modules() if m.name.startswith('pyspark_')]\n"
        "import pyspark_seqdedupe\n"
        "print(names, pyspark_seqdedupe.__file__, pyspark_seqdedupe.DefaultSource.name())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.stdout.split() == ["['pyspark_seqdedupe']", str(installed / "pyspark_seqdedupe.py"), "seqdedupe"], (
        done.stderr
    )
