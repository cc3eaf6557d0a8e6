"""What the store knows of a topic besides its snapshot."""

import struct
from dataclasses import dataclass, field
from enum import Enum

from seqdedupe.store.records import damaged, unseal

_BODY = struct.Struct("<QBBB")


class TopicState(Enum):
    """Where a topic is in its life. Start-up finishes what CREATING and DELETING left half done."""

    CREATING = 1
    """The record is there, the log perhaps not yet."""
    ACTIVE = 2
    DELETING = 3
    """The log is perhaps gone already, the record goes last."""


@dataclass(frozen=True, slots=True)
class TopicRecord:
    """A topic: full name, incarnation (creation time in µs, its id everywhere), state, policy, and secret.

    `secret` are the 16 bytes that make the records of this incarnation's log its own, for nobody's eyes; empty where
    they are not known here.
    """

    name: str
    incarnation: int
    state: TopicState
    deduplication_enabled: bool = True
    secret: bytes = field(default=b"", repr=False)

    def encode(self) -> bytes:
        """The body of its record."""
        return (
            _BODY.pack(self.incarnation, self.state.value, self.deduplication_enabled, len(self.secret))
            + self.secret
            + self.name.encode()
        )

    @staticmethod
    def decode(key: bytes, value: bytes) -> "TopicRecord":
        """The topic in a sealed value. Raises STORE_DAMAGED, NEWER_FORMAT, OLDER_FORMAT."""
        body = unseal(key, value)
        try:
            incarnation, state, enabled, secret_bytes = _BODY.unpack_from(body)
            name = _BODY.size + secret_bytes
            secret = body[_BODY.size : name]
            return TopicRecord(body[name:].decode(), incarnation, TopicState(state), bool(enabled), secret)
        except (struct.error, ValueError) as e:
            raise damaged(key, str(e)) from e
