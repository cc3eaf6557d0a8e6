"""Trying again until it works."""

import asyncio
from collections.abc import Awaitable, Callable

FIRST_DELAY_SECONDS = 0.05
LONGEST_DELAY_SECONDS = 2.0


async def again_until(done: Callable[[], Awaitable[bool]]) -> None:
    """Waits and tries, with growing delays, until it is done. It was tried once already."""
    delay = FIRST_DELAY_SECONDS
    await asyncio.sleep(delay)
    while not await done():
        delay = min(2 * delay, LONGEST_DELAY_SECONDS)
        await asyncio.sleep(delay)
