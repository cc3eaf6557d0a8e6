"""A job's positions: the driver checks them before it plans anything, and an operator can show and reset them.

Begin with `Positions.look`. The functions for an operator are `positions_of` and `reset_position`.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import pyarrow as pa

from seqdedupe.errors import ConfigurationError, DamagedError, InvalidRequestError, NotFoundError, PositionError, error
from seqdedupe.message_id import Position
from seqdedupe.names import topic_name
from seqdedupe_spark import planning, stock
from seqdedupe_spark.dedupe import has_no_producers
from seqdedupe_spark.job.range_task import RangeStep
from seqdedupe_spark.options import Options, ReadLimits, Selection, number
from seqdedupe_spark.planning import Ends, PlanningClient, TopicListing, earliest, find_loss
from seqdedupe_spark.ranges import TopicRange
from seqdedupe_spark.service import Service
from seqdedupe_spark.stock import StockEnds
from seqdedupe_spark.stores.contract import Advance, Binding, OutputStore, Stored, StoreFactory, check_name

FIRST_START = "*"
"""A topic name that is stored when the first start has given every topic a position. Topics that are found later begin
at their earliest message. No topic has this name."""

MAX_MESSAGES = 250_000
"""The maximum number of messages in a round, for all topics together, unless the source has limits."""

MAX_BYTES = 64 * 1024 * 1024
"""The approximate maximum number of bytes in a round, unless the source has limits."""

_log = logging.getLogger(__name__)


class TopicStanding(NamedTuple):
    """The position of a job in a topic, and the end of the topic."""

    stored: Stored
    end: Position
    entries: int | None = None
    """The number of entries still to be read, for a topic that no sidecar writes."""

    @property
    def lag(self) -> int:
        """The number of messages still to be read, or of entries if entries are counted."""
        return self.end.index - self.stored.position.index if self.entries is None else self.entries

    def after(self, step: RangeStep) -> "TopicStanding":
        """Return the standing after a step."""
        left = None if self.entries is None else self.entries - len(step.range)
        return TopicStanding(Stored(step.range.end, step.epoch), self.end, left)


@dataclass
class Positions:
    """The positions of one job, for one run of the job.

    The object remembers the stored positions and the ends of the topics that it has seen. None of them may go back.
    """

    job: str
    table: str
    source: Options
    seen: dict[str, Stored] = field(default_factory=dict)
    ends: dict[str, Position] = field(default_factory=dict)
    accepted: set[str] = field(default_factory=set)
    """Deleted topics for which a warning was logged."""

    def bind(self, store: OutputStore, binding: Binding, schema: pa.Schema) -> None:
        """Bind the job to its table and mode. If the table is missing, create it for rows of this schema.

        Raises JOB_CHANGED if the job is bound to another table or mode. Raises OUTPUT_MISSING if the job has positions
        and its table does not exist. Raises INVALID_OUTPUT if the existing table does not accept the rows. After these
        errors the job is not bound to the table.
        """
        is_there = store.has_table(binding.table)
        if is_there:
            store.prepare(binding.table, schema)
        binding.check(self.job, store.bind(self.job, binding))
        if not is_there:
            if FIRST_START in store.positions(self.job):
                what = f"job {self.job!r} has positions, but its table {binding.table!r} does not exist"
                raise error("OUTPUT_MISSING", what)
            store.prepare(binding.table, schema)

    def check_have_producers(self, client: PlanningClient, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Raise INVALID_OPTION if a selected topic has deduplication IDs. For a topic that is recovering, or appears
        later, the task that reads the topic makes this check."""
        listing = TopicListing(client, should_stop)
        # `look` decides whether a topic may be missing.
        with suppress(NotFoundError):
            if by_id := next(filter(listing.is_by_id, listing.select(self.source.selection)), None):
                raise has_no_producers(by_id)

    def look(
        self, client: PlanningClient, store: OutputStore, should_stop: Callable[[], bool] = lambda: False
    ) -> tuple[TopicListing, dict[str, TopicStanding]]:
        """Return the listing, and the standing of each selected topic. A topic without a position first gets a
        position.

        Raises POSITION_WENT_BACK if the database was replaced by an older copy, POSITION_RESET if an operator has reset
        a position, POSITION_AFTER_END if a topic has lost its end. With `fail_on_data_loss`, also raises PositionError
        or NotFoundError for a topic that cannot be read from its position. Without it, a warning is logged, and the
        position is permanently moved to the messages that are still stored.
        """
        stored = store.positions(self.job)
        self._check_against_seen(stored)
        listing = TopicListing(client, should_stop)
        names = listing.select(self.source.selection, stored.keys() - {FIRST_START})
        if FIRST_START not in stored or not stored.keys() >= set(names):
            stored = self._start(listing, store, names, stored)
        looked = {name: self._look_at(listing, store, name, stored[name]) for name in names}
        standings = {name: standing for name, standing in looked.items() if standing is not None}
        self.seen.update({name: standing.stored for name, standing in standings.items()})
        return listing, standings

    def plan(self, listing: TopicListing, standings: dict[str, TopicStanding]) -> list[RangeStep]:
        """Return the next round: the range of every topic with new messages, within the limits."""
        ranges = [listing.range(topic, one.stored.position, one.end) for topic, one in standings.items()]
        limits = self.source.limits
        limits = ReadLimits(limits.messages or MAX_MESSAGES, limits.size_bytes or MAX_BYTES)
        planned = listing.within(ranges, limits)
        return [RangeStep(span, standings[span.topic].stored.epoch) for span in planned]

    def committed(self, step: RangeStep) -> None:
        """Note a committed step. Call this for each step."""
        self.seen[step.range.topic] = Stored(step.range.end, step.epoch)

    def _check_against_seen(self, stored: dict[str, Stored]) -> None:
        for topic, before in self.seen.items():
            now = stored.get(topic)
            if now is None or now.epoch < before.epoch or (now.epoch == before.epoch and _is_before(now, before)):
                what = f"is {now.position}" if now else "is gone"
                raise error(
                    "POSITION_WENT_BACK", f"the position for {topic} {what}, but it was {before.position} before"
                )
            if now.epoch > before.epoch:
                raise error("POSITION_RESET", f"the position for {topic} was reset to {now.position}", epoch=now.epoch)

    def _check_end(self, topic: str, end: Position) -> None:
        before = self.ends.get(topic)
        if before is not None and before.incarnation == end.incarnation and end.index < before.index:
            raise error(
                "POSITION_AFTER_END",
                f"{topic} ended with index {before.index} earlier in this run, and ends with {end.index} now",
                index=before.index,
                end_index=end.index + 1,
            )
        self.ends[topic] = end

    def _start(
        self, listing: TopicListing, store: OutputStore, names: list[str], stored: dict[str, Stored]
    ) -> dict[str, Stored]:
        """Insert the missing positions. If another run has inserted some of these positions meanwhile, use the
        positions of the other run."""
        is_first = FIRST_START not in stored
        missing = [name for name in names if name not in stored]
        for name in missing:
            listing.hold(name)
        place = self.source.starting if is_first else None
        found = listing.resolve(names if is_first else missing, place or "earliest", "startingOffsets")
        for name in missing:
            self._check_start(listing, name, found[name])
        for name in missing:
            store.replace(self.job, name, None, Stored(found[name], 0))
        if is_first:
            store.replace(self.job, FIRST_START, None, Stored(Position.start(0), 0))
        return store.positions(self.job)

    def _check_start(self, listing: TopicListing, topic: str, start: Position) -> None:
        """Raise INVALID_OPTION for a start position that the topic does not have. Once stored, it would have precedence
        over a corrected option."""
        loss = listing.find_loss(topic, start)
        if loss is not None and (self.source.fail_on_data_loss or not loss.may_be_accepted):
            raise error("INVALID_OPTION", f"startingOffsets: the job cannot begin after {start}: {loss.message}")

    def _look_at(self, listing: TopicListing, store: OutputStore, topic: str, stored: Stored) -> TopicStanding | None:
        """Return the standing of one topic. Return None if the topic was deleted and data loss is accepted."""
        found = listing.look(topic, stored.position)
        if isinstance(found, Position):
            if listing.hold(topic, stored.position):
                return self._look_at(listing, store, topic, stored)
            self._check_end(topic, found)
            entries = listing.range(topic, stored.position, found).entries
            # The same place may have two names: after all of a ledger, and before the next one.
            return TopicStanding(stored, stored.position if entries == 0 else found, entries)
        if self.source.fail_on_data_loss or not found.may_be_accepted:
            raise found.error()
        if topic not in self.accepted:
            _log.warning("job %s: %s", self.job, found.message)
        if found.next is None:
            self.accepted.add(topic)
            return None
        listing.hold(topic)
        moved = Stored(found.next, stored.epoch)
        if found.reason == "POSITION_TRIMMED":
            # Move the position in a transaction without rows: a job that drops duplicates keeps its watermarks of the
            # producers.
            store.write(
                self.job,
                self.table,
                iter(()),
                [Advance(TopicRange(topic, stored.position, found.next), moved.epoch)],
            )
        elif not store.replace(self.job, topic, stored, moved):
            raise error("POSITION_CHANGED", f"another run of job {self.job!r} has moved the position for {topic}")
        self.seen[topic] = moved
        return self._look_at(listing, store, topic, moved)


