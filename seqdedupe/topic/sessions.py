"""Who owns a producer name: epochs, given by Open.

An epoch is `term << 32 | n`, where n counts the topic's opens in that term. The newest owns the name. Safety does not
rest on epochs (watermark and link give it); they keep two processes with one name from fighting for ever.
"""

from seqdedupe.core.producers import Producers
from seqdedupe.core.rule import EPOCH
from seqdedupe.errors import error
from seqdedupe.limits import MAX_OPEN_NAMES
from seqdedupe.names import new_producer_name, producer_name

_TERM_SHIFT = 32
OPENS_PER_TERM = 2**_TERM_SHIFT - 1


def can_have_been_given(epoch: int) -> bool:
    """Whether any topic can have given this epoch: terms and opens are counted from 1."""
    return epoch > 1 << _TERM_SHIFT


class Sessions:
    """The sessions of one topic in the term of its current owner."""

    def __init__(self, producers: Producers) -> None:
        self._producers = producers
        self._term = 0
        self._opens = 0

    def begin_term(self, term: int) -> None:
        """The topic has a new owner."""
        self._term, self._opens = term, 0

    def open(self, names: list[str], epochs: list[int] | None) -> tuple[list[int], list[int]]:
        """Starts new sessions, or resumes those of the given epochs: all of them, or none if an error is raised.

        Returns the producers' numbers and their epochs. Raises INVALID_NAME, INVALID_REQUEST, INVALID_EPOCH, FENCED.
        """
        encoded = [producer_name(name) for name in names]
        if not 1 <= len(names) <= MAX_OPEN_NAMES or len(set(encoded)) < len(names):
            raise error("INVALID_NAME", f"Open takes 1 to {MAX_OPEN_NAMES} producer names, each once")
        if epochs is None:
            epochs = [self._next_epoch()] * len(names)
        else:
            self._check_resumed(encoded, epochs)
        for shown, name in zip(names, encoded, strict=True):
            if name not in self._producers:
                new_producer_name(shown)
        numbers = [self._producers.add(name) for name in encoded]
        for number, epoch in zip(numbers, epochs, strict=True):
            if self._producers.numbers[number, EPOCH] != epoch:
                self._producers.set_epoch(number, epoch)
        return numbers, epochs

    def _next_epoch(self) -> int:
        if self._opens >= OPENS_PER_TERM:
            raise error("INTERNAL", f"the topic was opened {self._opens} times in one term: restart the sidecar")
        self._opens += 1
        return self._term << _TERM_SHIFT | self._opens

    def _check_resumed(self, names: list[bytes], epochs: list[int]) -> None:
        if len(epochs) != len(names):
            raise error("INVALID_REQUEST", f"epochs has {len(epochs)} values for {len(names)} producer names")
        newest = self._term << _TERM_SHIFT | self._opens
        for name, epoch in zip(names, epochs, strict=True):
            number = self._producers.number(name)
            current = 0 if number is None else int(self._producers.numbers[number, EPOCH])
            shown = name.decode()
            # Each term begins with n = 0, so an epoch of an earlier term is one that may have been given.
            if not can_have_been_given(epoch) or epoch > newest:
                raise error(
                    "INVALID_EPOCH",
                    f"this topic never gave the epoch {epoch} with which {shown!r} resumes",
                    producer_name=shown,
                    epoch=epoch,
                )
            if epoch < current:
                raise error(
                    "FENCED",
                    f"producer {shown!r} has been opened by another session: its epoch is {current}, not {epoch}",
                    producer_name=shown,
                    epoch=epoch,
                    current_epoch=current,
                )
