"""Keys and tokens, as an issuer has and makes them, and bad ones."""

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

AUDIENCE = "seqdedupe-tests"

_ALGORITHMS = {
    "EdDSA": jwt.algorithms.OKPAlgorithm,
    "ES256": jwt.algorithms.ECAlgorithm,
    "ES384": jwt.algorithms.ECAlgorithm,
    "RS256": jwt.algorithms.RSAAlgorithm,
}


class Issuer:
    """A private key with its `kid`, and tokens signed with it."""

    def __init__(self, kid: str, algorithm: str = "EdDSA", *, rsa_bits: int = 2048) -> None:
        self.kid = kid
        self.algorithm = algorithm
        make: dict[str, Callable[[], Any]] = {
            "EdDSA": ed25519.Ed25519PrivateKey.generate,
            "ES256": lambda: ec.generate_private_key(ec.SECP256R1()),
            "ES384": lambda: ec.generate_private_key(ec.SECP384R1()),
            "RS256": lambda: rsa.generate_private_key(65537, rsa_bits),
        }
        self.key: Any = make[algorithm]()

    def jwk(self, *, private: bool = False) -> dict[str, Any]:
        key = self.key if private else self.key.public_key()
        found: dict[str, Any] = _ALGORITHMS[self.algorithm].to_jwk(key, as_dict=True)  # type: ignore[attr-defined]
        return found | {"kid": self.kid}

    def token(self, header: dict[str, Any] | None = None, **claims: Any) -> str:
        """One that is valid, unless something else is said; None: not at all."""
        now = int(time.time())
        said = {"sub": "shop", "aud": AUDIENCE, "exp": now + 3600, "iat": now} | claims
        headers = {"kid": self.kid} | (header or {})
        return jwt.encode(
            {name: value for name, value in said.items() if value is not None},
            self.key,
            self.algorithm,
            headers={name: value for name, value in headers.items() if value is not None},
        )


def write_keys(path: Path, keys: Iterable[dict[str, Any]]) -> Path:
    """A JSON Web Key Set."""
    path.write_text(json.dumps({"keys": list(keys)}))
    return path
