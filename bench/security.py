"""What it costs that the sidecar knows who publishes: 256 rows a frame, 16 in flight, against one that asks nobody.

With its own token on a Unix socket, and over a network with TLS, a signed token and rules.
"""

import itertools
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import jwt
import trustme
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from jwt.algorithms import OKPAlgorithm

from bench import setup
from bench.figure import Arm, Figure, Ratio, over, percentiles_ms
from bench.publish import BATCHES, IN_FLIGHT, ROWS, rising
from seqdedupe.address import SidecarAddress
from seqdedupe.client.connection import new_channel
from seqdedupe.client.credentials import NO_CREDENTIALS, Credentials
from seqdedupe.testing import Sidecar

AUDIENCE = "bench"
RULES = """
[[allow]]
subjects = ["bench"]
actions = ["publish"]
topics = ["bench"]
producers = ["p*"]

[[allow]]
subjects = ["bench"]
actions = ["create"]
topics = ["bench"]
"""

_names = itertools.count()


async def _publish(address: str, credentials: Credentials, name: str) -> tuple[float, list[float]]:
    async with new_channel(SidecarAddress.parse(address), credentials) as channel:
        stream = await setup.opened(channel, [name])
        return await stream.publish(rising(name, ROWS), BATCHES, IN_FLIGHT)


def _signed(folder: Path) -> tuple[dict[str, object], Credentials]:
    """The sidecar's keys for TLS, signed tokens and rules, and what a client shows."""
    folder.mkdir()
    authority, key = trustme.CA(), Ed25519PrivateKey.generate()
    issued = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    issued.private_key_and_cert_chain_pem.write_to_path(folder / "both.pem")
    public = OKPAlgorithm.to_jwk(key.public_key(), as_dict=True)
    (folder / "keys.json").write_text(json.dumps({"keys": [public | {"kid": "bench"}]}))
    (folder / "rules.toml").write_text(RULES)
    claims = {"sub": "bench", "aud": AUDIENCE, "exp": int(time.time()) + 86_400}
    token = jwt.encode(claims, key, "EdDSA", headers={"kid": "bench"})
    keys: dict[str, object] = {
        "authentication": "token",
        "tls_certificate_file": folder / "both.pem",
        "tls_key_file": folder / "both.pem",
        "token_keys_file": folder / "keys.json",
        "token_audience": AUDIENCE,
        "rules_file": folder / "rules.toml",
    }
    return keys, Credentials(token=token, tls_ca_file=folder / "ca.pem")


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    def published(address: str, credentials: Credentials) -> dict[str, float]:
        seconds, each = setup.run(_publish(address, credentials, f"p{next(_names)}"))
        return {"rows/s": ROWS * BATCHES / seconds} | percentiles_ms(each)

    with ExitStack() as stack:
        sockets = stack.enter_context(tempfile.TemporaryDirectory())

        def started(name: str, keys: dict[str, object]) -> Sidecar:
            sidecar = Sidecar(folder / name)
            sidecar.keys = keys
            return stack.enter_context(sidecar)

        open_socket = started("open-socket", {"listen": f"unix:{sockets}/open"}).address
        closed = started("closed-socket", {"listen": f"unix:{sockets}/closed", "authentication": "token"})
        shown = Credentials(token_file=closed.token_file)
        open_port = started("open-port", {}).address
        keys, signed = _signed(folder / "security")
        tls_port = started("tls-port", keys).address
        arms: dict[str, Arm] = {
            "a socket, open": lambda: published(open_socket, NO_CREDENTIALS),
            "a socket, token": lambda: published(closed.address, shown),
            "a port, open": lambda: published(open_port, NO_CREDENTIALS),
            "a port, TLS, signed token and rules": lambda: published(tls_port, signed),
        }
        yield Figure(
            arms,
            ratios=[
                Ratio("socket: token ÷ open", over("a socket, token, rows/s", "a socket, open, rows/s"), at_least=0.95),
                Ratio(
                    "port: TLS, signed token and rules ÷ open",
                    over("a port, TLS, signed token and rules, rows/s", "a port, open, rows/s"),
                    at_least=0.75,
                ),
            ],
            notes=["arms in rows a second, and milliseconds a batch"],
        )
