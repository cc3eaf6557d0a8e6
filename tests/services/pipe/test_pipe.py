"""The pipe against a real sidecar: what it does, goes on from, and ends with. Half a minute, one or two sidecars."""

import asyncio
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from seqdedupe.client import Client, FencedError, Message, PositionError, SeqdedupeError, blocking
from seqdedupe.client.cursor import FileCursor, Kept
from seqdedupe.names import topic_name
from seqdedupe.services.pipe import BlockingPipe, Output, Pipe
from seqdedupe.services.pipe import pipe as pipe_module
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from tests.services.effects import until as wait_until
from tests.services.pipe.scene import (
    cancelled_at,
    expected,
    found,
    function,
    lane,
    outputs_of,
    publish,
    run_lane,
    until,
)


async def test_it_goes_on_from_what_the_target_holds(shared_sidecar: Sidecar, topic: str) -> None:
    source, target = f"{topic}-in", f"{topic}-out"
    async with Client(shared_sidecar.address) as client:
        await publish(client, source, 0, 200)
        pipe = Pipe(client, source, target, function, name="pipe")
        await pipe.run()
        assert await found(client, target) == expected(200)
        assert pipe.counts == {"inputs": 200, "outputs": len(expected(200)), "outputs_again": 0}
        # Another object, as in another process: nothing is kept but the target. The last input is asked for again.
        again = Pipe(client, source, target, function, name="pipe")
        await again.run()
        assert await found(client, target) == expected(200)
        assert again.counts["inputs"] < 7
        await publish(client, source, 200, 100)
        await again.run()
        assert await found(client, target) == expected(300)
        (name,) = [p.name for p in await client.admin.producers(target)]
        incarnation = (await client.ends(source)).last.incarnation
        assert name == f"pipe/{topic_name(source)}/{incarnation}"


async def test_a_target_of_deduplication_ids_is_refused_at_the_start(shared_sidecar: Sidecar, topic: str) -> None:
    source, target = f"{topic}-in", f"{topic}-out"
    async with Client(shared_sidecar.address) as client:
        await publish(client, source, 0, 20)
        await client.admin.create_topic(target, deduplication_mode="deduplication-id")
        for follow in (False, True):
            with pytest.raises(SeqdedupeError, match=f"{target} is a topic of deduplication IDs") as e:
                await Pipe(client, source, target, function, name="pipe").run(follow=follow)
            assert e.value.reason == "INVALID_OPTION"
            assert "seqdedupe topics create NAME" in e.value.hint
        await client.admin.create_topic(f"{target}-2")
        await Pipe(client, source, f"{target}-2", function, name="pipe").run()
        assert await found(client, f"{target}-2") == expected(20)


async def test_a_source_without_messages_and_names_that_cannot_be(shared_sidecar: Sidecar, topic: str) -> None:
    async with Client(shared_sidecar.address) as client:
        await client.admin.create_topic(topic)
        pipe = Pipe(client, topic, f"{topic}-out", function, name="pipe")
        await pipe.run()
        assert pipe.counts == {"inputs": 0, "outputs": 0, "outputs_again": 0}
        for source, name, reason in (
            ("nobody-made-it", "pipe", "TOPIC_NOT_FOUND"),
            (topic, "", "INVALID_NAME"),
            (topic, "x" * 200, "INVALID_NAME"),
            (topic, "a\nb", "INVALID_NAME"),
            ("no topic", "pipe", "INVALID_TOPIC_NAME"),
            (f"{topic}-out", "pipe", "INVALID_REQUEST"),
        ):
            with pytest.raises(SeqdedupeError) as caught:
                await Pipe(client, source, f"{topic}-out", function, name=name).run()
            assert caught.value.reason == reason


async def test_a_function_that_raises_ends_it_after_what_came_before(shared_sidecar: Sidecar, topic: str) -> None:
    source, target = f"{topic}-in", f"{topic}-out"
    is_broken = True

    def breaks(message: Message) -> Any:
        if is_broken and message.payload == b"100":
            raise ValueError("no such customer")
        return function(message)

    async with Client(shared_sidecar.address) as client:
        await publish(client, source, 0, 200)
        for follow in (False, True):
            with pytest.raises(SeqdedupeError) as caught:
                await Pipe(client, source, target, breaks, name="pipe").run(follow=follow)
            assert caught.value.reason == "FUNCTION_FAILED"
            assert caught.value.numbers["index"] == "100"
            assert isinstance(caught.value.__cause__, ValueError)
            assert await found(client, target) == expected(100)
        is_broken = False
        await Pipe(client, source, target, breaks, name="pipe").run()
        assert await found(client, target) == expected(200)


