"""One opening of a topic for writing: appends become entries, and confirmed entries settle their appends."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from seqdedupe.log.contract import Failure, Outcome, Run, Runs
from seqdedupe.log.pulsar.content import Found
from seqdedupe.log.pulsar.entries import Message, Owner
from seqdedupe.log.pulsar.places import Places, Point, begins_record, is_batch, size_of
from seqdedupe.log.pulsar.terms import Standing
from seqdedupe.log.pulsar.writer import Writer
from seqdedupe.message_id import MessageId


class _Sent(NamedTuple):
    """An entry that is not confirmed yet."""

    rows: int
    size_bytes: int
    publish_time_ms: int
    begins_record: bool
    is_batch: bool
    ends_append: bool


class Opening:
    """What an owner has under way, from its marker on. `settle` hears of it, until a failure."""

    def __init__(self, owner: Owner, writer: Writer, places: Places, settle: Callable[[Outcome], None]) -> None:
        self.owner = owner
        self.writer = writer
        self.failed = False
        self._settle = settle
        self._places = places
        self._sent: deque[_Sent] = deque()
        self._runs: list[Run] = []
        """Of the oldest append, as far as it is confirmed."""
        self._confirmed: list[Runs] = []
        self.next_number = 1
        self.next_index = places.end.next_index
        """Of what is appended next, if all before is stored."""
        self.settled = places.end
        """Before it are the appends that are confirmed whole."""

    def append(self, messages: Iterable[Message], rows: Sequence[int], publish_time_ms: int) -> None:
        """Hands over the entries of one append, with so many messages in each."""
        left = len(rows)
        for message, count in zip(messages, rows, strict=True):
            left -= 1
            begins, several = begins_record(message), is_batch(message)
            self._sent.append(_Sent(count, size_of(message), publish_time_ms, begins, several, ends_append=not left))
            self.writer.append(message)
        self.next_number += len(rows)
        self.next_index += sum(rows)

    def confirm(self, message_ids: Sequence[MessageId], now_ms: int) -> None:
        """So many of the oldest entries are confirmed by their receipts. `tell` has to follow."""
        for message_id in message_ids:
            sent, end = self._sent[0], self._places.end
            _, number, index = end.standing
            to = end.after(
                Standing(self.owner, number + 1, index + sent.rows),
                message_id,
                sent.publish_time_ms,
                now_ms,
                sent.size_bytes,
            )
            runs = self._places.advance(to, begins_record=sent.begins_record, is_batch=sent.is_batch)
            self._take(runs, to)

    def found(self, several: Sequence[Found]) -> None:
        """The oldest entries were read. `tell` has to follow."""
        for one in several:
            self._take(one.runs, one.after)

    def tell(self) -> None:
        """Settles the appends of which all is confirmed."""
        confirmed, self._confirmed = self._confirmed, []
        if confirmed:
            self._settle(Outcome(confirmed))

    def fail(self, why: str) -> None:
        """What became of the rest is unknown, and nothing more is taken."""
        if not self.failed:
            self.failed = True
            self._settle(Outcome([], Failure.UNKNOWN, why))

    def _take(self, runs: Runs, after: Point) -> None:
        """The oldest entry is confirmed; its append is, if it was the last one of it."""
        for run in runs:
            last = self._runs[-1] if self._runs else None
            if last and run.batch_index < 0 and last.message_id(last.rows) == run.message_id(0):
                self._runs[-1] = last._replace(rows=last.rows + run.rows)
            else:
                self._runs.append(run)
        if self._sent.popleft().ends_append:
            self._confirmed.append(tuple(self._runs))
            self._runs = []
            self.settled = after
