"""`seqdedupe pipe` and `seqdedupe cursors`. Five seconds, one sidecar."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

from seqdedupe.client import Client, Kept, MessageId, Position
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from tests.client.proxy import Proxy

MAIN = "# may start warm\nfrom seqdedupe.cli.main import main; main()"

CODE = """
def shout(message):
    if message.payload == b"bad":
        raise ValueError("no")
    return message.payload.upper()

nothing = 5
"""


def run(sidecar: Sidecar, folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", MAIN, *arguments, "--address", sidecar.address],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LAST_RESORT_SECONDS,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
        check=False,
    )


async def publish(sidecar: Sidecar, topic: str, payloads: list[bytes]) -> None:
    async with Client(sidecar.address) as client, client.producer(topic, "p") as producer:
        await producer.send_batch(payloads)


def test_a_function_of_the_current_folder(shared_sidecar: Sidecar, topic: str, tmp_path: Path) -> None:
    (tmp_path / "shouting.py").write_text(CODE)
    asyncio.run(publish(shared_sidecar, topic, [b"one", b"two"]))
    pipe = ("pipe", topic, f"{topic}-out", "--name", "loud", "--function")
    done = run(shared_sidecar, tmp_path, *pipe, "shouting:shout")
    assert (done.returncode, done.stdout) == (0, "2 messages read, 2 outputs sent\n"), done.stderr
    done = run(shared_sidecar, tmp_path, *pipe, "shouting:shout", "--json")
    assert json.loads(done.stdout) == {"inputs": 1, "outputs": 1, "outputs_again": 1}
    done = run(shared_sidecar, tmp_path, *pipe, "shouting:shout")
    assert done.stdout == "1 message read, 1 output sent, 1 of them held already\n"
    assert run(shared_sidecar, tmp_path, "read", f"{topic}-out").stdout == "ONE\nTWO\n"
    asyncio.run(publish(shared_sidecar, topic, [b"three", b"bad"]))
    failed = run(shared_sidecar, tmp_path, *pipe, "shouting:shout")
    assert failed.returncode == 1
    assert "[FUNCTION_FAILED]" in failed.stderr
    for wrong in ("shouting", "shouting:whisper", "shouting:nothing", "nowhere:x", ":"):
        assert run(shared_sidecar, tmp_path, *pipe, wrong).returncode == 2


async def test_with_follow_it_waits_for_a_sidecar_that_is_not_there_yet(
    shared_sidecar: Sidecar, topic: str, tmp_path: Path
) -> None:
    (tmp_path / "shouting.py").write_text(CODE)
    await publish(shared_sidecar, topic, [b"one"])
    async with Proxy(shared_sidecar.address) as proxy:
        address = proxy.address
    words = ("pipe", topic, f"{topic}-out", "--name", "loud", "--function", "shouting:shout", "--follow")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", MAIN, *words, "--address", address),
        cwd=tmp_path,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )
    try:
        async with asyncio.timeout(LAST_RESORT_SECONDS):
            assert process.stderr is not None
            assert b"the pipe waits to go on" in await process.stderr.readline()
            async with Client(shared_sidecar.address) as client:
                await client.admin.create_topic(f"{topic}-out")
                back = Proxy(shared_sidecar.address, int(address.rpartition(":")[2]))
                async with back, client.reader(f"{topic}-out", follow=True) as reader:
                    assert (await anext(reader)).payload == b"ONE"
    finally:
        process.kill()
        await process.wait()


def test_cursors_are_listed_held_and_removed(shared_sidecar: Sidecar, topic: str, tmp_path: Path) -> None:
    asyncio.run(publish(shared_sidecar, topic, [b"one"]))
    assert "has none" in run(shared_sidecar, tmp_path, "cursors", topic).stdout

    async def move() -> None:
        async with Client(shared_sidecar.address) as client:
            await client.cursor(topic, "mailer").compare_and_set(None, Kept(Position(5, MessageId(5, 7), 7), "n"))

    asyncio.run(move())
    shown = run(shared_sidecar, tmp_path, "cursors", topic, "--hold", "mailer", "100").stdout.splitlines()
    # Its position is of another incarnation: all that the topic holds comes after it.
    heads = ["CURSOR", "INDEX", "LAG", "HOLDS", "MB", "NOTE"]
    assert [line.split() for line in shown] == [heads, ["mailer", "7", "1", "100", "n"]]
    (found,) = json.loads(run(shared_sidecar, tmp_path, "cursors", topic, "--json").stdout)
    position = {"incarnation": 5, "index": 7, "message_id": "5:7", "ownership": None}
    rest = {"note": "n", "hold_retention_in_mb": 100, "lag_messages": 1}
    assert found == {"name": "mailer", "position": position} | rest
    assert run(shared_sidecar, tmp_path, "cursors", topic, "--remove", "mailer", "--json").stdout == "[]\n"
    assert "[CURSOR_NOT_FOUND]" in run(shared_sidecar, tmp_path, "cursors", topic, "--remove", "mailer").stderr


def test_the_lag_of_a_pipe_whose_messages_have_no_outputs_becomes_zero_with_a_cursor(
    shared_sidecar: Sidecar, topic: str, tmp_path: Path
) -> None:
    (tmp_path / "shouting.py").write_text(
        "def some(message):\n    return message if message.payload == b'yes' else None\n"
    )
    asyncio.run(publish(shared_sidecar, topic, [b"no", b"no"]))
    pipe = ("pipe", topic, f"{topic}-out", "--name", "loud", "--cursor", "loud")

    def lag() -> int:
        done = run(shared_sidecar, tmp_path, *pipe, "--lag", "--json")
        assert done.returncode == 0, done.stderr
        return int(json.loads(done.stdout)["messages"])

    def copy() -> str:
        done = run(shared_sidecar, tmp_path, *pipe, "--function", "shouting:some")
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert copy() == "2 messages read, 0 outputs sent\n"
    assert lag() == 0
    asyncio.run(publish(shared_sidecar, topic, [b"yes", b"no", b"no"]))
    assert lag() == 3
    assert copy() == "3 messages read, 1 output sent\n"
    assert lag() == 0
    # Without its cursor, only the outputs are known.
    done = run(shared_sidecar, tmp_path, *pipe[:5], "--lag", "--json")
    assert json.loads(done.stdout)["messages"] == 2
