"""A snapshot that comes from another store, in pieces of any size."""

from dataclasses import replace

import pytest
from rocksdict import WriteBatch

from seqdedupe.errors import SeqdedupeError
from seqdedupe.store.db import Store
from seqdedupe.store.parts import IMPORTED, NAMES, part_key, snapshot_range, topic_key
from seqdedupe.transfer import stored_records
from seqdedupe.transfer.stored_records import MAX_ROW_BYTES, IncomingSnapshot, row_bytes

INCARNATION = 7
ROWS = {part_key(INCARNATION, NAMES, k): b"%d" % k * (k % 50) for k in range(300)}
WHOLE = b"".join(row_bytes(key, value) for key, value in ROWS.items())


def stored(store: Store, incarnation: int = INCARNATION) -> dict[bytes, bytes]:
    return dict(store.scan(*snapshot_range(incarnation)))


def put(store: Store, *keys: bytes) -> None:
    batch = WriteBatch(raw_mode=True)
    for key in keys:
        batch.put(key, b"earlier")
    store.write(batch)


async def added(coming: IncomingSnapshot, data: bytes) -> None:
    """The rest of it."""
    await coming.add(data)
    await coming.finish()


@pytest.mark.parametrize("piece_bytes", [1, 7, 100, len(WHOLE) - 1, len(WHOLE)])
@pytest.mark.parametrize("batch_bytes", [0, 1000, stored_records.BATCH_BYTES])
async def test_it_takes_the_place_of_what_was_there_and_of_nothing_else(
    store: Store, monkeypatch: pytest.MonkeyPatch, piece_bytes: int, batch_bytes: int
) -> None:
    monkeypatch.setattr(stored_records, "BATCH_BYTES", batch_bytes)
    others = [part_key(6, IMPORTED, 2**64 - 1), part_key(8, NAMES, 0), topic_key(INCARNATION)]
    put(store, *others, part_key(INCARNATION, NAMES, 300), part_key(INCARNATION, IMPORTED, 0))
    coming = IncomingSnapshot(store, INCARNATION)
    for at in range(0, len(WHOLE), piece_bytes):
        await coming.add(WHOLE[at : at + piece_bytes])
    await coming.finish()
    assert stored(store) == ROWS
    assert store.get(others) == [b"earlier"] * 3


async def test_nothing_is_a_snapshot_too(store: Store) -> None:
    put(store, *ROWS)
    await IncomingSnapshot(store, INCARNATION).finish()
    assert stored(store) == {}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (WHOLE[:-1], "MOVE_FAILED"),
        (WHOLE[:3], "MOVE_FAILED"),
        (row_bytes(part_key(INCARNATION, NAMES, 0), b"") + b"\x12\0\0\0" + b"\xff" * 4, "MOVE_FAILED"),
        (b"\0\0\0\0" + (MAX_ROW_BYTES + 1).to_bytes(4, "little"), "MOVE_FAILED"),
        (row_bytes(part_key(INCARNATION + 1, NAMES, 0), b"x"), "INVALID_REQUEST"),
        (row_bytes(part_key(INCARNATION - 1, IMPORTED, 2**64 - 1), b"x"), "INVALID_REQUEST"),
        (row_bytes(topic_key(INCARNATION), b"x"), "INVALID_REQUEST"),
        (row_bytes(b"", b""), "INVALID_REQUEST"),
    ],
)
async def test_what_is_no_snapshot(store: Store, data: bytes, reason: str) -> None:
    coming = IncomingSnapshot(store, INCARNATION)
    with pytest.raises(SeqdedupeError) as raised:
        await added(coming, data)
    assert raised.value.reason == reason
    assert not stored(store, INCARNATION + 1)


@pytest.mark.parametrize("after", ["a part", "all"])
async def test_what_was_written_before_the_store_was_opened_again_may_be_lost(
    store: Store, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    monkeypatch.setattr(stored_records, "BATCH_BYTES", 1000)
    coming = IncomingSnapshot(store, INCARNATION)
    half = len(WHOLE) // 2
    await coming.add(WHOLE[:half])
    if after == "all":
        await coming.add(WHOLE[half:])
    assert store._opening is not None
    store._opening = replace(store._opening, number=store.opening + 1)
    with pytest.raises(SeqdedupeError, match="opened again"):
        await added(coming, b"" if after == "all" else WHOLE[half:])


async def test_the_store_is_given_no_more_than_it_works_off(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_records, "BATCH_BYTES", 1000)
    steps: list[str] = []
    wait, write = store.wait_until_idle, store.write

    async def waiting(at_most_seconds: float | None = None) -> None:
        steps.append("wait")
        await wait(at_most_seconds)

    def writing(batch: WriteBatch, only_in: int | None = None) -> int:
        steps.append("write")
        return write(batch, only_in)

    monkeypatch.setattr(store, "wait_until_idle", waiting)
    monkeypatch.setattr(store, "write", writing)
    coming = IncomingSnapshot(store, INCARNATION)
    await coming.add(WHOLE)
    await coming.finish()
    assert steps == ["wait", "write"] * (len(steps) // 2)
    assert len(steps) > 4


async def test_what_is_stored_of_a_topic_is_removed_and_nothing_else(store: Store) -> None:
    others = [part_key(6, IMPORTED, 2**64 - 1), part_key(8, NAMES, 0), topic_key(INCARNATION)]
    put(store, *others, *ROWS)
    await store.remove_snapshot(INCARNATION)
    assert stored(store) == {}
    put(store, *ROWS)
    store.remove_snapshots([3, INCARNATION])
    assert stored(store) == {}
    assert store.get(others) == [b"earlier"] * 3
