"""Quick starts of JVMs: archives of the classes that a program loads, and the settings of a broker that uses one.

Reading and verifying classes is a third of a start's cost, or more. With these settings a broker serves after a third
of the processor time, and then handles fewer messages a second.

Java takes the classes from an archive that fit its version and its class path, and loads all others as usual. But it
trusts the contents of an archive, and dies of one that was cut short. So an archive gets its name, with a checksum,
once it is whole and on disk.
"""

import os
import re
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

COMPILER = "-XX:TieredStopAtLevel=1"
_OPTIONS = "PULSAR_EXTRA_OPTS"

FOLDER = Path(sys.prefix) / "class-data"


class Archive:
    """The archive of one program: of these jars, or folders of jars, with this environment's Java."""

    def __init__(self, *jars: Path, folder: Path = FOLDER) -> None:
        home = os.environ.get("JAVA_HOME")
        java = Path(home, "bin", "java") if home else Path(shutil.which("java") or "java")
        places = [place.resolve() for place in (java, *jars) if place.exists()]
        of = [f"{place} {place.stat().st_mtime_ns}" for place in places]
        self._name = f"{zlib.crc32(' '.join(of).encode()):08x}"
        self._folder = folder

    @property
    def file(self) -> Path | None:
        """The archive's file, if it was made."""
        return next(self._folder.glob(f"{self._name}-*.jsa"), None)

    def make(self, write: Callable[[Path], None]) -> None:
        """Have the archive written to the file that `write` gets, unless there is a whole one."""
        for archive in self._folder.glob(f"{self._name}-*.jsa"):
            if archive.stem.endswith(_checksum(archive)):
                return
            archive.unlink(missing_ok=True)
        self._folder.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            written = Path(folder, "written")
            write(written)
            with written.open("rb") as file:
                os.fsync(file.fileno())
            written.rename(self._folder / f"{self._name}-{_checksum(written)}.jsa")


def _checksum(archive: Path) -> str:
    checksum = 0
    with archive.open("rb") as file:
        while chunk := file.read(1 << 20):
            checksum = zlib.crc32(chunk, checksum)
    return f"{checksum:08x}"


# -- A broker.


def archive(home: Path) -> Archive:
    """Return the archive of the distribution's classes."""
    return Archive(home / "lib")


def environment(home: Path) -> dict[str, str]:
    """Return the environment of a broker's process."""
    file = archive(home).file
    return {_OPTIONS: COMPILER} | (archived(home, "SharedArchiveFile", file) if file else {})


def archived(home: Path, option: str, file: Path) -> dict[str, str]:
    """Return the environment of a broker whose JVM writes an archive or starts from it; `option` decides which.

    Empty if a path has a blank: the start script would take that for the end of an option.
    """
    # Java keeps an archive only for a class path of nothing but jars; the one that the script makes has folders.
    options = f"--class-path={home}/lib/*", f"-Dlog4j.configurationFile={home}/conf/log4j2.yaml", f"-XX:{option}={file}"
    if any(re.search(r"\s", part) for part in options):
        return {}
    return {_OPTIONS: " ".join((COMPILER, *options))}
