"""The readers for threads."""

from collections.abc import Iterator
from types import TracebackType
from typing import Self

from seqdedupe.client import reader as _reader
from seqdedupe.client.blocking.cursor import AnyCursor, on_loop
from seqdedupe.client.blocking.loop import run
from seqdedupe.client.reader import PartitionedPosition, Start
from seqdedupe.client.route import OnWaiting, Sidecars
from seqdedupe.client.stored import Message, Messages, StoredBatch
from seqdedupe.message_id import Position


class _Messages:
    """What readers for threads have in common."""

    _reader: Messages

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def topic(self) -> str:
        return self._reader.topic

    def __iter__(self) -> Iterator[Message]:
        return self

    def __next__(self) -> Message:
        while (message := self._reader.next_in_hand()) is None:
            if not self._fetch():
                raise StopIteration
        return message

    def _fetch(self) -> bool:
        # What was received already needs no hop to the loop's thread, which costs more than the batch.
        return self._reader.take_record() or run(self._reader.fetch)

    def batches(self) -> Iterator[StoredBatch]:
        """Whole batches as stored; the first and last are cut to what was asked for."""
        while (stored := self.next_batch()) is not None:
            yield stored

    def next_batch(self) -> StoredBatch | None:
        """The next whole batch, or what single messages have left of one; None at the end."""
        return self._reader.rest_in_hand() if self._reader.has_in_hand() or self._fetch() else None

    def close(self) -> None:
        """Ends it; another thread that waits in it gets the end."""
        run(self._reader.close)


class Reader(_Messages):
    """As `seqdedupe.client.Reader`, with calls that block: `for message in reader`. It belongs to one thread.

    `on_waiting` is called from another thread, that of all clients: it must not block.
    """

    def __init__(
        self,
        sidecars: Sidecars,
        topic: str,
        start: Start,
        follow: bool,
        stop_index: int | None,
        skip_damaged: bool,
        on_waiting: OnWaiting | None,
        cursor: AnyCursor | None,
    ) -> None:
        self._reader: _reader.Reader = _reader.Reader(
            sidecars,
            topic,
            start,
            follow=follow,
            stop_index=stop_index,
            skip_damaged=skip_damaged,
            on_waiting=on_waiting,
            cursor=None if cursor is None else on_loop(cursor),
        )

    def save_position(self) -> None:
        """See `seqdedupe.client.Reader.save_position`."""
        run(self._reader.save_position)

    @property
    def position(self) -> Position | None:
        """After the last message handed out; before the first, where it was told to start if that is known."""
        return self._reader.position

    @property
    def skipped(self) -> list[range]:
        """With `skip_damaged`, the indexes of messages that were passed over, in order."""
        return self._reader.skipped


class PartitionedReader(_Messages):
    """As `seqdedupe.client.PartitionedReader`, with calls that block. It belongs to one thread."""

    def __init__(self, reader: _reader.PartitionedReader) -> None:
        self._reader: _reader.PartitionedReader = reader

    @property
    def position(self) -> PartitionedPosition | None:
        """After the last message handed out of each partition; None before the first call that reads, unless it was
        told where to start."""
        return self._reader.position

    @property
    def skipped(self) -> dict[int, list[range]]:
        """With `skip_damaged`, by partition the indexes of messages that were passed over, in order."""
        return self._reader.skipped
