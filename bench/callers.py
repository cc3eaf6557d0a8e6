"""A sidecar with rules, and callers with signed tokens, for benchmarks."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jwt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from bench.setup import Metadata
from seqdedupe.testing import Sidecar

AUDIENCE = "bench"


class Ruled:
    """A sidecar, and what its callers say in each call."""

    def __init__(self, folder: Path, rules: str) -> None:
        self._key = Ed25519PrivateKey.generate()
        jwk = jwt.algorithms.OKPAlgorithm.to_jwk(self._key.public_key(), as_dict=True)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "keys.json").write_text(json.dumps({"keys": [jwk | {"kid": "bench"}]}))
        (folder / "rules.toml").write_text(rules)
        self.sidecar = Sidecar(
            folder,
            authentication="token",
            token_keys_file=folder / "keys.json",
            token_audience=AUDIENCE,
            rules_file=folder / "rules.toml",
        )

    def as_operator(self) -> Metadata:
        """For whom no rule is asked."""
        return (("authorization", f"Bearer {(self.sidecar.data / 'token').read_text().strip()}"),)

    def as_caller(self, name: str) -> Metadata:
        return (("authorization", f"Bearer {self.token_of(name)}"),)

    def token_of(self, name: str) -> str:
        """A signed token."""
        claims = {"sub": name, "aud": AUDIENCE, "exp": int(time.time()) + 86_400}
        return jwt.encode(claims, self._key, "EdDSA", headers={"kid": "bench"})


@contextmanager
def ruled(folder: Path, rules: str) -> Iterator[Ruled]:
    """Such a sidecar, which serves."""
    made = Ruled(folder, rules)
    with made.sidecar:
        yield made
