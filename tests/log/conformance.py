"""What every log must do: run it on a log of your own by subclassing `LogConformance` with a `harness` fixture.

    class TestMyLog(LogConformance):
        @pytest.fixture
        def harness(self, tmp_path):
            return MyHarness(tmp_path)

What was stored is read back with the published schema alone, not with the code that wrote it.
"""

import asyncio
from abc import ABC, abstractmethod
from itertools import accumulate

import numpy as np
import pytest

from seqdedupe.errors import PositionError, UnavailableError
from seqdedupe.format.headers import ownership_of
from seqdedupe.format.layout import BASE_INDEX, PUBLISH_TIME_MS, RECORD_END, RECORD_START, ROWS, TERM
from seqdedupe.format.records import body_of, ownership
from seqdedupe.limits import Retention
from seqdedupe.log.contract import REPLAY_STEP_ENTRIES, Failure, LargerRecordError, Log, Outcome, Records, Runs
from seqdedupe.message_id import MessageId
from seqdedupe.testing import LAST_RESORT_SECONDS
from seqdedupe.v1 import batch_pb2, read_pb2
from tests.log.batches import encoded_batch

LIMIT_SECONDS = LAST_RESORT_SECONDS
"""Nothing here takes this long."""


class LogHarness(ABC):
    """One topic's log, which can be opened, closed and opened again."""

    now_ms = 1_000_000
    """The log's clock, where it has one of its own."""

    has_clock = True
    failure = Failure.REFUSED
    """What becomes of appends that cannot be written: UNKNOWN where the log cannot say that they never will be."""
    takes_higher_terms_only = False
    trims = True
    """Whether retention is the log's own."""

    @abstractmethod
    async def open(self, covered_index: int = 0, place: bytes = b"") -> Log:
        """The topic's log: empty the first time; then what an earlier one, which was closed, has left.

        A snapshot covers what is below the index, and has this place. Its retention would drop all that it may, in
        units of at most about 64 KiB.
        """

    @abstractmethod
    def refuse_writes(self, log: Log) -> None:
        """From now on the log cannot write: what it is given fails, and is nowhere."""

    @abstractmethod
    def allow_writes(self, log: Log) -> None:
        """From now on it can."""

    async def close(self) -> None:
        """The end of the test."""
        return


class Owner:
    """An opening for writing, what was appended by it, and what it has heard."""

    def __init__(self, log: Log, term: int) -> None:
        self.log = log
        self.term = term
        self.token = b"token%011d" % term
        self.runs: list[Runs] = []
        self.failure: Failure | None = None
        self.why = ""
        self.calls = 0
        self._appending = False
        self._heard = asyncio.Event()

    @property
    def stored(self) -> int:
        """How many appends were reported as stored."""
        return len(self.runs)

    async def open(self) -> "Owner":
        assert await self.log.open_for_writing(self.term, self.token, self._settle) == 0
        return self

    def append(self, first_id: int, rows: int, payload_bytes: int = 10) -> None:
        self._appending = True
        self.log.append(*encoded_batch(first_id, rows, payload_bytes))
        self._appending = False

    def append_control(self, epoch: int, names: int = 1) -> None:
        sessions = batch_pb2.ControlSessions(
            producer_name_offsets=range(names + 1), producer_names=b"p" * names, epochs=[epoch] * names
        )
        self._appending = True
        self.log.append_control(batch_pb2.Control(sessions=sessions).SerializeToString())
        self._appending = False

    def _settle(self, outcome: Outcome) -> None:
        assert not self._appending, "settle is called from within append"
        assert self.failure is None, "something is settled after a failure"
        assert asyncio.get_running_loop()
        self.calls += 1
        self.runs += outcome.runs
        self.failure, self.why = outcome.failure, outcome.why
        self._heard.set()

    async def until_stored(self, count: int) -> None:
        async with asyncio.timeout(LIMIT_SECONDS):
            while self.stored < count:
                assert self.failure is None, self.why
                self._heard.clear()
                await self._heard.wait()
        assert self.stored == count

    async def until_settled(self, count: int) -> None:
        """Until this many are stored, or the rest has failed."""
        async with asyncio.timeout(LIMIT_SECONDS * 2):
            while self.stored < count and self.failure is None:
                self._heard.clear()
                await self._heard.wait()

    async def until_failed(self) -> Failure:
        async with asyncio.timeout(LIMIT_SECONDS):
            while self.failure is None:
                self._heard.clear()
                await self._heard.wait()
        return self.failure


