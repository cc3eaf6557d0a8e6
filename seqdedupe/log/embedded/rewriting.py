"""Writing a log anew from what was read of another one, with the publish times of that one."""

from pathlib import Path

from seqdedupe.errors import error
from seqdedupe.format import records
from seqdedupe.log.embedded.logs import DEFAULT_SEGMENT_BYTES
from seqdedupe.log.embedded.segment import Identity, Segment
from seqdedupe.log.embedded.tail import Tail
from seqdedupe.log.embedded.writer import Append, FatalError, Opening, Writer


class NewLog:
    """An empty log, which is written from its first record to its last. Nobody else has it.

    Made on an event loop, though nothing waits there. Everything raises LOG_REFUSED if the log cannot be written:
    then what there is of it is of no use.
    """

    def __init__(self, folder: Path, identity: Identity, term: int, random_bytes: bytes) -> None:
        tail = Tail(Segment(folder, identity, 0, 0), 0, 0, 0, 0, records.END)
        self._writer = Writer(folder, tail, DEFAULT_SEGMENT_BYTES, on_news=lambda news: None, on_late=lambda late: None)
        self._publish_time_ms = 0
        self.next_index = 0
        self._opening = self._open(term, random_bytes)

    def append(self, appends: list[Append], publish_time_ms: int) -> None:
        """Batches, and control records, with that publish time, or with the one before where it would go down."""
        self._publish_time_ms = publish_time_ms
        for append in appends:
            self._opening.append(append)
        left = len(appends)
        while left > 0:
            left -= self._write()

    def finish(self, term: int, token: bytes) -> None:
        """Durable on return. A last marker, of a higher term, says that all before it is."""
        try:
            self._writer.sync()
            self._opening = self._open(term, token)
            self._writer.sync()
        except FatalError as e:
            raise error("LOG_REFUSED", str(e)) from e
        self._writer.close()

    def _open(self, term: int, token: bytes) -> Opening:
        self._opening = Opening(self._writer, lambda opening: None, term, token, lambda outcome: None)
        self._write()
        return self._opening

    def _write(self) -> int:
        """Writes some of what was handed over; how many appends. The first time, the marker."""
        try:
            written = self._writer.write(self._opening, self._publish_time_ms)
        except FatalError as e:
            raise error("LOG_REFUSED", str(e)) from e
        if written is None or written.failure is not None:
            raise error("LOG_REFUSED", written.why if written else "the log takes nothing")
        self._writer.forget_written()
        self.next_index = written.next_index
        return len(written.runs)
