"""Webhook-like events through gateways that are killed at random: each stored once, each copy answered as its original.

    python -m tests.examples.webhooks --events 100000 --seed 7

Each event is a JSON text with an ID. This many of a thousand are delivered again hours later, by the clock of the
events. Everything that has no 200 is delivered again. Gateways are the workers of one uvicorn; they and the sidecar die
by kill
-9.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen
from typing import Any, Self

import psutil

from seqdedupe.client import Client
from seqdedupe.testing import Sidecar, reserved_port

ROOT = Path(__file__).parents[2]
TOPIC = "webhooks"
WORKERS = 4
SENDERS = 64
COPIES_A_THOUSAND = 6
EVENTS_AN_HOUR = 20_000
"""By their own clock."""
ANSWER_SECONDS = 20.0


class Gateways:
    """The workers of a uvicorn, for the length of a block."""

    def __init__(self, sidecar: Sidecar, workers: int) -> None:
        self._workers = workers
        self._reserving = reserved_port()
        self.port: int = self._reserving.getsockname()[1]
        self._sidecar = sidecar
        self._process: Popen[bytes] | None = None
        self.killed = 0

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "uvicorn", "--workers", str(self._workers), "--port", str(self.port)]
        environment = {"SEQDEDUPE_ADDRESS": self._sidecar.address, "WEBHOOK_TOPIC": TOPIC}
        command += [
            "--timeout-worker-healthcheck",
            "240",
            "--no-access-log",
            "--log-level",
            "critical",
            "examples.webhook.app:app",
        ]
        self._process = Popen(command, cwd=ROOT, env=os.environ | environment)
        return self

    def workers(self) -> list[psutil.Process]:
        """Those that run now; the other child of their parent looks after what processes share."""
        if self._process is None:
            return []
        children = psutil.Process(self._process.pid).children()
        return [child for child in children if "spawn_main" in " ".join(_command(child))]

    def kill_one(self, rng: random.Random) -> None:
        """One of them ends by kill -9; its parent starts another one."""
        if workers := self.workers():
            with suppress(psutil.NoSuchProcess):
                rng.choice(workers).kill()
                self.killed += 1

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            workers = self.workers()
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            for worker in workers:
                with suppress(psutil.NoSuchProcess):
                    worker.kill()
        self._reserving.close()


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@dataclass
class Campaign:
    """Deliveries in the order of the events' clock, and what came of them."""

    port: int
    events: int
    rng: random.Random
    told: dict[int, tuple[int, str]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    failures: int = 0
    delivered: int = 0

    def deliveries(self) -> list[int]:
        """For each delivery, the number of its event."""
        due = [(float(k), k) for k in range(self.events)]
        copied = self.rng.sample(range(self.events), max(1, self.events * COPIES_A_THOUSAND // 1000))
        due += [(k + EVENTS_AN_HOUR * self.rng.uniform(0.5, 12), k) for k in copied]
        return [k for _, k in sorted(due)]

    async def run(self) -> None:
        """Returns when every delivery has had its answer."""
        left = iter(self.deliveries())
        await asyncio.gather(*(self._sender(left) for _ in range(SENDERS)))

    async def _sender(self, left: Any) -> None:
        connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        for event in left:
            while True:
                try:
                    async with asyncio.timeout(ANSWER_SECONDS):
                        if connection is None:
                            connection = await asyncio.open_connection("127.0.0.1", self.port)
                        status, body = await post(*connection, event_id(event), payload(event))
                except (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError):
                    status, body = 0, b""
                    if connection is not None:
                        connection[1].close()
                    connection = None
                if status == 200:
                    break
                if status not in (0, 503):
                    self.wrong.append(f"event {event}: {status} {body!r}")
                    break
                self.failures += 1
                await asyncio.sleep(self.rng.uniform(0, 0.2))
            if status == 200:
                answer = json.loads(body)
                said = answer["index"], answer["message_id"]
                if self.told.setdefault(event, said) != said:
                    self.wrong.append(f"event {event}: first {self.told[event]}, then {said}")
            self.delivered += 1
        if connection is not None:
            connection[1].close()


def event_id(event: int) -> str:
    return f"evt_{event:012d}"


def payload(event: int) -> bytes:
    return json.dumps({"id": event_id(event), "type": "invoice.paid", "data": {"object": {"amount": event}}}).encode()


async def post(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, webhook_id: str, body: bytes
) -> tuple[int, bytes]:
    """Status and body of the answer to a POST. The connection stays open."""
    head = f"POST / HTTP/1.1\r\nHost: localhost\r\nwebhook-id: {webhook_id}\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode("latin-1") + body)
    answer = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in answer[1:] if line)
    return int(answer[0].split(" ")[1]), await reader.readexactly(int(headers["content-length"]))


async def _kill(campaign: Campaign, gateways: Gateways, sidecar: Sidecar, kills: int) -> None:
    """This many kills, spread over the deliveries; every tenth one is the sidecar's."""
    for kill in range(1, kills + 1):
        while campaign.delivered < campaign.events * kill // (kills + 1):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        if kill % 10 == 0:
            await asyncio.to_thread(sidecar.kill)
            await asyncio.to_thread(sidecar.start)
        else:
            gateways.kill_one(campaign.rng)


async def _stored(address: str) -> dict[int, bytes]:
    """The payload of every message, by index."""
    async with Client(address) as client, client.reader(TOPIC) as reader:
        return {message.index: message.payload or b"" async for message in reader}


async def run(
    folder: Path, events: int, kills: int, seed: int, *, workers: int = WORKERS, deduplicates: bool = True
) -> tuple[Campaign, int]:
    """All of it; raises AssertionError unless each event is stored once, where its answers say."""
    with Sidecar(folder) as sidecar:
        async with Client(sidecar.address) as client:
            await client.admin.create_topic(
                TOPIC, deduplication_mode="deduplication-id", deduplication_enabled=deduplicates
            )
        with Gateways(sidecar, workers) as gateways:
            campaign = Campaign(gateways.port, events, random.Random(seed))
            killing = asyncio.create_task(_kill(campaign, gateways, sidecar, kills))
            await campaign.run()
            await killing
        assert not campaign.wrong, campaign.wrong[:5]
        stored = await _stored(sidecar.address)
        counts = Counter(stored.values())
        assert counts == Counter({payload(event): 1 for event in range(events)}), counts.most_common(3)
        assert {event: index for event, (index, _) in campaign.told.items()} == {
            json.loads(body)["data"]["object"]["amount"]: index for index, body in stored.items()
        }
        return campaign, gateways.killed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--kills", type=int, default=0, help="left out: one for every 10,000 events")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        kills = given.kills or max(1, given.events // 10_000)
        campaign, killed = asyncio.run(run(Path(folder), given.events, kills, given.seed))
    print(
        f"{given.events:,} events, {campaign.delivered - given.events:,} copies, each once: {killed} workers killed, "
        f"{campaign.failures:,} deliveries without 200, {time.monotonic() - began:.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
