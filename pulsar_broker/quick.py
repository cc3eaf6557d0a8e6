"""What has a broker serve after a third of the processor time that it would take, and fewer messages a second later."""

import re
from pathlib import Path

from pulsar_broker.archive import Archive

COMPILER = "-XX:TieredStopAtLevel=1"
_OPTIONS = "PULSAR_EXTRA_OPTS"


def archive(home: Path) -> Archive:
    """That of the distribution's classes."""
    return Archive(home / "lib")


def environment(home: Path) -> dict[str, str]:
    """Of a broker's process."""
    file = archive(home).file
    return {_OPTIONS: COMPILER} | (archived(home, "SharedArchiveFile", file) if file else {})


def archived(home: Path, option: str, file: Path) -> dict[str, str]:
    """Of the process of a broker whose JVM writes an archive or starts from it, which of both is the option.

    Empty where a path has a blank: the script that starts it takes that for the end of an option.
    """
    # Java keeps an archive only for a class path of nothing but jars; the one that the script makes has folders.
    options = f"--class-path={home}/lib/*", f"-Dlog4j.configurationFile={home}/conf/log4j2.yaml", f"-XX:{option}={file}"
    if any(re.search(r"\s", part) for part in options):
        return {}
    return {_OPTIONS: " ".join((COMPILER, *options))}
