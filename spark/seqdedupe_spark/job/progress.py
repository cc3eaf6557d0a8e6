"""What a job shows of itself while it runs: one line, rewritten in place on a terminal, else a new one now and then."""

import time
from typing import TextIO

from seqdedupe_spark.job.rounds import Round

LINE_SECONDS = 5.0
"""How often a line is printed where it cannot be rewritten."""

_RATE_SECONDS = 10.0
"""Over how long the rate is taken, about."""


class Progress:
    """The progress line of a job, on `stream`. Rows are those written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._began = self._since = time.monotonic()
        self._rows = self._rows_then = 0
        self._shown = 0.0
        self._width = 0

    def show(self, done: Round) -> None:
        """To be called after every round."""
        self._rows += done.written
        now = time.monotonic()
        line = f"{self._rows:,} rows, {self._rate(now):,.0f} rows/s, lag {done.lag:,}"
        if self._is_terminal:
            self._stream.write("\r" + line.ljust(self._width))
            self._width = len(line)
        elif now - self._shown >= LINE_SECONDS:
            self._shown = now
            self._stream.write(line + "\n")
        self._stream.flush()

    def _rate(self, now: float) -> float:
        rate = (self._rows - self._rows_then) / max(now - self._since, 1e-9)
        if now - self._since >= _RATE_SECONDS:
            self._since, self._rows_then = now, self._rows
        return rate

    def close(self) -> None:
        """Ends the line that was rewritten."""
        if self._width:
            self._stream.write("\n")
            self._stream.flush()


def summary(total: Round, seconds: float) -> dict[str, object]:
    """What a run has done, as JSON has it. The form is documented: keep it stable."""
    return {
        "read": total.read,
        "written": total.written,
        "duplicates": total.duplicates,
        "dead_letters": total.dead_letters,
        "lag": total.lag if total.has_looked else None,
        "seconds": round(seconds, 3),
        "topics": {
            topic: {"position": str(standing.stored.position), "epoch": standing.stored.epoch, "lag": standing.lag}
            for topic, standing in total.standings.items()
        },
    }


def text(total: Round, seconds: float) -> str:
    """The same, for a person."""
    if not total.has_looked:
        return f"nothing was read in {seconds:.1f} s: where the topics stand could not be found out"
    dropped = f", {total.duplicates:,} duplicates dropped" if total.duplicates else ""
    if total.dead_letters:
        dropped += f", {total.dead_letters:,} dead letters"
    return (
        f"{total.read:,} messages read{dropped}, {total.written:,} rows written in {seconds:.1f} s; "
        f"{total.lag:,} left to read in {len(total.standings)} topics"
    )
