"""News for all that wait for it."""

import asyncio


class Broadcast:
    """Wakes all that wait, once. Whoever is cancelled while waiting leaves nothing behind."""

    def __init__(self) -> None:
        # A dict, for its order: they go on in the order in which they came.
        self._waiting: dict[asyncio.Future[None], None] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def tell(self) -> None:
        """There is news."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, {}
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def wait(self) -> None:
        """Returns at the next news."""
        future = asyncio.get_running_loop().create_future()
        self._waiting[future] = None
        try:
            await future
        finally:
            self._waiting.pop(future, None)
