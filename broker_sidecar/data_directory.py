"""The data directory. This module creates the directory if necessary, locks it, and checks it before any file in it is
opened. `data.py` opens its contents."""

import asyncio
import errno
import os
import pwd
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from seqdedupe.errors import REASONS, SeqdedupeError, error, exit_status
from seqdedupe.files import DIRECTORY_LOCK, Lock, locked_directory
from seqdedupe.store.directories import MANIFEST_FILE, SHARDS_FILE, WORKERS_FILE

PRIVATE = 0o077
"""The umask. Only the sidecar's user may read the files that the sidecar writes."""

LOOK_SECONDS = 1.0
"""The time between looks at the lock's file."""

_HINTS = {
    errno.EROFS: "Mount the file system for writing, or choose a directory on another one.",
    errno.EACCES: "Run the sidecar as the user that owns the directory, or give it to this user (chown).",
    errno.EPERM: "Run the sidecar as the user that owns the directory, or give it to this user (chown).",
    errno.ENOSPC: "Free space on the disk.",
    errno.EDQUOT: "Free space within the quota.",
    errno.ENOTDIR: "Name a directory: a part of the path is a file.",
    errno.EEXIST: "Name a directory: this is a file.",
}

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)

_DATA = ("store", "logs")
_OWN = (DIRECTORY_LOCK, *_DATA, SHARDS_FILE, WORKERS_FILE)
"""The files that a sidecar creates in its directory. Only the sidecar's user may read these files."""


def prepare(folder: Path) -> None:
    """Make the directory if it does not exist.

    Raises INVALID_CONFIGURATION if the directory cannot be made or written to, or belongs to another user."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise _unusable(folder, e.errno or 0, os.strerror(e.errno) if e.errno else str(e)) from e
    check_usable(folder, folder)
    check_owner(folder, _owner_of_new_files)
    for part in (folder / name for name in _DATA):
        if part.is_dir():
            check_usable(folder, part)


def check_usable(folder: Path, there: Path) -> None:
    """Raise INVALID_CONFIGURATION unless this process can read and write in the folder `there`.

    `there` is the data directory or a part of it. If the directory does not exist, `there` is the nearest existing
    parent.
    """
    try:
        is_read_only = bool(os.statvfs(there).f_flag & os.ST_RDONLY)
        found = there.stat()
    except OSError as e:
        raise _unusable(folder, e.errno or 0, os.strerror(e.errno) if e.errno else str(e)) from e
    if not stat.S_ISDIR(found.st_mode):
        number = errno.EEXIST if there == folder else errno.ENOTDIR
        raise _unusable(folder, number, os.strerror(number))
    if is_read_only:
        raise _unusable(folder, errno.EROFS, ("" if there == folder else f"{there}: ") + os.strerror(errno.EROFS))
    if not os.access(there, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
        owner, user = (_user(uid) for uid in (found.st_uid, os.geteuid()))
        what = "it" if there == folder else there
        why = f"{what} belongs to {owner}, and this process runs as {user} (mode {found.st_mode & 0o777:03o})"
        raise _unusable(folder, errno.EACCES, why)


def check_owner(folder: Path, owner_of_new_files: Callable[[Path], int]) -> None:
    """Raise INVALID_CONFIGURATION if another user owns the data. A start as root would otherwise create files that the
    owner cannot open."""
    there = [folder / name for name in _OWN if (folder / name).exists()]
    owners = [(path, path.stat().st_uid) for path in there or [folder]]
    path, owner = next((one for one in owners if one[1] != os.geteuid()), (folder, os.geteuid()))
    # An empty volume may belong to root and to a group that has this process as a member.
    if owner == os.geteuid() or (not there and owner == 0) or owner == owner_of_new_files(folder):
        return
    name, user = _user(owner), _user(os.geteuid())
    raise error(
        "INVALID_CONFIGURATION",
        f"data_directory = {str(folder)!r}: {path} belongs to {name}, and this process runs as {user}",
        hint=f"Run the sidecar as {name}, or give the directory to {user}: chown -R {user} {folder}",
        key="data_directory",
    )


def _owner_of_new_files(folder: Path) -> int:
    """Return the owner of new files. It may differ from this process's user: a network file system may map all users to
    one."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno()).st_uid
    except OSError:
        return os.geteuid()


@contextmanager
def taken(folder: Path) -> Iterator[Lock]:
    """Lock the directory against other processes during the block. Raises the errors of `prepare`; DIRECTORY_IN_USE;
    OSError."""
    os.umask(PRIVATE)
    prepare(folder)
    with locked_directory(folder) as lock:
        yield lock


def has_data(folder: Path) -> bool:
    """Return whether a start may have something to recover."""
    return any((folder / name).exists() for name in _DATA)


def check_is_no_backup(folder: Path) -> None:
    """Raise INVALID_CONFIGURATION if the directory is a backup: a sidecar would append to files that this backup shares
    with other backups."""
    for part in (folder, *folder.glob("worker-*")):
        if (part / MANIFEST_FILE).exists():
            raise error(
                "INVALID_CONFIGURATION",
                f"data_directory = {str(folder)!r} is a backup",
                hint=f"Restore the backup: seqdedupe restore {folder} DATA_DIRECTORY",
                key="data_directory",
            )


async def lost(lock: Lock) -> str:
    """Wait until another process may have taken the directory, and return the reason."""
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        # A disk that fails now may work again later.
        with suppress(OSError):
            if not await asyncio.to_thread(lock.is_held):
                return f"{lock.path} is no longer the file that this process has locked: it was moved or removed"


def ended_by(e: SeqdedupeError | OSError, folder: Path) -> int:
    """Print in one line why a sidecar on this directory has ended, and return its exit status."""
    failure = e if isinstance(e, SeqdedupeError) else _failed(folder, e)
    is_tried_again = failure.reason in _TRIED_AGAIN and failure.hint == REASONS[failure.reason].hint
    print(f"seqdedupe: {failure} {_AT_END if is_tried_again else failure.hint}", file=sys.stderr)
    return exit_status(failure)


_TRIED_AGAIN = ("STORE_UNAVAILABLE", "LOG_REFUSED", "LOG_UNREADABLE", "AUDIT_UNAVAILABLE")
"""Errors whose hints state that the sidecar retries. This is true only of a running sidecar, not of a sidecar that has
ended."""

_AT_END = "Fix the problem that the message names, and start the sidecar again."


def _failed(folder: Path, e: OSError) -> SeqdedupeError:
    """Convert an error of the operating system. If the disk is full, the error contains no file name."""
    number, why = e.errno or 0, os.strerror(e.errno) if e.errno else str(e)
    if e.filename is None and number in _HINTS:
        return _unusable(folder, number, why)
    place = "" if e.filename is None else f"{e.filename}: "
    return error(_reason(number), f"the sidecar cannot run: {place}{why}", hint=_HINTS.get(number, _AT_END))


def _unusable(folder: Path, number: int, why: str) -> SeqdedupeError:
    message = f"data_directory = {str(folder)!r} cannot be used: {why}"
    return error(_reason(number), message, hint=_HINTS.get(number, _AT_END), key="data_directory")


def _reason(number: int) -> str:
    """Return the reason code of an operating system error. The code shows whether the next start may succeed."""
    return "INVALID_CONFIGURATION" if number in _HINTS and number not in _NO_ROOM else "STORE_UNAVAILABLE"


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
