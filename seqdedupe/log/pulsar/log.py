"""A Pulsar topic as a log, with one writer at a time. Every reader judges the entries by the rule of terms.

A log begins with the points in a snapshot, or without a snapshot at the topic's beginning. From there the log reads the
topic once. Each confirmed entry then extends the known part of the topic. To find older messages, the log reads from
one of the points.

The sidecar has a durable subscription, which keeps the entries that are needed together with the sidecar's last durable
snapshot. Pulsar may remove earlier entries, by Pulsar's own retention.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from seqdedupe.batch import Int32s, Int64s
from seqdedupe.entry_properties import BEGUN, SCHEMA_VERSION, EntryOwner
from seqdedupe.errors import DamagedError, NotFoundError, SeqdedupeError, error
from seqdedupe.format.headers import ownership_of
from seqdedupe.limits import FlushInterval, Retention
from seqdedupe.log.contract import ANY_BYTES, DamageFound, Entries, Location, Outcome, Records, Skipped, TopicSchema
from seqdedupe.log.pulsar import entries
from seqdedupe.log.pulsar.admin_url import PulsarAdmin
from seqdedupe.log.pulsar.broker_wire import Brokers, TopicReader, open_reader
from seqdedupe.log.pulsar.content import Content
from seqdedupe.log.pulsar.entries import MAX_ENTRY_BYTES, EncodedBatch, EntrySettings
from seqdedupe.log.pulsar.places import Point, bytes_of_points, points_of_bytes
from seqdedupe.log.pulsar.policies import Looks, check_alone, check_stays, guard
from seqdedupe.log.pulsar.topic_owner import (
    ADDRESS,
    Answers,
    evicting,
    is_terminated,
    not_owner,
    wait_until_free,
)
from seqdedupe.log.pulsar.wholes import schema_of
from seqdedupe.log.pulsar.writer import (
    EntryWriter,
    PendingAppends,
    SettledEntry,
    check_fits,
    open_writer,
    records_of_batch,
    records_of_control,
)
from seqdedupe.message_id import NOWHERE, MessageId
from seqdedupe.names import whole_of
from seqdedupe.pulsar_wire.batches import SentEntry
from seqdedupe.pulsar_wire.pulsar_api_pb2 import NONE, CompressionType

logger = logging.getLogger("seqdedupe.log")

MOVE_SECONDS = 10.0
"""The time between two moves of the subscription: each move takes calls of the admin URL."""


@dataclass(slots=True)
class PulsarResources:
    """The resources that all logs of a sidecar share."""

    instance_name: str
    """The instance name. No other sidecar has the same name."""
    address: str
    """The address of this sidecar, which is in markers and in the topic's statistics. It is known before a log is
    opened for writing."""
    clock_ms: Callable[[], int]
    claim_opening: Callable[[str, int], Awaitable[int]]
    """A function of a topic and an opening number that Pulsar knows. It returns a number above this number and above
    all numbers that it has returned for the topic; the number is durable."""
    admin: PulsarAdmin
    answers: Answers
    brokers: Brokers
    """The brokers, for producers, for readers, and for the limit on the size of an entry."""
    unhurried: PulsarAdmin | None = None
    """The admin client for repeated requests that may be slow. Without it, `admin` is used."""
    may_change_policies: bool = False
    """Whether a topic's own policies are set if they are not safe."""
    looks: Looks = field(default_factory=Looks)
    compression: CompressionType.ValueType = NONE
    """The compression of native entries whose messages no stock producer has sent."""

    @property
    def subscription(self) -> str:
        """The durable subscription by which Pulsar keeps the entries that this sidecar needs."""
        return f"seqdedupe-{self.instance_name}"


