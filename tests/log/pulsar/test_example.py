"""The decoder for consumers of Pulsar's own client shows what was published, in both formats, and nothing else."""

import ast
from dataclasses import astuple
from pathlib import Path

import numpy as np
import pytest

from examples.pulsar import messages as example
from seqdedupe.batch import Batch
from seqdedupe.entry_properties import SCHEMA_VERSION, VERSION
from seqdedupe.log.pulsar import entries
from seqdedupe.log.pulsar.entries import PulsarMessage
from tests.batches import batch
from tests.log.pulsar.topics import all_rows, marker, owner, packed, rows, stock

SENT = [
    batch(
        [("p", 1), ("q", 5), ("p", 4)],
        payloads=[b"one", None, b""],
        keys=[b"key", None, b"\xff"],
        event_times_ms=np.array([5, 0, -7], np.int64),
        row_properties=[{"colour": "blue", "seqdedupe.index": "mine"}, None, {"ü": ""}],
    ),
    batch([("q", 6)], links={"q": 5}),
    batch([("q", i) for i in range(7, 9)], links={"q": 6}, payloads=[b"", None], keys=[b"", b"k"]),
]


def entries_of(
    term: int, history: list[Batch], index: int, *, is_packed: bool, version: int = VERSION
) -> list[PulsarMessage]:
    found = [marker(term, version=version), entries.control_message(owner(term), 1, index, b"", version=version)]
    for each in history:
        if is_packed:
            found.append(packed(term, len(found), index, each))
        else:
            found += rows(term, len(found), index, each, version=version)
        index += len(each)
    return found


def received(topic: example.Topic, several: list[PulsarMessage], apart: int = 1) -> list[example.Received]:
    return [
        message
        for at, entry in enumerate(several)
        if topic.counts(entry.properties, 7, at * apart)
        for message in example.messages(entry.payload, entry.properties, entry.key, entry.event_time_ms)
    ]


@pytest.mark.parametrize(
    ("is_packed", "version"),
    [(False, VERSION), (True, VERSION), (False, SCHEMA_VERSION)],
    ids=["plain", "packed", "with a schema"],
)
def test_what_was_published_is_received(is_packed: bool, version: int) -> None:
    first = entries_of(1, SENT[:1], 0, is_packed=is_packed, version=version)
    second = entries_of(2, SENT[1:], 3, is_packed=is_packed, version=version)
    late = entries_of(1, SENT[1:], 3, is_packed=is_packed, version=version)[2:]
    topic = [stock(), *first, stock(), *first[1:], marker(1, "b"), *second[:3], *late, *second]
    found = received(example.Topic(), topic)
    assert [message.index for message in found] == list(range(6))
    assert [astuple(message)[1:] for message in found] == [
        (row.producer, row.sequence_id, row.payload, row.key, row.event_time_ms, row.properties)
        for row in all_rows(SENT)
    ]
    # Who begins in the middle believes the first owner it meets.
    assert received(example.Topic(), second[3:]) == found[4:]


@pytest.mark.parametrize("is_packed", [False, True], ids=["plain", "packed"])
def test_what_is_missing_is_an_error(is_packed: bool) -> None:
    whole = entries_of(1, SENT, 0, is_packed=is_packed)
    for at in range(1, len(whole) - 1):
        with pytest.raises(ValueError, match="is missing"):
            received(example.Topic(), [*whole[:at], *whole[at + 1 :]], apart=2)


def test_an_owner_without_its_marker_is_an_error() -> None:
    """A door hides markers from consumers that do not ask for them. The owner's messages would be taken for void."""
    first, second = (entries_of(term, SENT, 0, is_packed=False) for term in (1, 2))
    with pytest.raises(ValueError, match="marker of term 2 is missing"):
        received(example.Topic(), [*first, *second[1:]])


def test_what_follows_a_hole_is_void() -> None:
    """No position is missing, only a number: it was refused."""
    first = entries_of(1, SENT, 0, is_packed=False)
    second = entries_of(2, SENT, 0, is_packed=False)
    assert received(example.Topic(), [*first[:2], *first[3:], *second]) == received(example.Topic(), second)
    assert received(example.Topic(), [*first[:2], stock(), *first[3:5]]) == []


def test_a_topic_of_native_entries_is_refused() -> None:
    """Otherwise none of its messages would count, and nobody would notice."""
    with pytest.raises(ValueError, match="native entries"):
        example.Topic().counts({"seqdedupe.kind": "marker"}, 7, 0)


def test_it_needs_the_published_schema_alone() -> None:
    tree = ast.parse(Path(example.__file__).read_text())
    modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert [module for module in modules if module.startswith(("seqdedupe", "tests"))] == ["seqdedupe.v1"]
