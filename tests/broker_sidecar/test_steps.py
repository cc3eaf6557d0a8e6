"""The messages of Attach as bytes: no matter what comes, it means what the published schema says, or is refused."""

import random
import tracemalloc
from typing import Any

import pytest
from google.protobuf.message import DecodeError, Message

from broker_sidecar.services.dedupe_service import MAX_CHECKS, columns_of, parse_steps
from seqdedupe.batch import INT32, binary, values
from seqdedupe.core.producers import Producers
from seqdedupe.errors import SeqdedupeError
from seqdedupe.topic.attached import BrokerAttachment
from seqdedupe.topic.policy import Applied
from seqdedupe.v1 import dedupe_pb2
from tests.broker_sidecar.attaching import AttachRequest, check, register, replay, report

CASES = 20_000

MESSAGES = [
    message.SerializeToString()
    for message in (
        AttachRequest(begin=dedupe_pb2.Begin(topic="t")),
        AttachRequest(
            token=2**64 - 1,
            register=register("a", "é"),
            release=dedupe_pb2.Release(handles=[1, -1]),
            replay=replay((0, 1, 4, b"p1"), (1, 2, 2, b"p2"), after=b"p0"),
            end_replay=dedupe_pb2.EndReplay(last_position=b"p2"),
            report=report(3, persisted=2, position=b"p4", failed=1),
            reset=dedupe_pb2.Reset(),
            checks=[check((0, 4), (0, 5), frame=7), check((1, 0, 9), frame=8, passes=b"\1")],
        ),
        AttachRequest(token=1, checks=[check((0, 6), (1, 7))] * 3),
    )
]


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Bytes flipped, cut out, put in, or said again."""
    for _ in range(rng.randint(0, 3)):
        at, end = sorted((rng.randint(0, len(data)), rng.randint(0, len(data))))
        match rng.randint(0, 3):
            case 0 if data:
                at = min(at, len(data) - 1)
                data = data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
            case 1:
                data = data[:at] + data[end:]
            case 2:
                data = data[:at] + rng.randbytes(rng.randint(1, 6)) + data[at:]
            case _:
                data = data[:end] + data[at:end] + data[end:]
    return data


def meant(data: bytes) -> Message | None:
    """What the published schema says; None if it says nothing."""
    try:
        message = AttachRequest.FromString(data)
    except DecodeError:
        return None
    message.DiscardUnknownFields()
    return message


def take_columns(steps: Any) -> None:
    """All columns, as the service takes them: only here it is seen that one has no whole number of values."""
    values(steps.release.handles, INT32, "handles")
    binary(steps.register.producer_name_offsets, b"", "producer_name_offsets")
    binary(steps.replay.position_offsets, b"", "position_offsets")
    binary(steps.replay.previous_position_offsets, b"", "previous_position_offsets")
    for columns in (steps.replay, *steps.checks):
        columns_of(columns)


def test_mutated_messages_mean_what_the_published_schema_says(pytestconfig: pytest.Config) -> None:
    rng = random.Random(pytestconfig.getoption("randomly_seed", 1))
    understood = 0
    for _ in range(CASES):
        data = mutated(rng.choice(MESSAGES), rng) + rng.choice([b"", rng.choice(MESSAGES)])
        meaning = meant(data)
        if meaning is None:
            with pytest.raises(SeqdedupeError):
                take_columns(parse_steps(data))
            continue
        steps = parse_steps(data)
        understood += 1
        # For the alias schema, whose encoding is the same.
        steps.DiscardUnknownFields()
        again = AttachRequest.FromString(steps.SerializeToString())
        assert again == meaning, data
    assert CASES // 5 < understood < CASES


@pytest.mark.parametrize(
    "data",
    [AttachRequest(checks=[check((0, 1))] * (MAX_CHECKS + 1)).SerializeToString(), b"\x4a\x00" * (MAX_CHECKS + 1)],
)
def test_too_many_checks_are_refused(data: bytes) -> None:
    with pytest.raises(SeqdedupeError, match="checks"):
        parse_steps(data)


@pytest.mark.parametrize("rows", [1, 100])
@pytest.mark.parametrize("is_wide", [False, True])
def test_checks_in_flight_are_charged_what_they_hold(rows: int, is_wide: bool) -> None:
    """Those of one row too, of which there may be many."""
    attachment = BrokerAttachment(Producers(), b"")
    attachment.register(0, [b"a"])
    attachment.end_replay(b"")
    messages = []
    for i in range(1_001):
        ids = range(i * rows, (i + 1) * rows)
        one = dedupe_pb2.Check(handles=[0] * rows, sequence_ids=ids)
        if is_wide:
            one.highest_sequence_ids.extend(ids)
            one.passes = bytes(rows)
        messages.append(AttachRequest(checks=[one]).SerializeToString())

    def take(data: bytes, now_seconds: float) -> None:
        attachment.check(columns_of(parse_steps(data).checks[0]), Applied(), now_seconds)

    take(messages[0], 0.0)
    charged = attachment.held_bytes
    tracemalloc.start()
    try:
        for i, data in enumerate(messages[1:]):
            take(data, i + 0.5)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    charged = attachment.held_bytes - charged
    assert held <= 1.1 * charged
    assert charged <= 3 * held
    attachment.report(0, persisted=attachment.in_flight, position=b"p", failed=0)
    assert attachment.held_bytes == 0