class PulsarLog:
    """The log of one topic. It satisfies `seqdedupe.log.contract.Log`, and is made by `PulsarLogs.open`.

    The outcome of a failed append is always unknown. If the append of a batch failed, its first rows may be stored, as
    a separate batch. If the topic has another writer, `open_for_writing` raises NOT_OWNER, with `owner_address` if it
    is known.
    """

    replays_what_is_certain = True

    def __init__(
        self,
        shared: PulsarResources,
        topic: str,
        incarnation: int,
        settings: EntrySettings,
        place: bytes = b"",
        earlier: Mapping[str, int] | None = None,
        begins_at: MessageId | None = None,
    ) -> None:
        """Make the log. `place` is the place in a snapshot. `earlier` contains the sequence IDs of producers before the
        first marker, because Pulsar may have removed the entries, or nobody reads them again: entries before
        `begins_at` are not read. Raises STORE_DAMAGED, NEWER_FORMAT for an invalid place."""
        points = points_of_bytes(incarnation, place) if place else [Point.start(incarnation)]
        self.incarnation = incarnation
        self.is_closed = False
        self._shared = shared
        self._topic = topic
        self._settings = settings
        self._schema: TopicSchema | None = None
        self._content = Content(
            self._open_reader,
            topic,
            points,
            lambda: self._limit,
            self._look_at_ledgers,
            partial(shared.admin.ledgers, topic),
            self._find_end,
            earlier or {},
            begins_at,
        )
        self._first_ledger_id = NOWHERE.ledger_id
        """All ledgers before this one are gone, as of the last look."""
        self._moves_at = 0.0
        """The earliest time of the next move of the subscription."""
        self._last_ms = 0
        self._max_entry_bytes = MAX_ENTRY_BYTES
        """The entry limit, as it was last found."""
        self._name_number = 0
        self._is_begun = False
        """Whether the topic's properties are known to say that it has had an owner."""
        self._writer: EntryWriter | None = None
        self._opening: PendingAppends | None = None
        self._reading: asyncio.Task[None] | None = None
        self._guarding: asyncio.Task[None] | None = None

    async def _open_reader(self, start: MessageId | None) -> TopicReader:
        return await open_reader(self._shared.brokers, self._topic, start, self._settings.format)

    async def _find_end(self, after: MessageId) -> MessageId | None:
        try:
            return await self._shared.admin.end_after(self._topic, after)
        except SeqdedupeError as e:
            logger.warning("how %s ends is not known now: %s", self._topic, e)
            return None

    @property
    def _end(self) -> Point:
        return self._content.places.end

    @property
    def _limit(self) -> Point:
        """The point up to which everything is certain."""
        return self._opening.settled if self._opening is not None else self._end

    @property
    def place(self) -> str:
        return self._topic

    @property
    def is_empty(self) -> bool:
        """Whether nothing was found in the topic, from any producer."""
        return self._end.message_id == NOWHERE and not self._content.counts.earlier

    @property
    def _has_schema(self) -> bool:
        return self._settings.version >= SCHEMA_VERSION

    @property
    def schema(self) -> TopicSchema | None:
        return self._schema

    @property
    def entry_format(self) -> str:
        return self._settings.format.value

    @property
    def first_index(self) -> int:
        return self._content.places.first.next_index

    @property
    def certain_index(self) -> int:
        return self._limit.next_index

    @property
    def size_bytes(self) -> int:
        return self._end.size_bytes - self._content.places.first.size_bytes

    @property
    def damage_found(self) -> DamageFound:
        return DamageFound()

    @property
    def skipped(self) -> Skipped:
        counts = self._content.counts
        return Skipped(counts.void, counts.repeats, counts.foreign, counts.earlier)

    # Writing.

    def check(self, batch: bytes) -> None:
        check_fits(self._settings, batch, self._max_entry_bytes)

    def append(self, batch: bytes, rows: int, column_bytes: int, sent: SentEntry | None = None) -> None:
        if (opening := self._open_now()).failed:
            return
        now_ms, part = self._now_ms(), EncodedBatch(batch, rows, column_bytes)
        at = opening.owner, opening.next_number, opening.next_index, now_ms
        how = opening.max_entry_bytes, self._shared.compression, sent
        opening.append(records_of_batch(self._settings, *at, part, *how), now_ms)

    def append_control(self, body: bytes) -> None:
        if (opening := self._open_now()).failed:
            return
        now_ms = self._now_ms()
        at = opening.owner, opening.next_number, opening.next_index, now_ms
        opening.append(records_of_control(self._settings, *at, body, opening.max_entry_bytes), now_ms)

    def _open_now(self) -> PendingAppends:
        if self._opening is None:
            raise error("INTERNAL", "an append to a log that is not open for writing")
        return self._opening

    def _now_ms(self) -> int:
        """Return the time by the clock. It never goes back within a topic."""
        self._last_ms = max(self._last_ms, self._end.publish_time_ms, self._shared.clock_ms())
        return self._last_ms

    def flush_every(self, interval: FlushInterval) -> None:
        """Do nothing: an entry that the broker has confirmed is as durable as the broker makes it."""

    def flush(self) -> None:
        """Do nothing, for the same reason."""

    async def open_for_writing(self, term: int, token: bytes, settle: Callable[[Outcome], None]) -> int:
        await self.let_go()
        owner = EntryOwner(self.incarnation, term, ownership_of(token))
        opening: PendingAppends | None = None
        failed = ""
        marked: asyncio.Future[MessageId] = asyncio.get_running_loop().create_future()

        def hear(settled: SettledEntry) -> None:
            nonlocal failed
            if opening is not None:
                self._hear(opening, settled)
                return
            failed = settled.failure or failed
            if not marked.done():
                marked.set_result(settled.doubtful or NOWHERE)

        try:
            await check_stays(self._topic, self.incarnation, self._shared.admin)
            if why := await self._look_at_policies(self._shared.admin):
                raise error("LOG_REFUSED", why)
            self._writer = writer = await self._open_writer(hear)
            self._name_number = writer.name_number + 1
            marker = entries.marker_message(self.incarnation, term, token, self._settings, self._end.next_index)
            writer.append([marker._replace(event_time_ms=self._now_ms())])
            receipt = await marked
            if not failed:
                await self._content.read_on(receipt)
                await check_alone(self._topic, self._shared.admin, writer.producer_name)
                await self._record_begun()
            if failed:
                raise error("LOG_REFUSED", f"{self._topic} cannot be written: {failed}")
            if self._end.standing.owner != owner:
                if self._end.standing.owner.term < term:
                    raise error("LOG_REFUSED", f"{self._topic} has not taken the marker of term {term}")
                await self.let_go()
                return self._end.standing.owner.term
        except BaseException:
            await self.let_go()
            raise
        self._opening = opening = PendingAppends(owner, writer, self._content.places, settle, self._max_entry_bytes)
        writer.was_read(self._end.message_id)
        unhurried = self._shared.unhurried or self._shared.admin
        look = partial(self._look_at_policies, unhurried)
        self._guarding = asyncio.get_running_loop().create_task(guard(self._topic, unhurried, opening, look))
        return 0

    async def _has_begun(self) -> bool:
        return (await self._shared.admin.properties(self._topic)).get(BEGUN) == str(self.incarnation)

    async def _record_begun(self) -> None:
        """Record that the topic has entries of sidecars, before any message is confirmed: once they are trimmed,
        entries of others may be left, and look like those from before the first marker."""
        if self._is_begun or not self._end.standing.owner.term:
            return
        try:
            if not await self._has_begun():
                await self._shared.admin.set_properties(self._topic, {BEGUN: str(self.incarnation)})
            self._is_begun = True
        except SeqdedupeError as e:
            logger.warning("%s: its property %s cannot be set now: %s", self._topic, BEGUN, e)

    async def _open_writer(self, hear: Callable[[SettledEntry], None]) -> EntryWriter:
        shared = self._shared
        try:
            schema = await schema_of(self._topic, shared.admin) if self._has_schema else None
            self._schema = schema.shown if schema is not None else None
            return await open_writer(
                shared.brokers,
                self._topic,
                shared.instance_name,
                self._name_number,
                partial(shared.claim_opening, self._topic),
                {ADDRESS: shared.address},
                hear,
                self._settings.format,
                schema,
            )
        except SeqdedupeError as e:
            # The error may come from a broker that reports a terminated topic as still held by the last producer.
            if await is_terminated(self._topic, shared.admin):
                why = f"{self._topic} was terminated in Pulsar: it takes nothing more, for good"
                raise error("TOPIC_TERMINATED", why) from e
            if e.reason != "NOT_OWNER":
                raise
            marked = self._content.marked_address
            raise await not_owner(e, shared.admin, self._topic, shared.address, shared.instance_name, marked) from e

    async def _look_at_policies(self, admin: PulsarAdmin) -> str:
        """Return the reason why nothing should be acknowledged, if the topic's policies are not safe now; otherwise an
        empty text."""
        await self._learn_limits(admin)
        may_change = self._shared.may_change_policies
        looks = self._shared.looks
        return await looks.why_unsafe(admin, self._topic, may_change=may_change)

    async def _learn_limits(self, admin: PulsarAdmin) -> None:
        """Ask for the present limit of an entry: the lower of its brokers' limit and its policies' limit. If a request
        has no answer, keep the known limit."""
        try:
            own = await admin.policy(whole_of(self._topic) or self._topic, "maxMessageSize")
            of_brokers = await self._shared.brokers.max_entry_bytes()
            self._max_entry_bytes = min(own, of_brokers) if isinstance(own, int) and own > 0 else of_brokers
        except SeqdedupeError as e:
            logger.warning("how large an entry of %s may be is not known now: %s", self._topic, e)
        if self._opening is not None:
            # Batches checked under a higher limit are still in flight. If one is refused, the opening ends.
            self._opening.max_entry_bytes = max(self._opening.max_entry_bytes, self._max_entry_bytes)

    async def let_go(self) -> None:
        """See `Log.let_go`."""
        if self._guarding is not None:
            self._guarding.cancel()
            self._guarding = None
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.cancel()
        if self._opening is not None:
            # The stored part of an unsettled append is read again as a whole.
            self._content.places.go_back(self._opening.settled)
            self._opening = None
        if reading is not None:
            await asyncio.wait([reading])
        if self._writer is not None:
            writer, self._writer = self._writer, None
            await writer.close()

    def _hear(self, opening: PendingAppends, settled: SettledEntry) -> None:
        """Handle what the writer of an opening reports."""
        if opening is not self._opening or opening.failed:
            return
        if settled.confirmed is not None:
            opening.confirm(settled.confirmed, self._shared.clock_ms())
            opening.tell()
        if settled.failure is not None:
            opening.fail(settled.failure)
        elif settled.doubtful is not None:
            self._reading = asyncio.get_running_loop().create_task(self._clear_up(opening, settled.doubtful))

    async def _clear_up(self, opening: PendingAppends, receipt: MessageId) -> None:
        """Read the topic up to an append whose receipt proves nothing."""
        try:
            found = await self._content.read_on(receipt, within_batches=True)
        except SeqdedupeError as e:
            opening.fail(f"it cannot be found out: {e}")
            return
        if opening.failed:
            return
        own = [one for one in found if one.owner == opening.owner]
        if own:
            opening.found(own)
            opening.tell()
        owner = self._end.standing.owner
        if owner != opening.owner:
            opening.fail(f"another owner has the topic, in term {owner.term}")
        elif not own:
            opening.fail("Pulsar has answered an entry that is not in the topic")
        elif not opening.failed:
            opening.writer.was_read(own[-1].after.message_id)

    async def wait_until_free(self) -> None:
        shared = self._shared
        async with evicting(self._topic, shared.admin, shared.answers):
            await wait_until_free(self._topic, shared.admin, shared.brokers, has_schema=self._has_schema)

    # Reading.

    async def begin(self, covered_index: int) -> None:
        """Check whether the topic continues from the place, at least up to this index.

        Raises NO_STATE, LOG_DAMAGED, LOG_UNREADABLE.
        """
        self._content.places.trim(await self._content.left(await self._look_at_ledgers()))
        await self._content.begin(covered_index)
        if self._end.message_id == NOWHERE and await self._has_begun():
            # Another sidecar may have written the first marker after this one has read.
            await self._content.begin(covered_index)
            if self._end.message_id == NOWHERE:
                raise error("NO_STATE", f"{self._topic} had entries of sidecars, and none is left")

    @property
    def earlier(self) -> dict[str, int]:
        """See `Log.earlier`."""
        return self._content.earlier

    async def replay(self, from_index: int) -> AsyncGenerator[Entries, None]:
        try:
            # No other reader may read on for an owner: the owner reads on itself, and settles by the result.
            async for entries in self._content.replay(from_index, reads_on=self._opening is None):
                yield entries
        except DamagedError:
            # If another topic has taken the name, its entries say nothing about this log.
            with suppress(NotFoundError):
                await check_stays(self._topic, self.incarnation, self._shared.admin)
            raise

    async def wait_for_more(self) -> None:
        await self._content.wait_for_more()

    async def read(self, from_index: int, stop_index: int, max_bytes: int, most_bytes: int = ANY_BYTES) -> Records:
        return await self._content.read(from_index, stop_index, max_bytes, most_bytes)

    async def next_readable(self, from_index: int) -> int:
        return self._content.next_readable(from_index)

    async def locate_time(self, publish_time_ms: int, stop_index: int) -> int:
        return await self._content.locate_time(publish_time_ms, stop_index)

    async def locate_bytes(self, from_index: int, size_bytes: int, stop_index: int) -> int:
        return await self._content.locate_bytes(from_index, size_bytes, stop_index)

    async def locate(self, index: int) -> Location:
        return await self._content.locate(index)

    def known_message_ids(self, indexes: Int64s) -> tuple[Int64s, Int64s, Int32s]:
        return self._content.known_message_ids(indexes)

    # Snapshots and retention.

    def place_at(self, next_index: int) -> bytes:
        places, needed = self._content.places, self._content.needed
        points, last = places.below(next_index), places.at(next_index - 1)
        if needed.next_index < next_index and needed.size_bytes > last.size_bytes:
            # Pulsar may remove the entries before this point.
            last = needed
        return bytes_of_points(self.incarnation, points if last is points[-1] else [*points, last])

    async def snapshot_is_durable(self, place: bytes) -> None:
        now_seconds = asyncio.get_running_loop().time()
        if not place or now_seconds < self._moves_at:
            return
        self._moves_at = now_seconds + MOVE_SECONDS
        needed = points_of_bytes(self.incarnation, place)[-1]
        admin, subscription = self._shared.admin, self._shared.subscription
        if needed.message_id.entry_id >= 0:
            # Somebody may have deleted the subscription.
            await admin.create_subscription(self._topic, subscription)
            await admin.keep_from(self._topic, subscription, needed.message_id)
            self._content.needed = needed
        await self._look_at_ledgers()

    async def _look_at_ledgers(self) -> int:
        self._first_ledger_id = await self._shared.admin.first_ledger(self._topic)
        return self._first_ledger_id

    async def may_trim_to(self, covered_index: int, retention: Retention) -> int:
        """Return the first index that Pulsar's own retention had kept at the last check."""
        left = await self._content.left(self._first_ledger_id)
        return min(left.next_index, self._content.places.at(covered_index - 1).next_index)

    async def trim(self, below_index: int) -> None:
        """Record what is gone: Pulsar has removed it already."""
        left = await self._content.left(self._first_ledger_id)
        if left.next_index <= below_index:
            self._content.places.trim(left)

    async def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._shared.looks.forget(self._topic)
            await self.let_go()
            await self._content.close()
