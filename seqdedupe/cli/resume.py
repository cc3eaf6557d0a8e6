"""Going on where an earlier run has ended, only if the source is still the one that was published."""

from collections.abc import Iterator

from seqdedupe.cli.source import Record, Source
from seqdedupe.client import Message, PositionError
from seqdedupe.client.blocking import Client, Producer
from seqdedupe.errors import SeqdedupeError, error

RECORD_PROPERTY = "seqdedupe.record"
"""The property of a message with its record's number in the source, where the sequence ID is another."""


class Resume:
    """Finds the records that are to be published: those after the last one that the topic has of this producer.

    That one must be in the source, with the same text and as the same record in number: else records were changed,
    inserted or removed before it, and to go on would leave some of them out. A source that begins after it is the
    next one of the same producer, and none of its records is left out.
    """

    def __init__(self, client: Client, producer: Producer, *, numbers_are_ids: bool, trust_source: bool) -> None:
        self.after = producer.persisted_sequence_id
        """The last sequence ID published; -1 if there is none."""
        self.records_read = 0
        self._client = client
        self._producer = producer
        self._numbers_are_ids = numbers_are_ids
        self._trust_source = trust_source

    def new_records(self, source: Source) -> Iterator[Record]:
        """The records after the last one published.

        Raises SOURCE_CHANGED, SOURCE_UNVERIFIED or SOURCE_INCOMPLETE before the first of them.
        """
        found = self.after < 0
        for record in source:
            self.records_read += 1
            if record.sequence_id == self.after:
                self._compare(record)
                found = True
            elif record.sequence_id > self.after:
                if not found and record.number:
                    raise self._changed("is no longer there")
                found = True
                yield record
        if not found:
            self._check_end(source)

    def _check_end(self, source: Source) -> None:
        """The source has ended before the last record published."""
        if source.unfinished_line:
            raise source.incomplete()
        if self._numbers_are_ids:
            raise self._changed(f"is not there: it has {self.records_read:,} records")
        if self.records_read:
            self._check_trust("all of its records come before that one")

    def _compare(self, record: Record) -> None:
        """The record of the last ID published with what was published."""
        message = self._published()
        if message is None:
            return
        number = message.properties.get(RECORD_PROPERTY)
        if number is None and not self._numbers_are_ids:
            self._check_trust("the message does not say which record it was")
        elif number is not None and number != str(record.number):
            raise self._changed(
                f"is number {record.number}, and was number {number} when it was published: records were inserted or "
                "removed before it"
            )
        if (message.payload or b"") != record.payload:
            raise self._changed("is not the one that was published")

    def _published(self) -> Message | None:
        """The last message published; None if it cannot be looked at any more and the source is trusted."""
        position = self._producer.persisted_position
        if position is None:
            self._check_trust("the sidecar no longer knows where that message stands")
            return None
        with self._client.reader(self._producer.topic, position.index) as reader:
            try:
                return next(reader)
            except PositionError as e:
                if e.reason != "POSITION_TRIMMED":
                    raise
        self._check_trust("retention has removed that message")
        return None

    def _check_trust(self, why_not: str) -> None:
        if not self._trust_source:
            raise error(
                "SOURCE_UNVERIFIED",
                f"producer {self._producer.name!r} has published up to sequence ID {self.after}, and it cannot "
                f"be told whether this file is the one that was published: {why_not}; nothing was sent",
                sequence_id=self.after,
            )

    def _changed(self, what: str) -> SeqdedupeError:
        return error(
            "SOURCE_CHANGED",
            f"producer {self._producer.name!r} has published up to sequence ID {self.after}, and in this file the "
            f"record with that ID {what}; nothing was sent",
            sequence_id=self.after,
        )
