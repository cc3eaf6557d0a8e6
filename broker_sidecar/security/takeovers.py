"""Whose a producer name was before."""

MAX_OPENS = 100_000
"""Remembered, of all topics together: the newest."""


class Openers:
    """Who has opened sessions since the sidecar started. One call of Open gives many names one epoch."""

    def __init__(self) -> None:
        self._subjects: dict[tuple[int, int], str] = {}

    def opened(self, incarnation: int, epoch: int, subject: str) -> None:
        """A subject has opened names of a topic with this epoch."""
        if len(self._subjects) >= MAX_OPENS:
            del self._subjects[next(iter(self._subjects))]
        self._subjects[incarnation, epoch] = subject

    def of(self, incarnation: int, epoch: int) -> str | None:
        """Who has opened what has this epoch; None if that is not remembered."""
        return self._subjects.get((incarnation, epoch))
