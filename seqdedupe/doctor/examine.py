"""Read every byte of a data directory while no sidecar uses the directory, and change nothing. Begin with `examine`.
The functions for the log of one topic are at the end."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from seqdedupe.doctor.findings import Findings, StoreState, Tally, TopicFindings
from seqdedupe.errors import REASONS, DamagedError, error
from seqdedupe.figures import counted
from seqdedupe.files import kept_unused
from seqdedupe.format import records
from seqdedupe.format.headers import key_of
from seqdedupe.format.jit import Int64s
from seqdedupe.format.layout import BASE_INDEX, ROWS
from seqdedupe.limits import NO_SEQUENCE_ID
from seqdedupe.log.embedded.inspection import Damage, Intact, TornEnd, inspect
from seqdedupe.log.embedded.journal_replay import JournalReplay
from seqdedupe.log.embedded.log_folder import ARRIVING, leaving_to, moved_to, secret_of
from seqdedupe.log.embedded.logs import incarnations, said_by
from seqdedupe.log.embedded.segment import LogIdentity, segment_path
from seqdedupe.log.embedded.tail import base_indexes
from seqdedupe.names import partition_name, shard_of, to_text, topic_name, whole_of
from seqdedupe.store import windows
from seqdedupe.store.db import Store, check_all, of_original, opened_copy
from seqdedupe.store.directories import read_claim
from seqdedupe.store.parts import LogKind, TopicRecord, TopicState
from seqdedupe.store.snapshots import Loaded, Snapshots
from seqdedupe.store.windows import read_pages
from seqdedupe.topic.policy import ImportedWindow

# -- The import into a topic of deduplication IDs: the log says what was imported, and the store must have it.

PAGES_AT_ONCE = 1024

IMPORT_AGAIN = "start the sidecar and import the same file again (seqdedupe import): until then it takes no messages"


def examine_imported(found: TopicFindings, store: Store | None, wanted: ImportedWindow) -> None:
    """Write the number of imported IDs to `found`. If IDs are missing, also write the reason."""
    found.imported_ids = wanted.ids
    found.imported_why = _why(store, found.incarnation, wanted)
    if found.imported_why:
        found.cures.append(IMPORT_AGAIN)


def _why(store: Store | None, incarnation: int, wanted: ImportedWindow) -> str:
    if store is None:
        return "the store is not there, or damaged"
    try:
        there = windows.load_import(store, incarnation)
        if there is None or there.checksum != wanted.checksum:
            return "the store does not have them"
        pages = len(there.run.first_hashes)
        for first in range(0, pages, PAGES_AT_ONCE):
            some = range(first, min(first + PAGES_AT_ONCE, pages))
            read_pages(store, incarnation, [(there.run.number, page) for page in some])
    except DamagedError as e:
        return e.message
    return ""


REBUILD = "move the folder store away and start once with --rebuild-store: it makes the records again from the logs"
RESTORE = (
    "restore the topic's log together with the store from one backup, or write what can be read into a new directory "
    "with --salvage"
)

NAME_AGAIN = "start the sidecar: the store knows the topic's name, and the start writes it again"

GIVE_UP = (
    "restore the directory from a backup, the folder logs/journal included; or start once with --give-up-journal: "
    "each log goes on with what its files hold, and the last messages before a power cut may be gone from them"
)


@dataclass(frozen=True, slots=True)
class Examined:
    """A topic that has a log: the findings about the topic, and the values that are needed to read the log again."""

    findings: TopicFindings
    folder: Path
    identity: LogIdentity
    secret: bytes
    loaded: Loaded | None
    tally: Tally
    replay: JournalReplay


def examine(directory: Path, each: Callable[[Examined], None] = lambda examined: None) -> Findings:
    """Read everything. `each` is called with every topic whose log can be read, in the order of creation.

    Raises DIRECTORY_IN_USE if a sidecar uses the directory, INVALID_CONFIGURATION if the directory is not a data
    directory, STORE_UNAVAILABLE, OSError.
    """
    logs = directory / "logs"
    if not logs.is_dir() and not (directory / "store").is_dir():
        why = f"{directory} is no data directory: it has neither logs nor a store"
        raise error("INVALID_CONFIGURATION", why, hint="Name the directory that data_directory names.")
    with kept_unused(directory), ExitStack() as opened:
        found = Findings(str(directory), StoreState.WHOLE)
        store, records = _open_store(directory / "store", found, opened)
        known = {record.incarnation: record for record in records}
        folders = incarnations(logs) if logs.is_dir() else []
        replay = JournalReplay(logs, is_expected=store is not None and store.has_journal, gives_up=True)
        if given_up := replay.look():
            found.journal_why = "; ".join(given_up)
            found.cures.append(GIVE_UP)
        for incarnation in sorted({*known, *folders}):
            folder, stored = logs / str(incarnation), _Stored(known.get(incarnation), store)
            try:
                topic = _topic(folder, incarnation, stored, found.store, replay, each)
            except OSError as e:
                # If the disk cannot read a file of this topic, the other topics are still examined.
                if e.filename is None or not Path(e.filename).is_relative_to(folder):
                    raise
                name = stored.record.name if stored.record else topic_name(f"rebuilt-{incarnation}")
                topic = TopicFindings(name, incarnation)
                topic.disagreements.append(f"it cannot be looked at: {e}")
                topic.cures.append(RESTORE)
            found.topics.append(topic)
        _check_shards(directory, found.topics)
        _check_names(found.topics)
        _check_partitions(found.topics)
        found.topics += _arriving(logs / ARRIVING)
        if any(not topic.is_whole for topic in found.topics) and found.store is StoreState.WHOLE:
            found.cures += _directory_cures(found.topics)
        return found


def _check_shards(directory: Path, topics: list[TopicFindings]) -> None:
    claim = read_claim(directory)
    for topic in topics:
        if claim is not None and shard_of(topic.name) not in claim.shards:
            has = f"the directory has the shards {to_text(claim.shards)}"
            topic.disagreements.append(f"it is of shard {shard_of(topic.name)}, and {has}")
            topic.cures.append(REASONS["SHARD_CLAIMED_TWICE"].hint)


@dataclass(slots=True)
class _Stored:
    """The store's knowledge about a topic."""

    record: TopicRecord | None
    store: Store | None
    why: str = ""

    def load(self) -> Loaded | None:
        if self.record is None or self.store is None:
            return None
        try:
            return Snapshots(self.store, self.record.incarnation).load()
        except DamagedError as e:
            self.why = e.message
            return None


