"""`seqdedupe token`: what it makes a sidecar takes, and what it checks it says."""

import json
import stat
import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from broker_sidecar.security.tokens import read_keys, verify
from tests.broker_sidecar.security.signing import AUDIENCE, Issuer, write_keys
from tests.cli.conftest import COMMAND, TIMEOUT_SECONDS

CREATE = ("create", "--subject", "shop", "--audience", AUDIENCE, "--expires-in")


def token(folder: Path, *words: str, shown: str = "") -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [COMMAND, "token", *words],
        cwd=folder,
        input=shown,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )


def test_keys_tokens_and_whose_they_are(tmp_path: Path) -> None:
    assert token(tmp_path, "keys", "private.json", "keys.json", "--key-id", "one").returncode == 0
    assert stat.S_IMODE((tmp_path / "private.json").stat().st_mode) == 0o600
    assert '"d"' not in (tmp_path / "keys.json").read_text()
    made = token(tmp_path, *CREATE, "15m", "--key-file", "private.json").stdout
    checks = ("validate", "--keys-file", "keys.json", "--audience")
    said = json.loads(token(tmp_path, *checks, AUDIENCE, "--json", shown=made).stdout)
    claims = verify(made.strip().encode(), read_keys(tmp_path / "keys.json"), AUDIENCE)
    assert said["subject"] == claims.subject == "shop"
    # Another key next to it, by a symbolic link, which stays one: tokens of both are taken.
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "link.json").symlink_to("../keys.json")
    assert token(tmp_path, "keys", "private-2.json", "elsewhere/link.json").returncode == 0
    assert (tmp_path / "elsewhere" / "link.json").is_symlink()
    assert len(read_keys(tmp_path / "keys.json")) == 2
    (tmp_path / "shop.token").write_text(made)
    assert token(tmp_path, *checks, AUDIENCE, "--token-file", "shop.token").stdout.startswith("shop, until 20")
    for audience, shown in (("other", made), (AUDIENCE, made[:-5]), (AUDIENCE, ""), (AUDIENCE, Issuer("one").token())):
        refused = token(tmp_path, *checks, audience, shown=shown)
        assert refused.returncode == 1
        assert "UNAUTHENTICATED" in refused.stderr
        assert not shown or shown.strip() not in refused.stderr


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    assert token(tmp_path, "keys", "private.json", "keys.json", "--key-id", "one").returncode == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for words in (("private.json", "keys.json"), ("private-2.json", "keys.json", "--key-id", "one")):
        assert "INVALID_CONFIGURATION" in token(tmp_path, "keys", *words).stderr
    (tmp_path / "broken.json").write_text("{")
    assert "INVALID_CONFIGURATION" in token(tmp_path, "keys", "private-2.json", "broken.json").stderr
    (tmp_path / "broken.json").unlink()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("kind", ["EdDSA", "ES256", "RS256"])
def test_a_key_of_another_tool(tmp_path: Path, kind: str) -> None:
    issuer = Issuer("k", kind)
    write_keys(tmp_path / "keys.json", [issuer.jwk()])
    assert isinstance(issuer.key, ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey)
    pem = issuer.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (tmp_path / "key.pem").write_bytes(pem)
    without_name = token(tmp_path, *CREATE, "1h", "--key-file", "key.pem")
    assert "--key-id" in without_name.stderr
    made = token(tmp_path, *CREATE, "1h", "--key-file", "key.pem", "--key-id", "k").stdout
    assert verify(made.strip().encode(), read_keys(tmp_path / "keys.json"), AUDIENCE).subject == "shop"


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b"-----BEGIN nothing", b'{"kty": "oct", "k": "abc", "kid": "a"}']
)
def test_what_is_no_private_key(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "key").write_bytes(content)
    refused = token(tmp_path, *CREATE, "1h", "--key-file", "key", "--key-id", "k")
    assert (refused.returncode, "INVALID_CONFIGURATION" in refused.stderr) == (2, True)
    assert token(tmp_path, *CREATE, "forever", "--key-file", "key").returncode == 2
