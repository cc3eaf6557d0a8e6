"""What becomes of an append: entries of its topic, in the topic's format."""

from collections.abc import Sequence
from typing import NamedTuple

from seqdedupe import batch as batches
from seqdedupe.entry_properties import Owner
from seqdedupe.log.pulsar import entries, plain
from seqdedupe.log.pulsar.entries import EntryFormat, Message, Part, Settings, surely_taken_bytes

_WIDEST_NUMBER = 2**62
_WIDEST_OWNER = Owner(_WIDEST_NUMBER, _WIDEST_NUMBER, 2**64 - 1)


class Record(NamedTuple):
    """What becomes one stored record: the rows of a batch that are an entry each, or one entry for all of them."""

    entries: Sequence[Message]
    rows: int
    """In each entry: one, or those of its batch, or none of a control record."""
    is_batch: bool


def of_batch(
    settings: Settings, owner: Owner, number: int, index: int, now_ms: int, part: Part, limit_bytes: int
) -> list[Record]:
    """Those of a batch; its first entry gets this number, its first row this index. Raises MESSAGE_TOO_LARGE for what
    does not fit into an entry of so many bytes."""
    if settings.format is EntryFormat.PLAIN:
        rows = plain.messages_of(owner, number, index, part.encoded, limit_bytes, settings.version)
        return [Record(list(rows), 1, is_batch=False)]
    records: list[Record] = []
    for one in entries.split(part, limit_bytes):
        message = entries.packed(owner, number + len(records), index, now_ms, one, limit_bytes)
        records.append(Record([message._replace(event_time_ms=now_ms)], one.rows, is_batch=True))
        index += one.rows
    return records


def of_control(
    settings: Settings, owner: Owner, number: int, next_index: int, now_ms: int, body: bytes, limit_bytes: int
) -> list[Record]:
    """That of a control record. Raises MESSAGE_TOO_LARGE."""
    message = entries.control(owner, number, next_index, body, limit_bytes, settings.version)
    return [Record([message._replace(event_time_ms=now_ms)], 0, is_batch=False)]


def check(settings: Settings, batch: bytes, limit_bytes: int) -> None:
    """Raises MESSAGE_TOO_LARGE for a batch that a broker would not take, whoever owns the topic then."""
    if len(batch) > surely_taken_bytes(limit_bytes):
        part = entries.encoded(batches.decode(batch))
        of_batch(settings, _WIDEST_OWNER, _WIDEST_NUMBER, _WIDEST_NUMBER, 0, part, limit_bytes)
