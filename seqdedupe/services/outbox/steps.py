"""The steps of a relay, without any I/O. This module decides which rows the relay reads, publishes, compares and
deletes, and when the relay needs a new token.

A number alone never proves that a row was published. After a fail-over or a restore, other rows may get numbers that
were used before. So the relay deletes a row in two cases only. The row has a NotDup receipt in this run. Or the relay
has read the topic's message at the row's number, and that message contains the row's `id`.

The producer name is NAME/token. If two relays use the same token, the relay that opens the name later fences the other
relay. With different tokens neither relay fences the other. So before a relay publishes to a topic, it opens all names
NAME/… that the topic knows, which fences their owners. Then the relay reads the token again. Another relay that opened
an older name before that time is fenced. Another relay that opens an older name later finds that its token is no longer
the current token.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from seqdedupe.batch import Int64s
from seqdedupe.limits import NO_SEQUENCE_ID
from seqdedupe.names import partition_of
from seqdedupe.services.outbox.store import OutboxState, Route, RowPage

BEGINNING = -(2**63)
"""A number below all rows, including rows whose number cannot be published."""


class ReadState(NamedTuple):
    """Read the state of the outbox now. Answer: `OutboxState`."""

    number: int = NO_SEQUENCE_ID
    """The number to which `OutboxState.has_had` refers."""


class OpenTopic(NamedTuple):
    """Open all names NAME/… that the topic knows, which fences their owners, and open NAME/token for publishing.

    Answer: `OpenedProducer`, or the reason, as text, why the relay cannot publish to this topic now.
    """

    topic: str
    token: str


class OpenedProducer(NamedTuple):
    producer: str
    """The producer name NAME/token."""
    persisted: tuple[int, ...]
    """The highest sequence ID under NAME/token, for each partition. To publish a row to a partition under this name,
    the row's number must be above the partition's ID. A topic without partitions has one value."""
    highest: int
    """The highest sequence ID that is persisted under any of the names NAME/…; -1 if there is none."""


class ReadRows(NamedTuple):
    """Read the next committed rows after a sequence ID. Answer: a `RowPage`, empty if there are no such rows. The page
    ends before the first row that might be preceded by a row of an open transaction."""

    after: int


class ReadElsewhere(NamedTuple):
    """Read rows whose numbers this database cannot have assigned, because the rows were restored from a dump. Answer: a
    `RowPage`."""


class Find(NamedTuple):
    """Look for these rows in the topic. Answer: `FoundRows`."""

    topic: str
    page: RowPage
    at_any_number: bool
    """Whether to compare only the `id`, because these rows may have had other numbers before."""


class FoundRows(NamedTuple):
    """The places of rows in a page."""

    there: Int64s
    """The rows that the topic contains. The message at the row's sequence ID (or at any), under any name NAME/…, has
    the row's `id`."""
    untold: Int64s
    """The rows that were not found, although they may have been published: retention has removed messages among which
    they might have been."""


class Publish(NamedTuple):
    """Queue these rows for publishing under NAME/token. Each row is deleted once it has a NotDup receipt and is
    durable. No answer."""

    topic: str
    page: RowPage


class Settle(NamedTuple):
    """Wait until all queued rows have receipts, and until the rows that these receipts prove are deleted. This step has
    no answer."""


class Delete(NamedTuple):
    """Delete these rows, which are in the topic. A row is identified by its number and `id`. No answer."""

    page: RowPage


class SetRowsAside(NamedTuple):
    """Move a row that still exists into the table of rows set aside, in one transaction. No answer."""

    page: RowPage
    reason: str


class Renumber(NamedTuple):
    """Give these rows new numbers above all present numbers, in the same order, in one transaction. No answer."""

    page: RowPage


class ReplaceToken(NamedTuple):
    """Commit a new token in place of this token, unless the token has been replaced already. No answer."""

    token: str


class Tell(NamedTuple):
    """Report this to a person. No answer."""

    line: str


class Wait(NamedTuple):
    """Wait, because there are no rows to publish. The answer states whether to read the table from its beginning."""


class AwaitLeft(NamedTuple):
    """Wait for rows that open transactions delay. All readable rows are published already. The answer states whether to
    read again."""


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
        """Return whether all of these rows can be published under the name: the number of each row is above the highest
        ID of its partition."""
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
    """Yield the steps of a relay. Without `follow` the steps end when all readable rows are published and deleted.

    An exception in a step ends the steps. The caller may start the steps again after any step.
    """
    while not (yield from _RelayRun(topic, route, follow=follow).steps()):
        pass


class _RelayRun:
    """The steps from the reading of the token until the token has changed, or must be changed."""

    def __init__(self, topic: str, route: Route | None, *, follow: bool) -> None:
        self._topic = topic
        self._route = route
        self._follow = follow
        self._topics: dict[str, _Topic] = {}
        self._token = ""

    def steps(self) -> Steps:
        """Yield the steps. Return whether the relay has finished."""
        state: OutboxState = yield ReadState()
        self._token = state.token
        after = BEGINNING
        is_at_end = True
        while True:
            # Doing this with every page would cost a tenth of the page's own work.
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
                after = BEGINNING  # the remaining rows have no NotDup receipt, or have appeared meanwhile

    def _rows(self, page: RowPage) -> Steps:
        """Publish the rows that are not in the topic yet. Return whether the run continues."""
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
                # The rows in flight may be the same rows as these.
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
        """Give numbers of this database to restored rows that are not in the topic. Return whether the run
        continues."""
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
        """Return the opened topic, or the reason why it cannot be opened; None if the token has changed."""
        if name not in self._topics:
            opened: OpenedProducer | str = yield OpenTopic(name, self._token)
            highest = NO_SEQUENCE_ID if isinstance(opened, str) else opened.highest
            state: OutboxState = yield ReadState(highest)
            if state.token != self._token:
                return None
            if isinstance(opened, str):
                return opened  # try to open the topic again for the next rows: it may exist by then
            if not state.has_had:
                yield Tell(
                    f"{name} has messages with sequence IDs up to {highest}, and the database knows of no such row: it "
                    "was restored or failed over, and has lost rows that are published"
                )
            # Rows inserted after the other relays were fenced cannot have been published by these relays.
            doubtful_up_to = min(highest, state.next_sequence_id - 1)
            self._topics[name] = _Topic(opened, doubtful_up_to)
        return self._topics[name]

    def _missing(self, name: str, rows: RowPage, *, at_any_number: bool) -> Generator[Step, Any, Int64s]:
        """Delete the rows that the topic contains. Return the sequence IDs of the other rows."""
        found: FoundRows = yield Find(name, rows, at_any_number)
        if len(found.there):
            yield Delete(rows.take(found.there))
        if len(found.untold):
            yield SetRowsAside(rows.take(found.untold), UNTOLD)
        return np.delete(rows.sequence_ids, np.concatenate((found.there, found.untold)).astype(np.int64))

    def _without(self, page: RowPage, bad: dict[int, str]) -> Generator[Step, Any, RowPage]:
        """Set these rows aside. Return a page of the remaining rows."""
        if not bad:
            return page
        for reason in dict.fromkeys(bad.values()):
            rows = [row for row in sorted(bad) if bad[row] == reason]
            yield SetRowsAside(page.take(np.array(rows, np.int64)), reason)
        return page.take(np.array([row for row in range(len(page)) if row not in bad], np.int64))
