"""A topic that is there and cannot be opened."""

from dataclasses import dataclass

from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.store.topics import TopicRecord
from seqdedupe.topic.base import State, damaged_topic


@dataclass(slots=True)
class Closed:
    """A topic whose log or snapshot could not be opened: it will be tried again, or is DAMAGED."""

    record: TopicRecord
    why: SeqdedupeError
    state: State = State.RECOVERING
    owner_address: str = ""
    """Of the sidecar that owns it and serves, while this one has NO_STATE."""
    note: str = ""
    """What was tried, and is tried again."""

    @property
    def told(self) -> SeqdedupeError:
        """Why, with what was tried."""
        return error(self.why.reason, f"{self.why.message}; {self.note}") if self.note else self.why

    def error(self) -> SeqdedupeError:
        """What whoever asks for the topic is told."""
        if self.why.reason == "NOT_OWNER":
            why, owner = f"topic {self.record.name}: {self.why.message}", self.why.numbers.get("owner_address", "")
            return error("NOT_OWNER", why, hint=self.why.hint, owner_address=owner)
        if self.owner_address:
            why = f"the sidecar at {self.owner_address} owns topic {self.record.name}, of which this one has no state"
            return error("NOT_OWNER", why, owner_address=self.owner_address)
        if self.state is State.DAMAGED:
            return damaged_topic(self.record.name, self.told)
        return error("RECOVERING", f"topic {self.record.name} cannot be opened now: {self.why.message}")