async def test_partitions_on_both_sides(shared_sidecar: Sidecar, topic: str) -> None:
    source, target = f"{topic}-in", f"{topic}-out"

    def keyed(message: Message) -> list[Output]:
        return [Output(payload, b"key%d" % (k % 5)) for k, payload in enumerate(outputs_of(message.payload or b""))]

    async with Client(shared_sidecar.address) as client:
        await client.admin.create_topic(source, partitions=3)
        await client.admin.create_topic(target, partitions=2)

        async def check(count: int) -> None:
            async with client.partitioned_reader(target) as reader:
                payloads = [m.payload async for m in reader]
            assert sorted(map(str, payloads)) == sorted(str(payload) for _, payload in expected(count))

        total = 0
        for k in range(1, 12):
            await publish(client, source, total, 40, keys=11)
            total += 40
            pipe = Pipe(client, source, target, keyed, name="pipe")
            await cancelled_at(9 * k, pipe.run())
            await pipe.run()
            await check(total)
        names = {p.name for p in await client.admin.producers(f"{target}-partition-0")}
        assert {name.split("/")[5] for name in names} == {f"{source}-partition-{k}" for k in range(3)}


async def test_cancelled_at_every_await_nothing_is_lost_or_doubled(shared_sidecar: Sidecar, topic: str) -> None:
    source, target = f"{topic}-in", f"{topic}-out"
    threads = threading.active_count()
    async with Client(shared_sidecar.address) as client:
        await client.admin.create_topic(target)
        total = k = 0
        was_cancelled = True
        while was_cancelled:
            k += 1
            await publish(client, source, total, 15)
            total += 15
            was_cancelled = await cancelled_at(k, run_lane(lane(client, source, target)))
            got = await found(client, target)
            assert got == expected(total)[: len(got)]
        assert got == expected(total)
        assert k > 10
        assert threading.active_count() <= threads + 1


