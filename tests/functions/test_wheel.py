"""The wheel that is deployed, with nothing else of this project next to it."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from seqdedupe.errors import ConfigurationError
from seqdedupe.functions.wheel import build
from seqdedupe.testing import LAST_RESORT_SECONDS

# What a worker's environment lacks: nothing of it may be needed.
_BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("numba", "rocksdict", "google_crc32c", "uvloop", "click", *{more!r}):
            raise ImportError(name + " is not here")
sys.meta_path.insert(0, Block())
sys.path.insert(0, {unpacked!r})
"""


def code(folder: Path) -> Path:
    (folder / "mine.py").write_text("def process(payload):\n    return payload\n")
    return folder / "mine.py"


def unpacked(folder: Path) -> Path:
    build([code(folder)], folder / "mine-1-py3-none-any.whl")
    zipfile.ZipFile(folder / "mine-1-py3-none-any.whl").extractall(folder / "unpacked")
    return folder / "unpacked"


def run(folder: Path, script: str, *more: str) -> "subprocess.CompletedProcess[str]":
    whole = _BLOCK.format(unpacked=str(unpacked(folder)), more=more) + script
    return subprocess.run(
        [sys.executable, "-c", whole], capture_output=True, text=True, cwd=folder, timeout=LAST_RESORT_SECONDS
    )


def test_the_wrapper_needs_nothing_but_the_wheel_and_what_the_documentation_lists(tmp_path: Path) -> None:
    script = "import seqdedupe.functions.instance as i, mine; print(i.__file__)"
    done = run(tmp_path, script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path / "unpacked"))


def test_the_same_code_makes_the_same_wheel(tmp_path: Path) -> None:
    code(tmp_path)
    outputs = [tmp_path / name / "mine-1-py3-none-any.whl" for name in "ab"]
    for output in outputs:
        build([tmp_path / "mine.py"], output)
    assert outputs[0].read_bytes() == outputs[1].read_bytes()


def test_what_is_missing_in_the_environment_ends_the_process_and_is_said(tmp_path: Path) -> None:
    script = "from seqdedupe.functions import DedupeFunction\nDedupeFunction().process(b'', None)\nprint('went on')"
    done = run(tmp_path, script, "numpy")
    assert done.returncode == 1
    assert "numpy is not here" in done.stderr
    assert "docs/guides/functions.md" in done.stderr
    assert "went on" not in done.stdout


def test_a_module_that_the_wrapper_would_hide_is_refused(tmp_path: Path) -> None:
    (tmp_path / "seqdedupe.py").write_text("")
    with pytest.raises(ConfigurationError, match="name of this package"):
        build([tmp_path / "seqdedupe.py"], tmp_path / "x-1-py3-none-any.whl")


@pytest.mark.parametrize("name", ["seqdedupe.py", "folder", "text.txt"])
def test_what_is_no_module_is_refused(tmp_path: Path, name: str) -> None:
    given = tmp_path / name
    if "." in name:
        given.write_text("")
    else:
        given.mkdir()
    if name == "seqdedupe.py":
        given = tmp_path / "seqdedupe"
        given.mkdir()
        (given / "__init__.py").write_text("")
    with pytest.raises(ConfigurationError):
        build([given], tmp_path / "x-1-py3-none-any.whl")
    assert not (tmp_path / "x-1-py3-none-any.whl").exists()


@pytest.mark.parametrize("name", ["log.py", "util.py", "server.py"])
def test_a_module_that_pulsars_runtime_would_hide_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("")
    with pytest.raises(ConfigurationError, match="Pulsar's runtime"):
        build([tmp_path / name], tmp_path / "x-1-py3-none-any.whl")


@pytest.mark.parametrize("name", ["mine.zip", "mine", "mine.whl.bak"])
def test_what_pulsar_would_not_unpack_is_refused(tmp_path: Path, name: str) -> None:
    """A .zip it unpacks, and looks for the code elsewhere in it."""
    with pytest.raises(ConfigurationError, match="not the name of a wheel"):
        build([code(tmp_path)], tmp_path / name)
    assert not (tmp_path / name).exists()
