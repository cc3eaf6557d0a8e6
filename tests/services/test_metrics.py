"""What services show of themselves while they run, and how far behind they are when they do not. One sidecar, SQLite,
some commands: twenty seconds."""

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families as parse
from sqlalchemy import Connection, Engine, create_engine

from seqdedupe.cli.commands import cli
from seqdedupe.client import Client as AsyncClient
from seqdedupe.client.blocking import Client
from seqdedupe.client.blocking.loop import run as run_on_loop
from seqdedupe.errors import ConfigurationError, SeqdedupeError, error
from seqdedupe.names import partition_name, topic_name
from seqdedupe.services import metrics
from seqdedupe.services.activity import Activity, Lag, State, lag_after
from seqdedupe.services.consumer import Consumer, ConsumerConfig
from seqdedupe.services.metrics import ServiceMetrics
from seqdedupe.services.outbox import Relay, ddl
from seqdedupe.services.pipe.pipe import BlockingPipe
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from tests.broker_sidecar.metrics.scraping import Page, metrics_of
from tests.services.conftest import Publish

LOOPBACK = "127.0.0.1:0"


@pytest.fixture(autouse=True)
def looking_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr("seqdedupe.http_server.FRESH_SECONDS", 0.0)


def scrape(address: str) -> Page:
    return Page(list(parse(metrics_of(address))))


def until(address: str, holds: Callable[[Page], bool]) -> Page:
    """The first page of which this holds."""
    ends = time.monotonic() + LAST_RESORT_SECONDS
    while not holds(page := scrape(address)):
        assert time.monotonic() < ends, metrics_of(address)
        time.sleep(0.02)
    return page


def state(page: Page) -> tuple[str, str]:
    """The one state that is 1, and its reason."""
    [found] = [
        (sample.labels["state"], sample.labels["reason"])
        for family in page.families
        for sample in family.samples
        if sample.name == "seqdedupe_service_state" and sample.value
    ]
    return found


