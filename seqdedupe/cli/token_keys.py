"""Keys that sign tokens, and the tokens. What checks these is in the sidecar."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jwt
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

from broker_sidecar.security.tokens import ALGORITHMS, read_keys
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.files import sync_folder, write_synced

_JWK_OF: dict[type, Callable[..., Any]] = {
    Ed25519PrivateKey: OKPAlgorithm.to_jwk,
    EllipticCurvePrivateKey: ECAlgorithm.to_jwk,
    RSAPrivateKey: RSAAlgorithm.to_jwk,
}
_SECRET_PARTS = frozenset({"d", "p", "q", "dp", "dq", "qi", "oth"})
"""Of a private key as JSON."""


def read_private_key(path: Path, kid: str | None) -> tuple[jwt.PyJWK, str]:
    """The key in a file, a JSON Web Key or PEM, and its `kid`, which only the former has itself.

    Raises INVALID_CONFIGURATION; OSError.
    """
    data = path.read_bytes()
    try:
        found = _jwk_of_pem(data) if b"-----BEGIN" in data else json.loads(data)
        algorithm = ALGORITHMS.get((found["kty"], found.get("crv")))
        if algorithm is None or "d" not in found:
            raise _unusable(path)
        key = jwt.PyJWK(found, algorithm)
    except (ValueError, TypeError, KeyError, AttributeError, UnsupportedAlgorithm, jwt.PyJWTError) as e:
        raise _unusable(path) from e
    kid = kid or found.get("kid")
    if not kid or not isinstance(kid, str):
        why = f"the key in {path} has no name"
        raise error("INVALID_CONFIGURATION", why, hint="Say the one that its public key has: --key-id.")
    return key, kid


def _jwk_of_pem(pem: bytes) -> dict[str, Any]:
    key = load_pem_private_key(pem, None)
    for kind, to_jwk in _JWK_OF.items():
        if isinstance(key, kind):
            made: dict[str, Any] = to_jwk(key, as_dict=True)
            return made
    raise ValueError("a key of another kind")


def _unusable(path: Path) -> SeqdedupeError:
    why = "holds no private key of the kinds Ed25519, P-256 and RSA, as PEM without a password or as JWK"
    return error("INVALID_CONFIGURATION", f"the file {path} {why}", hint="`seqdedupe token keys` makes one.")


def sign(key: jwt.PyJWK, kid: str, subject: str, audience: str, now_seconds: int, expires_in_seconds: int) -> str:
    """A token, valid from now on."""
    claims = {"sub": subject, "aud": audience, "iat": now_seconds, "exp": now_seconds + expires_in_seconds}
    return jwt.encode(claims, key, key.algorithm_name, headers={"kid": kid})


def make_keys(private_file: Path, keys_file: Path, kid: str) -> None:
    """Makes a key (Ed25519), in a file that only its owner may read, and adds its public part to a set of keys.

    Raises INVALID_CONFIGURATION if the private file is there, the set has a key of that name or is none; OSError.
    """
    if private_file.exists():
        raise error("INVALID_CONFIGURATION", f"{private_file} is there already", hint="Name another file for the key.")
    known = []
    if keys_file.exists():
        if kid in read_keys(keys_file):
            raise error("INVALID_CONFIGURATION", f"{keys_file} has a key {kid!r} already", hint="Say another --key-id.")
        known = json.loads(keys_file.read_bytes())["keys"]
    made: dict[str, Any] = OKPAlgorithm.to_jwk(Ed25519PrivateKey.generate(), as_dict=True)
    private = made | {"kid": kid, "alg": "EdDSA", "use": "sig"}
    public = {name: value for name, value in private.items() if name not in _SECRET_PARTS and name != "key_ops"}
    write_synced(private_file, json.dumps(private, indent=2).encode() + b"\n")
    keys_file = keys_file.resolve()  # a symbolic link stays one
    new = keys_file.with_name(f"{keys_file.name}.new")
    write_synced(new, json.dumps({"keys": [*known, public]}, indent=2).encode() + b"\n")
    new.chmod(0o644)
    os.replace(new, keys_file)
    sync_folder(keys_file.parent)
