"""Going on where an earlier run has ended, only if the source is still the one that was published."""

from collections.abc import Iterator

from seqdedupe.cli.source import Record, Source
from seqdedupe.client import Message, Persisted, PositionError
from seqdedupe.client.blocking import Client, Producer
from seqdedupe.errors import SeqdedupeError, error

RECORD_PROPERTY = "seqdedupe.record"
"""The property of a message with its record's number in the source, where the sequence ID is another."""


class Resume:
    """Finds the records that are to be published: those after the last one that the topic has of this producer.

    That one must be in the source, with the same text and as the same record in number: else records were changed,
    inserted or removed before it, and to go on would leave some of them out. A source that begins after it is the
    next one of the same producer, and none of its records is left out.

    Of a partitioned topic that holds for the last one in each partition, and those after the first that any partition
    may lack are published: what is there already is Dup.
    """

    def __init__(self, client: Client, producer: Producer, *, numbers_are_ids: bool, trust_source: bool) -> None:
        self.after = producer.persisted_sequence_id
        """All up to this sequence ID is published; -1 if nothing is."""
        self.records_read = 0
        self._last = {one.sequence_id: one for one in producer.persisted if one.sequence_id >= 0}
        self._client = client
        self._producer = producer
        self._numbers_are_ids = numbers_are_ids
        self._trust_source = trust_source
        self._is_verified = False
        self._why_not = ""

    def new_records(self, source: Source) -> Iterator[Record]:
        """The records to be published.

        Raises SOURCE_CHANGED, SOURCE_UNVERIFIED or SOURCE_INCOMPLETE before the first of them.
        """
        left = dict(self._last)
        held: list[Record] = []  # not more than a producer has in flight: what comes after the last one checked is sent
        for record in source:
            self.records_read += 1
            if left:
                self._check_off(record, left)
            if record.sequence_id > self.after:
                held.append(record)
                if not left:
                    self._check_verified()
                    yield from held
                    held.clear()
        if left:
            self._check_end(source, max(left))
        self._check_verified()
        yield from held

    def _check_off(self, record: Record, left: dict[int, Persisted]) -> None:
        """Compares the record with what was published last, and forgets what is before it."""
        for sequence_id in [one for one in left if one < record.sequence_id]:
            if record.number:
                raise self._changed(sequence_id, "is no longer there")
            del left[sequence_id]
        if one := left.pop(record.sequence_id, None):
            self._compare(record, one)

    def _check_end(self, source: Source, sequence_id: int) -> None:
        """The source has ended before the last record published."""
        if source.unfinished_line:
            raise source.incomplete()
        if self._numbers_are_ids:
            raise self._changed(sequence_id, f"is not there: it has {self.records_read:,} records")
        if self.records_read:
            self._why_not = "all of its records come before that one"

    def _compare(self, record: Record, one: Persisted) -> None:
        """The record of the last ID published with what was published."""
        message = self._published(one)
        if message is None:
            return
        number = message.properties.get(RECORD_PROPERTY)
        if number is not None and number != str(record.number):
            raise self._changed(
                one.sequence_id,
                f"is number {record.number}, and was number {number} when it was published: records were inserted or "
                "removed before it",
            )
        if (message.payload or b"") != record.payload:
            raise self._changed(one.sequence_id, "is not the one that was published")
        if number is None and not self._numbers_are_ids:
            self._why_not = "the message does not say which record it was"
        else:
            self._is_verified = True

    def _published(self, one: Persisted) -> Message | None:
        """The last message published; None if it cannot be looked at any more."""
        if one.position is None:
            self._why_not = "the sidecar no longer knows where that message stands"
            return None
        with self._client.reader(one.topic, one.position.index) as reader:
            try:
                return next(reader)
            except PositionError as e:
                if e.reason != "POSITION_TRIMMED":
                    raise
        self._why_not = "retention has removed that message"
        return None

    def _check_verified(self) -> None:
        """Whether the source may be the one that was published: one message that shows it is enough."""
        if self._why_not and not self._is_verified and not self._trust_source:
            highest = max(self._last)
            raise error(
                "SOURCE_UNVERIFIED",
                f"producer {self._producer.name!r} has published up to sequence ID {highest}, and it cannot "
                f"be told whether this file is the one that was published: {self._why_not}; nothing was sent",
                sequence_id=highest,
            )

    def _changed(self, sequence_id: int, what: str) -> SeqdedupeError:
        return error(
            "SOURCE_CHANGED",
            f"producer {self._producer.name!r} has published up to sequence ID {sequence_id}, and in this file the "
            f"record with that ID {what}; nothing was sent",
            sequence_id=sequence_id,
        )
