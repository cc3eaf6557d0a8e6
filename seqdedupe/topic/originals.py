"""Where a producer's last message stands when the ring of recent messages has forgotten it."""

import numpy as np

from seqdedupe import batch as batches
from seqdedupe.core.producers import Producers
from seqdedupe.core.rule import PERSISTED, STATED
from seqdedupe.errors import SeqdedupeError
from seqdedupe.format.columns import BASE_INDEX, PLACES
from seqdedupe.format.records import END, body_of, scan_record
from seqdedupe.format.tag import NO_KEY
from seqdedupe.log.contract import Log

NOT_KNOWN = -1


async def index_in_log(producers: Producers, number: int, log: Log) -> int:
    """The index of the message that holds a producer's persisted ID; NOT_KNOWN if it is gone, or cannot be read now.

    It takes a read of the log: STATED is the base index of the batch that holds the message, unless retention has
    dropped that, or deduplication was off meanwhile.
    """
    last = int(producers.numbers[number, PERSISTED])
    stated = int(producers.numbers[number, STATED])
    if last < 0 or stated < log.first_index:
        return NOT_KNOWN
    [name] = producers.names_from(number, 1)
    try:
        raw = await log.read(stated, stated + 1, 1)
    except SeqdedupeError:
        return NOT_KNOWN
    places = np.empty(PLACES, np.int64)
    if scan_record(np.frombuffer(raw, np.uint8), 0, log.incarnation, -1, NO_KEY, places) != END:
        return NOT_KNOWN
    batch = batches.decode(body_of(raw, places))
    producers_in_batch = [batch.producer_names[p] for p in range(len(batch.epochs))]
    if name not in producers_in_batch:
        return NOT_KNOWN
    mine = batch.sequence_ids == last
    if len(producers_in_batch) > 1:
        mine &= batch.producer_indexes == producers_in_batch.index(name)
    rows = np.flatnonzero(mine)
    return int(places[BASE_INDEX] + rows[-1]) if len(rows) else NOT_KNOWN
