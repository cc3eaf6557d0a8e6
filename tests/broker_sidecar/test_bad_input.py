"""Bad input over the wire: a clear reason, nothing changed, nobody else disturbed. Frames, on streams and unary."""

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from seqdedupe.errors import REASONS
from seqdedupe.limits import LINK_LEFT_OUT, MAX_BATCH_BYTES, MAX_BATCH_ROWS, MAX_PAYLOAD_BYTES
from seqdedupe.v1 import batch_pb2, read_pb2, read_pb2_grpc
from tests.batches import put_columns
from tests.broker_sidecar.calls import (
    Client,
    Refused,
    Stream,
    batch,
    encoded,
    receipt_of,
    refusal_of,
    refused,
    verdicts,
)

# For both producers, "p" and "q", the IDs 0 to 4 are stored when the bad frame comes.
STORED = 5


@dataclass
class Scene:
    """A topic in use: a session of "p" and "q", one before it, and a bystander with its own stream."""

    client: Client
    topic: str
    epochs: dict[str, int]
    stale_epoch: int
    bystander: Stream
    bystander_epochs: dict[str, int]
    bystander_id: int = 0

    def undisturbed(self) -> None:
        """The bystander goes on, on the stream that it has had all the time."""
        one = batch([("bystander", self.bystander_id)], self.bystander_epochs)
        receipt = self.bystander.receipt(one)
        assert verdicts(receipt, 1) == [1]
        self.bystander_id += 1


@pytest.fixture
def scene(client: Client, topic: str) -> Iterator[Scene]:
    stale = client.epochs(topic, "p")["p"]
    epochs = client.epochs(topic, "p", "q")
    bystander_epochs = client.epochs(topic, "bystander")
    rows = [(name, i) for i in range(STORED) for name in ("p", "q")]
    client.publish_unary(topic, batch(rows, epochs))
    scene = Scene(client, topic, epochs, stale, client.stream(topic), bystander_epochs)
    scene.undisturbed()
    yield scene
    scene.bystander.end()


def good(scene: Scene, ids: tuple[int, ...] = (5, 6), **changes: Any) -> batch_pb2.Batch:
    """A frame of "p" that would be accepted, with some columns put in the place of others."""
    made = batch([("p", i) for i in ids], scene.epochs)
    put_columns(made, changes)
    return made


def two(scene: Scene, **changes: Any) -> batch_pb2.Batch:
    """A frame of "p" and "q" that would be accepted, changed likewise."""
    made = batch([("p", 5), ("q", 5), ("p", 6)], scene.epochs)
    put_columns(made, changes)
    return made


def large(scene: Scene, payload_bytes: int, rows: int) -> batch_pb2.Batch:
    ids = range(STORED, STORED + rows)
    return batch([("p", i) for i in ids], scene.epochs, payloads=[bytes(payload_bytes)] * rows)


PROPERTIES: dict[str, Any] = {
    "property_offsets": [0, 1, 1],
    "property_name_offsets": [0, 1],
    "property_names": b"a",
    "property_value_offsets": [0, 1],
    "property_values": b"b",
}

Make = Callable[[Scene], batch_pb2.Batch | bytes]

