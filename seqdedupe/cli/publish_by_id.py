"""`seqdedupe publish` to a topic of deduplication IDs: each record once, by the ID that it has of its own."""

from collections.abc import Iterator

from seqdedupe.cli.source import Record, Source
from seqdedupe.client import Verdict
from seqdedupe.client.blocking import Publisher
from seqdedupe.errors import error
from seqdedupe.limits import MAX_DEDUPLICATION_ID_BYTES

ROWS = 1000
BYTES = 1024 * 1024
"""So much goes at once: with the next record, whose payload may have 5 MiB, it still is a batch."""


def publish_by_id(publisher: Publisher, source: Source) -> dict[str, object]:
    """Publishes all records of a source whose keys are the IDs; what came of it.

    Raises INVALID_DEDUPLICATION_ID for a record without an ID: those before it are published, and are Dup when the file
    is published again.
    """
    counts = {Verdict.NOT_DUP: 0, Verdict.DUP: 0}
    imported = 0
    for some in _batches(source):
        ids = [record.key or b"" for record in some]
        result = publisher.send_batch([record.payload for record in some], ids)
        for verdict in counts:
            counts[verdict] += int((result.verdicts == verdict).sum())
        imported += int(result.imported.sum())
    return {
        "topic": publisher.topic,
        "read": sum(counts.values()),
        "not_dup": counts[Verdict.NOT_DUP],
        "dup": counts[Verdict.DUP],
        "imported": imported,
    }


def _batches(source: Source) -> Iterator[list[Record]]:
    some: list[Record] = []
    size_bytes = 0
    for record in source:
        if not 1 <= len(record.key or b"") <= MAX_DEDUPLICATION_ID_BYTES:
            if some:
                yield some
            what = f"record {record.number} has a deduplication ID of {len(record.key or b'')} bytes"
            why = f"{what}: it should have 1 to {MAX_DEDUPLICATION_ID_BYTES}; those before it are published"
            raise error("INVALID_DEDUPLICATION_ID", why, hint="Correct it, and publish the file again: each goes once.")
        some.append(record)
        size_bytes += len(record.payload)
        if len(some) == ROWS or size_bytes >= BYTES:
            yield some
            some, size_bytes = [], 0
    if some:
        yield some
