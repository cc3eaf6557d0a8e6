"""What a sidecar does while another one owns a topic: a standby reads what that one appends, to know all of it when the
log is free; any other does so now and then."""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from seqdedupe.errors import DamagedError, UnavailableError
from seqdedupe.topic.keeping_away import KeepingAway
from seqdedupe.topic.logged import LoggedTopic
from seqdedupe.topic.recovery import Merge, replay_from

logger = logging.getLogger("seqdedupe.topic")

TRY_AGAIN_SECONDS = 1.0
CATCH_UP_SECONDS = 300.0
"""What a sidecar does not know keeps the log's beginning from going: its snapshots say from where it needs the log."""


async def until_free(topic: LoggedTopic, merge: Merge, keeping_away: KeepingAway) -> None:
    """Returns when it need not be kept away any more from a log that nobody seems to own.

    What is in the log by then is merged, but for what came just now.
    """
    async with _beside(topic, _tail(topic, merge)):
        await asyncio.sleep(keeping_away.left_seconds)
        await topic.log.wait_until_free()


async def until_asked(topic: LoggedTopic, merge: Merge, keeping_away: KeepingAway) -> None:
    """Returns when it need not be kept away any more and somebody asks for the topic, whoever owns it.

    What is in the log by then is merged, but for what came in the last CATCH_UP_SECONDS.
    """
    async with _beside(topic, _catch_up(topic, merge)):
        await asyncio.sleep(keeping_away.left_seconds)
        await topic.asked.wait()


@asynccontextmanager
async def _beside(topic: LoggedTopic, reading: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    task = asyncio.ensure_future(reading)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled() and (e := task.exception()) is not None:
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


async def _catch_up(topic: LoggedTopic, merge: Merge) -> None:
    """Reads and merges what the owner has appended, again and again."""
    while True:
        await asyncio.sleep(CATCH_UP_SECONDS)
        await _tail(topic, merge, until_end=True)


async def _tail(topic: LoggedTopic, merge: Merge, *, until_end: bool = False) -> None:
    """Reads and merges what the owner appends, for ever or once. What cannot be read now is tried again."""
    replay = None
    while True:
        try:
            replay = replay or replay_from(topic.log, topic.confirmed_index, merge, topic.last_ownership)
            await replay.run()
            if until_end:
                return
            await topic.log.wait_for_more()
        except DamagedError as e:
            # Whoever takes the log over looks at it again, and says so for good.
            logger.error("topic %s is read no further by this standby: %s", topic.name, e)
            if e.reason == "NO_STATE":
                # Not when its owner is gone, who alone has what is missing here.
                topic.wanted.set()
            return
        except (UnavailableError, OSError) as e:
            logger.warning("the log of topic %s cannot be read on now: %s", topic.name, e)
            await asyncio.sleep(TRY_AGAIN_SECONDS)
