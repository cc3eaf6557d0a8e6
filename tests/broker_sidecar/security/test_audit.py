"""Writing an audit trail: what is answered stands there, no matter what the disk and the callers do."""

import asyncio
import errno
import json
import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from broker_sidecar.security import audit as audit_module
from broker_sidecar.security.audit import MOST_CALLERS, MOST_OF_CALLER, Audit, Repeats
from seqdedupe.audit_trail import verify
from seqdedupe.errors import DamagedError, UnavailableError
from seqdedupe.testing import LAST_RESORT_SECONDS


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


def events(path: Path) -> list[dict[str, Any]]:
    verify([path])
    return [json.loads(line) for line in path.read_text().splitlines()]


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def size(path: Path) -> int:
    return path.stat().st_size


def failing(how: str, times: int) -> Callable[..., Any]:
    """`os.<how>`, which fails this many times first."""
    real = getattr(os, how)
    left = times

    def call(*arguments: Any) -> Any:
        nonlocal left
        if left:
            left -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments)

    return call


async def test_lines_in_their_order_for_their_owner_alone(path: Path) -> None:
    audit = Audit(path)
    await asyncio.gather(*(audit.write("call", subject="s", which=k) for k in range(100)))
    assert [line["which"] for line in events(path)] == list(range(100))
    assert mode(path) == 0o600
    await audit.close()


async def test_what_is_written_is_synced_first(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    audit = Audit(path)
    synced_bytes = []
    real = os.fdatasync

    def sync(file: int) -> None:
        real(file)
        synced_bytes.append(os.fstat(file).st_size)

    monkeypatch.setattr(os, "fdatasync", sync)
    for k in range(3):
        await audit.write("call", which=k)
        assert synced_bytes[-1] == size(path)
    await audit.close()


async def test_a_chain_goes_on_after_a_restart_and_without_a_torn_line(path: Path) -> None:
    for k in range(3):
        audit = Audit(path)
        await audit.write("call", which=k)
        await audit.close()
        with path.open("ab") as file:
            file.write(b'{"version":1,"numb')
    audit = Audit(path)
    await audit.write("call", which=3)
    await audit.close()
    assert [line["which"] for line in events(path)] == [0, 1, 2, 3]


def test_a_damaged_end_is_not_gone_on_from(path: Path) -> None:
    path.write_bytes(b"what is this\n")
    with pytest.raises(DamagedError, match="AUDIT_DAMAGED"):
        Audit(path)
    assert path.read_bytes() == b"what is this\n"


async def test_one_process_writes_it(path: Path) -> None:
    first = Audit(path)
    with pytest.raises(UnavailableError, match="another process"):
        Audit(path)
    await first.close()
    await Audit(path).close()


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: path.symlink_to("elsewhere")])
async def test_where_no_file_can_be(path: Path, make: Callable[[Path], None]) -> None:
    make(path)
    with pytest.raises(UnavailableError, match="AUDIT_UNAVAILABLE"):
        Audit(path)


@pytest.mark.parametrize("how", ["write", "fdatasync"])
async def test_a_disk_that_fails_for_a_while(path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    audit = Audit(path)
    await audit.write("call", which=0)
    monkeypatch.setattr(os, how, failing(how, 2))
    for which in (1, 2):
        with pytest.raises(UnavailableError, match="No space left"):
            await audit.write("call", which=which)
    await audit.write("call", which=3)
    await audit.close()
    # What failed in its sync may be there.
    assert [line["which"] for line in events(path)] == ([0, 3] if how == "write" else [0, 1, 2, 3])


async def test_a_write_that_was_cut_short(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    audit = Audit(path)
    await audit.write("call", which=0)
    real, calls = os.write, []

    def short(file: int, data: Any) -> int:
        calls.append(len(data))
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data[:7])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", short)
        with pytest.raises(UnavailableError):
            await audit.write("call", which=1)
    assert calls
    await audit.write("call", which=2)
    await audit.close()
    assert [line["which"] for line in events(path)] == [0, 2]


async def test_a_file_that_was_moved_away(path: Path) -> None:
    audit = Audit(path)
    await audit.write("call", which=0)
    older = path.with_suffix(".1")
    os.rename(path, older)
    await audit.write("call", which=1)
    audit.reopen()
    await audit.write("call", which=2)
    await audit.close()
    assert [line["which"] for line in events(older)] == [0, 1]
    assert [line["which"] for line in events(path)] == [2]
    assert (verify([older, path]).lines, verify([older, path]).chains) == (3, 1)


async def test_whoever_is_cancelled_disturbs_nobody(path: Path) -> None:
    audit = Audit(path)
    waiting = [asyncio.ensure_future(audit.write("call", which=k)) for k in range(20)]
    await asyncio.sleep(0)
    for k in range(0, 20, 2):
        waiting[k].cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await audit.close()
    assert [line["which"] for line in events(path)] == list(range(20))
    assert [task.cancelled() for task in waiting] == [k % 2 == 0 for k in range(20)]


HOST = "ipv4:10.0.0.1"


async def test_equal_refusals_are_told_once_and_counted(path: Path) -> None:
    audit = Audit(path)
    for _ in range(1000):
        audit.refused("denied", HOST, subject="s", topic="t")
    audit.refused("denied", HOST, subject="s", topic="u")
    await audit.close()
    assert [(line["topic"], line.get("repeats")) for line in events(path)] == [("t", None), ("u", None), ("t", 999)]


async def test_what_was_counted_is_told_in_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_module, "REPEATS_SECONDS", 0.01)
    audit = Audit(path)
    audit.refused("denied", HOST, subject="s")
    audit.refused("denied", HOST, subject="s")
    async with asyncio.timeout(LAST_RESORT_SECONDS):
        while len(events(path)) < 2:  # noqa: ASYNC110 (a file tells nobody that it has grown)
            await asyncio.sleep(0.01)
    audit.refused("denied", HOST, subject="s")
    await audit.close()
    assert [line.get("repeats") for line in events(path)] == [None, 1, None]


