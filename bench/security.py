"""What it costs that the sidecar knows who publishes: 256 rows a frame, 16 in flight, against one that asks nobody.

With its own token on a Unix socket under one name, and over a network with TLS, a signed token and rules under 1,024.
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
from bench.rules import NAMES, in_turn
from seqdedupe.address import SidecarAddress
from seqdedupe.client.connection import new_channel
from seqdedupe.client.credentials import NO_CREDENTIALS, Credentials
from seqdedupe.testing import Sidecar

AUDIENCE = "bench"
RULES = """
[[allow]]
subjects = ["bench"]
actions = ["publish"]
topics = ["t*"]
producers = ["device-*"]

[[allow]]
subjects = ["bench"]
actions = ["create"]
topics = ["t*"]

[[deny]]
subjects = ["*"]
actions = ["publish"]
topics = ["*"]
producers = ["*-secret", "admin/**"]
"""

_topics = itertools.count()


async def _publish(
    address: str, credentials: Credentials, names: list[str], make: setup.MakeBatch
) -> tuple[float, list[float]]:
    async with new_channel(SidecarAddress.parse(address), credentials) as channel:
        stream = await setup.opened(channel, names, f"t{next(_topics)}")
        return await stream.publish(make, BATCHES, IN_FLIGHT)


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
    many = [f"device-{k}" for k in range(NAMES)]

    def measured(seconds: float, each: list[float]) -> dict[str, float]:
        return {"rows/s": ROWS * BATCHES / seconds} | percentiles_ms(each)

    def one_name(address: str, credentials: Credentials) -> dict[str, float]:
        return measured(*setup.run(_publish(address, credentials, ["p"], rising("p", ROWS))))

    def many_names(address: str, credentials: Credentials) -> dict[str, float]:
        return measured(*setup.run(_publish(address, credentials, many, in_turn(many))))

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
            "a socket, open": lambda: one_name(open_socket, NO_CREDENTIALS),
            "a socket, token": lambda: one_name(closed.address, shown),
            "a port, open": lambda: many_names(open_port, NO_CREDENTIALS),
            "a port, TLS, signed token and rules": lambda: many_names(tls_port, signed),
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
