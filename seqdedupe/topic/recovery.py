"""Taking over a topic's log: open for writing, mark, read up to one's own marker. Only then may anybody decide.

At start the reading begins at the snapshot's position; after an append with an unknown outcome, at the last confirmed
message. Both are this procedure.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.format.columns import BASE_INDEX, ROWS, TERM
from seqdedupe.format.headers import TOKEN_BYTES, ownership_of
from seqdedupe.format.records import marker_token, ownership
from seqdedupe.log.contract import Entries, Log, Outcome, Runs

logger = logging.getLogger("seqdedupe.topic.recovery")

MAX_TERM = 2**31 - 1

Table = npt.NDArray[np.int64]
RunsOf = Callable[[int], Runs]
Merge = Callable[[bytes, Table, int, RunsOf], None]
"""Is given a chunk, the table of its scanned records, how many there are, and the message IDs of each one's rows.

Markers and control records have ROWS 0.
"""


@dataclass(frozen=True, slots=True)
class Takeover:
    """What taking over a log came to."""

    term: int
    next_index: int
    """The index that the next message gets."""
    ownership: int
    """What the records of this owner carry."""
    replayed: int
    """So many messages were merged."""


def damaged(log: Log, why: str, index: int) -> SeqdedupeError:
    return error("LOG_DAMAGED", f"the log {log.place} cannot be replayed at index {index}: {why}", index=index)


class Replay:
    """Reads a log forward and hands its entries on to be merged."""

    def __init__(self, log: Log, next_index: int, merge: Merge, skip_below: int, last_ownership: int) -> None:
        self._log = log
        self.next_index = next_index
        self._merge = merge
        self._skip_below = skip_below
        self._last_ownership = last_ownership
        self.rows = 0
        self.tokens: dict[bytes, int] = {}

    async def run(self) -> None:
        """Reads up to the end there is; the next time, what has come since."""
        async for entries in self._log.replay(self.next_index):
            self._entries(entries)

    def _entries(self, entries: Entries) -> None:
        chunk, table = entries.raw, entries.table
        for k in np.flatnonzero(table[:, TERM] > 0):
            self.tokens[marker_token(chunk, table[k])] = int(table[k, TERM])
        self.next_index = entries.next_index
        self._check_history(table)
        # A batch that is known already must not enter the ring twice, nor may a reset before it come after it. Of
        # control records after the last message that is known it is not known which ones are; all of them once more
        # come to the same.
        ends = table[:, BASE_INDEX] + table[:, ROWS]
        new = np.flatnonzero(np.where(table[:, ROWS] == 0, ends >= self._skip_below, ends > self._skip_below))
        if len(new):
            some = table if len(new) == len(table) else table[new]
            self._merge(chunk, some, len(new), lambda k: entries.runs[int(new[k])])
        self.rows += int(table[new, ROWS].sum())

    def _check_history(self, table: Table) -> None:
        """The last message that is known must be the one that stands in the log."""
        last = self._skip_below - 1
        for places in table[(table[:, BASE_INDEX] <= last) & (last < table[:, BASE_INDEX] + table[:, ROWS])]:
            if self._last_ownership not in (0, ownership(places)):
                why = f"the message there was written under {ownership(places):016x}, the one that is known under "
                why += f"{self._last_ownership:016x}: this log has another history than the snapshot"
                raise damaged(self._log, why, last)


def replay_from(log: Log, confirmed_index: int, merge: Merge, last_ownership: int) -> Replay:
    """A replay of what stands in the log from this index on, and of the message before it, which must be there.

    Raises LOG_DAMAGED if it is gone already.
    """
    if confirmed_index < log.first_index:
        raise damaged(log, f"it begins with index {log.first_index}, what is between is gone", confirmed_index)
    next_index = max(confirmed_index - 1, log.first_index)
    return Replay(log, next_index, merge, skip_below=confirmed_index, last_ownership=last_ownership)


def _check_end(replay: Replay, confirmed_index: int, name: str) -> None:
    if replay.next_index < confirmed_index:
        raise error(
            "LOG_DAMAGED",
            f"the log of {name} ends before index {replay.next_index}, but a snapshot covers it up to "
            f"{confirmed_index}: its end is gone",
            index=replay.next_index,
            covered_index=confirmed_index,
        )


async def take_over(
    log: Log,
    *,
    term: int,
    confirmed_index: int,
    last_ownership: int,
    merge: Merge,
    settle: Callable[[Outcome], None],
    random_bytes: Callable[[int], bytes],
    known_term: Callable[[], int],
    name: str = "",
) -> Takeover:
    """Makes this process the owner of the log, and merges what is in it from `confirmed_index` on.

    `term` is one that is above all known. Where the log holds a marker of a term that is not lower, or what was merged
    names one (`known_term`), another marker is written with a higher term. If `confirmed_index` is above 0, the record
    before it must be there: if it is not, the end of the log is gone, which is LOG_DAMAGED; so is a record that was not
    written under `last_ownership` (0: not known). Raises `UnavailableError` (LOG_REFUSED) if the log cannot be written.
    """
    replay = replay_from(log, confirmed_index, merge, last_ownership)
    if log.replays_what_is_certain:
        # However much it is, the marker stands near the end then, and nothing is read twice.
        await replay.run()
    while True:
        if term > MAX_TERM:
            raise error("INTERNAL", f"the topic {name} has had {MAX_TERM} owners: that is the last term")
        token = random_bytes(TOKEN_BYTES)
        standing_term = await log.open_for_writing(term, token, settle)
        await replay.run()
        _check_end(replay, confirmed_index, name)
        if token not in replay.tokens and not standing_term:
            raise damaged(log, "the marker that was just written is not in it", replay.next_index)
        highest = max((t for other, t in replay.tokens.items() if other != token), default=0)
        highest = max(highest, known_term(), standing_term)
        if highest < term:
            logger.info(
                "recovered topic %s in term %d: %d messages read, up to index %d",
                name,
                term,
                replay.rows,
                replay.next_index,
            )
            return Takeover(term, replay.next_index, ownership_of(token), replay.rows)
        term = highest + 1
