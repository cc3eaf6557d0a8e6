"""A log in memory that fails on command, for tests of what stands on a log.

Nothing happens by itself and nothing is random: appended batches stay in flight until the test says what
becomes of them. `Storage` is the disk or cluster, which survives; a `FaultyLog` is a process's way to it. Its ledgers
roll over every few rows, also in the middle of a batch, so that nobody can compute a message ID from an index.

    log = FaultyLog(Storage(incarnation=1))
    log.settle(2)             the two oldest in flight are stored and reported
    log.store(1)              one more is stored; its receipt is not sent (`report` sends it)
    log.refuse()              all others are refused
    log.unknown(lands=3)      all others have an unknown outcome; three will be found stored
    log.fence(term=9)         another owner takes the topic over, with a term of the test's choice
    log.lose_place(lands=1)   nobody owns the topic any more (`excludes`); of what is in flight one is stored
    log.refuse_opens(2)       the next two openings fail
    log = log.crash(lands=1)  the process ends; one of those in flight is found stored by the next one
"""

import asyncio
from bisect import bisect_right
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import suppress

import numpy as np

from seqdedupe.batch import Int32s, Int64s
from seqdedupe.errors import DamagedError, error
from seqdedupe.format import headers, records
from seqdedupe.format.headers import key_of
from seqdedupe.format.layout import BASE_INDEX, PUBLISH_TIME_MS, ROWS
from seqdedupe.limits import MAX_BATCH_BYTES, FlushInterval, Retention
from seqdedupe.log.contract import (
    ANY_BYTES,
    DamageFound,
    Entries,
    Failure,
    LargerRecordError,
    Location,
    Outcome,
    Records,
    Run,
    Runs,
    Skipped,
)
from seqdedupe.message_id import MessageId
from seqdedupe.tasks import Broadcast

KNOWN_MESSAGE_IDS = 10
"""Those of this many newest messages are known without a read."""

OTHER_OWNERS_TOKEN = b"another owner..."
KEY = key_of(b"of the tests....")
Append = tuple[bytes, int, int]


