"""A client that behaves next to one that says nothing, one that reads nothing, one that floods and one that lies, each
with a share of the sidecar: `python -m tests.broker_sidecar.bad_company --seconds 300 --seed 1`.
"""

import argparse
import random
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from seqdedupe.batch import Binary
from seqdedupe.client.blocking import Client
from seqdedupe.client.credentials import Credentials
from seqdedupe.errors import SeqdedupeError
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from seqdedupe.v1 import read_pb2
from tests.broker_sidecar.security.signing import AUDIENCE, Issuer, write_keys

RULES = """
[[allow]]
subjects = ["good", "idle", "deaf", "flood", "liar"]
actions = ["publish", "create", "read"]
topics = ["${sub}"]

[[share]]
subjects = ["idle", "deaf", "flood", "liar"]
connections = 4
streams = 20
bytes_per_second = 20_000_000
bytes_in_flight = 4_000_000
"""

STREAMS = 40
"""Twice what a share has."""
FRAME_ROWS = 1_000
READ_TIMEOUT_SECONDS = LAST_RESORT_SECONDS
FOLLOW = read_pb2.ReadStreamRequest(topic="deaf", follow=True).SerializeToString()
PUBLISH_STREAM = "/seqdedupe.v1.PublishService/PublishStream"


class Company:
    """The sidecar, and those who misuse it until `over` is set."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.over = threading.Event()
        self.issuer = Issuer("k")
        rules = folder / "rules.toml"
        rules.write_text(RULES)
        self.sidecar = Sidecar(
            folder,
            authentication="token",
            token_keys_file=write_keys(folder / "keys.json", [self.issuer.jwk()]),
            token_audience=AUDIENCE,
            rules_file=rules,
        )
        self.failures: list[BaseException] = []

    def client(self, name: str) -> Client:
        return Client(self.sidecar.address, credentials=Credentials(token=self.issuer.token(sub=name)))

    def streams(self, name: str, call: str, content: bytes) -> list[Any]:
        """Streams that have said this and are not read; those that are refused are gone."""
        channel = grpc.insecure_channel(self.sidecar.address, [("grpc.use_local_subchannel_pool", 1)])
        metadata = (("authorization", f"Bearer {self.issuer.token(sub=name)}"),)
        open_call: Any = channel.stream_stream(call)

        def said() -> Any:
            if content:
                yield content
            self.over.wait()

        return [channel, *(open_call(said(), metadata=metadata) for _ in range(STREAMS))]

    def idle(self) -> None:
        """Opens streams and says nothing, again and again."""
        while not self.over.is_set():
            held = self.streams("idle", PUBLISH_STREAM, b"")
            self.over.wait(3)
            held[0].close()

    def deaf(self) -> None:
        """Follows what it has published by many readers that read nothing, again and again."""
        with self.client("deaf") as client, client.producer("deaf", "p") as producer:
            for _ in range(10):
                producer.send_batch(Binary.of_all([b"x" * 1000] * FRAME_ROWS)).result(READ_TIMEOUT_SECONDS)
        while not self.over.is_set():
            held = self.streams("deaf", "/seqdedupe.v1.ReadService/ReadStream", FOLLOW)
            self.over.wait(3)
            held[0].close()

    def flood(self) -> None:
        """Sends all that it may, as fast as it may."""
        payloads = Binary.of_all([b"x" * 100] * FRAME_ROWS)
        with self.client("flood") as client, client.producer("flood", "p") as producer:
            while not self.over.is_set():
                producer.send_batch(payloads)

    def lie(self) -> None:
        """Says what is no message, what is another one's, and that it is somebody else."""
        channel = grpc.insecure_channel(self.sidecar.address, [("grpc.use_local_subchannel_pool", 1)])
        token = self.issuer.token(sub="liar")
        calls = ("PublishService/Open", "PublishService/Publish", "ReadService/Read", "AdminService/DeleteTopic")
        while not self.over.is_set():
            call: Any = channel.unary_unary(f"/seqdedupe.v1.{self.random.choice(calls)}")
            topic = self.random.choice([b"good", b"liar", b"flood", self.random.randbytes(8)])
            content = b"\n" + bytes([len(topic)]) + topic + self.random.randbytes(self.random.randrange(2_000))
            shown = self.random.choice([token, token[:-4] + "AAAA", "x"])
            try:
                call(content, metadata=(("authorization", f"Bearer {shown}"),), timeout=LAST_RESORT_SECONDS)
            except grpc.RpcError:
                continue
        channel.close()

    def behave(self, seconds: float) -> list[float]:
        """One message after the other, and at the end reads them again; the seconds that each took.

        Raises AssertionError if one of them is not there, once and in its order.
        """
        took: list[float] = []
        give_up_at = time.monotonic() + seconds
        with self.client("good") as client:
            with client.producer("good", "p") as producer:
                while time.monotonic() < give_up_at:
                    began = time.monotonic()
                    producer.send(b"%d" % len(took)).result(READ_TIMEOUT_SECONDS)
                    took.append(time.monotonic() - began)
            with client.reader("good") as reader:
                found = [message.payload for message in reader]
        assert found == [b"%d" % k for k in range(len(took))]
        return took

    def run(self, seconds: float) -> list[float]:
        """All of it at once. Raises what one of the bad ones did not expect."""
        with self.sidecar:
            threads = [
                threading.Thread(target=self._guarded(one)) for one in (self.idle, self.deaf, self.flood, self.lie)
            ]
            for thread in threads:
                thread.start()
            try:
                return self.behave(seconds)
            finally:
                self.over.set()
                for thread in threads:
                    thread.join()
                self.sidecar.check_running()

    def _guarded(self, one: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                one()
            except SeqdedupeError:
                pass  # it has used up its share
            except Exception as e:  # noqa: BLE001 (told by the thread that waits)
                self.failures.append(e)

        return run


def campaign(seconds: float, seed: int) -> None:
    """Run for this long; print what the good one had of it."""
    with tempfile.TemporaryDirectory() as folder:
        company = Company(Path(folder), seed)
        took = sorted(company.run(seconds))
    print(f"{len(took)} messages, each once; p50 {took[len(took) // 2]:.4f} s, longest {took[-1]:.4f} s")
    if company.failures:
        raise company.failures[0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    told = parser.parse_args()
    campaign(told.seconds, told.seed)
