"""The client for threads: the same names as `seqdedupe.client`, and calls that block.

All network work of a process runs on one event loop in one daemon thread, which is never closed (gRPC has one queue
per process). Messages are gathered and sealed in the caller's thread. Only sealed batches go to the loop's thread.

`_sync.py` is generated from the classes of `seqdedupe.client`; `producer.py`, with its receipts, is written by hand.
"""

from seqdedupe.client import (
    AccessDeniedError,
    Batch,
    BatchResult,
    Binary,
    Counters,
    Credentials,
    DamagedError,
    DataLossError,
    FencedError,
    InvalidRequestError,
    Kept,
    Located,
    Message,
    MessageId,
    NotFoundError,
    OutcomeUnknownError,
    PartitionedPosition,
    Persisted,
    Position,
    PositionError,
    ProducerConfig,
    Published,
    SeqdedupeError,
    StoredBatch,
    TopicEnds,
    UnavailableError,
    Verdict,
)
from seqdedupe.client.blocking._sync import Admin, Client, Cursor, FileCursor, PartitionedReader, Publisher, Reader
from seqdedupe.client.blocking.producer import BatchReceipt, Producer, Receipt

__all__ = [
    "AccessDeniedError",
    "Admin",
    "Batch",
    "BatchReceipt",
    "BatchResult",
    "Binary",
    "Client",
    "Counters",
    "Credentials",
    "Cursor",
    "DamagedError",
    "DataLossError",
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
    "Published",
    "Publisher",
    "Reader",
    "Receipt",
    "SeqdedupeError",
    "StoredBatch",
    "TopicEnds",
    "UnavailableError",
    "Verdict",
]
