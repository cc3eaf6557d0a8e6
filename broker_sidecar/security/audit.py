"""The audit trail: who did what that changes the sidecar, and who was refused."""

import asyncio
import fcntl
import logging
import os
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from seqdedupe.audit_trail import NO_LINE, encode, last_link
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.files import sync_folder
from seqdedupe.tasks import retrieve

logger = logging.getLogger("seqdedupe.audit")

# -- What happens again and again is told once, and then counted, for each caller apart.

T = TypeVar("T", bound=Hashable)
C = TypeVar("C", bound=Hashable)

MOST_OF_CALLER = 20
"""Different ones that are told of one caller; the rest is counted together."""

MOST_CALLERS = 1_000
"""That are kept apart; what the rest does is counted together."""


@dataclass(slots=True)
class _Repeated(Generic[T]):
    counts: dict[T, int] = field(default_factory=dict)
    others: int = 0


class Repeats(Generic[C, T]):
    """What callers did since the last `take`, and how often it came again. Bounded, whatever comes.

    No caller can hide what another one does, unless there are more than `MOST_CALLERS`.
    """

    def __init__(self) -> None:
        self._callers: dict[C, _Repeated[T]] = {}
        self._others = 0

    def is_first(self, who: C, told: T) -> bool:
        """Whether this is to be told now; else it is counted."""
        caller = self._callers.get(who)
        if caller is None:
            if len(self._callers) == MOST_CALLERS:
                self._others += 1
                return False
            caller = self._callers[who] = _Repeated()
        count = caller.counts.get(told)
        if count is None and len(caller.counts) == MOST_OF_CALLER:
            caller.others += 1
            return False
        caller.counts[told] = 0 if count is None else count + 1
        return count is None

    def take(self) -> Iterator[tuple[C | None, T | None, int]]:
        """Each that came again, of whom, and how often; with None, how many others of that caller were not told at
        all; and with None twice, how many of other callers. Forgets them."""
        callers, others = self._callers, self._others
        self._callers, self._others = {}, 0
        for who, caller in callers.items():
            yield from ((who, told, count) for told, count in caller.counts.items() if count)
            if caller.others:
                yield who, None, caller.others
        if others:
            yield None, None, others


REPEATS_SECONDS = 10.0
"""Of refusals that are alike the first is written at once, and after so long how many more there were."""

MAX_WAITING = 10_000
"""Lines that wait to be written. Beyond that, whoever asks for one is refused, and what is told is lost."""

MAX_WAITING_REFUSALS = MAX_WAITING // 2
"""The same for refusals: they leave room for all else."""


@dataclass
class _Line:
    event: str
    fields: Mapping[str, object]
    time: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="microseconds"))
    written: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class _Caller(NamedTuple):
    subject: str
    network: str


