"""A topic's snapshots as plain dicts, and what the store's tests share."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from seqdedupe.message_id import MessageId
from seqdedupe.store.db import Store
from seqdedupe.store.parts import TopicRecord, TopicState
from seqdedupe.store.snapshots import Delta, Loaded, Snapshots

INCARNATION = 1_700_000_000_000_000


@dataclass
class State:
    """What loading must give: names by number, and numbers by name."""

    term: int = 0
    next_index: int = 0
    message_id: MessageId | None = None
    names: list[bytes] = field(default_factory=list)
    persisted: dict[bytes, int] = field(default_factory=dict)
    epochs: dict[bytes, int] = field(default_factory=dict)
    stated: dict[bytes, int] = field(default_factory=dict)
    ownership: int = 0
    policy: bytes = b""
    has_forgotten: bool = False

    def after(self, delta: Delta) -> "State":
        """The state with a delta merged into it: what the delta says counts."""
        names = self.names[: delta.first_name] + delta.names
        persisted = {name: self.persisted.get(name, -1) for name in names}
        epochs = {name: self.epochs.get(name, 0) for name in names}
        stated = {name: self.stated.get(name, -1) for name in names}
        for slot, number, epoch, index in zip(delta.slots, delta.persisted, delta.epochs, delta.stated, strict=True):
            name = names[slot]
            persisted[name], epochs[name], stated[name] = int(number), int(epoch), int(index)
        return State(
            delta.term,
            delta.next_index,
            delta.message_id,
            names,
            persisted,
            epochs,
            stated,
            delta.ownership,
            delta.policy,
            delta.has_forgotten,
        )


def state_of(loaded: Loaded | None) -> State:
    """What was loaded, in the model's form."""
    if loaded is None:
        return State()
    names = loaded.names.some()
    return State(
        loaded.term,
        loaded.next_index,
        loaded.message_id,
        names,
        dict(zip(names, loaded.persisted.tolist(), strict=True)),
        dict(zip(names, loaded.epochs.tolist(), strict=True)),
        dict(zip(names, loaded.stated.tolist(), strict=True)),
        loaded.ownership,
        loaded.policy,
        loaded.has_forgotten,
    )


def delta(
    next_index: int,
    changes: dict[int, tuple[int, int]],
    *,
    first_name: int = 0,
    names: list[bytes] | None = None,
    term: int = 1,
) -> Delta:
    """A delta with these changes: (persisted, epoch) by producer number."""
    slots = sorted(changes)
    return Delta(
        term=term,
        next_index=next_index,
        message_id=MessageId(INCARNATION, next_index - 1) if next_index else None,
        first_name=first_name,
        names=names or [],
        slots=np.array(slots, np.int32),
        persisted=np.array([changes[slot][0] for slot in slots], np.int64),
        epochs=np.array([changes[slot][1] for slot in slots], np.int64),
        stated=np.array([changes[slot][1] // 2 for slot in slots], np.int64),
        ownership=2**64 - term if next_index else 0,
        policy=b"policy" * (next_index % 3),
        has_forgotten=next_index % 2 == 1,
    )


def topic(incarnation: int = INCARNATION, state: TopicState = TopicState.ACTIVE) -> TopicRecord:
    """The record of a topic."""
    return TopicRecord(f"persistent://public/default/t{incarnation}", incarnation, state)


def load(folder: Path, incarnation: int = INCARNATION) -> State:
    """Opens the store in a folder, loads one topic's snapshot and closes it again."""
    store = Store.open(folder)
    try:
        return state_of(Snapshots(store, incarnation).load())
    finally:
        store.close()


async def save(store: Store, snapshots: Snapshots, change: Delta) -> None:
    """One durable snapshot."""
    await store.flush(snapshots.write_delta(change))


@contextmanager
def fast_folder() -> Iterator[Path]:
    """A folder for a test that opens a store very often: in memory, where there is such a place."""
    memory = Path("/dev/shm")
    folder = tempfile.mkdtemp(prefix="seqdedupe-", dir=memory if memory.is_dir() else None)
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder)
