"""Writes that fail for real: the process may not make files larger than a limit, as on a full disk."""

import asyncio
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from rocksdict import Rdict

from seqdedupe.errors import DamagedError, UnavailableError, error
from seqdedupe.store import rocksdb
from seqdedupe.store.db import Store
from seqdedupe.store.rocksdb import Mark, open_rocksdb
from seqdedupe.store.snapshots import Snapshots
from seqdedupe.testing import LAST_RESORT_SECONDS
from tests.store.model import INCARNATION, State, delta, load, save, state_of, topic

# Each script runs in its own process: the limit is the process's. A write beyond it fails with EFBIG.
PRELUDE = """# may start warm
import asyncio, resource, sys, time
from pathlib import Path
from broker_sidecar import kernels
kernels.prepare()
from seqdedupe.errors import SeqdedupeError, UnavailableError
from seqdedupe.store.db import Store
from seqdedupe.store.snapshots import Snapshots
from seqdedupe.testing import LAST_RESORT_SECONDS
from tests.store.model import INCARNATION, State, delta, save, state_of, topic

FOLDER = Path(sys.argv[1])

def limit_files(size_bytes):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, resource.RLIM_INFINITY))

async def until_open(store):
    deadline = time.monotonic() + LAST_RESORT_SECONDS
    while time.monotonic() < deadline:
        try:
            return store.opening
        except UnavailableError as e:
            assert e.reason == "STORE_UNAVAILABLE", e
            await asyncio.sleep(0.005)
    raise SystemExit("the store did not open again")

async def fill(store, snapshots, first, limit):
    '''Durable deltas with a name of its own each, until one fails or there are enough; how many are durable.'''
    names = [b"%0250d" % number for number in range(limit)]
    for number in range(first, limit):
        change = delta(number + 1, {number: (number, 1)}, first_name=number, names=[names[number]])
        try:
            await save(store, snapshots, change)
        except UnavailableError as e:
            assert e.reason == "STORE_UNAVAILABLE", e
            return number
    return limit
"""


def run(script: str, folder: Path) -> str:
    result = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(script), str(folder)],
        capture_output=True,
        text=True,
        timeout=LAST_RESORT_SECONDS,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("limit_bytes", [40_000, 2**40])
def test_what_was_durable_outlives_a_failed_write_and_the_store_opens_again(folder: Path, limit_bytes: int) -> None:
    """The second limit is the control arm: nothing fails, and RocksDB is opened once."""
    durable = int(
        run(
            f"""
            async def main():
                store = Store.open(FOLDER)
                snapshots = Snapshots(store, INCARNATION)
                limit_files({limit_bytes})
                durable = await fill(store, snapshots, 0, 500)
                if durable < 500:
                    for _ in range(20):
                        try:
                            await save(store, snapshots, delta(durable + 1, {{}}, first_name=durable))
                        except UnavailableError:
                            await asyncio.sleep(0.001)
                limit_files(resource.RLIM_INFINITY)
                opening = await until_open(store)
                assert (opening > 1) == (durable < 500), opening
                assert await fill(store, snapshots, durable, 600) == 600
                loaded = Snapshots(store, INCARNATION).load()
                assert loaded.persisted.tolist() == list(range(600)), loaded
                print(durable)
                store.close()
            asyncio.run(main())
            """,
            folder,
        )
    )
    assert (durable < 500) == (limit_bytes < 2**40)
    state = load(folder)
    assert state.next_index == 600
    assert [state.persisted[b"%0250d" % number] for number in range(600)] == list(range(600))


def test_a_process_that_ends_while_writes_fail_leaves_what_was_durable(folder: Path) -> None:
    durable = int(
        run(
            """
            import os
            async def main():
                store = Store.open(FOLDER)
                limit_files(40_000)
                print(await fill(store, Snapshots(store, INCARNATION), 0, 500), flush=True)
                os._exit(0)
            asyncio.run(main())
            """,
            folder,
        )
    )
    state = load(folder)
    assert 10 < durable <= state.next_index <= durable + 1
    assert sorted(state.persisted.values()) == list(range(state.next_index))


def test_a_store_that_cannot_be_written_at_start_is_not_called_damaged(folder: Path) -> None:
    run(
        """
        async def main():
            store = Store.open(FOLDER)
            await fill(store, Snapshots(store, INCARNATION), 0, 20)
            store.close()
            limit_files(16)
            try:
                Store.open(FOLDER)
            except SeqdedupeError as e:
                assert e.reason == "STORE_UNAVAILABLE", e
            else:
                raise SystemExit("it opened")
            limit_files(resource.RLIM_INFINITY)
            Store.open(FOLDER).close()
        asyncio.run(main())
        """,
        folder,
    )
    assert load(folder).next_index == 20


