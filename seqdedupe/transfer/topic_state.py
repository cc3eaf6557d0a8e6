"""Exports a topic's state from a sidecar, and imports a topic's state into a sidecar.

Outgoing messages contain a topic's snapshot or watermarks. Begin with `saved`, which returns the state of a topic at
one moment. A client or another sidecar sends an incoming snapshot. `SavedParts` builds the state from the parts of the
snapshot.

Imports put the watermarks of producers, or a window of deduplication IDs, into a topic that nobody has used yet. No
part of an import takes effect before `finish` is called. `finish` puts the whole import in force. `begin_import` begins
an import of watermarks. `WindowImport` imports a window. Each import is a `TopicImport`.
"""

import asyncio
import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any, Generic, TypeVar

import numpy as np

from seqdedupe import wire
from seqdedupe.batch import INT64, Binary, names_of, values
from seqdedupe.core.id_runs import (
    MAX_ROWS,
    IdRun,
    ImportedIds,
    RunEntries,
    entries_in,
    entries_with,
    first_not_above,
    parts_of,
    seconds_of,
)
from seqdedupe.core.name_table import Names
from seqdedupe.core.rule import DURABLE_EPOCH, PERSISTED, STATED
from seqdedupe.errors import SeqdedupeError, UnavailableError, error
from seqdedupe.exports import LATEST_MS, WindowBlock, WindowChecksum, parse_block
from seqdedupe.format.headers import SECRET_BYTES, key_of
from seqdedupe.format.jit import Int64s, Uint8s
from seqdedupe.limits import MAX_PLACE_BYTES, NO_EPOCH, NO_SEQUENCE_ID
from seqdedupe.message_id import Position
from seqdedupe.names import decoded_producer_name, new_producer_name, producer_name
from seqdedupe.store import windows
from seqdedupe.store.parts import NOT_STATED
from seqdedupe.store.snapshots import Loaded
from seqdedupe.store.windows import RunWriter, read_pages
from seqdedupe.topic.attached import AttachedTopic
from seqdedupe.topic.base import State, TopicBase
from seqdedupe.topic.control import Import, ImportParts, decode_policy, encode
from seqdedupe.topic.owner import MAX_TERM
from seqdedupe.topic.policy import MAX_CURSORS, ImportedWindow, Policy, cursors_of, fill_cursors
from seqdedupe.topic.sessions import NAMES_A_STEP, highest_term
from seqdedupe.topic.topic import Topic
from seqdedupe.v1 import admin_pb2

logger = logging.getLogger("seqdedupe.topic")

# -- Outgoing messages.

SAVED_AT_ONCE = 3072
"""The number of producers in one part. Even with the longest names, a part has less than 1 MiB."""

Producers = tuple[list[bytes], Int64s, Int64s, Int64s]
"""The names of producers, and the persisted ID, durable epoch and `STATED` of each producer."""


def saved(topic: TopicBase) -> Loaded:
    """Return a snapshot of the topic at the time of this call. Raises RECOVERING or LOG_DAMAGED while the topic's state
    is not certain; DRAINING, TOPIC_NOT_FOUND."""
    _check_is_certain(topic)
    names = topic.producers.copied_names()
    rows = topic.producers.numbers[: len(names)]
    position = topic.last_position
    return Loaded(
        term=topic.term,
        next_index=position.index + 1,
        message_id=position.message_id,
        names=names,
        persisted=rows[:, PERSISTED].copy(),
        epochs=rows[:, DURABLE_EPOCH].copy(),
        stated=rows[:, STATED].copy(),
        ownership=position.ownership,
        policy=encode(topic.policy),
        opaque=topic.log_place(),
        has_forgotten=topic.producers.has_forgotten,
    )


def parts(snapshot: Loaded) -> Iterator[Producers]:
    """Yield the producers of a snapshot, at most SAVED_AT_ONCE at a time."""
    for start in range(0, len(snapshot.names), SAVED_AT_ONCE):
        some = slice(start, start + SAVED_AT_ONCE)
        names = snapshot.names.some(start, SAVED_AT_ONCE)
        yield names, snapshot.persisted[some], snapshot.epochs[some], snapshot.stated[some]


EXPORTED_AT_ONCE = 4096
"""The number of producers in one part. With the longest names, a part has about 1 MiB."""

Watermarks = tuple[list[bytes], Int64s]
"""The names of producers, and the highest persisted sequence ID of each producer."""