class Audit:
    """Writes one trail, as the only process that does. It belongs to one event loop.

    What waits is written and synced together, off the loop. After a failure the file is opened anew, and goes on after
    its last whole line: a line that was reported as not written may be there.
    """

    def __init__(self, path: Path) -> None:
        """Opens it; blocks. Raises AUDIT_UNAVAILABLE, AUDIT_DAMAGED, NEWER_FORMAT."""
        self._path = path
        self._link = NO_LINE
        self._file = -1
        self._is_moved = False
        self._waiting: list[_Line] = []
        self._writing: asyncio.Task[None] | None = None
        # Callers without a token have their own places: they cannot take those of callers with one.
        self._repeats: defaultdict[str, Repeats[_Caller, frozenset[tuple[str, object]]]] = defaultdict(Repeats)
        self._counted: asyncio.TimerHandle | None = None
        try:
            self._open()
        except OSError as e:
            raise self._unavailable(e) from e

    async def write(self, event: str, **fields: object) -> None:
        """A line that is durable when this returns. Raises AUDIT_UNAVAILABLE."""
        if len(self._waiting) >= MAX_WAITING:
            raise error("AUDIT_UNAVAILABLE", f"{MAX_WAITING} lines wait to be written to {self._path}")
        await self._put(event, fields).written

    def tell(self, event: str, **fields: object) -> None:
        """A line that is written soon, however many others there are."""
        self._put_untold(event, fields, MAX_WAITING)

    def refused(self, event: str, network: str, **fields: object) -> None:
        """A line about a caller (its `subject`, if it is known) in this network, which is written soon. Of a caller's
        lines that are alike only the first is written, and then how many more there were."""
        if self._counted is None:
            self._counted = asyncio.get_running_loop().call_later(REPEATS_SECONDS, self._tell_counts)
        caller = _Caller(str(fields.get("subject", "")), network)
        if self._repeats[event].is_first(caller, frozenset(fields.items())):
            self._put_untold(event, fields, MAX_WAITING_REFUSALS)

    def reopen(self) -> None:
        """The file may have been moved away: what comes goes to the one that has its name, in the same chain."""
        self._is_moved = True

    async def close(self) -> None:
        """Writes what waits."""
        if self._counted is not None:
            self._counted.cancel()
            self._tell_counts()
        if self._writing is not None:
            await self._writing
        self._close()

    def _tell_counts(self) -> None:
        self._counted = None
        for event, repeats in self._repeats.items():
            for caller, told, count in repeats.take():
                if told is not None:
                    self._put_untold(event, dict(told) | {"repeats": count}, MAX_WAITING_REFUSALS)
                    continue
                who = {"subject": caller.subject, "address": caller.network} if caller is not None else {}
                self._put_untold("others refused", {**who, "refused": event, "repeats": count}, MAX_WAITING_REFUSALS)

    def _put_untold(self, event: str, fields: Mapping[str, object], most_waiting: int) -> None:
        """Nobody waits for this line: that it cannot be written is logged."""
        if len(self._waiting) >= most_waiting:
            logger.error("a line of the audit trail is lost: too many wait to be written", extra={"line": event})
            return
        self._put(event, fields).written.add_done_callback(retrieve)

    def _put(self, event: str, fields: Mapping[str, object]) -> _Line:
        line = _Line(event, fields)
        self._waiting.append(line)
        if self._writing is None or self._writing.done():
            self._writing = asyncio.ensure_future(self._write_waiting())
        return line

    async def _write_waiting(self) -> None:
        while self._waiting:
            lines, self._waiting = self._waiting, []
            failure: SeqdedupeError | None = None
            try:
                await asyncio.to_thread(self._append, lines)
            except SeqdedupeError as e:
                failure = e
                logger.error("the audit trail cannot be written", extra={"why": e.message, "lines": len(lines)})
            for line in lines:
                if line.written.done():  # whoever waited for it was cancelled
                    continue
                if failure is None:
                    line.written.set_result(None)
                else:
                    line.written.set_exception(failure)

    def _append(self, lines: list[_Line]) -> None:
        """Writes and syncs them. Raises AUDIT_UNAVAILABLE, AUDIT_DAMAGED, NEWER_FORMAT."""
        try:
            if self._is_moved:
                self._is_moved = False
                self._close()
            if self._file < 0:
                self._open()
            link, encoded = self._link, []
            for line in lines:
                data, link = encode(link, line.time, line.event, line.fields)
                encoded.append(data)
            rest = memoryview(b"".join(encoded))
            while rest:
                rest = rest[os.write(self._file, rest) :]
            os.fdatasync(self._file)
        except OSError as e:
            self._close()
            raise self._unavailable(e) from e
        self._link = link

    def _open(self) -> None:
        """Goes on after the last whole line; in a new file with the chain that there was.

        Raises OSError, AUDIT_DAMAGED, AUDIT_UNAVAILABLE, NEWER_FORMAT.
        """
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(self._path, flags, 0o600)
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as e:
                raise error("AUDIT_UNAVAILABLE", f"another process writes the audit trail {self._path}") from e
            os.fchmod(file, 0o600)
            with open(file, "rb", closefd=False) as reading:
                link, end = last_link(reading)
            if end < os.fstat(file).st_size:
                logger.error(
                    "the last line of the audit trail was cut off, and is removed", extra={"line": link.number + 1}
                )
                os.ftruncate(file, end)
            os.fsync(file)
            sync_folder(self._path.absolute().parent)
        except BaseException:
            os.close(file)
            raise
        self._file = file
        self._link = self._link if link == NO_LINE else link

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _unavailable(self, e: OSError) -> SeqdedupeError:
        return error("AUDIT_UNAVAILABLE", f"the audit trail {self._path} cannot be written: {e.strerror or e}")
