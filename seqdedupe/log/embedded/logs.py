"""All embedded logs of a sidecar, in one folder with a subfolder per log. This module also has the scrub, which reads
the logs in the background to find damage."""

import asyncio
import logging
import os
import random
import re
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from seqdedupe.errors import DamagedError, SeqdedupeError, error
from seqdedupe.files import sync_folder, write_all_synced, write_synced
from seqdedupe.format.headers import key_of
from seqdedupe.log.contract import AS_USUAL, Layout, LogName
from seqdedupe.log.embedded import log_folder
from seqdedupe.log.embedded.commit import Committer, Journal, wall_ms
from seqdedupe.log.embedded.inspection import Damage, DurablePart, inspect_part
from seqdedupe.log.embedded.journal_replay import JournalReplay
from seqdedupe.log.embedded.log import MAX_PLACES, EmbeddedLog, EmbeddedResources
from seqdedupe.log.embedded.log_folder import SECRET_FILE, TOPIC_FILE, secret_of
from seqdedupe.log.embedded.reader import ReadAhead
from seqdedupe.log.embedded.segment import LogIdentity, Segment, segment_path, unreadable
from seqdedupe.log.embedded.tail import Tail, base_indexes, open_segments, read_what_can_be
from seqdedupe.log.embedded.writer import Room
from seqdedupe.names import topic_name

# -- The scrub reads all logs slowly in the background, to find damage before a reader needs the damaged data.

PASS_SECONDS = 24 * 3600.0
"""The least time between the starts of two passes over all logs. So small logs are not read all the time."""

FILE_BYTES = 64 * 1024
"""Opening a file counts as reading this number of bytes. So thousands of nearly empty logs are not all read at once."""

_NEXT_START = "But the next start reads this file, the log's last one, and may find the topic DAMAGED. "


