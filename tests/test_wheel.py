"""What is installed: a wheel has all packages, and Spark finds the data source in it. Anyone who builds it gets the
same bytes, and it says what it needs."""

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

import pyspark_seqdedupe
from seqdedupe_spark.session import workers_path
from tests.deploy.test_licences import of_service

ROOT = Path(__file__).parents[1]
PARTS = ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "deploy", "seqdedupe", "broker_sidecar", "spark")
FOLDERS = {"seqdedupe": ROOT, "broker_sidecar": ROOT, "seqdedupe_spark": ROOT / "spark"}
"""The packages, and where each one lies in the repository."""


def copied(folder: Path) -> Path:
    """The sources, in this folder."""
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / part, folder / part)
    return folder


def run(command: list[str], **options: Any) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a source archive, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "uv", "build", "-q", "--offline", "--no-build-isolation"]
    run([*command, "--python", sys.executable, "--out-dir", str(folder / "dist"), str(copied(folder / "source"))])
    return folder / "dist"


@pytest.fixture(scope="module")
def installed(built: Path) -> Path:
    """A folder with what the wheel holds."""
    [wheel] = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(built / "installed")
    return built / "installed"


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("seqdedupe-*")}


def test_two_builds_are_the_same_bytes(built: Path, tmp_path: Path) -> None:
    """In another folder, with other permissions and times, after an earlier build of other sources; and the wheel
    straight from the sources, where the first one is from the source archive."""
    other = copied(tmp_path / "elsewhere" / "sources")
    (other / "build" / "lib" / "seqdedupe").mkdir(parents=True)
    (other / "build" / "lib" / "seqdedupe" / "gone.py").touch()
    for path in other.rglob("*"):
        os.utime(path, (1_000_000_000, 1_000_000_000))
        path.chmod(path.stat().st_mode & 0o700)
    for what in ("sdist", "wheel"):
        program = f"import os; os.umask(0o077); import reproducible; reproducible.build_{what}({str(tmp_path)!r})"
        environment = os.environ | {"PYTHONPATH": "deploy", "TZ": "Asia/Tokyo", "PYTHONHASHSEED": "7"}
        run([sys.executable, "-c", program], cwd=other, env=environment)
    assert digests(tmp_path) == digests(built)
    assert len(digests(tmp_path)) == 2


def test_the_time_of_a_build_is_the_one_that_is_given(built: Path, tmp_path: Path) -> None:
    """The control arm: what is another time is other bytes."""
    program = f"import reproducible; reproducible.build_wheel({str(tmp_path)!r})"
    environment = os.environ | {"PYTHONPATH": "deploy", "SOURCE_DATE_EPOCH": "1700000000"}
    run([sys.executable, "-c", program], cwd=copied(tmp_path / "sources"), env=environment)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        assert {item.date_time for item in opened.infolist()} == {(2023, 11, 14, 22, 13, 20)}
        assert {item.external_attr >> 16 & 0o777 for item in opened.infolist()} == {0o644}
    assert digests(tmp_path)[wheel.name] != digests(built)[wheel.name]


def test_the_record_is_of_what_is_there(installed: Path) -> None:
    """An installer checks each file with it."""
    [record] = installed.glob("*.dist-info/RECORD")
    rows = [line.split(",") for line in record.read_text().splitlines()]
    listed = {path: (digest, size) for path, digest, size in rows}
    # Another test may have imported of it before.
    files = [path for path in installed.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    there = {str(path.relative_to(installed)): path for path in files}
    assert listed.keys() == there.keys()
    assert listed.pop(str(record.relative_to(installed))) == ("", "")
    for path, (digest, size) in listed.items():
        content = there[path].read_bytes()
        expected = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
        assert (digest, size) == (f"sha256={expected}", str(len(content)))


def test_it_has_a_bill_of_materials_of_what_a_sidecar_needs(installed: Path) -> None:
    [place] = installed.glob("*.dist-info/sboms/*.cdx.json")
    text = place.read_text()
    # Here: what this imports takes a second, and each worker collects this file.
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    bill = json.loads(text)
    assert not {"serialNumber", "timestamp"} & {*bill, *bill["metadata"]}
    versions: dict[str, set[str]] = {}
    for component in bill["components"]:
        versions.setdefault(component["name"], set()).add(component["version"])
    needed = of_service()
    assert needed.keys() <= versions.keys()
    assert {name: version for name, version in needed.items() if version not in versions[name]} == {}
    # And who needs what: from the whole one comes to all of them.
    wants = {one["ref"]: one["dependsOn"] for one in bill["dependencies"]}
    reached, left = set(), [bill["metadata"]["component"]["bom-ref"]]
    while left:
        reached.add(one := left.pop())
        left += [wanted for wanted in wants[one] if wanted not in reached]
    assert reached == wants.keys()


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