async def test_a_flood_of_different_refusals_is_bounded_and_hides_nobody_else(path: Path) -> None:
    audit = Audit(path)
    for k in range(10 * MOST_OF_CALLER):
        audit.refused("denied", HOST, subject="s", topic=f"t{k}")
        audit.refused("unauthenticated", HOST, call=f"c{k}")
    audit.refused("denied", HOST, subject="other", topic="t")
    audit.refused("denied", "ipv4:10.0.0.2", subject="s", topic="t")
    for k in range(10 * MOST_OF_CALLER):
        audit.tell("failed", why=k)
    await audit.close()
    found = events(path)
    count = Counter((line["event"], line.get("subject")) for line in found)
    assert count == {
        ("denied", "s"): MOST_OF_CALLER + 1,
        ("denied", "other"): 1,
        ("unauthenticated", None): MOST_OF_CALLER,
        ("failed", None): 10 * MOST_OF_CALLER,
        ("others refused", "s"): 1,
        ("others refused", ""): 1,
    }
    assert [(one["refused"], one["address"], one["repeats"]) for one in found[-2:]] == [
        ("denied", HOST, 9 * MOST_OF_CALLER),
        ("unauthenticated", HOST, 9 * MOST_OF_CALLER),
    ]


async def test_more_callers_than_are_kept_apart(path: Path) -> None:
    audit = Audit(path)
    for k in range(MOST_CALLERS + 10):
        audit.refused("unauthenticated", f"ipv6:2001:db8::{k:x}/64", call="c", of=k)
    # Anyone who has a token is not crowded out by those who have none.
    audit.refused("denied", HOST, subject="s")
    await audit.close()
    assert [line["event"] for line in events(path)[MOST_CALLERS:]] == ["denied", "others refused"]
    assert events(path)[-1]["repeats"] == 10


async def test_a_disk_that_stands_still_bounds_what_waits(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_module, "MAX_WAITING", 10)
    monkeypatch.setattr(audit_module, "MAX_WAITING_REFUSALS", 5)
    moves, is_writing = threading.Event(), threading.Event()
    real = os.fdatasync

    def stand_still(file: int) -> None:
        is_writing.set()
        moves.wait()
        real(file)

    monkeypatch.setattr(os, "fdatasync", stand_still)
    audit = Audit(path)
    waiting = [asyncio.ensure_future(audit.write("call", which=0))]
    await asyncio.to_thread(is_writing.wait)
    waiting += [asyncio.ensure_future(audit.write("call", which=k)) for k in range(1, 6)]
    await asyncio.sleep(0)
    # Refusals leave room for the rest.
    audit.refused("denied", HOST)
    audit.tell("failed", which=6)
    waiting += [asyncio.ensure_future(audit.write("call", which=k)) for k in range(7, 11)]
    await asyncio.sleep(0)
    with pytest.raises(UnavailableError, match="10 lines wait"):
        await audit.write("call", which=11)
    audit.tell("failed", which=12)
    moves.set()
    await asyncio.gather(*waiting)
    await audit.close()
    assert [line["which"] for line in events(path)] == list(range(11))


def test_repeats() -> None:
    told: Repeats[str, str] = Repeats()
    assert [told.is_first("x", word) for word in "aabac"] == [True, False, True, False, True]
    assert told.is_first("y", "a")
    assert list(told.take()) == [("x", "a", 2)]
    assert list(told.take()) == []
    assert told.is_first("x", "a")
