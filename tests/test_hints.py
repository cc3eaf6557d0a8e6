"""A hint is about the very thing that the error names, also where other things share the reason. No sidecar."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from seqdedupe.batch import Binary, single_producer, without_producers
from seqdedupe.client import Message, PartitionedPosition
from seqdedupe.client.builder import Builder
from seqdedupe.client.cursor import MAX_NOTE_BYTES, Kept, SidecarCursor, check
from seqdedupe.client.message import StoredBatch
from seqdedupe.client.producer_session import ProducerConfig
from seqdedupe.client.reader import Reader
from seqdedupe.errors import SeqdedupeError
from seqdedupe.functions.identity import BATCH_INDEX_BITS, FunctionOutput, by_message_id, check_fits
from seqdedupe.limits import MAX_BATCH_BYTES, MAX_OPEN_NAMES
from seqdedupe.message_id import MessageId, Position
from seqdedupe.names import check_cursor_name
from seqdedupe.services.pipe import Pipe
from seqdedupe.services.pipe.outputs import MAX_INPUT_INDEX, Calling
from seqdedupe.topic.frame import check_by_id
from seqdedupe.topic.operations import move_cursor
from seqdedupe.topic.sessions import check_count

POSITION = Position(7, MessageId(7, 3), 3)
LONG = "x" * (MAX_NOTE_BYTES + 1)
LARGE = {"a": "v" * MAX_BATCH_BYTES}


def builder() -> Builder:
    return Builder(b"p", -1, ProducerConfig(), lambda _: None)


def piped(index: int) -> None:
    stored = StoredBatch(single_producer(b"p", 1, -1, np.arange(1), Binary.of_all([b""])), index, 1, 7)
    calling = Calling(Message.__repr__, "t")  # type: ignore[arg-type]
    calling.take([stored])
    calling.fill()


def without_key() -> None:
    check_by_id(without_producers(Binary.of_all([b"id"]), Binary.of_all([b""])).encode(), wants_keys=True)


async def moved(note: str) -> None:
    await move_cursor(SimpleNamespace(), "c", None, (POSITION, note))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("act", "reason", "said"),
    [
        (lambda: check_cursor_name("a\nb"), "INVALID_NAME", "cursor"),
        (lambda: check_cursor_name("x" * 256), "INVALID_NAME", "cursor"),
        (lambda: SidecarCursor(None, "t", "\ud800"), "INVALID_NAME", "cursor"),  # type: ignore[arg-type]
        (lambda: check(Kept(POSITION, LONG)), "INVALID_REQUEST", "note"),
        (lambda: check(Kept(POSITION, "\ud800")), "INVALID_REQUEST", "note"),
        (lambda: moved(LONG).send(None), "INVALID_REQUEST", "note"),
        (lambda: check_count(["p"] * (MAX_OPEN_NAMES + 1)), "INVALID_NAME", "several calls"),
        (lambda: Pipe(None, "a", "b", Message.__repr__, name="a\nb"), "INVALID_NAME", "pipe"),  # type: ignore[arg-type]
        (lambda: Reader(None, "t", follow=True, stop_index=3), "INVALID_REQUEST", "stop_index"),  # type: ignore[arg-type]
        (lambda: PartitionedPosition.parse("123@45"), "INVALID_POSITION", "earliest"),
        (lambda: piped(MAX_INPUT_INDEX), "INVALID_SEQUENCE_ID", "source"),
        (lambda: builder().append(b"", None, None, None, LARGE), "BATCH_TOO_LARGE", "one message"),
        (lambda: builder().add_columns([b""], None, None, None, [LARGE]), "BATCH_TOO_LARGE", "one message"),
        (without_key, "INVALID_BATCH", "key"),
        (lambda: by_message_id("f", "t", 1, 1, 1 << BATCH_INDEX_BITS), "INVALID_SEQUENCE_ID", "index"),
        (lambda: check_fits([FunctionOutput("t", bytes(3 << 20), None, 0, {})] * 3), "MESSAGE_TOO_LARGE", "fewer"),
    ],
)
def test_a_hint_is_about_what_the_error_names(act: Callable[[], Any], reason: str, said: str) -> None:
    with pytest.raises(SeqdedupeError) as caught:
        act()
    assert caught.value.reason == reason
    assert said in caught.value.hint
