"""From a Pulsar topic's entries to stored records: what everything else here reads."""

from collections.abc import Awaitable, Callable
from itertools import accumulate

import numpy as np

from seqdedupe.entry_properties import BATCH, CONTROL, KIND
from seqdedupe.errors import DamagedError
from seqdedupe.format import columns, records
from seqdedupe.format.headers import BATCH_TAG, CONTROL_TAG, MARKER_BYTES, MARKER_TAG, header, marker_body
from seqdedupe.format.tag import NO_KEY
from seqdedupe.log.contract import Entries, Run, Runs
from seqdedupe.log.pulsar.entries import Entry, control_body, damaged, encoded, read_marker
from seqdedupe.log.pulsar.ledgers import Ledgers
from seqdedupe.log.pulsar.plain import Rows
from seqdedupe.log.pulsar.terms import Terms, Verdict


class Collector:
    """Collects what is valid of the entries it is given, in the topic's order.

    The rows of a batch that are an entry each become one record again; a packed batch is one already. Where the reading
    begins within a batch, or its owner has ended within one, there is a record of the rows that are there.
    """

    def __init__(self, terms: Terms, publish_time_ms: int = 0) -> None:
        """`publish_time_ms`: that of the record before, below which none is."""
        self.terms = terms
        self.earlier: dict[str, int] = {}
        """The highest sequence ID of each producer that published before the first marker, as far as the client shows
        them: `terms.counts.earlier` counts all that was there."""
        self._publish_time_ms = publish_time_ms
        self._records: list[bytes] = []
        self._runs: list[Runs] = []
        self._first_index = self._index = terms.next_index
        self._owner = terms.owner
        self._rows = Rows()
        self._row_runs: list[Run] = []

    def __len__(self) -> int:
        """How many records `take` would give."""
        return len(self._records) + (len(self._rows) > 0)

    def add(self, entry: Entry) -> Verdict:
        """Judges the next entry, and collects it if it is valid. Raises what `Terms.judge` does."""
        verdict = self.terms.judge(entry.message, entry.message_id)
        if verdict is Verdict.VALID:
            kind = entry.message.properties.get(KIND)
            if kind is None:
                self._add_row(entry)
            else:
                self._end_rows()
                self._publish_time_ms = max(self._publish_time_ms, entry.message.event_time_ms or entry.publish_time_ms)
                self._add_record(kind, entry)
        elif verdict is Verdict.EARLIER and entry.producer_name and entry.sequence_id >= 0:
            highest = self.earlier.get(entry.producer_name, entry.sequence_id)
            self.earlier[entry.producer_name] = max(highest, entry.sequence_id)
        return verdict

    async def add_over_borders(self, entry: Entry, ledgers: Callable[[], Awaitable[Ledgers]]) -> Verdict:
        """As `add`. Where something seems to be missing, the topic's ledgers say whether every position was read."""
        try:
            return self.add(entry)
        except DamagedError as e:
            borders = self.terms.borders
            if e.reason != "LOG_GAP" or not borders:
                raise
            there = await ledgers()
            if not all(there.are_neighbours(*border) for border in borders):
                raise
            borders.clear()
        return self.add(entry)

    def take(self) -> Entries | None:
        """What was collected since the last time; None if that is nothing. Raises LOG_DAMAGED, NEWER_FORMAT."""
        self._end_rows()
        if not self._records:
            return None
        several, runs, first_index = self._records, self._runs, self._first_index
        self._records, self._runs, self._first_index = [], [], self._index
        raw, table, result = b"".join(several), records.new_table(len(several)), records.new_result()
        view = np.frombuffer(raw, np.uint8)
        why = records.scan(view, self.terms.owner.incarnation, -1, first_index, NO_KEY, table, result)
        # A packed payload is one record, and says of itself what its properties do.
        if (
            why != records.END
            or table[:, columns.RECORD_END].tolist() != list(accumulate(map(len, several)))
            or table[:, columns.ROWS].tolist() != [sum(run.rows for run in each) for each in runs]
            or records.first_bad_payload(view, table, len(table)) >= 0
        ):
            raise damaged(f"among the entries from index {first_index} to {self._index} one is not intact")
        return Entries(raw, table, runs)

    def _add_row(self, entry: Entry) -> None:
        if not self._rows.add(entry.message):
            self._end_rows()
            self._rows.add(entry.message)
        ledger_id, entry_id, _ = entry.message_id
        if len(self._rows) == 1:
            self._publish_time_ms = max(self._publish_time_ms, entry.publish_time_ms)
            self._row_runs.append(Run(1, ledger_id, entry_id))
            return
        last = self._row_runs[-1]
        if (last.ledger_id, last.entry_id + last.rows) == (ledger_id, entry_id):
            self._row_runs[-1] = last._replace(rows=last.rows + 1)
        else:
            self._row_runs.append(Run(1, ledger_id, entry_id))

    def _end_rows(self) -> None:
        """The rows that were collected are a record."""
        if not len(self._rows):
            return
        part = encoded(self._rows.batch())
        self._records.append(self._headed(BATCH_TAG, part.encoded, part.rows, part.column_bytes))
        self._runs.append(tuple(self._row_runs))
        self._index += part.rows
        self._rows, self._row_runs = Rows(), []

    def _add_record(self, kind: str, entry: Entry) -> None:
        """An entry that is a record by itself."""
        runs: Runs = ()
        if kind == BATCH:
            runs = (Run(self.terms.next_index - self._index, entry.message_id.ledger_id, entry.message_id.entry_id, 0),)
            record = entry.message.payload or b""
        elif kind == CONTROL:
            body = control_body(entry.message)
            record = self._headed(CONTROL_TAG, body, 0, len(body))
        else:
            self._owner = self.terms.owner
            marker = read_marker(entry.message, self._owner)
            record = self._headed(MARKER_TAG, marker_body(marker.term, marker.token), 0, MARKER_BYTES)
        self._records.append(record)
        self._runs.append(runs)
        self._index = self.terms.next_index

    def _headed(self, tag: int, body: bytes, rows: int, column_bytes: int) -> bytes:
        """The stored record of this body at the place that was reached. It has no file, and so no offsets in one."""
        made = header(
            body,
            tag,
            rows=rows,
            column_bytes=column_bytes,
            incarnation=self._owner.incarnation,
            file_offset=0,
            base_index=self._index,
            publish_time_ms=self._publish_time_ms,
            synced_offset=0,
            ownership=self._owner.ownership,
            key=NO_KEY,
        )
        return made + body
