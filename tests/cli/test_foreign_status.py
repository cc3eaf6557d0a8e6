"""The commands that follow, where a proxy answers for the sidecar: at work they wait, and at a start they say so."""

import asyncio
import os
import subprocess
from pathlib import Path

import grpc
import pytest

from seqdedupe.cli.common import connect
from seqdedupe.client import Client, UnavailableError
from seqdedupe.client.credentials import NO_CREDENTIALS
from seqdedupe.testing import Sidecar
from tests.cli.conftest import COMMAND, TIMEOUT_SECONDS, lines
from tests.client.foreign import CODES, answering, answering_http
from tests.client.helpers import read_all, until, until_stored
from tests.processes import running

each_code = pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)

PUBLISH = (COMMAND, "publish", "grows", "--topic", "t", "--producer", "p")


@each_code
async def test_what_follows_goes_on(tmp_path: Path, code: grpc.StatusCode) -> None:
    file, read = tmp_path / "grows", tmp_path / "read"
    file.write_bytes(lines(10))
    with Sidecar(tmp_path / "sidecar") as sidecar, read.open("wb") as out:
        environment = os.environ | {"SEQDEDUPE_ADDRESS": sidecar.address}
        async with Client(sidecar.address) as client:
            await client.admin.create_topic("t")
            with (
                running([*PUBLISH, "--follow"], cwd=tmp_path, env=environment) as publishes,
                running([COMMAND, "read", "t", "--follow"], env=environment, stdout=out) as reads,
            ):
                await until(lambda: read.read_bytes() == lines(10))
                sidecar.kill()
                async with answering(sidecar.address, code) as calls:
                    file.write_bytes(lines(20))
                    # A producer that has nothing to send need not come.
                    await until(lambda: calls["PublishStream"] >= 3 and calls["ReadStream"] >= 3)
                await asyncio.to_thread(sidecar.start)
                with file.open("ab") as end:
                    end.write(lines(30)[len(lines(20)) :])
                await until_stored(client, "t", 30)
                await until(lambda: len(read.read_bytes()) >= len(lines(30)))
                assert publishes.poll() is None
                assert reads.poll() is None
        assert read.read_bytes() == lines(30)
        assert [message.sequence_id for message in await read_all(sidecar, "t")] == list(range(30))


@each_code
@pytest.mark.parametrize(
    "command",
    [
        (*PUBLISH, "--follow"),
        PUBLISH,
        (COMMAND, "read", "t", "--follow"),
        (COMMAND, "read", "t"),
        (COMMAND, "pipe", "t", "out", "--function", "builtins:print", "--name", "pipe", "--follow"),
    ],
    ids=["publish --follow", "publish", "read --follow", "read", "pipe --follow"],
)
async def test_what_starts_names_a_proxy_in_a_line(
    tmp_path: Path, code: grpc.StatusCode, command: tuple[str, ...]
) -> None:
    (tmp_path / "grows").write_bytes(lines(10))
    sidecar = Sidecar(tmp_path / "sidecar")
    environment = os.environ | {"SEQDEDUPE_ADDRESS": sidecar.address}
    async with answering(sidecar.address, code):
        done = await asyncio.to_thread(
            subprocess.run, command, cwd=tmp_path, env=environment, capture_output=True, timeout=TIMEOUT_SECONDS
        )
    assert done.returncode == 1
    assert done.stdout == b""
    [said] = done.stderr.splitlines()
    assert f"{sidecar.address} answered {code.name} without the error details that a sidecar sends".encode() in said
    assert b"the likely cause is a proxy on the way: not here [NOT_A_SIDECAR]" in said


@pytest.mark.parametrize("status", [503, 500])
async def test_what_starts_behind_a_proxy_without_a_sidecar_says_so(
    monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """At once; with `--follow` the sidecar is waited for, as one that is not up yet."""

    class Waits(Exception):
        pass

    def tell(why: UnavailableError) -> None:
        raise Waits(str(why))

    monkeypatch.setattr("seqdedupe.cli.common.told_credentials", lambda: NO_CREDENTIALS)
    async with answering_http(status) as (address, _):
        with pytest.raises(UnavailableError, match=f"status: {status}") as caught:
            await asyncio.to_thread(connect, address)
        with pytest.raises(Waits, match="UNREACHABLE"):
            await asyncio.to_thread(connect, address, tell)
    assert caught.value.reason == "UNREACHABLE"
    assert "a proxy" in caught.value.hint


@pytest.mark.parametrize("follows", [False, True])
async def test_one_that_is_overloaded_is_named_in_plain_words_and_waited_for(tmp_path: Path, follows: bool) -> None:
    """gRPC then ends calls with CANCELLED before anybody has looked at them."""
    sidecar = Sidecar(tmp_path / "sidecar")
    command = [COMMAND, "read", "t", *["--follow"] * follows, "--address", sidecar.address]
    async with answering(sidecar.address, grpc.StatusCode.CANCELLED) as calls:
        with running(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stderr is not None
            said = await asyncio.to_thread(process.stderr.readline)
            assert b"ended the call without an answer (CANCELLED): it is overloaded, or ends" in said
            assert b"[UNREACHABLE]" in said
            if follows:
                await until(lambda: calls["GetVersion"] >= 3)
                assert process.poll() is None
            else:
                assert await asyncio.to_thread(process.wait, TIMEOUT_SECONDS) == 1