def _is_before(now: Stored, before: Stored) -> bool:
    """Return whether an earlier stored position is above the current stored position. Positions of two incarnations
    have no order: another run may have moved on to the next incarnation. If it has not, the position does not fit the
    topic."""
    return now.position.incarnation == before.position.incarnation and now.position.index < before.position.index


# -- The actions of an operator on a job's positions.


def positions_of(store: StoreFactory, job: str) -> dict[str, Stored]:
    """Return the stored positions of a job, by topic. Raises INVALID_OPTION if the job does not exist in the store."""
    with store() as opened:
        return {topic: stored for topic, stored in sorted(_stored(opened, job).items()) if topic != FIRST_START}


def _stored(store: OutputStore, job: str) -> dict[str, Stored]:
    check_name("job", job)
    try:
        stored = store.positions(job)
    except ConfigurationError as e:
        if e.reason != "INVALID_OUTPUT":
            raise
        raise error("INVALID_OPTION", f"store: it holds no positions of a job: {e.message}") from e
    if not stored:
        what = f"job {job} has no positions in this store; nothing was changed"
        raise error("INVALID_OPTION", what, hint="Check the name of the job, and the URL of its store.")
    return stored


def reset_position(
    store: StoreFactory, job: str, topic: str, place: str, service: Service
) -> tuple[Stored | None, Stored]:
    """Set a topic's position, in the next epoch, and drop its watermarks. Return the old and the new position.

    `place` is earliest, latest, an index (of the first message to read), or a message ID or position (of the last
    message that is not read again). A run that was planned before can no longer commit. Raises INVALID_OPTION, also for
    a job that does not exist in the store; NotFoundError; or PositionError if the topic cannot be read from there.
    """
    topic = topic_name(topic)
    with planning.open_client(planning.of_job(service, job), Selection("topic", (topic,))) as client, store() as opened:
        holder = client if isinstance(client, planning.Holder) and isinstance(client.ends(topic), StockEnds) else None
        if holder is not None:
            holder.subscribe(topic)
        position = _position(client, topic, place)
        while True:
            before = _stored(opened, job).get(topic)
            after = Stored(position, before.epoch + 1 if before else 0)
            if opened.replace(job, topic, before, after):
                if holder is not None:
                    holder.keep_from(topic, position)
                return before, after


