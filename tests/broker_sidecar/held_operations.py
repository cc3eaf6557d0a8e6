"""Operations on one topic name, asked of a sidecar in this process, of which one is held in the middle.

What is held waits in the store, in the logs or in the folder of a backup, and nowhere in the topics' own code: two
operations meet there as they would in front of a slow disk. Everything is asked as a client does.
"""

import asyncio
import itertools
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from broker_sidecar.config import Config
from broker_sidecar.server import SidecarServer
from seqdedupe.address import SidecarAddress
from seqdedupe.client.connection import typed_errors
from seqdedupe.errors import SeqdedupeError
from seqdedupe.log.embedded import log_folder
from seqdedupe.log.embedded.log import EmbeddedLog
from seqdedupe.log.embedded.logs import EmbeddedLogs, incarnations, topic_of
from seqdedupe.names import partition_name, topic_name
from seqdedupe.store.db import Store
from seqdedupe.store.parts import TopicState
from seqdedupe.store.snapshots import Snapshots
from seqdedupe.testing import LAST_RESORT_SECONDS
from seqdedupe.transfer.backup import BackupMaker
from seqdedupe.v1 import admin_pb2, publish_pb2
from seqdedupe.v1.admin_pb2_grpc import AdminServiceStub
from seqdedupe.v1.publish_pb2_grpc import PublishServiceStub

PARTITIONS = 2

Key = tuple[str, object]
Operation = Callable[["Place"], Awaitable[str]]

_STATES = {value: name.removeprefix("TOPIC_STATE_").lower() for name, value in admin_pb2.TopicState.items()}
_numbers = itertools.count(1)


class Hold:
    """Who comes first to a point waits there until it is released."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._let_go = threading.Event()
        self._later: list[Callable[[], None]] = []
        self.reached, self._is_let_go = asyncio.Event(), asyncio.Event()

    async def wait(self) -> None:
        self.reached.set()
        await self._is_let_go.wait()

    def wait_in_thread(self) -> None:
        self._loop.call_soon_threadsafe(self.reached.set)
        assert self._let_go.wait(LAST_RESORT_SECONDS)

    def put_off(self, work: Callable[[], None]) -> None:
        """It is done when this is released, or now if it was."""
        self.reached.set()
        if self._let_go.is_set():
            work()
        else:
            self._later.append(work)

    def let_go(self) -> None:
        self._let_go.set()
        self._is_let_go.set()
        for work in self._later:
            work()


class Holds:
    """Points at which something can be held. One holds who comes first, and nobody after that."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self._armed: dict[Key, Hold] = {}
        self._appends: dict[int, Hold] = {}
        """By incarnation, what is appended to its log."""
        self._around(Store, "put_topics", lambda _, *records: [("record", one.name) for one in records])
        self._around(Snapshots, "write_anew", lambda *_: [("snapshot", "")])
        self._around(EmbeddedLogs, "open", lambda _, incarnation, *_a, **_k: [("open", incarnation)])
        self._around(EmbeddedLogs, "delete", lambda _, *some: [("delete", incarnation) for incarnation in some])
        self._around(EmbeddedLog, "close", lambda log: [("close", log.incarnation)])
        self._around_in_thread(log_folder, "leave", lambda folder, _: ("leave", int(folder.name)))
        self._around_in_thread(log_folder.Arrival, "begin", lambda _, topic, __: ("arrival", topic))
        self._around_in_thread(BackupMaker, "add_log", lambda _, record, __: ("backup", record.name))
        for name in ("append", "append_control"):
            self._around_append(name)

    def arm(self, key: Key) -> Hold:
        hold = self._armed[key] = Hold()
        return hold

    def _around(self, owner: Any, name: str, keys: Callable[..., list[Key]]) -> None:
        original = getattr(owner, name)

        async def held(*arguments: Any, **named: Any) -> Any:
            for key in keys(*arguments, **named):
                if (hold := self._armed.pop(key, None)) is not None:
                    await hold.wait()
            return await original(*arguments, **named)

        self._patch.setattr(owner, name, held)

    def _around_in_thread(self, owner: Any, name: str, key: Callable[..., Key]) -> None:
        original = getattr(owner, name)

        def held(*arguments: Any) -> Any:
            if (hold := self._armed.pop(key(*arguments), None)) is not None:
                hold.wait_in_thread()
            return original(*arguments)

        self._patch.setattr(owner, name, held)

    def _around_append(self, name: str) -> None:
        original = getattr(EmbeddedLog, name)

        def held(log: EmbeddedLog, *arguments: Any) -> None:
            if (hold := self._armed.pop(("append", log.incarnation), None)) is not None:
                self._appends[log.incarnation] = hold

            def append() -> None:
                if not log.is_closed:
                    original(log, *arguments)

            if (hold := self._appends.get(log.incarnation)) is not None:
                # What comes later stays behind it.
                hold.put_off(append)
            else:
                original(log, *arguments)

        self._patch.setattr(EmbeddedLog, name, held)


