"""Publishes to one topic until the process ends: opens sessions, sends, takes answers, begins again after any trouble.

It never gives up an output by itself: whatever is not settled is sent again, in its order, by a stream that follows.
"""

import asyncio
import logging
import random
import time
from typing import Any

from seqdedupe.client.connection import CALL_TIMEOUT_SECONDS, NOT_A_SIDECAR, Backoff, error_of_reason, typed_errors
from seqdedupe.client.exchange import exchange, publish_call
from seqdedupe.client.frames import decode_answer, refusal_error
from seqdedupe.client.openings import check_opened
from seqdedupe.client.outbox import Frame
from seqdedupe.client.route import Route
from seqdedupe.client.sidecars import Sidecars
from seqdedupe.errors import NEVER, FencedError, SeqdedupeError, UnavailableError, error
from seqdedupe.functions.backlog import Backlog, Row
from seqdedupe.v1 import publish_pb2
from seqdedupe.v1.publish_pb2_grpc import PublishServiceStub

logger = logging.getLogger("seqdedupe.functions")

SAY_EVERY_SECONDS = 10.0
"""While nothing can be published, that is said so often."""
ANSWER_TIMEOUT_SECONDS = 30.0
"""With frames out and no answer for so long, the connection counts as broken."""
SHORTEST_TRUCE_SECONDS = 0.1
LONGEST_TRUCE_SECONDS = 1.0
"""So long at random a name is left to the instance that took it, before it is taken back."""
NAMES_PER_OPEN = 3000
"""Of the longest names, and their epochs: a call takes 1 MiB."""

_FIRST_DELAY_SECONDS = 0.05
_LONGEST_DELAY_SECONDS = 2.0
_TRIED_AGAIN = frozenset({"FENCED", "INVALID_EPOCH", "PREDECESSOR_MISSING", "OUTCOME_UNKNOWN"})
"""Beside all that the sidecar says may be tried again: a new stream, with sessions resumed or new, is the cure."""


