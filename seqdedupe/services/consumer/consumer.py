"""The consumer: it applies the messages of a topic to a database, each message exactly once.

Begin with `Consumer`, the main loop of a process. In a partitioned topic, each process works on a share of the
partitions (`PartitionShares`).
"""

import asyncio
import inspect
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal, NamedTuple

from sqlalchemy import Connection, Engine, Row, select
from sqlalchemy.exc import SQLAlchemyError

from seqdedupe.client import Client as AsyncClient
from seqdedupe.client import TopicEnds
from seqdedupe.client.blocking import Client
from seqdedupe.client.blocking.loop import event_loop
from seqdedupe.client.blocking.loop import run as run_on_loop
from seqdedupe.client.connection import NOT_A_SIDECAR, Backoff
from seqdedupe.client.reader import PartitionedPosition
from seqdedupe.client.route import OnWaiting, logged
from seqdedupe.databases.tables import make_tables
from seqdedupe.errors import InvalidRequestError, SeqdedupeError, UnavailableError, error
from seqdedupe.figures import counted
from seqdedupe.limits import MAX_NAME_BYTES
from seqdedupe.message_id import Position
from seqdedupe.names import partition_name, topic_name
from seqdedupe.services import Stillness
from seqdedupe.services.activity import Activity, Lag, State, answer_of, lag_of_all
from seqdedupe.services.consumer import database
from seqdedupe.services.consumer.database import (
    CONSUMERS,
    KEEP_UP_SECONDS,
    METADATA,
    NOBODY,
    Held,
    Lost,
    PartOwnership,
    Processes,
    RowLease,
    SeenRow,
    check_transactions,
    fair_share,
    row_name,
)
from seqdedupe.services.consumer.dead_letters import DeadLetterPublisher, check_topic
from seqdedupe.services.consumer.message_arrivals import LOOK_SECONDS, Arrivals, Stop, Stopped, is_there, wait_for_any
from seqdedupe.services.consumer.work import FIRST_AWAY_SECONDS, LONGEST_AWAY_SECONDS, ConsumerConfig, Work

Start = Position | PartitionedPosition | Literal["earliest", "latest"]

Found = dict[str, TopicEnds]
"""The ends of the topic, or of its partitions in order, by full name."""

_log = logging.getLogger("seqdedupe.consumer")


