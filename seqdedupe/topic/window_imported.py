"""What was imported into a topic's window of deduplication IDs: whether it is wanted, and there."""

import asyncio
import logging
from collections.abc import Callable

from seqdedupe.core.id_runs import Imported
from seqdedupe.errors import error
from seqdedupe.store.imported import FIRST_RUN
from seqdedupe.topic.policy import Policy

logger = logging.getLogger("seqdedupe.topic")


class WindowImported:
    """`policy` gives what is in force. `on_expired` is told when nothing of what was imported counts any more."""

    def __init__(
        self,
        topic: str,
        there: Imported | None,
        policy: Callable[[], Policy],
        on_expired: Callable[[], None],
    ) -> None:
        self.there = there
        """What the store has. Only if the policy names it, it counts."""
        self.is_under_way = False
        """Whether the log may have a policy that names it, which is not in force yet."""
        self.changing = asyncio.Lock()
        """Held by whoever changes what the store has, and then the policy."""
        self._topic = topic
        self._policy = policy
        self._on_expired = on_expired
        self._next_number = FIRST_RUN if there is None else there.run.number + 1

    def take_number(self) -> int:
        """That of a run that is begun now. None has it twice: what names the first one would be taken for naming the
        second, whose IDs are hashed with another key."""
        self._next_number += 1
        return self._next_number - 1

    @property
    def in_force(self) -> Imported | None:
        """What counts; None if nothing was imported, or it is missing."""
        wanted = self._policy().imported
        if wanted is None or self.there is None or self.there.checksum != wanted.checksum:
            return None
        return self.there

    @property
    def is_missing(self) -> bool:
        """Whether it was imported, and the store lacks it."""
        return self._policy().imported is not None and self.in_force is None

    @property
    def memory_bytes(self) -> int:
        return 0 if self.there is None else self.there.run.memory_bytes

    def settled(self) -> None:
        """What the log has is in force."""
        self.is_under_way = False

    def say_if_missing(self) -> None:
        """An operator has to know."""
        wanted = self._policy().imported
        if wanted is not None and self.is_missing:
            logger.error(
                "topic %s: the deduplication IDs that were imported into it are not in the store: nothing is taken "
                "until the same window is imported again (the file whose SHA-256 is %s)",
                self._topic,
                wanted.checksum.hex(),
            )

    def to_look_into(self, since_ms: int) -> Imported | None:
        """What a verdict needs that counts IDs published after this time; None if that is nothing.

        Raises WINDOW_MISSING, and RECOVERING while an import is not durable yet.
        """
        wanted = self._policy().imported
        if self.is_under_way:
            raise error("RECOVERING", f"topic {self._topic} takes no messages now: a window is being imported")
        if wanted is None:
            return None
        if wanted.last_time_ms <= since_ms:
            self._on_expired()
            return None
        if self.is_missing:
            raise error(
                "WINDOW_MISSING",
                f"topic {self._topic} has lost the {wanted.ids} deduplication IDs that were imported into it",
                ids=wanted.ids,
                checksum=wanted.checksum.hex(),
            )
        return self.there
