"""One topic's log, from its first byte to its last, and whether it belongs to the snapshot that the store has."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from seqdedupe.doctor.findings import TopicFindings
from seqdedupe.doctor.tally import Tally
from seqdedupe.errors import DamagedError
from seqdedupe.format import records
from seqdedupe.format.jit import Int64s
from seqdedupe.format.layout import BASE_INDEX, ROWS
from seqdedupe.limits import NO_SEQUENCE_ID
from seqdedupe.log.embedded.inspection import Damage, Intact, TornEnd, inspect
from seqdedupe.log.embedded.replaying import Replay
from seqdedupe.log.embedded.segment import Identity, segment_path
from seqdedupe.log.embedded.tail import base_indexes
from seqdedupe.store.snapshots import Loaded

NAMED = 3
"""So many producers are named as examples of a disagreement."""


def examine_log(
    folder: Path,
    identity: Identity,
    loaded: Loaded | None,
    found: TopicFindings,
    replay: Replay,
    *,
    expects_snapshot: bool,
) -> Tally | None:
    """Reads the log, and puts into `found` what it comes to. What the snapshot says is in the tally too, at the end.

    None for a log that this version cannot read to its end.
    """
    bases = base_indexes(folder)
    found.first_index = found.next_index = bases[0] if bases else 0
    tally = Tally(str(folder))
    tally.begin(found.first_index)
    last_file = segment_path(folder, bases[-1] if bases else 0)
    meeting = _Meeting(tally, loaded, found, last_file)
    try:
        for part in inspect(folder, identity, replay):
            _take(part, meeting, tally, found)
    except DamagedError as e:
        # Of another version, or a control record that is none.
        found.disagreements.append(e.message)
        found.cures.append(e.hint)
        return None
    found.messages = tally.messages
    meeting.end()
    if loaded is None and expects_snapshot and found.first_index > 0:
        found.disagreements.append(
            f"the log begins with index {found.first_index}, but the store has no snapshot that covers what came before"
        )
        found.cures.append("restore log and store from one backup, or start once with --rebuild-store")
    if loaded is not None:
        tally.add_snapshot(loaded)
    found.producers = tally.producers.known_count()
    found.missing = tally.missing
    return tally


def _take(part: Intact | Damage | TornEnd, meeting: "_Meeting", tally: Tally, found: TopicFindings) -> None:
    if isinstance(part, Intact):
        for some in meeting.split(part):
            tally.add(some)
        found.next_index = int(part.table[-1, BASE_INDEX] + part.table[-1, ROWS])
    elif isinstance(part, Damage):
        tally.add_damage(part)
        # Its record would keep all that was read with it in memory.
        found.damage.append(replace(part, record=None))
        found.next_index = part.next_index or found.next_index
    else:
        found.torn_end = part


class _Meeting:
    """Where the log comes to the position of the snapshot: what both say there must be the same."""

    def __init__(self, tally: Tally, loaded: Loaded | None, found: TopicFindings, last_file: Path) -> None:
        self._last_file = last_file
        self._tally = tally
        self._loaded = loaded
        self._found = found
        self._has_met = False

    def split(self, part: Intact) -> Iterator[Intact]:
        """A part in two where the snapshot's position is in it."""
        loaded, table = self._loaded, part.table
        if loaded is None or self._has_met:
            yield part
            return
        after = table[:, BASE_INDEX] + table[:, ROWS]
        self._check_history(table, loaded)
        before = int(np.searchsorted(after, loaded.next_index, "right"))
        if before:
            yield Intact(part.raw, table[:before])
        if before < len(table):
            self._meet(loaded)
            yield Intact(part.raw, table[before:])

    def end(self) -> None:
        """The log is at its end."""
        loaded, found = self._loaded, self._found
        if loaded is None:
            return
        if not self._has_met:
            self._meet(loaded)
        if 0 < loaded.next_index <= found.first_index:
            self._disagree(
                f"the log begins with index {found.first_index}, and the snapshot ends with {loaded.next_index - 1}: "
                "what is between is gone"
            )
        if found.next_index < loaded.next_index:
            what = f"messages up to index {loaded.next_index - 1} were stored, as the store's snapshot says"
            torn = found.torn_end
            size = self._last_file.stat().st_size if self._last_file.exists() else 0
            offset = torn.offset if torn else size
            found.damage.append(Damage(self._last_file, offset, what, found.next_index, loaded.next_index))
            self._tally.add_damage(found.damage[-1])
            found.next_index = loaded.next_index
        if not found.damage:
            self._check_above(loaded)

    def _meet(self, loaded: Loaded) -> None:
        """The log holds no more of any producer than the store knows."""
        self._has_met = True
        tally = self._tally
        numbers = tally.producers.add_listed(*loaded.names.listed())
        stored = np.full(len(tally.producers), NO_SEQUENCE_ID, np.int64)
        stored[numbers] = loaded.persisted
        above = np.flatnonzero(tally.persisted() > stored)
        if len(above):
            self._disagree(
                f"up to index {loaded.next_index - 1}, which the snapshot covers, the log holds more than the store "
                f"knows of {self._named(above)}"
            )

    def _check_above(self, loaded: Loaded) -> None:
        """A log that is whole says all that the store knows."""
        tally = self._tally
        numbers, there = tally.known_to(loaded)
        below = np.flatnonzero(tally.persisted()[numbers] < loaded.persisted[there])
        if len(below):
            self._disagree(
                f"the store knows of sequence IDs that the log does not hold of {self._named(numbers[below])}"
            )

    def _check_history(self, table: Int64s, loaded: Loaded) -> None:
        last = loaded.next_index - 1
        for places in table[(table[:, BASE_INDEX] <= last) & (last < table[:, BASE_INDEX] + table[:, ROWS])]:
            if loaded.ownership not in (0, records.ownership(places)):
                self._disagree(
                    f"the message with index {last}, the snapshot's last one, was written under another marker than "
                    "the snapshot says: this log has another history"
                )
            elif int(places[BASE_INDEX] + places[ROWS]) != loaded.next_index:
                self._disagree(f"the snapshot ends with index {last}, within a batch of the log")

    def _named(self, numbers: Int64s) -> str:
        names = self._tally.producers.names_of(np.sort(numbers[:NAMED]))
        shown = ", ".join(repr(name.decode(errors="backslashreplace")) for name in names)
        more = len(numbers) - len(names)
        return f"{len(numbers)} producers ({shown}, …)" if more else shown

    def _disagree(self, why: str) -> None:
        self._found.disagreements.append(why)
        self._found.cures.append(
            "restore log and store from one backup: these two are not of the same moment. Where the log is the right "
            "one, move the folder store away and start once with --rebuild-store"
        )
