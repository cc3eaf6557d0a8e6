"""The consumer: a topic's messages into a database, each of them exactly once."""

import asyncio
import inspect
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from seqdedupe.client import Client as AsyncClient
from seqdedupe.client import TopicEnds
from seqdedupe.client.blocking import Client
from seqdedupe.client.waiting import OnWaiting
from seqdedupe.errors import SeqdedupeError, UnavailableError, error
from seqdedupe.limits import MAX_NAME_BYTES
from seqdedupe.message_id import Position
from seqdedupe.names import topic_name
from seqdedupe.services.consumer import database
from seqdedupe.services.consumer.config import ConsumerConfig
from seqdedupe.services.consumer.ownership import NOBODY, Lost, Ownership, Seen
from seqdedupe.services.consumer.tables import METADATA, make_tables
from seqdedupe.services.consumer.waiting import Arrivals, Stop, Stopped
from seqdedupe.services.consumer.work import KEEP_UP_SECONDS, Work
from seqdedupe.services.standing_by import Stillness

TAKE_OVER_SECONDS = 3.0
"""A process of which the row has said nothing for so long, by the clock of who stands by, has ended."""

LOOK_SECONDS = 0.5
"""Who stands by looks so often."""

_FIRST_AWAY_SECONDS = 0.1
_LONGEST_AWAY_SECONDS = 5.0
"""How long to wait for a database that cannot be used."""

Start = Position | Literal["earliest", "latest"]


