"""What a broker needs that is reached by TLS and with tokens only, and those who bring them."""

import base64
import hashlib
import hmac
import json
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest

from seqdedupe.testing import reserved_port

KEY = b"a key of at least thirty-two bytes, for tests"
ROLE = "us"
CLIENT_SECRET = "the-secret-of-the-client"


def token(role: str = ROLE, key: bytes = KEY) -> str:
    """A token as Pulsar takes it (HS256)."""
    parts = [json.dumps(part).encode() for part in ({"alg": "HS256"}, {"sub": role})]
    signed = b".".join(map(_base64, parts))
    return (signed + b"." + _base64(hmac.new(key, signed, hashlib.sha256).digest())).decode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("secured")
    certificates(folder)
    (folder / "token").write_text(token())
    return folder


@pytest.fixture(scope="module")
def ports() -> Iterator[tuple[int, int]]:
    """For TLS: of messages, and of admin calls."""
    with reserved_port() as messages, reserved_port() as calls:
        yield messages.getsockname()[1], calls.getsockname()[1]


def _base64(raw: bytes) -> bytes:
    return base64.urlsafe_b64encode(raw).rstrip(b"=")


def certificates(folder: Path) -> None:
    """`ca.pem`, and for 127.0.0.1 `server.pem` and `server.key`."""
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    _run(*make, "-keyout", str(folder / "ca.key"), "-out", str(folder / "ca.pem"), "-subj", "/CN=authority")
    signed = ["-CA", str(folder / "ca.pem"), "-CAkey", str(folder / "ca.key")]
    names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    _run(*make, *signed, *names, "-keyout", str(folder / "server.key"), "-out", str(folder / "server.pem"))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def keys(folder: Path, port: int, admin_port: int) -> dict[str, Any]:
    """For `standalone.conf`."""
    return {
        # Each of the two web ports takes some.
        "numHttpServerThreads": 8,
        "brokerServicePortTls": port,
        "webServicePortTls": admin_port,
        "tlsCertificateFilePath": folder / "server.pem",
        "tlsKeyFilePath": folder / "server.key",
        "tlsTrustCertsFilePath": folder / "ca.pem",
        "authenticationEnabled": "true",
        "authenticationProviders": "org.apache.pulsar.broker.authentication.AuthenticationProviderToken",
        "tokenSecretKey": f"data:;base64,{base64.b64encode(KEY).decode()}",
        "superUserRoles": ROLE,
        "brokerClientAuthenticationPlugin": "org.apache.pulsar.client.impl.auth.AuthenticationToken",
        "brokerClientAuthenticationParameters": f"token:{token(ROLE)}",
    }


class Issuer(HTTPServer):
    """Gives tokens for client credentials."""

    url = ""
    audiences: list[str]


@contextmanager
def issuer() -> Iterator[Issuer]:
    with Issuer(("127.0.0.1", 0), _Handler) as server:
        server.url, server.audiences = f"http://127.0.0.1:{server.server_address[1]}", []
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: Issuer

    def do_GET(self) -> None:
        assert self.path == "/.well-known/openid-configuration"
        self._answer(200, {"token_endpoint": f"{self.server.url}/token"})

    def do_POST(self) -> None:
        form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        if form["client_secret"] != [CLIENT_SECRET] or form["grant_type"] != ["client_credentials"]:
            self._answer(401, {"error": "invalid_client"})
            return
        self.server.audiences += form["audience"]
        self._answer(200, {"access_token": token(form["client_id"][0]), "expires_in": 3600})

    def _answer(self, status: int, body: dict[str, object]) -> None:
        raw = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, format: str, *_: object) -> None:
        """Nothing."""