def _open_store(folder: Path, found: Findings, opened: ExitStack) -> tuple[Store | None, list[TopicRecord]]:
    try:
        store = opened.enter_context(opened_copy(folder))
        check_all(store)
        found.namespace_policies = store.namespace_policies()
        return store, store.topics()
    except DamagedError as e:
        is_missing = e.reason == "STORE_MISSING"
        found.store = StoreState.MISSING if is_missing else StoreState.DAMAGED
        found.store_why = of_original(e.message, folder)
        has_version = e.reason in ("NEWER_FORMAT", "OLDER_FORMAT")
        found.cures.append(e.hint if has_version else f"restore the directory from a backup; or {REBUILD}")
        return None, []


def _topic(
    folder: Path,
    incarnation: int,
    stored: _Stored,
    store: StoreState,
    replay: JournalReplay,
    each: Callable[[Examined], None],
) -> TopicFindings:
    record = stored.record
    said, partitions, name_why = _said_by(folder)
    found = TopicFindings(record.name if record else said or topic_name(f"rebuilt-{incarnation}"), incarnation)
    found.partitions = record.partitions if record else partitions
    loaded = stored.load()
    if stored.why:
        found.disagreements.append(stored.why)
        found.cures.append(REBUILD)
    if record is not None and record.log is not LogKind.EMBEDDED:
        found.log = record.log.name.lower()
        found.producers = len(loaded.names) if loaded else 0
        whose = "a broker's own" if record.log is LogKind.BROKER else "a Pulsar topic"
        found.notes.append(f"its log is {whose}, and was not looked at")
        return found
    if (to := moved_to(folder)) is not None:
        found.notes.append(f"it was moved: the sidecar at {to.address} has it")
        found.log_bytes = sum(path.stat().st_size for path in _segments(folder))
        return found
    if (to := leaving_to(folder)) is not None:
        found.notes.append(f"it was being moved: the sidecar at {to.address} alone knows which of the two has it")
    if record is not None and record.state is not TopicState.ACTIVE:
        found.notes.append(f"{record.state.name}: the next start finishes that")
        return found
    if record is None and store is StoreState.WHOLE:
        found.disagreements.append("there is a log, but the store has no record of it")
        found.cures.append("restore log and store from one backup, or start once with --rebuild-store")
    if name_why or (record is not None and said not in (None, record.name)):
        found.disagreements.append(name_why or f"the file topic of {folder} names another topic, {said}")
        found.cures.append(NAME_AGAIN if name_why and record is not None else RESTORE)
    elif said is not None and partitions != found.partitions:
        found.disagreements.append(
            f"the store says that it is one of {found.partitions} partitions, and the file topic of {folder} says one "
            f"of {partitions}"
        )
        found.cures.append(RESTORE)
    if record is not None and not folder.is_dir():
        found.disagreements.append("the store has a record, but there is no log")
        found.cures.append(
            "restore the log together with the store from one backup, or write the other topics into a new directory "
            "with --salvage, which leaves this one out"
        )
        return found
    secret = _secret(folder, record, found)
    if not secret:
        return found
    identity = LogIdentity(incarnation, key_of(secret))
    found.log_bytes = sum(path.stat().st_size for path in _segments(folder))
    expects_snapshot = record is not None and not stored.why
    tally = examine_log(folder, identity, loaded, found, replay, expects_snapshot=expects_snapshot)
    if not found.is_whole and not found.cures:
        found.cures.append(RESTORE)
    by_id = tally is not None and tally.policy is not None and tally.policy.by_deduplication_id
    if tally is not None and tally.policy is not None and tally.policy.imported is not None:
        examine_imported(found, stored.store, tally.policy.imported)
    if by_id and not found.has_whole_log:
        found.notes.append(
            "its messages have deduplication IDs: a salvage keeps those of the messages that are left. Copies of all "
            "other messages count as new, also of those that retention has dropped"
        )
    if tally is not None:
        each(Examined(found, folder, identity, secret, loaded, tally, replay))
    return found


