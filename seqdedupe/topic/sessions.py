"""Ownership of producer names by epochs, which Open assigns.

An epoch is `term << 32 | n`. n counts the topic's opens in that term, starting with a random number. If an older copy
of a log was restored, terms occur again, and the random start prevents that the epochs of the lost history occur again.
The newest epoch owns the name. Safety does not depend on epochs; watermark and link provide it. Epochs prevent two
processes with the same name from fencing each other endlessly.
"""

from dataclasses import dataclass, field

import numpy as np

from seqdedupe.core.producers import Producers
from seqdedupe.core.rule import DURABLE_EPOCH, EPOCH, PERSISTED
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.format.jit import Int64s
from seqdedupe.limits import MAX_OPEN_NAMES, NO_EPOCH
from seqdedupe.names import new_producer_name, producer_name

NAMES_A_STEP = 1_000
"""The number of names that the event loop handles in one step, which takes a millisecond or two. Other work runs
between steps."""

_TERM_SHIFT = 32
LAST_OPEN: int = 2**_TERM_SHIFT - 1
RANDOM_BYTES = 4
"""The size of the random number, which can skip half of the opens of a term. The remaining number of opens is as large
as the number of seconds in 68 years."""


def highest_term(epochs: Int64s) -> int:
    """Return the highest term in these epochs; 0 if the list is empty."""
    return int(epochs.max(initial=0)) >> _TERM_SHIFT


def can_have_been_given(epoch: int) -> bool:
    """Return whether any topic can have assigned this epoch: terms and opens are counted from 1."""
    return epoch > 1 << _TERM_SHIFT


def wrong_count() -> SeqdedupeError:
    """Return the error for an Open with no name, too many names, or the same name twice."""
    what = f"Open takes 1 to {MAX_OPEN_NAMES} producer names, each once"
    return error("INVALID_NAME", what, hint="Name each producer only once. Open more producers in several calls.")


def check_count(names: list[str]) -> None:
    """Raise INVALID_NAME for an Open with no name, too many names, or the same name twice."""
    if not 1 <= len(names) <= MAX_OPEN_NAMES or len(set(names)) < len(names):
        raise wrong_count()


def encoded_names(names: list[str], known: Producers | None = None) -> list[bytes]:
    """Return the names of an Open in UTF-8. Raises INVALID_NAME for an invalid name, and for an unknown name that is
    not allowed as a new name."""
    encoded = [producer_name(name) for name in names]
    are_new = [True] * len(names) if known is None else (known.find_all(encoded) < 0).tolist()
    for shown, is_new in zip(names, are_new, strict=True):
        if is_new:
            new_producer_name(shown)
    return encoded


@dataclass(frozen=True, slots=True)
class SessionStarts:
    """The sessions that an Open starts or resumes. They are in force, but may not be durable yet. `refusals` is indexed
    by place; all other columns contain only the names that are not refused."""

    places: Int64s
    """The places of the names in the list of the call."""

    names: list[bytes]
    epochs: Int64s
    earlier_epochs: Int64s
    """The epochs of the previous sessions; NO_EPOCH where there was none."""
    durable_epochs: Int64s
    """The durable epochs when the call started."""
    refusals: dict[int, SeqdedupeError]
    """By place in the call: FENCED, INVALID_EPOCH."""
    is_resume: bool


