"""A log that another sidecar has, or may have by now: a file in its folder says so, which every opening obeys.

`leaving` is there before the other one is told that it may serve. Then only that one can say who has the topic: the
file becomes `moved` if it has, and goes if it has not and never will.
"""

import os
from pathlib import Path

from seqdedupe.errors import error
from seqdedupe.files import sync_folder, write_synced

LEAVING_FILE = "leaving"
MOVED_FILE = "moved"
"""Both hold the address of the other sidecar."""


def check_stays(folder: Path) -> None:
    """Raises NOT_OWNER with the address of who has the topic, or may have it; OSError."""
    for name, has in ((MOVED_FILE, "has it"), (LEAVING_FILE, "has it, or is asked whether it has it")):
        if (address := _said(folder / name)) is not None:
            why = f"the topic of the log {folder} was moved: the sidecar at {address} {has}"
            raise error("NOT_OWNER", why, owner_address=address)


def leaving_to(folder: Path) -> str | None:
    """Who is to be asked whether it has the topic; None: nobody. Raises OSError."""
    return _said(folder / LEAVING_FILE)


def has_moved(folder: Path) -> bool:
    """Whether the other one has it. Raises OSError."""
    return _said(folder / MOVED_FILE) is not None


def leave(folder: Path, address: str) -> None:
    """From now on only the sidecar there can say who has the topic. Durable on return. Raises OSError: it is so, or
    not."""
    new = folder / f"{LEAVING_FILE}.new"
    write_synced(new, address.encode())
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


def _said(path: Path) -> str | None:
    try:
        return path.read_text()
    except FileNotFoundError:
        return None
