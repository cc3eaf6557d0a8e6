"""What of the calls stands in the audit trail. docs/audit.md lists the events."""

from collections import defaultdict, deque
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from google.protobuf import text_format
from google.protobuf.message import Message

from broker_sidecar.security.audit import Audit
from broker_sidecar.security.permissions import MAX_NAMES_TOLD, Denial, deciding_rule
from broker_sidecar.security.subject import Subject, caller, host_of, network_of
from seqdedupe.audit_trail import cut
from seqdedupe.errors import SeqdedupeError, error

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
"""Of a producer name, and of all names in a line: what is longer is cut. Who is refused may choose them."""

_AFTERWARDS = "it was carried out, but "
"""Before why that could not be written."""


class Trail:
    """Puts calls into an audit trail; into none, if there is none."""

    def __init__(self, audit: Audit | None) -> None:
        self._audit = audit
        self._openers = Openers()

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
                **({"cursor": denial.cursor} if denial.cursor else {}),
                rule=denial.rule.name if denial.rule is not None else "",
            )

    @asynccontextmanager
    async def change(self, call: str, request: Message | str) -> AsyncIterator[None]:
        """Around what an operator's call changes: it stands in the trail before it is done, and before it is answered.

        Raises AUDIT_UNAVAILABLE: before the block, or after it, and then it was carried out.
        """
        if (audit := self._audit) is None:
            yield
            return
        what = {**_who(caller()), "call": _short(call), "request": _text(request)}
        await audit.write("call", **what, rule=deciding_rule())
        try:
            yield
        except BaseException as e:
            audit.tell("failed", **what, why=_why(e))
            raise
        try:
            await audit.write("done", **what)
        except SeqdedupeError as e:
            raise error(e.reason, _AFTERWARDS + e.message) from e

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
    return request if isinstance(request, str) else text_format.MessageToString(request, as_one_line=True)
