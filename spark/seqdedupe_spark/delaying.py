"""Triggers that wait for more messages: `minOffsetsPerTrigger` and `maxTriggerDelay`, as in Kafka's connector."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Least:
    """What is worth a trigger: so many messages, or any that are there so long after the trigger before."""

    messages: int
    delay_seconds: float


@dataclass
class Delaying:
    """Which triggers wait. That is not in the checkpoint: the first trigger of a query that is started again takes what
    there is."""

    least: Least
    taken_at_seconds: float = -math.inf
    """When a trigger took messages last."""

    def waits(self, messages: int, now_seconds: float) -> bool:
        """Whether a trigger for which there are so many messages leaves them; otherwise it is said to take them."""
        if messages < self.least.messages and now_seconds - self.taken_at_seconds < self.least.delay_seconds:
            return True
        if messages:
            self.taken_at_seconds = now_seconds
        return False