class SyncFailsOnce:
    """Lets the next sync of RocksDB's log fail: what a failed fsync does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        sync = rocksdb.sync
        self.failed = False

        def fail(db: Rdict) -> int:
            if self.failed:
                return sync(db)
            self.failed = True
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(rocksdb, "sync", fail)


async def until_open(store: Store) -> None:
    async with asyncio.timeout(LAST_RESORT_SECONDS):
        while True:
            try:
                store.topics()
            except UnavailableError:
                await asyncio.sleep(0.001)
            else:
                return


async def test_a_failed_sync_fails_all_that_wait_for_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = SyncFailsOnce(monkeypatch)
    results = await asyncio.gather(
        *(store.put_topics(topic(number)) for number in range(1, 11)), return_exceptions=True
    )
    assert fault.failed
    assert all(isinstance(result, UnavailableError) for result in results)
    await until_open(store)
    await store.put_topics(topic(11))
    assert store.topics()[-1] == topic(11)


async def test_a_write_from_before_a_reopening_is_never_called_durable(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots = Snapshots(store, INCARNATION)
    written = snapshots.write_delta(delta(1, {0: (1, 1)}, names=[b"a"]))
    SyncFailsOnce(monkeypatch)
    with pytest.raises(UnavailableError):
        await store.put_topics(topic(1))
    await until_open(store)
    with pytest.raises(UnavailableError):
        await store.flush(written)
    await store.flush(snapshots.write_delta(delta(1, {0: (1, 1)}, names=[b"a"])))
    assert state_of(snapshots.load()).persisted == {b"a": 1}


async def test_a_retry_says_names_again_whether_or_not_they_were_lost(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots = Snapshots(store, INCARNATION)
    SyncFailsOnce(monkeypatch)
    with pytest.raises(UnavailableError):
        await save(store, snapshots, delta(1, {0: (1, 1)}, names=[b"a"]))
    await until_open(store)
    retry = delta(2, {0: (1, 1), 1: (5, 2)}, names=[b"a", b"b"])
    await save(store, snapshots, retry)
    assert state_of(snapshots.load()) == State().after(retry)


async def test_opening_again_happens_once_for_all_that_ask(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    SyncFailsOnce(monkeypatch)
    await asyncio.gather(*(store.put_topics(topic(number)) for number in (1, 2)), return_exceptions=True)
    for _ in range(100):
        with pytest.raises(UnavailableError):
            store.write(None)  # type: ignore[arg-type]
    await until_open(store)
    assert store.opening == 2


async def test_a_store_that_turns_out_damaged_when_opened_again_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.open(folder)
    await store.put_topics(topic())
    SyncFailsOnce(monkeypatch)
    with pytest.raises(UnavailableError):
        await store.put_topics(topic())
    (folder / "CURRENT").unlink()
    with pytest.raises(UnavailableError):
        store.topics()
    async with asyncio.timeout(LAST_RESORT_SECONDS):
        while True:
            try:
                store.topics()
            except UnavailableError:
                await asyncio.sleep(0.001)
            except DamagedError as e:
                found = e.reason
                break
    assert found == "STORE_DAMAGED"
    store.close()


async def test_a_store_on_a_full_disk_is_read_and_opens_itself_when_there_is_room(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.open(folder)
    before = delta(1, {0: (1, 1)}, names=[b"a"])
    await save(store, Snapshots(store, INCARNATION), before)
    store.close()
    why = "No space left on device"

    def without_room(folder: Path, mark: Mark, *, read_only: bool = False) -> Rdict:
        if not read_only:
            raise error("STORE_UNAVAILABLE", f"IO error: {why}: While appending to file")
        return open_rocksdb(folder, mark, read_only=True)

    with monkeypatch.context() as full:
        full.setattr("seqdedupe.store.db.open_rocksdb", without_room)
        store = Store.open(folder)
        snapshots = Snapshots(store, INCARNATION)
        assert state_of(snapshots.load()) == State().after(before)
        for _ in range(3):
            with pytest.raises(UnavailableError):
                await save(store, snapshots, delta(2, {0: (2, 1)}, first_name=1))
    await until_open(store)
    await save(store, snapshots, delta(3, {0: (3, 1)}, first_name=1))
    assert state_of(snapshots.load()).persisted == {b"a": 3}
    store.close()
    assert load(folder).persisted == {b"a": 3}
    why = "Permission denied"
    monkeypatch.setattr("seqdedupe.store.db.open_rocksdb", without_room)
    with pytest.raises(UnavailableError, match=why):
        Store.open(folder)