def _arriving(folder: Path) -> Iterator[TopicFindings]:
    """Yield the topics that were arriving from other sidecars."""
    for incarnation in incarnations(folder) if folder.is_dir() else ():
        there = folder / str(incarnation)
        said, _, _ = _said_by(there)
        found = TopicFindings(said or topic_name(f"rebuilt-{incarnation}"), incarnation)
        found.log_bytes = sum(path.stat().st_size for path in there.iterdir())
        found.notes.append(
            "it was on its way here from another sidecar, which has it: the next start removes this part"
        )
        yield found


def _segments(folder: Path) -> Iterator[Path]:
    return (segment_path(folder, base) for base in base_indexes(folder))


def _said_by(folder: Path) -> tuple[str | None, int, str]:
    """Return the answer of `said_by`, or why there is none."""
    try:
        return (*said_by(folder), "") if folder.is_dir() else (None, 0, "")
    except DamagedError as e:
        return None, 0, e.message


def _secret(folder: Path, record: TopicRecord | None, found: TopicFindings) -> bytes:
    """Return the secret that binds the records to their log; empty if the secret is not known."""
    there = secret_of(folder, record.secret if record is not None else b"")
    if there.why is not None:
        found.disagreements.append(there.why.message)
        found.cures.append(there.why.hint)
    elif there.missing is not None:
        found.notes.append(f"{there.missing} is missing or short: the store has it, and the next start writes it again")
    return there.secret


def _check_names(topics: list[TopicFindings]) -> None:
    seen: dict[str, TopicFindings] = {}
    for topic in topics:
        if topic.name in seen:
            topic.disagreements.append(
                f"there is another topic of this name, incarnation {seen[topic.name].incarnation}"
            )
        seen.setdefault(topic.name, topic)


def _check_partitions(topics: list[TopicFindings]) -> None:
    """Check that a partitioned topic has all of its partitions."""
    there = {topic.name for topic in topics}
    for topic in topics:
        whole = whole_of(topic.name) if topic.partitions else None
        if whole is None:
            continue
        missing = [k for k in range(topic.partitions) if partition_name(whole, k) not in there]
        if missing and not any(topic.notes):
            lacks = ", ".join(map(str, missing))
            topic.disagreements.append(
                f"it is one of {counted(topic.partitions, 'partition')}, and these are not there: {lacks}"
            )
            topic.cures.append(RESTORE)


def _directory_cures(topics: list[TopicFindings]) -> list[str]:
    damaged = sum(not topic.is_whole for topic in topics)
    return [f"not whole: {damaged:,} of {counted(len(topics), 'topic')}: see what each says"]


# -- The log of one topic, from its first byte to its last, and whether it fits the store's snapshot.

NAMED = 3
"""The most producers named as examples of a disagreement."""


def examine_log(
    folder: Path,
    identity: LogIdentity,
    loaded: Loaded | None,
    found: TopicFindings,
    replay: JournalReplay,
    *,
    expects_snapshot: bool,
) -> Tally | None:
    """Read the log, and write the findings to `found`. At the end, the snapshot's numbers are merged into the tally.

    Return None for a log that this version cannot read to its end.
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
        # A record of another version, or an invalid control record.
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
        # The record is dropped, because it would keep the whole buffer of the read in memory.
        found.damage.append(replace(part, record=None))
        found.next_index = part.next_index or found.next_index
    else:
        found.torn_end = part


class _Meeting:
    """The place in the log at the snapshot's position. At this place, log and snapshot must agree."""

    def __init__(self, tally: Tally, loaded: Loaded | None, found: TopicFindings, last_file: Path) -> None:
        self._last_file = last_file
        self._tally = tally
        self._loaded = loaded
        self._found = found
        self._has_met = False

    def split(self, part: Intact) -> Iterator[Intact]:
        """Yield a part, split in two where the snapshot's position is in it."""
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
        """Check the log at its end."""
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
        """Check that the log has no higher numbers of any producer than the store."""
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
        """Check that an undamaged log contains all state that the store contains."""
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
