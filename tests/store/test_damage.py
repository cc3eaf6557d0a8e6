"""Every byte of a small store's files flipped, every file cut short or gone: the right state, or a refusal.

Also what cannot be known from a store that is merely older: see `docs/internals/formats-store.md`.
"""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from seqdedupe.errors import DamagedError
from seqdedupe.store.db import Store
from seqdedupe.store.snapshots import Snapshots
from tests.store.model import INCARNATION, State, delta, fast_folder, load, state_of, topic

# Files that RocksDB writes for people, or to lock; it does not need what is in them.
UNUSED = ("LOG", "LOCK", "IDENTITY", "OPTIONS-")


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    with fast_folder() as folder:
        yield folder


async def write_a_small_store(folder: Path) -> tuple[State, int]:
    """A store with a table file and a write-ahead log, all durable; its state, and what is durable in the table."""
    model = State()
    for part in range(2):
        store = Store.open(folder)
        snapshots = Snapshots(store, INCARNATION)
        await store.put_topics(topic())
        for step in range(3 * part, 3 * part + 3):
            change = delta(
                step + 1, {step: (step * 10, 1), 0: (step, step)}, first_name=step, names=[b"name-%d" % step]
            )
            await store.flush(snapshots.write_delta(change))
            model = model.after(change)
        if part == 1:
            shutil.copytree(folder, folder.with_name("small"))
        store.close()
    return model, 3


@pytest.fixture(scope="module")
def small(memory: Path) -> tuple[Path, State]:
    model, _ = asyncio.run(write_a_small_store(memory / "made"))
    return memory / "small", model


def outcome(folder: Path) -> State | str:
    try:
        store = Store.open(folder)
    except DamagedError as e:
        return e.reason
    try:
        assert store.topics() == [topic()]
        return state_of(Snapshots(store, INCARNATION).load())
    except DamagedError as e:
        return e.reason
    finally:
        store.close()


def check(folder: Path, model: State, what: str) -> bool:
    """Whether the store refused. It must, or else have the whole state."""
    found = outcome(folder)
    if isinstance(found, State):
        assert found == model, f"{what}: an older or other state"
        return False
    assert found in {"STORE_DAMAGED", "NEWER_FORMAT"}, f"{what}: {found}"
    return True


def file_of(folder: Path, pattern: str) -> Path:
    (file,) = folder.glob(pattern)
    return file


PATTERNS = ["DURABLE", "CURRENT", "MANIFEST-*", "*.sst", "*.log", "rocksdict-config.json"]
PARTS = 2
"""So that two processes share the work of a large file."""


