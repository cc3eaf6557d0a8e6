"""Salvage: write everything that is still readable in a data directory into a new directory that a sidecar can open.

An undamaged topic is copied unchanged. From any other topic, the remaining messages are written in order to a log of a
new incarnation. So no reader continues from a position in the old log. Watermarks in the new log are at least as high
as the watermarks in the old log and the old store. So an existing message is never stored twice. A missing message
would also be a Dup, so the missing messages are reported.
"""

import asyncio
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from seqdedupe.doctor.examine import Examined, examine
from seqdedupe.doctor.findings import Findings, Tally
from seqdedupe.errors import error
from seqdedupe.files import becoming, kept_unused, sync_folder
from seqdedupe.format import records
from seqdedupe.format.headers import HEADER_BYTES, SECRET_BYTES, TOKEN_BYTES, key_of
from seqdedupe.format.layout import BASE_INDEX, COLUMNS_END, PUBLISH_TIME_MS, RECORD_START, ROWS
from seqdedupe.format.records import body_of
from seqdedupe.limits import NO_SEQUENCE_ID
from seqdedupe.log.embedded import log_folder
from seqdedupe.log.embedded.inspection import Intact, inspect
from seqdedupe.log.embedded.journal_replay import put_back
from seqdedupe.log.embedded.logs import DEFAULT_SEGMENT_BYTES, create_log
from seqdedupe.log.embedded.segment import LogIdentity, Segment
from seqdedupe.log.embedded.tail import Tail
from seqdedupe.log.embedded.writer import Append, FatalError, Room, Writer, WriteTerm
from seqdedupe.names import topic_name
from seqdedupe.store.db import Store, opened_copy
from seqdedupe.store.directories import read_claim, write
from seqdedupe.store.parts import TopicRecord, TopicState
from seqdedupe.topic import control
from seqdedupe.transfer import stored_records

# -- Writing a new log from the records of another one, with their publish times.


class NewLog:
    """A new log that is written from beginning to end. No other object uses the log. Create it on an event loop,
    although no method waits. All methods raise LOG_REFUSED if the log cannot be written. In this case, the part that
    was written is unusable."""

    def __init__(self, folder: Path, identity: LogIdentity, term: int, random_bytes: bytes) -> None:
        tail = Tail(Segment(folder, identity, 0), 0, 0, 0, 0, records.END)
        self._writer = Writer(
            folder,
            tail,
            DEFAULT_SEGMENT_BYTES,
            on_news=lambda news: None,
            on_late=lambda late: None,
            room=Room(folder),
        )
        self._publish_time_ms = 0
        self.next_index = 0
        self._opening = self._open(term, random_bytes)

    def append(self, appends: list[Append], publish_time_ms: int) -> None:
        """Append batches and control records with this publish time, or with the previous time if that is later."""
        self._publish_time_ms = publish_time_ms
        for append in appends:
            self._opening.append(append)
        left = len(appends)
        while left > 0:
            left -= self._write()

    def finish(self, term: int, token: bytes) -> None:
        """Finish the log. When this returns, the log is durable. A last marker, with a higher term, states that
        everything before this marker is durable."""
        try:
            self._writer.sync()
            self._opening = self._open(term, token)
            self._writer.sync()
        except FatalError as e:
            raise error("LOG_REFUSED", str(e)) from e
        self._writer.close()

    def _open(self, term: int, token: bytes) -> WriteTerm:
        self._opening = WriteTerm(self._writer, lambda opening: None, term, token, lambda outcome: None)
        self._write()
        return self._opening

    def _write(self) -> int:
        """Write some of the appends, the marker the first time. Return their number."""
        try:
            written = self._writer.write(self._opening, self._publish_time_ms)
        except FatalError as e:
            raise error("LOG_REFUSED", str(e)) from e
        if written is None or written.failure is not None:
            raise error("LOG_REFUSED", written.why if written else "the log accepts nothing")
        self._writer.forget_written()
        self.next_index = written.next_index
        return len(written.runs)


REPORT_FILE = "salvage.json"


@dataclass(slots=True)
class KeptStretch:
    """Consecutive messages of the old log, and the index of the first of these messages in the new log."""

    first_index: int
    last_index: int
    new_first_index: int


