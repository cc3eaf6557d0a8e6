"""Streaming queries in tests, on a machine that has other things to do."""

from collections.abc import Callable
from typing import Any

from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

TRIES = 5

NEVER_CONNECTED = "Python worker failed to connect back"
"""Spark gives the process with a query's source 10 seconds to start, no matter what the machine does meanwhile. There
is no setting for it, and nothing was read by then."""


def run_stream(
    writer: DataStreamWriter, wait: Callable[[StreamingQuery], Any] = StreamingQuery.awaitTermination
) -> StreamingQuery:
    """Starts a query, again if that is how it ends, and waits for it: to its end, unless `wait` says something else."""
    tries = 0
    while True:
        tries += 1
        query = writer.start()
        try:
            wait(query)
        except StreamingQueryException as e:
            if NEVER_CONNECTED not in str(e) or tries == TRIES:
                raise
        else:
            return query
