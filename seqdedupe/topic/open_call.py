"""Open: starts and resumes sessions of a topic with a log. Each name is handled independently; several names share one
control record.

Begin with `open_sessions`. It fences older sessions at once, and returns when the names' messages in flight have
settled.
"""

import asyncio
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from seqdedupe.core.producers import Producers
from seqdedupe.core.rule import DURABLE_EPOCH
from seqdedupe.errors import error
from seqdedupe.format.jit import Int64s
from seqdedupe.limits import NO_EPOCH, NO_SEQUENCE_ID
from seqdedupe.topic.control import ProducerSessions, Purge
from seqdedupe.topic.readers import index_in_log
from seqdedupe.topic.sessions import NAMES_A_STEP, OpenAnswer, SessionStarts, check_count, encoded_names
from seqdedupe.topic.topic import Topic

MAX_LOOKED_UP = 64
"""The maximum number of names for which `Open` looks up the position of the last message: each name may need a read."""


class CheckNames(Protocol):
    """Checks whether the client may open these names. `writes`: whether opening needs a record in the log. It may
    raise."""

    def __call__(self, names: list[str], /, *, writes: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class _Begun:
    """Some names of a call, whose sessions are in force but may not be durable yet."""

    opening: SessionStarts
    names: int
    durable_epochs: Int64s
    """The durable epochs before the call."""


async def open_sessions(
    topic: Topic,
    names: list[str],
    epochs: list[int] | None,
    check: CheckNames = lambda names, *, writes: None,
) -> OpenAnswer:
    """Start sessions (`epochs` None), or resume the sessions with these epochs. Each name is handled independently.
    Older sessions are fenced at once. `check` is called with some names just before they are opened, and may raise.

    Returns when the names' messages in flight have settled and their epochs are durable. Raises the errors of
    `Sessions.open`, the reason why the topic accepts nothing now, or LOG_REFUSED. After an error no session was fenced.
    With more than NAMES_A_STEP names, some sessions may be fenced.
    """
    topic.check_serving()
    if topic.window is not None:
        raise error(
            "INVALID_REQUEST",
            f"topic {topic.name} is one of deduplication IDs, and has no producers: nothing has to be opened",
            hint="Give each message a deduplication ID (`client.publisher(topic)`), or use a topic of sequence IDs.",
        )
    check_count(names)
    if len(names) > NAMES_A_STEP:
        # Check before any name is opened. Names that are opened in one step are checked there.
        await check_names(names, topic.producers)
    if epochs is not None and len(epochs) != len(names):
        raise error("INVALID_REQUEST", f"epochs has {len(epochs)} values for {len(names)} producer names")
    parts = [slice(first, first + NAMES_A_STEP) for first in range(0, len(names), NAMES_A_STEP)]
    begun: list[_Begun] = []
    changes: list[asyncio.Future[None]] = []
    for part in parts:
        if begun:
            await asyncio.sleep(0)
        begun.append(await _begin(topic, names[part], None if epochs is None else epochs[part], check, changes))
    await asyncio.gather(*changes)
    if len(changes) < len(begun):
        await topic.all_settled()
    answer = OpenAnswer([], [], [])
    for one in begun:
        if answer.epochs:
            await asyncio.sleep(0)
        answer.extend(_opened(topic, one))
    places = [place for place in range(len(names)) if place not in answer.refusals]
    for place in places[:MAX_LOOKED_UP]:
        if answer.indexes[place] < 0:
            number = topic.producers.add(names[place].encode())
            answer.indexes[place] = await index_in_log(topic.producers, number, topic.log)
    return answer


async def check_names(names: list[str], known: Producers | None = None) -> None:
    """Raise INVALID_NAME for names that Open cannot accept, like `check_count` and `encoded_names`, some names in each
    step."""
    check_count(names)
    for first in range(0, len(names), NAMES_A_STEP):
        encoded_names(names[first : first + NAMES_A_STEP], known)
        await asyncio.sleep(0)


async def _begin(
    topic: Topic,
    names: list[str],
    epochs: list[int] | None,
    check: CheckNames,
    changes: "list[asyncio.Future[None]]",
) -> _Begun:
    """Put the sessions of some names in force. If a record is needed to make them durable, the record is added to
    `changes`."""
    topic.check_serving()
    if topic.flight.has(Purge):
        # Only when this purge has settled is it known whether the names are forgotten. No later purge will contain
        # them.
        topic.sessions.use(names)
        await topic.all_settled()
        topic.check_serving()
    while epochs is not None and topic.sessions.are_in_flight(names):
        # Only when this has settled is it known whether these sessions have been fenced.
        await topic.all_settled()
        topic.check_serving()
    check(names, writes=topic.sessions.need_a_record(names, epochs))
    if epochs is None and topic.sessions.term_is_used_up:
        topic.owner.begin_another_term()
    opening = topic.sessions.open(names, epochs)
    durable_epochs = topic.producers.numbers[opening.numbers, DURABLE_EPOCH]
    if (durable_epochs < opening.epochs).any():
        # Everything in flight is before this record in the log, and has settled when this record has settled.
        changes.append(topic.append_change(ProducerSessions(opening.names, opening.epochs)))
    return _Begun(opening, len(names), durable_epochs)


def _opened(topic: Topic, begun: _Begun) -> OpenAnswer:
    """Return the answer for some names, after everything for which they wait has settled."""
    opening = begun.opening
    answer = topic.sessions.opened(opening, begun.names)
    if opening.is_resume and topic.producers.has_forgotten:
        had_nothing = np.flatnonzero(begun.durable_epochs == NO_EPOCH)
        gone = [opening.names[k] for k in had_nothing]
        topic.resumed_after_purge(gone)
        topic.sessions.note_forgotten(gone, opening.epochs[had_nothing])
        columns = zip(opening.places.tolist(), opening.names, opening.epochs.tolist(), strict=True)
        answer.forgotten.extend(
            place
            for place, name, epoch in columns
            if place not in answer.refusals
            and (answer.persisted[place] == NO_SEQUENCE_ID or topic.sessions.was_forgotten(name, epoch))
        )
    return answer