def watermarks(topic: TopicBase) -> Iterator[Watermarks]:
    """Yield the watermarks at the time of this call, of all producers that have a watermark.

    Raises RECOVERING, LOG_DAMAGED or NOT_ATTACHED while the watermarks are not certain; DRAINING, TOPIC_NOT_FOUND.
    """
    _check_is_certain(topic)
    if isinstance(topic, AttachedTopic) and topic.state is not State.SERVING:
        raise error("NOT_ATTACHED", f"what the log of topic {topic.name} holds is not known: {topic.why}")
    names = topic.producers.names_from(0)
    persisted = topic.producers.numbers[: len(names), PERSISTED].copy()
    return _known(names, persisted)


def _known(names: list[bytes], persisted: Int64s) -> Iterator[Watermarks]:
    for start in range(0, len(names), EXPORTED_AT_ONCE):
        some = persisted[start : start + EXPORTED_AT_ONCE]
        known = np.flatnonzero(some >= 0)
        if len(known):
            yield [names[start + number] for number in known.tolist()], some[known]


def _check_is_certain(topic: TopicBase) -> None:
    if topic.state is not State.READ_ONLY:
        topic.check_serving()


def snapshot_answers(topic: TopicBase) -> Iterator[bytes]:
    """Yield the response messages of `ExportSnapshot`. Raises the errors of `saved`."""
    snapshot = saved(topic)
    yield _head(topic, snapshot).SerializeToString()
    for names, persisted, epochs, stated in parts(snapshot):
        answer = wire.alias(admin_pb2.ExportSnapshotResponse)()
        _fill(answer.part, names, persisted=persisted, epochs=epochs, stated=stated)
        yield answer.SerializeToString()


def _head(topic: TopicBase, snapshot: Loaded) -> Any:
    """Return the first part of a snapshot, in the alias schema."""
    policy = admin_pb2.TopicPolicy()
    kept = decode_policy(snapshot.policy)
    kept.fill(policy)
    position = Position(topic.incarnation, snapshot.message_id, snapshot.next_index - 1, snapshot.ownership)
    head = admin_pb2.SnapshotHead(
        topic=topic.name,
        term=snapshot.term,
        position=position.to_proto(),
        policy=policy,
        broker_position=snapshot.opaque,
        producers=len(snapshot.names),
        has_forgotten=snapshot.has_forgotten,
    )
    fill_cursors(kept.cursors, head.cursors)
    answer = wire.alias(admin_pb2.ExportSnapshotResponse)()
    answer.part.head.ParseFromString(head.SerializeToString())
    return answer


def watermark_answers(topic: TopicBase) -> Iterator[bytes]:
    """Yield the response messages of `ExportWatermarks`. Raises the errors of `watermarks`."""
    for names, persisted in watermarks(topic):
        answer = wire.alias(admin_pb2.ExportWatermarksResponse)()
        _fill(answer, names, persisted=persisted)
        yield answer.SerializeToString()


def _fill(message: Any, names: list[bytes], **numbers: Int64s) -> None:
    """Set the column of names and the columns of numbers in a message."""
    column = Binary.of_all(names)
    message.producer_name_offsets, message.producer_names = column.offsets.tobytes(), column.data
    for name, each in numbers.items():
        setattr(message, name, each.tobytes())


# -- An incoming snapshot.


