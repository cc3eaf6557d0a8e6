"""A log's secret, which makes its records its own: in a file of its folder, and in the store's record of the topic."""

from pathlib import Path
from typing import NamedTuple

from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.format.headers import SECRET_BYTES
from seqdedupe.log.embedded.segment import begins_with_an_older_record, older, segment_path
from seqdedupe.log.embedded.tail import base_indexes

SECRET_FILE = "secret"
"""Never served."""
TOPIC_FILE = "topic"
"""Beside it: the full name of the log's topic, for the case that the store is lost. Where it is a partition, a line
says of how many."""


class Secret(NamedTuple):
    """What is known of a log's secret."""

    secret: bytes
    """Empty if nobody knows it."""
    missing: Path | None
    """The file, if it has to be written again."""
    why: SeqdedupeError | None
    """Why the log cannot be opened: LOG_DAMAGED, OLDER_FORMAT."""


def secret_of(folder: Path, known: bytes) -> Secret:
    """The secret of the log in a folder; `known` is what the store says, empty if nothing.

    Changes nothing. Raises OSError.
    """
    bases = base_indexes(folder) if folder.exists() else []
    if not bases:
        # Which is damage enough: `open_segments` says so.
        return Secret(bytes(SECRET_BYTES), None, None)
    path = folder / SECRET_FILE
    there = path.read_bytes() if path.exists() else b""
    is_whole = len(there) == SECRET_BYTES
    if is_whole and known in (b"", there):
        return Secret(there, None, None)
    if begins_with_an_older_record(segment := segment_path(folder, bases[0])):
        return Secret(b"", None, older(segment, 0))
    if is_whole:
        return Secret(known, None, error("LOG_DAMAGED", f"{path} is the secret of another log", file=path))
    if known:
        return Secret(known, path, None)
    why = error(
        "LOG_DAMAGED",
        f"{path} is missing or short, and the store does not have it either: no record of the log can be believed",
        hint="Restore the log's file secret from a backup.",
        file=path,
    )
    return Secret(b"", None, why)
