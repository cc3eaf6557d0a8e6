"""A store that keeps rows and positions in one JSON file. It passes the suite that every store must pass."""

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from seqdedupe.errors import error
from seqdedupe.message_id import Position
from seqdedupe_spark.stores.contract import (
    Advance,
    Beside,
    Binding,
    Column,
    OutputStore,
    Stored,
    check_replacement,
    check_schema,
    check_table,
)


class JsonStore(OutputStore):
    """Rows and positions in one JSON file: for a little output of simple types."""

    is_local = True

    def __init__(self, path: Path) -> None:
        self._path = path

    def close(self) -> None:
        pass

    def bind(self, job: str, binding: Binding) -> Binding:
        with self._transaction() as state:
            return Binding(*state["jobs"].setdefault(job, list(binding)))

    def has_table(self, table: str) -> bool:
        with self._transaction() as state:
            return table in state["tables"]

    def prepare(self, table: str, schema: pa.Schema) -> None:
        check_schema(schema)
        with self._transaction() as state:
            columns = {field.name: str(field.type) for field in schema}
            state["tables"].setdefault(table, {"columns": columns, "rows": []})
            check_columns(state, table, schema)

    def positions(self, job: str) -> dict[str, Stored]:
        with self._transaction() as state:
            return {topic: decode(stored) for topic, stored in state["positions"].get(job, {}).items()}

    def watermarks(self, job: str, topic: str) -> tuple[Stored | None, dict[str, int]]:
        with self._transaction() as state:
            stored = state["positions"].get(job, {}).get(topic)
            return decode(stored) if stored else None, state["watermarks"].get(f"{job} {topic}", {})

    def replace(self, job: str, topic: str, expected: Stored | None, new: Stored) -> bool:
        check_replacement(topic, expected, new)
        with self._transaction() as state:
            stored = state["positions"].setdefault(job, {}).get(topic)
            if (decode(stored) if stored else None) != expected:
                return False
            state["positions"][job][topic] = encode(new)
            state["watermarks"][f"{job} {topic}"] = {}
        return True

    def write(
        self,
        job: str,
        table: str,
        batches: Iterator[pa.RecordBatch],
        advances: Sequence[Advance],
        beside: Beside | None = None,
    ) -> int:
        if beside is not None:
            raise error("UNSUPPORTED_STORE", "the JSON file has no dead letters")
        # All input first: the lock is not held while it is read.
        read = list(batches)
        changed = [advance.changed_watermarks() for advance in advances]
        with self._transaction() as state:
            positions = state["positions"].get(job, {})
            for advance, watermarks in zip(advances, changed, strict=True):
                topic = advance.range.topic
                advance.check(job, decode(positions[topic]) if topic in positions else None)
                positions[topic] = encode(Stored(advance.range.end, advance.epoch))
                state["watermarks"].setdefault(f"{job} {topic}", {}).update(watermarks)
            for batch in read:
                check_columns(state, table, batch.schema)
                state["tables"][table]["rows"] += batch.to_pylist()
        return sum(map(len, read))

    @contextmanager
    def _transaction(self) -> Iterator[dict[str, Any]]:
        """The state; what the block has made of it replaces the file, unless the block fails."""
        with open(f"{self._path}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            empty: dict[str, Any] = {"tables": {}, "jobs": {}, "positions": {}, "watermarks": {}}
            state = json.loads(self._path.read_text()) if self._path.exists() else empty
            yield state
            with open(f"{self._path}.new", "w") as file:
                json.dump(state, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(f"{self._path}.new", self._path)
            folder = os.open(self._path.parent, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)


def check_columns(state: dict[str, Any], table: str, schema: pa.Schema) -> None:
    columns = {name: Column(kind, False) for name, kind in state["tables"][table]["columns"].items()}
    check_table(table, schema, columns, lambda field, kind: str(field.type) == kind)


def encode(stored: Stored) -> list[Any]:
    return [stored.position.to_bytes().hex(), stored.epoch]


def decode(stored: list[Any]) -> Stored:
    return Stored(Position.from_bytes(bytes.fromhex(stored[0])), stored[1])
