"""Whose a producer name was before."""

from collections import defaultdict, deque

MAX_OPENS = 100_000
"""Remembered, of all topics together. Beyond that, the subject with the most loses its oldest: nobody who opens again
and again has what others opened forgotten."""


class Openers:
    """Who has opened sessions since the sidecar started. One call of Open gives many names one epoch."""

    def __init__(self) -> None:
        self._subjects: dict[tuple[int, int], str] = {}
        self._opens: defaultdict[str, deque[tuple[int, int]]] = defaultdict(deque)
        """Of each subject, the oldest first."""

    def opened(self, incarnation: int, epoch: int, subject: str) -> None:
        """A subject has opened names of a topic with this epoch."""
        if len(self._subjects) >= MAX_OPENS:
            most = max(self._opens, key=lambda one: len(self._opens[one]))
            oldest = self._opens[most].popleft()
            self._subjects.pop(oldest, None)
            if not self._opens[most]:
                del self._opens[most]
        self._subjects[incarnation, epoch] = subject
        self._opens[subject].append((incarnation, epoch))

    def of(self, incarnation: int, epoch: int) -> str | None:
        """Who has opened what has this epoch; None if that is not remembered."""
        return self._subjects.get((incarnation, epoch))