@dataclass(frozen=True, slots=True)
class OpenAnswer:
    """The answer of `Open`, in the order of the names. A refused name has epoch 0, persisted and index -1."""

    epochs: list[int]
    persisted: list[int]
    indexes: list[int]
    refusals: dict[int, SeqdedupeError] = field(default_factory=dict)
    """By place: FENCED, INVALID_EPOCH."""
    forgotten: list[int] = field(default_factory=list)
    """The places of resumed names that have no data, or had no data at an earlier resume of the same session, in a
    topic that has ever forgotten names."""
    fenced_epochs: dict[int, int] = field(default_factory=dict)
    """By place, the epoch of the previous session, for names that had a different session before."""

    def extend(self, other: "OpenAnswer") -> None:
        """Add the answer for the names after these."""
        first = len(self.epochs)
        self.epochs.extend(other.epochs)
        self.persisted.extend(other.persisted)
        self.indexes.extend(other.indexes)
        self.refusals.update((first + place, e) for place, e in other.refusals.items())
        self.forgotten.extend(first + place for place in other.forgotten)
        self.fenced_epochs.update((first + place, epoch) for place, epoch in other.fenced_epochs.items())

    def among(self, names: int, refusals: dict[int, SeqdedupeError]) -> "OpenAnswer":
        """Return this answer as a part of the answer to a call with `names` names. The names at the places in
        `refusals` were refused earlier."""
        if not refusals:
            return self
        places = [place for place in range(names) if place not in refusals]
        answer = OpenAnswer([0] * names, [-1] * names, [-1] * names, dict(refusals))
        for place, *columns in zip(places, self.epochs, self.persisted, self.indexes, strict=True):
            answer.epochs[place], answer.persisted[place], answer.indexes[place] = columns
        answer.refusals.update((places[k], e) for k, e in self.refusals.items())
        answer.forgotten.extend(places[k] for k in self.forgotten)
        return answer