class Storage:
    """The stored records of one topic, markers too, in order. Tests may look at `records` and damage them.

    A ledger holds `ledger_rows` rows. `packed`: what a batch has in a ledger is one entry, and its rows have batch
    indexes; else each row is an entry.
    """

    def __init__(
        self,
        incarnation: int,
        clock_ms: Callable[[], int] | None = None,
        *,
        ledger_rows: int = 7,
        packed: bool = False,
    ) -> None:
        self.incarnation = incarnation
        self.records: list[bytes] = []
        self.next_index = 0
        self.first_index = 0
        self.term = 0
        self.partitions = 0
        """What `Logs.create` was given."""
        self.writer: FaultyLog | None = None
        self.news = Broadcast()
        """Tells that something is stored, or that nobody writes any more."""
        self._ledger_rows = ledger_rows
        self._packed = packed
        self._runs: dict[int, Runs] = {}
        self._bases: list[int] = []
        self._ledger, self._entry, self._rows_in_ledger = 1000, 0, 0
        self._ownership = 0
        self.bytes_ever = 0
        self._publish_time_ms = 0
        self._clock_ms = clock_ms or (lambda: self._publish_time_ms + 1)

    def add(self, body: bytes, rows: int, column_bytes: int) -> Runs:
        """Stores a batch, or without rows a control record."""
        return self.add_batch(body, rows, column_bytes) if rows else self.add_control(body)

    def add_batch(self, batch: bytes, rows: int, column_bytes: int) -> Runs:
        """Stores a batch, no matter who the owner is; returns its rows' message IDs."""
        self._add_entry(headers.BATCH_TAG, batch, rows, column_bytes)
        self._runs[self.next_index] = runs = tuple(self._give_ids(rows))
        self._bases.append(self.next_index)
        self.next_index += rows
        return runs

    def add_control(self, body: bytes) -> Runs:
        """Stores a control record."""
        self._add_entry(headers.CONTROL_TAG, body, 0, len(body))
        return ()

    def add_marker(self, term: int, token: bytes) -> None:
        """Stores a marker."""
        self._ownership, self.term = headers.ownership_of(token), term
        self._add(headers.marker_record(term, token, next_index=self.next_index, key=KEY, **self._place()))

    def _add_entry(self, tag: int, body: bytes, rows: int, column_bytes: int) -> None:
        header = headers.header(
            body,
            tag,
            rows=rows,
            column_bytes=column_bytes,
            base_index=self.next_index,
            ownership=self._ownership,
            key=KEY,
            **self._place(),
        )
        self._add(header + body)

    def _give_ids(self, rows: int) -> Iterator[Run]:
        while rows:
            if self._rows_in_ledger == self._ledger_rows:
                # Ledgers of other topics lie between.
                self._ledger, self._entry, self._rows_in_ledger = self._ledger + 3, 0, 0
            count = min(rows, self._ledger_rows - self._rows_in_ledger)
            yield Run(count, self._ledger, self._entry, 0 if self._packed else -1)
            self._entry += 1 if self._packed else count
            self._rows_in_ledger += count
            rows -= count

    def runs_of(self, places: np.ndarray) -> Runs:
        """The message IDs of a stored record's rows."""
        return self._runs[int(places[BASE_INDEX])] if places[ROWS] else ()

    def message_id(self, index: int) -> MessageId:
        """That of a stored message."""
        base = self._bases[bisect_right(self._bases, index) - 1]
        row = index - base
        for run in self._runs[base]:
            if row < run.rows:
                return run.message_id(row)
            row -= run.rows
        raise AssertionError(f"there is no message {index}")

    def _place(self) -> dict[str, int]:
        self._publish_time_ms = max(self._publish_time_ms, self._clock_ms())
        return {
            "incarnation": self.incarnation,
            "file_offset": self.bytes_ever,
            "publish_time_ms": self._publish_time_ms,
            "synced_offset": self.bytes_ever,
        }

    def _add(self, record: bytes) -> None:
        self.records.append(record)
        self.bytes_ever += len(record)
        self.news.tell()

    def places(self, record: bytes) -> np.ndarray:
        """The place row of a stored record. Raises LOG_DAMAGED if it is not intact."""
        table, result = records.new_table(1), records.new_result()
        raw = np.frombuffer(record, np.uint8)
        if records.scan(raw, self.incarnation, -1, -1, KEY, table, result) != records.END or (
            records.first_bad_payload(raw, table, 1) >= 0
        ):
            raise error("LOG_DAMAGED", "a stored record is damaged")
        place: np.ndarray = table[0]
        return place


