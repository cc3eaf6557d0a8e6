"""Open: sessions of a topic with a log are started and resumed, each name by itself, by one control record."""

import asyncio

import numpy as np

from seqdedupe.core.rule import DURABLE_EPOCH
from seqdedupe.errors import error
from seqdedupe.limits import NO_EPOCH, NO_SEQUENCE_ID
from seqdedupe.topic import control
from seqdedupe.topic.control import Purge, Sessions
from seqdedupe.topic.originals import index_in_log
from seqdedupe.topic.publishing import Topic
from seqdedupe.topic.sessions import Opened

MAX_LOOKED_UP = 64
"""Of so many names at most `Open` answers where their last message stands: that may take a read each."""


async def open_sessions(topic: Topic, names: list[str], epochs: list[int] | None) -> Opened:
    """Starts sessions (`epochs` None), or resumes these, each name by itself. Older ones are fenced at once.

    Returns when what the names have in flight has settled and their epochs are durable. Raises what
    `Sessions.open` raises, or why the topic takes nothing now, or LOG_REFUSED: then nobody was fenced.
    """
    topic.check_serving()
    if topic.window is not None:
        raise error(
            "INVALID_REQUEST",
            f"topic {topic.name} is one of deduplication IDs, and has no producers: nothing has to be opened",
            hint="Publish without a session, every message with a deduplication ID: `client.publisher(topic)`.",
        )
    if topic.flight.has(Purge):
        # Whether the names are being forgotten is not known before that has settled; no other one will name them.
        topic.sessions.use(names)
        await topic.all_settled()
        topic.check_serving()
    while epochs is not None and topic.sessions.are_in_flight(names):
        # Whether these sessions have been fenced is not known before that has settled.
        await topic.all_settled()
        topic.check_serving()
    opening = topic.sessions.open(names, epochs)
    durable_epochs = topic.producers.numbers[opening.numbers, DURABLE_EPOCH]
    if (durable_epochs < opening.epochs).any():
        # All that is in flight stands before it, and has settled when it has.
        parts = control.parts(Sessions(opening.names, opening.epochs))
        await asyncio.gather(*[topic.append_change(part) for part in parts])
    else:
        await topic.all_settled()
    answer = topic.sessions.opened(opening, len(names))
    if opening.is_resume and topic.producers.has_forgotten:
        had_nothing = np.flatnonzero(durable_epochs == NO_EPOCH)
        gone = [opening.names[k] for k in had_nothing]
        topic.resumed_after_purge(gone)
        topic.sessions.begin_anew(gone, opening.epochs[had_nothing])
        columns = zip(opening.places.tolist(), opening.names, opening.epochs.tolist(), strict=True)
        answer.forgotten.extend(
            place
            for place, name, epoch in columns
            if place not in answer.refusals
            and (answer.persisted[place] == NO_SEQUENCE_ID or topic.sessions.has_begun_anew(name, epoch))
        )
    for place, name in list(zip(opening.places.tolist(), opening.names, strict=True))[:MAX_LOOKED_UP]:
        if answer.indexes[place] < 0 and place not in answer.refusals:
            number = topic.producers.add(name)
            answer.indexes[place] = await index_in_log(topic.producers, number, topic.log)
    return answer
