"""The judge of a topic of deduplication IDs: there the IDs alone decide. No session, epoch or link is wanted.

`ByDeduplicationId` holds all that a topic knows of them: the window in memory, its runs in the store (`window_runs`),
and what was imported.
"""

import logging
from collections.abc import Awaitable, Callable

import numpy as np

from seqdedupe.core.id_runs import ImportedIds
from seqdedupe.core.id_table import IMPORTED
from seqdedupe.core.id_window import NONE_OLDER, IdWindow
from seqdedupe.core.moment import Moment
from seqdedupe.errors import SeqdedupeError
from seqdedupe.format.columns import BASE_INDEX, PRODUCERS, PUBLISH_TIME_MS, ROWS
from seqdedupe.format.headers import SECRET_BYTES
from seqdedupe.format.jit import Int64s, Int64s2, Uint8s
from seqdedupe.limits import NO_LIMIT
from seqdedupe.store.db import Store
from seqdedupe.topic.clock import Clock
from seqdedupe.topic.frame import Frame, FrameReceipt, NumbersCache, OutOfStepError, Refusal, check_by_id, cut
from seqdedupe.topic.policy import Applied, DeduplicationRoute, Policy
from seqdedupe.topic.window_runs import LookedUp, WindowImported, WindowMemory, WindowRuns

logger = logging.getLogger("seqdedupe.topic")


class ByDeduplicationId:
    """A `Judge`, once there is a `window`.

    `policy` gives what is set for the topic, `imported` is what the store has of an import, and `on_expired` is told
    when nothing of that counts any more. `take_snapshot`: see `WindowRuns`. `memory` is shared with other topics;
    without it all of the window stays in memory.
    """

    def __init__(
        self,
        topic: str,
        incarnation: int,
        store: Store,
        window: IdWindow | None,
        imported: ImportedIds | None,
        *,
        policy: Callable[[], Policy],
        on_expired: Callable[[], None],
        take_snapshot: Callable[[], Awaitable[None]],
        memory: WindowMemory | None,
        random_bytes: Callable[[int], bytes],
    ) -> None:
        self.window = window
        """None in a topic of sequence IDs, and before the log has said that it is none."""
        self.now: Callable[[], Moment] = Clock().now
        """When messages are published, and how old others are."""
        self.imported = WindowImported(topic, imported, policy, on_expired)
        self.runs = WindowRuns(store, incarnation, lambda: self.window, self.imported, take_snapshot)
        self.memory = memory
        self._topic = topic
        self._policy = policy
        self._random_bytes = random_bytes
        self._measured = (-1, -1)

    def begin(self, index: int) -> IdWindow:
        """The window of the topic, which is one of deduplication IDs; one that begins with this index if it had none.

        Retention may have dropped what said so first: then the first batch says it.
        """
        if self.window is None:
            self.window = IdWindow(self._random_bytes(SECRET_BYTES), index)
            if index:
                logger.error(
                    "topic %s: nothing is left of the deduplication IDs of its first %d messages, which retention has "
                    "dropped and the store has lost: copies of these are taken for new",
                    self._topic,
                    index,
                )
        return self.window

    # -- frames ------------------------------------------------------------------------------------------------

    async def look_up(self, encoded: bytes) -> LookedUp | None:
        """To be awaited before a frame is decided, in the step that follows.

        Waits while the windows have more memory than they are to have, and reads what has to be read.
        """
        if self.window is None:
            return None
        if self.memory is not None:
            await self.memory.room()
        return await self.runs.look_up(encoded)

    def decide(
        self,
        encoded: bytes,
        number: int,
        cache: NumbersCache,
        *,
        next_index: int,
        applied: Applied,
        lone: bool,
        check_log: Callable[[bytes], None],
        looked_up: LookedUp | None,
    ) -> tuple[Frame | None, FrameReceipt | Refusal]:
        """See `Judge.decide`. A DUP always has its original's index, which may be a new row of the same frame: the
        receipt comes when that is stored; but for one that was imported."""
        window, now = self.begin(next_index), self.now()
        try:
            frame = check_by_id(encoded, wants_keys=self._policy().route is DeduplicationRoute.KEY)
            check_log(frame.encoded)
            in_runs = NONE_OLDER
            if applied.deduplication_enabled:
                # What is forgotten now is looked for in what was imported.
                window.move(applied.window, now.earliest_ms)
                in_runs = self.runs.older(frame, since_ms(applied, now), looked_up)
        except SeqdedupeError as e:
            return None, Refusal(number, e)
        next_index = window.next_index
        try:
            new, verdicts, dups, originals = window.decide(
                frame.view, frame.places, applied.deduplication_enabled, applied.window, now, in_runs
            )
            if not new:
                return None, _receipt(number, verdicts, -1, dups, originals)
            if new == frame.rows:
                frame.places[BASE_INDEX] = next_index
                return frame, FrameReceipt(number, None, next_index)
            frame = cut(frame, verdicts)
            frame.places[BASE_INDEX] = next_index
            return frame, _receipt(number, verdicts, next_index, dups, originals)
        except Exception as e:
            raise OutOfStepError from e

    def confirm(self, frame: Frame) -> None:
        """See `Judge.confirm`."""
        if self.window is not None:
            self.window.confirm(frame.rows)

    def fail(self) -> None:
        """See `Judge.fail`."""
        if self.window is not None:
            self.window.fail()

    def replay(self, chunk: bytes, batches: Int64s2, applied: Applied) -> None:
        """The IDs in these records count from now on: where they stand in the log, which need not be where those in
        flight were to stand."""
        view = np.frombuffer(chunk, np.uint8)
        for places in batches[(batches[:, ROWS] > 0) & (batches[:, PRODUCERS] == 0)]:
            index = int(places[BASE_INDEX])
            window = self.begin(index)
            window.fail()
            window.replay(view, places, index, int(places[PUBLISH_TIME_MS]), applied.window)

    # -- memory ------------------------------------------------------------------------------------------------

    def may_have_grown(self, snapshots_taken: int) -> None:
        """What the window takes in memory is looked at, if it has another chunk or there is another snapshot."""
        if self.window is None or self.memory is None:
            return
        seen = (self.window.chunks_opened, snapshots_taken)
        if seen != self._measured:
            self._measured = seen
            self.memory.measure(self.runs, self.window)

    async def close(self) -> None:
        """Nothing of the window is moved or measured any more."""
        self.runs.close()
        if self.memory is not None:
            await self.memory.forget(self.runs)


def since_ms(applied: Applied, now: Moment) -> int:
    """What was published up to this time is too old to be known; below 0: nothing is."""
    milliseconds = applied.window.milliseconds
    return -1 if milliseconds == NO_LIMIT else now.earliest_ms - milliseconds


def _receipt(number: int, verdicts: Uint8s, first_index: int, dups: Int64s, originals: Int64s) -> FrameReceipt:
    if not (is_imported := originals == IMPORTED).any():
        return FrameReceipt(number, verdicts, first_index, (), dups, originals)
    known, imported = np.flatnonzero(~is_imported), np.flatnonzero(is_imported)
    return FrameReceipt(number, verdicts, first_index, (), dups[known], originals[known], imported_rows=dups[imported])
