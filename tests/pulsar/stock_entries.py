"""Records entries as stock clients write them and a broker stores them, for tests without a broker.

    python -m tests.kernels tests.pulsar.stock_entries

Writes `tests/data/pulsar_entries.json`: of each client, the metadata and payloads of its entries in hexadecimal.
"""

import asyncio
import json
import subprocess
import tempfile
from pathlib import Path

import pulsar
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from pulsar_broker.distribution import home
from pulsar_broker.standalone import Broker
from seqdedupe.pulsar_wire.connection import connect_to_owner

FILE = Path(__file__).parents[1] / "data" / "pulsar_entries.json"
COMPRESSIONS = ("NONE", "LZ4", "ZLib", "ZSTD", "SNAPPY")
PYTHON_ENTRIES = len(COMPRESSIONS) + 3
JAVA_ENTRIES = PYTHON_ENTRIES + 1 + 2
"""One is encrypted, two are chunks."""


def send_from_python(service_url: str, topic: str) -> None:
    """The rows that `Entries.java` sends, in a batch of each compression, and one by one."""
    client = pulsar.Client(service_url)
    for name in (*COMPRESSIONS, None):
        producer = client.create_producer(
            topic,
            producer_name="stock",
            batching_enabled=name is not None,
            batching_max_publish_delay_ms=10_000,
            compression_type=getattr(pulsar.CompressionType, name or "NONE"),
        )
        producer.send_async(b"first", None, sequence_id=10)
        producer.send_async(
            b"second",
            None,
            sequence_id=20,
            partition_key="key",
            properties={"name": "value", "": "ü"},
            event_timestamp=1_700_000_000_000,
        )
        producer.send_async(b"", None, sequence_id=30, ordering_key="o")
        producer.flush()
        producer.close()
    client.close()


def send_from_java(service_url: str, topic: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        key = Path(folder) / "key.pem"
        public = generate_private_key(public_exponent=65537, key_size=2048).public_key()
        key.write_bytes(public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
        source = Path(__file__).with_name("Entries.java")
        command = ["java", "-cp", f"{home()}/lib/*", str(source), service_url, topic, str(key)]
        subprocess.run(command, check=True)


async def entries(service_url: str, topic: str, count: int) -> list[dict[str, str]]:
    connection = await connect_to_owner(service_url, topic)
    reader = await connection.reader(topic, "recorder")
    found = []
    for _ in range(count):
        stored = await asyncio.wait_for(reader.next(), 10)
        found.append({name: bytes(part).hex() for name, part in stored.entry._asdict().items()})
    await connection.close()
    return found


def main() -> None:
    recorded = {}
    with Broker(home()) as broker:
        for client, send, count in (
            ("python", send_from_python, PYTHON_ENTRIES),
            ("java", send_from_java, JAVA_ENTRIES),
        ):
            topic = f"persistent://public/default/{client}"
            send(broker.service_url, topic)
            recorded[client] = asyncio.run(entries(broker.service_url, topic, count))
    FILE.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    main()
