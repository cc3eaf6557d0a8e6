"""What a relay does, step by step, without any I/O: what to read, publish, compare and delete, and when to take a new
token.

A number alone never proves that a row was published: after a fail-over or a restore old numbers come again with other
rows. So a row goes only with a NotDup receipt in this run, or after the topic's message at its number was read and
carries its `id`.

The producer is NAME/token. Of two relays with one token the later one to open it fences the other. Of two with
different tokens neither would: so before it publishes to a topic a relay opens all names NAME/… that the topic knows,
which fences whoever has them, and then reads the token once more. Whoever opened an older name before that is fenced;
whoever opens it later finds that its token is not the token any more.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from seqdedupe.batch import Int64s
from seqdedupe.limits import NO_SEQUENCE_ID
from seqdedupe.names import partition_of
from seqdedupe.services.outbox.row_page import Route, RowPage

BEGINNING = -(2**63)
"""Before all rows, those among them whose number cannot be published."""


class OutboxState(NamedTuple):
    """What the database says of itself."""

    token: str
    next_sequence_id: int
    """No row that is inserted from now on is below it, and none that was inserted here is at or above it."""
    has_had: bool
    """Whether there has been a row with the number that was asked about, as far as the database knows."""


class ReadState(NamedTuple):
    """Answer: `OutboxState`, read now."""

    number: int = NO_SEQUENCE_ID
    """To be asked about."""


class OpenTopic(NamedTuple):
    """Open all names NAME/… that the topic knows, which fences their owners, and NAME/token for publishing.

    Answer: `OpenedProducer`; or text, why this topic cannot be published to now.
    """

    topic: str
    token: str


class OpenedProducer(NamedTuple):
    producer: str
    """NAME/token."""
    persisted: tuple[int, ...]
    """Of each partition, the highest sequence ID that it has under NAME/token: what is not above it cannot be published
    there under this name. A topic without partitions is one."""
    highest: int
    """The highest sequence ID that any of the names NAME/… has persisted; -1 if there is none."""


class ReadRows(NamedTuple):
    """Answer: a `RowPage` of the next rows after a sequence ID, committed ones, and only those before which no
    transaction
    that is still open may have one; empty if there are none."""

    after: int


class ReadElsewhere(NamedTuple):
    """Answer: a `RowPage` of rows that this database cannot have numbered: they were restored from a dump."""


class Find(NamedTuple):
    """Look into the topic which of these rows it holds. Answer: `FoundRows`."""

    topic: str
    page: RowPage
    at_any_number: bool
    """By `id` alone: these may have been given other numbers before."""


class FoundRows(NamedTuple):
    """Of a page, the places of rows."""

    there: Int64s
    """The topic's message at the row's sequence ID (or any), under whichever name NAME/…, carries its `id`."""
    untold: Int64s
    """They are not there, and where they might have been retention has removed messages."""


class Publish(NamedTuple):
    """Queue these rows under NAME/token, to be deleted once each has a NotDup receipt and is durable. No answer."""

    topic: str
    page: RowPage


class Settle(NamedTuple):
    """Wait until all that is queued has its receipts, and what they prove is deleted. No answer."""


class Delete(NamedTuple):
    """These rows are in the topic. No answer. They are told apart by number and `id`."""

    page: RowPage


class SetRowsAside(NamedTuple):
    """Move a row into the other table, in one transaction, if it is still there. No answer."""

    page: RowPage
    reason: str


class Renumber(NamedTuple):
    """Give these rows new numbers, above all that there are, in their order, in one transaction. No answer."""

    page: RowPage


class ReplaceToken(NamedTuple):
    """Commit another token in place of this one, unless that has been done. No answer."""

    token: str


class Tell(NamedTuple):
    """Report this to a person. No answer."""

    line: str


class Wait(NamedTuple):
    """There is nothing to do. Answer: whether to look at the table from its beginning."""


class AwaitLeft(NamedTuple):
    """All that could be read is published. Answer: whether to look again, for rows that may soon be readable."""


Step = (
    ReadState | OpenTopic | ReadRows | ReadElsewhere | Find | Publish | Settle | Delete | SetRowsAside | Renumber
    | ReplaceToken | Tell | Wait | AwaitLeft
)  # fmt: skip
Steps = Generator[Step, Any, Any]

UNTOLD = "whether it was published cannot be told: retention has removed the messages among which it would be"


@dataclass(slots=True)
class _Topic:
    opened: OpenedProducer
    doubtful_up_to: int
    published_up_to: int = NO_SEQUENCE_ID
    """In this run."""

    def __post_init__(self) -> None:
        self.doubtful_up_to = max(self.doubtful_up_to, *self.opened.persisted)

    def takes(self, rows: RowPage) -> bool:
        """Whether all of these can be published under the name: each is above what its partition has."""
        if not len(rows):
            return True
        producer, persisted = self.opened.producer.encode(), self.opened.persisted
        if len(persisted) == 1:
            return bool(rows.sequence_ids[0] > max(persisted[0], self.published_up_to))
        return all(
            number > max(persisted[partition_of(key, producer, len(persisted))], self.published_up_to)
            for number, key in zip(rows.sequence_ids.tolist(), rows.keys.rows(len(rows)), strict=True)
        )


def relay(topic: str, route: Route | None, *, follow: bool) -> Steps:
    """The steps of a relay. Without `follow` they end when all that could be read is published and deleted.

    Whatever a step raises ends them. Begun anew they are right, whichever step was the last one.
    """
    while not (yield from _RelayRun(topic, route, follow=follow).steps()):
        pass


class _RelayRun:
    """From reading the token to finding that it has changed, or has to."""

    def __init__(self, topic: str, route: Route | None, *, follow: bool) -> None:
        self._topic = topic
        self._route = route
        self._follow = follow
        self._topics: dict[str, _Topic] = {}
        self._token = ""

    def steps(self) -> Steps:
        """Answers whether all is done."""
        state: OutboxState = yield ReadState()
        self._token = state.token
        after = BEGINNING
        is_at_end = True
        while True:
            # Beside every page it would cost a tenth of what the page does.
            if is_at_end and not (yield from self._rows_from_elsewhere()):
                return False
            page: RowPage = yield ReadRows(after)
            is_at_end = not len(page)
            if len(page):
                if not (yield from self._rows(page)):
                    return False
                after = page.last
            elif self._follow:
                if (yield Wait()):
                    yield Settle()
                    after = BEGINNING
            elif after == BEGINNING:
                if not (yield AwaitLeft()):
                    return True
            else:
                yield Settle()
                after = BEGINNING  # what is left has no NotDup receipt, or turned up meanwhile

    def _rows(self, page: RowPage) -> Steps:
        """Publishes what is not published. Answers whether the run goes on."""
        page = yield from self._without(page, page.unpublishable(self._route))
        for name, rows in page.by_topic(self._route, self._topic) if len(page) else ():
            topic = yield from self._opened(name)
            if topic is None:
                return False
            if isinstance(topic, str):
                yield from self._without(rows, dict.fromkeys(range(len(rows)), topic))
                continue
            doubtful = rows.sequence_ids <= max(topic.doubtful_up_to, topic.published_up_to)
            if doubtful.any():
                # What is in flight may be the very same rows.
                yield Settle()
                kept = yield from self._missing(name, rows.take(np.flatnonzero(doubtful)), at_any_number=False)
                if not topic.takes(rows.take(np.flatnonzero(np.isin(rows.sequence_ids, kept)))):
                    yield ReplaceToken(self._token)
                    return False
                rows = rows.take(np.flatnonzero(~doubtful | np.isin(rows.sequence_ids, kept)))
            if len(rows):
                topic.published_up_to = rows.last
                yield Publish(name, rows)
        return True

    def _rows_from_elsewhere(self) -> Steps:
        """Restored rows that are not published get numbers of this database. Answers whether the run goes on."""
        page: RowPage = yield ReadElsewhere()
        while len(page):
            yield Settle()
            page = yield from self._without(page, page.unpublishable(self._route))
            for name, rows in page.by_topic(self._route, self._topic) if len(page) else ():
                topic = yield from self._opened(name)
                if topic is None:
                    return False
                if isinstance(topic, str):
                    yield from self._without(rows, dict.fromkeys(range(len(rows)), topic))
                    continue
                missing = yield from self._missing(name, rows, at_any_number=True)
                if len(missing):
                    yield Renumber(rows.take(np.flatnonzero(np.isin(rows.sequence_ids, missing))))
            page = yield ReadElsewhere()
        return True

    def _opened(self, name: str) -> Generator[Step, Any, _Topic | str | None]:
        """The topic, or why there will be none; None if the token is another one by now."""
        if name not in self._topics:
            opened: OpenedProducer | str = yield OpenTopic(name, self._token)
            highest = NO_SEQUENCE_ID if isinstance(opened, str) else opened.highest
            state: OutboxState = yield ReadState(highest)
            if state.token != self._token:
                return None
            if isinstance(opened, str):
                return opened  # asked again for the next rows: it may be made by then
            if not state.has_had:
                yield Tell(
                    f"{name} has messages with sequence IDs up to {highest}, and the database knows of no such row: it "
                    "was restored or failed over, and has lost rows that are published"
                )
            # Rows that were not there when everybody else was fenced have been published by nobody.
            doubtful_up_to = min(highest, state.next_sequence_id - 1)
            self._topics[name] = _Topic(opened, doubtful_up_to)
        return self._topics[name]

    def _missing(self, name: str, rows: RowPage, *, at_any_number: bool) -> Generator[Step, Any, Int64s]:
        """Deletes the rows that the topic has; the sequence IDs of those that it has not."""
        found: FoundRows = yield Find(name, rows, at_any_number)
        if len(found.there):
            yield Delete(rows.take(found.there))
        if len(found.untold):
            yield SetRowsAside(rows.take(found.untold), UNTOLD)
        return np.delete(rows.sequence_ids, np.concatenate((found.there, found.untold)).astype(np.int64))

    def _without(self, page: RowPage, bad: dict[int, str]) -> Generator[Step, Any, RowPage]:
        """Sets these rows aside; the page of the others."""
        if not bad:
            return page
        for reason in dict.fromkeys(bad.values()):
            rows = [row for row in sorted(bad) if bad[row] == reason]
            yield SetRowsAside(page.take(np.array(rows, np.int64)), reason)
        return page.take(np.array([row for row in range(len(page)) if row not in bad], np.int64))