def parsed(records: bytes | memoryview | Records) -> list[batch_pb2.Record]:
    """The records in a chunk, by the published schema."""
    raw = records.raw if isinstance(records, Records) else records
    return list(read_pb2.ReadStreamResponse.FromString(bytes(raw)).records)


def what(record: batch_pb2.Record) -> tuple[str, int, int]:
    """A record in short: a marker's term, a control record's epoch, or a batch's first sequence ID and rows."""
    if record.HasField("marker"):
        return "marker", record.marker.term, 0
    if record.HasField("control"):
        return "control", record.control.sessions.epochs[0], 0
    return "batch", record.batch.sequence_ids[0], record.rows


def ids_of(runs: Runs) -> list[MessageId]:
    """The message IDs of rows, one by one."""
    return [run.message_id(row) for run in runs for row in range(run.rows)]


def ids_read(records: Records) -> list[MessageId]:
    """The message IDs of all rows that were read, where the log gives none those of the indexes."""
    found = parsed(records)
    if records.runs is None:
        return [
            MessageId(record.incarnation, record.base_index + row) for record in found for row in range(record.rows)
        ]
    assert [sum(run.rows for run in runs) for runs in records.runs] == [record.rows for record in found]
    return [one for runs in records.runs for one in ids_of(runs)]


async def replayed(log: Log, from_index: int = 0) -> list[batch_pb2.Record]:
    """The records of a replay, by the published schema; what the places say of them is held against that."""
    found = []
    async for entries in log.replay(from_index):
        assert 0 < len(entries.table) == len(entries.runs) <= REPLAY_STEP_ENTRIES
        assert entries.table.flags.c_contiguous
        for places, runs in zip(entries.table, entries.runs, strict=True):
            (record,) = parsed(entries.raw[places[RECORD_START] : places[RECORD_END]])
            assert record.base_index == places[BASE_INDEX]
            assert record.rows == places[ROWS] == sum(run.rows for run in runs)
            assert record.publish_time_ms == places[PUBLISH_TIME_MS]
            assert record.marker.term == places[TERM]
            assert record.ownership == ownership(places)
            assert record.HasField("control") == (not places[ROWS] and not places[TERM])
            if record.HasField("control"):
                assert batch_pb2.Control.FromString(body_of(entries.raw, places)) == record.control
            assert all(run.rows for run in runs)
            found.append(record)
        assert entries.next_index == record.base_index + record.rows
    return found


