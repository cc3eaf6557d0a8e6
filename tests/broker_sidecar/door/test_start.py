"""The door when its sidecar starts, cannot serve yet, and stops."""

import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pulsar

from pulsar_broker.standalone import free_port
from seqdedupe.pulsar_wire.pulsar_api_pb2 import CommandPartitionedTopicMetadataResponse, ServerError
from seqdedupe.testing import Sidecar
from tests.broker_sidecar import calls
from tests.broker_sidecar.door.stock_load import TOPIC, StockProducer
from tests.broker_sidecar.door.wire import Wire, door_of
from tests.broker_sidecar.pausing import wait_for
from tests.cli.conftest import COMMAND

NOBODY: dict[str, Any] = {
    "log": "pulsar",
    "pulsar_service_url": "pulsar://127.0.0.1:1",
    "pulsar_admin_url": "http://127.0.0.1:1",
    "pulsar_namespaces": "public/default",
}
"""A cluster that does not answer."""


def test_an_address_that_cannot_be_is_told(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        sidecar = Sidecar(tmp_path / "sidecar", pulsar_listen=address)
        sidecar.spawn()
        assert sidecar.wait() == 1
        [line] = sidecar.errors
        assert line.startswith(f"seqdedupe: pulsar_listen = '{address}': cannot listen there: Address already in use")
        assert "[CANNOT_LISTEN]" in line
        assert not (sidecar.data / "store").exists()

        config = tmp_path / "sidecar.toml"
        config.write_text(f'data_directory = "{tmp_path / "data"}"\npulsar_listen = "{address}"\n')
        checked = subprocess.run([COMMAND, "config", "check", str(config)], capture_output=True, text=True, check=False)
        assert f"pulsar_listen = '{address}': cannot listen there" in checked.stdout
    elsewhere = Sidecar(tmp_path / "elsewhere", pulsar_listen="192.0.2.1:1", allow_insecure_listen=True)
    elsewhere.spawn()
    assert elsewhere.wait() == 1
    [line] = elsewhere.errors
    assert line.startswith("seqdedupe: pulsar_listen = '192.0.2.1:1': cannot listen there: Cannot assign")


def test_a_client_waits_for_a_sidecar_that_does_not_know_its_topics_yet(
    tmp_path: Path, open_wire: Callable[..., Wire]
) -> None:
    """The code for that must not be ServiceNotReady: the clients would end their connections, with all producers."""
    sidecar = Sidecar(tmp_path, pulsar_listen="127.0.0.1:0", **NOBODY)
    sidecar.spawn()
    try:
        wait_for(lambda: any(entry["event"] == "door" for entry in sidecar.log))
        wire = open_wire(door_of(sidecar))
        answer = wire.partitions("t").partitionMetadataResponse
        assert answer.response == CommandPartitionedTopicMetadataResponse.Failed
        assert answer.error == ServerError.MetadataError
        assert "[RECOVERING]" in answer.message
        assert wire.partitions("t").partitionMetadataResponse.error == ServerError.MetadataError
    finally:
        sidecar.kill()


def test_a_sidecar_that_is_asked_to_stop_under_stock_producers(tmp_path: Path) -> None:
    """It stops in time, and they go on at its next start: nothing is lost, doubled or refused."""
    with Sidecar(tmp_path, pulsar_listen=f"127.0.0.1:{free_port()}", drain_timeout_seconds=20) as sidecar:
        client = pulsar.Client(f"pulsar://{door_of(sidecar)}", logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
        producers = [StockProducer(client, name, seed) for seed, name in enumerate(("a", "b"))]
        for producer in producers:
            producer.start()
        for _ in range(3):
            for producer in producers:
                producer.wait_for_more(50)
            assert sidecar.stop() == 0
            assert not sidecar.errors
            sidecar.start()
        for producer in producers:
            producer.wait_for_more(50)
            producer.finish()
            assert not producer.failed
        client.close()
        log = calls.Client(sidecar.address)
        rows = log.rows(TOPIC)
        log.close()
    for producer in producers:
        ids = [i for name, i in rows if name == producer.name_in_log]
        assert ids == list(range(producer.sent))