class Consumer:
    """Applies a topic's messages to a database: calls `handle(connection, message)` for each message, in the topic's
    order.

    **Exactly once**: one transaction contains the handler's writes over `connection` and the move of the consumer's
    position past the message. The writes are committed together with this move, or not at all. This holds after any
    number of kills of any process. It also holds if several processes run the consumer: one process works, and the
    other processes stand by and take over within seconds. The guarantee covers only the writes over that connection. If
    the handler sends a mail, it may send the mail twice.

    **A partitioned topic** is shared. Each process works on about the same number of partitions, in one thread. If a
    process ends, the other processes take over its partitions. Each partition has a separate order and position.

    A transaction contains the messages that have arrived: at most `config.max_batch_messages`, for at most
    `config.longest_transaction_ms`. A consumer that is behind has many messages in a transaction; a consumer that has
    caught up has one. A transaction that fails is cut in half until the message that causes the failure is alone. The
    consumer tries that message `config.max_attempts` times. Then `config.poison` decides. The consumer waits for the
    database if the database cannot be reached, is read-only, full or busy, or ends a deadlock. Such an attempt is not
    counted.

    `name` is the name of one row of `seqdedupe_consumers`. The consumer makes this table and its other tables if they
    do not exist. The row belongs to one topic and one `purpose`: by default the handler's qualified name. `start` is
    used only if the name is new. With `in_batches` the consumer calls the handler with a list of messages, once in a
    transaction. The handler must not end the transaction, nor keep the connection. While the consumer waits, it calls
    `on_waiting` with an UnavailableError that contains the cause, in the consumer's thread or the client's.
    `on_waiting` must not block, and its exceptions are logged. By default the consumer logs a warning with the logger
    `seqdedupe.consumer`.

    Raises INVALID_OPTION. `run` raises:

    - CONSUMER_CHANGED.
    - HANDLER_FAILED, with the handler's exception as its cause.
    - TRANSACTION_ENDED, NOT_TRANSACTIONAL.
    - INVALID_OUTPUT if the tables cannot be made or used. At the start also if the database does not exist or refuses
      the user.
    - The errors of a `Reader`: `PositionError` if the topic was deleted and recreated, or has lost the next messages.
    """

    def __init__(
        self,
        client: Client | AsyncClient,
        topic: str,
        name: str,
        engine: Engine,
        handle: Callable[[Connection, Any], object],
        *,
        in_batches: bool = False,
        start: Start = "earliest",
        purpose: str | None = None,
        config: ConsumerConfig = ConsumerConfig(),  # noqa: B008
        on_waiting: OnWaiting | None = None,
    ) -> None:
        self.topic = topic_name(topic)
        self.name = _checked("a consumer's name", name)
        self.purpose = _checked("the purpose", purpose_of(handle) if purpose is None else purpose)
        given: object = engine
        if not isinstance(given, Engine):
            what = f"the engine is a {type(given).__name__}: it should be one of sqlalchemy.create_engine"
            raise _option(what, "Handlers are plain functions, also under asyncio: they run in a separate thread.")
        if inspect.iscoroutinefunction(handle):
            raise _option("the handler is a coroutine function", "Make it a plain function: it runs in a thread.")
        begins: object = start
        if not isinstance(begins, Position | PartitionedPosition) and begins not in ("earliest", "latest"):
            what = f"the start is {begins!r:.80}: it should be 'earliest', 'latest' or a position"
            raise _option(what, "Client.position_at gives the position of the message with an index.")
        self._client = client
        self._engine = engine
        self._handle = handle
        self._in_batches = in_batches
        self._start = start
        self._config = config
        self.activity = Activity("consumer", self.name)
        """The counts and state, for `seqdedupe.services.metrics`."""
        self._tell_waiting = logged(on_waiting or _log_waiting)
        self._stop = Stop()
        self._ownership = RowLease(engine, self.name)
        self._work: Work | None = None
        self._has_all = False
        self._shares: PartitionShares | None = None
        self._found_by: tuple[AsyncClient, asyncio.AbstractEventLoop] | None = None

    def _on_waiting(self, failure: UnavailableError) -> None:
        self.activity.waits(failure)
        self._tell_waiting(failure)

    def look_at_lag(self) -> Lag | None:
        """Return the lag of this process on the partitions that it works on; None if another process does the work. The
        call asks the sidecar and blocks: make it from a separate thread. Raises SeqdedupeError, TimeoutError."""
        positions = {} if self._shares is None else self._shares.positions
        if self._has_all and self._work is not None:
            positions = {self.topic: Position.parse(self._work.position)}
        if self._found_by is None or not positions:
            if self._shares is not None and self.activity.state is State.RUNNING:
                self.activity.stands_by()
            return None
        client, loop = self._found_by
        return answer_of(lag_of_all(client, positions), loop)

    @property
    def is_working(self) -> bool:
        """Whether this process works, on at least one partition, and is not a standby process."""
        return self._has_all or (self._shares is not None and self._shares.is_working)

    @property
    def position(self) -> Position | None:
        """The position up to which this process knows that all messages are committed. None before the process has
        worked. Also None for a partitioned topic, whose positions are in the rows of the partitions."""
        return Position.parse(self._work.position) if self._work is not None else None

    def stop(self) -> None:
        """End `run` permanently, after the current transaction. May be called from any thread, and from a signal
        handler."""
        self._stop.tell()

    def run(self, *, follow: bool = True) -> None:
        """Work until the consumer is stopped. Without `follow`, end when this process, or another process that works,
        has applied the last message that existed at the start of reading. Then try the parked messages that are due,
        and keep the other parked messages.

        This needs a client of `seqdedupe.client.blocking`. The handler is called in this thread.
        """
        if not isinstance(self._client, Client):
            raise _option("run() takes a client of seqdedupe.client.blocking", "With another one await run_async().")
        client = self._client.on_loop
        self._found_by = client, event_loop()
        with self.activity.life(), suppress(Stopped):
            self._run(client, run_on_loop(lambda: self._find(client)), follow)

    async def run_async(self, *, follow: bool = True) -> None:
        """Do the same as `run`, with a client of `seqdedupe.client`. The handler is called in a separate thread.

        After a cancellation the current transaction first ends and is committed. Then this call raises CancelledError.
        """
        if not isinstance(self._client, AsyncClient):
            raise _option("run_async() takes a client of seqdedupe.client", "With a blocking one call run().")
        client = self._client
        self._found_by = client, asyncio.get_running_loop()
        with self.activity.life():
            await self._run_in_thread(client, follow)

    async def _run_in_thread(self, client: AsyncClient, follow: bool) -> None:
        try:
            found = await self._find(client)
        except Stopped:
            return
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def tell(failure: BaseException | None) -> None:
            if failure is None:
                ended.set_result(None)
            else:
                ended.set_exception(failure)

        def work() -> None:
            failure: BaseException | None = None
            try:
                with suppress(Stopped):
                    self._run(client, found, follow)
            except BaseException as e:  # noqa: BLE001 (any exception goes to the task that awaits)
                failure = e
            loop.call_soon_threadsafe(tell, failure)

        thread = threading.Thread(target=work, name=f"seqdedupe-{self.name}")
        thread.start()
        cancelled = False
        while not ended.done():
            try:
                await asyncio.wait({ended})
            except asyncio.CancelledError:
                cancelled = True
                self.stop()
        thread.join()  # the thread has nothing more to do
        if cancelled:
            # read the result, so that asyncio does not report it as unread: the caller gets the cancellation
            ended.exception()
            raise asyncio.CancelledError
        ended.result()

    async def _find(self, client: AsyncClient) -> Found:
        """Look up the topic's ends. Wait for a sidecar that does not answer, as a reader does. Raises Stopped,
        NotFoundError, NOT_A_SIDECAR."""
        backoff = Backoff(FIRST_AWAY_SECONDS, LOOK_SECONDS)
        while True:
            if self._stop.is_told:
                raise Stopped
            try:
                if self._config.dead_letter_topic:
                    await check_topic(client, self._config.dead_letter_topic)
                return await self._look_up(client)
            except UnavailableError as e:
                if e.reason == NOT_A_SIDECAR:
                    raise
                self._on_waiting(e)
                await asyncio.sleep(backoff.next_seconds())

    async def _look_up(self, client: AsyncClient) -> Found:
        try:
            return {self.topic: await client.ends(self.topic)}
        except InvalidRequestError as e:
            if e.reason != "TOPIC_IS_PARTITIONED":
                raise
        topics = [partition_name(self.topic, k) for k in range((await client.admin.topic(self.topic)).partitions)]
        return {topic: await client.ends(topic) for topic in topics}

    def _run(self, client: AsyncClient, found: Found, follow: bool) -> None:
        names = [self.name] if self.topic in found else [row_name(self.name, k) for k in range(len(found))]
        _checked("a consumer's name, with that of a partition behind it,", names[-1])
        letters = DeadLetterPublisher(client, self._engine, names, self._stop, self._on_waiting)
        starts = self._starts(found)
        if self.topic in found:
            self._prepare(lambda: self._ownership.register(self.topic, self.purpose, starts[0]))
            until = None if follow else found[self.topic].last
            self._live(lambda: self._consume(client, letters, until), letters, self._let_go)
            return

        def begin(name: str, topic: str, hold: RowLease, position: str) -> PartitionWork:
            work = self._begin(name, topic, hold, position)
            return PartitionWork(work, self._arrivals(client, topic, position, follow))

        shares = self._shares = PartitionShares(
            self._engine, self.name, list(found), self._stop, begin, self._on_waiting
        )
        self._prepare(lambda: shares.register(self.purpose, starts))
        ends = None if follow else [one.last for one in found.values()]

        def work_on() -> None:
            try:
                shares.work(self._config.max_batch_messages, ends, letters.keep_up)
            finally:
                shares.drop_all()

        self._live(work_on, letters, shares.leave)

    def _live(self, work: Callable[[], None], letters: DeadLetterPublisher, leave: Callable[[], None]) -> None:
        """Run until the work has ended. Raises Stopped."""

        def live() -> None:
            work()
            letters.finish()

        try:
            self._insist(live)
        finally:
            letters.close()
            leave()

    def _insist(self, work: Callable[[], None]) -> None:
        """Run the work until it has ended. The work restarts from the stored position if another process was faster, if
        the database was unavailable, or if a server that is not a sidecar answered. Raises Stopped."""
        failures = 0
        while True:
            self._stop.check()
            began = time.monotonic()
            try:
                return work()
            except Lost:
                continue
            except (database.Away, UnavailableError) as e:
                failures = 1 if time.monotonic() - began > LONGEST_AWAY_SECONDS else failures + 1
                self._on_waiting(e.failure if isinstance(e, database.Away) else e)
                self._stop.pause(min(FIRST_AWAY_SECONDS * 2 ** min(failures, 16), LONGEST_AWAY_SECONDS))
                if isinstance(e, database.Away) and e.before_next is not None:
                    self._insist(e.before_next)

    def _starts(self, found: Found) -> list[Position]:
        """Return the start position of each topic or partition."""
        start = self._start
        if isinstance(start, Position | PartitionedPosition):
            given = list(start.partitions) if isinstance(start, PartitionedPosition) else [start]
            if isinstance(start, Position) != (self.topic in found) or len(given) != len(found):
                what = f"the start is {str(start)[:80]!r}, and {self.topic} has {counted(len(found), 'partition')}"
                raise _option(what if self.topic not in found else f"{self.topic} has no partitions", None)
            return given
        if start == "latest":
            return [one.last for one in found.values()]
        return [Position.before(one.last.incarnation, one.first_index) for one in found.values()]

    def _prepare(self, register: Callable[[], None]) -> None:
        """Prepare the tables. If the database is unavailable, wait for the database, as `run` does later during the
        work. Raises Stopped, INVALID_OUTPUT, NOT_TRANSACTIONAL."""

        def prepare() -> None:
            with database.reaching(at_start=True):
                make_tables(self._engine, METADATA)
                self._refused = database.without_transactions(self._engine)
                ours = sorted(self._refused.intersection(METADATA.tables))
                if ours:
                    raise database.not_transactional(ours[0])
                check_transactions(self._engine)
                register()

        self._insist(prepare)

    def _acquire(self, until: Position | None) -> str | None:
        """Stand by until no other process works, and return the stored position. Return None if the working process has
        reached `until`."""
        stillness = Stillness(database.TAKE_OVER_SECONDS)
        held = Held(self._on_waiting)
        first: SeenRow | None = None
        while True:
            self._stop.check()
            with database.reaching():
                now = self._ownership.look()
                held.look(now is None, self._ownership.holder)
                is_over = stillness.has_lasted(now)
                if now is not None:
                    first = first or now
                    # A process that has shown no activity may have ended, and may have left parked messages.
                    works = now != first and now.owner != NOBODY
                    if works and until is not None and is_there(now.position, until):
                        return None
                    is_free = is_over or now.owner in (NOBODY, self._ownership.token)
                    if is_free and self._ownership.take(now):
                        return now.position
            self.activity.stands_by()
            self._stop.pause(LOOK_SECONDS)

    def _begin(self, name: str, topic: str, ownership: RowLease, position: str) -> Work:
        return Work(
            self._engine,
            ownership,
            self._handle,
            self._stop,
            self._config,
            name=name,
            topic=topic,
            position=position,
            in_batches=self._in_batches,
            refused=self._refused,
            on_waiting=self._on_waiting,
            activity=self.activity,
        )

    def _arrivals(self, client: AsyncClient, topic: str, position: str, follow: bool) -> Arrivals:
        return Arrivals(client.reader(topic, Position.parse(position), follow=follow, on_waiting=self._on_waiting))

    def _consume(self, client: AsyncClient, letters: DeadLetterPublisher, until: Position | None) -> None:
        position = self._acquire(until)
        if position is None:
            return
        self.activity.runs()
        work = self._work = self._begin(self.name, self.topic, self._ownership, position)
        arrivals = self._arrivals(client, self.topic, position, until is None)
        more = partial(arrivals.take_more, self._config.max_batch_messages, self._stop, KEEP_UP_SECONDS)
        self._has_all = True
        try:
            while work.has_messages or not arrivals.is_over:
                self._stop.check()
                if not work.has_messages:
                    work.take(arrivals.take(self._config.max_batch_messages))
                if work.has_messages:
                    work.apply(more)
                else:
                    wait_for_any([arrivals], self._stop, KEEP_UP_SECONDS)
                work.keep_up()
                letters.keep_up()
            work.finish()
        finally:
            self._has_all = False
            arrivals.close()

    def _let_go(self) -> None:
        # If the database cannot record the release, the standby process detects the end by a timeout.
        with suppress(SQLAlchemyError):
            self._ownership.release()


