"""What a real sidecar shows of what was done to it, number by number."""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner

from broker_sidecar.metrics import MAX_NAMED, OTHER
from seqdedupe import exports
from seqdedupe.cli.commands import cli
from seqdedupe.client.blocking import Client as BlockingClient
from seqdedupe.exports import KnownId
from seqdedupe.testing import Sidecar
from seqdedupe.v1 import admin_pb2, read_pb2
from tests.broker_sidecar import with_constants
from tests.broker_sidecar.calls import TIMEOUT_SECONDS, Client, batch
from tests.broker_sidecar.metrics.scraping import SHORT, WAIT_SECONDS, Page, address_of, metrics_of, scrape

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
PUBLISH = {"grpc_service": "seqdedupe.v1.PublishService"}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    """A sidecar that no test may kill, and that shows what is true at the moment."""
    environment = with_constants.environment(seqdedupe__http_server__FRESH_SECONDS=0)
    with Sidecar(
        tmp_path_factory.mktemp("metrics"),
        module=with_constants.MODULE,
        environment=environment,
        metrics_listen="127.0.0.1:0",
    ) as sidecar:
        yield sidecar


def until(sidecar: Sidecar, holds: Callable[[Page], bool]) -> Page:
    """The first page of which this holds. What happens after an answer may be counted after it too."""
    ends = time.monotonic() + WAIT_SECONDS
    while not holds(page := scrape(sidecar)):
        assert time.monotonic() < ends
        time.sleep(0.02)
    return page


def test_messages_bytes_and_refusals(shared: Sidecar, client: Client, topic: str) -> None:
    full = SHORT + topic
    epochs = client.epochs(topic, "a", "b")
    stream = client.stream(topic)
    before = scrape(shared)
    rows = [("a", 0), ("b", 0), ("a", 1), ("a", 2)]
    sent = batch(rows, epochs)
    stream.receipt(sent)
    stream.receipt(batch([*rows[1:], ("a", 3)], epochs, {"a": 0, "b": -1}))
    assert stream.refusal(batch([("b", 9)], epochs, {"b": 8})).reason == "PREDECESSOR_MISSING"
    after = scrape(shared)
    of_topic = {verdict: after.value("seqdedupe_messages_total", topic=full, verdict=verdict) for verdict in VERDICTS}
    assert of_topic == {"not_dup": 5, "dup": 3, "unknown": 0}
    # The second batch was cut down to what is new.
    stored = after.value("seqdedupe_stored_bytes_total", topic=full)
    assert sent.ByteSize() < stored < 2 * sent.ByteSize()
    assert after.value("seqdedupe_refused_frames_total", topic=full) == 1
    reason = {"reason": "PREDECESSOR_MISSING"}
    assert risen("seqdedupe_refusals_total", before, after, **reason) == 1
    assert after.value("seqdedupe_producers", topic=full) == 2
    assert after.value("seqdedupe_snapshot_distance_messages", topic=full) == 5
    assert after.value("seqdedupe_log_bytes", topic=full) > stored
    assert risen("seqdedupe_commit_group_batches_sum", before, after) >= 2
    assert risen("seqdedupe_sync_seconds_count", before, after) >= 2
    client.admin.Snapshot(admin_pb2.SnapshotRequest(topic=topic), timeout=TIMEOUT_SECONDS)
    settled = scrape(shared)
    assert settled.value("seqdedupe_snapshot_distance_messages", topic=full) == 0
    assert settled.value("seqdedupe_snapshot_age_seconds", topic=full) == 0
    assert risen("seqdedupe_snapshots_total", after, settled) >= 1
    stream.end()


VERDICTS = ("not_dup", "dup", "unknown")


def risen(name: str, before: Page, after: Page, **labels: str) -> float:
    return after.sum(name, **labels) - before.sum(name, **labels)


