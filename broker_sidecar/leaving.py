"""Giving a topic of this sidecar's own log to another sidecar, while producers and readers go on.

Most of the log is copied while the topic serves. Then nothing is taken, the rest follows, and a file in the log's
folder says that the topic is leaving: from there on the other sidecar alone says who has it. Until that file is there
everything that goes wrong leaves the topic as it was; afterwards the other one is asked until it answers.
"""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc.aio

from broker_sidecar.neighbours import TAKE_SECONDS, Neighbours
from broker_sidecar.snapshot_parts import answers_of
from seqdedupe.address import SidecarAddress
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.log.embedded import moved
from seqdedupe.log.embedded.inspection import DurablePart
from seqdedupe.log.embedded.logs import EmbeddedLogs
from seqdedupe.store.topics import TopicRecord
from seqdedupe.topic.closed import Closed
from seqdedupe.topic.directory import Topics
from seqdedupe.topic.publishing import Topic
from seqdedupe.topic.shielded import shielded
from seqdedupe.topic.state import State
from seqdedupe.v1 import admin_pb2

logger = logging.getLogger("seqdedupe.server")

PIECE_BYTES = 1024 * 1024 - 1024
ROUNDS = 10
"""So often what has come meanwhile is copied while the topic serves."""
REST_BYTES = 4 * 1024 * 1024
"""Not more than this is left for when it takes nothing, unless it grows faster than it is copied."""
REST_SECONDS = 10.0
"""For what is left then; given up after that, and the topic goes on here."""
ASK_SECONDS = 0.5
"""So often the other sidecar is asked what became of it."""


