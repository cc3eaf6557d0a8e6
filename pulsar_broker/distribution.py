"""The place of Pulsar's server distribution: PULSAR_HOME, or a distribution that Maven fetches once."""

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from seqdedupe.testing import Patience, Stalled

VERSION = "4.0.8"
OLDEST_JAVA = 17
GET_SECONDS = 3600.0
"""The longest time that Maven takes. Its progress until then cannot be seen."""
FOLDER = Path(__file__).parents[1] / ".pulsar"
"""The folder where it is unpacked; version control ignores it."""

_ARTIFACT = f"org.apache.pulsar:pulsar-server-distribution:{VERSION}:tar.gz:bin"


class Unavailable(Exception):
    """The error that this machine can have no broker, or that it does not start, with the reason in one line."""


def home() -> Path:
    """Return the distribution that is there. Raises Unavailable; nothing is fetched."""
    named = os.environ.get("PULSAR_HOME")
    found = Path(named) if named else _unpacked_in(FOLDER)
    if not (found / "bin" / "pulsar").is_file():
        where = "in PULSAR_HOME" if named else "yet: `python -m pulsar_broker get` fetches it"
        raise Unavailable(f"there is no Pulsar distribution {where}")
    _check_java()
    return found


def get(folder: Path = FOLDER) -> Path:
    """Return the distribution. Maven fetches it into this folder if it is not there. Raises Unavailable."""
    _check_java()
    if os.environ.get("PULSAR_HOME") and folder == FOLDER:
        return home()
    unpacked = _unpacked_in(folder)
    if not unpacked.exists():
        folder.mkdir(parents=True, exist_ok=True)
        # Unpacked next to its place and renamed, so a distribution at its place is whole.
        with tempfile.TemporaryDirectory(dir=folder, prefix="unfinished-") as unfinished:
            _run("mvn", "-q", "-B", "dependency:copy", f"-Dartifact={_ARTIFACT}", f"-DoutputDirectory={unfinished}")
            archive = Path(unfinished) / f"pulsar-server-distribution-{VERSION}-bin.tar.gz"
            _run("tar", "-xzf", str(archive), "-C", unfinished)
            (Path(unfinished) / unpacked.name).rename(unpacked)
    return unpacked


def _unpacked_in(folder: Path) -> Path:
    return folder / f"apache-pulsar-{VERSION}"


def _check_java() -> None:
    java_home = os.environ.get("JAVA_HOME")
    printed = _run(f"{java_home}/bin/java" if java_home else "java", "-version")
    version = re.search(r'version "(\d+)', printed)
    if version is None or int(version[1]) < OLDEST_JAVA:
        raise Unavailable(f"Pulsar needs Java {OLDEST_JAVA} or newer; here it is {printed.splitlines()[0]}")


def _run(*command: str) -> str:
    if shutil.which(command[0]) is None:
        raise Unavailable(f"there is no {command[0]}")
    try:
        # Maven looks for a project where it runs.
        done = Patience(command[0], GET_SECONDS).run(command, cwd=tempfile.gettempdir(), stderr=subprocess.STDOUT)
    except Stalled as e:
        raise Unavailable(str(e)) from e
    if done.returncode:
        first = (done.stdout.strip().splitlines() or ["nothing printed"])[0]
        raise Unavailable(f"{command[0]} ended with {done.returncode}: {first}")
    return done.stdout
