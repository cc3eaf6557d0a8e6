"""kill -9 of pipes as their own processes, two at once, and of the sidecar; histories by chance; and the controls:
what keeps its position apart from the outputs doubles or loses. A minute, two sidecars, about 30 short processes."""

import asyncio
import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from seqdedupe.client import Client, FileCursor, Kept
from seqdedupe.testing import Sidecar
from tests.processes import running
from tests.services.pipe.scene import cancelled_at, expected, found, lane, outputs_of, publish, run_lane, until

KILLS = 10
STEPS = 40


def test_killed_while_it_runs_each_output_is_there_once(start_sidecar: Callable[..., Sidecar]) -> None:
    kill_pipes(start_sidecar(), KILLS)


def kill_pipes(sidecar: Sidecar, kills: int) -> None:
    """A pipe is killed this many times; some of the time there are two, or the sidecar is killed next to it."""
    pipe = [sys.executable, "-m", "tests.services.pipe.scene", sidecar.address, "in", "out"]
    total = 0

    async def piped(count: int) -> None:
        async with Client(sidecar.address) as client:

            async def has_come() -> bool:
                return len(await found(client, "out")) >= count

            await until(has_come)

    async def more(count: int) -> None:
        async with Client(sidecar.address) as client:
            await client.admin.create_topic("out") if not total else None
            await publish(client, "in", total, count, rows=50)

    for k in range(kills):
        asyncio.run(more(2000))
        before, total = total, total + 2000
        # It is killed when some of it has come; two of them at once are no worse.
        with running(pipe) as first:
            if k % 3 == 1:
                with running(pipe):
                    asyncio.run(piped(len(expected(before + 200 * (k % 10)))))
            elif k % 3 == 2:
                sidecar.restart()
            asyncio.run(piped(len(expected(before + 150 * (k % 10)))))
            first.kill()
    with running(pipe):
        asyncio.run(piped(len(expected(total))))

    async def check() -> None:
        async with Client(sidecar.address) as client:
            assert await found(client, "out") == expected(total)

    asyncio.run(check())


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_happens_each_output_is_there_once(
    shared_sidecar: Sidecar, topic: str, tmp_path: Path, seed: int
) -> None:
    """Runs that are given up anywhere, two at a time, with and without a cursor, while messages come."""
    dice = random.Random(seed)
    source, target = f"{topic}-in", f"{topic}-out"
    total = 0
    async with Client(shared_sidecar.address) as client:
        await client.admin.create_topic(target)
        for _ in range(STEPS):
            more = dice.randrange(1, 60)
            await publish(client, source, total, more, rows=dice.choice((1, 7, 50)))
            total += more
            runs = []
            for _ in range(dice.choice((1, 1, 2))):
                cursor = FileCursor(tmp_path / "cursor") if dice.random() < 0.5 else None
                one = run_lane(lane(client, source, target, cursor=cursor))
                runs.append(cancelled_at(dice.randrange(1, 60), one))
            # One that was fenced, or whose cursor was moved, says so.
            ends = await asyncio.gather(*runs, return_exceptions=True)
            for end in ends:
                assert isinstance(end, bool) or getattr(end, "reason", "") in ("FENCED", "CURSOR_MOVED"), end
            got = await found(client, target)
            assert got == expected(total)[: len(got)]
        await run_lane(lane(client, source, target))
        assert await found(client, target) == expected(total)


@pytest.mark.parametrize("saves_first", [True, False])
async def test_a_position_that_is_kept_apart_loses_or_doubles(
    shared_sidecar: Sidecar, topic: str, tmp_path: Path, saves_first: bool
) -> None:
    """The control: one that numbers its outputs itself and keeps its position, given up between the two."""
    source, target = f"{topic}-in", f"{topic}-out"
    cursor = FileCursor(tmp_path / "cursor")

    async def run(client: Client, *, gives_up: bool) -> None:
        kept = await cursor.read()
        async with (
            client.producer(target, "naive") as producer,
            client.reader(source, kept.position if kept else "earliest") as reader,
        ):
            async for stored in reader.batches():
                new = Kept(stored.position(len(stored) - 1))
                payloads = [p for payload in stored.payloads for p in outputs_of(payload or b"")]
                if saves_first:
                    await cursor.compare_and_set(kept, new)
                if gives_up and saves_first:
                    return
                if payloads:
                    await (await producer.send_batch(payloads))
                if gives_up:
                    return
                if not saves_first:
                    await cursor.compare_and_set(kept, new)
                kept = new

    total = 0
    async with Client(shared_sidecar.address) as client:
        await client.admin.create_topic(target)
        for _ in range(2):
            await publish(client, source, total, 30)
            total += 30
            await run(client, gives_up=True)
        await run(client, gives_up=False)
        async with client.reader(target) as reader:
            got = [m.payload async for m in reader]
    wanted = [payload for _, payload in expected(total)]
    if saves_first:
        assert set(wanted) - set(got)
    else:
        assert len(got) > len(set(got))
