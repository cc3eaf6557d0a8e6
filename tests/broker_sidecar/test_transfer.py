"""A topic's numbers out of a sidecar and into one, over the wire and by way of files."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from seqdedupe.client import blocking
from seqdedupe.errors import ConfigurationError, InvalidRequestError, NotFoundError
from seqdedupe.exports import Watermark, read_watermarks, write_watermarks
from seqdedupe.testing import Sidecar
from seqdedupe.v1 import admin_pb2
from tests.broker_sidecar.calls import NOT_DUP, TIMEOUT_SECONDS, Client, batch, offsets, refused, verdicts

MANY = 100_000
DUP = 2


def create(client: Client, *topics: str) -> None:
    for topic in topics:
        client.admin.CreateTopic(admin_pb2.CreateTopicRequest(topic=topic))


def request(topic: str, marks: dict[str, int], producers: int | None = None) -> admin_pb2.ImportWatermarksRequest:
    names = [name.encode() for name in marks]
    return admin_pb2.ImportWatermarksRequest(
        topic=topic,
        producer_name_offsets=offsets(names),
        producer_names=b"".join(names),
        persisted=marks.values(),
        producers=producers,
    )


def send(client: Client, *requests: admin_pb2.ImportWatermarksRequest) -> int:
    return client.admin.ImportWatermarks(iter(requests), timeout=TIMEOUT_SECONDS).producers


def test_many_producers_go_from_topic_to_topic(client: Client, shared: Sidecar, topic: str, tmp_path: Path) -> None:
    create(client, topic, f"{topic}-2")
    marks = [Watermark(f"produzent-ü-{i:06d}".encode(), i * 2**40) for i in range(MANY)]
    write_watermarks(tmp_path / "one", marks)
    with blocking.Client(shared.address) as other:
        assert other.admin.import_watermarks(topic, tmp_path / "one") == MANY
        assert client.topic(topic).producers == MANY
        assert other.admin.export_watermarks(topic, tmp_path / "two") == MANY
        assert list(read_watermarks(tmp_path / "two")) == marks
        assert (tmp_path / "two").read_bytes() == (tmp_path / "one").read_bytes()
        assert other.admin.import_watermarks(f"{topic}-2", tmp_path / "two") == MANY
        names = [marks[5].producer.decode(), marks[-1].producer.decode(), "new"]
        last = marks[-1].sequence_id
        opened = client.open(f"{topic}-2", *names)
        assert list(opened.persisted) == [marks[5].sequence_id, last, -1]
        epochs = dict(zip(names, opened.epochs, strict=True))
        rows = [(names[1], last), (names[1], last + 1), ("new", 0)]
        receipt = client.publish_unary(f"{topic}-2", batch(rows, epochs, {names[1]: last - 1, "new": -1}))
        assert verdicts(receipt, 3) == [DUP, NOT_DUP, NOT_DUP]
        with pytest.raises(InvalidRequestError, match="it has messages"):
            other.admin.import_watermarks(f"{topic}-2", tmp_path / "two")
        # A name that was opened and has sent nothing is in no file.
        client.open(topic, "silent")
        assert other.admin.export_watermarks(topic, tmp_path / "two") == MANY


BAD: dict[str, tuple[Callable[[str], list[admin_pb2.ImportWatermarksRequest]], str]] = {
    "no message": (lambda t: [], "INVALID_REQUEST"),
    "no end": (lambda t: [request(t, {"a": 1}), request("", {"b": 1})], "INVALID_REQUEST"),
    "another number of producers": (lambda t: [request(t, {"a": 1}), request("", {"b": 1}, 3)], "INVALID_REQUEST"),
    "names that fall": (lambda t: [request(t, {"b": 1}), request("", {"a": 1}, 2)], "INVALID_REQUEST"),
    "a name twice": (lambda t: [request(t, {"b": 1}), request("", {"b": 1}, 2)], "INVALID_REQUEST"),
    "an ID below 0": (lambda t: [request(t, {"b": -1}, 1)], "INVALID_SEQUENCE_ID"),
    "an empty name": (lambda t: [request(t, {"": 1}, 1)], "INVALID_NAME"),
    "a control character": (lambda t: [request(t, {"a\n": 1}, 1)], "INVALID_NAME"),
    "no topic": (lambda t: [request("there-is-none", {"b": 1}, 1)], "TOPIC_NOT_FOUND"),
    "two topics": (lambda t: [request(t, {"b": 1}), request("another", {"c": 1}, 2)], "INVALID_REQUEST"),
    "IDs without names": (
        lambda t: [admin_pb2.ImportWatermarksRequest(topic=t, persisted=[1], producers=0)],
        "INVALID_REQUEST",
    ),
    "names without offsets": (
        lambda t: [admin_pb2.ImportWatermarksRequest(topic=t, producer_names=b"x", producers=0)],
        "INVALID_REQUEST",
    ),
    "too few IDs": (
        lambda t: [
            admin_pb2.ImportWatermarksRequest(
                topic=t, producer_name_offsets=[0, 1, 2], producer_names=b"xy", persisted=[1], producers=2
            )
        ],
        "INVALID_REQUEST",
    ),
    "more than a message may have": (
        lambda t: [request(t, {f"{i:0200d}": 1 for i in range(6000)}, 6000)],
        "INVALID_REQUEST",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_imports_nothing(client: Client, topic: str, case: str) -> None:
    create(client, topic)
    make, reason = BAD[case]
    assert refused(lambda: send(client, *make(topic))).reason == reason
    assert client.topic(topic).producers == 0
    assert send(client, request(topic, {"a": 3, "b": 4}), request(topic, {"c": 5}), request("", {}, 3)) == 3
    assert [client.producer(topic, name)[1] for name in "abc"] == [3, 4, 5]


@pytest.mark.parametrize("goes_on", [False, True])
def test_who_waits_for_the_answer_before_it_ends_is_told_why(client: Client, topic: str, goes_on: bool) -> None:
    """The control arm ends by itself, as most clients do."""
    create(client, topic)
    answered = threading.Event()

    def requests() -> Iterator[admin_pb2.ImportWatermarksRequest]:
        yield request(topic, {"a": -1})
        if goes_on:
            answered.wait(TIMEOUT_SECONDS)

    try:
        why = refused(lambda: client.admin.ImportWatermarks(requests(), timeout=TIMEOUT_SECONDS))
    finally:
        answered.set()
    assert why.reason == "INVALID_SEQUENCE_ID"


def test_an_unusual_encoding_is_read(client: Client, topic: str) -> None:
    """Columns in pieces are legal protobuf."""
    create(client, topic)
    pieces = b"".join(
        part.SerializeToString()
        for part in (
            admin_pb2.ImportWatermarksRequest(topic=topic, producer_name_offsets=[0, 1], persisted=[7]),
            admin_pb2.ImportWatermarksRequest(
                producer_name_offsets=[3], producer_names=b"abb", persisted=[8], producers=2
            ),
        )
    )
    call: Any = client.channel.stream_unary("/seqdedupe.v1.AdminService/ImportWatermarks")
    call(iter([pieces]), timeout=TIMEOUT_SECONDS)
    assert [client.producer(topic, name)[1] for name in ("a", "bb")] == [7, 8]


def test_a_file_that_is_not_whole_is_not_sent(client: Client, shared: Sidecar, topic: str, tmp_path: Path) -> None:
    create(client, topic)
    path = tmp_path / "marks"
    write_watermarks(path, [Watermark(b"a", 1), Watermark(b"b", 2)])
    whole = path.read_bytes()
    with blocking.Client(shared.address) as other:
        for place in range(len(whole)):
            for data in (whole[:place], whole[:place] + bytes((whole[place] ^ 1,)) + whole[place + 1 :]):
                path.write_bytes(data)
                with pytest.raises(ConfigurationError, match="INVALID_SOURCE"):
                    other.admin.import_watermarks(topic, path)
        with pytest.raises(OSError, match="No such file"):
            other.admin.import_watermarks(topic, tmp_path / "nowhere")
        with pytest.raises(NotFoundError):
            other.admin.export_watermarks("there-is-none", path)
        assert client.topic(topic).producers == 0
        path.write_bytes(whole)
        assert other.admin.import_watermarks(topic, path) == 2


def test_many_producers_come_back_from_a_saved_snapshot(
    client: Client, shared: Sidecar, topic: str, tmp_path: Path
) -> None:
    """A producer publishes all the time, over an import and a rebuilding: each of its messages is there once."""
    create(client, topic)
    write_watermarks(tmp_path / "marks", [Watermark(b"%06d" % i, i) for i in range(MANY)])
    with blocking.Client(shared.address) as other:
        assert other.admin.import_watermarks(topic, tmp_path / "marks") == MANY
    with blocking.Client(shared.address) as other, other.producer(topic, "p") as producer:
        for i in range(3):
            producer.send(b"%d" % i)
        producer.flush()
        head = other.admin.export_snapshot(topic, tmp_path / "saved")
        assert (head.topic, head.position.index) == (f"persistent://public/default/{topic}", 2)
        put_again: list[Callable[[], admin_pb2.Topic]] = [
            lambda: other.admin.import_snapshot(topic, tmp_path / "saved"),
            lambda: other.admin.rebuild_topic(topic),
        ]
        for again in put_again:
            for i in range(20):
                producer.send(b"%d" % i)
            assert again().state == admin_pb2.TOPIC_STATE_SERVING
            for i in range(20):
                producer.send(b"%d" % i)
            producer.flush()
        assert client.producer(topic, "p")[:2] == (82, 82)
        ids = [i for record in client.records(topic) for i in record.batch.sequence_ids]
        assert ids == list(range(83))


def part(**head: Any) -> admin_pb2.SnapshotPart:
    return admin_pb2.SnapshotPart(head=admin_pb2.SnapshotHead(**head))


def put_back(client: Client, *requests: admin_pb2.ImportSnapshotRequest) -> admin_pb2.Topic:
    return client.admin.ImportSnapshot(iter(requests), timeout=TIMEOUT_SECONDS).topic


def test_what_is_no_snapshot_of_this_topic_changes_nothing(client: Client, shared: Sidecar, topic: str) -> None:
    epochs = client.epochs(topic, "p")
    client.publish_unary(topic, batch([("p", 5)], epochs, {"p": -1}))
    before = client.state(topic)
    answers = list(client.admin.ExportSnapshot(admin_pb2.ExportSnapshotRequest(topic=topic)))
    first = admin_pb2.ImportSnapshotRequest(topic=topic, part=answers[0].part)
    rest = [admin_pb2.ImportSnapshotRequest(part=answer.part) for answer in answers[1:]]
    other = admin_pb2.ImportSnapshotRequest()
    other.CopyFrom(first)
    other.part.head.position.incarnation += 1
    beyond = admin_pb2.ImportSnapshotRequest()
    beyond.CopyFrom(first)
    beyond.part.head.position.index += 1
    for requests, reason in (
        ([], "INVALID_REQUEST"),
        ([first], "INVALID_REQUEST"),
        ([*rest, first], "INVALID_TOPIC_NAME"),  # who may put back what is asked first
        ([first, *rest, *rest], "INVALID_REQUEST"),
        ([admin_pb2.ImportSnapshotRequest(topic="there-is-none", part=first.part), *rest], "TOPIC_NOT_FOUND"),
        ([other, *rest], "POSITION_OF_ANOTHER_INCARNATION"),
        ([beyond, *rest], "POSITION_AFTER_END"),
        ([admin_pb2.ImportSnapshotRequest(topic=topic, part=part(term=-1))], "INVALID_REQUEST"),
    ):
        assert refused(lambda requests=requests: put_back(client, *requests)).reason == reason  # type: ignore[misc]
        assert client.state(topic) == before
    assert put_back(client, first, *rest).state == admin_pb2.TOPIC_STATE_SERVING
    client.publish_unary(topic, batch([("p", 6)], epochs))


def test_it_survives_kill_9_and_a_lost_store(start_sidecar: Callable[..., Sidecar], tmp_path: Path) -> None:
    sidecar = start_sidecar()
    client = Client(sidecar.address)
    create(client, "t")
    marks = {f"p{i}": i for i in range(5)}
    assert send(client, request("t", marks), request("", {}, 5)) == 5
    # One that did not end has done nothing.
    assert refused(lambda: send(client, request("t", {"q": 9}))).reason == "INVALID_REQUEST"
    for rebuild in (False, True):
        sidecar.kill()
        if rebuild:
            (sidecar.data / "store").rename(tmp_path / "lost")
            sidecar.keys["rebuild_store"] = True
        sidecar.start()
        topic = client.admin.GetTopic(admin_pb2.GetTopicRequest(topic="t"), wait_for_ready=True).topic
        assert topic.producers == 5
        assert [client.producer("t", name)[1] for name in marks] == list(marks.values())
    client.close()
