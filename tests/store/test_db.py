"""The store's topics, its lock and version, and what flush promises."""

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rocksdict import Rdict, WriteBatch

from seqdedupe.errors import ConfigurationError, DamagedError, UnavailableError
from seqdedupe.store import parts, rocksdb
from seqdedupe.store.db import Store
from seqdedupe.store.parts import FORMAT_VERSION, LAST_INCARNATION, TopicRecord, TopicState, seal, topic_key
from seqdedupe.store.snapshots import Snapshots
from seqdedupe.testing import LAST_RESORT_SECONDS
from tests.log.power import Disk
from tests.processes import running
from tests.store.model import INCARNATION, State, delta, load, save, state_of, topic


def reason(raised: pytest.ExceptionInfo[BaseException]) -> str:
    return getattr(raised.value, "reason", "")


def put(store: Store, key: bytes, value: bytes) -> int:
    batch = WriteBatch(raw_mode=True)
    batch.put(key, value)
    return store.write(batch)


async def test_topics_are_there_again_after_a_restart(folder: Path) -> None:
    secret = bytes(range(16))
    first = TopicRecord("persistent://a/b/ünï", 5, TopicState.CREATING, secret)
    second = TopicRecord("persistent://a/b/c", 2**62, TopicState.DELETING)
    assert str(secret) not in repr(first)
    store = Store.open(folder)
    assert store.topics() == []
    await store.put_topics(second)
    await store.put_topics(first)
    store.close()
    store = Store.open(folder)
    assert store.topics() == [first, second]
    changed = TopicRecord(first.name, 5, TopicState.ACTIVE, secret)
    await store.put_topics(changed)
    assert store.topics() == [changed, second]
    store.close()


async def test_incarnations_rise_also_above_those_of_removed_topics(folder: Path) -> None:
    store = Store.open(folder)
    given = [store.next_incarnation(1000), store.next_incarnation(1000), store.next_incarnation(7)]
    assert given == [1000, 1001, 1002]
    await store.put_topics(topic(1002))
    await store.remove_topic(1002)
    store.close()
    store = Store.open(folder)
    assert store.topics() == []
    assert store.next_incarnation(5) == 1003
    assert store.next_incarnation(2000) == 2000
    store.close()


async def test_removing_a_topic_takes_its_snapshots_and_nothing_else(store: Store, small_pages: None) -> None:
    topics = {number: Snapshots(store, number) for number in (INCARNATION - 1, INCARNATION, INCARNATION + 1)}
    for incarnation, snapshots in topics.items():
        await store.put_topics(topic(incarnation))
        for index in range(6):
            await save(store, snapshots, delta(index, {index: (index, 1)}, first_name=index, names=[b"%d" % index]))
            await snapshots.compact_if_due()
    await store.remove_topic(INCARNATION)
    assert [record.incarnation for record in store.topics()] == [INCARNATION - 1, INCARNATION + 1]
    left = {number: state_of(Snapshots(store, number).load()) for number in topics}
    assert left[INCARNATION] == State()
    assert left[INCARNATION - 1] == left[INCARNATION + 1]
    assert left[INCARNATION + 1].persisted == {b"%d" % index: index for index in range(6)}


OPEN_AND_WAIT = """# may start warm
import sys
from pathlib import Path
from broker_sidecar import kernels
kernels.prepare()
from seqdedupe.errors import SeqdedupeError
from seqdedupe.store.db import Store
try:
    store = Store.open(Path(sys.argv[1]))
except SeqdedupeError as e:
    print(e.reason, flush=True)
else:
    print("OPEN", flush=True)
    sys.stdin.read()
    store.close()
"""


