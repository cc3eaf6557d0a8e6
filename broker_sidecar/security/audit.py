"""The audit trail: it records which caller changed the sidecar and how, and which callers were refused.
docs/guides/audit.md lists the events.

Begin with `Trail`, which decides which facts about calls are recorded. `Audit` writes the file.
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

# -- A repeated event is written once, and then counted for each caller separately.

T = TypeVar("T", bound=Hashable)
C = TypeVar("C", bound=Hashable)

MOST_OF_CALLER = 20
"""The maximum number of different events of one caller that are written separately. All other events of the caller are
counted together."""

MOST_CALLERS = 1_000
"""The most callers that are counted separately. Events of all other callers are counted together."""


@dataclass(slots=True)
class _Repeated(Generic[T]):
    counts: dict[T, int] = field(default_factory=dict)
    others: int = 0


class Repeats(Generic[C, T]):
    """The events of each caller since the last `take`, with the number of repetitions. Memory use is bounded.

    No caller can hide the events of any other caller, unless there are more than `MOST_CALLERS` callers.
    """

    def __init__(self) -> None:
        self._callers: dict[C, _Repeated[T]] = {}
        self._others = 0

    def is_first(self, who: C, told: T) -> bool:
        """Return whether the event should be written now. If not, count it."""
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
        """Yield (caller, event, number of repetitions) for each repeated event, and forget all of them.

        (caller, None, N): N other events of this caller were never written. (None, None, N): N events of other callers
        that were not counted separately.
        """
        callers, others = self._callers, self._others
        self._callers, self._others = {}, 0
        for who, repeated in callers.items():
            yield from ((who, told, count) for told, count in repeated.counts.items() if count)
            if repeated.others:
                yield who, None, repeated.others
        if others:
            yield None, None, others


REPEATS_SECONDS = 10.0
"""The first of several equal refusals is written at once, and the number of its repetitions after this time."""

MAX_WAITING = 10_000
"""The most lines that wait to be written. Beyond that, `write` is refused, and lines of `tell` are lost."""

MAX_WAITING_REFUSALS = MAX_WAITING // 2
"""The same limit for refusals. It leaves room for all other lines."""


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
    """The only writer of one trail. It belongs to one event loop.

    It writes and syncs all waiting lines together, in a thread. After a failure it opens the file again and continues
    after the last whole line. So the file may contain a line that was reported as not written.
    """

    def __init__(self, path: Path) -> None:
        """Open the file; blocks. Raises AUDIT_UNAVAILABLE, AUDIT_DAMAGED, NEWER_FORMAT."""
        self._path = path
        self._link = NO_LINE
        self._file = -1
        self._is_moved = False
        self._waiting: list[_Line] = []
        self._writing: asyncio.Task[None] | None = None
        # Callers without a token have separate places, so they cannot use up the places of callers with a token.
        self._repeats: defaultdict[str, Repeats[_Caller, frozenset[tuple[str, object]]]] = defaultdict(Repeats)
        self._counted: asyncio.TimerHandle | None = None
        try:
            self._open()
        except OSError as e:
            raise self._unavailable(e) from e

    async def write(self, event: str, **fields: object) -> None:
        """Write a line, durable on return. Raises AUDIT_UNAVAILABLE."""
        if len(self._waiting) >= MAX_WAITING:
            raise error("AUDIT_UNAVAILABLE", f"{MAX_WAITING} lines wait to be written to {self._path}")
        await self._put(event, fields).written

    def tell(self, event: str, **fields: object) -> None:
        """Queue a line to be written soon, and do not wait until it is written. Lines about refusals cannot displace
        this line."""
        self._put_untold(event, fields, MAX_WAITING)

    def refused(self, event: str, network: str, **fields: object) -> None:
        """Write a line soon about a caller in this network (and the caller's `subject`, if it is known).

        If the lines of a caller are equal, write only the first line, and later the number of repetitions.
        """
        if self._counted is None:
            self._counted = asyncio.get_running_loop().call_later(REPEATS_SECONDS, self._tell_counts)
        whose = _Caller(str(fields.get("subject", "")), network)
        if self._repeats[event].is_first(whose, frozenset(fields.items())):
            self._put_untold(event, fields, MAX_WAITING_REFUSALS)

    def reopen(self) -> None:
        """Open the file again, because an operator may have moved it. Write to the file that now has this name, and
        continue the chain of lines."""
        self._is_moved = True

    async def close(self) -> None:
        """Write all waiting lines, and close the file."""
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
        """Queue a line for which nobody waits. A failure to write it is logged."""
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
                if line.written.done():  # the task that waited for it was cancelled
                    continue
                if failure is None:
                    line.written.set_result(None)
                else:
                    line.written.set_exception(failure)

    def _append(self, lines: list[_Line]) -> None:
        """Write and sync the lines. Raises AUDIT_UNAVAILABLE, AUDIT_DAMAGED, NEWER_FORMAT."""
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
        """Open the file after the last complete line. A new file continues the chain of the previous file.

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
                    "the last line of the audit trail is incomplete, and is removed", extra={"line": link.number + 1}
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


# -- The previous owners of producer names.

MAX_OPENS = 100_000
"""The maximum number of opens that are remembered, for all topics together. Above this number, the oldest open of the
subject with the most opens is forgotten. So a subject that opens repeatedly cannot displace the opens of other
subjects."""


class Openers:
    """The subjects that have opened sessions since the sidecar started. One call of Open assigns the same epoch to all
    its names."""

    def __init__(self) -> None:
        self._subjects: dict[tuple[int, int], str] = {}
        self._opens: defaultdict[str, deque[tuple[int, int]]] = defaultdict(deque)
        """For each subject, its opens, the oldest first."""

    def opened(self, incarnation: int, epoch: int, subject: str) -> None:
        """Record that a subject has opened names of a topic with this epoch."""
        if len(self._subjects) >= MAX_OPENS:
            most = max(self._opens, key=lambda one: len(self._opens[one]))
            oldest = self._opens[most].popleft()
            self._subjects.pop(oldest, None)
            if not self._opens[most]:
                del self._opens[most]
        self._subjects[incarnation, epoch] = subject
        self._opens[subject].append((incarnation, epoch))

    def of(self, incarnation: int, epoch: int) -> str | None:
        """Return the subject that opened sessions with this epoch; None if the subject is no longer known."""
        return self._subjects.get((incarnation, epoch))


MAX_NAME_BYTES_TOLD = 64
MAX_NAMES_BYTES_TOLD = 512
"""The maximum size of a producer name or cursor, and of all names in a line. The rest is cut, because refused callers
may choose these names."""

MAX_REQUEST_BYTES_TOLD = 640
"""The most bytes of a request. The rest is cut."""

MAX_VALUES_TOLD = 16
"""The most values of a repeated field."""

_BEGINNING_TOLD = 32
"""The characters kept of a text that is longer than any name can be. Its length and hash identify it."""

MAX_LINE_BYTES_TOLD = 1280
"""The most bytes of a line about a call, in addition to the names of subjects and of rules."""

MOST_FAILED = 1_000
"""The maximum number of failed changes in `REPEATS_SECONDS` for one caller to whom rules apply. Each such change takes
two lines. A script may try to create this many existing topics in a short time."""

_AFTERWARDS = "the call was carried out, but "
"""The text before the reason why a completed change could not be written."""


class Trail:
    """Writes lines about calls to an audit trail, if there is one."""

    def __init__(self, audit: Audit | None) -> None:
        self._audit = audit
        self._openers = Openers()
        self._failed: Counter[str] = Counter()
        """For each caller to whom rules apply: the number of the caller's changes that have failed since
        `_failed_since`."""
        self._failed_since = -math.inf

    def unauthenticated(self, call: str, address: str, e: SeqdedupeError) -> None:
        """Record a caller that presented no credential or an invalid credential. The error names the subject if it is
        proven."""
        if self._audit is not None:
            what = {"address": host_of(address), "call": _short(call), "reason": e.reason}
            what |= {name: e.numbers[name] for name in ("subject", "kind") if name in e.numbers}
            self._audit.refused("unauthenticated", network_of(address), **what)

    def denied(self, denial: Denial) -> None:
        """Record a call that the rules do not allow."""
        if self._audit is not None:
            self._audit.refused(
                "denied",
                network_of(denial.subject.address),
                **_who(denial.subject),
                action=denial.action,
                topic=denial.topic,
                **_names(denial.producer_names),
                **({"cursor": cut(denial.cursor, MAX_NAME_BYTES_TOLD)} if denial.cursor else {}),
                rule=denial.rule.name if denial.rule is not None else "",
            )

    @asynccontextmanager
    async def change(self, call: str, request: Message | str) -> AsyncIterator[None]:
        """Record a change by an operator's call. One line is written before the block. A second line is written after
        the block, before the answer.

        Raises AUDIT_UNAVAILABLE before the block, or after it. In the second case, the change was carried out. Raises
        SHARE_EXCEEDED before the block if too many changes of this caller have just failed.
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
        """Return the error if too many changes of this caller have failed. Another failure would write two more
        lines."""
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
        """Record that the caller opened producer names with these `epochs`. `fenced` has the previous epochs of
        names."""
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
        """Record that the sidecar serves."""
        self._happened("started", sidecar=version("seqdedupe"))

    async def close(self) -> None:
        """Record that the sidecar ends, and write all waiting lines."""
        if self._audit is not None:
            self._happened("stopped", sidecar=version("seqdedupe"))
            await self._audit.close()

    def read_again(self, what: str, problem: SeqdedupeError | None) -> None:
        """Record that the new content of a replaced file is in force. With a problem, record that the new content is
        not in force because of this problem."""
        if problem is None:
            self._happened("read again", what=what)
        else:
            self._happened("not read again", what=what, why=problem.message)

    def rotated(self) -> None:
        """Record that the trail's file may have been moved."""
        if self._audit is not None:
            self._audit.reopen()

    def _happened(self, event: str, **fields: Any) -> None:
        if self._audit is not None:
            self._audit.tell(event, **fields)


def _why(e: BaseException) -> str:
    """Return the reason of a failure. If a handler has aborted its call, the original error is the context of `e`."""
    for one in (e, e.__context__):
        if isinstance(one, SeqdedupeError):
            return one.reason
    return type(e).__name__


def _who(subject: Subject) -> dict[str, Any]:
    return {"subject": subject.name, "kind": subject.kind, "address": host_of(subject.address)}


def _names(names: Iterable[str]) -> dict[str, Any]:
    """Return the number of all names, and the first names. The room in a line limits how many names are returned."""
    listed = list(names)
    told = " ".join(repr(cut(name, MAX_NAME_BYTES_TOLD)) for name in listed[:MAX_NAMES_TOLD])
    return {"producer_names": cut(told, MAX_NAMES_BYTES_TOLD), "producers": len(listed)} if listed else {}


def _short(call: str) -> str:
    return call.rpartition(".")[2]


def _text(request: Message | str) -> str:
    """Return a request as text for a line. Long values appear as beginning, length and hash; the whole text is cut."""
    if isinstance(request, Message):
        told = type(request)()
        told.CopyFrom(request)
        _shorten(told)
        request = text_format.MessageToString(told, as_one_line=True, as_utf8=True)
    return cut(request, MAX_REQUEST_BYTES_TOLD)


def _shorten(message: Message) -> None:
    """Replace the long texts in a message, and drop all but the first values of repeated fields."""
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
    """Return a text or bytes unchanged if it is not longer than a name; otherwise its beginning, length and hash."""
    data = value.encode() if isinstance(value, str) else value
    if len(data) <= MAX_NAME_BYTES:
        return value
    beginning = data[:_BEGINNING_TOLD].decode(errors="ignore")
    told = f"{beginning}… ({len(data)} bytes, SHA-256 {hashlib.sha256(data).hexdigest()[:16]})"
    return told if isinstance(value, str) else told.encode()
