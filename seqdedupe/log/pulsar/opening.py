"""One opening of a topic for writing: appends become entries, and confirmed entries settle their appends."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from seqdedupe.entry_properties import Owner
from seqdedupe.log.contract import Failure, Outcome, Run, Runs
from seqdedupe.log.pulsar.content import Found
from seqdedupe.log.pulsar.places import Places, Point, size_of
from seqdedupe.log.pulsar.recording import Record
from seqdedupe.log.pulsar.terms import Standing
from seqdedupe.log.pulsar.unsettled import Confirmed
from seqdedupe.log.pulsar.writer import Writer
from seqdedupe.message_id import MessageId


@dataclass(slots=True)
class _Sent:
    """A record of which not all entries are confirmed."""

    sizes_bytes: list[int]
    """Of those that are not."""
    rows: int
    is_batch: bool
    publish_time_ms: int
    ends_append: bool
    is_whole: bool = True
    """Whether none of its entries is confirmed."""


class Opening:
    """What an owner has under way, from its marker on. `settle` hears of it, until a failure."""

    def __init__(
        self,
        owner: Owner,
        writer: Writer,
        places: Places,
        settle: Callable[[Outcome], None],
        max_entry_bytes: int,
    ) -> None:
        self.owner = owner
        self.max_entry_bytes = max_entry_bytes
        """The most that its broker and its policies have taken since it began."""
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

    def append(self, records: Sequence[Record], publish_time_ms: int) -> None:
        """Hands over the entries of one append."""
        left = len(records)
        for entries, rows, is_batch in records:
            left -= 1
            sizes = [size_of(message) for message in entries]
            self._sent.append(_Sent(sizes, rows, is_batch, publish_time_ms, ends_append=not left))
            self.writer.append(entries)
            self.next_number += len(entries)
            self.next_index += len(entries) * rows

    def confirm(self, confirmed: Confirmed, now_ms: int) -> None:
        """So many of the oldest entries are confirmed by their receipts. `tell` has to follow."""
        left, (ledger_id, entry_id) = confirmed.entries, confirmed.first[:2]
        while left:
            sent, end = self._sent[0], self._places.end
            entries = min(left, len(sent.sizes_bytes))
            left -= entries
            entry_id += entries
            _, number, index, _ = end.standing
            to = end.after(
                Standing(self.owner, number + entries, index + entries * sent.rows),
                MessageId(ledger_id, entry_id - 1),
                sent.publish_time_ms,
                now_ms,
                sum(sent.sizes_bytes[:entries]),
            )
            runs = self._places.advance(to, begins_record=sent.is_whole, is_batch=sent.is_batch)
            self._take(entries, runs, to)

    def found(self, several: Sequence[Found]) -> None:
        """The oldest entries were read. `tell` has to follow."""
        for one in several:
            self._take(1, one.runs, one.after)

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

    def _take(self, entries: int, runs: Runs, after: Point) -> None:
        """So many of the oldest record's entries are confirmed; its append is, if they were the last ones of it."""
        for run in runs:
            last = self._runs[-1] if self._runs else None
            if last and run.batch_index < 0 and last.message_id(last.rows) == run.message_id(0):
                self._runs[-1] = last._replace(rows=last.rows + run.rows)
            else:
                self._runs.append(run)
        sent = self._sent[0]
        del sent.sizes_bytes[:entries]
        sent.is_whole = False
        if sent.sizes_bytes:
            return
        self._sent.popleft()
        if sent.ends_append:
            self._confirmed.append(tuple(self._runs))
            self._runs = []
            self.settled = after
