"""Settings with which a broker serves after a third of the processor time, and then handles fewer messages a second."""

import re
from pathlib import Path

from pulsar_broker.archive import Archive

COMPILER = "-XX:TieredStopAtLevel=1"
_OPTIONS = "PULSAR_EXTRA_OPTS"


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