class Consumer:
    """Applies a topic's messages to a database: `handle(connection, message)` for each, in the topic's order.

    **Exactly once**: what the handler writes with its connection is committed in the transaction that moves the
    consumer's position past the message, or not at all; whatever is killed and however often, and if several processes
    run the consumer (one works, the others stand by and take over within seconds). It covers what is written over that
    connection and nothing else: of a mail that the handler sends a second one may go out.

    A transaction has the messages that are there, at most `config.max_batch_messages`: many while it is behind, one
    when it has caught up. Where it fails it is cut in half, until the message that is to blame is alone, and is tried
    again `config.max_attempts` times. `config.poison` says what then becomes of it. A database that cannot be reached,
    is busy or ends a deadlock is waited for, and counts as no attempt.

    `name` is one row of `seqdedupe_consumers`, which is made with the consumer's other tables when they are not there.
    It belongs to one topic and one `purpose`: the handler's qualified name unless another is given. `start` counts when
    the name is new. With `in_batches` the handler is called with a list of messages, once in a transaction. It must not
    end the transaction, nor keep the connection. `on_waiting` is told what is waited for: it must not block.

    Raises INVALID_OPTION; `run` raises CONSUMER_CHANGED, HANDLER_FAILED with the handler's exception as its cause,
    TRANSACTION_ENDED, NOT_TRANSACTIONAL, OUTPUT_UNAVAILABLE or INVALID_OUTPUT if the tables cannot be made or used at
    the start, and what a `Reader` raises: `PositionError` if the topic was made anew or has lost what comes next.
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
            raise _option(what, "Handlers are plain functions, also under asyncio: they run in a thread of their own.")
        if inspect.iscoroutinefunction(handle):
            raise _option("the handler is a coroutine function", "Make it a plain function: it runs in a thread.")
        self.is_working = False
        """Whether this process works, and does not stand by."""
        self._client = client
        self._engine = engine
        self._handle = handle
        self._in_batches = in_batches
        self._start = start
        self._config = config
        self._on_waiting = on_waiting
        self._stop = Stop()
        self._ownership = Ownership(engine, self.name)
        self._work: Work | None = None

    @property
    def position(self) -> Position | None:
        """Up to where this process knows all to be committed; None before it has worked."""
        return Position.parse(self._work.position) if self._work is not None else None

    def stop(self) -> None:
        """Ends `run` after the transaction under way; for good. From any thread, and from a signal's handler."""
        self._stop.tell()

    def run(self, *, follow: bool = True) -> None:
        """Works until it is stopped; without `follow` up to the last message that was there when it began to read, or
        until another process that works has come so far.

        With a client of `seqdedupe.client.blocking`. The handler is called in this thread.
        """
        if not isinstance(self._client, Client):
            raise _option("run() takes a client of seqdedupe.client.blocking", "With another one await run_async().")
        self._run(self._client.on_loop, self._client.ends(self.topic), follow)

    async def run_async(self, *, follow: bool = True) -> None:
        """The same with a client of `seqdedupe.client`. The handler is called in a thread of its own.

        When it is cancelled the transaction under way ends first, and is committed; then it raises CancelledError.
        """
        if not isinstance(self._client, AsyncClient):
            raise _option("run_async() takes a client of seqdedupe.client", "With a blocking one call run().")
        client, ends = self._client, await self._client.ends(self.topic)
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
                self._run(client, ends, follow)
            except BaseException as e:  # noqa: BLE001 (whatever it is, whoever awaits gets it)
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
        thread.join()  # it has said its last word
        if cancelled:
            ended.exception()  # looked at: it is the cancellation that is told
            raise asyncio.CancelledError
        ended.result()

    def _run(self, client: AsyncClient, ends: TopicEnds, follow: bool) -> None:
        self._prepare(ends)
        failures = 0
        try:
            while not self._stop.is_told:
                try:
                    position = self._acquire(None if follow else ends.last)
                    failures = 0
                    if position is None:
                        return
                    self._consume(client, position, follow)
                    return
                except Lost:
                    continue
                except database.Away as e:
                    failures += 1
                    self._tell(e.failure)
                    self._stop.pause(min(_FIRST_AWAY_SECONDS * 2 ** min(failures, 16), _LONGEST_AWAY_SECONDS))
        except Stopped:
            return
        finally:
            self._let_go()

    def _prepare(self, ends: TopicEnds) -> None:
        earliest = Position.before(ends.last.incarnation, ends.first_index)
        start = self._start
        if not isinstance(start, Position):
            start = ends.last if start == "latest" else earliest
        try:
            with database.reaching():
                make_tables(self._engine)
                self._refused = database.without_transactions(self._engine)
                ours = sorted(self._refused.intersection(METADATA.tables))
                if ours:
                    raise database.not_transactional(ours[0])
                self._ownership.register(self.topic, self.purpose, start)
        except database.Away as e:
            raise e.failure from e

    def _acquire(self, until: Position | None) -> str | None:
        """Stands by until nobody else works; returns the position. None if whoever works has come so far."""
        stillness = Stillness(TAKE_OVER_SECONDS)
        first: Seen | None = None
        while True:
            self._stop.check()
            with database.reaching():
                now = self._ownership.look()
                is_over = stillness.has_lasted(now)
                if now is not None:
                    first = first or now
                    # One that has shown no sign of life may have ended, and left behind what is parked.
                    works = now != first and now.owner != NOBODY
                    if works and until is not None and _is_there(now.position, until):
                        return None
                    is_free = is_over or now.owner in (NOBODY, self._ownership.token)
                    if is_free and self._ownership.take(now):
                        return now.position
            self._stop.pause(LOOK_SECONDS)

    def _consume(self, client: AsyncClient, position: str, follow: bool) -> None:
        work = self._work = Work(
            self._engine,
            self._ownership,
            self._handle,
            self._stop,
            self._config,
            name=self.name,
            topic=self.topic,
            position=position,
            in_batches=self._in_batches,
            refused=self._refused,
        )
        reader = client.reader(self.topic, Position.parse(position), follow=follow, on_waiting=self._on_waiting)
        arrivals = Arrivals(reader, self._stop)
        self.is_working = True
        try:
            is_more = True
            while is_more:
                self._stop.check()
                messages = arrivals.take(self._config.max_batch_messages)
                if messages:
                    work.apply(messages)
                else:
                    is_more = arrivals.wait(KEEP_UP_SECONDS)
                work.keep_up()
        finally:
            self.is_working = False
            arrivals.close()

    def _tell(self, failure: UnavailableError) -> None:
        if self._on_waiting is not None:
            self._on_waiting(failure)

    def _let_go(self) -> None:
        # If it cannot be said, whoever stands by finds out by itself.
        with suppress(SQLAlchemyError):
            self._ownership.release()


def _is_there(position: str, until: Position) -> bool:
    now = Position.parse(position)
    return now.incarnation == until.incarnation and now.index >= until.index


def purpose_of(handle: Callable[..., object]) -> str:
    """The qualified name of a function, or of the class of what is called as one."""
    named: Any = handle if hasattr(handle, "__qualname__") else type(handle)
    return f"{named.__module__}.{named.__qualname__}"


def _checked(what: str, text: str) -> str:
    if not 1 <= len(text.encode(errors="replace")) <= MAX_NAME_BYTES or not text.isprintable():
        raise _option(f"{what} is {text[:80]!r}: it should be 1 to {MAX_NAME_BYTES} bytes that can be printed", None)
    return text


def _option(what: str, hint: str | None) -> SeqdedupeError:
    return error("INVALID_OPTION", what, hint=hint or "docs/consumer.md lists what a consumer takes.")