class Side:
    """A sidecar in this process."""

    def __init__(self, folder: Path, address: str, other: str) -> None:
        self.folder, self.address = folder, address
        self._config = replace(
            Config(),
            data_directory=str(folder / "data"),
            backup_directory=str(folder),
            listen=address,
            authentication="none",
            allow_auto_topic_creation=True,
            peers=other,
        )

    async def start(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self._sidecar = SidecarServer(self._config, connections=1000)
        await self._sidecar.listen()
        await self._sidecar.recover()
        self._channel = grpc.aio.insecure_channel(self.address)
        self.admin: Any = AdminServiceStub(self._channel)
        self.publish: Any = PublishServiceStub(self._channel)

    async def stop(self) -> None:
        await self._sidecar.stop()
        await self._channel.close()

    async def topics(self) -> list[admin_pb2.Topic]:
        return list((await self.admin.ListTopics(admin_pb2.ListTopicsRequest())).topics)

    def check_agrees(self) -> None:
        """For a sidecar that has ended: there is one record of each name, and one log of each record."""
        store = Store.open(self.folder / "data" / "store")
        try:
            records = store.topics()
        finally:
            store.close()
        names = [record.name for record in records]
        assert len(names) == len(set(names)), names
        assert {record.state for record in records} <= {TopicState.ACTIVE}
        logs = sorted(incarnations(self.folder / "data" / "logs"))
        assert logs == sorted(record.incarnation for record in records)


@dataclass
class Place:
    """A name and where it is used: `here`, by both operations, or `there`, which topics come from and go to."""

    here: Side
    there: Side
    name: str = field(default_factory=lambda: topic_name(f"t{next(_numbers)}"))
    incarnations: dict[int, str] = field(default_factory=dict)
    """What those are called that were there before both."""
    exported: list[admin_pb2.SnapshotPart] = field(default_factory=list)
    """The snapshot of one of this name."""

    @property
    def partition(self) -> str:
        return partition_name(self.name, 0)

    def incarnation(self, called: str) -> int:
        return next(one for one, name in self.incarnations.items() if name == called)

    async def make(self, before: str, *, is_there: bool, is_exported: bool) -> None:
        """What there is before both: nothing; a topic `here`, or `there`; `partitions` of one; or a topic that has the
        name of a `partition`."""
        if is_exported and before not in ("here", "there"):
            await self._make(self.here)
            await self._export(self.here)
            await self.here.admin.DeleteTopic(admin_pb2.DeleteTopicRequest(topic=self.name))
        if before == "here":
            await self._make(self.here)
        if before == "there" or is_there:
            await self._make(self.there)
        if before == "partitions":
            await self._make(self.here, partitions=PARTITIONS)
        if before == "partition":
            await self._make(self.here, self.partition)
        if is_exported and before in ("here", "there"):
            await self._export(self.here if before == "here" else self.there)
        for side, called in ((self.here, "old"), (self.there, "other")):
            self.incarnations |= {one.incarnation: called for one in await side.topics() if self._is_mine(one)}

    async def _make(self, side: Side, name: str = "", partitions: int = 0) -> None:
        await side.admin.CreateTopic(admin_pb2.CreateTopicRequest(topic=name or self.name, partitions=partitions))

    async def _export(self, side: Side) -> None:
        request = admin_pb2.ExportSnapshotRequest(topic=self.name)
        self.exported = [answer.part async for answer in side.admin.ExportSnapshot(request)]

    def _is_mine(self, topic: admin_pb2.Topic) -> bool:
        return bool(topic.incarnation) and topic.name in (self.name, self.partition)

    async def remove(self) -> None:
        """Delete all topics of this name: nothing that came before is in the way."""
        for side in (self.here, self.there):
            for topic in await side.topics():
                is_own = topic.name == self.name or (topic.name == self.partition and not topic.partition_of)
                if is_own and topic.state != admin_pb2.TOPIC_STATE_STANDBY:
                    await _deleted(side, topic.name)

    async def end(self) -> str:
        """Which topics there are of this name, `here` and then `there`, and which incarnations."""
        here, there = self.said(await self.here.topics()), self.said(await self.there.topics())
        return f"{here or 'none'}, there {there}" if there else here or "none"

    def said(self, topics: Sequence[admin_pb2.Topic]) -> str:
        """What is said of those topics that have this name, or that of a partition of it."""
        said = []
        for topic in topics:
            if topic.name == self.name or (topic.name == self.partition and not topic.partition_of):
                first = next((one for one in topics if topic.partitions and one.name == self.partition), topic)
                words = [f"{topic.partitions} partitions"] if topic.partitions else []
                words += ["partition"] if topic.name == self.partition else []
                words += [self.incarnations.get(first.incarnation, "new")] if first.incarnation else []
                words += [_STATES[topic.state]] if topic.state != admin_pb2.TOPIC_STATE_SERVING else []
                said.append(" ".join(words))
        return " + ".join(said)


async def _deleted(side: Side, name: str) -> None:
    """Delete a topic. One that has arrived waits until the sidecar that it came from knows."""
    async with asyncio.timeout(LAST_RESORT_SECONDS):
        while True:
            try:
                await side.admin.DeleteTopic(admin_pb2.DeleteTopicRequest(topic=name))
                return
            except grpc.aio.AioRpcError as e:
                if "has not recorded its arrival" not in (e.details() or ""):
                    raise
            await asyncio.sleep(0.01)


# -- The operations. Each returns what it was answered, in a word.


async def _unary(call: Any, request: Any) -> str:
    await call(request)
    return "ok"


async def create(place: Place) -> str:
    return await _unary(place.here.admin.CreateTopic, admin_pb2.CreateTopicRequest(topic=place.name))


async def open_producer(place: Place) -> str:
    return await _unary(place.here.publish.Open, publish_pb2.OpenRequest(topic=place.name, producer_names=["p"]))


async def delete(place: Place) -> str:
    return await _unary(place.here.admin.DeleteTopic, admin_pb2.DeleteTopicRequest(topic=place.name))


async def import_snapshot(place: Place) -> str:
    parts = [admin_pb2.ImportSnapshotRequest(topic=place.name, part=part) for part in place.exported]
    return await _unary(place.here.admin.ImportSnapshot, iter(parts))


async def rebuild(place: Place) -> str:
    return await _unary(place.here.admin.RebuildTopic, admin_pb2.RebuildTopicRequest(topic=place.name))


async def move(place: Place) -> str:
    request = admin_pb2.MoveTopicRequest(topic=place.name, to=place.there.address)
    return await _unary(place.here.admin.MoveTopic, request)


async def arrive(place: Place) -> str:
    request = admin_pb2.MoveTopicRequest(topic=place.name, to=place.here.address)
    return await _unary(place.there.admin.MoveTopic, request)


async def list_all(place: Place) -> str:
    return f"lists {place.said(await place.here.topics()) or 'none'}"


async def get(place: Place) -> str:
    found = (await place.here.admin.GetTopic(admin_pb2.GetTopicRequest(topic=place.name))).topic
    return f"gets {place.said([found])}"


async def back_up(place: Place) -> str:
    name = f"b{next(_numbers)}"
    answers = [one async for one in place.here.admin.Backup(admin_pb2.BackupRequest(name=name))]
    logs = place.here.folder / name / "logs"
    in_it = [one for one in incarnations(logs) if topic_of(logs / str(one)) in (place.name, place.partition)]
    left_out = [one.incarnation for one in answers[-1].left_out if one.topic in (place.name, place.partition)]
    said = [place.incarnations.get(one, "new") for one in in_it]
    said += [f"{place.incarnations.get(one, 'new')} left out" for one in left_out]
    return f"has {' + '.join(said) or 'none'}"


async def create_partitions(place: Place) -> str:
    request = admin_pb2.CreateTopicRequest(topic=place.name, partitions=PARTITIONS)
    return await _unary(place.here.admin.CreateTopic, request)


async def create_partition(place: Place) -> str:
    return await _unary(place.here.admin.CreateTopic, admin_pb2.CreateTopicRequest(topic=place.partition))


async def delete_partition(place: Place) -> str:
    return await _unary(place.here.admin.DeleteTopic, admin_pb2.DeleteTopicRequest(topic=place.partition))


async def set_policy(place: Place) -> str:
    request = admin_pb2.SetTopicPolicyRequest(topic=place.name, policy=admin_pb2.TopicPolicy(retention_size_in_mb=7))
    return await _unary(place.here.admin.SetTopicPolicy, request)


async def drain(place: Place) -> str:
    await place.here.stop()
    return "ok"


async def asked(operation: Operation, place: Place) -> str:
    """What an operation is answered: a word, or the reason why not; of a move also why the other sidecar refuses."""
    try:
        with typed_errors(SidecarAddress.parse(place.here.address)):
            return await operation(place)
    except SeqdedupeError as e:
        if e.reason != "MOVE_FAILED":
            return e.reason
        why = e.message.rpartition("stays here: ")[2]
        for text, short in ((place.name, "T"), (place.here.address, "here"), (place.there.address, "there")):
            why = why.replace(text, short)
        return f"{e.reason}: {why}"
