"""What the store knows of a topic besides its snapshot."""

import struct
from dataclasses import dataclass, field
from enum import Enum

from seqdedupe.store.parts import damaged, unseal

_BODY = struct.Struct("<QBBBI")


class TopicState(Enum):
    """Where a topic is in its life. Start-up finishes what CREATING and DELETING left half done."""

    CREATING = 1
    """The record is there, the log perhaps not yet."""
    ACTIVE = 2
    DELETING = 3
    """The log is perhaps gone already, the record goes last."""


class LogKind(Enum):
    """What kind of log a topic is on. All topics of a store are on one kind."""

    EMBEDDED = 1
    BROKER = 2
    """A broker's own, of which the store has the numbers alone."""
    PULSAR = 3
    """Topics of a Pulsar cluster."""

    @property
    def is_shared(self) -> bool:
        """Whether the logs are a cluster's: which there are, it says, and it may not answer now."""
        return self is LogKind.PULSAR


@dataclass(frozen=True, slots=True)
class TopicRecord:
    """A topic: full name, incarnation (creation time in µs, its id everywhere), state, secret, kind of log, partitions.

    `secret` are the 16 bytes that make the records of this incarnation's log its own, for nobody's eyes; empty where
    they are not known here. `partitions` is how many the partitioned topic has of which this is one, 0 if it is none.
    """

    name: str
    incarnation: int
    state: TopicState
    secret: bytes = field(default=b"", repr=False)
    log: LogKind = LogKind.EMBEDDED
    partitions: int = 0

    def encode(self) -> bytes:
        """The body of its record."""
        fixed = _BODY.pack(self.incarnation, self.state.value, self.log.value, len(self.secret), self.partitions)
        return fixed + self.secret + self.name.encode()

    @staticmethod
    def decode(key: bytes, value: bytes) -> "TopicRecord":
        """The topic in a sealed value. Raises STORE_DAMAGED, NEWER_FORMAT, OLDER_FORMAT."""
        body = unseal(key, value)
        try:
            incarnation, state, log, secret_bytes, partitions = _BODY.unpack_from(body)
            name = _BODY.size + secret_bytes
            secret = body[_BODY.size : name]
            return TopicRecord(body[name:].decode(), incarnation, TopicState(state), secret, LogKind(log), partitions)
        except (struct.error, ValueError) as e:
            raise damaged(key, str(e)) from e
