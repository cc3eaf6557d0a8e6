"""A topic that is there and cannot be opened."""

from dataclasses import dataclass

from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.store.topics import TopicRecord
from seqdedupe.topic.state import State, damaged_topic


@dataclass(slots=True)
class Closed:
    """A topic whose log or snapshot could not be opened: it will be tried again, or is DAMAGED."""

    record: TopicRecord
    why: SeqdedupeError
    state: State = State.RECOVERING

    def error(self) -> SeqdedupeError:
        """What whoever asks for the topic is told."""
        if self.state is State.DAMAGED:
            return damaged_topic(self.record.name, self.why)
        return error("RECOVERING", f"topic {self.record.name} cannot be opened now: {self.why.message}")
