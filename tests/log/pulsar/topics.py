"""Entries of a Pulsar topic for tests, made by hand, and what is read of them."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from seqdedupe import batch as batches
from seqdedupe.batch import Batch
from seqdedupe.entry_properties import VERSION, EntryOwner
from seqdedupe.format.headers import ownership_of
from seqdedupe.format.records import body_of
from seqdedupe.log.contract import Entries
from seqdedupe.log.pulsar import entries
from seqdedupe.log.pulsar.entries import MAX_ENTRY_BYTES, EntryFormat, EntrySettings, PulsarEntry, PulsarMessage
from seqdedupe.log.pulsar.reader import Collector
from seqdedupe.log.pulsar.terms import Terms, TermStanding
from seqdedupe.log.pulsar.writer import records_of_batch
from seqdedupe.message_id import MessageId

INCARNATION = 1_700_000_000_000_000
SETTINGS = EntrySettings(EntryFormat.PLAIN, "SEQUENCE_ID", 0, "host:6680")


def token(term: int, whose: str = "") -> bytes:
    return f"{term % 10000:04d}{whose:.<12}".encode()


def owner(term: int, whose: str = "") -> EntryOwner:
    return EntryOwner(INCARNATION, term, ownership_of(token(term, whose)))


def marker(term: int, whose: str = "", version: int = VERSION) -> PulsarMessage:
    return entries.marker_message(INCARNATION, term, token(term, whose), SETTINGS._replace(version=version))


def stock(payload: bytes = b"hello") -> PulsarMessage:
    """A message of somebody who knows nothing of us."""
    return PulsarMessage(payload, {"colour": "blue"}, "key", 7)


def stored(
    messages: Iterable[PulsarMessage], ledger_id: int = 10, first_entry: int = 0, now_ms: int = 1000
) -> list[PulsarEntry]:
    """The messages one after the other in one ledger."""
    return [
        PulsarEntry(message, MessageId(ledger_id, first_entry + i), now_ms + i, "a stock producer", i)
        for i, message in enumerate(messages)
    ]


def rows(
    term: int,
    number: int,
    index: int,
    batch: Batch,
    whose: str = "",
    version: int = VERSION,
    limit_bytes: int = MAX_ENTRY_BYTES,
) -> list[PulsarMessage]:
    return list(entries.messages_of_part(owner(term, whose), number, index, batch.encode(), limit_bytes, version))


def packed(
    term: int, number: int, index: int, batch: Batch, now_ms: int = 1000, limit_bytes: int = MAX_ENTRY_BYTES
) -> PulsarMessage:
    return entries.packed_message(owner(term), number, index, now_ms, entries.encoded_part(batch), limit_bytes)


def native(term: int, number: int, index: int, batch: Batch, limit_bytes: int = MAX_ENTRY_BYTES) -> list[PulsarMessage]:
    """The entries of a batch, as the log sends them."""
    settings = SETTINGS._replace(format=EntryFormat.NATIVE)
    at = owner(term), number, index, 1000
    sent = records_of_batch(settings, *at, entries.encoded_part(batch), limit_bytes)
    return [message for record in sent for message in record.entries]


def collector() -> Collector:
    return Collector(Terms(TermStanding.start(INCARNATION)))


def collected(several: Iterable[PulsarEntry]) -> Entries:
    """All that is valid of a topic that is read from its beginning."""
    reading = collector()
    for entry in several:
        reading.add(entry)
    found = reading.take()
    assert found is not None
    return found


class Row(NamedTuple):
    """All that is stored of a message."""

    producer: str
    epoch: int
    link: int
    complete_up_to: int
    sequence_id: int
    payload: bytes | None
    key: bytes | None
    event_time_ms: int
    properties: dict[str, str]


def rows_of(batch: Batch) -> list[Row]:
    """A batch row by row; the link of a row that is not its producer's first is the row before."""
    links, names = batch.previous_sequence_ids.tolist(), batch.names()
    found = []
    for row in range(len(batch)):
        p, sequence_id = batch.producer_of(row), int(batch.sequence_ids[row])
        found.append(
            Row(
                names[p],
                int(batch.epochs[p]),
                links[p],
                int(batch.complete_up_to[p]) if len(batch.complete_up_to) else -1,
                sequence_id,
                batch.payloads[row],
                batch.keys[row],
                int(batch.event_times_ms[row]) if len(batch.event_times_ms) else 0,
                batch.properties_of(row),
            )
        )
        links[p] = sequence_id
    return found


def batches_in(found: Entries) -> list[Batch]:
    return [
        batches.decode(body_of(found.raw, places)) for places, runs in zip(found.table, found.runs, strict=True) if runs
    ]


def ids_in(found: Entries) -> list[MessageId]:
    return [run.message_id(row) for runs in found.runs for run in runs for row in range(run.rows)]


def all_rows(several: Sequence[Batch]) -> list[Row]:
    return [row for batch in several for row in rows_of(batch)]