def _log_waiting(failure: UnavailableError) -> None:
    _log.warning("waiting: %s %s", failure, failure.hint)


def purpose_of(handle: Callable[..., object]) -> str:
    """Return the qualified name of a function, or of the class of a callable object."""
    named: Any = handle if hasattr(handle, "__qualname__") else type(handle)
    return f"{named.__module__}.{named.__qualname__}"


def _checked(what: str, text: str) -> str:
    if not 1 <= len(text.encode(errors="replace")) <= MAX_NAME_BYTES or not text.isprintable():
        raise _option(f"{what} is {text[:80]!r}: it should be 1 to {MAX_NAME_BYTES} bytes that can be printed", None)
    return text


def _option(what: str, hint: str | None) -> SeqdedupeError:
    return error("INVALID_OPTION", what, hint=hint or "docs/guides/consumer.md lists the options of a consumer.")


class PartitionWork(NamedTuple):
    """The objects that work on one partition."""

    work: Work
    arrivals: Arrivals


Begin = Callable[[str, str, RowLease, str], PartitionWork]
"""The function that begins the work on a partition. Its parameters are the row's name, the topic, the hold on the row,
and the position."""


class PartitionShares:
    """The share of one process. `work` is the main loop, in one thread."""

    def __init__(
        self,
        engine: Engine,
        consumer: str,
        topics: Sequence[str],
        stop: Stop,
        begin: Begin,
        on_waiting: OnWaiting | None = None,
    ) -> None:
        self._engine = engine
        self._topics = topics
        self._stop = stop
        self._begin = begin
        self._names = [row_name(consumer, k) for k in range(len(topics))]
        self._processes = Processes(engine, consumer, on_waiting)
        self._holds = [PartOwnership(engine, name, self._processes) for name in self._names]
        self._parts: dict[int, PartitionWork] = {}
        self._looked_at = float("-inf")

    @property
    def is_working(self) -> bool:
        """Whether this process has at least one partition."""
        return bool(self._parts)

    @property
    def positions(self) -> dict[str, Position]:
        """The positions of the partitions that this process has, by topic. Any thread may read them."""
        return {self._topics[k]: Position.parse(part.work.position) for k, part in list(self._parts.items())}

    def register(self, purpose: str, starts: Sequence[Position]) -> None:
        """Insert the rows of the partitions, see `RowLease.register`."""
        for hold, topic, start in zip(self._holds, self._topics, starts, strict=True):
            hold.register(topic, purpose, start)

    def work(self, most: int, ends: Sequence[Position] | None, beside: Callable[[], None]) -> None:
        """Work until every partition has reached these ends, in this or another process, and no parked message is due.

        Without ends, work until a stop is requested, which raises Stopped. The partitions are processed in turn. A
        transaction contains at most `most` messages. Between the turns, `beside` is called. Raises Away, and the errors
        of the work and of readers.
        """
        while True:
            if time.monotonic() - self._looked_at >= LOOK_SECONDS:
                self._look()
            beside()
            is_idle = True
            for k in list(self._parts):
                self._stop.check()
                is_idle = not self._turn(k, most) and is_idle
            if is_idle:
                if ends is not None and self._have_come_to(ends) and self._finish():
                    return
                wait_for_any([part.arrivals for part in self._parts.values()], self._stop, LOOK_SECONDS)

    def _turn(self, k: int, most: int) -> bool:
        part = self._parts[k]
        try:
            if not part.work.has_messages:
                part.work.take(part.arrivals.take(most))
            worked = part.work.has_messages
            if worked:
                part.work.apply(partial(part.arrivals.take_more, most, self._stop, KEEP_UP_SECONDS))
            part.work.keep_up()
        except Lost:
            self._drop(k)
            self._looked_at = float("-inf")
            return True
        return worked

    def _look(self) -> None:
        """Release the partitions above this process's share. If the process has fewer partitions than its share, take
        free partitions."""
        with database.reaching():
            self._processes.beat()
            # The order of these two queries matters: a process that has a partition by the second query is among the
            # processes that are alive.
            rows = self._rows()
            living = self._processes.living()
            token = self._processes.token
            mine = [k for k, row in enumerate(rows) if row.owner == token]
            for k in set(self._parts).difference(mine):
                self._drop(k)
            share = fair_share(token, living, (row.owner for row in rows), len(rows))
            for k in mine[share:]:
                self._drop(k)
                self._holds[k].release()
            mine = mine[:share]
            for k, row in enumerate(rows):
                is_free = row.owner == NOBODY or row.owner not in living
                if is_free and len(mine) < share and self._holds[k].take(SeenRow(row.owner, row.beat, row.position)):
                    mine.append(k)
        for k in mine:
            if k not in self._parts:
                self._parts[k] = self._begin(self._names[k], self._topics[k], self._holds[k], rows[k].position)
        self._looked_at = time.monotonic()

    def _rows(self) -> list[Row[str, str, int, str]]:
        wanted = select(CONSUMERS.c.name, CONSUMERS.c.owner, CONSUMERS.c.beat, CONSUMERS.c.position)
        with self._engine.begin() as connection:
            found = {row.name: row for row in connection.execute(wanted.where(CONSUMERS.c.name.in_(self._names)))}
        return [found[name] for name in self._names]

    def _have_come_to(self, ends: Sequence[Position]) -> bool:
        """Return whether all partitions have reached these ends, and each partition has an owner that is alive. A
        partition without a living owner may still have parked messages."""
        with database.reaching():
            rows = self._rows()
        working = self._processes.shown | {self._processes.token}
        return all(is_there(row.position, end) and row.owner in working for row, end in zip(rows, ends, strict=True))

    def _finish(self) -> bool:
        for k, part in list(self._parts.items()):
            try:
                part.work.finish()
            except Lost:
                self._drop(k)
                self._looked_at = float("-inf")
                return False
        return True

    def _drop(self, k: int) -> None:
        if (part := self._parts.pop(k, None)) is not None:
            part.arrivals.close()

    def drop_all(self) -> None:
        """Close all partitions. Later they restart from the stored positions."""
        self._looked_at = float("-inf")
        for k in list(self._parts):
            self._drop(k)

    def leave(self) -> None:
        """Release all partitions, after `drop_all`. If the database cannot record this, the other processes detect it
        by a timeout."""
        with suppress(SQLAlchemyError):
            self._processes.leave()