def test_undamaged_it_opens_with_everything(small: tuple[Path, State]) -> None:
    folder, model = small
    for pattern in PATTERNS:
        assert file_of(folder, pattern).stat().st_size > 0
    copy = shutil.copytree(folder, folder.with_name("control"))
    assert load(copy) == model
    known = {path.name for path in folder.iterdir() if not path.name.startswith(UNUSED)}
    assert known == {file_of(folder, pattern).name for pattern in PATTERNS}


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_flipped_byte(small: tuple[Path, State], memory: Path, pattern: str, part: int) -> None:
    folder, model = small
    data = file_of(folder, pattern).read_bytes()
    refused = 0
    tried = range(part, len(data), PARTS)
    for at in tried:
        copy = shutil.copytree(folder, memory / f"flip-{part}-{at}")
        flipped = bytearray(data)
        flipped[at] ^= 1 << (at % 8)
        file_of(copy, pattern).write_bytes(flipped)
        refused += check(copy, model, f"{pattern} flipped at {at}")
        shutil.rmtree(copy)
    if pattern in {"DURABLE", "*.log"}:
        assert refused == len(tried)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_file_cut_short(small: tuple[Path, State], memory: Path, pattern: str) -> None:
    folder, model = small
    size = file_of(folder, pattern).stat().st_size
    refused = 0
    tried = range(0, size, max(1, size // 150))
    for length in tried:
        copy = shutil.copytree(folder, memory / f"cut-{length}")
        with file_of(copy, pattern).open("r+b") as file:
            file.truncate(length)
        refused += check(copy, model, f"{pattern} cut to {length}")
        shutil.rmtree(copy)
    if pattern not in {"rocksdict-config.json", "MANIFEST-*"}:
        assert refused == len(tried)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_missing_file(small: tuple[Path, State], memory: Path, pattern: str) -> None:
    folder, model = small
    copy = shutil.copytree(folder, memory / f"missing-{PATTERNS.index(pattern)}")
    file_of(copy, pattern).unlink()
    assert check(copy, model, f"{pattern} missing") == (pattern != "rocksdict-config.json")


def test_everything_missing_but_one_file(small: tuple[Path, State], memory: Path) -> None:
    folder, _ = small
    for file in folder.iterdir():
        alone = memory / f"alone-{file.name}"
        alone.mkdir()
        shutil.copy(file, alone)
        assert outcome(alone) == "STORE_DAMAGED"
        assert (alone / file.name).exists()


@pytest.mark.parametrize("pattern", ["*.log", "MANIFEST-*"])
@pytest.mark.parametrize("kind", [5, 8, 9, 130, 255])
def test_a_record_type_on_which_rocksdb_loops(small: tuple[Path, State], memory: Path, pattern: str, kind: int) -> None:
    folder, _ = small
    copy = shutil.copytree(folder, memory / f"kind-{kind}-{PATTERNS.index(pattern)}")
    data = bytearray(file_of(copy, pattern).read_bytes())
    second_record = 7 + int.from_bytes(data[4:6], "little")
    data[second_record + 6] = kind
    file_of(copy, pattern).write_bytes(data)
    assert outcome(copy) == "STORE_DAMAGED"


def test_refused_once_it_is_refused_again(small: tuple[Path, State], memory: Path) -> None:
    """Opening must not make good by itself what it refused."""
    folder, _ = small
    for number, size in enumerate((0, 10, 50)):
        copy = shutil.copytree(folder, memory / f"again-{number}")
        with file_of(copy, "*.log").open("r+b") as file:
            file.truncate(size)
        assert [outcome(copy) for _ in range(3)] == ["STORE_DAMAGED"] * 3


async def test_a_torn_end_that_was_never_durable_is_cut(memory: Path) -> None:
    folder = memory / "torn"
    store = Store.open(folder)
    snapshots = Snapshots(store, INCARNATION)
    await store.put_topics(topic())
    change = delta(1, {0: (1, 1)}, names=[b"a"])
    await store.flush(snapshots.write_delta(change))
    durable = State().after(change)
    durable_bytes = file_of(folder, "*.log").stat().st_size
    more = delta(2, {0: (2, 1)}, first_name=1)
    snapshots.write_delta(more)
    whole_bytes = file_of(folder, "*.log").stat().st_size
    for length in range(durable_bytes, whole_bytes + 1):
        copy = shutil.copytree(folder, memory / f"torn-{length}")
        with file_of(copy, "*.log").open("r+b") as file:
            file.truncate(length)
        assert outcome(copy) == (durable.after(more) if length == whole_bytes else durable)
        shutil.rmtree(copy)
    store.close()


async def test_an_old_copy_of_the_whole_store_is_not_noticed_here(memory: Path) -> None:
    """It is sound in itself. The log's position check is what finds it."""
    folder = memory / "old"
    store = Store.open(folder)
    snapshots = Snapshots(store, INCARNATION)
    await store.put_topics(topic())
    await store.flush(snapshots.write_delta(delta(1, {0: (1, 1)}, names=[b"a"])))
    copy = shutil.copytree(folder, memory / "old-copy")
    await store.flush(snapshots.write_delta(delta(2, {0: (2, 1)}, first_name=1)))
    store.close()
    found = outcome(copy)
    assert isinstance(found, State)
    assert found.next_index == 1
