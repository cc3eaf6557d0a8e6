"""Trying again until it works."""

import asyncio
from collections.abc import Awaitable, Callable

FIRST_DELAY_SECONDS = 0.05
LONGEST_DELAY_SECONDS = 2.0


async def again_until(
    done: Callable[[], Awaitable[bool]], pause: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> None:
    """Waits and tries, with growing delays, until it is done. It was tried once already.

    `pause` is given the seconds that should pass before it is tried again.
    """
    delay = FIRST_DELAY_SECONDS
    await pause(delay)
    while not await done():
        delay = min(2 * delay, LONGEST_DELAY_SECONDS)
        await pause(delay)
