"""The reader job's transformation: a flight in a message becomes a row of the table."""

import json

import pyarrow as pa

from demo.flights import header

SCHEMA = pa.schema({"producer": pa.string(), "number": pa.int64()} | dict.fromkeys(header(), pa.string()))
"""The table's columns: who published the flight, its record number in the file, and its fields."""


def rows(messages: pa.RecordBatch) -> pa.RecordBatch:
    """The rows of these messages. Each depends on its own message alone."""
    flights = [json.loads(payload) for payload in messages["value"].to_pylist()]
    columns = [messages["__producerName"], messages["__sequenceId"]]
    columns += [pa.array([flight[name] for flight in flights], pa.string()) for name in SCHEMA.names[2:]]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
