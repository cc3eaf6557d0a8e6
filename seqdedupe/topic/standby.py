"""What a standby does while another sidecar owns a topic: it reads what that one appends, to know all of it when the
log is free."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from seqdedupe.errors import DamagedError, UnavailableError
from seqdedupe.topic.keeping_away import KeepingAway
from seqdedupe.topic.logged import LoggedTopic
from seqdedupe.topic.recovery import Merge, replay_from

logger = logging.getLogger("seqdedupe.topic")

TRY_AGAIN_SECONDS = 1.0


async def until_worth_trying(topic: LoggedTopic, follow: Merge | None, keeping_away: KeepingAway) -> None:
    """Returns when it may be tried to take the log over: where its owner is followed, when nobody owns it; else
    (None) when somebody wants the topic here."""
    if follow is not None:
        await until_free(topic, follow, keeping_away)
    else:
        await asyncio.sleep(keeping_away.left_seconds)
        await topic.asked.wait()


async def until_free(topic: LoggedTopic, merge: Merge, keeping_away: KeepingAway) -> None:
    """Returns when it need not be kept away any more from a log that nobody seems to own.

    What is in the log by then is merged, but for what came just now.
    """
    tailing = asyncio.ensure_future(_tail(topic, merge))
    try:
        await asyncio.sleep(keeping_away.left_seconds)
        await topic.log.wait_until_free()
    finally:
        tailing.cancel()
        await asyncio.wait([tailing])
        if not tailing.cancelled() and (e := tailing.exception()) is not None:
            logger.error("the log of topic %s was not read on", topic.name, exc_info=e)


async def first_of(*works: Coroutine[Any, Any, object]) -> None:
    """Returns when one of them has ended, and no other goes on. Raises what that one raises."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


async def _tail(topic: LoggedTopic, merge: Merge) -> None:
    """Reads and merges what the owner appends, for ever. What cannot be read now is tried again."""
    replay = None
    while True:
        try:
            replay = replay or replay_from(topic.log, topic.confirmed_index, merge, topic.last_ownership)
            await replay.run()
            await topic.log.wait_for_more()
        except DamagedError as e:
            # Whoever takes the log over looks at it again, and says so for good.
            logger.error("topic %s is read no further by this standby: %s", topic.name, e)
            return
        except (UnavailableError, OSError) as e:
            logger.warning("the log of topic %s cannot be read on now: %s", topic.name, e)
            await asyncio.sleep(TRY_AGAIN_SECONDS)