class Leaving:
    """Moves that are under way, and those of which it is still to be found out what became of them."""

    def __init__(self, logs: EmbeddedLogs, topics: Topics[Topic], others: Neighbours) -> None:
        self._logs = logs
        self._topics = topics
        self._others = others
        self._under_way: dict[str, asyncio.Task[str]] = {}

    def go_on(self) -> None:
        """After a start: asks what became of those that were leaving."""
        for record in self._topics.records.values():
            if address := moved.leaving_to(self._logs.folder_of(record.incarnation)):
                self._topics.in_background(self._settle(record, address))

    async def move(self, topic: Topic, to: str) -> str:
        """Gives the topic to the sidecar at this address, which serves it on return.

        Raises INVALID_ADDRESS, MOVE_FAILED, and why the topic does not serve.
        """
        topic.check_serving()
        if not to:
            raise error("INVALID_ADDRESS", "which sidecar is to have it has to be said: a log has to be copied there")
        if self._topics.partitions_beside(topic.name):
            raise error("INVALID_REQUEST", f"{topic.name} is a partition: they stay together")
        if topic.name in self._under_way:
            raise error("MOVE_FAILED", f"topic {topic.name} is being moved already")
        return await shielded(self._under_way, topic.name, self._move(topic, str(SidecarAddress.parse(to))))

    async def _move(self, topic: Topic, to: str) -> str:
        record = self._topics.records[topic.name]
        folder = self._logs.folder_of(record.incarnation)
        moving = error("RECOVERING", f"topic {topic.name} is being moved to another sidecar")
        is_leaving = False
        try:
            async with self._others.giving(to) as call, self._logs.kept():
                await _send(call, head=_head(record))
                await _answer(call)
                sent: dict[int, int] = {}
                for _ in range(ROUNDS):
                    if await _copy(call, self._parts(record), sent) <= REST_BYTES:
                        break
                topic.check_serving()
                term = topic.term
                topic.hold(moving)
                async with asyncio.timeout(REST_SECONDS):
                    await topic.all_settled()
                    await _copy(call, self._parts(record), sent)
                    topic.release()
                    # Nothing comes between: it is as of the log's end.
                    parts = list(answers_of(topic))
                    topic.hold(moving)
                    for part in parts:
                        answer = admin_pb2.ExportSnapshotResponse.FromString(part)
                        await _send(call, snapshot=answer.part)
                if topic.state is not State.SERVING or topic.term != term:
                    raise error("MOVE_FAILED", f"topic {topic.name} is {topic.state.name}: {topic.why}")
                is_leaving = True
                await asyncio.to_thread(moved.leave, folder, to)
                await _send(call, is_all=True)
                async with asyncio.timeout(TAKE_SECONDS):
                    await _answer(call)
        except (SeqdedupeError, OSError, TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError) as e:
            why = e.message if isinstance(e, SeqdedupeError) else f"{type(e).__name__}: {e}"
            if not is_leaving:
                raise error("MOVE_FAILED", f"topic {topic.name} stays here: {why}") from e
            logger.warning("what became of moving topic %s to %s is being found out: %s", topic.name, to, why)
        finally:
            if not is_leaving:
                topic.release()
        await self._let_go(topic, record, to)
        settling = self._topics.in_background(self._settle(record, to))
        await asyncio.wait({settling}, timeout=TAKE_SECONDS)
        if moved.leaving_to(folder) is not None:
            raise error(
                "MOVE_FAILED", f"the sidecar at {to} does not say whether it has topic {topic.name}, and is asked"
            )
        if moved.has_moved(folder):
            return to
        raise error("MOVE_FAILED", f"topic {topic.name} is taken again here: the sidecar at {to} has it not")

    def _parts(self, record: TopicRecord) -> Sequence[DurablePart]:
        return self._logs.parts()[record.incarnation]

    async def _let_go(self, topic: Topic, record: TopicRecord, to: str) -> None:
        """Whoever uses the topic here comes again, and is told where it is."""
        why = error("NOT_OWNER", f"the sidecar at {to} has it, or is asked whether it has it", owner_address=to)
        async with self._topics.opening[record.name]:
            self._topics.live.pop(record.name, None)
            self._topics.closed[record.name] = Closed(record, why)
            self._topics.on_state(record.name, State.RECOVERING)
            topic.has_successor = True
            await topic.close("it was moved to another sidecar")

    async def _settle(self, record: TopicRecord, to: str) -> None:
        """Asks until it is certain who has the topic. If the other one has it not it is opened here again."""
        folder = self._logs.folder_of(record.incarnation)
        request = admin_pb2.SettleMoveRequest(topic=record.name, incarnation=record.incarnation)
        while True:
            with suppress(SeqdedupeError, OSError):
                has_it = bool((await self._others.ask(to, "SettleMove", request, TAKE_SECONDS)).has_it)
                await asyncio.to_thread(moved.has_left if has_it else moved.stays, folder)
                break
            await asyncio.sleep(ASK_SECONDS)
        logger.info("topic %s %s", record.name, f"was moved to {to}" if has_it else f"was not moved to {to}")
        if not has_it and not await self._topics.opened(record):
            self._topics.in_background(self._topics.go_on_opening(record))
        elif topic := self._topics.live.get(record.name):
            await topic.recover()


def _head(record: TopicRecord) -> admin_pb2.MovedTopic:
    return admin_pb2.MovedTopic(topic=record.name, incarnation=record.incarnation, secret=record.secret)


async def _send(call: Any, **fields: Any) -> None:
    await call.write(admin_pb2.ReceiveTopicRequest(**fields))


async def _answer(call: Any) -> None:
    if await call.read() is grpc.aio.EOF:
        raise error("MOVE_FAILED", "the other sidecar ended it without an answer")


async def _copy(call: Any, parts: Sequence[DurablePart], sent: dict[int, int]) -> int:
    """Sends what was not sent yet; how much that was."""
    count = 0
    for part in parts:
        for offset, data in _pieces(part.path, sent.get(part.base_index, 0), part.end):
            log = admin_pb2.LogPart(base_index=part.base_index, offset=offset, data=data)
            await _send(call, log=log)
            sent[part.base_index] = offset + len(data)
            count += len(data)
    return count


def _pieces(path: Path, start: int, end: int) -> Iterator[tuple[int, bytes]]:
    if start == end == 0:
        # What it begins with counts.
        yield 0, b""
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while start < end:
            data = file.read(min(PIECE_BYTES, end - start))
            if not data:
                raise error("MOVE_FAILED", f"{path} ends at {start}, and should go on to {end}")
            yield start, data
            start += len(data)
