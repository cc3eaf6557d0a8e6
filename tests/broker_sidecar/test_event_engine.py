"""What is said to gRPC before it is imported."""

import os
import subprocess
import sys

import pytest

from broker_sidecar import __main__ as program

# Importing the sidecar's program, then a server: gRPC says on standard error which names it does not know.
PROGRAM = """
import asyncio, os
if names := os.environ.pop("NAMES", ""):
    os.environ["GRPC_EXPERIMENTS"] = names
import broker_sidecar.__main__
import grpc.aio
print(os.environ.get("GRPC_EXPERIMENTS"))
async def start():
    server = grpc.aio.server()
    await server.start()
    await server.stop(None)
asyncio.run(start())
"""


def _run(**environment: str) -> tuple[str, str]:
    """What the program prints, and what it says on standard error."""
    without = {name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=without | environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip(), done.stderr


def test_grpc_hears_of_it_and_knows_the_names() -> None:
    names, said = _run()
    assert names == program._THE_OLDER_WAY
    assert "nknown experiment" not in said


def test_a_name_that_grpc_does_not_know_would_be_told() -> None:
    _, said = _run(NAMES="-nobody_knows_this")
    assert "nobody_knows_this" in said


def test_what_the_environment_says_stays() -> None:
    names, said = _run(GRPC_EXPERIMENTS="-chosen_by_somebody")
    assert names == "-chosen_by_somebody"
    assert "chosen_by_somebody" in said


@pytest.mark.parametrize("installed", ["1.86.0", "2.0.0rc1"])
def test_a_later_grpc_is_told_nothing(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRPC_EXPERIMENTS", raising=False)
    monkeypatch.setattr(program, "version", lambda _: installed)
    program.turn_off_event_engine()
    assert "GRPC_EXPERIMENTS" not in os.environ
