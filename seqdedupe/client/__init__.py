"""The client for asyncio: producers and readers of one sidecar or several. `seqdedupe.client.blocking` is the client
for threads.

Begin with client.py. A message passes producer.py, builder.py, producer_session.py (with send_queue.py and pending.py),
stream.py and publish_calls.py. A message with a deduplication ID passes publisher.py and publish_calls.py. reader.py
reads both. route.py chooses the sidecar, and connection.py connects to it. broker.py is for a broker with a log.
"""

from seqdedupe.batch import Batch, Binary
from seqdedupe.client.admin import Admin
from seqdedupe.client.broker import Attachment, BrokerClient, Entry, ProducerNumbers, Range
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