class Scrub:
    """Reads all segments of the open logs, in pass after pass. All methods must be called on the event loop.

    On average, the scrub reads at most `bytes_per_second`, which is above 0. One read has one or two megabytes. A pass
    reads the segments in random order, so that a restart does not always begin with the same segments. A segment that
    seems damaged is read a second time as a whole before damage is reported. Each damaged place is reported once, to
    the logger at level ERROR and in `EmbeddedLog.damage_found`. `name_of` returns the topic's name for a log's folder.
    """

    def __init__(
        self,
        logs: Mapping[int, EmbeddedLog],
        bytes_per_second: int,
        name_of: Callable[[Path], str | None],
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._logs = logs
        self._bytes_per_second = bytes_per_second
        self._name_of = name_of
        self._sleep = sleep
        self._bytes_read = 0
        self._bytes_paid = 0
        self._thread = ThreadPoolExecutor(1, "seqdedupe-scrub")
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Scrub until `close`."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Stop the scrub after the current read."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await asyncio.to_thread(self._thread.shutdown)

    async def _run(self) -> None:
        while True:
            before = self._bytes_paid
            await self.run_once()
            seconds = (self._bytes_paid - before) / self._bytes_per_second
            await self._sleep(max(PASS_SECONDS - seconds, 0))

    async def run_once(self) -> None:
        """Make one pass over the segments that exist at the time of this call."""
        segments = [(incarnation, base) for incarnation, log in self._logs.items() for base in log.base_indexes]
        random.shuffle(segments)
        for incarnation, base_index in segments:
            log = self._logs.get(incarnation)
            if log is None:
                continue
            try:
                await self._look_at(log, base_index)
            except OSError as e:
                logger.warning("%s: the scrub has skipped a segment: %s", log.place, e)
            except Exception as e:
                logger.error("%s: the scrub has failed in the segment of index %d", log.place, base_index, exc_info=e)

    async def _look_at(self, log: EmbeddedLog, base_index: int) -> None:
        """Read a segment. If it seems damaged, read it again, and report the damage found by both reads. Raises
        OSError."""
        if not (seen := await self._damage_of(log, base_index)):
            return
        again = {damage.offset for damage in await self._damage_of(log, base_index)}
        for damage in seen:
            if damage.offset in again and log.add_damage(base_index, damage):
                await self._say(log, damage, is_last=base_index == log.base_indexes[-1])

    async def _damage_of(self, log: EmbeddedLog, base_index: int) -> list[Damage]:
        part = log.durable_part(base_index)
        if part is None:
            return []
        run, found = asyncio.get_running_loop().run_in_executor, list[Damage]()
        parts = inspect_part(part, self._read_from_disk)
        self._bytes_read += FILE_BYTES
        try:
            while (item := await run(self._thread, next, parts, None)) is not None:
                if isinstance(item, Damage) and len(found) < MAX_PLACES:
                    # The record is dropped, because it would keep the whole buffer of the read in memory.
                    found.append(replace(item, record=None))
                await self._pay()
            await self._pay()
        except (FileNotFoundError, DamagedError) as e:
            found.append(_whole_file(part, e))
        finally:
            self._thread.submit(parts.close)
        # If retention has dropped the segment meanwhile, or the topic was deleted, missing data is not damage.
        return found if log.durable_part(base_index) is not None else []

    def _read_from_disk(self, file: int, size: int, offset: int) -> bytes:
        """Read from the disk itself, and bypass the system's page cache. Afterwards, drop the data from the page
        cache."""
        os.posix_fadvise(file, offset, size, os.POSIX_FADV_DONTNEED)
        raw = read_what_can_be(file, size, offset)
        os.posix_fadvise(file, offset, len(raw), os.POSIX_FADV_DONTNEED)
        self._bytes_read += len(raw)
        return raw

    async def _pay(self) -> None:
        """Wait until the bytes read so far are within the allowed rate."""
        size = self._bytes_read - self._bytes_paid
        self._bytes_paid += size
        await self._sleep(size / self._bytes_per_second)

    async def _say(self, log: EmbeddedLog, damage: Damage, *, is_last: bool) -> None:
        folder = Path(log.place)
        try:
            name = await asyncio.get_running_loop().run_in_executor(self._thread, self._name_of, folder)
        except (SeqdedupeError, OSError):
            name = None
        logger.error(
            "topic %s is damaged at byte %d of %s: %s. %s. All else is read and published as ever, and readers get "
            "past it with skip_damaged. %sTo know more, and to save what is left, stop the sidecar and run: "
            "seqdedupe doctor %s",
            name or log.place,
            damage.offset,
            damage.file,
            damage.what,
            _concerned(log.incarnation, damage),
            _NEXT_START if is_last else "",
            folder.parent.parent,
        )


def _whole_file(part: DurablePart, e: Exception) -> Damage:
    what = "the file is missing" if isinstance(e, FileNotFoundError) else str(e)
    return Damage(part.path, 0, what, part.base_index, part.next_index)


def _concerned(incarnation: int, damage: Damage) -> str:
    first, last = damage.first_index, (damage.next_index or 0) - 1
    if last < first:
        return "No message is missing"
    return f"Messages at indexes {first} to {last} cannot be read, IDs {incarnation}:{first} to {incarnation}:{last}"


logger = logging.getLogger("seqdedupe.log")

DEFAULT_SEGMENT_BYTES = 128 * 1024 * 1024
READ_THREADS = 4

_SAID = re.compile(rb"(.*?)(?:\n([1-9]\d{0,3}) partitions\n)?", re.DOTALL)

T = TypeVar("T")


class EmbeddedLogs:
    """The logs of one folder, which no other process may use. Implements `seqdedupe.log.contract.Logs`.

    - `clock_ms` returns the publish time of new messages. Default: the process's clock.
    - `earliest_ms` returns the time that retention uses, or 0 while this time is unknown. Default: `clock_ms`.
    - `fatal` is called, in a thread, with a reason when the content of the disk is no longer known. The function must
      end the process.
    - `segment_bytes`: a new segment begins when the last segment has reached this size. Retention drops whole segments.
    - `tell_journal` is called, in a thread, with the value that the next process must pass as `has_journal`.
    - `has_journal`: if true, a missing journal is damage.
    - `gives_up_journal`: if true, damaged parts of the journal are ignored.
    - `known_names` returns, in a thread, the topics and partition counts of the logs that the store knows, by
      incarnation.
    """

    def __init__(
        self,
        folder: Path,
        *,
        clock_ms: Callable[[], int] | None = None,
        earliest_ms: Callable[[], int] | None = None,
        fatal: Callable[[str], None],
        segment_bytes: int = DEFAULT_SEGMENT_BYTES,
        has_journal: bool = False,
        tell_journal: Callable[[bool], None] = lambda has_journal: None,
        gives_up_journal: bool = False,
        known_names: Callable[[], Mapping[int, tuple[str, int]]] = dict,
    ) -> None:
        self._folder = folder
        self._known_names = known_names
        self._fatal = fatal
        self._committer: Committer | None = None
        self._open: dict[int, EmbeddedLog] = {}
        self._look_for_closed_at = 2
        self._made: set[int] = set()
        """The incarnations of logs that this process has created durably and has not opened yet."""
        self._scrub: Scrub | None = None
        self._tell_journal = tell_journal
        self._replay = JournalReplay(folder, is_expected=has_journal, gives_up=gives_up_journal)
        clock_ms = clock_ms or wall_ms
        self._shared = EmbeddedResources(
            clock_ms=clock_ms,
            earliest_ms=earliest_ms or clock_ms,
            segment_bytes=segment_bytes,
            committer=lambda: self.committer,
            threads=ThreadPoolExecutor(READ_THREADS, "seqdedupe-log"),
            read_ahead=ReadAhead(),
            room=Room(folder),
        )

    @property
    def committer(self) -> Committer:
        """The commit thread. The first access, which must be on the event loop, starts the thread."""
        if self._committer is None:
            self._committer = Committer(self._shared.clock_ms, self._fatal, Journal(self._replay, self._tell_journal))
        return self._committer

    @property
    def running_committer(self) -> Committer | None:
        """The commit thread; None if it was not started."""
        return self._committer

    async def list(self, without: Container[str] = ()) -> list[LogName]:
        """See `Logs.list`. If a log's folder has lost the topic's name, and the store knows the name, the file is
        written again."""
        try:
            return await self._in_thread(_names, self._folder, self._replay, self._known_names())
        except OSError as e:
            raise unreadable(self._folder, e) from e

    async def create(
        self, incarnation: int, topic: str, secret: bytes, partitions: int = 0, layout: Layout = AS_USUAL
    ) -> None:
        """See `Logs.create`."""
        try:
            await self._in_thread(create_log, self.folder_of(incarnation), topic, secret, partitions)
        except OSError as e:
            raise error("LOG_REFUSED", f"the log of topic {topic} cannot be made: {e}") from e
        self._made.add(incarnation)

    def folder_of(self, incarnation: int) -> Path:
        """Return the folder of a log."""
        return self._folder / str(incarnation)

    def arrival(self, incarnation: int) -> log_folder.Arrival:
        """Return an object that receives a log from another sidecar."""
        return log_folder.Arrival(self._folder, incarnation)

    def receiver(self) -> str:
        """See `log_folder.receiver`. The call blocks. Raises OSError."""
        return log_folder.receiver(self._folder)

    def empty_arrivals(self) -> set[int]:
        """Remove the segments of logs that were arriving when the previous process ended. Return the incarnations of
        these logs. The call blocks. Raises OSError."""
        folder = self._folder / log_folder.ARRIVING
        coming = incarnations(folder) if folder.is_dir() else []
        for incarnation in coming:
            log_folder.remove_messages(folder / str(incarnation))
        return set(coming)

    def remove_arrivals(self) -> None:
        """See `log_folder.remove_all`. Blocks."""
        log_folder.remove_all(self._folder)

    def has_moved(self, incarnation: int) -> bool:
        """Return whether another sidecar has the log. Raises OSError."""
        return log_folder.moved_to(self.folder_of(incarnation)) is not None

    def has_arrived(self, incarnation: int) -> bool:
        """Return true if the log has arrived from another sidecar, and that sidecar may not have recorded the arrival
        yet. Raises OSError."""
        return (self.folder_of(incarnation) / log_folder.ARRIVED_FILE).exists()

    def secret_of(self, incarnation: int, known: bytes) -> bytes:
        """Return the secret of a log. `known` is the store's copy of the secret. The call blocks. Raises LOG_DAMAGED,
        OLDER_FORMAT; OSError."""
        found = secret_of(self.folder_of(incarnation), known)
        if found.why is not None:
            raise found.why
        return found.secret

    def remove_moved(self, incarnation: int) -> None:
        """Remove the messages of a log that another sidecar has. Keep the record of that sidecar. The call blocks.
        Raises OSError; the call can be repeated."""
        self._replay.drop(incarnation)
        log_folder.remove_messages(self.folder_of(incarnation))

    async def take_over(
        self, topic: str, incarnations: Callable[[int], Sequence[int]], layout: Layout = AS_USUAL
    ) -> None:
        """See `Logs.take_over`. Raises INVALID_REQUEST, because no other program makes these logs."""
        raise error("INVALID_REQUEST", f"{topic} cannot be taken over: the log is the sidecar's own")

    async def announce(self, whole: str) -> None:
        """See `Logs.announce`. Do nothing, because no other sidecar shares these logs."""

    async def delete(self, *incarnations: int) -> None:
        """See `Logs.delete`."""
        for incarnation in incarnations:
            try:
                await self._in_thread(self._delete, incarnation)
            except OSError as e:
                raise error("LOG_REFUSED", f"the log {self.folder_of(incarnation)} cannot be removed: {e}") from e

    def _delete(self, incarnation: int) -> None:
        folder = self.folder_of(incarnation)
        if folder.exists():
            shutil.rmtree(folder)
            sync_folder(self._folder)
        self._replay.drop(incarnation)

    async def open(
        self, incarnation: int, covered_index: int, secret: bytes | None = None, place: bytes = b""
    ) -> EmbeddedLog:
        """See `Logs.open`. Raises NOT_OWNER if another sidecar has the log, or may have it.

        A crash may leave a torn tail. The tail is skipped, and counted in the log's `cut_bytes` and `cut_records`. The
        first `open_for_writing` cuts the tail off, makes the end of the log durable again, and writes the secret if the
        folder lacks it. Opening itself writes none of this, so a log on a full disk can be opened and read.
        """
        folder = self.folder_of(incarnation)

        def look() -> tuple[list[Segment], Tail]:
            log_folder.check_stays(folder)
            found = secret_of(folder, secret or b"")
            if found.why is not None:
                raise found.why
            identity = LogIdentity(incarnation, key_of(found.secret))
            self._replay.take_back(folder, identity)
            segments, tail = open_segments(folder, identity, covered_index)
            if found.missing is not None:
                tail.missing = (found.missing, found.secret)
            return segments, tail

        try:
            try:
                opened = await self._in_thread(look)
            except DamagedError:
                # Damage is read a second time before it is reported: the first read may have failed by chance.
                opened = await self._in_thread(look)
        except OSError as e:
            raise unreadable(folder, e) from e
        tail = opened[1]
        tail.is_new = incarnation in self._made and not (tail.segment.end or tail.cut_bytes or tail.missing)
        self._made.discard(incarnation)
        if len(self._open) >= self._look_for_closed_at:
            for closed in [key for key, log in self._open.items() if log.is_closed]:
                del self._open[closed]
            # Search again when the number of entries has doubled: a search at each opening would take longer than the
            # opening.
            self._look_for_closed_at = 2 * len(self._open) + 1
        self._open[incarnation] = log = EmbeddedLog(self._shared, folder, *opened)
        return log

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Pause retention while the block runs, and resume it afterwards. Topics may still be deleted."""
        hold = object()
        self._shared.holds.add(hold)
        try:
            for log in [*self._open.values()]:
                await log.trimming_rests()
            yield
        finally:
            self._shared.holds.discard(hold)
            for log in self._open.values():
                if log.has_to_trim and not log.is_closed:
                    log.go_on_trimming()

    def parts(self) -> "dict[int, Sequence[DurablePart]]":
        """Return the parts of every open log that readers may see at the time of this call, by incarnation."""
        return {incarnation: log.parts for incarnation, log in self._open.items() if not log.is_closed}

    def scrub(self, bytes_per_second: int) -> None:
        """Begin to scrub the open logs for damage, until `close`. The rate must be above 0."""
        self._scrub = Scrub(self._open, bytes_per_second, topic_of)
        self._scrub.begin()

    async def close(self) -> None:
        """See `Logs.close`."""
        if self._scrub is not None:
            await self._scrub.close()
        if self._committer is not None:
            await self._committer.close()
        self._shared.threads.shutdown()

    async def _in_thread(self, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._shared.threads, function, *arguments)


def create_log(folder: Path, topic: str, secret: bytes, partitions: int = 0) -> None:
    """Create an empty log in its folder, or complete a log whose creation was interrupted. When this returns, the
    change is durable. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    folders = (folder, folder.parent, folder.parent.parent)
    # On a disk with slow syncs, several concurrent syncs take only as long as one sync.
    with ThreadPoolExecutor(len(folders), "seqdedupe-create") as threads:
        if not base_indexes(folder):
            write_all_synced(folder, {SECRET_FILE: secret, TOPIC_FILE: _saying(topic, partitions)}, threads)
            # The segment is created last. So a log that has a segment also has all other files.
            os.close(os.open(segment_path(folder, 0), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))
        list(threads.map(sync_folder, folders))


def _names(folder: Path, replay: JournalReplay, known: Mapping[int, tuple[str, int]]) -> list[LogName]:
    if not folder.exists():
        return []
    unfinished = set[int]()
    with suppress(OSError):  # opening a log raises the same error, and is retried
        unfinished = replay.left()
    return [_name(folder, incarnation, incarnation in unfinished, known) for incarnation in incarnations(folder)]


def _name(folder: Path, incarnation: int, is_unfinished: bool, known: Mapping[int, tuple[str, int]]) -> LogName:
    """Return the name of one log. If the name cannot be read, put the error into `why`, so that the other logs are
    still listed."""
    path = folder / str(incarnation) / TOPIC_FILE
    topic: str | None = None
    partitions = 0
    why: SeqdedupeError | None = None
    try:
        topic, partitions = said_by(path.parent)
    except DamagedError as e:
        why = e
    except OSError as e:
        # Do not write the file again: the failure of the disk may be temporary.
        return LogName(incarnation, None, is_unfinished=is_unfinished, why=_without_name(path, unreadable(path, e)))
    if topic is None and incarnation in known:
        topic, partitions = known[incarnation]
        is_lost = why or "it is missing or empty"
        logger.warning("%s is written again, as the store knows it, %s: %s", path, topic, is_lost)
        with suppress(OSError):
            write_synced(path, _saying(topic, partitions))
    elif why is not None:
        why = _without_name(path, why)
    return LogName(incarnation, topic, partitions, is_unfinished=is_unfinished, why=None if topic else why)


def _without_name(path: Path, why: SeqdedupeError) -> SeqdedupeError:
    """Return the error for a log whose name the store does not know either."""
    log, logs = path.parent, path.parent.parent
    hint = (
        "The sidecar does not start, and nothing was changed. Put the file back from a backup; or set this log aside, "
        f"and start again without its topic: mv {log} {logs.parent / f'set-aside-{log.name}'}"
    )
    return error(why.reason, why.message, hint=hint, file=path)


def _saying(topic: str, partitions: int) -> bytes:
    """Return the bytes of TOPIC_FILE."""
    return (f"{topic}\n{partitions} partitions\n" if partitions else topic).encode()


def incarnations(folder: Path) -> list[int]:
    """Return the incarnations of the logs in a folder, in order. Raises OSError."""
    return sorted(int(entry.name) for entry in os.scandir(folder) if entry.name.isdecimal())


def topic_of(folder: Path) -> str | None:
    """Return the topic's name from a log's folder; None if the folder has no name. Raises LOG_DAMAGED; OSError."""
    return said_by(folder)[0]


def said_by(folder: Path) -> tuple[str | None, int]:
    """Return the result of `topic_of` and the number of partitions. The number is 0 if the log is not a partition.
    Raises LOG_DAMAGED; OSError."""
    path = folder / TOPIC_FILE
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None, 0
    try:
        name, partitions = _SAID.fullmatch(raw).groups()  # type: ignore[union-attr]  # it matches anything, or nothing
        return (topic_name(name.decode()) if name else None), int(partitions or 0)
    except (SeqdedupeError, UnicodeDecodeError) as e:
        raise error("LOG_DAMAGED", f"{path} does not say the name of a topic: {e}", file=path) from e