@dataclass(slots=True)
class SalvagedTopic:
    """A topic in the new directory."""

    record: TopicRecord
    is_copied: bool
    kept: list[KeptStretch] = field(default_factory=list)
    has_snapshot: bool = False
    """Whether the new store contains the old store's snapshot of the topic."""
    imported_of: int | None = None
    """The incarnation whose imported IDs the new topic has; None if there are no imported IDs."""

    def to_json(self) -> dict[str, Any]:
        """Return the documented form: keep it stable."""
        return {
            "name": self.record.name,
            "incarnation": self.record.incarnation,
            "copied": self.is_copied,
            "kept": [
                {"first_index": k.first_index, "last_index": k.last_index, "new_first_index": k.new_first_index}
                for k in self.kept
            ],
        }


@dataclass(slots=True)
class Salvage:
    """The findings, and the salvaged topics."""

    findings: Findings
    topics: list[SalvagedTopic]

    @property
    def left_out(self) -> list[str]:
        """The names of the topics of which nothing was salvaged."""
        made = {topic.record.name for topic in self.topics}
        return [topic.name for topic in self.findings.topics if topic.name not in made]

    def to_json(self) -> dict[str, Any]:
        """Return the documented form: keep it stable."""
        return {
            "findings": self.findings.to_json(),
            "salvaged": [topic.to_json() for topic in self.topics],
            "left_out": self.left_out,
        }


def salvage(directory: Path, to: Path) -> Salvage:
    """Write the new directory. The directory gets its name when it is complete. When this returns, the directory is
    durable. This call blocks.

    Raises DIRECTORY_NOT_EMPTY, LOG_REFUSED, INVALID_CONFIGURATION if the topics are on a broker's own log, and the
    errors of `examine`; OSError. After an error nothing remains. After a power cut a folder named `.unfinished`
    remains.
    """
    with kept_unused(directory), becoming(to, directory) as unfinished:
        if claim := read_claim(directory):
            write(unfinished, claim)
        return asyncio.run(_fill(directory, unfinished))


