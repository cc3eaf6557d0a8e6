"""Why a topic cannot be read on after a position."""

from dataclasses import dataclass

from seqdedupe.client.client import TopicEnds
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.message_id import Position
from seqdedupe_spark import stock
from seqdedupe_spark.stock import StockEnds

Ends = TopicEnds | StockEnds
"""What a topic holds: one with indexes, or one that no sidecar writes."""

_GO_ON = "To go on with what is left set failOnDataLoss to false (a reader job: --no-fail-on-data-loss)."


@dataclass(frozen=True)
class Loss:
    """Why a topic cannot be read on after a position.

    `next` is the position after which to go on with what is left; None if the topic is gone, or if going on would lead
    back: a topic that ends before the position counts up to it again, with other messages under the same indexes.
    """

    topic: str
    next: Position | None
    reason: str
    message: str

    @property
    def may_be_accepted(self) -> bool:
        """Whether `failOnDataLoss=false` allows to go on. It does not allow to go back."""
        return self.next is not None or self.reason == "TOPIC_NOT_FOUND"

    def error(self) -> SeqdedupeError:
        """To be raised where nothing may be lost."""
        return error(self.reason, self.message, hint=_GO_ON if self.may_be_accepted else None, topic=self.topic)


def earliest(topic_ends: Ends) -> Position:
    """The position before the first message that is left."""
    return Position.before(topic_ends.last.incarnation, topic_ends.first_index)


def find_loss(topic: str, position: Position, found: Ends | None) -> Loss | None:
    """Why a topic with these ends cannot be read on after a position; None if it can."""
    if found is None:
        message = f"{topic} was deleted; what it held after index {position.index} is gone"
        return Loss(topic, None, "TOPIC_NOT_FOUND", message)
    if isinstance(found, StockEnds):
        return _find_loss_of_entries(topic, position, found)
    first, last = found
    if last.incarnation != position.incarnation:
        message = (
            f"{topic} was made anew: its incarnation is {last.incarnation}, the position is of {position.incarnation}; "
            f"what it held after index {position.index} is gone, and it begins with index {first} now"
        )
        return Loss(topic, earliest(found), "POSITION_OF_ANOTHER_INCARNATION", message)
    if last.index < position.index:
        message = f"{topic} ends with index {last.index}: it lacks indexes {last.index + 1} to {position.index}"
        return Loss(topic, None, "POSITION_AFTER_END", message)
    if last.index == position.index and not last.is_same(position):
        message = f"{topic} ends with {last} now, which is not the message of the position {position}"
        return Loss(topic, None, "POSITION_DIVERGED", message)
    if position.index + 1 < first:
        gone = first - position.index - 1
        message = f"{topic} has lost {gone} messages to retention: indexes {position.index + 1} to {first - 1}"
        return Loss(topic, earliest(found), "POSITION_TRIMMED", message)
    return None


def _find_loss_of_entries(topic: str, position: Position, found: StockEnds) -> Loss | None:
    """The same for a topic that no sidecar writes."""
    if position.incarnation != stock.STOCK:
        message = (
            f"no sidecar writes {topic} now, and the position {position} is of a topic that one wrote; "
            f"what that held after index {position.index} is gone"
        )
        return Loss(topic, earliest(found), "POSITION_OF_ANOTHER_INCARNATION", message)
    if found.last.index < position.index:
        message = f"{topic} ends with {found.last} now, before the position {position}"
        return Loss(topic, None, "POSITION_AFTER_END", message)
    if found.entries_up_to(position) is None:
        message = (
            f"{topic} was read up to {stock.entry_before(position)}, which it does not hold any more: what followed is "
            f"gone too, as far as it stood before ledger {found.first_ledger}, with which it begins now. Retention has "
            "removed it, or the topic was made anew"
        )
        return Loss(topic, earliest(found), "POSITION_TRIMMED", message)
    return None
