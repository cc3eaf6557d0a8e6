"""The data directory's own token: who can read its file may do everything."""

import hmac
import logging
import os
import secrets
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from broker_sidecar.security.subject import OPERATOR
from broker_sidecar.security.watching import Watched
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.files import sync_folder, write_synced
from seqdedupe.limits import MAX_TOKEN_BYTES
from seqdedupe.store.directories import whole_of

logger = logging.getLogger("seqdedupe.security")

TOKEN_FILE = "token"
TOKEN_BYTES = 32
"""Of chance in a token that is made here. The file has it in 43 letters of base64."""

MIN_TOKEN_LETTERS = 16

_UNWANTED = 0o037
"""In the file's mode: its group may read it, if somebody has said so; nobody else."""


def path_of(data_directory: Path) -> Path:
    """The token's file. All workers of a data directory have one."""
    return (whole_of(data_directory) or data_directory) / TOKEN_FILE


def make(data_directory: Path) -> Path:
    """Makes the token if there is none; it is whole and durable on return. Returns its file. Raises OSError."""
    path = path_of(data_directory)
    if not os.path.lexists(path):
        new = path.with_name(f"{TOKEN_FILE}.{secrets.token_hex(4)}.new")
        write_synced(new, f"{secrets.token_urlsafe(TOKEN_BYTES)}\n".encode())
        try:
            # Unlike renaming it takes no other one's place.
            os.link(new, path)
        except FileExistsError:
            pass
        finally:
            new.unlink()
        sync_folder(path.parent)
    return path


def tell(path: Path, log_format: str) -> None:
    """Says how clients get it: as a line for a shell, where a person reads."""
    line = f"export SEQDEDUPE_TOKEN_FILE={shlex.quote(str(path.absolute()))}"
    if log_format == "text" or sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)
    else:
        logger.info("clients show the token", extra={"export": line})


def read(path: Path) -> bytes:
    """The token in the file. Raises INVALID_CONFIGURATION."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            token = file.read(MAX_TOKEN_BYTES + 1).strip()
    except OSError as e:
        raise _unusable(path, f"cannot be read: {e.strerror}", "Give it to the user that the sidecar runs as.") from e
    if mode & _UNWANTED:
        raise _unusable(path, f"can be read or written by others (mode {mode & 0o777:03o})", f"chmod 600 {path}")
    if not MIN_TOKEN_LETTERS <= len(token) <= MAX_TOKEN_BYTES or not all(0x21 <= letter <= 0x7E for letter in token):
        limits = f"{MIN_TOKEN_LETTERS} to {MAX_TOKEN_BYTES} printable ASCII letters without blanks"
        raise _unusable(path, f"holds no token: that is one line of {limits}", "Remove it: the next start makes one.")
    return token


def _unusable(path: Path, why: str, hint: str) -> SeqdedupeError:
    return error("INVALID_CONFIGURATION", f"the token file {path} {why}", hint=hint)


class OwnToken:
    """The token as it is now, and the one before it, whose bearers have to read the file again."""

    def __init__(self, path: Path, on_change: Callable[[], None]) -> None:
        """Raises INVALID_CONFIGURATION."""
        self._former = b""
        self._now = b""
        self._path = path
        self.watched = Watched("the sidecar's token", [path], self._read, on_change)

    def _read(self) -> bytes:
        token = read(self._path)
        if token != self._now:
            self._former, self._now = self._now, token
        return token

    def is_shown(self, token: bytes) -> bool:
        """Whether this is the token. Raises TOKEN_EXPIRED if it is the one before it."""
        if hmac.compare_digest(token, self._now):
            return True
        # Who has read the file just now may be the first to tell that it has changed.
        self.watched.look(at_once=True)
        if hmac.compare_digest(token, self._now):
            return True
        if self._former and hmac.compare_digest(token, self._former):
            what, hint = "the sidecar has another token now", "Read its file again."
            raise error("TOKEN_EXPIRED", what, hint=hint, subject=OPERATOR, kind="token")
        return False
