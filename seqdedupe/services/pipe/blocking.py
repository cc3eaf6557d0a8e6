"""The pipe for threads: `Pipe(client, …).run()` with a client of `seqdedupe.client.blocking`."""

from collections.abc import Callable

from seqdedupe.client.blocking import Client
from seqdedupe.client.blocking._sync import AnyCursor, on_loop
from seqdedupe.services.pipe.lane import CallerThread
from seqdedupe.services.pipe.outputs import Function
from seqdedupe.services.pipe.pipe import Pipe as AsyncPipe


class Pipe:
    """As `seqdedupe.services.pipe.Pipe`, with a `run` that blocks, and calls the function in the thread that it is
    called in."""

    def __init__(
        self,
        client: Client,
        source: str,
        target: str,
        function: Function,
        *,
        name: str,
        cursor: Callable[[str], AnyCursor] | None = None,
    ) -> None:
        of = None if cursor is None else lambda topic: on_loop(cursor(topic))
        self._pipe = AsyncPipe(client.on_loop, source, target, function, name=name, cursor=of)

    @property
    def counts(self) -> dict[str, int]:
        """See `seqdedupe.services.pipe.Pipe.counts`."""
        return self._pipe.counts

    def stop(self) -> None:
        """See `seqdedupe.services.pipe.Pipe.stop`."""
        self._pipe.stop()

    def run(self, *, follow: bool = False) -> None:
        """See `seqdedupe.services.pipe.Pipe.run`. An exception of a signal handler, as Ctrl-C's, ends it."""
        caller = CallerThread()
        caller.run(lambda: self._pipe.run(follow=follow, executor=caller))
