"""The sidecar's name and the numbers of its openings: kept, and rising no matter what happens to the store or the
clock."""

import time
from pathlib import Path

import pytest

from seqdedupe.errors import ConfigurationError
from seqdedupe.store.db import Store
from seqdedupe.store.directories import OPENINGS_BEGIN_SECONDS, StoreInstance


async def test_a_name_is_kept_and_another_one_is_refused(tmp_path: Path) -> None:
    names = set()
    for _ in range(2):
        store = Store.open(tmp_path / "store")
        names.add(StoreInstance(store).named(""))
        # It is durable with what is made durable next.
        await StoreInstance(store).claim_opening(0)
        with pytest.raises(ConfigurationError, match="INVALID_CONFIGURATION"):
            StoreInstance(store).named("another")
        store.close()
    [name] = names
    store = Store.open(tmp_path / "store")
    assert StoreInstance(store).named(name) == name
    store.close()
    other = Store.open(tmp_path / "other")
    assert StoreInstance(other).named("") != name
    other.close()


async def test_openings_rise_over_restarts_and_above_what_the_cluster_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = int(time.time()) - OPENINGS_BEGIN_SECONDS
    claimed = []
    for known in (0, now + 10_000, 0):
        store = Store.open(tmp_path / "store")
        instance = StoreInstance(store)
        claimed += [await instance.claim_opening(known), await instance.claim_opening(0)]
        store.close()
        # A clock that was set back.
        monkeypatch.setattr(time, "time", lambda: float(OPENINGS_BEGIN_SECONDS))
    assert claimed == sorted(set(claimed))
    assert claimed[0] >= now
    assert claimed[2] == now + 10_001
    assert claimed[-1] < 2**31
