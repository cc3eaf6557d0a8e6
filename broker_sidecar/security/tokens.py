"""The tokens that callers present: the data directory's own token, and tokens with a trusted signature.

`SignedTokens` checks JSON Web Tokens, and `RefusedTokens` remembers invalid tokens. `OwnToken` is the token in the file
that `make` writes. `Authentication` uses both.
"""

import hashlib
import heapq
import hmac
import json
import logging
import math
import os
import secrets
import shlex
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import jwt
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from broker_sidecar.security.subject import OPERATOR, network_of
from broker_sidecar.security.watched_files import Watched
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.files import open_named, read_named, sync_folder, write_synced
from seqdedupe.limits import MAX_TOKEN_BYTES, MIN_RSA_BITS
from seqdedupe.store.directories import whole_of

logger = logging.getLogger("seqdedupe.security")

# -- The validity of credentials, for metrics and alerts.

MAX_SUBJECTS = 100
"""The most subjects of tokens with separate metric series. The limit applies once to valid tokens, and once to expired
tokens that are still sent."""


class Validity(NamedTuple):
    """The period in which a credential is valid: beginning and end, in Unix time. An unknown beginning is `-inf`."""

    starts_seconds: float
    ends_seconds: float


class Credential(NamedTuple):
    """A credential that a sidecar presents or trusts, and the credential's validity."""

    kind: str
    """`server_certificate`, `client_authority`, `revocation_list` or `token`."""
    subject: str
    """The subject of a token. Empty for other kinds."""
    validity: Validity


# -- Refused tokens. A caller that shows the same token repeatedly costs no signature check.

MAX_HOSTS = 1_024
"""The maximum number of hosts whose tokens are remembered. Above this number, the host that has not presented a token
for the longest time is forgotten."""

MAX_TOKENS = 16
"""The maximum number of tokens remembered for one host. So the tokens of one host cannot displace the tokens of other
hosts."""

MAX_WHY_LETTERS = 200
"""The most characters kept of the reason of a refusal. A part of it comes from the token."""


class _Refusal(NamedTuple):
    """A refusal as numbers and text. An error would keep all objects of the refused call alive by its traceback."""

    reason: str
    why: str
    numbers: dict[str, Any]
    since_seconds: float
    until_seconds: float


class RefusedTokens:
    """The refusals of tokens, by host and digest of the token. The memory for these refusals is limited."""

    def __init__(self) -> None:
        self._of_hosts: OrderedDict[str, OrderedDict[bytes, _Refusal]] = OrderedDict()

    def check(self, token: bytes, address: str, now_seconds: float) -> None:
        """Raise the same error as before if this token was refused from this host."""
        # Usually nothing is known of the host. The digest is computed only for hosts that have shown an invalid token.
        if (tokens := self._of_hosts.get(host := network_of(address))) is None:
            return
        if (refusal := tokens.get(digest := _digest(token))) is None:
            return
        if not refusal.since_seconds <= now_seconds < refusal.until_seconds:
            del tokens[digest]
            return
        tokens.move_to_end(digest)
        self._of_hosts.move_to_end(host)
        # An error kept in a variable would keep the objects of the refused call alive.
        raise error(refusal.reason, refusal.why, **refusal.numbers)

    def add(self, token: bytes, address: str, e: SeqdedupeError, since_seconds: float, until_seconds: float) -> None:
        """Refuse the token with this error from now on, within this interval of time. Outside the interval the token is
        checked again."""
        host = network_of(address)
        tokens = self._of_hosts.setdefault(host, OrderedDict())
        self._of_hosts.move_to_end(host)
        if len(self._of_hosts) > MAX_HOSTS:
            self._of_hosts.popitem(last=False)
        why = e.message[:MAX_WHY_LETTERS]
        tokens[_digest(token)] = _Refusal(e.reason, why, e.numbers, since_seconds, until_seconds)
        if len(tokens) > MAX_TOKENS:
            tokens.popitem(last=False)

    def clear(self) -> None:
        """Forget all refusals, because other keys are accepted now."""
        self._of_hosts.clear()


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


# -- Tokens with a trusted signature (JSON Web Tokens): the role is `sub`, as in Pulsar.