def test_a_second_process_is_refused_while_the_first_has_the_store(folder: Path) -> None:
    command = [sys.executable, "-c", OPEN_AND_WAIT, str(folder)]
    with running(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdin is not None
        assert first.stdout.readline() == "OPEN\n"
        second = subprocess.run(command, input="", stdout=subprocess.PIPE, text=True, check=True)
        assert second.stdout == "DIRECTORY_IN_USE\n"
        with pytest.raises(ConfigurationError) as raised:
            Store.open(folder)
        assert reason(raised) == "DIRECTORY_IN_USE"
        first.stdin.close()
    Store.open(folder).close()


def test_two_openings_in_one_process_are_refused_and_leave_the_first_alone(store: Store, folder: Path) -> None:
    with pytest.raises(ConfigurationError) as raised:
        Store.open(folder)
    assert reason(raised) == "DIRECTORY_IN_USE"
    assert store.topics() == []


async def test_a_table_file_that_a_power_cut_took_is_named_and_the_way_out_too(folder: Path, tmp_path: Path) -> None:
    store = Store.open(folder)
    await store.put_topics(topic())
    shutil.copytree(folder, tmp_path / "killed")
    store.close()
    # Opening it makes a table of the log that the killed process has left.
    Store.open(tmp_path / "killed").close()
    [table] = (tmp_path / "killed").glob("*.sst")
    table.unlink()
    with pytest.raises(DamagedError, match=table.name) as raised:
        Store.open(tmp_path / "killed")
    assert reason(raised) == "STORE_DAMAGED"
    assert "no acknowledged message is lost" in raised.value.hint
    assert "--rebuild-store" in raised.value.hint


def test_a_store_that_is_found_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process before was killed when it had made it, and had not synced the folder above."""
    Store.open(tmp_path / "data" / "store").close()
    disk = Disk(tmp_path / "data", monkeypatch)
    Store.open(tmp_path / "data" / "store").close()
    assert (disk.after_a_power_cut(tmp_path / "cut") / "store").exists()


OTHER_FORMATS = [(FORMAT_VERSION - 1, "OLDER_FORMAT"), (FORMAT_VERSION + 1, "NEWER_FORMAT")]


@pytest.mark.parametrize(("version", "refusal"), OTHER_FORMATS)
def test_a_store_of_another_format_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, version: int, refusal: str
) -> None:
    with monkeypatch.context() as other:
        other.setattr(rocksdb, "FORMAT_VERSION", version)
        Store.open(folder).close()
    with pytest.raises(DamagedError, match=f"has format version {version}") as raised:
        Store.open(folder)
    assert reason(raised) == refusal
    assert ("--rebuild-store" in raised.value.hint) == (refusal == "OLDER_FORMAT")


@pytest.mark.parametrize(("version", "refusal"), OTHER_FORMATS)
async def test_a_record_of_another_format_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, version: int, refusal: str
) -> None:
    store = Store.open(folder)
    with monkeypatch.context() as other:
        other.setattr(parts, "FORMAT_VERSION", version)
        await store.put_topics(topic())
    store.close()
    with pytest.raises(DamagedError) as raised:
        Store.open(folder)
    assert reason(raised) == refusal


UMASK_077 = """# may start warm
import asyncio, os, sys
from pathlib import Path
from broker_sidecar import kernels
kernels.prepare()
from seqdedupe.store.db import Store
from tests.store.model import topic

os.umask(0o077)
for number in (1, 2):
    store = Store.open(Path(sys.argv[1]))
    asyncio.run(store.put_topics(topic(number)))
    store.close()
"""


def test_under_a_narrow_umask_nobody_else_can_read_the_store(folder: Path) -> None:
    subprocess.run(
        [sys.executable, "-c", UMASK_077, str(folder / "made" / "store")], check=True, timeout=LAST_RESORT_SECONDS
    )
    made = [folder, *folder.rglob("*")]
    assert len(made) > 8
    assert {str(path): path.stat().st_mode & 0o077 for path in made if path.stat().st_mode & 0o077} == {}


@pytest.mark.parametrize("value", [b"", b"\0\0\0\0", b"\0\0\0\0\1", seal(b"another key", b"body")])
async def test_a_record_that_is_not_sealed_for_its_key_is_refused(folder: Path, value: bytes) -> None:
    store = Store.open(folder)
    await store.flush(put(store, topic_key(5), value))
    store.close()
    with pytest.raises(DamagedError) as raised:
        Store.open(folder)
    assert reason(raised) == "STORE_DAMAGED"


async def test_files_of_other_names_beside_those_of_the_store_are_left_alone(folder: Path) -> None:
    store = Store.open(folder)
    await store.put_topics(topic())
    store.close()
    (folder / "notes.log").write_bytes(b"mine")
    store = Store.open(folder)
    assert store.topics() == [topic()]
    store.close()
    assert (folder / "notes.log").read_bytes() == b"mine"


async def test_a_topic_above_the_last_incarnation_given_is_refused(folder: Path) -> None:
    store = Store.open(folder)
    await store.put_topics(topic(5))
    await store.flush(put(store, LAST_INCARNATION, seal(LAST_INCARNATION, (4).to_bytes(8, "little"))))
    store.close()
    with pytest.raises(DamagedError):
        Store.open(folder)


def test_a_creation_that_was_cut_short_is_done_again(folder: Path) -> None:
    Store.open(folder).close()
    folder.rename(folder.with_name("store.creating"))
    (folder.with_name("store.creating") / "DURABLE").unlink()
    Store.open(folder).close()
    assert sorted(path.name for path in folder.parent.iterdir()) == ["store"]


def test_an_empty_folder_is_used_and_any_other_is_not(folder: Path) -> None:
    folder.mkdir()
    Store.open(folder).close()
    other = folder.with_name("other")
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    with pytest.raises(DamagedError) as raised:
        Store.open(other)
    assert reason(raised) == "STORE_DAMAGED"
    assert [path.name for path in other.iterdir()] == ["notes.txt"]


async def test_callers_share_flushes(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    syncs = 0
    sync = rocksdb.sync

    def counted(db: Rdict) -> int:
        nonlocal syncs
        syncs += 1
        return sync(db)

    monkeypatch.setattr(rocksdb, "sync", counted)
    await asyncio.gather(*(store.put_topics(topic(number)) for number in range(1, 101)))
    assert len(store.topics()) == 100
    assert 1 <= syncs <= 2


async def test_a_flush_that_was_running_does_not_count_for_a_later_write(folder: Path) -> None:
    """What is durable is read from a copy of the mark, which moves only after a sync."""
    store = Store.open(folder)
    running = asyncio.create_task(store.put_topics(topic(1)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await store.put_topics(topic(2))
    await running
    copied = rocksdb.Mark.open(shutil.copytree(folder, folder.with_name("copy")))
    written = 4
    assert copied.sequence == written
    copied.close()
    store.close()


async def test_a_cancelled_caller_takes_no_others_flush_away(store: Store) -> None:
    first = asyncio.create_task(store.put_topics(topic(1)))
    second = asyncio.create_task(store.put_topics(topic(2)))
    await asyncio.sleep(0)
    first.cancel()
    await second
    with pytest.raises(asyncio.CancelledError):
        await first
    assert len(store.topics()) == 2


async def test_a_closed_store_takes_nothing(folder: Path) -> None:
    store = Store.open(folder)
    store.close()
    store.close()
    with pytest.raises(UnavailableError):
        await store.put_topics(topic())
    with pytest.raises(UnavailableError):
        store.topics()


async def test_durable_writes_survive_without_closing(folder: Path) -> None:
    store = Store.open(folder)
    await store.put_topics(topic())
    snapshots = Snapshots(store, INCARNATION)
    change = delta(1, {0: (7, 3)}, names=[b"a"])
    await save(store, snapshots, change)
    copy = shutil.copytree(folder, folder.with_name("copy"))
    assert load(copy) == State().after(change)
    store.close()


async def test_while_there_is_a_journal_an_earlier_program_takes_it_for_a_newer_store(folder: Path) -> None:
    store = Store.open(folder)
    assert not store.has_journal
    before = (folder / rocksdb.FILE_NAME).read_bytes()
    store.tell_journal(True)
    await store.put_topics(topic(1))
    store.close()
    # What every version has read there: the whole number.
    version = int.from_bytes((folder / rocksdb.FILE_NAME).read_bytes()[16:20], "little")
    assert version > FORMAT_VERSION == int.from_bytes(before[16:20], "little")
    store = Store.open(folder)
    assert store.has_journal
    assert len(store.topics()) == 1
    store.tell_journal(False)
    store.close()
    assert int.from_bytes((folder / rocksdb.FILE_NAME).read_bytes()[16:20], "little") == FORMAT_VERSION
    Store.open(folder).close()


def test_a_newer_store_with_a_journal_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as other:
        other.setattr(rocksdb, "FORMAT_VERSION", FORMAT_VERSION + 1)
        store = Store.open(folder)
        store.tell_journal(True)
        store.close()
    with pytest.raises(DamagedError, match=f"has format version {FORMAT_VERSION + 1}"):
        Store.open(folder)