class FaultyLog:
    """Satisfies `seqdedupe.log.contract.Log`. See the module for the commands.

    `takes_higher_terms_only`: a marker whose term is not higher counts for nothing, as in a topic of Pulsar's.
    `excludes`: who has opened it keeps all others out, who learn its `address`, as there too.
    `automatic` stores and reports every append at the loop's next turn, as a log without faults does.
    `retention` makes `may_trim_to` allow all it may; otherwise nothing. `opening_allowed` is an event that
    holds `open_for_writing` back while it is cleared.
    """

    replays_what_is_certain = False

    def __init__(
        self,
        storage: Storage,
        *,
        automatic: bool = False,
        retention: bool = False,
        replay_records: int = 3,
        takes_higher_terms_only: bool = False,
        excludes: bool = False,
        address: str = "",
    ) -> None:
        self.storage = storage
        self.incarnation = storage.incarnation
        self.automatic = automatic
        self.retention = retention
        self.takes_higher_terms_only = takes_higher_terms_only
        self.excludes = excludes
        self.address = address
        self.hears_of_more = True
        """Whether `wait_for_more` returns where there is more."""
        self.opened = 0
        self.flushes = 0
        self.flush_interval = FlushInterval()
        """How often it was tried to open it for writing."""
        self.max_batch_bytes = MAX_BATCH_BYTES
        """`check` refuses what is larger."""
        self.replay_records = replay_records
        self.opening_allowed = asyncio.Event()
        self.opening_allowed.set()
        self.dropped = 0
        """Appends after a failure, which nothing will ever come of."""
        self._in_flight: deque[Append] = deque()
        self._unreported: list[Runs] = []
        self._lands: int | None = 0
        self._failure: Failure | None = None
        self._why = ""
        self._settle: Callable[[Outcome], None] | None = None
        self._opens_to_refuse = 0
        self._refused_opens_mark = False
        self._dead = False
        self._replayed_bytes = 0

    # What the test commands.

    @property
    def in_flight(self) -> int:
        """How many appends are neither stored nor failed."""
        return len(self._in_flight)

    @property
    def failed(self) -> bool:
        """Whether nothing is taken until the log is opened for writing again."""
        return self._failure is not None

    def store(self, count: int | None = None) -> None:
        """The oldest `count` in flight (None: all) are durable from now on; nobody learns."""
        for _ in range(len(self._in_flight) if count is None else min(count, len(self._in_flight))):
            self._unreported.append(self.storage.add(*self._in_flight.popleft()))

    def settle(self, count: int | None = None) -> None:
        """The oldest `count` in flight (None: all) are stored and reported, with what was stored before."""
        self.store(count)
        self.report()

    def refuse(self, *, report: bool = True, why: str = "no room") -> None:
        """All that is in flight is refused, and what comes until the next opening."""
        self.dropped += len(self._in_flight)
        self._in_flight.clear()
        self._fail(Failure.REFUSED, why, report)

    def unknown(self, lands: int | None = 0, *, report: bool = True, why: str = "connection lost") -> None:
        """The outcome of all that is in flight is unknown: the oldest `lands` of it (None: all) will be found
        stored, before the marker of anyone who opens next."""
        self._lands = lands
        self._fail(Failure.UNKNOWN, why, report)

    def fence(self, term: int, lands: int | None = 0, *, report: bool = True) -> None:
        """Another owner opens the topic with this term. For what is in flight, the oldest `lands` stand before
        its marker, the others nowhere; the outcome is unknown to this log."""
        self._shut_out(lands, report)
        # Each marker has its own token.
        number = self.storage.bytes_ever.to_bytes(4, "big")
        self.storage.add_marker(term, OTHER_OWNERS_TOKEN[:-4] + number)

    def lose_place(self, lands: int | None = 0, *, report: bool = True) -> None:
        """Nobody owns the topic. For what is in flight, the oldest `lands` are stored, the others nowhere; the outcome
        is unknown to this log."""
        self._shut_out(lands, report)
        self._leave()

    def _leave(self) -> None:
        if self.storage.writer is self:
            self.storage.writer = None
            self.storage.news.tell()

    def refuse_opens(self, times: int, *, marked: bool = False) -> None:
        """The next this many openings fail; if `marked`, their markers are stored all the same."""
        self._opens_to_refuse = times
        self._refused_opens_mark = marked

    def report(self) -> None:
        """Reports what has settled and was not reported: receipts that were held back, then the failure."""
        stored, self._unreported = self._unreported, []
        settle = self._settle
        if settle is None or (not stored and self._failure is None):
            return
        if self._failure is not None:
            self._settle = None
        settle(Outcome(stored, self._failure, self._why))

    def crash(self, lands: int | None = 0) -> "FaultyLog":
        """The process ends, this log is dead, and the next process's log is returned.

        For what was in flight the oldest `lands` (None: all) are found stored; if the outcome was unknown
        before, the number said then holds.
        """
        if self._failure is None:
            self._lands = lands
        self._land()
        self._dead = True
        self._settle = None
        self._leave()
        return FaultyLog(
            self.storage,
            automatic=self.automatic,
            retention=self.retention,
            replay_records=self.replay_records,
            takes_higher_terms_only=self.takes_higher_terms_only,
            excludes=self.excludes,
            address=self.address,
        )

    def _fail(self, failure: Failure, why: str, report: bool) -> None:
        if self._failure is None:
            self._failure, self._why = failure, why
        if report:
            self.report()

    def _land(self) -> None:
        """What is in flight is found stored, as far as it was said to be; the rest is nowhere."""
        self.store(self._lands)
        self._unreported = []
        self.dropped += len(self._in_flight)
        self._in_flight.clear()

    def _shut_out(self, lands: int | None, report: bool) -> None:
        if self._failure is None:
            self._lands = lands
        stored, self._unreported = self._unreported, []
        self._land()
        self._unreported = stored
        self._fail(Failure.UNKNOWN, "another owner has the topic", report)

    # The contract.

    @property
    def place(self) -> str:
        return "a log of faults"

    @property
    def schema(self) -> None:
        return None

    @property
    def entry_format(self) -> str:
        return ""

    @property
    def first_index(self) -> int:
        return self.storage.first_index

    @property
    def certain_index(self) -> int:
        return self.storage.next_index

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self.storage.records))

    @property
    def damage_found(self) -> DamageFound:
        return DamageFound()

    @property
    def skipped(self) -> Skipped:
        return Skipped()

    @property
    def earlier(self) -> dict[str, int]:
        return {}

    def check(self, batch: bytes) -> None:
        if len(batch) > self.max_batch_bytes:
            raise error("MESSAGE_TOO_LARGE", f"a batch of {len(batch)} bytes")

    async def open_for_writing(self, term: int, token: bytes, settle: Callable[[Outcome], None]) -> int:
        if self._dead:
            raise error("INTERNAL", "a log of a process that has ended is used")
        # From here on nothing more is heard of an earlier opening.
        self._settle = None
        self.opened += 1
        await asyncio.sleep(0)
        await self.opening_allowed.wait()
        if self._opens_to_refuse:
            self._opens_to_refuse -= 1
            self._fail(Failure.UNKNOWN, "", report=False)
            if self._refused_opens_mark:
                self._land()
                self.storage.add_marker(term, token)
            raise error("LOG_REFUSED", "the log cannot be opened for writing")
        other = self.storage.writer
        if other is not None and other is not self:
            if self.excludes:
                raise error("NOT_OWNER", "another one holds the topic", owner_address=other.address)
            other._shut_out(0, report=True)
        self._land()
        self.storage.writer = self
        if self.takes_higher_terms_only and term <= self.storage.term:
            return self.storage.term
        self.storage.add_marker(term, token)
        self._lands, self._failure, self._why = 0, None, ""
        self._settle = settle
        return 0

    def append(self, batch: bytes, rows: int, column_bytes: int, sent: object = None) -> None:
        if self._failure is not None or self._dead:
            self.dropped += 1
            return
        self._in_flight.append((batch, rows, column_bytes))
        if self.automatic:
            asyncio.get_running_loop().call_soon(self.settle)

    def append_control(self, body: bytes) -> None:
        self.append(body, 0, len(body))

    def flush_every(self, interval: FlushInterval) -> None:
        self.flush_interval = interval

    def flush(self) -> None:
        self.flushes += 1

    async def replay(self, from_index: int) -> AsyncGenerator[Entries, None]:
        self._check_is_there(from_index)
        everything = list(self.storage.records)
        self._replayed_bytes = self.storage.bytes_ever
        start = 0
        if from_index > self.first_index:
            at_end = from_index == self.storage.next_index
            for record in everything:
                places = self.storage.places(record)
                if places[BASE_INDEX] + (0 if at_end else places[ROWS] - 1) >= from_index:
                    break
                start += 1
        for at in range(start, len(everything), self.replay_records):
            await asyncio.sleep(0)
            yield self._entries(everything[at : at + self.replay_records])

    async def wait_for_more(self) -> None:
        while self._replayed_bytes == self.storage.bytes_ever or not self.hears_of_more:
            await self.storage.news.wait()

    async def wait_until_free(self) -> None:
        while self.storage.writer not in (None, self):
            await self.storage.news.wait()

    async def let_go(self) -> None:
        self._settle = None
        self.lose_place(report=False)

    def _entries(self, several: list[bytes]) -> Entries:
        raw, table, result = b"".join(several), records.new_table(len(several)), records.new_result()
        why = records.scan(np.frombuffer(raw, np.uint8), self.incarnation, -1, -1, KEY, table, result)
        if why != records.END:
            raise error("LOG_DAMAGED", "a stored record is damaged")
        return Entries(raw, table, [self.storage.runs_of(places) for places in table])

    def _check_is_there(self, index: int) -> None:
        if index < self.first_index:
            raise error("POSITION_TRIMMED", f"index {index} is gone", first_index=self.first_index)
        if index > self.storage.next_index:
            raise error("POSITION_AFTER_END", f"index {index} is after the end")

    async def read(self, from_index: int, stop_index: int, max_bytes: int, most_bytes: int = ANY_BYTES) -> Records:
        await asyncio.sleep(0)
        # Retention may be faster.
        self._check_is_there(from_index)
        found, runs = b"", []
        for record in list(self.storage.records):
            places = self.storage.places(record)
            if places[BASE_INDEX] >= stop_index:
                break
            if not places[ROWS] or places[BASE_INDEX] + places[ROWS] <= from_index:
                continue
            if found and len(found) + len(record) > max_bytes:
                break
            if len(record) > most_bytes:
                raise LargerRecordError(len(record))
            found += record
            runs.append(self.storage.runs_of(places))
        return Records(found, runs)

    async def next_readable(self, from_index: int) -> int:
        self._check_is_there(from_index)
        for record in self.storage.records:
            with suppress(DamagedError):
                places = self.storage.places(record)
                if places[BASE_INDEX] + places[ROWS] > from_index:
                    return max(from_index, int(places[BASE_INDEX]))
        return self.storage.next_index

    async def locate_time(self, publish_time_ms: int, stop_index: int) -> int:
        for record in self.storage.records:
            places = self.storage.places(record)
            if places[PUBLISH_TIME_MS] >= publish_time_ms:
                return min(int(places[BASE_INDEX]), stop_index)
        return stop_index

    async def locate_bytes(self, from_index: int, size_bytes: int, stop_index: int) -> int:
        found = from_index + 1
        left = size_bytes
        for record in self.storage.records:
            places = self.storage.places(record)
            after = int(places[BASE_INDEX] + places[ROWS])
            if after > from_index and left > 0:
                left -= len(record)
                found = max(found, after)
        return min(found, stop_index)

    async def locate(self, index: int) -> Location:
        self._check_is_there(index + 1)
        self._check_is_there(index)
        await asyncio.sleep(0)
        places = next(p for p in map(self.storage.places, self.storage.records) if p[BASE_INDEX] + p[ROWS] > index)
        return Location(self.storage.message_id(index), records.ownership(places))

    def known_message_ids(self, indexes: Int64s) -> tuple[Int64s, Int64s, Int32s]:
        known = max(0, self.storage.next_index - KNOWN_MESSAGE_IDS)
        nowhere = MessageId(-1, -1, -1)
        found = [self.storage.message_id(index) if index >= known else nowhere for index in indexes.tolist()]
        return (
            np.array([one.ledger_id for one in found], np.int64),
            np.array([one.entry_id for one in found], np.int64),
            np.array([one.batch_index for one in found], np.int32),
        )

    def place_at(self, next_index: int) -> bytes:
        return b""

    async def snapshot_is_durable(self, place: bytes) -> None:
        """What is dropped is gone at once."""

    async def may_trim_to(self, covered_index: int, retention: Retention) -> int:
        first = self.first_index
        if self.retention:
            for record in self.storage.records:
                places = self.storage.places(record)
                if places[BASE_INDEX] < covered_index:
                    first = max(first, int(places[BASE_INDEX]))
        return first

    async def trim(self, below_index: int) -> None:
        await asyncio.sleep(0)
        while self.storage.first_index < below_index:
            places = self.storage.places(self.storage.records[0])
            after = int(places[BASE_INDEX] + places[ROWS])
            if after > below_index:
                return
            del self.storage.records[0]
            self.storage.first_index = after

    async def close(self) -> None:
        self._settle = None
        self._leave()
