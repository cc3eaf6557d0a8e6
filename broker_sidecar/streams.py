"""All streams that are being served: how many there may be, and which one gives way to another."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from broker_sidecar.connections import taken_from
from broker_sidecar.rpc import Context, abort, encoded, method_of_call, parse_small
from broker_sidecar.security.permissions import Permissions, allowed_so_far
from broker_sidecar.security.subject import ANONYMOUS, Subject, caller
from broker_sidecar.shares import (
    MAX_HELD_BYTES,
    OF_NOBODY,
    READING_PART,
    TICK_SECONDS,
    Budget,
    CallerShares,
    Share,
    Use,
)
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.tasks import retrieve
from seqdedupe.topic.message_search import LOOK_BYTES

M = TypeVar("M", bound=Message)

FIRST_MESSAGE_SECONDS = 10.0
"""By then a stream has said what it is for."""

IDLE_SECONDS = 1.0
"""After so long without a word to or from its client, and with nothing under way, a stream can give way."""

UNREAD_SECONDS = 5.0
"""A stream whose client has read nothing for so long can be ended when others wait for memory."""

LEFT_SECONDS = 10.0
"""By then after the end of a stream its client has taken what was written before. Otherwise its connection ends: in no
other way gRPC gives up what it has for it."""

COPIES = 2
"""While an answer is written gRPC has it too."""

ANSWER_BYTES = LOOK_BYTES
"""Of a call that looks into a log, or lists a thousand producers."""

TURN_SECONDS = 10.0
"""So long such a call waits for its turn. Then it is refused, and its client calls again."""

EXPORTS_AT_ONCE = 8
"""Each has a copy of all numbers of its topic until it ends. One caller may have half of them."""

CONNECTION_SHARE = 2
"""One TCP connection may have the n-th part of all streams. (Of Unix sockets nobody says which connection it is.)"""

CALLER_SHARE = 2
"""One caller may have the n-th part of all streams, and more only while no other caller needs a place."""

UNKNOWN_PART = 16
"""The n-th part of all streams, as far as unknown callers may have so many, is kept for them: probes that watch the
health. They take no place of a known caller."""


class Stream:
    """One stream that is being served, by a task of its own."""

    def __init__(self, context: Context, budget: Budget, subject: Subject, shares: CallerShares) -> None:
        """`budget` is that of the memory for its answers and what is in flight."""
        self.subject = subject
        self.use = shares.of(subject.name)
        self.allowed = allowed_so_far()
        """Judged again when the rules change."""
        self.connection: str = context.peer()
        self._taken = taken_from(self.connection)
        self.share = Share(budget, self.use)
        self._reserved_bytes = 0
        self.writing_bytes = 0
        """Of what is being written gRPC has a copy. When the stream has ended, it has that until the client takes it,
        or goes away."""
        self._method = method_of_call()
        self.frames_in_flight = 0
        self.moved_at = time.monotonic()
        """When a message last went, or one came that had to do with what the stream is for."""
        self.writing_since: float | None = None
        self.ended_because: SeqdedupeError | None = None
        self._context = context
        self._shares = shares
        self._task: asyncio.Task[None] | None = None
        """Once it has begun."""

    async def begin(self) -> None:
        """Sends the initial metadata. Raises why the stream was ended meanwhile.

        grpcio counts them as sent once they, or the first message, have been written: when that is cancelled, they
        would go out again with the status, and the client would never see the call's end. So they go by themselves,
        and are waited for.
        """
        self._context.add_done_callback(self._written)  # type: ignore[arg-type]
        await self._context.send_initial_metadata(())
        if self.ended_because is not None:
            raise self.ended_because
        self._task = asyncio.current_task()

    async def read(self) -> Any:
        """The client's next message, or `grpc.aio.EOF`. Not before it may send more, by its share of bytes a second."""
        await self._rest()
        return await self._read()

    async def _rest(self) -> None:
        if rest_seconds := self._shares.rest_seconds(self.use, time.monotonic()):
            await asyncio.sleep(rest_seconds)

    async def _read(self) -> Any:
        data = await self._context.read()
        if data is not grpc.aio.EOF:
            self._method.received += 1
            self._taken.messages += 1
            self._taken.size += len(data)
            self._shares.spend(self.use, len(data), time.monotonic())
        return data

    def moves(self) -> None:
        """What the client said last has to do with what the stream is for. One that says nothing is a silent one."""
        self.moved_at = time.monotonic()

    async def read_first(self) -> Any:
        """`read`, for the first message. Raises STREAM_IDLE if it does not come in time."""
        await self._rest()
        try:
            async with asyncio.timeout(FIRST_MESSAGE_SECONDS):
                return await self._read()
        except TimeoutError as e:
            raise error(
                "STREAM_IDLE", f"no message came on this stream within {FIRST_MESSAGE_SECONDS:.0f} seconds"
            ) from e

    async def write(self, data: bytes) -> None:
        """Sends a message; returns when the client has room for it."""
        self.share.take(len(data))
        await self._write(data)
        self._written()

    async def reserve(self, size: int, least: int) -> int:
        """Returns when there is memory for an answer of so many bytes, or not much less, but `least`; how many.

        What the last one had is kept for it, unless another stream waits whose client has shown that it reads.
        """
        kept = self._reserved_bytes
        if kept and not self.share.is_others_turn():
            more = COPIES * size - kept
            if more <= 0 or self.share.fits(more):
                self.share.take(more)
                self._reserved_bytes += more
                return size
            if kept >= COPIES * least:
                return kept // COPIES
        self.release()
        await self.share.reserve(COPIES * size)
        self._reserved_bytes = COPIES * size
        return size

    def reserve_now(self, size: int, why: str) -> None:
        """The same, where nobody waits. Raises QUEUE_FULL with this text, or SHARE_EXCEEDED."""
        self.release()
        self.share.check(COPIES * size, why)
        self.share.take(COPIES * size)
        self._reserved_bytes = COPIES * size

    async def reserve_in_turn(self, least: int = 0) -> int:
        """`reserve`, for a call that holds `ANSWER_BYTES`, or as much as `least` says; not more than half of what its
        caller's share lets it hold. Raises QUEUE_FULL or SHARE_EXCEEDED when its turn does not come in time."""
        limit = self.use.limits.bytes_in_flight
        most = ANSWER_BYTES if limit is None else max(1, min(ANSWER_BYTES, limit // (2 * COPIES)))
        size = max(most, least)
        try:
            async with asyncio.timeout(TURN_SECONDS):
                return await self.reserve(size, size)
        except TimeoutError:
            self.reserve_now(size, f"readers have held the memory that a call needs for {TURN_SECONDS:.0f} seconds")
            return size

    async def write_reserved(self, data: bytes) -> None:
        """`write`, of what memory was reserved for. It may be a little more."""
        self.share.take(COPIES * len(data) - self._reserved_bytes)
        self._reserved_bytes = len(data)
        await self._write(data)
        self._reserved_bytes += self.writing_bytes
        self.writing_bytes = 0
        self.share.has_been_read = True

    async def write_each(self, answers: Iterator[bytes], most_bytes: int) -> None:
        """Sends these answers, each of which is made when there is memory for so many bytes."""
        while True:
            await self.reserve(most_bytes, most_bytes)
            if (answer := next(answers, None)) is None:
                break
            await self.write_reserved(answer)
            del answer  # until there is another one
        self.release()

    def release(self) -> None:
        """Nothing is reserved any more."""
        reserved, self._reserved_bytes = self._reserved_bytes, 0
        self.share.give_back(reserved)

    async def _write(self, data: bytes) -> None:
        self.writing_since = time.monotonic()
        self.writing_bytes = len(data)
        await self._context.write(data)
        self.writing_since = None
        self.moved_at = time.monotonic()
        self._method.sent += 1

    def _written(self, _: object = None) -> None:
        """gRPC has nothing more of this stream."""
        written, self.writing_bytes = self.writing_bytes, 0
        self.share.give_back(written)

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Where the stream is ended, why it is comes in place of the cancellation."""
        try:
            yield
        except asyncio.CancelledError:
            if self.ended_because is not None:
                raise self.ended_because from None
            raise

    def end(self, why: SeqdedupeError) -> None:
        """Ends it with this error, soon; the first one counts."""
        if self.ended_because is None:
            self.ended_because = why
            if self._task is not None:
                self._task.cancel()


class Streams:
    """The streams of all services, and the memory that their clients share."""

    def __init__(
        self, limit: int, permissions: Permissions, end_connection: Callable[[str], None] = lambda _: None
    ) -> None:
        """`end_connection` ends the connection of this peer."""
        self._limit = limit
        self._end_connection = end_connection
        self._open: set[Stream] = set()
        self._left: set[Stream] = set()
        """Those that have ended, and whose clients have not taken what was written."""
        self.shares = permissions.shares
        permissions.on_replaced.append(self._judge_again)
        self.budget = Budget(self._relieve, MAX_HELD_BYTES)
        self.reading = Budget(self._relieve, MAX_HELD_BYTES // READING_PART, within=self.budget)
        """Of streams and calls that publish nothing."""
        self._exporting: set[Stream] = set()
        self._to_export: set[Stream] = set()
        """Those that wait for a place among them."""
        self._answering: set[Stream] = set()
        """Calls with one large answer: they take no places."""
        self.is_draining = False
        self.gave_way = self.unread = 0
        """So many were ended to make room for another, or because their clients read nothing while others waited for
        the memory."""

    def __len__(self) -> int:
        """How many are open."""
        return len(self._open)

    @property
    def limit(self) -> int:
        """How many there may be."""
        return self._limit

    def peers(self) -> Iterator[str]:
        """From where those came that are open."""
        return (stream.connection for stream in self._open)

    def handler(
        self,
        serve: Callable[[Any, Context, Stream], Awaitable[None]],
        *,
        publishes: bool = False,
        is_call: bool = False,
    ) -> Callable[[Any, Context], Awaitable[None]]:
        """The handler of a streaming call: `serve` with its requests or request, and the stream. That counts, unless it
        is a call with one answer."""

        async def handle(request: Any, context: Context) -> None:
            stream = Stream(context, self.budget if publishes else self.reading, caller(), self.shares)
            try:
                with self._answered(stream) if is_call else self._serving(stream):
                    await stream.begin()
                    await serve(request, context, stream)
            except Exception as e:  # noqa: BLE001 (whatever it is, the caller gets an answer)
                await abort(context, e)

        return handle

    def call(
        self,
        kind: type[M],
        find: Callable[[str], Awaitable[object]],
        answer: Callable[[M, Stream], Awaitable[Message]],
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        """The handler of a call with one answer that takes a `kind`, and holds much while it is made: what it reads of
        a log, or the answer. It takes turns with the readers for the memory (`reserve_in_turn`), from before it begins
        until the client has its answer. `find` looks for its topic, so that a call about none does not wait."""

        async def serve(data: bytes, context: Context, stream: Stream) -> None:
            request: Any = parse_small(kind, data)
            await find(request.topic)
            await stream.reserve_in_turn()
            await stream.write_reserved(encoded(await answer(request, stream), context))

        # On the wire a call with one answer is as one with a stream of them.
        return grpc.unary_stream_rpc_method_handler(self.handler(serve, is_call=True))

    @contextmanager
    def _serving(self, stream: Stream) -> Iterator[None]:
        self._make_room_in_share(stream)
        self._make_room(stream)
        self._open.add(stream)
        expiry = _at_expiry(stream)
        try:
            with stream.ending():
                yield
        finally:
            if expiry is not None:
                expiry.cancel()
            self._open.discard(stream)
            self._leave(stream)

    @contextmanager
    def _answered(self, stream: Stream) -> Iterator[None]:
        self._answering.add(stream)
        try:
            with stream.ending():
                yield
        finally:
            self._answering.discard(stream)
            self._leave(stream)

    def _leave(self, stream: Stream) -> None:
        """What gRPC still has for a stream that has ended it has for a while, if there is memory for that."""
        stream.release()
        if not stream.writing_bytes:
            return
        self._left.add(stream)
        delay_seconds = LEFT_SECONDS if self.budget.free_bytes > 0 else 0.0
        asyncio.get_running_loop().call_later(delay_seconds, self._give_up, stream)

    def _give_up(self, stream: Stream) -> None:
        self._left.discard(stream)
        if stream.writing_bytes:
            self._end_connection(stream.connection)

    async def export(self, stream: Stream, answers: Iterator[bytes], most_bytes: int) -> None:
        """`write_each` of what is a copy of a whole topic. There are few at once, and the others wait for their turn:
        who has fewest comes first. One whose client reads nothing gives way to those that wait."""
        self._to_export.add(stream)
        try:
            while not self._may_export(stream.use):  # noqa: ASYNC110 (time alone shows that a client reads nothing)
                await asyncio.sleep(TICK_SECONDS)
        finally:
            self._to_export.discard(stream)
        self._exporting.add(stream)
        try:
            await stream.write_each(answers, most_bytes)
        finally:
            self._exporting.discard(stream)

    def _may_export(self, use: Use) -> bool:
        exports = Counter(one.use for one in self._exporting)
        has_place = exports.total() < EXPORTS_AT_ONCE and exports[use] < max(1, EXPORTS_AT_ONCE // CALLER_SHARE)
        if has_place and exports[use] == min(exports[one.use] for one in self._to_export):
            return True
        until = time.monotonic() - UNREAD_SECONDS
        unread = [
            one
            for one in self._exporting
            if one.writing_since is not None and one.writing_since <= until
            if exports[use] < exports[one.use] or one.use is use
        ]
        if unread and not has_place:
            # One place is enough. Until it has left, it stays the one.
            longest = min(unread, key=lambda one: one.writing_since or until)
            self.unread += longest.ended_because is None
            self._end(longest, "this stream's client reads nothing, and others wait for the place of its export")
        return False

    def _make_room_in_share(self, new: Stream) -> None:
        """Lets another stream of the caller give way if need be. Raises SHARE_EXCEEDED."""
        own = [stream for stream in self._open if stream.use is new.use]
        # Of Unix sockets nobody says which connection it is.
        new.use.check("connections", len({stream.connection for stream in (*own, new)}))
        if (limit := new.use.limits.streams) is not None and len(own) >= limit and not self._gives_way(own, limit):
            raise new.use.exceeded("streams", f"{len(own)} streams are open")

    def _make_room(self, new: Stream) -> None:
        """Lets another stream give way if need be. Raises TOO_MANY_STREAMS."""
        if not new.connection.startswith("unix:"):
            share = max(1, self._limit // CONNECTION_SHARE)
            own = [stream for stream in self._open if stream.connection == new.connection]
            among = [stream for stream in own if new.subject.name or not stream.subject.name]
            if len(own) >= share and not self._gives_way(among, share):
                raise _too_many(share)
        unknown = [stream for stream in self._open if not stream.subject.name]
        if not new.subject.name:
            if len(self._open) >= self._limit and not self._gives_way(unknown, self._limit):
                raise _too_many(self._limit)
            return
        # Where nobody is asked who they are, nobody is unknown.
        kept = 0 if new.subject.name == ANONYMOUS else min(self._limit // UNKNOWN_PART, OF_NOBODY.streams or 0)
        free = self._limit - len(self._open) - max(0, kept - len(unknown))
        if free <= 0 and not self._another_gives_way(new, unknown, kept):
            raise _too_many(self._limit - kept)

    def _another_gives_way(self, new: Stream, unknown: list[Stream], kept: int) -> bool:
        """Ends a stream for a known caller's while there are as many as there may be. Whether one could be.

        It is the one that was silent for longest, but three things come before that. Unknown callers with more than
        what is kept for them give way, by a stream that is in use if need be. So does a caller with more than its share
        to one with less. And a caller that would have more than its share leaves the other known ones theirs.
        """
        share = max(1, self._limit // CALLER_SHARE)
        by_caller: dict[Use, list[Stream]] = {}
        for stream in self._open:
            if stream.subject.name:
                by_caller.setdefault(stream.use, []).append(stream)
        own = by_caller.get(new.use, [])
        if len(unknown) > kept:
            most = unknown
        elif own and len(own) >= share:
            return self._gives_way(own, self._limit)
        else:
            most = max(by_caller.values(), key=len)
            if len(most) <= share:
                return self._gives_way((one for streams in by_caller.values() for one in streams), self._limit)
        if not self._gives_way(most, self._limit):
            self.gave_way += 1
            longest = min(most, key=lambda stream: (stream.frames_in_flight > 0, stream.moved_at))
            self._end(
                longest, f"this stream gave way to another caller's: {len(most)} of {self._limit} are its caller's"
            )
        return True

    def _gives_way(self, among: Iterable[Stream], most: int) -> bool:
        """Ends the one of these that was silent for longest. Whether one could be."""
        until = time.monotonic() - IDLE_SECONDS
        idle = [stream for stream in among if not stream.frames_in_flight and stream.moved_at <= until]
        if not idle:
            return False
        self.gave_way += 1
        longest = min(idle, key=lambda stream: stream.moved_at)
        self._end(longest, f"this stream gave way to another: {most} are open, and it was silent for longest")
        return True

    def _end(self, stream: Stream, why: str) -> None:
        self._open.discard(stream)
        self._answering.discard(stream)
        stream.end(error("STREAM_IDLE", why))

    def _relieve(self, budget: Budget) -> None:
        """Somebody waits for memory: whoever has left answers unread for long gives back what it holds.

        If there is still some, it is only for those who have less than the ones that wait, whose own are given up then.
        """
        whose = None if budget.free_bytes < budget.limit_bytes // 4 else budget.waiting
        if whose is not None and budget is self.budget:
            return
        until = time.monotonic() - UNREAD_SECONDS
        for stream in [*self._open, *self._answering]:
            is_unread = stream.writing_since is not None and stream.writing_since <= until
            if is_unread and stream.share.held_bytes and (whose is None or stream.use in whose):
                self.unread += 1
                self._end(stream, "this stream's client reads nothing, and others wait for the memory")
        for stream in list(self._left):
            if whose is None or stream.use in whose:
                self._give_up(stream)

    def end_where(self, why: Callable[[Subject], SeqdedupeError | None]) -> None:
        """Ends each stream for whose caller there is an error."""
        for stream in self._open:
            if (e := why(stream.subject)) is not None:
                stream.end(e)

    def _judge_again(self) -> None:
        """Other rules are in force: streams end that are not allowed any more."""
        for stream in list(self._open):
            try:
                for judge in stream.allowed:
                    judge()
            except SeqdedupeError as e:
                stream.end(e)

    def drain(self) -> None:
        """Ends all streams with DRAINING."""
        self.is_draining = True
        for stream in self._open:
            stream.end(error("DRAINING", "the sidecar is shutting down"))


def _too_many(limit: int) -> SeqdedupeError:
    return error("TOO_MANY_STREAMS", f"{limit} streams are open: that is the limit", limit=limit)


def _at_expiry(stream: Stream) -> asyncio.TimerHandle | None:
    """Ends the stream when its caller's token expires, if it does."""
    if (expires_at_seconds := stream.subject.expires_at_seconds) is None:
        return None
    why = error("TOKEN_EXPIRED", f"the token of {stream.subject.name} has expired: this stream ends with it")
    return asyncio.get_running_loop().call_later(expires_at_seconds - time.time(), stream.end, why)


def unasked(work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
    """A task that writes to a stream. When the client is gone that fails; the call is cancelled then, and nobody asks
    the task."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(retrieve)
    return task


async def messages(stream: Stream) -> Any:
    """All messages that a client sends on a stream, the first one in time."""
    data = await stream.read_first()
    while data is not grpc.aio.EOF:
        yield data
        data = await stream.read()