class SavedParts:
    """A snapshot that arrives in parts. The constructor and methods raise INVALID_REQUEST, INVALID_NAME or
    INVALID_POSITION for invalid parts."""

    def __init__(
        self,
        term: int,
        position: Position,
        policy: Policy,
        opaque: bytes,
        producers: int,
        *,
        has_forgotten: bool = False,
    ) -> None:
        if not 0 <= term < MAX_TERM:
            raise error("INVALID_REQUEST", f"term is {term}: it should be 0 to {MAX_TERM - 1}")
        if position.index < -1 or (position.index < 0 and position.message_id is not None):
            what = f"the snapshot has no position that can be: {position}"
            raise error("INVALID_POSITION", what, hint="Export the snapshot again, and import the unchanged file.")
        if len(opaque) > MAX_PLACE_BYTES:
            raise error("INVALID_REQUEST", f"broker_position has {len(opaque)} bytes: at most {MAX_PLACE_BYTES}")
        self._term = term
        self._position = position
        self._policy = encode(policy.check())
        self._opaque = opaque
        self._producers = producers
        self._has_forgotten = has_forgotten
        self._names = Names()
        self._columns: tuple[list[Int64s], ...] = ([], [], [])

    def add(self, names: list[bytes], persisted: Int64s, epochs: Int64s, stated: Int64s) -> None:
        """Add the next producers."""
        columns = (persisted, epochs, stated)
        if any(len(column) != len(names) for column in columns):
            raise error("INVALID_REQUEST", f"a column does not have a value for each of {len(names)} producers")
        for name in names:
            producer_name(decoded_producer_name(name))
        before = len(self._names)
        self._names.add_all(names)
        if len(self._names) != before + len(names):
            raise error("INVALID_REQUEST", "a producer occurs twice")
        if (persisted < NO_SEQUENCE_ID).any() or (epochs < NO_EPOCH).any() or highest_term(epochs) > self._term:
            raise error("INVALID_REQUEST", "a producer has numbers that cannot be")
        if (stated < NOT_STATED).any() or (stated > self._position.index + 1).any():
            raise error("INVALID_REQUEST", "a producer is stated at an index that cannot be")
        for all_of_it, column in zip(self._columns, columns, strict=True):
            all_of_it.append(column)

    def finish(self) -> Loaded:
        """Return the complete snapshot."""
        if len(self._names) != self._producers:
            why = f"producers is {self._producers}, but {len(self._names)} have come"
            raise error("INVALID_REQUEST", why)
        nothing = np.zeros(0, np.int64)
        persisted, epochs, stated = (np.concatenate([nothing, *column]) for column in self._columns)
        return Loaded(
            self._term,
            self._position.index + 1,
            self._position.message_id,
            self._names,
            persisted,
            epochs,
            stated,
            self._position.ownership,
            self._policy,
            self._opaque,
            self._has_forgotten,
        )


class SnapshotReader:
    """A snapshot that arrives in parts of the alias schema. The methods raise INVALID_REQUEST, INVALID_NAME or
    INVALID_POSITION for invalid parts."""

    def __init__(self) -> None:
        self._head: admin_pb2.SnapshotHead | None = None

    def add(self, part: Any) -> None:
        """Add the next part."""
        if self._head is None:
            if not part.HasField("head"):
                raise error("INVALID_REQUEST", "the first message has the head of a snapshot")
            # The head has the same fields in the alias schema as in the real schema.
            self._head = admin_pb2.SnapshotHead.FromString(part.head.SerializeToString())
            self._parts = _begun(self._head)
        if part.producer_names or part.persisted:
            numbers = [values(getattr(part, column), INT64, column) for column in ("persisted", "epochs", "stated")]
            self._parts.add(names_of(part), *numbers)

    def finish(self) -> tuple[admin_pb2.SnapshotHead, Loaded]:
        """Return the head and the complete snapshot."""
        if self._head is None:
            raise error("INVALID_REQUEST", "nothing has come")
        return self._head, self._parts.finish()


def _begun(head: admin_pb2.SnapshotHead) -> SavedParts:
    """Return the snapshot that begins with this head, still without producers. Raises INVALID_REQUEST,
    INVALID_POSITION."""
    position = Position.from_proto(head.position)
    if len(head.cursors) > MAX_CURSORS:
        raise error("INVALID_REQUEST", f"the snapshot has {len(head.cursors)} cursors: more than a topic can have")
    policy = replace(Policy.of_request(head.policy), cursors=cursors_of(head.cursors))
    return SavedParts(
        head.term, position, policy, head.broker_position, head.producers, has_forgotten=head.has_forgotten
    )


# -- Imports into a topic that nobody has used yet.

Imported = TypeVar("Imported", bound=TopicBase)


class TopicImport(ABC, Generic[Imported]):
    """An import into one topic. An earlier import into the topic that is not finished can no longer be finished. The
    caller must call `close`.

    All methods raise TOPIC_IN_USE. If the topic is not serving, they raise the reason.
    """

    def __init__(self, topic: Imported) -> None:
        self._topic: Imported = topic
        self._check_unused()
        topic.newest_import = self

    @property
    def _is_newest(self) -> bool:
        return self._topic.newest_import is self

    def close(self) -> None:
        """Release the topic."""
        if self._is_newest:
            self._topic.newest_import = None

    def _check(self) -> None:
        self._check_unused()
        if not self._is_newest:
            what = f"another import into topic {self._topic.name} was begun meanwhile"
            raise error("TOPIC_IN_USE", what, hint="Wait until one import has ended before you begin another import.")

    @abstractmethod
    def _check_unused(self) -> None: ...


