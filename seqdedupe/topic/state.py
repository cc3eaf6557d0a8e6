"""What a topic does at the moment, and what it refuses therefore."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import Enum
from typing import Any

from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.topic.broadcast import Broadcast


class State(Enum):
    """What a topic does at the moment."""

    RECOVERING = 1
    """The log is being read, or cannot be read now; what is certain is served to readers."""
    SERVING = 2
    READ_ONLY = 3
    """The log refuses writes now; it is tried again."""
    DRAINING = 4
    DAMAGED = 5
    """For good: something in the log or the store is not what was written."""
    STANDBY = 6
    """Another sidecar owns the log; what is certain is served to readers."""
    TERMINATED = 7
    """For good: the log takes nothing more, whoever writes. All of it is served to readers."""


class Serving(ABC):
    """A topic by its state. `on_state` is told each change of it."""

    def __init__(self, name: str, on_state: Callable[[Any], None]) -> None:
        self.name = name
        self.state = State.RECOVERING
        self.why = "the log is being read"
        self.knows_its_end = False
        """Whether this process owns the log and has read it up to its own marker: only then is the end known."""
        self.owner_address = ""
        """Where the sidecar can be reached that owns the log, in STANDBY; empty if it is not known."""
        self.asked = Broadcast()
        """Tells that somebody wants a topic that another sidecar owns."""
        self.confirmed = Broadcast()
        """Tells that more can be read, or that the state is another one."""
        self.damage: SeqdedupeError | None = None
        self.terminated: SeqdedupeError | None = None
        """Why nothing is taken any more, in TERMINATED."""
        self._held: SeqdedupeError | None = None
        self._closed_because = "DRAINING"
        self._on_state = on_state

    @property
    @abstractmethod
    def readable_index(self) -> int:
        """All messages below it may be shown to readers. Where the topic ends only if it `knows_its_end`."""

    def _set_state(self, state: State, why: str) -> None:
        if self.state is State.DRAINING and state is not State.DRAINING:
            return
        if (state, why) != (self.state, self.why):
            self.state, self.why = state, why
            self._on_state(self)
            self.confirmed.tell()

    def hold(self, why: SeqdedupeError) -> None:
        """Takes nothing from now on, and says why, until `release`. What is in flight settles; readers go on."""
        self._held = why

    def release(self, why: SeqdedupeError | None = None) -> None:
        """Takes messages again, unless it is held for something else than this (None: whatever it is)."""
        if why is None or self._held is why:
            self._held = None

    def check_serving(self) -> None:
        """Raises why the topic takes no messages, if it does not: RECOVERING, LOG_REFUSED, NOT_OWNER, DRAINING,
        TOPIC_NOT_FOUND, TOPIC_TERMINATED, LOG_DAMAGED."""
        if self._held is not None and self.state is not State.DRAINING:
            raise self._held
        if self.state is State.SERVING:
            return
        self.check_may_go_on()
        reason = {
            State.RECOVERING: "RECOVERING",
            State.READ_ONLY: "LOG_REFUSED",
            State.DRAINING: self._closed_because,
        }[self.state]
        raise error(reason, f"topic {self.name} takes no messages now: {self.why}")

    def check_not_damaged(self) -> None:
        """Raises LOG_DAMAGED if the topic is damaged."""
        if self.damage is not None:
            raise damaged_topic(self.name, self.damage)

    def check_may_go_on(self) -> None:
        """Raises LOG_DAMAGED, TOPIC_TERMINATED or NOT_OWNER: nothing that is not certain yet will come from here."""
        self.check_not_damaged()
        if self.terminated is not None:
            raise self.terminated
        if self.state is State.STANDBY:
            self.asked.tell()
            raise self.not_owner("")

    def not_owner(self, what: str) -> SeqdedupeError:
        """That another sidecar owns the topic, with its address where that is known; and what comes of it."""
        if not self.owner_address:
            return error("NOT_OWNER", f"somebody else owns topic {self.name}{what}")
        message = f"the sidecar at {self.owner_address} owns topic {self.name}{what}"
        return error("NOT_OWNER", message, owner_address=self.owner_address)

    def check_knows_its_end(self) -> None:
        """Raises RECOVERING, NOT_OWNER or LOG_DAMAGED while nobody here can say where the topic ends."""
        if self.knows_its_end:
            return
        self.check_may_go_on()
        raise error(
            "RECOVERING",
            f"where topic {self.name} ends is not known yet: {self.why}",
            certain_index=self.readable_index,
        )


def damaged_topic(name: str, damage: SeqdedupeError) -> SeqdedupeError:
    """The final answer of a topic that is damaged."""
    if damage.reason == "NO_STATE":
        return error("NO_STATE", f"topic {name} cannot be served here: {damage.message}", topic=name)
    return error("LOG_DAMAGED", f"topic {name} is damaged: {damage}", hint=damage.hint, topic=name)
