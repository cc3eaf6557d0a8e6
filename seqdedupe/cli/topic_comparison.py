"""`seqdedupe publish --verify`: compare a file with all messages of one producer in the topic. Begin with `verify`."""

from collections.abc import Iterable, Iterator
from heapq import merge
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from seqdedupe.cli.record_source import SourceRecord
from seqdedupe.client import Message
from seqdedupe.client.blocking import Client
from seqdedupe.command import echo, print_table
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.figures import counted
from seqdedupe.names import partition_name, producer_name, topic_name

_MOST_SHOWN = 10
"""The largest number of differences of each kind."""

_KINDS = {
    "payload_differs": "with another payload",
    "key_differs": "with another key",
    "missing": "missing in the topic",
    "not_in_file": "not in the file",
    "out_of_order": "out of order in the topic",
}


_HINT_NO_MESSAGES = (
    "The topic has no messages of this producer. Check the names of topic and producer (`seqdedupe producers "
    "TOPIC`). If the records were published under a different name, do not publish them under this name: the "
    "topic would store them twice."
)


class Difference(NamedTuple):
    """A difference between file and topic: a record without a message, a message without a record, or a record whose
    message is different."""

    kind: str
    sequence_id: int
    index: int | None  # type: ignore[assignment]  # a field, where a tuple has a method nobody needs here
    line: int | None


class Comparison:
    """The result of a comparison: the count of each kind of difference, and the first ten."""

    def __init__(self, topic: str, name: str) -> None:
        self.topic = topic_name(topic)
        self.name = name
        self.first_index = 0
        self.records = self.messages = self.same = 0
        self.counts = dict.fromkeys(_KINDS, 0)
        self.shown = list[Difference]()

    def compare(self, records: Iterable[SourceRecord], messages: Iterable[Message]) -> None:
        """Compare the records with the messages, in constant memory. Records and messages are both in the order of
        ascending sequence IDs.

        A message whose sequence ID is not above all earlier IDs is out of order: the topic contains the message twice,
        or stored the message too late. This happens if deduplication was off, or after an operator has reset the
        producer.
        """
        expected, found = self._counted(records), self._rising(messages)
        record, message = next(expected, None), next(found, None)
        while record is not None or message is not None:
            if message is None or (record is not None and record.sequence_id < message.sequence_id):
                self._note("missing", record, None)
                record = next(expected, None)
            elif record is None or message.sequence_id < record.sequence_id:
                self._note("not_in_file", None, message)
                message = next(found, None)
            else:
                self._compare_one(record, message)
                record, message = next(expected, None), next(found, None)

    def _counted(self, records: Iterable[SourceRecord]) -> Iterator[SourceRecord]:
        for record in records:
            self.records += 1
            yield record

    def _rising(self, messages: Iterable[Message]) -> Iterator[Message]:
        highest = -1
        for message in messages:
            self.messages += 1
            if message.sequence_id > highest:
                highest = message.sequence_id
                yield message
            else:
                self._note("out_of_order", None, message)

    def _compare_one(self, record: SourceRecord, message: Message) -> None:
        if (message.payload or b"") != record.payload:
            self._note("payload_differs", record, message)
        elif message.key != record.key:
            self._note("key_differs", record, message)
        else:
            self.same += 1

    def _note(self, kind: str, record: SourceRecord | None, message: Message | None) -> None:
        self.counts[kind] += 1
        if self.counts[kind] > _MOST_SHOWN:
            return
        index = None if message is None else message.index
        if record is not None:
            self.shown.append(Difference(kind, record.sequence_id, index, record.line))
        elif message is not None:
            self.shown.append(Difference(kind, message.sequence_id, index, None))

    def failure(self) -> SeqdedupeError | None:
        """Return the error; None if all records and messages are the same."""
        found = ", ".join(f"{count:,} {_KINDS[kind]}" for kind, count in self.counts.items() if count)
        if not found:
            return None
        return error(
            "SOURCE_DIFFERS",
            f"the file is not what {self.topic} holds of producer {self.name!r}: {found}",
            hint=None if self.messages else _HINT_NO_MESSAGES,
        )

    def summary(self) -> dict[str, object]:
        """Return the result. The form is documented: keep it stable."""
        return {
            "topic": self.topic,
            "producer_name": self.name,
            "records": self.records,
            "messages": self.messages,
            "first_index": self.first_index,
            "same": self.same,
            **self.counts,
            "differences": [difference._asdict() for difference in self.shown],
        }

    def print_text(self) -> None:
        """Print the result for a person."""
        there = f"{counted(self.records, 'record')}, {counted(self.messages, 'message')} of this producer"
        echo(f"{there}: {self.same:,} the same")
        if self.first_index:
            echo(f"the topic begins at index {self.first_index:,}: retention has removed the messages before it")
        if not self.shown:
            return
        print_table(
            ("DIFFERENCE", "SEQUENCE ID", "INDEX", "LINE"),
            [
                (_KINDS[kind], *("-" if number is None else number for number in numbers))
                for kind, *numbers in sorted(self.shown, key=lambda difference: list(_KINDS).index(difference.kind))
            ],
        )
        for kind, count in self.counts.items():
            if count > _MOST_SHOWN:
                echo(f"and {count - _MOST_SHOWN:,} more {_KINDS[kind]}")


def verify(client: Client, topic: str, name: str, records: Iterable[SourceRecord]) -> Comparison:
    """Compare the records with all messages of that producer that are in the topic now. Publish nothing, and do not
    fence the producer."""
    comparison = Comparison(topic, name)
    producer_name(name)
    count = client.partitions(topic)
    parts = [partition_name(topic_name(topic), k) for k in range(count)] or [topic]
    comparison.first_index = sum(client.ends(part).first_index for part in parts)
    # Each partition rises, so the merged messages do, too.
    messages = merge(*(_messages_of(client, part, name) for part in parts), key=attrgetter("sequence_id"))
    comparison.compare(records, messages)
    return comparison


def _messages_of(client: Client, topic: str, name: str) -> Iterator[Message]:
    with client.reader(topic) as reader:
        for stored in reader.batches():
            batch = stored.batch
            names = batch.names()
            if name not in names:
                continue
            is_alone = not len(batch.producer_indexes)
            rows = range(len(stored)) if is_alone else np.flatnonzero(batch.producer_indexes == names.index(name))
            for row in rows:
                yield Message(stored, int(row))