# -- An import of watermarks: the highest sequence ID of each producer.


class WatermarksImport(TopicImport[Imported]):
    """An import of watermarks. No part of the import takes effect unless `finish` is called."""

    def __init__(self, topic: Imported) -> None:
        super().__init__(topic)
        self._order = _Order()

    @abstractmethod
    async def add(self, names: list[bytes], persisted: Int64s) -> None:
        """Add producers. Their names must ascend within a call and from call to call. Also raises INVALID_NAME,
        INVALID_SEQUENCE_ID, INVALID_REQUEST."""

    @abstractmethod
    async def finish(self) -> None:
        """Finish the import. When this returns, the whole import is in force and durable. If this method raises an
        error, either the whole import or no part of the import is in force.

        The call blocks the event loop for about 40 ms per million producers. If the same import was made before, it
        blocks for about 170 ms per million producers.
        """

    def _in_use(self, why: str) -> SeqdedupeError:
        return error("TOPIC_IN_USE", f"watermarks cannot be imported into topic {self._topic.name}: {why}")


def begin_import(topic: TopicBase) -> WatermarksImport[Any]:
    """Return an import into this topic. Raises the errors that all methods of the import raise."""
    if isinstance(topic, Topic):
        return _ImportIntoLog(topic)
    if isinstance(topic, AttachedTopic):
        return _ImportIntoStore(topic)
    raise error("INTERNAL", f"no watermarks can be imported into {topic.name}")


class _ImportIntoLog(WatermarksImport[Topic]):
    """An import as control records. Each part is appended to the log when the part arrives. The last part is written
    only if nobody has opened the topic by then. A producer that opens the topic later waits until the last part has
    settled."""

    def __init__(self, topic: Topic) -> None:
        super().__init__(topic)
        self._parts = 0
        self._may_be_complete = False

    async def add(self, names: list[bytes], persisted: Int64s) -> None:
        await self._order.check(names, persisted)
        await self._append(names, persisted, is_last=False)

    async def finish(self) -> None:
        self._may_be_complete = True
        await self._append([], np.zeros(0, np.int64), is_last=True)

    async def _append(self, names: list[bytes], persisted: Int64s, *, is_last: bool) -> None:
        self._check()
        part = Import(names, persisted, self._parts, is_last)
        self._parts += 1
        await self._topic.append_change(part)

    def close(self) -> None:
        # Once `finish` was called, the log may still complete the import. Then these parts must count, as they will in
        # a replay.
        if self._is_newest and not self._may_be_complete:
            self._topic.import_parts.clear()
        super().close()

    def _check_unused(self) -> None:
        topic = self._topic
        topic.check_serving()
        if topic.next_index > 0:
            raise self._in_use("it has messages")
        if topic.producers.has_sessions():
            raise self._in_use("a producer has opened it, or was reset")


class _ImportIntoStore(WatermarksImport[AttachedTopic]):
    """An import into a topic whose log belongs to a broker: only the store holds the import."""

    def __init__(self, topic: AttachedTopic) -> None:
        super().__init__(topic)
        self._parts = ImportParts()
        self._count = 0

    async def add(self, names: list[bytes], persisted: Int64s) -> None:
        self._check()
        await self._order.check(names, persisted)
        self._check()
        self._parts.add(Import(names, persisted, self._count, is_last=False))
        self._count += 1

    async def finish(self) -> None:
        self._check()
        last = Import([], np.zeros(0, np.int64), self._count, is_last=True)
        if (complete := self._parts.add(last)) is not None:
            complete.apply(self._topic.producers, 0)
        await self._topic.keeper.snapshot()

    def _check_unused(self) -> None:
        topic = self._topic
        topic.check_serving()
        if topic.confirmed_index > 0:
            raise self._in_use("its log has entries")
        if topic.is_attached:
            raise self._in_use("a broker is attached")


