"""The relay: it publishes the rows of the outbox to a topic. Each row is published once, and the rows of an aggregate
are published in the order of their commits. The relay carries out `steps`. The search for rows in a topic by their `id`
comes last."""

import asyncio
import logging
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np

from seqdedupe.batch import Batch, Int64s
from seqdedupe.client import BatchReceipt, Client, Credentials, Producer, ProducerConfig, Verdict
from seqdedupe.client.blocking.loop import run
from seqdedupe.client.connection import NOT_A_SIDECAR
from seqdedupe.client.route import Addresses
from seqdedupe.databases.failures import refuses_entry
from seqdedupe.errors import (
    ConfigurationError,
    FencedError,
    NotFoundError,
    PositionError,
    SeqdedupeError,
    UnavailableError,
)
from seqdedupe.figures import counted
from seqdedupe.limits import MAX_BATCH_BYTES, MAX_BATCH_ROWS, MAX_SEQUENCE_ID
from seqdedupe.names import partition_name, partition_of, producer_name, topic_name
from seqdedupe.services import Retries, Stillness, check_kind, check_target
from seqdedupe.services.activity import Activity, Service, State
from seqdedupe.services.activity import Lag as ServiceLag
from seqdedupe.services.outbox import steps
from seqdedupe.services.outbox.steps import FoundRows
from seqdedupe.services.outbox.store import Lag, OutboxStore, Route, RowPage, open_store

# -- The work of a relay: it does the steps. Meanwhile it waits for receipts and deletes the rows that they prove.

SWEEP_SECONDS = 10.0
"""The time between two looks at the whole table. Such a look finds rows that were restored, or that have no NotDup
receipt."""

ONCE_SECONDS = 10.0
"""A relay without `follow` waits for open transactions that prevent it from reading the remaining rows. It ends when it
has read no rows for this time."""

_BATCH_BYTES = 4 * 1024 * 1024
"""The approximate size of the batches in which a page is sent."""

_PAGES_IN_FLIGHT = 16
_DELETED_TOGETHER = 4
"""The number of pages that are deleted together."""

_CONFIG = ProducerConfig(
    max_batch_rows=MAX_BATCH_ROWS, max_batch_bytes=MAX_BATCH_BYTES, delivery_timeout_seconds=None
)  # no caller receives the error; rows that cannot be sent now stay in the table


@dataclass(slots=True)
class Counters:
    """The counts of a relay since the relay was created."""

    published: int = 0
    """The number of rows with a NotDup receipt."""
    found: int = 0
    """The number of rows that were already in the topic."""
    set_aside: int = 0
    renumbered: int = 0
    tokens_replaced: int = 0
    times_fenced: int = 0


class _SentPage(NamedTuple):
    page: RowPage
    receipt: BatchReceipt


