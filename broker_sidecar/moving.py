"""Moving a topic of a cluster from this sidecar to another one."""

import asyncio
from typing import TYPE_CHECKING

from broker_sidecar import neighbours
from broker_sidecar.neighbours import Neighbours
from seqdedupe.address import SidecarAddress
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.log.pulsar.owner import owner_of
from seqdedupe.topic.publishing import Topic
from seqdedupe.topic.shielded import shielded
from seqdedupe.v1 import admin_pb2

if TYPE_CHECKING:
    from seqdedupe.log.pulsar.log import Shared

AWAY_SECONDS = 2 * neighbours.TAKE_SECONDS
"""From a topic that was given up. Another sidecar must serve it within half of that, and a client waits longer."""
POLL_SECONDS = 0.1


class Moves:
    """Those that are under way. They go on when whoever asked for them has gone."""

    def __init__(self) -> None:
        self._under_way: dict[str, asyncio.Task[str]] = {}

    async def move(self, topic: Topic, to: str, shared: "Shared", others: Neighbours) -> str:
        """Gives up a topic, unless it is to be where it is; answers at which address it is served then.

        Raises NOT_OWNER and why else it is not served here, INVALID_ADDRESS, MOVE_FAILED.
        """
        topic.check_serving()
        to = str(SidecarAddress.parse(to)) if to else ""
        if to == shared.address:
            return to
        if topic.name in self._under_way:
            raise error("MOVE_FAILED", f"topic {topic.name} is being moved already")
        return await shielded(self._under_way, topic.name, _move(topic, to, shared, others))


async def _move(topic: Topic, to: str, shared: "Shared", others: Neighbours) -> str:
    if to:
        await _check_can_have(topic, to, others)
    await topic.hand_over(to, AWAY_SECONDS)
    said = [f"nobody has taken it within {neighbours.TAKE_SECONDS:.0f} s"]
    try:
        async with asyncio.timeout(neighbours.TAKE_SECONDS):
            return await _taken(topic, to, shared, others, said)
    except (SeqdedupeError, TimeoutError) as e:
        why = "; ".join(said)
        raise error("MOVE_FAILED", f"topic {topic.name} was not moved, and is taken again here: {why}") from e
    finally:
        # Keeping away ends. If nobody has the topic it is taken back by that, else it is seen who has it.
        topic.wanted.set()


async def _check_can_have(topic: Topic, address: str, others: Neighbours) -> None:
    """Raises MOVE_FAILED unless the sidecar there knows this topic, and stands by."""
    try:
        known = await others.topic(address, topic.name)
    except SeqdedupeError as e:
        raise error("MOVE_FAILED", f"topic {topic.name} stays here: {e}", hint=e.hint) from e
    if known.incarnation != topic.incarnation:
        what = f"the sidecar at {address} has another topic of that name: is it in front of this cluster?"
        raise error("MOVE_FAILED", f"topic {topic.name} stays here: {what}")
    if known.state != admin_pb2.TOPIC_STATE_STANDBY:
        state = admin_pb2.TopicState.Name(known.state).removeprefix("TOPIC_STATE_")
        raise error("MOVE_FAILED", f"topic {topic.name} stays here: at {address} it is {state}: {known.why}")


async def _taken(topic: Topic, to: str, shared: "Shared", others: Neighbours, said: list[str]) -> str:
    """The address of the sidecar that serves the topic, when one does: the one at `to`, or (empty) whoever has it.

    Raises why the one at `to` does not; `said` ends with what was heard last.
    """
    while True:
        try:
            address = to or await _next_owner(topic.name, shared)
            await others.take(address, topic.name)
            return address
        except SeqdedupeError as e:
            said[1:] = [str(e)]
            # It may have tried just before the topic was given up. Of several, another one may have it in the end.
            if to and e.reason != "NOT_OWNER":
                raise
        await asyncio.sleep(POLL_SECONDS)


async def _next_owner(name: str, shared: "Shared") -> str:
    """The address of who has the topic, when another one does."""
    while (address := await owner_of(name, shared.admin)) in ("", shared.address):  # noqa: ASYNC110 (nobody tells)
        await asyncio.sleep(POLL_SECONDS)
    return address
