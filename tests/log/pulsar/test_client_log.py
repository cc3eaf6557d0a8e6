"""Pulsar's client never gets a logger of Python's: both could wait for each other, for ever."""

import ast
from pathlib import Path

import pulsar
from pulsar.asyncio import PulsarException

from seqdedupe_spark.cluster.broker_connection import client_logger, told

ROOT = Path(__file__).parents[3]
CLIENTS = ("PulsarClient", "pulsar.Client", "pulsar.asyncio.Client")
SHIPPED = ("broker_sidecar", "seqdedupe", "spark")


def clients_made(path: Path) -> list[ast.Call]:
    text = path.read_text()
    if "Client(" not in text:
        return []  # most files, and parsing is most of the work
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    return [call for call in calls if ast.unparse(call.func) in CLIENTS]


def test_every_client_has_the_logger_that_is_not_pythons() -> None:
    assert isinstance(client_logger(), pulsar.FileLogger)
    made = [call for folder in SHIPPED for path in (ROOT / folder).rglob("*.py") for call in clients_made(path)]
    assert made
    for call in made:
        assert "client_logger()" in [ast.unparse(given.value) for given in call.keywords if given.arg == "logger"]


def test_every_result_of_the_client_has_a_name() -> None:
    """Also those that its Python library does not know."""
    assert told(PulsarException(pulsar.Result.ProducerBusy, "why")) == "ProducerBusy: why"
    assert told(PulsarException(pulsar.Result(46))) == "Disconnected"
    assert told(PulsarException(pulsar.Result(99), "why")) == "result 99: why"