class Sessions:
    """The sessions of one topic in the term of its current owner."""

    def __init__(self, producers: Producers) -> None:
        self._producers = producers
        self._term = 0
        self._opens = 0
        self._forgotten: dict[bytes, int] = {}
        """By name, the epoch of a session that was resumed after the name was forgotten."""

    def begin_term(self, term: int, random: bytes) -> None:
        """Begin the term of a new owner. `random`, of RANDOM_BYTES, determines the start of the count of opens."""
        self._term, self._opens = term, int.from_bytes(random, "little") >> 1

    def open(self, names: list[str], epochs: list[int] | None) -> SessionStarts:
        """Start new sessions (unless `term_is_used_up`), or resume the sessions of the given epochs, each
        independently. The sessions are in force from now on.

        If a name was forgotten, an earlier session may have resumed it before the newest session did. The newest
        session is then fenced, because it would otherwise mistake the other session's messages for its own. Raises
        INVALID_NAME. After an error, no session is started.
        """
        encoded = encoded_names(names, self._producers)
        refusals: dict[int, SeqdedupeError] = {}
        is_resume = epochs is not None
        if epochs is None:
            epochs = [self._next_epoch()] * len(names)
        else:
            numbers = self._producers.find_all(encoded)
            current = np.where(numbers >= 0, self._producers.numbers[numbers, EPOCH], 0).tolist()
            for place, columns in enumerate(zip(encoded, epochs, current, strict=True)):
                if (why := self._why_not_resumed(*columns)) is not None:
                    refusals[place] = why
        places = [place for place in range(len(names)) if place not in refusals]
        accepted = [encoded[place] for place in places]
        numbers = self._producers.add_all(accepted)
        given = np.array([epochs[place] for place in places], np.int64)
        earlier, durable = self._producers.numbers[numbers[:, None], [EPOCH, DURABLE_EPOCH]].T
        self._producers.open(numbers, given)
        if not is_resume:
            self.forget(accepted)
        return SessionStarts(np.array(places, np.int64), accepted, given, earlier, durable, refusals, is_resume)

    def opened(self, opening: SessionStarts) -> OpenAnswer:
        """Return the answer to an Open. Call this after everything for which the Open waits has settled."""
        names = len(opening.places) + len(opening.refusals)
        answer = OpenAnswer([0] * names, [-1] * names, [-1] * names, dict(opening.refusals))
        if not opening.is_resume:
            had = np.flatnonzero(opening.earlier_epochs != NO_EPOCH)
            answer.fenced_epochs.update(
                zip(opening.places[had].tolist(), opening.earlier_epochs[had].tolist(), strict=True)
            )
        # Numbers may have changed while it waited.
        numbers = self._producers.add_all(opening.names)
        self._producers.activity.use(numbers)
        rows = self._producers.numbers[numbers]
        given = (opening.names, opening.places.tolist(), opening.epochs.tolist())
        known = (numbers.tolist(), rows[:, DURABLE_EPOCH].tolist(), rows[:, PERSISTED].tolist())
        for name, place, epoch, number, current, last in zip(*given, *known, strict=True):
            if opening.is_resume and current > epoch:
                # The reset happened while Open waited. It may also have removed IDs for which the session has receipts.
                answer.refusals[place] = _fenced(name.decode(), epoch, current)
                continue
            answer.epochs[place] = epoch
            answer.persisted[place] = last
            answer.indexes[place] = self._producers.index_of(number, last) if last >= 0 else -1
        return answer

    def note_forgotten(self, names: list[bytes], epochs: Int64s) -> None:
        """Record that these sessions were resumed after their names had been forgotten. A client may not have received
        the answer that reported this. So every later resume of such a session reports it again, until the session or
        this process ends."""
        self._forgotten.update(zip(names, epochs.tolist(), strict=True))

    def was_forgotten(self, name: bytes, epoch: int) -> bool:
        """Whether this session was resumed after its name had been forgotten."""
        return self._forgotten.get(name) == epoch

    def forget(self, names: list[bytes]) -> None:
        """Forget the sessions of these names, which are over."""
        if self._forgotten:
            for name in names:
                self._forgotten.pop(name, None)

    @property
    def term_is_used_up(self) -> bool:
        """Whether there is no epoch left for another session: a new term must begin first."""
        return self._opens >= LAST_OPEN

    def _next_epoch(self) -> int:
        self._opens += 1
        return self._term << _TERM_SHIFT | self._opens

    def are_in_flight(self, names: list[str]) -> bool:
        """Return whether any of the names has a session whose record is not durable yet, and may fail."""
        rows = self._producers.numbers[self._known(names)]
        return bool((rows[:, EPOCH] > rows[:, DURABLE_EPOCH]).any())

    def need_a_record(self, names: list[str], epochs: list[int] | None) -> bool:
        """Return whether the log needs a record for an `open` with these arguments. Return false only if all sessions
        are resumed, and the log already contains them. Return true even if all new sessions will be refused."""
        if epochs is None:
            return True
        numbers = self._producers.find_all([name.encode(errors="replace") for name in names])
        durable = np.where(numbers >= 0, self._producers.numbers[numbers, DURABLE_EPOCH], NO_EPOCH)
        return any(epoch > known for epoch, known in zip(epochs, durable.tolist(), strict=True))

    def use(self, names: list[str]) -> None:
        """Mark these names as used: they are not idle."""
        self._producers.activity.use(self._known(names))

    def _known(self, names: list[str]) -> Int64s:
        numbers = self._producers.find_all([name.encode(errors="replace") for name in names])
        known: Int64s = numbers[numbers >= 0]
        return known

    def _why_not_resumed(self, name: bytes, epoch: int, current: int) -> SeqdedupeError | None:
        shown = name.decode()
        # Assigned epochs are known permanently, unless the name was forgotten. A higher epoch comes from another
        # history of this log, after an older copy of the log was restored.
        is_known = current > NO_EPOCH and not self._producers.has_forgotten
        newest = current if is_known else self._term << _TERM_SHIFT | self._opens
        if not can_have_been_given(epoch) or epoch > newest:
            return error(
                "INVALID_EPOCH",
                f"this topic never gave the epoch {epoch} with which {shown!r} resumes",
                producer_name=shown,
                epoch=epoch,
                current_epoch=current,
            )
        if epoch < current or epoch > current > NO_EPOCH:
            return _fenced(shown, epoch, current)
        return None


def _fenced(shown: str, epoch: int, current: int) -> SeqdedupeError:
    return error(
        "FENCED",
        f"producer {shown!r} has been opened by another session: its epoch is {current}, not {epoch}",
        producer_name=shown,
        epoch=epoch,
        current_epoch=current,
    )
