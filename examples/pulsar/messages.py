"""What of a Pulsar topic that a sidecar writes counts, and the messages in it, for a consumer of Pulsar's own client.

Nothing is used of this project but the classes generated from `proto/`: any language can do the same.
`docs/internals/formats-pulsar.md` says why each line is there, `README.md` shows how a consumer uses it.
"""

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from seqdedupe.v1 import batch_pb2, read_pb2

USER = "seqdedupe.user."


@dataclass(frozen=True)
class Received:
    """A message as its producer published it."""

    index: int
    producer: str
    sequence_id: int
    payload: bytes | None
    key: bytes | None
    event_time_ms: int
    properties: dict[str, str]


class Topic:
    """What counts, of entries in the topic's order. Without a marker the first entry of a sidecar's is believed."""

    def __init__(self) -> None:
        self._owner = ""
        self._term = 0
        self._next = -1
        self._last = (-1, -1)
        self._is_whole = False
        """Whether every position was read since the owner's last entry that counts."""
        self._has_hole = False

    def counts(self, properties: dict[str, str], ledger_id: int, entry_id: int) -> bool:
        """Whether the entry at this position holds messages that count. Raises ValueError where entries before it may
        be missing, and at a marker or control record of a topic with native entries: its messages look like those of
        somebody else."""
        (last_ledger, last_entry), self._last = self._last, (ledger_id, entry_id)
        self._is_whole = self._is_whole and ledger_id == last_ledger and entry_id <= last_entry + 1
        place, kind = properties.get("seqdedupe.entry"), properties.get("seqdedupe.kind")
        if place is None:
            if kind in ("marker", "control") and not self._owner:
                raise ValueError("the topic has native entries: use the messages without a property seqdedupe.kind")
            return False
        owner, number, _ = place.rsplit(":", 2)
        version, _, term, _ = owner.split(":")
        if version not in ("1", "2"):
            raise ValueError(f"an entry has format version {version}")
        entry = int(number)
        if (kind == "marker" and int(term) > self._term) or not self._owner:
            self._owner, self._term, self._next, self._has_hole = owner, int(term), entry, False
        if int(term) > self._term:
            raise ValueError(f"the marker of term {term} is missing")
        if owner != self._owner or entry < self._next or self._has_hole:
            return False
        if entry > self._next:
            # Pulsar has refused an entry alone: its owner has confirmed nothing after it, and sends it again.
            self._has_hole = self._is_whole
            if not self._has_hole:
                raise ValueError(f"entry {self._next} of term {term} is missing")
            return False
        self._next += 1
        self._is_whole = True
        return kind in (None, "batch")


def messages(payload: bytes | None, properties: dict[str, str], key: str, event_time_ms: int) -> Iterator[Received]:
    """The messages in an entry that counts."""
    if properties.get("seqdedupe.kind") == "batch":
        (record,) = read_pb2.ReadResponse.FromString(payload or b"").records
        yield from _of_batch(record)
        return
    exact = properties.get("seqdedupe.key_base64")
    sequence_id, _epoch, _link, _complete_up_to, _rows, producer = properties["seqdedupe.message"].split(":", 5)
    yield Received(
        int(properties["seqdedupe.entry"].rsplit(":", 1)[1]),
        producer,
        int(sequence_id),
        payload,
        base64.b64decode(exact) if exact is not None else key.encode() or None,
        int(properties.get("seqdedupe.event_time_ms", event_time_ms)),
        {
            name.removeprefix(USER): value
            for name, value in properties.items()
            if name.startswith(USER) or not name.startswith("seqdedupe.")
        },
    )


def _of_batch(record: batch_pb2.Record) -> Iterator[Received]:
    batch = record.batch
    names = _cut(batch.producer_names, batch.producer_name_offsets)
    keys = _cut(batch.keys, batch.key_offsets)
    property_names = _cut(batch.property_names, batch.property_name_offsets)
    property_values = _cut(batch.property_values, batch.property_value_offsets)
    for row, payload in enumerate(_cut(batch.payloads, batch.payload_offsets)):
        first, stop = batch.property_offsets[row : row + 2] if batch.property_offsets else (0, 0)
        yield Received(
            record.base_index + row,
            names[batch.producer_indexes[row] if batch.producer_indexes else 0].decode(),
            batch.sequence_ids[row],
            payload if _is_there(batch.payload_validity, row) else None,
            keys[row] if keys and _is_there(batch.key_validity, row) else None,
            batch.event_times_ms[row] if batch.event_times_ms else 0,
            {property_names[i].decode(): property_values[i].decode() for i in range(first, stop)},
        )


def _cut(blob: bytes, offsets: Sequence[int]) -> list[bytes]:
    return [blob[start:end] for start, end in pairwise(offsets)]


def _is_there(validity: bytes, row: int) -> bool:
    return not validity or bool(validity[row // 8] >> row % 8 & 1)
