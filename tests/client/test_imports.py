"""What `import seqdedupe.client` imports: every start of every program that publishes pays for it. Counted, not timed:
`python -m bench import_client` has the time."""

import json
import os
import subprocess
import sys

import pytest

from seqdedupe.client import blocking
from seqdedupe.client.connection import MAY_BE_EMPTY
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from seqdedupe.v1 import admin_pb2, dedupe_pb2, read_pb2

NEEDED = "import grpc.aio, numpy, google.protobuf.descriptor_pb2"
"""What any client of gRPC with arrays has."""

PROGRAM = """
import json, sys
exec(sys.argv[1])
print(json.dumps(sorted(sys.modules)))
"""

MAX_OWN = 34
"""Modules of this project."""

MAX_OTHERS = 15
"""Modules of Python and of packages, besides those that are NEEDED."""

FORBIDDEN = (
    "argparse",
    "broker_sidecar",
    "bz2",
    "click",
    "grpc.experimental",
    "grpc_health",
    "grpc_reflection",
    "grpc_status",
    "lzma",
    "multiprocessing",
    "numba",
    "numpy.random",
    "pandas",
    "pyarrow",
    "pyspark",
    "random",
    "rocksdict",
    "secrets",
    "seqdedupe.cli",
    "seqdedupe.client.admin",
    "seqdedupe.client.broker",
    "seqdedupe.core",
    "seqdedupe.exports",
    "seqdedupe.format",
    "seqdedupe.log",
    "seqdedupe.services",
    "seqdedupe.store",
    "seqdedupe.topic",
    "seqdedupe.v1.admin_pb2",
    "seqdedupe.v1.dedupe_pb2",
    "shutil",
    "sqlalchemy",
    "tempfile",
    "uvloop",
)

FIRST_MESSAGE = """
import seqdedupe.client
import asyncio, sys
before = set(sys.modules)
async def main():
    async with seqdedupe.client.Client(ADDRESS) as client:
        USE
asyncio.run(main())
later = set(sys.modules) - before
sys.modules.clear()
sys.modules.update(dict.fromkeys(later))
"""

PRODUCER = """async with client.producer(TOPIC, "p") as producer:
            await (await producer.send(b"first", sequence_id=0))"""

READER = """async with client.reader(TOPIC) as reader:
            assert [message.payload async for message in reader] == [b"first"]"""

PUBLISHER = """async with client.publisher(TOPIC) as publisher:
            await publisher.send(b"first", deduplication_id=b"id")"""


def modules(program: str) -> set[str]:
    """All that this program has imported when it ends."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, program],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=LAST_RESORT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def forbidden(found: set[str]) -> set[str]:
    return {name for name in found if any(name == no or name.startswith(f"{no}.") for no in FORBIDDEN)}


def test_the_client_imports_little() -> None:
    found = modules("import seqdedupe.client") - modules(NEEDED)
    own = {name for name in found if name.split(".")[0] == "seqdedupe"}
    assert len(own) <= MAX_OWN, sorted(own)
    assert len(found - own) <= MAX_OTHERS, sorted(found - own)
    assert forbidden(found) == set()


@pytest.mark.parametrize("module", ["tempfile", "sqlalchemy", "seqdedupe.core.rule"])
def test_what_it_must_not_import_is_noticed(module: str) -> None:
    assert forbidden(modules(f"import {module}, seqdedupe.client") - modules(NEEDED))


def test_nothing_is_left_to_be_imported_by_the_first_message(shared_sidecar: Sidecar, topic: str) -> None:
    by_id = f"{topic}-by-id"
    with blocking.Client(shared_sidecar.address) as client:
        client.admin.create_topic(by_id, deduplication_mode="deduplication-id")
    program = FIRST_MESSAGE.replace("ADDRESS", repr(shared_sidecar.address))
    for use, of in ((PRODUCER, topic), (READER, topic), (PUBLISHER, by_id)):
        assert modules(program.replace("USE", use).replace("TOPIC", repr(of))) == set(), use
    # The control arm: what is imported then is noticed.
    assert "tempfile" in modules(program.replace("USE", "import tempfile"))


def test_names_for_operators_and_brokers_are_imported_when_they_are_used() -> None:
    late = {"seqdedupe.client.admin", "seqdedupe.client.broker"}
    assert not late & modules("import seqdedupe.client")
    assert late <= modules("from seqdedupe.client import Admin, BrokerClient")
    assert late <= modules(
        "from seqdedupe.client import *; Admin, Attachment, BrokerClient, Entry, ProducerNumbers, Range"
    )
    assert modules("import seqdedupe.client; assert not hasattr(seqdedupe.client, 'Broker')")


def test_answers_that_may_be_empty_are_messages_of_the_schema() -> None:
    known = {name for module in (admin_pb2, dedupe_pb2, read_pb2) for name in module.DESCRIPTOR.message_types_by_name}
    assert known >= MAY_BE_EMPTY