ALGORITHMS = {("OKP", "Ed25519"): "EdDSA", ("EC", "P-256"): "ES256", ("RSA", None): "RS256"}
"""The algorithms by a key's type and curve. The key decides the algorithm, not the token's header."""

LEEWAY_SECONDS = 5
"""The largest difference between the clocks of signer and checker. A token is also accepted for this time after its
end."""

MAX_REMEMBERED = 1024
"""The most tokens whose verified signature is remembered."""

EARLY_SECONDS = 1.0
"""The interval after which a token that is not valid yet is checked again."""

_EARLIEST_SECONDS = -62_135_596_800
"""The beginning of the year 1."""

_LATEST_SECONDS = 253_402_300_799
"""The end of the year 9999."""


class PublicKey(jwt.PyJWK):
    """A public key of a file. Two keys with the same text are equal."""

    def __init__(self, said: dict[str, Any], algorithm: str) -> None:
        super().__init__(said, algorithm)
        self._said = said

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PublicKey) and self._said == other._said

    def __hash__(self) -> int:
        return hash(self._said["kid"])


Keys = Mapping[str, PublicKey]
"""Public keys by `kid`."""


class Claims(NamedTuple):
    """The contents of a valid token."""

    subject: str
    expires_at_seconds: float
    """The Unix time from which the token is not accepted."""
    issued_at_seconds: float
    """Unix time; `-inf` if the token does not say."""


def read_keys(path: Path) -> Keys:
    """Return the public keys in a JSON Web Key Set. Raises INVALID_CONFIGURATION."""
    try:
        found = json.loads(read_named(path))["keys"]
        keys = {key["kid"]: _public_key(key) for key in found}
        if not keys or len(keys) < len(found) or not all(isinstance(kid, str) and kid for kid in keys):
            raise ValueError("it needs at least one key, and each key needs a different kid")
    except OSError as e:
        raise _unusable(path, f"cannot be read: {e.strerror}") from e
    except (ValueError, TypeError, KeyError, RecursionError, jwt.PyJWTError) as e:
        # The text of other errors may contain a key.
        why = str(e) if type(e) is ValueError else type(e).__name__
        raise _unusable(path, f"is no set of public keys (JWKS): {why}") from e
    return keys


def _public_key(key: dict[str, Any]) -> PublicKey:
    """Return the key. Raises ValueError with the reason if the key is invalid; TypeError, KeyError, PyJWTError."""
    if "d" in key:
        raise ValueError("one of the keys is private: everybody who can read the file can make tokens")
    algorithm = ALGORITHMS.get((key["kty"], key.get("crv")))
    if algorithm is None or key.get("alg", algorithm) != algorithm or key.get("use", "sig") != "sig":
        raise ValueError("each key must be for signatures, and one of Ed25519 (EdDSA), P-256 (ES256), RSA (RS256)")
    made = PublicKey(key, algorithm)
    if isinstance(made.key, RSAPublicKey) and made.key.key_size < MIN_RSA_BITS:
        raise ValueError(f"an RSA key has fewer than {MIN_RSA_BITS} bits")
    return made


def _unusable(path: Path, why: str) -> SeqdedupeError:
    hint = "`seqdedupe token keys` makes such a file; docs/guides/security.md says what it holds."
    return error("INVALID_CONFIGURATION", f"the file {path} {why}", hint=hint, key="token_keys_file")


MAX_SUBJECT_BYTES = 255


def can_be_subject(name: str) -> bool:
    """Return whether a subject may have this name: 1 to 255 bytes that can be printed."""
    return name.isprintable() and 0 < len(name.encode()) <= MAX_SUBJECT_BYTES


