"""The commit thread: whose appends are written, who hears of it, which files it holds open."""

import asyncio
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from seqdedupe.errors import DamagedError
from seqdedupe.log.contract import Outcome
from seqdedupe.log.embedded import commit
from seqdedupe.log.embedded.commit import Closing, Committer, Journal
from seqdedupe.log.embedded.logs import EmbeddedLogs
from seqdedupe.log.embedded.writer import GROUP_APPENDS, Writer, WriteTerm, WrittenAppends
from tests.log.batches import SECRET, TOPIC, encoded_batch
from tests.log.conformance import LIMIT_SECONDS, Owner, replayed, what
from tests.log.conftest import MakeLogs
from tests.log.test_embedded import Gate


async def opened(logs: EmbeddedLogs, incarnation: int) -> Owner:
    await logs.create(incarnation, TOPIC, SECRET)
    return await Owner(await logs.open(incarnation, 0), 1).open()


async def an_older_openings_backlog(logs: EmbeddedLogs, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """More than a group waits to be written when the log is opened for writing again: what the log then holds."""
    old = await opened(logs, 1)
    with monkeypatch.context() as patch:
        syncs = Gate(patch, "fdatasync")
        syncs.open.clear()
        old.append(0, 1)
        await syncs.arrival()
        for i in range(1, 2 * GROUP_APPENDS + 10):
            old.append(i, 1)
        opening = asyncio.ensure_future(Owner(old.log, 2).open())
        await asyncio.sleep(0)
        syncs.open.set()
        new = await opening
    new.append(5_000, 1)
    await new.until_stored(1)
    found = [what(record) for record in await replayed(old.log)]
    await old.log.close()
    return found


def is_fenced(found: list[tuple[str, int, int]]) -> bool:
    place = found.index(("marker", 2, 0))
    before = [first for _, first, _ in found[1:place]]
    return found[place:] == [("marker", 2, 0), ("batch", 5_000, 1)] and before == list(range(place - 1))


async def test_appends_of_an_older_opening_are_not_written(
    make_logs: MakeLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_fenced(await an_older_openings_backlog(make_logs(), monkeypatch))


async def test_control_appends_of_an_older_opening(make_logs: MakeLogs, monkeypatch: pytest.MonkeyPatch) -> None:
    really = Writer.write

    def write(self: Writer, opening: WriteTerm, now_ms: int) -> WrittenAppends | None:
        if opening.marked:
            self._opening = opening
        return really(self, opening, now_ms)

    monkeypatch.setattr(Writer, "write", write)
    try:
        found = await an_older_openings_backlog(make_logs(), monkeypatch)
    except DamagedError:
        # Its records are not those of the marker before them.
        return
    assert not is_fenced(found)


async def who_hears_after_one_that_raises(logs: EmbeddedLogs, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Three topics' news are reported in one go, and anyone who hears the first raises: how much each of them hears."""
    heard = [0, 0, 0]
    raised: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context["exception"]))
    made = []

    def settle_of(k: int) -> Callable[[Outcome], None]:
        def settle(outcome: Outcome) -> None:
            heard[k] += outcome.stored
            if k == 0:
                raise ZeroDivisionError

        return settle

    for k in range(3):
        await logs.create(k, TOPIC, SECRET)
        made.append(await logs.open(k, 0))
        await made[k].open_for_writing(1, b"t" * 16, settle_of(k))
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "confirm", lambda self, written: False)
        syncs = Gate(patch, "fdatasync")
        for log in made:
            log.append(*encoded_batch(0, 1))
        # The loop stands still meanwhile: by the last sync the thread has told of the first two.
        for _ in range(3):
            assert syncs.arrived.acquire(timeout=LIMIT_SECONDS)
        for _ in range(20):
            await asyncio.sleep(0)
    assert [type(e) for e in raised] == [ZeroDivisionError]
    for log in made:
        await asyncio.wait_for(log.close(), LIMIT_SECONDS)
    return heard


async def test_what_follows_a_caller_that_raises_is_told(make_logs: MakeLogs, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (await who_hears_after_one_that_raises(make_logs(), monkeypatch))[:2] == [1, 1]


async def test_control_what_follows_a_caller_that_raises_is_forgotten(
    make_logs: MakeLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deliver(self: Committer) -> None:
        self._announced = False
        waiting = list(self._news)
        self._news.clear()
        for news in waiting:
            if isinstance(news, Closing):
                news.closed.set_result(None)
            elif isinstance(news, WrittenAppends):
                news.opening.writer.on_news(news)

    monkeypatch.setattr(Committer, "_deliver", deliver)
    assert (await who_hears_after_one_that_raises(make_logs(), monkeypatch))[:2] == [1, 0]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_commit_thread_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fatal: list[str] = []

    def clock_ms() -> int:
        raise MemoryError("no memory for the clock")

    logs = EmbeddedLogs(tmp_path / "logs", clock_ms=clock_ms, fatal=fatal.append)
    await logs.create(1, TOPIC, SECRET)
    log = await logs.open(1, 0)
    opening = asyncio.ensure_future(log.open_for_writing(1, b"t" * 16, lambda outcome: None))
    await until(lambda: bool(fatal))
    assert "no memory for the clock" in fatal[0]
    opening.cancel()
    await asyncio.gather(opening, return_exceptions=True)
    await logs.close()


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_SECONDS):
        while not is_so():  # noqa: ASYNC110 (nobody tells)
            await asyncio.sleep(0.002)


def open_segments(folder: Path) -> int:
    """How many segment files below a folder this process holds open."""
    count = 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{entry}")
            count += path.startswith(str(folder)) and path.endswith(".log")
        except FileNotFoundError:
            continue
    return count


async def test_many_topics_share_few_descriptors(
    make_logs: MakeLogs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit, "MAX_OPEN_FILES", 8)
    logs = make_logs()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 25, hard))
    try:
        owners = [await opened(logs, incarnation) for incarnation in range(1, 101)]
        for part in range(3):
            for owner in owners:
                owner.append(part, 1)
            for owner in owners:
                await owner.until_stored(part + 1)
            await until(lambda: open_segments(tmp_path) <= 8)
        for owner in owners:
            assert len(await replayed(owner.log)) == 4
            await owner.log.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_an_idle_topic_holds_no_file_open(
    make_logs: MakeLogs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit, "IDLE_SECONDS", 0.02)
    owner = await opened(make_logs(), 1)
    for i in range(3):
        owner.append(i, 1)
        await owner.until_stored(i + 1)
        await until(lambda: open_segments(tmp_path) == 0)
    assert [what(r)[0] for r in await replayed(owner.log)] == ["marker", "batch", "batch", "batch"]
    await owner.log.close()


async def test_a_cancelled_opening_or_close_leaves_no_file_open(make_logs: MakeLogs, tmp_path: Path) -> None:
    logs = make_logs()
    for turns in range(6):
        await logs.create(turns, TOPIC, SECRET)
        log = await logs.open(turns, 0)
        for step in (log.open_for_writing(1, b"t" * 16, lambda outcome: None), log.close()):
            task = asyncio.ensure_future(step)
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        again = await logs.open(turns, 0)
        owner = await Owner(again, 2).open()
        owner.append(0, 1)
        await owner.until_stored(1)
        await again.close()
    assert open_segments(tmp_path) == 0