class _Order:
    """Checks names and IDs, and checks that the names ascend from call to call."""

    def __init__(self) -> None:
        self._last = b""

    async def check(self, names: list[bytes], persisted: Int64s) -> None:
        if len(names) != len(persisted):
            raise error("INVALID_REQUEST", f"persisted has {len(persisted)} values for {len(names)} producer names")
        for place, (before, name) in enumerate(pairwise([self._last, *names]), 1):
            if place % NAMES_A_STEP == 0:
                await asyncio.sleep(0)
            new_producer_name(decoded_producer_name(name))
            if name <= before:
                raise error("INVALID_REQUEST", f"the producer name {name!r} comes after {before!r}: names have to rise")
        if len(names):
            self._last = names[-1]
        below = np.flatnonzero(persisted < 0)
        if len(below):
            which = int(below[0])
            raise error("INVALID_SEQUENCE_ID", f"{persisted[which]} of producer {names[which]!r} is no sequence ID")


# -- An import of a window of deduplication IDs.
#
# Memory holds only one part of the IDs at a time. Each part is sorted by hash and written to the store as a run. Then
# the runs are merged into one run. When the merged run is durable, a record in the log puts the import in force.
# Without that record, the runs are leftovers of an unfinished import, and are removed.

PART_BYTES = 32 * 1024 * 1024
"""When the collected blocks have this number of bytes, they are written as one run."""
MERGED_PAGES = 1024
"""The approximate number of pages merged in one step. A step takes pages of all runs."""

_NO_BYTES: Uint8s = np.zeros(0, np.uint8)


