"""What a function does without the wrapper, or with one that is almost right: each of these arms doubles or loses."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pulsar
import pytest

from pulsar_broker.instance import Instance, details
from pulsar_broker.standalone import Broker
from seqdedupe.testing import Sidecar
from tests.client.fronts import fronts
from tests.pulsar.admin import call
from tests.pulsar.deployed import arrival
from tests.pulsar.flights import LIMIT_SECONDS, Result, differences, flights, give
from tests.pulsar.functions import left, path_of, stored, until, wheel_in

FLIGHTS = 200


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheel_in(tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def client(broker: Broker) -> Iterator[pulsar.Client]:
    client = pulsar.Client(broker.service_url)
    yield client
    client.close()


def wrapped(topic: str, sidecar_address: str, class_name: str, **config: Any) -> dict[str, Any]:
    name = topic.rpartition("/")[2]
    given = {"wrapped": "deployed.One", "sidecar_address": sidecar_address, "output_topic": f"{name}-output"}
    return details(name, topic, class_name=class_name, userConfig=json.dumps(given | config))


async def test_unwrapped_it_doubles_what_it_gave_for_a_batch(
    broker: Broker, pulsar_home: Path, client: pulsar.Client, topic: str, tmp_path: Path, wheel: Path
) -> None:
    """Killed amid the batch, it gets the batch again."""
    some, held = flights(FLIGHTS), tmp_path / "held"
    name, output = topic.rpartition("/")[2], f"{topic}-output"
    config = json.dumps({"hold_from": FLIGHTS // 2, "held": str(held)})
    guarantee = "ATLEAST_ONCE"
    function = details(
        name, topic, class_name="deployed.One", output=output, processingGuarantees=guarantee, userConfig=config
    )
    give(broker.service_url, topic, some, batched=True)
    reader = client.create_reader(output, pulsar.MessageId.earliest)
    expected = [Result("", arrival(one.fields)) for one in some]
    found: list[Result] = []

    def take() -> Result:
        found.append(Result("", reader.read_next(int(LIMIT_SECONDS * 1000)).data().decode()))
        return found[-1]

    with Instance(pulsar_home, tmp_path, broker.service_url, wheel, function) as instance:
        while take() != expected[FLIGHTS // 2 - 1]:
            pass
        instance.kill()
        held.with_suffix(".go").touch()
        while take() != expected[-1]:
            pass
    assert differences(found, expected) == {"too many": FLIGHTS // 2}


async def test_raising_where_an_outcome_is_unknown_loses_the_input(
    broker: Broker, pulsar_home: Path, shared_sidecar: Sidecar, topic: str, tmp_path: Path, wheel: Path
) -> None:
    """The runtime gives it again after later ones."""
    some = flights(FLIGHTS)
    expected = [Result(one.key, arrival(one.fields)) for one in some]
    async with fronts(shared_sidecar.address, 1) as (front,):
        front.doubts = lambda frame: frame.batch.payloads == expected[0].text.encode()
        function = wrapped(topic, front.address, "deployed.Raising")
        output = f"{function['name']}-output"
        give(broker.service_url, topic, some, batched=False)
        with Instance(pulsar_home, tmp_path, broker.service_url, wheel, function) as instance:
            await until(lambda: len(stored(shared_sidecar, output)) == FLIGHTS - 1, instance)
            front.doubts = None
            instance.kill()
            await until(lambda: left(broker, topic) == 0, instance)
    assert front.doubted > 0
    assert stored(shared_sidecar, output) == expected[1:]


async def test_without_its_checks_a_shared_subscription_loses(
    broker: Broker, pulsar_home: Path, shared_sidecar: Sidecar, topic: str, tmp_path: Path, wheel: Path
) -> None:
    """One of two instances is slower: what it has is late."""
    some, held = flights(FLIGHTS), tmp_path / "held"
    function = wrapped(topic, shared_sidecar.address, "deployed.Unchecked", hold_from=0, held=str(held)) | {
        "retainOrdering": False,
        "parallelism": 2,
    }
    function["source"]["subscriptionType"] = "SHARED"
    output = f"{function['name']}-output"

    def consumers() -> int:
        try:
            stats = call(broker, "GET", f"{path_of(topic)}/stats")
        except OSError:
            return 0
        return len(stats["subscriptions"].get(f"public/default/{function['name']}", {}).get("consumers", ()))

    def is_overtaken() -> bool:
        if not held.exists() or not (number := held.read_text().strip()):
            return False
        return any(int(result.text.split()[0]) > int(number) for result in stored(shared_sidecar, output))

    with (
        Instance(pulsar_home, tmp_path, broker.service_url, wheel, function, 0) as slow,
        Instance(pulsar_home, tmp_path, broker.service_url, wheel, function, 1) as fast,
    ):
        await until(lambda: consumers() == 2, slow, fast)
        give(broker.service_url, topic, some, batched=False)
        await until(is_overtaken, slow, fast)
        held.with_suffix(".go").touch()
        await until(lambda: left(broker, topic) == 0, slow, fast)
    texts = [result.text for result in stored(shared_sidecar, output)]
    assert arrival(some[int(held.read_text())].fields) not in texts
