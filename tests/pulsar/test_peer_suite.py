"""Tests of Pulsar's Go client through the door: the ones that take a second. `make peer-tests` runs all of them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pulsar_broker.distribution import Unavailable
from pulsar_broker.standalone import Broker
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from tests.broker_sidecar.door.wire import door_of
from tests.pulsar.peer_suite import BROKER_KEYS, NOT_PASSED, Run, Suite, built, serve, table
from tests.tiers import PULSAR_GO


@pytest.fixture(scope="module")
def suite() -> Suite:
    try:
        return built()
    except Unavailable:
        PULSAR_GO.missing()


@pytest.fixture(scope="module")
def broker(suite: Suite, pulsar_home: Path) -> Iterator[Broker]:
    with Broker(pulsar_home, **BROKER_KEYS) as broker:
        yield broker


@pytest.fixture(scope="module")
def sidecar(broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    with serve(broker, tmp_path_factory.mktemp("peer")) as sidecar:
        yield sidecar


@pytest.mark.parametrize(
    ("test", "publishes"),
    [
        ("TestSimpleProducer", True),
        ("TestProducerCompression", True),
        ("TestProducerLastSequenceID", True),
        ("TestProducerDuplicateNameOnSameTopic", False),
        ("TestExclusiveProducer", False),
        ("TestSendConcurrently", True),
        ("TestReader", True),
        ("TestReaderHasNext", True),
        ("TestReaderLatestInclusiveHasNext", True),
        ("TestJsonSchema", True),
    ],
)
def test_a_test_of_the_go_client_passes(
    suite: Suite, broker: Broker, sidecar: Sidecar, test: str, publishes: bool
) -> None:
    run = Run(suite, f"pulsar://{door_of(sidecar)}", broker.admin_url, LAST_RESORT_SECONDS)
    outcome = run.run(test, sidecar)
    assert outcome.result == "pass", outcome.output
    assert outcome.producers
    assert bool(outcome.entries) == publishes


def test_reasons_are_given_for_tests_that_exist(suite: Suite) -> None:
    assert set(NOT_PASSED) <= set(suite.tests("producer_test.go", "reader_test.go", "schema_test.go"))
    assert len(list(table({}))) == 3