class WindowImport(TopicImport[Topic]):
    """An import of a window. No part of the window takes effect unless `finish` is called. All methods also raise
    INVALID_REQUEST for data that is not a window, and STORE_UNAVAILABLE."""

    def __init__(self, topic: Topic, checksum: bytes) -> None:
        self._checksum = checksum
        super().__init__(topic)
        self._key = secrets.token_bytes(SECRET_BYTES)
        if topic.ids.imported.there is None:
            # The record of an unreadable import may name a run with a number that is used again now. That record would
            # then seem valid.
            windows.remove_import(topic.store, topic.incarnation)
        self._digest = WindowChecksum()
        self._ids = self._id_bytes = 0
        self._first_ms, self._last_ms = LATEST_MS, 0
        self._last_id: Uint8s = _NO_BYTES
        self._part: list[WindowBlock] = []
        """The blocks that have arrived and are not in a run yet."""
        self._part_bytes = 0
        self._runs: list[IdRun] = []

    async def add(self, block: bytes) -> None:
        """Add the next block of the file."""
        self._check()
        await asyncio.to_thread(self._take, block)
        if self._part_bytes >= PART_BYTES:
            self._runs.append(await self._part_written(for_good=False))

    async def finish(self, ids: int) -> None:
        """End the import, which has `ids` IDs. When this returns, the import is in force and durable. Raises the reason
        why it is not in force, or OUTCOME_UNKNOWN."""
        self._check()
        if ids != self._ids:
            raise error("INVALID_REQUEST", f"ids is {ids}, but {self._ids} have come")
        if self._digest.finish() != self._checksum:
            raise error("INVALID_REQUEST", "the checksum is that of other deduplication IDs than have come")
        run = await (self._merged() if self._runs else self._part_written(for_good=True))
        imported = ImportedIds(run, self._key, self._checksum)
        topic = self._topic
        async with topic.ids.imported.changing:
            await topic.store.wait_until_idle()
            self._check()
            await topic.store.flush(windows.put_import(topic.store, topic.incarnation, imported))
            self._check()
            topic.ids.imported.there = imported
            self._remove_other_runs()
            await self._put_in_force(ImportedWindow(self._checksum, self._ids, self._last_ms))

    def close(self) -> None:
        """Release the topic, and remove the runs that are not in force."""
        was_newest = self._is_newest
        super().close()
        if was_newest and self._topic.state is not State.DRAINING:
            self._remove_other_runs()

    def _remove_other_runs(self) -> None:
        """Remove the intermediate runs, and the record of an import that was never in force."""
        try:
            windows.keep_only_import(self._topic.store, self._topic.incarnation, self._topic.ids.imported.there)
        except UnavailableError as e:
            logger.warning("what is left of an import goes at the next start: %s", e)

    def _check_unused(self) -> None:
        topic = self._topic
        topic.check_serving()
        if topic.window is None:
            why = f"topic {topic.name} is one of sequence IDs: a window of deduplication IDs cannot be imported into it"
            raise error("INVALID_REQUEST", why, hint="Import watermarks into such a topic (`seqdedupe import`).")
        there = topic.newest_policy.imported
        if there is None and topic.next_index > 0:
            raise self._in_use("it has messages")
        if there is not None and there.checksum != self._checksum:
            raise self._in_use(f"another one was imported, of the file whose SHA-256 is {there.checksum.hex()}")

    def _in_use(self, why: str) -> SeqdedupeError:
        return error(
            "TOPIC_IN_USE",
            f"the window cannot be imported into topic {self._topic.name}: {why}",
            hint="Import the file into a newly created topic, before anything is published.",
        )

    async def _put_in_force(self, window: ImportedWindow) -> None:
        """Record the window in the log, durably, before any other record."""
        topic = self._topic
        if topic.newest_policy.imported == window:
            await topic.all_settled()
            return
        done = topic.append_change(replace(topic.newest_policy, imported=window))
        topic.ids.imported.is_under_way = True
        done.add_done_callback(lambda _: topic.ids.imported.settled())
        await asyncio.shield(done)

    # -- blocks and runs -----------------------------------------------------------------------------------------

    def _take(self, raw: bytes) -> None:
        block = parse_block(raw)
        rows = len(block.sizes)
        ids = np.concatenate((self._last_id, block.ids))
        begins = [0] * bool(len(self._last_id)) + [len(self._last_id)]
        offsets = np.concatenate((begins, len(self._last_id) + np.cumsum(block.sizes, dtype=np.int64)))
        if first_not_above(ids, offsets) >= 0:
            why = "the deduplication IDs do not rise: a window is sorted by ID, and contains each ID once"
            raise error("INVALID_REQUEST", why)
        self._last_id = block.ids[len(block.ids) - int(block.sizes[-1]) :]
        self._digest.add(raw, rows)
        self._ids += rows
        if self._ids >= MAX_ROWS:
            raise error("INVALID_REQUEST", f"more than {MAX_ROWS - 1} deduplication IDs cannot be imported")
        self._id_bytes += len(block.ids)
        self._first_ms = min(self._first_ms, int(block.times_ms.min()))
        self._last_ms = max(self._last_ms, int(block.times_ms.max()))
        self._part.append(block)
        self._part_bytes += len(raw)

    async def _part_written(self, *, for_good: bool) -> IdRun:
        """Write the collected blocks as a run, and return the run."""
        entries = await asyncio.to_thread(self._entries)
        self._part, self._part_bytes = [], 0
        # A run that will be merged needs no lookup filter, since no IDs are looked up in it.
        writer = await self._begun(self._ids if for_good else 0)
        await writer.add(entries)
        return await self._finished(writer, self._ids if for_good else len(entries.hashes))

    def _entries(self) -> RunEntries:
        sizes = np.concatenate([_NO_BYTES, *(block.sizes for block in self._part)])
        ids = np.concatenate([_NO_BYTES, *(block.ids for block in self._part)])
        times = np.concatenate([np.zeros(0, np.int64), *(block.times_ms for block in self._part)])
        return entries_with(sizes, seconds_of(times), ids, key_of(self._key))

    async def _merged(self) -> IdRun:
        """Return one run with all IDs."""
        if self._part:
            self._runs.append(await self._part_written(for_good=False))
        writer = await self._begun(self._ids)
        for low, high in parts_of(self._runs, MERGED_PAGES + 2 * len(self._runs)):
            wanted = [(run.number, page) for run in self._runs for page in run.pages_between(low, high)]
            await writer.add(await asyncio.to_thread(self._read, wanted), low, high)
        return await self._finished(writer, self._ids)

    def _read(self, wanted: list[tuple[int, int]]) -> RunEntries:
        pages = read_pages(self._topic.store, self._topic.incarnation, wanted)
        return entries_in([(page, 0) for page in pages], key_of(self._key))

    async def _begun(self, ids: int) -> RunWriter:
        number = self._topic.ids.imported.take_number()
        writer = RunWriter(self._topic.store, self._topic.incarnation, number, 0, ids, self._check)
        await writer.begin()
        return writer

    async def _finished(self, writer: RunWriter, ids: int) -> IdRun:
        times = min(self._first_ms, self._last_ms), self._last_ms
        return await writer.finish(ids, np.array([(0, ids, self._id_bytes, *times)], np.int64))