class LogConformance:
    """The suite. See the module."""

    async def test_appends_are_stored_in_order_with_contiguous_indexes(self, harness: LogHarness) -> None:
        log = await harness.open()
        owner = await Owner(log, 1).open()
        for i in range(50):
            owner.append(100 * i, 1 + i % 7)
        await owner.until_stored(50)
        records = await replayed(log)
        assert [what(r) for r in records] == [
            ("marker", 1, 0),
            *(("batch", 100 * i, 1 + i % 7) for i in range(50)),
        ]
        assert records[0].marker.token == owner.token
        next_index = 0
        for record in records:
            assert record.base_index == next_index
            assert record.incarnation == log.incarnation
            next_index += record.rows
        batches = [r.batch.SerializeToString() for r in records[1:]]
        assert batches == [encoded_batch(100 * i, 1 + i % 7)[0] for i in range(50)]
        await log.close()

    async def test_batches_of_many_sizes_come_back_byte_by_byte(self, harness: LogHarness) -> None:
        log = await harness.open()
        owner = await Owner(log, 1).open()
        sizes = [(1, 0), (1, 1), (300, 100), (1, 200_000), (3, 65_536), (1000, 10), (1, 1_900_000)]
        for i, (rows, payload_bytes) in enumerate(sizes):
            owner.append(10_000 * i, rows, payload_bytes)
        await owner.until_stored(len(sizes))
        stored = [r.batch.SerializeToString() for r in await replayed(log) if r.rows]
        assert stored == [encoded_batch(10_000 * i, *size)[0] for i, size in enumerate(sizes)]
        at, end, read = 0, sum(rows for rows, _ in sizes), []
        while at < end:
            page = parsed(await log.read(at, end, 256 * 1024))
            read += [r.batch.SerializeToString() for r in page]
            at = page[-1].base_index + page[-1].rows
        assert read == stored
        await log.close()

    async def test_everything_survives_closing_and_opening(self, harness: LogHarness) -> None:
        expected: list[tuple[str, int, int]] = []
        index = 0
        for term in range(1, 5):
            log = await harness.open()
            assert [what(r) for r in await replayed(log, log.first_index)] == expected
            owner = await Owner(log, term).open()
            for i in range(3):
                owner.append(1000 * term + 10 * i, 5)
            await owner.until_stored(3)
            expected += [("marker", term, 0), *(("batch", 1000 * term + 10 * i, 5) for i in range(3))]
            records = await replayed(log, log.first_index)
            assert [what(r) for r in records] == expected
            assert records[-1].base_index == index + 10
            index += 15
            await log.close()

    async def test_read_from_every_index_shows_messages_and_no_markers(self, harness: LogHarness) -> None:
        log = await harness.open()
        bases, end = [], 0
        for term in (1, 2, 3):
            owner = await Owner(log, term).open()
            for i in range(4):
                owner.append(100 * term + 10 * i, 3)
                bases.append(end)
                end += 3
            await owner.until_stored(4)
        for start in range(end):
            for stop in range(start + 1, end + 1):
                for max_bytes in (1, 500, 1_000_000):
                    data = await log.read(start, stop, max_bytes)
                    records = parsed(data)
                    assert records
                    assert all(r.HasField("batch") for r in records)
                    assert records[0].base_index <= start < records[0].base_index + records[0].rows
                    assert records[-1].base_index < stop
                    assert [r.base_index for r in records] == bases[start // 3 : start // 3 + len(records)]
                    assert len(records) == 1 or len(data.raw) <= max_bytes
        await log.close()

    async def test_reading_on_covers_everything_once(self, harness: LogHarness) -> None:
        log = await harness.open()
        ids: list[int] = []
        end = 0
        for term in (1, 2):
            owner = await Owner(log, term).open()
            for i in range(40):
                owner.append(100_000 * term + 100 * i, 20, 100)
                ids += range(100_000 * term + 100 * i, 100_000 * term + 100 * i + 20)
                end += 20
            await owner.until_stored(40)
        for max_bytes in (1, 5_000, 64 * 1024, 10_000_000):
            at, read = 0, []
            while at < end:
                for record in parsed(await log.read(at, end, max_bytes)):
                    assert record.base_index == at
                    read += list(record.batch.sequence_ids)
                    at += record.rows
            assert read == ids
        await log.close()

    async def test_a_record_that_is_larger_than_there_is_room_for_is_told(self, harness: LogHarness) -> None:
        """Also where it was read together with others before."""
        log = await harness.open()
        owner = await Owner(log, 1).open()
        for i in range(4):
            owner.append(10 * i, 3, 1000)
        await owner.until_stored(4)
        for index in (0, 3, 6, 9):
            size = len((await log.read(index, index + 3, 1)).raw)
            with pytest.raises(LargerRecordError) as e:
                await log.read(index, 12, size, size - 1)
            assert e.value.size == size
            assert len((await log.read(index, 12, 1, size)).raw) == size
        await log.close()

    async def test_replay_begins_with_the_record_that_holds_the_index(self, harness: LogHarness) -> None:
        log = await harness.open()
        for term in (1, 2):
            owner = await Owner(log, term).open()
            owner.append(10 * term, 3)
            owner.append(10 * term + 5, 3)
            await owner.until_stored(2)
        await Owner(log, 3).open()
        await Owner(log, 4).open()
        everything = [what(r) for r in await replayed(log)]
        assert [name for name, _, _ in everything] == ["marker", *["batch"] * 2] * 2 + ["marker"] * 2
        for index, place in ((0, 0), (1, 1), (2, 1), (3, 2), (5, 2), (6, 4), (8, 4), (9, 5), (11, 5), (12, 6)):
            assert [what(r) for r in await replayed(log, index)] == everything[place:], index
        assert [what(r) for r in await replayed(log, 12)] == [("marker", 3, 0), ("marker", 4, 0)]
        with pytest.raises(PositionError):
            await replayed(log, 13)
        await log.close()

    async def test_replay_of_an_empty_log(self, harness: LogHarness) -> None:
        log = await harness.open()
        assert await replayed(log) == []
        assert log.first_index == 0
        await Owner(log, 1).open()
        assert [what(r) for r in await replayed(log)] == [("marker", 1, 0)]
        await log.close()

    async def test_an_opening_shuts_the_one_before_out(self, harness: LogHarness) -> None:
        log = await harness.open()
        old = await Owner(log, 1).open()
        for i in range(20):
            old.append(i, 1)
        await old.until_stored(20)
        for i in range(20, 40):
            old.append(i, 1)
        heard_from_old = old.stored
        new = await Owner(log, 2).open()
        calls = old.calls
        before = [what(r) for r in await replayed(log)]
        place = before.index(("marker", 2, 0))
        stored = [first_id for name, first_id, _ in before[:place] if name == "batch"]
        assert stored == list(range(len(stored)))
        assert len(stored) >= max(heard_from_old, old.stored)
        assert before[place + 1 :] == []
        new.append(1000, 2)
        await new.until_stored(1)
        assert [what(r) for r in await replayed(log)] == [*before, ("batch", 1000, 2)]
        assert old.calls == calls
        await log.close()

    async def test_a_refusal_lasts_until_the_log_is_opened_again(self, harness: LogHarness) -> None:
        log = await harness.open()
        owner = await Owner(log, 1).open()
        for i in range(10):
            owner.append(i, 1, 8_000)
        await owner.until_stored(10)
        harness.refuse_writes(log)
        try:
            owner.append(100, 1, 20_000)
            owner.append(101, 1)
            assert await owner.until_failed() is harness.failure
            assert owner.stored == 10
            with pytest.raises(UnavailableError):
                await Owner(log, 2).open()
            assert len(parsed(await log.read(9, 10, 1))) == 1
        finally:
            harness.allow_writes(log)
        assert [what(r) for r in await replayed(log)] == [("marker", 1, 0), *(("batch", i, 1) for i in range(10))]
        again = await Owner(log, 3).open()
        again.append(102, 1)
        await again.until_stored(1)
        await log.close()
        log = await harness.open()
        records = await replayed(log)
        assert [what(r) for r in records] == [
            ("marker", 1, 0),
            *(("batch", i, 1) for i in range(10)),
            ("marker", 3, 0),
            ("batch", 102, 1),
        ]
        assert records[-1].base_index == 10
        await log.close()

    async def test_nothing_is_taken_between_a_refusal_and_the_news_of_it(self, harness: LogHarness) -> None:
        log = await harness.open()
        owner = await Owner(log, 1).open()
        owner.append(0, 1, 80_000)
        await owner.until_stored(1)
        harness.refuse_writes(log)
        owner.append(100, 1, 20_000)
        await owner.until_failed()
        harness.allow_writes(log)
        # There is room again, and the log was not opened: what follows the refused one must not be taken.
        owner.append(101, 1)
        again = await Owner(log, 2).open()
        again.append(102, 1)
        await again.until_stored(1)
        assert [what(r)[1] for r in await replayed(log)] == [1, 0, 2, 102]
        await log.close()

    async def test_publish_times_never_fall(self, harness: LogHarness) -> None:
        log = await harness.open()
        for term, now_ms in enumerate((5_000_000, 4_000_000, 6_000_000), start=1):
            harness.now_ms = now_ms
            owner = await Owner(log, term).open()
            owner.append(term, 1)
            await owner.until_stored(1)
            await log.close()
            log = await harness.open()
        times = [r.publish_time_ms for r in await replayed(log)]
        assert len(times) == 6
        assert times == sorted(times)
        assert times == [5_000_000] * 4 + [6_000_000] * 2 or not harness.has_clock
        await log.close()

    async def test_what_is_whole_is_readable(self, harness: LogHarness) -> None:
        log = await harness.open()
        owner = await Owner(log, 1).open()
        for i in range(10):
            owner.append(10 * i, 5)
        await owner.until_stored(10)
        assert [await log.next_readable(i) for i in range(51)] == list(range(51))
        with pytest.raises(PositionError):
            await log.next_readable(51)
        assert log.damage_found == (0, 0)
        await log.close()

    async def test_locating_a_publish_time(self, harness: LogHarness) -> None:
        log = await harness.open()
        owner = await Owner(log, 1).open()
        for i in range(30):
            harness.now_ms = 2_000_000 + 10 * i
            owner.append(10 * i, 5, 2_000)
            await owner.until_stored(i + 1)
        times = [r.publish_time_ms for r in await replayed(log) if r.rows]
        assert times == [2_000_000 + 10 * i for i in range(30)] or not harness.has_clock
        for i, time_ms in enumerate(times):
            assert await log.locate_time(time_ms, 150) == 5 * times.index(time_ms)
            if i == 0 or time_ms - times[i - 1] > 9:
                assert await log.locate_time(time_ms - 9, 150) == 5 * i
        assert await log.locate_time(times[-1] + 10, 150) == 150
        assert await log.locate_time(0, 150) == 0
        assert await log.locate_time(times[20], 60) == min(5 * times.index(times[20]), 60)
        await log.close()

    async def test_locating_an_amount_of_bytes(self, harness: LogHarness) -> None:
        log = await harness.open()
        owner = await Owner(log, 1).open()
        for i in range(60):
            owner.append(10 * i, 5, 1_000)
        await owner.until_stored(60)
        for start in (0, 3, 150, 299):
            for size_bytes in (1, 6_000, 100_000, 250_000):
                stop = await log.locate_bytes(start, size_bytes, 300)
                records = (300 - start) / 5
                assert start < stop <= 300
                wanted = start + min(size_bytes / 5_200, records) * 5
                assert abs(stop - wanted) <= 10, (start, size_bytes)
        assert await log.locate_bytes(0, 10_000_000, 300) == 300
        assert await log.locate_bytes(0, 10_000_000, 77) == 77
        assert await log.locate_bytes(10, 1, 300) > 10
        await log.close()

    async def test_control_records_stand_in_order_and_take_no_index(self, harness: LogHarness) -> None:
        log = await harness.open()
        expected: list[tuple[str, int, int]] = []
        ids: list[int] = []
        for term in (1, 2):
            owner = await Owner(log, term).open()
            owner.append_control(10 * term)
            owner.append(100 * term, 5)
            owner.append_control(10 * term + 1, 50_000)
            owner.append_control(10 * term + 2)
            owner.append(100 * term + 50, 5)
            owner.append_control(10 * term + 3)
            await owner.until_stored(6)
            assert [sum(run.rows for run in runs) for runs in owner.runs] == [0, 5, 0, 0, 5, 0]
            ids += [*range(100 * term, 100 * term + 5), *range(100 * term + 50, 100 * term + 55)]
            expected += [
                ("marker", term, 0),
                ("control", 10 * term, 0),
                ("batch", 100 * term, 5),
                ("control", 10 * term + 1, 0),
                ("control", 10 * term + 2, 0),
                ("batch", 100 * term + 50, 5),
                ("control", 10 * term + 3, 0),
            ]
            assert [what(r) for r in await replayed(log)] == expected
        assert [what(r) for r in await replayed(log, 20)] == [("control", 23, 0)]
        assert [what(r) for r in await replayed(log, 10)] == expected[9:]
        await log.close()
        log = await harness.open()
        assert [what(r) for r in await replayed(log)] == expected
        at, read = 0, []
        while at < 20:
            for record in parsed(await log.read(at, 20, 1_000_000)):
                assert record.base_index == at
                read += list(record.batch.sequence_ids)
                at += record.rows
        assert read == ids
        await log.close()

    async def test_everything_says_whose_it_is(self, harness: LogHarness) -> None:
        log = await harness.open()
        expected = []
        for term in (1, 2, 3):
            owner = Owner(log, term)
            owner.token = bytes([0x80 * (term % 2), term]) * 8
            await owner.open()
            owner.append(10 * term, 3)
            owner.append_control(term)
            await owner.until_stored(2)
            expected += [ownership_of(owner.token)] * 3
        assert len(set(expected)) == 3
        assert [record.ownership for record in await replayed(log)] == expected
        for _ in range(2):
            assert [(await log.locate(index)).ownership for index in range(9)] == expected
            for index in range(9):
                assert parsed(await log.read(index, 9, 1))[0].ownership == expected[index]
            await log.close()
            log = await harness.open()
        await log.close()

    async def test_message_ids_rise_and_are_the_same_whoever_says_them(self, harness: LogHarness) -> None:
        log = await harness.open()
        told: list[MessageId] = []
        for term in (1, 2):
            owner = await Owner(log, term).open()
            for i in range(20):
                owner.append(1000 * term + 30 * i, 1 + i % 23)
            await owner.until_stored(20)
            assert [sum(run.rows for run in runs) for runs in owner.runs] == [1 + i % 23 for i in range(20)]
            told += [one for runs in owner.runs for one in ids_of(runs)]
        assert told == sorted(set(told))
        for _ in range(2):
            for start in (0, 5, len(told) // 2, len(told) - 1):
                replays = [entries async for entries in log.replay(start)]
                base = int(replays[0].table[0, BASE_INDEX])
                again = [one for entries in replays for runs in entries.runs for one in ids_of(runs)]
                assert again == told[base:]
            assert [(await log.locate(index)).message_id for index in range(len(told))] == told
            for start, max_bytes in ((0, 1), (0, 10_000_000), (50, 1), (len(told) - 1, 1), (7, 3_000)):
                records = await log.read(start, len(told), max_bytes)
                base = parsed(records)[0].base_index
                assert (again := ids_read(records)) == told[base : base + len(again)]
            asked = np.array([0, 99, 5, 5, len(told) - 1], np.int64)
            columns = log.known_message_ids(asked)
            assert [column.dtype for column in columns] == [np.int64, np.int64, np.int32]
            known = [MessageId(*map(int, one)) for one in zip(*columns, strict=True)]
            assert all(one in (told[i], (-1, -1, -1)) for i, one in zip(asked, known, strict=True))
            assert known[-1] == told[-1]
            for index in (-1, len(told), len(told) + 100):
                with pytest.raises(PositionError):
                    await log.locate(index)
            await log.close()
            log = await harness.open()
        await log.close()

    async def test_what_is_certain(self, harness: LogHarness) -> None:
        log = await harness.open()
        assert log.certain_index == 0
        owner = await Owner(log, 1).open()
        for i in range(10):
            owner.append(10 * i, 5)
            await owner.until_stored(i + 1)
            assert log.certain_index == 5 * (i + 1)
        await log.close()
        log = await harness.open()
        # Nothing says of the last group that it was synced.
        assert 45 <= log.certain_index <= 50
        await Owner(log, 2).open()
        assert log.certain_index == 50
        await log.close()

    async def test_a_replay_that_nobody_finishes(self, harness: LogHarness) -> None:
        log = await harness.open()
        owner = await Owner(log, 1).open()
        for i in range(30):
            owner.append(10 * i, 5, 100_000)
        await owner.until_stored(30)
        for _ in range(3):
            replay = log.replay(0)
            assert (await anext(replay)).table[0, BASE_INDEX] == 0
            await replay.aclose()
        assert len(await replayed(log)) == 31
        await log.close()

    async def test_a_marker_takes_ownership_or_says_which_one_has_it(self, harness: LogHarness) -> None:
        log = await harness.open()
        owner = await Owner(log, 5).open()
        owner.append(0, 2)
        await owner.until_stored(1)
        expected = [("marker", 5, 0), ("batch", 0, 2)]
        late = Owner(log, 4)
        standing = await log.open_for_writing(4, late.token, late._settle)
        assert standing == (5 if harness.takes_higher_terms_only else 0)
        if not standing:
            expected.append(("marker", 4, 0))
        assert [what(r) for r in await replayed(log)] == expected
        again = await Owner(log, 6).open()
        again.append(2, 1)
        await again.until_stored(1)
        assert [what(r) for r in await replayed(log)] == [*expected, ("marker", 6, 0), ("batch", 2, 1)]
        await log.close()

    async def test_trimming_keeps_what_it_is_told_to(self, harness: LogHarness) -> None:
        log = await harness.open()
        if not harness.trims:
            assert await log.may_trim_to(0, Retention(0)) == log.first_index
            await log.close()
            return
        owner = await Owner(log, 1).open()
        for i in range(100):
            owner.append(i, 1, 8_000)
            await owner.until_stored(i + 1)
        size = log.size_bytes
        assert size > 800_000
        for covered in (0, 1):
            assert await log.may_trim_to(covered, Retention(0)) == 0
            await log.trim(0)
        first = await log.may_trim_to(50, Retention(0))
        assert (log.first_index, log.size_bytes) == (0, size), "asking changed something"
        assert 49 - 8 <= first <= 49
        await log.trim(first)
        assert log.first_index == first
        await log.trim(first)
        assert await log.may_trim_to(50, Retention(0)) == first
        await log.close()
        log = await harness.open(100)
        assert 49 - 8 <= log.first_index <= 49
        assert log.size_bytes < size
        for index in (0, log.first_index - 1):
            with pytest.raises(PositionError) as trimmed:
                await log.read(index, 100, 1000)
            assert trimmed.value.reason == "POSITION_TRIMMED"
            assert int(trimmed.value.numbers["first_index"]) == log.first_index
            with pytest.raises(PositionError):
                await replayed(log, index)
        first = log.first_index
        assert [what(r)[1] for r in await replayed(log, first) if r.rows] == list(range(first, 100))
        assert parsed(await log.read(first, 100, 1))[0].base_index == first
        await log.close()
        log = await harness.open(100)
        assert log.first_index == first
        owner = await Owner(log, 2).open()
        owner.append(100, 1)
        await owner.until_stored(1)
        assert parsed(await log.read(100, 101, 1))[0].base_index == 100
        await log.close()

    async def test_a_snapshots_place_is_where_it_goes_on(self, harness: LogHarness) -> None:
        log = await harness.open()
        everything: list[tuple[str, int, int]] = []
        snapshots = {0: log.place_at(0)}
        for term in (1, 2, 3):
            owner = await Owner(log, term).open()
            everything.append(("marker", term, 0))
            for i in range(20):
                first_id = 1000 * term + 10 * i
                owner.append_control(first_id)
                owner.append(first_id, 5, 3_000)
                await owner.until_stored(2 * i + 2)
                everything += [("control", first_id, 0), ("batch", first_id, 5)]
                index = 100 * (term - 1) + 5 * (i + 1)
                snapshots[index] = log.place_at(index)
            owner.append_control(1000 * term + 999)
            await owner.until_stored(41)
            everything.append(("control", 1000 * term + 999, 0))
            # For the same messages, and after another control record.
            snapshots[100 * term] = log.place_at(100 * term)
        looked_at = (0, 1, 99, 100, 151, 299)
        locations = [await log.locate(index) for index in looked_at]
        await log.close()
        for term, covered_index in enumerate((0, 5, 95, 100, 105, 200, 295, 300), start=4):
            log = await harness.open(covered_index, snapshots[covered_index])
            assert log.first_index == 0
            assert log.certain_index >= covered_index - 5
            indexes = list(accumulate((rows for _, _, rows in everything), initial=0))[1:]
            last = max(covered_index - 1, 0)
            begins = next(k for k, index in enumerate(indexes) if index > last) if last else 0
            assert [what(r) for r in await replayed(log, last)] == everything[begins:]
            for index in looked_at:
                assert parsed(await log.read(index, index + 1, 1))[0].base_index == index - index % 5
            assert [await log.locate(index) for index in looked_at] == locations
            assert [what(r) for r in await replayed(log)] == everything
            await Owner(log, term).open()
            everything.append(("marker", term, 0))
            assert [what(r) for r in await replayed(log, 300)] == everything[indexes.index(300) + 1 :]
            await log.close()

    async def test_reading_while_appending(self, harness: LogHarness) -> None:
        log = await harness.open()
        owner = await Owner(log, 1).open()

        async def read() -> list[int]:
            at, ids = 0, []
            async with asyncio.timeout(LIMIT_SECONDS):
                while at < 400:
                    if owner.stored * 2 <= at:
                        await asyncio.sleep(0)
                        continue
                    for record in parsed(await log.read(at, owner.stored * 2, 3_000)):
                        ids += list(record.batch.sequence_ids)
                        at += record.rows
            return ids

        readers = [asyncio.create_task(read()) for _ in range(3)]
        for i in range(200):
            owner.append(2 * i, 2, 500)
            if i % 10 == 0:
                await owner.until_stored(i + 1)
        for reader in readers:
            assert await reader == list(range(400))
        await log.close()