def _position(client: planning.PlanningClient, topic: str, place: str) -> Position:
    ends = client.ends(topic)
    if place in ("earliest", "latest"):
        return earliest(ends) if place == "earliest" else ends.last
    if place.isascii() and place.isdigit():
        position = _before_index(topic, place, ends)
    else:
        try:
            position = stock.parse(place)
        except InvalidRequestError as e:
            raise error("INVALID_OPTION", f"to: {e.message}") from e
    if isinstance(ends, StockEnds):
        position = stock.given(position)
    if loss := find_loss(topic, position, ends):
        raise error(loss.reason, loss.message, topic=topic)
    return position if isinstance(ends, StockEnds) else _completed(client, topic, position)


def _before_index(topic: str, text: str, ends: Ends) -> Position:
    if isinstance(ends, StockEnds):
        raise error("INVALID_OPTION", f"to: no sidecar writes {topic}, so it has no indexes: give a message ID")
    try:
        return Position.before(ends.last.incarnation, number(text, 0))
    except ValueError as e:
        raise error("INVALID_OPTION", f"to: {e}") from e


def _completed(client: planning.PlanningClient, topic: str, position: Position) -> Position:
    """Return the complete position of its message: a message ID alone fits every history of the topic.

    Raises POSITION_DIVERGED if the topic has a different message there.
    """
    if position.index < 0:
        return position
    try:
        found = client.position_at(topic, position.index)
    except (DamagedError, PositionError):
        return position  # the messages after it can still be read
    if not found.is_same(position):
        what = f"the message of {topic} with index {position.index} is {found}, not that of the position {position}"
        raise error("POSITION_DIVERGED", what, topic=topic)
    return found