def test_the_series_of_a_deleted_topic_end_and_nothing_else_falls(shared: Sidecar, client: Client, topic: str) -> None:
    before = scrape(shared)
    for round_ in (1, 2):
        epochs = client.epochs(topic, "a")
        client.stream(topic).receipt(batch([("a", 0), ("a", 1)], epochs))
        page = scrape(shared)
        assert page.value("seqdedupe_messages_total", topic=SHORT + topic, verdict="not_dup") == 2
        client.admin.DeleteTopic(admin_pb2.DeleteTopicRequest(topic=topic), timeout=TIMEOUT_SECONDS)
        after = scrape(shared)
        assert SHORT + topic not in after.labels("seqdedupe_messages_total", "topic")
        assert risen("seqdedupe_recoveries_total", before, after) == round_


def test_calls(shared: Sidecar, client: Client, topic: str) -> None:
    # Those of other tests have ended.
    before = until(shared, lambda page: page.sum("grpc_server_started_total") == page.sum("grpc_server_handled_total"))
    epochs = client.epochs(topic, "a")
    with pytest.raises(grpc.RpcError):
        client.reading.GetLastMessageId(read_pb2.GetLastMessageIdRequest(topic="nowhere"), timeout=TIMEOUT_SECONDS)
    with pytest.raises(grpc.RpcError):
        client.raw("/seqdedupe.v1.PublishService/NoSuchCall", b"")
    with pytest.raises(grpc.RpcError):
        client.raw("/seqdedupe.v1.PublishService/Open", b"\xff")
    stream = client.stream(topic)
    for sequence_id in range(3):
        stream.receipt(batch([("a", sequence_id)], epochs))
    stream.end()
    streamed = PUBLISH | {"grpc_method": "PublishStream", "grpc_type": "bidi_stream"}
    opened = PUBLISH | {"grpc_method": "Open", "grpc_type": "unary"}
    read = {"grpc_service": "seqdedupe.v1.ReadService", "grpc_method": "GetLastMessageId", "grpc_type": "unary"}

    handled = "grpc_server_handled_total"

    def cut(number: int) -> Page:
        stream = client.stream(topic)
        stream.receipt(batch([("a", 2 + number)], epochs))
        until(shared, lambda page: risen("grpc_server_msg_sent_total", before, page, **streamed) >= 3 + number)
        stream.call.cancel()
        return until(shared, lambda page: risen(handled, before, page, **streamed) == 1 + number)

    # gRPC may show a cancellation as the end of the messages first: then the stream has ended well.
    after = cut(cuts := 1)
    while not risen(handled, before, after, grpc_code="Canceled", **streamed):
        after = cut(cuts := cuts + 1)
    assert risen("grpc_server_started_total", before, after, **opened) == 2
    assert risen(handled, before, after, grpc_code="OK", **opened) == 1
    assert risen(handled, before, after, grpc_code="InvalidArgument", **opened) == 1
    assert risen(handled, before, after, grpc_code="NotFound", **read) == 1
    assert risen("grpc_server_handling_seconds_count", before, after, **opened) == 2
    assert risen("grpc_server_msg_received_total", before, after, **opened) == 2
    assert risen("grpc_server_msg_sent_total", before, after, **opened) == 1
    assert risen("grpc_server_started_total", before, after, **streamed) == 1 + cuts
    assert risen(handled, before, after, grpc_code="OK", **streamed) == cuts
    # The topic's name goes in its own message.
    assert risen("grpc_server_msg_received_total", before, after, **streamed) == 4 + 2 * cuts
    assert "NoSuchCall" not in after.labels("grpc_server_started_total", "grpc_method")


def test_calls_have_the_type_of_the_schema(shared: Sidecar, client: Client, topic: str) -> None:
    """Also where gRPC takes them for streams, so that callers are known before anything is received."""
    client.epochs(topic, "a")
    before = scrape(shared)
    list(client.reading.ReadStream(read_pb2.ReadStreamRequest(topic=topic), timeout=TIMEOUT_SECONDS))
    read = {"grpc_service": "seqdedupe.v1.ReadService", "grpc_method": "ReadStream", "grpc_type": "server_stream"}
    after = until(shared, lambda page: risen("grpc_server_handled_total", before, page, grpc_code="OK", **read) == 1)
    assert risen("grpc_server_msg_received_total", before, after, **read) == 1