class Publisher:
    """One topic's outputs. All of it runs on one event loop."""

    def __init__(self, sidecars: Sidecars, topic: str, has_begun: asyncio.Event) -> None:
        """`has_begun` is set once a sidecar has answered one of the function's publishers, which share it."""
        self.backlog = Backlog()
        self.unknown = self.resumes = 0
        self.trouble: SeqdedupeError | None = None
        """Why nothing can be published now; None while that is not known."""
        self._sidecars = sidecars
        self._route = Route(sidecars, topic)
        self._topic = topic
        self._incarnation = 0
        self._has_begun = has_begun
        self._work = asyncio.Event()
        self._backoff = Backoff(_FIRST_DELAY_SECONDS, _LONGEST_DELAY_SECONDS)
        self._answered_at = 0.0
        self._said_at = float("-inf")

    def add(self, rows: list[Row]) -> None:
        """An input's outputs for the topic; those before are published first."""
        self.backlog.add(rows)
        self._work.set()

    async def persisted(self, name: str) -> int:
        """The highest sequence ID that the topic holds under a name; -1 if there is none. Waits for the sidecar."""
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.backlog.ask(name, answer.set_result)
        self._work.set()
        return await answer

    async def run(self) -> None:
        """Until it is cancelled. Raises what no trying again can help with, and NOT_A_SIDECAR before it has begun."""
        while True:
            await self._wait_for_work()
            try:
                await self._connect()
            except SeqdedupeError as e:
                if not (isinstance(e, UnavailableError) or e.retry_delay_ms >= 0 or e.reason in _TRIED_AGAIN):
                    raise
                if e.reason == "STREAM_IDLE" and not self.backlog.has_work:
                    continue
                self.resumes += 1
                moves_on = isinstance(e, UnavailableError) and self._route.moves_on(e)
                if e.reason == NOT_A_SIDECAR and not (moves_on or self._has_begun.is_set()):
                    raise
                self._say(self._route.told() if isinstance(e, UnavailableError) else e)
                if not moves_on and not isinstance(e, FencedError):
                    await asyncio.sleep(max(self._backoff.next_seconds(), e.retry_delay_ms / 1000))

    def _say(self, e: SeqdedupeError) -> None:
        self.trouble = e
        if (now := time.monotonic()) - self._said_at >= SAY_EVERY_SECONDS:
            self._said_at = now
            logger.warning("waiting to publish to %s: %s %s", self._topic, e, e.hint)

    async def _wait_for_work(self) -> None:
        while not self.backlog.has_work:
            self._work.clear()
            await self._work.wait()

    async def _connect(self) -> None:
        self.backlog.rewind()
        async with self._sidecars.new_channel(self._route.address) as channel:
            stub = PublishServiceStub(channel)
            await self._resume(stub)
            self.backlog.forget_idle()
            await self._open(stub)
            self._answered_at = time.monotonic()
            await exchange(
                publish_call(channel),
                self._route.address,
                self._topic,
                frames=lambda: self._frames_to_send(stub),
                take=self._take,
                watch=self._watch,
            )

    # -- sessions ----------------------------------------------------------------------------------------------

    async def _resume(self, stub: PublishServiceStub) -> None:
        """Resumes the sessions that there are. Names that another instance has taken are taken back, after a while."""
        sessions = list(self.backlog.sessions().items())
        fenced = False
        for first in range(0, len(sessions), NAMES_PER_OPEN):
            some = dict(sessions[first : first + NAMES_PER_OPEN])
            answer = await self._call_open(stub, list(some), list(some.values()))
            refused = {refusal.index: refusal for refusal in answer.refusals}
            for place, name in enumerate(some):
                if place not in refused:
                    is_forgotten = place in answer.forgotten
                    self.backlog.opened(name, answer.epochs[place], answer.persisted[place], is_forgotten=is_forgotten)
                elif refused[place].reason == "FENCED":
                    fenced |= self.backlog.lost(name)
                else:
                    raise self._lost(refused[place].message)
        if fenced:
            logger.info("another instance publishes to %s under the names of this one", self._topic)
            await asyncio.sleep(random.uniform(SHORTEST_TRUCE_SECONDS, LONGEST_TRUCE_SECONDS))

    async def _open(self, stub: PublishServiceStub) -> None:
        """Starts sessions for the names that have none."""
        while names := self.backlog.unopened()[:NAMES_PER_OPEN]:
            answer = await self._call_open(stub, names, [])
            for refusal in answer.refusals:
                raise error_of_reason(refusal.reason, refusal.message, NEVER, {})
            if self._incarnation not in (0, answer.incarnation):
                raise self._lost("it was made anew")
            self._incarnation = answer.incarnation
            for name, epoch, persisted in zip(names, answer.epochs, answer.persisted, strict=True):
                self.backlog.opened(name, epoch, persisted)

    def _lost(self, why: str) -> SeqdedupeError:
        return error("DATA_LOSS", f"the sidecar does not know the sessions that it gave for {self._topic}: {why}")

    async def _call_open(
        self, stub: PublishServiceStub, names: list[str], epochs: list[int]
    ) -> publish_pb2.OpenResponse:
        request = publish_pb2.OpenRequest(topic=self._topic, producer_names=names, epochs=epochs)
        open_sessions: Any = stub.Open
        try:
            with typed_errors(self._route.address):
                answer: publish_pb2.OpenResponse = await open_sessions(request, timeout=CALL_TIMEOUT_SECONDS)
                check_opened(answer, len(names))
        except SeqdedupeError as e:
            if (doubted := self._route.doubted(e)) is not e:
                raise doubted from e
            raise
        self._has_begun.set()
        self._answered_at = time.monotonic()
        return answer

    # -- the stream --------------------------------------------------------------------------------------------

    async def _frames_to_send(self, stub: PublishServiceStub) -> list[Frame]:
        """The next one; waits until there is one."""
        while True:
            if (frame := self.backlog.next_frame()) is not None:
                return [Frame(frame.number, frame.batch, 0)]
            if self.backlog.unopened():
                await self._open(stub)
            else:
                self._work.clear()
                await self._work.wait()

    def _take(self, raw: bytes) -> bool:
        """Never the last answer."""
        self._answered_at = time.monotonic()
        answer = decode_answer(raw, self.backlog.rows_of)
        for number, receipt in answer.receipts:
            if not self.backlog.receipt(number, receipt.verdicts):
                self.unknown += 1
                raise error("RECOVERING", "a copy of an output is under way, and its outcome not known yet")
            self._backoff.reset()
            self._route.goes_well()
            if self.trouble is not None:
                logger.info("publishing to %s goes on", self._topic)
                self.trouble = None
        if not self.backlog.waits_for_answers:
            self._work.set()  # what begins under a new name has waited for this
        for refusal in answer.refusals:
            if self.backlog.rows_of(refusal.frame) is not None:
                raise refusal_error(refusal)
        return False

    async def _watch(self) -> None:
        """Ends a stream on which frames wait for an answer for too long."""
        while True:
            await asyncio.sleep(ANSWER_TIMEOUT_SECONDS / 10)
            if not self.backlog.waits_for_answers:
                self._answered_at = time.monotonic()
            elif time.monotonic() - self._answered_at > ANSWER_TIMEOUT_SECONDS:
                raise error("UNREACHABLE", f"the sidecar at {self._route.address} has not answered for a long time")
