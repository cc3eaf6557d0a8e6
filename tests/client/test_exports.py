"""What the client shows, and what it needs."""

import inspect
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import seqdedupe.client
from seqdedupe.client import ProducerConfig, blocking
from seqdedupe.testing import LAST_RESORT_SECONDS

PUBLIC = [
    "AccessDeniedError", "Admin", "Batch", "BatchReceipt", "BatchResult", "Binary", "Client", "Counters",
    "Credentials", "Cursor", "DamagedError", "DataLossError", "FencedError", "FileCursor", "InvalidRequestError",
    "Kept", "Located", "Message",
    "MessageId", "NotFoundError", "OutcomeUnknownError", "PartitionedPosition", "PartitionedReader", "Persisted",
    "Position", "PositionError", "Producer", "ProducerConfig", "Published", "Publisher", "Reader", "Receipt",
    "SeqdedupeError", "StoredBatch", "TopicEnds", "UnavailableError", "Verdict",
]  # fmt: skip


FOR_BROKERS = ["Attachment", "BrokerClient", "Entry", "ProducerNumbers", "Range"]
"""On asyncio alone."""


def test_the_public_names_are_these() -> None:
    assert sorted(seqdedupe.client.__all__) == sorted([*PUBLIC, *FOR_BROKERS])
    assert all(hasattr(seqdedupe.client, name) for name in PUBLIC)
    assert sorted(blocking.__all__) == PUBLIC
    own = ["Admin", "BatchReceipt", "Client", "Cursor", "FileCursor", "PartitionedReader", "Producer", "Publisher"]
    own += ["Reader", "Receipt"]
    assert [name for name in PUBLIC if getattr(blocking, name) is not getattr(seqdedupe.client, name)] == own


def awaited(module: ModuleType) -> list[str]:
    """What has to be awaited of the public names, and their public methods."""
    found = []
    for name in module.__all__:
        of = getattr(module, name)
        parts = {f"{name}.{part}": getattr(of, part) for part in dir(of) if not part.startswith("_")}
        found += [
            where
            for where, one in ({name: of} | parts).items()
            if inspect.iscoroutinefunction(one) or inspect.isasyncgenfunction(one)
        ]
    return found


def test_nothing_of_the_form_for_threads_has_to_be_awaited() -> None:
    assert awaited(blocking) == []
    assert {"Client.ends", "Cursor.read", "FileCursor.read", "Producer.send"} <= set(awaited(seqdedupe.client))


def test_the_defaults_are_these_and_cannot_be_changed() -> None:
    config = ProducerConfig()
    assert (config.linger_ms, config.max_batch_rows, config.max_batch_bytes) == (1.0, 1000, 131_072)
    assert (config.max_in_flight_batches, config.max_in_flight_bytes) == (32, 16 * 1024 * 1024)
    assert config.delivery_timeout_seconds == 120
    with pytest.raises(AttributeError):
        config.linger_ms = 5  # type: ignore[misc]


@pytest.mark.parametrize("module", ["seqdedupe.client", "seqdedupe.client.blocking"])
def test_it_imports_with_the_dependencies_of_a_client_alone(module: str) -> None:
    heavy = ["numba", "uvloop", "rocksdict", "google_crc32c", "structlog", "grpc_health", "grpc_reflection"]
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({heavy}))\n"
        f"import {module}\n"
        "bad = [m for m in sys.modules if m.startswith(('seqdedupe.core', 'seqdedupe.log', 'broker_sidecar'))]\n"
        "sys.exit(' '.join(bad) or 0)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=root, timeout=LAST_RESORT_SECONDS
    )
    assert (done.returncode, done.stderr) == (0, "")