def test_a_call_that_its_client_gives_up_before_its_request_is_no_refusal(shared: Sidecar, client: Client) -> None:
    def nothing() -> Iterator[bytes]:
        given_up.wait(TIMEOUT_SECONDS)
        yield from ()

    before, given_up = scrape(shared), threading.Event()
    send: Any = client.channel.stream_unary("/seqdedupe.v1.ReadService/Locate")
    call = send.future(nothing())
    located = {"grpc_service": "seqdedupe.v1.ReadService", "grpc_method": "Locate", "grpc_type": "unary"}
    until(shared, lambda page: risen("grpc_server_started_total", before, page, **located) == 1)
    call.cancel()
    given_up.set()
    canceled = {"grpc_code": "Canceled", **located}
    after = until(shared, lambda page: risen("grpc_server_handled_total", before, page, **canceled) == 1)
    assert risen("seqdedupe_refusals_total", before, after, reason="MALFORMED_MESSAGE") == 0


def test_a_cursor_lags_also_without_its_reader(shared: Sidecar, client: Client, topic: str) -> None:
    lag = {"name": "seqdedupe_cursor_lag_messages", "topic": SHORT + topic}
    with BlockingClient(shared.address) as blocking, blocking.producer(topic, "a") as producer:
        for _ in range(3):
            producer.send(b"x")
        producer.flush()
        assert scrape(shared).value(**lag) == 0
        for name, index in (("far", 0), ("near", 1)):
            with blocking.reader(topic, cursor=blocking.cursor(topic, name)) as reader:
                for _ in range(index + 1):
                    next(reader)
                reader.save_position()
        assert scrape(shared).value(**lag) == 2
        producer.send(b"x")
        producer.flush()
        assert scrape(shared).value(**lag) == 3
        blocking.admin.delete_cursor(topic, "far")
        assert scrape(shared).value(**lag) == 2
        shown = CliRunner().invoke(cli, ["cursors", topic, "--json", "--address", shared.address])
        assert [(one["name"], one["lag_messages"]) for one in json.loads(shown.stdout)] == [("near", 2)]


def test_a_reader_that_reads_nothing_lags(shared: Sidecar, client: Client, topic: str) -> None:
    epochs = client.epochs(topic, "a")
    stream = client.stream(topic)
    messages = 24
    for sequence_id in range(messages):
        stream.receipt(batch([("a", sequence_id)], epochs, payloads=[bytes(1 << 20)]))
    reading = client.reading.ReadStream(read_pb2.ReadStreamRequest(topic=topic), timeout=TIMEOUT_SECONDS)
    lag = {"name": "seqdedupe_reader_lag_messages", "topic": SHORT + topic}
    page = until(shared, lambda page: 0 < page.value(**lag) < messages)
    assert page.value("seqdedupe_readers") >= 1
    before = page.value("seqdedupe_sent_messages_total")
    assert sum(len(answer.records) for answer in reading) == messages
    after = until(shared, lambda page: page.value(**lag) == 0)
    assert before < after.value("seqdedupe_sent_messages_total")
    assert after.value("seqdedupe_sent_bytes_total") > messages << 20


def test_many_topics_share_a_series_until_there_is_room(shared: Sidecar, client: Client, topic: str) -> None:
    before = scrape(shared)
    names = [f"{topic}-{k}" for k in range(MAX_NAMED + 5)]
    for name in names:
        epochs = client.epochs(name, "a")
        client.stream(name).receipt(batch([("a", 0)], epochs))
    after = scrape(shared)
    shown = after.labels("seqdedupe_messages_total", "topic")
    assert len(shown) == MAX_NAMED + 1
    assert OTHER in shown
    assert risen("seqdedupe_messages_total", before, after, verdict="not_dup") == len(names)
    assert risen("seqdedupe_producers", before, after) == len(names)
    assert after.value("seqdedupe_topics", state="serving") >= len(names)
    # It is how far the one of them that has the most is, and no sum.
    assert after.value("seqdedupe_snapshot_distance_messages", topic=OTHER) == 1
    for name in names:
        client.admin.DeleteTopic(admin_pb2.DeleteTopicRequest(topic=name), timeout=TIMEOUT_SECONDS)
    scrape(shared)
    epochs = client.epochs(topic, "a")
    client.stream(topic).receipt(batch([("a", 0)], epochs))
    assert SHORT + topic in scrape(shared).labels("seqdedupe_messages_total", "topic")


