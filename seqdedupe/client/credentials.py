"""Credentials: how a client authenticates itself to a sidecar, and how it verifies the sidecar."""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self

import grpc

from seqdedupe.client.listeners import user_of
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.files import read_named
from seqdedupe.limits import MAX_TOKEN_BYTES

TOKEN = "SEQDEDUPE_TOKEN"
TOKEN_FILE = "SEQDEDUPE_TOKEN_FILE"
TLS_CA_FILE = "SEQDEDUPE_TLS_CA_FILE"
TLS_CERTIFICATE_FILE = "SEQDEDUPE_TLS_CERTIFICATE_FILE"
TLS_KEY_FILE = "SEQDEDUPE_TLS_KEY_FILE"
ALLOW_INSECURE_TOKEN = "SEQDEDUPE_ALLOW_INSECURE_TOKEN"
SIDECAR_USER = "SEQDEDUPE_SIDECAR_USER"
VARIABLES = frozenset(
    (TOKEN, TOKEN_FILE, TLS_CA_FILE, TLS_CERTIFICATE_FILE, TLS_KEY_FILE, ALLOW_INSECURE_TOKEN, SIDECAR_USER)
)
"""The environment variables."""

USUAL_TOKEN_FILE = "~/.config/seqdedupe/token"
"""The default token file, used if no token is configured."""

MAX_FILE_BYTES = 1024 * 1024
"""The maximum size of each file. The certificates of all public authorities have 200 KB."""

Token = str | Callable[[], str]


