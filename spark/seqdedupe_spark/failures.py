"""Errors that cross Spark: what a worker raised, raised again on the driver."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.errors import PySparkException

from seqdedupe.errors import REASONS, error

_TYPED_ERROR = re.compile(r"seqdedupe\.errors\.\w+: (.*) \[([A-Z_]+)\]")


@contextmanager
def typed_failures() -> Iterator[None]:
    """Raises the `SeqdedupeError` that failed a task, which Spark gives as the text of a traceback only."""
    try:
        yield
    except PySparkException as e:
        found = _TYPED_ERROR.search(str(e))
        if found is None or found[2] not in REASONS:
            raise
        raise error(found[2], found[1]) from e


def first_line(text: str) -> str:
    """What Spark says, in a line: a plan or a traceback may follow it, and a line break stand before it."""
    return text.strip().partition("\n")[0]
