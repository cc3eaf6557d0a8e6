"""Reading all logs again in the background, slowly, so that damage is found before somebody needs what it has hit."""

import asyncio
import logging
import os
import random
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from seqdedupe.errors import DamagedError, SeqdedupeError
from seqdedupe.log.embedded.inspection import Damage, DurablePart, inspect_part
from seqdedupe.log.embedded.log import MAX_PLACES, EmbeddedLog
from seqdedupe.log.embedded.tail import read_what_can_be

logger = logging.getLogger("seqdedupe.log")

PASS_SECONDS = 24 * 3600.0
"""A pass over all logs is begun so long after the one before, at the earliest: small logs are not read all the time."""

FILE_BYTES = 64 * 1024
"""What opening a file counts as: thousands of logs that are nearly empty are not gone through at once."""

_NEXT_START = "But the next start reads this file, the log's last one, and may find the topic DAMAGED. "


class Scrub:
    """Reads all segments of the logs that are open, passes without end. Belongs to the event loop.

    At most `bytes_per_second`, above 0, on the long run; what is read is a megabyte or two at a time. The segments of
    a pass come in random order, so that restarts do not always begin with the same ones. What is damaged is read again
    in whole before it is said, once for each place, in the log at level ERROR and in `EmbeddedLog.damage_found`.
    `name_of` gives the topic of a log's folder.
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
        """Goes on until `close`."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Ends with what is being read: a moment."""
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
        """One pass over what there is now."""
        segments = [(incarnation, base) for incarnation, log in self._logs.items() for base in log.base_indexes]
        random.shuffle(segments)
        for incarnation, base_index in segments:
            log = self._logs.get(incarnation)
            if log is None:
                continue
            try:
                await self._look_at(log, base_index)
            except OSError as e:
                logger.warning("%s: the scrub has left out a segment: %s", log.place, e)
            except Exception as e:
                logger.error("%s: the scrub has failed in the segment of index %d", log.place, base_index, exc_info=e)

    async def _look_at(self, log: EmbeddedLog, base_index: int) -> None:
        """A segment, twice if it seems to be damaged. Raises OSError."""
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
                    # Its record would keep all that was read with it in memory.
                    found.append(replace(item, record=None))
                await self._pay()
            await self._pay()
        except (FileNotFoundError, DamagedError) as e:
            found.append(_whole_file(part, e))
        finally:
            self._thread.submit(parts.close)
        # Retention may have dropped it meanwhile, or the topic was deleted: what is missing then is no damage.
        return found if log.durable_part(base_index) is not None else []

    def _read_from_disk(self, file: int, size: int, offset: int) -> bytes:
        """What the disk has, not what the system remembers of it; nor does it remember what only this has read."""
        os.posix_fadvise(file, offset, size, os.POSIX_FADV_DONTNEED)
        raw = read_what_can_be(file, size, offset)
        os.posix_fadvise(file, offset, len(raw), os.POSIX_FADV_DONTNEED)
        self._bytes_read += len(raw)
        return raw

    async def _pay(self) -> None:
        """Waits for as long as the rate wants it for what was read."""
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
