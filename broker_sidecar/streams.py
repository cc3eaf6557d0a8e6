"""All open streams of the sidecar: the limits for streams, and the choice of streams that are ended to make room for
other streams."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from broker_sidecar.connections import taken_from
from broker_sidecar.rpc import Context, abort, encoded, method_of_call, parse_small
from broker_sidecar.security.permissions import Permissions, allowed_so_far
from broker_sidecar.security.subject import ANONYMOUS, Subject, caller
from broker_sidecar.security.tokens import LEEWAY_SECONDS, expired
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
from seqdedupe.figures import counted
from seqdedupe.tasks import retrieve
from seqdedupe.topic.readers import PAGE_BYTES

M = TypeVar("M", bound=Message)

FIRST_MESSAGE_SECONDS = 10.0
"""The time within which the first message of a stream must arrive."""

IDLE_SECONDS = 1.0
"""A stream is idle, and may be ended for another stream, if it had no message in either direction for this time and has
no frame in flight."""

UNREAD_SECONDS = 5.0
"""A stream whose client has read nothing for this time may be ended when other streams wait for memory."""

LEFT_SECONDS = 10.0
"""After the end of a stream, its client has this time to read the answers that were written before. If the client does
not, the connection is ended, because gRPC releases the unread bytes in no other way."""

COPIES = 2
"""The number of copies of an answer while it is written: the sidecar's copy and gRPC's copy."""

ANSWER_BYTES = PAGE_BYTES
"""The memory, per copy, of a call that looks into a log or lists a thousand producers."""

TURN_SECONDS = 10.0
"""The longest wait of such a call for memory. After this time the call is refused, and its client retries."""

EXPORTS_AT_ONCE = 8
"""The most exports at once. Until its end, an export holds a copy of all numbers of its topic. One caller may have half
of the exports."""

CONNECTION_SHARE = 2
"""One TCP connection may have this fraction (1/n) of all streams. Connections to a Unix socket are not limited, because
they cannot be distinguished."""

CALLER_SHARE = 2
"""One caller may have this fraction (1/n) of all streams. A caller may have more only while no other caller needs a
stream."""

UNKNOWN_PART = 16
"""This fraction (1/n) of all streams is reserved for unknown callers, at most the limit of unknown callers. So health
probes take no stream from a known caller."""


class Stream:
    """A stream that a separate task is serving."""

    def __init__(self, context: Context, budget: Budget, subject: Subject, shares: CallerShares) -> None:
        """`budget` limits the memory of the stream's answers and frames in flight."""
        self.subject = subject
        self.use = shares.of(subject.name)
        self.allowed = allowed_so_far()
        """The permission checks that this call has passed. They are repeated when the rules change."""
        self.connection: str = context.peer()
        self._taken = taken_from(self.connection)
        self.share = Share(budget, self.use)
        self.passing: Share | None = None
        """The memory of what a Pulsar broker sends to the client, if brokers do."""
        self._reserved_bytes = 0
        self.writing_bytes = 0
        """The bytes being written. gRPC has a copy of these bytes. After the stream's end, gRPC keeps its copy until
        the client reads it or disconnects."""
        self._method = method_of_call()
        self.frames_in_flight = 0
        self.error_numbers: Mapping[str, str] = {}
        """Numbers that an error has in addition if it ends the stream now."""
        self.moved_at = time.monotonic()
        """The time when the sidecar last sent a message, or when the client last sent a message that served the
        stream's purpose."""
        self.writing_since: float | None = None
        self.ended_because: SeqdedupeError | None = None
        self._context = context
        self._shares = shares
        self._task: asyncio.Task[None] | None = None
        """The task that serves the stream; None before `begin`."""

    @property
    def held_bytes(self) -> int:
        """The memory that the client makes the sidecar hold."""
        return self.share.held_bytes + (self.passing.held_bytes if self.passing is not None else 0)

    async def begin(self) -> None:
        """Send the initial metadata. If the stream was ended meanwhile, raise the reason.

        grpcio considers the metadata as sent only when the metadata or the first message has been written. If that
        write is cancelled, grpcio sends the metadata again with the status, and the client never sees the end of the
        call. So this method sends the metadata separately, and waits until they are written.
        """
        self._context.add_done_callback(self._written)  # type: ignore[arg-type]
        await self._context.send_initial_metadata(())
        if self.ended_because is not None:
            raise self.ended_because
        self._task = asyncio.current_task()

    async def read(self) -> Any:
        """Return the client's next message, or `grpc.aio.EOF`. Wait first until the client's limit of bytes per second
        allows more."""
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
        """Record that the client's last message served the stream's purpose. A stream without such messages counts as
        silent."""
        self.moved_at = time.monotonic()

    async def read_first(self) -> Any:
        """Read the first message as `read` does. Raises STREAM_IDLE if the message does not arrive in time."""
        await self._rest()
        try:
            async with asyncio.timeout(FIRST_MESSAGE_SECONDS):
                return await self._read()
        except TimeoutError as e:
            raise error(
                "STREAM_IDLE", f"no message came on this stream within {FIRST_MESSAGE_SECONDS:.0f} seconds"
            ) from e

    async def write(self, data: bytes) -> None:
        """Send a message. Return when the client has room for the message."""
        self.share.take(len(data))
        await self._write(data)
        self._written()

    async def reserve(self, size: int, least: int) -> int:
        """Wait for memory for an answer, and reserve it. Return the size of the reserved answer: `size` bytes, or less,
        but at least `least`.

        The memory of the last answer is reused, unless another stream waits whose client has shown that it reads.
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
        """Reserve memory for an answer without waiting. Raises QUEUE_FULL with the text `why`, or SHARE_EXCEEDED."""
        self.release()
        self.share.check(COPIES * size, why)
        self.share.take(COPIES * size)
        self._reserved_bytes = COPIES * size

    async def reserve_in_turn(self, least: int = 0) -> int:
        """Reserve memory for a call with one answer, as `reserve` does. The size is `ANSWER_BYTES`, but at most half of
        its caller's share, and at least `least`.

        Raises QUEUE_FULL or SHARE_EXCEEDED if the memory does not become free in time.
        """
        limit = self.use.limits.bytes_in_flight
        most = ANSWER_BYTES if limit is None else max(1, min(ANSWER_BYTES, limit // (2 * COPIES)))
        size = max(most, least)
        try:
            async with asyncio.timeout(TURN_SECONDS):
                return await self.reserve(size, size)
        except TimeoutError:
            self.reserve_now(size, f"a call has waited {TURN_SECONDS:.0f} seconds for memory that readers hold")
            return size

    async def write_reserved(self, data: bytes) -> None:
        """Send a message as `write` does, in the reserved memory. The data may be a little larger than reserved."""
        self.share.take(COPIES * len(data) - self._reserved_bytes)
        self._reserved_bytes = len(data)
        await self._write(data)
        self._reserved_bytes += self.writing_bytes
        self.writing_bytes = 0
        self.share.has_been_read = True

    async def write_each(self, answers: Iterator[bytes], most_bytes: int) -> None:
        """Send these answers. An answer is created only when memory for `most_bytes` is reserved."""
        while True:
            await self.reserve(most_bytes, most_bytes)
            if (answer := next(answers, None)) is None:
                break
            await self.write_reserved(answer)
            del answer  # before the next answer is created
        self.release()

    def release(self) -> None:
        """Release all reserved memory."""
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
        """Record that gRPC holds no more bytes of this stream."""
        written, self.writing_bytes = self.writing_bytes, 0
        self.share.give_back(written)

    @contextmanager
    def ending(self) -> Iterator[None]:
        """If the stream is ended within the block, raise the reason instead of the cancellation."""
        try:
            yield
        except asyncio.CancelledError:
            if self.ended_because is not None:
                raise self.ended_because from None
            raise

    def end(self, why: SeqdedupeError) -> None:
        """End the stream soon, with this error. If this is called several times, the first error counts."""
        if self.ended_because is None:
            self.ended_because = why
            if self._task is not None:
                self._task.cancel()


class Streams:
    """The streams of all services, and the memory that their clients share."""

    def __init__(
        self, limit: int, permissions: Permissions, end_connection: Callable[[str], None] = lambda _: None
    ) -> None:
        """`end_connection` ends the connection of a peer."""
        self._limit = limit
        self._end_connection = end_connection
        self._open: set[Stream] = set()
        self._left: set[Stream] = set()
        """The streams that have ended, but whose clients have not read everything that was written."""
        self.shares = permissions.shares
        permissions.on_replaced.append(self._judge_again)
        self.budget = Budget(self._relieve, MAX_HELD_BYTES)
        self.reading = Budget(self._relieve, MAX_HELD_BYTES // READING_PART, within=self.budget)
        """The memory of streams and calls that do not publish."""
        self._exporting: set[Stream] = set()
        self._to_export: set[Stream] = set()
        """The streams that wait until they may export."""
        self._answering: set[Stream] = set()
        """Calls with one large answer. They do not count as streams."""
        self.is_draining = False
        self.gave_way = self.unread = 0
        """The number of streams that were ended to make room for another stream, and the number that were ended because
        their clients read nothing while other streams waited."""

    def __len__(self) -> int:
        """Return the number of open streams."""
        return len(self._open)

    @property
    def limit(self) -> int:
        """The most open streams."""
        return self._limit

    def peers(self) -> Iterator[str]:
        """Return the peers of the open streams."""
        return (stream.connection for stream in self._open)

    def handler(
        self,
        serve: Callable[[Any, Context, Stream], Awaitable[None]],
        *,
        publishes: bool = False,
        is_call: bool = False,
        error_numbers: Mapping[str, str] = {},
    ) -> Callable[[Any, Context], Awaitable[None]]:
        """Return the handler of a streaming call. The handler calls `serve` with the request or requests, the context
        and the stream.

        The stream counts towards the limits, unless the call has only one answer (`is_call`). `error_numbers` are the
        stream's first `Stream.error_numbers`.
        """

        async def handle(request: Any, context: Context) -> None:
            stream = Stream(context, self.budget if publishes else self.reading, caller(), self.shares)
            stream.error_numbers = error_numbers
            try:
                with self._answered(stream) if is_call else self.serving(stream):
                    await stream.begin()
                    await serve(request, context, stream)
            except Exception as e:  # noqa: BLE001 (whatever it is, the caller gets an answer)
                await abort(context, e, stream.error_numbers)

        return handle

    def call(
        self,
        kind: type[M],
        find: Callable[[str], Awaitable[object]],
        answer: Callable[[M, Stream], Awaitable[Message]],
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        """Return the handler of a call that has one answer and needs much memory, for bytes of a log or for the answer.
        `kind` is the type of the request. From its start until the client has the answer, the call competes with
        readers for memory (`reserve_in_turn`). `find` looks up the topic first, so calls about unknown topics do not
        wait for memory."""

        async def serve(data: bytes, context: Context, stream: Stream) -> None:
            request: Any = parse_small(kind, data)
            await find(request.topic)
            await stream.reserve_in_turn()
            await stream.write_reserved(encoded(await answer(request, stream), context))

        # On the wire, a call with one answer looks like a call with a stream of answers.
        return grpc.unary_stream_rpc_method_handler(self.handler(serve, is_call=True))

    @contextmanager
    def serving(self, stream: Stream) -> Iterator[None]:
        """Count the stream as open within the block. Raises TOO_MANY_STREAMS, SHARE_EXCEEDED, or the reason why the
        stream was ended."""
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
        """Handle the unread bytes of an ended stream. If memory is free, give the client time to read these bytes.
        Otherwise end the client's connection."""
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
        """Send the export of a topic, as `write_each` does. Only EXPORTS_AT_ONCE exports run at once. Other exports
        wait.

        The caller with the fewest running exports is next. If an export waits, a running export whose client reads
        nothing is ended.
        """
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
            # End only one stream. Until that stream has ended, it is chosen again, so that no further stream is ended.
            longest = min(unread, key=lambda one: one.writing_since or until)
            self.unread += longest.ended_because is None
            self._end(longest, "this stream's client reads nothing, and other exports wait for its place")
        return False

    def _make_room_in_share(self, new: Stream) -> None:
        """If the caller has too many streams, end an idle stream of the caller. Raises SHARE_EXCEEDED if no stream can
        be ended."""
        own = [stream for stream in self._open if stream.use is new.use]
        # A Unix socket does not identify connections.
        new.use.check("connections", len({stream.connection for stream in (*own, new)}))
        if (limit := new.use.limits.streams) is not None and len(own) >= limit and not self._gives_way(own, limit):
            raise new.use.exceeded("streams", f"{counted(len(own), 'stream is', 'streams are')} open")

    def _make_room(self, new: Stream) -> None:
        """If there are too many streams, end another stream. Raises TOO_MANY_STREAMS if no stream can be ended."""
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
        # Without authentication, no caller counts as unknown.
        kept = 0 if new.subject.name == ANONYMOUS else min(self._limit // UNKNOWN_PART, OF_NOBODY.streams or 0)
        free = self._limit - len(self._open) - max(0, kept - len(unknown))
        if free <= 0 and not self._another_gives_way(new, unknown, kept):
            raise _too_many(self._limit - kept)

    def _another_gives_way(self, new: Stream, unknown: list[Stream], kept: int) -> bool:
        """End a stream to make room for the stream of a known caller. Return whether a stream was ended.

        In general, the idle stream that was silent for the longest time is ended. There are three exceptions:

        - If unknown callers have more streams than are reserved for them, one of their streams is ended, even if it is
          in use.
        - If a caller has more than its share, and the caller of the new stream has less than its share, a stream of the
          first caller is ended, even if the stream is in use.
        - A caller that would exceed its share can only replace one of its idle streams.
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
                longest,
                "this stream gave way to another caller's: its caller has "
                f"{len(most)} of {counted(self._limit, 'stream')}",
            )
        return True

    def _gives_way(self, among: Iterable[Stream], most: int) -> bool:
        """Among these streams, end the idle stream that was silent for the longest time. Return whether there was an
        idle stream."""
        until = time.monotonic() - IDLE_SECONDS
        idle = [stream for stream in among if not stream.frames_in_flight and stream.moved_at <= until]
        if not idle:
            return False
        self.gave_way += 1
        longest = min(idle, key=lambda stream: stream.moved_at)
        self._end(longest, f"this stream gave way to another: {most} are open, and it was silent the longest")
        return True

    def _end(self, stream: Stream, why: str) -> None:
        self._open.discard(stream)
        self._answering.discard(stream)
        stream.end(error("STREAM_IDLE", why))

    def _relieve(self, budget: Budget) -> None:
        """Free memory for waiting streams: end streams whose clients have read nothing for UNREAD_SECONDS.

        If enough memory is free for other callers, the waiting callers themselves hold too much. Then only streams of
        the waiting callers are ended.
        """
        whose = None if budget.free_bytes < budget.limit_bytes // 4 else budget.waiting
        if whose is not None and budget is self.budget:
            return
        until = time.monotonic() - UNREAD_SECONDS
        for stream in [*self._open, *self._answering]:
            is_unread = stream.writing_since is not None and stream.writing_since <= until
            if is_unread and stream.held_bytes and (whose is None or stream.use in whose):
                self.unread += 1
                self._end(stream, "this stream's client reads nothing, and other clients wait for its memory")
        for stream in list(self._left):
            if whose is None or stream.use in whose:
                self._give_up(stream)

    def end_where(self, why: Callable[[Subject], SeqdedupeError | None]) -> None:
        """End each stream for whose caller `why` returns an error."""
        for stream in self._open:
            if (e := why(stream.subject)) is not None:
                stream.end(e)

    def _judge_again(self) -> None:
        """End the streams that the new rules no longer allow."""
        for stream in list(self._open):
            try:
                for judge in stream.allowed:
                    judge()
            except SeqdedupeError as e:
                stream.end(e)

    def drain(self) -> None:
        """End all streams with DRAINING."""
        self.is_draining = True
        for stream in self._open:
            stream.end(error("DRAINING", "the sidecar is shutting down"))


def _too_many(limit: int) -> SeqdedupeError:
    return error(
        "TOO_MANY_STREAMS", f"{counted(limit, 'stream is', 'streams are')} open: that is the limit", limit=limit
    )


def _at_expiry(stream: Stream) -> asyncio.TimerHandle | None:
    """Set a timer that ends the stream when its caller's token expires. Return None if the caller has no token that
    expires."""
    if (expires_at_seconds := stream.subject.expires_at_seconds) is None:
        return None
    why = expired(stream.subject.name, expires_at_seconds - LEEWAY_SECONDS)
    return asyncio.get_running_loop().call_later(expires_at_seconds - time.time(), stream.end, why)


def unasked(work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
    """Return a task for work that writes to a stream, and that no code awaits. If the client is gone, the task fails;
    that failure is ignored, because the call is cancelled too."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(retrieve)
    return task


async def messages(stream: Stream) -> Any:
    """Yield all messages that a client sends on a stream. Raises STREAM_IDLE if the first message does not arrive in
    time."""
    data = await stream.read_first()
    while data is not grpc.aio.EOF:
        yield data
        data = await stream.read()
