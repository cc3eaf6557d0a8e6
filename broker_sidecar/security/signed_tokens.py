"""Tokens that somebody signs who is trusted (JSON Web Tokens): the role is `sub`, as in Pulsar."""

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jwt
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from broker_sidecar.security.refused import RefusedTokens
from broker_sidecar.security.subject import MAX_NAME_BYTES, can_be_name
from broker_sidecar.security.watching import Watched
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.limits import MIN_RSA_BITS

ALGORITHMS = {("OKP", "Ed25519"): "EdDSA", ("EC", "P-256"): "ES256", ("RSA", None): "RS256"}
"""By the type and curve of a key: that of a token is its key's, whatever its header says."""

LEEWAY_SECONDS = 5
"""So far the clocks of who signs and who checks may be apart. A token is taken for so long after its end, too."""

MAX_REMEMBERED = 1024
"""Tokens whose signature need not be checked again."""

EARLY_SECONDS = 1.0
"""So often a token is looked at again that is not valid yet."""

_LATEST_SECONDS = 253_402_300_799
"""The end of the year 9999."""


class PublicKey(jwt.PyJWK):
    """One that a file says; equal to what the same words have made before."""

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
    """What a valid token says."""

    subject: str
    expires_at_seconds: float
    """Unix time, from which it is not taken any more."""


def read_keys(path: Path) -> Keys:
    """The public keys in a JSON Web Key Set. Raises INVALID_CONFIGURATION."""
    try:
        found = json.loads(path.read_bytes())["keys"]
        keys = {key["kid"]: _public_key(key) for key in found}
        if not keys or len(keys) < len(found) or not all(isinstance(kid, str) and kid for kid in keys):
            raise ValueError("each key needs a kid of its own, and there has to be one")
    except OSError as e:
        raise _unusable(path, f"cannot be read: {e.strerror}") from e
    except (ValueError, TypeError, KeyError, RecursionError, jwt.PyJWTError) as e:
        # What else these say may have a key in it.
        why = str(e) if type(e) is ValueError else type(e).__name__
        raise _unusable(path, f"is no set of public keys (JWKS): {why}") from e
    return keys


def _public_key(key: dict[str, Any]) -> PublicKey:
    """Raises ValueError with what is wrong; TypeError, KeyError, PyJWTError."""
    if "d" in key:
        raise ValueError("one of the keys is private; whoever can read it can make tokens")
    algorithm = ALGORITHMS.get((key["kty"], key.get("crv")))
    if algorithm is None or key.get("alg", algorithm) != algorithm or key.get("use", "sig") != "sig":
        raise ValueError("a key is of none of the kinds Ed25519 (EdDSA), P-256 (ES256), RSA (RS256), for signatures")
    made = PublicKey(key, algorithm)
    if isinstance(made.key, RSAPublicKey) and made.key.key_size < MIN_RSA_BITS:
        raise ValueError(f"an RSA key has less than {MIN_RSA_BITS} bits")
    return made


def _unusable(path: Path, why: str) -> SeqdedupeError:
    hint = "`seqdedupe token keys` makes such a file; docs/security.md says what it holds."
    return error("INVALID_CONFIGURATION", f"the file {path} {why}", hint=hint, key="token_keys_file")


def verify(token: bytes, keys: Keys, audience: str, max_lifetime_seconds: float = math.inf) -> Claims:
    """What the token says, if it is signed by one of the keys, for this audience, and valid now and for no longer in
    all than that.

    Raises UNAUTHENTICATED, TOKEN_EXPIRED. Of a token that is signed and for this audience, the error names the subject.
    """
    try:
        key = keys.get(jwt.get_unverified_header(token).get("kid", ""))
        if key is None:
            raise error("UNAUTHENTICATED", "the token names none of the keys (`kid`) that are taken here")
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
    if not can_be_name(subject):
        raise error("UNAUTHENTICATED", f"the token's `sub` is not 1 to {MAX_NAME_BYTES} bytes that can be printed")
    proven = {"subject": subject, "kind": "jwt"}
    times = {name: claims[name] for name in ("exp", "iat", "nbf") if name in claims}
    for name, value in times.items():
        if type(value) not in (int, float) or not -math.inf < value < math.inf:
            raise error("UNAUTHENTICATED", f"the token's `{name}` is not a finite number", **proven)
        times[name] = max(-_LATEST_SECONDS, min(value, _LATEST_SECONDS))
    ends_at_seconds = times["exp"] + LEEWAY_SECONDS
    if ends_at_seconds <= time.time():
        raise error("TOKEN_EXPIRED", "the token has expired", **proven)
    if max_lifetime_seconds < math.inf:
        if "iat" not in times:
            raise error("UNAUTHENTICATED", "the token has no `iat`: it is not known how long it lives", **proven)
        if (lifetime_seconds := times["exp"] - times["iat"]) > max_lifetime_seconds:
            lives = f"the token lives {lifetime_seconds:.0f} s, from `iat` to `exp`"
            raise error("UNAUTHENTICATED", f"{lives}: at most {max_lifetime_seconds:.0f} are taken here", **proven)
    return Claims(subject, ends_at_seconds)


class SignedTokens:
    """Checks tokens against the keys as they are now."""

    def __init__(
        self,
        keys_file: Path,
        audience: str,
        on_change: Callable[[], None],
        max_lifetime_seconds: float = math.inf,
    ) -> None:
        """Raises INVALID_CONFIGURATION."""
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
        """What a valid token says that is shown from there. Raises UNAUTHENTICATED, TOKEN_EXPIRED."""
        claims = self._verified.get(token)
        if claims is not None and now_seconds < claims.expires_at_seconds:
            return claims
        # It may be signed with a key that was added just now.
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
