"""The audit trail: who did what that changes the sidecar, and who was refused. docs/guides/audit.md lists the events.

Begin with `Trail`, which says what of the calls stands there; `Audit` writes the file.
"""

import asyncio
import fcntl
import hashlib
import logging
import math
import os
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Hashable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from google.protobuf import text_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from broker_sidecar.security.permissions import MAX_NAMES_TOLD, Denial, deciding_rule
from broker_sidecar.security.subject import Subject, caller, host_of, network_of
from seqdedupe.audit_trail import NO_LINE, cut, encode, last_link
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.files import check_regular, sync_folder
from seqdedupe.limits import MAX_NAME_BYTES
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
        repeated = self._callers.get(who)
        if repeated is None:
            if len(self._callers) == MOST_CALLERS:
                self._others += 1
                return False
            repeated = self._callers[who] = _Repeated()
        count = repeated.counts.get(told)
        if count is None and len(repeated.counts) == MOST_OF_CALLER:
            repeated.others += 1
            return False
        repeated.counts[told] = 0 if count is None else count + 1
        return count is None

    def take(self) -> Iterator[tuple[C | None, T | None, int]]:
        """Each that came again, of whom, and how often; with None, how many others of that caller were not told at
        all; and with None twice, how many of other callers. Forgets them."""
        callers, others = self._callers, self._others
        self._callers, self._others = {}, 0
        for who, repeated in callers.items():
            yield from ((who, told, count) for told, count in repeated.counts.items() if count)
            if repeated.others:
                yield who, None, repeated.others
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
        whose = _Caller(str(fields.get("subject", "")), network)
        if self._repeats[event].is_first(whose, frozenset(fields.items())):
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
            for whose, told, count in repeats.take():
                if told is not None:
                    self._put_untold(event, dict(told) | {"repeats": count}, MAX_WAITING_REFUSALS)
                    continue
                who = {"subject": whose.subject, "address": whose.network} if whose is not None else {}
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
            check_regular(file, self._path)
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


# -- Whose a producer name was before.

MAX_OPENS = 100_000
"""Remembered, of all topics together. Beyond that, the subject with the most loses its oldest: nobody who opens again
and again has what others opened forgotten."""


class Openers:
    """Who has opened sessions since the sidecar started. One call of Open gives many names one epoch."""

    def __init__(self) -> None:
        self._subjects: dict[tuple[int, int], str] = {}
        self._opens: defaultdict[str, deque[tuple[int, int]]] = defaultdict(deque)
        """Of each subject, the oldest first."""

    def opened(self, incarnation: int, epoch: int, subject: str) -> None:
        """A subject has opened names of a topic with this epoch."""
        if len(self._subjects) >= MAX_OPENS:
            most = max(self._opens, key=lambda one: len(self._opens[one]))
            oldest = self._opens[most].popleft()
            self._subjects.pop(oldest, None)
            if not self._opens[most]:
                del self._opens[most]
        self._subjects[incarnation, epoch] = subject
        self._opens[subject].append((incarnation, epoch))

    def of(self, incarnation: int, epoch: int) -> str | None:
        """Who has opened what has this epoch; None if that is not remembered."""
        return self._subjects.get((incarnation, epoch))


MAX_NAME_BYTES_TOLD = 64
MAX_NAMES_BYTES_TOLD = 512
"""Of a producer name or cursor, and of all names in a line: what is longer is cut. Who is refused may choose them."""

MAX_REQUEST_BYTES_TOLD = 640
"""Of a request. It is cut after that."""

MAX_VALUES_TOLD = 16
"""Of a field that has many."""

_BEGINNING_TOLD = 32
"""Characters of a text that is longer than any name is. Its length and hash tell which one it was."""

MAX_LINE_BYTES_TOLD = 1280
"""Of a line about a call, beside the names of subjects and of rules."""

MOST_FAILED = 1_000
"""Calls of one caller for whom rules count, in `REPEATS_SECONDS`, that were to change something and have failed. Each
takes two lines. A script may ask for so many topics at once that are there already."""

_AFTERWARDS = "it was carried out, but "
"""Before why that could not be written."""


