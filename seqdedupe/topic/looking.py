"""Looking into a cluster for what others have made: one look for all who ask, and not all the time."""

import asyncio
from collections.abc import Awaitable, Callable

APART_SECONDS = 0.1
"""From the end of a look to the beginning of the next one, which is for all who have asked meanwhile. At least as long
as the look took, so that who asks for what is not there costs a cluster half of the time at most."""


class Looking:
    """`look` never runs twice at once, and goes on when whoever asked for it is cancelled."""

    def __init__(self, look: Callable[[], Awaitable[None]]) -> None:
        self._look = look
        self._one_at_a_time = asyncio.Lock()
        self._next: asyncio.Task[None] | None = None
        """It has not begun yet."""
        self._not_before = 0.0

    async def once(self) -> None:
        """Returns when a look has ended that began after this was called. Raises what it raises."""
        if self._next is None:
            self._next = asyncio.ensure_future(self._run())
            # Whoever asked may have gone.
            self._next.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._next)

    async def _run(self) -> None:
        now = asyncio.get_running_loop().time
        async with self._one_at_a_time:
            await asyncio.sleep(self._not_before - now())
            # Whoever asks from now on may have asked too late for it.
            self._next, began = None, now()
            try:
                await self._look()
            finally:
                self._not_before = now() + max(APART_SECONDS, now() - began)