async def _fill(directory: Path, to: Path) -> Salvage:
    topics: list[SalvagedTopic] = []
    (to / "logs").mkdir()

    def each(examined: Examined) -> None:
        found = examined.findings
        # Without a snapshot a log must begin with index 0.
        can_be_copied = found.has_whole_log and (examined.loaded is not None or found.first_index == 0)
        if not can_be_copied and log_folder.leaving_to(examined.folder) is not None:
            # As another incarnation, the topic would be served here, in addition to the log that the other sidecar may
            # have.
            return
        if any(found.name == other.record.name for other in topics):
            found.name = topic_name(f"salvaged-{found.incarnation}")
        topics.append(_copy(examined, to) if can_be_copied else _rewrite(examined, to, topics))
        if found.imported_ids and not found.imported_why:
            topics[-1].imported_of = examined.identity.incarnation

    findings = examine(directory, each)
    if any(topic.log == "broker" for topic in findings.topics):
        why = "the topics are on a broker's own log: there is nothing to salvage here"
        raise error("INVALID_CONFIGURATION", why, hint="Restore the store, or let the broker replay its log.")
    if any(topic.log == "pulsar" for topic in findings.topics):
        why = "the messages are in a Pulsar cluster: there is nothing to salvage here"
        raise error(
            "INVALID_CONFIGURATION",
            why,
            hint="Restore the store, or start with an empty directory: the sidecar then reads the topics again.",
        )
    # Last: a sidecar refuses to start with logs and no store.
    await _make_store(directory / "store", to / "store", topics, findings.namespace_policies)
    made = Salvage(findings, topics)
    with (to / REPORT_FILE).open("x") as file:
        json.dump(made.to_json(), file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(to)
    return made


def _copy(examined: Examined, to: Path) -> SalvagedTopic:
    found, incarnation = examined.findings, examined.identity.incarnation
    folder = to / "logs" / str(incarnation)
    shutil.copytree(examined.folder, folder)
    put_back(folder, examined.identity, examined.replay.parts_of(incarnation))
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    create_log(folder, found.name, examined.secret, found.partitions)
    kept = [KeptStretch(found.first_index, found.next_index - 1, found.first_index)] if found.messages else []
    record = TopicRecord(found.name, incarnation, TopicState.ACTIVE, examined.secret, partitions=found.partitions)
    return SalvagedTopic(record, True, kept, examined.loaded is not None)


def _rewrite(examined: Examined, to: Path, others: list[SalvagedTopic]) -> SalvagedTopic:
    taken = [examined.identity.incarnation, *(other.record.incarnation for other in others)]
    incarnation = max(time.time_ns() // 1000, max(taken) + 1)
    found, secret = examined.findings, secrets.token_bytes(SECRET_BYTES)
    record = TopicRecord(found.name, incarnation, TopicState.ACTIVE, secret, partitions=found.partitions)
    folder = to / "logs" / str(incarnation)
    create_log(folder, record.name, record.secret, record.partitions)
    tally = examined.tally
    term = tally.term + 1
    identity = LogIdentity(incarnation, key_of(record.secret))
    log = NewLog(folder, identity, term, secrets.token_bytes(TOKEN_BYTES))
    if tally.policy is not None:
        body = control.encode(tally.policy, term=term)
        log.append([(body, 0, len(body))], 0)
    topic = SalvagedTopic(record, False)
    for part in inspect(examined.folder, examined.identity, examined.replay):
        if isinstance(part, Intact):
            _write_batches(log, part, topic.kept)
    for change in _last_words(tally):
        body = control.encode(change, term=term)
        log.append([(body, 0, len(body))], 0)
    log.finish(term + 1, secrets.token_bytes(TOKEN_BYTES))
    return topic


def _last_words(tally: Tally) -> Iterator[control.Change]:
    """Yield every producer's numbers in records that do not depend on the batches. So producers that were reset or
    forgotten in the old log are also reset or forgotten in the new log."""
    names, epochs, persisted = tally.producers.names_from(0), tally.epochs(), tally.persisted()
    if names:
        yield from control.parts(control.ProducerSessions(names, epochs, persisted))
    if tally.producers.has_forgotten:
        yield control.Purge([])
    numbers = sorted(tally.reset_at)
    for start in range(0, len(numbers), control.STATED_A_RECORD):
        some = numbers[start : start + control.STATED_A_RECORD]
        yield control.Reset([names[number] for number in some], epochs[some], persisted[some])
        # A producer that was forgotten and has not come back has no session either.
        if gone := [names[number] for number in some if not epochs[number] and persisted[number] == NO_SEQUENCE_ID]:
            yield control.Purge(gone)


def _write_batches(log: NewLog, part: Intact, kept: list[KeptStretch]) -> None:
    batches = part.table[part.table[:, ROWS] > 0]
    for publish_time_ms, group in groupby(batches, lambda places: int(places[PUBLISH_TIME_MS])):
        appends: list[Append] = []
        for places in group:
            rows, first = int(places[ROWS]), int(places[BASE_INDEX])
            column_bytes = int(places[COLUMNS_END] - places[RECORD_START]) - HEADER_BYTES
            new_index = log.next_index + sum(append[1] for append in appends)
            if kept and kept[-1].last_index + 1 == first:
                kept[-1].last_index += rows
            else:
                kept.append(KeptStretch(first, first + rows - 1, new_index))
            appends.append((body_of(part.raw, places), rows, column_bytes))
        log.append(appends, publish_time_ms)


async def _make_store(
    before: Path, folder: Path, topics: list[SalvagedTopic], policies: list[tuple[str, bytes]]
) -> None:
    store = Store.open(folder)
    needs_old = any(topic.has_snapshot or topic.imported_of is not None for topic in topics)
    try:
        with opened_copy(before) if needs_old else nullcontext() as old:
            for namespace, policy in policies:
                await store.put_namespace_policy(namespace, policy)
            for topic in topics:
                if old is not None:
                    await stored_records.put_all(store, topic.record.incarnation, _records_of(topic, old))
                await store.put_topics(topic.record)
    finally:
        store.close()


def _records_of(topic: SalvagedTopic, old: Store) -> Iterator[tuple[bytes, bytes]]:
    incarnation = topic.record.incarnation
    if topic.has_snapshot:
        yield from stored_records.without_imported(old, incarnation)
    if topic.imported_of is not None:
        yield from stored_records.imported_as(old, topic.imported_of, incarnation)