def expired(subject: str, at_seconds: float) -> SeqdedupeError:
    """Return TOKEN_EXPIRED for a token whose signature was verified. `at_seconds` is its `exp`."""
    # The time comes first: the memory of refused tokens keeps only the beginning of the text.
    at = datetime.fromtimestamp(at_seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    what = f"the token expired at {at}; its subject is {subject!r}"
    return error("TOKEN_EXPIRED", what, subject=subject, kind="jwt", expired_at=at)


def verify(token: bytes, keys: Keys, audience: str, max_lifetime_seconds: float = math.inf) -> Claims:
    """Return the contents of a token with a valid signature for this audience.

    The token must be valid now, and its whole lifetime must not exceed `max_lifetime_seconds`. Raises UNAUTHENTICATED,
    TOKEN_EXPIRED. If the token is signed and for this audience, the error names the subject.
    """
    try:
        key = keys.get(jwt.get_unverified_header(token).get("kid", ""))
        if key is None:
            raise error("UNAUTHENTICATED", "the token's `kid` names none of the keys that this sidecar accepts")
        claims = jwt.decode(
            token,
            key,
            algorithms=[key.algorithm_name],
            audience=audience,
            leeway=LEEWAY_SECONDS,
            options={"require": ["exp", "aud", "sub"], "verify_exp": False},
        )
    except jwt.PyJWTError as e:
        raise error("UNAUTHENTICATED", f"the token is not valid here: {e}") from e
    subject = claims["sub"]
    if not can_be_subject(subject):
        raise error("UNAUTHENTICATED", f"the token's `sub` is not 1 to {MAX_SUBJECT_BYTES} printable bytes")
    proven = {"subject": subject, "kind": "jwt"}
    times = {name: claims[name] for name in ("exp", "iat", "nbf") if name in claims}
    for name, value in times.items():
        if type(value) not in (int, float) or not -math.inf < value < math.inf:
            raise error("UNAUTHENTICATED", f"the token's `{name}` is not a finite number", **proven)
        times[name] = max(_EARLIEST_SECONDS, min(value, _LATEST_SECONDS))
    ends_at_seconds = times["exp"] + LEEWAY_SECONDS
    if ends_at_seconds <= time.time():
        raise expired(subject, times["exp"])
    if max_lifetime_seconds < math.inf:
        if "iat" not in times:
            raise error("UNAUTHENTICATED", "the token has no `iat`, so its lifetime is unknown", **proven)
        if (lifetime_seconds := times["exp"] - times["iat"]) > max_lifetime_seconds:
            lives = f"the token is valid for {lifetime_seconds:.0f} s, from `iat` to `exp`"
            raise error("UNAUTHENTICATED", f"{lives}: at most {max_lifetime_seconds:.0f} s are accepted", **proven)
    return Claims(subject, ends_at_seconds, min(times.get("iat", -math.inf), times["exp"]))


class SignedTokens:
    """Checks tokens against the present keys."""

    def __init__(
        self,
        keys_file: Path,
        audience: str,
        on_change: Callable[[], None],
        max_lifetime_seconds: float = math.inf,
    ) -> None:
        """Read the file. Raises INVALID_CONFIGURATION."""
        self._audience = audience
        self._max_lifetime_seconds = max_lifetime_seconds
        self._verified: dict[bytes, Claims] = {}
        self._refused = RefusedTokens()
        self._on_change = on_change
        self.watched = Watched("the keys of tokens", [keys_file], lambda: read_keys(keys_file), self._changed)

    def _changed(self) -> None:
        self._verified.clear()
        self._refused.clear()
        self._on_change()

    def claims_of(self, token: bytes, address: str, now_seconds: float) -> Claims:
        """Return the contents of a valid token, shown from this address. Raises UNAUTHENTICATED, TOKEN_EXPIRED."""
        claims = self._verified.get(token)
        if claims is not None and now_seconds < claims.expires_at_seconds:
            return claims
        # The token may be signed with a key that has just been added.
        self.watched.look(at_once=True)
        self._refused.check(token, address, now_seconds)
        try:
            claims = verify(token, self.watched.value, self._audience, self._max_lifetime_seconds)
        except SeqdedupeError as e:
            is_early = isinstance(e.__cause__, jwt.ImmatureSignatureError)
            until_seconds = now_seconds + EARLY_SECONDS if is_early else math.inf
            self._refused.add(token, address, e, now_seconds, until_seconds)
            raise
        if len(self._verified) >= MAX_REMEMBERED:
            self._verified.clear()
        self._verified[token] = claims
        return claims

    def credentials(self, now_seconds: float) -> list[Credential]:
        """Return the valid tokens that were presented: the latest token of each subject. May be called from any thread.

        If there are more than `MAX_SUBJECTS`, return the tokens with the smallest remaining part of their lifetime.
        """
        latest: dict[str, Validity] = {}
        for subject, ends_seconds, starts_seconds in list(self._verified.values()):
            known = latest.get(subject)
            if now_seconds < ends_seconds and (known is None or known.ends_seconds < ends_seconds):
                latest[subject] = Validity(starts_seconds, ends_seconds)

        def part_left(credential: Credential) -> float:
            starts_seconds, ends_seconds = credential.validity
            return (ends_seconds - now_seconds) / (ends_seconds - starts_seconds)

        found = (Credential("token", subject, validity) for subject, validity in latest.items())
        return heapq.nsmallest(MAX_SUBJECTS, found, key=part_left)


# -- The data directory's own token. A caller that can read its file may do everything.


TOKEN_FILE = "token"
TOKEN_BYTES = 32
"""The number of random bytes in a generated token. In the file they take 43 letters of base64."""

MIN_TOKEN_LETTERS = 16

_UNWANTED = 0o037
"""The forbidden bits of the file's mode. Its group may have the right to read it; others may have no right."""


def path_of(data_directory: Path) -> Path:
    """Return the path of the token's file. All workers of a data directory share it."""
    return (whole_of(data_directory) or data_directory) / TOKEN_FILE


def make(data_directory: Path) -> Path:
    """Create the token if it does not exist, and return the path of the token's file. When this returns, the token is
    complete and durable. Raises OSError."""
    path = path_of(data_directory)
    if not os.path.lexists(path):
        new = path.with_name(f"{TOKEN_FILE}.{secrets.token_hex(4)}.new")
        write_synced(new, f"{secrets.token_urlsafe(TOKEN_BYTES)}\n".encode())
        try:
            # Unlike a rename, a link does not replace an existing file.
            os.link(new, path)
        except FileExistsError:
            pass
        finally:
            new.unlink()
        sync_folder(path.parent)
    return path


def tell(data_directory: Path, log_format: str) -> None:
    """Report how clients get the token. On a terminal or with text logs, print a shell command. Otherwise write a log
    entry."""
    line = f"export SEQDEDUPE_TOKEN_FILE={shlex.quote(str(path_of(data_directory).absolute()))}"
    if log_format == "text" or sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)
    else:
        logger.info("clients show the token", extra={"export": line})


