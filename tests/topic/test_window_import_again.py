"""The same window again, broken off in mid-step, and once more: what is in force stays, no matter what was put
since."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from broker_sidecar import division
from seqdedupe import exports
from seqdedupe.core.id_runs import ImportedIds
from seqdedupe.core.rule import DUP, NOT_DUP
from seqdedupe.errors import InvalidRequestError
from seqdedupe.store import windows
from seqdedupe.store.db import Store
from seqdedupe.topic.operations import state_by_id
from seqdedupe.topic.window_runs import WindowImported
from seqdedupe.transfer.topic_state import WindowImport
from tests.topic.test_by_id import INCARNATION, verdicts
from tests.topic.test_window_import import HOUR_MS, OLD, ImportPlace
from tests.topic.test_window_import import place as place
from tests.topic.test_window_import import store as store

IDS = [known.deduplication_id for known in OLD]
Patch = pytest.MonkeyPatch


async def put_and_broken_off(place: ImportPlace, path: Path, monkeypatch: Patch) -> None:
    """The file is imported again, and the caller goes away while what was put is being synced."""
    was_put = asyncio.Event()
    put = windows.put_import

    def seen(*arguments: Any) -> int:
        was_put.set()
        return put(*arguments)

    checksum, *blocks = exports.read_window(path)
    with monkeypatch.context() as patched:
        patched.setattr(windows, "put_import", seen)
        importing = WindowImport(place.topic, checksum)
        for block in blocks:
            await importing.add(block)
        finishing = asyncio.ensure_future(importing.finish(len(OLD)))
        await was_put.wait()
        finishing.cancel()
        with suppress(asyncio.CancelledError):
            await finishing
        importing.close()
    assert finishing.cancelled()


async def killed_before_it_is_put(place: ImportPlace, path: Path, monkeypatch: Patch) -> None:
    """Once more: its run is written and synced, and that is all."""

    class Killed(Exception):
        pass

    def put(*arguments: Any) -> int:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(windows, "put_import", put)
        patched.setattr(WindowImport, "close", lambda self: None)
        with suppress(Killed):
            await place.bring(OLD, path)
    await place.store.flush(place.store.opening)
    await place.crash()


async def again_and_again(place: ImportPlace, path: Path, monkeypatch: Patch) -> list[int]:
    await place.bring(OLD, path)
    assert place.new(b"new") == [NOT_DUP]
    await put_and_broken_off(place, path, monkeypatch)
    assert verdicts(place.send(*IDS)) == [DUP] * len(IDS)
    await killed_before_it_is_put(place, path, monkeypatch)
    return place.new(*IDS)


async def test_what_is_in_force_stays_though_the_same_is_broken_off_again_and_again(
    place: ImportPlace, tmp_path: Path, monkeypatch: Patch
) -> None:
    assert await again_and_again(place, tmp_path / "window", monkeypatch) == [DUP] * len(IDS)
    assert len(place.import_runs()) == 1


def what_was_put_stays(monkeypatch: Patch) -> None:
    def runs_alone(store: Store, incarnation: int, imported: ImportedIds | None) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(windows, "_put_import", lambda *_: None)
            keep_only(store, incarnation, imported)

    keep_only = windows.keep_only_import
    monkeypatch.setattr(windows, "keep_only_import", runs_alone)


def numbers_are_taken_twice(monkeypatch: Patch) -> None:
    what_was_put_stays(monkeypatch)
    monkeypatch.setattr(
        WindowImported, "take_number", lambda self: self.there.run.number + 1 if self.there else windows.FIRST_RUN
    )


@pytest.mark.parametrize("plant", [what_was_put_stays, numbers_are_taken_twice])
async def test_control_what_is_broken_off_again_and_again(
    place: ImportPlace, tmp_path: Path, monkeypatch: Patch, plant: Callable[[Patch], None]
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, TypeError)):
        assert await again_and_again(place, tmp_path / "window", monkeypatch) == [DUP] * len(IDS)


async def test_an_import_ends_that_is_under_way_when_all_that_was_imported_has_expired(
    store: Store, tmp_path: Path
) -> None:
    """Else what goes then would be missing in it."""
    place = ImportPlace(store, deduplication_window_max_minutes=60)
    await place.start()
    path = tmp_path / "window"
    await place.bring(OLD, path)
    checksum, *blocks = exports.read_window(path)
    importing = WindowImport(place.topic, checksum)
    for block in blocks:
        await importing.add(block)
    place.now_ms += 10 * HOUR_MS
    await state_by_id(place.topic, IDS[0])
    while place.topic.policy.imported is not None:
        place.log.settle()
        await asyncio.sleep(0)
    with pytest.raises(InvalidRequestError, match=r"another import|\[TOPIC_IN_USE\]"):
        await importing.finish(len(OLD))
    importing.close()
    assert place.import_keys() == []
    await place.topic.close("")


async def test_another_number_of_workers_takes_along_what_was_imported(place: ImportPlace, tmp_path: Path) -> None:
    await place.bring(OLD, tmp_path / "window")
    new = Store.open(tmp_path / "divided")
    try:
        await division._copy(place.store, new, INCARNATION)
        [here, there] = [windows.load_import(one, INCARNATION) for one in (place.store, new)]
        assert here is not None
        assert there is not None
        assert (there.run.number, there.key, there.checksum) == (here.run.number, here.key, here.checksum)
    finally:
        new.close()
