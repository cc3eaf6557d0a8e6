"""Logs that are wrong on purpose: the suite must notice each."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from seqdedupe.limits import Retention
from seqdedupe.log.contract import Location, Outcome, Records, Run
from seqdedupe.log.embedded import tail
from seqdedupe.message_id import MessageId
from tests.log import test_damage
from tests.log.conformance import LogConformance
from tests.log.faulty import FaultyLog, Storage
from tests.log.test_conformance import INCARNATION, FaultyHarness
from tests.log.test_damage import logs as logs

Settle = Callable[[Outcome], None]


class TakesMoreAfterARefusal(FaultyLog):
    def append(self, batch: bytes, rows: int, column_bytes: int, sent: object = None) -> None:
        if self.failed:
            self.storage.add(batch, rows, column_bytes)
        else:
            super().append(batch, rows, column_bytes)


class DoesNotFence(FaultyLog):
    """What an earlier opening left is stored after the marker of the next one."""

    async def open_for_writing(self, term: int, token: bytes, settle: Settle) -> int:
        late = list(self._in_flight)
        standing_term = await super().open_for_writing(term, token, settle)
        for batch in late:
            self.storage.add(*batch)
        return standing_term


class TellsTheOldOwner(FaultyLog):
    _first: Settle | None = None

    async def open_for_writing(self, term: int, token: bytes, settle: Settle) -> int:
        self._first = first = self._first or settle

        def both(outcome: Outcome) -> None:
            settle(outcome)
            if first is not settle:
                first(outcome)

        return await super().open_for_writing(term, token, both)


class WritesNoMarker(FaultyLog):
    async def open_for_writing(self, term: int, token: bytes, settle: Settle) -> int:
        standing_term = await super().open_for_writing(term, token, settle)
        self.storage.records.pop()
        return standing_term


class ReplaysFromOneTooLate(FaultyLog):
    def replay(self, from_index: int) -> Any:
        return super().replay(from_index + (from_index < self.storage.next_index))


class ConfirmsTooEarly(FaultyLog):
    def append(self, batch: bytes, rows: int, column_bytes: int, sent: object = None) -> None:
        settle = self._settle
        if settle is not None and not self.failed:
            settle(Outcome([(Run(rows, 1000, 0),)]))
        super().append(batch, rows, column_bytes)


class SwapsTwo(FaultyLog):
    def store(self, count: int | None = None) -> None:
        if len(self._in_flight) > 1:
            self._in_flight.rotate(1)
        super().store(count)


class TrimsTheSnapshotsEntry(FaultyLog):
    async def may_trim_to(self, covered_index: int, retention: Retention) -> int:
        return await super().may_trim_to(covered_index + 1 if covered_index else 0, retention)


class ComputesMessageIds(FaultyLog):
    """As if its ledgers never rolled over."""

    async def locate(self, index: int) -> Location:
        found = await super().locate(index)
        return found._replace(message_id=MessageId(1000, index))


class LeavesMessageIdsToTheIndex(FaultyLog):
    async def read(self, *what: int) -> Records:
        return (await super().read(*what))._replace(runs=None)


class ForgetsTheSecondRun(FaultyLog):
    def store(self, count: int | None = None) -> None:
        super().store(count)
        self._unreported = [runs[:1] for runs in self._unreported]


class ForgetsControlRecords(FaultyLog):
    def append_control(self, body: bytes) -> None:
        return


class PutsControlRecordsFirst(FaultyLog):
    def append_control(self, body: bytes) -> None:
        super().append_control(body)
        self._in_flight.rotate(1)


class TrimsWhenItIsAsked(FaultyLog):
    async def may_trim_to(self, covered_index: int, retention: Retention) -> int:
        first = await super().may_trim_to(covered_index, retention)
        await self.trim(first)
        return first


class ShowsMarkers(FaultyLog):
    async def read(self, *what: int) -> Records:
        raw, runs = await super().read(*what)
        return Records(self.storage.records[0] + bytes(raw), runs)


SUITE = LogConformance()
EVERYTHING = [getattr(SUITE, name) for name in dir(SUITE) if name.startswith("test_")]


class WrongHarness(FaultyHarness):
    def __init__(self, kind: type[FaultyLog]) -> None:
        super().__init__()
        self._kind = kind
        self._wrong = Storage(INCARNATION, lambda: self.now_ms)

    async def open(self, covered_index: int = 0, place: bytes = b"") -> FaultyLog:
        return self._kind(self._wrong, automatic=True, retention=True)


async def first_failure(kind: type[FaultyLog], seconds: float) -> str | None:
    """The first test of the suite that fails, or takes longer: some bugs show by what never comes."""
    for test in EVERYTHING:
        try:
            async with asyncio.timeout(seconds):
                await test(WrongHarness(kind))
        except (Exception, pytest.fail.Exception) as e:  # noqa: BLE001
            return f"{test.__name__}: {type(e).__name__}"
    return None


async def test_control_a_right_log_passes() -> None:
    assert await first_failure(FaultyLog, 60) is None


@pytest.mark.parametrize(
    "kind",
    [
        TakesMoreAfterARefusal,
        DoesNotFence,
        TellsTheOldOwner,
        WritesNoMarker,
        ReplaysFromOneTooLate,
        ConfirmsTooEarly,
        SwapsTwo,
        TrimsTheSnapshotsEntry,
        ComputesMessageIds,
        LeavesMessageIdsToTheIndex,
        ForgetsTheSecondRun,
        ForgetsControlRecords,
        PutsControlRecordsFirst,
        TrimsWhenItIsAsked,
        ShowsMarkers,
    ],
)
async def test_the_suite_notices(kind: type[FaultyLog]) -> None:
    assert await first_failure(kind, 5) is not None


async def test_damage_taken_for_a_torn_tail_is_noticed(
    logs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = tail.survey

    def survey(*arguments: Any) -> tail.Tail:
        found = really(*arguments)
        found.synced_offset = 0
        return found

    monkeypatch.setattr(tail, "survey", survey)
    monkeypatch.setattr(tail, "_synced_after", lambda *arguments: 0)
    monkeypatch.setattr(tail, "can_be_torn", lambda *arguments: True)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        await test_damage.test_every_byte_flipped(logs, tmp_path, 0xFF)
