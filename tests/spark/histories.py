"""Topics as a list of batches, made wrong on purpose, and what a plain loop over their messages finds in them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from seqdedupe.batch import decode
from seqdedupe.client.message import StoredBatch
from seqdedupe.limits import LINK_LEFT_OUT, MAX_SEQUENCE_ID
from tests.batches import Row, batch

NAMES = ["a", "b", "ü", "d" * 255]
IDS = st.one_of(st.integers(0, 12), st.integers(MAX_SEQUENCE_ID - 3, MAX_SEQUENCE_ID))


@dataclass(frozen=True)
class Told:
    """A batch as its client told it: rows, and a link for each producer."""

    rows: list[Row]
    links: dict[str, int]


@st.composite
def told_batches(draw: st.DrawFn) -> Told:
    """Any legal batch: the IDs of one producer rise, those of several are mixed, a link is below the first ID."""
    ids = draw(st.dictionaries(st.sampled_from(NAMES), st.sets(IDS, min_size=1, max_size=4), min_size=1))
    left = {name: sorted(of_name, reverse=True) for name, of_name in ids.items()}
    links = {name: draw(st.integers(LINK_LEFT_OUT, min(of_name) - 1)) for name, of_name in ids.items()}
    order = draw(st.permutations([name for name, of_name in left.items() for _ in of_name]))
    return Told([(name, left[name].pop()) for name in order], links)


def stored(history: Sequence[Told], first_index: int = 0) -> list[StoredBatch]:
    """The batches as a reader gets them."""
    result = []
    for told in history:
        result.append(StoredBatch(decode(batch(told.rows, links=told.links).encode()), first_index, 0, 1))
        first_index += len(told.rows)
    return result


def cut(batches: Sequence[StoredBatch], first: int, stop: int) -> Iterator[StoredBatch]:
    """Those messages of them with an index from `first` to before `stop`, as a reader gets a range."""
    for one in batches:
        rows = np.arange(max(first - one.base_index, 0), min(stop - one.base_index, len(one)))
        if len(rows):
            first_row, stop_row = int(rows[0]), int(rows[-1]) + 1
            ids = one.message_ids and one.message_ids.cut(first_row, stop_row)
            yield StoredBatch(one.batch.take(rows), one.base_index + first_row, 0, 1, message_ids=ids)


@dataclass
class Truth:
    """What is wrong with a topic: messages by producer, and all of them in order."""

    doubled: Counter[str] = field(default_factory=Counter)
    out_of_order: Counter[str] = field(default_factory=Counter)
    missing: Counter[str] = field(default_factory=Counter)
    unlinked: int = 0
    doubled_at: list[tuple[int, str, int, int]] = field(default_factory=list)
    """Index, producer, sequence ID, index of the first copy."""
    out_of_order_at: list[tuple[int, str, int]] = field(default_factory=list)
    missing_at: list[tuple[int, str, int, int]] = field(default_factory=list)
    """Index, producer, link, highest before."""


def truth(history: Sequence[Told], first_index: int = 0, *, links: str = "all") -> Truth:
    """The plain loop."""
    found = Truth()
    highest: dict[str, int] = {}
    first_copy: dict[Row, int] = {}
    index = first_index
    for told in history:
        before = dict(highest)
        linked: set[str] = set()
        for name, sequence_id in told.rows:
            if name not in linked:
                linked.add(name)
                link, below = told.links[name], before.get(name, -1)
                found.unlinked += link == LINK_LEFT_OUT
                if link > below and (links == "all" or (links == "after_first" and below >= 0)):
                    found.missing[name] += 1
                    found.missing_at.append((index, name, link, below))
            if (name, sequence_id) in first_copy:
                found.doubled[name] += 1
                found.doubled_at.append((index, name, sequence_id, first_copy[name, sequence_id]))
            elif sequence_id <= highest.get(name, -1):
                found.out_of_order[name] += 1
                found.out_of_order_at.append((index, name, sequence_id))
            first_copy.setdefault((name, sequence_id), index)
            highest[name] = max(highest.get(name, -1), sequence_id)
            index += 1
    return found
