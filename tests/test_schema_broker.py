"""The broker of a hundred and twenty lines: the comment of DedupeService is all that one needs."""

import ast
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from tests import schema_broker
from tests.schema_broker import Log, Message, SchemaBroker

MAX_LINES = 120
KILLS = 5
PRODUCERS = 3
MESSAGES_A_CALL = 20


def test_it_has_at_most_120_lines_and_needs_only_generated_classes() -> None:
    source = Path(schema_broker.__file__).read_text()
    assert len(source.splitlines()) <= MAX_LINES
    imported = {
        node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom) and node.module
    } | {name.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import) for name in node.names}
    assert imported == {"seqdedupe.v1", "itertools", "queue", "time", "typing", "collections.abc", "grpc"}


@pytest.fixture
def brokers(start_sidecar: Callable[..., Sidecar]) -> Iterator[Callable[..., SchemaBroker]]:
    """Makes brokers, of one sidecar that takes snapshots often."""
    sidecar = start_sidecar(log="broker", deduplication_entries_interval=20)
    made: list[SchemaBroker] = []

    def make(log: Log, kind: type[SchemaBroker] = SchemaBroker, topic: str = "t") -> SchemaBroker:
        made.append(kind(sidecar.address, topic, log))
        return made[-1]

    make.sidecar = sidecar  # type: ignore[attr-defined]
    yield make
    for broker in made:
        broker.close()


def send_all(broker: SchemaBroker, messages: list[Message], attempts: int = 200) -> None:
    """As a producer does: from the first that is not in the log, until all are."""
    for _ in range(attempts):
        if not messages:
            return
        stored = broker.publish(messages)
        messages = messages[stored.index(False) if False in stored else len(messages) :]
    raise AssertionError("the messages are not taken")


def test_publish_resend_and_attach_again(brokers: Callable[..., SchemaBroker]) -> None:
    log = Log()
    first = brokers(log)
    send_all(first, [("p", i) for i in range(50)])
    send_all(first, [("p", i) for i in range(60)] + [("q", 5), ("q", 5), ("q", 3)])
    second = brokers(log)
    send_all(second, [("p", i) for i in range(40, 70)])
    send_all(first, [("p", i) for i in range(69, 75)])
    assert log.end() == 76
    assert log.messages == [*[("p", i) for i in range(60)], ("q", 5), *[("p", i) for i in range(60, 75)]][log.first :]
    assert log.first > 0, "nothing was ever trimmed"


class Failing(Log):
    """Appends fail when they are asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.fails = False

    def append(self, messages: list[Message]) -> None:
        if self.fails and messages:
            raise OSError("full")
        super().append(messages)


def test_what_failed_is_new_again(brokers: Callable[..., SchemaBroker]) -> None:
    log = Failing()
    broker = brokers(log)
    assert broker.publish([("p", 1)]) == [True]
    log.fails = True
    assert broker.publish([("p", 1), ("p", 2)]) == [True, False]
    log.fails = False
    assert broker.publish([("p", 1), ("p", 2)]) == [True, True]
    assert log.messages == [("p", 1), ("p", 2)]


def run(brokers: Callable[..., SchemaBroker], log: Log, rng: random.Random) -> list[int]:
    """Producers publish without a pause while sidecar and broker are killed in turn; how many each of them sent."""
    sidecar: Sidecar = brokers.sidecar  # type: ignore[attr-defined]
    lock, stopping = threading.Lock(), threading.Event()
    broker = [brokers(log)]
    sent, failures = [0] * PRODUCERS, list[BaseException]()

    def produce(k: int) -> None:
        try:
            while not stopping.is_set():
                left = [(f"p{k}", i) for i in range(max(0, sent[k] - 5), sent[k] + MESSAGES_A_CALL)]
                while left:
                    with lock:
                        stored = broker[0].publish(left)
                    left = left[stored.index(False) if False in stored else len(left) :]
                sent[k] += MESSAGES_A_CALL
        except BaseException as e:
            failures.append(e)
            raise

    threads = [threading.Thread(target=produce, args=(k,), daemon=True) for k in range(PRODUCERS)]
    for thread in threads:
        thread.start()
    for kill in range(KILLS):
        before = list(sent)
        while not failures and any(now == then for now, then in zip(sent, before, strict=True)):
            time.sleep(0.001)
        time.sleep(rng.uniform(0.0, 0.1))
        if kill % 2:
            with lock:
                broker[0] = brokers(log)
        else:
            sidecar.restart()
    stopping.set()
    for thread in threads:
        thread.join(LAST_RESORT_SECONDS)
    assert not failures, failures
    return sent


class Untrimmed(Log):
    """It keeps everything, so that all can be compared."""

    def trim(self, last: int) -> None:
        assert last < self.end(), "the trim position is not in the log"


def test_kill_9_of_sidecar_and_broker_under_load(
    brokers: Callable[..., SchemaBroker], pytestconfig: pytest.Config
) -> None:
    seed = pytestconfig.getoption("randomly_seed", 1)
    print("seed", seed)
    log = Untrimmed()
    sent = run(brokers, log, random.Random(seed))
    for k in range(PRODUCERS):
        assert [i for name, i in log.messages if name == f"p{k}"] == list(range(sent[k]))


class Deaf(SchemaBroker):
    """The control arm: a broker that takes every attachment for a new topic, and so has nothing to replay."""

    def _attach(self) -> None:
        self.topic += "-new"
        kept, self.log = self.log, Log()
        super()._attach()
        self.log = kept


def test_a_broker_that_replays_nothing_doubles(brokers: Callable[..., SchemaBroker]) -> None:
    log = Untrimmed()
    send_all(brokers(log), [("p", i) for i in range(5)])
    send_all(brokers(log, Deaf), [("p", i) for i in range(3, 8)])
    assert max(Counter(log.messages).values()) == 2


def test_a_replay_that_says_the_log_is_empty_is_refused(brokers: Callable[..., SchemaBroker]) -> None:
    log = Log()
    first = brokers(log)
    send_all(first, [("p", i) for i in range(5)])
    with pytest.raises(Exception, match="the log ends with its start"):
        brokers(Log()).publish([("p", 9)])
