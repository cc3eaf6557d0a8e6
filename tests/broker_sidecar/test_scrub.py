"""A sidecar that finds damage in the background says so, and serves."""

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from broker_sidecar.config import Config
from broker_sidecar.data import Data
from seqdedupe.cli.commands import cli
from seqdedupe.client.blocking import Client
from seqdedupe.testing import Sidecar
from seqdedupe.v1 import admin_pb2
from tests.client.helpers import until
from tests.conftest import StartSidecar

MESSAGES = 50
HIT = 33
FAST = 10**9


def publish(sidecar: Sidecar, topic: str, first: int, count: int) -> None:
    with Client(sidecar.address) as client, client.producer(topic, "p") as producer:
        for i in range(first, first + count):
            producer.send(b"message %d." % i).result()


def damage(sidecar: Sidecar) -> None:
    [path] = Path(sidecar.data).glob("logs/*/*.log")
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b"message %d." % HIT, b"massage %d." % HIT))


def errors(sidecar: Sidecar) -> list[str]:
    return [str(entry["event"]) for entry in sidecar.log if entry["level"] == "error"]


def show(sidecar: Sidecar, *more: str) -> str:
    done = CliRunner().invoke(cli, ["topics", "show", "t", "--address", sidecar.address, *more])
    assert done.exit_code == 0, done.output
    return done.stdout


async def test_it_is_logged_counted_and_shown_and_all_go_on(start_sidecar: StartSidecar) -> None:
    sidecar = start_sidecar(scrub_bytes_per_second=FAST)
    publish(sidecar, "t", 0, MESSAGES)
    assert json.loads(show(sidecar, "--json"))["damaged_places"] == 0
    assert "damaged" not in show(sidecar)
    sidecar.stop()
    assert errors(sidecar) == []
    damage(sidecar)
    sidecar.start()
    with Client(sidecar.address) as client:
        await until(lambda: client.admin.topic("t").damaged_places > 0)
        found = client.admin.topic("t")
        assert (found.damaged_places, found.damaged_messages) == (1, 1)
        assert found.state == admin_pb2.TOPIC_STATE_SERVING
        client.wait_ready(0.1)
        publish(sidecar, "t", MESSAGES, 5)
        with client.reader("t", skip_damaged=True) as reader:
            seen = [message.index for message in reader]
        assert (len(seen), reader.skipped) == (MESSAGES + 4, [range(HIT, HIT + 1)])
    shown = json.loads(show(sidecar, "--json"))
    assert (shown["state"], shown["damaged_places"], shown["damaged_messages"]) == ("SERVING", 1, 1)
    assert "1 place of the log, 1 message" in show(sidecar)
    sidecar.stop()
    [line] = errors(sidecar)
    assert f"indexes {HIT} to {HIT} cannot be read" in line
    assert "persistent://public/default/t " in line


@pytest.mark.parametrize("rate", [0, FAST])
async def test_it_can_be_switched_off(tmp_path: Path, rate: int) -> None:
    data = Data(Config(data_directory=str(tmp_path), scrub_bytes_per_second=rate), lambda name, state: None)
    await data.all_topics.open_all()
    data.begin_looking()
    tasks = [repr(task) for task in asyncio.all_tasks()]
    assert any("Scrub" in task for task in tasks) == (rate > 0)
    await data.close()
    assert not any("Scrub" in repr(task) for task in asyncio.all_tasks())