async def test_of_two_the_later_one_works_and_the_other_ends_or_stands_by(
    shared_sidecar: Sidecar, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = f"{topic}-in", f"{topic}-out"
    monkeypatch.setattr(pipe_module, "STANDBY_FIRST_SECONDS", 0.3)
    monkeypatch.setattr(pipe_module, "_LOOK_SECONDS", 0.05)
    opened = threading.Event()
    goes_on = threading.Event()

    def waits(message: Message) -> Any:
        opened.set()
        goes_on.wait(LAST_RESORT_SECONDS)
        return function(message)

    async with Client(shared_sidecar.address) as client:
        await publish(client, source, 0, 100)
        first = asyncio.create_task(Pipe(client, source, target, waits, name="pipe").run())
        assert await asyncio.to_thread(opened.wait, LAST_RESORT_SECONDS)
        await Pipe(client, source, target, function, name="pipe").run()
        goes_on.set()
        with pytest.raises(FencedError):
            await first
        assert await found(client, target) == expected(100)
        # Both follow: anyone who of them works, all is piped once; and when one is gone the other one takes over.
        both = [asyncio.create_task(Pipe(client, source, target, function, name="pipe").run(follow=True)) for _ in "ab"]
        total = 100
        for ended in (None, 0, None):
            if ended is not None:
                both[ended].cancel()
                await asyncio.wait({both[ended]})
            for _ in range(5):
                await publish(client, source, total, 20)
                total += 20

                async def is_done(count: int = total) -> bool:
                    return len(await found(client, target)) >= len(expected(count))

                await until(is_done)
                assert await found(client, target) == expected(total)
        assert not both[1].done()
        both[1].cancel()
        await asyncio.wait({both[1]})


async def test_a_source_that_was_made_anew_is_piped_from_its_beginning(shared_sidecar: Sidecar, topic: str) -> None:
    source, target = f"{topic}-in", f"{topic}-out"
    async with Client(shared_sidecar.address) as client:
        await publish(client, source, 0, 50)
        following = asyncio.create_task(Pipe(client, source, target, function, name="pipe").run(follow=True))

        async def is_done() -> bool:
            return (await client.ends(target)).last.index + 1 == len(expected(50))

        await until_there(client, target)
        await until(is_done)
        await client.admin.delete_topic(source)
        await publish(client, source, 1000, 30)
        with pytest.raises(SeqdedupeError) as caught:
            await following
        assert caught.value.reason in ("POSITION_OF_ANOTHER_INCARNATION", "TOPIC_NOT_FOUND")
        await Pipe(client, source, target, function, name="pipe").run()
        # All of it, though its indexes are lower than those that were piped before.
        assert await found(client, target) == expected(50) + expected(30, 1000)


async def until_there(client: Client, topic: str) -> None:
    async def is_there() -> bool:
        return any(known.name == topic_name(topic) for known in await client.admin.topics())

    await until(is_there)


async def test_without_the_incarnation_in_the_name_a_new_source_is_lost(
    shared_sidecar: Sidecar, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above: why the name has it."""
    monkeypatch.setattr("seqdedupe.services.pipe.pipe.source_name", lambda name, topic, creation: f"{name}/{topic}")
    source, target = f"{topic}-in", f"{topic}-out"
    async with Client(shared_sidecar.address) as client:
        await publish(client, source, 0, 50)
        await Pipe(client, source, target, function, name="pipe").run()
        await client.admin.delete_topic(source)
        await publish(client, source, 1000, 80)
        await Pipe(client, source, target, function, name="pipe").run()
        lost = set(expected(80, 1000)) - set(await found(client, target))
        assert len(lost) > 20


async def test_a_target_that_was_made_anew_gets_all_again(shared_sidecar: Sidecar, topic: str, tmp_path: Path) -> None:
    source, target = f"{topic}-in", f"{topic}-out"
    async with Client(shared_sidecar.address) as client:
        await publish(client, source, 0, 50)
        following = Pipe(client, source, target, function, name="pipe", cursor=lambda _: FileCursor(tmp_path / "c"))
        running = asyncio.create_task(following.run(follow=True))

        async def is_kept() -> bool:
            kept = await FileCursor(tmp_path / "c").read()
            return kept is not None and kept.position.index == 49

        await until(is_kept)
        await client.admin.delete_topic(target)
        await publish(client, source, 50, 10)
        with pytest.raises(SeqdedupeError) as caught:
            await running
        assert caught.value.reason in ("DATA_LOSS", "TOPIC_NOT_FOUND")
        # The cursor says that 50 were read: but not for this target.
        await following.run()
        assert await found(client, target) == expected(60)


async def test_a_cursor_saves_reading_again_and_is_moved_by_one_alone(
    shared_sidecar: Sidecar, topic: str, tmp_path: Path
) -> None:
    source, target = f"{topic}-in", f"{topic}-out"

    def rarely(message: Message) -> Any:
        return message.payload + b"/0" if message.payload == b"3" else None

    async with Client(shared_sidecar.address) as client:
        await publish(client, source, 0, 300)
        cursor = FileCursor(tmp_path / "cursor")
        for cursors, read_again in ((None, 297), (lambda _: cursor, 0)):
            for _ in range(2):
                pipe = Pipe(client, source, target, rarely, name="pipe", cursor=cursors)
                await pipe.run()
            assert pipe.counts["inputs"] == read_again
        kept = await cursor.read()
        assert kept is not None
        assert kept.position == await client.position_at(source, 299)
        assert await found(client, target) == [(3, b"3/0")]
        # For another history than the source's: the cursor finds it out.
        diverged = kept.position._replace(ownership=kept.position.ownership ^ 1)
        await cursor.compare_and_set(kept, Kept(diverged, kept.note))
        await publish(client, source, 300, 1)
        with pytest.raises(PositionError) as caught:
            await Pipe(client, source, target, rarely, name="pipe", cursor=lambda _: cursor).run()
        assert caught.value.reason == "POSITION_DIVERGED"
        await client.admin.create_topic(f"{target}-2", partitions=2)
        with pytest.raises(SeqdedupeError) as refused:
            await Pipe(client, source, f"{target}-2", rarely, name="pipe", cursor=lambda _: cursor).run()
        assert refused.value.reason == "INVALID_REQUEST"


@pytest.mark.parametrize("has_cursor", [False, True])
async def test_what_is_ready_is_sent_while_the_function_takes_long(
    shared_sidecar: Sidecar, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_cursor: bool
) -> None:
    """And when it is stopped it ends after the message under way, wherever that stands in its batch."""
    monkeypatch.setattr(pipe_module, "SEND_SECONDS", 0.05)
    monkeypatch.setattr(pipe_module, "CURSOR_SECONDS", 0.0)
    source, target = f"{topic}-in", f"{topic}-out"
    may_go_on = threading.Event()
    called: list[int] = []
    cursor = FileCursor(tmp_path / "cursor")

    def slow(message: Message) -> Any:
        called.append(message.index)
        if message.index == 40:
            may_go_on.wait(LAST_RESORT_SECONDS)
        return function(message)

    async with Client(shared_sidecar.address) as client:
        await client.admin.create_topic(target)
        await publish(client, source, 0, 100, rows=100)
        pipe = Pipe(client, source, target, slow, name="pipe", cursor=(lambda _: cursor) if has_cursor else None)
        running = asyncio.create_task(pipe.run(follow=True))

        async def has_come() -> bool:
            return await found(client, target) == expected(40)

        await until(has_come)
        pipe.stop()
        await asyncio.sleep(0)
        may_go_on.set()
        await running
        assert called[-1] == 40
        assert await found(client, target) == expected(41)
        if has_cursor:
            kept = await cursor.read()
            assert kept is not None
            assert kept.position == await client.position_at(source, 40)
        await Pipe(
            client, source, target, function, name="pipe", cursor=(lambda _: cursor) if has_cursor else None
        ).run()
        assert await found(client, target) == expected(100)


async def test_what_waits_is_stopped_at_once(tmp_path: Path, shared_sidecar: Sidecar, topic: str) -> None:
    """For a sidecar, or for messages; a pipe that was stopped does not begin."""
    async with Client(f"unix:{tmp_path / 'nobody'}") as client:
        pipe = Pipe(client, "in", "out", function, name="pipe")
        running = asyncio.create_task(pipe.run(follow=True))
        await asyncio.sleep(0)
        pipe.stop()
        await running
        await pipe.run(follow=True)
    async with Client(shared_sidecar.address) as client:
        await client.admin.create_topic(f"{topic}-in")
        pipe = Pipe(client, f"{topic}-in", f"{topic}-out", function, name="pipe")
        running = asyncio.create_task(pipe.run(follow=True))

        async def has_begun() -> bool:
            return bool(pipe._lanes and pipe._lanes[0]._calling)

        await until(has_begun)
        pipe.stop()
        await running


def test_a_command_that_is_told_to_end_sends_what_is_ready(shared_sidecar: Sidecar, topic: str, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import pathlib, time\n"
        "def function(message):\n"
        "    pathlib.Path(str(message.index)).touch()\n"
        "    time.sleep(0.01 if message.index < 10 else 1)\n"
        "    return message.payload\n"
    )
    asyncio.run(_publish(shared_sidecar, f"{topic}-in"))
    command = [str(Path(sys.executable).with_name("seqdedupe")), "pipe", f"{topic}-in", f"{topic}-out"]
    command += ["--function", "slow:function", "--name", "slow", "--follow", "--address", shared_sidecar.address]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        wait_until((tmp_path / "10").exists)
        process.terminate()
        said = process.communicate(timeout=LAST_RESORT_SECONDS)[0]
    assert process.returncode == 0
    called = len(list(tmp_path.glob("[0-9]*")))
    assert f"{called} outputs sent" in said
    with blocking.Client(shared_sidecar.address) as client, client.reader(f"{topic}-out") as reader:
        assert [message.payload for message in reader] == [b"%d" % n for n in range(called)]


def test_with_threads_the_function_is_called_where_it_waits(shared_sidecar: Sidecar, topic: str) -> None:
    source, target = f"{topic}-in", f"{topic}-out"
    threads = set()

    def noting(message: Message) -> Any:
        threads.add(threading.current_thread())
        if message.payload == b"77" and interrupts:
            raise KeyboardInterrupt
        return function(message)

    interrupts = True
    asyncio.run(_publish(shared_sidecar, source))
    with blocking.Client(shared_sidecar.address) as client:
        pipe = BlockingPipe(client, source, target, noting, name="pipe")
        with pytest.raises(KeyboardInterrupt):
            pipe.run(follow=True)
        interrupts = False
        pipe.run()
        assert threads == {threading.current_thread()}
        with client.reader(target) as reader:
            assert [m.payload for m in reader] == [payload for _, payload in expected(100)]
        assert pipe.counts["inputs"] <= 100


async def _publish(sidecar: Sidecar, topic: str) -> None:
    async with Client(sidecar.address) as client:
        await publish(client, topic, 0, 100)
