"""The common members of all kinds of topics, and the state machine that determines what a topic currently does.

There are two kinds: `topic.Topic` has a log of this project, `attached.AttachedTopic` has a broker's own log.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from enum import Enum
from typing import Any

from seqdedupe.core.id_window import IdWindow
from seqdedupe.core.producers import Producers
from seqdedupe.core.rule import DUP
from seqdedupe.errors import REASONS, SeqdedupeError, error
from seqdedupe.format.jit import Int64s, Uint8s
from seqdedupe.log.contract import DamageFound, Skipped
from seqdedupe.message_id import MessageId, Position
from seqdedupe.store.snapshots import Loaded
from seqdedupe.tasks import Broadcast
from seqdedupe.topic.control import decode_policy
from seqdedupe.topic.keeper import Keeper, shown
from seqdedupe.topic.policy import Applied, Policy
from seqdedupe.topic.sessions import Sessions

logger = logging.getLogger("seqdedupe.topic")


class State(Enum):
    """The state of a topic, which determines what the topic currently does."""

    RECOVERING = 1
    """The log is being read, or cannot be read now. Readers get the messages that are certain to be in the log."""
    SERVING = 2
    READ_ONLY = 3
    """The log refuses writes now; the topic tries again at intervals."""
    DRAINING = 4
    DAMAGED = 5
    """Permanent: the contents of the log or the store differ from what was written."""
    STANDBY = 6
    """Another sidecar owns the log. Readers get the messages that are certain to be in the log."""
    TERMINATED = 7
    """Permanent: the log accepts no more writes from anybody. Readers get all messages."""


@dataclass(slots=True)
class TopicCounters:
    """Counters since this process opened the topic: rows by verdict, bytes stored, frames refused, failures of the log,
    recoveries, messages read for recoveries and the time for this, producers reset or forgotten, and sessions that were
    resumed after their producer had been forgotten."""

    not_dup: int = 0
    dup: int = 0
    unknown: int = 0
    refused: int = 0
    stored_bytes: int = 0
    log_failures: int = 0
    recoveries: int = 0
    replayed: int = 0
    recovery_seconds: float = 0.0
    resets: int = 0
    purged: int = 0
    resumed_after_purge: int = 0

    def count_verdicts(self, verdicts: Uint8s, new_rows: int) -> None:
        """Count these verdicts, with `new_rows` that are NOT_DUP."""
        old_rows = len(verdicts) - new_rows
        dup = verdicts.tobytes().count(DUP) if old_rows else 0
        self.not_dup += new_rows
        self.dup += dup
        self.unknown += old_rows - dup


class TopicBase(ABC):
    """A topic of this process: its state and its known data. `on_state` is called at each change of the state.

    `loaded` is the topic's newest snapshot. If there is no snapshot, the topic begins at `first_index`. `applied` is
    the policy that the topic inherits.

    ```
                 found owned by another        ┌─────────┐  free, or asked for
              ┌───────────────────────────────▶│ STANDBY │────────────┐
              │                   handed over  └─────────┘            │
              │              ┌────────────────────▲                   ▼
        ┌────────────┐ taken over, read up to ┌───┴─────┐      tries to take over,
     ──▶│ RECOVERING │──── its own marker ───▶│ SERVING │      as RECOVERING does
        └────────────┘                        └─────────┘
          ▲  │   │  ▲   outcome unknown, or       │  │
          │  │   │  └── no epoch is left ─────────┘  │ the log refuses
          │  │   │                                   ▼
          │  │   │  the log refuses         ┌───────────┐
          │  │   └─────────────────────────▶│ READ_ONLY │ tries to take over, as RECOVERING does
          │  │                              └───────────┘
          └──┤ cannot be read now; seems damaged: once more
             ├──▶ DAMAGED      for good: damaged at the second look
             └──▶ TERMINATED   for good: the log accepts nothing from anybody
     any ────────▶ DRAINING     for good: closed, deleted, or the sidecar shuts down
    ```

    A topic of a broker has only RECOVERING (no broker is attached, or one replays), SERVING and DRAINING.
    """

    keeper: Keeper

    def __init__(
        self,
        name: str,
        incarnation: int,
        producers: Producers,
        loaded: Loaded | None,
        *,
        first_index: int,
        applied: Applied,
        on_state: Callable[[Any], None],
    ) -> None:
        self.name = name
        self.incarnation = incarnation
        # -- its present state
        self.state = State.RECOVERING
        self.why = "the log is being read"
        self.knows_its_end = False
        """Whether this process owns the log and has read it up to its own marker. Only then is the end of the topic
        known."""
        self.owner_address = ""
        """In STANDBY, the address of the sidecar that owns the log; empty if the address is not known."""
        self.asked = Broadcast()
        """A signal that a client has asked for a topic that another sidecar owns."""
        self.confirmed = Broadcast()
        """A signal that more messages can be read, or that the state has changed."""
        self.damage: SeqdedupeError | None = None
        self.terminated: SeqdedupeError | None = None
        """In TERMINATED, the reason why the topic accepts no more messages."""
        self.held: SeqdedupeError | None = None
        """The reason why the topic is on hold and accepts no messages, in any state: see `hold`."""
        self.closed_because = "DRAINING"
        """The reason code of refusals in DRAINING."""
        self.has_successor = False
        """Whether the topic was opened again as another object, so that this object is not used any more."""
        self._on_state = on_state
        self._tasks: set[asyncio.Task[None]] = set()
        self._has_ended = False
        # -- its known data
        self.producers = producers
        self.sessions = Sessions(producers)
        self.counters = TopicCounters()
        self.policy = Policy()
        """The policy that is set for this topic."""
        self.inherited = applied
        self.applied = applied
        """The policy that is in force."""
        self.term = 0
        self.confirmed_index = first_index
        """The index below which all messages are permanently in the log, and are included in the producers' numbers."""
        self.last_message_id: MessageId | None = None
        """The ID of the last confirmed message; None if there is none."""
        self.last_ownership = 0
        """The ownership of the last confirmed message; 0 if there is no such message or its ownership is not known."""
        self.newest_import: object = None
        """The import that began last. Any other import must stop."""
        if loaded is not None:
            self.term = loaded.term
            self.confirmed_index = loaded.next_index
            self.last_message_id = loaded.message_id
            self.last_ownership = loaded.ownership
            if loaded.policy:
                self.policy = decode_policy(loaded.policy)
                self.applied = applied.under(self.policy)

    # -- its state ---------------------------------------------------------------------------------------------

    def change_state(self, state: State, why: str) -> None:
        """Change the state and its reason, unless the topic is DRAINING."""
        if self.state is State.DRAINING and state is not State.DRAINING:
            return
        if (state, why) != (self.state, self.why):
            self.state, self.why = state, why
            self._on_state(self)
            self.confirmed.tell()

    def hold(self, why: SeqdedupeError) -> None:
        """Accept no messages from now on, for this reason, until `release`. Appends in flight settle; readers
        continue."""
        self.held = why

    def release(self, why: SeqdedupeError | None = None) -> None:
        """Accept messages again, unless the topic is on hold for a reason other than `why` (None: any reason)."""
        if why is None or self.held is why:
            self.held = None

    @abstractmethod
    def check_serving(self) -> None:
        """Raise the reason why the topic accepts no messages. In a broker's topic, raise the reason why the topic is
        closed."""

    def check_not_damaged(self) -> None:
        """Raise LOG_DAMAGED if the topic is damaged."""
        if self.damage is not None:
            raise damaged_topic(self.name, self.damage)

    def check_may_go_on(self) -> None:
        """Raise LOG_DAMAGED, TOPIC_TERMINATED or NOT_OWNER if no further messages can become certain in this
        sidecar."""
        self.check_not_damaged()
        if self.terminated is not None:
            raise self.terminated
        if self.state is State.STANDBY:
            self.asked.tell()
            raise self.not_owner("")

    def not_owner(self, what: str) -> SeqdedupeError:
        """Return the error that another sidecar owns the topic, with the owner's address if it is known. `what` is
        added to the message."""
        if not self.owner_address:
            return error("NOT_OWNER", f"another sidecar owns topic {self.name}{what}")
        message = f"the sidecar at {self.owner_address} owns topic {self.name}{what}"
        return error("NOT_OWNER", message, owner_address=self.owner_address)

    def check_knows_its_end(self) -> None:
        """Raise RECOVERING, NOT_OWNER or LOG_DAMAGED while this sidecar does not know where the topic ends."""
        if self.knows_its_end:
            return
        self.check_may_go_on()
        # No read is in progress if, for example, the start has found a full disk.
        hint = REASONS["LOG_REFUSED"].hint if self.state is State.READ_ONLY else None
        raise error(
            "RECOVERING",
            f"where topic {self.name} ends is not known yet: {self.why}",
            hint=hint,
            certain_index=self.readable_index,
        )

    @property
    def is_serving(self) -> bool:
        """Whether the topic accepts messages, if it is not on hold."""
        return self.state is State.SERVING

    # -- its messages ------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def window(self) -> IdWindow | None:
        """The window of known deduplication IDs; None in a topic of sequence IDs."""

    @property
    @abstractmethod
    def last_position(self) -> Position:
        """The position of the last confirmed message."""

    @property
    def certain_position(self) -> Position:
        """The position of the last message that may be returned to readers. If this position could only be found by a
        read: the position of an earlier message."""
        return self.last_position

    @property
    def readable_index(self) -> int:
        """The index below which all messages may be returned to readers. If `knows_its_end`, this is the end of the
        topic."""
        return self.confirmed_index

    @property
    @abstractmethod
    def first_index(self) -> int:
        """The index of the first message that is still in the log."""

    @abstractmethod
    async def position_before(self, index: int) -> Position:
        """Return the position before the message with this index. This may read the log, and raises the errors of
        `Log.locate`."""

    async def wait_for_message(self, index: int) -> None:
        """Wait until the message with this index can be read, or until it is clear that this sidecar cannot read it for
        now. In the second case the topic is closing, damaged, terminated, or owned by another sidecar."""
        ends = State.DRAINING, State.DAMAGED, State.STANDBY, State.TERMINATED
        while self.readable_index <= index and self.state not in ends:
            await self.confirmed.wait()

    # -- its log, if it is not a broker's ----------------------------------------------------------------------

    @abstractmethod
    def log_place(self) -> bytes:
        """Return the place where the log continues after the last confirmed message: the position in a broker's log, or
        `Log.place_at`."""

    @property
    @abstractmethod
    def log_bytes(self) -> int:
        """The size of the log on disk; 0 if the log is a broker's."""

    @property
    def damage_found(self) -> DamageFound:
        """The damage that a scrub of the log has found."""
        return DamageFound()

    @property
    def skipped(self) -> Skipped:
        """The counts of entries that are stored in the log, but are not part of the topic."""
        return Skipped()

    @property
    def not_durable(self) -> int:
        """The number of messages that have an early receipt and are not durable yet."""
        return 0

    @property
    def entry_format(self) -> str:
        """See `Log.entry_format`."""
        return ""

    # -- its policy --------------------------------------------------------------------------------------------

    @property
    def newest_policy(self) -> Policy:
        """The policy that the topic will have once all operations in progress have settled."""
        return self.policy

    @abstractmethod
    async def set_policy(self, policy: Policy) -> None:
        """Replace the whole policy. When this returns, it is durable and in force. Raises the reason for a failure."""

    def inherit(self, applied: Applied) -> None:
        """Inherit this policy from now on."""
        self.inherited = applied
        self.put_in_force(self.policy)

    @abstractmethod
    def put_in_force(self, policy: Policy) -> None:
        """Put this policy of the topic in force, combined with the policy that the topic inherits."""

    # -- its producers, for the keeper -------------------------------------------------------------------------

    @abstractmethod
    def snapshot_is_durable(self) -> None:
        """Allow retention to continue: a durable snapshot covers all messages below the keeper's `snapshot_index`."""

    @abstractmethod
    def in_use(self) -> list[Int64s]:
        """Return, by number, the producers with messages in flight, and the producers that are held now by anything
        other than a stream. Each part is determined in one step of the event loop."""

    @abstractmethod
    async def purge(self, numbers: Int64s) -> int:
        """Forget these producers durably, and return how many were forgotten. Raises the reason for a failure."""

    @abstractmethod
    def renumber(self, new_numbers: Int64s) -> None:
        """Give the producers new numbers. `new_numbers` contains the new number at the index of the old number, and -1
        if the producer is removed."""

    def resumed_after_purge(self, names: list[bytes]) -> None:
        """Count and log resumed sessions whose producers were forgotten."""
        self.counters.resumed_after_purge += len(names)
        if names:
            logger.warning(
                "topic %s: %d sessions are resumed of producers that were forgotten (%s): what they send again "
                "counts as new, even if it is stored",
                self.name,
                len(names),
                shown(names),
            )

    # -- its beginning and its end -----------------------------------------------------------------------------

    @abstractmethod
    async def recover(self) -> None:
        """Start the recovery of the topic. The topic serves now, or as soon as possible."""

    @abstractmethod
    async def drain(self) -> None:
        """Accept no more messages, settle appends in flight, take a last snapshot, and release all resources."""

    @abstractmethod
    async def close(self, why: str) -> None:
        """Release all resources at once. Callers that use the topic try again, and find its successor."""

    @abstractmethod
    async def delete(self) -> None:
        """Close the topic permanently. Callers that still use this object get the error that the topic does not
        exist."""

    def spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run this coroutine in the background until the topic is closed. If the topic is closed already, do not run
        it. Errors of the coroutine are logged."""
        task = asyncio.ensure_future(work)
        if self._has_ended:
            task.cancel()
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a task of topic %s failed", self.name, exc_info=task.exception())

    async def end_tasks(self) -> None:
        """End all spawned tasks and snapshots. When this returns, none of them is running."""
        self._has_ended = True
        self.keeper.inactivity.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.keeper.snapshotter.close()


def damaged_topic(name: str, damage: SeqdedupeError) -> SeqdedupeError:
    """Return the final answer of a damaged topic."""
    if damage.reason == "NO_STATE":
        return error("NO_STATE", f"topic {name} cannot be served here: {damage.message}", topic=name)
    return error("LOG_DAMAGED", f"topic {name} is damaged: {damage}", hint=damage.hint, topic=name)