class RelayWork:
    """The work of one relay, from the opening of its topics until the relay is fenced, fails or has finished."""

    def __init__(
        self,
        client: Client,
        store: OutboxStore,
        name: str,
        counters: Counters,
        report: Callable[[str], None],
        activity: Activity,
        retries: Retries,
    ) -> None:
        self._client = client
        self._store = store
        self._name = name
        self._counters = counters
        self._report = report
        self._activity = activity
        self._retries = retries
        self._producers: dict[str, Producer] = {}
        self.has_begun = False
        """Whether a sidecar has answered, or the relay has waited because there were no rows."""
        self._only_topic: str | None = None
        self._sent: deque[_SentPage] = deque()
        self._changed = asyncio.Condition()
        self._must_sweep = False
        self._swept_at = time.monotonic()
        self._after = steps.BEGINNING
        self._ahead: asyncio.Task[RowPage] | None = None
        self._read_at = time.monotonic()

    async def drive(self, work: steps.Steps, only_topic: str | None) -> None:
        """Run all steps. Raises the errors of the steps and of receipts."""
        self._only_topic = only_topic
        collecting = asyncio.create_task(self._collect())
        stepping = asyncio.create_task(self._step(work))
        try:
            await asyncio.wait({collecting, stepping}, return_when=asyncio.FIRST_COMPLETED)
            await (collecting if collecting.done() else stepping)
        finally:
            tasks = [collecting, stepping, *([] if self._ahead is None else [self._ahead])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for producer in self._producers.values():
                await producer.abort()

    async def _step(self, work: steps.Steps) -> None:
        answer: Any = None
        with suppress(StopIteration):
            while True:
                answer = await self._do(work.send(answer))

    async def _do(self, step: steps.Step) -> Any:
        store = self._store
        match step:
            case steps.ReadRows(after):
                return await self._read(after)
            case steps.ReadElsewhere():
                return await asyncio.to_thread(store.read_elsewhere)
            case steps.Publish(topic, page):
                for part in page.cut(_BATCH_BYTES):
                    await self._publish(self._producers[topic], part)
            case steps.Wait():
                self.has_begun = True
                self._activity.runs()
                self._retries.works()
                return await self._wait()
            case steps.AwaitLeft():
                is_over = time.monotonic() - self._read_at >= ONCE_SECONDS
                if is_over or not await asyncio.to_thread(store.has_more, steps.BEGINNING):
                    return False
                await asyncio.sleep(store.poll_seconds)
                return True
            case steps.Settle():
                async with self._changed:
                    await self._changed.wait_for(lambda: not self._sent)
            case steps.ReadState(number):
                return await asyncio.to_thread(store.state, number)
            case steps.OpenTopic(topic, token):
                return await self._open(topic, token)
            case steps.Find(topic, page, at_any_number):
                return await find(self._client, topic, self._name, page, at_any_number=at_any_number)
            case steps.Delete(page):
                self._counters.found += len(page)
                await asyncio.to_thread(store.delete, [page])
                self._activity.done(0, duplicates=len(page))
            case steps.SetRowsAside(page, reason):
                self._counters.set_aside += len(page)
                self._report(f"{counted(len(page), 'row is', 'rows are')} set aside: {reason}")
                await asyncio.to_thread(store.set_aside, page, reason)
                self._activity.done(0, set_aside=len(page))
            case steps.Renumber(page):
                self._counters.renumbered += len(page)
                self._report(f"publishing {counted(len(page), 'restored row')} again")
                await asyncio.to_thread(store.renumber, page)
            case steps.Tell(line):
                self._report(line)
            case steps.ReplaceToken(token):
                self._counters.tokens_replaced += 1
                self._report(
                    "the topic holds other rows under these numbers: the database was restored or failed over, and has "
                    "lost rows that are published; taking a new token"
                )
                await asyncio.to_thread(store.replace_token, token)
        return None

    async def _read(self, after: int) -> RowPage:
        """Return the page after this row. While the caller works on the page, the database prepares the next page."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and after == self._after:
            page = await ahead
        else:
            if ahead is not None:
                await ahead
            page = await asyncio.to_thread(self._store.read, after)
        self._after = after
        if len(page):
            self._read_at = time.monotonic()
            self._after = page.last
            self._ahead = asyncio.create_task(asyncio.to_thread(self._store.read, page.last))
        return page

    async def _open(self, topic: str, token: str) -> steps.OpenedProducer | str:
        own = token_name(self._name, token)
        try:
            if topic in self._producers:
                await self._producers.pop(topic).abort()  # of the earlier token
            highest = await self._fence(topic, own)
            producer = self._producers[topic] = self._client.producer(
                topic, own, _CONFIG, on_waiting=self._activity.waits
            )
            await producer.open()
            self.has_begun = True
        except NotFoundError as e:
            if e.reason != "TOPIC_NOT_FOUND" or topic == self._only_topic:
                raise
            return e.message
        except ConfigurationError as e:
            if e.reason != "INVALID_OPTION" or topic == self._only_topic:
                raise
            return e.message
        highest = max(highest, *(one.sequence_id for one in producer.persisted))
        return steps.OpenedProducer(own, tuple(one.sequence_id for one in producer.persisted), highest)

    async def _fence(self, topic: str, own: str) -> int:
        """Open all other producer names of this relay, which fences their owners: they cannot publish any more. Return
        the highest sequence ID that is persisted under these names."""
        is_ours = is_one_of(self._name)
        highest = -1
        for name in await self._known_names(topic):
            if is_ours(name) and name != own:
                other = self._client.producer(topic, name, _CONFIG)
                await other.open()
                highest = max(highest, *(one.sequence_id for one in other.persisted))
                await other.abort()
        return highest

    async def _known_names(self, topic: str) -> set[str]:
        try:
            found = await self._client.admin.topic(topic)
        except NotFoundError:
            return set()  # the topic is created when it is opened, or does not exist
        check_kind(found, _WHO)
        return await _names_of(self._client, topic, found.partitions)

    async def _publish(self, producer: Producer, page: RowPage) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._sent) < _PAGES_IN_FLIGHT)
        receipt = await producer.send_batch(
            page.payloads, page.sequence_ids, keys=page.keys if page.keys else None, properties=page.properties()
        )
        self._sent.append(_SentPage(page, receipt))
        async with self._changed:
            self._changed.notify_all()

    async def _collect(self) -> None:
        """Wait for receipts, in order, and delete the rows whose receipts prove that the rows are in the topic. A Dup
        receipt does not prove that the row is in the topic."""
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: bool(self._sent))
            proven: list[RowPage] = []
            done = 0
            for sent in list(self._sent)[:_DELETED_TOGETHER]:
                if done and not sent.receipt.is_over():
                    break
                result = await sent.receipt.until_durable()
                new = np.flatnonzero(result.verdicts == Verdict.NOT_DUP)
                self._must_sweep |= len(new) < len(sent.page)
                if len(new):
                    proven.append(sent.page.take(new))
                done += 1
            if proven:
                await asyncio.to_thread(self._store.delete, proven)
                self._activity.done(sum(map(len, proven)))
                self._retries.works()
            self._counters.published += sum(map(len, proven))
            async with self._changed:
                for _ in range(done):
                    self._sent.popleft()
                self._changed.notify_all()

    async def _wait(self) -> bool:
        """Wait until there may be more rows. Return whether to read the table from its beginning."""
        if self._must_sweep or time.monotonic() - self._swept_at >= SWEEP_SECONDS:
            self._must_sweep = False
            self._swept_at = time.monotonic()
            return True
        store = self._store
        if await asyncio.to_thread(store.has_more, self._after):
            await asyncio.sleep(store.poll_seconds)
        else:
            await _until_readable(store.file_number, store.idle_poll_seconds)
        return False


async def _names_of(client: Client, topic: str, partitions: int) -> set[str]:
    """Return the names of all producers of a topic or of its partitions."""
    parts = [partition_name(topic, k) for k in range(partitions)] if partitions else [topic]
    return {one.name for part in parts for one in await client.admin.producers(part)}


async def _until_readable(file_number: int | None, seconds: float) -> None:
    """Wait until the file is readable, or until this time has passed."""
    if file_number is None:
        await asyncio.sleep(seconds)
        return
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(file_number, readable.set)
    try:
        async with asyncio.timeout(seconds):
            await readable.wait()
    except TimeoutError:
        pass
    finally:
        loop.remove_reader(file_number)


STANDBY_SECONDS = 5.0
"""A fenced relay takes over if the oldest row has not been deleted for this time."""

_LOOK_SECONDS = 1.0
_RETRY_SECONDS = 1.0

_KIND = "{aggregatetype}"
_WHO = "a relay"

_log = logging.getLogger("seqdedupe.outbox")

T = TypeVar("T")


class Relay:
    """Publishes the rows of an outbox in the order of their numbers, and deletes the published rows. Each row is
    published once if its transaction committed, and otherwise never. This holds after any kill. A relay belongs to one
    event loop.

    `database` is a URL of SQLAlchemy. The topic may contain `{aggregatetype}`, which is replaced by the row's aggregate
    type. The producer names are `name`/token. Any number of relays may run for one outbox, with the same name. One
    relay works. The other relays stand by until the oldest row has not been deleted for `standby_seconds`.

    `report` is called with lines of text for a person. By default each line is logged as a warning of the logger
    `seqdedupe.outbox`.
    """

    def __init__(
        self,
        client: Client,
        database: str,
        topic: str,
        name: str,
        *,
        standby_seconds: float = STANDBY_SECONDS,
        report: Callable[[str], None] | None = None,
    ) -> None:
        """Raise InvalidRequestError for an invalid topic or name, ConfigurationError for an invalid URL."""
        self.counters = Counters()
        self.activity = Activity("outbox", name)
        """The counts and state, for `seqdedupe.services.metrics`."""
        self._oldest: tuple[int | None, float] = None, 0.0
        """The row that a relay would read first, and the time since which it has been this row."""
        self._client = client
        self._topic = topic if _KIND in topic else topic_name(topic)
        self._route: Route | None = None
        if _KIND in topic:
            self._route = lambda kind: topic_name(topic.replace(_KIND, kind))
            self._route("any")
        producer_name(token_name(name, "0" * 16))
        self._name = name
        self._store: OutboxStore = open_store(database)
        self._standby_seconds = standby_seconds
        self._has_begun = False
        """Whether a sidecar has answered, or there were no rows. From then on, the relay waits if a server that is not
        a sidecar answers."""
        self._report = report or _log.warning
        self._retries = Retries(self._report)

    async def run(self, *, follow: bool = True) -> None:
        """Relay without end. Without `follow`, end when all readable rows are published and deleted. A row is readable
        if no open transaction can add an earlier row.

        Raises:

        - ConfigurationError (INVALID_OUTBOX, OUTBOX_CHANGED) for an outbox that the relay cannot use.
        - ConfigurationError (INVALID_OPTION) for a topic of deduplication IDs, at the start and before the outbox is
          bound to the topic.
        - DataLossError if the topic has lost messages that the topic acknowledged.
        - NotFoundError if the topic does not exist.
        - AccessDeniedError if the sidecar does not know the caller, or the caller lacks a right.
        - UnavailableError if, at the start, a server that is not a sidecar answers, or the database does not exist or
          refuses the user.
        - Without `follow`: FencedError if another relay has taken over, and any UnavailableError.

        With `follow`, the relay stands by after FencedError, and tries again after UnavailableError (for a database,
        also at the start).
        """
        with self.activity.life():
            await self._run(follow=follow)

    async def _run(self, *, follow: bool) -> None:
        try:
            await self._open_at_last(lambda e: not follow or refuses_entry(e.__cause__))
            await self._check_sidecar(follow=follow)
            while True:
                try:
                    await self._blocking(self._store.bind, self._name, self._topic)
                    await self._relay(follow=follow)
                except FencedError as e:
                    self.counters.times_fenced += 1
                    if not follow:
                        raise
                    self._report(f"another relay works: {e.message}; standing by")
                    self.activity.failed(e)
                    self.activity.stands_by()
                    await self._stand_by()
                    self.activity.runs()
                except UnavailableError as e:
                    if not follow or (e.reason == NOT_A_SIDECAR and not self._has_begun):
                        raise
                    self._retries.failed(e)
                    self.activity.waits(e)
                    await asyncio.sleep(_RETRY_SECONDS)
                    await self._open_at_last()
                else:
                    return
        finally:
            # Start the thread at once: after Ctrl-C no other thread can be started.
            self._store.close()

    async def _check_sidecar(self, *, follow: bool) -> None:
        """Ask the sidecar before anything is changed in the database. While the outbox is empty, the relay makes no
        other call to the sidecar. Without this check, a wrong address, token or kind of topic would cause an error only
        with the first row.

        Raises:

        - NOT_A_SIDECAR if the first call shows that another server answers.
        - UNAUTHENTICATED; UNKNOWN_CALL for a sidecar without topics.
        - NOT_ALLOWED if the caller may not read the topic, because a relay must read the topic after a crash. If the
          topic depends on the row, this right is not checked.
        - INVALID_OPTION for a topic of deduplication IDs.
        - Without `follow`: any UnavailableError.

        With `follow`, the relay reports that the sidecar does not answer, and waits for the sidecar. All other problems
        cause errors when rows are published.
        """
        has_waited = False
        while True:
            try:
                await self._ask_sidecar()
            except UnavailableError as e:
                if not follow or (e.reason == NOT_A_SIDECAR and not has_waited):
                    raise
                has_waited = True
                self._retries.failed(e)
                self.activity.waits(e)
                await asyncio.sleep(_RETRY_SECONDS)
            else:
                break
        self._has_begun = True
        self.activity.runs()

    async def _ask_sidecar(self) -> None:
        try:
            await self._client.ends(self._route("any") if self._route else self._topic)
        except UnavailableError:
            raise
        except SeqdedupeError as e:
            if e.reason in ("UNKNOWN_CALL", "UNAUTHENTICATED") or (e.reason == "NOT_ALLOWED" and self._route is None):
                raise
        if self._route is None:
            await check_target(self._client, self._topic, _WHO)

    async def lag(self) -> Lag:
        """Return the lag of the relay, while the relay runs."""
        return await self._blocking(self._store.lag)

    def look_at_lag(self) -> ServiceLag | None:
        """Return the number of rows that wait, and the age of the oldest row; None if another relay works.

        The table does not contain the time of insertion. So the age is the time for which this row has been the first
        row, and the row's real age may be higher. The call asks the database and blocks. Raises UnavailableError.
        """
        if self.activity.state is State.STANDBY:
            return None
        rows, oldest = self._store.lag().rows, self._store.oldest()
        if oldest != self._oldest[0]:
            self._oldest = oldest, time.time()
        return ServiceLag(rows, int(self._oldest[1] * 1000))

    async def _open_at_last(self, is_final: Callable[[UnavailableError], bool] = lambda _: False) -> None:
        """Wait for the database, and open it again. Rows that were read over the old connections are not deleted."""
        while True:
            try:
                await self._blocking(self._store.open)
            except UnavailableError as e:
                if is_final(e):
                    raise
                self.activity.waits(e)
                self._retries.failed(e)
                await asyncio.sleep(_RETRY_SECONDS)
            else:
                return

    async def _stand_by(self) -> None:
        """Wait until the oldest row has not been deleted for the standby time."""
        stillness = Stillness(self._standby_seconds)
        while True:
            try:
                oldest = await self._blocking(self._store.oldest)
            except UnavailableError as e:
                self._retries.failed(e)
                await asyncio.sleep(_RETRY_SECONDS)
                await self._open_at_last()
                continue
            self._retries.works()
            if stillness.has_lasted(oldest) and oldest is not None:
                return
            await asyncio.sleep(min(_LOOK_SECONDS, self._standby_seconds))

    async def _relay(self, *, follow: bool) -> None:
        work = RelayWork(
            self._client, self._store, self._name, self.counters, self._report, self.activity, self._retries
        )
        try:
            await work.drive(steps.relay(self._topic, self._route, follow=follow), None if self._route else self._topic)
        finally:
            self._has_begun |= work.has_begun

    @staticmethod
    async def _blocking(work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.to_thread(work, *arguments)


def run_relay(
    address: Addresses,
    database: str,
    topic: str,
    name: str,
    *,
    follow: bool = True,
    credentials: Credentials | None = None,
    report: Callable[[str], None] | None = None,
    serving: Callable[[Service], AbstractContextManager[object]] = nullcontext,
) -> Counters:
    """Run `Relay.run` with a separate client, for threads. Blocks until the relay ends, and returns the counts. The
    relay runs within the context manager that `serving` makes for it."""

    async def work() -> Counters:
        async with Client(address, credentials) as client:
            one = Relay(client, database, topic, name, report=report)
            with serving(one):
                await one.run(follow=follow)
            return one.counters

    return run(work)


# -- The comparison, by `id`, of a topic's message at a sequence ID with the row that has this ID.

_NEAR_END = 65_536
"""The number of messages at the end of the topic that are read first: the messages of a killed relay are there."""

_ID = "id"

ANYWHERE = -1
"""A stand-in for a sequence ID: the message may have any sequence ID."""


def token_name(name: str, token: str) -> str:
    """Return the producer name of the relay NAME with a token."""
    return f"{name}/{token}"


def is_one_of(name: str) -> Callable[[str], bool]:
    """Return a function that tests whether a producer name belongs to the relay, with any token."""
    pattern = re.compile(re.escape(name) + "/[0-9a-f]{16}")
    return lambda producer: pattern.fullmatch(producer) is not None


@dataclass(frozen=True, slots=True)
class Wanted:
    """The rows of a page to look for. These rows need not be adjacent."""

    page: RowPage
    at_any_number: bool
    is_ours: Callable[[str], bool]
    ids: frozenset[bytes]

    def there(self, seen: Sequence["SeenTopic"]) -> Int64s:
        """Return the places in the page of the rows that were found."""
        rows = [
            row
            for row, (number, one) in enumerate(zip(self.page.sequence_ids.tolist(), self.page.ids(), strict=True))
            if any(one in part.ids.get(ANYWHERE if self.at_any_number else number, ()) for part in seen)
        ]
        return np.array(rows, np.int64)


@dataclass(slots=True)
class SeenTopic:
    """What the relay has read from one topic or partition."""

    is_whole: bool = False
    """Whether the log still contains its first message."""
    ids: dict[int, set[bytes]] = field(default_factory=dict)
    """The `id`s found at the wanted sequence IDs. If the sequence ID does not matter: the wanted `id`s, at ANYWHERE."""
    lowest: dict[str, int] = field(default_factory=dict)
    """The lowest sequence ID in the log for each producer name."""
    persisted: dict[str, int] = field(default_factory=dict)
    """The highest sequence ID that was ever persisted under each producer name."""

    def take(self, batch: Batch, wanted: Wanted) -> None:
        """Record the wanted `id`s in a batch."""
        for place, name in enumerate(batch.names()):
            if not wanted.is_ours(name):
                continue
            rows = np.arange(len(batch))
            if len(batch.producer_indexes):
                rows = np.flatnonzero(batch.producer_indexes == place)
            numbers = batch.sequence_ids[rows]
            self.lowest[name] = min(self.lowest.get(name, MAX_SEQUENCE_ID), int(numbers[0]))
            if not wanted.at_any_number:
                rows = rows[np.isin(numbers, wanted.page.sequence_ids)]
            for row in rows.tolist():
                one = batch.properties_of(row).get(_ID, "").encode()
                if one in wanted.ids:
                    number = ANYWHERE if wanted.at_any_number else int(batch.sequence_ids[row])
                    self.ids.setdefault(number, set()).add(one)

    def lacks(self, number: int) -> bool:
        """Return whether a sequence ID that was not found was certainly never published under any of the producer
        names. For ANYWHERE, return whether the row was certainly never published. The result is certain if the log
        still contains all messages at and after this sequence ID."""
        if self.is_whole:
            return True
        return all(
            self.lowest.get(name, MAX_SEQUENCE_ID) <= number
            for name, persisted in self.persisted.items()
            if persisted >= max(number, 0)
        )


async def find(client: Client, topic: str, name: str, page: RowPage, *, at_any_number: bool) -> FoundRows:
    """Find the rows of a page that the topic contains, and the rows for which this cannot be decided.

    Read the last messages of the topic first. If some rows are not among them, read the whole topic.
    """
    while True:
        try:
            return await _find(client, topic, Wanted(page, at_any_number, is_one_of(name), frozenset(page.ids())))
        except PositionError as e:
            if e.reason != "POSITION_TRIMMED":  # retention has removed messages meanwhile: there is less to read now
                raise


async def _find(client: Client, topic: str, wanted: Wanted) -> FoundRows:
    partitions = (await client.admin.topic(topic)).partitions
    parts = [partition_name(topic, k) for k in range(partitions)] if partitions else [topic]
    seen = [SeenTopic() for _ in parts]
    ends = [await client.ends(part) for part in parts]
    begin_at = [max(one.first_index, one.last.index + 1 - _NEAR_END) for one in ends]
    for number, part in enumerate(parts):
        await _read(client, part, seen[number], begin_at[number], ends[number].last.index + 1, wanted)
    if len(wanted.there(seen)) < len(wanted.page):
        for number, part in enumerate(parts):
            first_index = ends[number].first_index
            await _read(client, part, seen[number], first_index, begin_at[number], wanted)
            seen[number].is_whole = first_index == 0
            producers = await client.admin.producers(part)
            seen[number].persisted = {one.name: one.persisted for one in producers if wanted.is_ours(one.name)}
    there = wanted.there(seen)
    missing = np.setdiff1d(np.arange(len(wanted.page)), there)
    untold = [row for row in missing.tolist() if not _is_certainly_missing(wanted, row, seen)]
    return FoundRows(there, np.array(untold, np.int64))


async def _read(client: Client, topic: str, seen: SeenTopic, first_index: int, stop_index: int, wanted: Wanted) -> None:
    if first_index >= stop_index:
        return
    async with client.reader(topic, first_index, stop_index=stop_index) as reader:
        async for stored in reader.batches():
            seen.take(stored.batch, wanted)


def _is_certainly_missing(wanted: Wanted, row: int, seen: list[SeenTopic]) -> bool:
    number = ANYWHERE if wanted.at_any_number else int(wanted.page.sequence_ids[row])
    key = wanted.page.keys[row]
    if key is not None:
        return seen[partition_of(key, b"", len(seen))].lacks(number)
    return all(part.lacks(number) for part in seen)