def read(path: Path) -> bytes:
    """Return the token in the file. Raises INVALID_CONFIGURATION."""
    try:
        with open_named(path) as file:
            mode = os.fstat(file.fileno()).st_mode
            token = file.read(MAX_TOKEN_BYTES + 1).strip()
    except OSError as e:
        raise _unusable_file(
            path, f"cannot be read: {e.strerror}", "Make it readable for the user that the sidecar runs as."
        ) from e
    if mode & _UNWANTED:
        raise _unusable_file(path, f"can be read or written by others (mode {mode & 0o777:03o})", f"chmod 600 {path}")
    if not MIN_TOKEN_LETTERS <= len(token) <= MAX_TOKEN_BYTES or not all(0x21 <= letter <= 0x7E for letter in token):
        limits = f"{MIN_TOKEN_LETTERS} to {MAX_TOKEN_BYTES} printable ASCII letters without blanks"
        raise _unusable_file(
            path, f"holds no token: that is one line of {limits}", "Remove it: the next start makes one."
        )
    return token


def _unusable_file(path: Path, why: str, hint: str) -> SeqdedupeError:
    return error("INVALID_CONFIGURATION", f"the token file {path} {why}", hint=hint)


class OwnToken:
    """The present token and the previous token of the data directory. Clients with the previous token must read the
    token file again."""

    def __init__(self, path: Path, on_change: Callable[[], None]) -> None:
        """Read the file. Raises INVALID_CONFIGURATION."""
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
        """Return whether this is the present token. Raises TOKEN_EXPIRED if this is the previous token."""
        if hmac.compare_digest(token, self._now):
            return True
        # A client that has just read the file may be the first to show that it has changed.
        self.watched.look(at_once=True)
        if hmac.compare_digest(token, self._now):
            return True
        if self._former and hmac.compare_digest(token, self._former):
            what, hint = "the sidecar has another token now", "Read the token file again."
            raise error("TOKEN_EXPIRED", what, hint=hint, subject=OPERATOR, kind="token")
        return False
