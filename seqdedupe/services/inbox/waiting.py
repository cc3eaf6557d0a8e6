"""What is parked, and for what it waits."""

import json
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sqlalchemy import BigInteger, Column, Engine, Index, MetaData, String, select

from seqdedupe.client.message import Message
from seqdedupe.databases.tables import name_type, table, text_type
from seqdedupe.services.consumer.database import content_columns
from seqdedupe.services.consumer.set_aside import message_of

# -- The tables of inboxes, in the user's database.

METADATA = MetaData()

KEYS = table(
    "seqdedupe_inbox_keys",
    METADATA,
    Column("inbox", name_type(100), primary_key=True),
    Column("name", name_type(), primary_key=True),
    Column("version", BigInteger, nullable=False),
    Column("dropped", BigInteger, nullable=False),
    Column("locked", BigInteger, nullable=False),
)
"""A row for each key: the last version applied, and how many messages were dropped. `locked` changes whenever somebody
decides about the key: an update holds off all others, also where a transaction reads from a snapshot."""

PARKED = table(
    "seqdedupe_inbox_parked",
    METADATA,
    Column("id", String(32), primary_key=True),
    Column("inbox", name_type(100), nullable=False),
    Column("waits_for_key", name_type(), nullable=False),
    Column("waits_for_version", BigInteger, nullable=False),
    Column("versions", text_type(), nullable=False),
    Column("parked_ms", BigInteger, nullable=False),
    *content_columns(),
)
"""A row for each message that came early: the versions that it is of its keys (JSON), and one that it waits for."""

Index("seqdedupe_inbox_waits", PARKED.c.inbox, PARKED.c.waits_for_key, PARKED.c.waits_for_version)


class Waiting(NamedTuple):
    """A message that is parked."""

    message: Message
    versions: Mapping[str, int]
    """By key: the version that it is."""

    missing: Mapping[str, int]
    """By key: the version that has to be applied before it, and is not; empty if its own handling has failed."""

    seconds: float
    """How long it has been parked."""

    error: str
    """Why the handler would not take it when its turn came; empty if that has not been."""

    in_cycle: bool
    """Whether it waits, over others, for itself: nothing that comes can end that."""


def in_cycles(parked: Sequence[tuple[Mapping[str, int], Mapping[str, int]]]) -> list[bool]:
    """Of each message (its versions, and those it waits for), whether it waits for itself, over others that are parked.

    Those in cycles are what is left of a strongly connected part with more than one, or with an edge to itself.
    """
    provider = {(key, version): i for i, (versions, _) in enumerate(parked) for key, version in versions.items()}
    needs = [sorted({provider[wanted] for wanted in missing.items() if wanted in provider}) for _, missing in parked]
    found = [False] * len(parked)
    for part in _connected(needs):
        if len(part) > 1 or part[0] in needs[part[0]]:
            for i in part:
                found[i] = True
    return found


def _connected(edges: Sequence[Sequence[int]]) -> list[list[int]]:
    """The strongly connected parts, after Tarjan, without recursion: chains may be long."""
    order: dict[int, int] = {}
    low: dict[int, int] = {}
    on_stack: set[int] = set()
    stack: list[int] = []
    parts: list[list[int]] = []
    for root in range(len(edges)):
        if root in order:
            continue
        work = [(root, 0)]
        while work:
            node, next_edge = work.pop()
            if next_edge == 0:
                order[node] = low[node] = len(order)
                stack.append(node)
                on_stack.add(node)
            else:
                low[node] = min(low[node], low[edges[node][next_edge - 1]])
            for i in range(next_edge, len(edges[node])):
                target = edges[node][i]
                if target not in order:
                    work += [(node, i + 1), (target, 0)]
                    break
                if target in on_stack:
                    low[node] = min(low[node], order[target])
            else:
                if low[node] == order[node]:
                    part: list[int] = []
                    while not part or part[-1] != node:
                        part.append(stack.pop())
                        on_stack.discard(part[-1])
                    parts.append(part)
    return parts


# -- What people ask of what an inbox has parked, without its handler.


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
