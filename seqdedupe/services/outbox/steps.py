"""The steps of a relay, without any I/O: what to read, publish, compare and delete, and when to take a new token.

A number alone never proves that a row was published. After a fail-over or a restore, old numbers come again with other
rows. So a row is deleted only with a NotDup receipt in this run, or after the relay has read the topic's message at its
number and found the row's `id` in it.

The producer is NAME/token. If two relays have one token, the later one to open it fences the other. With different
tokens neither fences the other. So before a relay publishes to a topic, it opens all names NAME/… that the topic knows,
and thereby fences their owners. Then it reads the token once more. A relay that opened an older name before that is
fenced. A relay that opens it later finds that its token is no longer the current one.
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
"""The place before all rows, including rows whose number cannot be published."""


class OutboxState(NamedTuple):
    """The state that the database reports."""

    token: str
    next_sequence_id: int
    """Every row inserted from now on is at or above it. Every row that was inserted here is below it."""
    has_had: bool
    """Whether there has been a row with the number in question, as far as the database knows."""


class ReadState(NamedTuple):
    """Answer: `OutboxState`, read now."""

    number: int = NO_SEQUENCE_ID
    """The number for `OutboxState.has_had`."""


class OpenTopic(NamedTuple):
    """Open all names NAME/… that the topic knows, which fences their owners, and NAME/token for publishing.

    Answer: `OpenedProducer`; or text, the reason why this topic cannot be published to now.
    """

    topic: str
    token: str


class OpenedProducer(NamedTuple):
    producer: str
    """NAME/token."""
    persisted: tuple[int, ...]
    """The highest sequence ID under NAME/token, for each partition. A row that is not above it cannot be published
    there under this name. A topic without partitions counts as one."""
    highest: int
    """The highest sequence ID that any of the names NAME/… has persisted; -1 if there is none."""


class ReadRows(NamedTuple):
    """Answer: a `RowPage` of the next committed rows after a sequence ID; empty if there are none. It ends before the
    first row that an open transaction may still precede."""

    after: int


class ReadElsewhere(NamedTuple):
    """Answer: a `RowPage` of rows that this database cannot have numbered: they were restored from a dump."""


class Find(NamedTuple):
    """Look in the topic for these rows. Answer: `FoundRows`."""

    topic: str
    page: RowPage
    at_any_number: bool
    """Whether to compare the `id` alone: these rows may have had other numbers before."""


class FoundRows(NamedTuple):
    """The places of rows in a page."""

    there: Int64s
    """The rows that the topic holds. The message at the row's sequence ID (or any), under any name NAME/…, has its
    `id`."""
    untold: Int64s
    """The rows that were not found, but retention has removed messages where they might have been."""


class Publish(NamedTuple):
    """Queue these rows under NAME/token. Each is deleted once it has a NotDup receipt and is durable. No answer."""

    topic: str
    page: RowPage


class Settle(NamedTuple):
    """Wait until all queued rows have receipts, and the rows that these prove are deleted. No answer."""


class Delete(NamedTuple):
    """Delete these rows, which are in the topic. They are identified by number and `id`. No answer."""

    page: RowPage


class SetRowsAside(NamedTuple):
    """Move a row into the other table, in one transaction, if it is still there. No answer."""

    page: RowPage
    reason: str


class Renumber(NamedTuple):
    """Give these rows new numbers, above all present ones, in their order, in one transaction. No answer."""

    page: RowPage


class ReplaceToken(NamedTuple):
    """Commit another token in place of this one, unless that has been done. No answer."""

    token: str


class Tell(NamedTuple):
    """Report this to a person. No answer."""

    line: str


class Wait(NamedTuple):
    """Wait, as there is nothing to do. Answer: whether to look at the table from its beginning."""


class AwaitLeft(NamedTuple):
    """All readable rows are published. Answer: whether to look again, for rows that may soon be readable."""


Step = (
    ReadState | OpenTopic | ReadRows | ReadElsewhere | Find | Publish | Settle | Delete | SetRowsAside | Renumber
    | ReplaceToken | Tell | Wait | AwaitLeft
)  # fmt: skip
Steps = Generator[Step, Any, Any]

UNTOLD = "it is not known whether it was published: retention has removed the messages among which it would be"


@dataclass(slots=True)
class _Topic:
    opened: OpenedProducer
    doubtful_up_to: int
    published_up_to: int = NO_SEQUENCE_ID
    """The last row published in this run."""

    def __post_init__(self) -> None:
        self.doubtful_up_to = max(self.doubtful_up_to, *self.opened.persisted)

    def takes(self, rows: RowPage) -> bool:
        """Whether all of these can be published under the name: each is above the highest ID of its partition."""
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
    """Yield the steps of a relay. Without `follow` they end when all readable rows are published and deleted.

    An exception of a step ends them. They may begin again after any step.
    """
    while not (yield from _RelayRun(topic, route, follow=follow).steps()):
        pass


class _RelayRun:
    """The steps from reading the token until it has changed, or must change."""

    def __init__(self, topic: str, route: Route | None, *, follow: bool) -> None:
        self._topic = topic
        self._route = route
        self._follow = follow
        self._topics: dict[str, _Topic] = {}
        self._token = ""

    def steps(self) -> Steps:
        """Yield the steps. Return whether all is done."""
        state: OutboxState = yield ReadState()
        self._token = state.token
        after = BEGINNING
        is_at_end = True
        while True:
            # With every page, this would cost a tenth of the page's own work.
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
                after = BEGINNING  # the rows left have no NotDup receipt, or appeared meanwhile

    def _rows(self, page: RowPage) -> Steps:
        """Publish the rows that are not published. Return whether the run goes on."""
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
                # The rows in flight may be the very same rows.
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
        """Give numbers of this database to restored rows that are not published. Return whether the run goes on."""
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
        """Return the topic, or the reason why there is none; None if the token has changed."""
        if name not in self._topics:
            opened: OpenedProducer | str = yield OpenTopic(name, self._token)
            highest = NO_SEQUENCE_ID if isinstance(opened, str) else opened.highest
            state: OutboxState = yield ReadState(highest)
            if state.token != self._token:
                return None
            if isinstance(opened, str):
                return opened  # asked again for the next rows: the topic may exist by then
            if not state.has_had:
                yield Tell(
                    f"{name} has messages with sequence IDs up to {highest}, and the database knows of no such row: it "
                    "was restored or failed over, and has lost rows that are published"
                )
            # Rows inserted after the other relays were fenced have not been published by any of them.
            doubtful_up_to = min(highest, state.next_sequence_id - 1)
            self._topics[name] = _Topic(opened, doubtful_up_to)
        return self._topics[name]

    def _missing(self, name: str, rows: RowPage, *, at_any_number: bool) -> Generator[Step, Any, Int64s]:
        """Delete the rows that the topic has. Return the sequence IDs of the others."""
        found: FoundRows = yield Find(name, rows, at_any_number)
        if len(found.there):
            yield Delete(rows.take(found.there))
        if len(found.untold):
            yield SetRowsAside(rows.take(found.untold), UNTOLD)
        return np.delete(rows.sequence_ids, np.concatenate((found.there, found.untold)).astype(np.int64))

    def _without(self, page: RowPage, bad: dict[int, str]) -> Generator[Step, Any, RowPage]:
        """Set these rows aside. Return the page of the others."""
        if not bad:
            return page
        for reason in dict.fromkeys(bad.values()):
            rows = [row for row in sorted(bad) if bad[row] == reason]
            yield SetRowsAside(page.take(np.array(rows, np.int64)), reason)
        return page.take(np.array([row for row in range(len(page)) if row not in bad], np.int64))