BAD: dict[str, tuple[str, Make]] = {
    "no bytes": ("INVALID_BATCH", lambda s: b""),
    "not a batch": ("MALFORMED_MESSAGE", lambda s: b"\x07\xff\xff"),
    "cut short": ("MALFORMED_MESSAGE", lambda s: encoded(good(s))[:-1]),
    "no rows": ("INVALID_BATCH", lambda s: good(s, sequence_ids=[])),
    "no producers": ("INVALID_BATCH", lambda s: good(s, producer_name_offsets=[0], epochs=[])),
    "more producers than rows": (
        "INVALID_BATCH",
        lambda s: batch_pb2.Batch(
            producer_name_offsets=[0, 1, 2],
            producer_names=b"pq",
            epochs=[s.epochs["p"], s.epochs["q"]],
            previous_sequence_ids=[4, 4],
            producer_indexes=[0],
            sequence_ids=[5],
            payload_offsets=[0, 0],
        ),
    ),
    "too many rows": ("BATCH_TOO_LARGE", lambda s: large(s, 0, MAX_BATCH_ROWS + 1)),
    "batch too large": ("BATCH_TOO_LARGE", lambda s: large(s, MAX_BATCH_BYTES // 4, 4)),
    "batch far too large": ("BATCH_TOO_LARGE", lambda s: large(s, 3 * 1024 * 1024, 5)),
    "payload too large": ("MESSAGE_TOO_LARGE", lambda s: large(s, MAX_PAYLOAD_BYTES + 1, 1)),
    "empty name": ("INVALID_NAME", lambda s: good(s, producer_name_offsets=[0, 0], producer_names=b"")),
    "name too long": (
        "INVALID_NAME",
        lambda s: good(s, producer_name_offsets=[0, 256], producer_names=b"n" * 256),
    ),
    "name not UTF-8": ("INVALID_NAME", lambda s: good(s, producer_name_offsets=[0, 2], producer_names=b"\xc3\x28")),
    "name of half a character": (
        "INVALID_NAME",
        lambda s: two(s, producer_name_offsets=[0, 1, 2]).SerializeToString().replace(b"\x02pq", b"\x02\xc3\xa9"),
    ),
    "name twice": (
        "INVALID_NAME",
        lambda s: two(s).SerializeToString().replace(b"\x02pq", b"\x02pp"),
    ),
    "name without session": ("INVALID_EPOCH", lambda s: good(s, producer_names=b"x")),
    "name offsets that fall": ("INVALID_BATCH", lambda s: two(s, producer_name_offsets=[0, 3, 2])),
    "name offsets not from 0": ("INVALID_BATCH", lambda s: good(s, producer_name_offsets=[1, 1])),
    "name offsets outside": ("INVALID_BATCH", lambda s: good(s, producer_name_offsets=[0, 2])),
    "too few name offsets": ("INVALID_BATCH", lambda s: good(s, producer_name_offsets=[0])),
    "ID -1": ("INVALID_SEQUENCE_ID", lambda s: good(s, sequence_ids=[-1, 6], previous_sequence_ids=[-1])),
    "lowest ID": ("INVALID_SEQUENCE_ID", lambda s: good(s, sequence_ids=[-(2**63), 6])),
    "ID -1 of the second": ("INVALID_SEQUENCE_ID", lambda s: two(s, sequence_ids=[5, -1, 6])),
    "same ID twice": ("NOT_ASCENDING", lambda s: good(s, sequence_ids=[5, 5])),
    "IDs that fall": ("NOT_ASCENDING", lambda s: good(s, sequence_ids=[6, 5])),
    "IDs that fall among others": ("NOT_ASCENDING", lambda s: two(s, sequence_ids=[6, 5, 5])),
    "stale epoch": ("FENCED", lambda s: good(s, epochs=[s.stale_epoch])),
    "stale epoch, old IDs": (
        "FENCED",
        lambda s: good(s, sequence_ids=[3, 4], previous_sequence_ids=[2], epochs=[s.stale_epoch]),
    ),
    "epoch never given": ("INVALID_EPOCH", lambda s: good(s, epochs=[2**62])),
    "epoch of another name": ("INVALID_EPOCH", lambda s: good(s, epochs=[s.bystander_epochs["bystander"]])),
    "epoch 0": ("INVALID_EPOCH", lambda s: good(s, epochs=[0])),
    "epoch below 0": ("INVALID_EPOCH", lambda s: good(s, epochs=[-1])),
    "too few epochs": ("INVALID_BATCH", lambda s: two(s, epochs=[s.epochs["p"]])),
    "predecessor missing": ("PREDECESSOR_MISSING", lambda s: good(s, (7, 8))),
    "predecessor missing, highest IDs": ("PREDECESSOR_MISSING", lambda s: good(s, (2**63 - 2, 2**63 - 1))),
    "predecessor is the first ID": ("INVALID_PREDECESSOR", lambda s: good(s, previous_sequence_ids=[5])),
    "predecessor above": ("INVALID_PREDECESSOR", lambda s: good(s, previous_sequence_ids=[2**63 - 1])),
    "predecessor below -2": ("INVALID_PREDECESSOR", lambda s: good(s, previous_sequence_ids=[-3])),
    "too few links": ("INVALID_BATCH", lambda s: two(s, previous_sequence_ids=[4])),
    "no links": ("INVALID_BATCH", lambda s: good(s, previous_sequence_ids=[])),
    "producer column outside": ("INVALID_BATCH", lambda s: two(s, producer_indexes=[0, 2, 0])),
    "producer column below 0": ("INVALID_BATCH", lambda s: two(s, producer_indexes=[0, -1, 0])),
    "producer column too short": ("INVALID_BATCH", lambda s: two(s, producer_indexes=[0, 1])),
    "producer column left out": ("INVALID_BATCH", lambda s: two(s, producer_indexes=[])),
    "producer column of one outside": ("INVALID_BATCH", lambda s: good(s, producer_indexes=[0, 1])),
    "producer without row": ("INVALID_BATCH", lambda s: two(s, producer_indexes=[0, 0, 0], sequence_ids=[5, 6, 7])),
    "too many event times": ("INVALID_BATCH", lambda s: good(s, event_times_ms=[1, 2, 3])),
    "too few event times": ("INVALID_BATCH", lambda s: good(s, event_times_ms=[1])),
    "too few payload offsets": ("INVALID_BATCH", lambda s: good(s, payload_offsets=[0, 6])),
    "no payload offsets": ("INVALID_BATCH", lambda s: good(s, payload_offsets=[])),
    "payload offsets that fall": ("INVALID_BATCH", lambda s: good(s, payload_offsets=[0, 7, 6])),
    "payload offsets below 0": ("INVALID_BATCH", lambda s: good(s, payload_offsets=[0, -1, 6])),
    "payload offsets not from 0": ("INVALID_BATCH", lambda s: good(s, payload_offsets=[1, 3, 6])),
    "payload offsets outside": ("INVALID_BATCH", lambda s: good(s, payload_offsets=[0, 3, 7])),
    "payload offsets before the end": ("INVALID_BATCH", lambda s: good(s, payload_offsets=[0, 3, 5])),
    "payload bitmap too long": ("INVALID_BATCH", lambda s: good(s, payload_validity=b"\x03\x00")),
    "keys without offsets": ("INVALID_BATCH", lambda s: good(s, keys=b"k")),
    "key bitmap without keys": ("INVALID_BATCH", lambda s: good(s, key_validity=b"\x03")),
    "key offsets outside": ("INVALID_BATCH", lambda s: good(s, key_offsets=[0, 1, 2], keys=b"k")),
    "too many key offsets": ("INVALID_BATCH", lambda s: good(s, key_offsets=[0, 1, 1, 1], keys=b"k")),
    "key bitmap too long": (
        "INVALID_BATCH",
        lambda s: good(s, key_offsets=[0, 1, 1], keys=b"k", key_validity=b"\x01\x00"),
    ),
    "properties outside": ("INVALID_BATCH", lambda s: good(s, **PROPERTIES | {"property_offsets": [0, 1, 2]})),
    "properties without rows": ("INVALID_BATCH", lambda s: good(s, **PROPERTIES | {"property_offsets": []})),
    "property names outside": ("INVALID_BATCH", lambda s: good(s, **PROPERTIES | {"property_name_offsets": [0, 2]})),
    "fewer property values than names": (
        "INVALID_BATCH",
        lambda s: good(s, **PROPERTIES | {"property_value_offsets": [0]}),
    ),
    "property name not UTF-8": ("INVALID_BATCH", lambda s: good(s, **PROPERTIES | {"property_names": b"\xff"})),
    "property value not UTF-8": ("INVALID_BATCH", lambda s: good(s, **PROPERTIES | {"property_values": b"\xff"})),
    "property name twice in a message": (
        "INVALID_BATCH",
        lambda s: good(
            s,
            **PROPERTIES
            | {
                "property_offsets": [0, 2, 5],
                "property_name_offsets": [0, 1, 2, 3, 4, 5],
                "property_names": b"ababb",
                "property_value_offsets": [0, 0, 0, 0, 0, 1],
            },
        ),
    ),
    "property values of half a character": (
        "INVALID_BATCH",
        lambda s: good(
            s,
            **PROPERTIES
            | {
                "property_offsets": [0, 1, 2],
                "property_name_offsets": [0, 1, 2],
                "property_names": b"ab",
                "property_value_offsets": [0, 1, 2],
                "property_values": "é".encode(),
            },
        ),
    ),
}
ON_STREAMS: dict[str, tuple[str, Make]] = {
    "link left out on a stream": ("LINK_REQUIRED", lambda s: good(s, previous_sequence_ids=[LINK_LEFT_OUT])),
}


def check_numbers(numbers: dict[str, Any]) -> None:
    """What a refusal about order says is what is."""
    assert int(numbers["pushed"]) == int(numbers["persisted"]) == STORED - 1
    assert numbers["producer_name"] in ("p", "q")


@pytest.mark.parametrize("case", [*BAD, *ON_STREAMS])
def test_bad_frame_on_a_stream(scene: Scene, case: str) -> None:
    reason, make = (BAD | ON_STREAMS)[case]
    stream = scene.client.stream(scene.topic)
    before = scene.client.state(scene.topic)
    refusal = stream.refusal(make(scene))
    assert refusal.reason == reason, refusal
    assert refusal.retry_delay_ms == REASONS[reason].retry_delay_ms
    assert refusal.message
    assert scene.client.state(scene.topic) == before
    for one in refusal.producers:
        assert (one.pushed, one.persisted) == (STORED - 1, STORED - 1)
        assert one.producer_name in ("p", "q")
        assert one.current_epoch == scene.epochs[one.producer_name]
    scene.undisturbed()
    # The stream itself goes on too: a refusal is an answer, not a broken stream.
    assert verdicts(stream.receipt(good(scene)), 2) == [1, 1]
    stream.end()


@pytest.mark.parametrize("case", BAD)
def test_bad_batch_in_a_unary_call(scene: Scene, case: str) -> None:
    reason, make = BAD[case]
    before = scene.client.state(scene.topic)
    answer = refused(lambda: scene.client.publish_unary(scene.topic, make(scene)))
    assert answer.reason == reason, answer
    assert answer.code.name == REASONS[reason].code
    assert answer.retry_delay_ms == REASONS[reason].retry_delay_ms
    assert answer.numbers["hint"] == REASONS[reason].hint
    if reason in ("FENCED", "PREDECESSOR_MISSING", "INVALID_PREDECESSOR"):
        check_numbers(answer.numbers)
    assert scene.client.state(scene.topic) == before
    scene.undisturbed()
    assert verdicts(scene.client.publish_unary(scene.topic, good(scene)), 2) == [1, 1]


def test_missing_predecessor_names_all_numbers(scene: Scene) -> None:
    refusal = scene.client.stream(scene.topic).refusal(good(scene, (9,)))
    one = refusal.producers[0]
    assert (one.sequence_id, one.previous_sequence_id, one.pushed, one.persisted) == (9, 8, 4, 4)
    assert (one.epoch, one.current_epoch) == (scene.epochs["p"], scene.epochs["p"])


def test_link_left_out_is_accepted_in_a_lone_unary_call_and_stored_as_left_out(scene: Scene) -> None:
    receipt = scene.client.publish_unary(scene.topic, good(scene, (9,), previous_sequence_ids=[LINK_LEFT_OUT]))
    assert verdicts(receipt, 1) == [1]
    [record] = scene.client.records(scene.topic, index=receipt.first_index)
    assert list(record.batch.previous_sequence_ids) == [LINK_LEFT_OUT]


@pytest.mark.parametrize("bad", ["stale", "unknown", "hole", "falling"])
@pytest.mark.parametrize("bad_first", [False, True])
def test_a_frame_is_admitted_whole_or_not_at_all(scene: Scene, bad: str, bad_first: bool) -> None:
    """One producer of three is the cause; not a row of the two others is admitted, and the answer names that one."""
    client, topic = scene.client, scene.topic
    epochs = scene.epochs | client.epochs(topic, "r")
    rows, links, reason = [("p", 5), ("q", 5), ("r", 0), ("q", 6), ("p", 6)], {}, ""
    if bad_first:
        rows = [rows[1], rows[0], *rows[2:]]
    if bad == "stale":
        epochs, reason = epochs | {"q": epochs["q"]}, "FENCED"
        client.epochs(topic, "q")
    elif bad == "unknown":
        epochs, reason = epochs | {"q": 2**60}, "INVALID_EPOCH"
    elif bad == "hole":
        rows, links, reason = [(n, i + 10 if n == "q" else i) for n, i in rows], {"q": 14}, "PREDECESSOR_MISSING"
    else:
        rows, reason = [(n, 5 if n == "q" else i) for n, i in rows], "NOT_ASCENDING"
    before = client.state(topic)
    stream = client.stream(topic)
    refusal = stream.refusal(batch(rows, epochs, links))
    assert refusal.reason == reason
    assert [one.producer_name for one in refusal.producers] == ([] if bad == "falling" else ["q"])
    assert client.state(topic) == before
    scene.undisturbed()
    # The control: the same rows of the two others alone are admitted.
    others = [row for row in rows if row[0] != "q"]
    assert verdicts(stream.receipt(batch(others, epochs)), len(others)) == [1] * len(others)


def test_an_error_has_the_numbers_of_the_producer_that_it_names(scene: Scene) -> None:
    client, topic = scene.client, scene.topic
    epochs = scene.epochs | client.epochs(topic, "r")
    stale = epochs["q"]
    client.epochs(topic, "q")
    rows = [("q", 5), ("r", 7)]
    refusal = client.stream(topic).refusal(batch(rows, epochs | {"q": stale, "r": 2**60}))
    assert [one.producer_name for one in refusal.producers] == ["q", "r"]
    answer = refused(lambda: client.publish_unary(topic, batch(rows, epochs | {"q": stale, "r": 2**60})))
    assert answer.reason == "INVALID_EPOCH"
    named = {name: answer.numbers[name] for name in ("producer_name", "sequence_id", "epoch", "current_epoch")}
    assert named == {"producer_name": "r", "sequence_id": "7", "epoch": f"{2**60}", "current_epoch": f"{epochs['r']}"}


def test_what_builds_on_a_refused_frame_is_refused_and_the_resend_is_admitted(scene: Scene) -> None:
    """5 is refused, 6 and 7 are on the wire already: taking them would make the resend of 5 a false Dup."""
    stream = scene.client.stream(scene.topic)
    frames = [
        stream.send(good(scene, (5,), epochs=[2**60])),
        stream.send(good(scene, (6,))),
        stream.send(good(scene, (7,))),
    ]
    reasons = [refusal_of(stream.answer(frame)).reason for frame in frames]
    assert reasons == ["INVALID_EPOCH", "PREDECESSOR_MISSING", "PREDECESSOR_MISSING"]
    assert verdicts(stream.receipt(good(scene, (5, 6, 7))), 3) == [1, 1, 1]
    assert [i for name, i in scene.client.rows(scene.topic) if name == "p"] == [*range(8)]


def test_a_batch_of_the_largest_size_is_accepted_and_read_back(scene: Scene) -> None:
    """The limits are what they say: one byte or row less than refused is stored, and readers can be sent it."""
    empty = len(encoded(large(scene, 0, 8)))
    payload = (MAX_BATCH_BYTES - empty) // 8 - 3
    full = large(scene, payload, 8)
    assert MAX_BATCH_BYTES - 40 <= len(encoded(full)) <= MAX_BATCH_BYTES
    receipt = scene.client.publish_unary(scene.topic, full)
    # It is cut for clients with gRPC's default limit, as these are.
    records = list(scene.client.records(scene.topic, index=receipt.first_index))
    assert max(record.rows for record in records) < 4
    assert [i for record in records for i in record.batch.sequence_ids] == list(full.sequence_ids)
    assert b"".join(record.batch.payloads for record in records) == full.payloads
    page = scene.client.reading.Read(
        read_pb2.ReadRequest(topic=scene.topic, start=read_pb2.ReadStart(index=receipt.first_index))
    )
    assert page.records[0] == records[0]
    with grpc.insecure_channel(scene.client.address, [("grpc.max_receive_message_length", 16 * 1024 * 1024)]) as wide:
        read = read_pb2_grpc.ReadServiceStub(wide).Read
        single = batch([("p", STORED + 8)], scene.epochs, payloads=[bytes(MAX_PAYLOAD_BYTES)])
        index = scene.client.publish_unary(scene.topic, single).first_index
        request = read_pb2.ReadRequest(topic=scene.topic, start=read_pb2.ReadStart(index=index))
        assert read(request).records[0].batch == single
        with pytest.raises(grpc.RpcError) as e:
            scene.client.reading.Read(request)
        assert e.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    ids = range(14, 14 + MAX_BATCH_ROWS)
    rows = batch([("p", i) for i in ids], scene.epochs, payloads=[b""] * MAX_BATCH_ROWS)
    assert scene.client.stream(scene.topic).receipt(rows).verdicts == []


def test_a_message_above_grpcs_limit_breaks_only_its_own_stream(scene: Scene) -> None:
    stream = scene.client.stream(scene.topic)
    before = scene.client.state(scene.topic)
    frame = stream.send(bytes(17_000_000))
    with pytest.raises(grpc.RpcError) as e:
        stream.answer(frame)
    assert e.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert scene.client.state(scene.topic) == before
    scene.undisturbed()


def test_highest_id_and_longest_name_are_accepted(client: Client, topic: str) -> None:
    name = "é" * 127 + "x"
    epochs = client.epochs(topic, name)
    receipt = client.publish_unary(topic, batch([(name, 2**63 - 1)], epochs, {name: -1}))
    assert verdicts(receipt, 1) == [1]
    assert client.rows(topic) == [(name, 2**63 - 1)]
    assert client.open(topic, name).persisted == [2**63 - 1]


def stream_status(client: Client, topic: str) -> Refused:
    """The status with which a stream to that topic ends."""
    stream = client.stream(topic)
    return refused(lambda: stream.answer(1))


@pytest.mark.parametrize(
    ("topic_name", "reason"),
    [
        ("", "INVALID_TOPIC_NAME"),
        ("a/b", "INVALID_TOPIC_NAME"),
        ("with space", "INVALID_TOPIC_NAME"),
        ("überflug", "INVALID_TOPIC_NAME"),
        ("т", "INVALID_TOPIC_NAME"),
        ("persistent://tenant/é/t", "INVALID_TOPIC_NAME"),
        ("persistent://a/b", "INVALID_TOPIC_NAME"),
        ("non-persistent://a/b/c", "INVALID_TOPIC_NAME"),
        ("n" * 256, "INVALID_TOPIC_NAME"),
        ("nobody-made-this", "TOPIC_NOT_FOUND"),
        ("persistent://public/default/nobody-made-this", "TOPIC_NOT_FOUND"),
    ],
)
def test_bad_topic(scene: Scene, topic_name: str, reason: str) -> None:
    before = scene.client.state(scene.topic)
    for answer in (
        stream_status(scene.client, topic_name),
        refused(lambda: scene.client.publish_unary(topic_name, good(scene))),
        refused(lambda: scene.client.topic(topic_name)),
        refused(lambda: scene.client.end_index(topic_name)),
        refused(lambda: scene.client.rows(topic_name)),
    ):
        assert answer.reason == reason, answer
        assert answer.code.name == REASONS[reason].code
    if reason == "INVALID_TOPIC_NAME":
        assert refused(lambda: scene.client.open(topic_name, "p")).reason == reason
    assert scene.client.state(scene.topic) == before
    scene.undisturbed()


def test_a_stream_is_for_one_topic(scene: Scene, client: Client) -> None:
    client.open("another-one", "p")
    stream = client.stream(scene.topic)
    # Its own topic's name, short or full, may be repeated.
    again = stream.send(good(scene, (5,)), topic=scene.topic)
    assert verdicts(receipt_of(stream.answer(again)), 1) == [1]
    full = stream.send(good(scene, (6,)), topic=f"persistent://public/default/{scene.topic}")
    assert verdicts(receipt_of(stream.answer(full)), 1) == [1]
    frame = stream.send(good(scene, (7,)), topic="another-one")
    assert refused(lambda: stream.answer(frame)).reason == "INVALID_REQUEST"
    assert client.end_index("another-one") == 0
    scene.undisturbed()


def test_random_bytes_as_frames_and_batches(scene: Scene) -> None:
    """Random bytes, and a good frame with bytes flipped, cut and doubled: refused, or legal and then stored."""
    rng = random.Random(20_240)
    client, topic = scene.client, scene.topic
    before = client.producer(topic, "p"), client.producer(topic, "q")
    stream = client.stream(topic)
    for _ in range(150):
        junk = rng.randbytes(rng.randrange(1, 200))
        answer = stream.answer(stream.send(junk))
        assert hasattr(answer, "reason"), answer
    whole = encoded(two(scene, sequence_ids=[3, 3, 4], previous_sequence_ids=[2, 2]))
    for _ in range(300):
        bent = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            bent[rng.randrange(len(bent))] = rng.randrange(256)
        if rng.random() < 0.2:
            del bent[rng.randrange(len(bent)) :]
        stream.answer(stream.send(bytes(bent)))
    for _ in range(20):
        broken = client.stream(topic)
        broken.send_raw(rng.randbytes(rng.randrange(1, 60)))
        with suppress(grpc.RpcError):
            broken.end()
        assert broken.call.code() not in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)
    # Everything that was legal by accident was old, or of these two names: the log is whole and the bystander goes on.
    scene.undisturbed()
    stream.end()
    after = client.producer(topic, "p"), client.producer(topic, "q")
    assert all(now[0] >= was[0] for now, was in zip(after, before, strict=True))
    assert len(list(client.records(topic))) >= 1