class Trail:
    """Puts calls into an audit trail; into none, if there is none."""

    def __init__(self, audit: Audit | None) -> None:
        self._audit = audit
        self._openers = Openers()
        self._failed: Counter[str] = Counter()
        """By caller for whom rules count: how many of its changes have failed since `_failed_since`."""
        self._failed_since = -math.inf

    def unauthenticated(self, call: str, address: str, e: SeqdedupeError) -> None:
        """Somebody has shown nothing, or nothing that is valid. The error says whose it was, where that is proven."""
        if self._audit is not None:
            what = {"address": host_of(address), "call": _short(call), "reason": e.reason}
            what |= {name: e.numbers[name] for name in ("subject", "kind") if name in e.numbers}
            self._audit.refused("unauthenticated", network_of(address), **what)

    def denied(self, denial: Denial) -> None:
        """The rules do not allow it."""
        if self._audit is not None:
            self._audit.refused(
                "denied",
                network_of(denial.subject.address),
                **_who(denial.subject),
                action=denial.action.value,
                topic=denial.topic,
                **_names(denial.producer_names),
                **({"cursor": cut(denial.cursor, MAX_NAME_BYTES_TOLD)} if denial.cursor else {}),
                rule=denial.rule.name if denial.rule is not None else "",
            )

    @asynccontextmanager
    async def change(self, call: str, request: Message | str) -> AsyncIterator[None]:
        """Around what an operator's call changes: it stands in the trail before it is done, and before it is answered.

        Raises AUDIT_UNAVAILABLE: before the block, or after it, and then it was carried out; SHARE_EXCEEDED before it,
        if too many of the caller's have failed just now.
        """
        if (audit := self._audit) is None:
            yield
            return
        subject = caller()
        what = {**_who(subject), "call": _short(call)}
        if not subject.is_unrestricted and (too_often := self._failed_too_often(subject)) is not None:
            audit.refused("failed", network_of(subject.address), **what, why=too_often.reason)
            raise too_often
        what["request"] = _text(request)
        await audit.write("call", **what, rule=deciding_rule())
        try:
            yield
        except BaseException as e:
            self._failed[subject.name] += not subject.is_unrestricted
            audit.tell("failed", **what, why=_why(e))
            raise
        try:
            await audit.write("done", **what)
        except SeqdedupeError as e:
            raise error(e.reason, _AFTERWARDS + e.message) from e

    def _failed_too_often(self, subject: Subject) -> SeqdedupeError | None:
        """Why no change of this caller is tried now; it would write two more lines if it failed as those before."""
        if (now := time.monotonic()) >= self._failed_since + REPEATS_SECONDS:
            self._failed.clear()
            self._failed_since = now
        if self._failed[subject.name] < MOST_FAILED:
            return None
        what = f"{MOST_FAILED} changes of {subject.name!r} have failed within {REPEATS_SECONDS:.0f} seconds"
        delay_ms = int((self._failed_since + REPEATS_SECONDS - now) * 1000) + 1
        why = f"{what}: that is the limit"
        return error("SHARE_EXCEEDED", why, retry_delay_ms=delay_ms, share="failed_changes", limit=MOST_FAILED)

    def opened(self, topic: str, incarnation: int, epochs: Iterable[int], fenced: Iterable[tuple[str, int]]) -> None:
        """The caller has opened producer names with these epochs; of each that had one before, that one."""
        if (audit := self._audit) is None:
            return
        subject = caller()
        names_of: dict[str, list[str]] = {}
        for name, before in fenced:
            if (other := self._openers.of(incarnation, before)) not in (None, subject.name):
                names_of.setdefault(str(other), []).append(name)
        for other, names in names_of.items():
            audit.tell("producers taken over", **_who(subject), topic=topic, **_names(names), from_subject=other)
        for epoch in epochs:
            self._openers.opened(incarnation, epoch, subject.name)

    def begin(self) -> None:
        """The sidecar serves."""
        self._happened("started", sidecar=version("seqdedupe"))

    async def close(self) -> None:
        """The sidecar ends; writes what waits."""
        if self._audit is not None:
            self._happened("stopped", sidecar=version("seqdedupe"))
            await self._audit.close()

    def read_again(self, what: str, problem: SeqdedupeError | None) -> None:
        """A file was replaced, and what it says is in force, or is not because of this."""
        if problem is None:
            self._happened("read again", what=what)
        else:
            self._happened("not read again", what=what, why=problem.message)

    def rotated(self) -> None:
        """The trail's file may have been moved away."""
        if self._audit is not None:
            self._audit.reopen()

    def _happened(self, event: str, **fields: Any) -> None:
        if self._audit is not None:
            self._audit.tell(event, **fields)


def _why(e: BaseException) -> str:
    """The reason. Where a handler has ended its call, what it ended it for is the context of what that raises."""
    for one in (e, e.__context__):
        if isinstance(one, SeqdedupeError):
            return one.reason
    return type(e).__name__


def _who(subject: Subject) -> dict[str, Any]:
    return {"subject": subject.name, "kind": subject.kind, "address": host_of(subject.address)}


def _names(names: Iterable[str]) -> dict[str, Any]:
    """The first names, as far as there is room; and how many there are."""
    listed = list(names)
    told = " ".join(repr(cut(name, MAX_NAME_BYTES_TOLD)) for name in listed[:MAX_NAMES_TOLD])
    return {"producer_names": cut(told, MAX_NAMES_BYTES_TOLD), "producers": len(listed)} if listed else {}


def _short(call: str) -> str:
    return call.rpartition(".")[2]


def _text(request: Message | str) -> str:
    """A request as a line has it: long values are told by their beginning, length and hash, and all of it is cut."""
    if isinstance(request, Message):
        told = type(request)()
        told.CopyFrom(request)
        _shorten(told)
        request = text_format.MessageToString(told, as_one_line=True, as_utf8=True)
    return cut(request, MAX_REQUEST_BYTES_TOLD)


def _shorten(message: Message) -> None:
    """Replaces the long texts in a message, and drops all but the first of many values."""
    for described, value in message.ListFields():
        if described.is_repeated:
            del value[MAX_VALUES_TOLD:]
        if described.type == FieldDescriptor.TYPE_MESSAGE:
            for one in value if described.is_repeated else (value,):
                _shorten(one)
        elif described.cpp_type == FieldDescriptor.CPPTYPE_STRING:
            if described.is_repeated:
                value[:] = map(_short_text, value)
            else:
                setattr(message, described.name, _short_text(value))


def _short_text(value: Any) -> Any:
    """A text, or bytes, if it is not longer than names are."""
    data = value.encode() if isinstance(value, str) else value
    if len(data) <= MAX_NAME_BYTES:
        return value
    beginning = data[:_BEGINNING_TOLD].decode(errors="ignore")
    told = f"{beginning}… ({len(data)} bytes, SHA-256 {hashlib.sha256(data).hexdigest()[:16]})"
    return told if isinstance(value, str) else told.encode()