def health(address: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(f"http://{address}/healthz", timeout=LAST_RESORT_SECONDS) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as e:
        return e.code, json.loads(e.read())


@contextmanager
def running(run: Callable[[], None], stop: Callable[[], None]) -> Iterator[None]:
    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop()
        thread.join()


def lags(messages: int) -> Callable[[Page], bool]:
    return lambda page: page.values("seqdedupe_service_lag_messages") == [messages]


def test_a_consumer_shows_what_it_has_done_and_how_far_behind_it_is(
    client: Client, topic: str, publish: Publish, sqlite: Engine
) -> None:
    may_go_on = threading.Event()

    def handle(_connection: Connection, message: Any) -> None:
        if message.payload == b"3":
            assert may_go_on.wait(LAST_RESORT_SECONDS)

    publish("1", "2")
    consumer = Consumer(client, topic, "billing", sqlite, handle, config=ConsumerConfig(max_batch_messages=1))
    with ServiceMetrics(LOOPBACK, consumer) as served, ExitStack() as stack:
        stack.callback(may_go_on.set)
        assert state(scrape(served.address)) == ("stopped", "")
        assert health(served.address)[0] == 503
        stack.enter_context(running(consumer.run, consumer.stop))
        page = until(served.address, lambda page: page.value("seqdedupe_service_messages_total") == 2 and lags(0)(page))
        assert page.labels("seqdedupe_service_messages_total", "kind") == {"consumer"}
        assert page.labels("seqdedupe_service_messages_total", "name") == {"billing"}
        assert page.value("seqdedupe_service_lag_seconds") == 0
        assert state(page) == ("running", "")
        told = {"kind": "consumer", "name": "billing", "state": "running", "reason": None}
        assert health(served.address) == (200, [told])

        # Within the transaction of a handler that does not return the database is locked: the scrape goes on.
        before = time.time()
        publish("3", "4", "5")
        page = until(served.address, lags(3))
        first = page.value("seqdedupe_service_lag_seconds")
        later = until(served.address, lambda page: page.value("seqdedupe_service_lag_seconds") > first)
        assert later.value("seqdedupe_service_messages_total") == 2
        assert later.value("seqdedupe_service_last_success_timestamp_seconds") <= before
        may_go_on.set()
        page = until(served.address, lags(0))
        assert page.value("seqdedupe_service_messages_total") == 5
        assert page.value("seqdedupe_service_last_success_timestamp_seconds") >= before


def test_a_consumer_that_fails_says_why(client: Client, topic: str, publish: Publish, sqlite: Engine) -> None:
    def refuse(_connection: Connection, _message: Any) -> None:
        raise ValueError("no")

    publish("1")
    config = ConsumerConfig(max_attempts=2, first_backoff_ms=0)
    consumer = Consumer(client, topic, "c", sqlite, refuse, config=config)
    with ServiceMetrics(LOOPBACK, consumer) as served:
        with pytest.raises(SeqdedupeError, match="tried 2 times"):
            consumer.run(follow=False)
        page = scrape(served.address)
        assert state(page) == ("stopped", "HANDLER_FAILED")
        # Each attempt, and the end.
        assert page.value("seqdedupe_service_failures_total", reason="HANDLER_FAILED") == 3
        assert page.values("seqdedupe_service_lag_messages") == []
        status, [told] = health(served.address)
        assert (status, told["reason"]) == (503, "HANDLER_FAILED")


@pytest.mark.parametrize(("poison", "processed", "aside"), [("dead letter", 2, 1), ("retry later", 1, 2)])
def test_what_is_set_aside_is_counted_apart(
    client: Client, topic: str, publish: Publish, sqlite: Engine, poison: Any, processed: int, aside: int
) -> None:
    def handle(_connection: Connection, message: Any) -> None:
        if message.payload == b"bad":
            raise ValueError("no")

    publish("bad", "of its key", "other", keys=["a", "a", "b"])
    hour_ms = 3_600_000
    config = ConsumerConfig(max_attempts=1, poison=poison, first_retry_delay_ms=hour_ms, longest_retry_delay_ms=hour_ms)
    consumer = Consumer(client, topic, "c", sqlite, handle, config=config)
    consumer.run(follow=False)
    assert (consumer.activity.messages, consumer.activity.set_aside) == (processed, aside)


def test_one_that_stands_by_shows_no_lag(client: Client, topic: str, publish: Publish, sqlite: Engine) -> None:
    publish("1")
    one, other = (Consumer(client, topic, "c", sqlite, lambda _c, _m: None, purpose="p") for _ in range(2))
    with ServiceMetrics(LOOPBACK, one) as first, running(one.run, one.stop):
        until(first.address, lags(0))
        with ServiceMetrics(LOOPBACK, other) as second, running(other.run, other.stop):
            page = until(second.address, lambda page: state(page)[0] == "standby")
            assert page.values("seqdedupe_service_lag_messages") == []
            one.stop()
            until(second.address, lags(0))


def test_partitions_add_up(client: Client, topic: str, sqlite: Engine) -> None:
    client.admin.create_topic(topic, partitions=2)
    with client.producer(topic, "p") as producer:
        for n in range(6):
            producer.send(b"%d" % n, key=str(n))
    consumer = Consumer(client, topic, "c", sqlite, lambda _c, _m: None)
    with ServiceMetrics(LOOPBACK, consumer) as served, running(consumer.run, consumer.stop):
        page = until(served.address, lambda page: page.value("seqdedupe_service_messages_total") == 6 and lags(0)(page))
        assert state(page)[0] == "running"


def test_what_is_waited_for_is_the_state(tmp_path: Path, sqlite: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seqdedupe.client.route.SAY_WAITING_SECONDS", 0.0)
    with Sidecar(tmp_path / "sidecar") as sidecar, Client(sidecar.address) as client:
        with client.producer("t", "p") as producer:
            producer.send(b"1")
        consumer = Consumer(client, "t", "c", sqlite, lambda _c, _m: None)
        with ServiceMetrics(LOOPBACK, consumer) as served, running(consumer.run, consumer.stop):
            until(served.address, lags(0))
            sidecar.kill()
            page = until(served.address, lambda page: state(page)[0] == "waiting")
            assert state(page)[1] in page.labels("seqdedupe_service_failures_total", "reason")
            assert page.values("seqdedupe_service_lag_messages") == [0]
            sidecar.start()
            # No message comes that would show that it goes on: the look at the lag does.
            until(served.address, lambda page: state(page) == ("running", ""))


def test_a_pipe(client: Client, topic: str, publish: Publish) -> None:
    client.admin.create_topic(f"{topic}-out")
    publish("a", "b", "c")
    may_go_on = threading.Event()

    def function(message: Any) -> bytes | None:
        if message.payload == b"d":
            assert may_go_on.wait(LAST_RESORT_SECONDS)
        return None if message.payload == b"b" else bytes(message.payload)

    pipe = BlockingPipe(client, topic, f"{topic}-out", function, name="copy")
    with ServiceMetrics(LOOPBACK, pipe) as served, ExitStack() as stack:
        stack.callback(may_go_on.set)
        stack.enter_context(running(lambda: pipe.run(follow=True), pipe.stop))
        until(served.address, lambda page: page.value("seqdedupe_service_messages_total") == 3 and lags(0)(page))
        publish("d", "e")
        page = until(served.address, lags(2))
        assert page.value("seqdedupe_service_lag_seconds") > 0
        may_go_on.set()
        page = until(served.address, lags(0))
        assert page.value("seqdedupe_service_messages_total") == 5
        assert page.labels("seqdedupe_service_messages_total", "kind") == {"pipe"}


def test_a_relay_knows_how_many_rows_wait(shared_sidecar: Sidecar, topic: str, tmp_path: Path) -> None:
    url = outbox(tmp_path, 3)

    async def look() -> tuple[Lag | None, Lag | None, Activity]:
        async with AsyncClient(shared_sidecar.address) as client:
            relay = Relay(client, url, topic, "shop")
            relay._store.open()
            before = await asyncio.to_thread(relay.look_at_lag)
            await relay.run(follow=False)
            relay._store.open()
            after = await asyncio.to_thread(relay.look_at_lag)
            relay._store.close()
            return before, after, relay.activity

    before, after, activity = asyncio.run(look())
    assert before is not None
    assert before.messages == 3
    assert before.seconds is not None
    assert (after and after.messages, after and after.seconds) == (0, 0.0)
    assert (activity.messages, activity.state) == (3, State.STOPPED)


def outbox(folder: Path, rows: int) -> str:
    url = f"sqlite:///{folder / 'shop.db'}"
    engine = create_engine(url)
    connection: Any = engine.raw_connection()
    connection.executescript(ddl("sqlite"))
    for n in range(rows):
        values = (f"row {n}", "order", "7", "OrderPlaced")
        connection.execute("INSERT INTO outbox (id, aggregatetype, aggregateid, type) VALUES (?, ?, ?, ?)", values)
    connection.commit()
    connection.close()
    engine.dispose()
    return url


# -- The command line: where metrics are served.

MAIN = "# may start warm\nfrom seqdedupe.cli.main import main; main()"


def relay(sidecar: Sidecar, url: str, topic: str, *more: str) -> list[str]:
    named = ["--database", url, "--topic", topic, "--producer", "shop", "--address", sidecar.address]
    return ["outbox", "relay", *named, *more]


def test_a_command_serves_until_it_ends(shared_sidecar: Sidecar, topic: str, tmp_path: Path) -> None:
    arguments = relay(shared_sidecar, outbox(tmp_path, 2), topic, "--metrics-listen", LOOPBACK)
    process = subprocess.Popen([sys.executable, "-c", MAIN, *arguments], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        said = process.stderr.readline()
        found = re.fullmatch(r"seqdedupe: metrics at http://(127\.0\.0\.1:\d+)/metrics\n", said)
        assert found, said
        page = until(found[1], lambda page: page.value("seqdedupe_service_messages_total") == 2)
        assert page.labels("seqdedupe_service_messages_total", "kind") == {"outbox"}
        assert page.value("process_resident_memory_bytes") > 0
        until(found[1], lags(0))
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize(
    ("listen", "reason", "status"),
    [
        ("taken", "CANNOT_LISTEN", 1),
        ("0.0.0.0:0", "INSECURE_LISTEN", 2),
        ("unix:/x", "INVALID_CONFIGURATION", 2),
        ("x", "INVALID_CONFIGURATION", 2),
    ],
)
def test_where_it_cannot_serve_nothing_is_done(
    shared_sidecar: Sidecar, client: Client, topic: str, tmp_path: Path, listen: str, reason: str, status: int
) -> None:
    url = outbox(tmp_path, 1)
    with socket.create_server(("127.0.0.1", 0)) as other:
        if listen == "taken":
            listen = f"127.0.0.1:{other.getsockname()[1]}"
        arguments = relay(shared_sidecar, url, topic, "--once", "--json", "--metrics-listen", listen)
        command = [sys.executable, "-c", MAIN, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LAST_RESORT_SECONDS, check=False)
    assert done.returncode == status
    assert json.loads(done.stderr)["error"]["reason"] == reason
    assert topic_name(topic) not in [one.name for one in client.admin.topics()]
    # Control: the same without it.
    run = CliRunner().invoke(cli, relay(shared_sidecar, url, topic, "--once", "--json"))
    assert json.loads(run.stdout)["published"] == 1


def test_other_machines_are_let_in_where_that_is_allowed() -> None:
    with ServiceMetrics("0.0.0.0:0", allow_insecure_listen=True) as served:
        assert scrape(served.address.replace("0.0.0.0", "127.0.0.1")).names >= {"seqdedupe_build_info"}
    with pytest.raises(ConfigurationError, match="INSECURE_LISTEN"):
        ServiceMetrics("0.0.0.0:0")


# -- How far behind a service is that does not run.


def invoke(*arguments: str, status: int = 0) -> Any:
    done = CliRunner().invoke(cli, [*arguments, "--json"], standalone_mode=False)
    assert done.return_value == status, (done.output, done.exception)
    return json.loads(done.stdout)


def test_the_lag_of_a_consumer_that_does_not_run(
    shared_sidecar: Sidecar, client: Client, topic: str, publish: Publish, sqlite: Engine, sqlite_url: str
) -> None:
    publish("1", "2")
    Consumer(client, topic, "mail", sqlite, lambda _c, _m: None).run(follow=False)
    lag = ("consumer", "lag", "mail", "--database", sqlite_url, "--address", shared_sidecar.address)
    assert invoke(*lag, "--max-messages", "0", "--max-seconds", "0")["messages"] == 0
    published = time.time()
    publish("3", "4", "5")
    found = invoke(*lag)
    [of_topic] = found["topics"]
    assert (found["messages"], of_topic["messages"]) == (3, 3)
    assert of_topic["topic"] == topic_name(topic)
    assert 0 <= found["seconds"] <= time.time() - published + 1
    assert invoke(*lag, "--max-messages", "3")
    assert invoke(*lag, "--max-messages", "2", status=1)["messages"] == 3
    assert invoke(*lag, "--max-seconds", "3600")
    assert invoke(*lag, "--max-seconds", "0", status=1)
    table = CliRunner().invoke(cli, list(lag)).stdout.splitlines()
    assert table[0].split() == ["TOPIC", "INDEX", "LAG", "SECONDS"]
    assert table[1].split()[:3] == [topic_name(topic), "1", "3"]
    unknown = CliRunner().invoke(cli, ["consumer", "lag", "male", *lag[3:]], standalone_mode=False)
    assert isinstance(unknown.exception, SeqdedupeError)
    assert unknown.exception.reason == "INVALID_OPTION"
    assert "mail" in unknown.exception.hint


def test_the_lag_of_a_partitioned_consumer(
    shared_sidecar: Sidecar, client: Client, topic: str, sqlite: Engine, sqlite_url: str
) -> None:
    client.admin.create_topic(topic, partitions=11)
    Consumer(client, topic, "c", sqlite, lambda _c, _m: None).run(follow=False)
    with client.producer(topic, "p") as producer:
        for n in range(40):
            producer.send(b"%d" % n, key=str(n))
    found = invoke("consumer", "lag", "c", "--database", sqlite_url, "--address", shared_sidecar.address)
    assert [one["topic"] for one in found["topics"]] == [partition_name(topic_name(topic), k) for k in range(11)]
    assert found["messages"] == sum(one["messages"] for one in found["topics"]) == 40


def test_the_lag_of_a_pipe_that_does_not_run(
    shared_sidecar: Sidecar, client: Client, topic: str, publish: Publish
) -> None:
    publish("1", "2")
    client.admin.create_topic(f"{topic}-out")
    lag = ("pipe", topic, f"{topic}-out", "--name", "copy", "--lag", "--address", shared_sidecar.address)
    assert invoke(*lag)["messages"] == 2
    BlockingPipe(client, topic, f"{topic}-out", lambda message: message.payload, name="copy").run()
    assert invoke(*lag)["messages"] == 0
    publish("3")
    assert invoke(*lag, "--max-messages", "0", status=1)["messages"] == 1
    for wrong in (["--function", "os:getcwd"], ["--follow"]):
        assert CliRunner().invoke(cli, [*lag, *wrong]).exit_code == 2
    assert CliRunner().invoke(cli, ["pipe", "a", "b", "--name", "n", "--max-messages", "1"]).exit_code == 2


def test_the_lag_of_a_topic_that_was_made_anew_is_all_of_it(client: Client, topic: str, publish: Publish) -> None:
    publish("1", "2", "3")
    last = client.ends(topic).last
    assert run_on_loop(lambda: lag_after(client.on_loop, topic, last)) == Lag(0, None)
    client.admin.delete_topic(topic)
    publish("4", "5")
    lag = run_on_loop(lambda: lag_after(client.on_loop, topic, last))
    assert lag.messages == 2
    assert lag.oldest_ms is not None


def test_a_look_that_fails_leaves_the_lag_as_it_was() -> None:
    class Failing:
        activity = Activity("consumer", "c")

        def look_at_lag(self) -> Lag | None:
            looked.set()
            raise error("UNREACHABLE", "gone")

    looked, service = threading.Event(), Failing()
    service.activity.runs()
    service.activity.see(Lag(5, 1000))
    with ServiceMetrics(LOOPBACK, service) as served:
        for _ in range(2):
            looked.clear()
            assert looked.wait(LAST_RESORT_SECONDS)
        page = scrape(served.address)
    assert page.value("seqdedupe_service_lag_messages") == 5
    assert page.value("seqdedupe_service_lag_seconds") > 1e9
