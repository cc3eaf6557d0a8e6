"""A log that another sidecar has, or may have by now: a file in its folder says so, which every opening obeys.

`leaving` is there before the other one is told that it may serve. Then only that one can say who has the topic: the
file becomes `moved` if it has, and goes if it has not and never will.
"""

import os
from pathlib import Path
from typing import NamedTuple

from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.files import sync_folder, write_synced
from seqdedupe.log.embedded.segment import segment_path
from seqdedupe.log.embedded.tail import base_indexes

LEAVING_FILE = "leaving"
MOVED_FILE = "moved"
ARRIVED_FILE = "arrived"
"""In the folder of one that has come, while it is not certain that the sidecar that it came from knows so."""


class To(NamedTuple):
    """Who was given a log."""

    address: str
    receiver: str
    """Which data directory there, and which move, as it has said."""


def check_stays(folder: Path) -> None:
    """Raises NOT_OWNER with the address of who has the topic, or may have it; OSError."""
    if (to := moved_to(folder)) is not None:
        raise not_here(to, "has it")
    if (to := leaving_to(folder)) is not None:
        raise not_here(to, "has it, or is asked whether it has it")


def not_here(to: To, what: str) -> SeqdedupeError:
    """NOT_OWNER, of a topic whose log was given to that sidecar."""
    hint = f"Name both sidecars to clients, this one and that one, with a comma between them: …,{to.address}"
    return error("NOT_OWNER", f"it was moved: the sidecar at {to.address} {what}", hint=hint, owner_address=to.address)


def leaving_to(folder: Path) -> To | None:
    """Who is to be asked whether it has the topic; None: nobody. Raises OSError."""
    return _said(folder / LEAVING_FILE)


def moved_to(folder: Path) -> To | None:
    """Who has it; None: nobody else, for all that is known. Raises OSError."""
    return _said(folder / MOVED_FILE)


def leave(folder: Path, to: To) -> None:
    """From now on only the sidecar there can say who has the topic. Durable on return. Raises OSError: it is so, or
    not."""
    new = folder / f"{LEAVING_FILE}.new"
    write_synced(new, "\n".join(to).encode())
    os.rename(new, folder / LEAVING_FILE)
    sync_folder(folder)


def has_left(folder: Path) -> None:
    """The other one has it, for good. Durable on return. Raises OSError; it may be done again."""
    if (folder / LEAVING_FILE).exists():
        os.rename(folder / LEAVING_FILE, folder / MOVED_FILE)
    sync_folder(folder)


def stays(folder: Path) -> None:
    """The other one has it not, and never will. Durable on return. Raises OSError; it may be done again."""
    (folder / LEAVING_FILE).unlink(missing_ok=True)
    sync_folder(folder)


def has_messages(folder: Path) -> bool:
    """Whether there is still something of a log that was moved. Raises OSError."""
    return bool(base_indexes(folder))


def remove_messages(folder: Path) -> None:
    """Of a log that was moved nothing is left but where it is. Raises OSError; it may be done again."""
    for base_index in base_indexes(folder):
        segment_path(folder, base_index).unlink()
    sync_folder(folder)


def is_known(folder: Path, receiver: str) -> None:
    """Whoever had the log knows that it has come here by the move of which this was said. Durable on return. Raises
    OSError; it may be done again."""
    arrived = folder / ARRIVED_FILE
    # One that gave it here long ago may say so once more: that is not who gave it last.
    if arrived.exists() and arrived.read_text() == receiver:
        arrived.unlink()
    sync_folder(folder)


def _said(path: Path) -> To | None:
    try:
        address, receiver = path.read_text().split("\n")
    except FileNotFoundError:
        return None
    except ValueError as e:
        raise error("LOG_DAMAGED", f"{path} does not say where the log has gone", file=path) from e
    return To(address, receiver)
