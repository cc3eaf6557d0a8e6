"""What is on its way between clients and the process."""

from collections import deque
from dataclasses import dataclass, field

from seqdedupe.topic.frame import FrameReceipt, NumbersCache, Refusal
from tests.property.client import Frame, Session

Answer = FrameReceipt | Refusal


@dataclass(eq=False)
class Stream:
    """A publish stream: frames go one way in order, answers the other way. A broken one loses the answers.

    The process knows it by `cache` from its first frame on; `used` are the names that it has sent by then.
    """

    client: int
    frames: deque[Frame] = field(default_factory=deque)
    answers: deque[tuple[Frame, Answer]] = field(default_factory=deque)
    cache: NumbersCache | None = None
    used: set[str] = field(default_factory=set)
    is_broken: bool = False


@dataclass(eq=False)
class OpenRequest:
    """An Open on its way."""

    sessions: list[Session]
    epochs: list[int] | None


def shown(answer: Answer) -> str:
    """For a trace."""
    if isinstance(answer, Refusal):
        return f"{answer.error.reason}: {answer.error.message}"
    if answer.verdicts is None:
        return f"NotDup from index {answer.first_index}"
    verdicts = " ".join(["", "NotDup", "Dup", "Unknown"][verdict] for verdict in answer.verdicts.tolist())
    return f"{verdicts} from index {answer.first_index}"
