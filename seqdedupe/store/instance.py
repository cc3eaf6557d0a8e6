"""Which sidecar a store is of, and how often it has opened topics of a cluster for writing."""

import secrets
import time

from rocksdict import WriteBatch

from seqdedupe.errors import error
from seqdedupe.store.db import Store
from seqdedupe.store.records import INSTANCE_NAME, LAST_OPENING, seal

RANDOM_NAME_BYTES = 8
OPENINGS_BEGIN_SECONDS = 1_577_836_800
"""2020-01-01, from which on the numbers of openings count seconds."""
_NUMBER_BYTES = 8


class Instance:
    """The name and the openings of the sidecar that has this store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._last_opening = int.from_bytes(store.sealed(LAST_OPENING), "little")

    def named(self, wanted: str) -> str:
        """The name that the store has from now on: the one it has, else this one, or a random one (empty).

        It is durable with whatever the store makes durable next. Raises INVALID_CONFIGURATION if the store has another
        one than is wanted, STORE_UNAVAILABLE.
        """
        stored = self._store.sealed(INSTANCE_NAME).decode()
        if stored and wanted not in ("", stored):
            raise error(
                "INVALID_CONFIGURATION",
                f"instance_name is {wanted!r}, but the data directory is that of {stored!r}: a sidecar keeps its name",
                hint="Leave the key out, or give a data directory that is new.",
                key="instance_name",
            )
        if not stored:
            stored = wanted or secrets.token_hex(RANDOM_NAME_BYTES)
            self._put(INSTANCE_NAME, stored.encode())
        return stored

    async def claim_opening(self, known: int) -> int:
        """A number for an opening, above this one and above all that it ever answered; durable on return.

        About the seconds since 2020, so that it rises although the store was lost.
        """
        clock = int(time.time()) - OPENINGS_BEGIN_SECONDS
        self._last_opening = opening = max(clock, known + 1, self._last_opening + 1)
        await self._store.flush(self._put(LAST_OPENING, opening.to_bytes(_NUMBER_BYTES, "little")))
        return opening

    def _put(self, key: bytes, body: bytes) -> int:
        batch = WriteBatch(raw_mode=True)
        batch.put(key, seal(key, body))
        return self._store.write(batch)