@dataclass(frozen=True, slots=True)
class Credentials:
    """A token, or TLS with or without a client certificate, or a token and TLS. `Credentials()` has neither a token nor
    TLS.

    The client reads the token file or calls the token function for each new call and stream. The token function is
    called on the client's event loop, so it must return at once. The client reads the TLS files for each new
    connection. So the token and all files may be replaced at any time. If a file cannot be read at that moment, the
    error is CREDENTIALS_UNAVAILABLE, and the client tries again.

    With any TLS file, connections to a host and port are encrypted, and the client verifies the sidecar's certificate.
    The certificate must be issued for this host name or IP address, by an authority in `tls_ca_file`, or without that
    file by a public authority. Connections over a Unix socket never use TLS. The client sends a token to another host
    only over TLS.

    Raises INVALID_CREDENTIALS for an invalid combination, an unreadable file, or an invalid token. A token never
    appears in an error or in `repr`.
    """

    token: Token | None = field(default=None, repr=False)
    """The token itself, or a function that returns it."""

    token_file: str | os.PathLike[str] | None = None
    """A file with one line, the token."""

    tls_ca_file: str | os.PathLike[str] | None = None
    """The certificates of the trusted authorities, as PEM."""

    tls_certificate_file: str | os.PathLike[str] | None = None
    """The client's certificate and the intermediate certificates up to its authority, as PEM."""

    tls_key_file: str | os.PathLike[str] | None = None
    """The certificate's key, as PEM."""

    allow_insecure_token: bool = False
    """Whether the client may send the token to other hosts without TLS, readable on the way. Set this only if another
    layer encrypts, such as a mesh of proxies."""

    sidecar_user: str | None = None
    """The user of this machine that runs the sidecar, by name or number."""

    def __post_init__(self) -> None:
        if self.token is not None and self.token_file is not None:
            raise _invalid("both a token and a token file are given", "Give one of them.")
        if (self.tls_certificate_file is None) != (self.tls_key_file is None):
            raise _invalid("only one of tls_certificate_file and tls_key_file is given", "Give both, or neither.")
        try:
            if not callable(self.token):
                self.token_now()
            self._channel_credentials()
            self.trusted_users()
        except SeqdedupeError as e:
            raise _invalid(e.message) from e

    @classmethod
    def from_environment(
        cls,
        *,
        token: Token | None = None,
        token_file: str | None = None,
        tls_ca_file: str | None = None,
        tls_certificate_file: str | None = None,
        tls_key_file: str | None = None,
    ) -> Self:
        """Return credentials. An argument that is None is taken from the environment. The token comes from
        `SEQDEDUPE_TOKEN`, or `SEQDEDUPE_TOKEN_FILE`, or else `~/.config/seqdedupe/token` if that file exists. The other
        values come from `SEQDEDUPE_TLS_CA_FILE`, `SEQDEDUPE_TLS_CERTIFICATE_FILE`, `SEQDEDUPE_TLS_KEY_FILE`,
        `SEQDEDUPE_ALLOW_INSECURE_TOKEN=true` and `SEQDEDUPE_SIDECAR_USER`. An empty variable counts as unset. Raises
        INVALID_CREDENTIALS."""
        if not token and not token_file:
            token = os.environ.get(TOKEN)
        if not token and not token_file:
            token_file = os.environ.get(TOKEN_FILE) or _usual_token_file()
        return cls(
            token=token or None,
            token_file=token_file or None,
            tls_ca_file=tls_ca_file or os.environ.get(TLS_CA_FILE) or None,
            tls_certificate_file=tls_certificate_file or os.environ.get(TLS_CERTIFICATE_FILE) or None,
            tls_key_file=tls_key_file or os.environ.get(TLS_KEY_FILE) or None,
            allow_insecure_token=os.environ.get(ALLOW_INSECURE_TOKEN, "").lower() == "true",
            sidecar_user=os.environ.get(SIDECAR_USER) or None,
        )

    @property
    def has_token(self) -> bool:
        return self.token is not None or self.token_file is not None

    @property
    def has_tls(self) -> bool:
        return self.tls_ca_file is not None or self.tls_certificate_file is not None

    def token_now(self) -> str | None:
        """Return the current token; None if there is none. Raises CREDENTIALS_UNAVAILABLE."""
        if self.token_file is not None:
            return _checked(_read(self.token_file).decode("latin-1"), f"the file {os.fspath(self.token_file)!r}")
        if not callable(self.token):
            return None if self.token is None else _checked(self.token, "what was given")
        try:
            token = self.token()
        except Exception as e:
            raise error("CREDENTIALS_UNAVAILABLE", f"the function for the token raised {type(e).__name__}") from e
        return _checked(token, "what the function for the token answers")

    def trusted_users(self) -> frozenset[int]:
        """Return the user numbers (UIDs) of the users of this machine to whom the client may send the token. The owner
        of the token file is always among these users, because the owner can read the token anyway. Raises
        INVALID_CREDENTIALS."""
        users = set() if self.sidecar_user is None else {user_of(self.sidecar_user)}
        if self.token_file is not None:
            with suppress(OSError):
                users.add(os.stat(self.token_file).st_uid)
        return frozenset(users)

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """Return gRPC's credentials for a new connection; None for a connection without TLS. Raises
        CREDENTIALS_UNAVAILABLE."""
        files = self._channel_credentials()
        return None if files is None else grpc.ssl_channel_credentials(*files)

    def _channel_credentials(self) -> tuple[bytes | None, bytes | None, bytes | None] | None:
        if not self.has_tls:
            return None
        ca, certificate, key = (
            None if path is None else _read(path)
            for path in (self.tls_ca_file, self.tls_certificate_file, self.tls_key_file)
        )
        return ca, key, certificate


NO_CREDENTIALS = Credentials()


def _usual_token_file() -> str | None:
    path = os.path.expanduser(USUAL_TOKEN_FILE)
    return path if os.path.isfile(path) else None


def _read(path: str | os.PathLike[str]) -> bytes:
    what = f"the file {os.fspath(path)!r}"
    try:
        return read_named(path, MAX_FILE_BYTES)
    except (OSError, ValueError) as e:
        why = e.strerror if isinstance(e, OSError) else e
        raise error("CREDENTIALS_UNAVAILABLE", f"{what} cannot be read: {why}") from e


def _checked(token: object, where: str) -> str:
    """Return the token without white space around it. The error contains no part of the token."""
    stripped = token.strip() if isinstance(token, str) else ""
    if not 0 < len(stripped) <= MAX_TOKEN_BYTES or not all("!" <= letter <= "~" for letter in stripped):
        what = (
            f"{where} is no token: a token is one line of 1 to {MAX_TOKEN_BYTES} printable ASCII letters without blanks"
        )
        raise error("CREDENTIALS_UNAVAILABLE", what)
    return stripped


def _invalid(message: str, hint: str | None = None) -> SeqdedupeError:
    return error("INVALID_CREDENTIALS", message, hint=hint)
