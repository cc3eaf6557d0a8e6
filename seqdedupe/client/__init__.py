"""The client for asyncio: producers and readers of one sidecar or several. `seqdedupe.client.blocking` is the client
for threads.

Begin with client.py. A message with a sequence ID passes through producer.py, builder.py, producer_session.py (with
send_queue.py and pending.py), stream.py and publish_calls.py. A message with a deduplication ID passes through
publisher.py and publish_calls.py. reader.py reads all messages. route.py chooses the sidecar, and connection.py
connects to the sidecar. broker.py is for brokers that have their own log.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from seqdedupe.batch import Batch, Binary
from seqdedupe.client.client import Client, Located, TopicEnds
from seqdedupe.client.credentials import Credentials
from seqdedupe.client.cursor import Cursor, FileCursor, Kept
from seqdedupe.client.message import Message, StoredBatch
from seqdedupe.client.partitioned_ids import Persisted
from seqdedupe.client.pending import BatchReceipt, BatchResult, Published, Receipt, Verdict
from seqdedupe.client.producer import Producer
from seqdedupe.client.producer_session import ProducerConfig
from seqdedupe.client.publisher import Publisher
from seqdedupe.client.reader import PartitionedPosition, PartitionedReader, Reader
from seqdedupe.client.send_queue import Counters
from seqdedupe.errors import (
    AccessDeniedError,
    DamagedError,
    DataLossError,
    FencedError,
    InvalidRequestError,
    NotFoundError,
    OutcomeUnknownError,
    PositionError,
    SeqdedupeError,
    UnavailableError,
)
from seqdedupe.message_id import MessageId, Position

if TYPE_CHECKING:
    from seqdedupe.client.admin import Admin
    from seqdedupe.client.broker import Attachment, BrokerClient, Entry, ProducerNumbers, Range
else:
    _IN_MODULE = {"Admin": "admin"}
    _IN_MODULE |= dict.fromkeys(("Attachment", "BrokerClient", "Entry", "ProducerNumbers", "Range"), "broker")

    def __getattr__(name):
        """Import the classes for operators and brokers at their first use, because other programs do not need them."""
        if name not in _IN_MODULE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_IN_MODULE[name]}"), name)


__all__ = [
    "AccessDeniedError",
    "Admin",
    "Attachment",
    "Batch",
    "BatchReceipt",
    "BatchResult",
    "Binary",
    "BrokerClient",
    "Client",
    "Counters",
    "Credentials",
    "Cursor",
    "DamagedError",
    "DataLossError",
    "Entry",
    "FencedError",
    "FileCursor",
    "InvalidRequestError",
    "Kept",
    "Located",
    "Message",
    "MessageId",
    "NotFoundError",
    "OutcomeUnknownError",
    "PartitionedPosition",
    "PartitionedReader",
    "Persisted",
    "Position",
    "PositionError",
    "Producer",
    "ProducerConfig",
    "ProducerNumbers",
    "Published",
    "Publisher",
    "Range",
    "Reader",
    "Receipt",
    "SeqdedupeError",
    "StoredBatch",
    "TopicEnds",
    "UnavailableError",
    "Verdict",
]
