"""How messages are iterated over in threads. What was received already needs no hop to the loop's thread."""

from collections.abc import Iterator
from types import TracebackType
from typing import Self

from seqdedupe.client import message as _message
from seqdedupe.client.blocking.loop import run
from seqdedupe.client.message import Message, StoredBatch


class Messages:
    """What readers for threads have in common."""

    on_loop: _message.Messages

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def topic(self) -> str:
        return self.on_loop.topic

    def __iter__(self) -> Iterator[Message]:
        return self

    def __next__(self) -> Message:
        while (message := self.on_loop.next_in_hand()) is None:
            if not self._fetch():
                raise StopIteration
        return message

    def _fetch(self) -> bool:
        # The hop costs more than the batch.
        return self.on_loop.take_record() or run(self.on_loop.fetch)

    def batches(self) -> Iterator[StoredBatch]:
        """Whole batches as stored; the first and last, of each partition, are cut to what was asked for."""
        while (stored := self.next_batch()) is not None:
            yield stored

    def next_batch(self) -> StoredBatch | None:
        """The next whole batch, or what single messages have left of one; None at the end."""
        return self.on_loop.rest_in_hand() if self.on_loop.has_in_hand() or self._fetch() else None

    def close(self) -> None:
        """Ends it; another thread that waits in it gets the end."""
        run(self.on_loop.close)
