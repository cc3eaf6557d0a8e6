"""Control records: what changes a topic's state other than by messages, as `Control` in batch.proto has it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from seqdedupe import wire
from seqdedupe.core.producers import Producers
from seqdedupe.core.rule import DURABLE_EPOCH, PERSISTED
from seqdedupe.errors import error
from seqdedupe.format.jit import Int64s
from seqdedupe.limits import MAX_BATCH_BYTES
from seqdedupe.topic.policy import Policy

STATED_A_RECORD = 8192
"""So many producers are stated again at once before retention goes on."""

_BYTES_A_PRODUCER = 4 + 8 + 8
_ROOM_BYTES = 1024
"""For tags and lengths."""


@dataclass(frozen=True, slots=True, eq=False)
class Sessions:
    """Producers' sessions: started by Open, or stated again, with what is persisted, before retention drops them."""

    names: list[bytes]
    epochs: Int64s
    persisted: Int64s | None = None


Change = Sessions | Policy


def parts(sessions: Sessions) -> Iterator[Sessions]:
    """As many as it takes for each to fit into a record."""
    start = size = 0
    for i, name in enumerate(sessions.names):
        size += len(name) + _BYTES_A_PRODUCER
        if size > MAX_BATCH_BYTES - _ROOM_BYTES:
            yield _part(sessions, start, i)
            start, size = i, len(name) + _BYTES_A_PRODUCER
    yield _part(sessions, start, len(sessions.names))


def stated_again(producers: Producers, below_index: int) -> Iterator[Sessions]:
    """What is in force of the producers that the log states only below this index, as it is when each is asked for."""
    numbers = producers.stated_below(below_index)
    for start in range(0, len(numbers), STATED_A_RECORD):
        some = numbers[start : start + STATED_A_RECORD]
        rows = producers.numbers[some]
        names = producers.names_of(some)
        yield from parts(Sessions(names, rows[:, DURABLE_EPOCH].copy(), rows[:, PERSISTED].copy()))


def _part(sessions: Sessions, start: int, end: int) -> Sessions:
    persisted = None if sessions.persisted is None else sessions.persisted[start:end]
    return Sessions(sessions.names[start:end], sessions.epochs[start:end], persisted)


def encode(change: Change, *, term: int = 0, record_id: int = 0) -> bytes:
    """The body of a control record, written in this term. With `record_id` it is unlike all others of the topic."""
    control = wire.Control(id=record_id, term=term)
    if isinstance(change, Policy):
        change.fill(control.policy)
        control.policy.SetInParent()
    else:
        offsets = np.zeros(len(change.names) + 1, np.int32)
        np.cumsum([len(name) for name in change.names], out=offsets[1:])
        control.sessions.producer_name_offsets = offsets.tobytes()
        control.sessions.producer_names = b"".join(change.names)
        control.sessions.epochs = change.epochs.astype(np.int64).tobytes()
        if change.persisted is not None:
            control.sessions.persisted = change.persisted.astype(np.int64).tobytes()
    body: bytes = control.SerializeToString()
    return body


def decode(body: bytes) -> tuple[Change, int]:
    """What a control record changes, and its term. Raises NEWER_FORMAT for a kind that is not known, LOG_DAMAGED."""
    try:
        control = wire.Control.FromString(body)
        match control.WhichOneof("kind"):
            case "policy":
                return Policy.of(control.policy), control.term
            case "sessions":
                return _sessions(control.sessions), control.term
    except (DecodeError, ValueError) as e:
        raise error("LOG_DAMAGED", f"a control record is damaged: {e}") from e
    raise error("NEWER_FORMAT", "the log has a control record of a kind that this version does not know")


def decode_policy(body: bytes) -> Policy:
    """The policy that a snapshot or a namespace's record keeps. Raises as `decode`."""
    policy, _ = decode(body)
    if not isinstance(policy, Policy):
        raise error("STORE_DAMAGED", "a record has something else for its policy")
    return policy


def _sessions(columns: Any) -> Sessions:
    epochs = np.frombuffer(columns.epochs, "<i8")
    offsets = np.frombuffer(columns.producer_name_offsets, "<i4").tolist()
    blob = columns.producer_names
    if len(offsets) != len(epochs) + 1 or offsets[-1] != len(blob):
        raise ValueError("the columns of sessions do not fit together")
    names = [blob[offsets[i] : offsets[i + 1]] for i in range(len(epochs))]
    persisted = np.frombuffer(columns.persisted, "<i8") if columns.persisted else None
    return Sessions(names, epochs, persisted)