def test_both_formats_say_the_same(shared: Sidecar) -> None:
    text, openmetrics = scrape(shared), scrape(shared, OPENMETRICS)
    assert text.names == openmetrics.names
    assert metrics_of(address_of(shared), OPENMETRICS).endswith("# EOF\n")


def test_who_asks_again_at_once_is_shown_the_same(tmp_path: Path) -> None:
    with Sidecar(tmp_path / "one", metrics_listen="127.0.0.1:0") as sidecar:
        # Twice within half a second may not be possible on this machine now; once among many it is.
        pages = [metrics_of(address_of(sidecar)) for _ in range(100)]
        assert len(set(pages)) < len(pages)


def test_after_a_crash_it_says_what_was_replayed(tmp_path: Path) -> None:
    with Sidecar(tmp_path / "one", metrics_listen="127.0.0.1:0") as sidecar:
        client = Client(sidecar.address)
        epochs = client.epochs("t", "a")
        client.stream("t").receipt(batch([("a", k) for k in range(7)], epochs))
        client.close()
        sidecar.kill()
        sidecar.start()
        page = scrape(sidecar)
        assert page.value("seqdedupe_recoveries_total") == 1
        assert page.value("seqdedupe_replayed_messages_total") == 7
        assert page.value("seqdedupe_recovery_seconds_total") > 0
        assert page.value("seqdedupe_topics", state="serving") == 1


def imported(sidecar: Sidecar) -> tuple[float, float]:
    """How many IDs, and whether they are missing, of topic `t`; in the sum of all topics that is all there is."""
    page = scrape(sidecar)
    of_topic = [page.value(f"seqdedupe_window_{name}", topic=SHORT + "t") for name in ("imported", "imported_missing")]
    assert of_topic == [page.sum(f"seqdedupe_window_{name}") for name in ("imported", "imported_missing")]
    return of_topic[0], of_topic[1]


def test_imported_ids_and_that_they_are_missing(tmp_path: Path) -> None:
    window = tmp_path / "window"
    exports.write_window(window, [KnownId(b"%d" % k, 1) for k in range(7)])
    up_to_date = with_constants.environment(seqdedupe__http_server__FRESH_SECONDS=0)
    with (
        Sidecar(
            tmp_path / "one", module=with_constants.MODULE, environment=up_to_date, metrics_listen="127.0.0.1:0"
        ) as sidecar,
        BlockingClient(sidecar.address) as client,
    ):
        client.admin.create_topic("t", deduplication_mode="deduplication-id")
        client.admin.create_topic("other", deduplication_mode="deduplication-id")
        assert imported(sidecar) == (0, 0)
        client.admin.import_window("t", window)
        assert imported(sidecar) == (7, 0)
        sidecar.stop()
        shutil.rmtree(sidecar.data / "store")
        sidecar.keys["rebuild_store"] = True
        sidecar.start()
        assert imported(sidecar) == (7, 1)
        client.admin.import_window("t", window)
        assert imported(sidecar) == (7, 0)


def test_without_the_key_nothing_is_served(sidecar: Sidecar) -> None:
    assert not [line for line in sidecar.log if line["event"] == "metrics"]
    names = {(task / "comm").read_text().strip() for task in Path(f"/proc/{sidecar.pid}/task").iterdir()}
    assert "seqdedupe-web" not in names


def test_each_worker_has_an_address(tmp_path: Path) -> None:
    with Sidecar(tmp_path / "two", workers=2, metrics_listen="127.0.0.1:0") as sidecar:
        addresses = {line["address"] for line in sidecar.log if line["event"] == "metrics"}
        assert len(addresses) == 2
        pids = set()
        for address in addresses:
            text = metrics_of(str(address))
            pids |= {line for line in text.splitlines() if line.startswith("process_start_time_seconds")}
        assert len(pids) == 2
