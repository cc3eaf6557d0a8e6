"""What people ask of what an inbox has parked, without its handler."""

import json
import time

from sqlalchemy import Engine, select

from seqdedupe.services.consumer.set_aside import message_of
from seqdedupe.services.inbox.tables import KEYS, PARKED
from seqdedupe.services.inbox.waiting import Waiting, in_cycles


def waiting(engine: Engine, name: str, longer_than_seconds: float = 0.0) -> list[Waiting]:
    """What the inbox of this name has parked for so long, the longest first."""
    with engine.begin() as connection:
        mine = select(PARKED).where(PARKED.c.inbox == name).order_by(PARKED.c.parked_ms, PARKED.c.id)
        rows = connection.execute(mine).all()
        names = select(KEYS.c.name, KEYS.c.version).where(KEYS.c.inbox == name)
        applied = {row.name: row.version for row in connection.execute(names)}
    parked = []
    for row in rows:
        versions: dict[str, int] = json.loads(row.versions)
        missing = {key: version - 1 for key, version in versions.items() if applied.get(key, -1) < version - 1}
        parked.append((versions, missing))
    now_ms = time.time_ns() // 1_000_000
    found = [
        Waiting(message_of(row), versions, missing, (now_ms - row.parked_ms) / 1000, row.error, is_in_cycle)
        for row, (versions, missing), is_in_cycle in zip(rows, parked, in_cycles(parked), strict=True)
    ]
    return [one for one in found if one.seconds >= longer_than_seconds]
