"""One live topic with a log: admit, append, confirm.

Everything here runs on one event loop and decides in arrival order, so admission order, append order and
confirmation order are one order and nothing needs a lock. What is handed over settles in `settling`; `owning` says when
the log may be appended to.
"""

import asyncio
from collections.abc import Callable

from seqdedupe.core.moment import Moment
from seqdedupe.errors import SeqdedupeError
from seqdedupe.topic import admission, by_id, trimming
from seqdedupe.topic.answers import OutOfStepError, Receipt, Refusal, Reply
from seqdedupe.topic.clock import Clock
from seqdedupe.topic.flight import Admitted
from seqdedupe.topic.frame import Frame, NumbersCache
from seqdedupe.topic.owning import OwnedTopic
from seqdedupe.topic.policy import Policy, Route
from seqdedupe.topic.state import State
from seqdedupe.topic.window_runs import LookedUp


class Topic(OwnedTopic):
    """A topic of this process. It takes messages once `recover` has returned.

    `on_state` is told each change of state, with one line why. `window_memory` is shared by topics of deduplication
    IDs; without it their windows stay in memory. `imported` is the window that the store has of an import.
    """

    now: Callable[[], Moment] = Clock().now
    """When messages of a topic of deduplication IDs are published, and how old others are."""
    _trimming: asyncio.Task[None] | None = None

    def admit(
        self,
        encoded: bytes,
        frame: int,
        reply: Reply,
        cache: NumbersCache,
        *,
        lone: bool = False,
        when_durable: Callable[[], None] | None = None,
        looked_up: LookedUp | None = None,
    ) -> None:
        """Decides about a frame and hands what is new to the log. `reply` is called once, now or when that settles.

        With `when_durable` the receipt may be given before that, when it is written, where the policy is so. It says
        so, and this is called when it is durable. Should the log lose it, the streams are ended.
        `lone`: links may be left out, as in a unary call. `looked_up` is what `look_up` has just answered; without it
        everybody may have to wait for a disk. Nothing is raised: what is wrong is a `Refusal`.
        """
        try:
            self.check_serving()
        except SeqdedupeError as e:
            self.counters.refused += 1
            reply(Refusal(frame, e))
            return
        try:
            new, answer = self._decided(encoded, frame, cache, lone, looked_up)
        except OutOfStepError as e:
            self.counters.refused += 1
            reply(Refusal(frame, self._out_of_step(e.__cause__)))
            return
        if isinstance(answer, Refusal):
            self.counters.refused += 1
            reply(answer)
        elif new is None:
            self.counters.count(answer, 0)
            reply(answer)
        else:
            self._hand_over(Admitted(new, answer, reply, self.now_seconds(), when_durable))
            if when_durable is None and not self.applied.flush_interval.is_every_commit:
                # Somebody waits who takes nothing less.
                self.log.flush()

    def _decided(
        self, encoded: bytes, number: int, cache: NumbersCache, lone: bool, looked_up: LookedUp | None
    ) -> tuple[Frame | None, Receipt | Refusal]:
        """By sequence IDs or by deduplication IDs."""
        check_log = self.log.check
        if self.window is not None:
            return by_id.admit(
                encoded,
                number,
                self.window,
                applied=self.applied,
                wants_keys=self.policy.route is Route.KEY,
                now=self.now(),
                check_log=check_log,
                older=lambda frame, since_ms: self.window_runs.older(frame, since_ms, looked_up),
            )
        return admission.admit(
            encoded,
            number,
            self.producers,
            cache,
            next_index=self.next_index,
            applied=self.applied,
            lone=lone,
            check_log=check_log,
        )

    # -- policy and retention -----------------------------------------------------------------------------------

    def _put_in_force(self, policy: Policy) -> None:
        before = self.applied.retention
        super()._put_in_force(policy)
        if self.knows_its_end and self.applied.retention != before:
            self._snapshot_is_durable()

    def _snapshot_is_durable(self) -> None:
        if self.state is not State.DRAINING and (self._trimming is None or self._trimming.done()):
            self._trimming = self._spawn(trimming.trim(self))

    def look_at_retention(self) -> None:
        """Has dropped what has become too old, though no snapshot may be taken: to be called again and again."""
        if self.knows_its_end and self.applied.retention.age_ms is not None:
            self._snapshot_is_durable()

    # -- the end -----------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Takes nothing more, settles what is in flight, takes a last snapshot, lets go of the log."""
        self._set_state(State.DRAINING, "the sidecar is shutting down")
        await self.all_settled()
        if self.knows_its_end:
            await self.snapshot_in_background()
        await self.close("the sidecar is shutting down")

    async def delete(self) -> None:
        """`close`, for good: whoever still uses the topic is told that it is not there."""
        self._closed_because = "TOPIC_NOT_FOUND"
        await self.close("it was deleted")

    async def close(self, why: str) -> None:
        """Lets go of the log at once. Frames in flight are answered with OUTCOME_UNKNOWN."""
        self._set_state(State.DRAINING, why)
        await self._end_tasks()
        await self.log.close()
        self._fail_in_flight(self._not_appended("OUTCOME_UNKNOWN", why))
