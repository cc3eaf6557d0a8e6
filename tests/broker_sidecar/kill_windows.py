"""kill -9 under a load of copies, while runs of deduplication IDs are made, merged and dropped; a campaign of that.

    python -m tests.kernels tests.broker_sidecar.kill_windows --kills 200 --seed 1

After each start every ID within half of the window is sent again: Dup, of the message that it was said to be. In the
end the log is read: an ID that is there twice had left the window, and every receipt has named a message of its ID.
"""

import argparse
import asyncio
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from seqdedupe.client import Client, Publisher, Verdict
from seqdedupe.errors import SeqdedupeError
from seqdedupe.testing import Sidecar
from seqdedupe.v1 import admin_pb2
from tests.broker_sidecar import small_windows

TOPIC = "ids"
WINDOW = 4000
COPIED = WINDOW // 2
"""A copy is sent of one of this many newest messages."""
SENDERS = 6
MAX_ROWS = 40
ANSWER_SECONDS = 120.0
LONGEST_WAIT_SECONDS = 0.4
"""Before a kill."""


def settings(bug: str = "") -> dict[str, Any]:
    """For a sidecar with little memory for windows."""
    return {
        "module": small_windows.MODULE,
        "environment": {small_windows.BUG: bug} if bug else {},
        "deduplication_window_memory_in_mb": 4,
        "deduplication_entries_interval": 20,
    }


class Load:
    """Senders of frames in which new IDs and copies are mixed. `told`: where each ID is, as the last receipt said."""

    def __init__(self, publisher: Publisher, seed: int) -> None:
        self.told: dict[bytes, int] = {}
        self.said: set[tuple[bytes, int]] = set()
        self.newest: list[bytes] = []
        """The ID of each message that has a receipt, about in their order."""
        self.made = 0
        self.answers = 0
        self.dups = 0
        self.wrong: list[str] = []
        self._publisher = publisher
        self._rng = random.Random(seed)

    def new_id(self) -> bytes:
        self.made += 1
        return b"%d" % self.made + b"x" * self._rng.choice((0, 8, 8, 30, 200))

    async def send(self, stopping: asyncio.Event) -> None:
        while not stopping.is_set():
            rows = self._rng.randint(1, MAX_ROWS)
            known = self.newest[-COPIED:]
            ids = [
                self._rng.choice(known) if known and self._rng.random() < 0.4 else self.new_id() for _ in range(rows)
            ]
            try:
                await self.publish(ids)
            except SeqdedupeError as e:
                self.wrong.append(f"nothing is published any more: {e}")
                return

    async def publish(self, ids: list[bytes]) -> None:
        result = await self._publisher.send_batch([b"of " + one for one in ids], ids)
        self.answers += 1
        for one, verdict, index in zip(ids, result.verdicts.tolist(), result.indexes.tolist(), strict=True):
            before = self.told.get(one, index)
            if before != index and not before + WINDOW < index:
                self.wrong.append(f"{one!r} was said to be at {before}, and now at {index}")
            if one not in self.told:
                self.newest.append(one)
            self.told[one] = index
            self.said.add((one, index))
            self.dups += verdict == Verdict.DUP

    async def check(self) -> None:
        """All that is surely within the window is known."""
        known = sorted(self.newest[-COPIED:], key=lambda one: self.told[one])
        for at in range(0, len(known), 500):
            await self.publish(known[at : at + 500])
        self.check_so_far()

    def check_so_far(self) -> None:
        if self.wrong:
            raise AssertionError(self.wrong[:5])


async def run(folder: Path, kills: int, seed: int, bug: str = "") -> tuple[Load, int]:
    """All of it; and how many IDs lay on disk at the starts. Raises AssertionError for everything that is wrong."""
    rng = random.Random(seed)
    on_disk = 0
    with Sidecar(folder, **settings(bug)) as sidecar:
        async with Client(sidecar.address) as client:
            policy = admin_pb2.TopicPolicy(deduplication_window_max_messages=WINDOW)
            await client.admin.create_topic(TOPIC, deduplication_mode="deduplication-id", policy=policy)
            async with client.publisher(TOPIC, delivery_timeout_seconds=ANSWER_SECONDS) as publisher:
                load = Load(publisher, seed)
                for _ in range(kills):
                    stopping = asyncio.Event()
                    sending = [asyncio.create_task(load.send(stopping)) for _ in range(SENDERS)]
                    before, made = load.answers, load.made
                    while load.answers < before + SENDERS or load.made < made + WINDOW // 4:
                        await asyncio.wait(sending, timeout=0.005)
                        load.check_so_far()
                    await asyncio.sleep(rng.uniform(0, LONGEST_WAIT_SECONDS))
                    await asyncio.to_thread(sidecar.kill)
                    await asyncio.to_thread(sidecar.start)
                    stopping.set()
                    await asyncio.gather(*sending)
                    await load.check()
                    on_disk += (await client.admin.topic(TOPIC)).window_messages_on_disk
        await _check_log(sidecar.address, load)
    return load, on_disk


async def _check_log(address: str, load: Load) -> None:
    last: dict[bytes, int] = {}
    stored: set[tuple[bytes, int]] = set()
    async with Client(address) as client, client.reader(TOPIC) as reader:
        async for message in reader:
            one = message.deduplication_id or b""
            if one in last and not last[one] + WINDOW < message.index:
                raise AssertionError(f"{one!r} stands at {last[one]} and {message.index}")
            last[one] = message.index
            stored.add((one, message.index))
    if not_there := load.said - stored:
        raise AssertionError(f"{len(not_there)} receipts name what is not there, as {sorted(not_there)[:3]}")
    if stored != load.said:
        raise AssertionError(f"{len(stored - load.said)} messages have no receipt")


def main() -> int:
    parser = argparse.ArgumentParser(description="Kills a sidecar again and again while it has runs under way.")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        load, on_disk = asyncio.run(run(Path(folder), given.kills, given.seed))
    print(
        f"{given.kills} kills: {len(load.said):,} messages, {load.dups:,} copies; "
        f"at a start {on_disk // given.kills:,} IDs lay on disk, {time.monotonic() - began:.0f} s"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
