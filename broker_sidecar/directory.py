"""The data directory: made if need be, and looked at before anything is opened in it."""

import errno
import os
import pwd
from pathlib import Path

from seqdedupe.errors import SeqdedupeError, error

PRIVATE = 0o077
"""The umask: nobody but the user that the sidecar runs as may read what it writes."""

_HINTS = {
    errno.EROFS: "Mount the file system for writing, or choose a directory on another one.",
    errno.EACCES: "Run the sidecar as the user that owns the directory, or give it to this user (chown).",
    errno.EPERM: "Run the sidecar as the user that owns the directory, or give it to this user (chown).",
    errno.ENOSPC: "Make room on the disk.",
    errno.ENOTDIR: "Name a directory: a part of the path is a file.",
    errno.EEXIST: "Name a directory: this is a file.",
}


def prepare(folder: Path) -> None:
    """Makes it if it is not there. Raises INVALID_CONFIGURATION if it cannot be made or written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_read_only = bool(os.statvfs(folder).f_flag & os.ST_RDONLY)
    except OSError as e:
        raise _unusable(folder, e.errno or 0, os.strerror(e.errno) if e.errno else str(e)) from e
    if is_read_only:
        raise _unusable(folder, errno.EROFS, os.strerror(errno.EROFS))
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
        owner, user = (_user(uid) for uid in (folder.stat().st_uid, os.geteuid()))
        raise _unusable(folder, errno.EACCES, f"it belongs to {owner}, and this process runs as {user}")


def failed(folder: Path, e: OSError) -> SeqdedupeError:
    """What a sidecar on this directory says that an error of the system has ended. A full disk names no file."""
    number, why = e.errno or 0, os.strerror(e.errno) if e.errno else str(e)
    if e.filename is None and number in _HINTS:
        return _unusable(folder, number, why)
    place = "" if e.filename is None else f"{e.filename}: "
    return error("INVALID_CONFIGURATION", f"the sidecar cannot run: {place}{why}", hint=_HINTS.get(number))


def _unusable(folder: Path, number: int, why: str) -> SeqdedupeError:
    message = f"data_directory = {str(folder)!r} cannot be used: {why}"
    return error("INVALID_CONFIGURATION", message, hint=_HINTS.get(number), key="data_directory")


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
