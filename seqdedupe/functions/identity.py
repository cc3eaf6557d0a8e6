"""Who an input is: by what its outputs are known, however often it comes and whichever instance runs it."""

from typing import NamedTuple

from seqdedupe.entry_properties import Place
from seqdedupe.errors import InvalidRequestError, error
from seqdedupe.limits import MAX_NAME_BYTES, MAX_SEQUENCE_ID
from seqdedupe.names import new_producer_name, source_name

BATCH_INDEX_BITS = 20
"""Of a sequence ID: the place within a batched entry. The entry stands above them."""

MAX_ENTRY_ID = MAX_SEQUENCE_ID >> BATCH_INDEX_BITS

DEAD_LETTER = "dead-letter"

_LARGEST_NUMBER = 10**19 - 1
_MOST_OUTPUTS = 10**5 - 1
"""Stand for a ledger and an output's number that are not known yet: no name is longer."""


class Identity(NamedTuple):
    """An input's place in its order: `source` is the same for all inputs whose sequence IDs rise with that order."""

    source: str
    sequence_id: int

    def producer_name(self, k: int) -> str:
        """The name under which the k-th output for a topic is published."""
        return f"{self.source}/{k}"

    def of_dead_letter(self) -> "Identity":
        """That of the input's dead letter: names of outputs never are names of dead letters."""
        return Identity(f"{self.source}/{DEAD_LETTER}", self.sequence_id)


def check_names(function: str, topic: str) -> None:
    """Raises INVALID_FUNCTION if names of this function's outputs for inputs of this topic could become too long."""
    longest = f"{function}/{topic}/{_LARGEST_NUMBER}/{DEAD_LETTER}/{_MOST_OUTPUTS}"
    try:
        new_producer_name(longest)
    except InvalidRequestError as e:
        raise error(
            "INVALID_FUNCTION",
            f"outputs cannot be named after the function {function} and its input {topic}: {e.message}",
            hint=f"Shorten the function's name or the topic's: they have {MAX_NAME_BYTES} bytes together, less "
            f"{len(longest) - len(function) - len(topic)} for numbers.",
        ) from e


def by_message_id(function: str, topic: str, ledger_id: int, entry_id: int, batch_index: int) -> Identity:
    """By Pulsar's message ID, of a topic or a partition by its full name. `batch_index` is -1 where there is none.

    The ledger is part of the name: ledgers of a topic made anew are others, and rise within one. Raises
    INVALID_SEQUENCE_ID for an entry or a batch that is too large to be told apart.
    """
    if not 0 <= entry_id <= MAX_ENTRY_ID or batch_index >= 1 << BATCH_INDEX_BITS:
        raise error(
            "INVALID_SEQUENCE_ID",
            f"the message {ledger_id}:{entry_id}:{batch_index} of {topic} has no sequence ID: entries up to "
            f"{MAX_ENTRY_ID} and batches of {1 << BATCH_INDEX_BITS} messages are possible",
        )
    return Identity(source_name(function, topic, ledger_id), entry_id << BATCH_INDEX_BITS | max(batch_index, 0))


def by_index(function: str, topic: str, place: Place | None) -> Identity:
    """By the index that a sidecar gave the message. Raises INVALID_FUNCTION for one that no sidecar wrote."""
    if place is None or place.index < 0:
        raise error(
            "INVALID_FUNCTION",
            f"identity is 'index', but a message of {topic} was written by no sidecar: it has no index",
            hint="Use identity = 'message_id' for topics that others write to.",
        )
    return Identity(source_name(function, topic, place.owner.incarnation), place.index)
